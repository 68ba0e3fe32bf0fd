"""Whether decoded pictures are kept, where, and how much room they may take. What is kept: `pixel_cache.py`.

The file lies in the cache folder (`files.cache_folder`), under pictures/. A process that uses it holds a shared lock;
one that needs room removes the files that nobody holds, the one that was used longest ago first. All such files
together take half of the disk that is free without them, or `STOKER_CACHE_LIMIT_GIB`.
"""

import contextlib
import fcntl
import functools
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
from stoker.data.images.decode import SHRINKS
from stoker.data.images.pixel_cache import MOST_FACTOR, Form, PixelCache, digest, offsets_of
from stoker.errors import ConfigError
from stoker.hardware.cgroup import host_memory
from stoker.storage.local_files import cache_folder

if TYPE_CHECKING:
    from stoker.data.index import Index

LIMIT = "STOKER_CACHE_LIMIT_GIB"
"""Variable: GiB that all caches of decoded pictures on this machine may take together; 0 keeps none on the disk."""
FEWEST_EPOCHS = 3
"""The first epoch fills the cache; of two, one would gain."""
LEAST_DECODE_S = 2e-4
"""Decoding that takes less a picture is not worth it: reading from the cache takes 0.05 ms and more."""
DECODE_S_PER_PIXEL, SHOW_S_PER_PIXEL = 1.3e-9, 2.0e-9
"""libjpeg-turbo's time for a pixel of the file (its entropy decoding) and for one that comes out of the DCT scaling:
1.0 ms for 640 × 480, 17 ms for 4,000 × 3,000 at a quarter (`benchmarks/cache.py`)."""
DISK_BYTES_PER_S = 500e6
"""What an ordinary disk of a cloud machine delivers. Where caching does not pay at this rate, pictures that are larger
than memory are decoded anew each time."""
RESERVE_SHARE, MOST_RESERVE = 0.05, 2 << 30
"""What is left free on the disk, for checkpoints among others: this share of it, at most so many bytes."""
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p", "afs", "ceph", "glusterfs", "lustre", "gpfs", "beegfs", "smbfs", "fuse")
"""File systems that are another machine's disk, or a program's (gcsfuse, sshfs: "fuse.sshfs")."""

Kind = Literal["none", "memory", "disk"]


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The numbers that decide whether and where decoded pictures are kept."""

    kept_bytes: int
    """Of all training pictures whose size is known, as they would be kept."""
    pictures: int
    """How many these are."""
    decode_s: float
    """Processor time for decoding one of them, estimated, on average."""
    shrinks: bool
    """Whether some are kept smaller than they are."""
    closest: float
    """How many times as large as in the canvas a crop may show a picture."""
    epochs: float | None
    """None: the length is given in minutes."""
    threads: int
    """That decode."""
    remote: bool
    """The pictures are in a bucket."""
    memory_free: int
    """Bytes, page cache counted as free."""
    disk_room: int
    """Bytes that this cache may take of the disk."""
    network: str | None
    """File system of the cache folder, where it is across a network."""
    anonymous: bool = hasattr(os, "memfd_create")
    """Whether this system can keep a file in memory."""


def choose(s: Situation) -> tuple[Kind, str]:
    """Where decoded pictures are kept, and why."""
    if not s.pictures:
        return "none", "the annotations do not say how large the pictures are"
    if s.epochs is not None and s.epochs < FEWEST_EPOCHS:
        return "none", f"the run has {s.epochs:.3g} epochs: decoding once for all pays from {FEWEST_EPOCHS} on"
    if s.shrinks and s.closest > MOST_FACTOR:
        return "none", f"crops zoom in up to {s.closest:g} times; pictures kept at {MOST_FACTOR} times would be blurred"
    if s.decode_s < LEAST_DECODE_S and not s.remote:
        return "none", f"decoding takes about {s.decode_s * 1e3:.2g} ms a picture: nothing to gain"
    size = f"the decoded pictures take {_gb(s.kept_bytes)}"
    half = f"half of the free memory is {_gb(s.memory_free // 2)}"
    unfit = f"the cache folder is on a network file system ({s.network})" if s.network else ""
    if not unfit and s.kept_bytes > s.disk_room:
        unfit = f"the cache may take {_gb(s.disk_room)} of the disk"
    if 2 * s.kept_bytes <= s.memory_free:
        if not unfit:
            return "disk", f"{size}: as a file that stays in memory, as {half}"
        return ("memory" if s.anonymous else "none"), f"{size}, {half}; {unfit}"
    if unfit:
        return "none", f"{size}, {half}; {unfit}"
    if s.remote:
        return "disk", f"{size}, {half}; a disk saves the requests to the bucket"
    needed = s.kept_bytes / s.pictures / s.decode_s * s.threads
    rates = f"reading {needed / 1e6:,.0f} MB/s would be as fast as decoding on {s.threads} threads"
    if needed > DISK_BYTES_PER_S:
        return "none", f"{size}, {half}; from a disk, {rates}"
    return "disk", f"{size}, {half}; {rates}, and a disk reads more"


def decode_seconds(size: NDArray[np.int32], kept: NDArray[np.int32], factor: float) -> float:
    """Estimated processor time for decoding a picture straight into the canvas, on average over sizes [n, 2]."""
    shown = kept / factor
    divisor = np.ones(len(size))
    for step in sorted(SHRINKS):
        divisor[(size >= shown * step).all(1)] = step
    pixels = size.astype(np.float64).prod(1)
    return float((pixels * DECODE_S_PER_PIXEL + pixels / divisor**2 * SHOW_S_PER_PIXEL).mean()) if len(size) else 0.0


def situation(
    index: "Index",
    rows: NDArray[np.int64],
    form: Form,
    *,
    closest: float,
    epochs: float | None,
    threads: int,
) -> Situation:
    """What `choose` wants to know, of this machine as it is now."""
    size = index.size[rows]
    size = size[(size > 0).all(1)]
    kept = form.kept(size)
    limit, used = host_memory()
    path = file_of(index, form)
    return Situation(
        kept_bytes=int(offsets_of(kept)[-1]),
        pictures=len(size),
        decode_s=decode_seconds(size, kept, form.factor),
        shrinks=bool((kept < size).any()),
        closest=closest,
        epochs=epochs,
        threads=threads,
        remote=source.address_of(index.root) is not None,
        memory_free=max(0, limit - used),
        disk_room=disk_room(path),
        network=network_of(path),
    )


def open_cache(
    kind: Kind, index: "Index", rows: NDArray[np.int64], form: Form, say: Callable[[str, str], None]
) -> PixelCache | None:
    """The cache that the setting names; one that keeps nothing, which is said, where it cannot be had.

    say is told "note" or "warning", and a sentence; the cache calls it from any thread.
    """
    if kind == "none":
        return None
    trouble = functools.partial(say, "warning")
    size = index.size[rows]
    wanted = int(offsets_of(form.kept(size[(size > 0).all(1)]))[-1])
    if kind == "memory":
        if not hasattr(os, "memfd_create"):
            raise ConfigError("--cache memory needs Linux.", choices=("none", "disk"))
        limit, used = host_memory()
        room = max(0, limit - used) // 2
        if room < wanted:
            say("note", f"decoded pictures: {_gb(room)}, half of the free memory, keep a part of {_gb(wanted)}")
        handle = os.memfd_create("stoker-pictures", os.MFD_CLOEXEC)
        return PixelCache(index, form, handle, most_bytes=room, on_trouble=trouble)
    path = file_of(index, form)
    try:
        handle = open_file(path)
    except OSError as error:
        say("warning", f"no decoded pictures are kept: {path}: {error.strerror}")
        return PixelCache(index, form, None)
    for removed in make_room(path, wanted):
        say("note", f"decoded pictures of another data set or size are removed to make room: {removed.name}")
    room = max(0, _limit(path.parent) - sum(_taken(other) for other in _others(path)))
    if room < wanted:
        say("note", f"decoded pictures: the {_gb(room)} of disk that they may take keep a part of {_gb(wanted)}")
    reserve = min(MOST_RESERVE, int(shutil.disk_usage(path.parent).total * RESERVE_SHARE))
    return PixelCache(index, form, handle, most_bytes=room, reserve_bytes=reserve, on_trouble=trouble)


def file_of(index: "Index", form: Form) -> Path:
    """The cache file of an index and a form."""
    return cache_folder() / "pictures" / f"{index.root.name[:40]}-{digest(index, form)}.pixels"


def open_file(path: Path) -> int:
    """Opens or makes a cache file, and says by a shared lock that it is in use. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH)
            os.utime(handle)  # when it was used last
            if os.fstat(handle).st_nlink:
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # another process removed it in between


def make_room(path: Path, wanted: int) -> list[Path]:
    """Removes cache files that nobody uses, those used longest ago first, until `path` may take `wanted` bytes."""
    others, removed = _others(path), []
    excess = wanted + sum(_taken(other) for other in others) - _limit(path.parent)
    for other in sorted(others, key=_last_used):
        if excess <= 0:
            break
        taken = _taken(other)
        if unused(other, remove=True):
            excess -= taken
            removed.append(other)
    return removed


def disk_room(path: Path) -> int:
    """Bytes that the cache file `path` may take, once all that nobody uses are removed."""
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    return max(0, _limit(folder) - sum(_taken(other) for other in _others(path) if not unused(other)))


def network_of(path: Path) -> str | None:
    """The kind of the file system on which a path is or would be, where that is another machine's or a program's."""
    mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    place = Path(os.path.realpath(path))
    kind = next((mounts[str(folder)] for folder in place.parents if str(folder) in mounts), "")
    return kind if kind.partition(".")[0] in NETWORK else None


def _limit(folder: Path) -> int:
    """Bytes that all cache files together may take of the disk of `folder`."""
    if text := os.environ.get(LIMIT):
        with contextlib.suppress(ValueError):
            if 0 <= (limit := float(text)) < 2**40:
                return int(limit * 2**30)
        raise ConfigError(f"{LIMIT}={text!r} is no number of GiB.", fix="a number from 0, or leave it unset")
    return (shutil.disk_usage(folder).free + sum(map(_taken, folder.glob("*.pixels")))) // 2


def _others(path: Path) -> list[Path]:
    return [file for file in path.parent.glob("*.pixels") if file != path]


def _taken(file: Path) -> int:
    try:
        return file.stat().st_blocks * 512
    except FileNotFoundError:  # another process removed it
        return 0


def _last_used(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def unused(file: Path, *, remove: bool = False) -> bool:
    """Whether no process has a cache file open, as far as its file system can tell; `remove`: and then removes it."""
    try:
        handle = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:  # another person's
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if remove:
            file.unlink(missing_ok=True)
    except OSError:  # in use, or there are no locks here
        return False
    finally:
        os.close(handle)
    return True


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"
