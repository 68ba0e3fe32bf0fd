"""`stoker why RUN`: where the time of a run went, what it cost, the findings, and advice; as data, and printed.

`explain_run` reads a run in any state, `explain_log` the output of a job without a run folder, to find out what ended
it. `run_probes` (`why --probe`) repeats steps of a run in a process of the trainer (`stoker/tuning/experiments.py`).
The page shows the same data (`html.py`); `compare.py` compares two runs, `runs_summary.py` adds up many.
"""

import contextlib
import dataclasses
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

import msgspec
from rich.console import RenderableType

from stoker_watch.diagnosis import engine
from stoker_watch.diagnosis.causes.shared import has_enough_stacks
from stoker_watch.diagnosis.log_meters import find_printed_wait
from stoker_watch.diagnosis.notes import collect_notes
from stoker_watch.diagnosis.places.describe import frequency, name_role
from stoker_watch.diagnosis.places.sampled import PlaceTotal, SampledPlace
from stoker_watch.diagnosis.places.totals import merge_by
from stoker_watch.diagnosis.places.trees import PlaceNode, place_trees
from stoker_watch.diagnosis.postmortem import explain, explain_unknown
from stoker_watch.diagnosis.reader import Observer, read_run
from stoker_watch.diagnosis.run_data import EventSummary, RunRecords, Termination
from stoker_watch.diagnosis.termination import MAX_OUTPUT_BYTES, is_held, lease_holder, read_output
from stoker_watch.errors import StokerError, UsageError, make_error
from stoker_watch.findings.finding import Finding
from stoker_watch.hardware import prices
from stoker_watch.hardware.prices import Price
from stoker_watch.knowledge import read_toml
from stoker_watch.report import format as fmt
from stoker_watch.report.console import facts, plain_text, print_renderables, table
from stoker_watch.report.findings_terminal import explain_line, finding_lines, indented
from stoker_watch.report.sizing import advise_sizing, read_environment, resource_usage
from stoker_watch.runs import records
from stoker_watch.runs.schemas import LOOP_IN_STEP, Event, Probe
from stoker_watch.runs.totals import Totals, goodput
from stoker_watch.storage.uri import display_path, is_uri

State = Literal["running", "finished", "preempted", "failed", "killed", "unknown"]


class _Words(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    phases: dict[str, tuple[str, str]]
    stages: dict[str, str]
    probes: dict[str, str]
    error_types: dict[str, tuple[str, str]]
    goodput: dict[str, list[str]]


_WORDS = msgspec.convert(read_toml("report_words.toml"), _Words)
PHASE_MEANINGS = {name: meaning for name, (meaning, _) in _WORDS.phases.items()}
PHASE_COLORS = {name: f"var({color})" for name, (_, color) in _WORDS.phases.items()}
STAGE_MEANINGS = _WORDS.stages
"""Stage of `input_wait` → its meaning."""
PROBE_LABELS = _WORDS.probes
"""Kind of experiment → what it changes."""
ERROR_TYPE_ADVICE = _WORDS.error_types
"""TIDE error type → its meaning, and what to check."""

MIN_ESTIMATED = 0.2
"""Fraction of the time after the start that no clock attributed, from which its parts are estimated: less is the host's
work between steps (heuristic)."""
TRAINING_STEP = "training step"
"""Row of frames.toml."""
HANG = "hang"
"""Row of the time after the last step of a job that hung; records have it as `unattributed`."""

EVIDENCE_FILES = (
    records.STEPS, records.EVENTS, records.DEVICES, records.TRACES, records.STACKS, records.PROBES, records.RANKS,
    records.QUARANTINE, records.CONFIG, records.ENVIRONMENT, records.CHECKPOINTS, records.BEST, records.FINAL,
    records.OUTPUT,
)  # fmt: skip
"""Files of a run folder that are listed as evidence."""


class PhaseTime(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table. fraction: of all device time, 0 … 1; cost: None without a price."""

    phase: str
    device_s: float
    fraction: float
    cost: float | None
    meaning: str
    stages: "list[PhaseTime]" = []


class PlaceTime(SampledPlace, frozen=True, kw_only=True):
    """A line of the job's own code outside of forward and backward; in a training of stoker's own, a part of stoker
    besides the training step, with the function in which it was most."""

    frequency: str
    """Empty: not known."""
    who: str = ""
    """Who does it, if not the training thread."""

    def text(self) -> str:
        """`37 s (±5) copy.deepcopy ← train.py:53, each step`."""
        error_s = (self.high_s - self.low_s) / 2
        often = f", {self.frequency}" if self.frequency else ""
        if self.kind == LOOP_IN_STEP:
            often = ", in a Python loop inside of the steps, backward pass not counted"
        whose = f", rank {self.rank}" if self.rank else ""
        whose = f", in {self.who}" if self.who else whose
        what = f"{self.call} ← {self.line}" if self.call else f"{self.function} {self.line}"
        if not self.call and not self.function:
            what = f"what {self.line} calls"
        if self.part and not self.line:
            what = f"{self.part}, mostly in {self.function}"
            if self.role == "worker":
                what = f"{self.function.partition(' (')[0]} ← {self.part}"
        return f"{self.seconds:,.0f} s (±{max(1, error_s):,.0f}) {what}{often}{whose}"


class RunExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """What `stoker why` says of a run. docs/run-folder.md describes the fields."""

    run: str
    state: State
    state_text: str
    last_event: Event | None
    last_record_t: float | None
    wall_s: float
    devices: int
    has_device: bool = False
    device_s: float
    attempts: int
    steps: int
    lost_steps: int
    num_images: int
    img_per_s: float | None
    price_per_device_hour: float
    price_range: Price | None = None
    phases: list[PhaseTime]
    productive_fraction: float | None
    goodput: dict[str, float] = {}
    largest_loss: PhaseTime | None
    findings: list[Finding]
    places: list[PlaceTime] = []
    place_trees: list[PlaceNode] = []
    notes: list[Finding] = []
    evidence_paths: dict[str, str]
    missing: str = ""
    """What was not recorded since when, and why, if the recording ended before the job did."""
    coverage: dict[str, str] = {}
    sizing_advice: list[Finding] = []
    probes: list[Probe] = []
    ap: float | None = None

    def rows(self) -> Iterator[tuple[str, PhaseTime]]:
        """Rows of a table: each phase, and indented below it its stages."""
        for row in self.phases:
            yield row.phase, row
            for stage in row.stages:
                yield f"  {stage.phase}", stage

    def cost(self, device_s: float | None) -> tuple[float, float] | None:
        """Minimum and maximum cost of a time; None without a price."""
        return None if self.price_range is None or device_s is None else self.price_range.cost(device_s)

    def cost_text(self, device_s: float | None) -> str:
        """ ", cost 1.20", or nothing without a price."""
        cost_range = self.cost(device_s)
        return "" if cost_range is None else f", cost {fmt.cost_range(cost_range)}"

    def time_cells(self, device_s: float, fraction: float) -> list[str]:
        """The cells of a time: itself, its fraction and, with a price, its cost."""
        cost = [] if self.price_range is None else [fmt.cost_range(self.cost(device_s))]
        return [fmt.duration(device_s), fmt.percentage(fraction), *cost]

    def verdict(self) -> str:
        """The largest loss in a sentence, with longer phases that are not counted as one; empty without one."""
        loss = self.largest_loss
        if loss is None:
            return ""
        lost = f"{fmt.duration(loss.device_s)}, {fmt.percentage(loss.fraction)}{self.cost_text(loss.device_s)}"
        longer = [row for row in self.phases if row.device_s > loss.device_s and row.phase != "compute"]
        besides = " and ".join(f"{row.phase} ({fmt.duration(row.device_s)})" for row in longer)
        most = f"Besides {besides}, most" if longer else "Most"
        return f"{most} time was lost in {loss.phase}: {lost} ({loss.meaning})."


def explain_run(
    run: str | Path, price_per_device_hour: float | None = None, *, observers: Iterable[Observer] = ()
) -> RunExplanation:
    """Reads a run, each of its files once. price_per_device_hour: None means the setting of the run, else the list
    price of its machine. observers: also get each record. Raises UsageError without a run that this version reads."""
    path = open_records(run)
    run_records = read_run(path, observers=observers)
    environment = read_environment(path)
    price_range = resolve_price(run_records.recorded_price, price_per_device_hour, environment)
    exact_price = price_range.low if price_range is not None and price_range.is_exact else 0.0
    run_records = dataclasses.replace(run_records, price_per_device_hour=exact_price)
    findings = engine.run_rules(run_records)
    files = [path / name for name in (records.EVENTS, records.STEPS, records.DEVICES)]
    last_record_t = max((file.stat().st_mtime for file in files if file.exists()), default=None)
    coverage = run_records.events.coverage
    state, state_text = _read_state(path, run_records.events, last_record_t)
    totals = _name_hang(run_records.totals, findings)
    knows_images = bool(totals.num_images) or not coverage
    is_timed = totals.device_s > 0 and (not coverage or "compute" in totals.phases)  # else not from inside
    phases = _phases(totals, exact_price, _estimated_stages(run_records))
    return RunExplanation(
        run=display_path(path),
        state=state,
        state_text=state_text,
        last_event=run_records.events.last,
        last_record_t=last_record_t,
        wall_s=totals.wall_s,
        devices=totals.devices,
        has_device=run_records.has_device,
        device_s=totals.device_s,
        attempts=totals.attempts,
        steps=totals.step,
        lost_steps=max(0, totals.steps - totals.step),
        num_images=totals.num_images,
        img_per_s=totals.num_images / totals.wall_s if totals.wall_s > 0 and knows_images else None,
        price_per_device_hour=exact_price,
        price_range=price_range,
        phases=phases,
        productive_fraction=totals.phases.get("compute", 0.0) / totals.device_s if is_timed else None,
        goodput={
            name: duration_s / totals.device_s for name, duration_s in goodput(totals.phases).items() if duration_s > 0
        }
        if is_timed
        else {},
        largest_loss=_largest_loss(phases, findings),
        findings=findings,
        places=_places(run_records) or ([] if findings else _places_without_steps(run_records)),
        place_trees=place_trees(run_records),
        notes=collect_notes(run_records, findings),
        evidence_paths={name: str(path / name) for name in EVIDENCE_FILES if (path / name).exists()},
        missing=_describe_missing(run_records.events.recording_ended),
        coverage=coverage,
        sizing_advice=advise_sizing(resource_usage(run_records, environment)),
        probes=run_records.all_probes,
        ap=run_records.learning.newest_ap,
    )


def _places(run_records: RunRecords) -> list[PlaceTime]:
    """The places of the most costly costs, of at least a hundredth of their process' time, with waits for a loader; and
    the parts of stoker."""
    places: list[PlaceTotal] = []
    for cost in sorted(run_records.costs, key=lambda cost: -cost.steady_s):
        seen = cost.parts[:1] if cost.phase == "input_wait" and cost.place is None else filter(None, [cost.place])
        places += [place for place in seen if place not in places]
    places += _parts_of_stoker(run_records)
    return [
        _place_time(run_records, place, frequency(run_records, place) if place.line else "")
        for place in places
        if place.seconds >= max(1.0, run_records.observed_s(place) / 100)
    ][:MAX_PLACES]


def _parts_of_stoker(run: RunRecords) -> list[PlaceTotal]:
    """The parts of stoker in which the training thread of a training of stoker's own was after the start, but for the
    training step, and the functions of the threads that load, the largest first."""

    def part_of(place: PlaceTotal) -> tuple[str, int, str, str]:
        function = "" if place.role == "training" else place.function.partition(" ")[0]
        return place.role, place.rank if place.role == "training" else 0, place.part, function

    parts = (place for place in run.places if place.part and not place.line and not place.is_startup)
    working = (
        place for place in parts if (place.part != TRAINING_STEP if place.role == "training" else place.kind != "idle")
    )
    return sorted(merge_by(working, part_of).values(), key=lambda place: -place.seconds)


def _places_without_steps(run_records: RunRecords) -> list[PlaceTime]:
    """The lines where the main thread of a job without a known step was, as of one that prepares data."""
    if not run_records.is_external or run_records.totals.steps:
        return []
    places = (place for place in run_records.places if place.role == "training" and place.line)
    sums = merge_by(places, lambda place: (place.rank, place.line, place.call)).values()
    largest = sorted((total for total in sums if total.seconds >= 1.0), key=lambda total: -total.seconds)
    return [_place_time(run_records, total, "") for total in largest[:MAX_PLACES]]


def _place_time(run: RunRecords, place: PlaceTotal, often: str) -> PlaceTime:
    values = {name: getattr(place, name) for name in SampledPlace.__struct_fields__}
    return PlaceTime(**values, frequency=often, who="" if place.role == "training" else name_role(run, place.role))


def open_records(run: str | Path) -> Path:
    """The folder of a run, also of one that was killed before its first event. Raises UsageError."""
    folder = Path(run)
    if any((folder / name).is_file() for name in (records.STEPS, records.DEVICES, records.ENVIRONMENT)):
        return folder
    return records.open_run(run)


def resolve_price(
    recorded_price: float, price_per_device_hour: float | None, environment: Mapping[str, Any]
) -> Price | None:
    """Price of a device-hour: the given one (0: unknown), else that of the run's records, else the list price."""
    if price_per_device_hour is not None:
        return prices.user_price(price_per_device_hour, "--price-per-device-hour")
    return prices.user_price(recorded_price, "the run's own setting") or prices.price_from_environment(environment)


def _name_hang(totals: Totals, findings: Sequence[Finding]) -> Totals:
    """With a hang, the time since the last step, which no clock could attribute, as the phase `hang`."""
    hung_s = max((finding.lost_device_s or 0.0 for finding in findings if finding.id == "hung"), default=0.0)
    hung_s = min(hung_s, totals.phases.get("unattributed", 0.0))
    if hung_s <= 0:
        return totals
    phases = totals.phases | {HANG: hung_s, "unattributed": totals.phases["unattributed"] - hung_s}
    return dataclasses.replace(totals, phases=phases)


def _largest_loss(phases: Sequence[PhaseTime], findings: Sequence[Finding]) -> PhaseTime | None:
    """The largest phase besides `compute`. Time without a name, as that of the exit, only if there is no other; the
    start only if no fault after it was found."""
    losses = [row for row in phases if row.phase != "compute"]
    delays_all = {"startup_heavy", "cpu_contention"}
    has_fault = any(f.lost_device_s for f in findings if f.severity != "info" and f.id not in delays_all)
    secondary = {"unattributed", "startup"} if has_fault else {"unattributed"}
    return next((row for row in losses if row.phase not in secondary), next(iter(losses), None))


def _estimated_stages(run: RunRecords) -> dict[str, float]:
    """Device-seconds by kind of stack of a watched job, of what no clock attributed after its start. A compilation that
    a clock measured is not in it."""
    unattributed_s = run.steady.phases.get("unattributed", 0.0)
    if run.num_ranks > 1:  # these are of rank 0, the table of all
        return {}
    if not run.is_external or run.steady_phase_fraction("unattributed") < MIN_ESTIMATED or not has_enough_stacks(run):
        return {}
    measured = {"compile"} & run.steady.phases.keys()
    counts = {kind: count for kind, count in run.stacks.main_thread.items() if kind not in measured}
    total = sum(counts.values())
    return {kind: unattributed_s * count / total for kind, count in counts.items()} if total else {}


def _phases(totals: Totals, price_per_device_hour: float, estimated: Mapping[str, float]) -> list[PhaseTime]:
    Parts = Mapping[str, tuple[Mapping[str, float], Mapping[str, str]]]

    def rows(times: Mapping[str, float], meanings: Mapping[str, str], parts: Parts) -> list[PhaseTime]:
        """The largest first. parts: of some of them; a part has none, whatever its name."""
        return [
            PhaseTime(
                phase=name,
                device_s=duration_s,
                fraction=duration_s / totals.device_s if totals.device_s > 0 else 0.0,
                cost=duration_s * price_per_device_hour / 3600 if price_per_device_hour > 0 else None,
                meaning=meanings.get(name, ""),
                stages=rows(*parts.get(name, ({}, {})), {}),
            )
            for name, duration_s in sorted(times.items(), key=lambda item: -item[1])
            if duration_s > 0
        ]

    estimates = dict.fromkeys(estimated, "estimated from samples of the main thread's stack")
    stages = {"input_wait": (totals.input_wait_stages, STAGE_MEANINGS), "unattributed": (estimated, estimates)}
    return rows(totals.phases, PHASE_MEANINGS | {HANG: "nothing ran after the last step"}, stages)


def _describe_missing(ended: tuple[float, str] | None) -> str:
    if ended is None:
        return ""
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(ended[0]))
    return f"steps and time since {since}, when the recording failed ({ended[1]}); the job was not disturbed"


def _read_state(path: Path, events: EventSummary, last_record_t: float | None) -> tuple[State, str]:
    """(state, the state in a sentence). A run is running if a process holds its lock or, in a bucket, a lease that is
    valid. Else the last event of the newest attempt decides; without a final event the run was killed."""
    lock_held, is_external = is_held(path, events.job), bool(events.coverage)
    if lock_held:
        return "running", "running: the job is running" if is_external else "running: a process holds the run"
    holder = lease_holder(path)
    if holder is not None:
        return "running", f"running: {holder} holds the lease, renewed {holder.age_s():.0f} s ago"
    has_settings = (path / records.CONFIG).exists()
    resume = f"; `stoker train --resume {shlex.quote(display_path(path))}` continues it" if has_settings else ""
    if events.end is not None:
        saved = f"stopped by a signal, state saved{resume}"
        message = saved if events.end.kind == "preempted" else events.end.text.partition("\n")[0]
        return msgspec.convert(events.end.kind, State), f"{events.end.kind}: {message}"
    if events.detached_t is not None:
        until = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(events.detached_t))
        return "unknown", f"unknown: watched until {until}, when the job still ran; its end was not seen"
    if lock_held is None:
        return "unknown", "unknown: no end is recorded, and the lock cannot be checked from here"
    if is_external:
        text = "killed: `stoker watch` was killed or the machine went down; how the job ended is not known"
        return "killed", text
    last_t = "never" if last_record_t is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(last_record_t))
    return "killed", f"killed: the process ended without a final event; last record: {last_t}{resume}"


IGNORED_CAUSE = "ended_without_record"
"""The finding that a job ended without a known reason. With a log alone not even the end is known."""


class LogExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """What a log says, and what is not known from it: exit code, telemetry."""

    log: str
    size_bytes: int
    lines: int
    findings: list[Finding]
    not_known: list[str]


def explain_log(path: Path) -> LogExplanation:
    """Reads the end of a log. Raises UsageError if it cannot be read."""
    try:
        output, size_bytes = read_output(path), path.stat().st_size
    except OSError as error:
        raise UsageError("The log cannot be read.", location=path, cause=str(error)) from error
    findings = [finding for finding in explain(Termination(output=output)) if finding.id != IGNORED_CAUSE]
    printed_wait = find_printed_wait(output)
    findings += [printed_wait] if printed_wait is not None else []
    findings = findings or explain_unknown(output)
    not_known = [
        "the exit code or signal, and whether the job has ended",
        "whether the kernel killed it (out of memory), and the state of GPU, memory and disk",
        "where its time went" + (", but for what it printed" if printed_wait is not None else ""),
    ]
    if size_bytes > MAX_OUTPUT_BYTES:
        not_known.append(f"the log before its last {fmt.size(MAX_OUTPUT_BYTES)}")
    last = next((line for line in reversed(output) if line.text.strip()), None)
    lines = 0 if last is None else int(last.source.rpartition(":")[2])
    return LogExplanation(log=str(path), size_bytes=size_bytes, lines=lines, findings=findings, not_known=not_known)


# Terminal

PRODUCTIVE = "productive"
MIN_GOODPUT = 0.005
"""Fraction of the time from which a kind of badput is named."""
MAX_PLACES = 5
"""Places that are shown."""
MAX_FINDINGS = 5
"""Findings that are printed; `--json` has all."""
EXPERIMENTS = (sys.executable, "-m", "stoker.tuning.experiments")
"""Command that does the experiments on a run, whose folder follows."""
PROBE_HEADS = ("changed", "img/s before", "after", "ratio", "95 % interval")


def print_explanation(explanation: RunExplanation, file: TextIO | None = None, *, width: int | None = None) -> None:
    """Prints to `file`, default stdout."""
    renderables: list[RenderableType] = [facts(_facts(explanation)), ""]
    if explanation.phases:
        renderables += [_phase_table(explanation), "", _verdict(explanation), *_goodput_line(explanation)]
    else:
        renderables.append("No time is recorded yet: the run has not reached its first step.")
    if explanation.phases or explanation.findings or explanation.sizing_advice or explanation.probes:
        renderables += _details(explanation)
    print_renderables(renderables, file, width=width)


def _facts(explanation: RunExplanation) -> Iterator[tuple[str, str]]:
    yield "run", explanation.run
    yield "state", explanation.state_text
    if explanation.missing:
        yield "missing", explanation.missing
    lost = f", {fmt.plural(explanation.lost_steps, 'step')} repeated" if explanation.lost_steps else ""
    restarts, devices = fmt.plural(max(0, explanation.attempts - 1), "restart"), explanation.devices
    where = f"in {fmt.plural(devices, 'process', 'processes')}"
    if explanation.has_device:
        where = f"on {fmt.plural(devices, 'device')}"
    yield "time", f"{fmt.duration(explanation.wall_s)} {where}, {restarts}{lost}"
    unit, rate = ("sample", "samples/s") if explanation.coverage else ("image", "img/s")  # a job of others: of any data
    speed = f", {fmt.plural(explanation.num_images, unit)}, {fmt.number(explanation.img_per_s)} {rate} on average"
    if explanation.coverage and not explanation.num_images:
        speed = "" if _has_clock(explanation) else " according to its output"
    yield "work", f"{fmt.plural(explanation.steps, 'step')}{speed}"
    price = explanation.price_range
    if price is not None and price.currency:  # a list price; the user knows a price that they set
        yield "price", f"{fmt.cost_range((price.low, price.high))} {price.currency} per device-hour: {price.source}"
    for tier, status in explanation.coverage.items():
        yield "recorded", f"{tier}: {status}"


def _phase_table(explanation: RunExplanation) -> RenderableType:
    rows: list[list[RenderableType]] = [
        [name, *explanation.time_cells(row.device_s, row.fraction), plain_text(row.meaning, "dim")]
        for name, row in explanation.rows()
    ]
    rows.append(["total", *explanation.time_cells(explanation.device_s, 1.0)])
    time_head = "device time" if explanation.has_device else "time"
    heads = ("phase", time_head, "fraction", *(["cost"] if explanation.price_range is not None else []), "")
    return table(*heads, right=range(1, len(heads) - 1), rows=rows)


def _has_clock(explanation: RunExplanation) -> bool:
    return explanation.coverage.get("inside the job", "").startswith("recorded: ")


def _verdict(explanation: RunExplanation) -> str:
    if explanation.productive_fraction is None:
        reason = "the job was not timed from inside"
        if _has_clock(explanation):
            reason = "its clock saw no step of training"
        if "without a known data loader" in explanation.coverage.get("inside the job", ""):
            reason = "where its batches come from is not known, so waiting for them and training are one"
        return f"The fraction of time in optimizer steps is not known: {reason}."
    trained = f"Optimizer steps took {fmt.percentage(explanation.productive_fraction)} of the time."
    return f"{trained} {explanation.verdict()}".rstrip()


def _goodput_line(explanation: RunExplanation) -> Iterator[RenderableType]:
    """Goodput, and badput by its kinds, the largest first: what dashboards of fleets compare."""
    shown = sorted(explanation.goodput.items(), key=lambda item: (item[0] != PRODUCTIVE, -item[1]))
    if shown:
        text = ", ".join(f"{name} {fmt.percentage(fraction)}" for name, fraction in shown if fraction >= MIN_GOODPUT)
        yield plain_text(f"Goodput: {text}", "dim")


def _details(explanation: RunExplanation) -> Iterator[RenderableType]:
    findings, advice = explanation.findings[:MAX_FINDINGS], explanation.sizing_advice
    if explanation.places:
        yield ""
        is_own = all(place.part for place in explanation.places)
        what = "Parts of stoker besides the training step" if is_own else "Places outside of forward and backward"
        if not explanation.steps and not is_own:
            what = "Places (no step of a training was seen)"
        yield plain_text(f"{what}, by samples of the stacks", "bold")
        yield from (indented(place.text()) for place in explanation.places)
    if not findings:
        yield "The diagnosis found nothing else."
    for finding in findings:
        yield ""
        yield from finding_lines(finding, explanation.cost(finding.lost_device_s))
    if len(explanation.findings) > MAX_FINDINGS:
        yield ""
        yield f"{len(explanation.findings) - MAX_FINDINGS} more: stoker why {explanation.run} --json"
    for title, others in (("", explanation.notes), ("Advice on the size of the machine", advice)):
        if others:
            yield ""
        if others and title:
            yield plain_text(title, "bold")
        for finding in others:
            yield from finding_lines(finding)
    if explanation.probes:
        yield ""
        yield plain_text("Experiments", "bold")
        yield table(*PROBE_HEADS, right=(1, 2, 3), rows=probe_rows(explanation.probes))
    yield ""
    yield plain_text(f"evidence: {', '.join(explanation.evidence_paths)} in {explanation.run}", "dim")
    yield from explain_line([*findings, *explanation.notes, *advice])


def probe_rows(probes: list[Probe]) -> Iterator[tuple[str, str, str, str, str]]:
    """Rows: the change, img/s before and after, their ratio, its interval or the reason why there is none."""
    for probe in probes:
        label = PROBE_LABELS.get(probe.probe, probe.probe)
        if probe.reason:
            yield label, "", "", "", f"not measured: {probe.reason}"
            continue
        unclear = " (unclear)" if probe.ratio_low < 1 < probe.ratio_high else ""
        interval = f"{probe.ratio_low:.2f} … {probe.ratio_high:.2f}{unclear}, {fmt.plural(probe.steps, 'step')} each"
        yield (label, fmt.number(probe.before_img_per_s), fmt.number(probe.after_img_per_s), f"{probe.ratio:.2f}",
               interval + (", automatic" if probe.automatic else ""))  # fmt: skip


def print_log_explanation(explanation: LogExplanation, file: TextIO | None = None, *, width: int | None = None) -> None:
    """Prints each finding with its evidence, then what is not known."""
    size = f"{fmt.plural(explanation.lines, 'line')}, {fmt.size(explanation.size_bytes)}"
    findings = explanation.findings[:MAX_FINDINGS]
    renderables: list[RenderableType] = [f"{explanation.log}: a log, not a recorded run; {size}"]
    if not findings:
        renderables += ["", "It contains no known reason for the end of a job."]
    for finding in findings:
        renderables += ["", *finding_lines(finding)]
    if len(explanation.findings) > MAX_FINDINGS:
        renderables += ["", f"{len(explanation.findings) - MAX_FINDINGS} more: stoker why {explanation.log} --json"]
    renderables += ["", "Not known from the log alone:", *(f"  {text}" for text in explanation.not_known)]
    renderables += explain_line(findings)
    renderables.append("Next time, record the job with `stoker watch -- COMMAND` to get numbers.")
    print_renderables(renderables, file, width=width)


# Experiments


def run_probes(run: str, on_progress: Callable[[str], None]) -> None:
    """Does all experiments and adds them to the records of the run. on_progress: called with a line after each one.
    Raises UsageError for a run that is running, in a bucket, or not of `stoker train`; StokerError if it fails."""
    if is_uri(run):
        raise make_error(UsageError, "experiments-in-a-bucket", run)
    path = records.open_run(run)
    if not (path / records.CONFIG).exists():
        raise make_error(UsageError, "experiments-without-settings", path, file=records.CONFIG)
    if is_held(path) or lease_holder(path) is not None:
        raise make_error(UsageError, "experiments-of-a-live-run", path)
    with contextlib.closing(records.RunFolder(path, records.last_attempt(path))) as folder:
        for result in _run_experiments(path):
            folder.append(records.PROBES, result)
            on_progress(describe_probe(result))


def describe_probe(result: Probe) -> str:
    ((label, before, after, ratio, interval),) = probe_rows([result])
    return f"{label}: {interval if result.reason else f'{ratio} × as fast ({interval}), {before} → {after} img/s'}"


def _run_experiments(path: Path) -> Iterator[Probe]:
    """Yields each experiment as soon as it is done."""
    command = [*EXPERIMENTS, str(path)]
    with (
        tempfile.TemporaryFile() as stderr_file,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr_file) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            yield msgspec.json.decode(line, type=Probe)
        if process.wait() != 0:
            stderr_file.seek(0)
            last_line = stderr_file.read().decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
            code, cause, again = process.returncode, last_line[0], shlex.join(command)
            raise make_error(StokerError, "experiments-failed", path, code=code, line=cause, command=again)
