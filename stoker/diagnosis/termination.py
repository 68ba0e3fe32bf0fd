"""What is known of a job that has ended, read out of its run's records: what `postmortem.explain` judges.

Of the newest attempt alone: each has its own end, and its own part of the output. What nobody recorded is None. Whether
a run lives is `alive.py`; the lines of an output are `output.py`.
"""

import dataclasses
import signal
import zlib
from pathlib import Path
from typing import Any

from stoker.diagnosis.alive import is_held, lease_holder
from stoker.diagnosis.output import Line, read_output
from stoker.diagnosis.series import Mean
from stoker.runs import records
from stoker.runs.records import DEVICES, EVENTS, OUTPUT, STACKS, STEPS
from stoker.runs.schemas import DeviceSample, Event, StackWindow, StepWindow

_USUAL = {"finished": 0, "preempted": 75}
"""What stoker's own runs end with, by the event: errors.Preempted has the other."""
_HEAD_BYTES = 4096
"""Of output.log, by whose checksum `watch/recorder.py` knows it again."""
_MOSTLY = 0.9
"""Share of the samples from which on the main thread was in one thing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """What is known of a job that has ended. None: nobody saw it. Shares are 0 … 1, of the newest sample.

    exit_code: as `subprocess` has it, the negative number of a signal; a shell's 128 + signal counts as that signal.
    oom_kills: how often the kernel killed in the job's cgroup while it ran (memory.events: oom_kill, after - before).
    kernel: lines of the kernel's log of that time; pids: the job's processes. xids: what the driver reported of its
    GPUs. empty_inputs: input files of zero bytes. still: how long nothing had moved. memory_growth: of the memory's
    share, from the sample before the newest to it.
    """

    exit_code: int | None = None
    place: str = ""
    """Where its end is recorded; empty: nobody saw it."""
    output: tuple[Line, ...] = ()
    kernel: tuple[Line, ...] = ()
    pids: frozenset[int] = frozenset()
    xids: tuple[Line, ...] = ()
    oom_kills: int | None = None
    memory_share: float | None = None
    memory_growth: float = 0.0
    gpu_memory_share: float | None = None
    gpu_used: bool | None = None
    """Whether a kernel ran on any GPU."""
    shm_share: float | None = None
    samples_place: str = ""
    empty_inputs: tuple[str, ...] = ()
    still: "Still | None" = None

    @property
    def signal(self) -> int | None:
        code = self.exit_code
        if code is None:
            return None
        if code < 0:
            return -code
        return code - 128 if 128 < code <= 128 + signal.NSIG else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Still:
    """The time before an end in which no step was done and no line was printed."""

    seconds: float
    place: str
    """Of the newest step."""
    cores: float | None = None
    """Processor-seconds per second of the job's processes in it."""
    waits_in: str | None = None
    """What the main thread was in, of `StackWindow.main`, in nearly all samples of it."""
    frame: str | None = None
    """Where, in the job's own files."""
    stacks_place: str = ""


def of_run(run: Path) -> Ended | None:
    """What is known of the end of a run of ours, or of one that was watched: of its newest attempt. None: it lives, it
    finished and nobody kept its output, it never began, or its lock cannot be asked.

    An attempt that was killed has no last event, and the kernel has freed its lock.
    """
    events = list(records.numbered_lines(run, EVENTS, Event))
    attempt = max((event.attempt for _, event in events), default=None)
    if attempt is None:
        return None
    ends = [(n, e) for n, e in events if e.attempt == attempt and e.kind in ("finished", "failed", "preempted")]
    if not ends and (is_held(run) is not False or lease_holder(run) is not None):
        return None
    number, end = ends[-1] if ends else (0, None)
    place = f"{EVENTS}:{number}" if end is not None else ""
    told: dict[str, Any] = {} if end is None else end.data
    if (run / OUTPUT).exists():
        output = _output_of(run, [event for _, event in events if event.attempt == attempt])
    elif end is None or end.kind != "finished":
        output = tuple(Line(text, place) for text in end.text.splitlines()) if end is not None else ()
    else:
        return None
    moved = None if end is None else _last_moved(run, end)
    seen = _read_samples(run, attempt, moved[0] if moved is not None else None)
    newest = seen.newest[-1] if seen.newest else DeviceSample(t=0.0, attempt=attempt)
    used, limit = newest.memory_used_bytes, newest.memory_limit_bytes
    gpus = [gpu.memory_used_bytes / gpu.memory_total_bytes for gpu in newest.gpus
            if gpu.memory_used_bytes is not None and gpu.memory_total_bytes]  # fmt: skip
    return Ended(
        exit_code=None if end is None else _exit_code(end),
        place=place,
        output=output,
        kernel=tuple(Line(text, place) for text in told.get("kernel", ())),
        pids=frozenset(told.get("pids", ())),
        xids=tuple(seen.xids),
        oom_kills=told.get("oom_kills"),
        memory_share=used / limit if used is not None and limit else None,
        memory_growth=_growth(seen.newest),
        gpu_memory_share=max(gpus, default=None),
        gpu_used=seen.gpu_used,
        shm_share=newest.shm_used_bytes / newest.shm_total_bytes
        if newest.shm_used_bytes is not None and newest.shm_total_bytes else None,
        samples_place=seen.place,
        empty_inputs=tuple(told.get("empty_inputs", ())),
        still=None if end is None or moved is None else _still(run, end, *moved, seen.cpu_since),
    )  # fmt: skip


@dataclasses.dataclass
class _Samples:
    """What is kept of an attempt's samples: a day has 86,400 of them."""

    newest: list[DeviceSample] = dataclasses.field(default_factory=list)
    """The last two."""
    place: str = ""
    gpu_used: bool | None = None
    xids: list[Line] = dataclasses.field(default_factory=list)
    cpu_since: Mean = dataclasses.field(default_factory=Mean)
    """Of `process_cpu`, since the job had last moved."""


def _read_samples(run: Path, attempt: int, moved_t: float | None) -> _Samples:
    seen = _Samples()
    for number, sample in records.numbered_lines(run, DEVICES, DeviceSample):
        if sample.attempt != attempt:
            continue
        seen.newest = [*seen.newest[-1:], sample]
        seen.place = f"{DEVICES}:{number}"
        for gpu in sample.gpus:
            seen.xids += [Line(f"Xid {xid} of GPU {gpu.index}", seen.place) for xid in gpu.xids]
            if gpu.utilisation is not None:
                seen.gpu_used = seen.gpu_used or gpu.utilisation > 0
        if moved_t is not None and sample.t > moved_t:
            seen.cpu_since.add(sample.process_cpu)
    return seen


def _growth(samples: list[DeviceSample]) -> float:
    shares = [s.memory_used_bytes / s.memory_limit_bytes for s in samples
              if s.memory_used_bytes is not None and s.memory_limit_bytes]  # fmt: skip
    return max(0.0, shares[-1] - shares[0]) if len(shares) == 2 else 0.0


def _exit_code(end: Event) -> int | None:
    """None: of a watched job, which the kernel did not tell."""
    if "exit_code" in end.data:
        code: int | None = end.data["exit_code"]
        return code
    return _USUAL.get(end.kind, _of_python(end.text))


def _output_of(run: Path, events: list[Event]) -> tuple[Line, ...]:
    """The attempt's part of the output: where it begins, the event that began it says. The file may have become
    output.1.log since; it is known by the checksum of its beginning, which a copy has too."""
    log = run / OUTPUT
    older = log.with_name("output.1.log")
    began = next((event.data for event in events if "output_offset" in event.data), None)
    if began is None:
        return read_output(log)
    offset = int(began["output_offset"])
    if offset and _head(log, offset) == began.get("output_head"):
        return read_output(log, start=offset)
    if not older.exists():
        return read_output(log)
    start = offset if offset and _head(older, offset) == began.get("output_head") else 0
    return (*read_output(older, start=start), *read_output(log))


def _head(path: Path, offset: int) -> int | None:
    """Of the beginning of a file, as it was at that length; None where it does not have as much."""
    if not path.exists() or path.stat().st_size < offset:
        return None
    with path.open("rb") as file:
        return zlib.crc32(file.read(min(offset, _HEAD_BYTES)))


def _last_moved(run: Path, end: Event) -> tuple[float, str] | None:
    """When the job last did a step or printed a line, and the place of its newest step; None where neither was
    recorded."""
    moved, place = None, ""
    for number, line in records.numbered_lines(run, STEPS, StepWindow):
        if line.attempt == end.attempt and line.steps > 0:
            moved, place = line.t, f"{STEPS}:{number}"
    if (run / OUTPUT).exists():
        moved = max(moved or 0.0, min((run / OUTPUT).stat().st_mtime, end.t))  # of a copy it may be later: no stillness
    return None if moved is None else (moved, place)


def _still(run: Path, end: Event, moved: float, place: str, cpu: Mean) -> Still:
    """How long nothing had moved before the end."""
    stacks = [(n, w) for n, w in records.numbered_lines(run, STACKS, StackWindow)
              if w.attempt == end.attempt and w.t - w.wall_s >= moved]  # fmt: skip
    count = sum(window.samples for _, window in stacks)
    shares: dict[str, float] = {}
    frames: dict[str, float] = {}
    for _, window in stacks:
        for name, share in window.main.items():
            shares[name] = shares.get(name, 0.0) + share * window.samples / count
        for name, share in window.frames.items():
            frames[name] = frames.get(name, 0.0) + share * window.samples / count
    most = max(shares, key=lambda name: shares[name], default=None)
    return Still(
        seconds=max(0.0, end.t - moved),
        place=place,
        cores=cpu.value,
        waits_in=most if most is not None and shares[most] >= _MOSTLY else None,
        frame=max(frames, key=lambda name: frames[name], default=None),
        stacks_place=f"{STACKS}:{stacks[-1][0]}" if stacks else "",
    )


def _of_python(error: str) -> int:
    """What Python ends with after an error that is not stoker's."""
    return 130 if error.startswith("KeyboardInterrupt") else 1
