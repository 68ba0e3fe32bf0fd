"""The telemetry sampler in a real run folder."""

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stoker_watch.recording.telemetry import sampler
from stoker_watch.recording.telemetry.gpu import Gpu
from stoker_watch.recording.telemetry.sampler import TelemetrySampler
from stoker_watch.runs.records import DEVICES, EVENTS, RunFolder, read_lines
from stoker_watch.runs.schemas import DeviceSample, Event, GpuSample
from tests.nvml import Scene, driver_library


class NotifyingRunFolder(RunFolder):
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
    run = NotifyingRunFolder(tmp_path)
    with TelemetrySampler(run, interval_s=0.01) as telemetry:
        run.wait_for(5)
    samples = list(read_lines(tmp_path, DEVICES, DeviceSample))
    assert len(samples) == run.lines >= 5
    assert telemetry.last == samples[-1]
    assert not telemetry._thread.is_alive()
    assert [sample.attempt for sample in samples] == [2] * len(samples)
    assert all(new.t >= old.t for old, new in itertools.pairwise(samples))
    assert samples[-1].rss_bytes
    assert samples[-1].memory_limit_bytes
    assert list(read_lines(tmp_path, EVENTS, Event)) == []


def test_it_stops_in_the_middle_of_a_long_interval(tmp_path: Path) -> None:
    """A stop that waited for the interval would run into the test's time limit."""
    telemetry = TelemetrySampler(RunFolder(tmp_path, 1), interval_s=100_000)
    telemetry.__enter__()
    telemetry.stop(timeout_s=100_000)
    assert not telemetry._thread.is_alive()


def test_when_it_fails_there_is_one_warning_and_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __init__(self, *, pid: int | None, run_dir: Path) -> None:
            assert pid is None
            assert run_dir == tmp_path

        def sample(self, **_: object) -> None:
            raise ZeroDivisionError("no such counter")

        def close(self) -> None:
            pass

    monkeypatch.setattr(sampler, "HostSampler", Broken)
    run = NotifyingRunFolder(tmp_path)
    with TelemetrySampler(run, interval_s=0.001):
        run.wait_for(1)
    events = list(read_lines(tmp_path, EVENTS, Event))
    assert [(event.kind, event.text) for event in events] == [
        ("warning", "devices.jsonl ends here: ZeroDivisionError: no such counter")
    ]


def test_a_gpu_that_is_lost_is_a_warning_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Losing:
        def __init__(self, env: Mapping[str, str], *, pid: int | None) -> None:
            assert (env, pid) == (os.environ, None)
            self.reason: str | None = None
            self.gpus: list[Gpu] = []

        def sample(self) -> list[GpuSample]:
            self.reason = "GPU 0 does not answer any more"
            return [GpuSample(index=0)]

    monkeypatch.setattr(sampler, "GpuSampler", Losing)
    run = NotifyingRunFolder(tmp_path)
    with TelemetrySampler(run, interval_s=0.001):
        run.wait_for(6)
    texts = [event.text for event in read_lines(tmp_path, EVENTS, Event)]
    assert texts == ["telemetry: GPU 0 does not answer any more"]
    assert next(read_lines(tmp_path, DEVICES, DeviceSample)).gpus == [GpuSample(index=0)]


def test_the_gpus_of_a_watched_job_are_those_that_it_may_use() -> None:
    started = ["sh", "-c", "echo; read ended"]  # between the start and its first line, Linux may show no variables
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(started, **pipes, env={"CUDA_VISIBLE_DEVICES": "3"}) as job:
        assert job.stdout is not None
        job.stdout.readline()
        assert sampler._variables_of(job.pid) == {"CUDA_VISIBLE_DEVICES": "3"}
        job.kill()
    assert sampler._variables_of(job.pid) is sampler._variables_of(None) is os.environ


# --- a driver that reports errors, hangs, and loses its GPU

SAMPLE = """
import json, sys, threading
from pathlib import Path
from stoker_watch.recording.telemetry import sampler
from stoker_watch.runs.records import RunFolder
sampler.DRIVER_HANG_S = 0.4
sampler.DRIVER_TIMEOUT_S = 0.1
telemetry = sampler.TelemetrySampler(RunFolder(Path(sys.argv[1]), 1), interval_s=0.02)
telemetry.__enter__()
sys.stdin.read()
telemetry.stop(30)
left = sorted(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
print(json.dumps([telemetry._thread.is_alive(), left]))
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = driver_library(tmp_path_factory.mktemp("driver"))
    if library is None:
        pytest.skip("needs Linux and a C compiler to build the stub of NVIDIA's driver library")
    return library


@contextmanager
def watched(driver: Path, run: Path, scene: Scene) -> Iterator[list[Any]]:
    """A process that watches into `run`; after it, in the list: whether the sampler still runs, the threads it left."""
    clean = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    ended: list[Any] = []
    process = subprocess.Popen(
        [sys.executable, "-c", SAMPLE, str(run)], env=clean | scene.variables(driver), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield ended
        out, error = process.communicate(timeout=60)
        assert process.returncode == 0, error
        ended += json.loads(out)
    finally:
        process.kill()
        process.wait()


def until(
    run: Path, holds: Callable[[list[DeviceSample], list[Event]], bool]
) -> tuple[list[DeviceSample], list[Event]]:
    """The lines of the run as soon as they fulfil a condition."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        records = list(read_lines(run, DEVICES, DeviceSample)), list(read_lines(run, EVENTS, Event))
        if holds(*records):
            return records
        time.sleep(0.005)
    raise AssertionError(f"did not come about: {records}")


def test_an_error_that_the_driver_reports_is_an_event_and_in_the_next_line(driver: Path, tmp_path: Path) -> None:
    scene = Scene(tmp_path / "scene", "0 xid 13\n").say("-1", count=2).say("*", utilization=50)
    with watched(driver, tmp_path, scene) as ended:
        until(tmp_path, lambda lines, _: any(line.gpus for line in lines))
        for _ in range(3):
            scene.say("1", xid=79)
        until(tmp_path, lambda lines, _: sum(len(gpu.xids) for line in lines for gpu in line.gpus) == 3)
    lines = list(read_lines(tmp_path, DEVICES, DeviceSample))
    events = list(read_lines(tmp_path, EVENTS, Event))
    assert {gpu.index for line in lines for gpu in line.gpus if gpu.xids} == {1}
    assert {xid for line in lines for gpu in line.gpus for xid in gpu.xids} == {79}, "13 was before our time"
    assert len(events) == 1, "each error of a GPU once"
    records = {(event.kind, event.data.get("xid"), event.data["gpu"]) for event in events}
    assert records == {("gpu_fault", 79, 1)}
    assert {event.text for event in events} == {"GPU 1: Xid 79"}
    assert ended == [False, []]


def test_a_driver_that_hangs_costs_the_gpus_numbers_only(driver: Path, tmp_path: Path) -> None:
    scene = Scene(tmp_path / "scene").say("-1", count=1).say("0", utilization=50)
    with watched(driver, tmp_path, scene) as ended:
        until(tmp_path, lambda lines, _: any(line.gpus for line in lines))
        scene.say("0", hang__nvmlDeviceGetUtilizationRates=1)
        until(tmp_path, lambda lines, events: len(events) == 1 and lines[-1].gpus == [GpuSample(index=0)])
        before = len(list(read_lines(tmp_path, DEVICES, DeviceSample)))
        lines, _ = until(tmp_path, lambda lines, _: len(lines) >= before + 3)
        assert lines[-1].rss_bytes, "the host goes on"
        scene.say("0", hang__nvmlDeviceGetUtilizationRates=0)
        until(tmp_path, lambda lines, events: len(events) == 2 and lines[-1].gpus[0].utilization == 0.5)
        scene.say("*", hang__nvmlDeviceGetUtilizationRates=1)
        until(tmp_path, lambda _, events: len(events) == 3)
    assert ended == [False, ["driver"]], "what hangs is left behind, and holds up no end"
    texts = [event.text for event in read_lines(tmp_path, EVENTS, Event)]
    assert [text.partition(" for ")[0].partition(",")[0] for text in texts] == [
        "telemetry: the driver has not answered", "telemetry: the driver answers again",
        "telemetry: the driver has not answered",
    ]  # fmt: skip


def test_when_errors_are_no_longer_received_there_is_a_warning(driver: Path, tmp_path: Path) -> None:
    scene = Scene(tmp_path / "scene").say("-1", count=1).say("0", utilization=50)
    with watched(driver, tmp_path, scene) as ended:
        until(tmp_path, lambda lines, _: any(line.gpus for line in lines))
        scene.say("-1", fail__nvmlEventSetWait=15)
        scene.say("0", fail__nvmlDeviceGetUtilizationRates=15)
        until(tmp_path, lambda _, events: len(events) == 2)
    assert {event.text for event in read_lines(tmp_path, EVENTS, Event)} == {
        "telemetry: errors of the GPUs are no longer received: GPU is lost",
        "telemetry: GPU 0 does not answer any more: GPU is lost",
    }
    assert ended == [False, []]
