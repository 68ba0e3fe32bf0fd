"""Whether the host and the container give a training what it needs: cores, memory, files, disk.

Each rule is a function of `Host`, which names where the kernel's files are: tests give it trees of such files. What the
data path delivers is measured in `data_path.py`; the GPU is in `gpu.py`.
"""

import dataclasses
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from stoker.preflight.catalog import describe
from stoker.preflight.static.tables import THREAD_VARIABLES
from stoker_watch.diagnosis.causes.memory import FD_LIMIT_NEAR, HOST_MEMORY_NEAR_LIMIT, SHARED_MEMORY_SMALL
from stoker_watch.findings.finding import Finding
from stoker_watch.hardware.cgroup import Cgroup
from stoker_watch.recording.telemetry import machine
from stoker_watch.report import format as fmt

CORES_PER_GPU = 4
"""Where the loader's need is not known: as the smallest GPU machines of AWS (g4dn.xlarge) and GCP (g2-standard-4)."""
MIN_FREE_MEMORY_BYTES = 2 * 2**30
"""torch with CUDA takes 1 GiB and more of a process; the rest is for images (heuristic)."""
MIN_FILES = 1024
"""The usual limit of a Linux system; many workers and connections to a bucket need some hundred."""
CHECKPOINT_BYTES = 512 * 2**20
"""Assumed where the model is not known: weights, EMA weights and momentum of 40 million parameters."""
WEIGHT_COPIES, BYTES_PER_WEIGHT = 3, 4
"""In a checkpoint: weights, EMA weights and momentum, as fp32. AdamW and Muon have a second moment, too."""
CHECKPOINTS_KEPT = 4
"""On the disk at the same time: two checkpoints, the best weights, and the one that is being written."""
WRITE_BYTES = 64 * 2**20
MAX_SAVE_S = 30.0
"""A checkpoint is written in the background every two minutes: a quarter of that (heuristic)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """The machine, and what the training asks of it."""

    run_dir: Path | None = Path("runs")
    """None: in a bucket."""
    num_gpus: int = 0
    demand_cores: float | None = None
    """Cores that the loader needs for one GPU at full speed; None: not known."""
    demand_text: str = ""
    checkpoint_bytes: int | None = None
    env: Mapping[str, str] = dataclasses.field(default_factory=lambda: os.environ)
    root: Path = Path("/")
    cgroup: Cgroup = dataclasses.field(default_factory=Cgroup)
    affinity: int = dataclasses.field(
        default_factory=lambda: (
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        )
    )
    """Cores that the kernel lets this process use, without the quota."""
    max_files: int | None = None
    write_bytes: int = WRITE_BYTES
    """Bytes that are written to measure the disk; 0: it is not measured."""

    @property
    def cores(self) -> float:
        quota = self.cgroup.cpu_limit_cores()
        return float(self.affinity) if quota is None else min(float(self.affinity), quota)


def check_host(host: Host) -> list[Finding]:
    return [finding for rule in RULES for finding in rule(host)]


def cores(host: Host) -> Iterator[Finding]:
    """vCPUs per GPU against the loader's need."""
    evidence = f"{host.cores:g} cores by affinity and cgroup"
    if not host.num_gpus:
        yield describe("cpu_cores", cores=host.cores, per_gpu="", evidence=evidence)
        return
    per_gpu = host.cores / host.num_gpus
    need, reason = host.demand_cores, host.demand_text
    if need is None:
        need, reason = CORES_PER_GPU, "the smallest GPU machines of the clouds have 4 vCPUs per GPU"
    evidence += f"; {reason}"
    if per_gpu >= need:
        yield describe("cpu_cores", cores=float(f"{per_gpu:.3g}"), per_gpu=" per GPU", evidence=evidence)
    else:
        yield describe("cpu_cores/few", cores=per_gpu, need=need, evidence=evidence)


def cpu_quota(host: Host) -> Iterator[Finding]:
    quota, visible = host.cgroup.cpu_limit_cores(), host.affinity
    if quota is None or quota >= visible:
        return
    evidence = f"the cgroup's quota is {quota:g} cores, the affinity {visible}"
    if throttled := host.cgroup.throttled_s():
        evidence += f"; threads were throttled for {fmt.duration(throttled)} so far"
    chosen = [int(host.env[name]) for name in THREAD_VARIABLES if host.env.get(name, "").isdecimal()]
    if any(number <= max(1, quota) for number in chosen):
        yield describe("cpu_quota/ok", quota=quota, evidence=evidence)
    else:
        threads = max(1, int(quota))
        yield describe("cpu_quota", "OMP_NUM_THREADS", quota=quota, visible=visible, threads=threads, evidence=evidence)


def threads(host: Host) -> Iterator[Finding]:
    """Variables that ask for more threads than there are cores."""
    for name in THREAD_VARIABLES:
        value = host.env.get(name, "").split(",")[0].strip()
        if value.isdecimal() and int(value) > max(1.0, host.cores):
            threads = max(1, int(host.cores))
            yield describe("threads", name, name=name, value=value, cores=host.cores, threads=threads)
            return
    yield describe("threads/ok", names=", ".join(THREAD_VARIABLES))


def memory(host: Host) -> Iterator[Finding]:
    """Free memory, of the machine or of the container."""
    meminfo = machine.read_meminfo(host.root / "proc")
    state = host.cgroup.memory_state()
    if state is not None and (not meminfo or state.limit < meminfo["MemTotal"]):
        limit, used, whose = state.limit, state.used, "cgroup"
    elif meminfo:
        limit, whose = meminfo["MemTotal"], "machine"
        used = limit - meminfo.get("MemAvailable", meminfo.get("MemFree", 0))
    else:
        yield describe("memory/unknown")
        return
    free = limit - used
    id = "memory"
    if free < MIN_FREE_MEMORY_BYTES / 4:
        id = "memory/none"
    elif free < MIN_FREE_MEMORY_BYTES or used / limit >= (HOST_MEMORY_NEAR_LIMIT.warning_threshold or 1.0):
        id = "memory/low"
    evidence = f"{fmt.memory(used, limit)} of the {whose} are in use, without page cache"
    yield describe(id, free=fmt.size(free), evidence=evidence, whose=whose)
    if not meminfo:
        return
    swap = meminfo.get("SwapTotal", 0) - meminfo.get("SwapFree", 0)
    is_swapping = swap >= HOST_MEMORY_NEAR_LIMIT.threshold("swap_bytes")
    yield describe("swap" if is_swapping else "swap/ok", swap=fmt.size(swap))


def shared_memory(host: Host) -> Iterator[Finding]:
    usage = machine.disk_usage(f"{host.root}/dev/shm")
    if usage is None:
        return
    used, total = usage
    if total <= SHARED_MEMORY_SMALL.threshold("docker_bytes"):
        yield describe("shm/small", "/dev/shm", total=fmt.size(total), fix=SHARED_MEMORY_SMALL.fix)
    elif used / total >= (SHARED_MEMORY_SMALL.warning_threshold or 1.0):
        fraction = fmt.percentage(used / total)
        yield describe("shm/full", "/dev/shm", fraction=fraction, used=fmt.size(used), total=fmt.size(total))
    else:
        yield describe("shm", total=fmt.size(total))


def file_handles(host: Host) -> Iterator[Finding]:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if host.max_files is None else host.max_files
    if soft != resource.RLIM_INFINITY and soft < MIN_FILES:
        yield describe("file_handles", limit=soft, fix=FD_LIMIT_NEAR.command or "")
    else:
        yield describe("file_handles/ok", limit="any number of" if soft == resource.RLIM_INFINITY else f"{soft:,}")


def disk(host: Host) -> Iterator[Finding]:
    """Room and write speed for checkpoints where the run will be."""
    wanted = (host.run_dir or Path()).expanduser().absolute()
    folder = next(path for path in (wanted, *wanted.parents) if path.exists())
    if host.run_dir is None or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return  # in a bucket, or `access.py` reports it
    place, size = str(wanted), host.checkpoint_bytes or CHECKPOINT_BYTES
    if machine.disk_usage(str(folder)) == (0, 0):
        return  # of the kernel, as /proc: `access.py` reports it
    free, need = machine.free_bytes(folder), CHECKPOINTS_KEPT * size
    texts = {"free": fmt.size(free), "size": fmt.size(size), "kept": CHECKPOINTS_KEPT}
    if free is not None and free < need:
        level = "blocker" if host.checkpoint_bytes is not None and free < size else "warning"
        yield describe("disk/full", place, severity=level, need=fmt.size(need), **texts)
    elif host.write_bytes:
        try:
            speed = measure_write_speed(folder, host.write_bytes)
        except OSError as error:
            yield describe("disk/unwritable", place, reason=error.strerror or error)
            return
        id = "disk/slow" if size / speed > MAX_SAVE_S else "disk"
        yield describe(id, place, duration=fmt.duration(size / speed), speed=f"{fmt.size(speed)}/s", **texts)


def estimate_checkpoint_bytes(num_weights: int, optimizer: str) -> int:
    """Size of a checkpoint of a model with so many weights."""
    return (WEIGHT_COPIES + (optimizer != "sgd")) * BYTES_PER_WEIGHT * num_weights


def measure_write_speed(folder: Path, size_bytes: int) -> float:
    """Bytes per second, to a file that is deleted again; the kernel has put them on the disk. Raises OSError."""
    block = os.urandom(min(size_bytes, 2**20))
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        start_s = time.perf_counter()
        for _ in range(max(1, size_bytes // len(block))):
            file.write(block)
        os.fsync(file.fileno())
        return max(size_bytes, len(block)) / (time.perf_counter() - start_s)


RULES: tuple[Callable[[Host], Iterator[Finding]], ...] = (
    cores, cpu_quota, threads, memory, shared_memory, file_handles, disk,
)  # fmt: skip
