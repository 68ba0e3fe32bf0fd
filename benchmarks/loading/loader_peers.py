"""One loader of loader.py, in its own process: a pass over the images for each line of standard input.

Every loader reads JPEG files and returns batches of 16 whole images as uint8, squashed to 800 × 800. Its threads or
processes live from pass to pass. Each is written as its own documentation recommends. Runs in the peers' environment or
in stoker's, so what a loader needs is imported where it is used. Prints the number of images and the time of each pass;
the line "save FILE" also saves the first image.
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
"""Maximum number of images in a tar file of WebDataset; there are at least as many shards as workers."""

Passes = Callable[[], Iterable[Any]]
"""Begins a pass: an iterable of batches; the first image of the first batch is the first file."""


def stoker_loader(folder: Path, workers: int, repeats: int) -> Passes:
    from stoker.data.index import open_index
    from stoker.data.loading.loader import Loader, LoaderSpec, compute_max_boxes
    from stoker.hardware.selection import select_device

    index = open_index(folder)
    image_indices = np.tile(np.arange(len(index)), repeats)
    spec = LoaderSpec(
        device=select_device("cpu"),
        batch_size=BATCH,
        image_size=(SIDE, SIDE),
        resize="squash",
        max_boxes=compute_max_boxes(index, image_indices),
        seed=0,
        workers=workers,
        train=False,
    )
    loader = Loader(index, image_indices, spec)

    def batches() -> Iterator[Any]:
        for batch in loader:
            yield batch.images.permute(0, 2, 3, 1)
        if loader.state_dict()["quarantined"]:
            raise RuntimeError("the loader left images out")

    return batches


class Files:
    """A map-style dataset that opens images as torchvision's reference training does."""

    def __init__(self, paths: list[str], resize: Callable[[Any], Any]) -> None:
        self.paths, self.resize = paths, resize

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, k: int) -> Any:
        from PIL import Image

        with Image.open(self.paths[k]) as image:
            return self.resize(image.convert("RGB"))


def resize_tensor(image: Any) -> Any:
    """torchvision's reference presets with the tensor backend, and its own default, antialias=True."""
    from torchvision.transforms.v2 import functional as F

    return F.resize(F.pil_to_tensor(image), [SIDE, SIDE], antialias=True)


def resize_pil(image: Any) -> Any:
    from torchvision.transforms.v2 import functional as F

    return F.pil_to_tensor(F.resize(image, [SIDE, SIDE]))


def data_loader(resize: Callable[[Any], Any]) -> Callable[[Path, int, int], Passes]:
    def made(folder: Path, workers: int, repeats: int) -> Passes:
        from torch.utils.data import DataLoader

        files = Files(files_of(folder) * repeats, resize)
        loader = DataLoader(files, BATCH, num_workers=workers, persistent_workers=True)
        return lambda: (batch.permute(0, 2, 3, 1) for batch in loader)

    return made


def web_dataset(folder: Path, workers: int, repeats: int) -> Passes:
    """The same images from tar shards, opened and resized like in the DataLoader with a tensor resize."""
    import webdataset

    # Each worker reads its own shards, so a pass repeats all of them as often as the other loaders do.
    shards = [str(path) for path in sorted((folder / "shards").iterdir())] * repeats
    files = webdataset.WebDataset(shards, shardshuffle=False).decode("pil").to_tuple("jpg")
    files = files.map_tuple(resize_tensor).batched(BATCH)
    loader = webdataset.WebLoader(files, batch_size=None, num_workers=workers, persistent_workers=True)
    return lambda: (batch.permute(0, 2, 3, 1) for (batch,) in loader)


def tf_data(folder: Path, workers: int, repeats: int) -> Passes:
    import tensorflow as tf

    def load(path: Any) -> Any:
        image = tf.io.decode_jpeg(tf.io.read_file(path), channels=3)
        return tf.cast(tf.round(tf.image.resize(image, [SIDE, SIDE])), tf.uint8)

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
    "stoker": stoker_loader,
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
"""Modules of a loader that stoker's own environment does not have."""
INSTALL = {
    "WebDataset, tensor resize": "webdataset (`make peers`)",
    "tf.data": "tensorflow-cpu (`make peers`)",
    "SPDL": "spdl-io (`make peers`) and FFmpeg's shared libraries (libavcodec …)",
}
"""What to install where a loader cannot run."""


def main() -> None:
    name, folder, workers, repeats = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    passes = LOADERS[name](folder, workers, repeats)
    for line in sys.stdin:
        command, _, file = line.strip().partition(" ")
        start_s, num_images = time.perf_counter(), 0
        for batch in passes():
            if tuple(batch.shape[1:]) != (SIDE, SIDE, 3):
                raise RuntimeError(f"{name} returns {tuple(batch.shape)}")
            if command == "save" and not num_images:
                np.save(file, np.asarray(batch[0]))
            num_images += len(batch)
        print(json.dumps({"images": num_images, "s": time.perf_counter() - start_s}), flush=True)


if __name__ == "__main__":
    main()
