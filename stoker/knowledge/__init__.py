"""What is known about the world, as TOML files: a row more is a change of data. `read_toml` reads one of them; the
schema and the code that uses it are where it is needed. No rules and no computations here.

apis.toml: what the fix of a cause is called in each framework (`diagnosis/causes/cause.py`).
assumptions.toml: what `stoker plan` assumes (`planning/duration.py`, `planning/predict.py`).
causes.toml: thresholds and fixes of the causes of lost time (`diagnosis/causes/cause.py`).
check_files.toml, check_machine.toml: what the findings of `stoker check` say (`preflight/catalog.py`).
clouds.toml: how firmware names its cloud (`profiling/telemetry/environment.py`).
commands.toml: what the parameters of commands mean (`cli/__init__.py`).
conflicts.toml: settings that exclude each other (`training/defaults/checks.py`).
curves.toml: curves and charts of the report (`report/series.py`).
dual_regions.toml: locations of buckets that are two regions (`preflight/cloud.py`).
endings.toml: the ways in which jobs end (`diagnosis/endings.py`).
data_errors.toml, errors.toml: what errors say (`errors.py`).
export_formats.toml: formats that are made from exported files (`export/write.py`).
findings.toml: what findings of `check`, `report` and `launch advise` mean (`diagnosis/reference.py`).
flags.toml: flags of other tools (`config/flag_names.py`).
frames.toml: functions of frameworks in stacks (`profiling/frames.py`).
gpus.toml: peaks of GPUs, by data sheets (`planning/machines.py`). tpus.toml: slices of TPUs (`hardware/tpu.py`).
kernel_log.toml: lines of the kernel about failures (`profiling/telemetry/machine.py`).
launch.toml: states of jobs in the words of their places (`launching/spec.py`).
levers.toml: what `stoker tune` tries (`tuning/levers.py`).
links.toml: what links between ranks must carry (`preflight/network.py`).
machines.toml, prices.toml: machines of clouds (`planning/machines.py`) and their list prices
    (`hardware/prices.py`).
mig.toml: MIG slices of GPUs (`launching/request.py`).
mistakes.toml: debugging aids and mistakes in the loops of others (`diagnosis/causes/mistakes.py`).
models.toml: detector architectures (`config/architectures.py`).
notes.toml: notes of `stoker why` (`diagnosis/notes.py`).
output_lines.toml: lines of progress and of a normal end in the output of any program (`diagnosis/endings.py`).
package_names.toml: packages of modules with other names (`diagnosis/ending_details.py`).
pipeline_fields.toml: fields of the TensorFlow Object Detection API (`migration/fields.py`).
plan_errors.toml: how far `stoker plan` was off (`planning/predict.py`).
problems.toml: what can be wrong with a data set (`data/validation/problems.py`).
progress_lines.toml: how jobs print their progress (`watch/output.py`).
quantities.toml: what alerts and Prometheus read of a running job (`monitor/alerts.py`).
recipes.toml, settings.toml: what models of a kind are trained with (`config/settings.py`); bounds and defaults of
    settings (`config/settings.py`).
refusals.toml: how refusals of a store are repaired (`preflight/access.py`).
report_words.toml: meanings of phases, stages, experiments and error types (`report/explain.py`).
search.toml: what `stoker search` tries (`search/space.py`).
secrets.toml: names and forms of secrets (`secrets.py`).
source_names.toml: images, packages and calls in files of others (`preflight/static/tables.py`).
storage_failures.toml: failed requests to a bucket, and their messages (`storage/failures.py`).
variables.toml: environment variables (`preflight/variables.py`).
versions.toml: which versions belong together (`preflight/static/tables.py`).
xids.toml: NVIDIA's Xid errors (`diagnosis/causes/gpu.py`).
"""

import tomllib
from pathlib import Path
from typing import Any


def read_toml(name: str) -> dict[str, Any]:
    """The tables of a file of this folder, in its order. Each call parses it: callers cache what they need."""
    return tomllib.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))
