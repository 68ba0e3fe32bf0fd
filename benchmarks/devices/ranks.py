"""What a second rank brings: two processes of one core each against one process of one core, on this machine's CPU.

Both train the same model for as many steps by `stoker train`; two ranks on batches twice as large, so ideally they
train twice as many images per second. Measured are the seconds of their windows of steps (steps.jsonl), without the
first ones, evaluations and start. Cases: a step that exchanges gradients for each batch, and accumulation, where one
exchange serves four micro-batches. The pairs alternate, and as many cores are used as there are ranks.

Two processes that do not know of each other, one on each core, are what the machine gives, as two cores share caches,
memory and often their arithmetic units: the bar is relative to them. Two ranks with norms of the whole batch
(`--backbone-norm sync_bn`) are measured too.
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
from stoker_watch.runs.records import STEPS, read_lines
from stoker_watch.runs.schemas import StepWindow

MODEL = "ember_n"


class Case(NamedTuple):
    image_size: int
    micro_batch: int
    """Images of a rank at a time."""
    micro_batches: int
    """Of a step."""
    steps: int
    has_bar: bool


CASES = {
    "one micro-batch": Case(320, 8, 1, 24, True),
    "four micro-batches": Case(320, 8, 4, 8, True),
    "a step of 65 ms": Case(160, 4, 1, 60, False),
}
GOAL = 0.95
"""Images per second of two ranks, of those of two processes."""
"""The first two are steps as long as those of the default recipe; the exchange of 16 MB of gradients takes as long in
the third."""

ONE, TWO, SYNC = "one rank", "two ranks", "two ranks, sync_bn"
TWO_PROCESSES = "two processes, each alone"


@contextlib.contextmanager
def training(run: Path, devices: int, case: Case, cores: list[int], norm: str = "bn") -> Iterator[None]:
    """A run that trains on these cores while the block runs, and has ended after it."""
    batch_size = case.micro_batch * case.micro_batches * devices
    command = [
        sys.executable, "-m", "stoker", "train", "demo", "--device", "cpu", "--devices", str(devices), "--model", MODEL,
        "--weights", "none", "--backbone-norm", norm, "--image-size", *[str(case.image_size)] * 2,
        "--batch-size", str(batch_size), "--grad-accum-steps", str(case.micro_batches), "--steps", str(case.steps),
        "--precision", "fp32", "--eval-every", "0", "--checkpoint-every", "0", "--workers", "1",
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


def images_per_second(folder: Path, what: str, case: Case) -> float:
    """Of one of ONE, TWO, SYNC and TWO_PROCESSES, whose two are added up."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    run = folder / f"run-{len(list(folder.glob('run-*')))}"
    if what == TWO_PROCESSES:
        other = run.with_name(f"{run.name}-b")
        with training(run, 1, case, cores[:1]), training(other, 1, case, cores[1:]):
            pass
        return speed_of(run, 1, case.steps) + speed_of(other, 1, case.steps)
    devices = 1 if what == ONE else 2
    with training(run, devices, case, cores[:devices], "sync_bn" if what == SYNC else "bn"):
        pass
    return speed_of(run, devices, case.steps)


def measure(arguments: argparse.Namespace) -> Report:
    if len(os.sched_getaffinity(0)) < 2:
        raise RuntimeError("two cores are needed")
    n = 1 if arguments.quick else 5
    cases = {"quick": Case(160, 4, 1, 6, False)} if arguments.quick else CASES
    rows, bars = [], []
    with tempfile.TemporaryDirectory() as name:
        for title, case in cases.items():
            speeds: dict[str, list[float]] = {what: [] for what in (ONE, TWO, TWO_PROCESSES, SYNC)}
            for _ in range(n):
                for what, values in speeds.items():
                    values.append(images_per_second(Path(name), what, case))
            rows += [{"what": f"{title}: {what}, img/s", **spread(values)} for what, values in speeds.items()]
            for what, base in ((TWO, ONE), (TWO_PROCESSES, ONE), (TWO, TWO_PROCESSES), (SYNC, TWO)):
                ratios = [x / y for x, y in zip(speeds[what], speeds[base], strict=True)]
                rows.append({"what": f"{title}: images/s of {what} / {base}", **spread(ratios)})
                if case.has_bar and base == TWO_PROCESSES:
                    bars.append(Bar.at_least(f"{title}: {what} / {base}", statistics.median(ratios), GOAL))
    return Report(
        what=f"training {MODEL} by one and by two ranks of one core each",
        n=n,
        rows=rows,
        bars=bars,
        packages=("torch",),
    )


if __name__ == "__main__":
    publish(measure, options(__doc__))
