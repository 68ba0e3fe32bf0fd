"""Rules about what training teaches: rates, divergence, evaluation, settings that do not suit the data."""

import itertools
import math
from statistics import median
from typing import Any

from stoker.config.settings import parse_duration
from stoker.diagnosis.catalogue import CATALOGUE
from stoker.diagnosis.reader import SHOWN
from stoker.diagnosis.rules.finding import found, is_long_enough, of_phase, percent, share_of
from stoker.diagnosis.run_data import Records
from stoker.diagnosis.series import Course
from stoker.errors import ConfigError
from stoker.runs.schemas import Evidence, Finding


def evaluation_heavy(seen: Records) -> Finding | None:
    """The last evaluation is what the run is for, so it does not count."""
    cause, count = CATALOGUE["evaluation_heavy"], seen.learning.evaluations
    if seen.seconds("eval") < cause.limit("least_s") or count == 1:
        return None
    share = share_of(seen, "eval")
    if share is None or (count > 1 and share * (count - 1) / count < (cause.warn_from or 0.0)):
        return None
    said = Evidence(text=f"{count} evaluations", value=float(count), place="events.jsonl: evaluated") if count else None
    return of_phase(seen, cause.id, "eval", more=[said])


def rate_too_high(seen: Records) -> Finding | None:
    told = _of_events(seen, "rate_too_high", "rate_too_high", rate="try", lost_s=_since_lowest(seen))
    cause = CATALOGUE["rate_too_high"]
    if told is not None or (seen.ours and len(seen.learning.loss.points) >= cause.limit("own_windows")):
        return told
    worse = _worse(seen)
    if worse is None:
        return None
    text, value, lost_s, since = worse
    evidence = [Evidence(text=text, value=value, place="steps.jsonl: losses"), _rate(seen)]
    return found(seen, cause.id, 1, evidence, lost_s=lost_s,
                 estimate=since, confidence=0.65)  # fmt: skip


def _worse(seen: Records) -> tuple[str, float, float | None, str] | None:
    """How a loss shows that it diverged: it has risen, it is far above its beginning, it jumped and did not come back
    there, or it blew up and has learnt nothing since; by which factor; and which time was lost."""
    cause, loss = CATALOGUE["rate_too_high"], seen.learning.loss
    values, noise = loss.values, _noise(seen)
    thirds = _thirds(loss)
    if thirds is None or len(values) < cause.limit("least_windows") or min(values) <= 0:
        return None
    sigmas = cause.limit("sigmas")
    medians = loss.medians(int(cause.limit("group")))
    if len(medians) > 1 and medians[-1] >= cause.limit("rise") * min(medians):
        lowest, now = min(medians), medians[-1]
        if math.log(now / lowest) >= sigmas * noise:
            text = f"the loss has risen from {lowest:.3g} to {now:.3g}"
            return text, now / lowest, _since_lowest(seen), "the time since the loss was lowest"
    first, now = values[0], thirds[-1]
    every = (seen.seconds("compute", "unattributed"), "all of the time in steps: nothing was learnt in it")
    if now >= cause.limit("absurd"):
        return f"the loss is {now:.3g}", now / first, *every
    if now >= cause.limit("above_first") * first and math.log(now / first) >= sigmas * noise:
        return f"the loss was {first:.3g} at the beginning and is {now:.3g}", now / first, *every
    if max(values) >= cause.limit("blew_up") * now and now >= cause.limit("learns") * thirds[1]:
        return f"the loss jumped to {max(values):.3g}, is {now:.3g} and falls no more", max(values) / now, *every
    jumps = [value for value, least in zip(values[1:], itertools.accumulate(values, min), strict=False)
             if value >= cause.limit("jump") * least and value >= cause.limit("above_first") * first]  # fmt: skip
    if jumps and now > first and math.log(max(jumps) / first) >= sigmas * noise:
        text = f"the loss was {first:.3g} at the beginning, jumped to {max(jumps):.3g} and is {now:.3g} now"
        return text, max(jumps) / first, *every
    if len(jumps) >= cause.limit("jumps"):
        text = (
            f"the loss was {first:.3g} at the beginning and has jumped {len(jumps)} times, to {max(jumps):.3g} at most"
        )
        return text, max(jumps) / first, None, ""
    return None


def rate_too_low(seen: Records) -> Finding | None:
    """By the run's own event; else by a loss, and a gradient where it is known, that are where they began."""
    cause, learning = CATALOGUE["rate_too_low"], seen.learning
    if learning.events.get("rate_too_low"):
        events = learning.events["rate_too_low"]
        return found(seen, cause.id, 2, [_said(event.text, "rate_too_low") for event in events[-SHOWN:]],
                     command=_try(events[-1].data.get("try")), lost_s=seen.seconds("compute", "unattributed"),
                     estimate="all of the time in steps: little was learnt in it")  # fmt: skip
    if seen.totals.attempts > 1:
        return None  # of several beginnings a loss is what it was again
    loss, norm = _thirds(learning.loss), _thirds(learning.norm)
    long = len(learning.loss.points) >= cause.limit("least_windows") and seen.steady.steps >= cause.limit("least_steps")
    if not long or loss is None or learning.first_step is None or learning.first_step > cause.limit("from_step"):
        return None
    if learning.events or learning.not_finite is not None or _moved(loss) > cause.limit("moved"):
        return None
    rate = learning.rate.most
    stands = norm is not None and _moved(norm) <= cause.limit("norm_moved")
    stands = stands and len(learning.norm.points) >= cause.limit("stands_windows") and not _warms_up(seen)
    tiny = rate is not None and rate <= cause.limit("tiny")
    text = f"the loss was {loss[0]:.4g} at the beginning and is {loss[-1]:.4g} after {seen.totals.steps:,} steps"
    evidence = [Evidence(text=text, value=loss[-1] / loss[0], place="steps.jsonl: losses"), _rate(seen)]
    if stands and norm is not None:
        text = f"the gradient's norm was {norm[0]:.3g} and is {norm[-1]:.3g}"
        evidence.append(Evidence(text=text, value=norm[-1] / norm[0], place="steps.jsonl: grad_norm"))
    sure = stands or tiny
    return found(seen, cause.id, 2 if sure else 1, evidence,
                 lost_s=seen.seconds("compute", "unattributed") if sure else None,
                 estimate="all of the time in steps: little was learnt in it" if sure else "",
                 command=_try(10 * rate) if rate else None)  # fmt: skip


def overfitting(seen: Records) -> Finding | None:
    cause, learning = CATALOGUE["overfitting"], seen.learning
    if learning.best is None or learning.newest_ap is None or learning.best[1] <= 0:
        return None
    fall = learning.best[1] - learning.newest_ap
    if fall < cause.limit("least_fall") or learning.evaluations_since_best < cause.limit("evaluations"):
        return None
    middle = learning.best[1] - fall / 2
    if learning.boxes and fall < cause.limit("sigmas") * math.sqrt(middle * (1 - middle) / learning.boxes):
        return None
    before = [value for t, value in learning.loss.points if t <= learning.best[0]]
    after = [value for t, value in learning.loss.points if t > learning.best[0]]
    if not before or not after or after[-1] >= before[-1]:
        return None
    evidence = [
        Evidence(text=f"AP was {learning.best[1]:.3f} and is {learning.newest_ap:.3f}", value=-fall,
                 place="events.jsonl: evaluated"),
        Evidence(text=f"the training loss went on from {before[-1]:.3g} to {after[-1]:.3g}", value=after[-1],
                 place="steps.jsonl: losses"),
    ]  # fmt: skip
    return found(seen, cause.id, fall / learning.best[1], evidence, lost_s=learning.device_s_since_best,
                 estimate="all since the best evaluation")  # fmt: skip


def augmentation_heavy(seen: Records) -> Finding | None:
    cause, settings = CATALOGUE["augmentation_heavy"], seen.settings
    beyond = []
    for name in ("brightness", "contrast", "saturation", "hue"):
        value = settings.get(name)
        if isinstance(value, int | float) and value > cause.limit(name):
            beyond.append((name, f"{name} {value:g}"))
    zoom = settings.get("zoom")
    if isinstance(zoom, list | tuple) and len(zoom) == 2 and zoom[0] > 0 and zoom[1] / zoom[0] > cause.limit("zoom"):
        beyond.append(("zoom", f"zoom {zoom[0]:g} to {zoom[1]:g}"))
    mosaic, epochs = settings.get("mosaic"), _epochs(seen)
    is_short = epochs is not None and epochs < cause.limit("mosaic_epochs")
    if isinstance(mosaic, int | float) and mosaic >= cause.limit("mosaic") and is_short:
        beyond.append(("mosaic", f"mosaic {mosaic:g} in {epochs:.3g} epochs"))
    evidence = [
        Evidence(text=f"{text}: {cause.limits[name].said}", place=f"config.toml: data.{name}") for name, text in beyond
    ]
    return found(seen, cause.id, len(beyond), evidence)


def anchors_miss_boxes(seen: Records) -> Finding | None:
    cause, share, boxes = CATALOGUE["anchors_miss_boxes"], seen.facts.get("anchor_coverage"), seen.facts.get("boxes")
    if not isinstance(share, int | float) or not isinstance(boxes, int) or boxes < cause.limit("boxes"):
        return None
    text = f"{percent(share)} of {boxes:,} boxes are met by an anchor on their centre with an IoU of 0.5"
    evidence = [Evidence(text=text, value=float(share), place="events.jsonl: note, data.facts.anchor_coverage")]
    sizes = seen.facts.get("anchor_sizes")
    command = None
    if isinstance(sizes, list) and sizes:
        command = "--anchor-sizes " + " ".join(f"{size:g}" for size in sizes)
    patch = {"anchor_sizes": sizes} if command else None
    return found(seen, cause.id, float(share), evidence, command=command, patch=patch)


def scratch_on_few_pictures(seen: Records) -> Finding | None:
    pictures, exist = seen.facts.get("pictures"), seen.facts.get("pretrained")
    if seen.settings.get("weights") != "none" or "weights" in seen.reasons:
        return None
    if not isinstance(pictures, int) or not isinstance(exist, list) or not exist:
        return None
    best = "coco" if "coco" in exist else str(exist[0])
    evidence = [
        Evidence(text=f"{pictures:,} training pictures", value=float(pictures), place="events.jsonl: note, data.facts"),
        Evidence(text=f"weights none was asked for; there are {', '.join(exist)}", place="config.toml: model.weights"),
    ]
    return found(seen, "scratch_on_few_pictures", pictures, evidence, command=f"--weights {best}",
                 patch={"weights": best})  # fmt: skip


def weights_unsuitable(seen: Records) -> Finding | None:
    settings = seen.settings
    if settings.get("weights") != "none":
        return None
    wrong = []
    stages = settings.get("trainable_stages")
    if isinstance(stages, int) and stages < 5:
        wrong.append(Evidence(text=f"{5 - stages} of 5 stages are random and are not trained", value=float(stages),
                              place="config.toml: model.trainable_stages"))  # fmt: skip
    if settings.get("norm") == "frozen":
        wrong.append(Evidence(text="the statistics of random layers are frozen", place="config.toml: model.norm"))
    return found(seen, "weights_unsuitable", len(wrong), wrong)


def tensor_cores_unused(seen: Records) -> Finding | None:
    cause = CATALOGUE["tensor_cores_unused"]
    precision = seen.settings.get("precision")
    said = None if precision is None else Evidence(text=f"precision {precision}", place="config.toml: run.precision")
    pairs = [(gpu.tensor_active.value, gpu.sm_active.value) for gpu in seen.gpus.values()]
    active = [tensor for tensor, sm in pairs
              if tensor is not None and sm is not None and sm >= cause.limit("sm_active")]  # fmt: skip
    if active:
        text = f"the tensor cores worked {percent(max(active))} of the time"
        evidence = [Evidence(text=text, value=max(active), place="devices.jsonl: gpus.tensor_active"), said]
        return found(seen, cause.id, max(active), evidence)
    share = seen.traces.tensor_cores.value
    if share is None or precision in ("bf16", "fp16") or not seen.gpus:
        return None
    text = f"{percent(share)} of the kernels' time was in kernels of the tensor cores"
    evidence = [Evidence(text=text, value=share, place="traces.jsonl: tensor_core_share"), said]
    return found(seen, cause.id, share, evidence, confidence=0.6)


def steps_skipped(seen: Records) -> Finding | None:
    if not seen.totals.steps:
        return None
    skipped = seen.learning.skipped
    share = skipped / seen.totals.steps
    text = f"{skipped:,} of {seen.totals.steps:,} steps were skipped"
    evidence = [Evidence(text=text, value=float(skipped), place="steps.jsonl: skipped")]
    return found(seen, "steps_skipped", share, evidence, lost_s=share * seen.seconds("compute"))


def loss_not_finite(seen: Records) -> Finding | None:
    cause, learning = CATALOGUE["loss_not_finite"], seen.learning
    gone = bool(learning.loss.points) and learning.without_loss >= cause.limit("windows")
    if learning.not_finite is None and (seen.watched or not gone):
        return None
    said, points = learning.not_finite, learning.loss.points
    if said is not None and not learning.without_loss and points and points[-1][0] > said.t + 1.0:
        return None  # it came back
    evidence = []
    if learning.not_finite is not None:
        evidence.append(_said(learning.not_finite.text, "warning"))
    if gone:
        text = f"{learning.without_loss} windows of steps had no finite loss any more"
        evidence.append(Evidence(text=text, value=float(learning.without_loss), place="steps.jsonl: losses"))
    return found(seen, cause.id, 1, [*evidence, _rate(seen)], lost_s=learning.lost_since_s or None,
                 estimate="all since the last finite loss" if learning.lost_since_s else "")  # fmt: skip


def rate_lowered(seen: Records) -> Finding | None:
    return _of_events(seen, "rate_lowered", "slowed", rate="rate")


def loss_spikes(seen: Records) -> Finding | None:
    return _of_events(seen, "loss_spikes", "loss_spike", rate="try")


RULES = (
    evaluation_heavy, rate_too_high, rate_too_low, overfitting, augmentation_heavy, anchors_miss_boxes,
    scratch_on_few_pictures, weights_unsuitable, tensor_cores_unused, steps_skipped, loss_not_finite, rate_lowered,
    loss_spikes,
)  # fmt: skip


def _of_events(seen: Records, cause: str, kind: str, *, rate: str, lost_s: float | None = None) -> Finding | None:
    """rate: the number of the events' data that is the rate to try; the newest event knows best."""
    events = seen.learning.events.get(kind, [])
    if not events:
        return None
    evidence = [_said(event.text, kind) for event in events[-SHOWN:]]
    return found(seen, cause, len(events), evidence, command=_try(events[-1].data.get(rate)), lost_s=lost_s,
                 estimate="" if lost_s is None else "the time since the loss was lowest")  # fmt: skip


def _said(text: str, kind: str) -> Evidence:
    return Evidence(text=text, place=f"events.jsonl: {kind}")


def _try(rate: Any) -> str | None:
    return f"--rate {rate:.2g}" if isinstance(rate, int | float) else None


def _rate(seen: Records) -> Evidence | None:
    rate = seen.learning.rate.most
    return None if rate is None else Evidence(text=f"the rate was {rate:.3g} at most", value=rate,
                                              place="steps.jsonl: rate")  # fmt: skip


def _thirds(course: Course) -> tuple[float, float, float] | None:
    """The medians of its thirds; None where they are not positive."""
    values = course.values
    third = len(values) // 3
    if not third:
        return None
    first, middle, last = median(values[:third]), median(values[third:-third]), median(values[-third:])
    return (first, middle, last) if min(first, middle, last) > 0 else None


def _moved(thirds: tuple[float, float, float]) -> float:
    """How far they are from the first, at most, as a share of it."""
    return max(abs(value / thirds[0] - 1) for value in thirds)


def _warms_up(seen: Records) -> bool:
    """Whether the rate has only just reached its height."""
    warmup = seen.settings.get("warmup")
    return isinstance(warmup, int) and seen.totals.step < 2 * warmup


def _noise(seen: Records) -> float:
    """Standard deviation of the log-loss from window to window, whatever the trend."""
    values = [value for value in seen.learning.loss.values if value > 0]
    steps = sorted(abs(math.log(b / a)) for a, b in itertools.pairwise(values))
    return 1.4826 * steps[len(steps) // 2] / math.sqrt(2) if steps else 0.0


def _since_lowest(seen: Records) -> float | None:
    """Device-seconds since the loss was lowest."""
    points = seen.learning.loss.points
    if not points or not is_long_enough(seen):
        return None
    lowest_t = min(points, key=lambda point: point[1])[0]
    return (points[-1][0] - lowest_t) * seen.devices


def _epochs(seen: Records) -> float | None:
    """That the run is asked to take."""
    pictures, batch = seen.facts.get("pictures"), seen.settings.get("batch")
    try:
        length = parse_duration(str(seen.settings.get("for_", seen.settings.get("for", ""))))
    except (ConfigError, ValueError):
        return None
    if length.unit == "epochs":
        return float(length.value)
    if length.unit == "steps" and isinstance(pictures, int) and pictures > 0 and isinstance(batch, int):
        return length.value * batch / pictures
    return None
