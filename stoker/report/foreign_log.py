"""`stoker why LOGFILE`: the output of a job that nobody recorded, read for what ended it.

The log alone is known: not how the job ended, nor whether it did, nor what machine and kernel said meanwhile. So what
it names is quoted, and what it cannot tell is said. With a recorded run, `explain.py` knows more."""

from pathlib import Path
from typing import TextIO

import msgspec
from rich.console import RenderableType

from stoker.diagnosis.output import MAX_OUTPUT_BYTES, read_output
from stoker.diagnosis.postmortem import explain
from stoker.diagnosis.termination import Termination
from stoker.errors import UsageError
from stoker.report import format as fmt
from stoker.report.console import plain_text, print_renderables
from stoker.report.explain_terminal import MAX_FINDINGS, finding_lines, indented
from stoker.runs.schemas import Finding

IGNORED_CAUSE = "ended_without_record"
"""The finding that says only that a job ended without a reason: of a log alone, not even the end is known."""


class LogExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """What a log says."""

    log: str
    size_bytes: int
    lines: int
    """That were read."""
    findings: list[Finding]
    not_known: list[str]


def explain_log(path: Path) -> LogExplanation:
    """Reads the end of a log. Raises UsageError when it cannot be read."""
    try:
        output, size_bytes = read_output(path), path.stat().st_size
    except OSError as error:
        raise UsageError("The log cannot be read.", location=path, cause=str(error)) from error
    findings = [finding for finding in explain(Termination(output=output)) if finding.cause != IGNORED_CAUSE]
    not_known = ["its exit code or signal, and whether it has ended at all"]
    not_known.append("whether the kernel killed it for memory, and what GPU, memory and disk did meanwhile")
    not_known.append("where its time went")
    if size_bytes > MAX_OUTPUT_BYTES:
        not_known.append(f"what stands before the last {fmt.size(MAX_OUTPUT_BYTES)} of the log")
    lines = sum(bool(line.text.strip()) for line in output)
    return LogExplanation(log=str(path), size_bytes=size_bytes, lines=lines, findings=findings, not_known=not_known)


def print_log_explanation(explanation: LogExplanation, file: TextIO | None = None, *, width: int | None = None) -> None:
    """Each finding with the lines that it rests on, then what the log cannot tell."""
    renderables: list[RenderableType] = [
        plain_text(f"{explanation.log}: a log and no recorded run; {fmt.plural(explanation.lines, 'line')}, "
                   f"{fmt.size(explanation.size_bytes)}")
    ]  # fmt: skip
    if not explanation.findings:
        renderables += ["", "Nothing in it is known to end a job."]
    for finding in explanation.findings[:MAX_FINDINGS]:
        renderables += ["", *finding_lines(finding)]
    more = len(explanation.findings) - MAX_FINDINGS
    if more > 0:
        renderables += ["", plain_text(f"{more} more: stoker why {explanation.log} --json")]
    renderables += ["", "Not known from a log alone:", *map(indented, explanation.not_known)]
    renderables.append("The next time, `stoker watch -- COMMAND` records the job, and this answer has numbers.")
    print_renderables(renderables, file, width=width)
