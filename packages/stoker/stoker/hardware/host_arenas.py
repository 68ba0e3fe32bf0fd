"""Pinned host memory that is used again for each snapshot of the same tensors."""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from stoker.hardware.device import Device

CHUNK_BYTES = 2**26
"""Bytes of a chunk of pinned memory. A larger tensor has a chunk of its own."""
ALIGNMENT_BYTES = 64
"""Alignment of every tensor in it: more than any data type needs."""


class ArenaLease:
    """Keeps the views of an arena from being given out again for as long as it is referenced."""


class HostArenas:
    """Pinned host memory that is allocated once and used for every snapshot of the same tensors. Pinning memory takes a
    call of the driver for each block, which waits for the device and for other threads. torch's allocator keeps freed
    blocks, but rounds each of them up to a power of two (c10's CachingHostAllocator.h). So an arena has a few chunks of
    at most CHUNK_BYTES, and tensors are views of them. One thread calls; leases end on any."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._arenas: list[_HostArena] = []

    def reserve(self, tensors: Sequence[Tensor]) -> None:
        """Allocates memory for copies of `tensors` now."""
        self.take(tensors)

    def take(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], ArenaLease]:
        """Host tensors to copy `tensors` into, contiguous. Nothing else uses their memory until the lease is no longer
        referenced. Allocates an arena if none that is free has room."""
        for arena in self._arenas:
            if arena.is_free and (views := arena.views(tensors)) is not None:
                return views, arena.lease()
        arena = _HostArena(self._device, tensors)
        self._arenas.append(arena)
        views = arena.views(tensors)
        assert views is not None
        return views, arena.lease()


class _HostArena:
    def __init__(self, device: Device, tensors: Sequence[Tensor]) -> None:
        sizes: list[int] = []
        start = 0
        for tensor in tensors:
            if not sizes or (start and start + tensor.nbytes > CHUNK_BYTES):
                sizes.append(0)
                start = 0
            sizes[-1] = start + tensor.nbytes
            start = _aligned(sizes[-1])
        self._chunks = [device.empty_host((size,), torch.uint8) for size in sizes]
        self._lease: weakref.ref[ArenaLease] | None = None

    @property
    def is_free(self) -> bool:
        return self._lease is None or self._lease() is None

    def lease(self) -> ArenaLease:
        lease = ArenaLease()
        self._lease = weakref.ref(lease)
        return lease

    def views(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """Parts of the chunks with the shapes and types of `tensors`; None if they do not fit."""
        views = []
        chunk = start = 0
        for tensor in tensors:
            while chunk < len(self._chunks) and start + tensor.nbytes > self._chunks[chunk].numel():
                chunk, start = chunk + 1, 0
            if chunk == len(self._chunks):
                return None
            part = self._chunks[chunk][start : start + tensor.nbytes]
            views.append(part.view(tensor.dtype).view(tensor.shape))
            start = _aligned(start + tensor.nbytes)
        return views


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
