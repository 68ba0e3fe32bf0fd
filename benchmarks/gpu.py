"""How fast whole training steps are on a GPU, eager and compiled, how much memory they take, and what they wait for.

A step includes the copy of its batch from pinned memory and the augmentation (gpu_case.py). Unattended, in a limited
time: every measurement is a process of its own, in the order of `plan`, which begins with the first of CASES; the
results file is written after each. Peak memory is compared with what the fake accelerator of the tests predicts for the
same step. Other scripts run in between: training with the loader in the loop (end_to_end.py), how fast this machine's
cores load images (loader.py), decoding on the device (nvjpeg.py). `--device cpu` runs all of it with tiny shapes; its
numbers mean nothing.
"""

import argparse
import dataclasses
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from gpu_case import Case
from processes import ROOT, child_environment
from report import Bar, Report, options, publish, table

from stoker.hardware.device import Device, select_device
from tests import fakes

CASES = [
    Case("retinanet_resnet50_fpn", 80, 32, (800, 800), goal=500),
    Case("ember_n", 80, 64, (640, 640), optimizer="adamw", goal=2500),
    Case("faster_rcnn_resnet50_fpn", 80, 16, (800, 1344), goal=262),
    Case("retinanet_resnext50_32x4d_fpn", 264, 32, (800, 800), goal=312),
    Case("ember_s", 80, 64, (640, 640), optimizer="adamw"),
    Case("ember_m", 80, 32, (640, 640), optimizer="adamw"),
    Case("fcos_resnet50_fpn", 80, 32, (800, 800)),
    Case("ssd300_vgg16", 80, 64, (300, 300)),
    Case("ssdlite320_mobilenet_v3_large", 80, 128, (320, 320), optimizer="adamw"),
    Case("retinanet_mobilenet_v2_fpn", 80, 128, (320, 320), optimizer="adamw"),
]
"""The headline case first; the goals are for an H200."""
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bf16 of the SXM parts, from NVIDIA's data sheets."""
MEMORY_GOAL = 0.1
HOWS = ("eager", "compiled", "profile", "graph")
"""What is measured of a case: functions of gpu_case.py."""
LIMIT_S = dict.fromkeys(HOWS, 120.0) | {"compiled": 200.0, "loader": 120.0, "end_to_end": 180.0, "nvjpeg": 90.0}
"""Of one process."""
CPU_FACTOR = 5
"""How much longer a process may take with tiny shapes, on a CPU that others use too."""
SCRIPTS = {"end_to_end": ["--runs", "1"], "loader": ["--runs", "3"], "nvjpeg": []}
"""Other scripts that are run here, with their options."""
GIB = 2**30


@dataclasses.dataclass
class StepReport(Report):
    """A report with more tables."""

    kernels: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """What takes the device's time, and after what it is idle: rows of their own in the file."""
    extra_rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Rows of the other scripts, and their bars."""
    extra_bars: list[Bar] = dataclasses.field(default_factory=list)

    def show(self) -> None:
        Report(self.what, self.n, self.packages, self.rows, [*self.bars, *self.extra_bars]).show()
        print(f"\n{table(self.kernels)}\n\n{table(self.extra_rows)}")

    def write(self, path: Path | None) -> None:
        rows, bars = [*self.rows, *self.kernels, *self.extra_rows], [*self.bars, *self.extra_bars]
        Report(self.what, self.n, self.packages, rows, bars).write(path)


def run(arguments: argparse.Namespace) -> Report:
    ends = time.monotonic() + 60 * arguments.minutes
    device = select_device(arguments.device)
    names = [case.model for case in CASES]
    if unknown := sorted(set(arguments.only or ()).difference(names, SCRIPTS)):
        raise RuntimeError(f"no such case: {', '.join(unknown)}; there are {', '.join([*names, *SCRIPTS])}")
    cases = [case for case in CASES if not arguments.only or case.model in arguments.only]
    tiny = device.is_cpu or arguments.quick
    if tiny:
        cases = [shrunk(case, device) for case in cases]
    windows, steps = (2, 1) if tiny else (7, 10)
    report = StepReport(f"Training steps on {device.name}, random images", windows)
    report.packages = ("torch", "torchvision")
    found: dict[str, dict[str, Any]] = {case.model: {} for case in cases}
    with ThreadPoolExecutor(1) as pool:
        predicted = {case.model: pool.submit(predict, case) for case in cases}
        for case, how in plan(cases, arguments.how):
            if case is None:
                if not arguments.only or how in arguments.only:
                    more = ["--device", str(device.torch_device)] if how != "loader" else []
                    add_script(report, how, [*SCRIPTS[how], *more, *(["--quick"] if tiny else [])], ends)
            elif (limit_s := min(ends - time.monotonic(), CPU_FACTOR * LIMIT_S[how] if tiny else LIMIT_S[how])) <= 5:
                found[case.model][f"{how} error"] = "no time was left"
            else:
                requested = {"case": dataclasses.asdict(case), "how": how, "device": str(device.torch_device),
                         "windows": windows, "steps": steps}  # fmt: skip
                found[case.model] |= measure(requested, how, limit_s)
                print(f"{case.model}, {how}: {brief(found[case.model], how)}", file=sys.stderr, flush=True)
            conclude(report, cases, found, predicted, device.name)
            report.write(arguments.json)
        pool.shutdown(cancel_futures=time.monotonic() > ends)
    conclude(report, cases, found, predicted, device.name)
    return report


def plan(cases: list[Case], hows: Sequence[str]) -> list[tuple[Case | None, str]]:
    """(case, what is measured of it), or (None, another script), the most important first."""
    first, others = cases[:1], cases[1:]
    if not first or first[0].model != CASES[0].model:
        first, others = [], cases
    steps: list[tuple[Case | None, str]] = [
        *((case, how) for case in first for how in ("eager", "compiled")),
        (None, "end_to_end"),
        *((case, "eager") for case in others),
        *((case, how) for case in first for how in ("profile", "graph")),
        *((case, "compiled") for case in others),
        (None, "loader"),
        (None, "nvjpeg"),
        *((case, how) for case in others for how in ("profile", "graph")),
    ]
    return [(case, how) for case, how in steps if case is None or how in hows]


def shrunk(case: Case, device: Device) -> Case:
    """The same with few and small images, on a CPU in the precision that it computes fast. Not smaller: at 64 pixels a
    level is a single place, for which bf16 convolutions on a CPU leave parts of the weight's gradient uninitialized
    (torch 2.15)."""
    side = 128 if "ssd" not in case.model else case.image_size[0]
    precision = device.best_precision()[0]
    return dataclasses.replace(
        case, batch=4, image_size=(side, side), classes=5, slots=8, precision=precision, goal=None
    )


def predict(case: Case) -> fakes.Outcome:
    return fakes.run(case.trial(), timeout_s=120)[0]


def measure(requested: dict[str, Any], how: str, limit_s: float) -> dict[str, Any]:
    """What a process of gpu_case.py said, up to an error or the limit, which it says too."""
    command = [sys.executable, str(Path(__file__).with_name("gpu_case.py")), json.dumps(requested)]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as messages:
        error = run_limited(command, limit_s, output, messages)
        messages.seek(0)
        message = messages.read().strip()
        if error is not None and "not done" not in error:
            print(message[-2000:], file=sys.stderr)
            error = (message.splitlines() or [error])[-1]
        output.seek(0)
        lines = [line for line in output.read().splitlines() if line.startswith("{") and line.endswith("}")]
    result: dict[str, Any] = {} if error is None else {f"{how} error": error}
    for line in lines:
        result |= json.loads(line)
    return result


def run_limited(command: list[str], limit_s: float, output: IO[str], messages: IO[str]) -> str | None:
    """Runs a command, and ends it at the limit, with all that it started. Returns why it failed; None if it did not."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=child_environment(), stdout=output, stderr=messages, start_new_session=True
    )
    try:
        return f"exit code {process.returncode}" if process.wait(limit_s) else None
    except subprocess.TimeoutExpired:
        return f"not done in {limit_s:.0f} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def add_script(report: StepReport, name: str, more: list[str], ends: float) -> None:
    """Runs another script of this folder and adds its rows and bars, or why there are none."""
    limit_s = min(CPU_FACTOR * LIMIT_S[name] if "--quick" in more else LIMIT_S[name], ends - time.monotonic())
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, str(Path(__file__).with_name(f"{name}.py")), "--json", str(result), *more]
        error = run_limited(command, max(0.0, limit_s), sys.stderr, sys.stderr)
        if result.exists():  # scripts write it after each part
            found = json.loads(result.read_text(encoding="utf-8"))
            report.extra_rows += found["rows"]
            report.extra_bars += [Bar(**bar) for bar in found["bars"]]
        if error is not None:
            report.extra_rows.append({"what": name, "error": error})


def brief(found: dict[str, Any], how: str) -> str:
    rates = found.get(how)
    message = "" if rates is None else f"{statistics.median(rates):.1f} img/s"
    return " ".join(filter(None, (message, found.get(f"{how} error"))))


def conclude(
    report: StepReport,
    cases: list[Case],
    found: dict[str, dict[str, Any]],
    predicted: dict[str, Future[fakes.Outcome]],
    device_name: str,
) -> None:
    """Fills the report with what is known by now: a row for each case and one for each kernel, and the bars."""
    report.rows, report.bars, report.kernels = [], [], []
    for case in cases:
        known = found[case.model]
        row, bars = model_row(case, known, peak_of(predicted[case.model]), device_name)
        report.rows.append(row)
        report.bars += bars
    for case in cases:
        for how, kind in itertools.product(("", "compiled "), ("kernel", "gap")):
            for entry in found[case.model].get(f"{how}{kind}s", ()):
                report.kernels.append({"what": f"{case.model}, {how or 'eager '}{kind}", **entry})


def peak_of(future: Future[fakes.Outcome]) -> tuple[int | None, str | None]:
    """(bytes, why there are none) of a prediction."""
    if not future.done() or future.cancelled():
        return None, None
    error = future.exception()
    if isinstance(error, fakes.FakeAcceleratorBroken | subprocess.TimeoutExpired):
        return None, str(error).splitlines()[-1]
    outcome = future.result()
    return (None, outcome.error) if outcome.error else (outcome.peak, None)


def model_row(
    case: Case, known: dict[str, Any], predicted: tuple[int | None, str | None], device_name: str
) -> tuple[dict[str, Any], list[Bar]]:
    height, width = case.image_size
    row: dict[str, Any] = {"what": case.model, "classes": case.classes, "image_size": f"{height}×{width}",
                           "batch_size": case.batch, "precision": case.precision,
                           "optimizer": case.optimizer}  # fmt: skip
    bars = []
    for how in ("eager", "compiled", "graph", "eager graph"):
        if how in known:
            rates = known[how]
            row |= {f"{how} img/s": statistics.median(rates), f"{how} min": min(rates), f"{how} max": max(rates)}
            if case.goal is not None:
                bars.append(Bar.at_least(f"{case.model}, {how}: img/s", statistics.median(rates), case.goal))
        for name in ("waits", "wait", "idle", "profiled ms"):
            value = known.get(name if how == "eager" else f"{how} {name}")
            if value is not None:
                row[f"{how} {name}"] = value
        if f"{how} waits" in row:
            bars.append(Bar.at_most(f"{case.model}, {how}: steps that wait", row[f"{how} waits"], 0))
    for name in ("compile_s", "graphs", "speedup", "skipped", *(f"{how} error" for how in (*HOWS, "eager graph"))):
        if name in known:
            row[name] = known[name]
    if "flops" in known:
        row["GFLOP per image"] = known["flops"] / 1e9
        best = max((value for name, value in row.items() if name.endswith("img/s")), default=0.0)
        row["TFLOP/s"] = known["flops"] * best / 1e12
        peaks = [peak for name, peak in PEAK_FLOPS.items() if name in device_name]
        if peaks:
            row["fraction of peak"] = known["flops"] * best / peaks[0]
    peak, reason = predicted
    if peak is not None:
        row["predicted GiB"] = peak / GIB
    if reason is not None:
        row["prediction error"] = reason
    if "peak bytes" in known:
        row |= {"peak GiB": known["peak bytes"] / GIB, "reserved GiB": known["reserved bytes"] / GIB}
        if peak is not None:
            apart = abs(known["peak bytes"] / peak - 1)
            bars.append(Bar.at_most(f"{case.model}: peak memory apart from predicted", apart, MEMORY_GOAL))
    if "compiled peak bytes" in known:
        row["compiled peak GiB"] = known["compiled peak bytes"] / GIB
    return row, bars


def parser() -> argparse.ArgumentParser:
    made = options(__doc__)
    made.add_argument("--device", help="cuda, cpu …; default: the accelerator that torch finds, else the cpu")
    made.add_argument("--only", nargs="+", metavar="NAME", help="these models, or other scripts, only")
    made.add_argument("--how", nargs="+", choices=HOWS, default=HOWS, help="what is measured of a model; default: all")
    made.add_argument("--minutes", type=float, default=9.0, help="measurements that do not fit are left out")
    return made


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and so ends the measurement that runs
    publish(run, parser())
