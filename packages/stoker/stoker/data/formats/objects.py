"""How images are annotated in JSON where no standard says it: the layouts of `LAYOUTS`, with sources in docs/data.md.

Used for the samples of shards (`shards.py`) and for files with a JSON object per image (`jsonl.py`).
`read_boxes` reads the boxes of an image, `read_files` whole files.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from stoker.data.formats.folders import split_from_name
from stoker.data.formats.images import Box, ImageFile, ImageLocator, TableBuilder, is_usable_name
from stoker.data.formats.tables import AnnotationTable, DatasetLayout, usable_size
from stoker.data.validation.problems import ProblemCollector
from stoker_watch.errors import DataError, make_error

Entry = tuple[str, Any]
"""Place in a file, for messages, and the object there, which is about an image, or UnknownLayout if it is not JSON."""
MIN_FRACTION_OUTSIDE, MIN_FRACTION_CORNERS = 0.05, 0.99
"""Boxes are taken for corners if more than the first fraction of them would otherwise reach out of their images, and
more than the second are valid corners: as x, y, width and height, boxes near the right and lower edges are not."""


def corners_note(size: NDArray[np.float64], xyxy: NDArray[np.float64]) -> str | None:
    """Returns a note if boxes [K, 4] that were given as x, y, width and height, in images of height and width `size`
    [K, 2], are corners, contrary to COCO: many would reach out of their images. Else None."""
    if not len(size):
        return None
    x1, y1, x2, y2 = xyxy.T
    height, width = size[:, 0] + 1, size[:, 1] + 1
    reaches_out = (x2 > width) | (y2 > height)
    right, bottom = x2 - x1, y2 - y1
    are_corners = (right > x1) & (bottom > y1) & (right <= width) & (bottom <= height)
    if not (reaches_out.mean() > MIN_FRACTION_OUTSIDE and are_corners.mean() > MIN_FRACTION_CORNERS):
        return None
    part = f"{100 * reaches_out.mean():.0f} %"
    return f"bbox are corners (x1, y1, x2, y2): read as x, y, width and height, {part} would reach out of their images"


def correct_corners(table: AnnotationTable) -> None:
    """Corrects boxes that were given as x, y, width and height and are corners; a note tells it."""
    sizes = table.original_size[table.image_index].astype(np.float64)
    known = (sizes > 0).all(1)
    if (note := corners_note(sizes[known], table.boxes[known])) is not None:
        table.boxes[:, 2:] -= table.boxes[:, :2]
        table.notes.append(note)


LAYOUTS = (
    'a list of COCO annotations: [{"bbox": [x, y, width, height], "category_id": 3}, …]',
    '{"annotations": [the same]}, also as "objects" or "instances"',
    '{"objects": {"bbox": [[x, y, width, height], …], "category": [3, …]}}',
    '{"bboxes": [[x, y, width, height], …], "labels": [3, …]}',
    '{"boxes": [[x1, y1, x2, y2], …], "labels": [3, …]}',
    'rows of Open Images: [{"LabelName": "/m/01g317", "XMin": 0.1, "XMax": 0.4, "YMin": 0.2, "YMax": 0.9}, …]',
)
LIST_KEYS = ("annotations", "objects", "instances")
OTHER_LIST_KEYS = ("annotation", "boundingBoxAnnotations", "detection", "label")
"""Of files with a JSON object per image: Vertex AI, Open-GroundingDINO (corners), Azure."""
CORNERS_KEYS = ("boxes", "box")
"""Corners in pixels: x1, y1, x2, y2, as in torchvision."""
EXTENT_KEYS = ("bboxes", "bbox")
"""x, y, width and height in pixels, as in COCO and in the data sets of the Hugging Face hub."""
NAME_KEYS = ("category_name", "category", "class_name", "class", "label", "LabelName", "displayName", "name")
ID_KEYS = ("category_id", "class_id", "label_id")
CLASS_LIST_KEYS = ("labels", "categories", "category_ids", "classes", "class_ids", *NAME_KEYS, *ID_KEYS)
NAME_OF_FILE_KEYS = ("file_name", "filename")
NORMALIZED_CORNERS = (
    ("XMin", "YMin", "XMax", "YMax"),
    ("xMin", "yMin", "xMax", "yMax"),
    ("topX", "topY", "bottomX", "bottomY"),
)
"""Of Open Images, Vertex AI and Azure."""
CORNERS = (*NORMALIZED_CORNERS, ("xmin", "ymin", "xmax", "ymax"))
SAGEMAKER_KEYS = ("left", "top", "width", "height")
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
    """It was given under one of EXTENT_KEYS, by its width and height."""
    is_crowd: bool
    text: str
    """The start of its annotation, for messages."""


def read_boxes(content: Any) -> list[ObjectBox]:
    """Returns the boxes of a sample, from decoded JSON. Raises UnknownLayout."""
    if isinstance(content, Mapping):
        has_columns = any(key in content for key in (*CORNERS_KEYS, *EXTENT_KEYS))
        for key in (*LIST_KEYS, *OTHER_LIST_KEYS):
            value: Any = content.get(key)
            if key == "detection" and isinstance(value, Mapping) and _has_objects(rows := value.get("instances")):
                value = [{"bbox_mode": XYXY_ABS, **row} for row in rows]
            is_list = key in LIST_KEYS or _has_objects(value) or (not value and not has_columns)
            if isinstance(value, Mapping) or (isinstance(value, list) and is_list):
                return read_boxes(value)
        content = _rows_of_columns(content)
    if not isinstance(content, list) or not all(isinstance(item, Mapping) for item in content):
        raise UnknownLayout("it is not an object or a list of objects")
    return [_read_object(item, number) for number, item in enumerate(content, start=1)]


def _rows_of_columns(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns an object for each entry of equally long lists."""
    box_key = next((key for key in (*CORNERS_KEYS, *EXTENT_KEYS) if _is_list(content.get(key))), None)
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
    label = next((text for key in (*NAME_KEYS, *ID_KEYS) if (text := class_text(item.get(key))) is not None), None)
    is_crowd = any(str(item.get(key)).lower() in ("1", "true") for key in ("iscrowd", "isCrowd", "IsGroupOf"))
    corner_keys = next((keys for keys in CORNERS if all(key in item for key in keys)), None)
    box_key = next((key for key in (*EXTENT_KEYS, *CORNERS_KEYS) if key in item), None)
    is_normalized = corner_keys in NORMALIZED_CORNERS
    is_extent = has_extent = False
    if corner_keys is not None and (is_normalized or box_key is None):
        values: Any = [item[key] for key in corner_keys]
    elif box_key is None and isinstance(item.get("coordinates"), Mapping):
        values, has_extent = _corner_and_size(item["coordinates"]), True
    elif box_key is None and all(key in item for key in SAGEMAKER_KEYS):
        values, has_extent = [item[key] for key in SAGEMAKER_KEYS], True
    elif box_key is None:
        raise UnknownLayout(f"its objects have the keys {_list_keys(item)}: no box")
    else:
        values, mode = item[box_key], item.get("bbox_mode", XYWH_ABS)
        if box_key in EXTENT_KEYS and mode not in (XYXY_ABS, XYWH_ABS):
            raise UnknownLayout(f"bbox_mode is {mode!r}; 0 (corners) and 1 (x, y, width, height) are read")
        has_extent = box_key in EXTENT_KEYS and mode == XYWH_ABS
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


IMAGE_KEYS = (
    *NAME_OF_FILE_KEYS, "image", "imagefilename", "imageFilename", "image_path", "img_path", "image_url", "imageGcsUri",
    "source-ref", "img", "path", "name",
)  # fmt: skip


def _image_of(entry: Mapping[str, Any]) -> tuple[str, tuple[int, int]]:
    """Returns path, and height and width, of the image that an object of a file is about; empty and 0 where it does not
    tell. The path of a URI is that in its bucket."""
    value = next((entry[key] for key in IMAGE_KEYS if isinstance(entry.get(key), str | Mapping)), "")
    size = usable_size(entry.get("height"), entry.get("width"))
    if isinstance(value, Mapping):
        path, own_size = _image_of(value)
        return path, own_size if 0 in size else size
    if "://" in value:
        value = unquote(re.split(r"[?#]", value.partition("://")[2])[0]).partition("/")[2]
    return value, size


def read_files(
    layout: DatasetLayout, problems: ProblemCollector, iter_entries: Callable[[Path, TableBuilder], Iterable[Entry]]
) -> AnnotationTable:
    """Reads files with an object per image. Raises DataError if no entry has annotations that are understood."""
    builder, unknown, only_extents = TableBuilder(layout, problems, box_id_kind="object"), list[str](), True
    for part in layout.parts:
        locator, first_box = ImageLocator(layout.root, part), len(builder.boxes)
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
            only_extents &= all(box.is_extent for box in boxes)
            name, size = _image_of(entry)
            if not is_usable_name(name):
                problems.add("malformed-image", f"{location}: it names no image")
                continue
            vertex_ai = entry.get("dataItemResourceLabels")
            word = vertex_ai.get("aiplatform.googleapis.com/ml_use") if isinstance(vertex_ai, Mapping) else None
            folder, name = locator.locate(name)
            split_index = locator.split_index(part.split or split_from_name(str(word)), folder)
            index = builder.add_image(ImageFile(folder, name, split_index, size), location)
            for box in boxes:
                if box.xyxy is None or box.label is None:
                    kind = "malformed-box" if box.xyxy is None else "no-class"
                    builder.drop_box(kind, f"{location}, object {box.number}: {box.text}")
                else:
                    builder.boxes.append(Box(index, box.label, box.xyxy, box.number, box.is_normalized, box.is_crowd))
        builder.detect_units(part.annotations, first_box)
        builder.notes += locator.notes()
    if unknown and not builder.images:
        raise make_error(DataError, "unknown-layout", builder.location(), choices=LAYOUTS, cause=unknown[0])
    builder.drop_ambiguous_images()
    table = builder.build()
    if only_extents:
        correct_corners(table)
    return table
