"""Prints the trials of `--auto-batch` as JSON: peak memory and time per image of each batch size. A program:

    python -m stoker.training.batch_trials DATA --model retinanet_resnet50_fpn --image-size 800 800
    python -m stoker.training.batch_trials --config runs/mine/config.toml --batch-size 16

The trials are in `defaults/auto_batch.py` and `defaults/dry_run.py`.
"""

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter

from stoker.config.settings import Config, from_run
from stoker.data.augment.device import MOSAIC_GROUP_SIZE
from stoker.data.index import Index, open_index_of
from stoker.errors import StokerError
from stoker.hardware.device import Device, select_device
from stoker.training.defaults.auto_batch import make_dry_run, pick_fastest, run_trials
from stoker.training.defaults.derive import derive


def as_json(user_config: Config, index: Index, device: Device) -> dict[str, Any]:
    """What the program prints: every batch size that was tried, or the one that `user_config` sets."""
    micro_batches = user_config.optim.grad_accum_steps or 1
    batch_size = user_config.run.batch_size or MOSAIC_GROUP_SIZE * micro_batches
    config, _ = derive(user_config.replace(batch_size=batch_size, auto_batch=False, jpeg_decoder="cpu"), index, device)
    dry_run = make_dry_run(config, index, device)
    only_size = None if user_config.run.batch_size is None else user_config.run.batch_size // micro_batches
    trials, end = run_trials(dry_run, len(index.image_indices("train")), only_size)
    return {
        "device": device.name,
        "budget_bytes": dry_run.budget_bytes,
        "model": config.model.model,
        "image_size": config.data.image_size,
        "precision": config.run.precision,
        "num_classes": dry_run.num_classes,
        "max_boxes": dry_run.max_boxes,
        "grad_accum_steps": micro_batches,
        "trials": trials,
        "end": end,
        "fastest_batch": pick_fastest(trials).micro_batch_size * micro_batches if trials else None,
    }


def program(
    data: str | None = None,
    /,
    *,
    config_toml: Annotated[Path | None, Parameter(name="--config")] = None,
    config: Annotated[Config, Parameter(name="*")] = Config(),  # noqa: B008  # frozen
) -> None:
    """Tries batch sizes on the device and prints JSON: peak bytes and seconds per image of each.

    Parameters
    ----------
    data
        Data set, as for `stoker train`.
    config_toml
        A run's config.toml: its settings, unless other flags set them.
    """
    stored = Config() if config_toml is None else from_run(config_toml)[0].replace(batch_size=None)
    overrides = config.set_fields() if data is None else {**config.set_fields(), "data": data}
    user_config = stored.replace(**overrides)
    device = select_device(user_config.run.device)
    print(msgspec.json.encode(as_json(user_config, open_index_of(user_config.data), device)).decode())


if __name__ == "__main__":
    app = App(name="python -m stoker.training.batch_trials", default_parameter=Parameter(negative=()))
    app.default(program)
    try:
        app()
    except StokerError as error:
        print(f"stoker: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
