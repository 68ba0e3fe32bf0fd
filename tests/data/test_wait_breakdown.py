"""Where a wait went: against an oracle that looks at each second by itself."""

from collections import Counter
from fractions import Fraction
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from stoker.data.loading.wait_breakdown import (
    COPY,
    DECODE,
    DECODING,
    DONE,
    FETCH,
    IN_FLIGHT,
    QUEUE,
    QUEUED,
    READ,
    WaitBreakdown,
    split_wait,
)

STATES = (IN_FLIGHT, READ, DECODING, QUEUED, DONE)
marks = st.lists(st.tuples(st.integers(0, 12), st.sampled_from(STATES)), max_size=5).map(
    lambda actual: [(float(at), state) for at, state in sorted(actual, key=lambda mark: mark[0])]
)


def sums(start_s, intervals):
    total = Counter()
    for end_s, stage in intervals:
        assert end_s >= start_s
        total[stage] += end_s - start_s
        start_s = end_s
    return total


def state_at(second, sample):
    return next((state for at_s, state in reversed(sample) if at_s <= second), QUEUED)


def working(states, kinds):
    actual = {kinds[state] for state in states if state in kinds}
    return {stage: Fraction(1, len(actual)) for stage in actual}


def oracle(second, awaited, others):
    now = [state_at(second, sample) for sample in awaited]
    own = working(now, {IN_FLIGHT: FETCH, READ: FETCH, DECODING: DECODE})
    if own:
        return own
    if QUEUED in now:
        return working([state_at(second, s) for s in others], {READ: FETCH, DECODING: DECODE}) or {QUEUE: 1}
    return {QUEUE: 1}


@given(st.lists(marks, max_size=4), st.lists(marks, max_size=4), st.integers(0, 12), st.integers(0, 12))
def test_a_split_is_what_an_oracle_says_second_by_second(awaited, others, start, length):
    end = start + length
    actual = split_wait(float(start), float(end), awaited, others)
    expected = Counter()
    for second in range(start, end):
        expected.update(oracle(second, awaited, others))
    got = sums(start, actual)
    assert {stage: round(share, 6) for stage, share in got.items() if share} == {
        stage: round(float(share), 6) for stage, share in expected.items()
    }
    assert actual[-1][0] == end
    assert all(a[1] != b[1] for a, b in pairwise(actual))


@given(st.lists(marks, max_size=3), st.lists(marks, max_size=3), st.floats(0, 12), st.floats(0, 12))
def test_the_parts_add_up_to_the_wait(awaited, others, start, length):
    got = sums(start, split_wait(start, start + length, awaited, others))
    assert abs(sum(got.values()) - length) < 1e-9
    assert set(got) <= {FETCH, DECODE, QUEUE}


def test_what_other_samples_do_counts_only_while_some_wait_for_a_thread():
    done = [[(0.0, READ), (1.0, DECODING), (3.0, DONE)]]
    assert split_wait(0.5, 5.0, done, [[(0.0, READ)]]) == [(1.0, FETCH), (3.0, DECODE), (5.0, QUEUE)]


def test_a_sample_behind_the_others_is_charged_to_what_they_do_and_not_to_their_flights():
    behind = [[(0.0, IN_FLIGHT), (1.0, QUEUED), (6.0, DECODING), (7.0, DONE)]]
    others = [[(0.0, IN_FLIGHT), (9.0, QUEUED)], [(0.0, DECODING), (4.0, DONE)]]
    assert split_wait(0.0, 7.0, behind, others) == [(1.0, FETCH), (4.0, DECODE), (6.0, QUEUE), (7.0, DECODE)]


def test_waits_are_summed_and_the_newest_one_is_kept():
    waits = WaitBreakdown()
    for _ in range(3):
        waits.start()
        waits.attribute_elapsed(COPY)
        waits.add([(waits.last[-1][0] + 2.0, FETCH), (waits.last[-1][0] + 3.0, QUEUE)])
    assert waits.total_s[FETCH] == 6.0
    assert waits.total_s[QUEUE] == 3.0
    assert [stage for _, stage in waits.last] == [COPY, FETCH, QUEUE]
