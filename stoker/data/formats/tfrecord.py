"""TFRecord data sets of the TensorFlow Object Detection API: reads them into columns, without TensorFlow.

Every checksum is compared; what is damaged is named with its byte and left out. Pictures stay where they are: the
columns say where each one's bytes lie in its file. Keys are those of object_detection/data_decoders/
tf_example_decoder.py; image/object/difficult is an ordinary box, as in Pascal VOC; a box around a group
(image/object/group_of) counts as COCO's crowd. `image/encoded` may be of any format that stoker reads.
"""

import math
import mmap
from array import array
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stoker.data.formats import tf_example
from stoker.data.formats.tables import SPLITS, UNDECIDED, Columns, Folders, Found
from stoker.data.formats.tf_example import Malformed, Span
from stoker.data.formats.tfrecord_classes import NO_CLASS, NO_LABEL, NO_TEXT, resolve
from stoker.data.formats.tfrecord_files import GZIP, missing_shards
from stoker.data.formats.tfrecord_frames import Frame, frames
from stoker.data.formats.tfrecord_gzip import unpack
from stoker.data.images.headers import header_of
from stoker.data.validation.problems import Problems
from stoker.errors import DataError

CORNERS = (b"image/object/bbox/xmin", b"image/object/bbox/ymin", b"image/object/bbox/xmax", b"image/object/bbox/ymax")
LABEL, TEXT = b"image/object/class/label", b"image/object/class/text"
CROWD, GROUP, AREA = b"image/object/is_crowd", b"image/object/group_of", b"image/object/area"
ENCODED, FILENAME, SOURCE_ID = b"image/encoded", b"image/filename", b"image/source_id"
BEGINNINGS = (b"\xff\xd8\xff", b"\x89PN")
"""Of JPEG and PNG, which nearly all pictures in records are; the headers of others are looked at."""
_NAN = np.array(math.nan, "<f4").tobytes()
HEIGHT, WIDTH = b"image/height", b"image/width"


class _LeftOut(Exception):
    """A record cannot be used: (kind of problem, why)."""


@dataclass
class _Rows:
    """Columns that grow by a record at a time; a box is 40 bytes here, a picture none of its own."""

    corners: tuple[bytearray, ...] = field(default_factory=lambda: tuple(bytearray() for _ in CORNERS))
    """Four columns [K] of float32, shares of the picture's width and height."""
    label: "array[int]" = field(default_factory=lambda: array("q"))
    text: "array[int]" = field(default_factory=lambda: array("i"))
    crowd: bytearray = field(default_factory=bytearray)
    area: bytearray = field(default_factory=bytearray)
    texts: dict[bytes, int] = field(default_factory=dict)
    count: list[int] = field(default_factory=list)
    """[R], boxes."""
    span: "array[int]" = field(default_factory=lambda: array("q"))
    size: "array[int]" = field(default_factory=lambda: array("q"))
    names: list[str] = field(default_factory=list)
    source_id: list[bytes] = field(default_factory=list)
    folder: list[int] = field(default_factory=list)
    split: list[int] = field(default_factory=list)
    number: list[int] = field(default_factory=list)
    """[R], of the record in its file."""
    groups: int = 0
    unpacked: dict[Path, int] = field(default_factory=dict)
    """Where the content of each compressed shard lies, and its bytes."""


def read(found: Found, problems: Problems) -> Columns:
    """Reads all shards. Raises DataError when no record can be used, or a label map cannot be read."""
    rows, folders, notes = _Rows(), Folders(found.root), list(found.notes)
    for part in found.parts:
        split = UNDECIDED if part.split is None else SPLITS.index(part.split)
        _read_shard(part.annotations, split, rows, folders, problems)
    for words in missing_shards(part.annotations for part in found.parts):
        problems.add("missing-shard", words)
    if not rows.names:
        raise DataError(
            "No record can be used.",
            place=found.root if len(found.parts) > 1 else found.parts[0].annotations,
            cause="; ".join(f"{p.title}: {p.examples[0]}" for p in problems.found()) or None,
            fix="copy or write the records again; they have to be TFRecords of the TensorFlow Object Detection API",
        )
    if rows.unpacked:
        count, place = len(rows.unpacked), next(iter(rows.unpacked))
        files = "a file is compressed" if count == 1 else f"{count:,} files are compressed"
        notes.append(f"{files}: unpacked into {place.parent}, {sum(rows.unpacked.values()):,} bytes")
    if rows.groups:
        notes.append(f"{rows.groups:,} boxes around groups (image/object/group_of) count as crowd")
    return _columns(rows, found, folders.texts(), notes, problems)


def _read_shard(path: Path, split: int, rows: _Rows, folders: Folders, problems: Problems) -> None:
    shard = path.name
    with path.open("rb") as file:
        head = file.read(len(GZIP))
    if not head:
        problems.add("empty-shard", str(path))
        return
    place = path
    if head == GZIP:
        try:
            place = unpack(path)
        except DataError as error:
            problems.add("damaged-shard", f"{path}: {error.cause}; it is compressed, and left out as a whole")
            return
        rows.unpacked[place] = place.stat().st_size
        if rows.unpacked[place] == 0:
            problems.add("empty-shard", str(path))
            return
    folder = folders.number(str(place))
    taken: set[str] = set()
    with place.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if hasattr(mmap, "MADV_SEQUENTIAL"):
            content.madvise(mmap.MADV_SEQUENTIAL)  # reads ahead further; every byte is needed, once
        for frame in frames(content, shard, problems):
            try:
                name = _read_record(content, frame, place, rows, taken)
            except _LeftOut as error:
                kind, why = error.args
                problems.add(kind, f"{shard} @ byte {frame.offset:,}, record {frame.number}: {why}")
                continue
            taken.add(name)
            rows.names.append(name)
            rows.number.append(frame.number)
            rows.folder.append(folder)
            rows.split.append(split)


def _read_record(content: mmap.mmap, frame: Frame, shard: Path, rows: _Rows, taken: set[str]) -> str:
    """Adds what a record says of its picture and boxes, and returns the picture's name. Raises _LeftOut."""
    try:
        features = tf_example.features(content, frame.start, frame.stop)
        encoded = tf_example.byte_strings(content, features.get(ENCODED))
        corners = [tf_example.floats(content, features.get(key)) for key in CORNERS]
        labels = tf_example.integers(content, features.get(LABEL))
        texts = [content[begin:end] for begin, end in tf_example.byte_strings(content, features.get(TEXT))]
        crowd = tf_example.integers(content, features.get(CROWD))
        group = tf_example.integers(content, features.get(GROUP))
        area = tf_example.floats(content, features.get(AREA))
        sides = [tf_example.integers(content, features.get(key)) for key in (HEIGHT, WIDTH)]
        filename, source_id = (
            content[spans[0].start : spans[0].stop] if spans else b""
            for spans in (tf_example.byte_strings(content, features.get(key)) for key in (FILENAME, SOURCE_ID))
        )
    except Malformed as error:
        raise _LeftOut("not-an-example", str(error)) from error
    count = len(corners[0]) // 4
    _check_lengths(count, corners, labels, texts, crowd, group, area)
    height, width = (values[0] if len(values) == 1 and 0 < values[0] < 2**31 else 0 for values in sides)
    if not encoded or encoded[0].start == encoded[0].stop:
        raise _LeftOut("record-without-picture", "it has no image/encoded")
    span = encoded[0]
    if not (height and width and content[span.start : span.start + 3] in BEGINNINGS):
        said = _header_size(content, span, shard)
        height, width = (height, width) if height and width else said
    for column, values in zip(rows.corners, corners, strict=True):
        column += values
    rows.label.extend(labels or [NO_LABEL] * count)
    number = rows.texts
    rows.text.extend([number.setdefault(text, len(number)) if text else NO_TEXT for text in texts] or [NO_TEXT] * count)
    rows.crowd += bytes(map(bool, crowd)) or bytes(count)
    if any(group):
        rows.groups += sum(map(bool, group))
        rows.crowd[len(rows.crowd) - count :] = bytes(
            a or bool(b) for a, b in zip(rows.crowd[-count:], group, strict=True)
        )
    rows.area += area or _NAN * count
    rows.count.append(count)
    rows.span.extend((span.start, span.stop - span.start))
    rows.size.extend((height, width))
    rows.source_id.append(source_id)
    return _name(filename, frame.number, taken)


def _header_size(content: mmap.mmap, span: Span, shard: Path) -> tuple[int, int]:
    """Height and width of a picture, as its own header has them."""
    try:
        return header_of(content[span.start : span.stop], shard).size
    except DataError as error:
        raise _LeftOut("record-without-picture", error.cause or error.what) from error


def _check_lengths(
    count: int,
    corners: list[bytes],
    labels: list[int],
    texts: list[bytes],
    crowd: list[int],
    group: list[int],
    area: bytes,
) -> None:
    optional = len(labels), len(texts), len(crowd), len(group), len(area) // 4
    if all(len(values) == 4 * count for values in corners) and all(length in (0, count) for length in optional):
        return
    lengths = {key: len(values) // 4 for key, values in zip(CORNERS, corners, strict=True)}
    lengths |= {key: n for key, n in zip((LABEL, TEXT, CROWD, GROUP, AREA), optional, strict=True) if n}
    raise _LeftOut("unequal-lists", ", ".join(f"{key.decode()} has {n}" for key, n in lengths.items()))


def _name(filename: bytes, number: int, taken: set[str]) -> str:
    """The file name without folders; one that an earlier record of the shard has, or that is none, gets the number."""
    name = filename.decode(errors="backslashreplace").replace("\\", "/").rpartition("/")[2].replace("\0", "")
    if name in ("", ".", ".."):
        name = f"record {number}"
    while name in taken:
        stem, dot, ending = name.rpartition(".")
        name = f"{stem} (record {number}).{ending}" if dot else f"{ending} (record {number})"
    return name


def _columns(rows: _Rows, found: Found, folders: list[str], notes: list[str], problems: Problems) -> Columns:
    row = np.repeat(np.arange(len(rows.names), dtype=np.int64), rows.count)
    first = np.cumsum([0, *rows.count])
    size = np.array(rows.size, np.int64).astype(np.int32).reshape(-1, 2)

    def place(box: int) -> str:
        at = int(row[box])
        shard = Path(folders[rows.folder[at]]).name
        return f"{shard}, record {rows.number[at]} ({rows.names[at]}), object {box - int(first[at]) + 1}"

    classes = resolve(
        np.array(rows.label, np.int64),
        np.array(rows.text, np.int32),
        [text.decode(errors="backslashreplace") for text in rows.texts],
        maps=found.descriptions,
        root=found.root,
        problems=problems,
        place=place,
    )
    height, width = size[row].T.astype(np.float64)
    x1, y1, x2, y2 = (np.frombuffer(column, "<f4").astype(np.float64) for column in rows.corners)
    keep = classes.labels != NO_CLASS
    return Columns(
        class_names=classes.names,
        category_ids=classes.ids,
        folders=folders,
        folder=np.array(rows.folder, np.int32),
        names=rows.names,
        split=np.array(rows.split, np.int8),
        size=size,
        image_id=_image_ids(rows.source_id),
        row=row[keep],
        boxes=np.stack((x1 * width, y1 * height, x2 * width, y2 * height), axis=1)[keep],
        labels=classes.labels[keep],
        crowd=np.frombuffer(rows.crowd, np.bool_)[keep],
        area=np.frombuffer(rows.area, "<f4").astype(np.float64)[keep],
        box_id=(np.arange(len(row)) - first[row] + 1)[keep],
        box_word="object",
        span=np.array(rows.span, np.int64).reshape(-1, 2),
        notes=[*notes, *classes.notes],
    )


def _image_ids(source_ids: list[bytes]) -> NDArray[np.int64]:
    """[R], the source's ids where all are different whole numbers, else the rows."""
    rows = np.arange(len(source_ids), dtype=np.int64)
    if not all(text.isdigit() and len(text) < 19 for text in source_ids):
        return rows
    ids = np.array([int(text) for text in source_ids], np.int64)
    return ids if len(np.unique(ids)) == len(ids) else rows
