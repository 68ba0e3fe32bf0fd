"""Decides whether decoded images are kept, where, and how much space they may take. What is kept: `pixel_cache.py`.

The file is in the cache folder (`storage/local_files.py`), under decoded-images/. A process that uses it holds a shared
lock; one that needs space removes files that no process holds, the least recently used first. All such files together
take half of the disk that is free without them, or `STOKER_CACHE_LIMIT_GIB`.
"""

import contextlib
import fcntl
import functools
import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import psutil
from numpy.typing import NDArray

from stoker.data.images import source
from stoker.data.images.decode import DCT_DIVISORS
from stoker.data.images.pixel_cache import MAX_FACTOR, CachedImageSpec, PixelCache, cache_digest, compute_entry_offsets
from stoker.errors import ConfigError
from stoker.hardware.cgroup import host_memory
from stoker.storage.local_files import cache_folder

if TYPE_CHECKING:
    from stoker.data.index import Index

LIMIT_ENV_VAR = "STOKER_CACHE_LIMIT_GIB"
"""GiB that all caches of decoded images on this machine may take together; 0 keeps none on the disk."""
MIN_EPOCHS = 3
"""The first epoch fills the cache; of two epochs, only one would gain."""
MIN_DECODE_S = 2e-4
"""Faster decoding is not worth a cache: reading from it takes 0.05 ms and more per image."""
DECODE_S_PER_PIXEL, OUTPUT_S_PER_PIXEL = 1.3e-9, 2.0e-9
"""libjpeg-turbo's time per pixel of the file (entropy decoding) and per pixel after DCT scaling: 1.0 ms for 640 × 480,
17 ms for 4,000 × 3,000 at a quarter of the size (`benchmarks/loading/cache.py`)."""
DISK_BYTES_PER_S = 500e6
"""Throughput of an ordinary disk of a cloud machine. Where caching does not pay at this rate, and the images exceed
memory, they are decoded each time."""
RESERVE_FRACTION, MAX_RESERVE_BYTES = 0.05, 2 << 30
"""What stays free on the disk, for example for checkpoints: this fraction of it, at most so many bytes."""
NETWORK_FILE_SYSTEMS = (
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "gpfs", "beegfs", "fuse",
)  # fmt: skip
"""File systems over a network, or of a program (gcsfuse, sshfs: "fuse.sshfs")."""

NO_CRC32C = "the package google-crc32c is not installed: pip install google-crc32c"

CacheKind = Literal["none", "ram", "disk"]


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
    workers: int
    """Workers that decode."""
    is_remote: bool
    """Whether the images are in a bucket."""
    free_memory_bytes: int
    """The page cache counts as free."""
    free_disk_bytes: int
    """Bytes that this cache may take of the disk."""
    network_file_system: str | None
    """The file system of the cache folder, if it is a network file system."""
    has_memfd: bool = hasattr(os, "memfd_create")
    """Whether this system has files in memory."""


def choose_cache(inputs: CachePolicyInputs) -> tuple[CacheKind, str]:
    """Where decoded images are kept, and the reason."""
    if not inputs.num_images:
        return "none", "the annotations have no image sizes"
    if inputs.epochs is not None and inputs.epochs < MIN_EPOCHS:
        return "none", f"the run has {inputs.epochs:.3g} epochs: a cache pays from {MIN_EPOCHS} on"
    if inputs.is_downscaled and inputs.max_scale > MAX_FACTOR:
        return (
            "none",
            f"crops zoom in up to {inputs.max_scale:g} times; images kept at {MAX_FACTOR} times would be blurred",
        )
    if inputs.decode_s < MIN_DECODE_S and not inputs.is_remote:
        return "none", f"decoding takes only about {inputs.decode_s * 1e3:.2g} ms per image"
    size_text = f"the decoded images take {_format_bytes(inputs.cached_bytes)}"
    half_text = f"half of the free memory is {_format_bytes(inputs.free_memory_bytes // 2)}"
    disk_problem = ""
    if inputs.network_file_system:
        disk_problem = f"the cache folder is on a network file system ({inputs.network_file_system})"
    elif inputs.cached_bytes > inputs.free_disk_bytes:
        disk_problem = f"the cache may take {_format_bytes(inputs.free_disk_bytes)} of the disk"
    if 2 * inputs.cached_bytes <= inputs.free_memory_bytes:
        if not disk_problem:
            return "disk", f"{size_text}: as a file that stays in memory, as {half_text}"
        return ("ram" if inputs.has_memfd else "none"), f"{size_text}, {half_text}; {disk_problem}"
    if disk_problem:
        return "none", f"{size_text}, {half_text}; {disk_problem}"
    if inputs.is_remote:
        return "disk", f"{size_text}, {half_text}; a disk saves the requests to the bucket"
    required_bytes_per_s = inputs.cached_bytes / inputs.num_images / inputs.decode_s * inputs.workers
    rates_text = (
        f"reading {required_bytes_per_s / 1e6:,.0f} MB/s would be as fast as decoding with {inputs.workers} workers"
    )
    if required_bytes_per_s > DISK_BYTES_PER_S:
        return "none", f"{size_text}, {half_text}; from a disk, {rates_text}"
    return "disk", f"{size_text}, {half_text}; {rates_text}, and a disk is faster"


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
    workers: int,
) -> CachePolicyInputs:
    """The inputs of `choose_cache` for this machine in its present state."""
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
        workers=workers,
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
    """The cache that the setting names; where it cannot be opened, one that keeps nothing, with a warning.

    log_event gets "info" or "warning", and a sentence; the cache calls it from any thread.
    """
    if kind == "none":
        return None
    if importlib.util.find_spec("google_crc32c") is None:
        log_event("warning", f"decoded images are not cached: {NO_CRC32C}")
        return PixelCache(index, spec, None)
    on_error = functools.partial(log_event, "warning")
    sizes = index.original_size[image_indices]
    required_bytes = int(compute_entry_offsets(spec.cached_sizes(sizes[(sizes > 0).all(1)]))[-1])
    if kind == "ram":
        if not hasattr(os, "memfd_create"):
            raise ConfigError("--cache ram needs Linux.", choices=("none", "disk"))
        limit, used = host_memory()
        max_bytes = max(0, limit - used) // 2
        if max_bytes < required_bytes:
            log_event(
                "info",
                f"the cache of decoded images may take {_format_bytes(max_bytes)}, half of the free memory; all images"
                f" need {_format_bytes(required_bytes)}",
            )
        fd = os.memfd_create("stoker-decoded-images", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        return PixelCache(index, spec, fd, max_bytes=max_bytes, on_error=on_error)
    path = cache_file_path(index, spec)
    try:
        fd = open_cache_file(path)
    except OSError as error:
        log_event("warning", f"decoded images are not cached: {path}: {error.strerror}")
        return PixelCache(index, spec, None)
    for removed in evict_cache_files(path, required_bytes):
        log_event("info", f"removed decoded images of another data set or size to free space: {removed.name}")
    max_bytes = max(0, _free_bytes(path, _other_cache_files(path)))
    if max_bytes < required_bytes:
        log_event(
            "info",
            f"the cache of decoded images may take {_format_bytes(max_bytes)} of the disk; all images need"
            f" {_format_bytes(required_bytes)}",
        )
    reserve = min(MAX_RESERVE_BYTES, int(shutil.disk_usage(path.parent).total * RESERVE_FRACTION))
    return PixelCache(index, spec, fd, max_bytes=max_bytes, reserve_bytes=reserve, on_error=on_error)


def cache_file_path(index: "Index", spec: CachedImageSpec) -> Path:
    """The cache file of an index and a spec."""
    return cache_folder() / "decoded-images" / f"{index.root.name[:40]}-{cache_digest(index, spec)}.pixels"


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
    excess_bytes = required_bytes - _free_bytes(path, others)
    for other in sorted(others, key=lambda file: _stat_cache_file(file)[1]):
        disk_bytes = _stat_cache_file(other)[0]
        if excess_bytes > 0 and is_unused(other, remove=True):
            excess_bytes -= disk_bytes
            removed.append(other)
    return removed


def compute_free_disk_bytes(path: Path) -> int:
    """Bytes that the cache file `path` may take, after all unused cache files are removed."""
    return max(0, _free_bytes(path, [other for other in _other_cache_files(path) if not is_unused(other)]))


def _free_bytes(path: Path, others: list[Path]) -> int:
    """Bytes that `path` may take besides the cache files `others`; negative where they exceed the limit."""
    directory = path.parent
    while not directory.exists():
        directory = directory.parent
    return _cache_limit_bytes(directory) - sum(_stat_cache_file(file)[0] for file in others)


def find_network_file_system(path: Path) -> str | None:
    """The type of the file system on which a path is or would be, if it is a network file system."""
    mounts = {partition.mountpoint: partition.fstype for partition in psutil.disk_partitions(all=True)}
    real_path = Path(os.path.realpath(path))
    fs_type = next((mounts[str(parent)] for parent in real_path.parents if str(parent) in mounts), "")
    return fs_type if fs_type.partition(".")[0] in NETWORK_FILE_SYSTEMS else None


def _cache_limit_bytes(directory: Path) -> int:
    """Bytes that all cache files together may take of the disk of a directory."""
    if value := os.environ.get(LIMIT_ENV_VAR):
        with contextlib.suppress(ValueError):
            if 0 <= (limit_gib := float(value)) < 2**40:
                return int(limit_gib * 2**30)
        raise ConfigError(f"{LIMIT_ENV_VAR}={value!r} is not a number of GiB.", fix="set it to 0 or more, or unset it")
    taken = sum(_stat_cache_file(file)[0] for file in directory.glob("*.pixels"))
    return (shutil.disk_usage(directory).free + taken) // 2


def _other_cache_files(path: Path) -> list[Path]:
    return [file for file in path.parent.glob("*.pixels") if file != path]


def _stat_cache_file(file: Path) -> tuple[int, int]:
    """Bytes on the disk, and the time of its last use (ns); zeros if another process removed it."""
    try:
        stat = file.stat()
    except FileNotFoundError:
        return 0, 0
    return stat.st_blocks * 512, stat.st_mtime_ns


def is_unused(file: Path, *, remove: bool = False) -> bool:
    """Whether no process has a cache file open, as far as its file system shows. remove: if so, removes it."""
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


def _format_bytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.3g} MB"
