"""Label Studio JSON: names of images, kinds of regions, several annotations of a task, files that cannot be read."""

import json
from pathlib import Path
from typing import Any

import pytest

from stoker.data.index import open_index, require_images
from stoker.data.validation.problems import ProblemCollector
from stoker_watch.errors import DataError
from tests.fixtures.data_cvat import boxes_by_image, split_of
from tests.trainer.data.exports import region, save_images, task

CAR = region("car", 10, 20, 25, 50)
GEOMETRY = region(None, 10, 20, 25, 50)["value"]
CAR_BOX = ("car", [20, 20, 70, 70])


def write(root: Path, *tasks: dict[str, Any], name: str = "project-1-at-2024-05-07-12-34-56789abc.json") -> None:
    (root / name).write_text(json.dumps(tasks))


@pytest.mark.parametrize(
    ("image", "written"),
    [
        ("images/a.jpg", "/data/upload/1/1a2b3c4d-a.jpg"),
        ("images/1a2b3c4d-a.jpg", "/data/upload/1/1a2b3c4d-a.jpg"),
        ("media/upload/1/1a2b3c4d-a.jpg", "/data/upload/1/1a2b3c4d-a.jpg"),
        ("boats/sub dir/a.jpg", "/data/local-files/?d=boats/sub%20dir/a.jpg"),
        ("images/a.jpg", "/data/local-files/?d=images%5Ca.jpg"),
        ("images/a.jpg", "s3://bucket/boats/a.jpg"),
        ("images/a.jpg", "https://host/boats/a.jpg?token=x%2Fy.z"),
        ("images/a.jpg", "C:\\Users\\me\\a.jpg"),
        ("images/a.jpg", "images/a.jpg"),
        ("a.jpg", "/a.jpg"),
    ],
)
def test_the_image_of_a_task(tmp_path: Path, image: str, written: str) -> None:
    other = Path(image).with_stem("other")
    save_images(tmp_path / image, tmp_path / other)
    write(tmp_path, task(1, written, [CAR]), task(2, str(other), []))
    index = open_index(tmp_path, val_fraction=0.5)
    assert index.format == "label-studio"
    assert boxes_by_image(index)[image] == [CAR_BOX]
    assert require_images(index) == []


def test_regions(tmp_path: Path) -> None:
    save_images(tmp_path / "a.jpg", tmp_path / "b.jpg")
    no_size = region("car", 10, 20, 25, 50, original_width=None, original_height=None)
    points = {"points": [[10, 10], [25, 20], [15, 70]], "polygonlabels": ["boat"]}
    write(
        tmp_path,
        task(
            1, "/data/upload/1/1a2b3c4d-a.jpg",
            [
                CAR,
                region(None, 10, 20, 25, 50, type="choices") | {"value": {**GEOMETRY, "choices": ["uncertain"]}},
                region("car", 50, 20, 10, 40, rotation=90),  # 20 × 40 pixels about the upper left corner, (100, 20)
                {**CAR, "type": "polygonlabels", "value": points},
                {**CAR, "type": "ellipselabels",
                 "value": {"x": 50, "y": 50, "radiusX": 10, "radiusY": 10, "ellipselabels": ["boat"]}},
                region(None, 1, 2, 30, 40, id="r1", type="rectangle"),
                region(None, 1, 2, 30, 40, id="r1", type="labels") | {"value": {**GEOMETRY, "labels": ["boat"]}},
                {**CAR, "type": "brushlabels", "value": {"format": "rle", "rle": [1], "brushlabels": ["car"]}},
            ],
        ),
        task(2, "/data/upload/1/1a2b3c4d-b.jpg", [no_size]),
    )  # fmt: skip
    index = open_index(tmp_path, val_fraction=0.5)
    assert boxes_by_image(index) == {
        "a.jpg": [
            CAR_BOX,
            ("car", [60, 20, 100, 40]),
            ("boat", [20, 10, 50, 70]),
            ("boat", [80, 40, 120, 60]),
            ("boat", [20, 20, 70, 70]),
        ],
        "b.jpg": [CAR_BOX],
    }
    notes = "; ".join(index.notes)
    for part in (
        "1 × rotated rectangle: the box around it is used",
        "1 × polygon: ",
        "1 × ellipse: ",
        "1 × brush, which",
    ):
        assert part in notes, part


def test_which_annotation_is_used(tmp_path: Path) -> None:
    save_images(*(tmp_path / "images" / f"{name}.jpg" for name in "abcdef"))
    other = region("boat", 1, 2, 30, 40)
    truth = task(2, "b.jpg", [CAR], [other])
    truth["annotations"][0]["ground_truth"] = True
    cancelled = task(3, "c.jpg", [other], [CAR])
    cancelled["annotations"][1]["was_cancelled"] = True
    legacy = task(6, "f.jpg", [CAR])
    legacy["completions"] = legacy.pop("annotations")
    predicted = task(4, "d.jpg", predictions=[{"model_version": "m", "result": [CAR]}])
    write(tmp_path, task(1, "a.jpg", [CAR], [other]), truth, cancelled, predicted, task(5, "e.jpg", []), legacy)
    index = open_index(tmp_path, val_fraction=0.5)
    classes = {Path(name).name: [label for label, _ in boxes] for name, boxes in boxes_by_image(index).items()}
    assert classes == {"a.jpg": ["boat"], "b.jpg": ["car"], "c.jpg": ["boat"], "e.jpg": [], "f.jpg": ["car"]}
    notes = "; ".join(index.notes)
    assert "2 × task with several annotations: the ground truth, else the last, is used" in notes
    assert "1 × task without annotations, which is left out" in notes


def test_json_min_and_splits(tmp_path: Path) -> None:
    """JSON-MIN has the fields of `value` in the regions, and the data's fields in the task."""
    for split in ("train", "val"):
        save_images(tmp_path / "images" / f"{split}.jpg")
        regions = [{**CAR["value"], "original_width": 200, "original_height": 100}]
        small = {
            "image": f"/data/upload/1/1a2b3c4d-{split}.jpg",
            "id": 1,
            "label": regions,
            "annotator": 1,
            "lead_time": 2.5,
        }
        write(tmp_path, small, name=f"{split}.json")
    index = open_index(tmp_path)
    assert split_of(index) == {"train.jpg": "train", "val.jpg": "val"}
    assert set(map(tuple, index.boxes.tolist())) == {(20.0, 20.0, 70.0, 70.0)}
    assert open_index(tmp_path / "train.json").format == "label-studio"


def test_what_cannot_be_read_is_reported(tmp_path: Path) -> None:
    save_images(tmp_path / "a.jpg", tmp_path / "b.jpg")
    bad = [
        CAR, region("car", 1, 2, 3, 4, image_rotation=90), region(None, 1, 2, 3, 4, type="rectangle", id="r1"),
        {"type": "rectanglelabels", "value": {"x": 1}}, {**CAR, "value": {"x": 1, "rectanglelabels": ["car"]}},
        region("car", "1", None, 3, 4), 17, {"value": 5},
    ]  # fmt: skip
    without_size = {"original_width": None, "original_height": None}
    rotated = [region("car", 10, 20, 25, 50, **without_size), region("car", 1, 2, 3, 4, rotation=9, **without_size)]
    embedded = task(3, "data:image/png;base64,AAAA", [CAR], file_upload=None)
    write(tmp_path, task(1, "a.jpg", bad), task(2, "b.jpg", rotated), embedded)
    problems = ProblemCollector()
    index = open_index(tmp_path, problems=problems, val_fraction=0.5)
    assert boxes_by_image(index) == {"a.jpg": [CAR_BOX], "b.jpg": [CAR_BOX]}
    found = {problem.kind: problem for problem in problems.summarize()}
    location = "project-1-at-2024-05-07-12-34-56789abc.json, task"
    assert found["malformed-box"].examples == (
        f"{location} 1, region 2: it was drawn on the image rotated by 90 degrees",
        f"{location} 1, region 4: there is no 'y'",
        f"{location} 1, region 5: there is no 'y'",
        f"{location} 1, region 6: float() argument must be a string or a real number, not 'NoneType'",
        f"{location} 2, region 2: it is rotated, and there is no original_width or original_height",
    )
    assert found["no-class"].examples == (f"{location} 1, region 3",)
    assert found["malformed-image"].count == 1


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('[{"id": 1, "annotations": [{"result": [', ["not an export of Label Studio", 'export it again, as "JSON"']),
        ('[{"annotations": [{"result": []}]}, 5]', ["not an export of Label Studio", "Expected `object`, got `int`"]),
        ('[{"annotations": [{"result": []}]}, ' + "[" * 100_000, ["not an export of Label Studio"]),
        ('[{"id": 1, "annotations": [], "data": {"result": 1}}]', ["No image has annotations that can be read"]),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, text: str, parts: list[str]) -> None:
    save_images(tmp_path / "a.jpg")
    (tmp_path / "tasks.json").write_text(text)
    with pytest.raises(DataError) as raised:
        open_index(tmp_path)
    for part in parts:
        assert part in str(raised.value)
