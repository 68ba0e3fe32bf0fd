"""Helpers of the rules: findings from a cause's row and measured values, evidence lines, and fits of steady growth."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable
from typing import Any

from stoker_watch.diagnosis.causes.cause import Cause, common_threshold, fill_apis, find_cause
from stoker_watch.diagnosis.run_data import LinearFit, RunRecords, TimeSeries
from stoker_watch.findings.finding import Evidence, Finding, Severity


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


def rare_worker_start_fraction(run: RunRecords) -> float:
    """Fraction of the time after the start in which the training waited for loader workers that were started once more,
    as after the first epoch of a short run: a wait that will be rare. 0 if they are started again and again."""
    steady = run.steady
    if not run.is_external or steady.worker_starts >= find_cause("workers_start_again").threshold("min_starts"):
        return 0.0
    return min(steady.worker_start_s, steady.phases.get("input_wait", 0.0)) / max(steady.wall_s, 1e-9)


def make_traced_finding(run: RunRecords, cause: Cause, what: str, field: str) -> Finding | None:
    """The finding of the time of traced steps in which only `what` ran: a field of traces.jsonl, in seconds."""
    fraction = getattr(run.traces, field) / run.traces.wall_s
    text = f"only {what} ran in {percent(fraction)} of {run.traces.steps} traced steps"
    evidence = [make_evidence(text, fraction, f"traces.jsonl: {field}")]
    lost_s, basis = fraction * run.phase_seconds("compute"), "the traced fraction of the time in steps"
    return make_finding(run, cause, fraction, evidence, lost_s=lost_s, estimate_basis=basis)


def make_phase_finding(
    run: RunRecords,
    cause: Cause,
    *phases: str,
    extra_evidence: Iterable[Evidence | None] = (),
    excluded_s: float = 0.0,
    waited_s: float = 0.0,
    **options: Any,
) -> Finding | None:
    """A cause whose lost time is that of phases, as a clock measured it. excluded_s: seconds of them that it did not
    cost. waited_s: what it cost other ranks. options: as of `make_finding`."""
    evidence = [*(phase_evidence(run, name) for name in phases if run.phase_seconds(name) > 0), *extra_evidence]
    lost_s = run.phase_seconds(*phases) - excluded_s + waited_s
    return make_finding(run, cause, fraction_of_phase(run, *phases), evidence, lost_s=lost_s, **options)


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


def stack_fraction(run: RunRecords, cause: Cause, *kinds: str) -> float | None:
    """Fraction of the main thread's samples in these kinds; None if they are too few to exceed the cause's threshold
    with certainty."""
    if not has_enough_stacks(run):
        return None
    is_enough = certain_stack_fraction(run, *kinds) >= (cause.warning_threshold or 0.0)
    return run.stacks.fraction(*kinds) if is_enough else None


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


def make_stack_finding(
    run: RunRecords,
    cause: Cause,
    description: str,
    *kinds: str,
    extra_evidence: Iterable[Evidence | None] = (),
    max_fraction: float = 1.0,
    place_s: float = 0.0,
    **options: Any,
) -> Finding | None:
    """A cause of a job whose loop no clock measures: as large as the fraction of the main thread's stack samples.
    place_s: of the place that is named; from half of that on, it is what was lost, and where samples are few."""
    fraction = stack_fraction(run, cause, *kinds)
    if fraction is None or not is_long_enough(run):
        return None
    fraction = min(fraction, max_fraction)
    lost_s, basis = sampled_device_s(run, fraction), "the fraction of the main thread's stack samples"
    if place_s and (lost_s is None or lost_s / 2 <= place_s):
        lost_s, basis = min(place_s, run.steady_device_s), "the samples of the place"
    evidence = [stack_evidence(run, description, *kinds), *extra_evidence]
    return make_finding(run, cause, fraction, evidence, lost_s=lost_s, estimate_basis=basis, **options)


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


# Growth


def fit_steady_growth(series: TimeSeries) -> LinearFit | None:
    """The line of growth that looks like a leak: it is straight, and neither slows down nor has ended. All causes of
    this kind have the same thresholds."""
    threshold = find_cause("gpu_memory_leak").threshold
    if series.span_s < threshold("min_span_s") or len(series.points) < threshold("min_points"):
        return None
    series = series.without_releases(threshold("max_released"))
    whole, early, late = series.fit_line(), series.fit_line(0.0, 0.5), series.fit_line(0.5, 1.0)
    if whole is None or early is None or late is None or whole.slope <= 0:
        return None
    if whole.r_squared < threshold("min_r_squared") or late.slope < threshold("min_slope_ratio") * early.slope:
        return None
    newest = series.fit_line(0.8, 1.0)
    has_ended = newest is not None and newest.slope < threshold("min_newest_ratio") * late.slope
    return late if late.slope > 0 and not has_ended else None


@dataclasses.dataclass(frozen=True)
class Stairs:
    """Growth by stairs of about the same size, as at the end of each epoch. size: of a stair; interval_s: from one to
    the next."""

    size: float
    interval_s: float


def fit_stairs(series: TimeSeries) -> Stairs | None:
    """Stairs that go on: between them the series is flat, the last one is as large as the others and not long ago.
    Memory that is in use only for a time does not count: what counts at any moment is the least of the time after it.
    """
    threshold = find_cause("host_memory_leak").threshold
    points = series.points
    if series.span_s < threshold("min_stairs_span_s"):
        return None
    kept = list(itertools.accumulate(reversed(series.values), min))[::-1]
    growth = kept[-1] - kept[0] if kept else 0.0
    rises: list[tuple[float, float, float]] = []  # start, end, size
    was_rising = False
    for (start_t, _), (end_t, _), low, high in zip(points, points[1:], kept, kept[1:], strict=False):
        is_rising = high - low > threshold("flat_fraction") * growth
        if is_rising:
            begin_t, _, size = rises.pop() if was_rising else (start_t, 0.0, 0.0)
            rises.append((begin_t, end_t, size + high - low))
        was_rising = is_rising
    if len(rises) < threshold("min_stairs"):
        return None
    starts, sizes = [start for start, _, _ in rises], [size for _, _, size in rises]
    intervals = [later - earlier for earlier, later in itertools.pairwise(starts)]
    is_regular = max(intervals) <= 2 * min(intervals) and max(sizes[1:]) <= 2 * min(sizes[1:])
    noise = statistics.median(value - low for value, low in zip(series.values, kept, strict=True))
    is_noise = min(sizes[1:]) < 2 * noise
    is_flat_between = sum(end - start for start, end, _ in rises) <= series.span_s / 2
    goes_on = points[-1][0] - starts[-1] <= 2 * max(intervals)
    if is_noise or not (is_regular and is_flat_between and goes_on and sum(sizes) >= growth / 2):
        return None
    return Stairs(sum(sizes[1:]) / len(sizes[1:]), sum(intervals) / len(intervals))


def format_duration(seconds: float) -> str:
    hours = seconds / 3600
    days = hours / 24
    if days >= 2:
        return f"{days:,.0f} days"
    return f"{hours:.1f} h" if hours >= 1 else f"{seconds / 60:.0f} min"


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
