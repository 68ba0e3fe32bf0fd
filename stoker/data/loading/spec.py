"""`LoaderSpec`: what a loader loads and how, in one object. Not here: the data set, the cache and the callbacks."""

import dataclasses
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from stoker.data.validation.problems import DEFAULT_MAX_BAD_FRACTION

if TYPE_CHECKING:  # worker processes do without torch
    from stoker.data.index import Index
    from stoker.hardware.device import Device


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderSpec:
    """The fixed choices of a `Loader`. Settings of the same names are described in `stoker/config/settings.py`."""

    device: "Device"
    batch_size: int
    """B, images per batch of this rank."""
    image_size: tuple[int, int]
    """Height and width of the model input."""
    resize: str
    """letterbox or squash; see `geometry.compute_resize_geometry`."""
    max_boxes: int
    """M; see `compute_max_boxes`."""
    seed: int
    train: bool = True
    """An endless shuffled stream; else one pass in order, whose last batch is filled up with image_index -1."""
    shuffle_buffer: int = 0
    """Images that all ranks together hold so that the images of shards are mixed (`shard_order.py`); 0: random order.
    In training only, as the next three."""
    scale_jitter_prob: float = 0.0
    """See `geometry.sample_resize_geometry`, also for the next two."""
    scale_range: tuple[float, float] = (1.0, 1.0)
    min_object_covered: float = 0.0
    workers: int | Literal["auto"] = "auto"
    """Threads that read and decode; "auto": tuned while the loader runs."""
    initial_workers: int = 0
    """With how many threads a tuned loader begins, where that is more than the usual number."""
    prefetch_depth: int | None = None
    """Batches decoded ahead; None: tuned. Host memory is (prefetch_depth + 2) · B · H · W · 3 bytes."""
    max_bad_fraction: float = DEFAULT_MAX_BAD_FRACTION
    """Fraction of the images that may be in quarantine before the loader raises DataError."""
    rank: int = 0
    world_size: int = 1
    """A global batch is B · world_size positions of the stream, of which rank r takes the r-th B. Each rank knows its
    own failures only. Replacements are drawn by position, so ranks agree on lasting failures without communication."""
    jpeg_decoder: Literal["cpu", "nvjpeg"] = "cpu"
    """nvjpeg: the device decodes the JPEGs that it supports. Not together with a cache."""


def compute_max_boxes(index: "Index", image_indices: NDArray[np.int64], *, mosaic: float = 0.0) -> int:
    """M: the largest number of boxes of an image (with crowd boxes), at least 1, rounded up to a multiple of 8.

    With mosaics twice as many, because a mosaic shows a good half of each of four images. On BCCD a mosaic has up to 36
    boxes where an image has 14. All mosaics fit then; with room for the boxes of one image only 37 % would.
    """
    counts = index.offsets[image_indices + 1] - index.offsets[image_indices]
    max_count = max(1, int(counts.max(initial=0))) * (2 if mosaic > 0 else 1)
    return -(-max_count // 8) * 8
