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

from processes import child_environment
from report import Bar, Report, options, publish, spread

from stoker.runs.records import STEPS, read_lines
from stoker.runs.schemas import StepWindow

MODEL, IMAGE_SIZE, MICRO_BATCH = "ember_n", 160, 4
CASES = {"one micro-batch": (1, 1.85), "four micro-batches": (4, 1.95)}
"""Case → micro-batches of a step, goal of the ratio."""


TWO_PROCESSES = "two processes of one core, each alone"


@contextlib.contextmanager
def training(run: Path, devices: int, micro_batches: int, steps: int, cores: list[int]) -> Iterator[None]:
    """A run that trains on these cores while the block runs, and has ended after it."""
    batch_size = MICRO_BATCH * micro_batches * devices
    command = [
        sys.executable, "-m", "stoker", "train", "demo", "--device", "cpu", "--devices", str(devices), "--model", MODEL,
        "--weights", "none", "--image-size", str(IMAGE_SIZE), str(IMAGE_SIZE), "--batch-size", str(batch_size),
        "--grad-accum-steps", str(micro_batches), "--steps", str(steps), "--precision", "fp32", "--eval-every", "0",
        "--checkpoint-every", "0", "--workers", "1", "--val-fraction", "0.01", "--run-dir", str(run),
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


def images_per_second(folder: Path, what: str | int, micro_batches: int, steps: int) -> float:
    """Of so many ranks, or of TWO_PROCESSES together."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    runs = [folder / f"run-{len(list(folder.glob('run-*')))}"]
    if isinstance(what, int):
        with training(runs[0], what, micro_batches, steps, cores[:what]):
            pass
        return speed_of(runs[0], what, steps)
    runs.append(runs[0].with_name(f"{runs[0].name}-b"))
    with training(runs[0], 1, micro_batches, steps, cores[:1]), training(runs[1], 1, micro_batches, steps, cores[1:]):
        pass
    return sum(speed_of(run, 1, steps) for run in runs)


def measure(arguments: argparse.Namespace) -> Report:
    if len(os.sched_getaffinity(0)) < 2:
        raise RuntimeError("two cores are needed")
    n, steps = (1, 6) if arguments.quick else (5, 60)
    rows, bars = [], []
    with tempfile.TemporaryDirectory() as name:
        for case, (micro_batches, goal) in CASES.items():
            speeds: dict[str | int, list[float]] = {1: [], 2: [], TWO_PROCESSES: []}
            for _ in range(n):
                for what, values in speeds.items():
                    values.append(images_per_second(Path(name), what, micro_batches, max(5, steps // micro_batches)))
            for what, values in speeds.items():
                text = f"{what} rank{'s' if what == 2 else ''}" if isinstance(what, int) else what
                rows.append({"what": f"{case}, {text}, img/s", **spread(values)})
            ratio = statistics.median(two / one for one, two in zip(speeds[1], speeds[2], strict=True))
            bars.append(Bar.at_least(f"{case}: images/s of two ranks / one", ratio, goal))
    return Report(
        what=f"training {MODEL} at {IMAGE_SIZE} px by one and by two ranks of one core each",
        n=n,
        rows=rows,
        bars=bars,
        packages=("torch",),
    )


if __name__ == "__main__":
    publish(measure, options(__doc__))
