"""The `model` of a pipeline.config: architecture, image size and anchors; rows of `pipeline_fields.toml` have the rest.

Names and defaults of fields are those of object_detection/protos/*.proto (tensorflow/models). An architecture that
stoker does not have becomes the nearest one: same family first, then similar cost.
"""

import math
from fnmatch import fnmatchcase

from stoker.migration.fields import FieldAccount, ModelChoice, knowledge
from stoker.migration.text_format import Message
from stoker_watch.errors import ConfigError

FAMILIES = ("ssd", "faster_rcnn", "center_net")


def choose_detector(model: Message) -> tuple[str, Message, ModelChoice]:
    """(family, its message, what it becomes). Raises ConfigError for a file without one of FAMILIES."""
    family = model.kind()
    if family not in FAMILIES:
        what = "The file has no model that stoker knows." if family is None else f"The model is {family!r}."
        fix = "give the pipeline.config of a training: a label map or a graph has no model"
        raise ConfigError(what, location=f"{model.location}:{model.line or 1}", choices=FAMILIES, fix=fix)
    message = model.child(family)
    kind = message.child("feature_extractor").text("type")
    is_lite = family == "ssd" and message.child("feature_extractor").flag("use_depthwise", False)
    name = kind.removesuffix("_keras")
    if name == "ssd_mobilenet_v2_fpn" and is_lite:
        return family, message, ModelChoice(name, "retinanet_mobilenet_v2_fpnlite", "SSD MobileNetV2 FPN-lite")
    for detector in knowledge().detectors[family]:
        if fnmatchcase(name, detector.pattern):
            return family, message, detector
    note = f"stoker does not know {kind!r}; the usual model of the family, so choose another where it matters"
    return family, message, ModelChoice(name, knowledge().fallbacks[family], note)


def read_model(account: FieldAccount, family: str, message: Message, detector: ModelChoice) -> None:
    """Rows and settings of what is computed from several fields of `model.<family>`."""
    settings = {"model": account.model.name}
    account.carry(message.child("feature_extractor"), "type", "substitute", settings, detector.note)
    _read_image_size(account, message.child("image_resizer"))
    anchors = message.child("first_stage_anchor_generator" if family == "faster_rcnn" else "anchor_generator")
    grid = anchors.child(anchors.kind() or "")
    if anchors.kind() == "multiscale_anchor_generator" and "anchor_scales" in account.model.defaults:
        _read_multiscale_anchors(account, grid)
    elif anchors.kind() == "grid_anchor_generator":
        _read_grid_anchors(account, grid)
    elif anchors.kind() == "ssd_anchor_generator" and account.model.name.startswith("ssd"):
        _read_ssd_anchors(account, grid)


def _read_image_size(account: FieldAccount, resizer: Message) -> None:
    kind, divisor = resizer.kind() or "", account.model.size_divisor
    shape, fields = resizer.child(kind), knowledge().resizers.get(kind, {})
    sides = [shape.number(name, default) for name, default in fields.items()]
    # The next larger multiples of the model's divisor, so that no detail is lost.
    image_size = tuple(max(2, math.ceil(side / divisor)) * divisor for side in (sides * 2)[:2])
    settings = {"image_size": image_size, "resize": "squash" if kind == "fixed_shape_resizer" else "letterbox"}
    for name, wanted, given in zip(fields, sides, image_size, strict=False):
        if kind == "fixed_shape_resizer":
            is_exact = wanted == given
            note = "stretched to the size, as in the API" if is_exact else f"the next multiple of {divisor}"
        elif kind == "keep_aspect_ratio_resizer":
            is_exact = sides[0] == sides[1] == image_size[0]
            note = "the aspect ratio is kept, and the rest is padded"
            if not is_exact:
                note = (
                    f"all images are fitted into one fixed size, multiples of {divisor}: landscape images get the "
                    "scale of the API, portrait images a smaller one (swap the two numbers if most are portrait)"
                )
        else:
            is_exact, note = False, "all images get one fixed size"
        account.carry(shape, name, "exact" if is_exact else "substitute", settings, note)


LOWEST_LEVEL = 3
"""The pyramid of RetinaNet begins with a stride of 8."""


def _read_multiscale_anchors(account: FieldAccount, grid: Message) -> None:
    low, high = int(grid.number("min_level", 3)), int(grid.number("max_level", 7))
    base, octave = grid.number("anchor_scale", 4.0), max(1, int(grid.number("scales_per_octave", 2)))
    sizes = tuple(base * 2.0**level for level in range(low, high + 1))
    scales = tuple(float(f"{2 ** (k / octave):.6g}") for k in range(octave))
    fits = len(sizes) == len(_own_sizes(account))
    note = "anchor_scale times the stride of each level; the first anchor is at the corner of the image"
    if not fits:
        note = f"{account.model.name} has {len(_own_sizes(account))} levels; its own sizes and scales are used"
    is_shifted = fits and low != LOWEST_LEVEL
    if is_shifted:
        last = LOWEST_LEVEL + high - low
        note = f"the sizes are the API's, on the levels {LOWEST_LEVEL} to {last} of {account.model.name}"
    for name in ("min_level", "max_level", "anchor_scale", "scales_per_octave"):
        settings = {"anchor_sizes": sizes, "anchor_scales": scales} if fits else {}
        account.carry(grid, name, "exact" if fits and not is_shifted else "substitute", settings, note)
    _read_aspect_ratios(account, grid, grid.numbers("aspect_ratios") or (1.0,))


def _own_sizes(account: FieldAccount) -> tuple[float, ...]:
    """The default anchor sizes of the model, one per level; empty if it has none."""
    sizes: tuple[float, ...] = account.model.defaults.get("anchor_sizes", ())
    return sizes


def _read_aspect_ratios(account: FieldAccount, grid: Message, ratios: tuple[float, ...]) -> None:
    inverted = tuple(sorted(float(f"{1 / ratio:.6g}") for ratio in ratios if ratio > 0))
    note = "height over width here, width over height there"
    account.carry(grid, "aspect_ratios", "exact", {"aspect_ratios": inverted}, note)


def _read_grid_anchors(account: FieldAccount, grid: Message) -> None:
    """Anchors of the one feature map of a Faster R-CNN; stoker's have a pyramid."""
    side = math.sqrt(grid.number("height", 256) * grid.number("width", 256))
    sizes = tuple(sorted(side * scale for scale in grid.numbers("scales")))
    fits = len(sizes) == len(_own_sizes(account)) > 0
    note = f"sizes {' '.join(f'{size:g}' for size in sizes)} on one map there, one size per level of a pyramid here"
    for name in ("scales", "height", "width"):
        if grid.has(name):
            account.carry(grid, name, "substitute", {"anchor_sizes": sizes} if fits else {}, note)
    if grid.has("aspect_ratios"):
        _read_aspect_ratios(account, grid, grid.numbers("aspect_ratios"))


def _read_ssd_anchors(account: FieldAccount, grid: Message) -> None:
    layers = int(grid.number("num_layers", 6))
    low, high = grid.number("min_scale", 0.2), grid.number("max_scale", 0.95)
    image_size = account.settings.get("image_size")
    if image_size is None or layers != len(_own_sizes(account)) - 1 or grid.has("scales"):
        return
    scales = [*(low + (high - low) * k / (layers - 1) for k in range(layers)), 1.0]
    settings = {"anchor_sizes": tuple(float(f"{scale * min(image_size):.4g}") for scale in scales)}
    for field in ("num_layers", "min_scale", "max_scale"):
        account.carry(grid, field, "exact", settings, "scales times the image size")
