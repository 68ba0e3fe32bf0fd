"""Which model is trained where nobody says: by device, size of the pictures, and weights."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from stoker.config.settings import from_fields
from stoker.data.index import open_index
from stoker.hardware.device import Device
from stoker.models import MODELS
from stoker.training.defaults.derive import derive_data
from stoker.training.defaults.model_choice import CPU_SIDE, SMALL_SIDE, model_for, side_for
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


def test_on_a_cpu_the_canvas_is_small_unless_the_boxes_are(tmp_path: Path) -> None:
    index = open_index(draw(tmp_path / "data", train=6, val=1, side=640))  # boxes of 106 to 319 pixels
    ember, other = MODELS["ember_n"], MODELS["retinanet_resnet50_fpn"]
    assert side_for(ember, index, CPU, "letterbox") == CPU_SIDE
    assert side_for(ember, index, Accelerator(CPU.torch_device), "letterbox") == ember.canvas_side
    assert side_for(other, index, CPU, "letterbox") == other.canvas_side
    config, reasons = derive_data(from_fields({"model": "ember_n"}), index, CPU)
    assert config.data.canvas == (CPU_SIDE, CPU_SIDE)
    assert f"{CPU_SIDE}²" in reasons["canvas"]
    middle = (index.boxes[:, :2] + index.boxes[:, 2:]) / 2
    small = dataclasses.replace(index, boxes=np.concatenate([middle - 7, middle + 7], 1))  # 7 on the canvas
    assert side_for(ember, small, CPU, "letterbox") == ember.canvas_side
