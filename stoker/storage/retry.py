"""When a request is made again: which failures pass, how long to wait, and how many retries a bucket is asked to bear.

Waits have full jitter (AWS Architecture Blog, "Exponential Backoff and Jitter", 2015). Retries come out of a budget per
store, a share of its requests and a floor (Google, "Site Reliability Engineering", chapter 21): a bucket that is down
is not asked more often for being down. An empty budget delays; what ends a request is its time. What a failure means
to the user is said in `failures.py`.
"""

import os
import random
import threading
import time
from dataclasses import dataclass, field

from stoker.errors import ConfigError
from stoker.storage.failures import Failure

BASE_S, CAP_S = 0.1, 20.0
"""The n-th wait is uniform between 0 and min(CAP_S, BASE_S · 2ⁿ)."""
BUDGET_SHARE = 0.1
"""Retries per request, in the long run."""
BUDGET_BURST = 20.0
BUDGET_PER_S = 10.0
"""The floor: what a store gives however few its requests; one upload, or the end of an outage, is not starved."""
CONNECT_SHARE = 6
"""While a store has never answered, failures to connect are believed after 1/6 of the time: a typing error in an
endpoint should not take two minutes to be told."""


@dataclass(frozen=True)
class Limits:
    """Times in seconds. total_s: of a request with all its retries (STOKER_STORAGE_TIMEOUT_S)."""

    total_s: float = 120.0

    @property
    def stall_s(self) -> float:
        """No byte for so long: the connection is given up, the request made again."""
        return self.total_s / 8

    @classmethod
    def from_environment(cls) -> "Limits":
        text = os.environ.get("STOKER_STORAGE_TIMEOUT_S")
        if not text:
            return cls()
        try:
            total_s = float(text)
        except ValueError:
            total_s = 0.0
        if not 0.0 < total_s < 86400.0:
            raise ConfigError(
                f"STOKER_STORAGE_TIMEOUT_S is {text!r}.",
                choices=["seconds, more than 0 and less than 86400"],
                fix=f"Unset it for the default, {cls.total_s:g}.",
            )
        return cls(total_s)


@dataclass
class Counts:
    """What a store has done. Requests include retries and hedges."""

    requests: int = 0
    retries: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    """By what they were: "503", "timeout" …; those that a retry mended, too."""


class Budget:
    """How many retries a store may still be asked for; and its counts. From any thread."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.answered = False
        """Whether the store ever answered, if only with a refusal."""
        self._lock = threading.Lock()
        self._tokens = BUDGET_BURST
        self._filled = time.monotonic()

    def request(self) -> None:
        with self._lock:
            self.counts.requests += 1
            self._tokens = min(BUDGET_BURST, self._tokens + BUDGET_SHARE)

    def moved(self, *, read: int = 0, written: int = 0) -> None:
        with self._lock:
            self.answered = True
            self.counts.read_bytes += read
            self.counts.written_bytes += written

    def failed(self, name: str) -> None:
        with self._lock:
            self.counts.failures[name] = self.counts.failures.get(name, 0) + 1

    def retry(self, now: float) -> float:
        """Takes a retry; how many seconds it has to wait until it is there."""
        with self._lock:
            self._tokens = min(BUDGET_BURST, self._tokens + (now - self._filled) * BUDGET_PER_S) - 1.0
            self._filled = now
            return max(0.0, -self._tokens / BUDGET_PER_S)

    def retried(self) -> None:
        with self._lock:
            self.counts.retries += 1


class Tries:
    """One request and its retries."""

    def __init__(self, limits: Limits, budget: Budget) -> None:
        self._limits, self._budget = limits, budget
        self._began = time.monotonic()
        self.failures: list[Failure] = []
        budget.request()

    def again(self, failure: Failure) -> float | None:
        """Seconds to wait before the next try; None: this failure stays."""
        self.failures.append(failure)
        budget = self._budget
        budget.failed(failure.name)
        if failure.status is not None:
            budget.answered = True
        if not failure.passes:
            return None
        now = time.monotonic()
        total_s = self._limits.total_s
        if failure.unconnected and not budget.answered:
            total_s /= CONNECT_SHARE
        left = self._began + total_s - now
        # Not the generator of the module: its numbers may be a training's.
        jitter = _RANDOM.uniform(0.0, min(CAP_S, BASE_S * 2.0 ** (len(self.failures) - 1)))
        if jitter >= left:
            return None
        wait = max(jitter, budget.retry(now))
        if wait >= left:
            return None
        budget.retried()
        budget.request()
        return wait

    def said(self) -> str:
        """What was tried, for the message."""
        seconds = time.monotonic() - self._began
        names = [failure.name for failure in self.failures]
        kinds = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
        return f"tried {len(names)} times in {seconds:.0f} s: {kinds}"


_RANDOM = random.Random()
