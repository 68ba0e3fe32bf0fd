"""A lack of descriptors, threads, processes or memory is named as that, never as bad data; telemetry survives it."""

import contextlib
import errno
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from stoker import regular_files
from stoker.cli import app
from stoker.data import index_cache
from stoker.errors import DataError, SystemLimitError, system_limit
from stoker.profiling.telemetry.sampler import TelemetrySampler
from stoker.runs.records import DEVICES, EVENTS, RunFolder, read_lines
from stoker.runs.schemas import DeviceSample, Event
from tests.drawn import draw

LIMITS = [
    (OSError(errno.EMFILE, "Too many open files", "x.jpg"), "ulimit -n"),
    (OSError(errno.ENFILE, "Too many open files in system"), "ulimit -n"),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), "memory"),
    (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "pids.max"),
    (RuntimeError("can't start new thread"), "pids.max"),
    # what Arrow 25 raises where pids.max is 4
    (pa.ArrowException("Unknown error: Failed to launch worker thread: Resource temporarily unavailable"), "pids.max"),
]
OTHERS = [FileNotFoundError(errno.ENOENT, "No such file"), PermissionError(errno.EACCES, "no"), RuntimeError("a bug")]


@contextlib.contextmanager
def no_free_descriptor() -> Iterator[None]:
    """Takes all descriptors of this process, of which it may have few more than now."""
    before, taken = resource.getrlimit(resource.RLIMIT_NOFILE), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 3, before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(("error", "named"), LIMITS, ids=str)
def test_a_limit_is_named(
    error: Exception, named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where a reader of data made an error of the data set of it."""

    def read(*_: object, **__: object) -> None:
        raise DataError("The image cannot be read.", location="x.jpg") from error

    monkeypatch.setattr(app, "app", read)
    monkeypatch.setattr(app, "translate", lambda arguments, _: (arguments, []))
    assert app._run(["models"]) == 1
    shown = capsys.readouterr().err
    assert named in shown
    assert "cannot be read" not in shown


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_other_errors_are_no_limit(error: Exception) -> None:
    assert system_limit(error) is None


def test_without_a_free_descriptor_no_file_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"whole")
    with no_free_descriptor():
        with pytest.raises(SystemLimitError) as of_bytes:
            regular_files.read_bytes(path)
        with pytest.raises(SystemLimitError) as of_index:
            index_cache.read(path, "stamp")
    assert {of_bytes.value.location, of_index.value.location} == {str(path)}
    assert regular_files.read_bytes(path) == b"whole"


def test_telemetry_goes_on_when_descriptors_are_free_again(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, attempt=1)
    run.event("started")
    sampler = TelemetrySampler(run, interval_s=0.02)

    def wait_for_lines(number: int) -> None:
        while len((tmp_path / DEVICES).read_bytes().splitlines() if (tmp_path / DEVICES).exists() else ()) < number:
            assert sampler._thread.is_alive()
            threading.Event().wait(0.02)

    with sampler:
        wait_for_lines(2)
        with no_free_descriptor():
            while b"Too many open files" not in os.pread(run._files[EVENTS], 1 << 20, 0):
                assert sampler._thread.is_alive()
                threading.Event().wait(0.02)
            threading.Event().wait(0.2)  # more samples that fail
        wait_for_lines(len(list(read_lines(tmp_path, DEVICES, DeviceSample))) + 3)
    run.close()
    warnings = [event.text for event in read_lines(tmp_path, EVENTS, Event) if event.kind == "warning"]
    assert ["Too many open files" in text for text in warnings] == [True]


IN_BETWEEN = """
import os, resource, sys, time
from stoker.training import make_step
from stoker.cli.app import main

real, calls = make_step.train_step, 0
taken = []

def step(*args, **kwargs):
    global calls
    calls += 1
    if calls == 40:  # the images are in the cache by now: a loader that must read them needs descriptors
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 3, 4096))
        try:
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            pass
    if calls in (41, 42):
        time.sleep(1.2)  # telemetry and the memory of the host are read once a second
    if calls == 43:
        while taken:
            os.close(taken.pop())
    return real(*args, **kwargs)

make_step.train_step = step
sys.argv[0] = "stoker"
main()
"""


def test_a_training_survives_a_lack_of_descriptors(tmp_path: Path) -> None:
    data, run = draw(tmp_path / "shapes", train=8, val=2), tmp_path / "run"
    flags = (
        "--model", "retinanet_tiny_fpn", "--image-size", "64", "64", "--batch-size", "2", "--steps", "60",
        "--workers", "1", "--precision", "fp32", "--cache", "ram", "--eval-every", "60", "--run-dir", str(run),
    )  # fmt: skip
    ended = subprocess.run(
        [sys.executable, "-c", IN_BETWEEN, "train", str(data), *flags], env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr + ended.stdout + (run / EVENTS).read_text()
    events = list(read_lines(run, EVENTS, Event))
    assert events[-1].kind == "finished"
    assert sum("devices.jsonl has gaps" in event.text for event in events) == 1
