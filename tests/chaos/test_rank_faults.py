"""The rows of docs/faults.md for two ranks on gloo: what one meets ends all of them, and the next attempt goes on."""

import os
import signal
import time
from pathlib import Path

import pytest

from stoker_watch.runs.records import EVENTS, HANG, RANKS
from tests.chaos.harness import assert_same_weights, processes_of, start, train
from tests.drawn import draw
from tests.fixtures.chaos_faults import wait_for_checkpoint

pytestmark = pytest.mark.slow

TWO = ("--devices", "2", "--device", "cpu", "--batch-size", "8", "--mosaic", "0")
STEP = "stoker.training.make_step:train_step"
RESTARTS = ("--restarts", "2")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("drawn") / "shapes")


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    ended = train(data, tmp_path_factory.mktemp("undisturbed"), *TWO)
    assert ended.code == 0, ended.output
    return ended.run


@pytest.mark.parametrize(("rank", "target"), [(0, STEP), (1, "stoker.training.evaluator:Evaluator.run_inference")])
def test_an_error_of_a_rank_ends_all_and_is_shown_with_its_rank(
    rank: int, target: str, data: Path, tmp_path: Path
) -> None:
    call = 9 if target == STEP else 1
    ended = train(data, tmp_path, *TWO, chaos={"target": target, "call": call, "fault": "error", "rank": rank})
    duration_s = time.time() - float((tmp_path / "fault-time").read_text())
    print(f"rank {rank} raised in {target}: all ended within {duration_s:.1f} s")
    assert duration_s < 60  # the exchange that the others wait in would take 20 minutes
    assert ended.code == 1, ended.output
    assert "Rank 1" in ended.output or rank == 0
    assert "ZeroDivisionError" in ended.output
    assert "gloo" not in ended.output.lower(), "not the exchange that failed because of it"
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize(("rank", "fault"), [(0, "kill"), (1, "error")])
def test_a_rank_that_dies_is_restarted_with_the_others(
    rank: int, fault: str, data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    chaos = {"target": STEP, "call": 9, "fault": fault, "rank": rank, "attempt": 1}
    ended = train(data, tmp_path, *TWO, *RESTARTS, chaos=chaos)
    assert ended.code == 0, ended.output
    assert [event.data["restart"]["number"] for event in ended.events if "restart" in event.data] == [1]
    assert_same_weights(ended.run, undisturbed)
    assert processes_of(tmp_path) == []


def test_a_rank_that_hangs(data: Path, undisturbed: Path, tmp_path: Path) -> None:
    chaos = {"target": STEP, "call": 9, "fault": "hang", "rank": 1, "attempt": 1}
    ended = train(data, tmp_path, *TWO, *RESTARTS, chaos=chaos, env={"STOKER_HANG_TIMEOUT_S": "5"})
    assert ended.code == 0, ended.output
    assert "exit code 7 (the training hung)" in ended.output
    assert "_hang" in (ended.run / RANKS / "0001" / HANG).read_text(), "the stack of the rank that the other waits for"
    assert (ended.run / HANG).exists(), "the stacks of the rank that waits"
    assert_same_weights(ended.run, undisturbed)
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize(
    ("rank", "fault", "restarts"), [(0, "stop", True), (1, "stop", False), (1, "hold_the_lock", False)]
)
def test_a_frozen_rank_is_named(
    rank: int, fault: str, restarts: bool, data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Its process is stopped, or in an endless C call that holds the GIL."""
    chaos = {"target": STEP, "call": 9, "fault": fault, "rank": rank, "attempt": 1}
    flags = RESTARTS if restarts else ()
    ended = train(data, tmp_path, *TWO, *flags, chaos=chaos, env={"STOKER_HANG_TIMEOUT_S": "5"})
    print(f"rank {rank}, {fault}: all ended after {time.time() - float((tmp_path / 'fault-time').read_text()):.1f} s")
    assert ended.code == (0 if restarts else 7), ended.output
    assert f"stoker: Rank {rank} (process " in ended.output
    assert "froze or lost its network: no heartbeat for" in ended.output
    assert processes_of(tmp_path) == []
    if restarts:
        assert "exit code 7 (the training hung)" in ended.output
        assert_same_weights(ended.run, undisturbed)


def test_out_of_memory_in_one_rank(data: Path, tmp_path: Path) -> None:
    target = "stoker.training.optim:OptimizerStep.backward"
    chaos = {"target": target, "call": 9, "fault": "out_of_memory", "rank": 1, "attempt": 1}
    ended = train(data, tmp_path, *TWO, *RESTARTS, chaos=chaos)
    assert ended.code == 0, ended.output
    (event,) = [event for event in ended.events if event.kind == "out_of_memory"]
    assert event.data["micro_batch_size"] == 2
    assert event.data["rank"] == 1
    assert "micro-batches of 2 images instead of 4; its batch stays 8" in event.text
    assert "exit code 5 (out of memory)" in ended.output
    assert processes_of(tmp_path) == []


def test_a_signal_stops_all_ranks_at_one_step(data: Path, undisturbed: Path, tmp_path: Path) -> None:
    process = start(data, tmp_path, *TWO, *RESTARTS)
    wait_for_checkpoint(process, tmp_path / "run")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    assert processes_of(tmp_path) == []
    again = train(data, tmp_path, *TWO)
    assert again.code == 0, again.output
    assert_same_weights(again.run, undisturbed)


def test_a_killed_starter_leaves_no_rank(data: Path, tmp_path: Path) -> None:
    process = start(data, tmp_path, *TWO)
    wait_for_checkpoint(process, tmp_path / "run")
    process.kill()
    process.communicate(timeout=120)
    end_s = time.monotonic() + 120
    while (left := processes_of(tmp_path)) and time.monotonic() < end_s:
        time.sleep(0.1)
    assert left == []
    assert (tmp_path / "run" / EVENTS).exists()
    assert os.path.isdir(tmp_path / "run" / "checkpoints")
