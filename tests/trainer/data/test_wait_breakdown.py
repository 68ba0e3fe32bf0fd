"""Where a wait went: the parts add up to it, in the proportion of the work that was done meanwhile."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.data.loading.stats import DECODE, FETCH, QUEUE, Counters, split_wait

seconds = st.floats(0, 100)


def stages(start_s, intervals):
    total = {}
    for end_s, stage in intervals:
        assert end_s >= start_s
        total[stage] = end_s - start_s
        start_s = end_s
    return total


@given(seconds, seconds, st.lists(seconds, min_size=4, max_size=4), st.integers(1, 32), st.booleans())
def test_the_parts_add_up_to_the_wait(start, length, work, workers, is_remote):
    before, after = Counters(read_s=work[0], decode_s=work[1]), Counters(read_s=work[2], decode_s=work[3])
    intervals = split_wait(start, start + length, before, after, workers=workers, is_remote=is_remote)
    assert sum(stages(start, intervals).values()) == pytest.approx(length, abs=1e-9)
    assert set(stages(start, intervals)) <= {FETCH, DECODE, QUEUE}


@pytest.mark.parametrize(
    ("read_s", "decode_s", "is_remote", "expected"),
    [
        (3.0, 1.0, False, {FETCH: 1.5, DECODE: 0.5}),
        (0.0, 4.0, False, {FETCH: 0.0, DECODE: 2.0}),
        (0.0, 0.0, False, {QUEUE: 2.0}),
        (0.0, 0.0, True, {FETCH: 2.0, DECODE: 0.0}),  # all four workers wait for bytes
        (0.0, 2.0, True, {FETCH: 1.5, DECODE: 0.5}),
        (0.0, 8.0, True, {FETCH: 0.0, DECODE: 2.0}),
    ],
)
def test_a_wait_of_two_seconds_with_four_workers(read_s, decode_s, is_remote, expected):
    before, after = Counters(read_s=7.0, decode_s=5.0), Counters(read_s=7.0 + read_s, decode_s=5.0 + decode_s)
    assert stages(1.0, split_wait(1.0, 3.0, before, after, workers=4, is_remote=is_remote)) == expected
