"""Geometry against torchvision's own: anchors, encoding, overlaps."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.models.detection._utils import BoxCoder
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.retinanet import _default_anchorgen
from torchvision.ops import box_iou, clip_boxes_to_image, generalized_box_iou_loss

from stoker.config.settings import read_recipes
from stoker.models import MODELS, build
from stoker.models.layers.boxes import (
    MAX_LOG_SCALE,
    area,
    cell_anchors,
    clip,
    decode,
    encode,
    giou,
    iou,
)
from stoker_watch.errors import ConfigError
from tests.trainer.models.samples import ALIKE, settings_of


def some_boxes(count: int, seed: int, side: float = 100) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    corner, size = (torch.rand(count, 2, generator=draw) * side for _ in range(2))
    return torch.cat((corner, corner + size + 5), 1)


@pytest.mark.parametrize("image_size", [(64, 96), (192, 256), (800, 800), (832, 1344)])
def test_anchors_are_those_of_torchvision(image_size: tuple[int, int]) -> None:
    model = build(settings_of("retinanet_mobilenet_v2_fpn"), 2)
    grids = [(-(-image_size[0] // stride), -(-image_size[1] // stride)) for stride in (8, 16, 32, 64, 128)]
    ours = model.anchors(image_size, grids)
    features = [torch.empty(1, 1, *grid) for grid in grids]
    theirs = _default_anchorgen()(ImageList(torch.empty(1, 3, *image_size), [image_size]), features)[0]
    assert torch.equal(ours, theirs)
    assert sum(model.anchors.num_anchors_per_level(grids)) == len(ours)
    assert model.anchors(image_size, grids) is ours  # made once
    assert model.double().anchors(image_size, grids).dtype == torch.float64


@given(
    size=st.floats(4, 600),
    scales=st.lists(st.floats(0.3, 3), min_size=1, max_size=4),
    ratios=st.lists(st.floats(0.1, 10), min_size=1, max_size=4),
)
def test_cell_anchors_are_those_of_torchvision(size: float, scales: list[float], ratios: list[float]) -> None:
    sides = [max(1, int(size * scale)) for scale in scales]
    expected = AnchorGenerator((tuple(sides),), (tuple(ratios),)).cell_anchors[0]
    assert torch.equal(cell_anchors(size, scales, ratios), expected)


@given(seed=st.integers(0, 10**6))
@settings(max_examples=30)
def test_encoding_is_that_of_torchvision_and_decoding_its_inverse(seed: int) -> None:
    boxes, anchors = some_boxes(20, seed), some_boxes(20, seed + 1)
    coder = BoxCoder((1.0, 1.0, 1.0, 1.0))
    deltas = encode(boxes, anchors)
    torch.testing.assert_close(deltas, coder.encode_single(boxes, anchors))
    wild = deltas * 3
    torch.testing.assert_close(decode(wild, anchors), coder.decode_single(wild, anchors))
    torch.testing.assert_close(decode(deltas, anchors), boxes, rtol=1e-4, atol=1e-3)


def test_decoding_is_bounded() -> None:
    box = decode(torch.tensor([[0.0, 0.0, 1e6, 1e6]]), torch.tensor([[0.0, 0.0, 16.0, 16.0]]))
    assert area(box).item() == pytest.approx(1000.0**2, rel=1e-4)
    assert math.exp(MAX_LOG_SCALE) == pytest.approx(62.5)


@given(seed=st.integers(0, 10**6), count=st.integers(1, 9))
@settings(max_examples=30)
def test_overlaps_are_those_of_torchvision(seed: int, count: int) -> None:
    boxes, anchors = some_boxes(2 * count, seed), some_boxes(30, seed + 1)
    assert torch.equal(iou(boxes, anchors), box_iou(boxes, anchors))
    assert torch.equal(iou(boxes.view(2, count, 4), anchors)[1], box_iou(boxes[count:], anchors))
    pairs = anchors[:2].repeat(count, 1)
    torch.testing.assert_close(1 - giou(boxes, pairs), generalized_box_iou_loss(boxes, pairs))


def test_clipping_is_per_image() -> None:
    boxes = (some_boxes(40, 3) - 50).view(2, 20, 4)
    sizes = torch.tensor([[30, 60], [80, 20]], dtype=torch.int32)
    clipped = clip(boxes, sizes)
    for image in range(2):
        assert torch.equal(clipped[image], clip_boxes_to_image(boxes[image], tuple(sizes[image].tolist())))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ALIKE])
def test_the_table_says_what_is_built(name: str) -> None:
    row = MODELS[name]
    model = build(settings_of(name), 80)
    assert sum(p.numel() for p in model.parameters()) == row.num_params
    assert row.defaults.keys() == row.reasons.keys()
    assert row.recipe in read_recipes()
    resized_size = torch.tensor([[64, 96]], dtype=torch.int32)
    with torch.no_grad():
        found = model.eval().candidates(
            model(torch.zeros(1, 3, 64, 96, dtype=torch.uint8)), resized_size, score_threshold=0.0
        )
    count = found.scores.shape[1]
    assert found.boxes.shape == (1, count, 4)
    assert found.labels.shape == (1, count)
    tensors = model.state_dict()
    for layer in model.class_heads():
        channels = layer.num_anchors * layer.outputs_per_class * (80 + layer.has_background)
        for kind in ("weight", "bias") if layer.has_bias else ("weight",):
            assert tensors[f"{layer.name}.{kind}"].shape[0] == channels


def test_the_demo_model_is_small() -> None:
    model = build(settings_of("retinanet_tiny_fpn"), 6)
    assert 0.55e6 < sum(p.numel() for p in model.parameters()) < 0.6e6


@pytest.mark.slow
@pytest.mark.parametrize("stages", range(6))
def test_trained_stages_are_counted_from_the_end(stages: int) -> None:
    firsts = {
        "retinanet_resnet50_fpn": ("conv1", "layer1.0.conv1", "layer2.0.conv1", "layer3.0.conv1", "layer4.0.conv1"),
        "retinanet_mobilenet_v2_fpn": ("0.0", "2.conv.0.0", "4.conv.0.0", "7.conv.0.0", "14.conv.0.0"),
        "retinanet_tiny_fpn": ("stem.0", "layer1.0.0", "layer2.0.0", "layer3.0.0", "layer4.0.0"),
    }
    for name, convolutions in firsts.items():
        model = build(settings_of(name, trainable_backbone_layers=stages, backbone_norm="frozen_bn"), 2)
        trained = [model.get_parameter(f"backbone.body.{some}.weight").requires_grad for some in convolutions]
        assert trained == [False] * (5 - stages) + [True] * stages, name
        others = [p for n, p in model.named_parameters() if not n.startswith("backbone.body.")]
        assert all(p.requires_grad for p in others)


def test_an_unknown_model_and_a_wrong_number_of_anchor_sizes_are_named() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'retinanet_resnet50_fpn'") as caught:
        build(settings_of("retinanet_tiny_fpn", model="retinanet_resnet50"), 2)
    assert set(caught.value.choices) == set(MODELS)
    with pytest.raises(ConfigError, match="anchor-sizes has 2 numbers") as caught:
        build(settings_of("retinanet_tiny_fpn", anchor_sizes=(8.0, 16.0)), 2)
    assert "needs 3, finest level first" in str(caught.value)
