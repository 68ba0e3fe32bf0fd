"""The stream of batches: threads decode into a ring of host batches, copies run beside the step, the state is exact.

Stages: fetch, decode (with crop and resize, into the ring), copy. Local files are read by the thread that decodes them;
pictures of a bucket are asked for ahead (`prefetch.py`) and come to the threads when their bytes are there. Any number
of threads takes samples in the order of the stream (`worker_pool.py`). The thread that asks for batches does everything
else, in that order too: it hands out tasks when a slot of the ring is free, commits what came of them (`finalize.py`),
starts copies, and once a second looks whether other numbers of threads and slots would do better (`autotune.py`). So
nothing that a run sees depends on how many threads there are or which was first. What one sample is: `samples.py`;
where a wait went: `timeline.py`.
"""

import functools
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stoker.data.batch import Batch
from stoker.data.loading.autotune import LOOK_S, WAITS_FROM, Gauge, tuner_for
from stoker.data.loading.counters import Counters
from stoker.data.loading.device_batches import DeviceBatches
from stoker.data.loading.finalize import Commit
from stoker.data.loading.prefetch import Ahead, Flights, positions
from stoker.data.loading.samples import Quarantine, Samples, Slot, as_batch, box_slots
from stoker.data.loading.stages import Stats, stats_of
from stoker.data.loading.wait_breakdown import COPY, QUEUE, Intervals, Waits, split
from stoker.data.loading.worker_pool import Crew, Task, Work
from stoker.data.validation.problems import MAX_BAD
from stoker.errors import CheckpointError, DataError
from stoker.hardware.device import Device, Ready

if TYPE_CHECKING:
    from stoker.data.images.pixel_cache import PixelCache
    from stoker.data.index import Index
    from stoker.storage.fetcher import Fetcher

__all__ = ["DEPTH", "Loader", "Quarantine", "Stats", "box_slots"]

DEPTH = 3
"""Batches ahead of training, to begin with: one ready, one being finished, one begun by the threads that are free."""
HELD = 2
"""Slots beside them: that of the batch in work, and of the one before (CPU) or of the next one's copy (device)."""


class Loader:
    """An iterator of device-ready batches: endless over `rows` in training, one pass in order in evaluation.

    rows: int64 [N], rows of the index. batch: B, pictures per batch of this rank; canvas: height and width; boxes: M,
    see `box_slots`; resize, crop, zoom, overlap: see `augment.draw_placement` (the last three in training only).
    threads: how many read and decode; 0: tuned while it runs, from `begin` on or the usual number. depth: batches
    decoded ahead; None: tuned. Host memory is (depth + 2) · B · H · W · 3 bytes. on_tuned is told of each change.
    max_bad: share of the pictures that may be in quarantine before the loader raises.

    ranks: a global batch is B · ranks positions of the stream, of which rank r takes the r-th B. Each rank knows its
    own failures; as what stands in for a picture is drawn by position, ranks agree on lasting ones without talking.

    on_quarantine is called by `__next__`, in the order of the stream, when a picture is taken out of use.

    In evaluation the last batch is filled with rows of image_id -1, and a picture that fails becomes one.
    `iter` starts a pass from its beginning.

    cache: pictures are made from what it keeps; a run has one from its beginning to its end, or none.
    decoder: nvjpeg has the device decode the JPEGs that it takes, host none; not together with a cache.
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
        begin: int = 0,
        train: bool = True,
        depth: int | None = None,
        max_bad: float = MAX_BAD,
        rank: int = 0,
        ranks: int = 1,
        on_quarantine: Callable[[Quarantine], None] | None = None,
        on_tuned: Callable[[str], None] | None = None,
        cache: "PixelCache | None" = None,
        decoder: Literal["host", "nvjpeg"] = "host",
    ) -> None:
        if not len(rows):
            raise DataError("There is no picture to load.", place=index.source)
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
            cache=cache,
        )
        self._device, self._batch, self._rank, self._ranks = device, batch, rank, ranks
        self._stream = device.make_stream()
        self._device_batches = DeviceBatches(self._samples, device, on_tuned) if decoder == "nvjpeg" else None
        self._make_slot = functools.partial(Slot, device, batch, canvas, boxes)
        tunes_depth, depth = depth is None, DEPTH if depth is None else depth
        self._slots = [self._make_slot() for _ in range(depth + HELD)]
        self._tuner = tuner_for(
            threads, begin, depth, self._slots[0].nbytes, is_cpu=device.is_cpu, tunes_depth=tunes_depth
        )
        self._on_tuned = on_tuned
        self.on_copy_awaited: Callable[[], None] | None = None
        """Called in `__next__` where the device that trains has to wait for the batch's copy, before it is told to."""
        self._gauge: Gauge | None = None
        self._counters, self._flights, self._waits = Counters(), Flights(), Waits()
        self._wait_s, self._copies = 0.0, 0
        self._commit = Commit(
            index, self._samples, max_bad=max_bad, on_quarantine=on_quarantine, counters=self._counters
        )
        self._crew: Crew | None = None
        self._ahead: Ahead | None = None
        self._fetcher: Fetcher | None = None
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

    @property
    def last_wait(self) -> Intervals:
        """What the newest `__next__` spent its time on: (end in seconds of `time.perf_counter`, stage), ascending; the
        first interval begins with the call. Nearly all of it where the loader is the slower one."""
        return self._waits.last

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
        """What was done so far and what is being done; a snapshot."""
        pending = list(self._pending)  # the thread that asks for batches may be adding to it
        left = sum(min(work.left, self._batch) for work in pending)
        return stats_of(
            [self._counters, *(self._crew.counters() if self._crew else ())],
            self._flights,
            self._waits,
            self._slots[0],
            copies=self._copies,
            copying=sum(not ready.done() for _, ready in list(self._handed)),
            wait_s=self._wait_s,
            queued=self._crew.waiting if self._crew else 0,
            ready=self._batch * (len(pending) + (self._copied is not None)) - left,
            threads=self._tuner.threads,
            depth=self._tuner.depth,
            ahead=self._ahead.most if self._ahead else 0,
        )

    def close(self) -> None:
        """Ends the threads. May be called twice, in the middle of an epoch, after an error, from another thread."""
        self._closed = True
        self._halt()
        if self._fetcher is not None:
            self._fetcher.close()

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
        Raises DataError when too many pictures cannot be used; StorageError when a bucket cannot be read; RuntimeError
        with the picture's path for a bug.
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

    def _start(self) -> Crew:
        """The threads, and what is fetched ahead of them, from the place of the stream that comes next."""
        crew = self._crew = Crew(self._samples, self._tuner.threads, self._device_batches)
        self._finalizer = weakref.finalize(self, crew.stop)
        self._finalizer.atexit = False  # `worker_pool.py` stops and joins at exit
        if self._samples.is_remote:
            if self._fetcher is None:
                from stoker.storage.fetcher import Fetcher  # obstore is needed for buckets only

                self._fetcher = Fetcher()
                weakref.finalize(self, self._fetcher.close)
            first = self._next_base + self._rank * self._batch
            stream = positions(first, self._batch, self._batch * self._ranks)
            self._ahead = Ahead(self._samples, self._fetcher, self._flights, stream)
        return crew

    def _halt(self) -> None:
        crew, self._crew, self._ahead, self._gauge = self._crew, None, None, None
        if crew is None:
            return
        if self._finalizer is not None:
            self._finalizer.detach()
        crew.stop()
        crew.join()
        for counters in crew.counters():
            self._counters.add(counters)

    def _hand_out(self) -> Batch:
        if self._closed:
            raise RuntimeError("this loader is closed")
        self._waits.begin()
        crew = self._crew or self._start()
        self._take_back()
        self._schedule(crew)
        if self._copied is None:
            self._waits.until(QUEUE)
            work = self._wait_for_next(crew)
            self._commit.batch(work)
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
            and self._commit.is_empty(self._pending[0])
        ):
            self._copied = self._copy(self._pending.popleft())
        self._tune(crew)
        self._waits.until(QUEUE)
        if self.on_copy_awaited is not None and not ready.done():
            self.on_copy_awaited()
        ready.block_device()
        return as_batch(tensors)

    def _take_back(self) -> None:
        """Frees the slots that nobody reads any more; gives up those that the ring is too deep by."""
        if self._device.is_cpu:
            while len(self._handed) > 1:
                self._free.append(self._handed.popleft()[0])
        while self._handed and not self._device.is_cpu and self._handed[0][1].done():
            self._free.append(self._handed.popleft()[0])
        while len(self._slots) > self._tuner.depth + HELD and self._free:
            self._slots.remove(self._free.popleft())

    def _schedule(self, crew: Crew) -> None:
        """Gives the samples of the next batches to the threads, as far as there are free slots."""
        while self._free and (self._samples.train or self._next_base < len(self._samples)):
            work = Work(self._next_base, self._next_base + self._rank * self._batch, self._free.popleft(), self._batch)
            self._next_base += self._batch * self._ranks
            self._pending.append(work)
            crew.expect(work)
            self._give(crew, work)
        if self._ahead is not None:
            self._ahead.top_up()

    def _give(self, crew: Crew, work: Work) -> None:
        there = []
        for k in range(self._batch):
            position = work.start + k
            found = None if self._ahead is None else self._ahead.take(position)
            if found is None:
                there.append(Task(position, work, k, None))
                continue
            fetch, work.marks[k] = found
            crew.give_when_fetched(Task(position, work, k, fetch), fetch)  # so a slow object holds up no thread
        crew.give(*there)

    def _wait_for_next(self, crew: Crew) -> Work:
        """The next batch of the stream, once all its samples are there. Raises StopIteration after the last."""
        began_s = time.perf_counter()
        try:
            if not self._pending:
                if not self._samples.train and self._next_base >= len(self._samples):
                    raise StopIteration
                self._handed[0][1].wait()  # every slot is still being copied from
                self._waits.until(COPY)
                self._take_back()
                self._schedule(crew)
                self._waits.until(QUEUE)
            since_s = time.perf_counter()
            with crew.done:
                crew.done.wait_for(lambda: self._pending[0].left == 0 or crew.stopped)
            if crew.stopped:
                raise RuntimeError("the loader was closed while a batch was waited for")
            work = self._pending.popleft()
            others = [marks for later in self._pending for marks in later.marks]
            self._waits.add(split(since_s, time.perf_counter(), work.marks, others))
            return work
        finally:
            self._wait_s += time.perf_counter() - began_s

    def _copy(self, work: Work) -> tuple[Work, list[Tensor], Ready]:
        self._waits.until(QUEUE)
        if work.made is None:
            tensors, ready = self._stream.to_device(work.slot.tensors)
        else:
            tensors, ready = work.made.hand_over(work, self._stream)
        self._copies += 1
        self._waits.until(COPY)
        return work, tensors, ready

    def _tune(self, crew: Crew) -> None:
        """Once a second of training: measures, and follows what `Tuner` decides."""
        if self._gauge is None:
            self._gauge = Gauge(self.stats())  # from here on: the start says nothing
            return
        if time.perf_counter() - self._gauge.looked_s < LOOK_S:
            return
        seen = self._gauge.look(self.stats())
        if self._fetcher is not None:
            self._fetcher.note(seen.handed_per_s, seen.waits * seen.flights >= WAITS_FROM)
        for sentence in self._tuner.see(seen):
            if self._on_tuned is not None:
                self._on_tuned(f"loader: {sentence}")
        crew.resize(self._tuner.threads)
        while len(self._slots) < self._tuner.depth + HELD:
            slot = self._make_slot()
            self._slots.append(slot)
            self._free.append(slot)
