"""What the kernel says of the machine: pressure (PSI), memory, network, file systems, its log, process trees.

Stateless functions over files of the kernel; `host` turns their values into rates. A value that this kernel does not
provide is None. Files are read in a third of pathlib's time, because a sample reads hundreds of them. The log covers
the whole machine, so a line is evidence only together with a PID or a time. What may hang (a driver, a storage that is
gone) is asked by a `TimeoutWorker`. Limits of the container: `stoker_watch/hardware/cgroup.py`.
"""

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import errno
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import psutil

from stoker_watch.knowledge import read_toml

Answer = TypeVar("Answer")

KERNEL_PATTERNS: dict[str, str] = read_toml("kernel_log.toml")
"""Kind of failure → pattern of its lines in the kernel log."""

MAX_READ_BYTES = 2**21
"""The command and the variables of a process have together at most a quarter of its stack (execve(2)), mostly 8 MiB."""
_RECORD_BYTES = 8192
"""The longest record of /dev/kmsg (kernel documentation: ABI/testing/dev-kmsg); a shorter buffer is an error."""

_PR_SET_PTRACER = 0x59616D61
"""linux/prctl.h."""


def read(path: str, max_bytes: int = MAX_READ_BYTES) -> bytes:
    """The whole file, of which the kernel may return a page at a time, or its beginning. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = b""
        while len(data) < max_bytes and (chunk := os.read(fd, 65536)):
            data += chunk
        return data
    finally:
        os.close(fd)


class ForeignProcess(psutil.Process):
    """A process that may have forged its command and its variables. psutil reads all of them, and they may be terabytes
    long (prctl's PR_SET_MM_MAP); here it is their beginning."""

    def cmdline(self) -> list[str]:
        if not sys.platform.startswith("linux"):
            return super().cmdline()
        data = self._read("cmdline")
        separator = "\0" if data.endswith("\0") else " "  # else it has written a title over them
        return data.removesuffix(separator).split(separator) if data else []

    def environ(self) -> dict[str, str]:
        if not sys.platform.startswith("linux"):
            return super().environ()
        pairs = (entry.partition("=") for entry in self._read("environ").split("\0"))
        return {name: value for name, equals, value in pairs if equals}

    def _read(self, name: str) -> str:
        try:
            return os.fsdecode(read(f"/proc/{self.pid}/{name}"))
        except PermissionError as error:
            raise psutil.AccessDenied(self.pid) from error
        except OSError as error:
            raise psutil.NoSuchProcess(self.pid) from error


def allow_reading(pid: int) -> None:
    """Lets a process and its descendants (0: none any more) read the memory of this one, where Yama permits that to
    ancestors only."""
    with contextlib.suppress(OSError):  # a kernel without Yama, which allows it anyway
        if read("/proc/sys/kernel/yama/ptrace_scope").strip() == b"1":
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


class Life(NamedTuple):
    """A process that lives."""

    is_asleep: bool
    """Its main thread is not runnable."""
    start_ticks: int
    """Its start, in clock ticks since that of the system; tells it from another one that has had its PID."""
    cpu_s: float
    """CPU-seconds so far: of all its threads, without its children."""


def read_life(pid: int) -> Life | None:
    """From /proc/PID/stat (proc(5)), in one read: psutil takes several times as long. None: it has ended."""
    try:
        state, *fields = read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        if state in b"ZXx":
            return None
        cpu_s = (int(fields[10]) + int(fields[11])) / os.sysconf("SC_CLK_TCK")
        return Life(state == b"S", int(fields[18]), cpu_s)
    except (OSError, ValueError, IndexError):
        return None


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


def pressure_s(path: Path) -> float | None:
    """Seconds since boot in which some task waited, from a pressure file (kernel documentation: accounting/psi)."""
    text = read_or_none(str(path)) or b""  # absent, or pressure accounting is off (EOPNOTSUPP)
    match = re.search(rb"^some .*total=(\d+)", text, re.MULTILINE)
    return int(match[1]) / 1e6 if match else None


def read_meminfo(proc: Path) -> dict[str, int]:
    """Bytes by the names of /proc/meminfo; empty without it."""
    sizes: dict[str, int] = {}
    for line in (read_or_none(f"{proc}/meminfo") or b"").splitlines():
        name, _, rest = line.partition(b":")
        fields = rest.split()
        if fields:
            sizes[name.decode()] = int(fields[0]) * (1024 if len(fields) > 1 else 1)
    return sizes


def network_received_bytes(proc_dir: str, interfaces: Path = Path("/sys/class/net")) -> int | None:
    """Received bytes since boot in the network namespace of a process. proc_dir: its folder in /proc. Physical
    interfaces if there are any, because bridges and veth pairs carry the same bytes; else all but loopback. Traffic
    that bypasses the kernel (RDMA) is not included."""
    text = read_or_none(f"{proc_dir}/net/dev")
    if text is None:
        return None
    by_interface: dict[str, int] = {}
    for line in text.decode().splitlines()[2:]:
        name, _, rest = line.partition(":")
        if name.strip() != "lo":
            by_interface[name.strip()] = int(rest.split()[0])
    physical = [count for name, count in by_interface.items() if os.path.exists(f"{interfaces}/{name}/device")]
    return sum(physical or by_interface.values())


def disk_usage(path: str) -> tuple[int, int] | None:
    """(used, total) bytes of a file system; None if it does not exist. May hang on a storage that is gone."""
    with contextlib.suppress(OSError):
        total, used, _ = shutil.disk_usage(path)
        return used, total
    return None


def free_bytes(path: Path) -> int | None:
    """Free bytes for ordinary users. May hang as `disk_usage`."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(path).free
    return None


def list_process_tree(pid: int, proc: Path = Path("/proc"), *, limit: int | None = None) -> list[int]:
    """A process and all its descendants, at most `limit`, the process first. From the kernel's lists of children."""
    pids = [pid]
    for member in pids:  # grows during the loop
        with contextlib.suppress(OSError):  # it ended meanwhile
            for thread in os.listdir(f"{proc}/{member}/task"):
                with contextlib.suppress(OSError):  # the thread ended
                    pids += map(int, read(f"{proc}/{member}/task/{thread}/children").split())
        if limit is not None and len(pids) >= limit:
            return pids[:limit]
    return pids


@dataclasses.dataclass(frozen=True)
class KernelLine:
    """monotonic_s: seconds since boot, `time.monotonic` to within seconds; kind: a key of KERNEL_PATTERNS."""

    monotonic_s: float
    kind: str
    text: str


def read_kernel_lines(start_s: float = 0.0, *, log: Path = Path("/dev/kmsg")) -> list[KernelLine] | None:
    """The lines of the kernel log about a failure (KERNEL_PATTERNS), written at `start_s` or later, the oldest first;
    None if the log may not be read. The kernel keeps the newest few thousand lines of all kinds."""
    try:
        fd = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:  # dmesg_restrict, a container, not Linux
        return None
    try:
        lines = [line for record in _records(fd) if (line := parse_record(record)) is not None]
    except PermissionError:  # some kernels refuse only the read
        return None
    finally:
        os.close(fd)
    return [line for line in lines if line.monotonic_s >= start_s]


def parse_record(record: bytes) -> KernelLine | None:
    """A record of /dev/kmsg, `priority,number,microseconds,flags;text`; None if it matches no pattern."""
    head, _, rest = record.decode(errors="replace").partition(";")
    text = rest.partition("\n")[0]  # lines with properties follow
    fields = head.split(",")
    if len(fields) < 3 or not fields[2].isdecimal():
        return None
    kind = next((kind for kind, pattern in KERNEL_PATTERNS.items() if re.search(pattern, text)), None)
    return None if kind is None else KernelLine(monotonic_s=int(fields[2]) / 1e6, kind=kind, text=text)


def _records(fd: int) -> Iterator[bytes]:
    while True:
        try:
            if not (record := os.read(fd, _RECORD_BYTES)):
                return
            yield record
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno != errno.EPIPE:  # EPIPE: overwritten before it was read; the next one is complete
                raise


class TimeoutWorker(Generic[Answer]):
    """Repeats a query, each time in a daemon thread. A query that is not answered yet is not started again."""

    def __init__(self, query: Callable[[], Answer], *, name: str) -> None:
        self._query = query
        self._name = name
        self._thread: threading.Thread | None = None

    def call(self, timeout_s: float) -> Answer | None:
        """The answer of a query that starts now; None: it does not come in time. Raises the exception of the query."""
        if self._thread is not None and self._thread.is_alive():
            return None
        answer: concurrent.futures.Future[Answer] = concurrent.futures.Future()

        def ask() -> None:
            # a signal for this process must not reach the one thread of it that is stuck in a driver
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            try:
                answer.set_result(self._query())
            except Exception as error:  # noqa: BLE001 (raised in the calling thread)
                answer.set_exception(error)

        thread = threading.Thread(target=ask, name=self._name, daemon=True)
        thread.start()
        self._thread = thread
        thread.join(timeout_s)
        return None if thread.is_alive() else answer.result(0)

    def stop(self, timeout_s: float = 0.2) -> bool:
        """Whether no query is running any more. A thread that hangs is abandoned."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()
