"""The index of the shards that `stoker data pack` makes: an Arrow file with a row per image; no shard is scanned.

`stoker-index.arrow` lies next to the shards. Its columns are those of `SCHEMA`, in the order of the source; under the
key `stoker` of the schema's metadata is JSON: names, sizes and checksums of the shards, and the classes. Any Arrow
reader opens it; the shards are also an ordinary WebDataset without it. Not here: making shards (`convert/packing.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from stoker import regular_files
from stoker.data.formats.tables import SPLITS, AnnotationTable, DatasetLayout, SplitFiles
from stoker.data.images import source
from stoker.data.validation.problems import ProblemCollector
from stoker.errors import DataError

INDEX_FILE = source.SHARD_INDEX
VERSION = 1
WORK_DIR = ".stoker-pack"
"""The folder of plan and records next to the shards, while they are made."""
PLAN_FILE = f"{WORK_DIR}/plan.json"
METADATA_KEY = b"stoker"
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
        ("boxes", pa.large_list(pa.list_(pa.float32(), 4))),  # xyxy in pixels
        ("labels", pa.large_list(pa.int32())),
        ("crowd", pa.large_list(pa.uint8())),
        ("area", pa.large_list(pa.float64())),
    ]
)


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    split: str
    num_images: int
    size_bytes: int
    sha256: str


class PackedInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The index besides its columns."""

    version: int
    plan: str
    """Identifies source and settings: `packing.Plan.id`."""
    class_names: tuple[str, ...]
    category_ids: tuple[int, ...]
    shards: tuple[Shard, ...]
    num_skipped: int
    """Images of the source that are in no shard, because they cannot be read."""
    source_bytes: int
    """Of the images, in the source."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedImages:
    """The columns: R images with K boxes."""

    names: Sequence[str]
    split: NDArray[np.int8]
    image_id: NDArray[np.int64]
    shard: NDArray[np.int32]
    byte_range: NDArray[np.int64]
    """[R, 2], offset and length."""
    size: NDArray[np.int32]
    """[R, 2], height and width."""
    offsets: NDArray[np.int64]
    """[R + 1]."""
    boxes: NDArray[np.float32]
    labels: NDArray[np.int32]
    crowd: NDArray[np.bool_]
    area: NDArray[np.float64]


def encode(info: PackedInfo, images: PackedImages) -> bytes:
    """The content of the index file."""
    offsets = pa.array(images.offsets)

    def per_image(values: pa.Array) -> pa.Array:
        return pa.LargeListArray.from_arrays(offsets, values)

    columns = [
        pa.array(images.names, pa.large_string()),
        *map(pa.array, (images.split, images.image_id, images.shard)),
        *(pa.array(np.ascontiguousarray(column)) for column in (*images.byte_range.T, *images.size.T)),
        per_image(pa.FixedSizeListArray.from_arrays(pa.array(images.boxes.reshape(-1)), 4)),
        *(per_image(pa.array(values)) for values in (images.labels, images.crowd.view(np.uint8), images.area)),
    ]
    metadata = {METADATA_KEY: msgspec.json.encode(info)}
    record_batch = pa.record_batch(columns, schema=SCHEMA.with_metadata(metadata))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, record_batch.schema) as writer:
        writer.write_batch(record_batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def layout_of(folder: Path) -> DatasetLayout:
    """The data set of a folder with an index. Raises DataError for an index that cannot be read."""
    info = read_info(folder / INDEX_FILE)
    count = len(info.shards)
    return DatasetLayout(
        format="webdataset",
        description=f"packed WebDataset in {count:,} shards" if count != 1 else "packed WebDataset in one shard",
        root=folder,
        parts=tuple(
            SplitFiles(split=shard.split, annotations=folder / shard.name, image_dirs=()) for shard in info.shards
        ),
        metadata_files=(folder / INDEX_FILE,),
    )


def refuse_unfinished(folder: Path) -> None:
    """Raises DataError for a folder into which a data set is being packed: only a part of it would be read."""
    if (folder / PLAN_FILE).is_file():
        raise DataError(
            "The data set is not packed to its end.",
            location=folder,
            cause="packing is under way, or was stopped",
            fix="run the same `stoker data pack` again: it continues",
        )


def read_info(path: Path) -> PackedInfo:
    """The metadata of an index. Raises DataError."""
    return _open(path)[0]


def read(layout: DatasetLayout, problems: ProblemCollector) -> AnnotationTable:
    """The table of all images. Raises DataError for an index that is damaged, and for shards that are not as packed."""
    del problems  # what was wrong with the source was left out, and named, when it was packed
    path = layout.metadata_files[0]
    info, batch = _open(path)
    _require_shards(path.parent, info.shards)
    images = _to_images(batch, info, path)
    num_boxes = np.diff(images.offsets)
    notes = [f"{info.num_skipped:,} images of the source could not be read when it was packed"] * (info.num_skipped > 0)
    return AnnotationTable(
        class_names=list(info.class_names),
        category_ids=list(info.category_ids),
        folders=[shard.name for shard in info.shards],
        folder_index=images.shard,
        file_names=list(images.names),
        split=images.split,
        original_size=images.size,
        image_id=images.image_id,
        image_index=np.repeat(np.arange(len(images.names)), num_boxes),
        boxes=images.boxes.astype(np.float64),
        labels=images.labels,
        crowd=images.crowd,
        area=images.area,
        box_id=np.arange(len(images.labels)) - np.repeat(images.offsets[:-1], num_boxes) + 1,
        box_id_kind="object",
        byte_range=images.byte_range,
        notes=[*layout.notes, *notes],
    )


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


def _require_shards(folder: Path, shards: Sequence[Shard]) -> None:
    """A lost validation shard would otherwise be replaced by training images."""
    wrong = [f"{shard.name} {text}" for shard, text in lost_shards(folder, shards)]
    if wrong:
        raise DataError(
            f"{len(wrong):,} of {len(shards):,} packed shards are missing or have another size.",
            location=folder,
            cause="; ".join(wrong[:3]) + ("; …" if len(wrong) > 3 else ""),
            fix="the same `stoker data pack` again makes only these, or copy them again; to train from the others, "
            f"delete {INDEX_FILE}: they are read as a WebDataset",
        )


def parse_info(data: bytes, location: Path | str) -> PackedInfo:
    """The metadata of an index that was read. Raises DataError."""
    return _parse(pa.py_buffer(data), location)[0]


def _open(path: Path) -> tuple[PackedInfo, pa.RecordBatch]:
    return _parse(regular_files.read_bytes(path, max_bytes=regular_files.MAX_ANNOTATION_BYTES), path)


def _parse(data: bytes | pa.Buffer, path: Path | str) -> tuple[PackedInfo, pa.RecordBatch]:
    try:
        with pa.ipc.open_file(data) as reader:
            info = msgspec.json.decode((reader.schema.metadata or {}).get(METADATA_KEY, b""), type=PackedInfo)
            if info.version != VERSION:
                raise _damaged(path, f"it has version {info.version}; this stoker reads {VERSION}", "update stoker")
            if not reader.schema.equals(SCHEMA) or reader.num_record_batches != 1:
                raise _damaged(path, "its columns are not those of an index of shards")
            batch = reader.get_batch(0)
        batch.validate(full=True)
    except (pa.ArrowException, msgspec.MsgspecError, ValueError, KeyError) as error:
        raise _damaged(path, str(error).splitlines()[0] if str(error) else type(error).__name__) from error
    return info, batch


def _to_images(batch: pa.RecordBatch, info: PackedInfo, path: Path | str) -> PackedImages:
    """The columns, checked so that nothing reads outside a shard or an array."""

    def column(name: str) -> NDArray[np.generic]:
        return np.asarray(batch[name])

    lists = [batch[name] for name in ("boxes", "labels", "crowd", "area")]
    offsets = np.asarray(lists[0].offsets)
    if batch.num_rows and any(not np.array_equal(np.asarray(each.offsets), offsets) for each in lists):
        raise _damaged(path, "its lists of boxes and labels differ in length")
    first, last = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
    images = PackedImages(
        names=batch["name"].to_pylist(),
        split=np.asarray(batch["split"], np.int8),
        image_id=np.asarray(batch["image_id"], np.int64),
        shard=np.asarray(batch["shard"], np.int32),
        byte_range=np.stack((column("offset"), column("length")), axis=1).astype(np.int64),
        size=np.stack((column("height"), column("width")), axis=1).astype(np.int32),
        offsets=offsets - first if len(offsets) else np.zeros(1, np.int64),
        boxes=np.asarray(lists[0].values.values).reshape(-1, 4)[first:last],
        labels=np.asarray(lists[1].values)[first:last],
        crowd=np.asarray(lists[2].values)[first:last] != 0,
        area=np.asarray(lists[3].values)[first:last],
    )
    names = [shard.name for shard in info.shards]
    sizes = np.array([shard.size_bytes for shard in info.shards], np.int64)
    start, length = images.byte_range.T
    for is_right, cause in (
        (all(name and name == Path(name).name and name not in (".", "..") for name in names), "a shard is not a name"),
        (all(shard.split in SPLITS for shard in info.shards), f"a split is not one of {', '.join(SPLITS)}"),
        (len(info.category_ids) == len(info.class_names), "classes and category ids differ in number"),
        (all(name and "/" not in name and "\0" not in name for name in images.names), "an image name is a path"),
        (_in_range(images.shard, len(names)), "an image is in a shard that is not listed"),
        (_in_range(images.split, len(SPLITS)), "an image is in a split that does not exist"),
        (_in_range(images.labels, len(info.class_names)), "a label is not that of a class"),
    ):
        if not is_right:
            raise _damaged(path, cause)
    if len(start) and ((start < 0) | (length <= 0) | (start > sizes[images.shard] - length)).any():
        raise _damaged(path, "an image lies outside its shard")
    return images


def _in_range(values: NDArray[np.generic], count: int) -> bool:
    return values.size == 0 or (int(values.min()) >= 0 and int(values.max()) < count)


def _damaged(path: Path | str, cause: str, fix: str = "copy it again, or pack the data set again") -> DataError:
    return DataError(
        "The index of the packed shards cannot be read.",
        location=path,
        cause=cause,
        fix=f"{fix}; without it the shards are read as an ordinary WebDataset",
    )
