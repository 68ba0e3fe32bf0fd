"""The ledger against a fake device whose work ends late, and an oracle that labels each second by itself."""

import collections
import contextlib
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker_watch.recording.ledger import HOST_PHASES, Ledger, TimeBreakdown
from stoker_watch.runs.records import INPUT_STAGES, PHASES


class World:
    """A host clock that moves only when told, and a device that works through what it was given, in order.

    `fast` is what the device's clock gains per second on the host's; `offset_s` where it starts.
    """

    def __init__(self, *, offset_s: float = 0.0, fast: float = 0.0, on_host: bool = False) -> None:
        self.on_host = on_host
        """The device is the host: it has no work of its own."""
        self.now_s = 0.0
        self.device_free_s = 0.0
        self.offset_s, self.fast = offset_s, fast
        self.events: list[float] = []
        self.open: collections.deque[int] = collections.deque()
        self.queries = 0

    def now(self) -> float:
        return self.now_s

    def host(self, seconds: float) -> None:
        self.now_s += seconds

    def device(self, seconds: float) -> None:
        """Gives the device work; the host goes on at once."""
        if self.on_host:
            self.now_s += seconds
            return
        self.device_free_s = self.reached_s() + seconds

    def reached_s(self) -> float:
        """When the device will have done everything it was given."""
        return max(self.now_s, self.device_free_s)

    def record_event(self) -> int:
        self.events.append(self.reached_s())
        self.open.append(len(self.events) - 1)
        return self.open[-1]

    def resolve(self, event: int) -> float | None:
        assert event == self.open[0], "events must be resolved in order, once"
        self.queries += 1
        at_s = self.events[event]
        if at_s > self.now_s:
            return None
        self.open.popleft()
        return at_s * (1 + self.fast) + self.offset_s

    def ledger(self, *, started_s: float = 0.0) -> Ledger:
        return Ledger(self, start_s=started_s, now=self.now)


class HostClock:
    """Of a CPU, which has no events."""

    on_host = True


def rounded(window: TimeBreakdown | None) -> dict[str, float]:
    assert window is not None
    return {name: pytest.approx(seconds) for name, seconds in window.phases.items()}


# --- examples -----------------------------------------------------------------------------------------------------


def test_time_before_the_first_phase_is_startup_and_later_time_without_a_phase_is_unattributed() -> None:
    world = World()
    world.host(3)
    ledger = world.ledger()
    world.host(2)
    with ledger.phase("input_wait"):
        world.host(1)
    world.host(4)
    window = ledger.finish()
    assert window is not None
    assert window.phases == {"startup": 5, "input_wait": 1, "unattributed": 4}
    assert (window.start_s, window.end_s, window.wall_s) == (0, 10, 10)


def test_the_wait_of_the_device_for_the_copy_of_its_images_is_h2d() -> None:
    world = World()
    ledger = world.ledger()
    for waits_s, copy_s in ((1, 2), (0, 0), (3, 2)):
        with ledger.phase("input_wait"):
            world.host(waits_s)
            if copy_s:
                ledger.begin_h2d_wait()
                world.device(copy_s)
            ledger.split_input_wait([(world.now_s, "decode")])
        with ledger.compute():
            world.device(10)
    world.host(40)
    window = ledger.finish()
    assert rounded(window) == {"input_wait": 1, "h2d": 4, "compute": 30, "unattributed": 9}
    assert window is not None


def test_work_of_the_device_while_the_thread_waits_for_input_is_compute() -> None:
    world = World()
    ledger = world.ledger()
    with ledger.compute():
        world.host(1)
        world.device(5)
    with ledger.phase("input_wait"):
        world.host(7)
    window = ledger.finish()
    assert window is not None
    assert window.phases == {"compute": 6, "input_wait": 2}


def test_a_device_still_at_other_work_leaves_the_issuing_of_a_step_to_host() -> None:
    world = World()
    ledger = world.ledger()
    with ledger.phase("eval"):
        world.device(2)
    with ledger.compute():
        world.host(3)
        world.device(4)
    world.host(10)
    window = ledger.finish()
    assert window is not None
    assert window.phases == {"host": 2, "compute": 5, "unattributed": 6}


def test_an_inner_phase_interrupts_the_outer_one_and_the_outer_one_goes_on() -> None:
    world = World()
    ledger = world.ledger()
    with ledger.phase("checkpoint"):
        world.host(1)
        with ledger.phase("sync"):
            world.host(2)
        world.host(4)
    assert rounded(ledger.finish()) == {"checkpoint": 5, "sync": 2}


def test_a_phase_inside_a_step_interrupts_it_and_the_step_counts_once() -> None:
    world = World()
    ledger = world.ledger()
    with ledger.compute():
        world.host(1)
        with ledger.phase("input_wait"):
            world.host(2)
        world.host(4)
    window = ledger.finish()
    assert window is not None
    assert window.phases == {"compute": 5, "input_wait": 2}


def test_work_done_again_is_recovery() -> None:
    world = World()
    ledger = world.ledger()
    for again in (True, True, False):
        with ledger.compute(is_redo=again):
            world.host(2)
    window = ledger.finish()
    assert window is not None
    assert window.phases == {"recovery": 4, "compute": 2}


def test_a_step_that_the_device_has_not_ended_is_carried_into_the_next_window() -> None:
    world = World()
    ledger = world.ledger()
    with ledger.compute():
        world.host(1)
        world.device(10)
    with ledger.phase("input_wait"):
        world.host(3)
        first = ledger.window()
        world.host(20)
        second = ledger.window()
    assert first is not None
    assert second is not None
    assert first.phases == {"compute": 4}
    assert second.phases == {"compute": 7, "input_wait": 13}
    assert second.start_s == first.end_s


def test_a_window_that_is_too_short_is_not_closed() -> None:
    world = World()
    ledger = world.ledger()
    world.host(0.5)
    assert ledger.window() is None
    world.host(0.5)
    window = ledger.window()
    assert window is not None
    assert window.wall_s == 1
    assert ledger.finish() is None


def test_a_step_that_raises_takes_time_but_is_not_counted() -> None:
    world = World()
    ledger = world.ledger()
    with contextlib.suppress(MemoryError), ledger.compute():
        world.host(2)
        raise MemoryError
    with ledger.compute():
        world.host(1)
    window = ledger.finish()
    assert window is not None
    assert window.phases == {"compute": 3}


@pytest.mark.parametrize("name", ["compute", "unattributed", "coffee"])
def test_only_phases_can_be_set(name: str) -> None:
    with pytest.raises(ValueError, match="is not a phase"), World().ledger().phase(name):
        pass


class RecordedRanges:
    """In NVTX's place."""

    def __init__(self) -> None:
        self.course: list[str] = []

    def push(self, name: str) -> None:
        self.course.append(name)

    def pop(self) -> None:
        self.course.append("/")


def test_a_profiler_receives_nested_phases_and_steps() -> None:
    recorded = RecordedRanges()
    ledger = Ledger(HostClock(), start_s=time.perf_counter(), ranges=recorded)
    with ledger.phase("input_wait"):
        pass
    with contextlib.suppress(MemoryError), ledger.compute(), ledger.phase("comm"):
        raise MemoryError
    assert recorded.course == ["input_wait", "/", "step", "comm", "/", "/"]


def test_steps_do_not_nest() -> None:
    ledger = World().ledger()
    with ledger.compute(), pytest.raises(RuntimeError, match="does not nest"), ledger.compute():
        pass


def test_a_step_that_the_device_has_finished_when_it_is_issued_is_host_bound() -> None:
    world = World()
    ledger = world.ledger()
    for issues_s, works_s in [(3, 1), (1, 3), (3, 0), (9, 5)]:
        with ledger.compute():
            world.device(works_s)
            world.host(issues_s)
    window = ledger.window()
    assert window is not None
    assert window.host_bound_steps == 3
    world.host(1)
    later = ledger.finish()
    assert later is not None
    assert later.host_bound_steps == 0


def test_a_step_that_raises_is_not_host_bound() -> None:
    world = World()
    ledger = world.ledger()
    with contextlib.suppress(MemoryError), ledger.compute():
        world.host(2)
        raise MemoryError
    window = ledger.finish()
    assert window is not None
    assert window.host_bound_steps == 0


def test_an_exchange_lasts_as_long_as_the_device_is_at_it_and_only_where_computing_does_not_hide_it() -> None:
    world = World()
    ledger = world.ledger()
    with ledger.compute():
        world.device(3)
        with ledger.phase("comm"):
            world.device(2)  # begins when the device has computed
            world.host(1)
        world.device(4)
    world.host(20)
    window = ledger.finish()
    assert window is not None
    assert window.phases == {"compute": 7, "comm": 2, "unattributed": 12}


def test_steps_of_a_device_that_lags_are_counted() -> None:
    world = World()
    ledger = world.ledger()
    windows = []
    for number in range(3_000):
        with ledger.compute():
            world.host(0.5)
            world.device(4)
            with ledger.phase("comm"):
                world.device(1)
            with ledger.phase("eval"):
                world.host(0.25)
        if number % 100 == 99:
            windows.append(ledger.window())
    world.host(20_000)
    windows.append(ledger.finish())
    closed = [window for window in windows if window is not None]
    spent: collections.Counter[str] = collections.Counter()
    for window in closed:
        spent.update(window.phases)
    assert spent["compute"] + spent["comm"] == pytest.approx(15_000, rel=1e-3)
    assert spent.total() == pytest.approx(world.now_s)
    assert ledger.clock is world
    assert not world.open


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("name", sorted(HOST_PHASES - {"host"}))
def test_a_delay_is_in_its_phase_and_in_no_other(name: str, on_host: bool) -> None:
    """Fifty steps, and the same with 0.3 s more in one phase: inside the step, between steps, and learnt afterwards."""

    def course(delay_s: float, where: str) -> collections.Counter[str]:
        world = World(on_host=on_host)
        ledger = world.ledger()
        spent: collections.Counter[str] = collections.Counter()
        for _ in range(50):
            with ledger.phase("input_wait"):
                world.host(0.25)
            with ledger.phase(name):
                world.host(delay_s if where == "between" else 0.0)
            with ledger.compute():
                world.host(0.0625)
                with ledger.phase(name):
                    world.host(delay_s if where == "inside" else 0.0)
                world.device(0.5)
                if where == "afterwards":
                    start_s = world.now()
                    world.host(delay_s)
                    ledger.attribute(name, start_s, world.now())
            world.host(max(0.0, world.device_free_s - world.now_s))  # the device ends in the step's own time
            if (window := ledger.window()) is not None:
                spent.update(window.phases)
        last = ledger.finish()
        spent.update({} if last is None else last.phases)
        return spent

    for where in ("between", "inside") if not on_host else ("between", "inside", "afterwards"):
        usual, delayed = course(0.0, where), course(0.25, where)
        more = {phase: delayed[phase] - usual[phase] for phase in PHASES if delayed[phase] != usual[phase]}
        assert more == {name: pytest.approx(50 * 0.25)}, where


def test_the_state_between_windows_is_bounded() -> None:
    world = World()
    ledger = world.ledger()
    most = 0
    for _ in range(20_000):
        with ledger.compute():
            world.host(0.001)
        most = max(most, len(ledger._host_changes) + len(ledger._device_changes) + len(ledger._pending))
    assert most < 10_000
    window = ledger.finish()
    assert window is not None
    assert window.phases == {"compute": pytest.approx(20)}


def test_a_real_clock_on_a_cpu_knows_no_host_and_adds_up() -> None:
    started_s = time.perf_counter()
    ledger = Ledger(HostClock(), start_s=started_s)
    windows = []
    for step in range(2_000):
        with ledger.phase("input_wait"):
            sum(range(20))
        with ledger.compute():
            sum(range(200))
        if step % 500 == 499:
            windows.append(ledger.window(0.0))
    windows.append(ledger.finish())
    ended_s = time.perf_counter()
    closed = [window for window in windows if window is not None]
    assert set().union(*(window.phases for window in closed)) == {
        "startup", "input_wait", "compute", "unattributed",
    }  # fmt: skip
    assert closed[0].start_s == started_s
    assert closed[-1].end_s <= ended_s
    for window in closed:
        assert math.isclose(sum(window.phases.values()), window.wall_s, rel_tol=1e-9)


def test_a_device_clock_that_drifts_is_followed() -> None:
    """50 ppm over these 12 hours are 2 s, most of a step: without a correction, steps would leave their place."""
    for fast in (5e-5, -5e-5):
        world = World(fast=fast)
        ledger = world.ledger()
        spent: collections.Counter[str] = collections.Counter()
        for _ in range(6_000):
            with ledger.compute():
                world.host(0.5)
                world.device(2.5)
            with ledger.phase("input_wait"):
                world.host(4.0)
            if (window := ledger.window()) is not None:
                spent.update(window.phases)
        assert spent["compute"] == pytest.approx(6_000 * 3.0, rel=2e-4)
        assert spent["input_wait"] == pytest.approx(6_000 * 1.5, rel=2e-4)


def test_a_clock_that_lags_is_followed_while_the_device_is_never_out_of_work() -> None:
    world = World(fast=-0.01)
    ledger = world.ledger()
    for _ in range(250):
        with ledger.compute():
            world.device(1.0)
    for _ in range(200):
        world.host(1.0)
        window = ledger.window()
        assert window is not None
        assert window.phases == {"compute": 1.0}
    world.host(100)
    window = ledger.finish()
    assert window is not None
    assert window.phases["compute"] == pytest.approx(50, abs=1.6)  # a step, and the lag of the last 50


def test_a_device_with_work_in_its_queue_is_hardly_asked() -> None:
    world = World()
    ledger = world.ledger()
    with ledger.compute():
        world.device(100_000)
    for _ in range(1_000):
        with ledger.compute():
            world.host(10)
            world.device(10)
    assert world.queries <= 4 * 1_000


def test_what_is_learnt_afterwards_is_taken_from_what_was_said_and_on_a_cpu_from_the_step() -> None:
    for on_host, expected in (
        (True, {"compute": 4, "comm": 2, "input_wait": 1}),
        (False, {"compute": 6, "input_wait": 1}),  # the device's own events say that it worked
    ):
        world = World(on_host=on_host)
        ledger = world.ledger()
        with ledger.compute():
            world.device(6)
            world.host(0 if on_host else 6)
            ledger.attribute("comm", 2, 4)
        with ledger.phase("input_wait"):
            world.host(1)
        window = ledger.finish()
        assert window is not None
        assert window.phases == expected


def test_an_interval_changes_neither_an_earlier_window_nor_the_future() -> None:
    world = World()
    ledger = world.ledger()
    with ledger.phase("eval"):
        world.host(4)
        first = ledger.window()
        world.host(4)
        ledger.attribute("sync", 2, 100)
        ledger.attribute("sync", 1, 3)
        world.host(1)
    assert first is not None
    assert first.phases == {"eval": 4}
    assert rounded(ledger.finish()) == {"sync": 4, "eval": 1}
    with pytest.raises(ValueError, match="is not a phase"):
        ledger.attribute("compute", 0, 1)


# --- what the thread computed -------------------------------------------------------------------------------------


class Thread:
    """A thread whose processor clock goes only while it works."""

    def __init__(self, *, on_host: bool) -> None:
        self.world = World(on_host=on_host)
        self.cpu_s = 5.0
        """Before the ledger was made."""
        self.ledger = Ledger(
            self.world, start_s=0.0, now=self.world.now, default_phase="host", thread_now=lambda: self.cpu_s
        )

    def works(self, seconds: float) -> None:
        self.world.host(seconds)
        self.cpu_s += seconds


@pytest.mark.parametrize(("on_host", "step"), [(True, "compute"), (False, "host")])
def test_a_thread_that_works_is_told_from_one_that_waits(on_host: bool, step: str) -> None:
    thread = Thread(on_host=on_host)
    thread.works(1)
    with thread.ledger.phase("input_wait"):
        thread.world.host(8)  # sleeps
        with thread.ledger.phase("eval"):
            thread.works(4)
        thread.works(0.5)
    with thread.ledger.compute():
        thread.works(2)
        with thread.ledger.phase("comm"):
            thread.world.host(3)
    with thread.ledger.phase("checkpoint"):
        thread.works(0.25)
        first = thread.ledger.window()
        thread.works(0.125)
    thread.works(16)
    second = thread.ledger.finish()
    assert first is not None
    assert second is not None
    assert first.thread_cpu_s == {"startup": 1, "input_wait": 0.5, "eval": 4, step: 2, "checkpoint": 0.25}
    assert second.thread_cpu_s == {"checkpoint": 0.125, "host": 16}


def test_work_done_again_on_a_cpu_and_what_is_learnt_afterwards() -> None:
    thread = Thread(on_host=True)
    with thread.ledger.compute(is_redo=True):
        thread.works(4)
        thread.ledger.attribute("compile", 1, 3)  # moves the time alone
    window = thread.ledger.finish()
    assert window is not None
    assert window.phases == {"recovery": 2, "compile": 2}
    assert window.thread_cpu_s == {"recovery": 4}


said = st.sampled_from(sorted(HOST_PHASES))
turns = st.recursive(
    st.lists(st.tuples(st.sampled_from(["works", "sleeps", "window"]), st.integers(0, 6)), max_size=4),
    lambda inside: st.lists(st.tuples(said, inside), max_size=5),
    max_leaves=20,
)


@settings(max_examples=50, deadline=None)
@given(turns, st.booleans())
def test_what_the_thread_computed_is_in_one_phase_each_and_never_more_than_the_time_there(
    course: list[tuple], on_host: bool
) -> None:
    thread, inner = Thread(on_host=on_host), ["startup"]
    computed: collections.Counter[str] = collections.Counter()
    windows = []

    def run(course: list[tuple]) -> None:
        for what, rest in course:
            if what == "works":
                computed[inner[-1]] += rest
                thread.works(rest)
            elif what == "sleeps":
                thread.world.host(rest)
            elif what == "window":
                windows.append(thread.ledger.window(rest))
            else:
                inner[0] = "host"
                inner.append(what)
                with thread.ledger.phase(what):
                    run(rest)
                inner.pop()

    run(course)
    windows.append(thread.ledger.finish())
    closed = [window for window in windows if window is not None]
    found: collections.Counter[str] = collections.Counter()
    for window in closed:
        assert all(0 < cpu_s <= window.phases[name] for name, cpu_s in window.thread_cpu_s.items())
        found.update(window.thread_cpu_s)
    assert found == +computed
    assert found.total() == thread.cpu_s - 5.0 <= thread.world.now_s


def test_the_real_clock_of_a_thread_stands_still_while_it_waits() -> None:
    ledger = Ledger(HostClock(), start_s=time.perf_counter())
    before_s = time.thread_time()
    with ledger.phase("checkpoint"):
        time.sleep(0.05)
    with ledger.phase("eval"):
        while time.thread_time() - before_s < 0.05:
            pass
    window = ledger.finish()
    assert window is not None
    assert window.thread_cpu_s["checkpoint"] < 0.025
    assert window.thread_cpu_s["eval"] > 0.025
    assert sum(window.thread_cpu_s.values()) <= time.thread_time() - before_s + window.thread_cpu_s["startup"]


# --- the property -------------------------------------------------------------------------------------------------

seconds = st.integers(0, 6)
simple = st.one_of(
    st.tuples(st.just("host"), seconds),
    st.tuples(st.just("device"), seconds),
    st.tuples(st.just("window"), seconds),
    st.tuples(st.just("charge"), st.sampled_from(sorted(HOST_PHASES)), seconds, seconds),
)


def within_step(children: st.SearchStrategy[list]) -> st.SearchStrategy[tuple]:
    return st.tuples(st.just("phase"), st.sampled_from(sorted(HOST_PHASES)), children)


in_phases = st.recursive(
    st.lists(simple, max_size=4),
    lambda children: st.lists(st.one_of(simple, within_step(children)), max_size=4),
    max_leaves=12,
)
steps = st.tuples(st.just("compute"), st.booleans(), in_phases)
programs = st.recursive(
    st.lists(st.one_of(simple, steps), max_size=4),
    lambda children: st.lists(st.one_of(simple, steps, within_step(children)), max_size=6),
    max_leaves=30,
)


class Oracle:
    """Runs a program in whole seconds and keeps, for each second, what the thread said and what the device did."""

    def __init__(self, world: World, ledger: Ledger, startup_s: int) -> None:
        self.world, self.ledger = world, ledger
        self.said = ["startup"] * startup_s
        self.saying: list[str] = []
        self.label: str | None = None
        self.busy: list[tuple[float, float, str]] = []
        self.ended: list[float] = []
        self.starved: list[float] = []
        self.taken: set[int] = set()
        """Seconds that the device was not at a step, although its events say so."""
        self.spoke = False
        self.windows: list[TimeBreakdown] = []

    def run(self, program: list[tuple]) -> None:
        for what, *rest in program:
            getattr(self, what)(*rest)

    def host(self, took_s: int) -> None:
        self.world.host(took_s)
        silent = "unattributed" if self.spoke else "startup"
        self.said += [self.saying[-1] if self.saying else silent] * took_s

    def device(self, took_s: int) -> None:
        if self.world.on_host:
            self.host(took_s)
        else:
            self.world.device(took_s)

    def charge(self, name: str, ago_s: int, took_s: int) -> None:
        now_s = int(self.world.now_s)
        self.ledger.attribute(name, now_s - ago_s, now_s - ago_s + took_s)
        since_s = int(self.windows[-1].end_s) if self.windows else 0
        for second in range(max(since_s, now_s - ago_s), min(now_s, now_s - ago_s + took_s)):
            self.said[second] = name
            if self.world.on_host:
                self.taken.add(second)

    def window(self, min_s: int) -> None:
        since_s = self.windows[-1].end_s if self.windows else 0
        window = self.ledger.window(min_s)
        assert (window is None) == (self.world.now_s - since_s < min_s)
        if window is not None:
            self.windows.append(window)

    def turn(self, label: str | None) -> str | None:
        """The device goes over to `label` when it has done what it was given."""
        at_s, before = self.world.reached_s(), self.label
        if before is not None:
            self.busy[-1] = (self.busy[-1][0], at_s, before)
        if label is not None:
            self.busy.append((at_s, math.inf, label))
        self.label = label
        return before

    def phase(self, name: str, inside: list[tuple]) -> None:
        interrupted = self.turn(name if name in ("comm", "h2d") else None)
        with self.ledger.phase(name):
            self.spoke = True
            self.saying.append(name)
            self.run(inside)
            self.saying.pop()
        self.turn(interrupted)

    def compute(self, again: bool, inside: list[tuple]) -> None:
        interrupted = self.turn("recovery" if again else "compute")
        with self.ledger.compute(is_redo=again):
            self.spoke = True
            self.saying.append("host")
            self.run(inside)
            self.saying.pop()
        self.turn(interrupted)
        self.ended.append(self.world.reached_s())
        if self.world.reached_s() == self.world.now_s:
            self.starved.append(self.world.now_s)

    def label_at(self, second: int) -> str:
        for start_s, end_s, label in [] if second in self.taken else self.busy:
            if start_s <= second < end_s:
                return label
        return self.said[second]


@settings(max_examples=120, deadline=None)
@given(programs, st.integers(0, 3), st.booleans())
def test_windows_agree_with_an_oracle_second_by_second(program: list[tuple], startup_s: int, on_host: bool) -> None:
    world = World(on_host=on_host)
    world.host(startup_s)
    oracle = Oracle(world, world.ledger(), startup_s)
    oracle.run(program)
    oracle.host(1 + int(max(0, world.device_free_s - world.now_s)))  # waits for the device
    last = oracle.ledger.finish()
    windows = oracle.windows + ([] if last is None else [last])

    at_s = 0.0
    for window in windows:
        assert window.start_s == at_s
        at_s = window.end_s
        assert window.wall_s == window.end_s - window.start_s
        labels = collections.Counter(map(oracle.label_at, range(int(window.start_s), int(window.end_s))))
        assert window.phases == labels
        assert window.host_bound_steps is None or not on_host
    assert at_s == world.now_s
    assert sum(window.host_bound_steps or 0 for window in windows) == (0 if on_host else len(oracle.starved))


@settings(max_examples=80, deadline=None)
@given(programs, st.floats(-1e3, 1e3), st.floats(-0.5, 0.5))
def test_no_device_clock_makes_time_negative_or_lost(program: list[tuple], offset_s: float, fast: float) -> None:
    world = World(offset_s=offset_s, fast=fast)
    oracle = Oracle(world, world.ledger(), 0)
    oracle.run(program)
    oracle.host(1 + int(max(0, world.device_free_s - world.now_s)))
    last = oracle.ledger.finish()
    windows = oracle.windows + ([] if last is None else [last])

    at_s = 0.0
    for window in windows:
        assert window.start_s == at_s
        at_s = window.end_s
        assert set(window.phases) <= set(PHASES)
        assert all(took_s > 0 for took_s in window.phases.values())
        assert math.isclose(sum(window.phases.values()), window.wall_s, rel_tol=1e-9, abs_tol=1e-9)
    assert at_s == world.now_s


# --- what a wait was made of ----------------------------------------------------------------------------------------


def test_a_wait_is_split_and_what_the_device_computed_meanwhile_is_in_no_part() -> None:
    world = World()
    ledger = world.ledger()
    with ledger.compute():
        world.host(1)
        world.device(3)
    with ledger.phase("input_wait"):
        world.host(9)
        ledger.split_input_wait([(2, "queue"), (6, "fetch"), (9, "decode")])
    with ledger.phase("eval"):
        world.host(1)
    window = ledger.finish()
    assert window is not None
    assert window.phases == {"compute": 4, "input_wait": 6, "eval": 1}
    assert window.input_wait_stages == {"fetch": 2, "decode": 3, "queue": 1}  # the last second: what no part covers


def test_a_wait_without_stages_is_queue() -> None:
    world = World()
    ledger = world.ledger()
    with ledger.phase("input_wait"):
        world.host(3)
    window = ledger.finish()
    assert window is not None
    assert window.input_wait_stages == {"queue": 3}


def test_only_a_wait_for_input_has_stages() -> None:
    ledger = World().ledger()
    with ledger.phase("eval"), pytest.raises(RuntimeError, match="is for the phase input_wait"):
        ledger.split_input_wait([(1.0, "fetch")])
    with ledger.phase("input_wait"), pytest.raises(ValueError, match="is not a stage"):
        ledger.split_input_wait([(1.0, "coffee")])


parts = st.lists(st.tuples(st.floats(0, 3), st.sampled_from(INPUT_STAGES)), max_size=6)
waits = st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5), st.floats(0, 5), parts, st.booleans()), max_size=8)


@settings(max_examples=60, deadline=None)
@given(waits)
def test_the_stages_add_up_to_the_wait_exactly(course: list[tuple]) -> None:
    """course: what the host issues, what the device works on, how long the thread waits, on what, and a window."""
    world = World()
    ledger = world.ledger()
    windows = []
    for issues_s, works_s, waits_s, made_of, closes in course:
        with ledger.compute():
            world.host(issues_s)
            world.device(works_s)
        with ledger.phase("input_wait"):
            start_s = world.now()
            world.host(waits_s)
            ends = [(start_s + sum(took_s for took_s, _ in made_of[: n + 1]), s) for n, (_, s) in enumerate(made_of)]
            ledger.split_input_wait(ends)
        if closes:
            windows.append(ledger.window(0.0))
    world.host(10)
    windows.append(ledger.finish())
    for window in windows:
        if window is not None:
            assert sum(window.input_wait_stages.values()) == window.phases.get("input_wait", 0)
            assert min(window.input_wait_stages.values(), default=0) >= 0
            assert set(window.input_wait_stages) <= set(INPUT_STAGES)
            assert sum(window.phases.values()) == pytest.approx(window.wall_s)
