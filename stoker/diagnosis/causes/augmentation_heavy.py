"""The augmentation is stronger than that of published recipes."""

from stoker.config.durations import parse_duration
from stoker.diagnosis.causes.cause import Cause, Threshold
from stoker.diagnosis.causes.shared import make_evidence, make_finding
from stoker.diagnosis.run_data import RunRecords
from stoker.errors import ConfigError
from stoker.runs.schemas import Finding

AUGMENTATION_HEAVY = Cause(
    id="augmentation_heavy",
    title="The augmentation is too strong",
    reason="architecture and hyper-parameters",
    symptom="`stoker data preview` shows images that a person could not label; the loss stays high",
    required_records=("config.toml: data",),
    info_threshold=1,
    warning_threshold=2,
    metric="settings beyond their limit",
    source="the strongest that published recipes use; see the limits",
    thresholds={
        "brightness": Threshold(0.5, "SSD (Liu et al. 2016) has 0.125"),
        "contrast": Threshold(0.6, "SSD has 0.5"),
        "saturation": Threshold(0.8, "SSD has 0.5, YOLOv8 0.7"),
        "hue": Threshold(0.1, "SSD has 0.05, YOLOv8 0.015"),
        "scale_range": Threshold(
            20.0, "largest over smallest scale: large-scale jittering (Ghiasi et al. 2021) has 0.1 to 2"
        ),
        "mosaic": Threshold(0.5, "in training shorter than `mosaic_epochs`"),
        "mosaic_epochs": Threshold(24, "YOLOX and YOLOv8 train 100 to 300 epochs with it; a 2x schedule is 24"),
    },
    confidence=0.5,
    fix="Use the defaults (leave the flags out), and look at `stoker data preview`",
    command="--augment default",
)


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
