"""CPU and memory limits of a process: those of its cgroup, version 1 or 2, and those of the machine.

Containers, Slurm steps, Kubernetes pods and systemd units set limits on the cgroup of the process or on a parent of it;
the lowest limit counts. A value that is not set or cannot be read is None. No torch: external jobs are watched too. How
long threads spin, which follows from the cores, is at the end.
"""

import dataclasses
import math
import os
import time
from pathlib import Path

CORES_VARIABLE = "STOKER_CORES"
"""How many of the cores a process may use. Each rank of a machine gets its part."""
LONG_SPIN, SHORT_SPIN = 100_000, 2_000
"""Iterations for which OpenMP's threads spin at a barrier before they sleep: about 5 and 0.1 ms on an Intel Xeon."""
SPIN_VARIABLE = "GOMP_SPINCOUNT"
NUM_SAMPLES, INTERVAL_S = 10, 0.001
_NO_LIMIT = 2**60
"""Version 1 has a number near 2^63 where there is no limit."""
_set_here = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class CgroupMemory:
    """Memory of the cgroup with the lowest limit, in bytes."""

    limit: int
    used: int
    """What the kernel cannot take back: all but cached files, which are not those of memory file systems."""
    swap: int | None


@dataclasses.dataclass(frozen=True)
class Cgroup:
    """The cgroup of a process and its parents, as they are at the first call of a method. root: mount point of the
    cgroup file system; membership_file: the kernel's file with the cgroup of the process."""

    root: Path = Path("/sys/fs/cgroup")
    membership_file: Path = Path("/proc/self/cgroup")
    _folder_cache: dict[str, list[Path]] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def for_pid(cls, pid: int) -> "Cgroup":
        return cls(membership_file=Path(f"/proc/{pid}/cgroup"))

    def cpu_limit_cores(self) -> float | None:
        """The CPU quota as a number of cores."""
        quotas = [quota for folder in self._folders("cpu") if (quota := _read_quota_cores(folder)) is not None]
        return min(quotas, default=None)

    def memory_state(self) -> CgroupMemory | None:
        limits = [memory for folder in self._folders("memory") if (memory := _read_memory(folder)) is not None]
        return min(limits, key=lambda memory: (memory.limit, memory.used), default=None)

    def throttled_s(self) -> float | None:
        """CPU-seconds, since the cgroup was made, in which the CPU quota throttled runnable tasks."""
        totals = [total for folder in self._folders("cpu") if (total := _read_throttled_s(folder)) is not None]
        return max(totals, default=None)

    def oom_kills(self) -> int | None:
        """Processes of the cgroup that the kernel killed when out of memory, since the cgroup was made."""
        for folder in self._folders("memory"):
            for name in ("memory.events", "memory.oom_control"):  # version 2, version 1
                if (kills := _read_stat(folder / name).get("oom_kill")) is not None:
                    return kills
        return None

    def _folders(self, controller: str) -> list[Path]:
        """The visible cgroups of `controller` that contain this process, the innermost first. A container often sees
        its own cgroup as the root, while the kernel still gives the path on the host."""
        if controller not in self._folder_cache:
            if (self.root / "cgroup.controllers").exists():
                mount, relative = self.root, self._relative_path("")
            else:
                mount, relative = self.root / controller, self._relative_path(controller)
            folders = [mount / relative, *(mount / relative).parents]
            visible = [folder for folder in folders[: folders.index(mount) + 1] if folder.exists()]
            self._folder_cache[controller] = visible
        return self._folder_cache[controller]

    def _relative_path(self, controller: str) -> str:
        """Path of the process below the mount; an empty `controller` means version 2."""
        if not self.membership_file.exists():
            return ""
        for line in self.membership_file.read_text().splitlines():
            _, names, path = line.split(":", 2)
            if controller in names.split(","):
                return path.strip("/")
        return ""


def host_cores() -> int:
    """Cores that this process may use, by CPU affinity and the cgroup's quota, rounded up; at most CORES_VARIABLE."""
    cores = max(1, math.ceil(usable_cores(0, Cgroup())))
    limit = os.environ.get(CORES_VARIABLE, "")
    return min(cores, max(1, int(limit))) if limit.isdecimal() else cores


def usable_cores(pid: int, cgroup: Cgroup) -> float:
    """Cores that a process may use: the lower of its CPU affinity and its cgroup's quota. pid 0 is this process.
    Raises ProcessLookupError when the process has ended."""
    cores = len(os.sched_getaffinity(pid)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup.cpu_limit_cores()
    return float(cores) if quota is None else min(float(cores), quota)


def host_memory() -> tuple[int, int]:
    """(limit, used) bytes of host memory, of the machine or the cgroup, whichever is lower. Page cache is free."""
    lowest = min(_memory_limits(), key=lambda limit: limit.limit_bytes)
    return lowest.limit_bytes, lowest.used_bytes


@dataclasses.dataclass(frozen=True)
class HostLimit:
    """A limit of host memory. used_bytes: what the kernel cannot take back."""

    name: str
    limit_bytes: int
    used_bytes: int


def nearest_memory_limit() -> HostLimit:
    """The limit of this process with the fewest bytes left: machine, cgroup, or `ulimit -v`."""
    limits = filter(None, [*_memory_limits(), _virtual_memory_limit()])
    return min(limits, key=lambda limit: limit.limit_bytes - limit.used_bytes)


def _memory_limits() -> list[HostLimit]:
    """Those of the machine and, where it has one, of the cgroup."""
    import psutil  # not at the top: `import stoker` needs this module, and is light

    machine, cgroup = psutil.virtual_memory(), Cgroup().memory_state()
    limits = [HostLimit("the machine", machine.total, machine.total - machine.available)]
    return limits if cgroup is None else [*limits, HostLimit("the cgroup", cgroup.limit, cgroup.used)]


def _virtual_memory_limit() -> HostLimit | None:
    """The limit of the address space (RLIMIT_AS), if there is one."""
    import psutil

    if not hasattr(psutil, "RLIMIT_AS"):  # not Linux
        return None
    process = psutil.Process()
    limit, _ = process.rlimit(psutil.RLIMIT_AS)
    return None if limit == psutil.RLIM_INFINITY else HostLimit("ulimit -v", limit, process.memory_info().vms)


def _read_text(path: Path) -> str | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # costs a third of read_text; a telemetry sample reads a dozen
    except OSError:  # absent or hidden
        return None
    try:
        return os.read(fd, 65536).decode().strip()
    except OSError:  # the cgroup was removed
        return None
    finally:
        os.close(fd)


def _read_int(path: Path) -> int | None:
    text = _read_text(path)
    return None if text is None or text == "max" else int(text)


def _read_stat(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in (_read_text(path) or "").splitlines())
    return {name: int(value) for name, value in pairs}


def _read_quota_cores(folder: Path) -> float | None:
    cpu_max = (_read_text(folder / "cpu.max") or "").split()
    if len(cpu_max) == 2:
        return None if cpu_max[0] == "max" else int(cpu_max[0]) / int(cpu_max[1])
    quota_us, period_us = _read_int(folder / "cpu.cfs_quota_us"), _read_int(folder / "cpu.cfs_period_us")
    return None if quota_us is None or quota_us <= 0 or not period_us else quota_us / period_us


def _read_memory(folder: Path) -> CgroupMemory | None:
    for version, limit_name, used_name in (
        (2, "memory.max", "memory.current"),
        (1, "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, used = _read_int(folder / limit_name), _read_int(folder / used_name)
        if limit is not None and limit < _NO_LIMIT and used is not None:
            stat, prefix = _read_stat(folder / "memory.stat"), "" if version == 2 else "total_"
            file_bytes = stat.get("file" if version == 2 else "total_cache", 0)
            page_cache = max(0, file_bytes - stat.get(prefix + "shmem", 0))
            return CgroupMemory(
                limit=limit,
                used=max(0, used - page_cache),
                swap=_read_int(folder / "memory.swap.current") if version == 2 else stat.get("total_swap"),
            )
    return None


def _read_throttled_s(folder: Path) -> float | None:
    stat = _read_stat(folder / "cpu.stat")
    if "throttled_usec" in stat:
        return stat["throttled_usec"] / 1e6
    return stat["throttled_time"] / 1e9 if "throttled_time" in stat else None


def set_spin_count() -> None:
    """Sets GOMP_SPINCOUNT for this process and those that it starts, unless the user has set it."""
    global _set_here
    if SPIN_VARIABLE not in os.environ:
        os.environ[SPIN_VARIABLE] = str(choose_spin_count())
        _set_here = True


def users_environment() -> dict[str, str]:
    """The environment as the user set it, for jobs of others."""
    return {name: value for name, value in os.environ.items() if not (_set_here and name == SPIN_VARIABLE)}


def choose_spin_count(loadavg: Path = Path("/proc/loadavg"), *, cores: float | None = None) -> int:
    """A value for GOMP_SPINCOUNT, by the number of tasks that run on this machine now, during 10 ms. `cores`: those
    that this process may use; OpenMP has a thread for each of the affinity mask and knows no quota.

    torch's own work on a CPU waits at thousands of barriers a second. Next to a busy process, a training whose threads
    spin is several times slower; a thread that sleeps has to be woken, which in a virtual machine takes long. So they
    spin long on a machine that is otherwise idle, and briefly elsewhere (LOG.md, "Spinning, again").
    """
    usable = usable_cores(0, Cgroup()) if cores is None else cores
    if not hasattr(os, "sched_getaffinity") or usable < len(os.sched_getaffinity(0)):
        return SHORT_SPIN
    others = []
    for _ in range(NUM_SAMPLES):
        try:
            running = loadavg.read_text().split()[3].partition("/")[0]
            others.append(int(running) - 1)  # this task is one of them
        except (OSError, IndexError, ValueError):
            return SHORT_SPIN
        time.sleep(INTERVAL_S)
    return SHORT_SPIN if sorted(others)[NUM_SAMPLES // 2] > 0 else LONG_SPIN
