"""WebDataset: tar archives in which files with the same name up to its first dot are a sample, an image and its boxes.

Recognized: *.tar in one folder, in its folder `shards/` or `data/`, or in `train/`, `valid/`, `test/`; one archive. The
split is in the name of the archive or of that folder. Shards that `stoker data pack` made come with an index
(an Arrow file with a row per image), and are then not scanned. Images are not copied: the table has the byte range of
each. Format: https://github.com/webdataset/webdataset. Not here: which annotations are understood (`shards.py`), making
shards (`stoker/data/packing.py`).
"""

import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from stoker.data import index_cache
from stoker.data.formats.folders import IMAGE_SUFFIXES, file_part
from stoker.data.formats.objects import LAYOUTS
from stoker.data.formats.shards import (
    MAX_ANNOTATION_BYTES,
    ShardSamples,
    layout_of_shards,
    make_table,
    map_shards,
    open_shard,
    recognize_shards,
)
from stoker.data.formats.tables import SPLITS, AnnotationTable, DatasetLayout, SplitFiles
from stoker.data.images import source
from stoker.data.images.headers import ReadAt
from stoker.data.validation.problems import ProblemCollector
from stoker_watch import regular_files
from stoker_watch.errors import DataError, StokerError, make_error


class Member(NamedTuple):
    name: str
    start: int
    length: int


INDEX_FILE = source.SHARD_INDEX
SUFFIXES = (".tar", INDEX_FILE)
ANNOTATION_SUFFIXES = ("json", "instances.json", "annotations.json", "annotation.json", "bbox.json", "boxes.json")
"""Of a sample, the most likely first: `instances.json` is that of WebDataset's own COCO example."""
PROBED_FILES = 8
"""First files of an archive that are looked at to recognize it."""


def recognize(path: Path) -> DatasetLayout | None:
    """Returns the WebDataset in a folder or in its split folders, of an archive, or of an index; None if there is none.
    Raises DataError for samples without boxes."""
    folder = path if path.is_dir() else path.parent
    if path.name == INDEX_FILE or (path == folder and (folder / INDEX_FILE).is_file()):
        parts = [file_part(folder / shard.name, shard.split) for shard in read_info(folder / INDEX_FILE).shards]
        layout = layout_of_shards("webdataset", "packed WebDataset", folder, parts, ())
        return replace(layout, parts=tuple(parts), metadata_files=(folder / INDEX_FILE,))
    if path == folder and (folder / PLAN_FILE).is_file():  # only a part of the data set would be read
        raise make_error(DataError, "packing-unfinished", folder)
    return recognize_shards(
        path, "webdataset", "WebDataset", dir_names=("shards", "data"), suffix=".tar", has_samples=_has_samples
    )


def read(layout: DatasetLayout, problems: ProblemCollector) -> AnnotationTable:
    """Reads the index, or the annotations of all shards. Raises DataError if no sample is usable."""
    if layout.metadata_files:
        return _read_packed(layout)
    shards = map_shards(_read_shard, layout.parts, path=layout.root)
    return make_table(layout, shards, problems, format_name="WebDataset")


def _has_samples(path: Path) -> bool:
    """Returns whether an archive begins with an image and annotations of the same name. Raises DataError for an image
    with something else: it is a WebDataset of another task."""
    try:
        with open_shard(path) as (read, total_bytes):
            members = list(islice(iter_members(read, total_bytes), PROBED_FILES))
    except (DamagedArchive, OSError, StokerError):
        return False
    _, first = next(_iter_samples(iter(members)), ("", []))
    suffixes = [_split_name(member.name)[1] for member in first]
    if _image_of(first) is None or len(suffixes) < 2:
        return False
    if _annotations_of(first) is not None:
        return True
    listed = ", ".join(f".{suffix}" for suffix in suffixes)
    place, choices = f"{path}: {first[0].name}", [f".{suffix}" for suffix in ANNOTATION_SUFFIXES]
    raise make_error(DataError, "webdataset-without-boxes", place, choices=choices, listed=listed, layout=LAYOUTS[0])


def _read_shard(part: SplitFiles) -> ShardSamples:
    path = part.annotations
    samples = ShardSamples(path, part.split_index)
    try:
        with open_shard(path) as (read, total_bytes):
            if total_bytes == 0:
                samples.problems.append(("empty-shard", str(path)))
                return samples
            try:
                for key, members in _iter_samples(iter_members(read, total_bytes)):
                    _read_sample(samples, key, members, read)
            except DamagedArchive as error:
                kind, reason = error.args
                samples.problems.append((kind, f"{path.name}: {reason}"))
    except OSError as error:
        samples.problems.append(("damaged-shard", f"{path}: {error.strerror or error}"))
    return samples


def _read_sample(samples: ShardSamples, key: str, members: list[Member], read: ReadAt) -> None:
    shard = samples.path.name
    image, annotations = _image_of(members), _annotations_of(members)
    if image is None:
        if annotations is not None:
            samples.problems.append(("record-without-image", f"{shard}: {key}"))
        return
    if annotations is None:
        samples.problems.append(("no-annotation-file", f"{shard}: {image.name}"))
        return
    try:
        if annotations.length > MAX_ANNOTATION_BYTES:
            raise ValueError(f"it has {annotations.length:,} bytes")
        content = msgspec.json.decode(read(annotations.start, annotations.length))
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        samples.problems.append(("unreadable-annotations", f"{shard}: {annotations.name}: {error}"))
        return
    samples.add(image.name, read, image.start, image.length, content)


def _iter_samples(members: Iterator[Member]) -> Iterator[tuple[str, list[Member]]]:
    """(key, files) of each sample: its files follow each other. Raises DamagedArchive after the samples before it."""
    damage: list[DamagedArchive] = []

    def iter_undamaged() -> Iterator[Member]:
        try:
            # not those that macOS adds: `./._0.png` before `./0.png`
            yield from (member for member in members if not member.name.rpartition("/")[2].startswith("."))
        except DamagedArchive as error:
            damage.append(error)

    for key, files in groupby(iter_undamaged(), lambda member: _split_name(member.name)[0]):
        yield key, list(files)
    for error in damage:
        raise error


def _split_name(name: str) -> tuple[str, str]:
    """Returns the key of a sample, up to the first dot after the folders, and the rest, in lower case."""
    folder, slash, file = name.rpartition("/")
    stem, _, suffix = file.partition(".")
    return folder + slash + stem, suffix.lower()


def _image_of(members: list[Member]) -> Member | None:
    return next((m for m in members if f".{_split_name(m.name)[1]}".endswith(IMAGE_SUFFIXES)), None)


def _annotations_of(members: list[Member]) -> Member | None:
    by_suffix = {_split_name(member.name)[1]: member for member in members}
    return next((by_suffix[suffix] for suffix in ANNOTATION_SUFFIXES if suffix in by_suffix), None)


BLOCK = 512
END = bytes(2 * BLOCK)
"""What ends an archive."""
MAX_NAME_BYTES = 1 << 16
"""Longest name or pax header that is read."""


class DamagedArchive(Exception):
    """The archive cannot be read from here on: (kind of problem, reason)."""


def iter_members(read: ReadAt, total_bytes: int) -> Iterator[Member]:
    """Yields the regular files, in order. Raises DamagedArchive after those before the damage."""
    offset, pax, long_name = 0, dict[str, str](), ""
    while offset < total_bytes:
        block = read(offset, BLOCK)
        if len(block) < BLOCK:
            raise DamagedArchive("truncated-shard", f"it ends at byte {total_bytes:,}, within a header")
        if not any(block):
            return
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise DamagedArchive("damaged-shard", f"byte {offset:,}: {error}") from error
        start, length = offset + BLOCK, header.size
        if header.type in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
            if not 0 <= length <= MAX_NAME_BYTES:
                raise DamagedArchive("damaged-shard", f"byte {offset:,}: a header of {length:,} bytes")
            content = read(start, length)
            if header.type == tarfile.XHDTYPE:
                pax = _parse_pax(content, offset)
            elif header.type == tarfile.GNUTYPE_LONGNAME:
                long_name = content.rstrip(b"\0").decode("utf-8", "surrogateescape")
        else:
            if re.fullmatch(r"[0-9]{1,18}", pax.get("size", "")):
                length = int(pax["size"])
            if length < 0 or start + length > total_bytes:
                raise DamagedArchive("truncated-shard", f"it ends at byte {total_bytes:,}, within {header.name}")
            if header.isreg():
                yield Member(pax.get("path") or long_name or header.name, start, length)
            elif header.type not in tarfile.SUPPORTED_TYPES:
                raise DamagedArchive("damaged-shard", f"byte {offset:,}: a file of the unknown type {header.type!r}")
            else:
                length = 0  # a folder or a link has no content
            pax, long_name = {}, ""
        offset = start + padded(length)


def _parse_pax(content: bytes, offset: int) -> dict[str, str]:
    """Parses records "LENGTH KEY=VALUE\\n"."""
    values: dict[str, str] = {}
    while content:
        digits, _, _ = content.partition(b" ")
        if not re.fullmatch(rb"[0-9]{1,5}", digits) or not len(digits) < int(digits) <= len(content):
            raise DamagedArchive("damaged-shard", f"byte {offset:,}: a pax header that cannot be read")
        key, _, value = content[len(digits) + 1 : int(digits) - 1].partition(b"=")
        values[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        content = content[int(digits) :]
    return values


def padded(length: int) -> int:
    """Returns the bytes that a file of `length` bytes takes after its header."""
    return -(-length // BLOCK) * BLOCK


def tar_header(name: str, length: int) -> bytes:
    """The header of a file: the same bytes wherever and whenever it is written. The name must be short ASCII."""
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = length, 0o644, 0
    return info.tobuf(tarfile.USTAR_FORMAT)


VERSION = 1
WORK_DIR = ".stoker-pack"
"""The folder of plan and records next to the shards, while they are made."""
PLAN_FILE = f"{WORK_DIR}/plan.json"
METADATA_KEY = b"stoker"
_ARROW_START = b"ARROW1\0\0"
"""Before the messages of an Arrow file: schema, record batch, and their places once more."""
SCHEMA = pa.schema(
    [
        ("name", pa.large_string()),  # file name in the source
        ("split", pa.int8()),  # index into train, val, test
        ("image_id", pa.int64()),
        ("shard", pa.int32()),  # index into the shards of the metadata
        ("offset", pa.int64()),  # first byte of the encoded image in its shard
        ("length", pa.int64()),
        ("height", pa.int32()),
        ("width", pa.int32()),
        *index_cache.BOX_FIELDS,
    ]
)


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    split: str
    num_images: int
    size_bytes: int
    sha256: str


class PackedInfo(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    plan: str
    """Identifies source and settings: `packing.PackPlan.id`."""
    class_names: tuple[str, ...]
    category_ids: tuple[int, ...]
    shards: tuple[Shard, ...]
    num_skipped: int
    """Images of the source that are in no shard, because they cannot be read."""
    source_bytes: int
    """Of the images, in the source."""


def encode_index(info: PackedInfo, table: AnnotationTable) -> bytes:
    """The content of the index file. table: `folder_index` numbers the shards, and every image has a byte range."""
    assert table.byte_range is not None
    columns = [
        pa.array(table.file_names, pa.large_string()),
        *map(pa.array, (table.split, table.image_id, table.folder_index)),
        *(pa.array(np.ascontiguousarray(column)) for column in (*table.byte_range.T, *table.original_size.T)),
        *index_cache.box_columns(table),
    ]
    return bytes(index_cache.encode_columns(columns, SCHEMA.with_metadata({METADATA_KEY: msgspec.json.encode(info)})))


def read_info(path: Path) -> PackedInfo:
    """Returns the metadata of an index. Raises DataError."""
    return parse_index(regular_files.read_bytes(path, max_bytes=regular_files.MAX_ANNOTATION_BYTES), path)[0]


def _read_packed(layout: DatasetLayout) -> AnnotationTable:
    """The table of all images. Raises DataError for an index that is damaged, and for shards that are not as packed."""
    path = layout.metadata_files[0]
    info, batch = parse_index(regular_files.read_bytes(path, max_bytes=regular_files.MAX_ANNOTATION_BYTES), path)
    wrong = [f"{shard.name} {text}" for shard, text in lost_shards(path.parent, info.shards)]
    if wrong:  # a lost validation shard would otherwise be replaced by training images
        cause = "; ".join(wrong[:3]) + ("; …" if len(wrong) > 3 else "")
        count, total = len(wrong), len(info.shards)
        raise make_error(DataError, "lost-packed-shards", path.parent, cause=cause, count=count, total=total)
    skipped = f"{info.num_skipped:,} images of the source could not be read when it was packed"
    return _to_table(batch, info, path, [*layout.notes, *([skipped] if info.num_skipped else [])])


def lost_shards(folder: Path, shards: Sequence[Shard]) -> list[tuple[Shard, str]]:
    """The shards that do not exist or have another size than they were packed with, and what is wrong, a clause."""
    wrong = []
    for shard in shards:
        try:
            size_bytes = (folder / shard.name).stat().st_size
        except OSError:
            wrong.append((shard, f"with {shard.num_images:,} images does not exist"))
            continue
        if size_bytes != shard.size_bytes:
            wrong.append((shard, f"has {size_bytes:,} bytes instead of {shard.size_bytes:,}"))
    return wrong


def parse_index(data: bytes, path: Path | str) -> tuple[PackedInfo, pa.RecordBatch]:
    """Returns metadata and columns of an index that was read. Raises DataError."""
    try:
        with pa.ipc.open_file(data) as reader:  # only its end: a batch would be unpacked when it is read
            num_batches = reader.num_record_batches
        messages = pa.ipc.MessageReader.open_stream(pa.py_buffer(data).slice(len(_ARROW_START)))
        schema, message = pa.ipc.read_schema(next(messages)), next(messages)
        info = msgspec.json.decode((schema.metadata or {}).get(METADATA_KEY, b""), type=PackedInfo)
        if info.version != VERSION:
            raise _damaged(path, f"it has version {info.version}; this stoker reads {VERSION}", "update stoker")
        if not schema.equals(SCHEMA) or num_batches != 1:
            raise _damaged(path, "its columns are not those of an index of shards")
        if _is_compressed(message.metadata.to_pybytes()):
            raise _damaged(path, "its columns are compressed; stoker writes none, and they may expand without bounds")
        batch = pa.ipc.read_record_batch(message, schema)
        batch.validate(full=True)
    except (pa.ArrowException, msgspec.MsgspecError, ValueError, KeyError, OSError, StopIteration) as error:
        raise _damaged(path, str(error).splitlines()[0] if str(error) else type(error).__name__) from error
    return info, batch


def _is_compressed(message: bytes) -> bool:
    """Returns whether the FlatBuffer of a record batch names a compression: field 3 of field 2 of the message, as in
    https://github.com/apache/arrow/blob/main/format/Message.fbs. pyarrow has verified its offsets."""

    def number(at: int, size: int, *, signed: bool = False) -> int:
        return int.from_bytes(message[at : at + size], "little", signed=signed)

    def field(table: int, index: int) -> int:
        """Returns the position of a field of a table; 0: it is not there."""
        fields = table - number(table, 4, signed=True)
        is_there = 4 + 2 * index < number(fields, 2)
        offset = number(fields + 4 + 2 * index, 2) if is_there else 0
        return table + offset if offset else 0

    header = field(number(0, 4), 2)
    return header == 0 or field(header + number(header, 4), 3) != 0


def _to_table(batch: pa.RecordBatch, info: PackedInfo, path: Path, notes: list[str]) -> AnnotationTable:
    """Returns the columns, checked so that nothing reads outside a shard or an array."""

    def pair(first: str, second: str) -> NDArray[np.int64]:
        return np.stack((np.asarray(batch[first]), np.asarray(batch[second])), axis=1).astype(np.int64)

    lists = [batch[name] for name in ("boxes", "labels", "crowd", "area")]
    offsets = np.asarray(lists[0].offsets) if batch.num_rows else np.zeros(1, np.int64)
    if batch.num_rows and any(not np.array_equal(np.asarray(each.offsets), offsets) for each in lists):
        raise _damaged(path, "its lists of boxes and labels differ in length")
    own, num_boxes = slice(int(offsets[0]), int(offsets[-1])), np.diff(offsets)
    table = AnnotationTable(
        class_names=list(info.class_names),
        category_ids=list(info.category_ids),
        folders=[shard.name for shard in info.shards],
        folder_index=np.asarray(batch["shard"], np.int32),
        file_names=batch["name"].to_pylist(),
        split=np.asarray(batch["split"], np.int8),
        original_size=pair("height", "width").astype(np.int32),
        image_id=np.asarray(batch["image_id"], np.int64),
        image_index=np.repeat(np.arange(batch.num_rows), num_boxes),
        boxes=np.asarray(lists[0].values.values).reshape(-1, 4)[own].astype(np.float64),
        labels=np.asarray(lists[1].values)[own],
        crowd=np.asarray(lists[2].values)[own] != 0,
        area=np.asarray(lists[3].values)[own],
        box_id=np.arange(own.stop - own.start) - np.repeat(offsets[:-1] - own.start, num_boxes) + 1,
        box_id_kind="object",
        byte_range=pair("offset", "length"),
        notes=notes,
    )
    names = table.folders
    sizes = np.array([shard.size_bytes for shard in info.shards], np.int64)
    start, length = pair("offset", "length").T
    for is_right, cause in (
        (all(name and name == Path(name).name and name not in (".", "..") for name in names), "a shard is not a name"),
        (all(shard.split in SPLITS for shard in info.shards), f"a split is not one of {', '.join(SPLITS)}"),
        (len(info.category_ids) == len(info.class_names), "classes and category ids differ in number"),
        (all(name and "/" not in name and "\0" not in name for name in table.file_names), "an image name is a path"),
        (index_cache.in_range(table.folder_index, len(names)), "an image is in a shard that is not listed"),
        (index_cache.in_range(table.split, len(SPLITS)), "an image is in a split that does not exist"),
        (index_cache.in_range(table.labels, len(info.class_names)), "a label is not that of a class"),
    ):
        if not is_right:
            raise _damaged(path, cause)
    if len(start) and ((start < 0) | (length <= 0) | (start > sizes[table.folder_index] - length)).any():
        raise _damaged(path, "an image lies outside its shard")
    return table


def _damaged(path: Path | str, cause: str, fix: str = "copy it again, or pack the data set again") -> DataError:
    return make_error(DataError, "packed-index-unreadable", path, cause=cause, repair=fix)
