"""A loader's errors, its end, and a device's copies: nothing swallowed, no thread left, nothing overwritten."""

import errno
import gc
import itertools
import subprocess
import sys
import threading

import pytest
import torch

from stoker.data.loading import samples
from stoker.data.loading.loader import BUFFERS_IN_USE
from stoker_watch.errors import OutOfMemoryError, SystemLimitError
from tests.trainer.data.loading import (
    PREFETCH_DEPTH,
    InMemoryIndex,
    LateDevice,
    assert_same,
    image_indices_of,
    loader_threads,
    make,
    stream,
    take,
    wait_until_full,
)


@pytest.fixture
def index(tmp_path):
    return InMemoryIndex(tmp_path, 13)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not loader_threads()


# Bugs and ends.


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KeyError("oops"), RuntimeError),
        (MemoryError(), OutOfMemoryError),
        (OSError(errno.EMFILE, "Too many open files"), SystemLimitError),  # says nothing about the image
    ],
)
def test_an_unexpected_exception_surfaces_with_the_name(index, monkeypatch, error, kind):
    real = samples.decode.decode_into

    def broken(data, path, **rest):
        if path == index.path_text(8):
            raise error
        real(data, path, **rest)

    monkeypatch.setattr(samples.decode, "decode_into", broken)
    with make(index) as loader:
        for _ in range(2):
            with pytest.raises(kind) as caught:
                take(loader, 9)
            assert str(index.path(8)) in str(caught.value)
            assert caught.value.__cause__ is error
        assert not loader.state_dict()["quarantined"]


@pytest.mark.parametrize("batches", [0, 1, 5])
@pytest.mark.parametrize("workers", [1, 4])
def test_close_joins_all_threads_in_the_middle_of_an_epoch(index, batches, workers):
    before = set(threading.enumerate())
    loader = make(index, workers=workers)
    take(loader, batches)
    assert len(loader_threads()) == (workers if batches else 0)
    loader.close()
    assert set(threading.enumerate()) == before
    loader.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(loader)


def test_close_joins_workers_that_wait_for_a_free_buffer(index):
    loader = make(index)
    next(loader)
    wait_until_full(loader)
    loader.close()
    assert not loader_threads()
    assert loader.stats().total.num_images == 4 * (PREFETCH_DEPTH + BUFFERS_IN_USE)


def test_close_from_another_thread_ends_a_wait(index, monkeypatch):
    entered, leave = threading.Event(), threading.Event()

    def stuck(*_, **__):
        entered.set()
        assert leave.wait(60)

    monkeypatch.setattr(samples.decode, "decode_into", stuck)
    loader = make(index)
    caught = []

    def ask():
        try:
            next(loader)
        except RuntimeError as error:
            caught.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    assert entered.wait(60)
    closing = threading.Thread(target=loader.close)
    closing.start()
    asking.join(60)  # ends although the threads are stuck
    assert not asking.is_alive()
    leave.set()
    closing.join(60)
    assert "closed" in str(caught[0])


def test_an_abandoned_loader_ends_its_threads(index):
    loader = make(index)
    next(loader)
    workers = loader_threads()
    del loader
    gc.collect()
    for thread in workers:
        thread.join(60)
    assert not loader_threads()


@pytest.mark.slow
def test_an_abandoned_loader_does_not_block_exit(index):
    code = f"""
import pathlib
from tests.trainer.data import loading
index = loading.InMemoryIndex(pathlib.Path({str(index.root)!r}), 13)
loaders = [loading.make(index, workers=4, prefetch_depth=50) for _ in range(4)]
for loader in loaders:
    next(loader)  # and leaves the threads at work: one that returned into a dying interpreter would abort it
print("out")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "out", "")


# A device.


@pytest.mark.parametrize("polls", [0, 1, 3, None])
def test_a_buffer_is_not_overwritten_before_its_copy_is_done(index, polls):
    device = LateDevice(polls)
    with make(index, device=device) as loader:
        actual = list(itertools.islice(loader, 25))
        device.finish()
    assert_same(actual, stream(index, 25))
    assert all(batch.images.is_contiguous(memory_format=torch.channels_last) for batch in actual)
    assert len(device.blocked) == 25  # the device waits for every batch it is given
    if polls == 0:
        assert device.waits == 0  # the host for none, where the copies keep up


def test_the_next_batch_is_copied_while_the_device_has_this_one(index):
    device = LateDevice(0)
    with make(index, device=device) as loader:
        next(loader)
        wait_until_full(loader)
        next(loader)
        assert len(device.copies) == 3
        assert loader.position == 8  # which is not handed out yet
        assert device.blocked == device.copies[:2]


@pytest.mark.parametrize(("polls", "awaited"), [(0, 0), (None, 25)])
def test_on_copy_awaited_is_called_before_the_device_waits(index, polls, awaited):
    device, blocked_before = LateDevice(polls), []
    with make(index, device=device) as loader:
        loader.on_copy_awaited = lambda: blocked_before.append(len(device.blocked))
        for _ in range(25):
            next(loader)
    assert blocked_before == list(range(awaited))


def test_an_early_copy_does_not_finalize_early(index):
    """A failure in the batch after next is told when that one is handed out, and its state is not ahead either."""
    expected = image_indices_of(stream(index, 12))
    image_index = expected[9]
    index.path(image_index).unlink()
    reported = []
    with make(index, device=LateDevice(0), on_quarantine=reported.append) as loader:
        for batch in range(3):
            assert bool(reported) == (batch > 2)
            assert loader.state_dict()["quarantined"] == {}
            next(loader)
            wait_until_full(loader)
        assert [one.sample_position for one in reported] == [9]
        assert loader.state_dict()["quarantined"] == {image_index: 9}


def test_load_state_dict_does_not_disturb_running_copies(index):
    device = LateDevice(None)
    with make(index, device=device) as loader:
        start = loader.state_dict()
        actual = list(itertools.islice(loader, 3))
        loader.load_state_dict(start)
        actual += list(itertools.islice(loader, 6))
        device.finish()
    expected = stream(index, 6)
    assert_same(actual, expected[:3] + expected)
