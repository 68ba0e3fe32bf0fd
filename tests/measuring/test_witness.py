"""The second witness in a real run folder."""

import itertools
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.measuring import witness
from stoker.measuring.witness import Witness, next_due
from stoker.records import DEVICES, EVENTS, RunFolder, read_lines
from stoker.schemas import DeviceSample, Event, GpuSample


class Watched(RunFolder):
    """A run folder that tells when it got lines."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, attempt=2)
        self.lines = 0
        self.more = threading.Condition()

    def append(self, name: str, line: msgspec.Struct) -> None:
        super().append(name, line)
        with self.more:
            self.lines += 1
            self.more.notify_all()

    def wait_for(self, lines: int) -> None:
        with self.more:
            assert self.more.wait_for(lambda: self.lines >= lines, timeout=60)


def test_it_writes_lines_until_it_is_stopped(tmp_path: Path) -> None:
    run = Watched(tmp_path)
    with Witness(run, interval_s=0.01) as watching:
        run.wait_for(5)
    samples = list(read_lines(tmp_path, DEVICES, DeviceSample))
    assert len(samples) == run.lines >= 5
    assert watching.last == samples[-1]
    assert not watching._thread.is_alive()
    assert [sample.attempt for sample in samples] == [2] * len(samples)
    assert all(new.t >= old.t for old, new in itertools.pairwise(samples))
    assert samples[-1].rss_bytes
    assert samples[-1].memory_limit_bytes
    assert list(read_lines(tmp_path, EVENTS, Event)) == []


def test_it_stops_in_the_middle_of_a_long_interval(tmp_path: Path) -> None:
    """A stop that waited for the interval would run into the test's time limit."""
    watching = Witness(RunFolder(tmp_path, 1), interval_s=100_000)
    watching.start()
    watching.stop(timeout_s=100_000)
    assert not watching._thread.is_alive()


def test_when_it_fails_it_says_so_once_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __init__(self, *, pid: int | None) -> None:
            assert pid is None

        def sample(self) -> None:
            raise ZeroDivisionError("no such counter")

    monkeypatch.setattr(witness, "Host", Broken)
    run = Watched(tmp_path)
    with Witness(run, interval_s=0.001):
        run.wait_for(1)
    events = list(read_lines(tmp_path, EVENTS, Event))
    assert [(event.kind, event.text) for event in events] == [
        ("warning", "devices.jsonl ends here: ZeroDivisionError: no such counter")
    ]


def test_a_gpu_that_is_lost_is_a_warning_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Losing:
        def __init__(self) -> None:
            self.reason: str | None = None

        def sample(self) -> list[GpuSample]:
            self.reason = "GPU 0 does not answer any more"
            return [GpuSample(index=0)]

    monkeypatch.setattr(witness, "Gpus", Losing)
    run = Watched(tmp_path)
    with Witness(run, interval_s=0.001):
        run.wait_for(6)
    texts = [event.text for event in read_lines(tmp_path, EVENTS, Event)]
    assert texts == ["telemetry: GPU 0 does not answer any more"]
    assert next(read_lines(tmp_path, DEVICES, DeviceSample)).gpus == [GpuSample(index=0)]


@given(st.integers(0, 10_000), st.integers(0, 10_000), st.integers(1, 50))
def test_lines_keep_to_multiples_of_the_interval(due: int, late: int, interval: int) -> None:
    """However late a sample ends, the next line is the first one on the grid that is still to come."""
    following = next_due(due, due + late, interval)
    assert (following - due) % interval == 0
    assert due + late < following <= due + late + interval
    assert next_due(due, due - 1, interval) == due + interval, "woken early: never twice for one moment"
