"""The output of a job as lines, and what can be found in the lines of any program: tracebacks, losses that are NaN,
progress, and the line of a normal end.

Any bytes are accepted. What the lines mean is in `postmortem.py`.
"""

import dataclasses
import re
from pathlib import Path

MAX_OUTPUT_BYTES = 2**20
"""Bytes at the end of an output that are read: the last messages are there (heuristic)."""
MAX_LINE_CHARS = 2000
"""Characters of a line that are read. The patterns have bounded repeats (`endings.py` sets the
bounds of those in its catalog), so the time is proportional to the length of the output."""


@dataclasses.dataclass(frozen=True)
class LogLine:
    """A line of an output or a log. source: `file:number`."""

    text: str
    source: str


_CONTROL_CHARS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Colors and other control characters: torch prints a NUL before the traceback of a worker that was killed."""


def split_log_lines(data: bytes, file_name: str, *, first_number: int = 1) -> tuple[LogLine, ...]:
    """The lines of an output, numbered from `first_number`. Of a line that was overwritten (`\\r`) the last text
    remains; colors are removed."""
    lines = []
    for number, raw in enumerate(data.split(b"\n"), start=first_number):
        segments = [segment for segment in raw.decode(errors="replace").split("\r") if segment.strip()]
        text = _CONTROL_CHARS.sub("", segments[-1] if segments else "")[:MAX_LINE_CHARS]
        lines.append(LogLine(text.rstrip(), f"{file_name}:{number}"))
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


_RANK_PREFIX = re.compile(r"^\s*(\[rank\d{1,9}\]:\s?)?")


def strip_rank_prefix(text: str) -> str:
    """A line without the prefix that torch adds for a rank."""
    return _RANK_PREFIX.sub("", text, count=1)


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


_IGNORED_EXCEPTION = re.compile(r"Exception ignored (in|on|while)\b|Retry attempt failed:")
_THREAD_EXCEPTION = re.compile(r"Exception in thread ")


def drop_ignored_exceptions(lines: tuple[LogLine, ...]) -> tuple[LogLine, ...]:
    """The lines without the tracebacks that Python prints for an exception in a finalizer, and wandb for one after
    which it tries again: neither ends a job."""
    ignored: set[int] = set()
    for start, last in find_tracebacks(lines):
        if start and _IGNORED_EXCEPTION.match(lines[start - 1].text):
            ignored.update(range(start - 1, last + 1))
    return tuple(line for index, line in enumerate(lines) if index not in ignored) if ignored else lines


def find_thread_exceptions(lines: tuple[LogLine, ...]) -> list[tuple[int, int]]:
    """(first, last) line index of the tracebacks of threads other than the main one. They do not end the process."""
    return [
        (start, last)
        for start, last in find_tracebacks(lines)
        if start and _THREAD_EXCEPTION.match(strip_rank_prefix(lines[start - 1].text))
    ]


def _indent(text: str) -> int:
    text = re.sub(r"^\[rank\d{1,9}\]: ?", "", text)
    return len(text) - len(text.lstrip())


_LOSS_PATTERN = re.compile(
    r"(?<![\w/])([\w/]{0,60}loss\w{0,40})['\"]?\s{0,8}[:=]\s{0,8}['\"]?(nan\b|[-+]?inf\b|[-+]?\d)", re.IGNORECASE
)


def find_nan_losses(lines: tuple[LogLine, ...]) -> list[LogLine]:
    """The last line of each loss that was NaN at the end; a loss that became finite again does not count. Such jobs
    also end with exit code 0."""
    latest: dict[str, tuple[LogLine, bool]] = {}
    for line in lines:
        for match in _LOSS_PATTERN.finditer(line.text):
            latest[match[1]] = (line, match[2].lower() == "nan")
    return list(dict.fromkeys(line for line, is_nan in latest.values() if is_nan))


_PROGRESS_PATTERN = re.compile(
    r"(?i)(?<!\*\* )(?<!job )\b(epoch|step|iter(ation)?s?)\b[^a-z\n]{0,4}\d|"
    r"\d ?(it|img|images|samples|examples|steps)/s(ec)?\b|\ds/it\b|"
    r"\bloss\w{0,20}['\"]?\s{0,8}[:=]\s{0,8}['\"]?\d|\bETA:|\beta: \d"
)


def find_progress(lines: tuple[LogLine, ...]) -> list[int]:
    """Indices of the lines that report the progress of a training, in order."""
    return [index for index, line in enumerate(lines) if _PROGRESS_PATTERN.search(line.text)]


_NORMAL_END_PATTERN = re.compile(
    r"(?i)results saved to|\d epochs completed in|`Trainer\.\w+` stopped: `max_\w+=|"
    r"['\"]?train_runtime['\"]?\s{0,8}[:=]|"
    r"Training completed\. Do not forget|Total training time: |Overall training speed: |^\s*Training time:? \d|"
    r"Loss for final step: |Reporting training SUCCESS|Training job completed|Billable seconds: |"
    r"job (run )?(has )?(completed|finished|succeeded)\b|JOB_STATE_SUCCEEDED|"
    r"\btrain(ing)? (is |was |has )?(successfully )?(complete[d]?|finished|done|ended)\b|"
    r"\b(finished|done) training\b|(exited|ended|finished) with (exit )?(code|status) 0\b|"
    r"^[\W\d]*(all )?(done|finished|complete[d]?|success|saved)[.! ]*$|^done, |"
    r"\bCOMPLETED\s{1,40}0:0\b|On normal program exit|"
    r"\b(epoch|step|iter(ation)?)\W{1,3}(?P<of>\d{1,15}) ?(/|of) ?(?P=of)\b.{0,200}(loss|time|100%)|"
    r"\b(step|epoch) (?P<total>\d{1,15}) of (?P=total)\b"
)
"""The last lines of Ultralytics, Lightning, transformers, detectron2, torchvision's references, TensorFlow's
estimators, SageMaker, Vertex, and of many scripts."""
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
    remaining = _NUM_END_LINES
    for index in range(len(lines) - 1, -1, -1):
        text = lines[index].text
        if not text.strip():
            continue
        if _NORMAL_END_PATTERN.search(text):
            return index
        remaining -= 1
        if not remaining:
            return None
    return None
