"""Which format a data set has, found by looking at the names in its folder.

Each format looks for its own layouts; COCO JSON is preferred to Pascal VOC where a folder has both, and a note says so.
Not here: reading (`formats/`, called by `index.py`), the demo (`demo.py`), the cache (`index.py`).
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from stoker.data.formats import coco, coco_files, voc, voc_files
from stoker.data.formats.columns import Columns, Found, subfolders
from stoker.data.problems import Problems
from stoker.errors import DataError, UsageError, nearest


class Format(NamedTuple):
    find: Callable[[Path], Found | None]
    read: Callable[[Found, Problems], Columns]


FORMATS = {"coco": Format(coco_files.find, coco.read), "voc": Format(voc_files.find, voc.read)}
"""In order of preference."""
LOOKED_FOR = (
    "COCO JSON (train/_annotations.coco.json, annotations/instances_*.json, *.json beside images/)"
    " and Pascal VOC (Annotations/*.xml with JPEGImages/, *.xml beside the pictures)"
)


def find_data(data: Path, format: str | None = None) -> Found:
    """The layout of a data set: a folder, or a COCO JSON file. Reads no annotations.

    format: look for this one only. Raises DataError when there is none or more than one, UsageError when there is no
    such format.
    """
    if format is not None and format not in FORMATS:
        raise UsageError(f"There is no data format {format!r}.", choices=FORMATS)
    if "://" in str(data) or str(data).startswith(("gs:/", "s3:/")):
        raise DataError(
            f"{str(data)!r} is the address of an object store.",
            cause="annotations and pictures are read from local folders only, so far",
            fix="copy the data set to a local disk, or mount the bucket, and name the folder",
        )
    if not data.exists():
        raise _not_there(data)
    data = data.resolve()
    if data.is_file():
        if data.suffix.lower() != ".json" or format == "voc":
            raise DataError(
                f"{data.name!r} is not a data set.",
                place=data,
                choices=["a folder", "a COCO JSON file"],
                fix="name the folder that has annotations and pictures",
            )
        return coco_files.from_file(data)
    found = _in_folder(data, format)
    if found is not None:
        return found
    below = [inner for path in subfolders(data).values() if (inner := _in_folder(path, format)) is not None]
    if len(below) == 1:
        return replace(below[0], notes=(f"read from the folder {below[0].root.name}/", *below[0].notes))
    if below:
        raise DataError(
            f"The folder holds {len(below)} data sets.",
            place=data,
            choices=[inner.root.name for inner in below],
            fix=f"name one of them, e.g. {below[0].root}",
        )
    raise DataError(
        "No annotations found" + (f" in the format {format!r}." if format else "."),
        place=data,
        cause=f"looked, there and one folder below, for {LOOKED_FOR}; {_what_is_there(data)}",
        fix="name the folder or the JSON file that holds the annotations",
    )


def _in_folder(folder: Path, format: str | None) -> Found | None:
    found = {name: find(folder) for name, (find, _) in FORMATS.items() if format in (None, name)}
    present = [layout for layout in found.values() if layout is not None]
    if not present:
        return None
    chosen, *others = present
    notes = [
        f"both {chosen.layout} and {other.layout} found: the first is read; format={other.format!r} reads the other"
        for other in others
    ]
    tables = [path.name for path in sorted(folder.glob("*.csv"))]
    if tables:
        notes.append(f"{chosen.layout} is read, not {', '.join(tables[:5])}")
    return replace(chosen, notes=(*notes, *chosen.notes))


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


def _what_is_there(folder: Path) -> str:
    names = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in os.scandir(folder))
    if not names:
        return "the folder is empty"
    return f"it holds {', '.join(names[:8])}" + (f" and {len(names) - 8} more" if len(names) > 8 else "")
