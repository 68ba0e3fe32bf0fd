"""Headers of image files: size, EXIF orientation and format, without decoding.

Markers, chunks and tags are parsed here, in plain Python, because only a part of a remote file is read and EXIF may
come after the pixels; Pillow reads a whole WebP file to open it. It takes 3 to 20 µs. Images that can never be decoded
(12-bit and arithmetic-coded JPEG, floating-point TIFF, more than MAX_PIXELS pixels, AVIF, HEIC, a web page) are
rejected here, by name, before any memory is allocated. Pixels: `decode.py`. Formats: `docs/data.md`.
"""

import contextlib
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

from stoker.data.images import source
from stoker_watch import regular_files
from stoker_watch.errors import DataError, make_error

MAX_PIXELS = 2**29
"""Pixels of the largest image that is read, 23,170 × 23,170. As RGB it takes 1.6 GB per worker while it is decoded. A
header of 60 bytes can claim 2^62. Pillow's own limit is a third of this, OpenCV's twice as much."""
HEAD_BYTES = 1 << 16
"""What `read_header` reads at once; it has the size of nearly every JPEG, even after EXIF with a thumbnail."""
FIRST_READ_BYTES = 1 << 12
"""What is read first of an image in a bucket (a JPEG without EXIF has its size there), then HEAD_BYTES, then all."""
IMAGE_FORMATS = ("jpeg", "png", "webp", "bmp", "tiff", "gif", "pnm", "jpeg 2000")
"""The formats that are read."""
CONVERT_HINT = "convert it to JPEG or PNG and correct its name in the annotations"

ReadAt = Callable[[int, int], bytes]
"""(first byte, count) → those bytes of the file, fewer at its end."""

_SOF_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""JPEG's start-of-frame markers; the three excluded ones are tables (ITU-T T.81, table B.1)."""
_ORIENTATION, _WIDTH, _HEIGHT, _BITS, _SAMPLE_FORMAT, _DNG_VERSION = 0x0112, 0x0100, 0x0101, 0x0102, 0x0153, 0xC612
_FLOAT = 3
"""SampleFormat of floating-point TIFFs."""
_TIFF_INTEGER_CODES = {1: "B", 3: "H", 4: "I", 16: "Q"}
"""TIFF's integer types → format codes of struct (TIFF 6.0, section 2; 16 is BigTIFF's)."""


class Header(NamedTuple):
    """What the header of an image says."""

    size: tuple[int, int]
    """Height and width of the upright image: after applying `orientation`."""
    stored_size: tuple[int, int]
    """Height and width of the pixels in the file."""
    orientation: int
    """EXIF's 1 … 8: how stored pixels become upright. 1: unchanged; 5 … 8 swap height and width."""
    image_format: str
    """One of IMAGE_FORMATS."""
    channels: int = 3
    """Of a JPEG: 1 gray, 3 color, 4 CMYK or YCCK. 3 for other formats, whose decoders convert by themselves."""

    def as_annotated(self, annotated_size: tuple[int, int]) -> "Header":
        """Returns the header of the image as it was annotated: upright, unless `annotated_size` (height, width) is the
        size of the stored pixels and not of the upright ones. (0, 0): the annotations give no size."""
        if self.orientation != 1 and annotated_size == self.stored_size != self.size:
            return self._replace(size=self.stored_size, orientation=1)
        return self

    def is_orientation_ambiguous(self, annotated_size: tuple[int, int]) -> bool:
        """Returns whether the image has an orientation, and the annotated size does not show whether it was applied."""
        return self.orientation != 1 and (0 in annotated_size or self.size == self.stored_size)


def read_header(path: Path) -> Header:
    """Returns the header of an image file or object, of which only the necessary bytes are read. Raises DataError, also
    where it is missing; StorageError where its bucket cannot be read."""
    try:
        if (remote_object := source.find_remote(path)) is not None:
            return _read_remote_header(remote_object, path)
        with os.fdopen(regular_files.open_fd(path, max_bytes=regular_files.MAX_BYTES), "rb") as file:
            fd, total = file.fileno(), os.fstat(file.fileno()).st_size
            head = os.pread(fd, HEAD_BYTES, 0)

            def read(offset: int, count: int) -> bytes:
                return head[offset : offset + count] if offset + count <= len(head) else os.pread(fd, count, offset)

            return _parse_header(head, read, total, path)
    except OSError as error:
        raise make_error(DataError, "unreadable-image-file", source.display_path(path), cause=error.strerror) from error


def _read_remote_header(remote_object: source.RemoteObject, stub: Path) -> Header:
    total = stub.stat().st_size
    if remote_object.store.uri.scheme in ("https", "http"):  # stubs of web servers have no size
        info = remote_object.store.stat(remote_object.key)
        total = 0 if info is None else info.size_bytes
    data = source.read_object(remote_object, 0, min(total, FIRST_READ_BYTES))

    def read(offset: int, count: int) -> bytes:
        nonlocal data
        if (end := min(offset + count, total)) > len(data):
            data = source.read_object(remote_object, 0, min(total, HEAD_BYTES) if end <= HEAD_BYTES else total)
        return data[offset : offset + count]

    return _parse_header(data, read, total, stub)


def parse_header(data: bytes, path: Path | str) -> Header:
    """Returns the header of an encoded image; `path` is for messages. Raises DataError with the path."""
    return _parse_header(data, lambda offset, count: data[offset : offset + count], len(data), path)


def parse_header_within(read: ReadAt, start: int, length: int, path: Path | str) -> Header:
    """Returns the header of an encoded image that is `length` bytes from `start` of a larger file, of which only the
    necessary bytes are read. `path` is for messages. Raises DataError."""

    def read_image(offset: int, count: int) -> bytes:
        return read(start + offset, max(0, min(count, length - offset)))

    return _parse_header(read_image(0, min(length, FIRST_READ_BYTES)), read_image, length, path)


def decode_error(path: Path | str, cause: str, fix: str | None = None) -> DataError:
    """Returns the error for an image that cannot be decoded."""
    fix = fix or "copy or download the file again, or remove it from the annotations"
    return make_error(DataError, "undecodable-image", source.display_path(path), cause=cause, fix=fix)


def _parse_header(head: bytes, read: ReadAt, total: int, path: Path | str) -> Header:
    """head: the first bytes; read: any of the `total` bytes of the file."""
    if total == 0:
        raise make_error(DataError, "empty-image-file", source.display_path(path))
    image_format, channels = "jpeg", 3
    try:
        if head.startswith(b"\xff\xd8\xff"):
            try:
                height, width, orientation, channels = _parse_jpeg(head, path)
            except IndexError:
                height, width, orientation, channels = _parse_jpeg_reading_more(head, read, total, path)
        else:
            image_format, parse = _detect_format(head[:32], read, path)
            height, width, orientation = parse(read, path)
    except (struct.error, IndexError, OverflowError) as error:  # a read beyond the end returned fewer bytes
        raise decode_error(path, f"it is truncated or damaged: {total:,} bytes end within its header") from error
    if height <= 0 or width <= 0:
        raise decode_error(path, f"its header says {width} × {height} pixels")
    if height * width > MAX_PIXELS:
        shown = source.display_path(path)
        raise make_error(DataError, "too-large-image", shown, width=width, height=height, limit=MAX_PIXELS)
    if not 1 <= orientation <= 8:  # 0 and others are undefined; every viewer ignores them
        orientation = 1
    size = (width, height) if orientation >= 5 else (height, width)
    return Header(size, (height, width), orientation, image_format, channels)


def _parse_jpeg_reading_more(head: bytes, read: ReadAt, total: int, path: Path | str) -> tuple[int, int, int, int]:
    """Calls `_parse_jpeg` where the first bytes do not suffice: HEAD_BYTES mostly do, else the whole file."""
    if len(head) < HEAD_BYTES < total:
        with contextlib.suppress(IndexError):
            return _parse_jpeg(read(0, HEAD_BYTES), path)
    return _parse_jpeg(read(0, total), path)


def _detect_format(
    first_bytes: bytes, read: ReadAt, path: Path | str
) -> tuple[str, Callable[[ReadAt, Path | str], tuple[int, int, int]]]:
    """Returns the format, by content whatever the file's name, and the parser of its header."""
    for image_format, (signature, parse) in _PARSERS.items():
        if re.match(signature, first_bytes, re.DOTALL):
            return image_format, parse
    head = read(0, 512).lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    starts = ((signature, start) for signature in _OTHER_CONTENT for start in (first_bytes, head))
    found = next(
        (_OTHER_CONTENT[signature] for signature, start in starts if re.match(signature, start, re.DOTALL)), ""
    )
    if not found:
        start = first_bytes[:8].hex(" ")
        raise decode_error(path, f"it is not an image, or damaged at its start: it begins with the bytes {start}")
    if found in ("a web page", "text"):
        fix = "download the image itself: its URL returned a page, often an error or a log-in"
        raise decode_error(path, f"it is {found}, not an image", fix)
    supported = f"an unsupported format (supported: {', '.join(IMAGE_FORMATS)})"
    raise decode_error(path, f"it is {found}, {supported}", CONVERT_HINT)


_OTHER_CONTENT = {
    rb"....ftypavi[fs]": "AVIF", rb"....ftyp(hei[cxms]|hevc|mif1|msf1)": "HEIC", rb"....ftyp": "a video",
    rb"\xff\x0a|\0\0\0\x0cJXL ": "JPEG XL", rb"8BPS": "a Photoshop file", rb"%PDF": "PDF",
    rb"\x76\x2f\x31\x01": "OpenEXR", rb"\0\0\x01\0": "an icon", rb"FUJIFILMCCD-RAW": "a camera raw file",
    rb"PK\x03\x04": "a ZIP archive", rb"\x1f\x8b": "a gzip archive",
    rb"version https://git-lfs": "a pointer of Git LFS (`git lfs pull` gets the file)",
    rb"<svg|<\?xml.*<svg": "SVG", rb"<!doctype html|<html|<head|<body": "a web page", rb"[<{]": "text",
}  # fmt: skip
"""How a file begins that has none of the IMAGE_FORMATS (texts: in lower case, without spaces), and what it is."""


def _parse_jpeg(data: bytes, path: Path | str) -> tuple[int, int, int, int]:
    """Returns (height, width, orientation, channels), from the segments before the first scan. Plain indexing for
    speed, as it runs for every image that is loaded. Raises IndexError where data ends."""
    offset, orientation, frame_offset = 2, 1, -1
    while True:
        marker = data[offset + 1]
        if data[offset] != 0xFF:  # stray bytes, which every decoder skips
            offset = data.find(b"\xff", offset)
            if offset < 0:
                raise IndexError("no marker up to the end")
        elif marker < 0xC0 or 0xD0 <= marker <= 0xD8 or marker == 0xFF:
            offset += 1 if marker in (0x00, 0xFF) else 2  # a stray FF or a fill byte; markers without content
        elif marker in (0xDA, 0xD9):
            break
        else:
            if marker in _SOF_MARKERS and frame_offset < 0:
                frame_offset = offset
            elif marker == 0xE1 and orientation == 1 and data.startswith(b"Exif\0\0", offset + 4):
                exif_start = offset + 10
                orientation = _read_exif_orientation(lambda pos, count: data[pos : pos + count], exif_start)
            offset += 2 + (data[offset + 2] << 8 | data[offset + 3])
    if frame_offset < 0:
        raise decode_error(path, "the JPEG has no frame header: it is damaged")
    height = data[frame_offset + 5] << 8 | data[frame_offset + 6]
    if data[frame_offset + 1] not in (0xC0, 0xC1, 0xC2) or data[frame_offset + 4] != 8 or height == 0:
        _raise_unsupported_jpeg(data[frame_offset + 1], data[frame_offset + 4], path)
    return height, data[frame_offset + 7] << 8 | data[frame_offset + 8], orientation, data[frame_offset + 9]


def _raise_unsupported_jpeg(marker: int, precision: int, path: Path | str) -> NoReturn:
    fix = f"{CONVERT_HINT}, e.g. `magick in.jpg out.png`"
    if marker not in (0xC0, 0xC1, 0xC2):
        coding = {0xC3: "lossless", 0xC9: "arithmetic-coded", 0xCA: "arithmetic-coded"}.get(marker, "hierarchical")
        raise decode_error(path, f"it is a {coding} JPEG, which browsers do not show either", fix)
    if precision != 8:
        raise decode_error(path, f"it is a JPEG with {precision} bits per channel; only 8 are supported", fix)
    raise decode_error(path, "the JPEG gives its height only after its pixels (DNL marker)", fix)


def _parse_png(read: ReadAt, path: Path | str) -> tuple[int, int, int]:
    if read(12, 4) != b"IHDR":
        raise decode_error(path, "the PNG has no header chunk: it is damaged")
    width, height = struct.unpack(">II5x", read(16, 13))  # the whole chunk, so that a truncated one raises
    offset, orientation = 8, 1
    while True:  # to the end: EXIF may come after the pixels
        head = read(offset, 8)
        if not head[4:].isalpha() or head[4:] == b"IEND":  # the end, or damage that decoding detects
            return height, width, orientation
        if head[4:] == b"eXIf":
            return height, width, _read_exif_orientation(read, offset + 8)
        offset += 12 + int.from_bytes(head[:4], "big")


def _parse_webp(read: ReadAt, path: Path | str) -> tuple[int, int, int]:
    chunk_type = read(12, 4)
    if chunk_type == b"VP8 ":
        width, height = struct.unpack("<HH", read(26, 4))
        return height & 0x3FFF, width & 0x3FFF, 1
    if chunk_type == b"VP8L":
        (bits,) = struct.unpack("<I", read(21, 4))
        return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1, 1
    if chunk_type != b"VP8X":
        raise decode_error(path, "the WebP has no image chunk: it is damaged")
    flags, *size_bytes = struct.unpack("<B3x6B", read(20, 10))
    width, height = (1 + size_bytes[n] + (size_bytes[n + 1] << 8) + (size_bytes[n + 2] << 16) for n in (0, 3))
    offset = 30
    while flags & 0x08:  # it has EXIF, usually as the last chunk
        head = read(offset, 8)
        length = int.from_bytes(head[4:], "little")
        if head[:4] == b"EXIF":
            prefix_bytes = 6 if read(offset + 8, 6) == b"Exif\0\0" else 0
            return height, width, _read_exif_orientation(read, offset + 8 + prefix_bytes)
        if not head[:4].strip().isalnum():  # the end, or damage that decoding detects
            break
        offset += 8 + length + length % 2
    return height, width, 1


def _parse_bmp(read: ReadAt, _: Path | str) -> tuple[int, int, int]:
    (header_bytes,) = struct.unpack("<I", read(14, 4))
    if header_bytes == 12:  # OS/2's
        width, height = struct.unpack("<HH", read(18, 4))
    else:
        width, height = struct.unpack("<ii", read(18, 8))
    return abs(height), width, 1  # a negative height: rows from the top


def _parse_gif(read: ReadAt, _: Path | str) -> tuple[int, int, int]:
    width, height = struct.unpack("<HH", read(6, 4))
    return height, width, 1


def _parse_pnm(read: ReadAt, path: Path | str) -> tuple[int, int, int]:
    words: list[bytes] = []
    for line in read(2, 1024).split(b"\n"):
        words += line.partition(b"#")[0].split()
        if len(words) >= 2:
            break
    if len(words) < 2 or not all(word.isdigit() and len(word) < 10 for word in words[:2]):
        raise decode_error(path, "the size in its header is not a number: it is damaged")
    return int(words[1]), int(words[0]), 1


def _parse_jpeg_2000(read: ReadAt, path: Path | str) -> tuple[int, int, int]:
    offset = read(0, 1 << 12).find(b"\xff\x4f\xff\x51")  # the codestream; the boxes before it are small
    if offset < 0:
        raise decode_error(path, "the JPEG 2000 file has no codestream: it is damaged")
    right, bottom, left, top = struct.unpack(">IIII", read(offset + 8, 16))
    return bottom - top, right - left, 1


def _parse_tiff(read: ReadAt, path: Path | str) -> tuple[int, int, int]:
    tags = _read_tiff_tags(read, {_WIDTH, _HEIGHT, _BITS, _ORIENTATION, _SAMPLE_FORMAT, _DNG_VERSION})
    if _DNG_VERSION in tags or read(8, 2) == b"CR":
        raise decode_error(path, "it is a camera raw file, an unsupported format", CONVERT_HINT)
    if tags.get(_SAMPLE_FORMAT) == _FLOAT:
        raise decode_error(path, "its pixels are floating-point numbers, whose range is unknown", CONVERT_HINT)
    if tags.get(_BITS, 1) not in (1, 2, 4, 8, 16):
        raise decode_error(
            path, f"its pixels have {tags[_BITS]} bits per channel, whose range is unknown", CONVERT_HINT
        )
    if _WIDTH not in tags or _HEIGHT not in tags:
        raise decode_error(path, "the TIFF has no size: it is truncated or damaged")
    return tags[_HEIGHT], tags[_WIDTH], tags.get(_ORIENTATION, 1)


_PARSERS: dict[str, tuple[bytes, Callable[[ReadAt, Path | str], tuple[int, int, int]]]] = {
    "png": (rb"\x89PNG\r\n\x1a\n", _parse_png),
    "webp": (rb"RIFF....WEBP", _parse_webp),
    "bmp": (rb"BM", _parse_bmp),
    "tiff": (rb"II[*+]\0|MM\0[*+]", _parse_tiff),
    "gif": (rb"GIF8[79]a", _parse_gif),
    "pnm": (rb"P[1-6]\s", _parse_pnm),
    "jpeg 2000": (rb"\0\0\0\x0cjP  \r\n\x87\n|\xff\x4f\xff\x51", _parse_jpeg_2000),
}
"""Format → how its files begin, and the parser of their headers. JPEGs have `_parse_jpeg`."""


def _read_exif_orientation(read: ReadAt, start: int) -> int:
    """The orientation in EXIF, which is a TIFF without pixels; 1 where it is missing or damaged, as in viewers."""
    try:
        return _read_tiff_tags(lambda offset, count: read(start + offset, count), {_ORIENTATION}).get(_ORIENTATION, 1)
    except (struct.error, IndexError):
        return 1


def _read_tiff_tags(read: ReadAt, tag_ids: set[int]) -> dict[int, int]:
    """Returns first values of integer tags, from a TIFF's first directory (that of the first page)."""
    head = read(0, 16)
    byte_order = "<" if head[:2] == b"II" else ">"
    is_big_tiff = head[2 if byte_order == "<" else 3] == 43
    count_type, entry_bytes, value_bytes = ("Q", 20, 8) if is_big_tiff else ("H", 12, 4)
    (offset,) = struct.unpack_from(byte_order + ("Q" if is_big_tiff else "I"), head, 8 if is_big_tiff else 4)
    (count,) = struct.unpack(byte_order + count_type, read(offset, struct.calcsize(count_type)))
    offset += struct.calcsize(count_type)
    count = min(count, 4096)  # limits a damaged count; real ones are below a hundred
    table = read(offset, count * entry_bytes)
    tag_values: dict[int, int] = {}
    for n in range(0, len(table) - entry_bytes + 1, entry_bytes):
        tag, value_type = struct.unpack_from(byte_order + "HH", table, n)
        if tag not in tag_ids or value_type not in _TIFF_INTEGER_CODES:
            continue
        (num_values,) = struct.unpack_from(byte_order + ("Q" if is_big_tiff else "I"), table, n + 4)
        value_offset = n + entry_bytes - value_bytes
        code = byte_order + _TIFF_INTEGER_CODES[value_type]
        if num_values * struct.calcsize(code) <= value_bytes:
            (tag_values[tag],) = struct.unpack_from(code, table, value_offset)
        else:  # the entry has the offset of its values
            (data_offset,) = struct.unpack_from(byte_order + ("Q" if is_big_tiff else "I"), table, value_offset)
            (tag_values[tag],) = struct.unpack(code, read(data_offset, struct.calcsize(code)))
    return tag_values
