"""Which model is trained by default: by device, image size and weights."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from stoker.config.settings import ModelSettings, from_fields
from stoker.data.index import open_index
from stoker.hardware.device import Device
from stoker.models import MODELS
from stoker.training.defaults.checks import warn_random_weights
from stoker.training.defaults.derive import derive, derive_data
from stoker.training.defaults.model_choice import (
    SMALL_IMAGE_SIDE,
    choose_image_side,
    choose_model,
)
from stoker_watch.errors import ConfigError, WeightsError
from tests.drawn import draw

CPU = Device(torch.device("cpu"))


def fetched(url: str) -> tuple[Path, str]:
    return Path(url), "downloaded"


def unreachable(url: str) -> tuple[Path, str]:
    raise WeightsError("could not be downloaded", location=url, cause="no route to host")


CPU_IMAGE_SIDE = 320


class Accelerator(Device):
    is_cpu = False  # but for this a CPU


GPU = Accelerator(CPU.torch_device)


@pytest.mark.parametrize(
    ("side", "device", "weights", "model"),
    [
        (SMALL_IMAGE_SIDE, CPU, None, "retinanet_tiny_fpn"),
        (SMALL_IMAGE_SIDE + 1, CPU, None, "ember_mobilenet_v2"),
        (SMALL_IMAGE_SIDE + 1, CPU, "none", "ember_n"),
        (SMALL_IMAGE_SIDE, CPU, "none", "retinanet_tiny_fpn"),
        (SMALL_IMAGE_SIDE, CPU, "imagenet", "ember_mobilenet_v2"),
        (SMALL_IMAGE_SIDE, CPU, "coco", "deimv2_atto"),
        (SMALL_IMAGE_SIDE, GPU, "objects365", "dfine_s"),
        (SMALL_IMAGE_SIDE, GPU, None, "dfine_s"),
        (SMALL_IMAGE_SIDE + 1, GPU, None, "dfine_s"),
        (SMALL_IMAGE_SIDE + 1, GPU, "coco", "dfine_s"),
        (SMALL_IMAGE_SIDE + 1, GPU, "objects365+coco", "dfine_s"),
        (SMALL_IMAGE_SIDE + 1, GPU, "imagenet", "ember_mobilenet_v2"),
        (SMALL_IMAGE_SIDE, GPU, "none", "ember_n"),
    ],
)
def test_the_model_follows_device_images_and_weights(
    tmp_path: Path, side: int, device: Device, weights: str | None, model: str
) -> None:
    index = open_index(draw(tmp_path / "data", train=3, val=1, side=side))
    chosen, why = choose_model(index, device, weights, fetch=fetched)
    assert chosen == model
    assert weights in (None, "none") or weights in MODELS[model].urls
    assert why


def test_a_classifier_file_is_the_backbone_of_a_detector(real_data: Path, tmp_path: Path) -> None:
    index = open_index(draw(tmp_path / "data", train=3, val=1))
    file = str(real_data / "weights" / "mobilenet_v2_imagenet.pth")
    assert choose_model(index, CPU, file)[0] == "ember_mobilenet_v2"


def test_the_median_image_size_decides(tmp_path: Path) -> None:
    index = open_index(draw(tmp_path / "data", train=3, val=1, side=SMALL_IMAGE_SIDE))
    size = index.original_size.copy()
    size[index.image_indices("train")[0]] = 4000
    chosen, why = choose_model(dataclasses.replace(index, original_size=size), CPU, None)
    assert chosen == "retinanet_tiny_fpn"
    assert f"{SMALL_IMAGE_SIDE}²" in why
    unknown = dataclasses.replace(index, original_size=size * 0)  # as where no source states them
    assert choose_model(unknown, CPU, None, fetch=fetched)[0] == "ember_mobilenet_v2"


@pytest.mark.parametrize(("boxes", "model"), [(300, "dfine_s"), (370, "dfine_s"), (380, "fcos_resnet50_fpn")])
def test_images_with_more_boxes_than_queries_get_a_model_without_queries(
    tmp_path: Path, boxes: int, model: str
) -> None:
    """D-FINE has 300 queries (its paper, section 5.1). Of 370 boxes 19 % are too many, of 380 21 %: FCOS has a fifth
    less AP on COCO."""
    index = open_index(draw(tmp_path / "data", train=2, val=1, side=640))
    counts = np.diff(index.offsets)
    counts[index.image_indices("train")] = boxes
    crowded = dataclasses.replace(index, offsets=np.concatenate([[0], counts.cumsum()]))
    chosen, why = choose_model(crowded, GPU, None, fetch=fetched)
    assert chosen == model
    assert ("21% of the boxes are too many for the 300 queries" in why) == (model != "dfine_s")
    assert choose_model(crowded, CPU, None, fetch=fetched)[0] == "ember_mobilenet_v2"
    assert choose_model(crowded, GPU, None, queries=boxes, fetch=fetched)[0] == "dfine_s"


@pytest.mark.parametrize(("device", "instead_of"), [(CPU, "ember_mobilenet_v2"), (GPU, "dfine_s")])
def test_without_a_download_the_weights_are_random_and_the_reason_says_so(
    tmp_path: Path, device: Device, instead_of: str
) -> None:
    index = open_index(draw(tmp_path / "data", train=3, val=1, side=SMALL_IMAGE_SIDE + 1))
    chosen, why = choose_model(index, device, None, fetch=unreachable)
    assert chosen == "ember_n"
    assert f"instead of {instead_of}" in why
    assert "no route to host" in why
    assert why in (warn_random_weights(ModelSettings(model="ember_n", weights="none"), {"model": why}) or "")


def test_a_size_that_the_model_cannot_have_is_refused_before_a_download(tmp_path: Path) -> None:
    data = draw(tmp_path / "data", train=3, val=1, side=SMALL_IMAGE_SIDE + 1)
    asked = from_fields({"data": str(data), "image_size": (100, 100)})

    def download(url: str) -> tuple[Path, str]:
        raise AssertionError(f"{url} is downloaded")

    with pytest.raises(ConfigError, match="multiples of 32 for ember_mobilenet_v2"):
        derive(asked, open_index(data), CPU, fetch=download)


@pytest.mark.parametrize(
    ("model", "weights", "alternative"),
    [
        ("ember_n", "none", "--model ember_mobilenet_v2"),
        ("ember_m", "none", "--model ember_mobilenet_v2"),
        ("ember_mobilenet_v2", "none", "--weights imagenet"),
        ("fcos_resnet50_fpn", "none", "--weights coco"),
        ("ember_mobilenet_v2", "imagenet", None),
        ("ember_n", "some.safetensors", None),
        ("retinanet_tiny_fpn", "none", None),
    ],
)
def test_what_random_weights_cost_is_one_line_with_the_alternative(
    model: str, weights: str, alternative: str | None
) -> None:
    warning = warn_random_weights(ModelSettings(model=model, weights=weights), {})
    assert (warning is None) == (alternative is None)
    if warning is not None:
        assert "\n" not in warning
        assert alternative is not None
        assert alternative in warning
        page = (Path(__file__).resolve().parents[3] / "docs" / "models.md").read_text()
        measured = re.search(
            r"on (270) images of `cars`: `ember_n` (\S+) \(three seeds\), `ember_mobilenet_v2` (\S+) \(",
            " ".join(page.split()),
        )
        assert measured is not None
        assert set(measured.groups()) <= set(re.findall(r"[0-9.]*[0-9]", warning))


def test_on_a_cpu_the_image_size_is_small_unless_boxes_are(tmp_path: Path) -> None:
    index = open_index(draw(tmp_path / "data", train=6, val=1, side=640))  # boxes of 106 to 319 pixels
    ember, other = MODELS["ember_n"], MODELS["retinanet_resnet50_fpn"]
    assert choose_image_side(ember, index, CPU, "letterbox") == CPU_IMAGE_SIDE
    assert choose_image_side(ember, index, GPU, "letterbox") == ember.default_image_size
    assert choose_image_side(other, index, CPU, "letterbox") == other.default_image_size
    config, reasons = derive_data(from_fields({"model": "ember_n"}), index, CPU)
    assert config.data.image_size == (CPU_IMAGE_SIDE, CPU_IMAGE_SIDE)
    assert f"{CPU_IMAGE_SIDE}²" in reasons["image_size"]
    middle = (index.boxes[:, :2] + index.boxes[:, 2:]) / 2
    small = dataclasses.replace(index, boxes=np.concatenate([middle - 7, middle + 7], 1))  # 7 at that image size
    assert choose_image_side(ember, small, CPU, "letterbox") == ember.default_image_size
