"""How text and tables reach a terminal, a file or a pipe. What they say is `terminal.py`'s.

A file or a pipe gets whole lines without control characters, without colours, without wrapping.
"""

import io
import os
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

UNBOUNDED = 10_000
"""Columns of a page that nobody wraps."""


def can_move(file: TextIO) -> bool:
    """Whether `file` is a terminal whose cursor can be moved."""
    return file.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def make_console(file: TextIO, *, terminal: bool, width: int | None = None) -> Console:
    """A rich console that prints texts as they are: no markup, no emoji, no guessed colours. It honours NO_COLOR.

    A character that the stream's encoding lacks becomes `?`: a container's locale must not end a training.
    """
    if isinstance(file, io.TextIOWrapper):
        file.reconfigure(errors="replace")
    return Console(
        file=file,
        force_terminal=terminal,
        width=width if terminal or width else UNBOUNDED,
        color_system="auto" if terminal else None,
        highlight=False,
        emoji=False,
        markup=False,
        force_jupyter=False,
    )


def as_plain(renderable: RenderableType, width: int | None = None) -> str:
    """Lines without colours and without the spaces that fill a table's lines."""
    text = io.StringIO()
    make_console(text, terminal=False, width=width).print(renderable)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip("\n").split("\n"))


def print_parts(parts: Iterable[RenderableType], file: TextIO | None = None, *, width: int | None = None) -> None:
    """Prints texts and tables one under the other."""
    stream = sys.stdout if file is None else file
    terminal = can_move(stream)
    console = make_console(stream, terminal=terminal, width=width)
    for part in parts:
        if terminal:
            console.print(part)
        else:
            stream.write(as_plain(part, width) + "\n")


def table(*columns: str, right: Iterable[int] = (), header: bool = True) -> Table:
    """A table without lines. right: positions of the columns of numbers."""
    made = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, show_header=header, header_style="dim")
    for position, name in enumerate(columns):
        aligned: Any = "right" if position in right else "left"
        made.add_column(name, justify=aligned, no_wrap=position in right, overflow="fold")
    return made


def plain_text(text: object, style: str = "") -> Text:
    """A text without control characters: the name of a class or a file must not steer the reader's terminal."""
    return Text("".join(c if c == "\n" or c.isprintable() else "\ufffd" for c in str(text)), style)
