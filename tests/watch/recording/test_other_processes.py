"""The busiest processes outside a run: of processes as psutil shows them, and one real process."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from stoker_watch.recording.telemetry import host
from stoker_watch.recording.telemetry.host import OTHERS_INTERVAL_S, HostSampler, OtherProcesses


class Shown:
    """A process as psutil shows it; command: its words."""

    def __init__(self, pid: int, command: str, cores: float) -> None:
        self.pid = pid
        self.words = command.split()
        self.info = {"cpu_percent": 100 * cores}

    def name(self) -> str:
        return Path(self.words[0]).name

    def cmdline(self) -> list[str]:
        return self.words


def test_the_busiest_are_named_with_their_script_and_those_of_the_run_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    used = {
        "python train.py": 1.5,  # the run
        "/usr/bin/python3 -u /home/u/other.py --secret x": 1.0, "python3 -m pytest -q": 0.4,
        "cc1plus": 0.9, "sshd: a) b": 0.06, "bash": 0.02,
    }  # fmt: skip
    shown = [Shown(10 + number, command, cores) for number, (command, cores) in enumerate(used.items())]
    readings: list[int] = []
    monkeypatch.setattr(host, "ForeignProcess", lambda pid: shown[pid - 10])
    monkeypatch.setattr(psutil, "process_iter", lambda _: readings.append(1) or iter(shown))
    others = OtherProcesses()
    assert others.sample(0.0, 0.1, {10}) == {}
    assert not readings, "only while others use the cores"
    cores = others.sample(1.0, 2.0, {10})
    assert list(cores) == ["python3 other.py", "cc1plus", "python3 pytest"]
    assert list(cores.values()) == pytest.approx([1.0, 0.9, 0.4])
    assert others.sample(2.0, 2.0, {10}) == cores
    assert len(readings) == 1, "all processes are not read each second"
    others.sample(1.0 + OTHERS_INTERVAL_S, 2.0, {10})
    assert len(readings) == 2
    assert others.sample(9.0, 0.0, {10}) == {}


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
        sampler = HostSampler(pid=run.pid)
        names: set[str] = set()
        for _ in range(120):
            time.sleep(0.5)
            names |= sampler.sample().busiest_processes.keys()
            if any("busy.py" in name for name in names):
                break
        assert any("busy.py" in name for name in names), names
    finally:
        os.kill(busy, 9)
        run.communicate()
