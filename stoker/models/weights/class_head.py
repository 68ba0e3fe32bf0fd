"""The class layers of a file of weights, fitted to the user's classes: kept by name where it can be, else left random.

Such a layer has the classes of an anchor side by side (`detector.ClassLayer` says how). Files by stoker have one
channel per class, and a background first where the model has one; files by torchvision always have the latter: in its
RetinaNet and FCOS, whose classes are sigmoids, that channel is unused.
"""

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor
from torchvision.models.detection import RetinaNet_ResNet50_FPN_Weights

from stoker.models.detector import ClassLayer


def tensors_of(layers: Iterable[ClassLayer]) -> dict[str, ClassLayer]:
    """Name of each tensor of class layers → its layer."""
    return {f"{layer.name}.{kind}": layer for layer in layers for kind in ("weight", "bias")}


def fit_class_head(
    tensors: Mapping[str, Tensor],
    layers: Sequence[ClassLayer],
    named: Sequence[str] | None,
    wanted: Sequence[str],
) -> tuple[dict[str, Tensor], str]:
    """(`tensors` with the class layers for the classes `wanted`, or without them; the sentence that says which).

    layers: the model's; named: the names of the file's classes where it says them. They are kept when every wanted
    class is one of the file's, or when the file names none and has as many. A file of 91 channels without names is
    torchvision's COCO.
    """
    first = layers[0]
    channels = tensors[f"{first.name}.weight"].shape[0] // (first.anchors * first.per_class)
    chosen, why = _channels(channels, named, wanted, background=first.background)
    of_classes = tensors_of(layers)
    rest = {name: tensor for name, tensor in tensors.items() if name not in of_classes}
    own = len(wanted) + first.background
    if chosen is None:
        return rest, f"class head replaced: {channels} -> {own} channels, random; {why}"
    for name, layer in of_classes.items():
        by_class = tensors[name].unflatten(0, (layer.anchors, channels, layer.per_class))  # type: ignore[no-untyped-call]
        rest[name] = by_class[:, chosen].flatten(0, 2)
    return rest, f"class head kept, {channels} -> {own} channels; {why}"


def _channels(
    channels: int, named: Sequence[str] | None, wanted: Sequence[str], *, background: bool
) -> tuple[list[int] | None, str]:
    """The file's channels that the model's own are, or None; and why."""
    coco = RetinaNet_ResNet50_FPN_Weights.COCO_V1.meta["categories"]
    first = [0] if background else []
    if named is None and channels == len(coco):
        named = coco
    elif named is not None and background:
        named = ["", *named]  # a file by stoker does not name the background
    if named is None:
        if channels in (len(wanted) + 1, len(wanted) + background):
            return [*first, *range(channels - len(wanted), channels)], (
                "the file has as many classes and does not name them"
            )
        return None, "the file does not name its classes and has another number of them"
    place = {name.casefold(): channel for channel, name in enumerate(named)}
    new = [name for name in wanted if name.casefold() not in place]
    if new:
        shown = ", ".join(new[:3]) + (" …" if len(new) > 3 else "")
        return None, f"not among the file's classes: {shown}"
    return [*first, *(place[name.casefold()] for name in wanted)], "every class is one of the file's, matched by name"
