"""Classifies Python stacks of a training job's main thread: pure functions over py-spy's frames.

`knowledge/frames.toml` has functions of frameworks by file and name; other frames are the job's own code. `stacks.py`
samples the stacks.
"""

import linecache
import re
from collections.abc import Sequence
from typing import NamedTuple

from stoker.knowledge import read_toml

KINDS = (
    "input_wait", "decode", "compute", "sync", "comm", "checkpoint", "compile", "python", "other", "idle",
)  # fmt: skip
"""Kinds of work of the main thread; docs/run-folder.md describes them."""

HELPER = "helper"
"""A process that does not train: a loader worker, a launcher. Not one of KINDS: such stacks do not count."""


class Frame(NamedTuple):
    """A frame from py-spy; a stack has the innermost frame first. function: may include its class."""

    function: str
    file: str
    line: int


class FrameRule(NamedTuple):
    """A row of frames.toml, which explains the fields."""

    kind: str
    file: re.Pattern[str]
    function: re.Pattern[str]
    covers_callees: bool


def _rule(kind: str, file: str, function: str = ".+", covers_callees: bool = False) -> FrameRule:
    return FrameRule(kind, re.compile(f"(^|/)(?:{file})"), re.compile(f"(?:{function})$"), covers_callees)


_TABLE = read_toml("frames.toml")
WORKER_RULES, FRAME_RULES = ([_rule(**row) for row in _TABLE[name]] for name in ("worker", "frame"))
_LINE_PATTERNS = [(row["kind"], re.compile(row["pattern"])) for row in _TABLE["line"]]

_NOT_JOB_CODE = re.compile(r"/(site|dist)-packages/|/lib/python\d|^<|/torchinductor_|/profiling/hook/")


def is_job_code(frame: Frame) -> bool:
    """Whether the frame is in a file of the job: not installed, not of Python itself, not generated."""
    return bool(frame.file) and _NOT_JOB_CODE.search(frame.file) is None


def classify(stack: Sequence[Frame], *, active: bool) -> str:
    """The kind of work of a thread: one of KINDS or HELPER. stack: innermost frame first; active: it is runnable."""
    if any(_matches(rule, frame) for rule in WORKER_RULES for frame in stack):
        return HELPER
    if _is_importing(stack):
        return "other"
    rules = [_find_rule(frame) for frame in stack]
    kinds = [rule.kind for rule in rules if rule is not None]
    covering_kind = next((rule.kind for rule in reversed(rules) if rule is not None and rule.covers_callees), None)
    if (
        covering_kind == "input_wait"
        and kinds
        and (kinds[0] == "decode" or _kind_from_source_line(stack[0]) == "decode")
    ):
        return "decode"  # a loader without workers: the training thread decodes
    if covering_kind is not None:
        return covering_kind
    if stack and (line_kind := _kind_from_source_line(stack[0])) is not None:
        return line_kind
    if kinds:
        return kinds[0]
    if not active:
        return "idle"
    return "python" if any(is_job_code(frame) for frame in stack) else "other"


def innermost_job_frame(stack: Sequence[Frame], cwd: str = "") -> str | None:
    """`function (file:line)` of the innermost frame in a file of the job, relative to its working directory `cwd`."""
    for frame in stack:
        if is_job_code(frame):
            name = frame.function.rpartition("<locals>.")[2]
            file = frame.file
            if cwd and file.startswith(cwd.rstrip("/") + "/"):
                file = file[len(cwd.rstrip("/")) + 1 :]
            elif file.count("/") > 2:
                file = "/".join(file.split("/")[-3:])
            return f"{name} ({file}:{frame.line})"
    return None


def _is_importing(stack: Sequence[Frame]) -> bool:
    """Whether an installed module is being imported."""
    for frame in stack:
        if is_job_code(frame):
            return False
        if _base_name(frame.function) == "_find_and_load":
            return True
    return False


def _find_rule(frame: Frame) -> FrameRule | None:
    if frame.function == "<module>" and "importlib" not in frame.file:  # code of an import is not training
        return None
    return next((rule for rule in FRAME_RULES if _matches(rule, frame)), None)


def _matches(rule: FrameRule, frame: Frame) -> bool:
    return rule.file.search(frame.file) is not None and rule.function.match(_base_name(frame.function)) is not None


def _base_name(function: str) -> str:
    """The function's name without its class and enclosing functions."""
    return function.rpartition(".")[2]


def _kind_from_source_line(frame: Frame) -> str | None:
    """The kind by the text of the source line, if the frame is in a file of the job."""
    if not is_job_code(frame) or not frame.file.startswith("/") or not frame.file.isprintable():
        return None
    text = linecache.getline(frame.file, frame.line)
    return next((kind for kind, pattern in _LINE_PATTERNS if pattern.search(text)), None)
