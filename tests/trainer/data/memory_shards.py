"""An index of images in shards, made by hand: byte ranges of objects of a bucket, or of local files."""

from pathlib import Path

import numpy as np

from stoker.data.index import ImageRanges
from stoker_watch.storage.store import Store
from tests.trainer.data.memory_index import InMemoryIndex

GAP = b"annotations " * 20


class ShardIndex(InMemoryIndex):
    """The images of `InMemoryIndex`, in shards of `per_shard`; in the bucket of `store` once that is set."""

    store: Store | None = None

    def __init__(self, root: Path, count: int, per_shard: int = 10) -> None:
        super().__init__(root, count)
        self.shards: dict[str, bytes] = {}
        rows: list[tuple[int, int, int]] = []
        for image_index in range(count):
            name = f"shard-{image_index // per_shard}.tar"
            content = self.shards.get(name, b"") + GAP
            data = self.path(image_index).read_bytes()
            rows.append((image_index // per_shard, len(content), len(data)))
            self.shards[name] = content + data
        self._rows = np.array(rows, np.int64)
        for name, content in self.shards.items():
            (root / name).write_bytes(content)

    def image_ranges(self, image_indices: np.ndarray) -> ImageRanges:
        return ImageRanges(*self._rows[image_indices].T)

    def location(self, image_index: int) -> tuple[str, int, int]:
        """Shard, first byte, number of bytes."""
        file, start, length = self._rows[image_index].tolist()
        return f"shard-{file}.tar", start, length

    def remote_object(self, image_index: int) -> tuple[Store, str, int, int] | None:  # type: ignore[override]
        return None if self.store is None else (self.store, *self.location(image_index))

    def read(self, image_index: int) -> bytes:
        name, start, length = self.location(image_index)
        if self.store is not None:
            return self.store.read(name, start=start, length=length)
        return self.shards[name][start : start + length]
