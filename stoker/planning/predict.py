"""What a training step needs on an accelerator that need not be here: memory and time, with their error.

The step is traced without memory (`trace.py`), its time computed on a roofline (`roofline.py`), and corrected by the
measured runs of the user (`hardware/calibration.py`). The method and its measured errors are in
docs/plan-calibration.md. Not here: several devices, prices, the length of a run.
"""

import concurrent.futures
import contextlib
import itertools
import re
import statistics
import time
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

import msgspec
import torch

from stoker.config.settings import Config
from stoker.data.augment.device import MOSAIC_GROUP_SIZE
from stoker.data.index import Index
from stoker.data.loading.decoder_choice import measure_host_decode
from stoker.data.loading.loader import compute_max_boxes
from stoker.errors import DataError, StokerError
from stoker.hardware import calibration
from stoker.hardware.calibration import MeasuredStep, PredictedStep
from stoker.hardware.cgroup import host_cores
from stoker.hardware.device import Device
from stoker.planning import trace_cache
from stoker.planning.accelerators import Accelerator
from stoker.planning.roofline import Efficiency, Sample, StepTime, default_efficiency, fit, step_time
from stoker.planning.trace import StepSpec, StepTrace, TraceProcess
from stoker.training.defaults.auto_batch import MAX_SLOWDOWN
from stoker.training.defaults.derive import derive_for_plan
from stoker.training.defaults.dry_run import MEMORY_FRACTION

CONTEXT_BYTES = 500 * 2**20
"""What CUDA's context takes: 300 MB with kernels loaded when they are first used (PyTorch issue 107667), up to 700 MB
(issue 37250)."""
WORKSPACE_BYTES = 256 * 2**20
"""cuBLAS takes 8 MiB, cuBLASLt 32 MiB on Hopper (PyTorch pull request 120925); the rest is assumed for cuDNN, which
tries algorithms with a workspace where `cudnn.benchmark` is on."""
FRAGMENTATION = 0.11
"""Bytes that torch's allocator holds beyond those that are allocated: 16,726 MB for 15,006 MB, 19,354 MB for 17,402 MB
(PyTorch issue 40989)."""
GPU_PEAK_ERROR, CPU_PEAK_ERROR = 0.10, 0.03
"""Goals of `benchmarks/plan.py`; the first was never compared with a GPU."""
CALIBRATED_ERROR, SAME_MODEL_ERROR = 0.25, 0.10
"""Relative half-width of the band around a step's time, where steps of other models were measured on such a device, and
where steps of this model were. docs/plan-calibration.md."""
MAX_SAMPLES = 2
"""Kinds of measured steps that are traced for a device, the most similar and newest: each takes some seconds."""


class StepPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step on one device."""

    accelerator: str
    """Its key."""
    model: str
    image_size: tuple[int, int]
    """Height, width."""
    batch_size: int
    """Images per device and step."""
    micro_batches: int = 1
    """Parts that the batch is computed in, so that it fits (`grad_accum_steps`)."""
    precision: str
    peak_bytes: int
    """Of the device's memory, with what a GPU needs besides tensors: context, workspaces, fragmentation."""
    tensor_bytes: int = 0
    """The part that torch's allocator counts as allocated: tensors."""
    peak_error: float
    """Relative half-width of its band."""
    memory_bytes: int
    """That the device has."""
    fits: bool
    """Whether the step fits the memory that `--auto-batch` would let it use."""
    step_s: float
    """Forward, backward, optimizer of one step, without waiting for data."""
    step_error: float
    """Relative half-width of its band."""
    flops: float
    """Of a step: products and sums of convolutions and matrix products, forward and backward."""
    moved_bytes: float
    """Of a step: inputs and outputs of all operators, which the device's memory delivers and takes."""
    launches: int
    """Operators of a step that start work on the device."""
    limited_by: str
    """compute, memory or launches: what most of the step's time is spent on."""
    parameters: int
    """Trainable ones."""
    gradient_bytes: int
    """What an all-reduce sends."""
    source: str
    """Which figures and measurements the time rests on."""


class LoaderDemand(msgspec.Struct, frozen=True, kw_only=True):
    """What loading an image costs, whatever the device that trains."""

    decode_core_s: float
    """Core-seconds to decode and resize an image; measured on this machine."""
    bytes_per_image: float
    """Bytes to read."""
    images: int
    """That were measured."""


def predict_steps(
    config: Config,
    index: Index,
    accelerators: Sequence[Accelerator],
    *,
    batch_size: int | Sequence[int | None] | None = None,
) -> list[StepPrediction]:
    """A prediction for each accelerator, in their order. The training that follows finds it in the calibration file.

    batch_size: images per device and step, for all or for each; None: as many as `--auto-batch` would choose there.
    What does not fit is computed in micro-batches, as training does it. One call is faster than several. Raises
    StokerError where a step cannot be traced.
    """
    sizes = [batch_size] * len(accelerators) if batch_size is None or isinstance(batch_size, int) else batch_size
    jobs = [
        _make_job(config, index, accelerator, requested=size)
        for accelerator, size in zip(accelerators, sizes, strict=True)
    ]
    with _TracePool() as pool:
        wanted = [(job.spec, job.requested, job.memory_bytes) for job in jobs if job.requested is not None]
        wanted += [(*_measured_step(line), job.memory_bytes) for job in jobs for line in job.measured]
        pool.trace(wanted)
        efficiencies = [_calibrate(job, pool) for job in jobs]
        batches = _choose_batches(jobs, efficiencies, pool)
        predictions = [
            _predict(job, efficiency, pool.get(job.spec, size, job.memory_bytes), micro_batches)
            for job, efficiency, (size, micro_batches) in zip(jobs, efficiencies, batches, strict=True)
        ]
    _remember(predictions, accelerators)
    return predictions


class _Job(NamedTuple):
    """The training on one accelerator."""

    accelerator: Accelerator
    config: Config
    spec: StepSpec
    num_images: int
    measured: list[MeasuredStep]
    """The runs on such a device that tell most about this one."""
    requested: int | None = None
    """Images per step; None: not decided."""

    @property
    def precision(self) -> str:
        return self.config.run.precision

    @property
    def memory_bytes(self) -> int:
        """By which the step chooses its blocks; a CPU's do not depend on it."""
        return 0 if self.accelerator.is_cpu else self.accelerator.memory_bytes

    @property
    def unit(self) -> int:
        """Images of the smallest batch: of a mosaic, or two, with which every norm has a variance."""
        return MOSAIC_GROUP_SIZE if self.config.data.mosaic > 0 else 2

    @property
    def base_sizes(self) -> tuple[int, int]:
        """Batch sizes whose traces make a line."""
        return self.unit, 4 * self.unit

    @property
    def budget_bytes(self) -> int:
        """Bytes of tensors that automatic batch size lets a step use (`DryRun.budget_bytes`)."""
        context = 0 if self.accelerator.is_cpu else CONTEXT_BYTES
        return int(MEMORY_FRACTION * (self.accelerator.memory_bytes - context))

    def largest_memory(self, jobs: "Sequence[_Job]") -> int:
        """Of all accelerators that the same step is planned for: they share the traces that make the line."""
        return max(job.memory_bytes for job in jobs if job.spec == self.spec)


def _make_job(config: Config, index: Index, accelerator: Accelerator, *, requested: int | None = None) -> _Job:
    if "precision" not in config.set_fields():
        config = config.replace(precision=accelerator.precision())
    config, _ = derive_for_plan(config, index, Device(torch.device("cpu" if accelerator.is_cpu else "cuda")))
    if "weight_decay" not in config.set_fields():
        config = config.replace(weight_decay=1e-4)  # any
    train_indices = index.image_indices("train")
    spec = StepSpec(
        settings=calibration.step_settings(config.set_fields()),
        num_classes=len(index.class_names),
        max_boxes=compute_max_boxes(index, train_indices, mosaic=config.data.mosaic),
        on_cpu=accelerator.is_cpu,
    )
    return _Job(accelerator, config, spec, len(train_indices), _most_similar(accelerator, config), requested)


def _most_similar(accelerator: Accelerator, config: Config) -> list[MeasuredStep]:
    """At most MAX_SAMPLES kinds of steps that were measured on such a device, with the median of their times."""
    threads = accelerator.threads if accelerator.is_cpu else 0
    kinds: dict[bytes, list[MeasuredStep]] = {}
    for line in calibration.measured_steps(accelerator.matches, threads=threads):
        kinds.setdefault(msgspec.json.encode((line.settings, line.batch_size, line.micro_batches)), []).append(line)

    def distance(lines: list[MeasuredStep]) -> tuple[bool, bool]:
        return lines[0].model != config.model.model, lines[0].precision != config.run.precision

    chosen = sorted(kinds.values(), key=distance)[:MAX_SAMPLES]  # stable: the newest first
    return [
        msgspec.structs.replace(lines[0], step_s=statistics.median(line.step_s for line in lines)) for lines in chosen
    ]


def _measured_step(line: MeasuredStep) -> tuple[StepSpec, int]:
    """The step, and the images of a micro-batch."""
    spec = StepSpec(
        settings=line.settings, num_classes=line.num_classes, max_boxes=line.max_boxes, on_cpu=line.threads > 0
    )
    return spec, line.batch_size // max(1, line.micro_batches)


def _calibrate(job: _Job, pool: "_TracePool") -> Efficiency:
    """The default efficiency of such a device, moved to the measured runs of the user."""
    start = default_efficiency(job.accelerator)
    samples, lines = [], []
    for line in job.measured:
        with contextlib.suppress(StokerError):  # a line of another version, whose step cannot be traced any more
            trace = pool.get(*_measured_step(line), job.memory_bytes)
            samples.append(Sample(trace, job.accelerator, line.precision, line.micro_batches, line.step_s))
            lines.append(line)
    if not samples:
        return start
    models = sorted({line.model for line in lines})
    error = SAME_MODEL_ERROR if job.config.model.model in models else CALIBRATED_ERROR
    date = time.strftime("%Y-%m-%d", time.gmtime(max(line.t for line in lines)))
    source = f"measured on this kind of device, the newest run on {date}: {', '.join(models)}"
    return msgspec.structs.replace(fit(samples, start), error=error, source=source)


def _choose_batches(
    jobs: "Sequence[_Job]", efficiencies: Sequence[Efficiency], pool: "_TracePool"
) -> list[tuple[int, int]]:
    """(images of a micro-batch, micro-batches) of each job, which are traced then."""
    batches: list[tuple[int, int]] = []
    unsure = []
    for number, job in enumerate(jobs):
        batches.append((job.requested or 0, 1))
        whole = None if job.requested is None else pool.get(job.spec, job.requested, job.memory_bytes)
        if whole is None or whole.peak_bytes > job.budget_bytes:
            unsure.append(number)
    pool.trace([(jobs[n].spec, size, jobs[n].largest_memory(jobs)) for n in unsure for size in jobs[n].base_sizes])
    smallest = {}
    for n in unsure:
        small, large = (pool.get(jobs[n].spec, size, jobs[n].largest_memory(jobs)) for size in jobs[n].base_sizes)
        smallest[n] = small
        batches[n] = _choose_batch(jobs[n], efficiencies[n], small, large)
    pool.trace([(jobs[n].spec, batches[n][0], jobs[n].memory_bytes) for n in unsure])
    # A peak beyond two sizes is at least on their line, one between them at most: so the second choice fits.
    for n, small in smallest.items():
        trace = pool.get(jobs[n].spec, batches[n][0], jobs[n].memory_bytes)
        if trace.peak_bytes > jobs[n].budget_bytes and trace.batch_size > small.batch_size:
            batches[n] = _choose_batch(jobs[n], efficiencies[n], small, trace)
    pool.trace([(jobs[n].spec, batches[n][0], jobs[n].memory_bytes) for n in unsure])
    return batches


class _Line(NamedTuple):
    """Peak and time of a step by the number of its images, on a straight line."""

    first: int
    peak: tuple[float, float]
    """At `first`, and of each further image."""
    time: tuple[float, float]

    @classmethod
    def through(cls, job: _Job, efficiency: Efficiency, small: StepTrace, large: StepTrace) -> "_Line":
        times = [_time(job, efficiency, trace, 1).total_s for trace in (small, large)]
        images = large.batch_size - small.batch_size
        return cls(
            small.batch_size,
            (small.peak_bytes, (large.peak_bytes - small.peak_bytes) / images),
            (times[0], (times[1] - times[0]) / images),
        )

    def peak_at(self, count: int) -> float:
        return self.peak[0] + self.peak[1] * (count - self.first)

    def s_per_image(self, count: int) -> float:
        return (self.time[0] + self.time[1] * (count - self.first)) / count


def _choose_batch(job: _Job, efficiency: Efficiency, small: StepTrace, large: StepTrace) -> tuple[int, int]:
    """(images of a micro-batch, micro-batches), by the line through two traces: the requested batch in as few parts as
    fit, or what `--auto-batch` would choose: the smallest power of two whose time per image is almost the best of those
    that fit."""
    line = _Line.through(job, efficiency, small, large)
    if (requested := job.requested) is not None:
        parts = [n for n in range(1, requested + 1) if requested % n == 0]
        fitting = [n for n in parts if line.peak_at(requested // n) <= job.budget_bytes]
        n = fitting[0] if fitting else requested
        return requested // n, n
    sizes = itertools.takewhile(
        lambda size: size == job.unit or (size <= job.num_images and line.peak_at(size) <= job.budget_bytes),
        (job.unit * 2**n for n in itertools.count()),
    )
    candidates = list(sizes)
    best = min(line.s_per_image(size) for size in candidates)
    return next(size for size in candidates if line.s_per_image(size) <= MAX_SLOWDOWN * best), 1


def _time(job: _Job, efficiency: Efficiency, trace: StepTrace, micro_batches: int) -> StepTime:
    return step_time(trace, job.accelerator, efficiency, precision=job.precision, micro_batches=micro_batches)


def _predict(job: _Job, efficiency: Efficiency, trace: StepTrace, micro_batches: int) -> StepPrediction:
    accelerator, config = job.accelerator, job.config
    tensor_bytes = trace.peak_bytes
    if micro_batches > 1:  # the other parts of the batch, and gradients that the first part leaves
        tensor_bytes += (micro_batches - 1) * trace.batch_size * trace.image_bytes + trace.gradient_bytes
    peak_bytes = tensor_bytes
    if not accelerator.is_cpu:
        peak_bytes = int((1 + FRAGMENTATION) * tensor_bytes) + CONTEXT_BYTES + WORKSPACE_BYTES
    seconds = _time(job, efficiency, trace, micro_batches)
    repeated = [work for work in trace.works if not work.once]
    again = micro_batches - 1
    return StepPrediction(
        accelerator=accelerator.key,
        model=config.model.model,
        image_size=config.data.image_size,
        batch_size=micro_batches * trace.batch_size,
        micro_batches=micro_batches,
        precision=job.precision,
        peak_bytes=peak_bytes,
        tensor_bytes=tensor_bytes,
        peak_error=CPU_PEAK_ERROR if accelerator.is_cpu else GPU_PEAK_ERROR,
        memory_bytes=accelerator.memory_bytes,
        fits=tensor_bytes <= job.budget_bytes,
        step_s=seconds.total_s,
        step_error=efficiency.error,
        flops=trace.flops + again * sum(work.count * work.flops for work in repeated),
        moved_bytes=trace.moved_bytes + again * sum(work.count * work.moved_bytes for work in repeated),
        launches=trace.launches + again * sum(work.count for work in repeated),
        limited_by=seconds.limited_by,
        parameters=trace.parameters,
        gradient_bytes=trace.gradient_bytes,
        source=f"{accelerator.source}; {efficiency.source}",
    )


def _remember(predictions: Sequence[StepPrediction], accelerators: Sequence[Accelerator]) -> None:
    """For the training that follows, which says at its end how far they were off."""
    lines = [
        PredictedStep(
            t=time.time(),
            model=prediction.model,
            image_size=prediction.image_size,
            batch_size=prediction.batch_size,
            precision=prediction.precision,
            accelerator=prediction.accelerator,
            device_pattern=accelerator.pattern or re.escape(accelerator.name),
            step_s=prediction.step_s,
            step_error=prediction.step_error,
            peak_bytes=prediction.peak_bytes,
        )
        for prediction, accelerator in zip(predictions, accelerators, strict=True)
    ]
    with contextlib.suppress(OSError):  # the cache folder is read-only or full: a prediction is worth having without
        calibration.append(*lines)


_Wanted = tuple[StepSpec, int, int]
"""Step, images, memory of the device."""


class _TracePool:
    """At most two processes that trace steps at the same time, and what they have traced. The steps of one model are
    traced by the same process, which keeps it."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._traces: dict[str, StepTrace | StokerError] = {}
        self._processes: list[TraceProcess] = []
        self._process_of: dict[bytes, int] = {}

    def __enter__(self) -> "_TracePool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def trace(self, wanted: Sequence[_Wanted]) -> None:
        """Traces what is not traced yet, now or earlier (`trace_cache.py`)."""
        missing = {key: one for one in wanted if (key := trace_cache.key_of(*one)) not in self._traces}
        self._traces |= {key: trace for key in missing if (trace := trace_cache.read(key)) is not None}
        parts: dict[int, list[tuple[str, _Wanted]]] = {}
        for key, one in missing.items():
            if key not in self._traces:
                parts.setdefault(self._assign(one[0]), []).append((key, one))
        if parts:
            with concurrent.futures.ThreadPoolExecutor(len(parts)) as threads:
                for done in threads.map(self._trace_part, parts, parts.values()):
                    self._traces |= done

    def _assign(self, spec: StepSpec) -> int:
        """The number of the process that traces this step."""
        name = msgspec.json.encode(spec)
        if name not in self._process_of:
            number = len(self._process_of) % max(1, min(2, host_cores()))
            if number == len(self._processes):
                self._processes.append(self._stack.enter_context(TraceProcess()))
            self._process_of[name] = number
        return self._process_of[name]

    def _trace_part(self, number: int, part: Sequence[tuple[str, _Wanted]]) -> dict[str, StepTrace | StokerError]:
        done: dict[str, StepTrace | StokerError] = {}
        for key, (spec, size, memory_bytes) in part:
            try:
                trace = self._processes[number].trace(spec, size, memory_bytes=memory_bytes)
            except StokerError as error:  # raised where it is asked for
                done[key] = error
            else:
                done[key] = trace
                trace_cache.write(key, trace)
        return done

    def get(self, spec: StepSpec, size: int, memory_bytes: int) -> StepTrace:
        """Raises StokerError where the step could not be traced."""
        found = self._traces[trace_cache.key_of(spec, size, memory_bytes)]
        if isinstance(found, StokerError):
            raise found
        return found


def loader_demand(config: Config, index: Index) -> LoaderDemand:
    """Measures the decoding of a few images of the training split, at the size of the model's input.

    Raises DataError where none can be decoded, StorageError where a bucket cannot be read.
    """
    if not {"image_size", "resize"} <= config.set_fields().keys():
        device = Device(torch.device("cpu" if config.run.device == "cpu" else "cuda"))
        config, _ = derive_for_plan(config, index, device)
    decode = measure_host_decode(
        index, index.image_indices("train"), image_size=config.data.image_size, resize=config.data.resize
    )
    if decode is None:
        raise DataError("No image of the training split could be decoded.", location=index.source)
    return LoaderDemand(decode_core_s=decode.seconds, bytes_per_image=decode.encoded_bytes, images=decode.images)
