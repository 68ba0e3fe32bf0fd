"""`with stoker_watch.measure("runs/x") as m:` around a training loop that stoker did not write.

It measures and writes records, nothing else: the loop's results, their order, its random numbers and its exceptions do
not change. If the recording fails, one warning is printed and the loop goes on without records. All calls must come
from the thread that entered the block. If that is the main thread, its stacks and those of loader workers are sampled
as in a watched job (`stacks.py`). `run_writer.py` writes the records and shares the run folder between ranks,
`torch_hooks.py` observes torch. Use: docs/watch.md. Jobs whose code is not changed: `stoker_watch/watch/`.
"""

import atexit
import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

from stoker_watch.diagnosis.engine import diagnose, write_findings
from stoker_watch.errors import UsageError
from stoker_watch.monitor.options import MonitoringOptions
from stoker_watch.recording.calls import describe_growth
from stoker_watch.recording.hook.stoker_hook.growth import GrowthFinder
from stoker_watch.recording.hook.stoker_hook.instruments import count_images
from stoker_watch.recording.ledger import HOST_PHASES, Ledger
from stoker_watch.recording.own_stacks import SamplingProcess
from stoker_watch.recording.run_writer import RankRecorder, exit_code_for
from stoker_watch.recording.telemetry.machine import allow_reading
from stoker_watch.recording.telemetry.sampler import TelemetrySampler
from stoker_watch.recording.torch_device import HOST_CLOCK
from stoker_watch.recording.torch_hooks import ScalarLogger, TorchHooks
from stoker_watch.runs.schemas import StepWindow

WINDOW_S = 1.0
PHASES = tuple(sorted(HOST_PHASES - {"straggler"}))
"""Phases that a loop may set. `straggler` is computed from the records of all ranks."""

Batch = TypeVar("Batch")
_active: "Measure | None" = None
_num_entered = 0


class Measure:
    """Measures a training loop into a run folder, for `stoker why` and `stoker report`.

    ```python
    with stoker_watch.measure("runs/x") as m:
        for batch in m.data(loader):
            with m.step():
                loss = train_on(batch)
            m.log(loss=loss)
    ```

    run: the run folder; a folder that was used before gets another attempt. Default: runs/NAME-N with `name`, else
    with the name of the script. device: the device that the loop trains on ("cuda:1"); default: torch's accelerator
    once the loop uses it, else the CPU. num_images: images per batch, as a number or a function of the batch; default:
    the length of the batch's first tensor, array or list. first_step: optimizer steps done before a resume; steps that
    are on record and done again are `recovery`; default: the count continues from the records. monitor: alerts, a
    Prometheus port, trackers (docs/watch.md); `alert_exit` sends SIGTERM to this process.

    Entering raises UsageError if the folder belongs to a stoker training or a live job, or another `measure` is open;
    StorageError if it cannot be written; ConfigError if `monitor` is not valid.
    """

    def __init__(
        self,
        run: str | os.PathLike[str] | None = None,
        *,
        name: str | None = None,
        device: object = None,
        price_per_device_hour: float | None = None,
        num_images: int | Callable[[Any], int] | None = None,
        first_step: int | None = None,
        monitor: MonitoringOptions = MonitoringOptions(),  # noqa: B008  # frozen
    ) -> None:
        self.image_count = 0
        """Images of all steps so far."""
        self.step_count = first_step or 0
        """Optimizer steps so far, including earlier attempts."""
        self.is_replaceable = False
        """Whether entering another measure closes this one: a framework may not report the end of a training."""
        path = None if run is None else Path(run).expanduser()
        self._open_writer = functools.partial(RankRecorder, path, name, price_per_device_hour, first_step, monitor)
        self._device = None if device is None else str(device)
        self._num_images = num_images
        self._count_warned = self._workers_reported = False
        self._pending_images = 0
        self._written_steps = self._written_images = 0
        self._phase_depth = 0
        self._recording = False
        self.closed = False
        self._thread = 0
        self._window_start_s = 0.0
        self._scalars = ScalarLogger()
        self._telemetry: TelemetrySampler | None = None
        self._stacks: SamplingProcess | None = None
        self._has_noted_steps = False
        self._growth = GrowthFinder(self._report_growth)

    @property
    def path(self) -> Path | None:
        """The run folder; None in a rank that does not know it yet."""
        return self._writer.path

    def __enter__(self) -> "Measure":
        global _active, _num_entered
        if _active is not None and _active.is_replaceable:
            _active.close(RuntimeError("another training began, and the end of this one was not reported"))
        if _active is not None:
            raise UsageError(
                "Another stoker_watch.measure is open: a process measures one loop at a time.",
                location=_active.path,
                fix="leave that block first",
            )
        if self.closed or self._thread:
            raise UsageError("This stoker_watch.measure was used before.", fix="call stoker_watch.measure(…) again")
        start_s = time.perf_counter()
        self._writer = self._open_writer(loop_index=_num_entered)
        _num_entered += 1
        self.step_count = self._writer.step
        self._written_steps = self.step_count
        self._thread = threading.get_ident()
        self._ledger = Ledger(HOST_CLOCK, start_s=start_s, default_phase="host")
        self._torch_hooks = TorchHooks(self._ledger, self._device)
        if self._writer.folder is not None:
            self._telemetry = TelemetrySampler(self._writer.folder).__enter__()
        self._start_stacks()
        self._window_start_s = start_s
        self._recording = True
        _active = self
        atexit.register(self._close_at_exit)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    def data(self, batches: Iterable[Batch]) -> "TimedBatches[Batch]":
        """Returns the same batches: the time in `next` is `input_wait`, and their images are counted. For any iterable;
        it can be iterated as often as that one. Inside `phase(…)` (validation data) it does nothing."""
        self._check_inside_block("m.data()")
        return TimedBatches(self, batches)

    def step(self, *, num_images: int | None = None) -> contextlib.AbstractContextManager[None]:
        """Around one optimizer step: forward, backward, optimizer. num_images: of this step, if its batches did not
        come through `data`. A step that raises is not counted."""
        return self._step_block(steps=1, num_images=num_images)

    def micro_step(self) -> contextlib.AbstractContextManager[None]:
        """Around a part of a step that does not end it: all but the last batch of an accumulated gradient."""
        return self._step_block(steps=0, num_images=None)

    def count_steps(self, steps: int = 1, *, num_images: int | None = None) -> None:
        """Counts optimizer steps: after `micro_step`, for loops that have no block around a whole step."""
        self._check_inside_block("m.count_steps()")
        self.step_count += steps
        self.image_count += self._pending_images if num_images is None else num_images
        self._pending_images = 0
        if self._recording and (now_s := time.monotonic()) >= self._growth.next_s:
            self._growth.check(now_s)
        self._write_if_due()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The thread is in phase `name` (one of `stoker_watch.recording.measure.PHASES`: "eval", "checkpoint",
        "sync" …) until the block ends. The innermost phase counts. Raises UsageError for other names."""
        self._check_inside_block("m.phase()")
        if name not in PHASES:
            raise UsageError(f"{name!r} is not a phase.", choices=PHASES)
        if not self._recording:
            yield
            return
        self._torch_hooks.poll()
        self._phase_depth += 1
        try:
            with self._ledger.phase(name):
                yield
        finally:
            self._phase_depth -= 1
        self._write_if_due()

    def checkpoint(self) -> contextlib.AbstractContextManager[None]:
        """`phase("checkpoint")`. `torch.save` is timed also without it."""
        return self.phase("checkpoint")

    def log(self, **values: Any) -> None:
        """Logs losses and other values, as numbers or tensors of one number; `lr` and `grad_norm` have records of their
        own. A line of steps.jsonl has the means. The host never waits for a device tensor (`torch_hooks.py`). Raises
        UsageError for a value that is not a number."""
        self._check_inside_block("m.log()")
        if self._recording:
            self._scalars.add(values)

    def count_batch(self, batch: Any) -> None:
        """Counts the images of a batch; those of another phase than training do not count."""
        if self.closed:  # an iterator of `data` may be used later
            return
        self._check_inside_block("m.count_batch()")
        if self._phase_depth or not self._recording:
            return
        if self._num_images is None:
            count = count_images(batch) or None
        else:
            count = self._num_images(batch) if callable(self._num_images) else self._num_images
        if count is None and not self._count_warned:
            self._count_warned = True
            text = "images are not counted: the batch has no tensor, array or list whose length is their number"
            self._writer.event("info", f"{text}; pass `num_images=`")
        self._pending_images += count or 0
        self._write_if_due()

    def report_workers(self, batches: Any) -> None:
        """Records how many processes load the data, if the iterable knows that (a DataLoader)."""
        workers = getattr(batches, "num_workers", None)
        if isinstance(workers, int) and self._recording and not (self._phase_depth or self._workers_reported):
            self._workers_reported = True
            self._writer.event("info", f"the loop's loader has {workers} worker processes", workers=workers)

    def attribute(self, name: str, start_s: float, end_s: float) -> None:
        """The thread was in a phase from start_s to end_s (`time.perf_counter`), which is known only afterwards."""
        self._check_inside_block("m.attribute()")
        if self._recording:
            self._ledger.attribute(name, start_s, end_s)

    def close(self, error: BaseException | None = None) -> None:
        """The same as leaving the block; for callbacks of frameworks. error: what ended the loop."""
        global _active
        if self.closed or not self._thread or _active is not self:  # the last: in a forked process
            return
        self.closed = True
        _active = None
        atexit.unregister(self._close_at_exit)
        if isinstance(error, SystemExit) and error.code in (None, 0):
            error = None
        self._torch_hooks.close()
        if self._recording:
            self._run_safely(lambda: self._write(wait=error is None))
        self._recording = False
        if self._telemetry is not None:
            self._telemetry.stop()
        if self._stacks is not None:
            self._stacks.stop(self._writer.folder)
        self._run_safely(lambda: self._finish(error))
        self._writer.close()

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        self._check_inside_block("m.data()")
        if self._phase_depth or not self._recording:
            return contextlib.nullcontext()
        return self._ledger.phase("input_wait")

    @contextlib.contextmanager
    def _step_block(self, *, steps: int, num_images: int | None) -> Iterator[None]:
        self._check_inside_block("m.step()")
        if self._recording:
            self._torch_hooks.poll()
            try:
                with self._ledger.compute(is_redo=self.step_count < self._writer.redo_until_step):
                    yield
            except BaseException:
                self._pending_images = 0  # a step that raised is not counted, nor are its images
                raise
            self._torch_hooks.flush()
        else:
            yield
        if steps:
            self.count_steps(steps, num_images=num_images)

    def _check_inside_block(self, method: str) -> None:
        if not self._thread or self.closed:
            raise UsageError(f"{method} was called outside of its block.", fix="with stoker_watch.measure(…) as m: …")
        if threading.get_ident() != self._thread:
            text = f"{method} was called in another thread than the one that entered stoker_watch.measure."
            raise UsageError(text, cause="only that thread is measured", fix="call it in the training thread")

    def _write_if_due(self) -> None:
        if self._recording and time.perf_counter() - self._window_start_s >= WINDOW_S:
            self._run_safely(self._write)

    def _write(self, *, wait: bool = False) -> None:
        """wait: for the device."""
        self._torch_hooks.flush()
        if wait and self._torch_hooks.device is not None:
            self._torch_hooks.device.synchronize()
        self._window_start_s = time.perf_counter()
        breakdown = self._ledger.window(0.0)
        scalars, not_finite = self._scalars.take(self._torch_hooks.device, wait=wait)
        if not_finite is not None:
            self._writer.event("warning", not_finite, step=self.step_count, not_finite=not_finite)
        if breakdown is None or breakdown.wall_s <= 0:
            return
        window = StepWindow(
            t=time.time(),
            attempt=0,  # set by the writer
            step=self.step_count,
            window_steps=self.step_count - self._written_steps,
            num_images=self.image_count - self._written_images,
            wall_s=breakdown.wall_s,
            devices=1,
            ranks=self._writer.world_size,
            phases=breakdown.phases,
            **scalars,
            memory_peak_bytes=self._torch_hooks.peak_bytes(),
            host_bound_steps=breakdown.host_bound_steps,
            thread_cpu_s=breakdown.thread_cpu_s,
        )
        self._written_steps, self._written_images = self.step_count, self.image_count
        self._writer.write(window)
        self._start_stacks()
        if self._stacks is not None and not self._has_noted_steps:
            self._has_noted_steps = True
            self._stacks.send("steps")  # what is sampled from now on is in another window than the start

    def _start_stacks(self) -> None:
        """Once the folder is known; of the main thread, which is the one that is found from outside."""
        folder = self._writer.folder
        if self._stacks is not None or self.closed or folder is None or threading.get_native_id() != os.getpid():
            return
        try:
            self._stacks = SamplingProcess("record", self._writer.rank, folder.path.absolute(), folder.attempt)
        except OSError as error:
            self._writer.event("info", f"stacks: not recorded: {error}")

    def _report_growth(self, holders: list[dict[str, Any]]) -> None:
        described = describe_growth(holders)
        self._writer.event("info", described[0]["text"], facts={"growth": described})

    def _finish(self, error: BaseException | None) -> None:
        self._writer.write_end(error, step=self.step_count, exit_code=exit_code_for(error))
        if self._writer.rank == 0 and self._writer.path is not None:
            write_findings(self._writer.path, diagnose(self._writer.path))

    def _run_safely(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # noqa: BLE001 (training goes on without records, and the user is warned)
            self._recording = False
            self._writer.warn(f"nothing is recorded from here on: {type(error).__name__}: {error}")

    def _close_at_exit(self) -> None:
        """At process exit, if the block was not left: not every framework reports errors to its callbacks."""
        error = getattr(sys, "last_value", None)
        self.close(error if error is not None else RuntimeError("the process ended inside stoker_watch.measure"))

    def _abandon_after_fork(self) -> None:
        self._recording = False
        if self._stacks is not None:
            allow_reading(self._stacks.pid)
        self._torch_hooks.abandon()
        self._writer.abandon()


measure = Measure
"""The name in the package: `stoker_watch.measure`."""


class TimedBatches(Generic[Batch]):
    """The batches of an iterable, timed; it has the same length."""

    def __init__(self, measure: Measure, batches: Iterable[Batch]) -> None:
        self._measure = measure
        self._batches = batches

    def __len__(self) -> int:
        """Raises TypeError if the iterable has no length."""
        return len(self._batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        measure = self._measure
        measure.report_workers(self._batches)
        with measure.waiting():
            iterator = iter(self._batches)
        while True:
            with measure.waiting():
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            measure.count_batch(batch)
            yield batch


def _after_fork() -> None:
    global _active
    if _active is not None:
        _active._abandon_after_fork()
        _active = None


os.register_at_fork(after_in_child=_after_fork)
