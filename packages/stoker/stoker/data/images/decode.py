"""Decodes an image file to RGB pixels, directly into the batch buffer, at the size that training needs.

simplejpeg decodes JPEG; libjpeg scales by 1/2, 1/4 or 1/8 inside the DCT, so that 4,000 × 3,000 is decoded at
1,000 × 750 for an image size of 800. Pillow decodes CMYK JPEG, TIFF and GIF, OpenCV everything else. All release the
GIL, so threads suffice. Images become upright by their EXIF orientation, unless the caller's header says otherwise; the
small result is rotated. A file that is empty, truncated, damaged or not an image raises a `DataError` with its path. A
flipped bit in a JPEG that still decodes is not detected, as JPEG has no checksum. Headers: `headers.py`. The region to
show: `data/geometry.py`; the caller: `loading/samples.py`. Which JPEGs the device can decode instead
(`loading/device_decoder.py`) is decided here, without torch. Transparency, 16 bits: `docs/data.md`.
"""

import io
import re
import warnings
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from stoker.data.images.headers import Header, decode_error, parse_header

# The loader has a thread per core already; OpenCV's own pool would only make them wait for each other.
cv2.setNumThreads(0)
# Our DataError reports a damaged file with its path; OpenCV need not print about it.
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
# The same for warnings of Pillow; exceeding its size limit is a DataError, too.
warnings.filterwarnings("ignore", module=r"PIL\.(TiffImagePlugin|Image)$")

Pixels = NDArray[np.uint8]
Region = tuple[int, int, int, int]
"""x0, y0, x1, y1 in whole pixels of the upright image; x1 and y1 are exclusive."""

DCT_DIVISORS = (8, 4, 2)
"""Divisors at which libjpeg decodes no slower than at full size. 3/8, 5/8 … have no SIMD code and take longer."""
MIN_SCALE_FRACTION = 0.93
"""Fraction of the target's height and width that a DCT scale must reach. 4,000 × 3,000 squashed to 800 × 800 is then
decoded at 1,000 × 750, a quarter faster than at 2,000 × 1,500, and its height is enlarged by 7 %. The result differs by
0.41 of 255 levels from Pillow's antialiased bilinear resize, from which Pillow's other filters differ by 0.3 to 0.5."""
HARMLESS_WARNINGS = (
    "extraneous bytes before marker",
    "Invalid SOS parameters",
    "unknown JFIF revision",
    "Unknown Adobe color",
)
"""Warnings of libjpeg (jerror.h) about files with all their pixels; cameras and programs write such."""

DEVICE_MAX_PIXELS = 2**25
"""Limit for an image that the device decodes: its RGB floats take 400 MiB while it is resized."""
CHROMA_SUBSAMPLINGS = {0x11, 0x21, 0x12, 0x22, 0x41, 0x42, 0x14, 0x24}
"""Supported luma samples per chroma sample, across and down (nvJPEG's nvjpegChromaSubsampling_t)."""
ZERO_RUN = bytes(64)
"""Occurs where a block of the file was never written or got lost. libjpeg warns of it, nvJPEG may not. Flat color may
contain it, too: then the CPU decodes the image."""

_SCAN_END = re.compile(rb"\xff+[\x01-\xcf\xd8-\xfe]")
"""The next marker after a JPEG's coded pixels, which contain 00 (an escaped FF) and D0 … D7 (restart)."""
EXIF_TRANSFORMS = {
    1: (False, False, False), 2: (False, False, True), 3: (False, True, True), 4: (False, True, False),
    5: (True, False, False), 6: (True, True, False), 7: (True, True, True), 8: (True, False, True),
}  # fmt: skip
"""EXIF orientation (CIPA DC-008, 4.6.5) → (transpose, flip vertically, flip horizontally). The stored pixels are
flipped first, then rows and columns are swapped."""
INVERSE_ORIENTATION = {2: 2, 3: 3, 4: 4, 5: 5, 6: 8, 7: 7, 8: 6}
"""The orientation that undoes each."""
_PILLOW_ERRORS = (UnidentifiedImageError, OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError)
"""What Pillow raises for files that it cannot read."""


def choose_dct_divisor(source: tuple[float, float], target: tuple[float, float]) -> int:
    """The largest DCT divisor (1, 2, 4, 8) at which `source` (height, width) reaches MIN_SCALE_FRACTION of `target`."""
    min_scale = MIN_SCALE_FRACTION * DCT_DIVISORS[-1]
    if source[0] < target[0] * min_scale or source[1] < target[1] * min_scale:  # most images: no larger one fits either
        return 1
    for divisor in DCT_DIVISORS:
        min_scale = MIN_SCALE_FRACTION * divisor
        if source[0] >= target[0] * min_scale and source[1] >= target[1] * min_scale:
            return divisor
    return 1


def decode(data: bytes, path: Path | str) -> Pixels:
    """Returns the whole image, upright, uint8 [h, w, 3] RGB. Raises DataError."""
    header = parse_header(data, path)
    return decode_resized(data, path, header, header.size)


def decode_resized(data: bytes, path: Path | str, header: Header, size: tuple[int, int]) -> Pixels:
    """Returns the whole image resized to `size` (height, width), uint8 [h, w, 3] RGB, upright as in `header`. Raises
    DataError."""
    height, width = header.size
    out = np.empty((*size, 3), np.uint8)
    decode_into(data, path, region=(0, 0, width, height), out=out, header=header)
    return out


def thumbnail(
    data: bytes, path: Path | str, max_side: int, *, annotated_size: tuple[int, int] = (0, 0)
) -> tuple[Pixels, tuple[int, int]]:
    """Returns (the image as it was annotated, its longer side at most `max_side`, uint8 [h, w, 3] RGB; its full height
    and width).

    annotated_size: height and width in the annotations; (0, 0): they give none. Raises DataError.
    """
    header = parse_header(data, path).as_annotated(annotated_size)
    height, width = header.size
    scale = min(1.0, max_side / max(height, width))
    size = max(1, round(height * scale)), max(1, round(width * scale))
    return decode_resized(data, path, header, size), header.size


def decode_into(data: bytes, path: Path | str, *, region: Region, out: Pixels, header: Header | None = None) -> None:
    """Decodes the image and resizes `region` of it to fill `out`, uint8 [h, w, 3] RGB, a view of the batch buffer.

    header: from `parse_header`, or `Header.as_annotated`; None: upright, as `region` and `out` are. Resizes with
    `resize_into`. The region of a JPEG that is decoded at 1/d is extended to multiples of d stored pixels, by less than
    1.1 pixels of `out` on each side. Raises DataError; ValueError when the region is not inside the image.
    """
    if header is None:
        header = parse_header(data, path)
    x0, y0, x1, y1 = region
    if not (0 <= x0 < x1 <= header.size[1] and 0 <= y0 < y1 <= header.size[0]):
        raise ValueError(f"region {region} is not inside the image, {_format_size(header.size)} pixels: {path}")
    if header.orientation == 1:
        _decode_stored(data, path, header, region, out)
        return
    is_transposed = EXIF_TRANSFORMS[header.orientation][0]
    stored_pixels = np.empty((out.shape[1], out.shape[0], 3) if is_transposed else out.shape, np.uint8)
    _decode_stored(data, path, header, to_stored_region(region, header), stored_pixels)
    np.copyto(out, _apply_orientation(stored_pixels, header.orientation))


def _decode_stored(data: bytes, path: Path | str, header: Header, region: Region, out: Pixels) -> None:
    """Does what `decode_into` does, with `region` and `out` in the coordinates of the stored pixels."""
    x0, y0, x1, y1 = region
    height, width = header.stored_size
    if header.image_format != "jpeg" or header.channels == 4:
        if header.image_format in ("jpeg", "gif", "tiff"):
            full_image = _decode_with_pillow(data, path)
        else:
            full_image = _decode_with_opencv(data, path, header.image_format)
        _check_decoded(full_image, header.stored_size, path)
        resize_into(full_image[y0:y1, x0:x1], out)
        return
    divisor = choose_dct_divisor((y1 - y0, x1 - x0), (out.shape[0], out.shape[1]))
    min_size = -(-height // divisor), -(-width // divisor)
    if region == (0, 0, width, height) and out.shape[:2] == min_size and _decode_jpeg_in_place(data, out):
        return
    pixels = _decode_jpeg(data, path, min_size)
    _check_decoded(pixels, min_size, path)
    resize_into(pixels[y0 // divisor : -(-y1 // divisor), x0 // divisor : -(-x1 // divisor)], out)


def to_stored_region(region: Region, header: Header) -> Region:
    """Returns the region in the file that has the pixels of a region of the upright image."""
    x0, y0, x1, y1 = region
    is_transposed, flip_vertical, flip_horizontal = EXIF_TRANSFORMS[header.orientation]
    if is_transposed:
        x0, y0, x1, y1 = y0, x0, y1, x1
    height, width = header.stored_size
    if flip_vertical:
        y0, y1 = height - y1, height - y0
    if flip_horizontal:
        x0, x1 = width - x1, width - x0
    return x0, y0, x1, y1


def _apply_orientation(stored_pixels: Pixels, orientation: int) -> Pixels:
    is_transposed, flip_vertical, flip_horizontal = EXIF_TRANSFORMS[orientation]
    pixels: cv2.typing.MatLike = stored_pixels
    if flip_vertical or flip_horizontal:
        pixels = cv2.flip(pixels, -1 if flip_vertical and flip_horizontal else int(flip_horizontal))
    if is_transposed:
        pixels = cv2.transpose(pixels)
    return np.asarray(pixels, np.uint8)


def resize_into(source: Pixels, out: Pixels) -> None:
    """Resizes `source` to fill `out`, both uint8 [h, w, 3]. Bilinear: its 2 × 2 pixels cover the whole source up to a
    reduction by 2. An axis that shrinks by more is halved first, as often as needed, to the mean of pairs. It takes a
    fifth of cv2.INTER_AREA's time and is at most half a level (of 255) further from Pillow's antialiased resize."""
    height, width, _ = out.shape
    while source.shape[0] > 2 * height or source.shape[1] > 2 * width:
        halve_height, halve_width = source.shape[0] > 2 * height, source.shape[1] > 2 * width
        half_size = -(-source.shape[1] // (1 + halve_width)), -(-source.shape[0] // (1 + halve_height))
        source = np.asarray(cv2.resize(source, half_size, interpolation=cv2.INTER_LINEAR), np.uint8)
    resized = cv2.resize(source, (width, height), dst=out, interpolation=cv2.INTER_LINEAR)
    if resized is not out and not np.may_share_memory(resized, out):  # this build of OpenCV has allocated a new array
        np.copyto(out, resized)


def _decode_jpeg_in_place(data: bytes, out: Pixels) -> bool:
    """Decodes a JPEG into `out`, uint8 [h, w, 3] RGB, at the scale that has this size: without memory of its own and
    without a resize. False where that is not possible; `_decode_jpeg` finds the reason."""
    if not out.flags.c_contiguous:
        return False
    try:
        pixels = simplejpeg.decode_jpeg(data, min_height=out.shape[0], min_width=out.shape[1], buffer=out)
    except ValueError:
        return False
    return bool(pixels.shape == out.shape)


def _decode_jpeg(data: bytes, path: Path | str, min_size: tuple[int, int]) -> Pixels:
    """Returns uint8 [h, w, 3] RGB, decoded at the smallest scale that reaches `min_size` (height, width)."""
    try:
        pixels = simplejpeg.decode_jpeg(data, min_height=min_size[0], min_width=min_size[1])
    except ValueError as error:
        if not any(warning in str(error) for warning in HARMLESS_WARNINGS):
            raise decode_error(path, str(error)) from error
        # libjpeg reports its last warning only, so check here whether the file is complete.
        cleaned = _strip_stray_bytes(data)
        if cleaned is None:
            raise decode_error(path, f"the JPEG is truncated: {len(data):,} bytes and no end marker") from error
        try:
            pixels = simplejpeg.decode_jpeg(cleaned, min_height=min_size[0], min_width=min_size[1], strict=False)
        except ValueError as retry_error:
            raise decode_error(path, str(retry_error)) from retry_error
    return np.asarray(pixels, np.uint8)


def _strip_stray_bytes(data: bytes) -> bytes | None:
    """Returns a JPEG without the bytes between its segments and after its end; None where it has no end."""
    segments, offset = [data[:2]], 2
    while 0 <= (offset := data.find(b"\xff", offset)) < len(data) - 1:
        marker = data[offset + 1]
        if marker in (0x00, 0xFF):  # a stray FF or a fill byte
            offset += 1
            continue
        if marker == 0xD9:
            return b"".join([*segments, data[offset : offset + 2]])
        end = offset + 2
        if not (marker == 0x01 or 0xD0 <= marker <= 0xD8):
            end += int.from_bytes(data[offset + 2 : offset + 4], "big")
        if marker == 0xDA:  # coded pixels extend to the next marker
            scan_end = _SCAN_END.search(data, end)
            if scan_end is None:
                return None
            end = scan_end.start()
        segments.append(data[offset:end])
        offset = end
    return None


def _decode_with_pillow(data: bytes, path: Path | str) -> Pixels:
    """Returns uint8 [h, w, 3] RGB, full size, as stored; the first frame or page; the upper 8 of 16 bits; no alpha."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            orientation = image.getexif().get(0x0112, 1)
            image.load()
            pixels = pillow_to_rgb(image)
            # Recent versions of Pillow apply the orientation of TIFFs themselves, and remove the tag.
            if orientation in INVERSE_ORIENTATION and 0x0112 not in image.getexif():
                pixels = _apply_orientation(pixels, INVERSE_ORIENTATION[orientation])
            return pixels
    except _PILLOW_ERRORS as error:
        raise decode_error(path, str(error)) from error


def pillow_to_rgb(image: Image.Image) -> Pixels:
    """Returns uint8 [h, w, 3] RGB; the upper 8 of 16 bits; no alpha."""
    if image.mode.startswith("I;16"):  # `convert` would clip
        return np.repeat((np.asarray(image) >> 8).astype(np.uint8)[..., None], 3, 2)
    return np.asarray(image.convert("RGB"))


def _decode_with_opencv(data: bytes, path: Path | str, image_format: str) -> Pixels:
    """uint8 [h, w, 3] RGB, full size; the upper 8 of 16 bits per channel; gray is repeated, alpha is dropped."""
    if image_format == "png":
        _check_png_complete(data, path)
    try:
        flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
        pixels = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except cv2.error as error:
        raise decode_error(path, str(error).strip()) from error
    if pixels is None:
        cause = f"it is truncated or damaged, or a variety of {image_format} that OpenCV does not support"
        raise decode_error(path, cause)
    return np.asarray(pixels, np.uint8)


def _check_png_complete(data: bytes, path: Path | str) -> None:
    """Checks that the last chunk is there: OpenCV may return half an image of a truncated file. libpng checks CRCs."""
    offset = 8
    while offset + 12 <= len(data):
        length, chunk_type = int.from_bytes(data[offset : offset + 4], "big"), data[offset + 4 : offset + 8]
        offset += 12 + length
        if chunk_type == b"IEND" and offset <= len(data):
            return
    raise decode_error(path, f"the PNG is truncated: {len(data):,} bytes and no end chunk")


def _check_decoded(pixels: Pixels, expected: tuple[int, int], path: Path | str) -> None:
    if pixels.shape[:2] != expected:
        actual = (pixels.shape[0], pixels.shape[1])
        raise decode_error(path, f"its header says {_format_size(expected)} pixels, it has {_format_size(actual)}")


def _format_size(size: tuple[int, int]) -> str:
    return f"{size[1]} × {size[0]}"


class EncodedImage(NamedTuple):
    """An image that is to be decoded, and its geometry."""

    data: bytes
    header: Header
    region: Region
    """Of the upright image."""
    resized_size: tuple[int, int]
    """Height and width that the region fills, at the top left of the model input."""


def is_device_decodable(data: bytes, header: Header) -> bool:
    """Whether the device can decode an image: a baseline JPEG, all components in one scan, followed by an end marker.

    Runs for every image: 20 µs for one of 350 KB. How RGB JPEGs are recognized: libjpeg's jdapimin.c.
    """
    height, width = header.stored_size
    if header.image_format != "jpeg" or header.channels not in (1, 3) or height * width > DEVICE_MAX_PIXELS:
        return False
    offset, frame_offset = 2, -1
    while offset + 4 <= len(data) and data[offset] == 0xFF:
        marker, length = data[offset + 1], data[offset + 2] << 8 | data[offset + 3]
        if marker == 0xC0:
            frame_offset = offset
        elif marker == 0xDA:
            return (
                frame_offset > 0
                and data[offset + 4] == header.channels
                and (header.channels == 1 or _is_ycbcr(data, frame_offset))
                and data.rfind(b"\xff\xd9") >= offset + 2 + length
                and ZERO_RUN not in data[offset:]
            )
        elif not (marker in (0xC4, 0xDB, 0xDD, 0xFE) or 0xE0 <= marker <= 0xEF) or _is_adobe_rgb(data, offset):
            return False
        offset += 2 + length
    return False


def _is_adobe_rgb(data: bytes, offset: int) -> bool:
    return (
        data.startswith(b"\xff\xee", offset)
        and data.startswith(b"Adobe", offset + 4)
        and data[offset + 15 : offset + 16] == b"\0"
    )


def _is_ycbcr(data: bytes, frame_offset: int) -> bool:
    ids, samplings = data[frame_offset + 10 : frame_offset + 19 : 3], data[frame_offset + 11 : frame_offset + 19 : 3]
    return ids != b"RGB" and samplings[0] in CHROMA_SUBSAMPLINGS and samplings[1:] == b"\x11\x11"
