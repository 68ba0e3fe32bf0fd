"""Formats of shards: size, CPU time to read an image at random and in order, and time to open a packed data set.

The images are random bytes, which no format can compress, as little as JPEG: only storing and reading is measured. All
reads are from the page cache: their CPU time does not depend on the disk. Formats are read in turn. Parquet is written
as for the Hugging Face hub (row groups of 100, snappy), and without compression; a random image needs its row group.
MDS is written from its description. The index is opened in a fresh process, after the imports; its shards are sparse
files. Bars: opening 118,287 images with 860,001 boxes, as many as COCO has; a read from a tar by that of a file.
"""

import io
import json
import os
import statistics
import struct
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.processes import run_child, serve_child
from benchmarks.report import Bar, Report, options, publish, spread

NUM_IMAGES, MEAN_BYTES, PER_SHARD = 2000, 110_000, 500
COCO_IMAGES, COCO_BOXES = 118_287, 860_001
ROW_GROUP = 100
Ranges = list[tuple[Path, int, int]]


def make_images(count: int) -> list[tuple[bytes, bytes]]:
    """(image, annotations) of each."""
    rng = np.random.default_rng(0)
    sizes = (rng.lognormal(0, 0.5, count) * MEAN_BYTES / 1.13).astype(int)
    boxes = [{"bbox": [10.25, 20.5, 100.75, 50.0], "category_id": 3, "category": "car"}] * 7
    return [(rng.bytes(size), json.dumps({"annotations": boxes}).encode()) for size in sizes.tolist()]


def write_files(folder: Path, images: list[tuple[bytes, bytes]]) -> Ranges:
    ranges: Ranges = []
    for number, (image, annotations) in enumerate(images):
        (folder / f"{number:09d}.jpg").write_bytes(image)
        (folder / f"{number:09d}.json").write_bytes(annotations)
        ranges.append((folder / f"{number:09d}.jpg", 0, len(image)))
    return ranges


def write_tars(folder: Path, images: list[tuple[bytes, bytes]]) -> Ranges:
    ranges: Ranges = []
    for first in range(0, len(images), PER_SHARD):
        path, offset = folder / f"{first:06d}.tar", 0
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
            for number, pair in enumerate(images[first : first + PER_SHARD], first):
                for suffix, data in zip(("jpg", "json"), pair, strict=True):
                    info = tarfile.TarInfo(f"{number:09d}.{suffix}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
                    if suffix == "jpg":
                        ranges.append((path, offset + 512, len(data)))
                    offset += 512 + -(-len(data) // 512) * 512
    return ranges


def write_mds(folder: Path, images: list[tuple[bytes, bytes]]) -> Ranges:
    ranges: Ranges = []
    config = json.dumps({"column_names": ["annotations", "image"], "column_encodings": ["json", "bytes"]}).encode()
    for first in range(0, len(images), PER_SHARD):
        path, part = folder / f"shard.{first:05d}.mds", images[first : first + PER_SHARD]
        offsets = [4 + 4 * (len(part) + 1) + len(config)]
        for image, annotations in part:
            ranges.append((path, offsets[-1] + 8 + len(annotations), len(image)))
            offsets.append(offsets[-1] + 8 + len(annotations) + len(image))
        samples = b"".join(struct.pack("<II", len(a), len(image)) + a + image for image, a in part)
        path.write_bytes(struct.pack(f"<{len(offsets) + 1}I", len(part), *offsets) + config + samples)
    return ranges


def write_parquet(folder: Path, images: list[tuple[bytes, bytes]], compression: str) -> None:
    for first in range(0, len(images), PER_SHARD):
        part = images[first : first + PER_SHARD]
        table = pa.table({"image": [image for image, _ in part], "annotations": [a for _, a in part]})
        pq.write_table(table, folder / f"{first:06d}.parquet", row_group_size=ROW_GROUP, compression=compression)


def read_range(path: Path, start: int, length: int) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.pread(fd, length, start)
    finally:
        os.close(fd)


def read_ranges(ranges: Ranges, order: list[int]) -> Iterator[int]:
    for number in order:
        yield len(read_range(*ranges[number]))


def read_whole(ranges: Ranges) -> Iterator[int]:
    """Images in order, from shards that are read as a whole."""
    data, current = b"", None
    for path, start, length in ranges:
        if path != current:
            data, current = path.read_bytes(), path
        yield len(memoryview(data)[start : start + length])


def read_row_groups(folder: Path, order: list[int]) -> Iterator[int]:
    files = [pq.ParquetFile(path) for path in sorted(folder.glob("*.parquet"))]
    for number in order:
        file, row = files[number // PER_SHARD], number % PER_SHARD
        table = file.read_row_group(row // ROW_GROUP, columns=["image"])
        yield len(table["image"][row % ROW_GROUP].as_buffer())


def read_batches(folder: Path) -> Iterator[int]:
    for path in sorted(folder.glob("*.parquet")):
        for batch in pq.ParquetFile(path).iter_batches(ROW_GROUP, columns=["image"]):
            yield from (len(value.as_buffer()) for value in batch["image"])


def generate_packed(folder: Path, images: int, boxes: int) -> None:
    """An index like that of COCO, with shards that are sparse files."""
    from stoker.data.formats import webdataset
    from stoker.data.formats.tables import AnnotationTable
    from stoker.data.formats.webdataset import PackedInfo, Shard

    rng = np.random.default_rng(0)
    per_shard, length = 400, 150_000
    num_shards = -(-images // per_shard)
    size_bytes = per_shard * (length + 2048)
    owner = np.sort(rng.integers(0, images, boxes))
    corners = rng.random((boxes, 4), np.float32) * (300, 200, 300, 200) + (0, 0, 305, 205)
    shards = tuple(
        Shard(name=f"train-{n:05d}.tar", split="train", num_images=per_shard, size_bytes=size_bytes, sha256="0" * 64)
        for n in range(num_shards)
    )
    for shard in shards:
        with (folder / shard.name).open("wb") as file:
            file.truncate(size_bytes)
    numbers = np.arange(images)
    content = AnnotationTable(
        class_names=[],
        category_ids=[],
        folders=[],
        file_names=[f"{n:012d}.jpg" for n in range(images)],
        split=(numbers % 20 == 0).astype(np.int8),
        image_id=numbers,
        folder_index=(numbers // per_shard).astype(np.int32),
        byte_range=np.stack((numbers % per_shard * (length + 2048), np.full(images, length)), axis=1),
        original_size=np.full((images, 2), (480, 640), np.int32),
        image_index=owner,
        boxes=corners,
        labels=rng.integers(0, 80, boxes).astype(np.int32),
        crowd=np.zeros(boxes, np.bool_),
        area=rng.random(boxes) * 9000,
        box_id=np.arange(boxes),
        box_id_kind="object",
    )
    info = PackedInfo(
        version=webdataset.VERSION,
        plan="",
        class_names=tuple(f"class {n}" for n in range(80)),
        category_ids=tuple(range(1, 81)),
        shards=shards,
        num_skipped=0,
        source_bytes=0,
    )
    (folder / webdataset.INDEX_FILE).write_bytes(webdataset.encode_index(info, content))


def open_packed(folder: Path) -> dict[str, Any]:
    """Run in a fresh process with a fresh cache folder, then again with that folder."""
    from stoker.data.index import open_index

    times = []
    for _ in range(2):
        start = time.perf_counter()
        index = open_index(folder)
        times.append(time.perf_counter() - start)
    return {"first_s": times[0], "again_s": times[1], "images": len(index), "boxes": len(index.boxes)}


def run(quick: bool) -> Report:
    count, n = (200, 3) if quick else (NUM_IMAGES, 5)
    images = make_images(count)
    total = sum(len(image) for image, _ in images)
    order = np.random.default_rng(1).permutation(count).tolist()
    cpu_s: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as temporary:
        folders = {name: Path(temporary) / name for name in ("files", "tar", "mds", "snappy", "none", "packed")}
        for folder in folders.values():
            folder.mkdir()
        ranges = {
            "files": write_files(folders["files"], images),
            "tar": write_tars(folders["tar"], images),
            "mds": write_mds(folders["mds"], images),
        }
        for compression in ("snappy", "none"):
            write_parquet(folders[compression], images, compression)
        reads: dict[str, Callable[[], Iterator[int]]] = {}
        for name, own in ranges.items():
            reads[f"{name} random"] = lambda own=own: read_ranges(own, order)  # type: ignore[misc]
            reads[f"{name} in order"] = lambda own=own: read_whole(own)  # type: ignore[misc]
        for name in ("snappy", "none"):
            # a row group per image: a few are enough
            reads[f"{name} random"] = lambda name=name: read_row_groups(folders[name], order[:50])  # type: ignore[misc]
            reads[f"{name} in order"] = lambda name=name: read_batches(folders[name])  # type: ignore[misc]
        counts = {what: 50 if what in ("snappy random", "none random") else count for what in reads}
        for number in range(n + 1):
            for what, read in reads.items():
                start = time.process_time()
                got = sum(read())
                seconds = time.process_time() - start
                if counts[what] == count and got != total:
                    raise RuntimeError(f"{what}: {got:,} bytes instead of {total:,}")
                if number:  # the first fills the page cache
                    cpu_s.setdefault(what, []).append(seconds / counts[what])
        sizes = {
            name: sum(path.stat().st_size for path in folder.iterdir())
            for name, folder in folders.items()
            if name != "packed"
        }
        coco = (COCO_IMAGES // 10, COCO_BOXES // 10) if quick else (COCO_IMAGES, COCO_BOXES)
        run_child("generate", folders["packed"], folders["packed"], *coco)
        index_mb = (folders["packed"] / "stoker-index.arrow").stat().st_size / 1e6
        opened = [run_child("open", folders["packed"], Path(temporary) / f"cache-{k}") for k in range(n)]
    if any((result["images"], result["boxes"]) != coco for result in opened):
        raise RuntimeError(f"the index has other images than were written: {opened[0]}")
    report = Report(
        f"Formats of shards: {count:,} images of {total / count / 1e3:.0f} kB on average, {PER_SHARD} to a shard; an "
        f"index of {coco[0]:,} images and {coco[1]:,} boxes",
        n,
        ("stoker", "pyarrow", "numpy"),
    )
    names = {
        "files": "a file per image and per annotation", "tar": "WebDataset tar", "mds": "MDS",
        "snappy": "Parquet, snappy, row groups of 100", "none": "Parquet, not compressed, row groups of 100",
    }  # fmt: skip
    for name, title in names.items():
        at_random, in_order = (spread(cpu_s[f"{name} {how}"]) for how in ("random", "in order"))
        report.rows.append(
            {
                "what": title,
                "bytes / image bytes": sizes[name] / total,
                "random CPU ms": 1e3 * at_random["median"],
                "random min": 1e3 * at_random["min"],
                "random max": 1e3 * at_random["max"],
                "in order CPU ms": 1e3 * in_order["median"],
                "in order min": 1e3 * in_order["min"],
                "in order max": 1e3 * in_order["max"],
            }
        )
    for what, key in (("open_index of the packed data set, first", "first_s"), ("the same, again", "again_s")):
        times = spread([result[key] for result in opened])
        report.rows.append(
            {"what": what, "s": times["median"], "s min": times["min"], "s max": times["max"], "MB": index_mb}
        )
    medians = {what: statistics.median(values) for what, values in cpu_s.items()}
    report.bars = [
        Bar.at_most("seconds to open the packed data set first", statistics.median(r["first_s"] for r in opened), 5.0),
        Bar.at_most("CPU of a random read: tar / file", medians["tar random"] / medians["files random"], 1.2),
        Bar.at_most("CPU of a random read: tar / Parquet", medians["tar random"] / medians["none random"], 0.2),
    ]
    return report


if __name__ == "__main__":
    serve_child({"generate": generate_packed, "open": open_packed})
    publish(lambda arguments: run(arguments.quick), options(__doc__))
