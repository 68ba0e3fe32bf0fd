"""How long COCO's numbers take at the size of COCO's validation set, beside pycocotools and hotcoco.

5,000 images, 36,781 ground truth boxes of 80 classes and all three sizes, 1 % of them crowd regions, and 100 detections
a image, all drawn from a seed: most detections lie near ground truth boxes with their class, scores fall with the
distance. Every measurement is a fresh process, the tools in turn; the clock starts after the imports. "Matching and
accumulation" is what comes after the boxes are in memory, in the form that each tool wants: columns for stoker, dicts
and indices for the others. "From files" begins with COCO JSON of the ground truth boxes and of the detections. All
twelve numbers must agree within 1e-9.
"""

import contextlib
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.loading.index import peak_mb
from benchmarks.processes import run_child, serve_child
from benchmarks.report import Bar, Report, options, publish, spread

PICTURES, BOXES, CLASSES, DETECTIONS = 5_000, 36_781, 80, 100
HEIGHT, WIDTH = 480, 640
Measured = tuple[dict[str, np.ndarray], dict[str, np.ndarray]]


def draw(images: int, boxes: int) -> Measured:
    """Columns of the ground truth boxes and the detections. Corners are sixteenths of a pixel: the same in float32 and
    JSON."""
    rng = np.random.default_rng(2017)
    share = 1 / np.arange(1, CLASSES + 1) ** 0.8  # a third of the boxes are of the three most frequent classes
    shown = rng.choice(CLASSES, (images, 3), p=share / share.sum())
    limit = np.array([WIDTH, HEIGHT])

    def anywhere(count: int) -> np.ndarray:
        side = np.exp(rng.normal(np.log(42), 0.9, (count, 1)) + rng.normal(0, 0.35, (count, 2)))
        side = np.clip(side, 4, 0.95 * limit)
        corner = rng.uniform(0, 1, (count, 2)) * (limit - side)
        return np.concatenate([corner, corner + side], axis=1)

    row = np.sort(rng.integers(0, images, boxes))
    label = shown[row, rng.integers(0, 3, boxes)]
    true = _sixteenths(anywhere(boxes))
    area = np.prod(true[:, 2:] - true[:, :2], axis=1) * rng.uniform(0.4, 1, boxes)  # of the object in its box
    gt = {"image_index": row, "boxes": true, "label": label, "crowd": rng.random(boxes) < 0.012, "area": area}

    count = np.bincount(row, minlength=images)
    first = np.cumsum(count) - count
    of = np.repeat(np.arange(images), DETECTIONS)
    near = (rng.random(len(of)) < 0.6) & (count[of] > 0)
    box = np.where(near, first[of] + (rng.random(len(of)) * count[of]).astype(int), 0)
    distance = rng.normal(0, 1, (len(of), 4)) * np.exp(rng.normal(np.log(0.1), 0.7, (len(of), 1)))
    moved = true[box] + distance * np.tile(true[box, 2:] - true[box, :2], 2)
    found = np.where(near[:, None], moved, anywhere(len(of)))
    found[:, 2:] = np.maximum(found[:, 2:], found[:, :2] + 1)
    guess = np.where(
        rng.random(len(of)) < 0.8, shown[of, rng.integers(0, 3, len(of))], rng.integers(0, CLASSES, len(of))
    )
    good = np.exp(-3 * np.abs(distance).mean(axis=1)) * rng.beta(3, 2, len(of))
    score = np.where(near, good, rng.beta(1, 6, len(of)))
    return gt, {
        "image_index": of,
        "boxes": _sixteenths(found),
        "label": np.where(near & (rng.random(len(of)) < 0.9), label[box], guess),
        "score": np.clip(score, 0.05, 1).astype(np.float32),
    }


def _sixteenths(boxes: np.ndarray) -> np.ndarray:
    return np.round(boxes * 16) / 16


def generate(folder: Path, images: int, boxes: int) -> None:
    """Writes arrays.npz, and data/ and found.json with the same as COCO JSON; the images are empty files."""
    gt, found = draw(images, boxes)
    columns = [(f"{name}_{key}", column) for name, of in (("true", gt), ("found", found)) for key, column in of.items()]
    np.savez(folder / "arrays.npz", images=np.arange(images), **dict(columns))
    names = [f"{n:012d}.jpg" for n in range(images)]
    (folder / "data" / "annotations").mkdir(parents=True)
    (folder / "data" / "val2017").mkdir()
    for name in names:
        (folder / "data" / "val2017" / name).touch()
    document = {
        "images": [{"id": n, "file_name": name, "height": HEIGHT, "width": WIDTH} for n, name in enumerate(names)],
        "annotations": [one | {"id": n + 1} for n, one in enumerate(as_dicts(gt))],
        "categories": [{"id": n, "name": f"class {n}"} for n in range(CLASSES)],
    }
    (folder / "data" / "annotations" / "instances_val2017.json").write_text(json.dumps(document))
    (folder / "found.json").write_text(json.dumps(as_dicts(found)))


def as_dicts(columns: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """COCO's annotations, or entries of its results, without ids."""
    boxes = columns["boxes"].copy()
    boxes[:, 2:] -= boxes[:, :2]
    values = {"image_id": columns["image_index"], "category_id": columns["label"], "bbox": boxes}
    values |= {key: columns[key] for key in ("score", "area") if key in columns}
    values |= {"iscrowd": columns["crowd"].astype(int)} if "crowd" in columns else {}
    lists = [value.tolist() for value in values.values()]
    return [dict(zip(values, entry, strict=True)) for entry in zip(*lists, strict=True)]


# What each tool does, in a process of its own.


class Clock:
    """Seconds and processor-seconds since it was made, and the peak of memory above that moment's."""

    def __init__(self) -> None:
        self.base, self.wall, self.cpu = peak_mb(), time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        took = time.perf_counter() - self.wall, time.process_time() - self.cpu
        return {"s": took[0], "cpu_s": took[1], "peak_mb": peak_mb() - self.base}


def measure_stoker(folder: Path) -> dict[str, Any]:
    from stoker.evaluation import coco

    gt, found = arrays(folder)
    clock = Clock()
    metrics = coco.compute_metrics(gt, found).metrics
    return {"arrays": clock.read(), "numbers": numbers(metrics)}


def measure_stoker_files(folder: Path) -> dict[str, Any]:
    import msgspec

    from stoker.data.index import open_index
    from stoker.evaluation.detections import Detections
    from stoker.evaluation.evaluate import compute_metrics, ground_truth

    class Entry(msgspec.Struct):
        image_id: int
        category_id: int
        bbox: tuple[float, float, float, float]
        score: float

    clock = Clock()
    index = open_index(folder / "data")
    rows = index.image_indices("val")
    entries = msgspec.json.decode((folder / "found.json").read_bytes(), type=list[Entry])
    boxes = np.array([one.bbox for one in entries])
    boxes[:, 2:] += boxes[:, :2]
    by_id = np.argsort(index.image_id[rows])
    place = np.searchsorted(index.image_id[rows][by_id], np.array([one.image_id for one in entries]))
    found = Detections(
        image_index=rows[by_id[place]],
        boxes=boxes.astype(np.float32),
        score=np.array([one.score for one in entries], np.float32),
        label=np.searchsorted(np.array(index.category_ids), np.array([one.category_id for one in entries])),
        image_indices=rows,
    )
    metrics = compute_metrics(ground_truth(index, rows), found)
    return {"files": clock.read(), "numbers": numbers(metrics)}


def measure_pycocotools(folder: Path) -> dict[str, Any]:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    return by_cocoeval(folder, COCO, lambda gt, found: COCOeval(gt, found, "bbox"))


def measure_hotcoco(folder: Path) -> dict[str, Any]:
    from hotcoco import COCO, COCOeval

    return by_cocoeval(folder, COCO, lambda gt, found: COCOeval(gt, found, "bbox"))


def by_cocoeval(folder: Path, coco: Callable[..., Any], evaluation: Callable[..., Any]) -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()):
        files = Clock()
        gt = coco(str(folder / "data" / "annotations" / "instances_val2017.json"))
        found = gt.loadRes(str(folder / "found.json"))
        in_memory = Clock()
        run = evaluation(gt, found)
        run.evaluate()
        run.accumulate()
        run.summarize()
        return {"arrays": in_memory.read(), "files": files.read(), "numbers": list(run.stats[:12])}


def arrays(folder: Path) -> Any:
    """GroundTruth and Detections."""
    from stoker.evaluation.detections import Detections, GroundTruth

    of = np.load(folder / "arrays.npz")
    names = tuple(f"class {n}" for n in range(CLASSES))
    true = {key: of[f"true_{key}"] for key in ("image_index", "label", "crowd", "area")}
    found = {key: of[f"found_{key}"] for key in ("image_index", "label", "score")}
    images = of["images"]
    return (
        GroundTruth(image_indices=images, boxes=of["true_boxes"].astype(np.float32), class_names=names, **true),
        Detections(image_indices=images, boxes=of["found_boxes"].astype(np.float32), **found),
    )


def numbers(metrics: Any) -> list[float]:
    from stoker_watch.runs.evaluation import COCO_SUMMARY

    values = [getattr(metrics, name) for name in COCO_SUMMARY]
    return [-1.0 if value is None else value for value in values]


# The report.


def run(quick: bool) -> Report:
    images, boxes = (PICTURES // 10, BOXES // 10) if quick else (PICTURES, BOXES)
    turns = {"stoker": 5, "stoker_files": 5, "pycocotools": 1 if quick else 3, "hotcoco": 5}
    runs: dict[str, list[dict[str, Any]]] = {what: [] for what in turns}
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as temporary:
        folder = Path(temporary)
        run_child("generate", folder, folder, images, boxes)
        for turn in range(max(turns.values())):
            for what, count in turns.items():
                if turn < count:
                    runs[what].append(run_child(what, folder, folder / f"cache-{turn}"))
    expected = runs["pycocotools"][0]["numbers"]
    for what in ("stoker", "stoker_files", "hotcoco"):
        off = max(abs(a - b) for a, b in zip(runs[what][0]["numbers"], expected, strict=True))
        if not off <= 1e-9:
            raise RuntimeError(f"{what} is off by {off:.3g}: {runs[what][0]['numbers']}, pycocotools {expected}")
    report = Report(
        f"COCO's numbers of {images:,} images, {boxes:,} boxes, {images * DETECTIONS:,} detections",
        turns["stoker"],
        ("stoker", "numpy", "msgspec", "pycocotools", "hotcoco"),
    )
    tables = {
        "matching and accumulation": {"stoker": "stoker", "pycocotools": "pycocotools", "hotcoco": "hotcoco"},
        "from files": {"stoker": "stoker_files", "pycocotools": "pycocotools", "hotcoco": "hotcoco"},
    }
    medians = {}
    for what, tools in tables.items():
        for tool, key in tools.items():
            of = [result["arrays" if what.startswith("matching") else "files"] for result in runs[key]]
            medians[what, tool] = statistics.median(one["s"] for one in of)
            report.rows.append(row(f"{what}, {tool}", of))
    report.bars = [
        Bar.at_most(f"{what} / pycocotools", medians[what, "stoker"] / medians[what, "pycocotools"], goal)
        for what, goal in (("matching and accumulation", 1 / 8), ("from files", 1 / 5))
    ]
    return report


def row(what: str, results: list[dict[str, float]]) -> dict[str, Any]:
    seconds = spread([result["s"] for result in results])
    return {
        "what": what,
        "n": len(results),
        "s": seconds["median"],
        "s min": seconds["min"],
        "s max": seconds["max"],
        "CPU s": statistics.median(result["cpu_s"] for result in results),
        "peak MB above": statistics.median(result["peak_mb"] for result in results),
    }


if __name__ == "__main__":
    serve_child(
        {
            "generate": generate,
            "stoker": measure_stoker,
            "stoker_files": measure_stoker_files,
            "pycocotools": measure_pycocotools,
            "hotcoco": measure_hotcoco,
        }
    )
    publish(lambda arguments: run(arguments.quick), options(__doc__))
