"""How a rule says what it found: the catalogue's words and thresholds, the rule's numbers and their places."""

import math
from collections.abc import Iterable
from typing import Any

from stoker.diagnosis.catalogue import CATALOGUE, common
from stoker.diagnosis.run_data import Records
from stoker.runs.schemas import Evidence, Finding


def found(
    seen: Records,
    cause_id: str,
    measured: float | None,
    evidence: Iterable[Evidence | None],
    *,
    lost_s: float | None = None,
    estimate: str = "",
    threshold: float | None = None,
    more_fix: str = "",
    command: str | None = None,
    patch: dict[str, Any] | None = None,
    confidence: float | None = None,
) -> Finding | None:
    """The finding of a cause, where what was measured reaches its threshold; None elsewhere, and without a measure.

    lost_s: device-seconds that it took, never more than the run has. estimate: how they were guessed; empty: a clock
    measured them. threshold: another least value than the catalogue's. more_fix: said behind the fix, in a run of ours.
    """
    if measured is None:
        return None
    cause = CATALOGUE[cause_id]
    severity = cause.severity(measured)
    if severity is None or (threshold is not None and measured < threshold):
        return None
    lines = [line for line in evidence if line is not None]
    fix = cause.fix + more_fix if seen.ours else cause.fix_elsewhere or cause.fix
    fix, command, patch = _way_out(seen, fix, command or cause.command, patch, cause.patch)
    if lost_s is not None:
        lost_s = min(max(0.0, lost_s), seen.totals.device_s)
        if estimate:
            lines.append(Evidence(text=f"{lost_s:,.1f} device-seconds lost is an estimate: {estimate}", value=lost_s))
    return Finding(
        cause=cause.id,
        severity=severity,
        title=cause.title,
        evidence=lines,
        lost_device_s=lost_s,
        lost_money=lost_s * seen.price / 3600 if lost_s is not None and seen.price > 0 else None,
        fix=fix,
        command=command,
        confidence=cause.confidence if confidence is None else confidence,
        patch=patch,
    )


def _way_out(
    seen: Records, fix: str, command: str | None, patch: dict[str, Any] | None, usual: dict[str, Any]
) -> tuple[str, str | None, dict[str, Any]]:
    """What can be done: a job of others knows none of stoker's flags and settings, and what is set is not advised."""
    patch = usual if patch is None else patch
    flag = command is not None and command.startswith("--")
    if not seen.ours:
        return fix, None if flag else command, {}
    if patch and all(seen.settings.get(name) == value for name, value in patch.items()):
        set_so = ", ".join(f"{name} is {value}" for name, value in patch.items())
        return f"{fix} ({set_so} already)", None if flag else command, {}
    return fix, command, patch


def is_long_enough(seen: Records) -> bool:
    """Whether shares of the time after the start say something."""
    return seen.steady.wall_s >= common("steady_s")


def has_stacks(seen: Records) -> bool:
    """Whether there are enough samples of stacks for their shares to say something."""
    return seen.stacks.samples >= common("samples")


def stack_share(seen: Records, cause_id: str, *kinds: str) -> float | None:
    """Share of the main thread's samples in these kinds; None where they are too few for the cause to be sure."""
    if not has_stacks(seen):
        return None
    share = seen.stacks.share(*kinds)
    error = math.sqrt(share * (1 - share) / seen.stacks.samples) if 0 < share < 1 else 0.0
    least = CATALOGUE[cause_id].warn_from or 0.0
    return share if share - common("sigmas") * error >= least else None


def sampled_s(seen: Records, share: float) -> float | None:
    """The device-seconds of a share that samples of stacks showed; None where they are too few to say how many."""
    if not 0 < share < 1:
        return share * seen.steady.device_s
    error = math.sqrt((1 - share) / (share * seen.stacks.samples))
    return share * seen.steady.device_s if error <= common("sampled_error") else None


def taken_by_others(seen: Records) -> tuple[float, float] | None:
    """(share of the time for which that held the run up, the processor time that its threads wanted, in cores): of one
    thread or less, the time that it stood and others had its processor; of more, their share of what was wanted.
    Threads that ran or waited for a processor are compared with what they got; what a quota or the run's own number of
    threads withholds is not others'. None where the cores are not full, or nobody counted the threads."""
    busy, others, cores = seen.cores_busy, seen.host.others.value, seen.host.cores
    got, wanted = seen.host.process_cpu, seen.host.threads_running.value
    if busy is None or others is None or not cores or got.value is None or wanted is None:
        return None
    if busy < CATALOGUE["cpu_contention"].limit("busy") or got.count < common("samples") or wanted <= 0:
        return None
    withheld = seen.host.withheld.value or 0.0
    missing = min(others * cores, wanted - got.value) - withheld * got.value
    return max(0.0, missing) / max(1.0, wanted), wanted


def wanted_cpu(seen: Records) -> float | None:
    """Cores' worth of processor time that the run used, or would have used if others and quotas had left it to the run.
    None where there are few samples, or processor time was withheld and nobody knows how much."""
    used = seen.host.process_cpu
    if used.value is None or used.count < common("samples"):
        return None
    more = held_back(seen)
    return None if more is None else used.value * more


def held_back(seen: Records) -> float | None:
    """How many times as much processor time the run's threads wanted as they got: 1 where the cores have room. None
    where they are full, others use them too, and nobody counted the threads."""
    cause, busy, others = CATALOGUE["cpu_contention"], seen.cores_busy, seen.host.others.value
    full = busy is not None and busy >= cause.limit("busy")
    quota = CATALOGUE["cpu_quota"].severity(seen.host.withheld.value or 0.0) is not None
    if not full and not quota:
        return 1.0
    got, wanted = seen.host.process_cpu.value, seen.host.threads_running.value
    if got and wanted is not None:
        return max(1.0, wanted / got)
    return None if quota or (others is not None and cause.severity(others) is not None) else 1.0


def thread_cpu(seen: Records, *phases: str) -> float | None:
    """Processor seconds that the training thread wanted for each second of these phases, after the start, where it
    computes by itself. None: nobody measured, or a device computes, whose phases are not the thread's."""
    took_s, more = sum(seen.steady.phases.get(name, 0.0) for name in phases), held_back(seen)
    if not seen.steady.cpu or not seen.on_cpu or took_s <= 0 or more is None:
        return None
    return more * sum(seen.steady.cpu.get(name, 0.0) for name in phases) / took_s


def share_of(seen: Records, *phases: str) -> float | None:
    """Of the device time after the start; None in a run that is too short. Exchanges are those of all ranks."""
    if not is_long_enough(seen):
        return None
    if seen.ranks > 1 and {"comm", "straggler"} & set(phases):
        steady_s = seen.totals.device_s - seen.seconds("startup", "compile")
        return seen.seconds(*phases) / steady_s if steady_s > 0 else None
    return seen.steady_share(*phases)


def of_phase(
    seen: Records, cause_id: str, *phases: str, more: Iterable[Evidence | None] = (), not_s: float = 0.0, **options: Any
) -> Finding | None:
    """A cause that is as large as its phases: a clock measured them. not_s: seconds of them that it did not take."""
    evidence = [*(phase(seen, name) for name in phases if seen.seconds(name) > 0), *more]
    return found(seen, cause_id, share_of(seen, *phases), evidence, lost_s=seen.seconds(*phases) - not_s, **options)


def phase(seen: Records, name: str) -> Evidence:
    share = seen.share(name)
    text = f"{name}: {seen.seconds(name):,.1f} device-seconds, {percent(share)} of the run"
    later = share_of(seen, name)
    if later is not None and abs(later - share) >= 0.01:
        text += f", {percent(later)} of the time after its start"
    return Evidence(text=text, value=share, place=f"steps.jsonl: phases.{name}")


def counter(text: str, value: float | None, place: str) -> Evidence | None:
    """A line of devices.jsonl's numbers; None where nobody recorded it. `{}` of the text is the value in percent."""
    if value is None:
        return None
    return Evidence(text=text.format(percent(value)), value=value, place=f"devices.jsonl: {place}")


def stacks(seen: Records, what: str, *kinds: str) -> Evidence | None:
    """Where the main thread was, by samples of its stack, and in which of its own lines most."""
    if not seen.stacks.samples:
        return None
    share = seen.stacks.share(*kinds)
    text = f"the main thread was in {what} in {percent(share)} of {seen.stacks.samples} samples"
    frames = sorted(seen.stacks.frames.items(), key=lambda item: -item[1])[:2]
    if frames:
        text += "; most often at " + ", ".join(frame for frame, _ in frames)
    return Evidence(text=text, value=share, place="stacks.jsonl: main, frames")


def percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.995 or share > 1 else "100 %"


def attempts(seen: Records) -> Evidence:
    count = seen.totals.attempts
    return Evidence(text=f"{count} attempts", value=float(count), place="events.jsonl: attempt")
