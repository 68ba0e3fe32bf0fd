"""What in the folder of a data set looks like data and is not used: one line with counts for the notes of the index.

Images that no annotation names, folders of images or annotations that no split has, and the same folder in another
format. Not here: problems of what is used (`validation/problems.py`).
"""

import os
from pathlib import Path

from stoker.data.formats.detect import FORMATS
from stoker.data.formats.tables import (
    ANNOTATION_DIRS,
    MAX_SEARCHED_DIRS,
    AnnotationTable,
    DatasetLayout,
    is_image_name,
)
from stoker.data.images import source as image_source
from stoker.data.validation.problems import ProblemCollector
from stoker.errors import DataError

MAX_DEPTH = 3
"""Levels of folders below the root that are searched."""
OUTPUT_DIRS = ("runs", "predictions")
"""Folders that stoker itself writes."""
MAX_LISTED_DIRS = 5


def describe_unused(layout: DatasetLayout, table: AnnotationTable, *, num_unlisted: int) -> list[str]:
    """Notes on what is not used.

    table: before images were dropped. num_unlisted: images that are reported as being in no list of a split.
    """
    notes = [_describe_other(layout, table, other) for other in layout.others]
    names_by_dir: dict[str, set[str]] = {}
    real_dirs = [os.path.realpath(layout.root / folder) for folder in table.folders]
    for folder_index, name in zip(table.folder_index.tolist(), table.file_names, strict=True):
        names_by_dir.setdefault(real_dirs[folder_index], set()).add(name)
    annotation_dirs = {os.path.realpath(part.annotations) for part in layout.parts}
    counts: dict[str, str] = {}
    num_unnamed = 0
    for folder, files in _walk(layout.root):
        is_used = os.path.realpath(folder) in names_by_dir
        images = {name for name in files if is_image_name(name)} - names_by_dir.get(os.path.realpath(folder), set())
        if is_used:
            num_unnamed += len(images)
            continue
        labels = 0
        has_labels = bool(images) or folder.name.lower() in ANNOTATION_DIRS
        if has_labels and folder != layout.root and not _is_below(folder, annotation_dirs):
            labels = sum(name.lower().endswith((".xml", ".txt")) for name in files)
        parts = [_plural(len(images), "image")] * bool(images) + [_plural(labels, "annotation file")] * bool(labels)
        if parts:
            counts[os.path.relpath(folder, layout.root)] = " and ".join(parts)
    texts = [f"{text} in {'the folder' if name == '.' else name + '/'}" for name, text in counts.items()]
    if len(texts) > MAX_LISTED_DIRS:
        texts = [*texts[:MAX_LISTED_DIRS], f"data in {len(texts) - MAX_LISTED_DIRS} other folders"]
    if num_unnamed > num_unlisted:
        texts.append(f"{_plural(num_unnamed - num_unlisted, 'image')} next to others that no annotation names")
    return [*notes, *([f"not used: {'; '.join(texts)}"] if texts else [])]


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("s" if count != 1 else "")


def _describe_other(layout: DatasetLayout, table: AnnotationTable, other: DatasetLayout) -> str:
    counts = ""
    if image_source.path_to_uri(layout.root) is None:  # in a bucket, each image size would be a request
        try:
            num_boxes = len(FORMATS[other.format].read(other, ProblemCollector()).boxes)
            is_more = ", which are more" if num_boxes > len(table.boxes) else ""
            counts = f" ({len(table.boxes):,} boxes against {num_boxes:,} of the other{is_more})"
        except (DataError, OSError) as error:
            counts = f" (the other cannot be read: {error.what if isinstance(error, DataError) else error})"
    both = f"found {layout.description} and {other.description}"
    return f"{both}: read the first{counts}; --format {other.format} reads the other"


def _walk(root: Path) -> list[tuple[Path, list[str]]]:
    """(folder, names of its files) of the root and the visible folders below it."""
    found = []
    for dirpath, folders, files in os.walk(root):
        depth = len(Path(dirpath).relative_to(root).parts)
        folders[:] = sorted(n for n in folders if not n.startswith(".") and not (depth == 0 and n in OUTPUT_DIRS))
        if depth >= MAX_DEPTH:
            folders.clear()
        found.append((Path(dirpath), [name for name in files if not name.startswith(".")]))
        if len(found) >= MAX_SEARCHED_DIRS:
            break
    return found


def _is_below(folder: Path, parents: set[str]) -> bool:
    real = os.path.realpath(folder)
    return any(real == parent or real.startswith(os.path.join(parent, "")) for parent in parents)
