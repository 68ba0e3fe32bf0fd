"""WebDataset: tar archives in which files with the same name up to its first dot are a sample, an image and its boxes.

Recognized: *.tar in one folder, in its folder `shards/` or `data/`, or in `train/`, `valid/`, `test/`; one archive. The
split is in the name of the archive or of that folder. Shards that `stoker data pack` made come with an index
(`shard_index.py`), and are then not scanned. Images are not copied: the table has the byte range of each. Format:
https://github.com/webdataset/webdataset. Not here: which annotations are understood (`sample_annotations.py`).
"""

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec

from stoker.data.formats import shard_index
from stoker.data.formats.sample_annotations import LAYOUTS
from stoker.data.formats.shard_bytes import map_shards, open_shard
from stoker.data.formats.shard_samples import MAX_ANNOTATION_BYTES, ShardSamples, make_table
from stoker.data.formats.tables import (
    IMAGE_SUFFIXES,
    SPLITS,
    AnnotationTable,
    DatasetLayout,
    SplitFiles,
    check_unannotated_splits,
    iter_split_dirs,
    list_subdirs,
    split_from_name,
)
from stoker.data.formats.tar_members import DamagedArchive, Member, TruncatedArchive, iter_members
from stoker.data.images.headers import ReadAt
from stoker.data.validation.problems import ProblemCollector
from stoker.errors import DataError, StokerError

SUFFIXES = (".tar",)
SHARD_DIRS = ("shards", "data")
ANNOTATION_SUFFIXES = ("json", "instances.json", "annotations.json", "annotation.json", "bbox.json", "boxes.json")
"""Of a sample, the most likely first: `instances.json` is that of WebDataset's own COCO example."""
PROBED_FILES = 8
"""First files of an archive that are looked at to recognize it."""


def find(folder: Path) -> DatasetLayout | None:
    """The WebDataset in a folder or in its split folders, or None. Raises DataError for samples without boxes."""
    if (folder / shard_index.INDEX_FILE).is_file():
        return shard_index.layout_of(folder)
    shard_index.refuse_unfinished(folder)
    subdirs = list_subdirs(folder)
    for shards_dir in (folder, *(subdirs[name] for name in SHARD_DIRS if name in subdirs)):
        parts = _find_parts(shards_dir, None)
        if parts:
            return _make_layout(folder, parts, [])
    for split, path in iter_split_dirs(folder):
        parts += _find_parts(path, split)
    return _make_layout(folder, parts, check_unannotated_splits(folder, parts)) if parts else None


def from_file(path: Path) -> DatasetLayout | None:
    """The data set of a single archive, or of an index."""
    if path.name == shard_index.INDEX_FILE:
        return shard_index.layout_of(path.parent)
    if not _has_samples(path):
        return None
    return _make_layout(path.parent, [_part(path, None)], [])


def read(layout: DatasetLayout, problems: ProblemCollector) -> AnnotationTable:
    """Reads the index, or the annotations of all shards. Raises DataError if no sample is usable."""
    if layout.metadata_files:
        return shard_index.read(layout, problems)
    shards = map_shards(_read_shard, layout.parts, path=layout.root)
    return make_table(layout, shards, problems, format_name="WebDataset")


def _find_parts(folder: Path, split: str | None) -> list[SplitFiles]:
    """The archives in a folder, sorted, if the first has samples."""
    with os.scandir(folder) as entries:
        names = sorted(
            entry.name
            for entry in entries
            if entry.name.lower().endswith(SUFFIXES) and not entry.name.startswith(".") and entry.is_file()
        )
    if not names or not _has_samples(folder / names[0]):
        return []
    return [_part(folder / name, split) for name in names]


def _part(path: Path, split: str | None) -> SplitFiles:
    return SplitFiles(split=split or split_from_name(path.stem), annotations=path, image_dirs=())


def _make_layout(root: Path, parts: list[SplitFiles], notes: list[str]) -> DatasetLayout:
    ordered = sorted(parts, key=lambda part: SPLITS.index(part.split) if part.split else len(SPLITS))
    return DatasetLayout(
        format="webdataset",
        description=f"WebDataset in {len(parts):,} shards" if len(parts) > 1 else "WebDataset in one shard",
        root=root,
        parts=tuple(ordered),
        notes=tuple(notes),
    )


def _has_samples(path: Path) -> bool:
    """Whether an archive begins with an image and annotations of the same name. Raises DataError for an image with
    something else: it is a WebDataset of another task."""
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
    raise DataError(
        "The WebDataset samples have no boxes that are understood.",
        location=f"{path}: {first[0].name}",
        cause=f"the files of a sample are {listed}; .cls and .txt are classes and captions of whole images",
        choices=[f".{suffix}" for suffix in ANNOTATION_SUFFIXES],
        fix=f"write the boxes of each image as .json, for example {LAYOUTS[0]}",
    )


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
                kind = "truncated-shard" if isinstance(error, TruncatedArchive) else "damaged-shard"
                samples.problems.append((kind, f"{path.name}: {error}"))
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
    key, files, damage = "", list[Member](), None
    while True:
        try:
            member = next(members, None)
        except DamagedArchive as error:
            member, damage = None, error
        next_key = None if member is None else _split_name(member.name)[0]
        if files and next_key != key:
            yield key, files
            files = []
        if damage is not None:
            raise damage
        if member is None or next_key is None:
            return
        key = next_key
        files.append(member)


def _split_name(name: str) -> tuple[str, str]:
    """The key of a sample, up to the first dot after the folders, and the rest, in lower case."""
    folder, slash, file = name.rpartition("/")
    stem, _, suffix = file.partition(".")
    return folder + slash + stem, suffix.lower()


def _image_of(members: list[Member]) -> Member | None:
    return next((m for m in members if f".{_split_name(m.name)[1]}".endswith(IMAGE_SUFFIXES)), None)


def _annotations_of(members: list[Member]) -> Member | None:
    by_suffix = {_split_name(member.name)[1]: member for member in members}
    return next((by_suffix[suffix] for suffix in ANNOTATION_SUFFIXES if suffix in by_suffix), None)
