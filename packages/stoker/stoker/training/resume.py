"""How a training continues, after a kill or a rollback: a checkpoint's state, collected from its owners and given back
to them; and when it rolls back.

A checkpoint is the sum of what its owners put into it: the optimizer, the loader, the sums of the losses, and the
services of the loop (`StateOwner`), each under names of its own. Where a run continues, rank 0 reads the checkpoint
(`checkpoint.py`) and hands each its part; the other ranks get theirs from rank 0 and need not see the run's folder.

If gradients stay non-finite, the run rolls back (`Recovery`): to the last healthy checkpoint, at a third of the
learning rate. After two rollbacks it ends with exit code 6 and names the images of the step. A rollback is the event
`rolled_back`, written before anything is undone. So a run that is killed at any moment either diverges again at the
same step, or continues from the checkpoint that the event names.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from stoker.config.settings import OptimSettings
from stoker.data.index_digest import describe_changes
from stoker.hardware.device import Device
from stoker.hardware.memory_errors import is_out_of_memory
from stoker.training import checkpoint
from stoker.training.checkpoint import LoadedCheckpoint, read_rollbacks
from stoker.training.extension import extended_rate
from stoker.training.optim import OptimizerStep
from stoker.training.state import EventLogger, TrainSetup, read_sizes
from stoker_watch.errors import CheckpointError, DivergedError
from stoker_watch.runs.records import QUARANTINE, STEPS, read_lines
from stoker_watch.runs.schemas import Quarantined, StepWindow
from stoker_watch.storage.uri import display_path


@dataclasses.dataclass(frozen=True)
class Resumed:
    """What a training continues from. saved: the state of a checkpoint, None: the first step; rollback_count: so far;
    best_ap: before a rollback, as the best weights stay the best; is_changed: the data set is another one."""

    saved: dict[str, Any] | None
    rollback_count: int
    best_ap: float = -1.0
    is_changed: bool = False

    @property
    def is_after_rollback(self) -> bool:
        """Whether the run was rolled back to this checkpoint, or to the first step."""
        return (0 if self.saved is None else self.saved["rollbacks"]) != self.rollback_count


class StateOwner(Protocol):
    """A service of the loop whose state a checkpoint has."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, by names that no other part has: numbers, tensors, and trees of them."""

    def resume(self, resumed: Resumed) -> None:
        """Continues from what `state` returned. `TrainState` and the weights are those of the checkpoint already."""


def collect_state(setup: TrainSetup, owners: Sequence[StateOwner]) -> dict[str, Any]:
    """What `Recovery.restore` needs besides the EMA weights: tensors on the device, and plain numbers."""
    collected: dict[str, Any] = {
        "optimizer_step": setup.optimizer.state_dict(),
        "loader": setup.loader.state_dict(),
        "trained_s": setup.state.trained_s,
        "data": dataset_fingerprint(setup),
        "skipped_streak": setup.loss_accumulator.skipped_streak(),
    }
    for owner in owners:
        collected |= owner.state()
    return collected


def send_to_other_ranks(setup: TrainSetup, owners: Sequence[StateOwner]) -> None:
    """All ranks continue from the state that rank 0 has restored."""
    ranks = setup.ranks
    if ranks.alone:
        return
    own = (setup.optimizer.take_restored(), setup.loss_accumulator.skipped_streak()) if ranks.is_main else None
    restored, streak = ranks.share_tensors(own)
    fields = vars(setup.state)
    saved = {name: value for owner in owners for name, value in owner.state().items()} | {"pending_eval": None}
    loader_state, fields, saved = ranks.share_value((setup.loader.state_dict(), fields, saved))
    if ranks.is_main:
        return
    if restored is not None:
        setup.optimizer.load_state_dict(*restored)
        setup.optimizer.restored = None
    setup.loss_accumulator.reset()
    setup.loss_accumulator.load_skipped_streak(streak)
    setup.loader.load_state_dict(loader_state)
    vars(setup.state).update(fields)
    for owner in owners:  # rank 0 computes the metrics of an evaluation that was pending
        owner.resume(Resumed(saved, saved["rollbacks"]))


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
    CheckpointError if it is not accepted, or has another number of classes."""
    now = dataset_fingerprint(setup)
    changes = describe_changes(saved["images"], now["images"])
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


MAX_NAMED_IMAGES = 8
"""Images that an error names at most."""
MAX_ROLLBACKS = 2
"""If training diverges at a third and at a ninth of the learning rate too, a lower one does not help. A heuristic."""
ROLLBACK_LR_DIVISOR = 3.0
"""Divides the learning rate at each rollback: about half a decade, the usual grid of learning rates. A heuristic."""


def lr_at(settings: OptimSettings, step: int, progress: float) -> float:
    """The learning rate of the step after `step` steps; progress: fraction of the length that is done, 0 … 1."""
    peak_lr = settings.lr
    if step < settings.warmup_steps:
        return peak_lr * (0.001 + 0.999 * (step + 1) / settings.warmup_steps)
    match settings.lr_scheduler:
        case "cosine":
            # Down to 1 % of the peak, not 0, so that the last steps still count.
            return peak_lr * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
        case "multistep":
            # 16 and 22 of 26 epochs in torchvision's RetinaNet; 8 and 11 of 12 in Detectron2: 2/3 and 8/9.
            return peak_lr * float(0.1 ** ((progress >= 2 / 3) + (progress >= 8 / 9)))
        case "exponential":
            return peak_lr * float(0.01 ** min(1.0, progress))
        case "constant":
            return peak_lr


class Recovery:
    """The rollbacks of a run, and the learning rate after them."""

    def __init__(self, setup: TrainSetup, log_event: EventLogger) -> None:
        self._setup, self._log_event = setup, log_event
        self.rollback_count = 0

    @property
    def peak_lr(self) -> float:
        """Peak learning rate after the rollbacks so far."""
        return self._setup.config.optim.lr / ROLLBACK_LR_DIVISOR**self.rollback_count

    def lr(self) -> float:
        """The rate of the next step."""
        setup, progress = self._setup, max(0.0, self._setup.progress)
        rate = lr_at(setup.config.optim, setup.state.step, progress) / ROLLBACK_LR_DIVISOR**self.rollback_count
        return extended_rate(rate, progress) if setup.extension.step else rate

    def state(self) -> dict[str, Any]:
        return {"rollbacks": self.rollback_count}

    def resume(self, resumed: Resumed) -> None:
        self.rollback_count = resumed.rollback_count

    def restore(self, owners: Sequence[StateOwner], loaded: LoadedCheckpoint | None) -> None:
        """Restores a checkpoint in rank 0, or the state of step 0 if there is none; the weights are then left as they
        are. If the content of one cannot be restored, the one before is taken. `send_to_other_ranks` has to follow.
        Raises CheckpointError if the data set changed, or if no checkpoint can be restored."""
        rejected: dict[int, str] = {}
        rollback_count = self.rollback_count
        while True:
            self.rollback_count = rollback_count  # not that of one that was rejected
            try:
                self._restore(owners, loaded)
                return
            except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
                if loaded is None or is_out_of_memory(error):
                    raise
                self._setup.device.synchronize()  # raises if the device has failed, and not the checkpoint
                rejected[loaded.step] = f"its state cannot be restored: {type(error).__name__}: {str(error)[:200]}"
                loaded = checkpoint.load_newest(self._setup.folder.path, self._log_event, rejected=rejected)

    def _restore(self, owners: Sequence[StateOwner], loaded: LoadedCheckpoint | None) -> None:
        setup, state, run = self._setup, self._setup.state, self._setup.folder.path
        rollbacks = read_rollbacks(run)
        # Of those of this attempt, the events may not have been written (a full disk).
        rollback_count = max([self.rollback_count, *(event.data["count"] for event in rollbacks)])
        best_ap = max([-1.0, *(event.data["best_ap"] for event in rollbacks)])
        state.sizes = read_sizes(run, setup.initial_sizes)
        state.redo_until = max((window.step for window in read_lines(run, STEPS, StepWindow)), default=0)
        state.diverged_step = None
        setup.loss_accumulator.reset()
        if loaded is None:
            if setup.folder.attempt > 1 or rollback_count:
                self._log_event("info", "no checkpoint yet: starting from the first step")
            quarantined = _known_bad_images(setup)
            setup.loader.load_state_dict(setup.loader.state_dict() | {"position": 0, "quarantined": quarantined})
            state.step, state.trained_s = 0, 0.0
            for owner in owners:
                owner.resume(Resumed(None, rollback_count, best_ap))
            return
        saved = loaded.state
        is_changed = _check_data(setup, loaded.step, saved["data"], self._log_event)
        setup.optimizer.load_state_dict(saved["optimizer_step"], loaded.weights)
        loader_state = saved["loader"] | {"quarantined": _known_bad_images(setup) | saved["loader"]["quarantined"]}
        if is_changed:  # image indices have another meaning now
            loader_state |= {"quarantined": {}, "count": len(setup.train_indices)}
        setup.loader.load_state_dict(loader_state)
        state.diverged_step = setup.loss_accumulator.load_skipped_streak(saved["skipped_streak"])
        state.step, state.trained_s = loaded.step, saved["trained_s"]
        for owner in owners:
            owner.resume(Resumed(saved, max(rollback_count, saved["rollbacks"]), best_ap, is_changed))
        lost_steps = max(0, state.redo_until - state.step)
        again = f"; {lost_steps:,} steps are done again" if lost_steps else ""
        self._log_event("info", f"continuing from step {state.step:,}{again}")

    def roll_back(self, failed_at: int, best_ap: float, owners: Sequence[StateOwner]) -> None:
        """Restores the last healthy state, or that of step 0; from there the learning rate is a third. In rank 0. If
        the run diverged twice from the same checkpoint, it takes the one before: the weights may have been damaged
        before a gradient showed it. failed_at: the step, counted from 0, at which the limit of skipped steps was
        reached. Raises DivergedError after MAX_ROLLBACKS."""
        setup, config, run = self._setup, self._setup.config, self._setup.folder.path
        if self.rollback_count >= MAX_ROLLBACKS:
            raise self.make_error(failed_at)
        setup.writer.wait()
        rollback_step, count = _choose_rollback_step(run), self.rollback_count + 1
        lower_lr = self.peak_lr / ROLLBACK_LR_DIVISOR
        self._log_event(
            "rolled_back",
            f"{config.optim.max_skipped_steps} steps in a row had gradients that are not finite (step "
            f"{failed_at + 1:,}): rolled back to step {rollback_step:,}, continuing at a third of the learning rate "
            f"({lower_lr:.3g})",
            failed_at=failed_at,
            rollback_step=rollback_step,
            count=count,
            lr=lower_lr,
            best_ap=best_ap,
        )
        checkpoint.discard_checkpoints(run, after=rollback_step, rollback_count=count)
        loaded = checkpoint.load_newest(run, self._log_event)
        if loaded is None:
            device = setup.device if setup.optimizer.sharding is None else Device(torch.device("cpu"))
            model = setup.make_initial_model(device, self._log_event)
            initial = OptimizerStep(model, config.optim, device, precision=config.run.precision)
            setup.optimizer.load_state_dict(initial.state_dict(), initial.ema_model.state_dict())
        self.rollback_count = count
        self.restore(owners, loaded)
        setup.writer.saved_step = -1 if loaded is None else loaded.step

    def make_error(self, step: int) -> DivergedError:
        """The error of a run whose gradients stayed non-finite up to `step`."""
        setup, lr = self._setup, self._setup.state.lr
        limit = setup.config.optim.max_skipped_steps
        healthy_weights = checkpoint.newest_healthy_weights(setup.folder.path)
        healthy = f"; it can start from --weights {healthy_weights}, which are healthy" if healthy_weights else ""
        fraction = "third" if self.rollback_count == 1 else "ninth"
        tried = f", also at a {fraction} of the learning rate" if self.rollback_count else ""
        return DivergedError(
            f"{limit} steps in a row had gradients that are not finite (step {step + 1:,}){tried}.",
            location=f"the images of that step: {name_images(setup, step)}",
            cause=f"broken boxes in these images, or a learning rate that is too high (it was {lr:.3g})",
            fix=f"`stoker data check` for the boxes; a new run with --lr {self.peak_lr / ROLLBACK_LR_DIVISOR:.2g}, "
            f"--clip-grad-norm 1 or --precision fp32{healthy}",
        )


def name_images(setup: TrainSetup, step: int) -> str:
    """The first images of a step, of all ranks, that begins after `step` steps."""
    batch_size = setup.config.run.batch_size
    names = list(map(setup.index.display_source, setup.loader.image_indices_at(step * batch_size, batch_size)))
    more = f" and {len(names) - MAX_NAMED_IMAGES} more" if len(names) > MAX_NAMED_IMAGES else ""
    return ", ".join(names[:MAX_NAMED_IMAGES]) + more


def _choose_rollback_step(run: Path) -> int:
    """The newest healthy checkpoint, or the one before if the last rollback took that; 0 without one."""
    steps, rollbacks = checkpoint.healthy_steps(run), read_rollbacks(run)
    if len(steps) > 1 and rollbacks and rollbacks[-1].data["rollback_step"] == steps[0]:
        return steps[1]
    return steps[0] if steps else 0
