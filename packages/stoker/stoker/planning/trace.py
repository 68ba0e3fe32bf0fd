"""What a training step needs, operator by operator: memory, operations, bytes, launches. Nothing is computed.

The step is the loop's own: augmentation, forward, losses, backward, optimizer, EMA, the sums for the log. It runs on
tensors without memory, on the fake accelerator or as those of a CPU, while a dispatch mode counts. That changes the
whole process, so it is one of its own (`main`), which `Traces` starts. `predict.py` computes from the counts how long a
step takes. Traces are remembered in the cache folder, by the step, stoker's newest file and torch's version. What is
damaged is traced again, and all may be deleted at any time.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.utils import _pytree

from stoker.config.settings import Config, from_fields
from stoker.data.augment import MOSAIC_GROUP_SIZE, augment_batch, clear_cached_constants
from stoker.data.batch import Batch
from stoker.hardware.block_size import block_size_for_memory
from stoker.hardware.device import Device
from stoker.models import build
from stoker.models.layers.convolutions import is_on_accelerator
from stoker.planning import fake_accelerator
from stoker.planning.fake_accelerator import Autocast, fake_tensors, to_fake
from stoker.training.defaults.dry_run import PeakMemoryMode
from stoker.training.loss_sums import LossAccumulator
from stoker.training.optim import OptimizerStep
from stoker.training.step import PlainStep, make_loss_fn
from stoker_watch.errors import StokerError
from stoker_watch.hardware.cgroup import host_cores
from stoker_watch.storage.local_files import cache_folder, write_atomic

aten = torch.ops.aten


class StepSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A step, but for the number of its images."""

    settings: dict[str, Any]
    """Set fields of a config: those of `calibration.STEP_FIELDS`."""
    num_classes: int
    max_boxes: int
    on_cpu: bool
    """Whether as a CPU computes it, else as a GPU does."""

    def config(self) -> Config:
        """The settings as a config; lists of JSON are tuples again."""
        return from_fields(self.settings)


OperatorKind = Literal["convolution", "grouped", "matmul", "other"]
"""grouped: a convolution with groups, as depthwise ones are; other: whatever moves bytes."""


class Work(msgspec.Struct, frozen=True, array_like=True):
    """Operators of a step that need the same."""

    kind: OperatorKind
    flops: float
    """Operations of one of them: 2 for a product and a sum."""
    moved_bytes: float
    """Bytes of its inputs and outputs."""
    count: int
    once: bool
    """Whether it runs once a step (optimizer, EMA, log), else once for each micro-batch."""


class StepTrace(msgspec.Struct, frozen=True, kw_only=True):
    batch_size: int
    peak_bytes: int
    """Bytes of the tensors alive at the same time, weights, optimizer and the batch included."""
    resting_bytes: int
    """Bytes of those alive between two steps."""
    image_bytes: int
    """Bytes of the batch, per image."""
    parameters: int
    """Trainable ones."""
    gradient_bytes: int
    works: list[Work]

    @property
    def flops(self) -> float:
        return sum(work.flops * work.count for work in self.works)


class CountedStep:
    """A model with all that its steps need, and a count of what they need."""

    def __init__(self, spec: StepSpec, device: Device, *, is_fake: bool) -> None:
        """is_fake: without memory, as long as it is not closed; nothing else can be computed meanwhile."""
        config = spec.config()
        self.spec, self.device, self.data = spec, device, config.data
        precision, is_cpu = config.run.precision, device.is_cpu
        clear_cached_constants()  # those of another step may be fakes
        torch.manual_seed(0)
        with fake_accelerator.WithoutRandomValues() if is_fake else contextlib.nullcontext():
            self.model = build(config.model, spec.num_classes).train()
        self._counter = _StepCounter(device.kind, 1 if is_cpu else fake_accelerator.GRANULE)
        with contextlib.ExitStack() as stack:
            if is_fake:
                stack.enter_context(fake_tensors())
                to_fake(self.model, device.kind)
            else:
                self.model.to(device.torch_device)
            self.optimizer = OptimizerStep(self.model, config.optim, device, precision=precision)
            self._make_accumulator = functools.partial(
                LossAccumulator, device, max_skipped_steps=config.optim.max_skipped_steps or 20
            )
            self._accumulator = self._make_accumulator()
            self._loss_fn = make_loss_fn(self.model, compile=False)
            self._autocast = Autocast(precision) if is_fake and not is_cpu else device.autocast(precision)
            ema_model = self.optimizer.ema_model
            self._counter.add_all((self.optimizer.state_dict(), list(self.model.buffers()), ema_model.state_dict()))
            self._stack = stack.pop_all()
        self._is_warm = False

    def close(self) -> None:
        self._stack.close()
        clear_cached_constants()  # fakes, if the step is fake

    def run(self, batch: Batch) -> None:
        """What the training loop does with a batch, at a learning rate of 0."""
        augmented = self._augment(batch)
        self.optimizer.set_scalars(0.0, 0)
        losses = PlainStep(self._loss_fn, self.optimizer, None, self._autocast).forward_backward(augmented)
        self._counter.is_update = True
        clipped = self.optimizer.clip()
        self.optimizer.update(clipped)
        self.optimizer.update_ema()
        self._accumulator.add(
            losses, clipped.grad_norm, clipped.found_inf, self.optimizer.completed_steps, clipped.tensor_norms
        )

    def _augment(self, batch: Batch) -> Batch:
        settings = self.data
        if batch.images.shape[0] % MOSAIC_GROUP_SIZE:  # a part of a group; training makes mosaics of whole ones
            settings = dataclasses.replace(settings, mosaic=0.0)
        return augment_batch(batch, settings, 0.0)

    def count(self, batch: Batch) -> StepTrace:
        """Counts a step on a batch of the device. What was counted before changes nothing."""
        counter = self._counter
        clear_cached_constants()
        counter.add_all(batch)
        with counter, torch.no_grad(), self._autocast:
            self._accumulator = self._make_accumulator()
            images = self._augment(batch).images  # makes the constants that the augmentation keeps
            if not self._is_warm:
                self.model(images)  # makes the anchors
                self._is_warm = True
            del images
        gc.collect()  # a tensor in a reference cycle would count as alive
        counter.start()
        with counter:
            self.run(batch)
        trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        count = batch.images.shape[0]
        return StepTrace(
            batch_size=count,
            peak_bytes=counter.peak_bytes,
            resting_bytes=counter.current_bytes,
            image_bytes=sum(tensor.nbytes for tensor in batch) // count,
            parameters=sum(parameter.numel() for parameter in trainable),
            gradient_bytes=sum(parameter.nbytes for parameter in trainable),
            works=counter.works(),
        )

    def empty_batch(self, count: int) -> Batch:
        return fake_accelerator.empty_batch(count, self.spec.max_boxes, self.data.image_size, self.device.torch_device)


def _convolution_backward_flop(grad_out: Any, x: Any, w: Any, *others: Any, out_shape: Any) -> int:  # noqa: ARG001
    """Each of the two gradients costs what the forward pass did. (torch's own formula forgets the groups.)"""
    from torch.utils.flop_counter import conv_flop_count

    *_, transposed, _, _, wanted = others
    return int((wanted[0] + wanted[1]) * conv_flop_count(x, w, grad_out, transposed=transposed))


FLOP = {aten.convolution_backward: _convolution_backward_flop}
"""Formulas for FlopCounterMode, which has the others."""


@functools.cache
def _formulas() -> dict[Any, Any]:
    """Operator → its FLOPs. Imported in the sub-process: this imports triton, which complains as the process ends."""
    from torch.utils.flop_counter import flop_registry, shape_wrapper

    own = {packet: shape_wrapper(formula) for packet, formula in FLOP.items()}  # type: ignore[no-untyped-call]
    return {**flop_registry, **own}


_GROUPS_ARGUMENT = {aten.convolution: 8, aten.convolution_backward: 9}
_MATMULS = frozenset({aten.mm, aten.addmm, aten.bmm, aten.baddbmm})
_WRITE_ONLY = frozenset({aten.copy_, aten.fill_, aten.zero_})
"""Their first argument is not read."""
_SPARSE_READS = frozenset({aten.gather, aten.index, aten.index_select, aten.embedding, aten.take})
"""They read as many elements of their first argument as they write."""
_GROUP_NORM_COPIES = {aten.native_group_norm: 2, aten.native_group_norm_backward: 4}
"""Copies of a map on CUDA, where maps are channels-last but these compute in contiguous memory (ATen's group_norm.cpp,
derivatives.yaml): of the input, and for the next convolution; of gradient and input, and for both convolutions."""


class _StepCounter(PeakMemoryMode):  # type: ignore[no-untyped-call]  # torch's own bases are untyped
    """Counts the operators of a step that start work: all but views and new memory without values."""

    def __init__(self, device_type: str, rounding_bytes: int) -> None:
        super().__init__(device_type, rounding_bytes)
        self.is_update = False
        self._counts: dict[tuple[OperatorKind, float, float, bool], int] = {}

    def add_all(self, tree: Any) -> None:
        """Counts tensors that exist already."""
        for tensor in _pytree.tree_leaves(tree):
            if isinstance(tensor, Tensor):
                self.add(tensor)

    def start(self) -> None:
        """Forgets what was counted, but for the tensors that are alive."""
        self.peak_bytes = self.current_bytes
        self.is_update = False
        self._counts.clear()

    def works(self) -> list[Work]:
        return [
            Work(kind, flops, moved_bytes, count, once)
            for (kind, flops, moved_bytes, once), count in self._counts.items()
        ]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace not in ("prim", "profiler") and not func.is_view and "empty" not in func.__name__:
            self._count(func, args, kwargs or {}, result)
        return result

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        packet = func.overloadpacket
        formula = _formulas().get(packet)
        flops = float(formula(*args, **kwargs, out_val=result)) if formula is not None else 0.0
        key = _kind(packet, args), flops, _moved_bytes(func, packet, args, kwargs, result), self.is_update
        self._counts[key] = self._counts.get(key, 0) + 1


def _kind(packet: Any, args: Any) -> OperatorKind:
    if packet in _GROUPS_ARGUMENT:
        return "grouped" if args[_GROUPS_ARGUMENT[packet]] > 1 else "convolution"
    return "matmul" if packet in _MATMULS else "other"


def _moved_bytes(func: Any, packet: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Bytes that an operator reads and writes, each tensor once for either."""
    changed = [
        value
        for argument, value in zip(func._schema.arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    written = {id(tensor): tensor for tensor in _pytree.tree_leaves((changed, result)) if isinstance(tensor, Tensor)}
    written_bytes = sum(_touched_bytes(tensor) for tensor in written.values())
    is_sparse = packet in _SPARSE_READS
    sources = args[1:] if is_sparse or packet in _WRITE_ONLY else args
    leaves = _pytree.tree_leaves((sources, kwargs))
    read_bytes = sum(_touched_bytes(tensor) for tensor in leaves if isinstance(tensor, Tensor))
    if packet in _GROUP_NORM_COPIES and is_on_accelerator(args[0]):
        read_bytes += 2 * _GROUP_NORM_COPIES[packet] * args[0].nbytes
    return written_bytes + read_bytes + (written_bytes if is_sparse else 0.0)


def _touched_bytes(tensor: Tensor) -> float:
    """Bytes of the elements that exist: an expanded dimension has one."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return float(math.prod(sizes) * tensor.element_size())


# The process.


def main() -> None:
    """Traces the steps of stdin (`TracedStep`). Writes a line for each: its trace, or as a text why there is none."""
    fake_accelerator.install()
    output = sys.stdout
    sys.stdout = sys.stderr  # whatever a library prints is no answer
    steps = msgspec.json.decode(sys.stdin.buffer.read(), type=list[tuple[StepSpec, int, int]])
    gc.freeze()  # what was imported stays, and every count collects
    gc.enable()
    model: CountedStep | None = None
    for spec, batch_size, memory_bytes in steps:
        try:
            if model is None or spec != model.spec:
                if model is not None:
                    model.close()
                kind = "cpu" if spec.on_cpu else fake_accelerator.DEVICE
                model = None
                model = CountedStep(spec, Device(torch.device(kind)), is_fake=True)
            if not spec.on_cpu:
                fake_accelerator.set_memory(memory_bytes)
            answer: StepTrace | str = model.count(model.empty_batch(batch_size))
        except Exception as error:  # noqa: BLE001 (fake tensors, and settings of another version, raise anything)
            model = None
            answer = f"{type(error).__name__}: {error}"
        output.write(msgspec.json.encode(answer).decode() + "\n")
        output.flush()


# The traces of a plan

PACKAGE = Path(__file__).resolve().parents[1]
MAX_FILES = 256
"""The oldest beyond them are removed; a file has about 20 kB."""


class TracedStep(NamedTuple):
    spec: StepSpec
    batch_size: int
    memory_bytes: int
    """Memory of the accelerator, by which losses and matchers choose the size of their blocks; of a CPU 0."""

    def key(self) -> str:
        """Devices whose losses and matchers work in blocks of the same size share it."""
        block_size = 0 if self.spec.on_cpu else block_size_for_memory(self.memory_bytes)
        facts = [msgspec.json.encode(self.spec), self.batch_size, block_size, torch.__version__, _newest_file()]
        return blake2b(repr(facts).encode(), digest_size=16).hexdigest()


class Traces:
    def __init__(self) -> None:
        self._found: dict[str, StepTrace | str] = {}

    def add(self, steps: Iterable[TracedStep]) -> None:
        """Traces what is not traced yet, now or earlier, in two processes at a time."""
        missing = {key: step for step in steps if (key := step.key()) not in self._found}
        self._found |= {key: trace for key in missing if (trace := read_trace(key)) is not None}
        by_spec: dict[bytes, list[str]] = {}  # the steps of one model are traced by the same process, which keeps it
        for key, step in missing.items():
            if key not in self._found:
                by_spec.setdefault(msgspec.json.encode(step.spec), []).append(key)
        count = max(1, min(2, host_cores(), len(by_spec)))
        groups = list(by_spec.values())
        parts = [[key for group in groups[n::count] for key in group] for n in range(count)]
        with concurrent.futures.ThreadPoolExecutor(count) as threads:
            done = threads.map(lambda keys: trace_steps([missing[key] for key in keys]), parts)
            for keys, answers in zip(parts, done, strict=True):
                for key, answer in zip(keys, answers, strict=True):
                    self._found[key] = answer
                    if isinstance(answer, StepTrace):
                        write_trace(key, answer)

    def get(self, step: TracedStep) -> StepTrace:
        """Raises StokerError where the step could not be traced."""
        answer = self._found[step.key()]
        if isinstance(answer, str):
            raise StokerError("A training step could not be traced.", cause=answer)
        return answer


def trace_steps(steps: Sequence[TracedStep]) -> list[StepTrace | str]:
    """Traces steps in a process, one after the other; a text says why one could not be traced."""
    if not steps:
        return []
    done = subprocess.run(
        # Without garbage collection, torch is imported a second sooner.
        [sys.executable, "-c", "import gc; gc.disable(); from stoker.planning.trace import main; main()"],
        input=msgspec.json.encode(steps),
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    answers = [msgspec.json.decode(line, type=StepTrace | str) for line in done.stdout.splitlines()]
    last = f"the process ended with exit code {done.returncode}"
    lines = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    return answers + [lines[-1] if lines else last] * (len(steps) - len(answers))


@functools.cache
def _newest_file() -> int:
    """The time at which stoker's newest file was modified, in nanoseconds."""
    return max(file.stat().st_mtime_ns for file in PACKAGE.rglob("*.py"))


def trace_folder() -> Path:
    """The folder of the files, which need not exist."""
    return cache_folder() / "step-traces"


def read_trace(key: str) -> StepTrace | None:
    """The trace; None if there is no file, or a damaged one."""
    try:
        return msgspec.json.decode((trace_folder() / f"{key}.json").read_bytes(), type=StepTrace)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def write_trace(key: str, trace: StepTrace) -> None:
    """Keeps a trace, if the cache folder can be written."""
    with contextlib.suppress(OSError):  # it is read-only or full: the trace is worth having without
        trace_folder().mkdir(parents=True, exist_ok=True)
        write_atomic(trace_folder() / f"{key}.json", msgspec.json.encode(trace), durable=False)
        files = sorted(trace_folder().glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
        for file in files[:-MAX_FILES]:
            file.unlink(missing_ok=True)
