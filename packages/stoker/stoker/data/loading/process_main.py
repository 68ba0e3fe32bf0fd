"""What a worker process of the loader runs: the worker threads of `worker_pool.py` on groups of samples.

A process serves several streams (training, evaluation), each with memory for its batches. What is to be done and what
has been done, and the descriptors of the memory, are messages of one connection. The process does without torch. It
ignores signals that a terminal or a scheduler sends to all processes of a job, because training goes on until it is
done; it ends when its connection closes, which the kernel does when the training process ends in whatever way. Started
by `processes.py`.
"""

import contextlib
import functools
import gc
import mmap
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

from stoker.data.images.pixel_cache import PixelCache
from stoker.data.loading.buffers import HostBatchBuffer, Ring, RingLayout
from stoker.data.loading.samples import BatchTask, SampleResult, SampleStream
from stoker.data.loading.worker_pool import WorkerPool
from stoker_watch.errors import system_limit
from stoker_watch.recording.telemetry.machine import allow_reading

IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PUBLISH_INTERVAL_S = 0.25
"""How often counters are published while no group is finished, and the training process is looked for."""
MAX_TRACEBACK = 4000
"""Characters of a traceback that are passed on, its end."""


class _Stream:
    """A process' part of a stream. Its public methods are the requests of the training process."""

    def __init__(
        self, process: int, report: Callable[..., None], layout: RingLayout, parts: list[tuple[int, int]], *fds: int
    ) -> None:
        """fds: the payload, of which `parts` are the parts, the memory of the batches, and the cache's file if any."""
        payload_fd, memory_fd, *cache_fd = fds
        payload = load_payload(payload_fd, parts)
        self._process, self._report, self._ring = process, report, Ring(layout, memory_fd)
        index, cache_arguments, cache = payload["index"], payload["cache"], None
        if cache_arguments is not None:
            on_error = functools.partial(report, "cache_full")
            cache = PixelCache(index, fd=cache_fd[0] if cache_fd else None, on_error=on_error, **cache_arguments)
        self._samples = SampleStream(index, payload["image_indices"], payload["spec"], cache)
        self._pool: WorkerPool | None = None

    def start(self, workers: int, quarantined: dict[int, int]) -> None:
        self._samples.quarantined = quarantined
        self._pool = WorkerPool(self._samples, workers)

    def resize(self, workers: int) -> None:
        if self._pool is not None:
            self._pool.resize(workers)

    def load(self, position: int, slot: int, first: int, count: int) -> None:
        """Loads a group of samples: a batch of its own for the worker pool, which lies in a part of a slot."""
        if self._pool is not None:
            layout, arrays = self._ring.layout, [array[first : first + count] for array in self._ring.slots[slot]]
            buffer = HostBatchBuffer(None, count, layout.image_size, layout.max_boxes, arrays)
            task = BatchTask(position, position, buffer, count)
            task.on_loaded = _or_exit(functools.partial(self._finish_group, slot, first, task.results))
            self._pool.submit_batch(task)

    def _finish_group(self, slot: int, first: int, results: list[SampleResult | BaseException | None]) -> None:
        """Reports a group; the worker calls it that has loaded its last sample."""
        self.publish()
        special: dict[int, Any] = {}
        for k, result in enumerate(results, start=first):
            if isinstance(result, BaseException):
                special[k] = _picklable(result, self._process)
            elif result is not None and result.failures:
                failures = [(n, _picklable(error, self._process)) for n, error in result.failures]
                special[k] = SampleResult(result.image_index, failures)
        self._report("loaded", slot, first, len(results), special)

    def stop(self) -> None:
        """Drops the groups that are not begun, waits for the others, and reports it."""
        self._report("stopped", self._end_pool())

    def _end_pool(self) -> bool:
        """Returns whether no thread writes into the memory any more."""
        pool, self._pool = self._pool, None
        if pool is None:
            return True
        pool.stop()
        pool.join()
        self._ring.write_counters(self._process, pool.total(), time.process_time())
        return pool.is_idle

    close = _end_pool

    def publish(self) -> None:
        if (pool := self._pool) is not None:
            self._ring.write_counters(self._process, pool.total(), time.process_time())


def _picklable(error: BaseException, process: int) -> Any:
    """Returns the error with the traceback of this process as a note, as tracebacks cannot be sent."""
    if isinstance(error, Exception) and not isinstance(error, OSError) and not hasattr(error, "what"):
        text = "".join(traceback.format_exception(error))[-MAX_TRACEBACK:]
        error.add_note(f"in worker process {process}:\n{text}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  (whatever the class of the error raises)
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def load_payload(fd: int, parts: list[tuple[int, int]]) -> dict[str, Any]:
    """Returns what `processes.save_payload` wrote; its arrays stay in that memory, which all processes share."""
    memory = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_READ))
    os.close(fd)
    pickled, *buffers = (memory[start:end] for start, end in parts)
    payload: dict[str, Any] = pickle.loads(pickled, buffers=buffers)
    return payload


def _or_exit(function: Callable[..., None]) -> Callable[..., None]:
    """Makes a bug in this process end it with its traceback on stderr, a limit of the system with its name; the
    training process then says that it ended."""

    def run(*arguments: Any) -> None:
        try:
            function(*arguments)
        except BaseException as error:  # noqa: BLE001
            limit = system_limit(error)
            print(f"stoker: {limit or traceback.format_exc()}", file=sys.stderr, flush=True)
            os._exit(1)

    return run


def _serve(control: Connection, process: int, streams: dict[int, _Stream]) -> None:
    """Does what the training process asks for, in a thread, until it ends."""
    sending = threading.Lock()

    def report(stream: int, *report: Any) -> None:
        with sending, contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the training process has ended
            control.send((stream, *report))

    while True:
        try:
            request, number, *arguments = control.recv()
        except (EOFError, OSError):  # OSError: in the middle of a message
            os._exit(0)
        if request == "open":
            layout, parts, num_fds = arguments
            fds = [reduction.recv_handle(control) for _ in range(num_fds)]
            try:
                streams[number] = _Stream(process, functools.partial(report, number), layout, parts, *fds)
            except Exception as error:  # noqa: BLE001  (the loader raises it)
                report(number, "failed", _picklable(error, process))
        elif number in streams:
            getattr(streams[number], request)(*arguments)
            if request == "close":
                del streams[number]
                gc.collect()  # exceptions refer to frames, and those to the memory; an idle process would keep it


def _publish(streams: list[_Stream]) -> None:
    for stream in streams:
        stream.publish()


def main(control_fd: int, process: int, parent: int, stack_reader: int) -> None:
    """Runs a worker process. parent: the process id of the training process, which may have ended already;
    stack_reader: of what reads stacks of this process; 0: nothing does."""
    if stack_reader:
        allow_reading(stack_reader)
    for signal_number in IGNORED_SIGNALS:
        signal.signal(signal_number, signal.SIG_IGN)
    streams: dict[int, _Stream] = {}
    threading.Thread(target=_or_exit(_serve), args=(Connection(control_fd), process, streams), daemon=True).start()
    # A process that the training process forked may keep the other end of the connection open.
    while os.getppid() == parent:
        time.sleep(PUBLISH_INTERVAL_S)
        _publish(list(streams.values()))
    os._exit(0)
