"""Writes the records of a measured loop, and shares the run folder between the ranks of a job.

Rank 0 creates the folder and writes to it like any run; the other ranks write `ranks/000N/steps.jsonl` in it. Rank 0
publishes the folder in the store of torch.distributed, as soon as the process group exists; until then the other ranks
keep their windows. So no rank waits. A rank that does not see the folder warns once and goes on without records.
"""

import contextlib
import functools
import json
import os
import re
import signal
import sys
import time
import traceback
import warnings
from collections import deque
from pathlib import Path
from typing import Any

from stoker_watch.errors import StokerError, writing
from stoker_watch.monitor.monitor import monitoring
from stoker_watch.monitor.options import MonitoringOptions
from stoker_watch.recording.telemetry.environment import describe_loop
from stoker_watch.runs.records import EVENTS, RANKS, STEPS, RunFolder, make_run, read_lines, recording
from stoker_watch.runs.schemas import Event, StepWindow

RUNS_DIR = Path("runs")
_FIX = 'give another folder: stoker_watch.measure("runs/NAME"); of several ranks, enter it after init_process_group'
_MAX_PENDING_WINDOWS = 3600
"""Windows that are kept while the folder is not known: at least an hour."""
_MAX_TRACEBACK_LINES = 100
_JOIN_TIMEOUT_S = 5.0
"""How long a rank waits for the folder at its end."""


def get_rank_and_world_size() -> tuple[int, int]:
    """Asks the process group of this process, else RANK and WORLD_SIZE (set by torchrun); else (0, 1)."""
    if (dist := _distributed()) is not None:
        return dist.get_rank(), dist.get_world_size()
    rank, world_size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    is_known = all(re.fullmatch("[0-9]{1,7}", text) for text in (rank, world_size))
    return (int(rank), int(world_size)) if is_known else (0, 1)


class RankRecorder:
    """Writes the records of one rank.

    first_step: optimizer steps done before a resume; None: the number on record. loop_index: how many loops this
    process has measured before, so that all ranks use the same key. monitor: alerts and metrics, of rank 0. There,
    raises UsageError and StorageError if the folder cannot be used, ConfigError if `monitor` is not valid.
    """

    def __init__(
        self, run: Path | None, name: str | None, price_per_device_hour: float | None, first_step: int | None,
        monitor: MonitoringOptions, loop_index: int,
    ) -> None:  # fmt: skip
        self.rank, self.world_size = get_rank_and_world_size()
        self.step, self.redo_until_step = first_step or 0, 0
        """Steps done so far, and the last step of an earlier attempt: steps up to it are done again."""
        self.folder: RunFolder | None = None
        self.lock: int | None = None
        self._key = f"stoker/measure/{loop_index}"
        self._published = self.world_size == 1
        self._pending_windows: deque[StepWindow] = deque(maxlen=_MAX_PENDING_WINDOWS)
        self._warned = False
        self._stack = contextlib.ExitStack()
        if self.rank == 0:
            monitor.validate()
            folder = self._open(run, name or _script_name(), price_per_device_hour, first_step)
            stop = functools.partial(os.kill, os.getpid(), signal.SIGTERM)
            try:
                self._stack.enter_context(monitoring(folder, monitor, stop=stop))
            except BaseException:
                self._stack.close()
                raise

    @property
    def path(self) -> Path | None:
        return None if self.folder is None else self.folder.path

    def write(self, window: StepWindow) -> None:
        self._share_run_dir()
        if self.folder is None:
            self._pending_windows.append(window)
            return
        window.attempt = self.folder.attempt
        self.folder.append(self._steps_file(), window)

    def event(self, kind: str, text: str, *, step: int | None = None, **data: Any) -> None:
        """An event of this rank; ranks other than 0 are named in it."""
        if self.folder is not None:
            rank_data = {} if self.rank == 0 else {"rank": self.rank}
            text = text if self.rank == 0 else f"rank {self.rank}: {text}"
            self.folder.event(kind, text, step=step, **data, **rank_data)

    def write_end(self, error: BaseException | None, *, step: int, exit_code: int) -> None:
        """The last event. error: the exception that ended the loop; None: it finished."""
        self._share_run_dir()
        deadline_s = time.monotonic() + _JOIN_TIMEOUT_S
        while self.folder is None and error is None and time.monotonic() < deadline_s and _process_group_store():
            time.sleep(0.05)
            self._share_run_dir()
        if self.folder is None:
            if self._pending_windows:
                hint = "enter measure in every rank, around a loop in which torch.distributed is initialized"
                self.warn(f"the time of rank {self.rank} is not recorded, it does not know the run folder: {hint}")
            return
        if error is None:
            if self.rank == 0:
                self.event("finished", f"{step:,} steps", step=step)
            return
        text = f"{type(error).__name__}: {error}"
        events = read_lines(self.folder.path, EVENTS, Event)
        if any(event.kind == "failed" and event.attempt == self.folder.attempt for event in events):
            # another rank failed first; this failure is its consequence
            self.event("warning", f"ended after that: {text}", step=step, exit_code=exit_code)
        else:
            lines = [line for part in traceback.format_exception(error) for line in part.splitlines()]
            self.event("failed", text, step=step, exit_code=exit_code, traceback=lines[-_MAX_TRACEBACK_LINES:])

    def warn(self, text: str) -> None:
        """Warns the user and writes an event, once; the loop goes on."""
        if not self._warned:
            self._warned = True
            warnings.warn(f"stoker_watch.measure: {text}", RuntimeWarning, stacklevel=3)
            self.event("warning", text)

    def close(self) -> None:
        self._stack.close()

    def abandon(self) -> None:
        """In a forked process: leaves the files and the lock to the parent."""
        self.folder = None
        if self.lock is not None:
            devnull = os.open(os.devnull, os.O_RDONLY)
            os.dup2(devnull, self.lock)  # a file object may close this descriptor later
            os.close(devnull)
        self.lock = None

    def _open(
        self, run: Path | None, name: str, price_per_device_hour: float | None, first_step: int | None
    ) -> RunFolder:
        if run is None:
            with writing("The run folder cannot be created.", RUNS_DIR, fix=_FIX):
                run = make_run(RUNS_DIR, name)
        options: dict[str, Any] = {"measured": True, "ranks": self.world_size}
        if price_per_device_hour is not None:
            options["price_per_device_hour"] = price_per_device_hour
        environment = describe_loop(dirs={"run": run})
        recorder = recording(run, environment, " ".join(environment["argv"]), fix=_FIX, **options)
        self.folder, self.lock = self._stack.enter_context(recorder)
        recorded_steps = max((window.step for window in read_lines(run, STEPS, StepWindow)), default=0)
        if first_step is None:
            self.step = recorded_steps
        else:
            self.redo_until_step = recorded_steps
        return self.folder

    def _share_run_dir(self) -> None:
        """Rank 0 publishes the run folder, the others look it up. Does nothing if that is done or not possible yet."""
        if self._published or (store := _process_group_store()) is None:
            return
        if self.folder is not None:
            path = str(self.folder.path.absolute())
            shared = {"path": path, "attempt": self.folder.attempt, "redo_until": self.redo_until_step}
            store.set(self._key, json.dumps(shared))
            self._published = True
        elif store.check([self._key]):
            self._published = True
            self._join(json.loads(store.get(self._key)))

    def _join(self, shared: dict[str, Any]) -> None:
        path = Path(shared["path"])
        if not path.exists():
            hint = "name a folder on a storage that all ranks share"
            self.warn(f"the time of rank {self.rank} is not recorded, it does not see {path} of rank 0: {hint}")
            return
        (path / self._steps_file()).parent.mkdir(parents=True, exist_ok=True)
        self.folder = RunFolder(path, shared["attempt"])
        self._stack.callback(self.folder.close)
        self.redo_until_step = shared["redo_until"]
        while self._pending_windows:
            self.write(self._pending_windows.popleft())

    def _steps_file(self) -> str:
        return STEPS if self.rank == 0 else f"{RANKS}/{self.rank:04d}/{STEPS}"


def _distributed() -> Any:
    """The module torch.distributed; None: this process is in no group."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def _process_group_store() -> Any:
    """None if there is no group."""
    module = sys.modules["torch.distributed.distributed_c10d"] if _distributed() is not None else None
    return None if module is None else module._get_default_store()


def exit_code_for(error: BaseException | None) -> int:
    """The exit code of the process if the error is not caught."""
    if isinstance(error, StokerError):
        return error.exit_code
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return 0 if error is None else 130 if isinstance(error, KeyboardInterrupt) else 1


def _script_name() -> str:
    """The name of the running script or module; "loop" if there is none (a notebook, `python -c`)."""
    path = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "")
    name = path.parent.name if path.stem == "__main__" else path.stem
    return "".join(c if c.isalnum() or c in "._" else "_" for c in name) or "loop"
