"""How much a loss or a matcher computes at once, where all of it would be gigabytes."""

import torch
from torch import Tensor

from stoker.hardware.device import Device
from stoker.hardware.xla import XLA_KINDS

CPU_BLOCK_SIZE = 2**19
"""Elements that a loss or a matcher processes at once on a CPU: a core's cache has room for them and their temporaries
(measured: LOG.md, "The step on a CPU")."""
MIN_ACCELERATOR_BLOCK_SIZE, MAX_ACCELERATOR_BLOCK_SIZE = 2**23, 2**30
"""The same on an accelerator, where every block costs the host some hundred launches: see `block_size`."""
BLOCK_MEMORY_FRACTION = 1 / 8
"""Fraction of an accelerator's memory that the temporaries of a block may take."""
BLOCK_BYTES_PER_ELEMENT = 24
"""Bytes of temporaries per element of a block: at most six fp32 tensors of its size live at once."""


def block_size(tensor: Tensor) -> int:
    """Elements that a loss or a matcher processes at once, where all of them would be gigabytes, on the device of
    `tensor`. On an accelerator it depends on the memory that the device has, not on what is free now: so a resumed run
    issues the same operators. Constant for torch.compile."""
    if tensor.device.type == "cpu":
        return CPU_BLOCK_SIZE
    return MAX_ACCELERATOR_BLOCK_SIZE if tensor.is_meta else _accelerator_block_size(tensor.device)


_block_sizes: dict[torch.device, int] = {}


def _accelerator_block_size(device: torch.device) -> int:
    """`block_size_for_memory` of a device, asked for once: not functools.cache, whose function torch.compile traces."""
    if device not in _block_sizes:
        if device.type in XLA_KINDS:
            total_bytes = Device(device).memory().total
        else:
            _, total_bytes = torch.accelerator.get_memory_info(device)
        _block_sizes[device] = block_size_for_memory(total_bytes)
    return _block_sizes[device]


# What torch.compiler.assume_constant_result does, without importing torch._dynamo at every start.
_accelerator_block_size._dynamo_marked_constant = True  # type: ignore[attr-defined]


def block_size_for_memory(total_bytes: int) -> int:
    """Elements of a block whose temporaries take BLOCK_MEMORY_FRACTION of an accelerator's memory, within limits."""
    elements = int(total_bytes * BLOCK_MEMORY_FRACTION / BLOCK_BYTES_PER_ELEMENT)
    return min(max(elements, MIN_ACCELERATOR_BLOCK_SIZE), MAX_ACCELERATOR_BLOCK_SIZE)
