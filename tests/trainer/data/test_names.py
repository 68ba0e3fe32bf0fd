"""Names that annotations write differently from the disk: corrected if exactly one file fits, else not."""

import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from PIL import Image

from stoker.data.formats.images import find_existing_dir, resolve_names
from stoker.data.formats.tables import group_by_folder
from stoker.data.index import open_index
from stoker.data.validation.problems import PROBLEM_KINDS
from tests.trainer.data.examples import property_test


def make(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        Image.new("RGB", (40, 30)).save(folder / name, "JPEG")
    return folder


def coco(path: Path, *names: str) -> Path:
    images = [{"id": n, "file_name": name, "width": 40, "height": 30} for n, name in enumerate(names)]
    boxes = [{"id": n, "image_id": n, "category_id": 1, "bbox": [1, 2, 10, 10]} for n in range(len(names))]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "a"}]}))
    return path


def read_index(root: Path, data: Path) -> tuple[list[Path], dict[str, int]]:
    index = open_index(data)
    paths = [index.path(row).relative_to(root) for row in range(len(index))]
    assert all((root / path).is_file() for path in paths)
    return paths, {
        problem.kind: problem.count for problem in index.problems if PROBLEM_KINDS[problem.kind].unit == "image"
    }


@pytest.mark.parametrize(
    ("written_name", "file"),
    [
        ("IMG_1.JPG", "img_1.jpg"),
        ("img_1.jpg", "IMG_1.JPG"),
        (unicodedata.normalize("NFC", "café.jpg"), unicodedata.normalize("NFD", "café.jpg")),
        (unicodedata.normalize("NFD", "CAFÉ.jpg"), unicodedata.normalize("NFC", "café.jpg")),
        ("two%20words.jpg", "two words.jpg"),
        ("two words.jpg", "two%20words.jpg"),
        ("a.jpg ", "a.jpg"),
        ("STRASSE.jpg", "straße.jpg"),
    ],
)
def test_a_name_written_differently_is_corrected(tmp_path, written_name, file):
    make(tmp_path / "images", file, "other.jpg")
    paths, problems = read_index(tmp_path, coco(tmp_path / "a.json", written_name, "other.jpg"))
    assert paths == [Path("images") / file, Path("images/other.jpg")]
    assert problems == {"wrong-case-name": 1}


def test_the_folder_of_images_is_found_by_names_written_differently(tmp_path):
    make(tmp_path / "train" / "data", "img_1.jpg", "img_2.jpg")
    coco(tmp_path / "train" / "labels.json", "IMG_1.JPG", "IMG_2.JPG")
    paths, problems = read_index(tmp_path, tmp_path)
    assert paths == [Path("train/data/img_1.jpg"), Path("train/data/img_2.jpg")]
    assert problems == {"wrong-case-name": 2}


def test_correct_names_are_not_changed(tmp_path):
    names = ["with space.jpg", "Ünïcode.jpg", "100%25.jpg", "a.JPG", "A.jpg"]
    make(tmp_path / "images", *names)
    paths, problems = read_index(tmp_path, coco(tmp_path / "a.json", *names))
    assert paths == [Path("images") / name for name in names]
    assert not problems


def test_folders_and_backslashes(tmp_path):
    make(tmp_path / "images" / "Day One", "a.jpg")
    paths, problems = read_index(tmp_path, coco(tmp_path / "a.json", "day one\\A.JPG"))
    assert paths == [Path("images/Day One/a.jpg")]
    assert problems["wrong-case-name"] >= 1


def test_a_file_is_never_guessed(tmp_path):
    make(tmp_path, "a.jpg", "A.JPG", "b.jpg", "c.jpg")
    assert resolve_names(tmp_path, ["A.jpg"]) == {}  # two files fit
    assert resolve_names(tmp_path, ["a.JPG", "A.jpg"]) == {}  # two names and two files
    assert resolve_names(tmp_path, ["b.jpg", "B.jpg"]) == {}  # the file has another name of the list
    assert resolve_names(tmp_path, ["C.jpg", "c.JPG"]) == {}  # two names for one file
    assert resolve_names(tmp_path, ["d.jpg"]) == {}
    assert resolve_names(tmp_path / "absent", ["a.jpg"]) == {}
    assert find_existing_dir(tmp_path / "absent") is None


@property_test(
    st.lists(st.text("abAB %é\u0301", min_size=1, max_size=4), unique=True, max_size=6), st.data(), few=15, many=200
)
def test_matches_exist_and_belong_to_one_name(tmp_path_factory, files, data):
    folder = tmp_path_factory.mktemp("names")
    files = [f"x{name}.jpg" for name in files]
    for name in files:
        (folder / name).touch()
    names = data.draw(st.lists(st.sampled_from(files or ["x.jpg"]).map(str.swapcase) | st.just("xA.jpg"), max_size=6))
    matched = resolve_names(folder, names)
    assert set(matched) <= set(names) - set(files)
    assert set(matched.values()) <= set(files) - set(names)
    assert len(set(matched.values())) == len(matched)


def test_the_index_is_rebuilt_when_a_file_is_renamed(tmp_path):
    make(tmp_path / "images", "a.jpg")
    data = coco(tmp_path / "a.json", "A.jpg")
    assert read_index(tmp_path, data)[0] == [Path("images/a.jpg")]
    (tmp_path / "images" / "a.jpg").rename(tmp_path / "images" / "A.jpg")
    assert read_index(tmp_path, data) == ([Path("images/A.jpg")], {})


@property_test(st.lists(st.integers(0, 5), max_size=30), st.data(), few=20, many=200)
def test_images_by_folder(numbers: list[int], data: st.DataObject) -> None:
    folder = np.array(numbers, np.int32)
    rows = np.array(sorted(data.draw(st.sets(st.sampled_from(range(len(numbers)))))) if numbers else [], np.int64)
    groups = [(number, inside.tolist()) for number, inside in group_by_folder(folder, rows)]
    expected = [(number, [row for row in rows.tolist() if numbers[row] == number]) for number in sorted(set(numbers))]
    assert groups == [(number, inside) for number, inside in expected if inside]
