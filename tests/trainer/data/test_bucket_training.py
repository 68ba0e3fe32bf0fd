"""Training from a bucket behind a network with faults: the same images in the same order, the same final weights."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from stoker.config.settings import Config, from_fields, from_toml
from stoker.data.index import Index, open_index
from stoker.data.loading.loader import Loader, LoaderSpec
from stoker.data.remote import mirror_dir_for
from stoker.hardware.selection import select_device
from stoker.training.local_ranks import TrainOptions
from stoker.training.run import train
from stoker_watch.report.html import write_report
from stoker_watch.runs.evaluation import read_evaluation
from stoker_watch.runs.records import CONFIG, QUARANTINE, read_lines
from stoker_watch.runs.schemas import Quarantined
from stoker_watch.storage.fetcher import Fetcher
from stoker_watch.storage.store import open_store
from stoker_watch.storage.uri import parse_uri
from tests.drawn import draw
from tests.trainer.data.buckets import count_read_bytes
from tests.watch.storage.proxy import Fault
from tests.watch.storage.servers import Conditions, Proxy, ServedBucket, apply, s3_server

FAULTS: dict[Fault, float] = {"503": 0.01, "429": 0.01, "reset": 0.01, "truncate": 0.01}
"""One request in a hundred meets each: more than one in a hundred in all, as the tests make few."""
NUM_IMAGES = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("drawn") / "shapes", train=NUM_IMAGES)


@pytest.fixture(scope="module")
def filled(folder: Path) -> Iterator[ServedBucket]:
    with s3_server() as server, pytest.MonkeyPatch.context() as patch:
        served = server.bucket()
        apply(patch, served.environment)
        store = open_store(parse_uri(served.uri))
        for path in folder.rglob("*.*"):
            store.write(f"shapes/{path.relative_to(folder)}", path.read_bytes())
        yield served


@pytest.fixture
def bucket(filled: ServedBucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Proxy]]:
    """The address of the data set, behind a network that is good until a test says otherwise."""
    with filled.through() as (served, proxy):
        apply(monkeypatch, served.environment)
        yield f"{served.uri}/shapes", proxy


def faults_met(proxy: Proxy) -> int:
    return sum(request.fault is not None for request in proxy.requests)


def loader(index: Index, *, rank: int = 0, ranks: int = 1, batch: int = 4) -> Loader:
    spec = LoaderSpec(
        device=select_device("cpu"), batch_size=batch, image_size=(64, 64), resize="letterbox", scale_jitter_prob=0.5,
        scale_range=(0.5, 1.5), max_boxes=8, seed=3, workers=2, rank=rank, world_size=ranks,
    )  # fmt: skip
    return Loader(index, index.image_indices("train"), spec)


def shown(index: Index, steps: int) -> tuple[list[int], list[NDArray[np.uint8]]]:
    """Rows and pixels of the first batches."""
    image_indices, pixels = [], []
    with contextlib.closing(loader(index)) as batches:
        for _, batch in zip(range(steps), batches, strict=False):
            image_indices += batch.image_index.tolist()
            pixels.append(batch.images.numpy().copy())
    return image_indices, pixels


@pytest.mark.slow
def test_same_images_in_the_same_order(folder: Path, bucket: tuple[str, Proxy]) -> None:
    uri, proxy = bucket
    remote = open_index(uri)
    proxy.conditions = Conditions(faults=FAULTS, seed=5)
    steps = 2 * NUM_IMAGES // 4
    image_indices, pixels = shown(remote, steps)
    expected_rows, expected_pixels = shown(open_index(folder), steps)
    assert image_indices == expected_rows
    assert np.array_equal(pixels, expected_pixels)
    assert faults_met(proxy) > 0, "a test of faults has some"


EPOCHS = 3
AHEAD = 4
"""A loader reads some images ahead, of whatever epoch they are; the last ones are of no use to it: few here."""


def bytes_read(uri: str, ranks: int) -> int:
    """By all ranks together, until each has its fraction of the epochs."""
    index = open_index(uri)
    with pytest.MonkeyPatch.context() as monkeypatch:
        sizes = count_read_bytes(monkeypatch)
        for rank in range(ranks):
            with contextlib.closing(loader(index, rank=rank, ranks=ranks, batch=2)) as batches:
                for _, _batch in zip(range(EPOCHS * NUM_IMAGES // ranks // 2), batches, strict=False):
                    pass
    return sum(sizes)


@pytest.mark.slow
def test_each_rank_reads_only_its_images(
    folder: Path, bucket: tuple[str, Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, _ = bucket
    monkeypatch.setattr(Fetcher, "target_in_flight", AHEAD)
    one, three = bytes_read(uri, 1), bytes_read(uri, 3)
    images = sum(path.stat().st_size for path in (folder / "train").glob("*.jpg"))
    assert three == pytest.approx(one, rel=0.1)
    assert one == pytest.approx(EPOCHS * images, rel=0.1)


def settings(data: str) -> Config:
    return from_fields(
        {
            "data": data, "model": "retinanet_tiny_fpn", "weights": "none", "image_size": (64, 64), "batch_size": 4,
            "max_duration": "40", "precision": "fp32", "eval_every": "0", "cache": "none",
        }
    )  # fmt: skip


@pytest.mark.slow
def test_same_final_weights(
    folder: Path, bucket: tuple[str, Proxy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, proxy = bucket
    monkeypatch.chdir(tmp_path)
    proxy.conditions = Conditions(faults=FAULTS, seed=7)
    monkeypatch.setenv("DATA_ROOT", uri.removesuffix("/shapes"))
    remote = train(settings("$DATA_ROOT/shapes")).run
    assert faults_met(proxy) > 0
    local = train(settings(str(folder)), TrainOptions(run_dir=str(tmp_path / "local"))).run
    assert (remote / "final.safetensors").read_bytes() == (local / "final.safetensors").read_bytes()
    assert not list(read_lines(remote, QUARANTINE, Quarantined)), "a fault is no fault of the image"
    assert remote.name == "shapes-retinanet_tiny_fpn-1"
    assert from_toml(remote / CONFIG)[0].data.data == uri, "with the variable replaced: another machine has another"
    evaluation = read_evaluation(remote)
    assert evaluation is not None
    assert all(one.path.startswith(f"{uri}/valid/valid-") for one in evaluation.worst)
    page = write_report(remote).read_text()
    assert "The image cannot be shown" not in page
    assert mirror_dir_for(parse_uri(uri)).name not in page, "users do not know the mirror"
