"""The records of a run of several ranks: rank 0 alone writes its folder, the others send it what is theirs.

They send it through the store of the process group, when it suits them: no exchange waits for it, and their machines
need not see the folder. Rank 0 writes the windows and the telemetry of rank n to `ranks/000n/`, its warnings to
events.jsonl, and the images that it could not use to quarantine.jsonl.
"""

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from stoker.data.loading.loader import QuarantinedImage
from stoker.runs.records import DEVICES, EVENTS, QUARANTINE, RANKS, STEPS, WARNING_KINDS, RunFolder
from stoker.runs.schemas import DeviceSample, Event, Quarantined, StepWindow
from stoker.training.ranks import Ranks
from stoker.training.state import EventLogger, TrainSetup

SENT: dict[str, type[msgspec.Struct]] = {STEPS: StepWindow, DEVICES: DeviceSample, QUARANTINE: Quarantined}
"""Files of records whose lines are sent to rank 0."""
MAX_WARNINGS = 20
"""Warnings that a rank sends per attempt: eight ranks with the same trouble must not fill the screen."""


class _Message(msgspec.Struct, kw_only=True):
    """A line of records, or a warning if `name` is empty."""

    name: str
    line: msgspec.Raw = msgspec.Raw(b"null")
    text: str = ""


class RankFolder(RunFolder):
    """The run folder as a rank other than 0 sees it: what it writes is sent to rank 0."""

    def __init__(self, path: Path, attempt: int, ranks: Ranks) -> None:
        super().__init__(path, attempt)
        self._ranks = ranks
        self._num_warnings = itertools.count(1)

    def append(self, name: str, line: msgspec.Struct) -> None:
        """Sends a line of SENT; other records are those of rank 0."""
        if name in SENT:
            self._post(_Message(name=name, line=msgspec.Raw(msgspec.json.encode(line))))

    def event(self, kind: str, text: str = "", *, step: int | None = None, **data: Any) -> None:
        """Sends the text of a warning, and `out_of_memory` whole: the next attempt reads its sizes. Other events
        happen in all ranks: rank 0 writes them."""
        if kind == "out_of_memory":
            event = Event(t=time.time(), attempt=self.attempt, kind=kind, step=step, text=text, data=data)
            self._post(_Message(name=EVENTS, line=msgspec.Raw(msgspec.json.encode(event))))
            return
        if kind in WARNING_KINDS and next(self._num_warnings) <= MAX_WARNINGS:
            self._post(_Message(name="", text=text))

    def replace(self, name: str, value: msgspec.Struct) -> None:
        """Rank 0 writes the files."""

    def _post(self, message: _Message) -> None:
        self._ranks.post(msgspec.json.encode(message))


class RankRecords:
    """Writes in rank 0 what the other ranks send."""

    def __init__(self, setup: TrainSetup, log_event: EventLogger) -> None:
        self._folder, self._ranks, self._loader = setup.folder, setup.ranks, setup.loader
        self._quarantine, self._log_event = setup.quarantine, log_event

    def finish(self) -> None:
        """Writes the rest: every rank has sent its last line. Called by all ranks."""
        if not self._ranks.alone:
            self._ranks.barrier()
            self.write()

    def write(self) -> None:
        """Writes what has arrived. Raises DataError if too many images of all ranks cannot be used."""
        if not self._ranks.is_main:
            return
        for rank, data in self._ranks.collect():
            message = msgspec.json.decode(data, type=_Message)
            if not message.name:
                self._log_event("warning", f"rank {rank}: {message.text}", rank=rank)
                continue
            if message.name == EVENTS:
                event = msgspec.json.decode(message.line, type=Event)
                self._log_event(event.kind, f"rank {rank}: {event.text}", **event.data, rank=rank)
                continue
            line: Any = msgspec.json.decode(message.line, type=SENT[message.name])
            if message.name == QUARANTINE:
                bad = QuarantinedImage(line.image_index, line.path, line.error, line.sample_position, line.replaced_by)
                self._quarantine(bad)
                if bad.replaced_by >= 0:
                    self._loader.quarantine_elsewhere(bad)
                continue
            name = f"{RANKS}/{rank:04d}/{message.name}"
            (self._folder.path / name).parent.mkdir(parents=True, exist_ok=True)
            self._folder.append(name, line)


def open_folder(ranks: Ranks, open_in_main: Callable[[], RunFolder]) -> RunFolder:
    """The run folder: rank 0 opens it, the others send to it."""
    if ranks.alone:
        return open_in_main()
    opened: list[RunFolder] = []

    def open_and_describe() -> tuple[Path, int]:
        opened.append(open_in_main())
        return opened[0].path, opened[0].attempt

    path, attempt = ranks.share(open_and_describe)
    return opened[0] if opened else RankFolder(path, attempt, ranks)
