"""LabelMe JSON: one file per image, as LabelMe, AnyLabeling and X-AnyLabeling write it.

Rectangles are read, and the boxes around polygons, circles, masks and rotated boxes. Points and lines are not, and a
note counts them. The image of a file is its `imagePath`, else the image with its own name; `imageData` is not used.
Format: https://github.com/wkentaro/labelme.
"""

import math
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from stoker.data.formats.folders import iter_annotation_files, recognize_files
from stoker.data.formats.images import ImageFile, ImageLocator, TableBuilder, is_usable_name, map_in_threads, read_json
from stoker.data.formats.tables import XYXY, AnnotationTable, DatasetLayout, bound_points, usable_size
from stoker.data.validation.problems import ProblemCollector
from stoker_watch.errors import DataError

WITHOUT_BOX = ("point", "points", "line", "linestrip", "lines")
"""Types of shapes that are not read."""


class _Shape(msgspec.Struct):
    label: str | int | None = None
    points: list[tuple[float, float]] = []
    shape_type: str | None = None


class _LabelMeFile(msgspec.Struct):
    """What is read of a file; the rest is skipped, also the image that it may contain."""

    shapes: list[_Shape]
    image_path: str | None = msgspec.field(name="imagePath", default=None)
    height: Any = msgspec.field(name="imageHeight", default=None)
    width: Any = msgspec.field(name="imageWidth", default=None)


def recognize(folder: Path) -> DatasetLayout | None:
    """Returns the LabelMe data set in a folder (not in subfolders), or None."""
    return recognize_files(folder, "labelme", "LabelMe JSON", ".json", is_labelme, file_per_image=True)


def is_labelme(head: bytes) -> bool:
    has_shapes = re.search(rb'"shapes"\s*:\s*\[', head) is not None
    has_points = any(key in head for key in (b'"imagePath"', b'"shape_type"', b'"points"'))
    return head.startswith(b"{") and ((has_shapes and has_points) or re.search(rb'"imageData"\s*:', head) is not None)


def read(layout: DatasetLayout, problems: ProblemCollector) -> AnnotationTable:
    """Reads all files. Raises DataError if none can be read."""
    builder = TableBuilder(layout, problems, box_id_kind="shape")
    for part in layout.parts:
        locator = ImageLocator(layout.root, part)
        files = [Path(path) for path in iter_annotation_files(part.annotations, (".json",))]
        for file, content in zip(files, map_in_threads(_parse, files), strict=True):
            location = os.path.relpath(file, layout.root)
            if isinstance(content, str):
                problems.add("unreadable-annotations", f"{location}: {content}")
                continue
            # imagePath may be of another machine, or of a file that was renamed
            text = content.image_path if content.image_path and is_usable_name(content.image_path) else ""
            found = locator.find(text, file.stem, folder=file.parent)  # without a suffix: that of the image is found
            folder, name = found or locator.locate(text or f"{file.stem}.jpg", file.parent)
            split_index = locator.split_index(part.split or locator.split_from_folder(file.parent), folder)
            size = usable_size(content.height, content.width)
            builder.add_image(ImageFile(folder, name, split_index, size), location)
            for number, shape in enumerate(content.shapes, 1):
                kind = shape.shape_type or "polygon"  # files before LabelMe 3 have only polygons
                label = str("" if shape.label is None else shape.label).strip()
                if kind in WITHOUT_BOX:
                    builder.skip_shape(kind)
                else:
                    labels, bound = [label] if label else [], partial(_bound, kind, shape.points)
                    builder.add_shape(labels, bound, number, f"{location}, shape {number}")
        builder.notes += locator.notes()
    builder.drop_ambiguous_images()
    return builder.build()


def _parse(file: Path) -> _LabelMeFile | str:
    """Returns the content of a file, or the reason why it cannot be read."""
    try:
        return read_json(file, _LabelMeFile, what="not a file of LabelMe")
    except DataError as error:
        return f"{error.what}: {error.cause}"
    except OSError as error:
        return error.strerror or str(error)


def _bound(kind: str, points: list[tuple[float, float]]) -> tuple[XYXY, str]:
    """Returns the box around a shape, and what it is, if not a box. A circle has its center and a point on it."""
    if len(points) < 2:
        raise ValueError(f"{kind} with {len(points)} points")
    if kind != "circle":
        return bound_points(points), "" if kind == "rectangle" else kind
    (x, y), radius = points[0], math.dist(points[0], points[1])
    return (x - radius, y - radius, x + radius, y + radius), kind
