"""Every RetinaNet of MODELS: torchvision's numbers, and the weights of torchvision's classifiers."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchvision import models
from torchvision.models.detection import retinanet as torchvision_retinanet

from stoker.evaluation.evaluate import SCORE_THRESHOLD
from stoker.models import MODELS, build, detect_architecture, load_weights
from stoker.models.layers.postprocess import MAX_DETECTIONS
from stoker.models.retinanet import RetinaNet
from stoker_watch.errors import WeightsError
from tests.trainer.models.oracle import PARTS, SMALL_MODELS, check_detections, check_losses_and_gradients, oracle_of
from tests.trainer.models.samples import calibrated_model, make_batch, settings_of

CLASSES = 5
CANVAS = (64, 64)
LITE = "retinanet_mobilenet_v2_fpnlite"
ROWS = [pytest.param(name, marks=[] if name in SMALL_MODELS else [pytest.mark.slow]) for name in PARTS]


def test_every_retinanet_has_an_oracle() -> None:
    rows = {name for name in MODELS if name.startswith("retinanet_")}
    assert rows == PARTS.keys()


@pytest.mark.parametrize("name", ROWS)
def test_numbers_are_those_of_torchvision(name: str) -> None:
    model = calibrated_model(settings_of(name), CLASSES, CANVAS)
    oracle = oracle_of(model, CANVAS)
    batch = make_batch((3, 7), CANVAS, CLASSES)
    check_losses_and_gradients(model.train(), oracle.train(), batch)
    assert check_detections(model.eval(), oracle.eval(), batch, score_threshold=0.05) > 10


CLASSIFIERS: dict[str, tuple[Callable[..., nn.Module], str]] = {
    "resnet18": (models.resnet18, "retinanet_resnet18_fpn"),
    "resnet34": (models.resnet34, "retinanet_resnet34_fpn"),
    "resnet50": (models.resnet50, "retinanet_resnet50_fpn"),
    "resnet101": (models.resnet101, "retinanet_resnet101_fpn"),
    "resnext50": (models.resnext50_32x4d, "retinanet_resnext50_32x4d_fpn"),
    "mobilenet_v2": (models.mobilenet_v2, "retinanet_mobilenet_v2_fpn"),
    "mobilenet_v3": (models.mobilenet_v3_large, "retinanet_mobilenet_v3_large_fpn"),
}
FIRST_ON = {"resnet18": "ember_resnet18", "mobilenet_v2": "ember_mobilenet_v2"}
"""The row that a classifier's file is said to be of where another than RetinaNet's comes first."""

OTHERS = CLASSIFIERS.keys() - {"resnet18"}
"""Slower than one of the same kind, or in `test_weights.py` as well."""


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, nn.Module]]:
    """Makes a classifier of torchvision's with random weights and statistics, and its file, once."""
    folder = tmp_path_factory.mktemp("classifiers")

    @functools.cache
    def make(kind: str) -> tuple[Path, nn.Module]:
        torch.manual_seed(0)
        network = CLASSIFIERS[kind][0](weights=None)
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.running_mean, -0.1, 0.1)
                # MobileNets have some as small as the epsilon of MobileNetV3's norms.
                nn.init.uniform_(module.running_var, 1e-4 if kind.startswith("mobilenet") else 0.5, 1.5)
        torch.save(network.state_dict(), folder / f"{kind}.pth")
        return folder / f"{kind}.pth", network.eval()

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] if kind in OTHERS else []) for kind in CLASSIFIERS]
)
def test_a_classifier_is_recognized_and_fills_the_backbone(
    kind: str, classifier: Callable[[str], tuple[Path, nn.Module]]
) -> None:
    path, network = classifier(kind)
    name = CLASSIFIERS[kind][1]
    assert detect_architecture(path) == FIRST_ON.get(kind, name)
    settings = settings_of(name, weights=str(path))
    model = build(settings, CLASSES).eval()
    sentences = load_weights(model, settings, class_names=[str(label) for label in range(CLASSES)])
    assert sentences == [f"backbone from {path.name}", "neck and heads are random"]
    with torch.no_grad():
        pixels = model.normalize(make_batch((0,), CANVAS, CLASSES).images)
        ours = model.backbone.body(pixels)
        theirs = _maps(network, pixels, list(PARTS[name].stages))
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine - other).norm() < 1e-4 * other.norm()


def _maps(network: nn.Module, pixels: Tensor, children: list[str]) -> list[Tensor]:
    """What these children of a classifier put out, by hooks."""
    maps: list[Tensor] = []
    features = network.get_submodule("features") if hasattr(network, "features") else network
    hooks = [
        features.get_submodule(child).register_forward_hook(lambda _, __, output: maps.append(output.clone()))
        for child in children
    ]
    network(pixels)
    for hook in hooks:
        hook.remove()
    return maps


def test_the_same_backbone_serves_the_lite_model(classifier: Callable[[str], tuple[Path, nn.Module]]) -> None:
    path, _ = classifier("mobilenet_v2")
    settings = settings_of(LITE, weights=str(path))
    model = build(settings, CLASSES)
    load_weights(model, settings, class_names=[str(label) for label in range(CLASSES)])
    file = torch.load(path)
    assert torch.equal(model.get_parameter("backbone.body.0.0.weight"), file["features.0.0.weight"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "wanted"), [("resnext50", "resnet50"), pytest.param("resnet34", "resnet18", marks=[pytest.mark.slow])]
)
def test_a_file_of_another_backbone_is_refused(
    kind: str, wanted: str, classifier: Callable[[str], tuple[Path, nn.Module]]
) -> None:
    path, _ = classifier(kind)
    settings = settings_of(CLASSIFIERS[wanted][1], weights=str(path))
    model = build(settings, CLASSES)
    with pytest.raises(WeightsError, match=f"belongs to {CLASSIFIERS[kind][1]}, not to {CLASSIFIERS[wanted][1]}"):
        load_weights(model, settings, class_names=["a"] * CLASSES)


@pytest.mark.parametrize("name", ["retinanet_resnet18_fpn", pytest.param(LITE, marks=pytest.mark.slow)])
def test_a_detector_is_recognized(name: str, tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    torch.save(build(settings_of(name), CLASSES).state_dict(), path)
    assert detect_architecture(path) == name


def test_the_lite_head_is_shared_and_each_level_has_its_own_norms() -> None:
    model = build(settings_of(LITE), CLASSES).train()
    assert isinstance(model, RetinaNet)
    head = model.head["tower"]
    before = {name: buffer.clone() for name, buffer in head.named_buffers() if name.endswith("running_mean")}
    assert len(before) == 4 * 5
    raw = model(make_batch((0, 0), CANVAS, CLASSES).images)
    assert len(raw.num_anchors_per_level) == 5
    assert raw.anchors.shape[0] == 6 * sum(h * w for h, w in ((8, 8), (4, 4), (2, 2), (1, 1), (1, 1)))
    after = {name: head.get_buffer(name) for name in before}
    assert not any(torch.equal(after[name], before[name]) for name in before)
    norms = [module for module in head.modules() if isinstance(module, nn.BatchNorm2d)]
    coarsest = slice(-raw.num_anchors_per_level[-1], None)
    found = torch.autograd.grad(
        raw.logits[:, coarsest].sum() + raw.deltas[:, coarsest].sum(), [norm.bias for norm in norms]
    )
    assert [bool(gradient.any()) for gradient in found] == [False, False, False, False, True] * 4


def test_thresholds_are_torchvisions_defaults() -> None:
    defaults = {name: p.default for name, p in inspect.signature(torchvision_retinanet.RetinaNet).parameters.items()}
    assert defaults["nms_thresh"] == RetinaNet.iou_threshold
    assert defaults["score_thresh"] == SCORE_THRESHOLD
    assert defaults["topk_candidates"] == RetinaNet.pre_nms_top_n
    assert MAX_DETECTIONS == 100, "COCO's maxDets; torchvision's RetinaNet keeps 300, its Faster R-CNN 100"
