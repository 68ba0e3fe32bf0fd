"""LabelMe JSON: layouts, the ways in which a file names its image, shapes, and files that cannot be read."""

import json
from pathlib import Path

import pytest

from stoker.data.index import open_index, require_images
from stoker.data.validation.problems import ProblemCollector
from stoker_watch.errors import DataError
from tests.fixtures.data_cvat import boxes_by_image, split_of
from tests.trainer.data.exports import labelme_file, labelme_shape, save_images

CAR = labelme_shape("car", [[60.5, 50], [10, 20]])
"""Drawn from the lower right corner."""
CAR_BOX = ("car", [10, 20, 60.5, 50])


@pytest.mark.parametrize(
    ("image", "annotations", "image_path"),
    [
        ("a.jpg", "a.json", "a.jpg"),
        ("images/a.jpg", "labels/a.json", "..\\images\\a.jpg"),
        ("images/a.jpg", "labels/a.json", "../images/a.jpg"),
        ("images/a.jpg", "annotations/a.json", "C:\\Users\\me\\boats\\a.jpg"),
        ("images/a.jpg", "images/a.json", "/home/me/a.jpg"),
        ("a.png", "a.json", "IMG_0001.jpg"),  # renamed together
        ("a.jpg", "a.json", None),
        ("imgs/a.jpg", "json/a.json", "a.jpg"),
        ("a.JPG", "a.json", "a.jpg"),
    ],
)
def test_the_image_of_a_file(tmp_path: Path, image: str, annotations: str, image_path: str | None) -> None:
    save_images(tmp_path / image, tmp_path / Path(image).with_stem("b"))
    labelme_file(tmp_path / annotations, image_path, CAR)
    labelme_file((tmp_path / annotations).with_stem("b"), image_path and image_path.replace("a.jpg", "b.jpg"), CAR)
    if "json/" in annotations:
        (tmp_path / "json").rename(tmp_path / "labels")
    index = open_index(tmp_path, val_fraction=0.5)
    assert index.format == "labelme"
    assert boxes_by_image(index)[image] == [CAR_BOX]
    assert require_images(index) == []
    assert index.original_size.tolist() == [[100, 200]] * 2


@pytest.mark.parametrize("layout", ["{split}/{name}", "images/{split}/{name}", "{split}/images/{name}"])
def test_split_folders(tmp_path: Path, layout: str) -> None:
    for split in ("train", "val"):
        image = tmp_path / layout.format(split=split, name=f"{split}.jpg")
        save_images(image)
        labelme_file(image.with_suffix(".json"), image.name, CAR)
    assert split_of(open_index(tmp_path)) == {"train.jpg": "train", "val.jpg": "val"}


def test_annotations_in_split_folders_next_to_the_images(tmp_path: Path) -> None:
    for split in ("train", "val"):
        save_images(tmp_path / "images" / split / f"{split}.jpg")
        labelme_file(tmp_path / "annotations" / split / f"{split}.json", f"{split}.jpg", CAR)
    assert split_of(open_index(tmp_path)) == {"train.jpg": "train", "val.jpg": "val"}


@pytest.mark.parametrize(
    ("image", "image_path"), [("images/{}/a.jpg", "..\\..\\images\\{}\\a.jpg"), ("labels/{}/a.jpg", "a.jpg")]
)
def test_images_of_the_same_name_in_two_folders(tmp_path: Path, image: str, image_path: str) -> None:
    for name in ("one", "two"):
        save_images(tmp_path / image.format(name))
        labelme_file(tmp_path / "labels" / name / "a.json", image_path.format(name), CAR)
    index = open_index(tmp_path, val_fraction=0.5)
    assert boxes_by_image(index) == {image.format(name): [CAR_BOX] for name in ("one", "two")}


def test_shapes(tmp_path: Path) -> None:
    save_images(tmp_path / "a.jpg", tmp_path / "b.jpg")
    labelme_file(
        tmp_path / "a.json", "a.jpg", CAR,
        labelme_shape("car", [[10, 10], [50, 20], [30, 70]], "polygon"),
        labelme_shape("boat", [[10, 10], [50, 20], [30, 70]], None),  # LabelMe 2
        labelme_shape("boat", [[50, 50], [53, 54]], "circle"),
        labelme_shape("car", [[10, 20], [60, 20], [60, 50], [10, 50]], "rectangle"),  # X-AnyLabeling
        labelme_shape("car", [[20, 10], [30, 20], [20, 30], [10, 20]], "rotation"),
        labelme_shape("car", [[1, 2], [3, 4]], "line"), labelme_shape("car", [[1, 2]], "point"),
        labelme_shape("car", [[1, 2], [3, 4], [5, 6]], "linestrip"),
    )  # fmt: skip
    labelme_file(tmp_path / "b.json", "b.jpg", imageHeight=None, imageWidth=None)
    index = open_index(tmp_path, val_fraction=0.5)
    assert boxes_by_image(index) == {
        "a.jpg": [
            CAR_BOX,
            ("car", [10, 10, 50, 70]),
            ("boat", [10, 10, 50, 70]),
            ("boat", [45, 45, 55, 55]),
            ("car", [10, 20, 60, 50]),
            ("car", [10, 10, 30, 30]),
        ],
        "b.jpg": [],
    }
    assert index.original_size.tolist() == [[100, 200]] * 2  # of b.jpg, from its header
    notes = "; ".join(index.notes)
    for part in (
        "2 × polygon: the box around it is used",
        "1 × circle: ",
        "1 × rotation: ",
        "1 × linestrip, which has no",
    ):
        assert part in notes, part


def test_files_that_cannot_be_read_are_reported(tmp_path: Path) -> None:
    save_images(*(tmp_path / f"{name}.jpg" for name in "abcdefg"))
    labelme_file(tmp_path / "a.json", "a.jpg", CAR, labelme_shape("", [[1, 2], [3, 4]]), labelme_shape("car", [[1, 2]]))
    labelme_file(tmp_path / "b.json", "b.jpg", CAR, imageData="x" * 200_000)
    text = (tmp_path / "a.json").read_text()
    (tmp_path / "c.json").write_text(text[: len(text) // 2])
    (tmp_path / "d.json").write_bytes(
        json.dumps({"shapes": [], "imagePath": "车.jpg"}, ensure_ascii=False).encode("gbk")
    )
    (tmp_path / "e.json").write_text('{"flags": ' + "[" * 100_000 + "]" * 100_000 + ', "shapes": []}')
    (tmp_path / "f.json").write_text('{"classes": ["car"]}')
    labelme_file(tmp_path / "g.json", "x\0y/\0.jpg", CAR)
    problems = ProblemCollector()
    index = open_index(tmp_path, problems=problems, val_fraction=0.5)
    assert set(boxes_by_image(index)) == {"a.jpg", "b.jpg", "g.jpg"}
    found = {problem.kind: problem for problem in problems.summarize()}
    assert found["unreadable-annotations"].count == 4
    assert [example[:6] for example in found["unreadable-annotations"].examples] == [f"{c}.json" for c in "cdef"]
    assert found["no-class"].examples == ("a.json, shape 2",)
    assert found["malformed-box"].examples == ("a.json, shape 3: rectangle with 1 points",)
    (tmp_path / "a.json").write_text(text.replace('"car"', '"truck"'))
    assert "truck" in open_index(tmp_path, val_fraction=0.5).class_names  # a changed file is read again


def test_a_folder_without_a_readable_file(tmp_path: Path) -> None:
    save_images(tmp_path / "a.jpg")
    (tmp_path / "a.json").write_text('{"shapes": [{"points": [[1, 2')
    with pytest.raises(DataError, match="No image has annotations that can be read") as raised:
        open_index(tmp_path)
    assert "a.json: not a file of LabelMe" in str(raised.value)
