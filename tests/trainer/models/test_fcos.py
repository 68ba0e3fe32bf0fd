"""FCOS, with torchvision's as the oracle: same weights, same batch, same losses, gradients and detections."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional
from torchvision.models import resnet18, resnet50
from torchvision.models.detection import FCOS, FCOS_ResNet50_FPN_Weights, fcos_resnet50_fpn
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.fcos import FCOSHead
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import FrozenBatchNorm2d
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

from stoker.data.batch import Batch
from stoker.export import graph, parity
from stoker.inference.runtime import OnnxModel
from stoker.models import MODELS, Detector, build, detect_architecture, fcos, load_weights
from stoker.models.fcos import assign_points, grid_points
from stoker.models.weights import model_file
from stoker_watch.errors import WeightsError
from tests import fakes
from tests.host_sync import ForbidHostSync
from tests.trainer.models.samples import calibrated_model, make_batch, settings_of

CLASSES = 7
CLASS_HEAD = "head.classification_head.cls_logits."
SETUPS = {
    "resnet18": ("fcos_resnet18_fpn", "bn", (128, 96)),
    "resnet18-tall": ("fcos_resnet18_fpn", "frozen_bn", (224, 96)),
    "resnet50": ("fcos_resnet50_fpn", "frozen_bn", (64, 96)),
}


def exact_model(name: str, norm: str, image_size: tuple[int, int]) -> Detector:
    """In float64: in fp32 the last bit of an activation carries some over the kink of a ReLU, and gradients jump."""
    model = calibrated_model(settings_of(name, backbone_norm=norm), CLASSES, image_size).double()
    model.load_state_dict(model.state_dict())  # so that nothing is left that was computed from the weights in fp32
    return model


def oracle_of(model: Detector, image_size: tuple[int, int]) -> FCOS:
    """torchvision's FCOS with the weights of ours, for pixels that are normalized. Its class head has one more channel,
    which costs nothing here; its labels are ours + 1."""
    norm = FrozenBatchNorm2d if model.settings.backbone_norm == "frozen_bn" else nn.BatchNorm2d
    is_large = model.settings.model == "fcos_resnet50_fpn"
    backbone = (resnet50 if is_large else resnet18)(norm_layer=norm)
    widths, channels, depth = ([512, 1024, 2048], 256, 4) if is_large else ([128, 256, 512], 128, 2)
    layers = {f"layer{n}": f"layer{n}" for n in (2, 3, 4)}
    oracle = FCOS(
        BackboneWithFPN(backbone, layers, widths, channels, LastLevelP6P7(channels, channels)),
        model.num_classes + 1,
        head=FCOSHead(channels, 1, model.num_classes + 1, depth),
        image_mean=[0.0] * 3,
        image_std=[1.0] * 3,
        min_size=min(image_size),
        max_size=max(image_size),
    ).to(next(model.parameters()).dtype)
    oracle.load_state_dict({name: to_oracle(name, tensor, -100.0) for name, tensor in model.state_dict().items()})
    for name, parameter in oracle.named_parameters():
        parameter.requires_grad_(model.get_parameter(name).requires_grad)
    return oracle.to(memory_format=torch.channels_last)


def to_oracle(name: str, tensor: Tensor, unused: float = 0.0) -> Tensor:
    if not name.startswith(CLASS_HEAD):
        return tensor
    first = torch.full_like(tensor[:1], unused if name.endswith("bias") else 0.0)
    return torch.cat((first, tensor))


def oracle_losses(oracle: FCOS, pixels: Tensor, batch: Batch) -> dict[str, Tensor]:
    targets = [
        {"boxes": boxes[valid], "labels": labels[valid] + 1}
        for boxes, labels, valid in zip(batch.boxes, batch.labels, batch.valid, strict=True)
    ]
    return oracle(list(pixels), targets)


def oracle_detections(oracle: FCOS, pixels: Tensor, batch: Batch) -> list[dict[str, Tensor]]:
    """The oracle's own post-processing, of images that fill only `resized_size` of the model input."""
    features = list(oracle.backbone(pixels).values())
    resized_sizes = [tuple(resized_size.tolist()) for resized_size in batch.resized_size]
    anchors = oracle.anchor_generator(ImageList(pixels, resized_sizes), features)
    counts = [feature.shape[2] * feature.shape[3] for feature in features]
    split = {name: list(output.split(counts, dim=1)) for name, output in oracle.head(features).items()}
    found = oracle.postprocess_detections(split, [list(some.split(counts)) for some in anchors], resized_sizes)
    return oracle.transform.postprocess(found, resized_sizes, [tuple(size.tolist()) for size in batch.original_size])


def awkward_batch(image_size: tuple[int, int]) -> Batch:
    """Boxes that are equal, of equal area and overlapping, tiny with a point inside and without, as large as the
    model input, and with points on their rim; between slots that are not used."""
    height, width = image_size
    batch = make_batch((0, 0), image_size, CLASSES, slots=12)
    boxes = torch.tensor(
        [
            [20.0, 20, 60, 52],
            [20, 20, 60, 52],
            [28, 22, 68, 54],
            [24, 16, 56, 56],
            [15, 15, 17.5, 17],
            [33, 33, 35, 36],
            [0, 0, width, height],
            [8, 8, 24, 24],
            [0, 0, 1, 1],
        ]
    )
    slots = torch.tensor([0, 1, 2, 4, 5, 6, 8, 9, 11])
    batch.boxes[0, slots] = boxes
    batch.labels[0, slots] = torch.arange(len(slots)) % CLASSES
    batch.valid[0, slots] = True
    batch.boxes[1, slots.flip(0)] = boxes
    batch.labels[1, slots.flip(0)] = torch.arange(len(slots)) % CLASSES
    batch.valid[1, slots] = True
    return batch


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Norm of the difference, relative to theirs; absolute where theirs is nothing."""
    scale = theirs.norm().item()
    return (ours - theirs).norm().item() / (scale if scale > 1e-8 else 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "setup", ["resnet18", *(pytest.param(some, marks=pytest.mark.slow) for some in ("resnet18-tall", "resnet50"))]
)
def test_losses_and_gradients_are_those_of_torchvision(setup: str) -> None:
    name, norm, image_size = SETUPS[setup]
    model = exact_model(name, norm, image_size).train()
    oracle = oracle_of(model, image_size).train()
    counts = [(0, 0), (0, 5), (16, 1)] if setup == "resnet18" else [(3,)]
    batches = [make_batch(some, image_size, CLASSES, seed=seed) for seed, some in enumerate(counts)]
    for batch in (*batches, awkward_batch(image_size)):
        batch = batch._replace(boxes=batch.boxes.double())
        ours, theirs = (
            model.loss(model(batch.images), batch),
            oracle_losses(oracle, model.normalize(batch.images), batch),
        )
        assert ours.keys() == theirs.keys()
        for part, loss in theirs.items():
            assert torch.isfinite(loss)
            assert relative(ours[part], loss) < 1e-7, part
        names = [n for n, p in model.named_parameters() if p.requires_grad]
        our_gradients, their_gradients = _gradients(model, ours, names), _gradients(oracle, theirs, names)
        whole = torch.cat([gradient.flatten() for gradient in their_gradients]).norm()
        for n, mine, other in zip(names, our_gradients, their_gradients, strict=True):
            # A bias before a norm has nothing but rounding for a gradient.
            assert (to_oracle(n, mine) - other).norm() < 1e-5 * other.norm() + 1e-12 * whole, n


def _gradients(model: nn.Module, losses: dict[str, Tensor], names: list[str]) -> list[Tensor]:
    parameters = [model.get_parameter(name) for name in names]
    found = torch.autograd.grad(sum(losses.values()), parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


@pytest.mark.parametrize(
    ("setup", "candidates", "threshold"),
    [
        ("resnet18-tall", 1000, 0.05),
        pytest.param("resnet18-tall", 40, 0.3, marks=pytest.mark.slow),
        pytest.param("resnet50", 1000, 0.45, marks=pytest.mark.slow),
    ],
)
def test_detections_are_those_of_torchvision(setup: str, candidates: int, threshold: float) -> None:
    name, norm, image_size = SETUPS[setup]
    model = exact_model(name, norm, image_size).eval()
    oracle = oracle_of(model, image_size).eval()
    model.pre_nms_top_n = candidates
    batch = make_batch((0, 0, 0), image_size, CLASSES, seed=5)
    # The second image was shrunk to half and fills a part of the model input; the third was squashed.
    resized_size = torch.tensor([image_size, (image_size[0] - 30, image_size[1] - 24), image_size], dtype=torch.int32)
    size = torch.stack((resized_size[0], resized_size[1] * 2, resized_size[2] * torch.tensor([3, 1])))
    batch = batch._replace(resized_size=resized_size, original_size=size.int(), scale=resized_size / size)
    oracle.topk_candidates, oracle.score_thresh, oracle.detections_per_img = candidates, threshold, 10_000
    with torch.no_grad():
        theirs = [_without_lines(one) for one in oracle_detections(oracle, model.normalize(batch.images), batch)]
        shapes = (batch.resized_size, batch.scale, batch.original_size)
        found = model.decode(model(batch.images), *shapes, score_threshold=threshold)
    assert len(theirs[0]["scores"]) > 5  # else the test shows nothing
    for image, expected in enumerate(theirs):
        valid = found.valid[image]
        assert valid.tolist() == [slot < len(expected["scores"]) for slot in range(100)]
        torch.testing.assert_close(found.scores[image][valid], expected["scores"], rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(found.boxes[image][valid], expected["boxes"], rtol=1e-6, atol=1e-4)
        assert torch.equal(found.labels[image][valid], expected["labels"] - 1)


def _without_lines(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The best 100 without the boxes that lay in the padding alone: torchvision cuts them to lines and keeps them."""
    is_box = (found["boxes"][:, 2:] > found["boxes"][:, :2]).all(1)
    return {name: values[is_box][:100] for name, values in found.items()}


def test_blocks_change_nothing_and_the_smallest_box_wins() -> None:
    image_size = (128, 160)
    points = grid_points(image_size, [(16, 20), (8, 10), (4, 5), (2, 3), (1, 2)], torch.device("cpu"))
    some, awkward = make_batch((9, 0, 12, 3), image_size, CLASSES, slots=12), awkward_batch(image_size)
    boxes, valid = torch.cat((some.boxes, awkward.boxes)), torch.cat((some.valid, awkward.valid))
    whole = assign_points(boxes, valid, points)
    for block in (1, 5 * len(points.stride), 30 * len(points.stride)):
        assert torch.equal(assign_points(boxes, valid, points, block=block), whole)
    assert not (whole[1] >= 0).any()
    of_equal = whole[4]
    assert not (of_equal == 1).any(), "of two equal boxes the one in the lower slot has all"
    at = (points.center == torch.tensor([32.0, 32.0])).all(1) & (points.stride == 8)
    assert of_equal[at].tolist() == [0], "of equal areas the lowest slot, and not the box of the whole model input"
    rim = (points.center == torch.tensor([8.0, 16.0])).all(1) & (points.stride == 8)
    assert of_equal[rim].tolist() == [-1], "a point on the rim is not inside"


def test_positives_are_within_one_and_a_half_strides_of_the_center() -> None:
    """torchvision's center sampling radius, along both axes: 12 pixels on the finest level, around (62, 62)."""
    points = grid_points((128, 128), [(16, 16), (8, 8), (4, 4), (2, 2), (1, 1)], torch.device("cpu"))
    box, valid = torch.tensor([[[32.0, 32, 92, 92]]]), torch.tensor([[True]])
    positive = assign_points(box, valid, points)[0] == 0
    assert points.stride[positive].eq(8).all()
    assert points.center[positive].tolist() == [[x, y] for y in (56, 64, 72) for x in (56, 64, 72)]


def test_points_are_made_once_and_can_be_trained_with() -> None:
    model = build(settings_of("fcos_resnet18_fpn"), CLASSES).train()
    batch = make_batch((3, 0), (64, 96), CLASSES)
    with torch.inference_mode():
        points = model(batch.images).points
    raw = model(batch.images)
    assert raw.points is points
    sum(model.loss(raw, batch).values(), torch.zeros(())).backward()


def test_a_batch_without_any_positive_has_a_finite_loss_and_makes_no_host_sync() -> None:
    model = build(settings_of("fcos_resnet18_fpn"), CLASSES).train()
    batch = make_batch((0, 0), (64, 96), CLASSES)
    with ForbidHostSync():
        losses = model.loss(model(batch.images), batch)
        sum(losses.values()).backward()
    assert losses["classification"] > 0
    assert losses["bbox_regression"] == losses["bbox_ctrness"] == 0
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.slow
def test_mixed_precision_steps_on_a_fake_accelerator_and_their_peak() -> None:
    # bf16, stem and layer1 frozen, 80 classes, 800 × 800, 16 images.
    large = fakes.Trial(model="fcos_resnet50_fpn", batch=16, slots=100, image_size=(800, 800))
    light = fakes.Trial(model="fcos_resnet18_fpn", optimizer="adamw", precision="fp16")
    of_large, of_light = fakes.run(large, light)
    for outcome in (of_large, of_light):
        assert outcome.error is None
        assert outcome.resting < outcome.peak  # its tensors were counted, and they ended
    assert "torch.float16" in of_light.by_type
    assert of_large.by_type["torch.float32"] < 0.2 * of_large.peak, "the norms of the towers stay in bf16"
    assert of_large.peak / 2**30 < 5.4  # 5.16 when this was written; about 7.7 with norms in fp32


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 4e-3)]
)
def test_a_compiled_norm_is_that_of_torch(
    dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an accelerator; values and gradients. In bf16, only the result and its gradient are rounded, once each."""
    monkeypatch.setattr(fcos, "is_on_accelerator", lambda _: True)
    operators: set[str] = set()

    def keep(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> object:
        operators.update(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    draw = torch.Generator().manual_seed(0)
    norm = fcos.LowPrecisionGroupNorm(32, 64).to(torch.promote_types(dtype, torch.float32))
    for parameter in norm.parameters():
        parameter.data = torch.randn(64, generator=draw).to(parameter.dtype)
    x, grad = ((3 + torch.randn(2, 64, 5, 7, generator=draw)).to(dtype) for _ in range(2))
    x = x.to(memory_format=torch.channels_last).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        found = torch.compile(norm, fullgraph=True, backend=aot_autograd(fw_compiler=keep), dynamic=False)(x)
    assert found.dtype == dtype
    assert found.is_contiguous(memory_format=torch.channels_last)
    inputs = (x, norm.weight, norm.bias)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = functional.group_norm(exact[0], 32, *exact[1:], norm.eps)
    gradients = torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, exact, grad.double())
    for ours, theirs in zip((found, *gradients[0]), (expected, *gradients[1]), strict=True):
        assert relative(ours.double(), theirs) < tolerance
    assert "aten.var.correction" in operators
    assert not any("group_norm" in name for name in operators)


def test_the_table_says_what_torchvision_has() -> None:
    coco = FCOS_ResNet50_FPN_Weights.COCO_V1
    row = MODELS["fcos_resnet50_fpn"]
    assert row.urls["coco"] == coco.url
    per_class = 256 * 9 + 1
    assert row.num_params + (len(coco.meta["categories"]) - 80) * per_class == coco.meta["num_params"]


@pytest.mark.slow
@pytest.mark.parametrize("fpn", ["old", pytest.param("new", marks=pytest.mark.slow)])
def test_torchvisions_coco_weights_are_recognized_and_loaded(tmp_path: Path, fpn: str) -> None:
    """Files like torchvision's: 91 channels, and an FPN that may have the names from before version 0.13."""
    oracle = fcos_resnet50_fpn(weights=None, weights_backbone=None, num_classes=91)
    state = {name: tensor for name, tensor in oracle.state_dict().items() if "num_batches" not in name}
    if fpn == "old":
        state = {name.replace("blocks.", "blocks-").replace(".0.", ".").replace("blocks-", "blocks.")
                 if "r_blocks" in name else name: tensor for name, tensor in state.items()}  # fmt: skip
        assert "backbone.fpn.inner_blocks.0.bias" in state
    path = tmp_path / "some.pth"
    torch.save(state, path)
    assert detect_architecture(path) == "fcos_resnet50_fpn"
    settings = settings_of("fcos_resnet50_fpn", weights=str(path))
    model = build(settings, 2)
    _, head = load_weights(model, settings, class_names=("zebra", "Person"))
    assert head == "class head kept, 91 -> 2 channels; every class is one of the file's, matched by name"
    categories = FCOS_ResNet50_FPN_Weights.COCO_V1.meta["categories"]
    ours, theirs = model.state_dict(), oracle.state_dict()
    chosen = theirs[CLASS_HEAD + "weight"][[categories.index("zebra"), categories.index("person")]]
    assert torch.equal(ours[CLASS_HEAD + "weight"], chosen)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if not name.startswith(CLASS_HEAD))

    other = settings_of("retinanet_resnet50_fpn", weights=str(path))
    with pytest.raises(WeightsError, match="belongs to fcos_resnet50_fpn, not to retinanet_resnet50_fpn"):
        load_weights(build(other, 2), other, class_names=("zebra", "Person"))


@pytest.mark.slow
def test_the_onnx_file_finds_what_the_model_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = msgspec.structs.replace(
        MODELS["fcos_resnet18_fpn"], network={"backbone": "tiny", "channels": 64, "num_convs": 1}
    )
    monkeypatch.setitem(MODELS, "fcos_resnet18_fpn", row)
    image_size = (64, 96)
    model = calibrated_model(settings_of("fcos_resnet18_fpn", backbone_norm="bn"), CLASSES, image_size).eval()
    names = tuple(str(label) for label in range(CLASSES))
    metadata = model_file.ModelMetadata(
        settings=model.settings, class_names=names, image_size=image_size, resize="letterbox"
    )
    thresholds = {"score_threshold": 0.1, "iou_threshold": model.iou_threshold}
    path = tmp_path / "some.onnx"
    path.write_bytes(graph.build_onnx(graph.Spec(model, metadata, **thresholds)))
    images = make_batch((0, 0, 0), image_size, CLASSES, seed=3).images.numpy()
    inside = np.array([image_size, (50, 60), image_size], np.int32)
    found = OnnxModel(path, num_threads=1).run(images, inside, **thresholds)
    for n in range(len(found.boxes)):
        one = parity.of_image(found, n)
        compared = parity.compare_detections(
            "it",
            parity._run_model(model, images[n], inside[n], max_detections=100, **thresholds),
            one,
            max_detections=100,
            **thresholds,
        )
        parity.require_parity(compared, "it")
        assert compared.num_boxes > 20
        assert compared.max_box_diff_px < 0.01
