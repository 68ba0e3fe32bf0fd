"""A rank of `test_shard.py`: steps of a model that two ranks share, against one process with the whole batch.

In float64, where only a wrong formula differs. Prints a JSON object in rank 0: largest differences, and bytes.
"""

import json
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from stoker.config.settings import OptimSettings
from stoker.data.batch import Batch
from stoker.hardware.device import Device
from stoker.models import build
from stoker.models.detector import Detector
from stoker.training.cluster import find_place
from stoker.training.fsdp import Fsdp, Sharding
from stoker.training.optim import OptimizerStep
from stoker.training.ranks import Ranks
from stoker.training.state import Signals
from stoker.training.step import PlainStep, make_loss_fn
from tests.trainer.models.samples import make_batch, settings_of
from tests.trainer.training.parallels import ignore, make_setup, step_of

CPU = Device(torch.device("cpu"))
BOXES = (3, 0, 11, 1)
STEPS = 2
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "retinanet": ("retinanet_tiny_fpn", {"backbone_norm": "sync_bn"}, "adamw"),
    "checkpointed": ("retinanet_tiny_fpn", {"backbone_norm": "sync_bn", "activation_checkpointing": True}, "sgd"),
    "ember": ("ember_n", {"backbone_norm": "sync_bn"}, "adamw"),
    "fcos": ("fcos_resnet18_fpn", {"backbone_norm": "frozen_bn"}, "sgd"),
    "ssdlite": ("ssdlite320_mobilenet_v3_large", {"backbone_norm": "sync_bn"}, "sgd"),
    "faster_rcnn": (
        "faster_rcnn_resnet18_fpn",
        {"backbone_norm": "frozen_bn", "activation_checkpointing": True},
        "sgd",
    ),
}
MAX_PART_BYTES = 2**20
"""So that each model has several parts, some within a segment of activation checkpointing."""


class SmallParts(Sharding):
    """A Sharding with parts as small as the models here need it."""

    def shard(self, model: torch.nn.Module, *, max_part_bytes: int = MAX_PART_BYTES) -> None:
        super().shard(model, max_part_bytes=max_part_bytes)


def make_step(case: str, sharding: Sharding | None) -> tuple[Detector, OptimizerStep]:
    name, changes, optimizer = CASES[case]
    torch.manual_seed(0)
    model = build(settings_of(name, **changes), 3).double().train()
    optim = OptimSettings(
        optimizer=optimizer, lr=1e-3, backbone_lr_mult=0.5, momentum=0.9, weight_decay=0.01, lr_scheduler="constant",
        warmup_steps=0, clip_grad_norm=1.0, ema_decay=0.5, grad_accum_steps=1, max_skipped_steps=20,
    )  # fmt: skip
    return model, OptimizerStep(model, optim, CPU, precision="fp32", sharding=sharding)


def batch_of(case: str) -> Batch:
    size = (96, 96) if case == "ssdlite" else (64, 64)
    batch = make_batch(BOXES, size, 3)
    return batch._replace(images=batch.images.double(), boxes=batch.boxes.double())


def tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree.double()]
    if isinstance(tree, dict):
        return [tensor for key in tree for tensor in tensors(tree[key])]
    return [tensor for value in tree for tensor in tensors(value)] if isinstance(tree, list | tuple) else []


def difference(one: Any, other: Any) -> float:
    pairs = list(zip(tensors(one), tensors(other), strict=True))
    return max(float((a - b).abs().max()) for a, b in pairs if a.numel())


def whole_state(optimizer: OptimizerStep) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return optimizer.state_dict(), optimizer.ema_model.state_dict()


def own_bytes(optimizer: OptimizerStep) -> int:
    """Bytes of parameters, EMA parameters and moments that this rank keeps."""
    state = [*optimizer.model.parameters(), *optimizer.ema_model.parameters()]
    state += [tensor for entry in optimizer._optimizer.state.values() for tensor in entry.values()]
    return sum((tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes for tensor in state)


def run_case(ranks: Ranks, case: str) -> dict[str, float]:
    batch, autocast = batch_of(case), CPU.autocast("fp32")
    model, optimizer = make_step(case, None)
    expected_losses: dict[str, float] = {}
    for step in range(STEPS):
        losses = PlainStep(make_loss_fn(model, compile=False), optimizer, None, autocast).forward_backward(batch)
        optimizer.step(1e-3, step)
        expected_losses = {name: expected_losses.get(name, 0.0) + float(loss) for name, loss in losses.items()}
    sharding = SmallParts.over(ranks, torch.device("cpu"))
    own, own_optimizer = make_step(case, sharding)
    setup = make_setup(own, own_optimizer, ranks, CPU)
    accumulator, fsdp = setup.loss_accumulator, Fsdp(setup, ignore)
    half = len(BOXES) // 2
    mine = Batch(*(tensor[ranks.rank * half : (ranks.rank + 1) * half] for tensor in batch))
    fsdp.warm_up(lambda: mine)
    for _ in range(STEPS):
        step_of(fsdp, mine, 1e-3, Signals(stop=ranks.rank == 1, save=ranks.rank == 0))
    agreed = fsdp.agree(Signals())
    assert (agreed.stop, agreed.evaluate, agreed.save, agreed.diverged_step) == (True, False, True, None), agreed
    means = accumulator.read(accumulator.take(), STEPS)
    found = {
        "losses": max(abs(STEPS * means.losses[name] - total) for name, total in expected_losses.items()) * 1e-4,
        "parts": sum(isinstance(module, FSDPModule) for module in own.modules()),
        "own_bytes": own_bytes(own_optimizer) / own_bytes(optimizer),
    }
    gathered = sharding.gather(whole_state(own_optimizer))
    if ranks.is_main:
        found["state"] = difference(whole_state(optimizer), gathered)
    # The EMA weights predict what those of one process predict; two batches, without an update between them.
    with torch.no_grad():
        outputs = [own_optimizer.ema_model(batch.images), own_optimizer.ema_model(batch.images)]
        own_optimizer.ema_model.decode(outputs[1], batch.resized_size, batch.scale, batch.original_size)
        sharding.reshard(own_optimizer.ema_model)
        found["ema"] = difference(list(optimizer.ema_model(batch.images)), list(outputs[1]))
    # What one process saved can be read by ranks, and has the effect of the same state.
    _, restored = make_step(case, sharding)
    restored.load_state_dict(*whole_state(optimizer))
    again = sharding.gather(whole_state(restored))
    if ranks.is_main:
        found["restored"] = difference(whole_state(optimizer), again)
    # A gradient that is not finite in one rank's rows makes all ranks skip the step.
    before = sharding.gather(whole_state(own_optimizer)[0]["model"])
    backward = own_optimizer.backward

    def overflow(loss: Tensor) -> None:
        backward(loss)
        next(p.grad.to_local() for p in own.parameters() if p.grad is not None).fill_(float("inf"))  # type: ignore[attr-defined]

    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 1:
            patch.setattr(own_optimizer, "backward", overflow)
        step_of(fsdp, mine, 1e-3)
    skipped = accumulator.read(accumulator.take(), 1).skipped_steps
    after = sharding.gather(whole_state(own_optimizer)[0]["model"])
    counted = {name for name in before if "num_batches_tracked" not in name}
    found["skipped"] = difference([before[n] for n in counted], [after[n] for n in counted]) if skipped == 1 else 1.0
    return found


def main() -> None:
    ranks = Ranks(find_place())
    ranks.connect()
    found = {}
    for case in sys.argv[1:] or CASES:
        found[case] = run_case(ranks, case)
        print(case, found[case], file=sys.stderr)
    if ranks.is_main:
        print(json.dumps(found))
    ranks.close(orderly=True)


if __name__ == "__main__":
    main()
