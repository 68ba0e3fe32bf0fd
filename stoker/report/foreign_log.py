"""`stoker why LOGFILE`: the output of a job that nobody recorded, read for what ended it.

The log alone is known: not how the job ended, nor whether it did, nor what machine and kernel said meanwhile. So what
it names is quoted, and what it cannot tell is said. With a recorded run, `explain.py` knows more."""

from pathlib import Path
from typing import TextIO

import msgspec
from rich.console import RenderableType

from stoker.diagnosis.output import OUTPUT_BYTES, read_output
from stoker.diagnosis.postmortem import explain
from stoker.diagnosis.termination import Ended
from stoker.errors import UsageError
from stoker.report import format as fmt
from stoker.report.console import plain_text, print_parts
from stoker.report.explain_terminal import FINDINGS_SHOWN, finding_lines, indented
from stoker.runs.schemas import Finding

NOT_SEEN = "no_last_word"
"""The finding that says only that a job ended without a reason: of a log alone, not even the end is known."""


class LogWhy(msgspec.Struct, frozen=True, kw_only=True):
    """What a log says."""

    log: str
    size_bytes: int
    lines: int
    """That were read."""
    findings: list[Finding]
    not_known: list[str]


def explain_log(path: Path) -> LogWhy:
    """Reads the end of a log. Raises UsageError when it cannot be read."""
    try:
        output, size_bytes = read_output(path), path.stat().st_size
    except OSError as error:
        raise UsageError("The log cannot be read.", place=path, cause=str(error)) from error
    findings = [finding for finding in explain(Ended(output=output)) if finding.cause != NOT_SEEN]
    not_known = ["its exit code or signal, and whether it has ended at all"]
    not_known.append("whether the kernel killed it for memory, and what GPU, memory and disk did meanwhile")
    not_known.append("where its time went")
    if size_bytes > OUTPUT_BYTES:
        not_known.append(f"what stands before the last {fmt.size(OUTPUT_BYTES)} of the log")
    lines = sum(bool(line.text.strip()) for line in output)
    return LogWhy(log=str(path), size_bytes=size_bytes, lines=lines, findings=findings, not_known=not_known)


def print_log_why(found: LogWhy, file: TextIO | None = None, *, width: int | None = None) -> None:
    """Each finding with the lines that it rests on, then what the log cannot tell."""
    parts: list[RenderableType] = [
        plain_text(f"{found.log}: a log and no recorded run; {fmt.plural(found.lines, 'line')}, "
                   f"{fmt.size(found.size_bytes)}")
    ]  # fmt: skip
    if not found.findings:
        parts += ["", "Nothing in it is known to end a job."]
    for finding in found.findings[:FINDINGS_SHOWN]:
        parts += ["", *finding_lines(finding)]
    more = len(found.findings) - FINDINGS_SHOWN
    if more > 0:
        parts += ["", plain_text(f"{more} more: stoker why {found.log} --json")]
    parts += ["", "Not known from a log alone:", *map(indented, found.not_known)]
    parts.append("The next time, `stoker watch -- COMMAND` records the job, and this answer has numbers.")
    print_parts(parts, file, width=width)
