"""What the kernel wrote about a death: lines of its log on memory kills, GPU errors, crashes, and broken storage.

Read once, after a run or a watched job has ended, for the post-mortem. The log holds all of the machine, so a line is
evidence only together with the process's number or the time; who judges is `diagnose`. Ordinary users and most
containers may not read it. Counters that anybody may read: `cgroup.Cgroup.oom_kills`; the driver's own reports of GPU
errors while a run lives: `xid`.
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
"""Words of the kernel (mm/oom_kill.c, kernel/hung_task.c, arch/x86/kernel/traps.c, fs/ext4, fs/xfs) and of NVIDIA's
module, by what they tell."""

_COMPILED_PATTERNS = [(kind, re.compile(pattern)) for kind, pattern in KERNEL_PATTERNS.items()]
_RECORD_BYTES = 8192
"""The longest record of /dev/kmsg (kernel documentation: ABI/testing/dev-kmsg); a shorter buffer gets an error."""


@dataclasses.dataclass(frozen=True)
class KernelLine:
    """at_s: seconds since boot, on the clock of `time.monotonic`, within seconds; kind: a key of TELLING."""

    monotonic_s: float
    kind: str
    text: str


def read_kernel_lines(start_s: float = 0.0, *, log: Path = Path("/dev/kmsg")) -> list[KernelLine] | None:
    """The telling lines that the kernel wrote at `since_boot_s` or later, the oldest first; None where it lets us read
    none. It keeps the newest few thousand lines of all kinds, so a flood may have pushed out what is asked for."""
    try:
        fd = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:  # dmesg_restrict, a container, not a Linux
        return None
    lines: list[KernelLine] = []
    try:
        while record := _next_record(fd):
            line = parse_record(record)
            if line is not None and line.monotonic_s >= start_s:
                lines.append(line)
    except PermissionError:  # some kernels refuse only the reading
        return None
    finally:
        os.close(fd)
    return lines


def parse_record(record: bytes) -> KernelLine | None:
    """A record of /dev/kmsg, `priority,number,microseconds,flags;text`; None where it tells nothing."""
    head, _, rest = record.decode(errors="replace").partition(";")
    text = rest.partition("\n")[0]  # properties follow, one a line
    fields = head.split(",")
    if len(fields) < 3 or not fields[2].isdecimal():
        return None
    for kind, pattern in _COMPILED_PATTERNS:
        if pattern.search(text):
            return KernelLine(monotonic_s=int(fields[2]) / 1e6, kind=kind, text=text)
    return None


def _next_record(fd: int) -> bytes:
    """The record after the last one read; empty at the end."""
    while True:
        try:
            return os.read(fd, _RECORD_BYTES)
        except BlockingIOError:
            return b""
        except OSError as error:
            if error.errno != errno.EPIPE:  # EPIPE: overwritten before it was read; the next one is whole again
                raise
