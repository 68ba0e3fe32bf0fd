"""How many requests to have under way, and when to ask a second time: arithmetic only, the clock is an argument.

`Depth` is Little's law (L = λW): requests under way = demand × latency, with headroom. It grows to that, and beyond,
while the consumer waits and growing helps; it shrinks to it when nobody has waited for a while. `Tail` is
the hedged request of Dean and Barroso, "The Tail at Scale" (CACM 56(2), 2013). Who asks them: `fetcher.py`.
"""

import math
from collections import deque

HEADROOM = 2.0
"""Latency varies: with just enough under way, each slow answer would be waited for."""
FIRST, LEAST = 16, 4
GROWTH, SHRINKAGE = 1.5, 0.8
WORTH = 1.05
"""A growth that does not raise the throughput by so much is taken back: the link or the store is the limit."""
PATIENCE = 8
"""Rounds before growth is tried again after it did not help; notes without starvation before it shrinks."""
RECENT = 256

HEDGE_QUANTILE = 0.95
HEDGE_FACTOR = 1.5
"""Of that quantile: on a link that is the limit all requests are late alike, and a second one only makes it later."""
HEDGE_LEAST_S = 0.01
HEDGE_SHARE = 0.05
HEDGE_BURST = 4.0
HEDGE_FROM = 32
"""So many answers of like size, before a quantile means anything."""


class Depth:
    """How many requests should be under way. limit: the most, ever."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.value = min(FIRST, limit)
        self._latencies: deque[float] = deque(maxlen=RECENT)
        self._done, self._bytes = 0, 0
        self._since: float | None = None
        self._before: tuple[int, float] | None = None
        """During a trial: the depth, and the throughput, before it."""
        self._hold = 0
        self._calm = 0

    def finished(self, latency_s: float, size_bytes: int) -> None:
        self._latencies.append(latency_s)
        self._done += 1
        self._bytes += size_bytes

    def needed(self, demand_per_s: float) -> int:
        """By Little's law, from the fastest of the recent answers: what it takes when nothing queues."""
        if not self._latencies:
            return self.value
        by_law = math.ceil(min(self._latencies) * demand_per_s * HEADROOM)
        return max(min(LEAST, self.limit), min(self.limit, by_law))

    def note(self, demand_per_s: float, starved: bool, now_s: float) -> None:
        """demand_per_s: objects that the consumer takes, or would take if it never waited; starved: it has waited."""
        needed = self.needed(demand_per_s)
        if not starved:
            self._before = None
            self._calm += 1
            if self._calm >= PATIENCE:
                self._calm = 0
                self.value = max(needed, min(self.value, math.ceil(self.value * SHRINKAGE)))
            return
        self._calm = 0
        if self._since is None:
            self._round(now_s)
        elif self._done >= self.value and now_s > self._since:
            self._judge(self._bytes / (now_s - self._since), needed)
            self._round(now_s)

    def _judge(self, bytes_per_s: float, needed: int) -> None:
        """After a round, in which as many requests ended as were under way. Every growth is a trial, that to what the
        law asks too: where our own queue is in every latency, the law asks for more and more."""
        if self._before is not None:
            depth, rate = self._before
            self._before = None
            if bytes_per_s < rate * WORTH:
                self.value, self._hold = depth, PATIENCE
                return
        if self._hold:
            self._hold -= 1
        elif self.value < self.limit:
            self._before = (self.value, bytes_per_s)
            self.value = min(self.limit, max(needed, math.ceil(self.value * GROWTH)))

    def _round(self, now_s: float) -> None:
        self._since, self._done, self._bytes = now_s, 0, 0


class Tail:
    """When a request is so late that a second one is worth its cost, and whether there is credit for it."""

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}
        self._delays: dict[int, float] = {}
        self._answers = 0
        self._credit = 1.0

    def begun(self) -> None:
        self._credit = min(HEDGE_BURST, self._credit + HEDGE_SHARE)

    def finished(self, latency_s: float, size_bytes: int) -> None:
        likes = _likes(size_bytes)
        recent = self._recent.setdefault(likes, deque(maxlen=RECENT))
        recent.append(latency_s)
        self._answers += 1
        # Sorting at each answer would cost more than the rest of the bookkeeping.
        if len(recent) >= HEDGE_FROM and (self._answers % HEDGE_FROM == 0 or likes not in self._delays):
            quantile = sorted(recent)[int(HEDGE_QUANTILE * len(recent))]
            self._delays[likes] = max(HEDGE_LEAST_S, HEDGE_FACTOR * quantile)

    def delay_s(self, size_bytes: int) -> float | None:
        """How long to wait for the first answer. None: too few of like size have been seen."""
        return self._delays.get(_likes(size_bytes))

    def spend(self) -> bool:
        """Whether a second request may be made; if so, it is paid for."""
        if self._credit < 1.0:
            return False
        self._credit -= 1.0
        return True


def _likes(size_bytes: int) -> int:
    """Sizes that are compared: those within a factor of four."""
    return max(0, size_bytes).bit_length() // 2
