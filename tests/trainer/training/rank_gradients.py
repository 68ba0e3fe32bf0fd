"""A rank of `test_ranks.py`: gradients and losses of half a batch, averaged over two ranks, against the whole batch.

In float64, where only a wrong formula differs. Prints `{model: largest difference}` in rank 0.
"""

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stoker.config.settings import OptimSettings
from stoker.config.sync_method import PLAIN
from stoker.data.batch import Batch
from stoker.hardware.device import Device
from stoker.models import build
from stoker.models.detector import Detector
from stoker.training.cluster import find_place
from stoker.training.ddp import Ddp
from stoker.training.optim import OptimizerStep
from stoker.training.ranks import Ranks
from stoker.training.state import Signals
from stoker.training.step import PlainStep, make_loss_fn
from tests.trainer.models.samples import make_batch, settings_of
from tests.trainer.training.parallels import ignore, make_setup, step_of

CASES: dict[str, dict[str, Any]] = {
    "retinanet_tiny_fpn": {"backbone_norm": "sync_bn"},
    "ember_n": {"backbone_norm": "sync_bn"},
    "fcos_resnet18_fpn": {"backbone_norm": "frozen_bn"},
    "ssdlite320_mobilenet_v3_large": {"backbone_norm": "sync_bn"},
    "faster_rcnn_resnet18_fpn": {"backbone_norm": "frozen_bn"},
}
CPU = Device(torch.device("cpu"))
BOXES = (3, 0, 11, 1)
"""Of the images: one is empty, and the halves have very different numbers."""


def part_of(batch: Batch, rank: int, ranks: int) -> Batch:
    size = len(batch.images) // ranks
    return Batch(*(tensor[rank * size : (rank + 1) * size] for tensor in batch))


def make_step(name: str, changes: dict[str, Any]) -> tuple[Detector, OptimizerStep]:
    torch.manual_seed(0)
    model = build(settings_of(name, **changes), 3).double().train()
    optim = OptimSettings(
        optimizer="sgd", lr=0.1, backbone_lr_mult=1.0, momentum=0.0, weight_decay=0.0, lr_scheduler="constant",
        warmup_steps=0, clip_grad_norm=0.0, ema_decay=0.0, grad_accum_steps=1, max_skipped_steps=20,
    )  # fmt: skip
    return model, OptimizerStep(model, optim, CPU, precision="fp32")


def states(model: Detector) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}


def largest_difference(ranks: Ranks, name: str, changes: dict[str, Any], micro_batches: int) -> float:
    """Of the weights and running statistics after one step, and of the losses."""
    size = (96, 96) if name.startswith("ssdlite") else (64, 64)
    batch = make_batch(BOXES * micro_batches, size, 3)
    batch = batch._replace(images=batch.images.double(), boxes=batch.boxes.double())
    model, optimizer = make_step(name, changes)
    autocast = CPU.autocast("fp32")
    if micro_batches == 1:
        losses = PlainStep(make_loss_fn(model, compile=False), optimizer, None, autocast).forward_backward(batch)
        optimizer.step(0.1, 0)
    else:  # the parts that the ranks process at the same time
        losses = {}
        for k in range(micro_batches):
            parts = [part_of(part_of(batch, rank, 2), k, micro_batches) for rank in range(2)]
            together = Batch(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
            part_losses = make_loss_fn(model, compile=False)(together)
            optimizer.backward(torch.stack(list(part_losses.values())).sum() / micro_batches)
            for key, loss in part_losses.items():
                losses[key] = losses.get(key, 0.0) + loss.detach() / micro_batches
        optimizer.step(0.1, 0)
    own, own_optimizer = make_step(name, changes)
    setup = make_setup(own, own_optimizer, ranks, CPU, micro_batches=micro_batches)
    accumulator, ddp = setup.loss_accumulator, Ddp(setup, ignore, PLAIN)
    mine = part_of(batch, ranks.rank, ranks.world_size)
    ddp.warm_up(lambda: part_of(mine, 0, micro_batches))
    step_of(ddp, mine, 0.1, Signals(stop=ranks.rank == 1, evaluate=ranks.rank == 0))
    agreed = ddp.agree(Signals())
    assert agreed == (True, True, False, 0.0, None), agreed
    expected, actual = states(model), states(own)
    means = accumulator.read(accumulator.take(), 1).losses
    differences = [float((actual[key] - tensor).abs().max()) for key, tensor in expected.items()]
    differences += [abs(means[key] - float(loss)) * 1e-4 for key, loss in losses.items()]  # they are summed in fp32
    return max(differences)


def main() -> None:
    ranks = Ranks(find_place())
    ranks.connect()
    found = {}
    for name, changes in CASES.items():
        if not sys.argv[1:] or name in sys.argv[1:]:
            found[name] = largest_difference(ranks, name, changes, 1)
            print(name, found[name], file=sys.stderr)
    found["accumulation"] = largest_difference(ranks, "retinanet_tiny_fpn", {"backbone_norm": "sync_bn"}, 2)
    assert [len(values) for values in [ranks.gather_all(ranks.rank)]] == [2]
    if ranks.is_main:
        print(json.dumps(found))
    ranks.close(orderly=True)
    assert not dist.is_initialized()


if __name__ == "__main__":
    assert os.environ["RANK"]
    main()
