"""Places of samples, added up over a run."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.diagnosis.places import _wilson, find_places
from stoker.diagnosis.reader import read_run
from stoker.runs.schemas import Place
from tests.diagnosis.built import STARTUP, T0, make_run

COPY = Place(line="train.py:53", function="update", call="copy.deepcopy", kind="python", samples=10)


def window(number: int, *places: Place, **fields: object) -> dict[str, object]:
    """The line of ten seconds after the start."""
    kinds = {place.kind: place.samples / 40 for place in places}
    values = {"t": T0 + STARTUP + 10.0 * number, "samples": 40, "main_thread": kinds, "places": list(places)}
    return values | fields


def test_places_of_a_run_are_added_up_by_role_and_rank(tmp_path: Path) -> None:
    worker = Place(line="data.py:7", function="load", call="pandas.read_csv", leaf="read (pandas/io/c.py)",
                   kind="python", samples=30)  # fmt: skip
    compute = Place(kind="compute", samples=30)
    stacks = [
        window(1, COPY, compute),
        window(2, COPY, compute),
        window(4, COPY, compute),
        window(1, worker, Place(kind="idle", samples=10), role="worker", pid=8),
        window(0, Place(line="train.py:1", kind="other", samples=40)),
        window(1, Place(line="launch.py:1", kind="idle", samples=40), pid=6),
    ]
    run = read_run(make_run(tmp_path / "run", seconds=45, stacks=stacks))
    found = find_places(run, call="deepcopy")
    assert found is not None
    assert (found.samples, found.seconds, found.windows, found.bursts) == (30, 7.5, 3, 1)
    assert found.window_fraction == 1
    assert 0 < found.low_s < 7.5 < found.high_s < 12
    in_parser = find_places(run, "worker", leaf="pandas/")
    assert in_parser is not None
    assert (in_parser.line, in_parser.seconds) == ("data.py:7", 7.5)
    assert find_places(run, "worker", leaf="json/") is None
    assert find_places(run, line="launch.py") is None, "it only waits for its children"
    assert find_places(run, line="train.py:1$") is None
    at_start = find_places(run, line="train.py:1$", include_startup=True)
    assert at_start is not None
    assert at_start.is_startup
    assert run.place_totals == {("training", 0): 40.0, ("worker", 0): 10.0}
    assert run.stacks.samples == 120, "of processes that train"


@given(st.integers(1, 1000), st.floats(0, 1))
def test_an_interval_contains_the_fraction(count: int, fraction: float) -> None:
    low, high = _wilson(fraction, count)
    assert low - 1e-9 <= fraction <= high + 1e-9
    assert 0 <= low <= high <= 1
    assert _wilson(0.1, 100) == pytest.approx((0.0552, 0.1744), abs=1e-3)  # statsmodels proportion_confint, wilson
