"""How a rule says what it found: the catalogue's words and thresholds, the rule's numbers and their places."""

import math
from collections.abc import Iterable
from typing import Any

from stoker.diagnosis.catalogue import CATALOG, common_threshold
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Evidence, Finding


def make_finding(
    run: RunRecords,
    cause_id: str,
    measured: float | None,
    evidence: Iterable[Evidence | None],
    *,
    lost_s: float | None = None,
    estimate_basis: str = "",
    min_measured: float | None = None,
    fix_suffix: str = "",
    command: str | None = None,
    config_patch: dict[str, Any] | None = None,
    confidence: float | None = None,
) -> Finding | None:
    """The finding of a cause, where what was measured reaches its threshold; None elsewhere, and without a measure.

    lost_s: device-seconds that it took, never more than the run has. estimate: how they were guessed; empty: a clock
    measured them. threshold: another least value than the catalogue's. more_fix: said behind the fix, in a run of ours.
    """
    if measured is None:
        return None
    cause = CATALOG[cause_id]
    severity = cause.severity(measured)
    if severity is None or (min_measured is not None and measured < min_measured):
        return None
    evidence_lines = [line for line in evidence if line is not None]
    fix = cause.fix + fix_suffix if run.is_native_run else cause.external_fix or cause.fix
    fix, command, config_patch = _resolve_fix(run, fix, command or cause.command, config_patch, cause.config_patch)
    if lost_s is not None:
        lost_s = min(max(0.0, lost_s), run.totals.device_s)
        if estimate_basis:
            evidence_lines.append(
                Evidence(text=f"{lost_s:,.1f} device-seconds lost is an estimate: {estimate_basis}", value=lost_s)
            )
    return Finding(
        cause=cause.id,
        severity=severity,
        title=cause.title,
        evidence=evidence_lines,
        lost_device_s=lost_s,
        lost_cost=lost_s * run.price_per_device_hour / 3600
        if lost_s is not None and run.price_per_device_hour > 0
        else None,
        fix=fix,
        command=command,
        confidence=cause.confidence if confidence is None else confidence,
        config_patch=config_patch,
    )


def _resolve_fix(
    run: RunRecords, fix: str, command: str | None, config_patch: dict[str, Any] | None, default_patch: dict[str, Any]
) -> tuple[str, str | None, dict[str, Any]]:
    """What can be done: a job of others knows none of stoker's flags and settings, and what is set is not advised."""
    config_patch = default_patch if config_patch is None else config_patch
    is_flag = command is not None and command.startswith("--")
    if not run.is_native_run:
        return fix, None if is_flag else command, {}
    if config_patch and all(run.settings.get(name) == value for name, value in config_patch.items()):
        current_values = ", ".join(f"{name} is {value}" for name, value in config_patch.items())
        return f"{fix} ({current_values} already)", None if is_flag else command, {}
    return fix, command, config_patch


def is_long_enough(run: RunRecords) -> bool:
    """Whether shares of the time after the start say something."""
    return run.steady.wall_s >= common_threshold("steady_s")


def has_enough_stacks(run: RunRecords) -> bool:
    """Whether there are enough samples of stacks for their shares to say something."""
    return run.stacks.samples >= common_threshold("samples")


def stack_fraction(run: RunRecords, cause_id: str, *kinds: str) -> float | None:
    """Share of the main thread's samples in these kinds; None where they are too few for the cause to be sure."""
    if not has_enough_stacks(run):
        return None
    fraction = run.stacks.fraction(*kinds)
    error = math.sqrt(fraction * (1 - fraction) / run.stacks.samples) if 0 < fraction < 1 else 0.0
    min_fraction = CATALOG[cause_id].warning_threshold or 0.0
    return fraction if fraction - common_threshold("sigmas") * error >= min_fraction else None


def sampled_device_s(run: RunRecords, fraction: float) -> float | None:
    """The device-seconds of a share that samples of stacks showed; None where they are too few to say how many."""
    if not 0 < fraction < 1:
        return fraction * run.steady.device_s
    error = math.sqrt((1 - fraction) / (fraction * run.stacks.samples))
    return fraction * run.steady.device_s if error <= common_threshold("sampled_error") else None


def cpu_taken_by_others(run: RunRecords) -> tuple[float, float] | None:
    """(share of the time for which that held the run up, the processor time that its threads wanted, in cores): of one
    thread or less, the time that it stood and others had its processor; of more, their share of what was wanted.
    Threads that ran or waited for a processor are compared with what they got; what a quota or the run's own number of
    threads withholds is not others'. None where the cores are not full, or nobody counted the threads."""
    cpu_utilization, other_processes_cpu, cores = (
        run.cpu_utilization,
        run.host.other_processes_cpu.value,
        run.host.cores,
    )
    process_cpu, demanded = run.host.process_cpu, run.host.threads_running.value
    if (
        cpu_utilization is None
        or other_processes_cpu is None
        or not cores
        or process_cpu.value is None
        or demanded is None
    ):
        return None
    if (
        cpu_utilization < CATALOG["cpu_contention"].threshold("busy")
        or process_cpu.count < common_threshold("samples")
        or demanded <= 0
    ):
        return None
    throttled = run.host.throttled.value or 0.0
    missing_cores = min(other_processes_cpu * cores, demanded - process_cpu.value) - throttled * process_cpu.value
    return max(0.0, missing_cores) / max(1.0, demanded), demanded


def cpu_demand(run: RunRecords) -> float | None:
    """Cores' worth of processor time that the run used, or would have used if others and quotas had left it to the run.
    None where there are few samples, or processor time was withheld and nobody knows how much."""
    process_cpu = run.host.process_cpu
    if process_cpu.value is None or process_cpu.count < common_threshold("samples"):
        return None
    demand_ratio = cpu_demand_ratio(run)
    return None if demand_ratio is None else process_cpu.value * demand_ratio


def cpu_demand_ratio(run: RunRecords) -> float | None:
    """How many times as much processor time the run's threads wanted as they got: 1 where the cores have room. None
    where they are full, others use them too, and nobody counted the threads."""
    cause, cpu_utilization, other_processes_cpu = (
        CATALOG["cpu_contention"],
        run.cpu_utilization,
        run.host.other_processes_cpu.value,
    )
    is_saturated = cpu_utilization is not None and cpu_utilization >= cause.threshold("busy")
    is_throttled = CATALOG["cpu_quota"].severity(run.host.throttled.value or 0.0) is not None
    if not is_saturated and not is_throttled:
        return 1.0
    process_cpu, demanded = run.host.process_cpu.value, run.host.threads_running.value
    if process_cpu and demanded is not None:
        return max(1.0, demanded / process_cpu)
    return (
        None
        if is_throttled or (other_processes_cpu is not None and cause.severity(other_processes_cpu) is not None)
        else 1.0
    )


def thread_cpu_utilization(run: RunRecords, *phases: str) -> float | None:
    """Processor seconds that the training thread wanted for each second of these phases, after the start, where it
    computes by itself. None: nobody measured, or a device computes, whose phases are not the thread's."""
    duration_s, demand_ratio = sum(run.steady.phases.get(name, 0.0) for name in phases), cpu_demand_ratio(run)
    if not run.steady.thread_cpu_s or not run.on_cpu or duration_s <= 0 or demand_ratio is None:
        return None
    return demand_ratio * sum(run.steady.thread_cpu_s.get(name, 0.0) for name in phases) / duration_s


def fraction_of_phase(run: RunRecords, *phases: str) -> float | None:
    """Of the device time after the start; None in a run that is too short. Exchanges are those of all ranks."""
    if not is_long_enough(run):
        return None
    if run.num_ranks > 1 and {"comm", "straggler"} & set(phases):
        steady_s = run.totals.device_s - run.phase_seconds("startup", "compile")
        return run.phase_seconds(*phases) / steady_s if steady_s > 0 else None
    return run.steady_phase_fraction(*phases)


def make_phase_finding(
    run: RunRecords,
    cause_id: str,
    *phases: str,
    extra_evidence: Iterable[Evidence | None] = (),
    excluded_s: float = 0.0,
    **options: Any,
) -> Finding | None:
    """A cause that is as large as its phases: a clock measured them. not_s: seconds of them that it did not take."""
    evidence = [*(phase_evidence(run, name) for name in phases if run.phase_seconds(name) > 0), *extra_evidence]
    return make_finding(
        run,
        cause_id,
        fraction_of_phase(run, *phases),
        evidence,
        lost_s=run.phase_seconds(*phases) - excluded_s,
        **options,
    )


def phase_evidence(run: RunRecords, name: str) -> Evidence:
    fraction = run.phase_fraction(name)
    text = f"{name}: {run.phase_seconds(name):,.1f} device-seconds, {format_percent(fraction)} of the run"
    steady_fraction = fraction_of_phase(run, name)
    if steady_fraction is not None and abs(steady_fraction - fraction) >= 0.01:
        text += f", {format_percent(steady_fraction)} of the time after its start"
    return Evidence(text=text, value=fraction, source=f"steps.jsonl: phases.{name}")


def counter_evidence(text: str, value: float | None, field: str) -> Evidence | None:
    """A line of devices.jsonl's numbers; None where nobody recorded it. `{}` of the text is the value in percent."""
    if value is None:
        return None
    return Evidence(text=text.format(format_percent(value)), value=value, source=f"devices.jsonl: {field}")


def stack_evidence(run: RunRecords, description: str, *kinds: str) -> Evidence | None:
    """Where the main thread was, by samples of its stack, and in which of its own lines most."""
    if not run.stacks.samples:
        return None
    fraction = run.stacks.fraction(*kinds)
    text = f"the main thread was in {description} in {format_percent(fraction)} of {run.stacks.samples} samples"
    frames = sorted(run.stacks.frames.items(), key=lambda item: -item[1])[:2]
    if frames:
        text += "; most often at " + ", ".join(frame for frame, _ in frames)
    return Evidence(text=text, value=fraction, source="stacks.jsonl: main, frames")


def format_percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %" if fraction < 0.995 or fraction > 1 else "100 %"


def attempts_evidence(run: RunRecords) -> Evidence:
    count = run.totals.attempts
    return Evidence(text=f"{count} attempts", value=float(count), source="events.jsonl: attempt")
