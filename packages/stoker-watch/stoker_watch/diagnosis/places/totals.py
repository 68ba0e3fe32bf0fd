"""Adds up the places of stack samples (`schemas.Place`) over a run: lines of the job's own code, and what they called.

`recording/stacks.py` records them, `RunRecords.places` has the sums, rules look them up by `find_places`.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Set
from typing import NamedTuple, TypeVar

import msgspec

from stoker_watch.diagnosis.places.sampled import PlaceTotal
from stoker_watch.diagnosis.run_data import RunRecords
from stoker_watch.knowledge import read_toml
from stoker_watch.runs.schemas import LOOP_IN_STEP, StackWindow

MAX_PLACES = 2000
"""Places of a process that are counted; a job has some hundred."""
MIN_SHARE = 0.005
"""Fraction of the samples of a tree, or of a thread, below which a place is left out."""
MIN_TREND, MIN_TREND_ERRORS = 5, 4.0
"""Lines of stacks.jsonl from which a trend is looked for, and standard errors of its slope from which it is one: of
many places some would have three by chance."""
_Z = 1.96
"""Standard errors of a 95 % interval."""
K = TypeVar("K")
NEVER_A_STEP = re.compile(
    r"(<class ')?(copy|pickle|json|shutil|hashlib|subprocess|zipfile|tarfile|csv|urllib|requests|yaml|xml|sqlite3"
    rf"|cv2|numpy|scipy|{'|'.join(read_toml('frames.toml')['host_packages'])})\."
)
"""Calls that no forward pass, backward pass or optimizer step needs: of the standard library, and of packages that
compute on the host alone. numpy, scipy and OpenCV are in no list of frames: a matcher inside of a step calls them."""


class _SampledThread(NamedTuple):
    """What the samples of a place are a fraction of."""

    role: str
    rank: int
    is_startup: bool


class _Key(NamedTuple):
    group: _SampledThread
    kind: str
    line: str
    function: str
    call: str
    part: str


@dataclasses.dataclass
class _Trend:
    """Sums for a straight line through (position of a line of stacks.jsonl, fraction of it that a place had)."""

    count: int = 0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0
    first: float = math.inf
    last: float = 0.0

    def add(self, x: float, y: float) -> None:
        self.count, self.first, self.last = self.count + 1, min(self.first, x), max(self.last, x)
        self.x, self.y, self.xx = self.x + x, self.y + y, self.xx + x * x
        self.xy, self.yy = self.xy + x * y, self.yy + y * y

    def grown(self) -> tuple[float, float] | None:
        """The fraction at the beginning and at the end, if it has doubled beyond chance; None: it has not."""
        count = self.count
        sxx = self.xx - self.x * self.x / max(1, count)
        if count < MIN_TREND or sxx <= 0:
            return None
        sxy, syy = self.xy - self.x * self.y / count, self.yy - self.y * self.y / count
        slope, x_mean, y_mean = sxy / sxx, self.x / count, self.y / count
        error = math.sqrt(max(0.0, syy - slope * sxy) / (count - 2) / sxx)
        start, end = (max(0.0, y_mean + slope * (x - x_mean)) for x in (self.first, self.last))
        return (start, end) if slope > MIN_TREND_ERRORS * error and end >= 2 * start else None


@dataclasses.dataclass
class _Count:
    samples: int = 0
    seconds: float = 0.0
    windows: int = 0
    bursts: int = 0
    leaves: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    callers: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    trend: _Trend = dataclasses.field(default_factory=_Trend)
    """Of the process that has most samples."""

    def add(self, other: "_Count") -> None:
        self.trend = max(self.trend, other.trend, key=lambda trend: trend.count)
        for name in ("samples", "seconds", "windows", "bursts"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.leaves.update(other.leaves)
        self.callers.update(other.callers)


@dataclasses.dataclass
class _ProcessPlaces:
    kinds: set[str] = dataclasses.field(default_factory=set)
    groups: dict[_SampledThread, _Count] = dataclasses.field(default_factory=dict)
    places: dict[_Key, _Count] = dataclasses.field(default_factory=dict)
    newest: dict[str, set[_Key]] = dataclasses.field(default_factory=dict)
    """Role → places of its newest line."""


class PlaceCounter:
    def __init__(self) -> None:
        self._processes: dict[tuple[int, int], _ProcessPlaces] = {}

    def add(self, rank: int, window: StackWindow, *, is_startup: bool) -> None:
        if not window.places or not window.samples:
            return
        process = self._processes.setdefault((window.attempt, window.pid), _ProcessPlaces())
        if window.role != "thread":
            process.kinds.update(window.main_thread if window.role == "training" else [window.role])
        group = _SampledThread(window.role, rank, is_startup)
        process.groups.setdefault(group, _Count()).add(_Count(window.samples, window.wall_s, 1))
        seen: set[_Key] = set()
        for place in window.places:
            # copy.deepcopy of a model ends in torch's frames, so its samples are recorded as compute.
            is_python = place.kind in ("compute", LOOP_IN_STEP) and NEVER_A_STEP.match(place.call)
            kind = "python" if is_python else place.kind
            key = _Key(group, kind, place.line, place.function, place.call, place.part)
            if key not in process.places and len(process.places) >= MAX_PLACES:
                continue
            is_new = key not in seen
            count = _Count(
                samples=place.samples,
                seconds=window.wall_s * place.samples / window.samples,
                windows=int(is_new),
                bursts=int(is_new and key not in process.newest.get(window.role, ())),
                leaves=collections.Counter({place.leaf: place.samples}),
                callers=collections.Counter({place.callers: place.samples}),
            )
            known = process.places.setdefault(key, _Count())
            known.add(count)
            known.trend.add(process.groups[group].windows, place.samples / window.samples)
            seen.add(key)
        process.newest[window.role] = seen

    def totals(self, launcher_kinds: Set[str]) -> tuple[list[PlaceTotal], dict[tuple[str, int], float]]:
        """(the places, the largest first; (role, rank) → seconds after the start that the samples cover), without
        processes that were seen in `launcher_kinds` only, unless all were."""
        known = [process for process in self._processes.values() if process.kinds - launcher_kinds]
        groups: dict[_SampledThread, _Count] = {}
        places: dict[_Key, _Count] = {}
        for process in known or self._processes.values():
            for group, count in process.groups.items():
                groups.setdefault(group, _Count()).add(count)
            for key, count in process.places.items():
                places.setdefault(key, _Count()).add(count)
        totals = [_make_total(key, count, groups[key.group]) for key, count in places.items()]
        seconds: dict[tuple[str, int], float] = {}
        for group, count in groups.items():
            if group.is_startup:
                continue
            seconds[group.role, group.rank] = seconds.get((group.role, group.rank), 0.0) + count.seconds
        for role, rank in seconds:
            if role == "thread":  # a line of its windows is only there while it works or blocks
                seconds[role, rank] = seconds.get(("training", rank), seconds[role, rank])
        return sorted(totals, key=lambda total: -total.seconds), seconds


def find_places(
    run: RunRecords, role: str = "training", *, kind: str = "", call: str | re.Pattern[str] = "", leaf: str = ""
) -> PlaceTotal | None:
    """The sum of all places of a role after the start that match; None without any. Its texts are those of the largest
    of them. kind, call, leaf: patterns that match anywhere in the text."""
    found: list[PlaceTotal] = []
    for total in run.places:
        is_part = total.part and not total.line
        if total.role != role or is_part or total.is_startup:
            continue
        leaves = {name: count for name, count in total.leaves.items() if re.search(leaf, name)}
        if leaves and re.search(kind, total.kind) and re.search(call, total.call):
            found.append(scale_to_leaves(total, leaves))
    return merge_places(found)


def merge_places(found: Iterable[PlaceTotal]) -> PlaceTotal | None:
    """Their sum, with the texts of the largest; None without any."""
    ordered = sorted(found, key=lambda total: -total.seconds)
    if len(ordered) < 2:
        return ordered[0] if ordered else None
    leaves: collections.Counter[str] = collections.Counter()
    for total in ordered:
        leaves.update(total.leaves)
    error_s = math.hypot(*(total.high_s - total.low_s for total in ordered)) / 2
    seconds, samples = sum(total.seconds for total in ordered), sum(total.samples for total in ordered)
    interval = {"low_s": max(0.0, seconds - error_s), "high_s": seconds + error_s}
    seen = {name: max(getattr(one, name) for one in ordered) for name in ("windows", "window_fraction", "bursts")}
    return msgspec.structs.replace(
        ordered[0], leaves=dict(leaves), samples=samples, seconds=seconds, **interval, **seen
    )


def merge_by(places: Iterable[PlaceTotal], key: Callable[[PlaceTotal], K]) -> dict[K, PlaceTotal]:
    """Key → the sum of the places that have it, in the order in which the keys come."""
    groups: dict[K, list[PlaceTotal]] = {}
    for place in places:
        groups.setdefault(key(place), []).append(place)
    return {key: total for key, group in groups.items() if (total := merge_places(group)) is not None}


def _make_total(key: _Key, count: _Count, group: _Count) -> PlaceTotal:
    low, high = wilson(count.seconds / group.seconds if group.seconds > 0 else 0.0, group.samples)
    values = key._asdict()
    values |= values.pop("group")._asdict() | {"low_s": low * group.seconds, "high_s": high * group.seconds}
    values |= {name: getattr(count, name) for name in ("samples", "seconds", "windows", "bursts")}
    callers, window_fraction = count.callers.most_common(1)[0][0], count.windows / group.windows
    return PlaceTotal(
        **values, leaves=dict(count.leaves), callers=callers, window_fraction=window_fraction, grown=count.trend.grown()
    )


def scale_to_leaves(total: PlaceTotal, leaves: dict[str, int]) -> PlaceTotal:
    """The part of a place that is in these innermost frames."""
    samples = sum(leaves.values())
    ratio = samples / total.samples if total.samples else 0.0
    if ratio == 1:
        return total
    scaled = {name: getattr(total, name) * ratio for name in ("seconds", "low_s", "high_s")}
    return msgspec.structs.replace(total, leaves=leaves, samples=samples, **scaled)


def wilson(fraction: float, count: int) -> tuple[float, float]:
    """95 % interval of a fraction of `count` samples; more than all, which only broken records say, is all."""
    if count <= 0:
        return 0.0, 1.0
    fraction = min(max(fraction, 0.0), 1.0)
    center = fraction + _Z**2 / (2 * count)
    error = _Z * math.sqrt(fraction * (1 - fraction) / count + _Z**2 / (4 * count**2))
    scale = 1 + _Z**2 / count
    return max(0.0, (center - error) / scale), min(1.0, (center + error) / scale)
