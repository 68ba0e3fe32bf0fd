"""`stoker why RUN` as data: where the time of a run went, what it cost, the findings, and advice.

`explain_run` reads a run in any state; `explain_terminal.py` prints the result; `explanation_as_dict` is its JSON.
`compare.py` compares two runs, `runs_summary.py` adds up many, and `foreign_log.py` reads a log without a run."""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from stoker.diagnosis import engine
from stoker.diagnosis.alive import is_held, lease_holder
from stoker.diagnosis.notes import collect_notes
from stoker.diagnosis.reader import Observer
from stoker.diagnosis.termination import EventSummary
from stoker.findings.finding import Finding
from stoker.hardware import prices
from stoker.hardware.prices import Price
from stoker.report import format as fmt
from stoker.report.environment import read_environment
from stoker.report.idle_estimate import DeviceIdleEstimate, IdleEstimator
from stoker.report.sizing import advise_sizing, resource_usage
from stoker.runs import records
from stoker.runs.schemas import Event, Probe
from stoker.runs.totals import Totals
from stoker.storage.run_uri import display_path

State = Literal["running", "finished", "preempted", "failed", "killed", "unknown"]

PHASE_MEANINGS = {
    "compute": "the device ran optimizer steps",
    "startup": "imports, weights, index, auto batch, until the first step",
    "compile": "compilation and autotuning of kernels",
    "input_wait": "the device waited for input",
    "h2d": "the device waited for host-to-device copies",
    "host": "the device waited for the host to launch kernels",
    "sync": "explicit synchronization: the host waited for the device",
    "comm": "exchange with other devices: gradients, or the maps between stages",
    "straggler": "devices waited for the slowest one",
    "eval": "evaluation",
    "checkpoint": "training was paused to save a checkpoint",
    "recovery": "steps that a restart lost were repeated",
    "idle": "the device had no work to do",
    "unattributed": "time that was not attributed to any phase",
}
"""Phase → its meaning in short; docs/run-folder.md has the details."""

HANG = "hang"
"""Row of the time after the last step of a job that hung; records have it as `unattributed`."""

STAGE_MEANINGS = {
    "fetch": "reading bytes from the disk or the bucket",
    "decode": "decoding and resizing",
    "copy": "host-to-device copies",
    "queue": "handing over the batch",
}
"""Stage of `input_wait` → its meaning in short."""


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
        meaning = f"idle inside steps, estimated from {windows}, {steps}{slower}; not added to any sum"
        cost = exact_cost(idle.device_s, self.price_per_device_hour)
        return PhaseTime(phase="compute", device_s=idle.device_s, fraction=idle.fraction, cost=cost, meaning=meaning)

    def cost(self, device_s: float | None) -> tuple[float, float] | None:
        """Minimum and maximum cost of a time; None without a price."""
        return None if self.price_range is None or device_s is None else self.price_range.cost(device_s)


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
    last_record_t = last_record_time(path)
    coverage = run_records.events.coverage
    state, state_text = read_run_state(path, run_records.events, last_record_t)
    if coverage:
        state_text = _EXTERNAL_STATES.get(state, state_text)
    totals = _name_hang(run_records.totals, findings)
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
        img_per_s=totals.num_images / totals.wall_s
        if totals.wall_s > 0 and (totals.num_images or not coverage)
        else None,
        price_per_device_hour=exact_price,
        price_range=price_range,
        phases=phases,
        productive_fraction=compute_productive_fraction(totals, is_external=bool(coverage)),
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


def compute_productive_fraction(totals: Totals, *, is_external: bool) -> float | None:
    """Fraction of `compute`; None without a window, and for an external job without timing from inside."""
    if totals.device_s <= 0 or (is_external and "compute" not in totals.phases):
        return None
    return totals.phases.get("compute", 0.0) / totals.device_s


def explanation_as_dict(explanation: RunExplanation) -> dict[str, Any]:
    """The result in plain values, for JSON."""
    built: dict[str, Any] = msgspec.to_builtins(explanation)
    return built


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
    def make_phase_time(name: str, seconds: float, meaning: str, stages: list[PhaseTime]) -> PhaseTime:
        return PhaseTime(
            phase=name,
            device_s=seconds,
            fraction=seconds / totals.device_s,
            cost=exact_cost(seconds, price_per_device_hour),
            meaning=meaning,
            stages=stages,
        )

    def largest_first(rows: list[PhaseTime]) -> list[PhaseTime]:
        return sorted(rows, key=lambda row: -row.device_s)

    meanings = PHASE_MEANINGS | {HANG: "nothing ran after the last step"}
    stages = [
        make_phase_time(name, duration_s, STAGE_MEANINGS.get(name, ""), [])
        for name, duration_s in totals.input_wait_stages.items()
        if duration_s > 0
    ]
    return largest_first(
        [
            make_phase_time(
                name, duration_s, meanings.get(name, ""), largest_first(stages) if name == "input_wait" else []
            )
            for name, duration_s in totals.phases.items()
            if duration_s > 0
        ]
    )


def exact_cost(device_s: float, price_per_device_hour: float) -> float | None:
    """Cost of a time; None without a price."""
    return device_s * price_per_device_hour / 3600 if price_per_device_hour > 0 else None


def last_record_time(path: Path) -> float | None:
    """Unix time of the newest change of a record; None without records."""
    files = [path / name for name in (records.EVENTS, records.STEPS, records.DEVICES)]
    return max((file.stat().st_mtime for file in files if file.exists()), default=None)


_EXTERNAL_STATES: dict[State, str] = {
    "running": "running: the job is running",
    "killed": "killed: `stoker watch` was killed or the machine went down; how the job ended is not known",
}
_END_STATES: dict[str, State] = {"finished": "finished", "preempted": "preempted", "failed": "failed"}


def read_run_state(path: Path, events: EventSummary, last_record_t: float | None) -> tuple[State, str]:
    """(state, the state in a sentence).

    A run is running if a process holds its lock or, in a bucket, a lease that is valid. Else the last event of the
    newest attempt decides; without a final event the run was killed.
    """
    lock_held = is_held(path, events.job)
    if lock_held:
        return "running", "running: a process holds the run"
    holder = lease_holder(path)
    if holder is not None:
        return "running", f"running: {holder} holds the lease, renewed {holder.age_s():.0f} s ago"
    end_event = events.end
    if end_event is not None:
        message = end_event.text.partition("\n")[0]
        descriptions = {"preempted": f"stopped by a signal, state saved{_resume_hint(path)}"}
        return _END_STATES[end_event.kind], f"{end_event.kind}: {descriptions.get(end_event.kind, message)}"
    if lock_held is None:
        return "unknown", "unknown: no end is recorded, and the lock cannot be checked from here"
    last_seen = (
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last_record_t)) if last_record_t is not None else "never"
    )
    text = f"killed: the process ended without a final event; last record: {last_seen}{_resume_hint(path)}"
    return "killed", text


def _resume_hint(path: Path) -> str:
    """How to resume a training, as the end of a sentence; empty for external jobs."""
    return f"; `stoker train --resume {display_path(path)}` continues it" if (path / records.CONFIG).exists() else ""
