"""CreateML JSON: files with a list of images, of Apple's Create ML, Turi Create and Roboflow.

Coordinates are the center, width and height of a box, from the upper left corner of the image, in pixels: the defaults
of Create ML, whose other choices (another anchor or origin) no file tells. They are fractions if most are within 0 … 1.
Format: https://developer.apple.com/documentation/createml/building-an-object-detector-data-source.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stoker.data.formats.folders import recognize_files
from stoker.data.formats.images import TableBuilder, read_json
from stoker.data.formats.objects import Entry, read_files
from stoker.data.formats.tables import AnnotationTable, DatasetLayout
from stoker.data.validation.problems import ProblemCollector

_HEAD = re.compile(
    rb'\[(?=.*"coordinates")|\[\s*\{\s*"(image|image[fF]ilename)"\s*:[^{]*"annotations?"\s*:\s*\[', re.DOTALL
)


def is_createml(head: bytes) -> bool:
    """Returns whether a file begins like CreateML's; its first images may have no annotations."""
    return _HEAD.match(head) is not None


def recognize(path: Path) -> DatasetLayout | None:
    """The CreateML data set of a file, or of a folder (not in subfolders) or its split folders; None if it is none."""
    return recognize_files(path, "createml", "CreateML JSON", ".json", is_createml)


def read(layout: DatasetLayout, problems: ProblemCollector) -> AnnotationTable:
    """Reads all files. Raises DataError if no image has annotations, or if a file is not JSON."""
    return read_files(layout, problems, _iter_images)


def _iter_images(path: Path, _builder: TableBuilder) -> Iterator[Entry]:
    entries = read_json(path, list[dict[str, Any]], what="The file is not CreateML JSON.")
    return ((f", image {number}", entry) for number, entry in enumerate(entries, 1))
