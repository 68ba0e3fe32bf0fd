"""What ended a job, ours or another's: what is known of it in, findings out, each with the line or number it rests on.

`explain` is a pure function over `Ended`; `termination.py` makes that of a run, `output.py` the lines of any job's
output. The ways to die and their signs are data: `failure_signatures.py`. What nothing proves is not guessed: then the
finding says how the job ended and what is not known. Losses of time are `rules.py`.
"""

import bisect
import dataclasses
import itertools
import re
import signal

from stoker.diagnosis.failure_signatures import FAILURE_SIGNATURES, SECONDARY_ERRORS, FailureSignature, LogPattern
from stoker.diagnosis.output import LogLine, find_nan_losses, find_tracebacks, strip_rank_prefix
from stoker.diagnosis.termination import Termination, read_termination
from stoker.runs.schemas import Evidence, Finding

__all__ = ["Termination", "explain", "read_termination"]

NEARLY_FULL_FRACTION = 0.95
"""Share of a memory's limit in the last sample from which a kill without a word is laid to it. Our judgment: samples
are a second old at most, and what is left is a batch or two."""
_MAX_QUOTED_CHARS = 500
"""Characters of a line that are quoted."""
_MAX_QUOTED_LINES = 3
"""Lines that a finding quotes of a sign at most."""
_NUM_LAST_LINES = 5
"""Lines that it quotes where nothing is known: an error of stoker has as many."""
_SIGKILL, _SIGTERM, _SIGINT = 9, 15, 2
_PREEMPTED_EXIT_CODE = 75
"""What stoker's own runs end with when they were asked to stop (errors.Preempted)."""
MIN_HANG_S = 300.0
"""Stillness before a kill from which on it is what was wrong. Our judgment: longer than any batch, shorter than the
limits of collectives (10 to 30 minutes); a silent download looks alike, which is why the evidence says where it was."""
MAX_HANG_CORES = 0.05
"""Processor-seconds per second of the whole job below which nothing moved; an idle interpreter takes less."""
MIN_SILENT_S = 30.0
"""Time without a word before a kill from which on an empty input file is what was wrong."""
_SECONDARY_XIDS = re.compile(r"\bXid 4[35]\b")
"""What the driver says of a program that ended or failed by itself."""


@dataclasses.dataclass(frozen=True)
class _Match:
    failure: FailureSignature
    log_pattern: LogPattern
    line: LogLine
    line_index: int
    """Of the line in the output."""


def explain(termination: Termination) -> list[Finding]:
    """What ended the job first, then what else its output says. Nothing for one that ended well and silently."""
    matches = _find_matches(termination.output)
    nan_losses = find_nan_losses(termination.output)
    verdict: Finding | None = _explain_signal(termination, matches)
    if verdict is None and termination.exit_code != 0:
        verdict = _explain_output(termination, matches, nan_losses)
    findings = [verdict] if verdict is not None else []
    if nan_losses and all(finding.cause != "diverged" for finding in findings):
        findings.append(_make_finding("diverged", [_quote(line) for line in nan_losses[:_MAX_QUOTED_LINES]]))
    if not termination.gpu_used:
        cpu_lines = [match.line for match in matches if match.failure.id == "trained_on_cpu"]
        if cpu_lines:
            findings.append(_make_finding("trained_on_cpu", [_quote(line) for line in cpu_lines[:_MAX_QUOTED_LINES]]))
    if termination.exit_code != 0:
        findings += _other_findings(termination, matches, {finding.cause for finding in findings})
    return findings


def _explain_signal(termination: Termination, matches: list[_Match]) -> Finding | None:
    """The verdict where a signal ended the job: from outside, it has no last words that say so."""
    signal_number = termination.signal
    end_evidence = _end_evidence(termination)
    oom_lines = [
        line
        for line in termination.kernel_log
        if (pid := _killed_pid(line.text)) is not None and pid in termination.pids
    ]
    if oom_lines:
        return _make_finding("oom_killed", [_quote(line) for line in oom_lines[:_MAX_QUOTED_LINES]] + end_evidence)
    if signal_number == _SIGKILL and termination.oom_kills:
        text = f"the kernel killed {termination.oom_kills} processes of the job's cgroup for memory"
        evidence = [
            Evidence(text=text, value=float(termination.oom_kills), source="memory.events: oom_kill"),
            *end_evidence,
        ]
        return _make_finding("oom_killed", evidence)
    ended_silently = signal_number == _SIGKILL or (termination.exit_code is None and not termination.output)
    if ended_silently and termination.oom_kills is None and (memory_evidence := _memory_full_evidence(termination)):
        unproved = Evidence(text="not proved: nobody counted the kernel's kills (memory.events: oom_kill)")
        return _make_finding("oom_killed", [*memory_evidence, *end_evidence, unproved], severity="warning")
    was_stopped = signal_number in (_SIGKILL, _SIGTERM, _SIGINT)
    silent_s = termination.hang.duration_s if termination.hang is not None else None
    if (
        termination.empty_inputs
        and was_stopped
        and (signal_number == _SIGKILL if silent_s is None else silent_s >= MIN_SILENT_S)
    ):
        return _make_finding(
            "empty_shard", [*_empty_input_evidence(termination), *_hang_evidence(termination), *end_evidence]
        )
    if was_stopped and _was_hanging(termination):
        return _make_finding("hang", [*_hang_evidence(termination), *end_evidence])
    if signal_number == _SIGKILL:
        not_memory = "the kernel counted no kill for memory in the job's cgroup: somebody else sent it"
        counted = (
            [Evidence(text=not_memory, value=0.0, source=termination.source)] if termination.oom_kills == 0 else []
        )
        return _make_finding("killed", end_evidence + counted + _unknown_evidence(termination, matches))
    if signal_number == _SIGTERM or termination.exit_code == _PREEMPTED_EXIT_CODE:
        return _make_finding("preempted", end_evidence)
    if signal_number == _SIGINT:
        return _make_finding("interrupted", end_evidence)
    shm_was_full = (
        signal_number == signal.SIGBUS
        and termination.shm_fraction is not None
        and termination.shm_fraction >= NEARLY_FULL_FRACTION
    )
    return _make_finding("shared_memory_full", end_evidence) if shm_was_full else None


def _memory_full_evidence(termination: Termination) -> list[Evidence]:
    """That the host's memory was full or would have been before the next sample; else nothing."""
    fraction, growth = termination.memory_fraction, termination.memory_growth
    if fraction is None or (fraction < NEARLY_FULL_FRACTION and fraction + growth < 1):
        return []
    if fraction >= NEARLY_FULL_FRACTION:
        return [
            Evidence(text="it ended when the host's memory was full", value=fraction, source=termination.samples_source)
        ]
    text = (
        f"the host's memory was {100 * fraction:.0f} % full in the last sample, {100 * growth:.0f} points more than in "
        "the one before: it was full before there was another"
    )
    return [Evidence(text=text, value=fraction, source=termination.samples_source)]


def _explain_output(termination: Termination, matches: list[_Match], nan_losses: list[LogLine]) -> Finding:
    """The verdict from the last words: what stands after the last traceback, then the tracebacks from the last one on,
    then all that was said. An error that only reports another one's end passes the question on."""
    end_evidence, fatal_matches = (
        _end_evidence(termination),
        [match for match in matches if not match.log_pattern.harmless],
    )
    lines, end = termination.output, len(termination.output)
    for start, last in reversed(find_tracebacks(lines)):
        for begin, stop in ((last + 1, end), (start, last + 1)):
            failure_matches = [match for match in fatal_matches if begin <= match.line_index < stop]
            if failure_matches:
                return _finding_from_matches(termination, failure_matches, matches)
        if not SECONDARY_ERRORS.search(lines[last].text):
            if termination.exit_code == -signal.SIGINT or lines[last].text.startswith("KeyboardInterrupt"):
                return _make_finding("interrupted", [_quote(lines[last]), *end_evidence])
            return _make_finding(
                "ended_by_error", [_quote(lines[last]), *end_evidence, *_unknown_evidence(termination, matches)]
            )
        end = start
    if fatal_matches:
        return _finding_from_matches(termination, fatal_matches, matches)
    if nan_losses:
        return _make_finding("diverged", [_quote(line) for line in nan_losses[:_MAX_QUOTED_LINES]] + end_evidence)
    if termination.signal is not None:
        return _make_finding("crashed", end_evidence + _unknown_evidence(termination, matches))
    nonempty_lines = [line for line in lines if line.text.strip()]
    quoted = [_quote(line) for line in nonempty_lines[-_NUM_LAST_LINES:]]
    if termination.exit_code is None and termination.source:
        end_line = Evidence(text="its end was seen, its exit code was not", source=termination.source)
        return _make_finding("exit_code_unknown", [end_line, *quoted])
    if termination.exit_code is None:
        return _make_finding("ended_without_record", end_evidence + quoted + _unknown_evidence(termination, matches))
    return _make_finding("ended_by_error", quoted + end_evidence + _unknown_evidence(termination, matches))


def _finding_from_matches(termination: Termination, failure_matches: list[_Match], matches: list[_Match]) -> Finding:
    """The most specific cause of those said, the newest line of it first."""
    failure_ids = list(FAILURE_SIGNATURES)
    failure = min((match.failure for match in failure_matches), key=lambda failure: failure_ids.index(failure.id))
    newest_lines = [match.line for match in reversed(failure_matches) if match.failure is failure]
    lines = list(dict.fromkeys([*newest_lines, *(match.line for match in matches if match.failure is failure)]))
    evidence = [_quote(line) for line in lines[:_MAX_QUOTED_LINES]]
    if failure.id == "collective_timeout":
        evidence += _rank_evidence(lines)
    return _make_finding(failure.id, evidence + _end_evidence(termination))


def _was_hanging(termination: Termination) -> bool:
    hang = termination.hang
    if hang is None or hang.duration_s < MIN_HANG_S:
        return False
    return hang.main_thread_state == "comm" or (hang.cpu_cores is not None and hang.cpu_cores < MAX_HANG_CORES)


def _hang_evidence(termination: Termination) -> list[Evidence]:
    """Where it stood, and for how long."""
    hang = termination.hang
    if hang is None:
        return []
    evidence = [Evidence(text=f"no step and no line of output in its last {hang.duration_s:.0f} s", value=hang.duration_s,
                      source=hang.source)]  # fmt: skip
    if hang.cpu_cores is not None:
        text = f"its processes used {hang.cpu_cores:.2f} cores meanwhile"
        evidence.append(Evidence(text=text, value=hang.cpu_cores, source=termination.samples_source))
    if hang.frame:
        evidence.append(Evidence(text=f"the main thread was in {hang.frame}", source=hang.stacks_source))
    return evidence


def _other_findings(termination: Termination, matches: list[_Match], reported_ids: set[str]) -> list[Finding]:
    """Other causes that were named, of which the verdict took none: by how specific they are."""
    findings = []
    for failure in FAILURE_SIGNATURES.values():
        lines = [match.line for match in matches if match.failure is failure and not match.log_pattern.harmless]
        if lines and failure.id not in reported_ids:
            note = Evidence(text="said in the output; not what ended it, as far as the end shows")
            findings.append(
                _make_finding(
                    failure.id, [*(_quote(line) for line in lines[-_MAX_QUOTED_LINES:]), note], severity="info"
                )
            )
    fault_lines = [line for line in termination.kernel_log if _xid_pid(line.text) is not None]
    if fault_lines and "gpu_fault" not in reported_ids:
        names_this_job = any(_xid_pid(line.text) in termination.pids for line in fault_lines)
        evidence = [_quote(line) for line in fault_lines[-_MAX_QUOTED_LINES:]]
        if not names_this_job:
            evidence.append(Evidence(text="not known: whether it was this job's; the lines name no process of it"))
        findings.insert(0, _make_finding("gpu_fault", evidence, severity="critical" if names_this_job else "warning"))
    elif "gpu_fault" not in reported_ids:
        xid_lines = [line for line in termination.xids if not _SECONDARY_XIDS.search(line.text)]
        if xid_lines:
            findings.insert(0, _make_finding("gpu_fault", [_quote(line) for line in xid_lines[-_MAX_QUOTED_LINES:]]))
    return findings


def _find_matches(lines: tuple[LogLine, ...]) -> list[_Match]:
    """Each line counts for the most specific row that knows it."""
    stripped_lines = [strip_rank_prefix(line.text) for line in lines]
    matches = []
    for index in sorted(_candidate_line_indices(stripped_lines)):
        for failure in FAILURE_SIGNATURES.values():
            log_pattern = next(
                (
                    log_pattern
                    for log_pattern in failure.log_patterns
                    if log_pattern.regex.search(stripped_lines[index])
                ),
                None,
            )
            if log_pattern is not None:
                matches.append(_Match(failure, log_pattern, lines[index], index))
                break
    return (
        _check_traceback_ends(matches, lines)
        if any(match.log_pattern.traceback_end is not None for match in matches)
        else matches
    )


def _check_traceback_ends(matches: list[_Match], lines: tuple[LogLine, ...]) -> list[_Match]:
    """Those whose traceback has to end in some way stay where it does, and have its last line, too."""
    confirmed = {
        last: match
        for match in matches
        if match.log_pattern.traceback_end is not None
        for start, last in find_tracebacks(lines)
        if start <= match.line_index <= last and match.log_pattern.traceback_end.search(lines[last].text) is not None
    }
    retained = [
        match
        for match in matches
        if match.line_index not in confirmed
        and (match.log_pattern.traceback_end is None or match in confirmed.values())
    ]
    retained += [dataclasses.replace(match, line=lines[last], line_index=last) for last, match in confirmed.items()]
    return sorted(retained, key=lambda match: match.line_index)


def _candidate_line_indices(stripped_lines: list[str]) -> set[int]:
    """Places of the lines that any sign may know, and of few others: each sign looks through all lines as one text,
    which most are not in, ten times as fast as through one line after the other."""
    joined = "\n".join(stripped_lines)
    line_ends = list(itertools.accumulate(len(text) + 1 for text in stripped_lines))
    indices: set[int] = set()
    for failure in FAILURE_SIGNATURES.values():
        for log_pattern in failure.log_patterns:
            match = log_pattern.regex.search(joined)
            while match is not None:
                index = bisect.bisect_right(line_ends, match.start())
                indices.add(index)  # where it also matches across lines, the line alone decides
                match = log_pattern.regex.search(joined, line_ends[index])
    return indices


_RANK_PATTERN = re.compile(r"\brank\s?(\d+)", re.IGNORECASE)


def _rank_evidence(lines: list[LogLine]) -> list[Evidence]:
    ranks = sorted(
        {int(match[1]) for line in lines if (match := _RANK_PATTERN.search(line.text)) and len(match[1]) < 10}
    )
    if not ranks:
        return [Evidence(text="not known: which rank waited; the lines do not say")]
    return [Evidence(text=f"reported by rank {', '.join(map(str, ranks))}, which waited for another one")]


def _killed_pid(text: str) -> int | None:
    """Of a line of the kernel's out-of-memory killer (mm/oom_kill.c: "Killed process %d (%s)")."""
    match = re.search(r"Killed process (\d{1,9})\b", text)
    return int(match[1]) if match else None


def _xid_pid(text: str) -> int | None:
    """The process that an Xid line names, 0 where it names none; None: no such line."""
    if not re.search(r"NVRM: Xid \(", text):
        return None
    match = re.search(r"pid='?(\d{1,9})\b", text)
    return int(match[1]) if match else 0


def _end_evidence(termination: Termination) -> list[Evidence]:
    """The numbers that are known of its end."""
    evidence = []
    signal_number = termination.signal
    if signal_number is not None:
        name = signal.Signals(signal_number).name if signal_number in set(signal.Signals) else f"signal {signal_number}"
        evidence.append(Evidence(text=f"ended by {name}", value=float(signal_number), source=termination.source))
    elif termination.exit_code is not None:
        text = f"ended with exit code {termination.exit_code}"
        evidence.append(Evidence(text=text, value=float(termination.exit_code), source=termination.source))
    for description, fraction in (
        ("host memory", termination.memory_fraction), ("GPU memory", termination.gpu_memory_fraction), ("/dev/shm", termination.shm_fraction),
    ):  # fmt: skip
        if fraction is not None and fraction >= NEARLY_FULL_FRACTION:
            text = f"{description} was {100 * fraction:.0f} % full in the last sample"
            evidence.append(Evidence(text=text, value=fraction, source=termination.samples_source))
    return evidence


def _unknown_evidence(termination: Termination, matches: list[_Match]) -> list[Evidence]:
    """What an abstaining finding lacks, and the lines that may be harmless."""
    hints = [match.line for match in matches if match.log_pattern.harmless and match.failure.id != "trained_on_cpu"]
    evidence = [_quote(line, "may be harmless: ") for line in hints[-_MAX_QUOTED_LINES:]]
    unknown_names = [
        name
        for name, missing in (
            ("its exit code or signal", termination.exit_code is None),
            ("its output", not termination.output),
            (
                "whether the kernel killed it for memory",
                termination.oom_kills is None and termination.signal in (None, _SIGKILL),
            ),
        )
        if missing
    ]
    if unknown_names and (termination.signal is not None or termination.exit_code is None):
        evidence.append(Evidence(text="not known: " + ", ".join(unknown_names)))
    return evidence


def _empty_input_evidence(termination: Termination) -> list[Evidence]:
    return [Evidence(text="0 bytes", value=0.0, source=path) for path in termination.empty_inputs[:_MAX_QUOTED_LINES]]


def _quote(line: LogLine, prefix: str = "") -> Evidence:
    text = line.text.strip()
    return Evidence(
        text=prefix + (text if len(text) <= _MAX_QUOTED_CHARS else text[:_MAX_QUOTED_CHARS] + " …"), source=line.source
    )


def _make_finding(failure_id: str, evidence: list[Evidence], *, severity: str | None = None) -> Finding:
    failure = FAILURE_SIGNATURES[failure_id]
    return Finding(
        cause=failure_id, severity=severity or failure.severity, title=failure.title, evidence=evidence, fix=failure.fix
    )
