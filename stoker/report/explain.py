"""`stoker why RUN` as data: where the time of a run went, what it cost, the findings, and advice.

`explain_run` reads a run in any state; `explain_terminal.py` prints the result.
`explain_log` reads the output of a job without a run folder, to find out what ended the job. `compare.py` compares two
runs, `runs_summary.py` adds up many."""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from stoker.diagnosis import engine
from stoker.diagnosis.alive import is_held, lease_holder
from stoker.diagnosis.notes import collect_notes
from stoker.diagnosis.output import MAX_OUTPUT_BYTES, read_output
from stoker.diagnosis.postmortem import explain
from stoker.diagnosis.reader import Observer
from stoker.diagnosis.termination import EventSummary, Termination
from stoker.errors import UsageError
from stoker.findings.finding import Finding
from stoker.hardware import prices
from stoker.hardware.prices import Price
from stoker.report import format as fmt
from stoker.report.environment import read_environment
from stoker.report.idle_estimate import DeviceIdleEstimate, IdleEstimator
from stoker.report.sizing import advise_sizing, resource_usage
from stoker.report.words import PHASE_MEANINGS, STAGE_MEANINGS
from stoker.runs import records
from stoker.runs.schemas import Event, Probe
from stoker.runs.totals import Totals
from stoker.storage.uri import display_path

State = Literal["running", "finished", "preempted", "failed", "killed", "unknown"]

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
    stages: list["PhaseTime"] = []
    """The stages of `input_wait`, the largest first; their fractions are of all device time too."""


class RunExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """The result."""

    run: str
    state: State
    state_text: str
    """The state in a sentence."""
    last_event: Event | None
    last_record_t: float | None
    """Unix time of the last line of any record."""
    wall_s: float
    devices: int
    device_s: float
    attempts: int
    steps: int
    """Optimizer steps of the newest state."""
    lost_steps: int
    """Steps that a restart lost and that were repeated."""
    num_images: int
    img_per_s: float | None
    price_per_device_hour: float
    """0: unknown, or only a range is known."""
    price_range: Price | None = None
    """Price of a device-hour and its source; a range if only the GPU model is known."""
    phases: list[PhaseTime]
    """The largest first."""
    productive_fraction: float | None
    largest_loss: PhaseTime | None
    findings: list[Finding]
    notes: list[Finding] = []
    """Observations that need no action."""
    evidence_paths: dict[str, str]
    """File of the run folder → its path, for those that exist."""
    coverage: dict[str, str] = {}
    """For an external job: data source → what was recorded, or why it was not. Else empty."""
    idle_estimate: DeviceIdleEstimate | None = None
    """Estimate of the time inside `compute` in which the device was idle; not added to any sum."""
    sizing_advice: list[Finding] = []
    """Advice on the size of the machine."""
    probes: list[Probe] = []
    """Experiments done with the run."""

    def rows(self) -> Iterator[tuple[str, PhaseTime]]:
        """Rows of a table: each phase, and indented below it its stages or, for `compute`, the idle estimate."""
        for row in self.phases:
            yield row.phase, row
            if row.phase == "compute" and self.idle_estimate is not None:
                yield "  idle, estimated", self._idle_row(self.idle_estimate)
            for stage in row.stages:
                yield f"  {stage.phase}", stage

    def _idle_row(self, idle: DeviceIdleEstimate) -> PhaseTime:
        windows, steps = fmt.plural(idle.windows, "profiler window"), fmt.plural(idle.steps, "step")
        slower = "" if idle.slowdown is None else f" ({idle.slowdown:.2f} times as long as others)"
        return PhaseTime(
            phase="compute",
            device_s=idle.device_s,
            fraction=idle.fraction,
            cost=exact_cost(idle.device_s, self.price_per_device_hour),
            meaning=f"idle inside steps, estimated from {windows}, {steps}{slower}; not added to any sum",
        )

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
        """The largest loss in a sentence; empty without one."""
        loss = self.largest_loss
        if loss is None:
            return ""
        lost = f"{fmt.duration(loss.device_s)}, {fmt.percentage(loss.fraction)}{self.cost_text(loss.device_s)}"
        return f"Most time was lost in {loss.phase}: {lost} ({loss.meaning})."


def explain_run(
    run: str | Path, price_per_device_hour: float | None = None, *, observers: Iterable[Observer] = ()
) -> RunExplanation:
    """Reads a run, each of its files once. price_per_device_hour: None means the setting of the run, else the list
    price of its machine. observers: also get each record.

    Raises UsageError if the run does not exist or cannot be read by this version.
    """
    path = open_records(run)
    idle = IdleEstimator()
    run_records = engine.read_run(path, observers=(idle, *observers))
    environment = read_environment(path)
    price_range = resolve_price(run_records.recorded_price, price_per_device_hour, environment)
    exact_price = price_range.low if price_range is not None and price_range.is_exact else 0.0
    run_records.price_per_device_hour = exact_price
    findings = engine.run_rules(run_records)
    last_record_t = _last_record_time(path)
    coverage = run_records.events.coverage
    state, state_text = _read_state(path, run_records.events, last_record_t)
    totals = _name_hang(run_records.totals, findings)
    knows_images = bool(totals.num_images) or not coverage
    phases = _phases(totals, exact_price)
    return RunExplanation(
        run=display_path(path),
        state=state,
        state_text=state_text,
        last_event=run_records.events.last,
        last_record_t=last_record_t,
        wall_s=totals.wall_s,
        devices=totals.devices,
        device_s=totals.device_s,
        attempts=totals.attempts,
        steps=totals.step,
        lost_steps=max(0, totals.steps - totals.step),
        num_images=totals.num_images,
        img_per_s=totals.num_images / totals.wall_s if totals.wall_s > 0 and knows_images else None,
        price_per_device_hour=exact_price,
        price_range=price_range,
        phases=phases,
        productive_fraction=_productive_fraction(totals, is_external=bool(coverage)),
        largest_loss=_largest_loss(phases, findings),
        findings=findings,
        notes=collect_notes(run_records, findings),
        evidence_paths={name: str(path / name) for name in EVIDENCE_FILES if (path / name).exists()},
        coverage=coverage,
        idle_estimate=idle.estimate(totals),
        sizing_advice=advise_sizing(resource_usage(run_records, environment)),
        probes=run_records.all_probes,
    )


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


def _productive_fraction(totals: Totals, *, is_external: bool) -> float | None:
    """Fraction of `compute`; None without a window, and for an external job without timing from inside."""
    if totals.device_s <= 0 or (is_external and "compute" not in totals.phases):
        return None
    return totals.phases.get("compute", 0.0) / totals.device_s


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


def _phases(totals: Totals, price_per_device_hour: float) -> list[PhaseTime]:
    def rows(times: Mapping[str, float], meanings: Mapping[str, str]) -> list[PhaseTime]:
        """The largest first."""
        return [
            PhaseTime(
                phase=name,
                device_s=duration_s,
                fraction=duration_s / totals.device_s,
                cost=exact_cost(duration_s, price_per_device_hour),
                meaning=meanings.get(name, ""),
                stages=rows(totals.input_wait_stages, STAGE_MEANINGS) if name == "input_wait" else [],
            )
            for name, duration_s in sorted(times.items(), key=lambda item: -item[1])
            if duration_s > 0
        ]

    return rows(totals.phases, PHASE_MEANINGS | {HANG: "nothing ran after the last step"})


def exact_cost(device_s: float, price_per_device_hour: float) -> float | None:
    """Cost of a time; None without a price."""
    return device_s * price_per_device_hour / 3600 if price_per_device_hour > 0 else None


def _last_record_time(path: Path) -> float | None:
    """Unix time of the newest change of a record; None without records."""
    files = [path / name for name in (records.EVENTS, records.STEPS, records.DEVICES)]
    return max((file.stat().st_mtime for file in files if file.exists()), default=None)


def _read_state(path: Path, events: EventSummary, last_record_t: float | None) -> tuple[State, str]:
    """(state, the state in a sentence).

    A run is running if a process holds its lock or, in a bucket, a lease that is valid. Else the last event of the
    newest attempt decides; without a final event the run was killed.
    """
    lock_held, is_external = is_held(path, events.job), bool(events.coverage)
    if lock_held:
        return "running", "running: the job is running" if is_external else "running: a process holds the run"
    holder = lease_holder(path)
    if holder is not None:
        return "running", f"running: {holder} holds the lease, renewed {holder.age_s():.0f} s ago"
    has_settings = (path / records.CONFIG).exists()
    resume = f"; `stoker train --resume {display_path(path)}` continues it" if has_settings else ""
    if events.end is not None:
        saved = f"stopped by a signal, state saved{resume}"
        message = saved if events.end.kind == "preempted" else events.end.text.partition("\n")[0]
        return _END_STATES[events.end.kind], f"{events.end.kind}: {message}"
    if lock_held is None:
        return "unknown", "unknown: no end is recorded, and the lock cannot be checked from here"
    if is_external:
        text = "killed: `stoker watch` was killed or the machine went down; how the job ended is not known"
        return "killed", text
    last_t = "never" if last_record_t is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last_record_t))
    return "killed", f"killed: the process ended without a final event; last record: {last_t}{resume}"


_END_STATES: dict[str, State] = {"finished": "finished", "preempted": "preempted", "failed": "failed"}


IGNORED_CAUSE = "ended_without_record"
"""The finding that a job ended without a known reason. With a log alone not even the end is known."""


class LogExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """What a log says. It contains neither the exit code nor the telemetry of the machine, so it has to say, too, what
    is not known."""

    log: str
    size_bytes: int
    lines: int
    """Lines that were read."""
    findings: list[Finding]
    not_known: list[str]


def explain_log(path: Path) -> LogExplanation:
    """Reads the end of a log. Raises UsageError if it cannot be read."""
    try:
        output, size_bytes = read_output(path), path.stat().st_size
    except OSError as error:
        raise UsageError("The log cannot be read.", location=path, cause=str(error)) from error
    findings = [finding for finding in explain(Termination(output=output)) if finding.id != IGNORED_CAUSE]
    not_known = [
        "the exit code or signal, and whether the job has ended",
        "whether the kernel killed it (out of memory), and the state of GPU, memory and disk",
        "where its time went",
    ]
    if size_bytes > MAX_OUTPUT_BYTES:
        not_known.append(f"the log before its last {fmt.size(MAX_OUTPUT_BYTES)}")
    lines = sum(bool(line.text.strip()) for line in output)
    return LogExplanation(log=str(path), size_bytes=size_bytes, lines=lines, findings=findings, not_known=not_known)
