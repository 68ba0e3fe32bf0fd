"""The machine's counters from files as kernels show them, and from this machine."""

from pathlib import Path

import psutil
import pytest

from stoker_watch.recording.telemetry.machine import (
    disk_usage,
    free_bytes,
    network_received_bytes,
    read_meminfo,
)

linux = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="this system has no /proc")

NETWORK = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo: 9999999      29    0    0    0     0          0         0     9999999      29    0    0    0     0       0          0
  eth0: 4036     200193    0    0    0     0          0         0  3567   42926    0    0    0     0       0          0
veth1a:1000       1    0    0    0     0          0         0  2000   1    0    0    0     0       0          0
"""  # noqa: E501


def test_real_interfaces_are_counted_and_in_a_container_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net/dev").write_text(NETWORK)
    assert network_received_bytes(str(tmp_path), tmp_path / "none") == 5036
    (tmp_path / "class/eth0/device").mkdir(parents=True)
    (tmp_path / "class/veth1a").mkdir()
    assert network_received_bytes(str(tmp_path), tmp_path / "class") == 4036
    assert network_received_bytes(str(tmp_path / "gone")) is None


@linux
def test_memory_of_this_machine(tmp_path: Path) -> None:
    assert read_meminfo(Path("/proc"))["MemTotal"] == psutil.virtual_memory().total
    assert read_meminfo(tmp_path) == {}


def test_room_of_a_file_system(tmp_path: Path) -> None:
    told = disk_usage(str(tmp_path))
    assert told is not None
    assert 0 < told[0] < told[1]
    assert disk_usage(str(tmp_path / "absent")) is None
    assert free_bytes(tmp_path / "absent") is None
