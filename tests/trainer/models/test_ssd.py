"""SSD: torchvision's SSD300 and SSDlite are the oracles of names, anchors, losses, gradients and detections."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchvision.models import mobilenet_v3_large, vgg16
from torchvision.models.detection import SSD300_VGG16_Weights, ssd300_vgg16, ssdlite320_mobilenet_v3_large
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import box_iou

from stoker.config.settings import from_fields
from stoker.data.anchor_fit import best_image_size
from stoker.data.batch import Batch
from stoker.data.index import Index, open_index
from stoker.export import graph, parity
from stoker.hardware.device import Device
from stoker.inference.runtime import OnnxModel
from stoker.models import MODELS, build, detect_architecture, load_weights
from stoker.models.backbones import StridedConv2d
from stoker.models.layers.boxes import AnchorOutputs
from stoker.models.layers.matching import BACKGROUND, match_anchors
from stoker.models.ssd import SSD, detect_reduced_tail, hard_negative_cross_entropy
from stoker.models.table import check_image_size
from stoker.models.weights.load import read_weights
from stoker.models.weights.model_file import ModelMetadata
from stoker.training.defaults.derive import derive
from stoker_watch.errors import ConfigError
from tests import fakes
from tests.drawn import draw
from tests.host_sync import ForbidHostSync
from tests.trainer.models.samples import make_batch, settings_of

SSD300, LITE = "ssd300_vgg16", "ssdlite320_mobilenet_v3_large"
CLASSES = 5
NAMES = tuple("abcde")
ORACLES = {SSD300: ssd300_vgg16, LITE: ssdlite320_mobilenet_v3_large}
SIDES = {SSD300: 300, LITE: 320}
GRIDS = {SSD300: (38, 19, 10, 5, 3, 1), LITE: (20, 10, 5, 3, 2, 1)}
COUNTS = [(3, 7), (0, 5), (0, 0), (16, 1)]


def oracle_of(name: str, classes: int = CLASSES) -> Any:
    return ORACLES[name](weights=None, weights_backbone=None, num_classes=classes + 1)


@pytest.fixture(scope="module")
def empty_oracles() -> dict[str, Any]:
    """For what needs no weights."""
    with torch.device("meta"):
        return {name: oracle_of(name) for name in ORACLES}


@pytest.fixture(scope="module")
def models() -> dict[str, SSD]:
    """With random weights; not to be changed."""
    torch.manual_seed(0)
    made = {name: build(settings_of(name), CLASSES) for name in ORACLES}
    return {name: model for name, model in made.items() if isinstance(model, SSD)}


def raw_of(model: SSD, name: str, images: int, *, seed: int = 0, spread: float = 1.0) -> AnchorOutputs:
    """Random predictions on torchvision's model input, in float64; every gradient is wanted."""
    draws = torch.Generator().manual_seed(seed)
    side = SIDES[name]
    anchors = model.anchors((side, side), [(n, n) for n in GRIDS[name]]).double()

    def some(numbers: int) -> Tensor:
        shape = (images, len(anchors), numbers)
        return (spread * torch.randn(shape, generator=draws, dtype=torch.float64)).requires_grad_()

    return AnchorOutputs(some(1 + CLASSES), some(4), anchors, ())


def in_float64(batch: Batch) -> Batch:
    return batch._replace(boxes=batch.boxes.double())


def theirs(oracle: Any, raw: AnchorOutputs, batch: Batch) -> dict[str, Tensor]:
    """The oracle's matching and loss, of these predictions."""
    targets = [
        {"boxes": boxes[valid], "labels": labels[valid] + 1}
        for boxes, labels, valid in zip(batch.boxes, batch.labels, batch.valid, strict=True)
    ]
    matched = [
        oracle.proposal_matcher(box_iou(target["boxes"], raw.anchors))
        if len(target["boxes"])
        else torch.full((len(raw.anchors),), -1)
        for target in targets
    ]
    outputs = {"bbox_regression": raw.deltas, "cls_logits": raw.logits}
    return oracle.compute_loss(targets, outputs, [raw.anchors] * len(targets), matched)


def relative(ours: Tensor, other: Tensor) -> float:
    scale = other.norm().item()
    return (ours - other).norm().item() / (scale if scale > 1e-12 else 1.0)


@pytest.mark.parametrize("name", ORACLES)
def test_names_and_shapes_are_those_of_torchvision(name: str, empty_oracles: dict[str, Any], models: dict[str, SSD]):
    ours = {key: tensor.shape for key, tensor in models[name].state_dict().items()}
    assert ours == {key: tensor.shape for key, tensor in empty_oracles[name].state_dict().items()}


@pytest.mark.parametrize("name", ORACLES)
def test_anchors_are_those_of_torchvision(name: str, empty_oracles: dict[str, Any], models: dict[str, SSD]):
    side, grids = SIDES[name], [(n, n) for n in GRIDS[name]]
    images = ImageList(torch.zeros(1, 3, side, side), [(side, side)])
    (expected,) = empty_oracles[name].anchor_generator(images, [torch.zeros(1, 1, *grid) for grid in grids])
    torch.testing.assert_close(models[name].anchors((side, side), grids), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ORACLES)
def test_anchors_of_another_input_size(name: str) -> None:
    """As large in pixels, but not larger than the model input; the last places are spread evenly over it."""
    sizes = (10.0, 20.0, 40.0, 80.0, 120.0, 200.0, 240.0)
    model = build(settings_of(name, anchor_sizes=sizes), CLASSES)
    assert isinstance(model, SSD)
    anchors = model.anchors((160, 100), [(20, 13), (10, 7), (5, 4), (3, 2), (2, 3), (1, 1)])
    sides = anchors[:, 2:] - anchors[:, :2]
    assert sides[:, 0].max() == 100
    assert sides[:, 1].max() == 160
    assert torch.allclose(sides[:2], torch.tensor([[10.0, 10.0], [200**0.5, 200**0.5]]))
    center = (anchors[:, 2:] + anchors[:, :2]) / 2
    last = len(model.aspect_ratios[-1]) * 2 + 2
    assert torch.allclose(center[-1], torch.tensor([50.0, 80.0]))  # the middle
    assert torch.allclose(center[-1 - last], torch.tensor([100 * 5 / 6, 160 * 3 / 4]))
    assert torch.allclose(center[0], torch.tensor([4.0, 4.0] if name == SSD300 else [50 / 13, 4.0]))


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("counts", COUNTS)
def test_losses_and_gradients_are_those_of_torchvision(
    name: str, counts: tuple[int, int], empty_oracles: dict[str, Any], models: dict[str, SSD]
) -> None:
    raw = raw_of(models[name], name, len(counts), spread=0.3)
    batch = in_float64(make_batch(counts, (SIDES[name],) * 2, CLASSES, seed=sum(counts)))
    require_equal(models[name], empty_oracles[name], raw, batch)


def require_equal(model: SSD, oracle: Any, raw: AnchorOutputs, batch: Batch) -> None:
    ours, expected = model.loss(raw, batch), theirs(oracle, raw, batch)
    assert ours.keys() == expected.keys()
    for part, loss in expected.items():
        assert relative(ours[part], loss) < 1e-12, part
    gradients = [torch.autograd.grad(sum(some.values()), raw[:2]) for some in (ours, expected)]
    for mine, other in zip(*gradients, strict=True):
        assert relative(mine, other) < 1e-12


def match_ssd(boxes: Tensor, valid: Tensor, anchors: Tensor, thresh: float, block: int | None = None) -> Tensor:
    return match_anchors(
        boxes, valid, anchors, fg_iou_thresh=thresh, bg_iou_thresh=thresh, single_best=True, block=block
    )


def test_boxes_that_want_the_same_anchor(empty_oracles: dict[str, Any], models: dict[str, SSD]) -> None:
    """Equal boxes, and small ones around one anchor: the last slot has it, and some have none."""
    raw = raw_of(models[LITE], LITE, 2)
    batch = in_float64(make_batch((16, 16), (320, 320), CLASSES))
    wanted = raw.anchors[100]
    batch.boxes[0, :8] = wanted + 1
    for slot in range(16):
        batch.boxes[1, slot] = torch.tensor([150 + slot / 4, 150, 160 + slot / 4, 160])
    slots = match_ssd(batch.boxes, batch.valid, raw.anchors, 0.5)
    assert slots[0, 100] == 7
    assert len(set(slots[1].tolist()) - {BACKGROUND}) < 16
    assert slots[1].max() == 15
    require_equal(models[LITE], empty_oracles[LITE], raw, batch)


def test_a_box_that_overlaps_no_anchor_has_none() -> None:
    anchors = torch.tensor([[0.0, 0, 10, 10], [20, 20, 30, 30]])
    boxes = torch.tensor([[[12.0, 12, 14, 14], [20, 20, 22, 22], [0, 0, 10, 10]]])
    assert match_ssd(boxes, torch.tensor([[True] * 3]), anchors, 0.5).tolist() == [[2, 1]]
    assert match_ssd(boxes, torch.tensor([[True, False, True]]), anchors, 0.5).tolist() == [[2, -1]]


@given(st.integers(0, 10_000), st.integers(1, 600))
@settings(max_examples=40, deadline=None)
def test_matching_in_parts_is_matching_at_once(seed: int, block: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    corners = torch.randint(0, 30, (3, 9, 2), generator=draws).float()
    boxes = torch.cat((corners, corners + torch.randint(1, 12, (3, 9, 2), generator=draws)), 2)
    boxes[:, 5] = boxes[:, 2]
    valid = torch.rand(3, 9, generator=draws) < 0.7
    grid = torch.cartesian_prod(torch.arange(0, 40, 8), torch.arange(0, 40, 8)).float()
    anchors = torch.cat((grid, grid + 8), 1)
    found = match_ssd(boxes, valid, anchors, 0.1, block=block)
    assert torch.equal(found, match_ssd(boxes, valid, anchors, 0.1))
    for image in range(3):
        overlaps = [valid[image, m] and bool(box_iou(boxes[image, m, None], anchors).any()) for m in range(9)]
        taken = {int(slot) for slot in found[image]} - {BACKGROUND}
        assert all(overlaps[slot] for slot in taken)
        assert bool(taken) == any(overlaps)


def test_positives_are_no_hard_negatives() -> None:
    """Four anchors, two of them positive: both negatives count, and no positive a second time, as in torchvision."""
    logits = torch.randn(1, 4, 3, dtype=torch.float64)
    target = torch.tensor([[2, 0, 1, 0]])
    expected = nn.functional.cross_entropy(logits[0], target[0], reduction="sum")
    torch.testing.assert_close(hard_negative_cross_entropy(logits, target), expected)
    nothing = hard_negative_cross_entropy(logits, torch.zeros_like(target))
    assert nothing == 0


def test_among_equal_negatives_the_first_are_learned_from() -> None:
    logits = torch.zeros(1, 9, 2, requires_grad=True)
    target = torch.tensor([[0, 0, 0, 0, 0, 1, 0, 0, 0]])
    hard_negative_cross_entropy(logits, target).backward()
    assert logits.grad is not None
    assert (logits.grad[0].abs().sum(1) > 0).tolist() == [True] * 3 + [False] * 2 + [True] + [False] * 3


def test_padding_and_infinities_leave_the_gradients_finite(models: dict[str, SSD]) -> None:
    raw = raw_of(models[LITE], LITE, 2, spread=1e4)
    batch = in_float64(make_batch((1, 0), (320, 320), CLASSES))
    batch.boxes[~batch.valid] = 0.0
    with ForbidHostSync():
        loss = sum(models[LITE].loss(raw, batch).values(), torch.zeros(()))
        loss.backward()
    assert raw.logits.grad is not None
    assert raw.deltas.grad is not None
    for gradient in (raw.logits.grad, raw.deltas.grad):
        assert gradient.isfinite().all()
        assert gradient[0].any()


def outputs_of(oracle: Any, model: SSD, images: Tensor, anchors: Tensor) -> AnchorOutputs:
    kind = anchors.dtype if next(oracle.parameters()).dtype == torch.float32 else torch.float64
    pixels = torch.stack([oracle.transform.normalize(image) for image in images.to(kind) / 255])
    torch.testing.assert_close(model.normalize(images), pixels, rtol=1e-6, atol=1e-4)
    found = oracle.head(list(oracle.backbone(pixels).values()))
    return AnchorOutputs(found["cls_logits"], found["bbox_regression"], anchors, ())


@pytest.mark.slow
def test_gradients_of_all_weights_of_ssdlite_are_those_of_torchvision() -> None:
    torch.manual_seed(1)
    model, oracle = build(settings_of(LITE), CLASSES), oracle_of(LITE)
    assert isinstance(model, SSD)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, 0.5, 1.0)
    oracle.load_state_dict(model.state_dict())
    model.double().train(), oracle.double().train()
    batch = in_float64(make_batch((3, 2), (96, 128), CLASSES, slots=8))
    ours = model(batch.images)
    raw = outputs_of(oracle, model, batch.images, ours.anchors)
    losses, expected = model.loss(ours, batch), theirs(oracle, raw, batch)
    names = [key for key, _ in model.named_parameters()]
    mine = torch.autograd.grad(sum(losses.values()), list(model.parameters()))
    other = torch.autograd.grad(sum(expected.values()), [oracle.get_parameter(key) for key in names])
    whole = torch.cat([gradient.flatten() for gradient in other]).norm()
    for part, loss in expected.items():
        assert relative(losses[part], loss) < 1e-5
    for key, first, second in zip(names, mine, other, strict=True):
        assert (first - second).norm() < 1e-4 * second.norm() + 1e-7 * whole, key
    for key, buffer in model.named_buffers():
        if key.endswith("running_var"):
            torch.testing.assert_close(buffer, oracle.get_buffer(key), rtol=1e-5, atol=1e-9)  # their momentum


@pytest.mark.parametrize(("name", "per_class"), [(SSD300, 400), (LITE, 300), (LITE, 7)])
@pytest.mark.parametrize("score_threshold", [0.05, 0.5])
def test_detections_are_those_of_torchvision(
    name: str, per_class: int, score_threshold: float, empty_oracles: dict[str, Any], models: dict[str, SSD],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model, oracle, side = models[name], empty_oracles[name], SIDES[name]
    assert oracle.nms_thresh == model.iou_threshold
    assert oracle.topk_candidates == model.pre_nms_top_n_per_class
    raw = raw_of(model, name, 2, spread=2.0)
    raw = raw._replace(logits=raw.logits.detach(), deltas=raw.deltas.detach())
    monkeypatch.setattr(model, "pre_nms_top_n_per_class", per_class)
    resized_sizes = [(side, side), (side // 2, side - 31)]
    for key, value in {"topk_candidates": per_class, "score_thresh": score_threshold}.items():
        monkeypatch.setattr(oracle, key, value)
    monkeypatch.setattr(oracle, "detections_per_img", 10_000)
    outputs = {"bbox_regression": raw.deltas, "cls_logits": raw.logits}
    expected = oracle.postprocess_detections(outputs, [raw.anchors] * 2, resized_sizes)
    resized_size = torch.tensor(resized_sizes, dtype=torch.int32)
    found = model.decode(raw, resized_size, torch.ones(2, 2), resized_size, score_threshold=score_threshold)
    for image, one in enumerate(expected):
        is_box = (one["boxes"][:, 2:] > one["boxes"][:, :2]).all(1)  # not lines, which lay in the padding alone
        best = {key: values[is_box][:100] for key, values in one.items()}
        assert len(best["scores"]) > 20
        valid = found.valid[image]
        assert int(valid.sum()) == len(best["scores"])
        torch.testing.assert_close(found.scores[image][valid], best["scores"], rtol=1e-12, atol=0)
        torch.testing.assert_close(found.boxes[image][valid], best["boxes"], rtol=0, atol=1e-9)
        assert torch.equal(found.labels[image][valid], best["labels"] - 1)


@pytest.mark.parametrize(
    ("name", "image_size"), [pytest.param(SSD300, (280, 280), marks=pytest.mark.slow), (LITE, (64, 96))]
)
def test_torchvisions_coco_weights_load_and_predict_the_same(
    name: str, image_size: tuple[int, int], tmp_path: Path
) -> None:
    torch.manual_seed(2)
    with torch.device("meta"):
        oracle = oracle_of(name, classes=90).eval()
    state = build(settings_of(name), 90).state_dict()  # of its names and shapes, as another test shows
    oracle.load_state_dict(state, assign=True)
    path = tmp_path / "a_file.pth"
    torch.save(state, path)
    coco = SSD300_VGG16_Weights.COCO_V1.meta["categories"]
    settings_ = settings_of(name, weights=str(path))
    model = build(settings_, 2).eval()
    assert isinstance(model, SSD)
    backbone, head = load_weights(model, settings_, class_names=("zebra", "Person"))
    assert backbone == "backbone, neck and heads from a_file.pth"
    assert head == "class head kept, 91 -> 3 channels; every class is one of the file's, matched by name"
    channels = [0, coco.index("zebra"), coco.index("person")]
    images = make_batch((0,), image_size, 2).images
    with torch.no_grad():
        ours = model(images)
        expected = outputs_of(oracle, model, images, ours.anchors)
    assert ours.deltas.shape[1] == len(ours.anchors)
    assert relative(ours.deltas, expected.deltas) < 1e-5
    assert relative(ours.logits, expected.logits[..., channels]) < 1e-5


@pytest.mark.slow  # every row of MODELS is built
@pytest.mark.parametrize("name", ORACLES)
def test_torchvisions_files_are_recognized(name: str, tmp_path: Path, empty_oracles: dict[str, Any]) -> None:
    state = {key: torch.zeros(tensor.shape) for key, tensor in empty_oracles[name].state_dict().items()}
    torch.save(state, tmp_path / "detector.pth")
    assert detect_architecture(tmp_path / "detector.pth") == name
    if name == SSD300:
        torch.save(vgg_state(), tmp_path / "vgg.pth")
        assert detect_architecture(tmp_path / "vgg.pth") == name


def vgg_state() -> dict[str, Tensor]:
    """Of torchvision's VGG-16, without the numbers of its fully connected layers."""
    with torch.device("meta"):
        names = {key: tensor.shape for key, tensor in vgg16(weights=None).state_dict().items()}
    return {key: torch.rand(shape if key.startswith("features.") else 1) for key, shape in names.items()}


def test_imagenets_vgg_fills_the_backbone(tmp_path: Path) -> None:
    state = vgg_state()
    torch.save(state, tmp_path / "vgg.pth")
    settings_ = settings_of(SSD300, weights=str(tmp_path / "vgg.pth"))
    model = build(settings_, CLASSES)
    assert load_weights(model, settings_, class_names=NAMES) == ["backbone from vgg.pth", "neck and heads are random"]
    convolutions = [m for m in nn.Sequential(model.get_submodule("backbone.features"),
                                             model.get_submodule("backbone.extra.0")).modules()
                    if isinstance(m, nn.Conv2d)]  # fmt: skip
    theirs_ = [tensor for key, tensor in state.items() if key.startswith("features.") and key.endswith("weight")]
    assert len(theirs_) == 13
    assert all(torch.equal(one.weight, other) for one, other in zip(convolutions, theirs_, strict=False))


def test_imagenets_mobilenet_fills_the_backbone_with_a_full_tail(tmp_path: Path) -> None:
    torch.manual_seed(3)
    classifier = mobilenet_v3_large(weights=None).eval()
    torch.save(classifier.state_dict(), tmp_path / "v3.pth")
    settings_ = settings_of(LITE, weights=str(tmp_path / "v3.pth"), reduced_tail=False)
    model = build(settings_, CLASSES).eval()
    assert load_weights(model, settings_, class_names=NAMES) == ["backbone from v3.pth", "neck and heads are random"]
    pixels = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        maps = model.get_submodule("backbone")(pixels)
        torch.testing.assert_close(maps[1], classifier.features(pixels), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("norm", ["bn", "frozen_bn", "sync_bn"])
def test_a_batch_of_one_image_can_be_trained_on(norm: str) -> None:
    """torch's BatchNorm raises where the coarsest map has one value per channel, and so does torchvision's SSDlite."""
    model = build(settings_of(LITE, backbone_norm=norm), CLASSES).train()
    batch = make_batch((3,), (64, 64), CLASSES)
    last = model.get_submodule("backbone.extra.3.2.1")
    before = last.get_buffer("running_mean").clone()
    losses = model.loss(model(batch.images), batch)
    sum(losses.values(), torch.zeros(())).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert torch.equal(last.get_buffer("running_mean"), before)
    oracle = oracle_of(LITE).train()
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        oracle.backbone(model.normalize(batch.images))


@pytest.mark.parametrize("groups", [1, 64])
def test_gradients_of_maps_of_one_place_in_bf16(groups: int) -> None:
    """With nn.Conv2d most of these gradients are whatever memory held."""
    torch.manual_seed(0)
    layer = StridedConv2d(64, 64, groups=groups, bias=False).bfloat16()
    for height in (1, 2, 3):
        kept = [torch.full((64 * 64 * 9,), torch.nan) for _ in range(8)]
        del kept  # the memory that comes next
        x = torch.randn(8, 64, height, 1).bfloat16().contiguous(memory_format=torch.channels_last)
        layer.weight.grad = None
        layer(x).sum().backward()
        gradient = layer.weight.grad
        assert gradient is not None
        expected = torch.nn.grad.conv2d_weight(
            x.float(), layer.weight.shape, torch.ones(8, 64, (height + 1) // 2, 1), stride=2, padding=1, groups=groups
        )
        torch.testing.assert_close(gradient.float(), expected, rtol=0.02, atol=0.1)


def test_norms_are_torchvisions() -> None:
    kinds = [m for m in build(settings_of(LITE), CLASSES).modules() if isinstance(m, nn.BatchNorm2d)]
    assert {(m.eps, m.momentum) for m in kinds} == {(0.001, 0.03)}
    frozen = build(settings_of(LITE, backbone_norm="frozen_bn"), CLASSES)
    trained = [key for key, m in frozen.named_modules() if isinstance(m, nn.BatchNorm2d)]
    assert trained
    assert not [key for key in trained if key.startswith("backbone.features.")]


@pytest.mark.parametrize(("name", "stages", "first"), [
    (SSD300, 5, "backbone.features.0.weight"), (SSD300, 4, "backbone.features.5.weight"),
    (SSD300, 1, "backbone.extra.0.1.weight"), (SSD300, 0, "backbone.extra.0.7.1.weight"),
    (LITE, 5, "backbone.features.0.0.0.weight"), (LITE, 1, "backbone.features.0.13.0.weight"),
    (LITE, 0, "backbone.extra.0.0.0.weight"),
])  # fmt: skip
def test_the_first_stages_are_frozen(name: str, stages: int, first: str) -> None:
    with torch.device("meta"):
        model = build(settings_of(name, trainable_backbone_layers=stages), CLASSES)
    trained = [key for key, p in model.named_parameters() if p.requires_grad and not key.endswith("scale_weight")]
    assert trained[0] == first


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    return open_index(draw(tmp_path_factory.mktemp("drawn"), train=8, val=4))


def derived(index: Index, **fields: Any) -> tuple[Any, dict[str, str]]:
    return derive(from_fields({"weights": "none", **fields}), index, Device(torch.device("cpu")))


@pytest.mark.slow
def test_input_size_and_anchors_of_a_run(index: Index) -> None:
    config, reasons = derived(index, model=LITE, image_size=(160, 160))
    assert config.model.anchor_sizes == (32.0, 56.0, 80.0, 104.0, 128.0, 152.0, 160.0)
    assert "times 0.5" in reasons["anchor_sizes"]
    config, _ = derived(index, model=SSD300)
    assert config.data.image_size == (80, 80)
    assert config.model.trainable_backbone_layers == 5
    with pytest.raises(ConfigError, match="multiples of 20 for ssd300_vgg16") as caught:
        derived(index, model=SSD300, image_size=(310, 300))
    with pytest.raises(ConfigError, match="multiples of 32"):
        check_image_size(from_fields({"model": LITE, "image_size": (300, 300)}))
    assert list(caught.value.choices) == ["320 300"]


def test_the_input_size_of_large_square_images_is_torchvisions() -> None:
    for name, side in SIDES.items():
        row = MODELS[name]
        assert best_image_size(np.full((9, 2), 900, np.int32), row.default_image_size, row.size_divisor)[0] == (
            side,
            side,
        )


@pytest.mark.slow
def test_the_tail_follows_the_weights(index: Index, tmp_path: Path) -> None:
    """Only derived: nothing is downloaded."""
    path = tmp_path / "some.pth"
    for tail in (True, False):
        torch.save(build(settings_of(LITE, reduced_tail=tail), CLASSES).state_dict(), path)
        assert detect_reduced_tail(read_weights(path).tensors) == tail
    assert derived(index, model=LITE, image_size=(32, 32), weights=str(path))[0].model.reduced_tail is False
    assert derived(index, model=LITE, image_size=(32, 32), weights="imagenet")[0].model.reduced_tail is False
    with pytest.raises(ConfigError, match="--reduced-tail does not fit"):
        derived(index, model=LITE, weights="imagenet", reduced_tail=True)


def test_class_layers_have_classes_and_background_of_every_anchor(models: dict[str, SSD]) -> None:
    layers = models[LITE].class_heads()
    assert [layer.num_anchors for layer in layers] == [6] * 6
    assert [layer.num_anchors for layer in models[SSD300].class_heads()] == [4, 6, 6, 6, 4, 4]
    for name, model in models.items():
        for layer in model.class_heads():
            weight = model.get_parameter(f"{layer.name}.weight")
            assert weight.shape[0] == layer.num_anchors * (CLASSES + 1), name


@pytest.mark.slow
def test_mixed_precision_steps_on_a_fake_accelerator_and_their_memory() -> None:
    """2.29 GiB for SSD300, 1.63 for SSDlite when this was written. The overlaps of 1,000 boxes are one block of 1.04
    GiB on the fake device, which has the memory of an H200; at most three such tensors live at once."""
    common: dict[str, Any] = {"batch": 32, "optimizer": "adamw"}
    trials = [
        fakes.Trial(model=SSD300, slots=10, image_size=(300, 300), precision="fp16", **common),
        fakes.Trial(model=SSD300, slots=1000, image_size=(300, 300), precision="fp16", **common),
        fakes.Trial(model=LITE, slots=100, image_size=(320, 320), **common),
    ]
    few, many, lite = fakes.run(*trials)
    for trial, outcome in zip(trials, (few, many, lite), strict=True):
        assert outcome.error is None, trial
    assert few.peak < 2.5 * 2**30
    assert many.peak < 3 * 1.05 * 2**30 + few.peak
    assert lite.peak < 1.8 * 2**30


@pytest.mark.slow
@pytest.mark.parametrize(("name", "image_size"), [(LITE, (96, 128)), (SSD300, (100, 120))])
def test_the_onnx_file_finds_what_the_model_finds(name: str, image_size: tuple[int, int], tmp_path: Path) -> None:
    torch.manual_seed(4)
    chosen = settings_of(name)
    model = build(chosen, CLASSES)
    images = np.random.default_rng(0).integers(0, 256, (4, 3, *image_size), np.uint8)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        for layer in model.class_heads():
            model.get_parameter(f"{layer.name}.weight").mul_(10)
        model.train()(torch.from_numpy(images))
    model.eval()
    metadata = ModelMetadata(settings=chosen, class_names=NAMES, image_size=image_size, resize="letterbox")
    path = tmp_path / "it.onnx"
    path.write_bytes(
        graph.build_onnx(graph.Spec(model, metadata, score_threshold=0.05, iou_threshold=model.iou_threshold))
    )
    inside = np.array([image_size, image_size, (50, 60), image_size], np.int32)
    found, _ = parity.compare_outputs(
        model, OnnxModel(path, num_threads=1), images, inside, list("abcd"),
        score_threshold=0.05, iou_threshold=model.iou_threshold, max_detections=100,
    )  # fmt: skip
    parity.require_parity(found, path)
    assert found.num_boxes > 40
