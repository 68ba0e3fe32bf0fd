"""The boxes of an image from the annotations next to it in a shard: JSON of a WebDataset sample, columns of MDS.

There is no standard, so what public data sets and their converters write is understood: `LAYOUTS`, with sources in
docs/data.md. Not here: finding the annotations in shards (`webdataset.py`, `mds.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

LAYOUTS = (
    'a list of COCO annotations: [{"bbox": [x, y, width, height], "category_id": 3}, …]',
    '{"annotations": [the same]}, also as "objects" or "instances"',
    '{"objects": {"bbox": [[x, y, width, height], …], "category": [3, …]}}',
    '{"bboxes": [[x, y, width, height], …], "labels": [3, …]}',
    '{"boxes": [[x1, y1, x2, y2], …], "labels": [3, …]}',
    'rows of Open Images: [{"LabelName": "/m/01g317", "XMin": 0.1, "XMax": 0.4, "YMin": 0.2, "YMax": 0.9}, …]',
)
LIST_KEYS = ("annotations", "objects", "instances")
CORNERS_KEYS = ("boxes", "box")
"""Corners in pixels: x1, y1, x2, y2, as in torchvision."""
EXTENT_KEYS = ("bboxes", "bbox")
"""x, y, width and height in pixels, as in COCO and in the data sets of the Hugging Face hub."""
NAME_KEYS = ("category_name", "category", "class_name", "class", "label", "LabelName", "name")
ID_KEYS = ("category_id", "class_id", "label_id")
CLASS_LIST_KEYS = ("labels", "categories", "category_ids", "classes", "class_ids", *NAME_KEYS, *ID_KEYS)
NAME_OF_FILE_KEYS = ("file_name", "filename")
OPEN_IMAGES_KEYS = ("XMin", "YMin", "XMax", "YMax")
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
    """The boxes of a sample, from decoded JSON. Raises UnknownLayout."""
    if isinstance(content, Mapping):
        for key in LIST_KEYS:
            value = content.get(key)
            if isinstance(value, list | Mapping):
                return read_boxes(value)
        return list(_read_columns(content))
    if not isinstance(content, list):
        raise UnknownLayout(f"it is {_describe(content)}, not an object or a list")
    boxes = []
    for number, item in enumerate(content, start=1):
        if not isinstance(item, Mapping):
            raise UnknownLayout(f"it is a list of {_describe(item)}, not of objects")
        boxes.append(_read_object(item, number))
    return boxes


def annotated_size(content: Any) -> tuple[int, int]:
    """Height and width that the annotations of a sample give; 0 where they do not."""
    if not isinstance(content, Mapping):
        return 0, 0
    height, width = content.get("height"), content.get("width")
    if isinstance(height, int) and isinstance(width, int) and 0 < height < 2**31 and 0 < width < 2**31:
        return height, width
    return 0, 0


def file_name(content: Any) -> str:
    """The name of the image file, without folders, that the annotations of a sample give; empty where they do not."""
    values = [content.get(key) for key in NAME_OF_FILE_KEYS] if isinstance(content, Mapping) else []
    text = next((value for value in values if isinstance(value, str)), "")
    name = text.replace("\\", "/").rpartition("/")[2].replace("\0", "")
    return "" if name in (".", "..") else name


def _read_columns(content: Mapping[str, Any]) -> Iterator[ObjectBox]:
    """Objects that are given as equally long lists."""
    box_key = next((key for key in (*CORNERS_KEYS, *EXTENT_KEYS) if _is_list(content.get(key))), None)
    class_key = next((key for key in CLASS_LIST_KEYS if _is_list(content.get(key))), None)
    if box_key is None or class_key is None:
        raise UnknownLayout(f"it has the keys {_list_keys(content)}: no list of boxes with a list of classes")
    boxes, labels = content[box_key], content[class_key]
    if len(boxes) != len(labels):
        raise UnknownLayout(f"{box_key} has {len(boxes):,} entries, {class_key} has {len(labels):,}")
    crowd = content.get("iscrowd", content.get("is_crowd"))
    for number, (box, label) in enumerate(zip(boxes, labels, strict=True), start=1):
        yield ObjectBox(
            number,
            _class_text(label),
            _to_corners(box, is_extent=box_key in EXTENT_KEYS),
            False,
            box_key in EXTENT_KEYS,
            isinstance(crowd, list) and len(crowd) == len(boxes) and bool(crowd[number - 1]),
            _shorten([box, label]),
        )


def _read_object(item: Mapping[str, Any], number: int) -> ObjectBox:
    label = next((text for key in (*NAME_KEYS, *ID_KEYS) if (text := _class_text(item.get(key))) is not None), None)
    is_crowd = bool(item.get("iscrowd")) or str(item.get("IsGroupOf")) == "1"
    text = _shorten(item)
    if all(key in item for key in OPEN_IMAGES_KEYS):
        xyxy = _to_corners([item[key] for key in OPEN_IMAGES_KEYS], is_extent=False)
        return ObjectBox(number, label, xyxy, True, False, is_crowd, text)
    for key in EXTENT_KEYS:
        if key in item:
            mode = item.get("bbox_mode", XYWH_ABS)
            if mode not in (XYXY_ABS, XYWH_ABS):
                raise UnknownLayout(f"bbox_mode is {mode!r}; 0 (corners) and 1 (x, y, width, height) are read")
            is_extent = mode == XYWH_ABS and "bbox_mode" not in item
            xyxy = _to_corners(item[key], is_extent=mode == XYWH_ABS)
            return ObjectBox(number, label, xyxy, False, is_extent, is_crowd, text)
    for key in CORNERS_KEYS:
        if key in item:
            return ObjectBox(number, label, _to_corners(item[key], is_extent=False), False, False, is_crowd, text)
    corner_keys = ("xmin", "ymin", "xmax", "ymax")
    if all(key in item for key in corner_keys):
        xyxy = _to_corners([item[key] for key in corner_keys], is_extent=False)
        return ObjectBox(number, label, xyxy, False, False, is_crowd, text)
    raise UnknownLayout(f"its objects have the keys {_list_keys(item)}: no box")


def _to_corners(values: Any, *, is_extent: bool) -> tuple[float, float, float, float] | None:
    if not _is_list(values) or len(values) != 4:
        return None
    try:
        a, b, c, d = (float(value) for value in values)
    except (TypeError, ValueError):
        return None
    return (a, b, a + c, b + d) if is_extent else (a, b, c, d)


def _class_text(value: Any) -> str | None:
    if isinstance(value, bool) or value is None or value == "":
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value) if isinstance(value, str | int) else None


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _describe(value: Any) -> str:
    kinds = {"str": "text", "NoneType": "null", "dict": "an object"}
    name = type(value).__name__
    return kinds.get(name, f"{name} values" if name in ("int", "float", "list") else name)


def _list_keys(item: Mapping[str, Any]) -> str:
    keys = [repr(str(key)[:40]) for key in item]
    return ", ".join(keys[:10]) + (", …" if len(keys) > 10 else "") if keys else "none"


def _shorten(item: Any) -> str:
    return str(item)[:60]
