"""Headers: size and turn of every format as Pillow has them; what can never be decoded is refused by name, at once."""

import contextlib
import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from stoker.data.images.headers import HEAD_BYTES, IMAGE_FORMATS, MAX_PIXELS, parse_header, read_header
from stoker_watch.errors import DataError

PATH = Path("images/somewhere.jpg")


def encoded(kind: str, size: tuple[int, int] = (60, 40), mode: str = "RGB", **options: object) -> bytes:
    file = io.BytesIO()
    Image.new(mode, size).save(file, kind, **options)
    return file.getvalue()


def turned(orientation: int, *, before: bytes = b"") -> bytes:
    """EXIF as a camera writes it. before: text of a tag that stands earlier in the directory."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    if before:
        exif[0x010E] = before.decode()
    return exif.tobytes()


def segment(marker: int, content: bytes) -> bytes:
    return b"\xff" + bytes([marker]) + struct.pack(">H", len(content) + 2) + content


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_promising(width: int, height: int) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


MADE = {
    "jpeg": lambda: encoded("JPEG"),
    "png": lambda: encoded("PNG"),
    "webp": lambda: encoded("WEBP"),
    "bmp": lambda: encoded("BMP"),
    "tiff": lambda: encoded("TIFF"),
    "gif": lambda: encoded("GIF"),
    "pnm": lambda: encoded("PPM"),
    "jpeg 2000": lambda: encoded("JPEG2000"),
}


def test_every_format_says_its_size_and_kind(tmp_path):
    assert set(MADE) == set(IMAGE_FORMATS)
    for kind, make in MADE.items():
        data = make()
        header = parse_header(data, PATH)
        assert header == ((40, 60), (40, 60), 1, kind, 3)
        path = tmp_path / "a.jpg"  # whatever the name
        path.write_bytes(data)
        assert read_header(path) == header


@pytest.mark.parametrize(
    "options", [{"lossless": True}, {"save_all": True, "append_images": [Image.new("RGB", (60, 40), "red")]}]
)
def test_the_varieties_of_webp(options):
    assert parse_header(encoded("WEBP", **options), PATH).size == (40, 60)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "CMYK", "I;16"])
def test_modes_of_tiff_and_big_tiff(mode):
    for big in (False, True):
        assert parse_header(encoded("TIFF", mode=mode, big_tiff=big), PATH).size == (40, 60)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(9))
def test_orientation_and_the_size_that_goes_with_it(kind, orientation, tmp_path):
    options = {"tiffinfo": {0x0112: orientation}} if kind == "TIFF" else {"exif": turned(orientation)}
    data = encoded(kind, **options)
    header = parse_header(data, PATH)
    assert header.stored_size == (40, 60)
    assert header.orientation == (orientation or 1)  # 0 is not defined
    assert header.size == ((60, 40) if orientation >= 5 else (40, 60))
    path = tmp_path / "a"
    path.write_bytes(data)
    assert read_header(path) == header


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(("kind", "code"), [(3, "H"), (4, "I"), (1, "B")])
def test_orientation_in_both_byte_orders_and_all_whole_types(order, kind, code):
    entry = struct.pack(order + "HHI", 0x0112, kind, 1) + struct.pack(order + code, 8).ljust(4, b"\0")
    tiff = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(order + "IH", 8, 1) + entry + bytes(4)
    data = encoded("JPEG")
    data = data[:2] + segment(0xE1, b"Exif\0\0" + tiff) + data[2:]
    assert parse_header(data, PATH).orientation == 8


@given(st.binary(max_size=60))
def test_damaged_exif_is_no_orientation(exif):
    data = encoded("JPEG")
    data = data[:2] + segment(0xE1, b"Exif\0\0II*\0" + exif) + data[2:]
    header = parse_header(data, PATH)
    assert header.stored_size == (40, 60)
    assert 1 <= header.orientation <= 8


def test_what_stands_far_behind_in_a_file_is_found(tmp_path):
    """EXIF behind a PNG's pixels; a size behind 200 kB of other segments; a TIFF whose tags come last."""
    exif = Image.Exif()
    exif[0x0112] = 6
    png = encoded("PNG", (300, 200))
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (200, 300, 3), np.uint8))
    file = io.BytesIO()
    noise.save(file, "PNG")
    png = file.getvalue()
    png = png[:-12] + chunk(b"eXIf", exif.tobytes()[6:]) + png[-12:]
    jpeg = encoded("JPEG", (300, 200), exif=turned(6))
    jpeg = jpeg[:2] + 4 * segment(0xE2, bytes(60_000)) + jpeg[2:]
    big = io.BytesIO()
    noise.save(big, "TIFF", tiffinfo={0x0112: 6}, compression="tiff_lzw")
    for data in (png, jpeg, big.getvalue()):
        assert len(data) > HEAD_BYTES
        path = tmp_path / "a"
        path.write_bytes(data)
        assert read_header(path) == parse_header(data, path)
        assert read_header(path).size == (300, 200)
        with Image.open(path) as image:
            assert image.getexif()[0x0112] == 6


def test_an_image_is_shown_as_its_annotations_saw_it():
    header = parse_header(encoded("JPEG", exif=turned(6)), PATH)
    assert header.as_annotated((60, 40)) == header
    assert header.as_annotated((0, 0)) == header
    assert header.as_annotated((40, 60)).size == (40, 60)
    assert header.as_annotated((40, 60)).orientation == 1
    assert header.as_annotated((41, 60)) == header  # neither: the caller refuses it, with the size that people see
    assert header.is_orientation_ambiguous((0, 0))
    assert not header.is_orientation_ambiguous((60, 40))
    half = parse_header(encoded("JPEG", exif=turned(3)), PATH)
    assert half.as_annotated((40, 60)).orientation == 3
    assert half.is_orientation_ambiguous((40, 60))
    square = parse_header(encoded("JPEG", (50, 50), exif=turned(6)), PATH)
    assert square.as_annotated((50, 50)).orientation == 6
    assert square.is_orientation_ambiguous((50, 50))
    assert not parse_header(encoded("JPEG"), PATH).is_orientation_ambiguous((0, 0))


def refusal(data: bytes) -> str:
    with pytest.raises(DataError) as caught:
        parse_header(data, PATH)
    assert str(PATH) in str(caught.value)
    assert "fix:" in str(caught.value)
    return str(caught.value)


def test_too_many_pixels_are_refused_with_the_limit():
    assert parse_header(png_promising(20_000, 20_000), PATH).size == (20_000, 20_000)
    messages = refusal(png_promising(2**31 - 1, 2**31 - 1))
    assert "2,147,483,647 × 2,147,483,647" in messages
    assert f"{MAX_PIXELS:,}" in messages
    assert "tiles" in messages
    refusal(png_promising(MAX_PIXELS // 2 + 1, 2))
    assert "0 × 5" in refusal(png_promising(0, 5))


def test_unsupported_kinds_of_jpeg_are_rejected_by_name():
    data = encoded("JPEG")
    frame = data.index(b"\xff\xc0")
    assert "arithmetic-coded" in refusal(data.replace(b"\xff\xc0", b"\xff\xc9", 1))
    assert "lossless" in refusal(data.replace(b"\xff\xc0", b"\xff\xc3", 1))
    assert "hierarchical" in refusal(data.replace(b"\xff\xc0", b"\xff\xc5", 1))
    assert "12 bits" in refusal(data[: frame + 4] + b"\x0c" + data[frame + 5 :])
    assert "DNL" in refusal(data[: frame + 5] + b"\0\0" + data[frame + 7 :])


def test_unsupported_kinds_of_tiff_are_rejected_by_name():
    assert "floating-point" in refusal(encoded("TIFF", mode="F"))
    assert "32 bits" in refusal(encoded("TIFF", mode="I"))
    assert "raw file" in refusal(encoded("TIFF", tiffinfo={0xC612: 1}))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\0\0\0\x20ftypavif" + bytes(100), "AVIF"),
        (b"\0\0\0\x18ftypheic" + bytes(100), "HEIC"),
        (b"\0\0\0\x18ftypmp42" + bytes(100), "video"),
        (b"\n <!DOCTYPE html><html>404", "web page"),
        (b"\xef\xbb\xbf<html lang=en>", "web page"),
        (b'<?xml version="1.0"?><svg></svg>', "SVG"),
        (b'{"error": 403}', "text"),
        (b"%PDF-1.7", "PDF"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
        (bytes(500), "begins with the bytes 00 00"),
        (b"\xff", "begins with the bytes ff"),
    ],
)
def test_what_is_no_image_is_named(data, says):
    assert says in refusal(data)


def test_an_empty_and_an_absent_file(tmp_path):
    path = tmp_path / "a.jpg"
    with pytest.raises(DataError, match="cannot be read"):
        read_header(path)
    path.touch()
    with pytest.raises(DataError, match="empty"):
        read_header(path)


@given(st.sampled_from(sorted(MADE)), st.data())
def test_no_cut_and_no_damage_makes_anything_but_a_header_or_an_error(kind, data):
    whole = bytearray(MADE[kind]())
    for _ in range(data.draw(st.integers(0, 4))):
        whole[data.draw(st.integers(0, min(len(whole), 200) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    with contextlib.suppress(DataError):
        header = parse_header(cut, PATH)
        assert header.stored_size[0] * header.stored_size[1] <= MAX_PIXELS


@pytest.mark.parametrize(
    "start", [b"\xff\xd8\xff\xe0\0\x10", b"\x89PNG\r\n\x1a\n" + bytes(4) + b"IHDR" + b"\0\0\0\x01" * 2, b"BM", b"II*\0"]
)
def test_a_large_file_of_zeros_is_not_walked_byte_by_byte(start, tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes(start)
    os.truncate(path, 50_000_000)
    reads = []
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda *where: reads.append(where) or real(*where))
    with contextlib.suppress(DataError):
        read_header(path)
    assert len(reads) < 1000
