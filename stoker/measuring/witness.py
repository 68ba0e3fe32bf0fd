"""The second witness: a thread that writes down, once a second, what driver and kernel say of GPUs and host.

It knows nothing of the training and takes no part in it: where its devices.jsonl and the ledger disagree, that is a
finding. What it cannot read is absent from the line; when it fails itself it says so in an event and stops.
"""

import dataclasses
import math
import threading
import time
from types import TracebackType
from typing import Self

from stoker.measuring.gpu import Gpus
from stoker.measuring.host import Host
from stoker.records import DEVICES, RunFolder
from stoker.schemas import DeviceSample


class Witness:
    """Samples from `start` to `stop`, or inside a `with` block. `last`: the newest sample, for the screen.

    pid: the root of the processes that are looked at, of a job that is watched; default: this process. interval_s: from
    line to line; lines keep to multiples of it since the start, however long a sample takes.
    """

    def __init__(self, run: RunFolder, *, pid: int | None = None, interval_s: float = 1.0) -> None:
        self.last: DeviceSample | None = None
        self._run = run
        self._pid = pid
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="witness", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ends the thread; one that hangs in the driver is left behind (it is a daemon) after `timeout_s`."""
        self._stop.set()
        self._thread.join(timeout_s)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _watch(self) -> None:
        try:
            self._sample_until_stopped()
        except Exception as error:  # noqa: BLE001 (training goes on without its second witness, and the run says so)
            self._run.event("warning", f"devices.jsonl ends here: {type(error).__name__}: {error}")

    def _sample_until_stopped(self) -> None:
        host, gpus = Host(pid=self._pid), Gpus()
        reason = gpus.reason
        due_s = time.monotonic()
        while True:
            due_s = next_due(due_s, time.monotonic(), self._interval_s)
            if self._stop.wait(due_s - time.monotonic()):
                return
            sample = DeviceSample(
                t=time.time(), attempt=self._run.attempt, gpus=gpus.sample(), **dataclasses.asdict(host.sample())
            )
            self._run.append(DEVICES, sample)
            self.last = sample
            if gpus.reason != reason:  # without a driver it stays the same from the start: environment.json has it
                reason = gpus.reason
                self._run.event("warning", f"telemetry: {reason}")


def next_due(due_s: float, now_s: float, interval_s: float) -> float:
    """The first moment after `now_s` that is a whole number of intervals, at least one, after `due_s`."""
    return due_s + interval_s * max(1, math.floor((now_s - due_s) / interval_s) + 1)
