"""Which errors say that the memory of the device or of the host is exhausted: those of torch, CUDA's libraries and XLA.

What is done about it: `training/out_of_memory.py`, and for the first batch size `training/defaults/dry_run.py`.
"""

import contextlib
import re
from collections.abc import Iterator

import torch

from stoker_watch.errors import OutOfMemoryError

_OUT_OF_MEMORY = re.compile("[Oo]ut of memory|can't allocate memory|ALLOC(ATION)?_FAILED|RESOURCE_EXHAUSTED")
"""What a RuntimeError that is not torch.OutOfMemoryError says if memory is exhausted: the driver, Triton and NCCL;
torch's allocator of a CPU; cuBLAS and cuDNN; XLA."""
_COMPILER = "C++ compile error"
"""Begins what torch says if a compiler fails, also for want of memory: no smaller batch helps there."""
_NO_CONVOLUTION = "unable to find an engine to execute this computation"
"""What torch says where every convolution of cuDNN failed, also if each was only short of memory for its workspace
(aten/src/ATen/native/cudnn/Conv_v8.cpp)."""
LITTLE_MEMORY_FRACTION = 1 / 16
"""Fraction of a device's memory that is assumed to be more than a convolution's smallest workspace."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the memory of the device or of the host is exhausted. Ask while the error is handled, which keeps alive
    what it allocated."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    if _NO_CONVOLUTION in str(error) and torch.accelerator.is_available():
        free_bytes, total_bytes = torch.accelerator.get_memory_info()
        free_bytes += torch.accelerator.memory_reserved() - torch.accelerator.memory_allocated()  # torch's cache
        return free_bytes < LITTLE_MEMORY_FRACTION * total_bytes
    return _OUT_OF_MEMORY.search(str(error)) is not None and _COMPILER not in str(error)


@contextlib.contextmanager
def out_of_memory_as_error(activity: str) -> Iterator[None]:
    """Turns the device's and the host's out-of-memory exceptions into an OutOfMemoryError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        cause = next(iter(str(error).splitlines()), None)
        fix = "a smaller --batch-size or --image-size, or --grad-accum-steps 2"
        raise OutOfMemoryError(f"Out of memory while {activity}.", cause=cause, fix=fix) from error
