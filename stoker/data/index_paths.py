"""Which images of a data set lie outside its folder. `docs/data.md`, "Files outside the folder", states the rule.

Annotations may name any file of the machine: by an absolute path, by `..`, by a link in place of an image. Such images
are counted here; `open_index` refuses them unless they are allowed. Not here: files that are not regular ones
(`stoker/regular_files.py`).
"""

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from stoker.data.formats.tables import AnnotationTable, DatasetLayout, group_by_folder
from stoker.data.validation.problems import ProblemCollector

KIND = "outside-path"


def report_outside(
    table: AnnotationTable, layout: DatasetLayout, data: Path, problems: ProblemCollector, *, allowed: bool
) -> None:
    """Adds a problem for each image outside the data set, or one note where that is allowed; notes on folder links.

    data: what the user named. A folder: everything in it belongs to the data set, also below a link to a folder. A
    file: the folder that its format gives it, and the folders that a YOLO description or its lists name.
    """
    own_dirs = [os.path.realpath(data if data.is_dir() else layout.root)]
    if not data.is_dir():
        own_dirs += [os.path.abspath(folder) for part in layout.parts for folder in part.image_dirs]
    real_dirs = [os.path.realpath(folder) for folder in own_dirs]
    is_file = np.ones(len(table.file_names), np.bool_) if table.byte_range is None else table.byte_range[:, 1] == 0
    outside: list[str] = []
    for folder_index, image_indices in group_by_folder(table.folder_index, np.flatnonzero(is_file)):
        folder = os.path.normpath(os.path.join(layout.root, table.folders[folder_index]))
        if not os.path.isdir(folder):
            continue  # its images are missing, wherever it is
        names = [table.file_names[image_index] for image_index in image_indices.tolist()]
        if not _is_below(folder, own_dirs):
            outside += [os.path.join(folder, name) for name in names]
            continue
        real_folder = os.path.realpath(folder)
        if not _is_below(real_folder, real_dirs):
            table.notes.append(f"{os.path.relpath(folder, own_dirs[0])}/ is a link to {real_folder}")
        with os.scandir(folder) as entries:
            links = {entry.name for entry in entries if entry.is_symlink()}
        for name in names if links else ():
            target = os.path.realpath(os.path.join(folder, name)) if name in links else real_folder
            if not _is_below(target, (real_folder, *real_dirs)):
                outside.append(f"{os.path.join(folder, name)}, a link to {target}")
    if outside and allowed:
        table.notes.append(f"{len(outside):,} images are outside the folder, as --allow-outside allows: {outside[0]}")
    for location in () if allowed else outside:
        problems.add(KIND, location)


def _is_below(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(os.path.join(folder, "")) for folder in folders)
