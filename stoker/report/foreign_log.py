"""`stoker why LOGFILE`: reads the output of a job without a run folder, to find out what ended the job.

A log alone does not contain the exit code, nor the telemetry of the machine. So the result quotes the log and lists
what is not known. For a recorded run, `explain.py` knows more."""

from pathlib import Path
from typing import TextIO

import msgspec
from rich.console import RenderableType

from stoker.diagnosis.output import MAX_OUTPUT_BYTES, read_output
from stoker.diagnosis.postmortem import explain
from stoker.diagnosis.termination import Termination
from stoker.errors import UsageError
from stoker.findings.finding import Finding
from stoker.report import format as fmt
from stoker.report.console import plain_text, print_renderables
from stoker.report.explain_terminal import MAX_FINDINGS
from stoker.report.findings_terminal import explain_line, finding_lines

IGNORED_CAUSE = "ended_without_record"
"""The finding that a job ended without a known reason. With a log alone not even the end is known."""


class LogExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """The result."""

    log: str
    size_bytes: int
    lines: int
    """Lines that were read."""
    findings: list[Finding]
    not_known: list[str]


def explain_log(path: Path) -> LogExplanation:
    """Reads the end of a log. Raises UsageError if it cannot be read."""
    try:
        output, size_bytes = read_output(path), path.stat().st_size
    except OSError as error:
        raise UsageError("The log cannot be read.", location=path, cause=str(error)) from error
    findings = [finding for finding in explain(Termination(output=output)) if finding.id != IGNORED_CAUSE]
    not_known = [
        "the exit code or signal, and whether the job has ended",
        "whether the kernel killed it (out of memory), and the state of GPU, memory and disk",
        "where its time went",
    ]
    if size_bytes > MAX_OUTPUT_BYTES:
        not_known.append(f"the log before its last {fmt.size(MAX_OUTPUT_BYTES)}")
    lines = sum(bool(line.text.strip()) for line in output)
    return LogExplanation(log=str(path), size_bytes=size_bytes, lines=lines, findings=findings, not_known=not_known)


def print_log_explanation(explanation: LogExplanation, file: TextIO | None = None, *, width: int | None = None) -> None:
    """Prints each finding with its evidence, then what is not known."""
    size = f"{fmt.plural(explanation.lines, 'line')}, {fmt.size(explanation.size_bytes)}"
    renderables: list[RenderableType] = [plain_text(f"{explanation.log}: a log, not a recorded run; {size}")]
    if not explanation.findings:
        renderables += ["", "It contains no known reason for the end of a job."]
    for finding in explanation.findings[:MAX_FINDINGS]:
        renderables += ["", *finding_lines(finding)]
    more = len(explanation.findings) - MAX_FINDINGS
    if more > 0:
        renderables += ["", plain_text(f"{more} more: stoker why {explanation.log} --json")]
    renderables += ["", "Not known from the log alone:", *(plain_text(f"  {text}") for text in explanation.not_known)]
    renderables += explain_line(explanation.findings[:MAX_FINDINGS])
    renderables.append("Next time, record the job with `stoker watch -- COMMAND` to get numbers.")
    print_renderables(renderables, file, width=width)
