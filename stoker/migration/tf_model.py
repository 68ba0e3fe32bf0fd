"""The `model` of a pipeline.config: architecture, image size, anchors, assignment, losses, norms.

Names and defaults of fields are those of object_detection/protos/*.proto (tensorflow/models). An architecture that
stoker does not have becomes the nearest one: same family first, then similar cost.
"""

import math
from fnmatch import fnmatchcase

from stoker.errors import ConfigError
from stoker.migration.fields import Detector, FieldAccount, Status, knowledge
from stoker.migration.text_format import Message

FAMILIES = ("ssd", "faster_rcnn", "center_net")
FALLBACK = {"ssd": "retinanet_resnet50_fpn", "faster_rcnn": "faster_rcnn_resnet50_fpn"}
SSD_ASPECT_RATIOS = {
    "ssdlite320_mobilenet_v3_large": (1 / 3, 1 / 2, 1.0, 2.0, 3.0),
    "ssd300_vgg16": (1 / 3, 1 / 2, 1.0, 2.0, 3.0),
}
"""Of models whose aspect ratios cannot be set (SSD300 has 3 and 1/3 at three of its levels only)."""
SIZE_DIVISOR = {"ssd300_vgg16": 20}
"""Height and width are multiples of 32, or of this."""


def choose_detector(model: Message) -> tuple[str, Message, Detector]:
    """(family, its message, what it becomes). Raises ConfigError for a file without one of FAMILIES."""
    family = model.kind()
    if family not in FAMILIES:
        raise ConfigError(
            "The file has no model that stoker knows." if family is None else f"The model is {family!r}.",
            location=f"{model.location}:{model.line or 1}",
            choices=FAMILIES,
            fix="give the pipeline.config of a training: a label map or a graph has no model",
        )
    message = model.child(family)
    kind = message.child("feature_extractor").text("type")
    is_lite = family == "ssd" and message.child("feature_extractor").flag("use_depthwise", False)
    name = kind.removesuffix("_keras")
    if name == "ssd_mobilenet_v2_fpn" and is_lite:
        return family, message, Detector(name, "retinanet_mobilenet_v2_fpnlite", "SSD MobileNetV2 FPN-lite")
    for detector in knowledge().detectors[family]:
        if fnmatchcase(name, detector.pattern):
            return family, message, detector
    note = f"stoker does not know {kind!r}; the usual model of the family, so choose another where it matters"
    return family, message, Detector(name, FALLBACK[family], note)


def read_model(account: FieldAccount, family: str, message: Message, detector: Detector) -> None:
    """Rows and settings of everything in `model.<family>`."""
    extractor = message.child("feature_extractor")
    account.substitute(extractor, "type", {"model": account.model.name}, detector.note)
    account.exact(message, "num_classes", note="stoker counts the classes of the data set")
    _read_image_size(account, message.child("image_resizer"))
    if family == "ssd":
        _read_ssd(account, message)
    elif family == "faster_rcnn":
        _read_faster_rcnn(account, message)


def _read_image_size(account: FieldAccount, resizer: Message) -> None:
    kind = resizer.kind()
    shape = resizer.child(kind or "fixed_shape_resizer")
    if shape.flag("convert_to_grayscale", False):
        account.drop(shape, "convert_to_grayscale", "models here have three channels; gray images are read as RGB")
    if kind == "fixed_shape_resizer":
        height, width = (int(shape.number(name, 300)) for name in ("height", "width"))
        image_size = _rounded_size(account, height, width)
        settings = {"image_size": image_size, "resize": "squash"}
        for name, pixels, side in (("height", height, image_size[0]), ("width", width, image_size[1])):
            if pixels == side:
                account.exact(shape, name, settings, "stretched to the size, as in the API")
            else:
                account.substitute(shape, name, settings, _multiple_note(account))
    elif kind == "keep_aspect_ratio_resizer":
        short, long = (int(shape.number(*field)) for field in (("min_dimension", 600), ("max_dimension", 1024)))
        image_size = _rounded_size(account, short, long)
        settings = {"image_size": image_size, "resize": "letterbox"}
        status: Status = "exact" if short == long == image_size[0] else "substitute"
        note = "the aspect ratio is kept, and the rest is padded"
        if status == "substitute":
            note = (
                "all images are fitted into one fixed size: landscape images get the scale of the API, portrait "
                "images a smaller one (swap the two numbers if most are portrait)"
            )
            note += f"; {_multiple_note(account)}" if image_size != (short, long) else ""
        for name in ("min_dimension", "max_dimension"):
            account.carry(shape, name, status, settings, note)
    elif kind == "conditional_shape_resizer":
        side = int(shape.number("size_threshold", 300))
        image_size = _rounded_size(account, side, side)
        account.whole(
            shape, "substitute", {"image_size": image_size, "resize": "letterbox"}, "all images get one fixed size"
        )


def _rounded_size(account: FieldAccount, height: int, width: int) -> tuple[int, int]:
    """Multiples of the model's divisor: the next larger ones, so that no detail is lost."""
    divisor = SIZE_DIVISOR.get(account.model.name, 32)
    return max(2, math.ceil(height / divisor)) * divisor, max(2, math.ceil(width / divisor)) * divisor


def _multiple_note(account: FieldAccount) -> str:
    return f"the next multiple of {SIZE_DIVISOR.get(account.model.name, 32)}"


def _read_ssd(account: FieldAccount, ssd: Message) -> None:
    _read_backbone_norm(account, ssd, "freeze_batchnorm", is_frozen=ssd.flag("freeze_batchnorm", False))
    _read_anchors(account, ssd.child("anchor_generator"))
    _read_matcher(account, ssd.child("matcher"))
    _read_classification_loss(account, ssd.child("loss").child("classification_loss"))
    _read_nms(account, ssd.child("post_processing"))


def _read_faster_rcnn(account: FieldAccount, rcnn: Message) -> None:
    extractor = rcnn.child("feature_extractor")
    is_frozen = not extractor.flag("batch_norm_trainable", False)
    _read_backbone_norm(account, extractor, "batch_norm_trainable", is_frozen=is_frozen)
    _read_anchors(account, rcnn.child("first_stage_anchor_generator"))
    _read_classification_loss(account, rcnn.child("second_stage_classification_loss"))
    _read_nms(account, rcnn.child("second_stage_post_processing"))


def _read_backbone_norm(account: FieldAccount, message: Message, name: str, *, is_frozen: bool) -> None:
    if account.model.name == "ssd300_vgg16":
        if message.has(name):
            account.drop(message, name, "VGG-16 has no norms")
    elif is_frozen:
        account.exact(message, name, {"backbone_norm": "frozen_bn"})
    else:
        note = "with few images per device, --backbone-norm frozen_bn is the safer choice"
        account.exact(message, name, {"backbone_norm": "bn"}, note)


def _read_anchors(account: FieldAccount, generator: Message) -> None:
    kind = generator.kind()
    if kind is None:
        return
    grid = generator.child(kind)
    if kind == "multiscale_anchor_generator":
        _read_multiscale_anchors(account, grid)
    elif kind == "grid_anchor_generator":
        _read_grid_anchors(account, grid)
    elif kind == "ssd_anchor_generator":
        _read_ssd_anchors(account, grid)


def _num_levels(account: FieldAccount) -> int:
    """Pyramid levels of the model with anchors, 0 if it has none."""
    return len(account.model.settings.get("anchor_sizes", ((), ""))[0])


def _read_multiscale_anchors(account: FieldAccount, grid: Message) -> None:
    low, high = int(grid.number("min_level", 3)), int(grid.number("max_level", 7))
    default = account.model.settings.get("anchor_sizes", ((), ""))[0]
    if "anchor_scales" not in account.model.settings:
        account.whole(grid, "not carried", {}, f"{account.model.name} has anchors of its own")
        return
    base = grid.number("anchor_scale", 4.0)
    sizes = tuple(base * 2.0**level for level in range(low, high + 1))
    octave = max(1, int(grid.number("scales_per_octave", 2)))
    if len(sizes) == len(default):
        note = "anchor_scale times the stride of each level; the first anchor is at the corner of the image"
        for name in ("min_level", "max_level", "anchor_scale"):
            account.exact(grid, name, {"anchor_sizes": sizes}, note)
        scales = tuple(float(f"{2 ** (k / octave):.6g}") for k in range(octave))
        account.exact(grid, "scales_per_octave", {"anchor_scales": scales})
    else:
        own = " ".join(f"{size:g}" for size in default)
        note = f"{account.model.name} has {len(default)} levels; its own sizes {own}, and its own scales"
        for name in ("min_level", "max_level", "anchor_scale", "scales_per_octave"):
            account.substitute(grid, name, {}, note)
    _read_aspect_ratios(account, grid, default=(1.0,))


def _read_aspect_ratios(account: FieldAccount, grid: Message, *, default: tuple[float, ...]) -> None:
    """The API divides width by height, stoker height by width."""
    ratios = grid.numbers("aspect_ratios") or default
    inverted = tuple(sorted(float(f"{1 / ratio:.6g}") for ratio in ratios if ratio > 0))
    note = "height over width here, width over height there"
    account.exact(grid, "aspect_ratios", {"aspect_ratios": inverted}, note)


def _read_grid_anchors(account: FieldAccount, grid: Message) -> None:
    """Anchors of the one feature map of a Faster R-CNN; stoker's have a pyramid."""
    sides = grid.number("height", 256), grid.number("width", 256)
    sizes = tuple(sorted(math.sqrt(sides[0] * sides[1]) * scale for scale in grid.numbers("scales")))
    covered = " ".join(f"{size:g}" for size in sizes)
    if sizes and len(sizes) == _num_levels(account):
        settings, note = {"anchor_sizes": sizes}, "one size per level of the pyramid, instead of all on one map"
    else:
        default = account.model.settings["anchor_sizes"][0]
        settings = {}
        note = f"sizes {covered} on one map; here one per level: {' '.join(f'{s:g}' for s in default)}"
    for name in ("scales", "height", "width"):
        if grid.has(name):
            account.substitute(grid, name, settings, note)
    if grid.has("aspect_ratios"):
        _read_aspect_ratios(account, grid, default=())


def _read_ssd_anchors(account: FieldAccount, grid: Message) -> None:
    layers = int(grid.number("num_layers", 6))
    low, high = grid.number("min_scale", 0.2), grid.number("max_scale", 0.95)
    name = account.model.name
    image_size = account.settings.get("image_size")
    if (
        name not in SSD_ASPECT_RATIOS
        or image_size is None
        or layers != _num_levels(account) - 1
        or grid.has("scales")
        or layers < 2
    ):
        reason = f"{name} has anchors of its own: `stoker data stats DATA --model {name}` compares them with the boxes"
        account.whole(grid, "not carried", {}, reason)
        return
    side = min(image_size)
    scales = [*(low + (high - low) * k / (layers - 1) for k in range(layers)), 1.0]
    settings = {"anchor_sizes": tuple(float(f"{scale * side:.4g}") for scale in scales)}
    for field in ("num_layers", "min_scale", "max_scale"):
        account.exact(grid, field, settings, "scales times the image size")
    if grid.has("aspect_ratios"):
        ratios = sorted(grid.numbers("aspect_ratios"))
        own = SSD_ASPECT_RATIOS[name]
        if len(ratios) == len(own) and all(math.isclose(a, b, rel_tol=0.01) for a, b in zip(ratios, own, strict=True)):
            account.exact(grid, "aspect_ratios")
        else:
            account.substitute(grid, "aspect_ratios", {}, f"fixed in {name}: 1/3, 1/2, 1, 2, 3")


def _read_matcher(account: FieldAccount, matcher: Message) -> None:
    argmax = matcher.child("argmax_matcher")
    if not argmax.is_present:
        return
    if argmax.flag("ignore_thresholds", False):
        account.whole(argmax, "not carried", {}, "anchors are assigned by IoU thresholds: those of the model's paper")
        return
    foreground = argmax.number("matched_threshold", 0.5)
    background = argmax.number("unmatched_threshold", 0.5)
    account.exact(argmax, "matched_threshold", {"fg_iou_thresh": foreground})
    if "bg_iou_thresh" not in account.model.settings and foreground == background:
        account.exact(argmax, "unmatched_threshold", note="the model has one threshold")
    else:
        account.exact(argmax, "unmatched_threshold", {"bg_iou_thresh": background})


def _read_classification_loss(account: FieldAccount, loss: Message) -> None:
    """The parameters of a focal loss; other losses cannot be chosen."""
    if loss.kind() != "weighted_sigmoid_focal" or "focal_alpha" not in account.model.settings:
        return
    focal = loss.child("weighted_sigmoid_focal")
    account.exact(focal, "gamma", {"focal_gamma": focal.number("gamma", 2.0)})
    settings = {"focal_alpha": focal.number("alpha", 0.25)}
    if focal.has("alpha"):
        account.exact(focal, "alpha", settings)
    else:
        note = "without alpha, the API weighs positives and negatives equally; 0.25 is the paper's"
        account.substitute(focal, "alpha", settings, note)


def _read_nms(account: FieldAccount, post_processing: Message) -> None:
    nms = post_processing.child("batch_non_max_suppression")
    if nms.has("max_detections_per_class"):
        if nms.number("max_detections_per_class", 100) >= nms.number("max_total_detections", 100):
            account.exact(nms, "max_detections_per_class", note="the limit of all classes together is not larger")
        else:
            account.drop(nms, "max_detections_per_class", "there is one limit for all classes: 100")
