"""Corrects image names that annotations write differently from the disk, if only one file fits.

Annotations made on Windows or macOS have `IMG_1.JPG` for a file `img_1.jpg`, write é as one character where the disk
has two (NFC and NFD), `%20` for a space, or end with a space. `repair_names` corrects the table of any format;
`count_matching_files` is for readers that search for the image folder. If all names are correct, the cost is one
listing per folder. Not here: images with an entirely different name (`index.require_images`).
"""

import os
import unicodedata
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from stoker.data.formats.tables import AnnotationTable, group_by_folder
from stoker.data.validation.problems import ProblemCollector


def repair_names(table: AnnotationTable, root: Path, problems: ProblemCollector) -> None:
    """Changes image names in place to the names of their files; each change is reported as a fixed problem."""
    is_file = np.ones(len(table.file_names), np.bool_) if table.byte_range is None else table.byte_range[:, 1] == 0
    for folder_index, indices in group_by_folder(table.folder_index, np.flatnonzero(is_file)):
        image_indices, folder_name = indices.tolist(), table.folders[folder_index]
        folder = find_existing_dir(root / folder_name)
        if folder is None:
            continue
        if folder != root / folder_name:
            table.folders[folder_index] = os.path.relpath(folder, root) if folder.is_relative_to(root) else str(folder)
            problems.add("wrong-case-name", f"{folder_name}/: the folder is {folder.name}/", len(image_indices))
        repaired = resolve_names(folder, [table.file_names[image_index] for image_index in image_indices])
        for image_index in image_indices if repaired else ():
            written_name = table.file_names[image_index]
            if written_name in repaired:
                table.file_names[image_index] = repaired[written_name]
                problems.add(
                    "wrong-case-name",
                    f"{os.path.join(folder_name, written_name)!r}: the file is {repaired[written_name]!r}",
                )


def find_missing(table: AnnotationTable, root: Path) -> NDArray[np.bool_]:
    """[R], whether an image has no file, after `repair_names`. Images inside other files are never missing."""
    is_missing = np.zeros(len(table.file_names), np.bool_)
    is_file = np.ones(len(is_missing), np.bool_) if table.byte_range is None else table.byte_range[:, 1] == 0
    for folder_index, indices in group_by_folder(table.folder_index, np.flatnonzero(is_file)):
        folder = root / table.folders[folder_index]
        present = set(os.listdir(folder)) if folder.is_dir() else set()
        for image_index in indices.tolist():
            name = table.file_names[image_index]
            # macOS opens a name in another case or Unicode form, which a listing does not have
            is_missing[image_index] = name not in present and not (folder / name).is_file()
    return is_missing


def resolve_names(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Name → file name, for those `names` that are not a file in `folder` but fit exactly one.

    A file that has one of the names itself is not a candidate. Raises OSError if the folder cannot be listed.
    """
    if not folder.is_dir():
        return {}
    with os.scandir(folder) as entries:
        present = {entry.name for entry in entries}
    requested = set(names)
    absent = requested - present
    unclaimed = present - requested
    matches: dict[str, str] = {}
    for key in (_fold_name, _unquote_name):
        if not absent or not unclaimed:
            break
        files_by_key, absent_by_key = _group_by_key(unclaimed, key), _group_by_key(absent, key)
        matched = {
            absent_by_key[k][0]: files_by_key[k][0]
            for k in absent_by_key.keys() & files_by_key.keys()
            if len(absent_by_key[k]) == len(files_by_key[k]) == 1
        }
        # macOS opens a name in any case and Unicode form, so such a name needs no change.
        matches |= {name: file for name, file in matched.items() if not (folder / name).is_file()}
        absent, unclaimed = absent - matched.keys(), unclaimed - set(matched.values())
    return matches


def find_existing_dir(folder: Path) -> Path | None:
    """A folder, or the only one that fits if parts of its path are written differently; None if there is none."""
    if folder.is_dir():
        return folder
    if folder == folder.parent:
        return None
    parent = find_existing_dir(folder.parent)
    if parent is None:
        return None
    name = resolve_names(parent, [folder.name]).get(folder.name, folder.name)
    return parent / name if (parent / name).is_dir() else None


def count_matching_files(folder: Path, names: Iterable[str]) -> int:
    """How many of the names (with "/" between folders) fit a file below `folder`, in any writing."""
    names_by_dir: dict[str, list[str]] = {}
    for name in names:
        head, _, tail = name.rpartition("/")
        names_by_dir.setdefault(head, []).append(tail)
    existing_dirs = {head: find_existing_dir(folder / head) for head in names_by_dir}
    return sum(
        len(resolve_names(directory, names_by_dir[head]))
        + sum((directory / tail).is_file() for tail in names_by_dir[head])
        for head, directory in existing_dirs.items()
        if directory is not None
    )


def _group_by_key(names: Iterable[str], key: Callable[[str], str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(key(name), []).append(name)
    return groups


def _fold_name(name: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold()).strip()


def _unquote_name(name: str) -> str:
    return _fold_name(unquote(name))
