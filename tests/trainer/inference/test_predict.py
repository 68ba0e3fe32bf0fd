"""predict.py and draw.py on real image files, with a double that finds what is bright."""

import hashlib
import json
import threading
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor, nn

from stoker.config.settings import ModelSettings
from stoker.data.loading.buffers import HostBatchBuffer
from stoker.evaluation.detections import Detections, empty_detections
from stoker.evaluation.draw import MIN_DRAW_SIDE, class_color, draw_boxes
from stoker.hardware.device import Device
from stoker.inference import image_batches
from stoker.inference.predict import RESULTS_NAME, find_images, output_names, predict_images, predict_to_dir
from stoker.models import BatchDetections as InSlots
from stoker.models.weights.model_file import ModelMetadata
from stoker_watch.errors import DataError, StorageError, UsageError

CPU = Device(torch.device("cpu"))
CARD = ModelMetadata(settings=ModelSettings(), class_names=("lamp", "spare"), image_size=(96, 64), resize="letterbox")


class BrightObjectDetector(nn.Module):
    """A double of a detector: the box around the pixels that are white, where there are any."""

    iou_threshold = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.shapes: set[tuple[int, ...]] = set()

    def forward(self, images: Tensor) -> Tensor:
        self.shapes.add(tuple(images.shape))
        assert not (images * self.weight).requires_grad, "an evaluation needs no graph"
        return images

    def decode(self, raw: Tensor, resized_size: Tensor, scale: Tensor, size: Tensor, *, score_threshold: float,
               iou_threshold: float) -> InSlots:  # fmt: skip
        assert 0 <= score_threshold <= 1
        assert 0 <= iou_threshold <= 1
        assert resized_size.shape == size.shape
        boxes = torch.zeros(len(raw), 1, 4)
        for n, image in enumerate(raw):
            ys, xs = torch.nonzero(image.amin(0) > 200, as_tuple=True)
            if len(xs):
                box = torch.stack([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1])
                boxes[n, 0] = box / scale[n].flip(0).repeat(2)
        valid = boxes[..., 2] > 0
        return InSlots(boxes, valid * 0.75, torch.zeros_like(valid, dtype=torch.int64), valid)


def lamp(path: Path, size: tuple[int, int], box: tuple[int, int, int, int] | None) -> Path:
    """A black image of `size` (height, width) with a white box xyxy."""
    pixels = np.zeros((*size, 3), np.uint8)
    if box is not None:
        pixels[box[1] : box[3], box[0] : box[2]] = 255
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, quality=95)
    return path


def test_an_abandoned_prediction_waits_for_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector may end it anywhere, also where a thread holds what another needs for its end."""
    is_reading, go_on = threading.Event(), threading.Event()

    def read(image: image_batches.InputImage, *_: object) -> None:
        if image.source.shape == (1, 2, 3):  # type: ignore[union-attr]
            is_reading.set()
            go_on.wait()

    monkeypatch.setattr(image_batches.InputImage, "read", read)
    sources = [np.zeros((1, 1, 3), np.uint8)] * image_batches.PREFETCH_BATCHES + [np.zeros((1, 2, 3), np.uint8)]
    windows = image_batches.iter_windows(sources, None)
    batches = image_batches.iter_batches(windows, deque(), CPU, (32, 32), "squash", 1, workers=1)
    next(batches)
    assert is_reading.wait(60)
    ended = threading.Thread(target=batches.close, daemon=True)  # type: ignore[attr-defined]
    ended.start()
    ended.join(30)
    try:
        assert not ended.is_alive()
    finally:
        go_on.set()


def detect_by(model: Any) -> Any:
    options = {"image_size": CARD.image_size, "resize": CARD.resize, "score_threshold": 0.3, "iou_threshold": 0.5,
               "class_names": CARD.class_names, "precision": "fp32"}  # fmt: skip
    return lambda paths: predict_images(model, paths, CPU, **options)


def run(paths: list[Path], **options: Any) -> list[Any]:
    return list(
        predict_images(
            BrightObjectDetector(),
            paths,
            CPU,
            **({"image_size": (96, 64), "resize": "letterbox", "precision": "fp32"} | options),
        )
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("resize", ["letterbox", "squash"])
def test_boxes_come_in_pixels_of_each_image(resize: str, tmp_path: Path) -> None:
    cases = [((480, 640), (64, 96, 320, 288)), ((640, 200), (20, 40, 120, 560)), ((30, 20), (2, 3, 12, 15)),
             ((96, 64), (8, 8, 40, 80)), ((2000, 3000), (600, 400, 1800, 1200))]  # fmt: skip
    paths = [lamp(tmp_path / f"{n}.png", *case) for n, case in enumerate(cases)]
    found = run(paths, resize=resize, batch_size=2)
    assert [one.path for one in found] == paths
    for (size, box), one in zip(cases, found, strict=True):
        assert one.original_size == size
        tolerance = 1.5 * max(1.0, size[0] / 96, size[1] / 64)  # a pixel and a half of the model input
        assert one.detections.boxes[0] == pytest.approx(box, abs=tolerance)


def test_every_batch_has_the_same_shape(tmp_path: Path) -> None:
    model = BrightObjectDetector()
    paths = [lamp(tmp_path / f"{n}.png", (40, 40 + n), (5, 5, 30, 30)) for n in range(5)]
    assert (
        len(
            list(
                predict_images(model, paths, CPU, image_size=(96, 64), resize="squash", batch_size=4, precision="fp32")
            )
        )
        == 5
    )  # type: ignore[arg-type]
    assert model.shapes == {(4, 3, 96, 64)}


def test_an_image_that_cannot_be_read_does_not_stop_the_others(tmp_path: Path) -> None:
    good = lamp(tmp_path / "good.png", (50, 50), (10, 10, 30, 30))
    torn = tmp_path / "torn.png"
    torn.write_bytes(good.read_bytes()[:-30])
    found = run([torn, good, tmp_path / "gone.png", good], batch_size=3)
    assert [one.error is None for one in found] == [False, True, False, True]
    assert [len(one.detections) for one in found] == [0, 1, 0, 1]
    assert "torn.png" in str(found[0].error)
    assert "gone.png" in str(found[2].error)


def test_an_image_that_cannot_be_read_leaves_nothing_of_the_memory_it_lay_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Used(HostBatchBuffer):
        """Memory of a batch before: white images of the first row."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.pixels[:], self.image_index[:] = 255, 1

    monkeypatch.setattr("stoker.inference.image_batches.HostBatchBuffer", Used)
    good = lamp(tmp_path / "good.png", (96, 32), (10, 10, 30, 30))
    bad = tmp_path / "bad.png"
    bad.write_bytes(good.read_bytes()[:-30])
    (tmp_path / "empty.png").touch()
    found = run([bad, good, tmp_path / "empty.png"], batch_size=4)
    assert [len(one.detections) for one in found] == [0, 1, 0]
    assert found[1].detections.boxes[0] == pytest.approx((10, 10, 30, 30), abs=1.5)  # nothing white beside the image


def test_no_images_is_no_work() -> None:
    assert run([]) == []


def test_the_model_is_left_as_it_was_and_gradients_are_on_between_images(tmp_path: Path) -> None:
    model = BrightObjectDetector().train()
    paths = [lamp(tmp_path / f"{n}.png", (40, 40), None) for n in range(3)]
    for _ in predict_images(model, paths, CPU, image_size=(96, 64), resize="squash", batch_size=1, precision="fp32"):  # type: ignore[arg-type]
        assert torch.is_grad_enabled()
    assert model.training


def test_files_folders_and_patterns_are_found_once_each_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b/2.PNG", "b/1.jpg", "b/deep/3.webp", "c/4.jpg", "c/5.jpeg", "out/1.jpg"):
        lamp(tmp_path / "x.png", (8, 8), None).rename(_made(tmp_path / name))
    Path("b/notes.txt").write_text("no image")
    Path("odd").write_bytes(b"named, so tried")
    assert find_images(["b"]) == [Path("b/1.jpg"), Path("b/2.PNG"), Path("b/deep/3.webp")]
    assert find_images(["c/*.jpg", "odd", "c", "c/4.jpg"]) == [Path("c/4.jpg"), Path("odd"), Path("c/5.jpeg")]
    assert find_images(["**/*.jpg"], exclude_dir=Path("out")) == [Path("b/1.jpg"), Path("c/4.jpg")]


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def test_what_is_not_found_is_named_with_what_would_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    for place, what in (
        ("gone.jpg", "There is no file or folder 'gone.jpg'."),
        ("empty", "There are no images at 'empty'."),
        ("empty/*.jpg", "There are no images at 'empty/*.jpg'."),
    ):
        with pytest.raises(UsageError) as caught:
            find_images([place])
        assert caught.value.what == what
        assert (".jpeg" in str(caught.value)) == (place != "gone.jpg")


def digest(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def predict(places: list[str], out: Path, model: BrightObjectDetector | None = None) -> list[str]:
    return list(predict_to_dir(detect_by(model or BrightObjectDetector()), places, out))


def test_results_are_images_and_json_and_originals_are_untouched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lamp(Path("in/a/shot.png"), (480, 640), (64, 96, 320, 288))
    lamp(Path("in/b/shot.png"), (100, 100), None)
    before = digest(Path("in"))
    lines = predict(["in"], Path("out"))
    assert digest(Path("in")) == before
    assert lines == [
        "in/a/shot.png: lamp 1",
        "in/b/shot.png: nothing",
        "2 images with boxes and predictions.json written to out",
    ]
    assert sorted(path.name for path in Path("out").iterdir()) == ["a_shot.png", "b_shot.png", RESULTS_NAME]
    first, second = json.loads(Path("out", RESULTS_NAME).read_text())
    assert (first["path"], first["width"], first["height"]) == ("in/a/shot.png", 640, 480)
    (box,) = first["detections"]
    assert (box["label"], box["class"], box["score"]) == (0, "lamp", 0.75)
    assert box["box"] == pytest.approx([64, 96, 320, 288], abs=10)
    assert second["detections"] == []
    drawn = np.asarray(Image.open("out/a_shot.png"))
    assert drawn.shape == (480, 640, 3)
    assert (drawn == class_color(0)).all(axis=2).sum() > 400
    assert not (np.asarray(Image.open("in/a/shot.png")) == class_color(0)).all(axis=2).any()


def test_a_folder_of_other_things_is_not_written_to(tmp_path: Path) -> None:
    lamp(tmp_path / "in/shot.png", (40, 40), (5, 5, 30, 30))
    lamp(tmp_path / "mine/shot.png", (40, 40), None)
    before = digest(tmp_path)
    for out in ("mine", "in"):
        with pytest.raises(UsageError):
            predict([str(tmp_path / "in/shot.png")], tmp_path / out)
    assert digest(tmp_path) == before


def test_results_may_be_written_again_and_are_not_predicted_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lamp(Path("shot.png"), (40, 40), (5, 5, 30, 30))
    first = predict(["."], Path("out"))
    note, *second = predict(["."], Path("out"))
    assert note.startswith("out has results of an earlier prediction")
    assert second == first
    assert len(first) == 2


def test_images_in_the_folder_of_the_results_are_said_to_be_there(tmp_path: Path) -> None:
    lamp(tmp_path / "in/shot.png", (40, 40), (5, 5, 30, 30))
    for place in ("in", "in/shot.png", "in/*.png"):
        with pytest.raises(UsageError, match="are in the output folder") as caught:
            predict([str(tmp_path / place)], tmp_path / "in")
        assert "--out" in (caught.value.fix or "")


def test_results_that_cannot_be_written_are_an_error_with_the_place(tmp_path: Path) -> None:
    shot = lamp(tmp_path / "shot.png", (40, 40), (5, 5, 30, 30))
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written") as caught:
        predict([str(shot)], tmp_path / "file" / "out")
    assert caught.value.location == str(tmp_path / "file" / "out")
    (tmp_path / "out" / "shot.png").mkdir(parents=True)
    (tmp_path / "out" / RESULTS_NAME).write_text("[]")
    with pytest.raises(StorageError, match="cannot be written") as caught:
        predict([str(shot)], tmp_path / "out")
    assert caught.value.location == str(tmp_path / "out" / "shot.png")


def test_what_was_found_until_an_interruption_is_kept(tmp_path: Path) -> None:
    paths = [str(lamp(tmp_path / f"{n}.gif", (40, 40), (5, 5, 30, 30))) for n in range(12)]
    lines = predict_to_dir(detect_by(BrightObjectDetector()), paths, tmp_path / "out")
    for _ in range(3):
        next(lines)
    with pytest.raises(KeyboardInterrupt):
        lines.throw(KeyboardInterrupt())  # type: ignore[attr-defined]
    found = json.loads((tmp_path / "out" / RESULTS_NAME).read_text())
    assert [Path(one["path"]).name for one in found] == ["0.gif", "1.gif", "2.gif"]
    assert {one["detections"][0]["class"] for one in found} == {"lamp"}
    assert {path.name for path in (tmp_path / "out").glob("*.jpg")} == {"0.gif.jpg", "1.gif.jpg", "2.gif.jpg"}


def test_every_kind_that_is_read_is_found_in_folders(tmp_path: Path) -> None:
    kinds = {"jpg": "JPEG", "png": "PNG", "gif": "GIF", "ppm": "PPM", "pgm": "PPM", "webp": "WEBP", "tif": "TIFF"}
    for suffix, kind in kinds.items():
        Image.new("L" if suffix == "pgm" else "RGB", (40, 40)).save(tmp_path / f"one.{suffix}", kind)
    (tmp_path / "notes.txt").touch()
    found = find_images([tmp_path])
    assert {path.suffix[1:] for path in found} == set(kinds)
    assert [one.error for one in run(found)] == [None] * len(kinds)


def test_bad_images_are_named_at_the_end_and_the_rest_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lamp(Path("in/good.png"), (40, 40), (5, 5, 30, 30))
    Path("in/bad.jpg").write_bytes(b"\xff\xd8\xff no more")
    with pytest.raises(DataError, match="1 of 2 images could not be read"):
        predict(["in"], Path("out"))
    bad, good = json.loads(Path("out", RESULTS_NAME).read_text())
    assert "error" in bad
    assert bad["detections"] == []
    assert len(good["detections"]) == 1
    assert Path("out/good.png").exists()
    assert not Path("out/bad.jpg").exists()


def test_names_of_results() -> None:
    paths = ["x/a/1.jpg", "x/b/1.JPG", "x/b/2.png", "x/b/raw", "x/a_1.jpg", "x/predictions.json"]
    assert output_names([Path(p) for p in paths]) == [
        "a_1.jpg", "b_1.JPG", "2.png", "raw.jpg", "a_1-2.jpg", "predictions.json.jpg",
    ]  # fmt: skip


@given(st.lists(st.from_regex(r"([ab]/){0,3}[abAB_]{1,3}(-2)?\.(jpg|png|x)", fullmatch=True), unique=True))
def test_names_of_results_never_meet(paths: list[str]) -> None:
    names = output_names([Path(p) for p in paths])
    assert len({name.lower() for name in names} | {RESULTS_NAME}) == len(paths) + 1
    assert all("/" not in name for name in names)


def boxes(corners: list[tuple[float, ...]], labels: list[int], scores: list[float]) -> Detections:
    return Detections(
        image_index=np.zeros(len(labels), np.int64),
        boxes=np.array(corners, np.float32).reshape(-1, 4),
        score=np.array(scores, np.float32),
        label=np.array(labels),
        image_indices=np.zeros(1, np.int64),
    )


def test_a_drawn_box_is_where_it_was_found_and_the_image_is_a_copy() -> None:
    image = Image.new("RGB", (800, 600), "black")
    drawn = np.asarray(draw_boxes(image, boxes([(200, 100, 600, 500)], [1], [0.9]), ["a", "b"]))
    assert np.asarray(image).max() == 0
    edge = (drawn == class_color(1)).all(axis=2)
    assert edge[300, 200]
    assert edge[300, 600]
    assert edge[500, 400]
    assert not edge[300, 300]
    assert not edge[300, 190]


@pytest.mark.parametrize("size", [(1, 1), (3, 200), (31, 17), (320, 320), (5000, 40)])
def test_any_size_can_be_drawn_on_and_small_ones_are_enlarged_by_a_whole_factor(size: tuple[int, int]) -> None:
    found = boxes([(-5, -5, 1e6, 1e6), (0, 0, 1, 1), (3, 3, 2, 2)], [0, 7, 99], [0.5, 0.6, 0.7])
    drawn = draw_boxes(Image.new("L", size), found, ["x" * 300])
    factor = drawn.width / size[0]
    assert factor == int(factor)
    assert drawn.height == size[1] * factor
    assert max(drawn.size) >= min(MIN_DRAW_SIDE, max(size))


def test_boxes_are_enlarged_with_their_image() -> None:
    drawn = np.asarray(draw_boxes(Image.new("RGB", (100, 100)), boxes([(20, 50, 60, 90)], [0], [0.9]), ["a"]))
    assert drawn.shape == (400, 400, 3)
    edge = (drawn == class_color(0)).all(axis=2)
    assert edge[300, 80]
    assert edge[300, 240]
    assert edge[360, 160]


def test_the_best_score_is_on_top() -> None:
    found = boxes([(50, 50, 350, 350), (50, 50, 350, 350)], [1, 0], [0.9, 0.2])
    drawn = np.asarray(draw_boxes(Image.new("RGB", (400, 400)), found, ["a", "b"]))
    assert tuple(drawn[200, 50]) == class_color(1)


def test_nothing_found_leaves_the_pixels_alone() -> None:
    image = Image.fromarray(np.arange(400 * 400 * 3, dtype=np.uint32).astype(np.uint8).reshape(400, 400, 3))
    assert np.array_equal(np.asarray(draw_boxes(image, empty_detections(), [])), np.asarray(image))


def test_classes_have_colors_of_their_own() -> None:
    assert len({class_color(label) for label in range(80)}) == 80
