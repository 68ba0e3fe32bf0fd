"""Bytes of a picture file → RGB pixels, straight into the batch buffer, once, at the size that training needs.

JPEG goes through simplejpeg, which lets libjpeg decode at 1/2, 1/4 or 1/8 of the size inside the DCT: 4,000 × 3,000
for an 800-pixel canvas is decoded at 1,000 × 750. CMYK JPEG goes through Pillow, everything else through OpenCV. EXIF
rotation is not applied: boxes are as drawn on the stored pixels. Both libraries release the GIL, so threads suffice.
A file that is empty, truncated, damaged or no picture raises a `DataError` that names it; a flipped bit that still
decodes cannot be seen in a JPEG, which has no checksum. Where a region goes: `augment.py`; who calls: `samples.py`.
"""

import io
from pathlib import Path

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from stoker.errors import DataError

# The loader has a thread per core already; OpenCV's own pool on top only makes them wait for each other.
cv2.setNumThreads(0)
# What OpenCV prints about a damaged file is said by our DataError, with the file's name.
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)

Pixels = NDArray[np.uint8]
Region = tuple[int, int, int, int]
"""x0, y0, x1, y1 in whole pixels of the stored picture; x1 and y1 are outside."""

SHRINKS = (8, 4, 2)
"""Divisors at which libjpeg decodes no slower than at full size. 3/8, 5/8 … have no SIMD code: they take longer."""

_JPEG, _PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"


def shrink_for(source: tuple[float, float], target: tuple[float, float]) -> int:
    """The largest DCT divisor (1, 2, 4, 8) at which `source` (height, width) does not fall below `target`."""
    for divisor in SHRINKS:
        if source[0] >= target[0] * divisor and source[1] >= target[1] * divisor:
            return divisor
    return 1


def picture_size(data: bytes, path: Path) -> tuple[int, int]:
    """Height and width of the stored pixels, from the header alone. Raises DataError."""
    _check_begins(data, path)
    if data.startswith(_JPEG):
        return _jpeg_header(data, path)[:2]
    if data.startswith(_PNG):
        return int.from_bytes(data[20:24], "big"), int.from_bytes(data[16:20], "big")
    try:
        with Image.open(io.BytesIO(data)) as picture:
            width, height = picture.size
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
        raise _unusable(path, str(error)) from error
    return height, width


def decode(data: bytes, path: Path) -> Pixels:
    """The whole picture, uint8 [h, w, 3] RGB. Raises DataError."""
    height, width = picture_size(data, path)
    out = np.empty((height, width, 3), np.uint8)
    decode_into(data, path, region=(0, 0, width, height), out=out)
    return out


def decode_into(data: bytes, path: Path, *, region: Region, out: Pixels) -> None:
    """Decodes the picture and resizes `region` of it to fill `out`, uint8 [h, w, 3] RGB, a view of the batch buffer.

    Bilinear up to a reduction by 2, where its 2 × 2 pixels still reach every pixel of the source (after the DCT scaling
    that is every JPEG down to 1/16); area averaging, five times as dear, beyond. A JPEG that is decoded at 1/d has its
    region rounded out to multiples of d pixels. Raises DataError; ValueError when the region is not in the picture.
    """
    height, width = picture_size(data, path)
    x0, y0, x1, y1 = region
    if not (0 <= x0 < x1 <= width and 0 <= y0 < y1 <= height):
        raise ValueError(f"region {region} is not inside the picture, {width} × {height} pixels: {path}")
    if not data.startswith(_JPEG):
        whole = _decode_other(data, path)
        if whole.shape[:2] != (height, width):
            said = f"its header says {width} × {height} pixels, it decodes to {whole.shape[1]} × {whole.shape[0]}"
            raise _unusable(path, said)
        _resize_into(whole[y0:y1, x0:x1], out)
        cv2.cvtColor(out, cv2.COLOR_BGR2RGB, dst=out)
        return
    if _jpeg_header(data, path)[2] in ("CMYK", "YCCK"):
        _resize_into(_decode_cmyk(data, path)[y0:y1, x0:x1], out)
        return
    divisor = shrink_for((y1 - y0, x1 - x0), (out.shape[0], out.shape[1]))
    try:
        pixels = simplejpeg.decode_jpeg(data, min_height=-(-height // divisor), min_width=-(-width // divisor))
    except ValueError as error:
        raise _unusable(path, str(error)) from error
    _resize_into(pixels[y0 // divisor : -(-y1 // divisor), x0 // divisor : -(-x1 // divisor)], out)


def _resize_into(source: Pixels, out: Pixels) -> None:
    height, width = out.shape[:2]
    reduction = max(source.shape[0] / height, source.shape[1] / width)
    how = cv2.INTER_AREA if reduction > 2 else cv2.INTER_LINEAR
    written = cv2.resize(source, (width, height), dst=out, interpolation=how)
    if not np.may_share_memory(written, out):  # a build of OpenCV that allocates anew: right, only slower
        np.copyto(out, written)


def _decode_cmyk(data: bytes, path: Path) -> Pixels:
    try:
        with Image.open(io.BytesIO(data)) as picture:
            return np.asarray(picture.convert("RGB"))
    except (OSError, ValueError, SyntaxError) as error:
        raise _unusable(path, str(error)) from error


def _jpeg_header(data: bytes, path: Path) -> tuple[int, int, str]:
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError as error:
        raise _unusable(path, str(error)) from error
    return height, width, colours


def _decode_other(data: bytes, path: Path) -> Pixels:
    """uint8 [h, w, 3] BGR, full size. 16 bits a channel keep the upper 8, grey is repeated, alpha is dropped."""
    if data.startswith(_PNG):
        _check_png_is_whole(data, path)
    try:
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error as error:
        raise _unusable(path, str(error).strip()) from error
    if pixels is None:
        raise _unusable(path, "it is truncated or damaged, or no picture format that OpenCV reads")
    return np.asarray(pixels, np.uint8)


def _check_png_is_whole(data: bytes, path: Path) -> None:
    """Walks the chunks to the last: OpenCV may make half a picture of a truncated file. libpng checks the CRCs."""
    at = len(_PNG)
    while at + 12 <= len(data):
        length, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        at += 12 + length
        if kind == b"IEND" and at <= len(data):
            return
    raise _unusable(path, f"the PNG is truncated: {len(data):,} bytes and no end chunk")


def _check_begins(data: bytes, path: Path) -> None:
    if not data:
        raise DataError("The picture file is empty.", place=path, cause="it has 0 bytes", fix="copy it again")
    if data.startswith(_PNG) and len(data) < 33:
        raise _unusable(path, f"the PNG is truncated: {len(data)} bytes are less than its header")


def _unusable(path: Path, cause: str) -> DataError:
    fix = "copy or download the file again, or remove it from the annotations"
    return DataError("The picture cannot be decoded.", place=path, cause=cause, fix=fix)
