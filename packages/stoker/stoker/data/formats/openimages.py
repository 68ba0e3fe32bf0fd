"""Open Images CSV: reads the tables of boxes of Open Images V4 to V7, for the images that are there.

The tables list up to 1.7 million images, of which most users have a part, so rows of other images are left out, and a
note counts them. Class names are read from `class-descriptions-boxable.csv`. Group boxes are crowd boxes.
Format: https://storage.googleapis.com/openimages/web/download_v7.html#data-formats.
"""

import csv
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from stoker.data.formats import folders
from stoker.data.formats.images import Box, ImageFile, TableBuilder
from stoker.data.formats.tables import AnnotationTable, DatasetLayout, SplitFiles
from stoker.data.validation.problems import ProblemCollector
from stoker_watch import regular_files
from stoker_watch.errors import DataError, make_error

TABLE_DIRS = ("annotations", "labels", "csv", "csv_folder", "metadata")
COLUMNS = ("ImageID", "LabelName", "XMin", "XMax", "YMin", "YMax")
DESCRIPTIONS = ("class-description", "classes")
"""How the names of files of class names begin, or continue."""


def recognize(path: Path) -> DatasetLayout | None:
    """Returns the data set of a table, or of the tables in a folder; None if there are none."""
    if path.is_file():
        root = folders.root_of(path, TABLE_DIRS)
        return _make_layout(root, [folders.file_part(path)]) if is_open_images(path) else None

    def list_tables(folder: Path) -> Iterator[Path]:
        return filter(is_open_images, folders.list_files(folder, ".csv"))

    parts = folders.find_files(path, TABLE_DIRS, list_tables)
    return _make_layout(path, parts) if parts else None


def is_open_images(path: Path) -> bool:
    """Returns whether a file is a table of boxes of Open Images, by its header."""
    header = folders.read_head(path).partition(b"\n")[0].decode(errors="replace").strip().split(_delimiter(path))
    return set(COLUMNS) <= set(header) and header[0] == "ImageID"


def _delimiter(table: Path) -> str:
    """Returns the semicolon for a table that Excel has written in a country with decimal commas."""
    return ";" if b";" in folders.read_head(table).partition(b"\n")[0] else ","


def _make_layout(root: Path, parts: Sequence[SplitFiles]) -> DatasetLayout:
    tables = [part.annotations for part in parts]
    near = folders.unique(path for table in tables for path in (table.parent, table.parent.parent, root))
    dirs = folders.unique(
        path for base in near if base.is_relative_to(root) for path in (base, *folders.named_subdirs(base, TABLE_DIRS))
    )
    files = [path for directory in dirs for path in folders.list_files(directory, ".csv")]
    image_dirs = [(part, folders.iter_nearby_dirs(part.annotations.parent, root, part.split)) for part in parts]
    return DatasetLayout(
        format="openimages",
        description=f"Open Images ({', '.join(table.name for table in tables[:3])})",
        root=root,
        parts=tuple(replace(part, image_dirs=folders.unique(near_dirs)) for part, near_dirs in image_dirs),
        metadata_files=tuple(path for path in files if any(word in path.name.lower() for word in DESCRIPTIONS)),
    )


def read(layout: DatasetLayout, problems: ProblemCollector) -> AnnotationTable:
    """Reads all tables. Raises DataError if none of their images is there."""
    builder, paths = TableBuilder(layout, problems, box_id_kind="line"), _find_images(layout)
    rows = (row for file in layout.metadata_files for _, row in _iter_csv(file))  # LabelName, display name
    names = {row[0]: row[1].strip() for row in rows if len(row) == 2 and row[0].startswith("/")}
    if not names:
        called = "the classes are called /m/…, as in the tables"
        builder.notes.append(f"there is no class-descriptions-boxable.csv: {called}")
    for part in layout.parts:
        index_by_id: dict[str, int] = {}
        absent_id, num_absent = "", 0
        location = os.path.relpath(part.annotations, layout.root)
        for line, (image_id, label, *values, is_group) in _iter_rows(part.annotations):
            image_id = _strip_suffix(image_id)
            if image_id not in paths:
                num_absent += image_id != absent_id  # the rows of an image are together
                absent_id = image_id
                continue
            if image_id not in index_by_id:
                index_by_id[image_id] = builder.add_image(ImageFile(*paths[image_id], part.split_index))
            image_index, name = index_by_id[image_id], names.get(label, label)
            try:
                x1, x2, y1, y2 = (float(value.replace(",", ".")) for value in values)
            except ValueError:
                problems.add("malformed-row", f"{location}:{line}: {', '.join(values)}, not four numbers")
                builder.bad_boxes.append(image_index)
                continue
            builder.boxes.append(Box(image_index, name, (x1, y1, x2, y2), line, True, is_group == "1"))
        if num_absent:
            total, num_here = num_absent + len(index_by_id), len(index_by_id)
            builder.notes.append(f"{location}: {num_here:,} of its {total:,} images are here; the others are left out")
    if not builder.images:
        table = layout.parts[0].annotations
        example = next((row[0] for _, row in _iter_rows(table)), "000002b66c9c498e")
        raise make_error(DataError, "openimages-without-images", table, root=layout.root, example=example)
    return builder.build()


def _find_images(layout: DatasetLayout) -> dict[str, tuple[Path, str]]:
    """ImageID → folder and name, of all images below the root."""
    images: dict[str, tuple[Path, str]] = {}
    for path, dirs, names in os.walk(layout.root):
        dirs.sort()  # which copy of an image is taken must not depend on the file system
        for name in sorted(names):
            if folders.is_image_name(name):
                images.setdefault(_strip_suffix(name), (Path(path), name))
    return images


def _strip_suffix(name: str) -> str:
    """Returns an ImageID, which some tables write as the name of the file: `abc.jpg`."""
    return os.path.splitext(name)[0] if folders.is_image_name(name) else name


def _iter_rows(table: Path) -> Iterator[tuple[int, list[str]]]:
    """Yields (line, [ImageID, LabelName, XMin, XMax, YMin, YMax, IsGroupOf or ""]) of every row."""
    rows = _iter_csv(table)
    _, header = next(rows, (1, []))
    if not set(COLUMNS) <= set(header):
        raise DataError("The file is not a table of Open Images any more.", location=table, fix="restore it")
    columns = [header.index(name) if name in header else len(header) for name in (*COLUMNS, "IsGroupOf")]
    for line, row in rows:
        padded = row + [""] * (len(header) + 1 - len(row))
        yield line, [padded[column] for column in columns]


def _iter_csv(path: Path) -> Iterator[tuple[int, list[str]]]:
    file = regular_files.open_file(path, max_bytes=regular_files.MAX_ANNOTATION_BYTES)
    with io.TextIOWrapper(file, encoding="utf-8-sig", errors="replace", newline="") as lines:
        yield from iter_csv(lines, path, _delimiter(path))


def iter_csv(lines: Iterable[str], path: Path, delimiter: str = ",") -> Iterator[tuple[int, list[str]]]:
    """Yields (line, values) of every row that is not empty. Raises DataError."""
    reader = csv.reader(lines, delimiter=delimiter)
    try:
        yield from ((reader.line_num, row) for row in reader if row)
    except csv.Error as error:
        raise make_error(DataError, "unreadable-table", f"{path}:{reader.line_num}", cause=str(error)) from error
