"""What the trainer knows about the world, as TOML files; more is in `stoker_watch/knowledge/`.

assumptions.toml: what `stoker plan` assumes (`planning/duration.py`, `planning/predict.py`).
check_files.toml, check_machine.toml, job_rules.toml: findings of `stoker check`, and when (`preflight/catalog.py`).
commands.toml: what the parameters of the trainer's commands mean (`stoker_watch/cli/__init__.py`).
companions.toml: packages that need each other (`preflight/static/companions.py`).
conflicts.toml: settings that exclude each other (`training/defaults/checks.py`).
detr_weights.toml: names in published weights of transformers (`models/detr_weights.py`).
dual_regions.toml: locations of buckets that are two regions (`preflight/cloud.py`).
export_formats.toml: formats that are made from exported files (`export/write.py`).
flags.toml: flags of other tools (`config/flag_names.py`).
gpus.toml: peaks of GPUs, by data sheets (`planning/machines.py`).
launch.toml: states of jobs in the words of their places, flags of `stoker launch` (`launching/spec.py`).
levers.toml: what `stoker tune` tries (`tuning/levers.py`).
links.toml: what links between ranks must carry (`preflight/network.py`).
machines.toml: machines of clouds (`planning/machines.py`).
mig.toml: MIG slices of GPUs (`launching/request.py`).
models.toml: detector architectures (`config/architectures.py`).
pipeline_fields.toml: fields of the TensorFlow Object Detection API (`migration/fields.py`).
plan_errors.toml: how far `stoker plan` was off (`planning/predict.py`).
recipes.toml, settings.toml: what models of a kind are trained with (`config/settings.py`); bounds and defaults of
    settings (`config/settings.py`).
search.toml: what `stoker search` tries (`search/space.py`).
source_names.toml: images, packages and calls in files of others (`preflight/static/tables.py`).
versions.toml: which versions belong together (`preflight/static/tables.py`).
"""

from pathlib import Path
from typing import Any

from stoker_watch import knowledge


def read_toml(name: str) -> dict[str, Any]:
    """The tables of a file of this folder, in its order. Each call parses it: callers cache what they need."""
    return knowledge.read_toml(name, Path(__file__).parent)
