"""Time and memory to build and to reopen the index of a COCO-size data set, compared with pycocotools.

Generates a JSON file like instances_train2017.json (118,287 images, 860,001 boxes with polygons, 400 MB) and as many
empty image files. Every measurement is a fresh process, the two tools in turn; the clock starts after the imports.
Peak memory is the process's largest resident set, which for the index includes the mapped JSON file.
"""

import random
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.processes import run_child, serve_child
from benchmarks.report import Bar, Report, options, publish, spread

NUM_IMAGES, NUM_BOXES = 118_287, 860_001
POLYGON_CORNERS = 18
"""Makes the file 400 MB."""
REOPENINGS = 20


def generate(folder: Path, images: int, boxes: int) -> None:
    """Writes annotations/instances_train2017.json and train2017/ with empty files."""
    rng = random.Random(2017)
    (folder / "annotations").mkdir()
    (folder / "train2017").mkdir()
    with (folder / "annotations" / "instances_train2017.json").open("w") as file:
        file.write('{"info": {"year": 2017}, "licenses": [], "images": [')
        for i in range(images):
            name = f"{i * 4 + 9:012d}.jpg"
            (folder / "train2017" / name).touch()
            file.write(
                f'{", " if i else ""}{{"license": 3, "file_name": "{name}", "coco_url": '
                f'"http://images.cocodataset.org/train2017/{name}", "height": 480, "width": 640, "date_captured": '
                f'"2013-11-14 11:18:45", "flickr_url": "http://farm9.staticflickr.com/8186/{i:010d}_z.jpg", '
                f'"id": {i * 4 + 9}}}'
            )
        file.write('], "annotations": [')
        for k in range(boxes):
            x, y = rng.random() * 400, rng.random() * 300
            width, height = 1 + rng.random() * 239, 1 + rng.random() * 179
            polygon = ", ".join(f"{rng.random() * 600:.2f}" for _ in range(2 * POLYGON_CORNERS))
            file.write(
                f'{", " if k else ""}{{"segmentation": [[{polygon}]], "area": {width * height * 0.6:.4f}, '
                f'"iscrowd": 0, "image_id": {rng.randrange(images) * 4 + 9}, '
                f'"bbox": [{x:.2f}, {y:.2f}, {width:.2f}, {height:.2f}], '
                f'"category_id": {rng.randrange(1, 81)}, "id": {k + 1}}}'
            )
        names = ", ".join(f'{{"supercategory": "thing", "id": {i}, "name": "class {i}"}}' for i in range(1, 81))
        file.write(f'], "categories": [{names}]}}')


def peak_mb() -> float:
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def measure_pycocotools(folder: Path) -> dict[str, Any]:
    from pycocotools.coco import COCO

    base, start = peak_mb(), time.perf_counter()
    COCO(str(folder / "annotations" / "instances_train2017.json"))
    return {"s": time.perf_counter() - start, "peak_mb": peak_mb(), "base_mb": base}


def measure_build(folder: Path) -> dict[str, Any]:
    from stoker.data.index import open_index

    base, start = peak_mb(), time.perf_counter()
    index = open_index(folder)
    seconds = time.perf_counter() - start
    return {"s": seconds, "peak_mb": peak_mb(), "base_mb": base, "images": len(index), "boxes": len(index.boxes)}


def measure_reopen(folder: Path) -> dict[str, Any]:
    from stoker.data.index import missing_images, open_index

    base, times = peak_mb(), []
    for _ in range(REOPENINGS):
        start = time.perf_counter()
        index = open_index(folder)
        times.append(time.perf_counter() - start)
    opened_mb, start = peak_mb(), time.perf_counter()
    missing = missing_images(index)
    check = {"s": time.perf_counter() - start, "peak_mb": peak_mb(), "base_mb": opened_mb, "missing": len(missing)}
    again = statistics.median(times[1:])
    return {"first_s": times[0], "again_s": again, "peak_mb": opened_mb, "base_mb": base, "check": check}


def run(quick: bool) -> Report:
    images, boxes, n = (NUM_IMAGES // 10, NUM_BOXES // 10, 3) if quick else (NUM_IMAGES, NUM_BOXES, 5)
    runs: dict[str, list[dict[str, Any]]] = {"build": [], "pycocotools": [], "reopen": []}
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as temporary:
        folder = Path(temporary) / "coco"
        folder.mkdir()
        run_child("generate", folder, folder, images, boxes)
        size_mb = (folder / "annotations" / "instances_train2017.json").stat().st_size / 1e6
        for number in range(n):
            cache = Path(temporary) / f"cache-{number}"
            for what, results in runs.items():
                results.append(run_child(what, folder, cache))
    built = runs["build"][0]
    if (built["images"], built["boxes"]) != (images, boxes) or runs["reopen"][0]["check"]["missing"]:
        raise RuntimeError(f"the index differs from the generated data: {built}, {runs['reopen'][0]['check']}")
    report = Report(
        f"Index of a COCO-size data set: {images:,} images, {boxes:,} boxes, {size_mb:.0f} MB of JSON",
        n,
        ("stoker", "pycocotools", "msgspec", "numpy", "pyarrow"),
    )
    checks = [result["check"] for result in runs["reopen"]]
    first = [{**result, "s": result["first_s"]} for result in runs["reopen"]]
    again = [{**result, "s": result["again_s"]} for result in runs["reopen"]]
    report.rows = [
        row("pycocotools COCO(file)", runs["pycocotools"]),
        row("stoker open_index, built", runs["build"]),
        row("stoker open_index, reopened", first),
        row(f"stoker open_index, median of {REOPENINGS - 1} more", again),
        row("stoker missing_images", checks),
    ]
    peer_s, build_s, reopen_s = (
        statistics.median(r["s"] for r in rs) for rs in (runs["pycocotools"], runs["build"], first)
    )
    peer_mb, build_mb = (statistics.median(r["peak_mb"] for r in runs[what]) for what in ("pycocotools", "build"))
    report.bars = [
        Bar.at_most("time to build / pycocotools' time", build_s / peer_s, 1 / 5),
        Bar.at_most("peak memory of building / pycocotools' peak", build_mb / peer_mb, 1 / 2),
        Bar.at_most("seconds to reopen, after the imports", reopen_s, 0.050),
    ]
    return report


def row(what: str, results: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = spread([result["s"] for result in results])
    return {
        "what": what,
        "s": seconds["median"],
        "s min": seconds["min"],
        "s max": seconds["max"],
        "peak MB": statistics.median(result["peak_mb"] for result in results),
        "above imports MB": statistics.median(result["peak_mb"] - result["base_mb"] for result in results),
    }


if __name__ == "__main__":
    serve_child(
        {"generate": generate, "build": measure_build, "pycocotools": measure_pycocotools, "reopen": measure_reopen}
    )
    publish(lambda arguments: run(arguments.quick), options(__doc__))
