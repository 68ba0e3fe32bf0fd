"""`--shard`: ranks that share a model train what one process trains, and their checkpoints are those of one process."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.config.settings import from_fields
from stoker.data.index import open_index
from stoker.hardware.selection import select_device
from stoker.training.cluster import Devices
from stoker.training.defaults.derive import derive
from stoker.training.local_ranks import find_free_port
from stoker_watch.diagnosis.reader import read_run
from stoker_watch.errors import ConfigError
from stoker_watch.runs.records import EVENTS, read_lines
from stoker_watch.runs.schemas import Event
from tests.drawn import draw
from tests.fixtures.training_ranks import assert_same_training, in_float64, start, train, wait_for_checkpoint

__all__ = ["in_float64"]

SHARD = ["--shard", "--steps", "20"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("drawn"), train=30)


@pytest.mark.parametrize(
    ("settings", "devices", "words"),
    [
        ({}, 1, ["on one", "--devices N"]),
        ({"compile": True}, 2, ["--shard and --compile"]),
        ({"auto_batch": True, "batch_size": None}, 2, ["--shard and --auto-batch", "--batch-size N"]),
        ({"cuda_graph": True}, 2, ["--cuda-graph"]),
    ],
)
def test_what_cannot_be_combined_is_refused(
    data: Path, settings: dict[str, object], devices: int, words: list[str]
) -> None:
    fields = {"data": str(data), "model": "retinanet_tiny_fpn", "batch_size": 12, "device": "cpu", "shard": True}
    with pytest.raises(ConfigError) as caught:
        derive(from_fields(fields | settings), open_index(data), select_device("cpu"), Devices(devices, devices))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases", [["checkpointed", "ember"], ["retinanet", "fcos", "ssdlite", "faster_rcnn"]], ids=",".join
)
def test_steps_of_every_family_are_those_of_one_process(cases: list[str]) -> None:
    """In float64: weights, EMA, moments, losses; clipped; a skipped step; activation checkpointing; two optimizers."""
    port = find_free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.training.shard_step", *cases],
            cwd=Path(__file__).resolve().parents[3],
            env={
                **os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=850)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    found = json.loads(outputs[0].splitlines()[-1])
    assert list(found) == cases
    for case, numbers in found.items():
        for name in ("losses", "state", "ema", "restored", "skipped"):
            assert numbers[name] < 1e-6, (case, name, numbers)  # running statistics travel in fp32
        assert numbers["parts"] >= 3, (case, numbers)
        assert 0.49 < numbers["own_bytes"] < 0.52, (case, "each of two ranks keeps half", numbers)


@pytest.mark.slow
def test_sharded_ranks_one_process_and_back(data: Path, tmp_path: Path) -> None:
    """Two ranks, then one process, then three ranks, against one process.

    With SGD: AdamW makes whole steps of gradients that are nothing but rounding."""
    flags = [*SHARD, "--backbone-norm", "frozen_bn", "--model", "retinanet_mobilenet_v2_fpn", "--weights", "none"]
    flags += ["--batch-size", "6", "--steps", "12", "--checkpoint-every", "3"]
    whole = train(data, tmp_path / "whole", 1, *(flag for flag in flags if flag != "--shard"))
    folder, run = tmp_path / "moved", tmp_path / "moved" / "run"
    for devices in (2, 1):
        process = start(data, folder, devices, *flags)
        wait_for_checkpoint(process, run)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 75, output
    train(data, folder, 3, *flags)
    attempts = [event for event in read_lines(run, EVENTS, Event) if event.kind in ("started", "resumed")]
    assert [event.data.get("ranks", 1) for event in attempts] == [2, 1, 3]
    assert_same_training(whole, run)


@pytest.mark.slow
def test_killed_and_continued_on_as_many_is_bit_identical(data: Path, tmp_path: Path) -> None:
    """With trained norms, accumulation and checkpoints by the clock, which only rank 0 reads."""
    flags = [*SHARD, "--optimizer", "adamw", "--grad-accum-steps", "2", "--checkpoint-every", "0.02min"]
    whole = train(data, tmp_path / "whole", 2, *flags)
    totals = read_run(whole).totals
    assert sum(totals.phases.values()) == pytest.approx(totals.device_s)
    assert totals.phases["comm"] > 0
    process = start(data, tmp_path / "killed", 2, *flags)
    wait_for_checkpoint(process, tmp_path / "killed" / "run")
    process.kill()
    process.communicate(timeout=120)
    killed = train(data, tmp_path / "killed", 2, *flags)
    for name in ("final.safetensors", "best.safetensors"):
        assert (whole / name).read_bytes() == (killed / name).read_bytes()
