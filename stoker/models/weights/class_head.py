"""Converts the class head of a weights file to the user's classes: matched by name if possible, else left random.

`detector.ClassHeadSpec` describes the channels of such a layer. Files by stoker have one channel per class, after a
background channel if the model has one. Files by torchvision always have a background channel; in its RetinaNet and
FCOS, which have sigmoids, it is unused.
"""

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from stoker.models.detector import ClassHeadSpec

COCO_CHANNELS = (
    "__background__", "person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat",
    "traffic light", "fire hydrant", "N/A", "stop sign", "parking meter", "bench", "bird", "cat", "dog", "horse",
    "sheep", "cow", "elephant", "bear", "zebra", "giraffe", "N/A", "backpack", "umbrella", "N/A", "N/A", "handbag",
    "tie", "suitcase", "frisbee", "skis", "snowboard", "sports ball", "kite", "baseball bat", "baseball glove",
    "skateboard", "surfboard", "tennis racket", "bottle", "N/A", "wine glass", "cup", "fork", "knife", "spoon",
    "bowl", "banana", "apple", "sandwich", "orange", "broccoli", "carrot", "hot dog", "pizza", "donut", "cake",
    "chair", "couch", "potted plant", "bed", "N/A", "dining table", "N/A", "N/A", "toilet", "N/A", "tv", "laptop",
    "mouse", "remote", "keyboard", "cell phone", "microwave", "oven", "toaster", "sink", "refrigerator", "N/A",
    "book", "clock", "vase", "scissors", "teddy bear", "hair drier", "toothbrush",
)  # fmt: skip
"""Classes of the channels of torchvision's COCO weights: by category id, with ids that have no category."""


def class_tensors(class_heads: Iterable[ClassHeadSpec]) -> dict[str, ClassHeadSpec]:
    """Name of each tensor of the class heads → its layer."""
    return {f"{head.name}.{kind}": head for head in class_heads for kind in ("weight", "bias")}


def fit_class_head(
    tensors: Mapping[str, Tensor],
    class_heads: Sequence[ClassHeadSpec],
    file_classes: Sequence[str] | None,
    class_names: Sequence[str],
) -> tuple[dict[str, Tensor], str]:
    """(`tensors` with class heads for `class_names`, or without them; a sentence about the result).

    class_heads: the model's; file_classes: class names in the file, None if it has none. The heads are kept if every
    class is one of the file's, or if the file has no names and as many classes. A file with 91 channels without names
    has torchvision's COCO classes.
    """
    first = class_heads[0]
    head_by_tensor = class_tensors(class_heads)
    sizes = {name: (*tensors[name].shape, 0)[0] if name in tensors else 0 for name in head_by_tensor}
    channels = sizes[f"{first.name}.weight"] // (first.num_anchors * first.outputs_per_class)
    channel_indices, reason = _match_channels(channels, file_classes, class_names, has_background=first.has_background)
    if any(
        sizes[name] != head.num_anchors * channels * head.outputs_per_class for name, head in head_by_tensor.items()
    ):
        channel_indices, reason = None, "its layers have other numbers of channels than those of the model"
    fitted = {name: tensor for name, tensor in tensors.items() if name not in head_by_tensor}
    num_channels = len(class_names) + first.has_background
    if channel_indices is None:
        return fitted, f"class head replaced: {channels} -> {num_channels} channels, random; {reason}"
    for name, head in head_by_tensor.items():
        by_class = tensors[name].unflatten(0, (head.num_anchors, channels, head.outputs_per_class))  # type: ignore[no-untyped-call]
        fitted[name] = by_class[:, channel_indices].flatten(0, 2)
    return fitted, f"class head kept, {channels} -> {num_channels} channels; {reason}"


def _match_channels(
    channels: int, file_classes: Sequence[str] | None, class_names: Sequence[str], *, has_background: bool
) -> tuple[list[int] | None, str]:
    """(the file's channel for each channel of the model, or None; the reason)."""
    first = [0] if has_background else []
    if file_classes is None and channels == len(COCO_CHANNELS):
        file_classes = COCO_CHANNELS
    elif file_classes is not None and has_background:
        file_classes = ["", *file_classes]  # a file by stoker has no name for the background
    if file_classes is None:
        if channels in (len(class_names) + 1, len(class_names) + has_background):
            return [*first, *range(channels - len(class_names), channels)], (
                "the file has as many classes, without names"
            )
        return None, "the file has no class names and another number of classes"
    channel_by_name = {name.casefold(): channel for channel, name in enumerate(file_classes)}
    missing = [name for name in class_names if name.casefold() not in channel_by_name]
    if missing:
        listed = ", ".join(missing[:3]) + (" …" if len(missing) > 3 else "")
        return None, f"not among the file's classes: {listed}"
    return [
        *first,
        *(channel_by_name[name.casefold()] for name in class_names),
    ], "every class is one of the file's, matched by name"
