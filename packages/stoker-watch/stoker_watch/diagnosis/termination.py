"""Reads from a run's records what is known of a job that has ended: the input of `postmortem.explain`.

Only of the newest attempt: each has its own end, and its own part of the output. Whether a run still has a process is
known by the lock of its folder, which the kernel releases; by its lease in a bucket; or, for a job that `stoker watch
--pid` was attached to, by its process id. What the lines of an output mean is in `endings.py`.
"""

import contextlib
import functools
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker_watch import regular_files
from stoker_watch.diagnosis.run_data import EventSummary, HangInfo, LogLine, Mean, Termination
from stoker_watch.runs.records import DEVICES, EVENTS, OUTPUT, STACKS, STEPS, locked
from stoker_watch.runs.schemas import DeviceSample, Event, StackWindow, StepWindow
from stoker_watch.runs.totals import add_amounts
from stoker_watch.storage.uri import LEASE_FILE

if TYPE_CHECKING:
    from stoker_watch.storage.lease import LeaseHolder

MAX_OUTPUT_BYTES = 2**20
"""Bytes at the end of an output that are read: the last messages are there (heuristic)."""
MAX_LINE_CHARS = 2000
"""Characters of a line that are read. The patterns have bounded repeats (`endings.py` sets the
bounds of those in its catalog), so the time is proportional to the length of the output."""
_EXIT_CODES = {"finished": 0, "preempted": 75, "failed": 1}
"""Event of an end → exit code, where its data have none: as in stoker_watch/errors.py."""
_HEAD_BYTES = 4096
"""Bytes of output.log whose checksum identifies it, as in `watch/recorder.py`."""
_SEEK_DATA = getattr(os, "SEEK_DATA", os.SEEK_SET)
"""Skips the holes of a sparse file, which has any size for nothing, where the system can."""
_DOMINANT_FRACTION = 0.9
"""Fraction of the samples from which on the main thread counts as being in one state."""


def is_held(run_dir: Path, job: Mapping[str, Any] | None = None) -> bool | None:
    """Whether a process of this machine trains the run; None if the lock cannot be tried. job: that `stoker watch
    --pid` was attached to, as its newest event of a start has it."""
    if not (run_dir / ".lock").exists():
        return False
    with (
        contextlib.suppress(OSError),
        locked(run_dir) as acquired,
    ):  # a read-only copy of a run, or a file system without locks
        return not acquired or (job is not None and _is_running(job))
    return None


def lease_holder(run_dir: Path) -> "LeaseHolder | None":
    """Who trains a run in a bucket, or did so within the duration of a lease; from the copy of its lease."""
    if not (run_dir / LEASE_FILE).exists():
        return None
    from stoker_watch.storage.lease import read_lease_file  # loads obstore, which folders do not need

    holder = read_lease_file(run_dir / LEASE_FILE)
    return holder if holder is not None and holder.remaining_s() > 0 else None


def boot_id() -> str:
    """The id of this boot of this machine; empty if the kernel has none."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def _is_running(job: Mapping[str, Any]) -> bool:
    """Whether a process still runs, without being watched. It is identified by its pid, its start and the boot, since
    pids are reused."""
    if job.get("boot") != boot_id():
        return False
    try:
        stat_line = Path(f"/proc/{job['pid']}/stat").read_text(errors="replace")
    except OSError:  # it ended
        return False
    fields = stat_line.rpartition(")")[2].split()
    return fields[0] not in "ZX" and int(fields[19]) == job["start_ticks"]


class EndReader:
    """Collects what is known of the end of a run's newest attempt, from the records as they are read: after the events
    the windows, samples and stacks of rank 0.

    An attempt that was killed has no last event, and the kernel has released its lock.
    """

    def __init__(self, run_dir: Path, events: EventSummary) -> None:
        self._run_dir, self._events = run_dir, events
        self._has_output = (run_dir / OUTPUT).is_file()
        self._is_known = self._has_ended()
        """Whether the attempt has ended, and not normally without an output."""
        self._last_step: tuple[float, str] | None = None
        """(Unix time of the newest step, its record)."""
        self._usual_s: float | None = None
        """The longest time between two windows with steps."""
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
        """False: it is alive, it finished and its output was not kept, it never began, its lock cannot be tried, or
        it was not watched to its end."""
        if not self._events.attempts or self._events.detached_t is not None:
            return False
        if self._events.end is None:
            return is_held(self._run_dir, self._events.job) is False and lease_holder(self._run_dir) is None
        return self._has_output or self._events.end.kind != "finished"

    def window(self, line_number: int, window: StepWindow) -> None:
        if self._is_known and window.attempt == self._events.attempts and window.window_steps > 0:
            if self._last_step is not None:
                self._usual_s = max(self._usual_s or 0.0, window.t - self._last_step[0])
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
            add_amounts(counts, {name: fraction * window.samples for name, fraction in fractions.items()})

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
            lines = end_data.get("traceback") or end.text.splitlines()  # of a measured job: with where it was raised
            output = tuple(LogLine(text[:MAX_LINE_CHARS], source) for text in lines)
        gpu_fractions = [_fraction(gpu.memory_used_bytes, gpu.memory_total_bytes) for gpu in newest.gpus]
        return Termination(
            exit_code=None if end is None else end_data.get("exit_code", _EXIT_CODES[end.kind]),
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
            disk_free_bytes=newest.disk_free_bytes,
            samples_source=self._samples_source,
            empty_inputs=tuple(end_data.get("empty_inputs", ())),
            handled_error=tuple(LogLine(text, source) for text in end_data.get("handled_error", ())),
            hang=self._hang(),
        )

    def output_so_far(self) -> tuple[LogLine, ...]:
        """The output of an attempt that has not ended; () where none is kept."""
        lives = self._events.end is None and self._has_output
        return _read_attempt_output(self._run_dir, self._events.output_start) if lives else ()

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
            usual_s=self._usual_s,
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


def _read_attempt_output(run_dir: Path, start: Event | None) -> tuple[LogLine, ...]:
    """The attempt's part of the output; `start` has its offset. The file may have been rotated to output.1.log
    since; the checksum of its beginning identifies it, also in a copy."""
    log = run_dir / OUTPUT
    rotated_log = log.with_name("output.1.log")
    if start is None:
        return read_output(log)
    offset, head = start.data["output_offset"], start.data.get("output_head")
    if head is not None and _head_checksum(log, offset) == head:
        return read_output(log, min_offset=offset)
    if not rotated_log.exists():
        return read_output(log)
    rotated_offset = offset if head is not None and _head_checksum(rotated_log, offset) == head else 0
    return (*read_output(rotated_log, min_offset=rotated_offset), *read_output(log))


def _head_checksum(path: Path, offset: int) -> int | None:
    """Checksum of the beginning of a file when it was `offset` bytes long; None if it is shorter."""
    if not path.is_file() or path.stat().st_size < offset:
        return None
    with regular_files.open_file(path) as file:
        return zlib.crc32(file.read(min(offset, _HEAD_BYTES)))


# The output

_CONTROL_CHARS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Colors and other control characters: torch prints a NUL before the traceback of a worker that was killed."""


def split_log_lines(data: bytes, file_name: str, *, first_number: int = 1) -> tuple[LogLine, ...]:
    """The lines of an output, numbered from `first_number`. Of a line that was overwritten (`\\r`) the last text
    remains; colors are removed."""
    lines = []
    for number, raw in enumerate(data.split(b"\n"), start=first_number):
        segments = [segment for segment in raw.decode(errors="replace").split("\r") if segment.strip()]
        text = _CONTROL_CHARS.sub("", segments[-1] if segments else "")[:MAX_LINE_CHARS]
        lines.append(LogLine(text.rstrip(), f"{file_name}:{number}"))
    return tuple(lines)


def read_output(path: Path, *, min_offset: int = 0) -> tuple[LogLine, ...]:
    """The last MAX_OUTPUT_BYTES of an output, from the first complete line on, numbered as in the file. min_offset:
    byte before which nothing is read; a line begins there. Raises OSError, also for a device or a FIFO."""
    with regular_files.open_file(path) as file:
        offset = max(min_offset, path.stat().st_size - MAX_OUTPUT_BYTES)
        position, first_number = 0, 1
        with contextlib.suppress(OSError):  # a hole up to the end, without lines
            while (position := file.seek(position, _SEEK_DATA)) < offset and (
                block := file.read(min(offset - position, MAX_OUTPUT_BYTES))
            ):
                position += len(block)
                first_number += block.count(b"\n")
        file.seek(offset)
        data = file.read(MAX_OUTPUT_BYTES)
    if offset > min_offset:
        _, _, data = data.partition(b"\n")
        first_number += 1
    return split_log_lines(data, path.name, first_number=first_number)
