"""`stoker search --architecture` on the built-in data: is a network that it finds as accurate as `ember_n`, and faster?

    python -m benchmarks architecture --work FOLDER

A super-network is trained, and networks of it are scored. Of those that are at least SPEED times as fast as `ember_n`
(ONNX Runtime, one thread, in the table of the search), the one with the highest AP with shared weights is taken: so
far, no AP of a training from scratch has been looked at. It and `ember_n` are then trained from scratch with three
seeds each, on the same number of images. Bars: its speed, and its AP within the spread of the seeds.

All is done in FOLDER and continues there: what has ended is not repeated.
"""

import argparse
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from benchmarks.processes import child_environment
from benchmarks.report import Bar, Report, options, publish
from stoker.search.architecture import network_of
from stoker.search.study import Study, TrialState
from stoker_watch.runs.records import EVENTS, is_finished, read_lines
from stoker_watch.runs.schemas import Event

SPACE = """\
block = ["csp", "inverted"]
width = [8, 12, 16]
depth = [1, 2]
neck = [16, 32, 64]
head_depth = [1, 2]
image_size = [96, 128]
"""
SIDE, BATCH, SEEDS, SPEED = 128, 8, 3, 1.5
DEVIATIONS = 2.0
"""Pooled standard deviations of the seeds by which the mean AP may be lower."""


def stoker(folder: Path, *words: str) -> None:
    command = [sys.executable, "-m", "stoker", *words, "--batch-size", str(BATCH), "--device", "cpu"]
    done = subprocess.run(command, cwd=folder, env=child_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr[-600:]}")


def train(folder: Path, name: str, model: str, side: int, steps: int, seed: int) -> float:
    """AP on the validation split."""
    run = folder / f"{name}-{seed}"
    if not is_finished(run):
        stoker(folder, "train", "demo", "--model", model, "--weights", "none", "--image-size", str(side), str(side),
               "--steps", str(steps), "--eval-every", "0", "--seed", str(seed), "--run-dir", str(run))  # fmt: skip
    ends = [event for event in read_lines(run, EVENTS, Event) if event.kind == "finished"]
    ap: float = ends[-1].data["metrics"]["ap"]
    return ap


def run(arguments: argparse.Namespace) -> Report:
    folder = arguments.work.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    steps, count = (20, 10) if arguments.quick else (arguments.steps, arguments.trials)
    space, study = folder / "networks.toml", folder / "search"
    space.write_text(SPACE)
    stoker(folder, "search", "demo", "--architecture", "--space", str(space), "--steps", str(steps), "--trials",
           str(count), "--image-size", str(SIDE), str(SIDE), "--seed", "7", "--run-dir", str(study))  # fmt: skip
    trials = [trial for trial in Study(study).trials() if trial.state == TrialState.COMPLETE]
    base_ap, base_ms = trials[0].values
    fast = [trial for trial in trials if base_ms / trial.values[1] >= SPEED]
    report = Report(f"`stoker search demo --architecture`: super-network of {steps} steps, {count} networks", SEEDS,
                    ("stoker", "optuna", "torch", "onnxruntime"))  # fmt: skip
    if not fast:
        report.bars.append(Bar.at_least("networks that are fast enough", 0, 1))
        return report
    best = max(fast, key=lambda trial: trial.values[0])
    seeds = range(1 if arguments.quick else SEEDS)
    found: dict[str, list[float]] = {}
    for seed in seeds:
        for name, model, side in (
            ("ember_n", "ember_n", SIDE),
            ("found", network_file(folder, best.params), int(best.params["image_size"])),
        ):
            found.setdefault(name, []).append(train(folder, name, model, side, arguments.train_steps, seed))
    for name, (ap, latency_ms) in (("ember_n", (base_ap, base_ms)), ("found", best.values)):
        what = f"{name} {best.params}" if name == "found" else name
        report.rows.append({"what": what, "ms": latency_ms, "AP, shared weights": ap,
                            "AP from scratch": statistics.fmean(found[name]), "all": found[name]})  # fmt: skip
    report.bars.append(Bar.at_least("speed, found / ember_n", base_ms / best.values[1], SPEED))
    if len(seeds) > 1:
        spread = statistics.fmean([statistics.variance(values) for values in found.values()]) ** 0.5
        apart = statistics.fmean(found["found"]) - statistics.fmean(found["ember_n"])
        report.bars.append(Bar.at_least("AP, found - ember_n, in deviations of seeds", apart / spread, -DEVIATIONS))
    return report


def network_file(folder: Path, params: dict[str, Any]) -> str:
    """A recipe file of the network, which the search writes for those of the front only."""
    path = folder / "found.toml"
    path.write_text(tomli_w.dumps(msgspec.to_builtins(network_of(params))))
    return str(path)


def parser() -> argparse.ArgumentParser:
    made = options(__doc__)
    made.add_argument("--work", type=Path, required=True, help="folder of the search and the trainings")
    made.add_argument("--steps", type=int, default=2000, help="of the super-network")
    made.add_argument("--trials", type=int, default=60, help="networks that are scored")
    made.add_argument("--train-steps", type=int, default=2000, help="of each training from scratch")
    return made


if __name__ == "__main__":
    publish(run, parser())
