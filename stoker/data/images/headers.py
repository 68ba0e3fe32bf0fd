"""What a picture's first bytes say: its size, how it is turned (EXIF), its format. Nothing is decoded.

The walk over a format's markers, chunks or tags is done here, in plain Python: 3 µs for a JPEG, and right for the parts
that matter (EXIF behind the pixels, a TIFF whose tags stand last, a file of which only a part has been read). What can
never be decoded (12-bit and arithmetic-coded JPEG, floating-point TIFF, more pixels than MOST_PIXELS, AVIF, HEIC, a web
page) is refused here, by name, before any memory is taken for it. Pixels: `decode.py`. What is supported, and how
pictures are turned: `docs/pictures.md`.
"""

import contextlib
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

from stoker.data.images import source
from stoker.errors import DataError

MOST_PIXELS = 2**29
"""Pixels of the largest picture that is read, 23,170 × 23,170: as RGB it takes 1.6 GB while it is decoded, on each
thread. A header of 60 bytes can promise 2^62. Pillow's own limit is a third of this, OpenCV's twice as much."""
HEAD_BYTES = 1 << 16
"""What `read_header` reads at once; nearly every JPEG tells its size in there, also behind EXIF with a thumbnail."""
KINDS = ("jpeg", "png", "webp", "bmp", "tiff", "gif", "pnm", "jpeg 2000")
"""The formats that are read."""
CONVERT = "convert it to JPEG or PNG and correct its name in the annotations"

Read = Callable[[int, int], bytes]
"""(first byte, count) → those bytes of the file, fewer at its end."""

_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""JPEG's start-of-frame markers; the other three are tables (ITU-T T.81, table B.1)."""
_ORIENTATION, _WIDTH, _HEIGHT, _BITS, _SAMPLE_FORMAT, _DNG_VERSION = 0x0112, 0x0100, 0x0101, 0x0102, 0x0153, 0xC612
_FLOAT = 3
"""SampleFormat of floating-point TIFFs."""
_INTEGERS = {1: "B", 3: "H", 4: "I", 16: "Q"}
"""TIFF's types of whole numbers → struct's (TIFF 6.0, section 2; 16 is BigTIFF's)."""
_TYPE_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}


class Header(NamedTuple):
    """What a picture is, in its own words."""

    size: tuple[int, int]
    """Height and width of the picture as it is shown: turned as `orientation` says."""
    stored: tuple[int, int]
    """Height and width of the pixels in the file."""
    orientation: int
    """EXIF's 1 … 8: how the stored pixels are turned to be shown. 1: not at all; 5 … 8 swap height and width."""
    kind: str
    """One of KINDS."""
    channels: int = 3
    """Of a JPEG: 1 grey, 3 colour, 4 CMYK or YCCK. The other formats' decoders find out themselves: 3."""

    def shown_for(self, said: tuple[int, int]) -> "Header":
        """The header of the picture as boxes were drawn on it, where the annotations say its height and width.

        That is upright, unless `said` is the size of the stored pixels and not of the upright ones. (0, 0): unsaid.
        """
        if self.orientation != 1 and said == self.stored != self.size:
            return self._replace(size=self.stored, orientation=1)
        return self

    def ambiguous(self, said: tuple[int, int]) -> bool:
        """Whether the picture is to be turned or mirrored, but its annotations' size does not tell if that was done."""
        return self.orientation != 1 and (0 in said or self.size == self.stored)


def read_header(path: Path) -> Header:
    """The header of a picture file or object, of which only what is needed is read. Raises DataError, also where it is
    absent; StorageError where its bucket cannot be read."""
    try:
        if (found := source.remote(path)) is not None:
            pieces = source.Pieces(found, path)
            return _parse(pieces.head, pieces.read, pieces.total, path)
        with path.open("rb", buffering=0) as file:
            number, total = file.fileno(), os.fstat(file.fileno()).st_size
            head = os.pread(number, HEAD_BYTES, 0)

            def read(at: int, count: int) -> bytes:
                return head[at : at + count] if at + count <= len(head) else os.pread(number, count, at)

            return _parse(head, read, total, path)
    except OSError as error:
        fix = "check its name, its permissions and that its disk is there"
        raise DataError(
            "The picture cannot be read.", place=source.shown(path), cause=error.strerror, fix=fix
        ) from error


def header_of(data: bytes, path: Path) -> Header:
    """The header of an encoded picture; `path` is for messages. Raises DataError, naming it."""
    return _parse(data, lambda at, count: data[at : at + count], len(data), path)


def unusable(path: Path, cause: str, fix: str | None = None) -> DataError:
    """The error for a picture that cannot be decoded."""
    usual = "copy or download the file again, or remove it from the annotations"
    return DataError("The picture cannot be decoded.", place=source.shown(path), cause=cause, fix=fix or usual)


def _parse(head: bytes, read: Read, total: int, path: Path) -> Header:
    """head: the first bytes, what is at hand of them; read: any of the `total` bytes of the file."""
    if total == 0:
        raise DataError(
            "The picture file is empty.", place=source.shown(path), cause="it has 0 bytes", fix="copy it again"
        )
    kind, channels = "jpeg", 3
    try:
        if head.startswith(b"\xff\xd8\xff"):
            try:
                height, width, orientation, channels = _jpeg(head, path)
            except IndexError:
                if len(head) == total:
                    raise
                height, width, orientation, channels = _jpeg_beyond(head, read, total, path)
        else:
            kind, parse = _kind_of(head[:32], read, path)
            height, width, orientation = parse(read, path)
    except (struct.error, IndexError) as error:  # a read beyond the end came back short
        raise unusable(path, f"it is truncated or damaged: {total:,} bytes end within its header") from error
    if height <= 0 or width <= 0:
        raise unusable(path, f"its header says {width} × {height} pixels")
    if height * width > MOST_PIXELS:
        raise DataError(
            "The picture is too large.",
            place=source.shown(path),
            cause=f"its header says {width:,} × {height:,} pixels; at most {MOST_PIXELS:,} in all are decoded",
            fix="cut it into tiles or make it smaller; if it is not that large, its header is damaged: copy it again",
        )
    if not 1 <= orientation <= 8:  # 0 and others are not defined; every viewer ignores them
        orientation = 1
    size = (width, height) if orientation >= 5 else (height, width)
    return Header(size, (height, width), orientation, kind, channels)


def _jpeg_beyond(head: bytes, read: Read, total: int, path: Path) -> tuple[int, int, int, int]:
    """What `_jpeg` finds behind the bytes at hand: mostly within HEAD_BYTES, else in the whole file."""
    if len(head) < HEAD_BYTES < total:
        with contextlib.suppress(IndexError):
            return _jpeg(read(0, HEAD_BYTES), path)
    return _jpeg(read(0, total), path)


def _kind_of(begin: bytes, read: Read, path: Path) -> tuple[str, Callable[[Read, Path], tuple[int, int, int]]]:
    """The format, by content, and what reads its header; whatever the file's name says."""
    if begin.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png", _png
    if begin.startswith(b"RIFF") and begin[8:12] == b"WEBP":
        return "webp", _webp
    if begin.startswith(b"BM"):
        return "bmp", _bmp
    if begin[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        return "tiff", _tiff
    if begin.startswith((b"GIF87a", b"GIF89a")):
        return "gif", _gif
    if begin[:1] == b"P" and begin[1:2] in b"123456" and begin[2:3].isspace():
        return "pnm", _pnm
    if begin.startswith((b"\0\0\0\x0cjP  \r\n\x87\n", b"\xff\x4f\xff\x51")):
        return "jpeg 2000", _jpeg_2000
    name = _other_kind(begin, read)
    if name is None:
        start = begin[:8].hex(" ")
        raise unusable(path, f"it is no picture, or damaged at its start: it begins with the bytes {start}")
    if name in ("a web page", "text"):
        fix = "download the picture itself: the address it came from gave a page, often an error or a log-in"
        raise unusable(path, f"it is {name}, not a picture", fix)
    raise unusable(path, f"it is {name}, a format that is not read ({', '.join(KINDS)} are)", CONVERT)


def _other_kind(begin: bytes, read: Read) -> str | None:
    """What a file that is none of KINDS seems to be; None where its bytes are unknown."""
    if begin[4:8] == b"ftyp":
        brand = begin[8:12]
        if brand in (b"avif", b"avis"):
            return "AVIF"
        return "HEIC" if brand in (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1") else "a video"
    known = {
        b"\xff\x0a": "JPEG XL", b"\0\0\0\x0cJXL ": "JPEG XL", b"8BPS": "a Photoshop file", b"%PDF": "PDF",
        b"\x76\x2f\x31\x01": "OpenEXR", b"\0\0\x01\0": "an icon", b"FUJIFILMCCD-RAW": "a camera's raw file",
        b"PK\x03\x04": "a ZIP archive", b"\x1f\x8b": "a gzip archive",
        b"version https://git-lfs": "a pointer of Git LFS (`git lfs pull` gets the file)",
    }  # fmt: skip
    for start, name in known.items():
        if begin.startswith(start):
            return name
    head = read(0, 512).lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if head.startswith(b"<svg") or (head.startswith(b"<?xml") and b"<svg" in head):
        return "SVG"
    if head.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return "a web page"
    return "text" if head.startswith((b"<", b"{")) else None


def _jpeg(data: bytes, path: Path) -> tuple[int, int, int, int]:
    """(height, width, orientation, channels), from the segments before the first scan. Skips bytes between segments.

    Plain indexing, one segment a round: this runs for every picture that is loaded. Raises IndexError at the end.
    """
    at, orientation, frame = 2, 1, -1
    while True:
        marker = data[at + 1]
        if data[at] != 0xFF:  # stray bytes, which every decoder skips
            at = data.find(b"\xff", at)
            if at < 0:
                raise IndexError("no marker up to the end")
        elif marker < 0xC0 or 0xD0 <= marker <= 0xD8 or marker == 0xFF:
            at += 1 if marker in (0x00, 0xFF) else 2  # a stray FF, or one that fills; markers without content
        elif marker in (0xDA, 0xD9):
            break
        else:
            if marker in _FRAMES and frame < 0:
                frame = at
            elif marker == 0xE1 and orientation == 1 and data.startswith(b"Exif\0\0", at + 4):
                start = at + 10
                orientation = _exif(lambda where, count: data[where : where + count], start)
            at += 2 + (data[at + 2] << 8 | data[at + 3])
    if frame < 0:
        raise unusable(path, "the JPEG has no frame header: it is damaged")
    height = data[frame + 5] << 8 | data[frame + 6]
    if data[frame + 1] not in (0xC0, 0xC1, 0xC2) or data[frame + 4] != 8 or height == 0:
        _refuse_frame(data[frame + 1], data[frame + 4], path)
    return height, data[frame + 7] << 8 | data[frame + 8], orientation, data[frame + 9]


def _refuse_frame(marker: int, precision: int, path: Path) -> NoReturn:
    fix = f"{CONVERT}, e.g. `magick in.jpg out.png`"
    if marker not in (0xC0, 0xC1, 0xC2):
        coding = {0xC3: "lossless", 0xC9: "arithmetic-coded", 0xCA: "arithmetic-coded"}.get(marker, "hierarchical")
        raise unusable(path, f"it is a {coding} JPEG, a kind that browsers do not show either", fix)
    if precision != 8:
        raise unusable(path, f"it is a JPEG with {precision} bits a channel; 8 are read", fix)
    raise unusable(path, "the JPEG tells its height only after its pixels (DNL marker)", fix)


def _png(read: Read, path: Path) -> tuple[int, int, int]:
    if read(12, 4) != b"IHDR":
        raise unusable(path, "the PNG has no header chunk: it is damaged")
    width, height = struct.unpack(">II5x", read(16, 13))  # the whole of the chunk: what reads on relies on it
    at, orientation = 8, 1
    while True:  # to the end: EXIF may stand behind the pixels
        head = read(at, 8)
        if not head[4:].isalpha() or head[4:] == b"IEND":  # the end, or damage: decoding tells
            return height, width, orientation
        if head[4:] == b"eXIf":
            return height, width, _exif(read, at + 8)
        at += 12 + int.from_bytes(head[:4], "big")


def _webp(read: Read, path: Path) -> tuple[int, int, int]:
    first = read(12, 4)
    if first == b"VP8 ":
        width, height = struct.unpack("<HH", read(26, 4))
        return height & 0x3FFF, width & 0x3FFF, 1
    if first == b"VP8L":
        (bits,) = struct.unpack("<I", read(21, 4))
        return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1, 1
    if first != b"VP8X":
        raise unusable(path, "the WebP has no picture chunk: it is damaged")
    flags, *sides = struct.unpack("<B3x6B", read(20, 10))
    width, height = (1 + sides[n] + (sides[n + 1] << 8) + (sides[n + 2] << 16) for n in (0, 3))
    at = 30
    while flags & 0x08:  # it has EXIF, usually as its last chunk
        head = read(at, 8)
        length = int.from_bytes(head[4:], "little")
        if head[:4] == b"EXIF":
            return height, width, _exif(read, at + 8 + (6 if read(at + 8, 6) == b"Exif\0\0" else 0))
        if not head[:4].strip().isalnum():  # the end, or damage: decoding tells
            break
        at += 8 + length + length % 2
    return height, width, 1


def _bmp(read: Read, _: Path) -> tuple[int, int, int]:
    (header_bytes,) = struct.unpack("<I", read(14, 4))
    if header_bytes == 12:  # OS/2's
        width, height = struct.unpack("<HH", read(18, 4))
    else:
        width, height = struct.unpack("<ii", read(18, 8))
    return abs(height), width, 1  # a negative height: rows from the top


def _gif(read: Read, _: Path) -> tuple[int, int, int]:
    width, height = struct.unpack("<HH", read(6, 4))
    return height, width, 1


def _pnm(read: Read, path: Path) -> tuple[int, int, int]:
    words: list[bytes] = []
    for line in read(2, 1024).split(b"\n"):
        words += line.partition(b"#")[0].split()
        if len(words) >= 2:
            break
    if len(words) < 2 or not all(word.isdigit() and len(word) < 10 for word in words[:2]):
        raise unusable(path, "the size in its header is no number: it is damaged")
    return int(words[1]), int(words[0]), 1


def _jpeg_2000(read: Read, path: Path) -> tuple[int, int, int]:
    at = read(0, 1 << 12).find(b"\xff\x4f\xff\x51")  # the codestream; the boxes before it are small
    if at < 0:
        raise unusable(path, "the JPEG 2000 file has no codestream: it is damaged")
    right, bottom, left, top = struct.unpack(">IIII", read(at + 8, 16))
    return bottom - top, right - left, 1


def _tiff(read: Read, path: Path) -> tuple[int, int, int]:
    tags = _tags(read, {_WIDTH, _HEIGHT, _BITS, _ORIENTATION, _SAMPLE_FORMAT, _DNG_VERSION})
    if _DNG_VERSION in tags or read(8, 2) == b"CR":
        raise unusable(path, "it is a camera's raw file, a format that is not read", CONVERT)
    if tags.get(_SAMPLE_FORMAT) == _FLOAT:
        raise unusable(path, "its pixels are floating-point numbers, which have no agreed range", CONVERT)
    if tags.get(_BITS, 1) not in (1, 2, 4, 8, 16):
        raise unusable(path, f"its pixels have {tags[_BITS]} bits a channel, which have no agreed range", CONVERT)
    if _WIDTH not in tags or _HEIGHT not in tags:
        raise unusable(path, "the TIFF does not say its size: it is truncated or damaged")
    return tags[_HEIGHT], tags[_WIDTH], tags.get(_ORIENTATION, 1)


def _exif(read: Read, start: int) -> int:
    """The orientation in EXIF, which is a TIFF without pixels; 1 where it says none or is damaged, as viewers do."""
    try:
        return _tags(lambda at, count: read(start + at, count), {_ORIENTATION}).get(_ORIENTATION, 1)
    except (struct.error, IndexError):
        return 1


def _tags(read: Read, wanted: set[int]) -> dict[int, int]:
    """First values of the wanted tags that are whole numbers, from a TIFF's first directory (the first page's)."""
    begin = read(0, 16)
    order = "<" if begin[:2] == b"II" else ">"
    big = begin[2 if order == "<" else 3] == 43
    count_type, entry_bytes, value_bytes = ("Q", 20, 8) if big else ("H", 12, 4)
    (at,) = struct.unpack_from(order + ("Q" if big else "I"), begin, 8 if big else 4)
    (count,) = struct.unpack(order + count_type, read(at, struct.calcsize(count_type)))
    at += struct.calcsize(count_type)
    count = min(count, 4096)  # a damaged count; real ones are below a hundred
    table = read(at, count * entry_bytes)
    found: dict[int, int] = {}
    for n in range(0, len(table) - entry_bytes + 1, entry_bytes):
        tag, kind = struct.unpack_from(order + "HH", table, n)
        if tag not in wanted or kind not in _INTEGERS:
            continue
        (values,) = struct.unpack_from(order + ("Q" if big else "I"), table, n + 4)
        where = n + entry_bytes - value_bytes
        if values * _TYPE_BYTES[kind] <= value_bytes:
            (found[tag],) = struct.unpack_from(order + _INTEGERS[kind], table, where)
        else:  # the values stand elsewhere
            (place,) = struct.unpack_from(order + ("Q" if big else "I"), table, where)
            (found[tag],) = struct.unpack(order + _INTEGERS[kind], read(place, _TYPE_BYTES[kind]))
    return found
