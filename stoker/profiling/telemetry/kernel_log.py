"""Lines of the kernel log about a failure: out-of-memory kills, GPU errors, crashes, broken storage.

Read once, after a run or a watched job has ended, for the postmortem. The log covers the whole machine, so a line is
evidence only together with a PID or a time; `stoker/diagnosis/` decides. Ordinary users and most containers may not
read it. Counters that every user may read: `Cgroup.oom_kills`; GPU errors during a run: `sampler`.
"""

import dataclasses
import errno
import os
import re
from pathlib import Path

KERNEL_PATTERNS = {
    "oom": r"Out of memory|oom-kill:|out of memory:|oom_reaper|invoked oom-killer",
    "xid": r"NVRM: (?:Xid|GPU at)|nvidia-nvlink: .*(?:error|fail)",
    "crash": r"segfault at|general protection|traps: |trap invalid opcode|bus error",
    "hang": r"blocked for more than \d+ seconds|soft lockup|rcu: INFO: .*stall",
    "storage": r"I/O error|EXT4-fs (?:error|warning)|XFS .*(?:error|corrupt)|nfs: server .* not responding"
    r"|Remounting filesystem read-only",
    "hardware": r"\[Hardware Error\]|mce: |EDAC .* [CU]E|thermal throttl",
}  # fmt: skip
"""Kind → patterns of messages of the kernel (mm/oom_kill.c, kernel/hung_task.c, arch/x86/kernel/traps.c, fs/ext4,
fs/xfs) and of NVIDIA's module."""

_COMPILED_PATTERNS = [(kind, re.compile(pattern)) for kind, pattern in KERNEL_PATTERNS.items()]
_RECORD_BYTES = 8192
"""The longest record of /dev/kmsg (kernel documentation: ABI/testing/dev-kmsg); a shorter buffer is an error."""


@dataclasses.dataclass(frozen=True)
class KernelLine:
    """monotonic_s: seconds since boot, `time.monotonic` to within seconds; kind: a key of KERNEL_PATTERNS."""

    monotonic_s: float
    kind: str
    text: str


def read_kernel_lines(start_s: float = 0.0, *, log: Path = Path("/dev/kmsg")) -> list[KernelLine] | None:
    """The lines that match KERNEL_PATTERNS, written at `start_s` or later, the oldest first; None if the log may not be
    read. The kernel keeps the newest few thousand lines of all kinds, so a flood of lines may have displaced them."""
    try:
        fd = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:  # dmesg_restrict, a container, not Linux
        return None
    lines: list[KernelLine] = []
    try:
        while record := _next_record(fd):
            line = parse_record(record)
            if line is not None and line.monotonic_s >= start_s:
                lines.append(line)
    except PermissionError:  # some kernels refuse only the read
        return None
    finally:
        os.close(fd)
    return lines


def parse_record(record: bytes) -> KernelLine | None:
    """A record of /dev/kmsg, `priority,number,microseconds,flags;text`; None if it matches no pattern."""
    head, _, rest = record.decode(errors="replace").partition(";")
    text = rest.partition("\n")[0]  # lines with properties follow
    fields = head.split(",")
    if len(fields) < 3 or not fields[2].isdecimal():
        return None
    for kind, pattern in _COMPILED_PATTERNS:
        if pattern.search(text):
            return KernelLine(monotonic_s=int(fields[2]) / 1e6, kind=kind, text=text)
    return None


def _next_record(fd: int) -> bytes:
    """The next record; empty at the end."""
    while True:
        try:
            return os.read(fd, _RECORD_BYTES)
        except BlockingIOError:
            return b""
        except OSError as error:
            if error.errno != errno.EPIPE:  # EPIPE: overwritten before it was read; the next one is complete
                raise
