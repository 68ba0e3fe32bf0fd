"""Shards of others for tests, written from the descriptions of the formats, without any code of stoker."""

import io
import json
import struct
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


def write_tar(path: Path, files: Iterable[tuple[str, bytes]], *, format: int = tarfile.PAX_FORMAT) -> Path:
    """An archive as WebDataset's TarWriter makes it: with times of fractions of a second, which need pax headers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as archive:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info.mtime = 1700000000.25 if format == tarfile.PAX_FORMAT else 1700000000
            archive.addfile(info, io.BytesIO(data))
    return path


FIXED = {"int": 8, "int64": 8, "uint8": 1, "float32": 4}
"""Encodings of MDS with a fixed number of bytes."""


def write_mosaic(
    folder: Path,
    columns: Mapping[str, str],
    rows: Sequence[Mapping[str, bytes]],
    *,
    per_shard: int = 2,
    more: Mapping[str, object] | None = None,
) -> Path:
    """An MDS data set. columns: name → encoding; rows: name → encoded value; more: into each entry of index.json.

    From docs/source/preparing_datasets/dataset_format.md and streaming/base/format/mds/writer.py of mosaicml/streaming:
    uint32 number of samples n, uint32 [n + 1] offsets, the JSON of the columns, then the samples: uint32 sizes of the
    columns of variable size, and the values in the order of the column names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(columns)
    encodings = [columns[name] for name in names]
    sizes = [FIXED.get(encoding) for encoding in encodings]
    config = {
        "column_encodings": encodings, "column_names": names, "column_sizes": sizes, "compression": None,
        "format": "mds", "hashes": [], "size_limit": 1 << 26, "version": 2,
    }  # fmt: skip
    config_json = json.dumps(config, sort_keys=True).encode()
    shards = []
    for number in range(0, len(rows), per_shard):
        samples = []
        for row in rows[number : number + per_shard]:
            head = b"".join(
                struct.pack("<I", len(row[name])) for name, size in zip(names, sizes, strict=True) if size is None
            )
            samples.append(head + b"".join(row[name] for name in names))
        start = 4 + 4 * (len(samples) + 1) + len(config_json)
        offsets = [start]
        for sample in samples:
            offsets.append(offsets[-1] + len(sample))
        data = struct.pack(f"<{len(offsets) + 1}I", len(samples), *offsets) + config_json + b"".join(samples)
        name = f"shard.{number // per_shard:05d}.mds"
        (folder / name).write_bytes(data)
        raw = {"basename": name, "bytes": len(data), "hashes": {}}
        shards.append({**config, "raw_data": raw, "samples": len(samples), "zip_data": None, **(more or {})})
    (folder / "index.json").write_text(json.dumps({"shards": shards, "version": 2}))
    return folder


def array(values: Sequence[Sequence[float]] | Sequence[int], dtype: str, shape: tuple[int, ...] | None = None) -> bytes:
    """The value of a column `ndarray:DTYPE` (with `shape`: `ndarray:DTYPE:SHAPE`)."""
    import numpy as np

    content = np.array(values, dtype)
    head = b"" if shape is not None else bytes([content.ndim << 2, *content.shape])
    return head + content.tobytes()


def write_hub_parquet(path: Path, rows: Sequence[Mapping[str, object]], class_names: Sequence[str] = ()) -> Path:
    """A file as `datasets` writes it for the Hugging Face hub: snappy, row groups of 100, the features as metadata."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    box_type = pa.list_(pa.float32(), 4) if len(rows) % 2 else pa.list_(pa.float32())
    objects = pa.struct([("bbox", pa.list_(box_type)), ("category", pa.list_(pa.int64()))])
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table(
        {
            "image": pa.array([row["image"] for row in rows], image),
            "objects": pa.array([row["objects"] for row in rows], objects),
        }
    )
    category = {"names": list(class_names), "_type": "ClassLabel"} if class_names else {"dtype": "int64"}
    features = {
        "image": {"_type": "Image"},
        "objects": {"feature": {"bbox": {"_type": "Sequence"}, "category": category}, "_type": "Sequence"},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    pq.write_table(table.replace_schema_metadata(metadata), path, row_group_size=100, compression="snappy")
    return path
