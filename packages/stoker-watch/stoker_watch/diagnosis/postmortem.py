"""What ended a job: what is known of its end in, findings out, each with the line or number that it rests on.

`explain` is a pure function of a `Termination`; `termination.py` reads that from a run, `endings.py` reads the lines of
any job's output. The ways to end and their patterns are data: `knowledge/endings.toml`. Nothing is guessed: without
proof the finding describes how the job ended and what is not known. Causes of lost time are in `causes/`.
"""

import bisect
import dataclasses
import itertools
import re
import signal

import msgspec

from stoker_watch.diagnosis.causes.host import DISK_NEARLY_FULL
from stoker_watch.diagnosis.causes.shared import make_evidence
from stoker_watch.diagnosis.ending_details import name_memory_holders, name_package, name_place
from stoker_watch.diagnosis.endings import (
    SECONDARY_ERROR,
    UNEXPLAINED,
    Ending,
    LinePattern,
    drop_ignored_exceptions,
    endings,
    find_exploded_losses,
    find_losses,
    find_non_finite_losses,
    find_normal_end,
    find_overflows,
    find_progress,
    find_recurring_non_finite_losses,
    find_thread_exceptions,
    find_tracebacks,
    has_open_traceback,
    is_exception_line,
    line_patterns,
    strip_rank_prefix,
)
from stoker_watch.diagnosis.run_data import LogLine, Termination
from stoker_watch.findings.finding import Evidence, Finding, Severity

NEARLY_FULL_FRACTION = 0.95
"""Fraction of a memory limit in the last sample, or with its growth in the next one, from which a kill without a
message is attributed to it. Heuristic: samples are at most a second old, and the rest is room for a batch or two."""
_FULL_FILE = re.compile(r"No space left on device: \S")
_MAX_QUOTED_CHARS = 500
"""Quoted characters of a line."""
_MAX_QUOTED_LINES = 3
"""Quoted lines of a failure."""
_NUM_LAST_LINES = 5
"""Quoted last lines if the failure is not known: an error of stoker has as many."""
_SIGKILL, _SIGTERM, _SIGINT = 9, 15, 2
_PREEMPTED_EXIT_CODE = 75
"""Exit code of stoker's own runs after a request to stop (errors.Preempted)."""
MIN_HANG_S = 300.0
"""Time without progress before a kill from which on it was a hang. Heuristic: longer than any batch, shorter than the
timeouts of collectives (10 to 30 minutes). A silent download looks the same, so the evidence names the stack frame."""
MAX_HANG_CORES = 0.05
"""CPU-seconds per second of the whole job below which it did nothing; an idle interpreter takes less."""
MIN_SILENT_S = 30.0
"""Time without output before a kill from which on an empty input file was the cause."""
_GPU_REMARKS = ("trained_on_cpu", "no_gpu_driver")
"""Remarks that say nothing of a job that used a GPU after all."""
_MIN_PROGRESS_LINES = 3
"""Lines of progress after a failure from which on the job had continued. Heuristic: other ranks print one or two more
before they wait for the one that failed."""
_INFO_LEVEL = re.compile(r"\b(INFO|DEBUG)\b(?!.{0,20}Error reported to Coordinator)")
_PYTHON_WARNING = re.compile(r".{0,400}:\d{1,7}: \w{1,60}Warning: ")
"""As Python prints one: file, line, class."""
_FRAME = re.compile(r'^\s*File ".{1,400}", line \d+, in (.+)$')
_PROGRAM_FRAMES = ("<module>", "_run_module_as_main")
"""Functions in which the traceback of an exception begins that a program has not handled."""
_MAX_SCRIPT_LINES = 20
"""Lines that a script prints after a program of it has failed (heuristic)."""
_MAX_PEER_PROGRESS_LINES = 20
"""Lines of progress that the other processes may print after a failure before they end for it (heuristic)."""
_MIN_LAST_RETRIES = 5
"""Retries with which an output ends from which on they are why it does not go on (heuristic)."""
_SHELL_ERROR = re.compile(r"\S{1,200}: line \d{1,9}: ")
"""`script.sh: line 13: activate: No such file or directory`, as bash prints it."""
_RETRIED = re.compile(r"(?i)\bretrying\b|\bwill be (automatically )?retried\b")
_MAX_LEVEL_CHARS = 80
"""Characters of a line in which its level is. A failure at level INFO did not end the job."""
_TRAINING_EXCEPTION = "Exception during training:"
"""detectron2 prints this, the exception, and then the last lines of a training that ended well."""
_ERROR_LINE = re.compile(r"^\s*(\w{1,100}\.){0,20}\w{0,100}(Error|Exception)(:|$)")
"""The last line of a traceback."""
_KILLED = re.compile(r"Killed process (\d{1,9})\b")
"""A line of the kernel's out-of-memory killer (mm/oom_kill.c: "Killed process %d (%s)")."""
_SECONDARY_XIDS = re.compile(r"\bXid 4[35]\b")
"""What the driver reports of a program that ended or failed by itself."""
_EXPLODED_TITLE = "The loss exploded, and did not fall again"
_RECURRING_TITLE = "The loss is NaN or infinite again and again"
_RECURRING_FIX = (
    "Print the names of the images in such a step: some have boxes without width or height, labels out of range or no "
    "boxes, of which a logarithm, a quotient or a root is not finite; drop them, or clamp what is divided"
)
_SUSPICIOUS = re.compile(
    r"(?i)\b(error(?!\W{0,5}\d)|fatal|fail(ed|ure)|cannot|could ?n[o']t|unable to|denied|refused|exceeded|aborted"
    r"|killed|corrupt\w*|check failed|no such|not (compatible|available|found)|blocked by|mismatch\w*)\b"
)
_NUM_SEARCHED_LINES = 40
"""Last lines in which `explain_unknown` looks (heuristic)."""


@dataclasses.dataclass(frozen=True)
class _Match:
    pattern: LinePattern
    line: LogLine
    line_index: int
    """Index of the line in the output."""

    @property
    def ending(self) -> Ending:
        return self.pattern.ending


def explain(termination: Termination) -> list[Finding]:
    """What ended the job first, then other failures in its output. Empty if it ended well."""
    termination = dataclasses.replace(termination, output=drop_ignored_exceptions(termination.output))
    matches = _find_matches(termination.output)
    losses = find_losses(termination.output)
    bad_losses = find_non_finite_losses(losses) or find_overflows(termination.output)
    normal_end = _find_normal_end(termination, matches)
    findings: list[Finding] = []
    script_went_on = False
    if normal_end is not None:
        text = "its output ends as that of a job that finished"
        evidence = [_quote(normal_end), make_evidence(text, source=normal_end.source)]
        findings = [_make_finding("ended_without_record", evidence, severity="info")]
    elif (
        termination.exit_code != 0
        or _ends_in_traceback(termination.output)
        or (script_went_on := _script_went_on(termination.output))
    ):
        findings = _explain_end(termination, matches, bad_losses)
        if findings[0].id in UNEXPLAINED and termination.handled_error and not find_tracebacks(termination.output):
            output = (*termination.output, *termination.handled_error)
            return explain(dataclasses.replace(termination, output=output, handled_error=()))
        findings = [_name_full_device(termination, name_memory_holders(finding)) for finding in findings]
        findings = [name_place(termination.output, name_package(finding)) for finding in findings]
        if script_went_on:
            text = "the job went on after it, as a script does, and ended with exit code 0"
            findings = [
                msgspec.structs.replace(
                    finding, evidence=[*finding.evidence, make_evidence(text)],
                    severity="warning" if finding.severity == "critical" else finding.severity,
                )
                for finding in findings
            ]  # fmt: skip
    if bad_losses and all(finding.id != "diverged" for finding in findings):
        findings.insert(
            0 if normal_end is not None else len(findings), _make_finding("diverged", _quote_lines(bad_losses))
        )
    recurring, num_losses = find_recurring_non_finite_losses(losses)
    if recurring and all(finding.id != "diverged" for finding in findings):
        text = f"the loss was not finite in {len(recurring)} of {num_losses} lines"
        finding = _make_finding("diverged", [make_evidence(text), *_quote_lines(recurring)], severity="warning")
        findings.append(msgspec.structs.replace(finding, title=_RECURRING_TITLE, fix=_RECURRING_FIX))
    exploded = find_exploded_losses(losses) if not termination.source and not bad_losses else []
    if exploded and all(finding.id != "diverged" for finding in findings):
        finding = _make_finding("diverged", _quote_lines(exploded))
        findings.append(msgspec.structs.replace(finding, title=_EXPLODED_TITLE))
    remarks = {match.ending.id: match.ending for match in matches if match.ending.role == "remark"}
    for remark in sorted(remarks.values(), key=_rank):
        is_expected = remark.id in _GPU_REMARKS and (normal_end is not None or termination.gpu_used)
        if not is_expected:
            remark_lines = [match.line for match in matches if match.ending is remark]
            findings.append(_make_finding(remark.id, _quote_lines(remark_lines)))
    is_unknown = not termination.source and findings and findings[0].id == "ended_without_record"
    if termination.exit_code != 0 and not is_unknown:
        findings += _other_findings(termination, matches, {finding.id for finding in findings})
    return findings


def explain_unknown(output: tuple[LogLine, ...]) -> list[Finding]:
    """For a log that no pattern explains and that does not end as a finished job's: what it may be, as info. A line
    that is harmless in most jobs comes with what it means in others."""
    if find_normal_end(output) is not None:
        return []
    lines = tuple(line for line in output if line.text.strip())
    progress = find_progress(lines)
    since = max(len(lines) - _NUM_SEARCHED_LINES, progress[-1] if progress else 0)
    last = lines[since:]
    found = [match for match in _find_matches(last) if match.ending.role == "fault" and match.pattern.harmless]
    note = make_evidence("not proved: jobs that go on print this too")
    if found:
        return [_make_finding(found[-1].ending.id, [_quote(found[-1].line), note], severity="info")]
    suspicious = [
        line
        for index, line in enumerate(last)
        if since + index not in progress and _SUSPICIOUS.search(line.text) and not _reports_no_failure(line.text)
    ]
    return [_make_finding("error_lines", [*_quote_lines(suspicious), note])] if suspicious else []


def explain_hang(output: tuple[LogLine, ...], *, has_stepped: bool) -> list[Finding]:
    """What the output of a job that lives says since the progress before its last, where that is a known failure: the
    last may be the line of a bar, which is written again and again. A job that took steps was not stopped by what it
    printed before its only line of progress."""
    progress = find_progress(output)
    start = progress[-2] if len(progress) > 1 else progress[0] if progress and has_stepped else 0
    lines = drop_ignored_exceptions(output[start:])
    return [
        _make_finding(ending_id, _quote_lines(quoted))
        for ending_id, quoted in _faults_by_ending(_find_matches(lines)).items()
        if ending_id not in UNEXPLAINED
    ]


def _find_normal_end(termination: Termination, matches: list[_Match]) -> LogLine | None:
    """The line of a normal end, if the end itself is not recorded and nothing after the line speaks against it."""
    if termination.exit_code is not None or termination.source:
        return None
    index = find_normal_end(termination.output)
    if index is None:
        return None
    progress = find_progress(termination.output[:index])
    last_progress = progress[-1] if progress else 0
    if any(_TRAINING_EXCEPTION in line.text for line in termination.output[last_progress:index]):
        return None
    thread_exceptions = find_thread_exceptions(termination.output)
    has_failed = any(
        match.line_index > index
        and not match.pattern.harmless
        and match.ending.id != "peer_ended"
        and not any(start <= match.line_index <= last for start, last in thread_exceptions)
        for match in matches
    ) or any(span[0] > index and span not in thread_exceptions for span in find_tracebacks(termination.output))
    return None if has_failed else termination.output[index]


def _ends_in_traceback(lines: tuple[LogLine, ...]) -> bool:
    """Whether an exception is the last that was printed: a job that catches it, logs it (`logger.catch`) and ends with
    exit code 0 has failed as well. One in another thread does not end the job."""
    last = next((index for index in range(len(lines) - 1, -1, -1) if lines[index].text.strip()), -1)
    spans = find_tracebacks(lines)
    is_main = bool(spans) and spans[-1] not in find_thread_exceptions(lines)
    return is_main and spans[-1][1] == last and is_exception_line(lines[last].text)


def _script_went_on(lines: tuple[LogLine, ...]) -> bool:
    """Whether a program of the job ended by an exception that it did not handle, and something else, as the script that
    had started it, printed a little more. One that is handled and printed seldom begins in a module (heuristic)."""
    spans = find_tracebacks(lines)
    if not spans or spans[-1] in find_thread_exceptions(lines) or not is_exception_line(lines[spans[-1][1]].text):
        return False
    start, last = spans[-1]
    later = lines[last + 1 :]
    functions = (frame[1] for line in lines[start:last] if (frame := _FRAME.search(line.text)))
    return next(functions, "") in _PROGRAM_FRAMES and len(later) <= _MAX_SCRIPT_LINES and not find_progress(later)


def _name_full_device(termination: Termination, finding: Finding) -> Finding:
    """The finding of a full disk as one of shared memory, where only that was full and no line names a file."""
    free_bytes, shm = termination.disk_free_bytes, termination.shm_fraction
    names_file = any(_FULL_FILE.search(item.text) for item in finding.evidence)
    if finding.id != "disk_full" or names_file or free_bytes is None or shm is None or shm < NEARLY_FULL_FRACTION:
        return finding
    if DISK_NEARLY_FULL.severity(free_bytes) is not None:
        return finding
    text = f"the disk of the run had {free_bytes / 2**30:,.1f} GiB free"
    found = _make_finding("shared_memory_full", finding.evidence)
    found.evidence.append(make_evidence(text, free_bytes, termination.samples_source))
    return found


def _explain_end(termination: Termination, matches: list[_Match], bad_losses: list[LogLine]) -> list[Finding]:
    """What ended a job that did not end well: a fault in its output before a request to stop."""
    verdict = _explain_signal(termination, matches)
    if verdict is not None and verdict.id != "killed" and endings()[verdict.id].role != "stop":
        return [verdict]
    reasons = _find_reasons(termination, matches, bad_losses)
    if verdict is None:
        return reasons or [_explain_last_lines(termination, matches)]
    reasons = [finding for finding in reasons if endings()[finding.id].role != "consequence"]
    if verdict.id == "killed":
        return reasons or [verdict]
    return reasons if any(endings()[finding.id].role == "stop" for finding in reasons) else [*reasons, verdict]


def _explain_signal(termination: Termination, matches: list[_Match]) -> Finding | None:
    """The finding if a signal ended the job: its output does not contain the reason then."""
    signal_number = termination.signal
    end_evidence = _end_evidence(termination)
    oom_lines = [
        line
        for line in termination.kernel_log
        if (killed := _KILLED.search(line.text)) is not None and int(killed[1]) in termination.pids
    ]
    if oom_lines:
        return _make_finding("oom_killed", _quote_lines(oom_lines) + end_evidence)
    if signal_number == _SIGKILL and termination.oom_kills:
        text = f"the kernel killed {termination.oom_kills} processes of the job's cgroup for memory"
        kills_evidence = make_evidence(text, termination.oom_kills, "memory.events: oom_kill")
        return _make_finding("oom_killed", [kills_evidence, *end_evidence])
    ended_silently = signal_number == _SIGKILL or (termination.exit_code is None and not termination.output)
    if ended_silently and termination.oom_kills is None and (memory_evidence := _memory_full_evidence(termination)):
        unproved = make_evidence("not proved: the kernel's kills were not counted (memory.events: oom_kill)")
        return _make_finding("oom_killed", [*memory_evidence, *end_evidence, unproved], severity="warning")
    was_stopped = signal_number in (_SIGKILL, _SIGTERM, _SIGINT)
    silent_s = termination.hang.duration_s if termination.hang is not None else None
    was_silent = signal_number == _SIGKILL if silent_s is None else silent_s >= MIN_SILENT_S
    if termination.empty_inputs and was_stopped and was_silent:
        empty = [make_evidence("0 bytes", 0.0, path) for path in termination.empty_inputs[:_MAX_QUOTED_LINES]]
        return _make_finding("empty_shard", [*empty, *_hang_evidence(termination), *end_evidence])
    if was_stopped and _was_hanging(termination):
        return _make_finding("hang", [*_hang_evidence(termination), *end_evidence])
    if signal_number == _SIGKILL:
        not_memory = "the kernel counted no kill for memory in the job's cgroup: another process sent the signal"
        counted = [make_evidence(not_memory, 0.0, termination.source)] if termination.oom_kills == 0 else []
        return _make_finding("killed", end_evidence + counted + _unknown_evidence(termination, matches))
    if signal_number == _SIGTERM or termination.exit_code == _PREEMPTED_EXIT_CODE:
        return _make_finding("preempted", end_evidence)
    if signal_number == _SIGINT:
        return _make_finding("interrupted", end_evidence)
    shm_was_full = (termination.shm_fraction or 0.0) >= NEARLY_FULL_FRACTION
    found = signal_number == signal.SIGBUS and shm_was_full
    return _make_finding("shared_memory_full", end_evidence) if found else None


def _memory_full_evidence(termination: Termination) -> list[Evidence]:
    """The host's memory was nearly full, or would have been before the next sample; else empty."""
    fraction, growth = termination.memory_fraction, termination.memory_growth
    if fraction is None or fraction + growth < NEARLY_FULL_FRACTION:
        return []
    if fraction >= NEARLY_FULL_FRACTION:
        return [make_evidence("it ended while the host's memory was full", fraction, termination.samples_source)]
    text = (
        f"the host's memory was {100 * fraction:.0f} % full in the last sample, {100 * growth:.0f} points more than in "
        "the one before: at this rate it was nearly full before the next sample"
    )
    return [make_evidence(text, fraction, termination.samples_source)]


def _find_reasons(termination: Termination, matches: list[_Match], bad_losses: list[LogLine]) -> list[Finding]:
    """What the output says of the end: a fault, then the request to stop that came after it. Empty: nothing."""
    lines = termination.output
    progress = find_progress(lines)
    last_retries, shell_step = _find_last_retries(lines), _last_shell_step(lines)
    decisive = [
        match
        for match in matches
        if not match.pattern.harmless
        and (
            match.ending.role == "stop" or match.line_index >= last_retries or not _reports_no_failure(match.line.text)
        )
        and not (match.line_index < shell_step and _SHELL_ERROR.match(match.line.text))
    ]
    spans = find_tracebacks(lines)
    late = [match for match in decisive if not _was_survived(lines, match.line_index, progress, spans)]
    stops = [match for match in late if match.ending.role == "stop"]
    first_stop = min((match.line_index for match in stops), default=len(lines))
    before = [match for match in decisive if match.ending.role != "stop" and match.line_index < first_stop]
    fault = _find_fault(termination, before, matches, progress, spans, first_stop)
    if fault is None and bad_losses:
        fault = _make_finding("diverged", _quote_lines(bad_losses) + _end_evidence(termination))
    stop = [_finding_from_matches(termination, stops, matches)] if stops else []
    if fault is None and not stop:
        counting = decisive if termination.exit_code is not None else late
        consequences = [match for match in counting if match.ending.role == "consequence"]
        if not consequences:
            return []
        own_faults = [
            match
            for match in decisive
            if match.ending.role == "fault" and _num_progress(progress, match.line_index) <= _MAX_PEER_PROGRESS_LINES
        ]
        is_of_another = all(match.ending.about_another_process for match in consequences)
        chosen = own_faults if is_of_another and own_faults else consequences
        return [_finding_from_matches(termination, chosen, matches)]
    return [fault, *stop] if fault is not None else stop


def _find_last_retries(lines: tuple[LogLine, ...]) -> int:
    """Index of the first of the retries with which an output ends; one after the last line, if they are too few."""
    first, count = len(lines), 0
    for index in range(len(lines) - 1, -1, -1):
        if lines[index].text.strip():
            if not _RETRIED.search(lines[index].text):
                break
            first, count = index, count + 1
    return first if count >= _MIN_LAST_RETRIES else len(lines)


def _last_shell_step(lines: tuple[LogLine, ...]) -> int:
    """Index of a line after which there are so few that are no errors of a shell that an error of one may be what ended
    its script; an earlier one was passed."""
    others = (index for index in range(len(lines) - 1, -1, -1)
              if lines[index].text.strip() and not _SHELL_ERROR.match(lines[index].text))  # fmt: skip
    return next(itertools.islice(others, _MIN_PROGRESS_LINES - 1, None), 0)


def _reports_no_failure(text: str) -> bool:
    """Whether a line says itself that the job went on: its level, or that it tries again."""
    is_info = _INFO_LEVEL.search(text[:_MAX_LEVEL_CHARS]) is not None or _PYTHON_WARNING.match(text) is not None
    return is_info or _RETRIED.search(text) is not None


def _num_progress(progress: list[int], line_index: int) -> int:
    return len(progress) - bisect.bisect_right(progress, line_index)


def _was_survived(
    lines: tuple[LogLine, ...], line_index: int, progress: list[int], spans: list[tuple[int, int]]
) -> bool:
    """Whether the job continued after a line. progress: indices of the lines that report progress. spans: of the
    tracebacks. Before the first progress a single line suffices if it is not of a traceback, which may be cut off or
    mixed with those of other ranks: the ranks start together."""
    num_after = _num_progress(progress, line_index)
    is_raised = is_exception_line(lines[line_index].text) or any(a <= line_index <= b for a, b in spans)
    is_start_up = num_after == len(progress) and not is_raised
    return num_after >= (1 if is_start_up else _MIN_PROGRESS_LINES)


def _find_fault(
    termination: Termination,
    decisive: list[_Match],
    matches: list[_Match],
    progress: list[int],
    all_spans: list[tuple[int, int]],
    end: int,
) -> Finding | None:
    """The fault in the lines before `end`: those after the last traceback, then the tracebacks from the last one on,
    then all lines. An error that only reports the end of another process does not decide, and neither does an unknown
    one, or a crash, if a known failure was logged before it."""
    lines = termination.output
    faults = all_faults = [match for match in decisive if match.ending.role == "fault"]
    late_faults = [match for match in faults if not _was_survived(lines, match.line_index, progress, all_spans)]
    spans = [span for span in all_spans if span[0] < end]
    if end < len(lines) or termination.signal in (_SIGKILL, _SIGTERM, _SIGINT) or termination.exit_code is None:
        faults = late_faults  # the job continued after the others
        spans = [span for span in spans if not _was_survived(lines, span[1], progress, all_spans)]
    for number in range(len(spans) - 1, -1, -1):
        start, last = spans[number]
        crashes: list[_Match] = []
        for begin, stop in ((last + 1, end), (start, last + 1)):
            found = [match for match in faults if begin <= match.line_index < stop]
            if any(match.ending.id not in UNEXPLAINED for match in found):
                if all(match.ending.id == "device_assert" for match in found):  # the kernel itself says it better
                    found += [match for match in late_faults if "Assertion `" in match.line.text]
                return _finding_from_matches(termination, found, matches)
            crashes += found
        above = spans[number - 1][1] if number else -1
        logged = [match for match in late_faults if above < match.line_index < start] or crashes
        if logged:
            return _finding_from_matches(termination, logged, matches)
        if any(
            above < match.line_index
            and not match.ending.about_another_process
            and not _was_survived(lines, match.line_index, progress, all_spans)
            for match in decisive
        ):
            return None
        is_secondary = any(start <= match.line_index <= last for match in decisive)
        if not is_secondary and not SECONDARY_ERROR.search(strip_rank_prefix(lines[last].text)):
            evidence = [_quote(lines[last]), *_end_evidence(termination), *_unknown_evidence(termination, matches)]
            return _make_finding("ended_by_error", evidence)
        end = start
    if spans:
        return None
    if not faults and has_open_traceback(lines):
        # What it ends with is cut off; the assertion of a kernel comes before it.
        faults = [
            match for match in all_faults if _num_progress(progress, match.line_index) <= _MAX_PEER_PROGRESS_LINES
        ]
    if faults:
        return _finding_from_matches(termination, late_faults or faults, matches)
    if any(match.ending.role == "consequence" for match in decisive):
        return None
    last_lines = range(max(0, end - _NUM_LAST_LINES), end)
    errors = [
        lines[n]
        for n in last_lines
        if _ERROR_LINE.search(lines[n].text) and not _was_survived(lines, n, progress, all_spans)
    ]
    return _make_finding("ended_by_error", [_quote(errors[-1]), *_end_evidence(termination)]) if errors else None


def _explain_last_lines(termination: Termination, matches: list[_Match]) -> Finding:
    """The finding if nothing in the output is known."""
    end_evidence = _end_evidence(termination)
    if termination.signal is not None:
        return _make_finding("crashed", end_evidence + _unknown_evidence(termination, matches))
    nonempty_lines = [line for line in termination.output if line.text.strip()]
    quoted = [_quote(line) for line in nonempty_lines[-_NUM_LAST_LINES:]]
    if termination.exit_code is None and termination.source:
        end_line = make_evidence("its end is recorded, its exit code is not", source=termination.source)
        return _make_finding("exit_code_unknown", [end_line, *quoted])
    if termination.exit_code is None:
        return _make_finding("ended_without_record", end_evidence + quoted + _unknown_evidence(termination, matches))
    return _make_finding("ended_by_error", quoted + end_evidence + _unknown_evidence(termination, matches))


def _finding_from_matches(termination: Termination, ending_matches: list[_Match], matches: list[_Match]) -> Finding:
    """The most specific of the matching failures, its newest line first."""
    ending = min((match.ending for match in ending_matches), key=_rank)
    newest_lines = [match.line for match in reversed(ending_matches) if match.ending is ending]
    lines = list(dict.fromkeys([*newest_lines, *(match.line for match in matches if match.ending is ending)]))
    evidence = _quote_lines(lines)
    return _make_finding(ending.id, evidence + _end_evidence(termination))


def _rank(ending: Ending) -> int:
    """Place in the catalog, from the more to the less specific."""
    return list(endings()).index(ending.id)


def _was_hanging(termination: Termination) -> bool:
    hang = termination.hang
    if hang is None or hang.duration_s < MIN_HANG_S:
        return False
    return hang.main_thread_state == "comm" or (hang.cpu_cores is not None and hang.cpu_cores < MAX_HANG_CORES)


def _hang_evidence(termination: Termination) -> list[Evidence]:
    hang = termination.hang
    if hang is None:
        return []
    text = f"no step and no line of output in its last {hang.duration_s:.0f} s"
    evidence = [make_evidence(text, hang.duration_s, hang.source)]
    if hang.cpu_cores is not None:
        text = f"its processes used {hang.cpu_cores:.2f} cores meanwhile"
        evidence.append(make_evidence(text, hang.cpu_cores, termination.samples_source))
    if hang.frame:
        evidence.append(make_evidence(f"the main thread was in {hang.frame}", source=hang.stacks_source))
    return evidence


def _other_findings(termination: Termination, matches: list[_Match], reported_ids: set[str]) -> list[Finding]:
    findings = []
    for ending_id, lines in _faults_by_ending(matches).items():
        if ending_id not in reported_ids:
            note = make_evidence("in the output; not what ended it, as far as its end shows")
            evidence = [*_quote_lines(lines[-_MAX_QUOTED_LINES:]), note]
            findings.append(_make_finding(ending_id, evidence, severity="info"))
    fault_lines = [line for line in termination.kernel_log if _xid_pid(line.text) is not None]
    if fault_lines and "gpu_fault" not in reported_ids:
        names_this_job = any(_xid_pid(line.text) in termination.pids for line in fault_lines)
        evidence = _quote_lines(fault_lines[-_MAX_QUOTED_LINES:])
        if not names_this_job:
            evidence.append(make_evidence("not known: whether this job caused it; the lines name no process of it"))
        findings.insert(0, _make_finding("gpu_fault", evidence, severity="critical" if names_this_job else "warning"))
    elif "gpu_fault" not in reported_ids:
        xid_lines = [line for line in termination.xids if not _SECONDARY_XIDS.search(line.text)]
        if xid_lines:
            findings.insert(0, _make_finding("gpu_fault", _quote_lines(xid_lines[-_MAX_QUOTED_LINES:])))
    return findings


def _faults_by_ending(matches: list[_Match]) -> dict[str, list[LogLine]]:
    """Id of each failure → its lines, the most specific failure first."""
    faults = [match for match in matches if match.ending.role == "fault" and not match.pattern.harmless]
    endings_found = sorted({match.ending.id: match.ending for match in faults}.values(), key=_rank)
    return {ending.id: [match.line for match in faults if match.ending is ending] for ending in endings_found}


def _find_matches(lines: tuple[LogLine, ...]) -> list[_Match]:
    """Each line counts for the most specific failure with a matching pattern. Most patterns have a text that is nowhere
    in the output, and are not tried."""
    stripped_lines = [strip_rank_prefix(line.text) for line in lines]
    lowered = [text.lower() for text in stripped_lines]
    joined = "\n".join(lowered)
    possible = [pattern for pattern in line_patterns() if pattern.literal in joined]
    matches = []
    for index, (line, text) in enumerate(zip(stripped_lines, lowered, strict=True)):
        candidates = (pattern for pattern in possible if pattern.literal in text and pattern.regex.search(line))
        if (pattern := next(candidates, None)) is not None:
            matches.append(_Match(pattern, lines[index], index))
    has_ends = any(match.pattern.traceback_end is not None for match in matches)
    return _check_traceback_ends(matches, lines) if has_ends else matches


def _check_traceback_ends(matches: list[_Match], lines: tuple[LogLine, ...]) -> list[_Match]:
    """Removes matches whose traceback has to end differently; the others match the traceback's last line too."""
    confirmed = {
        last: match
        for match in matches
        if match.pattern.traceback_end is not None
        for start, last in find_tracebacks(lines)
        if start <= match.line_index <= last and match.pattern.ends_traceback(lines[last].text)
    }
    retained = [
        match
        for match in matches
        if match.line_index not in confirmed and (match.pattern.traceback_end is None or match in confirmed.values())
    ]
    retained += [dataclasses.replace(match, line=lines[last], line_index=last) for last, match in confirmed.items()]
    return sorted(retained, key=lambda match: match.line_index)


def _xid_pid(text: str) -> int | None:
    """The process that an Xid line names, 0 if it names none; None: not an Xid line."""
    if not re.search(r"NVRM: Xid \(", text):
        return None
    match = re.search(r"pid='?(\d{1,9})\b", text)
    return int(match[1]) if match else 0


def _end_evidence(termination: Termination) -> list[Evidence]:
    evidence = []
    signal_number = termination.signal
    if signal_number is not None:
        name = signal.Signals(signal_number).name if signal_number in set(signal.Signals) else f"signal {signal_number}"
        evidence.append(make_evidence(f"ended by {name}", float(signal_number), termination.source))
    elif termination.exit_code is not None:
        text = f"ended with exit code {termination.exit_code}"
        evidence.append(make_evidence(text, float(termination.exit_code), termination.source))
    for description, fraction in (
        ("host memory", termination.memory_fraction),
        ("GPU memory", termination.gpu_memory_fraction),
        ("/dev/shm", termination.shm_fraction),
    ):
        if fraction is not None and fraction >= NEARLY_FULL_FRACTION:
            text = f"{description} was {100 * fraction:.0f} % full in the last sample"
            evidence.append(make_evidence(text, fraction, termination.samples_source))
    return evidence


def _unknown_evidence(termination: Termination, matches: list[_Match]) -> list[Evidence]:
    """What is not known, and lines that may be harmless."""
    hints = [match.line for match in matches if match.pattern.harmless and match.ending.role != "remark"]
    evidence = [_quote(line, "may be harmless: ") for line in hints[-_MAX_QUOTED_LINES:]]
    maybe_killed = termination.oom_kills is None and termination.signal in (None, _SIGKILL)
    missing = {
        "its exit code or signal": termination.exit_code is None,
        "its output": not termination.output,
        "whether the kernel killed it for memory": maybe_killed,
    }
    unknown_names = [name for name, is_missing in missing.items() if is_missing]
    if unknown_names and (termination.signal is not None or termination.exit_code is None):
        evidence.append(make_evidence("not known: " + ", ".join(unknown_names)))
    return evidence


def _quote(line: LogLine, prefix: str = "") -> Evidence:
    text = line.text.strip()
    text = text if len(text) <= _MAX_QUOTED_CHARS else text[:_MAX_QUOTED_CHARS] + " …"
    return make_evidence(prefix + text, source=line.source)


def _quote_lines(lines: list[LogLine]) -> list[Evidence]:
    return [_quote(line) for line in lines[:_MAX_QUOTED_LINES]]


def _make_finding(ending_id: str, evidence: list[Evidence], *, severity: Severity | None = None) -> Finding:
    ending = endings()[ending_id]
    return Finding(
        id=ending_id, severity=severity or ending.severity, title=ending.title, evidence=evidence, fix=ending.fix
    )
