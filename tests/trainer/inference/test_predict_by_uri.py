"""Images at addresses: found, predicted on and converted as local ones are, without a copy on the local disk."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stoker.data.convert import convert
from stoker.data.index import open_index
from stoker.inference.model import Model, load
from stoker.models import build
from stoker.models.weights.model_file import ModelMetadata
from stoker_watch.errors import ConfigError, DataError, StokerError, UsageError
from stoker_watch.storage.store import open_store
from stoker_watch.storage.uri import parse_uri
from tests.drawn import draw
from tests.trainer.models.samples import settings_of
from tests.watch.storage.servers import Server, apply, google_server, s3_server


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    torch.manual_seed(0)
    settings = settings_of("retinanet_tiny_fpn")
    metadata = ModelMetadata(settings=settings, class_names=("red", "green"), image_size=(64, 64), resize="letterbox")
    tensors = {name: tensor.contiguous() for name, tensor in build(settings, 2).state_dict().items()}
    path = tmp_path_factory.mktemp("model") / "best.safetensors"
    save_file(tensors, path, metadata.header())
    return load(path, device="cpu")


@pytest.fixture(scope="module", params=["s3", "gs"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with s3_server() if request.param == "s3" else google_server() as server:
        yield server


@pytest.fixture
def address(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a bucket with the drawn data set of `tmp_path / "set"`."""
    draw(tmp_path / "set", train=5, val=2)
    place = server.bucket()
    apply(monkeypatch, place.environment)
    store = open_store(parse_uri(place.uri))
    for path in (tmp_path / "set").rglob("*.*"):
        store.write(str(path.relative_to(tmp_path)), path.read_bytes())
    return place.uri


def results(folder: Path, prefix: str) -> list[dict[str, object]]:
    found = json.loads((folder / "predictions.json").read_text())
    return [one | {"path": one["path"].removeprefix(prefix)} for one in found]


def test_images_of_a_bucket(model: Model, address: str, tmp_path: Path) -> None:
    for place in ("set", "set/train/train-1.jpg", "set/*/*-1.jpg"):
        outs = [tmp_path / f"{name}-{len(place)}" for name in ("remote", "local")]
        lines = [list(model.predict_to_dir([f"{root}/{place}"], out, conf=0.0))
                 for root, out in zip((address, tmp_path), outs, strict=True)]  # fmt: skip
        expected = results(outs[1], f"{tmp_path}/")
        assert results(outs[0], f"{address}/") == expected
        assert len(expected) == {"set": 7, "set/train/train-1.jpg": 1, "set/*/*-1.jpg": 2}[place]
        assert lines[0][0].startswith(f"{address}/set/")
        assert sorted(path.name for path in outs[0].iterdir()) == sorted(path.name for path in outs[1].iterdir())
        for path in outs[1].glob("*.jpg"):
            assert (outs[0] / path.name).read_bytes() == path.read_bytes(), "the same boxes on the same image"


def test_an_image_in_python(model: Model, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PICTURES", f"{address}/set/train")
    remote, local = (model.predict(f"{place}/train-2.jpg", conf=0.0)[0]
                     for place in ("$PICTURES", tmp_path / "set" / "train"))  # fmt: skip
    assert remote.boxes.tolist() == local.boxes.tolist()
    assert remote.draw().tobytes() == local.draw().tobytes()
    monkeypatch.delenv("PICTURES")
    with pytest.raises(ConfigError, match="PICTURES"):
        model.predict("$PICTURES/train-2.jpg")


def test_what_is_not_there(model: Model, address: str, tmp_path: Path) -> None:
    for place, fragment in {
        "set/train/none.jpg": "no object",
        "none": "no object",
        "set/*.gif": "no images at",
    }.items():
        with pytest.raises(StokerError, match=fragment) as raised:
            list(model.predict_to_dir([f"{address}/{place}"], tmp_path / "out"))
        assert isinstance(raised.value, DataError | UsageError)
        assert f"{address}/set/*.gif" in str(raised.value) or place != "set/*.gif"


def test_scores_and_conversion_of_a_data_set(address: str, tmp_path: Path) -> None:
    remote, local = open_index(f"{address}/set"), open_index(tmp_path / "set")
    for index, name in ((remote, "remote"), (local, "local")):
        convert(index, tmp_path / name, "yolo")
    files = sorted(path.relative_to(tmp_path / "local") for path in (tmp_path / "local").rglob("*.*"))
    assert files == sorted(path.relative_to(tmp_path / "remote") for path in (tmp_path / "remote").rglob("*.*"))
    for file in files:
        assert (tmp_path / "remote" / file).read_bytes() == (tmp_path / "local" / file).read_bytes()
    with pytest.raises(UsageError, match="local images"):
        convert(remote, tmp_path / "linked", "yolo", hardlink=True)
