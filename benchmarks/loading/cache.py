"""What the cache of decoded images saves: CPU time per image without it, while it fills and when it is full.

Generates JPEGs of 640 × 480 (about 110 KB) and of 4,000 × 3,000 (about 1.6 MB), and loads them with the usual crops at
image sizes of 800 × 800 and 320 × 320: without a cache; the first epoch with one, which decodes and writes; later
epochs, which read it. Each file size and image size has its own process with two workers, in which the modes take
turns; all files are in the page cache. The bars compare a hit with decoding, and show that the cache pays within the
three epochs from which on it is chosen.
"""

import json
import resource
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.processes import run_child, serve_child
from benchmarks.report import Bar, Report, options, publish, spread

SOURCES = ((480, 640, 88), (3000, 4000, 80))
"""Height, width, JPEG quality."""
IMAGE_SIZES = (800, 320)
COUNTS, QUICK_COUNTS = (240, 32), (48, 8)
WORKERS, BUFFER_IMAGES = 2, 16
RECIPE: dict[str, Any] = {"scale_jitter_prob": 0.5, "scale_range": (0.7, 1.5)}
MODES = ("without", "first epoch", "later epochs")


def draw(folder: Path, source: int, count: int) -> None:
    """Writes images/ and all.json: coarse colors with fine noise, which compress like photographs."""
    import cv2
    import numpy as np

    height, width, quality = SOURCES[source]
    (folder / "images").mkdir(parents=True)
    for n in range(count):
        rng = np.random.default_rng(n)
        coarse = cv2.resize(rng.integers(0, 256, (12, 16, 3), np.uint8), (width, height), interpolation=cv2.INTER_CUBIC)
        fine = cv2.resize(rng.normal(0, 9, (min(height, 1500), min(width, 2000), 1)), (width, height))[..., None]
        pixels = np.clip(coarse + fine, 0, 255).astype(np.uint8)
        cv2.imwrite(str(folder / "images" / f"{n:06d}.jpg"), pixels, [cv2.IMWRITE_JPEG_QUALITY, quality])
    images = [{"id": n, "file_name": f"{n:06d}.jpg", "height": height, "width": width} for n in range(count)]
    boxes = [{"id": n, "image_id": n, "category_id": 1, "bbox": [9, 9, 90, 90]} for n in range(count)]
    content = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "thing"}]}
    (folder / "all.json").write_text(json.dumps(content))


def measure(folder: Path, side: int, turns: int) -> dict[str, Any]:
    """Epochs of the work of the loader's workers, the modes in turn: for each, CPU ms per image and images/s."""
    import numpy as np

    from stoker.data.images.pixel_cache import CachedImageSpec, PixelCache, cache_file_path, open_cache
    from stoker.data.index import open_index
    from stoker.data.loading.buffers import HostBatchBuffer
    from stoker.data.loading.samples import BatchTask, LoaderSpec, SampleStream, compute_max_boxes
    from stoker.data.loading.stats import Counters
    from stoker.hardware.cpu import configure_malloc
    from stoker.hardware.selection import select_device

    configure_malloc()
    index = open_index(folder)
    image_indices = np.arange(len(index))
    cached_spec = CachedImageSpec.for_augmentation((side, side), "letterbox", **RECIPE)
    max_boxes = compute_max_boxes(index, image_indices)
    device = select_device("cpu")
    spec = LoaderSpec(
        device=device,
        batch_size=BUFFER_IMAGES,
        image_size=(side, side),
        resize="letterbox",
        max_boxes=max_boxes,
        seed=0,
        **RECIPE,
    )
    buffers = [HostBatchBuffer(device, BUFFER_IMAGES, (side, side), max_boxes) for _ in range(WORKERS)]
    messages = list[str]()

    def epoch(cache: PixelCache | None) -> tuple[float, float, int]:
        samples = SampleStream(index, image_indices, spec, cache)
        counters = [Counters() for _ in range(WORKERS)]

        def work(worker: int) -> None:
            buffer = buffers[worker]
            for start in range(worker * BUFFER_IMAGES, len(image_indices), WORKERS * BUFFER_IMAGES):
                count = min(BUFFER_IMAGES, len(image_indices) - start)
                task = BatchTask(start, start, buffer, count)
                task.plans = samples.plan(start, count)
                for k in range(count):
                    list(samples.load(task, k, counters[worker]))
                samples.annotate(task, range(count))

        start_s, start_cpu_s = time.perf_counter(), _cpu_s()
        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(work, range(WORKERS)))
        duration_s, cpu_s = time.perf_counter() - start_s, _cpu_s() - start_cpu_s
        return (
            1e3 * cpu_s / len(image_indices),
            len(image_indices) / duration_s,
            sum(one.cache_hits for one in counters),
        )

    def opened() -> PixelCache | None:
        return open_cache("disk", index, image_indices, cached_spec, lambda _, text: messages.append(text))

    epoch(None)  # warm-up: the process allocates its memory
    found: dict[str, list[tuple[float, float, int]]] = {mode: [] for mode in MODES}
    for turn in range(turns):
        if turn % 2:
            found["without"].append(epoch(None))
        cache_file_path(index, cached_spec).unlink(missing_ok=True)
        found["first epoch"].append(epoch(opened()))
        while epoch(cache := opened())[2] < len(image_indices):  # some images were skipped after a slow write
            pass
        found["later epochs"].append(epoch(cache))
        if not turn % 2:
            found["without"].append(epoch(None))
    if messages or any(hits for mode in MODES[:2] for _, _, hits in found[mode]):
        raise RuntimeError(f"the cache was not as it should be: {found}, {messages}")
    return found | {"kept_mb": cache_file_path(index, cached_spec).stat().st_blocks * 512 / 1e6 / len(image_indices)}


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def run(quick: bool) -> Report:
    n, counts = (3, QUICK_COUNTS) if quick else (5, COUNTS)
    report = Report(
        f"cache of decoded images: crops of the usual recipe, letterbox, {WORKERS} workers; CPU time per image",
        n,
        ("stoker", "simplejpeg", "opencv-python-headless", "numpy", "google-crc32c"),
    )
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as temporary:
        for source, (height, width, _) in enumerate(SOURCES):
            folder, cache = Path(temporary) / str(source), Path(temporary) / "cache"
            run_child("draw", folder, cache, source, counts[source])
            size_kb = statistics.mean(path.stat().st_size for path in (folder / "images").iterdir()) / 1e3
            for side in IMAGE_SIZES:
                found = run_child("measure", folder, cache, side, n)
                medians = {mode: statistics.median(ms for ms, _, _ in found[mode]) for mode in MODES}
                for mode in MODES:
                    cpu_ms = spread([ms for ms, _, _ in found[mode]])
                    report.rows.append({
                        "what": f"{width:,} × {height:,}, {size_kb:,.0f} KB, at {side} × {side}: {mode}",
                        "CPU ms per image": cpu_ms["median"],
                        "min": cpu_ms["min"],
                        "max": cpu_ms["max"],
                        "images/s": statistics.median(per_s for _, per_s, _ in found[mode]),
                        "kept MB per image": None if mode == "without" else found["kept_mb"],
                    })  # fmt: skip
                of = f"{width:,} × {height:,} at {side}"
                without, first, later = (medians[mode] for mode in MODES)
                report.bars += [
                    Bar.at_most(f"{of}: later epochs / without", later / without, 0.7),
                    Bar.at_most(f"{of}: the first three epochs / without", (first + 2 * later) / (3 * without), 0.9),
                ]
    return report


if __name__ == "__main__":
    serve_child({"draw": draw, "measure": measure})
    publish(lambda arguments: run(arguments.quick), options(__doc__))
