"""VIA (VGG Image Annotator 1 and 2): projects, and exports as JSON and CSV.

Rectangles are read, and the boxes around polygons, polylines, circles and ellipses; points are not, and a note counts
them. The class of a region is one of its attributes: that with a name such as "class" or "label", else the only one
that has values; if no attribute has a value, its name is the class. Format: https://www.robots.ox.ac.uk/~vgg/software/via/.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from stoker.data.formats.csv import COLUMNS, NO_CLASS_COLUMN, read_text
from stoker.data.formats.folders import recognize_files
from stoker.data.formats.images import (
    XYXY,
    ImageFile,
    ImageLocator,
    TableBuilder,
    bound_points,
    is_usable_name,
    read_json,
)
from stoker.data.formats.openimages import iter_csv
from stoker.data.formats.tables import AnnotationTable, DatasetLayout
from stoker.data.validation.problems import ProblemCollector, make_error
from stoker.errors import DataError

_HEAD = re.compile(rb'"(_via_\w+|shape_attributes|file_attributes)"|^#?filename[,;\t].*region_shape_attributes')
CSV_COLUMNS = ("filename", "region_shape_attributes", "region_attributes")


class _Image(NamedTuple):
    location: str
    name: str
    regions: list[Any]
    """Objects with shape_attributes and region_attributes."""


def is_via(head: bytes) -> bool:
    """Whether a file begins like VIA's."""
    return _HEAD.search(head) is not None


def recognize(path: Path) -> DatasetLayout | None:
    """The VIA data set of a file, or of a folder (not in subfolders) or its split folders; None if it is none. JSON is
    preferred to CSV: people export both."""
    suffixes = (".json", ".csv") if path.is_dir() else (path.suffix.lower(),)
    layouts = (recognize_files(path, "via", "VIA", suffix, is_via) for suffix in suffixes)
    return next((layout for layout in layouts if layout is not None), None)


def read(layout: DatasetLayout, problems: ProblemCollector) -> AnnotationTable:
    """Reads all files. Raises DataError if no image can be read, if a file is neither JSON nor a table, or if it is
    unclear which attribute is the class."""
    builder = TableBuilder(layout, problems, box_id_kind="region")
    images = {part: list(_iter_images(part.annotations, layout.root, problems)) for part in layout.parts}
    label_of = _choose_class([region for own in images.values() for image in own for region in image.regions], builder)
    for part, own in images.items():
        locator = ImageLocator(layout.root, part)
        for image in own:
            folder, name = locator.locate(image.name)
            builder.add_image(ImageFile(folder, name, locator.split_index(part.split, folder)), image.location)
            for number, region in enumerate(image.regions, 1):
                _read_region(region, number, label_of, f"{image.location}, region {number}", builder)
            builder.counts["image without regions, used as background"] += not image.regions
        builder.notes += locator.notes()
    builder.drop_ambiguous_images()
    return builder.build()


def _iter_images(file: Path, root: Path, problems: ProblemCollector) -> Iterator[_Image]:
    location = os.path.relpath(file, root)
    if file.suffix.lower() == ".csv":
        entries = _read_csv(file, location, problems)
    else:
        content = read_json(file, dict[str, Any], what="The file is not a project or an export of VIA.")
        metadata = content.get("_via_img_metadata", content)
        entries = metadata if isinstance(metadata, dict) else {}
    for key, entry in entries.items():
        place = f"{location}, image {key!r}"
        name = entry.get("filename") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not is_usable_name(name):
            problems.add("malformed-image", f"{place}: it has no file name")
            continue
        regions = entry.get("regions", [])
        regions = list(regions.values()) if isinstance(regions, dict) else regions  # VIA 1 numbers them
        if isinstance(regions, list):
            yield _Image(place, name, regions)
        else:
            problems.add("unreadable-annotations", f"{place}: its regions are not a list")


def _read_csv(file: Path, location: str, problems: ProblemCollector) -> dict[str, Any]:
    """The images of a table, as in JSON."""
    text = read_text(file)
    first = text.partition("\n")[0]
    rows = iter_csv(text.splitlines(keepends=True), file, max(",;\t", key=first.count))
    header = [name.strip().lstrip("#") for name in next(rows, (1, [""]))[1]]
    if not set(CSV_COLUMNS) <= set(header):
        cause = f"its columns are {', '.join(header)}"
        raise DataError("The table is not an export of VIA.", location=f"{file}:1", cause=cause, fix="export it again")
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
    """The content of a cell; None if it is not JSON."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return None


def _read_region(region: Any, number: int, label_of: "_ClassKey", location: str, builder: TableBuilder) -> None:
    shape = region.get("shape_attributes") if isinstance(region, dict) else None
    kind = str(shape.get("name")) if isinstance(shape, dict) else ""
    if not isinstance(shape, dict):
        builder.drop_box("malformed-box", f"{location}: it has no shape")
        return
    if kind == "point":
        builder.skip_shape(kind)
        return
    try:
        xyxy = _bound(kind, shape)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"there is no {error}" if isinstance(error, KeyError) else error
        builder.drop_box("malformed-box", f"{location}: {kind}: {reason}")
        return
    labels = label_of.labels(region)
    if not labels:
        builder.drop_box("no-class", location)
        return
    builder.counts[f"{kind}: the box around it is used"] += kind != "rect"
    for label in labels:
        builder.add_box(label, xyxy, number)


def _bound(kind: str, shape: Mapping[str, Any]) -> XYXY:
    """The box around a shape, in pixels. Raises KeyError, TypeError or ValueError."""
    if kind == "rect":
        x, y, width, height = (float(shape[key]) for key in ("x", "y", "width", "height"))
        return x, y, x + width, y + height
    if kind in ("circle", "ellipse"):
        x, y = float(shape["cx"]), float(shape["cy"])
        x_radius, y_radius = (float(shape[key]) for key in (("r", "r") if kind == "circle" else ("rx", "ry")))
        cos, sin = (function(float(shape.get("theta") or 0)) for function in (math.cos, math.sin))  # radians
        half_width, half_height = math.hypot(x_radius * cos, y_radius * sin), math.hypot(x_radius * sin, y_radius * cos)
        return x - half_width, y - half_height, x + half_width, y + half_height
    if kind in ("polygon", "polyline"):
        points = zip(shape["all_points_x"], shape["all_points_y"], strict=True)
        return bound_points([(float(x), float(y)) for x, y in points])
    raise ValueError("not a shape of VIA")


class _ClassKey(NamedTuple):
    """What the class of a region is."""

    key: str | None
    """The attribute; None: the names of the attributes are classes."""
    default: str | None = None
    """The class of all regions, if they have no attributes."""

    def labels(self, region: Any) -> list[str]:
        """The classes of a region; of checkboxes, each that is set."""
        if self.default is not None:
            return [self.default]
        attributes = _attributes(region)
        return list(attributes) if self.key is None else _values(attributes.get(self.key))


def _attributes(region: Any) -> dict[str, Any]:
    found = region.get("region_attributes") if isinstance(region, dict) else None
    return {name.strip(): value for name, value in found.items()} if isinstance(found, dict) else {}


def _values(value: Any) -> list[str]:
    """The texts of an attribute: one, or the checkboxes that are set."""
    if isinstance(value, dict):
        return [str(name) for name, is_set in value.items() if is_set]
    return [] if value is None else [text] if (text := str(value).strip()) else []


def _choose_class(regions: list[Any], builder: TableBuilder) -> _ClassKey:
    """Raises DataError if several attributes could be the class."""
    names: Counter[str] = Counter()
    with_value: Counter[str] = Counter()
    for attributes in map(_attributes, regions):
        names.update(attributes.keys())
        with_value.update(name for name, value in attributes.items() if _values(value))
    if not names:
        builder.notes.append(f"no region has attributes: the class of all is {NO_CLASS_COLUMN!r}")
        return _ClassKey(None, NO_CLASS_COLUMN)
    if not with_value:
        builder.notes.append(f"no attribute has a value: their names are the classes, {', '.join(sorted(names)[:8])}")
        return _ClassKey(None)
    by_word = {re.sub(r"[^a-z0-9]", "", name.lower()): name for name in reversed(with_value)}
    key = next((by_word[word] for word in COLUMNS.label if word in by_word), None)
    if key is None and len(with_value) > 1:
        raise make_error(DataError, "via-unclear-class", builder.location(), choices=list(with_value))
    key = key or next(iter(with_value))
    others = f"; not used: {', '.join(sorted(names.keys() - {key})[:8])}" if len(names) > 1 else ""
    builder.notes.append(f"the class is the region attribute {key!r}{others}")
    return _ClassKey(key)
