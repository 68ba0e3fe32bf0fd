"""WebDataset: tar archives in which files with the same name up to its first dot are a sample, an image and its boxes.

Recognized: *.tar in one folder, in its folder `shards/` or `data/`, or in `train/`, `valid/`, `test/`; one archive. The
split is in the name of the archive or of that folder. Shards that `stoker data pack` made come with an index
(`shard_index.py`), and are then not scanned. Images are not copied: the table has the byte range of each. Format:
https://github.com/webdataset/webdataset. Not here: which annotations are understood (`shards.py`).
"""

import tarfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from stoker.data.formats import shard_index
from stoker.data.formats.folders import IMAGE_SUFFIXES
from stoker.data.formats.shards import (
    LAYOUTS,
    MAX_ANNOTATION_BYTES,
    ShardSamples,
    make_table,
    map_shards,
    open_shard,
    recognize_shards,
)
from stoker.data.formats.tables import AnnotationTable, DatasetLayout, SplitFiles
from stoker.data.images.headers import ReadAt
from stoker.data.validation.problems import ProblemCollector
from stoker.errors import DataError, StokerError


class Member(NamedTuple):
    name: str
    start: int
    length: int


SUFFIXES = (".tar",)
ANNOTATION_SUFFIXES = ("json", "instances.json", "annotations.json", "annotation.json", "bbox.json", "boxes.json")
"""Of a sample, the most likely first: `instances.json` is that of WebDataset's own COCO example."""
PROBED_FILES = 8
"""First files of an archive that are looked at to recognize it."""


def recognize(path: Path) -> DatasetLayout | None:
    """The WebDataset in a folder or in its split folders, of an archive, or of an index; None if there is none. Raises
    DataError for samples without boxes."""
    folder = path if path.is_dir() else path.parent
    if path.name == shard_index.INDEX_FILE or (path == folder and (folder / shard_index.INDEX_FILE).is_file()):
        return shard_index.layout_of(folder)
    if path == folder:
        shard_index.refuse_unfinished(folder)
    return recognize_shards(
        path, "webdataset", "WebDataset", dir_names=("shards", "data"), suffix=".tar", has_samples=_has_samples
    )


def read(layout: DatasetLayout, problems: ProblemCollector) -> AnnotationTable:
    """Reads the index, or the annotations of all shards. Raises DataError if no sample is usable."""
    if layout.metadata_files:
        return shard_index.read(layout, problems)
    shards = map_shards(_read_shard, layout.parts, path=layout.root)
    return make_table(layout, shards, problems, format_name="WebDataset")


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


BLOCK = 512
END = bytes(2 * BLOCK)
"""What ends an archive."""
MAX_NAME_BYTES = 1 << 16
"""Longest name or pax header that is read."""


class DamagedArchive(Exception):
    """The archive cannot be read from (byte) on; the message says why."""


class TruncatedArchive(DamagedArchive):
    """The archive ends within a file."""


def iter_members(read: ReadAt, total_bytes: int) -> Iterator[Member]:
    """The regular files, in order. Raises DamagedArchive after those before the damage."""
    offset, pax, long_name = 0, dict[str, str](), ""
    while offset < total_bytes:
        block = read(offset, BLOCK)
        if len(block) < BLOCK:
            raise TruncatedArchive(f"it ends at byte {total_bytes:,}, within a header")
        if not any(block):
            return
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise DamagedArchive(f"byte {offset:,}: {error}") from error
        start, length = offset + BLOCK, header.size
        if header.type in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
            if not 0 <= length <= MAX_NAME_BYTES:
                raise DamagedArchive(f"byte {offset:,}: a header of {length:,} bytes")
            content = read(start, length)
            if header.type == tarfile.XHDTYPE:
                pax = _parse_pax(content, offset)
            elif header.type == tarfile.GNUTYPE_LONGNAME:
                long_name = content.rstrip(b"\0").decode("utf-8", "surrogateescape")
        else:
            if "size" in pax and pax["size"].isdigit():
                length = int(pax["size"])
            if length < 0 or start + length > total_bytes:
                raise TruncatedArchive(f"it ends at byte {total_bytes:,}, within {header.name}")
            if header.isreg():
                yield Member(pax.get("path") or long_name or header.name, start, length)
            elif header.type not in tarfile.SUPPORTED_TYPES:
                raise DamagedArchive(f"byte {offset:,}: a file of the unknown type {header.type!r}")
            else:
                length = 0  # a folder or a link has no content
            pax, long_name = {}, ""
        offset = start + padded(length)


def _parse_pax(content: bytes, offset: int) -> dict[str, str]:
    """Records "LENGTH KEY=VALUE\\n"."""
    values: dict[str, str] = {}
    while content:
        digits, _, _ = content.partition(b" ")
        if not digits.isdigit() or not len(digits) < int(digits) <= len(content):
            raise DamagedArchive(f"byte {offset:,}: a pax header that cannot be read")
        key, _, value = content[len(digits) + 1 : int(digits) - 1].partition(b"=")
        values[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        content = content[int(digits) :]
    return values


def padded(length: int) -> int:
    """The bytes that a file of `length` bytes takes after its header."""
    return -(-length // BLOCK) * BLOCK


def tar_header(name: str, length: int) -> bytes:
    """The header of a file: the same bytes wherever and whenever it is written. The name must be short ASCII."""
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = length, 0o644, 0
    return info.tobuf(tarfile.USTAR_FORMAT)
