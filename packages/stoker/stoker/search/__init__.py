"""`stoker search`: hyper-parameter search on Optuna. `space.py`: what is searched; `study.py`: the shared study, which
trial is next and what it tries; `worker.py`: one worker; `start.py`: the command; `page.py`: the report. Here: what the
user asks for, the flags of the command, which needs no Optuna."""

import dataclasses
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stoker.config.settings import Config
from stoker.launching.spec import LaunchRequest, PlaceOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """What the user asks for."""

    space: Path | None = None
    """File of what is searched: `lr = { low = 1e-4, high = 1e-2, log = true }` (docs/tuning.md). Default: a few
    settings around the derived ones."""
    trials: int = 50
    """Trials in all, pruned and failed ones included."""
    parallel: int = 1
    """Workers that train at the same time."""
    objective: str = "ap"
    """ap, or ap and one of latency, step_time and memory: ap,latency."""
    pruner: str | None = None
    """none, halving or hyperband: stops trials that are behind. Default: halving; none with two objectives."""
    launcher: str = "local"
    """Where the workers run: local, slurm (a job array) or ray."""
    dry_run: Annotated[bool, Parameter(negative="")] = False
    """Print the space and the expected cost, and train nothing."""
    config: Annotated[Config, Parameter(name="*")] = Config()  # noqa: RUF009  # frozen
    """Settings of all trials; its seed is that of the search, too."""
    launch: Annotated[LaunchRequest, Parameter(name="*", group="Launch")] = LaunchRequest()  # noqa: RUF009  # frozen
    options: Annotated[PlaceOptions, Parameter(name="*", group="Place")] = PlaceOptions()  # noqa: RUF009  # frozen
