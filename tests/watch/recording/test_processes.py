"""A tree of processes: of files as the kernel shows them, and real ones."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stoker_watch.recording.telemetry.host import THREADS_PER_SAMPLE, ProcessTreeSampler, max_open_fds
from stoker_watch.recording.telemetry.machine import list_process_tree, read

linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system has no /proc")


def put(proc: Path, pid: int, *, threads: dict[int, int], children: str = "", times: str = "0 0 0 0", pages: int = 0,
        name: str = "a) b") -> None:  # fmt: skip
    """A process as /proc shows it; threads: nanoseconds that each ran."""
    folder = proc / str(pid)
    for thread, ran_ns in threads.items():
        (folder / "task" / str(thread)).mkdir(parents=True, exist_ok=True)
        (folder / "task" / str(thread) / "schedstat").write_text(f"{ran_ns} 0 5\n")
        (folder / "task" / str(thread) / "children").write_text(children if thread == pid else "")
    (folder / "stat").write_text(
        f"{pid} ({name}) S 1 1 1 0 -1 4194304 9 9 9 9 {times} 20 0 {len(threads)} 0 99 5000000 {pages} 184467\n"
    )


def test_a_tree_of_files_is_summed(tmp_path: Path) -> None:
    """Of a process with a blank and a bracket in its name, its children, and one that ended meanwhile."""
    put(tmp_path, 10, threads={10: 0, 11: 0}, children="20 30 99", times="100 20 3 4", pages=5)
    put(tmp_path, 20, threads={20: 0}, times="1000 0 0 0", pages=7)
    put(tmp_path, 30, threads={30: 0}, pages=11)
    cpu_s, told = ProcessTreeSampler(10, tmp_path).sample(0.0)
    assert cpu_s == 1127 / os.sysconf("SC_CLK_TCK")
    assert told["rss_bytes"] == (5 + 7 + 11) * os.sysconf("SC_PAGE_SIZE")
    assert "threads_running" not in told, "this kernel keeps no such times"
    assert list_process_tree(10, tmp_path) == [10, 20, 30, 99]


def test_of_a_process_that_is_gone_nothing_is_known(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("cpu 1 1")
    assert ProcessTreeSampler(10, tmp_path).sample(0.0) == (None, {})


def test_threads_that_run_are_a_mean_over_the_time_between(tmp_path: Path) -> None:
    put(tmp_path, 10, threads={10: 10**9, 11: 5 * 10**9})
    processes = ProcessTreeSampler(10, tmp_path)
    assert "threads_running" not in processes.sample(100.0)[1]
    put(tmp_path, 10, threads={10: 2 * 10**9, 11: 5 * 10**9, 12: 10**9})
    _, told = processes.sample(102.0)
    assert (told["threads_running"], told["threads_active"]) == (1.0, 2)
    put(tmp_path, 10, threads={10: 3 * 10**9, 11: 5 * 10**9 + 10**6, 12: 10**9 + 20 * 10**6})
    assert processes.sample(104.0)[1]["threads_active"] == 2, "one ran for a millisecond, which is a wake-up"


def test_cores_that_computing_threads_are_bound_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher may use all, and polls; two ranks are bound to one core, a third thread of them to another one."""

    def allow(pid: int, thread: int, cores: str) -> None:
        for folder in (tmp_path / str(pid), tmp_path / str(pid) / "task" / str(thread)):
            (folder / "status").write_text(f"Name:\tpython\nCpus_allowed:\tf\nCpus_allowed_list:\t{cores}\n")

    def bound(seconds: dict[int, float]) -> tuple[int, int] | None:
        put(tmp_path, 10, threads={10: round(seconds[10] * 1e9)}, children="20 30")
        put(tmp_path, 20, threads={20: round(seconds[20] * 1e9)})
        put(tmp_path, 30, threads={30: round(seconds[30] * 1e9)})
        _, told = processes.sample(seconds[0])
        return (told["bound_cores"], told["unbound_cores"]) if "bound_cores" in told else None

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    processes = ProcessTreeSampler(10, tmp_path)
    assert bound({0: 0, 10: 1, 20: 1, 30: 1}) is None
    for pid, cores in ((10, "0-3,8"), (20, "2"), (30, "2")):
        allow(pid, pid, cores)
    assert bound({0: 10, 10: 1.2, 20: 6, 30: 6}) == (1, 5)
    allow(30, 30, "0-1")
    assert bound({0: 20, 10: 1.4, 20: 11, 30: 11}) == (3, 5)
    assert bound({0: 30, 10: 9, 20: 16, 30: 16}) is None, "the first process computes, too"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    processes = ProcessTreeSampler(10, tmp_path)
    assert bound({0: 40, 10: 9, 20: 16, 30: 16}) is None
    assert bound({0: 50, 10: 18, 20: 16, 30: 16}) == (5, 6), "the whole job is bound, and what watches it is not"


@pytest.mark.parametrize("threads", [1, THREADS_PER_SAMPLE, 10 * THREADS_PER_SAMPLE])
def test_the_price_of_a_sample_does_not_grow_with_the_threads(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, 1, threads=dict.fromkeys(range(1, threads + 1), 1))
    processes = ProcessTreeSampler(1, tmp_path)
    walks: list[float] = []
    walk = ProcessTreeSampler._walk
    monkeypatch.setattr(ProcessTreeSampler, "_walk", lambda self, now_s: (walks.append(now_s), walk(self, now_s)))
    samples = 40
    for number in range(samples):
        processes.sample(float(number))
    assert len(walks) * threads <= samples * THREADS_PER_SAMPLE
    assert len(walks) == samples // max(1, threads // THREADS_PER_SAMPLE), "and no less often than that allows"


@contextmanager
def started(code: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process
        process.stdin.close()


def test_memory_of_grandchildren_counts() -> None:
    """A child that only starts a grandchild, which holds 64 MiB and says so."""
    grandchild = "import sys; held = b'x' * 2**26; print('ready', flush=True); sys.stdin.read()"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    before = ProcessTreeSampler(os.getpid()).sample(0.0)[1]["rss_bytes"]
    with started(child):
        during = ProcessTreeSampler(os.getpid()).sample(0.0)[1]["rss_bytes"]
    assert before is not None
    assert during is not None
    assert during - before > 2**26


@linux
def test_lists_that_are_longer_than_a_page_are_read_to_their_end() -> None:
    """The kernel gives a page at a time; the list of this process's mappings has many, and hardly changes."""
    maps = read("/proc/self/maps")
    assert len(maps) > 16384
    assert len(maps) == pytest.approx(len(Path("/proc/self/maps").read_bytes()), abs=4000)


@linux
def test_open_files_of_a_real_process() -> None:
    hold = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (500, 500))\n"
    hold += (
        "held = [os.open('/dev/null', os.O_RDONLY) for _ in range(200)]; print('ready', flush=True); sys.stdin.read()"
    )
    with started(hold) as process:
        (count, limit), (most, _) = max_open_fds([process.pid]), max_open_fds([os.getpid(), process.pid])
    assert count is not None
    assert 200 < count < 220
    assert limit == 500
    assert most is not None
    assert most >= count, "of the fullest, which need not be the first"
    assert max_open_fds([process.pid]) == (None, None), "it has ended"
