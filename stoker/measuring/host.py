"""What the machine says about itself: processors, memory, pressure, and what the cgroup holds back.

Read from /proc, the cgroup file system and psutil, as differences since the reading before. What a machine does not say
(macOS has no /proc, old kernels no pressure) is None. No torch, and cheap: about a millisecond on a machine with many
threads, so it runs beside training once a second (`witness`).
"""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from stoker.cgroup import Cgroup, host_memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostSample:
    """The host's part of a `schemas.DeviceSample`, by the same names. Shares are of the time since the last sample."""

    cpu: list[float]
    process_cpu: float | None
    rss_bytes: int | None
    memory_used_bytes: int | None
    memory_limit_bytes: int | None
    psi_cpu: float | None
    psi_memory: float | None
    psi_io: float | None
    throttled_s: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Counters:
    """Everything that only grows, at one moment: seconds, except `cores`: (busy, all) ticks of each core."""

    at_s: float
    cores: list[tuple[float, float]]
    process_s: float | None
    psi_s: dict[str, float | None]
    throttled_s: float | None


class Host:
    """Reads the host. The first sample covers the time since this was made.

    pid: whose processor time and memory: of this process, or of another one and all below it; proc: where the kernel's
    process files are; now: a monotonic clock in seconds.
    """

    def __init__(
        self,
        *,
        pid: int | None = None,
        proc: Path = Path("/proc"),
        cgroup: Cgroup | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pid = pid
        self._proc = proc
        self._cgroup = cgroup or Cgroup()
        self._now = now
        self._before = self._counters()

    def sample(self) -> HostSample:
        before, after = self._before, self._counters()
        self._before = after
        took_s = after.at_s - before.at_s
        pressure = {what: _share(before.psi_s[what], after.psi_s[what], took_s) for what in after.psi_s}
        limit_bytes, used_bytes = host_memory()
        return HostSample(
            cpu=_busy(before.cores, after.cores),
            process_cpu=_rate(before.process_s, after.process_s, took_s),
            rss_bytes=tree_rss(self._pid or os.getpid(), self._proc),
            memory_used_bytes=used_bytes,
            memory_limit_bytes=limit_bytes,
            psi_cpu=pressure["cpu"],
            psi_memory=pressure["memory"],
            psi_io=pressure["io"],
            throttled_s=_grown(before.throttled_s, after.throttled_s),
        )

    def _counters(self) -> _Counters:
        return _Counters(
            at_s=self._now(),
            cores=[_ticks(times) for times in psutil.cpu_times(percpu=True)],
            process_s=time.process_time() if self._pid is None else tree_cpu_s(self._pid, self._proc),
            psi_s={what: pressure_s(self._proc / "pressure" / what) for what in ("cpu", "memory", "io")},
            throttled_s=self._cgroup.throttled_s(),
        )


def pressure_s(path: Path) -> float | None:
    """Seconds since boot in which some task waited, of a pressure file (kernel documentation: accounting/psi)."""
    try:
        lines = path.read_text().splitlines()
    except OSError:  # no such file, or pressure accounting is off (EOPNOTSUPP)
        return None
    for line in lines:
        kind, *pairs = line.split()
        if kind == "some":
            return int(dict(pair.split("=") for pair in pairs)["total"]) / 1e6
    return None


def tree_rss(pid: int, proc: Path = Path("/proc")) -> int | None:
    """Bytes of resident memory of a process and all below it; what they share counts for each.

    The children come from the kernel's own list: walking all processes takes tens of ms on a big machine.
    """
    if not (proc / str(pid) / "task" / str(pid) / "children").exists():
        return _tree_rss_by_psutil(pid)
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    total = 0
    for member in _tree(pid, proc):
        with contextlib.suppress(OSError):  # it ended meanwhile
            total += int(_read(f"{proc}/{member}/statm").split()[1]) * page_bytes
    return total


def tree_cpu_s(pid: int, proc: Path = Path("/proc")) -> float | None:
    """Processor seconds of a process, of all below it, and of those of them that ended; None where it is gone."""
    ticks, found = 0, False
    for member in _tree(pid, proc):
        with contextlib.suppress(OSError):  # it ended meanwhile
            behind_name = _read(f"{proc}/{member}/stat").rpartition(b")")[2].split()  # a name may hold blanks
            ticks += sum(map(int, behind_name[11:15]))  # utime, stime, cutime, cstime: proc(5), fields 14 to 17
            found = True
    return ticks / os.sysconf("SC_CLK_TCK") if found else None


def _tree(pid: int, proc: Path) -> list[int]:
    """A process and all below it."""
    tree = [pid]
    for member in tree:  # grows while it is walked
        with contextlib.suppress(OSError):  # it ended meanwhile
            for thread in os.listdir(f"{proc}/{member}/task"):
                with contextlib.suppress(OSError):  # the thread ended
                    tree += map(int, _read(f"{proc}/{member}/task/{thread}/children").split())
    return tree


def _read(path: str) -> bytes:
    """A small file of /proc, in a third of pathlib's time: there is one for each thread."""
    handle = os.open(path, os.O_RDONLY)
    try:
        return os.read(handle, 65536)
    finally:
        os.close(handle)


def _tree_rss_by_psutil(pid: int) -> int | None:
    total = None
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        total = process.memory_info().rss
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it ended meanwhile
                total += child.memory_info().rss
    return total


def _ticks(times: Any) -> tuple[float, float]:
    """(busy, all) of a core, from psutil's named tuple. Linux counts time of guests in `user` too."""
    fields = times._asdict()
    everything = sum(fields.values()) - fields.get("guest", 0.0) - fields.get("guest_nice", 0.0)
    return everything - fields["idle"] - fields.get("iowait", 0.0), everything


def _busy(before: list[tuple[float, float]], after: list[tuple[float, float]]) -> list[float]:
    """Busy share of each core; empty when no time passed or a core came or went."""
    pairs = list(zip(before, after, strict=False))
    if len(before) != len(after) or any(new[1] <= old[1] for old, new in pairs):
        return []
    return [min(1.0, max(0.0, (new[0] - old[0]) / (new[1] - old[1]))) for old, new in pairs]


def _grown(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else max(0.0, after - before)


def _rate(before: float | None, after: float | None, took_s: float) -> float | None:
    grown = _grown(before, after)
    return None if grown is None or took_s <= 0 else grown / took_s


def _share(before: float | None, after: float | None, took_s: float) -> float | None:
    rate = _rate(before, after, took_s)
    return None if rate is None else min(1.0, rate)


def process_started_s() -> float:
    """The moment of `time.perf_counter` at which this process began; not after now, whatever the clocks say."""
    age_s = time.time() - psutil.Process().create_time()
    return time.perf_counter() - max(0.0, age_s)
