"""`stoker data pack`: writes a data set as WebDataset shards of about equal size, with `formats/shard_index.py`.

A plan says which image is in which shard, from the index of the source alone, so each shard can be made by any process,
again, with the same bytes. A finished shard has a record next to it; after a kill, those that have one are kept. The
index is written last and replaces plan and records. Training images are put into the shards in a random order that is
always the same: neighbors in a source are often alike, and a shard that is read as a whole should not be. Rows of the
index keep the order of the source, so training in a random order of all images does not change.

Not here: what images training would skip and other formats (`writing.py`), Ray (`launching/ray_cluster.py`).
"""

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import simplejpeg
from numpy.typing import NDArray

from stoker.data import index_digest
from stoker.data.convert.pack_destination import Destination, open_destination
from stoker.data.convert.writing import SUFFIX_BY_FORMAT, read_image
from stoker.data.formats import shard_index
from stoker.data.formats.coco import coco_annotations, coco_category_ids
from stoker.data.formats.images import map_in_threads
from stoker.data.formats.shard_index import INDEX_FILE, PLAN_FILE, WORK_DIR, PackedImages, PackedInfo, Shard
from stoker.data.formats.tables import SPLITS
from stoker.data.formats.webdataset import BLOCK, END, padded, tar_header
from stoker.data.formats.writer import AnnotatedImage, UnsupportedImage
from stoker.data.images import source as image_source
from stoker.data.images.decode import decode, decode_resized
from stoker.data.images.headers import Header
from stoker.data.index import Index
from stoker.errors import DataError, StokerError, UsageError

DEFAULT_SHARD_MIB = 64
DEFAULT_QUALITY = 90
NUM_MEASURED = 64
"""Images whose quality is measured after they are encoded again."""
NUM_SIZED = 32
"""Images that are encoded to estimate how many fit into a shard."""
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


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    """Changes with the images, boxes and classes of the source, and with the options."""
    options: PackOptions
    shards: tuple[PlannedShard, ...]
    measured: frozenset[int]
    """Rows of which the quality is measured."""


class PackedRow(msgspec.Struct, frozen=True, array_like=True):
    """An image in a shard."""

    row: int
    offset: int
    length: int
    size: tuple[int, int]
    """Height and width of the stored image, as boxes refer to it."""
    source_size: tuple[int, int]


class ShardRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is in a finished shard."""

    shard: Shard
    images: tuple[PackedRow, ...]
    skipped: tuple[tuple[int, str], ...]
    """(row, reason)."""
    num_encoded: int
    source_bytes: int
    psnr_db: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class PackResult:
    destination: str
    was_packed: bool
    """Everything was there already, and nothing was written."""
    num_kept: int
    """Shards that an earlier start had finished."""
    info: PackedInfo
    num_encoded: int = 0
    psnr_db: tuple[float, ...] = ()
    """Of a sample of the images that were encoded again."""
    skipped: tuple[tuple[str, str], ...] = ()
    """(image, reason)."""

    @property
    def num_images(self) -> dict[str, int]:
        """Per split."""
        counts: dict[str, int] = {}
        for shard in self.info.shards:
            counts[shard.split] = counts.get(shard.split, 0) + shard.num_images
        return counts


RunShards = Callable[[Index, Plan, Sequence[PlannedShard], Destination], Iterator[ShardRecord]]
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
        destination.write(PLAN_FILE, msgspec.json.encode({"id": plan.id, "shards": len(plan.shards)}))
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
        psnr_db=tuple(value for record in ordered for value in record.psnr_db),
        skipped=tuple((index.display_source(row), reason) for r in ordered for row, reason in r.skipped),
    )


def in_threads(workers: int) -> RunShards:
    """Makes shards in threads of this process: reading, hashing, decoding and encoding run outside the interpreter's
    lock."""

    def run(
        index: Index, plan: Plan, shards: Sequence[PlannedShard], destination: Destination
    ) -> Iterator[ShardRecord]:
        pool = ThreadPoolExecutor(workers, "stoker-pack")
        try:
            for future in as_completed([pool.submit(write_shard, index, plan, s, destination) for s in shards]):
                yield future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    return run


def make_plan(index: Index, options: PackOptions) -> Plan:
    """Which image is in which shard. Depends on the source and the options only."""
    source_bytes = _source_bytes(index)
    ratio = 1.0 if options.image_size is None else _encoded_fraction(index, options, source_bytes)
    shards = []
    for split in index.splits:
        rows = index.image_indices(split)
        mean_bytes = max(1.0, float(source_bytes[rows].mean()) * ratio)
        num_shards = min(len(rows), max(1, round(len(rows) * mean_bytes / (options.shard_mib << 20))))
        if split == "train":
            rows = np.random.default_rng(ORDER_SEED).permutation(rows)
        for number, part in enumerate(np.array_split(rows, num_shards)):
            shards.append(PlannedShard(name=f"{split}-{number:05d}.tar", split=split, rows=tuple(part.tolist())))
    measured = frozenset(np.linspace(0, len(index) - 1, NUM_MEASURED).astype(int).tolist())
    return Plan(
        id=plan_id(index, options),
        options=options,
        shards=tuple(shards),
        measured=measured if options.image_size is not None else frozenset(),
    )


def plan_id(index: Index, options: PackOptions) -> str:
    """Changes with the images, boxes and classes of the source, and with the options."""
    content = index_digest.digest_images(index, index.splits)
    described = msgspec.json.encode((shard_index.VERSION, index.class_names, index.category_ids, options, content))
    return hashlib.sha256(described).hexdigest()


def write_shard(index: Index, plan: Plan, shard: PlannedShard, destination: Destination) -> ShardRecord:
    """Makes a shard, writes it, then its record. A part of a shard is never there under its name."""
    data, record = make_shard(index, plan, shard)
    destination.write(shard.name, data)
    destination.write(_record_name(shard.name), msgspec.json.encode(record))
    return record


def make_shard(index: Index, plan: Plan, shard: PlannedShard) -> tuple[bytes, ShardRecord]:
    """The content of a shard, the same bytes each time, and its record."""
    content = bytearray()
    images: list[PackedRow] = []
    skipped: list[tuple[int, str]] = []
    psnr_db: list[float] = []
    num_encoded = source_bytes = 0
    category_ids = coco_category_ids(index.class_names, index.category_ids)
    for row in shard.rows:
        path, options = index.path(row), plan.options
        try:
            data, stored_header = read_image(index, row, path)
            height, width = index.original_size[row].tolist()
            image_header = stored_header.as_annotated((height, width))
            suffix, size = SUFFIX_BY_FORMAT[stored_header.image_format], image_header.size
            source_bytes += len(data)
            if options.image_size is not None:
                shrunk = shrink(
                    data, path, image_header, max_size=options.image_size, quality=options.quality,
                    measure=row in plan.measured,
                )  # fmt: skip
                if shrunk is not None:
                    data, size, suffix = shrunk.data, shrunk.size, SUFFIX_BY_FORMAT["jpeg"]
                    psnr_db += [] if shrunk.psnr_db is None else [shrunk.psnr_db]
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
        _append_file(content, f"{row:09d}.json", _annotations(index, packed, shard.split, data, category_ids))
    content += END
    sha256 = hashlib.sha256(content).hexdigest()
    return bytes(content), ShardRecord(
        shard=Shard(name=shard.name, split=shard.split, num_images=len(images), size_bytes=len(content), sha256=sha256),
        images=tuple(images),
        skipped=tuple(skipped),
        num_encoded=num_encoded,
        source_bytes=source_bytes,
        psnr_db=tuple(psnr_db),
    )


def _append_file(content: bytearray, name: str, data: bytes) -> None:
    content += tar_header(name, len(data))
    content += data
    content += bytes(padded(len(data)) - len(data))


def _annotations(index: Index, packed: PackedRow, split: str, data: bytes, category_ids: Sequence[int]) -> bytes:
    """The JSON of a sample: COCO's annotations with the names of their classes."""
    own = slice(int(index.offsets[packed.row]), int(index.offsets[packed.row + 1]))
    boxes, area = _scale(index.boxes[own], index.area[own], packed)
    image = AnnotatedImage(
        split=split, name=index.path(packed.row).name, data=data, image_format="", size=packed.size,
        image_id=int(index.image_id[packed.row]), boxes=boxes, labels=index.labels[own], crowd=index.crowd[own],
        area=area,
    )  # fmt: skip
    names = [index.class_names[label] for label in image.labels.tolist()]
    rows = [{**row, "category": name} for row, name in zip(coco_annotations(image, category_ids), names, strict=True)]
    height, width = packed.size
    return msgspec.json.encode(
        {
            "file_name": image.name.encode("utf-8", "replace").decode(),
            "image_id": image.image_id,
            "width": width,
            "height": height,
            "annotations": rows,
        }
    )


def _scale(
    boxes: NDArray[np.float32], area: NDArray[np.float64], packed: PackedRow
) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Boxes [k, 4] and areas [k] of the source in the stored image."""
    if packed.size == packed.source_size:
        return boxes, area
    (height, width), (source_height, source_width) = packed.size, packed.source_size
    x, y = width / source_width, height / source_height
    return (boxes.astype(np.float64) * (x, y, x, y)).astype(np.float32), area * (x * y)


def _write_index(index: Index, destination: Destination, plan: Plan, records: Sequence[ShardRecord]) -> PackedInfo:
    by_row = sorted((packed.row, number, packed) for number, r in enumerate(records) for packed in r.images)
    if not by_row:
        row, reason = records[0].skipped[0]
        raise DataError(
            "No image could be packed.", location=index.display_source(row), cause=reason, fix="see `stoker data check`"
        )
    rows = np.array([row for row, _, _ in by_row])
    counts = (index.offsets[1:] - index.offsets[:-1])[rows]
    owned = np.concatenate([np.arange(index.offsets[row], index.offsets[row + 1]) for row in rows.tolist()])
    own_boxes = [slice(int(index.offsets[row]), int(index.offsets[row + 1])) for row in rows.tolist()]
    scaled = [
        _scale(index.boxes[own], index.area[own], packed) for own, (_, _, packed) in zip(own_boxes, by_row, strict=True)
    ]
    images = PackedImages(
        names=[os.path.basename(index.path_text(row)).encode("utf-8", "replace").decode() for row in rows.tolist()],
        split=np.array([SPLITS.index(records[number].shard.split) for _, number, _ in by_row], np.int8),
        image_id=index.image_id[rows],
        shard=np.array([number for _, number, _ in by_row], np.int32),
        byte_range=np.array([(packed.offset, packed.length) for _, _, packed in by_row], np.int64),
        size=np.array([packed.size for _, _, packed in by_row], np.int32),
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        boxes=np.concatenate([boxes for boxes, _ in scaled]),
        labels=index.labels[owned],
        crowd=index.crowd[owned],
        area=np.concatenate([area for _, area in scaled]),
    )
    info = PackedInfo(
        version=shard_index.VERSION,
        plan=plan.id,
        class_names=index.class_names,
        category_ids=index.category_ids,
        shards=tuple(record.shard for record in records),
        num_skipped=sum(len(r.skipped) for r in records),
        source_bytes=sum(r.source_bytes for r in records),
    )
    destination.write(INDEX_FILE, shard_index.encode(info, images))
    return info


def _complete(
    index: Index, destination: Destination, plan: Plan, sizes: dict[str, int], run_shards: RunShards
) -> PackResult:
    """The result for a destination that is packed, with the shards that it had lost. Raises UsageError if that is
    another data set, DataError if a shard that is made again has other bytes."""
    info = shard_index.parse_info(destination.read(INDEX_FILE), f"{destination.text}/{INDEX_FILE}")
    if info.plan != plan.id:
        raise UsageError(
            f"{destination.text!r} has another packed data set.",
            cause="its images, boxes, classes, --image-size, --quality or --shard-mib differ",
            fix="name another folder, or delete this one first",
        )
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
    return DataError(
        "A shard cannot be made again as it was.",
        location=f"{destination.text}/{name}",
        cause="other versions of the decoders encode images differently, or plan other shards",
        fix="delete the whole folder and pack again, or copy the shard again",
    )


def _require_free(destination: Destination, plan: Plan, sizes: dict[str, int]) -> None:
    """Raises UsageError unless the destination is empty or has the beginning of this plan."""
    if PLAN_FILE not in sizes:
        others = [name for name in sizes if not name.startswith(f"{WORK_DIR}/")]
        if others:
            raise UsageError(
                f"{destination.text!r} has other data.",
                cause=", ".join(sorted(others)[:3]) + (", …" if len(others) > 3 else ""),
                fix="name a folder that does not exist, or is empty",
            )
        return
    try:
        started = msgspec.json.decode(destination.read(PLAN_FILE))["id"]
    except (msgspec.MsgspecError, ValueError, KeyError, TypeError):
        started = None
    if started != plan.id:
        raise UsageError(
            f"{destination.text!r} has the beginning of another packed data set.",
            cause="its images, boxes, classes, --image-size, --quality or --shard-mib differ",
            fix="run that command again to continue it, name another folder, or delete this one first",
        )


def _refuse_source(index: Index, destination: Destination) -> None:
    inside = image_source.path_to_uri(index.root) is None and Path(destination.text).is_relative_to(index.root)
    if inside or destination.text.rstrip("/") == index.source:
        raise UsageError(
            f"{destination.text!r} is in the data set's own folder.",
            location=index.source,
            cause="the source is never changed",
            fix="name a folder elsewhere",
        )


def _finished_records(destination: Destination, plan: Plan, sizes: dict[str, int]) -> dict[str, ShardRecord]:
    """The records of the shards that an earlier start has finished."""

    def read_record(shard: PlannedShard) -> ShardRecord | None:
        try:
            record = msgspec.json.decode(destination.read(_record_name(shard.name)), type=ShardRecord)
        except (msgspec.MsgspecError, ValueError, StokerError, OSError):
            return None  # the shard is made again
        return record if sizes.get(shard.name) == record.shard.size_bytes else None

    candidates = [shard for shard in plan.shards if _record_name(shard.name) in sizes and shard.name in sizes]
    records = map_in_threads(read_record, candidates, chunk_size=1)
    return {record.shard.name: record for record in records if record is not None}


def _delete_temporary_files(destination: Destination, plan: Plan, sizes: dict[str, int]) -> None:
    """Deletes what `write_atomic` had begun when the process was killed."""
    prefixes = tuple(f".{name}." for name in (*(shard.name for shard in plan.shards), INDEX_FILE))
    for name in sizes:
        file = name.rpartition("/")[2]
        if file.endswith(".tmp") and (file.startswith(prefixes) or name.startswith(f"{WORK_DIR}/")):
            destination.delete(name)


def _record_name(shard_name: str) -> str:
    return f"{WORK_DIR}/{shard_name}.json"


def _source_bytes(index: Index) -> NDArray[np.int64]:
    """[R], the size of each encoded image; 0 for one that does not exist."""
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


def _encoded_fraction(index: Index, options: PackOptions, source_bytes: NDArray[np.int64]) -> float:
    """The size of some images after they are encoded again, by their size before."""
    assert options.image_size is not None
    before = after = 0
    for row in np.unique(np.linspace(0, len(index) - 1, NUM_SIZED).astype(int)).tolist():
        path = index.path(row)
        height, width = index.original_size[row].tolist()
        try:
            data, stored_header = read_image(index, row, path)
            image_header = stored_header.as_annotated((height, width))
            shrunk = shrink(data, path, image_header, max_size=options.image_size, quality=options.quality)
        except (UnsupportedImage, DataError):
            continue  # it will be skipped, and reported, when its shard is made
        before += int(source_bytes[row])
        after += len(data) if shrunk is None else len(shrunk.data)
    return after / before if before else 1.0


MAX_PSNR_DB = 99.0
"""Reported for pixels that are the same: their PSNR is infinite."""


class Shrunk(NamedTuple):
    data: bytes
    """A JPEG without EXIF: its pixels are upright."""
    size: tuple[int, int]
    """Height and width."""
    psnr_db: float | None


def shrink(
    data: bytes, path: Path, header: Header, *, max_size: tuple[int, int], quality: int, measure: bool = False
) -> Shrunk | None:
    """The image reduced to fit into `max_size`; None if it does.

    header: `Header.as_annotated`. max_size: height and width. measure: also compares the decoded result with the pixels
    that were encoded. Raises DataError for an image that cannot be decoded.
    """
    height, width = header.size
    scale = min(max_size[0] / height, max_size[1] / width)
    if scale >= 1:
        return None
    size = max(1, round(height * scale)), max(1, round(width * scale))
    pixels = np.ascontiguousarray(decode_resized(data, path, header, size))
    encoded = simplejpeg.encode_jpeg(pixels, quality=quality, colorspace="RGB", colorsubsampling="420")
    psnr_db = None
    if measure:
        mse = float(np.square(decode(encoded, path).astype(np.float32) - pixels).mean())
        psnr_db = min(MAX_PSNR_DB, 20 * math.log10(255) - 10 * math.log10(mse)) if mse else MAX_PSNR_DB
    return Shrunk(encoded, size, psnr_db)
