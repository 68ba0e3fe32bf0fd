"""Open Images CSV: reads the tables of boxes of Open Images V4 to V7, for the images that are there.

The tables list up to 1.7 million images, of which most users have a part, so rows of other images are left out, and a
note counts them. Class names are read from `class-descriptions-boxable.csv`. Group boxes are crowd boxes.
Recognized: `*-annotations-bbox.csv` with the images anywhere below the folder (also of OIDv4_ToolKit), and FiftyOne's
`train/labels/detections.csv`. Format: https://storage.googleapis.com/openimages/web/download_v7.html#data-formats.
"""

import csv
import io
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from stoker import regular_files
from stoker.data.formats.annotated_dirs import read_head
from stoker.data.formats.image_locator import iter_nearby_dirs
from stoker.data.formats.table_builder import Box, ImageFile, build_table, sort_class_names
from stoker.data.formats.tables import (
    MAX_SEARCHED_DIRS,
    AnnotationTable,
    DatasetLayout,
    SplitFiles,
    is_image_name,
    iter_split_dirs,
    list_subdirs,
    split_from_name,
)
from stoker.data.validation.problems import ProblemCollector
from stoker.errors import DataError

TABLE_DIRS = ("annotations", "labels", "csv", "csv_folder", "metadata")
COLUMNS = ("ImageID", "LabelName", "XMin", "XMax", "YMin", "YMax")
DESCRIPTIONS = ("class-description", "classes")
"""How the names of files of class names begin, or continue."""


def find(folder: Path) -> DatasetLayout | None:
    """The Open Images tables in a folder, or None."""
    for directory in (folder, *_list_table_dirs(folder)):
        if tables := _list_tables(directory):
            return _make_layout(folder, [(split_from_name(table.stem), table) for table in tables])
    tables_by_split = [
        (split, table)
        for split, path in iter_split_dirs(folder)
        for directory in (path, *_list_table_dirs(path))
        for table in _list_tables(directory)
    ]
    return _make_layout(folder, tables_by_split) if tables_by_split else None


def from_file(path: Path) -> DatasetLayout | None:
    """The data set of a single table; None if it is another table."""
    root = path.parent.parent if path.parent.name.lower() in TABLE_DIRS else path.parent
    return _make_layout(root, [(split_from_name(path.stem), path)]) if is_open_images(path) else None


def read(layout: DatasetLayout, problems: ProblemCollector) -> AnnotationTable:
    """Reads all tables. Raises DataError if none of their images is there."""
    notes, images = list(layout.notes), _find_images(layout)
    names = _read_class_names(layout.metadata_files)
    if not names:
        notes.append("there is no class-descriptions-boxable.csv: the classes are called /m/…, as in the tables")
    files: list[ImageFile] = []
    boxes: list[Box] = []
    bad_boxes: list[int] = []
    for part in layout.parts:
        index_by_id: dict[str, int] = {}
        absent_id, num_absent = "", 0
        location = os.path.relpath(part.annotations, layout.root)
        for line, (image_id, label, *values, is_group) in _iter_rows(part.annotations):
            if image_id not in images:
                num_absent += image_id != absent_id  # the rows of an image are together
                absent_id = image_id
                continue
            if image_id not in index_by_id:
                index_by_id[image_id] = len(files)
                files.append(ImageFile(*images[image_id], part.split_index))
            try:
                x1, x2, y1, y2 = (float(value) for value in values)
            except ValueError:
                problems.add("malformed-row", f"{location}:{line}: {', '.join(values)}, not four numbers")
                bad_boxes.append(index_by_id[image_id])
                continue
            name, xyxy = names.get(label, label), (x1, y1, x2, y2)
            boxes.append(Box(index_by_id[image_id], name, xyxy, line, is_normalized=True, is_crowd=is_group == "1"))
        if num_absent:
            total = num_absent + len(index_by_id)
            notes.append(f"{location}: {len(index_by_id):,} of its {total:,} images are here; the others are left out")
    if not files:
        raise DataError(
            "None of the images of the tables is here.",
            location=layout.parts[0].annotations,
            cause=f"below {layout.root} is no image that is called like an ImageID, as 000002b66c9c498e.jpg",
            fix="put the images there; `fiftyone zoo datasets load open-images-v7 --split validation` downloads some",
        )
    return build_table(
        layout, files, boxes, sort_class_names, problems, box_id_kind="line", notes=notes, bad_boxes=bad_boxes
    )


def _list_table_dirs(folder: Path) -> list[Path]:
    subdirs = list_subdirs(folder)
    return [subdirs[name] for name in TABLE_DIRS if name in subdirs]


def _list_csv(folder: Path) -> list[Path]:
    names = (name for name in os.listdir(folder) if name.lower().endswith(".csv") and not name.startswith("."))
    return [folder / name for name in sorted(names)]


def _list_tables(folder: Path) -> list[Path]:
    return [path for path in _list_csv(folder) if is_open_images(path)]


def is_open_images(path: Path) -> bool:
    """Whether a file is a table of boxes of Open Images, by its header."""
    header = read_head(path).partition(b"\n")[0].decode(errors="replace").strip().split(",")
    return set(COLUMNS) <= set(header) and header[0] == "ImageID"


def _make_layout(root: Path, tables: Sequence[tuple[str | None, Path]]) -> DatasetLayout:
    near = dict.fromkeys(path for _, table in tables for path in (table.parent, table.parent.parent, root))
    dirs = [path for base in near if base.is_relative_to(root) for path in (base, *_list_table_dirs(base))]
    csv_files = [path for directory in dict.fromkeys(dirs) for path in _list_csv(directory)]
    descriptions = [path for path in csv_files if any(word in path.name.lower() for word in DESCRIPTIONS)]
    names = ", ".join(table.name for _, table in tables[:3])
    parts = [
        SplitFiles(
            split=split,
            annotations=table,
            image_dirs=tuple(dict.fromkeys(iter_nearby_dirs(table.parent, root, split))),
        )
        for split, table in tables
    ]
    return DatasetLayout(
        format="openimages",
        description=f"Open Images ({names})",
        root=root,
        parts=tuple(parts),
        metadata_files=tuple(dict.fromkeys(descriptions)),
    )


def _find_images(layout: DatasetLayout) -> dict[str, tuple[Path, str]]:
    """ImageID → folder and name, of all images below the root."""
    images: dict[str, tuple[Path, str]] = {}
    for path, _, names in islice(os.walk(layout.root), MAX_SEARCHED_DIRS):
        for name in names:
            if is_image_name(name):
                images.setdefault(os.path.splitext(name)[0], (Path(path), name))
    return images


def _read_class_names(files: Sequence[Path]) -> dict[str, str]:
    """LabelName → display name."""
    rows = (row for file in files for _, row in _iter_csv(file))
    return {row[0]: row[1].strip() for row in rows if len(row) == 2 and row[0].startswith("/")}


def _iter_rows(table: Path) -> Iterator[tuple[int, list[str]]]:
    """(line, [ImageID, LabelName, XMin, XMax, YMin, YMax, IsGroupOf or ""]) of every row."""
    rows = _iter_csv(table)
    _, header = next(rows, (1, []))
    if not set(COLUMNS) <= set(header):
        raise DataError("The file is not a table of Open Images any more.", location=table, fix="restore it")
    columns = [header.index(name) if name in header else len(header) for name in (*COLUMNS, "IsGroupOf")]
    for line, row in rows:
        padded = row + [""] * (len(header) + 1 - len(row))
        yield line, [padded[column] for column in columns]


def _iter_csv(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line, values) of every row that is not empty."""
    file = regular_files.open_file(path, max_bytes=regular_files.MAX_ANNOTATION_BYTES)
    with io.TextIOWrapper(file, encoding="utf-8-sig", errors="replace", newline="") as lines:
        reader = csv.reader(lines)
        try:
            yield from ((reader.line_num, row) for row in reader if row)
        except csv.Error as error:
            location = f"{path}:{reader.line_num}"
            fix = "download it again"
            raise DataError("A table cannot be read.", location=location, cause=str(error), fix=fix) from error
