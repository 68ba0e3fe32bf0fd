"""What the loader gives with the host's cores decoding, and with the device (--jpeg-decoder nvjpeg), and what is chosen.

The pictures of loader.py, into batches on the device that nothing is done with. The two are measured in turn, each by a
loader of its own. The last row of each size is `decoder_choice.decide` for a step that takes no time: what the cores
and nvJPEG do, in its own words. `--device cpu` rehearses it: the same code then runs on the host, and its
numbers mean nothing.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from loader import KINDS, draw
from report import Report, options, publish

from stoker.data.images.decode_device import unavailable_reason
from stoker.data.index import Index, open_index
from stoker.data.loading.decoder_choice import measure_and_choose_decoder
from stoker.data.loading.loader import Loader, compute_max_boxes
from stoker.hardware.device import Device, select_device

BATCH, CANVAS = 32, (800, 800)
FIRST = 12
"""Batches that are not counted: more than the ring holds."""
DECODERS = ("host", "nvjpeg")


def run(arguments: argparse.Namespace) -> Report:
    device = select_device(arguments.device)
    if (why := unavailable_reason(device)) is not None:
        raise RuntimeError(f"nothing to measure: {why}")
    windows, batches, canvas = (2, 1, (64, 64)) if arguments.quick else (5, 20, CANVAS)
    report = Report(f"Loading to {device.name}, batches of {BATCH}, {canvas[0]} × {canvas[1]}", windows)
    report.packages = ("torch", "torchvision", "simplejpeg", "opencv-python-headless")
    for kind in KINDS[:1] if arguments.quick else KINDS:
        with tempfile.TemporaryDirectory() as folder:
            files = 4 if arguments.quick else kind.files
            draw(Path(folder), files, *kind.size, round(100 * kind.roll), 1)
            index = open_index(folder)
            found: dict[str, list[dict[str, float]]] = {name: [] for name in DECODERS}
            for _ in range(windows):
                for name in DECODERS:
                    with make(index, device, canvas, name) as loader:
                        found[name].append(window(loader, device, 1 if arguments.quick else FIRST, batches))
            for name in DECODERS:
                medians = {key: statistics.median(row[key] for row in found[name]) for key in found[name][0]}
                report.rows.append({"what": f"{kind.name}, {name}", **medians})
            rows = index.image_indices("train")
            decoder, reason = measure_and_choose_decoder(
                index, rows, device, image_size=canvas, resize="squash", batch_size=BATCH, measure_step_s=lambda: 1e-9
            )
            report.rows.append({"what": f"{kind.name}, chosen", "jpeg_decoder": decoder, "reason": reason})
    return report


def make(index: Index, device: Device, canvas: tuple[int, int], decoder: Any) -> Loader:
    rows = index.image_indices("train")
    return Loader(
        index, rows, device=device, batch_size=BATCH, image_size=canvas, resize="squash", max_boxes=compute_max_boxes(index, rows), seed=0,
        workers=0, jpeg_decoder=decoder,
    )  # fmt: skip


def window(loader: Loader, device: Device, first: int, batches: int) -> dict[str, float]:
    """Some batches after the first: pictures per second, processor time, how busy the thread of the device was."""
    for _ in range(first):
        next(loader)
    device.synchronize()
    before, cpu_s, began_s = loader.stats(), time.process_time(), time.perf_counter()
    for _ in range(batches):
        next(loader)
    device.synchronize()
    took_s, stats = time.perf_counter() - began_s, loader.stats()
    return {
        "img/s": batches * BATCH / took_s,
        "CPU ms": 1e3 * (time.process_time() - cpu_s) / (batches * BATCH),
        "thread of the device, share": (stats.device_decode_s - before.device_decode_s) / took_s,
    }


def parser() -> argparse.ArgumentParser:
    made = options(__doc__)
    made.add_argument("--device", help="cuda, cpu …; default: the accelerator that torch finds, else the cpu")
    return made


if __name__ == "__main__":
    publish(run, parser())
