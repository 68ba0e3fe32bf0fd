"""Decoding: right pixels, at the right place, in the given memory; a damaged file is an error that names it."""

import functools
import io
import struct
import zlib
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from stoker.data.images.decode import choose_dct_divisor, decode, decode_into, thumbnail
from stoker.data.images.headers import parse_header
from stoker_watch.errors import DataError

PATH = Path("images/somewhere.jpg")
RESIZES = ("BOX", "BILINEAR", "HAMMING", "BICUBIC", "LANCZOS")
"""Pillow's filters, all of which reach over all pixels of what they reduce."""


def smooth(height: int, width: int, detail: int = 6) -> np.ndarray:
    """An image without fine detail, so that all good ways to resize it agree."""
    small = np.random.default_rng(0).integers(0, 255, (detail, detail, 3), np.uint8)
    return cv2.resize(small, (width, height), interpolation=cv2.INTER_CUBIC)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def jpeg(pixels: np.ndarray, **options: object) -> bytes:
    return encoded(Image.fromarray(pixels), "JPEG", quality=95, **options)


def by_pillow(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))


def image(mode: str = "RGB") -> Image.Image:
    return Image.fromarray(smooth(61, 83)).convert(mode)


def palette() -> Image.Image:
    return image().quantize(16)


def transparent(mode: str) -> Image.Image:
    """Half of it is not to be seen; what stands there nevertheless is the image."""
    made = image(mode)
    made.putalpha(Image.fromarray(np.repeat(np.uint8([[0, 255]]), 61, 0)).resize((83, 61), Image.Resampling.NEAREST))
    return made


def pages(kind: str) -> bytes:
    return encoded(image(), kind, save_all=True, append_images=[image().rotate(180)])


def two_bytes() -> np.ndarray:
    """16 bits a channel, RGB, whose upper 8 are the image."""
    return smooth(61, 83).astype(np.uint16) * 256 + 77


def by_opencv(ending: str, pixels: np.ndarray, *options: int) -> bytes:
    return cv2.imencode(ending, pixels, options)[1].tobytes()


def four_channels(name: str) -> bytes:
    """YCCK as Photoshop writes it: CMYK with the Adobe segment's transform set to 2 (the planes are what they are)."""
    data = bytearray(encoded(image("CMYK"), "JPEG"))
    at = data.index(b"Adobe") + 11
    data[at] = {"cmyk": 0, "ycck": 2}[name]
    return bytes(data)


def interlaced() -> bytes:
    """Adam7 (PNG specification, 8.2), which Pillow does not write: seven small images, every row with filter 0."""
    passes = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)]
    rows = b"".join(b"\0" + row.tobytes() for y, x, down, right in passes for row in smooth(61, 83)[y::down, x::right])
    parts = (b"IHDR", struct.pack(">IIBBBBB", 83, 61, 8, 2, 0, 0, 1)), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")
    chunks = (struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


KINDS = {
    "jpeg": lambda: jpeg(smooth(61, 83)),
    "progressive jpeg": lambda: jpeg(smooth(61, 83), progressive=True),
    "gray jpeg": lambda: encoded(image("L"), "JPEG"),
    "cmyk jpeg": lambda: four_channels("cmyk"),
    "ycck jpeg": lambda: four_channels("ycck"),
    "jpeg of two images": lambda: pages("MPO"),
    "png": lambda: encoded(image(), "PNG"),
    "interlaced png": interlaced,
    "gray png": lambda: encoded(image("L"), "PNG"),
    "gray and alpha png": lambda: encoded(transparent("L"), "PNG"),
    "rgba png": lambda: encoded(transparent("RGB"), "PNG"),
    "palette png": lambda: encoded(palette(), "PNG"),
    "transparent palette png": lambda: encoded(palette(), "PNG", transparency=3),
    "two-color png": lambda: encoded(image("1"), "PNG"),
    "bmp": lambda: encoded(image(), "BMP"),
    "rgba bmp": lambda: encoded(transparent("RGB"), "BMP"),
    "palette bmp": lambda: encoded(palette(), "BMP"),
    "two-color bmp": lambda: encoded(image("1"), "BMP"),
    "webp": lambda: encoded(image(), "WEBP"),
    "lossless webp": lambda: encoded(image(), "WEBP", lossless=True),
    "rgba webp": lambda: encoded(transparent("RGB"), "WEBP", lossless=True, exact=True),
    "animated webp": lambda: pages("WEBP"),
    "tiff": lambda: encoded(image(), "TIFF", compression="tiff_lzw"),
    "plain tiff": lambda: encoded(image(), "TIFF"),
    "jpeg tiff": lambda: encoded(image(), "TIFF", compression="jpeg"),
    "fax tiff": lambda: encoded(image("1"), "TIFF", compression="group4"),
    "palette tiff": lambda: encoded(palette(), "TIFF"),
    "rgba tiff": lambda: encoded(transparent("RGB"), "TIFF"),
    "big tiff": lambda: encoded(image(), "TIFF", big_tiff=True),
    "tiff of two pages": lambda: pages("TIFF"),
    "gif": lambda: encoded(palette(), "GIF"),
    "transparent gif": lambda: encoded(palette(), "GIF", transparency=3),
    "animated gif": lambda: pages("GIF"),
    "ppm": lambda: encoded(image(), "PPM"),
    "jpeg 2000": lambda: encoded(image(), "JPEG2000"),
}
"""Formats and their varieties, each as Pillow's `convert("RGB")` shows it: alpha dropped, the first page or frame."""


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_are_those_that_pillow_sees(kind):
    data = KINDS[kind]()
    actual = decode(data, PATH)
    assert actual.shape == (61, 83, 3)
    # libjpeg-turbo versions may differ by rounding; the other formats are exact.
    assert np.abs(actual.astype(int) - by_pillow(data)).max() <= (2 if "jpeg" in kind else 0)


@pytest.mark.parametrize("ending", [".png", ".tiff"])
def test_sixteen_bits_keep_the_upper_eight(ending):
    gray, colors = two_bytes()[..., 0], two_bytes()
    assert np.array_equal(decode(by_opencv(ending, gray), PATH), np.repeat(smooth(61, 83)[..., :1], 3, 2))
    assert np.array_equal(decode(by_opencv(ending, colors[..., ::-1].copy()), PATH), smooth(61, 83))


def test_transparency_is_dropped_not_blended():
    pixels = np.dstack([smooth(20, 30), np.zeros((20, 30), np.uint8)])
    assert np.array_equal(decode(encoded(Image.fromarray(pixels), "PNG"), PATH), pixels[..., :3])


@pytest.mark.parametrize("kind", ["jpeg", "cmyk jpeg", "png"])
@pytest.mark.parametrize("target", [(30, 41), (61, 83), (100, 90), (1, 1)])
def test_decode_into_writes_its_view_and_nothing_else(kind, target):
    buffer = np.full((120, 100, 3), 9, np.uint8)
    decode_into(KINDS[kind](), PATH, region=(0, 0, 83, 61), out=buffer[: target[0], : target[1]])
    assert (buffer[target[0] :] == 9).all()
    assert (buffer[:, target[1] :] == 9).all()
    expected = cv2.resize(by_pillow(KINDS[kind]()), target[::-1], interpolation=cv2.INTER_AREA)
    assert np.abs(buffer[: target[0], : target[1]].astype(int) - expected).mean() < 6


@pytest.mark.parametrize("divisor", [1, 2, 4, 8])
@pytest.mark.parametrize("channels", [1, 3])
def test_decoding_in_place_gives_the_same_pixels(divisor, channels):
    """A view whose rows follow each other is decoded into directly, another one through memory of its own."""
    pixels = smooth(61, 83)
    data = jpeg(pixels if channels == 3 else pixels[..., 0])
    height, width = -(-61 // divisor), -(-83 // divisor)
    in_place, strided = np.full((height + 2, width, 3), 9, np.uint8), np.full((height, width + 2, 3), 9, np.uint8)
    decode_into(data, PATH, region=(0, 0, 83, 61), out=in_place[:height])
    decode_into(data, PATH, region=(0, 0, 83, 61), out=strided[:, :width])
    assert np.array_equal(in_place[:height], strided[:, :width])
    assert (in_place[height:] == 9).all()


@pytest.mark.parametrize("size", [(61, 83), (30, 83)])
def test_a_damaged_file_is_named_whether_decoded_in_place_or_not(size):
    data = jpeg(smooth(61, 83))
    with pytest.raises(DataError, match=r"truncated|premature|Premature") as caught:
        decode_into(data[: len(data) * 2 // 3], PATH, region=(0, 0, 83, 61), out=np.empty((*size, 3), np.uint8))
    assert caught.value.location == str(PATH)


@functools.cache
def smooth_file(kind: str) -> tuple[np.ndarray, bytes]:
    pixels = smooth(960, 1280, detail=16)
    return pixels, jpeg(pixels) if kind == "jpeg" else encoded(Image.fromarray(pixels), "PNG")


@pytest.mark.parametrize("kind", ["jpeg", "png"])
@pytest.mark.parametrize("factor", [1.3, 2.5, 4.7, 9.0, 20.0])
def test_a_region_is_where_the_whole_image_has_it(kind, factor):
    """Against Pillow's filter over the same region; a shift by one pixel of the result would show."""
    pixels, data = smooth_file(kind)
    region = (160, 64, 1120, 864)
    width, height = round(960 / factor), round(800 / factor)
    out = np.empty((height, width, 3), np.uint8)
    decode_into(data, PATH, region=region, out=out)
    expected = np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BOX, box=region))
    error = np.abs(out.astype(int) - expected).mean()
    shifted = np.abs(out[:, 1:].astype(int) - expected[:, :-1]).mean()
    assert error < 1.5
    assert error < shifted / 2


@functools.cache
def detailed(kind: str) -> tuple[bytes, Image.Image]:
    """Octaves of noise, as photographs have them, as a file and as Pillow opens it."""
    chance = np.random.default_rng(0)
    pixels = np.full((752, 1000, 3), 128, np.float32)
    for octave in range(9):
        grid = chance.standard_normal((3 * 2**octave, 4 * 2**octave, 3)).astype(np.float32)
        pixels += cv2.resize(grid, (1000, 752), interpolation=cv2.INTER_CUBIC) * 40 / 2 ** (0.6 * octave)
    shown = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    data = encoded(shown, kind, quality=95)
    return data, Image.fromarray(by_pillow(data))


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("target", [(200, 200), (100, 333), (400, 560)])
def test_a_detailed_image_is_no_further_from_pillows_filters_than_they_are_apart(kind, target):
    """At (200, 200) the DCT scale falls short of the height."""
    data, shown = detailed(kind)
    out = np.empty((*target, 3), np.uint8)
    decode_into(data, PATH, region=(0, 0, 1000, 752), out=out)
    by = {name: np.asarray(shown.resize(target[::-1], getattr(Image.Resampling, name)), int) for name in RESIZES}
    apart = np.abs(by["LANCZOS"] - by["BILINEAR"]).mean()
    assert min(np.abs(out - other).mean() for other in by.values()) < apart
    sampled = np.asarray(shown.resize(target[::-1], Image.Resampling.NEAREST), int)
    assert min(np.abs(sampled - other).mean() for other in by.values()) > apart


def test_a_region_outside_the_image_is_refused():
    out = np.empty((10, 10, 3), np.uint8)
    with pytest.raises(ValueError, match="not inside the image, 83 × 61"):
        decode_into(KINDS["jpeg"](), PATH, region=(0, 0, 84, 61), out=out)


@given(st.tuples(st.integers(1, 5000), st.integers(1, 5000)), st.tuples(st.integers(1, 2000), st.integers(1, 2000)))
def test_dct_scaling_never_goes_far_below_the_target(source, target):
    divisor = choose_dct_divisor(source, target)
    if divisor > 1:
        assert source[0] / divisor >= target[0] * 0.93
        assert source[1] / divisor >= target[1] * 0.93
    if divisor < 8:
        assert min(source[0] / target[0], source[1] / target[1]) < divisor * 2


@functools.cache
def made(kind: str) -> tuple[bytes, np.ndarray]:
    data = KINDS[kind]()
    return data, decode(data, PATH)


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10, deadline=None)
@given(at=st.floats(0, 1, exclude_max=True))
def test_a_cut_anywhere_is_an_error_or_loses_nothing(kind, at):
    """Nothing, in formats that end with something else than pixels; never half an image, never another error."""
    data, whole = made(kind)
    try:
        actual = decode(data[: int(at * len(data))], PATH)
    except DataError as error:
        assert str(PATH) in str(error)  # noqa: PT017  # either outcome is right
    else:
        assert np.array_equal(actual, whole)


@given(st.sampled_from(["jpeg", "progressive jpeg", "gray png", "png"]), st.data())
def test_no_cut_of_a_jpeg_or_png_goes_unseen(kind, data):
    whole, _ = made(kind)
    with pytest.raises(DataError):
        decode(whole[: data.draw(st.integers(0, len(whole) - 1))], PATH)


STRAYS = {
    "behind the end": lambda data: data + b"camera's own notes" * 30,
    "zeros up to a block's end": lambda data: data + bytes(4096),
    "before a table": lambda data: data[:20] + bytes(4) + data[20:],
    "before the frame": lambda data: data.replace(b"\xff\xc0", b"\x07\x07\xff\xc0", 1),
    "before the end": lambda data: data[:-2] + bytes(16) + data[-2:],
    "fill bytes": lambda data: data[:20] + b"\xff" * 5 + data[20:],
}


@pytest.mark.parametrize("where", STRAYS)
def test_stray_bytes_between_the_parts_of_a_jpeg_change_nothing(where):
    data, whole = made("jpeg")
    strayed = STRAYS[where](data)
    assert strayed != data
    assert np.array_equal(decode(strayed, PATH), whole)


@pytest.mark.parametrize("where", [where for where in STRAYS if "end" not in where])
@given(st.data())
def test_a_cut_jpeg_with_stray_bytes_is_still_cut(where, data):
    strayed = STRAYS[where](made("jpeg")[0])
    with pytest.raises(DataError):
        decode(strayed[: data.draw(st.integers(0, len(strayed) - 1))], PATH)


def test_a_jpeg_whose_middle_is_lost_is_refused():
    """It ends as it should; libjpeg runs out of coded pixels."""
    data = jpeg(smooth(400, 600, detail=40))
    with pytest.raises(DataError, match="cannot be decoded"):
        decode(data[: len(data) // 2] + data[-2:], PATH)


def with_orientation(kind: str, orientation: int, pixels: np.ndarray) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"tiffinfo": {0x0112: orientation}} if kind == "TIFF" else {"exif": exif}
    if kind == "WEBP":
        options["lossless"] = True
    if kind == "JPEG":
        options |= {"quality": 95, "subsampling": 0}
    mode = "CMYK" if kind == "CMYK" else "RGB"
    return encoded(Image.fromarray(pixels).convert(mode), "JPEG" if kind == "CMYK" else kind, **options)


def upright(data: bytes) -> np.ndarray:
    """Pillow's opinion. (It turns TIFFs itself, and takes their tag away.)"""
    with Image.open(io.BytesIO(data)) as opened:
        opened.load()
        return np.asarray(ImageOps.exif_transpose(opened).convert("RGB"))


@pytest.mark.parametrize("kind", ["JPEG", "CMYK", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_come_upright_as_pillow_turns_them(kind, orientation):
    data = with_orientation(kind, orientation, smooth(40, 61))
    actual, expected = decode(data, PATH), upright(data)
    assert actual.shape == expected.shape
    assert np.abs(actual.astype(int) - expected).max() <= (2 if kind in ("JPEG", "CMYK") else 0)
    header = parse_header(data, PATH)
    stored = header._replace(size=header.stored_size, orientation=1)
    as_stored = np.empty((40, 61, 3), np.uint8)
    decode_into(data, PATH, region=(0, 0, 61, 40), out=as_stored, header=stored)
    assert np.abs(as_stored.astype(int) - decode(with_orientation(kind, 1, smooth(40, 61)), PATH)).max() == 0


@pytest.mark.parametrize("reduction", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_region_of_a_turned_jpeg_is_where_the_upright_image_has_it_at_every_dct_scale(orientation, reduction):
    """Sides that 8 does not divide: the scaled pixels of the file do not lie as those of the upright image."""
    data = with_orientation("JPEG", orientation, smooth(643, 837, detail=8))
    shown = upright(data)
    height, width = shown.shape[:2]
    region = (32, 64, width - width % 32 - 32, height - height % 32 - 64)
    size = (region[2] - region[0]) // reduction, (region[3] - region[1]) // reduction
    out = np.empty((size[1], size[0], 3), np.uint8)
    decode_into(data, PATH, region=region, out=out)
    expected = np.asarray(Image.fromarray(shown).resize(size, Image.Resampling.BOX, box=region))
    error = np.abs(out.astype(int) - expected).mean()
    shifted = min(
        np.abs(out[2:].astype(int) - expected[:-2]).mean(), np.abs(out[:, 2:].astype(int) - expected[:, :-2]).mean()
    )
    assert error < 4
    assert error < shifted


def test_a_thumbnail_is_turned_as_the_boxes_are():
    data = with_orientation("JPEG", 6, smooth(400, 600))
    pixels, size = thumbnail(data, PATH, 100)
    assert (pixels.shape, size) == ((100, 67, 3), (600, 400))
    pixels, size = thumbnail(data, PATH, 100, annotated_size=(400, 600))
    assert (pixels.shape, size) == ((67, 100, 3), (400, 600))
    assert thumbnail(data, PATH, 5000)[0].shape == (600, 400, 3)  # never enlarged


def test_a_huge_jpeg_is_decoded_small():
    """20,000 × 20,000 pixels, 1.2 GB as RGB: through the DCT scale they take a 64th."""
    row = encoded(Image.new("L", (20_000, 16), 90), "JPEG", restart_marker_rows=1)
    scan = row.index(b"\xff\xda") + 2 + int.from_bytes(row[row.index(b"\xff\xda") + 2 :][:2], "big")
    frame = row.index(b"\xff\xc0")
    head = row[: frame + 5] + (20_000).to_bytes(2, "big") + row[frame + 7 : scan]
    # Gray has 8 rows a block row, a restart marker (D0 … D7 in turn) behind each but the last.
    blocks = row[scan:-2].split(b"\xff\xd0")
    assert len(blocks) == 2
    assert blocks[0] == blocks[1]
    marks = [b"" if n == 2499 else bytes([0xFF, 0xD0 + n % 8]) for n in range(2500)]
    data = head + b"".join(blocks[0] + mark for mark in marks) + b"\xff\xd9"
    out = np.empty((64, 64, 3), np.uint8)
    decode_into(data, PATH, region=(0, 0, 20_000, 20_000), out=out)
    assert (out == 90).all()


def test_a_name_does_not_matter():
    assert np.array_equal(decode(KINDS["jpeg"](), Path("a.png")), decode(KINDS["jpeg"](), Path("a.jpg")))


@pytest.mark.parametrize("lost", [12, 13, 200])
def test_a_truncated_png_is_seen_where_opencv_makes_an_image_of_it(lost, monkeypatch):
    """As some builds do; the one here refuses."""
    data = KINDS["png"]()
    monkeypatch.setattr(cv2, "imdecode", lambda *_: np.zeros((61, 83, 3), np.uint8))
    assert decode(data, PATH).shape == (61, 83, 3)
    with pytest.raises(DataError, match="cannot be decoded"):
        decode(data[:-lost], PATH)


def test_an_image_that_decodes_to_another_size_than_its_header_says_is_refused(monkeypatch):
    monkeypatch.setattr(cv2, "imdecode", lambda *_: np.zeros((83, 61, 3), np.uint8))
    with pytest.raises(DataError) as caught:
        decode(KINDS["bmp"](), PATH)
    assert "says 83 × 61 pixels, it has 61 × 83" in str(caught.value)


def test_damage_in_a_png_is_seen():
    data = bytearray(KINDS["png"]())
    data[len(data) // 2] ^= 0xFF
    with pytest.raises(DataError):
        decode(bytes(data), PATH)


@pytest.mark.parametrize(
    ("data", "says"), [(b"", "0 bytes"), (b"<html>404</html>", "cannot be decoded"), (bytes(500), "cannot be decoded")]
)
def test_what_is_no_image_is_an_error_that_names_it(data, says):
    with pytest.raises(DataError) as caught:
        decode(data, PATH)
    assert says in str(caught.value)
    assert str(PATH) in str(caught.value)
