"""The loader's worker processes, as the training process sees them.

With threads alone, the loader holds the interpreter's lock for about 0.46 ms per sample (`benchmarks/loading/gil.py`),
so one process cannot feed a device that trains 2,000 images per second. Worker processes run the same worker threads on
the same code (`process_main.py`) and write pixels and boxes into memory that the training process shares with them
(`buffers.py`); between processes there is one short message per group of samples. A batch is the same, bit for bit:
what a sample is depends on its position only, and results are applied in the order of the stream (`loader.py`).

Not for images in a bucket, whose bytes the training process requests ahead, nor for JPEGs that the device decodes.
"""

import contextlib
import dataclasses
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from multiprocessing import connection, reduction
from typing import TYPE_CHECKING, Any, Literal

from stoker.data.loading.buffers import HostBatchBuffer, Ring, RingLayout, create_memory
from stoker.data.loading.samples import BatchTask, LoaderSpec, SampleResult, SampleStream
from stoker.data.loading.stats import Counters
from stoker.data.loading.worker_pool import JOIN_TIMEOUT_S
from stoker_watch.errors import OutOfMemoryError, PreflightError, StokerError, make_error
from stoker_watch.hardware.cgroup import Cgroup

if TYPE_CHECKING:
    from stoker.data.images.pixel_cache import PixelCache
    from stoker.hardware.device import Device

MIN_CORES = 8
"""Cores from which on "auto" uses processes. One process decodes as fast as 1 / 0.46 ms allows, which four to eight
cores do (2 to 4 ms of a core per image): with fewer cores, these are the limit and not the interpreter's lock."""
CORES_PER_PROCESS, MAX_PROCESSES = 4, 8
"""So that each process holds its lock for less than half of the time; 8 processes load more than 2,000 images/s."""
MAX_GROUP_SIZE = 16
"""Samples of a message: a message costs the training process some 20 µs."""
POLL_INTERVAL_S = 0.5
"""How often a wait looks whether the loader was closed by another thread."""
END_TIMEOUT_S = 5.0
"""Seconds after which a process that does not end is killed."""

_START = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from stoker.data.loading.process_main import main
main(*map(int, sys.argv[2:]))
"""
"""Not as multiprocessing does: `fork` is unsafe with threads or CUDA, and `spawn` imports the user's script again."""


def choose_worker_processes(
    requested: int | Literal["auto"], *, is_cpu: bool, cores: int, is_remote: bool, jpeg_decoder: str
) -> tuple[int, str]:
    """Returns (number of worker processes, 0: threads of the training process; the reason)."""
    if requested == 0:
        return 0, "--worker-processes 0"
    if sys.platform != "linux":
        return 0, "worker processes need Linux"
    if is_remote:
        return 0, "images of a bucket are requested ahead by the training process"
    if jpeg_decoder != "cpu":
        return 0, "the GPU decodes the images"
    if requested != "auto":
        return requested, f"--worker-processes {requested}"
    if is_cpu:
        return 0, "training on a CPU needs fewer images than one process loads"
    if cores < MIN_CORES:
        return 0, f"{cores} cores decode no more than one process can hand over"
    count = min(MAX_PROCESSES, cores // CORES_PER_PROCESS)
    return count, f"one for {CORES_PER_PROCESS} of {cores} cores, so that the interpreter's lock does not limit loading"


class WorkerProcesses:
    """Worker processes, which serve any number of loaders one after the other or at once. They start at once, while
    the caller does something else; close them after the loaders. Raises PreflightError where they cannot be started."""

    def __init__(self, count: int, device: "Device", *, stack_reader: int = 0) -> None:
        """stack_reader: PID of what may read the stacks of the processes; 0: none."""
        self.count, self._device = count, device
        self._oom_kills = Cgroup().oom_kills()
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._num_streams = 0
        self._pools: weakref.WeakValueDictionary[int, ProcessPool] = weakref.WeakValueDictionary()
        self._free_rings: list[Ring] = []
        """Memory of streams that were closed: pinning takes long, so it is used again."""
        self._connections: list[connection.Connection] = []
        self._process_of: dict[int, int] = {}
        """Descriptor of a connection → number of the process."""
        self._poller = select.poll()
        """Of the connections; for the thread that holds `_receiving`."""
        self._children: list[subprocess.Popen[bytes]] = []
        path = json.dumps([os.path.abspath(entry) for entry in sys.path])
        variables = {
            # The environment's way to say what `cpu.configure_malloc` says; one thread per worker is enough.
            "MALLOC_MMAP_THRESHOLD_": str(2**30),
            "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        self.pin_failure: str | None = None
        """Why memory could not be pinned, so that copies make the host wait."""
        self.finalizer = weakref.finalize(self, _end, self._connections, self._children)
        for number in range(count):
            ours, theirs = socket.socketpair()
            with theirs:
                numbers = (theirs.fileno(), number, os.getpid(), stack_reader)
                command = [sys.executable, "-c", _START, path, *map(str, numbers)]
                self._process_of[ours.fileno()] = number
                self._poller.register(ours, select.POLLIN)
                self._connections.append(connection.Connection(ours.detach()))
                try:
                    child = subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        env=os.environ | variables,
                        pass_fds=[theirs.fileno()],
                        process_group=0,  # Ctrl-C in a terminal does not reach it while it starts
                    )
                except OSError as error:
                    self.finalizer()
                    raise make_error(
                        PreflightError, "worker-not-started", cause=error.strerror or str(error)
                    ) from error
                self._children.append(child)

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children]

    def send(self, process: int, request: str, stream: int, *arguments: Any, fds: tuple[int, ...] = ()) -> None:
        """Asks a process to call the method `request` of its part of a stream. Raises StokerError where it has died."""
        try:
            with self._sending:
                self._connections[process].send((request, stream, *arguments))
                for fd in fds:
                    reduction.send_handle(self._connections[process], fd, None)
        except (BrokenPipeError, ConnectionResetError):
            raise self._death_error(process) from None

    def receive(self, timeout_s: float) -> None:
        """Waits for reports of the processes, and gives them to the pools. Raises StokerError where one has died. Also
        for another thread than the one that waits, which may then notice up to POLL_INTERVAL_S later."""
        if timeout_s:
            connection.wait(self._connections, timeout_s)
        with self._receiving:
            while ready := self._poller.poll(0):
                for fd, _ in ready:
                    process = self._process_of[fd]
                    try:
                        stream, *report = self._connections[process].recv()
                    except (EOFError, OSError):  # OSError: it died in the middle of a message
                        if self._connections[process].closed:
                            raise
                        raise self._death_error(process) from None
                    if (pool := self._pools.get(stream)) is not None:
                        pool.apply(process, *report)

    def _death_error(self, number: int) -> StokerError:
        child = self._children[number]
        location = f"process {number + 1} of {self.count} (pid {child.pid})"
        try:
            code = child.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return StokerError("A worker process of the loader closed its connection.", location=location)
        killed = code == -signal.SIGKILL
        oom_kills = Cgroup().oom_kills()
        if killed and oom_kills is not None and oom_kills > (self._oom_kills or 0):
            return make_error(OutOfMemoryError, "worker-out-of-memory", location)
        what = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        cause = "memory may have run out: see `dmesg`" if killed else "its own message is above, on stderr"
        return make_error(StokerError, "worker-ended", location, cause=cause, how=what)

    def open_stream(self, pool: "ProcessPool", layout: RingLayout) -> tuple[int, Ring]:
        """Returns the number of a new stream, whose reports the pool gets, and its memory."""
        with self._sending:
            self._num_streams += 1
            number = self._num_streams
            self._pools[number] = pool
            for ring in self._free_rings:
                if ring.layout == layout:
                    self._free_rings.remove(ring)
                    return number, ring
        ring = Ring(layout)
        self.pin_failure = self._device.pin(ring.memory.ctypes.data, ring.memory.nbytes)
        return number, ring

    def release(self, ring: Ring) -> None:
        with self._sending:
            self._free_rings.append(ring)

    def close(self) -> None:
        """Ends the processes and frees the memory of closed loaders. May be called twice."""
        self.finalizer()
        while self._free_rings:
            self._device.unpin(self._free_rings.pop().memory.ctypes.data)


def _end(connections: list[connection.Connection], children: list[subprocess.Popen[bytes]]) -> None:
    for control in connections:
        control.close()  # which ends the process
    for child in children:
        try:
            child.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


class ProcessPool:
    """The same as `WorkerPool`, on worker processes, with buffers in shared memory; may start again after a stop."""

    def __init__(
        self,
        processes: WorkerProcesses,
        samples: SampleStream,
        spec: LoaderSpec,
        cache: "PixelCache | None",
        num_slots: int,
    ) -> None:
        """num_slots: batches for which there is memory."""
        layout = RingLayout(num_slots, spec.batch_size, spec.image_size, spec.max_boxes, processes.count)
        self._processes, self._samples = processes, samples
        self._number, self.ring = processes.open_stream(self, layout)
        self.ring.clear_counters()
        self._cache, self._group_size = cache, max(1, min(MAX_GROUP_SIZE, spec.batch_size // processes.count))
        self.buffers = [
            HostBatchBuffer(spec.device, spec.batch_size, spec.image_size, spec.max_boxes, slot)
            for slot in self.ring.slots
        ]
        self._slot_numbers = {id(buffer): n for n, buffer in enumerate(self.buffers)}
        self.stopped, self._is_open = True, True
        self._failure: BaseException | None = None
        self._threads = [0] * processes.count
        self._outstanding = [0] * processes.count
        """Samples that each process has and has not loaded yet."""
        self._idle: list[bool] = [True] * processes.count
        """Of the processes that have stopped: whether none of their threads works any more."""
        self._pending: dict[int, BatchTask] = {}
        """Slot → the batch in it."""
        cache_fd, cache_arguments = (None, None) if cache is None else cache.shared
        payload_fd, parts = save_payload(
            {
                "index": samples.index,
                "image_indices": samples.image_indices,
                "spec": dataclasses.replace(spec, device=None),  # type: ignore[arg-type]  # not used there
                "cache": cache_arguments,
            }
        )
        fds = (payload_fd, self.ring.fd, *(() if cache_fd is None else (cache_fd,)))
        try:
            for process in range(processes.count):
                processes.send(process, "open", self._number, layout, parts, len(fds), fds=fds)
        finally:
            os.close(payload_fd)

    def start(self, workers: int) -> None:
        """Takes batches from now on. The pool is stopped, and none of its batches is used any more. The processes try
        an image again that is put into quarantine later; `BatchFinalizer` corrects the result."""
        if not self.is_idle:
            raise StokerError("Worker processes of the loader do not respond.", fix="see whether the disk does")
        self.stopped, self._idle = False, []
        self._threads, self._outstanding = self._threads_per_process(workers), [0] * self._processes.count
        self._pending.clear()
        self.ring.clear_counters()
        for process, count in enumerate(self._threads):
            self._processes.send(process, "start", self._number, count, self._samples.quarantined)

    def _threads_per_process(self, workers: int) -> list[int]:
        count = self._processes.count
        return [max(1, workers // count + (process < workers % count)) for process in range(count)]

    def total(self) -> Counters:
        return self.ring.read_counters()

    def resize(self, workers: int) -> None:
        threads = self._threads_per_process(workers)
        if threads != self._threads and not self.stopped:
            self._threads = threads
            for process, count in enumerate(threads):
                self._processes.send(process, "resize", self._number, count)

    def submit_batch(self, batch_task: BatchTask) -> None:
        """Gives the samples of a batch, whose buffer is one of the stream's, to the processes: a group at a time to the
        one that has the fewest for each of its threads."""
        slot, batch_size = self._slot_numbers[id(batch_task.buffer)], len(batch_task.results)
        self._pending[slot] = batch_task
        for first in range(0, batch_size, self._group_size):
            group = (batch_task.start + first, slot, first, min(self._group_size, batch_size - first))
            load = [n / threads for n, threads in zip(self._outstanding, self._threads, strict=True)]
            process = load.index(min(load))
            self._outstanding[process] += group[-1]
            self._processes.send(process, "load", self._number, *group)

    def collect(self, timeout_s: float = 0.0) -> None:
        """Applies what the processes have reported. Raises what a process could not do, StokerError where one died."""
        self._processes.receive(timeout_s)
        if self._failure is not None:
            raise self._failure

    def wait(self, batch_task: BatchTask) -> None:
        """Returns when a batch is loaded or the pool was stopped. Raises as `collect`."""
        while batch_task.num_missing and not self.stopped:
            self.collect(POLL_INTERVAL_S)
            self.stopped = self.stopped or not self._is_open  # another thread closed it while this one started it

    def apply(self, process: int, report: str, *arguments: Any) -> None:
        if report == "loaded":
            self._apply_group(process, *arguments)
        elif report == "stopped":
            self._idle += arguments
        elif report == "cache_full" and self._cache is not None:
            self._cache.stop_filling(*arguments)
        elif report == "failed":
            [self._failure] = arguments

    def _apply_group(self, process: int, slot: int, first: int, count: int, special: dict[int, Any]) -> None:
        """special: results of its samples that are not simply an image without failures."""
        batch_task = self._pending[slot]
        indices = batch_task.buffer.image_index[first : first + count].tolist()
        batch_task.results[first : first + count] = [SampleResult(image_index, []) for image_index in indices]
        for k, result in special.items():
            batch_task.results[k] = result
        self._outstanding[process] -= count
        batch_task.num_missing -= count
        if not batch_task.num_missing:
            del self._pending[slot]

    def stop(self) -> None:
        """Asks the processes to drop what they have not begun. Does not wait."""
        if not self.stopped:
            self.stopped = True
            for process in range(self._processes.count):
                with contextlib.suppress(StokerError):  # one that has died has stopped, too
                    self._processes.send(process, "stop", self._number)

    def join(self) -> None:
        deadline_s = time.monotonic() + JOIN_TIMEOUT_S
        with contextlib.suppress(StokerError):  # as above
            while len(self._idle) < self._processes.count and self._failure is None and time.monotonic() < deadline_s:
                self._processes.receive(POLL_INTERVAL_S)

    @property
    def is_idle(self) -> bool:
        """Whether no process writes into the stream's memory any more. After `join`."""
        return self._idle == [True] * self._processes.count

    def close(self) -> None:
        """Ends the stream in all processes, after `join`. Its memory is used again where none of them writes to it."""
        if self._is_open:
            self._is_open = False
            for process in range(self._processes.count):
                with contextlib.suppress(StokerError, OSError):  # it has died, or all were closed
                    self._processes.send(process, "close", self._number)
            if self.is_idle:
                self._processes.release(self.ring)


def save_payload(payload: dict[str, Any]) -> tuple[int, list[tuple[int, int]]]:
    """Returns a pickled object in memory that processes can map, its arrays apart, so that they need no copies; and
    (start, end) of each part."""
    buffers: list[pickle.PickleBuffer] = []
    parts: list[Any] = [pickle.dumps(payload, protocol=5, buffer_callback=buffers.append)]
    parts += [buffer.raw() for buffer in buffers]
    places, end = [], 0
    for part in parts:
        start = -(-end // 64) * 64
        end = start + memoryview(part).nbytes
        places.append((start, end))
    fd = create_memory("stoker-index", end)
    for part, (start, end) in zip(parts, places, strict=True):
        view = memoryview(part).cast("B")
        while start < end:  # a call writes 2 GiB at most
            start += os.pwrite(fd, view[len(view) - (end - start) :], start)
    return fd, places
