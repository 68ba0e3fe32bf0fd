"""Tiles as geometry, and predict.py on large images with a double that finds bright rectangles."""

import itertools
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor, nn

from stoker.data.images import decode
from stoker.hardware.device import Device
from stoker.inference.image_batches import Tiling, is_cut, merge_detections
from stoker.inference.predict import predict_images
from stoker.inference.prediction import Prediction
from stoker.models import BatchDetections as InSlots
from stoker_watch.errors import ConfigError

CPU = Device(torch.device("cpu"))
CANVAS = (320, 320)
SEEN = 6
"""Pixels of the model input below which the double sees nothing, as a detector would not."""

sides = st.integers(1, 600)
tilings = st.builds(Tiling, st.integers(32, 400), st.floats(0, 0.9))


@settings(deadline=None)
@given(sides, sides, tilings)
def test_tiles_cover_the_image_lie_inside_have_one_size_and_overlap(height: int, width: int, tiling: Tiling) -> None:
    regions = tiling.regions((height, width))
    if max(height, width) <= tiling.side:
        assert regions == []
        return
    assert {(x1 - x0, y1 - y0) for x0, y0, x1, y1 in regions} == {(min(width, tiling.side), min(height, tiling.side))}
    assert len(set(regions)) == len(regions)
    for low, high, length in ((0, 2, width), (1, 3, height)):
        spans = sorted({(region[low], region[high]) for region in regions})
        assert spans[0][0] == 0
        assert spans[-1][1] == length
        for (_, end), (start, _) in itertools.pairwise(spans):
            assert end - start >= int(tiling.side * tiling.overlap), "the next begins inside this one"
            assert end >= start, "no gap"
    assert len(regions) == len({r[0] for r in regions}) * len({r[1] for r in regions}), "every row has every column"


def test_tiles_of_a_usual_image() -> None:
    assert Tiling(640).regions((640, 1600)) == [(0, 0, 640, 640), (480, 0, 1120, 640), (960, 0, 1600, 640)]


@pytest.mark.parametrize(("side", "overlap"), [(31, 0.2), (640, -0.1), (640, 0.95)])
def test_tilings_that_cannot_be(side: int, overlap: float) -> None:
    with pytest.raises(ConfigError):
        Tiling(side, overlap)


def test_a_box_is_cut_where_its_tile_ends_and_the_image_does_not() -> None:
    tile, size = (500, 0, 1000, 500), (900, 1000)
    boxes = np.array(
        [(600, 100, 700, 200), (501, 100, 700, 200), (600, 0, 700, 100), (600, 300, 700, 498), (900, 50, 1000, 90)],
        np.float32,
    )
    assert is_cut(boxes, tile, size).tolist() == [False, True, False, True, False]


corners = st.tuples(*[st.integers(0, 40)] * 2, *[st.integers(1, 30)] * 2).map(
    lambda b: (b[0], b[1], b[0] + b[2], b[1] + b[3])
)
found_boxes = st.lists(
    st.tuples(corners, st.floats(0.0625, 1, width=32), st.integers(0, 2), st.booleans()), min_size=0, max_size=25
)


def overlaps(a: Any, b: Any) -> tuple[float, float]:
    """IoU, and the fraction of b that a covers."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(0.0, width) * max(0.0, height)
    area_a, area_b = (a[2] - a[0]) * (a[3] - a[1]), (b[2] - b[0]) * (b[3] - b[1])
    return shared / (area_a + area_b - shared), shared / area_b


@settings(deadline=None)
@given(found_boxes, st.floats(0.1, 0.9))
def test_what_is_left_out_has_one_that_stands_for_it_and_what_stays_has_none(found: list[Any], iou: float) -> None:
    columns = [np.array(column) for column in zip(*found, strict=True)] or [np.zeros((0, 4))] + [np.zeros(0)] * 3
    boxes, scores = columns[0].astype(np.float32), columns[1].astype(np.float32)
    labels, cut = columns[2].astype(np.int64), columns[3].astype(bool)
    keep = merge_detections(boxes, scores, labels, cut, iou_threshold=iou)
    assert len(set(keep.tolist())) == len(keep)
    assert (np.diff(scores[keep]) <= 0).all()

    def takes_out(first: int, second: int) -> bool:
        if labels[first] != labels[second] or (cut[first], -scores[first]) > (cut[second], -scores[second]):
            return False
        union, share = overlaps(boxes[first].tolist(), boxes[second].tolist())
        return union > iou or (bool(cut[second]) and share > 0.5)

    left = set(keep.tolist())
    for n in range(len(boxes)):
        others = [k for k in left - {n} if takes_out(k, n)]
        if n not in left:
            assert others
        else:
            ties = [k for k in others if (cut[k], scores[k]) == (cut[n], scores[n])]
            assert others == ties  # of two alike the first stays, and the definition cannot tell which that was


def test_half_an_object_yields_to_the_whole_whatever_its_score() -> None:
    boxes = np.array([(100, 0, 200, 100), (100, 0, 150, 100), (150, 0, 200, 100), (400, 0, 450, 100)], np.float32)
    cut = np.array([False, True, True, True])
    keep = merge_detections(
        boxes, np.array([0.5, 0.9, 0.8, 0.7], np.float32), np.zeros(4, np.int64), cut, iou_threshold=0.5
    )
    assert sorted(keep.tolist()) == [0, 3]


class FindsRectangles(nn.Module):
    """A double of a detector: white rectangles, of at least SEEN pixels of the model input; larger is surer."""

    iou_threshold = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.shown = 0

    def forward(self, images: Tensor) -> Tensor:
        return images

    def decode(self, raw: Tensor, resized_size: Tensor, scale: Tensor, size: Tensor, *, score_threshold: float,
               iou_threshold: float) -> InSlots:  # fmt: skip
        assert len(raw) == len(resized_size) == len(size)
        assert min(score_threshold, iou_threshold) >= 0
        boxes, scores = torch.zeros(len(raw), 50, 4), torch.zeros(len(raw), 50)
        self.shown += int((size != torch.tensor(CANVAS)).any(1).sum())
        for n, image in enumerate(raw):
            bright = (image.amin(0) > 200).numpy().astype(np.uint8)
            _, _, stats, _ = cv2.connectedComponentsWithStats(bright)
            seen = [row for row in stats[1:].tolist() if min(row[2], row[3]) >= SEEN]
            for k, (x, y, width, height, _) in enumerate(seen):
                boxes[n, k] = torch.tensor([x, y, x + width, y + height]) / scale[n].flip(0).repeat(2)
                scores[n, k] = 0.5 + min(width, height) / 1000
        return InSlots(boxes, scores, torch.zeros_like(scores, dtype=torch.int64), scores > 0)


def draw(path: Path, size: tuple[int, int], boxes: list[tuple[int, int, int, int]]) -> Path:
    pixels = np.zeros((*size, 3), np.uint8)
    for x0, y0, x1, y1 in boxes:
        pixels[y0:y1, x0:x1] = 255
    Image.fromarray(pixels).save(path, quality=95)
    return path


def predict(paths: list[Path], model: Any = None, **options: Any) -> list[Prediction]:
    model = model or FindsRectangles()
    return list(predict_images(model, paths, CPU, image_size=CANVAS, resize="letterbox", precision="fp32", **options))


SMALL = [(x, y, x + 24, y + 24) for x, y in ((30, 40), (505, 300), (620, 500), (1100, 1000), (1490, 700), (1970, 1470))]
"""Some lie on the seams of tiles of 640."""
LARGE = (700, 60, 1400, 660)
"""No tile holds it."""


def test_small_objects_of_a_large_image_are_found_in_tiles_and_missed_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = draw(tmp_path / "large.png", (1500, 2000), [*SMALL, LARGE])
    (without,) = predict([path])
    assert [box.round(-1).tolist() for box in without.detections.boxes] == [list(LARGE)]
    decoded = []
    once = decode.decode
    monkeypatch.setattr("stoker.data.images.decode.decode", lambda *a: decoded.append(a) or once(*a))
    (tiled,) = predict([path], tiling=Tiling(640), batch_size=3)
    assert len(decoded) == 1, "the image is decoded once for all its tiles"
    assert tiled.original_size == (1500, 2000)
    assert tiled.detections.image_indices.tolist() == [0]
    assert set(tiled.detections.image_index.tolist()) == {0}
    found = sorted(tiled.detections.boxes.tolist())
    assert len(found) == len(SMALL) + 1, "each is found once"
    for box, true in zip(found, sorted([*SMALL, LARGE]), strict=True):
        assert box == pytest.approx(true, abs=8 if true == LARGE else 3)


def test_a_model_that_suppresses_nothing_finds_an_object_of_several_tiles_once(tmp_path: Path) -> None:
    path = draw(tmp_path / "large.png", (700, 1100), [(500, 300, 560, 360)])  # whole in two tiles and in the image
    model = FindsRectangles()
    model.iou_threshold = 1.0
    (tiled,) = predict([path], model, tiling=Tiling(640))
    assert model.shown > 1
    assert len(tiled.detections) == 1


def test_a_tile_larger_than_the_image_changes_nothing(tmp_path: Path) -> None:
    sizes = [(480, 640), (640, 360), (100, 90)]
    paths = [draw(tmp_path / f"{n}.jpg", size, [(9, 9, 80, 80)]) for n, size in enumerate(sizes)]
    plain, tiled = FindsRectangles(), FindsRectangles()
    for one, other in zip(predict(paths, plain), predict(paths, tiled, tiling=Tiling(640)), strict=True):
        assert one.original_size == other.original_size
        for column in ("image_index", "boxes", "score", "label", "image_indices"):
            assert np.array_equal(getattr(one.detections, column), getattr(other.detections, column))
    assert plain.shown == tiled.shown == 3


def test_every_image_has_its_answer_whatever_the_batch_and_a_broken_one_an_error(tmp_path: Path) -> None:
    large = draw(tmp_path / "large.png", (700, 900), [(650, 400, 720, 470)])
    small = draw(tmp_path / "small.png", (200, 200), [(50, 60, 90, 100)])
    torn = tmp_path / "torn.png"
    torn.write_bytes(large.read_bytes()[:-30])
    (tmp_path / "empty.png").touch()
    paths = [large, small, torn, large, tmp_path / "empty.png", tmp_path / "gone.png", small]
    for batch in (1, 4, 64):
        found = predict(paths, batch_size=batch, tiling=Tiling(512))
        assert [one.path for one in found] == paths
        assert [one.error is None for one in found] == [True, True, False, True, False, False, True]
        assert [one.original_size for one in found][2] == (0, 0)
        assert [len(one.detections) for one in found] == [1, 1, 0, 1, 0, 0, 1]
        assert found[3].detections.boxes[0] == pytest.approx((650, 400, 720, 470), abs=3)
        assert found[6].detections.boxes[0] == pytest.approx((50, 60, 90, 100), abs=3)


def test_tiles_are_of_the_upright_image(tmp_path: Path) -> None:
    path = tmp_path / "turned.jpg"
    pixels = np.zeros((600, 1400, 3), np.uint8)
    pixels[100:130, 1200:1260] = 255  # stored; upright it lies at the lower right of 1,400 × 600
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by 90°
    Image.fromarray(pixels).save(path, quality=95, exif=exif)
    (one,) = predict([path], tiling=Tiling(640))
    assert one.original_size == (1400, 600)
    assert one.detections.boxes.tolist()[0] == pytest.approx((600 - 130, 1200, 600 - 100, 1260), abs=3)
