"""Merges the category lists of a COCO data set's files into one list of classes with labels 0 … C-1.

Ids may be sparse, files may number the same names differently, and Roboflow's exports contain a super-category as
category 0. Not here: reading files (`coco.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from stoker.errors import DataError


class Category(msgspec.Struct, gc=False):
    """An entry of COCO's "categories"."""

    id: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
    name: str
    supercategory: str | None = None


@dataclass(frozen=True)
class ClassMap:
    class_names: list[str]
    """[C], in order of the ids of the first file."""
    category_ids: list[int]
    to_labels: Sequence[Callable[[NDArray[np.int64]], NDArray[np.int32]]]
    """Per file: category ids [K] to labels [K]."""
    notes: list[str]


def merge_categories(
    files: list[Path], categories: list[list[Category]], used_ids: list[NDArray[np.int64]]
) -> ClassMap:
    """The classes of a data set: those of its first file, which is the training split if there is one.

    used_ids: per file, the category ids that have annotations; the file defines each of them. Raises DataError if
    another file has annotations of a class that the first one does not define.
    """
    first = sorted(categories[0], key=lambda category: category.id)
    id_maps = [
        _map_to_first(file, files[0], first, own, ids)
        for file, own, ids in zip(files, categories, used_ids, strict=True)
    ]
    target_ids_in_use = {
        id_map[category_id] for id_map, ids in zip(id_maps, used_ids, strict=True) for category_id in ids.tolist()
    }
    children: dict[str | None, set[int]] = {}
    for category in first:
        children.setdefault(category.supercategory, set()).add(category.id)
    parents = {c.id for c in first if children.get(c.name, set()) - {c.id}} - target_ids_in_use
    kept = [category for category in first if category.id not in parents]
    label_by_id = {category.id: i for i, category in enumerate(kept)}
    notes = [
        f"category {category.id} ({category.name}) is a super-category without a box, so it is not a class"
        for category in first
        if category.id in parents
    ]
    if any(own != first_id for id_map in id_maps for own, first_id in id_map.items()):
        notes.append(f"the files number their categories differently: matched by name, with the ids of {files[0].name}")
    to_labels = [
        partial(
            _lookup_labels,
            *_lookup_table({own: label_by_id[first_id] for own, first_id in id_map.items() if first_id in label_by_id}),
        )
        for id_map in id_maps
    ]
    return ClassMap([category.name for category in kept], [category.id for category in kept], to_labels, notes)


def _map_to_first(
    file: Path, first_file: Path, first: list[Category], own_categories: list[Category], used_ids: NDArray[np.int64]
) -> dict[int, int]:
    """For each category of a file, the id that the first file has for it."""
    name_by_id = {category.id: category.name for category in first}
    ids_by_name: dict[str, list[int]] = {}
    for category in first:
        ids_by_name.setdefault(category.name, []).append(category.id)
    id_map = {}
    for category in own_categories:
        if name_by_id.get(category.id) == category.name:
            id_map[category.id] = category.id
        elif len(ids_by_name.get(category.name, ())) == 1:
            id_map[category.id] = ids_by_name[category.name][0]
        elif category.id in used_ids:
            raise DataError(
                f"The class {category.name!r} (category {category.id}) is not defined in {first_file.name}.",
                location=file,
                cause=f"the classes are those of {first_file}",
                choices=sorted(ids_by_name)[:100],
                fix="add the category to that file, or correct its name in this one",
            )
    return id_map


def _lookup_table(label_by_id: dict[int, int]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    ids = sorted(label_by_id)
    return np.array(ids, np.int64), np.array([label_by_id[category_id] for category_id in ids], np.int32)


def _lookup_labels(ids: NDArray[np.int64], labels: NDArray[np.int32], values: NDArray[np.int64]) -> NDArray[np.int32]:
    return labels[np.searchsorted(ids, values)] if len(ids) else np.zeros(0, np.int32)
