"""The `data_augmentation_options` of a pipeline.config, as the augmentation settings of stoker.

The API applies a list of steps in order; stoker has one crop or zoom, a flip, and one change of colors. Numbers of the
steps and their defaults are those of object_detection/protos/preprocessor.proto and core/preprocessor.py.
"""

import math
from typing import Any

from stoker.migration.fields import FieldAccount
from stoker.migration.text_format import Message

SCALE_LIMITS = (0.05, 20.0)
"""Of `--scale-range`."""
DISTORT_COLOR = {"brightness": 0.125, "contrast": 0.5, "saturation": 0.5, "hue": 0.2}
"""random_distort_color: brightness 32 of 255, contrast and saturation 0.5 to 1.5, hue 0.2."""
SSD_CROP_COVERED, SSD_CROP_AREA, SSD_CROP_SKIPPED = 0.1, 0.1, 0.15
"""ssd_random_crop without operations: the lowest coverage above 0, the smallest area, probability to skip the crop."""
SCALE_NOTE = "one scale per image, with its aspect ratio kept, instead of a window of random shape"


def read_augmentation(account: FieldAccount, train: Message) -> None:
    """Rows and settings of all steps. What the file does not ask for is switched off."""
    account.settings["augment"] = "none"
    for option in train.children("data_augmentation_options"):
        for name, steps in option.messages.items():
            for step in steps:
                _read_step(account, name, step)


def _read_step(account: FieldAccount, name: str, step: Message) -> None:
    if name == "random_horizontal_flip":
        account.exact(step, "probability", {"hflip": step.number("probability", 0.5)})
    elif name in COLOR_STEPS:
        _read_color(account, name, step)
    elif (settings := _scale_settings(name, step)) is not None:
        account.whole(step, "substitute", _merge(account, settings), SCALE_NOTE)


COLOR_STEPS = {
    "random_adjust_brightness": ("brightness", "a factor on the image instead of a number added to it"),
    "random_adjust_contrast": ("contrast", "a range around 1 of the larger of the two distances"),
    "random_adjust_saturation": ("saturation", "a range around 1 of the larger of the two distances"),
    "random_adjust_hue": ("hue", "rotated in YIQ, which keeps the brightness, instead of HSV"),
    "random_pixel_value_scale": ("brightness", "one factor per image instead of one per pixel"),
    "random_distort_color": ("", "brightness, contrast, saturation and hue once, in a fixed order"),
}


def _read_color(account: FieldAccount, name: str, step: Message) -> None:
    setting, note = COLOR_STEPS[name]
    if name == "random_distort_color":
        settings: dict[str, Any] = dict(DISTORT_COLOR)
    elif name == "random_adjust_brightness":
        settings = {setting: step.number("max_delta", 0.2)}
    elif name == "random_adjust_hue":
        settings = {setting: min(0.5, step.number("max_delta", 0.02))}
    else:
        names, defaults = ("minval", "maxval"), (0.9, 1.1)
        if name != "random_pixel_value_scale":
            names, defaults = ("min_delta", "max_delta"), (0.8, 1.25)
        low, high = step.number(names[0], defaults[0]), step.number(names[1], defaults[1])
        settings = {setting: max(1 - low, high - 1)}
    settings = {key: float(f"{min(1.0, max(0.0, value)):.4g}") for key, value in settings.items()}
    account.whole(step, "substitute", settings, note)


def _scale_settings(name: str, step: Message) -> dict[str, Any] | None:
    """Crop and zoom as a range of scales and its probability; None: the step does not crop or zoom.

    A window with the fraction a of the image's area shows it at the scale 1/√a."""
    if name in ("random_crop_image", "random_crop_pad_image"):
        low = 1 / math.sqrt(max(1e-4, step.number("max_area", 1.0)))
        high = 1 / math.sqrt(max(1e-4, step.number("min_area", 0.1)))
        if name == "random_crop_pad_image":
            low /= max([2.0, *step.numbers("max_padded_size_ratio")])
        return {
            "scale_jitter_prob": 1 - step.number("random_coef", 0.0),
            "scale_range": (low, high),
            "min_object_covered": step.number("min_object_covered", 1.0),
        }
    if name.startswith("ssd_random_crop"):
        operations = step.children("operations")
        areas = [op.number("min_area", SSD_CROP_AREA) for op in operations] or [SSD_CROP_AREA]
        covered = [op.number("min_object_covered", 0.0) for op in operations]
        skipped = [op.number("random_coef", 0.0) for op in operations] or [SSD_CROP_SKIPPED]
        padded = [2.0] if "pad" in name else [1.0]
        padded += [ratio for op in [step, *operations] for ratio in op.numbers("max_padded_size_ratio")]
        return {
            "scale_jitter_prob": 1 - sum(skipped) / len(skipped),
            "scale_range": (1 / max(padded), 1 / math.sqrt(max(1e-4, min(areas)))),
            "min_object_covered": min([value for value in covered if value > 0] or [SSD_CROP_COVERED]),
        }
    if name == "random_scale_crop_and_pad_to_square":
        scales = step.number("scale_min", 0.1), step.number("scale_max", 2.0)
    elif name == "random_image_scale":
        scales = step.number("min_scale_ratio", 0.5), step.number("max_scale_ratio", 2.0)
    elif name == "random_square_crop_by_scale":
        scales = 1 / step.number("scale_max", 1.3), 1 / step.number("scale_min", 0.6)
    elif name in ("random_pad_image", "random_absolute_pad_image"):
        scales = 0.5, 1.0
    else:
        return None
    return {"scale_jitter_prob": 1.0, "scale_range": scales}


def _merge(account: FieldAccount, settings: dict[str, Any]) -> dict[str, Any]:
    """With the crops and zooms of earlier steps: the wider range, the higher probability."""
    before = account.settings
    low, high = settings["scale_range"]
    if "scale_range" in before:
        low, high = min(low, before["scale_range"][0]), max(high, before["scale_range"][1])
    low, high = max(SCALE_LIMITS[0], low), min(SCALE_LIMITS[1], max(low, high))
    probability = max(settings["scale_jitter_prob"], before.get("scale_jitter_prob", 0.0))
    merged = {
        "scale_jitter_prob": float(f"{min(1.0, max(0.0, probability)):.4g}"),
        "scale_range": (float(f"{low:.4g}"), float(f"{high:.4g}")),
    }
    if "min_object_covered" in settings:
        merged["min_object_covered"] = min(
            settings["min_object_covered"], before.get("min_object_covered", settings["min_object_covered"])
        )
    return merged
