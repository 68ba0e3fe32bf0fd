"""COCO JSON: reads the files of a data set into columns.

Each file is memory-mapped and decoded once (`coco_entries.py`); polygons are skipped without becoming objects, and the
decoded annotations become numpy columns at once. COCO's own size (118,287 pictures, 860,001 boxes, 401 MB) takes about
a seventh of pycocotools' time and a third of its memory: `benchmarks/index.py`. What is wrong with single entries is
put among the problems, and the rest is read. Which files there are: `coco_files.py`; classes: `categories.py`.
"""

import os
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.data.formats.categories import Category, common_map
from stoker.data.formats.coco_entries import Annotation, Picture, read_entries
from stoker.data.formats.coco_files import locate_pictures
from stoker.data.formats.tables import SPLITS, UNDECIDED, Columns, Folders, Found
from stoker.data.validation.problems import Problems
from stoker.errors import DataError

LONGEST_NAME = 255
"""Bytes of a file name that file systems take."""


@dataclass(kw_only=True)
class _Split:
    """One file as columns; boxes [K, 4] xyxy, sorted by picture."""

    categories: list[Category]
    names: list[str]
    size: NDArray[np.int32]
    image_id: NDArray[np.int64]
    row: NDArray[np.int64]
    boxes: NDArray[np.float64]
    category_id: NDArray[np.int64]
    crowd: NDArray[np.bool_]
    area: NDArray[np.float64]
    box_id: NDArray[np.int64]


def read(found: Found, problems: Problems) -> Columns:
    """Reads all files of a COCO data set. Raises DataError that names file and place."""
    parts, splits = [], []
    for part in found.parts:
        where = os.path.relpath(part.annotations, found.root)
        may_be_empty = part.split == "test" and len(found.parts) > 1
        split = _read_file(part.annotations, where, problems, may_be_empty=may_be_empty)
        if split is not None:
            parts.append(part)
            splits.append(split)
    files = [part.annotations for part in parts]
    categories = common_map(
        files, [split.categories for split in splits], [np.unique(split.category_id) for split in splits]
    )
    folders = Folders(found.root)
    notes = [*found.notes, *categories.notes]
    folder, names, starts = [], [], [0]
    for part, split in zip(parts, splits, strict=True):
        place = locate_pictures(part, split.names, folders)
        folder.append(place.folder)
        names += place.names
        notes += place.notes
        starts.append(starts[-1] + len(split.names))
    return Columns(
        class_names=categories.names,
        category_ids=categories.ids,
        folders=folders.texts(),
        folder=np.concatenate(folder),
        names=names,
        split=np.repeat(
            np.array([UNDECIDED if part.split is None else SPLITS.index(part.split) for part in parts], np.int8),
            np.diff(starts),
        ),
        size=np.concatenate([split.size for split in splits]),
        image_id=np.concatenate([split.image_id for split in splits]),
        row=np.concatenate([split.row + start for split, start in zip(splits, starts, strict=False)]),
        boxes=np.concatenate([split.boxes for split in splits]),
        labels=np.concatenate(
            [labels_of(split.category_id) for split, labels_of in zip(splits, categories.labels, strict=True)]
        ),
        crowd=np.concatenate([split.crowd for split in splits]),
        area=np.concatenate([split.area for split in splits]),
        box_id=np.concatenate([split.box_id for split in splits]),
        box_word="annotation",
        notes=notes,
    )


def _read_file(path: Path, where: str, problems: Problems, *, may_be_empty: bool) -> _Split | None:
    """None for a file that lists no pictures and may do so. where: the file's name in messages."""
    content = read_entries(path, where, problems)
    if not content.images and may_be_empty:
        problems.add("split-without-boxes", f"{where}: no pictures")
        return None
    if not content.images:
        raise DataError("The annotation file lists no pictures.", place=path, fix="export the split again")
    pictures = _distinct(path, _nameable(content.images, where, problems), where, problems)
    image_id = np.fromiter([picture.id for picture in pictures], np.int64, len(pictures))
    categories = _categories(path, content.categories, where, problems)
    if content.annotations and not categories:
        raise DataError(
            "The annotation file defines no classes.",
            place=path,
            cause=f'"categories" is empty or absent, and there are {len(content.annotations):,} annotations',
            fix="export the file again, with its categories",
        )
    annotations = _with_box(where, content.annotations, problems)

    def column(name: str, kind: type[np.generic]) -> NDArray[Any]:
        return np.fromiter(map(attrgetter(name), annotations), kind, len(annotations))

    box_id = _annotation_ids(annotations)
    row = _rows_of(where, column("image_id", np.int64), image_id, box_id, problems)
    category_id = column("category_id", np.int64)
    known = _of_known_class(where, categories, category_id, box_id, problems)
    order = np.argsort(row, kind="stable")
    order = order[(row >= 0)[order] & known[order]]
    numbers = chain.from_iterable(map(attrgetter("bbox"), annotations))
    boxes = np.fromiter(numbers, np.float64, 4 * len(annotations)).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]  # COCO writes x, y, width, height
    return _Split(
        categories=categories,
        names=[picture.file_name for picture in pictures],
        size=_sizes(pictures, where, problems),
        image_id=image_id,
        row=row[order],
        boxes=boxes[order],
        category_id=category_id[order],
        crowd=column("iscrowd", np.bool_)[order],
        area=column("area", np.float64)[order],
        box_id=box_id[order],
    )


def _nameable(pictures: list[Picture], where: str, problems: Problems) -> list[Picture]:
    """The pictures whose `file_name` can be the name of a file."""

    def fits(name: str) -> bool:
        if not name or "\0" in name or name.endswith(("/", "\\")) or not _is_unicode(name):
            return False
        return len(name) * 4 <= LONGEST_NAME or all(
            len(part.encode()) <= LONGEST_NAME for part in name.replace("\\", "/").split("/")
        )

    odd = [i for i, picture in enumerate(pictures) if not fits(picture.file_name)]
    for i in odd:
        shown = f"{pictures[i].file_name[:60]!r}"
        problems.add("malformed-picture", f"{where}, picture id {pictures[i].id}: {shown} is no name of a file")
    without = set(odd)
    return [picture for i, picture in enumerate(pictures) if i not in without] if odd else pictures


def _is_unicode(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
        return False
    return True


def _distinct(path: Path, pictures: list[Picture], where: str, problems: Problems) -> list[Picture]:
    """The pictures that have an id and a file name of their own. Which boxes are those of the others is not known: data
    sets were merged without new ids, or without their folders."""
    count = len(pictures)
    if len({p.id for p in pictures}) == count == len({p.file_name for p in pictures}):
        return pictures
    first: dict[tuple[int, str], Picture] = {}
    for picture in pictures:
        if first.setdefault((picture.id, picture.file_name), picture) is not picture:
            problems.add("copied-entry", f"{where}, picture id {picture.id}: {picture.file_name}")
    names, ids = defaultdict(list), defaultdict(list)
    for number, name in first:
        names[number].append(name)
        ids[name].append(number)
    for number, several in names.items():
        if len(several) > 1:
            problems.add("ambiguous-id", f"{where}, picture id {number}: {', '.join(several)}", len(several))
    for name, several_ids in ids.items():
        if len(several_ids) > 1 and any(len(names[number]) == 1 for number in several_ids):
            listed = ", ".join(map(str, several_ids))
            problems.add("listed-twice", f"{where}, {name}: picture ids {listed}")
    kept = [p for p in first.values() if len(names[p.id]) == 1 == len(ids[p.file_name])]
    if not kept:
        found = next(p for p in problems.found(1) if p.kind in ("ambiguous-id", "listed-twice"))
        raise DataError(
            "No picture has an id and a file name of its own.",
            place=path,
            cause=f"e.g. {found.examples[0]}: data sets were merged without new ids, or without their folders",
            fix="give every entry its own id and file name",
        )
    return kept


def _sizes(pictures: list[Picture], where: str, problems: Problems) -> NDArray[np.int32]:
    """[R, 2], height and width; 0, to be read from the picture, where the file has none that makes sense."""
    said = np.array([(picture.height or 0, picture.width or 0) for picture in pictures], np.float64).reshape(-1, 2)
    whole = (said >= 0) & (said < 2**31)
    for row in np.flatnonzero(~whole.all(1)).tolist():
        height, width = said[row]
        problems.add("malformed-size", f"{where}, {pictures[row].file_name}: width {width:g}, height {height:g}")
    return np.where(whole.all(1, keepdims=True), said, 0).astype(np.int32)


def _with_box(where: str, annotations: list[Annotation], problems: Problems) -> list[Annotation]:
    """The annotations that have a box."""
    if {0 if a.bbox is None else len(a.bbox) for a in annotations} <= {4}:
        return annotations
    odd = [i for i, annotation in enumerate(annotations) if annotation.bbox is None or len(annotation.bbox) != 4]
    for i in odd:
        box = annotations[i].bbox
        place = f"{where}, annotation {annotations[i].id}"
        if box:
            problems.add("malformed-box", f"{place}: {len(box)} numbers, not x, y, width and height")
        else:
            problems.add("no-box", place)
    without = set(odd)
    return [annotation for i, annotation in enumerate(annotations) if i not in without]


def _annotation_ids(annotations: list[Annotation]) -> NDArray[np.int64]:
    """The ids by which messages name annotations; positions in the list where they are not whole numbers."""
    try:
        return np.fromiter(map(attrgetter("id"), annotations), np.int64, len(annotations))
    except (TypeError, ValueError, OverflowError):
        return np.arange(len(annotations), dtype=np.int64)


def _rows_of(
    where: str, owner: NDArray[np.int64], image_id: NDArray[np.int64], box_id: NDArray[np.int64], problems: Problems
) -> NDArray[np.int64]:
    """The row of the picture that each annotation [K] belongs to; -1 for none."""
    order = np.argsort(image_id)
    row = order[np.minimum(np.searchsorted(image_id[order], owner), len(order) - 1)]
    stray = image_id[row] != owner
    for i in np.flatnonzero(stray).tolist():
        problems.add("unknown-picture", f"{where}, annotation {box_id[i]}: image_id {owner[i]}")
    return np.where(stray, -1, row)


def _of_known_class(
    where: str, categories: list[Category], used: NDArray[np.int64], box_id: NDArray[np.int64], problems: Problems
) -> NDArray[np.bool_]:
    """[K], whether the class of an annotation is one that the file defines."""
    known = np.isin(used, np.array([category.id for category in categories], np.int64))
    for i in np.flatnonzero(~known).tolist():
        problems.add("unknown-class", f"{where}, annotation {box_id[i]}: category_id {used[i]}")
    return known


def _categories(path: Path, categories: list[Category], where: str, problems: Problems) -> list[Category]:
    """Those of a file, each once. Raises DataError when two have one id."""
    first: dict[int, Category] = {}
    for category in categories:
        same = first.setdefault(category.id, category)
        if same is category:
            continue
        if same.name != category.name:
            raise DataError(
                f"The category id {category.id} appears more than once.",
                place=path,
                cause=f"it is {same.name!r} and {category.name!r}: two data sets were merged without new ids",
                fix="give every category its own id, also in the annotations",
            )
        problems.add("copied-class", f"{where}, category id {category.id}: {category.name}")
    return list(first.values())
