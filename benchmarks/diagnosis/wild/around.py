"""What is around the jobs of `diagnose_wild.py`: drawn data, servers, signals, besides `diagnose_outside.py`.

Each function returns a function of the job's folder, for `Job.around`.
"""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.diagnosis import diagnose_outside as outside
from benchmarks.diagnosis.diagnose_outside import Around, NotPermitted

HERE = Path(__file__).resolve().parent
_drawing = threading.Lock()
Fault = Callable[[Path], AbstractContextManager[Around]]


def slow_reads(path: str, seconds: float) -> Fault:
    """Each read and write of a file with `path` in its path takes so much longer (LD_PRELOAD)."""
    return lambda folder: outside.slow_files(folder, path, seconds)


def busy_neighbors(count: int, program: str = "while True: pass") -> Fault:
    return lambda _: outside.busy_neighbors(count, program)


def cpu_quota(cores: float) -> Fault:
    return lambda _: outside.cpu_quota(cores)


def memory_limit(size_bytes: int) -> Fault:
    return lambda _: outside.memory_limit(size_bytes)


def small_disk(name: str, size_bytes: int) -> Fault:
    """A file system of that size at {folder}/NAME."""
    return lambda folder: outside.small_disk(folder / name, size_bytes)


def http_server(source: str, *, bytes_per_s: float = 0.0, delay_s: float = 0.0) -> Fault:
    """FILE_SERVER: the address of a server with the files of `source` (next to the job's folder). Answers after
    delay_s, at that speed (0: full speed). It also accepts POST requests to any path."""

    @contextlib.contextmanager
    def around(folder: Path) -> Iterator[Around]:
        command = [sys.executable, str(HERE / "file_server.py"), str(folder.parent / source)]
        with outside.server([*command, str(bytes_per_s), str(delay_s)]) as url:
            yield Around(variables={"FILE_SERVER": url, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"})

    return around


def port_in_use(port: int) -> Fault:
    """Another process, this one, listens there."""

    @contextlib.contextmanager
    def around(folder: Path) -> Iterator[Around]:  # noqa: ARG001
        with socket.create_server(("", port)):
            yield Around()

    return around


def data(*kinds: str, then: Fault | None = None) -> Fault:
    """Draws data sets of `data.py` next to the job's folder, {folder}/../data/KIND, and adds another fault."""

    @contextlib.contextmanager
    def around(folder: Path) -> Iterator[Around]:
        python = HERE.parents[2] / ".peers" / "bin" / "python" if "records" in kinds else Path(sys.executable)
        if not python.exists():
            raise NotPermitted("install the peers: make peers")
        with _drawing:
            command = [str(python), str(HERE / "data.py"), str(folder.parent / "data"), *kinds]
            subprocess.run(command, check=True, capture_output=True)
        if then is None:
            yield Around()
        else:
            with then(folder) as other:
                yield other

    return around


def slow_files(path: str, *, open_s: float = 0.0, write_s: float = 0.0) -> Fault:
    """Opening a file with `path` in its path takes so much longer, and each write to it (LD_PRELOAD)."""

    @contextlib.contextmanager
    def around(folder: Path) -> Iterator[Around]:
        library = outside._compiled(HERE / "slow.c", folder.parent / "slow.so", "-ldl")
        yield Around(variables={
            "LD_PRELOAD": str(library), "SLOW_PATH": path, "SLOW_OPEN_NS": str(int(open_s * 1e9)),
            "SLOW_WRITE_NS": str(int(write_s * 1e9)),
        })  # fmt: skip

    return around


MATRICES = "import numpy as n; a = n.random.rand(900, 900)\nwhile True: a = a @ a; a /= abs(a).max()"
"""A program for `busy_neighbors` that multiplies matrices on all cores."""


def send(number: signal.Signals, *, after_s: float, to: str = "job") -> Callable[[int], None]:
    """For Job.meanwhile. to: "job", the largest child of `stoker watch`; "watch"; "all": both and their children;
    "worker": a random process without children below the job."""

    def meanwhile(pid: int) -> None:
        time.sleep(after_s)
        family = tree()
        jobs = sorted(family.get(pid, []), key=memory_pages)[-1:]
        if to == "watch":
            chosen = [pid]
        elif to == "job":
            chosen = jobs
        elif to == "all":
            chosen = [pid, *descendants(family, pid)]
        else:
            below = [one for job in jobs for one in descendants(family, job)]
            leaves = [one for one in below if one not in family]
            chosen = [random.choice(leaves)] if leaves else []
        for one in chosen:
            with contextlib.suppress(ProcessLookupError):  # it ended
                os.kill(one, number)

    return meanwhile


def memory_pages(pid: int) -> int:
    """Resident memory; 0 of an ended process. Tells a job from small helper processes of `stoker watch`."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return 0


def tree() -> dict[int, list[int]]:
    """Children of each process, by process id."""
    family: dict[int, list[int]] = {}
    for path in sorted(Path("/proc").glob("[0-9]*"), key=lambda p: int(p.name)):
        with contextlib.suppress(OSError):  # it ended
            parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
            family.setdefault(parent, []).append(int(path.name))
    return family


def descendants(family: dict[int, list[int]], pid: int) -> list[int]:
    return [one for child in family.get(pid, []) for one in (child, *descendants(family, child))]
