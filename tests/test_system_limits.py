"""A lack of descriptors, threads, processes or memory is named as that, never as bad data; telemetry survives it."""

import contextlib
import errno
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from stoker.cli import commands
from stoker.config.settings import from_fields
from stoker.data import index_cache
from stoker.data.loading import process_main
from stoker.data.loading.worker_pool import WorkerPool
from stoker.training.local_ranks import TrainOptions, make_places
from stoker.training.ranks import joined
from stoker.training.run import train
from stoker_watch import regular_files
from stoker_watch.cli import app
from stoker_watch.errors import DataError, SystemLimitError, system_limit
from stoker_watch.monitor.options import MonitoringOptions
from stoker_watch.recording.telemetry.machine import TimeoutWorker
from stoker_watch.recording.telemetry.sampler import TelemetrySampler
from stoker_watch.runs.records import DEVICES, EVENTS, RunFolder, read_lines
from stoker_watch.runs.schemas import DeviceSample, Event
from tests.drawn import draw
from tests.trainer.training.metadata_server import metadata_server
from tests.watch.storage.servers import Server, apply, google_server

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
def no_free_descriptor() -> Iterator[Callable[[], None]]:
    """Takes all descriptors of this process, of which it may have few more than now. Gives a function that takes those
    which others have given back since."""
    before, taken = resource.getrlimit(resource.RLIMIT_NOFILE), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 3, before[1]))

    def take() -> None:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))

    try:
        take()
        yield take
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
    monkeypatch.setattr(commands, "prepare", lambda _, arguments: arguments)
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
            index_cache.read_index(path, "stamp")
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
        with no_free_descriptor() as take_more:
            while b"Too many open files" not in os.pread(run._files[EVENTS][0], 1 << 20, 0):
                assert sampler._thread.is_alive()
                threading.Event().wait(0.02)
                take_more()  # the sampler may have had a file open
            threading.Event().wait(0.2)  # more samples that fail
        wait_for_lines(len(list(read_lines(tmp_path, DEVICES, DeviceSample))) + 3)
    run.close()
    warnings = [event.text for event in read_lines(tmp_path, EVENTS, Event) if event.kind == "warning"]
    assert ["Too many open files" in text for text in warnings] == [True]


IN_BETWEEN = """
import os, resource, sys, time
from stoker.training import make_step
from stoker_watch.cli.app import main

real, calls = make_step.train_step, 0
taken = []

def step(*args, **kwargs):
    global calls
    calls += 1
    if calls == 40:  # the images are in the cache by now: a loader that must read them needs descriptors
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 3, 4096))
    if calls in (40, 41, 42):  # again: another thread may have had some open, and closed them
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


THREADS = (
    "stacks", "monitor", "metrics", "stoker-tensorboard", "telemetry", "stoker-watchdog", "stoker-loader",
    "stoker-notices", "stoker-scorer", "stoker-lease", "stoker-uploads",
)  # fmt: skip


@pytest.fixture(scope="module")
def served() -> Iterator[Server]:
    with google_server() as server:
        yield server


@pytest.mark.parametrize("name", THREADS)
def test_a_thread_that_cannot_be_started_is_the_error_of_a_training(
    name: str, served: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever it is, what ends the others on the way out hides it behind no error of its own."""
    bucket, start, refused = served.bucket(), threading.Thread.start, []

    def start_unless_refused(thread: threading.Thread) -> None:
        if thread.name == name:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    with metadata_server() as metadata:
        apply(monkeypatch, bucket.environment)
        monkeypatch.setenv("GCE_METADATA_HOST", metadata.address)
        monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path / "cache"))
        monkeypatch.setattr(threading.Thread, "start", start_unless_refused)
        settings = from_fields(
            {
                "data": str(draw(tmp_path / "shapes", train=8, val=2)), "model": "retinanet_tiny_fpn",
                "image_size": (64, 64), "batch_size": 2, "max_duration": "2", "workers": 1, "precision": "fp32",
            }
        )  # fmt: skip
        with pytest.raises(RuntimeError, match="can't start new thread") as caught:
            train(settings, TrainOptions(run_dir=f"{bucket.uri}/runs/x", monitor=MonitoringOptions(metrics_port=0)))
    assert refused
    assert system_limit(caught.value) is not None


def refuse(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_pool_that_gets_no_more_threads_can_still_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = WorkerPool(None, 1)  # type: ignore[arg-type]  # no samples are loaded
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            pool.resize(2)
    pool.stop()
    pool.join()
    assert pool.is_idle


def test_a_query_that_gets_no_thread_can_still_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = TimeoutWorker(lambda: 1, name="query")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            worker.call(1.0)
    assert worker.stop()


def test_a_rank_without_threads_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of libstdc++: it is not the network."""

    def make_store(*_: object, **__: object) -> None:
        raise RuntimeError("Resource temporarily unavailable")

    place, before = make_places(2)[1], dict(os.environ)
    monkeypatch.setattr("torch.distributed.TCPStore", make_store)
    try:
        with pytest.raises(SystemLimitError, match="no more threads or processes"), joined(place):
            pass
    finally:  # a rank tells libraries its place by variables
        os.environ.clear()
        os.environ.update(before)


def test_a_worker_process_names_the_limit(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    process_main._or_exit(refuse)(threading.current_thread())
    process_main._or_exit(lambda: {}["a bug"])()
    shown = capfd.readouterr().err
    assert codes == [1, 1]
    assert "no more threads or processes" in shown
    assert shown.count("Traceback") == 1
    assert "KeyError" in shown
