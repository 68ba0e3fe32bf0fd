"""VIA, CreateML, KITTI, JSON lines and SageMaker manifests, each as its makers and users write it.

The files follow those of public repositories: VIA's own test data and tutorials, the Matterport balloons, PKLot in VIA,
Apple's documentation and Roboflow's exports of CreateML, KITTI's devkit and NVIDIA TAO, SageMaker's documentation and
Rekognition manifests, the Hugging Face hub, Vertex AI, Azure, Open-GroundingDINO. The expected boxes were
computed by hand from the description of each format.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stoker.data.convert import convert
from stoker.data.index import open_index, require_images
from stoker.data.validation.check import check_dataset
from stoker.data.validation.problems import ProblemCollector
from stoker_watch.errors import DataError
from tests.fixtures.data_cvat import boxes_by_image, split_of
from tests.trainer.data.exports import save_images

Files = dict[str, Any]


def write(root: Path, files: Files) -> Path:
    """path → content; None: an image of 200 × 100 pixels; a list of objects in *.jsonl and *.manifest: its lines."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            save_images(path)
        elif isinstance(content, str):
            path.write_text(content)
        elif name.endswith(("l", ".manifest")):
            path.write_text("".join(json.dumps(line) + "\n" for line in content))
        else:
            path.write_text(json.dumps(content))
    return root


def via_region(shape: str, attributes: Any, **values: Any) -> dict[str, Any]:
    return {"shape_attributes": {"name": shape, **values}, "region_attributes": attributes}


def via_image(name: str, regions: Any) -> dict[str, Any]:
    return {f"{name}1234": {"filename": name, "size": 1234, "regions": regions, "file_attributes": {}}}


RECT = {"x": 10, "y": 20, "width": 50, "height": 30}
POLYGON = {"all_points_x": [10, 60, 35], "all_points_y": [50, 45, 20]}
VIA_REGIONS = [
    via_region("rect", {"type": "car", "color": "red"}, **RECT),
    via_region("polygon", {"type": "car"}, all_points_x=[80, 95, 90], all_points_y=[5, 9, 15]),
    via_region("polyline", {"type": "Empty"}, all_points_x=[103, 120, 130, 114], all_points_y=[17, 24, 38, 73]),
    via_region("circle", {"type": "boat"}, cx=148, cy=68, r=13),
    via_region("ellipse", {"type": "boat"}, cx=100, cy=50, rx=27, ry=26),
    via_region("ellipse", {"type": "boat"}, cx=100, cy=50, rx=30, ry=10, theta=1.5707963267948966),
    via_region("point", {"type": "boat"}, cx=51, cy=37),
]
VIA_BOXES = [
    ("car", [10, 20, 60, 50]),
    ("car", [80, 5, 95, 15]),
    ("Empty", [103, 17, 130, 73]),
    ("boat", [135, 55, 161, 81]),
    ("boat", [73, 24, 127, 76]),
    ("boat", [90, 20, 110, 80]),
]
VIA_CSV = """#filename,file_size,file_attributes,region_count,region_id,region_shape_attributes,region_attributes
a.jpg,129855,"{""caption"":""+-08374*&$£*""}",2,0,"{""name"":""rect"",""x"":10,""y"":20,""width"":50,""height"":30}",\
"{""name"":""a 'car'""}"
a.jpg,129855,"{}",2,1,"{""name"":""polygon"",""all_points_x"":[1,9,5],""all_points_y"":[2,3,8]}","{""name"":""boat""}"
b.jpg,34,"{}",0,0,"{}","{}"
"""
CREATE_ML = [
    {"image": "a.jpg", "annotations": [{"label": "car", "coordinates": {"x": 50, "y": 40, "width": 60, "height": 20}}]},
    {"image": "b.jpg", "annotations": []},
]
APPLE = [
    {
        "imagefilename": "a.jpg",
        "annotation": [{"coordinates": {"y": 0.5, "x": 0.25, "height": 0.2, "width": 0.1}, "label": "Waffle"}],
    }
]
CAR = "Car 0.00 0 1.55 10.00 20.00 60.00 50.00 1.5 1.6 3.7 1.0 1.8 8.6 1.6\n"
CYCLIST = "Cyclist 0.00 3 -1.65 100.50 10.25 120.75 90.00 1.86 0.60 2.02 4.59 1.32 45.84 -1.55 0.93\n"
DONT_CARE = "DontCare -1 -1 -10 150.00 1.00 190.00 9.00 -1 -1 -1 -1000 -1000 -1000 -10\n"
KITTI_BOXES = [("Car", [10, 20, 60, 50]), ("Cyclist", [100.5, 10.25, 120.75, 90])]
KITTI_IGNORED = [("Car", [150, 1, 190, 9]), ("Cyclist", [150, 1, 190, 9])]


def manifest_line(name: str, *boxes: tuple[int, int, int, int, int], job: str = "boxes", **others: Any) -> Files:
    rows = [dict(zip(("class_id", "left", "top", "width", "height"), box, strict=True)) for box in boxes]
    return {
        "source-ref": f"s3://bucket/some/prefix/{name}",
        job: {"image_size": [{"width": 200, "height": 100, "depth": 3}], "annotations": rows},
        f"{job}-metadata": {
            "objects": [{"confidence": 0.09}] * len(rows), "class-map": {"0": "car", "1": "boat"},
            "type": "groundtruth/object-detection", "human-annotated": "yes",
            "creation-date": "2019-05-12T23:36:20.022886", "job-name": f"labeling-job/{job}",
        },
        **others,
    }  # fmt: skip


CASES: dict[str, tuple[str, Files, dict[str, Any]]] = {
    "a VIA 2 project, class in one of two attributes": (
        "via",
        {
            "a.jpg": None, "b.jpg": None,
            "via_project_16Feb2021.json": {
                "_via_settings": {"core": {"default_filepath": ""}},
                "_via_img_metadata": via_image("a.jpg", VIA_REGIONS) | via_image("b.jpg", []),
                "_via_attributes": {"region": {}, "file": {}}, "_via_data_format_version": "2.0.10",
            },
        },
        {"a.jpg": VIA_BOXES, "b.jpg": []},
    ),
    "a VIA 1 export per split, polygons without attributes": (
        "via",
        {
            f"{split}/{path}": content
            for split in ("train", "val")
            for path, content in {
                f"{split}.jpg": None,
                "via_region_data.json": {
                    f"{split}.jpg1115004": {
                        "fileref": "", "size": 1115004, "filename": f"{split}.jpg", "base64_img_data": "",
                        "file_attributes": {}, "regions": {"0": via_region("polygon", {}, **POLYGON)},
                    }
                },
            }.items()
        },
        {f"{split}/{split}.jpg": [("object", [10, 20, 60, 50])] for split in ("train", "val")},
    ),
    "VIA CSV": (
        "via", {"images/a.jpg": None, "images/b.jpg": None, "via_region_data.csv": VIA_CSV},
        {"images/a.jpg": [("a 'car'", [10, 20, 60, 50]), ("boat", [1, 2, 9, 8])], "images/b.jpg": []},
    ),
    "VIA CSV as a spreadsheet saves it": (
        "via",
        {
            "a.jpg": None, "b.jpg": None,
            "boxes.csv": "filename;file_size;region_count;region_shape_attributes;region_attributes\n" + "".join(
                f'{name}.jpg;1;1;"{{""name"":""rect"",""x"":10,""y"":20,""width"":50,""height"":30}}";'
                '"{""confirmed_body"":""""}"\n' for name in "ab"
            ),
        },
        {f"{name}.jpg": [("confirmed_body", [10, 20, 60, 50])] for name in "ab"},
    ),
    "VIA with checkboxes": (
        "via",
        {
            "a.jpg": None, "b.jpg": None,
            "via.json": {
                **via_image("a.jpg", [via_region("rect", {"kind": {"car": True, "boat": False}}, **RECT)]),
                **via_image("b.jpg", [via_region("rect", {"kind": {"car": True, "boat": True}}, **RECT)]),
            },
        },
        {"a.jpg": [("car", [10, 20, 60, 50])], "b.jpg": [("car", [10, 20, 60, 50]), ("boat", [10, 20, 60, 50])]},
    ),
    "CreateML of Roboflow, split folders": (
        "createml",
        {
            f"{split}/{path}": content
            for split in ("train", "valid")
            for path, content in {"a.jpg": None, "b.jpg": None, "_annotations.createml.json": CREATE_ML}.items()
        },
        {
            f"{split}/{name}": boxes
            for split in ("train", "valid")
            for name, boxes in {"a.jpg": [("car", [20, 30, 80, 50])], "b.jpg": []}.items()
        },
    ),
    "CreateML as Apple documents it, fractions": (
        "createml",
        {"a.jpg": None, "b.jpg": None, "annotations.json": [*APPLE, {**APPLE[0], "imagefilename": "b.jpg"}]},
        {f"{name}.jpg": [("Waffle", [40, 40, 60, 60])] for name in "ab"},
    ),
    "KITTI with ImageSets, testing without labels": (
        "kitti",
        {
            **{f"training/image_2/00000{n}.png": None for n in range(3)},
            **{f"testing/image_2/00000{n}.png": None for n in range(3)},
            **{f"training/label_2/00000{n}.txt": CAR + CYCLIST + DONT_CARE * (n == 0) for n in range(3)},
            "ImageSets/train.txt": "000000\n", "ImageSets/val.txt": "000001\n",
            "ImageSets/test.txt": "000000\n000001\n",
        },
        {"training/image_2/000000.png": KITTI_BOXES + KITTI_IGNORED, "training/image_2/000001.png": KITTI_BOXES},
    ),
    "KITTI of NVIDIA TAO, a folder per split": (
        "kitti",
        {
            f"{split}/{path}": content
            for split in ("train", "val")
            for path, content in {
                "images/a.jpg": None, "labels/a.txt": CAR, "images/b.jpg": None, "labels/b.txt": "",
            }.items()
        },
        {
            f"{split}/images/{name}": boxes
            for split in ("train", "val")
            for name, boxes in {"a.jpg": [("Car", [10, 20, 60, 50])], "b.jpg": []}.items()
        },
    ),
    "a SageMaker manifest, images by the last folders of their URI": (
        "jsonl",
        {
            "day/a.jpg": None, "night/a.jpg": None, "night/b.jpg": None, "night/c.jpg": None,
            "output.manifest": [
                manifest_line("day/a.jpg", (0, 10, 20, 50, 30)),
                manifest_line("night/a.jpg", (1, 1, 2, 3, 4), (0, 10, 20, 50, 30)),
                manifest_line("night/b.jpg"),
                {"source-ref": "s3://bucket/night/c.jpg", "boxes-metadata": {"failure-reason": "ClientError"}},
            ],
        },
        {
            "day/a.jpg": [("car", [10, 20, 60, 50])],
            "night/a.jpg": [("boat", [1, 2, 4, 6]), ("car", [10, 20, 60, 50])], "night/b.jpg": [],
        },
    ),
    "COCO-like lines": (
        "jsonl",
        {
            **{f"{split}/{name}.jpg": None for split in ("train", "val") for name in "ab"},
            **{
                f"{split}.jsonl": [
                    {
                        "image": {"file_name": f"{split}/a.jpg", "width": 200, "height": 100, "id": 1},
                        "annotations": [{"bbox": [10, 20, 50, 30], "category_name": "car", "category_id": 7}],
                    },
                    {"image": {"file_name": f"{split}/b.jpg", "width": 200, "height": 100, "id": 2}, "annotations": []},
                ]
                for split in ("train", "val")
            },
        },
        {
            f"{split}/{name}": boxes
            for split in ("train", "val")
            for name, boxes in {"a.jpg": [("car", [10, 20, 60, 50])], "b.jpg": []}.items()
        },
    ),
    "metadata.jsonl of the Hugging Face hub": (
        "jsonl",
        {
            f"{split}/{path}": content
            for split in ("train", "validation")
            for path, content in {
                "0001.jpg": None,
                "metadata.jsonl": [
                    {"file_name": "0001.jpg", "objects": {"bbox": [[10, 20, 50, 30]], "categories": [3]}}
                ],
            }.items()
        },
        {f"{split}/0001.jpg": [("3", [10, 20, 60, 50])] for split in ("train", "validation")},
    ),
    "Vertex AI": (
        "jsonl",
        {
            "a.jpg": None, "b.jpg": None,
            "labels.jsonl": [
                {
                    "imageGcsUri": f"gs://bucket/{name}.jpg",
                    "boundingBoxAnnotations": [
                        {"displayName": "Tomato", "xMin": "0.25", "yMin": "0.3", "xMax": "0.75", "yMax": "0.6"}
                    ],
                    "dataItemResourceLabels": {"aiplatform.googleapis.com/ml_use": use},
                }
                for name, use in (("a", "training"), ("b", "validation"))
            ],
        },
        {f"{name}.jpg": [("Tomato", [50, 30, 150, 60])] for name in "ab"},
    ),
    "Azure Machine Learning": (
        "jsonl",
        {
            "a.jpg": None, "b.jpg": None,
            "train.jsonl": [
                {
                    "image_url": f"azureml://subscriptions/x/datastores/y/paths/fridge/{name}.jpg",
                    "image_details": {"format": "jpg", "width": "200px", "height": "100px"},
                    "label": [
                        {"label": "can", "topX": 0.25, "topY": 0.3, "bottomX": 0.75, "bottomY": 0.6, "isCrowd": 0}
                    ],
                }
                for name in "ab"
            ],
        },
        {f"{name}.jpg": [("can", [50, 30, 150, 60])] for name in "ab"},
    ),
    "Open-GroundingDINO, corners": (
        "jsonl",
        {
            "a.jpg": None, "b.jpg": None,
            "train.jsonl": [
                {
                    "filename": f"{name}.jpg", "height": 100, "width": 200,
                    "detection": {"instances": [{"bbox": [10.5, 20, 60, 50], "label": 3, "category": "motorcycle"}]},
                }
                for name in "ab"
            ],
        },
        {f"{name}.jpg": [("motorcycle", [10.5, 20, 60, 50])] for name in "ab"},
    ),
}  # fmt: skip
"""Layout → (format, files, boxes by image)."""
SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val"}


@pytest.mark.parametrize("name", CASES)
def test_layouts(tmp_path: Path, name: str) -> None:
    format, files, expected = CASES[name]
    root = write(tmp_path / "set", files)
    index = open_index(root, val_fraction=0.5)
    assert index.format == format
    found = {
        path: [(label, [round(value, 4) for value in xyxy]) for label, xyxy in boxes]
        for path, boxes in boxes_by_image(index).items()
    }
    assert found == expected
    assert require_images(index) == []
    for path, split in split_of(index).items():
        named = {SPLITS[part] for part in Path(path).parts if part in SPLITS}
        assert not named or named == {split}


NOTES = {
    "a VIA 2 project, class in one of two attributes": [
        "the class is the region attribute 'type'; not used: color",
        "1 × polygon: the box around it is used", "1 × polyline: the", "1 × circle: the", "2 × ellipse: the",
        "1 × point, which has no box and is not read", "1 × image without regions, used as background",
    ],
    "a VIA 1 export per split, polygons without attributes": ["no region has attributes: the class of all is 'object'"],
    "VIA CSV as a spreadsheet saves it": ["no attribute has a value: their names are the classes, confirmed_body"],
    "CreateML as Apple documents it, fractions": ["annotations.json: boxes are within 0 … 1, normalized"],
    "KITTI with ImageSets, testing without labels": [
        "4 objects; 1 ignored regions, which are no targets: each is a crowd box, of each class",
        "not read: ImageSets/test.txt: the test images have no labels",
    ],
    "a SageMaker manifest, images by the last folders of their URI": [
        "1 × line without annotations, which is left out"
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", NOTES)
def test_what_is_chosen_or_left_out_is_said(tmp_path: Path, name: str) -> None:
    index = open_index(write(tmp_path, CASES[name][1]), val_fraction=0.5)
    for note in NOTES[name]:
        assert any(note in written for written in index.notes), (note, index.notes)
    assert index.crowd.any() == ("KITTI" in name)
    assert not any("other names than in the annotations" in written for written in index.notes)


ONE_OF_EACH = (
    "VIA CSV",
    "CreateML of Roboflow, split folders",
    "KITTI with ImageSets, testing without labels",
    "a SageMaker manifest, images by the last folders of their URI",
)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_check_and_convert(tmp_path: Path, name: str) -> None:
    root = write(tmp_path / "set", CASES[name][1])
    expected = sum(len(boxes) for boxes in CASES[name][2].values())
    assert check_dataset(root).num_usable_boxes == expected
    convert(open_index(root, val_fraction=0.5), tmp_path / "coco", "coco")
    assert len(open_index(tmp_path / "coco").boxes) == expected


def test_half_polygons_half_rectangles_lose_no_box(tmp_path: Path) -> None:
    """Twenty images, of which ten have only polygons: a converter had made background of those."""
    images: Files = {}
    for n in range(20):
        save_images(tmp_path / f"{n:02}.jpg")
        shape = (
            via_region("rect", {"class": "car"}, **RECT)
            if n % 2
            else via_region("polygon", {"class": "car"}, **POLYGON)
        )
        images |= via_image(f"{n:02}.jpg", [shape])
    (tmp_path / "via_export_json.json").write_text(json.dumps(images))
    assert boxes_by_image(open_index(tmp_path)) == {f"{n:02}.jpg": [("car", [10, 20, 60, 50])] for n in range(20)}


def test_an_image_with_points_only_is_not_background(tmp_path: Path) -> None:
    point = via_region("point", {"class": "car"}, cx=1, cy=2)
    images = via_image("a.jpg", [via_region("rect", {"class": "car"}, **RECT)]) | via_image("b.jpg", [point])
    index = open_index(write(tmp_path, {"a.jpg": None, "b.jpg": None, "via.json": images}))
    assert list(boxes_by_image(index)) == ["a.jpg"]
    assert any("1 × image with such shapes only, which is left out" in note for note in index.notes)


def test_a_line_with_several_jobs(tmp_path: Path) -> None:
    first = manifest_line("a.jpg", (0, 1, 2, 3, 4), job="first")
    line = first | manifest_line("a.jpg", (1, 10, 20, 50, 30), job="second")
    index = open_index(write(tmp_path, {"a.jpg": None, "output.manifest": [line]}))
    assert boxes_by_image(index) == {"a.jpg": [("boat", [10, 20, 60, 50])]}
    assert any("1 × line with 2 label attributes: the last, second, is used" in note for note in index.notes)


def test_lines_whose_bbox_are_corners(tmp_path: Path) -> None:
    lines = [{"file_name": f"{k}.jpg", "objects": {"bbox": [[100, 20, 190, 90]], "category": ["a"]}} for k in range(4)]
    files = {**{f"{k}.jpg": None for k in range(4)}, "metadata.jsonl": lines}
    index = open_index(write(tmp_path, files))
    assert set(map(tuple, index.boxes.tolist())) == {(100.0, 20.0, 190.0, 90.0)}
    assert any("bbox are corners" in note for note in index.notes)


def damaged(region: Any) -> Files:
    images = via_image("a.jpg", [via_region("rect", {"class": "car"}, **RECT), region])
    return {"a.jpg": None, "via.json": images}


ONE_LINE = {"file_name": "a.jpg", "annotations": [{"bbox": [1, 2, 3, 4], "class": "x"}]}
LABELED = [
    {"label": "car", "coordinates": {"x": 50, "y": 40, "width": 60, "height": 20}},
    {"label": "x", "coordinates": {"x": 1}},
]
TWO = {f"training/{path}": content for k in "01" for path, content in
       {f"image_2/{k}.png": None, f"label_2/{k}.txt": CAR}.items()}  # fmt: skip


@pytest.mark.parametrize(
    ("files", "kind", "example"),
    [
        (damaged(via_region("rect", {"class": "car"}, x=1)), "malformed-box",
         "via.json, image 'a.jpg1234', region 2: rect: there is no 'y'"),
        (damaged(via_region("polygon", {"class": "car"}, all_points_x=[1], all_points_y=[])), "malformed-box",
         "region 2: polygon: zip()"),
        (damaged(via_region("blob", {"class": "car"})), "malformed-box", "region 2: blob: not a shape of VIA"),
        (damaged(via_region("rect", {}, **RECT)), "no-class", "via.json, image 'a.jpg1234', region 2"),
        (damaged(5), "malformed-box", "region 2: no shape: not a shape of VIA"),
        ({"a.jpg": None, "b.jpg": None, "via.csv": VIA_CSV + "c.jpg,1\n"}, "malformed-row",
         "via.csv:5: too few columns"),
        ({"a.jpg": None, "b.jpg": None, "a.json": [*CREATE_ML, {"image": "a.jpg"}]}, "unreadable-annotations",
         "a.json, image 3: it has the keys 'image'"),
        ({"a.jpg": None, "a.json": [{"image": "a.jpg", "annotations": LABELED}]}, "malformed-box",
         "a.json, image 1, object 2: {'label': 'x', 'coo"),
        ({"training/image_2/0.png": None, "training/label_2/0.txt": CAR + "Cyclist 0.00 0 1.55 4.5 wrong\n"},
         "malformed-row", "training/label_2/0.txt:2: 'Cyclist 0.00 0 1.55 4.5 wrong'"),
        (TWO | {"ImageSets/train.txt": "0\n1\n2\n"}, "no-annotation-file", "ImageSets/train.txt: 2"),
        (TWO | {"ImageSets/train.txt": "0\n"}, "not-in-a-split", "training/image_2/1.png"),
        ({"a.jpg": None, "a.jsonl": json.dumps(ONE_LINE) + '\n{"file'}, "unreadable-annotations",
         "a.jsonl:2: it is not JSON"),
        ({"a.jpg": None, "output.manifest": [manifest_line("a.jpg", (0, 1, 2, 30, 40), (7, 1, 2, 30, 40))]},
         "no-class", "output.manifest:1, object 2"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named_with_its_place(tmp_path: Path, files: Files, kind: str, example: str) -> None:
    problems = ProblemCollector()
    index = open_index(write(tmp_path, files), problems=problems)
    assert len(index.boxes) >= 1
    found = {problem.kind: problem for problem in problems.summarize()}
    assert example in found[kind].examples[0]


@pytest.mark.parametrize(
    ("files", "parts"),
    [
        ({"a.jpg": None, "via.json": '{"_via_settings": {'}, ["not a project or an export of VIA", "via.json"]),
        ({"a.jpg": None, "via.json": via_image("a.jpg", [via_region("rect", {"shade": "x", "age": "3"}, **RECT)])},
         ["which attribute of the regions is the class", "shade, age", "rename that attribute to class"]),
        ({"a.jpg": None, "a.json": '[{"image": "a.jpg", "annotations": [{"coordinates": '},
         ["not CreateML JSON", "a.json"]),
        ({"a.jpg": None, "a.jsonl": [{"file_name": "a.jpg", "objects": {"bbox": [[1, 2, 3, 4]]}}]},
         ["No image has annotations that are understood", "a.jsonl:1: it has the keys 'bbox'"]),
        ({"training/image_2/0.png": None, "training/label_2/0.txt": CAR, "ImageSets/train.txt": "5\n"},
         ["The annotations name no image", "ImageSets/train.txt: 5"]),
    ],
)  # fmt: skip
def test_files_that_cannot_be_used(tmp_path: Path, files: Files, parts: list[str]) -> None:
    with pytest.raises(DataError) as raised:
        open_index(write(tmp_path, files))
    for part in parts:
        assert part in str(raised.value)


@pytest.mark.slow
def test_stats_and_train(tmp_path: Path) -> None:
    root = write(tmp_path / "set", CASES["KITTI with ImageSets, testing without labels"][1])
    small = ["--steps", "1", "--device", "cpu", "--weights", "none", "--image-size", "64", "64", "--batch-size", "1"]
    for command in (
        ["data", "stats", root, "--json"],
        ["train", root, *small, "--val-fraction", "0.5", "--run-dir", tmp_path / "run"],
    ):
        words = [sys.executable, "-m", "stoker", *map(str, command)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
