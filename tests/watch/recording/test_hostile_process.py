"""A process whose stacks are read may have forged its memory, its files and its names: a sample of it ends, and what it
reads and keeps is bounded."""

import contextlib
import itertools
import os
import random
import shutil
import struct
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker_watch.recording import frames, remote_stacks, stacks
from stoker_watch.recording.calls import read_source_lines
from stoker_watch.recording.frames import Frame
from stoker_watch.recording.remote_stacks import EndedError, RemoteStacks, UnreadableError, find_symbol
from stoker_watch.recording.telemetry import sampler
from stoker_watch.recording.telemetry.host import OtherProcesses
from stoker_watch.runs.records import STACKS, RunFolder, read_lines
from stoker_watch.runs.schemas import StackWindow
from stoker_watch.watch import watch
from tests.bounded import bounded

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="`stoker watch` is for Linux")
MIB = 1 << 20
OWN = sys.version_info[:2]


class Forged:
    """What reads `memory` in place of that of a process, with a clock on which each look takes 0.1 ms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, memory: bytes = b"", *, size: int = 0) -> None:
        looks, self.read_bytes, self.reads = itertools.count(), 0, 0
        self.reader = RemoteStacks(os.getpid(), cpu_clock=lambda: next(looks) * 1e-4)
        os.close(self.reader._memory)
        self.reader._memory = self.fd = os.memfd_create("forged")
        os.write(self.fd, memory)
        os.truncate(self.fd, max(size, len(memory)))
        self.reader._runtime = 0
        pread = os.pread

        def counted(fd: int, size: int, offset: int) -> bytes:
            found = pread(fd, size, offset)
            self.read_bytes, self.reads = self.read_bytes + len(found), self.reads + 1
            return found

        monkeypatch.setattr(remote_stacks.os, "pread", counted)

    def put(self, address: int, word: int) -> None:
        os.pwrite(self.fd, struct.pack("<Q", word), address)

    def sample(self) -> None:
        self.read_bytes = self.reads = 0
        with contextlib.suppress(UnreadableError, EndedError):
            self.reader.read()
        assert self.read_bytes <= 100 * MIB
        assert self.reads <= 50_000


@pytest.fixture
def forged(monkeypatch: pytest.MonkeyPatch) -> Iterator[Forged]:
    found = Forged(monkeypatch, size=3 << 30)
    yield found
    found.reader.close()


@pytest.mark.parametrize("version", remote_stacks.LAYOUTS, ids=str)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), pages=st.integers(1, 32))
def test_random_memory_ends_and_is_read_within_bounds(version: tuple[int, int], seed: int, pages: int) -> None:
    """Words are addresses in the same memory, small numbers or anything, so that lists are rings and trees."""
    chance, size = random.Random(seed), pages * 4096
    code_type = int.from_bytes(b"code\0\0\0\0", "little")
    kinds = (lambda: chance.randrange(size) & ~7, lambda: chance.randrange(size) & ~7, lambda: chance.randrange(9),
             lambda: chance.getrandbits(64), lambda: code_type)  # fmt: skip
    words = [chance.choice(kinds)() for _ in range(size // 8)]
    with pytest.MonkeyPatch.context() as patch:
        found = Forged(patch, struct.pack(f"<{len(words)}Q", *words))
        found.reader.version, found.reader._layout = version, remote_stacks.LAYOUTS[version]
        found.reader._read_frame, found.reader._code_index = remote_stacks._frame_reader(found.reader._layout)
        with bounded(seconds=60, megabytes=512):
            for _ in range(3):
                found.sample()
        found.reader.close()


@pytest.mark.parametrize("version", [(3, 13), (3, 14)], ids=str)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), pages=st.integers(1, 8), largest=st.sampled_from((64, 512, 4096, 2**20, 2**64)))
def test_random_offsets_end_and_are_read_within_bounds(
    version: tuple[int, int], seed: int, pages: int, largest: int
) -> None:
    """From Python 3.13 on the memory itself says where things are in it."""
    chance, size = random.Random(seed), pages * 4096
    offsets = [chance.randrange(largest) & ~7 for _ in range(47)]
    words = [chance.choice((chance.randrange(size) & ~7, chance.randrange(9))) for _ in range(size // 8 - 49)]
    with pytest.MonkeyPatch.context() as patch:
        found = Forged(patch, struct.pack(f"<8s{48 + len(words)}Q", b"xdebugpy", 0, 0, *offsets[:46], *words))
        found.reader.version = version
        with bounded(seconds=60, megabytes=512), contextlib.suppress(UnreadableError, struct.error):
            found.reader._layout = found.reader._find_layout()
            found.reader._read_frame, found.reader._code_index = remote_stacks._frame_reader(found.reader._layout)
            for _ in range(3):
                found.sample()
        found.reader.close()


def test_a_ring_of_interpreters_ends(forged: Forged) -> None:
    layout = forged.reader._layout
    forged.put(layout.interpreters, 0x10000)
    forged.put(0x10000 + layout.next_interpreter, 0x10000)
    with bounded(seconds=60):
        assert forged.reader.read() == {}


@pytest.mark.skipif(OWN < (3, 11), reason="frames are objects")
def test_threads_with_a_megabyte_each_are_given_up(forged: Forged) -> None:
    """2,000 threads in a ring or in a row, each with a piece of memory of its own."""
    layout, start = forged.reader._layout, 1 << 28
    forged.put(layout.interpreters, 0x10000)
    forged.put(0x10000 + layout.threads, start)
    for number in range(2000):
        thread, chunk = start + 4096 * number, (1 << 29) + (number << 20)
        forged.put(thread + layout.next_thread, thread + 4096)
        forged.put(thread + layout.chunk, chunk)
        frame = chunk + MIB - 512
        if layout.cframe >= 0:
            forged.put(thread + layout.frame, thread + 1024)
            forged.put(thread + 1024 + layout.cframe, frame)
        else:
            forged.put(thread + layout.frame, frame)
    with bounded(seconds=60, megabytes=256):
        forged.sample()
        with pytest.raises(UnreadableError, match="too much memory or time"):
            forged.reader.read()


def test_time_alone_ends_a_sample(forged: Forged) -> None:
    forged.put(forged.reader._layout.interpreters, 0x10000)
    forged.reader._cpu_clock = itertools.count().__next__
    with pytest.raises(UnreadableError, match="too much memory or time"):
        forged.reader.read()


def elf(path: Path, names_bytes: int) -> Path:
    """A library with two tables, of symbols and of names, whose ends are far beyond what it has, as a sparse file."""
    head = struct.pack("<4sBB10xHHIQQQIHHHHHH", b"\x7fELF", 2, 1, 3, 62, 1, 0, 0, 64, 0, 64, 56, 0, 64, 2, 0)
    table = struct.pack("<4xI16xQQI20x", 2, 4096, names_bytes, 1) + struct.pack(
        "<4xI16xQQI20x", 3, 4096, names_bytes, 0
    )
    path.write_bytes(head + table)
    os.truncate(path, names_bytes)
    return path


def test_a_sparse_library_is_read_within_bounds(tmp_path: Path) -> None:
    with bounded(seconds=60, megabytes=128):
        assert find_symbol(str(elf(tmp_path / "libpython3.11.so", 4 << 30)), "_PyRuntime") is None


def test_a_library_or_a_source_that_is_a_fifo_is_none(tmp_path: Path) -> None:
    fifo, large = tmp_path / "libpython3.11.so", tmp_path / "train.py"
    os.mkfifo(fifo)
    large.touch()
    os.truncate(large, 1 << 32)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(find_symbol(str(fifo), "_PyRuntime")), daemon=True)
    thread.start()
    thread.join(60)
    assert found == [None], "it waits for a writer of the FIFO"
    with bounded(seconds=20, megabytes=64):
        for file in (str(fifo), str(large), "/dev/zero", "/a\0b"):
            assert read_source_lines(file) == []
        assert frames._kind_from_source_line(Frame("f", str(fifo), 1, None)) is None


def test_the_sampler_gives_up_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: RemoteStacks) -> None:
        raise UnreadableError("it takes too much")

    monkeypatch.setattr(RemoteStacks, "read", refuse)
    folder, reasons = RunFolder(tmp_path, 1), list[str]()
    with stacks.StackSampler(folder, os.getpid(), on_status=reasons.append) as opened:
        # processes that other tests have left are children, too, and are given up one after the other
        while not any(reason.startswith("not recorded") for reason in reasons):
            opened._stop.wait(0.01)
    folder.close()
    assert reasons[-1] == "not recorded: UnreadableError: it takes too much"


FAMILY = """
import ctypes, subprocess, sys
child = None
if sys.argv[1:]:
    child = subprocess.Popen([sys.executable, "-S", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
ctypes.CDLL(None).prctl(15, b"\\xff\\xfe)", 0, 0, 0)  # PR_SET_NAME
print(child.pid if child else "ready", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("method", ["__init__", "read", "forget"])
@pytest.mark.parametrize(
    "error",
    [UnreadableError("it takes too much"), PermissionError(1, "no"), ValueError("forged"), RecursionError("forged")],
    ids=repr,
)
def test_one_process_that_cannot_be_sampled_does_not_end_the_samples_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, error: Exception
) -> None:
    monkeypatch.setattr(stacks, "FIRST_WINDOW_S", 0.2)
    (tmp_path / "job.py").write_text(FAMILY)
    command = [sys.executable, "-S", tmp_path / "job.py", "with a child"]
    job = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "RANK": "9" * 5000}
    )
    assert job.stdout is not None
    child = int(job.stdout.readline())
    original, refused = getattr(RemoteStacks, method), threading.Event()

    def refuse(reader: RemoteStacks, *arguments: object) -> object:
        if job.pid in (reader.__dict__.get("pid"), *arguments):
            refused.set()
            raise error
        return original(reader, *arguments)

    monkeypatch.setattr(RemoteStacks, method, refuse)
    folder, reasons = RunFolder(tmp_path, 1), list[str]()
    with stacks.StackSampler(folder, job.pid, on_status=reasons.append) as opened:
        for _ in range(6000):
            if refused.is_set() and child in sampled_pids(tmp_path):
                break
            opened._stop.wait(0.01)
        assert opened._thread.is_alive()
    folder.close()
    job.communicate(b"\n")
    assert sampled_pids(tmp_path) == {child}
    assert len(reasons) == (0 if method == "__init__" and isinstance(error, UnreadableError) else 1)
    assert all(reason.startswith(f"{stacks.RECORDED}; process {job.pid} no more: ") for reason in reasons)


ENDLESS = """
import ctypes, struct, sys
libc, size = ctypes.CDLL(None, use_errno=True), 1 << 40
libc.mmap.restype = libc.sbrk.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long]
start = libc.mmap(None, size, 1, 0x4022, -1, 0)  # PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE
stat = [int(n) for n in open("/proc/self/stat").read().rpartition(")")[2].split()[1:]]
code, data, stack = stat[22:24], stat[41:44], stat[24]
areas = struct.pack("<11QQIi", *code, *data, libc.sbrk(0), stack, start, start + size, start, start + size, 0, 0, -1)
libc.prctl(15, b"a-program-of-15", 0, 0, 0)
failed = libc.prctl(35, 14, areas, len(areas), 0)  # PR_SET_MM, PR_SET_MM_MAP
print("not permitted" if failed else "ready", flush=True)
sys.stdin.readline()
"""


def test_a_command_and_variables_of_a_terabyte_are_read_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any process can have them, of whatever user."""
    job = subprocess.Popen([sys.executable, "-S", "-c", ENDLESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert job.stdout is not None
    if job.stdout.readline() != b"ready\n":
        job.communicate()
        pytest.skip("this kernel does not let a process set where its command is")
    monkeypatch.setattr(psutil, "process_iter", lambda _: iter([types.SimpleNamespace(pid=job.pid, info=BUSY)]))
    try:
        with bounded(seconds=20, megabytes=256):
            assert list(OtherProcesses().sample(1.0, 2.0, set())) == ["a-program-of-15"]
            assert stacks.SampledProcess(job.pid).rank == 0
            assert sampler._variables_of(job.pid) == {}
            process = watch._open_process(job.pid)
            assert watch._describe_environment(process)["argv"]
    finally:
        job.communicate(b"\n")
    os.close(process.pidfd)


BUSY = {"cpu_percent": 100.0}


def sampled_pids(run: Path) -> set[int]:
    return {window.pid for window in read_lines(run, STACKS, StackWindow)}


CLOSED = """
import ctypes, sys, time
while time.process_time() < 0.05: pass  # several ticks of the kernel's clock
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
print("ready", flush=True)
sys.stdin.readline()
"""
SAMPLES_IT = """
import contextlib, subprocess, sys
from pathlib import Path
from stoker_watch.errors import UsageError
from stoker_watch.recording import remote_stacks, stacks
from stoker_watch.runs.records import RunFolder
from stoker_watch.watch import watch
job = subprocess.Popen([sys.executable, "-S", "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
job.stdout.readline()
try:
    for read in (remote_stacks.RemoteStacks, watch._open_process):
        try:
            read(job.pid)
            print("may be read")
        except (PermissionError, UsageError) as error:
            print(type(error).__name__)
    folder = RunFolder(Path("."), 1)
    with stacks.StackSampler(folder, job.pid, on_status=print) as sampler:
        while not sampler._not_python:
            sampler._stop.wait(0.01)
    print(stacks.SampledProcess(job.pid).cwd, [process.is_given_up for process in sampler._processes.values()])
finally:
    job.communicate(b"\\n")
"""


def test_a_process_that_may_not_be_read_is_no_crash_and_has_a_reason(tmp_path: Path) -> None:
    """As in a user namespace, or of another user: a process that hides itself from those without CAP_SYS_PTRACE."""
    as_others = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    if as_others and shutil.which("setpriv") is None:
        pytest.skip("root may read all, and this system has no setpriv")
    command = [*as_others, sys.executable, "-c", SAMPLES_IT, CLOSED]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["PermissionError", "UsageError", f"not recorded: {stacks.NOT_PERMITTED}", " []"]
