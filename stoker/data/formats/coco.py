"""COCO JSON: finds its usual layouts and reads them into columns.

The file is memory-mapped and decoded once; polygons are skipped without becoming objects, and the decoded annotations
become numpy columns at once. COCO's own size (118,287 pictures, 860,001 boxes, 401 MB) takes about a seventh of
pycocotools' time and a third of its memory: `benchmarks/index.py`. Format: https://cocodataset.org/#format-data.
"""

import json
import mmap
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from math import nan
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from stoker.data.formats.categories import Category, common_map
from stoker.data.formats.coco_files import locate_pictures
from stoker.data.formats.columns import SPLITS, UNDECIDED, Columns, Folders, Found
from stoker.data.problems import Problems
from stoker.errors import DataError

Id = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class _Picture(msgspec.Struct, gc=False):
    id: Id
    file_name: str
    height: float | None = None
    width: float | None = None


class _Annotation(msgspec.Struct, gc=False):
    image_id: Id
    category_id: Id
    bbox: tuple[float, ...] | None = None
    area: float | None = nan
    iscrowd: float | bool | None = False
    id: Any = None


class _File(msgspec.Struct):
    images: list[_Picture]
    categories: list[Category]
    annotations: list[_Annotation] = []


class _RawFile(msgspec.Struct):
    """Only to find the entry that does not fit: msgspec's message says its field but not its number."""

    images: list[msgspec.Raw]
    categories: list[msgspec.Raw]
    annotations: list[msgspec.Raw] = []


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
    splits = [_read_file(part.annotations, problems) for part in found.parts]
    files = [part.annotations for part in found.parts]
    categories = common_map(
        files, [split.categories for split in splits], [np.unique(split.category_id) for split in splits]
    )
    folders = Folders(found.root)
    notes = [*found.notes, *categories.notes]
    folder, names, starts = [], [], [0]
    for part, split in zip(found.parts, splits, strict=True):
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
            np.array([UNDECIDED if part.split is None else SPLITS.index(part.split) for part in found.parts], np.int8),
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


def _read_file(path: Path, problems: Problems) -> _Split:
    content = _decode(path)
    if not content.images:
        raise DataError("The annotation file lists no pictures.", place=path, fix="export the split again")
    count = len(content.images)
    image_id = np.fromiter([picture.id for picture in content.images], np.int64, count)
    _refuse_twice(path, "picture id", image_id.tolist())
    names = [picture.file_name for picture in content.images]
    _refuse_twice(path, "file name", names)
    size = np.array([(picture.height or 0, picture.width or 0) for picture in content.images], np.float64)
    size = np.clip(np.nan_to_num(size), 0, 2**31 - 1)

    annotations = _with_box(path, content.annotations, problems)

    def column(name: str, kind: type[np.generic]) -> NDArray[Any]:
        return np.fromiter(map(attrgetter(name), annotations), kind, len(annotations))

    box_id = _annotation_ids(annotations)
    row = _rows_of(path, column("image_id", np.int64), image_id, box_id)
    order = np.argsort(row, kind="stable")
    numbers = chain.from_iterable(map(attrgetter("bbox"), annotations))
    boxes = np.fromiter(numbers, np.float64, 4 * len(annotations)).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]  # COCO writes x, y, width, height
    category_id = column("category_id", np.int64)
    _check_categories(path, content.categories, category_id, box_id)
    return _Split(
        categories=content.categories,
        names=names,
        size=size.astype(np.int32),
        image_id=image_id,
        row=row[order],
        boxes=boxes[order],
        category_id=category_id[order],
        crowd=column("iscrowd", np.bool_)[order],
        area=column("area", np.float64)[order],
        box_id=box_id[order],
    )


def _with_box(path: Path, annotations: list[_Annotation], problems: Problems) -> list[_Annotation]:
    """The annotations that have a box."""
    if {0 if a.bbox is None else len(a.bbox) for a in annotations} <= {4}:
        return annotations
    odd = [i for i, annotation in enumerate(annotations) if annotation.bbox is None or len(annotation.bbox) != 4]
    for i in odd:
        box = annotations[i].bbox
        if box:
            raise DataError(
                f"A box has {len(box)} numbers, not 4.",
                place=f"{path}: annotation {annotations[i].id}, number {i} of the list",
                cause="COCO's bbox is [x, y, width, height]",
                fix="correct or remove the annotation",
            )
        problems.add("no-box", f"{path.name}, annotation number {i}")
    without = set(odd)
    return [annotation for i, annotation in enumerate(annotations) if i not in without]


def _annotation_ids(annotations: list[_Annotation]) -> NDArray[np.int64]:
    """The ids by which messages name annotations; positions in the list where they are not whole numbers."""
    try:
        return np.fromiter(map(attrgetter("id"), annotations), np.int64, len(annotations))
    except (TypeError, ValueError, OverflowError):
        return np.arange(len(annotations), dtype=np.int64)


def _rows_of(
    path: Path, owner: NDArray[np.int64], image_id: NDArray[np.int64], box_id: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The row of the picture that each annotation [K] belongs to."""
    order = np.argsort(image_id)
    row = order[np.minimum(np.searchsorted(image_id[order], owner), len(order) - 1)]
    stray = np.flatnonzero(image_id[row] != owner)
    if stray.size:
        raise DataError(
            f"{stray.size} annotations belong to pictures that the file does not list.",
            place=f"{path}: annotation {box_id[stray[0]]} names image_id {owner[stray[0]]}",
            cause='no entry of "images" has that id',
            fix="add the picture to the file or remove its annotations",
        )
    return row


def _check_categories(
    path: Path, categories: list[Category], used: NDArray[np.int64], box_id: NDArray[np.int64]
) -> None:
    _refuse_twice(path, "category id", [category.id for category in categories])
    known = np.array([category.id for category in categories], np.int64)
    stray = np.flatnonzero(~np.isin(used, known))
    if stray.size:
        raise DataError(
            f"{stray.size} annotations have a category that the file does not define.",
            place=f"{path}: annotation {box_id[stray[0]]} has category_id {used[stray[0]]}",
            choices=[f"{category.id} ({category.name})" for category in categories[:100]],
            fix='add the category to "categories" or correct the annotations',
        )


def _refuse_twice(path: Path, what: str, values: list[Any]) -> None:
    if len(set(values)) == len(values):
        return
    twice = Counter(values).most_common(1)[0][0]
    raise DataError(
        f"The {what} {twice!r} appears more than once.",
        place=path,
        cause="two data sets were merged without new ids, or an entry was copied",
        fix="give every entry its own, or remove the copy",
    )


def _decode(path: Path) -> _File:
    if path.stat().st_size == 0:
        raise DataError("The annotation file is empty.", place=path, fix="export or copy it again")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        view = memoryview(content)
        with view[3:] if content[:3] == b"\xef\xbb\xbf" else view[:] as text, view:
            try:
                return msgspec.json.decode(text, type=_File)
            except msgspec.ValidationError as error:
                raise _misfit(path, bytes(text), error) from error
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                if content.find(b"NaN") < 0 and content.find(b"Infinity") < 0:
                    raise _malformed(path, content, error) from error
                return _decode_with_nan(path, bytes(text))


def _decode_with_nan(path: Path, text: bytes) -> _File:
    """NaN and Infinity are not JSON, but Python writes them: their boxes are to be dropped and named, not the file."""
    try:
        return msgspec.convert(json.loads(text), type=_File)
    except msgspec.ValidationError as error:
        raise DataError("The annotations are not COCO JSON.", place=path, cause=str(error)) from error
    except ValueError as error:
        raise _malformed(path, text, error) from error


def _malformed(path: Path, content: bytes | mmap.mmap, error: Exception) -> DataError:
    text = str(error)
    digits = text.rpartition("byte ")[2].rstrip(")")
    at = int(digits) if digits.isdigit() else len(content)
    line = content[:at].count(b"\n") + 1
    return DataError(
        "The annotation file is not valid JSON.",
        place=f"{path}:{line}",
        cause=f"{text} in a file of {len(content)} bytes",
        fix="export or copy it again; a truncated file ends in the middle of an entry",
    )


Entry = TypeVar("Entry", bound=msgspec.Struct)


def _misfit(path: Path, text: bytes, error: msgspec.ValidationError) -> DataError:
    """Names the first entry that is not as COCO has it."""
    place, cause = str(path), str(error)
    try:
        raw = msgspec.json.decode(text, type=_RawFile)
    except msgspec.ValidationError:  # the file as a whole has another shape: msgspec's own message says which
        raw = _RawFile([], [])
    lists: Iterable[tuple[str, list[msgspec.Raw], type[msgspec.Struct]]] = (
        ("images", raw.images, _Picture),
        ("categories", raw.categories, Category),
        ("annotations", raw.annotations, _Annotation),
    )
    for name, entries, kind in lists:
        for i, entry in enumerate(entries):
            try:
                msgspec.json.decode(entry, type=kind)
            except msgspec.ValidationError as detail:
                shown = bytes(entry)[:120].decode(errors="replace")
                place, cause = f'{path}: "{name}" number {i}: {shown}', str(detail)
                break
        else:
            continue
        break
    return DataError(
        "The annotations are not COCO JSON for detection.",
        place=place,
        cause=cause,
        fix="https://cocodataset.org/#format-data describes the fields; correct the entry or export the file again",
    )
