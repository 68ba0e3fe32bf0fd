"""Errors that the driver reports for a GPU (Xids) while a run is running, received in a separate thread.

The driver delivers them only to a process that waits for them; they cannot be queried later. An event `gpu_fault` is
written at once, because the driver may hang afterwards; the numbers are also in the next line of devices.jsonl. What a
number means is in `stoker/diagnosis/`. After a run, the kernel log has them too: `kernel_log`.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any

import pynvml

from stoker.profiling.telemetry.kernel_log import read_kernel_lines
from stoker.profiling.telemetry.nvml import Gpu, handle_pointer
from stoker.runs.records import RunFolder

POLL_TIMEOUT_MS = 200
"""A wait in the driver cannot be interrupted: stopping takes this long."""

REPEAT_INTERVAL_S = 60.0
"""If a GPU repeats a number, it is written at most once in this time."""

MAX_XIDS_PER_SAMPLE = 16
"""Maximum numbers of a GPU in one line of devices.jsonl."""

_EVENT_TYPES = pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypeDoubleBitEccError


class XidListener:
    """Receives errors of the GPUs until `stop`, and writes events. For a driver without these events (vGPU, WSL, very
    old GPUs) there is no thread."""

    def __init__(self, gpus: Sequence[Gpu], run: RunFolder) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._pending_xids: dict[int, list[int]] = {}
        self._reported: dict[tuple[int, int | None], tuple[float, int]] = {}
        """(GPU, number) → when it was written, and how often it came since."""
        self._stop = threading.Event()
        self._index_by_handle = {handle_pointer(gpu.device): gpu.index for gpu in gpus if gpu.device is not None}
        self._events = _register_events([gpu.device for gpu in gpus if gpu.device is not None])
        self._thread = threading.Thread(target=self._listen, name="xids", daemon=True)
        if self._events is not None:
            self._thread.start()

    def pop_xids(self, index: int) -> list[int]:
        """The numbers that a GPU reported since the last call, at most MAX_XIDS_PER_SAMPLE."""
        with self._lock:
            return self._pending_xids.pop(index, [])

    def stop(self, timeout_s: float = 5 * POLL_TIMEOUT_MS / 1e3) -> bool:
        """Stops listening; whether the thread ended in time. A thread that hangs in the driver is abandoned."""
        self._stop.set()
        if self._events is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _listen(self) -> None:
        try:
            while not self._stop.is_set():
                self._wait_for_event()
        except pynvml.NVMLError as error:
            self._run.event("warning", f"telemetry: errors of the GPUs are no longer received: {error}")
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
        if index is None:  # not a GPU of this run
            return
        xid = int(event.eventData) if event.eventType == pynvml.nvmlEventTypeXidCriticalError else None
        if xid is not None:
            with self._lock:
                xids = self._pending_xids.setdefault(index, [])
                if len(xids) < MAX_XIDS_PER_SAMPLE:
                    xids.append(xid)
        self._report(index, xid, time.monotonic())

    def _report(self, index: int, xid: int | None, now_s: float) -> None:
        """xid: NVIDIA's number; None: an uncorrected memory error without one."""
        last_s, count = self._reported.get((index, xid), (-REPEAT_INTERVAL_S, 0))
        if now_s - last_s < REPEAT_INTERVAL_S:
            self._reported[index, xid] = last_s, count + 1
            return
        self._reported[index, xid] = now_s, 0
        data: dict[str, Any] = {"gpu": index, "count": count + 1}
        text = f"GPU {index}: " + ("uncorrected memory error" if xid is None else f"Xid {xid}")
        text += f", {count + 1} times" if count else ""
        if xid is not None:
            data["xid"] = xid
            if (kernel := _find_kernel_message(xid, now_s)) is not None:
                data["kernel"] = kernel
                text += f" ({kernel})"
        self._run.event("gpu_fault", text, **data)


def _register_events(handles: list[Any]) -> Any:
    """NVML's event set; None if no GPU reports errors."""
    events, any_registered = None, False
    try:
        events = pynvml.nvmlEventSetCreate() if handles else None
    except pynvml.NVMLError:  # not supported by this driver
        return None
    for handle in handles:
        try:
            types = pynvml.nvmlDeviceGetSupportedEventTypes(handle) & _EVENT_TYPES
            if types:
                pynvml.nvmlDeviceRegisterEvents(handle, types, events)
                any_registered = True
        except pynvml.NVMLError:  # not supported by this GPU
            continue
    if not any_registered and events is not None:
        pynvml.nvmlEventSetFree(events)
    return events if any_registered else None


def _find_kernel_message(xid: int, now_s: float) -> str | None:
    """The newest line of the kernel log with this number; the driver writes it before it reports the error."""
    lines = read_kernel_lines(now_s - 10.0) or []
    return next((line.text for line in reversed(lines) if line.kind == "xid" and f": {xid}," in line.text), None)
