"""`stoker why --all FOLDER`: many runs added up, as data: device time and cost by cause, month and host; failures.

Each run is read as `stoker why` reads it (`explain.py`), one after the other; only sums and short lists are kept, and
nothing is written. A run that cannot be read is listed and left out. `runs_summary_tables.py` makes tables of it."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from stoker.diagnosis.catalog import CATALOG
from stoker.diagnosis.reader import Observer
from stoker.errors import StokerError, UsageError
from stoker.hardware.prices import Price
from stoker.report.environment import read_environment
from stoker.report.explain import RunExplanation, explain_run, open_records
from stoker.runs import records
from stoker.runs.schemas import StepWindow
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


class Sums(msgspec.Struct, kw_only=True):
    """Sums over runs."""

    runs: int = 0
    device_s: float = 0.0
    """Device time."""
    measured_s: float = 0.0
    """The part of it in runs whose compute is known; the others were not timed from inside."""
    compute_s: float = 0.0
    cost: Cost = msgspec.field(default_factory=Cost)

    @property
    def productive_fraction(self) -> float | None:
        return self.compute_s / self.measured_s if self.measured_s > 0 else None

    def add(self, price: Price | None, device_s: float, measured_s: float = 0.0, compute_s: float = 0.0) -> None:
        """Adds a run."""
        self.runs += 1
        self.device_s += device_s
        self.measured_s += measured_s
        self.compute_s += compute_s
        self.cost.add(price, device_s)


class Aggregate(Sums, kw_only=True):
    """Sums of a phase, a cause, a month or a host. device_s: the time in a phase or lost by a cause; of a month or
    a host all device time."""

    name: str
    meaning: str = ""


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


class RunsSummary(Sums, kw_only=True):
    """The result, the sums over all runs that were read."""

    folder: str
    states: dict[str, int] = {}
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


def summarize_runs(
    folder: str | Path, price_per_device_hour: float | None = None, on_progress: Callable[[int], None] | None = None
) -> RunsSummary:
    """Adds up all runs below a folder or a bucket URI. on_progress: called with the number of runs read so far.

    price_per_device_hour: as for `explain_run`. Raises UsageError if there is no such folder or no run in it,
    StorageError.
    """
    summary = RunsSummary(folder=str(folder))
    for number, run in enumerate(find_runs(folder, summary), start=1):
        try:
            months = _Months()
            explanation = explain_run(run, price_per_device_hour, observers=[months])
            host = str(read_environment(open_records(run)).get("hostname") or "unknown")
        except READ_ERRORS as error:
            _add_unreadable(summary, run, error)
        else:
            _add_run(summary, explanation, host, months.by_month)
        if on_progress is not None:
            on_progress(number)
    if not summary.runs and not summary.num_unreadable:
        fix = "name a folder above the folders that training wrote"
        raise UsageError(f"There is no run below {str(folder)!r}.", fix=fix)
    for rows in (summary.phases, summary.findings, summary.hosts):
        rows.sort(key=lambda row: (-row.device_s, -row.runs, row.name))
    summary.months.sort(key=lambda row: row.name)
    summary.failures.sort(key=lambda row: (-row.runs, row.cause))
    return summary


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
    from stoker.storage.store import list_keys, open_store  # needed for buckets only

    uri = parse_uri(text)
    for name in list_keys(open_store(uri), uri):
        run, _, file = name.rpartition("/")
        if file == records.EVENTS:
            yield str(uri.child(run)) if run else str(uri)


def _add_unreadable(runs_summary: RunsSummary, run: str, error: Exception) -> None:
    runs_summary.num_unreadable += 1
    if len(runs_summary.unreadable) < MAX_UNREADABLE:
        message = str(error) if isinstance(error, StokerError | OSError) else f"{type(error).__name__}: {error}"
        runs_summary.unreadable.append(UnreadableRun(run=run, error=" ".join(message.split())))


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


def _add_run(
    summary: RunsSummary, explanation: RunExplanation, host: str, months: dict[str, tuple[float, float]]
) -> None:
    price, device_s, findings = explanation.price_range, explanation.device_s, explanation.findings
    measured_s = compute_s = 0.0
    if explanation.productive_fraction is not None:
        measured_s, compute_s = device_s, explanation.productive_fraction * device_s
        for phase in explanation.phases:
            _row(summary.phases, phase.phase, phase.meaning).add(price, phase.device_s)
        _add_loss(summary, explanation, host, measured_s - compute_s)
    summary.add(price, device_s, measured_s, compute_s)
    summary.states[explanation.state] = summary.states.get(explanation.state, 0) + 1
    summary.list_priced_runs += price is not None and bool(price.currency)
    for finding in findings:
        _row(summary.findings, finding.id, finding.title).add(price, finding.lost_device_s or 0.0)
    _row(summary.hosts, host).add(price, device_s, measured_s, compute_s)
    for month, (month_s, trained_s) in months.items():
        known = (month_s, trained_s) if measured_s else (0.0, 0.0)
        _row(summary.months, month).add(price, month_s, *known)
    failure = next((finding for finding in findings if finding.id not in CATALOG), None)  # the likeliest first
    if failure is not None and explanation.state in ("killed", "failed", "preempted", "unknown"):
        count = next((row for row in summary.failures if row.cause == failure.id), None)
        if count is None:
            count = FailureCount(cause=failure.id, title=failure.title, examples=[])
            summary.failures.append(count)
        count.runs += 1
        count.examples = [*count.examples, explanation.run][:MAX_EXAMPLES]


def _add_loss(summary: RunsSummary, explanation: RunExplanation, host: str, lost_s: float) -> None:
    """Lists the run if it is one of those that lost most."""
    if lost_s <= 0:
        return
    lost_cost = Cost()
    lost_cost.add(explanation.price_range, lost_s)
    row = RunSummary(
        run=explanation.run,
        host=host,
        state=explanation.state,
        device_s=explanation.device_s,
        lost_s=lost_s,
        lost_cost=lost_cost,
        largest_loss=explanation.largest_loss.phase if explanation.largest_loss else "",
        finding=explanation.findings[0].title if explanation.findings else "",
    )
    worst = sorted([*summary.worst_runs, row], key=lambda row: -row.lost_s)  # stable: of equal ones the earlier first
    summary.worst_runs = worst[:MAX_WORST_RUNS]


def _row(rows: list[Aggregate], name: str, meaning: str = "") -> Aggregate:
    """The row with this name; a new one if there is none."""
    row = next((row for row in rows if row.name == name), None)
    if row is None:
        row = Aggregate(name=name, meaning=meaning)
        rows.append(row)
    return row
