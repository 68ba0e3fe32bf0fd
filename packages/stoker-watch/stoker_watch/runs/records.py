"""The run folder: file names, writers and readers. The interface between all commands.

Writers append whole lines and replace whole files by rename; readers accept an incomplete last line, so a live, a
killed and a finished run are read in the same way. `docs/run-folder.md` describes every file for people, and a test
compares the two. Not here: the fields of the records (`schemas.py`) and checkpoints (`stoker/training/checkpoint.py`).
"""

import contextlib
import errno
import json
import os
import platform
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar

import msgspec

from stoker_watch import regular_files
from stoker_watch.errors import UsageError, make_error, writing
from stoker_watch.knowledge import parse_toml
from stoker_watch.printable import printable
from stoker_watch.runs.schemas import Event, SettingsData
from stoker_watch.secrets import mask_secrets, without_secrets
from stoker_watch.storage.local_files import write_atomic
from stoker_watch.storage.uri import (
    EVENT_LOG,
    LEASE_FILE,
    StorageUri,
    expand_variables,
    is_uri,
    parse_uri,
    working_copy,
)

if os.name == "posix":
    import fcntl

PHASES = (
    "compute", "startup", "compile", "input_wait", "h2d", "host", "sync", "comm", "straggler", "eval", "checkpoint",
    "recovery", "idle", "unattributed",
)  # fmt: skip
"""The phases of the ledger: `compute` is productive, the others are losses. docs/run-folder.md defines each."""

INPUT_STAGES = ("fetch", "decode", "copy", "queue")
"""The stages of `input_wait`. docs/run-folder.md defines each."""

STEPS, EVENTS, DEVICES, QUARANTINE = "steps.jsonl", EVENT_LOG, "devices.jsonl", "quarantine.jsonl"
CONFIG, ENVIRONMENT, FINDINGS = "config.toml", "environment.json", "findings.json"
EVALUATION, THUMBNAILS = "evaluation.json", "evaluation-images.json"
REPORT, OUTPUT, HANG = "report.html", "output.log", "hang.txt"
TRACES, STACKS, PROBES, TRACE_FILES, RANKS = "traces.jsonl", "stacks.jsonl", "probes.jsonl", "traces", "ranks"
CHECKPOINTS, BEST, FINAL, LAUNCH = "checkpoints", "best.safetensors", "final.safetensors", "launch.json"

EVENT_KINDS = (
    "started", "resumed", "info", "warning", "preflight", "evaluated", "checkpoint_saved", "checkpoint_failed",
    "checkpoint_corrupt", "rolled_back", "loss_spike", "lr_too_high", "lr_too_low", "out_of_memory",
    "cuda_graph_failed", "low_host_memory", "gpu_fault", "alert", "preempted", "failed", "finished",
)  # fmt: skip
"""The kinds of events; docs/run-folder.md says when each is written."""

STABILITY_KINDS = frozenset({"rolled_back", "loss_spike", "lr_too_high", "lr_too_low"})
"""Kinds about the loss and the learning rate."""

WARNING_KINDS = STABILITY_KINDS | {
    "warning", "preflight", "checkpoint_failed", "checkpoint_corrupt", "out_of_memory", "cuda_graph_failed",
    "low_host_memory", "gpu_fault", "alert",
}  # fmt: skip
"""Kinds that are shown as warnings: training went on, but not as requested."""

MAX_TEXT_CHARS = 16_384
"""The longest text in an event: the middle of a longer one is left out."""
MAX_EVENT_BYTES = 2**20
"""The largest event: of a larger one the data are left out."""
MAX_LINE_BYTES = 4 * 2**20
"""The longest line of records that is read. An event that is longer is read without its data."""
_EVENT_START = re.compile(
    rb'\{"t":[\d.e+-]{1,40},"attempt":\d{1,9},"kind":"\w{1,40}"(?:,"step":\d{1,18})?'
    rb'(?:,"text":"(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u]){0,%d})?' % MAX_TEXT_CHARS
)
"""The fields of an event before its data, in the order in which `Event` has them."""

Line = TypeVar("Line", bound=msgspec.Struct)


class RunFolder:
    """A run folder opened for writing, from any thread. Training must not fail because a line cannot be written (a full
    disk, a lost mount): such lines are counted, and an event reports their number as soon as writing works again."""

    def __init__(self, path: Path, attempt: int) -> None:
        self.path = path
        self.attempt = attempt
        self._files: dict[str, tuple[int, os.stat_result]] = {}
        """Descriptors, and what they were opened as: a measured program may close them, and its own files get their
        numbers."""
        self._incomplete: set[str] = set()
        self._dropped_lines = 0
        self._lock = threading.RLock()
        self._encoder = msgspec.json.Encoder()

    def append(self, name: str, line: msgspec.Struct) -> None:
        """Adds a line in one write. Raises OSError when not even the first file can be opened."""
        with self._lock:
            data = self._encoder.encode(line) + b"\n"
            if isinstance(line, Event) and len(data) > MAX_EVENT_BYTES:
                short = msgspec.structs.replace(line, data={"left_out_bytes": len(data)})
                data = self._encoder.encode(short) + b"\n"
            try:
                if name not in self._files:
                    fd = _open_for_appending(self.path / name)
                    status = os.fstat(fd)
                    self._files[name], size = (fd, status), status.st_size
                    if size and os.pread(fd, 1, size - 1) != b"\n":
                        self._incomplete.add(name)
                if name in self._incomplete:  # ends the incomplete line that a killed process or a full disk left
                    data = b"\n" + data
                if (own := self._own_fd(name)) is None:
                    raise OSError(errno.EBADF, "the program has closed this descriptor")
                written = os.write(own, data)
            except OSError:  # reported below, when writing works again
                if not self._files:
                    raise
                self._dropped_lines += 1
                return
            if written < len(data):
                self._incomplete.add(name)
                self._dropped_lines += 1
                return
            self._incomplete.discard(name)
            if self._dropped_lines:
                dropped, self._dropped_lines = self._dropped_lines, 0
                text = f"{dropped} lines of the run's records could not be written"
                self.event("warning", text, lines=dropped, storage=True)
                self._dropped_lines += dropped if self._dropped_lines else 0

    def event(self, kind: str, text: str = "", *, step: int | None = None, **data: Any) -> None:
        """Adds a line to events.jsonl. Secrets in texts are masked; texts longer than MAX_TEXT_CHARS are cut."""
        text, data = _shorten(text), _shorten(data)
        self.append(EVENTS, Event(t=time.time(), attempt=self.attempt, kind=kind, step=step, text=text, data=data))

    def replace(self, name: str, value: msgspec.Struct) -> None:
        """Replaces one of the run's JSON files. If that fails, the old file stays and an event reports the error."""
        try:
            write_atomic(self.path / name, self._encoder.encode(value) + b"\n")
        except OSError as error:
            self.event("warning", f"{name} could not be written: {error}", storage=True)

    def close(self) -> None:
        with self._lock:
            for fd in filter(None, map(self._own_fd, self._files)):
                os.close(fd)
            self._files.clear()

    def _own_fd(self, name: str) -> int | None:
        """None: it is closed, or another file by now."""
        fd, status = self._files[name]
        return fd if is_still_open(fd, status) else None


def is_still_open(fd: int, status: os.stat_result) -> bool:
    """Whether a descriptor is open, and the file that it was."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(fd), status)
    return False


def _open_for_appending(path: Path) -> int:
    """events.jsonl names the command of a job and is readable for the user only. A link is an error: its target is not
    one of the run's files."""
    is_private = path.name == EVENTS
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | regular_files.NO_LINKS
    fd = regular_files.open_fd(path, flags=flags, mode=0o600 if is_private else 0o644)
    if is_private:
        with contextlib.suppress(OSError):  # a file system without modes, or the file of another user
            os.fchmod(fd, 0o600)  # of a run that was copied
    return fd


def _shorten(value: Any) -> Any:
    """Texts in `value`, at any depth, without secrets and lone surrogates, cut to MAX_TEXT_CHARS."""
    if isinstance(value, str):
        value = mask_secrets(value)
        if len(value) > MAX_TEXT_CHARS:
            half = MAX_TEXT_CHARS // 2 - 32
            value = f"{value[:half]} … {len(value) - 2 * half:,} characters left out … {value[-half:]}"
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_shorten(key): _shorten(item) for key, item in value.items()}
    return [_shorten(item) for item in value] if isinstance(value, list | tuple) else value


def read_lines(run: Path, name: str, kind: type[Line]) -> Iterator[Line]:
    """The lines of a .jsonl file, also while it is written; none when it is absent. Skips incomplete lines. Raises
    UsageError at a complete line that is not a `kind`: a newer version of stoker wrote it."""
    return (line for _, line in numbered_lines(run, name, kind))


def numbered_lines(run: Path, name: str, kind: type[Line]) -> Iterator[tuple[int, Line]]:
    """`read_lines` with the line number of each in its file, from 1."""
    path = run / name
    if not path.exists():
        return
    with _open_records(path) as file:
        for number, line in enumerate(_bounded_lines(file), start=1):
            if len(line) > MAX_LINE_BYTES:
                line = _without_data(line, kind, f"{path}:{number}")
            if line.strip():
                try:
                    record: Any = msgspec.json.decode(line, type=kind)
                    if isinstance(record, Event):  # without secrets: others may have written it
                        text, data = mask_secrets(record.text), without_secrets(record.data)
                        record = msgspec.structs.replace(record, text=text, data=data)
                    yield number, record
                except msgspec.ValidationError as error:
                    where, name, cause = f"{path}:{number}", kind.__name__, str(error)
                    raise make_error(UsageError, "newer-record", where, cause=cause, record=name) from error
                except (msgspec.DecodeError, UnicodeDecodeError):  # left incomplete by a kill
                    pass
                except RecursionError as error:
                    raise make_error(UsageError, "record-nested-too-deeply", f"{path}:{number}") from error
            if not line.endswith(b"\n"):
                return  # the end of a live run's file: what follows now is the rest of this line


def _bounded_lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines; of one that is longer than MAX_LINE_BYTES the beginning, one byte more than that with a newline."""
    while line := file.readline(MAX_LINE_BYTES):
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                pass
            line += b"\n"
        yield line


def _without_data(line: bytes, kind: type[msgspec.Struct], location: str) -> bytes:
    """The beginning of an event that is too long, as a complete line. Raises UsageError for other records."""
    start = _EVENT_START.match(line) if kind is Event else None
    if start is None:
        raise make_error(UsageError, "record-too-long", location, max_line_bytes=MAX_LINE_BYTES)
    text = start[0].decode(errors="ignore")
    return (text + ('"}\n' if ',"text":"' in text else "}\n")).encode()


def _open_records(path: Path) -> BinaryIO:
    try:
        return regular_files.open_file(path)
    except OSError as error:
        raise UsageError("A file of the run cannot be read.", location=path, cause=error.strerror) from error


def read_settings(run: Path) -> dict[str, Any] | None:
    """The tables of config.toml; None when the run has none. Only values that other versions have as well are checked
    (`config.settings.from_toml` checks all). Raises UsageError when the file is damaged."""
    path = run / CONFIG
    try:
        tables = parse_toml(regular_files.read_text(path, max_bytes=regular_files.MAX_TOML_BYTES))
        for section, table in tables.items():
            msgspec.convert(table, dict[str, str] if section == "reasons" else SettingsData)
        return tables
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, msgspec.ValidationError) as error:
        raise make_error(UsageError, "settings-damaged", path, cause=str(error)) from error


def open_run(text: str | Path) -> Path:
    """The folder of an existing run, for reading; for a run in a bucket, a copy of its records. Raises UsageError,
    which lists the runs in the same folder, and StorageError."""
    text = expand_variables(text) if isinstance(text, str) else str(text)
    if is_uri(text):
        return fetch_run(parse_uri(text))
    path = Path(text)
    if (path / EVENTS).exists():
        return path
    parent = path.parent if path.parent.exists() else Path("runs")
    runs = sorted(str(p.parent) for p in parent.glob(f"*/{EVENTS}"))[-8:]
    cause = "the folder has no " + EVENTS if path.exists() else "there is no such folder"
    raise make_error(UsageError, "folder-of-no-run", choices=runs, cause=cause, path=str(path))


def fetch_run(uri: StorageUri, *, weights: bool = False) -> Path:
    """A run in a bucket as a local folder, for reading: the working copy where it is as new, else a copy of the records
    of all ranks, or (weights) of settings and best, final or newest weights. Raises UsageError, StorageError."""
    from stoker_watch.storage import store  # needed for runs in a bucket only

    working_dir = working_copy(uri)
    with contextlib.suppress(OSError), locked(working_dir) as free:  # OSError: there is no working copy
        if free is False and (working_dir / EVENTS).exists():
            return working_dir
    if weights:
        return store.fetch_files(uri, (CONFIG,), first_of=(BEST, FINAL, f"{CHECKPOINTS}/step-*.safetensors"))
    names = (CONFIG, ENVIRONMENT, EVALUATION, THUMBNAILS, FINDINGS, EVENTS, STEPS, DEVICES, TRACES, STACKS, PROBES,
             QUARANTINE, LEASE_FILE, f"{RANKS}/*")  # fmt: skip
    return store.fetch_files(uri, names)


def is_finished(run: Path) -> bool:
    """Whether a run reached its length, and was not extended since."""
    kinds = [event.kind for event in read_lines(run, EVENTS, Event) if event.kind in ("finished", "resumed")]
    return kinds[-1:] == ["finished"]


def last_attempt(run: Path) -> int:
    return max((event.attempt for event in read_lines(run, EVENTS, Event)), default=0)


def runs_named(parent: Path, name_prefix: str) -> list[Path]:
    """The runs `parent/name_prefix-N`, oldest first."""
    pattern = re.compile(re.escape(name_prefix) + r"-(\d+)$")
    matches = [(int(m[1]), p) for p in parent.glob(f"{name_prefix}-*") if (m := pattern.match(p.name)) and p.is_dir()]
    return [path for _, path in sorted(matches)]


def make_run(parent: Path, name_prefix: str) -> Path:
    """Creates `parent/name_prefix-N` with the next free number, which no other process gets. Raises OSError."""
    number = max((int(path.name.rpartition("-")[2]) for path in runs_named(parent, name_prefix)), default=0) + 1
    while True:
        path = parent / f"{name_prefix}-{number}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:  # another process took this number
            number += 1
        else:
            return path


@contextlib.contextmanager
def recording(
    path: Path, environment: dict[str, Any], description: str, *, fix: str, **data: Any
) -> Iterator[tuple[RunFolder, int]]:
    """(the run folder of an external job, locked and open for writing; the file descriptor of its lock, which holds the
    lock until the end of the block in a process that inherits it, too). A folder with records gets one more attempt.
    description: text of the event `started` or `resumed`; data: its data; fix: what the error messages advise. Raises
    UsageError where stoker trains or another process records, StorageError when the folder cannot be written."""
    if (path / CONFIG).exists():
        raise UsageError("This folder is the run of a training by stoker.", location=path, fix=fix)
    if is_finished(path):
        starts = [
            event.text.partition(": ")[2]
            for event in read_lines(path, EVENTS, Event)
            if event.kind in ("started", "resumed")
        ]
        if starts and starts[-1] != description:
            cause = f"it was `{starts[-1]}`"
            raise UsageError("The run of another job is finished there.", location=path, cause=cause, fix=fix)
    with contextlib.ExitStack() as stack:
        with writing("The run's folder cannot be written.", path, fix="make room, or " + fix):
            path.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | regular_files.NO_LINKS
            fd = regular_files.open_fd(path / ".lock", flags=flags)
            stack.callback(_release, fd, os.fstat(fd))
            if (held := lock(fd)) is False:
                raise UsageError("Another job is being recorded there.", location=path, fix=fix)
            folder = RunFolder(path, last_attempt(path) + 1)
            stack.callback(folder.close)
            write_atomic(path / ENVIRONMENT, json.dumps(environment, indent=2).encode(), private=True)
            kind = "started" if folder.attempt == 1 else "resumed"
            folder.event(kind, f"attempt {folder.attempt}: {description}", **data)
            if held is None:
                text = "this file system has no locks: a second job could write to the same run folder"
                folder.event("warning", text)
        yield folder, fd


def _release(fd: int, status: os.stat_result) -> None:
    """Unlocks, too: a process that the job left behind inherits the descriptor, and would hold the lock on."""
    if is_still_open(fd, status):
        with contextlib.suppress(OSError):  # this file system has no locks
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


@contextlib.contextmanager
def locked(run: Path) -> Iterator[bool | None]:
    """Locks the run for this process; the kernel releases the lock of a process that ends. Yields False when another
    process holds it, None where the file system has no locks (Lustre without -o flock, some network mounts)."""
    with open(run / ".lock", "a", opener=regular_files.no_links) as file:
        yield lock(file)


def sign_lock(run: Path) -> None:
    """Writes into the lock that this process holds who it is. Without room it stays unsigned."""
    with contextlib.suppress(OSError), open(run / ".lock", "w", opener=regular_files.no_links) as file:
        file.write(f"process {os.getpid()} of {platform.node()}")


def holder_of_lock(run: Path) -> str | None:
    """The process that signed the lock last, for messages; None if it is unknown."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return printable(regular_files.read_text(run / ".lock", max_bytes=1000)) or None
    return None


def lock(file: IO[str] | int) -> bool | None:
    """`locked` for an open file; a process that inherits its descriptor holds the lock too."""
    for _ in range(20):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.02)  # `stoker why` holds it for a moment, to see whether the run is alive
        except OSError:
            return None
        else:
            return True
    return False
