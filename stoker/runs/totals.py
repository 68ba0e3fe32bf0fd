"""What a run took so far, summed over its records (`folder.py`), of all its processes."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from stoker.runs.records import RANKS, STEPS, last_attempt, read_lines
from stoker.runs.schemas import StepWindow

COMPARED_S = 10.0
"""Seconds of all ranks that are compared with each other: some windows each, since a window of a second has one step
more or less than that of another rank. Ranks that are slow in turn within it are seen as `comm`: no rank knows by
itself how long the others waited."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Totals:
    """What a run took so far: all windows of all attempts and ranks, since time that was spent is spent.

    phases: device-seconds by phase; they add up to device_s. input: those of `input_wait` by stage. wall_s: seconds in
    which a process trained; the time between attempts is in no window. steps: optimizer steps that were done; step: how
    many of them the newest state has, the others were lost by a kill and done again. pictures: trained on, those of
    lost steps included. slowest: rank → device-seconds that the others waited for it in exchanges (`straggler`).
    cpu: processor seconds of the training threads by the phase they were in; empty where nobody measured.

    wall_s, steps and step are those of rank 0, everything else of all ranks.
    """

    phases: dict[str, float]
    input: dict[str, float]
    device_s: float
    wall_s: float
    devices: int
    pictures: int
    steps: int
    step: int
    attempts: int
    slowest: dict[int, float] = dataclasses.field(default_factory=dict)
    cpu: dict[str, float] = dataclasses.field(default_factory=dict)


def totals(run: Path) -> Totals:
    """Sums steps.jsonl of all ranks. All zero for a run without a window; the number of devices is that of the newest
    attempt's newest windows."""
    phases: dict[str, float] = {}
    stages: dict[str, float] = {}
    cpu: dict[str, float] = {}
    newest: dict[int, StepWindow] = {}
    device_s, wall_s, pictures, steps = 0.0, 0.0, 0, 0
    ranks = folders(run)
    exchanges = _Exchanges()
    for rank, folder in ranks.items():
        for window in read_lines(folder, STEPS, StepWindow):
            _add(phases, window.phases)
            _add(stages, window.input_wait_stages)
            _add(cpu, window.thread_cpu_s)
            device_s += window.wall_s * window.devices
            pictures += window.num_images
            newest[rank] = window
            if rank == 0:
                wall_s += window.wall_s
                steps += window.window_steps
            if len(ranks) > 1:
                exchanges.add(rank, window)
    slowest = exchanges.waited_for()
    if straggler_s := sum(slowest.values()):
        phases["comm"] = max(0.0, phases["comm"] - straggler_s)
        _add(phases, {"straggler": straggler_s})
    attempt = max((window.attempt for window in newest.values()), default=0)
    return Totals(
        phases=phases,
        input=stages,
        device_s=device_s,
        wall_s=wall_s,
        devices=sum(window.devices for window in newest.values() if window.attempt == attempt),
        pictures=pictures,
        steps=steps,
        step=newest[0].step if 0 in newest else 0,
        attempts=last_attempt(run),
        slowest=slowest,
        cpu=cpu,
    )


def folders(run: Path) -> dict[int, Path]:
    """Where each rank's records are: rank 0's in the run's folder itself, those of the others that wrote any below."""
    below = {int(path.name): path for path in sorted((run / RANKS).glob("*")) if path.name.isdecimal()}
    return {0: run} | {rank: path for rank, path in below.items() if rank > 0}


def _add(into: dict[str, float], parts: dict[str, float]) -> None:
    for name, took_s in parts.items():
        into[name] = into.get(name, 0.0) + took_s


class _Exchanges:
    """How much of `comm` was waiting for a slower rank.

    All ranks end an exchange together, and whoever comes last waits least. So of COMPARED_S that ranks have in common,
    the share of it that the least waiting one was in exchanges is what these take; what another one was in them beyond
    that, it waited for that one.
    """

    def __init__(self) -> None:
        self._parts: dict[tuple[int, int], dict[int, list[float]]] = {}
        """(attempt, number of the part) → rank → device-seconds in it that are recorded, and of these in `comm`."""

    def add(self, rank: int, window: StepWindow) -> None:
        begin_s, comm_s = window.t - window.wall_s, window.phases.get("comm", 0.0)
        for number, share in _shares(begin_s, window.t):
            recorded = self._parts.setdefault((window.attempt, number), {}).setdefault(rank, [0.0, 0.0])
            recorded[0] += share * window.wall_s * window.devices
            recorded[1] += share * comm_s

    def waited_for(self) -> dict[int, float]:
        """Rank → device-seconds that the others waited for it; without ranks that nobody waited for."""
        found: dict[int, float] = {}
        for by_rank in self._parts.values():
            most_s = max(recorded_s for recorded_s, _ in by_rank.values())
            there = {rank: both for rank, both in by_rank.items() if both[0] > most_s / 2}
            if len(there) < 2:  # one has ended, or writes no records: nobody knows for whom the other waits
                continue
            shares = {rank: comm_s / recorded_s for rank, (recorded_s, comm_s) in there.items()}
            slow = min(shares, key=lambda rank: shares[rank])
            waited_s = sum((shares[rank] - shares[slow]) * there[rank][0] for rank in there)
            if waited_s > 0:
                found[slow] = found.get(slow, 0.0) + waited_s
        return found


def _shares(begin_s: float, end_s: float) -> Iterator[tuple[int, float]]:
    """The parts of COMPARED_S that [begin_s, end_s] lies in, and how much of it lies in each; they add up to 1."""
    if end_s <= begin_s:
        return
    at_s = begin_s
    while at_s < end_s:
        number = int(at_s // COMPARED_S)
        until_s = min(end_s, (number + 1) * COMPARED_S)
        yield number, (until_s - at_s) / (end_s - begin_s)
        at_s = until_s
