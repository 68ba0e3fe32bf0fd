"""What pretraining is worth: AP after a short training on few images, from random weights and from weights of our own.

    python -m benchmarks pretraining [--models ember_n deimv2_pico] [--data microcontroller blood_png]
                                     [--counts 20 80 0] [--steps 300] [--seeds 3] [--json FILE]

A model is trained from random weights for --before steps on other images: the cars of the shared data sets, and as many
drawn ones. Then it is trained for --steps steps on 20, 80 and all (0) images of a data set, from these weights and from
random ones, and scored on the data set's test images (a drawn fifth, where it has too few), which take part in no
choice. All trainings: fp32, one thread, batch 8, square images, the settings that stoker derives. This is not what
published weights would give, which need a GPU: it shows that weights of another data set are taken over, and what a
few CPU-minutes of them do. Each training is written to --json FILE as it ends; what is there is not measured again.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.accuracy.ember import BATCH, Data, make_data, yolo_lines
from benchmarks.accuracy.quality import SHOWN
from benchmarks.processes import ROOT, run_timed
from benchmarks.report import Bar, Report, options, publish
from stoker.data.demo import draw_split
from stoker.data.index import open_index

RANDOM, PRETRAINED = "random", "pretrained"
NUM_VALIDATED = 60


def make_other_data(shared: Path, folder: Path, num_drawn: int) -> None:
    """The cars and drawn images, as a YOLO folder; drawn ones are its validation split."""
    folder.mkdir()
    for split, count in (("train", num_drawn), ("valid", NUM_VALIDATED)):
        (folder / "drawn").mkdir(exist_ok=True)
        draw_split(folder / "drawn" / split, split, count)
    indexes = open_index(shared / "cars"), open_index(folder / "drawn")
    names: list[str] = []
    for index in indexes:
        for split in ("train", "val") if index is indexes[1] else ("train",):
            for kind in ("images", "labels"):
                (folder / kind / split).mkdir(parents=True, exist_ok=True)
            for row in index.image_indices(split).tolist():
                stem = f"{len(names)}-{row}"
                (folder / "images" / split / f"{stem}.jpg").write_bytes(index.read(row))
                lines = yolo_lines(index, row, len(names))
                (folder / "labels" / split / f"{stem}.txt").write_text("\n".join(lines))
        names += index.class_names
    listed = "".join(f"  {number}: {name}\n" for number, name in enumerate(names))
    (folder / "data.yaml").write_text(f"path: {folder}\ntrain: images/train\nval: images/val\nnames:\n{listed}")


class Bench:
    def __init__(self, asked: argparse.Namespace, folder: Path) -> None:
        self.asked, self.folder = asked, folder
        self.rows = json.loads(asked.json.read_text())["rows"] if asked.json and asked.json.exists() else []
        self.rows = [row for row in self.rows if row["what"] == "training"]
        self.pretrained: dict[str, Path] = {}
        self.data: dict[tuple[str, int], Data] = {}

    def train(self, data: Path, model: str, steps: int, seed: int, weights: str) -> tuple[Path, float]:
        run = Path(tempfile.mkdtemp(dir=self.folder)) / "run"
        side = str(self.asked.side)
        command = [
            sys.executable, "-m", "stoker", "train", str(data), "--model", model, "--device", "cpu", "--weights",
            weights, "--steps", str(steps), "--batch-size", str(BATCH), "--seed", str(seed), "--eval-every", "0",
            "--precision", "fp32", "--image-size", side, side, "--run-dir", str(run),
        ]  # fmt: skip
        return run / "final.safetensors", run_timed(command, self.folder)[1]

    def weights_of(self, model: str) -> Path:
        if model not in self.pretrained:
            other = self.folder / "other"
            data = other / "data.yaml"
            if not other.exists():
                make_other_data(self.asked.shared, other, self.asked.drawn)
            self.pretrained[model], cpu_s = self.train(data, model, self.asked.before, 0, "none")
            print(f"{model}: {self.asked.before} steps on other images in {cpu_s:.0f} CPU-seconds", file=sys.stderr)
        return self.pretrained[model]

    def data_of(self, name: str, count: int) -> Data:
        if (name, count) not in self.data:
            folder = self.folder / f"{name}-{count}"
            folder.mkdir()
            self.data[name, count] = make_data(
                name, self.asked.shared, folder, side=self.asked.side, most=count or None
            )
        return self.data[name, count]

    def measure(self, key: dict[str, Any]) -> None:
        if any(all(row[name] == value for name, value in key.items()) for row in self.rows):
            return
        data = self.data_of(key["data"], key["images"])
        weights = "none" if key["weights"] == RANDOM else str(self.weights_of(key["model"]))
        trained, cpu_s = self.train(data.ours, key["model"], self.asked.steps, key["seed"], weights)
        command = [sys.executable, "-m", "stoker", "eval", str(trained), str(data.ours), "--split", "test", "--json"]
        scores = json.loads(run_timed(command, self.folder)[0])
        self.rows.append({"what": "training", **key, "AP": scores["ap"], "AP50": scores["ap50"], "CPU s": cpu_s})
        print(self.rows[-1], file=sys.stderr, flush=True)


def conclude(report: Report, rows: list[dict[str, Any]]) -> None:
    groups: dict[tuple[str, str, int], dict[str, list[float]]] = {}
    for row in rows:
        group = groups.setdefault((row["model"], row["data"], row["images"]), {RANDOM: [], PRETRAINED: []})
        group[row["weights"]].append(row["AP"])
    report.rows, report.bars = [*rows], []
    for (model, data, count), found in groups.items():
        if not all(found.values()):
            continue
        means = {weights: statistics.fmean(values) for weights, values in found.items()}
        where = f"{model} on {data}, {count or 'all'} images"
        report.rows.append({"what": where, **{f"AP, {weights}": value for weights, value in means.items()}})
        report.bars.append(Bar.at_least(f"AP pretrained less random, {where}", means[PRETRAINED] - means[RANDOM], 0.0))


def pretraining(asked: argparse.Namespace) -> Report:
    if asked.quick:
        asked.models, asked.data, asked.counts, asked.seeds = ["ember_n"], ["blood_png"], [20], 1
        asked.steps, asked.before, asked.drawn = 20, 20, 100
    what = f"AP after {asked.steps} steps, from random weights and after {asked.before} steps on other images"
    report = Report(what, asked.seeds, ("stoker", "torch"))
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as folder:
        bench = Bench(asked, Path(folder))
        for seed in range(asked.seeds):
            for model in asked.models:
                for data in asked.data:
                    for count in asked.counts:
                        for weights in (RANDOM, PRETRAINED):
                            key = {"model": model, "data": data, "images": count, "weights": weights, "seed": seed}
                            bench.measure(key)
                            conclude(report, bench.rows)
                            report.write(asked.json)
    return report


def parser() -> argparse.ArgumentParser:
    made = options(__doc__)
    made.add_argument("--models", nargs="+", default=["ember_n", "deimv2_pico"], metavar="MODEL")
    made.add_argument("--data", nargs="+", default=["microcontroller", "blood_png"], metavar="NAME")
    made.add_argument("--counts", nargs="+", type=int, default=[20, 80, 0], help="training images; 0: all")
    made.add_argument("--steps", type=int, default=300)
    made.add_argument("--before", type=int, default=3000, help="steps on other images")
    made.add_argument("--drawn", type=int, default=1000, help="drawn images besides the cars")
    made.add_argument("--side", type=int, default=256, help="of the model input, pixels")
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--shared", type=Path, default=Path(os.environ.get("STOKER_TEST_DATA", ROOT.parent / SHOWN[3:])),
                      help="folder of the data sets; default STOKER_TEST_DATA")  # fmt: skip
    return made


if __name__ == "__main__":
    publish(pretraining, parser())
