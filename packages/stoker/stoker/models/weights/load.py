"""Loads weights into a model, and reports which layers were loaded and which stay random.

Supported are state_dicts of torchvision's detectors that are in MODELS (also with its older names), of torchvision's
classifiers with the same backbones, of other publishers' detectors whose family has a `convert` (`table.Family`), and
stoker's own files, as .pth/.pt (bare or under "model") or .safetensors. A file is recognized by the names and shapes of
its tensors. `hub.py` finds files; `model_file.py` loads a whole model that stoker saved.

The class head of a file is converted to the user's classes: those of a name that it has, the others stay random.
`detector.ClassHeadSpec` describes the channels of such a layer. Files by stoker have one channel per class, after a
background channel if the model has one. Files by torchvision always have a background channel; in its RetinaNet and
FCOS, which have sigmoids, it is unused. Others have a channel per class: those from COCO 80, or 91 by category id.
"""

import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import safe_open
from torch import Tensor
from torch.overrides import TorchFunctionMode

from stoker.config.architectures import PRETRAINED_NAMES
from stoker.config.settings import ModelSettings
from stoker.knowledge import read_toml
from stoker.models.detector import ClassHeadSpec, Detector
from stoker.models.table import FAMILIES, MODELS, build, get_architecture
from stoker.models.weights.hub import fetch_weights, local_path, weights_of_run
from stoker_watch import regular_files
from stoker_watch.errors import WeightsError, make_error, nearest

TORCH_MAGIC = (b"PK", b"\x80")
"""How files of torch.save() begin: zip archives, and pickles of torch before 1.6."""
MIN_MATCH_FRACTION = 0.9
"""Fraction of tensors of model and file that must have equal names and shapes for the file to be recognized. Below 1,
so that the error for an incomplete file can name the missing tensor."""


class WeightsFile(NamedTuple):
    tensors: dict[str, Tensor]
    """By the file's own names, without prefixes of wrappers."""
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
    return _detect_model(read_weights(local_path(str(path))).tensors)


def check_pretrained(settings: ModelSettings) -> None:
    """Raises WeightsError if `settings.weights` are pretrained weights that do not exist for the model."""
    arch, choice = get_architecture(settings.model), settings.weights
    if choice in PRETRAINED_NAMES and choice not in arch.urls:
        models_with_it = [name for name, other in MODELS.items() if choice in other.urls]
        what, fix = f"There are no {choice} weights for {settings.model}.", f"--model with {choice} weights: "
        raise WeightsError(what, choices=[*arch.urls, "none", "FILE"], fix=fix + ", ".join(models_with_it))


def load_weights(model: Detector, settings: ModelSettings, *, class_names: Sequence[str]) -> list[str]:
    """Loads `settings.weights` (a name, none or a file) into `model`, which was built from `settings`.

    Returns sentences: what was loaded from where, what was replaced or left random. Raises WeightsError if the weights
    cannot be downloaded or read, or belong to another architecture; the model is unchanged then.
    """
    choice = settings.weights
    if choice == "none":
        return ["none: every layer starts with random values"]
    check_pretrained(settings)
    arch = get_architecture(settings.model)
    path, source = fetch_weights(arch.urls[choice]) if choice in arch.urls else (local_path(choice), "")
    weights = read_weights(path, choices=(*arch.urls, "none"))
    matched = _match_weights(weights.tensors, model, arch.family)
    if matched.match_fraction < MIN_MATCH_FRACTION:
        actual_name = _detect_model(weights.tensors)
        if actual_name is not None:
            message = f"The weights file belongs to {actual_name}, not to {settings.model}."
            raise WeightsError(message, location=path, fix=f"--model {actual_name}, or other weights")
        what = f"The weights file does not belong to {settings.model}, nor to another model of stoker's."
        cause = f"names of its tensors: {', '.join(list(weights.tensors)[:3])} …"
        choices = ["torchvision's detectors that `stoker models` lists", "its classifiers", "a file by stoker"]
        raise WeightsError(what, location=path, cause=cause, choices=choices)
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
        file_classes = weights.class_names
        first = tensors.get(f"{model.class_heads()[0].name}.weight")
        if choice in arch.urls and choice.endswith("coco") and first is not None and len(first) == len(COCO_CLASSES):
            file_classes = COCO_CLASSES
        tensors, sentence = fit_class_head(tensors, model, file_classes, class_names)
        sentences = [f"backbone, neck and heads from {origin}", sentence]
    else:
        sentences = [f"backbone from {origin}", "neck and heads are random"]
    _check_fits(model, tensors, path, is_detector=matched.is_detector)
    model.load_state_dict(dict(tensors), strict=False)
    return sentences


def read_weights(path: Path, *, choices: Sequence[str] = (*PRETRAINED_NAMES, "none")) -> WeightsFile:
    """The weights in a file. Raises WeightsError if it is missing, damaged or has other content; choices: the values
    that the caller accepts instead of a file, for the message."""
    if path.is_dir():
        path = weights_of_run(path)
    if not path.is_file():
        files = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        closest = nearest(str(path), choices) or nearest(path.name, files)
        what = "The weights file does not exist" + (f"; did you mean {closest}?" if closest else ".")
        raise WeightsError(what, location=path, choices=(*choices, "FILE (.pth, .pt, .safetensors)"))
    header: dict[str, str] = {}
    try:
        if path.suffix == ".safetensors":
            with regular_files.open_file(path), safe_open(path, "pt") as file:
                header = file.metadata() or {}
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        else:
            # Files of torch before 1.6 are not zip archives and cannot be memory-mapped; torchvision still has some.
            with regular_files.open_torch_file(path) as opened:  # checked; mapping it needs the path
                if not opened.read(2).startswith(TORCH_MAGIC):
                    raise ValueError("it is no file of torch.save(), by its first bytes")
                state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # damaged files raise many types
        cause = getattr(error, "strerror", None) or str(error).partition("\n")[0] or type(error).__name__
        raise make_error(WeightsError, "weights-not-readable", path, cause=cause) from error
    tensors = _without_wrappers(_state_dict(state, path))
    try:
        names = msgspec.json.decode(header["stoker"], type=_Metadata).class_names if "stoker" in header else None
    except (msgspec.DecodeError, RecursionError) as error:
        raise WeightsError("The metadata of the weights cannot be read.", location=path, cause=str(error)) from error
    return WeightsFile(tensors, names)


class _Metadata(msgspec.Struct):
    """The part of `model_file.ModelMetadata` that is needed here."""

    class_names: tuple[str, ...]


def _state_dict(state: object, path: Path) -> dict[str, Tensor]:
    for key in ("model", "state_dict"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not state or not all(isinstance(v, Tensor) for v in state.values()):
        raise make_error(WeightsError, "no-state-dict", path)
    return state


def _without_wrappers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the prefix of DataParallel, and without BatchNorm's counts of batches, which are not used."""
    cleaned = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in cleaned.items() if not name.endswith("num_batches_tracked")}


_CLASSIFIER = re.compile(r"^(fc|classifier(\.\d+)*)\.(weight|bias)$")


def _match_weights(tensors: Mapping[str, Tensor], model: Detector, family: str) -> WeightsMatch:
    """The best mapping of a file's tensors to the model's names, and the fraction that matches."""
    convert = FAMILIES[family].convert
    own_shapes = {name: tensor.shape for name, tensor in _without_wrappers(model.state_dict()).items()}
    head_by_tensor = class_tensors(model.class_heads())
    backbone_tensors = {
        model.backbone_key(name): tensor for name, tensor in tensors.items() if not _CLASSIFIER.match(name)
    }
    backbone_names = {name for name in own_shapes if name.startswith(model.backbone_prefixes)}

    def matched_fraction(tensors_by_name: Mapping[str, Tensor], names: set[str]) -> float:
        num_same = sum(name in tensors_by_name and tensors_by_name[name].shape == own_shapes[name] for name in names)
        return num_same / max(1, len(names | (tensors_by_name.keys() - head_by_tensor.keys())))

    own_names = own_shapes.keys() - head_by_tensor.keys()
    matches = [
        WeightsMatch(matched_fraction(variant, own_names), dict(variant), True)
        for variant in (tensors, *([] if convert is None else [convert(tensors, model)]))
    ]
    matches.append(WeightsMatch(matched_fraction(backbone_tensors, backbone_names), backbone_tensors, False))
    return max(matches, key=lambda candidate: candidate.match_fraction)


def _detect_model(tensors: Mapping[str, Tensor]) -> str | None:
    """The architecture in MODELS of a file's tensors, or None."""
    best_fraction, best_name = MIN_MATCH_FRACTION, None
    for name, arch in MODELS.items():
        options_from_weights = FAMILIES[arch.family].options_from_weights
        options = {} if options_from_weights is None else options_from_weights(tensors)
        settings = {"backbone_norm": "bn", "trainable_backbone_layers": 5, **arch.defaults, **options, "model": name}
        with shapes_only():
            model = build(ModelSettings(**settings), 1)
        match_fraction = _match_weights(tensors, model, arch.family).match_fraction
        if match_fraction == 1:
            return name
        if match_fraction > best_fraction or (match_fraction == best_fraction and best_name is None):
            best_fraction, best_name = match_fraction, name
    return best_name


ZERO_EPS_WEIGHTS = frozenset({"fasterrcnn_resnet50_fpn_coco-258fb6c6.pth", "retinanet_resnet50_fpn_coco-eeacb38b.pth"})
"""Files by torchvision whose norms have an epsilon of 0 (`overwrite_eps` in its builders)."""


def _convert_epsilon(epsilon: float, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of norms with another epsilon for our 1e-5, by the scale: weight · √((var + 1e-5) / (var + epsilon))."""
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
            what = f"The tensor {name} has another shape in the weights file than in the model."
            cause = f"{list(tensor.shape)} in the file, {list(own_state[name].shape)} in the model"
            of_backbone = name.startswith(model.backbone_prefixes)
            fix = None if of_backbone else "the --anchor-scales and --aspect-ratios that the file was trained with"
            raise WeightsError(what, location=path, cause=cause, fix=fix)


COCO_CHANNELS: tuple[str, ...] = tuple(read_toml("models.toml")["coco_channels"])
"""Classes of the channels of torchvision's COCO weights: by category id, with ids that have no category."""
COCO_CLASSES = tuple(name for name in COCO_CHANNELS[1:] if name != "N/A")
"""COCO's 80 classes, in the order of their category ids."""


def class_tensors(class_heads: Iterable[ClassHeadSpec]) -> dict[str, ClassHeadSpec]:
    """Name of each tensor of the class heads → its layer."""
    return {
        f"{head.name}.{kind}": head
        for head in class_heads
        for kind in (("weight", "bias") if head.has_bias else ("weight",))
    }


def fit_class_head(
    tensors: Mapping[str, Tensor], model: Detector, file_classes: Sequence[str] | None, class_names: Sequence[str]
) -> tuple[dict[str, Tensor], str]:
    """(`tensors` with class heads for `class_names`, or without them; a sentence about the result).

    file_classes: class names in the file, None if it has none: with 91 channels then COCO's. A class that is one of the
    file's keeps its channels, the others keep the random ones of `model`; all are kept if the file has no names and as
    many classes.
    """
    head_by_tensor, own = class_tensors(model.class_heads()), model.state_dict()
    first = model.class_heads()[0]
    sizes = {name: (*tensors[name].shape, 0)[0] if name in tensors else 0 for name in head_by_tensor}
    channels = sizes[f"{first.name}.weight"] // (first.num_anchors * first.outputs_per_class)
    matched, reason = _match_channels(channels, file_classes, class_names, has_background=first.has_background)
    if any(
        sizes[name] != head.num_anchors * channels * head.outputs_per_class for name, head in head_by_tensor.items()
    ):
        matched, reason = {}, "its layers have other numbers of channels than those of the model"
    fitted = {name: tensor for name, tensor in tensors.items() if name not in head_by_tensor}
    num_channels = len(class_names) + first.has_background
    if not matched:
        return fitted, f"class head replaced: {channels} -> {num_channels} channels, random; {reason}"
    for name, head in head_by_tensor.items():
        theirs, ours = (
            of_all.unflatten(0, (head.num_anchors, -1, head.outputs_per_class)) for of_all in (tensors[name], own[name])
        )
        rows = theirs[:, [*matched.values()]].to(ours.dtype)
        fitted[name] = ours.index_copy(1, torch.tensor([*matched]), rows).flatten(0, 2)
    return fitted, f"class head kept, {channels} -> {num_channels} channels; {reason}"


def _match_channels(
    channels: int, file_classes: Sequence[str] | None, class_names: Sequence[str], *, has_background: bool
) -> tuple[dict[int, int], str]:
    """(channel of the model → channel of the file that it is, for all that the file has; the reason)."""
    if file_classes is None and channels == len(COCO_CHANNELS):
        file_classes = COCO_CHANNELS
    elif file_classes is not None and has_background:
        file_classes = ["", *file_classes]  # a file by stoker has no name for the background
    background = {0: 0} if has_background else {}
    if file_classes is None:
        if channels in (len(class_names) + 1, len(class_names) + has_background):
            skipped = channels - len(class_names)
            matched = {number + has_background: number + skipped for number in range(len(class_names))}
            return background | matched, "the file has as many classes, without names"
        return {}, "the file has no class names and another number of classes"
    channel_by_name = {name.casefold(): channel for channel, name in enumerate(file_classes)}
    found = [channel_by_name.get(name.casefold()) for name in class_names]
    matched = {number: channel for number, channel in enumerate(found, has_background) if channel is not None}
    missing = [name for name, channel in zip(class_names, found, strict=True) if channel is None]
    listed = ", ".join(missing[:3]) + (" …" if len(missing) > 3 else "")
    if not matched:
        return {}, f"not among the file's classes: {listed}"
    if missing:
        return background | matched, f"{len(matched)} of {len(found)} classes matched by name, random: {listed}"
    return background | matched, "every class is one of the file's, matched by name"


class _NoValues(TorchFunctionMode):
    """Leaves out what fills or changes tensors in place: `normal_`, `zero_`, `copy_`. On meta tensors it would change
    nothing, and torch imports its compiler for it, which takes more than a second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name: str = getattr(func, "__name__", "")
        is_in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")  # torch.nn.init passes it by name
        if is_in_place and isinstance(target, Tensor) and target.is_meta:
            return target
        return func(*args, **kwargs)


@contextmanager
def shapes_only() -> Iterator[None]:
    """In the block, tensors are made on the meta device. A model must not compute with them when it is built."""
    with torch.device("meta"), _NoValues():
        yield
