"""Which CSV tables make up a data set, and in which folders their images may lie.

Recognised: tables of boxes (`csv_table.py`) in the folder, in `annotations/`, `labels/`, `data/` or `csv/`, or one in
each of `train/`, `valid/`, `test/`. A table whose images are not in the folders beside it is found, but unsure: a
data set elsewhere is preferred. Not here: the rows (`csv.py`).
"""

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from stoker.data.formats.csv_table import HEAD_BYTES, detect_csv_layout, explain_rejection, iter_rows
from stoker.data.formats.tables import (
    SPLIT_BY_NAME,
    SPLITS,
    DatasetLayout,
    SplitFiles,
    check_unannotated_splits,
    iter_dirs_below,
    iter_split_dirs,
    iter_split_image_dirs,
    list_image_dirs,
    list_subdirs,
    split_from_name,
)
from stoker.errors import DataError

TABLE_DIRS = ("annotations", "labels", "data", "csv")
MAX_NEAR_MISSES = 3
"""Tables whose fault is described."""
MAX_PROBES = 16
"""Rows whose images are looked for, to see whether these are where the table points."""


def find(folder: Path) -> DatasetLayout | None:
    """The tables in a folder, or None. Raises DataError when several fit one split."""
    subdirs = list_subdirs(folder)
    for directory in (folder, *(subdirs[name] for name in TABLE_DIRS if name in subdirs)):
        if tables := _list_tables(directory):
            return _make_layout(folder, _choose_per_split(directory, tables))
    parts: list[tuple[str | None, Path]] = []
    for split, path in iter_split_dirs(folder):
        if tables := _list_tables(path):
            if len(tables) > 1:
                raise _ambiguous_tables_error(path, tables, split)
            parts.append((split, tables[0]))
    return _make_layout(folder, (parts, [])) if parts else None


def from_file(path: Path) -> DatasetLayout:
    """The data set of a single table. Raises DataError when it is no table of boxes."""
    if detect_csv_layout(path) is None:
        raise DataError(
            "The file is not a table of boxes.",
            location=path,
            cause=explain_rejection(path),
            choices=["filename,class,xmin,ymin,xmax,ymax", "filename,class,x,y,width,height"],
            fix="give the columns such names, in any order",
        )
    root = path.parent.parent if path.parent.name.lower() in TABLE_DIRS else path.parent
    return _make_layout(root, ([(split_from_name(path.stem), path)], []))


def _list_tables(folder: Path) -> list[Path]:
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() == ".csv" and path.is_file())
    return [path for path in files if not path.name.startswith(".") and detect_csv_layout(path) is not None]


def describe_near_misses(folder: Path) -> Iterator[str]:
    """Why files of a folder that are called *.csv are no tables of boxes, in words."""
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() == ".csv" and path.is_file())
    for path in files[:MAX_NEAR_MISSES]:
        yield f"{path.name} is no table of boxes: {explain_rejection(path)}"


def _choose_per_split(folder: Path, tables: list[Path]) -> tuple[list[tuple[str | None, Path]], list[str]]:
    by_split: dict[str | None, list[Path]] = {}
    for path in tables:
        by_split.setdefault(split_from_name(path.stem), []).append(path)
    ignored = by_split.pop(None, []) if len(by_split) > 1 else []
    for split, paths in by_split.items():
        if len(paths) > 1:
            raise _ambiguous_tables_error(folder, paths, split)
    notes = [f"not read: {', '.join(path.name for path in ignored)}"] if ignored else []
    return [(split, by_split[split][0]) for split in (*SPLITS, None) if split in by_split], notes


def _ambiguous_tables_error(folder: Path, tables: list[Path], split: str | None) -> DataError:
    return DataError(
        f"{len(tables)} tables could be the annotations" + (f" of the {split} split." if split else "."),
        location=folder,
        choices=[path.name for path in tables],
        fix="name one of the files instead of the folder, or move the others away",
    )


def _make_layout(folder: Path, chosen: tuple[list[tuple[str | None, Path]], list[str]]) -> DatasetLayout:
    parts, notes = [], list(chosen[1])
    is_certain = False
    for split, path in chosen[0]:
        image_dirs = list(dict.fromkeys(_iter_nearby_dirs(path, folder, split)))
        names = _read_first_names(path)
        is_nearby = any(_has_images(directory, names) for directory in (folder, *image_dirs))
        if not is_nearby:
            image_dirs += [directory for directory in iter_dirs_below(folder) if _has_images(directory, names)]
        is_certain = is_certain or is_nearby
        parts.append(SplitFiles(split=split, annotations=path, image_dirs=tuple(dict.fromkeys(image_dirs))))
    if parts[0].annotations.parent != folder and parts[0].annotations.parent.name.lower() in SPLIT_BY_NAME:
        notes += check_unannotated_splits(folder, parts)
    names_of_tables = ", ".join(str(path.relative_to(folder)) for _, path in chosen[0])
    return DatasetLayout(
        format="csv",
        description=f"CSV ({names_of_tables})",
        root=folder,
        parts=tuple(parts),
        notes=tuple(notes),
        is_certain=is_certain,
    )


def _iter_nearby_dirs(table: Path, root: Path, split: str | None) -> Iterator[Path]:
    """Folders beside a table in which its images may lie, those named after its split first."""
    base_dirs = dict.fromkeys((table.parent, root))
    for base in base_dirs:
        yield from iter_split_image_dirs(base, split) if split is not None else ()
    for base in base_dirs:
        yield from list_image_dirs(base)
    for base in base_dirs:
        split_dirs = [
            (split_from_name(name), path) for h in list_image_dirs(base) for name, path in list_subdirs(h).items()
        ]
        for split_name, path in split_dirs:
            if split_name is not None:
                yield path
                yield from list_image_dirs(path)


def _read_first_names(table: Path) -> list[str]:
    layout = detect_csv_layout(table)
    if layout is None:
        return []
    rows = iter_rows(table, layout, max_bytes=HEAD_BYTES)
    values = (row[layout.file_column] for _, row in rows if layout.file_column < len(row))
    return [name.replace("\\", "/") for name in islice(values, MAX_PROBES)]


def _has_images(folder: Path, names: list[str]) -> bool:
    """Whether a folder has an image that a table names, with or without folders in the name, or without its ending."""
    if not folder.is_dir():
        return False
    base_names = [name.rpartition("/")[2] for name in names]
    if any(name and (folder / name).is_file() for name in (*names, *base_names)):
        return True
    without_suffix = {name for name in base_names if "." not in name and name}
    return bool(without_suffix) and any(os.path.splitext(name)[0] in without_suffix for name in os.listdir(folder))
