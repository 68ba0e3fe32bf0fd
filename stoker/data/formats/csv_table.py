"""How a table of boxes is written: its delimiter, whether it has a header, which column is what.

There is no standard: the tutorials of TensorFlow, Keras-RetinaNet, Roboflow, Kaggle's competitions and Google's AutoML
each have their own columns. Columns are known by their names, in any order and case; a table without a header by its
pattern. Not here: where tables lie (`csv_files.py`), their rows (`csv.py`).
"""

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from stoker.data.formats.tables import PICTURE_ENDINGS, SPLIT_WORDS
from stoker.errors import DataError

HEAD_BYTES = 1 << 16
DELIMITERS = (",", ";", "\t", "|")

FILE = (
    "filename", "imagefilename", "imagename", "imagefile", "filepath", "imagepath", "imgpath", "imgname", "imgfile",
    "picture", "image", "img", "file", "path", "fname", "imageid", "imgid", "uri", "name", "id",
)  # fmt: skip
CLASS = (
    "classname", "labelname", "categoryname", "objectclass", "objectname", "celltype", "class", "label", "category",
    "name", "object", "classes", "labels", "species", "type", "tag", "target", "classid", "labelid", "categoryid",
)  # fmt: skip
CORNERS = (
    ("xmin", "ymin", "xmax", "ymax"), ("x1", "y1", "x2", "y2"), ("x0", "y0", "x1", "y1"),
    ("left", "top", "right", "bottom"), ("minx", "miny", "maxx", "maxy"), ("xtl", "ytl", "xbr", "ybr"),
    ("topleftx", "toplefty", "bottomrightx", "bottomrighty"), ("startx", "starty", "endx", "endy"),
    ("xstart", "ystart", "xend", "yend"),
)  # fmt: skip
CENTRES = (("xcenter", "ycenter"), ("centerx", "centery"), ("xcentre", "ycentre"), ("cx", "cy"), ("xc", "yc"))
SIDES = (("boxw", "boxh"), ("w", "h"), ("width", "height"))
PICTURE_SIDES = (("imagewidth", "imageheight"), ("imgwidth", "imgheight"), ("width", "height"))
SPLIT = ("split", "set", "subset", "partition", "usage", "mluse")
"""Names of columns, without what is neither letter nor digit, the likeliest first."""
WHOLE = ("bbox", "bndbox", "boundingbox", "box", "bboxes", "boxes")
"""Names of a column that holds all four numbers."""
_BOX = re.compile(r"(?:bbox|bndbox|boundingbox|box|bb|roi)(?=.)")
_BOX_SIDE = {"w": "boxw", "width": "boxw", "h": "boxh", "height": "boxh"}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which column of a table is what, by number."""

    delimiter: str
    header: tuple[str, ...]
    """As written; empty where there is none."""
    file: int
    label: int | None
    box: tuple[int, ...]
    """Four columns, or one that holds "[x, y, width, height]"."""
    kind: Literal["corners", "corner and sides", "centre and sides"]
    size: tuple[int, int] | None = None
    """Height and width of the picture."""
    split: int | None = None
    unsure: tuple[str, ...] = ()
    """Columns of text that could be the class, where none is named so."""
    notes: tuple[str, ...] = field(default=())


def layout_of(path: Path) -> Layout | None:
    """The layout of a table of boxes, from its first rows; None for any other file."""
    try:
        text = _text(path, HEAD_BYTES)
    except DataError:  # not text: no table of boxes; where it is asked for by name, reading it says why
        return None
    for delimiter in DELIMITERS:
        try:
            rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter))
        except csv.Error:
            continue
        rows = [[value.strip() for value in row] for row in rows if any(value.strip() for value in row)]
        if rows and (layout := _with_header(delimiter, rows) or _without_header(delimiter, rows)):
            return layout
    return None


def complaint(path: Path) -> str:
    """Why a file for which `layout_of` finds none is no table of boxes, in words."""
    try:
        first = _text(path, HEAD_BYTES).strip().partition("\n")[0].strip()
    except DataError as error:
        return f"it is not UTF-8 ({error.cause}): save it as UTF-8"
    return f"its first row, {first[:80]!r}, names no pictures or no boxes" if first else "it is empty"


def rows_of(path: Path, layout: Layout, *, most_bytes: int | None = None) -> Iterator[tuple[int, list[str]]]:
    """(line, values) of every row but the header and empty ones. Raises DataError where the file is not text.

    most_bytes: only the rows of so much of its beginning."""
    reader = csv.reader(io.StringIO(_text(path, most_bytes), newline=""), delimiter=layout.delimiter)
    header = bool(layout.header)
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise DataError(
                "A table cannot be read.", place=f"{path}:{reader.line_num}", cause=str(error), fix="export it again"
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


def _text(path: Path, most_bytes: int | None) -> str:
    """The text of a file, UTF-8 or, with its mark, UTF-16 (Excel), or the whole lines of its beginning."""
    with path.open("rb") as file:
        content = file.read() if most_bytes is None else file.read(most_bytes)
    whole = most_bytes is None or len(content) < most_bytes
    utf_16 = content.startswith((b"\xff\xfe", b"\xfe\xff"))
    if not whole:
        content = content[: len(content) // 2 * 2] if utf_16 else content[: content.rfind(b"\n") + 1]
    try:
        text = content.decode("utf-16" if utf_16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        fix = "save it as UTF-8"
        raise DataError("A table is not UTF-8.", place=f"{path}:{line}", cause=str(error), fix=fix) from error
    return text if whole or not utf_16 else text[: text.rfind("\n") + 1]


def _plain(name: str) -> str:
    """A column's name without case, punctuation, and a word for box: "Bbox_X-min" is "xmin"."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    box = None if plain in WHOLE else _BOX.match(plain)
    return plain if box is None else _BOX_SIDE.get(plain[box.end() :], plain[box.end() :])


def _with_header(delimiter: str, rows: list[list[str]]) -> Layout | None:
    names = [_plain(name) for name in rows[0]]
    place = {name: number for number, name in reversed(list(enumerate(names)))}

    def first(*choices: tuple[str, ...]) -> tuple[int, ...] | None:
        return next((tuple(place[n] for n in group) for group in choices if all(n in place for n in group)), None)

    kind: Literal["corners", "corner and sides", "centre and sides"] = "corners"
    box, notes = first(*CORNERS), []
    if box is None:
        sides = first(*SIDES)
        corner, centre = first(("x", "y"), *(group[:2] for group in CORNERS)), first(*CENTRES)
        whole = [place[name] for name in WHOLE if name in place]
        if sides is not None and (centre or corner) is not None:
            kind = "centre and sides" if centre is not None else "corner and sides"
            box = (*(centre or corner or ()), *sides)
        elif whole:
            kind, box = "corner and sides", (whole[0],)
            notes.append(f"column {rows[0][whole[0]]!r} is taken as x, y, width, height")
        else:
            return None
    taken = set(box)
    file = next((place[name] for name in FILE if name in place and place[name] not in taken), None)
    if file is None:
        return None
    taken.add(file)
    sides = first(*(group for group in PICTURE_SIDES if not {place.get(name) for name in group} & taken))
    split = next((place[name] for name in SPLIT if name in place and place[name] not in taken), None)
    taken |= {number for number in (*(sides or ()), split) if number is not None}
    label = next((place[name] for name in CLASS if name in place and place[name] not in taken), None)
    texts: list[int] = []
    if label is None:
        texts = [number for number in range(len(names)) if number not in taken and _is_text(rows[1:], number)]
        if len(texts) == 1:
            label = texts[0]
            notes.append(f"column {rows[0][label]!r} is taken as the class")
    return Layout(
        delimiter=delimiter,
        header=tuple(rows[0]),
        file=file,
        label=label,
        box=box,
        kind=kind,
        size=None if sides is None else (sides[1], sides[0]),
        split=split,
        unsure=tuple(rows[0][number] for number in texts) if label is None else (),
        notes=tuple(notes),
    )


def _without_header(delimiter: str, rows: list[list[str]]) -> Layout | None:
    """Keras-RetinaNet's `path,x1,y1,x2,y2,class`, and AutoML's `TRAIN,path,label,x1,y1,,,x2,y2,,`."""
    first = rows[0]
    if len(first) == 6 and _is_picture(first[0]) and _are_numbers(first[1:5]):
        note = "no header: the columns are taken as picture, x1, y1, x2, y2, class"
        return Layout(delimiter=delimiter, header=(), file=0, label=5, box=(1, 2, 3, 4), kind="corners", notes=(note,))
    if (
        len(first) == 11
        and first[0].lower() in (*SPLIT_WORDS, "unassigned", "validate")
        and _is_picture(first[1])
        and _are_numbers([first[number] for number in (3, 4, 7, 8)])
    ):
        note = "no header: the columns are taken as AutoML's split, picture, class, x1, y1, …, x2, y2"
        return Layout(
            delimiter=delimiter, header=(), file=1, label=2, box=(3, 4, 7, 8), kind="corners", split=0, notes=(note,)
        )
    return None


def _is_picture(text: str) -> bool:
    return text.lower().endswith(PICTURE_ENDINGS)


def _are_numbers(values: Sequence[str]) -> bool:
    """Whether all are numbers, or all empty: a picture without objects."""
    return not any(values) or all(_is_number(value) for value in values)


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[-+]?(\d+([.,]\d*)?|[.,]\d+)([eE][-+]?\d+)?", text) is not None


def _is_text(rows: list[list[str]], number: int) -> bool:
    values = [row[number] for row in rows if number < len(row) and row[number]]
    return bool(values) and not any(_is_number(value) for value in values)
