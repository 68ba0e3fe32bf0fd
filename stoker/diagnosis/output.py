"""The output of a job as lines, and what can be found in lines whatever wrote them: tracebacks, losses that are NaN.

Any bytes will do: what is not text is shown as such. What the lines mean is `postmortem.py`.
"""

import dataclasses
import re
from pathlib import Path

OUTPUT_BYTES = 2**20
"""End of an output that is read: the last words stand there. Our judgment."""
LOOKED_AT = 4000
"""Characters of a line in which anything is looked for. With patterns whose repeats are bounded, 1 MiB of the worst
lines takes under a second."""


@dataclasses.dataclass(frozen=True)
class Line:
    """Of an output or a log. place: `file:number`."""

    text: str
    place: str


_UNSEEN = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")
"""Colours and other control characters: torch prints a NUL before the traceback of a worker that was killed."""


def lines_of(data: bytes, name: str, *, first: int = 1) -> tuple[Line, ...]:
    """The lines of an output, numbered from `first`. A line that was written over (`\\r`) is what it was last;
    colours are taken off."""
    found = []
    for number, raw in enumerate(data.split(b"\n"), start=first):
        said = [part for part in raw.decode(errors="replace").split("\r") if part.strip()]
        found.append(Line(_UNSEEN.sub("", said[-1] if said else "").rstrip(), f"{name}:{number}"))
    return tuple(found)


def read_output(path: Path, *, start: int = 0) -> tuple[Line, ...]:
    """The last OUTPUT_BYTES of an output, from the first whole line on, numbered as in the file. start: byte before
    which nothing is read; a line begins there. Raises OSError."""
    with path.open("rb") as file:
        begin = max(start, path.stat().st_size - OUTPUT_BYTES)
        left, first = begin, 1
        while left and (block := file.read(min(left, OUTPUT_BYTES))):
            left -= len(block)
            first += block.count(b"\n")
        data = file.read()
    if begin > start:
        _, _, data = data.partition(b"\n")
        first += 1
    return lines_of(data, path.name, first=first)


_PREFIX = re.compile(r"^\s*(\[rank\d+\]:\s?)?")


def bare(text: str) -> str:
    """A line without what torch puts before those of a rank, and cut where a pattern may stop looking."""
    return _PREFIX.sub("", text[:LOOKED_AT], count=1)


def tracebacks(lines: tuple[Line, ...]) -> list[tuple[int, int]]:
    """(first, last) line of each; chained ones ("during handling of …") are one. The last line is the exception's, the
    first one that is not indented more than the head."""
    found: list[tuple[int, int]] = []
    start: int | None = None
    depth, chained = 0, False
    for index, line in enumerate(lines):
        text = bare(line.text)
        if text.startswith("Traceback (most recent call last)"):
            start = found.pop()[0] if chained and found else index
            depth, chained = _indent(line.text), False
        elif text.startswith(("During handling of the above", "The above exception was the direct")):
            chained = True
        elif start is not None and text and _indent(line.text) <= depth:
            found.append((start, index))
            start = None
    return found


def _indent(text: str) -> int:
    text = re.sub(r"^\[rank\d+\]: ?", "", text)
    return len(text) - len(text.lstrip())


_LOSS = re.compile(
    r"(?<![\w/])([\w/]{0,60}loss\w{0,40})['\"]?\s*[:=]\s*['\"]?(nan\b|[-+]?inf\b|[-+]?\d)", re.IGNORECASE
)


def last_losses_nan(lines: tuple[Line, ...]) -> list[Line]:
    """The lines in which a loss was last said, of those losses that were NaN then; one that became finite again is
    none. Known from the output alone: such jobs also end with exit code 0."""
    last: dict[str, tuple[Line, bool]] = {}
    for line in lines:
        for match in _LOSS.finditer(line.text[:LOOKED_AT]):
            last[match[1]] = (line, match[2].lower() == "nan")
    return list(dict.fromkeys(line for line, is_nan in last.values() if is_nan))
