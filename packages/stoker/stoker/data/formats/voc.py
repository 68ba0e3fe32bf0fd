"""Pascal VOC: an XML file per image.

Boxes are taken as written: the 1-based corners of the original VOC are not shifted, because most files today come from
tools that write 0-based ones. `difficult` objects are ordinary boxes; boxes of an object's <part>s are not read. The
image of an XML file has its stem. <filename> is often wrong, so it is used only if there is no such image.
Format: http://host.robots.ox.ac.uk/pascal/VOC/voc2012/htmldoc/devkit_doc.html#SECTION00091000000000000000.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

import numpy as np

from stoker.data.formats import folders
from stoker.data.formats.cvat import is_cvat
from stoker.data.formats.images import ImageFile, ImageLocator, TableBuilder
from stoker.data.formats.tables import (
    SPLITS,
    XYXY,
    AnnotatedImage,
    AnnotationTable,
    DatasetLayout,
    DatasetWriter,
    SplitFiles,
    Target,
    shortest_decimal,
    usable_size,
)
from stoker.data.validation.problems import ProblemCollector
from stoker_watch import regular_files
from stoker_watch.errors import DataError, make_error

MAX_LIST_PROBES = 64
"""Lines of a list that are tried, to see whether it is about the annotated images."""


def recognize(folder: Path) -> DatasetLayout | None:
    """Returns the Pascal VOC data set in a folder (not in subfolders), or None."""
    notes: list[str] = []
    if (annotations := _find_annotation_dir(folder)) is not None:
        description = f"Pascal VOC in {annotations.relative_to(folder)}/"
        parts, notes = _parts_from_lists(folder, annotations)
        present = {part.split for part in parts}
        others = [part for part in _iter_split_folders(folder) if part.split not in ("train", *present)]
        if others and present == {None}:  # Annotations/ and Validation_Annotations/: the first are for training
            parts = [replace(part, split="train") for part in parts]
        parts += others
    elif parts := list(_iter_split_folders(folder)):
        description = "Pascal VOC per split folder"
        notes = folders.check_unannotated_splits(folder, parts)
    elif _has_xml(folder):
        description = "Pascal VOC, XML files in one folder"
        parts = [SplitFiles(split=None, annotations=folder, image_dirs=folders.list_image_dirs(folder))]
    else:
        return None
    return DatasetLayout(format="voc", description=description, root=folder, parts=tuple(parts), notes=tuple(notes))


def _iter_split_folders(folder: Path) -> Iterator[SplitFiles]:
    for split, path in folders.iter_split_dirs(folder):
        annotations = _find_annotation_dir(path) or (path if _has_xml(path) else None)
        if annotations is not None:
            yield folders.file_part(annotations, split, folders.list_image_dirs(path))
    for split, images, annotations in folders.list_split_pairs(folder):
        if _has_xml(annotations):
            yield folders.file_part(annotations, split, (images,))


def _iter_xml(folder: Path) -> Iterator[Path]:
    return map(Path, folders.iter_annotation_files(folder, ".xml"))


def _has_xml(folder: Path) -> bool:
    return any(not is_cvat(folders.read_head(file)) for file in _iter_xml(folder))


def _find_annotation_dir(folder: Path) -> Path | None:
    directory = next(filter(_has_xml, folders.named_subdirs(folder, folders.ANNOTATION_DIRS)), None)
    if directory is None:
        return None
    inner = folders.list_subdirs(directory).get("xmls")  # as in the Oxford-IIIT Pet data set
    return directory if inner is None or not _has_xml(inner) else inner


def _make_split_parts(folder: Path, annotations: Path) -> list[SplitFiles]:
    """Returns the parts if every XML file is in a subfolder named after its split; else none."""
    split_dirs = [(split, path) for split, path in folders.iter_split_dirs(annotations) if _has_xml(path)]
    num_files = sum(len(list(_iter_xml(path))) for _, path in split_dirs)
    if not split_dirs or len(list(_iter_xml(annotations))) > num_files:
        return []
    image_dirs = {split: folders.iter_split_image_dirs(folder, split) for split, _ in split_dirs}
    common_dirs = folders.list_image_dirs(folder)
    return [folders.file_part(path, split, [*image_dirs[split], *common_dirs]) for split, path in split_dirs]


def _parts_from_lists(folder: Path, annotations: Path) -> tuple[list[SplitFiles], list[str]]:
    """The splits of the lists in ImageSets/Main, ImageSets or the folder itself, and notes; without such lists one part
    without a split. Only train, val, trainval and test: aeroplane_train.txt lists the images with that class."""
    image_dirs = folders.list_image_dirs(folder)
    notes = []
    lists = next(filter(None, map(folders.split_lists, (folder / "ImageSets" / "Main", folder / "ImageSets"))), {})
    if not lists and (lists := folders.split_lists(folder)):
        names = ", ".join(lists[split].name for split in (*SPLITS, "trainval") if split in lists)
        for_training = lists.get("train", lists.get("trainval"))
        entries = [] if for_training is None else _read_list(for_training)[:MAX_LIST_PROBES]
        if not any(map(_make_finder(annotations), (entry for _, entry in entries))):
            notes.append(f"not read: {names}: no line names an annotated image for training")
            lists = {}
        else:
            notes.append(f"splits: those of {names}")
    trainval = lists.pop("trainval", None)
    if trainval is not None and "train" not in lists:
        lists["train"] = trainval
        if "val" in lists:
            notes.append("not read: ImageSets/Main/val.txt, because trainval.txt contains its images")
            del lists["val"]
    parts = [
        SplitFiles(split=split, annotations=annotations, image_dirs=image_dirs, image_list=lists[split])
        for split in SPLITS
        if split in lists
    ]
    parts = parts or _make_split_parts(folder, annotations)
    return parts or [SplitFiles(split=None, annotations=annotations, image_dirs=image_dirs)], notes


class _ImageLocator:
    """The images of a part: in the same subfolder of an image folder as their annotations, or in the image folders."""

    def __init__(self, part: SplitFiles, root: Path, files: list[Path]) -> None:
        """files: the part's XML files. If the usual folders have none of their images, the folders below `root` are
        searched, and a note tells it."""
        self.notes: list[str] = []
        self._part, self._root = part, root
        self._locators: dict[Path, ImageLocator] = {}
        probes = files[: folders.MAX_PROBES]
        if probes and not any(self._locator_for(file).find(file.stem) for file in probes):
            other_dirs = tuple(
                directory
                for directory in folders.list_dirs_below(root)
                if any(map(ImageLocator(root, replace(part, image_dirs=(directory,))).find, [f.stem for f in probes]))
            )
            if other_dirs:
                listed = ", ".join(str(directory.relative_to(root)) for directory in other_dirs[:3])
                self.notes.append(f"the images of {os.path.relpath(part.annotations, root)}/ are in {listed}")
                self._part, self._locators = replace(part, image_dirs=(*other_dirs, *part.image_dirs)), {}

    def locate(self, file: Path, filename: str) -> tuple[Path, str]:
        """Returns folder and name of an XML file's image; a likely name if there is none. filename: its <filename>."""
        locator = self._locator_for(file)
        written_name = filename.replace("\\", "/").rpartition("/")[2]
        written_stem = os.path.splitext(written_name)[0]
        own_name = written_name if written_stem == file.stem else ""  # of several with the stem
        found = locator.find(own_name, file.stem, written_stem)
        return found or locator.locate(written_name if folders.is_image_name(written_name) else f"{file.stem}.jpg")

    def _locator_for(self, file: Path) -> ImageLocator:
        subdir = file.parent.relative_to(self._part.annotations)
        if subdir not in self._locators:
            subdirs = tuple(folder / subdir for folder in self._part.image_dirs if (folder / subdir).is_dir())
            part = replace(self._part, image_dirs=subdirs or self._part.image_dirs)
            self._locators[subdir] = ImageLocator(self._root, part)
        return self._locators[subdir]


def _make_finder(annotations: Path) -> Callable[[str], Path | None]:
    """Gives the XML file of a line of a list: a name with or without the image's suffix, perhaps followed by 1 or -1,
    or a path, perhaps of another machine."""
    paths = list(_iter_xml(annotations))
    known = {str(path.relative_to(annotations).with_suffix("")): path for path in paths}
    counts = Counter(path.stem for path in paths)
    by_stem = {path.stem: path for path in paths if counts[path.stem] == 1}

    def find(entry: str) -> Path | None:
        for text in (entry, os.path.splitext(entry)[0], entry.split()[0]):
            if text in known:
                return known[text]
        for text in (entry, entry.split()[0]):
            name = text.replace("\\", "/").rpartition("/")[2]
            for stem in (os.path.splitext(name)[0], name):
                if stem in by_stem:
                    return by_stem[stem]
        return None

    return find


def _read_list(image_list: Path) -> list[tuple[int, str]]:
    text = regular_files.read_text(image_list, encoding="utf-8-sig", errors="surrogateescape")
    return [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]


class _Annotation(NamedTuple):
    filename: str
    size: tuple[int, int]
    """Height, width; 0 if the file does not give it."""
    objects: list[tuple[str, XYXY, int]]
    """Class, box and number of each object that can be read."""
    num_bad_boxes: int


def read(layout: DatasetLayout, problems: ProblemCollector) -> AnnotationTable:
    """Reads all XML files of a data set. Raises DataError if none can be read."""
    builder = TableBuilder(layout, problems, box_id_kind="object")
    locators: dict[tuple[Path, tuple[Path, ...]], _ImageLocator] = {}
    parsed: dict[Path, _Annotation | None] = {}
    for part in layout.parts:
        files = _list_files(part, layout.root, builder.notes, problems)
        key = part.annotations, part.image_dirs
        if key not in locators:
            locators[key] = _ImageLocator(part, layout.root, files)
            builder.notes += locators[key].notes
        for file in files:
            location = os.path.relpath(file, layout.root)
            if file not in parsed:
                parsed[file] = _parse_file(file, location, problems)
            if (annotation := parsed[file]) is not None:
                folder, name = locators[key].locate(file, annotation.filename)
                image = ImageFile(folder, name, part.split_index, annotation.size)
                image_index = builder.add_image(image, location)
                for class_name, xyxy, number in annotation.objects:
                    builder.add_box(class_name, xyxy, number)
                builder.bad_boxes += [image_index] * annotation.num_bad_boxes
    if not builder.images:
        raise make_error(DataError, "voc-unreadable", layout.parts[0].annotations, cause=problems.describe())
    builder.drop_ambiguous_images(by_stem=True)
    reported = set(parsed)
    for part in layout.parts:  # images that have an annotation file and are in no list of a split
        for file in _iter_xml(part.annotations):
            if file not in reported:
                reported.add(file)
                folder, name = locators[part.annotations, part.image_dirs].locate(file, "")
                problems.add("not-in-a-split", os.path.relpath(folder / name, layout.root))
    return builder.build(sorted({str(box.label) for box in builder.boxes}), read_headers=False)


def _list_files(part: SplitFiles, root: Path, notes: list[str], problems: ProblemCollector) -> list[Path]:
    """Returns the XML files of a split: those in its list, in that order, else all of the folder by name."""
    if part.image_list is None:
        return list(_iter_xml(part.annotations))
    find = _make_finder(part.annotations)
    selected: dict[Path, None] = {}
    absent: list[tuple[int, str]] = []
    entries = _read_list(part.image_list)
    location = os.path.relpath(part.image_list, root)
    for number, entry in entries:
        if (file := find(entry)) is None:
            absent.append((number, entry))
        elif file in selected:
            problems.add("copied-entry", f"{location}:{number}: {entry}")
        else:
            selected[file] = None
    if part.split == "test" and not entries:
        problems.add("split-without-boxes", f"{location}: no images")
    elif part.split == "test" and not selected:
        notes.append(f"the test split has no annotations and is left out ({len(entries)} images)")
    elif not entries:
        raise make_error(DataError, "voc-empty-split", part.image_list, split=part.split)
    elif not selected:
        place, folder = f"{part.image_list}:{absent[0][0]}: {absent[0][1]!r}", part.annotations
        raise make_error(DataError, "voc-unannotated-split", place, split=part.split, folder=folder)
    else:
        for number, entry in absent:
            problems.add("no-annotation-file", f"{location}:{number}: {entry!r}")
    return list(selected)


def _parse_file(file: Path, location: str, problems: ProblemCollector) -> _Annotation | None:
    """Returns None, and adds a problem, for a file that cannot be read. location: its name in messages."""
    root: Element | None = None
    reason = ""
    try:
        root = ElementTree.fromstring(regular_files.read_bytes(file))
    except ElementTree.ParseError as error:
        reason = f":{error.position[0]}: not valid XML, {error}"
    except (ValueError, LookupError) as error:  # an encoding that Python's parser does not support
        reason = f":1: {error}; convert it to UTF-8"
    except OSError as error:
        reason = f": {error.strerror or error}"
    if root is None:
        problems.add("unreadable-annotations", f"{location}{reason}")
        return None
    if root.tag != "annotation":
        problems.add("foreign-file", f"{location}: its root is <{root.tag}>, not <annotation>")
        return None
    items, objects = root.findall("object"), []
    for number, item in enumerate(items, 1):
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
            objects.append((class_name, xyxy, number))
    size = usable_size(root.findtext("size/height"), root.findtext("size/width"))
    return _Annotation((root.findtext("filename") or "").strip(), size, objects, len(items) - len(objects))


def _parse_xyxy(box: Element) -> XYXY | str:
    """Returns the corners, or the reason why they cannot be read."""
    values = []
    for tag in ("xmin", "ymin", "xmax", "ymax"):
        text = box.findtext(tag)
        try:
            values.append(float(text or ""))
        except ValueError:
            return f"there is no <{tag}>" if text is None else f"<{tag}> is {text!r}, not a number"
    return values[0], values[1], values[2], values[3]


class VocWriter(DatasetWriter):
    """An XML file per image in `Annotations/`, images in `JPEGImages/`, splits in `ImageSets/Main/`. It has no order of
    classes, no class without a box and no crowd boxes. Corners are not shifted by one."""

    image_dir = "JPEGImages"
    single_image_dir = True
    supports_crowd = False

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        for name in target.class_names:
            if not name or name.strip() != name or not name.isprintable() or target.class_names.count(name) > 1:
                raise make_error(DataError, "voc-class-name", name=name)
        for directory in ("Annotations", "JPEGImages", "ImageSets/Main"):
            (target.folder / directory).mkdir(parents=True)
        self._stems: dict[str, list[str]] = {split: [] for split in target.max_images}
        self._used_labels: set[int] = set()

    def add(self, image: AnnotatedImage) -> None:
        def add_texts(parent: Element, **texts: object) -> None:
            for tag, text in texts.items():
                SubElement(parent, tag).text = str(text)

        stem, (height, width) = os.path.splitext(image.name)[0], image.size
        root = Element("annotation")
        add_texts(root, folder="JPEGImages", filename=image.name)
        add_texts(SubElement(root, "size"), width=width, height=height, depth=3)
        add_texts(root, segmented=0)
        for box, label in zip(image.boxes, image.labels.tolist(), strict=True):
            item = SubElement(root, "object")
            add_texts(item, name=self.class_names[label], pose="Unspecified", truncated=0, difficult=0)
            corners = zip(("xmin", "ymin", "xmax", "ymax"), map(shortest_decimal, box), strict=True)
            add_texts(SubElement(item, "bndbox"), **dict(corners))
            self._used_labels.add(label)
            if (box != np.rint(box)).any():
                self.notes["boxes are not in whole pixels; some readers of Pascal VOC need whole numbers"] += 1
        ElementTree.indent(root)
        (self.folder / "Annotations" / f"{stem}.xml").write_bytes(ElementTree.tostring(root, "utf-8") + b"\n")
        self._stems[image.split].append(stem)

    def finish(self) -> None:
        for split in self.written_splits:
            text = "".join(f"{stem}\n" for stem in self._stems[split])
            (self.folder / "ImageSets" / "Main" / f"{split}.txt").write_text(text, encoding="utf-8")
        if num_unused := len(self.class_names) - len(self._used_labels):
            self.notes["classes without a box are left out: Pascal VOC has no list of classes"] += num_unused
        if list(self.class_names) != sorted(self.class_names):
            self.notes["classes have no order in Pascal VOC: readers sort them by name"] += len(self._used_labels)
