"""Finds the annotation files of formats that do not prescribe names, by the first bytes of the files.

Used by CVAT, LabelMe and Label Studio, whose users put one or more files next to the images, into a folder of their
own, or into one per split. Not here: finding the images (`image_locator.py`).
"""

import os
from collections.abc import Callable
from pathlib import Path

from stoker import regular_files
from stoker.data.formats.image_locator import iter_nearby_dirs
from stoker.data.formats.tables import (
    ANNOTATION_DIRS,
    SPLIT_BY_NAME,
    SplitFiles,
    iter_annotation_files,
    iter_dirs_below,
    list_image_dirs,
    list_subdirs,
    split_from_name,
)

HasFormat = Callable[[bytes], bool]
"""Tells from the first bytes of a file whether it has a format."""
HEAD_BYTES = 1 << 16
MAX_PROBES = 16
"""Files of a folder whose first bytes are read, to see whether the folder has a format at all."""


def read_head(path: Path) -> bytes:
    """The first bytes of a file, without a byte order mark; none if it cannot be read, or is not a regular file."""
    try:
        with regular_files.open_file(path) as file:
            return file.read(HEAD_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    except OSError:
        return b""


def find_files(folder: Path, suffix: str, has_format: HasFormat) -> list[tuple[str | None, Path]]:
    """(split, file) of each file with a suffix and a format, in the folders of `find_annotated_dirs`."""
    dirs = find_annotated_dirs(folder, lambda path: list_files(path, suffix, has_format))
    files = [(split, file) for split, path in dirs for file in list_files(path, suffix, has_format)]
    return [(split or split_from_name(file.stem), file) for split, file in files]


def root_of(file: Path) -> Path:
    """The folder of the data set to which an annotation file belongs."""
    return file.parent.parent if file.parent.name.lower() in ANNOTATION_DIRS else file.parent


def list_files(folder: Path, suffix: str, has_format: HasFormat) -> list[Path]:
    """The files with a suffix and a format, by name; none if the first few of the folder are of another format."""
    paths = _list_by_suffix(folder, suffix)
    if not any(has_format(read_head(path)) for path in [*paths[:MAX_PROBES], folder / f"annotations{suffix}"]):
        return []
    return [path for path in paths if has_format(read_head(path))]


def has_files(folder: Path, suffix: str, has_format: HasFormat) -> bool:
    """Whether one of the first few files with a suffix has a format."""
    return any(has_format(read_head(path)) for path in _list_by_suffix(folder, suffix)[:MAX_PROBES])


def _list_by_suffix(folder: Path, suffix: str) -> list[Path]:
    """The files with a suffix, by name. An image folder, which can be large, is listed without looking at its files."""
    if folder.name.lower() in ANNOTATION_DIRS:
        return [Path(path) for path in iter_annotation_files(folder, (suffix,))]
    names = sorted(name for name in os.listdir(folder) if name.lower().endswith(suffix) and not name.startswith("."))
    return [folder / name for name in names]


def find_annotated_dirs(folder: Path, is_annotated: Callable[[Path], object]) -> list[tuple[str | None, Path]]:
    """(split, folder) of each folder with annotation files: one for all, or one per split.

    is_annotated: whether a folder has any.
    """
    image_dirs = list_image_dirs(folder)
    for directory in (folder, *_list_annotation_dirs(folder), *image_dirs[:-1]):
        if is_annotated(directory):
            return [(None, directory)]
    for parent in image_dirs[::-1]:
        split_dirs = [
            (SPLIT_BY_NAME[name], path) for name, path in list_subdirs(parent).items() if name in SPLIT_BY_NAME
        ]
        found: list[tuple[str | None, Path]] = []
        for split, path in split_dirs:
            candidates = (path, *_list_annotation_dirs(path), *list_image_dirs(path)[:-1])
            found += [(split, own) for own in filter(is_annotated, candidates)][:1]
        if found:
            return found
    return []


def make_part(split: str | None, annotations: Path, root: Path) -> SplitFiles:
    """A file or folder of annotations, with all folders that may contain its images."""
    own_dir = annotations if annotations.is_dir() else annotations.parent
    image_dirs = dict.fromkeys([*iter_nearby_dirs(own_dir, root, split), *iter_dirs_below(root)])
    return SplitFiles(split=split, annotations=annotations, image_dirs=tuple(image_dirs))


def _list_annotation_dirs(folder: Path) -> list[Path]:
    subdirs = list_subdirs(folder)
    return [subdirs[name] for name in ANNOTATION_DIRS if name in subdirs]
