"""System telemetry in a thread: one line of devices.jsonl per second with values of GPUs and host.

It is independent of the training: where devices.jsonl and the ledger disagree, that is a finding. A value that cannot
be read is absent from the line; if the sampler itself fails, it writes an event and stops. A driver that hangs costs
only the GPU values: it is queried in its own thread (`timeouts`), and another thread receives its errors.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

import pynvml

from stoker.profiling.telemetry.gpu import GpuSampler
from stoker.profiling.telemetry.host import HostSampler
from stoker.profiling.telemetry.kernel_log import read_kernel_lines
from stoker.profiling.telemetry.nvml import Gpu, handle_pointer
from stoker.profiling.telemetry.timeouts import TimeoutWorker
from stoker.runs.records import DEVICES, RunFolder
from stoker.runs.schemas import DeviceSample, GpuSample

DRIVER_TIMEOUT_S = 0.5
"""How long a line waits for the driver: a healthy one takes milliseconds, or 40 ms if PCIe traffic is sampled."""

DRIVER_HANG_S = 10.0
"""A driver that has not answered for this time hangs: opening one that is not loaded takes seconds."""

POLL_TIMEOUT_MS = 200
"""A wait in the driver cannot be interrupted: stopping takes this long."""

REPEAT_INTERVAL_S = 60.0
"""If a GPU repeats a number, it is written at most once in this time."""

MAX_XIDS_PER_SAMPLE = 16
"""Maximum numbers of a GPU in one line of devices.jsonl."""

_EVENT_TYPES = pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypeDoubleBitEccError


class TelemetrySampler:
    """Samples from `start` to `stop`, or inside a `with` block. `last`: the newest sample, for the display.

    pid: the root process of a watched job; default: this process. interval_s: between lines; they are at multiples of
    it since the start, however long a sample takes."""

    def __init__(self, run: RunFolder, *, pid: int | None = None, interval_s: float = 1.0) -> None:
        self.last: DeviceSample | None = None
        self._run = run
        self._pid = pid
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._thread_main, name="telemetry", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ends the thread; after `timeout_s`, a thread that hangs is abandoned (it is a daemon)."""
        self._stop.set()
        self._thread.join(timeout_s)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _thread_main(self) -> None:
        try:
            self._sample_until_stopped()
        except Exception as error:  # noqa: BLE001 (training goes on without telemetry, and an event says so)
            self._run.event("warning", f"devices.jsonl ends here: {type(error).__name__}: {error}")

    def _sample_until_stopped(self) -> None:
        with (
            contextlib.closing(HostSampler(pid=self._pid, run_dir=self._run.path)) as host,
            contextlib.closing(DriverSampler(self._run, pid=self._pid)) as driver,
        ):
            due_s = time.monotonic()
            while True:
                due_s = next_due(due_s, time.monotonic(), self._interval_s)
                if self._stop.wait(due_s - time.monotonic()):
                    return
                gpus = driver.sample()
                sample = host.sample(attempt=self._run.attempt, gpus=gpus)
                self._run.append(DEVICES, sample)
                self.last = sample


class DriverSampler:
    """The GPUs of a run and their errors, queried with a timeout. pid: as in `TelemetrySampler`."""

    def __init__(self, run: RunFolder, *, pid: int | None = None) -> None:
        self._run = run
        self._pid = pid
        self._lock = threading.Lock()
        self._xid_listener: XidListener | None = None
        self._closed = False
        self._reason: str | None = None
        self._indices: list[int] = []
        self._query_start_s: float | None = None
        """Start of the query that is not answered yet."""
        self._is_hanging = False
        self._worker = TimeoutWorker(self._open, name="driver")

    def sample(self) -> list[GpuSample]:
        """A sample of each GPU; without values if the driver does not answer in time."""
        if self._query_start_s is None:
            self._query_start_s = time.monotonic()
        answer = self._worker.call(DRIVER_TIMEOUT_S)
        waited_s = time.monotonic() - self._query_start_s
        if answer is None:
            if waited_s >= DRIVER_HANG_S and not self._is_hanging:
                self._is_hanging = True
                self._run.event("warning", f"telemetry: the driver has not answered for {waited_s:.0f} s")
            return [GpuSample(index=index) for index in self._indices]
        self._query_start_s = None
        if self._is_hanging:
            self._is_hanging = False
            self._run.event("info", f"telemetry: the driver answers again, after {waited_s:.0f} s")
        samples, reason = answer
        if reason != self._reason:
            self._reason = reason
            self._run.event("warning", f"telemetry: {reason}")
        return samples

    def close(self) -> None:
        """Stops the threads; a thread that hangs is abandoned."""
        with self._lock:
            self._closed = True
            listener = self._xid_listener
        if listener is not None:
            listener.stop()
        self._worker.stop()

    def _open(self) -> Callable[[], tuple[list[GpuSample], str | None]]:
        gpus = GpuSampler(pid=self._pid)
        with self._lock:
            if not self._closed:
                self._xid_listener = XidListener(gpus.gpus, self._run)
        self._reason = gpus.reason  # of a machine without a driver: environment.json has it
        self._indices = [gpu.index for gpu in gpus.gpus]

        def sample() -> tuple[list[GpuSample], str | None]:
            samples = gpus.sample()
            for gpu_sample in samples:
                gpu_sample.xids = [] if self._xid_listener is None else self._xid_listener.pop_xids(gpu_sample.index)
            return samples, gpus.reason

        return sample


class XidListener:
    """Receives errors that the driver reports for the GPUs (Xids), in a thread, until `stop`: the driver delivers them
    only to a process that waits for them. An event `gpu_fault` is written at once, because the driver may hang
    afterwards; the numbers are also in the next line of devices.jsonl. What a number means is in `stoker/diagnosis/`.
    For a driver without these events (vGPU, WSL, very old GPUs) there is no thread."""

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


def next_due(due_s: float, now_s: float, interval_s: float) -> float:
    """The first time after `now_s` that is a whole number of intervals, at least one, after `due_s`."""
    return due_s + interval_s * max(1, math.floor((now_s - due_s) / interval_s) + 1)
