"""`stoker tune --lr`: its learning rate against the best of a grid of seven, by the final AP on the validation split.

    python -m benchmarks lr --work FOLDER [--data bccd dice blood_png] [--models ember_n ember_mobilenet_v2]

Small trainings of real data, on the CPU: STEPS of small images, so that a case (data set and model) takes a quarter of
an hour on a quiet machine. The grid is in half-decades around the learning rate that `stoker train` derives, which
`tune` does not know: it has a grid of its own. Each point is a training of the whole length, so the bar, a factor of
two, is less than a step of the grid (3.16) and more than half of it. `ember_mobilenet_v2` begins with weights of
ImageNet.

All is done in FOLDER and continues there: what has ended is not repeated. The report is of the cases asked for. One
seed: neighbors of the grid may change places with another one, and `AP at the suggestion / best AP` says what that is
worth; the AP is that of the grid's point next to the suggestion.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT, child_environment
from benchmarks.report import Bar, Report, options, publish
from stoker.config.settings import from_fields, from_toml, to_toml
from stoker_watch.runs.records import EVENTS, is_finished, read_lines
from stoker_watch.runs.schemas import Event

SETS = {"bccd": ("bccd/BCCD", (96, 128)), "dice": ("dice", (128, 128)), "blood_png": ("blood_png", (128, 128))}
"""Name → folder of the data sets, and image size. The other two real sets have too few images to compare AP."""
MODELS = ("ember_n", "ember_mobilenet_v2")
STEPS, BATCH = 300, 8
POINTS, RATIO = 7, math.sqrt(10)
GOAL = 2.0


def stoker(folder: Path, *words: str) -> str:
    environment = child_environment() | {"STOKER_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, "-m", "stoker", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr[-600:]}")
    return done.stdout


def measure(name: str, model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The row of a case."""
    folder = arguments.work.absolute() / f"{name}-{model}"
    folder.mkdir(parents=True, exist_ok=True)
    steps = 40 if arguments.quick else STEPS
    settings = {
        "model": model, "image_size": (64, 64) if arguments.quick else SETS[name][1], "batch_size": BATCH,
        "max_duration": str(steps), "device": "cpu", "eval_every": "0", "patience": 0,
    }  # fmt: skip
    if "mobilenet" in model:
        settings["weights"] = str(arguments.shared / "weights" / "mobilenet_v2_imagenet.pth")
    config, result = folder / "settings.toml", folder / "result.json"
    config.write_text(to_toml(from_fields(settings), {}))
    data = str(arguments.shared / SETS[name][0])
    if not result.exists():
        result.write_text(
            stoker(folder, "tune", data, "--lr", "--config", str(config), "--budget", arguments.budget,
                   "--out", str(folder / "tune"), "--json")
        )  # fmt: skip
    found = json.loads(result.read_text())
    derived = from_toml(folder / "tune" / "first.toml")[0].optim.lr
    aps = {}
    for point in range(POINTS):
        lr = float(f"{derived * RATIO ** (point - POINTS // 2):.3g}")
        run = folder / f"lr-{lr:g}"
        if not is_finished(run):
            stoker(folder, "train", data, "--config", str(config), "--lr", f"{lr:g}", "--run-dir", str(run))
        ends = [event for event in read_lines(run, EVENTS, Event) if event.kind == "finished"]
        diverged = any(event.kind == "rolled_back" for event in read_lines(run, EVENTS, Event))
        aps[lr] = 0.0 if diverged else ends[-1].data["metrics"]["ap"]
    best = max(aps, key=lambda lr: aps[lr])
    nearest = min(aps, key=lambda lr: abs(math.log(lr / found["lr"])))
    apart = max(found["lr"] / best, best / found["lr"])
    return {"what": f"{name}, {model}", "suggested": found["lr"], "derived": derived, "best of grid": best,
            "apart": apart, "best AP": aps[best], "AP next to the suggestion": aps[nearest],
            "grid": {f"{lr:g}": ap for lr, ap in aps.items()}}  # fmt: skip


def run(arguments: argparse.Namespace) -> Report:
    report = Report(f"`stoker tune --lr`: {STEPS} steps of batch {BATCH}", 1, ("stoker", "torch"))
    for name in arguments.data[: 1 if arguments.quick else None]:
        for model in arguments.models[: 1 if arguments.quick else None]:
            row = measure(name, model, arguments)
            report.rows.append(row)
            report.bars.append(Bar.at_most(f"{row['what']}: suggested and best, apart", row["apart"], GOAL))
            if row["best AP"]:
                worth = row["AP next to the suggestion"] / row["best AP"]
                report.bars.append(Bar.at_least(f"{row['what']}: AP at the suggestion / best AP", worth, 0.95))
            report.write(arguments.json)
    return report


def parser() -> argparse.ArgumentParser:
    made = options(__doc__)
    made.add_argument("--work", type=Path, required=True, help="folder of the trainings; continues there")
    made.add_argument("--data", nargs="+", choices=SETS, default=list(SETS))
    made.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    made.add_argument("--budget", default="15min", help="of each `tune --lr`")
    place = Path(os.environ.get("STOKER_TEST_DATA", ROOT.parent / "shared/data"))
    made.add_argument("--shared", type=Path, default=place, help="folder of the data sets; default STOKER_TEST_DATA")
    return made


if __name__ == "__main__":
    publish(run, parser())
