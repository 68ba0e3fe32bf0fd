"""What tests of the loader share: an index in memory, loaders of it, and a device that copies late."""

import itertools
import threading
from pathlib import Path

import cv2
import numpy as np
import torch

from stoker.data.batch import Batch
from stoker.data.loading import samples
from stoker.data.loading.loader import BUFFERS_IN_USE, PREFETCH_DEPTH, Loader, compute_max_boxes
from stoker.hardware.device import Device

CPU = Device(torch.device("cpu"))
CANVAS = (32, 64)
PADDING = torch.tensor([samples.PAD_COLOR], dtype=torch.uint8)


class Pictures:
    """An index in memory, as docs/structure.md has it, of small pictures that are really there."""

    def __init__(self, root: Path, count: int) -> None:
        self.root, self.source = root, str(root)
        rng = np.random.default_rng(count)
        self.size = rng.integers(8, 60, (count, 2)).astype(np.int32)
        self.image_id = np.arange(count) * 10
        self.offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 4, count))])
        corners = np.sort(rng.random((self.offsets[-1], 2, 2)), axis=1)
        sides = np.repeat(self.size[:, ::-1], np.diff(self.offsets), axis=0)[:, None]
        self.boxes = (corners * sides).reshape(-1, 4).astype(np.float32)
        self.labels = rng.integers(0, 5, self.offsets[-1]).astype(np.int32)
        self.crowd = np.zeros(self.offsets[-1], bool)
        for row, (height, width) in enumerate(self.size):
            assert cv2.imwrite(str(self.path(row)), rng.integers(0, 255, (height, width, 3), np.uint8))

    def read(self, row: int) -> bytes:
        return self.path(row).read_bytes()

    def remote(self, _row: int) -> None:
        return None

    def place(self, row: int) -> str:
        return str(self.path(row))

    def path(self, row: int) -> Path:
        return self.root / f"{row:03}.{'jpg' if row % 2 else 'png'}"


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("stoker-loader")]


def make(index, *, rows=None, **changes):
    rows = np.arange(len(index.size)) if rows is None else rows
    options = {
        "device": CPU, "batch_size": 4, "image_size": CANVAS, "resize": "letterbox", "scale_jitter_prob": 0.5, "scale_range": (0.5, 2.0),
        "boxes": compute_max_boxes(index, rows), "seed": 3, "workers": 2,
    }  # fmt: skip
    return Loader(index, rows, **options | changes)


def take(loader, count):
    """Copies of the next batches (on a CPU they alias the ring)."""
    return [Batch(*(tensor.clone() for tensor in batch)) for batch in itertools.islice(loader, count)]


def wait_until_full(loader, places=4 * (PREFETCH_DEPTH + BUFFERS_IN_USE)):
    """Until the threads have filled every place of the ring that they were given at first."""
    while loader.stats().decode.pictures < places:
        assert loader_threads()


def stream(index, count, **changes):
    with make(index, **changes) as loader:
        return take(loader, count)


def assert_same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        for name, x, y in zip(Batch._fields, a, b, strict=True):
            assert torch.equal(x, y), name


def ids(batches):
    return torch.cat([batch.image_id for batch in batches]).tolist()


class LateDevice:
    """A device whose copies are done late: what it reads from the host is read when the copy ends, not when it starts.

    `polls`: how often `done` says no before the copy ends by itself; None: only the host's wait, or `finish`, ends it.
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
        self.device, self.sources, self.ended, self.asked = device, sources, False, 0
        self.targets = [torch.full_like(tensor, 1) for tensor in sources]

    def end(self):
        if not self.ended:
            for source, target in zip(self.sources, self.targets, strict=True):
                target.copy_(source)
            self.ended = True

    def done(self):
        self.asked += 1
        if self.device.polls is not None and self.asked > self.device.polls:
            self.end()
        return self.ended

    def wait(self):
        self.device.waits += 1
        self.end()

    def block_device(self):
        self.device.blocked.append(self)
