"""`--weights none` with settings or a data set that need pretrained weights."""

from stoker.diagnosis.causes.cause import find_cause
from stoker.diagnosis.causes.shared import make_evidence, make_finding
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Finding

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
