"""Which CSV tables make up a data set, and in which folders their pictures may lie.

Recognised: tables of boxes (`csv_table.py`) in the folder, in `annotations/`, `labels/`, `data/` or `csv/`, or one in
each of `train/`, `valid/`, `test/`. A table whose pictures are not in the folders beside it is found, but unsure: a
data set elsewhere is preferred. Not here: the rows (`csv.py`).
"""

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from stoker.data.formats.csv_table import HEAD_BYTES, complaint, layout_of, rows_of
from stoker.data.formats.tables import (
    SPLIT_WORDS,
    SPLITS,
    Found,
    Part,
    folders_below,
    picture_folders,
    pictures_of_split,
    split_folders,
    split_in_name,
    subfolders,
    without_annotations,
)
from stoker.errors import DataError

TABLE_FOLDERS = ("annotations", "labels", "data", "csv")
MOST_MISSES = 3
"""Tables whose fault is described."""
PROBES = 16
"""Rows whose pictures are looked for, to see whether these are where the table points."""


def find(folder: Path) -> Found | None:
    """The tables in a folder, or None. Raises DataError when several fit one split."""
    below = subfolders(folder)
    for place in (folder, *(below[name] for name in TABLE_FOLDERS if name in below)):
        if tables := _tables(place):
            return _found(folder, _one_per_split(place, tables))
    parts: list[tuple[str | None, Path]] = []
    for split, path in split_folders(folder):
        if tables := _tables(path):
            if len(tables) > 1:
                raise _several(path, tables, split)
            parts.append((split, tables[0]))
    return _found(folder, (parts, [])) if parts else None


def from_file(path: Path) -> Found:
    """The data set of a single table. Raises DataError when it is no table of boxes."""
    if layout_of(path) is None:
        raise DataError(
            "The file is not a table of boxes.",
            place=path,
            cause=complaint(path),
            choices=["filename,class,xmin,ymin,xmax,ymax", "filename,class,x,y,width,height"],
            fix="give the columns such names, in any order",
        )
    root = path.parent.parent if path.parent.name.lower() in TABLE_FOLDERS else path.parent
    return _found(root, ([(split_in_name(path.stem), path)], []))


def _tables(folder: Path) -> list[Path]:
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() == ".csv" and path.is_file())
    return [path for path in files if not path.name.startswith(".") and layout_of(path) is not None]


def near_misses(folder: Path) -> Iterator[str]:
    """Why files of a folder that are called *.csv are no tables of boxes, in words."""
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() == ".csv" and path.is_file())
    for path in files[:MOST_MISSES]:
        yield f"{path.name} is no table of boxes: {complaint(path)}"


def _one_per_split(place: Path, tables: list[Path]) -> tuple[list[tuple[str | None, Path]], list[str]]:
    by_split: dict[str | None, list[Path]] = {}
    for path in tables:
        by_split.setdefault(split_in_name(path.stem), []).append(path)
    left_out = by_split.pop(None, []) if len(by_split) > 1 else []
    for split, paths in by_split.items():
        if len(paths) > 1:
            raise _several(place, paths, split)
    notes = [f"not read: {', '.join(path.name for path in left_out)}"] if left_out else []
    return [(split, by_split[split][0]) for split in (*SPLITS, None) if split in by_split], notes


def _several(place: Path, tables: list[Path], split: str | None) -> DataError:
    return DataError(
        f"{len(tables)} tables could be the annotations" + (f" of the {split} split." if split else "."),
        place=place,
        choices=[path.name for path in tables],
        fix="name one of the files instead of the folder, or move the others away",
    )


def _found(folder: Path, chosen: tuple[list[tuple[str | None, Path]], list[str]]) -> Found:
    parts, notes = [], list(chosen[1])
    sure = False
    for split, path in chosen[0]:
        places = list(dict.fromkeys(_near(path, folder, split)))
        names = _first_names(path)
        here = any(_holds(place, names) for place in (folder, *places))
        if not here:
            places += [place for place in folders_below(folder) if _holds(place, names)]
        sure = sure or here
        parts.append(Part(split=split, annotations=path, pictures=tuple(dict.fromkeys(places))))
    if parts[0].annotations.parent != folder and parts[0].annotations.parent.name.lower() in SPLIT_WORDS:
        notes += without_annotations(folder, parts)
    names_of_tables = ", ".join(str(path.relative_to(folder)) for _, path in chosen[0])
    return Found(
        format="csv",
        layout=f"CSV ({names_of_tables})",
        root=folder,
        parts=tuple(parts),
        notes=tuple(notes),
        sure=sure,
    )


def _near(table: Path, root: Path, split: str | None) -> Iterator[Path]:
    """Folders beside a table in which its pictures may lie, those named after its split first."""
    bases = dict.fromkeys((table.parent, root))
    for base in bases:
        yield from pictures_of_split(base, split) if split is not None else ()
    for base in bases:
        yield from picture_folders(base)
    for base in bases:
        named = [(split_in_name(name), path) for h in picture_folders(base) for name, path in subfolders(h).items()]
        for word, path in named:
            if word is not None:
                yield path
                yield from picture_folders(path)


def _first_names(table: Path) -> list[str]:
    layout = layout_of(table)
    if layout is None:
        return []
    rows = rows_of(table, layout, most_bytes=HEAD_BYTES)
    values = (row[layout.file] for _, row in rows if layout.file < len(row))
    return [name.replace("\\", "/") for name in islice(values, PROBES)]


def _holds(folder: Path, names: list[str]) -> bool:
    """Whether a folder has a picture that a table names, with or without folders in the name, or without its ending."""
    if not folder.is_dir():
        return False
    bare = [name.rpartition("/")[2] for name in names]
    if any(name and (folder / name).is_file() for name in (*names, *bare)):
        return True
    without = {name for name in bare if "." not in name and name}
    return bool(without) and any(os.path.splitext(name)[0] in without for name in os.listdir(folder))
