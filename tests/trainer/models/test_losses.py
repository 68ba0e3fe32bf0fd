"""The focal loss and the box losses against torchvision's, and their gradients against numerical ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torchvision.models.detection._utils import BoxCoder
from torchvision.ops import generalized_box_iou_loss, sigmoid_focal_loss

from stoker.models.layers.boxes import decode
from stoker.models.layers.losses import box_loss, focal_loss, soft_binary_cross_entropy
from stoker.models.layers.matching import BACKGROUND, IGNORED
from stoker.models.layers.norms import FrozenBatchNorm2d

PICTURES, ANCHORS, CLASSES = 3, 11, 4


def some_targets(draw: torch.Generator) -> Tensor:
    """Every kind of target: classes, background, ignored."""
    return torch.randint(IGNORED, CLASSES, (PICTURES, ANCHORS), generator=draw)


def reference(logits: Tensor, target: Tensor, alpha: float, gamma: float) -> Tensor:
    dense = functional.one_hot(target.clamp(min=0), CLASSES) * (target >= 0)[..., None]
    loss = sigmoid_focal_loss(logits, dense.to(logits.dtype), alpha, gamma)
    return loss.sum(2).masked_fill(target == IGNORED, 0).sum(1)


@given(
    seed=st.integers(0, 10**6),
    alpha=st.floats(0, 1),
    gamma=st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.5]),
    spread=st.sampled_from([0.1, 3.0, 12.0]),
    block=st.sampled_from([1, ANCHORS * CLASSES * 2, None]),
)
@settings(max_examples=60, deadline=None)
def test_focal_loss_and_gradient_are_those_of_torchvision(
    seed: int, alpha: float, gamma: float, spread: float, block: int | None
) -> None:
    draw = torch.Generator().manual_seed(seed)
    # Beyond 20 torchvision's 1 - p_t rounds to 0, and below gamma 1 its gradient is NaN there; ours stays finite.
    logits = (
        torch.randn(PICTURES, ANCHORS, CLASSES, generator=draw).double().mul(spread).clamp(-20, 20).requires_grad_()
    )
    target, weight = some_targets(draw), torch.rand(PICTURES, generator=draw).double()
    ours, theirs = (
        focal_loss(logits, target, alpha=alpha, gamma=gamma, block=block),
        reference(logits, target, alpha, gamma),
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    (our_gradient,) = torch.autograd.grad((ours * weight).sum(), logits)
    (their_gradient,) = torch.autograd.grad((theirs * weight).sum(), logits)
    torch.testing.assert_close(our_gradient, their_gradient, rtol=1e-6, atol=1e-9)


def test_focal_loss_passes_gradcheck() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(PICTURES, ANCHORS, CLASSES, generator=draw).double().requires_grad_()
    target = some_targets(draw)
    assert torch.autograd.gradcheck(lambda x: focal_loss(x, target, alpha=0.25, gamma=2.0, block=50), logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_focal_loss_of_extreme_logits_is_finite(dtype: torch.dtype) -> None:
    logits = (
        torch.tensor([-60000.0, -90.0, 0.0, 90.0, 60000.0]).to(dtype).view(1, 5, 1).repeat(1, 2, 1).requires_grad_()
    )
    target = torch.tensor([[0] * 5 + [BACKGROUND] * 5])
    loss = focal_loss(logits, target, alpha=0.25, gamma=2.0)
    loss.sum().backward()
    assert loss.dtype == torch.float32
    assert torch.isfinite(loss).all()
    assert logits.grad is not None
    assert logits.grad.dtype == dtype
    assert torch.isfinite(logits.grad).all()


def test_focal_loss_of_background_in_fp32_has_the_digits_of_fp64() -> None:
    logits = torch.linspace(-30, 30, 4001)[:, None, None]  # an image each, so that no sum hides an error
    target = torch.full((len(logits), 1), BACKGROUND)
    exact, ours = (focal_loss(x, target, alpha=0.25, gamma=2.0) for x in (logits.double(), logits))
    torch.testing.assert_close(ours.double(), exact, rtol=2e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_focal_loss_keeps_nothing_but_one_derivative_per_logit(dtype: torch.dtype) -> None:
    """In the type of the logits: Inductor compiles no graph that returns bf16 where a GPU has fp16 only."""
    kept: list[Tensor] = []
    logits = torch.randn(2, 100, 8, dtype=dtype, requires_grad=True)
    target = torch.full((2, 100), BACKGROUND)

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        focal_loss(logits, target, alpha=0.25, gamma=2.0)
    assert [(t.dtype, t.numel()) for t in kept] == [(dtype, 1600)]


@pytest.mark.parametrize("kind", ["focal", "soft"])
def test_small_gradients_of_fp16_logits_do_not_underflow_before_the_loss_scale(kind: str) -> None:
    logits = torch.linspace(-9, 9, 401).half()[:, None, None]
    background, no_quality = torch.full((401, 1), BACKGROUND), torch.zeros(401, 1)
    gradients = []
    for dtype in (torch.float64, torch.float16):
        x = logits.to(dtype).requires_grad_()
        if kind == "focal":
            loss = focal_loss(x, background, alpha=0.25, gamma=2.0)
        else:
            loss = soft_binary_cross_entropy(x, torch.zeros(401, 1, dtype=torch.int64), no_quality)
        (gradient,) = torch.autograd.grad(2.0**14 * loss.sum() / 100, x)
        gradients.append(gradient.double())
    # the smallest is 3e-12 before the scale, a number of fp16 has 11 bits, and two roundings
    torch.testing.assert_close(gradients[1], gradients[0], rtol=2.0**-10, atol=6e-8)


@pytest.mark.parametrize("kind", ["l1", "giou"])
def test_box_losses_are_those_of_torchvision(kind: str) -> None:
    draw = torch.Generator().manual_seed(1)
    anchors = torch.rand(40, 2, generator=draw) * 50
    anchors = torch.cat((anchors, anchors + 5 + 20 * torch.rand(40, 2, generator=draw)), 1)
    boxes = (anchors + torch.randn(2, 40, 4, generator=draw)).contiguous()
    deltas = (torch.randn(2, 40, 4, generator=draw) * 0.3).requires_grad_()
    positive = torch.rand(2, 40, generator=draw) < 0.4
    positive[1] = False
    ours = box_loss(kind, deltas, anchors, boxes, positive)  # type: ignore[arg-type]
    used, chosen = deltas[0][positive[0]], anchors[positive[0]]
    if kind == "l1":
        target = BoxCoder((1.0, 1.0, 1.0, 1.0)).encode_single(boxes[0][positive[0]], chosen)
        theirs = functional.l1_loss(used, target, reduction="sum")
    else:
        theirs = generalized_box_iou_loss(decode(used, chosen), boxes[0][positive[0]], reduction="sum")
    torch.testing.assert_close(ours[0], theirs)
    assert ours[1].item() == 0
    (our_gradient,) = torch.autograd.grad(ours.sum(), deltas, retain_graph=True)
    (their_gradient,) = torch.autograd.grad(theirs, deltas)
    torch.testing.assert_close(our_gradient, their_gradient)


@pytest.mark.parametrize("kind", ["l1", "giou"])
def test_box_losses_stay_finite_whatever_the_negatives_hold(kind: str) -> None:
    """Empty slots are boxes of no size, whose logarithm is -inf; predictions at the other anchors are unbounded."""
    deltas = torch.full((1, 3, 4), 1e30, requires_grad=True)
    anchors = torch.tensor([[0.0, 0.0, 8.0, 8.0]]).repeat(3, 1)
    loss = box_loss(kind, deltas, anchors, torch.zeros(1, 3, 4), torch.zeros(1, 3, dtype=torch.bool))  # type: ignore[arg-type]
    loss.sum().backward()
    assert loss.item() == 0
    assert deltas.grad is not None
    assert not deltas.grad.any()


def test_a_frozen_norm_is_batch_norm_in_evaluation_and_stays_in_bf16() -> None:
    draw = torch.Generator().manual_seed(2)
    trained = torch.nn.BatchNorm2d(6)
    for tensor in (trained.weight.data, trained.bias.data, trained.running_mean, trained.running_var):
        assert tensor is not None
        tensor.copy_(torch.rand(6, generator=draw) + 0.1)
    frozen = FrozenBatchNorm2d(6)
    state = trained.state_dict()
    state.pop("num_batches_tracked")
    frozen.load_state_dict(state)
    x = torch.randn(2, 6, 5, 7, generator=draw)
    expected = trained.eval()(x)
    torch.testing.assert_close(frozen(x), expected, rtol=1e-5, atol=1e-6)
    half = frozen(x.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, rtol=0.03, atol=0.03)
