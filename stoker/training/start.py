"""From what was asked for to a run that can begin: settings, data, model, loader, and the state to continue from.

A continued run takes every setting from its own config.toml: nothing is derived twice. Which run it is: `runs.py`.
"""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from stoker import models
from stoker.config.settings import Config, check, from_toml, parse_duration
from stoker.data.images.cache_policy import open_cache
from stoker.data.images.pixel_cache import Form
from stoker.data.index import Index, open_index, require_pictures
from stoker.data.loading.loader import Loader, Quarantine, box_slots
from stoker.data.validation.problems import KINDS
from stoker.errors import CheckpointError, DataError
from stoker.evaluation.evaluate import evaluation_loader, ground_truth, require_boxes
from stoker.hardware.device import Device, keep_freed_memory, pick
from stoker.models.table import check_canvas
from stoker.models.weights.load import load_weights
from stoker.models.weights.model_file import Card
from stoker.runs.records import (
    BEST,
    CONFIG,
    EVENTS,
    QUARANTINE,
    STEPS,
    RunFolder,
    read_lines,
)
from stoker.runs.schemas import Event, Quarantined, StepWindow
from stoker.training import checkpoint
from stoker.training.defaults.dataset_facts import facts_of, too_long
from stoker.training.defaults.derive import derive, total_steps
from stoker.training.optim import Meter, Stepper

EXAMPLES = 2
"""Places of each kind of problem that are said at the start; `stoker data check` has all."""


class Say(Protocol):
    """Says a line to the person and writes it into the run's events, with the numbers that belong to it."""

    def __call__(self, kind: str, text: str, /, **data: Any) -> None: ...


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
    stale: int = 0
    """Evaluations since the best one."""
    evaluated_step: int = -1
    """Step of the last evaluation."""
    evaluation_threads: int = 0
    """That loaded the pictures at the end of the last evaluation."""
    unscored: dict[str, Any] | None = None
    """The last evaluation, where the state was saved before anybody knew its score (`scoring.Unscored`)."""
    redo_until: int = 0
    """Steps up to this one were done before and lost, with an earlier attempt or by going back."""
    slowed: int = 0
    """How often the run has gone back to an earlier state and on from there at a lower rate (`recovery.py`)."""
    hopeless_at: int | None = None
    """The step whose skip made too many in a row, where the state was saved after it and before anybody read that."""


@dataclasses.dataclass
class Settled:
    """What a run trains on and with, before it has a folder."""

    config: Config
    reasons: dict[str, str]
    device: Device
    index: Index


def settle(asked: Config, path: Path | None) -> Settled:
    """Opens the data and derives the settings, or rereads those of the run `path`. Raises StokerError."""
    stored = None if path is None else from_toml(path / CONFIG)
    wanted = asked if stored is None else stored[0]
    if path is not None and (unknown := models.open_fields(wanted)):
        raise CheckpointError(
            "The run was started by an earlier version of stoker and cannot be continued exactly.",
            place=path / CONFIG,
            cause=f"it does not say {', '.join(unknown)}",
            fix=f"continue with the version that started it, or start a new run with --weights {path / BEST}",
        )
    check(wanted)
    check_canvas(wanted)
    device = pick(wanted.run.device)
    data = wanted.data
    index = open_index(data.data, format=data.format, val_fraction=data.val_fraction, classes=data.classes or ())
    require_pictures(index, ("train", "val"), max_bad=wanted.data.max_bad)
    for split in ("train", "val"):
        if split not in index.splits:
            raise DataError(
                f"The data set has no {split} split.",
                place=index.source,
                choices=index.splits,
                fix="name a data set with pictures to train on and to hold back",
            )
    require_boxes(ground_truth(index, index.rows("val")))
    config, reasons = derive(asked, index, device) if stored is None else stored
    return Settled(config, reasons, device, index)


def build(settled: Settled, folder: RunFolder, say: Say) -> Job:
    """Everything the loop needs, in the state of the newest sound checkpoint, or at step 0 with pretrained weights."""
    config, device, index = settled.config, settled.device, settled.index
    if device.is_cpu:
        keep_freed_memory()
    device.release_cache()  # of the trials of batches, whose peak is not that of training either
    device.reset_peak()
    for note in index.notes:
        say("note", f"data: {note}")
    for problem in index.problems:
        what = f"{problem.count} × {problem.title}, {KINDS[problem.kind].does}"
        said = ", ".join(problem.examples[:EXAMPLES]) + (", …" if problem.count > EXAMPLES else "")
        say("note" if KINDS[problem.kind].action == "kept" else "warning", f"data: {what} ({said})")
    say("note", f"run: {folder.path}" + ("" if folder.attempt == 1 else f", attempt {folder.attempt}"))
    loaded = load_state(folder.path, say)
    if folder.attempt == 1:
        text, facts = facts_of(config, index)
        folder.event("note", text, facts=facts)
        if (remark := too_long(config, index)) is not None:
            say("warning", remark)
    model = start_model(config, index, device, say if loaded is None else None)
    rows, val_rows = index.rows("train"), index.rows("val")
    slots = box_slots(index, rows, mosaic=config.data.mosaic)
    quarantine = _quarantine_reporter(folder, say)
    loader = training_loader(config, index, device, slots=slots, say=say, on_quarantine=quarantine)
    job = Job(
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
        card=Card(
            settings=config.model,
            class_names=index.class_names,
            canvas=config.data.canvas,
            resize=config.data.resize,
        ),
        total_steps=total_steps(parse_duration(config.run.for_), len(rows), config.run.batch),
        slots=slots,
    )
    restore(job, loaded, say)
    return job


def training_loader(
    config: Config,
    index: Index,
    device: Device,
    *,
    slots: int,
    say: Say,
    on_quarantine: Callable[[Quarantine], None] | None = None,
) -> Loader:
    """The stream of training samples, from its beginning."""
    data, rows = config.data, index.rows("train")
    form = Form.of(data.canvas, data.resize, crop=data.crop, zoom=data.zoom)
    return Loader(
        index,
        rows,
        device=device,
        batch=config.run.batch,
        canvas=data.canvas,
        resize=data.resize,
        crop=data.crop,
        zoom=data.zoom,
        overlap=data.overlap,
        boxes=slots,
        seed=config.run.seed,
        threads=config.run.threads,
        max_bad=data.max_bad,
        on_quarantine=on_quarantine,
        on_tuned=lambda text: say("note", text),
        cache=open_cache(config.run.cache, index, rows, form, say),
        decoder=config.run.decoder,
    )


def start_model(config: Config, index: Index, device: Device, say: Say | None) -> models.Detector:
    """The model with the weights that a run starts from, said by `say`; None: without them, as a state will fill it."""
    torch.manual_seed(config.run.seed)
    model = models.build(config.model, len(index.class_names))
    if say is not None:
        for sentence in load_weights(model, config.model, class_names=index.class_names):
            say("note", f"weights: {sentence}")
    return model.to(device.torch_device).train()


def load_state(run: Path, say: Say) -> checkpoint.Loaded | None:
    """The newest checkpoint of the way that the run is on: one that it went back behind is not looked at again."""
    if setbacks := read_setbacks(run):
        checkpoint.discard(run, after=setbacks[-1].data["back_to"], slowed=setbacks[-1].data["count"])
    return checkpoint.load_newest(run, say)


def read_setbacks(run: Path) -> list[Event]:
    """The times that the run went back to go on at a lower rate. What makes it so is this line of its events: a kill
    before it leaves a run that will diverge again, one after it a run that goes on from there."""
    return [event for event in read_lines(run, EVENTS, Event) if event.kind == "slowed"]


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
                path=found.place,
                error=found.error,
                position=found.position,
                replaced_by=found.replaced_by,
            ),
        )
        say("warning", f"picture left out: {found.place}: {found.error}")

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


def state_of(job: Job) -> dict[str, Any]:
    """What `restore` needs beside the averaged weights: tensors that are still on the device, and plain numbers."""
    return {
        "stepper": job.stepper.state_dict(),
        "loader": job.loader.state_dict(),
        "trained_s": job.trained_s,
        "best_ap": job.best_ap,
        "stale": job.stale,
        "evaluated_step": job.evaluated_step,
        "data": fingerprint(job),
        "streak": job.meter.streak(),
        "slowed": job.slowed,
    }


def restore(job: Job, loaded: checkpoint.Loaded | None, say: Say) -> None:
    """Puts a checkpoint's state into the job, or that of step 0 when there is none. Weights are left alone then."""
    windows = read_lines(job.folder.path, STEPS, StepWindow)
    job.redo_until = max((window.step for window in windows), default=0)
    setbacks = read_setbacks(job.folder.path)
    job.slowed = max([job.slowed, *(event.data["count"] for event in setbacks)])
    job.meter = Meter(job.device, limit=job.config.optim.max_skipped)
    job.hopeless_at = job.unscored = None
    # The best weights stay the best, also where training went back behind them.
    best_ap = max([-1.0, *(event.data["best_ap"] for event in setbacks)])
    if loaded is None:
        if job.folder.attempt > 1 or job.slowed:
            say("note", "no checkpoint yet: starting from the first step")
        bad = _known_bad(job.folder.path, {})
        job.loader.load_state_dict(job.loader.state_dict() | {"position": 0, "quarantined": bad})
        job.step, job.trained_s, job.best_ap, job.stale, job.evaluated_step = 0, 0.0, best_ap, 0, -1
        return
    if loaded.state["data"] != fingerprint(job):
        raise CheckpointError(
            "The data set is not the one that the run was started with.",
            place=job.index.source,
            cause=f"then {_brief(loaded.state['data'])}, now {_brief(fingerprint(job))}",
            fix="start a new run with another --run, or put the data set back",
        )
    job.stepper.load_state_dict(loaded.state["stepper"], loaded.weights)
    stream = loaded.state["loader"]
    job.loader.load_state_dict(stream | {"quarantined": _known_bad(job.folder.path, stream["quarantined"])})
    job.hopeless_at = job.meter.go_on(loaded.state["streak"])
    job.slowed = max(job.slowed, loaded.state["slowed"])
    job.step = loaded.step
    job.trained_s = loaded.state["trained_s"]
    job.best_ap = max(best_ap, loaded.state["best_ap"])
    job.evaluated_step = loaded.state["evaluated_step"]
    if loaded.state["slowed"] == job.slowed:
        job.stale, job.unscored = loaded.state["stale"], loaded.state["unscored"]
    else:  # gone back to it: patience begins anew at the lower rate, and what was unscored then has its score
        job.stale = 0
    lost = max(0, job.redo_until - job.step)
    say("note", f"continuing from step {job.step:,}" + (f"; {lost:,} steps are done again" if lost else ""))


def validation_loader(job: Job) -> Loader:
    """One pass over the validation split, in batches of the size that training has in memory at once."""
    run, data = job.config.run, job.config.data
    return evaluation_loader(
        job.index,
        job.val_rows,
        job.device,
        batch=max(1, run.batch // job.config.optim.accumulate),
        canvas=data.canvas,
        resize=data.resize,
        threads=run.threads,
        begin=max(job.evaluation_threads, job.loader.stats().threads),
        max_bad=data.max_bad,
        on_quarantine=job.quarantine,
    )


def _brief(data: dict[str, Any]) -> str:
    return f"{data['pictures']:,} pictures, {len(data['classes'])} classes, at most {data['slots']} boxes"
