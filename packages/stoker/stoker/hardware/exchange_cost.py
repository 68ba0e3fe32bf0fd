"""What an exchange of gradients or weights between devices costs: latency and bytes, the slowest of N, what is hidden.

The alpha-beta model of Thakur et al. 2005 ("Optimization of Collective Communication Operations in MPICH"): a message
of b bytes takes alpha + b · beta. Used by `--sync auto` (`training/defaults/sync_choice.py`), by `stoker plan`
(`planning/duration.py`) and fitted by `benchmarks/devices/scaling.py`; docs/devices.md has its error. No torch.
"""

import dataclasses
import math
import statistics

from stoker.config.sync_method import DEFAULT_BUCKET_MIB, SyncMethod

MIB = 2**20
BACKWARD_FRACTION = 2 / 3
"""Fraction of a step's time in which gradients can be sent while others are still computed: the backward pass, which
has twice the operations of the forward pass."""


@dataclasses.dataclass(frozen=True)
class DeviceLink:
    """What connects neighbors in a ring of devices."""

    latency_s: float
    """Seconds of a message."""
    bytes_per_s: float
    has_tree: bool = False
    """Whether sums may also go along a tree: NCCL does so between machines, gloo does not."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """A step of one device, and what it has to send."""

    compute_s: float
    """Seconds without any exchange."""
    gradient_bytes: float
    spread: float = 0.0
    """Standard deviation of the devices' step times, divided by their mean."""
    cast_s: float = 0.0
    """Seconds to turn the gradients into half as many bytes, and back."""


@dataclasses.dataclass(frozen=True)
class StepCost:
    """Seconds of a step of N devices, as a mean over steps."""

    compute_s: float
    """Seconds of one device, with what the method adds."""
    straggler_s: float
    """Seconds of waiting for the slowest."""
    exposed_s: float
    """Seconds of exchange that no computation hides."""

    @property
    def total_s(self) -> float:
        return self.compute_s + self.straggler_s + self.exposed_s


def all_reduce_s(link: DeviceLink, devices: int, size_bytes: float) -> float:
    """A sum over all devices: by a ring, 2 (N - 1) messages of 1/N of the bytes, or if that is faster by a tree, up and
    down, 2 ⌈log2 N⌉ messages in a pipeline, whose inner nodes carry all bytes twice."""
    if devices == 1:
        return 0.0
    ring_s = 2 * (devices - 1) * (link.latency_s + size_bytes / devices / link.bytes_per_s)
    if not link.has_tree:
        return ring_s
    tree_s = 2 * math.ceil(math.log2(devices)) * link.latency_s + 2 * size_bytes / link.bytes_per_s
    return min(ring_s, tree_s)


def expected_maximum(devices: int) -> float:
    """Expected maximum of N standard normal numbers (Blom 1958), for stragglers: the slowest of N sets the pace."""
    if devices == 1:
        return 0.0
    return statistics.NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))


def step_cost(work: Workload, link: DeviceLink, devices: int, method: SyncMethod) -> StepCost:
    """A mean step with a method, on devices that are all linked in the same way.

    All methods but plain averages also exchange a vector of a few hundred bytes in each step, so the devices wait for
    the slowest of each step, too.
    """
    if devices == 1:
        return StepCost(work.compute_s, 0.0, 0.0)
    compute_s, gradients = work.compute_s, work.gradient_bytes
    straggler_s = work.spread * expected_maximum(devices) * compute_s
    signals_s = all_reduce_s(link, devices, 0)
    backward_s = BACKWARD_FRACTION * compute_s
    if method.kind == "every":
        return StepCost(compute_s, straggler_s, signals_s + all_reduce_s(link, devices, gradients) / method.number)
    extra_s = 0.0
    if method.kind == "bf16":
        gradients, extra_s = gradients / 2, work.cast_s
    bucket = (method.number or DEFAULT_BUCKET_MIB) * MIB
    total_s, last_s = bucketed_s(link, devices, gradients, bucket)
    exposed_s = max(last_s, total_s - backward_s) + (0.0 if method.kind == "plain" else signals_s)
    return StepCost(compute_s + extra_s, straggler_s, exposed_s)


def bucketed_s(link: DeviceLink, devices: int, size_bytes: float, bucket_bytes: float) -> tuple[float, float]:
    """(seconds for all bytes in buckets, seconds of the last bucket), one after the other."""
    count = max(1, math.ceil(size_bytes / bucket_bytes))
    last_bytes = min(size_bytes, bucket_bytes)
    return count * all_reduce_s(link, devices, size_bytes / count), all_reduce_s(link, devices, last_bytes)
