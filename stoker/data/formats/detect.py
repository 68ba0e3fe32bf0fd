"""Which format a data set has, found by looking at the names in its folder.

Each format looks for its own layouts; where a folder has several, the first of FORMATS is read, and a note says what
else is there and how to read that. Not here: reading (`formats/`, called by `index.py`), the demo (`demo.py`), the
cache (`index.py`).
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from stoker.data.formats import (
    coco,
    coco_files,
    csv,
    csv_files,
    tfrecord,
    tfrecord_files,
    voc,
    voc_files,
    yolo,
    yolo_files,
)
from stoker.data.formats.tables import (
    ANNOTATION_FOLDERS,
    PICTURE_ENDINGS,
    PICTURE_FOLDERS,
    SPLIT_WORDS,
    SPLITS,
    Columns,
    Found,
    subfolders,
)
from stoker.data.formats.yolo_yaml import YAML_ENDINGS
from stoker.data.validation.problems import Problems
from stoker.errors import DataError, UsageError, nearest

SHOWN = 8
"""Names in a folder that an error lists."""
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".7z", ".rar")


class Format(NamedTuple):
    """A row of the table of formats."""

    find: Callable[[Path], Found | None]
    """The data set in a folder (not below it)."""
    read: Callable[[Found, Problems], Columns]
    looked_for: str
    """What `find` looks for, in words."""
    from_file: Callable[[Path], Found] | None = None
    """The data set of a single file."""
    endings: tuple[str, ...] = ()
    """Of such files, in lower case."""


FORMATS = {
    "coco": Format(
        coco_files.find,
        coco.read,
        "COCO JSON (train/_annotations.coco.json, annotations/instances_*.json, *.json beside images/)",
        coco_files.from_file,
        (".json",),
    ),
    "voc": Format(
        voc_files.find, voc.read, "Pascal VOC (Annotations/*.xml with JPEGImages/, *.xml beside the pictures)"
    ),
    "yolo": Format(
        yolo_files.find,
        yolo.read,
        "YOLO (data.yaml, images/ with labels/, *.txt beside the pictures)",
        yolo_files.from_file,
        (".yaml", ".yml", ".data"),
    ),
    "tfrecord": Format(
        tfrecord_files.find,
        tfrecord.read,
        "TFRecord (*.record, *.tfrecord, train.record-00000-of-00010)",
        tfrecord_files.from_file,
        (*tfrecord_files.ENDINGS, *(f"{ending}.gz" for ending in tfrecord_files.ENDINGS)),
    ),
    "csv": Format(
        csv_files.find,
        csv.read,
        "CSV (tables with columns such as filename, class, xmin, ymin, xmax, ymax)",
        csv_files.from_file,
        (".csv",),
    ),
}
"""In order of preference."""


def find_data(data: Path, format: str | None = None) -> Found:
    """The layout of a data set: a folder, or a file that stands for one. Reads no annotations.

    format: look for this one only. Raises DataError when there is none or more than one, UsageError when there is no
    such format.
    """
    if format is not None and format not in FORMATS:
        raise UsageError(f"There is no data format {format!r}.", choices=FORMATS)
    if not data.exists():
        if tfrecord_files.is_pattern(data) and (found := tfrecord_files.from_pattern(data)) is not None:
            return found
        raise _not_there(data)
    data = data.resolve()
    if data.is_file():
        return _of_file(data, format)
    here = _in_folder(data, format)
    if here is not None and here.sure:
        return here
    inner = [(path, found) for path in subfolders(data).values() if (found := _in_folder(path, format)) is not None]
    below = [(path, found) for path, found in inner if found.sure] or ([] if here is not None else inner)
    if len(below) == 1:
        path, found = below[0]
        notes = [f"read from the folder {path.name}/"]
        if here is not None:
            why = "its pictures are not where it says"
            notes.append(f"not read: {here.layout}, {why}; --format {here.format} reads it")
        return replace(found, notes=(*notes, *found.notes))
    if below:
        if (together := _per_split(data, below)) is not None:
            return together
        raise DataError(
            f"The folder holds {len(below)} data sets.",
            place=data,
            choices=[path.name for path, _ in below],
            fix=f"name one of them, e.g. {below[0][0]}",
        )
    if here is not None:
        return here
    raise _nothing_found(data, format)


def endings_of_files(format: str | None = None) -> tuple[str, ...]:
    """Of the names of files that stand for a data set, in lower case."""
    return tuple(ending for name, row in FORMATS.items() if format in (None, name) for ending in row.endings)


def _per_split(root: Path, below: list[tuple[Path, Found]]) -> Found | None:
    """The data set whose splits are data sets of one format, each in a folder named after it; None for any others."""
    first = below[0][1]
    splits = [SPLIT_WORDS.get(path.name.lower()) for path, _ in below]
    parts = [
        replace(part, split=split)
        for split, (_, found) in zip(splits, below, strict=True)
        for part in found.parts
        if part.split in (None, split)
    ]
    whole = len(parts) == sum(len(found.parts) for _, found in below)
    alike = {found.format for _, found in below} == {first.format}
    described = any(path.suffix.lower() in YAML_ENDINGS for _, found in below for path in found.descriptions)
    if None in splits or len(set(splits)) < len(splits) or not whole or not alike or described:
        return None
    return replace(
        first,
        layout=f"{first.layout} per split folder",
        root=root,
        parts=tuple(sorted(parts, key=lambda part: SPLITS.index(part.split) if part.split else 0)),
        notes=tuple(f"{path.name}/: {note}" for path, found in below for note in found.notes),
        descriptions=tuple(path for _, found in below for path in found.descriptions),
    )


def _of_file(data: Path, format: str | None) -> Found:
    file_name = tfrecord_files.without_number(data.name).lower()
    for name, row in FORMATS.items():
        if row.from_file is not None and file_name.endswith(row.endings) and format in (None, name):
            return row.from_file(data)
    endings = [ending for name, row in FORMATS.items() if format in (None, name) for ending in row.endings]
    archive = file_name.endswith(ARCHIVES)
    raise DataError(
        f"{data.name!r} is not a data set" + (f" in the format {format!r}." if format else "."),
        place=data,
        cause="it is an archive" if archive else None,
        choices=["a folder", *(f"*{ending}" for ending in endings if not ending.endswith(".gz"))],
        fix="unpack it, and name the folder" if archive else "name the folder that has annotations and pictures",
    )


def _in_folder(folder: Path, format: str | None) -> Found | None:
    """The data set of a folder; notes say what else it has."""
    present: list[Found] = []
    notes = []
    for name, row in FORMATS.items():
        if format not in (None, name):
            continue
        try:
            found = row.find(folder)
        except DataError as error:
            if not any(other.sure for other in present):
                raise
            # another format, preferred to this one, is found already
            notes.append(f"not read: annotations in the format {name!r}, which are wrong ({error.what.rstrip('.')})")
            continue
        if found is not None:
            present.append(found)
    if not present:
        return None
    chosen, *others = sorted(present, key=lambda found: not found.sure)
    both = [
        f"both {chosen.layout} and {other.layout} found: the first is read; --format {other.format} reads the other"
        for other in others
    ]
    return replace(chosen, notes=(*both, *notes, *chosen.notes))


def _not_there(data: Path) -> DataError:
    parent = data.parent
    while not parent.exists():
        parent = parent.parent
    close = nearest(data.name, sorted(os.listdir(parent))) if parent == data.parent and parent.is_dir() else None
    return DataError(
        f"{str(data)!r} does not exist.",
        place=data.absolute(),
        cause=f"the last folder of it that exists is {parent.absolute()}",
        fix=f"did you mean {parent / close}?"
        if close
        else 'check the path; "demo" draws a data set to try things with',
    )


def _nothing_found(data: Path, format: str | None) -> DataError:
    looked_for = "; ".join(row.looked_for for name, row in FORMATS.items() if format in (None, name))
    near = list(csv_files.near_misses(data)) if format in (None, "csv") else []
    return DataError(
        "No annotations found" + (f" in the format {format!r}." if format else "."),
        place=data,
        cause="; ".join([_what_is_there(data), *near, f"looked, there and one folder below, for {looked_for}"]),
        fix=f"name the folder above, {data.parent}, which holds annotations"
        if _is_inside_one(data)
        else "name the folder or the file that holds the annotations",
    )


def _is_inside_one(data: Path) -> bool:
    """Whether a folder is a part of the data set in the folder above."""
    if data.name.lower() not in (*SPLIT_WORDS, *ANNOTATION_FOLDERS, *(name.lower() for name in PICTURE_FOLDERS)):
        return False
    try:
        return _in_folder(data.parent, None) is not None
    except (DataError, OSError):  # whatever is wrong there is not what was asked for
        return False


def _what_is_there(folder: Path) -> str:
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    if not entries:
        return "the folder is empty"
    pictures = sum(entry.name.lower().endswith(PICTURE_ENDINGS) for entry in entries)
    names = [entry.name + ("/" if entry.is_dir() else "") for entry in entries]
    names = [name for name in names if not name.lower().endswith(PICTURE_ENDINGS)]
    holds = [*names[:SHOWN], *([f"{len(names) - SHOWN} more"] if len(names) > SHOWN else [])]
    holds += [f"{pictures:,} pictures" if pictures > 1 else "a picture"] if pictures else []
    return f"it holds {', '.join(holds)}" if names else f"it holds {holds[0]} and nothing else"
