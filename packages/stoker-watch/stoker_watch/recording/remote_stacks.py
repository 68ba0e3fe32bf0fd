"""Reads the Python stacks of another process from its memory, without stopping it (64-bit Linux, CPython 3.8 to 3.14).

A thread's frames are in one piece of memory (from Python 3.11 on), so a few reads of /proc/PID/mem copy a stack in some
10 µs, before the process can change much of it. Names and line tables of functions are read once.

Where things are in the memory of a version: `knowledge/python_layouts.toml`; from 3.13 on the process says it itself
(pycore_debug_offsets.h).
"""

import bisect
import contextlib
import dataclasses
import inspect
import itertools
import operator
import os
import re
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from stoker_watch import regular_files
from stoker_watch.knowledge import read_toml
from stoker_watch.recording.frames import Frame, Stack, is_job_file

MAX_FRAMES, MAX_THREADS = 1000, 5000
"""Frames of a stack, threads of a process; more are taken for memory that is no list."""
MAX_TRIES = 10
"""Reads of a stack that changed meanwhile, as where generators take turns all the time."""
MAX_TEXT_BYTES, MAX_TABLE_BYTES = 4096, 2**20
"""Bounds of a name and of a line table."""
MAX_SAMPLE_BYTES, MAX_SAMPLE_CPU_S = 2**26, 2.0
"""Read and taken for a sample of all threads: a process may forge its memory. Real ones need a thousandth of it."""
MAX_KEPT_BYTES, _FRAME_KEPT_BYTES, _ENTRY_KEPT_BYTES = 2**28, 1024, 64
"""Memory of functions and frames that are remembered, by estimates for a frame and for a byte of a line table."""
MAX_LIBRARIES, MAX_SECTION_BYTES = 4, 2**24
"""Files that may be Python's library; bytes read of a table of an ELF file. CPython's have about a MiB."""

_MAX_CHUNK_BYTES = 2**20
_FRAME_BYTES = 112
_THREAD_BYTES = 320
_ROOT_BYTES = 1024
"""sizeof(PyThreadState), at most; the _PyCFrame of a thread without frames is in it."""
_CODE_BYTES = 208
_THREAD_HEADER_BYTES = 128
"""The head of the C library's structure of a thread: flags and counts, one of which may be as small as an ID."""
_WORD = struct.Struct("<Q")
_GENERATOR_FLAGS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class UnreadableError(Exception):
    """Its stacks cannot be read; the text says why."""


class EndedError(Exception):
    """The process has ended, or is another program now."""


class _Layout(NamedTuple):
    """A row of python_layouts.toml, which explains the fields."""

    interpreters: int
    main_thread: int
    next_interpreter: int
    threads: int
    next_thread: int
    thread_id: int
    native_id: int
    frame: int
    cframe: int
    chunk: int
    code: int
    previous: int
    instruction: int
    filename: int
    name: int
    first_line: int
    flags: int
    lines: int
    instructions: int
    text: int


LAYOUTS = {(3, int(name[2:])): _Layout(**row) for name, row in read_toml("python_layouts.toml").items()}


class RemoteStacks:
    """The stacks of a process. cpu_clock: seconds, for MAX_SAMPLE_CPU_S. Raises UnreadableError, PermissionError (the
    text is the system's), EndedError."""

    def __init__(self, pid: int, *, cpu_clock: Callable[[], float] = time.thread_time) -> None:
        self.pid = pid
        self._cpu_clock = cpu_clock
        self._bytes_left, self._end_cpu_s = MAX_SAMPLE_BYTES, cpu_clock() + MAX_SAMPLE_CPU_S
        """What this sample may still read, and when it has to end."""
        self._runtime, self.version = _find_runtime(pid)
        self._main_id = _namespace_id(pid)
        try:
            self._cwd = os.readlink(f"/proc/{pid}/cwd")
            self._memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, ProcessLookupError) as error:
            raise EndedError from error
        self._code_type = 0
        self._frames: dict[tuple[int, int], Frame | None] = {}
        self._functions: dict[int, _Function] = {}
        self._checked: set[int] = set()
        """Those that are known to be still there."""
        self._kept_bytes = 0
        self._known: dict[int, tuple[int, bytes, Stack]] = {}
        self._known_before: dict[int, tuple[int, bytes, Stack]] = {}
        """Piece of memory of a thread → the newest frame, the memory up to it and the stack, at the last sample."""
        self._outer_ids: dict[int, int] | None = None
        """Kernel ID in the namespace of the process → here; None: not read yet."""
        self._kernel_id_offset: int | None = None
        try:
            self._layout = self._find_layout()
            self._read_frame, self._code_index = _frame_reader(self._layout)
        except BaseException as error:
            self.close()
            if isinstance(error, (_ChangedError, struct.error)):
                raise UnreadableError("_PyRuntime is not where its symbol says") from error
            raise

    def close(self) -> None:
        os.close(self._memory)

    def read(self) -> dict[int, Stack]:
        """Kernel ID → stack of each thread that has Python frames; the main thread has the process ID. A stack that
        changed during each of some reads is left out. Raises EndedError, UnreadableError."""
        found: dict[int, Stack] = {}
        self._known, self._known_before = {}, self._known
        self._bytes_left, self._end_cpu_s = MAX_SAMPLE_BYTES, self._cpu_clock() + MAX_SAMPLE_CPU_S
        with contextlib.suppress(_ChangedError, struct.error):  # the list of threads; what was read before stays
            self._read_threads(found)
        return found

    def _read_threads(self, found: dict[int, Stack]) -> None:
        layout = self._layout
        main_thread = self._word(self._runtime + layout.main_thread) if layout.main_thread else 0
        interpreter = self._word(self._runtime + layout.interpreters)
        address = self._word(interpreter + layout.threads) if interpreter else 0
        for _ in range(MAX_THREADS):
            if not address:
                if not (interpreter := interpreter and self._word(interpreter + layout.next_interpreter)):
                    return
                address = self._word(interpreter + layout.threads)
                continue
            state = self._bytes(address, _THREAD_BYTES)
            if stack := self._consistent_stack(address, state):
                thread_id = _word_at(state, layout.thread_id)
                native_id = _word_at(state, layout.native_id) if layout.native_id else None
                kernel_id = self._kernel_id(thread_id, main_thread) if native_id is None else native_id
                if thread_id == main_thread or kernel_id == self._main_id:
                    kernel_id = self.pid
                elif self._main_id != self.pid:
                    kernel_id = self._outer_id(kernel_id)
                found[kernel_id] = stack
            address = _word_at(state, layout.next_thread)

    def _consistent_stack(self, address: int, state: bytes) -> Stack:
        """Reads a thread's stack by its PyThreadState, again if it has changed. Empty: no frames, or always changed."""
        for attempt in range(MAX_TRIES):
            try:
                return self._stack(address, self._bytes(address, _THREAD_BYTES) if attempt else state)
            except (_ChangedError, struct.error):
                continue
        return Stack()

    def _stack(self, address: int, state: bytes) -> Stack:
        """Reads a thread's stack by its PyThreadState. Raises _ChangedError."""
        layout = self._layout
        frame = _word_at(state, layout.frame)
        if layout.cframe >= 0 and frame:
            is_root = 0 <= frame - address < _ROOT_BYTES
            frame = self._word(frame + layout.cframe)
            if not frame and not is_root:
                raise _ChangedError  # a call from C has ended
        if not frame:
            return Stack()
        memory, chunk = b"", _word_at(state, layout.chunk) if layout.chunk else 0
        if chunk:
            # what is above the newest frame is not in use
            length = frame - chunk + _FRAME_BYTES if chunk <= frame < chunk + _MAX_CHUNK_BYTES else 4096
            memory = self._bytes(chunk, length)
            known = self._known_before.get(chunk)
            if known is not None and known[0] == frame and known[1] == memory:
                self._known[chunk] = known
                return known[2]
        stack, newest, outermost, last_offset = Stack(), frame, 0, len(memory) - _FRAME_BYTES
        chunks, is_whole = [(chunk, memory)] if chunk else [], bool(chunk)
        frames, read_frame, code_index = self._frames, self._read_frame, self._code_index
        for _ in range(MAX_FRAMES):
            if 0 <= (offset := frame - chunk) <= last_offset:
                words = read_frame(memory, offset)
            else:
                words, is_whole = read_frame(*self._frame_memory(frame, chunks)), False
            code, instruction = words[code_index] & ~3, words[2]
            try:
                found = frames[code, instruction]
            except KeyError:
                found = self._resolve(code, instruction)
            if found is not None:
                stack.append(found)
                outermost = code
            frame = words[1 - code_index]
            if not frame:
                if (function := self._functions.get(outermost)) is not None and function.is_generator:
                    raise _ChangedError  # it has yielded meanwhile, so nothing calls it
                if is_whole:
                    self._known[chunk] = newest, memory, stack
                return stack
        return stack  # deeper than any that is needed

    def _frame_memory(self, frame: int, chunks: list[tuple[int, bytes]]) -> tuple[bytes, int]:
        """(memory, offset of the frame in it; 0: it is in no piece of a thread's memory). chunks: what was read."""
        for start, memory in chunks:
            if start <= frame <= start + len(memory) - _FRAME_BYTES:
                return memory, frame - start
        if chunks and (start := _word_at(chunks[-1][1], 0)):  # a deep stack goes on in the piece before
            size = min(_MAX_CHUNK_BYTES, self._word(start + 8))
            if start <= frame <= start + size - _FRAME_BYTES:
                chunks.append((start, self._bytes(start, size)))
                return chunks[-1][1], frame - start
        return self._bytes(frame, _FRAME_BYTES), 0  # of a generator, or an object

    def _resolve(self, code: int, instruction: int) -> Frame | None:
        """The frame of a function at an instruction; None: it is an entry from C. Raises _ChangedError."""
        self._kept_bytes += _FRAME_KEPT_BYTES
        if self._kept_bytes > MAX_KEPT_BYTES:
            self._kept_bytes = 0
            self._functions.clear()
            self.forget()
        if code not in self._checked:
            self._functions[code] = self._read_function(code)
            self._checked.add(code)
        function = self._functions[code]
        frame = None
        if function.table is not None:
            offset = instruction * (2 if self.version >= (3, 10) else 1)
            if self._layout.instructions:
                offset = instruction - code - self._layout.instructions
            if not -2 <= offset < 2**24:  # below 0: it has not begun
                raise _ChangedError
            entry = function.find_entry(max(0, offset))
            end = find_end(entry) if is_job_file(function.file) else None
            frame = Frame(function.name, function.file, entry.line, end)
        self._frames[code, instruction] = frame
        return frame

    def forget(self) -> None:
        """Functions are looked up again: one that is gone may have left its address to another."""
        self._frames.clear()
        self._known.clear()
        self._known_before.clear()
        self._checked.clear()
        self._outer_ids = None

    def _read_function(self, address: int) -> "_Function":
        layout = self._layout
        if not address:
            raise _ChangedError
        code = self._bytes(address, _CODE_BYTES)
        if (kind := _word_at(code, 8)) != self._code_type:
            type_name = self._bytes(self._word(kind + 24), 9)  # PyTypeObject.tp_name
            if type_name == b"NoneType\0":  # an entry from C, from Python 3.13 on
                return _Function("", "", 0, None, self.version)
            if not type_name.startswith(b"code\0"):
                raise _ChangedError
            self._code_type = kind
        (first_line,) = struct.unpack_from("<i", code, layout.first_line)
        table = _word_at(code, layout.lines)
        identity = (first_line, table, _word_at(code, layout.name), _word_at(code, layout.filename))
        if (known := self._functions.get(address)) is not None and known.identity == identity:
            return known
        size = self._word(table + 16)
        if size > MAX_TABLE_BYTES:
            raise _ChangedError
        self._kept_bytes += _ENTRY_KEPT_BYTES * size
        name, file = (self._text_at(_word_at(code, offset)) for offset in (layout.name, layout.filename))
        if not file.startswith(("/", "<")):  # of the script, before Python 3.9
            file = os.path.join(self._cwd, file)
        lines = None if file == "<shim>" else self._bytes(table + 32, size)  # such an entry in Python 3.12
        (flags,) = struct.unpack_from("<i", code, layout.flags)
        return _Function(name, file, first_line, lines, self.version, identity, bool(flags & _GENERATOR_FLAGS))

    def _text_at(self, address: int) -> str:
        header = self._bytes(address, 40)
        length = _word_at(header, 16)
        (state,) = struct.unpack_from("<I", header, 32)
        state >>= 2 if self.version < (3, 14) else 16  # `interned`
        kind, is_ascii = state & 7, state >> 4 & 1
        if kind not in (1, 2, 4) or length * kind > MAX_TEXT_BYTES:
            raise _ChangedError
        # PyCompactUnicodeObject: the length and pointer of UTF-8, and before 3.12 that of wchar_t
        start = self._layout.text + (0 if is_ascii else 24 if self._layout.text == 48 else 16)
        encoding = {1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}[kind]
        return self._bytes(address + start, length * kind).decode(encoding, errors="replace")

    def _find_layout(self) -> _Layout:
        if self.version in LAYOUTS:
            return LAYOUTS[self.version]
        if self.version not in ((3, 13), (3, 14)):
            raise UnreadableError(f"Python {'.'.join(map(str, self.version))} is not known, 3.8 to 3.14 are")
        cookie, _, free_threaded, *fields = struct.unpack("<8s48Q", self._bytes(self._runtime, 8 + 48 * 8))
        if cookie != b"xdebugpy" or free_threaded:
            raise UnreadableError("a Python without the interpreter's lock has other stacks")
        main_thread = 656 if self.version == (3, 13) else 0
        # 3.14: with threads_main, code_object_generation and tlbc_generation
        runtime, interpreter, rest = fields[:3], fields[3:7], fields[16 if self.version == (3, 13) else 19 :]
        thread, rest = rest[:9], rest[9:]
        frame, code = rest[:6], rest[6:] if self.version == (3, 13) else rest[8:]
        layout = _Layout(
            runtime[2], main_thread, interpreter[2], interpreter[3], thread[2], thread[5], thread[6], thread[4], -1,
            thread[7], frame[2], frame[1], frame[3], code[1], code[3], code[5], 48, code[4], code[9], 40,
        )  # fmt: skip
        if max(layout) > 2**20:
            raise UnreadableError("_PyRuntime has offsets that no Python has")
        return layout

    def _outer_id(self, kernel_id: int) -> int:
        """The ID here of a thread in another namespace of processes."""
        if self._outer_ids is None:
            self._outer_ids = {}
            with contextlib.suppress(EndedError, OSError):
                for name in os.listdir(f"/proc/{self.pid}/task"):
                    self._outer_ids[_namespace_id(int(name))] = int(name)
        return self._outer_ids.get(kernel_id, kernel_id)

    def _kernel_id(self, thread_id: int, main_thread: int) -> int:
        """Before Python 3.11: the ID in the C library's structure of a thread, at its `thread_id`; where that is, the
        one of the main thread shows. If it is not found: thread_id."""
        with contextlib.suppress(_ChangedError):
            if self._kernel_id_offset is None:
                found = struct.unpack("<480i", self._bytes(main_thread + _THREAD_HEADER_BYTES, 1920))
                self._kernel_id_offset = 0
                if self._main_id in found:
                    self._kernel_id_offset = _THREAD_HEADER_BYTES + 4 * found.index(self._main_id)
            if self._kernel_id_offset:
                return int.from_bytes(self._bytes(thread_id + self._kernel_id_offset, 4), "little")
        return thread_id

    def _word(self, address: int) -> int:
        return _word_at(self._bytes(address, 8), 0)

    def _bytes(self, address: int, length: int) -> bytes:
        """Raises _ChangedError where there is no such memory, EndedError where there is none at all, UnreadableError
        where a sample takes too much."""
        self._bytes_left -= length
        if self._bytes_left < 0 or self._cpu_clock() > self._end_cpu_s:
            raise UnreadableError("what its memory has in place of stacks takes too much memory or time to read")
        try:
            found = os.pread(self._memory, length, address)
        except (OSError, OverflowError) as error:
            raise _ChangedError from error
        if len(found) == length:
            return found
        if not found:  # the memory of a process that has ended is empty
            raise EndedError
        raise _ChangedError


class _ChangedError(Exception):
    """What was read does not fit together: it changed meanwhile."""


@dataclasses.dataclass
class _Function:
    """A code object. table: of its lines; None: it is something else. identity: tells it from one that had its address
    before."""

    name: str
    file: str
    first_line: int
    table: bytes | None
    version: tuple[int, int]
    identity: tuple[int, ...] = ()
    is_generator: bool = False
    """Or a coroutine, or an asynchronous generator."""

    def __post_init__(self) -> None:
        read = read_locations if self.version >= (3, 11) else read_pairs
        self._entries: list[LineEntry] = []
        self._further = read(self.table or b"", self.first_line, self.version)

    def find_entry(self, offset: int) -> "LineEntry":
        """Finds the instruction at an offset in bytes. Reads the table up to there: that of a module is long."""
        while not self._entries or self._entries[-1].end <= offset:
            if (entry := next(self._further, None)) is None:
                return LineEntry(0, self.first_line)
            self._entries.append(entry)
        return self._entries[bisect.bisect_right(self._entries, offset, key=operator.attrgetter("end"))]


class LineEntry(NamedTuple):
    """An entry of a line table: of the instructions up to `end`, an offset in bytes."""

    end: int
    line: int
    location: bytes = b""
    """All of the entry, from Python 3.11 on."""


def read_locations(table: bytes, first_line: int, _: tuple[int, int]) -> Iterator[LineEntry]:
    """The entries of a table of Python 3.11 or later; the format: Objects/locations.md of CPython, or later
    InternalDocs/code_objects.md."""
    end, line = 0, first_line
    for entry in _ENTRY.findall(table):
        kind = entry[0] >> 3 & 15
        if kind in (_NO_COLUMNS, _LONG):
            is_short = len(entry) > 1 and entry[1] < 64
            value = entry[1] if is_short else next(_read_numbers(entry))  # its lowest bit is the sign
            line += -(value >> 1) if value & 1 else value >> 1
        elif 10 <= kind <= 12:
            line += kind - 10
        end += 2 * (entry[0] & 7) + 2
        yield LineEntry(end, line, entry)


_ENTRY = re.compile(rb"[\x80-\xff][\x00-\x7f]*")
_NO_COLUMNS, _LONG, _NO_LOCATION = 13, 14, 15
"""Kinds of entries."""


def _read_numbers(entry: bytes) -> Iterator[int]:
    """Numbers of 6 bits a byte, after the first byte; 0 where there are no more."""
    value, shift = 0, 0
    for byte in entry[1:]:
        value |= (byte & 63) << shift
        shift += 6
        if not byte & 64:
            yield value
            value, shift = 0, 0
    while True:
        yield value
        value = 0


def find_end(entry: LineEntry) -> tuple[int, int] | None:
    """(line, column in bytes of UTF-8) at which the source of its instructions ends; None: the table has no columns."""
    kind = entry.location[0] >> 3 & 15 if len(entry.location) > 1 else _NO_LOCATION
    if kind < 10:
        return entry.line, 8 * kind + (entry.location[1] >> 4) + (entry.location[1] & 15)
    if kind in (_NO_COLUMNS, _NO_LOCATION):
        return None
    if kind < _NO_COLUMNS:
        return entry.line, entry.location[-1]
    _, more_lines, _, column = itertools.islice(_read_numbers(entry.location), 4)
    return (entry.line + more_lines, column - 1) if column else None


def read_pairs(table: bytes, first_line: int, version: tuple[int, int]) -> Iterator[LineEntry]:
    """As `read_locations`, of a co_linetable of Python 3.10 or a co_lnotab before it (Objects/lnotab_notes.txt)."""
    end, line = 0, first_line
    for step, change in zip(table[::2], table[1::2], strict=False):
        delta = change - 256 if change > 127 else change
        end += step
        if version >= (3, 10):
            line += 0 if delta == -128 else delta
            yield LineEntry(end, line)
        else:  # the line changes after these bytes
            yield LineEntry(end, line)
            line += delta
    yield LineEntry(2**31, line)


def _word_at(memory: bytes, offset: int) -> int:
    return int(_WORD.unpack_from(memory, offset)[0])


def _frame_reader(layout: _Layout) -> tuple[Callable[[bytes, int], tuple[int, ...]], int]:
    """(what reads the words of a frame: its code and the frame before in their order, and the instruction; the number
    of the code)"""
    first, second = sorted((layout.code, layout.previous))
    kind = "Q" if layout.instructions else "i"
    text = f"<{first}xQ{second - first - 8}xQ{layout.instruction - second - 8}x{kind}"
    return struct.Struct(text).unpack_from, int(layout.previous < layout.code)


_PYTHON_FILE = re.compile(r"(?:^|/)(?:lib)?python(\d)\.(\d+)[\w.-]*$")
_LIBRARY = re.compile(r"/libpython\d[\w.]*\.so")
_PYTHON_FOLDER = re.compile(r"/lib/python(\d)\.(\d+)/")


def _find_runtime(pid: int) -> tuple[int, tuple[int, int]]:
    """(address of _PyRuntime, version) of a process. Raises UnreadableError, PermissionError, EndedError."""
    starts: dict[str, int] = {}
    folder, is_empty = None, True
    try:
        program = os.readlink(f"/proc/{pid}/exe")
        # names may have a carriage return; a process may have 65,530 lines of 4 KiB
        with open(f"/proc/{pid}/maps", errors="surrogateescape", newline="\n") as maps:
            for line in maps:
                is_empty, folder = False, folder or _PYTHON_FOLDER.search(line)
                addresses, _, offset, _, _, name = [*line.rstrip("\n").split(maxsplit=5), ""][:6]
                if int(offset, 16) == 0 and (name == program or _LIBRARY.search(name)):
                    starts.setdefault(name, int(addresses.partition("-")[0], 16))
    except (FileNotFoundError, ProcessLookupError) as error:
        raise EndedError from error
    if is_empty:
        raise EndedError
    libraries = [name for name in starts if _LIBRARY.search(name)]
    for file in [*libraries[:MAX_LIBRARIES], program]:
        if file not in starts:
            continue
        # the link leads to the program also where it was replaced, by an upgrade
        path = f"/proc/{pid}/exe" if file == program else f"/proc/{pid}/root{file}"
        symbol = find_symbol(path, "_PyRuntime")
        if symbol is None:
            continue
        address, is_relative = symbol
        matches = [_PYTHON_FILE.search(file), folder]
        version = next(((int(found[1]), int(found[2])) for found in matches if found is not None), None)
        if version is None:
            raise UnreadableError(f"the version of the Python {file} is not known")
        return address + (starts[file] if is_relative else 0), version
    raise UnreadableError(f"{program} has no symbol _PyRuntime: it is no CPython, or its symbols were removed")


def find_symbol(file: str, name: str) -> tuple[int, bool] | None:
    """(address, whether it is relative to the first page of the file in memory) of a symbol in a 64-bit ELF file; None:
    it has none of this name, or is no such file."""
    try:
        with regular_files.open_file(file) as opened:
            status = os.fstat(opened.fileno())
            key = (status.st_dev, status.st_ino, status.st_mtime_ns, name)
            if key not in _symbols:
                _symbols[key] = _symbol_in(opened.fileno(), name)
            return _symbols[key]
    except (OSError, ValueError, struct.error, IndexError, OverflowError):
        return None


_symbols: dict[tuple[int, int, int, str], tuple[int, bool] | None] = {}


def _symbol_in(fd: int, name: str) -> tuple[int, bool] | None:
    """gabi.xinuos.com: e_type 3 is ET_DYN, p_type 1 PT_LOAD, sh_type 2 and 11 SHT_SYMTAB and SHT_DYNSYM, one of each.
    The file may change meanwhile, so it is not mapped."""

    def read(start: int, size: int) -> bytes:
        return os.pread(fd, min(size, MAX_SECTION_BYTES), start)

    head = read(0, 64)
    if head[:6] != b"\x7fELF\x02\x01":
        return None
    (file_type,) = struct.unpack_from("<H", head, 16)
    segments, sections = struct.unpack_from("<QQ", head, 32)
    segment_size, num_segments, section_size, num_sections = struct.unpack_from("<4H", head, 54)
    table = read(segments, num_segments * segment_size)
    loads = (struct.unpack_from("<I4xQQ", table, number * segment_size) for number in range(num_segments))
    base = next((address - offset for kind, offset, address in loads if kind == 1), 0)
    table = read(sections, num_sections * section_size)
    headers = [struct.unpack_from("<4xI16xQQI", table, number * section_size) for number in range(num_sections)]
    for _, start, size, link in [header for header in headers if header[0] in (2, 11)][:2]:
        _, names_start, names_size, _ = headers[link]
        wanted = read(names_start, names_size).find(b"\0" + name.encode() + b"\0") + 1
        if not wanted:
            continue
        symbols = read(start, size - size % 24)
        for entry, _, _, section, address, _ in struct.iter_unpack("<IBBHQQ", symbols[: len(symbols) // 24 * 24]):
            if entry == wanted and section:
                return (address - base, True) if file_type == 3 else (address, False)
    return None


def _namespace_id(pid: int) -> int:
    """The ID of a process in the innermost namespace of processes that it is in. Raises EndedError."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")  # its name may be any bytes
    except OSError as error:
        raise EndedError from error
    found = re.search(r"^NSpid:.*?(\d+)$", status, re.MULTILINE)
    return int(found[1]) if found else pid
