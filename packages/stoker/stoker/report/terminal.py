"""Terminal output of a training: progress while it runs, and metrics afterwards.

On a terminal the last lines are updated in place (rich). To a file, a pipe, or with TERM=dumb, complete lines are
written: no control characters, at most one line of progress every ten seconds. The records of the run have the same, so
an output that fails (full disk, closed terminal) is kept in `last_error` and never ends a training.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from stoker_watch.report import format as fmt
from stoker_watch.report.console import (
    make_console,
    plain_text,
    print_renderables,
    redirect_to_devnull,
    render_plain,
    supports_cursor,
    table,
)
from stoker_watch.runs.evaluation import COCO_SUMMARY, COCO_TITLES, Metrics
from stoker_watch.runs.schemas import StepWindow

PLAIN_PROGRESS_INTERVAL_S = 10.0
"""Minimum time between two lines of progress if the output is not a terminal."""


class Screen(contextlib.AbstractContextManager["Screen"]):
    """Output of a training. A context manager: it restores the terminal, also after an exception. Thread-safe. live:
    update lines in place (default: where a terminal can). clock: seconds. width: columns."""

    def __init__(
        self,
        file: TextIO | None = None,
        *,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
        width: int | None = None,
    ) -> None:
        self._file = sys.stdout if file is None else file
        self._clock = clock
        self._lock = threading.RLock()
        self._next_line_s = clock()
        self.last_error: OSError | None = None
        """The last error of the output."""
        self.is_live = supports_cursor(self._file) if live is None else live
        self._console = make_console(self._file, terminal=self.is_live, width=width)
        self._live: Live | None = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def note(self, text: str) -> None:
        self._print(plain_text(text, newlines=True))

    def warning(self, text: str) -> None:
        """Prints a warning; the run continues."""
        self._print(Text.assemble(("warning: ", "bold yellow"), plain_text(text, newlines=True)))

    def settings(self, rows: Iterable[tuple[str, object, str | None]]) -> None:
        """Prints settings: (name, value, reason; None if the user set it)."""
        self._print(_settings(rows))

    def progress(
        self,
        window: StepWindow,
        *,
        fraction_done: float,
        total_steps: int | None,
        eta_s: float | None,
        memory: tuple[int, int] | None,
    ) -> None:
        """Shows the progress. fraction_done: 0 … 1; total_steps: None where it is not known; eta_s: None or 0 before
        the time of a step is known; memory: (used, total)."""
        step = f"step {window.step:,}" + (f"/{total_steps:,}" if total_steps is not None else "")
        details, done = " · ".join(_details(window, memory)), fmt.percentage(fraction_done)
        eta = f"ETA {fmt.duration(eta_s)}" if eta_s else ""
        with self._lock:
            if self.is_live:
                bar = ProgressBar(total=1.0, completed=fraction_done, width=30)
                line = table("", "", "", "", header=False, rows=[[Text(step, "bold"), bar, done, eta]])
                self._update_live(Group(line, plain_text(details)))
            elif self._clock() >= self._next_line_s:
                self._next_line_s = self._clock() + PLAIN_PROGRESS_INTERVAL_S
                self._print(plain_text(" · ".join([f"{step} ({done})", details, *([eta] if eta else [])])))

    def evaluated(self, step: int, metrics: Metrics) -> None:
        """Prints the most important metrics of an evaluation in one line."""
        names = (("AP", "ap"), ("AP50", "ap50"), ("AP75", "ap75"), ("small", "ap_small"), ("medium", "ap_medium"),
                 ("large", "ap_large"), ("AR100", "ar100"))  # fmt: skip
        scores = " · ".join(f"{title} {fmt.metric(getattr(metrics, name))}" for title, name in names)
        self._print(Text(f"evaluated at step {step:,}: {scores}", "bold"))

    def close(self) -> None:
        """Restores the terminal. A stream that still cannot be written is redirected to /dev/null, so that later output
        and the flush at the exit of Python do not fail."""
        with self._lock, self._tolerating_errors():
            live, self._live = self._live, None
            if live is not None:
                live.stop()
        broken = isinstance(self.last_error, BrokenPipeError)
        try:
            self._file.flush()
        except OSError as error:
            self.last_error, broken = error, True
        if broken:
            redirect_to_devnull(self._file)

    def _print(self, renderable: RenderableType) -> None:
        with self._lock, self._tolerating_errors():
            if self.is_live:
                self._console.print(renderable)
            else:
                self._file.write(render_plain(renderable) + "\n")
                self._file.flush()

    def _update_live(self, lines: RenderableType) -> None:
        with self._tolerating_errors():
            if self._live is None:
                # without a refresh thread: lines change only with new values, and training keeps its CPU time
                self._live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stdout=False,
                                  redirect_stderr=False)  # fmt: skip
                self._live.start()
            self._live.update(lines, refresh=True)

    @contextlib.contextmanager
    def _tolerating_errors(self) -> Iterator[None]:
        """Output that fails must not end the run; its records contain the same."""
        try:
            yield
        except OSError as error:
            self.last_error = error


def print_settings(rows: Iterable[tuple[str, object, str | None]]) -> None:
    """Prints the table of `Screen.settings` to stdout."""
    print_renderables([_settings(rows)])


def _settings(rows: Iterable[tuple[str, object, str | None]]) -> RenderableType:
    def cells(name: str, value: object, reason: str | None) -> list[RenderableType]:
        style = "bold" if reason is None else ""
        reason_text = "set by you" if reason is None else reason
        return [plain_text(name, style), plain_text(fmt.setting(value), style), plain_text(reason_text, "dim")]

    return table("setting", "value", "reason", rows=(cells(*row) for row in rows))


def print_metrics(metrics: Metrics, file: TextIO | None = None, *, width: int | None = None) -> None:
    """Prints the twelve COCO metrics, and a table of the classes, the best first."""
    cells = [(title, fmt.metric(getattr(metrics, name))) for title, name in zip(COCO_TITLES, COCO_SUMMARY, strict=True)]
    half = len(cells) // 2
    pairs = ([*left, *right] for left, right in zip(cells[:half], cells[half:], strict=True))
    ordered = sorted(metrics.per_class, key=lambda c: -1.0 if c.ap is None else c.ap, reverse=True)
    rows = ([row.name, fmt.metric(row.ap), fmt.metric(row.ap50), fmt.count(row.boxes)] for row in ordered)
    unread = f" ({metrics.missing:,} more could not be read)" if metrics.missing else ""
    counts = (
        f"{fmt.plural(metrics.num_images, 'image')}{unread}, {fmt.plural(metrics.boxes, 'box', 'boxes')}, "
        f"{fmt.plural(metrics.detections, 'detection')}"
    )
    numbers = table("", "", "", "", header=False, rows=pairs)
    classes = table("class", "AP", "AP50", "boxes", right=(1, 2, 3), rows=rows)
    print_renderables([counts, "", numbers, "", classes], file, width=width)


def _details(window: StepWindow, memory: tuple[int, int] | None) -> Iterator[str]:
    """Parts of a line of progress, without unknown values."""
    components = ", ".join(f"{name} {fmt.number(value)}" for name, value in window.losses.items() if name != "total")
    if "total" in window.losses:
        yield f"loss {fmt.number(window.losses['total'])}" + (f" ({components})" if components else "")
    if window.skipped_steps:
        yield f"{fmt.plural(window.skipped_steps, 'step')} skipped"
    if window.lr is not None:
        yield f"lr {window.lr:.3g}"
    if window.wall_s > 0:
        yield f"{fmt.number(window.num_images / window.wall_s)} img/s"
        yield f"device busy {fmt.percentage(window.phases.get('compute', 0.0) / (window.wall_s * window.devices))}"
    if memory is not None:
        yield f"memory {fmt.memory(*memory)}"
