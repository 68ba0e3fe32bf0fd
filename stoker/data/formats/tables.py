"""The types that all format readers share: `DatasetLayout` (which files) and `AnnotationTable` (everything read).

The formats produce them, the index (`stoker/data/index.py`) uses them. Not here: making a table from lists of images
and boxes (`building.py`), recognizing folders by their names (`folders.py`).
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stoker.errors import DataError

SPLITS = ("train", "val", "test")
UNASSIGNED = -1
"""The split of an image whose data set names none."""


class DataErrors(DataError):
    """Several errors of a data set, found at once: says the first, and how many more there are."""

    def __init__(self, errors: Sequence[DataError]) -> None:
        first, num_more = errors[0], len(errors) - 1
        more = f"; {num_more} more: `stoker data check` lists all" if num_more else ""
        super().__init__(
            first.what, location=first.location, cause=first.cause, choices=first.choices, fix=f"{first.fix}{more}"
        )
        self.errors = tuple(errors)

    def __reduce__(self) -> tuple[object, ...]:
        return DataErrors, (self.errors,)


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
    """False: the images are not where the annotations say, so another data set in the folder is preferred."""


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
        """The indices of the images that are not inside other files."""
        in_file = np.zeros(len(self.file_names)) if self.byte_range is None else self.byte_range[:, 1]
        return np.flatnonzero(in_file == 0)

    def image_path(self, image_index: int) -> str:
        return os.path.normpath(
            os.path.join(self.folders[int(self.folder_index[image_index])], self.file_names[image_index])
        )


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
    """A path as messages show it: relative to the root if it is inside."""
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def group_by_folder(
    folder_index: NDArray[np.int32], image_indices: NDArray[np.int64]
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """The image indices of each folder, ascending. Sorts once, because a folder may have only a few images."""
    ordered = image_indices[np.argsort(folder_index[image_indices], kind="stable")]
    folder_indices, starts = np.unique(folder_index[ordered], return_index=True)
    yield from zip(folder_indices.tolist(), np.split(ordered, starts[1:]), strict=False)
