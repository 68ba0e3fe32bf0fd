"""What every format speaks: `Found`, a layout that was recognised, and `Columns`, everything that was read from it.

Plain data between the format readers beside this file and the index (`stoker/data/index.py`). Not here: reading
annotations.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stoker.errors import DataError

SPLITS = ("train", "val", "test")
UNASSIGNED = -1
"""The split of an image whose data set names none."""

SPLIT_BY_NAME = {
    "train": "train", "training": "train",
    "val": "val", "valid": "val", "validation": "val",
    "test": "test", "testing": "test",
}  # fmt: skip
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")
"""Of the files that are images where no annotation names them, in lower case."""
IMAGE_DIRS = ("images", "JPEGImages", "data", "imgs", "pictures")
"""Where images lie beside their annotations: COCO's habit, Pascal VOC's, FiftyOne's, and two that people use."""
ANNOTATION_DIRS = ("annotations", "annotation", "xmls", "xml", "labels", "label")
"""Folders that hold annotations and nothing else, also in folders of their own (CVAT keeps those of a task)."""
MAX_SEARCHED_DIRS = 256
"""Folders that are looked into for images that are not beside their annotations."""


@dataclass(frozen=True, kw_only=True)
class SplitFiles:
    """One split of a data set, or all of it."""

    split: str | None
    """One of SPLITS; None: the data set names no split."""
    annotations: Path
    """A file, or the folder of one file per image (XML, YOLO's labels); it need not exist where none has labels."""
    image_dirs: tuple[Path, ...]
    """Folders in which the images may lie, the likeliest first; they need not exist."""
    image_list: Path | None = None
    """A text file that names the images of the split (Pascal VOC's ImageSets)."""


@dataclass(frozen=True, kw_only=True)
class DatasetLayout:
    """A layout that was recognised; nothing of it has been read."""

    format: str
    description: str
    """In words, for notes: "Roboflow's COCO JSON per split"."""
    root: Path
    parts: tuple[SplitFiles, ...]
    notes: tuple[str, ...] = ()
    metadata_files: tuple[Path, ...] = ()
    """Small files about the set as a whole, which are read besides the parts: YOLO's data.yaml, lists of classes, label
    maps of TFRecords (the likeliest first)."""
    is_certain: bool = True
    """False: the images are not where the annotations point, so a data set elsewhere in the folder is preferred."""


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
    """[R], index into SPLITS, or UNDECIDED."""
    original_size: NDArray[np.int32]
    """[R, 2], height and width in pixels, 0 where the source does not say."""
    image_id: NDArray[np.int64]
    """[R], the source's id, else the row."""
    image_index: NDArray[np.int64]
    """[K], the image of each box, ascending."""
    boxes: NDArray[np.float64]
    """[K, 4], xyxy in pixels."""
    labels: NDArray[np.int32]
    crowd: NDArray[np.bool_]
    area: NDArray[np.float64]
    """[K], pixels²; NaN where the source does not say."""
    box_id: NDArray[np.int64]
    """[K], how the source names the box: COCO's annotation id, the number of the <object> in its XML file."""
    box_id_kind: str
    """What `box_id` is, for messages: "annotation", "object"."""
    byte_range: NDArray[np.int64] | None = None
    """[R, 2], where images lie inside other files: first byte and number of bytes of each encoded image within the
    file that its "folder" is. `names` then only tell the images apart. None: every image is a file."""
    sizes_from_headers: bool = False
    """Whether sizes were read from the images, so that the boxes are right only while these stay as they are."""
    notes: list[str] = field(default_factory=list)

    def image_path(self, image_index: int) -> str:
        return os.path.normpath(
            os.path.join(self.folders[int(self.folder_index[image_index])], self.file_names[image_index])
        )


class FolderTable:
    """Numbers folders in the order in which they are first asked for; as text relative to the root where possible."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._index_by_path: dict[str, int] = {}

    def add(self, path: str) -> int:
        relative = os.path.relpath(path, self.root)
        key = path if relative.startswith("..") else relative
        return self._index_by_path.setdefault(key, len(self._index_by_path))

    def paths(self) -> list[str]:
        return list(self._index_by_path)


def group_by_folder(
    folder_index: NDArray[np.int32], image_indices: NDArray[np.int64]
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """The rows by their folder, ascending. One sort: there may be a folder to every few images."""
    ordered = image_indices[np.argsort(folder_index[image_indices], kind="stable")]
    folder_indices, starts = np.unique(folder_index[ordered], return_index=True)
    yield from zip(folder_indices.tolist(), np.split(ordered, starts[1:]), strict=False)


def split_from_name(stem: str) -> str | None:
    """The split that a file name speaks of: "instances_train2017" is "train", "my-validation" is "val"; else None."""
    splits = {SPLIT_BY_NAME[token] for token in re.split(r"[^a-z]+", stem.lower()) if token in SPLIT_BY_NAME}
    return splits.pop() if len(splits) == 1 else None


def list_subdirs(folder: Path) -> dict[str, Path]:
    """The folders inside a folder by lower-case name, in order of name; hidden ones apart."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
    return {name.lower(): folder / name for name in names}


def iter_split_dirs(folder: Path) -> Iterator[tuple[str, Path]]:
    """The folders inside a folder that are named after a split. Raises DataError when two speak of the same one."""
    path_by_split: dict[str, Path] = {}
    for name, path in list_subdirs(folder).items():
        split = SPLIT_BY_NAME.get(name)
        if split is None:
            continue
        if split in path_by_split:
            raise DataError(
                f"Two folders are named after the {split} split.",
                location=folder,
                choices=[path_by_split[split].name, path.name],
                fix="leave one of them in the data folder",
            )
        path_by_split[split] = path
    yield from sorted(path_by_split.items(), key=lambda item: SPLITS.index(item[0]))


def check_unannotated_splits(folder: Path, parts: list[SplitFiles]) -> list[str]:
    """Notes on folders that are named after a split, beside those of `parts`, but have no annotations. Raises DataError
    where that is the training or validation split: images of a test are often given without."""
    notes = []
    for split, path in iter_split_dirs(folder):
        if split in [part.split for part in parts]:
            continue
        if split != "test":
            raise DataError(
                f"The {split} split is empty: its folder has no annotations.",
                location=path,
                cause=f"{parts[0].annotations} is where those of the {parts[0].split} split are",
                fix="put them there, or delete the folder to have a part of the training images held back",
            )
        notes.append(f"{path.name}/ has no annotations and is left out")
    return notes


def iter_annotation_files(folder: Path, suffixes: tuple[str, ...]) -> Iterator[str]:
    """The paths of the files in a folder with one of the endings, in lower case, by name, hidden ones apart; also of
    those further below, where the folder is called after annotations."""
    recursive = folder.name.lower() in ANNOTATION_DIRS
    for dirpath, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if recursive and not name.startswith("."))
        names = sorted(name for name in files if name.lower().endswith(suffixes) and not name.startswith("."))
        yield from (os.path.join(dirpath, name) for name in names)


def iter_dirs_below(root: Path) -> Iterator[Path]:
    """The folders up to two below one, at most MOST_FOLDERS, where images may be that are nowhere near."""

    def iter_two_levels() -> Iterator[Path]:
        for path in list_subdirs(root).values():
            yield path
            yield from list_subdirs(path).values()

    return islice(iter_two_levels(), MAX_SEARCHED_DIRS)


def iter_split_image_dirs(folder: Path, split: str) -> Iterator[Path]:
    """The folders named after a split in a folder and in those for images in it."""
    for image_dir in list_image_dirs(folder):
        yield from (path for name, path in list_subdirs(image_dir).items() if split_from_name(name) == split)


def list_image_dirs(folder: Path) -> tuple[Path, ...]:
    """Where images may lie below a folder, whatever the case of its name; the folder itself comes last."""
    subdirs = list_subdirs(folder)
    return (*(subdirs[name.lower()] for name in IMAGE_DIRS if name.lower() in subdirs), folder)
