"""Predictions of `stoker plan` against measurements: peak memory and time of a step, and how long a plan takes.

Peak: a step is traced without memory (`stoker/planning/trace.py`); the same counter then counts the same step on real
CPU tensors. Two smaller batch sizes make the line on which the largest batch is looked for.

Time: steps of two models calibrate the few fractions of the roofline (`stoker/planning/predict.py`), and four others
are predicted with them. One process with one thread takes the steps in turn, in CPU-seconds, and the
micro-benchmark of the CPU once a round. The models were chosen before the first measurement. A second group
of four (`--second`) was looked at only when the method was final: it is the honest figure.

With a GPU, `--gpu` compares its peak and its time, in bf16 or fp16, with predictions.
"""

import argparse
import concurrent.futures
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.generated import generate_jpegs
from benchmarks.processes import run_child, serve_child
from benchmarks.report import Bar, Report, options, publish, spread

PEAK_GOAL, TIME_GOAL, PLAN_GOAL_S, GPU_PEAK_GOAL = 0.03, 0.25, 20.0, 0.10
MACHINES = ("t4", "l4", "a10g", "a100-40", "h100")
NUM_IMAGES = 200
PARTS = ("peak", "time", "plan")


class Case(NamedTuple):
    """A model with the shapes of its batch."""

    model: str
    side: int
    batch: int

    @property
    def label(self) -> str:
        return f"{self.model}, {self.side} px, batch {self.batch}"


PEAK_CASES = (
    Case("retinanet_resnet18_fpn", 160, 4),
    Case("ember_n", 160, 4),
    Case("ssdlite320_mobilenet_v3_large", 320, 4),
    Case("faster_rcnn_mobilenet_v3_large_fpn", 160, 4),
)
CALIBRATION = (
    Case("retinanet_resnet18_fpn", 160, 4),
    Case("retinanet_resnet18_fpn", 256, 2),
    Case("ssdlite320_mobilenet_v3_large", 320, 4),
    Case("ssdlite320_mobilenet_v3_large", 320, 2),
)
HELD_OUT = (
    Case("ember_n", 256, 4),
    Case("fcos_resnet18_fpn", 192, 2),
    Case("retinanet_mobilenet_v2_fpn", 192, 4),
    Case("faster_rcnn_mobilenet_v3_large_fpn", 256, 2),
)
SECOND_HELD_OUT = (
    Case("retinanet_tiny_fpn", 128, 8),
    Case("ember_mobilenet_v2", 256, 4),
    Case("retinanet_resnet50_fpn", 160, 2),
    Case("ssd300_vgg16", 300, 1),
)
GPU_CASES = (
    Case("retinanet_resnet50_fpn", 800, 16),
    Case("ember_n", 640, 32),
    Case("fcos_resnet50_fpn", 800, 8),
    Case("faster_rcnn_resnet50_fpn", 800, 8),
)
QUICK = Case("retinanet_tiny_fpn", 64, 4)
CLASSES, BOXES = 20, 16
UNCALIBRATED = {"convolution": 0.6, "grouped": 0.1, "bandwidth": 0.7, "kernel_s": 10e-6}
"""Where the fit starts; what the calibration does not show stays there."""


def make_spec(case: Case, *, precision: str = "fp32", on_cpu: bool = True) -> Any:
    """The step of a training with the defaults of the model."""
    from stoker.config.settings import read_recipes
    from stoker.models import MODELS
    from stoker.planning.trace import StepSpec
    from stoker.training.defaults.derive import SETTINGS
    from stoker_watch.hardware.calibration import step_settings

    architecture = MODELS[case.model]
    settings = {
        **{name: row[0] for name, row in SETTINGS.items() if isinstance(row, tuple)},
        "backbone_lr_mult": 1.0,
        **read_recipes()[architecture.recipe].set_fields(),
        **{name: value for name, value in architecture.defaults.items() if value is not None},
        "model": case.model, "image_size": [case.side, case.side], "precision": precision, "weight_decay": 1e-4,
        "ema_decay": 0.99,
    }  # fmt: skip
    return StepSpec(settings=step_settings(settings), num_classes=CLASSES, max_boxes=BOXES, on_cpu=on_cpu)


def trace(*steps: tuple[Any, int, int]) -> list[Any]:
    """Traces of (spec, batch size, memory of the device)."""
    from stoker.planning.trace import TracedStep, trace_steps

    answers = trace_steps([TracedStep(*step) for step in steps])
    if errors := [answer.error for answer in answers if answer.trace is None]:
        raise RuntimeError(errors[0])
    return [answer.trace for answer in answers]


# Children: real steps.


class RealStep:
    """A step of a case with tensors that have values."""

    def __init__(self, case: Case, device_name: str, precision: str) -> None:
        import torch

        from stoker.hardware.cpu import configure_malloc
        from stoker.hardware.selection import select_device
        from stoker.planning.trace import CountedStep
        from stoker.training.defaults.dry_run import make_worst_case_batch

        self.device = select_device(device_name)
        if self.device.is_cpu:
            torch.set_num_threads(1)
            configure_malloc()  # as the start of a run does
        else:
            torch.backends.cudnn.benchmark = True
        spec = make_spec(case, precision=precision, on_cpu=self.device.is_cpu)
        self.step = CountedStep(spec, self.device, is_fake=False)
        self.batch = make_worst_case_batch(
            case.batch, image_size=(case.side, case.side), max_boxes=BOXES, num_classes=CLASSES, device=self.device
        )

    def seconds(self) -> float:
        """Of a step: CPU-seconds on a CPU."""
        clock = time.process_time if self.device.is_cpu else time.perf_counter
        before = clock()
        self.step.run(self.batch)
        self.device.synchronize()
        return clock() - before


def read_cases(folder: Path) -> list[Case]:
    return [Case(*values) for values in json.loads((folder / "cases.json").read_text())]


def peaks(folder: Path) -> dict[str, Any]:
    """Bytes of each case on the CPU, by the counter of the trace."""
    found = {}
    for case in read_cases(folder):
        real = RealStep(case, "cpu", "fp32")
        found[case.label] = real.step.count(real.batch).peak_bytes
        print(f"{case.label}: {found[case.label]:,} bytes", file=sys.stderr, flush=True)
    return found


def times(folder: Path, rounds: int) -> dict[str, Any]:
    """CPU-seconds of steps of all cases in turn, and the micro-benchmark of the CPU once a round."""
    from stoker.planning.machines import measure_cpu

    steps = {case.label: RealStep(case, "cpu", "fp32") for case in read_cases(folder)}
    for step in steps.values():
        step.seconds()  # allocates, and chooses kernels
    took: dict[str, list[float]] = {label: [] for label in ("flops", "bandwidth", *steps)}
    for _ in range(rounds):
        cpu = measure_cpu(clock=time.process_time)
        took["flops"].append(cpu.flops["fp32"])
        took["bandwidth"].append(cpu.bandwidth)
        for label, step in steps.items():
            took[label].append(step.seconds())
            print(f"{label}: {took[label][-1]:.3f} CPU-s", file=sys.stderr, flush=True)
    return took


def gpu(folder: Path, rounds: int, is_bf16: int) -> dict[str, Any]:
    """Peak and seconds of steps of the first case on the GPU."""
    import torch

    real = RealStep(read_cases(folder)[0], "cuda", "bf16" if is_bf16 else "fp16")
    for _ in range(3):
        real.seconds()
    real.device.reset_peak_memory()
    real.seconds()
    found = {"allocated": real.device.memory().peak, "reserved": torch.cuda.max_memory_reserved()}
    return {**found, "s": [real.seconds() for _ in range(rounds)]}


def run_with(function: str, cases: Sequence[Case], *numbers: int) -> dict[str, Any]:
    """The result of a child for these cases."""
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as temporary:
        folder = Path(temporary)
        (folder / "cases.json").write_text(json.dumps(cases))
        return run_child(function, folder, folder / "cache", *numbers)


# The parts.


def compare_peaks(report: Report, cases: Sequence[Case]) -> None:
    errors = []
    counted = run_with("peaks", cases)
    for case in cases:
        spec = make_spec(case)
        small, large, exact = trace(*((spec, size, 0) for size in (2, 3, case.batch)))
        line = small.peak_bytes + (large.peak_bytes - small.peak_bytes) * (case.batch - 2)
        measured = counted[case.label]
        errors.append(abs(exact.peak_bytes / measured - 1))
        report.rows.append(
            {
                "what": f"peak: {case.label}",
                "predicted": exact.peak_bytes / 2**20,
                "measured": measured / 2**20,
                "unit": "MiB",
                "error %": 100 * (exact.peak_bytes / measured - 1),
                "on the line of two smaller batches, error %": 100 * (line / measured - 1),
            }
        )
        print(json.dumps(report.rows[-1]), file=sys.stderr, flush=True)
    report.bars.append(Bar.at_most("peak memory, largest error of the models", max(errors), PEAK_GOAL))


def compare_times(report: Report, calibration: Sequence[Case], groups: dict[str, Sequence[Case]], rounds: int) -> None:
    """Adds the rows of the calibration and of each group of held-out models, and a bar for each group."""
    import msgspec

    from stoker.planning.machines import Accelerator
    from stoker.planning.predict import CPU, TimedTrace, fit, step_time

    cases = [*calibration, *(case for group in groups.values() for case in group)]
    with concurrent.futures.ThreadPoolExecutor(1) as background:
        measuring = background.submit(run_with, "times", cases, rounds)
        traces = dict(zip(cases, trace(*((make_spec(case), case.batch, 0) for case in cases)), strict=True))
        took = measuring.result()
    accelerator = Accelerator(
        key="cpu",
        name="",
        flops={"fp32": statistics.median(took["flops"])},
        bandwidth=statistics.median(took["bandwidth"]),
        memory_bytes=0,
        is_cpu=True,
        source="",
    )
    report.rows += [
        {"what": "CPU, matrix product of one thread, GFLOP/s", "measured": accelerator.flops["fp32"] / 1e9},
        {"what": "CPU, copy of one thread, GB/s", "measured": accelerator.bandwidth / 1e9},
    ]
    samples = [
        TimedTrace(traces[case], accelerator, "fp32", 1, statistics.median(took[case.label])) for case in calibration
    ]
    fitted = fit(samples, msgspec.structs.replace(CPU, **UNCALIBRATED))
    for name in ("convolution", "grouped", "matmul", "bandwidth", "kernel_s"):
        report.rows.append({"what": f"fitted: {name}", "measured": getattr(fitted, name)})
    labelled = {"calibration": calibration, **groups}
    for group, members in labelled.items():
        errors, as_shipped = [], []
        for case in members:
            measured = statistics.median(took[case.label])
            predicted, shipped = (
                step_time(traces[case], accelerator, efficiency, precision="fp32") for efficiency in (fitted, CPU)
            )
            errors.append(abs(predicted.total_s / measured - 1))
            as_shipped.append(abs(shipped.total_s / measured - 1))
            report.rows.append(
                {
                    "what": f"time, {group}: {case.label}",
                    "predicted": predicted.total_s,
                    "measured": measured,
                    "unit": "CPU-s",
                    "error %": 100 * (predicted.total_s / measured - 1),
                    "with the shipped fractions, error %": 100 * (shipped.total_s / measured - 1),
                    "limited by": predicted.limited_by,
                    "min": min(took[case.label]),
                    "max": max(took[case.label]),
                }
            )
        if group != "calibration":
            report.bars.append(Bar.at_most(f"time of a step, largest error, {group}", max(errors), TIME_GOAL))


def plan(folder: Path) -> dict[str, Any]:
    """In a child: everything that a plan for five machines computes; wall and CPU seconds since its start."""
    from stoker_watch.recording.telemetry.host import process_start_s

    began = process_start_s()
    import torch

    from stoker.config.settings import from_fields
    from stoker.data.index import open_index_of
    from stoker.hardware.device import Device
    from stoker.planning.machines import GPUS
    from stoker.planning.predict import loader_demand, predict_steps
    from stoker.training.defaults.derive import derive_for_plan

    config = from_fields({"data": str(folder / "generated"), **json.loads((folder / "settings.json").read_text())})
    index = open_index_of(config.data)
    config, _ = derive_for_plan(config, index, Device(torch.device("cuda")))
    predictions = predict_steps(config, index, [GPUS[key] for key in MACHINES], batch_size=config.run.batch_size)
    loader_demand(config, index)
    children = os.times()
    return {
        "wall": time.perf_counter() - began,
        "cpu": children.user + children.system + children.children_user + children.children_system,
        "batches": [prediction.batch_size for prediction in predictions],
    }


def time_plan(report: Report, rounds: int, settings: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as temporary:
        folder = Path(temporary)
        (folder / "settings.json").write_text(json.dumps(settings))
        run_child("prepare", folder, folder / "cache", NUM_IMAGES)
        found = [run_child("plan", folder, folder / f"cache-{n}") for n in range(rounds)]  # no trace of another round
    what = f"plan: {len(MACHINES)} machines, {settings['model']}"
    report.rows.append({"what": f"{what}, s"} | spread([one["wall"] for one in found]))
    report.rows.append({"what": f"{what}, CPU-s"} | spread([one["cpu"] for one in found]))
    median = statistics.median(one["wall"] for one in found)
    report.bars.append(Bar.at_most(f"seconds of a plan for {len(MACHINES)} machines", median, PLAN_GOAL_S))


def prepare(folder: Path, num_images: int) -> None:
    (folder / "generated").mkdir()
    generate_jpegs(folder / "generated", num_images)


def compare_gpu(report: Report, cases: Sequence[Case], rounds: int) -> None:
    """Peak and time of steps on this machine's GPU."""
    import torch

    from stoker.planning.machines import identify
    from stoker.planning.predict import GPU, step_time

    if not torch.cuda.is_available():
        report.rows.append({"what": "GPU: n/a: no GPU here"})
        return
    name = torch.cuda.get_device_name()
    accelerator = identify(name)
    if accelerator is None:
        report.rows.append({"what": f"GPU: n/a: {name} is not in the table of accelerators"})
        return
    precision = accelerator.precision()
    _, total = torch.cuda.mem_get_info()
    errors = []
    for case in cases:
        spec = make_spec(case, precision=precision, on_cpu=False)
        (traced,) = trace((spec, case.batch, total))
        predicted = step_time(traced, accelerator, GPU, precision=precision)
        found = run_with("gpu", [case], 3 * rounds, int(precision == "bf16"))
        allocated, median = found["allocated"], statistics.median(found["s"])
        errors.append(abs(traced.peak_bytes / allocated - 1))
        report.rows += [
            {"what": f"{name}, peak: {case.label}", "predicted": traced.peak_bytes / 2**20,
             "measured": allocated / 2**20, "unit": "MiB", "error %": 100 * (traced.peak_bytes / allocated - 1),
             "reserved": found["reserved"] / 2**20},
            {"what": f"{name}, time: {case.label}", "predicted": predicted.total_s, "measured": median, "unit": "s",
             "error %": 100 * (predicted.total_s / median - 1), "limited by": predicted.limited_by},
        ]  # fmt: skip
    report.bars.append(Bar.at_most(f"peak memory on {name}, largest error", max(errors), GPU_PEAK_GOAL))


def run(arguments: argparse.Namespace) -> Report:
    rounds = 2 if arguments.quick else arguments.rounds
    report = Report(str(__doc__).splitlines()[0], rounds, packages=("stoker", "torch", "torchvision"))
    if arguments.gpu:
        compare_gpu(report, (QUICK,) if arguments.quick else GPU_CASES, rounds)
        return report
    if arguments.quick:
        compare_peaks(report, (QUICK,))
        compare_times(report, (QUICK,), {"quick": (QUICK._replace(side=96),)}, rounds)
        time_plan(report, 1, {"model": QUICK.model, "image_size": [64, 64], "weights": "none"})
        return report
    if "peak" in arguments.only:
        compare_peaks(report, PEAK_CASES)
    if "time" in arguments.only:
        groups = {"four held-out models": HELD_OUT}
        if arguments.second:
            groups["four more models, held out to the end"] = SECOND_HELD_OUT
        compare_times(report, CALIBRATION, groups, rounds)
    if "plan" in arguments.only:
        time_plan(report, 3, {"model": "retinanet_resnet50_fpn", "image_size": [800, 800], "weights": "none"})
    report.rows.append({"what": "load of the machine, 1 minute, at the end", "measured": os.getloadavg()[0]})
    return report


def parser() -> argparse.ArgumentParser:
    made = options(__doc__)
    made.add_argument("--rounds", type=int, default=7, help="steps of each model that the medians are of")
    made.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="some of the parts")
    made.add_argument("--second", action="store_true", help="also the second group of held-out models")
    made.add_argument("--gpu", action="store_true", help="measure this machine's GPU instead of its CPU")
    return made


if __name__ == "__main__":
    serve_child({"plan": plan, "prepare": prepare, "peaks": peaks, "times": times, "gpu": gpu})
    publish(run, parser())
