"""The autotuner settles, soon and within what the machine has, whatever the load does."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.data.loading.stats import (
    GROW_AFTER,
    MAX_WORKERS,
    RETRY_AFTER,
    LoaderAutotuner,
    LoaderRates,
    default_num_workers,
)


def make_tuner(cores=4, workers=None, **changes):
    return LoaderAutotuner(**{"cores": cores, "is_cpu": False, "workers": workers or cores} | changes)


def rates(**changes):
    usual = {
        "wait_fraction": 0.0,
        "idle_fraction": 0.4,
        "read_fraction": 0.5,
        "decoded_per_s": 100.0,
    }
    return LoaderRates(**usual | changes)


STARVED = {"wait_fraction": 0.31, "idle_fraction": 0.02, "read_fraction": 0.85}


class LoaderModel:
    """A loader as a formula: workers that read and decode, cores, and the demand of training, in images per second."""

    def __init__(self, *, read_s, decode_s, cores, demand, storage=1e9):
        self.read_s, self.decode_s, self.cores, self.demand, self.storage = read_s, decode_s, cores, demand, storage

    def rates_at(self, workers):
        max_rate = min(workers / (self.read_s + self.decode_s), self.cores / self.decode_s, self.storage)
        rate = min(max_rate, self.demand)
        # Either the loader is the bottleneck and its workers are busy, or training gets all that it asks for.
        idle_fraction = 0.0 if rate < self.demand else 1 - rate / max_rate
        return rates(
            wait_fraction=1 - rate / self.demand,
            idle_fraction=idle_fraction,
            read_fraction=self.read_s / (self.read_s + self.decode_s),
            decoded_per_s=rate,
        )


def run(autotuner, loads):
    """The number of workers after each poll."""
    history = []
    for load in loads:
        autotuner.update(load.rates_at(autotuner.workers))
        history.append(autotuner.workers)
    return history


def reversals(history):
    moves = [b - a for a, b in itertools.pairwise(history) if a != b]
    return sum(a * b < 0 for a, b in itertools.pairwise(moves))


def test_workers_that_mostly_read_are_added_with_the_reason():
    autotuner = make_tuner(2)
    messages = [message for _ in range(GROW_AFTER) if (message := autotuner.update(rates(**STARVED)))]
    assert messages == ["2 → 3 workers: training waits 31 % of the time, workers read 85 % of theirs"]


def test_one_poll_changes_nothing():
    autotuner = make_tuner()
    for load in (STARVED, {}, STARVED, {}):
        assert autotuner.update(rates(**load)) is None
    assert autotuner.workers == 4


def test_numbers_given_by_the_user_stay():
    autotuner = make_tuner(workers=2, is_tuned=False)
    for _ in range(100):
        for load in (STARVED, {"idle_fraction": 0.9}, {"wait_fraction": 0.5, "idle_fraction": 0.6}):
            assert autotuner.update(rates(**load)) is None
    assert autotuner.workers == 2


@pytest.mark.parametrize(("read_fraction", "max_workers"), [(0.0, 4), (0.5, 8), (0.9, 16), (1.0, 16)])
def test_no_more_workers_decode_at_a_time_than_there_are_cores(read_fraction, max_workers):
    autotuner = make_tuner(4)
    for n in range(100):
        autotuner.update(rates(**STARVED | {"read_fraction": read_fraction, "decoded_per_s": 100.0 * 1.1**n}))
    assert autotuner.workers == max_workers


def test_workers_have_a_limit_on_a_large_machine():
    autotuner = make_tuner(64, workers=8)
    for n in range(100):
        autotuner.update(rates(**STARVED | {"decoded_per_s": 100.0 * 1.1**n}))
    assert autotuner.workers == MAX_WORKERS


def test_no_decoding_worker_is_added_where_the_cpu_trains():
    cores = 16
    first = default_num_workers(cores, is_cpu=True)
    autotuner = make_tuner(cores, workers=first, is_cpu=True)
    for n in range(20):
        autotuner.update(rates(**STARVED | {"read_fraction": 0.0, "decoded_per_s": 100.0 * 1.1**n}))
    assert autotuner.workers == first == 2


def test_workers_that_do_not_help_are_removed_again():
    autotuner = make_tuner(4)
    messages = [message for _ in range(10) if (message := autotuner.update(rates(**STARVED)))]
    assert messages[1:] == ["6 → 4 workers: more of them did not load more"]
    assert autotuner.workers == 4


def test_idle_workers_stay():
    autotuner = make_tuner(16)
    assert [message for _ in range(100) if (message := autotuner.update(rates(idle_fraction=0.9)))] == []


fractions = st.floats(0, 1)
polls = st.builds(
    rates,
    wait_fraction=fractions,
    idle_fraction=fractions,
    read_fraction=fractions,
    decoded_per_s=st.floats(0, 1e4),
)


@settings(max_examples=40)
@given(st.lists(polls, max_size=80), st.integers(1, 64))
def test_any_polls_keep_the_limits(course, cores):
    autotuner = make_tuner(cores, workers=min(cores, MAX_WORKERS))
    before = autotuner.workers
    for poll in course:
        message = autotuner.update(poll) or ""
        changed = autotuner.workers != before
        assert changed == (f"→ {autotuner.workers} workers" in message)
        assert 1 <= autotuner.workers <= MAX_WORKERS
        before = autotuner.workers


def test_growth_that_does_not_help_is_tried_again_after_a_while():
    autotuner = make_tuner(4)
    history = []
    for _ in range(4 * RETRY_AFTER):
        autotuner.update(rates(**STARVED))
        history.append(autotuner.workers)
    assert set(history) == {4, 6}
    assert reversals(history) <= 2 * 4


@settings(max_examples=30)
@given(
    read_s=st.floats(0.0, 0.05),
    decode_s=st.floats(0.001, 0.02),
    cores=st.integers(1, 32),
    demands=st.lists(st.floats(10, 3000), min_size=1, max_size=4),
    storage=st.floats(50, 1e5),
)
def test_the_number_of_workers_settles_after_each_step_of_the_load(read_s, decode_s, cores, demands, storage):
    """Each step ends at one number, and where workers can serve training, with enough of them."""
    autotuner = make_tuner(cores, workers=default_num_workers(cores, is_cpu=False))
    for demand in demands:
        load = LoaderModel(read_s=read_s, decode_s=decode_s, cores=cores, demand=demand, storage=storage)
        course = run(autotuner, [load] * 250)
        assert reversals(course) <= 8
    if len(demands) == 1:
        last = course[-30:]
        assert len(set(last)) <= 3
        max_workers = min(MAX_WORKERS, 4 * cores, max(1, int(cores * (read_s + decode_s) / decode_s)))
        load_workers = demand * (read_s + decode_s)
        if load_workers < 0.9 * max_workers and demand < 0.9 * min(storage, cores / decode_s):
            assert load.rates_at(autotuner.workers).wait_fraction < 0.2
