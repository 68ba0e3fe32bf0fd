"""Which files make up a YOLO data set.

Recognised: a data.yaml (or obj.data) that names folders or lists of pictures; without one, lists of pictures
(train.txt), `images/train` with `labels/train`, `train/images` with `train/labels`, `images/` with `labels/`, and label
files beside the pictures. A part is one folder of pictures with the folder of their labels. Not here: what describes
the set (`yolo_yaml.py`), what is in the label files (`yolo.py`).
"""

import os
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from stoker.data.formats.tables import (
    PICTURE_ENDINGS,
    SPLIT_WORDS,
    SPLITS,
    Found,
    Part,
    split_folders,
    split_in_name,
    subfolders,
    without_annotations,
)
from stoker.data.formats.yolo_yaml import Definition, find_definition, find_names, read_definition
from stoker.errors import DataError

PICTURE_WORDS = ("images", "jpegimages")
"""Folders of a picture's path whose last is replaced by "labels", as Ultralytics and Darknet do."""
PROBES = 16
"""Label files that are looked into where no data.yaml says that they are labels."""


def find(folder: Path) -> Found | None:
    """The YOLO data set in a folder (not below it), or None. Raises DataError when what describes it is wrong."""
    definition = find_definition(folder)
    if definition is not None:
        return from_file(definition)
    for layout, parts, notes in _layouts(folder):
        if parts and _has_rows(parts):
            described = find_names(_name_places(folder, parts))
            return Found(
                format="yolo",
                layout=layout,
                root=folder,
                parts=tuple(parts),
                notes=tuple(notes),
                descriptions=tuple(described),
            )
    return None


def from_file(file: Path) -> Found:
    """The data set that a data.yaml or obj.data describes. Raises DataError when its pictures are not there."""
    definition = read_definition(file)
    bases, notes = bases_of(definition)
    parts: list[Part] = []
    taken: list[str] = []
    for split in SPLITS:
        for entry in definition.splits.get(split, ()):
            place = locate(entry, bases)
            if place is None and split == "test":
                notes.append(f"the test split is left out: {file.name} names {entry!r}, which is not there")
                continue
            if place is None:
                raise DataError(
                    f"The pictures of the {split} split are not there.",
                    place=f"{file}: {split}: {entry}",
                    cause=f"looked for {entry!r}, also without its first folders, in "
                    + ", ".join(str(base) for base in bases),
                    fix="correct the line; delete it to have a part of the training pictures held back"
                    if split == "val"
                    else "correct the line, or `path`, which it is relative to",
                )
            if place != _joined(bases[0], entry) or not place.is_relative_to(bases[0]):
                taken.append(f"{entry!r} is {place}")
            if place.suffix.lower() == ".txt":
                parts += _listed_parts(split, place, bases)
            else:
                inside = list(_parts_below(split, place))
                if not inside and split != "test":
                    raise DataError(
                        f"The {split} split has no pictures.",
                        place=place,
                        cause=f"{file} names the folder; no file in it ends in {', '.join(PICTURE_ENDINGS)}",
                        fix="correct the line, or put the pictures there",
                    )
                parts += inside
    if taken:
        notes.append(f"{file.name}: {', '.join(taken)}")
    described = (file, *(() if definition.names else find_names(_name_places(file.parent, parts))))
    return Found(
        format="yolo",
        layout=f"YOLO as {file.name} describes it",
        root=bases[0],
        parts=tuple(parts),
        notes=tuple(notes),
        descriptions=described,
    )


def bases_of(definition: Definition) -> tuple[tuple[Path, ...], list[str]]:
    """The folders that paths may be relative to, the likeliest first: `path`, that of the file, the one above."""
    here = definition.file.parent
    above = (here, here.parent)
    if definition.path is None:
        return above, []
    base = locate(definition.path, above)
    if base is None or not base.is_dir():
        return above, [f"path {definition.path!r} of {definition.file.name} is not there: {here} is taken"]
    notes = [f"path {definition.path!r} of {definition.file.name} is {base}"] if base != here else []
    return tuple(dict.fromkeys((base, *above))), notes


def _joined(base: Path, text: str) -> Path:
    return Path(os.path.normpath(base / Path(text.replace("\\", "/")).expanduser()))


def locate(text: str, bases: Iterable[Path], *, least: int = 2) -> Path | None:
    """The file or folder that a written path means: as written, relative to a base; else without its first folders.

    Exports carry another machine's folders, and Roboflow's begin with ../ where none is meant. At least `least` parts
    of a longer path must fit, or its last one must be named after a split.
    """
    bases = tuple(bases)
    for base in bases:
        if (place := _joined(base, text)).exists():
            return place
    parts = [part for part in PurePosixPath(text.replace("\\", "/")).parts if part not in ("/", "..", ".")]
    parts = [part for part in parts if not part.endswith(":")]
    for begin in range(len(parts)):
        tail = parts[begin:]
        if len(tail) < min(least, len(parts)) and split_in_name(tail[0]) is None:
            break
        for base in bases:
            if (place := base.joinpath(*tail)).exists():
                return place
    return None


def listed_pictures(listing: Path, bases: Iterable[Path]) -> dict[Path, list[str]]:
    """Folder → file names of the pictures that a list names, in its order. A folder that is not
    there stands as it is written. bases: what the paths may be relative to, besides the folder of the list."""
    places = (listing.parent, *bases)
    lines = listing.read_text(encoding="utf-8-sig", errors="surrogateescape").splitlines()
    folders: dict[str, Path] = {}
    pictures: dict[Path, dict[str, None]] = {}
    for line in lines:
        entry = line.strip().replace("\\", "/")
        if not entry:
            continue
        head, _, name = entry.rpartition("/")
        folder = folders.get(head)
        if folder is None:
            place = locate(entry, places, least=1)
            if place is not None:
                folder = folders[head] = place.parent
            else:  # the next picture may be there; else the folder is told by its own name
                folder = (locate(head, places) if head else None) or _joined(places[0], head)
        pictures.setdefault(folder, {})[name] = None
    return {folder: list(names) for folder, names in pictures.items()}


def _listed_parts(split: str, listing: Path, bases: Iterable[Path]) -> Iterator[Part]:
    pictures = listed_pictures(listing, bases)
    if not pictures:
        raise DataError(
            f"The {split} split is empty.", place=listing, fix="list its pictures there, one a line, or delete the list"
        )
    for folder, names in pictures.items():
        yield Part(split=split, annotations=labels_of(folder, names), pictures=(folder,), listing=listing)


def _parts_below(split: str | None, base: Path) -> Iterator[Part]:
    """A part for every folder at or below one that holds pictures."""
    seen: set[str] = set()
    for place, folders, files in os.walk(base, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:  # a link to a folder above
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        names = [name for name in files if is_picture(name)]
        if names:
            yield Part(split=split, annotations=labels_of(Path(place), names), pictures=(Path(place),))


def is_picture(name: str) -> bool:
    return name.lower().endswith(PICTURE_ENDINGS) and not name.startswith(".")


def labels_of(folder: Path, names: Iterable[str]) -> Path:
    """The folder of the label files of pictures: `images` in its path replaced by `labels`, the folder itself, or a
    folder `labels` beside or in it; the first that has a label of one of these pictures."""
    names = list(names)
    candidates = [folder, folder.parent / "labels", folder / "labels", folder.parent / "labels" / folder.name]
    last = next((n for n in reversed(range(len(folder.parts))) if folder.parts[n].lower() in PICTURE_WORDS), None)
    if last is not None:
        above, below = Path(*folder.parts[:last]), folder.parts[last + 1 :]
        candidates[:0] = [above.joinpath(word, *below) for word in ("labels", "Labels")]
    there = [place for place in dict.fromkeys(candidates) if place.is_dir()]
    with_labels = (place for place in there if match_labels(names, label_files(place)))
    return next(with_labels, next((place for place in there if place != folder), candidates[0]))


def label_files(folder: Path) -> list[str]:
    """The .txt files in a folder, by name; none where it is not there."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.name.lower().endswith(".txt"))
    return [name for name in names if not name.startswith(".")]


def match_labels(pictures: Iterable[str], labels: Iterable[str]) -> dict[str, str]:
    """Name of a picture → that of its label file: of the same stem; where a picture has none, the one whose stem is the
    same in another case or another form of Unicode, and which is no other picture's."""
    by_stem = {os.path.splitext(label)[0]: label for label in labels}
    stems = {picture: os.path.splitext(picture)[0] for picture in pictures}
    found = {picture: by_stem[stem] for picture, stem in stems.items() if stem in by_stem}
    if len(found) == len(stems):
        return found
    alike: dict[str, list[str]] = {}
    for stem in by_stem.keys() - stems.values():
        alike.setdefault(_folded(stem), []).append(by_stem[stem])
    for picture, stem in stems.items():
        if picture not in found and len(same := alike.get(_folded(stem), [])) == 1:
            found[picture] = same[0]
    return found


def _folded(stem: str) -> str:
    return unicodedata.normalize("NFC", stem).casefold()


def _layouts(folder: Path) -> Iterator[tuple[str, list[Part], list[str]]]:
    """The layouts without a description: in words, its parts, of which there may be none, and notes."""
    below = subfolders(folder)
    lists = [(split, folder / f"{word}.txt") for word, split in SPLIT_WORDS.items()]
    lists = [(split, path) for split, path in lists if path.is_file() and _lists_pictures(path)]
    yield "YOLO with lists of pictures", [part for split, path in lists for part in _listed_parts(split, path, ())], []
    images = next((below[word] for word in PICTURE_WORDS if word in below), None)
    if images is not None and ("labels" in below or label_files(images)):
        inside = subfolders(images)
        splits = [(split, path) for name, path in inside.items() if (split := split_in_name(name)) is not None]
        if splits:
            splits.sort(key=lambda item: SPLITS.index(item[0]))
            others = [path.name for path in inside.values() if path not in [path for _, path in splits]]
            if any(is_picture(name) for name in os.listdir(images)):
                others.append("the pictures in it")
            notes = [f"of {images.name}/, left out: {', '.join(others)}, in no split"] if others else []
            yield "YOLO in images/ and labels/", [p for s, path in splits for p in _parts_below(s, path)], notes
        yield "YOLO in images/ and labels/", list(_parts_below(None, images)), []
    parts = []
    for split, path in split_folders(folder):
        inner = subfolders(path)
        if "labels" in inner or "labels" in below or label_files(path):
            base = next((inner[word] for word in PICTURE_WORDS if word in inner), path)
            parts += [part for part in _parts_below(split, base) if label_files(part.annotations)]
    if parts and _has_rows(parts):
        yield "YOLO per split folder", parts, without_annotations(folder, parts)
    if label_files(folder) or "labels" in below:
        names = [name for name in sorted(os.listdir(folder)) if is_picture(name)]
        part = Part(split=None, annotations=labels_of(folder, names), pictures=(folder,))
        yield "YOLO, label files and pictures in one folder", [part] if names else [], []


def _lists_pictures(path: Path) -> bool:
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        return file.readline(4096).strip().lower().endswith(PICTURE_ENDINGS)


def _has_rows(parts: list[Part]) -> bool:
    """Whether label files of pictures look like YOLO's: captions and other texts stand beside pictures, too."""
    looked = 0
    for part in parts:
        with os.scandir(part.pictures[0]) as entries:
            pictures = [entry.name for entry in entries if is_picture(entry.name)]
        for name in match_labels(pictures, label_files(part.annotations)).values():
            if not (line := _first_line(part.annotations / name)):
                continue
            if looks_like_row(line):
                return True
            looked += 1
            if looked >= PROBES:
                return False
    return False


def _first_line(path: Path) -> bytes:
    with path.open("rb") as file:
        head = file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")
    return head.partition(b"\n")[0].strip()


def looks_like_row(line: bytes) -> bool:
    """Whether a line is a class and at least four numbers."""
    try:
        return len([float(field) for field in line.split()]) >= 5
    except ValueError:
        return False


def is_label_file(path: Path) -> bool:
    """Whether a text file begins like YOLO labels."""
    return looks_like_row(_first_line(path))


def _name_places(folder: Path, parts: Iterable[Part]) -> list[Path]:
    """Where a list of class names may lie."""
    labels = [part.annotations for part in parts][:PROBES]
    return list(dict.fromkeys([folder, folder / "labels", *labels, *(path.parent for path in labels)]))
