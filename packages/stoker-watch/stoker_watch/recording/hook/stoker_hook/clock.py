"""The phase of a process's training thread, as sums of seconds by slot, in memory that the watcher reads at any time.

Each instant since the clock started is in exactly one slot, so the slots add up to the elapsed time. Work without an
explicit phase is classified by what follows: work on a batch is training if a backward or an optimizer step comes
after it, evaluation if none does (many loops do not use `no_grad`). Until that is known it is in a slot that begins
with `maybe_`. Time after a step and before the next wait is the host's, except for an evaluation without a loader: from
the call of `.eval()` of the model that the optimizer trains to the next `.train()`, batch or backward. Time after the
last step stays in `after_step`: the job ends.

The state file has 1,024 bytes of JSON (process, names of the slots), then a double per slot, in a mapped file of 4,096
bytes, which remains after a SIGKILL. One process trains in one thread; other threads are not counted. Loader workers
never have a state file. Reader: `stoker_watch/watch/hook_reader.py`.
"""

import atexit
import json
import mmap
import os
import sys
from _thread import get_ident
from collections.abc import Callable
from time import monotonic, thread_time
from typing import Any
from weakref import ref

from .failures import STATE_DIR, report_failure
from .growth import GrowthFinder
from .instruments import count_images, timed
from .mistakes import MistakeFinder

SLOTS = (
    "begin", "last_update", "current_slot", "ended", "rank", "steps", "batches", "num_images", "lr",
    "device", "busy", "device_comm", "syncs", "workers", "recompiles", "worker_starts", "worker_start_s",
    "steps_without_gradients", "recompiled_s",
    "startup", "input_wait", "compute", "work", "after_step", "host", "comm", "checkpoint", "eval", "compile",
    "maybe_wait", "maybe_work", "graph",
)  # fmt: skip
"""The last thirteen are seconds that add up to last_update − begin (CLOCK_MONOTONIC, the same in all processes of a
machine); the training thread's CPU-seconds in each of them follow. `workers`: processes of the newest training loader.
`worker_starts`: loaders with worker processes that were started after the first step; `worker_start_s`: seconds of
starting and ending these, in other slots as well. `recompiles`: traces of functions traced before; `recompiled_s`:
seconds of those of the function that took most (JAX). −1: not known. `device`: 1 if `busy` and `device_comm` are
seconds of the device's clock. `graph`: steps of TensorFlow that fetch their batches themselves."""

(BEGIN, LAST_UPDATE, CURRENT_SLOT, ENDED, RANK, STEPS, BATCHES, IMAGES, LR,
 DEVICE, BUSY, DEVICE_COMM, SYNCS, WORKERS, RECOMPILES, WORKER_STARTS, WORKER_START_S,
 STEPS_WITHOUT_GRADIENTS, RECOMPILED_S,
 STARTUP, INPUT_WAIT, COMPUTE, WORK, AFTER_STEP, HOST, COMM, CHECKPOINT, EVAL, COMPILE,
 MAYBE_WAIT, MAYBE_WORK, GRAPH) = range(len(SLOTS))  # fmt: skip

CPU_OFFSET = len(SLOTS) - STARTUP
"""Offset from a slot of seconds to the slot of its CPU-seconds."""

HEADER_BYTES, STATE_BYTES = 1024, 4096
MAX_WHY_CHARS = 240
MAX_BACKWARDS = 256
"""Backward passes without a step of an optimizer, after which each is a step itself: few jobs accumulate as many."""
MAX_UNPROVEN_BATCHES = 3
"""An iterator with this many batches and no backward is one of evaluation; some loops prefetch one or two."""


SOURCE_ATTR = "_stoker_source"
"""Attribute of an iterator that holds its `BatchSource`."""


class BatchSource:
    """An iterator of batches. workers: processes that load them, −1: not known. is_training: None: not known yet."""

    def __init__(self, workers: int = -1) -> None:
        self.workers = workers
        self.is_training: bool | None = None
        self.unproven_batches = 0
        self.batches = 0
        self.num_images = 0


class PhaseClock:
    """The clock of this process. Its methods are for the training thread and never raise. directory: of state files."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self.make_device_events: Any = None
        """Returns the events of the device in use or None; set by `torch_loop.py`."""
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        """Also called in a forked child, which must not write into its parent's state file."""
        self.values: Any = [0.0] * (len(SLOTS) + CPU_OFFSET)
        self.thread_id = get_ident()
        self.enabled = True
        self.is_published = False
        self._mapping: Any = None
        self._frameworks: list[str] = []
        self._recompiled = self._recompiled_why = ""
        self._current_slot = STARTUP
        self._stack = [STARTUP]
        self.has_stepped = False
        self._open_sources: list[BatchSource] = []
        self.is_fetching_for_training = False
        """Set while a framework fetches batches of which it says that they are for training."""
        self._eval_source: BatchSource | None = None
        self._optimizer: Any = None
        self._group = 0
        self._other_steps = 0
        self._num_backwards, self.has_optimizer = 0, False
        self.device_events: Any = None
        """Events of the device, if there is one."""
        self._growth = GrowthFinder(self._report_growth)
        self.mistakes = MistakeFinder(self._directory)
        for unknown in (LR, WORKERS, RECOMPILES):
            self.values[unknown] = -1.0
        self.values[BEGIN] = self.values[LAST_UPDATE] = self._last = monotonic()
        self._last_cpu = thread_time()
        self.values[CURRENT_SLOT] = STARTUP
        # within this machine, as launchers name it
        ranks = (
            os.environ.get(name, "") for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "RANK")
        )
        self.values[RANK] = next((float(rank) for rank in ranks if rank.isdecimal() and len(rank) < 8), -1.0)

    def publish(self, framework: str = "") -> None:
        """Creates the state file and adds the framework to it."""
        if not self.enabled or (self.is_published and framework in self._frameworks):
            return
        if framework:
            self._frameworks.append(framework)
        try:
            if self._mapping is not None:
                self._mapping[:HEADER_BYTES] = self._header()
                return
            self.is_published = True
            path = os.path.join(self._directory, f"{os.getpid()}-{self.values[BEGIN]:.6f}.state")
            # read-only for others: who truncates it ends this process by SIGBUS
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
            try:
                os.write(fd, self._header() + bytes(STATE_BYTES - HEADER_BYTES))  # not sparse: no SIGBUS later
                self._mapping = mmap.mmap(fd, STATE_BYTES)
            finally:
                os.close(fd)
            array = memoryview(self._mapping)[HEADER_BYTES : HEADER_BYTES + 8 * len(self.values)].cast("d")
            for i, value in enumerate(self.values):
                array[i] = value
            self.values = array
            atexit.register(self._finish)
        except Exception as error:  # noqa: BLE001 (no space or no folder: this process is not timed)
            self.enabled = False
            report_failure("state file", error)

    def set_recompiled(self, function: str, why: str) -> None:
        """function: the one that was compiled most often, if any was compiled again; why: in the framework's words, as
        far as known. They are in the header."""
        named = function[:80], " ".join(why.split())[:MAX_WHY_CHARS]
        if self._mapping is not None and named != (self._recompiled, self._recompiled_why):
            self._recompiled, self._recompiled_why = named
            self._mapping[:HEADER_BYTES] = self._header()

    def _header(self) -> bytes:
        header: dict[str, Any] = {
            "pid": os.getpid(), "frameworks": self._frameworks, "python": sys.version.split()[0], "slots": SLOTS,
        }  # fmt: skip
        for name, text in (("recompiled", self._recompiled), ("recompiled_why", self._recompiled_why)):
            named = dict(header, **{name: text})
            if len(json.dumps(named)) <= HEADER_BYTES:  # other letters than ASCII take six bytes
                header = named
        return json.dumps(header).encode().ljust(HEADER_BYTES)

    def update(self) -> None:
        """Adds the time since the last update to the current slot."""
        now, cpu = monotonic(), thread_time()
        values, slot = self.values, self._current_slot
        values[slot] += now - self._last
        values[slot + CPU_OFFSET] += cpu - self._last_cpu
        values[LAST_UPDATE] = self._last = now
        self._last_cpu = cpu

    def _set_slot(self, slot: int) -> None:
        """The time from the last update on is in this slot; before the first step, all but evaluation is startup."""
        self._current_slot = slot if self.has_stepped or slot == EVAL else STARTUP
        self.values[CURRENT_SLOT] = self._current_slot

    def _set_base_slot(self, slot: int) -> None:
        """Sets the slot of time without an explicit phase."""
        self._stack[0] = slot
        if len(self._stack) == 1:
            self._set_slot(slot)

    def move_time(self, source: int, target: int) -> None:
        values = self.values
        for src, dst in ((source, target), (source + CPU_OFFSET, target + CPU_OFFSET)):
            values[dst] += values[src]
            values[src] = 0.0

    def enter(self, slot: int) -> bool:
        """Begins an explicit phase. False, without a `leave`: in another thread, or inside the same phase."""
        if not self.enabled or get_ident() != self.thread_id or self._stack[-1] == slot or EVAL in self._stack[1:]:
            return False
        self.update()
        self._stack.append(slot)
        self._set_slot(slot)
        return True

    def begin(self, slot: int) -> "Any":
        """`enter` for `instruments.py`: returns `leave`, or None."""
        return self.leave if self.enter(slot) else None

    def leave(self) -> None:
        self.update()
        if len(self._stack) > 1:
            self._stack.pop()
        self._set_slot(self._stack[-1])

    def is_after_step(self) -> bool:
        """Whether this is the training thread, after a step or an evaluation, and before the next batch."""
        return self._stack[0] in (AFTER_STEP, EVAL) and self.has_stepped and self.is_outside_phases()

    def may_evaluate(self) -> bool:
        """Whether an evaluation may begin now: after a step, or with a batch that may be one of it."""
        return self.has_stepped and self._stack[0] in (AFTER_STEP, EVAL, MAYBE_WORK) and self.is_outside_phases()

    def is_of_training(self, parameters: "Any", of_optimizer: float = 0.5, of_own: float = 0.0) -> bool:
        """Whether at least these fractions of the optimizer's parameters are among these, and the other way round."""
        optimizer = None if self._optimizer is None else self._optimizer()
        trained = {id(p) for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}
        own = {id(p) for p in parameters}
        return bool(trained) and len(trained & own) >= max(of_optimizer * len(trained), of_own * len(own))

    def set_evaluating(self, is_evaluating: bool) -> None:
        """Between steps: the model that is trained was put into its mode for evaluation, or for training. Batches of
        which nothing is known are then of the evaluation."""
        self.update()
        if is_evaluating and self._stack[0] == MAYBE_WORK:
            for source in [source for source in self._open_sources if source.is_training is None]:
                self._mark_as_evaluation(source)
                self._eval_source = source
        self._set_base_slot(EVAL if is_evaluating else AFTER_STEP)

    def is_outside_phases(self) -> bool:
        """Whether this is the training thread, outside of explicit phases."""
        return self.enabled and len(self._stack) == 1 and get_ident() == self.thread_id

    def observe(self, look: "Callable[..., None]", *args: "Any") -> None:
        """Calls a function of `mistakes`, if this is the training thread."""
        if self.mistakes.is_on and self.enabled and get_ident() == self.thread_id:
            try:
                look(*args)
            except Exception as error:  # noqa: BLE001 (a batch, a module or an optimizer of a kind that is not known)
                self.mistakes.stop(error)

    def is_in(self, slot: int) -> bool:
        return self._stack[-1] == slot

    def has_batch(self) -> bool:
        """Whether there was a batch since the last step."""
        return self._stack[0] in (COMPUTE, MAYBE_WORK)

    def begin_step(self) -> None:
        """The time since the last step was the host's."""
        self.update()
        self.move_time(AFTER_STEP, HOST)

    def begin_wait(self, source: BatchSource, is_evaluating: bool) -> None:
        """is_evaluating: gradients are off."""
        try:
            self.begin_step()
            if source is not self._eval_source:
                self._eval_source = None
            if self.is_fetching_for_training:
                source.is_training = True
            if source.is_training is None and (is_evaluating or source.unproven_batches >= MAX_UNPROVEN_BATCHES):
                if self._is_of_jax():
                    source.unproven_batches = 0
                else:
                    self._mark_as_evaluation(source)
            if self.device_events is not None:
                self.device_events.end(BUSY)
            wait_slot = MAYBE_WAIT if source.is_training is None else INPUT_WAIT if source.is_training else EVAL
            self._stack.append(wait_slot)
            self._set_slot(wait_slot)
        except Exception as error:  # noqa: BLE001
            self.disable("wait", error)

    def end_wait(self, source: BatchSource, num_images: int) -> None:
        try:
            self.leave()
            if source.is_training is False:
                self._eval_source = source
                self._set_base_slot(EVAL)
                return
            source.unproven_batches += 1
            source.batches += 1
            source.num_images += num_images
            if source not in self._open_sources:
                self._open_sources.append(source)
            if source.is_training:
                self._count_batches(source)
            self._set_base_slot(COMPUTE if source.is_training else MAYBE_WORK)
            if self.device_events is not None:
                self.device_events.begin(BUSY)
        except Exception as error:  # noqa: BLE001
            self.disable("wait", error)

    def end_source(self, source: BatchSource, *, failed: bool = False) -> None:
        """The iterator has no more batches, or raised."""
        try:
            self.leave()
            if source.is_training is None and source.batches and not failed and not self._is_of_jax():
                self._mark_as_evaluation(source)
            if source.is_training:
                self._set_base_slot(AFTER_STEP)
            if source in self._open_sources:
                self._open_sources.remove(source)
            self._eval_source = None
        except Exception as error:  # noqa: BLE001
            self.disable("wait", error)

    def _is_of_jax(self) -> bool:
        """Whether JAX has compiled, and no optimizer has stepped, as it has none: then batches tell nothing."""
        return not self.has_stepped and any(name.startswith("jax") for name in self._frameworks)

    def _mark_as_evaluation(self, source: BatchSource) -> None:
        source.is_training = False
        if source in self._open_sources:
            self._open_sources.remove(source)
        self.move_time(MAYBE_WAIT, EVAL)
        self.move_time(MAYBE_WORK, EVAL)
        self._set_base_slot(EVAL)

    def _count_batches(self, source: BatchSource) -> None:
        self.values[BATCHES] += source.batches
        self.values[IMAGES] += source.num_images
        if source.workers >= 0:
            self.values[WORKERS] = source.workers
        source.batches = source.num_images = 0

    def confirm_training(self) -> None:
        """A backward begins, or an optimizer has stepped: the batches since the last time were for training."""
        try:
            if not self.enabled or get_ident() != self.thread_id:
                return
            if not self.is_published:  # a forked child that trains
                self.publish()
            if self._eval_source is not None:  # misclassified: the loop skipped its first batches
                self._open_sources.append(self._eval_source)
                self._eval_source = None
            for source in self._open_sources:
                if not source.is_training:
                    source.is_training = True
                    self._count_batches(source)
                source.unproven_batches = 0
            if self._stack[0] in (MAYBE_WORK, EVAL):
                self.update()
                self.move_time(MAYBE_WAIT, INPUT_WAIT)
                self.move_time(MAYBE_WORK, COMPUTE)
                self._set_base_slot(COMPUTE)
            self._open_sources.clear()
        except Exception as error:  # noqa: BLE001
            self.disable("trains", error)

    def count_backward(self, module: "Any") -> None:
        """An outermost backward pass of a job without an optimizer has ended: a step itself, after MAX_BACKWARDS."""
        self._num_backwards += 1
        if self._num_backwards > MAX_BACKWARDS:
            self.count_optimizer_step(module, None)
            self.has_optimizer = False

    def count_optimizer_step(
        self, optimizer: "Any", lr: "Any", steps: int = 1, *, has_gradients: bool = True, group: int = 0
    ) -> None:
        """An optimizer has stepped. Of several, only the first one counts, as long as it continues to step. group: of
        its parameters, as DeepSpeed's ZeRO steps each by itself; they are like several optimizers."""
        try:
            if not self.enabled:
                return
            if get_ident() != self.thread_id:
                if self.has_stepped or len(self._stack) > 1:
                    return
                self.thread_id = get_ident()
                self._last_cpu = thread_time()  # the last value was of another thread
            self.confirm_training()
            self.update()
            first = None if self._optimizer is None else self._optimizer()
            if first is None or self._other_steps > 100 or not self.has_optimizer:
                self._optimizer, self._group, first = ref(optimizer), group, optimizer
            is_first = first is optimizer and group == self._group
            self._other_steps = 0 if is_first else self._other_steps + 1
            self.has_optimizer = True
            values = self.values
            if is_first:
                values[STEPS] += steps
                values[STEPS_WITHOUT_GRADIENTS] += 0 if has_gradients else steps
                if isinstance(lr, (int, float)):
                    values[LR] = lr
            self.move_time(AFTER_STEP, COMPUTE if values[BATCHES] else WORK)
            if not self.has_stepped:
                self.has_stepped = True
                if self.make_device_events is not None:
                    self.device_events = self.make_device_events()
                    self.values[DEVICE] = float(self.device_events is not None)
            self._stack[0] = AFTER_STEP
            self._set_slot(self._stack[-1])
            if self.device_events is not None:
                self.device_events.end(BUSY)
            if self._last >= self._growth.next_s:
                self._growth.check(self._last)
        except Exception as error:  # noqa: BLE001
            self.disable("step", error)

    def _report_growth(self, holders: "list[dict[str, Any]]") -> None:
        """A file for the watcher, next to the state file; the newest replaces the one before."""
        path = os.path.join(self._directory, "%d.growth" % os.getpid())  # noqa: UP031
        with open(path + ".new", "w") as file:
            json.dump(holders, file)
        os.replace(path + ".new", path)

    def _finish(self) -> None:
        """At process exit: the rest of the time is in no phase."""
        if self.enabled:
            self._stack = [WORK]
            if get_ident() != self.thread_id:
                self._last_cpu = thread_time()
            self.update()
            self._current_slot = WORK
            self.values[CURRENT_SLOT] = WORK

    def disable(self, location: str, error: BaseException) -> None:
        """Stops the clock: wrong values would be worse than none."""
        self.enabled = False
        self.values[ENDED] = 1.0
        report_failure(location, error)


def patch_timed(module: "Any", phase: str, *names: str) -> None:
    """Times functions of a module, `name` or `Class.name`, as a phase."""
    slot = SLOTS.index(phase)
    for name in names:
        owner, _, attribute = name.rpartition(".")
        target = getattr(module, owner) if owner else module
        setattr(target, attribute, timed(getattr(target, attribute), lambda: clock.begin(slot)))


def timed_next(
    iterator: "Any", original_next: "Any", count: "Any" = count_images, workers: int = -1, is_evaluating: bool = False
) -> "Any":
    """The iterator's next batch, timed as a wait. count: batch → its number of images."""
    source = iterator.__dict__.get(SOURCE_ATTR)
    if source is None:
        source = iterator.__dict__[SOURCE_ATTR] = BatchSource(workers)
    clock.begin_wait(source, is_evaluating)
    try:
        batch = original_next(iterator)
    except BaseException as error:
        is_end = isinstance(error, StopIteration) or type(error).__name__ == "OutOfRangeError"  # TensorFlow's
        clock.end_source(source, failed=not is_end)
        raise
    try:
        num_images = int(count(batch))
    except Exception as error:  # noqa: BLE001 (a type of batch that has no length: its images are not counted)
        report_failure("batch size", error)
        num_images = 0
    clock.end_wait(source, num_images)
    return batch


clock = PhaseClock(STATE_DIR)
