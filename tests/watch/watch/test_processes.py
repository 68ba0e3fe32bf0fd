"""What /proc says of a job's processes: real ones."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from stoker_watch.recording import stacks
from stoker_watch.recording.telemetry.machine import list_process_tree, read_life
from stoker_watch.watch.recorder import JobProcesses

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def reader(code: str, folder: Path, *words: str, prefix: Sequence[str] = ()) -> "subprocess.Popen[bytes]":
    """A process that says `ready` and then waits for its stdin's end."""
    process = subprocess.Popen([*prefix, sys.executable, "-S", "-c", code + "\nimport sys\nprint('ready', flush=True)\n"
                                "sys.stdin.read()", *words], cwd=folder, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE)  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def test_a_process_that_ended_is_known_to_have(tmp_path: Path) -> None:
    job, other = reader("", tmp_path), subprocess.Popen(["sleep", "60"])
    assert job.pid in list_process_tree(os.getpid())
    assert (stacks.is_python(job.pid), stacks.is_python(other.pid)) == (True, False)
    life = read_life(job.pid)
    assert life is not None
    assert life.start_ticks > 0
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    assert read_life(other.pid) is None, "a zombie"
    other.wait()
    job.communicate()
    assert read_life(job.pid) is None


EMPTY = "a, b, c = open('empty.tfrecord'), open('full.tfrecord'), open('log.txt', 'w')"


def test_empty_inputs_are_those_that_are_read(tmp_path: Path) -> None:
    (tmp_path / "empty.tfrecord").touch()
    (tmp_path / "full.tfrecord").write_text("x")
    job = reader(EMPTY, tmp_path)
    tree = JobProcesses(job.pid)
    tree.poll()
    assert tree.empty_inputs() == [], "once may be by chance"
    tree.poll()
    assert tree.empty_inputs() == [str(tmp_path / "empty.tfrecord")]
    assert job.pid in tree.pids
    (tmp_path / "empty.tfrecord").write_text("no more")
    assert tree.empty_inputs() == []
    job.communicate()
    assert tree.empty_inputs() == []


def test_an_input_that_is_empty_only_for_the_watcher_is_not_empty(tmp_path: Path) -> None:
    """The job reads another file at the same path in its mount namespace."""
    (tmp_path / "a").touch()
    (tmp_path / "full").write_text("x")
    unshare = ["unshare", "--map-root-user", "--mount", "sh", "-c", 'mount --bind full a && exec "$@"', "sh"]
    if subprocess.run([*unshare, "true"], cwd=tmp_path, check=False, capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    job = reader("a = open('a')", tmp_path, prefix=unshare)
    tree = JobProcesses(job.pid)
    tree.poll()
    tree.poll()
    assert tree.empty_inputs() == []
    job.communicate()


def test_kills_are_counted_where_the_kernel_counts(tmp_path: Path) -> None:
    job = reader("", tmp_path)
    tree = JobProcesses(job.pid)
    tree.poll()
    assert tree.oom_kills() in (0, None)
    job.communicate()
