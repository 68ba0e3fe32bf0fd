"""The watchdog: what is a hang, what it is called, and a process that really hangs."""

import os
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from stoker.training import heartbeats, watchdog
from stoker.training.cluster import RankPlace
from stoker.training.heartbeats import Heartbeats
from stoker.training.ranks import Ranks
from stoker.training.watchdog import (
    NCCL_TRACE,
    STEP_FACTOR,
    TICK_S,
    HangDetector,
    Watchdog,
    describe_hang,
    min_limit_s,
)
from stoker_watch.errors import ConfigError, DataError
from stoker_watch.runs.records import EVENTS, HANG, RunFolder, read_lines
from stoker_watch.runs.schemas import Event


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


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Ranks]]:
    """Two ranks on a real store, whose heartbeats come a hundred times a second once they are started."""
    for module, names in ((watchdog, ("TICK_S", "FRESH_S")), (heartbeats, ("BEAT_S", "FRESH_S"))):
        for name in names:
            monkeypatch.setattr(module, name, 1.0 if name == "FRESH_S" else 0.01)
    store = TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    ranks = []
    for rank in range(2):
        place = RankPlace(rank=rank, world_size=2, local_rank=rank, local_world_size=2, host="127.0.0.1",
                          port=store.port, source="test")  # fmt: skip
        ranks.append(Ranks(place))
        ranks[rank]._store = store if rank == 0 else TCPStore("127.0.0.1", store.port, 2, False)
        ranks[rank].heartbeats = Heartbeats(ranks[rank]._store, rank, 2)
    yield ranks
    for other in ranks:
        if other.heartbeats is not None and other.heartbeats._thread.is_alive():
            other.heartbeats.stop()


def beats_of(ranks: Ranks) -> Heartbeats:
    assert ranks.heartbeats is not None
    return ranks.heartbeats


def test_a_rank_that_waits_for_a_busy_one_has_not_hung(
    two: list[Ranks], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ranks, "collective_trace", lambda _: b"collectives")  # those of NCCL
    folder, ended = RunFolder(tmp_path, 1), threading.Event()
    detector = HangDetector(0.1)
    detector.report(0.0001)
    for ranks in two:
        beats_of(ranks).start()
    with Watchdog(
        folder, detector, phase=lambda: "compute", step=lambda: 7, on_hang=lambda _: ended.set(), ranks=two[1]
    ):
        while detector.silence_s < 20 * detector.limit_s:
            assert not ended.is_set()
            time.sleep(0.01)
        assert not beats_of(two[1]).progresses, "it says that it waits"
        beats_of(two[0]).progresses = False
        assert ended.wait(60)
    folder.close()
    assert (tmp_path / "ranks" / "0001" / HANG).exists()
    assert (tmp_path / NCCL_TRACE / "rank_1").read_bytes() == b"collectives"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_heartbeats_is_named(rank: int, two: list[Ranks], tmp_path: Path) -> None:
    """Also while this one is in a phase without a limit, and to the others."""
    folder, ended, codes = RunFolder(tmp_path, 1), threading.Event(), []

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    beats_of(two[rank]).start()
    with Watchdog(folder, HangDetector(1), phase=lambda: "checkpoint", step=lambda: 7, on_hang=end, ranks=two[rank]):
        assert ended.wait(60)
    folder.close()
    (event,) = read_lines(tmp_path, EVENTS, Event)
    assert (codes, event.data["hung"], event.data["exit_code"]) == ([7], "rank", 7)
    assert event.text.startswith(f"Rank {1 - rank} (process {os.getpid()} on {socket.gethostname()}) froze")
    beats_of(two[1 - rank]).start()
    end_s = time.monotonic() + 60
    while (told := two[1 - rank].failure_elsewhere()) is None and time.monotonic() < end_s:
        time.sleep(0.01)
    assert told is not None
    assert (told.rank, told.exit_code) == (rank, 7)


def test_a_rank_that_does_not_notice_a_failure_is_ended(
    two: list[Ranks], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watchdog, "FAILURE_GRACE_S", 0.05)
    codes: list[int] = []
    ended = threading.Event()

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    for ranks in two:
        beats_of(ranks).start()
    two[0].publish(DataError("Too many bad images."), is_consequence=False)
    folder = RunFolder(tmp_path, 1)
    with Watchdog(folder, HangDetector(60), phase=lambda: "checkpoint", step=lambda: 7, on_hang=end, ranks=two[1]):
        assert ended.wait(60)
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
