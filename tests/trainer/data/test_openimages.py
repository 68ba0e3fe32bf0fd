"""Open Images CSV: layouts, class names, group boxes, and tables of which only some images are there."""

import re
from pathlib import Path

import pytest

from stoker.data.index import open_index
from stoker.data.validation.problems import ProblemCollector
from stoker_watch.errors import DataError
from tests.fixtures.data_cvat import boxes_by_image, split_of
from tests.trainer.data.exports import open_images_row, open_images_table, save_images

CAR, GROUP = "/m/0k4j", "/m/01yrx"
DESCRIPTIONS = f"{CAR},Car\n{GROUP},Cat\n/m/011k07,Tortoise\n"
IDS = {"train": "000002b66c9c498e", "validation": "0001eeaf4aed83f9", "test": "000a1249af2bc5f0"}

BOXES = [("Car", [20, 20, 100, 60]), ("Cat", [100, 20, 150, 60])]


def rows(image_id: str) -> tuple[str, ...]:
    return (
        open_images_row("absent0000000001", CAR, 0.1, 0.1, 0.2, 0.2),
        open_images_row(image_id, CAR, 0.1, 0.2, 0.5, 0.6),
        open_images_row(image_id, GROUP, 0.5, 0.2, 0.75, 0.6, is_group=1),
        open_images_row("absent0000000002", CAR, 0.1, 0.1, 0.2, 0.2),
        open_images_row("absent0000000002", CAR, 0.3, 0.1, 0.4, 0.2),
    )


def official(root: Path) -> None:
    for split, image_id in IDS.items():
        save_images(root / split / f"{image_id}.jpg")
        prefix = "oidv6-train" if split == "train" else split
        open_images_table(root / f"{prefix}-annotations-bbox.csv", *rows(image_id))
    (root / "class-descriptions-boxable.csv").write_text(DESCRIPTIONS)
    (root / "train-annotations-human-imagelabels-boxable.csv").write_text(
        "ImageID,Source,LabelName,Confidence\n000002b66c9c498e,verification,/m/014j1m,0\n"
    )


def fiftyone(root: Path) -> None:
    for split, image_id in IDS.items():
        save_images(root / split / "data" / f"{image_id}.jpg")
        open_images_table(root / split / "labels" / "detections.csv", *rows(image_id))
        (root / split / "metadata").mkdir()
        (root / split / "metadata" / "classes.csv").write_text("LabelName,DisplayName\n" + DESCRIPTIONS)


def toolkit(root: Path) -> None:
    for split, image_id in IDS.items():
        save_images(root / "Dataset" / split / "Car" / f"{image_id}.jpg")
        open_images_table(root / "csv_folder" / f"{split}-annotations-bbox.csv", *rows(image_id))
    (root / "csv_folder" / "class-descriptions-boxable.csv").write_text(DESCRIPTIONS)


@pytest.mark.parametrize("write", [official, fiftyone, toolkit])
def test_layouts(tmp_path: Path, write: object) -> None:
    assert callable(write)
    write(tmp_path)
    index = open_index(tmp_path)
    assert index.format == "openimages"
    assert index.class_names == ("Car", "Cat")
    splits = {"validation": "val"}
    assert split_of(index) == {f"{image_id}.jpg": splits.get(split, split) for split, image_id in IDS.items()}
    for boxes in boxes_by_image(index).values():
        assert boxes == BOXES
    assert index.crowd.tolist() == [False, True] * 3
    assert not any("CSV" in note for note in index.notes)
    assert sum("1 of its 3 images are here; the others are left out" in note for note in index.notes) == 3


def test_a_table_alone_has_the_names_of_the_labels(tmp_path: Path) -> None:
    save_images(tmp_path / "images" / "a.jpg", tmp_path / "images" / "b.jpg")
    open_images_table(
        tmp_path / "boxes.csv", *(open_images_row(image_id, CAR, 0.1, 0.2, 0.5, 0.6) for image_id in "ab"),
        "a,xclick,/m/0k4j,1,0.1,x,0.2,0.3,0,0,0,0,0", "a,xclick,/m/0k4j",
    )  # fmt: skip
    problems = ProblemCollector()
    index = open_index(tmp_path / "boxes.csv", problems=problems, val_fraction=0.5)
    assert (index.format, index.class_names) == ("openimages", (CAR,))
    assert any("there is no class-descriptions-boxable.csv" in note for note in index.notes)
    (problem,) = [problem for problem in problems.summarize() if problem.kind == "malformed-row"]
    assert problem.count == 2
    assert problem.examples[0] == "boxes.csv:4: 0.1, x, 0.2, 0.3, not four numbers"


def test_none_of_the_images_is_there(tmp_path: Path) -> None:
    save_images(tmp_path / "other.jpg")
    open_images_table(tmp_path / "validation-annotations-bbox.csv", *rows("0001eeaf4aed83f9"))
    with pytest.raises(DataError, match="None of the images of the tables is here") as raised:
        open_index(tmp_path)
    assert "such as absent0000000001.jpg" in str(raised.value)


@pytest.mark.parametrize("form", ["with the suffix", "with semicolons and decimal commas"])
def test_tables_that_others_wrote(tmp_path: Path, form: str) -> None:
    """ImageID as the name of a file; a table that a spreadsheet saved in a country with decimal commas."""
    official(tmp_path)
    for table in tmp_path.glob("*-bbox.csv"):
        text = table.read_text()
        if form == "with the suffix":
            text = re.sub(r"^(\w{16}),", r"\1.jpg,", text, flags=re.MULTILINE)
        else:
            text = text.replace(",", ";").replace(".", ",")
        table.write_text(text)
    index = open_index(tmp_path)
    assert (index.format, index.class_names) == ("openimages", ("Car", "Cat"))
    assert all(boxes == BOXES for boxes in boxes_by_image(index).values())
    assert index.crowd.tolist() == [False, True] * 3


def test_another_table_is_not_open_images(tmp_path: Path) -> None:
    save_images(tmp_path / "a.jpg", tmp_path / "b.jpg")
    (tmp_path / "boxes.csv").write_text("ImageID,class,xmin,ymin,xmax,ymax\na,car,4,2,20,10\nb,car,4,2,20,10\n")
    assert open_index(tmp_path, val_fraction=0.5).format == "csv"
