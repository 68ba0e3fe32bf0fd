"""Finds the files of a COCO data set and the folder of its images.

Recognized: `train/_annotations.coco.json` per split (Roboflow) and similar names; the official
`annotations/instances_train2017.json` with `train2017/`; JSON files in the folder itself, with `images/` or the images
next to them; one JSON file. Not here: reading the files (`coco.py`).
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from stoker import regular_files
from stoker.data.formats.annotated_dirs import read_head
from stoker.data.formats.labelme import is_labelme
from stoker.data.formats.mds import is_mds_head
from stoker.data.formats.names import count_matching_files
from stoker.data.formats.other_formats import recognize_file
from stoker.data.formats.tables import (
    ANNOTATION_DIRS,
    SPLITS,
    DatasetLayout,
    FolderTable,
    SplitFiles,
    check_unannotated_splits,
    choose_only_file,
    iter_dirs_below,
    iter_split_dirs,
    list_image_dirs,
    list_subdirs,
    split_from_name,
)
from stoker.errors import DataError

SPLIT_FILE_NAMES = (
    "_annotations.coco.json",
    "annotations.coco.json",
    "annotations.json",
    "instances.json",
    "labels.json",
)
"""Names of the file in a split folder; FiftyOne writes labels.json and data/."""
OTHER_TASKS = ("captions", "keypoints", "panoptic", "stuff", "image_info")
SPLIT_ALIASES = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
MAX_PROBES = 16
"""Images that are searched for in each possible folder; the folder with the most of them is used."""


def find(folder: Path) -> DatasetLayout | None:
    """The COCO data set in a folder (not in subfolders), or None. Raises DataError if a split has two files."""
    parts = []
    for split, path in iter_split_dirs(folder):
        file = next((path / name for name in SPLIT_FILE_NAMES if (path / name).is_file()), None)
        if file is not None:
            parts.append(SplitFiles(split=split, annotations=file, image_dirs=(*list_image_dirs(path)[::-1],)))
    if parts:
        notes = check_unannotated_splits(folder, parts)
        return DatasetLayout(
            format="coco", description="COCO JSON per split folder", root=folder, parts=tuple(parts), notes=tuple(notes)
        )

    subdirs = list_subdirs(folder)
    for directory in (*(subdirs[name] for name in ANNOTATION_DIRS if name in subdirs), folder):
        description = "COCO JSON" if directory == folder else f"COCO JSON in {directory.name}/"
        files = sorted(path for path in directory.glob("*.json") if _looks_like_coco(path))
        if files:
            chosen, notes = _choose_per_split(directory, files)
            parts = [_make_part(split, path, folder) for split, path in chosen]
            return DatasetLayout(
                format="coco", description=description, root=folder, parts=tuple(parts), notes=tuple(notes)
            )
    return None


def from_file(path: Path) -> DatasetLayout | None:
    """The data set of a single JSON file; None if it is of another format."""
    if _has_another_format(path, read_head(path)):
        return None
    root = path.parent.parent if path.parent.name.lower() in ANNOTATION_DIRS else path.parent
    return DatasetLayout(
        format="coco",
        description="one COCO JSON file",
        root=root,
        parts=(_make_part(split_from_name(path.stem), path, root),),
    )


def _looks_like_coco(path: Path) -> bool:
    """Whether the first 64 KiB have one of COCO's keys: folders contain other JSON files, such as package.json, too."""
    head = read_head(path)
    return not _has_another_format(path, head) and any(
        key in head for key in (b'"images"', b'"annotations"', b'"image_id"', b'"file_name"')
    )


def _has_another_format(path: Path, head: bytes) -> bool:
    """Whether a file has a list of tasks or images, as Label Studio's, or the keys of another format."""
    is_other = head.startswith(b"[") or is_labelme(head) or is_mds_head(path, head)
    return is_other or recognize_file(path, head) is not None


def _choose_per_split(folder: Path, files: list[Path]) -> tuple[list[tuple[str | None, Path]], list[str]]:
    """The file of each split, preferring those for boxes to those for other tasks; notes on the files not read."""
    box_files = [path for path in files if path.stem.lower().startswith("instances")] or [
        path for path in files if not any(task in path.stem.lower() for task in OTHER_TASKS)
    ]
    by_split: dict[str | None, list[Path]] = {}
    for path in box_files or files:
        by_split.setdefault(split_from_name(path.stem), []).append(path)
    if len(by_split) > 1:
        by_split.pop(None, None)
    chosen: list[tuple[str | None, Path]] = []
    notes: list[str] = []
    for split in (*SPLITS, None):
        if len(by_split.get(split, ())) > 1:
            kept, reasons = _choose_of_several(folder, by_split[split], split)
            notes += reasons
            chosen += [(split, path) for path in kept]
        else:
            chosen += [(split, path) for path in by_split.get(split, ())]
    explained = " ".join(notes)
    used = {path for _, path in chosen}
    ignored = [path.name for path in files if path not in used and path.name not in explained]
    return chosen, [*notes, *([f"not read: {', '.join(ignored)}"] if ignored else [])]


class _ImageName(msgspec.Struct):
    file_name: str


class _ClassName(msgspec.Struct):
    name: str


class _Outline(msgspec.Struct):
    """The parts of a COCO file that tell which images and classes it is about."""

    images: list[_ImageName]
    categories: list[_ClassName] = []
    annotations: list[msgspec.Raw] = []

    def image_names(self) -> set[str]:
        return {image.file_name for image in self.images}

    def class_names(self) -> set[str]:
        return {category.name for category in self.categories}


def _choose_of_several(folder: Path, files: list[Path], split: str | None) -> tuple[list[Path], list[str]]:
    """Of several files of a split, those to read together, and notes.

    A file is left out if another has all of its images, the same classes, and at least as many boxes. Raises DataError
    if other files are about the same images: it is then unknown which boxes are meant.
    """
    outlines: dict[Path, _Outline] = {}
    for path in files:
        try:
            outlines[path] = msgspec.json.decode(regular_files.read_bytes(path), type=_Outline)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            choose_only_file(folder, files, split)  # raises the error that names all
    kept: list[Path] = []
    notes: list[str] = []
    for path in sorted(files, key=lambda file: (-len(outlines[file].images), -len(outlines[file].annotations), file)):
        outline = outlines[path]
        names, num_boxes = outline.image_names(), len(outline.annotations)
        overlapping = [other for other in kept if names & outlines[other].image_names()]
        larger = next(
            (
                other
                for other in overlapping
                if names <= outlines[other].image_names()
                and outline.class_names() <= outlines[other].class_names()
                and num_boxes <= len(outlines[other].annotations)
            ),
            None,
        )
        if larger is not None:
            images = f"its {len(names):,} images, with {num_boxes:,} boxes"
            notes.append(f"not read: {path.name}: {images}, are among those of {larger.name}")
        elif overlapping:
            raise DataError(
                f"{len(files)} files could be the annotations" + (f" of the {split} split." if split else "."),
                location=folder,
                cause=f"{path.name} and {overlapping[0].name} are about the same images with different boxes",
                choices=[f"{f.name} ({len(outlines[f].images)} images)" for f in files],
                fix="name the files: --train FILE --val FILE; or move the others away",
            )
        else:
            kept.append(path)
    if len(kept) > 1:
        notes.append(f"read together, as their images differ: {', '.join(path.name for path in sorted(kept))}")
    return sorted(kept), notes


def _make_part(split: str | None, path: Path, root: Path) -> SplitFiles:
    """A file with the folders that may contain its images: train2017/, train/, … for "instances_train2017"."""
    dir_names = [path.stem.partition("_")[2] or path.stem, path.stem, *(SPLIT_ALIASES[split] if split else ())]
    candidates = [root / dir_name for dir_name in dir_names] + [root / "images" / dir_name for dir_name in dir_names]
    default_dirs = [*list_image_dirs(root), *list_image_dirs(path.parent)]
    return SplitFiles(split=split, annotations=path, image_dirs=tuple(dict.fromkeys([*candidates, *default_dirs])))


def _count_probe_hits(
    directories: Sequence[Path], names: Sequence[str], base_names: Sequence[str]
) -> list[tuple[int, Path, bool]]:
    """For each folder: (number of the names that are files there, folder, whether folders in the names are ignored)."""
    hits = [(sum((directory / name).is_file() for name in names), directory, False) for directory in directories]
    if base_names != names and not any(count for count, _, _ in hits):
        hits += [
            (sum((directory / name).is_file() for name in base_names), directory, True) for directory in directories
        ]
    return hits


@dataclass(frozen=True)
class ImageLocations:
    """The folder and name of each image of an annotation file."""

    folder_index: NDArray[np.int32]
    """[R], index into the FolderTable."""
    file_names: list[str]
    notes: list[str]


def locate_images(part: SplitFiles, file_names: Sequence[str], folders: FolderTable) -> ImageLocations:
    """Finds the folder to which a file's `file_name`s [R] are relative, by searching for a few of the images.

    If none is found, the folders below the root are searched. If they have none either, the most likely folder is used,
    and the check for missing images reports it. Folders inside a name are kept, unless the images exist only without
    them (exports that contain another machine's paths).
    """
    names = [name.replace("\\", "/") for name in file_names]
    step = max(1, len(names) // MAX_PROBES)
    probes = names[::step]
    base_names = [name.rpartition("/")[2] for name in probes]
    existing = [folder for folder in part.image_dirs if folder.is_dir()] or [part.image_dirs[0]]
    near_hits = _count_probe_hits(existing, probes, base_names)
    if not any(count for count, _, _ in near_hits):
        # no name exists as written; it may differ in case or Unicode form (`names.py`)
        near_hits = [
            (count_matching_files(folder, probe_names), folder, probe_names is base_names)
            for probe_names in (probes, base_names)
            for folder in existing
        ]
    hits = (
        near_hits
        if any(count for count, _, _ in near_hits)
        else near_hits + _count_probe_hits(list(iter_dirs_below(folders.root)), probes, base_names)
    )
    _, base, strip_dirs = max(hits, key=lambda hit: hit[0])
    notes = []
    if base not in existing:
        notes.append(f"{part.annotations.name}: the images are in {os.path.relpath(base, folders.root)}/")
    if strip_dirs:
        notes.append(
            f"{part.annotations.name}: the folders in its file names are ignored; the images are in {base.name}/"
        )
        names = [name.rpartition("/")[2] for name in names]
        if len(set(names)) != len(names):
            raise DataError(
                "Images in different folders have the same file name, and these folders do not exist.",
                location=part.annotations,
                fix=f"restore the folders in the file names below {base}",
            )
    index_by_dir: dict[str, int] = {}
    folder = np.empty(len(names), np.int32)
    for i, name in enumerate(names):
        head, _, names[i] = name.rpartition("/")
        if head not in index_by_dir:
            index_by_dir[head] = folders.add(os.path.normpath(os.path.join(base, head)))
        folder[i] = index_by_dir[head]
    return ImageLocations(folder, names, notes)
