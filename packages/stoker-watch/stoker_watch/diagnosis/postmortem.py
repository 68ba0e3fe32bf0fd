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
from collections.abc import Mapping, Sequence

import msgspec

from stoker_watch.diagnosis.causes.host import DISK_NEARLY_FULL
from stoker_watch.diagnosis.causes.shared import make_evidence
from stoker_watch.diagnosis.end_facts import (
    MAX_QUOTED_LINES,
    NEARLY_FULL_FRACTION,
    STOPPED_BY,
    describe_end,
    find_end_facts,
    quote,
    quote_lines,
)
from stoker_watch.diagnosis.ending_details import name_graph_error, name_memory_holders, name_package, name_place
from stoker_watch.diagnosis.endings import (
    SECONDARY_ERROR,
    UNEXPLAINED,
    Ending,
    LinePattern,
    bound_repeats,
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

_FULL_FILE = re.compile(r"No space left on device: \S")
_NUM_LAST_LINES = 5
"""Quoted last lines if the failure is not known: an error of stoker has as many."""
_GPU_REMARKS = ("trained_on_cpu", "no_gpu_driver")
"""Remarks that say nothing of a job that used a GPU after all."""
_MIN_PROGRESS_LINES = 3
"""Lines of progress after a failure from which on the job had continued. Heuristic: other ranks print one or two more
before they wait for the one that failed."""
_INFO_LEVEL = re.compile(r"\b(INFO|DEBUG)\b(?!.{0,20}Error reported to Coordinator)")
_PYTHON_WARNING = re.compile(r".{0,400}:\d{1,7}: \w{1,60}Warning: ")
"""As Python prints one: file, line, class."""
_FRAME = re.compile(r'^\s*File ".{1,400}", line \d+, in (.+)$')
_QUOTED_FRAME = re.compile(r'^(\[rank\d{1,9}\]:)?[\s>]*File ".{1,400}", line \d+, in ')
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


class _Output:
    """The lines of a job's output, and what they show."""

    def __init__(self, lines: tuple[LogLine, ...]) -> None:
        self.lines = lines
        self.matches = _find_matches(lines)
        self.progress = find_progress(lines)
        self.tracebacks = find_tracebacks(lines)
        self.thread_exceptions = find_thread_exceptions(lines)
        self.losses = find_losses(lines)
        self.bad_losses = find_non_finite_losses(self.losses) or find_overflows(lines)

    def num_later_progress(self, index: int) -> int:
        return len(self.progress) - bisect.bisect_right(self.progress, index)

    def was_survived(self, index: int) -> bool:
        """Whether the job continued after a line. Before the first progress a single line of it suffices if the line is
        not of a traceback, which may be cut off or mixed with those of other ranks: the ranks start together."""
        num_later = self.num_later_progress(index)
        is_raised = is_exception_line(self.lines[index].text) or any(a <= index <= b for a, b in self.tracebacks)
        is_start_up = num_later == len(self.progress) and not is_raised
        return num_later >= (1 if is_start_up else _MIN_PROGRESS_LINES)

    def decisive(self) -> list[_Match]:
        """The matches that may be what ended the job: not those of lines that say themselves that it goes on."""
        last_retries, shell_step = _find_last_retries(self.lines), _last_shell_step(self.lines)
        return [
            match
            for match in self.matches
            if not match.pattern.harmless
            and (
                match.ending.role == "stop"
                or match.line_index >= last_retries
                or not _reports_no_failure(match.line.text)
            )
            and not (match.line_index < shell_step and _SHELL_ERROR.match(match.line.text))
        ]

    def make_finding(self, termination: Termination, matches: Sequence[_Match]) -> Finding:
        """The most specific of these failures, its newest line first."""
        ending = min((match.ending for match in matches), key=_rank)
        newest_lines = [match.line for match in reversed(matches) if match.ending is ending]
        lines = [*newest_lines, *(match.line for match in self.matches if match.ending is ending)]
        return _make_finding(ending.id, quote_lines(list(dict.fromkeys(lines))) + describe_end(termination))


def explain(termination: Termination) -> list[Finding]:
    """What ended the job first, then other failures in its output. Empty if it ended well."""
    output = _Output(drop_ignored_exceptions(termination.output))
    termination = dataclasses.replace(termination, output=output.lines)
    normal_end = _find_normal_end(termination, output)
    if normal_end is not None:
        text = "its output ends as that of a job that finished"
        evidence = [quote(normal_end), make_evidence(text, source=normal_end.source)]
        findings = [_make_finding("ended_without_record", evidence, severity="info")]
    else:
        findings = _explain_failure(termination, output)
    unexplained = normal_end is None and findings and findings[0].id in UNEXPLAINED
    if unexplained and termination.handled_error and not output.tracebacks:
        lines = (*termination.output, *termination.handled_error)
        return explain(dataclasses.replace(termination, output=lines, handled_error=()))
    if all(finding.id != "diverged" for finding in findings):
        diverged = [_as_variant(finding, output) for finding in _explain_losses(termination, output)]
        findings = [*diverged, *findings] if normal_end is not None and output.bad_losses else [*findings, *diverged]
    remarks = {match.ending.id: match.ending for match in output.matches if match.ending.role == "remark"}
    for remark in sorted(remarks.values(), key=_rank):
        is_expected = remark.id in _GPU_REMARKS and (normal_end is not None or termination.gpu_used)
        if not is_expected:
            quoted = quote_lines([match.line for match in output.matches if match.ending is remark])
            findings.append(_make_finding(remark.id, quoted))
    is_unknown = not termination.source and findings and findings[0].id == "ended_without_record"
    if termination.exit_code != 0 and not is_unknown:
        findings += _other_findings(termination, output.matches, {finding.id for finding in findings})
    return findings


def _explain_failure(termination: Termination, output: _Output) -> list[Finding]:
    """What ended a job that has no line of a normal end; empty: nothing says that it failed."""
    script_went_on = False
    if termination.exit_code == 0 and not _ends_in_traceback(output):
        script_went_on = _script_went_on(output)
        if not script_went_on:
            return []
    findings = []
    for finding in _explain_end(termination, output):
        exact = name_package(_name_full_device(termination, name_memory_holders(finding)))
        findings.append(_as_variant(name_graph_error(output.lines, name_place(output.lines, exact)), output))
    if not script_went_on:
        return findings
    went_on = make_evidence("the job went on after it, as a script does, and ended with exit code 0")
    return [
        msgspec.structs.replace(
            finding,
            evidence=[*finding.evidence, went_on],
            severity="warning" if finding.severity == "critical" else finding.severity,
        )
        for finding in findings
    ]


def _first_line(output: _Output, text: str) -> LogLine | None:
    pattern = re.compile(bound_repeats(text))
    return next((line for line in output.lines if pattern.search(line.text)), None)


def _as_variant(finding: Finding, output: _Output) -> Finding:
    """The finding with what the output says to be so already: the first variant of its ending whose lines are there."""
    for variant in endings()[finding.id].variants:
        lines = [_first_line(output, pattern) for pattern in variant.when]
        if None not in lines and not any(_first_line(output, pattern) for pattern in variant.unless):
            quoted = {item.source for item in finding.evidence}
            shown = [quote(line) for line in dict.fromkeys(lines) if line is not None and line.source not in quoted]
            return msgspec.structs.replace(
                finding, title=variant.title or finding.title, fix=variant.fix, evidence=[*finding.evidence, *shown]
            )
    return finding


def _explain_losses(termination: Termination, output: _Output) -> list[Finding]:
    """Losses that were not finite to the end, again and again, or that exploded."""
    if output.bad_losses:
        return [_make_finding("diverged", quote_lines(output.bad_losses))]
    recurring, num_losses = find_recurring_non_finite_losses(output.losses)
    if recurring:
        text = f"the loss was not finite in {len(recurring)} of {num_losses} lines"
        finding = _make_finding("diverged", [make_evidence(text), *quote_lines(recurring)], severity="warning")
        return [msgspec.structs.replace(finding, title=_RECURRING_TITLE, fix=_RECURRING_FIX)]
    exploded = find_exploded_losses(output.losses) if not termination.source else []
    finding = _make_finding("diverged", quote_lines(exploded))
    return [msgspec.structs.replace(finding, title=_EXPLODED_TITLE)] if exploded else []


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
        return [_make_finding(found[-1].ending.id, [quote(found[-1].line), note], severity="info")]
    suspicious = [
        line
        for index, line in enumerate(last)
        if since + index not in progress and _SUSPICIOUS.search(line.text) and not _reports_no_failure(line.text)
    ]
    return [_make_finding("error_lines", [*quote_lines(suspicious), note])] if suspicious else []


def explain_hang(output: tuple[LogLine, ...], *, has_stepped: bool) -> list[Finding]:
    """What the output of a job that lives says since the progress before its last, where that is a known failure: the
    last may be the line of a bar, which is written again and again. A job that took steps was not stopped by what it
    printed before its only line of progress."""
    progress = find_progress(output)
    start = progress[-2] if len(progress) > 1 else progress[0] if progress and has_stepped else 0
    lines = drop_ignored_exceptions(output[start:])
    return [
        _make_finding(ending_id, quote_lines(quoted))
        for ending_id, quoted in _faults_by_ending(_find_matches(lines)).items()
        if ending_id not in UNEXPLAINED
    ]


def _find_normal_end(termination: Termination, output: _Output) -> LogLine | None:
    """The line of a normal end, if the end itself is not recorded and nothing after the line speaks against it."""
    if termination.exit_code is not None or termination.source:
        return None
    index = find_normal_end(output.lines)
    if index is None:
        return None
    last_progress = max((number for number in output.progress if number < index), default=0)
    if any(_TRAINING_EXCEPTION in line.text for line in output.lines[last_progress:index]):
        return None
    of_threads = output.thread_exceptions
    has_failed = any(
        match.line_index > index
        and not match.pattern.harmless
        and match.ending.id != "peer_ended"
        and not any(start <= match.line_index <= last for start, last in of_threads)
        for match in output.matches
    ) or any(span[0] > index and span not in of_threads for span in output.tracebacks)
    return None if has_failed else output.lines[index]


def _ends_in_traceback(output: _Output) -> bool:
    """Whether an exception is the last that was printed: a job that catches it, logs it (`logger.catch`) and ends with
    exit code 0 has failed as well. One in another thread does not end the job."""
    lines, spans = output.lines, output.tracebacks
    last = next((index for index in range(len(lines) - 1, -1, -1) if lines[index].text.strip()), -1)
    is_main = bool(spans) and spans[-1] not in output.thread_exceptions
    return is_main and spans[-1][1] == last and is_exception_line(lines[last].text)


def _script_went_on(output: _Output) -> bool:
    """Whether a program of the job ended by an exception that it did not handle, and something else, as the script that
    had started it, printed a little more. One that is handled and printed seldom begins in a module (heuristic)."""
    lines, spans = output.lines, output.tracebacks
    if not spans or spans[-1] in output.thread_exceptions or not is_exception_line(lines[spans[-1][1]].text):
        return False
    start, last = spans[-1]
    functions = (frame[1] for line in lines[start:last] if (frame := _FRAME.search(line.text)))
    is_short = len(lines) - last - 1 <= _MAX_SCRIPT_LINES and not output.num_later_progress(last)
    return next(functions, "") in _PROGRAM_FRAMES and is_short


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


def _explain_end(termination: Termination, output: _Output) -> list[Finding]:
    """What ended a job that did not end well: a fault in its output before a request to stop."""
    verdict = _explain_facts(termination, output)
    if verdict is not None and verdict.id != "killed" and endings()[verdict.id].role != "stop":
        return [verdict]
    reasons = _find_reasons(termination, output)
    if verdict is None:
        return reasons or [_explain_last_lines(termination, output)]
    reasons = [finding for finding in reasons if endings()[finding.id].role != "consequence"]
    if verdict.id == "killed":
        return reasons or [verdict]
    return reasons if any(endings()[finding.id].role == "stop" for finding in reasons) else [*reasons, verdict]


def _explain_facts(termination: Termination, output: _Output) -> Finding | None:
    """The first ending of which the facts hold: the output of a job that a signal ended does not say why."""
    facts = find_end_facts(termination)
    for ending in endings().values():
        for row in ending.facts:
            if facts.keys() >= set(row.all):
                evidence = [item for name in row.all for item in facts[name]] + describe_end(termination)
                unknown = _unknown_evidence(termination, output) if ending.id in UNEXPLAINED else []
                return _make_finding(ending.id, evidence + unknown, severity=row.severity)
    return None


def _find_reasons(termination: Termination, output: _Output) -> list[Finding]:
    """What the output says of the end: a fault, then the request to stop that came after it. Empty: nothing."""
    decisive = output.decisive()
    late = [match for match in decisive if not output.was_survived(match.line_index)]
    stops = [match for match in late if match.ending.role == "stop"]
    first_stop = min((match.line_index for match in stops), default=len(output.lines))
    before = [match for match in decisive if match.ending.role != "stop" and match.line_index < first_stop]
    fault = _find_fault(termination, output, before, first_stop)
    if fault is None and output.bad_losses:
        fault = _make_finding("diverged", quote_lines(output.bad_losses) + describe_end(termination))
    found = [] if fault is None else [fault]
    if stops:
        found.append(output.make_finding(termination, stops))
    if found:
        return found
    counting = decisive if termination.exit_code is not None else late
    consequences = [match for match in counting if match.ending.role == "consequence"]
    own_faults = [
        match
        for match in decisive
        if match.ending.role == "fault" and output.num_later_progress(match.line_index) <= _MAX_PEER_PROGRESS_LINES
    ]
    is_of_another = all(match.ending.about_another_process for match in consequences)
    chosen = own_faults if consequences and is_of_another and own_faults else consequences
    return [output.make_finding(termination, chosen)] if chosen else []


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


def _find_fault(termination: Termination, output: _Output, decisive: list[_Match], end: int) -> Finding | None:
    """The fault in the lines before `end`: those after the last traceback, then the tracebacks from the last one on,
    then all lines. An error that only reports the end of another process does not decide, and neither does an unknown
    one, or a crash, if a known failure was logged before it."""
    lines = output.lines
    faults = [match for match in decisive if match.ending.role == "fault"]
    late = [match for match in faults if not output.was_survived(match.line_index)]
    spans = [span for span in output.tracebacks if span[0] < end]
    if end < len(lines) or termination.signal in STOPPED_BY or termination.exit_code is None:
        spans = [span for span in spans if not output.was_survived(span[1])]  # the job continued after the others
        considered = late
    else:
        considered = faults
    for number in range(len(spans) - 1, -1, -1):
        (start, last), above = spans[number], spans[number - 1][1] if number else -1
        found = _find_known(considered, late, (above, start, last, end))
        if found:
            return output.make_finding(termination, found)
        of_others = [match for match in decisive if above < match.line_index]
        if any(not (m.ending.about_another_process or output.was_survived(m.line_index)) for m in of_others):
            return None
        is_secondary = any(start <= match.line_index <= last for match in decisive)
        if not is_secondary and not SECONDARY_ERROR.search(strip_rank_prefix(lines[last].text)):
            evidence = [quote(lines[last]), *describe_end(termination), *_unknown_evidence(termination, output)]
            return _make_finding("ended_by_error", evidence)
        end = start
    return None if spans else _find_fault_without_traceback(termination, output, decisive, considered, end)


def _find_known(faults: list[_Match], late: list[_Match], bounds: tuple[int, int, int, int]) -> list[_Match]:
    """The matches of a traceback and around it that decide. bounds: the last line of the traceback above, the first and
    the last of this one, and the end."""
    above, start, last, end = bounds
    crashes: list[_Match] = []
    for begin, stop in ((last + 1, end), (start, last + 1)):
        found = [match for match in faults if begin <= match.line_index < stop]
        if any(match.ending.id not in UNEXPLAINED for match in found):
            is_of_kernel = all(
                match.ending.id == "device_assert" for match in found
            )  # the kernel itself says it better
            return found + [match for match in late if is_of_kernel and "Assertion `" in match.line.text]
        crashes += found
    return [match for match in late if above < match.line_index < start] or crashes


def _find_fault_without_traceback(
    termination: Termination, output: _Output, decisive: list[_Match], faults: list[_Match], end: int
) -> Finding | None:
    """The fault in an output without a whole traceback before `end`. Of one that is cut off, the assertion of a kernel
    comes before it."""
    if not faults and has_open_traceback(output.lines):
        faults = [
            match
            for match in decisive
            if match.ending.role == "fault" and output.num_later_progress(match.line_index) <= _MAX_PEER_PROGRESS_LINES
        ]
    if faults:
        late = [match for match in faults if not output.was_survived(match.line_index)]
        return output.make_finding(termination, late or faults)
    if any(match.ending.role == "consequence" for match in decisive):
        return None
    errors = [
        line
        for index, line in enumerate(output.lines[:end])
        if index >= end - _NUM_LAST_LINES and _ERROR_LINE.search(line.text) and not output.was_survived(index)
    ]
    return _make_finding("ended_by_error", [quote(errors[-1]), *describe_end(termination)]) if errors else None


def _explain_last_lines(termination: Termination, output: _Output) -> Finding:
    """The finding if nothing in the output is known."""
    end, unknown = describe_end(termination), _unknown_evidence(termination, output)
    if termination.signal is not None:
        return _make_finding("crashed", end + unknown)
    quoted = [quote(line) for line in [line for line in output.lines if line.text.strip()][-_NUM_LAST_LINES:]]
    if termination.exit_code is None and termination.source:
        end_line = make_evidence("its end is recorded, its exit code is not", source=termination.source)
        return _make_finding("exit_code_unknown", [end_line, *quoted])
    if termination.exit_code is None:
        return _make_finding("ended_without_record", end + quoted + unknown)
    return _make_finding("ended_by_error", quoted + end + unknown)


def _rank(ending: Ending) -> int:
    """Place in the catalog, from the more to the less specific."""
    return list(endings()).index(ending.id)


def _other_findings(termination: Termination, matches: list[_Match], reported_ids: set[str]) -> list[Finding]:
    findings = []
    for ending_id, lines in _faults_by_ending(matches).items():
        if ending_id not in reported_ids:
            note = make_evidence("in the output; not what ended it, as far as its end shows")
            evidence = [*quote_lines(lines[-MAX_QUOTED_LINES:]), note]
            findings.append(_make_finding(ending_id, evidence, severity="info"))
    fault_lines = [line for line in termination.kernel_log if _xid_pid(line.text) is not None]
    if fault_lines and "gpu_fault" not in reported_ids:
        names_this_job = any(_xid_pid(line.text) in termination.pids for line in fault_lines)
        evidence = quote_lines(fault_lines[-MAX_QUOTED_LINES:])
        if not names_this_job:
            evidence.append(make_evidence("not known: whether this job caused it; the lines name no process of it"))
        findings.insert(0, _make_finding("gpu_fault", evidence, severity="critical" if names_this_job else "warning"))
    elif "gpu_fault" not in reported_ids:
        xid_lines = [line for line in termination.xids if not _SECONDARY_XIDS.search(line.text)]
        if xid_lines:
            findings.insert(0, _make_finding("gpu_fault", quote_lines(xid_lines[-MAX_QUOTED_LINES:])))
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
    matches: dict[int, _Match] = {}
    ends = {index: last for start, last in find_tracebacks(lines) for index in range(start, last + 1)}
    source_lines = _find_source_lines(lines, ends)
    inside: dict[int, _Match] = {}
    for index, (line, text) in enumerate(zip(stripped_lines, lowered, strict=True)):
        last = ends.get(index)
        candidates = (
            pattern
            for pattern in possible
            if pattern.literal in text
            and (index not in source_lines if pattern.traceback_end is None
                 else last is not None and pattern.ends_traceback(lines[last].text))
            and pattern.regex.search(line)
        )  # fmt: skip
        if (pattern := next(candidates, None)) is None:
            continue
        if pattern.traceback_end is None or last is None:
            matches[index] = _Match(pattern, lines[index], index)
        elif last not in inside or _rank(pattern.ending) < _rank(inside[last].ending):
            inside[last] = _Match(pattern, lines[index], index)
    for last, match in inside.items():  # it matches the last line of its traceback, too
        matches[match.line_index], matches[last] = match, dataclasses.replace(match, line=lines[last], line_index=last)
    return [matches[index] for index in sorted(matches)]


def _find_source_lines(lines: tuple[LogLine, ...], ends: Mapping[int, int]) -> set[int]:
    """Indices of the lines of source code that tracebacks quote, which say nothing by themselves. ends: line of a
    traceback → its last line."""
    return {
        index
        for index, last in ends.items()
        if index < last and _QUOTED_FRAME.match(lines[index - 1].text) and not _QUOTED_FRAME.match(lines[index].text)
    }


def _xid_pid(text: str) -> int | None:
    """The process that an Xid line names, 0 if it names none; None: not an Xid line."""
    if not re.search(r"NVRM: Xid \(", text):
        return None
    match = re.search(r"pid='?(\d{1,9})\b", text)
    return int(match[1]) if match else 0


def _unknown_evidence(termination: Termination, output: _Output) -> list[Evidence]:
    """What is not known, and lines that may be harmless."""
    hints = [match.line for match in output.matches if match.pattern.harmless and match.ending.role != "remark"]
    evidence = [quote(line, "may be harmless: ") for line in hints[-MAX_QUOTED_LINES:]]
    maybe_killed = termination.oom_kills is None and termination.signal in (None, signal.SIGKILL)
    missing = {
        "its exit code or signal": termination.exit_code is None,
        "its output": not termination.output,
        "whether the kernel killed it for memory": maybe_killed,
    }
    unknown_names = [name for name, is_missing in missing.items() if is_missing]
    if unknown_names and (termination.signal is not None or termination.exit_code is None):
        evidence.append(make_evidence("not known: " + ", ".join(unknown_names)))
    return evidence


def _make_finding(ending_id: str, evidence: list[Evidence], *, severity: Severity | None = None) -> Finding:
    ending = endings()[ending_id]
    return Finding(
        id=ending_id, severity=severity or ending.severity, title=ending.title, evidence=evidence, fix=ending.fix
    )
