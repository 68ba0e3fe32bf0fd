"""Processor time and memory of a whole training step on the CPU, beside torchvision's of the same model.

RetinaNet with an FPN of 256 channels and towers of 4 convolutions, 20 classes, frozen norms, SGD. Each side is a
process of its own that waits for its turn (step_child.py), with torch's own number of threads; the steps are taken in
turn. Time at 320 × 320 and 8 images; memory at 800 × 800 and 2, as the growth of the process's peak over what it
holds before its first step. bf16 counts where the processor has instructions for it, and torch may use them.

A processor without AVX-512 is emulated by `ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2`: the matrix products of
both sides are then limited to AVX2, too (MKL_ENABLE_INSTRUCTIONS).
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT, python_path
from benchmarks.report import Bar, Report, options, publish, spread

BODIES = ("mobilenet_v2", "resnet50")
GOALS = {
    ("mobilenet_v2", "fp32"): 0.80,
    ("mobilenet_v2", "bf16"): 0.50,
    ("resnet50", "fp32"): 0.80,
    ("resnet50", "bf16"): 0.45,
}
GOAL_WITHOUT_AVX512 = 0.90
MEMORY_GOAL = 0.8
CHILD = Path(__file__).with_name("step_child.py")


class Side:
    """A process that takes a step when it is told to."""

    def __init__(self, who: str, backbone: str, precision: str, side: int, count: int) -> None:
        self.name = f"{who} {precision}"
        # Each with the environment that it has by itself: importing this benchmark has set one of stoker's.
        environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
        if environment.get("ATEN_CPU_CAPABILITY") == "avx2":
            environment["MKL_ENABLE_INSTRUCTIONS"] = "AVX2"
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), who, backbone, precision, str(side), str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, "PYTHONPATH": python_path(ROOT)},
        )

    def step(self) -> dict[str, float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with exit code {self.process.wait()}")
        found: dict[str, float] = json.loads(line)
        return found


@contextlib.contextmanager
def contest(backbone: str, precisions: tuple[str, ...], side: int, count: int) -> Iterator[list[Side]]:
    sides = [Side("theirs", backbone, "fp32", side, count)]
    sides += [Side("ours", backbone, precision, side, count) for precision in precisions]
    try:
        yield sides
    finally:
        for one in sides:
            one.process.kill()
            one.process.wait()


def run(arguments: argparse.Namespace) -> Report:
    n, side, count, large = (2, 64, 2, 128) if arguments.quick else (7, 320, 8, 800)
    import torch

    from stoker.hardware.selection import select_device

    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    half, why = select_device("cpu").best_precision()
    precisions = ("fp32", "bf16") if half == "bf16" else ("fp32",)
    report = Report(str(__doc__).splitlines()[0], n, packages=("torch", "torchvision"))
    for backbone in BODIES:
        with contest(backbone, precisions, side, count) as sides:
            for one in sides:
                one.step()  # allocates, and chooses kernels
            took: dict[str, list[float]] = {one.name: [] for one in sides}
            for _ in range(n):
                for one in sides:
                    took[one.name].append(one.step()["cpu_s"])
        middle = {name: statistics.median(values) for name, values in took.items()}
        for name, values in took.items():
            report.rows.append(
                {"step": f"{backbone}, {side} px, batch {count}", "side": name}
                | {f"CPU-s, {key}": value for key, value in spread(values).items()}
                | {"ratio": middle[name] / middle["theirs fp32"]}
            )
        for precision in precisions:
            ratio = middle[f"ours {precision}"] / middle["theirs fp32"]
            goal = GOALS[backbone, precision] if has_avx512 else GOAL_WITHOUT_AVX512
            report.bars.append(Bar.at_most(f"{backbone} {precision}: CPU-s, ours / theirs in fp32", ratio, goal))
    for backbone in BODIES:
        peaks: dict[str, float] = {}
        with contest(backbone, precisions, large, 2) as sides:
            for one in sides:
                for _ in range(2):  # the second has all of the optimizer's state
                    peaks[one.name] = one.step()["peak_mib"]
        for name, peak in peaks.items():
            row: dict[str, Any] = {"step": f"{backbone}, {large} px, batch 2", "side": name, "peak MiB": peak}
            report.rows.append(row | {"ratio": peak / peaks["theirs fp32"]})
        ratio = peaks["ours fp32"] / peaks["theirs fp32"]
        report.bars.append(Bar.at_most(f"{backbone} fp32: peak memory, ours / theirs", ratio, MEMORY_GOAL))
    if "bf16" not in precisions:
        print(f"bf16: n/a, {why}")
    return report


if __name__ == "__main__":
    publish(run, options(__doc__))
