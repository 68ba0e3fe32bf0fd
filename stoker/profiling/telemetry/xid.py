"""Errors that the driver reports of a GPU (Xids) while a run lives, heard in a thread of their own.

The driver tells who waits for them when they happen; nobody can ask later. An event `gpu_fault` is written at once,
since what follows may be a driver that answers nothing; the numbers go into the next line of devices.jsonl too. What a
number means is the diagnosis's (`diagnose`). After the fact, the kernel's log has them as well: `kernel`.
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pynvml

from stoker.profiling.telemetry.kernel_log import read_kernel_lines
from stoker.profiling.telemetry.nvml import Gpu, handle_pointer

POLL_TIMEOUT_MS = 200
"""The driver cannot be called away from its wait: so long does an end take."""

REPEAT_INTERVAL_S = 60.0
"""A GPU that reports the same number over and over is written down once in so long."""

MAX_XIDS_PER_SAMPLE = 16
"""Numbers of a GPU that one line of devices.jsonl holds."""

_EVENT_TYPES = pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypeDoubleBitEccError


@dataclasses.dataclass(frozen=True, kw_only=True)
class XidEvent:
    """gpu: the driver's number; xid: NVIDIA's number, None of an uncorrected memory error without one; count: of the
    same since the last one that was told; kernel: what the kernel's log says of it, where it may be read."""

    gpu: int
    xid: int | None
    count: int
    kernel: str | None

    @property
    def text(self) -> str:
        description = "uncorrected memory error" if self.xid is None else f"Xid {self.xid}"
        times = f", {self.count} times" if self.count > 1 else ""
        return f"GPU {self.gpu}: {description}{times}" + (f" ({self.kernel})" if self.kernel else "")


class XidListener:
    """Listens to the GPUs from now until `end`. say: gets each fault, in the listening thread; lost: gets the reason
    when no more can be heard. A driver that reports none (vGPU, WSL, very old GPUs) has nobody listening."""

    def __init__(
        self, gpus: Sequence[Gpu], on_event: Callable[[XidEvent], None], on_failure: Callable[[str], None]
    ) -> None:
        self._on_event, self._on_failure = on_event, on_failure
        self._lock = threading.Lock()
        self._pending_xids: dict[int, list[int]] = {}
        self._reported: dict[tuple[int, int | None], tuple[float, int]] = {}
        """When this number of this GPU was told, and how often it came since."""
        self._stop = threading.Event()
        self._index_by_handle = {handle_pointer(gpu.device): gpu.index for gpu in gpus if gpu.device is not None}
        self._events = _register_events([gpu.device for gpu in gpus if gpu.device is not None])
        self._thread = threading.Thread(target=self._listen, name="xids", daemon=True)
        if self._events is not None:
            self._thread.start()

    def pop_xids(self, index: int) -> list[int]:
        """The numbers that a GPU has reported since this was asked before, at most MOST."""
        with self._lock:
            return self._pending_xids.pop(index, [])

    def stop(self, timeout_s: float = 5 * POLL_TIMEOUT_MS / 1e3) -> bool:
        """Stops listening; whether the thread ended in time. One that hangs in the driver is left behind."""
        self._stop.set()
        if self._events is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _listen(self) -> None:
        try:
            while not self._stop.is_set():
                self._wait_for_event()
        except pynvml.NVMLError as error:
            self._on_failure(f"errors of the GPUs are not heard any more: {error}")
        else:
            pynvml.nvmlEventSetFree(self._events)

    def _wait_for_event(self) -> None:
        try:
            event = pynvml.nvmlEventSetWait_v2(self._events, POLL_TIMEOUT_MS)
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_TIMEOUT:
                return
            raise
        index = self._index_by_handle.get(handle_pointer(event.device))
        if index is None:  # a GPU of somebody else
            return
        xid = int(event.eventData) if event.eventType == pynvml.nvmlEventTypeXidCriticalError else None
        if xid is not None:
            with self._lock:
                xids = self._pending_xids.setdefault(index, [])
                if len(xids) < MAX_XIDS_PER_SAMPLE:
                    xids.append(xid)
        self._report(index, xid, time.monotonic())

    def _report(self, index: int, xid: int | None, now_s: float) -> None:
        last_s, count = self._reported.get((index, xid), (-REPEAT_INTERVAL_S, 0))
        if now_s - last_s < REPEAT_INTERVAL_S:
            self._reported[index, xid] = last_s, count + 1
            return
        self._reported[index, xid] = now_s, 0
        self._on_event(XidEvent(gpu=index, xid=xid, count=count + 1, kernel=_find_kernel_message(xid, now_s)))


def _register_events(handles: list[Any]) -> Any:
    """NVML's set of events; None where no GPU reports any."""
    events, any_registered = None, False
    try:
        events = pynvml.nvmlEventSetCreate() if handles else None
    except pynvml.NVMLError:  # this driver has none
        return None
    for handle in handles:
        try:
            types = pynvml.nvmlDeviceGetSupportedEventTypes(handle) & _EVENT_TYPES
            if types:
                pynvml.nvmlDeviceRegisterEvents(handle, types, events)
                any_registered = True
        except pynvml.NVMLError:  # this GPU reports none; the others are heard
            continue
    if not any_registered and events is not None:
        pynvml.nvmlEventSetFree(events)
    return events if any_registered else None


def _find_kernel_message(xid: int | None, now_s: float) -> str | None:
    """The newest line of the kernel's log about this number; the driver writes it before it reports the error."""
    if xid is None:
        return None
    lines = read_kernel_lines(now_s - 10.0) or []
    return next((line.text for line in reversed(lines) if line.kind == "xid" and f": {xid}," in line.text), None)
