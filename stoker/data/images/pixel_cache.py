"""The cache of decoded images: RGB bytes of whole upright images, as large as crops need them, in one file.

A run with a cache makes every sample from this form of an image, whether it was in the cache or has just been decoded.
So what a run sees, also after resuming, does not depend on the content of the cache: any entry may be missing, torn or
outdated, and nothing needs to be written durably, locked or repaired. Each image of the index has a fixed place in the
sparse file. All processes of a machine read and write the same file, so they share it through the page cache. The file
is not memory-mapped, so a full or failing disk is an OSError, not a SIGBUS.

Location and size of the file, and whether there is one: `cache_policy.py`. Its user: `loading/samples.py`.
"""

import fcntl
import os
import struct
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stoker.data.images.decode import Pixels, decode_resized
from stoker.data.images.headers import Header

if TYPE_CHECKING:
    from stoker.data.index import Index

VERSION = 1
"""Of the file format and of the pixels in it: increase it when decoding or resizing changes."""
MIN_FACTOR, MAX_FACTOR = 1.25, 1.5
"""Limits of how much larger than the resized size images are kept for crops. Below, resizing twice blurs; above, memory
(the square) is spent on scales that few recipes use."""
BLOCK_BYTES = 4096
"""Entries begin on page boundaries, so that two images never share a page."""
SLOW_WRITE_S, PAUSE_FACTOR = 0.05, 4
"""A write that takes longer, because the kernel makes writers wait for the disk, is followed by a pause of so many
times its duration. So filling the cache costs the workers at most a fifth of their time."""

_IDENTITY = struct.Struct("<8sqiiqqqq")
"""Magic and version, image index, height, width; of the source file: bytes, mtime (ns), first byte and length of the
image in it."""
_CRC = struct.Struct("<I4x")
_MAGIC = b"pixels%02d" % VERSION
HEADER_BYTES = _IDENTITY.size + _CRC.size


@dataclass(frozen=True)
class CachedImageSpec:
    """The size in which images are kept: `factor` times the resized size of the whole image."""

    image_size: tuple[int, int]
    """Height and width."""
    resize: str
    """letterbox or squash, as in `geometry.compute_resize_geometry`."""
    factor: float

    @classmethod
    def for_augmentation(
        cls, image_size: tuple[int, int], resize: str, *, scale_jitter_prob: float, scale_range: tuple[float, float]
    ) -> "CachedImageSpec":
        """The size for a recipe: as much larger as its crops zoom in, within MIN_FACTOR … MAX_FACTOR. Without crops the
        factor is 1, and a sample is identical to one without a cache."""
        return cls(
            image_size, resize, min(MAX_FACTOR, max(MIN_FACTOR, scale_range[1])) if scale_jitter_prob > 0 else 1.0
        )

    def cached_sizes(self, sizes: NDArray[np.int32]) -> NDArray[np.int32]:
        """Height and width of images [n, 2] → kept size [n, 2], never larger than the image; 0 stays 0."""
        safe_sizes = np.maximum(sizes, 1)
        scales = np.array(self.image_size) * self.factor / safe_sizes
        if self.resize == "letterbox":
            scales = np.repeat(scales.min(1, keepdims=True), 2, 1)
        scaled_sizes = np.round(sizes * np.minimum(1.0, scales)).astype(np.int32)  # as `compute_resize_geometry`
        cached: NDArray[np.int32] = np.minimum(sizes, np.maximum(scaled_sizes, 1))
        return cached


def cache_digest(index: "Index", spec: CachedImageSpec) -> str:
    """Identifies the file of an index and a spec: changes with anything that decides which image is where."""
    facts = VERSION, spec.image_size, spec.resize, spec.factor, index.fingerprint()
    return blake2b(repr(facts).encode(), digest_size=8).hexdigest()


class PixelCache:
    """Decoded images by image index. `get`, `put` and `contains` are safe for many threads and processes at once."""

    def __init__(
        self,
        index: "Index",
        spec: CachedImageSpec,
        fd: int | None,
        *,
        max_bytes: int = 0,
        reserve_bytes: int = 0,
        on_error: Callable[[str], None] | None = None,
    ) -> None:
        """fd: an open file, which is closed with the cache; None: nothing is kept, images are only resized.

        max_bytes: what the file may take of its disk or of memory; reserve_bytes: what stays free on its disk.
        on_error is called once, from any thread, when nothing more can be kept.
        """
        self._index, self._fd, self._spec = index, fd, spec
        self._max_bytes, self._reserve_bytes, self._on_error = max_bytes, reserve_bytes, on_error
        self._cached_sizes = spec.cached_sizes(index.original_size)
        self._entry_offsets = compute_entry_offsets(self._cached_sizes)
        self._source_stamps = np.full((len(index.original_size), 2), -1, np.int64)
        self._is_writable = fd is not None
        self._pause_until = 0.0
        if fd is not None:
            import google_crc32c  # `open_cache` opens no file where it is missing

            self._crc32c: Callable[[Pixels], int] = google_crc32c.value
            weakref.finalize(self, os.close, fd).atexit = False  # workers may still read at exit

    @property
    def shared(self) -> tuple[int | None, dict[str, Any]]:
        """The file, and the other arguments (but index and on_error) with which a worker process makes its own."""
        return self._fd, {"spec": self._spec, "max_bytes": self._max_bytes, "reserve_bytes": self._reserve_bytes}

    def shape(self, image_index: int) -> tuple[int, int] | None:
        """Height and width in which an image is kept; None where it is not kept, as the index has no size for it."""
        height, width = self._cached_sizes[image_index].tolist()
        return (height, width) if height and width else None

    def decode(self, image_index: int, data: bytes, path: Path | str, header: Header) -> Pixels:
        """The image as it is kept, from its file, uint8 [h, w, 3] RGB; `shape` must not be None. Raises DataError."""
        return decode_resized(data, path, header, self._cached_sizes[image_index].tolist())

    def contains(self, image_index: int) -> bool:
        """Whether `get` will most likely return the image. Does not read its pixels."""
        return self._read_crc(image_index) is not None

    def get(self, image_index: int) -> Pixels | None:
        """The image, uint8 [h, w, 3] RGB; None where it is missing, damaged, or not of the present source file."""
        crc = self._read_crc(image_index)
        if crc is None or self._fd is None:
            return None
        pixels = np.empty((*self._cached_sizes[image_index].tolist(), 3), np.uint8)
        try:
            count = os.preadv(self._fd, [pixels.data], int(self._entry_offsets[image_index]) + HEADER_BYTES)
        except OSError as error:
            self._disable_writes(f"reading failed: {error.strerror}")
            return None
        # Checked every time (0.03 ms for 640 × 480), as a disk may return other bytes at the next reading.
        return pixels if count == pixels.nbytes and self._crc32c(pixels) == crc else None

    def put(self, image_index: int, pixels: Pixels) -> None:
        """Keeps what `decode` returned, where there is room."""
        if not self._is_writable or self._fd is None or time.monotonic() < self._pause_until:
            return
        identity = self._entry_identity(image_index)
        if identity is None:
            return
        start_s = time.monotonic()
        try:
            if not self._has_room(self._fd, pixels.nbytes + BLOCK_BYTES):
                self._disable_writes("it has reached its limit, or the disk is nearly full")
                return
            head, offset = identity + _CRC.pack(self._crc32c(pixels)), int(self._entry_offsets[image_index])
            written = os.pwritev(self._fd, [head, pixels.data], offset)
            if written < len(head) + pixels.nbytes:  # writing the rest raises the reason
                os.pwrite(self._fd, (head + pixels.tobytes())[written:], offset + written)
        except OSError as error:
            self._disable_writes(f"writing failed: {error.strerror}")
        end_s = time.monotonic()
        if end_s - start_s > SLOW_WRITE_S:
            self._pause_until = end_s + PAUSE_FACTOR * (end_s - start_s)

    def release_memory(self) -> int:
        """Frees a cache in memory and keeps nothing more, in all processes that share it. Returns the bytes that it
        held; 0 for a cache on a disk, which needs no memory."""
        if self._fd is None:
            return 0
        held_bytes = os.fstat(self._fd).st_blocks * 512
        try:
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)  # writes fail from now on
        except OSError:  # not a file in memory
            return 0
        self._is_writable = False
        os.ftruncate(self._fd, 0)
        return held_bytes

    def _read_crc(self, image_index: int) -> int | None:
        """The checksum in the entry of an image; None where there is no entry for the present source file."""
        if self._fd is None or (identity := self._entry_identity(image_index)) is None:
            return None
        try:
            head = os.pread(self._fd, HEADER_BYTES, int(self._entry_offsets[image_index]))
        except OSError as error:
            self._disable_writes(f"reading failed: {error.strerror}")
            return None
        if len(head) < HEADER_BYTES or not head.startswith(identity):
            return None
        crc: int
        (crc,) = _CRC.unpack_from(head, _IDENTITY.size)
        return crc

    def _entry_identity(self, image_index: int) -> bytes | None:
        """The first part of the header of an image's entry; None where the image has no size or no file.

        The source file is checked once, before this process first reads it. If it is replaced later, the next process
        notices.
        """
        height, width = self._cached_sizes[image_index].tolist()
        if not (height and width):
            return None
        byte_range = self._index.byte_range(image_index)
        source_bytes, mtime_ns = self._source_stamps[image_index].tolist()
        if source_bytes < 0:
            path = self._index.path(image_index)
            try:
                stat = os.stat(path if byte_range is None else path.parent)
            except OSError:  # reading it raises the reason with its path
                return None
            source_bytes, mtime_ns = self._source_stamps[image_index] = stat.st_size, stat.st_mtime_ns
        return _IDENTITY.pack(_MAGIC, image_index, height, width, source_bytes, mtime_ns, *(byte_range or (0, 0)))

    def _has_room(self, fd: int, num_bytes: int) -> bool:
        if os.fstat(fd).st_blocks * 512 + num_bytes > self._max_bytes:
            return False
        if not self._reserve_bytes:
            return True
        disk = os.fstatvfs(fd)
        return disk.f_bavail * disk.f_frsize >= self._reserve_bytes + num_bytes

    def _disable_writes(self, reason: str) -> None:
        self.stop_filling(f"the cache of decoded images is no longer filled: {reason}")

    def stop_filling(self, message: str) -> None:
        """Stops writing; existing entries are still read. `on_error` is called with the first message."""
        if self._is_writable:
            self._is_writable = False
            if self._on_error is not None:
                self._on_error(message)


def compute_entry_offsets(cached_sizes: NDArray[np.int32]) -> NDArray[np.int64]:
    """Kept height and width [n, 2] → first byte of each entry, and the length of the file [n + 1]."""
    pixel_bytes = cached_sizes.astype(np.int64).prod(1) * 3
    blocks = np.where(pixel_bytes > 0, -(-(pixel_bytes + HEADER_BYTES) // BLOCK_BYTES), 0)
    return np.concatenate([[0], np.cumsum(blocks * BLOCK_BYTES)])
