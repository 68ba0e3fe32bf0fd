"""What a run took so far, summed over its records (`records.py`)."""

import dataclasses
from pathlib import Path

from stoker.records import STEPS, last_attempt, read_lines
from stoker.schemas import StepWindow


@dataclasses.dataclass(frozen=True, kw_only=True)
class Totals:
    """What a run took so far: all windows of all attempts, since time that was spent is spent.

    phases: device-seconds by phase; they add up to device_s. input: those of `input_wait` by stage. wall_s: seconds in
    which a process trained; the time between attempts is in no window. steps: optimizer steps that were done; step: how
    many of them the newest state has, the others were lost by a kill and done again. pictures: trained on, those of
    lost steps included.
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


def totals(run: Path) -> Totals:
    """Sums steps.jsonl. All zero for a run without a window; the number of devices is that of the newest window."""
    phases: dict[str, float] = {}
    stages: dict[str, float] = {}
    device_s, wall_s, devices, pictures, steps, step = 0.0, 0.0, 0, 0, 0, 0
    for window in read_lines(run, STEPS, StepWindow):
        for name, took_s in window.phases.items():
            phases[name] = phases.get(name, 0.0) + took_s
        for name, took_s in window.input.items():
            stages[name] = stages.get(name, 0.0) + took_s
        device_s += window.wall_s * window.devices
        wall_s += window.wall_s
        pictures += window.pictures
        steps += window.steps
        devices, step = window.devices, window.step
    return Totals(
        phases=phases, input=stages, device_s=device_s, wall_s=wall_s, devices=devices, pictures=pictures, steps=steps,
        step=step, attempts=last_attempt(run),
    )  # fmt: skip
