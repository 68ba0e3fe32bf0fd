"""`stoker data pack`: writes a data set as WebDataset shards of about equal size, with an index.

A plan says which image is in which shard, from the index of the source alone, so each shard can be made by any process,
again, with the same bytes. A finished shard has a record next to it; after a kill, those that have one are kept. The
index is written last and replaces plan and records. Training images are put into the shards in a random order that is
always the same, as neighbors in a source are often alike. Rows of the index keep the order of the source.

Not here: what images training would skip and other formats (`convert.py`).
"""

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import numpy as np
import simplejpeg
from numpy.typing import NDArray

from stoker.data import index_digest
from stoker.data.convert import read_image
from stoker.data.formats.coco import coco_annotations, coco_category_ids
from stoker.data.formats.folders import SUFFIXES
from stoker.data.formats.images import map_in_threads
from stoker.data.formats.tables import SPLITS, AnnotationTable, UnsupportedImage
from stoker.data.formats.webdataset import (
    BLOCK,
    END,
    INDEX_FILE,
    PLAN_FILE,
    VERSION,
    WORK_DIR,
    PackedInfo,
    Shard,
    encode_index,
    padded,
    parse_index,
    tar_header,
)
from stoker.data.images import source as image_source
from stoker.data.images.decode import decode_resized
from stoker.data.images.headers import Header
from stoker.data.index import Index, boxes_of
from stoker_watch import regular_files
from stoker_watch.errors import DataError, StokerError, UsageError, make_error, writing
from stoker_watch.storage.local_files import write_atomic
from stoker_watch.storage.uri import StorageUri, expand_variables, is_uri, parse_uri

DEFAULT_SHARD_MIB = 64
DEFAULT_QUALITY = 90
ORDER_SEED = 0
UNKNOWN_BYTES = 1 << 17
"""Assumed size of an image on a web server, whose size is not known before it is read."""


class PackOptions(msgspec.Struct, frozen=True, kw_only=True):
    shard_mib: int = DEFAULT_SHARD_MIB
    image_size: tuple[int, int] | None = None
    """Height and width into which larger images are made to fit; None: images are copied byte for byte."""
    quality: int = DEFAULT_QUALITY
    """Of JPEG, where images are encoded again."""


class PlannedShard(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    split: str
    rows: tuple[int, ...]
    """Rows of the source's index, in the order in which they are stored."""


class PackPlan(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    """Changes with the images, boxes and classes of the source, and with the options."""
    options: PackOptions
    shards: tuple[PlannedShard, ...]


class PackedRow(msgspec.Struct, frozen=True, array_like=True):
    row: int
    offset: int
    length: int
    size: tuple[int, int]
    """Height and width of the stored image, as boxes refer to it."""
    source_size: tuple[int, int]


class ShardRecord(msgspec.Struct, frozen=True, kw_only=True):
    shard: Shard
    images: tuple[PackedRow, ...]
    skipped: tuple[tuple[int, str], ...]
    """(row, reason)."""
    num_encoded: int
    source_bytes: int


@dataclass(frozen=True, kw_only=True)
class PackResult:
    destination: str
    was_packed: bool
    """Everything was there already, and nothing was written."""
    num_kept: int
    """Shards that an earlier start had finished."""
    info: PackedInfo
    num_encoded: int = 0
    skipped: tuple[tuple[str, str], ...] = ()
    """(image, reason)."""

    @property
    def num_images(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for shard in self.info.shards:
            counts[shard.split] = counts.get(shard.split, 0) + shard.num_images
        return counts


WRITABLE_SCHEMES = ("gs", "s3")


class _Folder:
    """Names are relative, with slashes. Every file is there as a whole or not at all."""

    def __init__(self, path: Path) -> None:
        self.path, self.text = path, str(path)

    def sizes(self) -> dict[str, int]:
        """Returns the bytes of every file, by its name."""
        if not self.path.exists():
            return {}
        if not self.path.is_dir():
            raise UsageError(f"{self.text!r} is a file.", fix="name a folder that does not exist, or is empty")
        files = (path for path in self.path.rglob("*") if not path.is_dir())
        return {str(path.relative_to(self.path)): path.lstat().st_size for path in files}

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        file = self.path / name
        with writing("The packed data set cannot be written.", file, fix="free disk space, or name a writable folder"):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, data)

    def delete(self, name: str) -> None:
        """Deletes a file, if there is one."""
        file = self.path / name
        file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other files are in its folder
            if file.parent != self.path:
                file.parent.rmdir()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes of this machine from packing into it. Raises UsageError if one does."""
        lock = self.path / WORK_DIR / "lock"
        with writing("The folder cannot be created.", lock, fix="name a writable folder"):
            lock.parent.mkdir(parents=True, exist_ok=True)
            file = open(lock, "a", opener=regular_files.no_links)  # noqa: SIM115  # closed below
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise make_error(UsageError, "destination-is-locked", text=self.text) from error
            except OSError:
                pass  # a mount without locks; two processes write the same files as a whole
            yield
            self.delete(f"{WORK_DIR}/lock")


class _Prefix:
    """A prefix of a bucket, as `_Folder`."""

    def __init__(self, uri: StorageUri) -> None:
        self._uri, self.text = uri, str(uri)

    @property
    def _store(self) -> "Store":
        from stoker_watch.storage.store import open_store  # needed, and imported, for buckets only

        return open_store(self._uri)

    def _key(self, name: str) -> str:
        return self._uri.child(name).key

    def sizes(self) -> dict[str, int]:
        prefix = self._key("")
        return {info.key.removeprefix(prefix): info.size_bytes for info in self._store.list(self._uri.key)}

    def read(self, name: str) -> bytes:
        return self._store.read(self._key(name))

    def write(self, name: str, data: bytes) -> None:
        self._store.write(self._key(name), data)

    def delete(self, name: str) -> None:
        self._store.delete(self._key(name))

    def locked(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


Destination: TypeAlias = _Folder | _Prefix


def open_destination(text: str) -> Destination:
    """Returns what `pack` writes into. Raises UsageError for what cannot be written."""
    location = expand_variables(text)
    if not is_uri(location):
        return _Folder(Path(location).resolve())
    uri = parse_uri(location)
    if uri.scheme not in WRITABLE_SCHEMES:
        choices = ["a folder", "gs://…", "s3://…"]
        raise make_error(UsageError, "destination-not-writable", choices=choices, text=location)
    return _Prefix(uri)


RunShards = Callable[[Index, PackPlan, Sequence[PlannedShard], Destination], Iterator[ShardRecord]]
"""Makes and writes shards, and yields the record of each when it is written."""


def pack(
    index: Index,
    out: str,
    options: PackOptions,
    *,
    run_shards: RunShards,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> PackResult:
    """Packs a data set into `out`, a folder or a URI; continues an earlier start. If it is packed, only shards that are
    missing or have another size are made again.

    Raises UsageError if `out` has other data, DataError if no image can be read, StorageError if it cannot be written.
    """
    destination = open_destination(out)
    _refuse_source(index, destination)
    plan = make_plan(index, options)
    sizes = destination.sizes()
    if INDEX_FILE in sizes:
        return _complete(index, destination, plan, sizes, run_shards)
    _require_free(destination, plan, sizes)
    with destination.locked():
        destination.write(PLAN_FILE, _plan_text(plan))
        _delete_temporary_files(destination, plan, sizes)
        records = _finished_records(destination, plan, sizes)
        num_kept, num_done = len(records), sum(len(r.images) + len(r.skipped) for r in records.values())
        progress(num_done, len(index))
        for record in run_shards(index, plan, [s for s in plan.shards if s.name not in records], destination):
            records[record.shard.name] = record
            num_done += len(record.images) + len(record.skipped)
            progress(num_done, len(index))
        ordered = [records[shard.name] for shard in plan.shards]
        info = _write_index(index, destination, plan, ordered)
        for name in [*(_record_name(shard.name) for shard in plan.shards), PLAN_FILE]:
            destination.delete(name)
    return PackResult(
        destination=destination.text,
        was_packed=False,
        num_kept=num_kept,
        info=info,
        num_encoded=sum(record.num_encoded for record in ordered),
        skipped=tuple((index.display_source(row), reason) for r in ordered for row, reason in r.skipped),
    )


def in_threads(workers: int) -> RunShards:
    """Makes shards in threads of this process, as reading, hashing and decoding run outside the interpreter's lock."""

    def run(
        index: Index, plan: PackPlan, shards: Sequence[PlannedShard], destination: Destination
    ) -> Iterator[ShardRecord]:
        pool = ThreadPoolExecutor(workers, "stoker-pack")
        try:
            for future in as_completed([pool.submit(write_shard, index, plan, s, destination) for s in shards]):
                yield future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    return run


def make_plan(index: Index, options: PackOptions) -> PackPlan:
    """Returns which image is in which shard. Depends on the source and the options only."""
    source_bytes = _source_bytes(index)
    ratio = 1.0 if options.image_size is None else _encoded_fraction(index, options.image_size)
    shards = []
    for split in index.splits:
        rows = index.image_indices(split)
        mean_bytes = max(1.0, float(source_bytes[rows].mean()) * ratio)
        num_shards = min(len(rows), max(1, round(len(rows) * mean_bytes / (options.shard_mib << 20))))
        if split == "train":
            rows = np.random.default_rng(ORDER_SEED).permutation(rows)
        for number, part in enumerate(np.array_split(rows, num_shards)):
            shards.append(PlannedShard(name=f"{split}-{number:05d}.tar", split=split, rows=tuple(part.tolist())))
    return PackPlan(id=plan_id(index, options), options=options, shards=tuple(shards))


def plan_id(index: Index, options: PackOptions) -> str:
    """Changes with the images, boxes and classes of the source, and with the options."""
    content = index_digest.digest_images(index, index.splits)
    described = msgspec.json.encode((VERSION, index.class_names, index.category_ids, options, content))
    return hashlib.sha256(described).hexdigest()


def write_shard(index: Index, plan: PackPlan, shard: PlannedShard, destination: Destination) -> ShardRecord:
    """Makes a shard, writes it, then its record. A part of a shard is never there under its name."""
    data, record = make_shard(index, plan, shard)
    destination.write(shard.name, data)
    destination.write(_record_name(shard.name), msgspec.json.encode(record))
    return record


def make_shard(index: Index, plan: PackPlan, shard: PlannedShard) -> tuple[bytes, ShardRecord]:
    """Returns the content of a shard, the same bytes each time, and its record."""
    content = bytearray()
    images: list[PackedRow] = []
    skipped: list[tuple[int, str]] = []
    num_encoded = source_bytes = 0
    category_ids = coco_category_ids(index.class_names, index.category_ids)
    for row in shard.rows:
        path, options = index.path(row), plan.options
        try:
            data, stored_header = read_image(index, row, path)
            height, width = index.original_size[row].tolist()
            image_header = stored_header.as_annotated((height, width))
            suffix, size = SUFFIXES[stored_header.image_format][0], image_header.size
            source_bytes += len(data)
            if options.image_size is not None:
                shrunk = shrink(data, path, image_header, max_size=options.image_size, quality=options.quality)
                if shrunk is not None:
                    (data, size), suffix = shrunk, ".jpg"
                    num_encoded += 1
        except UnsupportedImage as error:
            skipped.append((row, str(error)))
            continue
        except DataError as error:
            skipped.append((row, error.cause or error.what))
            continue
        packed = PackedRow(row, len(content) + BLOCK, len(data), size, image_header.size)
        images.append(packed)
        _append_file(content, f"{row:09d}{suffix}", data)
        _append_file(content, f"{row:09d}.json", _annotations(index, packed, category_ids))
    content += END
    sha256 = hashlib.sha256(content).hexdigest()
    return bytes(content), ShardRecord(
        shard=Shard(name=shard.name, split=shard.split, num_images=len(images), size_bytes=len(content), sha256=sha256),
        images=tuple(images),
        skipped=tuple(skipped),
        num_encoded=num_encoded,
        source_bytes=source_bytes,
    )


def _append_file(content: bytearray, name: str, data: bytes) -> None:
    content += tar_header(name, len(data))
    content += data
    content += bytes(padded(len(data)) - len(data))


def _annotations(index: Index, packed: PackedRow, category_ids: Sequence[int]) -> bytes:
    """Returns the JSON of a sample: COCO's annotations with the names of their classes."""
    own, _, boxes, area = _stored_boxes(index, [packed])
    rows = list(coco_annotations(boxes, index.labels[own], index.crowd[own], area, category_ids))
    for row, label in zip(rows, index.labels[own].tolist(), strict=True):
        row["category"] = index.class_names[label]
    height, width = packed.size
    return msgspec.json.encode(
        {
            "file_name": _utf8(index.path(packed.row).name),
            "image_id": int(index.image_id[packed.row]),
            "width": width,
            "height": height,
            "annotations": rows,
        }
    )


def _utf8(name: str) -> str:
    """Replaces bytes of a file name that are not Unicode, which JSON and Arrow cannot hold."""
    return name.encode("utf-8", "replace").decode()


def _stored_boxes(
    index: Index, images: Sequence[PackedRow]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32], NDArray[np.float64]]:
    """Returns `boxes_of` for stored images, and the boxes [k, 4] and areas [k] in their pixels."""
    own, place = boxes_of(index, np.array([packed.row for packed in images]))
    scale = np.array([packed.size for packed in images]) / np.array([packed.source_size for packed in images])
    y, x = scale[place].T
    boxes = (index.boxes[own].astype(np.float64) * np.stack((x, y, x, y), 1)).astype(np.float32)
    return own, place, boxes, index.area[own] * (x * y)


def _write_index(index: Index, destination: Destination, plan: PackPlan, records: Sequence[ShardRecord]) -> PackedInfo:
    by_row = sorted((packed.row, number, packed) for number, r in enumerate(records) for packed in r.images)
    if not by_row:
        row, reason = records[0].skipped[0]
        raise make_error(DataError, "nothing-packed", index.display_source(row), cause=reason)
    rows = np.array([row for row, _, _ in by_row])
    owned, place, boxes, area = _stored_boxes(index, [packed for _, _, packed in by_row])
    table = AnnotationTable(
        class_names=list(index.class_names),
        category_ids=list(index.category_ids),
        folders=[record.shard.name for record in records],
        folder_index=np.array([number for _, number, _ in by_row], np.int32),
        file_names=[_utf8(os.path.basename(index.path_text(row))) for row in rows.tolist()],
        split=np.array([SPLITS.index(records[number].shard.split) for _, number, _ in by_row], np.int8),
        original_size=np.array([packed.size for _, _, packed in by_row], np.int32),
        image_id=index.image_id[rows],
        image_index=place,
        boxes=boxes.astype(np.float64),
        labels=index.labels[owned],
        crowd=index.crowd[owned],
        area=area,
        box_id=owned,
        box_id_kind="object",
        byte_range=np.array([(packed.offset, packed.length) for _, _, packed in by_row], np.int64),
    )
    info = PackedInfo(
        version=VERSION,
        plan=plan.id,
        class_names=index.class_names,
        category_ids=index.category_ids,
        shards=tuple(record.shard for record in records),
        num_skipped=sum(len(r.skipped) for r in records),
        source_bytes=sum(r.source_bytes for r in records),
    )
    destination.write(INDEX_FILE, encode_index(info, table))
    return info


def _complete(
    index: Index, destination: Destination, plan: PackPlan, sizes: dict[str, int], run_shards: RunShards
) -> PackResult:
    """Returns the result for a destination that is packed, with the shards that it had lost. Raises UsageError if that
    is another data set, DataError if a shard that is made again has other bytes."""
    info, _ = parse_index(destination.read(INDEX_FILE), f"{destination.text}/{INDEX_FILE}")
    if info.plan != plan.id:
        raise _other_plan(destination, "another packed data set", "name another folder, or delete this one first")
    shards = {shard.name: shard for shard in info.shards}
    lost = {name for name, shard in shards.items() if sizes.get(name) != shard.size_bytes}
    planned = [shard for shard in plan.shards if shard.name in lost]
    if len(planned) < len(lost):
        raise _other_bytes(destination, min(lost - {shard.name for shard in planned}))
    if lost:
        with destination.locked():
            _delete_temporary_files(destination, plan, sizes)
            for record in run_shards(index, plan, planned, destination):
                name = record.shard.name
                destination.delete(_record_name(name))
                if record.shard.sha256 != shards[name].sha256:
                    destination.delete(name)  # the index has the places of images in other bytes
                    raise _other_bytes(destination, name)
    for name in sizes:
        if name.startswith(f"{WORK_DIR}/"):  # a kill came after the index was written
            destination.delete(name)
    num_kept = len(info.shards) - len(lost)
    return PackResult(destination=destination.text, was_packed=not lost, num_kept=num_kept, info=info)


def _other_bytes(destination: Destination, name: str) -> DataError:
    return make_error(DataError, "shard-has-other-bytes", f"{destination.text}/{name}")


def _other_plan(destination: Destination, content: str, fix: str) -> UsageError:
    return make_error(UsageError, "other-packed-data", fix=fix, text=destination.text, content=content)


def _require_free(destination: Destination, plan: PackPlan, sizes: dict[str, int]) -> None:
    """Raises UsageError unless the destination is empty or has the beginning of this plan."""
    if PLAN_FILE not in sizes:
        if others := sorted(name for name in sizes if not name.startswith(f"{WORK_DIR}/")):
            raise make_error(UsageError, "has-other-data", cause=", ".join(others[:3]), text=destination.text)
    elif destination.read(PLAN_FILE) != _plan_text(plan):  # another version may plan other shards
        fix = "run that command again to continue it, name another folder, or delete this one first"
        raise _other_plan(destination, "the beginning of another packed data set", fix)


def _refuse_source(index: Index, destination: Destination) -> None:
    inside = image_source.path_to_uri(index.root) is None and Path(destination.text).is_relative_to(index.root)
    if inside or destination.text.rstrip("/") == index.source:
        raise make_error(UsageError, "destination-in-source", index.source, text=destination.text)


def _finished_records(destination: Destination, plan: PackPlan, sizes: dict[str, int]) -> dict[str, ShardRecord]:
    """Returns the records of the shards that an earlier start has finished."""

    def read_record(shard: PlannedShard) -> ShardRecord | None:
        try:
            record = msgspec.json.decode(destination.read(_record_name(shard.name)), type=ShardRecord)
        except (msgspec.MsgspecError, ValueError, StokerError, OSError):
            return None  # the shard is made again
        rows = {packed.row for packed in record.images} | {row for row, _ in record.skipped}
        is_right = sizes.get(shard.name) == record.shard.size_bytes and rows == set(shard.rows)
        return record if is_right else None  # another version may plan other images

    candidates = [shard for shard in plan.shards if _record_name(shard.name) in sizes and shard.name in sizes]
    records = map_in_threads(read_record, candidates, chunk_size=1)
    return {record.shard.name: record for record in records if record is not None}


def _delete_temporary_files(destination: Destination, plan: PackPlan, sizes: dict[str, int]) -> None:
    """Deletes what `write_atomic` had begun when the process was killed."""
    prefixes = tuple(f".{name}." for name in (*(shard.name for shard in plan.shards), INDEX_FILE))
    for name in sizes:
        file = name.rpartition("/")[2]
        if file.endswith(".tmp") and (file.startswith(prefixes) or name.startswith(f"{WORK_DIR}/")):
            destination.delete(name)


def _plan_text(plan: PackPlan) -> bytes:
    return msgspec.json.encode({"id": plan.id, "shards": len(plan.shards)})


def _record_name(shard_name: str) -> str:
    return f"{WORK_DIR}/{shard_name}.json"


def _source_bytes(index: Index) -> NDArray[np.int64]:
    """Returns [R], the size of each encoded image; 0 for one that does not exist."""
    remote = index.remote_object(0) if len(index) else None
    if remote is not None and remote[0].uri.scheme in ("https", "http"):
        return np.full(len(index), UNKNOWN_BYTES, np.int64)

    def size(row: int) -> int:
        byte_range = index.byte_range(row)
        try:
            return os.stat(index.path_text(row)).st_size if byte_range is None else byte_range[1]
        except OSError:
            return 0

    return np.array(map_in_threads(size, range(len(index))), np.int64)


def _encoded_fraction(index: Index, max_size: tuple[int, int]) -> float:
    """About the size of the images after they are made to fit, by their size before: the fraction of their pixels."""
    sizes = index.original_size[(index.original_size > 0).all(1)]
    scale = np.minimum(1.0, (np.array(max_size) / sizes).min(1))
    return float(np.square(scale).mean()) if len(sizes) else 1.0


def shrink(
    data: bytes, path: Path, header: Header, *, max_size: tuple[int, int], quality: int
) -> tuple[bytes, tuple[int, int]] | None:
    """Returns the image reduced to fit into `max_size`, as a JPEG without EXIF, its pixels upright, and its height and
    width; None if it does.

    header: `Header.as_annotated`. max_size: height and width. Raises DataError for an image that cannot be decoded.
    """
    height, width = header.size
    scale = min(max_size[0] / height, max_size[1] / width)
    if scale >= 1:
        return None
    size = max(1, round(height * scale)), max(1, round(width * scale))
    pixels = np.ascontiguousarray(decode_resized(data, path, header, size))
    encoded: bytes = simplejpeg.encode_jpeg(pixels, quality=quality, colorspace="RGB", colorsubsampling="420")
    return encoded, size


if TYPE_CHECKING:
    from stoker_watch.storage.store import Store
