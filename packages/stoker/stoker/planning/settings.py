"""Refuses settings that `stoker train` would refuse at another place: what can be said without the data, the devices
and the network there. Each check is one of training or of its models, with its message. What is derived from the data
is checked there only."""

import torch

from stoker.config.architectures import PRETRAINED_NAMES
from stoker.config.settings import Config
from stoker.hardware.device import Device
from stoker.hardware.xla import XLA_KINDS
from stoker.models import build, get_architecture
from stoker.models.table import check_image_size, check_settings
from stoker.models.weights.hub import local_path
from stoker.models.weights.load import check_pretrained, read_weights, shapes_only
from stoker.training.cluster import Devices
from stoker.training.defaults.checks import check_micro_batches, check_user_settings
from stoker_watch.errors import PreflightError
from stoker_watch.storage.uri import is_uri


def refuse_settings(config: Config, devices: Devices, *, sees_files: bool) -> None:
    """config: what the user set, each value checked (`check_config`); devices: those that will train; sees_files:
    they see the files of this machine. Raises ConfigError, PreflightError."""
    run, weights = config.run, config.model.weights
    check_user_settings(config, None, _device_called(run.device or "cuda"), devices)
    if config.model.model is not None:
        _check_model(config)
    is_file = weights not in (None, *PRETRAINED_NAMES, "none") and not is_uri(weights)
    if sees_files and is_file and not (path := local_path(weights)).exists():
        read_weights(path)  # raises, and names what is there
    if run.batch_size is not None and config.optim.grad_accum_steps is not None:
        check_micro_batches(config, devices.count)


def _device_called(name: str) -> Device:
    """The device of this name, which need not be here. Raises PreflightError."""
    try:
        return Device(torch.device("xla" if name.partition(":")[0] in XLA_KINDS else name))
    except RuntimeError as error:
        cause, choices = str(error).splitlines()[0], ("cpu", "cuda", "cuda:1", "tpu")
        raise PreflightError(f"There is no device called {name!r}.", cause=cause, choices=choices) from error


def _check_model(config: Config) -> None:
    defaults = get_architecture(config.model.model).defaults
    check_settings(config.model)
    check_pretrained(config.model)
    check_image_size(config)
    config = config.replace(**{name: value for name, value in defaults.items() if getattr(config.model, name) is None})
    if config.model.anchor_sizes is not None:
        with shapes_only():
            build(config.model, 1)
