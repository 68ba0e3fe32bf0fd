"""Retries of requests to a bucket: how long to wait, how long to try, and a budget of retries per store.

Waits have full jitter (AWS Architecture Blog, "Exponential Backoff and Jitter", 2015). The budget is a fraction of the
requests plus a minimum rate (Google, "Site Reliability Engineering", chapter 21), so a bucket that is down does not get
more requests because it is down. An empty budget delays a retry; only the total time ends a request. Which failures are
retried is decided in `failures.py`. obstore's own retries are used for parts of uploads only (`clients.py`): they have
no budget, do not retry damaged bodies, and repeat conditional writes.
"""

import os
import random
import threading
import time
from dataclasses import dataclass, field

from stoker.errors import ConfigError
from stoker.storage.failures import Failure

BACKOFF_BASE_S, BACKOFF_MAX_S = 0.1, 20.0
"""The n-th wait is uniform between 0 and min(BACKOFF_MAX_S, BACKOFF_BASE_S · 2ⁿ)."""
BUDGET_FRACTION = 0.1
"""Retries per request, in the long run."""
BUDGET_BURST = 20.0
BUDGET_PER_S = 10.0
"""The minimum rate of retries, for a store with few requests: one upload, or the end of an outage."""
CONNECT_TIMEOUT_DIVISOR = 6
"""If a store has never responded, failures to connect are reported after 1/6 of the time: a typo in an endpoint should
not take two minutes to be reported."""


@dataclass(frozen=True)
class Timeouts:
    """Times in seconds. total_s: of a request with all its retries (STOKER_STORAGE_TIMEOUT_S)."""

    total_s: float = 120.0

    @property
    def stall_s(self) -> float:
        """Time without a byte after which a connection is closed and the request retried."""
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
                choices=["seconds, above 0 and below 86400"],
                fix=f"Unset it for the default, {cls.total_s:g}.",
            )
        return cls(total_s)


@dataclass
class RequestCounters:
    """Totals of a store. Requests include retries and hedges."""

    requests: int = 0
    retries: int = 0
    read_bytes: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    """By name: "503 SlowDown", "timeout", …; includes failures that a retry solved."""


class RetryBudget:
    """The retries that are left for a store, and its counters. Thread-safe."""

    def __init__(self) -> None:
        self.counters = RequestCounters()
        self.has_responded = False
        """Whether the store ever responded, even with an error."""
        self._lock = threading.Lock()
        self._tokens = BUDGET_BURST
        self._refilled_s = time.monotonic()

    def count_request(self, *, is_retry: bool = False) -> None:
        with self._lock:
            self.counters.requests += 1
            self.counters.retries += is_retry
            self._tokens = min(BUDGET_BURST, self._tokens + BUDGET_FRACTION)

    def count_response(self, read_bytes: int = 0) -> None:
        with self._lock:
            self.has_responded = True
            self.counters.read_bytes += read_bytes

    def count_failure(self, failure: Failure) -> None:
        with self._lock:
            self.has_responded = self.has_responded or failure.status is not None
            self.counters.failures[failure.name] = self.counters.failures.get(failure.name, 0) + 1

    def take_retry(self, now_s: float) -> float:
        """Takes a retry from the budget; returns the seconds until it is available."""
        with self._lock:
            self._tokens = min(BUDGET_BURST, self._tokens + (now_s - self._refilled_s) * BUDGET_PER_S) - 1.0
            self._refilled_s = now_s
            return max(0.0, -self._tokens / BUDGET_PER_S)


class RetryState:
    """One request and its retries."""

    def __init__(self, timeouts: Timeouts, budget: RetryBudget) -> None:
        self._timeouts, self._budget = timeouts, budget
        self._start_s = time.monotonic()
        self.failures: list[Failure] = []
        budget.count_request()

    def next_wait_s(self, failure: Failure) -> float | None:
        """Seconds to wait before the next attempt; None: give up."""
        self.failures.append(failure)
        budget = self._budget
        budget.count_failure(failure)
        if not failure.is_retryable:
            return None
        now_s = time.monotonic()
        total_s = self._timeouts.total_s
        if failure.connection_failed and not budget.has_responded:
            total_s /= CONNECT_TIMEOUT_DIVISOR
        remaining_s = self._start_s + total_s - now_s
        # Not the global generator of `random`, whose numbers a training may use.
        jitter = _RANDOM.uniform(0.0, min(BACKOFF_MAX_S, BACKOFF_BASE_S * 2.0 ** (len(self.failures) - 1)))
        if jitter >= remaining_s:
            return None
        wait_s = max(jitter, budget.take_retry(now_s))
        if wait_s >= remaining_s:
            return None
        budget.count_request(is_retry=True)
        return wait_s

    def describe(self) -> str:
        """The attempts, for the message."""
        elapsed_s = time.monotonic() - self._start_s
        names = [failure.name for failure in self.failures]
        kinds = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
        return f"tried {len(names)} times in {elapsed_s:.0f} s: {kinds}"


_RANDOM = random.Random()
