"""Finds the images that annotations name: by their path, else by their name alone, in the folders near the annotations.

Paths are often those of another machine (`C:/Users/me/1.jpg`), or relative to another folder. Used by CSV, CVAT,
LabelMe and Label Studio. Not here: COCO, which decides per file (`coco_files.py`), Pascal VOC, which goes by the stem
(`voc_images.py`).
"""

import os
from collections.abc import Iterator
from pathlib import Path

from stoker.data.formats.tables import (
    SPLIT_BY_NAME,
    SPLITS,
    UNASSIGNED,
    SplitFiles,
    is_image_name,
    iter_split_image_dirs,
    list_image_dirs,
    list_subdirs,
    split_from_name,
)

MAX_NAME_BYTES = 255
"""Longest file name, in bytes, that file systems allow."""


def iter_nearby_dirs(own_dir: Path, root: Path, split: str | None) -> Iterator[Path]:
    """Folders that may contain the images of an annotation file in `own_dir`, those named after its split first."""
    base_dirs = dict.fromkeys((own_dir, root))
    for base in base_dirs:
        yield from iter_split_image_dirs(base, split) if split is not None else ()
    for base in base_dirs:
        yield from list_image_dirs(base)
    for base in base_dirs:
        split_dirs = [
            (split_from_name(name), path) for h in list_image_dirs(base) for name, path in list_subdirs(h).items()
        ]
        for split_name, path in split_dirs:
            if split_name is not None:
                yield path
                yield from list_image_dirs(path)


def is_usable_name(path: str) -> bool:
    """Whether the last part of a path, with "/" or "\\", can be the name of a file."""
    name = path.replace("\\", "/").rpartition("/")[2]
    try:
        return bool(name) and "\0" not in path and len(name.encode()) <= MAX_NAME_BYTES
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can contain
        return False


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
        """Case-folded name, with and without its suffix → name."""
        self._corrected: dict[str, str] = {}
        self._duplicates: set[str] = set()
        for folder in part.image_dirs:
            for name in sorted(self._list_dir(folder)):
                if self._dir_by_name.setdefault(name, folder) != folder and part.split is None:
                    self._duplicates.add(name)
                if is_image_name(name):
                    for key in (name.casefold(), os.path.splitext(name)[0].casefold()):
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

    def _search(self, text: str, own_dir: Path | None) -> tuple[Path, str]:
        head, _, name = text.rpartition("/")
        is_local = bool(head) and "://" not in text
        base_dirs = self._base_dirs if own_dir is None else (own_dir, *self._base_dirs)
        for base in base_dirs if is_local else base_dirs[:1] if own_dir is not None else ():
            folder = Path(os.path.normpath(base / head)) if is_local else base
            if name in self._list_dir(folder):
                return folder, name
        if name not in self._dir_by_name and (corrected := self._name_by_key.get(name.casefold())) is not None:
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
