"""Worker processes: the same batches as with threads, and an end for every process whatever happens.

The first part runs tests of the loader with threads once more, on processes.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from stoker.data.images.pixel_cache import CachedImageSpec, PixelCache
from stoker.data.loading import processes as processes_module
from stoker.data.loading.loader import choose_prefetch_depth
from stoker.data.loading.process_main import load_payload
from stoker.data.loading.processes import MIN_CORES, WorkerProcesses, choose_worker_processes, save_payload
from stoker_watch.errors import OutOfMemoryError, PreflightError, StokerError
from tests.fixtures.data_loader import (  # noqa: F401
    test_a_batch_keeps_the_contract,
    test_a_batch_larger_than_the_data_set,
    test_a_batch_on_the_cpu_stays_until_the_next_but_one,
    test_a_real_data_set,
    test_an_abandoned_evaluation_starts_again,
    test_an_evaluation_batch_maps_back_to_the_original,
    test_evaluation_on_ranks_has_as_many_batches_on_each,
    test_evaluation_shows_every_row_once_in_order,
    test_every_epoch_shows_every_image_once_in_another_order,
    test_image_indices_at_equals_what_was_handed_out,
    test_load_state_dict_goes_back,
    test_more_boxes_than_max_boxes_is_an_error_with_the_path,
    test_stats_tell_reading_from_decoding_and_waiting,
    test_the_stream_does_not_depend_on_batch_depth_or_ranks,
)
from tests.fixtures.data_loader_quarantine import (  # noqa: F401
    test_a_bad_image_is_quarantined_by_name_and_replaced,
    test_a_missing_dataset_stops_the_run,
    test_a_resumed_run_repeats_a_replacement_though_the_file_is_back,
    test_an_image_is_used_up_to_the_position_from_which_it_is_quarantined,
    test_evaluation_leaves_a_bad_image_out_and_reports_it,
)
from tests.fixtures.data_pixel_cache import draw
from tests.trainer.data import loading
from tests.trainer.data.loading import CPU, InMemoryIndex, LateDevice, assert_same, make, stream, take
from tests.trainer.data.memory_index import SlowIndex

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="worker processes need Linux")


@pytest.fixture(scope="module")
def running():
    """Two processes, which serve all tests that kill none."""
    running = WorkerProcesses(2, CPU)
    yield running
    running.close()


@pytest.fixture(autouse=True)
def processes(running, monkeypatch):
    """Loaders of the tests use them."""
    monkeypatch.setattr(loading, "default_processes", running)
    return running


@pytest.fixture
def index(tmp_path):
    return InMemoryIndex(tmp_path, 13)


@pytest.fixture
def threaded(monkeypatch):
    """The stream of a loader with threads."""

    def threaded(index, count, **changes):
        with monkeypatch.context() as context:
            context.setattr(loading, "default_processes", None)
            return stream(index, count, **changes)

    return threaded


# The same batches.


@pytest.mark.parametrize("changes", [{}, {"batch_size": 5, "workers": 5}, {"train": False}, {"resize": "squash"}])
def test_batches_are_those_of_threads(index, threaded, changes):
    count = 99 if "train" in changes else 12
    assert_same(stream(index, count, **changes), threaded(index, count, **changes))


def test_a_state_goes_from_threads_to_processes_and_back(index, threaded):
    with make(index) as loader:
        take(loader, 3)
        state = loader.state_dict()
    expected = threaded(index, 9)
    with make(index) as loader:
        loader.load_state_dict(state)
        assert_same(take(loader, 6), expected[3:])


def test_an_image_that_came_back_is_loaded_again_as_with_threads(tmp_path, threaded):
    """It fails at its first place; while that is not known yet, other processes load it at later places."""
    index = InMemoryIndex(tmp_path, 3)
    expected_first = threaded(index, 1, batch_size=3)[0].image_index[2].item()
    path, hidden = index.path(expected_first), tmp_path / "hidden"
    path.rename(hidden)
    excluded = []
    with make(index, batch_size=3, prefetch_depth=1, on_quarantine=excluded.append) as loader:
        actual = take(loader, 1)
        hidden.rename(path)
        actual += take(loader, 9)
    assert [one.image_index for one in excluded] == [expected_first]
    path.unlink()
    assert_same(actual, threaded(index, 10, batch_size=3))


def test_a_cache_is_filled_and_read(tmp_path, threaded):
    index, image_size = draw(tmp_path / "set", 12), (64, 96)
    spec, messages = CachedImageSpec(image_size, "letterbox", 1.25), []

    def make_cache(max_bytes=2**30):
        fd = os.open(tmp_path / "cache", os.O_RDWR | os.O_CREAT)
        return PixelCache(index, spec, fd, max_bytes=max_bytes, on_error=messages.append)

    first = stream(index, 9, cache=make_cache(), image_size=image_size)
    with make(index, cache=make_cache(), image_size=image_size) as loader:
        assert_same(take(loader, 9), first)
        assert loader.stats().total.cache_hits >= 36
    assert_same(threaded(index, 9, cache=make_cache(), image_size=image_size), first)
    assert not messages
    (tmp_path / "cache").unlink()
    assert_same(stream(index, 9, cache=make_cache(max_bytes=1), image_size=image_size), first)
    assert len(messages) == 1  # though each process finds it full
    assert "reached its limit" in messages[0]


def test_a_device_gets_what_the_processes_wrote(index, threaded):
    device = LateDevice(1)
    with make(index, device=device) as loader:
        actual = [next(loader) for _ in range(9)]
        device.finish()
    assert_same(actual, threaded(index, 9))


def test_workers_are_spread_and_counted(index):
    with make(index, workers=3) as loader:
        take(loader, 2)
        assert loader._pool._threads_per_process(3) == [2, 1]
        loader._pool.resize(6)
        take(loader, 20)
    stats = loader.stats()
    assert stats.workers == 3
    assert stats.processes_cpu_s > 0
    assert stats.total.num_images >= 88
    with make(index, workers=1) as loader:
        assert loader.stats().workers == 2  # each process has one


def test_waiting_for_slow_files_is_fetching(tmp_path):
    waits: Counter[str] = Counter()
    with make(SlowIndex(tmp_path, 13)) as loader:
        for _ in range(9):
            begin_s = time.perf_counter()
            next(loader)
            for end_s, stage in loader.last_wait:
                waits[stage] += end_s - begin_s
                begin_s = end_s
        stats = loader.stats()
    assert waits["fetch"] > 3 * waits["decode"]
    assert stats.total.read_s > 36 * 0.03


def test_small_batches_are_prefetched_deeper():
    assert [choose_prefetch_depth(batch_size, 16) for batch_size in (1, 8, 64)] == [16, 10, 3]


@pytest.mark.parametrize("changes", [{"jpeg_decoder": "nvjpeg"}, {}])
def test_what_processes_cannot_load_is_refused(index, monkeypatch, changes):
    monkeypatch.setattr(InMemoryIndex, "remote_object", lambda *_: None if changes else ("store", "key", 0, None))
    monkeypatch.setattr("stoker.data.loading.loader.DeviceBatchDecoder", lambda *_: None)
    with pytest.raises(ValueError, match="worker processes"):
        make(index, **changes)


def test_memory_is_used_again(index, processes):
    for _ in range(3):
        stream(index, 2, batch_size=3)
    layouts = [ring.layout for ring in processes._free_rings]
    assert len(layouts) == len(set(layouts))


def wait_until_gone(pids):
    """Until the processes have no stream any more."""
    deadline_s = time.monotonic() + 60
    while any("stoker-index" in Path(f"/proc/{pid}/maps").read_text() for pid in pids):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_closed_stream_is_gone_from_the_processes(index, processes):
    stream(index, 2)
    wait_until_gone(processes.pids)


# Errors and ends.


def test_an_error_of_an_image_has_its_name_and_the_traceback(index):
    with make(index, max_boxes=1) as loader, pytest.raises(RuntimeError, match="max_boxes is 1") as caught:
        take(loader, 9)
    assert "in worker process" in caught.value.__notes__[0]
    assert "samples.py" in caught.value.__notes__[0]


class Unloadable:
    def __reduce__(self):
        return (os.lstat, ("/there/is/no/such/file",))


def test_a_stream_that_cannot_be_opened_is_an_error(index):
    index.something = Unloadable()
    with make(index) as loader, pytest.raises(OSError, match="such/file"):
        next(loader)


@pytest.mark.parametrize(
    ("signal_number", "oom_kills", "kind", "match"),
    [
        (signal.SIGKILL, None, StokerError, "was killed by SIGKILL"),
        (signal.SIGKILL, 3, OutOfMemoryError, "memory ran out"),
        (signal.SIGSEGV, None, StokerError, "was killed by SIGSEGV"),
    ],
)
def test_a_killed_process_is_named(index, monkeypatch, signal_number, oom_kills, kind, match):
    mine = WorkerProcesses(2, CPU)
    monkeypatch.setattr(processes_module.Cgroup, "oom_kills", lambda _: oom_kills)
    with make(index, processes=mine) as loader:
        take(loader, 2)
        os.kill(mine.pids[1], signal_number)
        with pytest.raises(kind, match=match) as caught:
            take(loader, 99)
        assert f"process 2 of 2 (pid {mine.pids[1]})" in str(caught.value)
        with pytest.raises(kind, match=match):  # and stays stopped
            next(loader)
    mine.close()
    assert [child.returncode for child in mine._children] == [0, -signal_number]


def test_a_process_killed_before_it_has_started_is_named(index):
    mine = WorkerProcesses(2, CPU)
    os.kill(mine.pids[0], signal.SIGKILL)
    with pytest.raises(StokerError, match="SIGKILL"), make(index, processes=mine) as loader:
        take(loader, 99)
    mine.close()


def test_a_process_that_is_killed_in_the_middle_of_a_report_is_named(index):
    """The length of a message, and less than it says: then the end of the connection."""
    mine = WorkerProcesses(1, CPU)
    ours, theirs = socket.socketpair()
    theirs.sendall((1000).to_bytes(4, "big") + b"half")
    theirs.close()
    loader = make(index, processes=mine)
    os.kill(mine.pids[0], signal.SIGKILL)
    mine._children[0].wait()
    with ours:
        os.dup2(ours.fileno(), mine._connections[0].fileno())
    with pytest.raises(StokerError, match="was killed by SIGKILL"):
        mine.receive(0)
    loader.close()
    mine.close()


def test_the_others_hear_of_an_end_where_one_was_killed(index):
    mine = WorkerProcesses(2, CPU)
    loader = make(index, processes=mine)
    take(loader, 2)
    os.kill(mine.pids[0], signal.SIGKILL)
    mine._children[0].wait()
    loader.close()
    wait_until_gone([mine.pids[1]])
    mine.close()


def test_signals_of_a_job_do_not_end_a_process(index, processes):
    with make(index) as loader:
        take(loader, 2)
        for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            for pid in processes.pids:
                os.kill(pid, signal_number)
        take(loader, 9)


def test_without_an_interpreter_there_are_no_processes(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/there/is/no/python")
    with pytest.raises(PreflightError, match="--worker-processes 0"):
        WorkerProcesses(2, CPU)


def test_children_do_without_torch(index, processes):
    with make(index) as loader:
        take(loader, 2)
        for pid in processes.pids:
            maps = Path(f"/proc/{pid}/maps").read_text()
            assert "stoker-batches" in maps
            assert "libtorch" not in maps


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "interrupted", "abandoned", "forked"])
def test_processes_end_with_the_training_process(index, how):
    code = f"""
import os, pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
from stoker.data.loading.processes import WorkerProcesses
from tests.trainer.data import loading
index = loading.InMemoryIndex(pathlib.Path({str(index.root)!r}), 13)
processes = WorkerProcesses(2, loading.CPU)
loader = loading.make(index, processes=processes)
next(loader)
if {how!r} == "forked" and os.fork() == 0:
    time.sleep(60)  # keeps copies of all sockets
print(*processes.pids, flush=True)
while {how!r} != "abandoned":
    next(loader)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    if how in ("killed", "forked"):
        parent.kill()
    elif how == "interrupted":
        parent.send_signal(signal.SIGINT)
    code = parent.wait(60)
    deadline_s = time.monotonic() + 30
    while any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    assert code == {"killed": -9, "forked": -9, "abandoned": 0}.get(how, code)
    if how == "forked":
        os.killpg(parent.pid, signal.SIGKILL)
    errors = parent.stderr.read()
    assert ("KeyboardInterrupt" in errors) == (how == "interrupted")
    assert errors.count("Traceback") == (how == "interrupted")


@pytest.mark.slow
def test_close_from_another_thread_ends_a_wait_for_a_stuck_process(index):
    image_index = stream(index, 1, workers=2)[0].image_index[1].item()
    index.path(image_index).unlink()
    os.mkfifo(index.path(image_index))  # opening it blocks, as on a file system that does not respond
    mine, caught = WorkerProcesses(2, CPU), []
    loader = make(index, processes=mine)

    def ask():
        try:
            next(loader)
        except RuntimeError as error:
            caught.append(str(error))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    while loader.stats().total.read_s < 1:  # it is still being read
        assert asking.is_alive()
    loader.close()
    asking.join(60)
    assert "closed" in caught[0]
    assert not mine._free_rings  # the stuck process may still write
    mine.close()
    assert all(child.returncode is not None for child in mine._children)


# Memory and messages.


def test_a_payload_comes_back_with_its_arrays_in_shared_memory():
    payload = {"a": np.arange(1000), "b": np.zeros((0, 4)), "text": "x" * 100, "c": np.ones(3, bool)}
    loaded = load_payload(*save_payload(payload))
    assert loaded["text"] == payload["text"]
    for name in "abc":
        assert np.array_equal(loaded[name], payload[name])
        assert not loaded[name].flags.owndata


@pytest.mark.parametrize(
    ("requested", "changes", "expected"),
    [
        ("auto", {}, 4),
        ("auto", {"cores": MIN_CORES}, 2),
        ("auto", {"cores": MIN_CORES - 1}, 0),
        ("auto", {"cores": 128}, 8),
        ("auto", {"is_cpu": True}, 0),
        ("auto", {"is_remote": True}, 0),
        ("auto", {"jpeg_decoder": "nvjpeg"}, 0),
        (0, {}, 0),
        (3, {"is_cpu": True, "cores": 1}, 3),
        (3, {"is_remote": True}, 0),
    ],
)
def test_the_number_of_processes(requested, changes, expected):
    facts = {"is_cpu": False, "cores": 16, "is_remote": False, "jpeg_decoder": "cpu"} | changes
    count, reason = choose_worker_processes(requested, **facts)
    assert count == expected
    assert reason
