"""Threads and slots that come and go while a loader runs change nothing of what it hands out."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from stoker.data.loading import loader as loader_module
from stoker.data.loading.loader import BUFFERS_IN_USE
from stoker.data.loading.samples import BatchTask
from stoker.data.loading.stats import default_num_workers
from stoker.data.loading.worker_pool import SampleTask, WorkerPool
from stoker_watch.hardware.cgroup import host_cores
from tests.trainer.data.loading import InMemoryIndex, LateDevice, assert_same, loader_threads, make, stream, take


@pytest.fixture
def index(tmp_path):
    return InMemoryIndex(tmp_path, 13)


def slowly(call, by):
    def wrapper(*args):
        time.sleep(by)
        return call(*args)

    return wrapper


@pytest.mark.slow
def test_a_loader_with_a_slow_disk_starts_more_workers_and_reports_it(index, monkeypatch):
    expected = stream(index, 60, workers=1)
    monkeypatch.setattr(loader_module, "POLL_INTERVAL_S", 0.1)
    monkeypatch.setattr(index, "read", slowly(index.read, 0.01))
    messages = []
    with make(index, workers="auto", on_tuned=messages.append) as loader:
        actual = take(loader, 1)
        first = loader.stats().workers
        assert len(loader_threads()) == first
        actual += take(loader, 59)
        assert loader.stats().workers > first
        assert len(loader_threads()) == loader.stats().workers
    assert_same(actual, expected)
    assert any("training waits" in sentence and "workers read" in sentence for sentence in messages), messages
    assert all(sentence.startswith("loader: ") for sentence in messages)


def test_given_workers_and_prefetch_depth_stay(index, monkeypatch):
    monkeypatch.setattr(loader_module, "POLL_INTERVAL_S", 0.02)
    monkeypatch.setattr(index, "read", slowly(index.read, 0.005))
    messages = []
    with make(index, workers=1, prefetch_depth=2, on_tuned=messages.append) as loader:
        take(loader, 30)
        assert (loader.stats().workers, loader.stats().prefetch_depth) == (1, 2)
    assert not messages


def test_an_autotuned_loader_begins_with_initial_workers(index):
    usual = default_num_workers(host_cores(), is_cpu=True)
    for initial, workers, expected in ((0, "auto", usual), (1, "auto", usual), (7, "auto", 7), (7, 3, 3)):
        with make(index, workers=workers, initial_workers=initial) as loader:
            assert loader.stats().workers == expected


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example([(1, 3), (1, 3), (1, 1)], True)  # every buffer is handed out when there are to be fewer
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 3)), min_size=1, max_size=8), st.booleans())
def test_the_stream_stays_whatever_is_tuned(index, course, on_device):
    """(threads, depth, which falls where memory is short) after each batch; a late device besides shows that no slot is
    given up that is still read."""
    course = [(workers, min(depth for _, depth in course[: k + 1])) for k, (workers, _) in enumerate(course)]
    device = {"device": LateDevice(2)} if on_device else {}
    actual = []
    with make(index, workers=2, **device) as loader:
        for workers, prefetch_depth in course:
            loader._autotuner.workers, loader._prefetch_depth = workers, prefetch_depth
            loader._rate_meter, loader_module.POLL_INTERVAL_S, kept = None, 0.0, loader_module.POLL_INTERVAL_S
            try:
                actual += [next(loader)] if on_device else take(loader, 1)
                loader._autotuner.update = lambda _seen: None
                actual += [next(loader)] if on_device else take(loader, 1)
            finally:
                loader_module.POLL_INTERVAL_S = kept
            assert len(loader._buffers) >= prefetch_depth + BUFFERS_IN_USE
        for _ in range(2 * max(prefetch_depth for _, prefetch_depth in course) + 2 * BUFFERS_IN_USE):
            actual += [next(loader)] if on_device else take(loader, 1)
        prefetch_depth = course[-1][1]
        assert len(loader._buffers) == prefetch_depth + BUFFERS_IN_USE
        if on_device:
            loader._device.finish()
    assert_same(actual, stream(index, len(actual)))


def test_workers_exit_when_fewer_are_wanted_and_the_rest_continues(index):
    with make(index, workers=6) as loader:
        next(loader)
        pool = loader._pool
        pool.resize(2)
        before = loader_threads()
        for thread in before:
            thread.join(0.01)
        take(loader, 12)
        deadline = time.monotonic() + 60
        while len(loader_threads()) > 2:
            assert time.monotonic() < deadline
        done = loader.stats().total.num_images
        pool.resize(3)
        assert len(loader_threads()) == 3
        take(loader, 6)
        assert loader.stats().total.num_images > done


def test_the_earliest_sample_is_taken_first():
    """However the tasks come in: one whose bytes come late must not wait behind those that are needed later."""
    order, written, entered, leave = [], [], threading.Event(), threading.Event()

    class Samples:
        def load(self, _batch_task, k, *_):
            entered.set()
            assert leave.wait(60)
            order.append(k)
            yield

        def annotate(self, *_):
            written.append(len(order))

    pool = WorkerPool(Samples(), 1)
    batch_task = BatchTask(0, 0, None, 8)
    batch_task.num_loading = batch_task.num_missing = 6
    pool.submit(SampleTask(7, batch_task, 7, None))
    assert entered.wait(60)
    for k in (5, 2, 6, 0, 3):
        pool.submit(SampleTask(k, batch_task, k, None))
    assert len(pool._tasks) == 5
    leave.set()
    with pool.batch_done:
        assert pool.batch_done.wait_for(lambda: batch_task.num_missing == 0, 60)
    pool.stop()
    pool.join()
    assert order == [7, 0, 2, 3, 5, 6]
    assert written == [6]  # once, after the last of them


def test_stats_show_what_is_in_progress(index, monkeypatch):
    entered, leave = threading.Semaphore(0), threading.Event()
    real = index.read

    def stuck(image_index):
        entered.release()
        assert leave.wait(60)
        return real(image_index)

    monkeypatch.setattr(index, "read", stuck)
    with make(index, workers=3, prefetch_depth=1) as loader:
        asking = threading.Thread(target=next, args=(loader,))
        asking.start()
        for _ in range(3):
            assert entered.acquire(timeout=60)
        while (stats := loader.stats()).loading < 4 * (1 + BUFFERS_IN_USE):
            assert asking.is_alive()
        assert (stats.workers, stats.prefetch_depth) == (3, 1)
        assert (stats.total.num_images, stats.ready, loader.position) == (0, 0, 0)
        later = loader.stats()
        assert later.total.read_s > stats.total.read_s > 0  # also what is not ended counts
        leave.set()
        asking.join(60)
    stats = loader.stats()
    assert stats.loading == 0


@pytest.mark.slow
def test_host_memory_is_flat_over_twenty_epochs(tmp_path):
    """Resident memory at the ends of epochs 5 and 20, in a process of its own that does nothing else."""
    InMemoryIndex(tmp_path, 200)
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[3])!r})
import pathlib, statistics, psutil
from tests.trainer.data import loading
index = loading.InMemoryIndex(pathlib.Path({str(tmp_path)!r}), 200)
process, seen = psutil.Process(), []
with loading.make(index, workers="auto", batch_size=8, image_size=(256, 256)) as loader:
    for epoch in range(20):
        samples = []
        for _ in range(25):
            next(loader)
            samples.append(process.memory_info().rss)
        seen.append(statistics.median(samples))
print(seen[4], seen[19])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    fifth, last = map(float, done.stdout.split())
    assert last / fifth - 1 < 0.02, (fifth, last)
