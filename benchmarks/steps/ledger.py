"""What the accounting costs: the ledger per step, `stoker.measure` per step of a loop, the telemetry sampler per
second, a profiler window every five minutes.

A small convolutional training step runs with the ledger and without, in turn; what the ledger adds is too small to show
in that difference on a machine that does anything else, so its calls are also timed around steps that do nothing. With
it runs what decides whether a profiler window is due; windows themselves are timed apart, by what they say they cost.
`stoker.measure` is timed around a step that is empty, in CPU time of the thread: wait for a batch, step, log a loss.
Runs on the accelerator where there is one, else on the CPU, where windows are taken only when asked for.
"""

import contextlib
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import stoker
from benchmarks.report import Bar, Report, options, publish, spread
from stoker.hardware import device, selection
from stoker.training.trace import EVERY_S, WINDOW_STEPS, Tracer
from stoker_watch.recording.ledger import Ledger
from stoker_watch.recording.measure import Measure
from stoker_watch.recording.telemetry.gpu import GpuSampler
from stoker_watch.recording.telemetry.host import HostSampler
from stoker_watch.runs.records import RunFolder


class Off:
    """The calls of the ledger, the tracer and `stoker.measure`, doing nothing."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        del name
        return contextlib.nullcontext()

    def compute(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def window(self) -> None:
        return None

    def after_step(self, step: int) -> None:
        del step

    def data(self, batches: Iterable[Any]) -> Iterable[Any]:
        return batches

    def step(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def log(self, **values: Any) -> None:
        del values


def silent(kind: str, text: str, /, **data: Any) -> None:
    """Messages of the tracer; a warning means that it cannot measure."""
    del data
    if kind == "warning":
        raise RuntimeError(text)


class Step:
    """One training step of a small network on random images: tens of milliseconds on two cores."""

    def __init__(self, where: device.Device) -> None:
        torch.manual_seed(0)
        layers = [
            nn.Conv2d(3, 32, 3, stride=2),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3),
        ]
        self.model = nn.Sequential(*layers).to(where.torch_device)
        self.images: Tensor = torch.rand(4, 3, 160, 160, device=where.torch_device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.images).square().mean().backward()
        self.optimizer.step()


def step(ledger: Ledger | Off, tracer: Tracer | Off, work: Step | None) -> float:
    """Seconds of one turn of a loop like the training loop's."""
    began = time.perf_counter()
    with ledger.phase("input_wait"):
        pass
    with ledger.compute():
        if work is not None:
            work()
    tracer.after_step(1)
    ledger.window()
    return time.perf_counter() - began


def cpu_s(ledger: Ledger | Off, tracer: Tracer | Off, count: int) -> float:
    """CPU-seconds of one empty step, the mean of `count`: what else the machine does is not in it."""
    began = time.thread_time()
    for _ in range(count):
        step(ledger, tracer, None)
    return (time.thread_time() - began) / count


def windows_s(where: device.Device, ledger: Ledger, work: Step, count: int, folder: Path) -> list[float]:
    """What each of `count` profiler windows costs, by its own account; the first one also loads the profiler."""
    costs = []
    for _ in range(count):
        tracer = Tracer(where, RunFolder(folder, 1), ledger, silent)
        for number in range(3 * WINDOW_STEPS):
            if number == WINDOW_STEPS:
                tracer.request()
            step(ledger, tracer, work)
        tracer.close()
        costs.append(tracer.cost_s)
    return costs


def measured_cpu_s(m: Measure | Off, batches: list[Any], loss: Tensor) -> float:
    """CPU-seconds of an empty step in the calls of `stoker.measure`, the mean over all batches."""
    began = time.thread_time()
    for _ in m.data(batches):
        with m.step():
            pass
        m.log(loss=loss)
    return (time.thread_time() - began) / len(batches)


def cost_of_measure(rounds: int, count: int) -> tuple[list[float], list[float]]:
    """Seconds of a step without and with `stoker.measure`, in turn."""
    warnings.simplefilter("error")
    batches, loss = [(torch.zeros(2, 3), torch.zeros(2))] * count, torch.zeros(())
    took: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder, stoker.measure(Path(folder) / "run") as m:
        for number in range(rounds):
            for on in (True, False) if number % 2 else (False, True):
                took[on].append(measured_cpu_s(m if on else Off(), batches, loss))
    return took[False], took[True]


def row(what: str, seconds: list[float]) -> dict[str, object]:
    return {"what": what, **{f"{name} µs": value * 1e6 for name, value in spread(seconds).items()}}


def run(quick: bool) -> Report:
    rounds, empty = (30, 300) if quick else (100, 2000)
    where = selection.select_device()
    ledger, off, work = Ledger(where.make_clock(), start_s=time.perf_counter()), Off(), Step(where)
    kept = tempfile.TemporaryDirectory()
    tracer = Tracer(where, RunFolder(Path(kept.name), 1), ledger, silent)
    host, gpus = HostSampler(), GpuSampler()
    for _ in range(5):  # what happens once: memory, kernels
        step(off, off, work)
    off_s, on_s, empty_off_s, empty_on_s, sample_s = ([] for _ in range(5))
    for number in range(rounds):
        for on in (True, False) if number % 2 else (False, True):
            where.synchronize()
            which, traced = (ledger, tracer) if on else (off, off)
            (on_s if on else off_s).append(step(which, traced, work))
            where.synchronize()
            (empty_on_s if on else empty_off_s).append(cpu_s(which, traced, empty))
        began = time.thread_time()
        host.sample()
        gpus.sample()
        sample_s.append(time.thread_time() - began)

    tracer.close()
    window_s = windows_s(where, ledger, work, 4 if quick else 10, Path(kept.name))
    kept.cleanup()
    without_s, with_s = cost_of_measure(*((20, 2000) if quick else (60, 10_000)))

    report = Report(f"Cost of the accounting on {where.name}; an empty step is a mean of {empty:,}", rounds)
    report.packages = ("stoker", "torch", "psutil", "nvidia-ml-py")
    report.rows = [
        row("step, ledger off", off_s),
        row("step, ledger on", on_s),
        row("empty step, ledger off, CPU time", empty_off_s),
        row("empty step, ledger on, CPU time", empty_on_s),
        row("telemetry sample, CPU time", sample_s),
        row("profiler window, the first", window_s[:1]),
        row("profiler window, later ones", window_s[1:]),
        row("empty step without stoker.measure, CPU time", without_s),
        row("empty step with stoker.measure, CPU time", with_s),
    ]
    added_s = statistics.median(empty_on_s) - statistics.median(empty_off_s)
    report.bars = [
        Bar.at_most("what the ledger adds to an empty step / a step", added_s / statistics.median(off_s), 0.01),
        Bar.at_most("a step with the ledger / without", statistics.median(on_s) / statistics.median(off_s), 1.01),
        Bar.at_most(
            "cost of a profiler window / the time between two", statistics.median(window_s[1:]) / EVERY_S, 0.003
        ),
        Bar.at_most("CPU time of the telemetry sampler / a second of one core", statistics.median(sample_s), 0.01),
    ]
    added_us = 1e6 * (statistics.median(with_s) - statistics.median(without_s))
    report.bars.append(Bar.at_most("µs that stoker.measure adds to a step", added_us, 15.0))
    return report


if __name__ == "__main__":
    publish(lambda arguments: run(arguments.quick), options(__doc__))
