"""Loads weights into a model, and reports which layers were loaded and which stay random.

Supported are state_dicts of torchvision's detectors that are in MODELS (also with its older names), of torchvision's
classifiers with the same backbones, and stoker's own files, as .pth/.pt (bare or under "model") or .safetensors. A file
is recognized by the names and shapes of its tensors. `hub.py` finds files; `model_file.py` loads a whole model that
stoker saved.
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

from stoker.config.settings import ModelSettings
from stoker.errors import WeightsError, nearest
from stoker.models.detector import Detector
from stoker.models.table import FAMILIES, MODELS, build, get_architecture
from stoker.models.weights.class_head import class_tensors, fit_class_head
from stoker.models.weights.hub import fetch_weights, local_path
from stoker.models.weights.shapes_only import shapes_only

PRETRAINED_NAMES = ("coco", "imagenet")
"""Names that `--weights` accepts, besides `none` and files."""
MIN_MATCH_FRACTION = 0.9
"""Fraction of tensors of model and file that must have equal names and shapes for the file to be recognized. Below 1,
so that the error for an incomplete file can name the missing tensor."""


class WeightsFile(NamedTuple):
    """Content of a file."""

    tensors: dict[str, Tensor]
    """By the file's own names, without prefixes of wrappers."""
    model: str | None
    """Its architecture in MODELS, if the file has it in its header."""
    class_names: tuple[str, ...] | None
    """The classes of its class head, if the file has them in its header."""


class WeightsMatch(NamedTuple):
    """A file's tensors by a model's names."""

    match_fraction: float
    """Fraction of all names of model and file for which both have tensors of the same shape."""
    tensors: dict[str, Tensor]
    """By the model's names."""
    is_detector: bool
    """False: weights of a classifier, for the model's backbone."""


def detect_architecture(path: str | Path) -> str | None:
    """Name in MODELS of the architecture of a weights file (for a classifier: the first with this backbone); None if
    there is none. Raises WeightsError if the file is missing or cannot be read."""
    return _detect_model(read_weights(local_path(str(path))))


def load_weights(model: Detector, settings: ModelSettings, *, class_names: Sequence[str]) -> list[str]:
    """Loads `settings.weights` (coco, imagenet, none or a file) into `model`, which was built from `settings`.

    Returns sentences: what was loaded from where, what was replaced or left random. Raises WeightsError if the weights
    cannot be downloaded or read, or belong to another architecture; the model is unchanged then.
    """
    choice = settings.weights
    if choice == "none":
        return ["none: every layer starts with random values"]
    arch = get_architecture(settings.model)
    if choice in PRETRAINED_NAMES and choice not in arch.urls:
        models_with_it = [name for name, other in MODELS.items() if choice in other.urls]
        raise WeightsError(
            f"There are no {choice} weights for {settings.model}.",
            choices=[*arch.urls, "none", "FILE"],
            fix=f"--model with {choice} weights: {', '.join(models_with_it)}",
        )
    path, source = fetch_weights(arch.urls[choice]) if choice in arch.urls else (local_path(choice), "")
    weights = read_weights(path, choices=(*arch.urls, "none"))
    matched = _match_weights(weights.tensors, model)
    if matched.match_fraction < MIN_MATCH_FRACTION or weights.model not in (None, settings.model):
        raise _wrong_architecture(path, weights, settings.model)
    tensors, sentences = matched.tensors, []
    heads = class_tensors(model.class_heads())
    own_tensors = {name: tensor for name, tensor in tensors.items() if name not in heads}
    _check_fits(model, own_tensors, path, is_detector=matched.is_detector)
    if path.name in ZERO_EPS_WEIGHTS:
        tensors = _convert_epsilon(0.0, tensors)
    elif arch.pretrained_norm_eps is not None and not matched.is_detector:
        tensors = _convert_epsilon(arch.pretrained_norm_eps, tensors)
    origin = f"{path.name}" + (f" ({source})" if source else "")
    if matched.is_detector:
        tensors, sentence = fit_class_head(tensors, model.class_heads(), weights.class_names, class_names)
        sentences = [f"backbone, neck and heads from {origin}", sentence]
    else:
        sentences = [f"backbone from {origin}", "neck and heads are random"]
    _check_fits(model, tensors, path, is_detector=matched.is_detector)
    model.load_state_dict(dict(tensors), strict=False)
    return sentences


def read_weights(path: Path, *, choices: Sequence[str] = (*PRETRAINED_NAMES, "none")) -> WeightsFile:
    """The weights in a file. Raises WeightsError if it is missing, damaged or has other content; choices: the values
    that the caller accepts instead of a file, for the message."""
    if not path.is_file():
        closest = nearest(str(path), choices) or (
            nearest(path.name, [p.name for p in path.parent.iterdir()]) if path.parent.is_dir() else None
        )
        raise WeightsError(
            "The weights file does not exist" + (f"; did you mean {closest}?" if closest else "."),
            location=path,
            choices=(*choices, "FILE (.pth, .pt, .safetensors)"),
        )
    header: dict[str, str] = {}
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                header = file.metadata() or {}
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        else:
            # Files of torch before 1.6 are not zip archives and cannot be memory-mapped; torchvision still has some.
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # damaged files raise many types
        raise WeightsError(
            "The weights file cannot be read.",
            location=path,
            cause=str(error).splitlines()[0] if str(error) else type(error).__name__,
            fix="if it was cut off, download or copy it again; if it holds more than tensors, save it again with "
            "torch.save(model.state_dict(), FILE)",
        ) from error
    tensors = _without_wrappers(_state_dict(state, path))
    try:
        names = msgspec.json.decode(header["stoker"], type=_Metadata).class_names if "stoker" in header else None
    except (msgspec.DecodeError, RecursionError) as error:
        raise WeightsError("The metadata of the weights cannot be read.", location=path, cause=str(error)) from error
    model_name = header.get("model")
    return WeightsFile(tensors, model_name if model_name in MODELS else None, names)


class _Metadata(msgspec.Struct):
    """The part of `model_file.ModelMetadata` that is needed here."""

    class_names: tuple[str, ...]


def _state_dict(state: object, path: Path) -> dict[str, Tensor]:
    for key in ("model", "state_dict"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not state or not all(isinstance(v, Tensor) for v in state.values()):
        raise WeightsError(
            "The file does not hold a state_dict.",
            location=path,
            cause="expected a dict of tensors by name, bare or under 'model'",
            fix="save it with torch.save(model.state_dict(), FILE)",
        )
    return state


def _without_wrappers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the prefix of DataParallel, and without BatchNorm's counts of batches, which are not used."""
    cleaned = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in cleaned.items() if not name.endswith("num_batches_tracked")}


# Names of torchvision before 0.13.
_OLD_FPN = re.compile(r"^(backbone\.fpn\.(?:inner|layer)_blocks\.\d+)\.(weight|bias)$")
_OLD_RPN = re.compile(r"^(rpn\.head\.conv)\.(weight|bias)$")
_OLD_HEAD = re.compile(r"^(head\.\w+\.conv)\.(\d+)\.(weight|bias)$")
_CLASSIFIER = re.compile(r"^(fc|classifier(\.\d+)*)\.(weight|bias)$")


def _update_old_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    old_head_keys = {name: old for name in tensors if (old := _OLD_HEAD.match(name))}
    # An old head was convolution, ReLU, convolution, ReLU … Tensors with odd numbers are FCOS's norms; its heads still
    # have these names.
    has_norms = any(int(old[2]) % 2 for old in old_head_keys.values())
    newer = {}
    for name, tensor in tensors.items():
        if (old := old_head_keys.get(name)) and not has_norms:
            newer[f"{old[1]}.{int(old[2]) // 2}.0.{old[3]}"] = tensor
        else:
            newer[_OLD_RPN.sub(r"\1.0.0.\2", _OLD_FPN.sub(r"\1.0.\2", name))] = tensor
    return newer


def _match_weights(tensors: Mapping[str, Tensor], model: Detector) -> WeightsMatch:
    """The best mapping of a file's tensors to the model's names, and the fraction that matches."""
    own_shapes = {name: tensor.shape for name, tensor in _without_wrappers(model.state_dict()).items()}
    head_by_tensor = class_tensors(model.class_heads())
    backbone_tensors = {
        model.backbone_key(name): tensor for name, tensor in tensors.items() if not _CLASSIFIER.match(name)
    }
    backbone_names = {name for name in own_shapes if name.startswith(model.backbone_prefixes)}

    def matched_fraction(tensors_by_name: Mapping[str, Tensor], names: set[str]) -> float:
        num_same = sum(name in tensors_by_name and tensors_by_name[name].shape == own_shapes[name] for name in names)
        return num_same / max(1, len(names | (tensors_by_name.keys() - head_by_tensor.keys())))

    variants = (tensors, _update_old_names(tensors))
    matches = [
        WeightsMatch(matched_fraction(variant, own_shapes.keys() - head_by_tensor.keys()), dict(variant), True)
        for variant in variants
    ]
    matches.append(WeightsMatch(matched_fraction(backbone_tensors, backbone_names), backbone_tensors, False))
    return max(matches, key=lambda candidate: candidate.match_fraction)


def _detect_model(weights: WeightsFile) -> str | None:
    """The architecture in MODELS of a weights file, or None."""
    if weights.model is not None:
        return weights.model
    best_fraction, best_name = MIN_MATCH_FRACTION, None
    for name, arch in MODELS.items():
        options_from_weights = FAMILIES[arch.family].options_from_weights
        options = {} if options_from_weights is None else options_from_weights(weights.tensors)
        settings = {"backbone_norm": "bn", "trainable_backbone_layers": 5, **arch.defaults, **options, "model": name}
        with shapes_only():
            model = build(ModelSettings(**settings), 1)
        match_fraction = _match_weights(weights.tensors, model).match_fraction
        if match_fraction == 1:
            return name
        if match_fraction > best_fraction or (match_fraction == best_fraction and best_name is None):
            best_fraction, best_name = match_fraction, name
    return best_name


ZERO_EPS_WEIGHTS = frozenset({"fasterrcnn_resnet50_fpn_coco-258fb6c6.pth", "retinanet_resnet50_fpn_coco-eeacb38b.pth"})
"""Files by torchvision whose norms have an epsilon of 0 (`overwrite_eps` in its builders)."""


def _convert_epsilon(epsilon: float, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Converts weights of norms with another epsilon to our 1e-5 by the scale, weight · √((var + 1e-5) / (var +
    epsilon)), so that no other code has to know the epsilon."""
    result = dict(tensors)
    for name in tensors:
        if name.endswith(".running_var"):
            scale, variance = name.removesuffix("running_var") + "weight", tensors[name].double()
            result[scale] = (tensors[scale] * ((variance + 1e-5) / (variance + epsilon)).sqrt()).float()
    return result


def _check_fits(model: Detector, tensors: Mapping[str, Tensor], path: Path, *, is_detector: bool) -> None:
    """Raises WeightsError unless the model has all of the tensors, in these shapes, and misses none."""
    own_state = model.state_dict()
    head_by_tensor = class_tensors(model.class_heads())
    expected = [name for name in own_state if is_detector or name.startswith(model.backbone_prefixes)]
    optional = {name for name in expected if name in head_by_tensor or name.endswith("num_batches_tracked")}
    missing = [name for name in expected if name not in tensors and name not in optional]
    unknown = [name for name in tensors if name not in own_state]
    for problem, names in (("lacks", missing), ("has an unknown", unknown)):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise WeightsError(f"The weights file {problem} tensor {names[0]}{more}.", location=path)
    for name, tensor in tensors.items():
        if tensor.shape != own_state[name].shape:
            raise WeightsError(
                f"The tensor {name} has another shape in the weights file than in the model.",
                location=path,
                cause=f"{list(tensor.shape)} in the file, {list(own_state[name].shape)} in the model",
                fix=None
                if name.startswith(model.backbone_prefixes)
                else "the --anchor-scales and --aspect-ratios that the file was trained with",
            )


def _wrong_architecture(path: Path, weights: WeightsFile, model_name: str) -> WeightsError:
    actual_name = _detect_model(weights)
    if actual_name is not None:
        return WeightsError(
            f"The weights file belongs to {actual_name}, not to {model_name}.",
            location=path,
            fix=f"--model {actual_name}, or other weights",
        )
    return WeightsError(
        f"The weights file does not belong to {model_name}, nor to another model of stoker's.",
        location=path,
        cause=f"names of its tensors: {', '.join(list(weights.tensors)[:3])} …",
        choices=["torchvision's detectors that `stoker models` lists", "its classifiers", "a file by stoker"],
    )
