"""CVAT XML: reads the exports "CVAT for images 1.1" and "CVAT for video 1.1", one or more files of one or more tasks.

Boxes are read, and the boxes around polygons, masks, ellipses and rotated boxes. Points, lines, skeletons and cuboids
are not, and a note counts them. The frames of a video must be there as images: `images/frame_000000.png`.
Format: https://docs.cvat.ai/docs/manual/advanced/xml_format/.
"""

import os
import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from stoker import regular_files
from stoker.data.formats.annotated_dirs import find_files, make_part, read_head, root_of
from stoker.data.formats.image_locator import ImageLocator, is_usable_name
from stoker.data.formats.table_builder import (
    XYXY,
    Box,
    Entry,
    ImageFile,
    bound_points,
    bound_rotated,
    build_from_entries,
)
from stoker.data.formats.tables import AnnotationTable, DatasetLayout, SplitFiles, list_subdirs, split_from_name
from stoker.data.validation.problems import ProblemCollector
from stoker.errors import DataError

XML_ERRORS = (ElementTree.ParseError, ValueError, LookupError)
"""Of Python's parser; the last two are for encodings that it does not support."""
SHAPES = ("box", "polygon", "mask", "ellipse")
"""Elements with a bounding box. The others of an image are counted, except tags, which are about the whole image."""


def is_cvat(head: bytes) -> bool:
    """Whether a file begins like CVAT's: its root is <annotations>, that of Pascal VOC is <annotation>."""
    return re.search(rb"<annotations[\s>]", head[:4096]) is not None


def find(folder: Path) -> DatasetLayout | None:
    """The CVAT data set in a folder, or in several subfolders with a task each; None if there is none."""
    files = find_files(folder, ".xml", is_cvat)
    if not files:
        tasks = [path / "annotations.xml" for path in list_subdirs(folder).values()]
        files = [(None, file) for file in tasks if is_cvat(read_head(file))]
        files = files if len(files) > 1 else []
    return _make_layout(folder, files) if files else None


def from_file(path: Path) -> DatasetLayout | None:
    """The data set of a single XML file; None if it is not CVAT's."""
    return _make_layout(root_of(path), [(split_from_name(path.stem), path)]) if is_cvat(read_head(path)) else None


def _make_layout(root: Path, files: list[tuple[str | None, Path]]) -> DatasetLayout:
    parts = tuple(make_part(split, file, root) for split, file in files)
    description = f"CVAT XML ({parts[0].annotations.name})" if len(parts) == 1 else f"CVAT XML, {len(parts)} files"
    return DatasetLayout(format="cvat", description=description, root=root, parts=parts)


def read(layout: DatasetLayout, problems: ProblemCollector) -> AnnotationTable:
    """Reads all files. Raises DataError if no image has annotations, or if a video's frames are not there."""
    notes, entries = list(layout.notes), []
    counts: Counter[str] = Counter()
    for part in layout.parts:
        reader = _FileReader(part, layout.root, problems, counts)
        entries += reader.read()
        notes += reader.locator.notes()
    notes += [f"{count:,} × {description}" for description, count in counts.items() if count]
    return build_from_entries(layout, entries, problems, box_id_kind="shape", notes=notes)


class _FileReader:
    def __init__(self, part: SplitFiles, root: Path, problems: ProblemCollector, counts: Counter[str]) -> None:
        self.locator = ImageLocator(root, part)
        self._part, self._problems, self._counts = part, problems, counts
        self._location = os.path.relpath(part.annotations, root)

    def read(self) -> list[Entry]:
        entries: list[Entry] = []
        frames: dict[int, list[Box]] = {}
        task_ids: set[str | None] = set()
        size = (0, 0)
        try:
            with regular_files.open_file(self._part.annotations, max_bytes=regular_files.MAX_ANNOTATION_BYTES) as file:
                for _, element in ElementTree.iterparse(file):
                    if element.tag == "original_size":
                        size = _parse_size(element.findtext("height"), element.findtext("width"))
                    elif element.tag == "image":
                        entries += self._read_image(element)
                        element.clear()
                    elif element.tag == "track":
                        self._read_track(element, frames)
                        task_ids.add(element.get("task_id"))
                        element.clear()
        except XML_ERRORS as error:
            line = error.position[0] if isinstance(error, ElementTree.ParseError) else 1
            location, fix = f"{self._part.annotations}:{line}", "export it again, as UTF-8"
            raise DataError("A file is not valid XML.", location=location, cause=str(error), fix=fix) from error
        if len(task_ids) > 1 and frames:
            cause, fix = f"the frames of its {len(task_ids)} tasks have the same numbers", "export each task on its own"
            raise DataError("A file has several videos.", location=self._part.annotations, cause=cause, fix=fix)
        return entries + self._locate_frames(frames, size)

    def _read_image(self, image: Element) -> list[Entry]:
        name, subset = image.get("name", ""), image.get("subset", "")
        location = f"{self._location}, image {name!r}"
        if not is_usable_name(name):
            self._problems.add("malformed-image", f"{location}: not a file name")
            return []
        read = [self._read_shape(shape, number, location, shape) for number, shape in enumerate(image, 1)]
        boxes = tuple(box for box in read if box is not None)
        if not len(image):
            self._counts["image without shapes, used as background"] += 1
        folder, file_name = self.locator.locate(f"{subset}/{name}" if subset else name)
        if not self.locator.exists(folder, file_name):
            folder, file_name = self.locator.locate(name)
        split_index = self.locator.split_index(self._part.split or split_from_name(subset), folder)
        size = _parse_size(image.get("height"), image.get("width"))
        num_bad_boxes = sum(shape.tag in SHAPES for shape in image) - len(boxes)
        return [Entry(ImageFile(folder, file_name, split_index, size), boxes, location, num_bad_boxes)]

    def _read_track(self, track: Element, frames: dict[int, list[Box]]) -> None:
        location = f"{self._location}, track {track.get('id')}"
        for number, shape in enumerate(track, 1):
            frame = shape.get("frame", "")
            if shape.get("outside") != "1" and frame.isdecimal() and len(frame) < 10:
                box = self._read_shape(shape, number, location, track)
                frames.setdefault(int(frame), []).extend([] if box is None else [box])

    def _read_shape(self, shape: Element, number: int, location: str, labeled: Element) -> Box | None:
        """The box of a shape; None, and a problem or a count, if there is none. labeled: the element with its label."""
        kind, label = str(shape.tag), labeled.get("label", "").strip()
        if kind not in SHAPES:
            self._counts[f"{kind}, which has no box and is not read"] += kind not in ("tag", "track")
            return None
        try:
            xyxy, is_rotated = _bound(shape)
        except ValueError as error:
            self._problems.add("malformed-box", f"{location}, shape {number}: {error}")
            return None
        if not label:
            self._problems.add("no-class", f"{location}, shape {number}")
            return None
        if is_rotated or kind != "box":
            self._counts[f"{'rotated ' * is_rotated}{kind}: the box around it is used"] += 1
        return Box(0, label, xyxy, number)

    def _locate_frames(self, frames: dict[int, list[Box]], size: tuple[int, int]) -> list[Entry]:
        """The images of a video's frames. Raises DataError if none is there."""
        entries, num_found = [], 0
        for frame, boxes in sorted(frames.items()):
            folder, name = self.locator.locate(f"frame_{frame:06d}")  # its suffix is that of the file
            is_found = self.locator.exists(folder, name)
            num_found += is_found
            image = ImageFile(folder, name if is_found else f"{name}.png", self.locator.split_index(None, folder), size)
            numbered = tuple(box._replace(box_id=number) for number, box in enumerate(boxes, 1))
            entries.append(Entry(image, numbered, f"{self._location}, frame {frame}"))
        if frames and not num_found:
            raise DataError(
                "The annotations are of a video, and its frames are not there as images.",
                location=self._part.annotations,
                cause=f"there is no frame_{min(frames):06d}.png or .jpg near the file",
                fix='export it with "Save images"; or extract the frames: ffmpeg -i VIDEO -vsync 0 -start_number 0'
                ' images/frame_%06d.png; or, if the task has images, export it as "CVAT for images 1.1"',
            )
        return entries


def _bound(shape: Element) -> tuple[XYXY, bool]:
    """The box around a shape, in pixels, and whether the shape is rotated. Raises ValueError."""

    def numbers(*names: str) -> list[float]:
        absent = [name for name in names if name not in shape.attrib]
        if absent:
            raise ValueError(f"there is no {absent[0]}")
        return [float(shape.attrib[name]) for name in names]

    rotation = float(shape.get("rotation") or 0)
    if shape.tag == "polygon":
        points = [map(float, point.split(",")) for point in shape.get("points", "").split(";")]
        return bound_points([(x, y) for x, y in points]), False
    if shape.tag == "mask":
        x, y, width, height = numbers("left", "top", "width", "height")
        return (x, y, x + width, y + height), False
    if shape.tag == "ellipse":
        x, y, x_radius, y_radius = numbers("cx", "cy", "rx", "ry")
        return bound_rotated((x, y), (2 * x_radius, 2 * y_radius), rotation), rotation != 0
    x1, y1, x2, y2 = numbers("xtl", "ytl", "xbr", "ybr")
    if rotation:
        return bound_rotated(((x1 + x2) / 2, (y1 + y2) / 2), (x2 - x1, y2 - y1), rotation), True
    return (x1, y1, x2, y2), False


def _parse_size(*texts: str | None) -> tuple[int, int]:
    """Height and width; 0, unknown, if they are not valid."""
    height, width = (int(text) if text is not None and text.isdecimal() and len(text) < 8 else 0 for text in texts)
    return (height, width) if height and width else (0, 0)
