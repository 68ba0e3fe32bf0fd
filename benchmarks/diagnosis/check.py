"""Throughput of `stoker data check`: images decoded and checked, compared with the loader, and annotations alone.

Generates JPEGs of 640 × 480 and about 95 KB (COCO's usual size), and a JSON file like instances_train2017.json (118,287
images, 860,001 boxes, 400 MB, from `loading/index.py`). Every measurement is a fresh process, the loader and the
check in turn; the clock starts after the imports, both use all cores, and the files are in the page cache.
"""

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.loading import index
from benchmarks.processes import run_child, serve_child
from benchmarks.report import Bar, Report, options, publish, spread

NUM_JPEGS = 600
IMAGE_SIZE = (480, 640)
BATCH_SIZE = 16


def generate_jpegs(folder: Path, images: int) -> None:
    """Writes images/ and all.json: coarse colors with fine noise, which compress like photographs."""
    import cv2
    import numpy as np

    (folder / "images").mkdir()
    height, width = IMAGE_SIZE
    for i in range(images):
        rng = np.random.default_rng(i)
        coarse = cv2.resize(rng.integers(0, 256, (12, 16, 3), np.uint8), (width, height), interpolation=cv2.INTER_CUBIC)
        fine = rng.normal(0, 9, (height, width, 1))
        image = np.clip(coarse + fine, 0, 255).astype(np.uint8)
        cv2.imwrite(str(folder / "images" / f"{i:06d}.jpg"), image, [cv2.IMWRITE_JPEG_QUALITY, 88])
    entries = [{"id": i, "file_name": f"{i:06d}.jpg", "height": height, "width": width} for i in range(images)]
    boxes = [{"id": i, "image_id": i, "category_id": 1, "bbox": [9, 9, 90, 90]} for i in range(images)]
    content = {"images": entries, "annotations": boxes, "categories": [{"id": 1, "name": "thing"}]}
    (folder / "all.json").write_text(json.dumps(content))


def measure_loader(folder: Path) -> dict[str, Any]:
    import numpy as np

    from stoker.data.index import open_index
    from stoker.data.loading.loader import Loader, LoaderSpec, compute_max_boxes
    from stoker.hardware.cgroup import host_cores
    from stoker.hardware.device import select_device

    data = open_index(folder)
    image_indices = np.arange(len(data))
    spec = LoaderSpec(
        device=select_device("cpu"), batch_size=BATCH_SIZE, image_size=IMAGE_SIZE, resize="letterbox", seed=0,
        max_boxes=compute_max_boxes(data, image_indices), workers=host_cores(), train=False,
    )  # fmt: skip
    loader = Loader(data, image_indices, spec)
    start, cpu = time.perf_counter(), time.process_time()
    batches = sum(1 for _ in loader)
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    loader.close()
    if batches != -(-len(image_indices) // BATCH_SIZE) or loader.state_dict()["quarantined"]:
        raise RuntimeError("the loader did not load everything")
    return {"s": seconds, "per_s": len(image_indices) / seconds, "cpu_ms": 1e3 * cpu_s / len(image_indices)}


def measure_check(folder: Path) -> dict[str, Any]:
    from stoker.data.index import open_index
    from stoker.data.validation.check import check_image_files
    from stoker.data.validation.problems import ProblemCollector

    data, problems = open_index(folder), ProblemCollector()
    start, cpu = time.perf_counter(), time.process_time()
    usable = check_image_files(data, problems, workers=os.cpu_count() or 1, progress=lambda _done, _all: None)
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    if not usable.all() or problems.summarize():
        raise RuntimeError(f"the check finds {problems.summarize()} in valid images")
    return {"s": seconds, "per_s": len(usable) / seconds, "cpu_ms": 1e3 * cpu_s / len(usable)}


def measure_annotations(folder: Path) -> dict[str, Any]:
    from stoker.data.validation.check import check_dataset

    start = time.perf_counter()
    report = check_dataset(folder, decode_images=False)
    seconds = time.perf_counter() - start
    return {"s": seconds, "peak_mb": index.peak_mb(), "images": report.num_images, "boxes": report.num_boxes}


def run(quick: bool) -> Report:
    num_jpegs, n = (NUM_JPEGS // 4, 3) if quick else (NUM_JPEGS, 7)
    images, boxes, big_n = (
        (index.NUM_IMAGES // 10, index.NUM_BOXES // 10, 3) if quick else (index.NUM_IMAGES, index.NUM_BOXES, 3)
    )
    runs: dict[str, list[dict[str, Any]]] = {"loader": [], "check": [], "annotations": []}
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as temporary:
        small, big, cache = (Path(temporary) / name for name in ("jpegs", "coco", "cache"))
        small.mkdir()
        big.mkdir()
        run_child("jpegs", small, cache, num_jpegs)
        run_child("generate", big, cache, images, boxes)
        for number in range(n):
            for what in ("loader", "check") if number % 2 else ("check", "loader"):
                runs[what].append(run_child(what, small, cache))
        for _ in range(big_n):
            runs["annotations"].append(run_child("annotations", big, cache))
        size_kb = statistics.mean(path.stat().st_size for path in (small / "images").iterdir()) / 1e3
    if (runs["annotations"][0]["images"], runs["annotations"][0]["boxes"]) != (images, boxes):
        raise RuntimeError(f"the report differs from the generated data: {runs['annotations'][0]}")
    report = Report(
        f"stoker data check: {num_jpegs} JPEGs of {IMAGE_SIZE[1]} × {IMAGE_SIZE[0]}, {size_kb:.0f} KB;"
        f" annotations of {images:,} images, {boxes:,} boxes",
        n,
        ("stoker", "simplejpeg", "opencv-python-headless", "msgspec", "numpy"),
    )
    seconds = statistics.median(result["s"] for result in runs["annotations"])
    report.rows = [
        rates("the loader, at full size", runs["loader"]),
        rates("check, images", runs["check"]),
        {
            "what": f"check, annotations alone, n = {big_n}",
            "s": seconds,
            "peak MB": statistics.median(result["peak_mb"] for result in runs["annotations"]),
        },
    ]
    check_per_s, loader_per_s = (
        statistics.median(result["per_s"] for result in runs[what]) for what in ("check", "loader")
    )
    report.bars = [
        Bar.at_least("images checked per second / loaded per second", check_per_s / loader_per_s, 0.9),
        Bar.at_most("seconds for the annotations alone", seconds, 5.0),
    ]
    return report


def rates(what: str, results: list[dict[str, Any]]) -> dict[str, Any]:
    per_s = spread([result["per_s"] for result in results])
    return {
        "what": what,
        "images/s": per_s["median"],
        "min": per_s["min"],
        "max": per_s["max"],
        "CPU ms a image": statistics.median(result["cpu_ms"] for result in results),
    }


if __name__ == "__main__":
    serve_child(
        {
            "jpegs": generate_jpegs,
            "generate": index.generate,
            "loader": measure_loader,
            "check": measure_check,
            "annotations": measure_annotations,
        }
    )
    publish(lambda arguments: run(arguments.quick), options(__doc__))
