"""TFRecord data sets of the TensorFlow Object Detection API: reads them without TensorFlow.

Every checksum is verified; damaged records are reported with their byte offset and dropped. Images are not copied: the
table has the byte range of each in its file. Keys are those of object_detection/data_decoders/tf_example_decoder.py;
image/object/difficult is an ordinary box, as in Pascal VOC; a box around a group (image/object/group_of) counts as
COCO's crowd. `image/encoded` may have any format that stoker reads.
"""

import math
import mmap
from array import array
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stoker import regular_files
from stoker.data.formats import tf_example
from stoker.data.formats.tables import AnnotationTable, DatasetLayout, FolderTable
from stoker.data.formats.tf_example import ByteRange, MalformedExample
from stoker.data.formats.tfrecord_classes import NO_CLASS, NO_LABEL, NO_TEXT, assign_classes
from stoker.data.formats.tfrecord_files import GZIP_MAGIC, describe_missing_shards
from stoker.data.formats.tfrecord_frames import Frame, iter_frames
from stoker.data.formats.tfrecord_gzip import unpack
from stoker.data.images.headers import parse_header
from stoker.data.validation.problems import ProblemCollector
from stoker.errors import DataError

BOX_KEYS = (b"image/object/bbox/xmin", b"image/object/bbox/ymin", b"image/object/bbox/xmax", b"image/object/bbox/ymax")
LABEL_KEY, TEXT_KEY = b"image/object/class/label", b"image/object/class/text"
CROWD_KEY, GROUP_KEY, AREA_KEY = b"image/object/is_crowd", b"image/object/group_of", b"image/object/area"
ENCODED_KEY, FILENAME_KEY, SOURCE_ID_KEY = b"image/encoded", b"image/filename", b"image/source_id"
MAGIC_BYTES = (b"\xff\xd8\xff", b"\x89PN")
"""The first bytes of JPEG and PNG, the usual formats in records. The headers of other images are parsed."""
_NAN = np.array(math.nan, "<f4").tobytes()
HEIGHT_KEY, WIDTH_KEY = b"image/height", b"image/width"


class _UnusableRecord(Exception):
    """A record cannot be used: (kind of problem, reason)."""


@dataclass
class _RecordColumns:
    """Columns that grow by one record at a time. A box takes 40 bytes."""

    xyxy: tuple[bytearray, ...] = field(default_factory=lambda: tuple(bytearray() for _ in BOX_KEYS))
    """Four columns [K] of float32, normalized by image width and height."""
    label: "array[int]" = field(default_factory=lambda: array("q"))
    text_index: "array[int]" = field(default_factory=lambda: array("i"))
    crowd: bytearray = field(default_factory=bytearray)
    area: bytearray = field(default_factory=bytearray)
    index_by_text: dict[bytes, int] = field(default_factory=dict)
    num_boxes: list[int] = field(default_factory=list)
    """[R], boxes per image."""
    byte_range: "array[int]" = field(default_factory=lambda: array("q"))
    original_size: "array[int]" = field(default_factory=lambda: array("q"))
    file_names: list[str] = field(default_factory=list)
    source_id: list[bytes] = field(default_factory=list)
    folder_index: list[int] = field(default_factory=list)
    split: list[int] = field(default_factory=list)
    record_number: list[int] = field(default_factory=list)
    """[R], number of the record in its file."""
    num_group_boxes: int = 0
    unpacked_bytes: dict[Path, int] = field(default_factory=dict)
    """Unpacked file of each compressed shard → its size."""


def read(layout: DatasetLayout, problems: ProblemCollector) -> AnnotationTable:
    """Reads all shards. Raises DataError if no record is usable or a label map cannot be read."""
    columns, folders, notes = _RecordColumns(), FolderTable(layout.root), list(layout.notes)
    for part in layout.parts:
        _read_shard(part.annotations, part.split_index, columns, folders, problems)
    for message in describe_missing_shards(part.annotations for part in layout.parts):
        problems.add("missing-shard", message)
    if not columns.file_names:
        raise DataError(
            "No record can be used.",
            location=layout.root if len(layout.parts) > 1 else layout.parts[0].annotations,
            cause="; ".join(f"{p.title}: {p.examples[0]}" for p in problems.summarize()) or None,
            fix="copy or write the records again; they must be TFRecords of the TensorFlow Object Detection API",
        )
    if columns.unpacked_bytes:
        count, first_path = len(columns.unpacked_bytes), next(iter(columns.unpacked_bytes))
        files = "one file is compressed" if count == 1 else f"{count:,} files are compressed"
        notes.append(f"{files}: unpacked into {first_path.parent}, {sum(columns.unpacked_bytes.values()):,} bytes")
    if columns.num_group_boxes:
        notes.append(f"{columns.num_group_boxes:,} boxes around groups (image/object/group_of) count as crowd")
    return _make_table(columns, layout, folders.paths(), notes, problems)


def _read_shard(
    path: Path, split: int, columns: _RecordColumns, folders: FolderTable, problems: ProblemCollector
) -> None:
    shard = path.name
    with regular_files.open_file(path) as file:
        head = file.read(len(GZIP_MAGIC))
    if not head:
        problems.add("empty-shard", str(path))
        return
    data_path = path
    if head == GZIP_MAGIC:
        try:
            data_path = unpack(path)
        except DataError as error:
            problems.add("damaged-shard", f"{path}: {error.cause}; the whole compressed file is left out")
            return
        columns.unpacked_bytes[data_path] = data_path.stat().st_size
        if columns.unpacked_bytes[data_path] == 0:
            problems.add("empty-shard", str(path))
            return
    folder_index = folders.add(str(data_path))
    used_names: set[str] = set()
    num_before = len(columns.file_names)
    with regular_files.open_file(data_path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if hasattr(mmap, "MADV_SEQUENTIAL"):
            data.madvise(mmap.MADV_SEQUENTIAL)  # a longer read-ahead: every byte is read once
        for frame in iter_frames(data, shard, problems):
            try:
                name = _read_record(data, frame, data_path, columns, used_names)
            except _UnusableRecord as error:
                kind, reason = error.args
                problems.add(kind, f"{shard} @ byte {frame.offset:,}, record {frame.number}: {reason}")
                continue
            used_names.add(name)
            columns.file_names.append(name)
            columns.record_number.append(frame.number)
            columns.folder_index.append(folder_index)
            columns.split.append(split)
    if data_path != path and len(columns.file_names) == num_before:
        del columns.unpacked_bytes[data_path]
        data_path.unlink()  # nothing in it can be used


def _read_record(data: mmap.mmap, frame: Frame, shard: Path, columns: _RecordColumns, used_names: set[str]) -> str:
    """Adds the image and the boxes of a record; returns the image's name. Raises _UnusableRecord."""
    try:
        features = tf_example.parse_features(data, frame.start, frame.stop)
        encoded = tf_example.find_byte_values(data, features.get(ENCODED_KEY))
        xyxy = [tf_example.read_floats(data, features.get(key)) for key in BOX_KEYS]
        labels = tf_example.read_integers(data, features.get(LABEL_KEY))
        texts = [data[begin:end] for begin, end in tf_example.find_byte_values(data, features.get(TEXT_KEY))]
        crowd = tf_example.read_integers(data, features.get(CROWD_KEY))
        group_of = tf_example.read_integers(data, features.get(GROUP_KEY))
        area = tf_example.read_floats(data, features.get(AREA_KEY))
        hw = [tf_example.read_integers(data, features.get(key)) for key in (HEIGHT_KEY, WIDTH_KEY)]
        filename, source_id = (
            data[ranges[0].start : ranges[0].stop] if ranges else b""
            for ranges in (
                tf_example.find_byte_values(data, features.get(key)) for key in (FILENAME_KEY, SOURCE_ID_KEY)
            )
        )
    except MalformedExample as error:
        raise _UnusableRecord("not-an-example", str(error)) from error
    num_boxes = len(xyxy[0]) // 4
    _check_lengths(num_boxes, xyxy, labels, texts, crowd, group_of, area)
    height, width = (values[0] if len(values) == 1 and 0 < values[0] < 2**31 else 0 for values in hw)
    if not encoded or encoded[0].start == encoded[0].stop:
        raise _UnusableRecord("record-without-image", "it has no image/encoded")
    byte_range = encoded[0]
    if not (height and width and data[byte_range.start : byte_range.start + 3] in MAGIC_BYTES):
        header_size = _read_header_size(data, byte_range, shard)
        height, width = (height, width) if height and width else header_size
    for column, values in zip(columns.xyxy, xyxy, strict=True):
        column += values
    columns.label.extend(labels or [NO_LABEL] * num_boxes)
    index_by_text = columns.index_by_text
    columns.text_index.extend(
        [index_by_text.setdefault(text, len(index_by_text)) if text else NO_TEXT for text in texts]
        or [NO_TEXT] * num_boxes
    )
    columns.crowd += bytes(map(bool, crowd)) or bytes(num_boxes)
    if any(group_of):
        columns.num_group_boxes += sum(map(bool, group_of))
        columns.crowd[len(columns.crowd) - num_boxes :] = bytes(
            a or bool(b) for a, b in zip(columns.crowd[-num_boxes:], group_of, strict=True)
        )
    columns.area += area or _NAN * num_boxes
    columns.num_boxes.append(num_boxes)
    columns.byte_range.extend((byte_range.start, byte_range.stop - byte_range.start))
    columns.original_size.extend((height, width))
    columns.source_id.append(source_id)
    return _unique_name(filename, frame.number, used_names)


def _read_header_size(data: mmap.mmap, byte_range: ByteRange, shard: Path) -> tuple[int, int]:
    """Height and width of an image, from its header."""
    try:
        return parse_header(data[byte_range.start : byte_range.stop], shard).size
    except DataError as error:
        raise _UnusableRecord("record-without-image", error.cause or error.what) from error


def _check_lengths(
    num_boxes: int,
    xyxy: list[bytes],
    labels: list[int],
    texts: list[bytes],
    crowd: list[int],
    group_of: list[int],
    area: bytes,
) -> None:
    optional = len(labels), len(texts), len(crowd), len(group_of), len(area) // 4
    if all(len(values) == 4 * num_boxes for values in xyxy) and all(length in (0, num_boxes) for length in optional):
        return
    lengths = {key: len(values) // 4 for key, values in zip(BOX_KEYS, xyxy, strict=True)}
    lengths |= {
        key: n for key, n in zip((LABEL_KEY, TEXT_KEY, CROWD_KEY, GROUP_KEY, AREA_KEY), optional, strict=True) if n
    }
    raise _UnusableRecord("unequal-lists", ", ".join(f"{key.decode()} has {n}" for key, n in lengths.items()))


def _unique_name(filename: bytes, record_number: int, used_names: set[str]) -> str:
    """The file name without folders; with the record number if it is empty or already used in the shard."""
    name = filename.decode(errors="backslashreplace").replace("\\", "/").rpartition("/")[2].replace("\0", "")
    if name in ("", ".", ".."):
        name = f"record {record_number}"
    while name in used_names:
        stem, dot, suffix = name.rpartition(".")
        name = f"{stem} (record {record_number}).{suffix}" if dot else f"{suffix} (record {record_number})"
    return name


def _make_table(
    columns: _RecordColumns, layout: DatasetLayout, folders: list[str], notes: list[str], problems: ProblemCollector
) -> AnnotationTable:
    image_indices = np.repeat(np.arange(len(columns.file_names), dtype=np.int64), columns.num_boxes)
    offsets = np.cumsum([0, *columns.num_boxes])
    original_size = np.array(columns.original_size, np.int64).astype(np.int32).reshape(-1, 2)

    def describe_box(box_index: int) -> str:
        image_index = int(image_indices[box_index])
        shard = Path(folders[columns.folder_index[image_index]]).name
        number = box_index - int(offsets[image_index]) + 1
        record = f"record {columns.record_number[image_index]} ({columns.file_names[image_index]})"
        return f"{shard}, {record}, object {number}"

    classes = assign_classes(
        np.array(columns.label, np.int64),
        np.array(columns.text_index, np.int32),
        [text.decode(errors="backslashreplace") for text in columns.index_by_text],
        label_map_paths=layout.metadata_files,
        root=layout.root,
        problems=problems,
        describe_box=describe_box,
    )
    height, width = original_size[image_indices].T.astype(np.float64)
    x1, y1, x2, y2 = (np.frombuffer(column, "<f4").astype(np.float64) for column in columns.xyxy)
    keep = classes.labels != NO_CLASS
    return AnnotationTable(
        class_names=classes.names,
        category_ids=classes.ids,
        folders=folders,
        folder_index=np.array(columns.folder_index, np.int32),
        file_names=columns.file_names,
        split=np.array(columns.split, np.int8),
        original_size=original_size,
        image_id=_image_ids(columns.source_id),
        image_index=image_indices[keep],
        boxes=np.stack((x1 * width, y1 * height, x2 * width, y2 * height), axis=1)[keep],
        labels=classes.labels[keep],
        crowd=np.frombuffer(columns.crowd, np.bool_)[keep],
        area=np.frombuffer(columns.area, "<f4").astype(np.float64)[keep],
        box_id=(np.arange(len(image_indices)) - offsets[image_indices] + 1)[keep],
        box_id_kind="object",
        byte_range=np.array(columns.byte_range, np.int64).reshape(-1, 2),
        num_bad_boxes=np.bincount(image_indices[~keep], minlength=len(columns.file_names)),
        notes=[*notes, *classes.notes],
    )


def _image_ids(source_ids: list[bytes]) -> NDArray[np.int64]:
    """[R], the source's ids if all are different whole numbers, else the image indices."""
    image_indices = np.arange(len(source_ids), dtype=np.int64)
    if not all(text.isdigit() and len(text) < 19 for text in source_ids):
        return image_indices
    ids = np.array([int(text) for text in source_ids], np.int64)
    return ids if len(np.unique(ids)) == len(ids) else image_indices
