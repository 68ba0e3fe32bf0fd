"""Fills a model from a file of weights, and says in sentences what it took and what it left random.

Understood are state_dicts of torchvision's RetinaNet (in both of its namings), of torchvision's ResNet-50 and
MobileNetV2 classifiers, and stoker's own files; as .pth/.pt (bare or under "model") or .safetensors. Where files come
from is `sources.py`; reading a model of stoker's back whole is `saved.py`.
"""

import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from safetensors import safe_open
from torch import Tensor

from stoker.config import ModelSettings
from stoker.errors import WeightsError, nearest
from stoker.models.class_head import BOX_HEAD, CLASS_HEAD, fit_class_head
from stoker.models.sources import fetch
from stoker.models.table import MODELS, Detector, architecture

BODY = "backbone.body."


class Weights(NamedTuple):
    """What a file holds, its tensors under our names."""

    tensors: dict[str, Tensor]
    model: str | None
    """The row of MODELS they belong to; None when they belong to none."""
    class_names: tuple[str, ...] | None
    """The classes of its class head, where the file says them."""

    @property
    def is_detector(self) -> bool:
        return BOX_HEAD in self.tensors and CLASS_HEAD[0] in self.tensors


def architecture_of(path: str | Path) -> str | None:
    """The name in MODELS of the architecture that a file's weights belong to (a classifier's: that has it as body);
    None when there is none. Raises WeightsError when the file is missing or cannot be read."""
    return read(Path(path)).model


def load_weights(model: Detector, settings: ModelSettings, *, class_names: Sequence[str]) -> list[str]:
    """Fills `model`, built from `settings`, as `settings.weights` says: coco, imagenet, none or a file.

    Returns sentences: what was loaded and from where, what was replaced or left random. Raises WeightsError when the
    weights cannot be had or read, or belong to another architecture, before anything of the model is changed.
    """
    choice = settings.weights
    if choice == "none":
        return ["none, every layer starts from random values"]
    row = architecture(settings.model)
    if choice in ("coco", "imagenet") and choice not in row.urls:
        with_it = [name for name, other in MODELS.items() if choice in other.urls]
        raise WeightsError(
            f"There are no {choice} weights for {settings.model}.",
            choices=[*row.urls, "none", "FILE"],
            fix=f"--model {' or '.join(with_it)} has {choice} weights",
        )
    path, where = fetch(row.urls[choice]) if choice in row.urls else (Path(choice), "")
    weights = read(path, choices=(*row.urls, "none"))
    if weights.model != settings.model:
        raise _wrong_architecture(path, weights, settings.model)
    tensors, sentences = weights.tensors, []
    if "coco" in row.urls and path.name == row.urls["coco"].rsplit("/", 1)[1]:
        tensors = _without_epsilon(tensors)
    origin = f"{path.name}" + (f" ({where})" if where else "")
    if weights.is_detector:
        tensors, sentence = fit_class_head(tensors, weights.class_names, class_names)
        sentences = [f"backbone, FPN and heads from {origin}", sentence]
    else:
        sentences = [f"backbone from {origin}", "FPN and heads are random"]
    _fill(model, tensors, path, is_detector=weights.is_detector)
    return sentences


def read(path: Path, *, choices: Sequence[str] = ("coco", "imagenet", "none")) -> Weights:
    """The weights in a file. Raises WeightsError when it is missing, damaged or holds something else; `choices` are the
    values other than a file that the caller would have taken."""
    if not path.is_file():
        near = nearest(str(path), choices) or (
            nearest(path.name, [p.name for p in path.parent.iterdir()]) if path.parent.is_dir() else None
        )
        raise WeightsError(
            "The weights file does not exist" + (f"; did you mean {near}?" if near else "."),
            place=path,
            choices=(*choices, "FILE (.pth, .pt, .safetensors)"),
        )
    header: dict[str, str] = {}
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                header = file.metadata() or {}
                content = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        else:
            # Files of torch before 1.6 are not zip archives and cannot be mapped; torchvision still serves some.
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # whatever damaged bytes make the readers raise
        raise WeightsError(
            "The weights file cannot be read.",
            place=path,
            cause=str(error).splitlines()[0] if str(error) else type(error).__name__,
            fix="if it was cut off, download or copy it again; if it holds more than tensors, save it again with "
            "torch.save(model.state_dict(), FILE)",
        ) from error
    tensors = _our_names(_state_dict(content, path))
    names = msgspec.json.decode(header["stoker"], type=_Card).class_names if "stoker" in header else None
    said = header.get("model")
    return Weights(tensors, said if said in MODELS else _recognise(tensors), names)


class _Card(msgspec.Struct):
    """The part of `saved.Card` that is needed here."""

    class_names: tuple[str, ...]


def _state_dict(content: object, path: Path) -> dict[str, Tensor]:
    for key in ("model", "state_dict"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        raise WeightsError(
            "The file does not hold a state_dict.",
            place=path,
            cause="wanted names and tensors, bare or under 'model'",
            fix="save it with torch.save(model.state_dict(), FILE)",
        )
    return content


# Other names of the same tensors: DataParallel's prefix, torchvision's names before 0.13, the two classifiers.
_RENAMES = (
    (re.compile(r"^module\."), ""),
    (re.compile(r"^(backbone\.fpn\.(?:inner|layer)_blocks\.\d+)\.(weight|bias)$"), r"\1.0.\2"),
    (re.compile(r"^features\."), BODY),
    (re.compile(r"^((?:conv1|bn1|layer\d)\.)"), BODY + r"\1"),
)
_OLD_TOWER = re.compile(r"^(head\.\w+\.conv)\.(\d+)\.(weight|bias)$")
_CLASSIFIER = re.compile(r"^(fc|classifier\.\d+)\.(weight|bias)$")


def _our_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    result = {}
    for name, tensor in tensors.items():
        for pattern, replacement in _RENAMES:
            name = pattern.sub(replacement, name)
        if old := _OLD_TOWER.match(name):  # a tower was convolution, ReLU, convolution, ReLU …
            name = f"{old[1]}.{int(old[2]) // 2}.0.{old[3]}"
        if not _CLASSIFIER.match(name) and not name.endswith("num_batches_tracked"):
            result[name] = tensor
    return result


def _recognise(tensors: Mapping[str, Tensor]) -> str | None:
    """The row of MODELS whose names and shapes these are. Other detectors on the same bodies are not."""

    def has(name: str, *shape: int) -> bool:
        return name in tensors and (not shape or tuple(tensors[name].shape) == shape)

    others = [name for name in tensors if not name.startswith(BODY)]
    if others and not has(BOX_HEAD):
        return None
    plain_towers = not has("head.classification_head.conv.0.1.weight")
    is_resnet50 = has(BODY + "layer1.0.conv2.weight", 64, 64, 3, 3) and has(BODY + "layer3.5.conv3.weight")
    if is_resnet50 and not has(BODY + "layer3.6.conv3.weight") and plain_towers:
        return "retinanet_resnet50_fpn"
    if has(BODY + "18.0.weight", 1280, 320, 1, 1) and has(BODY + "1.conv.0.0.weight", 32, 1, 3, 3) and plain_towers:
        return "retinanet_mobilenet_v2_fpn"
    if has(BODY + "stem.0.weight", 16, 3, 3, 3):
        return "retinanet_tiny_fpn"
    return None


def _without_epsilon(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """torchvision's COCO weights were trained with norms whose epsilon was 0 (`overwrite_eps`); ours is 1e-5. The scale
    makes up for it: weight · √((var + ε) / var), so that nothing outside the file has to remember it."""
    result = dict(tensors)
    for name in tensors:
        if name.endswith(".running_var"):
            scale, variance = name.removesuffix("running_var") + "weight", tensors[name].double()
            result[scale] = (tensors[scale] * ((variance + 1e-5) / variance).sqrt()).float()
    return result


def _fill(model: Detector, tensors: Mapping[str, Tensor], path: Path, *, is_detector: bool) -> None:
    """Copies the tensors into the model once all of them are known to fit it."""
    own = model.state_dict()
    wanted = [name for name in own if is_detector or name.startswith(BODY)]
    optional = {name for name in wanted if name in CLASS_HEAD or name.endswith("num_batches_tracked")}
    missing = [name for name in wanted if name not in tensors and name not in optional]
    unknown = [name for name in tensors if name not in own]
    for what, names in (("lacks", missing), ("has an unknown", unknown)):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise WeightsError(f"The weights file {what} tensor {names[0]}{more}.", place=path)
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            is_box_head = name.startswith(BOX_HEAD.removesuffix(".weight"))
            raise WeightsError(
                f"The tensor {name} has another shape in the weights file than in the model.",
                place=path,
                cause=f"{list(tensor.shape)} in the file, {list(own[name].shape)} in the model",
                fix="the --anchor-scales and --anchor-ratios that the file was trained with" if is_box_head else None,
            )
    model.load_state_dict(dict(tensors), strict=False)


def _wrong_architecture(path: Path, weights: Weights, wanted: str) -> WeightsError:
    if weights.model is not None:
        return WeightsError(
            f"The weights file belongs to {weights.model}, not to {wanted}.",
            place=path,
            fix=f"--model {weights.model}, or other weights",
        )
    return WeightsError(
        f"The weights file does not belong to {wanted}, nor to another model of stoker's.",
        place=path,
        cause=f"its tensors are called {', '.join(list(weights.tensors)[:3])} …",
        choices=["torchvision's RetinaNet", "its ResNet-50 or MobileNetV2 classifiers", "a file by stoker"],
    )
