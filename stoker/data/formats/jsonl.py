"""JSON lines: a JSON object per line with an image and its annotations, as `*.jsonl` or a manifest.

Read are SageMaker Ground Truth and Rekognition (`output.manifest`), COCO-like lines and `metadata.jsonl` of the Hugging
Face hub, Vertex AI, Azure Machine Learning and Open-GroundingDINO. What a line has is understood as in shards
(`objects.py`). Images in buckets are found by the last parts of their URI. Formats:
https://docs.aws.amazon.com/sagemaker/latest/dg/sms-data-output.html, https://huggingface.co/docs/datasets/image_dataset.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from stoker import regular_files
from stoker.data.formats.folders import recognize_files, split_from_name
from stoker.data.formats.images import ImageLocator, TableBuilder
from stoker.data.formats.objects import (
    LAYOUTS,
    UnknownLayout,
    add_image,
    corners_note,
    fraction_outside,
    image_of,
    read_boxes,
)
from stoker.data.formats.tables import AnnotationTable, DatasetLayout
from stoker.data.validation.problems import ProblemCollector
from stoker.errors import DataError

SUFFIXES = (".jsonl", ".ndjson", ".manifest")
_LINE = re.compile(
    rb'\{.*"source-ref"|\{(?=.*"(file_name|filename|image|image_path|img_path|image_url|imageGcsUri)")'
    rb'(?=.*"(bbox|bboxes|boxes|objects|annotations|instances|detection|boundingBoxAnnotations|label"\s*:\s*\[\s*\{))'
)
"""Keys of an image and of boxes; a label that is not a list of objects is the class of the whole image."""


def is_jsonl(head: bytes) -> bool:
    """Whether a file has lines that name images and boxes."""
    return head.startswith(b"{") and any(map(_LINE.match, head.splitlines()[:100]))


def recognize(path: Path) -> DatasetLayout | None:
    """The data set of a file, or of a folder (not in subfolders) or its split folders; None if it is none."""
    return recognize_files(path, "jsonl", "JSON lines", SUFFIXES, is_jsonl)


def read(layout: DatasetLayout, problems: ProblemCollector) -> AnnotationTable:
    """Reads all files. Raises DataError if no line has annotations that are understood."""
    builder, unknown = TableBuilder(layout, problems, box_id_kind="object"), list[str]()
    only_extents = True
    for part in layout.parts:
        locator, first_box = ImageLocator(layout.root, part), len(builder.boxes)
        file = os.path.relpath(part.annotations, layout.root)
        with regular_files.open_file(part.annotations, max_bytes=regular_files.MAX_ANNOTATION_BYTES) as lines:
            for number, line in enumerate(lines, 1):
                location, text = f"{file}:{number}", line.removeprefix(b"\xef\xbb\xbf").strip()
                try:
                    entry = _decode(text, builder) if text else None
                    boxes = [] if entry is None else read_boxes(entry)
                except UnknownLayout as error:
                    unknown += [f"{location}: {error}"]
                    problems.add("unreadable-annotations", unknown[-1])
                    continue
                if entry is not None:
                    only_extents &= all(box.is_extent for box in boxes)
                    split = part.split or _split_of_vertex_ai(entry)
                    add_image(builder, locator, location, image_of(entry), boxes, split)
        builder.detect_units(part.annotations, first_box)
        builder.notes += locator.notes()
    if unknown and not builder.images:
        what, fix = "No line has annotations that are understood.", "write one of them, or convert the data set to COCO"
        raise DataError(what, location=builder.location(), cause=unknown[0], choices=LAYOUTS, fix=fix)
    builder.drop_ambiguous_images()
    table = builder.build()
    size = table.original_size[table.image_index].astype(np.float64)
    known = (size > 0).all(1)
    if only_extents and (fraction := fraction_outside(size[known], table.boxes[known])):
        table.boxes[:, 2:] -= table.boxes[:, :2]
        table.notes.append(corners_note(fraction))
    return table


def _decode(text: bytes, builder: TableBuilder) -> dict[str, Any] | None:
    """The object of a line; None, and a count, for an image of a manifest that was not labeled. Raises
    UnknownLayout."""
    try:
        entry = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UnknownLayout(f"it is not a JSON object: {error}") from error
    if "source-ref" not in entry:
        return entry
    jobs = [key for key in entry if isinstance(entry[key], Mapping) and isinstance(entry[key].get("annotations"), list)]
    if not jobs:
        builder.counts["line without annotations, which is left out"] += 1
        return None
    if len(jobs) > 1:
        builder.counts[f"line with {len(jobs)} label attributes: the last, {jobs[-1]}, is used"] += 1
    content, metadata = entry[jobs[-1]], entry.get(f"{jobs[-1]}-metadata")
    class_map = metadata.get("class-map") if isinstance(metadata, Mapping) else None
    rows = [row for row in content["annotations"] if isinstance(row, Mapping)]
    if isinstance(class_map, Mapping):  # a class that is not in it has no name
        rows = [{**row, "class": class_map.get(str(row.get("class_id"))), "class_id": None} for row in rows]
    sizes = content.get("image_size")
    size = sizes[0] if isinstance(sizes, list) and sizes and isinstance(sizes[0], Mapping) else {}
    return {**size, "source-ref": entry["source-ref"], "annotations": rows}


def _split_of_vertex_ai(entry: Mapping[str, Any]) -> str | None:
    labels = entry.get("dataItemResourceLabels")
    return split_from_name(str(labels.get("aiplatform.googleapis.com/ml_use"))) if isinstance(labels, Mapping) else None
