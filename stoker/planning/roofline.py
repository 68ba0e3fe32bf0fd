"""The time of a step from what its operators need: each is limited by arithmetic or by memory, and costs a launch.

An operator takes the longer of its operations at a fraction of the device's peak and its bytes at a fraction of the
bandwidth (Williams et al. 2009, "Roofline"), and a constant for its kernel. A GPU does this while the host issues the
operators; whichever takes longer is the step. The few fractions are fitted to measured steps: those below to the ones
named there, `fit` moves them to those of the user. Parameters and errors: docs/plan-calibration.md.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from stoker.knowledge import read_toml
from stoker.planning.accelerators import Accelerator
from stoker.planning.trace import OperatorKind, StepTrace


class Efficiency(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a device reaches of its peaks, and what an operator costs besides; `assumptions.toml` says what each is."""

    convolution: float
    grouped: float
    matmul: float
    bandwidth: float
    kernel_s: float
    issue_s: float
    error: float
    source: str


_EFFICIENCIES = msgspec.convert(read_toml("assumptions.toml")["efficiency"], dict[str, Efficiency])
CPU, GPU = _EFFICIENCIES["cpu"], _EFFICIENCIES["gpu"]


def default_efficiency(accelerator: Accelerator) -> Efficiency:
    return CPU if accelerator.is_cpu else GPU


class StepTime(NamedTuple):
    """Seconds of a step."""

    total_s: float
    compute_s: float
    """Of operators that arithmetic limits; memory_s: of the others; launch_s: of launches."""
    memory_s: float
    launch_s: float

    @property
    def limited_by(self) -> str:
        """What most of the time is spent on."""
        parts = {"compute": self.compute_s, "memory": self.memory_s, "launches": self.launch_s}
        return max(parts, key=parts.__getitem__)


def step_time(
    trace: StepTrace, accelerator: Accelerator, efficiency: Efficiency, *, precision: str, micro_batches: int = 1
) -> StepTime:
    """The time of a step of `micro_batches` times the images of the trace."""
    compute_s = memory_s = 0.0
    launches = 0
    for work in trace.works:
        repeats = work.count * (1 if work.once else micro_batches)
        launches += repeats
        arithmetic_s = work.flops / _reached_flops(accelerator, efficiency, precision, work.kind)
        moving_s = work.moved_bytes / (accelerator.bandwidth * efficiency.bandwidth)
        if arithmetic_s > moving_s:
            compute_s += repeats * arithmetic_s
        else:
            memory_s += repeats * moving_s
    kernels_s, issued_s = launches * efficiency.kernel_s, launches * efficiency.issue_s
    device_s = compute_s + memory_s + kernels_s
    return StepTime(max(device_s, issued_s), compute_s, memory_s, max(kernels_s, issued_s - compute_s - memory_s))


def _reached_flops(accelerator: Accelerator, efficiency: Efficiency, precision: str, kind: OperatorKind) -> float:
    fraction: float = getattr(efficiency, "matmul" if kind == "other" else kind)
    return fraction * accelerator.peak_flops(precision, is_convolution=kind in ("convolution", "grouped"))


class Sample(NamedTuple):
    """A measured step."""

    trace: StepTrace
    accelerator: Accelerator
    precision: str
    micro_batches: int
    step_s: float


FITTED = ("convolution", "grouped", "matmul", "bandwidth", "kernel_s", "issue_s")
MEASUREMENT_SPREAD, PRIOR_SPREAD = 0.05, 0.5
"""Relative standard deviations: of a measured step between two runs, and of a fraction before any measurement."""
ITERATIONS = 30


def fit(samples: Sequence[Sample], start: Efficiency) -> Efficiency:
    """The efficiency that explains measured steps, near `start` where they do not tell.

    Least squares of relative errors (Gauss-Newton on logarithms), with `start` as a measurement of each fraction whose
    relative standard deviation is PRIOR_SPREAD.
    """
    names = [name for name in FITTED if getattr(start, name) > 0]
    origin = np.log([getattr(start, name) for name in names])
    measured = np.log([sample.step_s for sample in samples])

    def efficiency(logarithms: NDArray[np.float64]) -> Efficiency:
        return msgspec.structs.replace(start, **dict(zip(names, map(float, np.exp(logarithms)), strict=True)))

    def predicted(logarithms: NDArray[np.float64]) -> NDArray[np.float64]:
        reached = efficiency(logarithms)
        return np.log([
            step_time(s.trace, s.accelerator, reached, precision=s.precision, micro_batches=s.micro_batches).total_s
            for s in samples
        ])  # fmt: skip

    current = origin.copy()
    prior_weight, step_size = (MEASUREMENT_SPREAD / PRIOR_SPREAD) ** 2, 1e-3
    for _ in range(ITERATIONS):
        at_current = predicted(current)
        slopes = np.stack(
            [(predicted(current + step_size * row) - at_current) / step_size for row in np.eye(len(names))], axis=1
        )
        gradient = slopes.T @ (at_current - measured) + prior_weight * (current - origin)
        change = np.linalg.solve(slopes.T @ slopes + prior_weight * np.eye(len(names)), gradient)
        current -= np.clip(change, -0.5, 0.5)
        if np.abs(change).max() < 1e-4:
            break
    return efficiency(current)
