"""Ember compared with Ultralytics' YOLO26n and YOLO11n: accuracy for the same CPU time of training, same images.

    python -m benchmarks ember --ultralytics ENVIRONMENT/bin/yolo [--data bccd dice] [--budgets 675 1300] [--json FILE]

Settings of a recipe are chosen with `--score val`, which scores a fifth of the training images that is held out, and
does not read the test images. Those are scored once, when the recipe is decided: without `--score`.

and which model should be the default on a CPU (docs/models.md), on data sets of others:

    python -m benchmarks ember --data bccd dice blood_png cars kangaroo=FOLDER … --only ember_n ember_mobilenet_v2
                               --budgets 300 --seeds 2 --json FILE

Every contestant trains on one thread in fp32 (a row apart: ours in bf16), on the training images of a data set only,
at the same image size or one of the same area, and is evaluated once, after its last step, on the test images, by this
project's evaluation: AP and AP50 of the final weights. How many epochs fit a budget of CPU-seconds (user and system, of
the whole training process from start to end) is measured beforehand by two short trainings, then by each training; the
seconds that one took are in its row.

Ultralytics' package is AGPL: it is no dependency and nothing of it is imported. It runs as a program of its own, by its
own commands, in an environment that you make (`python -m venv E; E/bin/pip install 'ultralytics>=8.4'`); without
`--ultralytics` it is left out. Its settings are its own defaults but batch 8, which is ours too, and no workers: so it
steps once for every 64 images (its `nbs`), takes one thread less than there are cores (measure on two), and evaluates
the test images twice within its time, about 1 % of it. YOLO26n is trained and evaluated with its one-to-one head.

Each training is written to --json FILE as it ends; what is there is not measured again.
"""

import argparse
import json
import math
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.accuracy.quality import SHOWN, trainval
from benchmarks.processes import ROOT, run_timed
from benchmarks.report import Bar, Report, options, publish
from stoker.data.index import Index, open_index
from stoker.evaluation.detections import Detections
from stoker.evaluation.evaluate import compute_metrics, ground_truth
from stoker.models.weights import model_file
from stoker_watch.runs.evaluation import Metrics

OURS, TUNED, BF16 = "ember_n", "ember_mobilenet_v2, from ImageNet", "ember_n, bf16"
PEERS = {"yolo26n": (0.03, 0.6), "yolo11n": (0.0, 0.9)}
"""How much more AP ember_n has to reach than each, and its CPU-seconds per image of training over theirs, at most."""
SIDE, BATCH = 320, 8
GOALS = {("bccd", 675): (0.53, 0.84), ("bccd", 1300): (0.58, 0.885)}
"""AP and AP50 that the mean of ember_n has to reach, together with those of the peer in the same run."""
SPARED, LIMIT = 0.97, 1.03
"""Fractions of a budget: what is planned for, and what a training of ours may take; one that took more is made again,
with as many epochs as it shows to fit. The peer keeps what it took beyond."""
FEWEST_TEST_IMAGES = 30
"""A data set with fewer gets a test split that is drawn."""
SHORT = (2, 6)
"""Epochs of the trainings that say what an epoch costs. The peer's last ten epochs are without mosaics, so that its own
are a little dearer in longer trainings than these say: it then has more than its budget."""


@dataclass(frozen=True)
class Data:
    """A data set as both read it. ours: what `stoker train` gets; theirs: the same as a YOLO folder, its data.yaml."""

    name: str
    ours: Path
    theirs: Path
    index: Index
    rows: dict[str, int]
    """Name of an image in the YOLO folder, without its suffix → its row in the index."""
    side: int
    """The peer's image size, a square."""
    image_size: tuple[int, int]
    """Ours, of no more pixels."""


@dataclass(frozen=True)
class Training:
    contestant: str
    data: str
    budget: int
    seed: int


def make_data(
    name: str,
    shared: Path,
    folder: Path,
    *,
    side: int | None = None,
    source: Path | None = None,
    most: int | None = None,
    score: str = "test",
) -> Data:
    """side: a square image size for both; default: SIDE for the peer, and for ours one that suits the images. source:
    the data set, if it is not in `shared`. most: of its training images. score: val holds out a fifth of the training
    images and scores those, as the split "test" of a copy without the test images."""
    if name == "bccd":
        source = folder / name
        trainval(shared / "bccd" / "BCCD", source)
    source = source or shared / name
    index = open_index(source)
    theirs = folder / f"{name}-yolo"
    splits = {split: index.image_indices(split) for split in ("train", "test") if split in index.splits}
    draws = len(splits.get("test", ())) < FEWEST_TEST_IMAGES
    if draws:  # a fifth of the images, and both sides read the copy
        splits = drawn(np.arange(len(index)))
    if score == "val":
        splits, draws = drawn(splits["train"]), True
    if most is not None and len(splits["train"]) > most:
        splits["train"], draws = np.sort(np.random.default_rng(0).permutation(splits["train"])[:most]), True
    for split, rows in splits.items():
        for kind in ("images", "labels"):
            (theirs / kind / split).mkdir(parents=True)
        for row in rows.tolist():
            (theirs / "images" / split / f"{row}.jpg").write_bytes(index.read(row))
            (theirs / "labels" / split / f"{row}.txt").write_text("\n".join(yolo_lines(index, row)))
    names = "".join(f"  {number}: {label}\n" for number, label in enumerate(index.class_names))
    # Its trainer needs images to validate on; with val=False it uses them at the end only.
    for file, split in (("data.yaml", "test"), ("peer.yaml", "val")):
        (theirs / file).write_text(f"path: {theirs}\ntrain: images/train\n{split}: images/test\nnames:\n{names}")
    rows_of = {str(row): row for rows in splits.values() for row in rows.tolist()}
    if draws:  # the index of the copy has other rows
        source = theirs / "data.yaml"
        index = open_index(source)
        rows_of = {index.path(row).stem: row for row in range(len(index))}
    square = side or SIDE
    image_size = (288, 352) if side is None and name == "bccd" else (square, square)
    return Data(name, source, theirs / "peer.yaml", index, rows_of, square, image_size)


def drawn(rows: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
    """The images in two splits, a fifth for the test."""
    order = np.random.default_rng(0).permutation(rows)
    return {"train": np.sort(order[len(order) // 5 :]), "test": np.sort(order[: len(order) // 5])}


def yolo_lines(index: Index, row: int, first_label: int = 0) -> Iterator[str]:
    """Class, center and sides of each box as fractions of the image. first_label: of the index's classes."""
    height, width = index.original_size[row].tolist()
    for place in range(index.offsets[row], index.offsets[row + 1]):
        x1, y1, x2, y2 = index.boxes[place].tolist()
        numbers = ((x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height)
        yield f"{first_label + index.labels[place]} " + " ".join(f"{number:.6f}" for number in numbers)


@dataclass(frozen=True)
class Trained:
    cpu_s: float
    ap: float
    ap50: float
    parameters: int
    gflop: float
    """1e9 operations for an image of 640 × 640."""
    commands: tuple[list[str], ...]


Contestant = Callable[[Data, int, int, Path], Trained]
"""Trains so many epochs with a seed into a new folder, and is evaluated on the test images."""


def of_stoker(model: str, *more: str) -> Contestant:
    def contestant(data: Data, epochs: int, seed: int, folder: Path) -> Trained:
        run = folder / "run"
        train = [
            sys.executable, "-m", "stoker", "train", str(data.ours), "--model", model, "--device", "cpu",
            "--epochs", str(epochs), "--batch-size", str(BATCH), "--seed", str(seed),
            "--eval-every", "0", "--run-dir", str(run),
            "--image-size", *map(str, data.image_size), *more,
        ]  # fmt: skip
        _, cpu_s = run_timed(train, folder)
        scoring = [sys.executable, "-m", "stoker", "eval", str(run / "final.safetensors"), str(data.ours),
                   "--split", "test", "--json"]  # fmt: skip
        scores = json.loads(run_timed(scoring, folder)[0])
        return Trained(cpu_s, scores["ap"], scores["ap50"], *size_of(run), (train, scoring))

    return contestant


def size_of(run: Path) -> tuple[int, float]:
    """Parameters of a trained model, and 1e9 operations for an image of 640 × 640."""
    model, _ = model_file.load_model(run / "final.safetensors")
    pixels = torch.zeros(1, 3, 640, 640, dtype=torch.uint8)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        model(pixels)
    return sum(weight.numel() for weight in model.parameters()), counter.get_total_flops() / 1e9


def of_ultralytics(program: Path, model: str) -> Contestant:
    def contestant(data: Data, epochs: int, seed: int, folder: Path) -> Trained:
        common = [f"data={data.theirs}", f"imgsz={data.side}", "device=cpu", "workers=0", "plots=False",
                  f"project={folder}"]  # fmt: skip
        train = [
            str(program), "detect", "train", f"model={model}.yaml", f"epochs={epochs}", f"batch={BATCH}",
            f"seed={seed}", "pretrained=False", "val=False", "name=run", *common,
        ]  # fmt: skip
        _, cpu_s = run_timed(train, folder)
        find = [str(program), "detect", "val", f"model={folder / 'run' / 'weights' / 'last.pt'}", "save_json=True",
                "name=found", *common]  # fmt: skip
        said = re.findall(r"([\d,]+) parameters.*?([\d.]+) GFLOPs", run_timed(find, folder)[0])
        size = int(said[-1][0].replace(",", "")), float(said[-1][1])
        metrics = score_of(json.loads((folder / "found" / "predictions.json").read_text()), data)
        return Trained(cpu_s, metrics.ap, metrics.ap50, *size, (train, find))

    return contestant


def score_of(found: list[dict[str, Any]], data: Data) -> Metrics:
    """Of predictions as COCO's result files have them; an image's name is that of its file, and classes begin at 1."""
    index, rows = data.index, data.index.image_indices("test")
    boxes = np.array([one["bbox"] for one in found], np.float32).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    detections = Detections(
        image_index=np.array([data.rows[str(one["image_id"])] for one in found], np.int64),
        boxes=boxes,
        score=np.array([one["score"] for one in found], np.float32),
        label=np.array([one["category_id"] - 1 for one in found], np.int64),
        image_indices=np.asarray(rows, np.int64),
    )
    return compute_metrics(ground_truth(index, rows), detections)


def contestants(asked: argparse.Namespace) -> dict[str, Contestant]:
    weights = str(asked.shared / "weights" / "mobilenet_v2_imagenet.pth")
    precision = ["--precision", "fp32"]
    made = {
        OURS: of_stoker(OURS, *precision),
        BF16: of_stoker(OURS, "--precision", "bf16"),
        TUNED: of_stoker("ember_mobilenet_v2", "--weights", weights, *precision),
        "ember_s": of_stoker("ember_s", *precision),
        "retinanet_mobilenet_v2_fpn, from ImageNet": of_stoker(
            "retinanet_mobilenet_v2_fpn", "--weights", weights, *precision
        ),
        "retinanet_tiny_fpn": of_stoker("retinanet_tiny_fpn", *precision),
    }
    if asked.ultralytics is not None:
        made |= {peer: of_ultralytics(asked.ultralytics, peer) for peer in PEERS}
    return {name: train for name, train in made.items() if {name, name.split(", from")[0]} & set(asked.only)}


def epochs_for(budget: int, costs: list[tuple[int, float]]) -> int:
    """As many as fit with some to spare; costs: epochs and CPU-seconds of two short trainings."""
    few, few_s = costs[0]
    return max(1, math.floor((SPARED * budget - few_s) / each_epoch(costs) + few))


def each_epoch(costs: list[tuple[int, float]]) -> float:
    """CPU-seconds of one more epoch."""
    (few, few_s), (more, more_s) = costs
    return (more_s - few_s) / (more - few)


def ms_per_image(price: dict[str, Any], trained: list[dict[str, Any]]) -> float:
    """CPU milliseconds per image: the median of the trainings of a contestant on a data set."""
    mine = [row for row in trained if all(row[name] == price[name] for name in ("contestant", "data"))]
    short = price["costs"][0]
    epochs = [each_epoch([short, (row["epochs"], row["CPU s"])]) for row in mine if row["epochs"] > short[0]]
    epoch_s = statistics.median(epochs or [each_epoch(price["costs"])])
    return epoch_s / int(price["pictures"]) * 1000


class Bench:
    def __init__(self, asked: argparse.Namespace, folder: Path) -> None:
        self.asked, self.folder = asked, folder
        self.made: dict[str, Data] = {}
        self.rows = earlier(asked.json)
        self.count = 0

    def data(self, name: str) -> Data:
        if name not in self.made:
            path = dict(item.partition("=")[::2] for item in self.asked.data)[name]
            source = Path(path) if path else None
            most, score = self.asked.most, self.asked.score
            self.made[name] = make_data(name, self.asked.shared, self.folder, source=source, most=most, score=score)
        return self.made[name]

    def train(self, train: Contestant, data: str, epochs: int, seed: int) -> Trained:
        self.count += 1
        place = self.folder / f"training-{self.count}"
        place.mkdir()
        return train(self.data(data), epochs, seed, place)

    def row(self, key: Training, train: Contestant) -> dict[str, Any]:
        """Trains, unless it is there."""
        known = self.rows.get(key)
        if known is not None:
            return known
        price = Training(key.contestant, key.data, 0, 0)
        if price not in self.rows:
            short = [self.train(train, key.data, epochs, 0) for epochs in SHORT]
            costs = [(epochs, done.cpu_s) for epochs, done in zip(SHORT, short, strict=True)]
            self.rows[price] = {"what": "price", **shown(price), "costs": costs,
                                "pictures": len(self.data(key.data).index.image_indices("train")),
                                "parameters": short[0].parameters, "GFLOP at 640": short[0].gflop}  # fmt: skip
        costs = self.rows[price]["costs"]
        while True:
            epochs = epochs_for(key.budget, costs)
            done = self.train(train, key.data, epochs, key.seed)
            if epochs > SHORT[0]:  # each training says it better than the short ones
                costs = self.rows[price]["costs"] = [costs[0], (epochs, done.cpu_s)]
            if done.cpu_s <= LIMIT * key.budget or key.contestant in PEERS or epochs <= SHORT[0]:
                break
            print(f"{key}: {epochs} epochs took {done.cpu_s:.0f} s", file=sys.stderr, flush=True)
        commands = "; ".join(" ".join(command) for command in done.commands)
        for path, name in ((self.folder, "TEMPORARY"), (self.asked.shared, SHOWN), (Path(sys.executable), "python")):
            commands = commands.replace(str(path), name)
        if self.asked.ultralytics is not None:
            commands = commands.replace(str(self.asked.ultralytics), "yolo")
        found = {"what": "training", **shown(key), "epochs": epochs, "CPU s": done.cpu_s, "AP": done.ap,
                 "AP50": done.ap50, "command": commands}  # fmt: skip
        self.rows[key] = found
        print({name: value for name, value in found.items() if name != "command"}, file=sys.stderr, flush=True)
        return found


def shown(key: Training) -> dict[str, Any]:
    return {"contestant": key.contestant, "data": key.data, "budget": key.budget, "seed": key.seed}


def earlier(path: Path | None) -> dict[Training, dict[str, Any]]:
    """The rows of an earlier results file."""
    if path is None or not path.exists():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {
        Training(row["contestant"], row["data"], row["budget"], row["seed"]): row
        for row in rows if row["what"] in ("training", "price")
    }  # fmt: skip


def main_run(asked: argparse.Namespace) -> Report:
    if asked.quick:
        asked.data, asked.budgets, asked.seeds, asked.only = ["bccd"], [100], 1, [OURS, *PEERS]
    report = Report(f"AP on {asked.score} for the same CPU-seconds of training, mean of the seeds", asked.seeds)
    report.packages = ("stoker", "torch", "torchvision")
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as folder:
        bench = Bench(asked, Path(folder))
        keys = [
            (Training(name, data.partition("=")[0], budget, seed), train)
            for data in asked.data for budget in asked.budgets for seed in range(asked.seeds)
            for name, train in contestants(asked).items()
        ]  # fmt: skip
        for key, train in keys:
            bench.row(key, train)
            conclude(report, list(bench.rows.values()))
            report.write(asked.json)
    return report


def conclude(report: Report, rows: list[dict[str, Any]]) -> None:
    trained = [row for row in rows if row["what"] == "training"]
    groups: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for row in trained:
        groups.setdefault((row["data"], row["budget"], row["contestant"]), []).append(row)
    means: dict[tuple[str, int, str], dict[str, Any]] = {}
    for key, of_key in groups.items():
        means[key] = {
            "what": f"{key[2]} on {key[0]}, {key[1]} s: mean of {len(of_key)}",
            **{name: statistics.fmean(one[name] for one in of_key) for name in ("epochs", "CPU s", "AP", "AP50")},
            "AP from": min(one["AP"] for one in of_key), "to": max(one["AP"] for one in of_key),
        }  # fmt: skip
    report.rows = [*rows, *means.values()]
    report.bars = []
    for (data, budget, name), mean in means.items():
        if name != OURS:
            continue
        where = f"{data}, {budget} CPU-seconds"
        for number, goal in zip(("AP", "AP50"), GOALS.get((data, budget), ()), strict=False):
            report.bars.append(Bar.at_least(f"{number} of {OURS}, {where}", mean[number], goal))
        for peer, (lead, _) in PEERS.items():
            if (theirs := means.get((data, budget, peer))) is not None:
                for number in ("AP", "AP50"):
                    over = mean[number] - theirs[number]
                    report.bars.append(Bar.at_least(f"{number} of {OURS} less {peer}'s, {where}", over, lead))
        tuned = means.get((data, budget, TUNED))
        if tuned is not None:
            over = tuned["AP"] / mean["AP"]
            report.bars.append(Bar.at_least(f"AP fine-tuned over from scratch, {where}", over, 1.0))
    cost = {(row["data"], row["contestant"]): ms_per_image(row, trained) for row in rows if row["what"] == "price"}
    for (data, name), ms in cost.items():
        report.rows.append({"what": f"{name} on {data}: training", "ms per image": ms})
    for data, name in cost:
        for peer in PEERS if name == OURS else ():
            if (data, peer) in cost:
                text = f"CPU-seconds per image of training, {OURS} over {peer}, {data}"
                report.bars.append(Bar.at_most(text, cost[data, OURS] / cost[data, peer], PEERS[peer][1]))


def parser() -> argparse.ArgumentParser:
    made = options(__doc__)
    made.add_argument("--ultralytics", type=Path, metavar="YOLO", help="its program, in an environment of its own")
    made.add_argument("--only", nargs="+", metavar="NAME", default=[OURS, TUNED.split(",")[0], *PEERS],
                      help="contestants, also 'ember_n, bf16', ember_s, "
                           "retinanet_mobilenet_v2_fpn, retinanet_tiny_fpn")  # fmt: skip
    made.add_argument("--data", nargs="+", metavar="NAME[=PATH]", default=["bccd", "dice"],
                      help="folders of --shared, or others; what has no test split gets one")  # fmt: skip
    made.add_argument("--most", type=int, metavar="N", help="training images of a data set; the rest is left out")
    made.add_argument("--score", choices=("val", "test"), default="test", help="val to choose settings of a recipe")
    made.add_argument("--budgets", nargs="+", type=int, default=[675, 1300], help="CPU-seconds of a training")
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--shared", type=Path, default=Path(os.environ.get("STOKER_TEST_DATA", ROOT.parent / SHOWN[3:])),
                      help="folder of the data sets and weights; default STOKER_TEST_DATA")  # fmt: skip
    return made


if __name__ == "__main__":
    publish(main_run, parser())
