"""Where the records of a measured loop go, and what the ranks of a job agree on.

Rank 0 makes the folder and writes in it as any run does; the others write `ranks/000N/steps.jsonl` below. Which folder
it is, and which attempt, rank 0 tells them through the store that torch.distributed has anyway, as soon as the process
group exists; until then their windows are kept. So nobody waits, and no collective is issued. The folder must lie on a
storage that all ranks see; a rank that does not see it says so once and goes on without records.
"""

import contextlib
import functools
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from stoker.errors import StokerError, UsageError, writing
from stoker.monitor.monitor import monitoring
from stoker.monitor.options import MonitoringOptions
from stoker.profiling.telemetry.environment import describe_loop
from stoker.runs.records import (
    EVENTS,
    RANKS,
    STEPS,
    RunFolder,
    make_run,
    read_lines,
    recording,
)
from stoker.runs.schemas import Event, StepWindow

RUNS_DIR = Path("runs")
_FIX = 'give another folder: stoker.measure("runs/NAME")'
_MAX_PENDING_WINDOWS = 3600
"""Windows, so an hour at least, that are kept for a folder that is not known yet."""
_JOIN_TIMEOUT_S = 5.0
"""How long a rank looks for the folder at its end."""


def get_rank_and_world_size() -> tuple[int, int]:
    """Of this process: by its process group, else by RANK and WORLD_SIZE, as torchrun sets them; else (0, 1)."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    rank, world_size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(world_size)) if rank.isdigit() and world_size.isdigit() else (0, 1)


class RankRecorder:
    """Writes a run's records. first_step: optimizer steps that a resumed loop has behind it; None: those on record.

    number: how many loops this process has measured before, so that the ranks mean the same one.
    monitor: of rank 0, who is told of what meanwhile.

    Raises UsageError, StorageError when the folder cannot be used, ConfigError where what `monitor` asks for cannot be
    had: of rank 0, at once.
    """

    def __init__(
        self,
        run: Path | None,
        name_prefix: str,
        price_per_device_hour: float | None,
        first_step: int | None,
        loop_index: int,
        monitor: MonitoringOptions,
    ) -> None:
        self.rank, self.world_size = get_rank_and_world_size()
        self.step, self.redo_until_step = first_step or 0, 0
        """Steps behind it, and up to which an earlier attempt has come: those are done again."""
        self.folder: RunFolder | None = None
        self.lock: int | None = None
        self._key = f"stoker/measure/{loop_index}"
        self._published = self.world_size == 1
        self._pending_windows: list[StepWindow] = []
        self._warned = False
        self._stack = contextlib.ExitStack()
        if self.rank == 0:
            monitor.validate()
            folder = self._open(run, name_prefix, price_per_device_hour, first_step)
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
            self._pending_windows = [*self._pending_windows[1 - _MAX_PENDING_WINDOWS :], window]
            return
        window.attempt = self.folder.attempt
        self.folder.append(self._steps_file(), window)

    def event(self, kind: str, text: str, *, step: int | None = None, **data: Any) -> None:
        """An event of this rank; that of another rank than 0 names it."""
        if self.folder is not None:
            rank_data = {} if self.rank == 0 else {"rank": self.rank}
            text = text if self.rank == 0 else f"rank {self.rank}: {text}"
            self.folder.event(kind, text, step=step, **data, **rank_data)

    def write_end(self, error: str | None, *, step: int, exit_code: int) -> None:
        """The last event. error: what ended the loop, in words; None: it came to its end."""
        self._share_run_dir()
        deadline_s = time.monotonic() + _JOIN_TIMEOUT_S
        while (
            self.folder is None
            and error is None
            and time.monotonic() < deadline_s
            and _process_group_store() is not None
        ):
            time.sleep(0.05)
            self._share_run_dir()
        if self.folder is None:
            if self._pending_windows:
                hint = "enter stoker.measure in every rank, around a loop in which torch.distributed is initialised"
                self.warn(f"the time of rank {self.rank} is not recorded, it does not know the run's folder: {hint}")
            return
        if error is None:
            if self.rank == 0:
                self.event("finished", f"{step:,} steps", step=step)
            return
        first = next((event for event in read_lines(self.folder.path, EVENTS, Event) if event.kind == "failed"
                      and event.attempt == self.folder.attempt), None)  # fmt: skip
        if first is None:
            self.event("failed", error, step=step, exit_code=exit_code)
        else:  # what another rank's end brought about is not the cause
            self.event("warning", f"ended after that: {error}", step=step, exit_code=exit_code)

    def warn(self, text: str) -> None:
        """Once: a line for the person and an event; the loop goes on."""
        if not self._warned:
            self._warned = True
            warnings.warn(f"stoker.measure: {text}", RuntimeWarning, stacklevel=3)
            self.event("warning", text)

    def close(self) -> None:
        self._stack.close()

    def abandon(self) -> None:
        """In a process that was forked off: leaves the files to its parent, which alone holds the run then."""
        self.folder = None
        if self.lock is not None:
            devnull = os.open(os.devnull, os.O_RDONLY)
            os.dup2(devnull, self.lock)  # the file object that has this number may close it later
            os.close(devnull)
        self.lock = None

    def _open(
        self, run: Path | None, name_prefix: str, price_per_device_hour: float | None, first_step: int | None
    ) -> RunFolder:
        if run is None:
            with writing("The run's folder cannot be made.", RUNS_DIR, fix=_FIX):
                run = make_run(RUNS_DIR, name_prefix)
        options = {"measured": True, "ranks": self.world_size} | (
            {} if price_per_device_hour is None else {"price_per_device_hour": price_per_device_hour}
        )
        environment = describe_loop(dirs={"run": run})
        try:
            recorder = recording(run, environment, " ".join(environment["argv"]), fix=_FIX, **options)
            self.folder, self.lock = self._stack.enter_context(recorder)
        except UsageError as error:
            if self.world_size == 1 and "Another job" in error.what:
                error.cause = "a second process measures there, or a rank that does not know its number yet"
                error.fix = f"{_FIX}; or enter it after init_process_group"
            raise
        recorded_steps = max((window.step for window in read_lines(run, STEPS, StepWindow)), default=0)
        if first_step is None:
            self.step = recorded_steps
        else:
            self.redo_until_step = recorded_steps
        return self.folder

    def _share_run_dir(self) -> None:
        """Rank 0 tells the others where the records are, the others ask; nothing where it is known or cannot be yet."""
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
            self.warn(f"the time of rank {self.rank} is not recorded, it does not see rank 0's {path}: {hint}")
            return
        (path / self._steps_file()).parent.mkdir(parents=True, exist_ok=True)
        self.folder = RunFolder(path, shared["attempt"])
        self._stack.callback(self.folder.close)
        self.redo_until_step = shared["redo_until"]
        for window in self._pending_windows:
            self.write(window)
        self._pending_windows = []

    def _steps_file(self) -> str:
        return STEPS if self.rank == 0 else f"{RANKS}/{self.rank:04d}/{STEPS}"


def _process_group_store() -> Any:
    """The store of the process group; None while there is none."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def exit_code_for(error: BaseException | None) -> int:
    """What the process will end with, unless somebody catches the error."""
    if isinstance(error, StokerError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return 0 if error is None else 1


def script_name() -> str:
    """The name of the running script or module; "loop" where there is none (a notebook, `python -c`)."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    path = Path(getattr(main, "__file__", None) or "")
    name = path.parent.name if path.stem == "__main__" else path.stem
    if spec is not None:
        name = spec.name.removesuffix(".__main__").rpartition(".")[2]
    return "".join(c if c.isalnum() or c in "._" else "_" for c in name) or "loop"
