"""Faults that `diagnose.py` puts around a job: quotas, full disks, slow links, slow storage, a driver's counters.

Each is a context manager during which the fault exists. It yields a prefix of the job's command and its environment, or
raises NotPermitted if this machine does not permit the fault: such a cell is "n/a". Faults in a job's own code are in
`diagnose_inside.py`.
"""

import contextlib
import ctypes
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
CGROUPS = Path("/sys/fs/cgroup")
_PR_SET_PDEATHSIG = 1
"""linux/prctl.h."""
INTO_GROUP = 'echo $$ > "$0" && exec "$@"'


class NotPermitted(Exception):
    """This machine does not permit the fault; the text is the reason."""


@dataclass
class Around:
    """before: prefix of the command. variables: of its environment. injected_s: the injected total, afterwards."""

    before: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    injected_s: Callable[[], float] | None = None
    facts: Callable[[], dict[str, float]] | None = None
    """The fault's own counters, afterwards."""


@contextlib.contextmanager
def nothing() -> Iterator[Around]:
    yield Around()


@contextlib.contextmanager
def _cgroup(controller: str, limits: dict[str, str]) -> Iterator[Path]:
    """A cgroup of version 1; its processes are moved out at the end."""
    if not (CGROUPS / controller / "tasks").exists():
        raise NotPermitted(f"no cgroup of version 1 for {controller}")
    group = CGROUPS / controller / f"stoker-diagnose-{os.getpid()}-{random.randrange(10**9)}"
    try:
        group.mkdir()
        for name, value in limits.items():
            (group / name).write_text(value)
    except OSError as error:
        raise NotPermitted(f"{controller}: {error.strerror}") from error
    try:
        yield group
    finally:
        for pid in (group / "tasks").read_text().split():
            with contextlib.suppress(OSError):  # it ended
                (CGROUPS / controller / "tasks").write_text(pid)
        with contextlib.suppress(OSError):  # a zombie holds it: the kernel frees it later
            group.rmdir()


@contextlib.contextmanager
def cpu_quota(cores: float) -> Iterator[Around]:
    """cores: processors' worth of time."""
    limits = {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": str(int(cores * 100_000))}
    with _cgroup("cpu", limits) as group:

        def facts() -> dict[str, float]:
            words = (group / "cpu.stat").read_text().split()
            stat = dict(zip(words[::2], map(int, words[1::2]), strict=True))
            return {"throttled_s": stat["throttled_time"] / 1e9, "throttled_periods": float(stat["nr_throttled"])}

        yield Around(["sh", "-c", INTO_GROUP, str(group / "tasks")], facts=facts)


@contextlib.contextmanager
def memory_limit(size_bytes: int) -> Iterator[Around]:
    with _cgroup("memory", {"memory.limit_in_bytes": str(size_bytes)}) as group:

        def facts() -> dict[str, float]:
            words = (group / "memory.oom_control").read_text().split()
            return {"oom_kill": float(words[words.index("oom_kill") + 1])}

        yield Around(["sh", "-c", INTO_GROUP, str(group / "tasks")], facts=facts)


@contextlib.contextmanager
def small_disk(place: Path, size_bytes: int) -> Iterator[Around]:
    """A file system of that size at `place`."""
    place.mkdir(parents=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(place)], capture_output=True
    )
    if done.returncode:
        raise NotPermitted(f"mount: {done.stderr.decode().strip()}")
    try:
        yield Around()
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=False)


@contextlib.contextmanager
def filling_disk(place: Path, size_bytes: int, left_bytes: int) -> Iterator[Around]:
    """A file system at `place`, the folder of a run. Once the run trains, a file of another program takes its room but
    for `left_bytes`."""
    has_ended = threading.Event()

    def fill() -> None:
        while not has_ended.wait(0.1):
            if (place / "steps.jsonl").exists():
                free = os.statvfs(place)
                with (place / "of-others").open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_bsize - left_bytes)
                return

    with small_disk(place, size_bytes) as around:
        thread = threading.Thread(target=fill)
        thread.start()
        try:
            yield around
        finally:
            has_ended.set()
            thread.join()


@contextlib.contextmanager
def small_shm(size_bytes: int) -> Iterator[Around]:
    """/dev/shm of that size, for the job only."""
    script = f'mount -t tmpfs -o size={size_bytes} tmpfs /dev/shm && exec "$@"'
    before = ["unshare", "--mount", "sh", "-c", script, "sh"]
    _try([*before, "true"])
    yield Around(before)


@contextlib.contextmanager
def slow_link(bytes_per_s: float) -> Iterator[Around]:
    """A network namespace for the job, with a limited loopback."""
    kbit = int(bytes_per_s * 8 / 1000)
    script = f'ip link set lo up && tc qdisc add dev lo root tbf rate {kbit}kbit burst 128kb latency 2s && exec "$@"'
    before = ["unshare", "--net", "sh", "-c", script, "sh"]
    _try([*before, "true"])
    yield Around(before)


def _try(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise NotPermitted(f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        raise NotPermitted(f"{command[0]}: {done.stderr.strip() or done.returncode}")


def _compiled(source: Path, target: Path, *flags: str) -> Path:
    if not target.exists():
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise NotPermitted("no C compiler")
        new = target.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", new, source, *flags], check=True)
        new.replace(target)
    return target


@contextlib.contextmanager
def slow_files(folder: Path, path: str, stall_s: float = 0.0) -> Iterator[Around]:
    """Reads and writes of files with `path` in theirs take stall_s longer each, until the job says another number."""
    library = _compiled(HERE / "diagnose_stall.c", folder.parent / "stall.so", "-ldl")
    log = folder / "stalled"
    variables = {"LD_PRELOAD": str(library), "STALL_PATH": path, "STALL_LOG": str(log)}
    variables["STALL_NS"] = str(int(stall_s * 1e9))

    def injected_s() -> float:
        return int.from_bytes(log.read_bytes(), sys.byteorder) / 1e9

    yield Around(variables=variables, injected_s=injected_s)


@contextlib.contextmanager
def busy_neighbors(count: int, program: str = "while True: pass") -> Iterator[Around]:
    """Processes of another user that run a Python program without end; each in a session of its own, since the kernel
    divides CPU time by session first (sched_autogroup). They end with the benchmark, also if it is killed."""
    program = f"import ctypes; ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {signal.SIGKILL})\n{program}"
    others = [subprocess.Popen([sys.executable, "-c", program], start_new_session=True) for _ in range(count)]
    try:
        yield Around()
    finally:
        for other in others:
            other.kill()
            other.wait()


@contextlib.contextmanager
def server(command: list[str]) -> Iterator[str]:
    """A server that prints its address as its first line: the address. Killed afterwards."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            if not url:
                raise NotPermitted(f"the server did not start: {os.path.basename(command[1])}")
            yield url
        finally:
            process.kill()


@contextlib.contextmanager
def object_server(files: Path, bucket: str, *, bytes_per_s: float | None, latency_s: float) -> Iterator[Around]:
    """Google's API with what is in the folder `files`, over a link of that speed; gs://bucket for the job."""
    script = str(HERE / "diagnose_server.py")
    with server([sys.executable, script, str(files), bucket, str(bytes_per_s or 0), str(latency_s)]) as url:
        yield Around(variables={"STORAGE_EMULATOR_HOST": url, "NO_GCE_CHECK": "true", "NO_PROXY": "127.0.0.1"})


@contextlib.contextmanager
def driver(folder: Path, scene: str) -> Iterator[Around]:
    """NVIDIA's library, simulated: it says what the scene does, second by second from the start on."""
    stub = HERE.parents[1] / "tests/watch/recording/nvml_stub.c"
    library = folder.parent / "driver" / "libnvidia-ml.so.1"
    library.parent.mkdir(exist_ok=True)
    _compiled(stub, library, "-lpthread")
    told = folder / "scene"
    told.write_text(scene)
    yield Around(variables={
        "LD_LIBRARY_PATH": str(library.parent), "NVML_STUB": str(told), "NVML_STUB_START": str(time.time()),
    })  # fmt: skip


def own_mounts() -> None:
    """Gives this process a table of mounts of its own, so that none outlives it. Where that is refused the cells that
    mount something say so by themselves."""
    new_namespace = 0x00020000  # CLONE_NEWNS
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(new_namespace) == 0:
        subprocess.run(["mount", "--make-rprivate", "/"], check=False, capture_output=True)
