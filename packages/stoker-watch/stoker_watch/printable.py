"""Text of others as it may reach a terminal: names of classes and files, lines of logs, messages of other programs.

A control character in it could move the cursor, overwrite our lines, set the title of the window or, as a newline,
forge a line of ours; bidirectional controls show a text in another order than it has. Everything that is printed goes
through `printable`, through `print_text` or through the console of `stoker_watch/report/console.py`.
"""

import re
import sys
import unicodedata
from typing import Any, TextIO

_KEPT = "\u200c\u200d"
"""Joiners: Persian words and emoji need them, and no terminal obeys them."""


_SURROGATE = re.compile("[\ud800-\udfff]")


class _Characters(dict[int, str]):
    """Code point → what is shown: itself, a space for other spaces and tabs, U+FFFD for what is not printable."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        if character.isprintable() or character in _KEPT:
            self[code] = character
        else:
            self[code] = " " if character == "\t" or unicodedata.category(character) == "Zs" else "\ufffd"
        return self[code]


_CHARACTERS = _Characters()


def printable(text: object, *, newlines: bool = False) -> str:
    """The text without control characters (C0, C1, bidirectional), lone surrogates and other spaces. newlines: keep
    them, for a text of several lines; the lines after the first are then indented, so that none looks like ours."""
    shown = str(text)
    if shown.isprintable():
        return shown
    if not newlines:
        return shown.translate(_CHARACTERS)
    first, *others = (line.translate(_CHARACTERS) for line in shown.replace("\r\n", "\n").split("\n"))
    return "\n".join([first, *(line if line.startswith(" ") or not line else f"  {line}" for line in others)])


def print_text(text: object, *, newlines: bool = False, file: TextIO | None = None, flush: bool = False) -> None:
    """Prints one line; with `newlines` a text that may have several, as `printable` has them."""
    print(printable(text, newlines=newlines), file=file, flush=flush)


def print_json(value: Any) -> None:
    """Prints a value as JSON, in which `\\u` escapes stand for what is not printable: they have the same meaning."""
    sys.stdout.write(escape_json(encode_json(value).decode()) + "\n")


def encode_json(value: Any) -> bytes:
    """JSON, also of file names that are not UTF-8: `\\udcff` stands for a byte that is none."""
    import msgspec

    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        import json

        text = json.dumps(msgspec.to_builtins(value), ensure_ascii=False)
        return _SURROGATE.sub(lambda match: f"\\\\u{ord(match[0]):04x}", text).encode()


def escape_json(text: str) -> str:
    """JSON in which all characters are printable; newlines between values are kept."""
    if text.isprintable():
        return text
    import json

    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
