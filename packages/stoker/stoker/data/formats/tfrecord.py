"""TFRecord data sets of the TensorFlow Object Detection API, without TensorFlow.

Recognized: files called *.record, *.tfrecord and similar, whole or numbered (`train.record-00003-of-00010`), plain or
gzip, in one folder or in `train/`, `valid/`, `test/`; one such file; a pattern ("train.record*"). The split is in the
name of the file or of that folder.

Every checksum is verified; damaged records are reported with their byte offset and dropped. Images are not copied: the
table has the byte range of each in its file. Keys are those of object_detection/data_decoders/tf_example_decoder.py;
image/object/difficult is an ordinary box, as in Pascal VOC; a box around a group (image/object/group_of) counts as
COCO's crowd. As in the API, the text decides the class of a box if the label map has it, else the label; of several
label maps, the one that agrees with the records is used. Not here: the bytes of records and label maps
(`tfrecord_bytes.py`).
"""

import contextlib
import hashlib
import math
import mmap
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.data.formats import tfrecord_bytes
from stoker.data.formats.folders import base_name, file_part, list_subdirs
from stoker.data.formats.shards import find_shards, layout_of_shards
from stoker.data.formats.tables import (
    AnnotatedImage,
    AnnotationTable,
    DatasetLayout,
    DatasetWriter,
    FolderTable,
    SplitFiles,
    Target,
    UnsupportedImage,
)
from stoker.data.images.headers import parse_header
from stoker.data.validation.problems import ProblemCollector
from stoker_watch import regular_files
from stoker_watch.errors import DataError, make_error

GZIP_MAGIC = b"\x1f\x8b"
_SUFFIX = re.compile(r"\.(tf_?records?|tfrec|records?)(?=$|[-.])", re.IGNORECASE)
_ENDINGS = (".record", ".records", ".tfrecord", ".tfrecords", ".tf_record", ".tfrec")
SUFFIXES = (*_ENDINGS, *(f"{ending}.gz" for ending in _ENDINGS))
SIBLING_DIRS = (
    "annotations", "labels", "label_map", "label_maps", "labelmap", "labelmaps", "data", "training", "configs",
)  # fmt: skip
"""Folders next to that of the records in which people keep label maps. Other folders may be other data sets, with their
own maps."""
_SHARD_NAME = re.compile(r"(.*)-(\d{3,7})-of-(\d{3,7})(.*)", re.DOTALL)


def recognize(path: Path) -> DatasetLayout | None:
    """Returns the TFRecord data set of a file, or in a folder or in its split folders; None for a folder without."""
    if path.is_file():
        return _make_layout(path.parent, [file_part(path)], [])
    ignored: list[str] = []
    parts, notes = find_shards(path, (), lambda folder: _list_shards(folder, ignored))
    return _make_layout(path, parts, ignored + notes) if parts else None


def strip_shard_number(name: str) -> str:
    """Returns the name of a numbered file without its number: "train.record" for "train.record-00003-of-00010"."""
    match = _SHARD_NAME.fullmatch(name)
    return name if match is None else match[1] + match[4]


def from_glob(data: Path) -> DatasetLayout | None:
    """Returns the data set of the files that match a pattern; None if there are none."""
    folder = data.parent.resolve()
    paths = [path for path in sorted(folder.glob(data.name)) if path.is_file() and _is_shard(path)]
    return _make_layout(folder, [file_part(path) for path in paths], []) if paths else None


def _make_layout(root: Path, parts: list[SplitFiles], notes: list[str]) -> DatasetLayout:
    return replace(
        layout_of_shards("tfrecord", "TFRecord", root, parts, notes),
        # other programs use .record files too; if there is nothing else, reading them reports what is wrong
        is_certain=any(_has_tfrecord_header(part.annotations) for part in parts),
        metadata_files=tuple(_find_label_maps([part.annotations.parent for part in parts], root)),
    )


def _list_shards(folder: Path, notes: list[str]) -> list[Path]:
    """Returns the shards in a folder, sorted. Appends to notes which are not read."""
    with os.scandir(folder) as entries:  # there may be a hundred thousand, all of them images
        names = sorted(entry.name for entry in entries if "rec" in entry.name.lower() or "-of-" in entry.name)
    paths = [folder / name for name in names if _is_shard(folder / name) and (folder / name).is_file()]
    present = {path.name for path in paths}
    duplicates = {path for path in paths if path.suffix == ".gz" and path.name[: -len(".gz")] in present}
    notes += [f"{path.name} is not read, because {path.stem} exists too" for path in sorted(duplicates)]
    return [path for path in paths if path not in duplicates]


def _is_shard(path: Path) -> bool:
    if path.name.startswith("."):
        return False
    is_numbered = _SHARD_NAME.fullmatch(path.name) is not None
    return _SUFFIX.search(path.name) is not None or (is_numbered and _has_tfrecord_header(path))


def _has_tfrecord_header(path: Path) -> bool:
    """Returns whether a file is empty or begins like a plain or a gzip shard."""
    if not path.is_file():
        return False
    with regular_files.open_file(path) as file:
        head = file.read(tfrecord_bytes.HEADER_BYTES)
    return not head or head.startswith(GZIP_MAGIC) or tfrecord_bytes.is_record_header(head)


def describe_missing_shards(paths: Iterable[Path]) -> Iterator[str]:
    """Yields a message for each numbered series with missing files, with their numbers."""
    matches = [(path.parent, match) for path in paths if (match := _SHARD_NAME.fullmatch(path.name))]
    for folder, head, total, tail in dict.fromkeys((folder, match[1], match[3], match[4]) for folder, match in matches):
        names, digits = {path.name for path in folder.iterdir()}, len(total)
        numbers = (f"{number:0{digits}}" for number in range(int(total)))
        if absent := [number for number in numbers if f"{head}-{number}-of-{total}{tail}" not in names]:
            listed = ", ".join(absent[:10]) + (", …" if len(absent) > 10 else "")
            yield f"{folder / head}-*-of-{total}{tail}: {len(absent)} of {int(total)} are missing, numbers {listed}"


def _find_label_maps(folders: list[Path], root: Path) -> list[Path]:
    """The label maps of the nearest folder that has any: with the records, below, above, in a sibling folder."""
    sibling_dirs = [path for name, path in list_subdirs(root.parent).items() if name in SIBLING_DIRS and path != root]
    for directories, pattern in (
        ([*folders, root], "*.pbtxt"),
        ([root], "*/*.pbtxt"),
        ([root.parent], "*.pbtxt"),
        (sibling_dirs, "*.pbtxt"),
    ):
        files = (path for directory in dict.fromkeys(directories) for path in sorted(directory.glob(pattern)))
        if nearest := [path for path in files if path.is_file() and tfrecord_bytes.looks_like_label_map(path)]:
            return nearest
    return []


BOX_KEYS = (b"image/object/bbox/xmin", b"image/object/bbox/ymin", b"image/object/bbox/xmax", b"image/object/bbox/ymax")
OBJECT_KEYS = {
    **dict.fromkeys((*BOX_KEYS, b"image/object/area"), "float_list"),
    b"image/object/class/label": "int64_list",
    b"image/object/class/text": "bytes_list",
    b"image/object/is_crowd": "int64_list",
    b"image/object/group_of": "int64_list",
}
"""Lists with a value per box, and their kinds."""
MAGIC_BYTES = (b"\xff\xd8\xff", b"\x89PN")
"""The first bytes of JPEG and PNG, the usual formats in records. The headers of other images are parsed."""


class _UnusableRecord(Exception):
    """A record cannot be used: (kind of problem, reason)."""


@dataclass
class _RecordColumns:
    """Columns that grow by one record at a time. A box takes 40 bytes."""

    xyxy: "tuple[array[float], ...]" = field(default_factory=lambda: tuple(array("f") for _ in BOX_KEYS))
    """Four columns [K], normalized by image width and height."""
    pair: "array[int]" = field(default_factory=partial(array, "i"))
    """Number of the pair of label and text."""
    number_by_pair: dict[tuple[int, bytes], int] = field(default_factory=dict)
    crowd: "array[int]" = field(default_factory=partial(array, "b"))
    area: "array[float]" = field(default_factory=lambda: array("f"))
    file_names: list[str] = field(default_factory=list)
    source_id: list[bytes] = field(default_factory=list)
    numbers: "array[int]" = field(default_factory=partial(array, "q"))
    """[R, 8], folder index, split, number of the record in its file, boxes, first byte, bytes, height, width."""
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
        location = layout.root if len(layout.parts) > 1 else layout.parts[0].annotations
        raise make_error(DataError, "tfrecord-without-records", location, cause=problems.describe())
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
    with regular_files.open_file(path) as file:
        head = file.read(len(GZIP_MAGIC))
    data_path = path
    if head == GZIP_MAGIC:
        try:
            data_path = tfrecord_bytes.unpack(path)
        except DataError as error:
            problems.add("damaged-shard", f"{path}: {error.cause}; the whole compressed file is left out")
            return
        columns.unpacked_bytes[data_path] = data_path.stat().st_size
    if not head or columns.unpacked_bytes.get(data_path) == 0:
        problems.add("empty-shard", str(path))
        return
    folder_index = folders.add(str(data_path))
    used_names: set[str] = set()
    num_before = len(columns.file_names)
    with regular_files.open_file(data_path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        data.madvise(mmap.MADV_SEQUENTIAL)  # a longer read-ahead: every byte is read once
        for frame in tfrecord_bytes.iter_frames(data, path.name, problems):
            try:
                _read_record(data, frame, (folder_index, split), columns, used_names)
            except _UnusableRecord as error:
                kind, reason = error.args
                problems.add(kind, f"{path.name} @ byte {frame.offset:,}, record {frame.number}: {reason}")
    if data_path != path and len(columns.file_names) == num_before:
        del columns.unpacked_bytes[data_path]
        data_path.unlink()  # nothing in it can be used


def _read_record(
    data: mmap.mmap,
    frame: tfrecord_bytes.RecordFrame,
    folder_and_split: tuple[int, int],
    columns: _RecordColumns,
    used_names: set[str],
) -> None:
    """Adds the image and the boxes of a record. Raises _UnusableRecord."""
    record = data[frame.start : frame.stop]
    try:
        example = tfrecord_bytes.Example(record)
        *xyxy, area, labels, texts, crowd, group_of = (example.values(key, kind) for key, kind in OBJECT_KEYS.items())
        sides = [example.values(key, "int64_list") for key in (b"image/height", b"image/width")]
        encoded, filename, source_id = (
            next(iter(example.values(key, "bytes_list")), b"")
            for key in (b"image/encoded", b"image/filename", b"image/source_id")
        )
    except tfrecord_bytes.MalformedExample as error:
        raise _UnusableRecord("not-an-example", str(error)) from error
    num_boxes = len(xyxy[0])
    counts = zip(OBJECT_KEYS, map(len, (*xyxy, area, labels, texts, crowd, group_of)), strict=True)
    needed = {key: count for key, count in counts if count or key in BOX_KEYS}
    if set(needed.values()) - {num_boxes}:
        raise _UnusableRecord("unequal-lists", ", ".join(f"{key.decode()} has {n}" for key, n in needed.items()))
    if not encoded:
        raise _UnusableRecord("record-without-image", "it has no image/encoded")
    start = record.find(encoded[:64])  # searching for all of it takes as long as all the rest
    if not record.startswith(encoded, start):
        start = record.find(encoded)
    height, width = _image_size(sides, encoded)
    for column, values in zip(columns.xyxy, xyxy, strict=True):
        column.extend(values)
    numbers = columns.number_by_pair
    pairs = zip(labels or [NO_LABEL] * num_boxes, texts or [b""] * num_boxes, strict=True)
    columns.pair.extend([numbers.setdefault(pair, len(numbers)) for pair in pairs])
    columns.num_group_boxes += sum(map(bool, group_of))
    zeros = [0] * num_boxes
    columns.crowd.extend([bool(a or b) for a, b in zip(crowd or zeros, group_of or zeros, strict=True)])
    columns.area.extend(area or [math.nan] * num_boxes)
    byte_range = frame.start + start, len(encoded)
    columns.numbers.extend((*folder_and_split, frame.number, num_boxes, *byte_range, height, width))
    columns.source_id.append(source_id)
    columns.file_names.append(_unique_name(filename, frame.number, used_names))
    used_names.add(columns.file_names[-1])


def _image_size(sides: list[Sequence[int]], encoded: bytes) -> tuple[int, int]:
    """Returns height and width, from the lists of the record or else from the image. Raises _UnusableRecord."""
    height, width = (values[0] if len(values) == 1 and 0 < values[0] < 2**31 else 0 for values in sides)
    if height and width and encoded[:3] in MAGIC_BYTES:
        return height, width
    try:
        header_size = parse_header(encoded, "image/encoded").size
    except DataError as error:
        raise _UnusableRecord("record-without-image", error.cause or error.what) from error
    return (height, width) if height and width else header_size


def _unique_name(filename: bytes, record_number: int, used_names: set[str]) -> str:
    """Returns the file name without folders; with the record number if it is empty or already used in the shard."""
    name = base_name(filename.decode(errors="backslashreplace")) or f"record {record_number}"
    while name in used_names:
        stem, suffix = os.path.splitext(name)
        name = f"{stem} (record {record_number}){suffix}"
    return name


def _make_table(
    columns: _RecordColumns, layout: DatasetLayout, folders: list[str], notes: list[str], problems: ProblemCollector
) -> AnnotationTable:
    numbers = np.array(columns.numbers, np.int64).reshape(-1, 8)
    folder_index, split, record_number, num_boxes = numbers[:, :4].T
    image_indices = np.repeat(np.arange(len(numbers)), num_boxes)
    offsets = np.cumsum([0, *num_boxes])
    original_size = numbers[:, 6:].astype(np.int32)

    def describe_box(box_index: int) -> str:
        image_index = int(image_indices[box_index])
        shard = Path(folders[folder_index[image_index]]).name
        number = box_index - int(offsets[image_index]) + 1
        record = f"record {record_number[image_index]} ({columns.file_names[image_index]})"
        return f"{shard}, {record}, object {number}"

    pair_index = np.array(columns.pair, np.int64)
    _, first_boxes, counts = np.unique(pair_index, return_index=True, return_counts=True)
    decoded = ((label, text.decode(errors="backslashreplace")) for label, text in columns.number_by_pair)
    pairs = [LabelTextPair(label, text or None) for label, text in decoded]
    class_names, class_ids, assignments, class_notes = _choose_classes(pairs, layout.metadata_files, layout.root)
    for assignment, first_box, count in zip(assignments, first_boxes.tolist(), counts.tolist(), strict=True):
        if assignment.problem_kind is not None:
            example = f"{describe_box(first_box)}: {assignment.description}"
            problems.add(assignment.problem_kind, example, count)
    labels = np.array([assignment.label for assignment in assignments], np.int32)[pair_index]
    height, width = original_size[image_indices].T.astype(np.float64)
    x1, y1, x2, y2 = (np.array(column, np.float64) for column in columns.xyxy)
    keep = labels != NO_CLASS
    return AnnotationTable(
        class_names=class_names,
        category_ids=class_ids,
        folders=folders,
        folder_index=folder_index.astype(np.int32),
        file_names=columns.file_names,
        split=split.astype(np.int8),
        original_size=original_size,
        image_id=_image_ids(columns.source_id),
        image_index=image_indices[keep],
        boxes=np.stack((x1 * width, y1 * height, x2 * width, y2 * height), axis=1)[keep],
        labels=labels[keep],
        crowd=np.array(columns.crowd, np.bool_)[keep],
        area=np.array(columns.area, np.float64)[keep],
        box_id=(np.arange(len(image_indices)) - offsets[image_indices] + 1)[keep],
        box_id_kind="object",
        byte_range=np.ascontiguousarray(numbers[:, 4:6]),
        num_bad_boxes=np.bincount(image_indices[~keep], minlength=len(numbers)),
        notes=[*notes, *class_notes],
    )


def _image_ids(source_ids: list[bytes]) -> NDArray[np.int64]:
    """Returns [R], the source's ids if all are different whole numbers, else the image indices."""
    image_indices = np.arange(len(source_ids), dtype=np.int64)
    if not all(text.isdigit() and len(text) < 19 for text in source_ids):
        return image_indices
    ids = np.array([int(text) for text in source_ids], np.int64)
    return ids if len(np.unique(ids)) == len(ids) else image_indices


NO_LABEL = -(2**63)
NO_CLASS = -1


class LabelTextPair(NamedTuple):
    """A label and a text that some boxes have in common."""

    label: int
    """NO_LABEL if the record has none."""
    text: str | None


class _Assignment(NamedTuple):
    label: int
    """Index into the class names, or NO_CLASS."""
    problem_kind: str | None = None
    description: str = ""


def _choose_classes(
    pairs: list[LabelTextPair], label_maps: Sequence[Path], root: Path
) -> tuple[list[str], list[int], list[_Assignment], list[str]]:
    """Returns names and ids of the classes of a data set, the class of each pair, and notes. label_maps: those that may
    belong to the records below `root`. Raises DataError if a label map cannot be read or if several fit."""
    chosen, notes = _choose_label_map(pairs, label_maps, root)
    if chosen is not None:
        return chosen.names, chosen.ids, _assign_by_map(pairs, chosen), notes
    if names := sorted({pair.text for pair in pairs if pair.text is not None}):
        index_by_name = {name: class_index for class_index, name in enumerate(names)}
        index_by_label = _labels_of_texts(pairs, index_by_name)
        assignments = _assign(pairs, index_by_label, index_by_name, "no box with a text has this label")
        label_by_index = {index: label for label, index in index_by_label.items() if index is not None}
        is_one_to_one = len(index_by_label) == len(label_by_index) == len(names)
        ids = [label_by_index[k] if is_one_to_one else k + 1 for k in range(len(names))]
        notes.append("no label map: the classes are the texts in the records, sorted")
        return names, ids, assignments, notes
    ids = sorted({pair.label for pair in pairs if pair.label > tfrecord_bytes.BACKGROUND})
    assignments = _assign(pairs, {class_id: k for k, class_id in enumerate(ids)}, {}, "labels begin at 1")
    if ids:
        notes.append(
            "no label map and no texts in the records: the classes are named after their labels;"
            " a label_map.pbtxt next to the records sets their names"
        )
    return [f"class {class_id}" for class_id in ids], ids, assignments, notes


def _choose_label_map(
    pairs: list[LabelTextPair], paths: Sequence[Path], root: Path
) -> tuple[tfrecord_bytes.LabelMap | None, list[str]]:
    """Returns the label map to use, or None, and notes about it."""
    # in a folder next to that of the records, it may belong to another data set
    is_sibling = bool(paths) and paths[0].parent != root.parent and not paths[0].is_relative_to(root)
    distinct: dict[tuple[object, ...], tfrecord_bytes.LabelMap] = {}
    for path in paths:
        with contextlib.suppress(DataError) if is_sibling else contextlib.nullcontext():  # a note tells which is used
            candidate = tfrecord_bytes.read_label_map(path)
            distinct.setdefault((*candidate.ids, *candidate.names, *candidate.index_by_name.items()), candidate)
    label_maps = list(distinct.values())
    fitting = [each for each in label_maps if not any(a.problem_kind for a in _assign_by_map(pairs, each))]
    if len(label_maps) == 1 and not is_sibling:
        fitting = label_maps
    if len(fitting) == 1:
        others = ", ".join(each.path.name for each in label_maps if each is not fitting[0])
        note = f"classes from {fitting[0].path}" + (f"; {others} do not fit the records" if others else "")
        return fitting[0], [note]
    if is_sibling or not label_maps:
        count = f"{len(fitting)} of {len(label_maps)}"
        note = f"label maps in folders next to the records are not used: {count} fit them"
        return None, [note] if label_maps else []
    choices, fit = [each.path for each in label_maps], len(fitting) or "none"
    raise make_error(DataError, "several-label-maps", root, choices=choices, total=len(label_maps), fitting=fit)


def _assign_by_map(pairs: list[LabelTextPair], label_map: tfrecord_bytes.LabelMap) -> list[_Assignment]:
    index_by_id = {class_id: class_index for class_index, class_id in enumerate(label_map.ids)}
    return _assign(pairs, index_by_id, label_map.index_by_name, f"not in {label_map.path.name}", label_map)


def _labels_of_texts(pairs: list[LabelTextPair], index_by_name: Mapping[str, int]) -> dict[int, int | None]:
    """Returns label → index of the name that all boxes with the label have as their text; None if they have several."""
    index_by_label: dict[int, int | None] = {}
    for pair in pairs:
        if pair.text is not None and pair.label > tfrecord_bytes.BACKGROUND:
            class_index = index_by_name[pair.text]
            if index_by_label.setdefault(pair.label, class_index) != class_index:
                index_by_label[pair.label] = None
    return index_by_label


def _assign(
    pairs: list[LabelTextPair],
    index_by_label: Mapping[int, int | None],
    index_by_name: Mapping[str, int],
    reason: str,
    label_map: tfrecord_bytes.LabelMap | None = None,
) -> list[_Assignment]:
    """Returns the class of each pair: that of its text if it has one, else that of its label. reason: why it has none.
    label_map: the source of both; a label and a text that do not belong together are then a problem."""
    assignments = []
    for pair in pairs:
        by_label = index_by_label.get(pair.label)
        by_text = None if pair.text is None else index_by_name.get(pair.text)
        chosen = by_label if by_text is None else by_text
        if chosen is None:
            assignments.append(_unassigned(pair, reason))
        elif label_map is None or pair.text is None or pair.label == NO_LABEL or by_label == by_text:
            assignments.append(_Assignment(chosen))
        else:
            name = "nothing" if by_label is None else repr(label_map.names[by_label])
            text = f"label {pair.label} is {name} in {label_map.path.name}, its text is {pair.text!r}"
            assignments.append(_Assignment(chosen, "label-disagrees", text))
    return assignments


def _unassigned(pair: LabelTextPair, reason: str) -> _Assignment:
    text = "" if pair.text is None else f", text {pair.text!r}"
    if pair.label == NO_LABEL and not text:
        return _Assignment(NO_CLASS, "no-class", "neither a label nor a text")
    if pair.label == tfrecord_bytes.BACKGROUND and not text:
        return _Assignment(NO_CLASS, "no-class", "label 0, which is TensorFlow's background")
    label = "no label" if pair.label == NO_LABEL else f"label {pair.label}"
    return _Assignment(NO_CLASS, "unknown-class", f"{label}{text}: {reason}")


TF_IMAGE_FORMATS = {"jpeg": b"jpeg", "png": b"png", "bmp": b"bmp", "gif": b"gif"}
"""The formats of tf.io.decode_image → image/format."""


class TfRecordWriter(DatasetWriter):
    """`<split>.record` or numbered shards, and `label_map.pbtxt`. Labels start at 1. Corners are normalized and within
    0 … 1; the API stops at others. The keys are those of object_detection/dataset_tools/create_coco_tf_record.py."""

    box_orientation = "stored"  # TensorFlow ignores EXIF

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        class_names = target.class_names
        if len(set(class_names)) < len(class_names) or "" in class_names:
            raise make_error(DataError, "tfrecord-class-names", names=", ".join(map(repr, class_names)))
        self._target = target
        self._num_written = dict.fromkeys(target.max_images, 0)
        self._files: dict[str, list[Path]] = {split: [] for split in target.max_images}
        self._shard: tuple[str, int] | None = None
        self._open_shard = contextlib.ExitStack()

    def add(self, image: AnnotatedImage) -> None:
        if image.image_format not in TF_IMAGE_FORMATS:
            raise UnsupportedImage(f"it is {image.image_format}, TensorFlow decodes {', '.join(TF_IMAGE_FORMATS)}")
        height, width = image.size
        xyxy = self.normalized_boxes(image).astype(np.float32).T
        values: dict[str, tfrecord_bytes.Values] = {
            "image/height": [height],
            "image/width": [width],
            "image/filename": [image.name.encode()],
            "image/source_id": [str(image.image_id).encode()],
            "image/key/sha256": [hashlib.sha256(image.data).hexdigest().encode()],
            "image/encoded": [image.data],
            "image/format": [TF_IMAGE_FORMATS[image.image_format]],
            "image/object/class/text": [self.class_names[label].encode() for label in image.labels.tolist()],
            "image/object/class/label": [label + 1 for label in image.labels.tolist()],
            "image/object/is_crowd": list(map(int, image.crowd.tolist())),
            "image/object/area": image.area.astype(np.float32),
        }
        for name, column in zip(("xmin", "ymin", "xmax", "ymax"), xyxy, strict=True):
            values[f"image/object/bbox/{name}"] = column
        # images come in order, each split in equal parts
        split, files = image.split, self._files[image.split]
        shard = split, self._num_written[split] * self._target.shards // max(1, self._target.max_images[split])
        if shard != self._shard:
            self._shard = shard
            files.append(self.folder / f"{split}.record-{len(files):05d}")
            self._open_shard.close()
            self._file = self._open_shard.enter_context(files[-1].open("xb"))
        tfrecord_bytes.write_record(self._file, tfrecord_bytes.encode_example(values))
        self._num_written[split] += 1

    def finish(self) -> None:
        self._open_shard.close()
        for split, files in self._files.items():
            for path in files:  # the number of shards is known only now, because images may have been left out
                is_single = self._target.shards == 1
                path.rename(self.folder / f"{split}.record" if is_single else Path(f"{path}-of-{len(files):05d}"))
        (self.folder / "label_map.pbtxt").write_text(tfrecord_bytes.label_map_text(self.class_names), encoding="utf-8")
