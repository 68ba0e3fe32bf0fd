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

BACKOFF_BASE_S, BACKOFF_MAX_S = 0.1, 20.0
"""The n-th wait is uniform between 0 and min(CAP_S, BASE_S · 2ⁿ)."""
BUDGET_FRACTION = 0.1
"""Retries per request, in the long run."""
BUDGET_BURST = 20.0
BUDGET_PER_S = 10.0
"""The floor: what a store gives however few its requests; one upload, or the end of an outage, is not starved."""
CONNECT_TIMEOUT_DIVISOR = 6
"""While a store has never answered, failures to connect are believed after 1/6 of the time: a typing error in an
endpoint should not take two minutes to be told."""


@dataclass(frozen=True)
class Timeouts:
    """Times in seconds. total_s: of a request with all its retries (STOKER_STORAGE_TIMEOUT_S)."""

    total_s: float = 120.0

    @property
    def stall_s(self) -> float:
        """No byte for so long: the connection is given up, the request made again."""
        return self.total_s / 8

    @classmethod
    def from_environment(cls) -> "Timeouts":
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
class RequestCounters:
    """What a store has done. Requests include retries and hedges."""

    requests: int = 0
    retries: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    """By what they were: "503", "timeout" …; those that a retry mended, too."""


class RetryBudget:
    """How many retries a store may still be asked for; and its counts. From any thread."""

    def __init__(self) -> None:
        self.counters = RequestCounters()
        self.has_answered = False
        """Whether the store ever answered, if only with a refusal."""
        self._lock = threading.Lock()
        self._tokens = BUDGET_BURST
        self._refilled_s = time.monotonic()

    def count_request(self) -> None:
        with self._lock:
            self.counters.requests += 1
            self._tokens = min(BUDGET_BURST, self._tokens + BUDGET_FRACTION)

    def count_bytes(self, *, read: int = 0, written: int = 0) -> None:
        with self._lock:
            self.has_answered = True
            self.counters.read_bytes += read
            self.counters.written_bytes += written

    def count_failure(self, name: str) -> None:
        with self._lock:
            self.counters.failures[name] = self.counters.failures.get(name, 0) + 1

    def take_retry(self, now_s: float) -> float:
        """Takes a retry; how many seconds it has to wait until it is there."""
        with self._lock:
            self._tokens = min(BUDGET_BURST, self._tokens + (now_s - self._refilled_s) * BUDGET_PER_S) - 1.0
            self._refilled_s = now_s
            return max(0.0, -self._tokens / BUDGET_PER_S)

    def count_retry(self) -> None:
        with self._lock:
            self.counters.retries += 1


class RetryState:
    """One request and its retries."""

    def __init__(self, timeouts: Timeouts, budget: RetryBudget) -> None:
        self._timeouts, self._budget = timeouts, budget
        self._start_s = time.monotonic()
        self.failures: list[Failure] = []
        budget.count_request()

    def next_wait_s(self, failure: Failure) -> float | None:
        """Seconds to wait before the next try; None: this failure stays."""
        self.failures.append(failure)
        budget = self._budget
        budget.count_failure(failure.name)
        if failure.status is not None:
            budget.has_answered = True
        if not failure.is_retryable:
            return None
        now_s = time.monotonic()
        total_s = self._timeouts.total_s
        if failure.connection_failed and not budget.has_answered:
            total_s /= CONNECT_TIMEOUT_DIVISOR
        remaining_s = self._start_s + total_s - now_s
        # Not the generator of the module: its numbers may be a training's.
        jitter = _RANDOM.uniform(0.0, min(BACKOFF_MAX_S, BACKOFF_BASE_S * 2.0 ** (len(self.failures) - 1)))
        if jitter >= remaining_s:
            return None
        wait_s = max(jitter, budget.take_retry(now_s))
        if wait_s >= remaining_s:
            return None
        budget.count_retry()
        budget.count_request()
        return wait_s

    def describe(self) -> str:
        """What was tried, for the message."""
        elapsed_s = time.monotonic() - self._start_s
        names = [failure.name for failure in self.failures]
        kinds = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
        return f"tried {len(names)} times in {elapsed_s:.0f} s: {kinds}"


_RANDOM = random.Random()
