"""The fused kernels on a real GPU: results and gradients of the separate operators, no waits, and a choice by
measurement."""

import types

import pytest
import torch
from torch import Tensor

from stoker.config.settings import Config
from stoker.hardware.device import Device
from stoker.hardware.selection import select_device
from stoker.models import build
from stoker.models.layers import losses, matching
from stoker.models.layers.convolutions import use_fused_convs
from stoker.training import make_step
from stoker.training.defaults.dry_run import make_worst_case_batch
from stoker.training.ranks import Ranks
from stoker.training.step import make_loss_fn
from tests.trainer.models.samples import make_batch, settings_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
CLASSES = 80


@pytest.fixture(scope="module")
def device() -> Device:
    return select_device("cuda")


@pytest.mark.parametrize("whole", [False, True])
def test_matches_are_those_of_the_separate_operators_exactly(whole: bool) -> None:
    """whole: coordinates on a small grid, where IoUs tie all the time."""
    from stoker.models.layers import triton_kernels

    torch.manual_seed(0)
    corner, size = torch.rand(4, 100, 2, device="cuda") * 600, 1 + torch.rand(4, 100, 2, device="cuda") ** 2 * 300
    boxes = torch.cat((corner, corner + size), -1)
    corner, size = torch.rand(50_001, 2, device="cuda") * 700, 8 + torch.rand(50_001, 2, device="cuda") * 300
    anchors = torch.cat((corner, corner + size), -1)
    if whole:
        boxes, anchors = (boxes / 16).round(), (anchors / 16).round()
        anchors[:, 2:] = torch.maximum(anchors[:, 2:], anchors[:, :2] + 1)
    valid = torch.rand(4, 100, device="cuda") < 0.5
    valid[1], valid[2] = False, True
    boxes[~valid] = torch.nan
    options = {"fg_iou_thresh": 0.5, "bg_iou_thresh": 0.4}
    expected = matching.match_anchors(boxes, valid, anchors, **options)
    assert torch.equal(triton_kernels.match_anchors(boxes, valid, anchors, **options), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("classes", [1, 20, 80])
def test_focal_losses_and_gradients_are_those_of_the_separate_operators(dtype: torch.dtype, classes: int) -> None:
    from stoker.models.layers import triton_kernels

    torch.manual_seed(0)
    counts = (9000, 2250, 576, 144, 9, 1)
    levels = [(4 * torch.randn(3, count, classes, device="cuda")).to(dtype).requires_grad_() for count in counts]
    target = torch.randint(-2, classes, (3, sum(counts)), device="cuda")
    weights = torch.rand(3, device="cuda") + 0.5
    results = []
    for compute, logits in ((losses.focal_loss, torch.cat(levels, 1)), (triton_kernels.focal_loss, levels)):
        sums = compute(logits, target, alpha=0.25, gamma=2.0)  # type: ignore[operator]
        gradients = torch.autograd.grad(sums @ weights, levels)
        results.append((sums, torch.cat(gradients, 1).float()))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-5, atol=0)
    # fp16: the separate operators keep the derivative in bf16.
    rtol = 1e-5 if dtype == torch.float32 else 3 * 2**-8
    torch.testing.assert_close(results[1][1], results[0][1], rtol=rtol, atol=1e-5 if dtype == torch.float32 else 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("stride", [1, 2])
def test_convolutions_are_those_of_the_separate_operators(
    dtype: torch.dtype, with_residual: bool, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)

    def draw(*shape: int) -> Tensor:
        values = torch.randn(*shape, device="cuda", dtype=dtype)
        return values.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else values

    x, weight, bias = draw(4, 64, 50, 50), draw(128, 64, 3, 3) / 24, draw(128)
    side = 50 // stride
    residual = draw(4, 128, side, side) if with_residual else None
    geometry = ((stride, stride), (1, 1), (1, 1), 1)
    inputs = [tensor.requires_grad_() for tensor in (x, weight, bias, residual) if tensor is not None]
    output = torch.conv2d(x, weight, bias, *geometry)
    expected = (output if residual is None else output + residual).relu()
    grad = draw(*expected.shape)
    expected_grads = torch.autograd.grad(expected, inputs, grad)
    # What the memory of the output held before must not matter: cuDNN gets it as a residual with a factor of 0.
    torch.full_like(expected, torch.nan)
    found = torch.ops.stoker.conv_relu(x, weight, bias, residual, *geometry)
    assert found.stride() == expected.stride()
    grads = torch.autograd.grad(found, inputs, grad)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * 4)
    for one, other in zip(grads, expected_grads, strict=True):
        assert (one.float() - other.float()).norm() <= 4 * tolerance * other.float().norm()


@pytest.mark.parametrize("compile", [False, True])
def test_a_step_with_the_kernels_never_synchronizes_and_keeps_the_losses(device: Device, compile: bool) -> None:
    torch.manual_seed(0)
    model = build(settings_of("retinanet_resnet18_fpn"), CLASSES).to("cuda").train()
    batch = make_batch((3, 0, 16, 7), (256, 256), CLASSES)
    batch = type(batch)(*(tensor.cuda() for tensor in batch))
    results = []
    for fused in (False, True):
        use_fused_convs(model, fused)
        model.fused_loss = fused  # type: ignore[assignment]
        loss_fn = make_loss_fn(model, compile=compile and fused)
        for step in range(3):
            torch.cuda.set_sync_debug_mode("error" if step == 2 else "default")
            try:
                model.zero_grad()
                with device.autocast("bf16"):
                    terms = loss_fn(batch)
                torch.stack(list(terms.values())).sum().backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        results.append((terms, {name: weight.grad for name, weight in model.named_parameters()}))
    (expected, expected_grads), (found, grads) = results
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0.01, atol=1e-4)
    for name, gradient in expected_grads.items():
        if gradient is not None:
            assert (grads[name] - gradient).norm() <= 0.05 * gradient.norm() + 1e-6, name


def test_the_kernels_are_chosen_by_measurement(device: Device, tmp_path: object) -> None:
    torch.backends.cudnn.benchmark = True
    setup = types.SimpleNamespace(
        device=device,
        config=Config().replace(precision="bf16", image_size=(512, 512), compile=False),
        model=build(settings_of("retinanet_resnet50_fpn"), CLASSES).to("cuda").train(),
        optimizer=types.SimpleNamespace(sharding=None),
        ranks=Ranks(),
        folder=types.SimpleNamespace(path=tmp_path),
        rank_batch_size=8,
        micro_batches=1,
        max_boxes=50,
        index=types.SimpleNamespace(class_names=tuple(map(str, range(CLASSES)))),
    )
    batch = make_worst_case_batch(8, image_size=(512, 512), max_boxes=50, num_classes=CLASSES, device=device)
    for compare in (make_step.compare_convs, make_step.compare_losses):
        found = compare(setup, batch)  # type: ignore[arg-type]  # raises where a kernel does not run
        assert found is not None
        separate_s, fused_s, difference = found
        print(f"{compare.__name__}: separate {1e3 * separate_s:.3f} ms, fused {1e3 * fused_s:.3f} ms, {difference:.2g}")
        assert difference <= make_step.TOLERANCE
    messages: list[str] = []
    (setup.folder.path / "events.jsonl").touch()
    make_step.choose_kernels(setup, lambda _kind, text, **_data: messages.append(text))  # type: ignore[arg-type]
    assert messages[0].startswith("kernels: convs: ")
