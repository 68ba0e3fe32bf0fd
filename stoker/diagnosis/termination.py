"""What is known of a job that has ended, read from its run's records: the input of `postmortem.explain`.

Only of the newest attempt: each has its own end, and its own part of the output. What was not recorded is None. Whether
a run is alive is in `alive.py`; the lines of an output are in `output.py`.
"""

import dataclasses
import signal
import zlib
from pathlib import Path
from typing import Any

from stoker.diagnosis.alive import is_held, lease_holder
from stoker.diagnosis.output import MAX_LINE_CHARS, LogLine, read_output
from stoker.diagnosis.series import Mean
from stoker.runs import records
from stoker.runs.records import DEVICES, EVENTS, OUTPUT, STACKS, STEPS
from stoker.runs.schemas import DeviceSample, Event, StackWindow, StepWindow

_EXIT_CODES = {"finished": 0, "preempted": 75}
"""Event of stoker's own runs → exit code, as in stoker/errors.py."""
_HEAD_BYTES = 4096
"""Bytes of output.log whose checksum identifies it, as in `watch/recorder.py`."""
_DOMINANT_FRACTION = 0.9
"""Fraction of the samples from which on the main thread counts as being in one state."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Termination:
    """What is known of a job that has ended. None: not known. Fractions are 0 … 1, of the newest sample.

    exit_code: as in `subprocess`, a signal is its negative number; a shell's 128 + signal counts as that signal.
    oom_kills: kills by the kernel in the job's cgroup while it ran (memory.events: oom_kill, after - before).
    kernel_log: lines of the kernel's log of that time; pids: the job's processes. xids: Xid errors of its GPUs.
    empty_inputs: input files of zero bytes. memory_growth: growth of memory_fraction between the last two samples.
    """

    exit_code: int | None = None
    source: str = ""
    """Where its end is recorded; empty: it is not."""
    output: tuple[LogLine, ...] = ()
    kernel_log: tuple[LogLine, ...] = ()
    pids: frozenset[int] = frozenset()
    xids: tuple[LogLine, ...] = ()
    oom_kills: int | None = None
    memory_fraction: float | None = None
    memory_growth: float = 0.0
    gpu_memory_fraction: float | None = None
    gpu_used: bool | None = None
    """Whether a kernel ran on any GPU."""
    shm_fraction: float | None = None
    samples_source: str = ""
    empty_inputs: tuple[str, ...] = ()
    hang: "HangInfo | None" = None

    @property
    def signal(self) -> int | None:
        code = self.exit_code
        if code is None:
            return None
        if code < 0:
            return -code
        return code - 128 if 128 < code <= 128 + signal.NSIG else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class HangInfo:
    """The time before an end without a step and without a line of output."""

    duration_s: float
    source: str
    """Record of the newest step."""
    cpu_cores: float | None = None
    """CPU-seconds per second of the job's processes in it."""
    main_thread_state: str | None = None
    """The key of `StackWindow.main_thread` of nearly all samples in it."""
    frame: str | None = None
    """The most frequent frame in the job's own files."""
    stacks_source: str = ""


def read_termination(run_dir: Path) -> Termination | None:
    """What is known of the end of a run's newest attempt. None: it is alive, it finished and its output was not kept,
    it never began, or its lock cannot be tried.

    An attempt that was killed has no last event, and the kernel has released its lock.
    """
    events = list(records.numbered_lines(run_dir, EVENTS, Event))
    attempt = max((event.attempt for _, event in events), default=None)
    if attempt is None:
        return None
    end_events = [(n, e) for n, e in events if e.attempt == attempt and e.kind in ("finished", "failed", "preempted")]
    if not end_events and (is_held(run_dir) is not False or lease_holder(run_dir) is not None):
        return None
    line_number, end_event = end_events[-1] if end_events else (0, None)
    source = f"{EVENTS}:{line_number}" if end_event is not None else ""
    end_data: dict[str, Any] = {} if end_event is None else end_event.data
    if (run_dir / OUTPUT).exists():
        output = _read_attempt_output(run_dir, [event for _, event in events if event.attempt == attempt])
    elif end_event is None or end_event.kind != "finished":
        output = (
            tuple(LogLine(text[:MAX_LINE_CHARS], source) for text in end_event.text.splitlines())
            if end_event is not None
            else ()
        )
    else:
        return None
    last_progress = None if end_event is None else _find_last_progress(run_dir, end_event)
    samples = _read_samples(run_dir, attempt, last_progress[0] if last_progress is not None else None)
    newest = samples.newest[-1] if samples.newest else DeviceSample(t=0.0, attempt=attempt)
    gpu_fractions = [_fraction(gpu.memory_used_bytes, gpu.memory_total_bytes) for gpu in newest.gpus]
    hang = None
    if end_event is not None and last_progress is not None:
        hang = _read_hang_info(run_dir, end_event, *last_progress, samples.cpu_since_progress)
    return Termination(
        exit_code=None if end_event is None else _infer_exit_code(end_event),
        source=source,
        output=output,
        kernel_log=tuple(LogLine(text, source) for text in end_data.get("kernel", ())),
        pids=frozenset(end_data.get("pids", ())),
        xids=tuple(samples.xids),
        oom_kills=end_data.get("oom_kills"),
        memory_fraction=_fraction(newest.memory_used_bytes, newest.memory_limit_bytes),
        memory_growth=_memory_growth(samples.newest),
        gpu_memory_fraction=max((fraction for fraction in gpu_fractions if fraction is not None), default=None),
        gpu_used=samples.gpu_used,
        shm_fraction=_fraction(newest.shm_used_bytes, newest.shm_total_bytes),
        samples_source=samples.source,
        empty_inputs=tuple(end_data.get("empty_inputs", ())),
        hang=hang,
    )


def _fraction(used: int | None, total: int | None) -> float | None:
    return used / total if used is not None and total else None


@dataclasses.dataclass
class _SampleSummary:
    """A summary of an attempt's samples: a day has 86,400 of them."""

    newest: list[DeviceSample] = dataclasses.field(default_factory=list)
    """The last two of the time in which the job had memory: later ones show a host without it."""
    source: str = ""
    gpu_used: bool | None = None
    xids: list[LogLine] = dataclasses.field(default_factory=list)
    cpu_since_progress: Mean = dataclasses.field(default_factory=Mean)
    """`process_cpu` since the job's last progress."""


def _read_samples(run_dir: Path, attempt: int, last_progress_t: float | None) -> _SampleSummary:
    samples = _SampleSummary()
    for line_number, sample in records.numbered_lines(run_dir, DEVICES, DeviceSample):
        if sample.attempt != attempt:
            continue
        line_source = f"{DEVICES}:{line_number}"
        if sample.rss_bytes or not (samples.newest and samples.newest[-1].rss_bytes):
            samples.newest = [*samples.newest[-1:], sample]
            samples.source = line_source
        for gpu in sample.gpus:
            samples.xids += [LogLine(f"Xid {xid} of GPU {gpu.index}", line_source) for xid in gpu.xids]
            if gpu.utilization is not None:
                samples.gpu_used = samples.gpu_used or gpu.utilization > 0
        if last_progress_t is not None and sample.t > last_progress_t:
            samples.cpu_since_progress.add(sample.process_cpu)
    return samples


def _memory_growth(samples: list[DeviceSample]) -> float:
    fractions = [_fraction(sample.memory_used_bytes, sample.memory_limit_bytes) for sample in samples]
    if len(fractions) != 2 or fractions[0] is None or fractions[1] is None:
        return 0.0
    return max(0.0, fractions[1] - fractions[0])


def _infer_exit_code(end_event: Event) -> int | None:
    """None: of an external job whose exit code the kernel did not report."""
    if "exit_code" in end_event.data:
        code: int | None = end_event.data["exit_code"]
        return code
    return _EXIT_CODES.get(end_event.kind, _python_exit_code(end_event.text))


def _read_attempt_output(run_dir: Path, events: list[Event]) -> tuple[LogLine, ...]:
    """The attempt's part of the output: its first event has the offset. The file may have been rotated to output.1.log
    since; the checksum of its beginning identifies it, also in a copy."""
    log = run_dir / OUTPUT
    rotated_log = log.with_name("output.1.log")
    start_data = next((event.data for event in events if "output_offset" in event.data), None)
    if start_data is None:
        return read_output(log)
    offset = int(start_data["output_offset"])
    if offset and _head_checksum(log, offset) == start_data.get("output_head"):
        return read_output(log, min_offset=offset)
    if not rotated_log.exists():
        return read_output(log)
    start = offset if offset and _head_checksum(rotated_log, offset) == start_data.get("output_head") else 0
    return (*read_output(rotated_log, min_offset=start), *read_output(log))


def _head_checksum(path: Path, offset: int) -> int | None:
    """Checksum of the beginning of a file when it was `offset` bytes long; None if it is shorter."""
    if not path.exists() or path.stat().st_size < offset:
        return None
    with path.open("rb") as file:
        return zlib.crc32(file.read(min(offset, _HEAD_BYTES)))


def _find_last_progress(run_dir: Path, end_event: Event) -> tuple[float, str] | None:
    """(Unix time of the last step or line of output, record of the newest step); None if neither was recorded."""
    last_progress_t, source = None, ""
    for line_number, window in records.numbered_lines(run_dir, STEPS, StepWindow):
        if window.attempt == end_event.attempt and window.window_steps > 0:
            last_progress_t, source = window.t, f"{STEPS}:{line_number}"
    if (run_dir / OUTPUT).exists():
        last_progress_t = max(
            last_progress_t or 0.0, min((run_dir / OUTPUT).stat().st_mtime, end_event.t)
        )  # in a copy it may be later: no hang then
    return None if last_progress_t is None else (last_progress_t, source)


def _read_hang_info(run_dir: Path, end_event: Event, last_progress_t: float, source: str, cpu: Mean) -> HangInfo:
    """The time without progress before the end."""
    stacks = [(n, w) for n, w in records.numbered_lines(run_dir, STACKS, StackWindow)
              if w.attempt == end_event.attempt and w.t - w.wall_s >= last_progress_t]  # fmt: skip
    num_samples = sum(window.samples for _, window in stacks)
    fractions: dict[str, float] = {}
    frames: dict[str, float] = {}
    for _, window in stacks:
        for name, fraction in window.main_thread.items():
            fractions[name] = fractions.get(name, 0.0) + fraction * window.samples / num_samples
        for name, fraction in window.frames.items():
            frames[name] = frames.get(name, 0.0) + fraction * window.samples / num_samples
    dominant = max(fractions, key=lambda name: fractions[name], default=None)
    return HangInfo(
        duration_s=max(0.0, end_event.t - last_progress_t),
        source=source,
        cpu_cores=cpu.value,
        main_thread_state=dominant if dominant is not None and fractions[dominant] >= _DOMINANT_FRACTION else None,
        frame=max(frames, key=lambda name: frames[name], default=None),
        stacks_source=f"{STACKS}:{stacks[-1][0]}" if stacks else "",
    )


def _python_exit_code(error: str) -> int:
    """Python's exit code after an error that is not stoker's."""
    return 130 if error.startswith("KeyboardInterrupt") else 1
