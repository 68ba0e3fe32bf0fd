"""Whether something that happens every so often, in steps, epochs or minutes, is due."""

import time

from stoker.config.settings import Duration


class Due:
    """A length of 0 never is due. In minutes it counts from the last `done`, or from the start."""

    def __init__(self, every: Duration, pictures: int, batch: int) -> None:
        self._seconds = every.value * 60 if every.unit == "minutes" else 0.0
        steps = {"steps": every.value, "epochs": every.value * pictures / batch, "minutes": 0.0}[every.unit]
        self._steps = max(1, round(steps)) if steps else 0
        self._last_s = time.perf_counter()

    def now(self, step: int) -> bool:
        """step: optimizer steps done."""
        if self._steps:
            return step > 0 and step % self._steps == 0
        return self._seconds > 0 and time.perf_counter() - self._last_s >= self._seconds

    def done(self) -> None:
        self._last_s = time.perf_counter()
