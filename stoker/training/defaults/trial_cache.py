"""Remembers the batch size that trials on a device found, so that the same command does not repeat them.

The trials themselves are in `auto_batch.py`. On a CPU without `--auto-batch` there are none: memory is counted, in a
tenth of a second.
"""

import functools
import os
from hashlib import blake2b
from pathlib import Path

import msgspec
import torch

from stoker.config.settings import Config
from stoker.data.index import Index
from stoker.data.loading.loader import compute_max_boxes
from stoker.hardware.device import Device
from stoker.storage.local_files import cache_folder, write_atomic
from stoker.training.cluster import ONE_DEVICE, Devices
from stoker.training.defaults import auto_batch

PACKAGE = Path(__file__).resolve().parents[2]
MEMORY_TOLERANCE = 0.05
"""Trials are repeated if the free memory differs by more than this fraction."""
WITHOUT_EFFECT = frozenset(
    {"data", "format", "classes", "val_fraction", "allow_outside", "seed", "max_duration", "workers",
     "worker_processes", "cache", "eval_every", "patience", "checkpoint_every", "price_per_device_hour",
     "max_bad_fraction", "max_bad_boxes", "sync", "train", "val", "splits", "split_method", "shuffle_buffer"}
)  # fmt: skip
"""Settings that a trial does not depend on."""


class _Found(msgspec.Struct):
    free_bytes: int
    batch_size: int
    micro_batches: int
    reason: str


def choose_batch_size(
    config: Config,
    index: Index,
    device: Device,
    *,
    recipe_batch_size: int,
    num_images: int,
    devices: Devices = ONE_DEVICE,
) -> tuple[int, int, str]:
    """`auto_batch.choose_batch_size`, or what it found before: with these settings, device and versions, numbers of
    images, classes and boxes, and about as much free memory."""
    choose = functools.partial(
        auto_batch.choose_batch_size,
        config, index, device, recipe_batch_size=recipe_batch_size, num_images=num_images, devices=devices,
    )  # fmt: skip
    if device.is_cpu and not config.run.auto_batch:
        return choose()
    free_bytes = device.memory().free
    sizes = [recipe_batch_size, num_images, len(index.class_names), devices.count, devices.on_host]
    key = _key(config, index, device, sizes)
    path = cache_folder() / "batch-sizes" / f"{key}.json"
    found = _read(path)
    if found is not None and abs(free_bytes / found.free_bytes - 1) <= MEMORY_TOLERANCE:
        return found.batch_size, found.micro_batches, f"{found.reason}; found by an earlier run"
    batch_size, micro_batches, reason = choose()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, msgspec.json.encode(_Found(free_bytes, batch_size, micro_batches, reason)))
    return batch_size, micro_batches, reason


def _read(path: Path) -> _Found | None:
    """None if there is no file, or a damaged one: the trials will replace it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Found)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _key(config: Config, index: Index, device: Device, counts: list[int]) -> str:
    """Of everything else that the trials depend on; stoker's version is the time of its newest file."""
    facts = [
        {name: value for name, value in sorted(config.set_fields().items()) if name not in WITHOUT_EFFECT},
        counts,
        compute_max_boxes(index, index.image_indices("train"), mosaic=config.data.mosaic),
        [device.kind, device.name, device.memory().total, torch.get_num_threads()],
        [torch.__version__, torch.version.cuda, os.environ.get("PYTORCH_CUDA_ALLOC_CONF")],
        max(file.stat().st_mtime_ns for file in PACKAGE.rglob("*.py")),
    ]
    return blake2b(repr(facts).encode(), digest_size=16).hexdigest()
