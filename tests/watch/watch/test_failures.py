"""Jobs that really die under `stoker watch`, started by it or attached to; what `stoker why` finds. Where this machine
does not permit a way to die, the test says which."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker_watch.diagnosis import end_facts
from stoker_watch.diagnosis.engine import diagnose
from stoker_watch.diagnosis.reader import read_run
from stoker_watch.findings.finding import Finding
from stoker_watch.runs.records import EVENTS, OUTPUT, STEPS, read_lines
from stoker_watch.runs.schemas import Event, StepWindow

pytestmark = [
    pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="`stoker watch` is for Linux")
]  # fmt: skip

WATCH = [sys.executable, "-m", "stoker_watch", "watch", "--run-dir", "run"]
TRAIN = """
import os, sys, time
kept = []
for step in range(1, 10**6):
    time.sleep(0.02)
    print(f"step {step} loss: {1 / step:.6f}", flush=True)
    THEN
"""
EATS = TRAIN.replace("THEN", "kept.append(bytearray(2**20 if os.path.exists('eat') else 0))")
PARENT = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-u', 'train.py']).returncode and 1)"


def script(folder: Path, code: str) -> list[str]:
    (folder / "train.py").write_text(code)
    return [sys.executable, "-u", "train.py"]


def begun(run: Path) -> bool:
    return (run / STEPS).exists() and any(window.window_steps for window in read_lines(run, STEPS, StepWindow))


def until(what: Iterator[bool]) -> None:
    for is_so in what:
        if is_so:
            return
        time.sleep(0.02)
    raise AssertionError("did not happen")


def job_below(watcher: int) -> int:
    """The child that is no relay."""
    children = map(int, Path(f"/proc/{watcher}/task/{watcher}/children").read_text().split())
    return next(c for c in children if b"\0train.py\0" in Path(f"/proc/{c}/cmdline").read_bytes())


def first(folder: Path) -> Finding:
    return diagnose(folder / "run")[0]


def said(finding: Finding) -> str:
    return "\n".join(evidence.text for evidence in finding.evidence)


@pytest.fixture(params=["started", "attached"])
def watched(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator["Watched"]:
    made = Watched(tmp_path, attach=request.param == "attached")
    yield made
    made.close()


class Watched:
    """A job and its watcher. attach: the job runs first, its output in a file."""

    def __init__(self, folder: Path, *, attach: bool) -> None:
        self.folder, self._attach = folder, attach
        self._job = 0
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, command: list[str], **options: object) -> None:
        quiet = {"cwd": self.folder, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        if self._attach:
            with (self.folder / "job.log").open("wb") as log:
                job = subprocess.Popen(command, **{**quiet, "stdout": log, "stderr": log}, **options)  # type: ignore[call-overload]
            command, self._job = [*WATCH, "--pid", str(job.pid)], job.pid
            self._processes.append(job)
        else:
            command = [*WATCH, "--", *command]
        self._processes.append(subprocess.Popen(command, **quiet))  # type: ignore[call-overload]
        until(begun(self.folder / "run") for _ in range(1500))

    def kill(self, number: signal.Signals) -> None:
        os.kill(self._job or job_below(self._processes[-1].pid), number)

    def end(self) -> None:
        for process in self._processes:
            process.wait(60)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("number", "cause"), [(signal.SIGKILL, "killed"), (signal.SIGTERM, "preempted"), (signal.SIGSEGV, "crashed")]
)
def test_signals(watched: Watched, number: signal.Signals, cause: str) -> None:
    watched.start(script(watched.folder, TRAIN.replace("THEN", "")))
    watched.kill(number)
    watched.end()
    finding = first(watched.folder)
    assert finding.id == cause
    assert f"ended by {number.name}" in said(finding)


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup of 100 MB: version 1 as here, or 2."""
    for top, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        folder = Path(top) / f"stoker-test-{os.getpid()}"
        try:
            folder.mkdir()
            (folder / limit).write_text("100000000")
        except OSError:
            continue
        yield folder
        until(not (folder / "cgroup.procs").read_text() for _ in range(500))
        folder.rmdir()
        return
    pytest.skip("no memory cgroup may be made here")


@pytest.mark.parametrize("who", ["all", "child"])
def test_the_kernel_kills_at_the_memory_limit(watched: Watched, cgroup: Path, who: str) -> None:
    command = script(watched.folder, EATS)
    if who == "child":
        command = [sys.executable, "-c", PARENT]
    watched.start(["sh", "-c", f"echo $$ > {cgroup}/cgroup.procs; exec {shlex.join(command)}"])
    (watched.folder / "eat").touch()
    watched.end()
    finding = first(watched.folder)
    assert finding.id == "oom_killed"
    last = list(read_lines(watched.folder / "run", EVENTS, Event))[-1]
    assert last.data["oom_kills"] >= 1
    assert last.data["exit_code"] == (137 if who == "all" else 1)


def test_a_small_shared_memory_is_a_bus_error(tmp_path: Path) -> None:
    mount = "mount -t tmpfs -o size=64k none /dev/shm && exec"
    code = (
        "import mmap, os, subprocess\nprint('step 1 loss: 0.5', flush=True)\n"
        "f = os.open('/dev/shm/x', os.O_RDWR | os.O_CREAT)\n"
        "os.ftruncate(f, 2**20); m = mmap.mmap(f, 2**20)\nimport time\n"
        "for n in range(2**20):\n"
        "    m[n] = 1\n"
        "    if n == 65000:\n"
        "        time.sleep(3)\n"
        "        subprocess.Popen(['sleep', '5'])\n"  # keeps the output open: samples are taken after the job's end
    )
    command = script(tmp_path, code)
    inside = ["unshare", "-m", "sh", "-c", f"{mount} {' '.join([*WATCH, '--', *command])}"]
    done = subprocess.run(inside, cwd=tmp_path, capture_output=True, check=False)
    if not (tmp_path / "run").exists():
        pytest.skip(f"no mount namespace may be made here: {done.stderr.decode().strip()}")
    assert first(tmp_path).id == "shared_memory_full"


def test_a_full_disk(tmp_path: Path) -> None:
    command = script(tmp_path, TRAIN.replace("THEN", "open('/dev/full', 'w').write('x' * 10**5) if step == 80 else 0"))
    assert subprocess.run([*WATCH, "--", *command], cwd=tmp_path, capture_output=True, check=False).returncode == 1
    finding = first(tmp_path)
    assert finding.id == "disk_full"
    assert finding.evidence[0].text == "OSError: [Errno 28] No space left on device"


def test_a_job_that_stood_still(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    watched.start(script(watched.folder, TRAIN.replace("THEN", "")))
    watched.kill(signal.SIGSTOP)
    log = watched.folder / "run" / OUTPUT
    size = -1
    while size != (size := log.stat().st_size):
        time.sleep(0.5)
    time.sleep(7.0)  # the time that it stands is what is looked for
    watched.kill(signal.SIGKILL)
    watched.end()
    assert first(watched.folder).id == "killed", "too short to say so"
    monkeypatch.setattr(end_facts, "MIN_HANG_S", 2.0)
    assert first(watched.folder).id == "hang"


def test_a_job_that_spins_on_an_empty_file(tmp_path: Path) -> None:
    """As TensorFlow's record reader does on a shard of zero bytes."""
    (tmp_path / "train-00003.tfrecord").touch()
    spins = (
        "print('step 1 loss: 0.5', flush=True)\n"
        "while True:\n"
        "    with open('train-00003.tfrecord') as f:\n"
        "        any(f.read() for _ in range(10**5))"
    )
    command = script(tmp_path, spins)
    watcher = subprocess.Popen([*WATCH, "--", *command], cwd=tmp_path, stdout=subprocess.DEVNULL)
    until(begun(tmp_path / "run") for _ in range(1500))
    time.sleep(10)  # several looks at its files
    os.kill(job_below(watcher.pid), signal.SIGKILL)
    watcher.wait()
    ended = read_run(tmp_path / "run").termination
    assert ended is not None
    assert ended.empty_inputs == (str(tmp_path / "train-00003.tfrecord"),)
