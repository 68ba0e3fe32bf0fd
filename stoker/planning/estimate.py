"""Numbers that are not known exactly: what is expected and the band around it, and what a plan assumes
(`knowledge/assumptions.toml`, where each has its reason)."""

from collections.abc import Callable
from typing import Literal

import msgspec

from stoker.knowledge import read_toml

Case = Literal["low", "expected", "high"]
CASES: tuple[Case, ...] = ("low", "expected", "high")
_OPPOSITE: dict[Case, Case] = {"low": "high", "expected": "expected", "high": "low"}


class Estimate(msgspec.Struct, frozen=True):
    """low <= expected <= high, in the unit of the quantity."""

    low: float
    expected: float
    high: float

    def time(self, case: Case) -> float:
        """The value that makes a run short at its low end, of an input that makes it longer the larger it is."""
        value: float = getattr(self, case)
        return value

    def rate(self, case: Case) -> float:
        """The same of an input that makes a run shorter the larger it is."""
        return self.time(_OPPOSITE[case])

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


class Uncertain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What no plan can measure."""

    vcpu_speed: Estimate
    bucket_bytes_per_s: Estimate
    network_fraction: Estimate
    disk_bytes_per_s: Estimate
    ssd_bytes_per_s: Estimate
    step_spread: Estimate
    device_failure_h: Estimate
    network_latency_us: Estimate
    evaluation_cost: Estimate
    checkpoint_bytes_per_s: Estimate
    startup_s: Estimate
    cpu_startup_s: Estimate
    machine_start_s: Estimate
    preemption_interval_h: Estimate
    spot_wait_s: Estimate


UNCERTAIN = msgspec.convert(
    {name: dict(zip(CASES, row, strict=True)) for name, row in read_toml("assumptions.toml")["uncertain"].items()},
    Uncertain,
)
