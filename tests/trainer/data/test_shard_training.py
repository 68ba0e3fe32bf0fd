"""Training from shards in a bucket behind a network with faults: the weights are those of local shards and of files; on
ranks, of which there are more after a stop: each image once an epoch."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from urllib.parse import unquote

import pytest

from stoker.config.settings import Config, from_fields, from_toml
from stoker.data.index import open_index
from stoker.data.packing import PackOptions, in_threads, pack
from stoker.hardware.selection import select_device
from stoker.training.defaults.derive import derive
from stoker.training.local_ranks import TrainOptions, find_free_port
from stoker.training.run import train
from stoker_watch.errors import ConfigError
from stoker_watch.runs.records import CONFIG, QUARANTINE, read_lines
from stoker_watch.runs.schemas import Quarantined
from stoker_watch.storage.store import open_store
from stoker_watch.storage.uri import parse_uri
from tests.drawn import draw
from tests.watch.storage.servers import Conditions, ServedBucket, Server, apply, google_server, s3_server

NUM_IMAGES, BUFFER = 60, 48
BATCH = 4
RECORDED_RANK = "tests.trainer.training.recorded_rank"
ROOT = Path(__file__).resolve().parents[3]
BAD = {"503": 0.02, "500": 0.01, "reset": 0.02, "truncate": 0.02}
USUAL = {"503": 0.004, "500": 0.002, "reset": 0.002, "truncate": 0.002}
"""Of 100 requests 7 and 1 meet a fault."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("drawn") / "shapes", train=NUM_IMAGES)


@pytest.fixture(scope="module")
def packed(folder: Path) -> Path:
    out = folder.parent / "packed"
    pack(open_index(folder), str(out), PackOptions(), run_shards=in_threads(1))
    return out


@pytest.fixture
def serve(packed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ServedBucket]]:
    """Starts a server that has the shards in packed/ of a bucket."""
    with contextlib.ExitStack() as stack:

        def start(make_server: Callable[[], AbstractContextManager[Server]], folder: Path = packed) -> ServedBucket:
            served = stack.enter_context(make_server()).bucket()
            apply(monkeypatch, served.environment)
            store = open_store(parse_uri(served.uri))
            for path in folder.iterdir():
                if path.is_file():
                    store.write(f"packed/{path.name}", path.read_bytes())
            return served

        yield start


@pytest.fixture
def served(serve: Callable[..., ServedBucket]) -> ServedBucket:
    return serve(google_server)


def settings(data: str, **changes: object) -> Config:
    return from_fields(
        {
            "data": data, "model": "retinanet_tiny_fpn", "weights": "none", "image_size": (64, 64), "batch_size": BATCH,
            "max_duration": "30", "precision": "fp32", "eval_every": "0", "cache": "none",
        }
        | changes
    )  # fmt: skip


def final_weights(data: str, run: Path, **changes: object) -> bytes:
    finished = train(settings(data, **changes), TrainOptions(run_dir=str(run))).run
    assert not list(read_lines(finished, QUARANTINE, Quarantined)), "a fault is no fault of the image"
    return (finished / "final.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("buffer", [BUFFER, 0])
@pytest.mark.parametrize(
    ("make_server", "faults", "num_steps"), [(s3_server, USUAL, 100), (google_server, BAD, 30)], ids=["s3-1%", "gs-7%"]
)
def test_the_same_weights_in_spite_of_faults(
    make_server: Callable[[], AbstractContextManager[Server]],
    faults: dict[str, float],
    num_steps: int,
    buffer: int,
    folder: Path,
    packed: Path,
    serve: Callable[..., ServedBucket],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the order of shards as from local shards, with the random order as from the files that were packed."""
    changes = {"shuffle_buffer": buffer, "max_duration": str(num_steps)}
    local = final_weights(str(packed if buffer else folder), tmp_path / "local", **changes)
    with serve(make_server).through(Conditions(faults=faults, seed=2)) as (worse, proxy):  # type: ignore[arg-type]
        apply(monkeypatch, worse.environment)
        remote = final_weights(f"{worse.uri}/packed", tmp_path / "remote", **changes)
        assert any(request.fault is not None for request in proxy.requests), "a test of faults has some"
        paths = [unquote(request.path) for request in proxy.requests if request.method == "GET"]
    assert remote == local
    num_reads = sum("/train-" in path for path in paths)
    assert (num_reads < num_steps * BATCH) == bool(buffer), f"{num_reads} requests"


NUM_RANK_IMAGES, RANK_BATCH, RANK_STEPS = 102, 12, 17
"""Two epochs of 8½ steps."""


def train_on_ranks(
    data: str, folder: Path, ranks: int, *, stop_after: int = 0
) -> tuple[list[int], dict[int, list[int]]]:
    """(exit codes, step → the images of all ranks, in their order). stop_after: rank 1 gets a SIGTERM after
    that step."""
    port = str(find_free_port())
    records = [folder / f"{ranks}-ranks-{rank}.jsonl" for rank in range(ranks)]
    flags = {
        "--device": "cpu", "--model": "retinanet_tiny_fpn", "--weights": "none", "--batch-size": RANK_BATCH,
        "--steps": RANK_STEPS, "--precision": "fp32", "--eval-every": "0", "--cache": "none", "--workers": "1",
        "--shuffle-buffer": "96", "--run-dir": "run",
    }  # fmt: skip
    words = ["train", data, "--image-size", "64", "64", *(str(word) for pair in flags.items() for word in pair)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", RECORDED_RANK, record, str(stop_after * (rank == 1)), *words],
            cwd=folder,
            env={
                **os.environ, "PYTHONPATH": str(ROOT), "RANK": str(rank), "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port, "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.DEVNULL,
        )
        for rank, record in enumerate(records)
    ]  # fmt: skip
    codes = [process.wait(timeout=600) for process in processes]
    by_rank = [[json.loads(line) for line in record.read_text().splitlines()] for record in records]
    steps = {}
    for lines in zip(*by_rank, strict=True):
        assert len({line["step"] for line in lines}) == 1, "all ranks are at the same step"
        steps[lines[0]["step"]] = [image for line in lines for image in line["images"]]
    return codes, steps


@pytest.mark.slow
def test_two_ranks_continued_as_three_train_on_every_image_once_an_epoch(
    serve: Callable[..., ServedBucket], tmp_path: Path
) -> None:
    """From shards in a bucket; stopped in the middle of the first epoch by a SIGTERM that reaches one rank."""
    packed = tmp_path / "packed"
    source = draw(tmp_path / "shapes", train=NUM_RANK_IMAGES, side=256)
    result = pack(open_index(source), str(packed), PackOptions(shard_mib=1), run_shards=in_threads(1))
    assert len(result.info.shards) > 3
    data = f"{serve(google_server, packed).uri}/packed"
    codes, before = train_on_ranks(data, tmp_path, 2, stop_after=3)
    assert codes == [75, 75]
    codes, after = train_on_ranks(data, tmp_path, 3)
    assert codes == [0, 0, 0]
    stopped = len(before)
    assert [*before, *after] == list(range(1, RANK_STEPS + 1)), "no step is left out or done again"
    assert 0 < stopped * RANK_BATCH < NUM_RANK_IMAGES, "it was stopped in the middle of the first epoch"
    images = [image for step in (*before.values(), *after.values()) for image in step]
    train_images = open_index(packed).image_indices("train").tolist()
    for epoch in range(2):
        used = images[epoch * NUM_RANK_IMAGES : (epoch + 1) * NUM_RANK_IMAGES]
        assert sorted(used) == train_images


@pytest.mark.slow
def test_the_buffer_is_derived_and_recorded(served: ServedBucket, tmp_path: Path) -> None:
    run = train(settings(f"{served.uri}/packed", max_duration="2"), TrainOptions(run_dir=str(tmp_path / "run"))).run
    config, reasons = from_toml(run / CONFIG)
    assert config.run.shuffle_buffer == NUM_IMAGES
    assert f"{NUM_IMAGES} of {NUM_IMAGES} images are mixed" in reasons["shuffle_buffer"]


def test_without_shards_in_a_bucket_the_order_is_random(folder: Path, packed: Path) -> None:
    device = select_device("cpu")
    for data, words in ((folder, "a file of its own"), (packed, "on a disk")):
        index = open_index(data)
        config, reasons = derive(settings(str(data)), index, device)
        assert config.run.shuffle_buffer == 0
        assert words in reasons["shuffle_buffer"]
    with pytest.raises(ConfigError, match="--shuffle-buffer 48 is for shards"):
        derive(settings(str(folder), shuffle_buffer=BUFFER), open_index(folder), device)
