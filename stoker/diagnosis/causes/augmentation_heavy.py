"""The augmentation is stronger than that of published recipes."""

from stoker.config.durations import parse_duration
from stoker.diagnosis.causes.cause import find_cause
from stoker.diagnosis.causes.shared import make_evidence, make_finding
from stoker.diagnosis.run_data import RunRecords
from stoker.errors import ConfigError
from stoker.runs.schemas import Finding

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
