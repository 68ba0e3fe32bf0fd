"""Files with a JSON object for each image and its annotations: lines (`*.jsonl`, manifests), and CreateML's lists.

Read are SageMaker Ground Truth and Rekognition (`output.manifest`), COCO-like lines and `metadata.jsonl` of the Hugging
Face hub, Vertex AI, Azure Machine Learning and Open-GroundingDINO. What a line has is understood as in shards
(`objects.py`). Images in buckets are found by the last parts of their URI. CreateML (Apple, Turi Create, Roboflow) has
the center, width and height of a box, in pixels from the upper left corner: the defaults of Create ML, whose other
choices no file tells; fractions if most are within 0 … 1. Formats:
https://docs.aws.amazon.com/sagemaker/latest/dg/sms-data-output.html, https://huggingface.co/docs/datasets/image_dataset,
https://developer.apple.com/documentation/createml/building-an-object-detector-data-source.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from stoker.data.formats.folders import recognize_files
from stoker.data.formats.images import TableBuilder, read_json
from stoker.data.formats.objects import Entry, UnknownLayout, read_files
from stoker.data.formats.tables import AnnotationTable, DatasetLayout
from stoker.data.validation.problems import ProblemCollector
from stoker_watch import regular_files

SUFFIXES = (".jsonl", ".ndjson", ".manifest")
_LINE = re.compile(
    rb'\{.*"source-ref"|\{(?=.*"(file_name|filename|image|image_path|img_path|image_url|imageGcsUri)")'
    rb'(?=.*"(bbox|bboxes|boxes|objects|annotations|instances|detection|boundingBoxAnnotations|label"\s*:\s*\[\s*\{))'
)
"""Keys of an image and of boxes; a label that is not a list of objects is the class of the whole image."""
_CREATEML = re.compile(
    rb'\[(?=.*"coordinates")|\[\s*\{\s*"(image|image[fF]ilename)"\s*:[^{]*"annotations?"\s*:\s*\[', re.DOTALL
)


def is_jsonl(head: bytes) -> bool:
    """Returns whether a file has lines that name images and boxes."""
    return head.startswith(b"{") and any(map(_LINE.match, head.splitlines()[:100]))


def is_createml(head: bytes) -> bool:
    """Returns whether a file begins like a list of CreateML; its first images may have no annotations."""
    return _CREATEML.match(head) is not None


_KINDS = {"jsonl": ("JSON lines", SUFFIXES, is_jsonl), "createml": ("CreateML JSON", (".json",), is_createml)}


def recognize(path: Path, format: str = "jsonl") -> DatasetLayout | None:
    """Returns the data set of a file, or of a folder (not in subfolders) or its split folders; None if it is none.
    format: "jsonl" or "createml"."""
    return recognize_files(path, format, *_KINDS[format])


def read(layout: DatasetLayout, problems: ProblemCollector) -> AnnotationTable:
    """Reads all files. Raises DataError if no image has annotations that are understood, or if a list is not JSON."""
    return read_files(layout, problems, _iter_lines if layout.format == "jsonl" else _iter_list)


def _iter_list(path: Path, _builder: TableBuilder) -> Iterator[Entry]:
    entries = read_json(path, list[dict[str, Any]], what="The file is not CreateML JSON.")
    return ((f", image {number}", entry) for number, entry in enumerate(entries, 1))


def _iter_lines(path: Path, builder: TableBuilder) -> Iterator[Entry]:
    with regular_files.open_file(path, max_bytes=regular_files.MAX_ANNOTATION_BYTES) as lines:
        for number, line in enumerate(lines, 1):
            if not (text := line.removeprefix(b"\xef\xbb\xbf").strip()):
                continue
            try:
                entry: Any = msgspec.json.decode(text)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                entry = UnknownLayout(f"it is not JSON: {error}")
            if isinstance(entry, dict) and "source-ref" in entry:
                entry = _labels_of_sagemaker(entry, builder)
            if entry is not None:
                yield f":{number}", entry


def _labels_of_sagemaker(entry: dict[str, Any], builder: TableBuilder) -> dict[str, Any] | None:
    """Returns image, size and annotations of a line; None, and a count, if its image was not labeled."""
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
