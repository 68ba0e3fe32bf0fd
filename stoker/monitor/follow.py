"""Reads new lines of the records of a running job, in order of time."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from stoker.printable import printable
from stoker.runs.records import DEVICES, EVENTS, STEPS
from stoker.runs.schemas import DeviceSample, Event, StepWindow

RecordLine = StepWindow | DeviceSample | Event

_RECORD_TYPES: dict[str, type[RecordLine]] = {STEPS: StepWindow, DEVICES: DeviceSample, EVENTS: Event}
_TAIL_BYTES = 65536
"""How much of the end of an existing file is read, to find the first lines of this attempt behind those of earlier
ones."""


class Follower:
    """Reads the lines that one attempt of a run appends. Skips lines of other attempts and incomplete lines."""

    def __init__(self, run: Path, attempt: int) -> None:
        self._files = [_FileFollower(run / name, record_type, attempt) for name, record_type in _RECORD_TYPES.items()]

    def read(self) -> list[RecordLine]:
        """Lines since the previous call. Raises OSError if an existing file cannot be read."""
        return sorted((line for file in self._files for line in file.read()), key=lambda line: line.t)


def describe_event(event: Event) -> str:
    """An event in one line."""
    scores = event.data.get("metrics") if event.kind == "evaluated" else None
    if isinstance(scores, dict):
        formatted = [
            f"{name.upper()} {scores[name]:.3f}" for name in ("ap", "ap50") if isinstance(scores.get(name), float)
        ]
        return f"evaluated at step {event.step:,}: {', '.join(formatted)}"
    first_line = printable(event.text.partition("\n")[0])
    return f"{event.kind}: {first_line}" if first_line else event.kind


class _FileFollower:
    def __init__(self, path: Path, record_type: type[RecordLine], attempt: int) -> None:
        self._path = path
        self._attempt = attempt
        self._decoder: msgspec.json.Decoder[RecordLine] = msgspec.json.Decoder(record_type)
        self._offset = max(0, path.stat().st_size - _TAIL_BYTES) if path.exists() else 0
        self._partial_line = b""

    def read(self) -> Iterator[RecordLine]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        self._offset += len(data)
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            try:
                decoded = self._decoder.decode(line)
            except msgspec.MsgspecError:  # incomplete after a kill, or the partial line at which reading began
                continue
            if decoded.attempt == self._attempt:
                yield decoded
