"""`stoker watch` with real jobs: output and signals pass unchanged, kills are survived, and a run is recorded."""

import hashlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker_watch.diagnosis.notes import collect_notes
from stoker_watch.diagnosis.reader import read_run
from stoker_watch.report.run_report import collect
from stoker_watch.runs.records import (
    DEVICES,
    ENVIRONMENT,
    EVENTS,
    OUTPUT,
    STEPS,
    locked,
    read_lines,
)
from stoker_watch.runs.schemas import DeviceSample, Event, StepWindow
from stoker_watch.watch.recorder import job_name

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="`stoker watch` is for Linux")

WATCH = [sys.executable, "-c", "from stoker_watch.cli.app import main; main()", "watch", "--run-dir", "run", "--"]
PYTHON = [sys.executable, "-S", "-c"]


def watched(command: list[str], folder: Path, **options: object) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run([*WATCH, *command], cwd=folder, capture_output=True, timeout=60, **options)  # type: ignore[call-overload,no-any-return]


FIRST = b"stoker watch: recording into run\n"


def jobs_own(output: bytes) -> bytes:
    """What the job wrote: without the lines of stoker, the first and that of the end."""
    lines = output.removeprefix(FIRST).splitlines(keepends=True)
    ours = [line for line in lines if line.startswith(b"stoker watch: ")]
    assert len(ours) == 1
    assert ours[0].endswith(b"; `stoker why run`\n")
    return b"".join(line for line in lines if line not in ours)


def started(command: list[str], folder: Path) -> "subprocess.Popen[bytes]":
    """A job that runs; the first line, which is stoker's, has been read."""
    both = subprocess.STDOUT  # the same pipe for both: one relay
    process = subprocess.Popen(
        [*WATCH, *command], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=both,
        preexec_fn=reset_signals,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == FIRST
    return process


def reset_signals() -> None:
    """The tests may run with ignored signals, as under `nohup`; a shell cannot trap inherited ignored ones."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def last_event(folder: Path) -> Event:
    return list(read_lines(folder / "run", EVENTS, Event))[-1]


def is_held(run: Path) -> bool:
    with locked(run) as free:
        return free is False


@pytest.mark.parametrize(
    ("end", "code", "kind", "data"),
    [
        ("exit 0", 0, "finished", {"exit_code": 0}),
        pytest.param("exit 139", 139, "failed", {"exit_code": 139}, marks=pytest.mark.slow),
        ("kill -SEGV $$", -signal.SIGSEGV, "failed", {"exit_code": 139, "signal": 11}),
        pytest.param("exit 3", 3, "failed", {"exit_code": 3}, marks=pytest.mark.slow),
        pytest.param(
            "kill -KILL $$", -signal.SIGKILL, "failed", {"exit_code": 137, "signal": 9}, marks=pytest.mark.slow
        ),
    ],
)
def test_it_ends_as_the_job_ends(end: str, code: int, kind: str, data: dict[str, int], tmp_path: Path) -> None:
    done = watched(["sh", "-c", f"echo out; echo err >&2; {end}"], tmp_path)
    assert (done.returncode, done.stdout, jobs_own(done.stderr)) == (code, b"out\n", b"err\n")
    event = last_event(tmp_path)
    assert event.kind == kind
    assert {name: value for name, value in event.data.items() if name != "oom_kills"} == data
    assert is_held(tmp_path / "run") is False


def test_a_missing_program_and_one_that_cannot_run(tmp_path: Path) -> None:
    assert watched(["no-such-program"], tmp_path).returncode == 127
    (tmp_path / "data.txt").write_text("x")
    assert watched(["./data.txt"], tmp_path).returncode == 126
    assert [event.kind for event in read_lines(tmp_path / "run", EVENTS, Event)] == [
        "started",
        "failed",
        "resumed",
        "failed",
    ]


def test_a_finished_run_is_not_continued_by_another_job(tmp_path: Path) -> None:
    assert watched(["true"], tmp_path).returncode == 0
    assert watched(["true"], tmp_path).returncode == 0, "the same job may go on"
    done = watched(["echo", "hello"], tmp_path)
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"it was `true`" in done.stderr


def test_an_unknown_flag_is_no_program(tmp_path: Path) -> None:
    done = watched(["--alrt", "idle", "--", "true"], tmp_path)
    assert done.returncode == 2
    assert b"`stoker watch` has no --alrt." in done.stderr


@pytest.mark.slow
def test_megabytes_arrive_unchanged_and_in_order(tmp_path: Path) -> None:
    code = "import os,random; r=random.Random(1); d=r.randbytes(2**20)\nfor n in range(4): os.write(1+n%2, d)"
    done = watched([*PYTHON, code], tmp_path)
    assert done.returncode == 0
    import random

    part = random.Random(1).randbytes(2**20)
    assert hashlib.sha256(done.stdout).digest() == hashlib.sha256(2 * part).digest()
    stderr = done.stderr.removeprefix(FIRST).rpartition(b"stoker watch: done")[0]
    assert hashlib.sha256(stderr).digest() == hashlib.sha256(2 * part).digest()
    assert (tmp_path / "run" / OUTPUT).stat().st_size == 4 * 2**20


def test_arguments_stdin_directory_and_process_group_are_unchanged(tmp_path: Path) -> None:
    code = "import os,sys; print(sys.argv[1:], sys.stdin.read(), os.getcwd(), os.getpgrp(), os.getsid(0))"
    words = ["--help", "--run", "x", "--", "-a"]
    with started([*PYTHON, code, *words], tmp_path) as process:
        out, _ = process.communicate(b"typed", timeout=60)
    assert jobs_own(out).decode().split() == f"{words} typed {tmp_path} {os.getpgrp()} {os.getsid(0)}".split()


def test_a_closed_reader_is_a_broken_pipe_for_the_job(tmp_path: Path) -> None:
    with started(["yes"], tmp_path) as process:
        assert process.stdout is not None
        process.stdout.read(4)
        process.stdout.close()
        assert process.wait(60) == -signal.SIGPIPE


SLOW = (
    "import sys\nprint('begin', flush=True)\n"
    "for line in sys.stdin: print('got', line.strip(), flush=True)\nprint('end')"
)
"""Echoes its input until that ends, so that no kill races with its end."""


def descendants(pid: int) -> dict[str, list[int]]:
    """The processes below a watcher, by role."""
    by_role: dict[str, list[int]] = {"relay": [], "job": []}
    queue = [pid]
    for parent in queue:  # grows during the loop
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        for child in map(int, children):
            command = Path(f"/proc/{child}/cmdline").read_bytes()
            by_role["relay" if b"output_relay.py" in command else "job"].append(child)
            queue.append(child)
    return by_role


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits for another process."""
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.parametrize(
    "killed",
    [
        ["relay", "watcher"],
        ["standby", "relay"],
        pytest.param(["watcher"], marks=pytest.mark.slow),
        pytest.param(["relay"], marks=pytest.mark.slow),
        pytest.param(["watcher", "relay", "standby"], marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def test_the_job_continues_with_its_whole_output(killed: list[str], tmp_path: Path) -> None:
    process = started([*PYTHON, SLOW], tmp_path)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == b"begin\n"
    wait_until(lambda: len(descendants(process.pid)["relay"]) == 2)
    children = descendants(process.pid)
    relay, standby = sorted(children["relay"])
    pids = {"watcher": process.pid, "relay": relay, "standby": standby}
    for n, name in enumerate(killed):
        os.kill(pids[name], signal.SIGKILL)
        wait_until(lambda pid=pids[name]: has_ended(pid))
        process.stdin.write(b"%d\n" % n)  # the answer comes through the current relay, so it is running
        process.stdin.flush()
        assert process.stdout.readline() == b"got %d\n" % n
    assert not has_ended(children["job"][0])
    assert is_held(tmp_path / "run")
    process.stdin.close()
    assert process.stdout.read().partition(b"stoker watch: ")[0] == b"end\n"
    code = process.wait(60)
    output = b"begin\n" + b"".join(b"got %d\n" % n for n in range(len(killed))) + b"end\n"
    assert (tmp_path / "run" / OUTPUT).read_bytes() == output
    if "watcher" not in killed:
        assert code == 0
        assert last_event(tmp_path).kind == "finished"
    process.stdout.close()


TRAPS = "trap 'echo {0}; exit 7' {0}; echo ready; while :; do read -r -t 0.2 x; done"
"""A signal that comes just before `read` is handled after it."""


@pytest.mark.parametrize("name", ["TERM", *(pytest.param(n, marks=pytest.mark.slow) for n in ("HUP", "INT", "USR1"))])
def test_signals_are_forwarded(name: str, tmp_path: Path) -> None:
    with started(["bash", "-c", TRAPS.format(name)], tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(getattr(signal, f"SIG{name}"))
        assert process.stdout.readline().strip().decode() == name
        assert process.wait(60) == 7


class Terminal:
    """A real terminal with a session of its own, in which a command runs."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.pid, self.handle = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execvp(command[0], command)
        self.seen = b""

    def until(self, text: bytes) -> None:
        while text not in self.seen:
            assert select.select([self.handle], [], [], 60)[0], self.seen
            self.seen += os.read(self.handle, 65536)

    def end(self) -> int:
        while True:
            try:
                data = os.read(self.handle, 65536)
            except OSError:
                break
            self.seen += data
        _, status = os.waitpid(self.pid, 0)
        os.close(self.handle)
        return os.waitstatus_to_exitcode(status)


def test_a_terminal_stays_a_terminal_and_ctrl_c_comes_once(tmp_path: Path) -> None:
    code = (
        "import os,signal,sys\nboth = {signal.SIGINT, signal.SIGUSR1}; signal.pthread_sigmask(signal.SIG_BLOCK, both)\n"
        "print(*[os.isatty(k) for k in (0,1,2)], os.get_terminal_size(), flush=True); n = 0\n"
        "while signal.sigwait(both) == signal.SIGINT: n += 1; print('int', n, flush=True)\n"
        "print('in all', n, flush=True); sys.exit(5)"
    )
    terminal = Terminal([*WATCH, *PYTHON, code], tmp_path)
    terminal.until(b"lines=")
    for n in range(1, 6):
        os.write(terminal.handle, b"\x03")
        terminal.until(b"int %d" % n)
    os.kill(terminal.pid, signal.SIGUSR1)
    assert terminal.end() == 5
    assert b"True True True" in terminal.seen
    assert b"in all 5" in terminal.seen
    assert b"exit code 5; `stoker why run`" in terminal.seen
    assert b"\r\r\n" not in terminal.seen


@pytest.mark.slow
def test_a_new_size_of_the_terminal_reaches_the_job(tmp_path: Path) -> None:
    import fcntl
    import struct
    import termios

    code = "import os,sys\nfor line in sys.stdin: print(os.get_terminal_size(1).columns, 'wide', flush=True)"
    terminal = Terminal([*WATCH, *PYTHON, "print('ready', flush=True)\n" + code], tmp_path)
    terminal.until(b"ready")
    fcntl.ioctl(terminal.handle, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 77, 0, 0))
    for _ in range(1000):
        os.write(terminal.handle, b"\n")
        terminal.until(b"wide")
        if b"77 wide" in terminal.seen:
            break
        terminal.seen = b""
    os.write(terminal.handle, b"\x04")
    assert terminal.end() == 0
    assert re.search(rb"77 wide", terminal.seen)


PLAIN = """
import time
for step in range(1, 121):
    time.sleep(0.015)
    print(f"step {step} loss: {1 / step:.6f} lr: 0.1", flush=True)
"""
TORCH = """
import time, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 121):
    loss = (model(torch.ones(8, 4)) - 3).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    time.sleep(0.01)
    print(f"step {step} loss: {loss.item():.6f} lr: 0.1", flush=True)
"""


@pytest.mark.parametrize("script", [PLAIN, pytest.param(TORCH, marks=pytest.mark.slow)], ids=["plain", "torch"])
def test_a_foreign_training_is_recorded_and_explained(script: str, tmp_path: Path) -> None:
    (tmp_path / "my_train.py").write_text(script)
    done = watched([sys.executable, "my_train.py"], tmp_path)
    assert done.returncode == 0
    run = tmp_path / "run"
    windows = list(read_lines(run, STEPS, StepWindow))
    assert sum(window.window_steps for window in windows) == windows[-1].step == 120
    losses = [window.losses["total"] for window in windows if window.losses]
    assert losses[-1] < losses[0]
    assert windows[-1].lr == 0.1
    samples = list(read_lines(run, DEVICES, DeviceSample))
    rss_bytes = max(sample.rss_bytes or 0 for sample in samples)  # None after the job's end
    assert rss_bytes > 0
    assert (rss_bytes > 100 * 2**20) == (script is TORCH)  # the job's memory, not the watcher's
    environment = json.loads((run / ENVIRONMENT).read_bytes())
    assert environment["argv"] == [sys.executable, "my_train.py"]
    assert environment["cwd"] == str(tmp_path)

    why = subprocess.run([sys.executable, "-m", "stoker_watch", "why", "run"], cwd=tmp_path,
                         capture_output=True, text=True, check=True)  # fmt: skip
    assert "finished: my_train ended with exit code 0" in why.stdout
    inside = "inside the job: recorded: torch" if script is TORCH else "inside the job: not recorded"
    assert inside in " ".join(why.stdout.split())
    assert "0 images" not in why.stdout
    assert "trained 0 %" not in why.stdout
    assert "unattributed_time" not in [note.id for note in collect_notes(read_run(run), [])]
    report = collect(run)
    assert "loss/total" in report.curves
    assert "img_per_s" not in report.curves
    assert any("inside the job" in line for line in report.missing) == (script is PLAIN)


def test_the_run_of_a_training_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").touch()
    refused = watched(["true"], tmp_path)
    assert refused.returncode == 2
    assert b"--run-dir DIR" in refused.stderr


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python", "-u", "/a/model_main_tf2.py", "--x=y.py"], "model_main_tf2"),
        (["python", "-m", "torch.distributed.run", "x.py"], "torch.distributed.run"),
        (["/usr/bin/yolo", "train"], "yolo"),
        (["bash", "scripts/run_all.sh", "--fast"], "run_all"),
        (["bash", "-c", "exit 3"], "bash"),
        (["..."], "job"),
    ],
)
def test_a_run_is_named_after_its_job(command: list[str], name: str) -> None:
    assert job_name(command) == name


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- 2>&-"])
def test_the_run_is_held_after_a_kill_although_descriptors_were_closed(closed: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "end")
    job = ["sh", "-c", "touch begun; read -r _ <end"]
    with subprocess.Popen(["sh", "-c", f'exec "$@" {closed}', "sh", *WATCH, *job], cwd=tmp_path) as process:
        wait_until((tmp_path / "begun").exists)
        process.kill()
    assert is_held(tmp_path / "run")
    (tmp_path / "end").write_text("")
    wait_until(lambda: not is_held(tmp_path / "run"))


def test_the_relay_that_is_left_to_itself_is_no_warning(tmp_path: Path) -> None:
    done = watched(["true"], tmp_path, env={**os.environ, "PYTHONWARNINGS": "default"})
    assert b"ResourceWarning" not in done.stderr


@pytest.mark.slow
def test_one_stream_for_stdout_and_stderr_keeps_the_order(tmp_path: Path) -> None:
    code = "import os\nfor n in range(200): os.write(1 + n % 2, b'%d\\n' % n)"
    with started([*PYTHON, code], tmp_path) as process:
        out, _ = process.communicate(timeout=60)
    assert jobs_own(out).split() == [b"%d" % n for n in range(200)]


@pytest.mark.slow
def test_a_process_that_outlives_the_job_is_not_waited_for(tmp_path: Path) -> None:
    code = (
        "import os,sys\nif os.fork() == 0: sys.stdin.read(); print('late')\n"
        "else: print('early', flush=True); os._exit(4)"
    )
    process = started([*PYTHON, code], tmp_path)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.wait(60) == 4
    assert is_held(tmp_path / "run") is False
    process.stdin.close()
    assert jobs_own(process.stdout.read()) == b"early\nlate\n"
    process.stdout.close()
