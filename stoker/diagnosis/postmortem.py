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

from stoker.diagnosis.failure_signatures import CONSEQUENCES, DEATHS, Death, Sign
from stoker.diagnosis.output import Line, bare, last_losses_nan, tracebacks
from stoker.diagnosis.termination import Ended, of_run
from stoker.runs.schemas import Evidence, Finding

__all__ = ["Ended", "explain", "of_run"]

NEARLY_FULL = 0.95
"""Share of a memory's limit in the last sample from which a kill without a word is laid to it. Our judgment: samples
are a second old at most, and what is left is a batch or two."""
_QUOTED = 500
"""Characters of a line that are quoted."""
_LINES = 3
"""Lines that a finding quotes of a sign at most."""
_LAST_WORDS = 5
"""Lines that it quotes where nothing is known: an error of stoker has as many."""
_SIGKILL, _SIGTERM, _SIGINT = 9, 15, 2
_PREEMPTED = 75
"""What stoker's own runs end with when they were asked to stop (errors.Preempted)."""
HANG_S = 300.0
"""Stillness before a kill from which on it is what was wrong. Our judgment: longer than any batch, shorter than the
limits of collectives (10 to 30 minutes); a silent download looks alike, which is why the evidence says where it was."""
STILL_CORES = 0.05
"""Processor-seconds per second of the whole job below which nothing moved; an idle interpreter takes less."""
SPINS_S = 30.0
"""Time without a word before a kill from which on an empty input file is what was wrong."""
_CONSEQUENT_XIDS = re.compile(r"\bXid 4[35]\b")
"""What the driver says of a program that ended or failed by itself."""


@dataclasses.dataclass(frozen=True)
class _Match:
    death: Death
    sign: Sign
    line: Line
    index: int
    """Of the line in the output."""


def explain(ended: Ended) -> list[Finding]:
    """What ended the job first, then what else its output says. Nothing for one that ended well and silently."""
    matches = _matches(ended.output)
    nan = last_losses_nan(ended.output)
    verdict: Finding | None = _by_force(ended, matches)
    if verdict is None and ended.exit_code != 0:
        verdict = _by_output(ended, matches, nan)
    found = [verdict] if verdict is not None else []
    if nan and all(finding.cause != "diverged" for finding in found):
        found.append(_finding("diverged", [_quote(line) for line in nan[:_LINES]]))
    if not ended.gpu_used:
        on_cpu = [match.line for match in matches if match.death.id == "trained_on_cpu"]
        if on_cpu:
            found.append(_finding("trained_on_cpu", [_quote(line) for line in on_cpu[:_LINES]]))
    if ended.exit_code != 0:
        found += _also(ended, matches, {finding.cause for finding in found})
    return found


def _by_force(ended: Ended, matches: list[_Match]) -> Finding | None:
    """The verdict where a signal ended the job: from outside, it has no last words that say so."""
    number = ended.signal
    told = _told(ended)
    oom = [line for line in ended.kernel if (pid := _killed_pid(line.text)) is not None and pid in ended.pids]
    if oom:
        return _finding("host_memory_killed", [_quote(line) for line in oom[:_LINES]] + told)
    if number == _SIGKILL and ended.oom_kills:
        text = f"the kernel killed {ended.oom_kills} processes of the job's cgroup for memory"
        evidence = [Evidence(text=text, value=float(ended.oom_kills), place="memory.events: oom_kill"), *told]
        return _finding("host_memory_killed", evidence)
    wordless = number == _SIGKILL or (ended.exit_code is None and not ended.output)
    if wordless and ended.oom_kills is None and (full := _was_filling(ended)):
        unproved = Evidence(text="not proved: nobody counted the kernel's kills (memory.events: oom_kill)")
        return _finding("host_memory_killed", [*full, *told, unproved], severity="warning")
    asked = number in (_SIGKILL, _SIGTERM, _SIGINT)
    silent = ended.still.seconds if ended.still is not None else None
    if ended.empty_inputs and asked and (number == _SIGKILL if silent is None else silent >= SPINS_S):
        return _finding("empty_shard", [*_empty(ended), *_stood(ended), *told])
    if asked and _hangs(ended):
        return _finding("hang", [*_stood(ended), *told])
    if number == _SIGKILL:
        not_memory = "the kernel counted no kill for memory in the job's cgroup: somebody else sent it"
        counted = [Evidence(text=not_memory, value=0.0, place=ended.place)] if ended.oom_kills == 0 else []
        return _finding("killed", told + counted + _unknown(ended, matches))
    if number == _SIGTERM or ended.exit_code == _PREEMPTED:
        return _finding("preempted", told)
    if number == _SIGINT:
        return _finding("interrupted", told)
    bus_error = number == signal.SIGBUS and ended.shm_share is not None and ended.shm_share >= NEARLY_FULL
    return _finding("shared_memory_full", told) if bus_error else None


def _was_filling(ended: Ended) -> list[Evidence]:
    """That the host's memory was full or would have been before the next sample; else nothing."""
    share, growth = ended.memory_share, ended.memory_growth
    if share is None or (share < NEARLY_FULL and share + growth < 1):
        return []
    if share >= NEARLY_FULL:
        return [Evidence(text="it ended when the host's memory was full", value=share, place=ended.samples_place)]
    text = (
        f"the host's memory was {100 * share:.0f} % full in the last sample, {100 * growth:.0f} points more than in "
        "the one before: it was full before there was another"
    )
    return [Evidence(text=text, value=share, place=ended.samples_place)]


def _by_output(ended: Ended, matches: list[_Match], nan: list[Line]) -> Finding:
    """The verdict from the last words: what stands after the last traceback, then the tracebacks from the last one on,
    then all that was said. An error that only reports another one's end passes the question on."""
    told, fatal = _told(ended), [match for match in matches if not match.sign.harmless]
    lines, end = ended.output, len(ended.output)
    for start, last in reversed(tracebacks(lines)):
        for begin, stop in ((last + 1, end), (start, last + 1)):
            said = [match for match in fatal if begin <= match.index < stop]
            if said:
                return _of_matches(ended, said, matches)
        if not CONSEQUENCES.search(lines[last].text):
            if ended.exit_code == -signal.SIGINT or lines[last].text.startswith("KeyboardInterrupt"):
                return _finding("interrupted", [_quote(lines[last]), *told])
            return _finding("ended_by_error", [_quote(lines[last]), *told, *_unknown(ended, matches)])
        end = start
    if fatal:
        return _of_matches(ended, fatal, matches)
    if nan:
        return _finding("diverged", [_quote(line) for line in nan[:_LINES]] + told)
    if ended.signal is not None:
        return _finding("crashed", told + _unknown(ended, matches))
    spoken = [line for line in lines if line.text.strip()]
    quoted = [_quote(line) for line in spoken[-_LAST_WORDS:]]
    if ended.exit_code is None and ended.place:
        seen = Evidence(text="its end was seen, its exit code was not", place=ended.place)
        return _finding("end_not_told", [seen, *quoted])
    if ended.exit_code is None:
        return _finding("no_last_word", told + quoted + _unknown(ended, matches))
    return _finding("ended_by_error", quoted + told + _unknown(ended, matches))


def _of_matches(ended: Ended, said: list[_Match], matches: list[_Match]) -> Finding:
    """The most specific cause of those said, the newest line of it first."""
    order = list(DEATHS)
    death = min((match.death for match in said), key=lambda death: order.index(death.id))
    newest = [match.line for match in reversed(said) if match.death is death]
    lines = list(dict.fromkeys([*newest, *(match.line for match in matches if match.death is death)]))
    evidence = [_quote(line) for line in lines[:_LINES]]
    if death.id == "collective_timeout":
        evidence += _ranks(lines)
    return _finding(death.id, evidence + _told(ended))


def _hangs(ended: Ended) -> bool:
    still = ended.still
    if still is None or still.seconds < HANG_S:
        return False
    return still.waits_in == "comm" or (still.cores is not None and still.cores < STILL_CORES)


def _stood(ended: Ended) -> list[Evidence]:
    """Where it stood, and for how long."""
    still = ended.still
    if still is None:
        return []
    found = [Evidence(text=f"no step and no line of output in its last {still.seconds:.0f} s", value=still.seconds,
                      place=still.place)]  # fmt: skip
    if still.cores is not None:
        text = f"its processes used {still.cores:.2f} cores meanwhile"
        found.append(Evidence(text=text, value=still.cores, place=ended.samples_place))
    if still.frame:
        found.append(Evidence(text=f"the main thread was in {still.frame}", place=still.stacks_place))
    return found


def _also(ended: Ended, matches: list[_Match], known: set[str]) -> list[Finding]:
    """Other causes that were named, of which the verdict took none: by how specific they are."""
    found = []
    for death in DEATHS.values():
        lines = [m.line for m in matches if m.death is death and not m.sign.harmless]
        if lines and death.id not in known:
            said = Evidence(text="said in the output; not what ended it, as far as the end shows")
            found.append(_finding(death.id, [*(_quote(line) for line in lines[-_LINES:]), said], severity="info"))
    faults = [line for line in ended.kernel if _xid(line.text) is not None]
    if faults and "gpu_fault" not in known:
        mine = any(_xid(line.text) in ended.pids for line in faults)
        evidence = [_quote(line) for line in faults[-_LINES:]]
        if not mine:
            evidence.append(Evidence(text="not known: whether it was this job's; the lines name no process of it"))
        found.insert(0, _finding("gpu_fault", evidence, severity="critical" if mine else "warning"))
    elif "gpu_fault" not in known:
        told = [line for line in ended.xids if not _CONSEQUENT_XIDS.search(line.text)]
        if told:
            found.insert(0, _finding("gpu_fault", [_quote(line) for line in told[-_LINES:]]))
    return found


def _matches(lines: tuple[Line, ...]) -> list[_Match]:
    """Each line counts for the most specific row that knows it."""
    texts = [bare(line.text) for line in lines]
    found = []
    for index in sorted(_candidates(texts)):
        for death in DEATHS.values():
            sign = next((sign for sign in death.signs if sign.pattern.search(texts[index])), None)
            if sign is not None:
                found.append(_Match(death, sign, lines[index], index))
                break
    return _with_ends(found, lines) if any(match.sign.ends is not None for match in found) else found


def _with_ends(found: list[_Match], lines: tuple[Line, ...]) -> list[_Match]:
    """Those whose traceback has to end in some way stay where it does, and have its last line, too."""
    ends = {
        last: match
        for match in found
        if match.sign.ends is not None
        for start, last in tracebacks(lines)
        if start <= match.index <= last and match.sign.ends.search(lines[last].text) is not None
    }
    kept = [match for match in found if match.index not in ends and (match.sign.ends is None or match in ends.values())]
    kept += [dataclasses.replace(match, line=lines[last], index=last) for last, match in ends.items()]
    return sorted(kept, key=lambda match: match.index)


def _candidates(texts: list[str]) -> set[int]:
    """Places of the lines that any sign may know, and of few others: each sign looks through all lines as one text,
    which most are not in, ten times as fast as through one line after the other."""
    whole = "\n".join(texts)
    ends = list(itertools.accumulate(len(text) + 1 for text in texts))
    found: set[int] = set()
    for death in DEATHS.values():
        for sign in death.signs:
            match = sign.pattern.search(whole)
            while match is not None:
                index = bisect.bisect_right(ends, match.start())
                found.add(index)  # where it also matches across lines, the line alone decides
                match = sign.pattern.search(whole, ends[index])
    return found


_RANK = re.compile(r"\brank\s?(\d+)", re.IGNORECASE)


def _ranks(lines: list[Line]) -> list[Evidence]:
    ranks = sorted({int(match[1]) for line in lines if (match := _RANK.search(line.text)) and len(match[1]) < 10})
    if not ranks:
        return [Evidence(text="not known: which rank waited; the lines do not say")]
    return [Evidence(text=f"reported by rank {', '.join(map(str, ranks))}, which waited for another one")]


def _killed_pid(text: str) -> int | None:
    """Of a line of the kernel's out-of-memory killer (mm/oom_kill.c: "Killed process %d (%s)")."""
    match = re.search(r"Killed process (\d{1,9})\b", text)
    return int(match[1]) if match else None


def _xid(text: str) -> int | None:
    """The process that an Xid line names, 0 where it names none; None: no such line."""
    if not re.search(r"NVRM: Xid \(", text):
        return None
    match = re.search(r"pid='?(\d{1,9})\b", text)
    return int(match[1]) if match else 0


def _told(ended: Ended) -> list[Evidence]:
    """The numbers that are known of its end."""
    found = []
    number = ended.signal
    if number is not None:
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        found.append(Evidence(text=f"ended by {name}", value=float(number), place=ended.place))
    elif ended.exit_code is not None:
        text = f"ended with exit code {ended.exit_code}"
        found.append(Evidence(text=text, value=float(ended.exit_code), place=ended.place))
    for what, share in (
        ("host memory", ended.memory_share), ("GPU memory", ended.gpu_memory_share), ("/dev/shm", ended.shm_share),
    ):  # fmt: skip
        if share is not None and share >= NEARLY_FULL:
            text = f"{what} was {100 * share:.0f} % full in the last sample"
            found.append(Evidence(text=text, value=share, place=ended.samples_place))
    return found


def _unknown(ended: Ended, matches: list[_Match]) -> list[Evidence]:
    """What an abstaining finding lacks, and the lines that may be harmless."""
    hints = [match.line for match in matches if match.sign.harmless and match.death.id != "trained_on_cpu"]
    found = [_quote(line, "may be harmless: ") for line in hints[-_LINES:]]
    lacks = [
        name
        for name, missing in (
            ("its exit code or signal", ended.exit_code is None),
            ("its output", not ended.output),
            ("whether the kernel killed it for memory", ended.oom_kills is None and ended.signal in (None, _SIGKILL)),
        )
        if missing
    ]
    if lacks and (ended.signal is not None or ended.exit_code is None):
        found.append(Evidence(text="not known: " + ", ".join(lacks)))
    return found


def _empty(ended: Ended) -> list[Evidence]:
    return [Evidence(text="0 bytes", value=0.0, place=path) for path in ended.empty_inputs[:_LINES]]


def _quote(line: Line, before: str = "") -> Evidence:
    text = line.text.strip()
    return Evidence(text=before + (text if len(text) <= _QUOTED else text[:_QUOTED] + " …"), place=line.place)


def _finding(cause: str, evidence: list[Evidence], *, severity: str | None = None) -> Finding:
    death = DEATHS[cause]
    return Finding(
        cause=cause, severity=severity or death.severity, title=death.title, evidence=evidence, fix=death.fix
    )
