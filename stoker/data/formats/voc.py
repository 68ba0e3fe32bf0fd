"""Pascal VOC XML: reads a data set of one file per image into columns.

Boxes are taken as written: the 1-based corners of the original VOC are not shifted, since most files today come from
tools that write 0-based ones. `difficult` objects are ordinary boxes; boxes of an object's <part>s are not read.
Which image a file is about: `voc_images.py`.
Format: http://host.robots.ox.ac.uk/pascal/VOC/voc2012/htmldoc/devkit_doc.html#SECTION00091000000000000000.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import numpy as np

from stoker.data.formats.tables import (
    SPLITS,
    UNASSIGNED,
    AnnotationTable,
    DatasetLayout,
    FolderTable,
    SplitFiles,
)
from stoker.data.formats.voc_files import list_xml
from stoker.data.formats.voc_images import ImageLocator
from stoker.data.validation.problems import ProblemCollector
from stoker.errors import DataError


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


class _Entry(NamedTuple):
    """An image with its annotations."""

    annotation: _Annotation
    folder: Path
    name: str
    split: int


def read(layout: DatasetLayout, problems: ProblemCollector) -> AnnotationTable:
    """Reads all XML files of a data set. Raises DataError when none can be read."""
    notes = list(layout.notes)
    locators: dict[tuple[Path, tuple[Path, ...]], ImageLocator] = {}
    read_files: set[Path] = set()
    parsed: dict[Path, _Annotation | None] = {}
    entries: list[_Entry] = []
    for part in layout.parts:
        files = _list_files(part, layout.root, notes, problems)
        read_files.update(files)
        key = part.annotations, part.image_dirs
        if key not in locators:
            locators[key] = ImageLocator(part, layout.root, files)
            notes += locators[key].notes
        split = UNASSIGNED if part.split is None else SPLITS.index(part.split)
        for file in files:
            if file not in parsed:
                parsed[file] = _parse_file(file, os.path.relpath(file, layout.root), problems)
            annotation = parsed[file]
            if annotation is not None:
                entries.append(_Entry(annotation, *locators[key].locate(file, annotation.filename), split))
    if not entries:
        raise DataError(
            "No annotation file can be read.",
            location=layout.parts[0].annotations,
            cause="; ".join(f"{p.count} × {p.title}: {p.examples[0]}" for p in problems.summarize(1)) or None,
            fix="export or copy the data set again",
        )
    entries = _drop_duplicate_files(entries, layout.root, problems)
    _note_unlisted(layout, read_files, notes)
    folders = FolderTable(layout.root)
    folder = [folders.add(str(entry.folder)) for entry in entries]
    names = [entry.name for entry in entries]
    splits = [entry.split for entry in entries]
    annotations = [entry.annotation for entry in entries]
    objects = [(image_index, item) for image_index, annotation in enumerate(annotations) for item in annotation.objects]
    class_names = sorted({item.name for _, item in objects})
    label_by_name = {name: i for i, name in enumerate(class_names)}
    return AnnotationTable(
        class_names=class_names,
        category_ids=list(range(len(class_names))),
        folders=folders.paths(),
        folder_index=np.array(folder, np.int32),
        file_names=names,
        split=np.array(splits, np.int8),
        original_size=np.array([annotation.size for annotation in annotations], np.int32).reshape(-1, 2),
        image_id=np.arange(len(names), dtype=np.int64),
        image_index=np.array([image_index for image_index, _ in objects], np.int64),
        boxes=np.array([item.box for _, item in objects], np.float64).reshape(-1, 4),
        labels=np.array([label_by_name[item.name] for _, item in objects], np.int32),
        crowd=np.zeros(len(objects), np.bool_),
        area=np.full(len(objects), np.nan),
        box_id=np.array([item.number for _, item in objects], np.int64),
        box_id_kind="object",
        notes=notes,
    )


def _drop_duplicate_files(entries: list[_Entry], root: Path, problems: ProblemCollector) -> list[_Entry]:
    """Leaves out files about an image that another file is about, too. The one with the image's own name stays;
    where none has it, which one is right is not known."""
    files_by_image: dict[tuple[Path, str], set[Path]] = {}
    for entry in entries:
        files_by_image.setdefault((entry.folder, entry.name), set()).add(entry.annotation.file)
    dropped: set[Path] = set()
    for (_, name), files in files_by_image.items():
        if len(files) > 1:
            own = {file for file in files if file.stem == os.path.splitext(name)[0]}
            for file in sorted(files - own):
                others = ", ".join(sorted(other.name for other in files - {file}))
                location = os.path.relpath(file, root)
                problems.add("two-annotation-files", f"{location}: about {name}, as {others} is")
            dropped |= files - own
    return [entry for entry in entries if entry.annotation.file not in dropped] if dropped else entries


def _list_files(part: SplitFiles, root: Path, notes: list[str], problems: ProblemCollector) -> list[Path]:
    """The XML files of a split: those that its list names, in its order, else all of the folder by name."""
    if part.image_list is None:
        return list_xml(part.annotations)
    known = {str(path.relative_to(part.annotations).with_suffix("")): path for path in list_xml(part.annotations)}
    selected: dict[Path, None] = {}
    absent: list[tuple[int, str]] = []
    lines = part.image_list.read_text(encoding="utf-8-sig", errors="surrogateescape").splitlines()
    entries = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    location = os.path.relpath(part.image_list, root)
    for number, entry in entries:
        # a name may be followed by 1 or -1, or carry the image's ending
        stem = next((stem for stem in (entry, os.path.splitext(entry)[0], entry.split()[0]) if stem in known), None)
        if stem is None:
            absent.append((number, entry))
        elif known[stem] in selected:
            problems.add("copied-entry", f"{location}:{number}: {entry}")
        else:
            selected[known[stem]] = None
    if not entries and part.split == "test":
        problems.add("split-without-boxes", f"{location}: no images")
    elif not entries:
        raise DataError(
            f"The {part.split} split is empty.",
            location=part.image_list,
            fix="list its images there, or delete the file",
        )
    elif len(absent) == len(entries) and part.split == "test":
        notes.append(f"the test split has no annotations and is left out ({len(entries)} images)")
    elif len(absent) == len(entries):
        raise DataError(
            f"No entry of the {part.split} split has an annotation.",
            location=f"{part.image_list}:{absent[0][0]}: {absent[0][1]!r}",
            cause=f"{part.annotations} has no such XML file",
            fix="list the names of annotated images, without folders",
        )
    else:
        for number, entry in absent:
            problems.add("no-annotation-file", f"{location}:{number}: {entry!r}")
    return list(selected)


def _note_unlisted(layout: DatasetLayout, read_files: set[Path], notes: list[str]) -> None:
    unlisted = {path for part in layout.parts for path in list_xml(part.annotations)} - read_files
    if unlisted:
        notes.append(f"{len(unlisted)} annotated images are in no split and are left out, e.g. {min(unlisted).name}")


def _parse_file(file: Path, location: str, problems: ProblemCollector) -> _Annotation | None:
    """None, and a problem, for a file that cannot be read. where: its name in messages."""
    try:
        root = ElementTree.parse(file).getroot()
    except ElementTree.ParseError as error:
        problems.add("unreadable-annotations", f"{location}:{error.position[0]}: not valid XML, {error}")
        return None
    except (ValueError, LookupError) as error:  # an encoding that Python's parser does not have
        problems.add("unreadable-annotations", f"{location}:1: {error}; convert it to UTF-8")
        return None
    except OSError as error:
        problems.add("unreadable-annotations", f"{location}: {error.strerror or error}")
        return None
    if root.tag != "annotation":
        problems.add("foreign-file", f"{location}: its root is <{root.tag}>, not <annotation>")
        return None
    objects = []
    for number, item in enumerate(root.findall("object"), 1):
        object_location = f"{location}, object {number}"
        name = (item.findtext("name") or "").strip()
        box = item.find("bndbox")
        xyxy = None if box is None else _parse_xyxy(box)
        if not name:
            problems.add("no-class", object_location)
        elif xyxy is None:
            problems.add("no-box", object_location)
        elif isinstance(xyxy, str):
            problems.add("malformed-box", f"{object_location}: {xyxy}")
        else:
            objects.append(_Object(name, xyxy, number))
    size = (_parse_pixels(root, "size/height"), _parse_pixels(root, "size/width"))
    return _Annotation(file, (root.findtext("filename") or "").strip(), size, objects)


def _parse_xyxy(box: ElementTree.Element) -> tuple[float, float, float, float] | str:
    """x1, y1, x2, y2, or what is wrong with them."""
    values = []
    for tag in ("xmin", "ymin", "xmax", "ymax"):
        text = box.findtext(tag)
        try:
            values.append(float(text or ""))
        except ValueError:
            return f"there is no <{tag}>" if text is None else f"<{tag}> is {text!r}, not a number"
    return values[0], values[1], values[2], values[3]


def _parse_pixels(root: ElementTree.Element, path: str) -> int:
    """A side in pixels; 0, unknown, where the file has none that makes sense."""
    try:
        value = float(root.findtext(path) or 0)
    except ValueError:
        return 0
    return int(value) if 0 < value < 2**31 else 0
