"""What the writers of all formats are given: a data set's classes, then its images one by one; and how they write
numbers. A box is that of the index, whose float32 corners every format has to give back."""

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False, kw_only=True)
class AnnotatedImage:
    """One image with its boxes."""

    split: str
    name: str
    """File name without a folder; no other image of the new data set has it, or its stem, whatever the case."""
    data: bytes
    """The encoded image."""
    image_format: str
    """Its format, one of `headers.KINDS`."""
    size: tuple[int, int]
    """Height and width that the boxes refer to."""
    image_id: int
    boxes: NDArray[np.float32]
    """[k, 4] xyxy in pixels, as drawn."""
    labels: NDArray[np.int32]
    crowd: NDArray[np.bool_]
    area: NDArray[np.float64]


class UnsupportedImage(Exception):
    """The format has no place for an image; says why."""


class DatasetWriter(ABC):
    """Writes one format. Images come split by split, in the order of the index."""

    single_image_dir: ClassVar[bool] = False
    """All splits share a folder, so no two images may have the same name."""
    supports_crowd: ClassVar[bool] = True
    box_orientation: ClassVar[Literal["said", "upright", "stored"]] = "said"
    """Of an image that EXIF turns, the one that boxes refer to: as its readers show it, or, where the format has room
    for the size, as the source has it."""

    def __init__(self, folder: Path, class_names: tuple[str, ...], max_images: dict[str, int]) -> None:
        """folder: empty, there; counts: how many images each split may have at most."""
        self.folder, self.class_names, self.max_images = folder, class_names, max_images
        self.written_splits: list[str] = []
        """Those that have got an image; `convert` keeps it."""
        self.notes: Counter[str] = Counter()
        """What the format could not hold or what differs, in words that follow a number."""

    @abstractmethod
    def image_path(self, image: AnnotatedImage) -> Path | None:
        """Where the image belongs, below the folder; None: `add` keeps it in a file of its own."""

    @abstractmethod
    def add(self, image: AnnotatedImage) -> None:
        """Writes what is to be said of an image. Raises CannotHold before anything of it is written."""

    @abstractmethod
    def finish(self) -> None:
        """Writes what concerns the data set as a whole."""


def shortest_decimal(value: np.float32) -> int | float:
    """The shortest decimal that is this float32: 10.1 and not 10.100000381469727; whole numbers without a point."""
    number = float(np.format_float_positional(value, unique=True))
    return int(number) if number.is_integer() else number


def exact_extent(low: int | float, high: np.float32) -> int | float:
    """What added to `low` gives the float32 `high`, with few digits where they suffice."""
    rounded = float(f"{shortest_decimal(high) - low:.9g}")
    if np.float32(low + rounded) != high:
        rounded = float(high) - low
    return int(rounded) if rounded.is_integer() else rounded


def clip_normalized(image: AnnotatedImage) -> tuple[NDArray[np.float64], int]:
    """[k, 4] xyxy in shares of the image's width and height, within 0 … 1, and how many boxes had to be clipped for
    it: readers of normalised boxes refuse others, some the whole image."""
    height, width = image.size
    normalized = image.boxes.astype(np.float64) / (width, height, width, height)
    clipped = normalized.clip(0, 1)
    return clipped, int((clipped != normalized).any(axis=1).sum())


def apply_orientation(boxes: NDArray[np.float32], size: tuple[int, int], orientation: int) -> NDArray[np.float32]:
    """Boxes [k, 4] of an image of `size` (height, width), where they are once EXIF's orientation is applied to it."""
    height, width = size
    x1, y1, x2, y2 = boxes.astype(np.float64).T
    if orientation >= 5:
        x1, y1, x2, y2, height, width = y1, x1, y2, x2, width, height
    if orientation in (2, 3, 6, 7):
        x1, x2 = width - x2, width - x1
    if orientation in (3, 4, 7, 8):
        y1, y2 = height - y2, height - y1
    return np.stack((x1, y1, x2, y2), axis=1).astype(np.float32)
