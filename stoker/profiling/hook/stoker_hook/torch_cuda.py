"""The time in which the device worked, by events on the training stream from a batch to its step, read later by
`query()`.

Two events a step, from a pool; the job never waits for one. Not for CPUs, where the training thread does the work.
Untested on a GPU (docs/gpu-status.md).
"""

from collections import deque

from .clock import BUSY, DEVICE, DEVICE_COMM, SYNCS, clock
from .failures import report_failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_PENDING = 256
"""Pairs of events that are not complete; if the device lags by more, its time is not measured."""


def make_device_events(phase_clock: "Any") -> "Any":
    """Events of this process, or None if torch does not use a CUDA device (ROCm is named CUDA too)."""
    from sys import modules

    torch = modules["torch"]
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_available() or not cuda.is_initialized():
        return None
    phase_clock.values[DEVICE] = 1.0
    _count_syncs(torch)
    return DeviceEvents(lambda: cuda.Event(enable_timing=True))


class DeviceEvents:
    """new_event: creates an event with record(), query(), elapsed_time(other) in milliseconds."""

    def __init__(self, new_event: "Any") -> None:
        self._new_event = new_event
        self._free_events: list[Any] = []
        self._start_event: Any = None
        self._comm_start_event: Any = None
        self._pending: deque[Any] = deque()

    def resume(self) -> None:
        """A batch has arrived: work of the device begins."""
        if self._start_event is None:
            self._start_event = self._record()

    def pause(self) -> None:
        """The work on the batch has been issued."""
        if self._start_event is not None:
            self._add_interval(BUSY, self._start_event)
            self._start_event = None
        self._resolve()

    def comm_begins(self) -> None:
        self._comm_start_event = self._record()

    def comm_ends(self) -> None:
        if self._comm_start_event is not None:
            self._add_interval(DEVICE_COMM, self._comm_start_event)
            self._comm_start_event = None

    def _record(self) -> "Any":
        event = self._free_events.pop() if self._free_events else self._new_event()
        event.record()
        return event

    def _add_interval(self, slot: int, start: "Any") -> None:
        if len(self._pending) < MAX_PENDING:
            self._pending.append((slot, start, self._record()))
        else:
            self._free_events.append(start)
            report_failure("events", RuntimeError("the device lags too far behind: a part of its time is not measured"))

    def _resolve(self) -> None:
        while self._pending and self._pending[0][2].query():
            slot, start, end = self._pending.popleft()
            clock.values[slot] += start.elapsed_time(end) / 1e3
            self._free_events += (start, end)


def _count_syncs(torch: "Any") -> None:
    """Counts `.item()` and `synchronize()`: after these the device is idle until the host issues new work."""
    item, synchronize = torch.Tensor.item, torch.cuda.synchronize

    def counted_item(self: "Any") -> "Any":
        if self.is_cuda:
            clock.values[SYNCS] += 1.0
        return item(self)

    def counted_synchronize(*args: "Any", **kwargs: "Any") -> "Any":
        clock.values[SYNCS] += 1.0
        return synchronize(*args, **kwargs)

    torch.Tensor.item, torch.cuda.synchronize = counted_item, counted_synchronize
