"""How long `stoker train DATA --weights FILE` takes from its start to the end of its first optimizer step.

Generates JPEGs of 640 × 480 and about 95 KB and writes MobileNetV2's weights (random ones: reading them takes as long),
or takes the user's. Every start is a fresh process with all cores, on an index that it has to build and on one that it
reopens, in turn; it ends after its first step. The clock starts with the process, so it includes imports; files are in
the page cache and Python's bytecode is compiled. CPU-seconds, of all threads, vary less on a busy machine.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.generated import generate_jpegs
from benchmarks.processes import run_child, serve_child
from benchmarks.report import Bar, Report, options, publish, spread

NUM_IMAGES = 300
GOAL_S = 3.0
PARTS = ("python and imports", "index", "settings", "model", "weights", "first step", "everything else")


class FirstStepDone(BaseException):
    """Ends the training; not an Exception, so that the run does not handle it as a failure."""


def start(folder: Path) -> dict[str, Any]:
    """Runs the command to the end of its first step. Seconds of each of PARTS and of all, by the clock and of CPU."""
    from stoker_watch.recording.telemetry.host import process_start_s

    began = process_start_s()
    from stoker.cli.quick_import import quick_imports
    from stoker_watch.cli.app import app

    with quick_imports():  # as the command does
        from stoker import models
        from stoker.training import loop
        from stoker.training import start as starting

    took = {"python and imports": time.perf_counter() - began}
    cpu = {"python and imports": time.process_time()}

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before, cpu_before = time.perf_counter(), time.process_time()
            result = function(*args, **kwargs)
            took[part], cpu[part] = time.perf_counter() - before, time.process_time() - cpu_before
            return result

        return call

    step = timed("first step", loop.Training.step)

    def first_step(training: loop.Training) -> None:
        step(training)
        training.setup.device.synchronize()
        took["all"], cpu["all"] = time.perf_counter() - began, time.process_time()
        raise FirstStepDone

    for owner, name, part in ((starting, "open_index_of", "index"), (starting, "derive", "settings"),
                              (models, "build", "model"), (starting, "load_weights", "weights")):  # fmt: skip
        setattr(owner, name, timed(part, getattr(owner, name)))
    loop.Training.step = first_step  # type: ignore[method-assign,assignment]
    data, weights, *more = json.loads((folder / "command.json").read_text())
    run = tempfile.mkdtemp(dir=folder) + "/run"
    try:
        app(["train", data, "--weights", weights, "--steps", "3", "--run-dir", run, *more])
    except FirstStepDone:
        for seconds_of in (took, cpu):
            named = sum(seconds_of.get(part, 0.0) for part in PARTS)
            seconds_of["everything else"] = seconds_of["all"] - named
        return {"wall": took, "cpu": cpu}
    raise RuntimeError("the training made no step")


def prepare(folder: Path, num_images: int) -> None:
    """Generates the images and writes a file of weights."""
    import torch
    from torchvision.models import mobilenet_v2

    (folder / "generated").mkdir()
    generate_jpegs(folder / "generated", num_images)
    torch.save(mobilenet_v2().state_dict(), folder / "mobilenet_v2.pth")


def run(arguments: argparse.Namespace) -> Report:
    n = 1 if arguments.quick else 7
    runs: dict[str, list[dict[str, Any]]] = {"first start": [], "second start": []}
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as temporary:
        folder = Path(temporary)
        small = ["--model", "retinanet_tiny_fpn", "--image-size", "64", "64"] if arguments.quick else []
        if arguments.data is None or arguments.weights is None:
            run_child("prepare", folder, folder / "cache", 40 if arguments.quick else NUM_IMAGES)
        data = str(arguments.data or folder / "generated")
        weights = "none" if arguments.quick else str(arguments.weights or folder / "mobilenet_v2.pth")
        (folder / "command.json").write_text(json.dumps([data, weights, *small]))
        for number in range(n):
            for what, results in runs.items():
                results.append(run_child("start", folder, folder / f"cache-{number}"))
                print(f"{what} {number + 1} of {n}: {results[-1]['wall']['all']:.2f} s", file=sys.stderr, flush=True)
    images = arguments.data.name if arguments.data else "generated images"
    report = Report(f"From the start of `stoker train` to the end of its first step, {images}", n)
    report.packages = ("stoker", "torch", "torchvision")
    for what, results in runs.items():
        report.rows.append({"what": f"{what}, all", **seconds(results, "all")})
        report.rows += [{"what": f"{what}, {part}", **seconds(results, part)} for part in PARTS]
    second = statistics.median(result["wall"]["all"] for result in runs["second start"])
    report.bars = [Bar.at_most("seconds to the first step, index reopened", second, GOAL_S)]
    report.rows.append({"what": "load of the machine, 1 minute, at the end", "s": os.getloadavg()[0]})
    return report


def seconds(results: list[dict[str, Any]], part: str) -> dict[str, float]:
    """Median, minimum and maximum of a part, and the median of its CPU-seconds. A part that a run does not have counts
    as 0."""
    found = spread([result["wall"].get(part, 0.0) for result in results])
    cpu_s = statistics.median(result["cpu"].get(part, 0.0) for result in results)
    return {"s": found["median"], "s min": found["min"], "s max": found["max"], "CPU s": cpu_s}


def parser() -> argparse.ArgumentParser:
    made = options(__doc__)
    made.add_argument("--data", type=Path, help="a data set to train on instead of generated images")
    made.add_argument("--weights", type=Path, help="a file of weights to read instead of random ones")
    return made


if __name__ == "__main__":
    serve_child({"prepare": prepare, "start": start})
    publish(run, parser())
