"""Which files make up a COCO data set, and in which folder its pictures lie.

Recognised: `train/_annotations.coco.json` per split (Roboflow) and its relatives;
`annotations/instances_train2017.json` beside `train2017/` (the official one); JSON files in the folder itself, beside
`images/` or the pictures; one JSON file.
Not here: what is in the files (`coco.py`).
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stoker.data.formats.names import alike
from stoker.data.formats.tables import (
    SPLITS,
    Folders,
    Found,
    Part,
    folders_below,
    picture_folders,
    split_folders,
    split_in_name,
    subfolders,
    without_annotations,
)
from stoker.errors import DataError

NAMES_IN_SPLIT = (
    "_annotations.coco.json",
    "annotations.coco.json",
    "annotations.json",
    "instances.json",
    "labels.json",
)
"""What the file in a folder of one split is called; FiftyOne writes labels.json beside data/."""
OTHER_TASKS = ("captions", "keypoints", "panoptic", "stuff", "image_info")
SPLIT_ALIASES = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
PROBES = 16
"""Pictures that are looked for in each folder in which they may lie; the folder that has the most is taken."""


def find(folder: Path) -> Found | None:
    """The COCO data set in a folder (not below it), or None. Raises DataError when two files fit one split."""
    parts = []
    for split, path in split_folders(folder):
        file = next((path / name for name in NAMES_IN_SPLIT if (path / name).is_file()), None)
        if file is not None:
            parts.append(Part(split=split, annotations=file, pictures=(*picture_folders(path)[::-1],)))
    if parts:
        notes = without_annotations(folder, parts)
        return Found(
            format="coco", layout="COCO JSON per split folder", root=folder, parts=tuple(parts), notes=tuple(notes)
        )

    annotations = subfolders(folder).get("annotations")
    for place, layout in ((annotations, "COCO JSON in annotations/"), (folder, "COCO JSON")):
        files = [] if place is None else sorted(path for path in place.glob("*.json") if _looks_like_coco(path))
        if files:
            chosen, notes = _one_per_split(place or folder, files)
            parts = [_part(split, path, folder) for split, path in chosen]
            return Found(format="coco", layout=layout, root=folder, parts=tuple(parts), notes=tuple(notes))
    return None


def from_file(path: Path) -> Found:
    """The data set of a single JSON file."""
    root = path.parent.parent if path.parent.name.lower() == "annotations" else path.parent
    return Found(
        format="coco", layout="one COCO JSON file", root=root, parts=(_part(split_in_name(path.stem), path, root),)
    )


def _looks_like_coco(path: Path) -> bool:
    """Whether the first 64 KiB have one of COCO's keys: package.json and the like lie about in folders, too."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(2**16)
    return any(key in head for key in (b'"images"', b'"annotations"', b'"image_id"', b'"file_name"'))


def _one_per_split(folder: Path, files: list[Path]) -> tuple[list[tuple[str | None, Path]], list[str]]:
    """The file of each split, those for boxes preferred to those for other tasks; notes on the files not read."""
    boxes = [path for path in files if path.stem.lower().startswith("instances")] or [
        path for path in files if not any(word in path.stem.lower() for word in OTHER_TASKS)
    ]
    by_split: dict[str | None, list[Path]] = {}
    for path in boxes or files:
        by_split.setdefault(split_in_name(path.stem), []).append(path)
    if len(by_split) > 1:
        by_split.pop(None, None)
    for split, paths in by_split.items():
        if len(paths) > 1:
            raise DataError(
                f"{len(paths)} files could be the annotations" + (f" of the {split} split." if split else "."),
                place=folder,
                choices=[path.name for path in paths],
                fix="name one of the files instead of the folder, or move the others away",
            )
    order = [(split, by_split[split][0]) for split in (*SPLITS, None) if split in by_split]
    ignored = [path.name for path in files if path not in [chosen for _, chosen in order]]
    return order, [f"not read: {', '.join(ignored)}"] if ignored else []


def _part(split: str | None, path: Path, root: Path) -> Part:
    """A file with the folders in which its pictures may lie: "instances_train2017" points at train2017/, train/, …"""
    tails = [path.stem.partition("_")[2] or path.stem, path.stem, *(SPLIT_ALIASES[split] if split else ())]
    below = [root / tail for tail in tails] + [root / "images" / tail for tail in tails]
    usual = [*picture_folders(root), *picture_folders(path.parent)]
    return Part(split=split, annotations=path, pictures=tuple(dict.fromkeys([*below, *usual])))


def _hits(places: Sequence[Path], names: Sequence[str], bare: Sequence[str]) -> list[tuple[int, Path, bool]]:
    """(how many of the names are files there, folder, whether without the folders in the names), for each folder."""
    hits = [(sum((place / name).is_file() for name in names), place, False) for place in places]
    if bare != names and not any(count for count, _, _ in hits):
        hits += [(sum((place / name).is_file() for name in bare), place, True) for place in places]
    return hits


@dataclass(frozen=True)
class Located:
    """Where the pictures of a file lie."""

    folder: NDArray[np.int32]
    """[R], numbers of Folders."""
    names: list[str]
    notes: list[str]


def locate_pictures(part: Part, file_names: Sequence[str], folders: Folders) -> Located:
    """Finds the folder that a file's `file_name`s [R] are relative to, by looking for a few of the pictures.

    Where none is found, folders below the root are looked into; where none is there either, the likeliest is taken, and
    the check that pictures exist tells. Folders inside a name are kept, unless the pictures are there only without them
    (exports that carry another machine's paths).
    """
    names = [name.replace("\\", "/") for name in file_names]
    step = max(1, len(names) // PROBES)
    probes = names[::step]
    bare = [name.rpartition("/")[2] for name in probes]
    existing = [folder for folder in part.pictures if folder.is_dir()] or [part.pictures[0]]
    near = _hits(existing, probes, bare)
    if not any(count for count, _, _ in near):
        # Nothing is there as it is written: in another case, then, or another form of Unicode (`names.mend`).
        near = [(alike(folder, some), folder, some is bare) for some in (probes, bare) for folder in existing]
    hits = near if any(count for count, _, _ in near) else near + _hits(list(folders_below(folders.root)), probes, bare)
    _, base, strip = max(hits, key=lambda hit: hit[0])
    notes = []
    if base not in existing:
        notes.append(f"{part.annotations.name}: the pictures are in {os.path.relpath(base, folders.root)}/")
    if strip:
        notes.append(
            f"{part.annotations.name}: the folders in its file names are ignored, the pictures are in {base.name}"
        )
        names = [name.rpartition("/")[2] for name in names]
        if len(set(names)) != len(names):
            raise DataError(
                "Pictures in different folders have the same file name, and those folders are not here.",
                place=part.annotations,
                fix=f"restore the folders that the file names speak of below {base}",
            )
    number: dict[str, int] = {}
    folder = np.empty(len(names), np.int32)
    for i, name in enumerate(names):
        head, _, names[i] = name.rpartition("/")
        if head not in number:
            number[head] = folders.number(os.path.normpath(os.path.join(base, head)))
        folder[i] = number[head]
    return Located(folder, names, notes)
