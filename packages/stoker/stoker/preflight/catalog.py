"""What probes of `stoker check` share: findings from the texts of `knowledge/check_machine.toml` and
`check_files.toml`, and programs that run for a limited time.

A probe is a function that returns findings, worst or not. What it could not find out is a finding of severity
`unknown`, with the reason: never an exception, never silence. A row has the severity and the texts of one finding, with
{names} for what the probe has measured or read. Where an id has several texts, its rows are called id/variant.
"""

import contextlib
import operator
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import IO, Any, NamedTuple

import msgspec

from stoker.knowledge import read_toml
from stoker_watch.errors import StokerError, StorageError
from stoker_watch.findings.finding import Evidence, Finding, Severity
from stoker_watch.storage.failures import caused_by


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    title: str
    evidence: str = ""
    fix: str = ""
    severity: Severity = "warning"


@cache
def rows() -> dict[str, Row]:
    """All texts by name: id, or id/variant."""
    return msgspec.convert(read_toml("check_machine.toml") | read_toml("check_files.toml"), dict[str, Row])


def describe(name: str, place: str = "", /, **values: Any) -> Finding:
    """The finding of a row. name: id, or id/variant; values: of the row's texts, and `severity`, where it is not the
    row's own. Texts may name attributes of values: {package.text}."""
    row = rows()[name]
    title, evidence, fix = (text.format(**values) for text in (row.title, row.evidence, row.fix))
    return make_finding(name.partition("/")[0], values.get("severity", row.severity), title, evidence, fix, place)


def make_finding(id: str, severity: Severity, title: str, evidence: str, fix: str = "", place: str = "") -> Finding:
    """A finding from its parts in their order. evidence: what was measured or read, and from where; may be empty."""
    items = [Evidence(text=evidence)] if evidence else []
    return Finding(id=id, severity=severity, title=title, evidence=items, fix=fix, place=place)


def refused(id: str, error: StokerError, place: str = "", *, severity: Severity = "blocker") -> Finding:
    """The finding for an error with which training would end."""
    cause = error.cause or ""
    title = error.what.rstrip(".")
    title = title[:1].lower() + title[1:] if title[1:2].islower() else title
    evidence = cause or "training would end with this error"
    if error.choices:
        evidence += f"; valid: {', '.join(error.choices)}"
    if place and error.location and error.location != place:
        evidence += f"; location: {error.location}"
    return make_finding(id, severity, title, evidence, error.fix or "", place or error.location or "")


def severity_of_refusal(error: StokerError) -> Severity:
    """How bad a refusal is for a probe that goes to a store once: one that answers may answer better in a minute."""
    cause = error.cause or ""
    is_busy = isinstance(error, StorageError) and caused_by(error) == "retryable"
    return "warning" if is_busy and "no connection" not in cause and "timeout" not in cause else "blocker"


def unknown(id: str, title: str, evidence: str, fix: str = "") -> Finding:
    return make_finding(id, "unknown", title, evidence, fix)


JOB_FILES = read_toml("job_rules.toml")
"""Rules of `stoker check --job`, and the patterns with which its facts are read."""
_COMPARISONS = {">": operator.gt, "<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne}


def judge_job(about: str, facts: Mapping[str, Any], lines: Mapping[str, int], place: str) -> Iterator[Finding]:
    """What the rules say about a part of a job. lines: those of what the facts are about; "" is the part itself."""
    for rule in JOB_FILES["rules"]:
        if rule["about"] == about and all(_holds(condition.split(), facts) for condition in rule["when"]):
            line = next((lines[name] for name in (*rule.get("at", ()), "") if name in lines), 1)
            yield describe(rule["id"], f"{place}:{line}", **facts)


def _holds(condition: list[str], facts: Mapping[str, Any]) -> bool:
    if len(condition) < 3:
        return bool(facts.get(condition[-1])) is (len(condition) == 1)
    left, comparison, right = condition
    return bool(_COMPARISONS[comparison](facts[left], facts[right] if right in facts else float(right)))


class Ended(NamedTuple):
    code: int
    output: str
    errors: str

    @property
    def last_line(self) -> str:
        """The last line of the output, which is JSON if all went well."""
        return next(iter(self.output.strip().splitlines()[-1:]), "")

    @property
    def reason(self) -> str:
        """Why it failed: the exit code and the last line of the errors."""
        return f"exit code {self.code}: {next(iter(self.errors.strip().splitlines()[-1:]), 'no output')}"


def run_program(
    command: Sequence[str],
    timeout_s: float,
    *,
    env: Mapping[str, str] | None = None,
    watch: Callable[[str], bool] = lambda _: True,
) -> Ended:
    """Waits for the end, in a process group of its own. watch: called ten times a second with the errors so far; False
    ends the program. Raises subprocess.TimeoutExpired, with the errors as `stderr`, after it has killed the group."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:  # pipes would wait for grandchildren
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env=env, start_new_session=True
        )
        end_s = time.monotonic() + timeout_s
        try:
            while process.poll() is None:
                if time.monotonic() >= end_s or not watch(_text(errors)):
                    raise subprocess.TimeoutExpired(command, timeout_s, stderr=_text(errors).encode())
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(min(0.1, max(0.0, end_s - time.monotonic())))
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        return Ended(process.returncode, _text(output), _text(errors))


def _text(file: IO[bytes]) -> str:
    """All that was written; the process writes at its own position."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")
