"""`with stoker.measure("runs/x") as m:` around a training loop that stoker did not write.

It measures and writes, nothing else: what the loop computes, its order, its random numbers and its exceptions stay as
they are. Errors of the recording are a warning, once, and the loop goes on without records. Everything here belongs to
the thread that entered the block. Cost and use: docs/measure.md.
"""

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from stoker.diagnosis.rules import diagnose, write_findings
from stoker.errors import UsageError
from stoker.monitor.options import Monitoring
from stoker.profiling.ledger import SAYABLE, Account, Ledger
from stoker.profiling.measure.logged_scalars import Logged, count_pictures
from stoker.profiling.measure.run_writer import Book, exit_code_of, script_name
from stoker.profiling.measure.torch_hooks import Inside, LateClock
from stoker.profiling.telemetry.sampler import Witness
from stoker.runs.schemas import StepWindow

WINDOW_S = 1.0
PHASES = tuple(sorted(SAYABLE - {"straggler"}))
"""What a loop may say it is doing; who is slow, only the records of all ranks show."""

Batch = TypeVar("Batch")
_active: "Measure | None" = None
_entered = 0


def measure(
    run: str | os.PathLike[str] | None = None,
    *,
    name: str | None = None,
    device: object = None,
    price: float | None = None,
    pictures: int | Callable[[Any], int] | None = None,
    first_step: int | None = None,
    monitor: Monitoring = Monitoring(),  # noqa: B008  # frozen
) -> "Measure":
    """Measures a training loop into a run folder, for `stoker why` and `stoker report`.

    ```python
    with stoker.measure("runs/x") as m:
        for batch in m.data(loader):
            with m.step():
                loss = train_on(batch)
            m.log(loss=loss)
    ```

    run: the folder; one that was measured in before gets another attempt. Default: runs/NAME-N with `name`, else with
    the script's name. device: what the loop trains on ("cuda:1"); default: torch's accelerator once the loop uses it,
    else the CPU. price: money per device-hour. pictures: how many pictures a batch has, as a number or a function of
    the batch; default: the length of its first tensor, array or list. first_step: optimizer steps that a resumed loop
    has behind it: those that are on record and done again are `recovery`; default: numbered on from the record.
    monitor: alerts, a port for Prometheus, trackers (docs/monitoring.md); `alert_exit` sends this process SIGTERM.

    Entering raises UsageError when the folder belongs to a training or a living job, or another `measure` is open;
    StorageError when it cannot be written; ConfigError where what `monitor` asks for cannot be had.
    """
    asked = None if run is None else Path(run).expanduser()
    told: dict[str, Any] = {
        "name": name,
        "device": device,
        "price": price,
        "pictures": pictures,
        "first_step": first_step,
    }
    return Measure(asked, **told, monitor=monitor)


class Measure:
    """What `stoker.measure` gives: enter it once, around the whole loop."""

    def __init__(
        self,
        run: Path | None,
        *,
        name: str | None,
        device: object,
        price: float | None,
        pictures: int | Callable[[Any], int] | None,
        first_step: int | None,
        monitor: Monitoring,
    ) -> None:
        self.picture_count = 0
        """Pictures of all steps so far."""
        self.step_count = first_step or 0
        """Optimizer steps so far, those of earlier attempts included."""
        self.gives_way = False
        """Whether another measure ends this one: of a framework, which may not have told that its training ended."""
        self._run, self._name, self._price, self._first_step = run, name, price, first_step
        self._monitor = monitor
        self._device = None if device is None else str(device)
        self._pictures = pictures
        self._uncounted = self._workers_told = False
        self._seen = 0
        self._written_steps = self._written_pictures = 0
        self._depth = 0
        self._recording = False
        self._closed = False
        self._thread = 0
        self._window_s = 0.0
        self._logged = Logged()
        self._witness: Witness | None = None

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def path(self) -> Path | None:
        """The run's folder; None in a rank that does not know it yet."""
        return self._book.path

    def __enter__(self) -> Self:
        global _active, _entered
        if _active is not None and _active.gives_way:
            _active.close(RuntimeError("another training began, and nobody told of the end of this one"))
        if _active is not None:
            raise UsageError("stoker.measure is entered already: a process measures one loop at a time.",
                             place=_active.path, fix="leave that block first")  # fmt: skip
        if self._closed or self._thread:
            raise UsageError("This stoker.measure was used before.", fix="call stoker.measure(…) again")
        began_s = time.perf_counter()
        self._book = Book(
            self._run, self._name or script_name(), self._price, self._first_step, _entered, self._monitor
        )
        _entered += 1
        self.step_count = self._book.step
        self._written_steps = self.step_count
        self._thread = threading.get_ident()
        clock = LateClock()
        self._ledger = Ledger(clock, started_s=began_s, otherwise="host")  # what else the loop does
        self._inside = Inside(self._ledger, clock, self._device)
        if self._book.folder is not None:
            self._witness = Witness(self._book.folder)
            self._witness.start()
        self._window_s = began_s
        self._recording = True
        _active = self
        atexit.register(self._forgotten)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    def data(self, batches: Iterable[Batch]) -> "Data[Batch]":
        """The same batches: what `next` waits for them is `input_wait`, and their pictures are counted. For anything
        that can be iterated, as often as that can be. Inside `phase(…)` (the validation data) it does nothing."""
        self._check("m.data()")
        return Data(self, batches)

    def step(self, *, pictures: int | None = None) -> contextlib.AbstractContextManager[None]:
        """Around issuing one optimizer step: forward, backward, the optimizer. pictures: of this step, where they did
        not come through `data`. A step that raises is not counted."""
        return self._issue(steps=1, pictures=pictures)

    def part_of_step(self) -> contextlib.AbstractContextManager[None]:
        """The same around a part of it that does not end it: all but the last batch of an accumulated gradient."""
        return self._issue(steps=0, pictures=None)

    def count_step(self, steps: int = 1, *, pictures: int | None = None) -> None:
        """Optimizer steps have ended: after `part_of_step`, for loops in which no block is around a whole one."""
        self.step_count += steps
        self.picture_count += self._seen if pictures is None else pictures
        self._seen = 0
        self._tick()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The thread is doing `name` (one of `stoker.profiling.measure.measure.PHASES`: "eval", "checkpoint", "sync"
        …) until the block ends. The innermost phase counts. Raises UsageError for others."""
        self._check("m.phase()")
        if name not in PHASES:
            raise UsageError(f"{name!r} is not a phase.", choices=PHASES)
        if not self._recording:
            yield
            return
        self._inside.look()
        self._depth += 1
        try:
            with self._ledger.phase(name):
                yield
        finally:
            self._depth -= 1
        self._tick()

    def checkpoint(self) -> contextlib.AbstractContextManager[None]:
        """`phase("checkpoint")`. `torch.save` is timed without it."""
        return self.phase("checkpoint")

    def log(self, **values: Any) -> None:
        """Losses and whatever else the loop knows, as numbers or tensors of one number; `rate` and `grad_norm` go by
        these names. A line of the record has their means. The host never waits for a tensor of a device
        (`logged_scalars.py`). Raises UsageError for what is no number."""
        self._check("m.log()")
        if self._recording:
            self._logged.add(values)

    def see(self, batch: Any) -> None:
        """Counts the pictures of a batch that did not come through `data`."""
        if self._pictures is None:
            count = count_pictures(batch)
        else:
            count = self._pictures(batch) if callable(self._pictures) else self._pictures
        if count is None and not self._uncounted:
            self._uncounted = True
            text = "pictures are not counted: a batch has no tensor, array or list to take the length of"
            self._book.event("note", f"{text}; say `pictures=`")
        self._seen += count or 0

    def charge(self, name: str, begin_s: float, end_s: float) -> None:
        """The thread was in a phase from begin_s to end_s (`time.perf_counter`), as is only known now."""
        self._check("m.charge()")
        if self._recording:
            self._ledger.charge(name, begin_s, end_s)

    def close(self, error: BaseException | None = None) -> None:
        """What leaving the block does; for callbacks of frameworks. error: what ended the loop."""
        global _active
        if self._closed or not self._thread or _active is not self:  # the last: a process that was forked off
            return
        self._closed = True
        _active = None
        atexit.unregister(self._forgotten)
        if isinstance(error, SystemExit) and error.code in (None, 0):
            error = None
        self._inside.close()
        if self._recording:
            self._safely(lambda: self._write_rest(device_works=error is None))
        self._recording = False
        if self._witness is not None:
            self._witness.stop()
        self._safely(lambda: self._conclude(error))
        self._book.close()

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Around a wait for the next batch."""
        self._check("m.data()")
        if self._depth or not self._recording:
            return contextlib.nullcontext()
        return self._ledger.phase("input_wait")

    def took(self, batch: Any) -> None:
        """A batch has come."""
        if not self._depth and self._recording:
            self.see(batch)
            self._tick()

    def tell_workers(self, batches: Any) -> None:
        """Has the record say how many processes load the data, where what gives it knows that: a DataLoader."""
        workers = getattr(batches, "num_workers", None)
        if isinstance(workers, int) and self._recording and not (self._depth or self._workers_told):
            self._workers_told = True
            self._book.event("note", f"the loop's loader has {workers} worker processes", workers=workers)

    @contextlib.contextmanager
    def _issue(self, *, steps: int, pictures: int | None) -> Iterator[None]:
        self._check("m.step()")
        if self._recording:
            self._inside.look()
            with self._ledger.compute(again=self.step_count < self._book.redo_until):
                yield
            self._inside.tell()
        else:
            yield
        if steps:
            self.count_step(steps, pictures=pictures)

    def _check(self, what: str) -> None:
        if not self._thread or self._closed:
            raise UsageError(f"{what} is called outside of its block.", fix="with stoker.measure(…) as m: …")
        if threading.get_ident() != self._thread:
            text = f"{what} is called in another thread than the one that entered stoker.measure."
            raise UsageError(text, cause="the time belongs to that one", fix="call it in the thread that trains")

    def _tick(self) -> None:
        """Writes a line when a second has passed."""
        if self._recording and time.perf_counter() - self._window_s >= WINDOW_S:
            self._safely(self._write_window)

    def _write_window(self) -> None:
        self._inside.tell()
        self._window_s = time.perf_counter()
        self._write(self._ledger.window(0.0))

    def _write_rest(self, *, device_works: bool) -> None:
        self._inside.tell()
        if device_works:
            self._inside.wait()
        self._write(self._ledger.finish(), wait=device_works)

    def _write(self, account: Account | None, *, wait: bool = False) -> None:
        reading = self._logged.take(self._inside.device, wait=wait)
        for name, text in reading.odd.items():
            self._book.event("warning", text, step=self.step_count, **{name: text})
        if account is None or account.wall_s <= 0:
            return
        window = StepWindow(
            t=time.time(),
            attempt=0,  # the book knows
            step=self.step_count,
            steps=self.step_count - self._written_steps,
            pictures=self.picture_count - self._written_pictures,
            wall_s=account.wall_s,
            devices=1,
            phases=account.phases,
            losses=reading.losses,
            rate=reading.rate,
            grad_norm=reading.grad_norm,
            memory_peak_bytes=self._inside.peak_bytes(),
            starved=account.starved,
            cpu=account.cpu,
        )
        self._written_steps, self._written_pictures = self.step_count, self.picture_count
        self._book.write(window)

    def _conclude(self, error: BaseException | None) -> None:
        text = None if error is None else f"{type(error).__name__}: {error}"
        self._book.ended(text, step=self.step_count, exit_code=exit_code_of(error))
        if self._book.rank == 0 and self._book.path is not None:
            write_findings(self._book.path, diagnose(self._book.path))

    def _safely(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # noqa: BLE001 (training goes on without records, and the person is told)
            self._recording = False
            self._book.warn(f"nothing is recorded from here on: {type(error).__name__}: {error}")

    def _forgotten(self) -> None:
        """At the end of the process, when nobody left the block: not every framework tells its callbacks of errors."""
        error = getattr(sys, "last_value", None)
        self.close(error if error is not None else RuntimeError("the process ended inside stoker.measure"))

    def _abandon(self) -> None:
        self._recording = False
        self._inside.abandon()
        self._book.abandon()


class Data(Generic[Batch]):
    """Batches on their way to the loop; as long as what they come from."""

    def __init__(self, measure: Measure, batches: Iterable[Batch]) -> None:
        self._measure = measure
        self._batches = batches

    def __len__(self) -> int:
        """Raises TypeError where the source has no length."""
        return len(self._batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        measure = self._measure
        measure.tell_workers(self._batches)
        with measure.waiting():
            source = iter(self._batches)
        while True:
            with measure.waiting():
                try:
                    batch = next(source)
                except StopIteration:
                    return
            measure.took(batch)
            yield batch


def _forked() -> None:
    global _active
    if _active is not None:
        _active._abandon()
        _active = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
