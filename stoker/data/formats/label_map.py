"""Label maps of the TensorFlow Object Detection API (`label_map.pbtxt`): ids to class names, read and written.

    item { id: 1  name: 'cat' }
    item { id: 2  name: '/m/0bt9lr'  display_name: "dog" }

It is protobuf's text format, read by protobuf. Of the message (object_detection/protos/string_int_label_map.proto) id,
name and display_name are read, all other fields are skipped. Not here: which label map belongs to which records
(`tfrecord.py`).
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from stoker import regular_files
from stoker.data.formats.tfrecord_bytes import message_class
from stoker.errors import DataError

BACKGROUND = 0
"""TensorFlow's own id for "no object"; an item with this id must be called "background"."""
PEEK_BYTES = 1 << 16
MAX_BYTES = 1 << 26
"""Of a label map: 100,000 classes have 8 MB."""
EXAMPLE = "item { id: 1 name: 'cat' } for each class, ids from 1"
_ITEM = re.compile(r"""(?:\#[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|(?P<item>(?<![\w.])item\s*:?\s*[{<])""")
"""An item's beginning; also matches comments and strings, so that none is found inside them."""


class LabelMap(NamedTuple):
    """The classes of a file, in the order of their ids."""

    path: Path
    ids: list[int]
    """1 or more, all different."""
    names: list[str]
    """[C], the display_name of each class, else its name."""
    index_by_name: dict[str, int]
    """Name or display_name of a class → index into `ids`. Records may use either."""


class _Item(NamedTuple):
    id: int | None
    names: list[str]
    """Display name and name, without absent ones."""
    line: int


def looks_like_label_map(path: Path) -> bool:
    """Whether the first 64 KiB have an item: graphs and pipelines are .pbtxt files too."""
    with regular_files.open_file(path) as file:
        return bool(_item_lines(file.read(PEEK_BYTES).decode(errors="replace")))


def _item_lines(text: str) -> list[int]:
    """The line of each item."""
    return [text.count("\n", 0, match.start()) + 1 for match in _ITEM.finditer(text) if match["item"]]


def _parse_items(path: Path) -> list[_Item]:
    from google.protobuf import text_format

    try:
        text = regular_files.read_text(path, encoding="utf-8-sig", max_bytes=MAX_BYTES)
    except UnicodeDecodeError as error:
        raise DataError("A label map is not UTF-8.", location=path, cause=str(error), fix="save it as UTF-8") from error
    message = message_class("LabelMap")()
    try:
        text_format.Parse(text, message, allow_unknown_field=True, allow_unknown_extension=True)
    except text_format.ParseError as error:
        location = path if error.GetLine() is None else f"{path}:{error.GetLine()}"
        raise DataError("A label map cannot be read.", location=location, cause=str(error), fix=EXAMPLE) from error
    except RecursionError as error:
        cause = "its messages are nested too deeply"
        raise DataError("A label map cannot be read.", location=path, cause=cause, fix=EXAMPLE) from error
    return [
        _Item(item.id if item.HasField("id") else None, [n for n in (item.display_name, item.name) if n], line)
        for item, line in zip(message.item, _item_lines(text), strict=False)
    ]


def read(path: Path) -> LabelMap:
    """Reads a label map. Raises DataError with file and line."""
    items: list[tuple[int, _Item]] = []
    for item in _parse_items(path):
        if item.id is None or not item.names:
            missing = "id" if item.id is None else "name"
            raise DataError(f"An item of a label map has no {missing}.", location=f"{path}:{item.line}", fix=EXAMPLE)
        if item.id == BACKGROUND and "background" in item.names:
            continue
        if item.id < 1:
            raise DataError(
                f"A label map gives a class the id {item.id}.",
                location=f"{path}:{item.line}",
                cause="0 is TensorFlow's background",
                fix="number the classes from 1, in the label map and in the records",
            )
        items.append((item.id, item))
    if not items:
        raise DataError("A label map has no classes.", location=path, fix=EXAMPLE)
    items.sort(key=lambda entry: entry[0])
    for (first_id, first), (second_id, second) in pairwise(items):
        if first_id == second_id:
            location = f"{path}:{first.line} and line {second.line}"
            raise DataError(
                f"Two items of a label map have the id {first_id}.", location=location, fix="give each its own"
            )
    index_by_name: dict[str, int] = {}
    for class_index, (_, item) in enumerate(items):
        for name in item.names:
            if (earlier := index_by_name.setdefault(name, class_index)) != class_index:
                raise DataError(
                    f"Two items of a label map are called {name!r}.",
                    location=f"{path}:{items[earlier][1].line} and line {item.line}",
                    fix="give each class a name of its own",
                )
    return LabelMap(path, [class_id for class_id, _ in items], [item.names[0] for _, item in items], index_by_name)


def to_text(class_names: Sequence[str]) -> str:
    """The text of a label map that numbers the classes from 1."""
    return "".join(
        f"item {{\n  id: {class_id}\n  name: {_quote(name)}\n}}\n" for class_id, name in enumerate(class_names, 1)
    )


def _quote(text: str) -> str:
    escapes = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return "'" + "".join(escapes.get(character, character) for character in text) + "'"
