"""Experiments that confirm a cause: change one thing of a run for a few dozen steps and measure the speed.

A separate program, so that the run is not touched and `stoker why RUN --probe` does not import torch:

    python -m stoker.training.probe runs/mine

It prints a `schemas.Probe` as a JSON line for each experiment. Steps use the data, settings and loader of the run on
random weights: speed does not depend on them. Rounds before and after the change alternate, and the ratio is a median
of pairs.
"""

import contextlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch

from stoker.config.settings import Config, from_run
from stoker.data.augment import augment_batch
from stoker.data.batch import Batch
from stoker.data.index import Index, open_index_of
from stoker.data.loading.loader import Loader
from stoker.errors import StokerError
from stoker.hardware.device import Device, select_device
from stoker.runs.records import CONFIG, last_attempt
from stoker.runs.schemas import PROBE_KINDS, Probe
from stoker.training.defaults.dry_run import DryRun
from stoker.training.start import make_training_loader, start_worker_processes
from stoker.training.step import LossFn, PlainStep, make_loss_fn

MAX_PAIRS = 8
"""Pairs of rounds of an experiment. With eight, the second smallest and second largest ratio bound the median with 93 %
confidence (order statistics of a binomial)."""
MIN_PAIRS = 3
"""Fewer are no result."""
MIN_ROUND_S = 0.5
"""Minimum length of a round, which has at least two steps: clocks and waits are then below one percent."""
MAX_EXPERIMENT_S = 40.0
"""After this time an experiment begins no further pair."""

MeasureFn = Callable[[int], float]
"""Does so many steps, waits for the device, returns seconds per image."""


class ProbeHarness(DryRun):
    """The run's steps on a model of random weights."""

    def __init__(self, config: Config, index: Index, device: Device) -> None:
        torch.manual_seed(config.run.seed)
        super().__init__(config, index, device)
        self.loss_fn = make_loss_fn(self.optimizer.model, compile=config.run.compile)
        self._processes = start_worker_processes(config, index, device, _ignore_event)

    def make_loader(self, workers: int) -> Loader:
        """A loader as in the run; workers: 0 tunes their number."""
        return make_training_loader(
            self.config.replace(workers=workers or "auto", max_bad_fraction=1.0),
            self.index,
            self.device,
            max_boxes=self.max_boxes,
            log_event=_ignore_event,
            processes=self._processes,
        )

    def measure(
        self, next_batch: Callable[[], Batch], loss_fn: LossFn | None = None, *, warm_up: Callable[[], int] = lambda: 1
    ) -> MeasureFn:
        """Whole steps at a learning rate of 0 with these batches, after as many unmeasured ones as `warm_up` says."""
        micro_batches, autocast = self.config.optim.grad_accum_steps, self.device.autocast(self.config.run.precision)
        step = PlainStep(loss_fn or self.loss_fn, self.optimizer, None, autocast, micro_batches)

        def do_steps(count: int) -> int:
            num_images = 0
            for _ in range(count):
                batch = augment_batch(next_batch(), self.config.data, 0.0)
                num_images += len(batch.images)
                step.forward_backward(batch)
                self.optimizer.step(0.0, 0)
            self.device.synchronize()
            return num_images

        def measure(count: int) -> float:
            do_steps(warm_up())
            start_s = time.perf_counter()
            num_images = do_steps(count)
            return (time.perf_counter() - start_s) / num_images

        return measure

    def measure_with_loader(self, loader: Loader) -> MeasureFn:
        """Steps with loaded images, after as many unmeasured steps as there are prefetch buffers: they are full
        then."""
        return self.measure(lambda: next(loader), warm_up=lambda: loader.stats().prefetch_depth + 1)


def run_experiments(harness: ProbeHarness, attempt: int) -> Iterator[Probe]:
    """All experiments, in the order of PROBE_KINDS."""
    workers = harness.config.run.num_workers
    with contextlib.ExitStack() as stack:
        loader = stack.enter_context(contextlib.closing(harness.make_loader(workers)))
        cached_batch = Batch(*(tensor.clone() for tensor in next(loader)))  # its buffer will be filled again
        baseline = harness.measure_with_loader(loader)
        baseline(2)  # warms up
        steps = max(2, math.ceil(MIN_ROUND_S / (baseline(2) * harness.config.run.batch_size)))
        used_workers = loader.stats().workers
        for kind in PROBE_KINDS:
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
        return baseline, harness.measure(lambda: cached_batch)
    if kind == "double_batch":
        double_batch = Batch(*(torch.cat([tensor, tensor]) for tensor in cached_batch))
        double_batch = double_batch._replace(images=double_batch.images.contiguous(memory_format=torch.channels_last))
        return harness.measure(lambda: cached_batch), harness.measure(lambda: double_batch)
    if kind == "no_allreduce":
        raise _NotApplicable("the run has one process: there is no all-reduce")
    if kind == "compiled":
        if harness.device.is_cpu:
            raise _NotApplicable("on a CPU compiling takes minutes")
        other_loss_fn = make_loss_fn(harness.optimizer.model, compile=not harness.config.run.compile)
        own, other = (harness.measure(lambda: cached_batch, loss_fn) for loss_fn in (None, other_loss_fn))
        return (other, own) if harness.config.run.compile else (own, other)
    num_workers = used_workers + (1 if kind == "more_workers" else -1)
    if num_workers < 1:
        raise _NotApplicable("the loader has one worker")
    loaders = [harness.make_loader(workers) for workers in (used_workers, num_workers)]
    for loader in loaders:
        stack.enter_context(contextlib.closing(loader))
    return harness.measure_with_loader(loaders[0]), harness.measure_with_loader(loaders[1])


def _measure_pairs(kind: str, before: MeasureFn, after: MeasureFn, steps: int, attempt: int) -> Probe:
    before(1), after(1)  # warm-up: kernels are selected, compilation is done
    start_s = time.perf_counter()
    pairs: list[tuple[float, float]] = []
    while len(pairs) < MAX_PAIRS and (len(pairs) < MIN_PAIRS or time.perf_counter() - start_s < MAX_EXPERIMENT_S):
        first, second = (before, after) if len(pairs) % 2 == 0 else (after, before)
        first_s, second_s = first(steps), second(steps)
        pairs.append((first_s, second_s) if first is before else (second_s, first_s))
    return summarize_pairs(kind, pairs, steps=steps * len(pairs), attempt=attempt)


def summarize_pairs(kind: str, pairs: list[tuple[float, float]], *, steps: int, attempt: int) -> Probe:
    """An experiment as a line of the records. pairs: seconds per image before and after."""
    ratios = sorted(a / b for a, b in pairs)
    trim = 1 if len(ratios) >= MAX_PAIRS else 0
    return Probe(
        t=time.time(),
        attempt=attempt,
        probe=kind,
        steps=steps,
        before_img_per_s=1 / statistics.median(a for a, _ in pairs),
        after_img_per_s=1 / statistics.median(b for _, b in pairs),
        ratio=statistics.median(ratios),
        ratio_low=ratios[trim],
        ratio_high=ratios[-1 - trim],
    )


def _ignore_event(_kind: str, _text: str, /, **_: object) -> None:
    """The loader's messages were printed when the run trained."""


def main(run: Path) -> None:
    """Repeats steps of a run that is not live with one thing changed at a time; a JSON line for each experiment."""
    config = from_run(run / CONFIG)[0]
    device = select_device(config.run.device)
    for result in run_experiments(ProbeHarness(config, open_index_of(config.data), device), last_attempt(run)):
        print(msgspec.json.encode(result).decode(), flush=True)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except StokerError as error:
        print(f"stoker: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
