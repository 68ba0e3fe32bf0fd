"""Parquet as data sets of the Hugging Face hub have it: a row per image, with its bytes and its boxes.

Recognized: *.parquet in one folder, in its folder `data/` or `default/`, or in split folders; the columns `image`
(bytes, or a struct that has them) and `objects`, or columns of boxes and classes. The pages of Parquet are compressed
and have no byte range of an image, so the images are copied once into a file in the cache folder, as for gzipped
TFRecords; this needs a local disk. Format: https://huggingface.co/docs/datasets/object_detection. Not here: the layouts
of boxes (`shards.py`), what a small file may expand to (`parquet_pages.py`).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from stoker.data.formats.objects import CLASS_LIST_KEYS, CORNERS_KEYS, EXTENT_KEYS, LIST_KEYS
from stoker.data.formats.parquet_pages import check_pages, max_unpacked_bytes, read_footer, text_bytes, texts_of
from stoker.data.formats.shards import ShardSamples, make_table, open_shard, recognize_shards
from stoker.data.formats.tables import AnnotationTable, DatasetLayout, SplitFiles
from stoker.data.formats.tfrecord_bytes import unpacked_path, write_cached
from stoker.data.images import source as image_source
from stoker.data.validation.problems import ProblemCollector
from stoker_watch import regular_files
from stoker_watch.errors import DataError, make_error

SUFFIXES = (".parquet",)
IMAGE_COLUMNS = ("image", "img", "jpg", "jpeg", "png")
OTHER_COLUMNS = ("width", "height", "file_name", "filename")
UNREADABLE = (OSError, pa.ArrowException, UnicodeDecodeError)
"""What pyarrow raises for a damaged file, the last one for names of columns that are not UTF-8."""
BATCH_ROWS, BATCH_BYTES = 64, 1 << 27
"""Rows whose images are in memory at the same time: up to the first, fewer where they could have more bytes."""


def recognize(path: Path) -> DatasetLayout | None:
    """Returns the Parquet data set in a folder or in its split folders, or of a file; None if there is none."""
    dirs = ("data", "default")
    return recognize_shards(path, "parquet", "Parquet", dir_names=dirs, suffix=".parquet", has_samples=_has_boxes)


def read(layout: DatasetLayout, problems: ProblemCollector) -> AnnotationTable:
    """Reads all files, and copies their images into the cache where they are not there. Raises DataError if no row is
    usable, StorageError if the disk is full."""
    shards, class_names, copied = [], list[str](), 0
    for part in layout.parts:
        try:
            names = _class_names(pq.read_schema(part.annotations))
        except UNREADABLE as error:
            problems.add("damaged-shard", f"{part.annotations.name}: {str(error).splitlines()[0]}")
            continue
        if class_names and names and names != class_names:
            listed = f"{', '.join(names[:5])} here, {', '.join(class_names[:5])} in others"
            raise make_error(DataError, "parquet-different-classes", part.annotations, cause=listed)
        class_names = class_names or names
        target = unpacked_path(part.annotations)
        shards.append(_read_file(part, target, class_names))
        copied += target.stat().st_size if target.exists() else 0
    table = make_table(layout, shards, problems, format_name="Parquet", class_names=class_names)
    folder = unpacked_path(layout.parts[0].annotations).parent
    files = "one Parquet file" if len(shards) == 1 else f"{len(shards):,} Parquet files"
    table.notes.append(f"the images of {files} are copied into {folder}, {copied:,} bytes")
    return table


def _has_boxes(path: Path) -> bool:
    """Returns whether a file has columns of images and of boxes. Raises DataError for one in a bucket."""
    if (uri := image_source.resolve_stub(path)) is not None:
        raise make_error(DataError, "parquet-in-bucket", uri)
    try:
        schema = pq.read_schema(path)
    except UNREADABLE:
        return False
    return _image_column(schema) is not None and bool(_annotation_columns(schema))


def _image_column(schema: pa.Schema) -> str | None:
    for name in IMAGE_COLUMNS:
        kind = schema.field(name).type if name in schema.names else pa.null()
        has_bytes = pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0
        if has_bytes or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            return name
    return None


def _annotation_columns(schema: pa.Schema) -> list[str]:
    """Returns a column of objects, or those of boxes and classes; empty: there are none."""
    if objects := [name for name in LIST_KEYS if name in schema.names]:
        return objects[:1]
    boxes = [name for name in (*CORNERS_KEYS, *EXTENT_KEYS) if name in schema.names]
    classes = [name for name in CLASS_LIST_KEYS if name in schema.names and pa.types.is_list(schema.field(name).type)]
    return [boxes[0], classes[0]] if boxes and classes else []


def _class_names(schema: pa.Schema) -> list[str]:
    """Returns the names of a ClassLabel, which the package `datasets` stores in the metadata; empty: there are none."""
    try:
        features = msgspec.json.decode((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
    except (ValueError, msgspec.MsgspecError, RecursionError, KeyError, TypeError):
        return []
    for key in _annotation_columns(schema):
        if names := next(_iter_class_labels(features.get(key) if isinstance(features, dict) else None), None):
            return names
    return []


def _iter_class_labels(feature: Any, depth: int = 0) -> Iterator[list[str]]:
    if isinstance(feature, Mapping) and feature.get("_type") == "ClassLabel" and isinstance(feature.get("names"), list):
        yield [str(name) for name in feature["names"]]
    inside = feature.values() if isinstance(feature, Mapping) else feature if isinstance(feature, list) else ()
    for inner in inside if depth < 8 else ():
        yield from _iter_class_labels(inner, depth + 1)


def _read_file(part: SplitFiles, target: Path, class_names: list[str]) -> ShardSamples:
    path = part.annotations
    samples = ShardSamples(target, part.split_index)
    try:
        schema = pq.read_schema(path)
        image_column, columns = _image_column(schema), _annotation_columns(schema)
        if image_column is None or not columns:
            samples.problems.append(("damaged-shard", f"{path.name}: its columns are not those of the other files"))
            return samples
        columns += [name for name in OTHER_COLUMNS if name in schema.names]
        file, batch_rows, max_bytes = _open(path, image_column, columns)
        if not target.exists():
            _copy_images(file.iter_batches(batch_rows, columns=[image_column]), target, path, max_bytes)
        with open_shard(target) as (read, _):
            start, number, num_text_bytes = 0, 0, 0
            for batch in file.iter_batches(batch_rows, columns=[image_column, *columns]):
                num_text_bytes += sum(map(text_bytes, batch.columns))
                if num_text_bytes > max_bytes:
                    raise pa.ArrowInvalid(f"the texts up to row {number:,} have {num_text_bytes:,} bytes")
                lengths = [0 if data is None else len(data) for data in _iter_images(batch, image_column)]
                names = _file_names(batch[image_column])
                for length, row, file_name in zip(lengths, batch.select(columns).to_pylist(), names, strict=True):
                    name, row = f"row {number}", {"file_name": file_name, **row}
                    if length:
                        samples.add(name, read, start, length, _with_names(row, class_names) if class_names else row)
                    else:
                        samples.problems.append(("record-without-image", f"{path.name}: {name} has no bytes"))
                    start, number = start + length, number + 1
    except UNREADABLE as error:
        samples.problems.append(("damaged-shard", f"{path.name}: {str(error).splitlines()[0]}"))
    return samples


def _open(path: Path, image_column: str, columns: list[str]) -> tuple[pq.ParquetFile, int, int]:
    """Returns a file, how many rows of it may be read at once, and how many bytes its images may have, and its texts.
    Raises OSError, ArrowException for one that would expand to far more than its size."""
    used, images = [image_column, *columns], (image_column, f"{image_column}.bytes")
    with open_shard(path) as (read, size_bytes):
        metadata = pq.read_metadata(path)
        footer = read_footer(read, size_bytes, metadata)
        largest = check_pages(read, size_bytes, metadata, footer, used)
    texts = texts_of(metadata, footer, used, but=images)
    file = pq.ParquetFile(regular_files.open_file(path), metadata=metadata, read_dictionary=texts)
    return file, max(1, min(BATCH_ROWS, BATCH_BYTES // max(largest, 1))), max_unpacked_bytes(size_bytes)


def _copy_images(batches: Iterator[pa.RecordBatch], target: Path, path: Path, max_bytes: int) -> None:
    """Writes the images of a file, one after the other. Raises StorageError, ArrowInvalid for more than `max_bytes`."""
    copied = 0
    with write_cached(target, path) as append:
        for batch in batches:
            for data in _iter_images(batch, batch.schema.names[0]):
                copied += len(data or b"")
                if copied > max_bytes:
                    raise pa.ArrowInvalid(f"its images have more than {max_bytes:,} bytes, too many for its size")
                append(data or b"")


def _iter_images(batch: pa.RecordBatch, column: str) -> Iterator[memoryview | None]:
    values = batch[column]
    if pa.types.is_struct(values.type):
        values = pc.struct_field(values, "bytes")
    for value in values:
        yield None if not value.is_valid else memoryview(value.as_buffer())


def _file_names(images: pa.Array) -> list[str | None]:
    """Returns the names of the image files in the source, where the column has them."""
    if not pa.types.is_struct(images.type) or images.type.get_field_index("path") < 0:
        return [None] * len(images)
    names: list[str | None] = pc.struct_field(images, "path").to_pylist()
    return names


def _with_names(value: Any, class_names: list[str], *, is_class: bool = False) -> Any:
    """Returns a row, or a part of it, with names in place of the numbers of classes."""
    if isinstance(value, dict):
        return {key: _with_names(v, class_names, is_class=key in CLASS_LIST_KEYS) for key, v in value.items()}
    if isinstance(value, list):
        return [_with_names(item, class_names, is_class=is_class) for item in value]
    if not is_class:
        return value
    is_number = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(class_names)
    return class_names[value] if is_number else None
