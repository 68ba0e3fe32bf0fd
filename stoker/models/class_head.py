"""The class head of a file of weights, made to fit the user's classes: kept by name where it can be, else left random.

The last convolution of the class tower has anchors × classes channels, the classes of an anchor side by side. Files by
stoker have one channel per class; files by torchvision have one more, an unused channel 0 before the classes.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor
from torchvision.models.detection import RetinaNet_ResNet50_FPN_Weights

CLASS_HEAD = ("head.classification_head.cls_logits.weight", "head.classification_head.cls_logits.bias")
BOX_HEAD = "head.regression_head.bbox_reg.weight"


def fit_class_head(
    tensors: Mapping[str, Tensor], named: Sequence[str] | None, wanted: Sequence[str]
) -> tuple[dict[str, Tensor], str]:
    """(`tensors` with the class head for the classes `wanted`, or without one; the sentence that says which).

    named: the names of the file's classes where it says them. The head is kept when every wanted class is one of the
    file's, or when the file names none and has as many. A file of 91 channels without names is torchvision's COCO.
    """
    weight = tensors[CLASS_HEAD[0]]
    anchors = tensors[BOX_HEAD].shape[0] // 4
    channels = weight.shape[0] // anchors
    chosen, why = _channels(channels, named, wanted)
    rest = {name: tensor for name, tensor in tensors.items() if name not in CLASS_HEAD}
    if chosen is None:
        return rest, f"class head replaced: {channels} -> {len(wanted)} channels, random; {why}"
    for name in CLASS_HEAD:
        by_class = tensors[name].unflatten(0, (anchors, channels))  # type: ignore[no-untyped-call]
        rest[name] = by_class[:, chosen].flatten(0, 1)
    return rest, f"class head kept, {channels} -> {len(wanted)} channels; {why}"


def _channels(channels: int, named: Sequence[str] | None, wanted: Sequence[str]) -> tuple[list[int] | None, str]:
    """The file's channel of each wanted class, or None; and why."""
    coco = RetinaNet_ResNet50_FPN_Weights.COCO_V1.meta["categories"]
    if named is None and channels == len(coco):
        named = coco
    if named is None:
        if channels in (len(wanted), len(wanted) + 1):
            return list(range(channels - len(wanted), channels)), "the file has as many classes and does not name them"
        return None, "the file does not name its classes and has another number of them"
    place = {name.casefold(): channel for channel, name in enumerate(named)}
    new = [name for name in wanted if name.casefold() not in place]
    if new:
        shown = ", ".join(new[:3]) + (" …" if len(new) > 3 else "")
        return None, f"not among the file's classes: {shown}"
    return [place[name.casefold()] for name in wanted], "every class is one of the file's, matched by name"
