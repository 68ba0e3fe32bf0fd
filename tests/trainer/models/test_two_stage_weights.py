"""Weights of torchvision's Faster R-CNN: names, shapes, files in its older naming, its COCO file's epsilon."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_fpn, fasterrcnn_resnet50_fpn

from stoker.models import build, load_weights
from stoker.models.table import MODELS
from stoker.models.weights.load import ZERO_EPS_WEIGHTS, detect_architecture
from tests.trainer.models.samples import settings_of

R50, MOBILENET = "faster_rcnn_resnet50_fpn", "faster_rcnn_mobilenet_v3_large_fpn"
BUILDERS = {R50: fasterrcnn_resnet50_fpn, MOBILENET: fasterrcnn_mobilenet_v3_large_fpn}


def of_torchvision(name: str) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = BUILDERS[name](weights=None, weights_backbone=None, num_classes=91)
    return model


@pytest.mark.parametrize("name", BUILDERS)
def test_tensors_have_the_names_and_shapes_of_torchvision(name: str) -> None:
    with torch.device("meta"):
        model = build(settings_of(name), 90)
    expected = {n: t.shape for n, t in of_torchvision(name).state_dict().items() if "num_batches_tracked" not in n}
    assert {n: t.shape for n, t in model.state_dict().items()} == expected


@pytest.mark.slow
def test_the_coco_file_is_read_in_its_older_names_and_its_epsilon(tmp_path: Path) -> None:
    """As torchvision serves it: FPN and proposal head without the numbers of their Sequentials."""
    torch.manual_seed(0)
    expected = build(settings_of(MOBILENET), 90).state_dict()
    old = {name.replace("rpn.head.conv.0.0.", "rpn.head.conv."): tensor for name, tensor in expected.items()}
    old = {
        name.replace(".0.weight", ".weight").replace(".0.bias", ".bias") if ".fpn." in name else name: tensor
        for name, tensor in old.items()
    }
    assert not old.keys() >= expected.keys()
    file = tmp_path / "old.pth"
    torch.save(old, file)
    assert detect_architecture(file) == MOBILENET
    settings = settings_of(MOBILENET, weights=str(file))
    model = build(settings, 2)
    message = load_weights(model, settings, class_names=("dog", "person"))
    assert any("class head kept, 91 -> 3 channels" in sentence for sentence in message)
    own = model.state_dict()
    predictor = "roi_heads.box_predictor."
    for name, tensor in expected.items():
        if not name.startswith(predictor):
            assert torch.equal(own[name], tensor), name
    # The background, dog and person: channels 0, 18 and 1 of COCO's 91; four numbers of a box each.
    assert torch.equal(own[predictor + "cls_score.bias"], expected[predictor + "cls_score.bias"][[0, 18, 1]])
    boxes = expected[predictor + "bbox_pred.weight"].unflatten(0, (91, 4))[[0, 18, 1]].flatten(0, 1)
    assert torch.equal(own[predictor + "bbox_pred.weight"], boxes)


def test_the_file_that_was_trained_without_epsilon_is_known() -> None:
    assert MODELS[R50].urls["coco"].rpartition("/")[2] in ZERO_EPS_WEIGHTS
    assert MODELS[MOBILENET].urls["coco"].rpartition("/")[2] not in ZERO_EPS_WEIGHTS
