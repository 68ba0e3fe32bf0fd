"""GIL-held CPU time per sample of the loader, and how many samples per second the GIL allows.

Generated images of 640 × 480 with 7 boxes each (COCO's mean), letterboxed to 640 × 640 in batches of 32, as in training
with the default recipe, in training without crops, with 100 boxes each, and in evaluation.

- GIL-held: CPU time of the whole process (workers and the thread that asks for batches) minus the CPU time that its
  threads spent between releasing and taking the GIL, per sample. gil_probe.c, compiled by `cc` and preloaded, sits
  before the two functions of the interpreter through which C code does both. Time in which a thread waits or is
  preempted is not CPU time. What taking and releasing the GIL costs counts as held, and half of reading the clock
  (0.2 µs per release), so it is an upper bound. Where the interpreter was linked so that its own calls cannot be
  intercepted ("own releases: 0 of 100"), reading files counts as held, too. Decoding and other processes empty the
  processor's caches, and Python takes several times as long after that: measure on a quiet machine. "released" (mostly
  decoding) grows on a busy one as well.
- threads and processes: two workers of this process, and two worker processes with one worker each, measured in turns
  in one process. GIL-held is that of the training process; "CPU ms" is that of all processes together. A bar of
  processes compares it with threads.
- limit: samples per second of 16 workers where decoding, resizing and padding are replaced by a sleep of 2 ms, which
  needs no core and no GIL: what is left takes turns. The maximum of all passes, because other processes lower it. It
  includes what switching threads costs; the caches stay warm, so it is an upper bound for a real loader.
"""

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.processes import run_child, serve_child
from benchmarks.report import Bar, Report, options, publish, spread

PROBE_SOURCE = Path(__file__).with_name("gil_probe.c")
BATCH, SIDE, HEIGHT, WIDTH = 32, 640, 480, 640
GOAL_MS, GOAL_PER_S = 0.2, 2000
GOAL_CPU_RATIO = 1.1
NUM_PROCESSES = 2
LIMIT_WORKERS, SLEEP_S = 16, 0.002
RECIPE = {"scale_jitter_prob": 0.5, "scale_range": (0.7, 1.5), "min_object_covered": 0.5}
"""Of `training/defaults/derive.py`."""
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "training, default recipe": (7, RECIPE),
    "training, no crops": (7, {}),
    "training, default recipe, 100 boxes": (100, RECIPE),
    "evaluation": (7, {"train": False}),
}
"""Boxes per image and what differs from a plain `LoaderSpec`."""


def draw(folder: Path, files: int) -> None:
    """Writes JPEG files, and for each number of boxes a COCO file in a folder of its own."""
    import cv2
    import numpy as np

    from benchmarks.loading.loader import natural

    rng = np.random.default_rng(0)
    (folder / "images").mkdir()
    for number in range(files):
        pixels = natural(rng, HEIGHT, WIDTH, 0.42)
        cv2.imwrite(str(folder / "images" / f"{number:06d}.jpg"), pixels, [cv2.IMWRITE_JPEG_QUALITY, 91])
    for count in sorted({count for count, _ in CASES.values()}):
        corners = np.sort(rng.uniform((0, 0), (WIDTH, HEIGHT), (files * count, 2, 2)), axis=1)
        boxes = [
            {"id": n, "image_id": n // count, "category_id": 1, "bbox": [x0, y0, x1 - x0 + 4, y1 - y0 + 4]}
            for n, ((x0, y0), (x1, y1)) in enumerate(corners.tolist())
        ]
        images = [{"id": n, "file_name": f"{n:06d}.jpg", "height": HEIGHT, "width": WIDTH} for n in range(files)]
        (folder / str(count)).mkdir()
        (folder / str(count) / "images").symlink_to(folder / "images")
        content = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "thing"}]}
        (folder / str(count) / "all.json").write_text(json.dumps(content))


@contextlib.contextmanager
def loader_of(folder: Path, case: str, workers: int, processes: Any = None) -> Iterator[Any]:
    import numpy as np

    from stoker.data.index import open_index
    from stoker.data.loading.loader import Loader, LoaderSpec, compute_max_boxes
    from stoker.hardware.cpu import configure_malloc
    from stoker.hardware.selection import select_device

    configure_malloc()  # as the start of a run does
    count, changes = CASES[case]
    index = open_index(folder / str(count))
    image_indices = np.arange(len(index))
    max_boxes = compute_max_boxes(index, image_indices)
    common = {"device": select_device("cpu"), "batch_size": BATCH, "image_size": (SIDE, SIDE), "resize": "letterbox"}
    spec = LoaderSpec(**common, max_boxes=max_boxes, seed=0, workers=workers, prefetch_depth=3, **changes)
    with Loader(index, image_indices, spec, processes=processes) as loader:
        yield loader
        if loader.state_dict()["quarantined"]:
            raise RuntimeError("the loader left images out")


def next_batch(loader: Any) -> None:
    """A batch; an evaluation begins again after its last."""
    if next(loader, None) is None:
        next(iter(loader))


def wait_until_full(loader: Any) -> float:
    """Waits until the loader has nothing to do, so that it does not disturb the measurement of another. Returns the
    CPU-seconds that this took."""
    start_s = time.thread_time()
    while loader.stats().loading:
        time.sleep(0.05)
    return time.thread_time() - start_s


def measure_held(folder: Path, batches: int, passes: int) -> dict[str, Any]:
    """For each case, for threads and for processes: ms per sample with and without the GIL, releases per sample, and
    CPU ms of all processes per sample, of each pass."""
    from stoker.data.loading.processes import WorkerProcesses
    from stoker.hardware.selection import select_device

    probe = ctypes.CDLL(os.environ["LD_PRELOAD"])
    probe.gil_released_ns.restype = probe.gil_releases.restype = ctypes.c_int64
    before = probe.gil_releases()
    for _ in range(100):
        os.stat(folder)
    result: dict[str, Any] = {"own releases": min(100, probe.gil_releases() - before), "cases": {}}

    def measure(loader: Any) -> list[float]:
        # From full buffers to full buffers: as many batches are loaded as are handed out.
        stats, cpu_s = loader.stats(), time.process_time()
        released_ns, releases = probe.gil_released_ns(), probe.gil_releases()
        for _ in range(batches):
            next_batch(loader)
        polling_s = wait_until_full(loader)
        released_ns, releases = probe.gil_released_ns() - released_ns, probe.gil_releases() - releases
        cpu_s, after = time.process_time() - cpu_s - polling_s, loader.stats()
        images = after.total.num_images - stats.total.num_images
        all_cpu_s, released_s = cpu_s + after.processes_cpu_s - stats.processes_cpu_s, released_ns / 1e9
        per_image = cpu_s - released_s, released_s, releases / 1e3, all_cpu_s
        return [1e3 * value / images for value in per_image]

    processes = WorkerProcesses(NUM_PROCESSES, select_device("cpu"))
    with contextlib.closing(processes):
        for case in CASES:
            runs = result["cases"][case] = {"threads": [], "processes": []}
            with loader_of(folder, case, 2) as threaded, loader_of(folder, case, 2, processes) as spread_out:
                for loader in (threaded, spread_out):
                    for _ in range(3):
                        next_batch(loader)
                for _ in range(passes):
                    for name, loader in (("threads", threaded), ("processes", spread_out)):
                        wait_until_full(threaded)
                        wait_until_full(spread_out)
                        runs[name].append(measure(loader))
    return result


def measure_limit(folder: Path, batches: int, passes: int) -> dict[str, Any]:
    """For each case, samples per second of each pass where only what needs the GIL needs a core."""
    import numpy as np

    from stoker.data.images import decode
    from stoker.data.loading.buffers import HostBatchBuffer

    def decode_nothing(*_: Any) -> Any:
        time.sleep(SLEEP_S)
        return decoded

    decoded = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    decode._decode_jpeg = decode_nothing
    decode._decode_jpeg_in_place = lambda *_: decode_nothing() is decoded
    decode.resize_into = lambda *_: None
    HostBatchBuffer.pad = lambda *_: None  # type: ignore[method-assign]
    result: dict[str, list[float]] = {}
    for case in CASES:
        with loader_of(folder, case, LIMIT_WORKERS) as loader:
            for _ in range(3):
                next_batch(loader)
            rates = result[case] = []
            for _ in range(passes):
                images, start_s = loader.stats().total.num_images, time.perf_counter()
                for _ in range(batches):
                    next_batch(loader)
                rates.append((loader.stats().total.num_images - images) / (time.perf_counter() - start_s))
    return result


def compile_probe(folder: Path) -> tuple[Path | None, str]:
    """The probe, or None and the reason why there is none."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        return None, "install a C compiler (cc); Linux only"
    library = folder / "gil_probe.so"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", PROBE_SOURCE, "-o", library, "-ldl"], check=True)
    return library, ""


def run(arguments: argparse.Namespace) -> Report:
    batches, passes = (4, 2) if arguments.quick else (16, 5)
    report = Report(
        f"GIL: loading {WIDTH} × {HEIGHT} JPEG files, letterboxed to {SIDE} × {SIDE}, batches of {BATCH}",
        passes,
        ("stoker", "simplejpeg", "opencv-python-headless", "numpy", "torch"),
    )
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as temporary:
        folder, cache = Path(temporary) / "drawn", Path(temporary) / "cache"
        folder.mkdir()
        run_child("draw", folder, cache, 2 * BATCH if arguments.quick else 8 * BATCH)
        limits = run_child("limit", folder, cache, batches, passes)
        probe, reason = compile_probe(Path(temporary))
        held = None
        if probe is not None:
            os.environ["LD_PRELOAD"] = str(probe)
            held = run_child("held", folder, cache, batches, passes)
            del os.environ["LD_PRELOAD"]
    for case in CASES:
        medians: dict[str, float] = {}
        for mode in ("threads", "processes") if held is not None else ():
            held_ms, released_ms, releases, cpu_ms = (
                list(column) for column in zip(*held["cases"][case][mode], strict=True)
            )
            ms, medians[mode] = spread(held_ms), spread(cpu_ms)["median"]
            row: dict[str, Any] = {"what": f"{case}, {mode}", "GIL-held ms": ms["median"], "min": ms["min"]}
            row |= {"max": ms["max"], "released ms": spread(released_ms)["median"]}
            row |= {"releases": spread(releases)["median"], "CPU ms": medians[mode]}
            report.rows.append(row)
            if mode == "processes":
                report.bars.append(Bar.at_most(f"{case}, processes: GIL-held ms per sample", ms["median"], GOAL_MS))
                ratio = medians["processes"] / medians["threads"]
                report.bars.append(Bar.at_most(f"{case}: CPU-seconds, processes / threads", ratio, GOAL_CPU_RATIO))
        report.rows.append({"what": f"{case}, threads that decode nothing", "limit img/s": max(limits[case])})
        report.bars.append(
            Bar.at_least(f"{case}: samples per second that the GIL allows", max(limits[case]), GOAL_PER_S)
        )
    if held is None:
        report.rows.append({"what": "GIL-held ms", "n/a": reason})
    else:
        report.rows.append({"what": f"own releases of the interpreter that were seen: {held['own releases']} of 100"})
    return report


if __name__ == "__main__":
    serve_child({"draw": draw, "held": measure_held, "limit": measure_limit})
    publish(run, options(__doc__))
