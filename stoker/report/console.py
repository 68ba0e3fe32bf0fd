"""Prints text and tables to a terminal, a file or a pipe. Used by all `*_terminal.py` modules.

A file or a pipe gets complete lines without control characters, colors or wrapping.
"""

import io
import os
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

UNBOUNDED_WIDTH = 10_000
"""Width that disables wrapping."""


def supports_cursor(file: TextIO) -> bool:
    """Whether `file` is a terminal with cursor movement."""
    return file.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def make_console(file: TextIO, *, terminal: bool, width: int | None = None) -> Console:
    """A rich console without markup, emoji and highlighting. It respects NO_COLOR.

    A character that the encoding of the stream lacks becomes `?`: the locale of a container must not end a training.
    """
    if isinstance(file, io.TextIOWrapper):
        file.reconfigure(errors="replace")
    return Console(
        file=file,
        force_terminal=terminal,
        width=width if terminal or width else UNBOUNDED_WIDTH,
        color_system="auto" if terminal else None,
        highlight=False,
        emoji=False,
        markup=False,
        force_jupyter=False,
    )


def render_plain(renderable: RenderableType, width: int | None = None) -> str:
    """Lines without colors and trailing spaces."""
    text = io.StringIO()
    make_console(text, terminal=False, width=width).print(renderable)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip("\n").split("\n"))


def print_renderables(
    renderables: Iterable[RenderableType], file: TextIO | None = None, *, width: int | None = None
) -> None:
    """Prints texts and tables one after the other."""
    stream = sys.stdout if file is None else file
    terminal = supports_cursor(stream)
    console = make_console(stream, terminal=terminal, width=width)
    for renderable in renderables:
        if terminal:
            console.print(renderable)
        else:
            stream.write(render_plain(renderable, width) + "\n")


def table(*columns: str, right: Iterable[int] = (), header: bool = True) -> Table:
    """A table without borders. right: indices of right-aligned columns."""
    result = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, show_header=header, header_style="dim")
    for index, name in enumerate(columns):
        justify: Any = "right" if index in right else "left"
        result.add_column(name, justify=justify, no_wrap=index in right, overflow="fold")
    return result


def plain_text(text: object, style: str = "") -> Text:
    """A text without control characters: a class or file name must not control the terminal."""
    return Text("".join(c if c == "\n" or c.isprintable() else "\ufffd" for c in str(text)), style)
