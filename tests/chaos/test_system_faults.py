"""The rows of docs/faults.md about limits of the system, the kernel's OOM killer, read-only folders and cut uploads."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from stoker.training.checkpoint import is_complete, list_checkpoints
from stoker_watch.runs.records import EVENTS, QUARANTINE
from tests.chaos.harness import CgroupOfTest, Ended, assert_same_weights, cgroup, processes_of, small_disk, start, train
from tests.drawn import run_stoker
from tests.fixtures.chaos_faults import wait_for_checkpoint
from tests.fixtures.training_uploads import name_of
from tests.watch.storage.proxy import Conditions, Fault, Proxy
from tests.watch.storage.servers import google_server

pytestmark = pytest.mark.slow

STEP = "stoker.training.make_step:train_step"
FEW_DESCRIPTORS = 256
MEBIBYTE = 2**20


def wait_until_stopped(process: subprocess.Popen[str], folder: Path) -> None:
    """Until the fault "stop" has come, and the kernel has stopped the process: what continues it before is lost."""
    while process.poll() is None and not ((folder / "fault-time").exists() and has_stopped_process(process.pid)):
        time.sleep(0.01)
    assert process.poll() is None, process.communicate()[0]


def has_stopped_process(pid: int) -> bool:
    """Whether the process or one that it has started is stopped."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(map(is_stopped, [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]))
    return False


def is_stopped(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    return False


def test_strangers_at_the_metrics_port_take_no_descriptors(data: Path, undisturbed: Path, tmp_path: Path) -> None:
    """They open more idle connections than the process may have files, from before the first step on."""
    limit = [f"--nofile={FEW_DESCRIPTORS}:{FEW_DESCRIPTORS}"]
    process = start(data, tmp_path, "--metrics-port", "0", prefix=["prlimit", *limit])
    events, port = tmp_path / "run" / EVENTS, None
    while port is None and process.poll() is None:
        time.sleep(0.01)
        port = re.search(r'/metrics".*"port":(\d+)', events.read_text() if events.exists() else "")
    assert port is not None, process.communicate()[0]
    reader = Reader(process)
    held, num_closed = [connect(int(port[1])) for _ in range(2 * FEW_DESCRIPTORS)], 0
    while process.poll() is None:
        time.sleep(0.01)
        for number, stranger in enumerate(held):
            if is_closed(stranger):  # comes again
                stranger.close()
                held[number], num_closed = connect(int(port[1])), num_closed + 1
    for stranger in held:
        stranger.close()
    assert process.returncode == 0, reader.text()
    assert num_closed > 8, "the port is open, and takes no more"
    assert_same_weights(tmp_path / "run", undisturbed)


class Reader:
    """Reads the output of a process meanwhile: a full pipe would stop it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._lines: list[str] = []
        self._thread = threading.Thread(target=lambda: self._lines.extend(process.stdout or ()), daemon=True)
        self._thread.start()

    def text(self) -> str:
        self._thread.join()
        return "".join(self._lines)


def connect(port: int) -> socket.socket:
    """Does not wait: the kernel goes on trying."""
    stranger = socket.socket()
    stranger.setblocking(False)
    stranger.connect_ex(("127.0.0.1", port))
    return stranger


def is_closed(stranger: socket.socket) -> bool:
    try:
        return stranger.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def assert_names_the_limit(ended: Ended) -> None:
    assert ended.code == 1, ended.output
    assert "gives this process no more threads or processes" in ended.output
    assert "pids.max" in ended.output
    assert "cannot join thread" not in ended.output
    assert not (ended.run / QUARANTINE).exists(), "no image is to blame"


@pytest.mark.parametrize("number", [1, 2, 3, 4, 8])
def test_a_limit_of_threads_from_the_start(number: int, data: Path, undisturbed: Path, tmp_path: Path) -> None:
    with cgroup("pids") as group:
        (group.path / "pids.max").write_text(str(number))
        assert_names_the_limit(train(data, tmp_path, prefix=group.join))
    again = train(data, tmp_path)
    assert again.code == 0, again.output
    assert_same_weights(again.run, undisturbed)


@pytest.mark.parametrize(
    "flags", [(), ("--worker-processes", "1"), ("--restarts", "1")], ids=["plain", "workers", "restarts"]
)
def test_a_limit_of_threads_in_the_middle(
    flags: tuple[str, ...], data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """An evaluation starts threads; those that live stay."""
    with cgroup("pids") as group:
        process = start(
            data, tmp_path, *flags, prefix=group.join, chaos={"target": STEP, "call": 5, "fault": "stop", "attempt": 1}
        )
        wait_until_stopped(process, tmp_path)
        (group.path / "pids.max").write_text("1")
        for pid in (group.path / "cgroup.procs").read_text().split():
            os.kill(int(pid), signal.SIGCONT)
        output, _ = process.communicate(timeout=300)
    ended = Ended(process.returncode, output, tmp_path / "run")
    assert_names_the_limit(ended)
    assert any(map(is_complete, list_checkpoints(ended.run))), "the last good checkpoint stays"
    assert processes_of(tmp_path) == []
    again = train(data, tmp_path, *flags)
    assert again.code == 0, again.output
    assert "continuing from step 4" in again.output
    assert_same_weights(again.run, undisturbed)


def stopped_processes(group: CgroupOfTest) -> list[int]:
    return [pid for pid in map(int, (group.path / "cgroup.procs").read_text().split()) if is_stopped(pid)]


@pytest.mark.parametrize("restarts", [True, False], ids=["restarted", "the same command"])
def test_the_oom_killer(restarts: bool, data: Path, undisturbed: Path, tmp_path: Path) -> None:
    """A stranger in the cgroup takes more than what is left: the kernel kills the larger training."""
    flags = ("--restarts", "2") if restarts else ()
    with cgroup("memory") as group:
        chaos = {"target": STEP, "call": 9, "fault": "stop", "attempt": 1}
        process = start(data, tmp_path, *flags, prefix=group.join, chaos=chaos)
        wait_until_stopped(process, tmp_path)
        group.memory_limit.write_text(str(group.memory_used() + 64 * MEBIBYTE))
        eats = [sys.executable, "-c", f"bytearray(b'x') * {256 * MEBIBYTE}"]
        for _ in range(10):
            subprocess.run([*group.join, *eats], check=False)  # the kernel may kill it as well, or first
            if not stopped_processes(group):
                break
        group.memory_limit.write_text("max" if group.memory_limit.name == "memory.max" else "-1")
        output, _ = process.communicate(timeout=300)
        run = tmp_path / "run"
        assert process.returncode == (0 if restarts else -signal.SIGKILL), output
        _, why = run_stoker("why", run, cwd=tmp_path)
    assert processes_of(tmp_path) == []
    if restarts:
        assert "killed by SIGKILL (the kernel, out of memory)" in output
        assert "the kernel killed" in why
        assert "because of memory" in why
    else:
        assert "killed: the process ended without a final event" in why
        assert "whether the kernel killed it for memory" in why, "not known, and said"
        again = train(data, tmp_path)
        assert again.code == 0, again.output
        assert "continuing from step" in again.output
    assert_same_weights(run, undisturbed)


@contextlib.contextmanager
def disk_that_fails(folder: Path, image: Path) -> Iterator[None]:
    """ext4, which `fail` makes read-only as an I/O error would. Skips where it cannot be mounted."""
    folder.mkdir(exist_ok=True)
    if not image.exists():
        with image.open("wb") as file:
            file.truncate(3000 * MEBIBYTE)  # sparse; on a smaller one training is refused
        if subprocess.run(["mkfs.ext4", "-q", "-F", image], capture_output=True).returncode != 0:
            pytest.skip("no mkfs.ext4")
    mounted = subprocess.run(["mount", "-o", "loop,errors=remount-ro", image, folder], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"no disk image can be mounted: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def fail(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,abort", disk], check=True)


@pytest.mark.parametrize("stopped", [False, True], ids=["to the end", "SIGTERM"])
def test_a_disk_that_becomes_read_only(stopped: bool, data: Path, undisturbed: Path, tmp_path: Path) -> None:
    """Training goes on; its end is an error that names the folder. On the repaired disk the same command continues."""
    disk, image = tmp_path / "disk", tmp_path / "image"
    run = disk / "run"
    with disk_that_fails(disk, image):
        chaos = {"target": STEP, "call": 11, "fault": "stop"}
        process = start(data, tmp_path, "--run-dir", str(run), chaos=chaos)
        wait_until_stopped(process, tmp_path)
        fail(disk)
        if stopped:
            process.terminate()
        process.send_signal(signal.SIGCONT)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 3, output
        assert "Read-only file system" in output
        assert f"where:  {run}" in output
        assert "the folder writable" in output
        assert ("evaluated at step 18" in output) != stopped
        again = train(data, tmp_path, "--run-dir", str(run))
        assert again.code == 3, again.output
        assert str(run) in again.output
        assert_is_readable(run, tmp_path)
    with disk_that_fails(disk, image):
        newest = next(path for path in list_checkpoints(run) if is_complete(path))
        again = train(data, tmp_path, "--run-dir", str(run))
        assert again.code == 0, again.output
        assert f"continuing from step {int(newest.name.removeprefix('step-'))}" in again.output
        assert_same_weights(run, undisturbed, lost_events=True)


def assert_is_readable(run: Path, folder: Path) -> None:
    """`stoker why` and `stoker report` work on a read-only file system."""
    code, why = run_stoker("why", run, cwd=folder)
    assert code == 0, why
    assert "evidence: " in why
    code, output = run_stoker("report", run, cwd=folder)
    assert code == 3, output
    assert "--out" in output
    code, output = run_stoker("report", run, "--out", folder / "report.html", cwd=folder)
    assert code == 0, output
    assert (folder / "report.html").stat().st_size > 10_000


def test_a_folder_that_is_read_only_from_the_start(data: Path, undisturbed: Path, tmp_path: Path) -> None:
    """A new run, an empty folder, and an unfinished run."""
    disk = tmp_path / "disk"
    with small_disk(disk, "2200m"):
        process = start(data, disk)
        wait_for_checkpoint(process, disk / "run")
        process.kill()
        process.communicate()
        (disk / "empty").mkdir()
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        for name in ("run", "empty", "new"):
            ended = train(data, tmp_path, "--run-dir", str(disk / name))
            assert ended.code == 3, ended.output
            assert "The run's folder cannot be written." in ended.output
            assert str(disk / name) in ended.output
            assert "Read-only file system" in ended.output
        assert_is_readable(disk / "run", tmp_path)
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        again = train(data, disk)
        assert again.code == 0, again.output
        assert "continuing from step" in again.output
        assert_same_weights(again.run, undisturbed)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        assert_is_readable(disk / "run", tmp_path)


def test_sigterm_while_the_last_upload_is_cut(data: Path, undisturbed: Path, tmp_path: Path) -> None:
    """The training ends within the grace period that STOKER_GRACE_S states: long before the 120 s of a signal without
    one, which the message would name. The same command uploads the rest."""
    is_cut = threading.Event()

    def plan(_number: int, method: str, path: str) -> Fault | None:
        if method == "PUT" and name_of(path) == "final.safetensors":
            is_cut.set()
        return "reset" if is_cut.is_set() else None

    with google_server() as server:
        bucket = server.bucket()
        uri, name = f"{bucket.uri}/runs/x", bucket.uri.removeprefix("gs://")
        with bucket.through(Conditions(plan=plan)) as (place, proxy):
            env = {**place.environment, "STOKER_CACHE_DIR": str(tmp_path / "cache"), "STOKER_GRACE_S": "5"}
            process = start(data, tmp_path, "--run-dir", uri, env=env)
            while process.poll() is None and not is_cut.is_set():
                time.sleep(0.01)
            wait_for_requests(proxy, process)
            process.terminate()
            output, _ = process.communicate(timeout=300)
            assert process.returncode == 3, output
            (warning,) = re.findall(rf"warning: SIGTERM: {uri} has not yet (.*); uploading, at most (\d+) s", output)
            assert "final.safetensors" in warning[0]
            assert int(warning[1]) <= 5
            assert "not all of it reached the bucket" in output
            assert processes_of(tmp_path) == []
            uploaded = server.objects.buckets[name]
            assert "runs/x/final.safetensors" not in uploaded
            proxy.conditions = Conditions()
            again = train(data, tmp_path, "--run-dir", uri, env=env)
        assert again.code == 0, again.output
        assert "uploading the rest of the finished run" in again.output
        copy = tmp_path / "downloaded"
        for key, entry in server.objects.buckets[name].items():
            path = copy / key.removeprefix("runs/x/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(entry.data)
    assert_same_weights(copy, undisturbed)


def wait_for_requests(proxy: Proxy, process: subprocess.Popen[str]) -> None:
    """Until connections have been cut."""
    while process.poll() is None and sum(seen.fault == "reset" for seen in proxy.requests) < 2:
        time.sleep(0.01)
