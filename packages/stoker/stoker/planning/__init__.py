"""What a training will need and cost, before it runs: `stoker plan`, and the full `stoker check`. Here: what the user
asks of `check`, its flags, which need no torch."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stoker.config.settings import Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckRequest:
    """What to check. Without data, only the machine is checked."""

    config: Annotated[Config, Parameter(name="*", show=False)] = Config()  # noqa: RUF009  # frozen
    devices: int = 1
    """GPUs of this machine that train, as for `stoker train`."""
    run_dir: str | None = None
    """Folder of the run, as for `stoker train`, also in a bucket."""
    dockerfile: Path | None = None
    """Versions of TensorFlow, PyTorch, CUDA, cuDNN and driver that do not fit together, line by line."""
    requirements: Path | None = None
    """The same in a requirements.txt."""
    script: Path | None = None
    """What makes a training script slow: its input pipeline, its strategy."""
    job: Path | None = None
    """What a Slurm batch script or a Kubernetes manifest asks for and starts, and what contradicts it."""
    driver: str | None = None
    """NVIDIA driver of the machine that will run these files, which is not this one: 535."""
    deep: bool = False
    """Take minutes: larger measurements, longer time limits."""
    env: Annotated[Mapping[str, str], Parameter(parse=False)] = dataclasses.field(default_factory=lambda: os.environ)
