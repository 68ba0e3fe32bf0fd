"""What a row of the failure catalog is: `FailureSignature`. The rows are in the other files of this folder."""

import re
from typing import Literal

import msgspec

from stoker.diagnosis.causes.cause import Reason, Severity

Role = Literal["fault", "stop", "consequence"]
"""fault: it ends a job. stop: a request to end, which decides if no fault came before it. consequence: it follows from
another failure (the end of another process, a library that fails for want of memory), and decides if no other was
found."""


class LogPattern(msgspec.Struct, frozen=True):
    """A pattern of a line of output; it also matches its line in a text of many lines."""

    regex: re.Pattern[str]
    literals: tuple[str, ...]
    """Texts in lower case of which each matching line contains one: they are searched first, as that is a hundred
    times as fast."""
    harmless: bool = False
    """Jobs that continue print it too: it never decides alone."""
    traceback_end: re.Pattern[str] | None = None
    """The line is in a traceback, and this matches the traceback's last line."""
    text: str = ""
    """The pattern as the catalog has it, without the bounds of its repeats."""


class FailureSignature(msgspec.Struct, frozen=True, kw_only=True):
    """A way to fail. Without patterns it is recognized by other things than its output."""

    id: str
    title: str
    reason: Reason
    log_patterns: tuple[LogPattern, ...] = ()
    severity: Severity = "critical"
    role: Role = "fault"
    fix: str
    seen: tuple[str, ...] = ()
    """Where its lines were seen: source files that print them, public threads, or jobs that were made to fail so."""


def signature(
    id: str,
    title: str,
    reason: Reason,
    *patterns: str,
    fix: str,
    seen: tuple[str, ...],
    harmless: tuple[str, ...] = (),
    in_traceback: tuple[tuple[str, str], ...] = (),
    severity: Severity = "critical",
    role: Role = "fault",
) -> FailureSignature:
    """A row. patterns: regular expressions of lines.
    harmless: of lines that jobs that continue print too. in_traceback: pairs of a pattern for a line within a
    traceback, and one for the traceback's last line. Raises ValueError for a pattern without a literal part."""
    return FailureSignature(
        id=id,
        title=title,
        reason=reason,
        log_patterns=(
            *(make_log_pattern(pattern) for pattern in patterns),
            *(make_log_pattern(pattern, traceback_end=end) for pattern, end in in_traceback),
            *(make_log_pattern(pattern, harmless=True) for pattern in harmless),
        ),
        severity=severity,
        role=role,
        fix=fix,
        seen=seen,
    )


def make_log_pattern(pattern: str, *, harmless: bool = False, traceback_end: str | None = None) -> LogPattern:
    """Raises ValueError for a pattern without a literal part."""
    return LogPattern(
        re.compile(_bound_repeats(pattern), re.MULTILINE | re.ASCII),
        required_literals(pattern),
        harmless,
        None if traceback_end is None else re.compile(_bound_repeats(traceback_end)),
        pattern,
    )


_MAX_REPEATS = 400
"""What `*` and `+` of a pattern mean, so that the time is proportional to the length of a line. Heuristic: longer than
the paths, shapes and lists in messages."""


def _bound_repeats(pattern: str) -> str:
    bounds = {"*": f"{{0,{_MAX_REPEATS}}}", "+": f"{{1,{_MAX_REPEATS}}}"}
    tokens = _TOKEN.findall(pattern)
    return "".join(bounds[token[0]] + token[1:] if token[0] in bounds else token for token in tokens)


_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?(?:[a-z]+\)|:|<?[=!])|[()|]|[*?+]\??|\{[\d,]+\}\??|[\s\S]")
_MIN_LITERAL_CHARS = 3


def required_literals(pattern: str) -> tuple[str, ...]:
    """Texts in lower case of which each match contains at least one. Raises ValueError if there are none of 3 or more
    characters."""
    literals = _required_literals(_TOKEN.findall(pattern))
    if not literals:
        raise ValueError(f"Without a literal part of {_MIN_LITERAL_CHARS} characters: {pattern}")
    return literals


def _required_literals(tokens: list[str]) -> tuple[str, ...]:
    """Of each alternative the part whose shortest literal is the longest; empty if one has none."""
    alternatives: list[list[tuple[str, ...]]] = [[("",)]]
    index = 0
    while index < len(tokens):
        token = tokens[index]
        candidates = alternatives[-1]
        if token == "|":
            alternatives.append([("",)])
        elif token[0] == "(" and token[-1] != ")":
            end = _closing_index(tokens, index)
            is_optional = end + 1 < len(tokens) and tokens[end + 1][0] in "*?{"
            if token in ("(", "(?:") and not is_optional:
                candidates.append(_required_literals(tokens[index + 1 : end]))
            candidates.append(("",))
            index = end
        elif token[0] in "*?{":
            candidates[-1] = (candidates[-1][0][:-1],)
            candidates.append(("",))
        elif token[0] in "+[.^$(" or (token[0] == "\\" and token[1].isalnum()):
            candidates.append(("",))
        else:
            candidates[-1] = (candidates[-1][0] + token[-1].lower(),)
        index += 1
    chosen = [max(candidates, key=lambda literals: min(map(len, literals), default=0)) for candidates in alternatives]
    if any(not literals or min(map(len, literals)) < _MIN_LITERAL_CHARS for literals in chosen):
        return ()
    return tuple(dict.fromkeys(literal for literals in chosen for literal in literals))


def _closing_index(tokens: list[str], start: int) -> int:
    depth = 0
    for index in range(start, len(tokens)):
        if tokens[index][0] == "(" and tokens[index][-1] != ")":
            depth += 1
        elif tokens[index] == ")":
            depth -= 1
            if not depth:
                return index
    raise ValueError("A group is not closed.")
