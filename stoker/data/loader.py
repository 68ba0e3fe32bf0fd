"""The stream of batches: threads decode into a ring of host batches, copies run beside the step, the state is exact.

One queue of samples, any number of threads: each takes the next place of the next batch, reads, decodes and resizes
into it. The thread that asks for batches does everything else, in the order of the stream: it hands out tasks when a
slot of the ring is free, commits what came of them (the quarantine), and starts copies. So nothing that a run sees
depends on how many threads there are or which was first. What one sample is: `samples.py`.
"""

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stoker.batch import Batch
from stoker.data.crew import Crew, Work
from stoker.data.problems import MAX_BAD, tolerated
from stoker.data.samples import Outcome, Quarantine, Samples, Slot, Stats, as_batch, box_slots
from stoker.device import Device, Ready
from stoker.errors import CheckpointError, DataError

if TYPE_CHECKING:
    from stoker.data.index import Index

__all__ = ["DEPTH", "Loader", "Quarantine", "Stats", "box_slots"]

DEPTH = 3
"""Batches ahead of training: one ready, one being finished, one being begun by the threads that are free."""
HELD = 2
"""Slots beside them: that of the batch in work, and of the one before (CPU) or of the next one's copy (device)."""


class Loader:
    """An iterator of device-ready batches: endless over `rows` in training, one pass in order in evaluation.

    rows: int64 [N], rows of the index. batch: B, pictures per batch of this rank; canvas: height and width; boxes: M,
    see `box_slots`; resize, crop, zoom, overlap: see `augment.draw_placement` (the last three in training only).
    depth: batches decoded ahead; host memory is (depth + 2) · B · H · W · 3 bytes.
    max_bad: share of the pictures that may be in quarantine before the loader raises.

    ranks: a global batch is B · ranks positions of the stream, of which rank r takes the r-th B. Each rank knows its
    own failures; as what stands in for a picture is drawn by position, ranks agree on lasting ones without talking.

    on_quarantine is called by `__next__`, in the order of the stream, when a picture is taken out of use.

    In evaluation the last batch is filled with rows of image_id -1, and a picture that fails becomes one.
    `iter` starts a pass from its beginning.
    """

    def __init__(
        self,
        index: "Index",
        rows: NDArray[np.int64],
        *,
        device: Device,
        batch: int,
        canvas: tuple[int, int],
        resize: str,
        crop: float = 0.0,
        zoom: tuple[float, float] = (1.0, 1.0),
        overlap: float = 0.0,
        boxes: int,
        seed: int,
        threads: int,
        train: bool = True,
        depth: int = DEPTH,
        max_bad: float = MAX_BAD,
        rank: int = 0,
        ranks: int = 1,
        on_quarantine: Callable[[Quarantine], None] | None = None,
    ) -> None:
        if not len(rows):
            raise DataError("There is no picture to load.", place=index.root)
        self._samples = Samples(
            index,
            rows,
            canvas=canvas,
            resize=resize,
            crop=crop,
            zoom=zoom,
            overlap=overlap,
            boxes=boxes,
            seed=seed,
            train=train,
        )
        self._index, self._device, self._batch, self._threads = index, device, batch, threads
        self._rank, self._ranks, self._on_quarantine = rank, ranks, on_quarantine
        self._max_bad = max_bad
        self._stream = device.make_stream()
        self._slots = [Slot(device, batch, canvas, boxes) for _ in range(depth + HELD)]
        self._errors: dict[int, str] = {}
        self._stats = Stats()
        self._crew: Crew | None = None
        self._finalizer: weakref.finalize[..., Loader] | None = None
        self._failure: Exception | None = None
        self._closed = False
        self._pending: deque[Work] = deque()
        self._copied: tuple[Work, list[Tensor], Ready] | None = None
        self._handed: deque[tuple[Slot, Ready]] = deque()
        self._rewind(0)

    # What a run asks.

    @property
    def position(self) -> int:
        """Samples handed out so far, by all ranks together: where in the stream the next batch begins."""
        return self._position

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch handed out. What was decoded ahead is not part of it."""
        return {
            "position": self._position,
            "quarantined": dict(self._samples.quarantined),
            "count": len(self._samples),
            "seed": self._samples.seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state: the same batches follow, bit for bit, whatever the number of threads.

        `quarantined` may name positions that are still to come (from quarantine.jsonl of a run that went further before
        it was killed): the picture is used up to there. Raises CheckpointError when the state is of another stream.
        """
        for name, mine in (("count", len(self._samples)), ("seed", self._samples.seed)):
            if state.get(name, mine) != mine:
                what = {"count": "number of training pictures", "seed": "seed"}[name]
                raise CheckpointError(
                    f"The {what} is {mine}, the saved state was made with {state[name]}.",
                    cause="the saved position means other pictures now",
                    fix="restore the data set or the setting, or start a new run",
                )
        self._rewind(int(state["position"]))
        self._samples.quarantined.clear()
        self._samples.quarantined.update({int(row): int(at) for row, at in state["quarantined"].items()})

    def rows_of(self, position: int, count: int) -> list[int]:
        """The rows that `count` positions from `position` on are made of, with replacements; -1 for none."""
        return [self._samples.row_at(at) for at in range(position, position + count)]

    def stats(self) -> Stats:
        """Seconds per stage so far; a snapshot."""
        total = Stats()
        total.add(self._stats)
        for stats in self._crew.stats if self._crew else ():
            total.add(stats)
        return total

    def close(self) -> None:
        """Ends the threads. May be called twice, in the middle of an epoch, after an error, from another thread."""
        self._closed = True
        self._halt()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        if not self._samples.train and self._position:
            self._rewind(0)
        return self

    def __next__(self) -> Batch:
        """The next batch, on the device.

        On a CPU its tensors are the ring's own memory: they stay as they are until the next call but one.
        Raises DataError when too many pictures cannot be used; RuntimeError with the picture's path for a bug.
        """
        if self._failure is not None:
            raise self._failure
        try:
            return self._hand_out()
        except StopIteration:
            raise
        except Exception as error:
            self._failure = error
            raise

    # How it comes about; all of this runs in the caller's thread.

    def _rewind(self, position: int) -> None:
        self._halt()
        if self._copied is not None:
            work, _, ready = self._copied
            self._handed.append((work.slot, ready))
        self._copied = None
        self._pending.clear()
        held = {id(slot) for slot, _ in self._handed}
        self._free = deque(slot for slot in self._slots if id(slot) not in held)
        self._position = self._next_base = position

    def _halt(self) -> None:
        crew, self._crew = self._crew, None
        if crew is None:
            return
        if self._finalizer is not None:
            self._finalizer.detach()
        crew.stop()
        crew.join()
        for stats in crew.stats:
            self._stats.add(stats)

    def _hand_out(self) -> Batch:
        if self._closed:
            raise RuntimeError("this loader is closed")
        if self._crew is None:
            self._crew = Crew(self._samples, self._threads)
            self._finalizer = weakref.finalize(self, self._crew.stop)
            self._finalizer.atexit = False  # `crew.py` stops and joins at exit
        crew = self._crew
        self._take_back()
        self._schedule(crew)
        if self._copied is None:
            work = self._wait_for_next(crew)
            self._commit(work)
            self._copied = self._copy(work)
        work, tensors, ready = self._copied
        self._copied = None
        self._handed.append((work.slot, ready))
        self._position = work.base + self._batch * self._ranks
        if not self._samples.train:
            self._position = min(self._position, len(self._samples))
        # What follows is copied while the device works on this one: if it is decoded and needs no say of ours.
        if (
            not self._device.is_cpu
            and self._pending
            and self._pending[0].left == 0
            and self._is_clean(self._pending[0])
        ):
            self._copied = self._copy(self._pending.popleft())
        ready.block_device()
        return as_batch(tensors)

    def _take_back(self) -> None:
        """Frees the slots that nobody reads any more."""
        if self._device.is_cpu:
            while len(self._handed) > 1:
                self._free.append(self._handed.popleft()[0])
        while self._handed and not self._device.is_cpu and self._handed[0][1].done():
            self._free.append(self._handed.popleft()[0])

    def _schedule(self, crew: Crew) -> None:
        """Gives the samples of the next batches to the threads, as far as there are free slots."""
        while self._free and (self._samples.train or self._next_base < len(self._samples)):
            work = Work(self._next_base, self._next_base + self._rank * self._batch, self._free.popleft(), self._batch)
            self._next_base += self._batch * self._ranks
            self._pending.append(work)
            crew.give(work)

    def _wait_for_next(self, crew: Crew) -> Work:
        """The next batch of the stream, once all its samples are there. Raises StopIteration after the last."""
        started = time.perf_counter()
        try:
            if not self._pending:
                if not self._samples.train and self._next_base >= len(self._samples):
                    raise StopIteration
                self._handed[0][1].wait()  # every slot is still being copied from
                self._take_back()
                self._schedule(crew)
            with crew.done:
                crew.done.wait_for(lambda: self._pending[0].left == 0 or crew.stopped)
            if crew.stopped:
                raise RuntimeError("the loader was closed while a batch was waited for")
            return self._pending.popleft()
        finally:
            self._stats.wait_s += time.perf_counter() - started

    def _copy(self, work: Work) -> tuple[Work, list[Tensor], Ready]:
        tensors, ready = self._stream.to_device(work.slot.tensors)
        return work, tensors, ready

    def _is_clean(self, work: Work) -> bool:
        """Whether committing this batch would change nothing."""
        return all(
            isinstance(outcome, Outcome)
            and not outcome.failures
            and (self._samples.usable(outcome.row, work.start + k) if outcome.row >= 0 else not self._samples.train)
            for k, outcome in enumerate(work.outcomes)
        )

    def _commit(self, work: Work) -> None:
        """Makes what the threads found the truth, sample by sample in the order of the stream.

        A thread reads ahead, so it may have used a picture that an earlier position has put into quarantine meanwhile
        (it failed once, then not again): that sample is loaded anew, here. So the stream is the one that a single
        thread would have made.
        """
        samples = self._samples
        for k, outcome in enumerate(work.outcomes):
            position = work.start + k
            if isinstance(outcome, BaseException):
                raise outcome
            assert outcome is not None
            if outcome.row >= 0 and not samples.usable(outcome.row, position):
                outcome = samples.load(work.slot, k, position, self._stats)
            for row, error in outcome.failures:
                if samples.usable(row, position):
                    self._quarantine(row, error, position, outcome.row)
            if samples.train and outcome.row < 0:
                raise self._unusable(f"None of the {len(samples.quarantined):,} pictures tried can be used.")
            if len(samples.quarantined) > tolerated(self._max_bad, len(samples)):
                raise self._unusable(
                    f"{len(samples.quarantined):,} of {len(samples):,} pictures cannot be used; "
                    f"up to {self._max_bad:.3g} of them may be bad."
                )

    def _quarantine(self, row: int, error: Exception, position: int, replaced_by: int) -> None:
        text = _in_one_line(error)
        self._samples.quarantined[row] = position
        self._errors[row] = text
        if self._on_quarantine is not None:
            self._on_quarantine(Quarantine(row, self._index.path(row), text, position, replaced_by))

    def _unusable(self, what: str) -> DataError:
        bad = list(self._samples.quarantined)
        named = [f"{self._index.path(row)}: {self._errors.get(row, 'failed in an earlier start')}" for row in bad[:5]]
        more = [f"and {len(bad) - len(named):,} more"] if len(bad) > len(named) else []
        return DataError(
            what,
            place=self._index.root,
            cause="\n          ".join(named + more),
            fix=f"`stoker data check {self._index.root}` names all of them: repair them, remove them from the"
            " annotations, or allow more with --max-bad; if all are gone, check the path and the mount",
        )


def _in_one_line(error: Exception) -> str:
    if isinstance(error, DataError):
        return error.what if error.cause is None else f"{error.what} {error.cause}"
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
