"""Classification and box regression losses per image, in fp32, with fixed shapes and without host syncs.

The focal loss has its own backward pass because it determines the peak memory of a step: [B, A, C] logits of a batch
of 32 at 800 × 800 with 80 classes are 1.1 GiB in fp32, and autograd would keep several such tensors. This one keeps one
derivative per logit, in the logits' dtype, and computes in blocks of images.
"""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from stoker.hardware.block_size import block_size
from stoker.models.layers.boxes import decode, encode, giou
from stoker.models.layers.matching import IGNORED

FP16_DERIVATIVE_SCALE = 2.0**12
"""Factor of derivatives that are kept in fp16, which is undone in the backward pass: small ones would underflow before
the loss scale is applied. The largest are about 1, fp16 ends at 65504. (Not in bf16: where fp16 is used, bf16 is
emulated, and Inductor does not compile a graph that returns it.)"""


def focal_loss(logits: Tensor, target: Tensor, *, alpha: float, gamma: float, block: int | None = None) -> Tensor:
    """Sum of the sigmoid focal loss of each image: float32 [B] (arXiv 1708.02002, equation 5).

    logits: floating point [B, A, C]; target: int64 [B, A], the class 0 … C-1 of a positive anchor, `BACKGROUND` or
    `IGNORED`; alpha: weight of positives, 1 - alpha that of negatives; block: maximum number of logits computed at
    once, in whole images, at least one; default: `block_size.block_size`. Differentiable once, in `logits`.

    Treats every logit as a negative first, then corrects the one logit of each positive anchor: no one-hot targets.
    With p = sigmoid(x): a negative costs (1 - alpha) p^gamma · -log(1 - p), whose derivative in x is
    (1 - alpha) p^gamma (p - gamma (1 - p) log(1 - p)). A positive is the same with -x for x and alpha for 1 - alpha.
    The two share their costly parts: one pass computes both.
    """
    target = target.to(torch.int32)
    with torch.no_grad():
        derivatives, sums = torch.empty_like(logits), []
        for image_slice in _image_blocks(logits, block):
            labels, positive = target[image_slice], target[image_slice] >= 0
            channel, ignored = labels.clamp(min=0).to(torch.int64)[..., None], (labels == IGNORED)[..., None]
            neg_loss, neg_derivative = _loss_and_derivative(at_least_fp32(logits[image_slice]), gamma)
            logit_at_label = at_least_fp32(logits[image_slice].gather(2, channel))
            pos_loss, pos_derivative = _loss_and_derivative(-logit_at_label, gamma)
            positive = positive[..., None]
            neg_loss_at_label, neg_derivative_at_label = neg_loss.gather(2, channel), neg_derivative.gather(2, channel)
            correction = torch.where(positive, alpha * pos_loss - (1 - alpha) * neg_loss_at_label, 0.0)
            per_anchor = (1 - alpha) * neg_loss.sum(2, keepdim=True) + correction
            sums.append(per_anchor.masked_fill_(ignored, 0.0).sum((1, 2)))
            neg_derivative.mul_(1 - alpha)
            neg_derivative.scatter_(
                2, channel, torch.where(positive, -alpha * pos_derivative, (1 - alpha) * neg_derivative_at_label)
            )
            _keep(neg_derivative.masked_fill_(ignored, 0.0), derivatives[image_slice])
    return _WithDerivatives.apply(logits, torch.cat(sums), derivatives)


def soft_binary_cross_entropy(logits: Tensor, label: Tensor, quality: Tensor, *, block: int | None = None) -> Tensor:
    """Sum of the sigmoid cross-entropy of each image with targets between 0 and 1: float32 [B].

    logits: floating point [B, A, C]; quality: float [B, A], the target of class `label` (int64 [B, A]) at each point;
    the target of all other classes is 0. Differentiable once, in `logits`; `block` as in `focal_loss`.

    Computes the loss for a target of 0, with the derivative sigmoid(x); a target of q subtracts q x from the loss and q
    from the derivative.
    """
    with torch.no_grad():
        derivatives, sums = torch.empty_like(logits), []
        for image_slice in _image_blocks(logits, block):
            x, channel = at_least_fp32(logits[image_slice]), label[image_slice][..., None]
            target = quality[image_slice][..., None].to(x.dtype)
            loss_without_target = _minus_log_one_minus_sigmoid(x).sum((1, 2))
            sums.append(loss_without_target - (target * x.gather(2, channel)).sum((1, 2)))
            _keep(x.sigmoid().scatter_add_(2, channel, -target), derivatives[image_slice])
    return _WithDerivatives.apply(logits, sums[0] if len(sums) == 1 else torch.cat(sums), derivatives)


class _WithDerivatives(torch.autograd.Function):
    """(logits [B, A, C], a sum [B] over each image's, its derivatives in the logits) → the sum, differentiable."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, sums: Tensor, derivatives: Tensor) -> Tensor:  # noqa: ARG004
        ctx.save_for_backward(derivatives)
        return sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """`out=` rounds once and needs no fp32 copy."""
        (derivatives,) = ctx.saved_tensors
        grad = grads[0] / FP16_DERIVATIVE_SCALE if derivatives.dtype == torch.float16 else grads[0]
        return torch.mul(derivatives, grad[:, None, None], out=torch.empty_like(derivatives)), None, None


def _keep(values: Tensor, derivatives: Tensor) -> None:
    """Writes the derivatives of a block. Changes `values`."""
    derivatives.copy_(values.mul_(FP16_DERIVATIVE_SCALE) if derivatives.dtype == torch.float16 else values)


def _image_blocks(logits: Tensor, block: int | None) -> Iterator[slice]:
    images_per_block = max(1, (block or block_size(logits)) // (logits.shape[1] * logits.shape[2]))
    return (slice(start, start + images_per_block) for start in range(0, logits.shape[0], images_per_block))


def at_least_fp32(x: Tensor) -> Tensor:
    """x in fp32; fp64 stays fp64."""
    return x if x.dtype == torch.float64 else x.float()


def _loss_and_derivative(x: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """p^gamma · -log(1 - p) with p = sigmoid(x), and its derivative in x; both of the shape of x."""
    p, log_one_minus_p = x.sigmoid(), _minus_log_one_minus_sigmoid(x).neg_()
    del x  # as large as all logits of a block
    weight = p.pow(gamma)
    derivative = (p - 1).mul_(log_one_minus_p).mul_(gamma).add_(p).mul_(weight)
    return log_one_minus_p.mul_(weight).neg_(), derivative


def _minus_log_one_minus_sigmoid(x: Tensor) -> Tensor:
    """-log(1 - sigmoid(x)), exact to the last digits of x's dtype. On CPUs, torch's log1p, and so logsigmoid, is not
    vectorized and takes five times as long as log(1 + y) plus the rounding error of 1 + y, divided by 1 + y."""
    if x.device.type != "cpu":
        return functional.softplus(x)
    y = x.abs().neg_().exp_()
    one_plus_y = y + 1
    rounding_error = y.sub_(one_plus_y - 1).div_(one_plus_y)
    return one_plus_y.log_().add_(rounding_error).add_(x.clamp(min=0))


def box_loss(kind: Literal["l1", "giou"], deltas: Tensor, anchors: Tensor, boxes: Tensor, positive: Tensor) -> Tensor:
    """Sum of the box loss of the positive anchors of each image: float32 [B].

    deltas: float32 [B, A, 4], predicted; anchors: [A, 4]; boxes: [B, A, 4], the box of each anchor, any value where not
    positive; positive: bool [B, A]. l1: of the encoded offsets; giou: 1 - generalized IoU of the decoded boxes.
    The inputs of other anchors are replaced before the arithmetic: a factor of 0 afterwards would give inf · 0 = NaN.
    """
    if kind == "l1":
        target = torch.where(positive[..., None], encode(boxes, anchors), 0.0)
        per_anchor = (deltas - target).abs().sum(-1)
    else:
        safe_deltas = torch.where(positive[..., None], deltas, 0.0)
        safe_boxes = torch.where(positive[..., None], boxes, anchors)
        per_anchor = 1 - giou(decode(safe_deltas, anchors), safe_boxes)
    return torch.where(positive, per_anchor, 0.0).sum(1)
