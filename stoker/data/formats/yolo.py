"""YOLO text files: reads a data set of one label file per image.

A row is `class x y width height`, normalized by width and height of the upright image; x and y are the center. Rows of
a segmentation data set (`class x1 y1 x2 y2 x3 y3 …`) and of oriented boxes become the box around their points. A sixth
number is a prediction's confidence and is not used. A row that cannot be read is dropped and reported; the rest of its
file and its image stay. The image sizes come from the headers (`image_sizes.py`).
Format: https://docs.ultralytics.com/datasets/detect/.
"""

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stoker import regular_files
from stoker.data.formats.image_sizes import map_in_threads
from stoker.data.formats.names import resolve_names
from stoker.data.formats.table_builder import Box, ImageFile, build_table
from stoker.data.formats.tables import AnnotationTable, DatasetLayout, display_path
from stoker.data.formats.yolo_files import (
    is_label_file,
    is_visible_image,
    list_label_files,
    match_labels,
    read_image_list,
    resolve_base_dirs,
)
from stoker.data.formats.yolo_yaml import NAMES_FILES, is_definition_name, read_definition, read_names
from stoker.data.validation.problems import ProblemCollector
from stoker.errors import DataError

NORMALIZED_TOLERANCE = 0.1
"""How far the center and the size of a box may exceed 0 … 1. Rounding and boxes drawn over the edge exceed it by a few
percent; values in pixels are above 1.1, except for boxes in the first pixel."""
MAX_CLASSES = 10_000
"""If the number of classes is not given, a larger class number is an error in the row."""


@dataclass
class _RowFormat:
    """What the data set as a whole says about its rows."""

    class_names: tuple[str, ...] | None
    num_keypoint_values: int
    notes: list[str]
    other_row_kinds: Counter[str] = field(default_factory=Counter)
    """Number of rows that are not plain boxes, by description."""

    def choose_class_names(self, boxes: Sequence[Box]) -> tuple[str, ...]:
        if self.class_names is not None:
            return self.class_names
        self.notes.append("the classes have no names: called class 0, class 1, …; a data.yaml with `names` sets them")
        return tuple(f"class {number}" for number in range(max((int(box.label) for box in boxes), default=-1) + 1))


def read(layout: DatasetLayout, problems: ProblemCollector) -> AnnotationTable:
    """Reads all label files and the headers of all images. Raises DataError if the classes cannot be determined."""
    row_format = _read_row_format(layout)
    images, label_files = _list_images(layout, problems)
    texts = map_in_threads(lambda file: b"" if file is None else regular_files.read_bytes(file), label_files)
    boxes: list[Box] = []
    bad_boxes: list[int] = []
    for image_index, (file, text) in enumerate(zip(label_files, texts, strict=True)):
        if file is not None:
            parsed, num_bad = _parse_rows(image_index, text, display_path(file, layout.root), row_format, problems)
            boxes += parsed
            bad_boxes += [image_index] * num_bad
    row_format.notes[:0] = layout.notes
    table = build_table(
        layout, images, boxes, row_format.choose_class_names, problems, box_id_kind="line", notes=row_format.notes,
        bad_boxes=bad_boxes,
    )  # fmt: skip
    table.notes += [f"{count:,} {description}" for description, count in row_format.other_row_kinds.items()]
    return table


def _read_row_format(layout: DatasetLayout) -> _RowFormat:
    """The classes and the content of rows, from the files that describe the data set."""
    class_names, num_classes, num_keypoint_values, notes = None, None, 0, []
    metadata_files = list(layout.metadata_files)
    if metadata_files and is_definition_name(metadata_files[0]):
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
                    "Two lists of class names differ.",
                    location=f"{metadata_files[0]} and {other}",
                    cause=f"{', '.join(class_names[:10])}; {', '.join(read_names(other)[:10])}",
                    fix="delete the wrong one, or write a data.yaml with `names`",
                )
        notes.append(f"classes: {display_path(metadata_files[0], layout.root)}")
    if class_names is None and num_classes:
        class_names = tuple(f"class {number}" for number in range(num_classes))
        notes.append(f"the {num_classes} classes have no names: called class 0, class 1, …")
    elif class_names is not None and num_classes is not None and num_classes != len(class_names):
        notes.append(f"nc is {num_classes}, but names has {len(class_names)} classes: names is used")
    return _RowFormat(class_names, num_keypoint_values, notes)


def _list_images(layout: DatasetLayout, problems: ProblemCollector) -> tuple[list[ImageFile], list[Path | None]]:
    """All images and their label files, in the order of the parts; within a part as listed, else by name."""
    names_by_list: dict[Path, dict[Path, list[str]]] = {}
    label_names: dict[Path, list[str]] = {}
    used: set[Path] = set()
    images: list[ImageFile] = []
    label_files: list[Path | None] = []
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
        for name in names:
            label_file = part.annotations / label_by_image[name] if name in label_by_image else None
            if label_file is None:
                problems.add("no-label-file", display_path(folder / name, layout.root))
            images.append(ImageFile(folder, name, part.split_index))
            label_files.append(label_file)
        shared = {label_file for label_file, count in Counter(label_by_image.values()).items() if count > 1}
        for name in names if shared else ():
            if label_by_image.get(name) in shared and part.annotations / label_by_image[name] not in used:
                label_location = display_path(part.annotations / label_by_image[name], layout.root)
                problems.add("shared-label-file", f"{display_path(folder / name, layout.root)}: {label_location}")
        used.update(part.annotations / label_name for label_name in label_by_image.values())
    _report_unmatched_labels(layout, label_names, used, problems)
    return images, label_files


def _read_base_dirs(layout: DatasetLayout) -> tuple[Path, ...]:
    definitions = [path for path in layout.metadata_files[:1] if is_definition_name(path)]
    return resolve_base_dirs(read_definition(definitions[0]))[0] if definitions else ()


def _list_image_names(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if is_visible_image(entry.name))


def _repair_listed_names(names: list[str], folder: Path, problems: ProblemCollector) -> list[str]:
    """The listed names, corrected to the file names here, because headers are read before `names.repair_names` runs."""
    files = resolve_names(folder, names)
    for written_name, file in files.items():
        problems.add("wrong-case-name", f"{written_name!r}: the file is {str(folder / file)!r}")
    return [files.get(name, name) for name in names]


def _report_unmatched_labels(
    layout: DatasetLayout, label_names: dict[Path, list[str]], used: set[Path], problems: ProblemCollector
) -> None:
    """Reports label files without an image, and images with a label file that no list of a split names."""
    listed_dirs = {part.annotations: part.image_dirs[0] for part in layout.parts if part.image_list is not None}
    for folder, names in label_names.items():
        unused = [folder / name for name in names if name not in NAMES_FILES and folder / name not in used]
        images = _list_image_names(listed_dirs[folder]) if folder in listed_dirs and unused else []
        image_by_stem = {os.path.splitext(name)[0]: name for name in images}
        for file in unused:
            if file.stem in image_by_stem:
                image = listed_dirs[folder] / image_by_stem[file.stem]
                problems.add("not-in-a-split", os.path.relpath(image, layout.root))
            elif folder not in listed_dirs and is_label_file(file):
                problems.add("label-without-image", display_path(file, layout.root))


def _parse_rows(
    image_index: int, text: bytes, location: str, row_format: _RowFormat, problems: ProblemCollector
) -> tuple[list[Box], int]:
    """The usable rows of a label file, and the number of the others, which are reported with their line."""
    boxes = []
    num_rows = 0
    for line, row_bytes in enumerate(text.removeprefix(b"\xef\xbb\xbf").splitlines(), 1):
        fields = row_bytes.split()
        if not fields:
            continue
        num_rows += 1
        try:
            label, *values = [float(value) for value in fields]
        except ValueError:
            problems.add("malformed-row", f"{location}:{line}: {_quote(row_bytes)}, not only numbers")
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
        boxes.append(Box(image_index, int(label), box, line, is_normalized=True))
    return boxes, num_rows - len(boxes)


def _parse_box(values: list[float], row_format: _RowFormat) -> tuple[float, float, float, float] | None:
    """x1, y1, x2, y2 from the numbers after the class; None if no kind of row has so many."""
    num_values = len(values)
    if (row_format.num_keypoint_values and num_values == 4 + row_format.num_keypoint_values) or _has_keypoints(values):
        row_format.other_row_kinds["rows have keypoints: their boxes are read"] += 1
    elif num_values == 5:
        row_format.other_row_kinds["rows have a sixth number, a confidence, which is not used"] += 1
    elif num_values >= 6 and num_values % 2 == 0:
        row_format.other_row_kinds["rows are polygons: the boxes around them are used"] += 1
        return min(values[::2]), min(values[1::2]), max(values[::2]), max(values[1::2])
    elif num_values != 4:
        return None
    x, y, width, height = values[:4]
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _has_keypoints(values: list[float]) -> bool:
    """Whether a box is followed by three or more keypoints (x, y, visibility 0 … 2), also without a data.yaml."""
    return len(values) >= 13 and len(values) % 3 == 1 and all(value in (0, 1, 2) for value in values[6::3])


def _is_normalized(x1: float, y1: float, x2: float, y2: float) -> bool:
    """Whether center and size of a box can be normalized. NaN and infinity pass, because `clean.py` reports them."""
    if not all(map(math.isfinite, (x1, y1, x2, y2))):
        return True
    x, y = (x1 + x2) / 2, (y1 + y2) / 2
    return min(x, y) >= -NORMALIZED_TOLERANCE and max(x, y, x2 - x1, y2 - y1) <= 1 + NORMALIZED_TOLERANCE


def _quote(row_bytes: bytes) -> str:
    return repr(row_bytes[:60].decode(errors="replace"))
