"""Measures the training step of one model in a process of its own, for gpu.py.

Takes a case as JSON on its command line and prints a line of JSON after each part, so that what was measured before an
error or a time limit is kept. The step is the training loop's, without the loader: forward, loss, backward, clip,
optimizer, average of weights, sums for the log; from one batch that lies on the device.
"""

import contextlib
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from stoker.config.settings import ModelSettings, OptimSettings
from stoker.data.augment.device import augment_batch
from stoker.data.batch import NUM_RAND, Batch
from stoker.hardware.device import Device, select_device
from stoker.models import MODELS, Detector, build
from stoker.training import forward
from stoker.training.defaults.dry_run import make_worst_case_batch
from stoker.training.forward import LossFn, forward_backward, make_loss_fn
from stoker.training.optim import LossAccumulator, OptimizerStep
from tests import fakes

PROFILED, KERNELS, NAME = 3, 8, 60
"""Steps under the profiler; how many kernels are listed; characters of their names that are kept."""


@dataclass(frozen=True)
class Case:
    """A model with the shapes of its batch. goal: images per second on an H200, None where there is none."""

    model: str
    classes: int
    batch: int
    image_size: tuple[int, int]
    optimizer: str = "sgd"
    precision: str = "bf16"
    slots: int = 100
    goal: float | None = None

    def trial(self) -> fakes.Trial:
        """The same step on the fake accelerator. Fused SGD does not run there."""
        return fakes.Trial(
            model=self.model,
            classes=self.classes,
            batch=self.batch,
            slots=self.slots,
            image_size=self.image_size,
            precision=self.precision,
            optimizer=self.optimizer,
            fused=self.optimizer == "adamw",
            average=True,
        )


class Work:
    """A model on the device with all that its steps need."""

    def __init__(self, case: Case, device: Device) -> None:
        torch.manual_seed(0)
        self.case, self.device = case, device
        self.model = calibrated_model(case, device)
        optim = OptimSettings(
            optimizer=case.optimizer,
            backbone_lr_mult=1.0,
            momentum=0.9,
            weight_decay=1e-4,
            clip_grad_norm=1.0,
            ema_decay=0.999,
        )
        self.stepper = OptimizerStep(self.model, optim, device, precision=case.precision)
        self.meter = LossAccumulator(device, max_skipped_steps=10**6)
        self.batch = random_batch(case, device)
        self.eager = make_loss_fn(self.model, compile=False)
        self.compiled = make_loss_fn(self.model, compile=True)
        self.done = 0

    def step(self, compute: LossFn, batch: Batch | None = None) -> None:
        """What `training.loop.Training.step` does with a batch."""
        used = self.batch if batch is None else batch
        losses = forward_backward(compute, self.stepper, used, 1, self.device.autocast(self.case.precision))
        norm, bad = self.stepper.step(1e-5, self.done)
        self.meter.add(losses, norm, bad, self.done)
        self.done += 1

    def per_s(self, compute: LossFn, steps: int) -> float:
        """Images per second over some steps."""
        self.device.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            self.step(compute)
        self.device.synchronize()
        return steps * self.case.batch / (time.perf_counter() - began)


def calibrated_model(case: Case, device: Device) -> Detector:
    """Random weights, and frozen norms with the statistics of random images: without, activations overflow."""
    settings = ModelSettings(**{**MODELS[case.model].defaults, "model": case.model})
    trained = build(replace(settings, backbone_norm="bn"), case.classes).to(device.torch_device).train()
    for module in trained.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    few = replace(case, batch=2)
    with torch.no_grad():
        trained(random_batch(few, device).images)
    model = build(settings, case.classes).to(device.torch_device)
    model.load_state_dict(trained.state_dict(), strict=False)  # but for the counts of batches
    return model.train()


def random_batch(case: Case, device: Device) -> Batch:
    """Every box slot filled, pixels and augmentation drawn."""
    batch = make_worst_case_batch(
        case.batch, image_size=case.image_size, max_boxes=case.slots, num_classes=case.classes, device=device
    )
    pixels = torch.randint(0, 256, (case.batch, *case.image_size, 3), dtype=torch.uint8, device=device.torch_device)
    draw = torch.rand(case.batch, NUM_RAND, device=device.torch_device)
    return batch._replace(images=pixels.permute(0, 3, 1, 2), rand=draw)


def memory(work: Work) -> dict[str, Any]:
    """Peak bytes of the first steps, with all augmentations: what `fakes.try_step` does."""
    if work.device.is_cpu:
        return {}
    work.device.empty_cache()
    work.device.reset_peak_memory()
    for _ in range(2):
        work.step(work.eager, augment_batch(work.batch, fakes.AUGMENTATIONS, 0.0))
    work.device.synchronize()
    return {"peak bytes": work.device.memory().peak, "reserved bytes": torch.cuda.max_memory_reserved()}


@contextlib.contextmanager
def forbidden_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def waits(work: Work, compute: LossFn) -> dict[str, Any]:
    """Whether a step makes the host sync; the first line of CUDA's own message where it does."""
    work.step(compute)  # what happens once
    if work.device.is_cpu:
        return {}
    try:
        with forbidden_waits():
            work.step(compute)
    except RuntimeError as error:
        work.stepper._optimizer.zero_grad(set_to_none=True)
        return {"waits": 1, "wait": str(error).splitlines()[0]}
    return {"waits": 0}


def flops(work: Work) -> dict[str, Any]:
    """FLOPs of a step an image, of convolutions and matrix products: 2 for a multiply-add."""
    with FlopCounterMode(display=False, custom_mapping=fakes.FLOP) as counter:
        work.step(work.eager)
    return {"flops": counter.get_total_flops() / work.case.batch}


def kernels(work: Work, compute: LossFn) -> dict[str, Any]:
    """The kernels that take most of the device's time (operators on a CPU), and the share in which it has nothing."""
    on_cpu = work.device.is_cpu
    work.device.synchronize()
    with profile(activities=[ProfilerActivity.CPU, *([] if on_cpu else [ProfilerActivity.CUDA])]) as profiler:
        for _ in range(PROFILED):
            work.step(compute)
        work.device.synchronize()
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    spans: list[tuple[float, float]] = []
    for event in profiler.events():
        if on_cpu:
            times[event.name] += event.self_cpu_time_total
        elif event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            times[event.name] += event.time_range.elapsed_us()
            spans.append((event.time_range.start, event.time_range.end))
        else:
            continue
        calls[event.name] += 1
    total = sum(times.values())
    top = [
        {"share": us / total, "calls a step": calls[name] // PROFILED, "name": name[:NAME]}
        for name, us in times.most_common(KERNELS)
    ]
    return {"kernels": top, "idle": idle_fraction(spans)}


def idle_fraction(spans: list[tuple[float, float]]) -> float | None:
    """Fraction of the time from the first beginning to the last end that is in none of the spans; None without any."""
    if not spans:
        return None
    busy, until = 0.0, min(spans)[0]
    first = until
    for begin, end in sorted(spans):
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return 1 - busy / (until - first)


def say(**found: Any) -> None:
    print(json.dumps(found), flush=True)


def measure_eager(case: Case, device: Device, windows: int, steps: int) -> None:
    work = Work(case, device)
    say(**memory(work))
    say(**waits(work, work.eager))
    say(**flops(work))
    work.per_s(work.eager, steps)  # what happens in the first steps: algorithms, memory, clocks
    say(eager=[work.per_s(work.eager, steps) for _ in range(windows)])
    say(**kernels(work, work.eager))
    sums = work.meter.take()[0].tolist()
    say(skipped=round(sums[-1]), steps=work.done)


def measure_compiled(case: Case, device: Device, windows: int, steps: int) -> None:
    work = Work(case, device)
    work.step(work.eager)  # makes what the model keeps: anchors
    began = time.perf_counter()
    work.step(work.compiled)
    device.synchronize()
    say(compile_s=time.perf_counter() - began, graphs=torch._dynamo.utils.counters["stats"]["unique_graphs"])
    say(**{f"compiled {name}": value for name, value in waits(work, work.compiled).items()})
    for compute in (work.eager, work.compiled):
        work.per_s(compute, steps)
    pairs = [(work.per_s(work.eager, steps), work.per_s(work.compiled, steps)) for _ in range(windows)]
    eager, compiled = ([pair[place] for pair in pairs] for place in (0, 1))
    say(compiled=compiled, speedup=statistics.median(compiled) / statistics.median(eager))
    say(**{f"compiled {name}": value for name, value in kernels(work, work.compiled).items()})


MEASURES = {"eager": measure_eager, "compiled": measure_compiled}

if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    requested = Case(**{**given["case"], "image_size": tuple(given["case"]["image_size"])})
    where = select_device(given["device"])
    if where.is_cpu:
        forward.COMPILE_BACKEND = "eager"  # a rehearsal: no program of the model is made, which takes a minute
    MEASURES[given["how"]](requested, where, given["windows"], given["steps"])
