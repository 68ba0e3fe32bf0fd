"""The index: all annotations of a data set as columns in one memory-mapped file, opened in milliseconds.

`open_index` finds the format, builds the file once and again when the source changed, and maps it. There is no Python
object per picture or box, and all processes of a machine share one copy. `require_pictures` checks, apart, that the
pictures exist. Not here: which layout a folder has (`detect.py`), reading it (`formats/`), dropping and dividing
(`clean.py`), the file (`index_cache.py`), the content of the pictures (`check.py`, `decode.py`).
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from stoker.data import index_cache
from stoker.data.formats import names as picture_names
from stoker.data.formats.detect import FORMATS, endings_of_files, find_data
from stoker.data.formats.tables import ANNOTATION_FOLDERS, PICTURE_ENDINGS, SPLITS, by_folder
from stoker.data.images import source as places
from stoker.data.validation import clean
from stoker.data.validation.problems import FEW, MAX_BAD, Problem, Problems, tolerated
from stoker.errors import ConfigError, DataError
from stoker.storage.uri import expand, is_address, parse

if TYPE_CHECKING:
    from stoker.storage.store import Store

__all__ = ["Index", "Problem", "missing_pictures", "open_index", "require_pictures", "unnamed_pictures"]

VAL_FRACTION = 0.1
FEW_FILES = 64
"""Pictures of a folder up to which a stat for each is cheaper than listing the folder."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Index:
    """R pictures with K boxes. The arrays are read-only views into the mapped file, which they keep open."""

    root: Path
    """Absolute; paths are relative to it. Of a data set in a bucket, the mirror of it (`bucket.py`)."""
    format: str
    """A row of `find.FORMATS`: "coco", "voc", …"""
    class_names: tuple[str, ...]
    """Labels 0 … C-1."""
    category_ids: tuple[int, ...]
    """The source's own id of each class; Pascal VOC has none: 0 … C-1."""
    splits: tuple[str, ...]
    """Those of "train", "val", "test" that have pictures."""
    size: NDArray[np.int32]
    """[R, 2], height and width in pixels; 0 where the source does not say."""
    image_id: NDArray[np.int64]
    """[R], the source's id (COCO; unique within a split only), else the row."""
    offsets: NDArray[np.int64]
    """[R + 1]; the boxes of row r are [offsets[r], offsets[r+1])."""
    boxes: NDArray[np.float32]
    """[K, 4], xyxy in pixels of the original picture, as drawn: not clipped to it."""
    labels: NDArray[np.int32]
    crowd: NDArray[np.bool_]
    area: NDArray[np.float64]
    """[K], pixels²; the source's own where it says one."""
    problems: tuple[Problem, ...]
    """What was wrong with the annotations, by kind, and left out or set right."""
    notes: tuple[str, ...]
    """What was chosen, in words."""
    _folders: tuple[str, ...] = field(repr=False)
    _folder: NDArray[np.int32] = field(repr=False)
    _names: pa.Array = field(repr=False)
    _split: NDArray[np.int8] = field(repr=False)
    _span: NDArray[np.int64] = field(repr=False)
    _in_bucket: bool = field(repr=False)
    _stores: "dict[int, Store]" = field(repr=False, default_factory=dict)
    """The bucket's, by process: one that was opened before a fork is of no use after it."""

    @property
    def source(self) -> str:
        """The root as people know it: its path or its address."""
        return places.shown(self.root)

    def __len__(self) -> int:
        return len(self._split)

    def rows(self, split: str) -> NDArray[np.int64]:
        """[N], the rows of a split in the source's order. Raises DataError when the data set has no such split."""
        if split not in self.splits:
            raise DataError(
                f"The data set has no {split!r} split.",
                place=self.source,
                choices=self.splits,
                fix="name the folder above, if the split lies beside this one; or use one of those it has",
            )
        return np.flatnonzero(self._split == SPLITS.index(split))

    def path(self, row: int) -> Path:
        """The file of a picture; for one inside another file, that file with the picture's name behind it. Of a picture
        in a bucket it is a placeholder: `read`, `remote` and `place` know better."""
        name: str = self._names[int(row)].as_py()
        return self.root / self._folders[int(self._folder[row])] / name

    def holds(self, file: Path) -> bool:
        """Whether a file lies in the data set's folder, or in one of its folders of pictures elsewhere."""
        place = file.resolve()
        folders = {(self.root / folder).resolve() for folder in self._folders}
        return place.is_relative_to(self.root.resolve()) or place.parent in folders

    def span(self, row: int) -> tuple[int, int] | None:
        """First byte and number of bytes of a picture inside another file; None for one that is a file of its own."""
        start, count = self._span[row].tolist()
        return (start, count) if count else None

    def identity(self) -> str:
        """Changes with anything that decides which picture is which row, and its size as far as it is known."""
        digest = blake2b(f"{self.root}\0{self._folders!r}".encode("utf-8", "surrogateescape"), digest_size=16)
        for column in (self._folder, self._span, self.size):
            digest.update(np.ascontiguousarray(column).data)
        for buffer in self._names.buffers()[1:]:
            digest.update(buffer)
        return digest.hexdigest()

    def place(self, row: int) -> str:
        """What messages call a picture: its path, or its address."""
        return places.shown(self.path(row))

    def remote(self, row: int) -> "tuple[Store, str, int, int | None] | None":
        """Where the bytes of a picture in a bucket are: store, key, first byte and their number (None: all of the
        object). None for a picture that is on the local disk, also for one in a shard that was copied there."""
        if not self._in_bucket or self.span(row) is not None:
            return None
        path, process = self.path(row), os.getpid()
        if process not in self._stores and (found := places.remote(path)) is not None:
            self._stores[process] = found.store
        address = places.object_of(path)
        return None if address is None else (self._stores[process], address.key, 0, None)

    def read(self, row: int) -> bytes:
        """The encoded picture, as it is stored, from wherever it is. Raises OSError, of buckets StorageError too."""
        span, path = self.span(row), self.path(row)
        if self._in_bucket:
            return places.read(path, span)
        with (path if span is None else path.parent).open("rb", buffering=0) as file:
            if span is None:
                return file.read()
            start, count = span
            file.seek(start)
            return file.read(count)


def open_index(
    data: str | Path,
    *,
    format: str | None = None,
    val_fraction: float | None = None,
    classes: Sequence[str] = (),
    problems: Problems | None = None,
) -> Index:
    """The index of a data set, from the cache where its source has not changed.

    data: a folder, a file that stands for a data set (COCO's .json, YOLO's data.yaml, a .csv, TFRecords), the address
    of either (gs://, s3://; https:// of a .json or .csv), or "demo", the data set that stoker draws itself (`./demo` is
    a folder). Environment variables in it are replaced. format: a row of `find.FORMATS`; None: found by looking.
    classes: only these, in this order; boxes of others are left out; empty: all.
    val_fraction: the share that is held back as validation, in (0, 1), 0.1 unless set, where the data set has no
    validation split of its own.
    problems: collects everything that is wrong; the annotations are then read whether or not the cache has them.

    Raises DataError when there is no data set or a file of it is wrong, naming the place; ConfigError for a variable
    that is not set, StorageError where a bucket cannot be read.
    """
    fraction = VAL_FRACTION if val_fraction is None else val_fraction
    if not 0 < fraction < 1:
        raise ConfigError(
            f"val_fraction is {fraction}.", choices=["a share above 0 and below 1"], fix="0.1 holds back a tenth"
        )
    if not os.fspath(data):
        raise DataError("The name of the data set is empty.", fix='name a folder or a file; "." is this folder')
    try:
        asked, only = val_fraction is not None, tuple(classes)
        if data == "demo":
            return _open(_demo(), format, fraction, asked, only, problems)
        text = expand(os.fspath(data))
        if not is_address(text):
            return _open(Path(text), format, fraction, asked, only, problems)
        from stoker.data.remote import bucket  # only needed, as what it imports, where there are buckets

        mirror = bucket.place_of(parse(text), endings_of_files(format))
        with bucket.addresses_in_errors(mirror.root):
            index = _open(mirror.place, format, fraction, asked, only, problems)
        return _with_addresses(index, mirror.root, mirror.notes)
    except OSError as error:
        raise DataError(
            "The data set cannot be read.",
            place=error.filename or data,
            cause=error.strerror or str(error),
            fix="check the permissions of the folder and that its disk is there",
        ) from error


def _with_addresses(index: Index, mirror: Path, notes: tuple[str, ...]) -> Index:
    """An index whose words name objects rather than files of the mirror, with notes about that."""

    def named(texts: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(places.in_words(text, mirror) for text in texts)

    found = tuple(replace(problem, examples=named(problem.examples)) for problem in index.problems)
    return replace(index, notes=(*named(index.notes), *notes), problems=found)


def _open(
    data: Path, format: str | None, fraction: float, asked: bool, classes: tuple[str, ...], problems: Problems | None
) -> Index:
    found = find_data(data, format)
    only = found.parts[0].annotations if len(found.parts) == 1 else found.root
    path = index_cache.index_path(only, found.format, fraction, classes, found.descriptions)
    stamp = index_cache.fingerprint(found, fraction)
    content = None if problems is not None else index_cache.read(path, stamp)
    if content is None:
        problems = Problems() if problems is None else problems
        columns = FORMATS[found.format].read(found, problems)
        picture_names.mend(columns, found.root, problems)
        columns = clean.drop_degenerate(clean.keep_classes(columns, classes), problems)
        columns = clean.divide(columns, fraction, asked=asked)
        clean.check(columns, problems)
        columns.notes.insert(0, f"{found.layout}, from {places.shown(found.root)}")
        index_cache.write(path, columns, problems.found(FEW), found, stamp)
        content = index_cache.read(path, stamp)
        if content is None:
            raise DataError(
                "The index was written but cannot be read back.",
                place=path,
                cause="another process may be building it from other files at the same time",
                fix="try again; delete the file if that does not help",
            )
    return _view(*content)


def _demo() -> Path:
    from stoker.data.demo import ensure_demo  # Pillow is only needed to draw

    return ensure_demo()


def _view(batch: pa.RecordBatch, meta: index_cache.Meta) -> Index:
    boxes = batch["boxes"]
    return Index(
        root=Path(meta.root),
        format=meta.format,
        class_names=meta.class_names,
        category_ids=meta.category_ids,
        splits=meta.splits,
        size=_numpy(batch["size"].values).reshape(-1, 2),
        image_id=_numpy(batch["image_id"]),
        offsets=_numpy(boxes.offsets),
        boxes=_numpy(boxes.values.values).reshape(-1, 4),
        labels=_numpy(batch["labels"].values),
        crowd=_numpy(batch["crowd"].values).view(np.bool_),
        area=_numpy(batch["area"].values),
        problems=meta.problems,
        notes=meta.notes,
        _folders=meta.folders,
        _folder=_numpy(batch["folder"]),
        _names=batch["name"],
        _split=_numpy(batch["split"]),
        _span=_numpy(batch["span"].values).reshape(-1, 2),
        _in_bucket=places.address_of(Path(meta.root)) is not None,
    )


def _numpy(array: pa.Array) -> NDArray[Any]:
    values: NDArray[Any] = array.to_numpy(zero_copy_only=True)
    return values


def missing_pictures(index: Index, rows: Iterable[int] | None = None) -> list[int]:
    """The rows, of those given or of all, whose picture is not there, ascending. One listing per folder instead of a
    look at each file, so that COCO's 118,287 take a fraction of a second also on a file system across a network."""
    wanted = np.arange(len(index)) if rows is None else np.unique(np.fromiter(rows, np.int64))
    wanted = wanted[index._span[wanted, 1] == 0]  # those inside other files were there when these were read
    everything = index._names.to_pylist()
    missing: list[int] = []
    for number, inside in by_folder(index._folder, wanted):
        place = index.root / index._folders[number]
        names = [everything[row] for row in inside.tolist()]
        present = _files_in(place) if len(names) > FEW_FILES else set()
        # the second look settles what a listing cannot: names in another case or Unicode form on macOS
        missing += [
            row
            for row, name in zip(inside.tolist(), names, strict=True)
            if name not in present and not (place / name).is_file()
        ]
    return sorted(missing)


def unnamed_pictures(index: Index) -> list[Path]:
    """The picture files, by name, that lie among the pictures of the index without being one of them."""
    names = index._names.to_pylist()
    found: list[Path] = []
    for number, rows in by_folder(index._folder, np.flatnonzero(index._span[:, 1] == 0)):
        place = index.root / index._folders[number]
        known = {names[row] for row in rows.tolist()}
        found += [
            place / name
            for name in sorted(_files_in(place) - known)
            if name.lower().endswith(PICTURE_ENDINGS) and not name.startswith(".")
        ]
    return found


def _files_in(folder: Path) -> set[str]:
    if not folder.is_dir():
        return set()
    with os.scandir(folder) as entries:
        return {entry.name for entry in entries if entry.is_file()}


def require_pictures(index: Index, splits: Iterable[str] | None = None, *, max_bad: float | None = None) -> list[int]:
    """The rows whose picture is absent, where they are few enough to do without; the loader will quarantine them.

    splits: those to look at, default all. max_bad: share of a split's pictures that may be absent, and of all pictures
    that may have been left out because their annotations cannot be read; MAX_BAD unless set.

    Raises DataError when there are more, with names and with where they seem to be.
    """
    share = MAX_BAD if max_bad is None else max_bad
    _require_annotations(index, share)
    wanted = index.splits if splits is None else tuple(splits)
    missing = missing_pictures(index, np.concatenate([index.rows(split) for split in wanted]).tolist())
    absent = np.zeros(len(index), np.bool_)
    absent[missing] = True
    for split in wanted:
        rows = index.rows(split)
        gone = rows[absent[rows]]
        if gone.size > tolerated(share, rows.size) or gone.size == rows.size:
            examples = [index.place(row) for row in gone[:3].tolist()]
            raise DataError(
                f"{gone.size:,} of the {rows.size:,} pictures of the {split} split do not exist.",
                place=", ".join(examples) + (", …" if gone.size > len(examples) else ""),
                cause=f"the annotations in {index.source} name them; up to {share:.3g} of them may be missing"
                f" (--max-bad); `stoker data check {index.source}` names all",
                fix=where_instead(index.root, index.path(gone[0])),
            )
    return missing


def _require_annotations(index: Index, share: float) -> None:
    lost = [problem for problem in index.problems if problem.loses_pictures]
    count = sum(problem.count for problem in lost)
    if count > tolerated(share, len(index) + count):
        raise DataError(
            f"{count:,} of the {len(index) + count:,} pictures are left out for their annotations.",
            place=index.source,
            cause="\n          ".join(f"{p.count:,} × {p.title}: {', '.join(p.examples)}" for p in lost),
            fix=f"`stoker data check {index.source}` names all of them: correct them, or allow more than {share:.3g} of"
            " the pictures with --max-bad",
        )


def where_instead(root: Path, picture: Path) -> str:
    """What to do about a missing picture, which is looked for under another ending and in folders near the root."""
    return places.in_words(_where_instead(root, picture), root)


def _where_instead(root: Path, picture: Path) -> str:
    if picture.parent.is_dir():
        with os.scandir(picture.parent) as entries:
            stem = picture.stem.casefold()
            like = sorted(entry.name for entry in entries if os.path.splitext(entry.name)[0].casefold() == stem)
        if pictures := [name for name in like if not name.endswith((".xml", ".json", ".txt"))]:
            return f"{picture.parent / pictures[0]} exists: correct the file names in the annotations"
    for pattern in ("*", "*/*", "../*"):
        for folder in sorted(Path(os.path.normpath(found)) for found in root.glob(pattern)):
            if folder.is_dir() and (folder / picture.name).is_file():
                if root.name.lower() in ANNOTATION_FOLDERS and not folder.is_relative_to(root):
                    return f"{picture.name} lies in {folder}: name the folder above both, {root.parent}"
                return f"{picture.name} lies in {folder}: move those pictures to {picture.parent}, or link the folder"
    return f"put the pictures into {picture.parent}, or name the folder that has both annotations and pictures"
