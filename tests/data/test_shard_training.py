"""Training from shards in a bucket behind a network with faults: the weights are those of local shards and of files."""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

from stoker.config.settings import Config, from_fields, from_toml
from stoker.data.convert.packing import PackOptions, in_threads, pack
from stoker.data.index import open_index
from stoker.errors import ConfigError
from stoker.hardware.device import select_device
from stoker.runs.records import CONFIG, QUARANTINE, read_lines
from stoker.runs.schemas import Quarantined
from stoker.storage.store import open_store
from stoker.storage.uri import parse_uri
from stoker.training.defaults.derive import derive
from stoker.training.loop import train
from tests.drawn import draw
from tests.storage.servers import Conditions, ServedBucket, apply, google_server

NUM_IMAGES, BUFFER = 60, 48
NUM_STEPS, BATCH = 30, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("drawn") / "shapes", train=NUM_IMAGES)


@pytest.fixture(scope="module")
def packed(folder: Path) -> Path:
    out = folder.parent / "packed"
    pack(open_index(folder), str(out), PackOptions(), run_shards=in_threads(1))
    return out


@pytest.fixture
def served(packed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedBucket]:
    with google_server() as server:
        served = server.bucket()
        apply(monkeypatch, served.environment)
        store = open_store(parse_uri(served.uri))
        for path in packed.iterdir():
            if path.is_file():
                store.write(f"packed/{path.name}", path.read_bytes())
        yield served


def settings(data: str, **changes: object) -> Config:
    return from_fields(
        {
            "data": data, "model": "retinanet_tiny_fpn", "weights": "none", "image_size": (64, 64), "batch_size": BATCH,
            "max_duration": str(NUM_STEPS), "precision": "fp32", "eval_every": "0", "cache": "none",
        }
        | changes
    )  # fmt: skip


def final_weights(data: str, run: Path, **changes: object) -> bytes:
    finished = train(settings(data, **changes), run_dir=str(run)).run
    assert not list(read_lines(finished, QUARANTINE, Quarantined)), "a fault is no fault of the image"
    return (finished / "final.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("buffer", [BUFFER, 0])
def test_the_same_weights_in_spite_of_faults(
    buffer: int, folder: Path, packed: Path, served: ServedBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the order of shards as from local shards, with the random order as from the files that were packed."""
    local = final_weights(str(packed if buffer else folder), tmp_path / "local", shuffle_buffer=buffer)
    faults = {"503": 0.02, "500": 0.01, "reset": 0.02, "truncate": 0.02}
    with served.through(Conditions(faults=faults, seed=3)) as (worse, proxy):  # type: ignore[arg-type]
        apply(monkeypatch, worse.environment)
        remote = final_weights(f"{worse.uri}/packed", tmp_path / "remote", shuffle_buffer=buffer)
        assert any(request.fault is not None for request in proxy.requests), "a test of faults has some"
        paths = [unquote(request.path) for request in proxy.requests if request.method == "GET"]
    assert remote == local
    num_reads = sum("/train-" in path for path in paths)
    assert (num_reads < NUM_STEPS * BATCH) == bool(buffer), f"{num_reads} requests"


@pytest.mark.slow
def test_the_buffer_is_derived_and_recorded(served: ServedBucket, tmp_path: Path) -> None:
    run = train(settings(f"{served.uri}/packed", max_duration="2"), run_dir=str(tmp_path / "run")).run
    config, reasons = from_toml(run / CONFIG)
    assert config.run.shuffle_buffer == NUM_IMAGES
    assert "all images are mixed" in reasons["shuffle_buffer"]


def test_without_shards_in_a_bucket_the_order_is_random(folder: Path, packed: Path) -> None:
    device = select_device("cpu")
    for data, words in ((folder, "a file of its own"), (packed, "on a disk")):
        index = open_index(data)
        config, reasons = derive(settings(str(data)), index, device)
        assert config.run.shuffle_buffer == 0
        assert words in reasons["shuffle_buffer"]
    with pytest.raises(ConfigError, match="--shuffle-buffer 48 is for shards"):
        derive(settings(str(folder), shuffle_buffer=BUFFER), open_index(folder), device)
