"""TensorBoard files of a run: curves, metrics, and images with ground truth and detections. Without TensorFlow.

The training thread only puts references into a queue; a thread of this module draws, encodes and writes. tensorboardX's
SummaryWriter is not used: its queue blocks the caller when the disk is full, and two writers made in the same second
overwrite each other's file. After an error the board reports it once and stops.
"""

import contextlib
import io
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from stoker.evaluation.draw import ImageWithBoxes, draw_comparison
from stoker_watch.errors import DataError, PreflightError, StorageError, needs_package
from stoker_watch.runs.evaluation import COCO_SUMMARY, Metrics
from stoker_watch.runs.schemas import StepWindow

FOLDER = "tensorboard"
MAX_IMAGE_SIDE = 512
"""Longer side of an image in pixels: tensorboardX computes checksums in Python, 0.24 µs per byte (100 kB: 24 ms)."""
FLUSH_INTERVAL_S = 5.0
_MAX_QUEUED = 1000
"""Entries that may wait for a slow disk; more are dropped and counted."""

BoardEntry = Callable[["_Writer"], None]
"""Writes scalars or images."""


class Board:
    """The TensorBoard files of one attempt of a run, in its folder `tensorboard`. purge_step: the step at which a run
    resumes; TensorBoard drops later points of earlier attempts, so curves do not fork. on_error: called from another
    thread when writing fails, or an image cannot be drawn."""

    def __init__(self, run: Path, *, purge_step: int = 0, on_error: Callable[[str], None] = lambda _: None) -> None:
        self._folder = run / FOLDER
        self._purge_step = purge_step
        self._on_error = on_error
        self._queue: queue.Queue[BoardEntry | None] = queue.Queue(_MAX_QUEUED)
        self.dropped = 0
        """Entries that were dropped because the queue was full."""
        self.error: str | None = None
        """The error after which nothing more is written."""
        self._thread = threading.Thread(target=self._run, name="stoker-tensorboard", daemon=True)
        self._thread.start()

    def add_window(self, window: StepWindow) -> None:
        values = dict(_scalars(window))
        self._put(lambda writer: writer.add_scalars(window.t, window.step, values))

    def add_metrics(self, step: int, metrics: Metrics) -> None:
        """Adds the twelve COCO metrics, and AP of every class; an undefined metric has no point."""
        t, numbers = time.time(), {f"eval/{name}": getattr(metrics, name) for name in COCO_SUMMARY}
        numbers |= {f"eval_class_ap/{row.name}": row.ap for row in metrics.per_class}
        values = {tag: value for tag, value in numbers.items() if value is not None}
        self._put(lambda writer: writer.add_scalars(t, step, values))

    def add_images(self, step: int, images: Sequence[ImageWithBoxes], class_names: Sequence[str]) -> None:
        """Adds images with ground truth (left) and detections (right). The writing thread reads the files."""
        t, images, class_names = time.time(), tuple(images), tuple(class_names)

        def draw(writer: "_Writer") -> None:
            for n, image in enumerate(images):
                try:
                    drawn = draw_comparison(image, class_names, MAX_IMAGE_SIDE)
                except (OSError, DataError, StorageError) as error:  # concerns this image only
                    self._on_error(f"TensorBoard: {image.path} cannot be drawn: {error}")
                else:
                    writer.add_image(t, step, f"images/{n}", drawn)

        self._put(draw)

    def close(self) -> None:
        """Writes the queued entries. May be called twice."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _put(self, entry: BoardEntry) -> None:
        try:
            self._queue.put_nowait(entry)
        except queue.Full:
            self.dropped += 1

    def _run(self) -> None:
        entries = iter(self._queue.get, None)  # until the None of `close`
        try:
            with contextlib.closing(_Writer(self._folder, self._purge_step)) as writer:
                flushed_s = time.monotonic()
                for entry in entries:
                    entry(writer)
                    if time.monotonic() - flushed_s > FLUSH_INTERVAL_S:
                        writer.flush()
                        flushed_s = time.monotonic()
        # Any error (full disk, incompatible protobuf) is reported, and training continues.
        except Exception as error:  # noqa: BLE001
            self.error = f"{type(error).__name__}: {error}"
            if isinstance(error, PreflightError):  # the package is missing
                self.error = f"{error.what} Fix: {error.fix}"
            self._on_error(f"TensorBoard files are no longer written: {self.error}")
            for _ in entries:
                pass


class _Writer:
    """One event file. Its name contains the time in nanoseconds, so files of two attempts never collide."""

    def __init__(self, folder: Path, purge_step: int) -> None:
        with needs_package("tensorboardX", "Writing TensorBoard files"):
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto import event_pb2, summary_pb2

        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        folder.mkdir(parents=True, exist_ok=True)
        self._file: Any = EventsWriter(str(folder / "events"), f".{time.time_ns():020d}")
        self.flush, self.close = self._file.flush, self._file.close
        if purge_step > 0:
            log = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            # TensorBoard drops points at this step and later ones; those at purge_step itself stay
            self._file.write_event(self._event(wall_time=time.time(), step=purge_step + 1, session_log=log))

    def add_scalars(self, t: float, step: int, values: dict[str, float]) -> None:
        points = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._file.write_event(self._event(wall_time=t, step=step, summary=self._summary(value=points)))

    def add_image(self, t: float, step: int, tag: str, drawn: Image.Image) -> None:
        jpeg = io.BytesIO()
        drawn.save(jpeg, "JPEG", quality=85)
        image = self._summary.Image(
            height=drawn.height, width=drawn.width, colorspace=3, encoded_image_string=jpeg.getvalue()
        )
        value = self._summary.Value(tag=tag, image=image)
        self._file.write_event(self._event(wall_time=t, step=step, summary=self._summary(value=[value])))


def _scalars(window: StepWindow) -> Iterator[tuple[str, float]]:
    for name, value in window.losses.items():
        yield f"loss/{name}", value
    if window.lr is not None:
        yield "train/lr", window.lr
    if window.grad_norm is not None:
        yield "train/grad_norm", window.grad_norm
    yield "train/skipped_steps", window.skipped_steps
    if window.wall_s > 0:
        yield "speed/img_per_s", window.num_images / window.wall_s
        yield "speed/device_busy", window.phases.get("compute", 0.0) / (window.wall_s * window.devices)
    if window.memory_peak_bytes is not None:
        yield "memory/peak_gib", window.memory_peak_bytes / 2**30
