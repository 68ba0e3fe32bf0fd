"""Host counters: from trees of files as the kernel shows them, and from this machine."""

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from stoker_watch.hardware.cgroup import Cgroup
from stoker_watch.recording.telemetry import host as host_module
from stoker_watch.recording.telemetry import machine
from stoker_watch.recording.telemetry.host import HostSampler
from stoker_watch.recording.telemetry.machine import pressure_s

PRESSURE = "some avg10=2.31 avg60=0.75 avg300=0.72 total={some}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=9000000\n"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc with pressure files and no processes."""
    for what in ("cpu", "memory", "io"):
        press(tmp_path / "proc", what, 0)
    return tmp_path / "proc"


def press(proc: Path, what: str, total_us: int) -> None:
    (proc / "pressure").mkdir(parents=True, exist_ok=True)
    (proc / "pressure" / what).write_text(PRESSURE.format(some=total_us))


def test_pressure_is_the_time_in_which_some_task_waited(proc: Path) -> None:
    press(proc, "io", 18_692_206)
    assert pressure_s(proc / "pressure/io") == 18.692206
    assert pressure_s(proc / "pressure/irq") is None


def test_shares_are_of_the_time_since_the_sample_before(proc: Path, tmp_path: Path) -> None:
    clock = iter([100.0, 102.0, 103.0])
    cgroup = Cgroup(tmp_path / "mount", tmp_path / "membership")
    stat = tmp_path / "mount/cpu.stat"
    stat.parent.mkdir()
    (tmp_path / "mount/cgroup.controllers").write_text("cpu")
    stat.write_text("throttled_usec 5000000\n")
    host = HostSampler(proc=proc, cgroup=cgroup, now=lambda: next(clock))

    press(proc, "cpu", 500_000)
    press(proc, "memory", 9_000_000)
    stat.write_text("throttled_usec 5250000\n")
    sample = host.sample()
    assert sample.psi_cpu == 0.25
    assert sample.psi_memory == 1.0, "a share is at most 1"
    assert sample.psi_io == 0.0
    assert sample.throttled_s == pytest.approx(0.25)

    press(proc, "cpu", 600_000)
    assert host.sample().psi_cpu == pytest.approx(0.1)


def test_missing_is_none(tmp_path: Path) -> None:
    host = HostSampler(proc=tmp_path, cgroup=Cgroup(tmp_path, tmp_path / "membership"))
    sample = host.sample()
    told = {name for name, value in msgspec.structs.asdict(sample).items() if value is not None}
    assert sample.rss_bytes is not None, "psutil knows it where there is no /proc"
    assert told - {"t", "attempt", "gpus", "rss_bytes", "shm_used_bytes", "shm_total_bytes", "busiest_processes"} == {
        "cpu_core_utilization", "process_cpu", "memory_used_bytes", "memory_limit_bytes", "cpu_limit_cores",
        "open_fds", "max_fds",
    }  # fmt: skip


MEMINFO = "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 600 kB\nBuffers: 20 kB\nCached: 500 kB\n"
MEMINFO += "Shmem: 50 kB\nSwapTotal: 400 kB\nSwapFree: 300 kB\nHugePages_Total: 0\n"


@pytest.mark.parametrize(
    ("limit", "told"),
    [("max", (1024_000, 409_600, 102_400)), ("900000", (900_000, 90_000, 7_000))],
    ids=["the machine's", "the cgroup's"],
)
def test_memory_is_of_what_is_tighter(
    limit: str, told: tuple[int, ...], proc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (proc / "meminfo").write_text(MEMINFO)
    mount = tmp_path / "mount"
    mount.mkdir()
    for name, text in {
        "cgroup.controllers": "memory", "memory.max": limit, "memory.current": "500000", "memory.swap.current": "7000",
        "memory.stat": "file 420000\ninactive_file 200000\nshmem 10000\n", "memory.events": "oom_kill 3",
    }.items():  # fmt: skip
        (mount / name).write_text(text)
    host = HostSampler(proc=proc, cgroup=Cgroup(mount, tmp_path / "membership"))
    (mount / "memory.events").write_text("oom 9\noom_kill 5\n")
    machine_memory = SimpleNamespace(total=1024_000, available=614_400)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine_memory)
    sample = host.sample()
    assert (sample.memory_limit_bytes, sample.memory_used_bytes, sample.swap_used_bytes) == told
    assert sample.oom_kills == 2
    assert host.sample().oom_kills == 0


def test_a_folder_that_does_not_answer_costs_its_number_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(machine, "free_bytes", lambda _: answers.wait() and 7)
    monkeypatch.setattr(host_module, "FREE_BYTES_TIMEOUT_S", 0.001)
    host = HostSampler(run_dir=tmp_path)
    sample = host.sample()
    host.close()
    answers.set()
    assert sample.disk_free_bytes is None
    assert sample.rss_bytes


def test_free_bytes_are_those_of_the_runs_folder(tmp_path: Path) -> None:
    with contextlib.closing(HostSampler(run_dir=tmp_path)) as host:
        free = host.sample().disk_free_bytes
    assert free is not None
    assert free <= shutil.disk_usage(tmp_path).total
    assert HostSampler().sample().disk_free_bytes is None


def test_no_time_between_samples_is_none_not_a_division_by_zero(proc: Path) -> None:
    host = HostSampler(proc=proc, now=lambda: 7.0)
    assert host.sample().psi_cpu is None
    assert host.sample().process_cpu is None


def test_this_machine_is_seen_at_work() -> None:
    host = HostSampler()
    total = 0
    sample = host.sample()
    while not (
        sample.cpu_core_utilization and sample.process_cpu
    ):  # ticks of the kernel are 10 ms: work until one was counted
        total += sum(range(200_000))
        sample = host.sample()
    assert len(sample.cpu_core_utilization) == os.cpu_count()
    assert all(0 <= share <= 1 for share in sample.cpu_core_utilization)
    assert sample.memory_limit_bytes is not None
    assert sample.memory_used_bytes is not None
    assert 0 < sample.memory_used_bytes <= sample.memory_limit_bytes


def test_of_another_process_its_own_work_is_told() -> None:
    code = (
        "import sys, time\nsys.stdin.readline()\nwhile time.process_time() < 0.3: pass\n"
        "print('done', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        host = HostSampler(pid=process.pid, now=iter((0.0, 1.0)).__next__)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"work\n")
        process.stdin.flush()
        process.stdout.readline()
        told = host.sample().process_cpu
        process.stdin.close()
    assert told is not None
    assert told > 0.1
