"""Which ranks of a training are alive, by counters that they write into the store of the job.

A rank that is stopped, frozen or cut off does not fail: who waits for it waits for hours. So a thread of each rank
writes a counter every second and reads those of others; how long one has not changed, the reader measures with its own
clock. Rank 0 reads all of them, the others that of rank 0, which also says whether any rank makes progress: so the work
of the store grows with the number of ranks, not with its square. What follows from silence, decides `watchdog.py`.

A call of a store whose process is stopped, or whose machine is cut off, does not return, whatever its timeout (torch
2.11 and 2.15). Only this thread waits for the store, over a connection of its own. It also reads what the ranks publish
there: the first failure, and that rank 0 is done.
"""

import contextlib
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from stoker_watch.errors import HungError

BEAT_S = 1.0
FRESH_S = 20.0
"""A rank is never taken for frozen before: a loaded machine may let a thread wait for seconds."""
CALL_TIMEOUT_S = 5.0
"""Seconds that a thread waits for the store or the disk."""
POLL_S = 0.05
FAILURE, DONE = "stoker/failure", "stoker/done"
_BEAT = "stoker/beat/{}"


class Beat(msgspec.Struct, frozen=True):
    """What a rank writes every second."""

    count: int
    progresses: bool
    """Whether this rank makes progress, or may be slow; in rank 0 whether any does."""
    host: str = "an unknown machine"
    pid: int = 0


class Heartbeats:
    """The heartbeats of this rank and of the ranks that it watches. One thread calls `tick` and what reads them."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.progresses = True
        self.limit_s = math.inf
        """Seconds of silence after which a rank is frozen."""
        self.published: dict[str, bytes] = {}
        """FAILURE and DONE, as soon as they are there."""
        self.lost = ""
        """Why the store is gone; empty while it is there."""
        self._store, self._rank, self._count = store.clone(), rank, 0
        self._watched = range(1, world_size) if rank == 0 else range(1)
        self._beats = {watched: Beat(0, True) for watched in self._watched}
        self._silence = {watched: (0, 0.0) for watched in self._watched}
        """Last count of each, and seconds since then."""
        self._hurries, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="stoker-heartbeats", daemon=True)
        self._write()

    def start(self) -> None:
        """Begins to write; call it after all ranks have made their heartbeats."""
        self._thread.start()

    def hurry(self) -> None:
        """Reads more often from here on, as somebody waits for what is published."""
        self._hurries.set()

    def stop(self) -> None:
        """Ends the thread, before the store goes."""
        self._stopped.set()
        self.hurry()
        self._thread.join(CALL_TIMEOUT_S)

    def tick(self, elapsed_s: float) -> None:
        """Counts the seconds of silence. elapsed_s: in which this process ran."""
        for rank, beat in self._beats.items():
            count, silence_s = self._silence[rank]
            self._silence[rank] = beat.count, silence_s + elapsed_s if beat.count == count else 0.0

    def others_progress(self) -> bool:
        """Whether another rank makes progress, or may be slow."""
        fresh = (beat for rank, beat in self._beats.items() if self._silence[rank][1] < FRESH_S and not self.lost)
        return any(beat.progresses for beat in fresh)

    def frozen(self, limit_s: float) -> HungError | None:
        """The error that names the ranks which have been silent for so long."""
        frozen = {rank: beat for rank, beat in self._beats.items() if self._silence[rank][1] >= limit_s}
        if not frozen:
            return None
        silence_s = max(self._silence[rank][1] for rank in frozen)
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time.time() - silence_s))
        names = ", ".join(f"rank {rank} (process {beat.pid} on {beat.host})" for rank, beat in frozen.items())
        first = next(iter(frozen.values()))
        return HungError(
            f"R{names[1:]} froze or lost its network: no heartbeat for {silence_s:.0f} s, since {since}.",
            cause="it is stopped (SIGSTOP, a paused container), or in an endless call that holds Python's lock; or its "
            f"machine, or the network from there to {socket.gethostname()}, is down",
            fix=f"look at {first.host}: `ps -o stat,wchan -p {first.pid}` (T: stopped), `dmesg`; end the process if it "
            "is still there; the same command continues from the last checkpoint (--restarts 3 does so by itself)",
        )

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._write()
                self._read()
                if self._hurries.wait(BEAT_S):
                    self._stopped.wait(POLL_S)
        except (RuntimeError, msgspec.DecodeError) as error:
            self.lost = str(error).partition("\n")[0] or type(error).__name__

    def _write(self) -> None:
        self._count += 1
        progresses = self.progresses or (self._rank == 0 and self.others_progress())
        beat = Beat(self._count, progresses, socket.gethostname(), os.getpid())
        self._store.set(_BEAT.format(self._rank), msgspec.json.encode(beat).decode())

    def _read(self) -> None:
        values = self._store.multi_get([_BEAT.format(rank) for rank in self._watched])
        self._beats = {
            rank: msgspec.json.decode(value, type=Beat) for rank, value in zip(self._watched, values, strict=True)
        }
        for key in (FAILURE, DONE):
            if key not in self.published and self._store.check([key]):
                self.published[key] = self._store.get(key)


def call_within(timeout_s: float, call: Callable[..., object], *arguments: Any, **named: Any) -> None:
    """Calls a function that may never return, and waits so long for it; what it raises is lost."""

    def run() -> None:
        with contextlib.suppress(Exception):
            call(*arguments, **named)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
