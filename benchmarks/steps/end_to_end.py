"""Whether training waits for images: `stoker train` on JPEG files, compared with the same steps on one cached batch.

The real command with only a clock added: after the first steps it trains in turn on the loader's batches and on one
batch, and each window of steps is timed, without its first steps, whose batches were loaded before. On an accelerator
the step is compiled. Images are generated, 640 × 480 and about 95 KB, and decoded every time (no cache). On a CPU
loading and computing share the cores, so the throughput with the loader is lower by the cost of loading, and there is
no bar. The fractions are from the run's own ledger. The step is gpu.py's, so that one compiled program serves both:
classes and boxes as in COCO, and where norms are frozen, random weights with the statistics of random images. The
results file is written after each model.
"""

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.loading import loader
from benchmarks.processes import record, run_child, serve_child
from benchmarks.report import Bar, Report, options, publish, spread

VARIANTS = ("real loader", "cached batch")
PHASES = ("compute", "input_wait")
GOAL = 0.97


@dataclasses.dataclass(frozen=True)
class Training:
    """What is trained. first: steps that do not count; lead: the same of each window, of `steps` more."""

    model: str
    side: int
    batch: int
    first: int
    lead: int
    steps: int


ON_CPU = [Training("retinanet_tiny_fpn", 320, 8, 2, 3, 12)]
ON_DEVICE = [
    Training("retinanet_resnet50_fpn", 800, 32, 20, 10, 30),
    Training("ember_n", 640, 64, 30, 15, 60),
    Training("ssdlite320_mobilenet_v3_large", 320, 128, 30, 15, 100),
]
"""The reference model; the model for GPUs that needs most images per second; the one with the highest throughput."""
FILES_ON_CPU, FILES_ON_DEVICE = 128, 512


CLASSES, MOST_BOXES, FEW_BOXES, EACH = 80, 96, 7, 4
"""As in COCO, whose images have 7 boxes on average, one of train2017 has 93. EACH: one image of so many has most."""


class StepsDone(BaseException):
    """Ends the training; not an Exception, so that the run does not handle it as a failure."""


class OneBatch:
    """Returns one batch of a loader again and again."""

    last_wait: tuple[()] = ()

    def __init__(self, loader: Any) -> None:
        batch = next(loader)
        self.loader, self.batch = loader, type(batch)(*(tensor.clone() for tensor in batch))  # the loader reuses memory

    def __next__(self) -> Any:
        return self.batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def train(folder: Path, first: int, lead: int, steps: int, windows: int) -> dict[str, Any]:
    """Trains for `first` steps, then in windows of lead + steps on the VARIANTS in turn; returns what each measured."""
    import time

    from stoker.training import loop
    from stoker.training import step as training_step
    from stoker.training.recorder import Recorder
    from stoker_watch.cli.app import app

    step, write_window = loop.Training.step, Recorder._write_window
    breakdowns: list[Any] = []
    start: list[float] = []
    loaders: list[Any] = []
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    command = json.loads((folder / "command.json").read_text())
    chosen, began = command["training"], time.perf_counter()

    def timed_step(training: Any) -> None:
        done = training.state.step - first
        if done == -first:  # where a run that is cut spent its time
            record(what=chosen["model"], how="start", s=time.perf_counter() - began)
        window, place = divmod(done, lead + steps)
        if done == 0:
            loaders[:] = training.setup.loader, OneBatch(training.setup.loader)
        if done > 0 and place == 0:
            finish(training, VARIANTS[(window - 1) % 2])
        if done == 2 * windows * (lead + steps):
            training.setup = dataclasses.replace(training.setup, loader=loaders[0])
            training.recorder.finish()
            raise StepsDone
        if done >= 0 and place == 0:
            training.setup = dataclasses.replace(training.setup, loader=loaders[window % 2])
        if done >= 0 and place == lead:
            training.setup.device.synchronize()
            training.recorder.flush()
            breakdowns.clear()
            start[:] = time.perf_counter(), time.process_time()
        step(training)

    def finish(running: Any, name: str) -> None:
        running.setup.device.synchronize()
        seconds, cpu_s = time.perf_counter() - start[0], time.process_time() - start[1]
        running.recorder.flush()
        wall_s = sum(one.wall_s for one in breakdowns)
        fractions = {phase: sum(one.phases.get(phase, 0.0) for one in breakdowns) / wall_s for phase in PHASES}
        found = {"s": seconds, "cpu_s": cpu_s, **fractions}
        measured[name].append(found)
        # A compiler that fails leaves the eager step, with a warning.
        compiled = hasattr(running.parallel.loss_fn, "_torchdynamo_orig_callable")
        model = running.setup.model
        kernels = {
            "convs": any(getattr(module, "fused_convs", False) for module in model.modules()),
            "loss": getattr(model, "fused_loss", False),
        }
        rate = steps * chosen["batch"] / seconds
        about = {"what": chosen["model"], "how": name, "training": chosen, "compiled": compiled, "kernels": kernels}
        record(**about, **{"img/s": rate}, **found)

    def recording_write_window(recorder: Any, breakdown: Any, *rest: Any) -> None:
        breakdowns.extend([] if breakdown is None else [breakdown])
        write_window(recorder, breakdown, *rest)

    loop.Training.step = timed_step  # type: ignore[method-assign]
    Recorder._write_window = recording_write_window  # type: ignore[method-assign]
    if "cpu" in command["options"]:
        training_step.COMPILE_BACKEND = "eager"  # not for its speed: to run the same path
    try:
        run_folder = tempfile.mkdtemp(dir=folder.parent) + "/run"
        app(["train", str(folder), *command["options"], "--weights", initial_weights(folder), "--run-dir", run_folder])
    except StepsDone:
        return {"measured": measured}
    raise RuntimeError("the training ended before its steps were done")


def initial_weights(folder: Path) -> str:
    """For `--weights`: a file next to the folder, if the model's norms are frozen, which need statistics."""
    import torch

    from benchmarks.gpu.gpu_case import Case, calibrated_model
    from stoker.hardware.device import Device
    from stoker.models import MODELS

    chosen = Training(**json.loads((folder / "command.json").read_text())["training"])
    if MODELS[chosen.model].defaults["backbone_norm"] != "frozen_bn":
        return "none"
    case = Case(chosen.model, CLASSES, 2, (chosen.side, chosen.side))
    path = folder.parent / f"{chosen.model}.pth"
    torch.save(calibrated_model(case, Device(torch.device("cpu"))).state_dict(), path)
    return str(path)


def draw(folder: Path, files: int, height: int, width: int, roll_percent: int) -> None:
    """Images of `loader.draw`, with other boxes."""
    loader.draw(folder, files, height, width, roll_percent, 1)
    content = json.loads((folder / "all.json").read_text())
    content["categories"] = [{"id": 1 + k, "name": f"thing {k}"} for k in range(CLASSES)]
    places = [
        (image["id"], k) for image in content["images"] for k in range(FEW_BOXES if image["id"] % EACH else MOST_BOXES)
    ]
    content["annotations"] = [
        {"id": i, "image_id": image, "category_id": 1 + i % CLASSES, "bbox": [50 * (k % 12), 50 * (k // 12), 40, 40]}
        for i, (image, k) in enumerate(places)
    ]
    (folder / "all.json").write_text(json.dumps(content))


def run(arguments: argparse.Namespace) -> Report:
    from stoker.hardware.selection import select_device

    device = select_device(arguments.device)
    n = 1 if arguments.quick else arguments.runs or (2 if device.is_cpu else 3)
    files = FILES_ON_CPU if device.is_cpu else FILES_ON_DEVICE
    trainings = ON_CPU if device.is_cpu else ON_DEVICE
    if arguments.only:
        trainings = [training for training in ON_CPU + ON_DEVICE if training.model in arguments.only]
    if arguments.quick:
        side, files = 128 if device.is_cpu else 320, 64
        trainings = [dataclasses.replace(one, side=side, batch=8, first=2, lead=1, steps=3) for one in trainings]
    report = Report(
        f"Training on {device.name}: the loader in the loop", n, ("stoker", "torch", "torchvision", "simplejpeg")
    )
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as temporary:
        folder, cache = Path(temporary) / "drawn", Path(temporary) / "cache"
        folder.mkdir()
        kind = loader.KINDS[0]
        run_child("draw", folder, cache, files, *kind.size, round(100 * kind.roll))
        for training in trainings:
            options = [
                *train_options(training),
                "--device",
                str(device.torch_device),
                "--workers",
                str(arguments.workers),
            ]
            if not device.is_cpu or arguments.compile:
                options.append("--compile")
            command = {"training": dataclasses.asdict(training), "options": options}
            (folder / "command.json").write_text(json.dumps(command))
            results = run_child("train", folder, cache, training.first, training.lead, training.steps, n)
            ratio = add_rows(report, training, results["measured"])
            if not device.is_cpu:
                report.bars.append(Bar.at_least(f"{training.model}: img/s, real loader / cached batch", ratio, GOAL))
            report.write(arguments.json)
    return report


def train_options(training: Training) -> list[str]:
    side = str(training.side)
    return ["--model", training.model, "--image-size", side, side,
            "--batch-size", str(training.batch), "--steps", "1000000",
            "--eval-every", "0", "--cache", "none"]  # fmt: skip


def add_rows(report: Report, training: Training, results: dict[str, list[dict[str, Any]]]) -> float:
    """Adds the rows of a model. Returns the throughput with the loader as a fraction of that on one batch."""
    num_images = training.steps * training.batch
    throughput = {name: spread([num_images / one["s"] for one in runs]) for name, runs in results.items()}
    for name, runs in results.items():
        median = {key: statistics.median(one[key] for one in runs) for key in ("cpu_s", *PHASES)}
        report.rows.append({
            "what": f"{training.model}, {name}",
            "image_size": training.side,
            "batch_size": training.batch,
            "img/s": throughput[name]["median"],
            "min": throughput[name]["min"],
            "max": throughput[name]["max"],
            "CPU ms per image": 1e3 * median["cpu_s"] / num_images,
            "compute fraction": median["compute"],
            "input_wait fraction": median["input_wait"],
        })  # fmt: skip
    ratio = throughput["real loader"]["median"] / throughput["cached batch"]["median"]
    report.rows.append({"what": f"{training.model}, throughput, real loader / cached batch", "img/s": ratio})
    return ratio


def parser() -> argparse.ArgumentParser:
    made = options(__doc__)
    made.add_argument("--device", help="cuda, cpu …; default: the accelerator that torch finds, else the cpu")
    made.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="of the loader; default: cores")
    made.add_argument("--only", nargs="+", metavar="MODEL", help="these models only")
    made.add_argument("--runs", type=int, help="windows of each variant; default: 3, on a CPU 2")
    made.add_argument("--compile", action="store_true", help="on a CPU too, traced only")
    return made


if __name__ == "__main__":
    serve_child({"draw": draw, "train": train})
    publish(run, parser())
