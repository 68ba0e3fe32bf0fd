"""From what was asked for to a run that can begin: settings, data, model, loader, and the state to continue from.

A continued run takes every setting from its own config.toml: nothing is derived twice. Which run it is: `runs.py`.
"""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stoker import models
from stoker.config import Config, check, from_toml, parse_duration
from stoker.data.index import Index, open_index, require_pictures
from stoker.data.loader import Loader, Quarantine, box_slots
from stoker.data.problems import KINDS
from stoker.device import Device, pick
from stoker.errors import CheckpointError, DataError
from stoker.evaluate import ground_truth, require_boxes
from stoker.models.saved import Card
from stoker.models.weights import load_weights
from stoker.records import (
    BEST,
    CONFIG,
    QUARANTINE,
    STEPS,
    Quarantined,
    RunFolder,
    StepWindow,
    read_lines,
)
from stoker.training import checkpoint
from stoker.training.derive import derive, total_steps
from stoker.training.optim import Meter, Stepper

EXAMPLES = 2
"""Places of each kind of problem that are said at the start; `stoker data check` has all."""

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
    stale: int = 0
    """Evaluations since the best one."""
    evaluated_step: int = -1
    """Step of the last evaluation."""
    redo_until: int = 0
    """Steps up to this one were done by an earlier attempt and lost with it."""


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
    device = pick(wanted.run.device)
    data = wanted.data
    index = open_index(data.data, format=data.format, val_fraction=data.val_fraction, classes=data.classes or ())
    require_pictures(index, ("train", "val"), max_bad=wanted.data.max_bad)
    for split in ("train", "val"):
        if split not in index.splits:
            raise DataError(
                f"The data set has no {split} split.",
                place=index.root,
                choices=index.splits,
                fix="name a data set with pictures to train on and to hold back",
            )
    require_boxes(ground_truth(index, index.rows("val")))
    config, reasons = derive(asked, index, device) if stored is None else stored
    return Settled(config, reasons, device, index)


def build(settled: Settled, folder: RunFolder, say: Say) -> Job:
    """Everything the loop needs, in the state of the newest sound checkpoint, or at step 0 with pretrained weights."""
    config, device, index = settled.config, settled.device, settled.index
    for note in index.notes:
        say("note", f"data: {note}")
    for problem in index.problems:
        what = f"{problem.count} × {problem.title}, {KINDS[problem.kind].does}"
        said = ", ".join(problem.examples[:EXAMPLES]) + (", …" if problem.count > EXAMPLES else "")
        say("note" if KINDS[problem.kind].action == "kept" else "warning", f"data: {what} ({said})")
    say("note", f"run: {folder.path}" + ("" if folder.attempt == 1 else f", attempt {folder.attempt}"))
    loaded = checkpoint.load_newest(folder.path, say)
    torch.manual_seed(config.run.seed)
    model = models.build(config.model, len(index.class_names))
    if loaded is None:
        for sentence in load_weights(model, config.model, class_names=index.class_names):
            say("note", f"weights: {sentence}")
    model = model.to(device.torch_device).train()
    rows, val_rows = index.rows("train"), index.rows("val")
    slots = box_slots(index, rows, mosaic=config.data.mosaic)
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
        overlap=config.data.overlap,
        boxes=slots,
        seed=config.run.seed,
        threads=config.run.threads,
        max_bad=config.data.max_bad,
        on_quarantine=quarantine,
    )
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
    _restore(job, loaded, say)
    return job


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


def _restore(job: Job, loaded: checkpoint.Loaded | None, say: Say) -> None:
    """Puts a checkpoint's state into the job; leaves it at step 0 when there is none."""
    windows = read_lines(job.folder.path, STEPS, StepWindow)
    job.redo_until = max((window.step for window in windows), default=0)
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
    job.stale = loaded.state["stale"]
    job.evaluated_step = loaded.state["evaluated_step"]
    lost = max(0, job.redo_until - job.step)
    say("note", f"continuing from step {job.step:,}" + (f"; {lost:,} steps are done again" if lost else ""))


def _brief(data: dict[str, Any]) -> str:
    return f"{data['pictures']:,} pictures, {len(data['classes'])} classes, at most {data['slots']} boxes"
