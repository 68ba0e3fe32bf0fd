"""Real delays in each stage of a real loader land in that stage of the ledger's `input_wait`, and nowhere else.

The truth is measured around the delayed call itself, by the same clock, so a busy machine changes both alike.
"""

import contextlib
import time

import pytest

from stoker.data.loading import samples
from stoker.data.loading.loader import BatchFinalizer
from stoker_watch.recording.ledger import Ledger
from stoker_watch.runs.records import INPUT_STAGES
from tests.timing import undisturbed_once
from tests.trainer.data.loading import InMemoryIndex, LateDevice, make

DELAY_S, BATCHES = 0.02, 8


class HostClock:
    on_host = True

    def mark(self):
        return time.perf_counter()

    def resolve(self, mark):
        return mark


class Delays:
    """Delayed calls, with what each took."""

    def __init__(self, by=DELAY_S):
        self.by, self.took = by, []

    def before(self, call):
        def wrapper(*args, **kwargs):
            began = time.perf_counter()
            time.sleep(self.by)
            try:
                return call(*args, **kwargs)
            finally:
                self.took.append((began, time.perf_counter()))

        return wrapper

    def union_s(self, start, end):
        """Seconds between start and end in which at least one of the calls ran."""
        total, reached = 0.0, start
        for began, ended in sorted(self.took):
            total += max(0.0, min(ended, end) - max(began, reached))
            reached = max(reached, min(ended, end))
        return total


@pytest.fixture
def index(tmp_path):
    return InMemoryIndex(tmp_path, 13)


def account_of(loader, batches=BATCHES):
    """The ledger's account of a thread that only asks for batches."""
    with loader:
        ledger = Ledger(HostClock(), start_s=time.perf_counter())
        for _ in range(batches):
            with ledger.phase("input_wait"):
                next(loader)
                ledger.split_input_wait(loader.last_wait)
        account = ledger.finish()
    assert account is not None
    assert sum(account.input_wait_stages.values()) == account.phases["input_wait"]
    assert set(account.input_wait_stages) <= set(INPUT_STAGES)
    return account


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["fetch", "decode"])
@pytest.mark.parametrize(("workers", "by", "near"), [(1, DELAY_S, 0.05), (3, 3 * DELAY_S, 0.1)])
@undisturbed_once
def test_a_slow_stage_of_the_workers(tmp_path, monkeypatch, stage, workers, by, near):
    """Where several work, what another does next to the delayed call has half of that instant."""
    index, delays = InMemoryIndex(tmp_path, 13), Delays(by)
    if stage == "fetch":
        monkeypatch.setattr(index, "read", delays.before(index.read))
    else:
        monkeypatch.setattr(samples.decode, "decode_into", delays.before(samples.decode.decode_into))
    account = account_of(make(index, workers=workers, prefetch_depth=1))
    injected = delays.union_s(account.start_s, account.end_s)
    assert injected > 0.9 * 4 * BATCHES * by / workers
    assert account.input_wait_stages[stage] == pytest.approx(injected, rel=near)


@pytest.mark.slow
@undisturbed_once
def test_a_slow_copy(tmp_path, monkeypatch):
    delays = Delays()
    device = LateDevice(None)
    real = device.to_device

    def to_device(tensors):
        targets, copy = real(tensors)
        monkeypatch.setattr(copy, "synchronize", delays.before(copy.synchronize))
        return targets, copy

    monkeypatch.setattr(device, "to_device", to_device)
    account = account_of(make(InMemoryIndex(tmp_path, 13), device=device, prefetch_depth=1), batches=3 * BATCHES)
    injected = delays.union_s(account.start_s, account.end_s)
    assert injected > 2 * BATCHES * DELAY_S
    assert account.input_wait_stages["copy"] == pytest.approx(injected, rel=0.25)


@pytest.mark.slow
@undisturbed_once
def test_a_slow_hand_over(tmp_path, monkeypatch):
    delays = Delays(5 * DELAY_S)
    monkeypatch.setattr(BatchFinalizer, "finalize", delays.before(BatchFinalizer.finalize))
    account = account_of(make(InMemoryIndex(tmp_path, 13), prefetch_depth=1))
    injected = delays.union_s(account.start_s, account.end_s)
    assert account.input_wait_stages["queue"] == pytest.approx(injected, rel=0.05)


def test_a_loader_that_keeps_up_adds_few_intervals(index):
    with make(index) as loader:
        for _ in range(4):
            next(loader)
            while loader._pending_batches[0].num_missing:  # the next one is whole
                time.sleep(0)
        assert len(loader.last_wait) <= 5
        ends = [end_s for end_s, _ in loader.last_wait]
        assert ends == sorted(ends)


def test_a_wait_that_ends_in_an_error_is_charged_too(index):
    for image_index in range(13):
        index.path(image_index).unlink()
    with make(index) as loader:
        ledger = Ledger(HostClock(), start_s=time.perf_counter())
        with contextlib.suppress(Exception), ledger.phase("input_wait"):
            next(loader)
            ledger.split_input_wait(loader.last_wait)
        account = ledger.finish()
    assert account is not None
    assert account.input_wait_stages == {"queue": account.phases["input_wait"]}
