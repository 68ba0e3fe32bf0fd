"""The types that formats share: `DatasetLayout` (which files), `AnnotationTable` (everything read), `DatasetWriter`.

The formats produce the first two, the index (`stoker/data/index.py`) uses them. A writer gets the classes of a data
set, then its images one by one; boxes are those of the index, and reading a written data set must give their float32
corners again. Functions make boxes and sizes of what annotations give. Not here: making a table from single images and
boxes (`images.py`), recognizing folders by their names (`folders.py`).
"""

import math
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

SPLITS = ("train", "val", "test")
UNASSIGNED = -1
"""The split of an image whose data set names none."""
XYXY = tuple[float, float, float, float]


@dataclass(frozen=True, kw_only=True)
class SplitFiles:
    """One split of a data set, or all of it."""

    split: str | None
    """One of SPLITS; None: the data set names no split."""
    annotations: Path
    """A file, or the folder of one file per image (XML, YOLO labels). It may be absent if no image has labels."""
    image_dirs: tuple[Path, ...]
    """Folders that may contain the images, the most likely first. They may be absent."""
    image_list: Path | None = None
    """A text file that lists the images of the split (Pascal VOC's ImageSets, YOLO's train.txt)."""

    @property
    def split_index(self) -> int:
        """Index into SPLITS, or UNASSIGNED."""
        return UNASSIGNED if self.split is None else SPLITS.index(self.split)


@dataclass(frozen=True, kw_only=True)
class DatasetLayout:
    """The files of a data set whose format was recognized. No annotation has been read."""

    format: str
    description: str
    """For notes: "COCO JSON per split folder"."""
    root: Path
    parts: tuple[SplitFiles, ...]
    notes: tuple[str, ...] = ()
    metadata_files: tuple[Path, ...] = ()
    """Small files about the whole data set, the most likely first: YOLO's data.yaml, class lists, label maps."""
    others: tuple["DatasetLayout", ...] = ()
    """The same folder in other formats, which are not read."""
    is_certain: bool = True
    """False: the files may be something else, so another data set in the folder is preferred."""
    may_be_replaced: bool = False
    """Whether a data set in another format is read instead if it annotates more images."""


@dataclass(kw_only=True)
class AnnotationTable:
    """A data set of R images and K boxes as its source has it, boxes sorted by image."""

    class_names: list[str]
    category_ids: list[int]
    folders: list[str]
    """Relative to the root, or absolute."""
    folder_index: NDArray[np.int32]
    """[R], index into `folders`."""
    file_names: list[str]
    """[R], file names without a folder."""
    split: NDArray[np.int8]
    """[R], index into SPLITS, or UNASSIGNED."""
    original_size: NDArray[np.int32]
    """[R, 2], height and width in pixels, 0 if the source does not give them."""
    image_id: NDArray[np.int64]
    """[R], the source's id, else the image index."""
    image_index: NDArray[np.int64]
    """[K], the image of each box, ascending."""
    boxes: NDArray[np.float64]
    """[K, 4], xyxy in pixels."""
    labels: NDArray[np.int32]
    """[K], index into `class_names`."""
    crowd: NDArray[np.bool_]
    area: NDArray[np.float64]
    """[K], pixels²; NaN if the source does not give it."""
    box_id: NDArray[np.int64]
    """[K], the source's number of the box: COCO's annotation id, the number of the <object> in its XML file, a line."""
    box_id_kind: str
    """What `box_id` is, for messages: "annotation", "object", "line"."""
    byte_range: NDArray[np.int64] | None = None
    """[R, 2], for images inside other files: offset and length in bytes of each encoded image in the file that is its
    "folder". `file_names` are then only labels. None: every image is a file."""
    sizes_from_headers: bool = False
    """True if sizes were read from the image files: the boxes are correct only while these files do not change."""
    num_bad_boxes: NDArray[np.int64] | None = None
    """[R], boxes of each image that were left out because they cannot be used; None: none."""
    notes: list[str] = field(default_factory=list)

    def images_that_are_files(self) -> NDArray[np.int64]:
        """Returns the indices of the images that are not inside other files."""
        in_file = np.zeros(len(self.file_names)) if self.byte_range is None else self.byte_range[:, 1]
        return np.flatnonzero(in_file == 0)

    def image_path(self, image_index: int) -> str:
        folder = self.folders[int(self.folder_index[image_index])]
        return os.path.normpath(os.path.join(folder, self.file_names[image_index]))


class FolderTable:
    """Numbers folders in order of first use; stores paths relative to the root where possible."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._index_by_path: dict[str, int] = {}

    def add(self, path: str) -> int:
        relative = os.path.relpath(path, self.root)
        key = path if relative.startswith("..") else relative
        return self._index_by_path.setdefault(key, len(self._index_by_path))

    def paths(self) -> list[str]:
        return list(self._index_by_path)


def display_path(path: Path, root: Path) -> str:
    """Returns a path as messages show it: relative to the root if it is inside."""
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def group_by_folder(
    folder_index: NDArray[np.int32], image_indices: NDArray[np.int64]
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yields the image indices of each folder, ascending. Sorts once, because a folder may have only a few images."""
    ordered = image_indices[np.argsort(folder_index[image_indices], kind="stable")]
    folder_indices, starts = np.unique(folder_index[ordered], return_index=True)
    yield from zip(folder_indices.tolist(), np.split(ordered, starts[1:]), strict=False)


@dataclass(frozen=True, eq=False, kw_only=True)
class AnnotatedImage:
    split: str
    name: str
    """File name without a folder. No other image of the new data set has its stem, in any case."""
    data: bytes
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

    image_dir: ClassVar[str | None] = None
    """The folder of the image files, "{split}" stands for the split; None: `add` stores the images itself."""
    single_image_dir: ClassVar[bool] = False
    """All splits share one folder, so image names must be unique in the data set."""
    supports_crowd: ClassVar[bool] = True
    """Else `convert` leaves crowd boxes out."""
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
    def add(self, image: AnnotatedImage) -> None:
        """Writes the annotations of an image. Raises UnsupportedImage before it writes anything."""

    def normalized_boxes(self, image: AnnotatedImage) -> NDArray[np.float64]:
        """Returns [k, 4] xyxy normalized by image width and height, within 0 … 1: readers of normalized boxes refuse
        boxes outside, some the whole image."""
        height, width = image.size
        normalized = image.boxes.astype(np.float64) / (width, height, width, height)
        clipped: NDArray[np.float64] = normalized.clip(0, 1)
        if count := int((clipped != normalized).any(axis=1).sum()):
            self.notes["boxes reached outside their image and are clipped: the format needs them inside"] += count
        return clipped

    @abstractmethod
    def finish(self) -> None:
        """Writes the files about the whole data set."""


def shortest_decimal(value: np.float32) -> int | float:
    """Returns the shortest decimal of a float32: 10.1, not 10.100000381469727; an int for a whole number."""
    number = float(np.format_float_positional(value, unique=True))
    return int(number) if number.is_integer() else number


def exact_extent(low: int | float, high: np.float32) -> int | float:
    """Returns the number that added to `low` gives the float32 `high`, with 9 digits if they suffice."""
    rounded = float(f"{shortest_decimal(high) - low:.9g}")
    if np.float32(low + rounded) != high:
        rounded = float(high) - low
    return int(rounded) if rounded.is_integer() else rounded


def bound_points(points: Sequence[Sequence[float]]) -> XYXY:
    xs, ys = [point[0] for point in points], [point[1] for point in points]
    return min(xs), min(ys), max(xs), max(ys)


def bound_rotated(center: tuple[float, float], size: tuple[float, float], degrees: float) -> XYXY:
    """Returns the box around a rectangle of width and height `size` that is rotated about its center."""
    cos, sin = abs(math.cos(math.radians(degrees))), abs(math.sin(math.radians(degrees)))
    half_width, half_height = (size[0] * cos + size[1] * sin) / 2, (size[0] * sin + size[1] * cos) / 2
    x, y = center
    return x - half_width, y - half_height, x + half_width, y + half_height


def usable_size(height: object, width: object) -> tuple[int, int]:
    """Returns height and width that annotations give; 0, unknown, if they are not both valid numbers."""
    try:
        sides = [float(side) for side in (height, width) if isinstance(side, int | float | str)]
    except ValueError:
        return 0, 0
    is_valid = len(sides) == 2 and all(1 <= side < 2**31 for side in sides)
    return (int(sides[0]), int(sides[1])) if is_valid else (0, 0)


def apply_orientation(boxes: NDArray[np.float32], size: tuple[int, int], orientation: int) -> NDArray[np.float32]:
    """Returns boxes [k, 4] of an image of `size` (height, width) after EXIF's orientation is applied to it."""
    height, width = size
    x1, y1, x2, y2 = boxes.astype(np.float64).T
    if orientation >= 5:
        x1, y1, x2, y2, height, width = y1, x1, y2, x2, width, height
    if orientation in (2, 3, 6, 7):
        x1, x2 = width - x2, width - x1
    if orientation in (3, 4, 7, 8):
        y1, y2 = height - y2, height - y1
    return np.stack((x1, y1, x2, y2), axis=1).astype(np.float32)
