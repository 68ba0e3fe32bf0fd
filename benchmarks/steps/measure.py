"""What `stoker.measure` costs a loop: a step with it and the same step without, in turn.

The loop waits for a batch, does a step and logs its loss; the step is empty, so that the difference is what is added,
in CPU time of the thread, which excludes other load. Real steps take milliseconds to seconds.
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

import stoker
from benchmarks.report import Bar, Report, options, publish, spread
from stoker.profiling.measure import Measure


class Off:
    """The calls, doing nothing."""

    def data(self, batches: Iterable[Any]) -> Iterable[Any]:
        return batches

    def step(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def log(self, **values: Any) -> None:
        del values


def loop(m: Measure | Off, batches: list[Any], loss: Any) -> float:
    """CPU-seconds of one turn, the mean over all batches; a turn of a second writes a line."""
    began = time.thread_time()
    for _ in m.data(batches):
        with m.step():
            pass
        m.log(loss=loss)
    return (time.thread_time() - began) / len(batches)


def run(quick: bool) -> Report:
    warnings.simplefilter("error")
    rounds, count = (20, 2000) if quick else (60, 10_000)
    batches, loss = [(torch.zeros(2, 3), torch.zeros(2))] * count, torch.zeros(())
    took: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder, stoker.measure(Path(folder) / "run") as m:
        for number in range(rounds):
            for on in (True, False) if number % 2 else (False, True):
                took[on].append(loop(m if on else Off(), batches, loss))
    report = Report(f"Cost of stoker.measure around an empty step on a CPU, a mean of {count:,}", rounds)
    report.packages = ("stoker", "torch")
    report.rows = [
        {"what": what, **{f"{name} µs": value * 1e6 for name, value in spread(took[on]).items()}}
        for what, on in (("step without", False), ("step with", True))
    ]
    added_s = statistics.median(took[True]) - statistics.median(took[False])
    report.bars = [Bar.at_most("µs that a step costs more", added_s * 1e6, 15.0)]
    return report


if __name__ == "__main__":
    publish(lambda arguments: run(arguments.quick), options(__doc__))
