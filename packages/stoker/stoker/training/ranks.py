"""What the ranks of a training tell each other: decisions of rank 0, results, records, and why one of them ended.

A training on several devices is one process per device: a rank. They meet in a process group of torch.distributed (gloo
between hosts, NCCL between GPUs). Rank 0 decides and writes; the others follow. `Ranks` alone is a training of one
process: nothing is exchanged, and torch.distributed is not imported. Gradients are exchanged in `several.py`, which
process is which rank says `cluster.py`, who is alive `heartbeats.py`.

An error that only one rank meets is published in the store of the group. The others, whose next exchange fails as that
rank has gone, raise it in its name (`RankError`), so that the user sees the first exception and not the last one. For
the process that started the ranks (`local_ranks.py`) it is a file (`RankFailure`).

The store and the exchanges have no passwords, as torch has none. Ranks of one machine listen on its loopback interface
only; between machines it must be a network of trusted users (docs/devices.md).
"""

import contextlib
import datetime
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from stoker.training.cluster import MEET_TIMEOUT_S, Devices, RankPlace, meet
from stoker.training.heartbeats import CALL_TIMEOUT_S, DONE, FAILURE, POLL_S, Heartbeats, call_within
from stoker_watch import errors
from stoker_watch.errors import ConfigError, Preempted, RankError, StokerError, system_limit
from stoker_watch.hardware.cgroup import CORES_VARIABLE, host_cores
from stoker_watch.storage.local_files import write_atomic

Result = TypeVar("Result")

START_TIMEOUT_S, EXCHANGE_TIMEOUT_S = 3600.0, 1200.0
"""An exchange fails after this time, until the first step and from there on. Rank 0 may be busy for long while the
others wait, with a data set in a bucket or metrics. A rank that has ended is noticed at once, by its connections; one
that is frozen by `watchdog.py`."""
FAILURE_WAIT_S = 5.0
"""How long a rank whose exchange failed waits for the reason of the rank that has gone."""
LATE_S = 20.0
"""How long rank 0 of a finished run waits for machines that do not see its folder, and are told by it."""
END_TIMEOUT_S = 1800.0
"""How long a finished rank waits for rank 0, which still writes, or uploads to a bucket."""
REPORTS_VARIABLE = "STOKER_RANK_REPORTS"
"""Folder in which the ranks that one `stoker train` started leave their failures, and rank 0 the result."""
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
"""The interface of a machine that no other machine reaches."""
ERRORS = {
    kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, StokerError)
}
_COMMUNICATION_WORDS = ("gloo", "NCCL", "Connection", "connection", "Socket", "socket", "Broken pipe", "store")


class RankFailure(msgspec.Struct, kw_only=True):
    """The error that ended a rank. t: Unix time, seconds; is_consequence: another rank had ended before; trace: of a
    bug; error: the class of a StokerError in `errors.py`, empty for other errors; arguments: the error's."""

    rank: int
    t: float
    text: str
    exit_code: int
    is_consequence: bool = False
    trace: str = ""
    error: str = ""
    arguments: dict[str, str | list[str] | None] = {}

    @classmethod
    def of(cls, rank: int, error: BaseException, *, is_consequence: bool = False) -> "RankFailure":
        own = cls(rank=rank, t=time.time(), text=_encodable(str(error)), exit_code=1, is_consequence=is_consequence)
        if not isinstance(error, StokerError):
            own.text = f"{type(error).__name__}: {own.text}"
            own.trace = _encodable("".join(traceback.format_exception(error)))
            return own
        own.error = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
        own.exit_code, own.arguments = error.exit_code, {"choices": [_encodable(choice) for choice in error.choices]}
        for name in ("what", "location", "cause", "fix"):
            text = getattr(error, name)
            own.arguments[name] = None if text is None else _encodable(text)
        return own

    def as_error(self) -> StokerError:
        """The error, in the name of its rank where that is not rank 0."""
        if not self.error:
            cause = self.trace.rstrip() or self.text
            return RankError(f"Rank {self.rank} ended with an error, which is a bug in stoker.", cause=cause)
        named: dict[str, Any] = dict(self.arguments)
        what = str(named.pop("what", self.text))
        if self.rank and not what.startswith("Rank "):
            what = f"Rank {self.rank}: {what}"
        return ERRORS.get(self.error, RankError)(what, **named)


def _encodable(text: str) -> str:
    """Escapes what is no UTF-8: bytes in the names of files, which Python keeps as lone surrogates."""
    return text.encode(errors="backslashreplace").decode()


def write_report(failure: RankFailure, folder: str | None = None) -> None:
    """Leaves the failure for the process that started this rank, if `stoker train --devices` did."""
    folder = os.environ.get(REPORTS_VARIABLE) if folder is None else folder
    if folder:
        write_atomic(Path(folder, f"failure-{failure.rank}.json"), msgspec.json.encode(failure), durable=False)


def read_reports(folder: Path) -> list[RankFailure]:
    return [msgspec.json.decode(path.read_bytes(), type=RankFailure) for path in folder.glob("failure-*.json")]


def first_failure(failures: Iterable[RankFailure]) -> RankFailure | None:
    """The one that ended the job: the earliest that is not the consequence of another; of an error that all ranks
    raise, and where all were stopped, that of rank 0."""

    def is_stopped(failure: RankFailure) -> bool:
        return failure.exit_code == Preempted.exit_code

    ordered = sorted(failures, key=lambda failure: (failure.is_consequence, is_stopped(failure), failure.t))
    if not ordered:
        return None
    first = ordered[0]
    same = [other for other in ordered if other.text == first.text or (is_stopped(first) and is_stopped(other))]
    return min(same, key=lambda failure: failure.rank)


class Ranks:
    """This rank among those of the training; by default alone. Every method is called by all ranks, in the same order,
    unless it says otherwise."""

    def __init__(self, place: RankPlace | None = None) -> None:
        self.place = place
        self.rank, self.world_size = (0, 1) if place is None else (place.rank, place.world_size)
        self.local_rank, self.local_world_size = (0, 1) if place is None else (place.local_rank, place.local_world_size)
        self._store: Any = None
        self.host_group: Any = None
        """The process group for tensors of the host; None: the group of all."""
        self.heartbeats: Heartbeats | None = None
        """Heartbeats of a rank that is connected."""
        self._explained: BaseException | None = None
        self._told: BaseException | None = None
        """The error of another rank that this one has raised, too."""
        self._num_posted = 0
        self._num_collected: dict[int, int] = {}
        self._post_lock = threading.Lock()
        self._vote: tuple[Any, Any] | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which decides and writes."""
        return self.rank == 0

    def devices(self) -> Devices:
        """How many devices train, for the defaults."""
        return Devices(self.world_size, self.local_world_size)

    @property
    def alone(self) -> bool:
        return self.world_size == 1

    def connect(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Waits for the other ranks. Raises RankError if they do not come, or if the address cannot be used."""
        place = self.place
        if place is None:
            return
        import torch
        import torch.distributed as dist

        os.environ.update(place.variables())
        divide_cores(place)
        has_gpu = torch.cuda.is_available()
        if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ:  # the old name, of which torch 2.15 warns
            os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # for `collective_trace`, as in torch's tutorial
        timeout, store = datetime.timedelta(seconds=timeout_s), None
        try:
            if place.is_one_machine:
                for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                    os.environ.setdefault(variable, LOOPBACK)
                if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # else torchrun has one
                    listener = socket.create_server(("127.0.0.1", place.port)).detach() if self.is_main else None
                    store = dist.TCPStore(  # type: ignore[attr-defined]
                        "127.0.0.1", place.port, self.world_size, self.is_main, timeout, master_listen_fd=listener
                    )
            else:
                store = meet(place, timeout_s=min(timeout_s, MEET_TIMEOUT_S))
            backend = "cpu:gloo,cuda:nccl" if has_gpu else "gloo"
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size, timeout=timeout)
            self.host_group = dist.new_group(backend="gloo", timeout=timeout) if has_gpu else None
            self._store = dist.distributed_c10d._get_default_store()
            heartbeats = Heartbeats(self._store, self.rank, self.world_size)
            self.barrier()  # all have written
        except (RuntimeError, ValueError, OSError) as error:
            if (limit := system_limit(error)) is not None:
                raise limit from error
            raise RankError(
                f"Rank {self.rank} of {self.world_size} cannot reach the others.",
                location=f"{place.host}:{place.port}, where rank 0 listens ({place.source})",
                cause=str(error).partition("\n")[0],
                fix="check that all ranks are started, that the name resolves, and that the port is open",
            ) from error
        heartbeats.start()
        self.heartbeats = heartbeats

    def limit_exchanges(self) -> None:
        """From here on, an exchange fails after EXCHANGE_TIMEOUT_S."""
        if self.alone:
            return
        import torch.distributed as dist

        set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # torch 2.11
        for group in {None, self.host_group}:
            set_timeout(datetime.timedelta(seconds=EXCHANGE_TIMEOUT_S), group)

    def share(self, work: Callable[[], Result]) -> Result:
        """Rank 0 does the work; its result, or its error, is that of all ranks."""
        if self.alone:
            return work()
        import torch.distributed as dist

        result, error = _attempt(work) if self.is_main else (None, None)
        values: list[Any] = [result, self._encode(error)]
        dist.broadcast_object_list(values, src=0, group=self.host_group)
        self._raise_first(error, values[1:])
        shared: Result = values[0]
        return shared

    def locally_first(self, work: Callable[[], Result]) -> Result:
        """The first rank of each machine does the work, then the others of the machine, which find what it left on the
        disk. An error of one rank is raised by all."""
        if self.alone:
            return work()
        result, error = None, None
        for turn in (True, False):
            if (self.local_rank == 0) == turn:
                result, error = _attempt(work)
            self._raise_first(error, self.gather_all(self._encode(error)))
        found: Result = result  # type: ignore[assignment]  # each rank had its turn
        return found

    def _encode(self, error: Exception | None) -> bytes | None:
        return None if error is None else msgspec.json.encode(RankFailure.of(self.rank, error))

    def _raise_first(self, own: Exception | None, told: list[bytes | None]) -> None:
        """Raises the error of this rank, else the first that the ranks told."""
        if own is not None:
            raise own
        for message in told:
            if message is not None:
                self._told = msgspec.json.decode(message, type=RankFailure).as_error()
                raise self._told

    def gather(self, value: Result) -> list[Result] | None:
        """The values of all ranks, in rank 0; None in the others."""
        if self.alone:
            return [value]
        import torch.distributed as dist

        values: list[Any] | None = [None] * self.world_size if self.is_main else None
        dist.gather_object(value, values, dst=0, group=self.host_group)
        return values

    def gather_all(self, value: Result) -> list[Result]:
        """The values of all ranks, in all of them."""
        values: list[Result] = self.share_value(self.gather(value))
        return values

    def share_value(self, value: Any) -> Any:
        return self.share(lambda: value)

    def share_tensors(self, tree: Any) -> Any:
        """A tree of rank 0, in the other ranks with tensors on the host. They go one by one, as memory may be short."""
        import torch
        import torch.distributed as dist

        from stoker.training.checkpoint import list_tensors, map_tensors, shape_of

        shapes = self.share_value(map_tensors(tree, shape_of) if self.is_main else None)
        if not self.is_main:
            tree = map_tensors(shapes, lambda like: torch.empty_like(like, device="cpu"))
        for tensor in list_tensors(tree):
            dist.broadcast(tensor.detach().cpu().contiguous(), src=0, group=self.host_group)
        return tree

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any rank."""
        if self.alone:
            return flag
        self.begin_vote(flag)
        return self.end_vote()

    def begin_vote(self, flag: bool) -> None:
        """Asks whether the flag is set in any rank; `end_vote` has the answer. The ranks go on meanwhile."""
        import torch
        import torch.distributed as dist

        votes = torch.tensor([int(flag)])
        self._vote = votes, dist.all_reduce(votes, dist.ReduceOp.MAX, group=self.host_group, async_op=True)

    def end_vote(self) -> bool:
        """The answer to the last `begin_vote`; False if there was none."""
        if self._vote is None:
            return False
        (votes, work), self._vote = self._vote, None
        work.wait()
        return bool(votes[0])

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        self.any(False)

    def post(self, message: bytes) -> None:
        """Leaves a message for rank 0. Not in rank 0; from any thread, at any time."""
        with self._post_lock:
            self._store.set(f"stoker/post/{self.rank}/{self._num_posted}", message)
            self._num_posted += 1

    def collect(self) -> Iterator[tuple[int, bytes]]:
        """(rank, message) of what the others have posted. In rank 0 only, at any time."""
        for rank in range(1, self.world_size):
            number = self._num_collected.get(rank, 0)
            while self._store.check([key := f"stoker/post/{rank}/{number}"]):
                message: bytes = self._store.get(key)
                self._store.delete_key(key)
                number += 1
                self._num_collected[rank] = number
                yield rank, message

    def failure_elsewhere(self) -> RankFailure | None:
        """Why another rank has failed, or that the store is gone. From any thread, at any time."""
        failure, lost = self._await_failure(0.0), self._lost_store()
        return RankFailure.of(self.rank, lost, is_consequence=True) if failure is None and lost is not None else failure

    def _lost_store(self) -> RankError | None:
        if self.heartbeats is None or not self.heartbeats.lost or self.place is None:
            return None
        return RankError(
            f"Rank {self.rank} lost the store of the job.",
            location=f"{self.place.host}:{self.place.port}",
            cause=self.heartbeats.lost,
            fix="the process that had it has ended (rank 0, or torchrun): look at the end of its output, and at "
            "`dmesg` of its machine; the same command continues from the last checkpoint",
        )

    def collective_trace(self) -> bytes | None:
        """The last collectives of this rank with their stacks, as NCCL's flight recorder pickles them; None without
        NCCL. From any thread."""
        if self.host_group is None:
            return None
        import torch

        dump: Callable[[], bytes] | None = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
        return None if dump is None else dump()

    def device_name(self, name: str | None) -> str | None:
        """The device of this rank, where all ranks are asked for the device `name`. Raises ConfigError for one of
        several devices of a machine."""
        if self.alone or name == "cpu":
            return name
        import torch

        kind, _, number = (name or "").partition(":")
        if not kind:
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            if accelerator is None or accelerator.type != "cuda":
                return None
            kind = accelerator.type
        if number not in ("", "0"):
            raise ConfigError(
                f"--device {name} is one device, and the training has {self.world_size} ranks.",
                fix=f"--device {kind}; CUDA_VISIBLE_DEVICES chooses among the devices of a machine",
            )
        count = torch.accelerator.device_count() if kind == "cuda" else 1
        shows_own = count == 1 and self.place is not None and self.place.source == "Slurm"
        if self.local_world_size > count and not shows_own:
            raise ConfigError(
                f"{self.local_world_size} ranks on {socket.gethostname()}, where torch finds {count} of {kind}.",
                fix=f"--devices {count}, or --nproc-per-node {count} for torchrun",
            )
        return f"{kind}:{0 if shows_own else self.local_rank}"

    def explain(self, error: BaseException) -> BaseException:
        """The error that ended this rank; that of another rank, if this one is its consequence. Publishes it."""
        if self.alone or error is self._explained:
            return error
        explained, is_consequence = error, error is self._told
        if not isinstance(error, StokerError | KeyboardInterrupt | SystemExit):
            failure = self._await_failure(FAILURE_WAIT_S if _is_communication(error) else 0.0)
            if failure is not None:
                explained, is_consequence = failure.as_error(), True
            elif _is_communication(error):
                is_consequence = True
                explained = self._lost_store() or RankError(
                    f"Rank {self.rank} lost the connection to another rank.",
                    cause=str(error).partition("\n")[0],
                    fix="the rank that ended first says why; if it was killed, look for the kernel's out-of-memory "
                    "messages on its machine (`dmesg`)",
                )
        self._explained = explained
        if not isinstance(explained, Preempted):
            self.publish(explained, is_consequence=is_consequence)
        return explained

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Raises the errors of the block as `explain` has them."""
        try:
            yield
        except BaseException as error:
            explained = self.explain(error)
            if explained is error:
                raise
            raise explained from error

    def close(self, *, orderly: bool) -> None:
        """Leaves the group. orderly: all ranks end in this way, so the others wait until rank 0 has written all. Raises
        HungError if rank 0 is frozen."""
        if self.heartbeats is None:
            return
        import torch.distributed as dist

        if orderly:
            with contextlib.suppress(RuntimeError):  # rank 0, which has the store, was killed
                self._end_together(self.heartbeats)
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
        # Else a pending exchange could hang in its end: the process is about to end, and with it its connections.

    def _end_together(self, heartbeats: Heartbeats) -> None:
        seen = "stoker/seen"
        heartbeats.hurry()
        if self.is_main:
            self._store.set(DONE, b"1")
            end_s = time.monotonic() + FAILURE_WAIT_S
            while self._store.add(seen, 0) < self.world_size - 1 and time.monotonic() < end_s:
                time.sleep(POLL_S)
            heartbeats.stop()
            return
        end_s = time.monotonic() + END_TIMEOUT_S
        while DONE not in heartbeats.published and not heartbeats.lost and time.monotonic() < end_s:
            time.sleep(POLL_S)
            heartbeats.tick(POLL_S)
            if error := heartbeats.frozen(heartbeats.limit_s):
                raise error
        heartbeats.stop()
        self._store.add(seen, 1)

    def publish(self, error: BaseException, *, is_consequence: bool) -> None:
        """Tells the error of this rank to the others, and to the process that started it. From any thread."""
        failure = RankFailure.of(self.rank, error, is_consequence=is_consequence)
        with contextlib.suppress(OSError):  # then the process that started this one knows its exit code only
            write_report(failure)
        if self._store is not None and not is_consequence:
            text = msgspec.json.encode(failure).decode()
            call_within(CALL_TIMEOUT_S, self._store.compare_set, FAILURE, "", text)

    def _await_failure(self, timeout_s: float) -> RankFailure | None:
        """The failure of another rank, awaited for so long."""
        heartbeats, end_s = self.heartbeats, time.monotonic() + timeout_s
        if heartbeats is None:
            return None
        if timeout_s:
            heartbeats.hurry()
        while FAILURE not in heartbeats.published:
            folder = os.environ.get(REPORTS_VARIABLE) if timeout_s else None  # the watchdog asks each second
            reports = read_reports(Path(folder)) if folder else []
            reported = first_failure(failure for failure in reports if not failure.is_consequence)
            if reported is not None and reported.rank != self.rank:
                return reported
            if heartbeats.lost or time.monotonic() >= end_s:
                return None
            time.sleep(POLL_S)
        failure = msgspec.json.decode(heartbeats.published[FAILURE], type=RankFailure)
        return None if failure.rank == self.rank else failure


def divide_cores(place: RankPlace) -> None:
    """Makes this process use its part of the cores of its machine. Slurm has given each task its own already. By their
    number, not by affinity: in a container with a CPU quota all jobs of the machine would take the same first cores."""
    import torch

    if place.source != "Slurm" and CORES_VARIABLE not in os.environ:
        os.environ[CORES_VARIABLE] = str(max(1, host_cores() // place.local_world_size))
    torch.set_num_threads(host_cores())


def _attempt(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001  # all ranks raise it
        return None, error


def _is_communication(error: BaseException) -> bool:
    return isinstance(error, RuntimeError | OSError) and any(word in str(error) for word in _COMMUNICATION_WORDS)


@contextlib.contextmanager
def joined(place: RankPlace | None, finished: StokerError | None = None) -> Iterator[Ranks]:
    """The ranks of this job, connected inside the block; alone without a place. The error of a rank is published, and
    raised by the others. After a block without an error, and after `Preempted`, a rank waits until rank 0 has left its
    block, too. finished: why nothing is left to do; raised at once, by rank 0 after it has waited LATE_S for others."""
    ranks = Ranks(place)
    if finished is not None and not ranks.is_main:
        raise finished
    try:
        with ranks.explaining():
            try:
                ranks.connect(START_TIMEOUT_S if finished is None else LATE_S)
            except RankError:
                if finished is None:
                    raise
                raise finished from None
            yield ranks
    except BaseException as error:
        ranks.close(orderly=isinstance(error, Preempted))
        raise
    ranks.close(orderly=True)
