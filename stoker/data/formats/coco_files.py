"""Which files make up a COCO data set, and in which folder its images lie.

Recognised: `train/_annotations.coco.json` per split (Roboflow) and its relatives;
`annotations/instances_train2017.json` beside `train2017/` (the official one); JSON files in the folder itself, beside
`images/` or the images; one JSON file.
Not here: what is in the files (`coco.py`).
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stoker.data.formats.names import count_matching_files
from stoker.data.formats.tables import (
    SPLITS,
    DatasetLayout,
    FolderTable,
    SplitFiles,
    check_unannotated_splits,
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
"""What the file in a folder of one split is called; FiftyOne writes labels.json beside data/."""
OTHER_TASKS = ("captions", "keypoints", "panoptic", "stuff", "image_info")
SPLIT_ALIASES = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
MAX_PROBES = 16
"""Images that are looked for in each folder in which they may lie; the folder that has the most is taken."""


def find(folder: Path) -> DatasetLayout | None:
    """The COCO data set in a folder (not below it), or None. Raises DataError when two files fit one split."""
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

    annotations = list_subdirs(folder).get("annotations")
    for directory, description in ((annotations, "COCO JSON in annotations/"), (folder, "COCO JSON")):
        files = [] if directory is None else sorted(path for path in directory.glob("*.json") if _looks_like_coco(path))
        if files:
            chosen, notes = _choose_per_split(directory or folder, files)
            parts = [_make_part(split, path, folder) for split, path in chosen]
            return DatasetLayout(
                format="coco", description=description, root=folder, parts=tuple(parts), notes=tuple(notes)
            )
    return None


def from_file(path: Path) -> DatasetLayout:
    """The data set of a single JSON file."""
    root = path.parent.parent if path.parent.name.lower() == "annotations" else path.parent
    return DatasetLayout(
        format="coco",
        description="one COCO JSON file",
        root=root,
        parts=(_make_part(split_from_name(path.stem), path, root),),
    )


def _looks_like_coco(path: Path) -> bool:
    """Whether the first 64 KiB have one of COCO's keys: package.json and the like lie about in folders, too."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(2**16)
    return any(key in head for key in (b'"images"', b'"annotations"', b'"image_id"', b'"file_name"'))


def _choose_per_split(folder: Path, files: list[Path]) -> tuple[list[tuple[str | None, Path]], list[str]]:
    """The file of each split, those for boxes preferred to those for other tasks; notes on the files not read."""
    box_files = [path for path in files if path.stem.lower().startswith("instances")] or [
        path for path in files if not any(task in path.stem.lower() for task in OTHER_TASKS)
    ]
    by_split: dict[str | None, list[Path]] = {}
    for path in box_files or files:
        by_split.setdefault(split_from_name(path.stem), []).append(path)
    if len(by_split) > 1:
        by_split.pop(None, None)
    for split, paths in by_split.items():
        if len(paths) > 1:
            raise DataError(
                f"{len(paths)} files could be the annotations" + (f" of the {split} split." if split else "."),
                location=folder,
                choices=[path.name for path in paths],
                fix="name one of the files instead of the folder, or move the others away",
            )
    selected = [(split, by_split[split][0]) for split in (*SPLITS, None) if split in by_split]
    ignored = [path.name for path in files if path not in [chosen for _, chosen in selected]]
    return selected, [f"not read: {', '.join(ignored)}"] if ignored else []


def _make_part(split: str | None, path: Path, root: Path) -> SplitFiles:
    """A file with the folders in which its images may lie: "instances_train2017" points at train2017/, train/, …"""
    dir_names = [path.stem.partition("_")[2] or path.stem, path.stem, *(SPLIT_ALIASES[split] if split else ())]
    candidates = [root / dir_name for dir_name in dir_names] + [root / "images" / dir_name for dir_name in dir_names]
    default_dirs = [*list_image_dirs(root), *list_image_dirs(path.parent)]
    return SplitFiles(split=split, annotations=path, image_dirs=tuple(dict.fromkeys([*candidates, *default_dirs])))


def _count_probe_hits(
    directories: Sequence[Path], names: Sequence[str], base_names: Sequence[str]
) -> list[tuple[int, Path, bool]]:
    """(how many of the names are files there, folder, whether without the folders in the names), for each folder."""
    hits = [(sum((directory / name).is_file() for name in names), directory, False) for directory in directories]
    if base_names != names and not any(count for count, _, _ in hits):
        hits += [
            (sum((directory / name).is_file() for name in base_names), directory, True) for directory in directories
        ]
    return hits


@dataclass(frozen=True)
class ImageLocations:
    """Where the images of a file lie."""

    folder_index: NDArray[np.int32]
    """[R], numbers of Folders."""
    file_names: list[str]
    notes: list[str]


def locate_images(part: SplitFiles, file_names: Sequence[str], folders: FolderTable) -> ImageLocations:
    """Finds the folder that a file's `file_name`s [R] are relative to, by looking for a few of the images.

    Where none is found, folders below the root are looked into; where none is there either, the likeliest is taken, and
    the check that images exist tells. Folders inside a name are kept, unless the images are there only without them
    (exports that carry another machine's paths).
    """
    names = [name.replace("\\", "/") for name in file_names]
    step = max(1, len(names) // MAX_PROBES)
    probes = names[::step]
    base_names = [name.rpartition("/")[2] for name in probes]
    existing = [folder for folder in part.image_dirs if folder.is_dir()] or [part.image_dirs[0]]
    near_hits = _count_probe_hits(existing, probes, base_names)
    if not any(count for count, _, _ in near_hits):
        # Nothing is there as it is written: in another case, then, or another form of Unicode (`names.mend`).
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
            f"{part.annotations.name}: the folders in its file names are ignored, the images are in {base.name}"
        )
        names = [name.rpartition("/")[2] for name in names]
        if len(set(names)) != len(names):
            raise DataError(
                "Images in different folders have the same file name, and those folders are not here.",
                location=part.annotations,
                fix=f"restore the folders that the file names speak of below {base}",
            )
    index_by_dir: dict[str, int] = {}
    folder = np.empty(len(names), np.int32)
    for i, name in enumerate(names):
        head, _, names[i] = name.rpartition("/")
        if head not in index_by_dir:
            index_by_dir[head] = folders.add(os.path.normpath(os.path.join(base, head)))
        folder[i] = index_by_dir[head]
    return ImageLocations(folder, names, notes)
