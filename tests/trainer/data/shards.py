"""Shards of others for tests, written from the descriptions of the formats, without any code of stoker."""

import io
import json
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
