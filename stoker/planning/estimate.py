"""A number that is not known exactly: what is expected, and the band around it."""

from collections.abc import Callable
from typing import Literal

import msgspec

Case = Literal["low", "expected", "high"]
CASES: tuple[Case, ...] = ("low", "expected", "high")


class Estimate(msgspec.Struct, frozen=True):
    """low <= expected <= high, in the unit of the quantity."""

    low: float
    expected: float
    high: float

    def scaled(self, factor: float) -> "Estimate":
        """Times a number from 0 on."""
        return Estimate(self.low * factor, self.expected * factor, self.high * factor)


def exactly(value: float) -> Estimate:
    """A number without an error."""
    return Estimate(value, value, value)


def around(value: float, relative_error: float) -> Estimate:
    """A band with a relative half-width: divided and multiplied by 1 + relative_error, so that it stays above 0."""
    return Estimate(value / (1 + relative_error), value, value * (1 + relative_error))


def over_cases(compute: Callable[[Case], float]) -> Estimate:
    """What `compute` gives with each uncertain input at its low end, as expected, and at its high end; sorted, as the
    result may fall with the inputs."""
    low, expected, high = (compute(case) for case in CASES)
    return Estimate(min(low, expected, high), expected, max(low, expected, high))
