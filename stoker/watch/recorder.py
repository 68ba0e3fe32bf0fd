"""The records of a watched job: an ordinary run folder, from what driver, kernel and the job's output say (tier 0).

A thread follows output.log, which the keeper writes, so that nothing here can hold up the job. Not here: starting the
job and its end (`watch.py`), what lines mean (`output.py`), what they add up to (`meter.py`).
"""

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from stoker.cgroup import Cgroup
from stoker.errors import writing
from stoker.measuring.environment import describe_job, masked
from stoker.measuring.witness import Witness
from stoker.records import ENVIRONMENT, OUTPUT, STEPS, RunFolder, make_run, recording
from stoker.watch.meter import Meter
from stoker.watch.output import Lines, parse

RUNS = Path("runs")

TIERS = {
    "driver, kernel and output": "recorded",
    "stacks of the job": "not recorded: this stoker does not take them",
    "inside the job": "not recorded: this stoker does not look there; what no line of the output says is unattributed",
}
"""What is known of a watched job, by how it was learned; an event of the run has it."""

POLL_S, WINDOW_S, SILENCE_S = 0.25, 1.0, 10.0
"""How often the output is looked at; the least length of a window, and of one in which the job said nothing."""


@contextlib.contextmanager
def open_run_folder(run: str | None, command: list[str]) -> Iterator[tuple[RunFolder, int]]:
    """(the run's folder, ready to write; the descriptor that holds its lock). run: None: runs/watch-NAME-N.

    Raises UsageError when the folder is that of a training or of a living job; StorageError when it cannot be written.
    """
    path = _new_folder(command) if run is None else Path(run).expanduser()
    what = " ".join(masked(word) for word in command)
    fix = "name another folder: --run DIR"
    with recording(path, describe_job(command), what, fix=fix, watched=TIERS) as held:
        yield held


def _new_folder(command: list[str]) -> Path:
    """runs/watch-NAME-N, which is made."""
    with writing("The run's folder cannot be made.", RUNS, fix="name another folder: --run DIR"):
        return make_run(RUNS, f"watch-{job_name(command)}")


def job_name(command: list[str]) -> str:
    """A short name: of the Python script or module, else of the program."""
    words = command[1:]
    for place, word in enumerate(words):
        if word == "-m" and place + 1 < len(words):
            return _name(words[place + 1])
        if word.endswith(".py"):
            return _name(Path(word).stem)
    return _name(Path(command[0]).name)


def _name(text: str) -> str:
    return re.sub(r"[^\w.]+", "_", text).strip("._") or "job"


class Recorder:
    """Writes what is seen of a job into its run's folder."""

    def __init__(self, folder: RunFolder, command: list[str]) -> None:
        self._folder = folder
        self._name = job_name(command)
        self._stop = threading.Event()
        self._kills = Cgroup().oom_kills()
        self._log = folder.path / OUTPUT
        self._from = self._log.stat().st_size if self._log.exists() else 0  # an attempt before wrote that

    @contextlib.contextmanager
    def following(self, job: int) -> Iterator[None]:
        """Inside, the job is looked at: its output four times a second, its processes once."""
        thread = threading.Thread(target=self._follow, name="recorder", daemon=True)
        with Witness(self._folder, pid=job):
            thread.start()
            try:
                yield
            finally:
                self._stop.set()
                thread.join(5.0)  # one that hangs in a storage that went away is left behind

    def ended(self, code: int) -> None:
        """code: as of `subprocess`, the negative number of a signal."""
        kills = Cgroup().oom_kills()
        data: dict[str, Any] = {"exit_code": code if code >= 0 else 128 - code}
        if code < 0:
            data["signal"] = -code
        if kills is not None and self._kills is not None:
            data["oom_kills"] = max(0, kills - self._kills)
        how = f"ended with exit code {code}" if code >= 0 else f"ended by signal {-code}"
        self._folder.event("finished" if code == 0 else "failed", f"{self._name} {how}", **data)

    def failed_to_start(self, error: OSError, exit_code: int) -> None:
        self._folder.event("failed", f"{self._name} did not start: {error.strerror}", exit_code=exit_code)

    def _follow(self) -> None:
        try:
            self._record()
        except Exception as error:  # noqa: BLE001 (the job goes on, and the run says that its steps are not recorded)
            self._folder.event("warning", f"steps.jsonl ends here: {type(error).__name__}: {error}")

    def _record(self) -> None:
        environment = json.loads((self._folder.path / ENVIRONMENT).read_bytes())
        devices = max(1, len(environment["gpu"]["gpus"]))
        meter = Meter(attempt=self._folder.attempt, devices=devices, start_s=time.time())
        lines, tail, said = Lines(), Tail(self._log, self._from), False
        while True:
            last = self._stop.wait(POLL_S)
            for data in tail.read():
                _add(meter, lines.feed(data))
            if last:
                _add(meter, lines.feed(b"", final=True))
            if meter.not_finite is not None and not said:
                said = True
                self._folder.event("warning", f"the job says that {meter.not_finite}", step=meter.step)
            now_s = time.time()
            open_s = now_s - meter.start_s
            if last or (open_s >= WINDOW_S and meter.has_news()) or open_s >= SILENCE_S:
                self._folder.append(STEPS, meter.window(now_s))
            if last:
                return


def _add(meter: Meter, lines: list[str]) -> None:
    for line in lines:
        if (progress := parse(line)) is not None:
            meter.add(progress)


class Tail:
    """Reads on in a log that grows, and that is begun anew under the same name when it is long."""

    def __init__(self, path: Path, start: int) -> None:
        self._path = path
        self._start = start
        self._file: BinaryIO | None = None

    def read(self) -> Iterator[bytes]:
        """What came since the last time."""
        while True:
            if self._file is None:
                if not self._path.exists():
                    return
                self._file = self._path.open("rb")
                self._file.seek(self._start)
                self._start = 0
            moved = self._is_moved(self._file)  # asked first: then all that came before is in the old one
            while data := self._file.read(65536):
                yield data
            if not moved:
                return
            self._file.close()
            self._file = None

    def _is_moved(self, file: BinaryIO) -> bool:
        try:
            return not os.path.samestat(os.fstat(file.fileno()), self._path.stat())
        except FileNotFoundError:  # between two files
            return True
