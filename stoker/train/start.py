"""From what the user asked for to a run that can begin: which run folder, new or continued, and everything it needs.

The same command again continues its unfinished run and starts a new one after a finished one; `choose_run` decides and
says so. A continued run takes every setting from its own config.toml: nothing is derived twice.
"""

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stoker import models
from stoker.config import Config, from_toml, parse_duration, to_toml
from stoker.data.index import Index, open_index, require_pictures
from stoker.data.loader import Loader, Quarantine, box_slots
from stoker.device import Device, pick
from stoker.errors import CheckpointError, DataError, UsageError
from stoker.measure.environment import describe
from stoker.models.saved import Card
from stoker.models.weights import load_weights
from stoker.records import (
    CONFIG,
    ENVIRONMENT,
    EVENTS,
    QUARANTINE,
    STEPS,
    Quarantined,
    RunFolder,
    StepWindow,
    is_finished,
    last_attempt,
    open_run,
    read_lines,
    runs_named,
    write_whole,
)
from stoker.train import checkpoint
from stoker.train.derive import derive, total_steps
from stoker.train.optim import Meter, Stepper

RUNS = Path("runs")

Say = Callable[[str, str], None]
"""(kind of event, line for a person)."""


@dataclasses.dataclass
class Job:
    """A run that is ready to train."""

    folder: RunFolder
    config: Config
    device: Device
    index: Index
    rows: NDArray[np.int64]
    """Rows of the training split."""
    val_rows: NDArray[np.int64]
    model: models.Detector
    stepper: Stepper[models.Detector]
    meter: Meter
    loader: Loader
    quarantine: Callable[[Quarantine], None]
    """Writes down a picture that cannot be used; of evaluation too."""
    writer: checkpoint.Writer
    card: Card
    total_steps: int | None
    """None where the length is given in minutes."""
    slots: int
    """M, box slots of a batch."""
    step: int = 0
    """Optimizer steps that the state contains."""
    trained_s: float = 0.0
    """Wall seconds that the steps of the state took, over all attempts."""
    best_ap: float = -1.0
    redo_until: int = 0
    """Steps up to this one were done by an earlier attempt and lost with it."""


def choose_run(asked: Config, name: str | None) -> tuple[Path | None, list[str]]:
    """(the unfinished run that this command continues or None, lines to say). `name`: --run.

    Raises UsageError when the named run exists and is finished, or was started by another command.
    """
    if name is not None:
        path = Path(name)
        if not (path / EVENTS).exists():
            return None, []
        if is_finished(path):
            fix = "another --run, or none: a new folder is made then"
            raise UsageError("The run is finished.", place=path, fix=fix)
        if _asked_of(path) != asked:
            cause = f"it was started with {_words(_asked_of(path))}; now it is {_words(asked)}"
            fix = f"`stoker train --resume {path}`, or another --run"
            raise UsageError("The run was started with other settings.", place=path, cause=cause, fix=fix)
        return path, []
    for path in reversed(_runs_of(asked)):
        if not (path / CONFIG).exists() or _asked_of(path) != asked:
            continue
        if is_finished(path):
            return None, [f"{path} had the same settings and is finished: starting a new run"]
        return path, []
    return None, []


def resume_from(name: str) -> tuple[Path, Config]:
    """The run of `--resume RUN` and what was asked for when it was started. Raises UsageError when it is finished."""
    path = open_run(name)
    if is_finished(path):
        raise UsageError("The run is finished: there is nothing to resume.", place=path, fix=f"`stoker why {path}`")
    return path, _asked_of(path)


def new_run(config: Config, name: str | None) -> Path:
    """Makes the folder of a new run."""
    if name is not None:
        path = Path(name)
        path.mkdir(parents=True, exist_ok=True)
        return path
    stem = f"{_data_name(config)}-{config.model.model}"
    number = max((int(path.name.rpartition("-")[2]) for path in runs_named(RUNS, stem)), default=0) + 1
    while True:
        path = RUNS / f"{stem}-{number}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:  # another process was faster
            number += 1
        else:
            return path


def prepare(asked: Config, path: Path | None, name: str | None, say: Say, show: Callable[[Config, dict[str, str]], None]
            ) -> Job:  # fmt: skip
    """Opens the data, derives or rereads the settings, and builds what the loop needs.

    path: the run to continue, or None for a new one, called `name` if that is given. show: called with the settings and
    the reasons of those that stoker chose.
    """
    stored = None if path is None else from_toml(path / CONFIG)
    device = pick(asked.run.device if stored is None else stored[0].run.device)
    data = asked.data if stored is None else stored[0].data
    index = open_index(data.data, format=data.format, val_fraction=data.val_fraction)
    require_pictures(index)
    for split in ("train", "val"):
        if split not in index.splits:
            raise DataError(f"The data set has no {split} split.", place=index.root, choices=index.splits,
                            fix="name a data set with pictures to train on and to hold back")  # fmt: skip
    config, reasons = derive(asked, index, device) if stored is None else stored
    folder_path = new_run(config, name) if path is None else path
    folder = RunFolder(folder_path, last_attempt(folder_path) + 1)
    if stored is None:
        write_whole(folder.path / CONFIG, to_toml(config, reasons).encode())
    write_whole(folder.path / ENVIRONMENT, json.dumps(describe(), indent=2).encode())
    folder.event("started" if folder.attempt == 1 else "resumed", f"attempt {folder.attempt}")
    show(config, reasons)
    for note in index.notes:
        say("note", f"data: {note}")
    for dropped in index.dropped:
        say("warning", f"data: {dropped.count} {dropped.kind} left out ({', '.join(map(str, dropped.examples))})")
    say("note", f"run: {folder.path}" + ("" if folder.attempt == 1 else f", attempt {folder.attempt}"))
    job = _build(config, device, index, folder, say)
    _restore(job, say)
    return job


def _build(config: Config, device: Device, index: Index, folder: RunFolder, say: Say) -> Job:
    torch.manual_seed(config.run.seed)
    model = models.build(config.model, len(index.class_names))
    for sentence in load_weights(model, config.model, class_names=index.class_names):
        say("note", f"weights: {sentence}")
    model = model.to(device.torch_device).train()
    rows, val_rows = index.rows("train"), index.rows("val")
    slots = box_slots(index, rows)

    quarantine = _quarantine_reporter(folder, say)
    loader = Loader(
        index,
        rows,
        device=device,
        batch=config.run.batch,
        canvas=config.data.canvas,
        resize=config.data.resize,
        crop=config.data.crop,
        zoom=config.data.zoom,
        boxes=slots,
        seed=config.run.seed,
        threads=config.run.threads,
        on_quarantine=quarantine,
    )
    return Job(
        folder=folder,
        config=config,
        device=device,
        index=index,
        rows=rows,
        val_rows=val_rows,
        model=model,
        stepper=Stepper(model, config.optim, device, precision=config.run.precision),
        meter=Meter(device, limit=config.optim.max_skipped),
        loader=loader,
        quarantine=quarantine,
        writer=checkpoint.Writer(folder.path, say),
        card=Card(settings=config.model, class_names=index.class_names, canvas=config.data.canvas,
                  resize=config.data.resize),
        total_steps=total_steps(parse_duration(config.run.for_), len(rows), config.run.batch),
        slots=slots,
    )  # fmt: skip


def _quarantine_reporter(folder: RunFolder, say: Say) -> Callable[[Quarantine], None]:
    """Says and records each picture once; every evaluation meets the same ones."""
    seen: set[int] = set()

    def report(found: Quarantine) -> None:
        if found.row in seen:
            return
        seen.add(found.row)
        folder.append(
            QUARANTINE,
            Quarantined(
                t=time.time(),
                attempt=folder.attempt,
                row=found.row,
                path=str(found.path),
                error=found.error,
                position=found.position,
                replaced_by=found.replaced_by,
            ),
        )
        say("warning", f"picture left out: {found.error}")

    return report


def _known_bad(run: Path, until: dict[int, int]) -> dict[int, int]:
    """Row → position of every picture that an attempt quarantined in training, `until` being those of a checkpoint.

    The rest comes from quarantine.jsonl: an attempt that goes over the same stretch again replaces the same pictures,
    also one whose file is readable by now.
    """
    lines = read_lines(run, QUARANTINE, Quarantined)
    return {line.row: line.position for line in lines if line.replaced_by >= 0} | until


def fingerprint(job: Job) -> dict[str, Any]:
    """What must be the same for a checkpoint to continue: a part of its state."""
    return {"pictures": len(job.rows), "classes": list(job.index.class_names), "slots": job.slots}


def _restore(job: Job, say: Say) -> None:
    """Puts the newest sound checkpoint's state into the job; leaves it at step 0 when there is none."""
    windows = read_lines(job.folder.path, STEPS, StepWindow)
    job.redo_until = max((window.step for window in windows), default=0)
    loaded = checkpoint.load_newest(job.folder.path, say)
    if loaded is None:
        if job.folder.attempt > 1:
            say("note", "no checkpoint yet: starting from the first step")
        bad = _known_bad(job.folder.path, {})
        job.loader.load_state_dict(job.loader.state_dict() | {"quarantined": bad})
        return
    if loaded.state["data"] != fingerprint(job):
        raise CheckpointError(
            "The data set is not the one that the run was started with.",
            place=job.index.root,
            cause=f"then {_brief(loaded.state['data'])}, now {_brief(fingerprint(job))}",
            fix="start a new run with another --run, or put the data set back",
        )
    job.stepper.load_state_dict(loaded.state["stepper"], loaded.weights)
    stream = loaded.state["loader"]
    job.loader.load_state_dict(stream | {"quarantined": _known_bad(job.folder.path, stream["quarantined"])})
    job.step = loaded.step
    job.trained_s = loaded.state["trained_s"]
    job.best_ap = loaded.state["best_ap"]
    lost = max(0, job.redo_until - job.step)
    say("note", f"continuing from step {job.step:,}" + (f"; {lost:,} steps are done again" if lost else ""))


def _brief(data: dict[str, Any]) -> str:
    return f"{data['pictures']:,} pictures, {len(data['classes'])} classes, at most {data['slots']} boxes"


def _asked_of(path: Path) -> Config:
    """What the user had set when the run was started: the settings without a reason."""
    config, reasons = from_toml(path / CONFIG)
    return config.replace(**dict.fromkeys(reasons))


def _words(config: Config) -> str:
    return " ".join(f"--{name.rstrip('_')} {value}" for name, value in config.set_fields().items())


def _data_name(config: Config) -> str:
    path = Path(config.data.data)
    name = path.resolve().name if path.suffix == "" else path.resolve().parent.name
    return "".join(c if c.isalnum() or c in "._" else "-" for c in name.lower()) or "data"


def _runs_of(asked: Config) -> list[Path]:
    """Runs of the asked data set, whatever their model, oldest first."""
    paths = [p for p in RUNS.glob(f"{_data_name(asked)}-*-*") if (p / EVENTS).exists()]
    return sorted(paths, key=lambda p: (p / CONFIG).stat().st_mtime if (p / CONFIG).exists() else 0.0)
