"""What all places that run containers share: rules of the image and the variables, the MIG slices that GPUs have, and
documents whose optional fields are None."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from stoker.errors import ConfigError, UsageError
from stoker.knowledge import read_toml
from stoker.launching.spec import LaunchSpec

PORT = 29500
"""Where rank 0 listens: torchrun's port. Each node has an address of its own, so jobs cannot meet there."""
RANK_VARIABLES = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
"""How a node learns its place (`training/cluster.py`)."""
FAILING_EXIT_CODES = (2, 3, 4, 6)
"""After which the same command would fail again: usage, pre-flight, data, divergence. All others are tried again, 75
(preempted, state saved) without being counted where the place can tell."""
MIG_SLICES = msgspec.convert(read_toml("mig.toml"), dict[str, tuple[str, ...]])
"""By accelerator (`planning/accelerators.py`)."""
_IMAGE = re.compile(
    r"(?:[A-Za-z0-9.-]+(?::\d+)?/)?[a-z0-9]+(?:[._/-]+[a-z0-9]+)*(?::[\w][\w.-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
)


def check_container(spec: LaunchSpec, place: str) -> None:
    """Raises UsageError for what no place with containers takes."""
    if spec.image is not None and not _IMAGE.fullmatch(spec.image):
        raise ConfigError(
            f"--image {spec.image!r} is not the name of a container image.",
            cause="REGISTRY/NAME:TAG; the name is in lower case",
            choices=["europe-docker.pkg.dev/PROJECT/REPOSITORY/stoker:1"],
        )
    if reserved := RANK_VARIABLES & spec.env.keys():
        raise ConfigError(
            f"--env {min(reserved)}: {place} gives each node its own.", fix="leave it out; --nodes and --devices decide"
        )
    if spec.is_elastic:
        raise UsageError(
            f"{place} starts a fixed number of nodes, --nodes asks for {spec.min_nodes} to {spec.max_nodes}.",
            fix=f"--nodes {spec.min_nodes}; the run can be continued with another number",
        )


def check_mig_slice(name: str, accelerator: str | None) -> None:
    """Raises UsageError for a slice that the GPU, or if it is unknown any GPU, does not have."""
    if accelerator is not None and accelerator not in MIG_SLICES:
        raise UsageError(f"A {accelerator} has no MIG slices.", choices=sorted(MIG_SLICES), fix="leave out --gpu")
    gpus = [accelerator] if accelerator is not None else list(MIG_SLICES)
    slices = list(dict.fromkeys(name for gpu in gpus for name in MIG_SLICES[gpu]))
    if name not in slices:
        owner = f"A {accelerator}" if accelerator is not None else "No GPU"
        raise UsageError(f"{owner} has {'no ' if accelerator else 'a '}MIG slice {name}.", choices=slices)


def read_template(name: str) -> Any:
    """A document of this folder with `$name` in place of values."""
    return yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8"))


def fill(template: Any, values: Mapping[str, Any]) -> Any:
    """A template with the values of its `$name`; fields that are None are left out."""
    if isinstance(template, dict):
        filled = {name: fill(value, values) for name, value in template.items()}
        return {name: value for name, value in filled.items() if value is not None}
    if isinstance(template, list):
        return [fill(value, values) for value in template]
    if isinstance(template, str) and template.startswith("$") and template[1:] in values:
        return fill(values[template[1:]], {})
    return template
