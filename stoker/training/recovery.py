"""Divergence: back to the last healthy checkpoint, at a third of the learning rate.

If gradients stay non-finite, the run rolls back. After two rollbacks it ends with exit code 6 and names the images of
the step. `stability.py` judges losses and rates; it only reports.

A rollback is the event `rolled_back`, written before anything is undone. So a run that is killed at any moment either
diverges again at the same step, or continues from the checkpoint that the event names.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stoker.errors import DivergedError
from stoker.hardware.device import Device
from stoker.training import checkpoint
from stoker.training.optim import OptimizerStep, lr_at
from stoker.training.resume import Resumed, read_rollbacks
from stoker.training.start import build_initial_model
from stoker.training.state import EventLogger, TrainSetup

MAX_NAMED_IMAGES = 8
"""Images that an error names at most."""

MAX_ROLLBACKS = 2
"""If training diverges at a third and at a ninth of the learning rate too, a lower one does not help. A heuristic."""

ROLLBACK_LR_DIVISOR = 3.0
"""Divides the learning rate at each rollback: about half a decade, the usual grid of learning rates. A heuristic."""

Restore = Callable[[checkpoint.LoadedCheckpoint | None, int], None]
"""Puts a checkpoint into the training after so many rollbacks; None: the state of step 0, except for the weights."""


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
        """The learning rate of the next step."""
        setup = self._setup
        return lr_at(setup.config.optim, setup.state.step, setup.progress) / ROLLBACK_LR_DIVISOR**self.rollback_count

    def state(self) -> dict[str, Any]:
        """Its part of a checkpoint."""
        return {"rollbacks": self.rollback_count}

    def resume(self, resumed: Resumed) -> None:
        self.rollback_count = resumed.rollback_count

    def roll_back(self, failed_at: int, best_ap: float, restore: Restore) -> None:
        """Restores the last healthy state; from there the learning rate is a third. In rank 0.

        failed_at: the step, counted from 0, at which the limit of skipped steps was reached. Without a checkpoint it
        restores the state of step 0. If the run diverged twice from the same checkpoint, it takes the one before: the
        weights may have been damaged before a gradient showed it. Raises DivergedError after MAX_ROLLBACKS.
        """
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
            model = build_initial_model(config, setup.index, device, self._log_event)
            initial = OptimizerStep(model, config.optim, device, precision=config.run.precision)
            setup.optimizer.load_state_dict(initial.state_dict(), initial.ema_model.state_dict())
        restore(loaded, count)
        setup.writer.saved_step = -1 if loaded is None else loaded.step

    def make_error(self, step: int) -> DivergedError:
        """The error of a run whose gradients stayed non-finite up to `step`."""
        setup, lr = self._setup, self._setup.state.lr
        batch_size, limit = setup.config.run.batch_size, setup.config.optim.max_skipped_steps
        image_names = [
            setup.index.display_source(image_index)
            for image_index in setup.loader.image_indices_at(step * batch_size, batch_size)
        ]
        more = f" and {len(image_names) - MAX_NAMED_IMAGES} more" if len(image_names) > MAX_NAMED_IMAGES else ""
        healthy_weights = checkpoint.newest_healthy_weights(setup.folder.path)
        healthy = f"; it can start from --weights {healthy_weights}, which are healthy" if healthy_weights else ""
        fraction = "third" if self.rollback_count == 1 else "ninth"
        tried = f", also at a {fraction} of the learning rate" if self.rollback_count else ""
        return DivergedError(
            f"{limit} steps in a row had gradients that are not finite (step {step + 1:,}){tried}.",
            location=f"the images of that step: {', '.join(image_names[:MAX_NAMED_IMAGES])}{more}",
            cause=f"broken boxes in these images, or a learning rate that is too high (it was {lr:.3g})",
            fix=f"`stoker data check` for the boxes; a new run with --lr {self.peak_lr / ROLLBACK_LR_DIVISOR:.2g}, "
            f"--clip-grad-norm 1 or --precision fp32{healthy}",
        )


def _choose_rollback_step(run: Path) -> int:
    steps = checkpoint.healthy_steps(run)
    used_steps = [event.data["rollback_step"] for event in read_rollbacks(run)]
    if len(steps) > 1 and used_steps[-1:] == steps[:1]:
        return steps[1]
    return steps[0] if steps else 0
