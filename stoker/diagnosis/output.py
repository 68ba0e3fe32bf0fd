"""The output of a job as lines, and what can be found in lines whatever wrote them: tracebacks, losses that are NaN.

Any bytes will do: what is not text is shown as such. What the lines mean is `postmortem.py`.
"""

import dataclasses
import re
from pathlib import Path

MAX_OUTPUT_BYTES = 2**20
"""End of an output that is read: the last words stand there. Our judgment."""
MAX_LINE_CHARS = 4000
"""Characters of a line in which anything is looked for. With patterns whose repeats are bounded, 1 MiB of the worst
lines takes under a second."""


@dataclasses.dataclass(frozen=True)
class LogLine:
    """Of an output or a log. place: `file:number`."""

    text: str
    source: str


_CONTROL_CHARS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")
"""Colours and other control characters: torch prints a NUL before the traceback of a worker that was killed."""


def split_log_lines(data: bytes, file_name: str, *, first_number: int = 1) -> tuple[LogLine, ...]:
    """The lines of an output, numbered from `first`. A line that was written over (`\\r`) is what it was last;
    colours are taken off."""
    lines = []
    for number, raw in enumerate(data.split(b"\n"), start=first_number):
        segments = [segment for segment in raw.decode(errors="replace").split("\r") if segment.strip()]
        lines.append(
            LogLine(_CONTROL_CHARS.sub("", segments[-1] if segments else "").rstrip(), f"{file_name}:{number}")
        )
    return tuple(lines)


def read_output(path: Path, *, min_offset: int = 0) -> tuple[LogLine, ...]:
    """The last OUTPUT_BYTES of an output, from the first whole line on, numbered as in the file. start: byte before
    which nothing is read; a line begins there. Raises OSError."""
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
    """A line without what torch puts before those of a rank, and cut where a pattern may stop looking."""
    return _RANK_PREFIX.sub("", text[:MAX_LINE_CHARS], count=1)


def find_tracebacks(lines: tuple[LogLine, ...]) -> list[tuple[int, int]]:
    """(first, last) line of each; chained ones ("during handling of …") are one. The last line is the exception's, the
    first one that is not indented more than the head."""
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
    """The lines in which a loss was last said, of those losses that were NaN then; one that became finite again is
    none. Known from the output alone: such jobs also end with exit code 0."""
    latest: dict[str, tuple[LogLine, bool]] = {}
    for line in lines:
        for match in _LOSS_PATTERN.finditer(line.text[:MAX_LINE_CHARS]):
            latest[match[1]] = (line, match[2].lower() == "nan")
    return list(dict.fromkeys(line for line, is_nan in latest.values() if is_nan))
