"""Which model is trained where nobody says: by device, size of the pictures, and weights."""

import dataclasses
from pathlib import Path

import pytest
import torch

from stoker.data.index import open_index
from stoker.device import Device
from stoker.models import MODELS
from stoker.training.choice import SMALL_SIDE, model_for
from tests.drawn import draw

CPU = Device(torch.device("cpu"))


class Accelerator(Device):
    is_cpu = False  # but for this a CPU


@pytest.mark.parametrize(
    ("side", "device", "weights", "model"),
    [
        (SMALL_SIDE, CPU, None, "retinanet_tiny_fpn"),
        (SMALL_SIDE + 1, CPU, None, "ember_n"),
        (SMALL_SIDE, CPU, "none", "retinanet_tiny_fpn"),
        (SMALL_SIDE, CPU, "imagenet", "ember_mobilenet_v2"),
        (SMALL_SIDE, CPU, "coco", "ssdlite320_mobilenet_v3_large"),
        (SMALL_SIDE + 1, Accelerator(CPU.torch_device), None, "retinanet_resnet50_fpn"),
    ],
)
def test_the_model_follows_device_pictures_and_weights(
    tmp_path: Path, side: int, device: Device, weights: str | None, model: str
) -> None:
    index = open_index(draw(tmp_path / "data", train=3, val=1, side=side))
    chosen, why = model_for(index, device, weights)
    assert chosen == model
    assert weights in (None, "none") or weights in MODELS[model].urls
    assert why


def test_a_classifiers_file_is_the_body_of_a_detector(real_data: Path, tmp_path: Path) -> None:
    index = open_index(draw(tmp_path / "data", train=3, val=1))
    file = str(real_data / "weights" / "mobilenet_v2_imagenet.pth")
    assert model_for(index, CPU, file)[0] == "ember_mobilenet_v2"


def test_the_median_picture_decides(tmp_path: Path) -> None:
    index = open_index(draw(tmp_path / "data", train=3, val=1, side=SMALL_SIDE))
    size = index.size.copy()
    size[index.rows("train")[0]] = 4000
    chosen, why = model_for(dataclasses.replace(index, size=size), CPU, None)
    assert chosen == "retinanet_tiny_fpn"
    assert f"{SMALL_SIDE}²" in why
    unknown = dataclasses.replace(index, size=size * 0)  # as where no source states them
    assert model_for(unknown, CPU, None)[0] == "ember_n"
