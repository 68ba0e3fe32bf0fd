"""Public data sets as their makers publish them: a small drawn set in the layout of each row of public_sets.toml."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.data.formats.public import public_sets
from stoker.data.index import Index, open_index, require_images
from stoker.data.validation.clean import SplitOptions
from stoker_watch.errors import DataError
from tests.trainer.data.exports import save_images

WIDTH, HEIGHT = 200, 100
DOTA = "imagesource:GoogleEarth\ngsd:0.15\n10 20 60 22 58 50 12 48 plane 0\n100 10 140 10 140 40 100 40 ship 1\n"
GTSDB = "00000.ppm;10;20;60;50;11\n00000.ppm;100;10;140;40;0\n00001.ppm;1;2;30;40;11\n"
WIDER = (
    "0--Parade/0_Parade_1.jpg\n2\n10 20 50 30 0 0 0 0 0 0 \n100 10 40 30 0 0 0 1 0 0 \n"
    "1--Handshaking/1_Handshaking_2.jpg\n0\n0 0 0 0 0 0 0 0 0 0 \n"
)


def bdd(*objects: tuple[str, bool]) -> list[dict[str, Any]]:
    lane = [{"vertices": [[1, 2], [3, 4]]}]
    labels: list[dict[str, Any]] = [
        {"category": name, "box2d": {"x1": x, "y1": 20, "x2": x + 50, "y2": 50}, "attributes": {"crowd": crowd}}
        for x, (name, crowd) in zip(range(10, 100, 20), objects, strict=False)
    ]
    return [{"name": "a.jpg", "labels": [*labels, {"category": "lane", "poly2d": lane}]}, {"name": "b.jpg"}]


def people(*objects: tuple[str, list[int], int]) -> str:
    boxes = [{"tag": tag, "fbox": box, "vbox": [0, 0, 1, 1], "extra": {"ignore": n}} for tag, box, n in objects]
    return json.dumps({"ID": "273271,c9db000d5146c15", "gtboxes": boxes}) + "\n"


def city(kind: str, *objects: dict[str, Any]) -> dict[str, Any]:
    name = f"{kind}/train/aachen/aachen_000000_000019_{kind}{'_polygons' * (kind == 'gtFine')}.json"
    image = "leftImg8bit/train/aachen/aachen_000000_000019_leftImg8bit.png"
    return {image: None, name: {"imgHeight": HEIGHT, "imgWidth": WIDTH, "objects": list(objects)}}


def xview(*objects: tuple[str, int]) -> dict[str, Any]:
    rows = [{"bounds_imcoords": box, "image_id": "5.tif", "type_id": type_id} for box, type_id in objects]
    return {"type": "FeatureCollection", "features": [{"type": "Feature", "properties": row} for row in rows]}


SETS: dict[str, tuple[dict[str, Any], dict[str, list[list[float]]], int]] = {
    "VisDrone": (
        {
            "VisDrone2019-DET-train/images/01.jpg": None,
            "VisDrone2019-DET-train/annotations/01.txt": "10,20,50,30,1,4,0,0\n1,1,9,9,0,0,0,0,\n5,5,20,20,0,11,0,0\n",
            "VisDrone2019-DET-val/images/02.jpg": None,
            "VisDrone2019-DET-val/annotations/02.txt": "10,20,50,30,1,4,0,0\n",
        },
        {"car": [[10, 20, 60, 50]] * 2},
        2,
    ),
    "CrowdHuman": (
        {
            "Images/273271,c9db000d5146c15.jpg": None,
            "annotation_train.odgt": people(("person", [10, 20, 50, 30], 0), ("mask", [1, 1, 9, 9], 1)),
        },
        {"person": [[10, 20, 60, 50]]},
        1,
    ),
    "TT100K": (
        {
            "data/train/7.jpg": None,
            "data/annotations.json": {
                "types": ["p11", "i5"],
                "imgs": {"7": {"path": "train/7.jpg", "id": 7, "objects": [
                    {"category": "p11", "bbox": {"xmin": 10.0, "ymin": 20.0, "xmax": 60.0, "ymax": 50.0}}
                ]}},
            },
        },
        {"p11": [[10, 20, 60, 50]]},
        0,
    ),
    "GTSDB": (
        {"FullIJCNN2013/00000.ppm": None, "FullIJCNN2013/00001.ppm": None, "FullIJCNN2013/gt.txt": GTSDB},
        {
            "priority at next intersection (danger)": [[10, 20, 60, 50], [1, 2, 30, 40]],
            "speed limit 20 (prohibitory)": [[100, 10, 140, 40]],
        },
        0,
    ),
    "WIDER FACE": (
        {
            "WIDER_train/images/0--Parade/0_Parade_1.jpg": None,
            "WIDER_train/images/1--Handshaking/1_Handshaking_2.jpg": None,
            "wider_face_split/wider_face_train_bbx_gt.txt": WIDER,
        },
        {"face": [[10, 20, 60, 50]]},
        1,
    ),
    "DOTA": (
        {"train/images/P0.png": None, "train/labelTxt/P0.txt": DOTA},
        {"plane": [[10, 20, 60, 50]], "ship": [[100, 10, 140, 40]]},
        0,
    ),
    "BDD100K": (
        {
            "images/100k/train/a.jpg": None, "images/100k/train/b.jpg": None,
            "labels/det_20/det_train.json": bdd(("car", False), ("rider", True), ("trailer", False)),
        },
        {"car": [[10, 20, 60, 50]]},
        3,
    ),
    "BDD100K, a file per image": (
        {
            "images/100k/train/a.jpg": None,
            "labels/100k/train/a.json": {"name": "a", "frames": [{"objects": bdd(("car", False))[0]["labels"]}]},
        },
        {"car": [[10, 20, 60, 50]]},
        0,
    ),
    "xView": (
        {"train_images/5.tif": None, "xView_train.geojson": xview(("10,20,60,50", 18), ("100,10,140,40", 73))},
        {"Small Car": [[10, 20, 60, 50]], "Building": [[100, 10, 140, 40]]},
        0,
    ),
    "CityPersons": (
        city(
            "gtBboxCityPersons",
            {"label": "pedestrian", "bbox": [10, 20, 50, 30], "bboxVis": [10, 20, 9, 9]},
            {"label": "ignore", "bbox": [0, 0, 9, 9], "bboxVis": [0, 0, 9, 9]},
        ),
        {"pedestrian": [[10, 20, 60, 50]]},
        1,
    ),
    "Cityscapes": (
        city(
            "gtFine",
            {"label": "road", "polygon": [[0, 0], [199, 0], [199, 99]]},
            {"label": "car", "polygon": [[10, 30], [40, 20], [60, 50]]},
            {"label": "cargroup", "polygon": [[0, 0], [9, 0], [9, 9]]},
        ),
        {"car": [[10, 20, 60, 50]]},
        1,
    ),
}  # fmt: skip
"""Row → (path → content; None: an image), class → boxes, number of crowd boxes."""


def write_set(root: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            save_images(path)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))


def targets(index: Index) -> dict[str, list[list[float]]]:
    """Class → boxes without crowd boxes."""
    found: dict[str, list[list[float]]] = {}
    for label, box in zip(index.labels[~index.crowd], index.boxes[~index.crowd].tolist(), strict=True):
        found.setdefault(index.class_names[label], []).append(box)
    return found


@pytest.mark.parametrize("name", SETS)
def test_a_public_set_is_read_as_published(tmp_path: Path, name: str) -> None:
    files, boxes, num_crowd = SETS[name]
    write_set(tmp_path, files)
    index = open_index(tmp_path)
    assert index.format == "public"
    assert index.notes[0].startswith(f"{name} (")
    assert targets(index) == boxes
    assert np.count_nonzero(index.crowd) == num_crowd
    assert require_images(index) == []
    assert [problem for problem in index.problems if problem.drops_boxes or problem.is_bad_image] == []
    assert len(index) == sum(content is None for content in files.values())
    if "train" in " ".join(files):
        assert "train" in index.splits


def test_every_row_has_a_set() -> None:
    assert list(public_sets()) == ["KITTI", *SETS]  # KITTI: test_tool_formats.py
    assert all(row.source.startswith("http") for row in public_sets().values())


def test_an_ignored_region_is_a_crowd_box_of_each_class(tmp_path: Path) -> None:
    lines = "10,20,50,30,1,4,0,0\n10,20,50,30,1,1,0,0\n1,1,9,9,0,0,0,0\n5,5,20,20,0,4,0,0\n"
    write_set(tmp_path, {"images/01.jpg": None, "annotations/01.txt": lines})
    index = open_index(tmp_path)
    assert index.class_names == ("pedestrian", "car")  # in the order of the makers
    crowd = [(index.class_names[label], box) for label, box in zip(index.labels, index.boxes.tolist(), strict=True)]
    assert [entry for entry, is_crowd in zip(crowd, index.crowd, strict=True) if is_crowd] == [
        ("pedestrian", [1, 1, 10, 10]), ("car", [1, 1, 10, 10]), ("car", [5, 5, 25, 25])
    ]  # fmt: skip


def test_what_is_wrong_in_a_public_set_is_reported_with_its_place(tmp_path: Path) -> None:
    lines = "10,20,50,30,1,4,0,0\n10,20,wide,30,1,4,0,0\n10,20,50,30,1,77,0,0\n1,2,3\n"
    write_set(tmp_path, {"images/01.jpg": None, "annotations/01.txt": lines})
    problems = {problem.kind: problem for problem in open_index(tmp_path).problems}
    lines_of = {kind: [text.partition(": ")[0] for text in problem.examples] for kind, problem in problems.items()}
    assert lines_of["malformed-row"] == ["annotations/01.txt:2", "annotations/01.txt:4"]
    assert problems["unknown-class"].examples == ("annotations/01.txt:3: '10,20,50,30,1,77,0,0'",)


def test_of_several_versions_the_last_is_read(tmp_path: Path) -> None:
    old = "10 20 60 22 58 50 12 48 plane 0\n"
    files = {"P0.png": None, "labelTxt-v1.0/labelTxt/P0.txt": old, "labelTxt-v1.5/P0.txt": DOTA}
    write_set(tmp_path, {f"images/{name}" if name == "P0.png" else name: text for name, text in files.items()})
    index = open_index(tmp_path)
    assert targets(index) == SETS["DOTA"][1]
    assert "not read: labelTxt-v1.0/, as there is another" in index.notes


def test_a_damaged_file_is_an_error_with_its_name(tmp_path: Path) -> None:
    write_set(tmp_path, SETS["TT100K"][0])
    file = tmp_path / "data" / "annotations.json"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(DataError, match="not valid JSON") as raised:
        open_index(tmp_path)
    assert str(raised.value.location).endswith("annotations.json")


def test_a_file_stands_for_its_set(tmp_path: Path) -> None:
    write_set(tmp_path, SETS["CrowdHuman"][0])
    file = tmp_path / "annotation_train.odgt"
    assert targets(open_index(file)) == SETS["CrowdHuman"][1]
    assert targets(open_index(tmp_path, splits=SplitOptions(files=(("train", str(file)),)))) == SETS["CrowdHuman"][1]
