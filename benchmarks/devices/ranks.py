"""What a second rank brings: two processes of one core each against one process of one core, on this machine's CPU.

Both train the same model for as many steps by `stoker train`; two ranks on batches twice as large, so ideally they
train twice as many images per second. Measured are the seconds of their windows of steps (steps.jsonl), without the
first ones, evaluations and start. Cases: a step that exchanges gradients for each batch, and accumulation, where one
exchange serves four micro-batches. The pairs alternate, and as many cores are used as there are ranks.

Two processes that do not know of each other, one on each core, are measured too: what the machine gives, as two cores
share caches, memory and often their arithmetic units.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.processes import child_environment
from benchmarks.report import Bar, Report, options, publish, spread
from stoker.runs.records import STEPS, read_lines
from stoker.runs.schemas import StepWindow

MODEL = "ember_n"


class Case(NamedTuple):
    image_size: int
    micro_batch: int
    """Images of a rank at a time."""
    micro_batches: int
    """Of a step."""
    steps: int
    goal: float | None
    """Of the ratio; None: reported only."""


CASES = {
    "one micro-batch": Case(320, 8, 1, 24, 1.85),
    "four micro-batches": Case(320, 8, 4, 8, 1.95),
    "a step of 65 ms": Case(160, 4, 1, 60, None),
}
"""The first two are steps as long as those of the default recipe; the exchange of 16 MB of gradients takes as long in
the third."""

TWO_PROCESSES = "two processes of one core, each alone"


@contextlib.contextmanager
def training(run: Path, devices: int, case: Case, cores: list[int]) -> Iterator[None]:
    """A run that trains on these cores while the block runs, and has ended after it."""
    batch_size = case.micro_batch * case.micro_batches * devices
    command = [
        sys.executable, "-m", "stoker", "train", "demo", "--device", "cpu", "--devices", str(devices), "--model", MODEL,
        "--weights", "none", "--image-size", *[str(case.image_size)] * 2, "--batch-size", str(batch_size),
        "--grad-accum-steps", str(case.micro_batches), "--steps", str(case.steps), "--precision", "fp32",
        "--eval-every", "0", "--checkpoint-every", "0", "--workers", "1",
        "--val-fraction", "0.01", "--run-dir", str(run),
    ]  # fmt: skip
    environment = child_environment() | {"OMP_NUM_THREADS": "1", "STOKER_CACHE_DIR": str(run.parent / "cache")}
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    try:
        yield
        if process.wait() != 0:
            raise RuntimeError(f"{' '.join(command)} ended with exit code {process.returncode}")
    finally:
        process.kill()
        process.wait()


def speed_of(run: Path, devices: int, steps: int) -> float:
    """Images per second of all ranks of a run, by the windows of rank 0 after the first fifth of the steps."""
    windows = [w for w in read_lines(run, STEPS, StepWindow) if w.window_steps and w.step > steps // 5]
    return devices * sum(w.num_images for w in windows) / sum(w.wall_s for w in windows)


def images_per_second(folder: Path, what: str | int, case: Case) -> float:
    """Of so many ranks, or of TWO_PROCESSES together."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    runs = [folder / f"run-{len(list(folder.glob('run-*')))}"]
    if isinstance(what, int):
        with training(runs[0], what, case, cores[:what]):
            pass
        return speed_of(runs[0], what, case.steps)
    runs.append(runs[0].with_name(f"{runs[0].name}-b"))
    with training(runs[0], 1, case, cores[:1]), training(runs[1], 1, case, cores[1:]):
        pass
    return sum(speed_of(run, 1, case.steps) for run in runs)


def measure(arguments: argparse.Namespace) -> Report:
    if len(os.sched_getaffinity(0)) < 2:
        raise RuntimeError("two cores are needed")
    n = 1 if arguments.quick else 5
    cases = {"quick": Case(160, 4, 1, 6, None)} if arguments.quick else CASES
    rows, bars = [], []
    with tempfile.TemporaryDirectory() as name:
        for title, case in cases.items():
            speeds: dict[str | int, list[float]] = {1: [], 2: [], TWO_PROCESSES: []}
            for _ in range(n):
                for what, values in speeds.items():
                    values.append(images_per_second(Path(name), what, case))
            for what, values in speeds.items():
                text = f"{what} rank{'s' if what == 2 else ''}" if isinstance(what, int) else what
                rows.append({"what": f"{title}, {text}, img/s", **spread(values)})
            for text, found in (
                ("images/s of two ranks / one", speeds[2]),
                (f"images/s of {TWO_PROCESSES} / one", speeds[TWO_PROCESSES]),
            ):
                ratios = [two / one for one, two in zip(speeds[1], found, strict=True)]
                rows.append({"what": f"{title}: {text}", **spread(ratios)})
                if case.goal is not None and found is speeds[2]:
                    bars.append(Bar.at_least(f"{title}: {text}", statistics.median(ratios), case.goal))
    return Report(
        what=f"training {MODEL} by one and by two ranks of one core each",
        n=n,
        rows=rows,
        bars=bars,
        packages=("torch",),
    )


if __name__ == "__main__":
    publish(measure, options(__doc__))
