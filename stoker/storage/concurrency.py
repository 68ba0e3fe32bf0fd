"""How many requests to keep in flight, and when to send a second one: arithmetic only, the clock is an argument.

`ConcurrencyController` applies Little's law (L = λW): requests in flight = demand × latency, with headroom. It grows to
that, and beyond, while the consumer waits and growth raises the throughput; it shrinks when the consumer has not waited
for a while. `HedgingPolicy` is the hedged request of Dean and Barroso, "The Tail at Scale" (CACM 56(2), 2013). Used by
`fetcher.py`.
"""

import math
from collections import deque

HEADROOM = 2.0
"""Latency varies: without headroom the consumer would wait for each slow response."""
INITIAL_CONCURRENCY, MIN_CONCURRENCY = 16, 4
GROWTH_FACTOR, SHRINK_FACTOR = 1.5, 0.8
MIN_GAIN = 1.05
"""Growth that raises the throughput by less is undone: the network or the store is the limit."""
PATIENCE = 8
"""Rounds until growth is tried again after it did not help; updates without starvation until it shrinks."""
WINDOW_SIZE = 256
"""Recent responses that count."""

HEDGE_QUANTILE = 0.95
HEDGE_FACTOR = 1.5
"""Times that quantile: when the network is the limit all requests are equally late, and a second one adds load."""
HEDGE_MIN_S = 0.01
HEDGE_FRACTION = 0.05
HEDGE_BURST = 4.0
HEDGE_MIN_SAMPLES = 32
"""Responses of a similar size that a quantile needs."""


class ConcurrencyController:
    """How many requests should be in flight. limit: the maximum."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.value = min(INITIAL_CONCURRENCY, limit)
        self._latencies: deque[float] = deque(maxlen=WINDOW_SIZE)
        self._completed, self._completed_bytes = 0, 0
        self._round_start_s: float | None = None
        self._before_trial: tuple[int, float] | None = None
        """During a trial: concurrency and throughput before it."""
        self._cooldown_rounds = 0
        self._calm_updates = 0

    def record_response(self, latency_s: float, size_bytes: int) -> None:
        self._latencies.append(latency_s)
        self._completed += 1
        self._completed_bytes += size_bytes

    def required(self, demand_per_s: float) -> int:
        """Little's law with the fastest of the recent responses, which is the latency without queueing."""
        if not self._latencies:
            return self.value
        littles_law = math.ceil(min(self._latencies) * demand_per_s * HEADROOM)
        return max(min(MIN_CONCURRENCY, self.limit), min(self.limit, littles_law))

    def update(self, demand_per_s: float, starved: bool, now_s: float) -> None:
        """demand_per_s: objects that the consumer takes, or would take without waiting; starved: it has waited."""
        required = self.required(demand_per_s)
        if not starved:
            self._before_trial = None
            self._calm_updates += 1
            if self._calm_updates >= PATIENCE:
                self._calm_updates = 0
                self.value = max(required, min(self.value, math.ceil(self.value * SHRINK_FACTOR)))
            return
        self._calm_updates = 0
        if self._round_start_s is None:
            self._start_round(now_s)
        elif self._completed >= self.value and now_s > self._round_start_s:
            self._evaluate_round(self._completed_bytes / (now_s - self._round_start_s), required)
            self._start_round(now_s)

    def _evaluate_round(self, bytes_per_s: float, required: int) -> None:
        """Called after a round, in which as many requests ended as were in flight. All growth is a trial, even to the
        value of Little's law: when latency includes our own queue, the law asks for more and more."""
        if self._before_trial is not None:
            previous_value, previous_bytes_per_s = self._before_trial
            self._before_trial = None
            if bytes_per_s < previous_bytes_per_s * MIN_GAIN:
                self.value, self._cooldown_rounds = previous_value, PATIENCE
                return
        if self._cooldown_rounds:
            self._cooldown_rounds -= 1
        elif self.value < self.limit:
            self._before_trial = (self.value, bytes_per_s)
            self.value = min(self.limit, max(required, math.ceil(self.value * GROWTH_FACTOR)))

    def _start_round(self, now_s: float) -> None:
        self._round_start_s, self._completed, self._completed_bytes = now_s, 0, 0


class HedgingPolicy:
    """When a request is late enough for a second one, and whether the budget allows it."""

    def __init__(self) -> None:
        self._latencies_by_size: dict[int, deque[float]] = {}
        self._delays: dict[int, float] = {}
        self._responses = 0
        self._credit = 1.0

    def record_request(self) -> None:
        self._credit = min(HEDGE_BURST, self._credit + HEDGE_FRACTION)

    def record_response(self, latency_s: float, size_bytes: int) -> None:
        size_class = _size_class(size_bytes)
        latencies = self._latencies_by_size.setdefault(size_class, deque(maxlen=WINDOW_SIZE))
        latencies.append(latency_s)
        self._responses += 1
        # Sorting at each response would cost more than the rest of the bookkeeping.
        if len(latencies) >= HEDGE_MIN_SAMPLES and (
            self._responses % HEDGE_MIN_SAMPLES == 0 or size_class not in self._delays
        ):
            quantile = sorted(latencies)[int(HEDGE_QUANTILE * len(latencies))]
            self._delays[size_class] = max(HEDGE_MIN_S, HEDGE_FACTOR * quantile)

    def hedge_delay_s(self, size_bytes: int) -> float | None:
        """How long to wait for the first response. None: too few responses of a similar size."""
        return self._delays.get(_size_class(size_bytes))

    def try_spend(self) -> bool:
        """Whether a second request may be sent; if so, takes it from the budget."""
        if self._credit < 1.0:
            return False
        self._credit -= 1.0
        return True


def _size_class(size_bytes: int) -> int:
    """Sizes within a factor of four are similar."""
    return max(0, size_bytes).bit_length() // 2
