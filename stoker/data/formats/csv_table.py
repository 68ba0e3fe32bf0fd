"""Detects the layout of a table of boxes: its delimiter, its header, the meaning of its columns.

There is no standard: TensorFlow's tutorials, Keras-RetinaNet, Roboflow, Kaggle's competitions and Google's AutoML have
different columns. Columns are recognized by their names, in any order and case; a table without a header by its values.
Not here: finding tables (`csv_files.py`), reading their rows as boxes (`csv.py`).
"""

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from stoker import regular_files
from stoker.data.formats.tables import SPLIT_BY_NAME, is_image_name
from stoker.errors import DataError

HEAD_BYTES = 1 << 16
DELIMITERS = (",", ";", "\t", "|")

FILE_COLUMNS = (
    "filename", "imagefilename", "imagename", "imagefile", "filepath", "imagepath", "imgpath", "imgname", "imgfile",
    "picture", "image", "img", "file", "path", "fname", "imageid", "imgid", "uri", "name", "id",
)  # fmt: skip
CLASS_COLUMNS = (
    "classname", "labelname", "categoryname", "objectclass", "objectname", "celltype", "class", "label", "category",
    "name", "object", "classes", "labels", "species", "type", "tag", "target", "classid", "labelid", "categoryid",
)  # fmt: skip
XYXY_COLUMNS = (
    ("xmin", "ymin", "xmax", "ymax"), ("x1", "y1", "x2", "y2"), ("x0", "y0", "x1", "y1"),
    ("left", "top", "right", "bottom"), ("minx", "miny", "maxx", "maxy"), ("xtl", "ytl", "xbr", "ybr"),
    ("topleftx", "toplefty", "bottomrightx", "bottomrighty"), ("startx", "starty", "endx", "endy"),
    ("xstart", "ystart", "xend", "yend"),
)  # fmt: skip
CENTER_COLUMNS = (("xcenter", "ycenter"), ("centerx", "centery"), ("xcentre", "ycentre"), ("cx", "cy"), ("xc", "yc"))
WIDTH_HEIGHT_COLUMNS = (("boxw", "boxh"), ("w", "h"), ("width", "height"))
IMAGE_SIZE_COLUMNS = (("imagewidth", "imageheight"), ("imgwidth", "imgheight"), ("width", "height"))
SPLIT_COLUMNS = ("split", "set", "subset", "partition", "usage", "mluse")
"""Column names, only letters and digits, the most likely first."""
BOX_COLUMNS = ("bbox", "bndbox", "boundingbox", "box", "bboxes", "boxes")
"""Names of a column with all four numbers."""
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
    """Four columns, or one with "[x, y, width, height]"."""
    box_format: Literal["xyxy", "xywh", "cxcywh"]
    size_columns: tuple[int, int] | None = None
    """Height and width of the image."""
    split_column: int | None = None
    class_candidates: tuple[str, ...] = ()
    """Text columns that could be the class, if no column has such a name."""
    notes: tuple[str, ...] = field(default=())


def detect_csv_layout(path: Path) -> CsvLayout | None:
    """The layout of a table of boxes, from its first rows; None for any other file."""
    try:
        text = _read_text(path, HEAD_BYTES)
    except DataError:  # not text, so not a table of boxes; reading it by name reports the reason
        return None
    for delimiter in DELIMITERS:
        try:
            rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter))
        except csv.Error:
            continue
        rows = [[value.strip() for value in row] for row in rows if any(value.strip() for value in row)]
        if rows and (layout := _detect_with_header(delimiter, rows) or _detect_without_header(delimiter, rows)):
            return layout
    return None


def explain_rejection(path: Path) -> str:
    """The reason why `detect_csv_layout` finds no layout, for messages."""
    try:
        first = _read_text(path, HEAD_BYTES).strip().partition("\n")[0].strip()
    except DataError as error:
        return f"it is not UTF-8 ({error.cause}): save it as UTF-8"
    return f"its first row, {first[:80]!r}, has no column of images or none of boxes" if first else "it is empty"


def iter_rows(path: Path, layout: CsvLayout, *, max_bytes: int | None = None) -> Iterator[tuple[int, list[str]]]:
    """(line, values) of every row except the header and empty ones. Raises DataError if the file is not text.

    max_bytes: read only the rows in the first so many bytes.
    """
    reader = csv.reader(io.StringIO(_read_text(path, max_bytes), newline=""), delimiter=layout.delimiter)
    header = bool(layout.header)
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise DataError(
                "A table cannot be read.", location=f"{path}:{reader.line_num}", cause=str(error), fix="export it again"
            ) from error
        if row is None:
            return
        values = [value.strip() for value in row]
        if not any(values):
            continue
        if header:
            header = False
            continue
        yield reader.line_num, values


def _read_text(path: Path, max_bytes: int | None) -> str:
    """The text of a file, or the whole lines of its beginning. UTF-8, or UTF-16 with a byte order mark (Excel)."""
    with regular_files.open_file(path, max_bytes=regular_files.MAX_ANNOTATION_BYTES) as file:
        data = file.read() if max_bytes is None else file.read(max_bytes)
    is_whole = max_bytes is None or len(data) < max_bytes
    is_utf_16 = data.startswith((b"\xff\xfe", b"\xfe\xff"))
    if not is_whole:
        data = data[: len(data) // 2 * 2] if is_utf_16 else data[: data.rfind(b"\n") + 1]
    try:
        text = data.decode("utf-16" if is_utf_16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        fix = "save it as UTF-8"
        raise DataError("A table is not UTF-8.", location=f"{path}:{line}", cause=str(error), fix=fix) from error
    return text if is_whole or not is_utf_16 else text[: text.rfind("\n") + 1]


def _normalize_column(name: str) -> str:
    """A column's name without case, punctuation, and a word for box: "Bbox_X-min" is "xmin"."""
    normalized = re.sub(r"[^a-z0-9]", "", name.lower())
    prefix = None if normalized in BOX_COLUMNS else _BOX_PREFIX.match(normalized)
    return normalized if prefix is None else _BOX_SIZE_NAMES.get(normalized[prefix.end() :], normalized[prefix.end() :])


def _detect_with_header(delimiter: str, rows: list[list[str]]) -> CsvLayout | None:
    names = [_normalize_column(name) for name in rows[0]]
    column_by_name = {name: column for column, name in reversed(list(enumerate(names)))}

    def first_match(*choices: tuple[str, ...]) -> tuple[int, ...] | None:
        return next(
            (tuple(column_by_name[n] for n in group) for group in choices if all(n in column_by_name for n in group)),
            None,
        )

    box_format: Literal["xyxy", "xywh", "cxcywh"] = "xyxy"
    box_columns, notes = first_match(*XYXY_COLUMNS), []
    if box_columns is None:
        width_height = first_match(*WIDTH_HEIGHT_COLUMNS)
        corner, center = first_match(("x", "y"), *(group[:2] for group in XYXY_COLUMNS)), first_match(*CENTER_COLUMNS)
        whole_box = [column_by_name[name] for name in BOX_COLUMNS if name in column_by_name]
        if width_height is not None and (center or corner) is not None:
            box_format = "cxcywh" if center is not None else "xywh"
            box_columns = (*(center or corner or ()), *width_height)
        elif whole_box:
            box_format, box_columns = "xywh", (whole_box[0],)
            notes.append(f"column {rows[0][whole_box[0]]!r} is read as x, y, width, height")
        else:
            return None
    used = set(box_columns)

    def first_unused(choices: tuple[str, ...]) -> int | None:
        columns = (column_by_name[name] for name in choices if name in column_by_name)
        return next((column for column in columns if column not in used), None)

    file_column = first_unused(FILE_COLUMNS)
    if file_column is None:
        return None
    used.add(file_column)
    width_height = first_match(
        *(group for group in IMAGE_SIZE_COLUMNS if not {column_by_name.get(name) for name in group} & used)
    )
    split_column = first_unused(SPLIT_COLUMNS)
    used |= {column for column in (*(width_height or ()), split_column) if column is not None}
    label_column = first_unused(CLASS_COLUMNS)
    text_columns: list[int] = []
    if label_column is None:
        text_columns = [column for column in range(len(names)) if column not in used and _is_text(rows[1:], column)]
        if len(text_columns) == 1:
            label_column = text_columns[0]
            notes.append(f"column {rows[0][label_column]!r} is read as the class")
    return CsvLayout(
        delimiter=delimiter,
        header=tuple(rows[0]),
        file_column=file_column,
        label_column=label_column,
        box_columns=box_columns,
        box_format=box_format,
        size_columns=None if width_height is None else (width_height[1], width_height[0]),
        split_column=split_column,
        class_candidates=tuple(rows[0][column] for column in text_columns) if label_column is None else (),
        notes=tuple(notes),
    )


def _detect_without_header(delimiter: str, rows: list[list[str]]) -> CsvLayout | None:
    """Keras-RetinaNet's `path,x1,y1,x2,y2,class`, and AutoML's `TRAIN,path,label,x1,y1,,,x2,y2,,`."""
    first = rows[0]
    is_retinanet = len(first) == 6 and is_image_name(first[0]) and _are_numbers(first[1:5])
    is_automl = (
        len(first) == 11
        and first[0].lower() in (*SPLIT_BY_NAME, "unassigned", "validate")
        and is_image_name(first[1])
        and _are_numbers([first[column] for column in (3, 4, 7, 8)])
    )
    if not is_retinanet and not is_automl:
        return None
    columns = "image, x1, y1, x2, y2, class" if is_retinanet else "AutoML's split, image, class, x1, y1, …, x2, y2"
    return CsvLayout(
        delimiter=delimiter,
        header=(),
        file_column=0 if is_retinanet else 1,
        label_column=5 if is_retinanet else 2,
        box_columns=(1, 2, 3, 4) if is_retinanet else (3, 4, 7, 8),
        box_format="xyxy",
        split_column=None if is_retinanet else 0,
        notes=(f"no header: the columns are read as {columns}",),
    )


def _are_numbers(values: Sequence[str]) -> bool:
    """Whether all are numbers, or all are empty, for an image without objects."""
    return not any(values) or all(_is_number(value) for value in values)


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[-+]?(\d+([.,]\d*)?|[.,]\d+)([eE][-+]?\d+)?", text) is not None


def _is_text(rows: list[list[str]], column: int) -> bool:
    values = [row[column] for row in rows if column < len(row) and row[column]]
    return bool(values) and not any(_is_number(value) for value in values)
