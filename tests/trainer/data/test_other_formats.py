"""Data sets in formats that are not read: the error names the format, and a command that converts it."""

import json
from pathlib import Path
from typing import Any

import pytest

from stoker.data.formats.folders import format_texts
from stoker.data.index import open_index
from stoker_watch.errors import DataError
from tests.trainer.data.exports import save_images

SUPERVISELY = {
    "description": "", "tags": [], "size": {"height": 100, "width": 200},
    "objects": [{
        "id": 1, "classId": 5, "geometryType": "rectangle", "classTitle": "car", "tags": [],
        "points": {"exterior": [[10, 20], [60, 50]], "interior": []},
    }],
}  # fmt: skip
SUPERVISELY_META = {"classes": [{"title": "car", "shape": "rectangle", "color": "#FF0000"}], "tags": []}
DATUMARO = {
    "info": {}, "categories": {"label": {"labels": [{"name": "car", "parent": "", "attributes": []}]}},
    "items": [{
        "id": "a", "annotations": [
            {"id": 0, "type": "bbox", "attributes": {}, "group": 0, "label_id": 0, "bbox": [10, 20, 50, 30]}
        ], "attr": {"frame": 0}, "image": {"path": "a.jpg", "size": [100, 200]},
    }],
}  # fmt: skip
DARWIN = {
    "version": "2.0", "schema_ref": "https://darwin-public.s3.eu-west-1.amazonaws.com/darwin_json/2.0/schema.json",
    "item": {"name": "a.jpg", "path": "/", "slots": [
        {"type": "image", "slot_name": "0", "width": 200, "height": 100, "source_files": [{"file_name": "a.jpg"}]}
    ]},
    "annotations": [{"id": "1", "name": "car", "bounding_box": {"x": 10, "y": 20, "w": 50, "h": 30}}],
}  # fmt: skip
VOTT = {
    "name": "boats", "tags": [{"name": "car", "color": "#fff"}],
    "assets": {"0123": {
        "asset": {"format": "jpg", "id": "0123", "name": "a.jpg", "path": "file:a.jpg",
                  "size": {"width": 200, "height": 100}},
        "regions": [{"id": "r", "type": "RECTANGLE", "tags": ["car"],
                     "boundingBox": {"height": 30, "width": 50, "left": 10, "top": 20},
                     "points": [{"x": 10, "y": 20}, {"x": 60, "y": 50}]}],
    }},
}  # fmt: skip
COCO_RESULTS = [{"image_id": 1, "category_id": 1, "bbox": [10, 20, 50, 30], "score": 0.9}]
CVAT_BACKUP = [{"version": 0, "tags": [], "shapes": [{"type": "rectangle", "points": [1, 2, 3, 4]}], "tracks": []}]
FIFTYONE = {"samples": [{"filepath": "data/a.jpg", "_cls": "Sample", "ground_truth": {"detections": []}}]}
FIFTYONE_DETECTIONS = {"classes": ["car"], "labels": {"a": [{"label": "car", "bounding_box": [0.1, 0.2, 0.3, 0.3]}]}}
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n"
SETS: dict[str, tuple[str, dict[str, Any]]] = {
    "supervisely": (
        "Supervisely",
        {"meta.json": SUPERVISELY_META, "ds0/img/a.jpg": None, "ds0/ann/a.jpg.json": SUPERVISELY},
    ),
    "datumaro": ("Datumaro JSON", {"images/a.jpg": None, "annotations/default.json": DATUMARO}),
    "v7-darwin": ("V7 Darwin JSON", {"a.jpg": None, "a.json": DARWIN}),
    "vott-json": ("VoTT JSON", {"vott-json-export/a.jpg": None, "vott-json-export/boats-export.json": VOTT}),
    "coco-results": ("COCO results", {"a.jpg": None, "detections.json": COCO_RESULTS}),
    "cvat-backup": ("CVAT backup", {"data/a.jpg": None, "task.json": {}, "annotations.json": CVAT_BACKUP}),
    "fiftyone": ("FiftyOne", {"data/a.jpg": None, "metadata.json": {"name": "x"}, "samples.json": FIFTYONE}),
    "fiftyone-detections": ("FiftyOne", {"data/a.jpg": None, "labels.json": FIFTYONE_DETECTIONS}),
    "parquet": ("Hugging Face Parquet", {"README.md": "#", "data/train-00000-of-00001.parquet": "PAR1"}),
    "oidv4": ("OIDv4_ToolKit", {"train/Car/a.jpg": None, "train/Car/Label/a.txt": "Car 10.0 20.0 60.0 50.0\n"}),
    "mot": (
        "MOT",
        {"train/MOT17-02/img1/000001.jpg": None, "train/MOT17-02/gt/gt.txt": "1,1,10,20,50,30,1,1,0.9\n"},
    ),
    "mds": (
        "MDS",
        {
            # as streaming/base/format/mds/writer.py of mosaicml/streaming writes it
            "train/index.json": {"shards": [{"column_names": ["image"], "format": "mds"}], "version": 2},
            "train/shard.00000.mds": "",
        },
    ),
    "yolov4-pytorch": (
        "YOLOv4 PyTorch",
        {"train/a.jpg": None, "train/_annotations.txt": "a.jpg 10,20,60,50,0\n", "train/_classes.txt": "car\n"},
    ),
    "multi-label": (
        "Roboflow multi-label classification",
        {"train/a.jpg": None, "train/_classes.csv": "filename, car, boat\na.jpg, 1, 0\n"},
    ),
    "masks": (
        "Pascal VOC masks",
        {"JPEGImages/a.jpg": None, "SegmentationObject/a.png": "", "ImageSets/Segmentation/train.txt": "a\n"},
    ),
    "class-masks": ("segmentation masks", {"JPEGImages/a.jpg": None, "SegmentationClass/a.png": ""}),
    "lfs": ("Git LFS pointer", {"images/a.jpg": None, "annotations/instances_train.json": POINTER}),
    "yolo-labels": ("YOLO labels without images", {"obj_train_data/a.txt": "0 0.5 0.5 0.2 0.2\n"}),
}  # fmt: skip
"""Short name → (name in the message, path → content; None: an image)."""
CONVERTED = {"datumaro": "datumaro", "vott-json": "vott_json", "mot": "mot_seq", "masks": "voc_instance_segmentation"}
"""Short name → the name in Datumaro."""
WITHOUT_SET = {"Labelbox", "Unity Perception"}


def write_set(root: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            save_images(path)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize("short_name", SETS)
def test_the_format_is_named_with_a_command_that_converts_it(tmp_path: Path, short_name: str) -> None:
    name, files = SETS[short_name]
    write_set(tmp_path, files)
    with pytest.raises(DataError) as raised:
        open_index(tmp_path)
    row = next(row for row in format_texts().format if row.name == name)
    assert raised.value.what == row.what.format(name=name)
    assert raised.value.location is not None
    assert Path(raised.value.location).is_file()
    assert raised.value.fix
    assert "panlabel" not in raised.value.fix
    assert ("stoker data convert --via datumaro" in raised.value.fix) == (short_name in CONVERTED)
    if raised.value.location.endswith(".json"):
        with pytest.raises(DataError, match="Git LFS" if short_name == "lfs" else f"format {name.partition('(')[0]}"):
            open_index(raised.value.location)


def test_every_row_of_the_table_has_a_set() -> None:
    assert {row.name for row in format_texts().format} == {name for name, _ in SETS.values()} | WITHOUT_SET


def test_a_format_that_is_read_is_preferred(tmp_path: Path) -> None:
    for _, files in SETS.values():
        write_set(tmp_path / "others", files)
    for number, name in enumerate(("a.jpg", "b.jpg"), 1):
        save_images(tmp_path / "images" / name)
        image = {"id": number, "file_name": name, "width": 200, "height": 100}
        box = {"id": 1, "image_id": number, "category_id": 1, "bbox": [4, 2, 16, 8]}
        content = {"images": [image], "annotations": [box], "categories": [{"id": 1, "name": "shapes"}]}
        (tmp_path / f"{('train', 'val')[number - 1]}.json").write_text(json.dumps(content))
    assert open_index(tmp_path).format == "coco"
