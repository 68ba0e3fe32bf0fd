"""MDS, the shards of MosaicML's streaming: `index.json` with *.mds files, each sample a row of columns.

Recognized: a folder with index.json, or such folders named `train`, `val`, `test`. The image is a column of encoding
`bytes`, `jpeg` or `png`; boxes and classes are columns of `ndarray` or `json`. Images are not copied: the table has the
byte range of each. Compressed shards have no byte ranges, and pickled columns run code of others when they are read, so
both are refused. Format: https://github.com/mosaicml/streaming, docs/source/preparing_datasets/dataset_format.md and
streaming/base/format/mds/. Not here: the layouts of boxes (`shards.py`).
"""

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from stoker.data.formats.folders import check_unannotated_splits, file_part, iter_split_dirs, read_head, split_from_name
from stoker.data.formats.images import read_json
from stoker.data.formats.objects import CLASS_LIST_KEYS, CORNERS_KEYS, EXTENT_KEYS, LIST_KEYS, NAME_OF_FILE_KEYS
from stoker.data.formats.shards import MAX_ANNOTATION_BYTES, ShardSamples, make_table, map_shards, open_shard
from stoker.data.formats.tables import AnnotationTable, DatasetLayout
from stoker.data.images.headers import ReadAt
from stoker.data.validation.problems import ProblemCollector
from stoker.errors import DataError, make_error

INDEX_FILE = "index.json"
IMAGE_COLUMNS = ("image", "img", "jpg", "jpeg", "png", "photo")
IMAGE_ENCODINGS = ("bytes", "jpeg", "png")
SIZE_COLUMNS = {"height": "height", "htot": "height", "width": "width", "wtot": "width"}
"""Columns of the image size → key of `annotated_size`; htot and wtot are those of MosaicML's COCO."""
ANNOTATION_COLUMNS = (*LIST_KEYS, "annotation", "target", "targets")
"""Columns of JSON that have boxes and classes together."""
MAX_SAMPLES = 1 << 27
ARRAY_TYPES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
    64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip
"""The number of a value type in an array (streaming/base/format/mds/encodings.py)."""
SCALARS = {"int": "int64", **{name: name for name in ARRAY_TYPES.values()}}
_FORMAT = re.compile(rb'"format"\s*:\s*"mds"')


class RawData(msgspec.Struct):
    basename: str
    bytes: int = 0


class ShardInfo(msgspec.Struct):
    """An entry of index.json."""

    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[int | None]
    raw_data: RawData
    samples: int
    format: str = "mds"
    compression: str | None = None
    zip_data: RawData | None = None


class MdsIndex(msgspec.Struct):
    shards: list[ShardInfo]
    version: int = 2


def recognize(path: Path) -> DatasetLayout | None:
    """The MDS data set in a folder or in its split folders, or of an index.json; None if there is none."""
    file = path / INDEX_FILE if path.is_dir() else path
    if _is_mds(file):
        part = file_part(file, split_from_name(file.parent.name))
        return DatasetLayout(format="mds", description="MDS", root=file.parent, parts=(part,))
    files = [(split, own / INDEX_FILE) for split, own in (iter_split_dirs(path) if path.is_dir() else ())]
    parts = tuple(file_part(own, split) for split, own in files if _is_mds(own))
    if not parts:
        return None
    notes = tuple(check_unannotated_splits(path, parts))
    return DatasetLayout(format="mds", description="MDS per split folder", root=path, parts=parts, notes=notes)


def read(layout: DatasetLayout, problems: ProblemCollector) -> AnnotationTable:
    """Reads all shards. Raises DataError for shards or columns that cannot be read, or if no sample is usable."""
    shards = [
        (part.annotations.parent, part.split_index, info, _choose_columns(info, part.annotations))
        for part in layout.parts
        for info in _read_index(part.annotations).shards
    ]
    read_shards = map_shards(lambda shard: _read_shard(*shard), shards, path=layout.root)
    return make_table(layout, read_shards, problems, format_name="MDS")


def is_mds_head(path: Path, head: bytes) -> bool:
    """Whether a file is an index of MDS, by its name and first bytes."""
    return path.name == INDEX_FILE and _FORMAT.search(head) is not None


def _is_mds(path: Path) -> bool:
    return path.is_file() and is_mds_head(path, read_head(path))


def _read_index(path: Path) -> MdsIndex:
    index = read_json(path, MdsIndex, what="The index of the MDS shards cannot be read.", fix="write it again")
    names = set[str]()
    for shard in index.shards:
        name = shard.raw_data.basename
        if name in names or any(size is not None and size < 0 for size in shard.column_sizes):
            raise make_error(DataError, "mds-wrong-shard", path, name=name)
        names.add(name)
        if shard.compression or shard.zip_data is not None:
            raise make_error(DataError, "mds-compressed", path, name=name, compression=shard.compression or "unknown")
        if name != Path(name).name or name in ("", ".", ".."):
            raise DataError("An MDS shard is outside its folder.", location=path, cause=f"its name is {name!r}")
        if not len(shard.column_names) == len(shard.column_encodings) == len(shard.column_sizes) or index.version != 2:
            raise make_error(DataError, "mds-wrong-version", path, version=index.version)
    return index


def _choose_columns(info: ShardInfo, path: Path) -> tuple[int, list[int]]:
    """The columns that are used: that of the image, the others. Raises DataError if there is no image, or no boxes with
    classes."""
    columns = list(zip(info.column_names, info.column_encodings, strict=True))
    encodings = {name: text.partition(":")[0] for name, text in columns}
    image = next((name for name in IMAGE_COLUMNS if encodings.get(name) in IMAGE_ENCODINGS), None)
    known = {*ANNOTATION_COLUMNS, *CORNERS_KEYS, *EXTENT_KEYS, *CLASS_LIST_KEYS}
    wanted = [name for name in encodings if name != image and (_plain(name) in known or name in SIZE_COLUMNS)]
    pickled = [name for name in wanted if encodings[name] == "pkl"]
    usable = [name for name in wanted if encodings[name] in ("json", "ndarray", *SCALARS)]
    usable += [name for name in encodings if name in NAME_OF_FILE_KEYS and encodings[name] == "str"]
    lists = {_plain(name) for name in usable if encodings[name] in ("json", "ndarray")}
    has_boxes = lists & {*ANNOTATION_COLUMNS} or (lists & {*CORNERS_KEYS, *EXTENT_KEYS} and lists & {*CLASS_LIST_KEYS})
    if image is not None and has_boxes and not pickled:
        return info.column_names.index(image), list(map(info.column_names.index, usable))
    listed = ", ".join(f"{name}: {text}" for name, text in columns)
    if image is None:
        choices = [f"{name}: {encoding}" for name in IMAGE_COLUMNS[:2] for encoding in IMAGE_ENCODINGS]
        raise make_error(DataError, "mds-without-images", path, choices=choices, columns=listed)
    choices = ["boxes and labels (x1, y1, x2, y2)", "bboxes and labels (x, y, width, height)", "annotations"]
    if pickled:
        raise make_error(DataError, "mds-pickled", path, choices=choices, columns=listed)
    raise make_error(DataError, "mds-without-boxes", path, choices=choices, columns=listed)


def _plain(name: str) -> str:
    return "labels" if name == "bbox_labels" else name


def _read_shard(folder: Path, split: int, info: ShardInfo, columns: tuple[int, list[int]]) -> ShardSamples:
    path = folder / info.raw_data.basename
    samples = ShardSamples(path, split)
    try:
        with open_shard(path) as (read, total_bytes):
            if info.raw_data.bytes and total_bytes != info.raw_data.bytes:
                text = f"{path.name}: {total_bytes:,} bytes instead of {info.raw_data.bytes:,}"
                is_short = total_bytes < info.raw_data.bytes
                samples.problems.append(("truncated-shard" if is_short else "damaged-shard", text))
            _read_samples(samples, info, *columns, read, total_bytes)
    except FileNotFoundError:
        samples.problems.append(("missing-shard", f"{path}: {info.samples:,} images"))
    except OSError as error:
        samples.problems.append(("damaged-shard", f"{path}: {error.strerror or error}"))
    return samples


def _read_samples(
    samples: ShardSamples, info: ShardInfo, image: int, others: list[int], read: ReadAt, total_bytes: int
) -> None:
    """A shard is the number of samples n, n + 1 offsets, the configuration, and the samples."""
    name = samples.path.name
    count = int.from_bytes(read(0, 4), "little")
    if not 0 < count <= MAX_SAMPLES or 4 * (count + 2) > total_bytes:
        samples.problems.append(("damaged-shard", f"{name}: it says that it has {count:,} samples"))
        return
    table = read(4, 4 * (count + 1))
    offsets = np.frombuffer(table, "<u4", len(table) // 4).tolist()
    last_end = 0  # samples that share bytes could each have the whole shard
    for number, (begin, end) in enumerate(pairwise(offsets)):
        place = f"{name}, sample {number}"
        if not last_end <= begin < end <= total_bytes:
            samples.problems.append(("damaged-record", f"{place}: bytes {begin:,} to {end:,} of {total_bytes:,}"))
            continue
        last_end = end
        try:
            ranges = _column_ranges(info, read, begin, end)
            content = _read_annotations(info, others, ranges, read)
        except (ValueError, RecursionError, msgspec.MsgspecError) as error:
            samples.problems.append(("unreadable-annotations", f"{place}: {error}"))
            continue
        suffix = "png" if info.column_encodings[image].partition(":")[0] == "png" else "jpg"
        samples.add(f"{number:06d}.{suffix}", read, *ranges[image], content)


def _column_ranges(info: ShardInfo, read: ReadAt, begin: int, end: int) -> list[tuple[int, int]]:
    """First byte and length of each column of a sample: the sizes of those of variable size come first."""
    num_variable = sum(size is None for size in info.column_sizes)
    head = read(begin, 4 * num_variable)
    if len(head) < 4 * num_variable:
        raise ValueError("it ends within its sizes")
    sizes = iter(np.frombuffer(head, "<u4").tolist())
    position, ranges = begin + 4 * num_variable, []
    for fixed in info.column_sizes:
        length = next(sizes) if fixed is None else fixed
        ranges.append((position, length))
        position += length
    if position != end:
        raise ValueError(f"its columns have {position - begin:,} bytes, it has {end - begin:,}")
    return ranges


def _read_annotations(info: ShardInfo, used: Sequence[int], ranges: Sequence[tuple[int, int]], read: ReadAt) -> Any:
    """The columns besides the image, as `shards.read_boxes` expects them."""
    content: dict[str, Any] = {}
    for k in used:
        start, length = ranges[k]
        if length > MAX_ANNOTATION_BYTES:
            raise ValueError(f"{info.column_names[k]} has {length:,} bytes")
        name = info.column_names[k]
        content[SIZE_COLUMNS.get(name, _plain(name))] = _decode(info.column_encodings[k], read(start, length))
    return next((content[key] for key in ("annotation", "target", "targets") if key in content), content)


def _decode(encoding: str, data: bytes) -> Any:
    kind, _, arguments = encoding.partition(":")
    if kind == "json":
        return msgspec.json.decode(data)
    if kind == "str":
        return data.decode()
    if kind in SCALARS:
        values = np.frombuffer(data, np.dtype(SCALARS[kind]).newbyteorder("<"))
        if len(values) != 1:
            raise ValueError(f"a value of encoding {encoding} has {len(data):,} bytes")
        return values[0].item()
    return _decode_array(arguments, data)


def _decode_array(arguments: str, data: bytes) -> list[Any]:
    """ndarray[:dtype[:shape]]: what is not in the encoding precedes the values, as one byte for the type, and one for
    the number of axes and the width of the lengths, which follow."""
    dtype_name, _, shape_text = arguments.partition(":")
    try:
        if not dtype_name:
            dtype_name, data = ARRAY_TYPES[data[0]], data[1:]
        if shape_text:
            shape = tuple(int(side) for side in shape_text.split(","))
        else:
            axes, width = data[0] >> 2, 1 << (data[0] & 3)
            shape = tuple(np.frombuffer(data[1 : 1 + axes * width], f"<u{width}").tolist())
            data = data[1 + axes * width :]
        values = np.frombuffer(data, np.dtype(SCALARS[dtype_name]).newbyteorder("<"))
    except (IndexError, KeyError) as error:
        raise ValueError(f"an array of encoding ndarray:{arguments} that cannot be read") from error
    if math.prod(shape) != len(values):
        raise ValueError(f"an array of {len(values):,} values has the shape {shape}")
    rows: list[Any] = values.reshape(shape).tolist()
    return rows
