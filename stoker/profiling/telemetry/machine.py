"""The machine around a run, as the kernel counts it: cores, pressure, memory, disks, network, /dev/shm.

Functions over files, without a memory of what they said before: `host` makes rates of them. Whatever this kernel does
not say is None. The processes of the run: `processes`; limits of the container: `stoker.hardware.cgroup`.
"""

import os
import re
from pathlib import Path
from typing import Any

import psutil

from stoker.profiling.telemetry.procfs import parse_number, read_or_none

SECTOR_BYTES = 512
"""Of /proc/diskstats, whatever the disk's own are (kernel documentation: admin-guide/iostats)."""

_VIRTUAL_DEVICES = re.compile(r"loop|ram|zram|dm-|md|sr|fd|nvme\d+c\d+n\d+$")
"""Block devices that lie on others, whose bytes would count twice, or that are no storage."""


def core_ticks(proc: Path) -> list[tuple[float, float]]:
    """(busy, all) time of each core since boot; the unit is of no matter. Time of guests is in `user` already."""
    text = read_or_none(f"{proc}/stat")
    if text is None:
        return [_psutil_ticks(times) for times in psutil.cpu_times(percpu=True)]
    cores: list[tuple[float, float]] = []
    for line in text.splitlines()[1:]:
        if not line.startswith(b"cpu"):
            break
        ticks = [float(field) for field in line.split()[1:9]]  # user nice system idle iowait irq softirq steal
        total = sum(ticks)
        cores.append((total - ticks[3] - ticks[4], total))
    return cores


def _psutil_ticks(times: Any) -> tuple[float, float]:
    fields = times._asdict()
    total = sum(fields.values())
    return total - fields["idle"], total


def pressure_s(path: Path) -> float | None:
    """Seconds since boot in which some task waited, of a pressure file (kernel documentation: accounting/psi)."""
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
    """(read, written) bytes since boot of all disks; partitions are of their disk, and what lies on other disks
    (device mapper, RAID, loop) is theirs."""
    text = read_or_none(f"{proc}/diskstats")
    try:
        disks = {name for name in os.listdir(blocks) if not _VIRTUAL_DEVICES.match(name)}
    except OSError:  # no sysfs: a partition cannot be told from a disk
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
    """(received, sent) bytes since boot, as the process whose folder of /proc is given sees the network. Real
    interfaces where there are any, since bridges and their ends carry the same bytes; else all but loopback. What goes
    past the kernel (RDMA) is not in it."""
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
    """(used, all) bytes of a file system; None where it is absent. May hang with a storage that went away."""
    try:
        stats = os.statvfs(path)
    except OSError:
        return None
    return (stats.f_blocks - stats.f_bfree) * stats.f_frsize, stats.f_blocks * stats.f_frsize


def free_bytes(path: Path) -> int | None:
    """That an ordinary user may still write there. May hang as above."""
    try:
        stats = os.statvfs(path)
    except OSError:
        return None
    return stats.f_bavail * stats.f_frsize
