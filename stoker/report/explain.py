"""What `stoker why RUN` says, as data: where the time of a run went, what that cost, what to change, what is known.

`gather` reads a run, live, dead or finished; `explain_terminal.py` prints it; `why_as_dict` is its JSON. Two runs are
compared in `compare.py`, many are added up in `fleet.py`; a log that is no run is `foreign_log.py`."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from stoker.diagnosis import rules
from stoker.diagnosis.alive import is_held, lease_holder
from stoker.hardware import prices
from stoker.hardware.prices import Price
from stoker.report.idle_estimate import Stillness, estimate
from stoker.report.sizing import Sizing, advise, load_of
from stoker.runs import records
from stoker.runs.schemas import Event, Finding, Probe
from stoker.runs.totals import Totals
from stoker.storage.run_uri import shown
from stoker.storage.uri import is_address

State = Literal["live", "finished", "preempted", "failed", "dead", "unknown"]

MEANINGS = {
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

STAGES = {
    "fetch": "for their bytes, from the disk or the bucket",
    "decode": "for decoding and resizing",
    "copy": "for copies to the device",
    "queue": "for the batch to be handed over",
}
"""A stage of `input_wait` in a few words."""


PLACES = (
    records.STEPS, records.EVENTS, records.DEVICES, records.TRACES, records.STACKS, records.PROBES, records.RANKS,
    records.QUARANTINE, records.CONFIG, records.ENVIRONMENT, records.CHECKPOINTS, records.BEST, records.FINAL,
    records.OUTPUT,
)  # fmt: skip
"""Records that the answer may rest on."""


class PhaseShare(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table. share: of all device time, 0 … 1; money: None without a price."""

    phase: str
    device_s: float
    share: float
    money: float | None
    meaning: str
    parts: list["PhaseShare"] = []
    """Of `input_wait`: its stages, the largest first; their shares are of all device time too."""


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """The answer."""

    run: str
    state: State
    state_text: str
    """The state in a sentence."""
    last_event: Event | None
    last_sign_t: float | None
    """Unix time of the last line of any record."""
    wall_s: float
    devices: int
    device_s: float
    attempts: int
    steps: int
    """Of the newest state."""
    steps_lost: int
    """Done, lost by a restart and done again."""
    pictures: int
    img_per_s: float | None
    price: float
    """Money per device-hour; 0: unknown, or only a range is known."""
    rate: Price | None = None
    """What a device-hour costs and who says so; a range where only the kind of GPU is known."""
    phases: list[PhaseShare]
    """The largest first."""
    productive_share: float | None
    largest_loss: PhaseShare | None
    findings: list[Finding]
    places: dict[str, str]
    """Record → path, of those that are there."""
    watched: dict[str, str] = {}
    """Of a job that stoker did not write: what could be recorded of it, and what not, and why. Else empty."""
    stillness: Stillness | None = None
    """Estimate of how long the device stood still inside `compute`; part of no sum."""
    advice: list[Sizing] = []
    """Whether the machine has the right size."""
    probes: list[Probe] = []
    """Experiments that were made with the run."""

    def lines(self) -> Iterator[tuple[str, PhaseShare]]:
        """The rows of a table: each phase, and indented below it its parts, and of `compute` the estimate."""
        for row in self.phases:
            yield row.phase, row
            if row.phase == "compute" and self.stillness is not None:
                yield "  stood still, estimated", self._still(self.stillness)
            for part in row.parts:
                yield f"  {part.phase}", part

    def _still(self, found: Stillness) -> PhaseShare:
        meaning = f"an estimate from {found.windows:,} profiler windows, {found.steps:,} steps; part of no sum"
        money = found.device_s * self.price / 3600 if self.price > 0 else None
        return PhaseShare(phase="compute", device_s=found.device_s, share=found.share, money=money, meaning=meaning)

    def cost(self, device_s: float | None) -> tuple[float, float] | None:
        """Least and most money for so many device-seconds; None where no price is known."""
        return None if self.rate is None or device_s is None else self.rate.cost(device_s)


def gather(run: str | Path, price: float | None = None) -> Why:
    """Reads a run. price: money per device-hour; None: the run's own, else the list price of its machine. Raises
    UsageError when there is no such run, or when another version of stoker wrote it."""
    path = open_records(run)
    settings = records.read_settings(path) or {}
    environment = read_environment(path)
    rate = rate_of(path, price, environment)
    exact = rate.low if rate is not None and rate.exact else 0.0
    seen = rules.read(path, exact)
    totals = seen.totals
    events = list(records.read_lines(path, records.EVENTS, Event))
    last = events[-1] if events else None
    sign_t = last_sign(path)
    watched: dict[str, str] = next((event.data["watched"] for event in reversed(events) if "watched" in event.data), {})
    state, text = state_of(path, events, sign_t)
    if watched:
        text = _WATCHED_STATES.get(state, text)
    phases = _phases(totals, exact)
    losses = [row for row in phases if row.phase != "compute"]
    load = load_of(
        path,
        totals,
        environment,
        from_bucket=is_address(str(settings.get("data", {}).get("data", ""))),
        cached=settings.get("run", {}).get("cache", "none") != "none",
    )
    return Why(
        run=shown(path),
        state=state,
        state_text=text,
        last_event=last,
        last_sign_t=sign_t,
        wall_s=totals.wall_s,
        devices=totals.devices,
        device_s=totals.device_s,
        attempts=totals.attempts,
        steps=totals.step,
        steps_lost=max(0, totals.steps - totals.step),
        pictures=totals.pictures,
        img_per_s=totals.pictures / totals.wall_s if totals.wall_s > 0 and (totals.pictures or not watched) else None,
        price=exact,
        rate=rate,
        phases=phases,
        productive_share=productive_share(totals, watched=bool(watched)),
        largest_loss=losses[0] if losses else None,
        findings=rules.judge(seen),
        places={name: str(path / name) for name in PLACES if (path / name).exists()},
        watched=watched,
        stillness=estimate(path, totals),
        advice=advise(load),
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
        found = json.loads((path / records.ENVIRONMENT).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def rate_of(run: Path, price: float | None, environment: Mapping[str, Any]) -> Price | None:
    """What a device-hour costs: as asked (0: unknown), else as the run was told, else by the list."""
    if price is not None:
        return prices.given(price, "--price")
    return prices.given(records.price_of(run), "the run's own setting") or prices.of_environment(environment)


def was_watched(events: Sequence[Event]) -> bool:
    """Whether the run is a job that stoker did not write."""
    return any("watched" in event.data for event in events)


def productive_share(totals: Totals, *, watched: bool) -> float | None:
    """Share of `compute`; None without a window, and for a watched job whose steps nobody timed from inside."""
    if totals.device_s <= 0 or (watched and "compute" not in totals.phases):
        return None
    return totals.phases.get("compute", 0.0) / totals.device_s


def why_as_dict(why: Why) -> dict[str, Any]:
    """The answer in plain values, for JSON."""
    built: dict[str, Any] = msgspec.to_builtins(why)
    return built


def _phases(totals: Totals, price: float) -> list[PhaseShare]:
    def share_of(name: str, seconds: float, meaning: str, parts: list[PhaseShare]) -> PhaseShare:
        return PhaseShare(
            phase=name,
            device_s=seconds,
            share=seconds / totals.device_s,
            money=seconds * price / 3600 if price > 0 else None,
            meaning=meaning,
            parts=parts,
        )

    def largest_first(rows: list[PhaseShare]) -> list[PhaseShare]:
        return sorted(rows, key=lambda row: -row.device_s)

    stages = [share_of(name, took_s, STAGES.get(name, ""), []) for name, took_s in totals.input.items() if took_s > 0]
    return largest_first(
        [
            share_of(name, took_s, MEANINGS.get(name, ""), largest_first(stages) if name == "input_wait" else [])
            for name, took_s in totals.phases.items()
            if took_s > 0
        ]
    )


def last_sign(path: Path) -> float | None:
    times = [(path / name).stat().st_mtime for name in (records.EVENTS, records.STEPS, records.DEVICES)
             if (path / name).exists()]  # fmt: skip
    return max(times, default=None)


_WATCHED_STATES: dict[State, str] = {
    "live": "live: the job runs",
    "dead": "dead: `stoker watch` was killed or the machine went down, and nobody saw how the job ended",
}
_ENDS: dict[str, State] = {"finished": "finished", "preempted": "preempted", "failed": "failed"}


def state_of(path: Path, events: list[Event], sign_t: float | None) -> tuple[State, str]:
    """Live when a process holds the run, of one in a bucket when its lease is fresh; else what the newest attempt wrote
    last; dead when it wrote no end."""
    held = is_held(path)
    if held:
        return "live", "live: a process is training it"
    holder = lease_holder(path)
    if holder is not None:
        return "live", f"live: {holder} trains it, or did {holder.age_s():.0f} s ago"
    attempt = max((event.attempt for event in events), default=0)
    ended = next((event for event in reversed(events) if event.attempt == attempt and event.kind in _ENDS), None)
    if ended is not None:
        said = ended.text.partition("\n")[0]
        words = {"preempted": f"stopped by a signal, everything saved{_continues(path)}"}
        return _ENDS[ended.kind], f"{ended.kind}: {words.get(ended.kind, said)}"
    if held is None:
        return "unknown", "no end is recorded, and its lock cannot be asked from here"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(sign_t)) if sign_t is not None else "never"
    text = f"dead: the process ended without a word (killed?); its last sign was at {when}{_continues(path)}"
    return "dead", text


def _continues(path: Path) -> str:
    """How a training goes on, behind a sentence; nothing for jobs of others."""
    return f"; `stoker train --resume {shown(path)}` continues it" if (path / records.CONFIG).exists() else ""
