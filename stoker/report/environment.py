"""environment.json of a run: hardware, versions and variables of its newest attempt. Read for information only: nothing
fails when it is missing or damaged. It is written by `stoker/profiling/`."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stoker.report import format as fmt
from stoker.runs.records import ENVIRONMENT

NOT_COMPARED = frozenset({"argv", "cwd"})
PER_RUN_VARIABLES = frozenset({"MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "SLURM_JOB_ID"})
"""Variables that differ in every run."""


def read_environment(run: Path) -> dict[str, Any]:
    """The content; empty if the file is missing or damaged."""
    try:
        environment = json.loads((run / ENVIRONMENT).read_bytes())
    except (OSError, ValueError):
        return {}
    return environment if isinstance(environment, dict) else {}


def gpu_names(environment: Mapping[str, Any]) -> list[str]:
    """One name per GPU; "unnamed" where the driver gave none."""
    gpu = environment.get("gpu")
    gpus = gpu.get("gpus") if isinstance(gpu, dict) else None
    if not isinstance(gpus, list):
        return []
    return [str(entry.get("name") or "unnamed") if isinstance(entry, dict) else "unnamed" for entry in gpus]


def count_names(names: list[str]) -> str:
    """2 × Tesla T4."""
    return ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))


def flatten(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Nested values as rows: `packages.torch`, `2.15.0`."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flatten(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for n, inner in enumerate(value):
            yield from flatten(inner, f"{name}[{n}]")
    elif isinstance(value, list):
        yield name, " ".join(map(str, value)) or "none"
    elif name.endswith("_bytes") and isinstance(value, int):
        yield name, fmt.size(value)
    else:
        yield name, fmt.MISSING if value is None or value == {} else str(value)


def comparable(environment: Mapping[str, Any]) -> dict[str, str]:
    """The rows that can be equal in two runs: without command line, ports and serial numbers."""
    kept = {name: value for name, value in environment.items() if name not in NOT_COMPARED}
    for name, dropped in (("gpu", frozenset({"gpus"})), ("variables", PER_RUN_VARIABLES)):
        if isinstance(kept.get(name), dict):
            kept[name] = {key: value for key, value in kept[name].items() if key not in dropped}
    rows = {name: value for name, value in flatten(kept) if value != fmt.MISSING}
    names = gpu_names(environment)
    return rows | ({"gpu": count_names(names)} if names else {})
