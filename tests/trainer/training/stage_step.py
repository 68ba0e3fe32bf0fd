"""A rank of `test_stages.py`: steps of a model in stages, against one process with the same micro-batches.

In float64, where only a wrong formula differs. Prints a JSON object in rank 0: largest differences, and bytes.
"""

import functools
import json
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from stoker.config.settings import OptimSettings
from stoker.data.batch import Batch
from stoker.models import build
from stoker.models.detector import Detector
from stoker.training.cluster import find_place
from stoker.training.defaults.dry_run import PeakMemoryMode
from stoker.training.optim import OptimizerStep
from stoker.training.ranks import Ranks
from stoker.training.stages import Pipeline, Stages
from stoker.training.state import Signals
from stoker.training.step import PlainStep, make_loss_fn
from tests.trainer.models.samples import make_batch, settings_of
from tests.trainer.training.parallels import ignore, make_setup, step_of
from tests.trainer.training.shard_step import CPU, difference, whole_state

BOXES = (3, 0, 11, 1, 2, 5, 0, 7)
STEPS = 2
CLASSES = 3
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "retinanet": ("retinanet_tiny_fpn", {"backbone_norm": "bn"}, "adamw"),
    "checkpointed": ("retinanet_tiny_fpn", {"backbone_norm": "sync_bn", "activation_checkpointing": True}, "sgd"),
    "ember": ("ember_n", {"backbone_norm": "bn", "nms_free": True}, "adamw"),
    "fcos": ("fcos_resnet18_fpn", {"backbone_norm": "frozen_bn", "trainable_backbone_layers": 2}, "sgd"),
    "ssdlite": ("ssdlite320_mobilenet_v3_large", {"backbone_norm": "bn"}, "sgd"),
    "ssd": ("ssd300_vgg16", {"trainable_backbone_layers": 2}, "sgd"),
    "faster_rcnn": ("faster_rcnn_resnet18_fpn", {"backbone_norm": "frozen_bn"}, "sgd"),
    "frozen": ("fcos_resnet18_fpn", {"backbone_norm": "frozen_bn", "trainable_backbone_layers": 0}, "sgd"),
    "few": ("ember_n", {"backbone_norm": "bn"}, "sgd"),
}


def micro_batches_of(case: str) -> int:
    """Of three stages, `few` has fewer micro-batches."""
    return 2 if case == "few" else 4


def images_of(case: str) -> int:
    """Convolutions in float64 are slow: large models get few."""
    return 4 if case in ("ssdlite", "ssd", "faster_rcnn") else 8


def size_of(case: str) -> tuple[int, int]:
    return {"ssdlite": (96, 96), "ssd": (100, 100)}.get(case, (64, 64))


def make_step(case: str, stages: Stages | None) -> tuple[Detector, OptimizerStep]:
    name, changes, optimizer = CASES[case]
    torch.manual_seed(0)
    model = build(settings_of(name, **changes), CLASSES).double().train()
    optim = OptimSettings(
        optimizer=optimizer,  # type: ignore[arg-type]
        lr=1e-3, backbone_lr_mult=0.5, momentum=0.9, weight_decay=0.01, lr_scheduler="constant",
        warmup_steps=0, clip_grad_norm=1.0, ema_decay=0.5, grad_accum_steps=1, max_skipped_steps=20,
    )  # fmt: skip
    return model, OptimizerStep(model, optim, CPU, precision="fp32", sharding=stages)


def own_bytes(optimizer: OptimizerStep) -> int:
    """Bytes of parameters, EMA parameters and moments that this rank keeps."""
    state = [*optimizer.model.parameters(), *optimizer.ema_model.parameters()]
    state += [tensor for entry in optimizer._optimizer.state.values() for tensor in entry.values()]
    return sum(tensor.nbytes for tensor in state if not tensor.is_meta)


class SmallDevice(PeakMemoryMode):
    """Raises as a device does that has memory for so many bytes of tensors."""

    def __init__(self, limit_bytes: float) -> None:
        super().__init__("cpu")
        self.limit_bytes = limit_bytes

    def at_peak(self, operator: str) -> None:
        if self.peak_bytes > self.limit_bytes:
            raise torch.OutOfMemoryError(f"{self.peak_bytes} of {self.limit_bytes} bytes in {operator}")


def peak_bytes(optimizer: OptimizerStep, step: Callable[[], object], limit_bytes: float = math.inf) -> int:
    """The most bytes of tensors that live at once in a step: what a device of this rank must have."""
    memory = SmallDevice(limit_bytes)
    for tensor in tree_leaves((optimizer.state_dict(), optimizer.ema_model.state_dict())):
        if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
            memory.add(tensor)
    with memory:
        step()
    return memory.peak_bytes


def run_case(ranks: Ranks, case: str) -> dict[str, float]:
    batch, autocast = make_batch(BOXES[: images_of(case)], size_of(case), CLASSES), CPU.autocast("fp32")
    batch = batch._replace(images=batch.images.double(), boxes=batch.boxes.double())
    model, optimizer = make_step(case, None)
    expected_losses: dict[str, float] = {}
    plain = PlainStep(make_loss_fn(model, compile=False), optimizer, None, autocast, micro_batches_of(case))
    peaks = []
    for step in range(STEPS):
        losses: dict[str, torch.Tensor] = {}
        peaks.append(peak_bytes(optimizer, lambda losses=losses: losses.update(plain.forward_backward(batch))))
        optimizer.step(1e-3, step)
        expected_losses = {name: expected_losses.get(name, 0.0) + float(loss) for name, loss in losses.items()}
    stages = Stages.of(make_step(case, None)[0], ranks, torch.device("cpu"))
    own, own_optimizer = make_step(case, stages)
    setup = make_setup(own, own_optimizer, ranks, CPU, micro_batches=micro_batches_of(case), image_size=size_of(case))
    accumulator, pipeline = setup.loss_accumulator, Pipeline(setup, ignore)
    mine = batch if ranks.is_main else Batch(*[torch.empty(0)] * len(Batch._fields))

    signals = Signals(stop=ranks.rank == 1, evaluate=True, save=ranks.is_main)
    own_peaks = [peak_bytes(own_optimizer, lambda: step_of(pipeline, mine, 1e-3, signals)) for _ in range(STEPS)]
    agreed = pipeline.agree(Signals())
    assert (agreed.stop, agreed.evaluate, agreed.save, agreed.diverged_step) == (True, True, True, None), agreed
    means = accumulator.read(accumulator.take(), STEPS)
    found: dict[str, float] = {
        "losses": max(abs(STEPS * means.losses[name] / total - 1) for name, total in expected_losses.items()),
        "peak": max(ranks.gather_all(own_peaks[-1])) / peaks[-1],
        "own_bytes": own_bytes(own_optimizer) / own_bytes(optimizer),
        "all_bytes": sum(ranks.gather_all(own_bytes(own_optimizer))) / own_bytes(optimizer),
    }
    state, ema = stages.gather(whole_state(own_optimizer))
    if ranks.is_main:
        expected_state, expected_ema = whole_state(optimizer)
        assert list(expected_state["optimizer"]["state"]) == list(state["optimizer"]["state"])
        assert [g["params"] for g in expected_state["optimizer"]["param_groups"]] == [
            g["params"] for g in state["optimizer"]["param_groups"]
        ]
        assert (list(expected_ema), list(expected_state["model"])) == (list(ema), list(state["model"]))
        found["state"] = max(difference(expected_state, state), difference(expected_ema, ema))
    # The collected EMA weights predict what those of one process predict.
    stages.collect(own_optimizer.ema_model)
    with torch.no_grad():
        outputs = [m.eval()(batch.images[:2]) for m in (optimizer.ema_model, own_optimizer.ema_model)]
    found["ema"] = difference(list(outputs[0]), list(outputs[1]))
    own_optimizer.ema_model.train()
    stages.reshard(own_optimizer.ema_model)
    assert found["own_bytes"] == own_bytes(own_optimizer) / own_bytes(optimizer), "all is freed again"
    # What one process saved can be read by stages, and has the effect of the same state.
    _, restored = make_step(case, stages)
    restored.load_state_dict(*whole_state(optimizer))
    again = stages.gather(whole_state(restored))
    if ranks.is_main:
        found["restored"] = difference(whole_state(optimizer), again)
    # A gradient that is not finite in one stage makes all skip the step.
    before = stages.gather(own.state_dict())
    if ranks.rank == ranks.world_size - 1:
        parameter = next(p for p in own.parameters() if p.requires_grad and not p.is_meta)
        parameter.register_hook(lambda gradient: torch.full_like(gradient, float("inf")))
    step_of(pipeline, mine, 1e-3)
    skipped = accumulator.read(accumulator.take(), 1).skipped_steps
    after = stages.gather(own.state_dict())
    if ranks.is_main:
        counted = [name for name in before if "num_batches_tracked" not in name]
        found["skipped"] = difference([before[n] for n in counted], [after[n] for n in counted]) if skipped == 1 else 1
    return found


def run_limited(ranks: Ranks, case: str) -> dict[str, Any]:
    """Devices whose memory is too small for the model in one of them, with micro-batches of one image: the steps that
    one process and the stages do, and the largest difference of the stages' losses from those of a large device."""
    num_images = images_of(case)
    batch, autocast = make_batch(BOXES[:num_images], size_of(case), CLASSES), CPU.autocast("fp32")
    batch = batch._replace(images=batch.images.double(), boxes=batch.boxes.double())
    mine = batch if ranks.is_main else Batch(*[torch.empty(0)] * len(Batch._fields))

    def train_whole(limit_bytes: float) -> tuple[list[int], dict[str, float]]:
        model, optimizer = make_step(case, None)
        plain = PlainStep(make_loss_fn(model, compile=False), optimizer, None, autocast, num_images)
        peaks: list[int] = []
        totals: dict[str, float] = {}
        for step in range(STEPS):
            losses: dict[str, torch.Tensor] = {}
            update = functools.partial(lambda into: into.update(plain.forward_backward(batch)), losses)
            try:
                peaks.append(peak_bytes(optimizer, update, limit_bytes))
            except torch.OutOfMemoryError:
                break
            optimizer.step(1e-3, step)
            totals = {name: totals.get(name, 0.0) + float(loss) for name, loss in losses.items()}
        return peaks, totals

    def train_stages(limit_bytes: float) -> tuple[list[int], dict[str, float]]:
        stages = Stages.of(make_step(case, None)[0], ranks, torch.device("cpu"))
        model, optimizer = make_step(case, stages)
        setup = make_setup(model, optimizer, ranks, CPU, micro_batches=num_images, image_size=size_of(case))
        pipeline, accumulator = Pipeline(setup, ignore), setup.loss_accumulator
        peaks = [
            peak_bytes(optimizer, lambda: step_of(pipeline, mine, 1e-3, Signals()), limit_bytes) for _ in range(STEPS)
        ]
        return peaks, accumulator.read(accumulator.take(), STEPS).losses

    peaks, expected = train_whole(math.inf)
    own_peaks, _ = train_stages(math.inf)
    whole, largest = max(peaks), max(peak for ranked in ranks.gather_all(own_peaks) for peak in ranked)
    limit_bytes = (whole + largest) / 2
    steps_whole = len(train_whole(limit_bytes)[0])
    steps_stages, losses = train_stages(limit_bytes)
    return {
        "whole_bytes": whole, "stage_bytes": largest, "limit_bytes": limit_bytes,
        "steps_whole": steps_whole, "steps_stages": len(steps_stages),
        "losses": max(abs(STEPS * losses[name] / total - 1) for name, total in expected.items()),
    }  # fmt: skip


def main() -> None:
    ranks = Ranks(find_place())
    ranks.connect()
    found = {}
    names = sys.argv[1:]
    run = run_case
    if names[:1] == ["--limited"]:
        run, names = run_limited, names[1:]
    for case in names or CASES:
        found[case] = run(ranks, case)
        print(case, ranks.rank, found[case], file=sys.stderr)
    if ranks.is_main:
        print(json.dumps(found))
    ranks.close(orderly=True)


if __name__ == "__main__":
    main()
