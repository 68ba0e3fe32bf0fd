"""Checks the image files of an index: reads and decodes every file, in threads.

An image that fails here is one that the loader would quarantine: the same code decodes the file and compares its size
with the annotations. JPEGs are decoded at an eighth of their size, for which libjpeg still reads every coded byte. Not
here: annotations (`clean.py`, `formats/`), the report (`check.py`).
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
from stoker.data.images.headers import Header, parse_header
from stoker.data.index import Index
from stoker.data.validation.problems import ProblemCollector
from stoker.errors import DataError

CHUNK_SIZE = 16
"""Images of a task of a thread."""
DECODE_SHRINK = {"jpeg": 8}
"""Scale denominator of decoding. Other formats are decoded at full size and resized by 2, where that is cheapest."""
SUFFIXES = {
    "jpeg": (".jpg", ".jpeg", ".jpe", ".jfif"), "png": (".png",), "webp": (".webp",), "bmp": (".bmp", ".dib"),
    "tiff": (".tif", ".tiff"), "gif": (".gif",), "pnm": (".pnm", ".ppm", ".pgm", ".pbm"),
    "jpeg 2000": (".jp2", ".j2k", ".jpx"),
}  # fmt: skip
KNOWN_SUFFIXES = frozenset(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
MAGIC_BYTES = (b"\xff\xd8", b"\x89P", b"BM", b"GIF", b"RIFF", b"II", b"MM")
"""First bytes of a damaged image, where the rest of its header cannot be read."""
GRAY_MODES, ALPHA_MODES = ("1", "L", "LA", "La", "I"), ("LA", "La", "PA", "RGBA", "RGBa")
"""Pillow's names of channels."""

Progress = Callable[[int, int], None]
"""(images done, all images)."""


class _ImageCheck(NamedTuple):
    image_index: int
    problems: list[tuple[str, str]]
    """(kind, details)."""
    usable: bool
    digest: bytes
    """Hash of the file; empty when it could not be read."""


def check_image_files(
    index: Index, problems: ProblemCollector, *, workers: int, progress: Progress
) -> NDArray[np.bool_]:
    """Checks all images and adds their problems to `problems`. Returns bool [R], which images can be used."""
    usable = np.zeros(len(index), np.bool_)
    indices_by_digest: dict[bytes, list[int]] = {}
    chunks = [range(start, min(start + CHUNK_SIZE, len(index))) for start in range(0, len(index), CHUNK_SIZE)]
    thread_state = threading.local()
    with ThreadPoolExecutor(workers) as pool:
        done = 0
        # `map` returns the results in order, so reports do not depend on the threads; it cancels the rest on an error
        for results in pool.map(lambda chunk: [_check_image(index, i, thread_state) for i in chunk], chunks):
            for result in results:
                usable[result.image_index] = result.usable
                for kind, text in result.problems:
                    path = _relative_path(index, result.image_index)
                    problems.add(kind, f"{path}: {text}" if text else path)
                if result.digest:
                    indices_by_digest.setdefault(result.digest, []).append(result.image_index)
            done += len(results)
            progress(done, len(index))
    _report_duplicates(index, indices_by_digest, problems)
    return usable


def _check_image(index: Index, image_index: int, thread_state: threading.local) -> _ImageCheck:
    path = index.path(image_index)
    annotated_size = (int(index.original_size[image_index, 0]), int(index.original_size[image_index, 1]))
    data, digest = b"", b""
    problems: list[tuple[str, str]] = []
    try:
        data = index.read(image_index)
        digest = blake2b(data, digest_size=16).digest() if data else b""
        file_header = parse_header(data, path)
        header = file_header.as_annotated(annotated_size)
        problems += _image_warnings(data, file_header, annotated_size, path)
        if 0 not in annotated_size and header.size != annotated_size:
            text = f"{annotated_size[1]} × {annotated_size[0]} in the annotations"
            problems.append(("size-disagrees", f"{text}, {header.size[1]} × {header.size[0]} in the file"))
            return _ImageCheck(image_index, problems, False, digest)
        _decode(data, header, path, thread_state)
    except DataError as error:
        problems.append((_classify_error(error, data), error.cause or ""))
        return _ImageCheck(image_index, problems, False, digest)
    except OSError as error:
        kind = "missing-image" if error.errno in (errno.ENOENT, errno.ENOTDIR) else "unreadable-image"
        problems.append((kind, "" if kind == "missing-image" else error.strerror or str(error)))
        return _ImageCheck(image_index, problems, False, digest)
    return _ImageCheck(image_index, problems, True, digest)


def _classify_error(error: DataError, data: bytes) -> str:
    if not data:
        return "empty-image"
    if error.what.endswith("is too large."):  # `headers.parse_header`; `tests/data/test_hostile.py` checks it
        return "too-large-image"
    return "damaged-image" if data.startswith(MAGIC_BYTES) else "not-an-image"


def _decode(data: bytes, header: Header, path: Path, thread_state: threading.local) -> None:
    """Decodes an image and discards the pixels."""
    height, width = header.size
    shrink = DECODE_SHRINK.get(header.image_format, 2)
    shape = max(1, height // shrink), max(1, width // shrink), 3
    size = shape[0] * shape[1] * 3
    buffer: NDArray[np.uint8] | None = getattr(thread_state, "memory", None)
    if buffer is None or buffer.size < size:
        buffer = thread_state.memory = np.empty(size, np.uint8)
    decode_into(data, path, region=(0, 0, width, height), out=buffer[:size].reshape(shape), header=header)


def _image_warnings(
    data: bytes, header: Header, annotated_size: tuple[int, int], path: Path
) -> Iterator[tuple[str, str]]:
    """(kind, details) of what an image that can be used has. annotated_size: height and width."""
    if header.is_orientation_ambiguous(annotated_size):
        yield "ambiguous-rotation", f"EXIF orientation {header.orientation}"
    elif header.orientation != 1:
        action = "rotated upright" if header.size == annotated_size else "not rotated"
        size = f"{annotated_size[1]} × {annotated_size[0]}"
        yield "rotated-image", f"EXIF orientation {header.orientation}, {action}: {size}"
    suffix = os.path.splitext(path.name)[1].lower()
    if suffix in KNOWN_SUFFIXES and suffix not in SUFFIXES[header.image_format]:
        yield "misnamed-image", header.image_format.upper()
    mode, _, bit_depth = _mode(data, header).partition(";")
    if mode in GRAY_MODES:
        yield "gray-image", ""
    if mode == "CMYK":
        yield "cmyk-image", ""
    if bit_depth.startswith("16"):
        yield "deep-image", ""
    if mode in ALPHA_MODES:
        yield "transparent-image", ""


def _mode(data: bytes, header: Header) -> str:
    """Channels as Pillow names them, followed by ";16" where they have 16 bits; "" when not known."""
    if header.image_format == "jpeg":
        return {1: "L", 4: "CMYK"}.get(header.channels, "RGB")
    if header.image_format == "png":
        bit_depth, color_type = data[24], data[25]
        return {0: "L", 4: "LA", 6: "RGBA"}.get(color_type, "RGB") + (";16" if bit_depth == 16 else "")
    try:
        with Image.open(io.BytesIO(data)) as image:
            return image.mode
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # decoding reports the problem
        return ""


def _report_duplicates(index: Index, indices_by_digest: dict[bytes, list[int]], problems: ProblemCollector) -> None:
    duplicate_groups = [image_indices for image_indices in indices_by_digest.values() if len(image_indices) > 1]
    if not duplicate_groups:
        return
    split_by_image = {
        image_index: split for split in index.splits for image_index in index.image_indices(split).tolist()
    }
    for image_indices in duplicate_groups:
        index_by_name = {_relative_path(index, image_index): image_index for image_index in image_indices}
        if len(index_by_name) == 1:
            continue  # one file in two splits: reported by its name (`clean.py`)
        splits = {split_by_image[image_index] for image_index in image_indices}
        text = ", ".join(f"{name} ({split_by_image[image_index]})" for name, image_index in index_by_name.items())
        problems.add("copied-image" if len(splits) == 1 else "same-image-in-two-splits", text)


def _relative_path(index: Index, image_index: int) -> str:
    """The file of an image relative to the root of the data set."""
    return os.path.relpath(index.path(image_index), index.root)
