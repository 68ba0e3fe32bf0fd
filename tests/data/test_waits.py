"""Real delays in each stage of a real loader land in that stage of the ledger's `input_wait`, and nowhere else.

The truth is measured around the delayed call itself, by the same clock, so a busy machine changes both alike.
"""

import contextlib
import time

import pytest

from stoker.data.loading import samples
from stoker.data.loading.finalize import BatchFinalizer
from stoker.profiling.ledger import Ledger
from stoker.runs.records import INPUT_STAGES
from tests.data.loading import InMemoryIndex, LateDevice, make

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


def assert_near_once(measure, near):
    """`measure()` returns (what the ledger says, the truth), in seconds. Other programs can disturb one measurement; if
    it is off three times in a row, the code is wrong."""
    pairs = []
    for _ in range(3):
        pairs.append(measure())
        if pairs[-1][0] == pytest.approx(pairs[-1][1], rel=near):
            return
    pytest.fail(f"three times the ledger and the truth differ by more than {near:.0%}: {pairs}")


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["fetch", "decode"])
@pytest.mark.parametrize(("workers", "by", "near"), [(1, DELAY_S, 0.05), (3, 3 * DELAY_S, 0.1)])
def test_a_slow_stage_of_the_workers(index, stage, workers, by, near):
    """Where several work, what another does next to the delayed call has half of that instant."""

    def measure():
        delays = Delays(by)
        with pytest.MonkeyPatch.context() as patch:
            if stage == "fetch":
                patch.setattr(index, "read", delays.before(index.read))
            else:
                patch.setattr(samples.decode, "decode_into", delays.before(samples.decode.decode_into))
            account = account_of(make(index, workers=workers, prefetch_depth=1))
        injected = delays.union_s(account.start_s, account.end_s)
        assert injected > 0.9 * 4 * BATCHES * by / workers
        return account.input_wait_stages[stage], injected

    assert_near_once(measure, near)


@pytest.mark.slow
def test_a_slow_copy(index):
    def measure():
        delays = Delays()
        device = LateDevice(None)
        real = device.to_device

        def to_device(tensors):
            targets, copy = real(tensors)
            copy.synchronize = delays.before(copy.synchronize)
            return targets, copy

        device.to_device = to_device
        account = account_of(make(index, device=device, prefetch_depth=1), batches=3 * BATCHES)
        injected = delays.union_s(account.start_s, account.end_s)
        assert injected > 2 * BATCHES * DELAY_S
        return account.input_wait_stages["copy"], injected

    assert_near_once(measure, 0.05)


@pytest.mark.slow
def test_a_slow_hand_over(index):
    def measure():
        delays = Delays(5 * DELAY_S)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BatchFinalizer, "finalize", delays.before(BatchFinalizer.finalize))
            account = account_of(make(index, prefetch_depth=1))
        return account.input_wait_stages["queue"], delays.union_s(account.start_s, account.end_s)

    assert_near_once(measure, 0.05)


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
