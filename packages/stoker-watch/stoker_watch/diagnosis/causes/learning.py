"""What the run learns of what: learning rate, overfitting, divergence; augmentation, anchors, weights, images."""

import itertools
import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from stoker_watch.diagnosis.causes.cause import Cause, common_threshold, find_cause, worst
from stoker_watch.diagnosis.causes.mistakes import (
    TRAINING_MISTAKE,
    MistakeKind,
    mistake_evidence,
    mistake_kinds,
    mistakes_of,
)
from stoker_watch.diagnosis.causes.shared import fill_fix, is_long_enough, make_evidence, make_finding, percent
from stoker_watch.diagnosis.run_data import MAX_EXAMPLES, RunRecords, TimeSeries
from stoker_watch.durations import parse_duration
from stoker_watch.errors import ConfigError
from stoker_watch.findings.finding import Evidence, Finding, Severity
from stoker_watch.runs.schemas import Event

_ALL_STEPS_LOST = "all of the time in steps: {} was learned in it"
DIVERGED = "diverged"
"""Id of the end of a job whose output shows such losses."""
LR_TOO_HIGH = find_cause("lr_too_high")
LR_TOO_LOW = find_cause("lr_too_low")
UNSTABLE_TRAINING = find_cause("unstable_training")
ANCHORS_MISS_BOXES = find_cause("anchors_miss_boxes")
_WITHOUT_GRADIENTS = "steps.jsonl: steps_without_gradients"
_ZERO = "The learning rate is 0"
_VANISHED = "The learning rate decays to nearly zero long before the end"


class _Divergence(NamedTuple):
    text: str
    ratio: float
    lost_s: float | None
    estimate_basis: str


def lr_too_high(run: RunRecords, cause: Cause) -> Finding | None:
    lost_s = device_s_since_lowest_loss(run)
    if events := run.learning.events.get("lr_too_high"):
        return finding_from_events(run, cause, events, lost_s, "the time since the loss was lowest")
    divergence, seen = _find_divergence(run), mistakes_of(run, cause)
    thirds = _median_thirds(run.learning.loss)
    if divergence is None and seen and thirds and thirds[-1] >= LR_TOO_LOW.threshold("learned") * thirds[0]:
        text = f"the loss was {thirds[0]:.3g} in the first third and is {thirds[-1]:.3g}"
        steps_s = run.phase_seconds("compute", "unattributed")
        divergence = _Divergence(text, thirds[-1] / thirds[0], steps_s, _ALL_STEPS_LOST.format("little"))
    if divergence is None:
        return None
    text, ratio, lost_s, basis = divergence
    evidence = [make_evidence(text, ratio, "steps.jsonl: losses"), lr_evidence(run)]
    evidence += [*(mistake_evidence(*one) for one in seen), _scale_evidence(run)]
    confidence, fix = (0.8, seen[0][0].fix) if seen else (0.7, None)  # the loss alone: other faults raise it, too
    if not seen and ratio < cause.threshold("jump") and run.totals.steps < common_threshold("short_steps"):
        confidence, lost_s = 0.5, None  # so few batches differ by as much
    return make_finding(run, cause, 1, evidence, lost_s=lost_s, estimate_basis=basis, confidence=confidence, fix=fix)


def _find_divergence(run: RunRecords) -> _Divergence | None:
    """The loss has risen, is far above its beginning, jumped and did not come back, or diverged and has not improved
    since."""
    cause, loss = LR_TOO_HIGH, run.learning.loss
    values, noise = loss.values, _log_loss_noise(run)
    if blow_up := _find_blow_up(run, values):  # also if the loss is 0 since
        return blow_up
    thirds = _median_thirds(loss)
    if thirds is None or len(values) < cause.threshold("min_windows") or min(values) <= 0:
        return None
    min_log_rise = cause.threshold("sigmas") * noise
    medians = loss.running_medians(int(cause.threshold("median_window")))
    has_learned = bool(medians) and medians[-1] < cause.threshold("half_learned") * values[0]
    if len(medians) > 1 and medians[-1] >= cause.threshold("rise") * min(medians) and not has_learned:
        lowest, newest = min(medians), medians[-1]
        if math.log(newest / lowest) >= min_log_rise:
            text = f"the loss has risen from {lowest:.3g} to {newest:.3g}"
            lost_s = device_s_since_lowest_loss(run)
            return _Divergence(text, newest / lowest, lost_s, "the time since the loss was lowest")
    first, newest = values[0], thirds[-1]
    steps_s, basis = run.phase_seconds("compute", "unattributed"), _ALL_STEPS_LOST.format("nothing")
    if newest >= cause.threshold("max_loss"):
        return _Divergence(f"the loss is {newest:.3g}", newest / first, steps_s, basis)
    if newest >= cause.threshold("above_first") * first and math.log(newest / first) >= min_log_rise:
        text = f"the loss was {first:.3g} at the beginning and is {newest:.3g}"
        return _Divergence(text, newest / first, steps_s, basis)
    if max(values) >= cause.threshold("blew_up") * newest and newest >= cause.threshold("learns") * thirds[1]:
        text = f"the loss jumped to {max(values):.3g}, is {newest:.3g} and does not fall any more"
        return _Divergence(text, max(values) / newest, steps_s, basis)
    if (still := _find_constant_loss(run)) is not None and still.value >= cause.threshold("risen") * first:
        text = f"the loss has risen from {first:.3g} to {still.value:.4g}, {still.text}"
        return _Divergence(text, still.value / first, steps_s, basis)
    jumps = [
        value
        for value, lowest_before in zip(values[1:], itertools.accumulate(values, min), strict=False)
        if value >= cause.threshold("jump") * lowest_before and value >= cause.threshold("above_first") * first
    ]
    if jumps and newest > first and math.log(max(jumps) / first) >= min_log_rise:
        text = f"the loss was {first:.3g} at the beginning, jumped to {max(jumps):.3g} and is {newest:.3g} now"
        return _Divergence(text, max(jumps) / first, steps_s, basis)
    if len(jumps) >= cause.threshold("jumps"):
        text = (
            f"the loss was {first:.3g} at the beginning and has jumped {len(jumps)} times, to {max(jumps):.3g} at most"
        )
        return _Divergence(text, max(jumps) / first, None, "")
    return None


def _find_blow_up(run: RunRecords, values: Sequence[float]) -> _Divergence | None:
    """The loss began small and was enormous in several windows."""
    cause = LR_TOO_HIGH
    if len(values) < cause.threshold("min_windows") or values[0] <= 0:
        return None
    floor = max(cause.threshold("max_loss"), cause.threshold("blew_up") * values[0])
    if sum(value >= floor for value in values) < cause.threshold("jumps"):
        return None
    text = f"the loss was {values[0]:.3g} at the beginning and has jumped to {max(values):.3g}"
    steps_s, basis = run.phase_seconds("compute", "unattributed"), _ALL_STEPS_LOST.format("nothing")
    return _Divergence(text, max(values) / values[0], steps_s, basis)


class _ConstantLoss(NamedTuple):
    value: float
    text: str


def _find_constant_loss(run: RunRecords) -> _ConstantLoss | None:
    """The loss of the newest windows, if it is constant. A training that has converged still has the noise of its
    batches; a loss that is printed with few digits may only look constant."""
    threshold, values = LR_TOO_LOW.threshold, run.learning.loss.values
    still: list[float] = []
    low, high = math.inf, 0.0
    for value in reversed(values):
        low, high = min(low, value), max(high, value)
        if low <= 0 or high > (1 + threshold("still")) * low:
            break
        still.append(value)
    steps = round(run.totals.steps * len(still) / max(1, len(values)))
    digits = max((len(f"{value:.6g}".replace(".", "").strip("0")) for value in still), default=0)
    if len(still) < max(threshold("min_windows"), threshold("still_part") * len(values)) or _is_warming_up(run):
        return None
    if steps < threshold("still_steps") or digits < threshold("digits"):
        return None
    value = median(still)
    text = f"and does not change in about {steps:,} steps"
    classes = round(math.exp(value)) if value < math.log(threshold("max_classes")) else 0
    if classes > 1 and abs(value - math.log(classes)) <= threshold("still") * value:
        text += f": it is ln {classes}, the loss of a model that guesses among {classes} classes"
    return _ConstantLoss(value, text)


def lr_too_low(run: RunRecords, cause: Cause) -> Finding | None:
    """By an optimizer whose parameters have no gradients; by a schedule that ends early; by the run's own event, unless
    the loss has fallen since; by a constant loss; else by one that hardly changes: at a tiny learning rate, in a
    thousand steps, or (info) in fewer."""
    found = _without_gradients(run, cause) or _at_vanished_lr(run, cause)
    if found is not None:
        return found
    steps_s, basis = run.phase_seconds("compute", "unattributed"), _ALL_STEPS_LOST.format("little")
    thirds = _median_thirds(run.learning.loss)
    if events := run.learning.events.get("lr_too_low"):
        has_learned = thirds is not None and thirds[-1] < cause.threshold("learned") * thirds[0]
        return None if has_learned else finding_from_events(run, cause, events, steps_s, basis)
    still, first = _find_constant_loss(run), next(iter(run.learning.loss.values), 0.0)
    if still is not None and cause.threshold("learned") * first < still.value < LR_TOO_HIGH.threshold("risen") * first:
        text = f"the loss is {still.value:.4g} {still.text}"
        constant = [make_evidence(text, still.value, "steps.jsonl: losses"), _scale_evidence(run)]
        fix = cause.other_fixes["still"]
        return make_finding(run, cause, 2, constant, fix=fix, lost_s=steps_s, estimate_basis=basis, confidence=0.8)
    return None if thirds is None or not _is_judged(run, cause, thirds) else _explain_flat(run, cause, thirds)


def _is_judged(run: RunRecords, cause: Cause, thirds: tuple[float, float, float]) -> bool:
    """Whether a loss that hardly changes says something: seen from the beginning, in enough steps, of a training that
    neither was restarted, after which the loss is again what it was, nor warms up, nor has another trouble."""
    learning, threshold = run.learning, cause.threshold
    is_whole = learning.first_step is not None and learning.first_step <= threshold("max_first_step")
    is_long = len(learning.loss.points) >= threshold("min_windows") and run.steady.steps >= threshold("min_steps")
    has_trouble = bool(learning.events) or learning.non_finite_event is not None or run.totals.attempts > 1
    is_flat = _max_relative_change(thirds) <= threshold("max_loss_change")
    return is_whole and is_long and not has_trouble and is_flat and not _is_warming_up(run)


def _explain_flat(run: RunRecords, cause: Cause, loss: tuple[float, float, float]) -> Finding | None:
    """Why a loss hardly changes: a model that guesses, a tiny learning rate, or not known (info)."""
    steps_s, basis = run.phase_seconds("compute", "unattributed"), _ALL_STEPS_LOST.format("little")
    if guesses := _find_guessing(run, loss):
        text, kind, seen_loss = guesses
        of_guessing = [make_evidence(text, loss[-1], "steps.jsonl: losses"), seen_loss, lr_evidence(run),
                       _scale_evidence(run)]  # fmt: skip
        return make_finding(
            run, cause, 2, of_guessing, severity=kind.severity, fix=kind.fix, lost_s=steps_s, estimate_basis=basis,
            confidence=0.8,
        )  # fmt: skip
    lr = run.learning.lr.max_value
    text = f"the loss was {loss[0]:.4g} at the beginning and is {loss[-1]:.4g} after {run.totals.steps:,} steps"
    evidence = [make_evidence(text, loss[-1] / loss[0], "steps.jsonl: losses"), lr_evidence(run), _scale_evidence(run)]
    if lr is not None and lr <= cause.threshold("max_lr"):
        command = lr_command(10 * lr) if lr else None
        return make_finding(run, cause, 2, evidence, lost_s=steps_s, estimate_basis=basis, command=command)
    if run.steady.steps < cause.threshold("min_flat_steps"):
        return None
    is_still = _max_relative_change(loss) <= cause.threshold("max_still_change")
    if is_still and run.steady.steps >= cause.threshold("min_still_steps"):
        return make_finding(run, cause, 2, evidence, lost_s=steps_s, estimate_basis=basis, confidence=0.7)
    return make_finding(run, cause, 1, evidence, confidence=0.4)


def _without_gradients(run: RunRecords, cause: Cause) -> Finding | None:
    steady, without = run.steady, run.steady.steps_without_gradients
    if without < max(cause.threshold("min_steps"), cause.threshold("without_gradients") * steady.steps):
        return None
    text = f"no parameter of the optimizer had a gradient in {without:,} of {steady.steps:,} steps"
    kind, shown = mistake_kinds()["no_gradients"], [make_evidence(text, without, _WITHOUT_GRADIENTS)]
    seen = next((values for other, values in mistakes_of(run, cause) if other is kind), None)
    shown += [] if seen is None else [mistake_evidence(kind, seen)]
    return make_finding(
        run, cause, 2, shown, severity="critical", title=kind.title, fix=kind.fix,
        lost_s=run.phase_seconds("compute", "unattributed"), place="" if seen is None else str(seen.get("place") or ""),
        estimate_basis=_ALL_STEPS_LOST.format("little"), confidence=0.9,
    )  # fmt: skip


def _at_vanished_lr(run: RunRecords, cause: Cause) -> Finding | None:
    vanished, steps = run.learning.steps_with_vanished_lr, run.totals.steps
    severity: Severity | None = None
    if vanished < max(cause.threshold("min_steps"), cause.threshold("vanished_steps") * steps):
        return None
    if run.learning.lr.max_value:
        part = f"{cause.threshold('vanished'):g} of the highest learning rate"
        text = f"{vanished:,} of {steps:,} steps were at less than {part}"
        shown = [make_evidence(text, vanished, "steps.jsonl: lr"), lr_evidence(run)]
        title, fix = _VANISHED, cause.other_fixes["vanished"]
    else:
        shown = [make_evidence(f"the learning rate was 0 in {vanished:,} steps", 0.0, "steps.jsonl: lr")]
        title, fix, severity = _ZERO, cause.other_fixes["zero"], "critical"
    lost_s = run.phase_seconds("compute", "unattributed") * vanished / steps
    return make_finding(
        run, cause, 2, shown, severity=severity, title=title, fix=fix, lost_s=lost_s,
        estimate_basis="these steps' part of the time in steps", confidence=0.9,
    )  # fmt: skip


def _find_guessing(run: RunRecords, thirds: tuple[float, float, float]) -> tuple[str, MistakeKind, Evidence] | None:
    """(that a cross-entropy stands at the logarithm of the number of its classes, its kind, what the hook saw)."""
    threshold = LR_TOO_LOW.threshold
    seen = [entry for entry in mistakes_of(run, LR_TOO_LOW) if entry[0].id == "class_loss"]
    if not seen or run.steady.steps < threshold("guess_steps") or mistakes_of(run, LR_TOO_HIGH):
        return None
    kind, values = seen[0]
    classes = values.get("classes")
    if not isinstance(classes, int) or not 2 <= classes <= threshold("max_guessed"):
        return None
    expected = math.log(classes)
    if any(abs(value / expected - 1) > threshold("guess_fraction") for value in thirds[1:]):
        return None
    of_guessing = f"a model that guesses among {classes:,} classes has ln {classes:,} = {expected:.4g}"
    text = f"the loss is {thirds[-1]:.4g} after {run.totals.steps:,} steps; {of_guessing}"
    return text, kind, mistake_evidence(kind, values)


def _is_warming_up(run: RunRecords) -> bool:
    lr, newest_lr = run.learning.lr, run.learning.newest_lr
    if lr.max_value is None or lr.min_value is None or newest_lr is None:
        return False
    return lr.min_value < LR_TOO_LOW.threshold("rising_lr") * lr.max_value <= newest_lr


def finding_from_events(
    run: RunRecords, cause: Cause, events: list[Event], lost_s: float | None, estimate_basis: str
) -> Finding | None:
    """The finding of a cause that the run itself reported; the newest event has the learning rate to try."""
    evidence = [event_evidence(event) for event in events[-MAX_EXAMPLES:]]
    command = lr_command(events[-1].data.get("suggested_lr"))
    return make_finding(run, cause, 2, evidence, command=command, lost_s=lost_s, estimate_basis=estimate_basis)


def event_evidence(event: Event) -> Evidence:
    return make_evidence(event.text, source=f"events.jsonl: {event.kind}")


def lr_command(lr: float | None) -> str | None:
    return None if lr is None else f"--lr {lr:.2g}"


def lr_evidence(run: RunRecords) -> Evidence | None:
    lr = run.learning.lr.max_value
    return None if lr is None else make_evidence(f"the learning rate was {lr:.3g} at most", lr, "steps.jsonl: lr")


def _scale_evidence(run: RunRecords) -> Evidence | None:
    """Images up to 255, which tell something where a training fails; many detectors expect them."""
    seen = mistakes_of(run, TRAINING_MISTAKE)
    return next((mistake_evidence(kind, values) for kind, values in seen if kind.id == "unscaled_images"), None)


def device_s_since_lowest_loss(run: RunRecords) -> float | None:
    points = run.learning.loss.points
    if not points or not is_long_enough(run):
        return None
    lowest_t = min(points, key=lambda point: point[1])[0]
    return (points[-1][0] - lowest_t) * run.num_devices


def _median_thirds(series: TimeSeries) -> tuple[float, float, float] | None:
    """The medians of its thirds; None if they are not positive."""
    values = series.values
    third = len(values) // 3
    if not third:
        return None
    first, middle, last = median(values[:third]), median(values[third:-third]), median(values[-third:])
    return (first, middle, last) if min(first, middle, last) > 0 else None


def _max_relative_change(thirds: tuple[float, float, float]) -> float:
    return max(abs(value / thirds[0] - 1) for value in thirds)


def _log_loss_noise(run: RunRecords) -> float:
    """Standard deviation of the log-loss from window to window, independent of the trend."""
    values = [value for value in run.learning.loss.values if value > 0]
    changes = sorted(abs(math.log(b / a)) for a, b in itertools.pairwise(values))
    return 1.4826 * changes[len(changes) // 2] / math.sqrt(2) if changes else 0.0


def overfitting(run: RunRecords, cause: Cause) -> Finding | None:
    learning = run.learning
    if learning.best is None or learning.newest_ap is None or learning.best[1] <= 0:
        return None
    best_t, best_ap, _ = learning.best
    ap_drop = best_ap - learning.newest_ap
    if ap_drop < cause.threshold("min_ap_drop") or learning.evals_since_best < cause.threshold("evaluations"):
        return None
    if learning.num_gt_boxes:
        mean_ap = best_ap - ap_drop / 2
        standard_error = math.sqrt(mean_ap * (1 - mean_ap) / learning.num_gt_boxes)
        if ap_drop < cause.threshold("sigmas") * standard_error:
            return None
    before = [value for t, value in learning.loss.points if t <= best_t]
    after = [value for t, value in learning.loss.points if t > best_t]
    if not before or not after or after[-1] >= before[-1]:
        return None
    fall, loss = f"AP was {best_ap:.3f} and is {learning.newest_ap:.3f}", after[-1]
    fell = f"the training loss fell from {before[-1]:.3g} to {loss:.3g}"
    evidence = [
        make_evidence(fall, -ap_drop, "events.jsonl: evaluated"),
        make_evidence(fell, loss, "steps.jsonl: losses"),
    ]
    lost_s, basis = run.num_ranks * learning.device_s_since_best, "all since the best evaluation"
    return make_finding(run, cause, ap_drop / best_ap, evidence, lost_s=lost_s, estimate_basis=basis)


def non_finite_loss(run: RunRecords, cause: Cause) -> Finding | None:
    learning, points = run.learning, run.learning.loss.points
    event, num_windows = learning.non_finite_event, learning.windows_without_loss
    has_lost_loss = bool(points) and num_windows >= cause.threshold("windows")
    seen = [mistake_evidence(kind, values) for kind, values in mistakes_of(run, cause)]
    if event is None and not seen and (run.is_external or not has_lost_loss):
        return None
    if event is not None and not seen and not num_windows and points and points[-1][0] > event.t + 1.0:
        return None  # it became finite again
    evidence: list[Evidence | None] = [event_evidence(event) if event is not None else None, *seen]
    if has_lost_loss:
        text = f"the last {num_windows} windows of steps had no finite loss"
        evidence.append(make_evidence(text, num_windows, "steps.jsonl: losses"))
    rollbacks = learning.events.get("rolled_back", [])
    evidence += [lr_evidence(run), *(event_evidence(rollback) for rollback in rollbacks[-MAX_EXAMPLES:])]
    sudden, fix = find_sudden(run)
    evidence.insert(1, sudden)
    command = lr_command(rollbacks[-1].data.get("lr")) if rollbacks else None
    lost_s = run.num_ranks * learning.device_s_without_loss or None
    basis = "all since the last finite loss" if lost_s else ""
    return make_finding(run, cause, 1, evidence, fix=fix, lost_s=lost_s, estimate_basis=basis, command=command)


def find_sudden(run: RunRecords) -> tuple[Evidence | None, str | None]:
    """(the last finite loss, the fix), where the loss of a foreign job had not grown before; else nothing."""
    cause, values = find_cause("non_finite_loss"), run.learning.loss.values
    if not run.is_external or not values or not 0 < values[-1] <= cause.threshold("sudden") * values[0]:
        return None, None
    text = f"the last finite loss was {values[-1]:.4g}"
    return make_evidence(text, values[-1], "steps.jsonl: losses"), fill_fix(run, cause.other_fixes["sudden"])


def unstable_training(run: RunRecords, cause: Cause) -> Finding | None:
    learning = run.learning
    rollbacks, spikes = learning.events.get("rolled_back", []), learning.events.get("loss_spike", [])
    fraction = learning.skipped_steps / run.totals.steps if run.totals.steps else 0.0
    skip_severity = cause.severity(fraction)
    rollback_severity = _count_severity(len(rollbacks), "rollbacks")
    spike_severity = _count_severity(len(spikes), "spikes")
    severity = worst([skip_severity, rollback_severity, spike_severity])
    if severity is None:
        return None
    evidence: list[Evidence] = []
    command, lost_s = None, None
    if skip_severity is not None:
        text = f"{learning.skipped_steps:,} of {run.totals.steps:,} steps were skipped: their gradients were not finite"
        evidence.append(make_evidence(text, learning.skipped_steps, "steps.jsonl: skipped_steps"))
        lost_s = fraction * run.phase_seconds("compute")
    if spike_severity is not None:
        evidence += [event_evidence(event) for event in spikes[-MAX_EXAMPLES:]]
        command = lr_command(spikes[-1].data.get("suggested_lr"))
    if rollback_severity is not None:
        evidence += [event_evidence(event) for event in rollbacks[-MAX_EXAMPLES:]]
        command = lr_command(rollbacks[-1].data.get("lr"))
    return make_finding(run, cause, fraction, evidence, severity=severity, lost_s=lost_s, command=command)


def _count_severity(count: int, name: str) -> Severity | None:
    if count >= UNSTABLE_TRAINING.threshold(f"{name}_critical"):
        return "critical"
    return "warning" if count >= UNSTABLE_TRAINING.threshold(f"{name}_warning") else None


def augmentation_heavy(run: RunRecords, cause: Cause) -> Finding | None:
    settings = run.settings
    excessive: dict[str, str] = {}
    for name in ("brightness", "contrast", "saturation", "hue"):
        value = settings.get(name)
        if isinstance(value, int | float) and value > cause.threshold(name):
            excessive[name] = f"{name} {value:g}"
    scales = settings.get("scale_range")
    if isinstance(scales, list | tuple) and len(scales) == 2 and scales[0] > 0:
        low, high = scales
        if high / low > cause.threshold("scale_range"):
            excessive["scale_range"] = f"scale_range {low:g} to {high:g}"
    mosaic, epochs = settings.get("mosaic"), _planned_epochs(run)
    is_short = epochs is not None and epochs < cause.threshold("mosaic_epochs")
    if isinstance(mosaic, int | float) and mosaic >= cause.threshold("mosaic") and is_short:
        excessive["mosaic"] = f"mosaic {mosaic:g} in {epochs:.3g} epochs"
    evidence = [
        make_evidence(f"{text}: {cause.thresholds[name].description}", source=f"config.toml: data.{name}")
        for name, text in excessive.items()
    ]
    return make_finding(run, cause, len(excessive), evidence)


def _planned_epochs(run: RunRecords) -> float | None:
    num_images, batch_size = run.facts.get("num_images"), run.settings.get("batch_size")
    try:
        duration = parse_duration(str(run.settings.get("max_duration", "")))
    except (ConfigError, ValueError):
        return None
    if duration.unit == "epochs":
        return float(duration.value)
    if duration.unit == "steps" and isinstance(num_images, int) and num_images > 0 and isinstance(batch_size, int):
        return duration.value * batch_size / num_images
    return None


def anchors_miss_boxes(run: RunRecords, cause: Cause) -> Finding | None:
    fraction, boxes = run.facts.get("anchor_coverage"), run.facts.get("boxes")
    if not isinstance(fraction, int | float) or not isinstance(boxes, int):
        return None
    if boxes < cause.threshold("boxes"):
        return None
    text = f"{percent(fraction)} of {boxes:,} boxes overlap an anchor at their center with an IoU of 0.5 or more"
    evidence = [make_evidence(text, fraction, "events.jsonl: info, data.facts.anchor_coverage")]
    sizes = run.facts.get("anchor_sizes")
    if not isinstance(sizes, list) or not sizes:
        return make_finding(run, cause, fraction, evidence)
    command = "--anchor-sizes " + " ".join(f"{size:g}" for size in sizes)
    return make_finding(run, cause, fraction, evidence, command=command, config_patch={"anchor_sizes": sizes})


def training_from_scratch(run: RunRecords, cause: Cause) -> Finding | None:
    settings = run.settings
    if settings.get("weights") != "none":
        return None
    evidence, command, patch = [], None, None
    layers, stages = settings.get("trainable_backbone_layers"), int(cause.threshold("stages"))
    if isinstance(layers, int) and layers < stages:
        text = f"{stages - layers} of {stages} stages are random and are not trained"
        evidence.append(make_evidence(text, layers, "config.toml: model.trainable_backbone_layers"))
    if settings.get("backbone_norm") == "frozen_bn":
        text = "the statistics of random layers are frozen"
        evidence.append(make_evidence(text, source="config.toml: model.backbone_norm"))
    if evidence:
        command = "--backbone-norm bn --trainable-backbone-layers 5"
        patch = {"backbone_norm": "bn", "trainable_backbone_layers": 5}
    num_images, available = run.facts.get("num_images"), run.facts.get("pretrained")
    is_few = isinstance(num_images, int) and num_images <= cause.threshold("min_images")
    if is_few and "weights" not in run.auto_settings and isinstance(available, list) and available:
        best = "coco" if "coco" in available else str(available[0])
        evidence.append(make_evidence(f"{num_images:,} training images", num_images, "events.jsonl: info, data.facts"))
        text = f"--weights none was requested; there are {', '.join(available)}"
        evidence.append(make_evidence(text, source="config.toml: model.weights"))
        command, patch = f"--weights {best}", {"weights": best}
    confidence = None if patch is None or "weights" not in patch else 0.7
    return make_finding(run, cause, len(evidence), evidence, command=command, config_patch=patch, confidence=confidence)


def bad_images(run: RunRecords, cause: Cause) -> Finding | None:
    count = run.num_quarantined
    evidence = [make_evidence(f"{count:,} images", count, "quarantine.jsonl")]
    evidence += [
        make_evidence(f"{path}: {error}", source="quarantine.jsonl") for path, error in run.quarantined.items()
    ]
    return make_finding(run, cause, count, evidence)


def merge_divergence(
    run: RunRecords, ends: list[Finding], others: list[Finding]
) -> tuple[list[Finding], list[Finding]]:
    """The loss that the output shows to be NaN or infinite is the one that the records know more of: one finding."""
    lost = next((finding for finding in others if finding.id == "non_finite_loss"), None)
    ended = next((finding for finding in ends if finding.id == DIVERGED), None)
    sudden, fix = find_sudden(run)
    if lost is None and ended is not None and ended.severity == "critical" and sudden is not None:
        merged = msgspec.structs.replace(ended, evidence=[*ended.evidence, sudden], fix=fix)
        return [merged if end is ended else end for end in ends], others
    if lost is None or ended is None or ended.severity != lost.severity:
        return ends, others
    merged = msgspec.structs.replace(lost, id=ended.id, title=ended.title, evidence=[*ended.evidence, *lost.evidence])
    return [merged if end is ended else end for end in ends], [other for other in others if other is not lost]
