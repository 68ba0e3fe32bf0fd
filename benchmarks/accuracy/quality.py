"""Accuracy of the shipped recipe for a fixed CPU time, and compared with torchvision's training at equal steps.

BCCD (364 images of blood cells): trained on train and val together, 292 images; the final weights are evaluated once on
the 72 of test, so nothing is tuned on them. A training is one `stoker train` on one thread; its CPU time is that of the
whole process, including the evaluation of two images at the end, excluding the evaluation on test. The other side
is torchvision_training.py; Ultralytics' YOLO11n is the other side of ember.py. Not part of `make bench`: it takes an
hour on two cores. Each run is written to --json FILE as it ends, with its command, and what is there is not measured
again: an interrupted benchmark continues (delete the file to start over).
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT, run_timed
from benchmarks.report import Bar, Report, options, publish

BUDGET_S = 1330.0
"""CPU-seconds that torchvision's training took, the first of BEFORE."""
GOAL_AP, GOAL_AP50 = 0.55, 0.85
SHOWN = "../shared/data"
"""How commands in the results name the folder of data sets, wherever it lies."""

SOURCE = (
    "torchvision's RetinaNet MobileNetV2-FPN, 256 channels, 4 convolutions; one run each, before this file was written"
)
BEFORE = [
    {"what": "before: torchvision, 10 epochs of batch 8",
     "AP": 0.512, "AP50": 0.804, "CPU s": 1330.0, "command": SOURCE},
    {"what": "before: torchvision, bf16, channels last, 17 epochs",
     "AP": 0.536, "AP50": 0.844, "CPU s": 1295.0, "command": SOURCE},
]  # fmt: skip
"""What BUDGET_S and the goals are from."""
Rows = dict[tuple[str, int, int], dict[str, Any]]
"""A row of the results for each training, by its kind, seed and steps."""


@dataclass(frozen=True)
class Run:
    """A training to make: `budget`, `ours` or `theirs`."""

    kind: str
    seed: int
    steps: int


def main_run(arguments: argparse.Namespace) -> Report:
    seeds = range(1 if arguments.quick else arguments.seeds)
    lengths = {"budget": arguments.budget_steps, "ours": arguments.steps, "theirs": arguments.steps}
    if arguments.quick:
        lengths = dict.fromkeys(lengths, 4)
    runs = [Run(kind, seed, steps) for seed in seeds for kind, steps in lengths.items()
            if arguments.only in (None, kind)]  # fmt: skip
    report = Report("AP on BCCD's test split: the shipped recipe, and torchvision's training", len(seeds))
    report.packages = ("stoker", "torch", "torchvision")
    done = cached(arguments.json)
    missing = [run for run in runs if (run.kind, run.seed, run.steps) not in done]
    writing = threading.Lock()

    def make(run: Run) -> None:
        row = measure(run, arguments, Path(folder))
        print({name: value for name, value in row.items() if name != "command"}, file=sys.stderr, flush=True)
        with writing:
            done[run.kind, run.seed, run.steps] = row
            conclude(report, done, lengths)
            report.write(arguments.json)

    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        if missing:
            trainval(arguments.shared / "bccd" / "BCCD", Path(folder) / "trainval")
        list(pool.map(make, missing))
    conclude(report, done, lengths)
    return report


def cached(path: Path | None) -> Rows:
    """The trainings of an earlier results file."""
    if path is None or not path.exists():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {(row["what"], row["seed"], row["steps"]): row for row in rows if isinstance(row.get("seed"), int)}


def trainval(source: Path, folder: Path) -> None:
    """BCCD again, with links: trains on train and val; val is two of those, since a training has to score something."""
    lists = folder / "ImageSets" / "Main"
    lists.mkdir(parents=True)
    for name in ("Annotations", "JPEGImages"):
        (folder / name).symlink_to((source / name).resolve())
    both = (source / "ImageSets" / "Main" / "trainval.txt").read_text().split()
    test = (source / "ImageSets" / "Main" / "test.txt").read_text().split()
    if set(both) & set(test):
        raise RuntimeError("the test split has images of the training splits")
    for name, stems in (("train", both), ("val", both[:2]), ("test", test)):
        (lists / f"{name}.txt").write_text("\n".join(stems) + "\n")


def measure(run: Run, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A row: kind, seed, steps, AP and AP50 on test, CPU-seconds of the training, commands."""
    data = str(folder / "trainval")
    weights = str(arguments.shared / "weights" / "mobilenet_v2_imagenet.pth")
    if run.kind == "theirs":
        small = ["--side", "96"] if arguments.quick else []
        script = str(Path(__file__).with_name("torchvision_training.py"))
        theirs = [
            sys.executable, script, data, "--weights", weights,
            "--steps", str(run.steps), "--seed", str(run.seed), *small,
        ]  # fmt: skip
        output, _ = run_timed(theirs, folder)
        scores = json.loads(output.splitlines()[-1])
        cpu_s, commands = scores["cpu_s"], [theirs]
    else:
        small = ["--image-size", "96", "128"] if arguments.quick else []
        place = folder / f"{run.kind}-{run.seed}"
        stoker = [sys.executable, "-m", "stoker"]
        train = [*stoker, "train", data, "--model", "retinanet_mobilenet_v2_fpn", "--weights", weights,
                 "--device", "cpu", "--steps", str(run.steps), "--seed", str(run.seed), "--eval-every", "0",
                 "--run-dir", str(place), *small]  # fmt: skip
        score = [*stoker, "eval", str(place / "final.safetensors"), data, "--split", "test", "--json"]
        _, cpu_s = run_timed(train, folder)
        output, _ = run_timed(score, folder)
        scores, commands = json.loads(output), [train, score]
    shown = "; ".join(" ".join(command) for command in commands)
    paths = (folder, "TEMPORARY"), (arguments.shared, SHOWN), (sys.executable, "python"), (f"{ROOT}/", "")
    for path, name in paths:
        shown = shown.replace(str(path), name)
    return {"what": run.kind, "seed": run.seed, "steps": run.steps, "AP": scores["ap"], "AP50": scores["ap50"],
            "CPU s": cpu_s, "command": shown}  # fmt: skip


def conclude(report: Report, done: Rows, lengths: dict[str, int]) -> None:
    """Fills the report with the runs so far, the means of those of these lengths, and the bars that can be judged."""
    rows = sorted(done.values(), key=lambda row: (row["what"], row["steps"], row["seed"]))
    of = {
        kind: [row for row in rows if (row["what"], row["steps"]) == (kind, steps)] for kind, steps in lengths.items()
    }
    means = [
        {"what": f"{kind}, mean of {len(some)}", "steps": lengths[kind],
         **{name: statistics.fmean(row[name] for row in some) for name in ("AP", "AP50", "CPU s")}}
        for kind, some in of.items() if some
    ]  # fmt: skip
    report.rows = [*rows, *means, *BEFORE]
    report.bars = []
    if of["budget"]:
        mean = next(row for row in means if row["what"].startswith("budget"))
        report.bars += [
            Bar.at_most("CPU-seconds of a training, the most", max(row["CPU s"] for row in of["budget"]), BUDGET_S),
            Bar.at_least("AP in that time, mean", mean["AP"], GOAL_AP),
            Bar.at_least("AP50 in that time, mean", mean["AP50"], GOAL_AP50),
        ]
    ours, theirs = ([row["AP"] for row in of[kind]] for kind in ("ours", "theirs"))
    if min(len(ours), len(theirs)) > 1:
        pooled = statistics.fmean([statistics.variance(ours), statistics.variance(theirs)]) ** 0.5
        difference = (statistics.fmean(ours) - statistics.fmean(theirs)) / pooled
        report.bars.append(Bar.at_least("AP ours - theirs, equal steps, in pooled deviations", difference, -1.0))


def parser() -> argparse.ArgumentParser:
    made = options(__doc__)
    made.add_argument("--only", choices=("budget", "ours", "theirs"))
    made.add_argument("--seeds", type=int, default=3, help="runs of each kind, seeds 0, 1, …")
    made.add_argument("--steps", type=int, default=256, help="of the two trainings with equal steps")
    made.add_argument("--budget-steps", type=int, default=1400, help=f"as many as fit {BUDGET_S:,.0f} CPU-seconds")
    made.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="trainings at a time")
    made.add_argument("--shared", type=Path, default=Path(os.environ.get("STOKER_TEST_DATA", ROOT.parent / SHOWN[3:])),
                      help="folder of bccd and weights; default STOKER_TEST_DATA")  # fmt: skip
    return made


if __name__ == "__main__":
    publish(main_run, parser())
