"""The output of a job as lines, and what can be found in the lines of any program: tracebacks, losses that are NaN.

Any bytes are accepted. What the lines mean is in `postmortem.py`.
"""

import dataclasses
import re
from pathlib import Path

MAX_OUTPUT_BYTES = 2**20
"""Bytes at the end of an output that are read: the last messages are there (heuristic)."""
MAX_LINE_CHARS = 4000
"""Characters of a line that are searched. The patterns have bounded repeats, so 1 MiB of the worst lines takes under a
second."""


@dataclasses.dataclass(frozen=True)
class LogLine:
    """A line of an output or a log. source: `file:number`."""

    text: str
    source: str


_CONTROL_CHARS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")
"""Colors and other control characters: torch prints a NUL before the traceback of a worker that was killed."""


def split_log_lines(data: bytes, file_name: str, *, first_number: int = 1) -> tuple[LogLine, ...]:
    """The lines of an output, numbered from `first_number`. Of a line that was overwritten (`\\r`) the last text
    remains; colors are removed."""
    lines = []
    for number, raw in enumerate(data.split(b"\n"), start=first_number):
        segments = [segment for segment in raw.decode(errors="replace").split("\r") if segment.strip()]
        lines.append(
            LogLine(_CONTROL_CHARS.sub("", segments[-1] if segments else "").rstrip(), f"{file_name}:{number}")
        )
    return tuple(lines)


def read_output(path: Path, *, min_offset: int = 0) -> tuple[LogLine, ...]:
    """The last MAX_OUTPUT_BYTES of an output, from the first complete line on, numbered as in the file. min_offset:
    byte before which nothing is read; a line begins there. Raises OSError."""
    with path.open("rb") as file:
        offset = max(min_offset, path.stat().st_size - MAX_OUTPUT_BYTES)
        remaining, first_number = offset, 1
        while remaining and (block := file.read(min(remaining, MAX_OUTPUT_BYTES))):
            remaining -= len(block)
            first_number += block.count(b"\n")
        data = file.read()
    if offset > min_offset:
        _, _, data = data.partition(b"\n")
        first_number += 1
    return split_log_lines(data, path.name, first_number=first_number)


_RANK_PREFIX = re.compile(r"^\s*(\[rank\d+\]:\s?)?")


def strip_rank_prefix(text: str) -> str:
    """A line without the prefix that torch adds for a rank, cut to MAX_LINE_CHARS."""
    return _RANK_PREFIX.sub("", text[:MAX_LINE_CHARS], count=1)


def find_tracebacks(lines: tuple[LogLine, ...]) -> list[tuple[int, int]]:
    """(first, last) line index of each; chained ones ("during handling of …") are one. The last line is that of the
    exception: the first that is not indented more than the header."""
    spans: list[tuple[int, int]] = []
    start: int | None = None
    header_indent, is_chained = 0, False
    for index, line in enumerate(lines):
        text = strip_rank_prefix(line.text)
        if text.startswith("Traceback (most recent call last)"):
            start = spans.pop()[0] if is_chained and spans else index
            header_indent, is_chained = _indent(line.text), False
        elif text.startswith(("During handling of the above", "The above exception was the direct")):
            is_chained = True
        elif start is not None and text and _indent(line.text) <= header_indent:
            spans.append((start, index))
            start = None
    return spans


def _indent(text: str) -> int:
    text = re.sub(r"^\[rank\d+\]: ?", "", text)
    return len(text) - len(text.lstrip())


_LOSS_PATTERN = re.compile(
    r"(?<![\w/])([\w/]{0,60}loss\w{0,40})['\"]?\s*[:=]\s*['\"]?(nan\b|[-+]?inf\b|[-+]?\d)", re.IGNORECASE
)


def find_nan_losses(lines: tuple[LogLine, ...]) -> list[LogLine]:
    """The last line of each loss that was NaN at the end; a loss that became finite again does not count. Such jobs
    also end with exit code 0."""
    latest: dict[str, tuple[LogLine, bool]] = {}
    for line in lines:
        for match in _LOSS_PATTERN.finditer(line.text[:MAX_LINE_CHARS]):
            latest[match[1]] = (line, match[2].lower() == "nan")
    return list(dict.fromkeys(line for line, is_nan in latest.values() if is_nan))
