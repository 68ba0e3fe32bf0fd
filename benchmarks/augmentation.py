"""What the recipe's augmentation does to AP: the same training with it and without, at equal steps, over some seeds.

Trains on a data set with a test split (BCCD's 205 training pictures, 364 in all) and scores the final weights on the
validation and the test split. Two trainings run side by side on a core each: AP does not depend on speed. Not part of
`make bench`: on two cores it takes a quarter of an hour.
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

from report import Bar, Report, options, publish

KINDS = {"plain": ["--augment", "none"], "recipe": []}
SPLITS = ("val", "test")


def stoker(*arguments: str) -> str:
    """The output of a stoker command on one core. Raises CalledProcessError."""
    one_core = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "stoker", *arguments], capture_output=True, text=True, env=one_core)
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
        done.check_returncode()
    return done.stdout


def train(kind: str, seed: int, arguments: Any, folder: Path) -> dict[str, Any]:
    """A row: kind, seed, AP and AP50 of each split."""
    run = str(folder / f"{kind}-{seed}")
    extra = ["--weights", arguments.weights] if arguments.weights else []
    stoker("train", arguments.data, *extra, "--max-duration", str(arguments.steps), "--seed", str(seed), "--eval-every", "0",
           "--workers", "1", "--run", run, *KINDS[kind])  # fmt: skip
    row: dict[str, Any] = {"augmentation": kind, "seed": seed}
    for split in SPLITS:
        scores = json.loads(stoker("eval", run, "--split", split, "--json"))
        row |= {f"AP {split}": scores["ap"], f"AP50 {split}": scores["ap50"]}
    print(row, file=sys.stderr, flush=True)
    return row


def run(arguments: Any) -> Report:
    seeds = range(2 if arguments.quick else arguments.seeds)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        pairs = [(kind, seed) for seed in seeds for kind in KINDS]
        rows = list(pool.map(lambda pair: train(*pair, arguments, Path(folder)), pairs))
    report = Report(f"AP with and without the recipe's augmentation, {arguments.steps} steps", len(seeds), rows=[*rows])
    report.packages = ("stoker", "torch")
    for split in SPLITS:
        of = {kind: [row[f"AP {split}"] for row in rows if row["augmentation"] == kind] for kind in KINDS}
        pooled = statistics.fmean(statistics.variance(values) for values in of.values()) ** 0.5
        for kind, values in of.items():
            report.rows.append({"augmentation": kind, "seed": "mean", f"AP {split}": statistics.fmean(values)})
        gain = statistics.fmean(of["recipe"]) - statistics.fmean(of["plain"])
        report.bars.append(Bar.at_least(f"gain in AP ({split}) / pooled standard deviation", gain / pooled, -1.0))
    return report


def parser() -> ArgumentParser:
    made = options(__doc__)
    made.add_argument("data", help="a data set with validation and test split")
    made.add_argument("--weights", help="as in stoker train")
    made.add_argument("--steps", type=int, default=512)
    made.add_argument("--seeds", type=int, default=3)
    return made


if __name__ == "__main__":
    publish(run, parser())
