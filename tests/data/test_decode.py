"""Decoding: right pixels, at the right place, in the given memory; a damaged file is an error that names it."""

import io
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from stoker.data.decode import decode, decode_into, picture_size, shrink_for
from stoker.errors import DataError

PATH = Path("pictures/somewhere.jpg")


def smooth(height: int, width: int, detail: int = 6) -> np.ndarray:
    """A picture without fine detail, so that all good ways to resize it agree."""
    small = np.random.default_rng(0).integers(0, 255, (detail, detail, 3), np.uint8)
    return cv2.resize(small, (width, height), interpolation=cv2.INTER_CUBIC)


def encoded(picture: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def jpeg(pixels: np.ndarray, **options: object) -> bytes:
    return encoded(Image.fromarray(pixels), "JPEG", quality=95, **options)


def by_pillow(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as picture:
        return np.asarray(picture.convert("RGB"))


KINDS = {
    "jpeg": lambda: jpeg(smooth(61, 83)),
    "progressive jpeg": lambda: jpeg(smooth(61, 83), progressive=True),
    "grey jpeg": lambda: encoded(Image.fromarray(smooth(61, 83)).convert("L"), "JPEG"),
    "cmyk jpeg": lambda: encoded(Image.fromarray(smooth(61, 83)).convert("CMYK"), "JPEG"),
    "png": lambda: encoded(Image.fromarray(smooth(61, 83)), "PNG"),
    "grey png": lambda: encoded(Image.fromarray(smooth(61, 83)).convert("L"), "PNG"),
    "palette png": lambda: encoded(Image.fromarray(smooth(61, 83)).quantize(16), "PNG"),
    "two-colour png": lambda: encoded(Image.fromarray(smooth(61, 83)).convert("1"), "PNG"),
    "bmp": lambda: encoded(Image.fromarray(smooth(61, 83)), "BMP"),
    "webp": lambda: encoded(Image.fromarray(smooth(61, 83)), "WEBP", lossless=True),
    "tiff": lambda: encoded(Image.fromarray(smooth(61, 83)), "TIFF", compression="tiff_lzw"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_are_those_that_pillow_sees(kind):
    data = KINDS[kind]()
    found = decode(data, PATH)
    assert found.shape == (61, 83, 3)
    assert picture_size(data, PATH) == (61, 83)
    # libjpeg-turbo versions may differ by rounding; the other formats are exact.
    assert np.abs(found.astype(int) - by_pillow(data)).max() <= (2 if "jpeg" in kind else 0)


def test_sixteen_bits_keep_the_upper_eight():
    values = np.random.default_rng(1).integers(0, 65536, (20, 30), np.uint16)
    data = cv2.imencode(".png", values)[1].tobytes()
    assert np.array_equal(decode(data, PATH), np.repeat((values >> 8).astype(np.uint8)[..., None], 3, 2))


def test_transparency_is_dropped_not_blended():
    pixels = np.dstack([smooth(20, 30), np.zeros((20, 30), np.uint8)])
    assert np.array_equal(decode(encoded(Image.fromarray(pixels), "PNG"), PATH), pixels[..., :3])


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_rotation_is_not_applied(kind):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees to show
    data = encoded(Image.fromarray(smooth(40, 60)), kind, exif=exif)
    assert np.abs(decode(data, PATH).astype(int) - by_pillow(data)).max() <= 2
    assert picture_size(data, PATH) == (40, 60)


@pytest.mark.parametrize("kind", ["jpeg", "cmyk jpeg", "png"])
@pytest.mark.parametrize("target", [(30, 41), (61, 83), (100, 90), (1, 1)])
def test_decode_into_writes_its_view_and_nothing_else(kind, target):
    canvas = np.full((120, 100, 3), 9, np.uint8)
    decode_into(KINDS[kind](), PATH, region=(0, 0, 83, 61), out=canvas[: target[0], : target[1]])
    assert (canvas[target[0] :] == 9).all()
    assert (canvas[:, target[1] :] == 9).all()
    expected = cv2.resize(by_pillow(KINDS[kind]()), target[::-1], interpolation=cv2.INTER_AREA)
    assert np.abs(canvas[: target[0], : target[1]].astype(int) - expected).mean() < 6


@pytest.mark.parametrize("kind", ["jpeg", "png"])
@pytest.mark.parametrize("factor", [1.3, 2.5, 4.7, 9.0, 20.0])
def test_a_region_is_where_the_whole_picture_has_it(kind, factor):
    """Against Pillow's filter over the same region; a shift by one pixel of the result would show."""
    pixels = smooth(960, 1280, detail=16)
    data = jpeg(pixels) if kind == "jpeg" else encoded(Image.fromarray(pixels), "PNG")
    region = (160, 64, 1120, 864)
    width, height = round(960 / factor), round(800 / factor)
    out = np.empty((height, width, 3), np.uint8)
    decode_into(data, PATH, region=region, out=out)
    expected = np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BOX, box=region))
    error = np.abs(out.astype(int) - expected).mean()
    shifted = np.abs(out[:, 1:].astype(int) - expected[:, :-1]).mean()
    assert error < 1.5
    assert error < shifted / 2


def test_a_region_outside_the_picture_is_refused():
    out = np.empty((10, 10, 3), np.uint8)
    with pytest.raises(ValueError, match="not inside the picture, 83 × 61"):
        decode_into(KINDS["jpeg"](), PATH, region=(0, 0, 84, 61), out=out)


@given(st.tuples(st.integers(1, 5000), st.integers(1, 5000)), st.tuples(st.integers(1, 2000), st.integers(1, 2000)))
def test_dct_scaling_never_goes_below_the_target(source, target):
    divisor = shrink_for(source, target)
    if divisor > 1:
        assert source[0] / divisor >= target[0]
        assert source[1] / divisor >= target[1]
    if divisor < 8:
        assert min(source[0] / target[0], source[1] / target[1]) < divisor * 2


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_picture_is_an_error_that_names_it(kind):
    data = KINDS[kind]()
    for end in {1, 10, 30, len(data) // 3, len(data) // 2, len(data) - 20, len(data) - 2}:
        with pytest.raises(DataError) as caught:
            decode(data[:end], PATH)
        assert str(PATH) in str(caught.value)
        assert caught.value.exit_code == 4


JPEG_AND_PNG = {kind: KINDS[kind]() for kind in ("jpeg", "progressive jpeg", "grey png", "png")}


@given(st.sampled_from(sorted(JPEG_AND_PNG)), st.data())
def test_no_cut_of_a_jpeg_or_png_goes_unseen(kind, data):
    whole = JPEG_AND_PNG[kind]
    with pytest.raises(DataError):
        decode(whole[: data.draw(st.integers(0, len(whole) - 1))], PATH)


@pytest.mark.parametrize("lost", [12, 13, 200])
def test_a_truncated_png_is_seen_where_opencv_makes_a_picture_of_it(lost, monkeypatch):
    """As some builds do; the one here refuses."""
    data = KINDS["png"]()
    monkeypatch.setattr(cv2, "imdecode", lambda *_: np.zeros((61, 83, 3), np.uint8))
    assert decode(data, PATH).shape == (61, 83, 3)
    with pytest.raises(DataError, match="cannot be decoded"):
        decode(data[:-lost], PATH)


def test_a_picture_that_decodes_to_another_size_than_its_header_says_is_refused(monkeypatch):
    monkeypatch.setattr(cv2, "imdecode", lambda *_: np.zeros((83, 61, 3), np.uint8))
    with pytest.raises(DataError) as caught:
        decode(KINDS["bmp"](), PATH)
    assert "says 83 × 61 pixels, it decodes to 61 × 83" in str(caught.value)


def test_damage_in_a_png_is_seen():
    data = bytearray(KINDS["png"]())
    data[len(data) // 2] ^= 0xFF
    with pytest.raises(DataError):
        decode(bytes(data), PATH)


@pytest.mark.parametrize(
    ("data", "says"), [(b"", "0 bytes"), (b"<html>404</html>", "cannot be decoded"), (bytes(500), "cannot be decoded")]
)
def test_what_is_no_picture_is_an_error_that_names_it(data, says):
    for read in (decode, picture_size):
        with pytest.raises(DataError) as caught:
            read(data, PATH)
        assert says in str(caught.value)
        assert str(PATH) in str(caught.value)
