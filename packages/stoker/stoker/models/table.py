"""`MODELS`, the architectures of knowledge/models.toml, and `build`. docs/add-a-model.md says how to add one."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from stoker.config.architectures import Architecture, read_architectures
from stoker.config.settings import SECTION_OF, Config, ModelSettings, setting_rows
from stoker.models.detector import Detector
from stoker.models.detr_weights import convert_dfine, convert_rf_detr, convert_torchvision
from stoker.models.dfine import DFine
from stoker.models.ember import Ember, ember_options
from stoker.models.faster_rcnn import FasterRCNN
from stoker.models.fcos import FCOS
from stoker.models.layers.activation_checkpointing import checkpoint_activations
from stoker.models.layers.pointwise import use_onednn_for_pointwise
from stoker.models.layers.winograd import use_winograd_without_avx512
from stoker.models.retinanet import RetinaNet
from stoker.models.rf_detr import RFDETR
from stoker.models.ssd import SSD300, SSDLite, detect_reduced_tail
from stoker_watch.errors import ConfigError, did_you_mean


class Family(NamedTuple):
    """Architectures that the same code builds."""

    build: Callable[..., Detector]
    """(settings, number of classes, **the row's `network`) → detector. No setting that it uses is AUTO."""
    options_from_weights: Callable[[Mapping[str, Tensor]], dict[str, bool]] | None = None
    """Fields of ModelSettings that a file of weights decides, from its tensors by name; None: there are none."""
    convert: Callable[[Mapping[str, Tensor], Detector], dict[str, Tensor]] | None = None
    """(tensors of a file by its publisher's names, model) → tensors by the model's names; those of another layout are
    returned as they are. Only names and shapes are read of the model, which may be on the meta device."""


FAMILIES: dict[str, Family] = {
    "ember": Family(Ember, ember_options),
    "retinanet": Family(RetinaNet, convert=convert_torchvision),
    "fcos": Family(FCOS, convert=convert_torchvision),
    "faster_rcnn": Family(FasterRCNN, convert=convert_torchvision),
    "ssdlite": Family(SSDLite, lambda tensors: {"reduced_tail": detect_reduced_tail(tensors)}),
    "ssd300": Family(SSD300),
    "dfine": Family(DFine, convert=convert_dfine),
    "rf_detr": Family(RFDETR, convert=convert_rf_detr),
}

MODELS = read_architectures()
"""Value of `--model` → architecture."""


def get_architecture(name: str) -> Architecture:
    """The architecture called `name`. Raises ConfigError with the valid names."""
    found = MODELS.get(name)
    if found is None:
        raise ConfigError(did_you_mean(f"There is no model called {name!r}", name, MODELS), choices=MODELS)
    return found


def build(settings: ModelSettings, num_classes: int) -> Detector:
    """The model of `settings` (no field that it uses is AUTO), with random weights, in channels-last memory.

    Raises ConfigError for an unknown name, a setting that the model does not have, a wrong number of anchor sizes.
    """
    arch = get_architecture(settings.model)
    check_settings(settings)
    sizes = arch.defaults.get("anchor_sizes", ())
    if settings.anchor_sizes is not None and len(settings.anchor_sizes) != len(sizes):
        cause = f"{settings.model} needs {len(sizes)}, finest level first"
        fix = f"give {len(sizes)} numbers, as in the default: {' '.join(f'{size:g}' for size in sizes)}"
        raise ConfigError(f"--anchor-sizes has {len(settings.anchor_sizes)} numbers.", cause=cause, fix=fix)
    model = FAMILIES[arch.family].build(settings, num_classes, **arch.network)
    if settings.activation_checkpointing:
        checkpoint_activations(model)
    use_winograd_without_avx512(model)
    use_onednn_for_pointwise(model)
    return model.to(memory_format=torch.channels_last)


def check_image_size(config: Config) -> None:
    """Raises ConfigError for an input size that the config's model does not support. AUTO is accepted."""
    set_fields = config.set_fields()
    if not {"image_size", "model"} <= set_fields.keys():
        return
    image_size, model = config.data.image_size, config.model.model
    divisor = get_architecture(model).size_divisor
    if any(side % divisor for side in image_size):
        what = f"--image-size {image_size[0]} {image_size[1]}: both sides must be multiples of {divisor} for {model}."
        nearest_size = " ".join(f"{max(1, round(side / divisor)) * divisor}" for side in image_size)
        raise ConfigError(what, choices=[nearest_size])


COMMON_FIELDS = frozenset({"model", "weights", "backbone_norm", "trainable_backbone_layers"}) | {
    name for name, row in setting_rows().items() if row.reason and SECTION_OF[name] == "model"
}
"""Settings that all models have: also those of ModelSettings with a default in knowledge/settings.toml."""


def check_settings(settings: ModelSettings) -> None:
    """Raises ConfigError for a setting that is given but that the architecture does not have."""
    fields = sorted(COMMON_FIELDS | get_architecture(settings.model).defaults.keys())
    for field in dataclasses.fields(settings):
        if getattr(settings, field.name) is not None and field.name not in fields:
            what = f"{settings.model} has no --{field.name.replace('_', '-')}."
            fix = "leave it out, or take another --model (`stoker models`)"
            raise ConfigError(what, choices=[name.replace("_", "-") for name in fields], fix=fix)


OPTIONAL_FIELDS = frozenset({"train", "val", "splits"})
"""Settings that a complete config may lack: files that the user may name."""


def unset_fields(config: Config) -> list[str]:
    """Settings that a run of the config's model uses and that are AUTO."""
    used = COMMON_FIELDS | get_architecture(config.model.model).defaults.keys()
    set_fields = config.set_fields()
    return [
        name
        for name, section in SECTION_OF.items()
        if name not in {*set_fields, *OPTIONAL_FIELDS} and (section != "model" or name in used)
    ]
