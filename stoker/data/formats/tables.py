"""The types that all format readers share: `DatasetLayout` (which files) and `AnnotationTable` (everything read).

The readers in this folder produce them, the index (`stoker/data/index.py`) uses them. Also here: how splits, image
folders and annotation folders are recognized by name. Not here: reading annotations.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
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
    "val": "val", "valid": "val", "validation": "val", "validate": "val",
    "test": "test", "testing": "test",
}  # fmt: skip
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")
"""Files with these suffixes (lower case) are images where no annotation names them."""
IMAGE_DIRS = ("images", "JPEGImages", "data", "imgs", "pictures")
"""Usual names of image folders: those of COCO, Pascal VOC and FiftyOne, and two that people use."""
ANNOTATION_DIRS = ("annotations", "annotation", "annots", "annot", "annos", "anno", "xmls", "xml", "labels", "label")
"""Names of folders that contain only annotations. They may have subfolders: CVAT writes one per task."""
MAX_SEARCHED_DIRS = 256
"""Folders that are searched for images that are not near their annotations."""


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


def is_image_name(name: str) -> bool:
    """Whether a file name has the suffix of an image."""
    return name.lower().endswith(IMAGE_SUFFIXES)


def split_from_name(stem: str) -> str | None:
    """The split in a file name: "instances_train2017" is "train", "my-validation" and "eval.record" are "val"; None if
    there is not exactly one. A folder `eval` is no split: TensorFlow writes its logs there."""
    words = {**SPLIT_BY_NAME, "eval": "val"}
    splits = {words[token] for token in re.split(r"[^a-z]+", stem.lower()) if token in words}
    return splits.pop() if len(splits) == 1 else None


def list_subdirs(folder: Path) -> dict[str, Path]:
    """The subfolders of a folder by lower-case name, sorted, without hidden ones."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
    return {name.lower(): folder / name for name in names}


def iter_split_dirs(folder: Path) -> Iterator[tuple[str, Path]]:
    """The subfolders that are named after a split, in the order of SPLITS. Raises DataError for two of one split."""
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


def split_list_names(folder: Path) -> dict[str, Path]:
    """The lists train.txt, val.txt, test.txt and trainval.txt in a folder, also under the other names of the splits."""
    words = {**SPLIT_BY_NAME, "trainval": "trainval"}
    found = {(split, word): folder / f"{word}.txt" for word, split in words.items()}
    return {split: path for (split, _), path in reversed(found.items()) if path.is_file()}


_WORDS_OF_DIRS = {"images": (*IMAGE_DIRS, "image", "img", "photos"), "annotations": ANNOTATION_DIRS}
_PAIRED_DIR = re.compile(
    r"(?P<split1>{splits})[^a-z]*(?P<kind1>{kinds})|(?P<kind2>{kinds})[^a-z]*(?P<split2>{splits})".format(
        splits="|".join(SPLIT_BY_NAME),
        kinds="|".join(word.lower() for words in _WORDS_OF_DIRS.values() for word in words if word != "data"),
    )
)


def list_split_pairs(folder: Path) -> list[tuple[str, Path, Path]]:
    """(split, images, annotations) of subfolders such as Validation_Images and Validation_Annotations, train_images and
    train_labels, in the order of SPLITS."""
    found: dict[tuple[str, str], Path] = {}
    for name, path in list_subdirs(folder).items():
        if (match := _PAIRED_DIR.fullmatch(name)) is not None:
            word = match["kind1"] or match["kind2"]
            kind = "annotations" if word in ANNOTATION_DIRS else "images"
            found[SPLIT_BY_NAME[match["split1"] or match["split2"]], kind] = path
    return [
        (split, found[split, "images"], found[split, "annotations"])
        for split in SPLITS
        if (split, "images") in found and (split, "annotations") in found
    ]


def check_unannotated_splits(folder: Path, parts: list[SplitFiles]) -> list[str]:
    """Notes on split folders that have no annotations.

    Raises DataError if the training or validation split has none; test images are often published without.
    """
    notes = []
    for split, path in iter_split_dirs(folder):
        if split in [part.split for part in parts]:
            continue
        if split != "test":
            raise DataError(
                f"The {split} split is empty: its folder has no annotations.",
                location=path,
                cause=f"the annotations of the {parts[0].split} split are in {parts[0].annotations}",
                fix="put its annotations there, or delete the folder to split validation images off the training set",
            )
        notes.append(f"{path.name}/ has no annotations and is left out")
    return notes


def choose_file_per_split(folder: Path, files: Iterable[Path]) -> list[tuple[str | None, Path]]:
    """The annotation file of each split, by the file names, in the order of SPLITS.

    A file whose name has no split is used only if no other file is there. Raises DataError for two files of one split.
    """
    by_split: dict[str | None, list[Path]] = {}
    for path in files:
        by_split.setdefault(split_from_name(path.stem), []).append(path)
    if len(by_split) > 1:
        by_split.pop(None, None)
    return [(split, choose_only_file(folder, by_split[split], split)) for split in (*SPLITS, None) if split in by_split]


def choose_only_file(folder: Path, files: list[Path], split: str | None) -> Path:
    """The annotation file of a split. Raises DataError if there are several."""
    if len(files) > 1:
        raise DataError(
            f"{len(files)} files could be the annotations" + (f" of the {split} split." if split else "."),
            location=folder,
            choices=[path.name for path in files],
            fix="name one of the files instead of the folder, or move the others away",
        )
    return files[0]


def iter_annotation_files(folder: Path, suffixes: tuple[str, ...]) -> Iterator[str]:
    """The paths of the files with one of the suffixes (lower case), sorted, without hidden ones.

    Subfolders are included if the folder has the name of an annotation folder.
    """
    recursive = folder.name.lower() in ANNOTATION_DIRS
    for dirpath, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if recursive and not name.startswith("."))
        names = sorted(name for name in files if name.lower().endswith(suffixes) and not name.startswith("."))
        yield from (os.path.join(dirpath, name) for name in names)


def iter_dirs_below(root: Path) -> Iterator[Path]:
    """The folders up to two levels below the root, at most MAX_SEARCHED_DIRS, to search for images."""

    def iter_two_levels() -> Iterator[Path]:
        for path in list_subdirs(root).values():
            yield path
            yield from list_subdirs(path).values()

    return islice(iter_two_levels(), MAX_SEARCHED_DIRS)


def iter_split_image_dirs(folder: Path, split: str) -> Iterator[Path]:
    """The folders named after a split in a folder and in its image folders."""
    for image_dir in list_image_dirs(folder):
        yield from (path for name, path in list_subdirs(image_dir).items() if split_from_name(name) == split)


def list_image_dirs(folder: Path) -> tuple[Path, ...]:
    """The image folders in a folder, in any case, and the folder itself as the last."""
    subdirs = list_subdirs(folder)
    return (*(subdirs[name.lower()] for name in IMAGE_DIRS if name.lower() in subdirs), folder)
