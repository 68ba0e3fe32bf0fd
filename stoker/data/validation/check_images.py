"""What is wrong with, or odd about, the pictures of an index: every file is read and decoded, in threads.

A picture that fails here is one that the loader would put into quarantine: the file is decoded by the same code, and
its size compared with its annotations in the same way. JPEGs are decoded at an eighth of their size, for which libjpeg
reads every coded byte all the same. Not here: annotations (`clean.py`, `formats/`), the report (`check.py`).
"""

import errno
import io
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from stoker.data.images.decode import decode_into
from stoker.data.images.headers import Header, header_of
from stoker.data.index import Index
from stoker.data.validation.problems import Problems
from stoker.errors import DataError

CHUNK = 16
"""Pictures that a thread takes at once."""
SHRINK = {"jpeg": 8}
"""How much smaller a picture is decoded; the others, which are decoded whole, at half, where resizing is cheapest."""
ENDINGS = {
    "jpeg": (".jpg", ".jpeg", ".jpe", ".jfif"), "png": (".png",), "webp": (".webp",), "bmp": (".bmp", ".dib"),
    "tiff": (".tif", ".tiff"), "gif": (".gif",), "pnm": (".pnm", ".ppm", ".pgm", ".pbm"),
    "jpeg 2000": (".jp2", ".j2k", ".jpx"),
}  # fmt: skip
KNOWN_ENDINGS = frozenset(ending for endings in ENDINGS.values() for ending in endings)
BEGINNINGS = (b"\xff\xd8", b"\x89P", b"BM", b"GIF", b"RIFF", b"II", b"MM")
"""Of files that were pictures once, where the rest of their header cannot be read."""
GREY, TRANSPARENT = ("1", "L", "LA", "La", "I"), ("LA", "La", "PA", "RGBA", "RGBa")
"""Pillow's names of channels."""
SAID = {"The picture file is empty.": "empty-picture", "The picture is too large.": "too-large-picture"}
"""What `headers.py` says → the kind; `tests/data/test_hostile.py` holds the two together."""

Progress = Callable[[int, int], None]
"""(done, of how many)."""


class _Seen(NamedTuple):
    row: int
    found: list[tuple[str, str]]
    """(kind, what is there)."""
    usable: bool
    digest: bytes
    """Of the file's bytes; empty where it could not be read."""


def check_pictures(index: Index, problems: Problems, *, threads: int, progress: Progress) -> NDArray[np.bool_]:
    """Looks at all pictures, and adds what is found to `problems`. Returns bool [R]: which can be used."""
    usable = np.zeros(len(index), np.bool_)
    rows_of: dict[bytes, list[int]] = {}
    chunks = [range(start, min(start + CHUNK, len(index))) for start in range(0, len(index), CHUNK)]
    scratch = threading.local()
    with ThreadPoolExecutor(threads) as pool:
        done = 0
        # `map` gives the results in order, so that reports do not depend on threads; it cancels the rest on an error
        for seen_chunk in pool.map(lambda rows: [_look_at(index, row, scratch) for row in rows], chunks):
            for seen in seen_chunk:
                usable[seen.row] = seen.usable
                for kind, text in seen.found:
                    problems.add(kind, f"{_name(index, seen.row)}: {text}" if text else _name(index, seen.row))
                if seen.digest:
                    rows_of.setdefault(seen.digest, []).append(seen.row)
            done += len(seen_chunk)
            progress(done, len(index))
    _report_copies(index, rows_of, problems)
    return usable


def _look_at(index: Index, row: int, scratch: threading.local) -> _Seen:
    path = index.path(row)
    said = (int(index.size[row, 0]), int(index.size[row, 1]))
    data, digest = b"", b""
    found: list[tuple[str, str]] = []
    try:
        data = index.read(row)
        digest = blake2b(data, digest_size=16).digest() if data else b""
        stored = header_of(data, path)
        header = stored.shown_for(said)
        found += _oddities(data, stored, said, path)
        if 0 not in said and header.size != said:
            text = f"{said[1]} × {said[0]} in the annotations, {header.size[1]} × {header.size[0]} in the file"
            found.append(("size-disagrees", text))
            return _Seen(row, found, False, digest)
        _decode(data, header, path, scratch)
    except DataError as error:
        found.append((_kind_of(error, data), error.cause or ""))
        return _Seen(row, found, False, digest)
    except OSError as error:
        kind = "missing-picture" if error.errno in (errno.ENOENT, errno.ENOTDIR) else "unreadable-picture"
        found.append((kind, "" if kind == "missing-picture" else error.strerror or str(error)))
        return _Seen(row, found, False, digest)
    return _Seen(row, found, True, digest)


def _kind_of(error: DataError, data: bytes) -> str:
    if error.what in SAID:
        return SAID[error.what]
    return "damaged-picture" if data.startswith(BEGINNINGS) else "not-a-picture"


def _decode(data: bytes, header: Header, path: Path, scratch: threading.local) -> None:
    """Decodes all of a picture, and throws it away."""
    height, width = header.size
    shrink = SHRINK.get(header.kind, 2)
    shape = max(1, height // shrink), max(1, width // shrink), 3
    size = shape[0] * shape[1] * 3
    memory: NDArray[np.uint8] | None = getattr(scratch, "memory", None)
    if memory is None or memory.size < size:
        memory = scratch.memory = np.empty(size, np.uint8)
    decode_into(data, path, region=(0, 0, width, height), out=memory[:size].reshape(shape), header=header)


def _oddities(data: bytes, header: Header, said: tuple[int, int], path: Path) -> Iterator[tuple[str, str]]:
    """What is used all the same, and worth saying. said: height and width in the annotations."""
    if header.ambiguous(said):
        yield "ambiguous-rotation", f"EXIF orientation {header.orientation}"
    elif header.orientation != 1:
        how = "shown upright" if header.size == said else "shown as it is stored"
        yield "rotated-picture", f"EXIF orientation {header.orientation}, {how}: {said[1]} × {said[0]}"
    ending = os.path.splitext(path.name)[1].lower()
    if ending in KNOWN_ENDINGS and ending not in ENDINGS[header.kind]:
        yield "misnamed-picture", header.kind.upper()
    mode, _, depth = _mode(data, header).partition(";")
    if mode in GREY:
        yield "grey-picture", ""
    if mode == "CMYK":
        yield "cmyk-picture", ""
    if depth.startswith("16"):
        yield "deep-picture", ""
    if mode in TRANSPARENT:
        yield "transparent-picture", ""


def _mode(data: bytes, header: Header) -> str:
    """Channels as Pillow names them, with ";16" behind where they have so many bits; "" where that is not known."""
    if header.kind == "jpeg":
        return {1: "L", 4: "CMYK"}.get(header.channels, "RGB")
    if header.kind == "png":
        depth, colours = data[24], data[25]
        return {0: "L", 4: "LA", 6: "RGBA"}.get(colours, "RGB") + (";16" if depth == 16 else "")
    try:
        with Image.open(io.BytesIO(data)) as picture:
            return picture.mode
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # decoding it says what is wrong
        return ""


def _report_copies(index: Index, rows_of: dict[bytes, list[int]], problems: Problems) -> None:
    several = [rows for rows in rows_of.values() if len(rows) > 1]
    if not several:
        return
    split_of = {row: split for split in index.splits for row in index.rows(split).tolist()}
    for rows in several:
        names = {_name(index, row): row for row in rows}
        if len(names) == 1:
            continue  # one file in two splits: found by its name
        kind = "copied-picture" if len({split_of[row] for row in rows}) == 1 else "same-picture-in-two-splits"
        text = ", ".join(f"{name} ({split_of[row]})" for name, row in names.items())
        problems.add(kind, text)


def _name(index: Index, row: int) -> str:
    """A picture's file relative to the data set, where it lies in it."""
    return os.path.relpath(index.path(row), index.root)
