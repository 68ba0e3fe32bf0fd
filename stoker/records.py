"""The run folder: names, schemas, writers and readers of its files. The interface between all commands.

Writers append whole lines and replace whole files by rename; readers accept a torn last line, so a live, a dead and a
finished run read alike. `docs/run-folder.md` describes every file for people. Not here: checkpoints (`train/checkpoint.py`).
"""

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from stoker.errors import UsageError

if os.name == "posix":
    import fcntl

PHASES = (
    "compute", "startup", "compile", "input_wait", "h2d", "host", "sync", "comm", "straggler", "eval", "checkpoint",
    "recovery", "idle", "unattributed",
)  # fmt: skip
"""The ledger's phases; `compute` is the productive one, the others are losses. What each means: docs/run-folder.md."""

STEPS, EVENTS, DEVICES, QUARANTINE = "steps.jsonl", "events.jsonl", "devices.jsonl", "quarantine.jsonl"
CONFIG, ENVIRONMENT, FINDINGS = "config.toml", "environment.json", "findings.json"
CHECKPOINTS, BEST, FINAL = "checkpoints", "best.safetensors", "final.safetensors"


class StepWindow(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A line of steps.jsonl: at least one second of a run. The phases of a window add up to wall_s × devices."""

    t: float
    """Unix time, seconds, at the end of the window."""
    attempt: int
    """1 for the first start of the run, one more after each restart."""
    step: int
    """Optimizer steps done at the end of the window."""
    steps: int
    """Of these, inside the window."""
    pictures: int
    """Pictures trained on inside the window."""
    wall_s: float
    devices: int
    phases: dict[str, float]
    """Device-seconds by phase; a phase that is absent took none."""
    losses: dict[str, float] = {}
    """Mean of each part of the loss over the finite steps of the window, and `total`."""
    rate: float | None = None
    grad_norm: float | None = None
    """Mean norm of the gradient before clipping, over the finite steps."""
    skipped: int = 0
    """Steps of the window that were skipped because a gradient was not finite."""
    memory_peak_bytes: int | None = None


class Event(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A line of events.jsonl: something that happened once."""

    t: float
    attempt: int
    kind: str
    """started, resumed, note, warning, evaluated, checkpoint, checkpoint_failed, checkpoint_corrupt, preempted, failed,
    finished."""
    step: int | None = None
    text: str = ""
    """The line a person saw."""
    data: dict[str, Any] = {}


class GpuSample(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One GPU as the driver sees it. None: the machine does not say."""

    index: int
    utilisation: float | None = None
    """Share of the last sample period in which a kernel ran, 0 … 1."""
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: int | None = None
    temperature_c: int | None = None
    throttle_reasons: int | None = None
    """NVML's bit mask of clock event reasons."""


class DeviceSample(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A line of devices.jsonl: the second witness, once a second. Shares are of the time since the line before."""

    t: float
    attempt: int
    gpus: list[GpuSample] = []
    cpu: list[float] = []
    """Busy share of each core of the machine, 0 … 1."""
    process_cpu: float | None = None
    """Processor seconds per second of this process."""
    rss_bytes: int | None = None
    """Resident memory of this process and its children."""
    memory_used_bytes: int | None = None
    memory_limit_bytes: int | None = None
    """Of the host, or of the cgroup where that is tighter."""
    psi_cpu: float | None = None
    psi_memory: float | None = None
    psi_io: float | None = None
    """Pressure stall information, share of time in which some task waited, 0 … 1."""
    throttled_s: float | None = None
    """Seconds the cgroup's CPU quota stopped us."""


class Quarantined(msgspec.Struct, kw_only=True):
    """A line of quarantine.jsonl: a picture that could not be used, and what stood in for it."""

    t: float
    attempt: int
    row: int
    path: str
    error: str
    position: int
    """Place in the stream of training samples from which on the picture is not used."""
    replaced_by: int
    """Row that took its place there."""


class Evidence(msgspec.Struct, kw_only=True):
    """A number, and where a person can look it up."""

    text: str
    value: float | None = None
    place: str = ""


class Finding(msgspec.Struct, kw_only=True):
    """An answer of the diagnosis; see DESIGN of `diagnose/catalogue.py` for the causes."""

    cause: str
    severity: str
    """info, warning or critical."""
    title: str
    evidence: list[Evidence]
    lost_device_s: float | None = None
    lost_money: float | None = None
    fix: str = ""
    command: str | None = None
    confidence: float | None = None
    verified: str | None = None


Line = TypeVar("Line", bound=msgspec.Struct)


class RunFolder:
    """A run's folder, opened to write. Readers use the functions below."""

    def __init__(self, path: Path, attempt: int) -> None:
        self.path = path
        self.attempt = attempt
        self._files: dict[str, int] = {}
        self._encoder = msgspec.json.Encoder()

    def append(self, name: str, line: msgspec.Struct) -> None:
        """Adds a line in one write; a process killed in between tears at most this line. Safe from several threads."""
        if name not in self._files:
            _end_torn_line(self.path / name)
            self._files[name] = os.open(self.path / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(self._files[name], self._encoder.encode(line) + b"\n")

    def event(self, kind: str, text: str = "", *, step: int | None = None, **data: Any) -> None:
        self.append(EVENTS, Event(t=time.time(), attempt=self.attempt, kind=kind, step=step, text=text, data=data))

    def close(self) -> None:
        for handle in self._files.values():
            os.close(handle)
        self._files.clear()


def _end_torn_line(path: Path) -> None:
    """A line that a killed process left half is ended, so that the next one starts on its own."""
    if path.exists() and path.stat().st_size:
        with path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


def write_whole(path: Path, data: bytes) -> None:
    """Replaces a file as a whole: after a kill or a power cut it is the old one or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Makes renames inside a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_lines(run: Path, name: str, kind: type[Line]) -> Iterator[Line]:
    """The lines of one of the run's .jsonl files; nothing when it is absent. Torn lines are passed over."""
    path = run / name
    if not path.exists():
        return
    decoder = msgspec.json.Decoder(kind)
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                with contextlib.suppress(msgspec.DecodeError):  # torn by a kill: never whole again
                    yield decoder.decode(line)


def open_run(text: str | Path) -> Path:
    """The folder of an existing run, to read. Raises UsageError that lists the runs beside it."""
    path = Path(text)
    if (path / EVENTS).exists():
        return path
    parent = path.parent if path.parent.exists() else Path("runs")
    runs = sorted(str(p.parent) for p in parent.glob(f"*/{EVENTS}"))[-8:]
    cause = "the folder has no " + EVENTS if path.exists() else "there is no such folder"
    raise UsageError(f"{str(path)!r} is not a run.", cause=cause, choices=runs, fix="name a folder that training wrote")


def is_finished(run: Path) -> bool:
    return any(event.kind == "finished" for event in read_lines(run, EVENTS, Event))


def last_attempt(run: Path) -> int:
    """Number of the newest attempt; 0 when the run never started."""
    return max((event.attempt for event in read_lines(run, EVENTS, Event)), default=0)


def runs_named(parent: Path, stem: str) -> list[Path]:
    """The runs `parent/stem-N`, oldest first."""
    pattern = re.compile(re.escape(stem) + r"-(\d+)$")
    found = [(int(m[1]), p) for p in parent.glob(f"{stem}-*") if (m := pattern.match(p.name)) and p.is_dir()]
    return [path for _, path in sorted(found)]


@contextlib.contextmanager
def locked(run: Path) -> Iterator[bool]:
    """Holds the run for this process. Yields False when another living process has it; the kernel frees a dead one's."""
    with (run / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
