"""What stoker has of its own instead of importing torchvision: ResNets, MobileNets, URLs of weights, COCO classes."""

import re
from collections import OrderedDict

import pytest
import torch
import torchvision
from torch import Tensor, nn

from stoker.models import MODELS
from stoker.models.backbones import BACKBONES
from stoker.models.networks import mobilenet_v3_large
from stoker.models.weights.load import COCO_CHANNELS

NAMES = [
    "resnet18",
    pytest.param("resnet34", marks=pytest.mark.slow),
    pytest.param("resnet50", marks=pytest.mark.slow),
    pytest.param("resnet101", marks=pytest.mark.slow),
    "resnext50_32x4d",
    "mobilenet_v2",
    "mobilenet_v3_large",
    "mobilenet_v3_large reduced",
]


def output_and_gradient(network: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """The last map, and the gradient of the first convolution."""
    maps: Tensor = network(images)
    maps.square().sum().backward()  # type: ignore[no-untyped-call]
    gradient = next(network.parameters()).grad
    assert gradient is not None
    return maps, gradient


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_gives_the_weights_outputs_and_random_numbers_of_torchvision(name: str) -> None:
    torchvision_name, _, reduced = name.partition(" ")
    torch.manual_seed(5)
    if reduced:
        network: nn.Module = mobilenet_v3_large(nn.BatchNorm2d, reduced_tail=True)
    else:
        network = BACKBONES[name].build(nn.BatchNorm2d)
    next_number = torch.rand(1)
    torch.manual_seed(5)
    options = {"reduced_tail": True} if reduced else {}
    classifier = getattr(torchvision.models, torchvision_name)(weights=None, norm_layer=nn.BatchNorm2d, **options)
    assert torch.equal(next_number, torch.rand(1))
    if "resnet" in name or "resnext" in name:
        oracle: nn.Module = nn.Sequential(OrderedDict(list(classifier.named_children())[:-2]))
    else:
        oracle = classifier.features
    expected = oracle.state_dict()
    assert list(network.state_dict()) == list(expected)
    assert all(torch.equal(tensor, expected[key]) for key, tensor in network.state_dict().items())
    images = torch.rand(2, 3, 64, 96)
    for ours, theirs in zip(output_and_gradient(network, images), output_and_gradient(oracle, images), strict=True):
        assert torch.equal(ours, theirs)


def test_files_of_weights_are_torchvisions() -> None:
    names = {"coco": "COCO_V1", "imagenet": "IMAGENET1K_V1"}
    for model, architecture in MODELS.items():
        for weights, url in architecture.urls.items():
            if url.startswith("https://huggingface.co/"):
                continue
            detector = model.replace("faster_rcnn", "fasterrcnn")
            backbone = re.search(r"mobilenet_v2|mobilenet_v3_large|vgg16|resnet\d+|resnext50_32x4d", model)
            assert backbone is not None
            entries = torchvision.models.get_model_weights(detector if weights == "coco" else backbone[0])
            name = "IMAGENET1K_FEATURES" if model == "ssd300_vgg16" and weights == "imagenet" else names[weights]
            assert entries[name].url == url


def test_coco_channels_are_torchvisions_categories() -> None:
    categories = torchvision.models.detection.RetinaNet_ResNet50_FPN_Weights.COCO_V1.meta["categories"]
    assert list(COCO_CHANNELS) == categories
