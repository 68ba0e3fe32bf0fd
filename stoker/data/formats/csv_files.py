"""Finds the CSV tables of a data set and the folders of their images.

Recognized: tables of boxes (`csv_table.py`) in the folder, in `annotations/`, `labels/`, `data/` or `csv/`, or one in
each of `train/`, `valid/`, `test/`. A table whose images are not in the folders near it is found, but not certain:
another data set is preferred. Not here: reading the rows (`csv.py`).
"""

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from stoker.data.formats.csv_table import HEAD_BYTES, detect_csv_layout, explain_rejection, iter_rows
from stoker.data.formats.image_locator import iter_nearby_dirs
from stoker.data.formats.openimages import is_open_images
from stoker.data.formats.tables import (
    SPLIT_BY_NAME,
    DatasetLayout,
    SplitFiles,
    check_unannotated_splits,
    choose_file_per_split,
    choose_only_file,
    iter_dirs_below,
    iter_split_dirs,
    list_subdirs,
    split_from_name,
)
from stoker.errors import DataError

TABLE_DIRS = ("annotations", "labels", "data", "csv")
MAX_NEAR_MISSES = 3
"""Tables that are explained in an error message."""
MAX_PROBES = 16
"""Rows whose images are searched for, to check the folders near the table."""


def find(folder: Path) -> DatasetLayout | None:
    """The tables in a folder, or None. Raises DataError if a split has several."""
    subdirs = list_subdirs(folder)
    for directory in (folder, *(subdirs[name] for name in TABLE_DIRS if name in subdirs)):
        if tables := _list_tables(directory):
            chosen = choose_file_per_split(directory, tables)
            ignored = [path.name for path in tables if path not in [used for _, used in chosen]]
            return _make_layout(folder, chosen, [f"not read: {', '.join(ignored)}"] if ignored else [])
    parts: list[tuple[str | None, Path]] = []
    for split, path in iter_split_dirs(folder):
        if tables := _list_tables(path):
            parts.append((split, choose_only_file(path, tables, split)))
    return _make_layout(folder, parts, []) if parts else None


def from_file(path: Path) -> DatasetLayout:
    """The data set of a single table. Raises DataError if the file is not a table of boxes."""
    if detect_csv_layout(path) is None:
        raise DataError(
            "The file is not a table of boxes.",
            location=path,
            cause=explain_rejection(path),
            choices=["filename,class,xmin,ymin,xmax,ymax", "filename,class,x,y,width,height"],
            fix="give the columns such names, in any order",
        )
    root = path.parent.parent if path.parent.name.lower() in TABLE_DIRS else path.parent
    return _make_layout(root, [(split_from_name(path.stem), path)], [])


def _list_csv(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() == ".csv" and path.is_file())


def _list_tables(folder: Path) -> list[Path]:
    files = _list_csv(folder)
    files = [path for path in files if not path.name.startswith(".") and not is_open_images(path)]
    return [path for path in files if detect_csv_layout(path) is not None]


def describe_near_misses(folder: Path) -> Iterator[str]:
    """The reasons why the *.csv files of a folder are not tables of boxes."""
    for path in _list_csv(folder)[:MAX_NEAR_MISSES]:
        yield f"{path.name} is not a table of boxes: {explain_rejection(path)}"


def _make_layout(folder: Path, chosen: list[tuple[str | None, Path]], notes: list[str]) -> DatasetLayout:
    parts = []
    is_certain = False
    for split, path in chosen:
        image_dirs = list(dict.fromkeys(iter_nearby_dirs(path.parent, folder, split)))
        names = _read_first_names(path)
        is_nearby = any(_has_images(directory, names) for directory in (folder, *image_dirs))
        if not is_nearby:
            image_dirs += [directory for directory in iter_dirs_below(folder) if _has_images(directory, names)]
        is_certain = is_certain or is_nearby
        parts.append(SplitFiles(split=split, annotations=path, image_dirs=tuple(dict.fromkeys(image_dirs))))
    if parts[0].annotations.parent != folder and parts[0].annotations.parent.name.lower() in SPLIT_BY_NAME:
        notes += check_unannotated_splits(folder, parts)
    names_of_tables = ", ".join(str(path.relative_to(folder)) for _, path in chosen)
    return DatasetLayout(
        format="csv",
        description=f"CSV ({names_of_tables})",
        root=folder,
        parts=tuple(parts),
        notes=tuple(notes),
        is_certain=is_certain,
    )


def _read_first_names(table: Path) -> list[str]:
    layout = detect_csv_layout(table)
    if layout is None:
        return []
    rows = iter_rows(table, layout, max_bytes=HEAD_BYTES)
    values = (row[layout.file_column] for _, row in rows if layout.file_column < len(row))
    return [name.replace("\\", "/") for name in islice(values, MAX_PROBES)]


def _has_images(folder: Path, names: list[str]) -> bool:
    """Whether a folder has one of the named images, with or without the folders in the name or its suffix."""
    if not folder.is_dir():
        return False
    base_names = [name.rpartition("/")[2] for name in names]
    if any(name and (folder / name).is_file() for name in (*names, *base_names)):
        return True
    without_suffix = {name for name in base_names if "." not in name and name}
    return bool(without_suffix) and any(os.path.splitext(name)[0] in without_suffix for name in os.listdir(folder))
