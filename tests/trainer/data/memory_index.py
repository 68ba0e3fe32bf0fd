"""`InMemoryIndex`, in a module without torch: worker processes of the loader import it."""

import time
from pathlib import Path

import cv2
import numpy as np


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


class SlowIndex(InMemoryIndex):
    """Its files take long to read."""

    def read(self, image_index: int) -> bytes:
        time.sleep(0.03)
        return super().read(image_index)
