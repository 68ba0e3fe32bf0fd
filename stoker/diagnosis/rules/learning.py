"""Rules about what training teaches: rates, divergence, evaluation, settings that do not suit the data."""

import itertools
import math
from statistics import median
from typing import Any

from stoker.config.durations import parse_duration
from stoker.diagnosis.catalogue import CATALOG
from stoker.diagnosis.reader import MAX_EXAMPLES
from stoker.diagnosis.rules.finding import (
    format_percent,
    fraction_of_phase,
    is_long_enough,
    make_finding,
    make_phase_finding,
)
from stoker.diagnosis.run_data import RunRecords
from stoker.diagnosis.series import TimeSeries
from stoker.errors import ConfigError
from stoker.runs.schemas import Evidence, Finding


def evaluation_heavy(run: RunRecords) -> Finding | None:
    """The last evaluation is what the run is for, so it does not count."""
    cause, count = CATALOG["evaluation_heavy"], run.learning.num_evaluations
    if run.phase_seconds("eval") < cause.threshold("least_s") or count == 1:
        return None
    fraction = fraction_of_phase(run, "eval")
    if fraction is None or (count > 1 and fraction * (count - 1) / count < (cause.warning_threshold or 0.0)):
        return None
    count_evidence = (
        Evidence(text=f"{count} evaluations", value=float(count), source="events.jsonl: evaluated") if count else None
    )
    return make_phase_finding(run, cause.id, "eval", extra_evidence=[count_evidence])


def lr_too_high(run: RunRecords) -> Finding | None:
    event_finding = _finding_from_events(
        run, "lr_too_high", "lr_too_high", lr_key="suggested_lr", lost_s=_device_s_since_lowest_loss(run)
    )
    cause = CATALOG["lr_too_high"]
    if event_finding is not None or (
        run.is_native_run and len(run.learning.loss.points) >= cause.threshold("own_windows")
    ):
        return event_finding
    divergence = _detect_divergence(run)
    if divergence is None:
        return None
    text, value, lost_s, estimate_basis = divergence
    evidence = [Evidence(text=text, value=value, source="steps.jsonl: losses"), _lr_evidence(run)]
    return make_finding(run, cause.id, 1, evidence, lost_s=lost_s,
                 estimate_basis=estimate_basis, confidence=0.65)  # fmt: skip


def _detect_divergence(run: RunRecords) -> tuple[str, float, float | None, str] | None:
    """How a loss shows that it diverged: it has risen, it is far above its beginning, it jumped and did not come back
    there, or it blew up and has learnt nothing since; by which factor; and which time was lost."""
    cause, loss = CATALOG["lr_too_high"], run.learning.loss
    values, noise = loss.values, _log_loss_noise(run)
    thirds = _median_thirds(loss)
    if thirds is None or len(values) < cause.threshold("least_windows") or min(values) <= 0:
        return None
    sigmas = cause.threshold("sigmas")
    medians = loss.running_medians(int(cause.threshold("group")))
    if len(medians) > 1 and medians[-1] >= cause.threshold("rise") * min(medians):
        lowest_loss, now = min(medians), medians[-1]
        if math.log(now / lowest_loss) >= sigmas * noise:
            text = f"the loss has risen from {lowest_loss:.3g} to {now:.3g}"
            return text, now / lowest_loss, _device_s_since_lowest_loss(run), "the time since the loss was lowest"
    first, now = values[0], thirds[-1]
    all_steps = (run.phase_seconds("compute", "unattributed"), "all of the time in steps: nothing was learnt in it")
    if now >= cause.threshold("absurd"):
        return f"the loss is {now:.3g}", now / first, *all_steps
    if now >= cause.threshold("above_first") * first and math.log(now / first) >= sigmas * noise:
        return f"the loss was {first:.3g} at the beginning and is {now:.3g}", now / first, *all_steps
    if max(values) >= cause.threshold("blew_up") * now and now >= cause.threshold("learns") * thirds[1]:
        return f"the loss jumped to {max(values):.3g}, is {now:.3g} and falls no more", max(values) / now, *all_steps
    jumps = [value for value, lowest_before in zip(values[1:], itertools.accumulate(values, min), strict=False)
             if value >= cause.threshold("jump") * lowest_before and value >= cause.threshold("above_first") * first]  # fmt: skip
    if jumps and now > first and math.log(max(jumps) / first) >= sigmas * noise:
        text = f"the loss was {first:.3g} at the beginning, jumped to {max(jumps):.3g} and is {now:.3g} now"
        return text, max(jumps) / first, *all_steps
    if len(jumps) >= cause.threshold("jumps"):
        text = (
            f"the loss was {first:.3g} at the beginning and has jumped {len(jumps)} times, to {max(jumps):.3g} at most"
        )
        return text, max(jumps) / first, None, ""
    return None


def lr_too_low(run: RunRecords) -> Finding | None:
    """By the run's own event; else by a loss, and a gradient where it is known, that are where they began."""
    cause, learning = CATALOG["lr_too_low"], run.learning
    if learning.events.get("lr_too_low"):
        events = learning.events["lr_too_low"]
        return make_finding(run, cause.id, 2, [_event_evidence(event.text, "lr_too_low") for event in events[-MAX_EXAMPLES:]],
                     command=_lr_command(events[-1].data.get("suggested_lr")), lost_s=run.phase_seconds("compute", "unattributed"),
                     estimate_basis="all of the time in steps: little was learnt in it")  # fmt: skip
    if run.totals.attempts > 1:
        return None  # of several beginnings a loss is what it was again
    loss, grad_norm = _median_thirds(learning.loss), _median_thirds(learning.grad_norm)
    has_enough_windows = len(learning.loss.points) >= cause.threshold(
        "least_windows"
    ) and run.steady.steps >= cause.threshold("least_steps")
    if (
        not has_enough_windows
        or loss is None
        or learning.first_step is None
        or learning.first_step > cause.threshold("from_step")
    ):
        return None
    if (
        learning.events
        or learning.non_finite_event is not None
        or _max_relative_change(loss) > cause.threshold("moved")
    ):
        return None
    lr = learning.lr.max_value
    gradient_is_flat = grad_norm is not None and _max_relative_change(grad_norm) <= cause.threshold("norm_moved")
    gradient_is_flat = (
        gradient_is_flat
        and len(learning.grad_norm.points) >= cause.threshold("stands_windows")
        and not _is_warming_up(run)
    )
    lr_is_tiny = lr is not None and lr <= cause.threshold("tiny")
    text = f"the loss was {loss[0]:.4g} at the beginning and is {loss[-1]:.4g} after {run.totals.steps:,} steps"
    evidence = [Evidence(text=text, value=loss[-1] / loss[0], source="steps.jsonl: losses"), _lr_evidence(run)]
    if gradient_is_flat and grad_norm is not None:
        text = f"the gradient's norm was {grad_norm[0]:.3g} and is {grad_norm[-1]:.3g}"
        evidence.append(Evidence(text=text, value=grad_norm[-1] / grad_norm[0], source="steps.jsonl: grad_norm"))
    is_certain = gradient_is_flat or lr_is_tiny
    return make_finding(run, cause.id, 2 if is_certain else 1, evidence,
                 lost_s=run.phase_seconds("compute", "unattributed") if is_certain else None,
                 estimate_basis="all of the time in steps: little was learnt in it" if is_certain else "",
                 command=_lr_command(10 * lr) if lr else None)  # fmt: skip


def overfitting(run: RunRecords) -> Finding | None:
    cause, learning = CATALOG["overfitting"], run.learning
    if learning.best is None or learning.newest_ap is None or learning.best[1] <= 0:
        return None
    ap_drop = learning.best[1] - learning.newest_ap
    if ap_drop < cause.threshold("least_fall") or learning.evals_since_best < cause.threshold("evaluations"):
        return None
    mean_ap = learning.best[1] - ap_drop / 2
    if learning.num_gt_boxes and ap_drop < cause.threshold("sigmas") * math.sqrt(
        mean_ap * (1 - mean_ap) / learning.num_gt_boxes
    ):
        return None
    before = [value for t, value in learning.loss.points if t <= learning.best[0]]
    after = [value for t, value in learning.loss.points if t > learning.best[0]]
    if not before or not after or after[-1] >= before[-1]:
        return None
    evidence = [
        Evidence(text=f"AP was {learning.best[1]:.3f} and is {learning.newest_ap:.3f}", value=-ap_drop,
                 source="events.jsonl: evaluated"),
        Evidence(text=f"the training loss went on from {before[-1]:.3g} to {after[-1]:.3g}", value=after[-1],
                 source="steps.jsonl: losses"),
    ]  # fmt: skip
    return make_finding(run, cause.id, ap_drop / learning.best[1], evidence, lost_s=learning.device_s_since_best,
                 estimate_basis="all since the best evaluation")  # fmt: skip


def augmentation_heavy(run: RunRecords) -> Finding | None:
    cause, settings = CATALOG["augmentation_heavy"], run.settings
    excessive = []
    for name in ("brightness", "contrast", "saturation", "hue"):
        value = settings.get(name)
        if isinstance(value, int | float) and value > cause.threshold(name):
            excessive.append((name, f"{name} {value:g}"))
    scale_range = settings.get("scale_range")
    if (
        isinstance(scale_range, list | tuple)
        and len(scale_range) == 2
        and scale_range[0] > 0
        and scale_range[1] / scale_range[0] > cause.threshold("scale_range")
    ):
        excessive.append(("zoom", f"zoom {scale_range[0]:g} to {scale_range[1]:g}"))
    mosaic, epochs = settings.get("mosaic"), _planned_epochs(run)
    is_short = epochs is not None and epochs < cause.threshold("mosaic_epochs")
    if isinstance(mosaic, int | float) and mosaic >= cause.threshold("mosaic") and is_short:
        excessive.append(("mosaic", f"mosaic {mosaic:g} in {epochs:.3g} epochs"))
    evidence = [
        Evidence(text=f"{text}: {cause.thresholds[name].description}", source=f"config.toml: data.{name}")
        for name, text in excessive
    ]
    return make_finding(run, cause.id, len(excessive), evidence)


def anchors_miss_boxes(run: RunRecords) -> Finding | None:
    cause, fraction, boxes = CATALOG["anchors_miss_boxes"], run.facts.get("anchor_coverage"), run.facts.get("boxes")
    if not isinstance(fraction, int | float) or not isinstance(boxes, int) or boxes < cause.threshold("boxes"):
        return None
    text = f"{format_percent(fraction)} of {boxes:,} boxes are met by an anchor on their centre with an IoU of 0.5"
    evidence = [Evidence(text=text, value=float(fraction), source="events.jsonl: note, data.facts.anchor_coverage")]
    sizes = run.facts.get("anchor_sizes")
    command = None
    if isinstance(sizes, list) and sizes:
        command = "--anchor-sizes " + " ".join(f"{size:g}" for size in sizes)
    patch = {"anchor_sizes": sizes} if command else None
    return make_finding(run, cause.id, float(fraction), evidence, command=command, config_patch=patch)


def scratch_on_small_dataset(run: RunRecords) -> Finding | None:
    num_images, available_weights = run.facts.get("num_images"), run.facts.get("pretrained")
    if run.settings.get("weights") != "none" or "weights" in run.auto_settings:
        return None
    if not isinstance(num_images, int) or not isinstance(available_weights, list) or not available_weights:
        return None
    best = "coco" if "coco" in available_weights else str(available_weights[0])
    evidence = [
        Evidence(
            text=f"{num_images:,} training pictures", value=float(num_images), source="events.jsonl: note, data.facts"
        ),
        Evidence(
            text=f"weights none was asked for; there are {', '.join(available_weights)}",
            source="config.toml: model.weights",
        ),
    ]
    return make_finding(run, "scratch_on_small_dataset", num_images, evidence, command=f"--weights {best}",
                 config_patch={"weights": best})  # fmt: skip


def freezing_mismatch(run: RunRecords) -> Finding | None:
    settings = run.settings
    if settings.get("weights") != "none":
        return None
    evidence = []
    trainable_layers = settings.get("trainable_backbone_layers")
    if isinstance(trainable_layers, int) and trainable_layers < 5:
        evidence.append(Evidence(text=f"{5 - trainable_layers} of 5 stages are random and are not trained", value=float(trainable_layers),
                              source="config.toml: model.trainable_stages"))  # fmt: skip
    if settings.get("backbone_norm") == "frozen_bn":
        evidence.append(Evidence(text="the statistics of random layers are frozen", source="config.toml: model.norm"))
    return make_finding(run, "freezing_mismatch", len(evidence), evidence)


def tensor_cores_unused(run: RunRecords) -> Finding | None:
    cause = CATALOG["tensor_cores_unused"]
    precision = run.settings.get("precision")
    precision_evidence = (
        None if precision is None else Evidence(text=f"precision {precision}", source="config.toml: run.precision")
    )
    pairs = [(gpu.tensor_active.value, gpu.sm_active.value) for gpu in run.gpus.values()]
    active = [tensor for tensor, sm in pairs
              if tensor is not None and sm is not None and sm >= cause.threshold("sm_active")]  # fmt: skip
    if active:
        text = f"the tensor cores worked {format_percent(max(active))} of the time"
        evidence = [
            Evidence(text=text, value=max(active), source="devices.jsonl: gpus.tensor_active"),
            precision_evidence,
        ]
        return make_finding(run, cause.id, max(active), evidence)
    fraction = run.traces.tensor_core_fraction.value
    if fraction is None or precision in ("bf16", "fp16") or not run.gpus:
        return None
    text = f"{format_percent(fraction)} of the kernels' time was in kernels of the tensor cores"
    evidence = [Evidence(text=text, value=fraction, source="traces.jsonl: tensor_core_share"), precision_evidence]
    return make_finding(run, cause.id, fraction, evidence, confidence=0.6)


def steps_skipped(run: RunRecords) -> Finding | None:
    if not run.totals.steps:
        return None
    skipped = run.learning.skipped_steps
    fraction = skipped / run.totals.steps
    text = f"{skipped:,} of {run.totals.steps:,} steps were skipped"
    evidence = [Evidence(text=text, value=float(skipped), source="steps.jsonl: skipped")]
    return make_finding(run, "steps_skipped", fraction, evidence, lost_s=fraction * run.phase_seconds("compute"))


def non_finite_loss(run: RunRecords) -> Finding | None:
    cause, learning = CATALOG["non_finite_loss"], run.learning
    has_lost_loss = bool(learning.loss.points) and learning.windows_without_loss >= cause.threshold("windows")
    if learning.non_finite_event is None and (run.is_external or not has_lost_loss):
        return None
    event, points = learning.non_finite_event, learning.loss.points
    if event is not None and not learning.windows_without_loss and points and points[-1][0] > event.t + 1.0:
        return None  # it came back
    evidence = []
    if learning.non_finite_event is not None:
        evidence.append(_event_evidence(learning.non_finite_event.text, "warning"))
    if has_lost_loss:
        text = f"{learning.windows_without_loss} windows of steps had no finite loss any more"
        evidence.append(Evidence(text=text, value=float(learning.windows_without_loss), source="steps.jsonl: losses"))
    return make_finding(run, cause.id, 1, [*evidence, _lr_evidence(run)], lost_s=learning.device_s_without_loss or None,
                 estimate_basis="all since the last finite loss" if learning.device_s_without_loss else "")  # fmt: skip


def rolled_back_lower_lr(run: RunRecords) -> Finding | None:
    return _finding_from_events(run, "rolled_back_lower_lr", "rolled_back", lr_key="lr")


def loss_spikes(run: RunRecords) -> Finding | None:
    return _finding_from_events(run, "loss_spikes", "loss_spike", lr_key="suggested_lr")


RULES = (
    evaluation_heavy, lr_too_high, lr_too_low, overfitting, augmentation_heavy, anchors_miss_boxes,
    scratch_on_small_dataset, freezing_mismatch, tensor_cores_unused, steps_skipped, non_finite_loss, rolled_back_lower_lr,
    loss_spikes,
)  # fmt: skip


def _finding_from_events(
    run: RunRecords, cause: str, kind: str, *, lr_key: str, lost_s: float | None = None
) -> Finding | None:
    """rate: the number of the events' data that is the rate to try; the newest event knows best."""
    events = run.learning.events.get(kind, [])
    if not events:
        return None
    evidence = [_event_evidence(event.text, kind) for event in events[-MAX_EXAMPLES:]]
    return make_finding(run, cause, len(events), evidence, command=_lr_command(events[-1].data.get(lr_key)), lost_s=lost_s,
                 estimate_basis="" if lost_s is None else "the time since the loss was lowest")  # fmt: skip


def _event_evidence(text: str, kind: str) -> Evidence:
    return Evidence(text=text, source=f"events.jsonl: {kind}")


def _lr_command(lr: Any) -> str | None:
    return f"--lr {lr:.2g}" if isinstance(lr, int | float) else None


def _lr_evidence(run: RunRecords) -> Evidence | None:
    lr = run.learning.lr.max_value
    return None if lr is None else Evidence(text=f"the rate was {lr:.3g} at most", value=lr,
                                              source="steps.jsonl: rate")  # fmt: skip


def _median_thirds(series: TimeSeries) -> tuple[float, float, float] | None:
    """The medians of its thirds; None where they are not positive."""
    values = series.values
    third = len(values) // 3
    if not third:
        return None
    first, middle, last = median(values[:third]), median(values[third:-third]), median(values[-third:])
    return (first, middle, last) if min(first, middle, last) > 0 else None


def _max_relative_change(thirds: tuple[float, float, float]) -> float:
    """How far they are from the first, at most, as a share of it."""
    return max(abs(value / thirds[0] - 1) for value in thirds)


def _is_warming_up(run: RunRecords) -> bool:
    """Whether the rate has only just reached its height."""
    warmup_steps = run.settings.get("warmup_steps")
    return isinstance(warmup_steps, int) and run.totals.step < 2 * warmup_steps


def _log_loss_noise(run: RunRecords) -> float:
    """Standard deviation of the log-loss from window to window, whatever the trend."""
    values = [value for value in run.learning.loss.values if value > 0]
    steps = sorted(abs(math.log(b / a)) for a, b in itertools.pairwise(values))
    return 1.4826 * steps[len(steps) // 2] / math.sqrt(2) if steps else 0.0


def _device_s_since_lowest_loss(run: RunRecords) -> float | None:
    """Device-seconds since the loss was lowest."""
    points = run.learning.loss.points
    if not points or not is_long_enough(run):
        return None
    lowest_t = min(points, key=lambda point: point[1])[0]
    return (points[-1][0] - lowest_t) * run.num_devices


def _planned_epochs(run: RunRecords) -> float | None:
    """That the run is asked to take."""
    num_images, batch_size = run.facts.get("num_images"), run.settings.get("batch_size")
    try:
        duration = parse_duration(str(run.settings.get("max_duration", run.settings.get("max_duration", ""))))
    except (ConfigError, ValueError):
        return None
    if duration.unit == "epochs":
        return float(duration.value)
    if duration.unit == "steps" and isinstance(num_images, int) and num_images > 0 and isinstance(batch_size, int):
        return duration.value * batch_size / num_images
    return None
