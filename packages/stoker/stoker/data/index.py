"""The index: all annotations of a data set as columns in one memory-mapped file, opened in milliseconds.

`open_index` detects the format, builds the file once and again when the source changed, and maps it. There is no
Python object per image or box, and all processes of a machine share one copy. `find_refusals` decides whether
training refuses the data set. Not here: which layout a folder has
(`formats/finder.py`), reading it (`formats/`), dropping boxes and making splits
(`validation/clean.py`), the file (`index_cache.py`), the content of the images (`validation/check.py`).
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from stoker.data import index_cache
from stoker.data.formats import finder, images
from stoker.data.formats.finder import FORMATS, data_file_suffixes
from stoker.data.formats.folders import ANNOTATION_DIRS, IMAGE_SUFFIXES
from stoker.data.formats.tables import SPLITS, AnnotationTable, DatasetLayout, group_by_folder
from stoker.data.formats.yolo import MAX_CLASSES
from stoker.data.images import source as image_source
from stoker.data.validation import clean
from stoker.data.validation.clean import SplitOptions
from stoker.data.validation.problems import (
    DEFAULT_MAX_BAD_BOXES,
    DEFAULT_MAX_BAD_FRACTION,
    MAX_EXAMPLES,
    PROBLEM_KINDS,
    Problem,
    ProblemCollector,
    count_of_all,
    max_bad_images,
)
from stoker_watch import regular_files
from stoker_watch.errors import ConfigError, DataError, make_error
from stoker_watch.storage.uri import expand_variables, is_uri, parse_uri

if TYPE_CHECKING:
    from stoker.config.settings import DataSettings
    from stoker_watch.storage.store import Store
    from stoker_watch.storage.uri import StorageUri

__all__ = [
    "ImageRanges",
    "Index",
    "Problem",
    "find_refusals",
    "missing_images",
    "open_index",
    "refuse",
    "require_images",
]

DEFAULT_VAL_FRACTION = 0.1


class ImageRanges(NamedTuple):
    """Where N images inside other files are: number of the file, first byte and number of bytes of each; int64 [N]."""

    file: NDArray[np.int64]
    start: NDArray[np.int64]
    length: NDArray[np.int64]


@dataclass(frozen=True, eq=False, kw_only=True)
class Index:
    """R images with K boxes. The arrays are read-only views into the mapped file, which they keep open."""

    root: Path
    """Absolute; paths are relative to it. For a data set in a bucket, its local mirror (`remote.py`)."""
    format: str
    """A key of `formats.finder.FORMATS`: "coco", "voc", …"""
    class_names: tuple[str, ...]
    """Labels 0 … C-1."""
    category_ids: tuple[int, ...]
    """The source's own id of each class; 0 … C-1 for Pascal VOC, which has none."""
    splits: tuple[str, ...]
    """Those of "train", "val", "test" that have images."""
    original_size: NDArray[np.int32]
    """[R, 2], height and width in pixels; 0 where the source does not tell."""
    image_id: NDArray[np.int64]
    """[R], the source's id (COCO; unique within a split only), else the image index."""
    offsets: NDArray[np.int64]
    """[R + 1]; the boxes of image r are [offsets[r], offsets[r+1])."""
    boxes: NDArray[np.float32]
    """[K, 4], xyxy in pixels of the original image, as annotated: not clipped to it."""
    labels: NDArray[np.int32]
    crowd: NDArray[np.bool_]
    area: NDArray[np.float64]
    """[K], pixels²; the source's own where it has one."""
    problems: tuple[Problem, ...]
    """Problems of the annotations, by kind."""
    notes: tuple[str, ...]
    """The choices that were made while reading, in words."""
    bad_boxes: Mapping[str, int]
    """Split → number of boxes that were left out because they cannot be used, as far as their image is known."""
    num_bad_test_images: int
    """Images of the test split that were left out because of their annotations."""
    _folders: tuple[str, ...] = field(repr=False)
    _folder_index: NDArray[np.int32] = field(repr=False)
    _file_names: pa.Array = field(repr=False)
    _split_index: NDArray[np.int8] = field(repr=False)
    _byte_range: NDArray[np.int64] = field(repr=False)
    _in_bucket: bool = field(repr=False)
    _stores: "dict[int, Store]" = field(repr=False, default_factory=dict)
    """The bucket's store, by process: a store that was opened before a fork cannot be used after it."""
    _shard_uris: "dict[int, StorageUri | None]" = field(repr=False, default_factory=dict)
    """What `resolve_stub` returned for the shards that were asked for: 25 µs for each image otherwise."""

    @property
    def source(self) -> str:
        """The root as users know it: its path or its URI."""
        return image_source.display_path(self.root)

    def __len__(self) -> int:
        return len(self._split_index)

    def image_indices(self, split: str) -> NDArray[np.int64]:
        """[N], the images of a split in the source's order. Raises DataError when the data set has no such split."""
        if split not in self.splits:
            raise self.no_split_error(split)
        return np.flatnonzero(self._split_index == SPLITS.index(split))

    def no_split_error(self, split: str) -> DataError:
        unread = [problem for problem in self.problems if problem.kind == f"unreadable-{split}-split"]
        cause = f"it cannot be read: {unread[0].examples[0]}" if unread else None
        return make_error(DataError, "no-such-split", self.source, choices=self.splits, cause=cause, split=split)

    def path(self, image_index: int) -> Path:
        """Returns the file of an image. For an image inside another file: that file, followed by the image's name. For
        an image in a bucket: its placeholder in the mirror (use `read`, `remote_object` and `display_source`)."""
        return Path(self.path_text(image_index))

    def path_text(self, image_index: int) -> str:
        """Returns `path` as text, which is made in a tenth of the time."""
        folder = self._folder_texts[self._folder_index[image_index]]
        name: str = self._file_names[int(image_index)].as_py()
        return os.path.join(folder, name)

    @cached_property
    def _folder_texts(self) -> tuple[str, ...]:
        return tuple(os.path.join(self.root, folder) for folder in self._folders)

    def contains_file(self, file: Path) -> bool:
        """Returns whether a file lies in the data set's folder, or in one of its image folders elsewhere."""
        resolved = file.resolve()
        folders = {(self.root / folder).resolve() for folder in self._folders}
        return resolved.is_relative_to(self.root.resolve()) or resolved.parent in folders

    def byte_range(self, image_index: int) -> tuple[int, int] | None:
        """Returns first byte and number of bytes of an image inside another file; None for an image that is a file."""
        start, length = self._byte_range[image_index].tolist()
        return (start, length) if length else None

    def image_ranges(self, image_indices: NDArray[np.int64]) -> ImageRanges:
        """Returns where images inside other files are; of an image that is a file, the length is 0."""
        ranges = self._byte_range[image_indices]
        return ImageRanges(self._folder_index[image_indices].astype(np.int64), ranges[:, 0], ranges[:, 1])

    def fingerprint(self) -> str:
        """Changes when the images, their order or their known sizes change."""
        digest = blake2b(f"{self.root}\0{self._folders!r}".encode("utf-8", "surrogateescape"), digest_size=16)
        for column in (self._folder_index, self._byte_range, self.original_size):
            digest.update(np.ascontiguousarray(column).data)
        for buffer in self._file_names.buffers()[1:]:
            digest.update(buffer)
        return digest.hexdigest()

    def display_source(self, image_index: int) -> str:
        """Returns the name of an image in messages: its path or its URI."""
        return image_source.display_path(self.path(image_index))

    def remote_object(self, image_index: int) -> "tuple[Store, str, int, int | None] | None":
        """Returns where the bytes of an image in a bucket are: store, key, first byte, number of bytes (None: the whole
        object). None for an image on the local disk, also for one in a TFRecord shard that was copied there."""
        if not self._in_bucket:
            return None
        byte_range, folder = self.byte_range(image_index), int(self._folder_index[image_index])
        if byte_range is None:
            start, length = 0, None
            uri = image_source.resolve_stub(self.path(image_index))
        else:
            start, length = byte_range
            if folder not in self._shard_uris:
                self._shard_uris[folder] = image_source.resolve_stub(Path(self._folder_texts[folder]))
            uri = self._shard_uris[folder]
        if uri is None:
            return None
        if (pid := os.getpid()) not in self._stores:
            from stoker_watch.storage.store import open_store  # needed, and imported, for buckets only

            self._stores[pid] = open_store(uri)
        return self._stores[pid], uri.key, start, length

    def read(self, image_index: int) -> bytes:
        """The encoded image as it is stored, from the disk or the bucket. Raises OSError, for buckets StorageError."""
        byte_range = self.byte_range(image_index)
        if self._in_bucket:
            return image_source.read_image_bytes(self.path(image_index), byte_range)
        path = self.path_text(image_index)  # a Path takes longer to make than the file to open
        return image_source.read_local(path if byte_range is None else os.path.dirname(path), byte_range)


def open_index(
    data: str | Path,
    *,
    format: str | None = None,
    val_fraction: float | None = None,
    classes: Sequence[str] = (),
    allow_outside: bool | None = None,
    splits: SplitOptions | None = None,
    problems: ProblemCollector | None = None,
) -> Index:
    """Returns the index of a data set, from the cache where its source has not changed.

    data: a folder, a file that stands for a data set (COCO's .json, YOLO's data.yaml, a .csv, TFRecords), the URI of
    either (gs://, s3://; https:// of a .json or .csv), or "demo", the data set that stoker generates (`./demo` is a
    folder). Environment variables in it are replaced.
    format: a key of `formats.finder.FORMATS`; None: detected.
    val_fraction: fraction of the images that becomes the validation split, in (0, 1), 0.1 by default. Used where the
    data set has no validation split of its own.
    classes: use only these, in this order; boxes of others are left out; empty: all.
    allow_outside: accept images outside the data set's folder (`formats/images.py`).
    splits: how splits are made, in place of `val_fraction`.
    problems: collects all problems, also those that are refused; the annotations are then read even if the cache has
    them, and a training split without boxes is a problem.

    Raises DataError with the location when there is no data set, or a file of it is wrong or outside its folder;
    ConfigError for a variable that is not set; StorageError when a bucket cannot be read.
    """
    if splits is None:
        fraction = DEFAULT_VAL_FRACTION if val_fraction is None else val_fraction
        splits = SplitOptions(val_fraction=fraction, user_set=val_fraction is not None)
    if not 0 < splits.val_fraction < 1:
        raise make_error(ConfigError, "val-fraction", choices=["above 0 and below 1"], val_fraction=splits.val_fraction)

    def open_path(path: Path) -> Index:
        layout = finder.layout_of_files(path, splits.files) if splits.files else finder.detect_layout(path, format)
        return open_layout(
            layout, path, splits, classes=tuple(classes), allow_outside=bool(allow_outside), problems=problems
        )

    if not os.fspath(data):
        raise DataError("The name of the data set is empty.", fix='name a folder or a file; "." is this folder')
    try:
        if data == "demo":
            from stoker.data.demo import ensure_demo  # imports Pillow, which is only needed to draw

            return open_path(ensure_demo())
        location = expand_variables(os.fspath(data))
        if not is_uri(location):
            return open_path(Path(location))
        from stoker.data import remote  # imports what is only needed for buckets

        resolved = remote.resolve_dataset(parse_uri(location), data_file_suffixes(format))
        with remote.uris_in_errors(resolved.root):
            index = open_path(resolved.path)
        return _with_uris(index, resolved.root, resolved.notes)
    except regular_files.PointerError as error:
        raise make_error(DataError, "git-lfs-pointer", error.filename) from error
    except OSError as error:
        cause = error.strerror or str(error)
        raise make_error(DataError, "unreadable-data-set", error.filename or data, cause=cause) from error


def _with_uris(index: Index, mirror: Path, notes: tuple[str, ...]) -> Index:
    """Returns the index with URIs in its messages instead of paths in the mirror, and with the notes of the mirror."""

    def replace_paths(messages: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(image_source.paths_to_uris(message, mirror) for message in messages)

    problems = tuple(replace(problem, examples=replace_paths(problem.examples)) for problem in index.problems)
    return replace(index, notes=(*replace_paths(index.notes), *notes), problems=problems)


def open_index_of(data: "DataSettings") -> Index:
    """Returns the index of the data set that settings name; see `open_index`."""
    return open_index(
        data.data,
        format=data.format,
        classes=data.classes or (),
        allow_outside=data.allow_outside,
        splits=split_options(data),
    )


def split_options(data: "DataSettings") -> SplitOptions:
    """Returns how the settings make splits; those that are not set have their defaults."""
    return SplitOptions(
        val_fraction=DEFAULT_VAL_FRACTION if data.val_fraction is None else data.val_fraction,
        user_set=data.val_fraction is not None,
        method="hash" if data.split_method == "hash" else "stratified",
        lists=None if data.splits is None else Path(data.splits),
        files=tuple((split, file) for split, file in (("train", data.train), ("val", data.val)) if file is not None),
    )


def open_layout(
    layout: DatasetLayout,
    data: Path,
    options: SplitOptions,
    *,
    classes: tuple[str, ...] = (),
    allow_outside: bool = False,
    problems: ProblemCollector | None = None,
) -> Index:
    """Returns the index of a layout that was found in `data`, or of one that annotates more (`finder.find_fuller`); the
    rest is as in `open_index`."""
    is_checked = problems is not None
    cache_key_path = layout.parts[0].annotations if len(layout.parts) == 1 else layout.root
    described = layout
    if options.lists is not None:
        lists = (options.lists / f"{split}.txt" for split in SPLITS)
        described = replace(layout, metadata_files=(*layout.metadata_files, *lists))
    how_split = (options.method, options.lists, options.files)
    variant = f"{data.is_dir()}{allow_outside}{how_split!r}"  # the first two decide what is outside
    cache_path = index_cache.index_path(
        cache_key_path, layout.format, options.val_fraction, classes, layout.metadata_files, variant=variant
    )
    source_stamp = index_cache.source_fingerprint(described, options.val_fraction)
    cached = None if problems is not None else index_cache.read_index(cache_path, source_stamp)
    if cached is None:
        problems = ProblemCollector() if problems is None else problems
        table, layout, num_bad_test_images = _read(layout, problems)
        if len(table.class_names) > MAX_CLASSES:
            file, count = layout.parts[0].annotations, len(table.class_names)
            names = ", ".join(name[:40] for name in table.class_names[:3])
            raise make_error(DataError, "too-many-classes", file, names=names, count=count, limit=MAX_CLASSES)
        images.repair_names(table, layout.root, problems)
        walked = finder.walk(layout.root)
        if layout.may_be_replaced and (fuller := finder.find_fuller(layout, table, walked)) is not None:
            problems.clear()
            own = problems if is_checked else None
            return open_layout(fuller, data, options, classes=classes, allow_outside=allow_outside, problems=own)
        is_left_out = images.report_outside(table, layout, data, problems, allowed=allow_outside)
        table = clean.drop_images(table, is_left_out)
        table.notes += finder.describe_unused(layout, table, problems, walked)
        table = clean.drop_degenerate_boxes(clean.keep_classes(table, classes), problems)
        table, lost_boxes = clean.drop_images_without_boxes_left(table, problems)
        if options.lists is not None:
            table = clean.assign_listed_splits(table, layout.root, options.lists, problems)
        elif options.method == "stratified" and clean.draws_split(table):
            is_missing = images.find_missing(
                layout.root, table.folders, table.folder_index, table.file_names, table.images_that_are_files()
            )
            table = clean.drop_missing_images(table, is_missing, problems)
        table = clean.assign_splits(table, options)
        clean.check_splits_and_classes(table, problems, allow_empty=is_checked)
        table.notes.insert(0, f"{layout.description}, from {image_source.display_path(layout.root)}")
        index_cache.write_index(
            cache_path, table, problems.summarize(MAX_EXAMPLES), layout, source_stamp, lost_boxes, num_bad_test_images
        )
        cached = index_cache.read_index(cache_path, source_stamp)
        if cached is None:
            raise make_error(DataError, "index-not-read-back", cache_path)
    index = _make_index(*cached)
    for problem in index.problems if not is_checked else ():
        if problem.kind == images.OUTSIDE:
            raise _outside_error(index, problem, layout)
    return index


def _read(layout: DatasetLayout, problems: ProblemCollector) -> tuple[AnnotationTable, DatasetLayout, int]:
    """Returns the annotations, the layout that was read (without a test split that cannot be read, as training does not
    use it), and the number of images of the test split that were left out. Raises DataError."""
    read = FORMATS[layout.format].read
    others = tuple(part for part in layout.parts if part.split != "test")
    without_test = replace(layout, parts=others)
    has_both = 0 < len(others) < len(layout.parts)
    try:
        table = read(layout, problems)
    except DataError as error:
        if not has_both:
            raise
        problems.clear()
        table = read(without_test, problems)
        problems.add("unreadable-test-split", f"{error.location}: {error.what}" if error.location else error.what)
        return table, without_test, 0
    if (num_bad := problems.num_bad_images()) and has_both:
        of_others = ProblemCollector()
        read(without_test, of_others)
        return table, layout, max(0, num_bad - of_others.num_bad_images())
    return table, layout, 0


def _outside_error(index: Index, problem: Problem, layout: DatasetLayout | None = None) -> DataError:
    is_described = layout is not None and layout.format == "yolo" and layout.metadata_files
    named = f"; or name the file {layout.metadata_files[0]} instead of the folder" if layout and is_described else ""
    location, count = ", ".join(problem.examples[:3]) + (", …" if problem.count > 3 else ""), problem.count
    return make_error(DataError, "images-outside", location, count=count, total=len(index), named=named)


def _make_index(record_batch: pa.RecordBatch, metadata: index_cache.IndexMetadata) -> Index:
    boxes = record_batch["boxes"]
    return Index(
        root=Path(metadata.root),
        format=metadata.format,
        class_names=metadata.class_names,
        category_ids=metadata.category_ids,
        splits=metadata.splits,
        original_size=record_batch["size"].values.to_numpy().reshape(-1, 2),
        image_id=record_batch["image_id"].to_numpy(),
        offsets=boxes.offsets.to_numpy(),
        boxes=boxes.values.values.to_numpy().reshape(-1, 4),
        labels=record_batch["labels"].values.to_numpy(),
        crowd=record_batch["crowd"].values.to_numpy().view(np.bool_),
        area=record_batch["area"].values.to_numpy(),
        problems=metadata.problems,
        notes=metadata.notes,
        bad_boxes=metadata.bad_boxes,
        num_bad_test_images=metadata.num_bad_test_images,
        _folders=metadata.folders,
        _folder_index=record_batch["folder"].to_numpy(),
        _file_names=record_batch["name"],
        _split_index=record_batch["split"].to_numpy(),
        _byte_range=record_batch["span"].values.to_numpy().reshape(-1, 2),
        _in_bucket=image_source.path_to_uri(Path(metadata.root)) is not None,
    )


def boxes_of(index: Index, image_indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[k] and [k], the boxes of some images in their order: rows of `Index.boxes`, and places in `image_indices`."""
    counts = index.offsets[image_indices + 1] - index.offsets[image_indices]
    rows = np.repeat(index.offsets[image_indices] - (counts.cumsum() - counts), counts) + np.arange(counts.sum())
    return rows, np.repeat(np.arange(len(image_indices)), counts)


def missing_images(index: Index, image_indices: Iterable[int] | None = None) -> list[int]:
    """Returns the image indices, of those given or of all, whose file does not exist, ascending."""
    to_check = np.arange(len(index)) if image_indices is None else np.unique(np.fromiter(image_indices, np.int64))
    to_check = to_check[index._byte_range[to_check, 1] == 0]  # images inside other files were checked when opened
    names = index._file_names.to_pylist()
    is_missing = images.find_missing(index.root, index._folders, index._folder_index, names, to_check)
    indices: list[int] = np.flatnonzero(is_missing).tolist()
    return indices


def unlisted_images(index: Index) -> list[Path]:
    """Returns the image files, by name, that lie in the image folders of the index without being in the index."""
    names = index._file_names.to_pylist()
    unlisted: list[Path] = []
    for folder_index, image_indices in group_by_folder(
        index._folder_index, np.flatnonzero(index._byte_range[:, 1] == 0)
    ):
        folder = index.root / index._folders[folder_index]
        listed_names = {names[image_index] for image_index in image_indices.tolist()}
        unlisted += [
            folder / name
            for name in sorted(images.list_file_names(folder) - listed_names)
            if name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")
        ]
    return unlisted


REQUIRED_SPLITS = ("train", "val")
"""Splits that training uses. What is wrong with another one is reported, and no reason to refuse."""


def require_images(
    index: Index,
    splits: Iterable[str] | None = None,
    *,
    max_bad_fraction: float | None = None,
    max_bad_boxes: float | None = None,
) -> list[int]:
    """Returns the image indices whose file does not exist, if they are few; the loader will quarantine them.

    splits: the splits to check, default all; the rest is as in `refuse`.
    """
    splits = index.splits if splits is None else tuple(splits)
    refuse(index, splits, max_bad_fraction=max_bad_fraction, max_bad_boxes=max_bad_boxes)
    return missing_images(index, np.concatenate([index.image_indices(split) for split in splits]).tolist())


def refuse(
    index: Index, splits: Sequence[str] | None = None, *, max_bad_fraction: float | None, max_bad_boxes: float | None
) -> None:
    """Raises the first error of `find_refusals`, which names the others too."""
    errors = list(find_refusals(index, splits, max_bad_fraction=max_bad_fraction, max_bad_boxes=max_bad_boxes))
    if errors:
        others = [f"also: {error.what}" for error in errors[1:]]
        errors[0].cause = "\n".join(filter(None, [errors[0].cause, *others])) or None
        raise errors[0]


def find_refusals(
    index: Index,
    splits: Sequence[str] | None = None,
    *,
    max_bad_fraction: float | None = None,
    max_bad_boxes: float | None = None,
    usable: NDArray[np.bool_] | None = None,
) -> Iterator[DataError]:
    """Why training refuses a data set, with names, and where missing images may be. This is the one verdict: `stoker
    train` and its dry run raise the first error (`refuse`), `stoker data check` and `stoker data stats` name all.

    splits: None: those of training, which must have boxes; of others only the images are checked. max_bad_fraction:
    fraction of a split's images that may be missing, and of all images that may have been left out because of their
    annotations; default DEFAULT_MAX_BAD_FRACTION. max_bad_boxes: fraction of the boxes, of each split and of all, that
    may have been left out; default DEFAULT_MAX_BAD_BOXES. usable: [R], which images can be decoded; None: not known.
    """
    allowed_fraction = DEFAULT_MAX_BAD_FRACTION if max_bad_fraction is None else max_bad_fraction
    allowed_boxes = DEFAULT_MAX_BAD_BOXES if max_bad_boxes is None else max_bad_boxes
    limit = f"more than --max-bad-fraction {allowed_fraction:g} allows"
    yield from (_outside_error(index, problem) for problem in index.problems if problem.kind == images.OUTSIDE)
    yield from _unusable_splits(index, splits or REQUIRED_SPLITS, needs_boxes=splits is None)
    splits = splits or REQUIRED_SPLITS
    bad_images = [problem for problem in index.problems if problem.is_bad_image]
    num_dropped = sum(problem.count for problem in bad_images)
    num_images = len(index) + num_dropped
    if "test" not in splits:
        num_dropped -= index.num_bad_test_images
        num_images -= index.num_bad_test_images + int((index._split_index == SPLITS.index("test")).sum())
    if num_dropped > max_bad_images(allowed_fraction, num_images):
        count = count_of_all(num_dropped, num_images, "images")
        what = f"{count} are left out because of their annotations, {limit}."
        yield _left_out_error(index, what, bad_images, "a larger --max-bad-fraction")
    bad_boxes = [problem for problem in index.problems if problem.drops_boxes]
    for excess in _excess_bad_boxes(index, bad_boxes, splits, allowed_boxes):
        what = f"{excess} are left out, more than --max-bad-boxes {allowed_boxes:g} allows."
        allow = "a larger --max-bad-boxes; images that lose all of their boxes are then left out"
        yield _left_out_error(index, what, bad_boxes, allow)
    for split in (split for split in splits if split in index.splits):
        yield from _bad_images(index, split, usable, allowed_fraction, limit)


def _unusable_splits(index: Index, splits: Sequence[str], *, needs_boxes: bool) -> Iterator[DataError]:
    box_split = np.repeat(index._split_index, np.diff(index.offsets))
    for split in splits:
        if split not in index.splits:
            yield index.no_split_error(split)
        elif needs_boxes and index.crowd[box_split == SPLITS.index(split)].all():
            name, num_images = "training" if split == "train" else "validation", len(index.image_indices(split))
            yield make_error(DataError, "split-has-no-boxes", index.source, name=name, count=num_images)


def _bad_images(
    index: Index, split: str, usable: NDArray[np.bool_] | None, allowed_fraction: float, limit: str
) -> Iterator[DataError]:
    image_indices = index.image_indices(split)
    missing = missing_images(index, image_indices.tolist())
    bad = missing if usable is None else sorted({*missing, *image_indices[~usable[image_indices]].tolist()})
    if len(bad) > max_bad_images(allowed_fraction, len(image_indices)) or len(bad) == len(image_indices):
        location = ", ".join(map(index.display_source, bad[:3])) + (", …" if len(bad) > 3 else "")
        fix = suggest_location(index.root, index.path(missing[0])) if missing else "copy the files again"
        what = count_of_all(len(bad), len(image_indices), "images") + f" of the {split} split "
        what += "do not exist" if len(missing) == len(bad) else "cannot be used"
        yield make_error(DataError, "bad-images", location, fix=fix, what=f"{what}, {limit}", data=index.source)


def _left_out_error(index: Index, what: str, problems: list[Problem], allow: str) -> DataError:
    most = max(problems, key=lambda problem: problem.count)
    cause = "\n          ".join(f"{p.count:,} × {p.title}: {', '.join(p.examples)}" for p in problems)
    fix = f"{PROBLEM_KINDS[most.kind].fix}; `stoker data check {index.source}` names all of them; or {allow}"
    return DataError(what, location=index.source, cause=cause, fix=fix)


def _excess_bad_boxes(
    index: Index, problems: Iterable[Problem], splits: Sequence[str], allowed_fraction: float
) -> list[str]:
    """Returns the counts of left out boxes that exceed the allowed fraction, of each split or else of all (also of
    unknown images), in words."""
    excess = []
    num_bad, total = sum(problem.count for problem in problems), 0
    for number, split in enumerate(SPLITS):
        image_indices = np.flatnonzero(index._split_index == number)
        num_good = int((index.offsets[image_indices + 1] - index.offsets[image_indices]).sum())
        bad = index.bad_boxes.get(split, 0)
        if split not in splits:
            num_bad -= bad
            continue
        total += num_good
        if bad > max_bad_images(allowed_fraction, num_good + bad):
            excess.append(f"{count_of_all(bad, num_good + bad, 'boxes')} of the {split} split")
    if not excess and num_bad > max_bad_images(allowed_fraction, total + num_bad):
        excess.append(count_of_all(num_bad, total + num_bad, "boxes"))
    return excess


def suggest_location(root: Path, image_path: Path) -> str:
    """Returns how to fix a missing image. Looks for it with another file extension and in folders near the root."""
    return image_source.paths_to_uris(_suggest_location(root, image_path), root)


def _suggest_location(root: Path, image_path: Path) -> str:
    if image_path.parent.is_dir():
        with os.scandir(image_path.parent) as entries:
            stem = image_path.stem.casefold()
            same_stem = sorted(entry.name for entry in entries if os.path.splitext(entry.name)[0].casefold() == stem)
        if image_names := [name for name in same_stem if not name.endswith((".xml", ".json", ".txt"))]:
            return f"{image_path.parent / image_names[0]} exists: correct the file names in the annotations"
    for pattern in ("*", "*/*", "../*"):
        for folder in sorted(Path(os.path.normpath(candidate)) for candidate in root.glob(pattern)):
            if folder.is_dir() and (folder / image_path.name).is_file():
                if root.name.lower() in ANNOTATION_DIRS and not folder.is_relative_to(root):
                    return f"{image_path.name} is in {folder}: name the parent folder of both, {root.parent}"
                return f"{image_path.name} is in {folder}: move those images to {image_path.parent}, or link the folder"
    return f"put the images into {image_path.parent}, or name the folder that has both annotations and images"
