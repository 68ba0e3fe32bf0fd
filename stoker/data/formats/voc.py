"""Pascal VOC XML: reads a data set of one file per picture into columns.

Boxes are taken as written: the 1-based corners of the original VOC are not shifted, since most files today come from
tools that write 0-based ones. `difficult` objects are ordinary boxes; boxes of an object's <part>s are not read. The
picture is the one that has the XML file's own name; <filename> is believed only where there is none (it lies often).
Format: http://host.robots.ox.ac.uk/pascal/VOC/voc2012/htmldoc/devkit_doc.html#SECTION00091000000000000000.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import numpy as np

from stoker.data.formats.columns import SPLITS, UNDECIDED, Columns, Folders, Found, Part
from stoker.data.problems import Problems
from stoker.errors import DataError

PICTURE_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")


class _Object(NamedTuple):
    name: str
    box: tuple[float, float, float, float]
    number: int
    """1 for the first <object> of the file."""


@dataclass(frozen=True)
class _Annotation:
    file: Path
    filename: str
    size: tuple[int, int]
    """Height, width; 0 where the file does not say."""
    objects: list[_Object]


def read(found: Found, problems: Problems) -> Columns:
    """Reads all XML files of a data set. Raises DataError that names file and place."""
    notes = list(found.notes)
    folders = Folders(found.root)
    annotations: list[_Annotation] = []
    folder: list[int] = []
    names: list[str] = []
    split: list[int] = []
    shelves: dict[tuple[Path, ...], _Pictures] = {}
    read_files: set[Path] = set()
    for part in found.parts:
        pictures = shelves.setdefault(part.pictures, _Pictures(part.pictures))
        files = _files(part, notes)
        read_files.update(files)
        for file in files:
            annotation = _parse(file, problems)
            place, name = pictures.of(annotation)
            annotations.append(annotation)
            folder.append(folders.number(str(place)))
            names.append(name)
            split.append(UNDECIDED if part.split is None else SPLITS.index(part.split))
    _note_unlisted(found, read_files, notes)
    objects = [(row, item) for row, annotation in enumerate(annotations) for item in annotation.objects]
    class_names = sorted({item.name for _, item in objects})
    label = {name: i for i, name in enumerate(class_names)}
    return Columns(
        class_names=class_names,
        category_ids=list(range(len(class_names))),
        folders=folders.texts(),
        folder=np.array(folder, np.int32),
        names=names,
        split=np.array(split, np.int8),
        size=np.array([annotation.size for annotation in annotations], np.int32).reshape(-1, 2),
        image_id=np.arange(len(names), dtype=np.int64),
        row=np.array([row for row, _ in objects], np.int64),
        boxes=np.array([item.box for _, item in objects], np.float64).reshape(-1, 4),
        labels=np.array([label[item.name] for _, item in objects], np.int32),
        crowd=np.zeros(len(objects), np.bool_),
        area=np.full(len(objects), np.nan),
        box_id=np.array([item.number for _, item in objects], np.int64),
        box_word="object",
        notes=notes,
    )


def _files(part: Part, notes: list[str]) -> list[Path]:
    """The XML files of a split: those that its list names, in its order, else all of the folder by name."""
    if part.listing is None:
        return sorted(_xml_in(part.annotations))
    known = {path.stem: path for path in _xml_in(part.annotations)}
    found: dict[Path, None] = {}
    absent: list[tuple[int, str]] = []
    lines = part.listing.read_text(encoding="utf-8-sig", errors="surrogateescape").splitlines()
    entries = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    for number, entry in entries:
        # a name may be followed by 1 or -1, or carry the picture's ending
        stem = next((stem for stem in (entry, os.path.splitext(entry)[0], entry.split()[0]) if stem in known), None)
        if stem is None:
            absent.append((number, entry))
        else:
            found[known[stem]] = None
    if not entries:
        raise DataError(
            f"The {part.split} split is empty.", place=part.listing, fix="list its pictures there, or delete the file"
        )
    if len(absent) == len(entries) and part.split == "test":
        notes.append(f"the test split has no annotations and is left out ({len(entries)} pictures)")
    elif absent:
        number, entry = absent[0]
        raise DataError(
            f"{len(absent)} of {len(entries)} entries of the {part.split} split have no annotation.",
            place=f"{part.listing}:{number}: {entry!r}",
            cause=f"{part.annotations} has no such XML file",
            fix="remove the lines or add the files; a picture without objects has an XML file without <object>",
        )
    if len(found) + len(absent) < len(entries):
        notes.append(f"{part.listing.name} names {len(entries) - len(absent) - len(found)} pictures twice: used once")
    return list(found)


def _xml_in(folder: Path) -> Iterator[Path]:
    with os.scandir(folder) as entries:
        names = [
            entry.name for entry in entries if entry.name.lower().endswith(".xml") and not entry.name.startswith(".")
        ]
    return (folder / name for name in names)


def _note_unlisted(found: Found, read_files: set[Path], notes: list[str]) -> None:
    unlisted = {path for part in found.parts for path in _xml_in(part.annotations)} - read_files
    if unlisted:
        notes.append(f"{len(unlisted)} annotated pictures are in no split and are left out, e.g. {min(unlisted).name}")


def _parse(file: Path, problems: Problems) -> _Annotation:
    try:
        root = ElementTree.parse(file).getroot()
    except ElementTree.ParseError as error:
        raise DataError(
            "An annotation file is not valid XML.",
            place=f"{file}:{error.position[0]}",
            cause=str(error),
            fix="correct or delete it; an empty or truncated file comes from a copy that was cut short",
        ) from error
    except (ValueError, LookupError) as error:  # an encoding that Python's parser does not have
        raise DataError(
            "An annotation file cannot be decoded.", place=f"{file}:1", cause=str(error), fix="convert it to UTF-8"
        ) from error
    if root.tag != "annotation":
        raise DataError(
            "An XML file is not a Pascal VOC annotation.",
            place=file,
            cause=f"its root is <{root.tag}>, not <annotation>",
            fix="move it out of the data folder",
        )
    objects = []
    for number, item in enumerate(root.findall("object"), 1):
        name = (item.findtext("name") or "").strip()
        if not name:
            raise DataError("An object has no class.", place=f"{file}: object {number}", fix="give it a <name>")
        box = item.find("bndbox")
        if box is None:
            problems.add("no-box", f"{file.name}, object {number}")
        else:
            objects.append(_Object(name, _corners(box, file, number), number))
    size = (_pixels(root, "size/height"), _pixels(root, "size/width"))
    return _Annotation(file, (root.findtext("filename") or "").strip(), size, objects)


def _corners(box: ElementTree.Element, file: Path, number: int) -> tuple[float, float, float, float]:
    values = []
    for tag in ("xmin", "ymin", "xmax", "ymax"):
        text = box.findtext(tag)
        try:
            values.append(float(text or ""))
        except ValueError as error:
            cause = f"there is no <{tag}>" if text is None else f"<{tag}> is {text!r}, not a number"
            raise DataError(
                "A box cannot be read.",
                place=f"{file}: object {number}",
                cause=cause,
                fix="correct or remove the object",
            ) from error
    return values[0], values[1], values[2], values[3]


def _pixels(root: ElementTree.Element, path: str) -> int:
    """A side in pixels; 0, unknown, where the file has none that makes sense."""
    try:
        value = float(root.findtext(path) or 0)
    except ValueError:
        return 0
    return int(value) if 0 < value < 2**31 else 0


class _Pictures:
    """The pictures of some folders, listed once, to match annotations with."""

    def __init__(self, folders: tuple[Path, ...]) -> None:
        self._likeliest = folders[0]
        self._by_name: dict[str, Path] = {}
        self._by_stem: dict[str, list[str]] = {}
        self._taken: dict[tuple[Path, str], Path] = {}
        for folder in folders:
            with os.scandir(folder) as entries:
                for name in sorted(entry.name for entry in entries if entry.name.lower().endswith(PICTURE_ENDINGS)):
                    if name not in self._by_name:
                        self._by_name[name] = folder
                        self._by_stem.setdefault(os.path.splitext(name)[0].casefold(), []).append(name)

    def of(self, annotation: _Annotation) -> tuple[Path, str]:
        """Folder and name of an annotation's picture; a likely name where there is none. Raises DataError when another
        annotation has it already."""
        stem = annotation.file.stem
        said = annotation.filename.replace("\\", "/").rpartition("/")[2]
        name = self._choose(stem, said) or (self._choose(os.path.splitext(said)[0], said) if said else None)
        if name is None:
            name = said if said.lower().endswith(PICTURE_ENDINGS) else f"{stem}.jpg"
        key = self._by_name.get(name, self._likeliest), name
        other = self._taken.setdefault(key, annotation.file)
        if other != annotation.file:
            raise DataError(
                f"Two annotation files are about one picture, {name!r}.",
                place=annotation.file,
                cause=f"{other.name} is about it, too; <filename> is {annotation.filename!r}",
                fix=f"add the picture {stem}.jpg, or delete one of the two files",
            )
        return key

    def _choose(self, stem: str, said: str) -> str | None:
        """The picture with a stem: in the same case and as <filename> says where there are several."""
        same = self._by_stem.get(stem.casefold(), [])
        best = sorted(same, key=lambda name: (os.path.splitext(name)[0] != stem, name != said, name))
        return best[0] if best else None
