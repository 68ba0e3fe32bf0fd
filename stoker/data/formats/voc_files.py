"""Which files make up a Pascal VOC data set.

Recognised: `Annotations/` beside `JPEGImages/` (or `images/`), with or without `ImageSets/Main`; XML files beside the
pictures in one folder; either of these in `train/`, `valid/`, `test/`. Not here: what is in the files (`voc.py`).
"""

import os
from pathlib import Path

from stoker.data.formats.columns import (
    SPLITS,
    Found,
    Part,
    picture_folders,
    split_folders,
    subfolders,
    without_annotations,
)


def find(folder: Path) -> Found | None:
    """The Pascal VOC data set in a folder (not below it), or None."""
    annotations = _annotations(folder)
    if annotations is not None:
        parts, notes = _listed(folder, annotations)
        return Found(
            format="voc", layout="Pascal VOC in Annotations/", root=folder, parts=tuple(parts), notes=tuple(notes)
        )
    parts = []
    for split, path in split_folders(folder):
        place = _annotations(path) or (path if _has_xml(path) else None)
        if place is not None:
            parts.append(Part(split=split, annotations=place, pictures=picture_folders(path)))
    if parts:
        notes = without_annotations(folder, parts)
        return Found(
            format="voc", layout="Pascal VOC per split folder", root=folder, parts=tuple(parts), notes=tuple(notes)
        )
    if _has_xml(folder):
        part = Part(split=None, annotations=folder, pictures=picture_folders(folder))
        return Found(format="voc", layout="Pascal VOC, XML files in one folder", root=folder, parts=(part,))
    return None


def _annotations(folder: Path) -> Path | None:
    place = subfolders(folder).get("annotations")
    if place is None:
        return None
    if _has_xml(place):
        return place
    below = subfolders(place).get("xmls")  # the Oxford pets' habit
    return below if below is not None and _has_xml(below) else None


def _has_xml(folder: Path) -> bool:
    with os.scandir(folder) as entries:
        return any(entry.name.lower().endswith(".xml") for entry in entries)


def _listed(folder: Path, annotations: Path) -> tuple[list[Part], list[str]]:
    """The splits of ImageSets/Main; one part without a split where there are none.

    Only train, val, trainval and test: a file like aeroplane_train.txt says which pictures show that class.
    """
    pictures = picture_folders(folder)
    main = folder / "ImageSets" / "Main"
    lists = {name: main / f"{name}.txt" for name in (*SPLITS, "trainval") if (main / f"{name}.txt").is_file()}
    notes = []
    both = lists.pop("trainval", None)
    if both is not None and "train" not in lists:
        lists["train"] = both
        if "val" in lists:
            notes.append("not read: ImageSets/Main/val.txt, its pictures are part of trainval.txt")
            del lists["val"]
    parts = [
        Part(split=split, annotations=annotations, pictures=pictures, listing=lists[split])
        for split in SPLITS
        if split in lists
    ]
    return parts or [Part(split=None, annotations=annotations, pictures=pictures)], notes
