"""The busiest processes outside a run: of files as the kernel shows them, and one real process."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stoker.profiling.telemetry.host import HostSampler
from stoker.profiling.telemetry.processes import MAX_BASELINE_AGE_S, PROCESSES_PER_SAMPLE, OtherProcesses

HZ = os.sysconf("SC_CLK_TCK")


def put(proc: Path, pid: int, *, cpu_s: float, children_s: float = 0, parent: int = 1, command: str = "cc1plus",
        start_ticks: int = 99) -> None:  # fmt: skip
    """A process as /proc shows it; command: its words."""
    (proc / str(pid)).mkdir(exist_ok=True)
    name = Path(command.split()[0]).name[:15]
    (proc / str(pid) / "stat").write_text(
        f"{pid} ({name}) R {parent} 1 1 0 -1 4194304 9 9 9 9 {int(cpu_s * HZ)} 0 {int(children_s * HZ)} 0 20 0 1 0 "
        f"{start_ticks} 5000000 5 184467\n"
    )
    (proc / str(pid) / "cmdline").write_bytes("\0".join([*command.split(), ""]).encode())


def test_the_busiest_are_named_with_their_script_and_those_of_the_run_are_not(tmp_path: Path) -> None:
    others = OtherProcesses({10}, tmp_path)
    rows = {
        10: ("python train.py", 1), 11: ("python worker.py", 10),  # the run
        20: ("/usr/bin/python3 -u /home/u/other.py --secret x", 1), 21: ("python3 -m pytest -q", 1),
        30: ("cc1plus", 1), 31: ("cc1plus", 1), 40: ("sshd: a) b", 1), 50: ("bash", 1),
    }  # fmt: skip
    used = {10: 1.5, 11: 1.5, 20: 1.0, 21: 0.4, 30: 0.4, 31: 0.5, 40: 0.06, 50: 0.02}
    for pid, (command, parent) in rows.items():
        put(tmp_path, pid, cpu_s=100, parent=parent, command=command)
    assert others.sample(0.0, other_cores=2.0) == {}, "the first reading is the baseline"
    for pid, (command, parent) in rows.items():
        put(tmp_path, pid, cpu_s=100 + 2 * used[pid], parent=parent, command=command)
    cores = others.sample(2.0, other_cores=2.0)
    assert list(cores) == ["python3 other.py", "cc1plus", "python3 pytest"]
    assert list(cores.values()) == pytest.approx([1.0, 0.9, 0.4])


def test_children_that_ended_count_for_the_time_since_the_last_reading(tmp_path: Path) -> None:
    """`make` starts compilers of a second each; one of them ran for 50 s before, by a driver that also ended."""
    others = OtherProcesses({10}, tmp_path)
    put(tmp_path, 20, cpu_s=1, children_s=5, command="make")
    put(tmp_path, 21, cpu_s=2, parent=20, command="gcc")
    put(tmp_path, 22, cpu_s=50, parent=21)
    others.sample(0.0, other_cores=1.0)
    (tmp_path / "21/stat").unlink()
    (tmp_path / "22/stat").unlink()
    put(tmp_path, 20, cpu_s=1, children_s=5 + 52 + 0.9, command="make")
    assert others.sample(1.0, other_cores=1.0) == pytest.approx({"make": 0.9})


def test_a_pid_that_was_used_again_is_another_process(tmp_path: Path) -> None:
    others = OtherProcesses({10}, tmp_path)
    put(tmp_path, 20, cpu_s=1000)
    others.sample(0.0, other_cores=1.0)
    put(tmp_path, 20, cpu_s=0.5, start_ticks=500, command="ffmpeg")
    assert others.sample(1.0, other_cores=1.0) == pytest.approx({"ffmpeg": 0.5})


def test_processes_are_read_only_while_others_use_the_cores_and_seldom_if_they_are_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = OtherProcesses({10}, tmp_path)
    for pid in range(20, 20 + 3 * PROCESSES_PER_SAMPLE):
        put(tmp_path, pid, cpu_s=0)
    readings: list[int] = []
    read = OtherProcesses._read_cpu_times
    monkeypatch.setattr(OtherProcesses, "_read_cpu_times", lambda self: (readings.append(1), read(self))[1])
    for second in range(10):
        assert others.sample(float(second), other_cores=0.1) == {}
    assert not readings
    for second in range(10, 17):
        others.sample(float(second), other_cores=1.0)
    assert len(readings) == 3, "every third of 7"


def test_names_end_when_the_others_do_and_an_old_baseline_is_not_used(tmp_path: Path) -> None:
    others = OtherProcesses({10}, tmp_path)
    put(tmp_path, 20, cpu_s=0)
    others.sample(0.0, other_cores=1.0)
    put(tmp_path, 20, cpu_s=1)
    assert others.sample(1.0, other_cores=1.0)
    assert others.sample(2.0, other_cores=0.0) == {}
    put(tmp_path, 20, cpu_s=2 * MAX_BASELINE_AGE_S)
    assert others.sample(2.0 + MAX_BASELINE_AGE_S, other_cores=1.0) == {}
    put(tmp_path, 20, cpu_s=2 * MAX_BASELINE_AGE_S + 1)
    assert others.sample(3.0 + MAX_BASELINE_AGE_S, other_cores=1.0) == pytest.approx({"cc1plus": 1.0})


def test_without_proc_none_is_named(tmp_path: Path) -> None:
    others = OtherProcesses({10}, tmp_path / "absent")
    assert [others.sample(float(second), other_cores=4.0) for second in range(3)] == [{}, {}, {}]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system has no /proc")
def test_a_real_process_that_is_not_of_the_run_is_named(tmp_path: Path) -> None:
    """A run that sleeps, next to a busy process whose parent is neither the run nor this process."""
    (tmp_path / "busy.py").write_text("while True: pass")
    start = "import subprocess, sys; print(subprocess.Popen([sys.executable, sys.argv[1]], stdout=-3, stderr=-3).pid)"
    busy = int(
        subprocess.run([sys.executable, "-c", start, tmp_path / "busy.py"], capture_output=True, check=True).stdout
    )
    run = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        host = HostSampler(pid=run.pid)
        names: set[str] = set()
        for _ in range(20):
            time.sleep(0.5)
            names |= host.sample().busiest_processes.keys()
            if any("busy.py" in name for name in names):
                break
        assert any("busy.py" in name for name in names), names
    finally:
        os.kill(busy, 9)
        run.communicate()


def test_a_process_that_ends_while_it_is_read_has_the_kernels_name(tmp_path: Path) -> None:
    """Its command line is empty, as that of a thread of the kernel."""
    others = OtherProcesses({10}, tmp_path)
    put(tmp_path, 20, cpu_s=1)
    others.sample(0.0, other_cores=1.0)
    put(tmp_path, 20, cpu_s=2)
    (tmp_path / "20/cmdline").write_bytes(b"")
    assert others.sample(1.0, other_cores=1.0) == pytest.approx({"cc1plus": 1.0})
