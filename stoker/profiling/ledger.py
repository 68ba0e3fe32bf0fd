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

from stoker.profiling.ledger_events import Clock, Done, Pending, Ranges, Said
from stoker.runs.records import INPUT_STAGES, PHASES

SAYABLE = frozenset(PHASES) - {"compute", "unattributed"}
"""What the training thread may say it is doing; `compute` has its own block."""

_INPUT, _HAND_OVER = "input_wait", "queue"

_ON_DEVICE = frozenset({"comm", "h2d"})
"""Phases whose work the thread only issues: the device's marks say how long they took."""

_CALIBRATE_EVERY_S = 1.0
_QUESTIONS = 30
"""About 1 µs each on CUDA; an idle GPU reaches a recorded event some 10 µs after it was issued."""

_MOST_MARKS = 512
"""Marks that are open at once. CUDA takes some 1,000 launches ahead, and a step has hundreds."""

_MOST_CHANGES = 4096
"""Changes of phase that are kept before they are summed up, should nobody ask for a window."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Account:
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
    input: dict[str, float]
    steps: int
    starved: int | None
    cpu: dict[str, float]


class Ledger:
    """Accounts for the time of one rank from `started_s`, which may lie before the ledger was made (process start).

    now: the host's clock, the one in whose seconds `clock` resolves. devices: how many devices this thread drives; each
    second of the wall is that many device-seconds. ranges: are told each phase and step (`step`) as it begins and ends.
    otherwise: the phase of time in which the thread says nothing, after the start. thread_now: processor seconds of the
    thread that asks.
    """

    def __init__(
        self, clock: Clock, *, started_s: float, now: Callable[[], float] = time.perf_counter, devices: int = 1,
        ranges: Ranges | None = None, otherwise: str = "unattributed",
        thread_now: Callable[[], float] = time.thread_time,
    ) -> None:  # fmt: skip
        self._clock = clock
        self._ranges = ranges
        self._now = now
        self._devices = devices
        self._stack, self._otherwise = ["startup"], otherwise
        self._issuing = False
        self._device_in: str | None = None

        self._host_changes: deque[Said] = deque()
        self._device_changes: deque[Done] = deque()
        self._pending: deque[Pending] = deque()
        self._dropped_steps = 0
        self._skew_s = 0.0
        self._not_before_s = started_s
        self._calibrated_s = started_s

        self._window_s = started_s
        self._settled_s = started_s
        self._host_label, self._host_stage = "startup", _HAND_OVER
        self._device_label: str | None = None
        self._seconds: dict[str, float] = {}
        self._input: dict[str, float] = {}
        self._steps = self._starved = 0
        self._thread_now = thread_now
        self._cpu_read_s = thread_now()
        self._cpu: defaultdict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The training thread is doing `name`, one of SAYABLE, until the block ends. Raises ValueError for others.

        `comm` and `h2d`: what it issues in the block; on an accelerator they last until the device has done it, or
        until the stream that trains need not wait for it any more.
        """
        _check(name)
        interrupted = self._turn(name if name in _ON_DEVICE else None)
        self._enter(name)
        try:
            yield
        finally:
            self._leave()
            self._turn(interrupted)

    def copy_awaited(self) -> None:
        """From here to the next step the device waits for that step's pictures to be copied to it: `h2d`. To be called
        just before its stream is told to wait, on an accelerator, where a step follows."""
        self._mark("h2d")

    def split(self, parts: Sequence[tuple[float, str]]) -> None:
        """What the `input_wait` that ends now was spent on: (end in seconds of `now`, one of INPUT_STAGES), ascending;
        the first part begins with the phase. Raises RuntimeError in another phase, ValueError for another stage."""
        if self._stack[-1] != _INPUT:
            raise RuntimeError(f"split() belongs into the phase {_INPUT}, not into {self._stack[-1]}")
        begin_s = self._host_changes.pop().at_s if self._host_changes else self._settled_s
        now_s = self._now()
        for end_s, stage in parts:
            if stage not in INPUT_STAGES:
                raise ValueError(f"{stage!r} is not a stage; valid: {', '.join(INPUT_STAGES)}")
            if end_s > begin_s:
                self._host_changes.append(Said(begin_s, _INPUT, stage))
                begin_s = min(end_s, now_s)
        self._host_changes.append(Said(begin_s, _INPUT, _HAND_OVER))

    def charge(self, name: str, begin_s: float, end_s: float) -> None:
        """The thread was in `name`, one of SAYABLE, from begin_s to end_s (seconds of `now`), as is only known now: a
        wait in a collective inside the backward pass, the compiling of a part. Raises ValueError for others.

        It takes the time from what the thread has said, on a CPU also from the step. What lies before the newest
        window or after now is left as it is: charge before a window is asked for.
        """
        _check(name)
        begin_s, end_s = max(begin_s, self._settled_s), min(end_s, self._now())
        if end_s <= begin_s:
            return
        self._say_later(name, begin_s, end_s)
        if self._clock.on_host:
            self._take_from_step(begin_s, end_s)

    @contextlib.contextmanager
    def compute(self, *, again: bool = False) -> Iterator[None]:
        """Around issuing one optimizer step. again: an earlier attempt did this step too, and it was lost."""
        if self._issuing:
            raise RuntimeError("a step is being issued already: compute() does not nest")
        self._issuing, interrupted, self._device_in = True, self._device_in, "recovery" if again else "compute"
        self._mark(self._device_in)
        self._calibrate()
        self._enter(self._device_in if self._clock.on_host else "host", "step")
        done = False
        try:
            yield
            done = True
        finally:
            self._leave()
            self._issuing, self._device_in = False, interrupted
            self._mark(interrupted, steps=int(done))
            if done and not self._clock.on_host:
                self._starved += self._has_done_all()

    def window(self, min_s: float = 1.0) -> Account | None:
        """The account of the time since the last one, up to now; None when that is shorter than `min_s` seconds."""
        if self._now() - self._window_s < min_s:
            return None
        self._settle()
        self._charge_cpu()
        wall_s = self._settled_s - self._window_s
        phases = {name: seconds * self._devices for name, seconds in self._seconds.items()}
        stages = {stage: seconds * self._devices for stage, seconds in self._input.items()}
        if stages:
            phases[_INPUT] = sum(stages.values())  # so that they add up to the last bit
        account = Account(
            start_s=self._window_s,
            end_s=self._settled_s,
            wall_s=wall_s,
            phases=phases,
            input=stages,
            steps=self._steps,
            starved=None if self._clock.on_host else self._starved,
            cpu={name: seconds for name, seconds in self._cpu.items() if seconds > 0},
        )
        self._window_s, self._seconds, self._input = self._settled_s, {}, {}
        self._cpu.clear()
        self._steps = self._starved = 0
        return account

    def finish(self) -> Account | None:
        """The account of all that is left, however short; None when nothing is. Wait for the device before."""
        return self.window(0.0) if self._now() > self._window_s else None

    def _enter(self, label: str, shown: str | None = None) -> None:
        if self._ranges is not None:
            self._ranges.push(shown or label)
        self._charge_cpu()
        self._stack[0] = self._otherwise
        self._stack.append(label)
        self._say(label)

    def _leave(self) -> None:
        if self._ranges is not None:
            self._ranges.pop()
        self._charge_cpu()
        self._stack.pop()
        self._say(self._stack[-1])

    def _say(self, label: str) -> None:
        self._host_changes.append(Said(self._now(), label, _HAND_OVER))
        if len(self._host_changes) >= _MOST_CHANGES:
            self._settle()

    def _charge_cpu(self) -> None:
        """Gives what the thread has computed since the last time to what it is in."""
        read_s = self._thread_now()
        self._cpu[self._stack[-1]] += read_s - self._cpu_read_s
        self._cpu_read_s = read_s

    def _say_later(self, label: str, begin_s: float, end_s: float) -> None:
        """Replaces what the thread has said of [begin_s, end_s]."""
        line, later = self._host_changes, []
        while line and line[-1].at_s >= begin_s:
            later.append(line.pop())
        goes_on = line[-1] if line else Said(begin_s, self._host_label, self._host_stage)
        line.append(Said(begin_s, label, _HAND_OVER))
        while later and later[-1].at_s <= end_s:
            goes_on = later.pop()
        line.append(Said(end_s, goes_on.label, goes_on.stage))
        line.extend(reversed(later))

    def _take_from_step(self, begin_s: float, end_s: float) -> None:
        """Has the device do nothing in [begin_s, end_s]; steps that ended in it have ended there."""
        line, later = self._device_changes, []
        while line and line[-1].at_s >= begin_s:
            later.append(line.pop())
        goes_on = line[-1] if line else Done(begin_s, self._device_label, 0)
        line.append(Done(begin_s, None, 0))
        while later and later[-1].at_s <= end_s:
            goes_on = later.pop()
            if goes_on.steps:
                line.append(Done(goes_on.at_s, None, goes_on.steps))
        line.append(Done(end_s, goes_on.label, 0))
        line.extend(reversed(later))

    def _turn(self, label: str | None) -> str | None:
        """The device is in `label` from here on; returns in what it was."""
        before, self._device_in = self._device_in, label
        if label != before:
            self._mark(label)
        return before

    def _mark(self, label: str | None, *, steps: int = 0) -> None:
        issued_s = self._now()
        if self._clock.on_host:
            self._device_changes.append(Done(issued_s, label, steps))
            return
        if len(self._pending) >= _MOST_MARKS:
            self._resolve(issued_s)
        if len(self._pending) >= _MOST_MARKS:  # the device lags, so it is at work also between the last marks
            if self._pending[-1].label is None:
                dropped = self._pending.pop()
                self._clock.drop(dropped.mark)
                self._dropped_steps += dropped.steps
            if label is not None:
                self._dropped_steps += steps
                return
        steps, self._dropped_steps = steps + self._dropped_steps, 0
        self._pending.append(Pending(self._clock.mark(), issued_s, label, steps))

    def _calibrate(self) -> None:
        """Once a second, asks for a step's first mark at once: an idle device has reached it, which bounds it."""
        now_s = self._now()
        if now_s - self._calibrated_s >= _CALIBRATE_EVERY_S:
            self._has_done_all()
            if len(self._pending) <= 1:  # else the device is at an earlier step: try at the next one
                self._calibrated_s = now_s

    def _has_done_all(self) -> bool:
        """Whether the device has done what it was given, or does within some 30 µs. Asked once where it is at
        something earlier than what came last."""
        for _ in range(_QUESTIONS):
            self._resolve(self._now())
            if len(self._pending) != 1:
                break
        return not self._pending

    def _resolve(self, asked_s: float) -> None:
        """Moves the marks that the device has reached to its changes. asked_s: a moment before the first question."""
        while self._pending:
            first = self._pending[0]
            said_s = self._clock.resolve(first.mark)
            if said_s is None:
                self._not_before_s = asked_s
                return
            self._pending.popleft()
            earliest_s, latest_s = max(first.issued_s, self._not_before_s), self._now()
            at_s = min(max(said_s + self._skew_s, earliest_s), latest_s)
            self._skew_s = at_s - said_s
            self._device_changes.append(Done(at_s, first.label, first.steps))

    def _settle(self) -> None:
        """Charges all time up to now. What the device did later than that stays for the next time."""
        until_s = self._now()
        self._resolve(until_s)
        host, device = self._host_changes, self._device_changes
        while host or device:
            if device and (not host or device[0].at_s <= host[0].at_s):
                if device[0].at_s > until_s:
                    break
                done = device.popleft()
                self._count(done.at_s)
                self._device_label = done.label
                self._steps += done.steps
            else:
                said = host.popleft()
                self._count(said.at_s)
                self._host_label, self._host_stage = said.label, said.stage
        self._count(until_s)

    def _count(self, until_s: float) -> None:
        """Charges the time up to `until_s`, through which neither line changes."""
        took_s = until_s - self._settled_s
        if took_s > 0:
            label = self._device_label or self._host_label
            self._seconds[label] = self._seconds.get(label, 0.0) + took_s
            if label == _INPUT:
                self._input[self._host_stage] = self._input.get(self._host_stage, 0.0) + took_s
            self._settled_s = until_s


def _check(name: str) -> None:
    if name not in SAYABLE:
        raise ValueError(f"{name!r} is not a phase; valid: {', '.join(sorted(SAYABLE))}")
