"""`--weights none` with settings or a data set that need pretrained weights."""

from stoker.diagnosis.causes.cause import Cause, Threshold
from stoker.diagnosis.causes.shared import make_evidence, make_finding
from stoker.diagnosis.run_data import RunRecords
from stoker.runs.schemas import Finding

TRAINING_FROM_SCRATCH = Cause(
    id="training_from_scratch",
    title="Random weights: too few images for them, or layers of them are frozen",
    reason="architecture and hyper-parameters",
    symptom="AP stays near zero, or far below what the model can reach, though pretrained weights exist",
    required_records=(
        "config.toml: model.weights, backbone_norm, trainable_backbone_layers",
        "events.jsonl: info with data.facts.num_images, pretrained",
    ),
    warning_threshold=1,
    metric="reasons found, with --weights none: few images although pretrained weights exist; random layers that are "
    "frozen; frozen statistics of random layers",
    source="few images: He et al. 2018, Rethinking ImageNet Pre-training. Frozen layers: random weights that are not "
    "trained never learn",
    thresholds={
        "min_images": Threshold(
            10_000,
            "training images: from scratch is no worse with 10,000 COCO images, and fails below (He et al. 2018)",
        ),
        "stages": Threshold(5, "stages of a backbone"),
    },
    confidence=0.9,
    fix="Start from pretrained weights: leave --weights out; or train all layers: --backbone-norm bn "
    "--trainable-backbone-layers 5",
    command="--weights coco",
    config_patch={"weights": "coco"},
)


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
