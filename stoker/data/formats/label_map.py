"""Label maps of the TensorFlow Object Detection API (`label_map.pbtxt`): ids to class names, read and written.

    item { id: 1  name: 'cat' }
    item { id: 2  name: '/m/0bt9lr'  display_name: "dog" }

It is protobuf's text format (https://protobuf.dev/reference/protobuf/textformat-spec/); of the message
(object_detection/protos/string_int_label_map.proto) id, name and display_name are read, everything else is passed over.
Not here: which label map belongs to which records (`tfrecord_files.py`, `tfrecord_classes.py`).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from stoker.errors import DataError

BACKGROUND = 0
"""TensorFlow's own id for "no object"; an entry for it may only be called "background"."""
PEEK_BYTES = 1 << 16
EXAMPLE = "item { id: 1 name: 'cat' } for each class, ids from 1"
_TOKEN = re.compile(
    r"""(?P<space>[\s,;]+|\#[^\n]*)|(?P<text>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')"""
    r"""|(?P<word>[A-Za-z_][\w.]*)|(?P<number>-\s*[\w.][\w.+-]*|[\d.][\w.+-]*)|(?P<mark>[{}<>:\[\]/])"""
)
_CLOSING = {"{": "}", "<": ">", "[": "]"}
_ITEM = re.compile(rb"\bitem\s*:?\s*[{<]")
_ESCAPE = re.compile(
    rb"\\(?:([abfnrtv?'\"\\])|x([0-9A-Fa-f]{1,2})|([0-7]{1,3})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.?))"
)
_SIMPLE_ESCAPES = dict(zip(b"abfnrtv?'\"\\", b"\a\b\f\n\r\t\v?'\"\\", strict=True))


class LabelMap(NamedTuple):
    """The classes of a file in order of their ids."""

    path: Path
    ids: list[int]
    """1 or more, all different."""
    names: list[str]
    """[C], what a class is called: its display_name where it has one."""
    index_by_name: dict[str, int]
    """What a record may call a class, its name or its display_name → its place in `ids`."""


class _Token(NamedTuple):
    kind: str
    text: str
    line: int


@dataclass
class _Item:
    line: int
    id: int | None = None
    name: str | None = None
    display_name: str | None = None


def looks_like_label_map(path: Path) -> bool:
    """Whether the first 64 KiB have an item: graphs and pipelines are .pbtxt files, too."""
    with path.open("rb") as file:
        head = re.sub(rb"#[^\n]*", b"", file.read(PEEK_BYTES))
    return _ITEM.search(head) is not None


def read(path: Path) -> LabelMap:
    """Reads a label map. Raises DataError that names file and line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError("A label map is not UTF-8.", location=path, cause=str(error), fix="save it as UTF-8") from error
    items = []
    for item in sorted(_Parser(text, path).parse_items(), key=lambda item: item.id or 0):
        if item.id is None or not (item.name or item.display_name):
            missing = "id" if item.id is None else "name"
            raise DataError(f"An item of a label map has no {missing}.", location=f"{path}:{item.line}", fix=EXAMPLE)
        if item.id == BACKGROUND and "background" in (item.name, item.display_name):
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
    for (first_id, first), (second_id, second) in pairwise(items):
        if first_id == second_id:
            location = f"{path}:{first.line} and line {second.line}"
            raise DataError(
                f"Two items of a label map have the id {first_id}.", location=location, fix="give each its own"
            )
    return LabelMap(path, [class_id for class_id, _ in items], *_collect_names([item for _, item in items], path))


def _collect_names(items: Sequence[_Item], path: Path) -> tuple[list[str], dict[str, int]]:
    index_by_name: dict[str, int] = {}
    for class_index, item in enumerate(items):
        for name in dict.fromkeys(name for name in (item.name, item.display_name) if name):
            earlier = index_by_name.setdefault(name, class_index)
            if earlier != class_index:
                raise DataError(
                    f"Two items of a label map are called {name!r}.",
                    location=f"{path}:{items[earlier].line} and line {item.line}",
                    fix="give each class a name of its own",
                )
    return [item.display_name or item.name or "" for item in items], index_by_name


def to_text(class_names: Sequence[str]) -> str:
    """The text of a label map that numbers the classes from 1."""
    return "".join(
        f"item {{\n  id: {class_id}\n  name: {_quote(name)}\n}}\n" for class_id, name in enumerate(class_names, 1)
    )


def _quote(text: str) -> str:
    escapes = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return "'" + "".join(escapes.get(character, character) for character in text) + "'"


class _Parser:
    """Walks over the tokens of one file."""

    def __init__(self, text: str, path: Path) -> None:
        self._path = path
        self._tokens = list(self._tokenize(text))
        self._position = 0

    def _tokenize(self, text: str) -> Iterator[_Token]:
        offset, line = 0, 1
        while offset < len(text):
            match = _TOKEN.match(text, offset)
            if match is None:
                raise self._error(line, f"{text[offset : offset + 20].splitlines()[0]!r} is not understood")
            if match.lastgroup != "space":
                yield _Token(str(match.lastgroup), match[0], line)
            line += match[0].count("\n")
            offset = match.end()
        yield _Token("end", "the end of the file", line)

    def _error(self, line: int, cause: str) -> DataError:
        return DataError("A label map cannot be read.", location=f"{self._path}:{line}", cause=cause, fix=EXAMPLE)

    def _next(self) -> _Token:
        token = self._tokens[self._position]
        self._position += 1 if token.kind != "end" else 0
        return token

    def _peek(self) -> _Token:
        return self._tokens[self._position]

    def parse_items(self) -> Iterator[_Item]:
        """The items of the file. Raises DataError."""
        while self._peek().kind != "end":
            field = self._parse_field_name()
            if field.text != "item":
                self._skip_value()
                continue
            if self._peek().text == ":":
                self._next()
            opening = self._next()
            if opening.text not in ("{", "<"):
                raise self._error(opening.line, f"{opening.text} follows item where {{ should")
            item = _Item(field.line)
            while self._peek().text != _CLOSING[opening.text]:
                self._parse_field(item)
            self._next()
            yield item

    def _parse_field_name(self) -> _Token:
        token = self._next()
        if token.text == "[":  # an extension's name
            while self._next().text != "]":
                if self._peek().kind == "end":
                    raise self._error(token.line, "a bracket is never closed")
            return token
        if token.kind != "word":
            raise self._error(token.line, f"{token.text} stands where the name of a field should")
        return token

    def _parse_field(self, item: _Item) -> None:
        field = self._parse_field_name()
        if field.text not in ("id", "name", "display_name"):
            self._skip_value()
            return
        colon, value = self._next(), self._peek()
        if colon.text != ":":
            raise self._error(colon.line, f"{colon.text} follows {field.text} where a colon should")
        if field.text == "id":
            try:
                item.id = int(self._next().text, 0 if value.text.lower().startswith("0x") else 10)
            except ValueError as error:
                raise self._error(value.line, f"the id {value.text} is no whole number") from error
        elif value.kind != "text":
            raise self._error(value.line, f"{value.text} follows {field.text} where a quoted text should")
        elif field.text == "name":
            item.name = self._parse_text()
        else:
            item.display_name = self._parse_text()

    def _parse_text(self) -> str:
        """Quoted texts that stand one behind the other are one; escapes are those of C, in UTF-8."""
        pieces = []
        while self._peek().kind == "text":
            token = self._next()
            inner, offset = token.text[1:-1].encode(), 0
            for match in _ESCAPE.finditer(inner):
                pieces += [inner[offset : match.start()], self._decode_escape(match, token.line)]
                offset = match.end()
            pieces.append(inner[offset:])
        try:
            return b"".join(pieces).decode()
        except UnicodeDecodeError as error:
            line = self._tokens[self._position - 1].line
            raise self._error(line, f"the escapes of a text are not UTF-8: {error.reason}") from error

    def _decode_escape(self, match: re.Match[bytes], line: int) -> bytes:
        letter, hexadecimal, octal, short, long, other = match.groups()
        if letter:
            return bytes([_SIMPLE_ESCAPES[letter[0]]])
        if octal:
            return bytes([int(octal, 8) & 0xFF])
        if hexadecimal:
            return bytes([int(hexadecimal, 16)])
        if other is None and (code := int(short or long, 16)) < 0x110000 and not 0xD800 <= code < 0xE000:
            return chr(code).encode()
        raise self._error(line, f"there is no escape {match[0].decode()}")

    def _skip_value(self) -> None:
        """Passes over the value of a field that is not read: a scalar, a message or a list."""
        if self._peek().text == ":":
            self._next()
        token = self._next()
        if token.text in _CLOSING:
            closing_brackets = [_CLOSING[token.text]]
            while closing_brackets:
                inner = self._next()
                if inner.kind == "end":
                    raise self._error(token.line, f"{token.text} is never closed")
                if inner.kind == "mark" and inner.text in _CLOSING:
                    closing_brackets.append(_CLOSING[inner.text])
                elif inner.kind == "mark" and inner.text == closing_brackets[-1]:
                    closing_brackets.pop()
        elif token.kind == "text":
            while self._peek().kind == "text":
                self._next()
        elif token.kind not in ("word", "number"):
            raise self._error(token.line, f"{token.text} stands where a value should")
