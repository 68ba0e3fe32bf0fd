"""Reads a state file of the hook (`hook/stoker_hook/clock.py` writes it) as phases of the time and of the CPU time of
the training thread.

For one process, at one moment. Windows and ranks: `hook_reader.py`.
"""

import dataclasses
import json
import struct
from collections.abc import Mapping
from pathlib import Path

HEADER_BYTES = 1024

SLOT_PHASES = {
    "startup": "startup", "input_wait": "input_wait", "maybe_wait": "input_wait", "compute": "compute",
    "maybe_work": "compute", "work": "unattributed", "after_step": "unattributed", "host": "host", "comm": "comm",
    "checkpoint": "checkpoint", "eval": "eval", "compile": "compile",
}  # fmt: skip
"""Slot of the hook's clock → phase. `maybe_`: not known yet whether for training. `after_step`: the next batch moves it
to `host`; after the last step the job ends. `_sum_slots_by_phase` splits `graph`."""

WORKING_SLOTS = ("compute", "maybe_work", "graph")
"""Slots in which the process should compute: time in which it does nothing is `unattributed`."""

HOST_ONLY_PHASES = ("startup", "eval", "checkpoint", "compile")
"""Phases that the host measures also if the device has events, since these are only around steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HookState:
    """A process of the job at the time of the read. values: seconds and counts by slot of
    `hook/stoker_hook/clock.py`."""

    name: str
    pid: int
    frameworks: tuple[str, ...]
    slots: tuple[str, ...]
    values: Mapping[str, float]
    cpu: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """CPU-seconds of the training thread by slot, until the last update."""
    input_fraction: float | None = None
    """The fraction of `graph` that waits for input."""
    idle: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Seconds of WORKING_SLOTS in which the process did nothing, as the watcher saw it."""
    process_cpu_s: float | None = None
    """CPU-seconds of the process so far: all its threads, without its children."""

    @property
    def current_slot(self) -> str:
        return self.slots[int(self.values["current_slot"])]

    @property
    def rank(self) -> int:
        """Within this machine; 0 if there is only one, as far as known."""
        return max(0, round(self.values["rank"]))


def read_hook_state(path: Path) -> HookState | None:
    """None while the file is being created."""
    try:
        data = path.read_bytes()
        header = json.loads(data[:HEADER_BYTES])
        slots = tuple(header["slots"])
        time_slots = slots[slots.index("startup") :]
        numbers = struct.unpack_from(f"{len(slots) + len(time_slots)}d", data, HEADER_BYTES)
        values = dict(zip(slots, numbers[: len(slots)], strict=True))
        cpu = dict(zip(time_slots, numbers[len(slots) :], strict=True))
    except (ValueError, KeyError, struct.error, FileNotFoundError):
        return None
    frameworks = tuple(header["frameworks"])
    return HookState(name=path.name, pid=header["pid"], frameworks=frameworks, slots=slots, values=values, cpu=cpu)


def phase_seconds(state: HookState, now_s: float | None) -> dict[str, float]:
    """Seconds of each phase since the clock started. now_s: CLOCK_MONOTONIC of a live process, whose current slot goes
    on since the last update: the phases add up to now_s − begin. None: until the last update."""
    values = state.values
    seconds = {slot: values[slot] for slot in (*SLOT_PHASES, "graph")}
    if now_s is not None and state.current_slot in seconds:
        seconds[state.current_slot] += max(0.0, now_s - values["last_update"])
    idle_s = {slot: min(state.idle.get(slot, 0.0), seconds[slot]) for slot in WORKING_SLOTS}
    unseen_s = sum(idle_s.values()) + seconds["after_step"]
    for slot in WORKING_SLOTS:
        seconds[slot] -= idle_s[slot]
        seconds["work"] += idle_s[slot]
    phases = _sum_slots_by_phase(state, seconds)
    if values["device"]:
        return _device_phase_seconds(
            phases, busy_s=values["busy"], comm_s=values["device_comm"], syncs=values["syncs"], steps=values["steps"],
            unseen_s=unseen_s,
        )  # fmt: skip
    return phases


def cpu_by_phase(state: HookState) -> dict[str, float]:
    """CPU-seconds of the training thread by phase, since the clock started and until its last update: those of a
    current wait are added at its end. If a device computes, the thread issues steps: `host`."""
    phases = _sum_slots_by_phase(state, dict(state.cpu)) if state.cpu else {}
    if state.values["device"] and phases:
        phases["host"] += phases.pop("compute")
    return phases


def _sum_slots_by_phase(state: HookState, seconds: dict[str, float]) -> dict[str, float]:
    """Seconds of the training thread by phase, from seconds by slot; removes `graph` from them."""
    graph_s, fraction = seconds.pop("graph"), state.input_fraction
    if fraction is None:
        seconds["work"] += graph_s
    else:
        seconds["input_wait"] += graph_s * fraction
        seconds["compute"] += graph_s * (1 - fraction)
    phases: dict[str, float] = {}
    for slot, phase in SLOT_PHASES.items():
        phases[phase] = phases.get(phase, 0.0) + seconds[slot]
    return phases


def _device_phase_seconds(
    host: Mapping[str, float], *, busy_s: float, comm_s: float, syncs: float, steps: float, unseen_s: float
) -> dict[str, float]:
    """Phases of a device that worked on steps for busy_s by its own clock, comm_s of it waiting for communication.

    When the device is idle, it waits for the host's waits, up to their length: a wait that is shorter than the device's
    queue costs nothing. The rest is `host`, or `sync` if the host waits for the device in each step, except for
    `unseen_s` in which the host did nothing or had done its last step.
    """
    phases = {name: host[name] for name in HOST_ONLY_PHASES}
    loop_s = sum(host.values()) - sum(phases.values())
    busy_s = min(busy_s, loop_s)
    comm_s = min(comm_s, busy_s)
    idle_s = loop_s - busy_s
    waits = {name: host[name] for name in ("input_wait", "comm")}
    waited_s = sum(waits.values())
    fraction = min(1.0, idle_s / waited_s) if waited_s > 0 else 0.0
    phases |= {name: seconds * fraction for name, seconds in waits.items()}
    phases["comm"] += comm_s
    phases["compute"] = busy_s - comm_s
    rest_s = max(0.0, idle_s - waited_s)
    phases["unattributed"] = min(unseen_s, rest_s)
    phases["sync" if syncs >= steps > 0 else "host"] = rest_s - phases["unattributed"]
    return phases
