"""What a run trains with (`TrainSetup`), what changes while it trains (`TrainState`), and both as a checkpoint's state.

`start.py` builds the setup and restores the newest checkpoint into it, `recovery.py` restores an earlier one. The files
of a checkpoint are written and read by `checkpoint.py`.
"""

import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from stoker import models
from stoker.config.settings import Config
from stoker.data.index import Index
from stoker.data.index_digest import describe_changes
from stoker.data.loading.loader import Loader, QuarantinedImage
from stoker.data.loading.processes import WorkerProcesses
from stoker.errors import CheckpointError
from stoker.hardware.device import Device
from stoker.models.weights.model_file import ModelMetadata
from stoker.runs.records import EVENTS, QUARANTINE, STEPS, RunFolder, read_lines
from stoker.runs.schemas import Event, Quarantined, StepWindow
from stoker.storage.run_uri import display_path
from stoker.training import checkpoint
from stoker.training.optim import LossAccumulator, OptimizerStep
from stoker.training.ranks import Ranks


class EventLogger(Protocol):
    """Prints a line and writes it into the run's events, with the numbers that belong to it."""

    def __call__(self, kind: str, text: str, /, **data: Any) -> None: ...


class BatchSizes(NamedTuple):
    """Images that the model gets at once."""

    train: int
    """Of a micro-batch."""
    eval: int


NO_SIZES = BatchSizes(0, 0)
"""Before a state is restored."""


@dataclasses.dataclass
class TrainState:
    """What changes from step to step, except for the loader and most tensors. A checkpoint holds all of it but
    `redo_until` and `sizes`, which come from the records."""

    step: int = 0
    """Optimizer steps that the weights contain."""
    trained_s: float = 0.0
    """Wall seconds that these steps took, over all attempts."""
    best_ap: float = -1.0
    evals_since_best: int = 0
    """Evaluations since the best one."""
    evaluated_step: int = -1
    """Step of the last evaluation."""
    pending_eval: dict[str, Any] | None = None
    """The last evaluation, if the state was saved before its metrics were known (`async_eval.PendingEvaluation`)."""
    rollback_count: int = 0
    """Rollbacks so far; each divides the learning rate (`recovery.py`)."""
    diverged_step: int | None = None
    """Step at which the limit of consecutive skipped steps was reached. The run rolls back then."""
    redo_until: int = 0
    """Steps up to this one were done before and lost, by a kill or a rollback."""
    sizes: BatchSizes = NO_SIZES
    """Images that the model gets at once: those of the settings, or fewer after an `out_of_memory` event."""
    sync_state: dict[str, Any] | None = None
    """What the exchange between ranks keeps from step to step, at the last checkpoint or evaluation: the state of
    PowerSGD or of the outer optimizer (`--sync`), equal in all ranks."""


@dataclasses.dataclass(frozen=True)
class TrainSetup:
    """What is fixed while a run trains: settings, data, and the objects that the loop works with."""

    folder: RunFolder
    config: Config
    device: Device
    index: Index
    train_indices: NDArray[np.int64]
    """Image indices of the training split."""
    val_indices: NDArray[np.int64]
    model: models.Detector
    optimizer: OptimizerStep[models.Detector]
    loss_accumulator: LossAccumulator
    loader: Loader
    processes: WorkerProcesses | None
    """Load the images for training and evaluation; None: threads do."""
    quarantine: Callable[[QuarantinedImage], None]
    """Records an image that cannot be used; evaluation calls it too."""
    writer: checkpoint.CheckpointWriter
    metadata: ModelMetadata
    data_digest: str
    """The images and boxes for training and validation (`data/index_digest.py`)."""
    accept_changed_data: bool
    """Continue from a checkpoint of another state of the data set."""
    total_steps: int | None
    """None if the length is given in minutes."""
    max_boxes: int
    """M, padded boxes per image."""
    state: TrainState = dataclasses.field(default_factory=TrainState)
    ranks: Ranks = dataclasses.field(default_factory=Ranks)
    initial_ranks: int = 1
    """Ranks with which the run was started: `grad_accum_steps` is for their parts of a batch."""

    @property
    def initial_sizes(self) -> BatchSizes:
        """Images that the model gets at once by the settings."""
        size = max(1, self.config.run.batch_size // (self.config.optim.grad_accum_steps * self.initial_ranks))
        return BatchSizes(size, size)

    @property
    def is_staged(self) -> bool:
        """Whether each rank has a stage of the model, and all work on the same batch."""
        return is_staged(self.config, self.ranks)

    @property
    def loads_images(self) -> bool:
        """Whether this rank loads a part of each batch."""
        return self.ranks.is_main or not self.is_staged

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step of this rank."""
        return count_micro_batches(self.rank_batch_size, self.state.sizes.train)

    @property
    def rank_batch_size(self) -> int:
        """Images of a step of this rank."""
        return self.config.run.batch_size // (1 if self.is_staged else self.ranks.world_size)


def is_staged(config: Config, ranks: Ranks) -> bool:
    """Whether each rank has a stage of the model; a run with `--stages` on one device has one."""
    return config.run.num_stages > 1 and not ranks.alone


def collect_state(setup: TrainSetup) -> dict[str, Any]:
    """What `restore_state` needs besides the EMA weights: tensors that are still on the device, and plain numbers."""
    state = setup.state
    return {
        "optimizer_step": setup.optimizer.state_dict(),
        "loader": setup.loader.state_dict(),
        "trained_s": state.trained_s,
        "best_ap": state.best_ap,
        "evals_since_best": state.evals_since_best,
        "evaluated_step": state.evaluated_step,
        "data": dataset_fingerprint(setup),
        "skipped_streak": setup.loss_accumulator.skipped_streak(),
        "rollbacks": state.rollback_count,
        "sync": state.sync_state,
    }


def restore_state(setup: TrainSetup, loaded: checkpoint.LoadedCheckpoint | None, log_event: EventLogger) -> None:
    """Restores a checkpoint, or the state of step 0 if there is none; the weights are then left as they are. If the
    content of one cannot be restored, the one before is taken.

    Raises CheckpointError if the data set changed, or if no checkpoint can be restored.
    """
    rejected: dict[int, str] = {}
    while True:
        try:
            _restore(setup, loaded, log_event)
            return
        except torch.OutOfMemoryError:
            raise
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if loaded is None:
                raise
            rejected[loaded.step] = f"its state cannot be restored: {type(error).__name__}: {str(error)[:200]}"
            loaded = checkpoint.load_newest(setup.folder.path, log_event, rejected=rejected)


def _restore(setup: TrainSetup, loaded: checkpoint.LoadedCheckpoint | None, log_event: EventLogger) -> None:
    state, run = setup.state, setup.folder.path
    rollbacks = read_rollbacks(run)
    state.sizes = read_sizes(run, setup.initial_sizes)
    state.redo_until = max((window.step for window in read_lines(run, STEPS, StepWindow)), default=0)
    state.rollback_count = max([state.rollback_count, *(event.data["count"] for event in rollbacks)])
    state.diverged_step = state.pending_eval = state.sync_state = None
    setup.loss_accumulator.reset()
    # The best weights stay the best, even if training rolled back to a step before them.
    best_ap = max([-1.0, *(event.data["best_ap"] for event in rollbacks)])
    if loaded is None:
        if setup.folder.attempt > 1 or state.rollback_count:
            log_event("info", "no checkpoint yet: starting from the first step")
        quarantined = _known_bad_images(setup)
        setup.loader.load_state_dict(setup.loader.state_dict() | {"position": 0, "quarantined": quarantined})
        state.step, state.trained_s = 0, 0.0
        state.best_ap, state.evals_since_best, state.evaluated_step = best_ap, 0, -1
        return
    saved = loaded.state
    is_changed = _check_data(setup, loaded.step, saved["data"], log_event)
    setup.optimizer.load_state_dict(saved["optimizer_step"], loaded.weights)
    loader_state = saved["loader"] | {"quarantined": _known_bad_images(setup) | saved["loader"]["quarantined"]}
    if is_changed:  # image indices have another meaning now
        loader_state |= {"quarantined": {}, "count": len(setup.train_indices)}
    setup.loader.load_state_dict(loader_state)
    state.sync_state = None if setup.ranks.alone else saved.get("sync")
    state.diverged_step = setup.loss_accumulator.load_skipped_streak(saved["skipped_streak"])
    state.rollback_count = max(state.rollback_count, saved["rollbacks"])
    state.step, state.trained_s = loaded.step, saved["trained_s"]
    state.best_ap, state.evaluated_step = max(best_ap, saved["best_ap"]), saved["evaluated_step"]
    if saved["rollbacks"] == state.rollback_count:
        saved_eval = None if is_changed else saved["pending_eval"]
        state.evals_since_best, state.pending_eval = saved["evals_since_best"], saved_eval
    else:  # a rollback: patience counts again from 0, and the evaluation that was pending then has its metrics by now
        state.evals_since_best = 0
    lost_steps = max(0, state.redo_until - state.step)
    log_event(
        "info",
        f"continuing from step {state.step:,}" + (f"; {lost_steps:,} steps are done again" if lost_steps else ""),
    )


def share_state(setup: TrainSetup) -> None:
    """All ranks continue from the state that rank 0 has restored: they need not see the run's folder."""
    ranks = setup.ranks
    if ranks.alone:
        return
    tensors = io.BytesIO()
    if ranks.is_main:
        optimizer = setup.optimizer
        restored: Any = optimizer.restored
        if optimizer.sharding is None:
            restored = optimizer.state_dict(), optimizer.ema_model.state_dict()
        optimizer.restored = None
        torch.save([restored, setup.loss_accumulator.skipped_streak()], tensors)
    fields = {field.name: getattr(setup.state, field.name) for field in dataclasses.fields(TrainState)}
    data, loader_state, fields = ranks.share_value((tensors.getvalue(), setup.loader.state_dict(), fields))
    if ranks.is_main:
        return
    restored, streak = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if restored is not None:
        setup.optimizer.load_state_dict(*restored)
        setup.optimizer.restored = None
    setup.loss_accumulator.reset()
    setup.loss_accumulator.load_skipped_streak(streak)
    setup.loader.load_state_dict(loader_state)
    for name, value in fields.items():
        setattr(setup.state, name, value)
    setup.state.pending_eval = None  # rank 0 computes its metrics


def load_checkpoint(run: Path, log_event: EventLogger) -> checkpoint.LoadedCheckpoint | None:
    """The newest checkpoint, without those that a rollback abandoned: they are removed here if a kill left them."""
    if rollbacks := read_rollbacks(run):
        checkpoint.discard_checkpoints(
            run, after=rollbacks[-1].data["rollback_step"], rollback_count=rollbacks[-1].data["count"]
        )
    return checkpoint.load_newest(run, log_event)


def read_rollbacks(run: Path) -> list[Event]:
    """The rollbacks of the run. A rollback counts from the moment that this event is written: a kill before it leaves a
    run that diverges again, a kill after it a run that continues from there."""
    return [event for event in read_lines(run, EVENTS, Event) if event.kind == "rolled_back"]


def read_sizes(run: Path, initial: BatchSizes) -> BatchSizes:
    """The sizes of the run's newest event `out_of_memory`, at most `initial`."""
    newest = initial
    for event in read_lines(run, EVENTS, Event):
        if event.kind == "out_of_memory":
            newest = BatchSizes(event.data["micro_batch_size"], event.data["eval_batch_size"])
    return BatchSizes(min(initial.train, newest.train), min(initial.eval, newest.eval))


def read_initial_ranks(run: Path) -> int:
    """The number of ranks with which the run was started; stages of one model count as one."""
    first = next(read_lines(run, EVENTS, Event), None)
    return 1 if first is None else int(first.data.get("ranks", 1)) // int(first.data.get("stages", 1))


def count_micro_batches(batch_size: int, max_size: int) -> int:
    """The smallest number of equal micro-batches of at most `max_size` images."""
    return next(n for n in range(1, batch_size + 1) if batch_size % n == 0 and batch_size // n <= max_size)


def dataset_fingerprint(setup: TrainSetup) -> dict[str, Any]:
    """What must be unchanged for a checkpoint to continue: a part of its state."""
    return {
        "num_images": len(setup.train_indices),
        "classes": list(setup.index.class_names),
        "max_boxes": setup.max_boxes,
        "images": setup.data_digest,
    }


def _check_data(setup: TrainSetup, step: int, saved: dict[str, Any], log_event: EventLogger) -> bool:
    """Whether the data set differs from that of a checkpoint, which is then accepted and recorded. Raises
    CheckpointError if it is not accepted, or has another number of classes. Older checkpoints have no digest."""
    now = dataset_fingerprint(setup)
    changes = describe_changes(saved["images"], now["images"]) if "images" in saved else []
    if saved["classes"] != now["classes"]:
        changes.append(f"the classes: then {', '.join(saved['classes'])}, now {', '.join(now['classes'])}")
    if not changes:
        changes = [
            f"{text}: then {saved[key]:,}, now {now[key]:,}"
            for key, text in (("num_images", "training images"), ("max_boxes", "most boxes of an image"))
            if saved[key] != now[key]
        ]
    if not changes:
        return False
    can_continue = len(saved["classes"]) == len(now["classes"])
    if not (can_continue and setup.accept_changed_data):
        location = display_path(setup.folder.path)
        accept = f"; or `stoker train --resume {location} --accept-changed-data`, which continues with it as it is"
        raise CheckpointError(
            "The data set is not the one that the run was started with.",
            location=setup.index.source,
            cause="; ".join(changes),
            fix="restore the data set, or start a new run with another --run-dir" + (accept if can_continue else ""),
        )
    log_event(
        "warning",
        f"the data set changed since step {step:,}: {'; '.join(changes)}; training continues with it as it is now, and "
        "scores before and after cannot be compared",
        data_changes=changes,
    )
    return True


def _known_bad_images(setup: TrainSetup) -> dict[int, int]:
    """Image index → sample position of every image that quarantine.jsonl says was excluded in training: an attempt that
    repeats steps substitutes the same images, even if a file is readable by now. An index that is another image in this
    data set is left out."""
    index = setup.index
    return {
        line.image_index: line.sample_position
        for line in read_lines(setup.folder.path, QUARANTINE, Quarantined)
        if line.replaced_by >= 0
        and 0 <= line.image_index < len(index)
        and index.path(line.image_index).name == line.path.rpartition("/")[2]
    }
