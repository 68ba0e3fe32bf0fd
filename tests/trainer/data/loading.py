"""Shared by tests of the loader: an index in memory, loaders of it, and a device whose copies complete late."""

import itertools
import threading

import numpy as np
import torch

from stoker.data.batch import PAD_COLOR, Batch
from stoker.data.loading.loader import BUFFERS_IN_USE, Loader, LoaderSpec, compute_max_boxes
from stoker.hardware.device import Device
from tests.trainer.data.memory_index import InMemoryIndex as InMemoryIndex

CPU = Device(torch.device("cpu"))
default_processes = None
"""Worker processes of all loaders that `make` makes; None: threads (`test_loader_processes.py`)."""
IMAGE_SIZE = (32, 64)
PADDING = torch.tensor([PAD_COLOR], dtype=torch.uint8)


PREFETCH_DEPTH = 3


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("stoker-loader")]


def make(index, *, image_indices=None, cache=None, processes=None, on_quarantine=None, on_tuned=None, **changes):
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
        "prefetch_depth": PREFETCH_DEPTH,
    }
    return Loader(
        index,
        image_indices,
        LoaderSpec(**spec | changes),
        cache=cache,
        processes=processes or default_processes,
        on_quarantine=on_quarantine,
        on_tuned=on_tuned,
    )


def take(loader, count):
    """Copies of the next batches (on a CPU they alias the buffers)."""
    return [Batch(*(tensor.clone() for tensor in batch)) for batch in itertools.islice(loader, count)]


def wait_until_full(loader, num_images=4 * (PREFETCH_DEPTH + BUFFERS_IN_USE)):
    """Until the workers have filled every place of the initial buffers."""
    while loader.stats().total.num_images < num_images:
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
