"""The cache of decoded images: RGB bytes of whole upright images, as large as crops need them, in one file.

A run with a cache makes every sample from this form of an image, whether it was in the cache or has just been decoded.
So what a run sees, also after resuming, does not depend on the content of the cache: any entry may be missing, torn or
outdated, and nothing needs to be written durably, locked or repaired. Each image of the index has a fixed place in the
sparse file. All processes of a machine read and write the same file, so they share it through the page cache. The file
is not memory-mapped, so a full or failing disk is an OSError, not a SIGBUS.

The file is in the cache folder (`stoker_watch/storage/local_files.py`), under decoded-images/. A process that uses it
holds a shared lock; one that needs space removes files that no process holds, the least recently used first. All such
files together take half of the disk that is free without them, or `STOKER_CACHE_LIMIT_GIB`.
"""

import contextlib
import fcntl
import functools
import importlib.util
import os
import shutil
import struct
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import psutil
from numpy.typing import NDArray

from stoker.data.images import source
from stoker.data.images.decode import DCT_DIVISORS, Pixels, decode_resized
from stoker.data.images.headers import Header
from stoker_watch.errors import ConfigError, make_error
from stoker_watch.hardware.cgroup import host_memory
from stoker_watch.storage.local_files import cache_folder, format_bytes

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

LIMIT_ENV_VAR = "STOKER_CACHE_LIMIT_GIB"
"""GiB that all caches of decoded images on this machine may take together; 0 keeps none on the disk."""
MIN_EPOCHS = 3
"""The first epoch fills the cache; of two epochs, only one would gain."""
MIN_DECODE_S = 2e-4
"""Faster decoding is not worth a cache: reading from it takes 0.05 ms and more per image."""
DECODE_S_PER_PIXEL, OUTPUT_S_PER_PIXEL = 1.3e-9, 2.0e-9
"""libjpeg-turbo's time per pixel of the file (entropy decoding) and per pixel after DCT scaling: 1.0 ms for 640 × 480,
17 ms for 4,000 × 3,000 at a quarter of the size (`benchmarks/loading/cache.py`)."""
RESERVE_FRACTION, MAX_RESERVE_BYTES = 0.05, 2 << 30
"""What stays free on the disk, for example for checkpoints: this fraction of it, at most so many bytes."""
NETWORK_FILE_SYSTEMS = (
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "gpfs", "beegfs", "fuse",
)  # fmt: skip
"""File systems over a network, or of a program (gcsfuse, sshfs: "fuse.sshfs")."""

NO_CRC32C = "the package google-crc32c is not installed: pip install google-crc32c"

CacheKind = Literal["none", "ram", "disk"]

_IDENTITY = struct.Struct("<8sqiiqqqq")
"""Magic, image index, height, width; of the source file: bytes, mtime (ns), first byte and length of the image."""
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
        """Returns the size for a recipe: as much larger as its crops zoom in, within MIN_FACTOR … MAX_FACTOR. Without
        crops the factor is 1, and a sample is identical to one without a cache."""
        factor = min(MAX_FACTOR, max(MIN_FACTOR, scale_range[1])) if scale_jitter_prob > 0 else 1.0
        return cls(image_size, resize, factor)

    def cached_sizes(self, sizes: NDArray[np.int32]) -> NDArray[np.int32]:
        """Returns the kept height and width of images of these sizes [n, 2], never larger than the image; 0 stays 0."""
        safe_sizes = np.maximum(sizes, 1)
        scales = np.array(self.image_size) * self.factor / safe_sizes
        if self.resize == "letterbox":
            scales = np.repeat(scales.min(1, keepdims=True), 2, 1)
        scaled_sizes = np.round(sizes * np.minimum(1.0, scales)).astype(np.int32)  # as `compute_resize_geometry`
        cached: NDArray[np.int32] = np.minimum(sizes, np.maximum(scaled_sizes, 1))
        return cached


class PixelCache:
    """Decoded images by image index. `get`, `put` and `contains` are safe for many threads and processes at once."""

    def __init__(
        self,
        index: "Index",
        spec: CachedImageSpec,
        fd: int | None,
        *,
        max_bytes: int = 0,
        on_error: Callable[[str], None] | None = None,
    ) -> None:
        """fd: an open file, which is closed with the cache; None: nothing is kept, images are only resized.

        max_bytes: what the file may take of its disk or of memory. on_error is called once, from any thread, when
        nothing more can be kept.
        """
        self._index, self._fd, self._spec = index, fd, spec
        self._max_bytes, self._on_error = max_bytes, on_error
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
        return self._fd, {"spec": self._spec, "max_bytes": self._max_bytes}

    def shape(self, image_index: int) -> tuple[int, int] | None:
        """Height and width in which an image is kept; None where it is not kept, as the index has no size for it."""
        height, width = self._cached_sizes[image_index].tolist()
        return (height, width) if height and width else None

    def decode(self, image_index: int, data: bytes, path: Path | str, header: Header) -> Pixels:
        """The image as it is kept, from its file, uint8 [h, w, 3] RGB; `shape` must not be None. Raises DataError."""
        return decode_resized(data, path, header, self._cached_sizes[image_index].tolist())

    def contains(self, image_index: int) -> bool:
        """Returns whether `get` will most likely return the image. Does not read its pixels."""
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
        """Returns the checksum in the entry of an image; None where there is no entry for the present source file."""
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
        """The first part of the header of an image's entry; None where the image has no size or no file. The file is
        checked once, before this process first reads it; the next process notices that it was replaced later."""
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
        disk = os.fstatvfs(fd)
        reserve_bytes = min(MAX_RESERVE_BYTES, int(RESERVE_FRACTION * disk.f_blocks * disk.f_frsize))
        if reserve_bytes and disk.f_bavail * disk.f_frsize < reserve_bytes + num_bytes:  # of memory, both are 0
            return False
        return os.fstat(fd).st_blocks * 512 + num_bytes <= self._max_bytes

    def _disable_writes(self, reason: str) -> None:
        self.stop_filling(f"the cache of decoded images is no longer filled: {reason}")

    def stop_filling(self, message: str) -> None:
        """Stops writing; existing entries are still read. `on_error` is called with the first message."""
        if self._is_writable:
            self._is_writable = False
            if self._on_error is not None:
                self._on_error(message)


def compute_entry_offsets(cached_sizes: NDArray[np.int32]) -> NDArray[np.int64]:
    """Returns first byte of each entry of kept height and width [n, 2], and the length of the file [n + 1]."""
    pixel_bytes = cached_sizes.astype(np.int64).prod(1) * 3
    blocks = np.where(pixel_bytes > 0, -(-(pixel_bytes + HEADER_BYTES) // BLOCK_BYTES), 0)
    return np.concatenate([[0], np.cumsum(blocks * BLOCK_BYTES)])


@dataclass(frozen=True, kw_only=True)
class CachePolicyInputs:
    """The facts that decide whether and where decoded images are kept."""

    cached_bytes: int
    """Size of the cache of all training images whose size is known."""
    num_images: int
    """Number of these images."""
    decode_s: float
    """Estimated CPU time for decoding one of them, on average."""
    is_downscaled: bool
    """Whether some of them are kept smaller than they are."""
    max_scale: float
    """Largest scale of a crop, relative to the resized size of the whole image."""
    epochs: float | None
    """None: the duration of the run is given as time."""
    is_remote: bool
    """Whether the images are in a bucket."""
    free_memory_bytes: int
    """The page cache counts as free."""
    free_disk_bytes: int
    """Bytes that this cache may take of the disk."""
    network_file_system: str | None
    """The file system of the cache folder, if it is a network file system."""


def choose_cache(inputs: CachePolicyInputs) -> tuple[CacheKind, str]:
    """Returns where decoded images are kept, and the reason."""
    if not inputs.num_images:
        return "none", "the annotations have no image sizes"
    if inputs.epochs is not None and inputs.epochs < MIN_EPOCHS:
        return "none", f"the run has {inputs.epochs:.3g} epochs: a cache pays from {MIN_EPOCHS} on"
    if inputs.is_downscaled and inputs.max_scale > MAX_FACTOR:
        zoom = f"crops zoom in up to {inputs.max_scale:g} times"
        return "none", f"{zoom}; images kept at {MAX_FACTOR} times would be blurred"
    if inputs.decode_s < MIN_DECODE_S and not inputs.is_remote:
        return "none", f"decoding takes only about {inputs.decode_s * 1e3:.2g} ms per image"
    size_text = f"the decoded images take {format_bytes(inputs.cached_bytes)}"
    half_text = f"half of the free memory is {format_bytes(inputs.free_memory_bytes // 2)}"
    disk_problem = ""
    if inputs.network_file_system:
        disk_problem = f"the cache folder is on a network file system ({inputs.network_file_system})"
    elif inputs.cached_bytes > inputs.free_disk_bytes:
        disk_problem = f"the cache may take {format_bytes(inputs.free_disk_bytes)} of the disk"
    if 2 * inputs.cached_bytes <= inputs.free_memory_bytes:
        if not disk_problem:
            return "disk", f"{size_text}: as a file that stays in memory, as {half_text}"
        return ("ram" if hasattr(os, "memfd_create") else "none"), f"{size_text}, {half_text}; {disk_problem}"
    if not disk_problem and inputs.is_remote:
        return "disk", f"{size_text}, {half_text}; a disk saves the requests to the bucket"
    return "none", f"{size_text}, {half_text}; {disk_problem or 'decoding is as fast as most disks'}"


def estimate_decode_s(sizes: NDArray[np.int32], cached_sizes: NDArray[np.int32], factor: float) -> float:
    """Estimated CPU time for decoding an image at its resized size, on average over sizes [n, 2]."""
    resized_sizes = cached_sizes / factor
    divisor = np.ones(len(sizes))
    for step in sorted(DCT_DIVISORS):
        divisor[(sizes >= resized_sizes * step).all(1)] = step
    pixels = sizes.astype(np.float64).prod(1)
    return float((pixels * DECODE_S_PER_PIXEL + pixels / divisor**2 * OUTPUT_S_PER_PIXEL).mean()) if len(sizes) else 0.0


def collect_cache_inputs(
    index: "Index",
    image_indices: NDArray[np.int64],
    spec: CachedImageSpec,
    *,
    max_scale: float,
    epochs: float | None,
) -> CachePolicyInputs:
    """Returns the inputs of `choose_cache` for this machine in its present state."""
    sizes = index.original_size[image_indices]
    sizes = sizes[(sizes > 0).all(1)]
    cached_sizes = spec.cached_sizes(sizes)
    limit, used = host_memory()
    path = cache_file_path(index, spec)
    return CachePolicyInputs(
        cached_bytes=int(compute_entry_offsets(cached_sizes)[-1]),
        num_images=len(sizes),
        decode_s=estimate_decode_s(sizes, cached_sizes, spec.factor),
        is_downscaled=bool((cached_sizes < sizes).any()),
        max_scale=max_scale,
        epochs=epochs,
        is_remote=source.path_to_uri(index.root) is not None,
        free_memory_bytes=max(0, limit - used),
        free_disk_bytes=compute_free_disk_bytes(path),
        network_file_system=find_network_file_system(path),
    )


def open_cache(
    kind: CacheKind,
    index: "Index",
    image_indices: NDArray[np.int64],
    spec: CachedImageSpec,
    log_event: Callable[[str, str], None],
) -> PixelCache | None:
    """Returns the cache that the setting names; where it cannot be opened, one that keeps nothing, with a warning.

    log_event gets "info" or "warning", and a sentence; the cache calls it from any thread.
    """
    if kind == "none":
        return None
    if importlib.util.find_spec("google_crc32c") is None:
        log_event("warning", f"decoded images are not cached: {NO_CRC32C}")
        return PixelCache(index, spec, None)
    sizes = index.original_size[image_indices]
    required_bytes = int(compute_entry_offsets(spec.cached_sizes(sizes[(sizes > 0).all(1)]))[-1])
    if kind == "ram":
        if not hasattr(os, "memfd_create"):
            raise ConfigError("--cache ram needs Linux.", choices=("none", "disk"))
        limit, used = host_memory()
        max_bytes, where = max(0, limit - used) // 2, "free memory"
        fd = os.memfd_create("stoker-decoded-images", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        path = cache_file_path(index, spec)
        try:
            fd = open_cache_file(path)
        except OSError as error:
            log_event("warning", f"decoded images are not cached: {path}: {error.strerror}")
            return PixelCache(index, spec, None)
        for removed in evict_cache_files(path, required_bytes):
            log_event("info", f"removed decoded images of another data set or size to free space: {removed.name}")
        others_bytes = sum(disk_bytes for _, disk_bytes, _ in _other_cache_files(path))
        max_bytes, where = max(0, _limit_bytes(path) - others_bytes), "disk"
    if max_bytes < required_bytes:
        log_event(
            "info",
            f"the cache of decoded images may take {format_bytes(max_bytes)} of the {where}; all images need"
            f" {format_bytes(required_bytes)}",
        )
    return PixelCache(index, spec, fd, max_bytes=max_bytes, on_error=functools.partial(log_event, "warning"))


def cache_file_path(index: "Index", spec: CachedImageSpec) -> Path:
    """The cache file of an index and a spec: another one if anything differs that decides which image is where."""
    facts = VERSION, spec.image_size, spec.resize, spec.factor, index.fingerprint()
    digest = blake2b(repr(facts).encode(), digest_size=8).hexdigest()
    return cache_folder() / "decoded-images" / f"{index.root.name[:40]}-{digest}.pixels"


def open_cache_file(path: Path) -> int:
    """Opens or creates a cache file, with a shared lock that marks it as in use. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            os.utime(fd)  # the time of its last use
            if os.fstat(fd).st_nlink:
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # another process has removed it meanwhile


def evict_cache_files(path: Path, required_bytes: int) -> list[Path]:
    """Removes cache files that no process uses, the least recently used first, until `path` may take so many bytes."""
    others, removed = _other_cache_files(path), []
    excess_bytes = required_bytes + sum(disk_bytes for _, disk_bytes, _ in others) - _limit_bytes(path)
    for _, disk_bytes, other in others:
        if excess_bytes > 0 and is_unused(other, remove=True):
            excess_bytes -= disk_bytes
            removed.append(other)
    return removed


def compute_free_disk_bytes(path: Path) -> int:
    """Returns bytes that the cache file `path` may take, after all unused cache files are removed."""
    used_bytes = sum(disk_bytes for _, disk_bytes, other in _other_cache_files(path) if not is_unused(other))
    return max(0, _limit_bytes(path) - used_bytes)


def _other_cache_files(path: Path) -> list[tuple[int, int, Path]]:
    """Returns the time of the last use (ns), and bytes on the disk, of the cache files besides `path`, ascending."""
    others = []
    for other in path.parent.glob("*.pixels"):
        with contextlib.suppress(FileNotFoundError):  # another process removed it
            if other != path:
                stat = other.stat()
                others.append((stat.st_mtime_ns, stat.st_blocks * 512, other))
    return sorted(others)


def _limit_bytes(path: Path) -> int:
    """Returns bytes that all cache files together may take."""
    if value := os.environ.get(LIMIT_ENV_VAR):
        limit_gib = -1.0
        with contextlib.suppress(ValueError):
            limit_gib = float(value)
        if not 0 <= limit_gib < 2**40:
            raise make_error(ConfigError, "cache-limit-not-a-number", limit_env_var=LIMIT_ENV_VAR, value=value)
        return int(limit_gib * 2**30)
    directory = next(parent for parent in path.parents if parent.exists())
    taken = sum(disk_bytes for _, disk_bytes, _ in _other_cache_files(path.with_name("none")))
    return (shutil.disk_usage(directory).free + taken) // 2


def find_network_file_system(path: Path) -> str | None:
    """Returns the type of the file system on which a path is or would be, if it is a network file system."""
    mounts = {partition.mountpoint: partition.fstype for partition in psutil.disk_partitions(all=True)}
    real_path = Path(os.path.realpath(path))
    fs_type = next((mounts[str(parent)] for parent in real_path.parents if str(parent) in mounts), "")
    return fs_type if fs_type.partition(".")[0] in NETWORK_FILE_SYSTEMS else None


def is_unused(file: Path, *, remove: bool = False) -> bool:
    """Returns whether no process has a cache file open, as far as its file system shows. remove: if so, removes it."""
    try:
        fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:  # it belongs to another user
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if remove:
            file.unlink(missing_ok=True)
    except OSError:  # in use, or the file system has no locks
        return False
    finally:
        os.close(fd)
    return True
