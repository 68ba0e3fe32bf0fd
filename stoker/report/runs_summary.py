"""`stoker why --all FOLDER`: many runs added up, as data: device time and money by cause, by month, by host; what died.

One run after the other is read and added; only sums and short lists are kept, and nothing is written. A run that
cannot be read is named and left out. `runs_summary_terminal.py` prints it, `page/fleet.py` makes a page of it. What a
run's own causes are: `explain.py`."""

import heapq
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from stoker.diagnosis import rules
from stoker.diagnosis.failure_signatures import DEATHS
from stoker.errors import StokerError, UsageError
from stoker.hardware.prices import Price
from stoker.report.explain import (
    MEANINGS,
    last_sign,
    open_records,
    productive_share,
    rate_of,
    read_environment,
    state_of,
    was_watched,
)
from stoker.runs import records
from stoker.runs.schemas import Event, Finding, StepWindow
from stoker.storage.run_uri import shown
from stoker.storage.uri import expand, is_address, parse

WORST = 10
DAMAGED_KEPT = 50
EXAMPLES = 3
"""Runs that are named beside a cause of death."""
DAMAGE = (StokerError, OSError, ValueError, TypeError, AttributeError, KeyError, msgspec.MsgspecError)
"""What reading damaged records, or those of another version, raises."""
MARKS = (records.EVENTS, records.STEPS, records.DEVICES)
"""A folder that has one of these is a run."""


class Money(msgspec.Struct, kw_only=True):
    """From `low` to `high`: some prices are known by the kind of GPU alone."""

    low: float = 0.0
    high: float = 0.0
    runs: int = 0
    """That it is of; the price of the others is not known, so with 0 nothing is."""

    def add(self, rate: Price | None, device_s: float) -> None:
        if rate is not None:
            low, high = rate.cost(device_s)
            self.low, self.high, self.runs = self.low + low, self.high + high, self.runs + 1


class Sum(msgspec.Struct, kw_only=True):
    """Of a cause, a month or a host. device_s: lost by the cause; of a month or a host: all of it."""

    name: str
    meaning: str = ""
    device_s: float = 0.0
    measured_s: float = 0.0
    """Of it, device-seconds of runs whose compute is known."""
    compute_s: float = 0.0
    runs: int = 0
    money: Money = msgspec.field(default_factory=Money)

    @property
    def productive_share(self) -> float | None:
        return self.compute_s / self.measured_s if self.measured_s > 0 else None


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """One of the worst runs."""

    run: str
    host: str
    state: str
    device_s: float
    lost_s: float
    money_lost: Money
    largest_loss: str
    finding: str
    """Title of its first finding; empty without one."""


class Died(msgspec.Struct, kw_only=True):
    """A way in which runs ended before their time."""

    cause: str
    title: str
    runs: int = 0
    examples: list[str] = []


class Damaged(msgspec.Struct, frozen=True, kw_only=True):
    """A run that could not be read."""

    run: str
    error: str


class Fleet(msgspec.Struct, kw_only=True):
    """The answer."""

    folder: str
    runs: int = 0
    """That were read."""
    states: dict[str, int] = {}
    device_s: float = 0.0
    measured_s: float = 0.0
    """Of runs whose compute is known; the others were watched from outside."""
    compute_s: float = 0.0
    money: Money = msgspec.field(default_factory=Money)
    listed_runs: int = 0
    """Of the runs with a price, those priced by the list."""
    phases: list[Sum] = []
    """Of the measured runs, the largest first, `compute` among them; they add up to `measured_s`."""
    findings: list[Sum] = []
    """By cause, the largest first. They overlap with the phases and each other, so they are no parts of a whole."""
    months: list[Sum] = []
    """By the time of the work, UTC, the oldest first."""
    hosts: list[Sum] = []
    """By the machine of a run's newest attempt, the largest first."""
    worst: list[RunRow] = []
    died: list[Died] = []
    """The most frequent first."""
    damaged: list[Damaged] = []
    """The first DAMAGED_KEPT."""
    damaged_runs: int = 0

    @property
    def productive_share(self) -> float | None:
        return self.compute_s / self.measured_s if self.measured_s > 0 else None


class _One(msgspec.Struct, frozen=True, kw_only=True):
    """What is added of a run: read as a whole before any of it counts."""

    row: RunRow
    rate: Price | None
    measured_s: float
    phases: dict[str, float]
    months: dict[str, tuple[float, float]]
    """Month → device-seconds, of these compute."""
    findings: list[Finding]
    died: Finding | None


def survey(folder: str | Path, price: float | None = None, progress: Callable[[int], None] | None = None) -> Fleet:
    """Adds up all runs below a folder or an address. price: as for `why.gather`, for all. progress: told how many runs
    are read. Raises UsageError when there is no such folder or no run in it, StorageError."""
    sums = _Sums()
    fleet = Fleet(folder=str(folder))
    for number, run in enumerate(find_runs(folder, fleet), start=1):
        try:
            one = _read(run, price)
        except DAMAGE as error:
            _damaged(fleet, run, error)
        else:
            sums.add(fleet, one)
        if progress is not None:
            progress(number)
    if not fleet.runs and not fleet.damaged_runs:
        fix = "name a folder above the folders that training wrote"
        raise UsageError(f"There is no run below {str(folder)!r}.", fix=fix)
    sums.finish(fleet)
    return fleet


def find_runs(folder: str | Path, fleet: Fleet) -> Iterator[str]:
    """All runs below a folder, at any depth, in the order of their names; hidden folders and links are passed over. A
    folder that cannot be listed is noted as damaged."""
    text = expand(str(folder))
    if is_address(text):
        yield from _in_bucket(text)
        return
    if not Path(text).is_dir():
        raise UsageError(f"{text!r} is no folder.", fix="name a folder with runs, or gs://… or s3://…")

    def unreadable(error: OSError) -> None:
        _damaged(fleet, str(error.filename), error)

    for place, folders, files in os.walk(text, onerror=unreadable):
        if any(mark in files for mark in MARKS):
            folders.clear()  # what lies in a run is of that run
            yield place
        else:
            folders[:] = sorted(name for name in folders if not name.startswith("."))


def _in_bucket(text: str) -> Iterator[str]:
    from stoker.storage import download  # loads obstore, which folders do not need
    from stoker.storage.store import open_store

    address = parse(text)
    for name in download.objects(open_store(address), address):
        run, _, file = name.rpartition("/")
        if file == records.EVENTS:
            yield str(address.child(run)) if run else str(address)


def _damaged(fleet: Fleet, run: str, error: Exception) -> None:
    fleet.damaged_runs += 1
    if len(fleet.damaged) < DAMAGED_KEPT:
        said = str(error) if isinstance(error, StokerError | OSError) else f"{type(error).__name__}: {error}"
        fleet.damaged.append(Damaged(run=run, error=" ".join(said.split())))


def _read(run: str, price: float | None) -> _One:
    path = open_records(run)
    environment = read_environment(path)
    rate = rate_of(path, price, environment)
    seen = rules.read(path, rate.low if rate is not None and rate.exact else 0.0)
    totals = seen.totals
    findings = rules.judge(seen)
    events = list(records.read_lines(path, records.EVENTS, Event))
    state, _ = state_of(path, events, last_sign(path))
    ended = [finding for finding in findings if finding.cause in DEATHS]  # what ended it comes first
    is_known = productive_share(totals, watched=was_watched(events)) is not None
    lost_s = totals.device_s - totals.phases.get("compute", 0.0) if is_known else 0.0
    losses = {name: took_s for name, took_s in totals.phases.items() if name != "compute"} if is_known else {}
    money = Money()
    money.add(rate, lost_s)
    row = RunRow(
        run=shown(path),
        host=str(environment.get("hostname") or "unknown"),
        state=state,
        device_s=totals.device_s,
        lost_s=lost_s,
        money_lost=money,
        largest_loss=max(losses, key=lambda name: losses[name], default=""),
        finding=findings[0].title if findings else "",
    )
    return _One(
        row=row,
        rate=rate,
        measured_s=totals.device_s if is_known else 0.0,
        phases=totals.phases if is_known else {},
        months=_months(path),
        findings=findings,
        died=ended[0] if ended and state in ("dead", "failed", "preempted", "unknown") else None,
    )


def _months(path: Path) -> dict[str, tuple[float, float]]:
    """Month (UTC) → device-seconds and compute, by the end of each window; of all ranks."""
    days: dict[int, str] = {}
    found: dict[str, tuple[float, float]] = {}
    for folder in (path, *sorted((path / records.RANKS).glob("*"))):
        for window in records.read_lines(folder, records.STEPS, StepWindow):
            day = int(window.t // 86400)
            if day not in days:
                days[day] = time.strftime("%Y-%m", time.gmtime(window.t))
            device_s, compute_s = found.get(days[day], (0.0, 0.0))
            compute_s += window.phases.get("compute", 0.0)
            found[days[day]] = (device_s + window.wall_s * window.devices, compute_s)
    return found


class _Sums:
    """What grows while runs are added: a row for each name, and a heap of the worst runs."""

    def __init__(self) -> None:
        self.phases: dict[str, Sum] = {}
        self.findings: dict[str, Sum] = {}
        self.months: dict[str, Sum] = {}
        self.hosts: dict[str, Sum] = {}
        self.died: dict[str, Died] = {}
        self.worst: list[tuple[float, int, RunRow]] = []

    def add(self, fleet: Fleet, one: _One) -> None:
        row, rate = one.row, one.rate
        fleet.runs += 1
        fleet.states[row.state] = fleet.states.get(row.state, 0) + 1
        compute_s = one.phases.get("compute", 0.0)
        fleet.device_s += row.device_s
        fleet.measured_s += one.measured_s
        fleet.compute_s += compute_s
        fleet.money.add(rate, row.device_s)
        fleet.listed_runs += rate is not None and bool(rate.currency)
        for phase, took_s in one.phases.items():
            _add(self.phases, phase, MEANINGS.get(phase, ""), took_s, rate)
        for finding in one.findings:
            _add(self.findings, finding.cause, finding.title, finding.lost_device_s or 0.0, rate)
        _add(self.hosts, row.host, "", row.device_s, rate, one.measured_s, compute_s)
        for month, (device_s, trained_s) in one.months.items():
            is_known = one.measured_s > 0
            known = (device_s, trained_s) if is_known else (0.0, 0.0)
            _add(self.months, month, "", device_s, rate, *known)
        if one.died is not None:
            died = self.died.setdefault(one.died.cause, Died(cause=one.died.cause, title=one.died.title, examples=[]))
            died.runs += 1
            if len(died.examples) < EXAMPLES:
                died.examples.append(row.run)
        if row.lost_s > 0:
            heapq.heappush(self.worst, (row.lost_s, -fleet.runs, row))  # the earlier of two that are alike
            if len(self.worst) > WORST:
                heapq.heappop(self.worst)

    def finish(self, fleet: Fleet) -> None:
        fleet.phases, fleet.findings, fleet.hosts = (
            sorted(of.values(), key=lambda row: (-row.device_s, -row.runs, row.name))
            for of in (self.phases, self.findings, self.hosts)
        )
        fleet.months = sorted(self.months.values(), key=lambda row: row.name)
        fleet.worst = [row for _, _, row in sorted(self.worst, key=lambda item: item[:2], reverse=True)]
        fleet.died = sorted(self.died.values(), key=lambda row: (-row.runs, row.cause))


def _add(
    rows: dict[str, Sum],
    name: str,
    meaning: str,
    device_s: float,
    rate: Price | None,
    measured_s: float = 0.0,
    compute_s: float = 0.0,
) -> None:
    row = rows.setdefault(name, Sum(name=name, meaning=meaning))
    row.device_s += device_s
    row.measured_s += measured_s
    row.compute_s += compute_s
    row.runs += 1
    row.money.add(rate, device_s)
