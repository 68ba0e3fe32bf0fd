"""Matching and focal loss of RetinaNet as Triton kernels: the losses of a step read what they need once.

`match_anchors` equals `matching.match_anchors`; no IoU is stored, both passes compute those of the slots with boxes.
`focal_loss` equals `losses.focal_loss`, reads the logits of each pyramid level where the convolution left them, and
keeps nothing but these for the backward pass. Imported only where Triton is installed (the CUDA build of torch on
Linux); `training/make_step.py` decides whether they are used. TRITON_INTERPRET=1 runs them on CPU tensors.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (kernels have no types of Python)

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.models.layers.matching import BACKGROUND, IGNORED

BOX_TILE, ANCHOR_TILE = 8, 256
"""Boxes and anchors whose IoUs a program computes at once: 16 for each of 128 threads. An image of COCO has 7 boxes;
(4, 256), (8, 128) and (16, 128) need more instructions for an IoU (counted, sm_90)."""
FOCAL_BLOCK = 2048
"""Logits of a program: 8 for each thread of 8 warps."""
MATCH_CONSTANTS: dict[str, Any] = {
    "BOXES": BOX_TILE,
    "ANCHORS": ANCHOR_TILE,
    # No fused multiply-add: IoUs are rounded, and tie, as those of separate operators.
    "enable_fp_fusion": False,
}
"""Constants and compiler options of the matching kernels."""


def focal_constants(gamma: float) -> dict[str, Any]:
    """Constants and compiler options of the loss's kernels."""
    return {"GAMMA": gamma, "BLOCK": FOCAL_BLOCK, "num_warps": 8, "enable_fp_fusion": True}


_BACKGROUND, _IGNORED = tl.constexpr(BACKGROUND), tl.constexpr(IGNORED)

_library = torch.library.Library("stoker", "FRAGMENT")
_library.define(
    "match_anchors(Tensor boxes, Tensor valid, Tensor anchors, float fg_iou_thresh, float bg_iou_thresh) -> Tensor"
)
_library.define("focal_sums(Tensor[] levels, Tensor target, float alpha, float gamma) -> Tensor")
_library.define("focal_gradients(Tensor grad, Tensor[] levels, Tensor target, float alpha, float gamma) -> Tensor[]")


def match_anchors(
    boxes: Tensor, valid: Tensor, anchors: Tensor, *, fg_iou_thresh: float, bg_iou_thresh: float
) -> Tensor:
    """As `matching.match_anchors`, for float32 and anchors that have an area: int64 [B, A]."""
    return torch.ops.stoker.match_anchors(boxes.contiguous(), valid.contiguous(), anchors, fg_iou_thresh, bg_iou_thresh)


def focal_loss(levels: list[Tensor], target: Tensor, *, alpha: float, gamma: float) -> Tensor:
    """As `losses.focal_loss`: float32 [B]. levels: [B, A of the level, C] each, in the order of `target` [B, A]."""
    dense = [level if level[0].is_contiguous() else level.contiguous() for level in levels]
    return torch.ops.stoker.focal_sums(dense, target, alpha, gamma)


@triton.jit
def _boxes_of_image(valid, first_box, num_boxes, BOXES: tl.constexpr):
    """(a tile of the slots of this program's image, as indices of [B · M]; which of them have a box)."""
    m = first_box + tl.arange(0, BOXES)
    slot = tl.program_id(1) * num_boxes + m
    return slot, tl.load(valid + slot, mask=m < num_boxes, other=0) != 0


@triton.jit
def _overlaps(box, is_box, anchor, is_anchor):
    """IoUs [BOXES, ANCHORS] at these pointers, in the order of operations of `boxes.iou`; -1 where there is none."""
    box_x1 = tl.load(box, mask=is_box, other=0.0)[:, None]
    box_y1 = tl.load(box + 1, mask=is_box, other=0.0)[:, None]
    box_x2 = tl.load(box + 2, mask=is_box, other=0.0)[:, None]
    box_y2 = tl.load(box + 3, mask=is_box, other=0.0)[:, None]
    x1 = tl.load(anchor, mask=is_anchor, other=0.0)[None, :]
    y1 = tl.load(anchor + 1, mask=is_anchor, other=0.0)[None, :]
    x2 = tl.load(anchor + 2, mask=is_anchor, other=0.0)[None, :]
    y2 = tl.load(anchor + 3, mask=is_anchor, other=0.0)[None, :]
    width = tl.maximum(tl.minimum(box_x2, x2) - tl.maximum(box_x1, x1), 0.0)
    height = tl.maximum(tl.minimum(box_y2, y2) - tl.maximum(box_y1, y1), 0.0)
    intersection = width * height
    union = ((box_x2 - box_x1) * (box_y2 - box_y1) + (x2 - x1) * (y2 - y1)) - intersection
    return tl.where(is_box[:, None] & is_anchor[None, :], tl.div_rn(intersection, union), -1.0)


@triton.jit
def _largest_ious_kernel(
    boxes, valid, anchors, largest, num_boxes, num_anchors, BOXES: tl.constexpr, ANCHORS: tl.constexpr
):
    """Raises `largest`, int32 [B, M], to the bits of each box's largest IoU with the anchors of this program. The bits
    of positive floats have their order, and a maximum does not depend on the order of the programs."""
    a = tl.program_id(0) * ANCHORS + tl.arange(0, ANCHORS)
    for first_box in range(0, num_boxes, BOXES):
        slot, is_box = _boxes_of_image(valid, first_box, num_boxes, BOXES)
        if tl.max(is_box.to(tl.int32)) > 0:  # few images have as many boxes as slots
            best = tl.max(_overlaps(boxes + slot * 4, is_box, anchors + a * 4, a < num_anchors), axis=1)
            tl.atomic_max(largest + slot, best.to(tl.int32, bitcast=True), mask=best > 0.0)


@triton.jit
def _match_kernel(
    boxes, valid, anchors, largest, matched, num_boxes, num_anchors, fg_iou_thresh, bg_iou_thresh,
    BOXES: tl.constexpr, ANCHORS: tl.constexpr,
):  # fmt: skip
    """The match of each anchor of this program."""
    a = tl.program_id(0) * ANCHORS + tl.arange(0, ANCHORS)
    best_iou = tl.full((ANCHORS,), -1.0, tl.float32)
    best_box = tl.zeros((ANCHORS,), tl.int32)
    is_best_for_box = tl.zeros((ANCHORS,), tl.int32)
    for first_box in range(0, num_boxes, BOXES):
        slot, is_box = _boxes_of_image(valid, first_box, num_boxes, BOXES)
        if tl.max(is_box.to(tl.int32)) > 0:
            iou = _overlaps(boxes + slot * 4, is_box, anchors + a * 4, a < num_anchors)
            bits = tl.load(largest + slot, mask=is_box, other=0)
            largest_iou = tl.where(bits > 0, bits.to(tl.float32, bitcast=True), 2.0)  # 2: no anchor overlaps this box
            is_best_for_box |= tl.max((iou == largest_iou[:, None]).to(tl.int32), axis=0)
            tile_iou = tl.max(iou, axis=0)
            m = first_box + tl.arange(0, BOXES)
            first_of_equals = tl.min(tl.where(iou == tile_iou[None, :], m[:, None], num_boxes), axis=0)
            is_better = tile_iou > best_iou  # strictly, so that the first of equal boxes keeps the anchor
            best_box = tl.where(is_better, first_of_equals, best_box)
            best_iou = tl.where(is_better, tile_iou, best_iou)
    by_threshold = tl.where(best_iou < fg_iou_thresh, _IGNORED, best_box)
    by_threshold = tl.where(best_iou < bg_iou_thresh, _BACKGROUND, by_threshold)
    result = tl.where(is_best_for_box > 0, best_box, by_threshold)
    tl.store(matched + tl.program_id(1).to(tl.int64) * num_anchors + a, result.to(tl.int64), mask=a < num_anchors)


def _match(boxes: Tensor, valid: Tensor, anchors: Tensor, fg_iou_thresh: float, bg_iou_thresh: float) -> Tensor:
    matched = _empty_match(boxes, valid, anchors)
    largest = torch.zeros_like(valid, dtype=torch.int32)
    (num_images, num_boxes), num_anchors = valid.shape, anchors.shape[0]
    grid = (triton.cdiv(num_anchors, ANCHOR_TILE), num_images)
    _largest_ious_kernel[grid](boxes, valid, anchors, largest, num_boxes, num_anchors, **MATCH_CONSTANTS)
    _match_kernel[grid](
        boxes, valid, anchors, largest, matched, num_boxes, num_anchors, fg_iou_thresh, bg_iou_thresh, **MATCH_CONSTANTS
    )
    return matched


def _empty_match(boxes: Tensor, valid: Tensor, anchors: Tensor, *_: float) -> Tensor:
    return torch.empty((valid.shape[0], anchors.shape[0]), dtype=torch.int64, device=boxes.device)


@triton.jit
def _load_logits(logits, target, first_anchor, num_anchors, level_anchors, CLASSES: tl.constexpr, BLOCK: tl.constexpr):
    """(logits as float32, whether each is that of its anchor's class, whether it counts, offsets in the level of an
    image, whether they are inside)"""
    image = tl.program_id(1).to(tl.int64)
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < level_anchors * CLASSES
    anchor = offset // CLASSES
    label = tl.load(target + image * num_anchors + first_anchor + anchor, mask=inside, other=0)
    x = tl.load(logits + offset, mask=inside, other=0.0).to(tl.float32)
    return x, label == offset - anchor * CLASSES, label, offset, inside


@triton.jit
def _focal_terms(x, is_positive, alpha, GAMMA: tl.constexpr):
    """(loss of each logit, its derivative). With z = x for a negative, -x for a positive, p = sigmoid(z), and s the
    softplus of z: weight p^gamma s and weight p^gamma (p + gamma (1 - p) s)."""
    z = tl.where(is_positive, -x, x)
    weight = tl.where(is_positive, alpha, 1.0 - alpha)
    e = tl.exp(-tl.abs(z))
    inverse = 1.0 / (1.0 + e)
    p = tl.where(z >= 0.0, 1.0, e) * inverse
    # log(1 + e) by the series of 2 artanh(r), r = e / (2 + e) at most 1/3, whose next term is below 2^-26 of the sum:
    # the GPU's own logarithm is not exact near 1.
    r = e / (2.0 + e)
    q = r * r
    series = 1.0 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11 + q * (1 / 13 + q * (1 / 15)))))))
    softplus = tl.maximum(z, 0.0) + 2.0 * r * series
    if GAMMA == 0.0:
        scaled = weight
    elif GAMMA == 2.0:
        scaled = weight * p * p
    else:
        scaled = weight * tl.exp2(GAMMA * tl.log2(p))
    derivative = scaled * (p + GAMMA * (tl.where(z >= 0.0, e, 1.0) * inverse) * softplus)
    return scaled * softplus, tl.where(is_positive, -derivative, derivative)


@triton.jit
def _focal_sums_kernel(
    logits, target, sums, image_stride, first_anchor, num_anchors, level_anchors, first_sum, num_sums, alpha,
    GAMMA: tl.constexpr, CLASSES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of this program's logits, into its own place: so the total does not depend on the order of programs."""
    image = tl.program_id(1).to(tl.int64)
    x, is_positive, label, _, inside = _load_logits(
        logits + image * image_stride, target, first_anchor, num_anchors, level_anchors, CLASSES, BLOCK
    )
    loss, _ = _focal_terms(x, is_positive, alpha, GAMMA)
    total = tl.sum(tl.where(inside & (label != _IGNORED), loss, 0.0))
    tl.store(sums + image * num_sums + first_sum + tl.program_id(0), total)


@triton.jit
def _focal_gradient_kernel(
    logits, target, grad, out, image_stride, first_anchor, num_anchors, level_anchors, alpha,
    GAMMA: tl.constexpr, CLASSES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of this program's logits, from that of each image's sum."""
    image = tl.program_id(1).to(tl.int64)
    x, is_positive, label, offset, inside = _load_logits(
        logits + image * image_stride, target, first_anchor, num_anchors, level_anchors, CLASSES, BLOCK
    )
    _, derivative = _focal_terms(x, is_positive, alpha, GAMMA)
    gradient = tl.where(label != _IGNORED, derivative * tl.load(grad + image), 0.0)
    place = out + image * level_anchors * CLASSES + offset
    tl.store(place, gradient.to(out.dtype.element_ty), mask=inside)


def _focal_sums(levels: list[Tensor], target: Tensor, alpha: float, gamma: float) -> Tensor:
    num_images, num_anchors = target.shape
    blocks = [triton.cdiv(level.shape[1] * level.shape[2], FOCAL_BLOCK) for level in levels]
    sums = torch.empty((num_images, sum(blocks)), dtype=torch.float32, device=target.device)
    first_anchor = first_sum = 0
    for level, num_blocks in zip(levels, blocks, strict=True):
        _focal_sums_kernel[num_blocks, num_images](
            level, target, sums, level.stride(0), first_anchor, num_anchors, level.shape[1], first_sum, sum(blocks),
            alpha, CLASSES=level.shape[2], **focal_constants(gamma),
        )  # fmt: skip
        first_anchor, first_sum = first_anchor + level.shape[1], first_sum + num_blocks
    return sums.sum(1)


def _focal_gradients(grad: Tensor, levels: list[Tensor], target: Tensor, alpha: float, gamma: float) -> list[Tensor]:
    num_images, num_anchors = target.shape
    gradients, first_anchor = _empty_gradients(grad, levels), 0
    for level, gradient in zip(levels, gradients, strict=True):
        num_blocks = triton.cdiv(level.shape[1] * level.shape[2], FOCAL_BLOCK)
        _focal_gradient_kernel[num_blocks, num_images](
            level, target, grad, gradient, level.stride(0), first_anchor, num_anchors, level.shape[1], alpha,
            CLASSES=level.shape[2], **focal_constants(gamma),
        )  # fmt: skip
        first_anchor += level.shape[1]
    return gradients


def _empty_sums(levels: list[Tensor], target: Tensor, *_: float) -> Tensor:
    return torch.empty(target.shape[0], dtype=torch.float32, device=levels[0].device)


def _empty_gradients(grad: Tensor, levels: list[Tensor], *_: Any) -> list[Tensor]:  # noqa: ARG001
    return [torch.empty(level.shape, dtype=level.dtype, device=level.device) for level in levels]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    levels, target, ctx.alpha, ctx.gamma = inputs
    ctx.save_for_backward(target, *levels)


def _backward(ctx: Any, grad: Tensor) -> tuple[list[Tensor], None, None, None]:
    target, *levels = ctx.saved_tensors
    gradients = torch.ops.stoker.focal_gradients(grad.contiguous(), levels, target, ctx.alpha, ctx.gamma)
    return gradients, None, None, None


for _name, _launch, _shape in (
    ("match_anchors", _match, _empty_match),
    ("focal_sums", _focal_sums, _empty_sums),
    ("focal_gradients", _focal_gradients, _empty_gradients),
):
    for _device in ("CUDA", "CPU"):
        _library.impl(_name, _launch, _device)
    torch.library.register_fake(f"stoker::{_name}", _shape, lib=_library)
torch.library.register_autograd("stoker::focal_sums", _backward, setup_context=_save, lib=_library)
