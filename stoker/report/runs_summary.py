"""`stoker why --all FOLDER`: many runs added up, as data: device time and cost by cause, month and host; failures.

Runs are read one after the other; only sums and short lists are kept, and nothing is written. A run that cannot be read
is listed and left out. `runs_summary_tables.py` makes tables of it for the terminal and the page; a single run is
`explain.py`."""

import heapq
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from stoker.diagnosis import engine
from stoker.diagnosis.catalog import CATALOG
from stoker.diagnosis.reader import Observer
from stoker.errors import StokerError, UsageError
from stoker.findings.finding import Finding
from stoker.hardware.prices import Price
from stoker.report.environment import read_environment
from stoker.report.explain import (
    PHASE_MEANINGS,
    compute_productive_fraction,
    last_record_time,
    open_records,
    read_run_state,
    resolve_price,
)
from stoker.runs import records
from stoker.runs.schemas import StepWindow
from stoker.storage.run_uri import display_path
from stoker.storage.uri import expand_variables, is_uri, parse_uri

MAX_WORST_RUNS = 10
MAX_UNREADABLE = 50
MAX_EXAMPLES = 3
"""Runs that are named for a cause of failure."""
READ_ERRORS = (StokerError, OSError, ValueError, TypeError, AttributeError, KeyError, msgspec.MsgspecError)
"""Errors of reading records that are damaged or of another version."""
RUN_MARKER_FILES = (records.EVENTS, records.STEPS, records.DEVICES)
"""A folder with one of these files is a run."""


class Cost(msgspec.Struct, kw_only=True):
    """A range: some prices are known only by GPU model."""

    low: float = 0.0
    high: float = 0.0
    runs: int = 0
    """Runs that it includes; the price of the others is not known."""

    def add(self, price_range: Price | None, device_s: float) -> None:
        if price_range is not None:
            low, high = price_range.cost(device_s)
            self.low, self.high, self.runs = self.low + low, self.high + high, self.runs + 1


class Aggregate(msgspec.Struct, kw_only=True):
    """Sums of a cause, a month or a host. device_s: the time lost by a cause; all device time of a month or a host."""

    name: str
    meaning: str = ""
    device_s: float = 0.0
    measured_s: float = 0.0
    """The part of device_s in runs whose compute is known."""
    compute_s: float = 0.0
    runs: int = 0
    cost: Cost = msgspec.field(default_factory=Cost)

    @property
    def productive_fraction(self) -> float | None:
        return self.compute_s / self.measured_s if self.measured_s > 0 else None


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One of the worst runs."""

    run: str
    host: str
    state: str
    device_s: float
    lost_s: float
    lost_cost: Cost
    largest_loss: str
    finding: str
    """Title of its first finding, or empty."""


class FailureCount(msgspec.Struct, kw_only=True):
    """A cause for which runs ended early."""

    cause: str
    title: str
    runs: int = 0
    examples: list[str] = []


class UnreadableRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that could not be read."""

    run: str
    error: str


class RunsSummary(msgspec.Struct, kw_only=True):
    """The result."""

    folder: str
    runs: int = 0
    """Number of runs that were read."""
    states: dict[str, int] = {}
    device_s: float = 0.0
    measured_s: float = 0.0
    """Device time of runs whose compute is known; the others were not timed from inside."""
    compute_s: float = 0.0
    cost: Cost = msgspec.field(default_factory=Cost)
    list_priced_runs: int = 0
    """Runs with a list price."""
    phases: list[Aggregate] = []
    """Phases of the runs whose compute is known, the largest first; they add up to `measured_s`."""
    findings: list[Aggregate] = []
    """By cause, the largest first. They overlap with the phases and with each other, so they do not add up."""
    months: list[Aggregate] = []
    """In UTC, the oldest first."""
    hosts: list[Aggregate] = []
    """By the host of the newest attempt, the largest first."""
    worst_runs: list[RunSummary] = []
    failures: list[FailureCount] = []
    """The most frequent first."""
    unreadable: list[UnreadableRun] = []
    """The first MAX_UNREADABLE."""
    num_unreadable: int = 0

    @property
    def productive_fraction(self) -> float | None:
        return self.compute_s / self.measured_s if self.measured_s > 0 else None


class _RunData(msgspec.Struct, frozen=True, kw_only=True):
    """What is added for a run. It is read completely before any of it is added."""

    summary: RunSummary
    price_range: Price | None
    measured_s: float
    phases: dict[str, float]
    months: dict[str, tuple[float, float]]
    """Month → (device-seconds, compute device-seconds)."""
    findings: list[Finding]
    failure: Finding | None


def summarize_runs(
    folder: str | Path, price_per_device_hour: float | None = None, on_progress: Callable[[int], None] | None = None
) -> RunsSummary:
    """Adds up all runs below a folder or a bucket URI. on_progress: called with the number of runs read so far.

    price_per_device_hour: as for `explain_run`. Raises UsageError if there is no such folder or no run in it,
    StorageError.
    """
    aggregates = _Aggregates()
    runs_summary = RunsSummary(folder=str(folder))
    for number, run in enumerate(find_runs(folder, runs_summary), start=1):
        try:
            run_data = _read_run(run, price_per_device_hour)
        except READ_ERRORS as error:
            _add_unreadable(runs_summary, run, error)
        else:
            aggregates.add(runs_summary, run_data)
        if on_progress is not None:
            on_progress(number)
    if not runs_summary.runs and not runs_summary.num_unreadable:
        fix = "name a folder above the folders that training wrote"
        raise UsageError(f"There is no run below {str(folder)!r}.", fix=fix)
    aggregates.finish(runs_summary)
    return runs_summary


def find_runs(folder: str | Path, runs_summary: RunsSummary) -> Iterator[str]:
    """All runs below a folder, at any depth, by name, without hidden folders and links. A folder that cannot be listed
    is added to the unreadable runs."""
    text = expand_variables(str(folder))
    if is_uri(text):
        yield from _find_runs_in_bucket(text)
        return
    if not Path(text).is_dir():
        raise UsageError(f"{text!r} is not a folder.", fix="name a folder with runs, or gs://… or s3://…")

    def on_walk_error(error: OSError) -> None:
        _add_unreadable(runs_summary, str(error.filename), error)

    for directory, folders, files in os.walk(text, onerror=on_walk_error):
        if any(marker in files for marker in RUN_MARKER_FILES):
            folders.clear()  # subfolders of a run belong to it
            yield directory
        else:
            folders[:] = sorted(name for name in folders if not name.startswith("."))


def _find_runs_in_bucket(text: str) -> Iterator[str]:
    from stoker.storage import download  # imports obstore, which local folders do not need
    from stoker.storage.store import open_store

    uri = parse_uri(text)
    for name in download.list_keys(open_store(uri), uri):
        run, _, file = name.rpartition("/")
        if file == records.EVENTS:
            yield str(uri.child(run)) if run else str(uri)


def _add_unreadable(runs_summary: RunsSummary, run: str, error: Exception) -> None:
    runs_summary.num_unreadable += 1
    if len(runs_summary.unreadable) < MAX_UNREADABLE:
        message = str(error) if isinstance(error, StokerError | OSError) else f"{type(error).__name__}: {error}"
        runs_summary.unreadable.append(UnreadableRun(run=run, error=" ".join(message.split())))


def _read_run(run: str, price_per_device_hour: float | None) -> _RunData:
    path = open_records(run)
    months = _Months()
    run_records = engine.read_run(path, observers=[months])
    environment = read_environment(path)
    price_range = resolve_price(run_records.recorded_price, price_per_device_hour, environment)
    run_records.price_per_device_hour = price_range.low if price_range is not None and price_range.is_exact else 0.0
    totals = run_records.totals
    findings = engine.run_rules(run_records)
    state, _ = read_run_state(path, run_records.events, last_record_time(path))
    failures = [finding for finding in findings if finding.id not in CATALOG]  # the likeliest first
    compute_known = compute_productive_fraction(totals, is_external=bool(run_records.events.coverage)) is not None
    lost_s = totals.device_s - totals.phases.get("compute", 0.0) if compute_known else 0.0
    losses = (
        {name: duration_s for name, duration_s in totals.phases.items() if name != "compute"} if compute_known else {}
    )
    lost_cost = Cost()
    lost_cost.add(price_range, lost_s)
    run_summary = RunSummary(
        run=display_path(path),
        host=str(environment.get("hostname") or "unknown"),
        state=state,
        device_s=totals.device_s,
        lost_s=lost_s,
        lost_cost=lost_cost,
        largest_loss=max(losses, key=lambda name: losses[name], default=""),
        finding=findings[0].title if findings else "",
    )
    return _RunData(
        summary=run_summary,
        price_range=price_range,
        measured_s=totals.device_s if compute_known else 0.0,
        phases=totals.phases if compute_known else {},
        months=months.by_month,
        findings=findings,
        failure=failures[0] if failures and state in ("killed", "failed", "preempted", "unknown") else None,
    )


class _Months(Observer):
    """Month (UTC) → (device-seconds, compute), by the end of each window, over all ranks."""

    def __init__(self) -> None:
        self.by_month: dict[str, tuple[float, float]] = {}
        self._month_by_day: dict[int, str] = {}

    def window(self, rank: int, window: StepWindow) -> None:  # noqa: ARG002 (all ranks count)
        day = int(window.t // 86400)
        if day not in self._month_by_day:
            self._month_by_day[day] = time.strftime("%Y-%m", time.gmtime(window.t))
        device_s, compute_s = self.by_month.get(self._month_by_day[day], (0.0, 0.0))
        compute_s += window.phases.get("compute", 0.0)
        self.by_month[self._month_by_day[day]] = (device_s + window.wall_s * window.devices, compute_s)


class _Aggregates:
    """State while runs are added: a row per name, and a heap of the worst runs."""

    def __init__(self) -> None:
        self.phases: dict[str, Aggregate] = {}
        self.findings: dict[str, Aggregate] = {}
        self.months: dict[str, Aggregate] = {}
        self.hosts: dict[str, Aggregate] = {}
        self.failures: dict[str, FailureCount] = {}
        self.worst_runs: list[tuple[float, int, RunSummary]] = []

    def add(self, runs_summary: RunsSummary, run_data: _RunData) -> None:
        run_summary, price_range = run_data.summary, run_data.price_range
        runs_summary.runs += 1
        runs_summary.states[run_summary.state] = runs_summary.states.get(run_summary.state, 0) + 1
        compute_s = run_data.phases.get("compute", 0.0)
        runs_summary.device_s += run_summary.device_s
        runs_summary.measured_s += run_data.measured_s
        runs_summary.compute_s += compute_s
        runs_summary.cost.add(price_range, run_summary.device_s)
        runs_summary.list_priced_runs += price_range is not None and bool(price_range.currency)
        for phase, duration_s in run_data.phases.items():
            _add_to(self.phases, phase, PHASE_MEANINGS.get(phase, ""), duration_s, price_range)
        for finding in run_data.findings:
            _add_to(self.findings, finding.id, finding.title, finding.lost_device_s or 0.0, price_range)
        _add_to(self.hosts, run_summary.host, "", run_summary.device_s, price_range, run_data.measured_s, compute_s)
        for month, (device_s, trained_s) in run_data.months.items():
            compute_known = run_data.measured_s > 0
            known = (device_s, trained_s) if compute_known else (0.0, 0.0)
            _add_to(self.months, month, "", device_s, price_range, *known)
        if run_data.failure is not None:
            failure_count = self.failures.setdefault(
                run_data.failure.id,
                FailureCount(cause=run_data.failure.id, title=run_data.failure.title, examples=[]),
            )
            failure_count.runs += 1
            if len(failure_count.examples) < MAX_EXAMPLES:
                failure_count.examples.append(run_summary.run)
        if run_summary.lost_s > 0:
            heapq.heappush(
                self.worst_runs, (run_summary.lost_s, -runs_summary.runs, run_summary)
            )  # ties: earlier first
            if len(self.worst_runs) > MAX_WORST_RUNS:
                heapq.heappop(self.worst_runs)

    def finish(self, runs_summary: RunsSummary) -> None:
        runs_summary.phases, runs_summary.findings, runs_summary.hosts = (
            sorted(aggregates.values(), key=lambda row: (-row.device_s, -row.runs, row.name))
            for aggregates in (self.phases, self.findings, self.hosts)
        )
        runs_summary.months = sorted(self.months.values(), key=lambda row: row.name)
        runs_summary.worst_runs = [
            row for _, _, row in sorted(self.worst_runs, key=lambda item: item[:2], reverse=True)
        ]
        runs_summary.failures = sorted(self.failures.values(), key=lambda row: (-row.runs, row.cause))


def _add_to(
    aggregates: dict[str, Aggregate],
    name: str,
    meaning: str,
    device_s: float,
    price_range: Price | None,
    measured_s: float = 0.0,
    compute_s: float = 0.0,
) -> None:
    aggregate = aggregates.setdefault(name, Aggregate(name=name, meaning=meaning))
    aggregate.device_s += device_s
    aggregate.measured_s += measured_s
    aggregate.compute_s += compute_s
    aggregate.runs += 1
    aggregate.cost.add(price_range, device_s)
