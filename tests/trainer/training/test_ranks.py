"""Several ranks: who they are, how they end, and that they train what one process trains."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from stoker.config.settings import Config, from_fields
from stoker.training.cluster import ONE_DEVICE
from stoker.training.defaults.checks import check_devices
from stoker.training.local_ranks import find_free_port
from stoker.training.ranks import RankFailure, Ranks, first_failure, read_reports, write_report
from stoker_watch.diagnosis.reader import read_run
from stoker_watch.errors import ConfigError, DataError, Preempted, RankError
from stoker_watch.runs.records import EVENTS, QUARANTINE, STEPS, read_lines
from stoker_watch.runs.schemas import Event, Quarantined, StepWindow
from tests.drawn import draw, run_stoker
from tests.fixtures.training_ranks import (  # noqa: F401
    FLAGS,
    SYNC_BN,
    aps,
    arguments,
    assert_same_training,
    change,
    in_float64,
    mean_loss,
    rank_processes,
    start,
    train,
    wait_for_checkpoint,
)


def test_alone_nothing_is_exchanged():
    ranks = Ranks()
    assert (ranks.alone, ranks.is_main, ranks.devices()) == (True, True, ONE_DEVICE)
    assert ranks.share(lambda: 3) == ranks.locally_first(lambda: 3) == ranks.share_value(3) == 3
    assert ranks.gather("x") == ["x"]
    assert ranks.any(True)
    assert ranks.device_name("cuda:1") == "cuda:1"
    ranks.barrier()
    ranks.close(orderly=True)


@pytest.mark.parametrize(
    ("settings", "count", "words"),
    [
        ({"batch_size": 16}, 3, ["among 3 devices", "--batch-size 18"]),
        ({"batch_size": 2}, 4, ["--batch-size 4"]),
        ({"batch_size": 12, "mosaic": 0.5}, 2, ["a multiple of four", "--batch-size 16"]),
    ],
)
def test_a_batch_that_cannot_be_divided_is_refused(settings: dict[str, object], count: int, words: list[str]):
    with pytest.raises(ConfigError) as caught:
        check_devices(from_fields(settings), count)
    for word in words:
        assert word in str(caught.value)
    check_devices(from_fields(settings), 1)
    check_devices(from_fields({"batch_size": 16, "mosaic": 0.5}), 2)
    check_devices(Config(), 8)


def test_the_first_failure_is_the_one_that_is_not_a_consequence():
    lost = RankFailure.of(0, RankError("Rank 0 lost the connection to another rank."), is_consequence=True)
    cause = RankFailure.of(1, DataError("Too many bad images.", location="/data", choices=("a", "b")))
    bug = RankFailure.of(2, ValueError("x"))
    bug.t = cause.t + 1
    first = first_failure([bug, lost, cause])
    assert first is cause
    error = cause.as_error()
    assert isinstance(error, DataError)
    assert "Rank 1: Too many bad images." in str(error)
    assert "a, b" in str(error)
    assert "ValueError: x" in str(bug.as_error())
    assert first_failure([]) is None
    stopped = [RankFailure.of(rank, Preempted(f"Stopped, says rank {rank}.")) for rank in (1, 0)]
    assert first_failure(stopped) is stopped[1]
    assert first_failure([*stopped, cause]) is cause, "rank 0 could not save"
    everywhere = [RankFailure.of(rank, DataError("No images.")) for rank in (1, 0)]
    assert str(first_failure(everywhere).as_error()) == "No images."  # type: ignore[union-attr]


@pytest.mark.parametrize("error", [
    DataError("No annotations in \udce9.", location="/caf\udce9", cause="\udce9", choices=("\udce9",), fix="\udce9"),
    ValueError("caf\udce9"),
])  # fmt: skip
def test_a_failure_that_names_a_file_whose_name_is_no_utf_8_is_told(error: Exception, tmp_path: Path) -> None:
    write_report(RankFailure.of(1, error), str(tmp_path))
    (told,) = read_reports(tmp_path)
    assert "\\udce9" in str(told.as_error())
    assert told.exit_code == getattr(error, "exit_code", 1)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("drawn"), train=30)


@pytest.mark.slow
def test_two_ranks_write_one_run(data: Path, tmp_path: Path):
    run = train(data, tmp_path, 2, "--steps", "5")
    totals = read_run(run).totals
    assert (totals.devices, totals.steps, totals.num_images) == (2, 5, 5 * 12)
    assert totals.phases["comm"] > 0
    assert sum(totals.phases.values()) == pytest.approx(totals.device_s)
    windows = list(read_lines(run / "ranks" / "0001", STEPS, StepWindow))
    assert sum(window.window_steps for window in windows) == 5
    sampled = {place.rank for place in read_run(run).places if place.role == "training" and place.part}
    assert sampled == {0, 1}, "each rank samples its own stacks, and those of the last window arrive"
    events = list(read_lines(run, EVENTS, Event))
    assert [event.data.get("ranks") for event in events if event.kind == "started"] == [2]
    assert [event.kind for event in events].count("evaluated") == 1
    assert events[-1].kind == "finished"
    assert len(list(run.glob("checkpoints/step-*"))) == 2


def run_two(module: str) -> Any:
    """The JSON that rank 0 of a program of `tests.training` prints in its last line."""
    port = find_free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", f"tests.training.{module}"],
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
    return json.loads(outputs[0].splitlines()[-1])


@pytest.mark.slow
def test_a_compiled_step_exchanges_gradients_while_it_computes_others():
    """The first bucket is on its way before the last backward graph runs; the weights are those without compiling."""
    found = run_two("compiled_ranks")
    assert found["difference"] < 1e-9
    order = found["order"]
    assert order.count("graph") >= 3
    assert order.index("exchange") < len(order) - 1 - order[::-1].index("graph")


@pytest.mark.slow
def test_losses_and_gradients_are_those_of_the_whole_batch():
    """Every family, in float64; with an empty image, very different halves, synchronized norms, accumulation."""
    differences = run_two("rank_gradients")
    assert len(differences) == 6
    assert max(differences.values()) < 1e-6, differences  # running statistics travel in fp32


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2])
def test_ranks_train_what_one_process_trains(data: Path, whole: Path, tmp_path: Path, devices: int):
    """30 images: a batch of 12 reaches into the next epoch, and 6 validation images are no multiple of 3 · 4."""
    assert_same_training(whole, train(data, tmp_path, devices, "--steps", STEPS_IN_ALL, *SYNC_BN))
    untrained = train(data, tmp_path / "untrained", 1, "--steps", "1", "--lr", "1e-9")
    assert change(untrained, whole) > 0.1


@pytest.mark.slow
def test_the_ap_of_ranks_is_that_of_one_process(tmp_path: Path):
    data = draw(tmp_path / "data", train=48, val=13)
    fast = ["--lr", "0.01", "--optimizer", "adamw", "--eval-every", "0", "--backbone-norm", "bn", "--hflip", "0"]
    weights = train(data, tmp_path / "trained", 1, "--steps", "100", *fast) / "final.safetensors"
    again = ["--steps", "1", "--lr", "1e-9", "--ema-decay", "0", "--weights", str(weights), *SYNC_BN]
    found = [aps(train(data, tmp_path / str(n), n, *again))[1] for n in (1, 2, 3)]
    assert found[0] > 0.05, "there is something to compare"
    assert found[1:] == pytest.approx([found[0]] * 2, abs=1e-6)


STEPS_IN_ALL = "40"


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, from start to end."""
    return train(data, tmp_path_factory.mktemp("whole"), 1, "--steps", STEPS_IN_ALL, *SYNC_BN)


@pytest.mark.slow
def test_stopped_on_two_continued_on_one_and_on_three(data: Path, tmp_path: Path):
    """With frozen norms: on one device there are two micro-batches, which trained ones would normalize apart."""
    flags = ["--steps", "12", "--checkpoint-every", "3", "--model", "retinanet_mobilenet_v2_fpn", "--weights", "none"]
    flags += ["--backbone-norm", "frozen_bn", "--batch-size", "6"]
    whole = train(data, tmp_path / "whole", 1, *flags)
    folder, run = tmp_path / "moved", tmp_path / "moved" / "run"
    for devices in (2, 1):
        process = start(data, folder, devices, *flags)
        wait_for_checkpoint(process, run)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 75, output
    train(data, folder, 3, *flags)
    attempts = [e for e in read_lines(run, EVENTS, Event) if e.kind in ("started", "resumed")]
    assert [event.data.get("ranks", 1) for event in attempts] == [2, 1, 3]
    assert_same_training(whole, run)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [3])
def test_killed_and_continued_on_as_many_is_bit_identical(data: Path, tmp_path: Path, devices: int):
    whole = train(data, tmp_path / "whole", devices, "--steps", "24")
    process = start(data, tmp_path / "killed", devices, "--steps", "24")
    wait_for_checkpoint(process, tmp_path / "killed" / "run")
    for child in rank_processes(process):
        child.kill()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert "was killed by SIGKILL" in output
    killed = train(data, tmp_path / "killed", devices, "--steps", "24")
    for name in ("final.safetensors", "best.safetensors"):
        assert (whole / name).read_bytes() == (killed / name).read_bytes()


@pytest.fixture
def long_run(data: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A training on two ranks that has saved a checkpoint."""
    process = start(data, tmp_path / "long", 2, "--steps", "5000")
    run = tmp_path / "long" / "run"
    wait_for_checkpoint(process, run)
    yield process, run
    if process.poll() is None:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_after_a_rank_is_killed_the_others_end_and_it_is_named(
    long_run: tuple[subprocess.Popen[str], Path], victim: int
):
    process, run = long_run
    children = rank_processes(process)
    children[victim].kill()
    start_s = time.monotonic()
    output, _ = process.communicate(timeout=30)
    assert time.monotonic() - start_s < 10
    assert process.returncode == 1, output
    assert f"Rank {victim} was killed by SIGKILL." in output
    assert not psutil.wait_procs(children, timeout=5)[1], "no process is left"
    if victim:  # the records are written by rank 0
        last = list(read_lines(run, EVENTS, Event))[-1]
        assert (last.kind, last.text.partition(".")[0]) == ("failed", "Rank 1 was killed by SIGKILL")


@pytest.mark.slow
def test_no_rank_outlives_the_process_that_started_it(long_run: tuple[subprocess.Popen[str], Path]):
    process, run = long_run
    children = rank_processes(process)
    process.kill()
    process.communicate(timeout=60)
    assert not psutil.wait_procs(children, timeout=60)[1]
    assert [event.kind for event in read_lines(run, EVENTS, Event)][-1] == "preempted", "it was saved"


@pytest.mark.slow
def test_an_unusable_image_is_recorded_once_whichever_rank_meets_it(tmp_path: Path):
    data = draw(tmp_path / "data", train=30)
    victim = data / "train" / "train-3.jpg"
    victim.write_bytes(victim.read_bytes()[:300])
    one, two = (train(data, tmp_path / str(n), n, "--steps", "12", *SYNC_BN) for n in (1, 2))
    for run in (one, two):
        assert [Path(line.path).name for line in read_lines(run, QUARANTINE, Quarantined)] == ["train-3.jpg"]
    assert_same_training(one, two)
    for name in ("train-4.jpg", "train-5.jpg", "train-6.jpg"):
        (data / "train" / name).write_bytes(b"")
    code, output = run_stoker(*arguments(data, 2, "--steps", "20"), cwd=tmp_path)
    assert code == 4, output
    assert "images cannot be used" in output


@pytest.mark.slow
def test_torchrun_starts_ranks_too(data: Path, tmp_path: Path):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "stoker", "train",
        str(data), *FLAGS, "--steps", "4", "--run-dir", "run",
    ]  # fmt: skip
    marker = "import atexit, os\natexit.register(lambda: open(f'finalized-{os.environ.get(\"RANK\")}', 'w').close())\n"
    (tmp_path / "sitecustomize.py").write_text(marker)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("results: run") == 1, "one rank prints"
    # a thread of gloo may abort a process that Python finalizes (PyTorch issue 190489): a rank ends without it
    assert [path.name for path in tmp_path.glob("finalized-*")] == ["finalized-None"]
    assert read_run(tmp_path / "run").totals.devices == 2

    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "The run is finished: nothing is left to do." in again.stderr
    code, output = run_stoker(*arguments(data, 2, "--steps", "4"), cwd=tmp_path)
    assert code == 0, output
    assert output.count("The run is finished: nothing is left to do.") == 1


@pytest.mark.slow
def test_an_error_of_all_ranks_is_one_message(data: Path, tmp_path: Path):
    code, output = run_stoker(*arguments(data, 2, "--batch-size", "3"), cwd=tmp_path)
    assert code == 2, output
    assert output.count("cannot be divided equally among 2 devices") == 1
    assert not (tmp_path / "run").exists()
