"""One loader of loader.py, in a process of its own: a pass over the pictures for each line of standard input.

Every loader reads JPEG files and hands out batches of 16 as uint8, squashed to 800 × 800 with all that the picture
shows, and whatever threads or processes it has live from pass to pass. Each is written as its own documentation does.
Runs in the peers' environment or in stoker's, so what a loader needs is imported where it is used. Says on its output
how many pictures came and in what time; the line "look FILE" has the first of them saved there.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

BATCH, SIDE = 16, 800
SHARD = 64
"""Pictures in a tar file of WebDataset's, at most; there are at least as many shards as workers."""

Passes = Callable[[], Iterable[Any]]
"""Begins a pass: an iterable of batches, the first picture of the first being the first file."""


def ours(folder: Path, workers: int, repeats: int) -> Passes:
    from stoker.data.index import open_index
    from stoker.data.loading.loader import Loader, compute_max_boxes
    from stoker.hardware.device import select_device

    data = open_index(folder)
    rows = np.tile(np.arange(len(data)), repeats)
    loader = Loader(
        data, rows, device=select_device("cpu"), batch_size=BATCH, image_size=(SIDE, SIDE), resize="squash",
        max_boxes=compute_max_boxes(data, rows), seed=0, workers=workers, train=False,
    )  # fmt: skip

    def batches() -> Iterator[Any]:
        for batch in loader:
            yield batch.images.permute(0, 2, 3, 1)
        if loader.state_dict()["quarantined"]:
            raise RuntimeError("the loader left pictures out")

    return batches


class Files:
    """A map-style data set: a picture as torchvision's reference training opens it."""

    def __init__(self, paths: list[str], resize: Callable[[Any], Any]) -> None:
        self.paths, self.resize = paths, resize

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, place: int) -> Any:
        from PIL import Image

        with Image.open(self.paths[place]) as picture:
            return self.resize(picture.convert("RGB"))


def resize_tensor(picture: Any) -> Any:
    """torchvision's reference presets with the tensor backend, and its own default, antialias=True."""
    from torchvision.transforms.v2 import functional as F

    return F.resize(F.pil_to_tensor(picture), [SIDE, SIDE], antialias=True)


def resize_pil(picture: Any) -> Any:
    from torchvision.transforms.v2 import functional as F

    return F.pil_to_tensor(F.resize(picture, [SIDE, SIDE]))


def data_loader(resize: Callable[[Any], Any]) -> Callable[[Path, int, int], Passes]:
    def made(folder: Path, workers: int, repeats: int) -> Passes:
        from torch.utils.data import DataLoader

        files = Files(files_of(folder) * repeats, resize)
        loader = DataLoader(files, BATCH, num_workers=workers, persistent_workers=True)
        return lambda: (batch.permute(0, 2, 3, 1) for batch in loader)

    return made


def web_dataset(folder: Path, workers: int, repeats: int) -> Passes:
    """The same pictures from tar shards; opened and resized as the DataLoader with a tensor resize does."""
    import webdataset

    # Each worker reads shards of its own, so a pass is as many rounds over all of them as the others make.
    shards = [str(path) for path in sorted((folder / "shards").iterdir())] * repeats
    files = webdataset.WebDataset(shards, shardshuffle=False).decode("pil").to_tuple("jpg")
    files = files.map_tuple(resize_tensor).batched(BATCH)
    loader = webdataset.WebLoader(files, batch_size=None, num_workers=workers, persistent_workers=True)
    return lambda: (batch.permute(0, 2, 3, 1) for (batch,) in loader)


def tf_data(folder: Path, workers: int, repeats: int) -> Passes:
    import tensorflow as tf

    def load(path: Any) -> Any:
        picture = tf.io.decode_jpeg(tf.io.read_file(path), channels=3)
        return tf.cast(tf.round(tf.image.resize(picture, [SIDE, SIDE])), tf.uint8)

    made = tf.data.Dataset.from_tensor_slices(files_of(folder) * repeats)
    made = made.map(load, num_parallel_calls=tf.data.AUTOTUNE).batch(BATCH).prefetch(tf.data.AUTOTUNE)
    options = tf.data.Options()
    options.threading.private_threadpool_size = workers
    made = made.with_options(options)
    return lambda: made


def spdl(folder: Path, workers: int, repeats: int) -> Passes:
    import spdl.io
    from spdl.pipeline import PipelineBuilder

    paths = files_of(folder) * repeats
    groups = [paths[at : at + BATCH] for at in range(0, len(paths), BATCH)]
    scale = spdl.io.get_video_filter_desc(
        scale_width=SIDE, scale_height=SIDE, scale_algo="bilinear", scale_mode=None, pix_fmt="rgb24"
    )

    def load(group: list[str]) -> Any:
        buffer = spdl.io.load_image_batch(group, width=None, height=None, pix_fmt=None, filter_desc=scale)
        return spdl.io.to_torch(buffer)

    def batches() -> Iterator[Any]:
        builder = PipelineBuilder().add_source(groups).pipe(load, concurrency=workers, output_order="input")
        with (pipeline := builder.add_sink(2).build(num_threads=workers)).auto_stop():
            yield from pipeline

    return batches


def files_of(folder: Path) -> list[str]:
    return [str(path) for path in sorted((folder / "images").iterdir())]


LOADERS: dict[str, Callable[[Path, int, int], Passes]] = {
    "stoker": ours,
    "DataLoader, tensor resize": data_loader(resize_tensor),
    "DataLoader, PIL resize": data_loader(resize_pil),
    "WebDataset, tensor resize": web_dataset,
    "tf.data": tf_data,
    "SPDL": spdl,
}
NEEDS: dict[str, tuple[str, ...]] = {
    "WebDataset, tensor resize": ("webdataset", "torchvision"),
    "tf.data": ("tensorflow",),
    "SPDL": ("spdl.io", "torch"),
}
"""What a loader imports that stoker's own environment does not have."""


def main() -> None:
    name, folder, workers, repeats = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    passes = LOADERS[name](folder, workers, repeats)
    for line in sys.stdin:
        command, _, file = line.strip().partition(" ")
        began, pictures = time.perf_counter(), 0
        for batch in passes():
            if tuple(batch.shape[1:]) != (SIDE, SIDE, 3):
                raise RuntimeError(f"{name} hands out {tuple(batch.shape)}")
            if command == "look" and not pictures:
                np.save(file, np.asarray(batch[0]))
            pictures += len(batch)
        print(json.dumps({"pictures": pictures, "s": time.perf_counter() - began}), flush=True)


if __name__ == "__main__":
    main()
