"""The image files of a data set: their sizes, their names on the disk, and where they are.

`read_sizes` reads headers, for formats that need sizes and do not give them. `repair_names` corrects names that
annotations write differently from the disk (`IMG_1.JPG` for `img_1.jpg`, é as one or two characters, `%20`), if only
one file fits; if all names are correct, the cost is one listing per folder. `ImageLocator` finds images by their path,
else by their name alone, near the annotations: paths are often those of another machine (`C:/Users/me/1.jpg`).
`report_outside` counts images that lie outside the data set's folder ("Files outside the folder" in docs/data.md). Not
here: COCO, which locates images per file, and Pascal VOC, which goes by the stem.
"""

import os
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from stoker.data.formats.folders import SPLIT_BY_NAME, is_image_name
from stoker.data.formats.tables import SPLITS, UNASSIGNED, AnnotationTable, DatasetLayout, SplitFiles, group_by_folder
from stoker.data.images import source
from stoker.data.images.headers import read_header
from stoker.data.validation.problems import ProblemCollector
from stoker.errors import DataError

IO_WORKERS = 16
"""Threads that wait for the disk: on a network file system, sixteen small reads at a time."""
CHUNK_SIZE = 64
"""Files per task: with fewer, scheduling the tasks takes longer than reading the files."""
REMOTE_IO_WORKERS = 64
"""Threads for images in a bucket: a request takes 10 … 100 ms and almost no CPU."""
NOTICE_MIN_IMAGES = 2000
"""From this number of images in a bucket on, a status line tells that sizes are being read."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_threads(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    workers: int = IO_WORKERS,
    chunk_size: int = CHUNK_SIZE,
) -> list[Result]:
    """The results of a function that waits for files, in the order of the items."""

    def run_chunk(start: int) -> list[Result]:
        return [function(item) for item in items[start : start + chunk_size]]

    with ThreadPoolExecutor(workers, "stoker-files") as pool:
        return [result for results in pool.map(run_chunk, range(0, len(items), chunk_size)) for result in results]


def read_sizes(paths: Sequence[Path]) -> tuple[NDArray[np.int32], dict[int, str]]:
    """int32 [R, 2], height and width of the upright images, 0 where unreadable; and the reasons, by position."""
    sizes = np.zeros((len(paths), 2), np.int32)
    unreadable = {}
    if paths and (uri := source.path_to_uri(paths[0])) is not None:
        if len(paths) >= NOTICE_MIN_IMAGES:
            source.print_status(f"Reading the sizes of {len(paths):,} images from their first bytes, starting at {uri}")
        results = map_in_threads(_read_size, paths, workers=REMOTE_IO_WORKERS, chunk_size=1)
    else:
        results = map_in_threads(_read_size, paths)
    for position, result in enumerate(results):
        if isinstance(result, str):
            unreadable[position] = result
        else:
            sizes[position] = result
    return sizes, unreadable


def _read_size(path: Path) -> tuple[int, int] | str:
    try:
        return read_header(path).size
    except DataError as error:
        return error.cause or error.what


def repair_names(table: AnnotationTable, root: Path, problems: ProblemCollector) -> None:
    """Changes image names in place to the names of their files; each change is reported as a fixed problem."""
    for folder_index, indices in group_by_folder(table.folder_index, table.images_that_are_files()):
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


def find_missing(
    root: Path,
    folders: Sequence[str],
    folder_index: NDArray[np.int32],
    file_names: Sequence[str],
    indices: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """[R], which of the images `indices` have no file, after `repair_names`. Lists each folder once instead of a stat
    per file: COCO's 118,287 images take a fraction of a second, also on a network file system."""
    is_missing = np.zeros(len(file_names), np.bool_)
    for number, in_folder in group_by_folder(folder_index, indices):
        folder = root / folders[number]
        present = list_files(folder)
        for image_index in in_folder.tolist():
            name = file_names[image_index]
            # macOS opens a name in another case or Unicode form, which a listing does not have
            is_missing[image_index] = name not in present and not (folder / name).is_file()
    return is_missing


def list_files(folder: Path) -> set[str]:
    """The names of the files in a folder; empty if there is none."""
    if not folder.is_dir():
        return set()
    with os.scandir(folder) as entries:
        return {entry.name for entry in entries if entry.is_file()}


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


def _group_by_key(names: Iterable[str], key: Callable[[str], str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(key(name), []).append(name)
    return groups


def _fold_name(name: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold()).strip()


def _unquote_name(name: str) -> str:
    return _fold_name(unquote(name))


MAX_NAME_BYTES = 255
"""Longest file name, in bytes, that file systems allow."""


def is_usable_name(path: str) -> bool:
    """Whether a path, with "/" or "\\", can be that of a file: its last part is not empty, and none is too long."""
    try:
        parts = path.replace("\\", "/").encode().split(b"/")
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can contain
        return False
    return bool(parts[-1]) and "\0" not in path and max(map(len, parts)) <= MAX_NAME_BYTES


class ImageLocator:
    """Finds the images that annotations name. Lists each folder once."""

    def __init__(self, root: Path, part: SplitFiles) -> None:
        self._root = root
        own_dir = part.annotations if part.annotations.is_dir() else part.annotations.parent
        self._base_dirs = tuple(dict.fromkeys((own_dir, root, *part.image_dirs)))
        self._listings: dict[Path, set[str]] = {}
        self._located: dict[tuple[str, Path | None], tuple[Path, str]] = {}
        self._num_dirs_ignored = self._num_ambiguous = 0
        self._default_dir = part.image_dirs[0]
        self._dir_by_name: dict[str, Path] = {}
        self._name_by_key: dict[str, str] = {}
        """Name without its suffix, case-folded name with and without it → name."""
        self._corrected: dict[str, str] = {}
        self._duplicates: set[str] = set()
        for folder in part.image_dirs:
            for name in sorted(self._list_dir(folder)):
                if self._dir_by_name.setdefault(name, folder) != folder and part.split is None:
                    self._duplicates.add(name)
        names = [name for name in self._dir_by_name if is_image_name(name)]
        stems = [os.path.splitext(name)[0] for name in names]
        for keys in (stems, map(str.casefold, names), map(str.casefold, stems)):
            for key, name in zip(keys, names, strict=True):
                self._name_by_key.setdefault(key, name)

    def _list_dir(self, folder: Path) -> set[str]:
        if folder not in self._listings:
            self._listings[folder] = set(os.listdir(folder)) if folder.is_dir() else set()
        return self._listings[folder]

    def locate(self, text: str, folder: Path | None = None) -> tuple[Path, str]:
        """Folder and name of the image that annotations name; the most likely folder if it is absent.

        folder: that of the annotation file, if it is not the same for all: paths relative to it are tried first.
        """
        if (text, folder) not in self._located:
            self._located[text, folder] = self._search(text.replace("\\", "/"), folder)
        return self._located[text, folder]

    def exists(self, folder: Path, name: str) -> bool:
        """Whether an image that was located is there."""
        return name in self._list_dir(folder)

    def find(self, *texts: str, folder: Path | None = None) -> tuple[Path, str] | None:
        """Folder and name of the first that is there of several texts that may mean an image; None if none is."""
        located = (self.locate(text, folder) for text in texts if text)
        return next((found for found in located if self.exists(*found)), None)

    def _search(self, text: str, own_dir: Path | None) -> tuple[Path, str]:
        head, _, name = text.rpartition("/")
        is_local = bool(head) and "://" not in text
        base_dirs = self._base_dirs if own_dir is None else (own_dir, *self._base_dirs)
        for base in base_dirs if is_local else base_dirs[:1] if own_dir is not None else ():
            folder = Path(os.path.normpath(base / head)) if is_local else base
            if name in self._list_dir(folder):
                return folder, name
        corrected = self._name_by_key.get(name) or self._name_by_key.get(name.casefold())
        if name not in self._dir_by_name and corrected is not None:
            self._corrected.setdefault(name, corrected)
            name = corrected
        if name in self._dir_by_name:
            self._num_dirs_ignored += bool(head)
            self._num_ambiguous += name in self._duplicates
            return self._dir_by_name[name], name
        return Path(os.path.normpath(base_dirs[0] / head)) if is_local else own_dir or self._default_dir, name

    def split_from_folder(self, folder: Path) -> str | None:
        """The split in the path of a folder below the root."""
        inside = folder.relative_to(self._root).parts if folder.is_relative_to(self._root) else ()
        return next((split for part in inside if (split := SPLIT_BY_NAME.get(part.lower()))), None)

    def split_index(self, split: str | None, folder: Path) -> int:
        """Index into SPLITS: of the split if there is one, else of the one in the path of the image's folder, or
        UNASSIGNED."""
        name = split or self.split_from_folder(folder)
        return UNASSIGNED if name is None else SPLITS.index(name)

    def notes(self) -> list[str]:
        notes = []
        if self._num_dirs_ignored:
            count = self._num_dirs_ignored
            notes.append(f"the folders in {count:,} image names are ignored, because they do not exist")
        if self._corrected:
            written_name, name = next(iter(self._corrected.items()))
            count = len(self._corrected)
            notes.append(f"{count:,} images have other names than in the annotations, e.g. {name} for {written_name}")
        if self._num_ambiguous:
            notes.append(f"{self._num_ambiguous:,} image names exist in several folders: the first is used")
        return notes


OUTSIDE = "outside-path"


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
    outside: list[str] = []
    for folder_index, image_indices in group_by_folder(table.folder_index, table.images_that_are_files()):
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
        problems.add(OUTSIDE, location)


def _is_below(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(os.path.join(folder, "")) for folder in folders)
