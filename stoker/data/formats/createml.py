"""CreateML JSON: files with a list of images, of Apple's Create ML, Turi Create and Roboflow.

Coordinates are the center, width and height of a box, from the upper left corner of the image, in pixels: the defaults
of Create ML, whose other choices (another anchor or origin) no file tells. They are fractions if most are within 0 … 1.
Format: https://developer.apple.com/documentation/createml/building-an-object-detector-data-source.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stoker.data.formats.folders import recognize_files
from stoker.data.formats.images import ImageLocator, TableBuilder, read_json
from stoker.data.formats.objects import ObjectBox, add_image, class_text, image_of
from stoker.data.formats.tables import AnnotationTable, DatasetLayout
from stoker.data.validation.problems import ProblemCollector

LIST_KEYS = ("annotations", "annotation")


def is_createml(head: bytes) -> bool:
    """Whether a file begins like CreateML's; its first images may have no annotations."""
    is_list = head.startswith(b"[") and re.match(rb'\[\s*\{\s*"(image|imagefilename|imageFilename)"\s*:', head)
    has_boxes = re.search(rb'"coordinates"|"annotations?"\s*:\s*\[\s*\]', head)
    return bool((is_list and has_boxes) or (head.startswith(b"[") and b'"coordinates"' in head))


def recognize(path: Path) -> DatasetLayout | None:
    """The CreateML data set of a file, or of a folder (not in subfolders) or its split folders; None if it is none."""
    return recognize_files(path, "createml", "CreateML JSON", ".json", is_createml)


def read(layout: DatasetLayout, problems: ProblemCollector) -> AnnotationTable:
    """Reads all files. Raises DataError if no image has annotations, or if a file is not JSON."""
    builder = TableBuilder(layout, problems, box_id_kind="object")
    for part in layout.parts:
        locator, first_box = ImageLocator(layout.root, part), len(builder.boxes)
        file = os.path.relpath(part.annotations, layout.root)
        entries = read_json(part.annotations, list[dict[str, Any]], what="The file is not CreateML JSON.")
        for number, entry in enumerate(entries, 1):
            location = f"{file}, image {number}"
            objects = next((entry[key] for key in LIST_KEYS if isinstance(entry.get(key), list)), None)
            if objects is None:
                problems.add("unreadable-annotations", f"{location}: it has no list of annotations")
                continue
            boxes = [_read_object(item, k) for k, item in enumerate(objects, 1)]
            add_image(builder, locator, location, image_of(entry), boxes, part.split)
        builder.detect_units(part.annotations, first_box)
        builder.notes += locator.notes()
    builder.drop_ambiguous_images()
    return builder.build()


def _read_object(item: Any, number: int) -> ObjectBox:
    xyxy = label = None
    try:
        x, y, width, height = (float(item["coordinates"][key]) for key in ("x", "y", "width", "height"))
        xyxy = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
    except (KeyError, TypeError, ValueError):
        pass
    if isinstance(item, Mapping):
        label = class_text(item.get("label"))
    return ObjectBox(number, label, xyxy, False, False, False, str(item)[:60])
