"""The TensorBoard files, read back with the protocol buffers of tensorboardX."""

import io
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tensorboardX.crc32c import crc32c
from tensorboardX.proto import event_pb2

from stoker.data.images.decode import thumbnail
from stoker.evaluation.detections import Detections, empty_detections
from stoker.evaluation.draw import ImageWithBoxes
from stoker.report.tensorboard import FOLDER, MAX_IMAGE_SIDE, Board
from stoker_watch.runs.evaluation import COCO_SUMMARY, ClassMetrics, Metrics
from stoker_watch.runs.schemas import StepWindow


def masked(data: bytes) -> int:
    x = crc32c(data) & 0xFFFFFFFF
    return ((((x >> 15) | (x << 17)) & 0xFFFFFFFF) + 0xA282EAD8) & 0xFFFFFFFF


def events(run: Path) -> Iterator[Any]:
    """Every event of every file, in TensorBoard's order; a damaged record fails."""
    for path in sorted((run / FOLDER).iterdir()):
        data = path.read_bytes()
        while data:
            (length,), (header_crc,) = struct.unpack("<Q", data[:8]), struct.unpack("<I", data[8:12])
            record, (crc,) = data[12 : 12 + length], struct.unpack("<I", data[12 + length : 16 + length])
            assert masked(data[:8]) == header_crc
            assert masked(record) == crc
            yield event_pb2.Event.FromString(record)
            data = data[16 + length :]


def curves(run: Path) -> dict[str, list[tuple[int, float]]]:
    """The curves that TensorBoard shows: tag → points, after the purges of resumed runs (event_accumulator.py,
    `_Purge`)."""
    shown: dict[str, list[tuple[int, float]]] = {}
    for event in events(run):
        if event.session_log.status == event_pb2.SessionLog.START:
            for points in shown.values():
                points[:] = [point for point in points if point[0] < event.step]
        for value in event.summary.value:
            if value.HasField("simple_value"):
                shown.setdefault(value.tag, []).append((event.step, round(value.simple_value, 4)))
    return shown


def window(step: int, **changes: Any) -> StepWindow:
    fields: dict[str, Any] = {
        "t": 1000.0 + step, "attempt": 1, "step": step, "window_steps": 10, "num_images": 160, "wall_s": 2.0,
        "devices": 2, "phases": {"compute": 3.0, "eval": 1.0}, "losses": {"total": 1.5, "box": 0.5}, "lr": 0.01,
        **changes,
    }  # fmt: skip
    return StepWindow(**fields)


def metrics() -> Metrics:
    numbers: dict[str, Any] = {name: 0.5 for name in COCO_SUMMARY} | {"ap_small": None}
    classes = [
        ClassMetrics(name="car", ap=0.25, ap50=0.5, boxes=3),
        ClassMetrics(name="bus", ap=None, ap50=None, boxes=0),
    ]
    return Metrics(**numbers, per_class=classes, num_images=1, boxes=3, detections=9)


def test_a_window_becomes_points_at_its_own_time(tmp_path: Path) -> None:
    board = Board(tmp_path)
    board.add_window(window(20, grad_norm=2.5, memory_peak_bytes=3 * 2**29, skipped_steps=1))
    board.close()
    assert curves(tmp_path) == {
        "loss/total": [(20, 1.5)], "loss/box": [(20, 0.5)], "train/lr": [(20, 0.01)], "train/grad_norm": [(20, 2.5)],
        "train/skipped_steps": [(20, 1)], "speed/img_per_s": [(20, 80)], "speed/device_busy": [(20, 0.75)],
        "memory/peak_gib": [(20, 1.5)],
    }  # fmt: skip
    assert [event.wall_time for event in events(tmp_path) if event.step == 20] == [1020.0]


def test_an_unknown_value_has_no_point(tmp_path: Path) -> None:
    board = Board(tmp_path)
    board.add_window(window(20, losses={}, lr=None, wall_s=0.0))
    board.add_metrics(20, metrics())
    board.close()
    shown = curves(tmp_path)
    assert set(shown) == {"train/skipped_steps", "eval_class_ap/car"} | {f"eval/{n}" for n in COCO_SUMMARY} - {
        "eval/ap_small"
    }
    assert shown["eval_class_ap/car"] == [(20, 0.25)]


def test_a_resumed_run_continues_its_curves_without_a_fork(tmp_path: Path) -> None:
    first = Board(tmp_path)
    for step in (10, 20, 30, 40):
        first.add_window(window(step, losses={"total": 1.0}))
    first.close()
    second = Board(tmp_path, purge_step=20)
    for step in (30, 40, 50):
        second.add_window(window(step, losses={"total": 2.0}))
    second.close()
    assert len(list((tmp_path / FOLDER).iterdir())) == 2
    assert curves(tmp_path)["loss/total"] == [(10, 1.0), (20, 1.0), (30, 2.0), (40, 2.0), (50, 2.0)]


def boxes(*corners: tuple[float, ...]) -> Detections:
    count = len(corners)
    return Detections(image_index=np.zeros(count, np.int64), boxes=np.array(corners, np.float32).reshape(-1, 4),
                      score=np.ones(count, np.float32), label=np.zeros(count, np.int64),
                      image_indices=np.zeros(1, np.int64))  # fmt: skip


def read(path: Path) -> Callable[[int], tuple[np.ndarray, tuple[int, int]]]:
    return lambda side: thumbnail(path.read_bytes(), path, side)


def test_an_image_shows_gt_left_and_detections_right(tmp_path: Path) -> None:
    path = tmp_path / "large.png"
    Image.new("RGB", (2048, 1024), "white").save(path)
    board = Board(tmp_path)
    shown = ImageWithBoxes(
        path=path, load_image=read(path), gt=boxes((400, 400, 1600, 900)), detections=empty_detections([0])
    )
    board.add_images(7, [shown], ["car"])
    board.close()
    (event,) = [event for event in events(tmp_path) if event.summary.value]
    (value,) = event.summary.value
    image = Image.open(io.BytesIO(value.image.encoded_image_string))
    assert (event.step, value.tag, value.image.width) == (7, "images/0", 2 * MAX_IMAGE_SIDE + 4)
    assert image.size == (2 * MAX_IMAGE_SIDE + 4, MAX_IMAGE_SIDE // 2)
    pixels = np.asarray(image).astype(int)
    left, right = pixels[:, :MAX_IMAGE_SIDE], pixels[:, MAX_IMAGE_SIDE + 4 :]
    assert right.min() > 240
    assert left[162, 100].min() < 100  # the left edge of the box, at 400 / 4
    assert left[162, 200].min() > 240  # inside it


def test_an_unreadable_image_is_reported_and_the_rest_is_written(tmp_path: Path) -> None:
    errors: list[str] = []
    gone = tmp_path / "gone.jpg"
    board = Board(tmp_path, on_error=errors.append)
    board.add_images(7, [ImageWithBoxes(path=gone, load_image=read(gone), gt=boxes(), detections=boxes())], [])
    board.add_window(window(20))
    board.close()
    assert len(errors) == 1
    assert "cannot be drawn" in errors[0]
    assert "gone.jpg" in errors[0]
    assert "loss/total" in curves(tmp_path)


def test_a_write_error_is_reported_once_and_never_blocks(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("a file instead of the folder")
    errors: list[str] = []
    board = Board(tmp_path, on_error=errors.append)
    for step in range(5000):
        board.add_window(window(step))
    board.close()
    board.close()
    assert len(errors) == 1
    assert "no longer written: FileExistsError" in errors[0]
    assert board.error is not None


def test_a_hanging_disk_does_not_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writing thread hangs in a file (a pipe without a writer): entries beyond the queue are dropped."""
    monkeypatch.setattr("stoker.report.tensorboard._MAX_QUEUED", 10)
    pipe = tmp_path / "hangs.png"
    os.mkfifo(pipe)
    board = Board(tmp_path, on_error=lambda _: None)
    board.add_images(1, [ImageWithBoxes(path=pipe, load_image=read(pipe), gt=boxes(), detections=boxes())], [])
    for step in range(100):
        board.add_window(window(step))
    assert board.dropped >= 89
    pipe.write_bytes(b"no picture")  # goes on when the thread reads
    board.close()
    assert len(curves(tmp_path)["loss/total"]) == 100 - board.dropped


def test_a_full_disk_ends_the_board_not_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses to let the event file grow (RLIMIT_FSIZE), as a full disk does."""
    import resource
    import signal

    monkeypatch.setattr("stoker.report.tensorboard.FLUSH_INTERVAL_S", -1.0)
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    errors: list[str] = []
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        board = Board(tmp_path, on_error=errors.append)
        for step in range(200):
            board.add_window(window(step))
        board.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert len(errors) == 1
    assert "File too large" in errors[0]
