"""stoker: trains object detectors, keeps the device busy, and shows where every device-second went.

```python
import stoker

result = stoker.train("images/", epochs=12, weights="imagenet")  # the settings of `stoker train`
model = stoker.load(result.run)  # a run folder, a .safetensors or .onnx file
for prediction in model.predict(["street.jpg"]):
    print(prediction.boxes, prediction.scores, prediction.names)

with stoker.measure("runs/mine") as m:  # your own training loop; docs/watch.md
    for batch in m.data(loader):
        with m.step():
            ...
```

Names are imported when they are first used, so that `import stoker` is fast and works where torch is not installed.
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from stoker_watch.hardware.cgroup import set_spin_count

if TYPE_CHECKING:
    from stoker.api import check, evaluate, export_model, plan, train
    from stoker.config.keywords import Settings
    from stoker.inference.model import Model, load
    from stoker.inference.prediction import Prediction
    from stoker.training.local_ranks import Result
    from stoker_watch.errors import StokerError
    from stoker_watch.monitor.options import MonitoringOptions
    from stoker_watch.recording.measure import measure
    from stoker_watch.runs.evaluation import Metrics

set_spin_count()  # before torch loads OpenMP

_HOME = {
    "Metrics": "stoker_watch.runs.evaluation",
    "Model": "stoker.inference.model",
    "MonitoringOptions": "stoker_watch.monitor.options",
    "Prediction": "stoker.inference.prediction",
    "Result": "stoker.training.local_ranks",
    "Settings": "stoker.config.keywords",
    "StokerError": "stoker_watch.errors",
    "check": "stoker.api",
    "evaluate": "stoker.api",
    "export_model": "stoker.api",
    "load": "stoker.inference.model",
    "measure": "stoker_watch.recording.measure",
    "plan": "stoker.api",
    "train": "stoker.api",
}
__all__ = [
    "Metrics", "Model", "MonitoringOptions", "Prediction", "Result", "Settings", "StokerError", "check", "evaluate",
    "export_model", "load", "measure", "plan", "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("stoker")
    if name not in _HOME:
        raise AttributeError(f"module 'stoker' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
