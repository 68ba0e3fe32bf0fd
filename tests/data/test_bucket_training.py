"""Training from a bucket behind a network with faults: the same pictures in the same order, the same final weights."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from stoker.config.settings import Config, from_fields, from_toml
from stoker.data.index import Index, open_index
from stoker.data.loading.loader import Loader
from stoker.data.remote.bucket import mirror_dir_for
from stoker.evaluation.document import read_evaluation
from stoker.hardware.device import select_device
from stoker.report.html import write_report
from stoker.runs.records import CONFIG, QUARANTINE, read_lines
from stoker.runs.schemas import Quarantined
from stoker.storage import concurrency
from stoker.storage.store import open_store
from stoker.storage.uri import parse_uri
from stoker.training.loop import train
from tests.drawn import draw
from tests.storage.proxy import Fault
from tests.storage.servers import Conditions, Place, Proxy, apply, s3_server

FAULTS: dict[Fault, float] = {"503": 0.01, "429": 0.01, "reset": 0.01, "truncate": 0.01}
"""One request in a hundred meets each: more than one in a hundred in all, as the tests make few."""
PICTURES = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("drawn") / "shapes", train=PICTURES)


@pytest.fixture(scope="module")
def filled(folder: Path) -> Iterator[Place]:
    with s3_server() as server, pytest.MonkeyPatch.context() as patch:
        place = server.bucket()
        apply(patch, place.environment)
        store = open_store(parse_uri(place.address))
        for path in folder.rglob("*.*"):
            store.write(f"shapes/{path.relative_to(folder)}", path.read_bytes())
        yield place


@pytest.fixture
def bucket(filled: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Proxy]]:
    """The address of the data set, behind a network that is good until a test says otherwise."""
    with filled.through() as (place, proxy):
        apply(monkeypatch, place.environment)
        yield f"{place.address}/shapes", proxy


def faults_met(proxy: Proxy) -> int:
    return sum(seen.fault is not None for seen in proxy.seen)


def loader(index: Index, *, rank: int = 0, ranks: int = 1, batch: int = 4) -> Loader:
    return Loader(
        index, index.image_indices("train"), device=select_device("cpu"), batch_size=batch, image_size=(64, 64), resize="letterbox", scale_jitter_prob=0.5,
        scale_range=(0.5, 1.5), max_boxes=8, seed=3, workers=2, rank=rank, world_size=ranks,
    )  # fmt: skip


def shown(index: Index, steps: int) -> tuple[list[int], list[NDArray[np.uint8]]]:
    """Rows and pixels of the first batches."""
    rows, pixels = [], []
    with contextlib.closing(loader(index)) as batches:
        for _, batch in zip(range(steps), batches, strict=False):
            rows += batch.image_index.tolist()
            pixels.append(batch.images.numpy().copy())
    return rows, pixels


def test_the_same_pictures_in_the_same_order(folder: Path, bucket: tuple[str, Proxy]) -> None:
    address, proxy = bucket
    remote = open_index(address)
    proxy.conditions = Conditions(faults=FAULTS, seed=5)
    steps = 2 * PICTURES // 4
    rows, pixels = shown(remote, steps)
    expected_rows, expected_pixels = shown(open_index(folder), steps)
    assert rows == expected_rows
    assert np.array_equal(pixels, expected_pixels)
    assert faults_met(proxy) > 0, "a test of faults has some"


EPOCHS = 8
AHEAD = 4
"""A loader reads some pictures ahead, of whatever epoch they are; the last ones are of no use to it: few here."""


def bytes_read(address: str, ranks: int) -> int:
    """By all ranks together, until each has its share of the epochs."""
    index = open_index(address)
    store = open_store(parse_uri(address))
    before = store.counters.read_bytes
    for rank in range(ranks):
        with contextlib.closing(loader(index, rank=rank, ranks=ranks, batch=2)) as batches:
            for _, _batch in zip(range(EPOCHS * PICTURES // ranks // 2), batches, strict=False):
                pass
    return store.counters.read_bytes - before


def test_ranks_fetch_their_own_share(folder: Path, bucket: tuple[str, Proxy], monkeypatch: pytest.MonkeyPatch) -> None:
    address, _ = bucket
    monkeypatch.setattr(concurrency, "INITIAL_CONCURRENCY", AHEAD)
    monkeypatch.setattr(concurrency, "GROWTH_FACTOR", 1.0)
    one, three = bytes_read(address, 1), bytes_read(address, 3)
    pictures = sum(path.stat().st_size for path in (folder / "train").glob("*.jpg"))
    assert three == pytest.approx(one, rel=0.05)
    assert one == pytest.approx(EPOCHS * pictures, rel=0.05)


def settings(data: str) -> Config:
    return from_fields(
        {
            "data": data, "model": "retinanet_tiny_fpn", "weights": "none", "image_size": (64, 64), "batch_size": 4,
            "max_duration": "40", "precision": "fp32", "eval_every": "0", "cache": "none",
        }
    )  # fmt: skip


@pytest.mark.slow
def test_the_same_final_weights(
    folder: Path, bucket: tuple[str, Proxy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, proxy = bucket
    monkeypatch.chdir(tmp_path)
    proxy.conditions = Conditions(faults=FAULTS, seed=7)
    monkeypatch.setenv("DATA_ROOT", address.removesuffix("/shapes"))
    remote = train(settings("$DATA_ROOT/shapes")).run
    assert faults_met(proxy) > 0
    local = train(settings(str(folder)), run_dir=str(tmp_path / "local")).run
    assert (remote / "final.safetensors").read_bytes() == (local / "final.safetensors").read_bytes()
    assert not list(read_lines(remote, QUARANTINE, Quarantined)), "a fault is no fault of the picture"
    assert remote.name == "shapes-retinanet_tiny_fpn-1"
    assert from_toml(remote / CONFIG)[0].data.data == address, "with the variable replaced: another machine has another"
    evaluation = read_evaluation(remote)
    assert evaluation is not None
    assert all(one.path.startswith(f"{address}/valid/valid-") for one in evaluation.worst)
    page = write_report(remote).read_text()
    assert "The picture cannot be shown" not in page
    assert mirror_dir_for(parse_uri(address)).name not in page, "nobody knows the mirror"
