"""The effect of the recipe's augmentation on AP: the same training with and without it, at equal steps, over seeds.

Trains on a dataset with a test split (BCCD: 205 training images, 364 in all) and scores the final weights on the
validation and the test split. Two trainings run in parallel on one core each, as AP does not depend on speed. Not part
of `make bench`: on two cores it takes a quarter of an hour.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.report import Bar, Report, options, publish

VARIANTS = {"plain": ["--augment", "none"], "recipe": []}
SPLITS = ("val", "test")


def stoker(*arguments: str) -> str:
    """The output of a stoker command on one core. Raises CalledProcessError."""
    one_core = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "stoker", *arguments], capture_output=True, text=True, env=one_core)
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
        done.check_returncode()
    return done.stdout


def train(variant: str, seed: int, arguments: Any, folder: Path) -> dict[str, Any]:
    """A row: variant, seed, AP and AP50 of each split."""
    run = str(folder / f"{variant}-{seed}")
    extra = ["--weights", arguments.weights] if arguments.weights else []
    stoker("train", arguments.data, *extra, "--steps", str(arguments.steps), "--seed", str(seed), "--eval-every", "0",
           "--workers", "1", "--run-dir", run, *VARIANTS[variant])  # fmt: skip
    row: dict[str, Any] = {"augmentation": variant, "seed": seed}
    for split in SPLITS:
        scores = json.loads(stoker("eval", run, "--split", split, "--json"))
        row |= {f"AP {split}": scores["ap"], f"AP50 {split}": scores["ap50"]}
    print(row, file=sys.stderr, flush=True)
    return row


def run(arguments: Any) -> Report:
    seeds = range(2 if arguments.quick else arguments.seeds)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        pairs = [(kind, seed) for seed in seeds for kind in VARIANTS]
        rows = list(pool.map(lambda pair: train(*pair, arguments, Path(folder)), pairs))
    report = Report(f"AP with and without the recipe's augmentation, {arguments.steps} steps", len(seeds), rows=[*rows])
    report.packages = ("stoker", "torch")
    for split in SPLITS:
        ap = {kind: [row[f"AP {split}"] for row in rows if row["augmentation"] == kind] for kind in VARIANTS}
        pooled = statistics.fmean(statistics.variance(values) for values in ap.values()) ** 0.5
        for kind, values in ap.items():
            report.rows.append({"augmentation": kind, "seed": "mean", f"AP {split}": statistics.fmean(values)})
        gain = statistics.fmean(ap["recipe"]) - statistics.fmean(ap["plain"])
        report.bars.append(Bar.at_least(f"gain in AP ({split}) / pooled standard deviation", gain / pooled, -1.0))
    return report


def parser() -> ArgumentParser:
    made = options(__doc__)
    made.add_argument("data", help="a dataset with validation and test split")
    made.add_argument("--weights", help="as in stoker train")
    made.add_argument("--steps", type=int, default=512)
    made.add_argument("--seeds", type=int, default=3)
    return made


if __name__ == "__main__":
    publish(run, parser())
