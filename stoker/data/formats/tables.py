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
UNDECIDED = -1
"""The split of a picture whose data set names none."""

SPLIT_WORDS = {
    "train": "train", "training": "train",
    "val": "val", "valid": "val", "validation": "val",
    "test": "test", "testing": "test",
}  # fmt: skip
PICTURE_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")
"""Of the files that are pictures where no annotation names them, in lower case."""
PICTURE_FOLDERS = ("images", "JPEGImages", "data", "imgs", "pictures")
"""Where pictures lie beside their annotations: COCO's habit, Pascal VOC's, FiftyOne's, and two that people use."""
ANNOTATION_FOLDERS = ("annotations", "annotation", "xmls", "xml", "labels", "label")
"""Folders that hold annotations and nothing else, also in folders of their own (CVAT keeps those of a task)."""
MOST_FOLDERS = 256
"""Folders that are looked into for pictures that are not beside their annotations."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One split of a data set, or all of it."""

    split: str | None
    """One of SPLITS; None: the data set names no split."""
    annotations: Path
    """A file, or the folder of one file per picture (XML, YOLO's labels); it need not exist where none has labels."""
    pictures: tuple[Path, ...]
    """Folders in which the pictures may lie, the likeliest first; they need not exist."""
    listing: Path | None = None
    """A text file that names the pictures of the split (Pascal VOC's ImageSets)."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A layout that was recognised; nothing of it has been read."""

    format: str
    layout: str
    """In words, for notes: "Roboflow's COCO JSON per split"."""
    root: Path
    parts: tuple[Part, ...]
    notes: tuple[str, ...] = ()
    descriptions: tuple[Path, ...] = ()
    """Small files about the set as a whole, which are read besides the parts: YOLO's data.yaml, lists of classes, label
    maps of TFRecords (the likeliest first)."""
    sure: bool = True
    """False: the pictures are not where the annotations point, so a data set elsewhere in the folder is preferred."""


@dataclass(kw_only=True)
class Columns:
    """A data set of R pictures and K boxes as its source has it, boxes sorted by picture."""

    class_names: list[str]
    category_ids: list[int]
    folders: list[str]
    """Relative to the root, or absolute."""
    folder: NDArray[np.int32]
    """[R], index into `folders`."""
    names: list[str]
    """[R], file names without a folder."""
    split: NDArray[np.int8]
    """[R], index into SPLITS, or UNDECIDED."""
    size: NDArray[np.int32]
    """[R, 2], height and width in pixels, 0 where the source does not say."""
    image_id: NDArray[np.int64]
    """[R], the source's id, else the row."""
    row: NDArray[np.int64]
    """[K], the picture of each box, ascending."""
    boxes: NDArray[np.float64]
    """[K, 4], xyxy in pixels."""
    labels: NDArray[np.int32]
    crowd: NDArray[np.bool_]
    area: NDArray[np.float64]
    """[K], pixels²; NaN where the source does not say."""
    box_id: NDArray[np.int64]
    """[K], how the source names the box: COCO's annotation id, the number of the <object> in its XML file."""
    box_word: str
    """What `box_id` is, for messages: "annotation", "object"."""
    span: NDArray[np.int64] | None = None
    """[R, 2], where pictures lie inside other files: first byte and number of bytes of each encoded picture within the
    file that its "folder" is. `names` then only tell the pictures apart. None: every picture is a file."""
    measured: bool = False
    """Whether sizes were read from the pictures, so that the boxes are right only while these stay as they are."""
    notes: list[str] = field(default_factory=list)

    def picture(self, row: int) -> str:
        return os.path.normpath(os.path.join(self.folders[int(self.folder[row])], self.names[row]))


class Folders:
    """Numbers folders in the order in which they are first asked for; as text relative to the root where possible."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._number: dict[str, int] = {}

    def number(self, path: str) -> int:
        relative = os.path.relpath(path, self.root)
        text = path if relative.startswith("..") else relative
        return self._number.setdefault(text, len(self._number))

    def texts(self) -> list[str]:
        return list(self._number)


def by_folder(folder: NDArray[np.int32], rows: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """The rows by their folder, ascending. One sort: there may be a folder to every few pictures."""
    ordered = rows[np.argsort(folder[rows], kind="stable")]
    numbers, starts = np.unique(folder[ordered], return_index=True)
    yield from zip(numbers.tolist(), np.split(ordered, starts[1:]), strict=False)


def split_in_name(stem: str) -> str | None:
    """The split that a file name speaks of: "instances_train2017" is "train", "my-validation" is "val"; else None."""
    found = {SPLIT_WORDS[word] for word in re.split(r"[^a-z]+", stem.lower()) if word in SPLIT_WORDS}
    return found.pop() if len(found) == 1 else None


def subfolders(folder: Path) -> dict[str, Path]:
    """The folders inside a folder by lower-case name, in order of name; hidden ones apart."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
    return {name.lower(): folder / name for name in names}


def split_folders(folder: Path) -> Iterator[tuple[str, Path]]:
    """The folders inside a folder that are named after a split. Raises DataError when two speak of the same one."""
    seen: dict[str, Path] = {}
    for name, path in subfolders(folder).items():
        split = SPLIT_WORDS.get(name)
        if split is None:
            continue
        if split in seen:
            raise DataError(
                f"Two folders are named after the {split} split.",
                place=folder,
                choices=[seen[split].name, path.name],
                fix="leave one of them in the data folder",
            )
        seen[split] = path
    yield from sorted(seen.items(), key=lambda item: SPLITS.index(item[0]))


def without_annotations(folder: Path, parts: list[Part]) -> list[str]:
    """Notes on folders that are named after a split, beside those of `parts`, but have no annotations. Raises DataError
    where that is the training or validation split: pictures of a test are often given without."""
    notes = []
    for split, path in split_folders(folder):
        if split in [part.split for part in parts]:
            continue
        if split != "test":
            raise DataError(
                f"The {split} split is empty: its folder has no annotations.",
                place=path,
                cause=f"{parts[0].annotations} is where those of the {parts[0].split} split are",
                fix="put them there, or delete the folder to have a part of the training pictures held back",
            )
        notes.append(f"{path.name}/ has no annotations and is left out")
    return notes


def annotation_files(folder: Path, endings: tuple[str, ...]) -> Iterator[str]:
    """The paths of the files in a folder with one of the endings, in lower case, by name, hidden ones apart; also of
    those further below, where the folder is called after annotations."""
    deep = folder.name.lower() in ANNOTATION_FOLDERS
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if deep and not name.startswith("."))
        names = sorted(name for name in files if name.lower().endswith(endings) and not name.startswith("."))
        yield from (os.path.join(place, name) for name in names)


def folders_below(root: Path) -> Iterator[Path]:
    """The folders up to two below one, at most MOST_FOLDERS, where pictures may be that are nowhere near."""

    def all_of_them() -> Iterator[Path]:
        for path in subfolders(root).values():
            yield path
            yield from subfolders(path).values()

    return islice(all_of_them(), MOST_FOLDERS)


def pictures_of_split(folder: Path, split: str) -> Iterator[Path]:
    """The folders named after a split in a folder and in those for pictures in it."""
    for holder in picture_folders(folder):
        yield from (path for name, path in subfolders(holder).items() if split_in_name(name) == split)


def picture_folders(folder: Path) -> tuple[Path, ...]:
    """Where pictures may lie below a folder, whatever the case of its name; the folder itself comes last."""
    below = subfolders(folder)
    return (*(below[name.lower()] for name in PICTURE_FOLDERS if name.lower() in below), folder)
