"""How long ember_n and Ultralytics' YOLO26n and YOLO11n take for an image in onnxruntime, on one thread of the CPU.

    python -m benchmarks latency --ultralytics ENVIRONMENT/bin/yolo [--sides 320 640] [--json FILE]

All are trained for an epoch of 32 images of BCCD (the numbers in the weights do not matter here), exported by their
own commands, and run in turn in one process on the same noise: processor seconds of a call, by median and quartiles.
YOLO11n and ember_n are compared with NMS inside and without, YOLO26n and ember_n with its one-to-one head
(`--nms-free`) as they are: both give boxes that need no NMS, which is the comparison from end to end. Hardly a box
of noise has a score that lets it into NMS: that it is inside costs what is measured, and many objects cost more. Ours
takes bytes, normalizes them and gives the boxes in order; theirs takes fractions of 1, and without NMS gives all its
boxes as they are (YOLO26n the 300 best). `ember.py` says how theirs is run. Its environment needs onnx, too.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from benchmarks.accuracy.ember import OURS, Contestant, make_data, of_stoker, of_ultralytics
from benchmarks.accuracy.quality import SHOWN
from benchmarks.processes import ROOT, run_timed
from benchmarks.report import Bar, Report, options, publish

KINDS = {
    "NMS inside": ("yolo11n", (), ("--iou=0.7",), ("nms=True",)),
    "none": ("yolo11n", (), ("--iou=1",), ("nms=False",)),
    "needs none": ("yolo26n", ("--nms-free",), (), ()),
}
"""The peer, what ours trains with, and what each exports with."""


def main_run(requested: argparse.Namespace) -> Report:
    if requested.quick:
        requested.sides, requested.rounds = requested.sides[:1], 15
    report = Report("CPU time of an image in onnxruntime, one thread", requested.rounds)
    report.packages = ("stoker", "torch", "onnxruntime")
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as folder:
        for side in requested.sides:
            files = exported(requested, Path(folder) / str(side), side)
            times = measured(files, requested.rounds)
            for (name, kind), seconds in times.items():
                low, middle, high = statistics.quantiles(seconds, n=4)
                report.rows.append({"what": name, "kind": kind, "side": side, "ms": middle * 1e3,
                                    "quartile": low * 1e3, "and": high * 1e3})  # fmt: skip
            for kind, (peer, *_) in KINDS.items():
                if (peer, kind) in times:
                    over = statistics.median(times[OURS, kind]) / statistics.median(times[peer, kind])
                    report.bars.append(Bar.at_most(f"{OURS} over {peer}, {side} px, NMS: {kind}", over, 0.9))
    return report


def exported(requested: argparse.Namespace, folder: Path, side: int) -> dict[tuple[str, str], Path]:
    """ONNX files by contestant and kind."""
    folder.mkdir()
    data = make_data("bccd", requested.shared, folder, side=side, most=32)
    files = {}
    for number, kind in enumerate(requested.kinds):
        peer, settings, flags, peer_flags = KINDS[kind]
        ours, theirs = folder / "-".join((OURS, *settings)), folder / peer
        if not ours.exists():
            trained(of_stoker(OURS, *settings), data, ours)
        files[OURS, kind] = folder / f"ours-{number}.onnx"
        weights = str(ours / "run" / "final.safetensors")
        run_timed([sys.executable, "-m", "stoker", "export", weights, "--onnx", "--batch-size", "1", *flags,
               "--out", str(files[OURS, kind])], folder)  # fmt: skip
        if requested.ultralytics is None:
            continue
        if not theirs.exists():
            trained(of_ultralytics(requested.ultralytics, peer), data, theirs)
        last = theirs / "run" / "weights" / "last.pt"
        run_timed([str(requested.ultralytics), "export", f"model={last}", "format=onnx", f"imgsz={side}",
                   "device=cpu", "simplify=False", *peer_flags], folder)  # fmt: skip
        files[peer, kind] = last.with_suffix(".onnx").rename(folder / f"theirs-{number}.onnx")
    return files


def trained(train: Contestant, data: Any, folder: Path) -> None:
    folder.mkdir()
    train(data, 1, 0, folder)


def measured(files: dict[tuple[str, str], Path], rounds: int) -> dict[tuple[str, str], list[float]]:
    """Processor seconds of each call, one file after the other in each round; the first five rounds do not count."""
    set_up = onnxruntime.SessionOptions()
    set_up.intra_op_num_threads = set_up.inter_op_num_threads = 1
    set_up.log_severity_level = 3
    noise = np.random.default_rng(0)
    runs = {}
    for key, path in files.items():
        session = onnxruntime.InferenceSession(str(path), set_up, providers=["CPUExecutionProvider"])
        first = session.get_inputs()[0]
        shape = [length if isinstance(length, int) else 1 for length in first.shape]
        pixels = noise.integers(0, 256, shape, np.uint8)
        runs[key] = session, {first.name: pixels if "uint8" in first.type else np.float32(pixels / 255)}
    times: dict[tuple[str, str], list[float]] = {key: [] for key in files}
    for _ in range(5 + rounds):
        for key, (session, feed) in runs.items():
            start = time.process_time()
            session.run(None, feed)
            times[key].append(time.process_time() - start)
    return {key: seconds[5:] for key, seconds in times.items()}


def parser() -> argparse.ArgumentParser:
    made = options(__doc__)
    made.add_argument("--ultralytics", type=Path, metavar="YOLO", help="its program, in an environment of its own")
    made.add_argument("--sides", nargs="+", type=int, default=[320, 640], help="of the square model input, pixels")
    made.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of NMS; default: all")
    made.add_argument("--rounds", type=int, default=60)
    made.add_argument("--shared", type=Path, default=Path(os.environ.get("STOKER_TEST_DATA", ROOT.parent / SHOWN[3:])),
                      help="folder of the data sets; default STOKER_TEST_DATA")  # fmt: skip
    return made


if __name__ == "__main__":
    publish(main_run, parser())
