"""Prints text, all tables (`table`) and progress to a terminal, a file or a pipe.

A file or a pipe gets complete lines without control characters, colors or wrapping. Texts are cleaned (`printable`):
a class or file name must not control the terminal, nor begin a line.
"""

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from stoker_watch.printable import printable

UNBOUNDED_WIDTH = 10_000
"""Width that disables wrapping."""


def supports_cursor(file: TextIO) -> bool:
    """Whether `file` is a terminal with cursor movement."""
    return file.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


class _CleanConsole(Console):
    """Whatever is printed, the only control codes are those of rich."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            is_clean = segment.control or segment.text == "\n" or segment.text.isprintable()
            yield segment if is_clean else segment._replace(text="\n".join(map(printable, segment.text.split("\n"))))


class _PlainTable(Table):
    """A table whose cells have neither markup nor characters that control the terminal, however a row is added."""

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        super().add_row(*(plain_text(cell) if isinstance(cell, str) else cell for cell in cells), **options)


def make_console(file: TextIO, *, terminal: bool, width: int | None = None) -> Console:
    """A rich console without markup, emoji and highlighting. It respects NO_COLOR. A character that the encoding of the
    stream lacks becomes `?`: the locale of a container must not end a training."""
    if isinstance(file, io.TextIOWrapper):
        file.reconfigure(errors="replace")
    return _CleanConsole(
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
    stream = sys.stdout if file is None else file
    terminal = supports_cursor(stream)
    console = make_console(stream, terminal=terminal, width=width)
    for renderable in (plain_text(item) if isinstance(item, str) else item for item in renderables):
        if terminal:
            console.print(renderable)
        else:
            stream.write(render_plain(renderable, width) + "\n")


def table(
    *columns: str, right: Iterable[int] = (), header: bool = True, rows: Iterable[Iterable[RenderableType]] = ()
) -> Table:
    """A table without borders. right: indices of right-aligned columns."""
    result = _PlainTable(box=None, padding=(0, 2, 0, 0), show_edge=False, show_header=header, header_style="dim")
    for index, name in enumerate(columns):
        justify: Any = "right" if index in right else "left"
        result.add_column(plain_text(name), justify=justify, no_wrap=index in right, overflow="fold")
    for row in rows:
        result.add_row(*row)
    return result


def facts(rows: Iterable[tuple[str, RenderableType]]) -> Table:
    """A table of names and values, without a header."""
    return table("", "", header=False, rows=rows)


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int | None], None]]:
    """Shows a bar on stderr while the block runs, if it is a terminal. Yields a function of (done, total)."""
    if not supports_cursor(sys.stderr):
        yield lambda _done, _all: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=make_console(sys.stderr, terminal=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def plain_text(text: object, style: str = "", *, newlines: bool = False) -> Text:
    """A text without control characters, in one line. newlines: keep its lines; those after the first are indented."""
    return Text(printable(text, newlines=newlines), style)


def redirect_to_devnull(file: TextIO) -> None:
    """Redirects a stream to /dev/null: else its buffered data would fail again when Python exits (exit code 120)."""
    with contextlib.suppress(OSError, ValueError):  # without a file descriptor, or closed: nothing can fail later
        devnull_fd = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull_fd, file.fileno())
        os.close(devnull_fd)
