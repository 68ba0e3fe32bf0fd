"""CVAT XML: the exports "CVAT for images 1.1" and "CVAT for video 1.1", one or more files of one or more tasks.

Boxes are read, and the boxes around polygons, masks, ellipses and rotated boxes. Points, lines, skeletons and cuboids
are not, and a note counts them. The frames of a video must be there as images: `images/frame_000000.png`.
Format: https://docs.cvat.ai/docs/manual/advanced/xml_format/.
"""

import os
import re
from functools import partial
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from stoker.data.formats.folders import layout_of_files, list_subdirs, read_head, recognize_files, split_from_name
from stoker.data.formats.images import ImageFile, ImageLocator, TableBuilder, is_usable_name
from stoker.data.formats.tables import (
    XYXY,
    AnnotationTable,
    DatasetLayout,
    SplitFiles,
    bound_points,
    bound_rotated,
    usable_size,
)
from stoker.data.validation.problems import ProblemCollector
from stoker_watch import regular_files
from stoker_watch.errors import DataError, make_error

SHAPES = ("box", "polygon", "mask", "ellipse")
"""Elements with a bounding box. The others of an image are counted, except tags, which are about the whole image."""


def is_cvat(head: bytes) -> bool:
    """Returns whether a file begins like CVAT's: its root is <annotations>, that of Pascal VOC is <annotation>."""
    return re.search(rb"<annotations[\s>]", head[:4096]) is not None


def recognize(path: Path) -> DatasetLayout | None:
    """The CVAT data set of a file, or of a folder, also in several subfolders with a task each; None if it is none."""
    layout = recognize_files(path, "cvat", "CVAT XML", ".xml", is_cvat)
    if layout is not None or path.is_file():
        return layout
    tasks = [(None, folder / "annotations.xml") for folder in list_subdirs(path).values()]
    tasks = [(split, file) for split, file in tasks if is_cvat(read_head(file))]
    return layout_of_files("cvat", "CVAT XML", path, tasks) if len(tasks) > 1 else None


def read(layout: DatasetLayout, problems: ProblemCollector) -> AnnotationTable:
    """Reads all files. Raises DataError if no image has annotations, or if a video's frames are not there."""
    builder = TableBuilder(layout, problems, box_id_kind="shape")
    for part in layout.parts:
        reader = _CvatReader(part, builder)
        reader.read()
        builder.notes += reader.locator.notes()
    builder.drop_ambiguous_images()
    return builder.build()


class _CvatReader:
    def __init__(self, part: SplitFiles, builder: TableBuilder) -> None:
        self.locator = ImageLocator(builder.layout.root, part)
        self._part, self._builder = part, builder
        self._location = os.path.relpath(part.annotations, builder.layout.root)

    def read(self) -> None:
        frames: dict[int, list[tuple[str, XYXY]]] = {}
        task_ids: set[str | None] = set()
        size = (0, 0)
        try:
            with regular_files.open_file(self._part.annotations, max_bytes=regular_files.MAX_ANNOTATION_BYTES) as file:
                for _, element in ElementTree.iterparse(file):
                    if element.tag == "original_size":
                        size = usable_size(element.findtext("height"), element.findtext("width"))
                    elif element.tag == "image":
                        self._read_image(element)
                        element.clear()
                    elif element.tag == "track":
                        self._read_track(element, frames)
                        task_ids.add(element.get("task_id"))
                        element.clear()
        except (ElementTree.ParseError, ValueError, LookupError) as error:  # the last two: unknown encodings
            line = error.position[0] if isinstance(error, ElementTree.ParseError) else 1
            location, fix = f"{self._part.annotations}:{line}", "export it again, as UTF-8"
            raise DataError("A file is not valid XML.", location=location, cause=str(error), fix=fix) from error
        if len(task_ids) > 1 and frames:
            raise make_error(DataError, "cvat-several-videos", self._part.annotations, num_task_ids=len(task_ids))
        self._add_frames(frames, size)

    def _read_image(self, image: Element) -> None:
        name, subset = image.get("name", ""), image.get("subset", "")
        location = f"{self._location}, image {name!r}"
        if not is_usable_name(name):
            self._builder.problems.add("malformed-image", f"{location}: not a file name")
            return
        folder, file_name = self.locator.find(subset and f"{subset}/{name}", name) or self.locator.locate(name)
        split_index = self.locator.split_index(self._part.split or split_from_name(subset), folder)
        size = usable_size(image.get("height"), image.get("width"))
        self._builder.add_image(ImageFile(folder, file_name, split_index, size), location)
        for number, shape in enumerate(image, 1):
            label = shape.get("label", "").strip()
            if shape.tag in SHAPES:
                place = f"{location}, shape {number}"
                self._builder.add_shape([label] if label else [], partial(_bound, shape), number, place)
            elif shape.tag not in ("tag", "track"):
                self._builder.skip_shape(str(shape.tag))
        if not len(image):
            self._builder.counts["image without shapes, used as background"] += 1

    def _read_track(self, track: Element, frames: dict[int, list[tuple[str, XYXY]]]) -> None:
        location = f"{self._location}, track {track.get('id')}"
        for number, shape in enumerate(track, 1):
            frame = shape.get("frame", "")
            if shape.get("outside") != "1" and frame.isdecimal() and len(frame) < 10:
                box = self._read_track_box(shape, f"{location}, shape {number}", track.get("label", "").strip())
                frames.setdefault(int(frame), []).extend([] if box is None else [box])

    def _read_track_box(self, shape: Element, location: str, label: str) -> tuple[str, XYXY] | None:
        """Returns class and box of a shape; None, and a problem or a count, if there is none."""
        kind, builder = str(shape.tag), self._builder
        if kind not in SHAPES:
            builder.counts[f"{kind}, which has no box and is not read"] += kind not in ("tag", "track")
            return None
        try:
            xyxy, described = _bound(shape)
        except ValueError as error:
            builder.problems.add("malformed-box", f"{location}: {error}")
            return None
        if not label:
            builder.problems.add("no-class", location)
            return None
        builder.counts[f"{described}: the box around it is used"] += bool(described)
        return label, xyxy

    def _add_frames(self, frames: dict[int, list[tuple[str, XYXY]]], size: tuple[int, int]) -> None:
        """Adds the images of a video's frames. Raises DataError if none is there."""
        num_found = 0
        for frame, boxes in sorted(frames.items()):
            folder, name = self.locator.locate(f"frame_{frame:06d}")  # its suffix is that of the file
            is_found = self.locator.exists(folder, name)
            num_found += is_found
            split_index = self.locator.split_index(None, folder)
            image = ImageFile(folder, name if is_found else f"{name}.png", split_index, size)
            self._builder.add_image(image, f"{self._location}, frame {frame}")
            for number, box in enumerate(boxes, 1):
                self._builder.add_box(*box, number)
        if frames and not num_found:
            raise make_error(DataError, "cvat-without-frames", self._part.annotations, frame=min(frames))


def _bound(shape: Element) -> tuple[XYXY, str]:
    """Returns the box around a shape, in pixels, and what the shape is, if not a box. Raises ValueError."""

    def numbers(*names: str) -> list[float]:
        absent = [name for name in names if name not in shape.attrib]
        if absent:
            raise ValueError(f"there is no {absent[0]}")
        return [float(shape.attrib[name]) for name in names]

    rotation = float(shape.get("rotation") or 0)
    if shape.tag == "polygon":
        points = [map(float, point.split(",")) for point in shape.get("points", "").split(";")]
        return bound_points([(x, y) for x, y in points]), "polygon"
    if shape.tag == "mask":
        x, y, width, height = numbers("left", "top", "width", "height")
        return (x, y, x + width, y + height), "mask"
    if shape.tag == "ellipse":
        x, y, x_radius, y_radius = numbers("cx", "cy", "rx", "ry")
        return bound_rotated((x, y), (2 * x_radius, 2 * y_radius), rotation), f"{'rotated ' * (rotation != 0)}ellipse"
    x1, y1, x2, y2 = numbers("xtl", "ytl", "xbr", "ybr")
    if rotation:
        return bound_rotated(((x1 + x2) / 2, (y1 + y2) / 2), (x2 - x1, y2 - y1), rotation), "rotated box"
    return (x1, y1, x2, y2), ""
