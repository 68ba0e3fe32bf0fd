"""Where a process's training thread is, as sums of seconds by phase, in memory that the watcher can read at any time.

Each instant since the clock began is in exactly one slot, so the slots add up to the time. What has no explicit phase
is judged by what follows: work on a batch is training when a backward or an optimizer step comes of it, evaluation
when none does (frozen submodules' `.eval()` would mislead, and many loops iterate outside `no_grad`). Until that is
known it lies in a slot that begins with `maybe_`. After the last step and before the next wait the time is the host's.

The cell: 1,024 bytes of JSON (who this is, the names of the slots), then a double per slot, in a file of 4,096 bytes
that is mapped; it needs no thread, no write and no lock, and is there after a SIGKILL. One process trains in one
thread; what others do is not counted. Workers of a loader never have a cell.
"""

import atexit
import json
import mmap
import os
import sys
from _thread import get_ident
from time import monotonic, thread_time
from weakref import ref

from . import FOLDER, say

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    Call = TypeVar("Call", bound=Callable[..., Any])

SLOTS = (
    "begin", "mark", "now_in", "ended", "rank", "world", "steps", "batches", "pictures", "epochs", "rate",
    "first_step", "device", "busy", "device_comm", "syncs", "workers",
    "startup", "input_wait", "compute", "work", "after_step", "host", "comm", "checkpoint", "eval", "compile",
    "maybe_wait", "maybe_work", "graph",
)  # fmt: skip
"""The last thirteen are seconds that add up to mark − begin (CLOCK_MONOTONIC, the same in all processes of a machine).
Behind them come, in the same order, the processor seconds of the training thread in each. `workers`: processes of the
newest loader that trains, −1 while no loader said.
`now_in`: number of the slot that runs. `device`: 1 where `busy` and `device_comm` are seconds on the device's clock.
`graph`: steps of TensorFlow that fetch their batches themselves."""

(BEGIN, MARK, NOW_IN, ENDED, RANK, WORLD, STEPS, BATCHES, PICTURES, EPOCHS, RATE, FIRST_STEP, DEVICE, BUSY, DEVICE_COMM,
 SYNCS, WORKERS, STARTUP, INPUT_WAIT, COMPUTE, WORK, AFTER_STEP, HOST, COMM, CHECKPOINT, EVAL, COMPILE, MAYBE_WAIT,
 MAYBE_WORK, GRAPH) = range(len(SLOTS))  # fmt: skip

CPU = len(SLOTS) - STARTUP
"""From a slot of seconds to that of its processor seconds."""

HEAD_BYTES, CELL_BYTES = 1024, 4096
UNPROVEN = 3
"""Batches of an iterator without a backward after which it is one of evaluation; some loops fetch one or two ahead."""


class Source:
    """An iterator of batches. workers: processes that load them, −1: it does not say. trains: None until it is
    known."""

    __slots__ = ("batches", "pictures", "trains", "unproven", "workers")

    def __init__(self, workers: int = -1) -> None:
        self.workers = workers
        self.trains: bool | None = None
        self.unproven = 0
        self.batches = 0
        self.pictures = 0


class Clock:
    """Of this process. All methods are for the training thread, and never raise. folder: where its cell is made."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """Also in a forked child, which must not write into its parent's cell."""
        self.values: Any = [0.0] * (len(SLOTS) + CPU)
        self.thread = get_ident()
        self.on = True
        self._mapped = False
        self._memory: Any = None
        self._frameworks: list[str] = []
        self._slot = STARTUP
        self._stack = [STARTUP]
        self._stepped = False
        self._open: list[Source] = []
        self._judged: Source | None = None
        self._optimizer: Any = None
        self._others = 0
        self.marks: Any = None
        """Events of the device (`torch_cuda.py`), where there is one."""
        self.values[RANK] = self.values[WORLD] = self.values[RATE] = self.values[WORKERS] = -1.0
        self.values[BEGIN] = self.values[MARK] = self._last = monotonic()
        self._last_cpu = thread_time()
        self.values[NOW_IN] = STARTUP
        _rank_by_environment(self.values)

    def show(self, framework: str = "") -> None:
        """Opens the cell; says there that the framework is used."""
        if not self.on or (self._mapped and framework in self._frameworks):
            return
        if framework:
            self._frameworks.append(framework)
        try:
            if self._memory is not None:
                self._memory[:HEAD_BYTES] = self._head()
                return
            self._mapped = True
            path = os.path.join(self._folder, f"{os.getpid()}-{self.values[BEGIN]:.6f}.cell")
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.write(handle, self._head() + bytes(CELL_BYTES - HEAD_BYTES))  # no hole in it: no SIGBUS later
                self._memory = mmap.mmap(handle, CELL_BYTES)
            finally:
                os.close(handle)
            cell = memoryview(self._memory)[HEAD_BYTES : HEAD_BYTES + 8 * len(self.values)].cast("d")
            for place, value in enumerate(self.values):
                cell[place] = value
            self.values = cell
            atexit.register(self._finish)
        except Exception as error:  # noqa: BLE001 (no room, no folder: this process is not timed)
            self.on = False
            say("cell", error)

    def is_shown(self) -> bool:
        return self._mapped

    def _head(self) -> bytes:
        head = {"pid": os.getpid(), "frameworks": self._frameworks, "python": sys.version.split()[0], "slots": SLOTS}
        return json.dumps(head).encode().ljust(HEAD_BYTES)

    def mark(self) -> None:
        """Charges the time since the last mark to the slot that runs."""
        now, cpu = monotonic(), thread_time()
        values, slot = self.values, self._slot
        values[slot] += now - self._last
        values[slot + CPU] += cpu - self._last_cpu
        values[MARK] = self._last = now
        self._last_cpu = cpu

    def _go(self, slot: int) -> None:
        """From the last mark on it is in this slot; before the first step all but evaluation is startup."""
        self._slot = slot if self._stepped or slot == EVAL else STARTUP
        self.values[NOW_IN] = self._slot

    def _base(self, slot: int) -> None:
        """What time without an explicit phase is from now on."""
        self._stack[0] = slot
        if len(self._stack) == 1:
            self._go(slot)

    def move(self, source: int, target: int) -> None:
        values = self.values
        for of, to in ((source, target), (source + CPU, target + CPU)):
            values[to] += values[of]
            values[of] = 0.0

    def enter(self, slot: int) -> bool:
        """Begins an explicit phase; False (then there is no `leave`): in another thread, or inside the same phase."""
        if not self.on or get_ident() != self.thread or self._stack[-1] == slot or EVAL in self._stack[1:]:
            return False
        self.mark()
        self._stack.append(slot)
        self._go(slot)
        return True

    def leave(self) -> None:
        self.mark()
        if len(self._stack) > 1:
            self._stack.pop()
        self._go(self._stack[-1])

    def is_free(self) -> bool:
        """Whether this is the training thread, outside explicit phases."""
        return self.on and len(self._stack) == 1 and get_ident() == self.thread

    def next_step(self) -> None:
        """What was done since the last one was the host's."""
        self.mark()
        self.move(AFTER_STEP, HOST)

    def wait_begins(self, source: Source, evaluates: bool) -> None:
        """evaluates: gradients are off."""
        try:
            self.next_step()
            if source is not self._judged:
                self._judged = None
            if source.trains is None and (evaluates or source.unproven >= UNPROVEN):
                self._no_training(source)
            if self.marks is not None:
                self.marks.pause()
            waits = MAYBE_WAIT if source.trains is None else INPUT_WAIT if source.trains else EVAL
            self._stack.append(waits)
            self._go(waits)
        except Exception as error:  # noqa: BLE001
            self.fail("wait", error)

    def wait_ends(self, source: Source, pictures: int) -> None:
        try:
            self.leave()
            if source.trains is False:
                self._judged = source
                self._base(EVAL)
                return
            source.unproven += 1
            source.batches += 1
            source.pictures += pictures
            if source not in self._open:
                self._open.append(source)
            if source.trains:
                self._count(source)
            self._base(COMPUTE if source.trains else MAYBE_WORK)
            if self.marks is not None:
                self.marks.resume()
        except Exception as error:  # noqa: BLE001
            self.fail("wait", error)

    def source_ends(self, source: Source, *, failed: bool = False) -> None:
        """It has no more batches, or raised."""
        try:
            self.leave()
            if source.trains is None and source.batches and not failed:
                self._no_training(source)
            if source.trains:
                self.values[EPOCHS] += 0 if failed else 1
                self._base(AFTER_STEP)
            if source in self._open:
                self._open.remove(source)
            self._judged = None
        except Exception as error:  # noqa: BLE001
            self.fail("wait", error)

    def _no_training(self, source: Source) -> None:
        source.trains = False
        if source in self._open:
            self._open.remove(source)
        self.move(MAYBE_WAIT, EVAL)
        self.move(MAYBE_WORK, EVAL)
        self._base(EVAL)

    def _count(self, source: Source) -> None:
        self.values[BATCHES] += source.batches
        self.values[PICTURES] += source.pictures
        if source.workers >= 0:
            self.values[WORKERS] = source.workers
        source.batches = source.pictures = 0

    def trains(self) -> None:
        """A backward begins, or an optimizer has stepped: what was handed out since the last one was for training."""
        try:
            if not self.on or get_ident() != self.thread:
                return
            if not self._mapped:  # a forked child that trains
                self.show()
            if self._judged is not None:  # it was misjudged: its first batches were passed over
                self._open.append(self._judged)
                self._judged = None
            for source in self._open:
                if not source.trains:
                    source.trains = True
                    self._count(source)
                source.unproven = 0
            if self._stack[0] in (MAYBE_WORK, EVAL):
                self.mark()
                self.move(MAYBE_WAIT, INPUT_WAIT)
                self.move(MAYBE_WORK, COMPUTE)
                self._base(COMPUTE)
            self._open.clear()
        except Exception as error:  # noqa: BLE001
            self.fail("trains", error)

    def stepped(self, optimizer: "Any", rate: "Any", steps: int = 1) -> None:
        """An optimizer has stepped. Of several only the one that stepped first counts, as long as it goes on."""
        try:
            if not self.on:
                return
            if get_ident() != self.thread:
                if self._stepped or len(self._stack) > 1:
                    return
                self.thread = get_ident()
                self._last_cpu = thread_time()  # that of another thread is no measure of this one
            self.trains()
            self.mark()
            first = None if self._optimizer is None else self._optimizer()
            if first is None or self._others > 100:
                self._optimizer, first = ref(optimizer), optimizer
            self._others = 0 if first is optimizer else self._others + 1
            values = self.values
            if first is optimizer:
                values[STEPS] += steps
                if isinstance(rate, float):
                    values[RATE] = rate
            self.move(AFTER_STEP, COMPUTE if values[BATCHES] else WORK)
            if not self._stepped:
                self._stepped = True
                values[FIRST_STEP] = self._last
                if "torch" in sys.modules:
                    from . import torch_cuda

                    self.marks = torch_cuda.marks(self)
            self._stack[0] = AFTER_STEP
            self._go(self._stack[-1])
            if self.marks is not None:
                self.marks.pause()
        except Exception as error:  # noqa: BLE001
            self.fail("step", error)

    def _finish(self) -> None:
        """The program has ended: what Python still clears away is of no phase."""
        if self.on:
            self._stack = [WORK]
            if get_ident() != self.thread:
                self._last_cpu = thread_time()
            self.mark()
            self._slot = WORK
            self.values[NOW_IN] = WORK

    def fail(self, where: str, error: BaseException) -> None:
        """No more is counted: numbers that may be wrong are worse than none."""
        self.on = False
        self.values[ENDED] = 1.0
        say(where, error)


def _rank_by_environment(values: "Any") -> None:
    names = (
        ("LOCAL_RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("SLURM_LOCALID", "SLURM_NTASKS"), ("RANK", "WORLD_SIZE"),
    )  # fmt: skip
    for rank, world in names:
        if os.environ.get(rank, "").isdigit() and os.environ.get(world, "").isdigit():
            values[RANK], values[WORLD] = float(os.environ[rank]), float(os.environ[world])
            return


def timed(slot: int, original: "Call") -> "Call":
    """The function, its time charged to a phase."""
    from functools import wraps

    @wraps(original)
    def wrapper(*words: "Any", **named: "Any") -> "Any":
        if not clock.enter(slot):
            return original(*words, **named)
        try:
            return original(*words, **named)
        finally:
            clock.leave()

    return wrapper  # type: ignore[return-value, unused-ignore]


clock = Clock(FOLDER)
