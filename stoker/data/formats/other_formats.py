"""Recognizes data sets in formats that stoker does not read, by names and first bytes, to tell how to convert them.

The commands of panlabel 0.7 were run on small data sets, except those for Labelbox and Unity Perception; those of
Datumaro, FiftyOne, Supervisely and Ultralytics are from their documentation. Used for error messages, and by
`coco_files.py`, because many tools have "annotations" in their JSON. Not here: the formats that are read (`detect.py`).
"""

import json
import os
import re
import shlex
from collections.abc import Iterator
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from stoker.data.formats.annotated_dirs import MAX_PROBES, read_head
from stoker.data.formats.tables import MAX_SEARCHED_DIRS

DATUMARO = "pip install datumaro; datum convert -i {data} -f coco_instances -o {data}-coco -- --save-media"
FIFTYONE = (
    "fiftyone convert --input-dir {{data}} --input-type fiftyone.types.{} --output-dir {{data}}-coco"
    " --output-type fiftyone.types.COCODetectionDataset"
)
SUPERVISELY = "pip install supervisely; python -c 'from supervisely import convert; convert.to_coco(*{paths})'"
ULTRALYTICS = "python -c 'from ultralytics.data.converter import convert_dota_to_yolo_obb as c; c(*{paths}[:1])'"


class OtherFormat(NamedTuple):
    """A row of the table."""

    name: str
    pattern: str
    """Of a file in lower case, with the folder that contains it."""
    first_bytes: bytes | None
    """A regular expression that must match in the first bytes of the file; None: the name is enough."""
    fix: str
    """A command that converts it, or what else to do. {data} is the data set's folder, {file} the file that was found,
    {folder} its folder, {parent} the one above, {out} a JSON file in {data}."""


def _panlabel(name: str, source: str = "file") -> str:
    """source: what panlabel takes: "file", "folder", "parent" or "data"."""
    return f"pip install panlabel; panlabel convert --from {name} --to coco -i {{{source}}} -o {{out}} --allow-lossy"


OTHER_FORMATS = (
    OtherFormat("COCO results", "*/*.json", rb'^\[\s*\{[^{]*"score"\s*:', "name annotations, not results"),
    OtherFormat("CVAT backup", "*/*.json", rb'^\[\s*\{"version"[^"]*"tags"', 'export "CVAT for images 1.1"'),
    OtherFormat("CreateML JSON", "*/*.json", rb'^\[.*"coordinates"', _panlabel("create-ml")),
    OtherFormat("Supervisely", "*/*.json", rb'"(classTitle|geometryType)"', SUPERVISELY),
    OtherFormat("VIA JSON (VGG Image Annotator)", "*/*.json", rb'"(_via_\w+|shape_attributes)"', _panlabel("via")),
    OtherFormat("VIA CSV (VGG Image Annotator)", "*/*.csv", rb"region_shape_attributes", _panlabel("via-csv")),
    OtherFormat("BDD100K", "*/*.json", rb'"box2d"', _panlabel("bdd100k")),
    OtherFormat("Cityscapes", "*/*.json", rb'"imgHeight"', _panlabel("cityscapes", "data")),
    OtherFormat("Datumaro JSON", "*/*.json", rb'"dm_format_version"|"categories"\s*:\s*\{\s*"l', _panlabel("datumaro")),
    OtherFormat("V7 Darwin JSON", "*/*.json", rb'"schema_ref"[^"]*"[^"]*darwin', _panlabel("v7-darwin")),
    OtherFormat("VoTT JSON", "*/*.json", rb'"assets"\s*:\s*\{[^{]*\{\s*"asset"', _panlabel("vott-json")),
    OtherFormat("Labelbox", "*/*json", rb'"data_row"', _panlabel("labelbox")),
    OtherFormat("SageMaker Ground Truth", "*/*.manifest", rb'"source-ref"', _panlabel("sagemaker")),
    OtherFormat("Unity Perception", "*/captures_*.json", None, _panlabel("unity-perception", "data")),
    OtherFormat("FiftyOne", "*/samples.json", rb'"filepath"', FIFTYONE.format("FiftyOneDataset")),
    OtherFormat("FiftyOne", "*/labels.json", rb'"bounding_box"', FIFTYONE.format("FiftyOneImageDetectionDataset")),
    OtherFormat("Hugging Face metadata", "*/metadata.jsonl", None, _panlabel("hf", "folder")),
    OtherFormat(
        "Hugging Face Parquet", "*/*.parquet", None,
        "with the package `datasets`, save the images and a metadata.jsonl (file_name, objects); then "
        + _panlabel("hf", "data"),
    ),
    OtherFormat("KITTI", "label*/*.txt", rb"^[A-Za-z_]+( -?[\d.]+){14}", _panlabel("kitti", "parent")),
    OtherFormat(
        "OIDv4_ToolKit", "label/*.txt", rb"^[A-Z][A-Za-z ]*( [\d.]+){4}",
        "name the folder that contains csv_folder/ and Dataset/: it is read as Open Images",
    ),
    OtherFormat("WIDER FACE", "*/*bbx_gt*.txt", None, DATUMARO),
    OtherFormat("MOT", "gt/gt.txt", None, DATUMARO),
    OtherFormat("DOTA", "labeltxt*/*.txt", None, ULTRALYTICS),
    OtherFormat("YOLOv4 PyTorch", "*/_annotations.txt", None, _panlabel("yolov4-pytorch")),
    OtherFormat(
        "Roboflow multi-label classification", "*/_classes.csv", None,
        "export an object detection project: this one has classes of whole images, no boxes",
    ),
    OtherFormat("Pascal VOC masks", "segmentationobject/*.png", None, DATUMARO),
    OtherFormat(
        "segmentation masks", "segmentationclass/*.png", None,
        "export boxes, or a mask per object: masks of classes do not tell objects apart",
    ),
    OtherFormat(
        "YOLO labels without images", "*/*.txt", rb"^\d+( [\d.]+){4}\s",
        "put the images into images/, and these files into labels/, with the same names",
    ),
)  # fmt: skip
"""In the order in which they are tried on a file."""


def recognize_file(file: Path, head: bytes) -> OtherFormat | None:
    """The format of a file, from its name and its first bytes."""
    name = f"{file.parent.name}/{file.name}".lower()
    candidates = (row for row in OTHER_FORMATS if fnmatch(name, row.pattern))
    return next((row for row in candidates if re.search(row.first_bytes or b"", head, re.DOTALL)), None)


def recognize(data: Path) -> tuple[str, Path, str] | None:
    """(format, a file of it, how to convert) of a file or folder; None if no format is recognized."""
    for file in [data] if data.is_file() else _iter_files(data):
        if (row := recognize_file(file, read_head(file))) is not None:
            return row.name, file, _fill_in(row.fix, file, data if data.is_dir() else data.parent)
    return None


def _fill_in(fix: str, file: Path, data: Path) -> str:
    out_name = f"{file.stem}.coco.json" if file.parent == data else f"{file.parent.name}-{file.stem}.coco.json"
    places = {"data": data, "file": file, "folder": file.parent, "parent": file.parent.parent, "out": data / out_name}
    return fix.format(
        **{name: shlex.quote(str(path)) for name, path in places.items()}, paths=json.dumps([str(data), f"{data}-coco"])
    )


def _iter_files(folder: Path) -> Iterator[Path]:
    """The first few files of each suffix, of the folder and those below it."""
    for path, folders, names in islice(os.walk(folder), MAX_SEARCHED_DIRS):
        folders.sort()
        seen: dict[str, int] = {}
        for name in sorted(names):
            suffix = os.path.splitext(name)[1].lower()
            seen[suffix] = seen.get(suffix, 0) + 1
            if seen[suffix] <= MAX_PROBES:
                yield Path(path, name)
