"""Places of who loads the data: what loader workers, other threads or the training thread do for the next batch."""

from collections.abc import Callable

from stoker_watch.diagnosis.places.costly import LOADER_CALL, READS
from stoker_watch.diagnosis.places.totals import merge_by, wilson
from stoker_watch.diagnosis.run_data import PlaceTotal, RunRecords

MIN_LOADER_SAMPLES = 10
"""Samples of who loads the data from which their fractions are used; fewer, if the interval is clear."""


def _loading(run: RunRecords) -> list[PlaceTotal]:
    """Places of who loads the data (workers, else the training thread), without waits for its loader."""
    role = "worker" if any(place.role == "worker" for place in run.places) else "training"
    return [
        place
        for place in run.places
        if place.role == role and not place.is_startup and place.line and not LOADER_CALL.search(place.call)
        if role == "worker" or place.kind in ("input_wait", "decode")
    ]


def loading_places(run: RunRecords) -> list[PlaceTotal]:
    """Lines and calls of who loads the data, and of other threads, the most costly first."""
    found = [*_loading(run), *(place for place in run.places if place.role == "thread" and place.line)]
    working = [place for place in found if place.kind != "idle" or place.call]
    merged = merge_by(working, lambda place: (place.line, place.call)).values()
    return sorted(merged, key=lambda total: -total.seconds)


def loading_fraction(run: RunRecords, count: Callable[[PlaceTotal], int], minimum: float) -> float | None:
    """Fraction of the samples of who loads the data, without waits for its loader, that `count` counts in a place;
    None: too few to tell whether it is the minimum."""
    loading = _loading(run)
    samples, counted = sum(place.samples for place in loading), sum(map(count, loading))
    if not samples:
        return None
    low, high = wilson(counted / samples, samples)
    return counted / samples if samples >= MIN_LOADER_SAMPLES or not low < minimum <= high else None


def count_blocked(place: PlaceTotal) -> int:
    """Samples in a call that reads, or blocked in another one; a sleep is not blocked by a storage."""
    if place.call == "time.sleep":
        return 0
    if place.kind == "idle" or READS.search(place.call):
        return place.samples
    return sum(count for leaf, count in place.leaves.items() if READS.search(leaf))


def count_decoding(place: PlaceTotal) -> int:
    return place.samples if place.kind == "decode" else 0


def count_working(place: PlaceTotal) -> int:
    return place.samples if place.kind in ("decode", "python", "compute") else 0
