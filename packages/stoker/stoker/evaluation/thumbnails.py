"""Small copies of the worst and best images of an evaluation, which a report shows without the data set."""

import functools
import io
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from stoker.data.index import Index
from stoker.evaluation.evaluate import read_thumbnail
from stoker_watch.errors import DataError, StokerError, StorageError
from stoker_watch.runs.evaluation import Evaluation, Thumbnail, Thumbnails

MAX_IMAGE_SIDE = 480
"""Longest side in pixels; a page shows it at about 350."""
MAX_JPEG_BYTES = 40_000


def make_thumbnails(evaluation: Evaluation, index: Index) -> Thumbnails:
    """Reads the images of the evaluation; for one that cannot be read, its error."""
    shown = dict.fromkeys(image.image_index for image in (*evaluation.worst, *evaluation.best))
    images = {image: make_thumbnail(functools.partial(read_thumbnail, index, image)) for image in shown}
    return Thumbnails(step=evaluation.step, images=images)


def make_thumbnail(load: Callable[[int], tuple[NDArray[np.uint8], tuple[int, int]]]) -> Thumbnail:
    """load: as `ImageWithBoxes.load_image`."""
    try:
        pixels, original_size = load(MAX_IMAGE_SIDE)
    except (OSError, DataError, StorageError) as error:
        reason = error.what if isinstance(error, StokerError) else (error.strerror or str(error))
        return Thumbnail(original_size=(0, 0), size=(0, 0), jpeg=b"", error=reason)
    small = Image.fromarray(pixels)
    for quality in (82, 70, 55, 40, 25, 10):
        buffer = io.BytesIO()
        small.save(buffer, "JPEG", quality=quality, optimize=True)
        if buffer.tell() <= MAX_JPEG_BYTES:
            break
    return Thumbnail(original_size=original_size, size=(small.height, small.width), jpeg=buffer.getvalue())
