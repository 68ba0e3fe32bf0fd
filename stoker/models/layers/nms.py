"""NMS without a host sync: greedy NMS as the fixed point of a rule, in a fixed number of rounds on fixed shapes.

The proposals of Faster R-CNN use it in training and in evaluation, `postprocess.py` for final detections on an
accelerator (docs/decisions/0007).
"""

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stoker.models.layers.boxes import iou

NMS_ROUNDS = 32
"""Rounds of `fixed_point_nms`. It needs one per link of the longest chain of boxes in which each decides about the next
one, and one to detect convergence: 10 for 2,000 boxes around 20 objects. Even, so that without convergence too many
boxes stay rather than too few."""
MAX_PAIRS = 2**25
"""IoUs that are computed at once: 128 MiB in fp32; about four such tensors exist at the same time."""


def fixed_point_nms(
    boxes: Tensor,
    eligible: Tensor,
    *,
    iou_threshold: float,
    labels: Tensor | None = None,
    num_rounds: int = NMS_ROUNDS,
) -> tuple[Tensor, Tensor]:
    """Greedy NMS of the `eligible` ones (bool [B, K]) of boxes [B, K, 4], best first, in fixed shapes: (kept: bool
    [B, K], converged: bool [B]). labels [B, K]: NMS within each label; None: all boxes have one label.

    The result of greedy NMS is the only fixed point of this rule: a box is kept if no better kept box has an IoU above
    `iou_threshold` with it. Starting with "all kept", each round is right for one more link of every chain of boxes.
    After an even number of rounds, the kept boxes include those of greedy NMS; after an odd number, they are included.
    """
    overlaps = iou(boxes, boxes) > iou_threshold
    if labels is not None:
        overlaps = overlaps & (labels[:, :, None] == labels[:, None, :])
    # Half the bytes of fp32 for each round to read. Sums of zeros and ones are never rounded to zero.
    dtype = boxes.dtype if boxes.device.type == "cpu" else torch.float16
    suppresses = overlaps.triu(1).to(dtype)  # [B, K, K]: row suppresses column
    previous = keep = eligible
    for _ in range(num_rounds):
        previous = keep
        keep = eligible & (torch.bmm(previous[:, None].to(dtype), suppresses)[:, 0] == 0)
    return keep, (keep == previous).all(1)


@cache
def torchvision_nms() -> Callable[[Tensor, Tensor, float], Tensor]:
    """torchvision's greedy NMS of boxes [K, 4] with scores [K] and an IoU threshold: indices int64, best first. Its
    library of operators is loaded without importing torchvision, because that imports torch's compiler: 3 s."""
    spec = importlib.util.find_spec("torchvision")
    libraries = list(Path(spec.origin).parent.glob("_C*.so")) if spec and spec.origin else []
    if len(libraries) == 1:
        torch.ops.load_library(libraries[0])  # type: ignore[no-untyped-call]
    else:
        importlib.import_module("torchvision")
    return torch.ops.torchvision.nms


def largest_float32(value: float) -> float:
    """The largest float32 that is not above `value`: an fp32 number is above both or above none. torch would compare
    with the nearest one, which may be above `value`; torchvision's NMS on a CPU compares in double precision."""
    nearest = np.float32(value)
    return float(nearest if float(nearest) <= value else np.nextafter(nearest, np.float32(-np.inf)))
