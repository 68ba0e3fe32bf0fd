"""The ways in which jobs end, from `knowledge/endings.toml`: its schema, and patterns of lines that are compiled when a
line may match. `postmortem.py` has the rules that use them.
"""

import dataclasses
import functools
import re
from typing import Literal

import msgspec

from stoker.diagnosis.causes.cause import Reason
from stoker.findings.finding import Severity
from stoker.knowledge import read_toml

UNEXPLAINED = frozenset({"killed", "crashed", "ended_by_error", "ended_without_record", "exit_code_unknown"})
"""Endings that describe how a job ended without its reason."""


class InTraceback(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Patterns of a line within a traceback and of the traceback's last line."""

    line: str
    last_line: str


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Output that a job printed. source: the thread or source file that it is from, if more is known than `seen`."""

    text: str
    source: str = ""


class Ending(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A way to end; endings.toml explains the fields. Without patterns it is recognized by other things than output."""

    id: str
    title: str
    reason: Reason
    severity: Severity = "critical"
    role: Literal["fault", "stop", "consequence", "remark"] = "fault"
    about_another_process: bool = False
    patterns: tuple[str, ...] = ()
    in_traceback: tuple[InTraceback, ...] = ()
    harmless: tuple[str, ...] = ()
    fix: str
    seen: tuple[str, ...]
    samples: tuple[Sample, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class LinePattern:
    """A pattern of a line of output; it also matches its line in a text of many lines."""

    ending: Ending
    text: str
    """The pattern as the file has it, without the bounds of its repeats."""
    harmless: bool = False
    traceback_end: str | None = None
    """The line is in a traceback, and this is a pattern of the traceback's last line."""

    @functools.cached_property
    def literal(self) -> str:
        """Text in lower case that each matching line contains: searching it takes a hundredth of the time."""
        return required_literal(self.text)

    @functools.cached_property
    def regex(self) -> re.Pattern[str]:
        return re.compile(bound_repeats(self.text), re.MULTILINE | re.ASCII)

    def ends_traceback(self, last_line: str) -> bool:
        return self.traceback_end is not None and re.search(bound_repeats(self.traceback_end), last_line) is not None


@functools.cache
def endings() -> dict[str, Ending]:
    """All endings by id, from the more to the less specific. Raises ValidationError for a row of another form."""
    rows = {id: {"id": id, **row} for id, row in read_toml("endings.toml").items()}
    return msgspec.convert(rows, dict[str, Ending])


@functools.cache
def line_patterns() -> tuple[LinePattern, ...]:
    """The patterns of all endings, in their order."""
    return tuple(
        pattern
        for ending in endings().values()
        for pattern in (
            *(LinePattern(ending, text) for text in ending.patterns),
            *(LinePattern(ending, both.line, traceback_end=both.last_line) for both in ending.in_traceback),
            *(LinePattern(ending, text, harmless=True) for text in ending.harmless),
        )
    )


_CHARACTER = r"\\[\s\S]|\[\^?\]?(?:\\.|[^\]\\])*\]|[\s\S]"
"""A character of a pattern, escaped or not, or a class."""
_ITEM = re.compile(rf"({_CHARACTER})([*?+]\??|\{{[\d,]+\}}\??)?")
_UNBOUNDED = {"*": "{0,400}", "+": "{1,400}"}
"""What repeats without a bound mean, so that the time is proportional to the length of a line. Heuristic: longer than
the paths, shapes and lists in messages."""
_MIN_LITERAL_CHARS = 3


def bound_repeats(pattern: str) -> str:
    """The pattern with a bound for each `*` and `+`."""
    return re.sub(_CHARACTER, lambda match: _UNBOUNDED.get(match[0], match[0]), pattern)


def required_literal(pattern: str) -> str:
    """The longest text outside the groups of a pattern, in lower case: each match contains it. Raises ValueError if it
    has fewer than 3 characters, or if the pattern has alternatives outside groups."""
    literals, depth = [""], 0
    for character, repeat in _ITEM.findall(pattern):
        depth += (character == "(") - (character == ")")
        if depth == 0 and character == "|":
            raise ValueError(f"Alternatives are patterns of their own: {pattern}")
        is_class = character[0] in ").^$" or (len(character) > 1 and (character[0] == "[" or character[1].isalnum()))
        if depth == 0 and not is_class and repeat[:1] not in ("*", "?", "{"):
            literals[-1] += character[-1].lower()
            if not repeat:
                continue
        literals.append("")
    longest = max(literals, key=len)
    if len(longest) < _MIN_LITERAL_CHARS:
        raise ValueError(f"Without a text of {_MIN_LITERAL_CHARS} characters outside its groups: {pattern}")
    return longest
