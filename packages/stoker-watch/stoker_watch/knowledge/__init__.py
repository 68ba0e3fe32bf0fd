"""What is known about the world, as TOML files: a row more is a change of data. `read_toml` reads one of them; the
schema and the code that uses it are where it is needed. No rules and no computations here.

apis.toml: what the fix of a cause is called in each framework (`diagnosis/causes/cause.py`).
calls.toml: names of functions in the source of jobs (`recording/calls.py`).
causes.toml: thresholds and fixes of the causes of lost time (`diagnosis/causes/cause.py`).
clouds.toml: how firmware names its cloud (`recording/telemetry/environment.py`).
commands.toml: what the parameters of commands mean (`cli/__init__.py`).
curves.toml: curves and charts of the report (`report/series.py`).
data_errors.toml, errors.toml: what errors say (`errors.py`).
endings.toml: the ways in which jobs end (`diagnosis/endings.py`).
environment.toml: what of its environment a run records (`recording/telemetry/environment.py`).
findings.toml: what findings of `check` and `report` mean (`diagnosis/reference.py`).
frames.toml: functions of frameworks in stacks (`recording/frames.py`).
kernel_log.toml: lines of the kernel about failures (`recording/telemetry/machine.py`).
mistakes.toml: debugging aids and mistakes in the loops of others (`diagnosis/causes/mistakes.py`).
notes.toml: notes of `stoker why` (`diagnosis/notes.py`).
output_lines.toml: lines of progress and of a normal end in the output of any program (`diagnosis/endings.py`).
package_names.toml: packages of modules with other names (`diagnosis/ending_details.py`).
prices.toml: list prices of machines (`hardware/prices.py`).
problems.toml: what can be wrong with a data set (`stoker/data/validation/problems.py`).
progress_lines.toml: how jobs print their progress (`watch/output.py`).
python_layouts.toml: where versions of CPython keep their stacks (`recording/remote_stacks.py`).
quantities.toml: what alerts and Prometheus read of a running job (`monitor/alerts.py`).
report_words.toml: meanings of phases, stages, experiments and error types (`report/explain.py`).
secrets.toml: names and forms of secrets (`secrets.py`).
storage_failures.toml: failed requests to a bucket, and their messages (`storage/failures.py`).
tpus.toml: slices of TPUs (`hardware/tpu.py`).
variables.toml: environment variables (`stoker/preflight/variables.py`).
xids.toml: NVIDIA's Xid errors (`diagnosis/causes/gpu.py`).
"""

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def parse_toml(text: str) -> dict[str, Any]:
    """Raises ValueError."""
    return tomllib.loads(text)


def read_toml(name: str, folder: Path = Path(__file__).parent) -> dict[str, Any]:
    """The tables of a file of this folder, in its order. Each call parses it: callers cache what they need."""
    return parse_toml((folder / name).read_text(encoding="utf-8"))
