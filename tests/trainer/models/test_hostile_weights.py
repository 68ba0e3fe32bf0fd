"""Model files whose header claims more than the file has: compared by shapes, before memory is allocated."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stoker.config.settings import ModelSettings
from stoker.models import build, load_weights
from stoker.models.weights.model_file import ModelMetadata, load_model
from stoker_watch.errors import WeightsError
from tests.bounded import bounded
from tests.fixtures.special_files import replace_by
from tests.trainer.models.samples import settings_of

TINY = "retinanet_tiny_fpn"


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return {
        name: tensor.contiguous() for name, tensor in build(settings_of(TINY, weights="none"), 2).state_dict().items()
    }


def header() -> dict[str, Any]:
    settings = settings_of(TINY, weights="none")
    metadata = ModelMetadata(settings=settings, class_names=("a", "b"), image_size=(64, 64), resize="letterbox")
    fields: dict[str, Any] = json.loads(metadata.header()["stoker"])
    return fields


def write(path: Path, tensors: dict[str, torch.Tensor], text: str) -> Path:
    save_file(tensors, path, {"stoker": text})
    return path


def test_an_unchanged_file_is_loaded(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    model, metadata = load_model(write(tmp_path / "a.safetensors", tensors, json.dumps(header())))
    assert metadata.class_names == ("a", "b")
    assert all(torch.equal(tensors[name], tensor) for name, tensor in model.state_dict().items())


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "image size": lambda fields: fields.update(image_size=[2**31, 2**31]),
    "no image size": lambda fields: fields.update(image_size=[0, 64]),
    "a million classes": lambda fields: fields.update(class_names=[str(n) for n in range(1_000_000)]),
    "90,000 classes": lambda fields: fields.update(class_names=[str(n) for n in range(90_000)]),
    "no class": lambda fields: fields.update(class_names=[]),
    "anchor scales": lambda fields: fields["settings"].update(anchor_scales=[float(n + 1) for n in range(10_000)]),
    "more anchors": lambda fields: fields["settings"].update(anchor_scales=[float(n + 1) for n in range(60)]),
    "no anchors": lambda fields: fields["settings"].pop("anchor_scales"),
    "another model": lambda fields: fields["settings"].update(model="fasterrcnn_resnet50_fpn_v2"),
    "an unknown model": lambda fields: fields["settings"].update(model="nothing"),
    "resize": lambda fields: fields.update(resize="x" * 1000),
    "text for a number": lambda fields: fields.update(image_size="64"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_header_that_does_not_fit(tmp_path: Path, tensors: dict[str, torch.Tensor], name: str) -> None:
    fields = header()
    CHANGES[name](fields)
    path = write(tmp_path / "a.safetensors", tensors, json.dumps(fields))
    with bounded(seconds=60, megabytes=700), pytest.raises(WeightsError) as caught:
        load_model(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "{", "[" * 100_000, '{"class_names": 5}', '{"settings": {"canvas": ' + "[" * 5000]
)
def test_a_header_that_is_not_metadata(tmp_path: Path, tensors: dict[str, torch.Tensor], text: str) -> None:
    path = write(tmp_path / "a.safetensors", tensors, text)
    with pytest.raises(WeightsError):
        load_model(path)
    settings = settings_of(TINY, weights=str(path))
    with pytest.raises(WeightsError, match="metadata of the weights"):
        load_weights(build(settings, 2), settings, class_names=("a", "b"))


def test_class_heads_of_other_shapes_are_replaced(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    settings = settings_of(TINY, weights=str(tmp_path / "a.pth"))
    model = build(settings, 2)
    name = f"{model.class_heads()[0].name}.weight"
    for changed in (tensors | {name: tensors[name][:-1]}, {key: t for key, t in tensors.items() if key != name}):
        torch.save(changed, tmp_path / "a.pth")
        assert any("class head replaced" in text for text in load_weights(model, settings, class_names=("a", "b")))


def test_a_tensor_that_is_small_and_says_it_is_huge(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    settings: ModelSettings = settings_of(TINY, weights=str(tmp_path / "a.pth"))
    name = next(name for name in tensors if name.endswith("running_var"))
    torch.save(tensors | {name: torch.ones(1).expand(2**33)}, tmp_path / "a.pth")
    with bounded(megabytes=700), pytest.raises(WeightsError, match="another shape"):
        load_weights(build(settings, 2), settings, class_names=("a", "b"))


@pytest.mark.parametrize("kind", ["fifo", "zero", "folder"])
def test_special_files_in_place_of_a_model(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.safetensors"
    replace_by(kind, path, size_bytes=0)
    with bounded(seconds=6, megabytes=256), pytest.raises(WeightsError, match=r"model\.safetensors"):
        load_model(path)
