"""The watchdog: what is a hang, what it is called, and a process that really hangs."""

import threading
import traceback
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import ConfigError, DataError
from stoker.runs.records import EVENTS, HANG, RunFolder, read_lines
from stoker.runs.schemas import Event
from stoker.training import watchdog
from stoker.training.ranks import Failure, Ranks
from stoker.training.watchdog import (
    NCCL_TRACE,
    STEP_FACTOR,
    TICK_S,
    HangDetector,
    Watchdog,
    describe_hang,
    min_limit_s,
)


def silence(detector: HangDetector, seconds: float, *, is_limited: bool = True) -> bool:
    """Whether the detector finds a hang within so many seconds without a report."""
    return any(detector.tick(TICK_S, is_limited=is_limited) for _ in range(int(seconds / TICK_S) + 1))


@given(st.lists(st.floats(0.001, 100), min_size=1, max_size=9), st.floats(5, 100))
def test_a_hang_is_twenty_median_steps_and_at_least_the_minimum(durations_s: list[float], minimum_s: float) -> None:
    detector = HangDetector(minimum_s)
    for duration_s in durations_s:
        detector.report(duration_s)
    median_s = sorted([*durations_s, *durations_s])[len(durations_s)]
    limit_s = detector.limit_s
    assert limit_s >= minimum_s
    assert limit_s == minimum_s or min(durations_s) * STEP_FACTOR <= limit_s <= median_s * STEP_FACTOR * 1.000001
    assert not silence(detector, limit_s - 2 * TICK_S)
    assert silence(detector, 4 * TICK_S)


def test_when_silence_is_allowed() -> None:
    detector = HangDetector(5.0)
    detector.report()
    assert not silence(detector, 1000), "the first step has no limit, whatever else reports"
    detector.report(0.1)
    assert not silence(detector, 1000, is_limited=False), "a phase without a limit"
    detector.allow_silence(2)
    assert not silence(detector, 1000)
    detector.report()
    assert not silence(detector, 1000)
    detector.report()
    assert silence(detector, 10)


def test_a_stopped_process_has_not_hung() -> None:
    """A tick after a suspension counts as two ticks, not as its hours."""
    detector = HangDetector(5.0)
    detector.report(0.1)
    assert not any(detector.tick(3600.0, is_limited=True) for _ in range(3))


def frames(*files: str) -> list[traceback.FrameSummary]:
    return [traceback.FrameSummary(file, 1, "function") for file in files]


@pytest.mark.parametrize(
    ("phase", "innermost", "expected"),
    [
        ("input_wait", "/site/stoker/data/loading/worker_pool.py", "loader"),
        ("input_wait", "/site/stoker/hardware/device.py", "device"),
        ("compute", "/site/torch/autograd/graph.py", "device"),
        ("host", "/site/torch/distributed/distributed_c10d.py", "collective"),
        ("comm", "/site/stoker/training/ranks.py", "collective"),
        ("eval", "/site/stoker/data/loading/worker_pool.py", "evaluation"),
        ("compute", "/site/stoker/training/several.py:/site/torch/autograd/graph.py", "collective"),
        ("compute", "/site/stoker/training/several.py:/site/torch/nn/modules/conv.py", "device"),
        ("compute", "/site/torch/distributed/pipelining/schedules.py:/site/torch/nn/modules/conv.py", "device"),
        (
            "compute",
            "/site/torch/distributed/pipelining/schedules.py:/site/torch/distributed/distributed_c10d.py",
            "collective",
        ),
    ],
)
def test_what_hangs_is_named(phase: str, innermost: str, expected: str) -> None:
    assert describe_hang(phase, frames("/site/stoker/training/loop.py", *innermost.split(":"))) == expected


def test_a_hang_is_recorded_with_the_stacks_of_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "TICK_S", 0.01)
    folder, ended, codes = RunFolder(tmp_path, 1), threading.Event(), []

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    detector, done = HangDetector(0.05), threading.Event()
    loaders = [threading.Thread(target=done.wait, daemon=True) for _ in range(120)]  # faulthandler writes a hundred
    for loader in loaders:
        loader.start()
    detector.report(0.0001)
    with Watchdog(folder, detector, phase=lambda: "input_wait", step=lambda: 7, on_hang=end):
        assert ended.wait(30)
    done.set()
    folder.close()
    assert codes == [7]
    (event,) = read_lines(tmp_path, EVENTS, Event)
    assert (event.kind, event.step, event.data["hung"], event.data["exit_code"]) == ("failed", 7, "loader", 7)
    text = (tmp_path / HANG).read_text()
    assert "Thread" in text
    assert "test_a_hang_is_recorded" in text


class Others(Ranks):
    """A rank whose only other one is alive, or not."""

    def __init__(self, alive: bool) -> None:
        super().__init__()
        self.world_size, self.rank, self.others, self.told = 2, 1, alive, []
        self.failure: Failure | None = None

    def tell_alive(self, alive: bool) -> None:
        self.told.append(alive)

    def others_alive(self) -> bool:
        return self.others

    def failure_elsewhere(self) -> Failure | None:
        return self.failure

    def collective_trace(self) -> bytes:
        return b"collectives"


def test_a_rank_that_waits_for_a_busy_one_has_not_hung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "TICK_S", 0.01)
    folder, ended, ranks = RunFolder(tmp_path, 1), threading.Event(), Others(alive=True)
    detector = HangDetector(0.1)
    detector.report(0.0001)
    with Watchdog(
        folder, detector, phase=lambda: "compute", step=lambda: 7, on_hang=lambda _: ended.set(), ranks=ranks
    ):
        while False not in ranks.told:  # half of its limit
            assert not ended.is_set()
        ranks.others = False
        assert ended.wait(30)
    folder.close()
    assert ranks.told == [True, False]
    assert (tmp_path / "ranks" / "0001" / HANG).exists()

    assert (tmp_path / NCCL_TRACE / "rank_1").read_bytes() == b"collectives"


def test_a_rank_that_does_not_notice_a_failure_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watchdog, "TICK_S", 0.01)
    monkeypatch.setattr(watchdog, "FAILURE_GRACE_S", 0.05)
    codes: list[int] = []
    ended, ranks = threading.Event(), Others(alive=True)
    ranks.failure = Failure.of(0, DataError("Too many bad images."))

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    folder = RunFolder(tmp_path, 1)
    with Watchdog(folder, HangDetector(60), phase=lambda: "checkpoint", step=lambda: 7, on_hang=end, ranks=ranks):
        assert ended.wait(30)
    folder.close()
    assert codes == [4]
    assert "Too many bad images." in capsys.readouterr().err


def test_the_limit_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STOKER_HANG_TIMEOUT_S", raising=False)
    assert min_limit_s(is_remote=False) == 60
    assert min_limit_s(is_remote=True) > 120, "a request to a bucket ends first"
    for text, expected in (("0", None), ("5.5", 5.5)):
        monkeypatch.setenv("STOKER_HANG_TIMEOUT_S", text)
        assert min_limit_s(is_remote=True) == expected
    monkeypatch.setenv("STOKER_HANG_TIMEOUT_S", "soon")
    with pytest.raises(ConfigError, match="soon"):
        min_limit_s(is_remote=False)
