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

from stoker.profiling.telemetry.kernel_log import kernel_lines
from stoker.profiling.telemetry.nvml import Gpu, address

WAIT_MS = 200
"""The driver cannot be called away from its wait: so long does an end take."""

QUIET_S = 60.0
"""A GPU that reports the same number over and over is written down once in so long."""

MOST = 16
"""Numbers of a GPU that one line of devices.jsonl holds."""

_TOLD = pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypeDoubleBitEccError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """gpu: the driver's number; xid: NVIDIA's number, None of an uncorrected memory error without one; count: of the
    same since the last one that was told; kernel: what the kernel's log says of it, where it may be read."""

    gpu: int
    xid: int | None
    count: int
    kernel: str | None

    @property
    def text(self) -> str:
        what = "uncorrected memory error" if self.xid is None else f"Xid {self.xid}"
        times = f", {self.count} times" if self.count > 1 else ""
        return f"GPU {self.gpu}: {what}{times}" + (f" ({self.kernel})" if self.kernel else "")


class Faults:
    """Listens to the GPUs from now until `end`. say: gets each fault, in the listening thread; lost: gets the reason
    when no more can be heard. A driver that reports none (vGPU, WSL, very old GPUs) has nobody listening."""

    def __init__(self, gpus: Sequence[Gpu], say: Callable[[Fault], None], lost: Callable[[str], None]) -> None:
        self._say, self._lost = say, lost
        self._lock = threading.Lock()
        self._heard: dict[int, list[int]] = {}
        self._told: dict[tuple[int, int | None], tuple[float, int]] = {}
        """When this number of this GPU was told, and how often it came since."""
        self._stop = threading.Event()
        self._numbers = {address(gpu.whole): gpu.index for gpu in gpus if gpu.whole is not None}
        self._events = _registered([gpu.whole for gpu in gpus if gpu.whole is not None])
        self._thread = threading.Thread(target=self._listen, name="xids", daemon=True)
        if self._events is not None:
            self._thread.start()

    def take(self, index: int) -> list[int]:
        """The numbers that a GPU has reported since this was asked before, at most MOST."""
        with self._lock:
            return self._heard.pop(index, [])

    def end(self, within_s: float = 5 * WAIT_MS / 1e3) -> bool:
        """Stops listening; whether the thread ended in time. One that hangs in the driver is left behind."""
        self._stop.set()
        if self._events is not None:
            self._thread.join(within_s)
        return not self._thread.is_alive()

    def _listen(self) -> None:
        try:
            while not self._stop.is_set():
                self._hear()
        except pynvml.NVMLError as error:
            self._lost(f"errors of the GPUs are not heard any more: {error}")
        else:
            pynvml.nvmlEventSetFree(self._events)

    def _hear(self) -> None:
        try:
            told = pynvml.nvmlEventSetWait_v2(self._events, WAIT_MS)
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_TIMEOUT:
                return
            raise
        index = self._numbers.get(address(told.device))
        if index is None:  # a GPU of somebody else
            return
        xid = int(told.eventData) if told.eventType == pynvml.nvmlEventTypeXidCriticalError else None
        if xid is not None:
            with self._lock:
                heard = self._heard.setdefault(index, [])
                if len(heard) < MOST:
                    heard.append(xid)
        self._tell(index, xid, time.monotonic())

    def _tell(self, index: int, xid: int | None, now_s: float) -> None:
        last_s, count = self._told.get((index, xid), (-QUIET_S, 0))
        if now_s - last_s < QUIET_S:
            self._told[index, xid] = last_s, count + 1
            return
        self._told[index, xid] = now_s, 0
        self._say(Fault(gpu=index, xid=xid, count=count + 1, kernel=_of_kernel(xid, now_s)))


def _registered(handles: list[Any]) -> Any:
    """NVML's set of events; None where no GPU reports any."""
    events, heard = None, False
    try:
        events = pynvml.nvmlEventSetCreate() if handles else None
    except pynvml.NVMLError:  # this driver has none
        return None
    for handle in handles:
        try:
            types = pynvml.nvmlDeviceGetSupportedEventTypes(handle) & _TOLD
            if types:
                pynvml.nvmlDeviceRegisterEvents(handle, types, events)
                heard = True
        except pynvml.NVMLError:  # this GPU reports none; the others are heard
            continue
    if not heard and events is not None:
        pynvml.nvmlEventSetFree(events)
    return events if heard else None


def _of_kernel(xid: int | None, now_s: float) -> str | None:
    """The newest line of the kernel's log about this number; the driver writes it before it reports the error."""
    if xid is None:
        return None
    lines = kernel_lines(now_s - 10.0) or []
    return next((line.text for line in reversed(lines) if line.kind == "xid" and f": {xid}," in line.text), None)
