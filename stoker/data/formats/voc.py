"""Pascal VOC XML: reads a data set of one file per image.

Boxes are taken as written: the 1-based corners of the original VOC are not shifted, because most files today come from
tools that write 0-based ones. `difficult` objects are ordinary boxes; boxes of an object's <part>s are not read.
The image of each file: `voc_images.py`.
Format: http://host.robots.ox.ac.uk/pascal/VOC/voc2012/htmldoc/devkit_doc.html#SECTION00091000000000000000.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from stoker import regular_files
from stoker.data.formats.table_builder import Box, ImageFile, build_table
from stoker.data.formats.tables import AnnotationTable, DatasetLayout, SplitFiles
from stoker.data.formats.voc_files import index_xml, list_xml, match_list_entry
from stoker.data.formats.voc_images import ImageLocator
from stoker.data.validation.problems import ProblemCollector
from stoker.errors import DataError


class _Object(NamedTuple):
    class_name: str
    xyxy: tuple[float, float, float, float]
    number: int
    """1 for the first <object> of the file."""


@dataclass(frozen=True)
class _Annotation:
    file: Path
    filename: str
    size: tuple[int, int]
    """Height, width; 0 if the file does not give it."""
    objects: list[_Object]
    num_bad_boxes: int
    """Objects that cannot be read."""


def read(layout: DatasetLayout, problems: ProblemCollector) -> AnnotationTable:
    """Reads all XML files of a data set. Raises DataError if none can be read."""
    notes = list(layout.notes)
    locators: dict[tuple[Path, tuple[Path, ...]], ImageLocator] = {}
    read_files: set[Path] = set()
    parsed: dict[Path, _Annotation | None] = {}
    entries: list[tuple[_Annotation, ImageFile]] = []
    for part in layout.parts:
        files = _list_files(part, layout.root, notes, problems)
        read_files.update(files)
        key = part.annotations, part.image_dirs
        if key not in locators:
            locators[key] = ImageLocator(part, layout.root, files)
            notes += locators[key].notes
        for file in files:
            if file not in parsed:
                parsed[file] = _parse_file(file, os.path.relpath(file, layout.root), problems)
            if (annotation := parsed[file]) is not None:
                folder, name = locators[key].locate(file, annotation.filename)
                entries.append((annotation, ImageFile(folder, name, part.split_index, annotation.size)))
    if not entries:
        raise DataError(
            "No annotation file can be read.",
            location=layout.parts[0].annotations,
            cause="; ".join(f"{p.count} × {p.title}: {p.examples[0]}" for p in problems.summarize(1)) or None,
            fix="export or copy the data set again",
        )
    entries = _drop_duplicate_files(entries, layout.root, problems)
    _report_unlisted(layout, read_files, locators, problems)
    boxes = [
        Box(image_index, item.class_name, item.xyxy, item.number)
        for image_index, (annotation, _) in enumerate(entries)
        for item in annotation.objects
    ]
    return build_table(
        layout,
        [image for _, image in entries],
        boxes,
        lambda kept: sorted({str(box.label) for box in kept}),
        problems,
        box_id_kind="object",
        notes=notes,
        bad_boxes=[
            image_index for image_index, (annotation, _) in enumerate(entries) for _ in range(annotation.num_bad_boxes)
        ],
        read_headers=False,
    )


def _drop_duplicate_files(
    entries: list[tuple[_Annotation, ImageFile]], root: Path, problems: ProblemCollector
) -> list[tuple[_Annotation, ImageFile]]:
    """Drops annotation files of an image that has several, except the one with the image's own name.

    If none has this name, all are dropped, because the correct one is not known.
    """
    files_by_image: dict[tuple[Path, str], set[Path]] = {}
    for annotation, image in entries:
        files_by_image.setdefault((image.folder, image.name), set()).add(annotation.file)
    dropped: set[Path] = set()
    for (_, name), files in files_by_image.items():
        if len(files) > 1:
            own = {file for file in files if file.stem == os.path.splitext(name)[0]}
            for file in sorted(files - own):
                others = ", ".join(sorted(other.name for other in files - {file}))
                location = os.path.relpath(file, root)
                problems.add("two-annotation-files", f"{location}: about {name}, as {others} is")
            dropped |= files - own
    return [entry for entry in entries if entry[0].file not in dropped] if dropped else entries


def _list_files(part: SplitFiles, root: Path, notes: list[str], problems: ProblemCollector) -> list[Path]:
    """The XML files of a split: those in its list, in that order, else all of the folder by name."""
    if part.image_list is None:
        return list_xml(part.annotations)
    known, by_stem = index_xml(part.annotations)
    selected: dict[Path, None] = {}
    absent: list[tuple[int, str]] = []
    text = regular_files.read_text(part.image_list, encoding="utf-8-sig", errors="surrogateescape")
    entries = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    location = os.path.relpath(part.image_list, root)
    for number, entry in entries:
        file = match_list_entry(entry, known, by_stem)
        if file is None:
            absent.append((number, entry))
        elif file in selected:
            problems.add("copied-entry", f"{location}:{number}: {entry}")
        else:
            selected[file] = None
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


def _report_unlisted(
    layout: DatasetLayout,
    read_files: set[Path],
    locators: dict[tuple[Path, tuple[Path, ...]], ImageLocator],
    problems: ProblemCollector,
) -> None:
    """Reports the images that have an annotation file and are in no list of a split."""
    reported: set[Path] = set()
    for part in layout.parts:
        for file in list_xml(part.annotations):
            if file not in read_files and file not in reported:
                reported.add(file)
                folder, name = locators[part.annotations, part.image_dirs].locate(file, "")
                problems.add("not-in-a-split", os.path.relpath(folder / name, layout.root))


def _parse_file(file: Path, location: str, problems: ProblemCollector) -> _Annotation | None:
    """None, and a problem, for a file that cannot be read. location: its name in messages."""
    try:
        root = ElementTree.fromstring(regular_files.read_bytes(file))
    except ElementTree.ParseError as error:
        problems.add("unreadable-annotations", f"{location}:{error.position[0]}: not valid XML, {error}")
        return None
    except (ValueError, LookupError) as error:  # an encoding that Python's parser does not support
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
        class_name = (item.findtext("name") or "").strip()
        box = item.find("bndbox")
        xyxy = None if box is None else _parse_xyxy(box)
        if not class_name:
            problems.add("no-class", object_location)
        elif xyxy is None:
            problems.add("no-box", object_location)
        elif isinstance(xyxy, str):
            problems.add("malformed-box", f"{object_location}: {xyxy}")
        else:
            objects.append(_Object(class_name, xyxy, number))
    size = (_parse_pixels(root, "size/height"), _parse_pixels(root, "size/width"))
    num_bad_boxes = len(root.findall("object")) - len(objects)
    return _Annotation(file, (root.findtext("filename") or "").strip(), size, objects, num_bad_boxes)


def _parse_xyxy(box: ElementTree.Element) -> tuple[float, float, float, float] | str:
    """x1, y1, x2, y2, or the reason why they cannot be read."""
    values = []
    for tag in ("xmin", "ymin", "xmax", "ymax"):
        text = box.findtext(tag)
        try:
            values.append(float(text or ""))
        except ValueError:
            return f"there is no <{tag}>" if text is None else f"<{tag}> is {text!r}, not a number"
    return values[0], values[1], values[2], values[3]


def _parse_pixels(root: ElementTree.Element, path: str) -> int:
    """A height or width in pixels; 0, unknown, if the file has no valid one."""
    try:
        value = float(root.findtext(path) or 0)
    except ValueError:
        return 0
    return int(value) if 0 < value < 2**31 else 0
