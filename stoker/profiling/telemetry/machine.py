"""Counters of the machine: CPU cores, pressure (PSI), memory, disks, network, /dev/shm.

Stateless functions over files of the kernel; `host` turns their values into rates. A value that this kernel does not
provide is None. Files are read in a third of pathlib's time, because a sample reads hundreds of them. The processes of
the run: `processes`; limits of the container: `stoker/hardware/cgroup.py`.
"""

import os
import re
from pathlib import Path

import psutil

SECTOR_BYTES = 512
"""Unit of /proc/diskstats, for all disks (kernel documentation: admin-guide/iostats)."""

_VIRTUAL_DEVICES = re.compile(r"loop|ram|zram|dm-|md|sr|fd|nvme\d+c\d+n\d+$")
"""Block devices on top of others, whose bytes would count twice, or that are not storage."""


_CHUNK_BYTES = 2048
"""A shorter first chunk is the whole file: the kernel fills a page with whole records of a list, and no record is half
a page long (fs/seq_file.c)."""


def read(path: str) -> bytes:
    """The whole file. Raises OSError.

    The kernel returns most files a page at a time, whatever the size of the buffer: a longer list comes in chunks.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.read(fd, 65536)
        more = len(data) >= _CHUNK_BYTES
        while more:
            chunk = os.read(fd, 65536)
            data += chunk
            more = bool(chunk)
        return data
    finally:
        os.close(fd)


def read_or_none(path: str) -> bytes | None:
    """None if the file does not exist or cannot be read."""
    try:
        return read(path)
    except OSError:
        return None


def read_text_or_none(path: str) -> str | None:
    """The text without surrounding whitespace; None if it is empty or cannot be read."""
    data = read_or_none(path)
    return None if data is None else data.decode(errors="replace").strip() or None


def parse_number(text: bytes, key: bytes) -> int:
    """The number after `key`; 0 if the key is absent."""
    _, _, rest = text.partition(key)
    fields = rest.split(maxsplit=1)
    return int(fields[0]) if fields else 0


def core_times() -> list[tuple[float, float]]:
    """(busy, total) seconds of each core since boot. `user` includes the time of guests, so only the first eight
    fields are added: user nice system idle iowait irq softirq steal (macOS: the first four)."""
    times = psutil.cpu_times(percpu=True)
    totals = [sum(core[:8]) for core in times]
    return [
        (total - core.idle - getattr(core, "iowait", 0.0), total) for core, total in zip(times, totals, strict=True)
    ]


def pressure_s(path: Path) -> float | None:
    """Seconds since boot in which some task waited, from a pressure file (kernel documentation: accounting/psi)."""
    text = read_or_none(str(path))  # absent, or pressure accounting is off (EOPNOTSUPP)
    if text is None:
        return None
    some_line = next((line for line in text.splitlines() if line.startswith(b"some")), b"")
    return parse_number(some_line, b"total=") / 1e6 if b"total=" in some_line else None


def read_meminfo(proc: Path) -> dict[str, int]:
    """Bytes by the names of /proc/meminfo; empty without it."""
    sizes: dict[str, int] = {}
    for line in (read_or_none(f"{proc}/meminfo") or b"").splitlines():
        name, _, rest = line.partition(b":")
        fields = rest.split()
        if fields:
            sizes[name.decode()] = int(fields[0]) * (1024 if len(fields) > 1 else 1)
    return sizes


def disk_bytes(proc: Path, blocks: Path = Path("/sys/block")) -> tuple[int, int] | None:
    """(read, written) bytes since boot of all disks. Partitions and devices on top of disks (device mapper, RAID, loop)
    do not count."""
    text = read_or_none(f"{proc}/diskstats")
    try:
        disks = {name for name in os.listdir(blocks) if not _VIRTUAL_DEVICES.match(name)}
    except OSError:  # no sysfs: partitions cannot be distinguished from disks
        return None
    if text is None:
        return None
    read_sectors = written_sectors = 0
    for line in text.splitlines():
        fields = line.split()
        if len(fields) >= 10 and fields[2].decode() in disks:
            read_sectors, written_sectors = read_sectors + int(fields[5]), written_sectors + int(fields[9])
    return read_sectors * SECTOR_BYTES, written_sectors * SECTOR_BYTES


def network_bytes(proc_dir: str, interfaces: Path = Path("/sys/class/net")) -> tuple[int, int] | None:
    """(received, sent) bytes since boot in the network namespace of a process. proc_dir: its folder in /proc. Physical
    interfaces if there are any, because bridges and veth pairs carry the same bytes; else all but loopback. Traffic
    that bypasses the kernel (RDMA) is not included."""
    text = read_or_none(f"{proc_dir}/net/dev")
    if text is None:
        return None
    by_interface: dict[str, tuple[int, int]] = {}
    for line in text.splitlines()[2:]:
        name, _, rest = line.decode().partition(":")
        fields = rest.split()
        if name.strip() != "lo" and len(fields) >= 9:
            by_interface[name.strip()] = int(fields[0]), int(fields[8])
    physical = [counts for name, counts in by_interface.items() if os.path.exists(f"{interfaces}/{name}/device")]
    selected = physical or list(by_interface.values())
    return sum(received for received, _ in selected), sum(sent for _, sent in selected)


def disk_usage(path: str) -> tuple[int, int] | None:
    """(used, total) bytes of a file system; None if it does not exist. May hang on a storage that is gone."""
    try:
        stats = os.statvfs(path)
    except OSError:
        return None
    return (stats.f_blocks - stats.f_bfree) * stats.f_frsize, stats.f_blocks * stats.f_frsize


def free_bytes(path: Path) -> int | None:
    """Free bytes for ordinary users. May hang as `disk_usage`."""
    try:
        stats = os.statvfs(path)
    except OSError:
        return None
    return stats.f_bavail * stats.f_frsize
