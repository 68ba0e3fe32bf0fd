"""What lines of a job's output mean: the ways in which jobs end, from `knowledge/endings.toml`, whose patterns are
compiled when a line may match; and what the lines of any program show: tracebacks, losses that are NaN, progress, and
the line of a normal end. `postmortem.py` has the rules that use them.
"""

import dataclasses
import functools
import itertools
import re
import statistics
from typing import Literal, NamedTuple

import msgspec

from stoker_watch.diagnosis.causes.cause import Reason
from stoker_watch.diagnosis.run_data import LogLine
from stoker_watch.findings.finding import Severity
from stoker_watch.knowledge import read_toml

UNEXPLAINED = frozenset({"killed", "crashed", "ended_by_error", "ended_without_record", "exit_code_unknown"})
"""Endings that describe how a job ended without its reason."""


class InTraceback(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Patterns of a line within a traceback and of the traceback's last line."""

    line: str
    last_line: str


class InFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Facts of an end that hold together (`end_facts.py`). severity: other than the ending's, where they prove less."""

    all: tuple[str, ...]
    severity: Severity | None = None


class Variant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an ending is in a job of which each of `when`, patterns of lines, is in the output, and none of `unless`:
    another fix or title."""

    when: tuple[str, ...]
    fix: str
    unless: tuple[str, ...] = ()
    title: str = ""


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
    includes: tuple[str, ...] = ()
    """Causes that say the same of the job, and are left out."""
    about_another_process: bool = False
    patterns: tuple[str, ...] = ()
    in_traceback: tuple[InTraceback, ...] = ()
    facts: tuple[InFacts, ...] = ()
    harmless: tuple[str, ...] = ()
    fix: str
    variants: tuple[Variant, ...] = ()
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


# The output of any program

_RANK_PREFIX = re.compile(r"^\s*(\[rank\d{1,9}\]:\s?)?")


def strip_rank_prefix(text: str) -> str:
    """A line without the prefix that torch adds for a rank."""
    return _RANK_PREFIX.sub("", text, count=1)


def find_tracebacks(lines: tuple[LogLine, ...]) -> list[tuple[int, int]]:
    """(first, last) line index of each; chained ones ("during handling of …") are one. The last line is that of the
    exception: the first that looks like one among those that are not indented more than the header, so that what the
    job printed in between is not taken for it; without one in the next lines, the first of them."""
    spans: list[tuple[int, int]] = []
    start: int | None = None
    header_indent, is_chained = 0, False
    first_foreign: int | None = None
    for index, line in enumerate(lines):
        text = strip_rank_prefix(line.text)
        is_original = text.startswith("Original Traceback (most recent call last)")  # of a loader worker
        is_whole_line = is_original or text.startswith("Traceback (most recent call last)")
        if is_whole_line or _begins_behind_progress(lines[index : index + 2]):
            if start is not None and first_foreign is not None:
                spans.append((start, first_foreign))
            start = spans.pop()[0] if (is_chained or is_original) and spans else index
            header_indent = _indent(line.text) if is_whole_line else 0
            is_chained, first_foreign = False, None
        elif text.startswith(("During handling of the above", "The above exception was the direct")):
            is_chained = True
        elif start is not None and text and _indent(line.text) <= header_indent:
            first_foreign = index if first_foreign is None else first_foreign
            if _EXCEPTION_LINE.match(text) or index - first_foreign >= _MAX_FOREIGN_LINES:
                spans.append((start, index if _EXCEPTION_LINE.match(text) else first_foreign))
                start = None
    if start is not None and first_foreign is not None:
        spans.append((start, first_foreign))
    return spans


def _begins_behind_progress(lines: tuple[LogLine, ...]) -> bool:
    """Whether a traceback begins at the end of the first of two lines, behind a bar or losses that were printed without
    a line break."""
    if "Traceback (most recent call last):" not in lines[0].text:
        return False
    header = re.search(r"(\[rank\d{1,9}\]: ?)?Traceback \(most recent call last\):\s*$", lines[0].text)
    if header is None or len(lines) < 2 or not lines[1].text.startswith(f'{header[1] or ""}  File "'):
        return False
    before = lines[0].text[: header.start()]
    return _BAR.search(before) is not None or _PROGRESS_PATTERN.search(before) is not None


_BAR = re.compile(r"\d%\||\d(it|s)/(s|it)\b")


_EXCEPTION_LINE = re.compile(
    r"(?:\| )?(?:(?:\w{1,100}\.){1,20}[A-Z]\w{0,100}|(?:\w{1,100}\.){0,20}\w{0,100}(?:[Ee]rror|[Ee]xception)"
    r"|[A-Z]\w{0,50}[a-z]\w{0,50}[A-Z]\w{0,50})(?::(?: |$)|\s?$)"
)
"""`Name: text` or a name alone: with its module, or called error, or of several words (KeyboardInterrupt)."""
_MAX_FOREIGN_LINES = 20
"""Lines of other threads or of stdout within a traceback, at most (heuristic)."""


def has_open_traceback(lines: tuple[LogLine, ...]) -> bool:
    last = max((last for _, last in find_tracebacks(lines)), default=-1)
    return any(
        _BLOCK.match(strip_rank_prefix(lines[index].text)) or _begins_behind_progress(lines[index : index + 2])
        for index in range(last + 1, len(lines))
    )


def is_exception_line(text: str) -> bool:
    return _EXCEPTION_LINE.match(strip_rank_prefix(text)) is not None


_BLOCK = re.compile(r"Traceback \(most recent call last\)")
_FRAME = re.compile(r'^\W*File "(?P<file>[^"]{1,1000})", line (?P<line>\d{1,9}), in (?P<function>.{1,200})$')
_NOT_OWN = re.compile(r"/(site|dist)-packages/|/lib/python\d|^<|/torchinductor_|/stoker_watch/recording/")
_MAX_OWN_FRAMES = 3


def find_raising_lines(lines: tuple[LogLine, ...], span: tuple[int, int]) -> list[str]:
    """`FILE:LINE (FUNCTION)` of the job's own frames in which the first exception of a traceback was raised, the
    innermost first, at most three: of a loader worker its own traceback, of chained ones the first. Own frames are
    those outside of installed packages and the standard library."""
    blocks: list[list[str]] = [[]]
    for index in range(span[0], span[1] + 1):
        text = strip_rank_prefix(lines[index].text)
        if _BLOCK.search(text):
            is_workers = text.strip().startswith("Original")
            blocks = [[]] if is_workers else [*blocks, []]
        elif (found := _FRAME.match(text)) is not None and not _NOT_OWN.search(found["file"]):
            blocks[-1].append(f"{found['file'].rpartition('/')[2]}:{found['line']} ({found['function']})")
    first = next((block for block in blocks if block), [])
    return list(dict.fromkeys(reversed(first)))[:_MAX_OWN_FRAMES]


_IGNORED_EXCEPTION = re.compile(r"Exception ignored (in|on|while)\b|Retry attempt failed:")
_THREAD_EXCEPTION = re.compile(r"Exception in thread ")
_THREAD_FRAME = re.compile(r'threading\.py", line \d{1,9}, in _bootstrap_inner$')


def drop_ignored_exceptions(lines: tuple[LogLine, ...]) -> tuple[LogLine, ...]:
    """The lines without the tracebacks that Python prints for an exception in a finalizer, and wandb for one after
    which it tries again: neither ends a job."""
    ignored: set[int] = set()
    for start, last in find_tracebacks(lines):
        if start and _IGNORED_EXCEPTION.match(lines[start - 1].text):
            ignored.update(range(start - 1, last + 1))
    return tuple(line for index, line in enumerate(lines) if index not in ignored) if ignored else lines


def find_thread_exceptions(lines: tuple[LogLine, ...]) -> list[tuple[int, int]]:
    """(first, last) line index of the tracebacks of threads other than the main one. They do not end the process. The
    line before may be mixed with that of a progress bar; the first frame is then the one in which threads begin."""
    return [
        (start, last)
        for start, last in find_tracebacks(lines)
        if (start and _THREAD_EXCEPTION.match(strip_rank_prefix(lines[start - 1].text)))
        or _THREAD_FRAME.search(lines[min(start + 1, last)].text)
    ]


def _indent(text: str) -> int:
    text = re.sub(r"^\[rank\d{1,9}\]: ?", "", text)
    return len(text) - len(text.lstrip())


_LINES = msgspec.convert(read_toml("output_lines.toml"), dict[str, tuple[str, ...]])
_LOSS_PATTERNS = [re.compile(pattern, re.IGNORECASE) for pattern in _LINES["loss"]]
_WHOLE_LOSSES = ("loss", "total_loss", "train_loss", "loss/total_loss")
"""Names of the loss that is minimized, in lower case."""
_NON_FINITE = re.compile(r"nan|inf", re.IGNORECASE)


class LoggedLoss(NamedTuple):
    """A training loss in a line of output. name: in lower case; value: as it is printed."""

    line: LogLine
    name: str
    value: str


def find_losses(lines: tuple[LogLine, ...]) -> list[LoggedLoss]:
    """The training losses in the lines, without the parts of a whole one."""
    losses: list[LoggedLoss] = []
    for line in lines:
        values = {match.groupdict().get("name", "loss").lower(): match["value"]
                  for pattern in _LOSS_PATTERNS for match in pattern.finditer(line.text)}  # fmt: skip
        names = [name for name in values if name in _WHOLE_LOSSES] or values
        losses += [LoggedLoss(line, name, values[name]) for name in names]
    return losses


def find_non_finite_losses(losses: list[LoggedLoss]) -> list[LogLine]:
    """The line from which each training loss was NaN or infinite to the end; a loss that became finite again does
    not count, neither does a single infinite one after finite ones (loss scaling skips that step), nor a part of a loss
    that is finite. Such jobs also end with exit code 0."""
    latest: dict[str, tuple[LogLine, bool, bool]] = {}  # line, whether it is not finite, whether it counts
    for line, name, value in losses:
        is_non_finite = _NON_FINITE.search(value) is not None
        was_finite = name in latest and not latest[name][1]
        counts = is_non_finite and not (was_finite and "nan" not in value.lower())
        goes_on = is_non_finite and name in latest and not was_finite
        latest[name] = latest[name][0] if goes_on else line, is_non_finite, counts
    return list(dict.fromkeys(line for line, _, counts in latest.values() if counts))


_MIN_NON_FINITE_LINES, _MIN_NON_FINITE_FRACTION, _MIN_SPELLS = 5, 0.1, 3
"""Lines in which a loss is not finite, their fraction of all with that loss, and how often it became so, from which
this is the data, and no step that loss scaling skips or a mean that has one in it (heuristic)."""
_EVALUATION = re.compile(r"(?i)\b(val|valid|validation|eval|evaluation|test)\b")


def find_recurring_non_finite_losses(losses: list[LoggedLoss]) -> tuple[list[LogLine], int]:
    """(the lines in which the training loss is NaN or infinite, the number of those that have it), if it became so
    again and again; else ([], 0). Only _WHOLE_LOSSES count: others, as the best loss so far, may begin as infinite."""
    found: tuple[list[LogLine], int] = ([], 0)
    for name in _WHOLE_LOSSES:
        of_name = [loss for loss in losses if loss.name == name and not _EVALUATION.search(loss.line.text)]
        is_bad = [_NON_FINITE.search(loss.value) is not None for loss in of_name]
        num_spells = sum(bad and not before for before, bad in itertools.pairwise([False, *is_bad]))
        lines = [loss.line for loss, bad in zip(of_name, is_bad, strict=True) if bad]
        minimum = max(_MIN_NON_FINITE_LINES, _MIN_NON_FINITE_FRACTION * len(of_name), len(found[0]) + 1)
        if num_spells >= _MIN_SPELLS and len(lines) >= minimum:
            found = lines, len(of_name)
    return found


_NUMBER = re.compile(r"[-+]?\d*\.?\d+(?:e[-+]?\d+)?", re.IGNORECASE)
_EXPLODED_LOSS, _EXPLODED_RATIO, _NUM_EXPLODED = 100.0, 1000.0, 3
"""A loss that is above this to the end of a log, in as many lines, and this many times its median before (heuristic: a
spike falls again; the loss of a second stage is not as large, or falls)."""


def find_exploded_losses(losses: list[LoggedLoss]) -> list[LogLine]:
    """The line before a training loss exploded, and its last lines, if it did not fall again; else empty."""
    for name in _WHOLE_LOSSES:
        of_name = [loss for loss in losses if loss.name == name and not _EVALUATION.search(loss.line.text)]
        texts = [loss.value.rstrip(".") for loss in of_name]  # at the end of a sentence
        values = [float(text) if _NUMBER.fullmatch(text) else 0.0 for text in texts]
        start = len(values)
        while start and values[start - 1] >= _EXPLODED_LOSS:
            start -= 1
        if start < _NUM_EXPLODED or len(values) - start < _NUM_EXPLODED:
            continue
        usual = statistics.median(map(abs, values[:start]))
        falls = values[-1] < values[start] / 2
        if usual and not falls and min(values[start:]) >= _EXPLODED_RATIO * usual:
            return [of_name[number].line for number in (start - 1, start, len(values) - 1)]
    return []


_LOSS_SCALE = re.compile(
    r"(?i)overflow.{0,200}(?:loss scale to:? |reducing to )(\d{1,12}(?:\.\d{1,12})?(?:e[+-]?\d{1,3})?)"
)
_MIN_HALVINGS = 5
_LOW_LOSS_SCALE = 8.0
_MAX_LATER_PROGRESS = 3
"""Halvings of the loss scale one after the other, and the scale that they reach, from which on the gradients are not
finite for another reason than the scale; lines of progress after the last of them. Heuristic: trainings begin with
2**16 and settle above 2**7."""


def find_overflows(lines: tuple[LogLine, ...]) -> list[LogLine]:
    """The last lines in which the loss scale was halved, if each step did so down to a low one, as fairseq, Apex and
    DeepSpeed print it, and no training went on after it; else empty."""
    matches = ((index, _LOSS_SCALE.search(line.text)) for index, line in enumerate(lines))
    last = [(index, float(match[1])) for index, match in matches if match is not None][-_MIN_HALVINGS:]
    is_low = len(last) == _MIN_HALVINGS and last[-1][1] <= _LOW_LOSS_SCALE
    is_halved = all(2 * after == before for (_, before), (_, after) in itertools.pairwise(last))
    if not is_low or not is_halved or len(find_progress(lines[last[-1][0] :])) > _MAX_LATER_PROGRESS:
        return []
    return [lines[index] for index, _ in last]


_PROGRESS_PATTERN = re.compile("|".join(_LINES["progress"]), re.IGNORECASE)
_NORMAL_END_PATTERN = re.compile("|".join(_LINES["normal_end"]), re.IGNORECASE)
SECONDARY_ERROR = re.compile("|".join(_LINES["secondary_error"]))


def find_progress(lines: tuple[LogLine, ...]) -> list[int]:
    """Indices of the lines that report the progress of a training, in order."""
    return [index for index, line in enumerate(lines) if _PROGRESS_PATTERN.search(line.text)]


_NUM_END_LINES = 40
"""Lines after that of a normal end, at most (heuristic): summaries of the run, of the tracker, of the platform."""


_EPOCH_OF_PATTERN = re.compile(r"(?i)^\W*epoch\W{1,2}(\d{1,15}) ?/ ?(\d{1,15})\b")
_FULL_BAR_PATTERN = re.compile(r"\b(\d{1,15})/\1\b.{0,200}\d(ms|s)\b")


def _find_last_epoch_end(lines: tuple[LogLine, ...]) -> int | None:
    """Index of the full progress bar of the last epoch, as Keras prints it; None: there is none."""
    headers = ((index, match) for index, line in reversed(list(enumerate(lines)))
               if (match := _EPOCH_OF_PATTERN.search(line.text)))  # fmt: skip
    header = next(headers, None)
    if header is None or header[1][1] != header[1][2]:
        return None
    following = range(header[0] + 1, len(lines))
    return next((index for index in reversed(following) if _FULL_BAR_PATTERN.search(lines[index].text)), None)


def find_normal_end(lines: tuple[LogLine, ...]) -> int | None:
    """Index of the line that reports the end of a whole training, if it is one of the last; else None."""
    last_epoch_end = _find_last_epoch_end(lines)
    if last_epoch_end is not None:
        return last_epoch_end
    nonempty = [index for index, line in enumerate(lines) if line.text.strip()]
    last = reversed(nonempty[-_NUM_END_LINES:])
    return next((index for index in last if _NORMAL_END_PATTERN.search(lines[index].text)), None)
