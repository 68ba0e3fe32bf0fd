"""Finds the image of each XML file of a Pascal VOC data set.

It is the image with the XML file's own stem. <filename> is often wrong, so it is used only if there is no such image.
An XML file in a subfolder has its image in the image subfolder of the same name, if there is one. Not here: reading the
XML files (`voc.py`), finding them (`voc_files.py`).
"""

import os
from collections.abc import Iterable
from pathlib import Path

from stoker.data.formats.tables import SplitFiles, is_image_name, iter_dirs_below

MAX_PROBES = 16
"""XML files whose images are searched for, to check the usual image folders."""


class ImageLocator:
    """The images of a part. Lists each folder once."""

    def __init__(self, part: SplitFiles, root: Path, files: list[Path]) -> None:
        """files: the part's XML files. If the usual folders have none of their images, the folders below `root` are
        searched, and a note tells it."""
        self.notes: list[str] = []
        self._annotation_dir, self._image_dirs = part.annotations, part.image_dirs
        self._listing_by_subdir: dict[Path, _ImageListing] = {}
        probes = files[:MAX_PROBES]
        if probes and not any(self._listing_for(file).has_stem(file.stem) for file in probes):
            other_dirs = tuple(
                directory
                for directory in iter_dirs_below(root)
                if any(map(_ImageListing([directory]).has_stem, (file.stem for file in probes)))
            )
            if other_dirs:
                listed = ", ".join(str(directory.relative_to(root)) for directory in other_dirs[:3])
                self.notes.append(f"the images of {os.path.relpath(part.annotations, root)}/ are in {listed}")
                self._image_dirs, self._listing_by_subdir = (*other_dirs, *part.image_dirs), {}

    def locate(self, file: Path, filename: str) -> tuple[Path, str]:
        """Folder and name of an XML file's image; a likely name if there is none. filename: its <filename>."""
        listing = self._listing_for(file)
        annotated_name = filename.replace("\\", "/").rpartition("/")[2]
        name = listing.choose_name(file.stem, annotated_name) or (
            listing.choose_name(os.path.splitext(annotated_name)[0], annotated_name) if annotated_name else None
        )
        if name is None:
            name = annotated_name if is_image_name(annotated_name) else f"{file.stem}.jpg"
        return listing.find_folder(name), name

    def _listing_for(self, file: Path) -> "_ImageListing":
        subdir = file.parent.relative_to(self._annotation_dir)
        if subdir not in self._listing_by_subdir:
            subdirs = [folder / subdir for folder in self._image_dirs if (folder / subdir).is_dir()]
            self._listing_by_subdir[subdir] = _ImageListing(subdirs or self._image_dirs)
        return self._listing_by_subdir[subdir]


class _ImageListing:
    """The images of some folders by name and stem."""

    def __init__(self, folders: Iterable[Path]) -> None:
        folders = list(folders)
        self._default_dir = folders[0]
        self._dir_by_name: dict[str, Path] = {}
        self._names_by_stem: dict[str, list[str]] = {}
        for folder in folders:
            with os.scandir(folder) as entries:
                for name in sorted(entry.name for entry in entries if is_image_name(entry.name)):
                    if name not in self._dir_by_name:
                        self._dir_by_name[name] = folder
                        self._names_by_stem.setdefault(os.path.splitext(name)[0].casefold(), []).append(name)

    def has_stem(self, stem: str) -> bool:
        return stem.casefold() in self._names_by_stem

    def find_folder(self, name: str) -> Path:
        """The folder of an image; the most likely one if there is no image of that name."""
        return self._dir_by_name.get(name, self._default_dir)

    def choose_name(self, stem: str, annotated_name: str) -> str | None:
        """The image with a stem. Of several, the one in the same case and with the name in <filename>."""
        candidates = self._names_by_stem.get(stem.casefold(), [])
        best = sorted(candidates, key=lambda name: (os.path.splitext(name)[0] != stem, name != annotated_name, name))
        return best[0] if best else None
