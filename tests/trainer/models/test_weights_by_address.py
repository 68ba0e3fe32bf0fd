"""Weights at an address: fetched once, whole, and again when they changed there."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stoker import load
from stoker.config.settings import from_fields
from stoker.models import build, detect_architecture, load_weights
from stoker.models.weights.hub import local_path
from stoker.models.weights.model_file import ModelMetadata
from stoker.training.run_selection import with_absolute_paths
from stoker_watch.errors import ConfigError, StorageError, UsageError, WeightsError
from stoker_watch.storage.store import open_store
from stoker_watch.storage.uri import parse_uri
from tests.trainer.models.samples import settings_of
from tests.watch.storage.servers import (
    Conditions,
    Proxy,
    ServedBucket,
    Server,
    apply,
    google_server,
    s3_server,
    web_server,
)

TINY = "retinanet_tiny_fpn"


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Server]]:
    with s3_server() as s3, google_server() as google, web_server() as web:
        yield {"s3": s3, "gs": google, "http": web}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STOKER_WEIGHTS_DIR", str(tmp_path / "weights"))
    return tmp_path / "weights"


@pytest.fixture(params=["s3", "gs", "http"])
def place(request: pytest.FixtureRequest, servers: dict[str, Server], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[ServedBucket, Proxy]]:  # fmt: skip
    with servers[request.param].bucket().through() as (place, proxy):
        apply(monkeypatch, place.environment)
        yield place, proxy


def put(servers: dict[str, Server], place: ServedBucket, name: str, data: bytes) -> str:
    if place.uri.startswith("http:"):
        servers["http"].objects.put("", name, data)
    else:
        open_store(parse_uri(place.uri)).write(name, data)
    return f"{place.uri}/{name}"


def saved(tmp_path: Path, seed: int) -> bytes:
    torch.manual_seed(seed)
    model = build(settings_of(TINY), 2)
    metadata = ModelMetadata(
        settings=settings_of(TINY), class_names=("cat", "dog"), image_size=(64, 64), resize="letterbox"
    )
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, tmp_path / "best.safetensors", metadata.header())
    return (tmp_path / "best.safetensors").read_bytes()


def test_weights_are_fetched_once_and_again_when_they_change(
    servers: dict[str, Server], place: tuple[ServedBucket, Proxy], tmp_path: Path, folder: Path
) -> None:
    first, second = saved(tmp_path, 1), saved(tmp_path, 2)
    assert len(first) == len(second), "only the version tells them apart"
    address = put(servers, place[0], "a/best.safetensors", first)
    path = local_path(address)
    assert path.parent == folder
    assert path.read_bytes() == first
    place[1].requests.clear()
    assert local_path(address) == path
    assert {seen.method for seen in place[1].requests} == {"HEAD"}, "nothing is fetched again"
    put(servers, place[0], "a/best.safetensors", second)
    assert local_path(address).read_bytes() == second
    assert len(list(folder.iterdir())) == 2, "no temporary file stays"


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    ["s3", pytest.param("gs", marks=pytest.mark.slow), pytest.param("http", marks=pytest.mark.slow)],
    indirect=True,
)
def test_weights_that_a_training_starts_from(
    servers: dict[str, Server], place: tuple[ServedBucket, Proxy], tmp_path: Path, folder: Path
) -> None:
    address = put(servers, place[0], "best.safetensors", saved(tmp_path, 3))
    assert detect_architecture(address) == TINY
    models = [build(settings_of(TINY), 2) for _ in range(2)]
    for model, weights in zip(models, (address, str(tmp_path / "best.safetensors")), strict=True):
        message = load_weights(model, settings_of(TINY, weights=weights), class_names=("cat", "dog"))
        assert message[0].startswith("backbone, neck and heads from best")
    for name, tensor in models[0].state_dict().items():
        assert torch.equal(tensor, models[1].state_dict()[name]), name
    assert load(address).class_names == ("cat", "dog")
    assert folder.is_dir()


def test_a_download_that_breaks_leaves_nothing(
    servers: dict[str, Server], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    with servers["gs"].bucket().through() as (place, proxy):
        apply(monkeypatch, {**place.environment, "STOKER_STORAGE_TIMEOUT_S": "1"})
        address = put(servers, place, "best.pth", bytes(100_000))
        proxy.conditions = Conditions(plan=lambda _n, method, _p: "truncate" if method == "GET" else None)
        with pytest.raises(StorageError) as raised:
            local_path(address)
    assert address in str(raised.value)
    assert list(folder.iterdir()) == []


def test_what_is_not_there_is_named(place: tuple[ServedBucket, Proxy], folder: Path) -> None:
    with pytest.raises(WeightsError, match="no such object") as raised:
        local_path(f"{place[0].uri}/none.pth")
    assert f"{place[0].uri}/none.pth" in str(raised.value)
    assert not folder.exists()


def test_variables_are_replaced_in_what_a_run_keeps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "coco").mkdir()
    monkeypatch.setenv("DATA_ROOT", str(tmp_path))
    monkeypatch.setenv("BUCKET", "s3://weights")
    requested = from_fields({"data": "$DATA_ROOT/coco", "weights": "${BUCKET}/a/x.pth"})
    kept = with_absolute_paths(requested)
    assert kept.data.data == str(tmp_path / "coco")
    assert kept.model.weights == "s3://weights/a/x.pth"
    monkeypatch.delenv("BUCKET")
    with pytest.raises(ConfigError, match="BUCKET") as raised:
        with_absolute_paths(requested)
    assert raised.value.exit_code == UsageError.exit_code
