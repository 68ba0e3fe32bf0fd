"""Which image each XML file of a Pascal VOC data set is about.

It is the one that has the XML file's own name; <filename> is believed only where there is none, since it lies often. Of
a file in a folder of its own it is in the folder of that name among the images, where there is one. Not here: the
content of the files (`voc.py`), where they lie (`voc_files.py`).
"""

import os
from collections.abc import Iterable
from pathlib import Path

from stoker.data.formats.tables import IMAGE_SUFFIXES, SplitFiles, iter_dirs_below

MAX_PROBES = 16
"""XML files whose images are looked for, to see whether these are where they are likely to be."""


class ImageLocator:
    """The images of a part, each folder listed once."""

    def __init__(self, part: SplitFiles, root: Path, files: list[Path]) -> None:
        """files: the part's XML files. Where none of the likely folders has an image of theirs, others below `root`
        are looked into, and `notes` say so."""
        self.notes: list[str] = []
        self._annotation_dir, self._image_dirs = part.annotations, part.image_dirs
        self._listing_by_subdir: dict[Path, _ImageListing] = {}
        probes = files[:MAX_PROBES]
        if probes and not any(self._listing_for(file).has_stem(file.stem) for file in probes):
            other_dirs = tuple(
                directory
                for directory in iter_dirs_below(root)
                if any(map(_ImageListing([directory]).has_stem, _list_stems(probes)))
            )
            if other_dirs:
                listed = ", ".join(str(directory.relative_to(root)) for directory in other_dirs[:3])
                self.notes.append(f"the images of {os.path.relpath(part.annotations, root)}/ are in {listed}")
                self._image_dirs, self._listing_by_subdir = (*other_dirs, *part.image_dirs), {}

    def locate(self, file: Path, filename: str) -> tuple[Path, str]:
        """Folder and name of an XML file's image; a likely name where there is none. filename: what it says."""
        listing = self._listing_for(file)
        annotated_name = filename.replace("\\", "/").rpartition("/")[2]
        name = listing.choose_name(file.stem, annotated_name) or (
            listing.choose_name(os.path.splitext(annotated_name)[0], annotated_name) if annotated_name else None
        )
        if name is None:
            name = annotated_name if annotated_name.lower().endswith(IMAGE_SUFFIXES) else f"{file.stem}.jpg"
        return listing.find_folder(name), name

    def _listing_for(self, file: Path) -> "_ImageListing":
        subdir = file.parent.relative_to(self._annotation_dir)
        if subdir not in self._listing_by_subdir:
            subdirs = [folder / subdir for folder in self._image_dirs if (folder / subdir).is_dir()]
            self._listing_by_subdir[subdir] = _ImageListing(subdirs or self._image_dirs)
        return self._listing_by_subdir[subdir]


def _list_stems(files: Iterable[Path]) -> list[str]:
    return [file.stem for file in files]


class _ImageListing:
    """The images of some folders by name and stem."""

    def __init__(self, folders: Iterable[Path]) -> None:
        folders = list(folders)
        self._default_dir = folders[0]
        self._dir_by_name: dict[str, Path] = {}
        self._names_by_stem: dict[str, list[str]] = {}
        for folder in folders:
            with os.scandir(folder) as entries:
                for name in sorted(entry.name for entry in entries if entry.name.lower().endswith(IMAGE_SUFFIXES)):
                    if name not in self._dir_by_name:
                        self._dir_by_name[name] = folder
                        self._names_by_stem.setdefault(os.path.splitext(name)[0].casefold(), []).append(name)

    def has_stem(self, stem: str) -> bool:
        return stem.casefold() in self._names_by_stem

    def find_folder(self, name: str) -> Path:
        """The folder of an image; the likeliest where there is none of that name."""
        return self._dir_by_name.get(name, self._default_dir)

    def choose_name(self, stem: str, annotated_name: str) -> str | None:
        """The image with a stem: in the same case and as <filename> says where there are several."""
        candidates = self._names_by_stem.get(stem.casefold(), [])
        best = sorted(candidates, key=lambda name: (os.path.splitext(name)[0] != stem, name != annotated_name, name))
        return best[0] if best else None
