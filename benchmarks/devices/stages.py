"""Two stages of one thread each against one process with as many micro-batches, on this machine's CPU: the table of
docs/devices.md.

All train the demo by `stoker train`, gloo between the ranks, no limit on the link. Measured are the windows of steps
(steps.jsonl) without the first step: seconds of a step, and of each rank the fraction in which it waits (`comm`): the
bubble and the exchange. Cases alternate. The bubble by the formula is (N - 1) / (M + N - 1) of N stages and M
micro-batches; two threads of one process are what the same cores give without stages.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks.processes import child_environment
from benchmarks.report import Report, options, publish, spread
from stoker_watch.runs.records import STEPS, read_lines
from stoker_watch.runs.schemas import StepWindow

MODEL, SIDE, BATCH = "retinanet_tiny_fpn", 320, 16


class Case(NamedTuple):
    stages: int
    micro_batches: int
    threads: int


CASES = {
    "one process, one thread, 8 micro-batches": Case(1, 8, 1),
    "2 stages, 8 micro-batches": Case(2, 8, 1),
    "2 stages, 2 micro-batches": Case(2, 2, 1),
    "2 stages, 1 micro-batch": Case(2, 1, 1),
    "one process, two threads, 8 micro-batches": Case(1, 8, 2),
}


def train(folder: Path, case: Case, steps: int) -> list[list[StepWindow]]:
    """The windows of each rank of a training, without the first step."""
    run = folder / f"run-{len(list(folder.glob('run-*')))}"
    command = [
        sys.executable, "-m", "stoker", "train", "demo", "--model", MODEL, "--image-size", str(SIDE), str(SIDE),
        "--batch-size", str(BATCH), "--steps", str(steps), "--eval-every", "0", "--checkpoint-every", "0", "--device",
        "cpu", "--devices", str(case.stages), "--stages", str(case.stages), "--grad-accum-steps",
        str(case.micro_batches), "--val-fraction", "0.01", "--run-dir", str(run),
    ]  # fmt: skip
    threads = str(case.threads)
    variables = {"OMP_NUM_THREADS": threads, "STOKER_CORES": threads, "STOKER_CACHE_DIR": str(folder / "cache")}
    subprocess.run(command, env=child_environment() | variables, stdout=subprocess.DEVNULL, check=True)
    folders = [run, *(run / "ranks" / f"{rank:04}" for rank in range(1, case.stages))]
    return [[w for w in read_lines(path, STEPS, StepWindow) if w.window_steps and w.step > 1] for path in folders]


def measure(arguments: argparse.Namespace) -> Report:
    n, steps = (1, 4) if arguments.quick else (3, 8)
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    waits: dict[str, list[list[float]]] = {name: [] for name in CASES}
    with tempfile.TemporaryDirectory() as name:
        for _ in range(n):
            for title, case in CASES.items():
                ranks = train(Path(name), case, steps)
                seconds[title].append(sum(w.wall_s for w in ranks[0]) / sum(w.window_steps for w in ranks[0]))
                waits[title].append(
                    [sum(w.phases.get("comm", 0.0) for w in ws) / sum(w.wall_s for w in ws) for ws in ranks]
                )
    rows = []
    for title, case in CASES.items():
        row = {"what": title, **{f"step, s: {key}": value for key, value in spread(seconds[title]).items()}}
        if case.stages > 1:
            row |= {f"comm of rank {k}": sum(values) / n for k, values in enumerate(zip(*waits[title], strict=True))}
            row["bubble"] = (case.stages - 1) / (case.micro_batches + case.stages - 1)
        rows.append(row)
    return Report(what=f"{MODEL} at {SIDE} px in stages, batches of {BATCH}", n=n, rows=rows, packages=("torch",))


if __name__ == "__main__":
    publish(measure, options(__doc__))
