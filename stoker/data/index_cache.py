"""The cache folder, and the file in it that holds an index: one Arrow IPC file, a row per picture, memory-mapped.

Any Arrow reader opens the file; what is not a column is JSON under the key `stoker` of the schema's metadata. The file
is replaced as a whole by rename, so processes that build at the same time do not disturb each other or a reader. Not
here: what the columns mean to users (`index.py`).
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from stoker.data.formats.tables import SPLITS, Columns, Found, annotation_files
from stoker.data.validation.problems import Problem
from stoker.errors import DataError, PreflightError
from stoker.storage.local_files import cache_folder, write_whole

VERSION = 9
"""Of the file and of everything that decides its content: raise it when reading, cleaning or dividing changes."""

SCHEMA = pa.schema(
    [
        ("name", pa.large_string()),
        ("folder", pa.int32()),
        ("split", pa.int8()),
        ("image_id", pa.int64()),
        ("span", pa.list_(pa.int64(), 2)),  # zeros: the picture is a file of its own
        ("size", pa.list_(pa.int32(), 2)),
        ("boxes", pa.large_list(pa.list_(pa.float32(), 4))),
        ("labels", pa.large_list(pa.int32())),
        ("crowd", pa.large_list(pa.uint8())),  # Arrow's own booleans are bits, which numpy cannot view
        ("area", pa.large_list(pa.float64())),
    ]
)
META, DIGEST = b"stoker", b"stoker-digest"
LOOKED_AT = 64
"""Pictures that tell whether the pictures, whose sizes are in the index, were written anew under their old names."""


class Meta(msgspec.Struct, kw_only=True):
    """What the index file says besides its columns."""

    fingerprint: str
    root: str
    format: str
    class_names: tuple[str, ...]
    category_ids: tuple[int, ...]
    splits: tuple[str, ...]
    folders: tuple[str, ...]
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    folders_changed: tuple[int, ...]
    """When each of `folders` was changed last, ns; names are matched with what is in them."""
    measured: str
    """Of the files of some pictures (`_pictures_stamp`), where sizes were read from them; else empty."""


def index_path(
    data: Path, format: str, val_fraction: float, classes: tuple[str, ...] = (), descriptions: tuple[Path, ...] = ()
) -> Path:
    """The cache file of a data set: of its resolved path, so a data set that was moved gets another. One folder can be
    several data sets, by the files that describe it."""
    described = [str(path) for path in descriptions]
    key = f"{data}\0{format}\0{val_fraction!r}\0{classes!r}\0{described!r}".encode("utf-8", "surrogateescape")
    return cache_folder() / "index" / f"{data.stem[:40]}-{blake2b(key, digest_size=8).hexdigest()}.arrow"


def fingerprint(found: Found, val_fraction: float) -> str:
    """Changes when the index must be built again. Looks at names, sizes and times only: a stat per annotation file.

    Picture folders count by their time of change, since their content decides which picture an annotation is about.
    """
    digest = blake2b(f"{VERSION}\0{found!r}\0{val_fraction!r}".encode("utf-8", "surrogateescape"), digest_size=16)
    files = [*found.descriptions, *(part.annotations for part in found.parts)]
    files += [part.listing for part in found.parts if part.listing is not None]
    for line in (line for file in dict.fromkeys(files) for line in _stamps(file)):
        digest.update(line.encode("utf-8", "surrogateescape"))
    for part in found.parts:
        for folder in part.pictures:
            changed = folder.stat().st_mtime_ns if folder.exists() else None
            digest.update(f"{folder}\0{changed}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _stamps(path: Path) -> Iterator[str]:
    """A line for a file, or for every annotation file of a folder; none for a folder of labels that is not there."""
    if not path.exists():
        return
    for file in annotation_files(path, (".xml", ".txt")) if path.is_dir() else [os.fspath(path)]:
        stat = os.stat(file)
        yield f"{file}\0{stat.st_size}\0{stat.st_mtime_ns}\n"


def write(path: Path, columns: Columns, problems: tuple[Problem, ...], found: Found, stamp: str) -> None:
    """Writes the index file of a cleaned and divided data set. Raises PreflightError where it cannot be written."""
    rows = len(columns.names)
    offsets = pa.array(np.concatenate([[0], np.cumsum(np.bincount(columns.row, minlength=rows))]).astype(np.int64))

    def per_picture(values: pa.Array) -> pa.Array:
        return pa.LargeListArray.from_arrays(offsets, values)

    meta = Meta(
        fingerprint=stamp,
        root=str(found.root),
        format=found.format,
        class_names=tuple(columns.class_names),
        category_ids=tuple(columns.category_ids),
        splits=tuple(name for number, name in enumerate(SPLITS) if (columns.split == number).any()),
        folders=tuple(columns.folders),
        problems=problems,
        notes=tuple(columns.notes),
        folders_changed=_folders_changed(found.root, columns.folders),
        measured=""
        if not columns.measured
        else _pictures_stamp(
            found.root / columns.folders[columns.folder[row]] / columns.names[row] for row in _some(rows)
        ),
    )
    try:
        names, text = pa.array(columns.names, pa.large_string()), msgspec.json.encode(meta)
    except UnicodeEncodeError as error:
        raise DataError(
            "A file or folder name is not valid Unicode.",
            place=repr(error.object),
            cause=f"its bytes are not UTF-8: {error.reason}",
            fix="rename it",
        ) from error
    batch = pa.record_batch(
        [
            names,
            pa.array(columns.folder),
            pa.array(columns.split),
            pa.array(columns.image_id),
            _rows(np.zeros((rows, 2), np.int64) if columns.span is None else columns.span),
            _rows(columns.size),
            per_picture(_rows(columns.boxes.astype(np.float32))),
            per_picture(pa.array(columns.labels)),
            per_picture(pa.array(columns.crowd.view(np.uint8))),
            per_picture(pa.array(columns.area)),
        ],
        schema=SCHEMA.with_metadata({META: text, DIGEST: _digest(text)}),
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, sink.getvalue().to_pybytes())
    except OSError as error:
        raise PreflightError(
            "The index of the annotations cannot be written.",
            place=path,
            cause=str(error),
            fix="make room, or set STOKER_CACHE_DIR to a folder that can be written",
        ) from error


def _digest(text: bytes) -> bytes:
    return blake2b(text, digest_size=8).hexdigest().encode()


def _rows(values: NDArray[np.float32] | NDArray[np.int32] | NDArray[np.int64]) -> pa.Array:
    """[N, n] as N lists of n."""
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])


def read(path: Path, stamp: str) -> tuple[pa.RecordBatch, Meta] | None:
    """Maps an index file; None when it is absent, out of date or damaged, and is to be built (again).

    Everything that later code relies on to stay inside its arrays is checked, so a damaged file cannot crash a run.
    """
    try:
        with pa.ipc.open_file(pa.memory_map(os.fspath(path))) as reader:
            text = reader.schema.metadata[META]
            if reader.schema.metadata[DIGEST] != _digest(text):
                return None
            meta = msgspec.json.decode(text, type=Meta)
            if meta.fingerprint != stamp or not reader.schema.equals(SCHEMA) or reader.num_record_batches != 1:
                return None
            batch = reader.get_batch(0)
        batch.validate(full=True)
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError, msgspec.MsgspecError):
        return None
    labels, folder, split = (np.asarray(column) for column in (batch["labels"].values, batch["folder"], batch["split"]))
    offsets = [batch[name].offsets for name in ("boxes", "labels", "crowd", "area")]
    sound = (
        all(other.equals(offsets[0]) for other in offsets[1:])
        and len(labels) == offsets[0][-1].as_py()
        and _within(labels, len(meta.class_names))
        and _within(folder, len(meta.folders))
        and _within(split, len(SPLITS))
        and _spans_fit(batch, folder, meta)
    )
    return (batch, meta) if sound and _unchanged(batch, folder, meta) else None


def _unchanged(batch: pa.RecordBatch, folder: NDArray[np.int32], meta: Meta) -> bool:
    """Whether the pictures are those that the index was made of, as far as their folders and some of them tell."""
    root = Path(meta.root)
    if meta.folders_changed != _folders_changed(root, meta.folders):
        return False
    some = (root / meta.folders[folder[row]] / batch["name"][row].as_py() for row in _some(len(folder)))
    return not meta.measured or meta.measured == _pictures_stamp(some)


def _folders_changed(root: Path, folders: Sequence[str]) -> tuple[int, ...]:
    return tuple(_stat(root / folder)[1] for folder in folders)


def _some(rows: int) -> list[int]:
    """Rows from the first to the last, evenly."""
    found: list[int] = np.unique(np.linspace(0, rows - 1, LOOKED_AT).astype(np.int64)).tolist() if rows else []
    return found


def _pictures_stamp(pictures: Iterable[Path]) -> str:
    return blake2b(repr([_stat(picture) for picture in pictures]).encode(), digest_size=8).hexdigest()


def _stat(path: Path) -> tuple[int, int]:
    """Bytes and time of the last change, ns; -1 where there is nothing that can be looked at."""
    try:
        stat = path.stat()
    except OSError:
        return -1, -1
    return stat.st_size, stat.st_mtime_ns


def _within(values: NDArray[np.int32], count: int) -> bool:
    return values.size == 0 or (values.min() >= 0 and values.max() < count)


def _spans_fit(batch: pa.RecordBatch, folder: NDArray[np.int32], meta: Meta) -> bool:
    """Whether the files that pictures lie inside are there and long enough; one unpacked into the cache may be gone."""
    start, count = np.asarray(batch["span"].values).reshape(-1, 2).T
    inside = np.flatnonzero(count)
    needed = np.zeros(len(meta.folders), np.int64)
    np.maximum.at(needed, folder[inside], (start + count)[inside])
    for number in np.unique(folder[inside]).tolist():
        try:
            if (Path(meta.root) / meta.folders[number]).stat().st_size < needed[number]:
                return False
        except OSError:  # built anew, which says what is wrong with the file
            return False
    return True
