"""System telemetry in a thread: one line of devices.jsonl per second with values of GPUs and host.

It is independent of the training: where devices.jsonl and the ledger disagree, that is a finding. A value that cannot
be read is absent from the line; if the sampler itself fails, it writes an event and stops. A driver that hangs costs
only the GPU values: it is queried in its own thread (`timeouts`), and another thread receives its errors (`xid`).
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable
from typing import Self

from stoker.profiling.telemetry.gpu import GpuSampler
from stoker.profiling.telemetry.host import HostSampler
from stoker.profiling.telemetry.timeouts import TimeoutWorker
from stoker.profiling.telemetry.xid import XidListener
from stoker.runs.records import DEVICES, RunFolder
from stoker.runs.schemas import DeviceSample, GpuSample

DRIVER_TIMEOUT_S = 0.5
"""How long a line waits for the driver: a healthy one takes milliseconds, or 40 ms if PCIe traffic is sampled."""

DRIVER_HANG_S = 10.0
"""A driver that has not answered for this time hangs: opening one that is not loaded takes seconds."""


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


def next_due(due_s: float, now_s: float, interval_s: float) -> float:
    """The first time after `now_s` that is a whole number of intervals, at least one, after `due_s`."""
    return due_s + interval_s * max(1, math.floor((now_s - due_s) / interval_s) + 1)
