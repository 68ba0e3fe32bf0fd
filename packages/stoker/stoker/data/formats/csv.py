"""CSV tables: a row per box, or per image with its boxes side by side or as a list in one cell.

There is no standard: TensorFlow's tutorials, Keras-RetinaNet, Roboflow, Kaggle's competitions and Google's AutoML have
different columns. They are recognized by their names, in any order and case; the column of images also by its values,
as all are in a table without a header. Boxes are in pixels or normalized by image width and height; this is decided per
table. A row without box and class is an image without objects. A row that cannot be read is dropped and reported; its
image stays if another row names it.
"""

import codecs
import contextlib
import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Literal

import msgspec

from stoker.data.formats import folders
from stoker.data.formats.images import Box, ImageFile, ImageLocator, TableBuilder, is_usable_name
from stoker.data.formats.objects import correct_corners
from stoker.data.formats.openimages import is_open_images, iter_csv
from stoker.data.formats.tables import UNASSIGNED, XYXY, AnnotationTable, DatasetLayout, SplitFiles, usable_size
from stoker.data.validation.problems import ProblemCollector
from stoker_watch import regular_files
from stoker_watch.errors import DataError, make_error

TABLE_DIRS = ("annotations", "labels", "data", "csv")
TABLE_SUFFIXES = (".csv", ".tsv")


def recognize(path: Path) -> DatasetLayout | None:
    """Returns the data set of a table, or of the tables in a folder; None for a folder without. Raises DataError if a
    file is not a table of boxes, or if a split has several."""
    if path.is_file():
        if detect_csv_layout(path) is None:
            choices = ["filename,class,xmin,ymin,xmax,ymax", "filename,class,x,y,width,height"]
            raise make_error(DataError, "csv-without-boxes", path, choices=choices, reason=describe_columns(path))
        return _make_layout(folders.root_of(path, TABLE_DIRS), [folders.file_part(path)], [])
    for directory in (path, *folders.named_subdirs(path, TABLE_DIRS)):
        if tables := _list_tables(directory):
            parts = [_only_part(directory, files, split) for split, files in folders.files_by_split(tables)]
            ignored = [table.name for table in tables if table not in [part.annotations for part in parts]]
            return _make_layout(path, parts, [f"not read: {', '.join(ignored)}"] if ignored else [])
    tables_of = [(split, own, _list_tables(own)) for split, own in folders.iter_split_dirs(path)]
    parts = [_only_part(own, tables, split) for split, own, tables in tables_of if tables]
    return _make_layout(path, parts, []) if parts else None


def _only_part(folder: Path, tables: list[Path], split: str | None) -> SplitFiles:
    if len(tables) > 1:
        raise folders.several_files_error(folder, tables, split, fix="name one of the files instead of the folder")
    return folders.file_part(tables[0], split)


def _list_tables(folder: Path) -> list[Path]:
    files = [path for path in folders.list_files(folder, TABLE_SUFFIXES) if not is_open_images(path)]
    return [path for path in files if detect_csv_layout(path) is not None]


def _make_layout(root: Path, parts: list[SplitFiles], notes: list[str]) -> DatasetLayout:
    below = folders.list_dirs_below(root)
    nearby = [folders.iter_nearby_dirs(part.annotations.parent, root, part.split) for part in parts]
    located = [replace(p, image_dirs=folders.unique([*dirs, *below])) for p, dirs in zip(parts, nearby, strict=True)]
    own_dir = parts[0].annotations.parent
    if own_dir != root and own_dir.name.lower() in folders.SPLIT_BY_NAME:
        notes += folders.check_unannotated_splits(root, parts)
    title = f"CSV ({', '.join(str(part.annotations.relative_to(root)) for part in parts)})"
    return DatasetLayout(format="csv", description=title, root=root, parts=tuple(located), notes=tuple(notes))


DELIMITERS = (",", ";", "\t", "|")
BoxFormat = Literal["xyxy", "xywh", "cxcywh"]


class _ColumnNames(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`csv_columns.toml`: names of columns, only letters and digits, the most likely first."""

    file: tuple[str, ...]
    label: tuple[str, ...]
    split: tuple[str, ...]
    no_class: tuple[str, ...]
    """Words in the names of text columns that are about the image or its origin."""
    box: tuple[str, ...]
    """Of a column with all four numbers, or those of several boxes: x, y, width, height."""
    box_corners: tuple[str, ...]
    """The same with corners."""
    no_box: tuple[str, ...]
    """What such a column has for an image without objects, besides nothing."""
    corners: tuple[tuple[str, str, str, str], ...]
    center: tuple[tuple[str, str], ...]
    width_height: tuple[tuple[str, str], ...]
    image_size: tuple[tuple[str, str], ...]


COLUMNS = msgspec.toml.decode(
    (resources.files("stoker.data.formats") / "csv_columns.toml").read_text(encoding="utf-8"), type=_ColumnNames
)
_BOX_PREFIX = re.compile(r"(?:bbox|bndbox|boundingbox|box|bb|roi)(?=.)")
_BOX_SIZE_NAMES = {"w": "boxw", "width": "boxw", "h": "boxh", "height": "boxh"}


@dataclass(frozen=True, kw_only=True)
class CsvLayout:
    """The meaning of the columns of a table, by column number."""

    delimiter: str
    header: tuple[str, ...]
    """As written; empty if there is none."""
    file_column: int
    label_column: int | None
    box_columns: tuple[int, ...]
    """Four columns, or one with "[x, y, width, height]", perhaps of several boxes."""
    box_format: BoxFormat
    boxes: tuple[tuple[tuple[int, ...], int | None], ...] = ()
    """Of each of several boxes in a row, which may be empty: its columns, and that of its class."""
    size_columns: tuple[int, int] | None = None
    """Height and width of the image."""
    split_column: int | None = None
    class_candidates: tuple[str, ...] = ()
    """Text columns that could be the class, if no column has such a name."""
    notes: tuple[str, ...] = field(default=())


def detect_csv_layout(path: Path) -> CsvLayout | None:
    """Returns the layout of a table of boxes, from its first rows; None for any other file."""
    try:
        text = read_text(path, folders.HEAD_BYTES)
    except (DataError, regular_files.PointerError):  # no table of boxes; reading it by name reports the reason
        return None
    for delimiter, rows in _iter_parsed(text):
        if layout := _detect_with_header(delimiter, rows) or _detect_without_header(delimiter, rows):
            return layout
    return None


def _iter_parsed(text: str) -> Iterator[tuple[str, list[list[str]]]]:
    """Yields each delimiter with the rows that it makes of a text, without empty ones, if there are any."""
    for delimiter in DELIMITERS:
        with contextlib.suppress(csv.Error):
            rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter))
            if rows := [[value.strip() for value in row] for row in rows if any(value.strip() for value in row)]:
                yield delimiter, rows


def describe_columns(path: Path) -> str:
    """Returns which columns a file has that is not a table of boxes, and which it lacks."""
    parsed = _iter_parsed(read_text(path, folders.HEAD_BYTES))
    header: list[str] = max((rows[0] for _, rows in parsed), key=len, default=[])
    column_by_name = {_normalize_column(name): column for column, name in enumerate(header)}
    lacks = "images" if _find_box_columns(column_by_name)[0] else "boxes"
    names = ", ".join(name[:40] for name in header[:24]) + ", …" * (len(header) > 24)
    return f"it has the columns {names}: none of {lacks} is recognized" if header else "it has no row"


def iter_rows(path: Path, layout: CsvLayout, *, max_bytes: int | None = None) -> Iterator[tuple[int, list[str]]]:
    """Yields (line, values) of every row except the header and empty ones. max_bytes: read only the rows in the first
    so many bytes. Raises DataError if the file is not text."""
    lines = io.StringIO(read_text(path, max_bytes), newline="")
    stripped = ((line, list(map(str.strip, row))) for line, row in iter_csv(lines, path, delimiter=layout.delimiter))
    yield from islice((row for row in stripped if any(row[1])), 1 if layout.header else 0, None)


def read_text(path: Path, max_bytes: int | None = None) -> str:
    """The text of a file, or the whole lines of its beginning. UTF-8, or UTF-16 with a byte order mark (Excel)."""
    with regular_files.open_file(path, max_bytes=regular_files.MAX_ANNOTATION_BYTES) as file:
        data = file.read() if max_bytes is None else file.read(max_bytes)
    is_whole = max_bytes is None or len(data) < max_bytes
    encoding = "utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(data, final=is_whole)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise make_error(DataError, "csv-not-utf-8", f"{path}:{line}", cause=str(error)) from error
    return text if is_whole else text[: text.rfind("\n") + 1]


def _normalize_column(name: str) -> str:
    """Returns a column's name without case, punctuation, and a word for box: "Bbox_X-min" is "xmin"."""
    normalized = re.sub(r"[^a-z0-9]", "", name.lower())
    prefix = None if normalized in (*COLUMNS.box, *COLUMNS.box_corners) else _BOX_PREFIX.match(normalized)
    return normalized if prefix is None else _BOX_SIZE_NAMES.get(normalized[prefix.end() :], normalized[prefix.end() :])


def _find_columns(column_by_name: Mapping[str, int], groups: Iterable[tuple[str, ...]]) -> tuple[int, ...]:
    """Returns the columns of the first group of names that are all there; none if there is no such group."""
    groups_here = (group for group in groups if all(name in column_by_name for name in group))
    return tuple(column_by_name[name] for name in next(groups_here, ()))


def _find_box_columns(column_by_name: Mapping[str, int]) -> tuple[tuple[int, ...], BoxFormat]:
    """Returns the columns of the box, or none, and what they contain."""
    if corners := _find_columns(column_by_name, COLUMNS.corners):
        return corners, "xyxy"
    if width_height := _find_columns(column_by_name, COLUMNS.width_height):
        if center := _find_columns(column_by_name, COLUMNS.center):
            return center + width_height, "cxcywh"
        if corner := _find_columns(column_by_name, [("x", "y"), *(group[:2] for group in COLUMNS.corners)]):
            return corner + width_height, "xywh"
    if lists := _find_columns(column_by_name, [(name,) for name in COLUMNS.box_corners]):
        return lists, "xyxy"
    return _find_columns(column_by_name, [(name,) for name in COLUMNS.box]), "xywh"


_NUMBERED = (
    r"[a-z]*[^a-z\d]*(?P<number>\d+)[^a-z\d]*(?P<name>[a-z].*)",  # box1_xmin
    r"(?P<name>.*[a-z\d])[^a-z\d]+(?P<number>\d+)",  # x1_1
    r"(?P<name>.*[a-z])(?P<number>\d+)",  # xmin1
)
"""Names of columns of boxes that are side by side, in lower case."""


def _find_numbered_boxes(header: list[str]) -> tuple[list[tuple[tuple[int, ...], int | None]], BoxFormat]:
    """Returns the columns of each box of a row and that of its own class, and what they contain: those whose names
    without a number are the columns of a box. x1, y1, x2, y2 are not: x and y alone are no box."""
    by_number: dict[int, dict[str, int]] = {}
    for column, written in enumerate(header):
        matches = (re.fullmatch(pattern, written.lower()) for pattern in _NUMBERED)
        if match := next(filter(None, matches), None):
            by_number.setdefault(int(match["number"]), {}).setdefault(_normalize_column(match["name"]), column)
    found = [(names, *_find_box_columns(names)) for _, names in sorted(by_number.items())]
    first: BoxFormat = next((box_format for _, columns, box_format in found if columns), "xyxy")
    boxes = [(columns, names) for names, columns, box_format in found if columns and box_format == first]
    labels = [next((names[name] for name in COLUMNS.label if name in names), None) for _, names in boxes]
    return [(columns, label) for (columns, _), label in zip(boxes, labels, strict=True)], first


def _detect_with_header(delimiter: str, rows: list[list[str]]) -> CsvLayout | None:
    names = [_normalize_column(name) for name in rows[0]]
    column_by_name = {name: column for column, name in reversed(list(enumerate(names)))}
    box_columns, box_format = _find_box_columns(column_by_name)
    boxes, boxes_format = _find_numbered_boxes(rows[0])
    notes = []
    if len(boxes) > 1 or (boxes and not box_columns):
        box_columns, box_format = boxes[0][0], boxes_format
        notes.append(f"a row has up to {len(boxes)} boxes, side by side")
    else:
        boxes = []
    if len(box_columns) < 2:
        lists = [column for column in box_columns if _has_box_lists(rows[1:], column, default="0 0 0 0")]
        lists = lists or [column for column in range(len(names)) if _has_box_lists(rows[1:], column)]
        box_columns = tuple(lists[:1])
    if not box_columns:
        return None
    if len(box_columns) == 1:
        meaning = "the corners x1, y1, x2, y2" if box_format == "xyxy" else "x, y, width, height"
        notes.append(f"column {rows[0][box_columns[0]]!r} is read as {meaning}")
    used = {*box_columns, *(column for columns, label in boxes for column in (*columns, label) if column is not None)}

    def first_unused(choices: tuple[str, ...]) -> int | None:
        columns = (column_by_name[name] for name in choices if name in column_by_name)
        return next((column for column in columns if column not in used), None)

    named = [column_by_name[name] for name in COLUMNS.file if name in column_by_name]
    file_column = _find_file_column(rows[1:], named, used)
    if file_column is None:
        return None
    used.add(file_column)
    unused_sizes = (group for group in COLUMNS.image_size if not {column_by_name.get(name) for name in group} & used)
    width_height = _find_columns(column_by_name, unused_sizes)
    split_column = first_unused(COLUMNS.split)
    used |= {column for column in (*width_height, split_column) if column is not None}
    label_column = first_unused(COLUMNS.label)
    text_columns: list[int] = []
    if label_column is None and all(label is None for _, label in boxes):
        unused = (column for column in range(len(names)) if column not in used)
        all_text = [column for column in unused if _is_column(rows[1:], column, lambda text: not _is_number(text))]
        text_columns = [column for column in all_text if not _is_about_image(rows[0][column])]
        if len(text_columns) == 1:
            label_column = text_columns[0]
            notes.append(f"column {rows[0][label_column]!r} is read as the class")
        elif all_text and not text_columns:
            notes.append(f"not read as the class: {', '.join(rows[0][column] for column in all_text)}")
    return CsvLayout(
        delimiter=delimiter,
        header=tuple(rows[0]),
        file_column=file_column,
        label_column=label_column,
        box_columns=box_columns,
        box_format=box_format,
        boxes=tuple(boxes),
        size_columns=(width_height[1], width_height[0]) if width_height else None,
        split_column=split_column,
        class_candidates=tuple(rows[0][column] for column in text_columns) if label_column is None else (),
        notes=tuple(notes),
    )


def _find_file_column(rows: list[list[str]], named: list[int], used: set[int]) -> int | None:
    """Returns the column of images: the first that is called so and has names of images, else the first that has, else
    the first that is called so."""
    columns = [*named, *range(max(map(len, rows), default=0))]
    with_images = (column for column in columns if column not in used and _is_column(rows, column, _is_image))
    return next(with_images, next((column for column in named if column not in used), None))


def _is_column(rows: list[list[str]], column: int, test: Callable[[str], bool]) -> bool:
    values = [row[column] for row in rows if column < len(row) and row[column]]
    return bool(values) and all(map(test, values))


def _is_image(text: str) -> bool:
    return text.lower().endswith(tuple(folders.KNOWN_SUFFIXES))


def _has_box_lists(rows: list[list[str]], column: int, default: str = "") -> bool:
    """Returns whether the first value of a column, or `default`, is the four numbers of each of some boxes."""
    values = (row[column] for row in rows if column < len(row) and row[column].lower() not in ("", *COLUMNS.no_box))
    return bool(_parse_boxes([next(values, default)], "xyxy"))


def _is_about_image(name: str) -> bool:
    """Returns whether the name of a text column has a word for what no class is: a source, a country."""
    words = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower())
    return not set(words).isdisjoint(COLUMNS.no_class)


def _detect_without_header(delimiter: str, rows: list[list[str]]) -> CsvLayout | None:
    """Returns the layout of a table with a column of images and four or more of numbers, by what most values are. The
    box is the first four numbers, or the last four if only these are corners; the class is the first text that is no
    split, else the only number that is left. Keras-RetinaNet has `path,x1,y1,x2,y2,class`, SKU-110K also the size of
    the image, AutoML `TRAIN,path,label,x1,y1,,,x2,y2,,`."""
    width = Counter(map(len, rows)).most_common(1)[0][0]
    rows = [row for row in rows if len(row) == width]

    def columns_of(test: Callable[[str], bool]) -> list[int]:
        values = ([row[column] for row in rows if row[column]] for column in range(width))
        return [column for column, texts in enumerate(values) if 2 * sum(map(test, texts)) > len(texts)]

    images = columns_of(_is_image)
    splits = columns_of(lambda text: text.lower() in (*folders.SPLIT_BY_NAME, "unassigned"))
    numbers = columns_of(_is_number)
    if not images or len(numbers) < 4:
        return None

    def are_corners(box: list[int]) -> bool:
        parsed = (_parse_boxes([row[column] for column in box], "xyxy") for row in rows)
        return all(x2 > x1 and y2 > y1 for boxes in parsed for x1, y1, x2, y2 in boxes)

    box = next((box for box in (numbers[:4], numbers[-4:]) if are_corners(box)), numbers[:4])
    box_format: BoxFormat = "xyxy" if are_corners(box) else "xywh"
    texts = [column for column in columns_of(bool) if column not in (images[0], *splits, *numbers)]
    rest = [column for column in numbers if column not in box]
    label = texts[0] if texts else rest[0] if len(rest) == 1 else None
    meaning = {label: "class", images[0]: "image"} | dict.fromkeys(splits[:1], "split")
    meaning |= dict(zip(box, ("x1", "y1", "x2", "y2") if box_format == "xyxy" else "xywh", strict=True))
    read_as = ", ".join(meaning.get(column, "…") for column in range(width))
    return CsvLayout(
        delimiter=delimiter,
        header=(),
        file_column=images[0],
        label_column=label,
        box_columns=tuple(box),
        box_format=box_format,
        split_column=splits[0] if splits else None,
        notes=(f"no header: the columns are read as {read_as}",),
    )


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[-+]?(\d+([.,]\d*)?|[.,]\d+)([eE][-+]?\d+)?", text) is not None


NO_CLASS_COLUMN = "object"
"""The class of all boxes of a table without classes."""


def read(layout: DatasetLayout, problems: ProblemCollector) -> AnnotationTable:
    """Reads all tables of a data set. Raises DataError for one whose columns are unclear."""
    builder = TableBuilder(layout, problems, box_id_kind="line")
    locators: dict[tuple[Path, ...], ImageLocator] = {}
    index_by_image: dict[tuple[int, Path, str], int] = {}
    for part in layout.parts:
        locator = locators.setdefault(part.image_dirs, ImageLocator(layout.root, part))
        first_box = len(builder.boxes)
        _read_table(part, locator, index_by_image, builder)
        builder.detect_units(part.annotations, first_box)
    if not builder.images:
        fix = "export the annotations again"
        raise DataError("The tables list no images.", location=layout.parts[0].annotations, fix=fix)
    for locator in locators.values():
        builder.notes += locator.notes()
    table = builder.build()
    correct_corners(table)
    return table


def _read_table(
    part: SplitFiles, locator: ImageLocator, index_by_image: dict[tuple[int, Path, str], int], builder: TableBuilder
) -> None:
    """Adds the images of a table, and its boxes in its own units."""
    table, problems = part.annotations, builder.problems
    layout = detect_csv_layout(table)
    if layout is None:
        raise DataError("The file is not a table of boxes any more.", location=table, fix="restore it, and try again")
    if layout.class_candidates:
        raise make_error(DataError, "csv-unclear-class", table, choices=layout.class_candidates)
    builder.notes += [f"{table.name}: {note}" for note in layout.notes]
    if layout.label_column is None:
        builder.notes.append(f"{table.name} has no class column: the class of all boxes is {NO_CLASS_COLUMN!r}")
    num_columns = max(layout.file_column, *layout.box_columns, layout.label_column or 0) + 1
    for line, values in iter_rows(table, layout):
        location = f"{table.name}:{line}: {layout.delimiter.join(values)[:80]!r}"
        file_name = _cell(values, layout.file_column)
        if len(values) < num_columns or not is_usable_name(file_name):
            reason = "too few columns" if is_usable_name(file_name) else "no image"
            problems.add("malformed-row", f"{location}, {reason}")
            continue
        folder, name = locator.locate(file_name)
        named_split = folders.split_from_name(_cell(values, layout.split_column)) or part.split
        is_assigned = named_split is not None or layout.split_column is None
        split = locator.split_index(named_split, folder) if is_assigned else UNASSIGNED
        if (image_index := index_by_image.get((split, folder, name))) is None:
            height, width = (_cell(values, column) for column in layout.size_columns or (None, None))
            image_index = builder.add_image(ImageFile(folder, name, split, usable_size(height, width)))
            index_by_image[split, folder, name] = image_index
        for label, boxes in _iter_cells(values, layout):
            if isinstance(boxes, str):
                kind, _, reason = boxes.partition(", ")
                problems.add(kind, location + (reason and f", {reason}"))
                builder.bad_boxes.append(image_index)
            else:
                builder.boxes += [Box(image_index, name, xyxy, line) for name, xyxy in zip(label, boxes, strict=True)]


def _iter_cells(values: list[str], layout: CsvLayout) -> Iterator[tuple[list[str], list[XYXY] | str]]:
    """Yields the classes and boxes of the cells of a row, or, in place of boxes, the kind of problem and a reason;
    nothing for an image without objects."""
    for columns, own_label in layout.boxes or [(layout.box_columns, None)]:
        label_column = layout.label_column if own_label is None else own_label
        label = NO_CLASS_COLUMN if label_column is None else _cell(values, label_column)
        texts = [_cell(values, column) for column in columns]
        if not any(texts):
            if label and label_column is not None and not layout.boxes:
                yield [], "no-box"
        elif len(columns) > 1 or texts[0].lower() not in COLUMNS.no_box:
            boxes = _parse_boxes(texts, layout.box_format)
            labels = [label] * len(boxes)
            if len(columns) == 1 and len(boxes) > 1 and len(parts := _split_list(label)) > 1:
                labels = parts
            if not boxes:
                yield [], "malformed-row, the box is not four numbers"
            elif not all(labels):
                yield [], "no-class"
            elif len(labels) != len(boxes):
                yield [], f"malformed-row, {len(boxes)} boxes and {len(labels)} classes"
            else:
                yield labels, boxes


def _cell(values: list[str], column: int | None) -> str:
    return values[column] if column is not None and column < len(values) else ""


def _split_list(text: str) -> list[str]:
    return [part.strip() for part in re.split(r"[,;|]", re.sub(r"[\[\](){}'\"]", "", text)) if part.strip()]


def _parse_boxes(texts: list[str], box_format: BoxFormat) -> list[XYXY]:
    """Returns the boxes of four texts, or of a text with the numbers of any number of boxes; none if they are not
    numbers, or not four for each box."""
    if len(texts) == 1:
        text = re.sub(r"[\[\](){}]", " ", texts[0])
        texts = [part for part in re.split(r"[;\s]+", text) if part.strip(",")]
        if len(texts) % 4 or not all(_is_number(part.rstrip(",")) for part in texts):
            texts = [part for part in re.split(r"[,;\s]+", text) if part]
    try:  # decimal commas, as Excel writes in many countries
        numbers = [float(text.strip(" ,").replace(",", ".")) for text in texts]
    except ValueError:
        return []
    if len(numbers) % 4:
        return []
    return [_to_xyxy(box_format, *numbers[start : start + 4]) for start in range(0, len(numbers), 4)]


def _to_xyxy(box_format: BoxFormat, a: float, b: float, c: float, d: float) -> XYXY:
    if box_format == "xyxy":
        return a, b, c, d
    if box_format == "xywh":
        return a, b, a + c, b + d
    return a - c / 2, b - d / 2, a + c / 2, b + d / 2
