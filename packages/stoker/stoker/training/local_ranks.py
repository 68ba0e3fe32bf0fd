"""Starts the ranks of `stoker train --devices N` on this machine, and ends as they end. No torch.

The ranks are processes of `cli/rank_process.py`, which find their place in the variables of torchrun, too. torchrun
itself is not used: it always exits with 1, its restarts inside a job fail, and killed it leaves its workers behind.
With several machines the user's launcher starts one of this, or one rank per device, on each (`cluster.py`).

A signal is forwarded once to every rank; they agree on the step at which they stop. After the first rank that failed,
the others are ended; its error and exit code are the job's. Ranks are told by the end of a pipe that this process has
gone, also after SIGKILL: none is left behind.
"""

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import msgspec

from stoker.training.cluster import RankPlace, find_place
from stoker.training.ranks import REPORTS_VARIABLE, RankFailure, first_failure, read_reports, write_report
from stoker.training.supervisor import handling_signals
from stoker_watch.errors import ConfigError, Preempted, RankError, StokerError
from stoker_watch.monitor.options import MonitoringOptions
from stoker_watch.runs.evaluation import Metrics
from stoker_watch.storage.local_files import temporary_folder

RESULT, ERROR_OUTPUT = "result.json", "rank-{}.log"
END_GRACE_S = 8.0
"""How long the other ranks may take to end after one has failed; then they are killed."""
MAX_OUTPUT_LINES = 12
"""Lines of the output of a rank that ended without a report, for the error."""
_POLL_S = 0.05
_FORWARDED = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")


class TrainOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a command says of a training besides its settings."""

    run_dir: str | None = None
    """Folder or URI of the run."""
    resume: str | None = None
    """An unfinished run to continue, with its own settings."""
    accept_changed_data: bool = False
    """Continue a run also if its data set changed."""
    trace: bool = False
    """Keep Chrome traces of some steps."""
    log_format: Literal["text", "json"] = "text"
    """json writes JSON lines to stdout and text to stderr."""
    monitor: MonitoringOptions = MonitoringOptions()
    verbose: bool = False


class RankRequest(msgspec.Struct, kw_only=True):
    """The arguments of `run.train`, on the standard input of a rank. settings: those that the user set, by name."""

    settings: dict[str, Any]
    options: TrainOptions = TrainOptions()


@dataclasses.dataclass(frozen=True)
class Result:
    """What a finished training returns. run: its folder; metrics: of the final weights, on the validation split."""

    run: Path
    steps: int
    metrics: Metrics

    def write(self, folder: Path) -> None:
        """Leaves it for the process that started the ranks."""
        (folder / RESULT).write_bytes(msgspec.json.encode(self, enc_hook=str))


def must_start_ranks(devices: int | None) -> bool:
    """Whether this process starts ranks: `--devices` is several, and it is not one of them already. Raises ConfigError
    if the number does not fit the job that this process is a rank of."""
    if devices is None:
        return False
    if devices < 1 or devices % 1:
        raise ConfigError(f"--devices {devices} is out of range.", choices=["1 or more"])
    place = find_place()
    if place is None or place.local_world_size == 1:  # alone, or the only process on one of several machines
        return devices > 1
    if devices not in (place.world_size, place.local_world_size):
        raise ConfigError(
            f"--devices {devices} does not fit: {place.source} has started {place.local_world_size} ranks here, "
            f"{place.world_size} in total.",
            fix="leave out --devices: the launcher decides",
        )
    return False


def run_ranks(devices: int, request: RankRequest) -> Result:
    """Trains on so many devices of this machine, each in a process of its own. Raises the error that ended the job."""
    with temporary_folder("stoker-ranks-", Path(tempfile.gettempdir())) as folder:
        starter = _Starter(devices, request, folder)
        with handling_signals(_FORWARDED, starter.forward), contextlib.ExitStack() as stack:
            stack.callback(starter.kill)
            starter.start()
            starter.wait()
        return starter.read_result()


class _Starter:
    """The processes of the ranks of this machine. reports: a folder for what they leave."""

    def __init__(self, devices: int, request: RankRequest, reports: Path) -> None:
        self._request, self._reports = request, reports
        self._processes: list[subprocess.Popen[bytes]] = []
        self._places = make_places(devices)
        self._signals: list[int] = []
        """Signals that were forwarded."""

    def start(self) -> None:
        data = msgspec.json.encode(self._request) + b"\n"
        for place in self._places:
            with (self._reports / ERROR_OUTPUT.format(place.rank)).open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", "stoker.cli.rank_process"],
                    stdin=subprocess.PIPE,
                    stdout=None if place.rank == 0 else log,
                    stderr=None if place.rank == 0 else subprocess.STDOUT,
                    env={**os.environ, **place.variables(), REPORTS_VARIABLE: str(self._reports)},
                    start_new_session=True,  # Ctrl-C reaches this process only, which forwards it once
                )
            self._processes.append(process)
            for signum in self._signals:
                process.send_signal(signum)
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended already
                process.stdin.write(data)
                process.stdin.flush()  # left open: its end tells the rank that this process has gone

    def forward(self, signum: int, _: FrameType | None) -> None:
        self._signals.append(signum)
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signum)

    def wait(self) -> None:
        """Returns when all have ended. After the first failure, the others are ended too."""
        failed_s: float | None = None
        while True:
            codes = [process.poll() for process in self._processes]
            if None not in codes:
                return
            if failed_s is None and any(map(self._is_failure, codes)):
                failed_s = time.monotonic()
                self._report_death(codes)
            if failed_s is not None and time.monotonic() - failed_s > END_GRACE_S:
                self.kill()
            time.sleep(_POLL_S)

    def _is_failure(self, code: int | None) -> bool:
        """Whether a rank failed; an end by a signal that was forwarded while it started is no failure."""
        return code not in (None, 0, Preempted.exit_code, *(-signum for signum in self._signals))

    def _report_death(self, codes: list[int | None]) -> None:
        """Reports a rank that ended without a word, in its name: the others, which only lose the connection, wait for
        the reason."""
        reported = {failure.rank for failure in read_reports(self._reports)}
        for place, code in zip(self._places, codes, strict=True):
            if code is not None and self._is_failure(code) and place.rank not in reported:
                write_report(RankFailure.of(place.rank, self._make_killed_error(place.rank, code)), str(self._reports))

    def kill(self) -> None:
        """Kills the ranks that still run, with all that they started."""
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for process in self._processes:
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()

    def read_result(self) -> Result:
        """The result that rank 0 left. Raises the error of the rank that ended first."""
        codes, path = [process.returncode for process in self._processes], self._reports / RESULT
        if 130 in codes:
            raise KeyboardInterrupt("a second time; earlier checkpoints are in the run")
        if not any(codes) and path.exists():
            return msgspec.json.decode(path.read_bytes(), type=Result, dec_hook=lambda kind, text: kind(text))
        if (failure := first_failure(read_reports(self._reports))) is not None:
            raise failure.as_error()
        if any(codes):
            raise Preempted("The training was stopped.", fix="the same command continues what is saved")
        raise RankError("The ranks ended without a result.", fix="the run folder has the records")

    def _make_killed_error(self, rank: int, code: int) -> StokerError:
        output = (self._reports / ERROR_OUTPUT.format(rank)).read_text(errors="replace")
        cause = "\n".join(output.splitlines()[-MAX_OUTPUT_LINES:]) or None
        if code >= 0:
            return RankError(f"Rank {rank} ended with exit code {code}.", cause=cause)
        name = signal.Signals(-code).name
        fix = "the same command continues from the last checkpoint"
        if name == "SIGKILL":
            fix += "; `dmesg` says whether the kernel was out of memory"
        return RankError(f"Rank {rank} was killed by {name}.", cause=cause, fix=fix)


def make_places(devices: int) -> list[RankPlace]:
    """The places of the ranks of this machine, which is one of several where the environment says so."""
    machine = find_place()
    host, port = ("127.0.0.1", find_free_port()) if machine is None else (machine.host, machine.port)
    first, machines = (0, 1) if machine is None else (machine.rank * devices, machine.world_size)
    return [
        RankPlace(
            rank=first + number, world_size=devices * machines, local_rank=number, local_world_size=devices,
            host=host, port=port, source="stoker",
        )
        for number in range(devices)
    ]  # fmt: skip


def find_free_port() -> int:
    """A port of this machine on which nothing listens now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
