"""Whether a long training of `ember_n` from random weights keeps learning: 10,000 drawn images, 12,000 steps.

    python -m benchmarks scale [--images 10000] [--steps 12000] [--side 96] [--folder FOLDER] [--json FILE]

The images are drawn as those of the demo. Twelve times during the training the 300 images of the demo's
validation split are evaluated. A row for each: AP, the loss of the training since the one before, and the memory of the
process. No collapse: AP never falls by more than 0.05 below the best before. Rising: the last third has a higher mean
than the second, and that than the first. Flat: the memory at the end over that at the third evaluation.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.processes import run_timed
from benchmarks.report import Bar, Report, options, publish
from stoker.data.demo import IMAGES_PER_SPLIT, draw_split
from stoker_watch.runs import records
from stoker_watch.runs.schemas import DeviceSample, Event, StepWindow

MODEL, BATCH, EVALUATIONS = "ember_n", 8, 12
MAX_FALL, MAX_GROWTH = 0.05, 1.05


def rows_of(run: Path) -> list[dict[str, float | int | str]]:
    """An evaluation each."""
    evaluations = [event for event in records.read_lines(run, records.EVENTS, Event) if event.kind == "evaluated"]
    windows = [window for window in records.read_lines(run, records.STEPS, StepWindow) if window.losses]
    memory = [(sample.t, sample.rss_bytes) for sample in records.read_lines(run, records.DEVICES, DeviceSample)
              if sample.rss_bytes]  # fmt: skip
    rows, start_t = list[dict[str, float | int | str]](), 0.0
    for event in evaluations:
        losses = [window.losses["total"] for window in windows if start_t < window.t <= event.t]
        used = [size for t, size in memory if start_t < t <= event.t]
        rows.append({
            "what": f"step {event.step}", "AP": event.data["metrics"]["ap"], "loss": statistics.fmean(losses),
            "memory, MiB": statistics.median(used) / 2**20,
        })  # fmt: skip
        start_t = event.t
    return rows


def scale(asked: argparse.Namespace) -> Report:
    if asked.quick:
        asked.images, asked.steps = 400, 240
    report = Report(f"{MODEL} on {asked.images:,} drawn images, {asked.steps:,} steps", 1, ("stoker", "torch"))
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as temporary:
        folder = asked.folder or Path(temporary)
        for split, count in (("train", asked.images), ("valid", IMAGES_PER_SPLIT["valid"])):
            if not (folder / "data" / split).exists():
                (folder / "data").mkdir(parents=True, exist_ok=True)
                draw_split(folder / "data" / split, split, count)
        run = Path(temporary) / "run"
        command = [
            sys.executable, "-m", "stoker", "train", str(folder / "data"), "--model", MODEL, "--weights", "none",
            "--device", "cpu", "--steps", str(asked.steps), "--batch-size", str(BATCH), "--image-size",
            str(asked.side), str(asked.side), "--eval-every", str(asked.steps // EVALUATIONS), "--run-dir", str(run),
        ]  # fmt: skip
        _, cpu_s = run_timed(command, Path(temporary))
        report.rows = [*rows_of(run)]
    ap = [float(row["AP"]) for row in report.rows]
    falls = [max(ap[:k]) - ap[k] for k in range(1, len(ap))]
    third = len(ap) // 3
    thirds = [statistics.fmean(ap[k * third : (k + 1) * third]) for k in range(3)]
    memory = [float(row["memory, MiB"]) for row in report.rows]
    report.rows.append({"what": "CPU-seconds of the training", "seconds": cpu_s})
    report.bars = [
        Bar.at_most("largest fall of AP below the best before", max(falls), MAX_FALL),
        Bar.at_least("mean AP of the second third less the first's", thirds[1] - thirds[0], 0.0),
        Bar.at_least("mean AP of the last third less the second's", thirds[2] - thirds[1], 0.0),
        Bar.at_most("memory at the end over that at the third evaluation", memory[-1] / memory[2], MAX_GROWTH),
    ]
    return report


def parser() -> argparse.ArgumentParser:
    made = options(__doc__)
    made.add_argument("--images", type=int, default=10_000)
    made.add_argument("--steps", type=int, default=12_000)
    made.add_argument("--side", type=int, default=96, help="of the model input, pixels")
    made.add_argument("--folder", type=Path, help="keeps the drawn images there")
    return made


if __name__ == "__main__":
    publish(scale, parser())
