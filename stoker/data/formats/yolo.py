"""YOLO's text files: reads a data set of one label file per image into columns.

A row is `class x y width height` in shares of the upright image, x and y its centre. Rows of a segmentation data set
(`class x1 y1 x2 y2 x3 y3 …`) and of oriented boxes become the box around their points; a sixth number is the confidence
of a prediction, and is not used. A row that cannot be read is left out and named; the rest of its file, and its
image, stay. The sizes come from the images' headers (`image_sizes.py`).
Format: https://docs.ultralytics.com/datasets/detect/.
"""

import math
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stoker.data.formats.image_sizes import map_in_threads, read_sizes
from stoker.data.formats.names import resolve_names
from stoker.data.formats.tables import SPLITS, UNASSIGNED, AnnotationTable, DatasetLayout, FolderTable
from stoker.data.formats.yolo_files import (
    is_image_name,
    is_label_file,
    list_label_files,
    match_labels,
    read_image_list,
    resolve_base_dirs,
)
from stoker.data.formats.yolo_yaml import NAMES_FILES, YAML_SUFFIXES, read_definition, read_names
from stoker.data.validation.problems import ProblemCollector
from stoker.errors import DataError

NORMALIZED_TOLERANCE = 0.1
"""How far beyond 0 … 1 the centre and the sides of a box may be. Rounding and tools that draw over the edge reach a few
percent; what was written in pixels by mistake is above 1.1, but for boxes in the first pixel."""
MAX_CLASSES = 10_000
"""Where nothing says how many classes there are, a larger number is a defect of the row."""


class _LabelRow(NamedTuple):
    image_index: int
    label: int
    xyxy: tuple[float, float, float, float]
    """x1, y1, x2, y2 in shares of the image."""
    line: int


@dataclass
class _RowFormat:
    """What the data set as a whole says about its rows."""

    class_names: tuple[str, ...] | None
    num_keypoint_values: int
    notes: list[str]
    other_row_kinds: Counter[str] = field(default_factory=Counter)
    """How many rows were something else than a box."""


class _ImageFiles(NamedTuple):
    folder: Path
    name: str
    split: int
    label_file: Path | None


def read(layout: DatasetLayout, problems: ProblemCollector) -> AnnotationTable:
    """Reads all label files and the headers of all images. Raises DataError when the classes cannot be known."""
    row_format = _read_row_format(layout)
    images = _list_images(layout, problems)
    texts = map_in_threads(lambda image: b"" if image.label_file is None else image.label_file.read_bytes(), images)
    rows = [
        row
        for number, (image, text) in enumerate(zip(images, texts, strict=True))
        if image.label_file is not None
        for row in _parse_rows(number, text, _display_path(image.label_file, layout.root), row_format, problems)
    ]
    size, unreadable = read_sizes([image.folder / image.name for image in images])
    for number, count in Counter(row.image_index for row in rows if row.image_index in unreadable).items():
        image = images[number]
        reason = f"{_display_path(image.folder / image.name, layout.root)}: {unreadable[number]}"
        problems.add("box-of-unreadable-image", reason, count)
    rows = [row for row in rows if row.image_index not in unreadable]
    image_indices = np.array([row.image_index for row in rows], np.int64)
    normalized_boxes = np.array([row.xyxy for row in rows], np.float64).reshape(-1, 4)
    class_names = row_format.class_names
    if class_names is None:
        class_names = tuple(f"class {number}" for number in range(max((row.label for row in rows), default=-1) + 1))
        row_format.notes.append("nothing names the classes: called class 0, class 1, …; a data.yaml with `names` would")
    folders = FolderTable(layout.root)
    folder = [folders.add(str(image.folder)) for image in images]
    return AnnotationTable(
        class_names=list(class_names),
        category_ids=list(range(len(class_names))),
        folders=folders.paths(),
        folder_index=np.array(folder, np.int32),
        file_names=[image.name for image in images],
        split=np.array([image.split for image in images], np.int8),
        original_size=size,
        image_id=np.arange(len(images), dtype=np.int64),
        image_index=image_indices,
        boxes=normalized_boxes * size[image_indices][:, [1, 0, 1, 0]],
        labels=np.array([row.label for row in rows], np.int32),
        crowd=np.zeros(len(rows), np.bool_),
        area=np.full(len(rows), np.nan),
        box_id=np.array([row.line for row in rows], np.int64),
        box_id_kind="line",
        sizes_from_headers=True,
        notes=[
            *layout.notes,
            *row_format.notes,
            *(f"{count:,} {description}" for description, count in row_format.other_row_kinds.items()),
        ],
    )


def _read_row_format(layout: DatasetLayout) -> _RowFormat:
    """The classes, and what rows hold, from the files that describe the set."""
    class_names, num_classes, num_keypoint_values, notes = None, None, 0, []
    metadata_files = list(layout.metadata_files)
    if metadata_files and metadata_files[0].suffix.lower() in (*YAML_SUFFIXES, ".data"):
        definition = read_definition(metadata_files.pop(0))
        class_names, num_classes, num_keypoint_values = (
            definition.class_names,
            definition.num_classes,
            definition.num_keypoint_values,
        )
    if class_names is None and metadata_files:
        class_names = read_names(metadata_files[0])
        for other in metadata_files[1:]:
            if read_names(other) != class_names:
                raise DataError(
                    "Two lists of class names disagree.",
                    location=f"{metadata_files[0]} and {other}",
                    cause=f"{', '.join(class_names[:10])}; {', '.join(read_names(other)[:10])}",
                    fix="delete the wrong one, or write a data.yaml with `names`",
                )
        notes.append(f"classes: {_display_path(metadata_files[0], layout.root)}")
    if class_names is None and num_classes:
        class_names = tuple(f"class {number}" for number in range(num_classes))
        notes.append(f"the {num_classes} classes have no names: called class 0, class 1, …")
    elif class_names is not None and num_classes is not None and num_classes != len(class_names):
        notes.append(f"nc says {num_classes} classes, names has {len(class_names)}: names is believed")
    return _RowFormat(class_names, num_keypoint_values, notes)


def _list_images(layout: DatasetLayout, problems: ProblemCollector) -> list[_ImageFiles]:
    """All images with their label files, in the order of the parts; by name where no list orders them."""
    names_by_list: dict[Path, dict[Path, list[str]]] = {}
    label_names: dict[Path, list[str]] = {}
    used: set[Path] = set()
    images = []
    for part in layout.parts:
        if part.image_list is not None and part.image_list not in names_by_list:
            names_by_list[part.image_list] = read_image_list(part.image_list, _read_base_dirs(layout))
        folder = part.image_dirs[0]
        names = (
            _list_image_names(folder)
            if part.image_list is None
            else _repair_listed_names(names_by_list[part.image_list][folder], folder, problems)
        )
        if part.annotations not in label_names:
            label_names[part.annotations] = list_label_files(part.annotations)
        label_by_image = match_labels(names, label_names[part.annotations])
        split = UNASSIGNED if part.split is None else SPLITS.index(part.split)
        for name in names:
            label_file = part.annotations / label_by_image[name] if name in label_by_image else None
            if label_file is None:
                problems.add("no-label-file", _display_path(folder / name, layout.root))
            images.append(_ImageFiles(folder, name, split, label_file))
        shared = {label_file for label_file, count in Counter(label_by_image.values()).items() if count > 1}
        for name in names if shared else ():
            if label_by_image.get(name) in shared and part.annotations / label_by_image[name] not in used:
                label_location = _display_path(part.annotations / label_by_image[name], layout.root)
                problems.add("shared-label-file", f"{_display_path(folder / name, layout.root)}: {label_location}")
        used.update(part.annotations / label_name for label_name in label_by_image.values())
    _report_unmatched_labels(layout, label_names, used, problems)
    return images


def _read_base_dirs(layout: DatasetLayout) -> tuple[Path, ...]:
    definitions = [path for path in layout.metadata_files[:1] if path.suffix.lower() in (*YAML_SUFFIXES, ".data")]
    return resolve_base_dirs(read_definition(definitions[0]))[0] if definitions else ()


def _list_image_names(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if is_image_name(entry.name))


def _repair_listed_names(names: list[str], folder: Path, problems: ProblemCollector) -> list[str]:
    """The names of a list, as the files are called: their headers are read before `names.mend` could set them right."""
    files = resolve_names(folder, names)
    for written_name, file in files.items():
        problems.add("wrong-case-name", f"{written_name!r}: the file is {str(folder / file)!r}")
    return [files.get(name, name) for name in names]


def _report_unmatched_labels(
    layout: DatasetLayout, label_names: dict[Path, list[str]], used: set[Path], problems: ProblemCollector
) -> None:
    """Reports label files without an image, where the images are all those of a folder and not those of a list."""
    listed = {part.annotations for part in layout.parts if part.image_list is not None}
    for folder, names in label_names.items():
        for file in [] if folder in listed else [folder / name for name in names if name not in NAMES_FILES]:
            if file not in used and is_label_file(file):
                problems.add("label-without-image", _display_path(file, layout.root))


def _parse_rows(
    image_index: int, text: bytes, location: str, row_format: _RowFormat, problems: ProblemCollector
) -> list[_LabelRow]:
    """The rows of a label file that can be used; the others are reported with their line."""
    rows = []
    for line, row_bytes in enumerate(text.removeprefix(b"\xef\xbb\xbf").splitlines(), 1):
        fields = row_bytes.split()
        if not fields:
            continue
        try:
            label, *values = [float(value) for value in fields]
        except ValueError:
            problems.add("malformed-row", f"{location}:{line}: {_quote(row_bytes)}, not all of it numbers")
            continue
        if not (label.is_integer() and label >= 0):
            problems.add("malformed-row", f"{location}:{line}: {_quote(row_bytes)}, class {label:g}")
            continue
        box = _parse_box(values, row_format)
        if box is None:
            problems.add(
                "malformed-row", f"{location}:{line}: {_quote(row_bytes)}, {len(values)} numbers after the class"
            )
            continue
        if label >= (MAX_CLASSES if row_format.class_names is None else len(row_format.class_names)):
            hint = "" if row_format.class_names is None else f", the classes are 0 … {len(row_format.class_names) - 1}"
            problems.add("unknown-class", f"{location}:{line}: class {label:g}{hint}")
            continue
        if not _is_normalized(*box):
            problems.add("not-normalized", f"{location}:{line}: {_quote(row_bytes)}")
            continue
        rows.append(_LabelRow(image_index, int(label), box, line))
    return rows


def _parse_box(values: list[float], row_format: _RowFormat) -> tuple[float, float, float, float] | None:
    """x1, y1, x2, y2 of the numbers after the class; None where their count fits no kind of row."""
    num_values = len(values)
    if row_format.num_keypoint_values and num_values == 4 + row_format.num_keypoint_values:
        row_format.other_row_kinds["rows have keypoints: their boxes are read"] += 1
    elif num_values == 5:
        row_format.other_row_kinds["rows have a sixth number, a confidence: it is not used"] += 1
    elif num_values >= 6 and num_values % 2 == 0:
        row_format.other_row_kinds["rows are polygons: the boxes around them are used"] += 1
        return min(values[::2]), min(values[1::2]), max(values[::2]), max(values[1::2])
    elif num_values != 4:
        return None
    x, y, width, height = values[:4]
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _is_normalized(x1: float, y1: float, x2: float, y2: float) -> bool:
    """Whether centre and sides of a box can be shares of an image; NaN and infinity are for `clean.py` to report."""
    if not all(map(math.isfinite, (x1, y1, x2, y2))):
        return True
    x, y = (x1 + x2) / 2, (y1 + y2) / 2
    return min(x, y) >= -NORMALIZED_TOLERANCE and max(x, y, x2 - x1, y2 - y1) <= 1 + NORMALIZED_TOLERANCE


def _quote(row_bytes: bytes) -> str:
    return repr(row_bytes[:60].decode(errors="replace"))


def _display_path(path: Path, root: Path) -> str:
    """A path as messages show it: relative to the root where it is inside."""
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
