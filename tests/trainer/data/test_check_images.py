"""The check of images detects the damage that the loader detects, at any scale, and survives every file."""

import io
import json
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from stoker.data.images.decode import DCT_DIVISORS, decode_into
from stoker.data.images.headers import parse_header
from stoker.data.validation import check
from stoker.data.validation.check import check_dataset
from stoker_watch.errors import DataError

PATH = Path("image")


def smooth() -> Image.Image:
    rough = np.random.default_rng(0).integers(0, 255, (15, 20, 3), np.uint8)
    return Image.fromarray(rough).resize((160, 120), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, format: str = "JPEG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)  # type: ignore[arg-type]
    return file.getvalue()


JPEGS = {
    "baseline": encoded(smooth()),
    "color at full size": encoded(smooth(), subsampling=0, quality=95),
    "own tables": encoded(smooth(), optimize=True, quality=40),
    "gray": encoded(smooth().convert("L")),
    "progressive": encoded(smooth(), progressive=True),
    "restart marks": encoded(smooth(), restart_marker_rows=1),
    "progressive with restart marks": encoded(smooth(), progressive=True, restart_marker_blocks=3),
}


def loaded(data: bytes, shrink: int) -> str | None:
    """What the loader says of a image that it needs at 1/shrink of its size; None where it can use it."""
    try:
        header = parse_header(data, PATH)
        height, width = header.size
        out = np.empty((max(1, height // shrink), max(1, width // shrink), 3), np.uint8)
        decode_into(data, PATH, region=(0, 0, width, height), out=out, header=header)
    except DataError as error:
        return error.cause
    return None


def checked(data: bytes) -> str | None:
    try:
        check._decode(data, parse_header(data, PATH), PATH, threading.local())
    except DataError as error:
        return error.cause
    return None


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A JPEG that is cut off, has flipped bits or bytes of another value, or has lost some from its middle."""
    data = bytearray(JPEGS[draw(st.sampled_from(sorted(JPEGS)))])
    if draw(st.booleans()):
        del data[draw(st.integers(2, len(data) - 1)) :]
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data) - 1))
        match draw(st.sampled_from(["bit", "byte", "gap"])):
            case "bit":
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "byte":
                data[at] = draw(st.sampled_from([0x00, 0xFF, 0xD0, 0xD9]))
            case "gap" if len(data) > 64:
                del data[at : at + draw(st.integers(1, 30))]
    return bytes(data)


@pytest.mark.slow
@settings(max_examples=400)
@given(damaged())
def test_decoding_at_an_eighth_detects_the_same_damage(data: bytes) -> None:
    try:
        height, width = parse_header(data, PATH).size
    except DataError:
        return  # before any pixel: the same for all
    if height * width > 1 << 20:
        return  # a header that was made to promise more costs time only
    assert {checked(data)} == {loaded(data, shrink) for shrink in (1, *DCT_DIVISORS)}


def test_jpegs_are_decoded_at_an_eighth(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    monkeypatch.setattr(check, "decode_into", lambda *_, out, **__: shapes.append(out.shape))
    assert checked(JPEGS["baseline"]) is None
    assert shapes == [(15, 20, 3)]


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_truncated_files_of_any_format_are_reported(tmp_path: Path) -> None:
    whole = {
        "jpg": JPEGS["baseline"],
        "png": encoded(smooth(), "PNG"),
        "webp": encoded(smooth(), "WEBP"),
        "bmp": encoded(smooth(), "BMP"),
        "tif": encoded(smooth(), "TIFF"),
        "gif": encoded(smooth().convert("P"), "GIF"),
        "ppm": encoded(smooth(), "PPM"),
        "jp2": encoded(smooth(), "JPEG2000"),
    }
    names = []
    for ending, data in whole.items():
        for count in (*range(48), len(data) // 2, len(data)):
            names.append(f"{count}.{ending}")
            (tmp_path / names[-1]).write_bytes(data[:count])
    images = [{"id": n, "file_name": name, "width": 160, "height": 120} for n, name in enumerate(names)]
    annotations = [{"id": n, "image_id": n, "category_id": 1, "bbox": [1, 2, 30, 40]} for n in range(len(names))]
    categories = [{"id": 1, "name": "thing"}]
    document = {"images": images, "annotations": annotations, "categories": categories}
    (tmp_path / "annotations.json").write_text(json.dumps(document))
    report = check_dataset(tmp_path, workers=2)
    places = {item.kind: item.examples for item in report.items}
    assert len(places["empty-image"]) == len(whole)
    assert report.num_usable_images == len(whole)
