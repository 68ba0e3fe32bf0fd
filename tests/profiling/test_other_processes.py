"""The busiest processes outside a run: of processes as psutil shows them, and one real process."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from stoker.profiling.telemetry.host import OTHERS_INTERVAL_S, HostSampler, OtherProcesses


class Shown:
    """A process as psutil shows it; command: its words."""

    def __init__(self, pid: int, command: str) -> None:
        self.pid = pid
        self.words = command.split()
        self.info = {"cpu_times": SimpleNamespace(user=100.0, system=0.0)}

    def name(self) -> str:
        return Path(self.words[0]).name

    def cmdline(self) -> list[str]:
        return self.words


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Shown]:
    processes: list[Shown] = []
    monkeypatch.setattr(psutil, "process_iter", lambda _: iter(processes))
    return processes


def test_the_busiest_are_named_with_their_script_and_those_of_the_run_are_not(shown: list[Shown]) -> None:
    others = OtherProcesses()
    used = {
        "python train.py": 1.5,  # the run
        "/usr/bin/python3 -u /home/u/other.py --secret x": 1.0, "python3 -m pytest -q": 0.4,
        "cc1plus": 0.9, "sshd: a) b": 0.06, "bash": 0.02,
    }  # fmt: skip
    shown += [Shown(10 + number, command) for number, command in enumerate(used)]
    assert others.sample(0.0, 2.0, {10}) == {}, "the first reading is the baseline"
    for process, cores in zip(shown, used.values(), strict=True):
        process.info["cpu_times"].user += OTHERS_INTERVAL_S * cores
    assert others.sample(1.0, 2.0, {10}) == {}, "all processes are not read each second"
    cores = others.sample(OTHERS_INTERVAL_S, 2.0, {10})
    assert list(cores) == ["python3 other.py", "cc1plus", "python3 pytest"]
    assert list(cores.values()) == pytest.approx([1.0, 0.9, 0.4])


def test_they_are_read_only_while_others_use_the_cores(shown: list[Shown]) -> None:
    others = OtherProcesses()
    shown.append(Shown(20, "cc1plus"))
    for second in range(3):
        assert others.sample(float(second), 0.1, set()) == {}
    assert others.sample(3.0, 1.0, set()) == {}
    shown[0].info["cpu_times"].user += OTHERS_INTERVAL_S
    assert others.sample(3.0 + OTHERS_INTERVAL_S, 1.0, set()) == {"cc1plus": 1.0}
    assert others.sample(4.0 + OTHERS_INTERVAL_S, 0.0, set()) == {}
    assert others.sample(5.0 + OTHERS_INTERVAL_S, 1.0, set()) == {}, "a new baseline"


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
