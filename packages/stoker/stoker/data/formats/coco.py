"""COCO JSON.

Each file is memory-mapped and decoded once, all entries at once if all are valid, else one by one: an invalid entry is
then reported and dropped, numbers written as text are read, and image ids that are text, such as "a/001", are replaced
by numbers below -2**62. Polygons are skipped without creating objects, and the annotations become numpy arrays
directly. A file of COCO's size (118,287 images, 860,001 boxes, 401 MB) takes about a seventh of pycocotools' time and a
third of its memory: `benchmarks/loading/index.py`. Format: https://cocodataset.org/#format-data.
"""

import contextlib
import json
import mmap
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, product
from math import nan
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from stoker.data.formats import folders
from stoker.data.formats.images import MAX_NORMALIZED, is_usable_name, read_sizes, resolve_names
from stoker.data.formats.labelme import is_labelme
from stoker.data.formats.objects import MIN_FRACTION_CORNERS, corners_note
from stoker.data.formats.tables import (
    AnnotatedImage,
    AnnotationTable,
    DatasetLayout,
    DatasetWriter,
    FolderTable,
    SplitFiles,
    Target,
    exact_extent,
    shortest_decimal,
)
from stoker.data.formats.via import is_via
from stoker.data.validation.problems import ProblemCollector
from stoker_watch import regular_files
from stoker_watch.errors import DataError, make_error

Id = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class Category(msgspec.Struct, gc=False):
    """An entry of COCO's "categories"."""

    id: Id
    name: str
    supercategory: str | None = None


class ImageEntry(msgspec.Struct, gc=False):
    """An entry of COCO's "images"."""

    id: Id
    file_name: str
    height: float | None = None
    width: float | None = None


class Annotation(msgspec.Struct, gc=False):
    """An entry of COCO's "annotations"."""

    image_id: Id
    category_id: Id
    bbox: tuple[float, ...] | None = None
    area: float | None = nan
    iscrowd: float | bool | None = False
    id: Any = None


class CocoFile(msgspec.Struct):
    """The parts of a COCO file that are read."""

    images: list[ImageEntry]
    categories: list[Category]
    annotations: list[Annotation] = []


RawEntry = TypeVar("RawEntry")


class _RawFile(msgspec.Struct, Generic[RawEntry]):
    """The same with other entries: undecoded ones, or objects from Python's own parser."""

    images: list[RawEntry]
    categories: list[RawEntry] = []
    annotations: list[RawEntry] = []


SPLIT_FILE_NAMES = (
    "_annotations.coco.json",
    "annotations.coco.json",
    "annotations.json",
    "instances.json",
    "labels.json",
)
"""Names of the file in a split folder; FiftyOne writes labels.json and data/."""
OTHER_TASKS = ("captions", "keypoints", "panoptic", "stuff", "image_info")
SPLIT_ALIASES = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}


_USUAL_NAME = re.compile(r"(?i)coco|instances|annotation|train|val|test")
"""In names of COCO files."""
MAX_FILES = 256
"""JSON files of a folder up to which each is looked at; a tool that writes one for each image writes many."""


def recognize(path: Path) -> DatasetLayout | None:
    """Returns the COCO data set of a file, or of a folder (not of its subfolders); None if there is none. Raises
    DataError if a split has two files."""
    if path.is_file():
        if _has_another_format(path, folders.read_head(path)):
            return None
        root = folders.root_of(path)
        part = _make_part(folders.split_from_name(path.stem), path, root)
        return _make_layout("one COCO JSON file", root, [part], [])
    parts = []
    for split, split_dir in folders.iter_split_dirs(path):
        file = next((split_dir / name for name in SPLIT_FILE_NAMES if (split_dir / name).is_file()), None)
        if file is not None:
            parts.append(folders.file_part(file, split, folders.list_image_dirs(split_dir)[::-1]))
    if parts:
        return _make_layout("COCO JSON per split folder", path, parts, folders.check_unannotated_splits(path, parts))
    for directory in (*folders.named_subdirs(path, folders.ANNOTATION_DIRS), path):
        candidates = folders.list_files(directory, ".json")
        if len(candidates) > MAX_FILES:  # one for each image, unless the first ones or the usual names say otherwise
            usual = [file for file in candidates[folders.MAX_PROBES :] if _USUAL_NAME.search(file.stem)]
            if not any(map(_looks_like_coco, candidates[: folders.MAX_PROBES] + usual[: folders.MAX_PROBES])):
                continue
        if files := [file for file in candidates if _looks_like_coco(file)]:
            description = "COCO JSON" if directory == path else f"COCO JSON in {directory.name}/"
            chosen, notes = _choose_per_split(directory, files)
            return _make_layout(description, path, [_make_part(split, file, path) for split, file in chosen], notes)
    return None


def _make_layout(description: str, root: Path, parts: list[SplitFiles], notes: list[str]) -> DatasetLayout:
    return DatasetLayout(format="coco", description=description, root=root, parts=tuple(parts), notes=tuple(notes))


def _looks_like_coco(path: Path) -> bool:
    """Whether the first 64 KiB have one of COCO's keys: folders contain other JSON files, such as package.json, too."""
    head, keys = folders.read_head(path), (b'"images"', b'"annotations"', b'"image_id"', b'"file_name"')
    return any(key in head for key in keys) and not _has_another_format(path, head)


def _has_another_format(path: Path, head: bytes) -> bool:
    """Returns whether a file has a list of tasks or images, as Label Studio's, or the keys of another format."""
    is_other = head.startswith(b"[") or is_labelme(head) or is_via(head)
    return is_other or folders.recognize_file(path, head) is not None


def _make_part(split: str | None, path: Path, root: Path) -> SplitFiles:
    """Returns a file with the folders that may contain its images: train2017/, train/, … for "instances_train2017"."""
    dir_names = [path.stem.partition("_")[2] or path.stem, path.stem, *(SPLIT_ALIASES[split] if split else ())]
    candidates = [base / dir_name for base in (root, root / "images") for dir_name in dir_names]
    image_dirs = folders.unique([*candidates, *folders.list_image_dirs(root), *folders.list_image_dirs(path.parent)])
    return SplitFiles(split=split, annotations=path, image_dirs=image_dirs)


def _choose_per_split(folder: Path, files: list[Path]) -> tuple[list[tuple[str | None, Path]], list[str]]:
    """The files of each split, preferring those for boxes to those for other tasks; and notes. Several files of a split
    are read together. Raises DataError if they are about the same images: which boxes are meant is then unknown."""
    box_files = [path for path in files if path.stem.lower().startswith("instances")] or [
        path for path in files if not any(task in path.stem.lower() for task in OTHER_TASKS)
    ]
    chosen: list[tuple[str | None, Path]] = []
    notes: list[str] = []
    for split, own in folders.files_by_split(box_files or files):
        if len(own) > 1:
            if not _have_different_images(own):
                raise folders.several_files_error(folder, own, split, fix="name the files: --train FILE --val FILE")
            notes.append(f"read together, as their images differ: {', '.join(path.name for path in own)}")
        chosen += [(split, path) for path in own]
    used = {path for _, path in chosen}
    ignored = [path.name for path in files if path not in used]
    return chosen, [*notes, *([f"not read: {', '.join(ignored)}"] if ignored else [])]


class _ImageName(msgspec.Struct, gc=False):
    file_name: str


class _ImageNames(msgspec.Struct):
    """The names in a COCO file; a wrong value elsewhere is reported when the file is read."""

    images: list[_ImageName]


def _have_different_images(files: Iterable[Path]) -> bool:
    """Returns whether no image is in two of the files. False if one of them cannot be read."""
    seen: set[str] = set()
    for path in files:
        try:
            data = regular_files.read_bytes(path, max_bytes=regular_files.MAX_ANNOTATION_BYTES)
            entries = msgspec.json.decode(data.removeprefix(b"\xef\xbb\xbf"), type=_ImageNames).images
        except _UNREADABLE:
            return False
        names = {entry.file_name for entry in entries}
        if names & seen:
            return False
        seen |= names
    return True


def _find_base(existing: list[Path], others: list[Path], names: list[str]) -> tuple[Path, int]:
    """Returns the folder that has most of a few of the images, and how many folders their names begin with too many."""
    probes = names[:: max(1, len(names) // folders.MAX_PROBES)]
    depth = max(name.count("/") for name in probes)
    for directories, num_ignored in product((existing, others), range(depth + 1)):
        shown = [name.split("/", num_ignored)[-1] for name in probes]
        counts = [(sum(os.path.isfile(folder / name) for name in shown), folder) for folder in directories]
        num_found, best = max(counts, key=lambda count: count[0], default=(0, existing[0]))
        if num_found:
            return best, num_ignored
    # the folder whose files have these names in another case or Unicode form, if any
    return max(existing, key=lambda folder: len(resolve_names(folder, names))), 0


def _locate_images(
    part: SplitFiles, file_names: Sequence[str], folder_table: FolderTable
) -> tuple[NDArray[np.int32], list[str], list[str]]:
    """Returns folder index [R] and name of each image, and notes. Finds the folder to which a file's `file_name`s [R]
    are relative, by searching for a few of the images: in the usual folders, then in those below the root. If there is
    none, the most likely folder is used, and the check for missing images reports it. Folders inside a name are kept,
    unless the images exist only without them (exports that contain another machine's paths); of a few absolute paths
    among others, the last part is taken where it is the name of one image."""
    names = [name.replace("\\", "/") for name in file_names]
    base_names = [name.rpartition("/")[2] for name in names]
    existing = [folder for folder in part.image_dirs if folder.is_dir()] or [part.image_dirs[0]]
    base, num_ignored = _find_base(existing, folders.list_dirs_below(folder_table.root), names)
    notes = []
    if base not in existing:
        notes.append(f"{part.annotations.name}: the images are in {os.path.relpath(base, folder_table.root)}/")
    if num_ignored:
        names = [name.split("/", num_ignored)[-1] for name in names]
        which = "the folders" if names == base_names else f"the first {num_ignored} folders"
        notes.append(f"{part.annotations.name}: {which} in its file names are ignored; the images are in {base.name}/")
        if len(set(names)) != len(names):
            raise make_error(DataError, "coco-lost-folders", part.annotations, base=base)
    elif absolute := [i for i, name in enumerate(names) if ABSOLUTE.match(name) and not os.path.isfile(name)]:
        uses = Counter(base_names)
        moved = [i for i in absolute if uses[base_names[i]] == 1 and os.path.isfile(base / base_names[i])]
        for i in moved:
            names[i] = base_names[i]
        if moved:
            text = f"{len(moved):,} of its file names are paths of another machine, such as {file_names[moved[0]]}"
            notes.append(f"{part.annotations.name}: {text}; the images are in {base.name}/")
    index_by_dir: dict[str, int] = {}
    folder_index = np.empty(len(names), np.int32)
    for i, name in enumerate(names):
        head, _, names[i] = name.rpartition("/")
        if head not in index_by_dir:
            index_by_dir[head] = folder_table.add(os.path.normpath(os.path.join(base, head)))
        folder_index[i] = index_by_dir[head]
    return folder_index, names, notes


FORMAT_HINT = "https://cocodataset.org/#format-data describes the fields; correct the entry or export the file again"
ABSOLUTE = re.compile(r"([A-Za-z]:)?/")
"""How an absolute path begins, with its folders separated by /."""
MAX_QUOTED_CHARS = 120
"""Characters of an entry that are quoted in a message."""


Entry = TypeVar("Entry", bound=msgspec.Struct)
Convert = Callable[..., Any]
"""(entry, type=, strict=) → an object of that type. Raises one of `_UNREADABLE`."""
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def read_entries(path: Path, location: str, problems: ProblemCollector) -> tuple[CocoFile, list[str]]:
    """Decodes an annotation file, and returns notes. location: its name in messages. Raises DataError."""
    if path.stat().st_size == 0:
        raise DataError("The annotation file is empty.", location=path, fix="export or copy it again")
    with (
        regular_files.open_file(path, max_bytes=regular_files.MAX_ANNOTATION_BYTES) as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        view = memoryview(data)
        with view[3:] if data[:3] == b"\xef\xbb\xbf" else view[:] as text, view:
            try:
                try:
                    return msgspec.json.decode(text, type=CocoFile), []
                except (msgspec.DecodeError, UnicodeDecodeError):
                    raw, convert = _decode_raw(bytes(text))
            except msgspec.ValidationError as error:
                what = "The annotations are not COCO JSON for detection."
                raise DataError(what, location=path, cause=str(error), fix=FORMAT_HINT) from error
            except (msgspec.DecodeError, ValueError) as error:
                digits = str(error).rpartition("byte ")[2].rstrip(")")
                line = data[: int(digits) if digits.isdigit() else len(data)].count(b"\n") + 1
                place, reason = f"{path}:{line}", str(error)
                raise make_error(DataError, "invalid-json", place, text=reason, num_bytes=len(data)) from error
            except RecursionError as error:
                raise DataError("The annotations are nested too deeply.", location=path, fix=FORMAT_HINT) from error
    return _convert_each(path, raw, convert, location, problems)


def _decode_raw(data: bytes) -> tuple[_RawFile[Any], Convert]:
    """Returns the undecoded entries of a file of which one is invalid, and what decodes them."""
    try:
        return msgspec.json.decode(data, type=_RawFile[msgspec.Raw]), msgspec.json.decode
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError):
        if b"NaN" not in data and b"Infinity" not in data:
            raise
        # not JSON, but Python writes it: only the boxes with these numbers are dropped, not the file
        return msgspec.convert(json.loads(data), type=_RawFile[Any]), msgspec.convert


def _correct(
    entry: Any, entry_type: type[Entry], convert: Convert, number_by_text_id: dict[str, int]
) -> tuple[Entry | None, str | None]:
    """Returns an entry whose strict conversion failed, and the kind of problem; None or `_UNREADABLE` if it is
    unusable."""
    with contextlib.suppress(msgspec.ValidationError):
        return convert(entry, type=entry_type, strict=False), "text-for-number"
    fields = convert(entry, type=Any) if isinstance(entry, msgspec.Raw) else entry
    if not isinstance(fields, dict) or entry_type is Category:
        return None, None
    is_image = entry_type is ImageEntry
    key = "id" if is_image else "image_id"
    text_id = fields.get(key)
    kind = None
    if isinstance(text_id, str) and (is_image or text_id in number_by_text_id):
        number = number_by_text_id.setdefault(text_id, -(2**62) - 1 - len(number_by_text_id))
        fields = {**fields, key: number}
    elif is_image and "file_name" not in fields and isinstance(fields.get("coco_url"), str):  # LVIS
        folder, _, name = fields["coco_url"].rpartition("/")
        fields = {**fields, "file_name": f"{folder.rpartition('/')[2]}/{name}"}
    elif is_image:  # without its size
        fields = {name: fields[name] for name in ("id", "file_name") if name in fields}
        kind = "malformed-size"
    return msgspec.convert(fields, type=entry_type, strict=kind is None), kind


def _convert_each(
    path: Path, raw: _RawFile[Any], convert: Convert, location: str, problems: ProblemCollector
) -> tuple[CocoFile, list[str]]:
    number_by_text_id: dict[str, int] = {}

    def convert_entries(name: str, entry_type: type[Entry], problem_kind: str, items: Iterable[Any]) -> list[Entry]:
        valid: list[Entry] = []
        for position, entry in enumerate(items):
            try:
                valid.append(convert(entry, type=entry_type))
            except _UNREADABLE as error:
                try:
                    corrected, kind = _correct(entry, entry_type, convert, number_by_text_id)
                except _UNREADABLE:  # what a valid beginning was followed by
                    corrected, kind = None, None
                valid += [] if corrected is None else [corrected]
                reason = "" if kind == "text-for-number" else f": {error}"
                if corrected is None or kind is not None:
                    place = f'{location}, "{name}" number {position}: {_quote(entry)}'
                    problems.add(kind or problem_kind, f"{place}{reason}")
        return valid

    file = CocoFile(
        convert_entries("images", ImageEntry, "malformed-image", raw.images),
        convert_entries("categories", Category, "malformed-class", raw.categories),
        convert_entries("annotations", Annotation, "malformed-annotation", raw.annotations),
    )
    for name in ("images", "annotations"):
        if getattr(raw, name) and not getattr(file, name):
            reasons = [p for p in problems.summarize(1) if p.kind in ("malformed-image", "malformed-annotation")]
            raise make_error(DataError, "coco-unreadable-entries", path, cause=reasons[-1].examples[0], name=name)
    example = next(iter(number_by_text_id), None)
    note = f"{location}: {len(number_by_text_id):,} image ids are text, such as {example!r}"
    return file, [note] if number_by_text_id else []


def _quote(entry: Any) -> str:
    text = bytes(entry).decode(errors="replace") if isinstance(entry, msgspec.Raw) else json.dumps(entry)
    text = " ".join(text.split())
    return text if len(text) <= MAX_QUOTED_CHARS else text[:MAX_QUOTED_CHARS] + "…"


class _Part(NamedTuple):
    source: SplitFiles
    categories: list[Category]
    file_names: list[str]
    columns: dict[str, NDArray[Any]]
    """Those of an `AnnotationTable`; also `category_id` [K]. `boxes` are as written until `_to_corners`."""
    notes: list[str]


def _merge_categories(parts: list[_Part]) -> tuple[list[Category], NDArray[np.int32], list[str]]:
    """Returns the classes of a data set, those of the first file; the label of each box [K]; and notes. Ids may be
    sparse, files may number the same names differently, and Roboflow has a super-category as category 0. Raises
    DataError for annotations of a class that the first file does not define."""
    first_file = parts[0].source.annotations
    first = sorted(parts[0].categories, key=lambda category: category.id)
    id_maps = [_map_to_first(part, first_file, first) for part in parts]
    ids_by_part = []
    for part, id_map in zip(parts, id_maps, strict=True):
        own_ids, positions = np.unique(part.columns["category_id"], return_inverse=True)
        ids_by_part.append(np.array([id_map[own] for own in own_ids.tolist()], np.int64)[positions])
    ids = np.concatenate(ids_by_part)
    used_ids = set(np.unique(ids).tolist())
    children: dict[str | None, set[int]] = {}
    for category in first:
        children.setdefault(category.supercategory, set()).add(category.id)
    parents = [c for c in first if children.get(c.name, set()) - {c.id} and c.id not in used_ids]
    kept = [category for category in first if category not in parents]
    labels = np.searchsorted([category.id for category in kept], ids).astype(np.int32)
    notes = [f"category {c.id} ({c.name}) is a super-category without a box, so it is not a class" for c in parents]
    if any(own != first_id for id_map in id_maps for own, first_id in id_map.items()):
        how = f"matched by name, with the ids of {first_file.name}"
        notes.append(f"the files number their categories differently: {how}")
    return kept, labels, notes


def _map_to_first(part: _Part, first_file: Path, first: list[Category]) -> dict[int, int]:
    """Returns for each category of a file the id that the first file has for it."""
    name_by_id = {category.id: category.name for category in first}
    ids_by_name: dict[str, list[int]] = {}
    for category in first:
        ids_by_name.setdefault(category.name, []).append(category.id)
    used_ids = set(part.columns["category_id"].tolist())
    id_map = {}
    for category in part.categories:
        if name_by_id.get(category.id) == category.name:
            id_map[category.id] = category.id
        elif len(ids_by_name.get(category.name, ())) == 1:
            id_map[category.id] = ids_by_name[category.name][0]
        elif category.id in used_ids:
            raise DataError(
                f"The class {category.name!r} (category {category.id}) is not defined in {first_file.name}.",
                location=part.source.annotations,
                cause=f"the classes are those of {first_file}",
                choices=sorted(ids_by_name)[:100],
                fix="add the category to that file, or correct its name in this one",
            )
    return id_map


def read(layout: DatasetLayout, problems: ProblemCollector) -> AnnotationTable:
    """Reads all files of a COCO data set. Raises DataError with file and location."""
    folder_table, notes = FolderTable(layout.root), list(layout.notes)
    parts: list[_Part] = []
    for source in layout.parts:
        location = os.path.relpath(source.annotations, layout.root)
        allow_empty = source.split == "test" and len(layout.parts) > 1
        if (part := _read_file(source, location, problems, allow_empty=allow_empty)) is not None:
            parts.append(part)
    kept, labels, class_notes = _merge_categories(parts)
    notes += class_notes
    file_names: list[str] = []
    for part in parts:
        part.columns["folder_index"], own_names, own_notes = _locate_images(part.source, part.file_names, folder_table)
        own_notes += _to_corners(part, own_names, folder_table, problems)
        part.columns["image_index"] += len(file_names)
        file_names += own_names
        notes += part.notes + own_notes
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns}
    del columns["category_id"]
    return AnnotationTable(
        class_names=[category.name for category in kept],
        category_ids=[category.id for category in kept],
        folders=folder_table.paths(),
        file_names=file_names,
        labels=labels,
        box_id_kind="annotation",
        notes=notes,
        **columns,  # type: ignore[arg-type]
    )


def _to_corners(part: _Part, names: list[str], folder_table: FolderTable, problems: ProblemCollector) -> list[str]:
    """Makes corners in pixels of the boxes of a part, which COCO writes as x, y, width and height. Returns notes on
    those that are something else, by the image sizes or the polygons: fractions of the image size, or corners."""
    columns, file, notes = part.columns, part.source.annotations, list[str]()
    boxes, size = columns["boxes"], columns["original_size"][columns["image_index"]]
    if len(boxes) and np.mean(boxes[:, 2] <= MAX_NORMALIZED) > MIN_FRACTION_CORNERS:  # first, as it is fast
        is_small = (np.abs(boxes) <= MAX_NORMALIZED).all(1)
        if np.mean(is_small) > MIN_FRACTION_CORNERS:
            unmeasured = np.flatnonzero((columns["original_size"] == 0).any(1)).tolist()
            dirs = [folder_table.root / path for path in folder_table.paths()]
            files = [dirs[columns["folder_index"][i]] / names[i] for i in unmeasured]
            columns["original_size"][unmeasured], _ = read_sizes(files)
            size = columns["original_size"][columns["image_index"]]
            notes.append(f"{file.name}: boxes are within 0 … 1: fractions of image width and height")
            for i in np.flatnonzero(~is_small).tolist():
                problems.add("not-normalized", f"{file.name}, annotation {columns['box_id'][i]}: {boxes[i].tolist()}")
            boxes *= np.where(is_small[:, None], size[:, [1, 0, 1, 0]], np.nan)
    boxes[:, 2:] += boxes[:, :2]
    if len(boxes) and np.mean(boxes[:, 2:] > 2 * boxes[:, :2]) > MIN_FRACTION_CORNERS:  # they could be corners
        known = (size > 0).all(1)
        note = corners_note(size[known].astype(np.float64), boxes[known]) or _polygons_note(file)
        if note is not None:
            boxes[:, 2:] -= boxes[:, :2]
            notes.append(f"{file.name}: {note}")
    return notes


class _Polygon(msgspec.Struct, gc=False):
    bbox: Any = None
    segmentation: Any = None


def _polygons_note(file: Path) -> str | None:
    """Returns a note if the boxes of a file are the corners of its polygons, all of which it decodes for that."""
    data = regular_files.read_bytes(file, max_bytes=regular_files.MAX_ANNOTATION_BYTES).removeprefix(b"\xef\xbb\xbf")
    count = 0
    with contextlib.suppress(TypeError, ValueError, *_UNREADABLE):
        for entry in msgspec.json.decode(data, type=_RawFile[_Polygon]).annotations:
            if isinstance(entry.segmentation, list) and entry.segmentation and entry.bbox:
                points = np.array(list(chain.from_iterable(entry.segmentation)), np.float64).reshape(-1, 2)
                bound = np.concatenate((points.min(0), points.max(0)))
                if np.abs(bound - np.array(entry.bbox, np.float64)).max() > 2:  # pixels: rounding, the last pixel
                    return None
                count += 1
    return (
        f"bbox are corners (x1, y1, x2, y2): those of the polygons of all {count:,} boxes that have any"
        if count
        else None
    )


def _read_file(source: SplitFiles, location: str, problems: ProblemCollector, *, allow_empty: bool) -> _Part | None:
    """Returns None for an allowed file without images. location: the file's name in messages."""
    path = source.annotations
    entries, notes = read_entries(path, location, problems)
    if not entries.images and allow_empty:
        problems.add("split-without-boxes", f"{location}: no images")
        return None
    if not entries.images:
        raise DataError("The annotation file lists no images.", location=path, fix="export the split again")
    images = _drop_ambiguous(path, _drop_unusable_names(entries.images, location, problems), location, problems)
    if not images:
        raise DataError("No image of the annotation file has a usable name.", location=path, cause=problems.describe())
    image_id = np.fromiter([image.id for image in images], np.int64, len(images))
    categories = _unique_categories(path, entries.categories, location, problems)
    if entries.annotations and not categories:
        raise make_error(DataError, "coco-without-classes", path, count=len(entries.annotations))
    annotations, ids_without_box = _drop_without_box(location, entries.annotations, problems)

    def column(name: str, dtype: type[np.generic]) -> NDArray[Any]:
        return np.fromiter(map(attrgetter(name), annotations), dtype, len(annotations))

    try:
        box_id = column("id", np.int64)
    except (TypeError, ValueError, OverflowError):  # for messages: positions if the ids are not whole numbers
        box_id = np.arange(len(annotations), dtype=np.int64)
    box_image_id, category_id = column("image_id", np.int64), column("category_id", np.int64)
    image_index, is_listed = _find_images(box_image_id, image_id)
    is_known = np.isin(category_id, np.array([category.id for category in categories], np.int64))
    for i in np.flatnonzero(~is_listed).tolist():
        problems.add("unknown-image", f"{location}, annotation {box_id[i]}: image_id {box_image_id[i]}")
    for i in np.flatnonzero(~is_known).tolist():
        problems.add("unknown-class", f"{location}, annotation {box_id[i]}: category_id {category_id[i]}")
    order = np.argsort(np.where(is_listed, image_index, -1), kind="stable")
    order = order[is_listed[order] & is_known[order]]
    without_box, has_image = _find_images(np.array(ids_without_box, np.int64), image_id)
    bad_image_index = np.concatenate([image_index[is_listed & ~is_known], without_box[has_image]])
    coordinates = chain.from_iterable(map(attrgetter("bbox"), annotations))
    boxes = np.fromiter(coordinates, np.float64, 4 * len(annotations)).reshape(-1, 4)
    columns: dict[str, NDArray[Any]] = {
        "split": np.full(len(images), source.split_index, np.int8),
        "original_size": _sizes(images, location, problems),
        "image_id": image_id,
        "image_index": image_index[order],
        "boxes": boxes[order],
        "category_id": category_id[order],
        "crowd": column("iscrowd", np.bool_)[order],
        "area": column("area", np.float64)[order],
        "box_id": box_id[order],
        "num_bad_boxes": np.bincount(bad_image_index, minlength=len(images)),
    }
    return _Part(source, categories, [image.file_name for image in images], columns, notes)


def _drop_unusable_names(images: list[ImageEntry], location: str, problems: ProblemCollector) -> list[ImageEntry]:
    """Returns the images whose `file_name` is a possible file name."""
    unusable = {id(image): image for image in images if not is_usable_name(image.file_name)}
    for image in unusable.values():
        quoted = f"{image.file_name[:60]!r}"
        problems.add("malformed-image", f"{location}, image id {image.id}: {quoted} is not a file name")
    return [image for image in images if id(image) not in unusable]


def _drop_ambiguous(
    path: Path, images: list[ImageEntry], location: str, problems: ProblemCollector
) -> list[ImageEntry]:
    """Returns the images with a unique id and a unique file name. The boxes of the others cannot be told apart: data
    sets were merged without new ids, or without their folders."""
    num_images = len(images)
    if len({p.id for p in images}) == num_images == len({p.file_name for p in images}):
        return images
    first: dict[tuple[int, str], ImageEntry] = {}
    for image in images:
        if first.setdefault((image.id, image.file_name), image) is not image:
            problems.add("copied-entry", f"{location}, image id {image.id}: {image.file_name}")
    names_by_id, ids_by_name = defaultdict(list), defaultdict(list)
    for image_id, name in first:
        names_by_id[image_id].append(name)
        ids_by_name[name].append(image_id)
    for image_id, shared_names in names_by_id.items():
        if len(shared_names) > 1:
            listed = ", ".join(shared_names)
            problems.add("ambiguous-id", f"{location}, image id {image_id}: {listed}", len(shared_names))
    for name, shared_ids in ids_by_name.items():
        if len(shared_ids) > 1 and any(len(names_by_id[image_id]) == 1 for image_id in shared_ids):
            listed = ", ".join(map(str, shared_ids))
            problems.add("listed-twice", f"{location}, {name}: image ids {listed}")
    kept = [p for p in first.values() if len(names_by_id[p.id]) == 1 == len(ids_by_name[p.file_name])]
    if not kept:
        problem = next(p for p in problems.summarize(1) if p.kind in ("ambiguous-id", "listed-twice"))
        raise make_error(DataError, "coco-ambiguous-images", path, example=problem.examples[0])
    return kept


def _sizes(images: list[ImageEntry], location: str, problems: ProblemCollector) -> NDArray[np.int32]:
    """Returns [R, 2], height and width; 0, to be read from the image, if the file has no valid size."""
    annotated_size = np.array([(image.height or 0, image.width or 0) for image in images], np.float64).reshape(-1, 2)
    is_valid = (annotated_size >= 0) & (annotated_size < 2**31)
    for image_index in np.flatnonzero(~is_valid.all(1)).tolist():
        height, width = annotated_size[image_index]
        problems.add(
            "malformed-size", f"{location}, {images[image_index].file_name}: width {width:g}, height {height:g}"
        )
    return np.where(is_valid.all(1, keepdims=True), annotated_size, 0).astype(np.int32)


def _drop_without_box(
    location: str, annotations: list[Annotation], problems: ProblemCollector
) -> tuple[list[Annotation], list[int]]:
    """Returns the annotations that have a box, and the image ids of the others."""
    if {0 if a.bbox is None else len(a.bbox) for a in annotations} <= {4}:
        return annotations, []
    kept, image_ids = [], []
    for annotation in annotations:
        box, place = annotation.bbox, f"{location}, annotation {annotation.id}"
        if box is not None and len(box) == 4:
            kept.append(annotation)
            continue
        image_ids.append(annotation.image_id)
        if box:
            problems.add("malformed-box", f"{place}: {len(box)} numbers, not x, y, width and height")
        else:
            problems.add("no-box", place)
    return kept, image_ids


def _find_images(ids: NDArray[np.int64], image_id: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Returns [K], the image index of each of the `ids`, and whether there is such an image."""
    order = np.argsort(image_id)
    image_index = order[np.minimum(np.searchsorted(image_id[order], ids), len(order) - 1)]
    return image_index, image_id[image_index] == ids


def _unique_categories(
    path: Path, categories: list[Category], location: str, problems: ProblemCollector
) -> list[Category]:
    """Returns the categories of a file without copies. Raises DataError if two different ones have the same id."""
    first: dict[int, Category] = {}
    for category in categories:
        earlier = first.setdefault(category.id, category)
        if earlier is category:
            continue
        if earlier.name != category.name:
            names = f"{earlier.name!r} and {category.name!r}"
            raise make_error(DataError, "coco-repeated-category", path, id=category.id, names=names)
        problems.add("copied-class", f"{location}, category id {category.id}: {category.name}")
    return list(first.values())


class CocoWriter(DatasetWriter):
    """COCO's own layout: `annotations/instances_<split>.json`, and a folder of images per split. It can store
    everything that an index has. Category ids are the source's if all are 1 or more, as in COCO; else 1 … C, because
    many tools use 0 for the background."""

    image_dir = "{split}"

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._category_ids = coco_category_ids(target.class_names, target.category_ids)
        self._images: dict[str, list[dict[str, object]]] = {split: [] for split in target.max_images}
        self._annotations: dict[str, list[dict[str, object]]] = {split: [] for split in target.max_images}

    def add(self, image: AnnotatedImage) -> None:
        (height, width), annotations = image.size, self._annotations[image.split]
        entry = {"id": image.image_id, "file_name": image.name, "width": width, "height": height}
        self._images[image.split].append(entry)
        for row in coco_annotations(image.boxes, image.labels, image.crowd, image.area, self._category_ids):
            annotations.append({"id": len(annotations) + 1, "image_id": image.image_id, **row})

    def finish(self) -> None:
        ids = zip(self._category_ids, self.class_names, strict=True)
        categories = [{"id": category_id, "name": name} for category_id, name in ids]
        (self.folder / "annotations").mkdir()
        for split in self.written_splits:
            images, annotations = self._images[split], self._annotations[split]
            document = {"images": images, "annotations": annotations, "categories": categories}
            (self.folder / "annotations" / f"instances_{split}.json").write_bytes(msgspec.json.encode(document))


def coco_category_ids(class_names: Sequence[str], category_ids: Sequence[int]) -> tuple[int, ...]:
    """Returns the source's ids if all are 1 or more, else 1 … C."""
    keep_ids = len(set(category_ids)) == len(class_names) and min(category_ids, default=0) >= 1
    return tuple(category_ids) if keep_ids else tuple(range(1, len(class_names) + 1))


def coco_annotations(
    boxes: NDArray[np.float32],
    labels: NDArray[np.int32],
    crowd: NDArray[np.bool_],
    area: NDArray[np.float64],
    category_ids: Sequence[int],
) -> Iterator[dict[str, object]]:
    """Yields boxes [k, 4] of an image as COCO writes them, without ids."""
    for (x1, y1, x2, y2), label, is_crowd, box_area in zip(
        boxes, labels.tolist(), crowd.tolist(), area.tolist(), strict=True
    ):
        left, top = shortest_decimal(x1), shortest_decimal(y1)
        yield {
            "category_id": category_ids[label],
            "bbox": [left, top, exact_extent(left, x2), exact_extent(top, y2)],
            "area": box_area,
            "iscrowd": int(is_crowd),
        }
