"""Whether something that happens at an interval of steps, epochs or minutes is due."""

import time

from stoker.config.durations import Duration


class IntervalTrigger:
    """An interval of 0 is never due. Minutes count from the last `reset`, or from the start."""

    def __init__(self, interval: Duration, num_images: int, batch_size: int) -> None:
        self._interval_s = interval.value * 60 if interval.unit == "minutes" else 0.0
        steps = {"steps": interval.value, "epochs": interval.value * num_images / batch_size, "minutes": 0.0}[
            interval.unit
        ]
        self._interval_steps = max(1, round(steps)) if steps else 0
        self._last_s = time.perf_counter()

    def is_due_at(self, step: int) -> bool:
        """Whether it is due by the number of optimizer steps done."""
        return self._interval_steps > 0 and step > 0 and step % self._interval_steps == 0

    def is_due_by_clock(self) -> bool:
        """Whether it is due by the clock, which ranks read at other times."""
        return self._interval_s > 0 and time.perf_counter() - self._last_s >= self._interval_s

    def set_seconds(self, interval_s: float) -> None:
        """Changes an interval of minutes."""
        self._interval_s = interval_s

    def reset(self) -> None:
        self._last_s = time.perf_counter()
