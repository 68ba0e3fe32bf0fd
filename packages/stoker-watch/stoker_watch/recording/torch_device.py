"""The accelerator that a loop computes on, through the torch that its process has imported: nothing here imports torch.

The trainer's own device (`stoker/hardware/device.py`) has its clock from here.
"""

import time
from collections.abc import Sequence
from typing import Any

XLA_KINDS = frozenset({"xla", "tpu"})
"""Devices whose programs XLA compiles: `xla` of torch_xla (also its CPU client), `tpu` of torch_tpu. Streams, events,
pinned memory and fused optimizers are not used there."""


class TorchDevice:
    """torch: the module; device: a `torch.device` with an index."""

    def __init__(self, torch: Any, device: Any) -> None:
        self._torch, self._device = torch, device
        self._has_streams = device.type not in XLA_KINDS | {"cpu"}
        self._stream: Any = None

    def make_clock(self) -> "DeviceClock":
        return DeviceClock(self._torch, self._device, has_events=self._has_streams)

    def synchronize(self) -> None:
        """Waits until the device has finished all work that was issued."""
        if self._has_streams:
            self._torch.accelerator.synchronize(self._device)
        elif self._device.type == "xla":
            import torch_xla

            torch_xla.sync(wait=True)

    def peak_bytes(self) -> int:
        """The maximum of its memory that this process had allocated."""
        if self._device.type == "xla":
            from torch_xla.core import xla_model

            memory = xla_model.get_memory_info(self._device)
            return int(memory.get("peak_bytes_used", memory["bytes_used"]))
        accelerator = self._torch.accelerator
        if not hasattr(accelerator, "max_memory_allocated"):  # torch 2.6
            accelerator = self._torch.get_device_module(self._device.type)
        return int(accelerator.max_memory_allocated(self._device))

    def scalars_to_host(self, values: Sequence[Sequence[Any]]) -> "Copies":
        """Starts copies of lists of scalars to the host, on a stream of its own: the host does not wait."""
        torch = self._torch
        stacked = [torch.stack([value.float().to(self._device) for value in one]) for one in values]
        if not self._has_streams:
            return Copies([tensor.to("cpu", copy=True) for tensor in stacked], None)
        self._stream = self._stream or torch.Stream(self._device)  # only one: torch has few streams and reuses them
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in stacked]
        with self._stream:
            for copy, tensor in zip(copies, stacked, strict=True):
                copy.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._stream)
        return Copies(copies, self._stream.record_event())


class Copies:
    """Tensors on the host, which have their values when the event is done."""

    def __init__(self, tensors: list[Any], event: Any) -> None:
        self.tensors, self._event = tensors, event

    def done(self) -> bool:
        return self._event is None or bool(self._event.query())

    def synchronize(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class DeviceClock:
    """Times of work of the device in seconds of the host's `time.perf_counter`, without host syncs. The time of an
    event is computed from the event resolved before it: the difference of two events is a float32 in ms, which loses
    precision over hours. So `resolve` must be called in the order of the events, which are then reused."""

    def __init__(self, torch: Any, device: Any, *, has_events: bool) -> None:
        self._torch, self._device = torch, device
        self._last_event: Any = None
        self._last_s = 0.0
        self._pool: list[Any] = []
        if has_events:
            torch.accelerator.synchronize(device)
            self._last_event = self.record_event()
            self._last_event.synchronize()
            self._last_s = time.perf_counter()

    @property
    def on_host(self) -> bool:
        """Whether the host's clock is the only one: on the host itself, and on a device without events."""
        return self._last_event is None

    def record_event(self) -> Any:
        """A `torch.Event` at the end of the work issued so far."""
        event = self._pool.pop() if self._pool else self._torch.Event(self._device, enable_timing=True)
        event.record(self._torch.accelerator.current_stream(self._device))
        return event

    def resolve(self, mark: Any) -> float | None:
        """Seconds of `time.perf_counter`, or None while the device has not reached the event."""
        if not mark.query():
            return None
        self._last_s += self._last_event.elapsed_time(mark) / 1e3
        self._pool.append(self._last_event)
        self._last_event = mark
        return self._last_s


HOST_CLOCK = DeviceClock(None, None, has_events=False)
"""Of a loop that uses no device."""
