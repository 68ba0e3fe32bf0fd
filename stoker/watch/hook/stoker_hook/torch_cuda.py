"""What the device itself did, by events on the training stream: from a batch to its step, resolved later by `query()`.

Two events a step, from a pool; none is ever waited for, so the job is not slowed down. Not for CPUs, whose work is done
when the training thread goes on. Untested on a GPU (docs/gpu-status.md).
"""

from collections import deque

from . import say
from .clock import BUSY, DEVICE, DEVICE_COMM, SYNCS, clock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MOST_OPEN = 256
"""Pairs that wait to be resolved; a device that is further behind is not followed."""


def marks(of: "Any") -> "Any":
    """Events for this process, or None where torch has no CUDA device in use (ROCm calls itself CUDA too)."""
    from sys import modules

    torch = modules["torch"]
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_available() or not cuda.is_initialized():
        return None
    of.values[DEVICE] = 1.0
    _count_waits(torch)
    return Marks(lambda: cuda.Event(enable_timing=True))


class Marks:
    """new_event: makes an event with record(), query(), elapsed_time(other) in milliseconds."""

    def __init__(self, new_event: "Any") -> None:
        self._new = new_event
        self._free: list[Any] = []
        self._begun: Any = None
        self._comm: Any = None
        self._open: deque[Any] = deque()

    def resume(self) -> None:
        """A batch is there: work of the device begins."""
        if self._begun is None:
            self._begun = self._record()

    def pause(self) -> None:
        """The work on it has been issued."""
        if self._begun is not None:
            self._close(BUSY, self._begun)
            self._begun = None
        self._resolve()

    def comm_begins(self) -> None:
        self._comm = self._record()

    def comm_ends(self) -> None:
        if self._comm is not None:
            self._close(DEVICE_COMM, self._comm)
            self._comm = None

    def _record(self) -> "Any":
        event = self._free.pop() if self._free else self._new()
        event.record()
        return event

    def _close(self, slot: int, begun: "Any") -> None:
        if len(self._open) < MOST_OPEN:
            self._open.append((slot, begun, self._record()))
        else:
            self._free.append(begun)
            say("events", RuntimeError("the device is too far behind: its time is not known in full"))

    def _resolve(self) -> None:
        while self._open and self._open[0][2].query():
            slot, begun, ended = self._open.popleft()
            clock.values[slot] += begun.elapsed_time(ended) / 1e3
            self._free += (begun, ended)


def _count_waits(torch: "Any") -> None:
    """Counts `.item()` and `synchronize()`: after these the device has nothing to do until the host has caught up."""
    item, synchronize = torch.Tensor.item, torch.cuda.synchronize

    def counted_item(self: "Any") -> "Any":
        if self.is_cuda:
            clock.values[SYNCS] += 1.0
        return item(self)

    def counted_synchronize(*words: "Any", **named: "Any") -> "Any":
        clock.values[SYNCS] += 1.0
        return synchronize(*words, **named)

    torch.Tensor.item, torch.cuda.synchronize = counted_item, counted_synchronize
