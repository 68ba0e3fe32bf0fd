"""From the category lists of a COCO data set's files to one list of classes with labels 0 … C-1.

Ids may be sparse, files may number the same names differently, and exports of Roboflow carry a super-category as
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
    names: list[str]
    """[C], in order of the ids of the first file."""
    ids: list[int]
    labels: Sequence[Callable[[NDArray[np.int64]], NDArray[np.int32]]]
    """Per file: category ids [K] to labels [K]."""
    notes: list[str]


def common_map(files: list[Path], categories: list[list[Category]], used: list[NDArray[np.int64]]) -> ClassMap:
    """The classes of a data set: those of its first file, its training split where there is one.

    used: per file, the category ids that have annotations; each is one of the file's own. Raises DataError when another
    file has annotations of a class that the first one does not define.
    """
    first = sorted(categories[0], key=lambda category: category.id)
    targets = [
        _into_first(file, files[0], first, own, ids) for file, own, ids in zip(files, categories, used, strict=True)
    ]
    in_use = {target[number] for target, ids in zip(targets, used, strict=True) for number in ids.tolist()}
    children: dict[str | None, set[int]] = {}
    for category in first:
        children.setdefault(category.supercategory, set()).add(category.id)
    parents = {c.id for c in first if children.get(c.name, set()) - {c.id}} - in_use
    kept = [category for category in first if category.id not in parents]
    label = {category.id: i for i, category in enumerate(kept)}
    notes = [
        f"category {category.id} ({category.name}) is a super-category without a box: it is no class"
        for category in first
        if category.id in parents
    ]
    if any(own != first_id for target in targets for own, first_id in target.items()):
        notes.append(f"the files number their categories differently: matched by name, ids as in {files[0].name}")
    labels = [
        partial(_look_up, *_table({own: label[first_id] for own, first_id in target.items() if first_id in label}))
        for target in targets
    ]
    return ClassMap([category.name for category in kept], [category.id for category in kept], labels, notes)


def _into_first(
    file: Path, first_file: Path, first: list[Category], own: list[Category], used: NDArray[np.int64]
) -> dict[int, int]:
    """For each category of a file, the id that the first file has for it."""
    name_of = {category.id: category.name for category in first}
    ids_of: dict[str, list[int]] = {}
    for category in first:
        ids_of.setdefault(category.name, []).append(category.id)
    target = {}
    for category in own:
        if name_of.get(category.id) == category.name:
            target[category.id] = category.id
        elif len(ids_of.get(category.name, ())) == 1:
            target[category.id] = ids_of[category.name][0]
        elif category.id in used:
            raise DataError(
                f"The class {category.name!r} (category {category.id}) is not defined in {first_file.name}.",
                place=file,
                cause=f"{first_file} decides which classes there are",
                choices=sorted(ids_of)[:100],
                fix="add the category to that file, or correct its name in this one",
            )
    return target


def _table(label_of: dict[int, int]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    ids = sorted(label_of)
    return np.array(ids, np.int64), np.array([label_of[number] for number in ids], np.int32)


def _look_up(ids: NDArray[np.int64], labels: NDArray[np.int32], values: NDArray[np.int64]) -> NDArray[np.int32]:
    return labels[np.searchsorted(ids, values)] if len(ids) else np.zeros(0, np.int32)
