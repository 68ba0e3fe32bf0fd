"""VIA (VGG Image Annotator 1 and 2): projects, and exports as JSON and CSV.

Rectangles are read, and the boxes around polygons, polylines, circles and ellipses; points are not, and a note counts
them. The class of a region is one of its attributes: that with a name such as "class" or "label", else the only one
that has values; if no attribute has a value, its name is the class. Format: https://www.robots.ox.ac.uk/~vgg/software/via/.
"""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from stoker.data.formats.csv import COLUMNS, NO_CLASS_COLUMN, read_text
from stoker.data.formats.folders import recognize_files
from stoker.data.formats.images import ImageFile, ImageLocator, TableBuilder, is_usable_name, read_json
from stoker.data.formats.openimages import iter_csv
from stoker.data.formats.tables import XYXY, AnnotationTable, DatasetLayout, bound_points
from stoker.data.validation.problems import ProblemCollector
from stoker_watch.errors import DataError, make_error

_HEAD = re.compile(rb'"(_via_\w+|shape_attributes|file_attributes)"|^#?filename[,;\t].*region_shape_attributes')
CSV_COLUMNS = ("filename", "region_shape_attributes", "region_attributes")


def is_via(head: bytes) -> bool:
    return _HEAD.search(head) is not None


def recognize(path: Path) -> DatasetLayout | None:
    """Returns the VIA data set of a file, or of a folder (not in subfolders) or its split folders; None if it is none.
    JSON is preferred to CSV: people export both."""
    suffixes = (".json", ".csv") if path.is_dir() else (path.suffix.lower(),)
    layouts = (recognize_files(path, "via", "VIA", suffix, is_via) for suffix in suffixes)
    return next((layout for layout in layouts if layout is not None), None)


def read(layout: DatasetLayout, problems: ProblemCollector) -> AnnotationTable:
    """Reads all files. Raises DataError if no image can be read, if a file is neither JSON nor a table, or if it is
    unclear which attribute is the class."""
    builder = TableBuilder(layout, problems, box_id_kind="region")
    images = [(part, image) for part in layout.parts for image in _iter_images(part.annotations, builder)]
    labels_of = _choose_class([region for _, (_, _, regions) in images for region in regions], builder)
    locators = {part: ImageLocator(layout.root, part) for part in layout.parts}
    for part, (location, written, regions) in images:
        folder, name = locators[part].locate(written)
        builder.add_image(ImageFile(folder, name, locators[part].split_index(part.split, folder)), location)
        builder.counts["image without regions, used as background"] += not regions
        for number, region in enumerate(regions, 1):
            shape = region.get("shape_attributes") if isinstance(region, dict) else None
            kind = str(shape.get("name")) if isinstance(shape, dict) else "no shape"
            if kind == "point":
                builder.skip_shape(kind)
            else:
                place = f"{location}, region {number}: {kind}"
                builder.add_shape(labels_of(region), partial(_bound, kind, shape or {}), number, place)
    builder.notes += [note for locator in locators.values() for note in locator.notes()]
    builder.drop_ambiguous_images()
    return builder.build()


def _iter_images(file: Path, builder: TableBuilder) -> Iterator[tuple[str, str, list[Any]]]:
    """Yields (location, file name, regions with shape_attributes and region_attributes) of the images of a file."""
    location = os.path.relpath(file, builder.layout.root)
    if file.suffix.lower() == ".csv":
        entries = _read_csv(file, location, builder.problems)
    else:
        content = read_json(file, dict[str, Any], what="The file is not a project or an export of VIA.")
        metadata = content.get("_via_img_metadata", content)
        entries = metadata if isinstance(metadata, dict) else {}
    for key, entry in entries.items():
        name, regions = (entry.get("filename"), entry.get("regions", [])) if isinstance(entry, dict) else ("", [])
        regions = list(regions.values()) if isinstance(regions, dict) else regions  # VIA 1 numbers them
        if isinstance(name, str) and is_usable_name(name) and isinstance(regions, list):
            yield f"{location}, image {key!r}", name, regions
        else:
            builder.problems.add("malformed-image", f"{location}, image {key!r}: no file name, or no list of regions")


def _read_csv(file: Path, location: str, problems: ProblemCollector) -> dict[str, Any]:
    """Returns the images of a table, as in JSON."""
    text = read_text(file)
    first = text.partition("\n")[0]
    rows = iter_csv(text.splitlines(keepends=True), file, max(",;\t", key=first.count))
    header = [name.strip().lstrip("#") for name in next(rows, (1, [""]))[1]]
    if not set(CSV_COLUMNS) <= set(header):
        raise make_error(DataError, "via-other-table", f"{file}:1", listed=", ".join(header))
    columns = [header.index(name) for name in CSV_COLUMNS]
    images: dict[str, Any] = {}
    for line, row in rows:
        if len(row) <= max(columns):
            problems.add("malformed-row", f"{location}:{line}: too few columns")
            continue
        name, shape, attributes = (row[column] for column in columns)
        regions = images.setdefault(name, {"filename": name, "regions": []})["regions"]
        if shape.strip() not in ("", "{}"):
            regions.append({"shape_attributes": _decode(shape), "region_attributes": _decode(attributes)})
    return images


def _decode(text: str) -> Any:
    """Returns the content of a cell; None if it is not JSON."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return None


def _bound(kind: str, shape: Mapping[str, Any]) -> tuple[XYXY, str]:
    """The box around a shape, in pixels, and what it is, if not a box. Raises KeyError, TypeError or ValueError."""
    if kind == "rect":
        x, y, width, height = (float(shape[key]) for key in ("x", "y", "width", "height"))
        return (x, y, x + width, y + height), ""
    if kind in ("circle", "ellipse"):
        x, y = float(shape["cx"]), float(shape["cy"])
        x_radius, y_radius = (float(shape[key]) for key in (("r", "r") if kind == "circle" else ("rx", "ry")))
        cos, sin = (function(float(shape.get("theta") or 0)) for function in (math.cos, math.sin))  # radians
        half_width, half_height = math.hypot(x_radius * cos, y_radius * sin), math.hypot(x_radius * sin, y_radius * cos)
        return (x - half_width, y - half_height, x + half_width, y + half_height), kind
    if kind in ("polygon", "polyline"):
        points = zip(shape["all_points_x"], shape["all_points_y"], strict=True)
        return bound_points([(float(x), float(y)) for x, y in points]), kind
    raise ValueError("not a shape of VIA")


def _attributes(region: Any) -> dict[str, Any]:
    found = region.get("region_attributes") if isinstance(region, dict) else None
    return {name.strip(): value for name, value in found.items()} if isinstance(found, dict) else {}


def _values(value: Any) -> list[str]:
    """Returns the texts of an attribute: one, or the checkboxes that are set."""
    if isinstance(value, dict):
        return [str(name) for name, is_set in value.items() if is_set]
    return [text] if value is not None and (text := str(value).strip()) else []


def _choose_class(regions: list[Any], builder: TableBuilder) -> Callable[[Any], list[str]]:
    """What gives the classes of a region; a note says it. Raises DataError if several attributes could be the class."""
    all_attributes = [_attributes(region) for region in regions]
    names = dict.fromkeys(name for attributes in all_attributes for name in attributes)
    with_value = [name for name in names if any(_values(attributes.get(name)) for attributes in all_attributes)]
    if not names:
        builder.notes.append(f"no region has attributes: the class of all is {NO_CLASS_COLUMN!r}")
        return lambda _region: [NO_CLASS_COLUMN]
    if not with_value:
        builder.notes.append(f"no attribute has a value: their names are the classes, {', '.join(list(names)[:8])}")
        return lambda region: list(_attributes(region))
    by_word = {re.sub(r"[^a-z0-9]", "", name.lower()): name for name in reversed(with_value)}
    named = next((by_word[word] for word in COLUMNS.label if word in by_word), None)
    if named is None and len(with_value) > 1:
        raise make_error(DataError, "via-unclear-class", builder.location(), choices=with_value)
    key = named or with_value[0]
    others = ", ".join([name for name in names if name != key][:8])
    builder.notes.append(f"the class is the region attribute {key!r}" + (f"; not used: {others}" if others else ""))
    return lambda region: _values(_attributes(region).get(key))
