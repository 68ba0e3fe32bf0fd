"""What is known of a job that has ended, read from its run's records: the input of `postmortem.explain`.

Only of the newest attempt: each has its own end, and its own part of the output. What was not recorded is None. Whether
a run is alive is in `alive.py`; the lines of an output are in `output.py`.
"""

import dataclasses
import functools
import signal
import zlib
from pathlib import Path
from typing import Any

from stoker.diagnosis.alive import is_held, lease_holder
from stoker.diagnosis.output import MAX_LINE_CHARS, LogLine, read_output
from stoker.diagnosis.series import Mean
from stoker.runs.records import DEVICES, EVENTS, OUTPUT, STACKS, STEPS
from stoker.runs.schemas import DeviceSample, Event, StackWindow, StepWindow

END_KINDS = ("finished", "failed", "preempted")
"""Events that say how an attempt ended."""
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


@dataclasses.dataclass(kw_only=True)
class EventSummary:
    """What the events say of a run, and of its newest attempt."""

    last: Event | None = None
    attempts: int = 0
    """Number of the newest attempt; 0: the run never started."""
    end: Event | None = None
    """How the newest attempt ended; None: no event says so."""
    end_line: int = 0
    """Line of events.jsonl in which it stands."""
    output_start: dict[str, Any] | None = None
    """Data of the first event of the newest attempt that says where its output begins."""
    job: dict[str, Any] | None = None
    """The job that `stoker watch --pid` was attached to."""
    coverage: dict[str, str] = dataclasses.field(default_factory=dict)
    """For an external job: data source → what was recorded, or why it was not. Else empty."""

    def add(self, line_number: int, event: Event) -> None:
        self.last = event
        if event.attempt > self.attempts:
            self.attempts, self.end, self.end_line, self.output_start = event.attempt, None, 0, None
        if event.attempt == self.attempts:
            if event.kind in END_KINDS:
                self.end, self.end_line = event, line_number
            if self.output_start is None and "output_offset" in event.data:
                self.output_start = event.data
        if event.kind in ("started", "resumed"):
            self.job = event.data.get("job", self.job)
        self.coverage = event.data.get("coverage", self.coverage)


class EndReader:
    """Collects what is known of the end of a run's newest attempt, from the records as they are read: after the events
    the windows, samples and stacks of rank 0.

    An attempt that was killed has no last event, and the kernel has released its lock.
    """

    def __init__(self, run_dir: Path, events: EventSummary) -> None:
        self._run_dir, self._events = run_dir, events
        self._has_output = (run_dir / OUTPUT).exists()
        self._is_known = self._has_ended()
        """Whether the attempt has ended, and not normally without an output."""
        self._last_step: tuple[float, str] | None = None
        """(Unix time of the newest step, its record)."""
        self._newest: list[DeviceSample] = []
        """The last two samples of the time in which the job had memory: later ones show a host without it."""
        self._samples_source = ""
        self._gpu_used: bool | None = None
        self._xids: list[LogLine] = []
        self._cpu_since_progress = Mean()
        self._stack_samples = 0
        self._states: dict[str, float] = {}
        self._frames: dict[str, float] = {}
        self._stacks_source = ""

    def _has_ended(self) -> bool:
        """False: it is alive, it finished and its output was not kept, it never began, or its lock cannot be tried."""
        if not self._events.attempts:
            return False
        if self._events.end is None:
            return is_held(self._run_dir, self._events.job) is False and lease_holder(self._run_dir) is None
        return self._has_output or self._events.end.kind != "finished"

    def window(self, line_number: int, window: StepWindow) -> None:
        if self._is_known and window.attempt == self._events.attempts and window.window_steps > 0:
            self._last_step = window.t, f"{STEPS}:{line_number}"

    def sample(self, line_number: int, sample: DeviceSample) -> None:
        if not self._is_known or sample.attempt != self._events.attempts:
            return
        source = f"{DEVICES}:{line_number}"
        if sample.rss_bytes or not (self._newest and self._newest[-1].rss_bytes):
            self._newest = [*self._newest[-1:], sample]
            self._samples_source = source
        for gpu in sample.gpus:
            self._xids += [LogLine(f"Xid {xid} of GPU {gpu.index}", source) for xid in gpu.xids]
            if gpu.utilization is not None:
                self._gpu_used = self._gpu_used or gpu.utilization > 0
        progress_t = self._progress_t
        if progress_t is not None and sample.t > progress_t:
            self._cpu_since_progress.add(sample.process_cpu)

    def stacks(self, line_number: int, window: StackWindow) -> None:
        progress_t = self._progress_t
        if progress_t is None or window.attempt != self._events.attempts or window.t - window.wall_s < progress_t:
            return
        self._stack_samples += window.samples
        self._stacks_source = f"{STACKS}:{line_number}"
        for counts, fractions in ((self._states, window.main_thread), (self._frames, window.frames)):
            for name, fraction in fractions.items():
                counts[name] = counts.get(name, 0.0) + fraction * window.samples

    @functools.cached_property
    def _progress_t(self) -> float | None:
        """Unix time of the last step or line of output; None if neither is recorded, or no end. Of use when all windows
        are read."""
        end = self._events.end
        if not self._is_known or end is None:
            return None
        step_t = None if self._last_step is None else self._last_step[0]
        if not self._has_output:
            return step_t
        return max(step_t or 0.0, min((self._run_dir / OUTPUT).stat().st_mtime, end.t))  # later in a copy: no hang then

    def termination(self) -> Termination | None:
        """What is known; None if the attempt has not ended, or nothing about its end is of interest."""
        if not self._is_known:
            return None
        end, newest = self._events.end, self._newest[-1] if self._newest else DeviceSample(t=0.0, attempt=0)
        source = f"{EVENTS}:{self._events.end_line}" if end is not None else ""
        end_data: dict[str, Any] = {} if end is None else end.data
        output: tuple[LogLine, ...] = ()
        if self._has_output:
            output = _read_attempt_output(self._run_dir, self._events.output_start)
        elif end is not None:
            output = tuple(LogLine(text[:MAX_LINE_CHARS], source) for text in end.text.splitlines())
        gpu_fractions = [_fraction(gpu.memory_used_bytes, gpu.memory_total_bytes) for gpu in newest.gpus]
        return Termination(
            exit_code=None if end is None else _infer_exit_code(end),
            source=source,
            output=output,
            kernel_log=tuple(LogLine(text, source) for text in end_data.get("kernel", ())),
            pids=frozenset(end_data.get("pids", ())),
            xids=tuple(self._xids),
            oom_kills=end_data.get("oom_kills"),
            memory_fraction=_fraction(newest.memory_used_bytes, newest.memory_limit_bytes),
            memory_growth=_memory_growth(self._newest),
            gpu_memory_fraction=max((fraction for fraction in gpu_fractions if fraction is not None), default=None),
            gpu_used=self._gpu_used,
            shm_fraction=_fraction(newest.shm_used_bytes, newest.shm_total_bytes),
            samples_source=self._samples_source,
            empty_inputs=tuple(end_data.get("empty_inputs", ())),
            hang=self._hang(),
        )

    def _hang(self) -> HangInfo | None:
        """The time without progress before the end."""
        end, progress_t = self._events.end, self._progress_t
        if end is None or progress_t is None:
            return None
        state = max(self._states, key=self._states.__getitem__, default=None)
        is_dominant = state is not None and self._states[state] >= _DOMINANT_FRACTION * self._stack_samples
        return HangInfo(
            duration_s=max(0.0, end.t - progress_t),
            source="" if self._last_step is None else self._last_step[1],
            cpu_cores=self._cpu_since_progress.value,
            main_thread_state=state if is_dominant else None,
            frame=max(self._frames, key=self._frames.__getitem__, default=None),
            stacks_source=self._stacks_source,
        )


def _fraction(used: int | None, total: int | None) -> float | None:
    return used / total if used is not None and total else None


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


def _read_attempt_output(run_dir: Path, start_data: dict[str, Any] | None) -> tuple[LogLine, ...]:
    """The attempt's part of the output; start_data has its offset. The file may have been rotated to output.1.log
    since; the checksum of its beginning identifies it, also in a copy."""
    log = run_dir / OUTPUT
    rotated_log = log.with_name("output.1.log")
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


def _python_exit_code(error: str) -> int:
    """Python's exit code after an error that is not stoker's."""
    return 130 if error.startswith("KeyboardInterrupt") else 1
