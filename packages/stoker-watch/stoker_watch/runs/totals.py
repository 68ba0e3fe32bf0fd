"""Sums over the records of a run, of all its attempts and ranks. The records themselves: `records.py`."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

from stoker_watch.knowledge import read_toml
from stoker_watch.runs.records import RANKS
from stoker_watch.runs.schemas import StepWindow

COMPARISON_S = 10.0
"""Length of the intervals in which ranks are compared with each other. Several windows each, since a window of a second
has one step more or less than that of another rank. Ranks that are slow in turn within an interval count as `comm`: no
rank knows by itself how long the others waited."""

OWN_PHASES = ("input_wait", "host", "checkpoint", "eval")
"""Phases in which a rank works on what is only its own."""
MIN_COMM = 0.01
"""Fraction of the time in `comm` from which waits for other ranks are measured (heuristic: an exchange takes more)."""


@dataclasses.dataclass(kw_only=True)
class Totals:
    """Sums over a run: all windows of all attempts and ranks, since lost steps cost time as well.

    phases: device-seconds by phase; they add up to device_s. input_wait_stages: device-seconds of `input_wait` by
    stage. wall_s: seconds in which a process trained. steps: optimizer steps that were done. step: those of the newest
    state; the difference was lost by kills and done again. num_images: also of lost steps. straggler_s: rank →
    device-seconds that the others waited for it in collectives (`straggler`). thread_cpu_s: CPU-seconds of the training
    threads by phase; empty where not measured. wall_s, steps and step are of rank 0, everything else of all ranks.
    """

    phases: dict[str, float] = dataclasses.field(default_factory=dict)
    input_wait_stages: dict[str, float] = dataclasses.field(default_factory=dict)
    device_s: float = 0.0
    wall_s: float = 0.0
    devices: int = 0
    num_images: int = 0
    steps: int = 0
    step: int = 0
    attempts: int = 0
    straggler_s: dict[int, float] = dataclasses.field(default_factory=dict)
    thread_cpu_s: dict[str, float] = dataclasses.field(default_factory=dict)


class TotalsSum:
    def __init__(self, num_ranks: int) -> None:
        self._sums = Totals()
        self._last_windows: dict[int, StepWindow] = {}
        self._comm_waits = _CommWaits() if num_ranks > 1 else None

    def add(self, rank: int, window: StepWindow) -> None:
        sums = self._sums
        add_amounts(sums.phases, window.phases)
        add_amounts(sums.input_wait_stages, window.input_wait_stages)
        add_amounts(sums.thread_cpu_s, window.thread_cpu_s)
        sums.device_s += window.wall_s * window.devices
        sums.num_images += window.num_images
        self._last_windows[rank] = window
        if rank == 0:
            sums.wall_s += window.wall_s
            sums.steps += window.window_steps
            sums.step = window.step
        if self._comm_waits is not None:
            self._comm_waits.add(rank, window)

    def totals(self, attempts: int) -> Totals:
        """attempts: number of the newest one. `devices`: of the newest that has a window. All zero without one."""
        straggler_s, booked_s = ({}, {}) if self._comm_waits is None else self._comm_waits.straggler_s()
        for name, waited_s in booked_s.items():
            self._sums.phases[name] = max(0.0, self._sums.phases[name] - waited_s)
            add_amounts(self._sums.phases, {"straggler": waited_s})
        attempt = max((window.attempt for window in self._last_windows.values()), default=0)
        devices = sum(window.devices for window in self._last_windows.values() if window.attempt == attempt)
        return dataclasses.replace(self._sums, devices=devices, attempts=attempts, straggler_s=straggler_s)


def list_rank_dirs(run: Path) -> dict[int, Path]:
    """Rank → folder of its records: rank 0's are in the run folder itself, those of other ranks below it."""
    below = {int(path.name): path for path in sorted((run / RANKS).glob("*")) if path.name.isdecimal()}
    return {0: run} | {rank: path for rank, path in below.items() if rank > 0}


def add_amounts(sums: dict[str, float], amounts: dict[str, float]) -> None:
    for name, amount in amounts.items():
        sums[name] = sums.get(name, 0.0) + amount


class _CommWaits:
    """How much of `comm` was waiting for a slower rank. All ranks end a collective together, and the last one to arrive
    waits least. So in each interval of COMPARISON_S that ranks have in common, the smallest fraction of `comm` is what
    the collectives take; what another rank spent in them beyond that, it waited for the slowest rank."""

    def __init__(self) -> None:
        self._intervals: dict[tuple[int, int], dict[int, list[float]]] = {}
        """(attempt, number of the interval) → rank → device-seconds in it: all, of `comm`, `compute`, OWN_PHASES."""

    def add(self, rank: int, window: StepWindow) -> None:
        comm_s, compute_s, *own = (window.phases.get(name, 0.0) for name in ("comm", "compute", *OWN_PHASES))
        added = (window.wall_s * window.devices, comm_s, compute_s, sum(own))
        for number, fraction in split_by_interval(window.t - window.wall_s, window.t, COMPARISON_S):
            sums = self._intervals.setdefault((window.attempt, number), {}).setdefault(rank, [0.0] * len(added))
            for index, seconds in enumerate(added):
                sums[index] += fraction * seconds

    def straggler_s(self) -> tuple[dict[int, float], dict[str, float]]:
        """(rank → device-seconds that the others waited for it, phase → those that were recorded as this phase)."""
        waits: dict[int, float] = {}
        booked: dict[str, float] = {}
        for by_rank in self._intervals.values():
            max_recorded_s = max(sums[0] for sums in by_rank.values())
            present = {rank: sums for rank, sums in by_rank.items() if sums[0] > max_recorded_s / 2}
            if len(present) < 2:  # the other has ended or writes no records: unknown for whom this one waits
                continue
            comm, compute, own = (
                {rank: sums[index] / sums[0] for rank, sums in present.items()} for index in (1, 2, 3)
            )
            slowest, late = min(comm, key=comm.__getitem__), max(own, key=own.__getitem__)
            is_measured = max(comm.values()) >= MIN_COMM
            hidden = {
                rank: 0.0 if is_measured else min(own[late] - own[rank], compute[rank] - compute[late])
                for rank in present
            }
            for name, rank, waited_s in (
                ("comm", slowest, sum((comm[other] - comm[slowest]) * present[other][0] for other in present)),
                ("compute", late, sum(max(0.0, hidden[other]) * present[other][0] for other in present)),
            ):
                if waited_s > 0:
                    waits[rank] = waits.get(rank, 0.0) + waited_s
                    booked[name] = booked.get(name, 0.0) + waited_s
        return waits, booked


def split_by_interval(start: float, end: float, width: float) -> Iterator[tuple[int, float]]:
    """The intervals of this width that [start, end] overlaps, by number, and its fraction in each; they add up to 1."""
    for number in range(int(start // width), int(end // width) + 1):
        overlap = min(end, (number + 1) * width) - max(start, number * width)
        if overlap > 0:
            yield number, overlap / (end - start)


@functools.cache
def _goodput_names() -> dict[str, str]:
    """Phase → its name in ml-goodput-measurement."""
    rows: dict[str, list[str]] = read_toml("report_words.toml")["goodput"]
    return {phase: name for name, phases in rows.items() for phase in phases}


def goodput(phases: Mapping[str, float]) -> dict[str, float]:
    """Seconds by the names of ml-goodput-measurement, of seconds by phase; those of phases that no name has are
    `other`."""
    sums: dict[str, float] = {}
    for phase, duration_s in phases.items():
        name = _goodput_names().get(phase, "other")
        sums[name] = sums.get(name, 0.0) + duration_s
    return sums
