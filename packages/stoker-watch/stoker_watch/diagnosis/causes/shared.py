"""Helpers of the rules: findings from a cause's row and measured values, evidence lines, and fits of steady growth."""

import math
from collections.abc import Iterable
from typing import Any

from stoker_watch.diagnosis.causes.cause import Cause, common_threshold, fill_apis
from stoker_watch.diagnosis.run_data import RunRecords
from stoker_watch.findings.finding import Evidence, Finding, Severity

ONE_RANK = 0.9
"""Fraction of the time that all ranks spent in a phase, from which rank 0 counts as the only one that was in it."""


def make_finding(
    run: RunRecords,
    cause: Cause,
    measured: float | None,
    evidence: Iterable[Evidence | None],
    *,
    severity: Severity | None = None,
    title: str = "",
    place: str = "",
    lost_s: float | None = None,
    estimate_basis: str = "",
    min_measured: float | None = None,
    fix: str | None = None,
    command: str | None = None,
    config_patch: dict[str, Any] | None = None,
    confidence: float | None = None,
) -> Finding | None:
    """The finding of a cause if the measured value reaches a threshold; None otherwise, and if nothing was measured.

    severity: instead of the one from `measured`. lost_s: device-seconds that were lost, at most those of the run.
    estimate_basis: how they were estimated; empty: measured by a clock. min_measured: an additional minimum of
    `measured`. title, fix, command, config_patch, confidence: instead of the row's.
    """
    if measured is None:
        return None
    severity = severity or cause.severity(measured)
    if severity is None or (min_measured is not None and measured < min_measured):
        return None
    evidence_lines = [item for item in evidence if item is not None]
    if fix is None:
        fix = cause.fix if run.is_native_run else cause.external_fix or cause.fix
    fix, command, config_patch = _resolve_fix(run, fix, command or cause.command, config_patch, cause.config_patch)
    lost_cost = None
    if lost_s is not None:
        lost_s = min(max(0.0, lost_s), run.totals.device_s)
        if estimate_basis:
            text = f"{lost_s:,.1f} {device_seconds(run)} lost is an estimate: {estimate_basis}"
            evidence_lines.append(make_evidence(text, lost_s))
        if run.price_per_device_hour > 0:
            lost_cost = lost_s * run.price_per_device_hour / 3600
    return Finding(
        id=cause.id,
        severity=severity,
        title=title or cause.title,
        place=place,
        evidence=evidence_lines,
        lost_device_s=lost_s,
        lost_cost=lost_cost,
        fix=fix,
        command=command,
        confidence=cause.confidence if confidence is None else confidence,
        config_patch=config_patch,
    )


def fill_fix(run: RunRecords, text: str) -> str:
    """A fix with the names of the job's own framework and loader."""
    return fill_apis(text, "torch" if run.is_native_run else run.frameworks or run.loader, run.loader)


def _resolve_fix(
    run: RunRecords, fix: str, command: str | None, config_patch: dict[str, Any] | None, default_patch: dict[str, Any]
) -> tuple[str, str | None, dict[str, Any]]:
    """Leaves out stoker's flags and settings for a job that stoker did not train, and settings that are set already."""
    config_patch = default_patch if config_patch is None else config_patch
    is_flag = command is not None and command.startswith(("--", "stoker train"))
    fix = fill_fix(run, fix)
    if not run.is_native_run:
        is_of_torch = command is not None and "torch" in command.lower()  # also PYTORCH_CUDA_ALLOC_CONF
        return fix, None if is_flag or (is_of_torch and "torch" not in run.frameworks) else command, {}
    if config_patch and all(run.settings.get(name) == value for name, value in config_patch.items()):
        current_values = ", ".join(f"{name} is {value}" for name, value in config_patch.items())
        return f"{fix} ({current_values} already)", None if is_flag else command, {}
    return fix, command, config_patch


def is_short(run: RunRecords) -> bool:
    """Whether the whole run is so short that what it does once is a large part of it."""
    return run.totals.wall_s < common_threshold("short_s") or run.totals.steps < common_threshold("short_steps")


def is_very_short(run: RunRecords) -> bool:
    return run.totals.wall_s < common_threshold("short_s") and run.totals.steps < common_threshold("short_steps")


def is_long_enough(run: RunRecords) -> bool:
    """Whether the time after the start is long enough for fractions of it."""
    return run.steady.wall_s >= common_threshold("steady_s")


def fraction_of_phase(run: RunRecords, *phases: str) -> float | None:
    """Fraction of the device time after the start; None in a run that is too short. Collectives: of all ranks."""
    if not is_long_enough(run):
        return None
    if run.num_ranks > 1 and {"comm", "straggler"} & set(phases):
        steady_s = run.totals.device_s - run.phase_seconds("startup", "compile")
        return run.phase_seconds(*phases) / steady_s if steady_s > 0 else None
    return run.steady_phase_fraction(*phases)


# Stack samples


def has_enough_stacks(run: RunRecords) -> bool:
    return run.stacks.samples >= common_threshold("min_samples")


def samples_contradict(run: RunRecords, fraction: float, *kinds: str) -> bool:
    """Whether the main thread was in these kinds in less than half of `fraction` of its samples, and not by chance."""
    count, seen = run.stacks.samples, round(run.stacks.fraction(*kinds) * run.stacks.samples)
    if not has_enough_stacks(run) or not 0 < fraction <= 1 or seen >= fraction * count / 2:
        return False
    return binomial_tail(count - seen, count, 1 - fraction) < common_threshold("max_chance")


def binomial_tail(successes: int, count: int, fraction: float) -> float:
    """Probability of at least so many successes of `count`."""
    if successes <= 0 or fraction >= 1:
        return 1.0
    if fraction <= 0:
        return 0.0
    mean, reach = count * fraction, 40 * math.sqrt(count * fraction * (1 - fraction)) + 1  # nothing is beyond it
    chosen = math.lgamma(count + 1)  # by logarithms: the coefficients of a thousand samples are beyond a float
    return min(1.0, sum(
        math.exp(chosen - math.lgamma(n + 1) - math.lgamma(count - n + 1)
                 + n * math.log(fraction) + (count - n) * math.log1p(-fraction))
        for n in range(max(successes, int(mean - reach)), min(count, max(successes, int(mean + reach))) + 1)
    ))  # fmt: skip


def certain_stack_fraction(run: RunRecords, *kinds: str) -> float:
    """At least this fraction of the time was in these kinds, as far as its number of samples shows."""
    fraction = run.stacks.fraction(*kinds)
    error = math.sqrt(fraction * (1 - fraction) / run.stacks.samples) if 0 < fraction < 1 else 0.0
    return fraction - common_threshold("sigmas") * error


def sampled_device_s(run: RunRecords, fraction: float) -> float | None:
    """Device-seconds of a fraction that stack samples showed; None if there are too few of them."""
    if not 0 < fraction < 1:
        return fraction * run.steady_device_s
    error = math.sqrt((1 - fraction) / (fraction * run.stacks.samples))
    return fraction * run.steady_device_s if error <= common_threshold("max_sampling_error") else None


# Evidence


def device_seconds(run: RunRecords) -> str:
    """The unit of times that are summed over what trains."""
    if run.has_device:
        return "device-seconds"
    return "seconds of all ranks" if run.num_ranks > 1 else "seconds"


def make_evidence(text: str, value: float | None = None, source: str = "") -> Evidence:
    return Evidence(text=text, value=None if value is None else float(value), source=source)


def percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %" if fraction < 0.995 or fraction > 1 else "100 %"


def phase_evidence(run: RunRecords, name: str) -> Evidence:
    fraction = run.phase_fraction(name)
    text = f"{name}: {run.phase_seconds(name):,.1f} {device_seconds(run)}, {percent(fraction)} of the run"
    steady_fraction = fraction_of_phase(run, name)
    if steady_fraction is not None and abs(steady_fraction - fraction) >= 0.01:
        text += f", {percent(steady_fraction)} of the time after its start"
    return make_evidence(text, fraction, f"steps.jsonl: phases.{name}")


def sample_evidence(text: str, value: float | None, field: str) -> Evidence | None:
    """A line about a number of devices.jsonl; None where it was not recorded. `{}` in the text becomes the value in
    percent."""
    return None if value is None else make_evidence(text.format(percent(value)), value, f"devices.jsonl: {field}")


def cpu_utilization_evidence(run: RunRecords) -> Evidence | None:
    busy = run.cpu_utilization
    text = f"the cores were {100 * (busy or 0.0):.0f} % busy"
    return None if busy is None else make_evidence(text, busy, "devices.jsonl: cpu_core_utilization")


def process_cpu_evidence(run: RunRecords) -> Evidence | None:
    cores = run.host.process_cpu.value
    text = f"the process used {cores or 0.0:.2f} cores"
    return None if cores is None else make_evidence(text, cores, "devices.jsonl: process_cpu")


def stack_evidence(run: RunRecords, description: str, *kinds: str) -> Evidence | None:
    """What the main thread did, by samples of its stack, and in which lines of the job's own code most often. None if
    it did this in too few of them to support anything."""
    fraction = run.stacks.fraction(*kinds)
    if fraction < common_threshold("min_supporting_fraction"):
        return None
    text = f"the main thread was in {description} in {percent(fraction)} of {run.stacks.samples} samples"
    frames = sorted(run.stacks.frames.items(), key=lambda item: -item[1])[:2]
    if frames:
        text += "; most often at " + ", ".join(frame for frame, _ in frames)
    return make_evidence(text, fraction, "stacks.jsonl: main_thread, frames")


def attempts_evidence(run: RunRecords) -> Evidence:
    return make_evidence(f"{run.totals.attempts} attempts", run.totals.attempts, "events.jsonl: attempt")


# GPUs


def driver_utilization(run: RunRecords) -> float | None:
    """Mean utilization of the GPUs, if they are exactly the devices that train."""
    means = [gpu.utilization.value for gpu in run.gpus.values() if gpu.utilization.value is not None]
    if not means or len(means) != len(run.gpus) or len(means) != run.totals.devices:
        return None
    return sum(means) / len(means)


def max_gpu_memory_fraction(run: RunRecords) -> float | None:
    """Peak memory in use of the GPU that used most, as a fraction of its memory."""
    fractions = [
        gpu.max_memory_used_bytes / gpu.memory_total_bytes
        for gpu in run.gpus.values()
        if gpu.max_memory_used_bytes and gpu.memory_total_bytes
    ]
    return max(fractions, default=None)


def wait_in_evaluations_s(run: RunRecords) -> float:
    """Device-seconds of a watched job's evaluations in which they wait for images, too: what the stack samples show
    beyond the phase `input_wait`, which is that of the training. 0 if it may be chance."""
    eval_s = run.phase_seconds("eval")
    if not run.is_external or eval_s <= 0 or not has_enough_stacks(run):
        return 0.0
    fraction, waited_s = run.stacks.fraction("input_wait", "decode"), run.phase_seconds("input_wait")
    sampled_s = sum(seconds for (role, _), seconds in run.place_totals.items() if role == "training")
    if certain_stack_fraction(run, "input_wait", "decode") * sampled_s <= waited_s:
        return 0.0
    return min(eval_s, fraction * sampled_s - waited_s)


def waits_for_rank_0_s(run: RunRecords, phase: str) -> float:
    """Device-seconds that the other ranks waited for rank 0 while it alone was in a phase."""
    alone_s = run.steady.phases.get(phase, 0.0)
    if run.num_ranks < 2 or alone_s < ONE_RANK * run.phase_seconds(phase):
        return 0.0
    return min(run.totals.straggler_s.get(0, 0.0), (run.num_ranks - 1) * alone_s)


def cores_evidence(run: RunRecords) -> Evidence:
    """That steps and workers want the same cores."""
    demanded, got = run.host.threads_running.value or 0.0, run.host.process_cpu.value or 0.0
    text = f"steps and loader workers want the same cores: their threads demanded {demanded:.2f} and got {got:.2f}"
    return make_evidence(text, demanded - got, "devices.jsonl: threads_running, process_cpu")
