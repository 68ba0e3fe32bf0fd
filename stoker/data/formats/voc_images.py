"""Which picture each XML file of a Pascal VOC data set is about.

It is the one that has the XML file's own name; <filename> is believed only where there is none, since it lies often. Of
a file in a folder of its own it is in the folder of that name among the pictures, where there is one. Not here: the
content of the files (`voc.py`), where they lie (`voc_files.py`).
"""

import os
from collections.abc import Iterable
from pathlib import Path

from stoker.data.formats.tables import PICTURE_ENDINGS, Part, folders_below

PROBES = 16
"""XML files whose pictures are looked for, to see whether these are where they are likely to be."""


class Shelf:
    """The pictures of a part, each folder listed once."""

    def __init__(self, part: Part, root: Path, files: list[Path]) -> None:
        """files: the part's XML files. Where none of the likely folders has a picture of theirs, others below `root`
        are looked into, and `notes` say so."""
        self.notes: list[str] = []
        self._annotations, self._folders = part.annotations, part.pictures
        self._inside: dict[Path, _Pictures] = {}
        probes = files[:PROBES]
        if probes and not any(self._pictures(file).has(file.stem) for file in probes):
            others = tuple(place for place in folders_below(root) if any(map(_Pictures([place]).has, _stems(probes))))
            if others:
                shown = ", ".join(str(place.relative_to(root)) for place in others[:3])
                self.notes.append(f"the pictures of {os.path.relpath(part.annotations, root)}/ are in {shown}")
                self._folders, self._inside = (*others, *part.pictures), {}

    def of(self, file: Path, filename: str) -> tuple[Path, str]:
        """Folder and name of an XML file's picture; a likely name where there is none. filename: what it says."""
        pictures = self._pictures(file)
        said = filename.replace("\\", "/").rpartition("/")[2]
        name = pictures.choose(file.stem, said) or (pictures.choose(os.path.splitext(said)[0], said) if said else None)
        if name is None:
            name = said if said.lower().endswith(PICTURE_ENDINGS) else f"{file.stem}.jpg"
        return pictures.folder(name), name

    def _pictures(self, file: Path) -> "_Pictures":
        inside = file.parent.relative_to(self._annotations)
        if inside not in self._inside:
            own = [folder / inside for folder in self._folders if (folder / inside).is_dir()]
            self._inside[inside] = _Pictures(own or self._folders)
        return self._inside[inside]


def _stems(files: Iterable[Path]) -> list[str]:
    return [file.stem for file in files]


class _Pictures:
    """The pictures of some folders by name and stem."""

    def __init__(self, folders: Iterable[Path]) -> None:
        folders = list(folders)
        self._likeliest = folders[0]
        self._by_name: dict[str, Path] = {}
        self._by_stem: dict[str, list[str]] = {}
        for folder in folders:
            with os.scandir(folder) as entries:
                for name in sorted(entry.name for entry in entries if entry.name.lower().endswith(PICTURE_ENDINGS)):
                    if name not in self._by_name:
                        self._by_name[name] = folder
                        self._by_stem.setdefault(os.path.splitext(name)[0].casefold(), []).append(name)

    def has(self, stem: str) -> bool:
        return stem.casefold() in self._by_stem

    def folder(self, name: str) -> Path:
        """The folder of a picture; the likeliest where there is none of that name."""
        return self._by_name.get(name, self._likeliest)

    def choose(self, stem: str, said: str) -> str | None:
        """The picture with a stem: in the same case and as <filename> says where there are several."""
        same = self._by_stem.get(stem.casefold(), [])
        best = sorted(same, key=lambda name: (os.path.splitext(name)[0] != stem, name != said, name))
        return best[0] if best else None
