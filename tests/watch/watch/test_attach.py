"""`stoker watch --pid N` on real processes: how they end, what is read of them, whom it refuses."""

import contextlib
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from stoker_watch.diagnosis.postmortem import explain
from stoker_watch.diagnosis.reader import read_run
from stoker_watch.diagnosis.termination import boot_id, is_held
from stoker_watch.errors import UsageError
from stoker_watch.report.explain import explain_run
from stoker_watch.runs.records import (
    DEVICES,
    EVENTS,
    OUTPUT,
    STEPS,
    RunFolder,
    read_lines,
)
from stoker_watch.runs.schemas import DeviceSample, Event, StepWindow
from stoker_watch.watch import recorder
from stoker_watch.watch import watch as attach_module
from stoker_watch.watch.output_relay import RotatingLog
from stoker_watch.watch.recorder import JobRecorder, open_run_folder
from stoker_watch.watch.watch import attach, copy_output, read_exit_code

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="`stoker watch` is for Linux")


def events(run: Path) -> list[Event]:
    return list(read_lines(run, EVENTS, Event))


@contextlib.contextmanager
def when_begun(run: Path, do: Callable[[], object]) -> Iterator[None]:
    """Does something as soon as the run's folder has its first event."""

    def wait() -> None:
        for _ in range(3000):
            if (run / EVENTS).exists() and events(run):
                break
            time.sleep(0.01)
        do()

    thread = threading.Thread(target=wait)
    thread.start()
    yield
    thread.join()


def foreign_process(code: str, folder: Path, output: str = "") -> tuple["subprocess.Popen[bytes]", int]:
    """(its parent, which reaps it; a process that is not ours to wait for). It ends when the parent's stdin does."""
    command = f"exec {output} sh -c 'echo $$ >&3; read x <&4; {code}' 3>&3 4<&4"
    parent = subprocess.Popen(["sh", "-c", f"exec 3>&1 4<&0; ({command}) & wait $!; exit 0"], cwd=folder,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


@pytest.mark.parametrize(
    ("end", "code", "kind", "data"),
    [
        ("exit 0", 0, "finished", {"exit_code": 0}),
        ("exit 7", 7, "failed", {"exit_code": 7}),
        ("kill -KILL $$", 137, "failed", {"exit_code": 137, "signal": 9}),
    ],
)
def test_the_end_of_a_foreign_process(end: str, code: int, kind: str, data: dict[str, int], tmp_path: Path) -> None:
    parent, pid = foreign_process(end, tmp_path)
    run = tmp_path / "run"
    with when_begun(run, parent.communicate):
        assert attach(pid, str(run)) == code
    first, *_, last = events(run)
    assert first.data["job"]["pid"] == pid
    assert first.data["coverage"]["output"].startswith("not recorded: its stdout is not a file but pipe:[")
    assert last.kind == kind
    assert {name: last.data[name] for name in data} == data
    assert not (run / OUTPUT).exists()
    assert explain_run(run).state == kind


def start_ticks_of(pid: int) -> int:
    """Also of a process that has ended and is not reaped."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_sources_of_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(["sh", "-c", "exit 9"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    start_ticks = start_ticks_of(child.pid)
    ended = attach_module.AttachedProcess(child.pid, os.pidfd_open(child.pid), ["sh"], "/", start_ticks)
    monkeypatch.setattr(attach_module, "EXIT_CODE_TIMEOUT_S", 0.0)
    told = attach_module._GET_INFO
    assert read_exit_code(ended) == 9, "it has not been waited for: /proc says so"
    child.wait()
    if tuple(map(int, re.findall(r"\d+", platform.release())[:2])) >= (6, 15):
        assert read_exit_code(ended) == 9, "the kernel keeps it for the pidfd"
    monkeypatch.setattr(attach_module, "_GET_INFO", 0)  # an unknown request, as to an older kernel
    assert read_exit_code(ended) is None
    monkeypatch.setattr(attach_module, "_GET_INFO", told)
    os.close(ended.pidfd)


def test_an_unknown_exit_code_is_not_a_failure(tmp_path: Path) -> None:
    with open_run_folder(str(tmp_path), ["train"], environment={"gpu": {"gpus": []}}) as (folder, _):
        JobRecorder(folder, ["train"]).write_end(None)
        (tmp_path / OUTPUT).write_text("step 9\n")
    ended = read_run(tmp_path).termination
    assert ended is not None
    assert ended.exit_code is None
    assert [(finding.id, finding.severity) for finding in explain(ended)] == [("exit_code_unknown", "info")]
    (tmp_path / OUTPUT).write_text("OSError: [Errno 28] No space left on device\n")
    ended = read_run(tmp_path).termination
    assert ended is not None
    assert explain(ended)[0].id == "disk_full"


PRINTS = "for n in 1 2 3 4 5; do echo step $n loss: 0.$n; done"


def test_an_output_that_is_a_file_is_read_from_now_on_and_keeps_its_context(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text("step 900 loss: 9.0\n")
    parent, pid = foreign_process(f"{PRINTS}; exit 3", tmp_path, output=f">>{log} 2>&1")
    run = tmp_path / "run"
    with when_begun(run, parent.communicate):
        assert attach(pid, str(run)) == 3
    windows = list(read_lines(run, STEPS, StepWindow))
    assert (sum(window.window_steps for window in windows), windows[-1].step) == (5, 5)
    assert (run / OUTPUT).read_bytes() == log.read_bytes()
    assert str(log) in events(run)[0].data["coverage"]["output"]
    ended = read_run(run).termination
    assert ended is not None
    assert ended.output[0].text == "step 900 loss: 9.0"


def test_a_long_file_a_new_line_and_a_file_that_is_emptied(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_bytes(b"x" * 99 + b"\n" + (b"y" * 99 + b"\n") * 1000)
    with path.open("ab") as writer, path.open("rb") as reader:
        output = copy_output([reader], RotatingLog(str(tmp_path / "kept.log")))
        kept = (tmp_path / "kept.log").read_bytes()
        assert 64_000 < len(kept) <= attach_module.CONTEXT_BYTES
        assert kept.startswith(b"y" * 99 + b"\n")
        assert list(output()) == []
        writer.write(b"new\n")
        writer.flush()
        assert b"".join(output()) == b"new\n"
        path.write_bytes(b"")
        writer.write(b"again\n")
        writer.flush()
        assert b"".join(output()).strip(b"\0") == b"again\n"
    assert (tmp_path / "kept.log").read_bytes() == kept + b"new\nagain\n"


def test_ctrl_c_ends_the_watching_and_not_the_job(tmp_path: Path) -> None:
    parent, pid = foreign_process("exit 0", tmp_path)
    run = tmp_path / "run"
    before = signal.getsignal(signal.SIGINT)

    def press_ctrl_c() -> None:
        while signal.getsignal(signal.SIGINT) is before:  # until the watcher handles it
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    with when_begun(run, press_ctrl_c):
        assert attach(pid, str(run)) == 0
    assert signal.getsignal(signal.SIGINT) is before
    assert events(run)[-1].text.endswith("is no longer watched; it is still running")
    assert is_held(run, read_run(run).events.job) is True
    assert read_run(run).termination is None, "it lives"
    assert explain_run(run).state == "running"
    parent.communicate()
    assert is_held(run, read_run(run).events.job) is False
    assert read_run(run).endings == ()
    explanation = explain_run(run)
    assert explanation.state == "unknown"
    assert re.fullmatch(r"unknown: watched until .* UTC, .* its end was not seen", explanation.state_text)
    assert not [finding for finding in explanation.findings if finding.severity != "info"]


def test_a_live_job_that_spins_on_an_empty_file_gets_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "EMPTY_INPUT_WARNING_S", 0.1)
    monkeypatch.setattr(recorder, "PROCESS_POLL_S", 0.02)
    empty = tmp_path / "train-00003.tfrecord"
    empty.touch()
    parent, pid = foreign_process("exit 0", tmp_path, output=f"5<{empty}")
    run = tmp_path / "run"

    def warned() -> bool:
        return any(event.data.get("empty_inputs") == [str(empty)] for event in events(run) if event.kind == "warning")

    def end() -> None:
        for _ in range(1000):
            if warned():
                break
            time.sleep(0.01)
        parent.communicate()

    with when_begun(run, end):
        assert attach(pid, str(run)) == 0
    assert warned()
    assert events(run)[-1].data["empty_inputs"] == [str(empty)]


def test_a_reused_pid_is_another_process(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    start_ticks = start_ticks_of(os.getpid())
    job = {"pid": os.getpid(), "start_ticks": start_ticks, "boot": boot_id()}
    folder = RunFolder(tmp_path, 1)
    for changed, lives in (({}, True), ({"start_ticks": start_ticks + 1}, False), ({"boot": "another"}, False)):
        folder.event("resumed", job={**job, **changed})
        assert is_held(tmp_path, read_run(tmp_path).events.job) is lives
    folder.close()


def test_processes_that_are_refused() -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    thread = threading.Thread(target=time.sleep, args=(60,), daemon=True)
    thread.start()
    for pid, what in (
        (0, "There is no process 0."),
        (2**22 + 1, "There is no process 4194305."),
        (thread.native_id, f"There is no process {thread.native_id}."),
        (os.getpid(), "is stoker itself."),
        (os.getppid(), "is an ancestor of stoker."),
        (child.pid, "has already ended."),
    ):
        assert pid is not None
        with pytest.raises(UsageError, match=what):
            attach(pid)
    child.wait()


def test_a_process_that_ends_during_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(process: psutil.Process) -> str:
        raise psutil.NoSuchProcess(process.pid)

    parent, pid = foreign_process("exit 0", tmp_path)
    monkeypatch.setattr(psutil.Process, "cwd", ended)
    with pytest.raises(UsageError, match=rf"^Process {pid} has just ended\.$"):
        attach(pid)
    parent.communicate()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_process_of_another_user_is_refused(tmp_path: Path) -> None:
    parent, pid = foreign_process("exit 0", tmp_path)
    os.seteuid(65534)
    try:
        with pytest.raises(UsageError, match=f"Process {pid} belongs to user 0"):
            attach(pid, str(tmp_path / "run"))
    finally:
        os.seteuid(0)
    parent.communicate()


@pytest.mark.slow
def test_the_command_records_processors_and_memory_of_the_job(tmp_path: Path) -> None:
    code = "import time\nx = bytearray(300 * 2**20)\nend = time.time() + 6\nwhile time.time() < end: pass"
    process = subprocess.Popen([sys.executable, "-c", code])
    watch = [sys.executable, "-m", "stoker_watch", "watch", "--pid", str(process.pid), "--run-dir", "run"]
    done = subprocess.run(watch, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)  # fmt: skip
    assert process.wait() == 0
    assert done.returncode == 0
    assert done.stdout == ""
    assert "Ctrl-C ends the recording, not the job" in done.stderr
    samples = list(read_lines(tmp_path / "run", DEVICES, DeviceSample))
    assert max(sample.rss_bytes or 0 for sample in samples) > 300 * 2**20
    assert max(sample.process_cpu or 0.0 for sample in samples) > 0.2
