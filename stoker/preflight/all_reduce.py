"""Measures an all-reduce between the ranks of a job; one process per rank, all at the same time.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=node-0 MASTER_PORT=29500 python -m stoker.preflight.all_reduce SECONDS JOIN_SECONDS

Prints one line of JSON (`Measurement`). NCCL where every rank has a GPU of its own (untested on GPU), else gloo on
tensors of the CPU. A process of its own, because a process group that does not form cannot be given up from inside, and
because it leaves no state of torch.distributed in the caller.
"""

import datetime
import os
import statistics
import sys
import time
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from stoker.hardware.device import Device

MAX_BYTES = 64 * 2**20
"""Per all-reduce: between DistributedDataParallel's buckets (25 MB) and all gradients of RetinaNet-R50 (136 MB)."""
FIRST_BYTES, MIN_BYTES = 2**20, 2**16
NUM_SMALL = 50
"""All-reduces of one number, for the latency."""


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank measured."""

    backend: str
    device: str
    """For users: NVIDIA A100-SXM4-40GB, or cpu."""
    world_size: int
    latency_s: float
    """Median time of an all-reduce of one number."""
    size_bytes: int
    """Of each large all-reduce."""
    count: int
    seconds: float
    """Of all large ones together."""

    @property
    def bytes_per_s(self) -> float:
        """Gradients that are all-reduced per second."""
        return self.size_bytes * self.count / self.seconds

    @property
    def bus_bytes_per_s(self) -> float:
        """What each link carries: 2 (n-1) / n times as much (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md)."""
        return self.bytes_per_s * 2 * (self.world_size - 1) / self.world_size


def main(seconds: float, join_s: float) -> None:
    import torch
    import torch.distributed as dist

    from stoker.hardware.device import Device

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if accelerator is not None and torch.accelerator.device_count() >= local_size:
        torch.accelerator.set_device_index(local_rank)
        device = Device(torch.device(accelerator.type, local_rank))
    else:
        device = Device(torch.device("cpu"))
    backend = dist.get_default_backend_for_device(device.torch_device)
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=join_s))
    measurement = measure(device, seconds)
    dist.barrier()
    dist.destroy_process_group()
    print(msgspec.json.encode(measurement).decode(), flush=True)


def measure(device: "Device", seconds: float) -> Measurement:
    """What this rank measures in about so many seconds, in the process group that it is in; all ranks call it."""
    import torch
    import torch.distributed as dist

    def agreed(value: float) -> int:
        """The value of rank 0."""
        tensor = torch.tensor([value], dtype=torch.float32, device=device.torch_device)
        dist.broadcast(tensor, src=0)
        return int(tensor.item())

    latency_s = statistics.median(timed(device, 4, 1) for _ in range(NUM_SMALL))
    per_byte_s = timed(device, FIRST_BYTES, 2) / (2 * FIRST_BYTES)
    size_bytes = agreed(min(MAX_BYTES, max(MIN_BYTES, seconds / 10 / per_byte_s)))
    count = agreed(min(1000.0, max(2.0, seconds / timed(device, size_bytes, 1))))
    elapsed_s = timed(device, size_bytes, count)
    return Measurement(
        backend=dist.get_default_backend_for_device(device.torch_device),
        device="cpu" if device.is_cpu else device.name,
        world_size=dist.get_world_size(),
        latency_s=latency_s,
        size_bytes=size_bytes,
        count=count,
        seconds=elapsed_s,
    )


def timed(device: "Device", size_bytes: int, count: int, *, half: bool = False) -> float:
    """Seconds of `count` all-reduces of so many bytes, after one more; the same numbers on all ranks. half: of bf16
    numbers instead of fp32."""
    import torch
    import torch.distributed as dist

    dtype = torch.bfloat16 if half else torch.float32
    tensor = torch.zeros(max(1, size_bytes // dtype.itemsize), dtype=dtype, device=device.torch_device)
    dist.all_reduce(tensor)
    device.synchronize()
    start_s = time.perf_counter()
    for _ in range(count):
        dist.all_reduce(tensor)
    device.synchronize()
    return time.perf_counter() - start_s


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]))
