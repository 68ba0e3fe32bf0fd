"""What `stoker why RUN` says, as data: where the time of a run went, what that cost, what to change, what is known.

`gather` reads a run, live, dead or finished; `explain_terminal.py` prints it; `why_as_dict` is its JSON. Two runs are
compared in `compare.py`, many are added up in `fleet.py`; a log that is no run is `foreign_log.py`."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from stoker.config import old_names
from stoker.diagnosis import rules
from stoker.diagnosis.alive import is_held, lease_holder
from stoker.hardware import prices
from stoker.hardware.prices import Price
from stoker.report.idle_estimate import DeviceIdleEstimate, estimate_idle
from stoker.report.sizing import SizingAdvice, advise_sizing, read_resource_usage
from stoker.runs import records
from stoker.runs.schemas import Event, Finding, Probe
from stoker.runs.totals import Totals
from stoker.storage.run_uri import display_path
from stoker.storage.uri import is_uri

State = Literal["live", "finished", "preempted", "failed", "dead", "unknown"]

PHASE_MEANINGS = {
    "compute": "the device worked on optimizer steps",
    "startup": "imports, weights, index, choice of the batch, until the first step",
    "compile": "kernels were compiled or chosen",
    "input_wait": "the device waited for pictures",
    "h2d": "the device waited for copies from the host",
    "host": "the device waited for the host to issue work",
    "sync": "the host waited for the device by name",
    "comm": "devices exchanged gradients",
    "straggler": "devices waited for the slowest one",
    "eval": "evaluation",
    "checkpoint": "training stood still for a checkpoint",
    "recovery": "steps that a restart lost were done again",
    "idle": "nothing was asked of the device",
    "unattributed": "no clock saw it",
}
"""A phase in a few words; docs/run-folder.md has more."""

STAGE_MEANINGS = {
    "fetch": "for their bytes, from the disk or the bucket",
    "decode": "for decoding and resizing",
    "copy": "for copies to the device",
    "queue": "for the batch to be handed over",
}
"""A stage of `input_wait` in a few words."""


EVIDENCE_FILES = (
    records.STEPS, records.EVENTS, records.DEVICES, records.TRACES, records.STACKS, records.PROBES, records.RANKS,
    records.QUARANTINE, records.CONFIG, records.ENVIRONMENT, records.CHECKPOINTS, records.BEST, records.FINAL,
    records.OUTPUT,
)  # fmt: skip
"""Records that the answer may rest on."""


class PhaseTime(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table. share: of all device time, 0 … 1; money: None without a price."""

    phase: str
    device_s: float
    fraction: float
    cost: float | None
    meaning: str
    stages: list["PhaseTime"] = []
    """Of `input_wait`: its stages, the largest first; their shares are of all device time too."""


class RunExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """The answer."""

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
    """Of the newest state."""
    lost_steps: int
    """Done, lost by a restart and done again."""
    num_images: int
    img_per_s: float | None
    price_per_device_hour: float
    """Money per device-hour; 0: unknown, or only a range is known."""
    price_range: Price | None = None
    """What a device-hour costs and who says so; a range where only the kind of GPU is known."""
    phases: list[PhaseTime]
    """The largest first."""
    productive_fraction: float | None
    largest_loss: PhaseTime | None
    findings: list[Finding]
    evidence_paths: dict[str, str]
    """Record → path, of those that are there."""
    coverage: dict[str, str] = {}
    """Of a job that stoker did not write: what could be recorded of it, and what not, and why. Else empty."""
    idle_estimate: DeviceIdleEstimate | None = None
    """Estimate of how long the device stood still inside `compute`; part of no sum."""
    sizing_advice: list[SizingAdvice] = []
    """Whether the machine has the right size."""
    probes: list[Probe] = []
    """Experiments that were made with the run."""

    def rows(self) -> Iterator[tuple[str, PhaseTime]]:
        """The rows of a table: each phase, and indented below it its parts, and of `compute` the estimate."""
        for row in self.phases:
            yield row.phase, row
            if row.phase == "compute" and self.idle_estimate is not None:
                yield "  stood still, estimated", self._idle_row(self.idle_estimate)
            for stage in row.stages:
                yield f"  {stage.phase}", stage

    def _idle_row(self, idle: DeviceIdleEstimate) -> PhaseTime:
        meaning = f"an estimate from {idle.windows:,} profiler windows, {idle.steps:,} steps; part of no sum"
        money = idle.device_s * self.price_per_device_hour / 3600 if self.price_per_device_hour > 0 else None
        return PhaseTime(phase="compute", device_s=idle.device_s, fraction=idle.fraction, cost=money, meaning=meaning)

    def cost(self, device_s: float | None) -> tuple[float, float] | None:
        """Least and most money for so many device-seconds; None where no price is known."""
        return None if self.price_range is None or device_s is None else self.price_range.cost(device_s)


def explain_run(run: str | Path, price_per_device_hour: float | None = None) -> RunExplanation:
    """Reads a run. price: money per device-hour; None: the run's own, else the list price of its machine. Raises
    UsageError when there is no such run, or when another version of stoker wrote it."""
    path = open_records(run)
    settings = records.read_settings(path) or {}
    environment = read_environment(path)
    price_range = resolve_price(path, price_per_device_hour, environment)
    exact_price = price_range.low if price_range is not None and price_range.is_exact else 0.0
    run_records = rules.read_run(path, exact_price)
    totals = run_records.totals
    events = list(records.read_lines(path, records.EVENTS, Event))
    last_event = events[-1] if events else None
    last_record_t = last_record_time(path)
    coverage: dict[str, str] = next(
        (event.data["coverage"] for event in reversed(events) if "coverage" in event.data), {}
    )
    state, state_text = read_run_state(path, events, last_record_t)
    if coverage:
        state_text = _EXTERNAL_STATES.get(state, state_text)
    phases = _phases(totals, exact_price)
    losses = [row for row in phases if row.phase != "compute"]
    usage = read_resource_usage(
        path,
        totals,
        environment,
        from_bucket=is_uri(str(settings.get("data", {}).get("data", ""))),
        cached=settings.get("run", {}).get("cache", "none") != "none",
    )
    return RunExplanation(
        run=display_path(path),
        state=state,
        state_text=state_text,
        last_event=last_event,
        last_record_t=last_record_t,
        wall_s=totals.wall_s,
        devices=totals.devices,
        device_s=totals.device_s,
        attempts=totals.attempts,
        steps=totals.step,
        lost_steps=max(0, totals.steps - totals.step),
        num_images=totals.num_images,
        img_per_s=totals.num_images / totals.wall_s if totals.wall_s > 0 and (totals.num_images or not coverage) else None,
        price_per_device_hour=exact_price,
        price_range=price_range,
        phases=phases,
        productive_fraction=compute_productive_fraction(totals, is_external=bool(coverage)),
        largest_loss=losses[0] if losses else None,
        findings=rules.run_rules(run_records),
        evidence_paths={name: str(path / name) for name in EVIDENCE_FILES if (path / name).exists()},
        coverage=coverage,
        idle_estimate=estimate_idle(path, totals),
        sizing_advice=advise_sizing(usage),
        probes=list(records.read_lines(path, records.PROBES, Probe)),
    )


def open_records(run: str | Path) -> Path:
    """The folder of a run to look at, also of one that was killed before its first event. Raises UsageError."""
    folder = Path(run)
    if any((folder / name).is_file() for name in (records.STEPS, records.DEVICES, records.ENVIRONMENT)):
        return folder
    return records.open_run(run)


def read_environment(path: Path) -> dict[str, Any]:
    """environment.json of a run; empty where it is not there or damaged: nothing that is decided rests on it."""
    try:
        environment = json.loads((path / records.ENVIRONMENT).read_bytes())
    except (OSError, ValueError):
        return {}
    return old_names.environment(environment) if isinstance(environment, dict) else {}


def resolve_price(run: Path, price_per_device_hour: float | None, environment: Mapping[str, Any]) -> Price | None:
    """What a device-hour costs: as asked (0: unknown), else as the run was told, else by the list."""
    if price_per_device_hour is not None:
        return prices.user_price(price_per_device_hour, "--price-per-device-hour")
    return prices.user_price(records.recorded_price(run), "the run's own setting") or prices.price_from_environment(
        environment
    )


def is_external_job(events: Sequence[Event]) -> bool:
    """Whether the run is a job that stoker did not write."""
    return any("coverage" in event.data for event in events)


def compute_productive_fraction(totals: Totals, *, is_external: bool) -> float | None:
    """Share of `compute`; None without a window, and for a watched job whose steps nobody timed from inside."""
    if totals.device_s <= 0 or (is_external and "compute" not in totals.phases):
        return None
    return totals.phases.get("compute", 0.0) / totals.device_s


def explanation_as_dict(explanation: RunExplanation) -> dict[str, Any]:
    """The answer in plain values, for JSON."""
    built: dict[str, Any] = msgspec.to_builtins(explanation)
    return built


def _phases(totals: Totals, price_per_device_hour: float) -> list[PhaseTime]:
    def make_phase_time(name: str, seconds: float, meaning: str, stages: list[PhaseTime]) -> PhaseTime:
        return PhaseTime(
            phase=name,
            device_s=seconds,
            fraction=seconds / totals.device_s,
            cost=seconds * price_per_device_hour / 3600 if price_per_device_hour > 0 else None,
            meaning=meaning,
            stages=stages,
        )

    def largest_first(rows: list[PhaseTime]) -> list[PhaseTime]:
        return sorted(rows, key=lambda row: -row.device_s)

    stages = [
        make_phase_time(name, duration_s, STAGE_MEANINGS.get(name, ""), [])
        for name, duration_s in totals.input_wait_stages.items()
        if duration_s > 0
    ]
    return largest_first(
        [
            make_phase_time(
                name, duration_s, PHASE_MEANINGS.get(name, ""), largest_first(stages) if name == "input_wait" else []
            )
            for name, duration_s in totals.phases.items()
            if duration_s > 0
        ]
    )


def last_record_time(path: Path) -> float | None:
    times = [(path / name).stat().st_mtime for name in (records.EVENTS, records.STEPS, records.DEVICES)
             if (path / name).exists()]  # fmt: skip
    return max(times, default=None)


_EXTERNAL_STATES: dict[State, str] = {
    "live": "live: the job runs",
    "dead": "dead: `stoker watch` was killed or the machine went down, and nobody saw how the job ended",
}
_END_STATES: dict[str, State] = {"finished": "finished", "preempted": "preempted", "failed": "failed"}


def read_run_state(path: Path, events: list[Event], last_record_t: float | None) -> tuple[State, str]:
    """Live when a process holds the run, of one in a bucket when its lease is fresh; else what the newest attempt wrote
    last; dead when it wrote no end."""
    lock_held = is_held(path)
    if lock_held:
        return "live", "live: a process is training it"
    holder = lease_holder(path)
    if holder is not None:
        return "live", f"live: {holder} trains it, or did {holder.age_s():.0f} s ago"
    attempt = max((event.attempt for event in events), default=0)
    end_event = next(
        (event for event in reversed(events) if event.attempt == attempt and event.kind in _END_STATES), None
    )
    if end_event is not None:
        message = end_event.text.partition("\n")[0]
        descriptions = {"preempted": f"stopped by a signal, everything saved{_resume_hint(path)}"}
        return _END_STATES[end_event.kind], f"{end_event.kind}: {descriptions.get(end_event.kind, message)}"
    if lock_held is None:
        return "unknown", "no end is recorded, and its lock cannot be asked from here"
    last_seen = (
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last_record_t)) if last_record_t is not None else "never"
    )
    text = f"dead: the process ended without a word (killed?); its last sign was at {last_seen}{_resume_hint(path)}"
    return "dead", text


def _resume_hint(path: Path) -> str:
    """How a training goes on, behind a sentence; nothing for jobs of others."""
    return f"; `stoker train --resume {display_path(path)}` continues it" if (path / records.CONFIG).exists() else ""
