"""What a person sees of a run on the terminal: live while it trains, and the scores afterwards. `explain_terminal.py`
has what `stoker why` prints.

On a terminal the last lines move (rich); into a file or a pipe, or with TERM=dumb, whole lines are written and nothing
else: no control characters, at most one line of progress in ten seconds. NO_COLOR takes the colours away. Whatever is
shown here is also in the run's records, by the caller; so a screen that cannot be written to (a full disk under the
log, a closed terminal) is noted in `lost` and never ends a training.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TextIO

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stoker.evaluation.metrics import COCO_SUMMARY, Metrics
from stoker.report import format as fmt
from stoker.report.console import (
    make_console,
    plain_text,
    print_renderables,
    render_plain,
    supports_cursor,
    table,
)
from stoker.runs.schemas import StepWindow

PLAIN_PROGRESS_INTERVAL_S = 10.0
"""Least time between two lines of progress where the screen is not a terminal."""


class Screen:
    """The screen of a training. A context manager: it gives the terminal back whatever happens inside.

    Safe from several threads. live: moving lines; default: when `file` is a terminal that can move its cursor.
    clock: seconds, replaced in tests. width: columns, replaced in tests.
    """

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
        """Why something could not be shown, the last time."""
        self.is_live = supports_cursor(self._file) if live is None else live
        self._console = make_console(self._file, terminal=self.is_live, width=width)
        self._live: Live | None = None

    def __enter__(self) -> "Screen":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def note(self, text: str) -> None:
        """Something happened that a person wants to know."""
        self._print(plain_text(text))

    def warning(self, text: str) -> None:
        """Something is wrong, and the run goes on."""
        self._print(Text.assemble(("warning: ", "bold yellow"), plain_text(text)))

    def settings(self, rows: Iterable[tuple[str, object, str | None]]) -> None:
        """All settings: (name, value, why stoker chose it; None where the user did)."""
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
        """How far the run is. done: 0 … 1; total_steps: None where the length is a time; memory: used, total bytes."""
        step = f"step {window.step:,}" + (f"/{total_steps:,}" if total_steps is not None else "")
        details = " · ".join(_details(window, memory))
        with self._lock:
            if self.is_live:
                self._update_live(_live_lines(step, fraction_done, eta_s, details))
            elif self._clock() >= self._next_line_s:
                self._next_line_s = self._clock() + PLAIN_PROGRESS_INTERVAL_S
                eta = [f"ETA {fmt.duration(eta_s)}"] if eta_s is not None else []
                self._print(plain_text(" · ".join([f"{step} ({fmt.percentage(fraction_done)})", details, *eta])))

    def evaluated(self, step: int, metrics: Metrics) -> None:
        """The scores of an evaluation in one line."""
        self._print(Text(f"evaluated at step {step:,}: {score_line(metrics)}", "bold"))

    def close(self) -> None:
        """Gives the terminal back. A stream that nobody reads any more, or that still cannot be written, is pointed
        nowhere, so that what is printed after a training does not end it, nor Python's own flush at its exit."""
        self._stop_live()
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
                # no thread of its own: lines change when there is news, and the training keeps its processor
                self._live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stdout=False,
                                  redirect_stderr=False)  # fmt: skip
                self._live.start()
            self._live.update(lines, refresh=True)

    def _stop_live(self) -> None:
        with self._lock, self._tolerating_errors():
            live, self._live = self._live, None
            if live is not None:
                live.stop()

    @contextlib.contextmanager
    def _tolerating_errors(self) -> Iterator[None]:
        """A screen that fails must not end the run: its records say the same."""
        try:
            yield
        except OSError as error:
            self.last_error = error


def score_line(metrics: Metrics) -> str:
    """The scores that are compared most, in a line."""
    names = (("AP", "ap"), ("AP50", "ap50"), ("AP75", "ap75"), ("small", "ap_small"), ("medium", "ap_medium"),
             ("large", "ap_large"), ("AR100", "ar100"))  # fmt: skip
    return " · ".join(f"{title} {fmt.metric(getattr(metrics, name))}" for title, name in names)


_TITLES = ("AP", "AP50", "AP75", "AP small", "AP medium", "AP large",
           "AR 1", "AR 10", "AR 100", "AR small", "AR medium", "AR large")  # fmt: skip


def print_settings(rows: Iterable[tuple[str, object, str | None]]) -> None:
    """The table of `Screen.settings`, on stdout."""
    print_renderables([_settings(rows)])


def _settings(rows: Iterable[tuple[str, object, str | None]]) -> RenderableType:
    rendered = table("setting", "value", "why")
    for name, value, reason in rows:
        style = "bold" if reason is None else ""
        reason_text = plain_text("set by you" if reason is None else reason, "dim")
        rendered.add_row(plain_text(name, style), plain_text(_format_value(value), style), reason_text)
    return rendered


def print_metrics(metrics: Metrics, file: TextIO | None = None, *, width: int | None = None) -> None:
    """The twelve COCO numbers, and a table of the classes, the best first."""
    numbers = table("", "", "", "", header=False)
    half = len(COCO_SUMMARY) // 2
    for pair in zip(range(half), range(half, len(COCO_SUMMARY)), strict=True):
        numbers.add_row(*(cell for n in pair for cell in (_TITLES[n], fmt.metric(getattr(metrics, COCO_SUMMARY[n])))))
    classes = table("class", "AP", "AP50", "boxes", right=(1, 2, 3))
    for row in sorted(metrics.per_class, key=lambda c: -1.0 if c.ap is None else c.ap, reverse=True):
        classes.add_row(plain_text(row.name), fmt.metric(row.ap), fmt.metric(row.ap50), fmt.count(row.boxes))
    unread = f" ({metrics.missing:,} more could not be read)" if metrics.missing else ""
    counts = (
        f"{fmt.plural(metrics.num_images, 'picture')}{unread}, {fmt.plural(metrics.boxes, 'box', 'boxes')}, "
        f"{fmt.plural(metrics.detections, 'detection')}"
    )
    print_renderables([counts, "", numbers, "", classes], file, width=width)


def _details(window: StepWindow, memory: tuple[int, int] | None) -> Iterator[str]:
    """The parts of a line of progress; what is not known is left out."""
    components = ", ".join(f"{name} {fmt.number(value)}" for name, value in window.losses.items() if name != "total")
    if "total" in window.losses:
        yield f"loss {fmt.number(window.losses['total'])}" + (f" ({components})" if components else "")
    if window.skipped_steps:
        yield f"{fmt.plural(window.skipped_steps, 'step')} skipped"
    if window.lr is not None:
        yield f"rate {window.lr:.3g}"
    if window.wall_s > 0:
        yield f"{fmt.number(window.num_images / window.wall_s)} img/s"
        yield f"device busy {fmt.percentage(window.phases.get('compute', 0.0) / (window.wall_s * window.devices))}"
    if memory is not None:
        yield f"memory {fmt.memory(*memory)}"


def _live_lines(step: str, fraction_done: float, eta_s: float | None, details: str) -> RenderableType:
    line = Table.grid(padding=(0, 2, 0, 0))
    eta = f"ETA {fmt.duration(eta_s)}" if eta_s is not None else ""
    line.add_row(
        Text(step, "bold"),
        ProgressBar(total=1.0, completed=fraction_done, width=30),
        fmt.percentage(fraction_done),
        eta,
    )
    return Group(line, plain_text(details))


def _format_value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple | list):
        return " ".join(_format_value(item) for item in value)
    return str(value)


def redirect_to_devnull(file: TextIO) -> None:
    """Points a stream nowhere: what is left in its buffer would fail again when Python exits, with exit code 120."""
    with contextlib.suppress(OSError, ValueError):  # no file beneath it, or closed: nothing is left to fail
        devnull_fd = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull_fd, file.fileno())
        os.close(devnull_fd)
