"""What is trained on what: augmentation, anchors, missing pretrained weights, images that cannot be read."""

from stoker.config.durations import parse_duration
from stoker.diagnosis.causes.cause import find_cause
from stoker.diagnosis.causes.shared import make_evidence, make_finding, percent
from stoker.diagnosis.run_data import RunRecords
from stoker.errors import ConfigError
from stoker.findings.finding import Finding

AUGMENTATION_HEAVY = find_cause("augmentation_heavy")


def augmentation_heavy(run: RunRecords) -> Finding | None:
    cause, settings = AUGMENTATION_HEAVY, run.settings
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


ANCHORS_MISS_BOXES = find_cause("anchors_miss_boxes")


def anchors_miss_boxes(run: RunRecords) -> Finding | None:
    fraction, boxes = run.facts.get("anchor_coverage"), run.facts.get("boxes")
    if not isinstance(fraction, int | float) or not isinstance(boxes, int):
        return None
    if boxes < ANCHORS_MISS_BOXES.threshold("boxes"):
        return None
    text = f"{percent(fraction)} of {boxes:,} boxes overlap an anchor at their center with an IoU of 0.5 or more"
    evidence = [make_evidence(text, fraction, "events.jsonl: info, data.facts.anchor_coverage")]
    sizes = run.facts.get("anchor_sizes")
    if not isinstance(sizes, list) or not sizes:
        return make_finding(run, ANCHORS_MISS_BOXES, fraction, evidence)
    command = "--anchor-sizes " + " ".join(f"{size:g}" for size in sizes)
    return make_finding(
        run, ANCHORS_MISS_BOXES, fraction, evidence, command=command, config_patch={"anchor_sizes": sizes}
    )


TRAINING_FROM_SCRATCH = find_cause("training_from_scratch")


def training_from_scratch(run: RunRecords) -> Finding | None:
    settings, cause = run.settings, TRAINING_FROM_SCRATCH
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


BAD_IMAGES = find_cause("bad_images")


def bad_images(run: RunRecords) -> Finding | None:
    count = run.num_quarantined
    evidence = [make_evidence(f"{count:,} images", count, "quarantine.jsonl")]
    evidence += [
        make_evidence(f"{path}: {error}", source="quarantine.jsonl") for path, error in run.quarantined.items()
    ]
    return make_finding(run, BAD_IMAGES, count, evidence)
