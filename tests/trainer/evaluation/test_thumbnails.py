"""Small copies of the images of an evaluation."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stoker.data.images.decode import thumbnail
from stoker.evaluation.thumbnails import MAX_JPEG_BYTES, make_thumbnail
from stoker_watch.runs.evaluation import Thumbnail


def make(path: Path, annotated_size: tuple[int, int] = (0, 0)) -> Thumbnail:
    return make_thumbnail(lambda side: thumbnail(path.read_bytes(), path, side, annotated_size=annotated_size))


def test_a_copy_is_small(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (900, 1200, 3), np.uint8)  # the worst case for JPEG
    Image.fromarray(noise).save(tmp_path / "noise.jpg", quality=95)
    made = make(tmp_path / "noise.jpg")
    assert 0 < len(made.jpeg) <= MAX_JPEG_BYTES
    assert (made.original_size, made.size, made.error) == ((900, 1200), (360, 480), "")


@pytest.mark.parametrize(
    ("annotated_size", "original_size"),
    [((60, 100), (60, 100)), ((100, 60), (100, 60)), ((0, 0), (100, 60))],  # as stored, upright, not known
)
def test_a_copy_is_turned_as_its_boxes(
    tmp_path: Path, annotated_size: tuple[int, int], original_size: tuple[int, int]
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90°
    pixels = np.zeros((60, 100, 3), np.uint8)
    pixels[:, 50:] = 255
    Image.fromarray(pixels).save(tmp_path / "turned.jpg", exif=exif)
    made = make(tmp_path / "turned.jpg", annotated_size)
    shown = np.asarray(Image.open(io.BytesIO(made.jpeg)))
    assert made.original_size == original_size
    assert shown.shape[:2] == made.size == original_size
    assert shown[shown.shape[0] * 3 // 4, shown.shape[1] * 3 // 4].min() > 200


def test_an_image_that_cannot_be_read_has_a_reason(tmp_path: Path) -> None:
    assert make(tmp_path / "gone.jpg").error == "No such file or directory"
    (tmp_path / "bad.jpg").write_bytes(b"no picture")
    assert make(tmp_path / "bad.jpg").error == "The image cannot be decoded."
