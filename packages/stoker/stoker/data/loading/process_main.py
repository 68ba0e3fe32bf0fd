"""What a worker process of the loader runs: the worker threads of `worker_pool.py` on groups of samples.

A process serves several streams (training, evaluation). Each has its own memory for batches, a pipe from which all
processes take groups, and a socket for what they report; the descriptors come over the process' control socket. The
process does without torch. It ignores signals that a terminal or a scheduler sends to all processes of a job, because
training goes on until it is done; it ends when its control socket closes, which the kernel does when the training
process ends in whatever way. Started by `processes.py`.
"""

import contextlib
import functools
import gc
import mmap
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from stoker.data.images.pixel_cache import PixelCache
from stoker.data.loading.buffers import GROUP, HostBatchBuffer, Ring, RingLayout
from stoker.data.loading.samples import BatchTask, SampleResult, SampleStream
from stoker.data.loading.worker_pool import MAX_READ_AHEAD, WorkerPool
from stoker_watch.errors import system_limit
from stoker_watch.recording.telemetry.machine import allow_reading

IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PUBLISH_INTERVAL_S = 0.25
"""How often counters are published while no group is finished, and the training process is looked for."""
MAX_TRACEBACK = 4000
"""Characters of a traceback that are passed on, its end."""


class _GroupTask(BatchTask):
    """A group of samples: a batch of its own for the worker pool, which lies in a part of a slot."""

    slot_number: int
    first: int


class _Stream:
    def __init__(self, process: int, fds: list[int], payload: dict[str, Any], layout: RingLayout) -> None:
        """fds: the ring's memory, the pipe of groups, the socket for reports, and the cache's file, if it has one."""
        memory_fd, self._groups_fd, report_fd, *cache_fd = fds
        self._process, self._ring = process, Ring(layout, memory_fd)
        self._report_socket = socket.socket(fileno=report_fd)
        index, cache_arguments = payload["index"], payload["cache"]
        cache = None
        if cache_arguments is not None:
            cache = PixelCache(
                index,
                fd=cache_fd[0] if cache_fd else None,
                on_error=lambda message: self._report("cache full", message),
                **cache_arguments,
            )
        self._samples = SampleStream(index, payload["image_indices"], payload["spec"], cache)
        self._changed = threading.Condition()
        self._pool: WorkerPool | None = None
        self._generation, self._outstanding, self._max_outstanding = 0, 0, 1
        self._group_size = self._fair_share = 1
        self.is_closed = False
        """No group will come any more. The memory goes with the last worker that uses it."""
        threading.Thread(target=_or_exit(self._take_groups), name="stoker-groups", daemon=True).start()

    def _report(self, *report: Any) -> None:
        _send_report(self._report_socket, *report)

    def start(
        self, generation: int, workers: int, group_size: int, fair_share: int, quarantined: dict[int, int]
    ) -> None:
        """Accepts groups of `generation` from now on. fair_share: the most samples that this process takes."""
        with self._changed:
            self._samples.quarantined = quarantined
            self._generation, self._outstanding = generation, 0
            self._group_size, self._fair_share = group_size, fair_share
            finish_group = _or_exit(functools.partial(self._finish_group, generation))
            self._pool = WorkerPool(self._samples, workers, on_batch_loaded=finish_group)
            self._limit_outstanding(workers)

    def resize(self, workers: int) -> None:
        with self._changed:
            if self._pool is not None:
                self._pool.resize(workers)
                self._limit_outstanding(workers)

    def _limit_outstanding(self, workers: int) -> None:
        wanted = (1 + MAX_READ_AHEAD) * workers + self._group_size
        self._max_outstanding = max(1, min(wanted, self._fair_share) // self._group_size)
        self._changed.notify_all()

    def stop(self) -> None:
        """Drops the groups that are not begun, waits for the others, and reports it."""
        with self._changed:
            pool, self._pool = self._pool, None
            generation, self._outstanding = self._generation, 0
            self._changed.notify_all()
        if pool is not None:
            pool.stop()
            pool.join()
            self._ring.write_counters(self._process, pool.total(), time.process_time())
        self._report("stopped", generation, pool is None or pool.is_idle)

    def publish(self) -> None:
        if (pool := self._pool) is not None:
            self._ring.write_counters(self._process, pool.total(), time.process_time())

    def _take_groups(self) -> None:
        """Takes groups, in a thread, while few of them are in progress here, and gives them to the workers."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._outstanding < self._max_outstanding)
            group = os.read(self._groups_fd, GROUP.size)  # the kernel wakes one of all processes
            if not group:
                break
            generation, position, slot_number, first, count, _ = GROUP.unpack(group)
            with self._changed:
                # The message that starts this generation may arrive after its first group.
                while self._generation < generation:
                    self._changed.wait()
                if self._generation == generation and self._pool is not None:
                    self._outstanding += 1
                    self._submit(self._pool, position, slot_number, first, count)
        self.stop()  # the loader was closed
        os.close(self._groups_fd)
        self.is_closed = True

    def _submit(self, pool: WorkerPool, position: int, slot_number: int, first: int, count: int) -> None:
        arrays = [array[first : first + count] for array in self._ring.slots[slot_number]]
        buffer = HostBatchBuffer(None, count, self._ring.layout.image_size, self._ring.layout.max_boxes, arrays)
        task = _GroupTask(position, position, buffer, count)
        task.slot_number, task.first = slot_number, first
        pool.submit_batch(task)

    def _finish_group(self, generation: int, task: BatchTask) -> None:
        """Reports a group; the worker calls it that has loaded its last sample."""
        assert isinstance(task, _GroupTask)
        self.publish()
        special = {}
        for k, result in enumerate(task.results):
            if isinstance(result, BaseException):
                special[task.first + k] = _picklable(result, self._process)
            elif result is not None and result.failures:
                special[task.first + k] = SampleResult(
                    result.image_index, [(n, _picklable(error, self._process)) for n, error in result.failures]
                )
        self._report("group loaded", generation, task.slot_number, task.first, len(task.results), special)
        with self._changed:
            if generation == self._generation and self._pool is not None:
                self._outstanding -= 1
                self._changed.notify_all()


def _send_report(report_socket: socket.socket, *report: Any) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the loader was closed meanwhile
        report_socket.send(pickle.dumps(report))


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


def load_payload(fd: int) -> dict[str, Any]:
    """Returns what `processes.save_payload` wrote; its arrays stay in that memory, which all processes share."""
    memory = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_READ))
    os.close(fd)
    num_buffers = int(np.frombuffer(memory, np.int64, 1)[0])
    ends = np.frombuffer(memory, np.int64, 2 * num_buffers + 2, 8).reshape(-1, 2).tolist()
    pickled, *buffers = (memory[start:end] for start, end in ends)
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


def _serve(control_fd: int, process: int, streams: dict[int, _Stream]) -> None:
    """Does what the training process asks for, in a thread, until it ends."""
    control, control_socket = Connection(os.dup(control_fd)), socket.socket(fileno=control_fd)
    while True:
        try:
            request, number, *arguments = control.recv()
        except (EOFError, ConnectionResetError):
            os._exit(0)
        if request == "open":
            layout, num_fds = arguments
            _, (payload_fd, *fds), _, _ = socket.recv_fds(control_socket, 1, num_fds)
            try:
                streams[number] = _Stream(process, fds, load_payload(payload_fd), layout)
            except Exception as error:  # noqa: BLE001  (the loader raises it)
                with socket.socket(fileno=fds[2]) as report_socket:
                    _send_report(report_socket, "failed", _picklable(error, process))
        elif number in streams:
            getattr(streams[number], request)(*arguments)


def _tend(streams: dict[int, _Stream]) -> None:
    closed = [number for number, stream in streams.copy().items() if stream.is_closed]
    for number in closed:
        del streams[number]
    if closed:
        gc.collect()  # exceptions refer to frames, and those to the memory; an idle process would keep it
    for stream in streams.copy().values():
        stream.publish()


def main(control_fd: int, process: int, parent: int, stack_reader: int) -> None:
    """Runs a worker process. parent: the process id of the training process, which may have ended already;
    stack_reader: of what reads stacks of this process; 0: nothing does."""
    if stack_reader:
        allow_reading(stack_reader)
    for signal_number in IGNORED_SIGNALS:
        signal.signal(signal_number, signal.SIG_IGN)
    streams: dict[int, _Stream] = {}
    threading.Thread(target=_or_exit(_serve), args=(control_fd, process, streams), daemon=True).start()
    # A process that the training process forked may keep the other end of the control socket open.
    while os.getppid() == parent:
        time.sleep(PUBLISH_INTERVAL_S)
        _tend(streams)
    os._exit(0)
