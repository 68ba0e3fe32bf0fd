"""Progress bar of a long command, on a terminal only."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from stoker.report.console import make_console, supports_cursor


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Shows a bar on stderr while the block runs. Yields a function of (done, total)."""
    if not supports_cursor(sys.stderr):
        yield lambda _done, _all: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=make_console(sys.stderr, terminal=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
