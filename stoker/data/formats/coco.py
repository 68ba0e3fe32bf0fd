"""COCO JSON: reads the files of a data set.

Each file is memory-mapped and decoded once (`coco_entries.py`). Polygons are skipped without creating objects, and the
annotations become numpy arrays directly. A file of COCO's size (118,287 images, 860,001 boxes, 401 MB) takes about a
seventh of pycocotools' time and a third of its memory: `benchmarks/index.py`. Wrong entries are reported as problems;
the others are read. Finding the files: `coco_files.py`; classes: `categories.py`.
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

from stoker.data.formats.categories import Category, merge_categories
from stoker.data.formats.coco_entries import Annotation, ImageEntry, read_entries
from stoker.data.formats.coco_files import locate_images
from stoker.data.formats.tables import AnnotationTable, DatasetLayout, FolderTable, SplitFiles
from stoker.data.validation.problems import ProblemCollector
from stoker.errors import DataError

MAX_NAME_BYTES = 255
"""Longest file name, in bytes, that file systems allow."""


@dataclass(kw_only=True)
class _SplitTable:
    """One file as arrays; boxes [K, 4] xyxy, sorted by image."""

    categories: list[Category]
    file_names: list[str]
    original_size: NDArray[np.int32]
    image_id: NDArray[np.int64]
    image_index: NDArray[np.int64]
    boxes: NDArray[np.float64]
    category_id: NDArray[np.int64]
    crowd: NDArray[np.bool_]
    area: NDArray[np.float64]
    box_id: NDArray[np.int64]
    num_bad_boxes: NDArray[np.int64]
    """[R], annotations of each image that cannot be used."""
    notes: list[str]


def read(layout: DatasetLayout, problems: ProblemCollector) -> AnnotationTable:
    """Reads all files of a COCO data set. Raises DataError with file and location."""
    parts: list[SplitFiles] = []
    splits: list[_SplitTable] = []
    for part in layout.parts:
        location = os.path.relpath(part.annotations, layout.root)
        allow_empty = part.split == "test" and len(layout.parts) > 1
        split = _read_file(part.annotations, location, problems, allow_empty=allow_empty)
        if split is not None:
            parts.append(part)
            splits.append(split)
    files = [part.annotations for part in parts]
    class_map = merge_categories(
        files, [split.categories for split in splits], [np.unique(split.category_id) for split in splits]
    )
    folders = FolderTable(layout.root)
    notes = [*layout.notes, *class_map.notes]
    folder_index, file_names, offsets = [], [], [0]
    for part, split in zip(parts, splits, strict=True):
        notes += split.notes
        image_locations = locate_images(part, split.file_names, folders)
        folder_index.append(image_locations.folder_index)
        file_names += image_locations.file_names
        notes += image_locations.notes
        offsets.append(offsets[-1] + len(split.file_names))
    return AnnotationTable(
        class_names=class_map.class_names,
        category_ids=class_map.category_ids,
        folders=folders.paths(),
        folder_index=np.concatenate(folder_index),
        file_names=file_names,
        split=np.repeat(
            np.array([part.split_index for part in parts], np.int8),
            np.diff(offsets),
        ),
        original_size=np.concatenate([split.original_size for split in splits]),
        image_id=np.concatenate([split.image_id for split in splits]),
        image_index=np.concatenate(
            [split.image_index + offset for split, offset in zip(splits, offsets, strict=False)]
        ),
        boxes=np.concatenate([split.boxes for split in splits]),
        labels=np.concatenate(
            [to_labels(split.category_id) for split, to_labels in zip(splits, class_map.to_labels, strict=True)]
        ),
        crowd=np.concatenate([split.crowd for split in splits]),
        area=np.concatenate([split.area for split in splits]),
        box_id=np.concatenate([split.box_id for split in splits]),
        box_id_kind="annotation",
        num_bad_boxes=np.concatenate([split.num_bad_boxes for split in splits]),
        notes=notes,
    )


def _read_file(path: Path, location: str, problems: ProblemCollector, *, allow_empty: bool) -> _SplitTable | None:
    """None for an allowed file without images. location: the file's name in messages."""
    entries, notes = read_entries(path, location, problems)
    if not entries.images and allow_empty:
        problems.add("split-without-boxes", f"{location}: no images")
        return None
    if not entries.images:
        raise DataError("The annotation file lists no images.", location=path, fix="export the split again")
    images = _drop_ambiguous(path, _drop_unusable_names(entries.images, location, problems), location, problems)
    image_id = np.fromiter([image.id for image in images], np.int64, len(images))
    categories = _unique_categories(path, entries.categories, location, problems)
    if entries.annotations and not categories:
        raise DataError(
            "The annotation file defines no classes.",
            location=path,
            cause=f'"categories" is empty or absent, and there are {len(entries.annotations):,} annotations',
            fix="export the file again, with its categories",
        )
    annotations = _drop_without_box(location, entries.annotations, problems)

    def column(name: str, dtype: type[np.generic]) -> NDArray[Any]:
        return np.fromiter(map(attrgetter(name), annotations), dtype, len(annotations))

    box_id = _annotation_ids(annotations)
    image_index = _match_images(location, column("image_id", np.int64), image_id, box_id, problems)
    category_id = column("category_id", np.int64)
    is_known = _has_known_class(location, categories, category_id, box_id, problems)
    order = np.argsort(image_index, kind="stable")
    order = order[(image_index >= 0)[order] & is_known[order]]
    bad_image_index = image_index[(image_index >= 0) & ~is_known]
    if len(annotations) < len(entries.annotations):
        without_box = [a.image_id for a in entries.annotations if a.bbox is None or len(a.bbox) != 4]
        more, is_listed = _find_images(np.array(without_box, np.int64), image_id)
        bad_image_index = np.concatenate([bad_image_index, more[is_listed]])
    coordinates = chain.from_iterable(map(attrgetter("bbox"), annotations))
    boxes = np.fromiter(coordinates, np.float64, 4 * len(annotations)).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]  # COCO writes x, y, width, height
    return _SplitTable(
        categories=categories,
        file_names=[image.file_name for image in images],
        original_size=_sizes(images, location, problems),
        image_id=image_id,
        image_index=image_index[order],
        boxes=boxes[order],
        category_id=category_id[order],
        crowd=column("iscrowd", np.bool_)[order],
        area=column("area", np.float64)[order],
        box_id=box_id[order],
        num_bad_boxes=np.bincount(bad_image_index, minlength=len(images)),
        notes=notes,
    )


def _drop_unusable_names(images: list[ImageEntry], location: str, problems: ProblemCollector) -> list[ImageEntry]:
    """The images whose `file_name` is a possible file name."""

    def is_valid(name: str) -> bool:
        if not name or "\0" in name or name.endswith(("/", "\\")) or not _is_encodable(name):
            return False
        return len(name) * 4 <= MAX_NAME_BYTES or all(
            len(part.encode()) <= MAX_NAME_BYTES for part in name.replace("\\", "/").split("/")
        )

    invalid = [i for i, image in enumerate(images) if not is_valid(image.file_name)]
    for i in invalid:
        quoted = f"{images[i].file_name[:60]!r}"
        problems.add("malformed-image", f"{location}, image id {images[i].id}: {quoted} is not a file name")
    dropped = set(invalid)
    return [image for i, image in enumerate(images) if i not in dropped] if invalid else images


def _is_encodable(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can contain
        return False
    return True


def _drop_ambiguous(
    path: Path, images: list[ImageEntry], location: str, problems: ProblemCollector
) -> list[ImageEntry]:
    """The images with a unique id and a unique file name.

    The boxes of the others cannot be told apart: data sets were merged without new ids, or without their folders.
    """
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
            problems.add(
                "ambiguous-id", f"{location}, image id {image_id}: {', '.join(shared_names)}", len(shared_names)
            )
    for name, shared_ids in ids_by_name.items():
        if len(shared_ids) > 1 and any(len(names_by_id[image_id]) == 1 for image_id in shared_ids):
            listed = ", ".join(map(str, shared_ids))
            problems.add("listed-twice", f"{location}, {name}: image ids {listed}")
    kept = [p for p in first.values() if len(names_by_id[p.id]) == 1 == len(ids_by_name[p.file_name])]
    if not kept:
        problem = next(p for p in problems.summarize(1) if p.kind in ("ambiguous-id", "listed-twice"))
        raise DataError(
            "No image has a unique id and a unique file name.",
            location=path,
            cause=f"e.g. {problem.examples[0]}: data sets were merged without new ids, or without their folders",
            fix="give every entry a unique id and file name",
        )
    return kept


def _sizes(images: list[ImageEntry], location: str, problems: ProblemCollector) -> NDArray[np.int32]:
    """[R, 2], height and width; 0, to be read from the image, if the file has no valid size."""
    annotated_size = np.array([(image.height or 0, image.width or 0) for image in images], np.float64).reshape(-1, 2)
    is_valid = (annotated_size >= 0) & (annotated_size < 2**31)
    for image_index in np.flatnonzero(~is_valid.all(1)).tolist():
        height, width = annotated_size[image_index]
        problems.add(
            "malformed-size", f"{location}, {images[image_index].file_name}: width {width:g}, height {height:g}"
        )
    return np.where(is_valid.all(1, keepdims=True), annotated_size, 0).astype(np.int32)


def _drop_without_box(location: str, annotations: list[Annotation], problems: ProblemCollector) -> list[Annotation]:
    """The annotations that have a box."""
    if {0 if a.bbox is None else len(a.bbox) for a in annotations} <= {4}:
        return annotations
    invalid = [i for i, annotation in enumerate(annotations) if annotation.bbox is None or len(annotation.bbox) != 4]
    for i in invalid:
        box = annotations[i].bbox
        entry_location = f"{location}, annotation {annotations[i].id}"
        if box:
            problems.add("malformed-box", f"{entry_location}: {len(box)} numbers, not x, y, width and height")
        else:
            problems.add("no-box", entry_location)
    dropped = set(invalid)
    return [annotation for i, annotation in enumerate(annotations) if i not in dropped]


def _annotation_ids(annotations: list[Annotation]) -> NDArray[np.int64]:
    """The annotation ids for messages; positions in the list if the ids are not whole numbers."""
    try:
        return np.fromiter(map(attrgetter("id"), annotations), np.int64, len(annotations))
    except (TypeError, ValueError, OverflowError):
        return np.arange(len(annotations), dtype=np.int64)


def _match_images(
    location: str,
    box_image_id: NDArray[np.int64],
    image_id: NDArray[np.int64],
    box_id: NDArray[np.int64],
    problems: ProblemCollector,
) -> NDArray[np.int64]:
    """The image index of each annotation [K]; -1 for none."""
    image_index, is_listed = _find_images(box_image_id, image_id)
    for i in np.flatnonzero(~is_listed).tolist():
        problems.add("unknown-image", f"{location}, annotation {box_id[i]}: image_id {box_image_id[i]}")
    return np.where(is_listed, image_index, -1)


def _find_images(
    box_image_id: NDArray[np.int64], image_id: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """[K], the image index of each image id, and whether there is such an image."""
    order = np.argsort(image_id)
    image_index = order[np.minimum(np.searchsorted(image_id[order], box_image_id), len(order) - 1)]
    return image_index, image_id[image_index] == box_image_id


def _has_known_class(
    location: str,
    categories: list[Category],
    category_id: NDArray[np.int64],
    box_id: NDArray[np.int64],
    problems: ProblemCollector,
) -> NDArray[np.bool_]:
    """[K], whether the file defines the class of an annotation."""
    is_known = np.isin(category_id, np.array([category.id for category in categories], np.int64))
    for i in np.flatnonzero(~is_known).tolist():
        problems.add("unknown-class", f"{location}, annotation {box_id[i]}: category_id {category_id[i]}")
    return is_known


def _unique_categories(
    path: Path, categories: list[Category], location: str, problems: ProblemCollector
) -> list[Category]:
    """The categories of a file without copies. Raises DataError if two different ones have the same id."""
    first: dict[int, Category] = {}
    for category in categories:
        earlier = first.setdefault(category.id, category)
        if earlier is category:
            continue
        if earlier.name != category.name:
            raise DataError(
                f"The category id {category.id} appears more than once.",
                location=path,
                cause=f"it is {earlier.name!r} and {category.name!r}: two data sets were merged without new ids",
                fix="give every category a unique id, also in the annotations",
            )
        problems.add("copied-class", f"{location}, category id {category.id}: {category.name}")
    return list(first.values())
