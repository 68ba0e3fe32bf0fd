"""Label Studio JSON: the exports "JSON" and "JSON-MIN", one or more files.

Rectangles are read, and the boxes around polygons, ellipses and rotated rectangles; coordinates are percent of the
image size. Of several annotations of a task one is used: the ground truth, else the last that was not cancelled. Tasks
without annotations are left out, and predictions are not used. Images are found under the names that Label Studio gives
them: `/data/upload/1/1a2b3c4d-a.jpg`, `/data/local-files/?d=set/a.jpg`, `s3://bucket/set/a.jpg`.
Format: https://labelstud.io/guide/export#Label-Studio-JSON-format-of-annotated-tasks.
"""

import math
import os
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from stoker.data.formats.folders import is_image_name, recognize_files
from stoker.data.formats.images import ImageFile, ImageLocator, TableBuilder, is_usable_name, read_json
from stoker.data.formats.tables import XYXY, AnnotationTable, DatasetLayout, bound_points, bound_rotated, usable_size
from stoker.data.validation.problems import ProblemCollector

LABEL_KEYS = ("rectanglelabels", "polygonlabels", "ellipselabels", "labels")
"""Keys of a region's classes, where it has a box."""
WITHOUT_BOX = ("brush", "keypoint", "vector")
"""Kinds of regions that are not read."""
UPLOAD_PREFIX = re.compile(r"^[0-9a-f]{6,10}-")
"""What Label Studio puts before the name of an uploaded file."""


def is_label_studio(head: bytes) -> bool:
    has_results = b'"result"' in head and (b'"annotations"' in head or b'"completions"' in head)
    return head.startswith(b"[") and (has_results or any(b'"%s"' % key.encode() in head for key in LABEL_KEYS[:3]))


def recognize(path: Path) -> DatasetLayout | None:
    """Returns the Label Studio data set of a file, or of a folder (not in subfolders); None if it is none."""
    return recognize_files(path, "label-studio", "Label Studio JSON", ".json", is_label_studio)


def read(layout: DatasetLayout, problems: ProblemCollector) -> AnnotationTable:
    """Reads all files. Raises DataError if no task has annotations, or if a file is not JSON."""
    builder = TableBuilder(layout, problems, box_id_kind="region")
    for part in layout.parts:
        locator = ImageLocator(layout.root, part)
        file = os.path.relpath(part.annotations, layout.root)
        what = "The file is not an export of Label Studio."
        tasks = read_json(part.annotations, list[dict[str, Any]], what=what, fix='export it again, as "JSON"')
        for number, task in enumerate(tasks, 1):
            location = f"{file}, task {task.get('id', number)}"
            regions = _choose_regions(task, builder.counts)
            if regions is None:
                builder.counts["task without annotations, which is left out"] += 1
            elif (written := _image_of(task)) is None:
                problems.add("malformed-image", f"{location}: its data names no image")
            else:
                candidates = _candidate_paths(written)
                folder, name = locator.find(*candidates) or locator.locate(candidates[-1])
                sizes = {usable_size(item.get("original_height"), item.get("original_width")) for item in regions}
                known = sizes - {(0, 0)}
                size = known.pop() if len(known) == 1 else (0, 0)
                split_index = locator.split_index(part.split, folder)
                builder.add_image(ImageFile(folder, name, split_index, size), location)
                _read_regions(regions, size, location, builder)
        builder.notes += locator.notes()
    builder.drop_ambiguous_images()
    return builder.build()


def _read_regions(regions: list[dict[str, Any]], size: tuple[int, int], location: str, builder: TableBuilder) -> None:
    labeled_ids = {str(region.get("id")) for region in regions if _labels(region)}
    for number, region in enumerate(regions, 1):
        kind = str(region.get("type", "rectanglelabels")).removesuffix("labels") or "rectangle"
        labels = _labels(region)
        if kind in WITHOUT_BOX:
            builder.skip_shape(kind)
            continue
        if not labels and (kind != "rectangle" or str(region.get("id")) in labeled_ids):
            continue  # an attribute, or a region whose class is another entry with the same id
        place, bound = f"{location}, region {number}", partial(_bound, region, *size)
        builder.add_shape(labels, bound, number, place, is_normalized=not size[0])


def _choose_regions(task: dict[str, Any], counts: Counter[str]) -> list[dict[str, Any]] | None:
    """The regions of the annotation that is used, with geometry and classes as "value"; None if the task has none."""
    if "data" not in task:  # JSON-MIN: a list with the name of each control, whose regions have these themselves
        found = (region for regions in task.values() for region in _list_of_dicts(regions))
        return [region if isinstance(region.get("value"), dict) else {**region, "value": region} for region in found]
    annotations = _list_of_dicts(task.get("annotations") or task.get("completions"))
    finished = [item for item in annotations if not (item.get("was_cancelled") or item.get("skipped"))]
    if not finished:
        return None
    if len(finished) > 1:
        counts["task with several annotations: the ground truth, else the last, is used"] += 1
    chosen = ([item for item in finished if item.get("ground_truth")] or finished)[-1]
    return [item for item in _list_of_dicts(chosen.get("result")) if isinstance(item.get("value"), dict)]


def _list_of_dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _labels(region: dict[str, Any]) -> list[str]:
    """Returns the classes of a region; usually one."""
    found: Any = next((region["value"][key] for key in LABEL_KEYS if key in region["value"]), [])
    return [str(label) for label in found] if isinstance(found, list) else []


def _bound(region: dict[str, Any], height: int, width: int) -> tuple[XYXY, str]:
    """The box around a region, in pixels, or normalized if height and width are 0, and what it is, if not a box."""
    value = region["value"]
    x_scale, y_scale = (width or 1) / 100, (height or 1) / 100
    rotation = float(value.get("rotation") or 0)
    if region.get("image_rotation"):
        raise ValueError(f"it was drawn on the image rotated by {region['image_rotation']} degrees")
    if rotation and not height:
        raise ValueError("it is rotated, and there is no original_width or original_height")
    if "points" in value:
        return bound_points([(float(x) * x_scale, float(y) * y_scale) for x, y in value["points"]]), "polygon"
    x, y = float(value["x"]) * x_scale, float(value["y"]) * y_scale
    if "radiusX" in value:
        size = (2 * float(value["radiusX"]) * x_scale, 2 * float(value["radiusY"]) * y_scale)
        return bound_rotated((x, y), size, rotation), "ellipse"
    box_width, box_height = float(value["width"]) * x_scale, float(value["height"]) * y_scale
    if not rotation:
        return (x, y, x + box_width, y + box_height), ""
    # the rotation is about the upper left corner
    cos, sin = math.cos(math.radians(rotation)), math.sin(math.radians(rotation))
    center = (x + (box_width * cos - box_height * sin) / 2, y + (box_width * sin + box_height * cos) / 2)
    return bound_rotated(center, (box_width, box_height), rotation), "rotated rectangle"


def _image_of(task: dict[str, Any]) -> str | None:
    """The path or URL of a task's image: of its data, "image" or the first that names one; else the uploaded file."""
    data = task.get("data", task)
    data = data if isinstance(data, dict) else {}
    texts = [text for text in (data.get("image"), *data.values(), task.get("file_upload")) if isinstance(text, str)]
    paths = [(text, _candidate_paths(text)[0]) for text in texts if not text.startswith("data:")]
    return next((text for text, path in paths if is_image_name(path) and is_usable_name(path)), None)


def _candidate_paths(written: str) -> list[str]:
    """Returns the paths that an image may have here, the most likely first."""
    if (local := re.search(r"[?&]d=([^&]*)", written)) is not None:  # a file of a local storage
        path = unquote(local[1])
    elif re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", written):
        path = unquote(re.split(r"[?#]", written)[0])
    else:
        path = unquote(written).removeprefix("/data/")
    path = path.replace("\\", "/")
    name = path.rpartition("/")[2]
    return [path, f"media/{path}", name, UPLOAD_PREFIX.sub("", name)]
