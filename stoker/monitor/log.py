"""One JSON object per line, for cloud logging (`--log-format json`): every event, and the progress once per minute.

`severity`, `message` and `time` are the names that the collectors of Google, Amazon and most others recognize; `data`
is the record as in the run folder.
"""

import datetime
import json
from typing import TextIO

import msgspec

from stoker.monitor.follow import RecordLine, describe_event
from stoker.runs.records import WARNING_KINDS
from stoker.runs.schemas import Event, StepWindow

PROGRESS_EVERY_S = 60.0


class JsonLog:
    """Writes all events to `file`, and a line of progress every PROGRESS_EVERY_S."""

    def __init__(self, file: TextIO, *, run: str) -> None:
        self._file = file
        self._run = run
        self._next_progress_t = 0.0

    def observe(self, line: RecordLine) -> None:
        """Raises OSError if the stream cannot be written."""
        if isinstance(line, Event):
            severity = "ERROR" if line.kind == "failed" else "WARNING" if line.kind in WARNING_KINDS else "INFO"
            self._write(line, "event", severity, line.text or describe_event(line))
        elif isinstance(line, StepWindow) and line.window_steps and line.t >= self._next_progress_t:
            self._next_progress_t = line.t + PROGRESS_EVERY_S
            loss = line.losses.get("total")
            speed = f", {line.num_images / line.wall_s:.1f} img/s" if line.num_images else ""
            text = f"step {line.step:,}{speed}" + ("" if loss is None else f", loss {loss:.4g}")
            self._write(line, "steps", "INFO", text)

    def _write(self, line: RecordLine, kind: str, severity: str, message: str) -> None:
        time = datetime.datetime.fromtimestamp(line.t, datetime.UTC).isoformat(timespec="milliseconds")
        entry = {"severity": severity, "message": message, "time": time, "run": self._run, "record": kind}
        self._file.write(json.dumps(entry | {"data": msgspec.to_builtins(line)}) + "\n")
        self._file.flush()
