"""`stoker tune`: measures configurations against each other."""

import functools
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from stoker.config.settings import Config
from stoker_watch.cli import described, show
from stoker_watch.printable import print_text


@described
def tune(
    target: str,
    /,
    *,
    config_file: Annotated[Path | None, Parameter(name="--config")] = None,
    lr: bool = False,
    budget: str = "10min",
    levers: tuple[str, ...] = (),
    allow: Literal["accuracy"] | None = None,
    devices: int = 1,
    out: Path | None = None,
    json: bool = False,
) -> None:
    """Finds the settings with which a training runs faster here, by measuring one change after the other.

    Writes config.toml for `stoker train --config`, with only those changes whose gain was
    measured (95 % interval above 1) and that train the same.
    """
    from stoker.cli.train import join_settings
    from stoker.tuning.learning_rate import print_lr_result, tune_lr
    from stoker.tuning.runner import TuneRequest, print_result
    from stoker.tuning.runner import tune as run_tuning
    from stoker_watch.durations import parse_time_s

    request = TuneRequest(
        target=target,
        config=join_settings(Config(), config_file, None),
        budget_s=parse_time_s(budget, "--budget"),
        levers=tuple(name for names in levers for name in names.split(",")),
        allow_accuracy=allow == "accuracy",
        out=out,
        devices=devices,
    )

    on_progress = functools.partial(print_text, file=sys.stderr)
    if lr:
        show(tune_lr(request, on_progress), print_lr_result, json=json)
    else:
        show(run_tuning(request, on_progress), print_result, json=json)
