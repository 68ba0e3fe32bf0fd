"""The file of an index in the cache folder: one Arrow IPC file with a row per image, memory-mapped.

Any Arrow reader opens the file; everything that is not a column is JSON under the key `stoker` of the schema's
metadata. The file is replaced as a whole by rename, so processes that build it at the same time do not disturb each
other or a reader. Not here: the meaning of the columns (`index.py`).
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from stoker.data.formats.folders import iter_annotation_files
from stoker.data.formats.tables import SPLITS, AnnotationTable, DatasetLayout
from stoker.data.validation.problems import Problem
from stoker_watch.errors import DataError, PreflightError, make_error, system_limit
from stoker_watch.storage.local_files import cache_folder, write_atomic

VERSION = 14
"""Of the file and its content: raise it when reading, cleaning or splitting changes."""

BOX_FIELDS = (
    ("boxes", pa.large_list(pa.list_(pa.float32(), 4))),  # xyxy in pixels
    ("labels", pa.large_list(pa.int32())),
    ("crowd", pa.large_list(pa.uint8())),  # Arrow's own booleans are bits, which numpy cannot view
    ("area", pa.large_list(pa.float64())),
)
"""Columns of boxes, a list per image: of an index, and of the index of packed shards."""
SCHEMA = pa.schema(
    [
        ("name", pa.large_string()),
        ("folder", pa.int32()),
        ("split", pa.int8()),
        ("image_id", pa.int64()),
        ("span", pa.list_(pa.int64(), 2)),  # zeros: the image is a file
        ("size", pa.list_(pa.int32(), 2)),
        *BOX_FIELDS,
    ]
)
METADATA_KEY, DIGEST_KEY = b"stoker", b"stoker-digest"
NUM_STAT_SAMPLES = 64
"""Number of images whose size and mtime are checked, where the index has image sizes that were read from files."""


class IndexMetadata(msgspec.Struct, kw_only=True):
    """The content of the index file besides its columns."""

    source_fingerprint: str
    root: str
    format: str
    class_names: tuple[str, ...]
    category_ids: tuple[int, ...]
    splits: tuple[str, ...]
    folders: tuple[str, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    folder_mtimes_ns: tuple[int, ...]
    """Modification time of each of `folders`."""
    bad_boxes: dict[str, int]
    """Split → boxes that were left out because they cannot be used."""
    num_bad_test_images: int
    """Images of the test split that were left out because of their annotations."""
    image_files_stamp: str
    """`_image_files_stamp` of some images, where sizes were read from image files; else empty."""


def index_path(
    data: Path,
    format: str,
    val_fraction: float,
    classes: tuple[str, ...] = (),
    descriptions: tuple[Path, ...] = (),
    *,
    variant: str = "",
) -> Path:
    """Returns the cache file of a data set, by its resolved path: a data set that was moved gets another file. One
    folder can be several data sets, by the files that describe it and by the `variant` of reading it."""
    description_paths = [str(path) for path in descriptions]
    key = f"{data}\0{format}\0{val_fraction!r}\0{classes!r}\0{description_paths!r}\0{variant}".encode(
        "utf-8", "surrogateescape"
    )
    return cache_folder() / "index" / f"{data.stem[:40]}-{blake2b(key, digest_size=8).hexdigest()}.arrow"


def source_fingerprint(layout: DatasetLayout, val_fraction: float) -> str:
    """Changes when the index must be built again. Uses names, sizes and times only: a stat per annotation file.

    The modification times of image folders are included: their content decides which image an annotation belongs to.
    """
    digest = blake2b(f"{VERSION}\0{layout!r}\0{val_fraction!r}".encode("utf-8", "surrogateescape"), digest_size=16)
    files = [*layout.metadata_files, *(split_files.annotations for split_files in layout.parts)]
    files += [split_files.image_list for split_files in layout.parts if split_files.image_list is not None]
    for line in (line for file in dict.fromkeys(files) for line in _file_stamps(file)):
        digest.update(line.encode("utf-8", "surrogateescape"))
    for split_files in layout.parts:
        for folder in split_files.image_dirs:
            mtime_ns = folder.stat().st_mtime_ns if folder.exists() else None
            digest.update(f"{folder}\0{mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _file_stamps(path: Path) -> Iterator[str]:
    """A line for a file, or for every annotation file of a folder; none for a label folder that does not exist."""
    if not path.exists():
        return
    for file in iter_annotation_files(path, (".xml", ".txt", ".json")) if path.is_dir() else [os.fspath(path)]:
        stat = os.stat(file)
        yield f"{file}\0{stat.st_size}\0{stat.st_mtime_ns}\n"


def write_index(
    path: Path, table: AnnotationTable, problems: tuple[Problem, ...], layout: DatasetLayout, source_stamp: str,
    lost_boxes: Mapping[str, int], num_bad_test_images: int,
) -> None:  # fmt: skip
    """Writes the index file of a data set after cleaning and splitting. lost_boxes: split → boxes of the images that
    were dropped because all of their boxes were. Raises PreflightError if that fails."""
    num_images = len(table.file_names)
    num_bad_boxes = np.zeros(num_images, np.int64) if table.num_bad_boxes is None else table.num_bad_boxes
    metadata = IndexMetadata(
        source_fingerprint=source_stamp,
        root=str(layout.root),
        format=layout.format,
        class_names=tuple(table.class_names),
        category_ids=tuple(table.category_ids),
        splits=tuple(name for split_index, name in enumerate(SPLITS) if (table.split == split_index).any()),
        folders=tuple(table.folders),
        problems=problems,
        notes=tuple(table.notes),
        folder_mtimes_ns=_folder_mtimes_ns(layout.root, table.folders),
        bad_boxes={
            name: lost_boxes.get(name, 0) + int(num_bad_boxes[table.split == split_index].sum())
            for split_index, name in enumerate(SPLITS)
        },
        num_bad_test_images=num_bad_test_images,
        image_files_stamp=""
        if not table.sizes_from_headers
        else _image_files_stamp(
            layout.root / table.folders[table.folder_index[image_index]] / table.file_names[image_index]
            for image_index in _sample_indices(num_images)
        ),
    )
    try:
        names, metadata_json = pa.array(table.file_names, pa.large_string()), msgspec.json.encode(metadata)
    except UnicodeEncodeError as error:
        raise make_error(DataError, "name-is-not-unicode", repr(error.object), reason=error.reason) from error
    columns = [
        names,
        *map(pa.array, (table.folder_index, table.split, table.image_id)),
        _fixed_size_lists(np.zeros((num_images, 2), np.int64) if table.byte_range is None else table.byte_range),
        _fixed_size_lists(table.original_size),
        *box_columns(table),
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata_fields = {METADATA_KEY: metadata_json, DIGEST_KEY: _hash_text(metadata_json)}
        write_atomic(path, encode_columns(columns, SCHEMA.with_metadata(metadata_fields)))
    except OSError as error:
        raise make_error(PreflightError, "index-not-written", path, cause=str(error)) from error


def box_columns(table: AnnotationTable) -> list[pa.Array]:
    counts = np.bincount(table.image_index, minlength=len(table.file_names))
    offsets = pa.array(np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))
    boxes = _fixed_size_lists(table.boxes.astype(np.float32))
    others = map(pa.array, (table.labels, table.crowd.view(np.uint8), table.area))
    return [pa.LargeListArray.from_arrays(offsets, values) for values in (boxes, *others)]


def encode_columns(columns: Sequence[pa.Array], schema: pa.Schema) -> memoryview:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch(list(columns), schema=schema))
    return memoryview(sink.getvalue())


def _hash_text(text: bytes) -> bytes:
    return blake2b(text, digest_size=8).hexdigest().encode()


def _fixed_size_lists(values: NDArray[np.float32] | NDArray[np.int32] | NDArray[np.int64]) -> pa.Array:
    """Returns [N, n] as N lists of n."""
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])


def read_index(path: Path, source_stamp: str) -> tuple[pa.RecordBatch, IndexMetadata] | None:
    """Maps an index file; None when it is absent, out of date or damaged and must be built.

    Checks everything that keeps later code inside the arrays, so a damaged file cannot crash a run.
    """
    try:
        with pa.ipc.open_file(pa.memory_map(os.fspath(path))) as reader:
            metadata_json = reader.schema.metadata[METADATA_KEY]
            if reader.schema.metadata[DIGEST_KEY] != _hash_text(metadata_json):
                return None
            metadata = msgspec.json.decode(metadata_json, type=IndexMetadata)
            if (
                metadata.source_fingerprint != source_stamp
                or not reader.schema.equals(SCHEMA)
                or reader.num_record_batches != 1
            ):
                return None
            record_batch = reader.get_batch(0)
        record_batch.validate(full=True)
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError, msgspec.MsgspecError) as error:
        if (limit := system_limit(error, path)) is not None:
            raise limit from error
        return None
    labels, folder_index, split_index = (
        np.asarray(column) for column in (record_batch["labels"].values, record_batch["folder"], record_batch["split"])
    )
    offsets = [record_batch[name].offsets for name in ("boxes", "labels", "crowd", "area")]
    is_valid = (
        all(other.equals(offsets[0]) for other in offsets[1:])
        and len(labels) == offsets[0][-1].as_py()
        and in_range(labels, len(metadata.class_names))
        and in_range(folder_index, len(metadata.folders))
        and in_range(split_index, len(SPLITS))
        and _byte_ranges_fit(record_batch, folder_index, metadata)
    )
    return (record_batch, metadata) if is_valid and _is_unchanged(record_batch, folder_index, metadata) else None


def _is_unchanged(record_batch: pa.RecordBatch, folder_index: NDArray[np.int32], metadata: IndexMetadata) -> bool:
    """Returns whether the image folders, and a sample of the images, are unchanged since the index was built."""
    root = Path(metadata.root)
    if metadata.folder_mtimes_ns != _folder_mtimes_ns(root, metadata.folders):
        return False
    sample_paths = (
        root / metadata.folders[folder_index[image_index]] / record_batch["name"][image_index].as_py()
        for image_index in _sample_indices(len(folder_index))
    )
    return not metadata.image_files_stamp or metadata.image_files_stamp == _image_files_stamp(sample_paths)


def _folder_mtimes_ns(root: Path, folders: Sequence[str]) -> tuple[int, ...]:
    """Returns the times of the image folders and of those around them, in which another one may appear."""
    paths = [Path(folder) for folder in folders]
    below = [path for path in paths if not path.is_absolute() and ".." not in path.parts]
    around = sorted({parent for path in below for parent in path.parents if parent.parts} - set(paths))
    return tuple(_size_and_mtime_ns(root / path)[1] for path in (*paths, *around))


def _sample_indices(num_images: int) -> list[int]:
    """Returns evenly spaced image indices from the first to the last."""
    if not num_images:
        return []
    return sorted({int(index) for index in np.linspace(0, num_images - 1, NUM_STAT_SAMPLES)})


def _image_files_stamp(image_paths: Iterable[Path]) -> str:
    return blake2b(repr([_size_and_mtime_ns(path) for path in image_paths]).encode(), digest_size=8).hexdigest()


def _size_and_mtime_ns(path: Path) -> tuple[int, int]:
    """Returns bytes and modification time in ns; -1 for a path that does not exist or cannot be read."""
    try:
        stat = path.stat()
    except OSError:
        return -1, -1
    return stat.st_size, stat.st_mtime_ns


def in_range(values: NDArray[np.generic], count: int) -> bool:
    return values.size == 0 or (int(values.min()) >= 0 and int(values.max()) < count)


def _byte_ranges_fit(record_batch: pa.RecordBatch, folder_index: NDArray[np.int32], metadata: IndexMetadata) -> bool:
    """Whether the files that contain images exist and are long enough; one unpacked into the cache may be deleted."""
    start, length = np.asarray(record_batch["span"].values).reshape(-1, 2).T
    embedded = np.flatnonzero(length)
    required_bytes = np.zeros(len(metadata.folders), np.int64)
    np.maximum.at(required_bytes, folder_index[embedded], (start + length)[embedded])
    for i in np.unique(folder_index[embedded]).tolist():
        try:
            if (Path(metadata.root) / metadata.folders[i]).stat().st_size < required_bytes[i]:
                return False
        except OSError:  # building the index again reports the problem
            return False
    return True
