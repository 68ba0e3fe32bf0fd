"""What is known of a job's end besides its output: its signal and exit code, the kernel's log and counts, and how full
its memory was. Facts have names, which rows of `endings.toml` have in `facts`; each comes with its evidence.
"""

import re
import signal
from collections.abc import Sequence

from stoker_watch.diagnosis.causes.shared import make_evidence
from stoker_watch.diagnosis.run_data import LogLine, Termination
from stoker_watch.findings.finding import Evidence

NEARLY_FULL_FRACTION = 0.95
"""Fraction of a memory limit in the last sample, or with its growth in the next one, from which a kill without a
message is attributed to it. Heuristic: samples are at most a second old, and the rest is room for a batch or two."""
MIN_HANG_S = 300.0
"""Time without progress before a kill from which on it was a hang. Heuristic: longer than any batch, shorter than the
timeouts of collectives (10 to 30 minutes). A silent download looks the same, so the evidence names the stack frame."""
MIN_SHORT_HANG_S, MIN_TIMES_USUAL = 30.0, 10.0
"""A shorter time is one from so many seconds on, if steps never took a tenth of it (heuristic)."""
MAX_HANG_CORES = 0.05
"""CPU-seconds per second of the whole job below which it did nothing; an idle interpreter takes less."""
MIN_SILENT_S = 30.0
"""Time without output before a kill from which on an empty input file was the cause."""
STOPPED_BY = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
_PREEMPTED_EXIT_CODE = 75
"""Exit code of stoker's own runs after a request to stop (errors.Preempted)."""
_KILLED = re.compile(r"Killed process (\d{1,9})\b")
"""A line of the kernel's out-of-memory killer (mm/oom_kill.c: "Killed process %d (%s)")."""
_KILL_COUNT = "memory.events: oom_kill"
_MAX_QUOTED_CHARS = 500
"""Quoted characters of a line."""
MAX_QUOTED_LINES = 3
"""Quoted lines of a failure."""


def find_end_facts(end: Termination) -> dict[str, list[Evidence]]:
    """The facts of an end that hold, each with its evidence."""
    number, kills = end.signal, end.oom_kills
    oom_lines = [line for line in end.kernel_log if _names_process(line.text, end.pids)]
    counted = make_evidence(f"the kernel killed {kills} processes of the job's cgroup for memory", kills, _KILL_COUNT)
    others = "the kernel counted no kill for memory in the job's cgroup: another process sent the signal"
    unproved = make_evidence(f"not proved: the kernel's kills were not counted ({_KILL_COUNT})")
    is_silent = number == signal.SIGKILL if end.hang is None else end.hang.duration_s >= MIN_SILENT_S
    facts: dict[str, tuple[bool, Sequence[Evidence]]] = {
        "killed by the kernel": (bool(oom_lines), quote_lines(oom_lines)),
        "kernel counted kills": (bool(kills), [counted]),
        "kernel counted no kill": (kills == 0, [make_evidence(others, 0.0, end.source)]),
        "kills not counted": (kills is None, [unproved]),
        "memory full": (bool(memory := _memory_evidence(end)), memory),
        "shared memory full": ((end.shm_fraction or 0.0) >= NEARLY_FULL_FRACTION, ()),
        "ended without a word": (number == signal.SIGKILL or (end.exit_code is None and not end.output), ()),
        "stopped from outside": (number in STOPPED_BY, ()),
        "silent": (is_silent, _hang_evidence(end)),
        "empty input": (bool(end.empty_inputs), _quote_files(end.empty_inputs)),
        "stood still": (_was_hanging(end), _hang_evidence(end)),
        "SIGKILL": (number == signal.SIGKILL, ()),
        "SIGTERM": (number == signal.SIGTERM, ()),
        "SIGINT": (number == signal.SIGINT, ()),
        "SIGBUS": (number == signal.SIGBUS, ()),
        "exit code of a request to stop": (end.exit_code == _PREEMPTED_EXIT_CODE, ()),
    }
    return {name: list(evidence) for name, (holds, evidence) in facts.items() if holds}


def describe_end(end: Termination) -> list[Evidence]:
    """Its signal or exit code, and what was full."""
    evidence = []
    number = end.signal
    if number is not None:
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        evidence.append(make_evidence(f"ended by {name}", float(number), end.source))
    elif end.exit_code is not None:
        evidence.append(make_evidence(f"ended with exit code {end.exit_code}", float(end.exit_code), end.source))
    for description, fraction in (
        ("host memory", end.memory_fraction),
        ("GPU memory", end.gpu_memory_fraction),
        ("/dev/shm", end.shm_fraction),
    ):
        if fraction is not None and fraction >= NEARLY_FULL_FRACTION:
            text = f"{description} was {100 * fraction:.0f} % full in the last sample"
            evidence.append(make_evidence(text, fraction, end.samples_source))
    return evidence


def quote(line: LogLine, prefix: str = "") -> Evidence:
    text = line.text.strip()
    text = text if len(text) <= _MAX_QUOTED_CHARS else text[:_MAX_QUOTED_CHARS] + " …"
    return make_evidence(prefix + text, source=line.source)


def quote_lines(lines: Sequence[LogLine]) -> list[Evidence]:
    """Quotes the first lines."""
    return [quote(line) for line in lines[:MAX_QUOTED_LINES]]


def _names_process(text: str, pids: frozenset[int]) -> bool:
    killed = _KILLED.search(text)
    return killed is not None and int(killed[1]) in pids


def _quote_files(paths: Sequence[str]) -> list[Evidence]:
    return [make_evidence("0 bytes", 0.0, path) for path in paths[:MAX_QUOTED_LINES]]


def _memory_evidence(end: Termination) -> list[Evidence]:
    """The host's memory was nearly full, or would have been before the next sample; else empty."""
    fraction, growth = end.memory_fraction, end.memory_growth
    if fraction is None or fraction + growth < NEARLY_FULL_FRACTION:
        return []
    text = "it ended while the host's memory was full"
    if fraction < NEARLY_FULL_FRACTION:
        text = (
            f"the host's memory was {100 * fraction:.0f} % full in the last sample, {100 * growth:.0f} points more "
            "than in the one before: at this rate it was nearly full before the next sample"
        )
    return [make_evidence(text, fraction, end.samples_source)]


def _was_hanging(end: Termination) -> bool:
    hang = end.hang
    if hang is None:
        return False
    is_short = hang.usual_s is not None and hang.duration_s >= max(MIN_SHORT_HANG_S, MIN_TIMES_USUAL * hang.usual_s)
    if hang.duration_s < MIN_HANG_S and not is_short:
        return False
    return hang.main_thread_state == "comm" or (hang.cpu_cores is not None and hang.cpu_cores < MAX_HANG_CORES)


def _hang_evidence(end: Termination) -> list[Evidence]:
    hang = end.hang
    if hang is None:
        return []
    text = f"no step and no line of output in its last {hang.duration_s:.0f} s"
    if hang.usual_s is not None:
        text += f"; before, there was one at least every {hang.usual_s:.1f} s"
    evidence = [make_evidence(text, hang.duration_s, hang.source)]
    if hang.cpu_cores is not None:
        text = f"its processes used {hang.cpu_cores:.2f} cores meanwhile"
        evidence.append(make_evidence(text, hang.cpu_cores, end.samples_source))
    if hang.frame:
        evidence.append(make_evidence(f"the main thread was in {hang.frame}", source=hang.stacks_source))
    return evidence
