"""stoker_watch: watches training jobs of any framework, and shows where every GPU-second went.

```python
import stoker_watch

with stoker_watch.measure("runs/mine") as m:  # your own training loop; docs/watch.md
    for batch in m.data(loader):
        with m.step():
            ...
print(stoker_watch.explain_run("runs/mine").findings)
stoker_watch.write_report("runs/mine")
```

Names are imported when they are first used, so that `import stoker_watch` is fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker_watch.errors import StokerError
    from stoker_watch.monitor.monitor import monitoring
    from stoker_watch.monitor.options import MonitoringOptions
    from stoker_watch.recording.measure import measure
    from stoker_watch.report.explain import explain_run
    from stoker_watch.report.html import write_report

_HOME = {
    "MonitoringOptions": "stoker_watch.monitor.options",
    "StokerError": "stoker_watch.errors",
    "explain_run": "stoker_watch.report.explain",
    "measure": "stoker_watch.recording.measure",
    "monitoring": "stoker_watch.monitor.monitor",
    "write_report": "stoker_watch.report.html",
}
__all__ = ["MonitoringOptions", "StokerError", "explain_run", "measure", "monitoring", "write_report"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'stoker_watch' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
