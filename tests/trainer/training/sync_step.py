"""A rank of `test_sync.py`: steps with each method of `--sync`, in float64, against plain averages.

Prints one JSON object in rank 0. usage: python -m tests.trainer.training.sync_step METHOD…
"""

import copy
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stoker.config.settings import OptimSettings
from stoker.config.sync_method import parse_sync
from stoker.data.batch import Batch
from stoker.hardware.device import Device
from stoker.models import build
from stoker.training.cluster import find_place
from stoker.training.ddp import Ddp, Periodic, flatten
from stoker.training.optim import OptimizerStep
from stoker.training.ranks import Ranks
from stoker.training.resume import Resumed
from stoker.training.state import Signals
from tests.trainer.models.samples import make_batch, settings_of
from tests.trainer.training.parallels import ignore, make_setup, step_of

CPU = Device(torch.device("cpu"))
STEPS = 16
BOXES = (3, 0, 5, 1)
LR = 1e-4
"""Small, so that rounding is not amplified."""


class Case:
    """A model that is trained by this rank and the others."""

    def __init__(self, ranks: Ranks, method: str) -> None:
        torch.manual_seed(0)
        settings = settings_of("retinanet_tiny_fpn", backbone_norm="bn")
        self.model = build(settings, 3).double().train()
        optim = OptimSettings(
            optimizer="sgd", lr=LR, backbone_lr_mult=1.0, momentum=0.9, weight_decay=0.0, lr_scheduler="constant",
            warmup_steps=0, clip_grad_norm=0.0, ema_decay=0.9, grad_accum_steps=1, max_skipped_steps=20,
        )  # fmt: skip
        self.optimizer = OptimizerStep(self.model, optim, CPU, precision="fp32")
        setup, sync = make_setup(self.model, self.optimizer, ranks, CPU), parse_sync(method)
        self.accumulator, self.state, self.ranks = setup.loss_accumulator, setup.state, ranks
        self.parallel = Periodic(setup, ignore, sync) if sync.is_local else Ddp(setup, ignore, sync)
        self.parallel.warm_up(lambda: batch_of(ranks, 0))

    def steps(self, first: int, last: int, *, broken: int = -1) -> None:
        """broken: the step in which the images of rank 1 are not finite."""
        for number in range(first, last):
            self.state.step = number
            batch = batch_of(self.ranks, number)
            if number == broken and self.ranks.rank == 1:
                batch = batch._replace(images=batch.images * float("nan"))
            step_of(self.parallel, batch, LR)
            self.parallel.agree(Signals())

    def save(self) -> dict[str, Any]:
        """What a checkpoint has."""
        self.parallel.equalize()
        own = {
            "optimizer": self.optimizer.state_dict(),
            "ema": self.optimizer.ema_model.state_dict(),
            **self.parallel.state(),
        }
        return copy.deepcopy(own)

    def load(self, saved: dict[str, Any], step: int) -> None:
        self.optimizer.load_state_dict(saved["optimizer"], saved["ema"])
        self.state.step = step
        self.parallel.resume(Resumed({"sync": saved["sync"]}, 0))

    def weights(self) -> Tensor:
        return flatten([tensor for group in self.optimizer.replicated() for tensor in group])

    def spread(self) -> float:
        """Largest difference between ranks of all that steps change."""
        mine = self.weights()
        low, high = mine.clone(), mine.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN)
        dist.all_reduce(high, dist.ReduceOp.MAX)
        return float((high - low).abs().max())


def batch_of(ranks: Ranks, number: int) -> Batch:
    """This rank's part of the batch of a step."""
    whole = make_batch(BOXES, (64, 64), 3, seed=number)
    size = len(BOXES) // ranks.world_size
    part = Batch(*(tensor[ranks.rank * size : (ranks.rank + 1) * size] for tensor in whole))
    return part._replace(images=part.images.double(), boxes=part.boxes.double())


def run(ranks: Ranks, method: str, start: Tensor, plain: Tensor) -> dict[str, float]:
    """Numbers of one method, in all ranks. start, plain: the weights before and after steps with plain averages."""
    whole = Case(ranks, method)
    whole.steps(0, STEPS)
    before = whole.spread()
    whole.parallel.equalize()
    found = {
        "spread": before,
        "equalized": whole.spread(),
        "difference": float((flatten(whole.optimizer.weights()) - plain).norm() / (plain - start).norm()),
    }
    continued = Case(ranks, method)
    continued.steps(0, 12)
    saved = continued.save()
    continued.steps(12, STEPS)
    continued.parallel.equalize()
    restored = Case(ranks, method)
    restored.steps(0, 3)  # leaves a state that must not count
    restored.load(saved, 12)
    restored.steps(12, STEPS)
    restored.parallel.equalize()
    found["resumed"] = float((restored.weights() - continued.weights()).abs().max())
    broken = Case(ranks, method)
    broken.steps(0, 12)
    broken.steps(12, 15, broken=12)
    stats = broken.accumulator.read(broken.accumulator.take(), 15)
    found["skipped"] = stats.skipped_steps
    broken.parallel.equalize()
    found["finite"] = float(torch.isfinite(broken.weights()).all())
    found["equalized_after_skip"] = broken.spread()
    return found


def main() -> None:
    ranks = Ranks(find_place())
    ranks.connect()
    torch.set_num_threads(1)
    plain = Case(ranks, "plain")
    first = flatten(plain.optimizer.weights())
    plain.steps(0, STEPS)
    last = flatten(plain.optimizer.weights())
    found = {method: run(ranks, method, first, last) for method in sys.argv[1:]}
    if ranks.is_main:
        print(json.dumps(found))
    ranks.close(orderly=True)


if __name__ == "__main__":
    assert os.environ["RANK"]
    main()
