"""Finds the data set in a folder: which format it has, and what in the folder is not used.

If a folder has several formats, the first in FORMATS is read, and a note tells what else is there and how to read it.
Not here: reading (the modules of the formats, called by `index.py`), formats that are known and not read
(`folders.py`), the demo (`demo.py`).
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from glob import has_magic
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stoker.data.formats import (
    coco,
    csv,
    cvat,
    folders,
    jsonl,
    label_studio,
    labelme,
    openimages,
    parquet,
    public,
    tfrecord,
    via,
    voc,
    webdataset,
    yolo,
)
from stoker.data.formats.images import is_below
from stoker.data.formats.tables import AnnotationTable, DatasetLayout, DatasetWriter
from stoker.data.formats.yolo import YAML_SUFFIXES
from stoker.data.images import source as image_source
from stoker.data.validation.problems import ProblemCollector
from stoker_watch import regular_files
from stoker_watch.errors import DataError, UsageError, make_error, nearest

MAX_LISTED_NAMES = 8
"""Names in a folder that an error message lists."""
ARCHIVE_SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".7z", ".rar")


class DataFormat(NamedTuple):
    """A row of the table of formats. What `recognize` looks for is in `formats.toml`, under the same name."""

    recognize: Callable[[Path], DatasetLayout | None]
    """The data set in a folder (not in subfolders), or of a file with one of `suffixes`; None if there is none."""
    read: Callable[[DatasetLayout, ProblemCollector], AnnotationTable]
    suffixes: tuple[str, ...] = ()
    """The suffixes, in lower case, of files that can be a data set by themselves."""
    write: type[DatasetWriter] | None = None
    """What `stoker data convert` writes it with."""


FORMATS = {
    "coco": DataFormat(coco.recognize, coco.read, (".json",), coco.CocoWriter),
    "voc": DataFormat(voc.recognize, voc.read, (), voc.VocWriter),
    "kitti": DataFormat(partial(public.recognize, format="kitti"), public.read),
    "yolo": DataFormat(yolo.recognize, yolo.read, (".yaml", ".yml", ".data"), yolo.YoloWriter),
    "tfrecord": DataFormat(tfrecord.recognize, tfrecord.read, tfrecord.SUFFIXES, tfrecord.TfRecordWriter),
    "openimages": DataFormat(openimages.recognize, openimages.read, (".csv",)),
    "via": DataFormat(via.recognize, via.read, (".json", ".csv")),
    "csv": DataFormat(csv.recognize, csv.read, (".csv",)),
    "cvat": DataFormat(cvat.recognize, cvat.read, (".xml",)),
    "labelme": DataFormat(labelme.recognize, labelme.read),
    "label-studio": DataFormat(label_studio.recognize, label_studio.read, (".json",)),
    "createml": DataFormat(partial(jsonl.recognize, format="createml"), jsonl.read, (".json",)),
    "jsonl": DataFormat(jsonl.recognize, jsonl.read, jsonl.SUFFIXES),
    "webdataset": DataFormat(webdataset.recognize, webdataset.read, webdataset.SUFFIXES),
    "parquet": DataFormat(parquet.recognize, parquet.read, parquet.SUFFIXES),
    "public": DataFormat(public.recognize, public.read, public.SUFFIXES),
}
"""In order of preference."""


def detect_layout(data: Path, format: str | None = None) -> DatasetLayout:
    """The layout of a data set: a folder, a file of one, or a pattern of TFRecord files. Reads no annotations. format:
    detect only this one. Raises DataError if there is none or more than one, UsageError for an unknown format."""
    if format is not None and format not in FORMATS:
        raise UsageError(f"{format!r} is not a data format.", choices=FORMATS)
    if not data.exists():
        if has_magic(data.name) and (layout := tfrecord.from_glob(data)) is not None:
            return layout
        raise _path_not_found(data)
    data = data.resolve()
    if data.is_file():
        return _detect_file(data, format)
    root_layout = _detect_in_folder(data, format)
    layout = root_layout
    if layout is None or not layout.is_certain:
        layout = _detect_below(data, folders.list_subdirs(data).values(), format, root_layout) or root_layout
    if layout is None:
        raise _no_annotations_found(data, format)
    return replace(layout, may_be_replaced=format is None)


def _detect_below(
    data: Path, subdirs: Iterable[Path], format: str | None, root_layout: DatasetLayout | None = None
) -> DatasetLayout | None:
    """Returns the data set in one of the folders in a folder, or in several that are its splits. root_layout: the one
    that is there too, and that is only given up for a certain one. Raises DataError for several data sets."""
    layouts = ((path, _detect_in_folder(path, format)) for path in subdirs)
    nested = [(path, layout) for path, layout in layouts if layout is not None]
    candidates = [item for item in nested if item[1].is_certain] or ([] if root_layout is not None else nested)
    if len(candidates) == 1:
        path, layout = candidates[0]
        notes = [f"read from the folder {path.name}/"]
        if root_layout is not None:
            hint = f"its images were not found; --format {root_layout.format} reads it"
            notes.append(f"not read: {root_layout.description}, {hint}")
        return replace(layout, notes=(*notes, *layout.notes))
    merged = _merge_split_folders(data, candidates) if candidates else None
    if candidates and merged is None:
        names = [path.name for path, _ in candidates]
        raise make_error(DataError, "several-data-sets", data, choices=names, count=len(names), example=data / names[0])
    return merged


def layout_of_files(data: Path, files: Sequence[tuple[str, str]]) -> DatasetLayout:
    """Returns the layout of a data set whose splits have annotation files of their own; their images are near them or
    in `data`. files: (split, file), relative to the working folder, else to `data`. Raises DataError if a file does not
    exist or the formats differ."""
    layouts = [_layout_of_split(data, split, name) for split, name in files]
    first = layouts[0]
    if {layout.format for layout in layouts} != {first.format}:
        formats = ", ".join(f"{name} is {layout.format}" for (_, name), layout in zip(files, layouts, strict=True))
        raise DataError("The files of the splits have different formats.", cause=formats, fix="convert one of them")
    root = data.resolve()
    image_dirs = folders.list_image_dirs(root)
    parts = [
        replace(part, image_dirs=tuple(dict.fromkeys((*part.image_dirs, *image_dirs))))
        for layout in layouts
        for part in layout.parts
    ]
    return replace(
        first,
        description=f"{first.format} files of the splits",
        root=root,
        parts=tuple(parts),
        notes=tuple(note for layout in layouts for note in layout.notes),
        metadata_files=tuple(dict.fromkeys(path for layout in layouts for path in layout.metadata_files)),
    )


def root_of_files(files: Iterable[str]) -> Path:
    """Returns the folder that contains some annotation files and, by the rules of their formats, their images."""
    roots = [_layout_of_split(Path(), "train", name).root for name in files]
    return Path(os.path.commonpath(roots))


def _layout_of_split(data: Path, split: str, name: str) -> DatasetLayout:
    file = Path(name) if Path(name).exists() else data / name
    if not file.is_file():
        raise make_error(DataError, "split-file-not-found", Path(name).absolute(), split=split)
    layout = _detect_file(file.resolve(), None)
    if len(layout.parts) != 1:
        raise make_error(DataError, "split-file-with-splits", file, split=split, file=file)
    return replace(layout, parts=(replace(layout.parts[0], split=split),))


def data_file_suffixes(format: str | None = None) -> tuple[str, ...]:
    """Returns the suffixes, in lower case, of files that are a data set by themselves."""
    return tuple(suffix for name, spec in FORMATS.items() if format in (None, name) for suffix in spec.suffixes)


def _merge_split_folders(root: Path, nested: list[tuple[Path, DatasetLayout]]) -> DatasetLayout | None:
    """Makes one data set of split folders that are data sets of the same format; None if they are not."""
    first = nested[0][1]
    splits = [folders.split_from_name(path.name) for path, _ in nested]
    own_parts = [(split, part) for split, (_, layout) in zip(splits, nested, strict=True) for part in layout.parts]
    metadata_files = tuple(path for _, layout in nested for path in layout.metadata_files)
    if (
        None in splits
        or len(set(splits)) < len(splits)
        or any(part.split not in (None, split) for split, part in own_parts)
        or any(layout.format != first.format for _, layout in nested)
        or any(path.suffix.lower() in YAML_SUFFIXES for path in metadata_files)
    ):
        return None
    return replace(
        first,
        description=f"{first.description} per split folder",
        root=root,
        parts=folders.sort_parts(replace(part, split=split) for split, part in own_parts),
        notes=tuple(f"{path.name}/: {note}" for path, layout in nested for note in layout.notes),
        metadata_files=metadata_files,
        others=(),
    )


def _detect_file(data: Path, format: str | None) -> DatasetLayout:
    regular_files.open_file(data).close()  # raises what is wrong with it before a format is tried
    file_name = tfrecord.strip_shard_number(data.name).lower()
    for name, spec in FORMATS.items():
        is_candidate = format in (None, name) and file_name.endswith(spec.suffixes)
        if is_candidate and (layout := spec.recognize(data)) is not None:
            return layout
    folders.refuse_unread(data)
    if file_name.endswith(ARCHIVE_SUFFIXES):
        raise make_error(DataError, "data-in-archive", data, name=data.name)
    choices = ["a folder", *(f"*{suffix}" for suffix in data_file_suffixes(format) if not suffix.endswith(".gz"))]
    in_format = f" in the format {format!r}" if format else ""
    raise make_error(DataError, "file-is-no-data-set", data, choices=choices, name=data.name, in_format=in_format)


def _detect_in_folder(folder: Path, format: str | None) -> DatasetLayout | None:
    """Returns the data set of a folder, with notes on other formats in it."""
    layouts: list[DatasetLayout] = []
    notes = []
    for name, spec in FORMATS.items():
        if format not in (None, name):
            continue
        try:
            layout = spec.recognize(folder)
        except DataError as error:
            if not any(other.is_certain for other in layouts):
                raise
            # a format that is preferred to this one is found already
            notes.append(f"not read: annotations in the format {name!r}, because of an error: {error.what.rstrip('.')}")
            continue
        if layout is not None:
            layouts.append(layout)
    if not layouts:
        return None
    chosen, *others = sorted(layouts, key=lambda layout: not layout.is_certain)
    own_files = {part.annotations for part in chosen.parts if part.annotations.is_file()}
    others = [other for other in others if {part.annotations for part in other.parts} - own_files]
    return replace(chosen, others=tuple(others), notes=(*notes, *chosen.notes))


def _path_not_found(data: Path) -> DataError:
    parent = next(folder for folder in data.absolute().parents if folder.exists())
    closest = nearest(data.name, sorted(os.listdir(parent))) if parent == data.absolute().parent else None
    fix = f"did you mean {parent / closest}?" if closest else 'check the path; "demo" generates a small data set'
    return make_error(DataError, "data-not-found", data.absolute(), fix=fix, name=str(data), parent=parent)


def _no_annotations_found(data: Path, format: str | None) -> DataError:
    contents = "; ".join([_describe_contents(data), *_describe_tables(data)])
    below: list[Path] = []  # the first folders with a data set, below those in which `detect_layout` looks
    for folder, _ in walk(data, 2 * MAX_DEPTH):
        if len(below) < MAX_LISTED_DIRS and not is_below(str(folder), list(map(str, below))):
            with contextlib.suppress(DataError, OSError):  # it is what the user may look at, not what is read
                if (layout := _detect_in_folder(folder, format)) is not None and layout.is_certain:
                    below.append(folder)
    if below:
        return make_error(DataError, "data-further-down", data, choices=below, contents=contents, folder=below[0])
    folders.refuse_unread(data)
    expected = "; ".join(text for name, text in folders.format_texts().expected.items() if format in (None, name))
    in_format = f" in the format {format!r}" if format else ""
    return make_error(DataError, "no-annotations", data, in_format=in_format, contents=contents, expected=expected)


def _describe_tables(data: Path) -> Iterator[str]:
    """Yields the columns of the tables, in a folder or one below, that are not understood."""
    directories = (data, *folders.list_subdirs(data).values())
    tables = (file for directory in directories for file in folders.list_files(directory, csv.TABLE_SUFFIXES))
    for file in islice(tables, MAX_LISTED_DIRS):
        with contextlib.suppress(DataError, OSError):
            yield f"{file.relative_to(data)} is not a table of boxes: {csv.describe_columns(file)}"


def _describe_contents(folder: Path) -> str:
    with os.scandir(folder) as entries:
        names = sorted(entry.name + "/" * entry.is_dir() for entry in entries)
    others = [name for name in names if not folders.is_image_name(name)]
    listed = others[:MAX_LISTED_NAMES]
    if len(others) > MAX_LISTED_NAMES:
        listed.append(f"{len(others) - MAX_LISTED_NAMES} more")
    if len(names) > len(others):
        listed.append(_plural(len(names) - len(others), "image"))
    only = "" if others else "only "
    return f"it contains {only}{', '.join(listed)}" if listed else "the folder is empty"


MAX_DEPTH = 3
"""Levels of folders below the root that are searched."""
OUTPUT_DIRS = ("runs", "predictions")
"""Folders that stoker itself writes."""
MAX_LISTED_DIRS = 5
ANNOTATION_SUFFIXES = (".xml", ".txt", ".json", ".csv")


def find_fuller(
    layout: DatasetLayout, table: AnnotationTable, walked: Sequence[tuple[Path, list[str]]]
) -> DatasetLayout | None:
    """Returns the data set in another format, in a folder below or the same one, that annotates all images that this
    one annotates, and more, or as many and is preferred; None if there is none. In the same folder the order of formats
    decides, unless this one annotates no image. Images that do not exist do not count. walked: of the layout's root."""
    has_images = next(_iter_annotated(layout, table), None) is not None
    others: list[DatasetLayout | None] = [] if has_images else [*layout.others]
    with contextlib.suppress(DataError, OSError):  # what is wrong below is not what would be read
        others.append(_detect_below(layout.root, _dirs_with_others(layout, walked), None))
    for other in (other for other in others if other is not None and other.format != layout.format):
        with contextlib.suppress(DataError, OSError):
            theirs = set(_iter_annotated(other, FORMATS[other.format].read(other, ProblemCollector())))
            own = set(_iter_annotated(layout, table))
            is_preferred = list(FORMATS).index(other.format) < list(FORMATS).index(layout.format)
            if own < theirs or (own == theirs and is_preferred):
                counts = f"it annotates {len(own):,} images that exist, {other.description} {len(theirs):,}"
                hint = f"; --format {layout.format} reads it" if own else ""
                return replace(other, notes=(f"not read: {layout.description}: {counts}{hint}", *other.notes))
    return None


def _iter_annotated(layout: DatasetLayout, table: AnnotationTable) -> Iterator[str]:
    """Yields the images that exist and have a box."""
    for image_index in np.flatnonzero(np.bincount(table.image_index)).tolist():
        path = os.path.join(layout.root, table.image_path(image_index))
        if table.byte_range is not None or os.path.isfile(path):
            yield os.path.realpath(path)


def _dirs_with_others(layout: DatasetLayout, walked: Sequence[tuple[Path, list[str]]]) -> list[Path]:
    """Returns the folders in the root with images, and annotation files that are not those of the layout."""
    used = [os.path.realpath(part.annotations) for part in layout.parts]
    with_images, with_others = set[str](), set[str]()
    for folder, names in walked[1:]:
        top, real_dir = folder.relative_to(layout.root).parts[0], os.path.realpath(folder)
        others = (name for name in names if name.lower().endswith(ANNOTATION_SUFFIXES))
        is_used = is_below(real_dir, used) or all(os.path.join(real_dir, name) in used for name in others)
        with_others.update([top] * (not is_used))
        with_images.update([top] * any(map(folders.is_image_name, names)))
    return [layout.root / top for top in sorted(with_images & with_others)]


def describe_unused(
    layout: DatasetLayout, table: AnnotationTable, problems: ProblemCollector, walked: Sequence[tuple[Path, list[str]]]
) -> list[str]:
    """Returns notes on what is not used; another format with more boxes is a problem, too. table: before images were
    dropped. problems: those found so far."""
    notes = [_describe_other(layout, table, other, problems) for other in layout.others]
    num_unlisted = sum(problem.count for problem in problems.summarize(0) if problem.kind == "not-in-a-split")
    names_by_dir: dict[str, set[str]] = {}
    real_dirs = [os.path.realpath(layout.root / folder) for folder in table.folders]
    for folder_index, name in zip(table.folder_index.tolist(), table.file_names, strict=True):
        names_by_dir.setdefault(real_dirs[folder_index], set()).add(name)
    annotation_dirs = {os.path.realpath(part.annotations) for part in layout.parts}
    texts = []
    num_unnamed = 0
    for folder, files in walked:
        real_dir = os.path.realpath(folder)
        notes += _describe_pointers(folder, files)
        num_images = len({name for name in files if folders.is_image_name(name)} - names_by_dir.get(real_dir, set()))
        if real_dir in names_by_dir:
            num_unnamed += num_images
            continue
        num_labels = 0
        has_labels = num_images > 0 or folder.name.lower() in folders.ANNOTATION_DIRS
        if has_labels and folder != layout.root and not is_below(real_dir, annotation_dirs):
            num_labels = sum(name.lower().endswith((".xml", ".txt")) for name in files)
        counts = ((num_images, "image"), (num_labels, "annotation file"))
        if parts := [_plural(count, noun) for count, noun in counts if count]:
            place = "the folder" if folder == layout.root else f"{os.path.relpath(folder, layout.root)}/"
            texts.append(f"{' and '.join(parts)} in {place}")
    if len(texts) > MAX_LISTED_DIRS:
        texts = [*texts[:MAX_LISTED_DIRS], f"data in {len(texts) - MAX_LISTED_DIRS} other folders"]
    if num_unnamed > num_unlisted:
        texts.append(f"{_plural(num_unnamed - num_unlisted, 'image')} next to others that no annotation names")
    return [*notes, *([f"not used: {'; '.join(texts)}"] if texts else [])]


def _describe_pointers(folder: Path, names: list[str]) -> list[str]:
    """Returns notes on annotation files that Git LFS did not download."""
    files = [name for name in sorted(names) if name.lower().endswith(ANNOTATION_SUFFIXES)][: folders.MAX_PROBES]
    pointers = [name for name in files if folders.read_head(folder / name).startswith(regular_files.POINTER)]
    return [f"not read: {name} is a pointer of Git LFS: `git lfs pull` gets the file" for name in pointers]


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("s" if count != 1 else "")


def _describe_other(
    layout: DatasetLayout, table: AnnotationTable, other: DatasetLayout, problems: ProblemCollector
) -> str:
    counts = ""
    if image_source.path_to_uri(layout.root) is None:  # in a bucket, each image size would be a request
        try:
            other_table = FORMATS[other.format].read(other, ProblemCollector())
            num_boxes = len(other_table.boxes)
            if num_boxes and next(_iter_annotated(other, other_table), None) is None:
                return f"found {layout.description} and {other.description}: no image of the other exists"
            num_more = num_boxes - len(table.boxes)
            is_more = ", which are more" if num_more > 0 else ""
            if num_more > 0:
                text = f"{other.description}: {num_boxes:,}, {layout.description}: {len(table.boxes):,}"
                problems.add("more-boxes-in-another-format", f"{text}; --format {other.format} reads it", num_more)
            counts = f" ({len(table.boxes):,} boxes against {num_boxes:,} of the other{is_more})"
        except (DataError, OSError) as error:
            counts = f" (the other cannot be read: {error.what if isinstance(error, DataError) else error})"
    both = f"found {layout.description} and {other.description}"
    return f"{both}: read the first{counts}; --format {other.format} reads the other"


def walk(root: Path, max_depth: int = MAX_DEPTH) -> list[tuple[Path, list[str]]]:
    """Returns (folder, names of its files) of the root and the visible folders below it."""
    found = []
    for dirpath, dirnames, files in os.walk(root):
        depth = len(Path(dirpath).relative_to(root).parts)
        dirnames[:] = sorted(n for n in dirnames if not n.startswith(".") and not (depth == 0 and n in OUTPUT_DIRS))
        if depth >= max_depth:
            dirnames.clear()
        found.append((Path(dirpath), [name for name in files if not name.startswith(".")]))
        if len(found) >= folders.MAX_SEARCHED_DIRS:
            break
    return found
