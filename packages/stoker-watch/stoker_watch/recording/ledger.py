"""The ledger: assigns every second of a run to exactly one phase. The phases always add up to the wall time.

The training thread says what it does (`phase`, `compute`), and events on the device say when it computed. Both are
lines of labeled intervals, which are merged into one. At each instant the first rule that applies decides:

1. the device works on an optimizer step      -> `compute`; `recovery` if an earlier attempt did this step and lost it;
   or it is in a device phase                 -> `comm` or `h2d`, as the thread set it while issuing the work
2. the training thread is in a phase          -> that phase; an inner phase interrupts the outer ones
3. the training thread is issuing a step      -> `host`: the device waits for work
4. no phase was set since the start           -> `startup`
5. otherwise                                  -> `unattributed`, or the `default_phase` of the ledger

So waiting for images costs only the time in which the device is idle. A phase inside `compute` interrupts the step on
the device too. After an `input_wait`, the thread may say what it waited for (`split_input_wait`), as intervals of
stages, which refine the thread's line before the merge and add up to the phase exactly; other time is `queue`.

A device that idles *between* the kernels of a step counts as computing. Steps that the device has already finished
when their last kernel is issued are counted (`host_bound_steps`); profiler windows measure the idle time (`trace.py`).

The host bounds the time of every event: it is not before the event was issued, not before the last query that returned
"not complete", and not after the query that returned "complete". An event outside these bounds shifts all later ones:
that corrects drift between the clocks (10 ppm are a second a day), to within a step while the device is never idle, to
within microseconds where it is, since an idle device reaches the first event of a step at once.

Windows end at the present: a step that the device has not finished is `compute` until now, so nothing is estimated
later. Only events that are not complete are kept: as many as the queue of the device holds.

The CPU time of the thread by phase (`TimeBreakdown.thread_cpu_s`) tells a thread that runs Python from one that waits.
It follows the thread's own line, rules 2 to 5; on a CPU device also the step's `compute` or `recovery`. `attribute`
moves time but no CPU time, because that clock was not read at the ends of its intervals. `startup` has CPU time from
the creation of the ledger on.

Cost: `benchmarks/steps/ledger.py`. Not thread-safe: only the training thread may call it.
"""

import contextlib
import dataclasses
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from stoker_watch.recording.torch_device import DeviceClock
from stoker_watch.runs.records import INPUT_STAGES, PHASES

HOST_PHASES = frozenset(PHASES) - {"compute", "unattributed"}
"""Phases that the training thread may set with `phase`; `compute` is set by `compute()`."""

_INPUT_WAIT, _QUEUE_STAGE = "input_wait", "queue"

_DEVICE_PHASES = frozenset({"comm", "h2d"})
"""Phases whose work the thread only issues: events on the device say how long they took."""

_CALIBRATE_EVERY_S = 1.0
_MAX_POLLS = 30
"""About 1 µs each on CUDA; an idle GPU reaches a recorded event some 10 µs after it was issued."""

MIN_INTERVAL_S = 20e-6
"""Shorter intervals of `begin` are ignored: `attribute` takes as long."""

_MAX_CHANGES = 4096
"""Changes of phase that are kept before they are summed, if no window is requested."""


class ProfilerRanges(Protocol):
    """Receives phases and steps as nested ranges; `Ranges` in `stoker/hardware/device.py` (NVTX)."""

    def push(self, name: str) -> None: ...
    def pop(self) -> None: ...


class _Interval(msgspec.Struct, frozen=True, gc=False):  # 7 × cheaper than a NamedTuple; 8 per step
    """What the thread is in, or what the device does (None: no phase), from start_s on. stage: of an `input_wait`."""

    start_s: float
    label: str | None
    stage: str = _QUEUE_STAGE


class _PendingEvent(msgspec.Struct, frozen=True):
    """An event that is not complete, and the interval that begins with it."""

    event: Any
    issued_s: float
    label: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeBreakdown:
    """Where the time from start_s to end_s (of `time.perf_counter`) went.

    phases: seconds by phase, all positive; they add up to wall_s. input_wait_stages: seconds of `input_wait` by stage,
    one of `records.INPUT_STAGES`; they add up to it.
    host_bound_steps: issued steps that the device had finished when the last of their work was issued; None on a CPU.
    thread_cpu_s: CPU-seconds of the training thread by phase.
    """

    start_s: float
    end_s: float
    wall_s: float
    phases: dict[str, float]
    input_wait_stages: dict[str, float]
    host_bound_steps: int | None
    thread_cpu_s: dict[str, float]


class Ledger:
    """Accounts for the time of one rank since `start_s`, which may be before the ledger was created (process start).

    clock: of the device; until a loop uses one, another one may take its place between two steps. now: the host's
    clock; `clock` resolves in its seconds. ranges: receives each phase and step (`step`).
    default_phase: the phase of time after the start for which the thread set none. thread_now: CPU-seconds of the
    calling thread.
    """

    def __init__(
        self, clock: DeviceClock, *, start_s: float, now: Callable[[], float] = time.perf_counter,
        ranges: ProfilerRanges | None = None, default_phase: str = "unattributed",
        thread_now: Callable[[], float] = time.thread_time,
    ) -> None:  # fmt: skip
        self.clock = clock
        self._ranges = ranges
        self._now = now
        self._stack, self._default_phase = ["startup"], default_phase
        self._in_step = False
        self._device_phase: str | None = None

        self._host_changes: deque[_Interval] = deque()
        self._device_changes: deque[_Interval] = deque()
        self._pending: deque[_PendingEvent] = deque()
        self._skew_s = 0.0
        self._not_before_s = start_s
        self._calibrated_s = start_s

        self._window_start_s = start_s
        self._accounted_until_s = start_s
        self._host = _Interval(start_s, "startup")
        self._device = _Interval(start_s, None)
        """In which the time until `_accounted_until_s` ended."""
        self._phase_s: dict[str, float] = {}
        self._input_stage_s: dict[str, float] = {}
        self._host_bound_steps = 0
        self._thread_now = thread_now
        self._last_cpu_s = thread_now()
        self._cpu_by_phase: defaultdict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The training thread is in `name`, one of HOST_PHASES, until the block ends. Raises ValueError for others.

        `comm` and `h2d` are work that is issued in the block; on an accelerator they last until the device has done it,
        or until the training stream no longer has to wait for it.
        """
        _check_phase(name)
        previous = self._set_device_phase(name if name in _DEVICE_PHASES else None)
        self._enter(name)
        try:
            yield
        finally:
            self._leave()
            self._set_device_phase(previous)

    @property
    def thread_phase(self) -> str:
        """The phase that the training thread is in. Callable from any thread."""
        return self._stack[-1]

    def begin_h2d_wait(self) -> None:
        """From here to the next step the device waits for the copy of that step's images: `h2d`. Call it just before
        the training stream is told to wait, on an accelerator, and only if a step follows."""
        self._record_event("h2d")

    def split_input_wait(self, stages: Sequence[tuple[float, str]]) -> None:
        """Says what the current `input_wait` was spent on: (end in seconds of `now`, one of INPUT_STAGES), ascending;
        the first part begins with the phase. Raises RuntimeError in another phase, ValueError for another stage."""
        if self._stack[-1] != _INPUT_WAIT:
            raise RuntimeError(f"split_input_wait() is for the phase {_INPUT_WAIT}, not {self._stack[-1]}")
        start_s = self._host_changes.pop().start_s if self._host_changes else self._accounted_until_s
        now_s = self._now()
        for end_s, stage in stages:
            if stage not in INPUT_STAGES:
                raise ValueError(f"{stage!r} is not a stage; valid: {', '.join(INPUT_STAGES)}")
            if end_s > start_s:
                self._host_changes.append(_Interval(start_s, _INPUT_WAIT, stage=stage))
                start_s = min(end_s, now_s)
        self._host_changes.append(_Interval(start_s, _INPUT_WAIT))

    def attribute(self, name: str, start_s: float, end_s: float) -> None:
        """Assigns an interval afterwards: the thread was in `name`, one of HOST_PHASES, from start_s to end_s (seconds
        of `now`). For example a wait in a collective inside the backward pass. Raises ValueError for other names.

        The interval replaces the phases that the thread set, on a CPU also the step. Time before the end of the last
        window or after now is not changed: call this before a window is requested.
        """
        _check_phase(name)
        start_s, end_s = max(start_s, self._accounted_until_s), min(end_s, self._now())
        if end_s <= start_s:
            return
        _insert_interval(self._host_changes, self._host, name, start_s, end_s)
        if self.clock.on_host:
            _insert_interval(self._device_changes, self._device, None, start_s, end_s)

    def begin(self, name: str) -> Callable[[], None]:
        """The thread begins something in `name` inside of another phase: a collective in the backward pass, a save in a
        step. Returns what ends it. On an accelerator, `comm` and `h2d` are as in `phase`; others are attributed."""
        if name in _DEVICE_PHASES and not self.clock.on_host:
            stack = contextlib.ExitStack()
            stack.enter_context(self.phase(name))
            return stack.close
        start_s = self._now()

        def end() -> None:
            end_s = self._now()
            if end_s - start_s >= MIN_INTERVAL_S:
                self.attribute(name, start_s, end_s)

        return end

    @contextlib.contextmanager
    def compute(self, *, is_redo: bool = False) -> Iterator[None]:
        """Around issuing one optimizer step. is_redo: an earlier attempt did this step and it was lost."""
        if self._in_step:
            raise RuntimeError("a step is being issued: compute() does not nest")
        self._in_step, previous, self._device_phase = True, self._device_phase, "recovery" if is_redo else "compute"
        self._record_event(self._device_phase)
        self._calibrate()
        self._enter(self._device_phase if self.clock.on_host else "host", "step")
        completed = False
        try:
            yield
            completed = True
        finally:
            self._leave()
            self._in_step, self._device_phase = False, previous
            self._record_event(previous)
            if completed and not self.clock.on_host:
                self._host_bound_steps += self._device_is_idle()

    def window(self, min_s: float = 1.0) -> TimeBreakdown | None:
        """The breakdown of the time from the last window until now; None if that is shorter than `min_s` seconds."""
        if self._now() - self._window_start_s < min_s:
            return None
        self._account_until_now()
        self._attribute_cpu()
        wall_s = self._accounted_until_s - self._window_start_s
        if self._input_stage_s:
            self._phase_s[_INPUT_WAIT] = sum(self._input_stage_s.values())  # so that they add up exactly
        breakdown = TimeBreakdown(
            start_s=self._window_start_s,
            end_s=self._accounted_until_s,
            wall_s=wall_s,
            phases=self._phase_s,
            input_wait_stages=self._input_stage_s,
            host_bound_steps=None if self.clock.on_host else self._host_bound_steps,
            thread_cpu_s={name: seconds for name, seconds in self._cpu_by_phase.items() if seconds > 0},
        )
        self._window_start_s, self._phase_s, self._input_stage_s = self._accounted_until_s, {}, {}
        self._cpu_by_phase.clear()
        self._host_bound_steps = 0
        return breakdown

    def finish(self) -> TimeBreakdown | None:
        """The breakdown of the remaining time; None if there is none. Wait for the device before the call."""
        return self.window(0.0) if self._now() > self._window_start_s else None

    def _enter(self, label: str, range_name: str | None = None) -> None:
        if self._ranges is not None:
            self._ranges.push(range_name or label)
        self._attribute_cpu()
        self._stack[0] = self._default_phase
        self._stack.append(label)
        self._set_host_phase(label)

    def _leave(self) -> None:
        if self._ranges is not None:
            self._ranges.pop()
        self._attribute_cpu()
        self._stack.pop()
        self._set_host_phase(self._stack[-1])

    def _set_host_phase(self, label: str) -> None:
        self._host_changes.append(_Interval(self._now(), label))
        if len(self._host_changes) >= _MAX_CHANGES:
            self._account_until_now()

    def _attribute_cpu(self) -> None:
        cpu_s = self._thread_now()
        self._cpu_by_phase[self._stack[-1]] += cpu_s - self._last_cpu_s
        self._last_cpu_s = cpu_s

    def _set_device_phase(self, label: str | None) -> str | None:
        """The device is in `label` from here on; returns its previous label."""
        previous, self._device_phase = self._device_phase, label
        if label != previous:
            self._record_event(label)
        return previous

    def _record_event(self, label: str | None) -> None:
        issued_s = self._now()
        if self.clock.on_host:
            self._device_changes.append(_Interval(issued_s, label))
            return
        self._pending.append(_PendingEvent(self.clock.record_event(), issued_s, label))

    def _calibrate(self) -> None:
        """Once a second, queries a step's first event at once: an idle device has reached it, which bounds its time."""
        now_s = self._now()
        if now_s - self._calibrated_s >= _CALIBRATE_EVERY_S:
            self._device_is_idle()
            if len(self._pending) <= 1:  # else the device is in an earlier step: try again at the next one
                self._calibrated_s = now_s

    def _device_is_idle(self) -> bool:
        """Whether the device has finished its work, or does so within some 30 µs."""
        for _ in range(_MAX_POLLS):
            self._resolve_events(self._now())
            if len(self._pending) != 1:
                break
        return not self._pending

    def _resolve_events(self, poll_start_s: float) -> None:
        """Turns completed events into intervals of the device. poll_start_s: a time before the first query."""
        while self._pending:
            first = self._pending[0]
            device_s = self.clock.resolve(first.event)
            if device_s is None:
                self._not_before_s = poll_start_s
                return
            self._pending.popleft()
            earliest_s, latest_s = max(first.issued_s, self._not_before_s), self._now()
            time_s = min(max(device_s + self._skew_s, earliest_s), latest_s)
            self._skew_s = time_s - device_s
            self._device_changes.append(_Interval(time_s, first.label))

    def _account_until_now(self) -> None:
        """Assigns all time until now. Intervals of the device after that are kept for the next call."""
        end_s = self._now()
        self._resolve_events(end_s)
        host, device = self._host_changes, self._device_changes
        while host or device:
            if device and (not host or device[0].start_s <= host[0].start_s):
                if device[0].start_s > end_s:
                    break
                self._account_until(device[0].start_s)
                self._device = device.popleft()
            else:
                self._account_until(host[0].start_s)
                self._host = host.popleft()
        self._account_until(end_s)

    def _account_until(self, end_s: float) -> None:
        """Assigns the time up to `end_s`, in which neither line changes."""
        duration_s = end_s - self._accounted_until_s
        if duration_s > 0:
            label = self._device.label or self._host.label
            assert label is not None
            self._phase_s[label] = self._phase_s.get(label, 0.0) + duration_s
            if label == _INPUT_WAIT:
                stage = self._host.stage
                self._input_stage_s[stage] = self._input_stage_s.get(stage, 0.0) + duration_s
            self._accounted_until_s = end_s


def _insert_interval(
    changes: deque[_Interval], before: _Interval, label: str | None, start_s: float, end_s: float
) -> None:
    """Replaces what was in [start_s, end_s]. before: the interval before the first change."""
    later = []
    while changes and changes[-1].start_s >= start_s:
        later.append(changes.pop())
    resumed = changes[-1] if changes else before
    changes.append(_Interval(start_s, label))
    while later and later[-1].start_s <= end_s:
        resumed = later.pop()
    changes.append(_Interval(end_s, resumed.label, stage=resumed.stage))
    changes.extend(reversed(later))


def _check_phase(name: str) -> None:
    if name not in HOST_PHASES:
        raise ValueError(f"{name!r} is not a phase; valid: {', '.join(sorted(HOST_PHASES))}")
