"""Fills a model from a file of weights, and says in sentences what it took and what it left random.

Understood are state_dicts of torchvision's detectors that are in MODELS (in its older naming, too), of torchvision's
classifiers on the same bodies, and stoker's own files; as .pth/.pt (bare or under "model") or .safetensors. A file is
recognised by the names and shapes of its tensors. Where files come from is `hub.py`; reading a model of stoker's
back whole is `model_file.py`.
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
from stoker.models.ember.ember import options_of
from stoker.models.table import MODELS, architecture, build
from stoker.models.weights.class_head import fit_class_head, tensors_of
from stoker.models.weights.hub import fetch, local

NAMED = ("coco", "imagenet")
"""Weights that `--weights` names, whoever publishes them; `none` and files beside them."""
ALIKE = 0.9
"""Share of the tensors of a model and a file that must have the same names and shapes for the one to be of the other:
a file that lacks a tensor is recognised, and told what it lacks."""


class Weights(NamedTuple):
    """What a file holds."""

    tensors: dict[str, Tensor]
    """Under the file's own names, without what wrappers add."""
    model: str | None
    """The row of MODELS that the file says it belongs to; None when it says none."""
    class_names: tuple[str, ...] | None
    """The classes of its class head, where the file says them."""


class Fit(NamedTuple):
    """A file's tensors seen as those of a model."""

    alike: float
    """Share of all names, the model's and the file's, under which both have tensors of one shape."""
    tensors: dict[str, Tensor]
    """Under the model's names."""
    is_detector: bool
    """False: of a classifier, for the model's body."""


def architecture_of(path: str | Path) -> str | None:
    """The name in MODELS of the architecture that a file's weights belong to (a classifier's: the first that has it as
    body); None when there is none. Raises WeightsError when the file is missing or cannot be read."""
    return _recognise(read(local(str(path))))


def load_weights(model: Detector, settings: ModelSettings, *, class_names: Sequence[str]) -> list[str]:
    """Fills `model`, built from `settings`, as `settings.weights` says: coco, imagenet, none or a file.

    Returns sentences: what was loaded and from where, what was replaced or left random. Raises WeightsError when the
    weights cannot be had or read, or belong to another architecture, before anything of the model is changed.
    """
    choice = settings.weights
    if choice == "none":
        return ["none, every layer starts from random values"]
    row = architecture(settings.model)
    if choice in NAMED and choice not in row.urls:
        with_it = [name for name, other in MODELS.items() if choice in other.urls]
        raise WeightsError(
            f"There are no {choice} weights for {settings.model}.",
            choices=[*row.urls, "none", "FILE"],
            fix=f"--model with {choice} weights: {', '.join(with_it)}",
        )
    path, where = fetch(row.urls[choice]) if choice in row.urls else (local(choice), "")
    weights = read(path, choices=(*row.urls, "none"))
    fit = _fit(weights.tensors, model)
    if fit.alike < ALIKE or weights.model not in (None, settings.model):
        raise _wrong_architecture(path, weights, settings.model)
    tensors, sentences = fit.tensors, []
    if path.name in TRAINED_WITHOUT_EPSILON:
        tensors = _from_epsilon(0.0, tensors)
    elif row.classifier_epsilon is not None and not fit.is_detector:
        tensors = _from_epsilon(row.classifier_epsilon, tensors)
    origin = f"{path.name}" + (f" ({where})" if where else "")
    if fit.is_detector:
        tensors, sentence = fit_class_head(tensors, model.class_layers(), weights.class_names, class_names)
        sentences = [f"backbone, neck and heads from {origin}", sentence]
    else:
        sentences = [f"backbone from {origin}", "neck and heads are random"]
    _fill(model, tensors, path, is_detector=fit.is_detector)
    return sentences


def read(path: Path, *, choices: Sequence[str] = (*NAMED, "none")) -> Weights:
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
    tensors = _without_wrappers(_state_dict(content, path))
    names = msgspec.json.decode(header["stoker"], type=_Card).class_names if "stoker" in header else None
    said = header.get("model")
    return Weights(tensors, said if said in MODELS else None, names)


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


def _without_wrappers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without DataParallel's prefix, and without BatchNorm's count of batches, which nothing reads."""
    cleaned = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in cleaned.items() if not name.endswith("num_batches_tracked")}


# Names of torchvision before 0.13.
_OLD_FPN = re.compile(r"^(backbone\.fpn\.(?:inner|layer)_blocks\.\d+)\.(weight|bias)$")
_OLD_PROPOSALS = re.compile(r"^(rpn\.head\.conv)\.(weight|bias)$")
_OLD_TOWER = re.compile(r"^(head\.\w+\.conv)\.(\d+)\.(weight|bias)$")
_CLASSIFIER = re.compile(r"^(fc|classifier(\.\d+)*)\.(weight|bias)$")


def _newer_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    towers = {name: old for name in tensors if (old := _OLD_TOWER.match(name))}
    # An old tower was convolution, ReLU, convolution, ReLU … Where odd numbers have tensors they are FCOS's norms, and
    # its towers are named so to this day.
    has_norms = any(int(old[2]) % 2 for old in towers.values())
    newer = {}
    for name, tensor in tensors.items():
        if (old := towers.get(name)) and not has_norms:
            newer[f"{old[1]}.{int(old[2]) // 2}.0.{old[3]}"] = tensor
        else:
            newer[_OLD_PROPOSALS.sub(r"\1.0.0.\2", _OLD_FPN.sub(r"\1.0.\2", name))] = tensor
    return newer


def _fit(tensors: Mapping[str, Tensor], model: Detector) -> Fit:
    """The best way to see a file's tensors as the model's; `Fit.alike` says how good it is."""
    own = {name: tensor.shape for name, tensor in _without_wrappers(model.state_dict()).items()}
    of_classes = tensors_of(model.class_layers())
    body = {model.body_name(name): tensor for name, tensor in tensors.items() if not _CLASSIFIER.match(name)}
    body_names = {name for name in own if name.startswith(model.body)}

    def alike(some: Mapping[str, Tensor], wanted: set[str]) -> float:
        same = sum(name in some and some[name].shape == own[name] for name in wanted)
        return same / max(1, len(wanted | (some.keys() - of_classes.keys())))

    seen = (tensors, _newer_names(tensors))
    fits = [Fit(alike(some, own.keys() - of_classes.keys()), dict(some), True) for some in seen]
    fits.append(Fit(alike(body, body_names), body, False))
    return max(fits, key=lambda fit: fit.alike)


def _recognise(weights: Weights) -> str | None:
    """The row of MODELS that a file belongs to."""
    if weights.model is not None:
        return weights.model
    best, found = ALIKE, None
    of_ember = options_of(weights.tensors)
    for name, row in MODELS.items():
        options = {key: value for key, value in of_ember.items() if key in row.defaults}
        settings = {"norm": "train", "trainable_stages": 5, **row.defaults, **options, "model": name}
        with torch.device("meta"):  # shapes only
            model = build(ModelSettings(**settings), 1)
        alike = _fit(weights.tensors, model).alike
        if alike == 1:
            return name
        if alike > best or (alike == best and found is None):
            best, found = alike, name
    return found


TRAINED_WITHOUT_EPSILON = frozenset(
    {"fasterrcnn_resnet50_fpn_coco-258fb6c6.pth", "retinanet_resnet50_fpn_coco-eeacb38b.pth"}
)
"""Files by torchvision whose norms had an epsilon of 0 (`overwrite_eps` in its builders)."""


def _from_epsilon(epsilon: float, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """For norms whose epsilon was another than our 1e-5: the scale makes up for it, weight · √((var + 1e-5) / (var +
    epsilon)), so that nothing outside the file has to remember it."""
    result = dict(tensors)
    for name in tensors:
        if name.endswith(".running_var"):
            scale, variance = name.removesuffix("running_var") + "weight", tensors[name].double()
            result[scale] = (tensors[scale] * ((variance + 1e-5) / (variance + epsilon)).sqrt()).float()
    return result


def _fill(model: Detector, tensors: Mapping[str, Tensor], path: Path, *, is_detector: bool) -> None:
    """Copies the tensors into the model once all of them are known to fit it."""
    own = model.state_dict()
    of_classes = tensors_of(model.class_layers())
    wanted = [name for name in own if is_detector or name.startswith(model.body)]
    optional = {name for name in wanted if name in of_classes or name.endswith("num_batches_tracked")}
    missing = [name for name in wanted if name not in tensors and name not in optional]
    unknown = [name for name in tensors if name not in own]
    for what, names in (("lacks", missing), ("has an unknown", unknown)):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise WeightsError(f"The weights file {what} tensor {names[0]}{more}.", place=path)
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            raise WeightsError(
                f"The tensor {name} has another shape in the weights file than in the model.",
                place=path,
                cause=f"{list(tensor.shape)} in the file, {list(own[name].shape)} in the model",
                fix=None
                if name.startswith(model.body)
                else "the --anchor-scales and --anchor-ratios that the file was trained with",
            )
    model.load_state_dict(dict(tensors), strict=False)


def _wrong_architecture(path: Path, weights: Weights, wanted: str) -> WeightsError:
    found = _recognise(weights)
    if found is not None:
        return WeightsError(
            f"The weights file belongs to {found}, not to {wanted}.",
            place=path,
            fix=f"--model {found}, or other weights",
        )
    return WeightsError(
        f"The weights file does not belong to {wanted}, nor to another model of stoker's.",
        place=path,
        cause=f"its tensors are called {', '.join(list(weights.tensors)[:3])} …",
        choices=["torchvision's detectors that `stoker models` lists", "its classifiers", "a file by stoker"],
    )
