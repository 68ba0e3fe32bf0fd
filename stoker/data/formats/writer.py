"""What the writers of formats share: they get the classes of a data set, then its images one by one; number formatting.

Boxes are those of the index. Reading a written data set must give their float32 corners again.
"""

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False, kw_only=True)
class AnnotatedImage:
    """An image with its boxes."""

    split: str
    name: str
    """File name without a folder. No other image of the new data set has its stem, in any case."""
    data: bytes
    """The encoded image."""
    image_format: str
    """One of `headers.KINDS`."""
    size: tuple[int, int]
    """Height and width to which the boxes refer."""
    image_id: int
    boxes: NDArray[np.float32]
    """[k, 4] xyxy in pixels, not clipped."""
    labels: NDArray[np.int32]
    crowd: NDArray[np.bool_]
    area: NDArray[np.float64]


class Target(NamedTuple):
    """What a writer is to write."""

    folder: Path
    """Exists and is empty."""
    class_names: tuple[str, ...]
    category_ids: tuple[int, ...]
    max_images: dict[str, int]
    """Maximum number of images per split."""
    shards: int = 1
    """Files per split, for a format that has any."""


class UnsupportedImage(Exception):
    """The format cannot store an image; the message is the reason."""


class DatasetWriter(ABC):
    """Writes one format. Images come split by split, in the order of the index."""

    single_image_dir: ClassVar[bool] = False
    """All splits share one folder, so image names must be unique in the data set."""
    supports_crowd: ClassVar[bool] = True
    box_orientation: ClassVar[Literal["source", "upright", "stored"]] = "source"
    """The orientation to which boxes refer, for images that EXIF rotates: that of the format's readers, or, if the
    format stores the image size, that of the source."""

    def __init__(self, target: Target) -> None:
        self.folder, self.class_names = target.folder, target.class_names
        self.written_splits: list[str] = []
        """Splits with at least one image; set by `convert`."""
        self.notes: Counter[str] = Counter()
        """Differences from the source: description → count. The description follows the count in messages."""

    @abstractmethod
    def image_path(self, image: AnnotatedImage) -> Path | None:
        """The path of the image file; None if `add` stores the image itself."""

    @abstractmethod
    def add(self, image: AnnotatedImage) -> None:
        """Writes the annotations of an image. Raises UnsupportedImage before it writes anything."""

    @abstractmethod
    def finish(self) -> None:
        """Writes the files about the whole data set."""


def shortest_decimal(value: np.float32) -> int | float:
    """The shortest decimal of a float32: 10.1, not 10.100000381469727; an int for a whole number."""
    number = float(np.format_float_positional(value, unique=True))
    return int(number) if number.is_integer() else number


def exact_extent(low: int | float, high: np.float32) -> int | float:
    """The number that added to `low` gives the float32 `high`, with 9 digits if they suffice."""
    rounded = float(f"{shortest_decimal(high) - low:.9g}")
    if np.float32(low + rounded) != high:
        rounded = float(high) - low
    return int(rounded) if rounded.is_integer() else rounded


def clip_normalized(image: AnnotatedImage) -> tuple[NDArray[np.float64], int]:
    """[k, 4] xyxy normalized by image width and height, within 0 … 1, and the number of boxes that were clipped.

    Readers of normalized boxes refuse boxes outside, some the whole image.
    """
    height, width = image.size
    normalized = image.boxes.astype(np.float64) / (width, height, width, height)
    clipped = normalized.clip(0, 1)
    return clipped, int((clipped != normalized).any(axis=1).sum())


def apply_orientation(boxes: NDArray[np.float32], size: tuple[int, int], orientation: int) -> NDArray[np.float32]:
    """Boxes [k, 4] of an image of `size` (height, width) after EXIF's orientation is applied to it."""
    height, width = size
    x1, y1, x2, y2 = boxes.astype(np.float64).T
    if orientation >= 5:
        x1, y1, x2, y2, height, width = y1, x1, y2, x2, width, height
    if orientation in (2, 3, 6, 7):
        x1, x2 = width - x2, width - x1
    if orientation in (3, 4, 7, 8):
        y1, y2 = height - y2, height - y1
    return np.stack((x1, y1, x2, y2), axis=1).astype(np.float32)
