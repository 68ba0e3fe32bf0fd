"""System telemetry in a thread: one line of devices.jsonl per second with values of GPUs and host.

It is independent of the training: where devices.jsonl and the ledger disagree, that is a finding. A value that cannot
be read is absent from the line; if the sampler itself fails, it writes an event and stops; if it lacks descriptors,
threads or memory, it writes an event and begins again until there are enough. A driver that hangs costs
only the GPU values: it is queried in its own thread (`TimeoutWorker`), and another thread receives its errors.
"""

import contextlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import pynvml

from stoker_watch.errors import system_limit
from stoker_watch.recording.telemetry.gpu import Gpu, GpuSampler, handle_pointer
from stoker_watch.recording.telemetry.host import HostSampler
from stoker_watch.recording.telemetry.machine import ForeignProcess, TimeoutWorker
from stoker_watch.recording.telemetry.tpu import TpuSampler
from stoker_watch.runs.records import DEVICES, RunFolder
from stoker_watch.runs.schemas import DeviceSample, GpuSample

DRIVER_TIMEOUT_S = 0.5
"""How long a line waits for the driver: a healthy one takes milliseconds."""

DRIVER_HANG_S = 10.0
"""A driver that has not answered for this time hangs: opening one that is not loaded takes seconds."""

POLL_TIMEOUT_MS = 200
"""A wait in the driver cannot be interrupted: stopping takes this long."""

MAX_XIDS_PER_SAMPLE = 16
"""Maximum numbers of a GPU in one line of devices.jsonl."""


def _variables_of(pid: int | None) -> Mapping[str, str]:
    """The environment of a watched job, which names its GPUs; of this process if there is none, or it may not be
    read."""
    with contextlib.suppress(psutil.Error):
        return os.environ if pid is None else ForeignProcess(pid).environ()
    return os.environ


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

    def __enter__(self) -> "TelemetrySampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ends the thread; after `timeout_s`, a thread that hangs is abandoned (it is a daemon)."""
        self._stop.set()
        self._thread.join(timeout_s)

    def _thread_main(self) -> None:
        is_lacking = False
        while not self._stop.is_set():
            try:
                self._sample_until_stopped()
            except Exception as error:  # noqa: BLE001 (training goes on without telemetry, and an event says so)
                text = f"{type(error).__name__}: {error}"
                if system_limit(error) is None:
                    self._run.event("warning", f"devices.jsonl ends here: {text}")
                    return
                if not is_lacking:
                    self._run.event("warning", f"devices.jsonl has gaps, as the system gives too little: {text}")
                is_lacking = True
                self._stop.wait(self._interval_s)

    def _sample_until_stopped(self) -> None:
        with (
            contextlib.closing(HostSampler(pid=self._pid, run_dir=self._run.path)) as host,
            contextlib.closing(DriverSampler(self._run, pid=self._pid)) as driver,
        ):
            start_s = time.monotonic()
            while not self._stop.wait(self._interval_s - (time.monotonic() - start_s) % self._interval_s):
                sample = host.sample(attempt=self._run.attempt, gpus=driver.sample())
                self._run.append(DEVICES, sample)
                self.last = sample


class DriverSampler:
    """The GPUs of a run and their errors, queried with a timeout. pid: as in `TelemetrySampler`."""

    def __init__(self, run: RunFolder, *, pid: int | None = None) -> None:
        self._run = run
        self._pid = pid
        self._lock = threading.Lock()
        self._gpus: GpuSampler | None = None
        self._tpus: TpuSampler | None = None
        self._xid_listener: XidListener | None = None
        self._closed = False
        self._reason: str | None = None
        self._indices: list[int] = []
        self._last_answer_s: float | None = None
        self._is_hanging = False
        self._worker = TimeoutWorker(self._query, name="driver")

    def sample(self) -> list[GpuSample]:
        """A sample of each GPU; without values if the driver does not answer in time."""
        start_s = time.monotonic()
        self._last_answer_s = start_s if self._last_answer_s is None else self._last_answer_s
        answer = self._worker.call(DRIVER_TIMEOUT_S)
        waited_s = time.monotonic() - self._last_answer_s
        if answer is None:
            if waited_s >= DRIVER_HANG_S and not self._is_hanging:
                self._is_hanging = True
                self._run.event("warning", f"telemetry: the driver has not answered for {waited_s:.0f} s")
            return [GpuSample(index=index) for index in self._indices]
        self._last_answer_s = time.monotonic()
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
        if self._xid_listener is not None:
            self._xid_listener.stop()
        self._worker.stop()
        if self._tpus is not None:
            self._tpus.close()

    def _query(self) -> tuple[list[GpuSample], str | None]:
        """The first query opens the driver, which may hang too."""
        if self._gpus is None:
            gpus = GpuSampler(_variables_of(self._pid), pid=self._pid)
            with self._lock:
                if not self._closed:
                    self._xid_listener = XidListener(gpus.gpus, self._run)
            self._reason = gpus.reason  # of a machine without a driver: environment.json has it
            self._indices = [gpu.index for gpu in gpus.gpus]
            self._gpus = gpus
            if not gpus.gpus:
                self._tpus = TpuSampler()
        samples = self._gpus.sample()
        if self._tpus is not None and (chips := self._tpus.sample() or self._tpus.reason):
            return ([], chips) if isinstance(chips, str) else (chips, self._gpus.reason)
        for sample in samples:
            sample.xids = [] if self._xid_listener is None else self._xid_listener.pop_xids(sample.index)
        return samples, self._gpus.reason


class XidListener:
    """Receives errors that the driver reports for the GPUs (Xids), in a thread, until `stop`: the driver delivers them
    only to a process that waits for them. The first one of a GPU and number is written at once, as an event
    `gpu_fault`, because the driver may hang afterwards; all numbers are in the next line of devices.jsonl. For a driver
    without these events (vGPU, WSL, very old GPUs) there is no thread."""

    def __init__(self, gpus: Sequence[Gpu], run: RunFolder) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._pending_xids: dict[int, list[int]] = {}
        self._reported: set[tuple[int, int]] = set()
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

    def stop(self) -> None:
        """Stops listening. A thread that hangs in the driver is abandoned."""
        self._stop.set()
        if self._events is not None:
            self._thread.join(5 * POLL_TIMEOUT_MS / 1e3)

    def _listen(self) -> None:
        while not self._stop.is_set():
            try:
                event = pynvml.nvmlEventSetWait_v2(self._events, POLL_TIMEOUT_MS)
            except pynvml.NVMLError as error:
                if error.value == pynvml.NVML_ERROR_TIMEOUT:
                    continue
                self._run.event("warning", f"telemetry: errors of the GPUs are no longer received: {error}")
                return
            if (index := self._index_by_handle.get(handle_pointer(event.device))) is not None:  # a GPU of this run
                self._report(index, int(event.eventData))
        pynvml.nvmlEventSetFree(self._events)

    def _report(self, index: int, xid: int) -> None:
        with self._lock:
            xids = self._pending_xids.setdefault(index, [])
            if len(xids) < MAX_XIDS_PER_SAMPLE:
                xids.append(xid)
        if (index, xid) not in self._reported:
            self._reported.add((index, xid))
            self._run.event("gpu_fault", f"GPU {index}: Xid {xid}", gpu=index, xid=xid)


def _register_events(handles: list[Any]) -> Any:
    """NVML's event set; None if no GPU reports errors."""
    with contextlib.suppress(pynvml.NVMLError):  # not supported by this driver
        events = pynvml.nvmlEventSetCreate() if handles else None
        num_registered = 0
        for handle in handles:
            with contextlib.suppress(pynvml.NVMLError):  # not supported by this GPU
                if pynvml.nvmlDeviceGetSupportedEventTypes(handle) & pynvml.nvmlEventTypeXidCriticalError:
                    pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
                    num_registered += 1
        if num_registered:
            return events
        if handles:
            pynvml.nvmlEventSetFree(events)
    return None
