"""Causes by experiment: one thing of a run is changed for a few dozen steps; the speed is measured before and after.

A program of its own, so that nothing of the run is touched and that `stoker why RUN --probe` needs no torch itself:

    python -m stoker.training.probe runs/mine

It prints a `schemas.Probe` as a JSON line for each experiment. Steps are those of the run (its data, settings and
loader) on random weights: speed does not depend on them. Before and after take turns, and the ratio is a median of
pairs. What a run tries by itself while it trains is `input_probe.py`.
"""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from cyclopts import App, Parameter

from stoker.config.settings import Config, from_toml
from stoker.data.augment.device import augment_batch
from stoker.data.batch import Batch
from stoker.data.index import Index, open_index
from stoker.data.loading.loader import Loader, box_slots
from stoker.errors import ConfigError, StokerError
from stoker.hardware.device import Device, pick
from stoker.models import build
from stoker.runs.records import CONFIG, last_attempt
from stoker.runs.schemas import PROBE_KINDS, Probe
from stoker.training.forward import LossesOf, forward_backward, losses_of
from stoker.training.input_probe import LEAST_PAIRS, PAIRS, summed_up
from stoker.training.optim import Stepper
from stoker.training.start import training_loader

ROUND_S = 0.5
"""A round is as many steps as take at least so long, and at least two: clocks and waits are then below a percent."""
LIMIT_S = 40.0
"""An experiment begins no further pair after so long."""

Round = Callable[[int], float]
"""Does so many steps, waits for the device, returns seconds per picture."""


class Bench:
    """The run's steps on a model of random weights."""

    def __init__(self, config: Config, index: Index, device: Device) -> None:
        self.config, self.index, self.device = config, index, device
        torch.manual_seed(config.run.seed)
        model = build(config.model, len(index.class_names)).to(device.torch_device).train()
        self.stepper = Stepper(model, config.optim, device, precision=config.run.precision)
        self.compute = losses_of(model, eager=config.run.eager)
        self.slots = box_slots(index, index.rows("train"), mosaic=config.data.mosaic)

    def loader(self, threads: int) -> Loader:
        """As the run's; threads: 0 tunes them."""
        config = self.config.replace(threads=threads, max_bad=1.0)
        return training_loader(config, self.index, self.device, slots=self.slots, say=_unsaid)

    def step(self, batch: Batch, compute: LossesOf | None = None) -> None:
        """A whole step at a rate of 0."""
        batch = augment_batch(batch, self.config.data, 0.0)
        parts = self.config.optim.accumulate
        autocast = self.device.autocast(self.config.run.precision)
        forward_backward(compute or self.compute, self.stepper, batch, parts, autocast)
        self.stepper.step(0.0, 0)

    def of_loader(self, loader: Loader) -> Round:
        """Steps with loaded pictures; first as many unmeasured ones as the ring holds: it is full then."""

        def measure(steps: int) -> float:
            for _ in range(loader.stats().depth + 1):
                self.step(next(loader))
            return self._timed(lambda: self.step(next(loader)), steps, self.config.run.batch)

        return measure

    def of_batch(self, batch: Batch, compute: LossesOf | None = None) -> Round:
        """Steps on a batch that is there."""

        def measure(steps: int) -> float:
            self.step(batch, compute)
            return self._timed(lambda: self.step(batch, compute), steps, len(batch.images))

        return measure

    def _timed(self, step: Callable[[], None], steps: int, pictures: int) -> float:
        self.device.wait()
        began_s = time.perf_counter()
        for _ in range(steps):
            step()
        self.device.wait()
        return (time.perf_counter() - began_s) / (steps * pictures)


def experiments(bench: Bench, wanted: tuple[str, ...], attempt: int) -> Iterator[Probe]:
    """Each experiment of `wanted`, of PROBE_KINDS, in that order."""
    threads: int = bench.config.run.threads
    with contextlib.ExitStack() as stack:
        loader = stack.enter_context(contextlib.closing(bench.loader(threads)))
        ready = Batch(*(tensor.clone() for tensor in next(loader)))  # its slot will be filled anew
        as_it_is = bench.of_loader(loader)
        steps = _steps_of(as_it_is, bench.config.run.batch)
        used = loader.stats().threads
        for what in PROBE_KINDS:
            if what not in wanted:
                continue
            try:
                with contextlib.ExitStack() as inner:
                    before, after = _sides(bench, what, as_it_is, ready, used, inner)
                    yield _compare(what, before, after, steps, attempt)
            except (_NotDone, torch.OutOfMemoryError) as error:
                bench.device.release_cache()
                yield Probe(
                    t=time.time(), attempt=attempt, what=what, steps=0, before_img_per_s=0.0, after_img_per_s=0.0,
                    ratio=0.0, ratio_low=0.0, ratio_high=0.0, reason=str(error).partition("\n")[0],
                )  # fmt: skip


class _NotDone(Exception):
    """An experiment does not apply to this run."""


def _sides(
    bench: Bench, what: str, as_it_is: Round, ready: Batch, used: int, stack: contextlib.ExitStack
) -> tuple[Round, Round]:
    """What is measured before and after the change."""
    if what == "cached_batch":
        return as_it_is, bench.of_batch(ready)
    if what == "twice_the_batch":
        twice = Batch(*(torch.cat([tensor, tensor]) for tensor in ready))
        twice = twice._replace(images=twice.images.contiguous(memory_format=torch.channels_last))
        return bench.of_batch(ready), bench.of_batch(twice)
    if what == "no_exchange":
        raise _NotDone("the run has one process, which exchanges nothing")
    if what == "compiled":
        if bench.device.is_cpu:
            raise _NotDone("on a CPU compiling takes minutes")
        other = losses_of(bench.stepper.model, eager=not bench.config.run.eager)
        eager, compiled = bench.of_batch(ready), bench.of_batch(ready, other)
        return (eager, compiled) if bench.config.run.eager else (compiled, eager)
    more = what == "more_threads"
    count = used + 1 if more else used - 1
    if count < 1:
        raise _NotDone("the loader has one thread")
    pair = [stack.enter_context(contextlib.closing(bench.loader(number))) for number in (used, count)]
    return bench.of_loader(pair[0]), bench.of_loader(pair[1])


def _steps_of(measure: Round, batch: int) -> int:
    """Steps of a round; the first one warms up and is not looked at."""
    measure(2)
    return max(2, math.ceil(ROUND_S / (measure(2) * batch)))


def _compare(what: str, before: Round, after: Round, steps: int, attempt: int) -> Probe:
    before(1), after(1)  # warm: kernels are chosen, programs compiled
    began_s = time.perf_counter()
    pairs: list[tuple[float, float]] = []
    while len(pairs) < PAIRS and (len(pairs) < LEAST_PAIRS or time.perf_counter() - began_s < LIMIT_S):
        first, second = (before, after) if len(pairs) % 2 == 0 else (after, before)
        one, two = first(steps), second(steps)
        pairs.append((one, two) if first is before else (two, one))
    return summed_up(what, pairs, steps=steps * len(pairs), attempt=attempt)


def _unsaid(_kind: str, _text: str, /, **_: object) -> None:
    """What the run said of its loader it need not say again."""


def program(run: Path, /, *, what: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = PROBE_KINDS) -> None:
    """Repeats steps of a run with one thing changed at a time, and prints a JSON line for each experiment.

    Parameters
    ----------
    run
        Folder of a run of `stoker train` that is not live.
    what
        The experiments; default: all.
    """
    unknown = [name for name in what if name not in PROBE_KINDS]
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is no experiment.", choices=PROBE_KINDS)
    config = from_toml(run / CONFIG)[0]
    device = pick(config.run.device)
    data = config.data
    index = open_index(data.data, format=data.format, val_fraction=data.val_fraction, classes=data.classes or ())
    for found in experiments(Bench(config, index, device), what, last_attempt(run)):
        print(msgspec.json.encode(found).decode(), flush=True)


if __name__ == "__main__":
    app = App(name="python -m stoker.training.probe", default_parameter=Parameter(negative=()))
    app.default(program)
    try:
        app()
    except StokerError as error:
        print(f"stoker: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
