"""Backbones and their maps: what is frozen is computed image by image on a CPU, with the same numbers. On accelerators
images are normalized in autocast's type and get more channels, with the same results and gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional

from stoker.models import Detector, build, detector
from stoker.models.layers import convolutions
from stoker.models.layers.convolutions import FoldedConv2d, PaddedConv2d
from stoker.models.layers.norms import FrozenBatchNorm2d
from tests.host_sync import ForbidHostSync
from tests.trainer.models.samples import make_batch, settings_of

CANVAS, CLASSES = (64, 96), 3
ON_BODIES = ["ember_mobilenet_v2", "retinanet_mobilenet_v2_fpn", "retinanet_resnet18_fpn", "faster_rcnn_resnet50_fpn"]


def sizes_of_calls(model: Detector, name: str) -> list[int]:
    """Fills, in later forward passes, with the number of images of each call of a child of the backbone."""
    seen: list[int] = []

    def note(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        seen.append(len(inputs[0]))

    model.get_submodule(f"backbone.body.{name}").register_forward_pre_hook(note)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_BODIES)
def test_frozen_children_take_one_image_at_a_time_and_nothing_else_changes(name: str) -> None:
    torch.manual_seed(0)
    model = build(settings_of(name, backbone_norm="frozen_bn", trainable_backbone_layers=3), CLASSES).double().train()
    backbone = model.backbone.body  # type: ignore[union-attr]
    names = [child for child, _ in backbone.named_children()]  # type: ignore[union-attr]
    calls = sizes_of_calls(model, names[0]), sizes_of_calls(model, names[-1])
    pixels = model.normalize(make_batch((2, 1, 1), CANVAS, CLASSES).images).double()
    apart = backbone(pixels)  # type: ignore[operator]
    assert calls == ([1, 1, 1], [3])
    seen = pixels.clone().requires_grad_()  # what has a gradient is taken whole
    whole = backbone(seen)  # type: ignore[operator]
    assert calls == ([1, 1, 1, 3], [3, 3])
    for map_, other in zip(apart, whole, strict=True):
        torch.testing.assert_close(map_, other, rtol=1e-12, atol=1e-12)
    parameters = [p for p in model.parameters() if p.requires_grad]
    ours, theirs = (
        torch.autograd.grad(sum(map_.square().sum() for map_ in maps), parameters, allow_unused=True)
        for maps in (apart, whole)
    )
    assert any(grad is not None for grad in ours)
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("norm", "stages", "train"), [("bn", 3, True), ("frozen_bn", 5, True), ("frozen_bn", 3, False)]
)
def test_what_learns_or_takes_statistics_of_the_batch_sees_all_of_it(norm: str, stages: int, train: bool) -> None:
    model = build(
        settings_of("ember_mobilenet_v2", backbone_norm=norm, trainable_backbone_layers=stages), CLASSES
    ).train(train)
    calls = sizes_of_calls(model, "0")
    model(make_batch((1, 1, 1), CANVAS, CLASSES).images)
    assert calls == [3]


# Images on an accelerator.

FIRST_CONVS = {
    "retinanet_tiny_fpn": 4,
    "ember_n": 4,
    "ember_mobilenet_v2": 4,
    "ssdlite320_mobilenet_v3_large": 4,
    "retinanet_resnet18_fpn": 4,
    "ssd300_vgg16": 8,  # stride 1
}
"""Model → channels of an image on an accelerator."""


@pytest.fixture
def as_on_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code for accelerators, on CPU tensors."""
    for module in (convolutions, detector):
        monkeypatch.setattr(module, "is_on_accelerator", lambda _: True)


@pytest.fixture
def conv_channels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fills with the input channels of every convolution."""
    seen: list[int] = []
    real = functional.conv2d

    def conv2d(x: Tensor, *others: Any, **by_name: Any) -> Tensor:
        seen.append(x.shape[1])
        return real(x, *others, **by_name)

    monkeypatch.setattr(functional, "conv2d", conv2d)
    return seen


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n == "ssd300_vgg16" else []) for n in FIRST_CONVS]
)
def test_images_have_more_channels_on_an_accelerator_only(
    name: str, conv_channels: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(settings_of(name), CLASSES).eval()
    images = make_batch((0,), CANVAS, CLASSES).images
    state = model.state_dict()
    with torch.no_grad():
        model(images)
        on_cpu = conv_channels.copy()
        conv_channels.clear()
        monkeypatch.setattr(convolutions, "is_on_accelerator", lambda _: True)
        model(images)
    assert on_cpu[0] == 3
    assert conv_channels == [FIRST_CONVS[name], *on_cpu[1:]]
    assert sum(tensor.ndim == 4 and tensor.shape[1] == 3 for tensor in state.values()) == 1


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_device_decides(device: str) -> None:
    assert convolutions.is_on_accelerator(torch.empty(0, device=device)) is (device != "cpu")


@pytest.mark.parametrize(
    ("name", "norm"),
    [
        ("retinanet_tiny_fpn", "bn"),
        ("retinanet_tiny_fpn", "frozen_bn"),
        ("retinanet_resnet18_fpn", "frozen_bn"),
        pytest.param("ssd300_vgg16", None, marks=pytest.mark.slow),
    ],
)
def test_more_channels_change_neither_maps_nor_gradients(
    name: str, norm: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    norms = {} if norm is None else {"backbone_norm": norm}
    model = build(settings_of(name, trainable_backbone_layers=5, **norms), CLASSES)
    first = next(m for m in model.double().modules() if isinstance(m, PaddedConv2d) and m.in_channels == 3)
    torch.manual_seed(0)
    pixels = torch.randn(2, 3, 40, 56, dtype=torch.float64).contiguous(memory_format=torch.channels_last)

    def run() -> tuple[Tensor, ...]:
        x = pixels.clone().requires_grad_()
        y = first(x)
        (y.sin() * torch.arange(y.shape[1], dtype=y.dtype)[:, None, None]).sum().backward()
        assert first.weight.grad is not None
        gradients = x.grad, first.weight.grad.clone()
        first.weight.grad = None
        return (y.detach(), *gradients)  # type: ignore[arg-type]

    plain = run()
    monkeypatch.setattr(convolutions, "is_on_accelerator", lambda _: True)
    for ours, theirs in zip(run(), plain, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("name", ["dfine_n", "retinanet_tiny_fpn"])
def test_every_norm_that_does_nothing_is_in_a_convolution(name: str) -> None:
    modules = list(build(settings_of(name, backbone_norm="frozen_bn"), CLASSES).modules())
    norms = {id(m) for m in modules if isinstance(m, FrozenBatchNorm2d) and m.folded}
    assert norms
    assert norms == {id(m._norm[0]) for m in modules if isinstance(m, FoldedConv2d)}


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@pytest.mark.usefixtures("as_on_accelerator")
def test_more_channels_keep_the_memory_format(memory: torch.memory_format, monkeypatch: pytest.MonkeyPatch) -> None:
    formats = []

    def conv2d(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
        formats.extend([x, weight])
        return x

    conv = PaddedConv2d(nn.Conv2d(3, 8, 3, stride=2)).to(memory_format=memory)  # type: ignore[call-overload]
    monkeypatch.setattr(functional, "conv2d", conv2d)
    conv(torch.zeros(2, 3, 8, 8).contiguous(memory_format=memory))
    assert all(tensor.is_contiguous(memory_format=memory) for tensor in formats)
    assert [tensor.shape[1] for tensor in formats] == [4, 4]


def reference_pixels(images: Tensor) -> Tensor:
    """torchvision's normalization of ImageNet's pixels, in float64."""
    mean, std = (torch.tensor(v, dtype=torch.float64)[:, None, None] for v in ((0.485, 0.456, 0.406), STD))
    return (images.double() / 255 - mean) / std


STD = (0.229, 0.224, 0.225)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
@pytest.mark.usefixtures("as_on_accelerator")
def test_normalized_images_are_within_a_gray_level_in_the_type_of_autocast(dtype: torch.dtype | None) -> None:
    model = build(settings_of("retinanet_tiny_fpn"), CLASSES)
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, 16, 16)
    images = images.contiguous(memory_format=torch.channels_last)
    with ForbidHostSync(), torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        pixels = model.normalize(images)
    assert pixels.dtype == (dtype or torch.float32)
    assert pixels.is_contiguous(memory_format=torch.channels_last)
    gray_levels = (pixels.double() - reference_pixels(images)) * 255 * torch.tensor(STD).double()[:, None, None]
    limit = {torch.bfloat16: 0.5, torch.float16: 0.07, None: 1e-4}[dtype]
    assert gray_levels.abs().max() < limit


def test_normalized_images_are_float32_on_a_cpu() -> None:
    model = build(settings_of("retinanet_tiny_fpn"), CLASSES)
    images = make_batch((0,), CANVAS, CLASSES).images
    with torch.autocast("cpu", torch.bfloat16):
        pixels = model.normalize(images)
    assert pixels.dtype == torch.float32
    torch.testing.assert_close(pixels.double(), reference_pixels(images), rtol=0, atol=1e-5)


@pytest.mark.usefixtures("as_on_accelerator")
def test_pixels_to_first_map_are_one_graph() -> None:
    model = build(settings_of("retinanet_tiny_fpn"), CLASSES).train()
    first = model.get_submodule("backbone.body.stem.0")
    images = make_batch((0, 0), CANVAS, CLASSES).images

    def first_map(some: Tensor) -> Tensor:
        map_: Tensor = first(model.normalize(some))
        return map_

    graphs = CompileCounter()
    torch._dynamo.reset()
    with torch.autocast("cpu", torch.bfloat16):
        compiled = torch.compile(first_map, fullgraph=True, backend=graphs)(images)
        torch.testing.assert_close(compiled, first_map(images), rtol=0, atol=0)
    assert graphs.frame_count == 1
