"""How images are annotated in JSON where no standard says it: the layouts of `LAYOUTS`, with sources in docs/data.md.

Used for the samples of shards (`shards.py`) and for files with a JSON object per image (`jsonl.py`, `createml.py`).
`read_boxes` reads the boxes of an image, `read_files` whole files.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard
from urllib.parse import unquote

import msgspec

from stoker.data.formats.folders import split_from_name
from stoker.data.formats.images import Box, ImageFile, ImageLocator, TableBuilder, is_usable_name, read_parts
from stoker.data.formats.tables import AnnotationTable, DatasetLayout, SplitFiles, usable_size
from stoker.data.validation.problems import ProblemCollector
from stoker_watch.errors import DataError, make_error

Entry = tuple[str, Any]
"""Place in a file, for messages, and the object there, which is about an image, or UnknownLayout if it is not JSON."""


class _Keys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `object_keys.toml`, which says what the fields mean."""

    layouts: tuple[str, ...]
    lists: tuple[str, ...]
    other_lists: tuple[str, ...]
    corners: tuple[str, ...]
    extents: tuple[str, ...]
    class_names: tuple[str, ...]
    class_ids: tuple[str, ...]
    class_lists: tuple[str, ...]
    image_names: tuple[str, ...]
    images: tuple[str, ...]
    normalized_sides: tuple[tuple[str, ...], ...]
    pixel_sides: tuple[str, ...]
    sagemaker: tuple[str, ...]


_TEXT = (resources.files("stoker.data.formats") / "object_keys.toml").read_text(encoding="utf-8")
KEYS = msgspec.toml.decode(_TEXT, type=_Keys)
LAYOUTS, CLASS_LIST_KEYS = KEYS.layouts, (*KEYS.class_lists, *KEYS.class_names, *KEYS.class_ids)
XYXY_ABS, XYWH_ABS = 0, 1
"""`bbox_mode` of detectron2 (structures/boxes.py)."""


class UnknownLayout(Exception):
    """The annotations have none of LAYOUTS; the message says what they have."""


class ObjectBox(NamedTuple):
    number: int
    """Of the object in the sample, from 1."""
    label: str | None
    """Name or number of the class; None: there is none."""
    xyxy: tuple[float, float, float, float] | None
    """None: it cannot be read."""
    is_normalized: bool
    is_extent: bool
    """It was given under one of `KEYS.extents`, by its width and height."""
    is_crowd: bool
    text: str
    """The start of its annotation, for messages."""


def read_boxes(content: Any) -> list[ObjectBox]:
    """Returns the boxes of a sample, from decoded JSON. Raises UnknownLayout."""
    if isinstance(content, Mapping):
        has_columns = any(key in content for key in (*KEYS.corners, *KEYS.extents))
        for key in (*KEYS.lists, *KEYS.other_lists):
            value: Any = content.get(key)
            if key == "detection" and isinstance(value, Mapping) and _has_objects(rows := value.get("instances")):
                value = [{"bbox_mode": XYXY_ABS, **row} for row in rows]
            is_list = key in KEYS.lists or _has_objects(value) or (not value and not has_columns)
            if isinstance(value, Mapping) or (isinstance(value, list) and is_list):
                return read_boxes(value)
        content = _rows_of_columns(content)
    if not isinstance(content, list) or not all(isinstance(item, Mapping) for item in content):
        raise UnknownLayout("it is not an object or a list of objects")
    return [_read_object(item, number) for number, item in enumerate(content, start=1)]


def _rows_of_columns(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns an object for each entry of equally long lists."""
    box_key = next((key for key in (*KEYS.corners, *KEYS.extents) if _is_list(content.get(key))), None)
    class_key = next((key for key in CLASS_LIST_KEYS if _is_list(content.get(key))), None)
    if box_key is None or class_key is None:
        raise UnknownLayout(f"it has the keys {_list_keys(content)}: no list of boxes with a list of classes")
    boxes, labels = content[box_key], content[class_key]
    if len(boxes) != len(labels):
        raise UnknownLayout(f"{box_key} has {len(boxes):,} entries, {class_key} has {len(labels):,}")
    crowd = content.get("iscrowd", content.get("is_crowd"))
    if not isinstance(crowd, list) or len(crowd) != len(boxes):
        crowd = [False] * len(boxes)
    rows = zip(boxes, labels, crowd, strict=True)
    return [{box_key: box, "label": label, "iscrowd": is_crowd} for box, label, is_crowd in rows]


def _read_object(item: Mapping[str, Any], number: int) -> ObjectBox:
    labels = (class_text(item.get(key)) for key in (*KEYS.class_names, *KEYS.class_ids))
    label = next((text for text in labels if text is not None), None)
    is_crowd = any(str(item.get(key)).lower() in ("1", "true") for key in ("iscrowd", "isCrowd", "IsGroupOf"))
    all_sides = (*KEYS.normalized_sides, KEYS.pixel_sides)
    corner_keys = next((keys for keys in all_sides if all(key in item for key in keys)), None)
    box_key = next((key for key in (*KEYS.extents, *KEYS.corners) if key in item), None)
    is_normalized = corner_keys in KEYS.normalized_sides
    is_extent = has_extent = False
    if corner_keys is not None and (is_normalized or box_key is None):
        values: Any = [item[key] for key in corner_keys]
    elif box_key is None and isinstance(item.get("coordinates"), Mapping):
        values, has_extent = _corner_and_size(item["coordinates"]), True
    elif box_key is None and all(key in item for key in KEYS.sagemaker):
        values, has_extent = [item[key] for key in KEYS.sagemaker], True
    elif box_key is None:
        raise UnknownLayout(f"its objects have the keys {_list_keys(item)}: no box")
    else:
        values, mode = item[box_key], item.get("bbox_mode", XYWH_ABS)
        if box_key in KEYS.extents and mode not in (XYXY_ABS, XYWH_ABS):
            raise UnknownLayout(f"bbox_mode is {mode!r}; 0 (corners) and 1 (x, y, width, height) are read")
        has_extent = box_key in KEYS.extents and mode == XYWH_ABS
        is_extent = has_extent and "bbox_mode" not in item
    xyxy = _to_corners(values, is_extent=has_extent)
    return ObjectBox(number, label, xyxy, is_normalized, is_extent, is_crowd, str(item)[:60])


def _corner_and_size(center: Mapping[str, Any]) -> Any:
    """Returns the upper left corner, width and height of CreateML's coordinates; None if they cannot be read."""
    try:
        x, y, width, height = (float(center[key]) for key in ("x", "y", "width", "height"))
    except (KeyError, TypeError, ValueError):
        return None
    return x - width / 2, y - height / 2, width, height


def _to_corners(values: Any, *, is_extent: bool) -> tuple[float, float, float, float] | None:
    if not _is_list(values) or len(values) != 4:
        return None
    try:
        a, b, c, d = (float(value) for value in values)
    except (TypeError, ValueError):
        return None
    return (a, b, a + c, b + d) if is_extent else (a, b, c, d)


def class_text(value: Any) -> str | None:
    if isinstance(value, bool) or value is None or value == "":
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value) if isinstance(value, str | int) else None


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _list_keys(item: Mapping[str, Any]) -> str:
    keys = [repr(str(key)[:40]) for key in item]
    return ", ".join(keys[:10]) + (", …" if len(keys) > 10 else "") if keys else "none"


def _has_objects(value: Any) -> TypeGuard[list[Mapping[str, Any]]]:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _image_of(entry: Mapping[str, Any]) -> tuple[str, tuple[int, int]]:
    """Returns path, and height and width, of the image that an object of a file is about; empty and 0 where it does not
    tell. The path of a URI is that in its bucket."""
    values = (entry.get(key) for key in (*KEYS.image_names, *KEYS.images))
    value: Any = next((value for value in values if isinstance(value, str | Mapping)), "")
    size = usable_size(entry.get("height"), entry.get("width"))
    if isinstance(value, Mapping):
        path, own_size = _image_of(value)
        return path, own_size if 0 in size else size
    if "://" in value:
        value = unquote(re.split(r"[?#]", value.partition("://")[2])[0]).partition("/")[2]
    return value, size


def usable_boxes(found: Iterable[ObjectBox], place: str, drop_box: Callable[[str, str], None]) -> Iterator[Box]:
    """Yields the boxes that can be used, and drops the others. place: of their image, for messages."""
    for box in found:
        if box.xyxy is None or box.label is None:
            drop_box("malformed-box" if box.xyxy is None else "no-class", f"{place}, object {box.number}: {box.text}")
        else:
            yield Box(box.label, box.xyxy, box.number, box.is_normalized, box.is_crowd, box.is_extent)


def read_files(
    layout: DatasetLayout, problems: ProblemCollector, iter_entries: Callable[[Path, TableBuilder], Iterable[Entry]]
) -> AnnotationTable:
    """Reads files with an object per image. Raises DataError if no entry has annotations that are understood."""
    unknown: list[str] = []

    def read_part(part: SplitFiles, locator: ImageLocator, builder: TableBuilder) -> None:
        found: list[tuple[ImageFile, Box]] = []
        for place, entry in iter_entries(part.annotations, builder):
            location = os.path.relpath(part.annotations, layout.root) + place
            try:
                if isinstance(entry, UnknownLayout):
                    raise entry
                boxes = read_boxes(entry)
            except UnknownLayout as error:
                unknown.append(f"{location}: {error}")
                problems.add("unreadable-annotations", unknown[-1])
                continue
            name, size = _image_of(entry)
            if not is_usable_name(name):
                problems.add("malformed-image", f"{location}: it names no image")
                continue
            vertex_ai = entry.get("dataItemResourceLabels")
            word = vertex_ai.get("aiplatform.googleapis.com/ml_use") if isinstance(vertex_ai, Mapping) else None
            split = part.split or split_from_name(str(word))
            image = builder.add_located(locator, [name], location, split=split, size=size)
            found += [(image, box) for box in usable_boxes(boxes, location, builder.drop_box)]
        builder.add_boxes(part.annotations, found)
        if unknown and not builder.images and part is layout.parts[-1]:
            raise make_error(DataError, "unknown-layout", builder.location(), choices=LAYOUTS, cause=unknown[0])

    return read_parts(layout, problems, read_part, box_id_kind="object")
