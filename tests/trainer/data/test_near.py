"""What is near is named: a split folder with another name, a data set further down, unused images, a second format with
more boxes, placeholders, and a validation split that is the training split. The layouts are those of repositories."""

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from stoker.data.index import open_index
from stoker.data.validation.check import DatasetCheck, check_dataset
from stoker.data.validation.problems import Problem
from stoker.report.dataset import print_check
from stoker.training.start import describe_data
from stoker_watch.errors import DataError

ROW = "0 0.5 0.5 0.4 0.4\n"


def write_image(path: Path, number: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (64, 48), (number * 9 % 255, 80, number * 5 % 255)).save(path)


def write_pairs(images: Path, labels: Path, names: list[str], rows: str = ROW) -> None:
    labels.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        write_image(images / f"{name}.jpg", number)
        (labels / f"{name}.txt").write_text(rows)


def write_coco(file: Path, boxes: dict[str, list[float]]) -> None:
    annotations = [
        {"id": n, "image_id": n, "category_id": 1, "bbox": box, "area": 400, "iscrowd": 0}
        for n, box in enumerate(boxes.values())
    ]
    images = [{"id": n, "file_name": name, "width": 64, "height": 48} for n, name in enumerate(boxes)]
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "cat"}]}
    file.write_text(json.dumps(content))


def items(report: DatasetCheck) -> dict[str, Problem]:
    return {problem.kind: problem for problem in report.items}


@pytest.mark.parametrize(
    ("folder", "written"),
    [("validate/images", "val/images"), ("valid/images", "images/val"), ("images/validation", "images/val2017")],
)
def test_the_folder_of_a_split_that_is_named_wrongly(tmp_path: Path, folder: str, written: str) -> None:
    """As in data.yaml files that were written for Ultralytics and moved beside an export of Roboflow."""
    for place, name in (("train/images", "t"), (folder, "v")):
        names = [f"{name}{n}" for n in range(4)]
        write_pairs(tmp_path / place, tmp_path / place.replace("images", "labels"), names)
    (tmp_path / "data.yaml").write_text(f"train: train/images\nval: {written}\nnames: [cat]\n")
    with pytest.raises(DataError) as raised:
        open_index(tmp_path)
    assert f"did you mean val: {folder}?" in (raised.value.fix or "")
    (tmp_path / "data.yaml").write_text(f"train: train/images\nval: {folder}\nnames: [cat]\n")
    assert open_index(tmp_path).splits == ("train", "val")


def test_a_darknet_folder_further_down(tmp_path: Path) -> None:
    """As AlexeyAB's Darknet has it: build/darknet/x64/data/obj.data, with lists relative to x64."""
    data = tmp_path / "repo" / "build" / "darknet" / "x64" / "data"
    write_pairs(data / "obj", data / "obj", [f"i{n}" for n in range(8)])
    (data / "obj.names").write_text("cat\n")
    (data / "obj.data").write_text(
        "classes = 1\ntrain = data/train.txt\nvalid = data/test.txt\nnames = data/obj.names\nbackup = backup/\n"
    )
    for name, numbers in (("train", range(6)), ("test", range(6, 8))):
        (data / f"{name}.txt").write_text("".join(f"data/obj/i{n}.jpg\n" for n in numbers))
    (tmp_path / "repo" / "cfg").mkdir()
    (tmp_path / "repo" / "README.md").write_text("# Darknet\n")
    with pytest.raises(DataError, match="No annotations found") as raised:
        open_index(tmp_path / "repo")
    assert raised.value.choices == (str(data),)
    assert raised.value.fix == f"name that folder: {data}"
    assert len(open_index(data)) == 8


def test_several_sets_further_down_are_all_named(tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_coco(tmp_path / "a" / "b" / name / "annotations.json", {"p.jpg": [3, 3, 9, 9]})
        write_image(tmp_path / "a" / "b" / name / "p.jpg")
    with pytest.raises(DataError) as raised:
        open_index(tmp_path)
    assert [Path(choice).name for choice in raised.value.choices] == ["first", "second"]
    (tmp_path / "empty" / "a" / "b").mkdir(parents=True)
    with pytest.raises(DataError, match="No annotations found") as raised:
        open_index(tmp_path / "empty")
    assert raised.value.choices == ()


def test_lists_that_leave_annotated_images_unused(tmp_path: Path) -> None:
    write_pairs(tmp_path / "obj", tmp_path / "obj", [f"i{n:03d}" for n in range(120)])
    (tmp_path / "obj.names").write_text("cat\n")
    (tmp_path / "train.txt").write_text("".join(f"obj/i{n:03d}.jpg\n" for n in range(10)))
    (tmp_path / "val.txt").write_text("".join(f"obj/i{n:03d}.jpg\n" for n in range(10, 13)))
    unused = items(check_dataset(tmp_path))["not-in-a-split"]
    assert unused.count == 107
    assert unused.examples[:2] == ("obj/i013.jpg", "obj/i014.jpg")
    (warning,) = (text for kind, text in describe_data(open_index(tmp_path)) if kind == "warning")
    assert "107 × annotated image that is in no list of a split" in warning
    assert "obj/i013.jpg, obj/i014.jpg, …" in warning


def test_a_second_format_with_more_boxes(tmp_path: Path) -> None:
    write_pairs(tmp_path / "images", tmp_path / "labels", [f"p{n}" for n in range(8)], ROW + "0 0.2 0.2 0.1 0.1\n")
    write_coco(tmp_path / "annotations" / "instances.json", {f"p{n}.jpg": [3, 3, 20, 20] for n in range(4)})
    report = check_dataset(tmp_path)
    assert report.format == "coco"
    other = items(report)["more-boxes-in-another-format"]
    assert (other.count, other.row.severity) == (16 - 4, "warning")
    assert "--format yolo" in other.examples[0]
    assert any(kind == "warning" and "--format yolo" in text for kind, text in describe_data(open_index(tmp_path)))
    assert "more-boxes-in-another-format" not in items(check_dataset(tmp_path, format="yolo"))


def test_placeholders_are_called_by_their_name(tmp_path: Path) -> None:
    """COCO writes x, y, width, height; tables corners; YOLO also with a class of -1."""
    placeholder = [-1.0, -1.0, -1.0, -1.0]
    boxes = {f"p{n}.jpg": [3.0, 3.0, 20.0, 20.0] if n < 7 else placeholder for n in range(10)}
    for folder in ("coco", "csv", "unit"):
        for name in boxes:
            write_image(tmp_path / folder / name)
    write_coco(tmp_path / "coco" / "annotations.json", boxes)
    for folder, size in (("csv", 1), ("unit", 100)):
        boxes |= {name: [-size] * 4 for name in list(boxes)[7:]}
        rows = [f"{name},64,48,cat,{','.join(str(max(-1, v / size)) for v in box)}" for name, box in boxes.items()]
        text = "\n".join(["filename,width,height,class,xmin,ymin,xmax,ymax", *rows, ""])
        (tmp_path / folder / "labels.csv").write_text(text)
    write_pairs(tmp_path / "yolo", tmp_path / "yolo", [f"p{n}" for n in range(10)])
    for n, row in ((7, "0 -1 -1 -1 -1"), (8, "-1 -1 -1 -1 -1"), (9, "0 -1.0 -1.0 -1.0 -1.0")):
        (tmp_path / "yolo" / f"p{n}.txt").write_text(row + "\n")
    for folder in ("coco", "csv", "unit", "yolo"):
        report = check_dataset(tmp_path / folder)
        found = items(report)
        assert {kind: problem.count for kind, problem in found.items() if problem.row.unit == "box"} == {
            "placeholder-box": 3
        }, folder
        assert found["no-box-left"].count == 3
        assert "−1" in found["placeholder-box"].title


def test_training_and_validation_on_the_same_images_is_a_warning(tmp_path: Path) -> None:
    """As in coco8.yaml of those who copied it for a first try."""
    write_pairs(tmp_path / "images" / "train2017", tmp_path / "labels" / "train2017", [f"p{n}" for n in range(8)])
    (tmp_path / "coco8.yaml").write_text("path: .\ntrain: images/train2017\nval: images/train2017\nnames: {0: cat}\n")
    finding = next(f for f in check_dataset(tmp_path).findings if f.id == "in-two-splits")
    assert finding.severity == "warning"
    assert finding.title.startswith("8 images: in more than one split")
    (warning,) = (text for kind, text in describe_data(open_index(tmp_path)) if kind == "warning")
    assert "8 × in more than one split" in warning


def test_the_numbers_of_a_header_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Images that are left out because of their annotations are in no split, and part of the sum."""
    boxes = {f"p{n}.jpg": [3.0, 3.0, 20.0, 20.0] if n < 24 else [5.0, 5.0, 0.0, 9.0] for n in range(30)}
    for name in boxes:
        write_image(tmp_path / name)
    write_coco(tmp_path / "annotations.json", boxes)
    print_check(check_dataset(tmp_path))
    header = capsys.readouterr().out.splitlines()[0]
    match = re.search(r"(\d+) images \((.*?)\)", header)
    assert match is not None
    numbers = dict(part.rsplit(" ", 1) for part in match[2].split(", "))
    assert numbers.keys() == {"train", "val", "left out"}
    assert numbers["left out"] == "6"
    assert int(match[1]) == sum(map(int, numbers.values())) == 30
