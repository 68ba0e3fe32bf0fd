"""`--sync auto`: measures the link between the ranks and a step, and takes the most faithful of the fast methods.

Measured by all ranks at the same time: an all-reduce of one number and of many, in fp32 and bf16; a step without any
exchange; casts of the gradients. `hardware/exchange_cost.py` computes a step with each method from
that. The methods are in the order of their effect on the training: the first whose speed is near that of the fastest is
taken, so a link that hides the exchange gets plain averages.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stoker.config.settings import Config
from stoker.config.sync_method import parse_sync
from stoker.data.index import Index
from stoker.hardware.device import Device
from stoker.hardware.exchange_cost import DeviceLink, Workload, step_cost
from stoker.training.defaults.dry_run import DryRun
from stoker.training.ranks import Ranks

CANDIDATES = ("plain", "plain:1", "plain:5", "bf16", "every:8")
"""The most faithful first, by AP at equal images (docs/devices.md)."""
NEAR = 0.7
"""A method is fast enough if its images per second are this part of the fastest one's."""
BUCKET_GAIN = 1.05
"""Another size of buckets is taken for at least this gain."""
MEASURE_S = 2.0


@dataclasses.dataclass(frozen=True)
class MeasuredExchange:
    """What decides, each time that of the slowest rank."""

    link: DeviceLink
    work: Workload
    devices: int


def choose_sync(config: Config, index: Index, device: Device, ranks: Ranks) -> tuple[str, str]:
    """(method, reason). Called by all ranks."""
    if ranks.alone:
        return "plain", "auto: one device exchanges nothing"
    if config.run.shard:
        return "plain", "auto: --shard has an exchange of its own"
    own = measure(config, index, device, ranks)
    return ranks.share(lambda: decide(own))


def decide(measured: MeasuredExchange) -> tuple[str, str]:
    """(method, reason)."""
    link, work = measured.link, measured.work
    total_s = {name: step_cost(work, link, measured.devices, parse_sync(name)).total_s for name in CANDIDATES}
    best_s = min(total_s.values())
    chosen = next(name for name, seconds in total_s.items() if best_s / seconds >= NEAR)
    if chosen.startswith("plain"):
        fastest = min(("plain:1", "plain:5"), key=lambda name: total_s[name])
        chosen = fastest if total_s["plain"] / total_s[fastest] >= BUCKET_GAIN else "plain"
    facts = (
        f"{work.gradient_bytes / 2**20:.3g} MiB of gradients at {link.bytes_per_s * 8e-6:.3g} Mbit/s and "
        f"{link.latency_s * 1e3:.2g} ms a message, a step of {work.compute_s:.3g} s"
    )
    if chosen == "plain":
        return chosen, f"auto: {facts}: at most {total_s['plain'] / best_s:.2g} × as fast with another method"
    return chosen, f"auto: {facts}: {total_s['plain'] / total_s[chosen]:.2g} × as fast as plain"


def measure(config: Config, index: Index, device: Device, ranks: Ranks) -> MeasuredExchange:
    """Measures in all ranks; each gets the times of the slowest."""
    dry_run = DryRun(config, index, device)
    micro_batches = config.optim.grad_accum_steps
    ranks.barrier()
    step_s = micro_batches * dry_run.measure_step_s(config.run.batch_size // (micro_batches * ranks.world_size))
    return measure_exchange(dry_run.optimizer.weights(), step_s, device, ranks)


def measure_exchange(weights: Sequence[Tensor], step_s: float, device: Device, ranks: Ranks) -> MeasuredExchange:
    """As `measure`, for a step of `step_s` seconds that changes these weights."""
    from stoker.preflight import network

    ranks.barrier()
    found = network.measure(device, MEASURE_S)
    large_s = found.seconds / found.count
    half_s = network.timed(device, found.size_bytes, 2, half=True) / 2
    gradients = [torch.randn_like(weight).detach() for weight in weights]
    size_bytes = sum(gradient.nbytes for gradient in gradients)
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    own_cast_s = max(0.0, half_s - large_s) / found.size_bytes * size_bytes / 2
    own_cast_s += _time(device, lambda: flat.copy_(flat.to(torch.bfloat16)))
    own = [step_s, found.latency_s, large_s, own_cast_s]
    slowest = (max(values) for values in zip(*ranks.gather_all(own), strict=True))
    step_s, latency_s, large_s, cast_s = slowest
    n = ranks.world_size
    link = DeviceLink(latency_s / (2 * (n - 1)), 2 * (n - 1) / n * found.size_bytes / max(1e-9, large_s - latency_s))
    return MeasuredExchange(link, Workload(compute_s=step_s, gradient_bytes=size_bytes, cast_s=cast_s), n)


def _time(device: Device, work: Callable[[], object]) -> float:
    """Seconds of a call, after one that warms up."""
    work()
    device.synchronize()
    start_s = time.perf_counter()
    work()
    device.synchronize()
    return time.perf_counter() - start_s
