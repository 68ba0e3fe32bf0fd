"""Measures the training step of one model in a process of its own, for gpu.py.

Takes a case as JSON on its command line and writes a line of JSON after each window of steps, so that what was measured
before an error, a kill or a time limit is kept. The step is the training loop's, without the loader: copy of a batch
from pinned memory (while the device works on the batch before, as the loader does it), augmentation, forward, loss,
backward, clip, optimizer, average of weights, sums for the log.
"""

import contextlib
import functools
import itertools
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu import gpu_results
from benchmarks.processes import record
from stoker.config.settings import Config, DataSettings, ModelSettings, OptimSettings
from stoker.data.augment import augment_batch
from stoker.data.batch import NUM_RAND, Batch
from stoker.hardware.device import Device, ReadyEvent
from stoker.hardware.selection import select_device
from stoker.models import MODELS, Detector, build
from stoker.models.layers.convolutions import use_fused_convs
from stoker.models.retinanet import RetinaNet
from stoker.training import make_step, step
from stoker.training.defaults.derive import AUGMENTATIONS, SETTINGS
from stoker.training.defaults.dry_run import make_worst_case_batch
from stoker.training.loss_sums import LossAccumulator
from stoker.training.make_step import CudaCapture, CudaGraphStep
from stoker.training.optim import OptimizerStep
from stoker.training.step import LossFn, PlainStep, make_augment_fn, make_loss_fn, train_step
from tests import fakes

PROFILED, KERNELS, GAPS, NAME = 3, 20, 6, 60
"""Steps under the profiler; how many kernels, and gaps between them, are listed; characters of names that are kept."""
GROUPS = {
    "matching and loss": ("_largest_ious_kernel", "_match_kernel", "_focal_sums_kernel", "_focal_gradient_kernel"),
    "compiled": ("triton",),
    "convolutions": ("conv", "cudnn", "xmma", "gemm", "wgrad", "dgrad", "fprop", "nvjet", "cutlass", "slow_conv"),
    "copies": ("memcpy", "memset"),
}
"""Parts of names of kernels, which say what a kernel belongs to: the first that fits; none: `other`. A compiler puts
names of operators into those of its kernels."""
WINDOWS, STEPS = 7, 10
"""Windows that are timed, and steps of each."""
HOST_BATCHES = 4
"""Batches in pinned memory, which are copied in turn."""
SWITCHES = {suffix: switches for switches, suffix in gpu_results.KERNELS.items()}
"""(fused convolutions, fused loss) by what follows the name of a way to compute."""
DATA = DataSettings(**{name: row[0] for name in AUGMENTATIONS if isinstance(row := SETTINGS[name], tuple)})
"""The augmentation of a training that sets none."""


@dataclass(frozen=True)
class Case:
    """A model with the shapes of its batch. goal: images per second on an H200, None where there is none."""

    model: str
    classes: int
    batch: int
    image_size: tuple[int, int]
    optimizer: str = "sgd"
    precision: str = "bf16"
    slots: int = 96  # of a training on COCO, whose images have up to 93 boxes (`samples.compute_max_boxes`)
    goal: float | None = None

    def trial(self) -> fakes.Trial:
        """The same step on the fake accelerator."""
        return fakes.Trial(
            model=self.model,
            classes=self.classes,
            batch=self.batch,
            slots=self.slots,
            image_size=self.image_size,
            precision=self.precision,
            optimizer=self.optimizer,
            average=True,
        )


class Work:
    """A model on the device with all that its steps need."""

    def __init__(self, case: Case, device: Device, *, tiny: bool = False) -> None:
        torch.manual_seed(0)
        self.case, self.device, self.tiny = case, device, tiny
        self.windows, self.steps = (2, 1) if tiny else (WINDOWS, STEPS)
        self.model = calibrated_model(case, device)
        device.prepare_for_fixed_shapes()  # as training does it; the images before had other shapes
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
        self.batch = random_batch(case, device)  # of what is measured without copies
        self.batches = CopiedBatches(case, device)
        self.use_kernels("")
        self.done = 0

    def use_kernels(self, suffix: str) -> None:
        """suffix: of `gpu_results.KERNELS`. What was compiled is compiled again."""
        convs, loss = SWITCHES[suffix]
        use_fused_convs(self.model, convs)
        if isinstance(self.model, RetinaNet):
            self.model.fused_loss = loss
        self._eager = make_loss_fn(self.model, compile=False)
        self._compiled = make_loss_fn(self.model, compile=True)
        self._compiled_augment = make_augment_fn(DATA, compile=not self.device.is_cpu)

    def step(self, train: Callable[[Batch], None]) -> None:
        """What `training.loop.Training.step` does."""
        self.train(train, next(self.batches))

    def train(self, train: Callable[[Batch], None], batch: Batch) -> None:
        """The same with a batch that is on the device."""
        self.stepper.set_scalars(1e-5, self.done)
        train(batch)
        self.done += 1

    def eagerly(self, batch: Batch) -> None:
        self._train(self._eager, augment_batch(batch, DATA, 0.0))

    def compiled(self, batch: Batch) -> None:
        self._train(self._compiled, self._compiled_augment(batch, 0.0))

    def _train(self, compute: LossFn, batch: Batch) -> None:
        train_step(PlainStep(compute, self.stepper, self.meter, self.device.autocast(self.case.precision)), batch)

    def per_s(self, train: Callable[[Batch], None], steps: int) -> float:
        """Images per second over some steps."""
        self.device.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            self.step(train)
        self.device.synchronize()
        return steps * self.case.batch / (time.perf_counter() - began)


class CopiedBatches:
    """Random batches in pinned memory, in turn: each is copied to the device on a stream of its own while the device
    works on the one before (`data.loading.loader`)."""

    def __init__(self, case: Case, device: Device) -> None:
        self._stream = device.make_stream()
        few = [pin(random_batch(case, Device(torch.device("cpu"))), device) for _ in range(HOST_BATCHES)]
        self._host_batches = itertools.cycle(few)
        self._copied: tuple[list[Tensor], ReadyEvent] | None = None  # the first one is copied when it is wanted

    def __next__(self) -> Batch:
        tensors, ready = self._copied or self._stream.to_device(next(self._host_batches))
        self._copied = self._stream.to_device(next(self._host_batches))
        ready.block_main_stream()
        return Batch(*tensors)


def pin(batch: Batch, device: Device) -> Batch:
    """A copy in memory from which the device copies without a host sync."""
    pixels = batch.images.permute(0, 2, 3, 1)  # stored like this: channels last
    pinned = [device.empty_host(tensor.shape, tensor.dtype).copy_(tensor) for tensor in (pixels, *batch[1:])]
    return Batch(pinned[0].permute(0, 3, 1, 2), *pinned[1:])


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


def memory(work: Work, train: Callable[[Batch], None]) -> dict[str, Any]:
    """Peak bytes of two steps on one batch, with all augmentations: what `fakes.try_step` does."""
    if work.device.is_cpu:
        return {}
    work.device.empty_cache()
    work.device.reset_peak_memory()
    for _ in range(2):
        work.train(train, augment_batch(work.batch, fakes.AUGMENTATIONS, 0.0))
    work.device.synchronize()
    return {"peak bytes": work.device.memory().peak, "reserved bytes": torch.cuda.max_memory_reserved()}


@contextlib.contextmanager
def forbidden_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def waits(work: Work, train: Callable[[Batch], None]) -> dict[str, Any]:
    """Whether a step makes the host sync; the first line of CUDA's own message where it does."""
    work.step(train)  # what happens once
    if work.device.is_cpu:
        return {}
    try:
        with forbidden_waits():
            work.step(train)
    except RuntimeError as error:
        work.stepper.zero_grad()
        return {"waits": 1, "wait": str(error).splitlines()[0]}
    return {"waits": 0}


def flops(work: Work) -> dict[str, Any]:
    """FLOPs of a step an image, of convolutions and matrix products: 2 for a multiply-add."""
    with FlopCounterMode(display=False, custom_mapping=fakes.FLOP) as counter:
        work.train(work.eagerly, work.batch)
    return {"flops": counter.get_total_flops() / work.case.batch}


def kernels(work: Work, train: Callable[[Batch], None]) -> dict[str, Any]:
    """The kernels that take most of the device's time (operators on a CPU), the fraction of the time in which it has
    nothing to do, and after which kernels it is idle for longest."""
    on_cpu = work.device.is_cpu
    work.step(train)
    work.device.synchronize()
    with profile(activities=[ProfilerActivity.CPU, *([] if on_cpu else [ProfilerActivity.CUDA])]) as profiler:
        began = time.perf_counter()
        for _ in range(PROFILED):
            work.step(train)
        work.device.synchronize()
        took_s = time.perf_counter() - began
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    spans: list[Span] = []
    for event in profiler.events():
        if on_cpu:
            times[event.name] += event.self_cpu_time_total
        elif event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            times[event.name] += event.time_range.elapsed_us()
            spans.append((event.time_range.start, event.time_range.end, event.name))
        else:
            continue
        calls[event.name] += 1
    total = sum(times.values())
    top = [
        {"share": us / total, "calls a step": calls[name] // PROFILED, "name": name[:NAME]}
        for name, us in times.most_common(KERNELS)
    ]
    gaps = [
        {"ms a step": us / 1e3 / PROFILED, "name": f"idle after {name}"[:NAME]}
        for name, us in idle_us(spans).most_common(GAPS)
    ]
    groups: Counter[str] = Counter()
    for name, us in times.items():
        groups[group_of(name)] += us / 1e3 / PROFILED  # type: ignore[assignment]  # a Counter of floats
    found = {"kernels": top, "gaps": gaps, "idle": idle_fraction(spans), "profiled ms": 1e3 * took_s / PROFILED}
    return {**found, "ms by group": dict(groups)}


def group_of(kernel: str) -> str:
    """Which of GROUPS a kernel belongs to."""
    return next((group for group, parts in GROUPS.items() if any(part in kernel.lower() for part in parts)), "other")


Span = tuple[float, float, str]
"""First and last microsecond of a kernel, and its name."""


def idle_us(spans: list[Span]) -> Counter[str]:
    """Microseconds in none of the spans, by the name of the span that ended before."""
    gaps: Counter[str] = Counter()
    until, last = float("inf"), ""
    for begin, end, name in sorted(spans):
        if begin > until:
            gaps[last] += begin - until  # type: ignore[assignment]  # a Counter of floats
        if until == float("inf") or end > until:
            until, last = end, name
    return gaps


def idle_fraction(spans: list[Span]) -> float | None:
    """Fraction of the time from the first beginning to the last end that is in none of the spans; None without any."""
    if not spans:
        return None
    wall = max(end for _, end, _ in spans) - min(spans)[0]
    return idle_us(spans).total() / wall


about: dict[str, Any] = {}
"""What and how this process measures: part of each of its lines."""


def say(**found: Any) -> None:
    if found:
        record(**about, **found)


def measure_machine(_given: dict[str, Any], device: Device) -> None:
    """Hardware and versions. That the device computes at all, `select_device` has tried."""
    import torchvision

    found: dict[str, Any] = {"device": device.name, "Python": platform.python_version(), "torch": torch.__version__,
                             "torchvision": torchvision.__version__}  # fmt: skip
    if device.kind == "cuda":
        asked = "driver_version,memory.total,clocks.max.sm,clocks.max.memory,power.limit,mig.mode.current"
        properties = torch.cuda.get_device_properties(device.torch_device)
        found |= {"CUDA": torch.version.cuda, "cuDNN": torch.backends.cudnn.version(),
                  "multiprocessors": properties.multi_processor_count}  # fmt: skip
        try:
            answer = subprocess.run(
                ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"],
                capture_output=True, text=True, timeout=10, check=True,
            )  # fmt: skip
            found |= dict(zip(asked.split(","), answer.stdout.splitlines()[0].split(", "), strict=False))
        except (OSError, subprocess.SubprocessError, IndexError) as error:
            found["nvidia-smi"] = str(error)
    say(**found)


def measure_predicted(given: dict[str, Any], device: Device) -> None:
    """Peak memory of a step of each case, as the fake accelerator of the tests counts it, several at once."""

    def predict(case: Case) -> None:
        try:
            outcome = fakes.run(case.trial())[0]
            found = {"predicted bytes": outcome.peak} if outcome.error is None else {"error": outcome.error}
        except (fakes.FakeAcceleratorBroken, subprocess.TimeoutExpired) as error:
            found = {"error": str(error)[-400:]}
        record(what=case.model, how="predicted", **found)

    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 2)) as pool:
        list(pool.map(predict, [case_of(one, device, tiny=given["tiny"]) for one in given["cases"]]))


def measure_eager(work: Work) -> None:
    work.per_s(work.eagerly, work.steps)  # what happens in the first steps: algorithms, memory, clocks
    for _ in range(work.windows):
        say(**{"img/s": work.per_s(work.eagerly, work.steps)})
    say(**waits(work, work.eagerly))
    say(**memory(work, work.eagerly))
    if about["how"] == "eager":  # the counter knows no fused convolution
        say(**flops(work))
    stats = work.meter.read([tensor.cpu() for tensor in work.meter.take()], work.done)
    say(skipped=stats.skipped_steps, steps=work.done)


def measure_compiled(work: Work) -> None:
    """In turn with the eager step."""
    compile_now(work)
    work.per_s(work.compiled, work.steps)
    say(**{"img/s": work.per_s(work.compiled, work.steps)})  # a first figure before the eager step is tried
    work.per_s(work.eagerly, work.steps)
    for _ in range(work.windows - 1):
        compiled = work.per_s(work.compiled, work.steps)
        say(**{"img/s": compiled, "eager img/s": work.per_s(work.eagerly, work.steps)})
    say(**waits(work, work.compiled))
    say(**memory(work, work.compiled))


def compile_now(work: Work) -> None:
    began = time.perf_counter()
    work.train(work.eagerly, work.batch)  # makes what the model keeps: anchors; cuDNN tries its engines
    work.device.synchronize()
    say(first_s=time.perf_counter() - began)
    began = time.perf_counter()
    work.train(work.compiled, work.batch)
    work.device.synchronize()
    say(compile_s=time.perf_counter() - began, graphs=torch._dynamo.utils.counters["stats"]["unique_graphs"])


def measure_profile(work: Work) -> None:
    """Compiled, with fused kernels where the model has any, and eager. The programs come from the cache, if
    `measure_compiled` ran before. Fused kernels come last: they may fail."""
    compile_now(work)
    work.per_s(work.compiled, min(work.windows, work.steps))
    say(compiled=kernels(work, work.compiled))
    work.per_s(work.eagerly, min(work.windows, work.steps))
    say(eager=kernels(work, work.eagerly))
    if any(hasattr(module, "fused_convs") for module in work.model.modules()):
        work.use_kernels(" fused")
        compile_now(work)
        work.per_s(work.compiled, min(work.windows, work.steps))
        say(**{"compiled fused": kernels(work, work.compiled)})


def measure_choice(work: Work) -> None:
    """Which kernels a compiled training of this case would choose at its start, and the times of each side, which are
    those of each switch alone."""
    if work.tiny:
        make_step.ROUNDS = make_step.CALLS = 1
    case = work.case
    setup: Any = SimpleNamespace(
        model=work.model,
        device=work.device,
        config=Config().replace(
            precision=case.precision,
            image_size=case.image_size,
            compile=not work.device.is_cpu,  # a minute there
        ),
        rank_batch_size=case.batch,
        micro_batches=1,
        max_boxes=case.slots,
        index=SimpleNamespace(class_names=tuple(map(str, range(case.classes)))),
    )
    began = time.perf_counter()
    make_step._measure_kernels(setup, lambda _, text, **data: say(choice=text.removeprefix("kernels: "), **data))
    say(choice_s=time.perf_counter() - began)


def measure_graph(work: Work, *, compiled: bool = True) -> None:
    """The step with its augmentation as a CUDA graph (`training.make_step`). A capture that fails ends the process."""
    if compiled:
        compile_now(work)
    capture = NoCapture() if work.device.is_cpu else CudaCapture()
    graphed = CudaGraphStep(work.compiled if compiled else work.eagerly, capture)
    work.per_s(graphed, 4)  # warm-up and capture
    for _ in range(work.windows):
        say(**{"img/s": work.per_s(graphed, work.steps)})


class NoCapture(CudaCapture):
    """On a CPU, which has no graphs: a replay is the step itself."""

    def __init__(self) -> None:
        """Without the stream of a CUDA device."""

    def warm_up(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        return step


def measure_convolutions(work: Work) -> None:
    """The largest convolutions of the step with separate operators, with the fastest algorithms and with those that
    cuDNN's heuristics choose: in this process with cudnn.benchmark, in another one without, since a process keeps its
    first choice for a shape. So which convolutions there are, a step of few images says, without trying algorithms."""
    from benchmarks.gpu import gpu_convolutions

    say(**gpu_convolutions.ceilings(work.device, tiny=work.tiny))
    few = random_batch(replace(work.case, batch=2), work.device)
    with torch.backends.cudnn.flags(enabled=True, benchmark=False):
        found = gpu_convolutions.largest(lambda: work.train(work.eagerly, few))
    largest = [replace(one, x=(work.case.batch, *one.x[1:])) for one in found]
    say(**{"TFLOP of the step": gpu_convolutions.total_tflop(largest), "number": len(largest)})
    chosen = largest[: gpu_convolutions.LARGEST]
    gpu_convolutions.measure(chosen, work.device, say, benchmark=True)
    request = {
        "how": "heuristics",
        "device": str(work.device.torch_device),
        "tiny": work.tiny,
        "case": asdict(work.case),
    }
    request["convolutions"] = [asdict(convolution) for convolution in chosen]
    subprocess.run([sys.executable, __file__, json.dumps(request)], timeout=60, check=False)


def measure_heuristics(given: dict[str, Any], device: Device) -> None:
    from benchmarks.gpu import gpu_convolutions

    torch.backends.cudnn.benchmark = False
    about["how"] = "convolutions"
    chosen = [gpu_convolutions.Convolution.read(one) for one in given["convolutions"]]
    gpu_convolutions.measure(chosen, device, say, benchmark=False)


def case_of(given: dict[str, Any], device: Device, *, tiny: bool) -> Case:
    """tiny: with few and small images, in the precision that the device computes fast. Not smaller: at 64 pixels a
    level is a single place, for which bf16 convolutions on a CPU leave parts of the weight's gradient uninitialized
    (torch 2.15)."""
    case = Case(**{**given, "image_size": tuple(given["image_size"])})
    if not tiny:
        return case
    side = 128 if "ssd" not in case.model else case.image_size[0]
    precision = device.best_precision()[0]
    return replace(case, batch=4, image_size=(side, side), classes=5, slots=8, precision=precision, goal=None)


WITHOUT_MODEL: dict[str, Callable[[dict[str, Any], Device], None]] = {
    "machine": measure_machine,
    "predicted": measure_predicted,
    "heuristics": measure_heuristics,
}
MEASURES: dict[str, Callable[[Work], None]] = {
    "convolutions": measure_convolutions,
    "compiled": measure_compiled,
    "eager": measure_eager,
    "profile": measure_profile,
    "graph": measure_graph,
    "choice": measure_choice,
    "eager graph": functools.partial(measure_graph, compiled=False),
}


def main(given: dict[str, Any]) -> None:
    """given: how, device, tiny; case, or cases for `predicted`."""
    how, tiny = given["how"], given["tiny"]
    about.update(what=given["case"]["model"] if "case" in given else how, how=how)
    device = select_device(given["device"])
    if device.is_cpu:
        step.COMPILE_BACKEND = "eager"  # a rehearsal: no program of the model is made, which takes a minute
    if how in WITHOUT_MODEL:
        WITHOUT_MODEL[how](given, device)
        return
    case = case_of(given["case"], device, tiny=tiny)
    say(case=asdict(case), tiny=tiny, device=device.name)
    work = Work(case, device, tiny=tiny)
    if gpu_results.ALL_ENGINES in how:
        torch.backends.cudnn.benchmark_limit = 0
    base, fused, which = how.removesuffix(gpu_results.ALL_ENGINES).partition(" fused")
    work.use_kernels(fused + which)
    MEASURES[base](work)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
