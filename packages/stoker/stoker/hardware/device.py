"""Everything that depends on the kind of device: selection, streams, clocks, autocast, memory, copies to the host.

All other modules use `Device`. A CPU has no streams: the same calls copy and record at once. Accelerators are used
through `torch.accelerator`, `torch.Stream` and `torch.Event`, and through `torch.cuda` only for what these do not have.
Telemetry from the driver is in `stoker_watch/recording/telemetry/gpu.py`.
"""

import contextlib
import contextvars
import ctypes
import dataclasses
import importlib.util
import os
import platform
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from stoker.hardware.cuda_trial import CudaGpu, build_with, present_device, runs_on
from stoker_watch.errors import PreflightError, make_error
from stoker_watch.hardware.cgroup import host_memory
from stoker_watch.recording.torch_device import XLA_KINDS as XLA_KINDS
from stoker_watch.recording.torch_device import DeviceClock

CPU_BLOCK_SIZE = 2**19
"""Elements that a loss or a matcher processes at once on a CPU: a core's cache has room for them and their temporaries
(measured: LOG.md, "The step on a CPU")."""
MIN_ACCELERATOR_BLOCK_SIZE, MAX_ACCELERATOR_BLOCK_SIZE = 2**23, 2**30
"""The same on an accelerator, where every block costs the host some hundred launches: see `block_size`."""
BLOCK_MEMORY_FRACTION = 1 / 8
"""Fraction of an accelerator's memory that the temporaries of a block may take."""
BLOCK_BYTES_PER_ELEMENT = 24
"""Bytes of temporaries per element of a block: at most six fp32 tensors of its size live at once."""

CHUNK_BYTES = 2**26
"""Of pinned memory (`HostArenas`). A larger tensor has a chunk of its own."""
ALIGNMENT_BYTES = 64
"""Of every tensor in it: more than any data type needs."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Device:
    """A device for training; `torch_device` is the device of its tensors."""

    torch_device: torch.device

    @property
    def kind(self) -> str:
        return self.torch_device.type

    @property
    def is_cpu(self) -> bool:
        return self.kind == "cpu"

    @property
    def computes_on_host(self) -> bool:
        """Whether it is the CPU, also through XLA's CPU client."""
        return self.is_cpu or (self.kind == "xla" and _xla_client() == "CPU")

    @property
    def has_streams(self) -> bool:
        """Whether work is issued to streams, and events tell when it is done. Else the host's clock is the only one."""
        return not self.is_cpu and self.kind not in XLA_KINDS

    @property
    def name(self) -> str:
        """For users: `NVIDIA H200`, or the model of the CPU."""
        if self.kind == "cuda":
            return torch.cuda.get_device_name(self.torch_device)
        if self.kind == "xla":
            return f"XLA on {_xla_client()}"
        return (_cpuinfo("model name") or "cpu") if self.is_cpu else self.kind

    def prepare_for_fixed_shapes(self) -> None:
        """For work whose shapes never change: cuDNN tries its algorithms once for each shape and keeps the fastest.
        Call it before the first convolution, whose choice is kept for the process."""
        if self.kind == "cuda":
            torch.backends.cudnn.benchmark = True

    def autocast(self, precision: str) -> contextlib.AbstractContextManager[Any]:
        """Mixed precision for the forward pass: fp32, bf16 or fp16."""
        if precision == "fp32" and self.kind in XLA_KINDS:  # torch_xla warns of this type
            return contextlib.nullcontext()
        return torch.autocast(self.kind, DTYPES[precision], enabled=precision != "fp32")

    def empty_host(self, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        """Host memory that the device can copy from without a host sync (pinned where there is an accelerator)."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=self.has_streams)

    def pin(self, address: int, nbytes: int) -> str | None:
        """Page-locks memory that is not torch's, for copies without a host sync. Returns why it failed, or None."""
        if self.kind != "cuda":
            return None
        code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))  # type: ignore[no-untyped-call]
        if code == 0:
            return None
        with contextlib.suppress(RuntimeError):  # the next launch of a kernel reports the error, and clears it
            torch.ones(1, device=self.torch_device)
        return str(torch.cuda.CudaError(code))

    def unpin(self, address: int) -> None:
        """Undoes `pin`. The result is ignored: after an error of the device, the memory goes with the process."""
        if self.kind == "cuda":
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]

    def make_stream(self) -> "SideStream":
        return SideStream(self)

    def record_issued(self) -> "ReadyEvent":
        """An event that is done when all work issued to the current stream so far is done, for the host to wait for.
        The waiting thread sleeps: else it would keep a core busy, which decoding needs."""
        if not self.has_streams:
            return ReadyEvent(None)
        blocking: Any = torch.cuda.Event  # torch.Event has no blocking ones
        event = blocking(blocking=True) if self.kind == "cuda" else torch.Event(self.torch_device)
        event.record()
        return ReadyEvent(event)

    def make_clock(self) -> DeviceClock:
        return DeviceClock(torch, self.torch_device, has_events=self.has_streams)

    def make_nvtx_ranges(self) -> "NvtxRanges | None":
        """NVTX ranges; None when no profiler reads them."""
        return NvtxRanges() if nvtx_enabled(self) else None

    def memory(self) -> "DeviceMemory":
        """Memory of the device; on a CPU, of the host (within its cgroup)."""
        if self.computes_on_host:
            limit, used = host_memory()
            return DeviceMemory(limit, limit - used, psutil.Process().memory_info().rss)
        if self.kind == "xla":
            from torch_xla.core import xla_model

            info = xla_model.get_memory_info(self.torch_device)
            limit, used = int(info["bytes_limit"]), int(info["bytes_used"])
            return DeviceMemory(limit, limit - used, int(info.get("peak_bytes_used", used)))
        free, total = torch.accelerator.get_memory_info(self.torch_device)
        return DeviceMemory(total, free, torch.accelerator.max_memory_allocated(self.torch_device))

    def reset_peak_memory(self) -> None:
        if self.has_streams:
            torch.accelerator.reset_peak_memory_stats(self.torch_device)

    def empty_cache(self) -> None:
        """Returns cached blocks to the driver, so that the memory of one trial is free for the next."""
        if self.has_streams:
            torch.accelerator.empty_cache()

    def synchronize(self) -> None:
        """Waits until the device has finished all work that was issued."""
        if self.kind == "xla":
            import torch_xla

            torch_xla.sync(wait=True)
        elif not self.is_cpu:
            torch.accelerator.synchronize(self.torch_device)

    def best_precision(self) -> tuple[str, str]:
        """(precision, reason): the fastest precision with which training is stable on this device."""
        if self.is_cpu:
            bf16_flags = sorted({"avx512_bf16", "amx_bf16"}.intersection((_cpuinfo("flags") or "").split()))
            if not bf16_flags:
                return "fp32", "the CPU has no fast bf16 (no avx512_bf16, no amx_bf16)"
            if limit := _instruction_set_limit():
                return "fp32", f"bf16 would be emulated: {limit}"
            return "bf16", f"the CPU has bf16 arithmetic ({', '.join(bf16_flags)})"
        if self.kind == "cuda":
            if torch.cuda.is_bf16_supported(including_emulation=False):
                return "bf16", "the GPU has bf16 arithmetic; its range needs no loss scaling"
            if torch.cuda.get_device_capability(self.torch_device) >= (7, 0):
                return "fp16", "the GPU has fp16 tensor cores and no bf16"
            return "fp32", "the GPU has no tensor cores"
        return "fp32", f"mixed precision was never tested on {self.kind}"


class ArenaLease:
    """Keeps the views of an arena from being given out again for as long as it is referenced."""


class HostArenas:
    """Pinned host memory that is allocated once and used for every snapshot of the same tensors. Pinning memory takes a
    call of the driver for each block, which waits for the device and for other threads. torch's allocator keeps freed
    blocks, but rounds each of them up to a power of two (c10's CachingHostAllocator.h). So an arena has a few chunks of
    at most CHUNK_BYTES, and tensors are views of them. One thread calls; leases end on any."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._arenas: list[_HostArena] = []

    def reserve(self, tensors: Sequence[Tensor]) -> None:
        """Allocates memory for copies of `tensors` now."""
        self.take(tensors)

    def take(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], ArenaLease]:
        """Host tensors to copy `tensors` into, contiguous. Nothing else uses their memory until the lease is no longer
        referenced. Allocates an arena if none that is free has room."""
        for arena in self._arenas:
            if arena.is_free and (views := arena.views(tensors)) is not None:
                return views, arena.lease()
        arena = _HostArena(self._device, tensors)
        self._arenas.append(arena)
        views = arena.views(tensors)
        assert views is not None
        return views, arena.lease()


class _HostArena:
    def __init__(self, device: Device, tensors: Sequence[Tensor]) -> None:
        sizes: list[int] = []
        start = 0
        for tensor in tensors:
            if not sizes or (start and start + tensor.nbytes > CHUNK_BYTES):
                sizes.append(0)
                start = 0
            sizes[-1] = start + tensor.nbytes
            start = _aligned(sizes[-1])
        self._chunks = [device.empty_host((size,), torch.uint8) for size in sizes]
        self._lease: weakref.ref[ArenaLease] | None = None

    @property
    def is_free(self) -> bool:
        return self._lease is None or self._lease() is None

    def lease(self) -> ArenaLease:
        lease = ArenaLease()
        self._lease = weakref.ref(lease)
        return lease

    def views(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """Parts of the chunks with the shapes and types of `tensors`; None if they do not fit."""
        views = []
        chunk = start = 0
        for tensor in tensors:
            while chunk < len(self._chunks) and start + tensor.nbytes > self._chunks[chunk].numel():
                chunk, start = chunk + 1, 0
            if chunk == len(self._chunks):
                return None
            part = self._chunks[chunk][start : start + tensor.nbytes]
            views.append(part.view(tensor.dtype).view(tensor.shape))
            start = _aligned(start + tensor.nbytes)
        return views


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Bytes. `peak`: maximum that this process had allocated (on a CPU: its resident memory now)."""

    total: int
    free: int
    peak: int


class SideStream:
    """A stream for copies that run concurrently with the main stream. On a CPU, and where there are no streams, a call
    returns when its copy is done; a copy from an XLA device waits for all steps before it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = torch.Stream(device.torch_device) if device.has_streams else None

    def to_device(self, tensors: Iterable[Tensor]) -> tuple[list[Tensor], "ReadyEvent"]:
        """Starts copies host → device. Call `block_main_stream` of the event before the copies are used. The host
        tensors can be overwritten when the event is `done`."""
        if self._stream is None:
            if self._device.is_cpu:
                return list(tensors), ReadyEvent(None)
            # XLA may read the host memory later than this call returns, when it has the next batch: so a copy of it.
            copies = [tensor.clone().to(self._device.torch_device) for tensor in tensors]
            if self._device.kind == "xla":
                _divide_among_chips(copies)
            return copies, ReadyEvent(None)
        with self._stream:
            copies = [tensor.to(self._device.torch_device, non_blocking=True) for tensor in tensors]
        main = torch.accelerator.current_stream(self._device.torch_device)
        for copy in copies:
            copy.record_stream(main)
        return copies, ReadyEvent(self._stream.record_event())

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        """Operations in the block go to this stream, and tensors made in it use memory of this stream. Its device
        becomes that of the thread: CUDA would make a context on GPU 0, a new thread's, when the block ends."""
        if self._stream is not None:
            torch.accelerator.set_device_index(self._stream.device_index)
        with contextlib.nullcontext() if self._stream is None else self._stream:
            yield

    def record_ready(self) -> "ReadyEvent":
        """An event that is done when all work issued to this stream so far is done."""
        return ReadyEvent(None if self._stream is None else self._stream.record_event())

    def synchronize(self) -> None:
        """Makes the host wait for all work issued to this stream so far. Not for the training thread."""
        with self.activate():
            issued = self._device.record_issued()
        issued.synchronize()

    def join(self, tensor: Tensor, source_ready: "ReadyEvent", updates: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Makes this stream wait for `tensor`, which another stream makes, and then copies `updates` into it, each
        (part of it, host tensor). The main stream may use it after the event of the next work of this stream."""
        source_ready.block_stream(self._stream)
        with self.activate():
            for target, source in updates:
                target.copy_(source, non_blocking=True)
        if self._stream is not None:
            for stream in (self._stream, torch.accelerator.current_stream(self._device.torch_device)):
                tensor.record_stream(stream)

    def to_host(
        self, tensors: Iterable[Tensor], targets: Iterable[Tensor] | None = None
    ) -> tuple[list[Tensor], "ReadyEvent"]:
        """Starts copies device → host of tensors of the main stream, into `targets` (contiguous, pinned) if given. Read
        them after `done` or `synchronize`. The main stream may overwrite the sources after `block_main_stream`."""
        if self._stream is None:
            if self._device.is_cpu:
                return [tensor.detach().clone() for tensor in tensors], ReadyEvent(None)
            end_step(self._device.torch_device)  # one program for all of them
            return [tensor.detach().to("cpu", copy=True) for tensor in tensors], ReadyEvent(None)
        self._stream.wait_stream(torch.accelerator.current_stream(self._device.torch_device))
        tensors = list(tensors)
        if targets is None:
            targets = [self._device.empty_host(tensor.shape, tensor.dtype) for tensor in tensors]
        copies = []
        with self._stream:
            for tensor, target in zip(tensors, targets, strict=True):
                copies.append(target.copy_(tensor.detach(), non_blocking=True))
                if tensor.device.type != "cpu":
                    tensor.record_stream(self._stream)
        return copies, ReadyEvent(self._stream.record_event())


class ReadyEvent:
    """Tells when copies are done."""

    def __init__(self, event: torch.Event | None) -> None:
        self._event = event

    def done(self) -> bool:
        return self._event is None or bool(self._event.query())

    def synchronize(self) -> None:
        """Makes the host wait: the training thread only where it waits anyway, or for an earlier step."""
        if self._event is not None:
            self._event.synchronize()

    def block_main_stream(self) -> None:
        """Makes the main stream wait for the copies, not the host."""
        if self._event is not None:
            self._event.wait()

    def block_stream(self, stream: torch.Stream | None) -> None:
        """The same for another stream; None on a CPU."""
        if self._event is not None and stream is not None:
            self._event.wait(stream)


_NSIGHT_VARIABLES = ("NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH")
"""Variables that the Nsight tools set in the processes that they start."""


def nvtx_enabled(device: Device) -> bool:
    """Whether NVTX ranges are recorded: a profiler of NVIDIA started this process, or STOKER_NVTX=1 is set."""
    return device.kind == "cuda" and (
        os.environ.get("STOKER_NVTX") == "1" or any(map(os.environ.get, _NSIGHT_VARIABLES))
    )


class NvtxRanges:
    """Nested, named ranges on this thread's line in Nsight Systems (NVTX)."""

    push = staticmethod(torch.cuda.nvtx.range_push)
    pop = staticmethod(torch.cuda.nvtx.range_pop)


def configure_malloc() -> None:
    """Makes glibc keep the large blocks that a training step frees, for the next step. Nothing with other C libraries.
    By default glibc returns them to the kernel, which has to clear every page again: 2 to 7 % of the time of a step."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, 2**30)
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h


def block_size(tensor: Tensor) -> int:
    """Elements that a loss or a matcher processes at once, where all of them would be gigabytes, on the device of
    `tensor`. On an accelerator it depends on the memory that the device has, not on what is free now: so a resumed run
    issues the same operators. Constant for torch.compile."""
    if tensor.device.type == "cpu":
        return CPU_BLOCK_SIZE
    return MAX_ACCELERATOR_BLOCK_SIZE if tensor.is_meta else _accelerator_block_size(tensor.device)


_block_sizes: dict[torch.device, int] = {}


def _accelerator_block_size(device: torch.device) -> int:
    """`block_size_for_memory` of a device, asked for once: not functools.cache, whose function torch.compile traces."""
    if device not in _block_sizes:
        if device.type in XLA_KINDS:
            total_bytes = Device(device).memory().total
        else:
            _, total_bytes = torch.accelerator.get_memory_info(device)
        _block_sizes[device] = block_size_for_memory(total_bytes)
    return _block_sizes[device]


# What torch.compiler.assume_constant_result does, without importing torch._dynamo at every start.
_accelerator_block_size._dynamo_marked_constant = True  # type: ignore[attr-defined]


def block_size_for_memory(total_bytes: int) -> int:
    """Elements of a block whose temporaries take BLOCK_MEMORY_FRACTION of an accelerator's memory, within limits."""
    elements = int(total_bytes * BLOCK_MEMORY_FRACTION / BLOCK_BYTES_PER_ELEMENT)
    return min(max(elements, MIN_ACCELERATOR_BLOCK_SIZE), MAX_ACCELERATOR_BLOCK_SIZE)


TESTED_DEVICES = frozenset({"cuda"})
"""Kinds of accelerator that are used by default; docs/gpu-status.md."""


def untested_accelerator() -> str | None:
    """The kind of an accelerator that exists but `select_device` does not use by default; None: there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None or accelerator.type in TESTED_DEVICES else accelerator.type


def select_device(name: str | None = None) -> Device:
    """The device called `name` (`cpu`, `cuda`, `cuda:1`, `mps` …); by default a tested accelerator, else the CPU. An
    accelerator that is not in TESTED_DEVICES is used only by name (`untested_accelerator`). Raises PreflightError when
    the device does not exist or does not compute: a run must never fall back to the CPU silently."""
    if name is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        kind = None if accelerator is None else accelerator.type
        device = torch.device(kind, 0) if kind in TESTED_DEVICES else torch.device("cpu")
    else:
        try:
            device = torch.device(name)
        except RuntimeError as error:
            cause = str(error).splitlines()[0]
            what = f"There is no device called {name!r}."
            fix = "on a TPU VM: pip install 'stoker[tpu]'" if name.partition(":")[0] == "tpu" else None
            raise PreflightError(what, cause=cause, choices=available_devices(), fix=fix) from error
    if device.type not in {kind.partition(":")[0] for kind in available_devices()}:
        raise make_error(PreflightError, "device-not-usable", choices=available_devices(), device=str(device))
    if device.type == "xla":
        import torch_xla
        from torch_xla import runtime

        if name == "xla" and runtime.global_runtime_device_count() > 1:  # all chips, not one by its number
            runtime.use_spmd()
        device = torch_xla.device(device.index)
    elif device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device.index)
    refusal = None
    try:
        if device.type == "cuda" and torch.version.hip is None:
            refusal = missing_kernels(present_device(device), torch.cuda.get_arch_list())
        works = refusal is not None or float(torch.ones(8, device=device).square().sum().item()) == 8.0
    except Exception as error:
        raise PreflightError(f"The device {str(device)!r} exists but does not compute.", cause=str(error)) from error
    if refusal is not None:
        raise refusal
    if not works:
        raise PreflightError(f"The device {str(device)!r} computes wrong results: the sum of 8 ones is not 8.")
    return Device(device)


def missing_kernels(gpu: CudaGpu, arch_list: Sequence[str]) -> PreflightError | None:
    """The error if a torch that was built for `arch_list` has no kernels for this GPU."""
    if runs_on(arch_list, gpu.capability):
        return None
    return make_error(
        PreflightError, "gpu-without-kernels",
        name=gpu.name, arch=gpu.arch, torch=torch.__version__, arches=" ".join(arch_list),
        build=build_with(gpu.capability),
    )  # fmt: skip


def available_devices() -> list[str]:
    """Kinds of device that torch can use on this machine, the CPU first."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    names = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    return [*names, "xla"] if importlib.util.find_spec("torch_xla") is not None else names


def end_step(device: torch.device) -> None:
    """Ends a step: XLA compiles what was issued since the last end, if it has no such program yet, and runs it.
    Nothing on other devices."""
    if device.type == "xla":
        import torch_xla

        torch_xla.sync()


def device_of_constants(device: torch.device) -> torch.device:
    """Where to compute a tensor that is kept for all steps, to be moved to `device` then. For XLA on the host: it would
    compile what is made there into the first step, and the other steps as another program."""
    return torch.device("cpu") if device.type in XLA_KINDS else device


def _divide_among_chips(tensors: Sequence[Tensor]) -> None:
    """Divides a batch among the chips of this process, where there are several (SPMD): one program computes what one
    chip would, and XLA exchanges what sums over images need, as gradients and the statistics of norms do."""
    from torch_xla import runtime

    if not runtime.is_spmd():
        return
    from torch_xla.distributed import spmd

    chips = runtime.global_runtime_device_count()
    mesh = spmd.Mesh(list(range(chips)), (chips,), ("images",))
    for tensor in tensors:
        if tensor.dim() and tensor.shape[0] % chips == 0:
            spmd.mark_sharding(tensor, mesh, ("images", *[None] * (tensor.dim() - 1)))


def set_scalar(scalar: Tensor, value: float) -> None:
    """Sets a scalar on the device without a host wait. XLA gets a copy: it would compile the numbers 0 and 1 as
    constants, another program for each."""
    if scalar.device.type in XLA_KINDS:
        # of one dimension: a CPU tensor without one counts as a number
        scalar.copy_(torch.tensor([value], dtype=scalar.dtype).to(scalar.device).reshape(()))
    else:
        scalar.fill_(value)


def _xla_client() -> str:
    """What torch_xla computes on: `TPU`, or `CPU`."""
    from torch_xla import runtime

    return str(runtime.device_type())


_ISA_WITHOUT_BF16 = frozenset({"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"})
"""Values of ONEDNN_MAX_CPU_ISA (oneDNN's "CPU Dispatcher Control") that leave no instructions for bf16 products."""


def _instruction_set_limit() -> str | None:
    """What keeps torch from the bf16 instructions that the CPU has, or None. /proc/cpuinfo shows the CPU, not this."""
    limits = {name: os.environ.get(name, "") for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")}
    for name, value in limits.items():
        if value.upper() in _ISA_WITHOUT_BF16:
            return f"{name}={value}"
    capability = torch.backends.cpu.get_cpu_capability()
    return None if capability.startswith(("AVX512", "AVX10")) else f"torch uses {capability} instructions"


def _cpuinfo(key: str) -> str | None:
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


_allowed: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("allowed_host_syncs", default=())


@contextlib.contextmanager
def allow_host_sync(name: str) -> Iterator[None]:
    """A block in which the host may wait for the device. `name` is the purpose of the sync. A step is fast when the
    host only issues work and never reads a result. `tests/host_sync.py` proves it: there every operator that needs a
    value on the host raises, except in such a block. Not needed for correctness."""
    token = _allowed.set((*_allowed.get(), name))
    try:
        yield
    finally:
        _allowed.reset(token)


def allowed_host_syncs() -> tuple[str, ...]:
    """Names of the `allow_host_sync` contexts around the caller, the outermost first."""
    return _allowed.get()
