"""What wrong classes and wrong boxes cost, in fp32, per picture, with fixed shapes and without a host wait.

The focal loss is written by hand because it decides the peak of a step's memory: [B, A, C] logits of a batch of 32 at
800 × 800 with 80 classes are 1.1 GiB in fp32, and autograd would keep several such tensors. This one keeps one
derivative per logit, in their own type (bf16 stays bf16), and computes in blocks of pictures.
"""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from stoker.hardware.device import block_of
from stoker.models.layers.boxes import decode, encode, giou
from stoker.models.layers.matching import IGNORED


def focal_loss(logits: Tensor, target: Tensor, *, alpha: float, gamma: float, block: int | None = None) -> Tensor:
    """Sum of the sigmoid focal loss of each picture: float32 [B] (arXiv 1708.02002, equation 5).

    logits: floating point [B, A, C]; target: int64 [B, A], the class 0 … C-1 of a positive anchor, `BACKGROUND` or
    `IGNORED`. alpha weighs the positives, 1 - alpha the negatives. Differentiable once, in `logits`. block: logits that
    are computed at once, whole pictures, at least one; default: as suits the device.
    """
    loss: Tensor = _FocalLoss.apply(logits, target.to(torch.int32), alpha, gamma, block or block_of(logits))
    return loss


class _FocalLoss(torch.autograd.Function):
    """Treats every logit as a negative first, then corrects the one logit of each positive anchor: no one-hot targets.

    With p = sigmoid(x): a negative costs (1 - alpha) p^gamma · -log(1 - p), whose derivative in x is
    (1 - alpha) p^gamma (p - gamma (1 - p) log(1 - p)). A positive is the same with -x for x and alpha for 1 - alpha.

    The derivative shares its costly parts with the loss, so the forward pass computes both and keeps the derivative in
    place of the logits.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, alpha: float, gamma: float, block: int) -> Tensor:
        slopes = _slopes_of(logits)
        sums = []
        for pictures in _blocks(logits, block):
            some, index, positive = at_least_fp32(logits[pictures]), target[pictures], target[pictures] >= 0
            channel, ignored = _channel(index), (index == IGNORED)[..., None]
            cost, slope = _cost_and_slope(some, gamma)
            cost_if, slope_if = _cost_and_slope(-some.gather(2, channel), gamma)
            positive = positive[..., None]
            cost_here, slope_here = cost.gather(2, channel), slope.gather(2, channel)
            change = torch.where(positive, alpha * cost_if - (1 - alpha) * cost_here, 0.0)
            per_anchor = (1 - alpha) * cost.sum(2, keepdim=True) + change
            sums.append(per_anchor.masked_fill_(ignored, 0.0).sum((1, 2)))
            slope.mul_(1 - alpha)
            slope.scatter_(2, channel, torch.where(positive, -alpha * slope_if, (1 - alpha) * slope_here))
            slopes[pictures] = slope.masked_fill_(ignored, 0.0)
        _keep_slopes(ctx, slopes, logits)
        return torch.cat(sums)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _times_slopes(ctx, grads[0]), None, None, None, None


def soft_cross_entropy(logits: Tensor, label: Tensor, quality: Tensor, *, block: int | None = None) -> Tensor:
    """Sum of the sigmoid cross-entropy of each picture with targets between 0 and 1: float32 [B].

    logits: floating point [B, A, C]; quality: float [B, A], the target of class `label` (int64 [B, A]) at each place;
    of all other classes it is 0. Differentiable once, in `logits`; `block` as for `focal_loss`.
    """
    loss: Tensor = _SoftCrossEntropy.apply(logits, label, quality, block or block_of(logits))
    return loss


class _SoftCrossEntropy(torch.autograd.Function):
    """Every logit as of a target of 0, whose derivative is sigmoid(x); a target of q takes q x from the loss and q from
    the derivative. As `_FocalLoss` it keeps the derivative."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, label: Tensor, quality: Tensor, block: int) -> Tensor:
        slopes = _slopes_of(logits)
        sums = []
        for pictures in _blocks(logits, block):
            some, channel = at_least_fp32(logits[pictures]), label[pictures][..., None]
            target = quality[pictures][..., None].to(some.dtype)
            costs = _log_one_minus_sigmoid(some).sum((1, 2)) + (target * some.gather(2, channel)).sum((1, 2))
            sums.append(-costs)
            slopes[pictures] = some.sigmoid().scatter_add_(2, channel, -target)
        _keep_slopes(ctx, slopes, logits)
        return torch.cat(sums)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _times_slopes(ctx, grads[0]), None, None, None


def _slopes_of(logits: Tensor) -> Tensor:
    """Room for a derivative of each logit, in their own type; fp16 would lose the small ones, which come before the
    loss scale is applied."""
    return torch.empty_like(logits, dtype=torch.bfloat16 if logits.dtype == torch.float16 else None)


def _keep_slopes(ctx: Any, slopes: Tensor, logits: Tensor) -> None:
    ctx.save_for_backward(slopes)
    ctx.dtype = logits.dtype


def _times_slopes(ctx: Any, grad: Tensor) -> Tensor:
    """The gradient of the logits [B, A, C], of that of each picture's sum [B]. Into a tensor made beforehand: the
    product is rounded once, and no fp32 copy of it is made."""
    (slopes,) = ctx.saved_tensors
    result = torch.empty_like(slopes, dtype=ctx.dtype)
    return torch.mul(slopes, grad[:, None, None], out=result)


def _blocks(logits: Tensor, block: int) -> Iterator[slice]:
    pictures = max(1, block // (logits.shape[1] * logits.shape[2]))
    return (slice(start, start + pictures) for start in range(0, logits.shape[0], pictures))


def at_least_fp32(x: Tensor) -> Tensor:
    """The same numbers in fp32, or in fp64 where they are."""
    return x if x.dtype == torch.float64 else x.float()


def _channel(target: Tensor) -> Tensor:
    """Index of the positive class of each anchor for gather and scatter; 0 where there is none: int64 [b, A, 1]."""
    return target.clamp(min=0).to(torch.int64)[..., None]


def _cost_and_slope(x: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """p^gamma · -log(1 - p) with p = sigmoid(x), and its derivative in x; both of the shape of x."""
    p, log_rest = x.sigmoid(), _log_one_minus_sigmoid(x)
    weight = p.pow(gamma)
    slope = (p - 1).mul_(log_rest).mul_(gamma).add_(p).mul_(weight)
    return log_rest.mul_(weight).neg_(), slope


def _log_one_minus_sigmoid(x: Tensor) -> Tensor:
    """log(1 - sigmoid(x)), to the last digits of x's type.

    On a CPU torch computes log1p, and so logsigmoid, a number at a time, five times as long as this: log(1 + y), and
    what rounding 1 + y lost, divided by it. An accelerator has logsigmoid as one kernel.
    """
    if x.device.type != "cpu":
        return functional.logsigmoid(-x)
    y = x.abs().neg_().exp_()
    above = y + 1
    lost = y.sub_(above - 1).div_(above)
    return above.log_().add_(lost).add_(x.clamp(min=0)).neg_()


def box_loss(kind: Literal["l1", "giou"], deltas: Tensor, anchors: Tensor, boxes: Tensor, positive: Tensor) -> Tensor:
    """Sum of the box loss of the positive anchors of each picture: float32 [B].

    deltas: float32 [B, A, 4], predicted; anchors: [A, 4]; boxes: [B, A, 4], the box of each anchor, anything where not
    positive; positive: bool [B, A]. l1: of the encoded offsets; giou: 1 - generalised IoU of the decoded boxes.
    Anchors that are not positive get harmless values before the arithmetic, not a factor of zero after it, since
    inf · 0 is NaN, backward too.
    """
    if kind == "l1":
        target = torch.where(positive[..., None], encode(boxes, anchors), 0.0)
        per_anchor = (deltas - target).abs().sum(-1)
    else:
        safe_deltas = torch.where(positive[..., None], deltas, 0.0)
        safe_boxes = torch.where(positive[..., None], boxes, anchors)
        per_anchor = 1 - giou(decode(safe_deltas, anchors), safe_boxes)
    return torch.where(positive, per_anchor, 0.0).sum(1)
