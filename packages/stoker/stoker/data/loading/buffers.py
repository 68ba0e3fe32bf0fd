"""The memory of batches on the host: of one process, or shared by the training process and its worker processes.

Shared memory is a file without a name (`memfd_create`), passed by its descriptor: it needs no room in /dev/shm, which
containers limit, and is freed when the last process that has it ends. It has a fixed number of slots, one per batch,
and a row of counters for each process. Worker processes import this module, so it does without torch. Who writes it:
`samples.py`. The processes: `processes.py`; what they run: `process_main.py`.
"""

import dataclasses
import functools
import itertools
import math
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from stoker.data.batch import NUM_RAND, PAD_COLOR, Batch
from stoker.data.images.decode import Pixels
from stoker.data.loading.stats import COUNTER_FIELDS, Counters

if TYPE_CHECKING:  # worker processes do without torch
    from torch import Tensor

    from stoker.hardware.device import Device

_ALIGNMENT = 4096
"""Slots and images begin on page boundaries; two arrays never share a cache line."""


def batch_arrays(image_size: tuple[int, int], max_boxes: int) -> list[tuple[tuple[int, ...], DTypeLike]]:
    """Returns shape and type of each array of a batch, per image, in the order of Batch; images are [H, W, 3]."""
    return [
        ((*image_size, 3), np.uint8),
        ((max_boxes, 4), np.float32),
        ((max_boxes,), np.int64),
        ((max_boxes,), np.bool_),
        ((2,), np.int32),
        ((2,), np.float32),
        ((2,), np.int32),
        ((), np.int64),
        ((NUM_RAND,), np.float32),
    ]


class HostBatchBuffer:
    """Host memory of one batch, written by many threads, each its own places. Page-locked where there is a device."""

    def __init__(
        self,
        device: "Device | None",
        batch_size: int,
        image_size: tuple[int, int],
        max_boxes: int,
        arrays: Sequence[NDArray[Any]] | None = None,
    ) -> None:
        """arrays: existing memory, as described by `batch_arrays`; None: new memory of torch. device: None in a worker
        process, which has no tensors."""
        self.image_size = image_size
        self.tensors: list[Tensor] = []
        """In the order of Batch; the images are [B, H, W, 3]."""
        if device is not None:
            import torch

            self.tensors = (
                [
                    device.empty_host((batch_size, *shape), getattr(torch, np.dtype(dtype).name))
                    for shape, dtype in batch_arrays(image_size, max_boxes)
                ]
                if arrays is None
                else [torch.from_numpy(array) for array in arrays]
            )
        if arrays is None:
            arrays = [tensor.numpy() for tensor in self.tensors]
        self.pixels, self.boxes, self.labels, self.valid, *others = arrays
        self.resized_size, self.scale, self.original_size, self.image_index, self.rand = others
        self._padding = _padding(image_size)

    def pad(self, k: int, resized_size: tuple[int, int]) -> None:
        """Pads image k outside `resized_size` (height, width). Copies, as NumPy repeats 3 bytes 60 × slower."""
        height, width = resized_size
        if height < self.image_size[0]:
            self.pixels[k, height:] = self._padding[height:]
        if width < self.image_size[1]:
            self.pixels[k, :height, width:] = self._padding[:height, width:]

    def write_filler(self, k: int) -> None:
        """Makes place k a filler of the batch: padding without boxes, image_index -1."""
        self.pad(k, (0, 0))
        self.boxes[k], self.labels[k], self.valid[k], self.rand[k] = 0, 0, False, 0
        self.resized_size[k] = self.original_size[k] = self.image_size
        self.scale[k], self.image_index[k] = 1, -1


@functools.lru_cache(2)
def _padding(image_size: tuple[int, int]) -> Pixels:
    padding = np.empty((*image_size, 3), np.uint8)
    padding[:] = PAD_COLOR
    return padding


def as_batch(tensors: "list[Tensor]") -> Batch:
    """Makes a Batch of tensors in the order of `HostBatchBuffer.tensors`; images become a view [B, 3, H, W]."""
    return Batch(tensors[0].permute(0, 3, 1, 2), *tensors[1:])


def create_memory(name: str, size_bytes: int) -> int:
    """Returns the descriptor of zeroed memory. Raises OSError."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, size_bytes)
    return fd


@dataclasses.dataclass(frozen=True)
class RingLayout:
    """Where everything is in the memory of a stream."""

    num_slots: int
    batch_size: int
    image_size: tuple[int, int]
    max_boxes: int
    num_processes: int

    def arrays(self) -> list[tuple[tuple[int, ...], DTypeLike]]:
        """Returns shape and type of the arrays of all slots, and of the counters."""
        slot = [((self.batch_size, *shape), dtype) for shape, dtype in batch_arrays(self.image_size, self.max_boxes)]
        return [*(slot * self.num_slots), ((self.num_processes, len(COUNTER_FIELDS) + 1), np.float64)]


class Ring:
    """The memory of a stream as one process sees it."""

    def __init__(self, layout: RingLayout, fd: int | None = None) -> None:
        """fd: existing memory, closed with the ring; None: new memory."""
        sizes = [math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in layout.arrays()]
        *starts, end = itertools.accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0)
        self.layout, self.fd = layout, create_memory("stoker-batches", end) if fd is None else fd
        weakref.finalize(self, os.close, self.fd)
        # All pages at once: one by one, at the first write of each process, takes several times as long.
        pages = mmap.mmap(self.fd, end, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.memory = np.frombuffer(pages, np.uint8)
        placed = zip(layout.arrays(), starts, strict=True)
        arrays = [np.ndarray(shape, dtype, pages, start) for (shape, dtype), start in placed]
        per_slot = (len(arrays) - 1) // layout.num_slots
        self.slots = [arrays[first : first + per_slot] for first in range(0, len(arrays) - 1, per_slot)]
        """Of each batch its arrays, for `HostBatchBuffer`."""
        self._counters = arrays[-1]
        """[P, …]: the fields of `Counters`, and CPU-seconds of the process."""

    def write_counters(self, process: int, total: Counters, cpu_s: float) -> None:
        self._counters[process] = [*(getattr(total, name) for name in COUNTER_FIELDS), cpu_s]

    def read_counters(self) -> Counters:
        """Returns the sum over all processes."""
        sums = dict(zip(COUNTER_FIELDS, self._counters.sum(0).tolist(), strict=False))
        return Counters(**{name: type(getattr(Counters, name))(value) for name, value in sums.items()})

    @property
    def cpu_s(self) -> float:
        """CPU-seconds of the processes since the stream was opened."""
        return float(self._counters[:, -1].sum())

    def clear_counters(self) -> None:
        self._counters[:, :-1] = 0
