"""The kernel's log: real lines of it, through a pipe that keeps records apart as /dev/kmsg does."""

import os
import sys
import time
from pathlib import Path

import pytest

from stoker_watch.recording.telemetry.machine import KernelLine, read_kernel_lines

RECORDS = [
    b"6,339,5000000,-;usb 1-1: new device\n SUBSYSTEM=usb\n",
    b"4,340,6100000,-;python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0\n",
    b"6,341,6200000,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),oom_memcg=/job,task=python,pid=4242,uid=0\n",
    b"3,342,6300000,-;Memory cgroup out of memory: Killed process 4242 (python) total-vm:9000kB, anon-rss:8000kB\n",
    b"4,343,7000000,-;NVRM: Xid (PCI:0000:0b:00): 79, pid=4242, name=python, GPU has fallen off the bus.\n",
    b"6,344,8000000,-;python[77]: segfault at 0 ip 00007f sp 00007f error 4 in libfoo.so[7f]\n DEVICE=x\n",
    b"no record at all",
]


@pytest.mark.skipif(sys.platform != "linux", reason="pipes of packets are Linux's")
def test_telling_lines_come_with_their_time() -> None:
    reader, writer = os.pipe2(os.O_DIRECT | os.O_NONBLOCK)
    for record in RECORDS:
        os.write(writer, record)
    try:
        lines = read_kernel_lines(6.15, log=Path(f"/proc/self/fd/{reader}"))
    finally:
        os.close(reader)
        os.close(writer)
    assert lines is not None
    assert [(line.monotonic_s, line.kind) for line in lines] == [
        (6.2, "oom"),
        (6.3, "oom"),
        (7.0, "xid"),
        (8.0, "crash"),
    ]
    assert lines[1].text.startswith("Memory cgroup out of memory: Killed process 4242 (python)")
    assert lines[3] == KernelLine(
        8.0, "crash", "python[77]: segfault at 0 ip 00007f sp 00007f error 4 in libfoo.so[7f]"
    ), "without the properties of its device"


def test_where_it_may_not_be_read_nothing_is_known(tmp_path: Path) -> None:
    assert read_kernel_lines(log=tmp_path / "absent") is None


def test_this_machines_log_is_read_to_its_end_or_refused() -> None:
    lines = read_kernel_lines()
    assert lines is None or all(0 <= line.monotonic_s <= time.monotonic() + 60 for line in lines)
