"""The records of a watched job: an ordinary run folder, from what driver, kernel and the job's output say (tier 0).

A thread follows output.log, which the keeper writes, so that nothing here can hold up the job. Not here: starting the
job and its end (`watch.py`), a job that runs already (`attach.py`), its stacks (`stacks.py`), its processes
(`processes.py`), what lines mean (`output.py`), what they add up to (`progress_windows.py`).
"""

import contextlib
import json
import os
import re
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from stoker.errors import writing
from stoker.profiling.telemetry.environment import describe_job, masked_words
from stoker.profiling.telemetry.kernel_log import kernel_lines
from stoker.profiling.telemetry.sampler import Witness
from stoker.runs.records import (
    ENVIRONMENT,
    OUTPUT,
    RANKS,
    STEPS,
    RunFolder,
    make_run,
    recording,
)
from stoker.runs.schemas import StepWindow
from stoker.watch import stacks
from stoker.watch.hook_reader import Inside, Seen
from stoker.watch.output import Lines, Reader
from stoker.watch.processes import Tree
from stoker.watch.progress_windows import Meter

RUNS = Path("runs")

STACKS_TIER, INSIDE_TIER = "stacks of the job", "inside the job"

TIERS = {
    "driver, kernel and output": "recorded",
    STACKS_TIER: stacks.RECORDED,
    INSIDE_TIER: "not recorded: no process of the job has trained so far",
}
"""What is known of a watched job, by how it was learned; an event of the run has it. What turns out not to be recorded
is said by another event, with all of them."""

POLL_S, WINDOW_S, SILENCE_S = 0.25, 1.0, 10.0
"""How often the output is looked at; the least length of a window, and of one in which the job said nothing."""
LOOK_S = 2.0
"""How often its processes and their open files are looked at."""
HEAD_BYTES = 4096
"""Of output.log, whose checksum tells at which file an attempt began when it has got another name meanwhile."""
KERNEL_LINES, PIDS = 50, 256
"""Lines of the kernel's log and numbers of processes that the event of the end has at most."""
SPINS_S = 30.0
"""Time without a step or a line after which a job that reads an empty file is said to spin."""


@contextlib.contextmanager
def open_run_folder(
    run: str | None,
    command: list[str],
    *,
    tiers: Mapping[str, str] = TIERS,
    environment: Mapping[str, Any] | None = None,
    **data: Any,
) -> Iterator[tuple[RunFolder, int]]:
    """(the run's folder, ready to write; the descriptor that holds its lock). run: None: runs/watch-NAME-N.

    environment: of the job; default: of one that is started from here. data: more for the event that begins the
    attempt. Raises UsageError when the folder is that of a training or of a living job; StorageError when it cannot be
    written.
    """
    path = _new_folder(command) if run is None else Path(run).expanduser()
    what = " ".join(masked_words(command))
    fix = "name another folder: --run DIR"
    described = describe_job(command) if environment is None else dict(environment)
    begins = _output_begins(path / OUTPUT)
    with recording(path, described, what, fix=fix, watched=dict(tiers), **begins, **data) as held:
        yield held


def _output_begins(log: Path) -> dict[str, int]:
    """Where this attempt's part of output.log begins, and by which beginning that file is known."""
    size = log.stat().st_size if log.exists() else 0
    if not size:
        return {"output_offset": 0}
    with log.open("rb") as file:
        return {"output_offset": size, "output_head": zlib.crc32(file.read(min(size, HEAD_BYTES)))}


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


class Output(Protocol):
    """Where the job's output comes from."""

    def read(self) -> Iterator[bytes]:
        """What came since the last time."""
        ...


class Recorder:
    """Writes what is seen of a job into its run's folder.

    output: of the job; default: what the keeper writes into output.log. cells: the folder of the hook's (`inside.py`);
    None: the job has no hook.
    """

    def __init__(
        self,
        folder: RunFolder,
        command: list[str],
        *,
        tiers: Mapping[str, str] = TIERS,
        output: Output | None = None,
        cells: Path | None = None,
    ) -> None:
        self._folder = folder
        self._name = job_name(command)
        self._stop = threading.Event()
        self._tiers = dict(tiers)
        self._tier_lock = threading.Lock()
        self._began_s = time.monotonic()
        self._tree: Tree | None = None
        self._cells = cells
        log = folder.path / OUTPUT
        self._output = output or Tail(log, log.stat().st_size if log.exists() else 0)  # an attempt before wrote that

    @contextlib.contextmanager
    def following(self, job: int) -> Iterator[None]:
        """Inside, the job is looked at: its output four times a second, driver and kernel once, its processes and
        stacks every few seconds."""
        thread = threading.Thread(target=self._follow, name="recorder", daemon=True)
        self._tree = Tree(job)
        witness = Witness(self._folder, pid=job)
        with witness, stacks.Stacks(self._folder, job, witness=witness, tell=self._no_stacks):
            thread.start()
            try:
                yield
            finally:
                self._stop.set()
                thread.join(5.0)  # one that hangs in a storage that went away is left behind

    def tier(self, name: str, said: str) -> None:
        """What is known now of a way to learn about the job. From any thread."""
        with self._tier_lock:
            if self._tiers.get(name) != said:
                self._tiers[name] = said
                self._folder.event("note", f"{name}: {said}", watched=dict(self._tiers))

    def ended(self, code: int | None) -> None:
        """code: as of `subprocess`, the negative number of a signal; None: the kernel did not tell."""
        data = self._context()
        if code is None:
            self._folder.event("finished", f"{self._name} ended; its exit code is not known", exit_code=None, **data)
            return
        data["exit_code"] = code if code >= 0 else 128 - code
        if code < 0:
            data["signal"] = -code
        how = f"ended with exit code {code}" if code >= 0 else f"ended by signal {-code}"
        self._folder.event("finished" if code == 0 else "failed", f"{self._name} {how}", **data)

    def detached(self) -> None:
        """The job lives on, and is looked at no more."""
        self._folder.event("note", f"{self._name} is watched no more; it lives on")

    def failed_to_start(self, error: OSError, exit_code: int) -> None:
        self._folder.event("failed", f"{self._name} did not start: {error.strerror}", exit_code=exit_code)

    def _no_stacks(self, reason: str) -> None:
        self.tier(STACKS_TIER, reason)

    def _context(self) -> dict[str, Any]:
        """What was seen of its processes and what the kernel said meanwhile; what nobody told is absent."""
        if self._tree is None:
            return {}
        data: dict[str, Any] = {}
        if (kills := self._tree.oom_kills()) is not None:
            data["oom_kills"] = kills
        lines = kernel_lines(self._began_s)
        if lines:
            data["kernel"] = [f"[{line.at_s:.6f}] {line.text}" for line in lines[-KERNEL_LINES:]]
            named = {int(number) for line in data["kernel"] for number in re.findall(r"\d{1,9}", line)}
            data["pids"] = sorted(self._tree.pids & named)[:PIDS]
        if empty := self._tree.empty_inputs():
            data["empty_inputs"] = empty
        return data

    def _follow(self) -> None:
        try:
            self._record()
        except Exception as error:  # noqa: BLE001 (the job goes on, and the run says that its steps are not recorded)
            self._folder.event("warning", f"steps.jsonl ends here: {type(error).__name__}: {error}")

    def _record(self) -> None:
        environment = json.loads((self._folder.path / ENVIRONMENT).read_bytes())
        devices = max(1, len(environment["gpu"]["gpus"]))
        meter = Meter(attempt=self._folder.attempt, devices=devices, start_s=time.time())
        inside = Inside(self._cells, devices=devices, now_s=time.monotonic()) if self._cells is not None else None
        lines, reader, said, spins, counted = Lines(), Reader(), False, False, False
        look_s = heard_s = time.monotonic()
        while True:
            last = self._stop.wait(POLL_S)
            for data in self._output.read():
                heard_s = time.monotonic()
                _add(meter, reader, lines.feed(data))
            if last:
                _add(meter, reader, lines.feed(b"", final=True))
            if meter.not_finite is not None and not said:
                said = True
                text = f"the job says that {meter.not_finite}"
                self._folder.event("warning", text, step=meter.step, not_finite=meter.not_finite)
            if self._tree is not None and time.monotonic() >= look_s and not last:
                self._tree.look()
                look_s = time.monotonic() + LOOK_S
                empty = self._tree.empty_inputs()
                if empty and not spins and time.monotonic() - heard_s > SPINS_S:
                    spins = True
                    text = f"the job has said nothing for {SPINS_S:.0f} s and reads {empty[0]}, a file of zero bytes"
                    self._folder.event("warning", text, empty_inputs=empty)
            if inside is not None:
                inside.look()
            now_s = time.time()
            open_s = now_s - meter.start_s
            news = meter.has_news() or (inside is not None and inside.has_news())
            if last or (open_s >= WINDOW_S and news) or open_s >= SILENCE_S:
                self._write(meter, now_s, inside)
            if inside is not None and (last or inside.trains()):
                self.tier(INSIDE_TIER, inside.said())
                if not counted and (workers := inside.workers()) is not None:
                    counted = True
                    text = f"the job's loader has {workers} worker processes"
                    self._folder.event("note", text, workers=workers)
            if last:
                return

    def _write(self, meter: Meter, now_s: float, inside: Inside | None) -> None:
        """A window: rank 0's, and beside it those of the job's other processes."""
        ranks = [] if inside is None else inside.cut(time.monotonic(), now_s - meter.start_s)
        window = meter.window(now_s, ranks[0] if ranks else None)
        self._folder.append(STEPS, window)
        for seen in ranks[1:]:
            name = f"{RANKS}/{seen.rank:04d}"
            (self._folder.path / name).mkdir(parents=True, exist_ok=True)
            self._folder.append(f"{name}/{STEPS}", _window_of(seen, window))


def _window_of(seen: Seen, first: StepWindow) -> StepWindow:
    """Of another rank, in the same time as rank 0's."""
    return StepWindow(
        t=first.t, attempt=first.attempt, step=seen.step, steps=seen.steps, pictures=seen.pictures, wall_s=first.wall_s,
        devices=seen.devices, phases=seen.phases, rate=seen.rate, cpu=seen.cpu,
    )  # fmt: skip


def _add(meter: Meter, reader: Reader, lines: list[str]) -> None:
    for line in lines:
        if (progress := reader.read(line)) is not None:
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
