"""Throughput of the loader with the CPU and with the device decoding (--jpeg-decoder nvjpeg), and which is chosen.

Loads the images of loader.py into batches on the device, and does nothing with them. The two decoders take turns, each
with its own loader. The last row of each size is `device_decoder.measure_and_choose_decoder` for a step that takes no
time, with its reason. `--device cpu` tests the benchmark: the same code then runs on the CPU, and the numbers mean
nothing.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.loading.loader import KINDS, draw
from benchmarks.report import Report, options, publish
from stoker.data.index import Index, open_index
from stoker.data.loading.device_decoder import measure_and_choose_decoder, unavailable_reason
from stoker.data.loading.loader import Loader, LoaderSpec, compute_max_boxes
from stoker.hardware.device import Device
from stoker.hardware.selection import select_device

BATCH, IMAGE_SIZE = 32, (800, 800)
FIRST = 12
"""Batches that are not counted: more than there are buffers."""
DECODERS = ("cpu", "nvjpeg")


def run(arguments: argparse.Namespace) -> Report:
    device = select_device(arguments.device)
    if (why := unavailable_reason(device)) is not None:
        raise RuntimeError(f"nothing to measure: {why}")
    windows, batches, image_size = (2, 1, (64, 64)) if arguments.quick else (5, 20, IMAGE_SIZE)
    report = Report(f"Loading to {device.name}, batches of {BATCH}, {image_size[0]} × {image_size[1]}", windows)
    report.packages = ("torch", "torchcodec", "simplejpeg", "opencv-python-headless")
    for kind in KINDS[:1] if arguments.quick else KINDS:
        with tempfile.TemporaryDirectory() as folder:
            files = 4 if arguments.quick else kind.files
            draw(Path(folder), files, *kind.size, round(100 * kind.roll), 1)
            index = open_index(folder)
            results: dict[str, list[dict[str, float]]] = {name: [] for name in DECODERS}
            for _ in range(windows):
                for name in DECODERS:
                    with make(index, device, image_size, name) as loader:
                        results[name].append(window(loader, device, 1 if arguments.quick else FIRST, batches))
            for name in DECODERS:
                medians = {key: statistics.median(row[key] for row in results[name]) for key in results[name][0]}
                report.rows.append({"what": f"{kind.name}, {name}", **medians})
            rows = index.image_indices("train")
            decoder, reason = measure_and_choose_decoder(
                index,
                rows,
                device,
                image_size=image_size,
                resize="squash",
                measure_step_s=lambda: 1e-9,
            )
            report.rows.append({"what": f"{kind.name}, chosen", "jpeg_decoder": decoder, "reason": reason})
    return report


def make(index: Index, device: Device, image_size: tuple[int, int], decoder: Any) -> Loader:
    image_indices = index.image_indices("train")
    spec = LoaderSpec(
        device=device,
        batch_size=BATCH,
        image_size=image_size,
        resize="squash",
        max_boxes=compute_max_boxes(index, image_indices),
        seed=0,
        jpeg_decoder=decoder,
    )
    return Loader(index, image_indices, spec)


def window(loader: Loader, device: Device, first: int, batches: int) -> dict[str, float]:
    """Batches after the first ones: images per second, CPU time, utilization of the thread of the device decoder."""
    for _ in range(first):
        next(loader)
    device.synchronize()
    before, cpu_s, began_s = loader.stats(), time.process_time(), time.perf_counter()
    for _ in range(batches):
        next(loader)
    device.synchronize()
    duration_s, stats = time.perf_counter() - began_s, loader.stats()
    return {
        "img/s": batches * BATCH / duration_s,
        "CPU ms": 1e3 * (time.process_time() - cpu_s) / (batches * BATCH),
        "device thread busy": (stats.total.device_decode_s - before.total.device_decode_s) / duration_s,
    }


def parser() -> argparse.ArgumentParser:
    made = options(__doc__)
    made.add_argument("--device", help="cuda, cpu …; default: the accelerator that torch finds, else the cpu")
    return made


if __name__ == "__main__":
    publish(run, parser())
