"""Threads and depth: they settle, in time and within what the machine has, whatever the load does."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.data.loading.autotune import (
    GROW_AFTER,
    INPUT_BOUND_FRACTION,
    MAX_PREFETCH_DEPTH,
    MAX_WORKERS,
    SHRINK_AFTER,
    TARGET_IDLE_FRACTION,
    LoaderAutotuner,
    LoaderRates,
    MachineLimits,
    default_num_workers,
)

GIB = 2**30


def limits(cores=4, **changes):
    return MachineLimits(**{"cores": cores, "decoders": cores, "is_cpu": False, "slot_bytes": 32 * 2**20} | changes)


def tuner(cores=4, threads=None, **changes):
    return LoaderAutotuner(limits(cores), workers=threads or cores, prefetch_depth=3, **changes)


def seen(**changes):
    usual = {
        "waits": 0.0, "flights": 0.0, "idle": 0.4, "reads": 0.5, "cpu": 0.5, "per_s": 100.0, "handed_per_s": 100.0,
        "memory_bytes": 16 * GIB, "free_bytes": 8 * GIB,
    }  # fmt: skip
    return LoaderRates(**usual | changes)


HUNGRY = {"waits": 0.31, "idle": 0.02, "reads": 0.85}


class Loader:
    """A loader in a formula: threads that read and decode, cores, and a demand of training, in pictures per second."""

    def __init__(self, *, read_s, decode_s, cores, demand, storage=1e9):
        self.read_s, self.decode_s, self.cores, self.demand, self.storage = read_s, decode_s, cores, demand, storage

    def seen(self, threads):
        able = min(threads / (self.read_s + self.decode_s), self.cores / self.decode_s, self.storage)
        rate = min(able, self.demand)
        # what is short is what threads are held up by: they are busy, or training is served
        idle = 0.0 if rate < self.demand else 1 - rate / able
        return seen(
            waits=1 - rate / self.demand,
            idle=idle,
            reads=self.read_s / (self.read_s + self.decode_s),
            cpu=min(1.0, rate * self.decode_s / self.cores),
            per_s=rate,
            handed_per_s=rate,
        )


def run(tuned, loads):
    """The number of threads after each look."""
    course = []
    for load in loads:
        tuned.see(load.seen(tuned.threads))
        course.append(tuned.threads)
    return course


def reversals(course):
    moves = [b - a for a, b in itertools.pairwise(course) if a != b]
    return sum(a * b < 0 for a, b in itertools.pairwise(moves))


def test_threads_that_only_wait_for_a_disk_become_more_and_the_reason_is_said():
    tuned = tuner(2)
    said = [sentence for _ in range(GROW_AFTER) for sentence in tuned.update(seen(**HUNGRY))]
    assert said == ["2 → 3 threads: training waits 31 % of the time, threads read 85 % of theirs"]


def test_one_look_changes_nothing():
    tuned = tuner()
    for load in (HUNGRY, {}, HUNGRY, {}):
        assert tuned.update(seen(**load)) == []
    assert tuned.workers == 4


def test_a_number_that_the_person_said_stays():
    tuned = tuner(threads=2, tunes_threads=False, tunes_depth=False)
    for _ in range(100):
        for load in (HUNGRY, {"idle": 0.9}, {"waits": 0.5, "idle": 0.6}, {"free_bytes": 0}):
            assert tuned.update(seen(**load)) == []
    assert (tuned.workers, tuned.prefetch_depth) == (2, 3)


@pytest.mark.parametrize(("reads", "most"), [(0.0, 4), (0.5, 8), (0.9, 16), (1.0, 16)])
def test_no_more_decode_at_a_time_than_there_are_cores(reads, most):
    tuned = tuner(4)
    for n in range(100):
        tuned.update(seen(**HUNGRY | {"reads": reads, "per_s": 100.0 * 1.1**n}))
    assert tuned.workers == most


def test_on_a_large_machine_threads_have_a_limit_of_their_own():
    tuned = tuner(64, threads=8)
    for n in range(100):
        tuned.update(seen(**HUNGRY | {"per_s": 100.0 * 1.1**n}))
    assert tuned.workers == MAX_WORKERS


def test_on_a_cpu_that_trains_no_thread_is_added_that_decodes():
    cores = 16
    first = default_num_workers(cores, is_cpu=True)
    tuned = LoaderAutotuner(limits(cores, decoders=first, is_cpu=True), workers=first, prefetch_depth=3)
    for n in range(20):
        tuned.update(seen(**HUNGRY | {"reads": 0.0, "per_s": 100.0 * 1.1**n}))
    assert tuned.workers == first == 2


def test_the_limit_of_the_cores_is_said_once():
    tuned = tuner(4)
    full = HUNGRY | {"reads": 0.1, "cpu": 0.99}
    said = [sentence for _ in range(50) for sentence in tuned.update(seen(**full))]
    assert said == [
        "all 4 cores decode, and training waits 31 % of the time; more cores per GPU, a cache or smaller pictures "
        "would help"
    ]
    assert tuned.workers == 4


def test_threads_that_do_not_help_are_let_go_again():
    tuned = tuner(4)
    said = [sentence for _ in range(10) for sentence in tuned.update(seen(**HUNGRY))]
    assert said[1:] == ["6 → 4 threads: more of them did not load more"]
    assert tuned.workers == 4


def test_idle_threads_are_let_go_slowly():
    tuned = tuner(16)
    idle = {"waits": 0.0, "idle": 0.9}
    said = [sentence for _ in range(SHRINK_AFTER) for sentence in tuned.update(seen(**idle))]
    assert said == ["16 → 3 threads: they rest 90 % of the time"]


def test_uneven_pictures_deepen_the_ring_and_only_while_that_helps():
    tuned = tuner()
    bursty = {"waits": 0.2, "idle": 0.5}
    said = [sentence for _ in range(20) for sentence in tuned.update(seen(**bursty))]
    assert said == ["3 → 4 batches ahead: training waits 20 % of the time though threads rest 50 % of theirs"]
    helped = tuner()
    for n in range(20):
        helped.update(seen(**bursty | {"waits": 0.9 * 0.89**n}))
    assert helped.prefetch_depth > 4


def test_requests_in_flight_are_no_reason_for_a_deeper_ring():
    tuned = tuner()
    for _ in range(20):
        assert tuned.update(seen(waits=0.5, idle=0.8, flights=0.9)) == []


def test_little_memory_shrinks_the_ring_and_keeps_it_small():
    tuned = LoaderAutotuner(limits(is_cpu=True), workers=2, prefetch_depth=3)
    for _ in range(20):
        tuned.update(seen(free_bytes=GIB))
    assert tuned.prefetch_depth == 1
    for n in range(20):
        tuned.update(seen(waits=0.5 * 0.8**n + 0.06, idle=0.5))
    assert tuned.prefetch_depth == 1


def test_page_locked_memory_is_not_given_up_as_nobody_else_would_get_it():
    tuned = tuner()
    for _ in range(20):
        assert tuned.update(seen(free_bytes=GIB)) == []
    assert tuned.prefetch_depth == 3


@given(st.integers(0, 2**36))
def test_the_ring_takes_a_share_of_the_free_memory(free_bytes):
    tuned = tuner()
    for n in range(200):
        tuned.update(
            seen(
                waits=0.9 * 0.85 ** (n // 2) + INPUT_BOUND_FRACTION, idle=0.5, free_bytes=free_bytes, memory_bytes=2**36
            )
        )
    assert tuned.prefetch_depth <= MAX_PREFETCH_DEPTH
    grown = (tuned.prefetch_depth - 3) * 32 * 2**20
    assert grown <= free_bytes  # each time a quarter of what is free then


shares = st.floats(0, 1)
looks = st.builds(
    seen, waits=shares, flights=shares, idle=shares, reads=shares, cpu=shares, per_s=st.floats(0, 1e4),
    free_bytes=st.integers(0, 16 * GIB),
)  # fmt: skip


@given(st.lists(looks, max_size=300), st.integers(1, 64))
def test_any_looks_keep_the_limits_and_change_seldom(course, cores):
    tuned = tuner(cores, threads=min(cores, MAX_WORKERS))
    before = tuned.workers
    for look in course:
        said = tuned.update(look)
        changed = tuned.workers != before
        assert changed == any(f"→ {tuned.workers} threads" in sentence for sentence in said)
        assert 1 <= tuned.workers <= MAX_WORKERS
        assert 1 <= tuned.prefetch_depth <= MAX_PREFETCH_DEPTH
        before = tuned.workers


def test_a_load_that_never_settles_is_followed_ever_more_seldom():
    """Idle just as long as it takes to let threads go, then hungry as long as it takes to get them back."""
    tuned, course, rate = tuner(8), [], 100.0
    for _ in range(400):
        for load, count in (({"idle": 0.95}, SHRINK_AFTER), (HUNGRY, GROW_AFTER)):
            for _ in range(count):
                rate *= 1.01
                tuned.update(seen(**load | {"per_s": rate}))
                course.append(tuned.workers)
    assert reversals(course) <= 2


kinds = st.sampled_from(["served", "hungry", "idle", "between"])


@given(st.lists(st.tuples(kinds, st.integers(1, 40)), max_size=40))
def test_a_load_that_goes_up_and_down_is_followed_ever_more_seldom(course):
    loads = {
        "served": {"idle": 0.2},
        "hungry": HUNGRY,
        "idle": {"idle": 0.95},
        "between": {"waits": 0.03, "idle": 0.3},
    }
    tuned = tuner(8)
    threads, rate = [], 100.0
    for kind, count in course:
        for _ in range(count):
            rate *= 1.05  # so that growth always seems to help: the worst case for flapping
            tuned.update(seen(**loads[kind] | {"per_s": rate}))
            threads.append(tuned.workers)
    doublings = max(1, len(threads) // SHRINK_AFTER).bit_length()
    assert reversals(threads) <= 2 * doublings


@given(
    read_s=st.floats(0.0, 0.05), decode_s=st.floats(0.001, 0.02), cores=st.integers(1, 32),
    demands=st.lists(st.floats(10, 3000), min_size=1, max_size=4), storage=st.floats(50, 1e5),
)  # fmt: skip
def test_steps_of_the_load_are_settled_on(read_s, decode_s, cores, demands, storage):
    """Each step ends at one number, and where threads can serve training, with enough of them."""
    tuned = tuner(cores, threads=default_num_workers(cores, is_cpu=False))
    for demand in demands:
        load = Loader(read_s=read_s, decode_s=decode_s, cores=cores, demand=demand, storage=storage)
        course = run(tuned, [load] * 400)
        assert reversals(course) <= 8
    if len(demands) == 1:
        tail = course[-30:]
        assert len(set(tail)) <= 3
        most = min(MAX_WORKERS, 4 * cores, max(1, int(cores * (read_s + decode_s) / decode_s)))
        load_threads = demand * (read_s + decode_s)
        if load_threads < 0.9 * most and demand < 0.9 * min(storage, cores / decode_s):
            assert load.seen(tuned.workers).wait_fraction < 0.2


@given(st.integers(1, 32), st.floats(0.5, 1.0))
def test_after_letting_threads_go_the_rest_does_not_ask_for_them_back(threads, idle):
    tuned = tuner(32, threads=threads)
    busy = threads * (1 - idle)
    for _ in range(50):
        tuned.update(seen(waits=0.0, idle=max(0.0, 1 - busy / tuned.workers)))
    assert busy / tuned.workers <= 1 - TARGET_IDLE_FRACTION + 1e-9 or tuned.workers == threads
