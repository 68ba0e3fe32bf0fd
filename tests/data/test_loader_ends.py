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
from stoker.data.loading.loader import BUFFERS_IN_USE, PREFETCH_DEPTH
from stoker.errors import OutOfMemoryError
from tests.data.loading import (
    LateDevice,
    Pictures,
    assert_same,
    ids,
    loader_threads,
    make,
    stream,
    take,
    wait_until_full,
)


@pytest.fixture
def pictures(tmp_path):
    return Pictures(tmp_path, 13)


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
        (OSError(errno.EMFILE, "Too many open files"), RuntimeError),  # says nothing about the picture
    ],
)
def test_an_unexpected_exception_surfaces_with_the_name(pictures, monkeypatch, error, kind):
    real = samples.decode.decode_into

    def broken(data, path, **rest):
        if path == pictures.path(8):
            raise error
        real(data, path, **rest)

    monkeypatch.setattr(samples.decode, "decode_into", broken)
    with make(pictures) as loader:
        for _ in range(2):
            with pytest.raises(kind) as caught:
                take(loader, 9)
            assert str(pictures.path(8)) in str(caught.value)
            assert caught.value.__cause__ is error
        assert not loader.state_dict()["quarantined"]


@pytest.mark.parametrize("batches", [0, 1, 5])
@pytest.mark.parametrize("threads", [1, 4])
def test_close_joins_all_threads_in_the_middle_of_an_epoch(pictures, batches, threads):
    before = set(threading.enumerate())
    loader = make(pictures, threads=threads)
    take(loader, batches)
    assert len(loader_threads()) == (threads if batches else 0)
    loader.close()
    assert set(threading.enumerate()) == before
    loader.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(loader)


def test_close_joins_threads_that_wait_on_a_full_ring(pictures):
    loader = make(pictures)
    next(loader)
    wait_until_full(loader)
    loader.close()
    assert not loader_threads()
    assert loader.stats().decode.num_images == 4 * (PREFETCH_DEPTH + BUFFERS_IN_USE)


def test_close_from_another_thread_ends_a_wait(pictures, monkeypatch):
    entered, leave = threading.Event(), threading.Event()

    def stuck(*_, **__):
        entered.set()
        assert leave.wait(60)

    monkeypatch.setattr(samples.decode, "decode_into", stuck)
    loader = make(pictures)
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


def test_a_forgotten_loader_ends_its_threads(pictures):
    loader = make(pictures)
    next(loader)
    threads = loader_threads()
    del loader
    gc.collect()
    for thread in threads:
        thread.join(60)
    assert not loader_threads()


def test_a_forgotten_loader_does_not_hold_up_the_interpreter(pictures):
    code = f"""
import pathlib
from tests.data import loading
index = loading.Pictures(pathlib.Path({str(pictures.root)!r}), 13)
loaders = [loading.make(index, threads=4, depth=50) for _ in range(4)]
for loader in loaders:
    next(loader)  # and leaves the threads at work: one that returned into a dying interpreter would abort it
print("out")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "out", "")


# A device.


@pytest.mark.parametrize("polls", [0, 1, 3, None])
def test_a_slot_is_never_overwritten_before_its_copy_is_done(pictures, polls):
    device = LateDevice(polls)
    with make(pictures, device=device) as loader:
        found = list(itertools.islice(loader, 25))
        device.finish()
    assert_same(found, stream(pictures, 25))
    assert all(batch.images.is_contiguous(memory_format=torch.channels_last) for batch in found)
    assert len(device.blocked) == 25  # the device waits for every batch it is given
    if polls == 0:
        assert device.waits == 0  # the host for none, where the copies keep up


def test_the_next_batch_is_copied_while_the_device_has_this_one(pictures):
    device = LateDevice(0)
    with make(pictures, device=device) as loader:
        next(loader)
        wait_until_full(loader)
        next(loader)
        assert len(device.copies) == 3
        assert loader.position == 8  # which is not handed out yet
        assert device.blocked == device.copies[:2]


@pytest.mark.parametrize(("polls", "awaited"), [(0, 0), (None, 25)])
def test_who_wants_to_know_is_told_before_the_device_waits_for_a_copy(pictures, polls, awaited):
    device, blocked_before = LateDevice(polls), []
    with make(pictures, device=device) as loader:
        loader.on_copy_awaited = lambda: blocked_before.append(len(device.blocked))
        for _ in range(25):
            next(loader)
    assert blocked_before == list(range(awaited))


def test_an_early_copy_does_not_bring_forward_what_is_committed(pictures):
    """A failure in the batch after next is told when that one is handed out, and its state is not ahead either."""
    expected = ids(stream(pictures, 12))
    row = expected[9]
    pictures.path(row).unlink()
    told = []
    with make(pictures, device=LateDevice(0), on_quarantine=told.append) as loader:
        for batch in range(3):
            assert bool(told) == (batch > 2)
            assert loader.state_dict()["quarantined"] == {}
            next(loader)
            wait_until_full(loader)
        assert [one.position for one in told] == [9]
        assert loader.state_dict()["quarantined"] == {row: 9}


def test_a_device_loader_set_back_keeps_its_hands_off_running_copies(pictures):
    device = LateDevice(None)
    with make(pictures, device=device) as loader:
        start = loader.state_dict()
        found = list(itertools.islice(loader, 3))
        loader.load_state_dict(start)
        found += list(itertools.islice(loader, 6))
        device.finish()
    expected = stream(pictures, 6)
    assert_same(found, expected[:3] + expected)
