"""A device: its streams, clocks, autocast, memory, and copies to the host.

All other modules use `Device`. A CPU has no streams: the same calls copy and record at once. Accelerators are used
through `torch.accelerator`, `torch.Stream` and `torch.Event`, and through `torch.cuda` only for what these do not have.
Which device a run uses: `selection.py`. Telemetry from the driver: `stoker_watch/recording/telemetry/gpu.py`.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator
from typing import Any

import psutil
import torch
from torch import Tensor

from stoker.hardware.cpu import cpuinfo, instruction_set_limit
from stoker.hardware.xla import XLA_KINDS, divide_among_chips, end_step, xla_client
from stoker_watch.hardware.cgroup import host_memory
from stoker_watch.recording.torch_device import DeviceClock

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
        return self.is_cpu or (self.kind == "xla" and xla_client() == "CPU")

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
            return f"XLA on {xla_client()}"
        return (cpuinfo("model name") or "cpu") if self.is_cpu else self.kind

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
            bf16_flags = sorted({"avx512_bf16", "amx_bf16"}.intersection((cpuinfo("flags") or "").split()))
            if not bf16_flags:
                return "fp32", "the CPU has no fast bf16 (no avx512_bf16, no amx_bf16)"
            if limit := instruction_set_limit():
                return "fp32", f"bf16 would be emulated: {limit}"
            return "bf16", f"the CPU has bf16 arithmetic ({', '.join(bf16_flags)})"
        if self.kind == "cuda":
            if torch.cuda.is_bf16_supported(including_emulation=False):
                return "bf16", "the GPU has bf16 arithmetic; its range needs no loss scaling"
            if torch.cuda.get_device_capability(self.torch_device) >= (7, 0):
                return "fp16", "the GPU has fp16 tensor cores and no bf16"
            return "fp32", "the GPU has no tensor cores"
        return "fp32", f"mixed precision was never tested on {self.kind}"


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Bytes of memory. peak: the most that this process had allocated (on a CPU: its resident memory now)."""

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
                divide_among_chips(copies)
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
        """As `block_main_stream`, for another stream; None on a CPU."""
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
