"""`stoker.train`: the command as a function, with the same settings and the same defaults.

`stoker.load` and the model that it returns are in `stoker/inference/model.py`. The training itself is
`stoker/training/loop.py`.
"""

import os
from typing import Literal, Unpack

from stoker.config.keywords import Settings
from stoker.config.settings import from_fields
from stoker.monitor.options import MonitoringOptions
from stoker.training import loop


def train(
    data: str | os.PathLike[str] | None = None,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    accept_changed_data: bool = False,
    trace: bool = False,
    log_format: Literal["text", "json"] = "text",
    monitor: MonitoringOptions = MonitoringOptions(),  # noqa: B008  # frozen
    **settings: Unpack[Settings],
) -> loop.Result:
    """Trains a detector, as `stoker train` does; returns the run folder, the steps and the final metrics.

    data: folder or file with labeled images, a URI, or "demo", a small data set that stoker draws.
    run_dir: folder of the run, default `runs/<data>-<model>-<n>`. An unfinished run there is continued.
    resume: an unfinished run to continue with its own settings; `data` is not needed then.
    accept_changed_data: continue an unfinished run also if images, boxes or class names of its data set changed.
    trace: keep the steps that are profiled every few minutes as Chrome traces too.
    log_format: json writes JSON lines to stdout, and text for people to stderr.
    monitor: alerts, metrics and trackers, like the flags of that group (docs/monitoring.md).
    settings: the flags with underscores (docs/settings.md), for example `epochs=12`, `lr=0.01`, `image_size=640`.

    Raises StokerError; its message says what to do. Raises `stoker.errors.Preempted` after SIGTERM or Ctrl-C, when
    everything is saved: the same call continues.
    """
    user_config = from_fields({"data": data, **settings})
    paths = [None if path is None else os.fspath(path) for path in (run_dir, resume)]
    return loop.train(
        user_config,
        run_dir=paths[0],
        resume=paths[1],
        accept_changed_data=accept_changed_data,
        trace=trace,
        monitor=monitor,
        log_format=log_format,
    )
