"""What weights in the form of published ones are worth: D-FINE fine-tuned from 80 classes with COCO's names.

    python -m benchmarks fine_tuning [--before 800] [--steps 80] [--seeds 2] [--weights FILE] [--json FILE]

Published weights cannot be had here, so some are made: `dfine_n` is trained from random weights for --before steps on
BCCD (blood cells, 292 images), with a head of 80 classes that have COCO's names; three of them stand for the cells.
Then `stoker train DATA --model dfine_n --weights FILE` trains on the blood cells of another data set (80 images in PNG,
20 for the evaluations), as many steps

- from random weights;
- from the file, both classes new to it;
- from the file, one of the two classes named as in it.

A step costs the same in all three, so they are compared after the same CPU time; the CPU-seconds of each whole training
are in its row. All: one thread, bf16, the settings that stoker derives but for the image size. The first training has
--lr and batch 4: it only has to make weights. Each training is written to --json FILE as it ends; what is there is not
measured again, and neither are the weights in --weights FILE.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy.ember import drawn, yolo_lines
from benchmarks.accuracy.quality import SHOWN, trainval
from benchmarks.processes import ROOT, run_timed
from benchmarks.report import Bar, Report, options, publish
from stoker.data.index import open_index
from stoker.models.weights.load import COCO_CLASSES

STANDS_FOR = {"RBC": "donut", "WBC": "orange", "Platelets": "apple"}
"""Class of BCCD → the class of COCO whose row of the head is trained with it."""
ARMS: dict[str, tuple[str, ...]] = {
    "random": ("rbc", "wbc"),
    "both classes new": ("rbc", "wbc"),
    "one class by name": ("rbc", STANDS_FOR["WBC"]),
}
"""Initial weights → names of the classes of the data set that is trained on."""
BOX_LOSS = "L1 and GIoU, first step"
STARTS = ("loss, first step", BOX_LOSS)
RECENT = 10
"""Losses are means over so many steps at the start and at the end."""


def write_yolo(source: Path, folder: Path, classes: dict[int, int], most: int | None) -> None:
    """The images of a data set as a YOLO folder, without its data.yaml. classes: class of the data set → class in the
    copy. Where it has no test images, a fifth of all are drawn. most: of each split."""
    index = open_index(source)
    has_test = "test" in index.splits
    splits = (
        {name: index.image_indices(name) for name in ("train", "test")} if has_test else drawn(np.arange(len(index)))
    )
    for split, rows in splits.items():
        for kind in ("images", "labels"):
            (folder / kind / split).mkdir(parents=True)
        for row in rows[:most].tolist():
            (folder / "images" / split / f"{row}{index.path(row).suffix}").write_bytes(index.read(row))
            lines = (line.split(" ", 1) for line in yolo_lines(index, row))
            text = "\n".join(f"{classes[int(label)]} {box}" for label, box in lines)
            (folder / "labels" / split / f"{row}.txt").write_text(text)


def write_names(folder: Path, file: str, names: Sequence[str]) -> Path:
    """A data.yaml of a folder by `write_yolo`, whose test images are the ones that training evaluates."""
    listed = "".join(f"  {number}: {name}\n" for number, name in enumerate(names))
    (folder / file).write_text(f"path: {folder}\ntrain: images/train\nval: images/test\nnames:\n{listed}")
    return folder / file


class Bench:
    def __init__(self, asked: argparse.Namespace, folder: Path) -> None:
        self.asked, self.folder = asked, folder
        self.rows = json.loads(asked.json.read_text())["rows"] if asked.json and asked.json.exists() else []
        self.weights = (asked.weights or folder / "coco_names.safetensors").resolve()
        self.cells = folder / "cells"
        write_yolo(asked.shared / "blood_png", self.cells, {0: 0, 1: 1}, asked.most)

    def train(self, data: Path, *more: str) -> dict[str, Any]:
        """What a training has recorded, with its command."""
        run = Path(tempfile.mkdtemp(dir=self.folder)) / "run"
        side = str(self.asked.side)
        command = [
            sys.executable, "-m", "stoker", "train", str(data), "--model", self.asked.model, "--device", "cpu",
            "--precision", "bf16", "--image-size", side, side, "--run-dir", str(run), *more,
        ]  # fmt: skip
        _, cpu_s = run_timed(command, self.folder)
        steps, events = (
            [json.loads(line) for line in (run / file).read_text().splitlines()]
            for file in ("steps.jsonl", "events.jsonl")
        )
        texts = [event.get("text", "") for event in events]
        terms = [row["losses"] for row in steps if "losses" in row]
        losses = [one["total"] for one in terms]
        evaluated = {event["step"]: event["data"]["metrics"] for event in events if event["kind"] == "evaluated"}
        return {
            "CPU s": cpu_s,
            "loss, first step": losses[0],
            BOX_LOSS: terms[0]["bbox"] + terms[0]["giou"],
            f"loss, first {RECENT}": statistics.fmean(losses[:RECENT]),
            f"loss, last {RECENT}": statistics.fmean(losses[-RECENT:]),
            **{f"AP at {step}": metrics["ap"] for step, metrics in evaluated.items()},
            "AP50": max(evaluated.items())[1]["ap50"],
            "class head": next((text for text in texts if "class head" in text), None),
            "run": run,
        }

    def make_weights(self) -> None:
        """Trains on BCCD with COCO's names, unless that was done."""
        if self.weights.exists():
            return
        source, data = self.folder / "bccd", self.folder / "bccd-coco"
        trainval(self.asked.shared / "bccd" / "BCCD", source)
        names = open_index(source).class_names
        write_yolo(
            source, data, {n: COCO_CLASSES.index(STANDS_FOR[name]) for n, name in enumerate(names)}, self.asked.most
        )
        file = write_names(data, "data.yaml", COCO_CLASSES)
        found = self.train(
            file, "--weights", "none", "--steps", str(self.asked.before), "--batch-size", "4", "--lr",
            str(self.asked.lr), "--eval-every", "0",
        )  # fmt: skip
        shutil.copy(found.pop("run") / "final.safetensors", self.weights)
        self.add({"what": "the weights", **found})

    def measure(self, arm: str, seed: int) -> None:
        if any(row["what"] == arm and row.get("seed") == seed for row in self.rows):
            return
        data = write_names(self.cells, f"{arm.replace(' ', '-')}.yaml", ARMS[arm])
        weights = "none" if arm == "random" else str(self.weights)
        steps = self.asked.steps
        found = self.train(
            data, "--weights", weights, "--steps", str(steps), "--eval-every", str(steps // 4), "--seed", str(seed)
        )
        del found["run"]
        self.add({"what": arm, "seed": seed, **found})

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print(row, file=sys.stderr, flush=True)


def conclude(report: Report, rows: list[dict[str, Any]], steps: int) -> None:
    report.rows, report.bars = rows, []
    last = f"AP at {steps}"
    means = {
        arm: {key: statistics.fmean(row[key] for row in rows if row["what"] == arm) for key in (last, *STARTS)}
        for arm in ARMS
        if any(row["what"] == arm for row in rows)
    }
    for arm, mean in means.items():
        if arm != "random" and "random" in means:
            gained = mean[last] - means["random"][last]
            report.bars.append(Bar.at_least(f"AP less that from random weights: {arm}", gained, 0.0))
            for start in STARTS:
                ratio = mean[start] / means["random"][start]
                report.bars.append(Bar.at_most(f"{start}, over that from random weights: {arm}", ratio, 1.0))
    for row in rows:
        if row["what"] in ARMS:
            falls = row[f"loss, last {RECENT}"] / row[f"loss, first {RECENT}"]
            report.bars.append(
                Bar.at_most(f"loss at the end over that at the start: {row['what']}, {row['seed']}", falls, 1.0)
            )


def fine_tuning(asked: argparse.Namespace) -> Report:
    if asked.quick:
        asked.before, asked.steps, asked.seeds, asked.side, asked.most = 4, 4, 1, 96, 8
    what = f"{asked.model} fine-tuned for {asked.steps} steps from weights with COCO's names, and from random weights"
    report = Report(what, asked.seeds, ("stoker", "torch"))
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as folder:
        bench = Bench(asked, Path(folder))
        bench.make_weights()
        conclude(report, bench.rows, asked.steps)
        for seed in range(asked.seeds):
            for arm in ARMS:
                bench.measure(arm, seed)
                conclude(report, bench.rows, asked.steps)
                report.write(asked.json)
    return report


def parser() -> argparse.ArgumentParser:
    made = options(__doc__)
    made.add_argument("--model", default="dfine_n")
    made.add_argument("--before", type=int, default=800, help="steps that make the weights")
    made.add_argument("--lr", type=float, default=4e-4, help="learning rate of these steps")
    made.add_argument("--steps", type=int, default=80)
    made.add_argument("--side", type=int, default=192, help="of the model input, pixels")
    made.add_argument("--seeds", type=int, default=2)
    made.add_argument("--most", type=int, help="images of a split; default: all")
    made.add_argument("--weights", type=Path, metavar="FILE", help="keeps the weights, and is not made again")
    made.add_argument("--shared", type=Path, default=Path(os.environ.get("STOKER_TEST_DATA", ROOT.parent / SHOWN[3:])),
                      help="folder of the data sets; default STOKER_TEST_DATA")  # fmt: skip
    return made


if __name__ == "__main__":
    publish(fine_tuning, parser())
