"""Two real processes with gloo over loopback."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from stoker_watch.diagnosis.reader import read_run
from stoker_watch.runs.records import EVENTS, RANKS, STEPS, read_lines
from stoker_watch.runs.schemas import Event, StepWindow

pytest.importorskip("torch")
from tests.watch.recording import ranks

pytestmark = pytest.mark.slow


def train(run: Path, how: str, *, torchrun: bool = False) -> list[subprocess.CompletedProcess[str]]:
    """The ends of the processes: of two, or of torchrun alone, which starts them."""
    script = [sys.executable, "-m", "tests.watch.recording.ranks", str(run), how]
    starts: list[tuple[list[str], dict[str, str]]]
    if torchrun:
        before = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
        starts = [([*before, *script], {})]
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
        starts = [(script, shared | {"RANK": str(rank)}) for rank in range(2)]
    jobs = [
        subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"} | more, stderr=subprocess.PIPE, text=True)
        for command, more in starts
    ]
    said = [job.communicate(timeout=200)[1] for job in jobs]
    return [
        subprocess.CompletedProcess(job.args, job.returncode, stderr=text) for job, text in zip(jobs, said, strict=True)
    ]


def seconds(folder: Path, phase: str) -> float:
    return sum(line.phases.get(phase, 0.0) for line in read_lines(folder, STEPS, StepWindow))


def work_seconds(folder: Path) -> float:
    """Everything but the exchange."""
    phases = [line.phases for line in read_lines(folder, STEPS, StepWindow)]
    return sum(sum(phase.values()) - phase.get("comm", 0.0) for phase in phases)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_a_rank_waits_for_the_one_that_is_slow(run: Path) -> None:
    (job,) = train(run, "slow rank", torchrun=True)
    assert job.returncode == 0, job.stderr
    other = run / RANKS / "0001"
    waited_s = seconds(run, "comm") - seconds(other, "comm")
    slept_s = ranks.STEPS * ranks.SLEEP_S
    assert waited_s >= 0.6 * slept_s  # no closer bounds: other programs on the machine delay both
    assert work_seconds(other) - work_seconds(run) >= 0.6 * slept_s
    found = read_run(run).totals
    assert 0.6 * slept_s <= found.phases["straggler"] <= seconds(run, "comm")
    assert max(found.straggler_s, key=lambda rank: found.straggler_s[rank]) == 1
    assert (found.devices, found.steps, found.num_images) == (2, ranks.STEPS, 2 * 8 * ranks.STEPS)
    for folder in (run, other):
        lines = list(read_lines(folder, STEPS, StepWindow))
        assert sum(line.window_steps for line in lines) == ranks.STEPS
        assert all(line.attempt == 1 and line.devices == 1 for line in lines)
        assert sum(sum(line.phases.values()) for line in lines) == pytest.approx(sum(line.wall_s for line in lines))
    assert [event.kind for event in read_lines(run, EVENTS, Event)] == ["started", "finished"]


def test_a_slow_link_is_an_exchange_in_both_and_the_group_may_come_late(run: Path) -> None:
    for job in train(run, "slow link"):
        assert job.returncode == 0, job.stderr
    for folder in (run, run / RANKS / "0001"):
        assert seconds(folder, "comm") >= 0.9 * ranks.STEPS * ranks.SLEEP_S
        assert sum(line.window_steps for line in read_lines(folder, STEPS, StepWindow)) == ranks.STEPS


def test_the_rank_that_failed_is_named_not_the_one_that_it_took_along(run: Path) -> None:
    assert [job.returncode for job in train(run, "crash")] == [1, 1]
    failed = [event for event in read_lines(run, EVENTS, Event) if event.kind == "failed"]
    assert [(event.text, event.data["rank"]) for event in failed] == [("rank 1: ValueError: rank one is tired", 1)]
