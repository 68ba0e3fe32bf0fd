"""The ledger: every second of a run belongs to exactly one phase, and the phases add up to the wall time, always.

The training thread says what it is doing (`phase`, `compute`); the device's marks say when it computed. Both are lines
of labelled intervals, merged into one. In each instant the first rule that holds decides:

1. the device works on an optimizer step      -> `compute`; `recovery` when an earlier attempt had done it and lost it;
   or is in a phase of its own, or waits
   for its pictures to be copied              -> `comm` or `h2d`, which the thread said while issuing it
2. the training thread is in a phase          -> that phase, the innermost one: it interrupts those around it
3. the training thread is issuing a step      -> `host`: the device waits to be told what to do
4. the run has said nothing since its start   -> `startup`
5. nothing                                    -> `unattributed`, or what the ledger was told to call it

So a device that still works on step n while the thread waits for the pictures of n + 1 is computing, and waiting for
pictures costs only what the device stood still. A phase inside `compute` interrupts it on the device too: the marks end
before it and begin after it.

Within `input_wait` the thread says afterwards what it waited for (`split`), as intervals of stages. They refine its own
line before the two are merged, so the split too speaks only of time in which the device stood still, and adds up to the
phase exactly; what no interval covers is `queue`.

The marks bracket a step, so a device that starves *between* the kernels of a step counts as computing. That it did is
seen when the thread has issued the last of a step and the device has done it: such steps are counted (`starved`). How
long it starved, profiler windows say (`trace.py`).

What the host knows bounds every mark: it is not before it was issued, not before the device was last seen not to have
reached it, and not after it was seen reached. A mark that breaks a bound shifts all later ones, so a device clock that
drifts against the host's (10 ppm are a second a day) is followed: to within a step while the device never runs out of
work, to within microseconds where it idles, since an idle device reaches the first mark of a step at once.

Windows close at the present: a step that the device has begun and not ended is `compute` up to now, and the rest of it
belongs to the next window. So nothing is estimated later and nothing is kept but the marks that are still open, some
hundreds at most: a device that lags by more is not waiting for anybody, and its steps are then bracketed together.

Beside the time, the processor time of the thread by what it was in (`Account.cpu`) tells one that works in Python from
one that waits. It follows the thread's own line, rules 2 to 5: the innermost phase; `host` while a step is issued, and
where that thread computes it (a CPU), the step's own `compute` or `recovery`. What is learnt afterwards (`charge`)
moves time, and no processor time: nobody read that clock at its ends. `startup` has it from when the ledger was made.

Cost: `benchmarks/ledger.py`. Not thread-safe: one thread trains, and it alone speaks.
"""

import contextlib
import dataclasses
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence

from stoker.profiling.ledger_events import DeviceInterval, EventClock, HostInterval, ProfilerRanges, UnresolvedEvent
from stoker.runs.records import INPUT_STAGES, PHASES

HOST_PHASES = frozenset(PHASES) - {"compute", "unattributed"}
"""What the training thread may say it is doing; `compute` has its own block."""

_INPUT_WAIT, _QUEUE_STAGE = "input_wait", "queue"

_DEVICE_PHASES = frozenset({"comm", "h2d"})
"""Phases whose work the thread only issues: the device's marks say how long they took."""

_CALIBRATE_EVERY_S = 1.0
_MAX_POLLS = 30
"""About 1 µs each on CUDA; an idle GPU reaches a recorded event some 10 µs after it was issued."""

_MAX_OPEN_EVENTS = 512
"""Marks that are open at once. CUDA takes some 1,000 launches ahead, and a step has hundreds."""

_MAX_CHANGES = 4096
"""Changes of phase that are kept before they are summed up, should nobody ask for a window."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeBreakdown:
    """Where the time from start_s to end_s (of `time.perf_counter`) went.

    phases: device-seconds by phase, none negative, a phase that took none is absent; they add up to wall_s × devices.
    input: those of `input_wait` by stage, of records.INPUT_STAGES; they add up to it.
    steps: optimizer steps that the device ended in it. starved: steps issued in it that the device had done when the
    last of them was issued; None on a CPU. cpu: processor seconds of the training thread by what it said it was doing.
    """

    start_s: float
    end_s: float
    wall_s: float
    phases: dict[str, float]
    input_wait_stages: dict[str, float]
    steps: int
    host_bound_steps: int | None
    thread_cpu_s: dict[str, float]


class Ledger:
    """Accounts for the time of one rank from `started_s`, which may lie before the ledger was made (process start).

    now: the host's clock, the one in whose seconds `clock` resolves. devices: how many devices this thread drives; each
    second of the wall is that many device-seconds. ranges: are told each phase and step (`step`) as it begins and ends.
    otherwise: the phase of time in which the thread says nothing, after the start. thread_now: processor seconds of the
    thread that asks.
    """

    def __init__(
        self, clock: EventClock, *, start_s: float, now: Callable[[], float] = time.perf_counter, devices: int = 1,
        ranges: ProfilerRanges | None = None, default_phase: str = "unattributed",
        thread_now: Callable[[], float] = time.thread_time,
    ) -> None:  # fmt: skip
        self._clock = clock
        self._ranges = ranges
        self._now = now
        self._devices = devices
        self._stack, self._default_phase = ["startup"], default_phase
        self._in_step = False
        self._device_phase: str | None = None

        self._host_changes: deque[HostInterval] = deque()
        self._device_changes: deque[DeviceInterval] = deque()
        self._pending: deque[UnresolvedEvent] = deque()
        self._dropped_steps = 0
        self._skew_s = 0.0
        self._not_before_s = start_s
        self._calibrated_s = start_s

        self._window_start_s = start_s
        self._accounted_until_s = start_s
        self._host_label, self._host_stage = "startup", _QUEUE_STAGE
        self._device_label: str | None = None
        self._phase_s: dict[str, float] = {}
        self._input_stage_s: dict[str, float] = {}
        self._steps = self._host_bound_steps = 0
        self._thread_now = thread_now
        self._last_cpu_s = thread_now()
        self._cpu_by_phase: defaultdict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The training thread is doing `name`, one of SAYABLE, until the block ends. Raises ValueError for others.

        `comm` and `h2d`: what it issues in the block; on an accelerator they last until the device has done it, or
        until the stream that trains need not wait for it any more.
        """
        _check_phase(name)
        previous = self._set_device_phase(name if name in _DEVICE_PHASES else None)
        self._enter(name)
        try:
            yield
        finally:
            self._leave()
            self._set_device_phase(previous)

    def begin_h2d_wait(self) -> None:
        """From here to the next step the device waits for that step's pictures to be copied to it: `h2d`. To be called
        just before its stream is told to wait, on an accelerator, where a step follows."""
        self._record_event("h2d")

    def split_input_wait(self, stages: Sequence[tuple[float, str]]) -> None:
        """What the `input_wait` that ends now was spent on: (end in seconds of `now`, one of INPUT_STAGES), ascending;
        the first part begins with the phase. Raises RuntimeError in another phase, ValueError for another stage."""
        if self._stack[-1] != _INPUT_WAIT:
            raise RuntimeError(f"split() belongs into the phase {_INPUT_WAIT}, not into {self._stack[-1]}")
        start_s = self._host_changes.pop().start_s if self._host_changes else self._accounted_until_s
        now_s = self._now()
        for end_s, stage in stages:
            if stage not in INPUT_STAGES:
                raise ValueError(f"{stage!r} is not a stage; valid: {', '.join(INPUT_STAGES)}")
            if end_s > start_s:
                self._host_changes.append(HostInterval(start_s, _INPUT_WAIT, stage))
                start_s = min(end_s, now_s)
        self._host_changes.append(HostInterval(start_s, _INPUT_WAIT, _QUEUE_STAGE))

    def attribute(self, name: str, start_s: float, end_s: float) -> None:
        """The thread was in `name`, one of SAYABLE, from begin_s to end_s (seconds of `now`), as is only known now: a
        wait in a collective inside the backward pass, the compiling of a part. Raises ValueError for others.

        It takes the time from what the thread has said, on a CPU also from the step. What lies before the newest
        window or after now is left as it is: charge before a window is asked for.
        """
        _check_phase(name)
        start_s, end_s = max(start_s, self._accounted_until_s), min(end_s, self._now())
        if end_s <= start_s:
            return
        self._insert_host_interval(name, start_s, end_s)
        if self._clock.on_host:
            self._insert_device_idle(start_s, end_s)

    @contextlib.contextmanager
    def compute(self, *, is_redo: bool = False) -> Iterator[None]:
        """Around issuing one optimizer step. again: an earlier attempt did this step too, and it was lost."""
        if self._in_step:
            raise RuntimeError("a step is being issued already: compute() does not nest")
        self._in_step, previous, self._device_phase = True, self._device_phase, "recovery" if is_redo else "compute"
        self._record_event(self._device_phase)
        self._calibrate()
        self._enter(self._device_phase if self._clock.on_host else "host", "step")
        completed = False
        try:
            yield
            completed = True
        finally:
            self._leave()
            self._in_step, self._device_phase = False, previous
            self._record_event(previous, steps=int(completed))
            if completed and not self._clock.on_host:
                self._host_bound_steps += self._device_is_idle()

    def window(self, min_s: float = 1.0) -> TimeBreakdown | None:
        """The account of the time since the last one, up to now; None when that is shorter than `min_s` seconds."""
        if self._now() - self._window_start_s < min_s:
            return None
        self._account_until_now()
        self._attribute_cpu()
        wall_s = self._accounted_until_s - self._window_start_s
        phases = {name: seconds * self._devices for name, seconds in self._phase_s.items()}
        stages = {stage: seconds * self._devices for stage, seconds in self._input_stage_s.items()}
        if stages:
            phases[_INPUT_WAIT] = sum(stages.values())  # so that they add up to the last bit
        breakdown = TimeBreakdown(
            start_s=self._window_start_s,
            end_s=self._accounted_until_s,
            wall_s=wall_s,
            phases=phases,
            input_wait_stages=stages,
            steps=self._steps,
            host_bound_steps=None if self._clock.on_host else self._host_bound_steps,
            thread_cpu_s={name: seconds for name, seconds in self._cpu_by_phase.items() if seconds > 0},
        )
        self._window_start_s, self._phase_s, self._input_stage_s = self._accounted_until_s, {}, {}
        self._cpu_by_phase.clear()
        self._steps = self._host_bound_steps = 0
        return breakdown

    def finish(self) -> TimeBreakdown | None:
        """The account of all that is left, however short; None when nothing is. Wait for the device before."""
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
        self._host_changes.append(HostInterval(self._now(), label, _QUEUE_STAGE))
        if len(self._host_changes) >= _MAX_CHANGES:
            self._account_until_now()

    def _attribute_cpu(self) -> None:
        """Gives what the thread has computed since the last time to what it is in."""
        cpu_s = self._thread_now()
        self._cpu_by_phase[self._stack[-1]] += cpu_s - self._last_cpu_s
        self._last_cpu_s = cpu_s

    def _insert_host_interval(self, label: str, start_s: float, end_s: float) -> None:
        """Replaces what the thread has said of [begin_s, end_s]."""
        changes, later = self._host_changes, []
        while changes and changes[-1].start_s >= start_s:
            later.append(changes.pop())
        resumed = changes[-1] if changes else HostInterval(start_s, self._host_label, self._host_stage)
        changes.append(HostInterval(start_s, label, _QUEUE_STAGE))
        while later and later[-1].start_s <= end_s:
            resumed = later.pop()
        changes.append(HostInterval(end_s, resumed.label, resumed.stage))
        changes.extend(reversed(later))

    def _insert_device_idle(self, start_s: float, end_s: float) -> None:
        """Has the device do nothing in [begin_s, end_s]; steps that ended in it have ended there."""
        changes, later = self._device_changes, []
        while changes and changes[-1].start_s >= start_s:
            later.append(changes.pop())
        resumed = changes[-1] if changes else DeviceInterval(start_s, self._device_label, 0)
        changes.append(DeviceInterval(start_s, None, 0))
        while later and later[-1].start_s <= end_s:
            resumed = later.pop()
            if resumed.steps:
                changes.append(DeviceInterval(resumed.start_s, None, resumed.steps))
        changes.append(DeviceInterval(end_s, resumed.label, 0))
        changes.extend(reversed(later))

    def _set_device_phase(self, label: str | None) -> str | None:
        """The device is in `label` from here on; returns in what it was."""
        previous, self._device_phase = self._device_phase, label
        if label != previous:
            self._record_event(label)
        return previous

    def _record_event(self, label: str | None, *, steps: int = 0) -> None:
        issued_s = self._now()
        if self._clock.on_host:
            self._device_changes.append(DeviceInterval(issued_s, label, steps))
            return
        if len(self._pending) >= _MAX_OPEN_EVENTS:
            self._resolve_events(issued_s)
        if len(self._pending) >= _MAX_OPEN_EVENTS:  # the device lags, so it is at work also between the last marks
            if self._pending[-1].label is None:
                dropped = self._pending.pop()
                self._clock.drop(dropped.event)
                self._dropped_steps += dropped.steps
            if label is not None:
                self._dropped_steps += steps
                return
        steps, self._dropped_steps = steps + self._dropped_steps, 0
        self._pending.append(UnresolvedEvent(self._clock.record_event(), issued_s, label, steps))

    def _calibrate(self) -> None:
        """Once a second, asks for a step's first mark at once: an idle device has reached it, which bounds it."""
        now_s = self._now()
        if now_s - self._calibrated_s >= _CALIBRATE_EVERY_S:
            self._device_is_idle()
            if len(self._pending) <= 1:  # else the device is at an earlier step: try at the next one
                self._calibrated_s = now_s

    def _device_is_idle(self) -> bool:
        """Whether the device has done what it was given, or does within some 30 µs. Asked once where it is at
        something earlier than what came last."""
        for _ in range(_MAX_POLLS):
            self._resolve_events(self._now())
            if len(self._pending) != 1:
                break
        return not self._pending

    def _resolve_events(self, poll_start_s: float) -> None:
        """Moves the marks that the device has reached to its changes. asked_s: a moment before the first question."""
        while self._pending:
            first = self._pending[0]
            device_s = self._clock.resolve(first.event)
            if device_s is None:
                self._not_before_s = poll_start_s
                return
            self._pending.popleft()
            earliest_s, latest_s = max(first.issued_s, self._not_before_s), self._now()
            time_s = min(max(device_s + self._skew_s, earliest_s), latest_s)
            self._skew_s = time_s - device_s
            self._device_changes.append(DeviceInterval(time_s, first.label, first.steps))

    def _account_until_now(self) -> None:
        """Charges all time up to now. What the device did later than that stays for the next time."""
        end_s = self._now()
        self._resolve_events(end_s)
        host, device = self._host_changes, self._device_changes
        while host or device:
            if device and (not host or device[0].start_s <= host[0].start_s):
                if device[0].start_s > end_s:
                    break
                device_change = device.popleft()
                self._account_until(device_change.start_s)
                self._device_label = device_change.label
                self._steps += device_change.steps
            else:
                host_change = host.popleft()
                self._account_until(host_change.start_s)
                self._host_label, self._host_stage = host_change.label, host_change.stage
        self._account_until(end_s)

    def _account_until(self, end_s: float) -> None:
        """Charges the time up to `until_s`, through which neither line changes."""
        duration_s = end_s - self._accounted_until_s
        if duration_s > 0:
            label = self._device_label or self._host_label
            self._phase_s[label] = self._phase_s.get(label, 0.0) + duration_s
            if label == _INPUT_WAIT:
                self._input_stage_s[self._host_stage] = self._input_stage_s.get(self._host_stage, 0.0) + duration_s
            self._accounted_until_s = end_s


def _check_phase(name: str) -> None:
    if name not in HOST_PHASES:
        raise ValueError(f"{name!r} is not a phase; valid: {', '.join(sorted(HOST_PHASES))}")
