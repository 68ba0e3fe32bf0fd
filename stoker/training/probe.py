"""Experiments that confirm a cause: change one thing of a run for a few dozen steps and measure the speed.

A separate program, so that the run is not touched and `stoker why RUN --probe` does not import torch:

    python -m stoker.training.probe runs/mine

It prints a `schemas.Probe` as a JSON line for each experiment. Steps use the data, settings and loader of the run on
random weights: speed does not depend on them. Rounds before and after the change alternate, and the ratio is a median
of pairs. The experiment that a run does by itself while it trains is in `input_probe.py`.
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

from stoker.config.settings import Config, from_run
from stoker.data.augment import augment_batch
from stoker.data.batch import Batch
from stoker.data.index import Index, open_index_of
from stoker.data.loading.loader import Loader, compute_max_boxes
from stoker.errors import ConfigError, StokerError
from stoker.hardware.device import Device, select_device
from stoker.models import build
from stoker.runs.records import CONFIG, last_attempt
from stoker.runs.schemas import PROBE_KINDS, Probe
from stoker.training.input_probe import MAX_PAIRS, MIN_PAIRS, summarize_pairs
from stoker.training.optim import OptimizerStep
from stoker.training.start import make_training_loader, start_worker_processes
from stoker.training.step import LossFn, PlainStep, make_loss_fn

MIN_ROUND_S = 0.5
"""Minimum length of a round, which has at least two steps: clocks and waits are then below one percent."""
MAX_EXPERIMENT_S = 40.0
"""After this time an experiment begins no further pair."""

MeasureFn = Callable[[int], float]
"""Does so many steps, waits for the device, returns seconds per image."""


class ProbeHarness:
    """The run's steps on a model of random weights."""

    def __init__(self, config: Config, index: Index, device: Device) -> None:
        self.config, self.index, self.device = config, index, device
        torch.manual_seed(config.run.seed)
        model = build(config.model, len(index.class_names)).to(device.torch_device).train()
        self.optimizer = OptimizerStep(model, config.optim, device, precision=config.run.precision)
        self.loss_fn = make_loss_fn(model, compile=config.run.compile)
        self._processes = start_worker_processes(config, index, device, _ignore_event)
        self.max_boxes = compute_max_boxes(index, index.image_indices("train"), mosaic=config.data.mosaic)

    def make_loader(self, workers: int) -> Loader:
        """A loader as in the run; workers: 0 tunes their number."""
        config = self.config.replace(workers=workers or "auto", max_bad_fraction=1.0)
        return make_training_loader(
            config,
            self.index,
            self.device,
            max_boxes=self.max_boxes,
            log_event=_ignore_event,
            processes=self._processes,
        )

    def step(self, batch: Batch, loss_fn: LossFn | None = None) -> None:
        """A whole step at a learning rate of 0."""
        batch = augment_batch(batch, self.config.data, 0.0)
        micro_batches = self.config.optim.grad_accum_steps
        autocast = self.device.autocast(self.config.run.precision)
        PlainStep(loss_fn or self.loss_fn, self.optimizer, None, autocast, micro_batches).forward_backward(batch)
        self.optimizer.step(0.0, 0)

    def measure_with_loader(self, loader: Loader) -> MeasureFn:
        """Steps with loaded images, after as many unmeasured steps as there are prefetch buffers: they are full
        then."""

        def measure(steps: int) -> float:
            for _ in range(loader.stats().prefetch_depth + 1):
                self.step(next(loader))
            return self._time_steps(lambda: self.step(next(loader)), steps, self.config.run.batch_size)

        return measure

    def measure_with_batch(self, batch: Batch, loss_fn: LossFn | None = None) -> MeasureFn:
        """Steps on a batch that is already on the device."""

        def measure(steps: int) -> float:
            self.step(batch, loss_fn)
            return self._time_steps(lambda: self.step(batch, loss_fn), steps, len(batch.images))

        return measure

    def _time_steps(self, step: Callable[[], None], steps: int, num_images: int) -> float:
        self.device.synchronize()
        start_s = time.perf_counter()
        for _ in range(steps):
            step()
        self.device.synchronize()
        return (time.perf_counter() - start_s) / (steps * num_images)


def run_experiments(harness: ProbeHarness, kinds: tuple[str, ...], attempt: int) -> Iterator[Probe]:
    """The experiments of `kinds`, in the order of PROBE_KINDS."""
    workers = harness.config.run.num_workers
    with contextlib.ExitStack() as stack:
        loader = stack.enter_context(contextlib.closing(harness.make_loader(workers)))
        cached_batch = Batch(*(tensor.clone() for tensor in next(loader)))  # its buffer will be filled again
        baseline = harness.measure_with_loader(loader)
        steps = _steps_per_round(baseline, harness.config.run.batch_size)
        used_workers = loader.stats().workers
        for kind in PROBE_KINDS:
            if kind not in kinds:
                continue
            try:
                with contextlib.ExitStack() as inner:
                    before, after = _make_before_and_after(harness, kind, baseline, cached_batch, used_workers, inner)
                    yield _measure_pairs(kind, before, after, steps, attempt)
            except (_NotApplicable, torch.OutOfMemoryError) as error:
                harness.device.empty_cache()
                yield Probe(
                    t=time.time(), attempt=attempt, probe=kind, steps=0, before_img_per_s=0.0, after_img_per_s=0.0,
                    ratio=0.0, ratio_low=0.0, ratio_high=0.0, reason=str(error).partition("\n")[0],
                )  # fmt: skip


class _NotApplicable(Exception):
    """An experiment does not apply to this run."""


def _make_before_and_after(
    harness: ProbeHarness,
    kind: str,
    baseline: MeasureFn,
    cached_batch: Batch,
    used_workers: int,
    stack: contextlib.ExitStack,
) -> tuple[MeasureFn, MeasureFn]:
    """The functions that measure without and with the change."""
    if kind == "cached_batch":
        return baseline, harness.measure_with_batch(cached_batch)
    if kind == "double_batch":
        double_batch = Batch(*(torch.cat([tensor, tensor]) for tensor in cached_batch))
        double_batch = double_batch._replace(images=double_batch.images.contiguous(memory_format=torch.channels_last))
        return harness.measure_with_batch(cached_batch), harness.measure_with_batch(double_batch)
    if kind == "no_allreduce":
        raise _NotApplicable("the run has one process: there is no all-reduce")
    if kind == "compiled":
        if harness.device.is_cpu:
            raise _NotApplicable("on a CPU compiling takes minutes")
        other_loss_fn = make_loss_fn(harness.optimizer.model, compile=not harness.config.run.compile)
        eager, compiled = (
            harness.measure_with_batch(cached_batch),
            harness.measure_with_batch(cached_batch, other_loss_fn),
        )
        return (eager, compiled) if not harness.config.run.compile else (compiled, eager)
    is_more = kind == "more_workers"
    num_workers = used_workers + 1 if is_more else used_workers - 1
    if num_workers < 1:
        raise _NotApplicable("the loader has one worker")
    loaders = [
        stack.enter_context(contextlib.closing(harness.make_loader(workers))) for workers in (used_workers, num_workers)
    ]
    return harness.measure_with_loader(loaders[0]), harness.measure_with_loader(loaders[1])


def _steps_per_round(measure: MeasureFn, batch_size: int) -> int:
    """Steps of a round, from a second measurement: the first one warms up."""
    measure(2)
    return max(2, math.ceil(MIN_ROUND_S / (measure(2) * batch_size)))


def _measure_pairs(kind: str, before: MeasureFn, after: MeasureFn, steps: int, attempt: int) -> Probe:
    before(1), after(1)  # warm-up: kernels are selected, compilation is done
    start_s = time.perf_counter()
    pairs: list[tuple[float, float]] = []
    while len(pairs) < MAX_PAIRS and (len(pairs) < MIN_PAIRS or time.perf_counter() - start_s < MAX_EXPERIMENT_S):
        first, second = (before, after) if len(pairs) % 2 == 0 else (after, before)
        first_s, second_s = first(steps), second(steps)
        pairs.append((first_s, second_s) if first is before else (second_s, first_s))
    return summarize_pairs(kind, pairs, steps=steps * len(pairs), attempt=attempt)


def _ignore_event(_kind: str, _text: str, /, **_: object) -> None:
    """The loader's messages were printed when the run trained."""


def program(run: Path, /, *, kinds: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = PROBE_KINDS) -> None:
    """Repeats steps of a run with one thing changed at a time, and prints a JSON line for each experiment.

    Parameters
    ----------
    run
        Folder of a run of `stoker train` that is not live.
    kinds
        The experiments; default: all.
    """
    unknown = [name for name in kinds if name not in PROBE_KINDS]
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is not an experiment.", choices=PROBE_KINDS)
    config = from_run(run / CONFIG)[0]
    device = select_device(config.run.device)
    for result in run_experiments(ProbeHarness(config, open_index_of(config.data), device), kinds, last_attempt(run)):
        print(msgspec.json.encode(result).decode(), flush=True)


if __name__ == "__main__":
    app = App(name="python -m stoker.training.probe", default_parameter=Parameter(negative=()))
    app.default(program)
    try:
        app()
    except StokerError as error:
        print(f"stoker: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
