"""`--restarts`: which ends are restarted, how often and when; signals, and no process that is left behind."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from stoker.training import run_selection, supervisor
from stoker.training.supervisor import VARIABLE, RestartInfo, Supervisor, delay_s, read_restart, without_restarts
from stoker_watch.errors import ConfigError, RunFinished
from stoker_watch.runs.records import EVENTS, RunFolder

COUNTING = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
log = Path(sys.argv[1])
with log.open("a") as file:
    file.write(os.environ.get("STOKER_RESTART", "first") + "\\n")
codes = sys.argv[2].split(",")
code = int(codes[min(len(log.read_text().splitlines()), len(codes)) - 1])
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def supervise(tmp_path: Path, codes: str, restarts: int) -> tuple[int, list[str], list[float]]:
    """(exit code, what each attempt was told, the waits) of attempts that end with these codes in turn."""
    waits: list[float] = []
    log = tmp_path / "log"
    command = [sys.executable, "-c", COUNTING, str(log), codes]
    code = Supervisor(command, restarts, sleep=waits.append).run()
    return code, log.read_text().splitlines(), waits


@pytest.mark.parametrize("code", [0, 2, 3, 4, 6, 75])
def test_an_end_that_a_restart_cannot_mend_is_passed_on(code: int, tmp_path: Path) -> None:
    assert supervise(tmp_path, str(code), 3)[:2] == (code, ["first"])


@pytest.mark.parametrize(("codes", "expected"), [("1,5,7,0", 0), ("-9,0", 0), ("7", 7), ("-9", 137), ("1,6", 6)])
def test_failures_are_restarted_until_n_are_used_up(codes: str, expected: int, tmp_path: Path) -> None:
    code, attempts, waits = supervise(tmp_path, codes, 3)
    assert code == expected
    restarts = [msgspec.json.decode(line, type=RestartInfo) for line in attempts[1:]]
    assert [restart.number for restart in restarts] == list(range(1, len(attempts)))
    assert len(restarts) == (3 if "," not in codes else codes.count(","))
    first = int(codes.split(",")[0])
    assert restarts[0].exit_code == first
    assert ("SIGKILL" if first < 0 else f"exit code {first}") in restarts[0].reason
    assert sum(waits) == pytest.approx(sum(delay_s(n + 1) for n in range(len(restarts))))


@pytest.mark.parametrize(
    ("counts", "reason", "kills"),
    [
        ((0, 1), "killed by SIGKILL (the kernel, out of memory)", 1), ((3, 3), "killed by SIGKILL", 0),
        ((None, None), "killed by SIGKILL (the kernel, if memory was short)", 0),
    ],
)  # fmt: skip
def test_the_kernel_is_named_where_it_counts_its_kills(
    counts: tuple[int | None, int | None], reason: str, kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """counts: of the cgroup, before and after the attempt that is killed."""
    values = itertools.chain(counts, itertools.repeat(counts[1]))
    monkeypatch.setattr(supervisor, "Cgroup", lambda: SimpleNamespace(oom_kills=lambda: next(values)))
    code, attempts, _ = supervise(tmp_path, "-9,0", 3)
    assert code == 0
    restart = msgspec.json.decode(attempts[1], type=RestartInfo)
    assert (restart.reason, restart.oom_kills) == (reason, kills)


def test_the_waits_grow_to_a_minute() -> None:
    assert [delay_s(n) for n in (1, 2, 3, 7, 50)] == [1, 2, 4, 60, 60]


def test_arguments_of_the_child() -> None:
    arguments = ["train", "demo", "--restarts", "3", "--steps", "5", "--restarts=2", "--lr", "0.1"]
    assert without_restarts(arguments) == ["train", "demo", "--steps", "5", "--lr", "0.1"]


def test_malformed_numbers_and_variables() -> None:
    with pytest.raises(ConfigError, match="--restarts -1"):
        Supervisor(["true"], -1)
    assert read_restart({}) is None
    with pytest.raises(ConfigError, match=VARIABLE):
        read_restart({VARIABLE: "{"})


def test_a_run_that_an_earlier_attempt_finished_is_not_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path, 1)
    folder.event("finished")
    folder.close()
    assert (tmp_path / EVENTS).exists()
    run_selection._refuse_run_of_this_command(tmp_path)
    for since, refused in ((0.0, True), (time.time() + 60, False)):
        restart = RestartInfo(number=1, limit=3, reason="exit code 1", exit_code=1, since=since)
        monkeypatch.setenv(VARIABLE, msgspec.json.encode(restart).decode())
        if refused:
            with pytest.raises(RunFinished, match="nothing is left"):
                run_selection._refuse_run_of_this_command(tmp_path)
        else:
            run_selection._refuse_run_of_this_command(tmp_path)


SUPERVISING = """
import sys
from stoker.training.supervisor import Supervisor
sys.exit(Supervisor([sys.executable, "-c", sys.argv[1], *sys.argv[2:]], 3).run())
"""
WAITING = """
import os, signal, subprocess, sys, time
handled = []
signal.signal(signal.SIGTERM, lambda *_: handled.append(1))
worker = subprocess.Popen(["sleep", "600"])
print(os.getpid(), worker.pid, flush=True)
while not handled:
    time.sleep(0.01)
if sys.argv[1] == "leave":
    os.kill(os.getpid(), signal.SIGKILL)
worker.kill()
sys.exit(75)
"""


def start(how: str) -> tuple[subprocess.Popen[str], int, int]:
    """(supervisor, PID of its child, PID of the child's own child)."""
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISING, WAITING, how], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    child, worker = map(int, supervisor.stdout.readline().split())
    return supervisor, child, worker


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(*pids: int) -> None:
    end_s = time.monotonic() + 30
    while any(map(is_alive, pids)):
        assert time.monotonic() < end_s, [pid for pid in pids if is_alive(pid)]
        time.sleep(0.01)


def test_sigterm_reaches_the_child_and_its_75_is_passed_on() -> None:
    supervisor, child, worker = start("save")
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(30) == 75
    wait_until_gone(child, worker)


def test_processes_of_a_killed_child_are_ended() -> None:
    supervisor, child, worker = start("leave")
    os.kill(child, signal.SIGTERM)  # not through the supervisor: a crash, which is restarted
    assert supervisor.stdout is not None
    second, second_worker = map(int, supervisor.stdout.readline().split())
    wait_until_gone(child, worker)
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(30) == 75, "killed after the signal: nothing is restarted"
    wait_until_gone(second, second_worker)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal on the death of a parent")
def test_a_killed_supervisor_takes_its_child_along() -> None:
    supervisor, child, worker = start("save")
    supervisor.kill()
    supervisor.wait()
    wait_until_gone(child, worker)
