"""`stoker watch`: records a training job that stoker did not write."""

import sys
from typing import Annotated

from cyclopts import Parameter

from stoker.monitor.options import MonitoringOptions


def watch(
    *command: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    pid: Annotated[int | None, Parameter(group="Run")] = None,
    run_dir: Annotated[str | None, Parameter(group="Run")] = None,
    hook: Annotated[bool, Parameter(group="Run", negative="--no-hook")] = True,
    monitor: Annotated[MonitoringOptions, Parameter(name="*", group="Monitoring")] = MonitoringOptions(),  # noqa: B008  # frozen
) -> None:
    """Runs any training job unchanged and records it, for `stoker why` and `stoker report`.

    Its output, exit code, terminal and signals stay as they are, and it goes on if
    `stoker watch` is killed. It records system telemetry once a second, and the steps,
    losses and learning rates that the job prints: TF Object Detection API, Keras,
    torchvision, Ultralytics, Lightning, Hugging Face Trainer, and plain `loss=` or
    `loss:`. Python processes that use torch or Keras are timed from the inside through
    `PYTHONPATH`; stacks of all are sampled from outside. With `--pid` it attaches to a
    running process; Ctrl-C ends the watching, not the job. Linux only.

    Parameters
    ----------
    command
        The job, after `--`.
    pid
        Attach to this running process instead of starting a command.
    run_dir
        Folder of the run; default `runs/watch-<script or program>-<n>`.
    hook
        Time the job from the inside; `--no-hook` leaves its environment unchanged.
    """
    from stoker.errors import UsageError
    from stoker.watch.watch import attach
    from stoker.watch.watch import watch as watch_job

    if pid is not None and command:
        raise UsageError("--pid attaches to a running process; `-- CMD` starts a new one.", fix="give only one")
    if pid is not None:
        sys.exit(attach(pid, run_dir, monitor))
    sys.exit(watch_job(list(command), run_dir, hook=hook, monitor=monitor))
