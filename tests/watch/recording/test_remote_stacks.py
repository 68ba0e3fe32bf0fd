"""Stacks read from the memory of other processes, of each Python that is there, against what Python says itself."""

import ctypes
import importlib
import json
import mmap
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_watch.recording import remote_stacks
from stoker_watch.recording.frames import Frame, find_place
from stoker_watch.recording.remote_stacks import (
    EndedError,
    RemoteStacks,
    UnreadableError,
    find_end,
    find_symbol,
    read_locations,
    read_pairs,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="`stoker watch` is for Linux")

VERSIONS = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
PYTHONS = {"own": sys.executable} | {
    f"3.{minor}": str(found[-1])
    for minor in range(8, 15)
    if (found := sorted(VERSIONS.glob(f"3.{minor}.*/bin/python3.{minor}")))
}
SYSTEM = "/usr/bin/python3"  # one program without a library, as Debian builds it
if Path(SYSTEM).exists():
    PYTHONS["system"] = SYSTEM

WAITS = """
import json, sys, threading, traceback

def innermost(depth):
    if depth:
        return innermost(
            depth - 1
        )
    print(json.dumps([[f.name, f.filename, f.lineno] for f in traceback.extract_stack()]), flush=True)
    sys.stdin.readline()

def generates():
    yield 1
    yield from (innermost(int(sys.argv[1])) for _ in "a")

class Übung:
    def läuft(self):
        with open(__file__) as file:
            return [
                list(generates())
                for _ in range(2)
            ]

def waits():
    threading.Event().wait()

threading.Thread(target=waits, daemon=True).start()
Übung().läuft()
"""


@contextmanager
def waiting_job(python: str, folder: Path, depth: int) -> Iterator[tuple[int, list[list[object]]]]:
    """(process ID, its stack as Python says, outermost first)"""
    script = folder / "trän.py"
    script.write_text(WAITS, encoding="utf-8")
    process = subprocess.Popen([python, "-S", script, str(depth)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield process.pid, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


@contextmanager
def endless_job(python: str, source: str, folder: Path) -> Iterator[RemoteStacks]:
    """Of a job that prints a line and goes on for ever."""
    (folder / "job.py").write_text(source)
    process = subprocess.Popen([python, "-S", folder / "job.py"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        process.stdout.readline()
        yield RemoteStacks(process.pid)
    finally:  # it would take a core for ever
        process.kill()
        process.communicate()


@pytest.mark.parametrize("depth", [3, 600])
@pytest.mark.parametrize("python", PYTHONS.values(), ids=PYTHONS)
def test_a_stack_is_as_python_says(python: str, depth: int, tmp_path: Path) -> None:
    """Generators, a deep recursion, names that are not ASCII, calls of several lines, a list comprehension."""
    with waiting_job(python, tmp_path, depth) as (pid, expected):
        # one of the last lines of `innermost` is next after it has printed its stack
        stacks: dict[int, list[Frame]] = {}
        for _ in range(500):
            stacks = RemoteStacks(pid).read()
            if pid in stacks and (stacks[pid][0].function, stacks[pid][0].line) == ("innermost", 10):
                break
            time.sleep(0.01)
        threads = {int(name) for name in os.listdir(f"/proc/{pid}/task")}
    assert set(stacks) == threads
    found = [[frame.function.rpartition(".")[2], frame.file, frame.line] for frame in reversed(stacks.pop(pid))]
    assert found[:-1] == expected[:-1]
    assert found[-1] == ["innermost", expected[-1][1], 10]
    ((other, *_),) = [[frame for frame in stack if frame.function == "waits"] for stack in stacks.values()]
    assert (other.file, other.line) == (str(tmp_path / "trän.py"), 25)


YIELDS = """
import contextlib

def counts():
    yield 1

@contextlib.contextmanager
def entered():
    yield

print("ready", flush=True)
while True:
    for _ in counts():
        with entered():
            sum(number for number in (1, 2))
"""


@pytest.mark.parametrize("python", PYTHONS.values(), ids=PYTHONS)
def test_a_stack_is_whole_although_a_generator_of_it_yields_meanwhile(python: str, tmp_path: Path) -> None:
    with endless_job(python, YIELDS, tmp_path) as reader:
        stacks = [stack for _ in range(2000) if (stack := reader.read().get(reader.pid))]
    assert len(stacks) > 1800, "few are left out"
    assert {stack[-1].function for stack in stacks} == {"<module>"}


TIMES = """
import sys, time
def adds(items):
    total = 0
    for item in items:
        total += item * item
    return total
def sorts(items):
    return sorted(items, key=str)
spent, items = [0.0, 0.0, 0.0], list(range(1000))
print("ready", flush=True)
begin = time.monotonic()
while time.monotonic() < begin + float(sys.argv[1]):
    start = time.monotonic()
    for _ in range(20): adds(items)
    middle = time.monotonic()
    for _ in range(10): sorts(items)
    end = time.monotonic()
    time.sleep(0.003)
    spent = [a + b for a, b in zip(spent, (middle - start, end - middle, time.monotonic() - end))]
print(spent)
"""


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS.values(), ids=PYTHONS)
def test_lines_have_as_many_samples_as_they_take_time_by_the_clock_of_the_job(python: str, tmp_path: Path) -> None:
    """Python that calls nothing, a C function that calls Python's types, and a sleep; no read fails."""
    (tmp_path / "times.py").write_text(TIMES)
    process = subprocess.Popen([python, "-S", tmp_path / "times.py", "5"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    reader, counts, reads = RemoteStacks(process.pid), dict.fromkeys(("adds", "sorts", "sleep"), 0), 0
    end_s = time.monotonic() + 4
    while time.monotonic() < end_s:
        stack = reader.read().get(process.pid)
        reads += 1
        if stack is not None:
            names = {frame.function for frame in stack} & set(counts)
            counts[names.pop() if names else "sleep"] += 1
        time.sleep(random.uniform(0.002, 0.006))
    spent = json.loads(process.communicate()[0])
    assert sum(counts.values()) >= 0.98 * reads
    for count, seconds in zip(counts.values(), spent, strict=True):
        assert count / reads == pytest.approx(seconds / sum(spent), abs=0.3), "on a busy machine, too"


def test_what_is_no_python_has_a_reason() -> None:
    process = subprocess.Popen(["sleep", "60"])
    time.sleep(0.2)  # it is a copy of this Python before
    with pytest.raises(UnreadableError, match="_PyRuntime"):
        RemoteStacks(process.pid)
    process.kill()
    process.wait()
    with pytest.raises(EndedError):
        RemoteStacks(process.pid)


def test_the_end_of_a_process_is_known(tmp_path: Path) -> None:
    with waiting_job(sys.executable, tmp_path, 1) as (pid, _):
        reader = RemoteStacks(pid)
        assert reader.read()
    with pytest.raises(EndedError):
        reader.read()


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs to become somebody else")
def test_a_process_of_another_user_may_not_be_read(tmp_path: Path) -> None:
    code = "import sys; from stoker_watch.recording.remote_stacks import RemoteStacks; RemoteStacks(int(sys.argv[1]))"
    with waiting_job(sys.executable, tmp_path, 1) as (pid, _):
        command = ["setpriv", "--reuid=65534", "--clear-groups", sys.executable, "-c", code, str(pid)]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    if "shared libraries" in found.stderr:
        pytest.skip(f"nobody else can start this Python: {found.stderr.strip()}")
    assert "PermissionError" in found.stderr.splitlines()[-1]


def test_the_symbol_is_where_the_linker_has_put_it() -> None:
    address = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
    assert remote_stacks._find_runtime(os.getpid()) == (address, sys.version_info[:2])


def test_a_mapped_file_may_have_any_name(tmp_path: Path) -> None:
    file = tmp_path / "Icon\r1-2 3"
    file.write_bytes(bytes(4096))
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ):
        assert remote_stacks._find_runtime(os.getpid())[1] == sys.version_info[:2]


@given(st.binary(max_size=400), st.integers(0, 200))
def test_a_file_that_is_no_elf_file_has_no_symbol(data: bytes, keep: int) -> None:
    file = Path(os.environ.get("TMPDIR", "/tmp")) / f"stoker-elf-{os.getpid()}"
    file.write_bytes(Path(sys.executable).read_bytes()[:keep] + data)
    assert find_symbol(str(file), "_PyRuntime") is None
    file.unlink()


def functions(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from functions(constant)


@pytest.mark.parametrize("module", ["argparse", "dataclasses", "typing", "tarfile", "unittest.mock"])
def test_lines_are_those_of_python(module: str) -> None:
    read = read_locations if sys.version_info >= (3, 11) else read_pairs
    source = importlib.import_module(module).__file__
    assert source is not None
    for code in functions(compile(Path(source).read_text(), source, "exec")):
        found = list(read(code.co_linetable, code.co_firstlineno, sys.version_info[:2]))
        for start, end, line in code.co_lines():
            if line is not None:
                assert next(entry.line for entry in found if start < entry.end) == line
                assert next(entry.line for entry in found if end - 2 < entry.end) == line


@pytest.mark.skipif(sys.version_info < (3, 11), reason="a code object has no columns before")
@pytest.mark.parametrize("module", ["argparse", "dataclasses", "typing", "tarfile", "unittest.mock"])
def test_columns_are_those_of_python(module: str) -> None:
    source = importlib.import_module(module).__file__
    assert source is not None
    for code in functions(compile(Path(source).read_text(), source, "exec")):
        entries = read_locations(code.co_linetable, code.co_firstlineno, (3, 11))
        entry = next(entries)
        for number, (_, end_line, _, end_column) in enumerate(code.co_positions()):
            if 2 * number >= entry.end:
                entry = next(entries)
            assert find_end(entry) == (None if end_column is None else (end_line, end_column))


CALLS = """
import zlib
data = bytes(range(256)) * 4000
print("ready", flush=True)
while True:
    size = len(str(zlib.compress(data, 9)[:10] + bytes(3)))
"""


@pytest.mark.parametrize("python", PYTHONS.values(), ids=PYTHONS)
def test_of_several_calls_in_a_line_the_one_that_runs_is_told(python: str, tmp_path: Path) -> None:
    """From Python 3.11 on; before, it is the outermost one."""
    calls = []
    with endless_job(python, CALLS, tmp_path) as reader:
        for _ in range(50):
            calls.append(find_place(reader.read()[reader.pid])[2])
            time.sleep(0.003)
    assert calls.count("zlib.compress" if reader.version >= (3, 11) else "len") > 40


@given(st.binary(max_size=60), st.integers(-2, 500))
def test_a_damaged_table_of_lines_has_an_answer(table: bytes, offset: int) -> None:
    for version in ((3, 8), (3, 10), (3, 13)):
        entry = remote_stacks._Function("f", "f.py", 3, table, version).find_entry(offset)
        assert isinstance(entry.line, int)
        assert find_end(entry) is None or version >= (3, 11)


@pytest.mark.parametrize("python", PYTHONS.values(), ids=PYTHONS)
def test_memory_that_changes_while_it_is_read_is_no_error(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any byte of what is read may be another one: from frames that are gone, of memory that is used anew."""
    chance = random.Random(3)
    read_bytes = RemoteStacks._bytes

    def damaged(self: RemoteStacks, address: int, length: int) -> bytes:
        found = bytearray(read_bytes(self, address, length))
        for _ in range(chance.choice((0, 0, 0, 1, 3)) if length else 0):
            found[chance.randrange(length)] = chance.randrange(256)
        return bytes(found)

    with waiting_job(python, tmp_path, 3) as (pid, _):
        reader = RemoteStacks(pid)
        monkeypatch.setattr(RemoteStacks, "_bytes", damaged)
        for _ in range(300):
            reader.forget()
            assert isinstance(reader.read(), dict)


HEADERS = """
#define Py_BUILD_CORE 1
#include <Python.h>
#include <stddef.h>
#include "internal/pycore_pystate.h"
#if PY_VERSION_HEX >= 0x03090000
#include "internal/pycore_interp.h"
#include "internal/pycore_runtime.h"
#endif
#if PY_VERSION_HEX >= 0x030b0000
#include "internal/pycore_frame.h"
#include "internal/pycore_code.h"
#else
#include <frameobject.h>
#include <code.h>
#endif
#define O(type, field) (int)offsetof(type, field)
int main(void) {
    int offsets[] = {O(_PyRuntimeState, interpreters.head), O(_PyRuntimeState, main_thread),
        O(PyInterpreterState, next),
#if PY_VERSION_HEX >= 0x030b0000
        O(PyInterpreterState, threads.head), O(PyThreadState, next), O(PyThreadState, thread_id),
        O(PyThreadState, native_thread_id),
#if PY_VERSION_HEX >= 0x030d0000
        O(PyThreadState, current_frame), -1, O(PyThreadState, datastack_chunk), O(_PyInterpreterFrame, f_executable),
        O(_PyInterpreterFrame, previous), O(_PyInterpreterFrame, instr_ptr),
#else
        O(PyThreadState, cframe), O(_PyCFrame, current_frame), O(PyThreadState, datastack_chunk),
        O(_PyInterpreterFrame, f_code), O(_PyInterpreterFrame, previous), O(_PyInterpreterFrame, prev_instr),
#endif
        O(PyCodeObject, co_filename), O(PyCodeObject, co_qualname), O(PyCodeObject, co_firstlineno),
        O(PyCodeObject, co_flags), O(PyCodeObject, co_linetable), O(PyCodeObject, co_code_adaptive),
#else
        O(PyInterpreterState, tstate_head), O(PyThreadState, next), O(PyThreadState, thread_id), 0,
        O(PyThreadState, frame), -1, 0, O(PyFrameObject, f_code), O(PyFrameObject, f_back), O(PyFrameObject, f_lasti),
        O(PyCodeObject, co_filename), O(PyCodeObject, co_name), O(PyCodeObject, co_firstlineno),
        O(PyCodeObject, co_flags),
#if PY_VERSION_HEX >= 0x030a0000
        O(PyCodeObject, co_linetable), 0,
#else
        O(PyCodeObject, co_lnotab), 0,
#endif
#endif
        (int)sizeof(PyASCIIObject)};
    for (size_t i = 0; i < sizeof offsets / sizeof *offsets; i++) printf("%d ", offsets[i]);
}
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.parametrize("python", [path for name, path in PYTHONS.items() if re.fullmatch(r"3\.\d+", name)])
def test_offsets_are_those_of_the_headers(python: str, tmp_path: Path) -> None:
    include = next(Path(python).parents[1].glob("include/python3*"), None)
    if include is None:
        pytest.skip("this Python has no headers")
    (tmp_path / "offsets.c").write_text(HEADERS)
    program = tmp_path / "offsets"
    subprocess.run(["gcc", "-w", f"-I{include}", f"-I{include}/internal", tmp_path / "offsets.c", "-o", program],
                   check=True)  # fmt: skip
    offsets = [int(word) for word in subprocess.run([program], capture_output=True, check=True).stdout.split()]
    with waiting_job(python, tmp_path, 1) as (pid, _):
        assert list(RemoteStacks(pid)._layout) == offsets
