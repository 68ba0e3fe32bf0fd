"""`stoker why --all FOLDER`: many runs added up, as data: device time and cost by cause, month and host; failures.

Each run is read as `stoker why` reads it (`explain.py`), one after the other; only sums and short lists are kept. A run
that cannot be read is listed and left out. Terminal and page (`html.py`) show the same tables."""

import dataclasses
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

import msgspec
from rich.console import RenderableType

from stoker_watch.diagnosis.endings import endings
from stoker_watch.diagnosis.engine import CATALOG
from stoker_watch.diagnosis.reader import Observer
from stoker_watch.errors import StokerError, UsageError, make_error
from stoker_watch.findings.finding import Finding
from stoker_watch.hardware.prices import CURRENCY, Price
from stoker_watch.report import format as fmt
from stoker_watch.report.console import facts, plain_text, print_renderables, table
from stoker_watch.report.explain import RunExplanation, explain_run, open_records
from stoker_watch.report.sizing import read_environment
from stoker_watch.runs import records
from stoker_watch.runs.schemas import StepWindow
from stoker_watch.storage.uri import expand_variables, is_uri, parse_uri

MAX_WORST_RUNS = 10
MAX_UNREADABLE = 50
MAX_EXAMPLES = 3
"""Runs that are named for a cause of failure."""
RUN_MARKER_FILES = (records.EVENTS, records.STEPS, records.DEVICES)
"""A folder with one of these files is a run."""


class CauseCost(msgspec.Struct, kw_only=True):
    """A range: some prices are known only by GPU model."""

    low: float = 0.0
    high: float = 0.0
    runs: int = 0

    def add(self, price_range: Price | None, device_s: float) -> None:
        if price_range is not None:
            low, high = price_range.cost(device_s)
            self.low, self.high, self.runs = self.low + low, self.high + high, self.runs + 1

    def __str__(self) -> str:
        return fmt.cost_range((self.low, self.high) if self.runs else None)


class Sums(msgspec.Struct, kw_only=True):
    """Sums over runs. device_s: in a phase, or lost by a cause; of a month, a host or all runs all device time."""

    runs: int = 0
    device_s: float = 0.0
    measured_s: float = 0.0
    compute_s: float = 0.0
    cost: CauseCost = msgspec.field(default_factory=CauseCost)

    @property
    def productive_fraction(self) -> float | None:
        return self.compute_s / self.measured_s if self.measured_s > 0 else None

    def add(self, price: Price | None, device_s: float, measured_s: float = 0.0, compute_s: float = 0.0) -> None:
        self.runs += 1
        self.device_s += device_s
        self.measured_s += measured_s
        self.compute_s += compute_s
        self.cost.add(price, device_s)


class Aggregate(Sums, kw_only=True):
    """Sums of a phase, a cause, a month or a host."""

    name: str
    meaning: str = ""


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One of the worst runs."""

    run: str
    host: str
    state: str
    device_s: float
    lost_s: float
    lost_cost: CauseCost
    largest_loss: str
    finding: str


class FailureCount(msgspec.Struct, kw_only=True):
    """A cause for which runs ended early."""

    cause: str
    title: str
    runs: int = 0
    examples: list[str] = []


class UnreadableRun(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    error: str


class RunsSummary(Sums, kw_only=True):
    """The result, the sums over all runs that were read."""

    folder: str
    states: dict[str, int] = {}
    list_priced_runs: int = 0
    phases: list[Aggregate] = []
    findings: list[Aggregate] = []
    months: list[Aggregate] = []
    hosts: list[Aggregate] = []
    worst_runs: list[RunSummary] = []
    failures: list[FailureCount] = []
    unreadable: list[UnreadableRun] = []
    num_unreadable: int = 0


def summarize_runs(
    folder: str | Path, price_per_device_hour: float | None = None, on_progress: Callable[[int], None] | None = None
) -> RunsSummary:
    """Adds up all runs below a folder or a bucket URI. on_progress: called with the number of runs read so far.
    price_per_device_hour: as for `explain_run`. Raises UsageError without the folder or a run in it, StorageError."""
    summary = RunsSummary(folder=str(folder))
    for number, run in enumerate(find_runs(folder, summary), start=1):
        try:
            months = _Months()
            explanation = explain_run(run, price_per_device_hour, observers=[months])
            host = str(read_environment(open_records(run)).get("hostname") or "unknown")
        except Exception as error:  # noqa: BLE001 (no run may hide the others)
            _add_unreadable(summary, run, error)
        else:
            _add_run(summary, explanation, host, months)
        if on_progress is not None:
            on_progress(number)
    if not summary.runs and not summary.num_unreadable:
        raise make_error(UsageError, "no-run-below", folder=str(folder))
    for rows in (summary.phases, summary.findings, summary.hosts):
        rows.sort(key=lambda row: (-row.device_s, -row.runs, row.name))
    summary.months.sort(key=lambda row: row.name)
    summary.failures.sort(key=lambda row: (-row.runs, row.cause))
    return summary


def find_runs(folder: str | Path, runs_summary: RunsSummary) -> Iterator[str]:
    """All runs below a folder, by name, without hidden folders and links; adds unreadable folders to the summary."""
    text = expand_variables(str(folder))
    if is_uri(text):
        from stoker_watch.storage.store import list_keys, open_store  # needed for buckets only

        uri = parse_uri(text)
        for name in list_keys(open_store(uri), uri):
            run, _, file = name.rpartition("/")
            if file == records.EVENTS:
                yield str(uri.child(run)) if run else str(uri)
        return
    if not Path(text).is_dir():
        raise UsageError(f"{text!r} is not a folder.", fix="name a folder with runs, or gs://… or s3://…")
    walk = os.walk(text, onerror=lambda error: _add_unreadable(runs_summary, str(error.filename), error))
    for directory, folders, files in walk:
        if any(marker in files for marker in RUN_MARKER_FILES):
            folders.clear()  # subfolders of a run belong to it
            yield directory
        else:
            folders[:] = sorted(name for name in folders if not name.startswith("."))


def _add_unreadable(runs_summary: RunsSummary, run: str, error: Exception) -> None:
    runs_summary.num_unreadable += 1
    if len(runs_summary.unreadable) < MAX_UNREADABLE:
        message = str(error) if isinstance(error, StokerError | OSError) else f"{type(error).__name__}: {error}"
        runs_summary.unreadable.append(UnreadableRun(run=run, error=" ".join(message.split())))


class _Months(Observer):
    """Device-seconds and compute by month (UTC) of the end of each window, over all ranks."""

    def __init__(self) -> None:
        self.device_s, self.compute_s = Counter[str](), Counter[str]()

    def window(self, rank: int, window: StepWindow) -> None:  # noqa: ARG002 (all ranks count)
        month = time.strftime("%Y-%m", time.gmtime(window.t))
        self.device_s.update({month: window.wall_s * window.devices})
        self.compute_s.update({month: window.phases.get("compute", 0.0)})


def _add_run(summary: RunsSummary, explanation: RunExplanation, host: str, months: _Months) -> None:
    price, device_s, findings = explanation.price_range, explanation.device_s, explanation.findings
    measured_s = compute_s = 0.0
    if explanation.productive_fraction is not None:
        measured_s, compute_s = device_s, explanation.productive_fraction * device_s
        for phase in explanation.phases:
            _row(summary.phases, phase.phase, phase.meaning).add(price, phase.device_s)
    if (lost_s := measured_s - compute_s) > 0:
        lost_cost = CauseCost()
        lost_cost.add(price, lost_s)
        lost = RunSummary(
            run=explanation.run,
            host=host,
            state=explanation.state,
            device_s=device_s,
            lost_s=lost_s,
            lost_cost=lost_cost,
            largest_loss=explanation.largest_loss.phase if explanation.largest_loss else "",
            finding=findings[0].title if findings else "",
        )
        ordered = sorted([*summary.worst_runs, lost], key=lambda row: -row.lost_s)  # of equal ones the earlier first
        summary.worst_runs = ordered[:MAX_WORST_RUNS]
    summary.add(price, device_s, measured_s, compute_s)
    summary.states[explanation.state] = summary.states.get(explanation.state, 0) + 1
    summary.list_priced_runs += price is not None and bool(price.currency)
    for finding in findings:
        _row(summary.findings, finding.id, _title(finding)).add(price, finding.lost_device_s or 0.0)
    _row(summary.hosts, host).add(price, device_s, measured_s, compute_s)
    for month, month_s in months.device_s.items():
        known = (month_s, months.compute_s[month]) if measured_s else (0.0, 0.0)
        _row(summary.months, month).add(price, month_s, *known)
    failure = next((finding for finding in findings if finding.id not in CATALOG), None)  # the likeliest first
    if failure is not None and explanation.state in ("killed", "failed", "preempted", "unknown"):
        count = next((row for row in summary.failures if row.cause == failure.id), None)
        if count is None:
            count = FailureCount(cause=failure.id, title=_title(failure), examples=[])
            summary.failures.append(count)
        count.runs += 1
        count.examples = [*count.examples, explanation.run][:MAX_EXAMPLES]


def _title(finding: Finding) -> str:
    """What its id means: the title of a single finding may name a line or a file of its run."""
    row = CATALOG.get(finding.id) or endings().get(finding.id)
    return finding.title if row is None else row.title


def _row(rows: list[Aggregate], name: str, meaning: str = "") -> Aggregate:
    """The row with this name; a new one if there is none."""
    row = next((row for row in rows if row.name == name), None)
    if row is None:
        row = Aggregate(name=name, meaning=meaning)
        rows.append(row)
    return row


# Tables

MAX_ROWS = 10
"""Rows of a table on the terminal; `--json` has all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SummaryTable:
    """A table whose first column is a name. Columns of `right` are numbers; the last column may be a sentence."""

    title: str
    heads: Sequence[str]
    rows: list[list[str]]
    right: Sequence[int] = ()
    noun: str = "row"
    """What a row is about."""
    total: int = 0
    """Number of rows, if some are left out already."""

    def cut(self, max_rows: int) -> tuple[list[list[str]], str]:
        """(the first rows, how many more there are in words; empty if there are no more)."""
        more = max(self.total, len(self.rows)) - max_rows
        return self.rows[:max_rows], f"{fmt.plural(more, self.noun)} more" if more > 0 else ""


def print_runs_summary(summary: RunsSummary, file: TextIO | None = None, *, width: int | None = None) -> None:
    """Prints totals, then tables: phases, findings, months, hosts, the worst runs, failures, unreadable runs."""
    renderables: list[RenderableType] = [facts(summary_rows(summary))]
    tables = make_tables(summary)
    for name, summary_table in tables.items():
        is_long = name in ("findings", "hosts", "unreadable")
        rows, more = summary_table.cut(MAX_ROWS if is_long else len(summary_table.rows))
        if rows:
            cells: list[list[RenderableType]] = [[*others, plain_text(last, "dim")] for *others, last in rows]
            renderables += ["", plain_text(summary_table.title, "bold")]
            renderables.append(table(*summary_table.heads, right=summary_table.right, rows=cells))
        if more:
            renderables.append(plain_text(f"{more}: --json", "dim"))
    print_renderables(renderables, file, width=width)


def summary_rows(summary: RunsSummary) -> Iterator[tuple[str, str]]:
    """The totals as rows: name, text."""
    yield "folder", summary.folder
    states = ", ".join(f"{count:,} {state}" for state, count in sorted(summary.states.items()))
    unread = f"; {fmt.plural(summary.num_unreadable, 'run')} could not be read" if summary.num_unreadable else ""
    yield "runs", f"{summary.runs:,}" + (f": {states}" if states else "") + unread
    yield "time", f"{_hours(summary.device_s)} device-hours"
    if summary.cost.runs:
        listed = f", {summary.list_priced_runs:,} of them with a list price" if summary.list_priced_runs else ""
        currency = f" {CURRENCY}" if summary.list_priced_runs == summary.cost.runs else ""
        priced_runs = fmt.plural(summary.cost.runs, "run")
        yield "cost", f"{summary.cost}{currency}, of {priced_runs} with a price{listed}"
    if summary.productive_fraction is None:
        yield "trained", "not known: no job was timed from inside"
        return
    external_s = summary.device_s - summary.measured_s
    external = f"; {_hours(external_s)} more device-hours were not timed from inside" if external_s > 0 else ""
    trained = fmt.percentage(summary.productive_fraction)
    yield "trained", f"{trained} of {_hours(summary.measured_s)} device-hours{external}"


def make_tables(summary: RunsSummary) -> dict[str, SummaryTable]:
    """The tables by name, in order; some may be empty. The phases are those of the runs whose compute is known."""
    phases = _sums_table("device time by phase", "phase", summary.phases, summary.measured_s)
    if phases.rows:
        phases.rows.append(["total", _hours(summary.measured_s), "100 %", "", "", ""])
    overlap = "findings (they overlap with the phases and with each other)"
    worst = [
        [run.run, _hours(run.lost_s), _hours(run.device_s), str(run.lost_cost), run.largest_loss, run.finding]
        for run in summary.worst_runs
    ]
    worst_heads = ("run", "lost hours", "of", "cost", "largest loss", "first finding")
    failure_heads = ("cause", "runs", "what", "for example")
    failures = [[row.cause, fmt.count(row.runs), row.title, ", ".join(row.examples)] for row in summary.failures]
    unreadable = [[row.run, row.error] for row in summary.unreadable]
    return {
        "phases": phases,
        "findings": _sums_table(overlap, "cause", summary.findings, summary.device_s),
        "months": _sums_table("by month, UTC", "month", summary.months),
        "hosts": _sums_table("by host", "host", summary.hosts),
        "worst": SummaryTable(title="most device time lost", heads=worst_heads, rows=worst, right=(1, 2, 3)),
        "failures": SummaryTable(title="ended early", heads=failure_heads, rows=failures, right=(1,)),
        "unreadable": SummaryTable(
            title="could not be read", heads=("run", "error"), rows=unreadable, noun="run", total=summary.num_unreadable
        ),
    }


def _sums_table(title: str, noun: str, sums: list[Aggregate], total_s: float | None = None) -> SummaryTable:
    """total_s: the time that the rows are parts of, each with a meaning; one that is not about time, as of some
    findings, has no numbers besides its runs. None: the rows are whole runs, and their compute is shown."""
    rows = []
    for row in sums:
        fraction = row.productive_fraction if total_s is None else row.device_s / total_s if total_s > 0 else None
        times = [_hours(row.device_s), fmt.percentage(fraction), str(row.cost)]
        times = times if total_s is None or row.device_s > 0 else ["", "", ""]
        rows.append([row.name, *times, fmt.count(row.runs), *([] if total_s is None else [row.meaning])])
    fraction_head, last = ("trained", ()) if total_s is None else ("fraction", ("meaning",))
    heads = (noun, "device-hours", fraction_head, "cost", "runs", *last)
    return SummaryTable(title=title, heads=heads, rows=rows, right=range(1, 5), noun=noun)


def _hours(device_s: float) -> str:
    """Device-hours: 0.31, 12.5, 3,210."""
    return fmt.number(device_s / 3600)
