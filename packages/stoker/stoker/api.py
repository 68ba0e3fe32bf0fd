"""`stoker.train`, `evaluate`, `export_model`, `check` and `plan`: the commands as functions, with the same defaults.

`stoker.load` and its model are in `stoker/inference/model.py`, the training itself is `stoker/training/run.py`.
"""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from stoker.config.flag_names import translate_keywords
from stoker.config.keywords import Settings
from stoker.config.settings import from_fields
from stoker.training import run as training_run
from stoker.training.local_ranks import RankRequest, Result, TrainOptions, must_start_ranks, run_ranks
from stoker_watch.errors import UsageError
from stoker_watch.monitor.options import MonitoringOptions

if TYPE_CHECKING:
    from stoker.planning.check import CheckReport
    from stoker.planning.plan import Plan
    from stoker_watch.monitor.alerts import RecordLine
    from stoker_watch.runs.evaluation import Metrics


def train(
    data: str | os.PathLike[str] | None = None,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    resume: str | os.PathLike[str] | None = None,
    accept_changed_data: bool = False,
    devices: int | None = None,
    trace: bool = False,
    log_format: Literal["text", "json"] = "text",
    monitor: MonitoringOptions = MonitoringOptions(),  # noqa: B008  # frozen
    verbose: bool = False,
    callbacks: Sequence["Callable[[RecordLine], object]"] = (),
    **settings: Unpack[Settings],
) -> Result:
    """Trains a detector, as `stoker train` does; returns the run folder, the steps and the final metrics.

    data: folder or file with labeled images, a URI, or "demo", a small data set that stoker draws.
    run_dir: folder of the run, default `runs/<data>-<model>-<n>`. An unfinished run there is continued.
    resume: a run to continue with its own settings, a finished one with a longer length; `data` is not needed then.
    accept_changed_data: continue an unfinished run also if images, boxes or class names of its data set changed.
    devices: train on so many devices of this machine, each in a process of its own.
    trace: keep the steps that are profiled every few minutes as Chrome traces too.
    log_format: json writes JSON lines to stdout, and text for people to stderr.
    monitor: alerts, metrics and trackers, like the flags of that group (docs/watch.md).
    verbose: print every setting, not only those that matter most.
    callbacks: each is called, in a thread, with each record of the run as it is written: a `StepWindow` about every
    second, an `Event` (`evaluated`, `checkpoint_saved`, …), a `DeviceSample`; one that raises is called no more, and
    the training goes on. Not with `devices`, whose ranks are processes of their own.
    settings: the flags with underscores (docs/settings.md), for example `epochs=12`, `lr=0.01`, `image_size=640`; names
    of other tools (`imgsz=640`) are translated with a note, as on the command line.

    Raises StokerError; its message says what to do. Raises `stoker_watch.errors.Preempted` after SIGTERM or Ctrl-C,
    when everything is saved: the same call continues.
    """
    fields = translate_keywords("train", settings, data=data, run_dir=run_dir, resume=resume, devices=devices)
    run_dir, resume, devices = (fields.pop(name, None) for name in ("run_dir", "resume", "devices"))
    user_config = from_fields(fields)
    options = TrainOptions(
        run_dir=None if run_dir is None else os.fspath(run_dir),
        resume=None if resume is None else os.fspath(resume),
        accept_changed_data=accept_changed_data,
        trace=trace,
        monitor=monitor,
        log_format=log_format,
        verbose=verbose,
    )
    if devices is not None and must_start_ranks(devices):
        if callbacks:
            raise UsageError(
                "Callbacks cannot be called by the processes of devices=.", fix="start ranks with torchrun"
            )
        return run_ranks(devices, RankRequest(settings=user_config.set_fields(), options=options))
    return training_run.train(user_config, options, callbacks=callbacks)


def evaluate(
    run: str | os.PathLike[str],
    data: str | os.PathLike[str] | None = None,
    *,
    split: str = "val",
    device: str | None = None,
    batch_size: int = 8,
) -> "Metrics":
    """The COCO metrics of a run's best weights, as `stoker eval` prints them: `load(run).evaluate(data)`."""
    from stoker.inference.model import load

    return load(run, device=device).evaluate(data, split=split, batch_size=batch_size)


def export_model(
    run: str | os.PathLike[str], *, format: str = "onnx", out: str | os.PathLike[str] | None = None, **options: Any
) -> Path:
    """Writes a trained model as a file that needs no stoker, as `stoker export` does, checks it against the model, and
    returns its path.

    options: `batch_size`, `conf`, `iou`, `max_detections`, `opset`, `images` (docs/export.md). Raises ParityError if
    its detections differ, PreflightError if a package is missing, UsageError, StorageError.
    """
    from stoker.export import write  # the name of the package is why this function is not called `export`

    path = os.fspath(run)
    lines = list(write.export_model(path, format=format, out=None if out is None else Path(out), **options))
    return Path(re.split(r" \([\d.]+ MB", lines[0])[0])


def check(
    data: str | os.PathLike[str] | None = None,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    devices: int | None = None,
    deep: bool = False,
    dockerfile: str | os.PathLike[str] | None = None,
    requirements: str | os.PathLike[str] | None = None,
    script: str | os.PathLike[str] | None = None,
    job: str | os.PathLike[str] | None = None,
    **settings: Unpack[Settings],
) -> "CheckReport":
    """Tests everything that could stop or slow a training, as `stoker check` does (docs/check.md).

    The report has the findings, the worst first; `report.blocked` says whether training would fail. Raises StokerError
    for settings that do not exist or contradict each other.
    """
    from stoker.config.settings import check_config
    from stoker.planning import CheckRequest
    from stoker.planning.check import run_checks
    from stoker.training.run_selection import with_absolute_paths

    fields = translate_keywords("check", settings, data=data, run_dir=run_dir, devices=devices)
    run_dir, devices = (fields.pop(name, None) for name in ("run_dir", "devices"))
    config = from_fields(fields)
    check_config(config)
    request = CheckRequest(
        config=with_absolute_paths(config),
        run_dir=None if run_dir is None else os.fspath(run_dir),
        devices=devices or 1,
        deep=deep,
        dockerfile=None if dockerfile is None else Path(dockerfile),
        requirements=None if requirements is None else Path(requirements),
        script=None if script is None else Path(script),
        job=None if job is None else Path(job),
    )
    return run_checks(request)


def plan(
    data: str | os.PathLike[str],
    *,
    on: Sequence[str] = (),
    gpus: Sequence[int] = (),
    spot: bool = False,
    by: str | None = None,
    budget: float | None = None,
    prices: str | os.PathLike[str] | None = None,
    **settings: Unpack[Settings],
) -> "Plan":
    """Predicts memory, duration and cost of a training on machines that need not be here, as `stoker plan` does.

    on: names of machines, `this` for the present one; none: this one and the whole table. gpus: numbers of GPUs; none:
    those of each machine. by: the time limit, such as "6h"; budget: US dollars; prices: a file of your own prices
    (docs/plan.md). `plan.rows` has a prediction per machine, `plan.recommendation` the choice. Raises StokerError.
    """
    from stoker.planning.plan import make_plan
    from stoker.planning.recommend import Limits
    from stoker_watch.durations import parse_time_s

    fields = translate_keywords("plan", settings, data=data)
    if "devices" in fields:
        raise UsageError("A plan has no number of devices.", fix="gpus=[1, 8]: numbers of GPUs of a machine")
    return make_plan(
        from_fields(fields),
        on=on,
        gpus=gpus,
        spot=spot,
        limits=Limits(by_s=None if by is None else parse_time_s(by, "--by"), budget=budget),
        prices=None if prices is None else Path(prices),
    )
