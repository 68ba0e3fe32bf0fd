"""Images on the page: small, with boxes at the correct position."""

import base64
import io
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

from stoker.report.page.images import MAX_JPEG_BYTES, render_image
from stoker.runs.evaluation import GroundTruthBox, ImageEvaluation


def make_evaluation(path: Path, span: tuple[int, int] | None = None) -> ImageEvaluation:
    return ImageEvaluation(
        image_index=0,
        path=str(path),
        byte_range=span,
        size=(900, 1200),
        f1=0.5,
        tp=0,
        fp=0,
        fn=1,
        gt_boxes=[GroundTruthBox(box=(-50, 90, 1300, 450), label=0, crowd=False, detected=False)],
        detections=[],
    )


def test_an_image_is_small_and_its_boxes_scale_with_it(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (900, 1200, 3), np.uint8)  # the worst case for JPEG
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "JPEG", quality=95)
    (tmp_path / "box").write_bytes(b"before" + file.getvalue() + b"behind")
    drawn = render_image(make_evaluation(tmp_path / "box" / "noise.jpg", (6, len(file.getvalue()))), ["cat"])
    data = re.search(r"base64,([^\"]+)", drawn)
    assert data is not None
    assert len(data[1]) * 3 / 4 <= MAX_JPEG_BYTES
    assert 'viewBox="0 0 480 360"' in drawn
    assert '<rect x="1.0" y="36.0" width="478.0" height="144.0" class="box fn"/>' in drawn


@pytest.mark.parametrize(
    ("annotated_size", "view_box", "box"),
    [
        ((60, 100), 'viewBox="0 0 480 288"', 'x="240.0" y="48.0" width="192.0" height="96.0"'),  # as stored
        ((100, 60), 'viewBox="0 0 288 480"', 'x="48.0" y="240.0" width="96.0" height="192.0"'),  # upright
        (None, 'viewBox="0 0 288 480"', 'x="48.0" y="240.0" width="96.0" height="192.0"'),
    ],
)
def test_boxes_match_the_exif_orientation(
    tmp_path: Path, annotated_size: tuple[int, int] | None, view_box: str, box: str
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90°
    pixels = np.zeros((60, 100, 3), np.uint8)
    pixels[:, 50:] = 255
    Image.fromarray(pixels).save(tmp_path / "turned.jpg", exif=exif)
    evaluation = msgspec.structs.replace(
        make_evaluation(tmp_path / "turned.jpg"),
        size=annotated_size,
        gt_boxes=[
            GroundTruthBox(
                box=(50, 10, 90, 30) if annotated_size == (60, 100) else (10, 50, 30, 90),
                label=0,
                crowd=False,
                detected=False,
            )
        ],
    )
    drawn = render_image(evaluation, ["cat"])
    assert view_box in drawn
    assert f'<rect {box} class="box fn"/>' in drawn
    data = re.search(r"base64,([^\"]+)", drawn)
    assert data is not None
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(data[1]))))
    assert shown.shape[:2] == (annotated_size or (100, 60))
    assert shown[shown.shape[0] * 3 // 4, shown.shape[1] * 3 // 4].min() > 200


def test_the_overlay_of_a_small_image_is_not_enlarged(tmp_path: Path) -> None:
    Image.new("RGB", (32, 24)).save(tmp_path / "small.png")
    evaluation = msgspec.structs.replace(make_evaluation(tmp_path / "small.png"), size=(24, 32))
    drawn = render_image(evaluation, ["cat"])
    assert 'viewBox="0 0 480 360"' in drawn
    assert 'width="480" height="360"' in drawn


def test_a_missing_image_leaves_its_numbers(tmp_path: Path) -> None:
    rendered = render_image(make_evaluation(tmp_path / "gone.jpg"), ["cat"])
    assert "The image cannot be shown: No such file or directory" in rendered
    assert "F1 0.50" in rendered
    (tmp_path / "bad.jpg").write_bytes(b"no picture")
    assert "cannot be shown: The image cannot be decoded." in render_image(
        make_evaluation(tmp_path / "bad.jpg"), ["cat"]
    )
