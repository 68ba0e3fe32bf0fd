"""Images on the page: with boxes at the correct position."""

import base64

import pytest

from stoker_watch.report.page.images import render_image
from stoker_watch.runs.evaluation import GroundTruthBox, ImageEvaluation, Thumbnail


def make_evaluation(box: tuple[float, float, float, float] = (-50, 90, 1300, 450)) -> ImageEvaluation:
    return ImageEvaluation(
        image_index=7,
        path="data/noise.jpg",
        byte_range=None,
        size=None,
        f1=0.5,
        tp=0,
        fp=0,
        fn=1,
        gt_boxes=[GroundTruthBox(box=box, label=0, crowd=False, detected=False)],
        detections=[],
    )


@pytest.mark.parametrize(
    ("original_size", "size", "box", "view_box", "drawn_box"),
    [
        ((900, 1200), (360, 480), (-50, 90, 1300, 450), "480 360", 'x="1.0" y="36.0" width="478.0" height="144.0"'),
        ((60, 100), (60, 100), (50, 10, 90, 30), "480 288", 'x="240.0" y="48.0" width="192.0" height="96.0"'),
        ((100, 60), (100, 60), (10, 50, 30, 90), "288 480", 'x="48.0" y="240.0" width="96.0" height="192.0"'),
        ((24, 32), (24, 32), (8, 6, 16, 12), "480 360", 'x="120.0" y="90.0" width="120.0" height="90.0"'),
    ],
)
def test_boxes_scale_with_the_image(
    original_size: tuple[int, int],
    size: tuple[int, int],
    box: tuple[float, float, float, float],
    view_box: str,
    drawn_box: str,
) -> None:
    thumbnail = Thumbnail(original_size=original_size, size=size, jpeg=b"a picture")
    drawn = render_image(make_evaluation(box), ["cat"], {7: thumbnail})
    width, _, height = view_box.partition(" ")
    assert f'viewBox="0 0 {view_box}"' in drawn
    assert f'width="{width}" height="{height}"' in drawn
    assert f'<rect {drawn_box} class="box fn"/>' in drawn
    assert f"base64,{base64.b64encode(b'a picture').decode()}" in drawn


@pytest.mark.parametrize(
    ("thumbnails", "reason"),
    [
        ({}, "the run has no copy of it"),
        ({7: Thumbnail(original_size=(0, 0), size=(0, 0), jpeg=b"", error="<gone>")}, "&lt;gone&gt;"),
        ({7: Thumbnail(original_size=(0, 5), size=(5, 5), jpeg=b"")}, ""),
    ],
)
def test_a_missing_image_leaves_its_numbers(thumbnails: dict[int, Thumbnail], reason: str) -> None:
    rendered = render_image(make_evaluation(), ["cat"], thumbnails)
    assert f"The image cannot be shown: {reason}" in rendered
    assert "F1 0.50" in rendered
