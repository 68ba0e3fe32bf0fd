"""Shared by tests of the loader: an index in memory, loaders of it, and a device whose copies complete late."""

import itertools
import threading
from pathlib import Path

import cv2
import numpy as np
import torch

from stoker.data.batch import Batch
from stoker.data.loading import samples
from stoker.data.loading.loader import BUFFERS_IN_USE, PREFETCH_DEPTH, Loader, LoaderSpec, compute_max_boxes
from stoker.hardware.device import Device

CPU = Device(torch.device("cpu"))
IMAGE_SIZE = (32, 64)
PADDING = torch.tensor([samples.PAD_COLOR], dtype=torch.uint8)


class InMemoryIndex:
    """An index of small image files, with the attributes of `Index` that the loader uses."""

    def __init__(self, root: Path, count: int) -> None:
        self.root, self.source = root, str(root)
        rng = np.random.default_rng(count)
        self.original_size = rng.integers(8, 60, (count, 2)).astype(np.int32)
        self.offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 4, count))])
        corners = np.sort(rng.random((self.offsets[-1], 2, 2)), axis=1)
        wh = np.repeat(self.original_size[:, ::-1], np.diff(self.offsets), axis=0)[:, None]
        self.boxes = (corners * wh).reshape(-1, 4).astype(np.float32)
        self.labels = rng.integers(0, 5, self.offsets[-1]).astype(np.int32)
        self.crowd = np.zeros(self.offsets[-1], bool)
        for image_index, (height, width) in enumerate(self.original_size):
            pixels = rng.integers(0, 255, (height, width, 3), np.uint8)
            assert cv2.imwrite(str(self.path(image_index)), pixels)

    def read(self, image_index: int) -> bytes:
        return self.path(image_index).read_bytes()

    def remote_object(self, _image_index: int) -> None:
        return None

    def display_source(self, image_index: int) -> str:
        return str(self.path(image_index))

    def path_text(self, image_index: int) -> str:
        return str(self.path(image_index))

    def path(self, image_index: int) -> Path:
        return self.root / f"{image_index:03}.{'jpg' if image_index % 2 else 'png'}"


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("stoker-loader")]


def make(index, *, image_indices=None, cache=None, on_quarantine=None, on_tuned=None, **changes):
    """A loader; changes: fields of its spec."""
    if image_indices is None:
        image_indices = np.arange(len(index.original_size))
    spec = {
        "device": CPU,
        "batch_size": 4,
        "image_size": IMAGE_SIZE,
        "resize": "letterbox",
        "scale_jitter_prob": 0.5,
        "scale_range": (0.5, 2.0),
        "max_boxes": compute_max_boxes(index, image_indices),
        "seed": 3,
        "workers": 2,
    }
    return Loader(
        index,
        image_indices,
        LoaderSpec(**spec | changes),
        cache=cache,
        on_quarantine=on_quarantine,
        on_tuned=on_tuned,
    )


def take(loader, count):
    """Copies of the next batches (on a CPU they alias the buffers)."""
    return [Batch(*(tensor.clone() for tensor in batch)) for batch in itertools.islice(loader, count)]


def wait_until_full(loader, num_images=4 * (PREFETCH_DEPTH + BUFFERS_IN_USE)):
    """Until the workers have filled every place of the initial buffers."""
    while loader.stats().decode.num_images < num_images:
        assert loader_threads()


def stream(index, count, **changes):
    with make(index, **changes) as loader:
        return take(loader, count)


def assert_same(actual, expected):
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        for name, x, y in zip(Batch._fields, a, b, strict=True):
            assert torch.equal(x, y), name


def image_indices_of(batches):
    return torch.cat([batch.image_index for batch in batches]).tolist()


class LateDevice:
    """A device whose copies complete late: the host memory is read when a copy ends, not when it starts.

    `polls`: how often `done` returns false before a copy ends by itself; None: only a host wait, or `finish`, ends it.
    """

    is_cpu = False

    def __init__(self, polls):
        self.polls, self.copies, self.waits, self.blocked = polls, [], 0, []

    def empty_host(self, shape, dtype):
        return torch.zeros(tuple(shape), dtype=dtype)

    def make_stream(self):
        return self

    def to_device(self, tensors):
        copy = LateCopy(self, list(tensors))
        self.copies.append(copy)
        return copy.targets, copy

    def finish(self):
        for copy in self.copies:
            copy.end()


class LateCopy:
    def __init__(self, device, sources):
        self.device, self.sources, self.ended, self.num_polls = device, sources, False, 0
        self.targets = [torch.full_like(tensor, 1) for tensor in sources]

    def end(self):
        if not self.ended:
            for source, target in zip(self.sources, self.targets, strict=True):
                target.copy_(source)
            self.ended = True

    def done(self):
        self.num_polls += 1
        if self.device.polls is not None and self.num_polls > self.device.polls:
            self.end()
        return self.ended

    def synchronize(self):
        self.device.waits += 1
        self.end()

    def block_main_stream(self):
        self.device.blocked.append(self)
