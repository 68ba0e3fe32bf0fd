"""Compares the Triton kernels with the separate operators, in Triton's interpreter on CPU tensors. It is chosen for a
whole process: test_triton_kernels.py starts `python -m tests.trainer.models.interpreted_kernels`, which prints JSON.
"""

import json
import os
import types
from collections.abc import Sequence
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from stoker.config.settings import Config
from stoker.hardware.selection import select_device
from stoker.models import build
from stoker.models.layers import losses, matching, triton_kernels
from stoker.training import make_step
from tests.trainer.models.samples import make_batch, settings_of


def random_boxes(draw: torch.Generator, *shape: int, whole: bool) -> Tensor:
    """whole: with whole coordinates on a small grid, which tie all the time; else with any."""
    corner, size = torch.rand(*shape, 2, generator=draw) * 30, 1 + torch.rand(*shape, 2, generator=draw) * 20
    boxes = torch.cat((corner, corner + size), -1)
    return (boxes / 4).round() if whole else boxes


def matches(
    num_boxes: int, num_anchors: int, thresholds: tuple[float, float], *, fill: float | Sequence[int], whole: bool
) -> bool:
    """Whether all matches are equal. fill: fraction of the slots that are valid, or which; what the others hold is
    NaN."""
    draw = torch.Generator().manual_seed(num_boxes)
    boxes = random_boxes(draw, 3, num_boxes, whole=whole)
    anchors = random_boxes(draw, num_anchors, whole=whole)
    anchors[:, 2:] = torch.maximum(anchors[:, 2:], anchors[:, :2] + 1)  # an anchor has an area
    if isinstance(fill, float):
        valid = torch.rand(3, num_boxes, generator=draw) < fill
    else:
        valid = torch.isin(torch.arange(num_boxes), torch.tensor(fill, dtype=torch.int64)).expand(3, -1).clone()
    boxes[0, :2, 2:] = boxes[0, :2, :2]  # boxes without an area
    boxes[2, -1] = torch.tensor([100.0, 100, 110, 110])  # overlaps no anchor
    if num_boxes > 20:  # boxes twice, in two tiles of the kernel
        boxes[1, 20:] = boxes[1, : num_boxes - 20]
    boxes[~valid] = torch.nan
    options = {"fg_iou_thresh": thresholds[0], "bg_iou_thresh": thresholds[1]}
    expected = matching.match_anchors(boxes, valid, anchors, **options)
    return torch.equal(triton_kernels.match_anchors(boxes, valid, anchors, **options), expected)


def tiles_of_ious(counts: tuple[int, ...], num_slots: int, num_anchors: int) -> int:
    """How many tiles of IoUs matching computes for images with these numbers of boxes."""
    valid = torch.arange(num_slots) < torch.tensor(counts)[:, None]
    draw = torch.Generator().manual_seed(0)
    boxes, anchors = (random_boxes(draw, *shape, whole=False) for shape in ((len(counts), num_slots), (num_anchors,)))
    overlaps, calls = triton_kernels._overlaps, 0

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return overlaps(*args)

    with mock.patch.object(triton_kernels, "_overlaps", counted):
        triton_kernels.match_anchors(boxes, valid, anchors, fg_iou_thresh=0.5, bg_iou_thresh=0.4)
    return calls


def focal(
    dtype: torch.dtype, classes: int, gamma: float, target: int | None = None, scale: float = 4.0
) -> dict[str, float]:
    """Differences from the separate operators: of the sums, relative; of the gradients, in units of the last place of
    bf16, or of their largest value in float32. target: that of every anchor; None: random."""
    draw = torch.Generator().manual_seed(classes)
    counts = (90, 21, 7, 1)
    # As a head leaves them: in channels-last maps, so that the rows of an image follow each other, and a slice of a
    # larger batch.
    levels = [
        (scale * torch.randn(3, count * classes, generator=draw)).to(dtype)[1:].unflatten(1, (count, classes))
        for count in counts
    ]
    levels = [level.detach().requires_grad_() for level in levels]
    targets = torch.randint(-2, classes, (2, sum(counts)), generator=draw)
    if target is not None:
        targets.fill_(target)
    weights, options = torch.tensor([1.0, 0.37]), {"alpha": 0.25, "gamma": gamma}
    expected = losses.focal_loss(torch.cat(levels, 1), targets, **options)
    expected_grads = torch.cat(torch.autograd.grad(expected @ weights, levels), 1).float()
    found = triton_kernels.focal_loss(levels, targets, **options)
    grads = torch.autograd.grad(found @ weights, levels)
    assert all(grad.dtype == dtype for grad in grads)
    difference = (torch.cat(grads, 1).float() - expected_grads).abs()
    ulp = expected_grads.abs() * 2**-7 + 1e-8 if dtype == torch.bfloat16 else expected_grads.abs().max() + 1e-12
    return {
        "sums": float(((found - expected).abs() / expected.abs().clamp(min=1e-6)).max()),
        "gradients": float((difference / ulp).max()),
        "any": float(expected.abs().max()),
    }


def detector() -> dict[str, float]:
    """Largest difference of a loss and of a gradient of a whole model, relative to its norm."""
    torch.manual_seed(0)
    model = build(settings_of("retinanet_tiny_fpn"), 5).train()
    batch = make_batch((3, 0, 16), (64, 96), 5)
    results = []
    for fused in (False, True):
        model.fused_loss = fused  # type: ignore[assignment]
        model.zero_grad()
        terms = model.loss(model(batch.images), batch)
        torch.stack(list(terms.values())).sum().backward()
        results.append((terms, {name: weight.grad for name, weight in model.named_parameters()}))
    (expected, expected_grads), (found, grads) = results
    # What follows training must not depend on it.
    outputs = model.eval()(batch.images)
    model.candidates(outputs, batch.resized_size, score_threshold=0.05)
    return {
        "losses": max(float((found[name] / value - 1).abs()) for name, value in expected.items()),
        "gradients": max(
            float((grads[name] - value).norm() / value.norm().clamp(min=1e-6))  # type: ignore[operator,union-attr]
            for name, value in expected_grads.items()
        ),
    }


def trial() -> dict[str, float]:
    """What the trial at the start of a run finds."""
    make_step.ROUNDS = make_step.CALLS = 1
    setup: Any = types.SimpleNamespace(
        model=build(settings_of("retinanet_tiny_fpn"), 5).train(),
        device=select_device("cpu"),
        config=Config().replace(precision="bf16", compile=False),
    )
    found = make_step.compare_losses(setup, make_batch((3, 0), (64, 96), 5))
    assert found is not None
    assert not setup.model.fused_loss
    return dict(zip(("separate", "fused", "difference"), found, strict=True))


if __name__ == "__main__":
    fp32, bf16 = torch.float32, torch.bfloat16
    usual = (0.5, 0.4)
    found = {
        "matches": {
            "some slots": matches(20, 300, usual, fill=0.6, whole=False),
            "ties": matches(37, 300, usual, fill=0.6, whole=True),
            "all slots full": matches(16, 257, usual, fill=1.0, whole=True),
            "no box": matches(5, 40, usual, fill=0.0, whole=False),
            "one slot, one anchor": matches(3, 1, usual, fill=1.0, whole=False),
            "background below 0": matches(20, 200, (0.2, 0.0), fill=0.6, whole=True),
            "nothing ignored": matches(20, 200, (0.5, 0.5), fill=0.6, whole=True),
            "one box": matches(40, 300, usual, fill=[0], whole=True),
            "a tile of boxes": matches(40, 256, usual, fill=range(8), whole=True),
            "a tile of boxes and one": matches(40, 300, usual, fill=range(9), whole=True),
            "only the last slot": matches(40, 300, usual, fill=[39], whole=True),
            "tiles without a box between others": matches(40, 300, usual, fill=[3, 7, 17, 39], whole=True),
        },
        "tiles": tiles_of_ious((0, 1, 8, 9, 40), 40, 300),
        "focal": {
            "float32, 80 classes": focal(fp32, 80, 2.0),
            "float32, 1 class": focal(fp32, 1, 2.0),
            "float32, 7 classes, gamma 1.5": focal(fp32, 7, 1.5),
            "float32, gamma 0": focal(fp32, 3, 0.0),
            "float32, large logits": focal(fp32, 5, 2.0, scale=40.0),
            "float32, timid logits": focal(fp32, 5, 2.0, target=-1, scale=8.0),
            "bf16, 80 classes": focal(bf16, 80, 2.0),
            "bf16, 5 classes": focal(bf16, 5, 1.5),
        },
        "ignored": focal(fp32, 5, 2.0, target=matching.IGNORED),
        "detector": detector(),
        "trial": trial(),
    }
    print(json.dumps(found))
