"""What a training step needs on an accelerator that need not be here: memory and time, with their error.

The step is traced without memory (`trace.py`), its time computed on a roofline, and corrected by the user's measured
runs (`stoker_watch/hardware/calibration.py`). An operator takes the longer of its operations at a fraction of the
device's peak and its bytes at a fraction of the bandwidth (Williams et al. 2009, "Roofline"), and a constant for its
kernel. A GPU does this while the host issues the operators; whichever takes longer is the step. The fractions are
fitted to measured steps: those of `assumptions.toml` to the ones named there, `fit` moves them to the user's. The
method and its measured errors are in docs/plan.md. Not here: several devices, prices, the length of a run.
"""

import contextlib
import functools
import math
import re
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from stoker.config.settings import Config
from stoker.data.augment import MOSAIC_GROUP_SIZE
from stoker.data.index import Index
from stoker.data.loading.device_decoder import HostDecode, measure_host_decode
from stoker.data.loading.loader import compute_max_boxes
from stoker.hardware.device import Device
from stoker.knowledge import read_toml
from stoker.planning.machines import GPUS, Accelerator, identify, measure_cpu
from stoker.planning.trace import OperatorKind, StepSpec, StepTrace, TracedStep, Traces
from stoker.training.defaults.derive import derive_for_plan
from stoker.training.defaults.dry_run import MEMORY_FRACTION, DryRun
from stoker_watch.errors import ConfigError, DataError, StokerError, UsageError
from stoker_watch.hardware import calibration
from stoker_watch.hardware.calibration import MeasuredStep, PredictedStep

ASSUMED: dict[str, float] = read_toml("assumptions.toml")["step"]
"""What is added to a trace, and how wide the bands are: `assumptions.toml` has the reasons."""
MIB = 2**20
MAX_SAMPLES = 2
"""Kinds of measured steps that are traced for a device, the most similar and newest: each takes some seconds."""


class Efficiency(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a device reaches of its peaks, and what an operator costs besides; `assumptions.toml` says what each is."""

    convolution: float
    grouped: float
    matmul: float
    bandwidth: float
    kernel_s: float
    issue_s: float
    source: str


_EFFICIENCIES = msgspec.convert(read_toml("assumptions.toml")["efficiency"], dict[str, Efficiency])
CPU, GPU = _EFFICIENCIES["cpu"], _EFFICIENCIES["gpu"]


class Errors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A section of `plan_errors.toml`."""

    of: str
    """What they are, with their number as {rows}."""
    rows: list[tuple[str, float, float]]
    """What, and seconds as predicted and as they were."""


COVERAGE = 0.9
"""Probability that a band contains the next measurement."""
ERRORS = msgspec.convert(read_toml("plan_errors.toml"), dict[str, Errors])


@functools.cache
def learn_error(kind: str, *, without: int | None = None) -> float:
    """The band of predictions of a kind, a key of ERRORS: their time multiplied or divided by 1 + this. It contains the
    next one with the probability COVERAGE, if it is like the rows: the conformal quantile of their errors (Vovk et al.
    2005, "Algorithmic Learning in a Random World"), or the largest of few. without: the number of a row left out."""
    rows = [row for k, row in enumerate(ERRORS[kind].rows) if k != without]
    off = sorted(abs(math.log(predicted_s / actual_s)) for _, predicted_s, actual_s in rows)
    return math.exp(off[min(len(off), math.ceil(COVERAGE * (len(off) + 1))) - 1]) - 1


def describe_error(kind: str) -> str:
    """× or ÷ 1.6, the error of 32 steps on CPUs."""
    errors = ERRORS[kind]
    return f"× or ÷ {1 + learn_error(kind):.2g}, the error of {errors.of.format(rows=len(errors.rows))}"


class StepTime(NamedTuple):
    """Seconds of a step."""

    total_s: float
    compute_s: float
    """Seconds of operators that arithmetic limits; memory_s: of the others; launch_s: of launches."""
    memory_s: float
    launch_s: float

    @property
    def limited_by(self) -> str:
        """What most of the time is spent on."""
        parts = {"compute": self.compute_s, "memory": self.memory_s, "launches": self.launch_s}
        return max(parts, key=parts.__getitem__)


def step_time(
    trace: StepTrace, accelerator: Accelerator, efficiency: Efficiency, *, precision: str, micro_batches: int = 1
) -> StepTime:
    """The time of a step of `micro_batches` times the images of the trace."""
    compute_s = memory_s = 0.0
    launches = 0
    for work in trace.works:
        repeats = work.count * (1 if work.once else micro_batches)
        launches += repeats
        arithmetic_s = work.flops / _reached_flops(accelerator, efficiency, precision, work.kind)
        moving_s = work.moved_bytes / (accelerator.bandwidth * efficiency.bandwidth)
        if arithmetic_s > moving_s:
            compute_s += repeats * arithmetic_s
        else:
            memory_s += repeats * moving_s
    kernels_s, issued_s = launches * efficiency.kernel_s, launches * efficiency.issue_s
    device_s = compute_s + memory_s + kernels_s
    return StepTime(max(device_s, issued_s), compute_s, memory_s, max(kernels_s, issued_s - compute_s - memory_s))


def _reached_flops(accelerator: Accelerator, efficiency: Efficiency, precision: str, kind: OperatorKind) -> float:
    fraction: float = getattr(efficiency, "matmul" if kind == "other" else kind)
    if precision != "fp32" and precision in accelerator.flops:
        fraction *= accelerator.half_fraction
    return fraction * accelerator.peak_flops(precision, is_convolution=kind in ("convolution", "grouped"))


class TimedTrace(NamedTuple):
    """A measured step."""

    trace: StepTrace
    accelerator: Accelerator
    precision: str
    micro_batches: int
    step_s: float


FITTED = ("convolution", "grouped", "matmul", "bandwidth", "kernel_s", "issue_s")
MEASUREMENT_SPREAD, PRIOR_SPREAD = 0.05, 0.5
"""Relative standard deviations: of a measured step between two runs, and of a fraction before any measurement."""
ITERATIONS = 30


def fit(samples: Sequence[TimedTrace], start: Efficiency) -> Efficiency:
    """The efficiency that explains measured steps, near `start` where they do not tell: least squares of relative
    errors (Gauss-Newton on logarithms), with `start` as a measurement of the relative deviation PRIOR_SPREAD."""
    names = [name for name in FITTED if getattr(start, name) > 0]
    origin = np.log([getattr(start, name) for name in names])
    measured = np.log([sample.step_s for sample in samples])

    def efficiency(logarithms: NDArray[np.float64]) -> Efficiency:
        return msgspec.structs.replace(start, **dict(zip(names, map(float, np.exp(logarithms)), strict=True)))

    def predicted(logarithms: NDArray[np.float64]) -> NDArray[np.float64]:
        reached = efficiency(logarithms)
        return np.log([
            step_time(s.trace, s.accelerator, reached, precision=s.precision, micro_batches=s.micro_batches).total_s
            for s in samples
        ])  # fmt: skip

    current = origin.copy()
    prior_weight, step_size = (MEASUREMENT_SPREAD / PRIOR_SPREAD) ** 2, 1e-3
    for _ in range(ITERATIONS):
        at_current = predicted(current)
        slopes = np.stack(
            [(predicted(current + step_size * row) - at_current) / step_size for row in np.eye(len(names))], axis=1
        )
        gradient = slopes.T @ (at_current - measured) + prior_weight * (current - origin)
        change = np.linalg.solve(slopes.T @ slopes + prior_weight * np.eye(len(names)), gradient)
        current -= np.clip(change, -0.5, 0.5)
        if np.abs(change).max() < 1e-4:
            break
    return efficiency(current)


class StepPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step on one device."""

    accelerator: str
    model: str
    image_size: tuple[int, int]
    """Height, width."""
    batch_size: int
    """Images per device and step."""
    micro_batches: int = 1
    """Parts that the batch is computed in, so that it fits (`grad_accum_steps`)."""
    precision: str
    peak_bytes: int
    """Bytes of the device's memory, with what a GPU needs besides tensors: context, workspaces, fragmentation."""
    peak_error: float
    """Relative half-width of its band."""
    memory_bytes: int
    fits: bool
    """Whether the step fits the memory that `--auto-batch` would let it use."""
    step_s: float
    """Forward, backward, optimizer of one step, without waiting for data."""
    step_error: float
    """The time multiplied or divided by 1 + this is its band."""
    error_of: str
    """Key of ERRORS: cpu and gpu without a measured step of the device, else other_model or same_model."""
    limited_by: str
    """compute, memory or launches: what most of the step's time is spent on."""
    parameters: int
    """Trainable ones."""
    gradient_bytes: int
    """What an all-reduce sends."""
    source: str
    """What the time rests on: measured runs, or assumptions."""


def predict_steps(
    config: Config, index: Index, accelerators: Sequence[Accelerator], *, batch_size: int | Sequence[int]
) -> list[StepPrediction]:
    """A prediction for each accelerator, in their order. The training that follows finds it in the calibration file.
    batch_size: images per device and step, for all or for each. What does not fit is computed in micro-batches, as
    training does it. One call is faster than several. Raises StokerError where a step cannot be traced."""
    sizes = [batch_size] * len(accelerators) if isinstance(batch_size, int) else batch_size
    jobs = [_make_job(config, index, accelerator, size) for accelerator, size in zip(accelerators, sizes, strict=True)]
    traces = Traces()
    traces.add([job.step() for job in jobs] + [job.measured_step(line) for job in jobs for line in job.measured])
    large = [job for job in jobs if not job.fits(traces.get(job.step()).peak_bytes)]
    traces.add(job.step(min(job.unit, job.batch_size)) for job in large)
    parts = [_choose_parts(job, traces) if job in large else 1 for job in jobs]
    traces.add(job.step(job.batch_size // count) for job, count in zip(jobs, parts, strict=True))
    predictions = [_predict(job, traces, count) for job, count in zip(jobs, parts, strict=True)]
    _remember(predictions, accelerators)
    return predictions


class _Job(NamedTuple):
    accelerator: Accelerator
    config: Config
    spec: StepSpec
    measured: list[MeasuredStep]
    """The runs on such a device that tell most about this one."""
    batch_size: int

    @property
    def memory_bytes(self) -> int:
        """Memory by which the step chooses its blocks; a CPU's do not depend on it."""
        return 0 if self.accelerator.is_cpu else self.accelerator.memory_bytes

    @property
    def unit(self) -> int:
        """Images of the smallest batch: of a mosaic, or two, with which every norm has a variance."""
        return MOSAIC_GROUP_SIZE if self.config.data.mosaic > 0 else 2

    def step(self, size: int | None = None) -> TracedStep:
        """A step of `size` images; None: of the whole batch."""
        return TracedStep(self.spec, size or self.batch_size, self.memory_bytes)

    def measured_step(self, line: MeasuredStep) -> TracedStep:
        """A micro-batch of a measured step."""
        spec = StepSpec(
            settings=line.settings, num_classes=line.num_classes, max_boxes=line.max_boxes, on_cpu=line.threads > 0
        )
        return TracedStep(spec, line.batch_size // max(1, line.micro_batches), self.memory_bytes)

    def fits(self, tensor_bytes: float) -> bool:
        """Whether automatic batch size lets a step use so many bytes of tensors (`DryRun.budget_bytes`)."""
        context = 0 if self.accelerator.is_cpu else MIB * ASSUMED["context_mib"]
        return tensor_bytes <= int(MEMORY_FRACTION * (self.accelerator.memory_bytes - context))


def _make_job(config: Config, index: Index, accelerator: Accelerator, batch_size: int) -> _Job:
    if "precision" not in config.set_fields():
        config = config.replace(precision=accelerator.precision())
    config, _ = derive_for_plan(config, index, Device(torch.device("cpu" if accelerator.is_cpu else "cuda")))
    if "weight_decay" not in config.set_fields():
        config = config.replace(weight_decay=1e-4)  # any
    spec = StepSpec(
        settings=calibration.step_settings(config.set_fields()),
        num_classes=len(index.class_names),
        max_boxes=compute_max_boxes(index, index.image_indices("train"), mosaic=config.data.mosaic),
        on_cpu=accelerator.is_cpu,
    )
    return _Job(accelerator, config, spec, _most_similar(accelerator, config), batch_size)


def _most_similar(accelerator: Accelerator, config: Config) -> list[MeasuredStep]:
    """At most MAX_SAMPLES kinds of steps that were measured on such a device, with the median of their times."""
    threads = accelerator.threads if accelerator.is_cpu else 0
    kinds: dict[bytes, list[MeasuredStep]] = {}
    for line in calibration.measured_steps(accelerator.matches, threads=threads):
        kinds.setdefault(msgspec.json.encode((line.settings, line.batch_size, line.micro_batches)), []).append(line)
    medians = [
        msgspec.structs.replace(lines[0], step_s=statistics.median(line.step_s for line in lines))
        for lines in kinds.values()
    ]  # the newest first, which sorting keeps
    medians.sort(key=lambda line: (line.model != config.model.model, line.precision != config.run.precision))
    return medians[:MAX_SAMPLES]


def _calibrate(job: _Job, traces: Traces) -> tuple[Efficiency, str]:
    """The default efficiency of such a device, moved to the measured runs of the user, and whose errors are its."""
    start = CPU if job.accelerator.is_cpu else GPU
    samples, lines = [], []
    for line in job.measured:
        with contextlib.suppress(StokerError):  # a line of another version, whose step cannot be traced any more
            trace = traces.get(job.measured_step(line))
            samples.append(TimedTrace(trace, job.accelerator, line.precision, line.micro_batches, line.step_s))
            lines.append(line)
    if not samples:
        return start, "cpu" if job.accelerator.is_cpu else "gpu"
    models = sorted({line.model for line in lines})
    kind = "same_model" if job.config.model.model in models else "other_model"
    date = time.strftime("%Y-%m-%d", time.gmtime(max(line.t for line in lines)))
    source = f"measured on this kind of device, the newest run on {date}: {', '.join(models)}"
    return msgspec.structs.replace(fit(samples, start), source=source), kind


def _choose_parts(job: _Job, traces: Traces) -> int:
    """The number of micro-batches that fit, by a line through the smallest batch and the whole one, which does not, and
    with what `_predict` adds for several. The peak of a batch between them is at most on their line, so what is chosen
    fits; if none does, it is an image each."""
    small, whole = traces.get(job.step(min(job.unit, job.batch_size))), traces.get(job.step())
    image_bytes = (whole.peak_bytes - small.peak_bytes) / max(1, whole.batch_size - small.batch_size)
    for count in range(2, job.batch_size):
        size, rest = divmod(job.batch_size, count)
        kept_bytes = (count - 1) * size * whole.image_bytes + whole.gradient_bytes
        if not rest and job.fits(small.peak_bytes + image_bytes * (size - small.batch_size) + kept_bytes):
            return count
    return job.batch_size


def _predict(job: _Job, traces: Traces, micro_batches: int) -> StepPrediction:
    accelerator, config = job.accelerator, job.config
    efficiency, error_of = _calibrate(job, traces)
    trace, precision = traces.get(job.step(job.batch_size // micro_batches)), config.run.precision
    tensor_bytes = trace.peak_bytes
    if micro_batches > 1:  # the other parts of the batch, and gradients that the first part leaves
        tensor_bytes += (micro_batches - 1) * trace.batch_size * trace.image_bytes + trace.gradient_bytes
    peak_bytes = tensor_bytes
    if not accelerator.is_cpu:
        own_mib = ASSUMED["context_mib"] + ASSUMED["workspace_mib"]
        peak_bytes = int((1 + ASSUMED["fragmentation"]) * tensor_bytes + MIB * own_mib)
    seconds = step_time(trace, accelerator, efficiency, precision=precision, micro_batches=micro_batches)
    return StepPrediction(
        accelerator=accelerator.key,
        model=config.model.model,
        image_size=config.data.image_size,
        batch_size=job.batch_size,
        micro_batches=micro_batches,
        precision=precision,
        peak_bytes=peak_bytes,
        peak_error=ASSUMED["cpu_peak_error"] if accelerator.is_cpu else ASSUMED["gpu_peak_error"],
        memory_bytes=accelerator.memory_bytes,
        fits=job.fits(tensor_bytes),
        step_s=seconds.total_s,
        step_error=learn_error(error_of),
        error_of=error_of,
        limited_by=seconds.limited_by,
        parameters=trace.parameters,
        gradient_bytes=trace.gradient_bytes,
        source=f"{efficiency.source}; {describe_error(error_of)}",
    )


def _remember(predictions: Sequence[StepPrediction], accelerators: Sequence[Accelerator]) -> None:
    """Keeps predictions for the training that follows, which says at its end how far they were off."""
    shared = [name for name in PredictedStep.__struct_fields__ if name in StepPrediction.__struct_fields__]
    lines = [
        PredictedStep(
            t=time.time(),
            device_pattern=accelerator.pattern or re.escape(accelerator.name),
            **{name: getattr(prediction, name) for name in shared},
        )
        for prediction, accelerator in zip(predictions, accelerators, strict=True)
    ]
    with contextlib.suppress(OSError):  # the cache folder is read-only or full: a prediction is worth having without
        calibration.append(*lines)


MEASURED_STEPS, GPU_STEPS, MAX_MEASURED_S = 50, 5, 60.0
"""Steps that `--measure` times, on a GPU some without a wait, as the host runs ahead; and for how long at most."""


def measure_steps(config: Config, index: Index, device: Device) -> None:
    """Times MEASURED_STEPS on this device, after a warm-up, with random images in the shapes of training, and adds the
    median to the calibration file, where plans look for it. config: as planned. Raises UsageError, ConfigError."""
    accelerator = measure_cpu() if device.is_cpu else identify(device.name)
    if accelerator is None:
        raise UsageError(f"--measure: there is no {device.name} in the table of accelerators.", choices=GPUS)
    job = _make_job(config, index, accelerator, config.run.batch_size)
    times: list[float] = []
    steps, begin_s = 1 if device.is_cpu else GPU_STEPS, time.perf_counter()
    try:
        dry_run = DryRun(job.config, index, device)
        batch = dry_run.make_batch(job.batch_size)
        while len(times) < 2 or (
            (len(times) - 1) * steps < MEASURED_STEPS and time.perf_counter() - begin_s < MAX_MEASURED_S
        ):
            start_s = time.perf_counter()
            for _ in range(steps):
                dry_run.step(batch)
            device.synchronize()
            times.append((time.perf_counter() - start_s) / steps)
    except torch.OutOfMemoryError as error:
        what = f"--measure: a step of {job.batch_size} images does not fit {device.name}."
        raise ConfigError(what, fix="a smaller --batch-size") from error
    calibration.append(
        MeasuredStep(
            t=time.time(),
            model=job.config.model.model,
            image_size=job.config.data.image_size,
            batch_size=job.batch_size,
            micro_batches=1,
            precision=job.config.run.precision,
            device=device.name,
            threads=torch.get_num_threads() if device.is_cpu else 0,
            step_s=statistics.median(times[1:]),
            steps=(len(times) - 1) * steps,
            settings=job.spec.settings,
            num_classes=job.spec.num_classes,
            max_boxes=job.spec.max_boxes,
        )
    )


def loader_demand(config: Config, index: Index) -> HostDecode:
    """Measures the decoding of a few images of the training split, at the size of the model's input. Raises DataError
    where none can be decoded, StorageError where a bucket cannot be read."""
    if not {"image_size", "resize"} <= config.set_fields().keys():
        device = Device(torch.device("cpu" if config.run.device == "cpu" else "cuda"))
        config, _ = derive_for_plan(config, index, device)
    decode = measure_host_decode(
        index, index.image_indices("train"), image_size=config.data.image_size, resize=config.data.resize
    )
    if decode is None:
        raise DataError("No image of the training split could be decoded.", location=index.source)
    return decode
