"""The one file that knows kinds of device: picking one, its streams and clocks, autocast, memory, host copies.

Everything else is written against `Device`. On a CPU there are no streams: copies and marks happen at once, through the
same calls. Accelerators go through `torch.accelerator`, `torch.Stream` and `torch.Event`; only what has no neutral name
is asked of `torch.cuda`. Telemetry from the driver is `profiling/telemetry/gpu.py`.
"""

import contextlib
import ctypes
import dataclasses
import os
import platform
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from stoker.errors import OutOfMemoryError, PreflightError
from stoker.hardware.cgroup import host_cores as host_cores
from stoker.hardware.cgroup import host_memory as host_memory

CPU_BLOCK_SIZE, ACCELERATOR_BLOCK_SIZE = 2**19, 2**23
"""Numbers of a batch that a loss or a matching takes at once, where all of them would be gigabytes: on a CPU as many as
stay in a core's cache with their temporaries (measured: LOG.md, "The step on a CPU"), on an accelerator 32 MiB each."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Device:
    """A device that trains. `torch_device` is where tensors are put."""

    torch_device: torch.device

    @property
    def kind(self) -> str:
        return self.torch_device.type

    @property
    def is_cpu(self) -> bool:
        return self.kind == "cpu"

    @property
    def name(self) -> str:
        """What a person would call it: `NVIDIA H200`, or the processor's model."""
        if self.kind == "cuda":
            return torch.cuda.get_device_name(self.torch_device)
        return _cpu_name() if self.is_cpu else self.kind

    def autocast(self, precision: str) -> contextlib.AbstractContextManager[Any]:
        """Mixed precision for the forward pass: fp32, bf16 or fp16."""
        return torch.autocast(self.kind, DTYPES[precision], enabled=precision != "fp32")

    def empty_host(self, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        """Host memory that the device can copy from without a stop (page-locked where there is an accelerator)."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=not self.is_cpu)

    def make_stream(self) -> "SideStream":
        return SideStream(self)

    def make_clock(self) -> "DeviceClock":
        return DeviceClock(self)

    def make_nvtx_ranges(self) -> "NvtxRanges | None":
        """Ranges for a profiler that reads them; None where none does."""
        return NvtxRanges() if nvtx_enabled(self) else None

    def memory(self) -> "DeviceMemory":
        """Bytes of the device's memory; of the host's (within its cgroup) on a CPU."""
        if self.is_cpu:
            limit, used = host_memory()
            return DeviceMemory(limit, limit - used, psutil.Process().memory_info().rss)
        free, total = torch.accelerator.get_memory_info(self.torch_device)
        return DeviceMemory(total, free, torch.accelerator.max_memory_allocated(self.torch_device))

    def reset_peak_memory(self) -> None:
        if not self.is_cpu:
            torch.accelerator.reset_peak_memory_stats(self.torch_device)

    def empty_cache(self) -> None:
        """Gives cached blocks back to the driver, so that a trial's memory does not count against the next."""
        if not self.is_cpu:
            torch.accelerator.empty_cache()

    def synchronize(self) -> None:
        """Waits until the device has done everything it was given."""
        if not self.is_cpu:
            torch.accelerator.synchronize(self.torch_device)

    def best_precision(self) -> tuple[str, str]:
        """(precision, reason): the fastest arithmetic that trains stably here."""
        if self.is_cpu:
            flags = _cpu_flags()
            bf16_flags = sorted(flags & {"avx512_bf16", "amx_bf16"})
            if bf16_flags:
                return "bf16", f"the processor multiplies bf16 ({', '.join(bf16_flags)})"
            return "fp32", "the processor has no fast bf16 (no avx512_bf16, no amx_bf16)"
        if self.kind == "cuda":
            if torch.cuda.is_bf16_supported(including_emulation=False):
                return "bf16", "the GPU multiplies bf16; its range needs no loss scaling"
            if torch.cuda.get_device_capability(self.torch_device) >= (7, 0):
                return "fp16", "the GPU has fp16 tensor cores and no bf16"
            return "fp32", "the GPU has no tensor cores"
        return "fp32", f"mixed precision was never tried on {self.kind}"


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Bytes. `peak`: the most that this process had allocated (resident memory on a CPU)."""

    total: int
    free: int
    peak: int


class SideStream:
    """A queue of copies beside the device's main work. On a CPU the copies are done when `copy` returns."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = None if device.is_cpu else torch.Stream(device.torch_device)

    def to_device(self, tensors: Iterable[Tensor]) -> tuple[list[Tensor], "ReadyEvent"]:
        """Starts copies host → device. Use the tensors after `Ready.block_device`; the host's are free after `done`."""
        if self._stream is None:
            return list(tensors), ReadyEvent(None)
        with self._stream:
            copies = [tensor.to(self._device.torch_device, non_blocking=True) for tensor in tensors]
        main = torch.accelerator.current_stream(self._device.torch_device)
        for copy in copies:
            copy.record_stream(main)
        return copies, ReadyEvent(self._stream.record_event())

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        """What is issued inside goes to this stream, and tensors made inside are from memory of its own."""
        with contextlib.nullcontext() if self._stream is None else self._stream:
            yield

    def record_ready(self) -> "ReadyEvent":
        """Says when all that was issued so far is done."""
        return ReadyEvent(None if self._stream is None else self._stream.record_event())

    def synchronize(self) -> None:
        """Waits on the host for all that was issued so far: for threads other than the training thread."""
        if self._stream is not None:
            self._stream.synchronize()

    def join(self, tensor: Tensor, source_ready: "ReadyEvent", updates: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Makes this stream wait for `tensor`, which another one made, and then copies `changes`, each (part of it,
        host tensor). The main stream may use it after the `Ready` of what this stream is given next."""
        source_ready.block_stream(self._stream)
        with self.activate():
            for target, source in updates:
                target.copy_(source, non_blocking=True)
        if self._stream is not None:
            for stream in (self._stream, torch.accelerator.current_stream(self._device.torch_device)):
                tensor.record_stream(stream)

    def to_host(self, tensors: Iterable[Tensor]) -> tuple[list[Tensor], "ReadyEvent"]:
        """Starts copies device → host of what the main stream has issued so far. Read them after `done` or `wait`.

        The main stream must not overwrite the sources before `Ready.block_device`.
        """
        if self._stream is None:
            return [tensor.detach().clone() for tensor in tensors], ReadyEvent(None)
        self._stream.wait_stream(torch.accelerator.current_stream(self._device.torch_device))
        copies = []
        with self._stream:
            for tensor in tensors:
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                copies.append(host.copy_(tensor.detach(), non_blocking=True))
                if tensor.device.type != "cpu":
                    tensor.record_stream(self._stream)
        return copies, ReadyEvent(self._stream.record_event())


class ReadyEvent:
    """Says when copies are done."""

    def __init__(self, event: torch.Event | None) -> None:
        self._event = event

    def done(self) -> bool:
        return self._event is None or bool(self._event.query())

    def synchronize(self) -> None:
        """Waits on the host: for threads other than the training thread."""
        if self._event is not None:
            self._event.synchronize()

    def block_main_stream(self) -> None:
        """Makes the main stream, not the host, wait for the copies."""
        if self._event is not None:
            self._event.wait()

    def block_stream(self, stream: torch.Stream | None) -> None:
        """The same for another stream; None where there are no streams."""
        if self._event is not None and stream is not None:
            self._event.wait(stream)


class DeviceClock:
    """Moments of the device's work in seconds of the host's `time.perf_counter`, never by a wait.

    Each event is placed relative to the one resolved before it, since a difference of events is a float32 in ms and
    loses its fine digits over hours. `resolve` must be called in the order of the marks. Events are used again when
    they are resolved or dropped: there are never more than marks that were open at once, and one. A CPU has no marks.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._last_event: torch.Event | None = None
        self._last_s = 0.0
        self._pool: list[torch.Event] = []
        if not device.is_cpu:
            device.synchronize()
            self._last_event = self.record_event()
            self._last_event.synchronize()
            self._last_s = time.perf_counter()

    @property
    def on_host(self) -> bool:
        """Whether the device is the host itself."""
        return self._last_event is None

    def record_event(self) -> torch.Event:
        """The moment at which the device will have done everything issued so far."""
        event = self._pool.pop() if self._pool else torch.Event(self._device.torch_device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device.torch_device))
        return event

    def resolve(self, mark: torch.Event) -> float | None:
        """Seconds of `time.perf_counter`, or None while the device has not come so far."""
        if not mark.query():
            return None
        assert self._last_event is not None
        self._last_s += self._last_event.elapsed_time(mark) / 1e3
        self._pool.append(self._last_event)
        self._last_event = mark
        return self._last_s

    def drop(self, mark: torch.Event) -> None:
        """The mark will never be resolved: its event is free."""
        self._pool.append(mark)


_NSIGHT_VARIABLES = ("NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH")
"""Variables that Nsight's tools set in what they start."""


def nvtx_enabled(device: Device) -> bool:
    """Whether somebody reads NVTX ranges of this process: a profiler of NVIDIA's, or STOKER_NVTX=1 says so."""
    return device.kind == "cuda" and (
        os.environ.get("STOKER_NVTX") == "1" or any(map(os.environ.get, _NSIGHT_VARIABLES))
    )


class NvtxRanges:
    """Nested, named ranges on this thread's line in Nsight Systems (NVTX)."""

    def push(self, name: str) -> None:
        torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]

    def pop(self) -> None:
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


def configure_malloc() -> None:
    """Has the C library keep the large blocks that a step frees, for the next one.

    It would give them back to the kernel, which has to clear every page again: 2 to 7 % of the processor time of a
    training step on a CPU (LOG.md, "The step on a CPU"). For processes that train; elsewhere than on glibc it does
    nothing.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, 2**30)
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h


def block_size(tensor: Tensor) -> int:
    """CACHE_BLOCK or DEVICE_BLOCK, as `tensor` lies on a CPU or an accelerator."""
    return CPU_BLOCK_SIZE if tensor.device.type == "cpu" else ACCELERATOR_BLOCK_SIZE


TESTED_DEVICES = frozenset({"cuda"})
"""Kinds of accelerator that are taken without being asked for; docs/gpu-status.md."""


def untested_accelerator() -> str | None:
    """The kind of accelerator that torch finds here and `pick` leaves alone, if there is one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None or accelerator.type in TESTED_DEVICES else accelerator.type


def select_device(name: str | None = None) -> Device:
    """The device called `name` (`cpu`, `cuda`, `cuda:1`, `mps` …); without a name the accelerator, else the CPU.

    Without a name, an accelerator of a kind that was never tried (`TRIED`) is left alone; `untried` says so. Raises
    PreflightError when the device is absent or does not compute: a run must never fall back to the CPU in silence.
    """
    if name is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = (
            torch.device("cpu")
            if accelerator is None or accelerator.type not in TESTED_DEVICES
            else torch.device(accelerator.type, 0)
        )
    else:
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise PreflightError(f"There is no kind of device called {name!r}.", cause=str(error).splitlines()[0],
                                 choices=available_devices()) from error  # fmt: skip
    if device.type not in {kind.partition(":")[0] for kind in available_devices()}:
        cause = "torch finds no such device: a CPU build of torch, a missing driver, or a hidden device"
        raise PreflightError(f"The device {str(device)!r} cannot be used.", cause=cause, choices=available_devices(),
                             fix="check `nvidia-smi`, CUDA_VISIBLE_DEVICES and `python -c 'import torch; "
                             "print(torch.version.cuda, torch.cuda.is_available())'`")  # fmt: skip
    if device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device.index)
    try:
        probe = torch.ones(8, device=device)
        works = float((probe @ probe).item()) == 8.0
    except Exception as error:
        raise PreflightError(f"The device {str(device)!r} is there but does not compute.", cause=str(error)) from error
    if not works:
        raise PreflightError(f"The device {str(device)!r} computes wrongly: 8 ones do not add up to 8.")
    return Device(device)


def available_devices() -> list[str]:
    """Kinds of device that torch can use here, the CPU first."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


@contextlib.contextmanager
def out_of_memory_as_error(activity: str) -> Iterator[None]:
    """Turns the device's and the host's out-of-memory exceptions into an OutOfMemoryError."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if type(error) is RuntimeError and "can't allocate memory" not in str(error):
            raise
        raise OutOfMemoryError(
            f"Out of memory while {activity}.",
            cause=str(error).splitlines()[0] if str(error) else None,
            fix="a smaller --batch-size or --image-size, or --grad-accum-steps 2",
        ) from error


def _cpuinfo(key: str) -> str | None:
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return None
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


def _cpu_name() -> str:
    return _cpuinfo("model name") or "cpu"


def _cpu_flags() -> set[str]:
    return set((_cpuinfo("flags") or "").split())
