"""Host counters: from trees of files as the kernel shows them, and from this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.cgroup import Cgroup
from stoker.measuring.host import Host, pressure_s, tree_cpu_s, tree_rss

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
    host = Host(proc=proc, cgroup=cgroup, now=lambda: next(clock))

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
    host = Host(proc=tmp_path, cgroup=Cgroup(tmp_path, tmp_path / "membership"))
    sample = host.sample()
    assert (sample.psi_cpu, sample.psi_memory, sample.psi_io, sample.throttled_s) == (None, None, None, None)
    assert sample.rss_bytes is not None, "psutil knows it where there is no /proc"


def test_no_time_between_samples_is_none_not_a_division_by_zero(proc: Path) -> None:
    host = Host(proc=proc, now=lambda: 7.0)
    assert host.sample().psi_cpu is None
    assert host.sample().process_cpu is None


def test_this_machine_is_seen_at_work() -> None:
    host = Host()
    total = 0
    sample = host.sample()
    while not (sample.cpu and sample.process_cpu):  # ticks of the kernel are 10 ms: work until one was counted
        total += sum(range(200_000))
        sample = host.sample()
    assert len(sample.cpu) == os.cpu_count()
    assert all(0 <= share <= 1 for share in sample.cpu)
    assert sample.memory_limit_bytes is not None
    assert sample.memory_used_bytes is not None
    assert 0 < sample.memory_used_bytes <= sample.memory_limit_bytes


@pytest.mark.parametrize("by", ["the kernel's lists", "psutil"])
def test_memory_of_grandchildren_counts(by: str, tmp_path: Path) -> None:
    """A child that only starts a grandchild, which holds 64 MiB and says so."""
    proc = Path("/proc") if by != "psutil" else tmp_path
    if not proc.exists():
        pytest.skip("this system has no /proc")
    grandchild = "import sys; held = b'x' * 2**26; print('held', flush=True); sys.stdin.read()"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    before = tree_rss(os.getpid(), proc)
    with subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        during = tree_rss(os.getpid(), proc)
        process.stdin.close()
    assert before is not None
    assert during is not None
    assert during - before > 2**26


def test_a_tree_of_files_is_summed(tmp_path: Path) -> None:
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    for pid, pages, thread, children in ((10, 5, 10, "20 30"), (20, 7, 21, ""), (30, 11, 30, "99")):
        folder = tmp_path / str(pid) / "task" / str(thread)
        folder.mkdir(parents=True)
        (folder / "children").write_text(children)
        (tmp_path / str(pid) / "statm").write_text(f"1000 {pages} 1 1 0 1 0\n")
    assert tree_rss(10, tmp_path) == (5 + 7 + 11) * page_bytes, "99 ended meanwhile"


def test_processor_time_of_a_job_counts_all_below_it_and_what_ended(tmp_path: Path) -> None:
    """Of a process with a blank and a bracket in its name, its child, and a child of theirs that ended meanwhile."""
    for pid, name, times, children in ((10, "a) b", "100 20 3 4", "20 99"), (20, "c", "1000 0 0 0", "")):
        folder = tmp_path / str(pid) / "task" / str(pid)
        folder.mkdir(parents=True)
        (folder / "children").write_text(children)
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({name}) S 1 1 1 0 -1 4194304 9 9 9 9 {times} 20 0 1 0\n")
    assert tree_cpu_s(10, tmp_path) == 1127 / os.sysconf("SC_CLK_TCK")
    assert tree_cpu_s(99, tmp_path) is None


def test_of_another_process_its_own_work_is_told() -> None:
    code = (
        "import sys, time\nsys.stdin.readline()\nwhile time.process_time() < 0.3: pass\n"
        "print('done', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        host = Host(pid=process.pid, now=iter((0.0, 1.0)).__next__)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"work\n")
        process.stdin.flush()
        process.stdout.readline()
        told = host.sample().process_cpu
        process.stdin.close()
    assert told is not None
    assert told > 0.1
