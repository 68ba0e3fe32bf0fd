"""YOLO: every layout gives the same boxes, the paths in exports are resolved, a bad row affects only itself."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from PIL import Image

from stoker.data.index import Index, open_index, require_images
from stoker_watch.errors import DataError
from tests.fixtures.data_yolo import ROW, flat, kinds, label, make_image
from tests.trainer.data.examples import property_test

NAMES = "names: [cat, dog]\n"


def content(index: Index) -> dict[str, dict[str, list[list[float]]]]:
    """Split → name of each image → its boxes with their classes."""
    boxes = np.column_stack([index.boxes, index.labels])
    return {
        split: {
            index.path(row).name: boxes[index.offsets[row] : index.offsets[row + 1]].tolist()
            for row in index.image_indices(split)
        }
        for split in index.splits
    }


@property_test(
    st.tuples(st.integers(2, 60), st.integers(2, 60)),
    st.lists(st.tuples(st.integers(0, 2), *[st.floats(0, 1)] * 4), min_size=1, max_size=5),
    few=6,
    many=60,
)
def test_a_row_is_its_box(
    tmp_path_factory: pytest.TempPathFactory, size: tuple[int, int], rows: list[tuple[float, ...]]
):
    root, (width, height) = tmp_path_factory.mktemp("set"), size
    expected = []
    lines = []
    for name, x1, y1, x2, y2 in rows:
        x1, x2, y1, y2 = min(x1, x2), max(x1, x2), min(y1, y2), max(y1, y2)
        lines.append(f"{name} {(x1 + x2) / 2} {(y1 + y2) / 2} {x2 - x1} {y2 - y1}")
        expected.append([x1 * width, y1 * height, x2 * width, y2 * height])
    make_image(root / "images" / "a.png", width, height)
    label(root / "labels" / "a.txt", "\n".join([*lines, "0 0.5 0.5 1 1"]))
    index = open_index(root)
    assert index.original_size.tolist() == [[height, width]]
    boxes = index.boxes.tolist()
    for box in expected:  # boxes without area, duplicates, and boxes within 0 … 1 pixels are dropped by the cleaning
        is_dropped = box[2] - box[0] < 1e-3 or box[3] - box[1] < 1e-3 or max(box) <= 1
        assert is_dropped or min(np.abs(np.array(boxes) - box).max(1)) < 1e-3


def split_in_images(root: Path) -> Path:
    for split in ("train", "val"):
        make_image(root / "images" / split / f"{split}.jpg")
        label(root / "labels" / split / f"{split}.txt")
    return root


def images_in_split(root: Path) -> Path:
    for split, folder in (("train", "train"), ("val", "valid")):
        make_image(root / folder / "images" / f"{split}.jpg")
        label(root / folder / "labels" / f"{split}.txt")
    return root


def labels_next_to_images(root: Path) -> Path:
    for split in ("train", "val"):
        make_image(root / split / f"{split}.jpg")
        label(root / split / f"{split}.txt")
    (root / "train" / "_darknet.labels").write_text("cat\ndog\n")
    return root


def labels_apart(root: Path) -> Path:
    for split in ("train", "val"):
        make_image(root / split / f"{split}.jpg")
        label(root / "labels" / split / f"{split}.txt")
    (root / "labels" / "classes.txt").write_text("cat\ndog\n")
    return root


def roboflow(root: Path) -> Path:
    images_in_split(root)
    (root / "README.roboflow.txt").write_text("exported\n")
    (root / "data.yaml").write_text(
        "train: ../train/images\nval: ../valid/images\ntest: ../test/images\nnc: 2\n" + NAMES
    )
    return root


def another_machine(root: Path) -> Path:
    images_in_split(root)
    text = "path: /content/datasets/mine\ntrain: /content/datasets/mine/train/images\nval: C:\\data\\valid\\images\n"
    (root / "data.yaml").write_text(text + "names:\n  0: cat\n  1: dog\n")
    return root


def lists(root: Path) -> Path:
    split_in_images(root)
    (root / "lists").mkdir()
    (root / "lists" / "train.txt").write_text("./images/train/train.jpg\n\n")
    (root / "lists" / "val.txt").write_text("/elsewhere/mine/images/val/VAL.JPG\n")
    (root / "dataset.yaml").write_text(f"path: {root}\ntrain: lists/train.txt\nval: [lists/val.txt]\n{NAMES}")
    return root


def lists_alone(root: Path) -> Path:
    split_in_images(root)
    for split in ("train", "val"):
        (root / f"{split}.txt").write_text(f"data/images/{split}/{split}.jpg\n")
    (root / "obj.names").write_text("cat\ndog\n")
    return root


def darknet(root: Path) -> Path:
    """As CVAT exports it."""
    for split, folder in (("train", "obj_train_data"), ("val", "obj_valid_data")):
        make_image(root / folder / f"{split}.jpg")
        label(root / folder / f"{split}.txt")
        (root / f"{folder[4:9]}.txt").write_text(f"data/{folder}/{split}.jpg\n")
    (root / "obj.names").write_text("cat\ndog\n")
    (root / "obj.data").write_text(
        "classes = 2\ntrain = data/train.txt\nvalid = data/valid.txt\nnames = data/obj.names\nbackup = backup/\n"
    )
    return root


@pytest.mark.parametrize(
    "layout",
    [
        split_in_images,
        images_in_split,
        labels_next_to_images,
        labels_apart,
        roboflow,
        another_machine,
        lists,
        lists_alone,
        darknet,
    ],
)
def test_every_layout(tmp_path: Path, layout: Callable[[Path], Path]) -> None:
    root = layout(tmp_path / "set")
    if layout in (split_in_images, images_in_split):
        (root / "classes.txt").write_text("cat\ndog\n")
    index = open_index(root)
    assert index.format == "yolo"
    assert index.class_names == ("cat", "dog")
    box = [[15.0, 5.0, 25.0, 15.0, 1.0]]
    assert content(index) == {"train": {"train.jpg": box}, "val": {"val.jpg": box}}
    assert kinds(index).keys() <= {"class-not-in-split", "unused-class", "wrong-case-name"}
    assert require_images(index) == []
    assert content(open_index(tmp_path)) == content(index)  # also from the parent folder


def test_a_data_set_of_its_file(tmp_path: Path) -> None:
    root = split_in_images(tmp_path / "set")
    for name in ("first", "second"):
        (tmp_path / f"{name}.yaml").write_text(
            f"path: ../set\ntrain: images/train\nval: images/val\nnames: [x, {name}]\n"
        )
    for name in ("first", "second", "first"):  # two descriptions of one folder are two data sets
        index = open_index(tmp_path / f"{name}.yaml")
        assert index.class_names == ("x", name)
        assert index.root == root
    with pytest.raises(DataError, match="Several files could describe") as raised:
        open_index(tmp_path)
    assert raised.value.choices == ("first.yaml", "second.yaml")


def test_resolved_paths_are_noted(tmp_path: Path) -> None:
    index = open_index(roboflow(tmp_path / "set"))
    notes = " ".join(index.notes)
    assert f"'../train/images' is read from {tmp_path / 'set' / 'train' / 'images'}" in notes
    assert "the test split is left out" in notes
    assert "path '/content/datasets/mine' of data.yaml does not exist" in " ".join(
        open_index(another_machine(tmp_path / "other")).notes
    )


@pytest.mark.parametrize(
    ("row", "kind", "example"),
    [
        ("0 0.5 0.5 nothing 0.5", "malformed-row", "labels/a.txt:2: '0 0.5 0.5 nothing 0.5'"),
        ("0 0.5 0.5 0.5", "malformed-row", "3 numbers after the class"),
        ("0.5 0.5 0.5 0.5 0.5", "malformed-row", "class 0.5"),
        ("-1 0.5 0.5 0.5 0.5", "malformed-row", "class -1"),
        ("cat 0.5 0.5 0.5 0.5", "malformed-row", "cat"),
        ("2 0.5 0.5 0.5 0.5", "unknown-class", "labels/a.txt:2: class 2, the classes are 0 … 1"),
        ("0 20 10 10 10", "not-normalized", "labels/a.txt:2: '0 20 10 10 10'"),
        ("0 10 2 30 2 30 18 10 18", "not-normalized", "a.txt:2"),
        ("0 0.5 0.5 nan 0.5", "not-a-number", "line 2"),
        ("0 0.5 0.5 -0.1 0.1", "negative-size", "line 2"),
        ("0 0.5 0.5 0 0.1", "zero-size", "line 2"),
    ],
)
def test_a_bad_row_affects_only_itself(tmp_path: Path, row: str, kind: str, example: str) -> None:
    index = open_index(flat(tmp_path, f"1 0.5 0.5 0.25 0.5\n{row}\n\n0 0.5 0.5 0.5 0.5"))
    assert example in kinds(index)[kind]
    assert index.labels.tolist() == [1, 0]
    assert len(index) == 2


@pytest.mark.parametrize(
    ("row", "box", "note_part"),
    [
        ("0 0.25 0.1 0.75 0.3 0.5 0.9", [10, 2, 30, 18], "polygons"),
        ("0 0.2 0.2 0.4 0.2 0.4 0.6 0.2 0.6", [8, 4, 16, 12], "polygons"),
        ("0 0.5 0.5 0.25 0.5 0.93", [15, 5, 25, 15], "a confidence"),
        ("0 0.5 0.5 0.25 0.5 0.1 0.1 2 0.9 0.9 1 0 0 0", [15, 5, 25, 15], "have keypoints"),
        ("0 0.5 0.5 0.25 0.5 0.1 0.1 2 0.9 0.9 1 0 0 0 0.2 0.2 2.0", [15, 5, 25, 15], "have keypoints"),
        ("\ufeff0.0  .5\t5e-1 0.25 0.5", [15, 5, 25, 15], None),
        ("0 1.002 0.5 0.1 0.5", [38.08, 5, 42.08, 15], None),
    ],
)
def test_other_rows(tmp_path: Path, row: str, box: list[float], note_part: str | None) -> None:
    index = open_index(flat(tmp_path, row))
    assert index.boxes[0].tolist() == pytest.approx(box)
    assert note_part is None or any(note_part in note for note in index.notes)


def test_keypoints_are_not_polygons(tmp_path: Path) -> None:
    flat(tmp_path, "0 0.5 0.5 0.25 0.5 0.1 0.1 0.9 0.9")
    (tmp_path / "data.yaml").write_text("train: images\nkpt_shape: [2, 2]\nnames: [cat]\n")
    assert open_index(tmp_path).boxes.tolist() == [[15, 5, 25, 15]]


def test_images_and_labels_without_each_other(tmp_path: Path) -> None:
    root = flat(tmp_path)
    make_image(root / "images" / "alone.jpg")
    label(root / "labels" / "gone.txt")
    label(root / "labels" / "readme.txt", "these are labels\n")
    index = open_index(root)
    assert kinds(index)["no-label-file"] == "images/alone.jpg"
    assert kinds(index)["label-without-image"] == "labels/gone.txt"
    assert len(index) == 3  # it is background


def test_links_to_files_that_are_gone_are_not_left_out(tmp_path: Path) -> None:
    root = flat(tmp_path)
    (root / "images" / "gone.jpg").symlink_to(root / "elsewhere.jpg")
    label(root / "labels" / "gone.txt")
    assert "images/gone.jpg" in kinds(open_index(root))["box-of-unreadable-image"]
    (root / "labels" / "a.txt").unlink()
    (root / "labels" / "a.txt").symlink_to(root / "elsewhere.txt")
    with pytest.raises(DataError, match="cannot be read") as raised:
        open_index(root)
    assert raised.value.location == str(root / "labels" / "a.txt")


def test_names_match_in_any_case(tmp_path: Path) -> None:
    make_image(tmp_path / "images" / "A.JPG", format="JPEG")
    label(tmp_path / "labels" / "a.TXT")
    assert len(open_index(tmp_path).boxes) == 1


def test_boxes_are_of_the_upright_image(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    flat(tmp_path)
    make_image(tmp_path / "images" / "a.jpg", 40, 20, exif=exif)
    index = open_index(tmp_path)
    assert index.original_size[0].tolist() == [40, 20]
    assert index.boxes[0].tolist() == [7.5, 10, 12.5, 30]


def test_an_image_without_a_size_stays_without_its_boxes(tmp_path: Path) -> None:
    root = images_in_split(tmp_path)
    make_image(root / "train" / "images" / "b.jpg").write_bytes(b"")
    label(root / "train" / "labels" / "b.txt", ROW * 2)
    index = open_index(root)
    assert content(index)["train"]["b.jpg"] == []
    assert len(index.boxes) == 2
    assert index.original_size.tolist() == [[0, 0], [20, 40], [20, 40]]
    (problem,) = [problem for problem in index.problems if problem.kind == "box-of-unreadable-image"]
    assert problem.count == 2
    assert problem.examples[0] == "train/images/b.jpg: it has 0 bytes"
    assert "zero-size" not in kinds(index)  # a box that cannot be scaled is not wrong itself


@pytest.mark.parametrize("image_dir", [".", "lists"])
def test_a_list_is_relative_to_its_own_folder_or_the_root(tmp_path: Path, image_dir: str) -> None:
    file = make_image(tmp_path / image_dir / "a.jpg")
    label(tmp_path / image_dir / "labels" / "a.txt")
    label(tmp_path / "lists" / "train.txt", "a.jpg\n")
    label(tmp_path / "data.yaml", f"train: lists/train.txt\n{NAMES}")
    index = open_index(tmp_path)
    assert index.path(0) == file
    assert len(index.boxes) == 1


def test_a_changed_label_file_is_read_again(tmp_path: Path) -> None:
    root = flat(tmp_path)
    assert open_index(root).labels.tolist() == [1]
    label(root / "labels" / "a.txt", "0 0.5 0.5 0.5 0.5\n")
    assert open_index(root).labels.tolist() == [0]
    (root / "classes.txt").write_text("cow\npig\n")
    assert open_index(root).class_names == ("cow", "pig")


def test_classes(tmp_path: Path) -> None:
    index = open_index(flat(tmp_path / "a", names=None))
    assert index.class_names == ("class 0", "class 1")
    assert any("the classes have no names" in note for note in index.notes)
    root = flat(tmp_path / "b", names=None)
    (root / "notes.json").write_text('{"categories": [{"id": 1, "name": "no"}, {"id": 0, "name": "yes"}]}')
    assert open_index(root).class_names == ("yes", "no")
    (root / "data.yaml").write_text("train: images\nnc: 3\nnames: [no, on, 1.0]\n")
    assert open_index(root).class_names == ("no", "on", "1.0")  # YAML's booleans and numbers are names here
    (root / "data.yaml").write_text("train: images\nnc: 3\nnames: {'0': cat, 1: dog}\n")
    index = open_index(root)
    assert index.class_names == ("cat", "dog")
    assert any("nc is 3, but names has 2 classes" in note for note in index.notes)
    (root / "data.yaml").write_text("train: images\nnc: 2\nkpt_shape: 17\nnames: {0: a, 1: b}\n")
    assert open_index(root).class_names == ("a", "b")
    root = flat(tmp_path / "c", names=None)
    (root / "data.yaml").write_text("train: images\nnc: 3\n")
    assert open_index(root).class_names == ("class 0", "class 1", "class 2")


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("train: images\nnames: {0: cat, 2: dog}\n", "none with the number 1"),
        ("train: images\nnames: {0: cat, dog: 1}\n", "Expected `int`, got `str` - at `key` in `$.names`"),
        ("train: images\nnames: [cat, [dog]]\n", "Expected `str`, got `array` - at `$.names[1]`"),
        ("train: images\nnames: [cat\n", "data.yaml:3"),
        ("train: photos\nnames: [cat]\n", "train: photos"),
        ("train: images\nval: gone\nnames: [cat]\n", "delete it to split validation images off"),
        ("train: labels\nnames: [cat]\n", "no file in it ends in .jpg"),
        ("train: {a: 1}\nnames: [cat]\n", "got `object` - at `$.train`"),
        ('train: images\nnames: [a, ""]\n', "at `$.names[1]`"),
        ("train: images\nnc: two\n", "got `str` - at `$.nc`"),
        ("train: images\nnc: [2]\n", "got `array` - at `$.nc`"),
        ("train: images\nnc: 100001\n", "<= 100000 - at `$.nc`"),
        ("train: images\nkpt_shape: [17, x]\n", "at `$.kpt_shape[1]`"),
        ("train: images\npath: [a]\n", "at `$.path`"),
    ],
)
def test_a_description_that_cannot_be_used(tmp_path: Path, text: str, fragment: str) -> None:
    flat(tmp_path)
    (tmp_path / "data.yaml").write_text(text)
    with pytest.raises(DataError) as raised:
        open_index(tmp_path)
    assert fragment in str(raised.value)


def test_lists_of_names_that_differ(tmp_path: Path) -> None:
    flat(tmp_path)
    (tmp_path / "labels" / "classes.txt").write_text("dog\ncat\n")
    with pytest.raises(DataError, match="differ"):
        open_index(tmp_path)


def test_other_texts_next_to_images_are_not_yolo(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_image(tmp_path / f"{name}.jpg")
        label(tmp_path / f"{name}.txt", "a caption of 1 2 3 4 5\n")
    label(tmp_path / "requirements.txt", "torch\n")
    (tmp_path / "config.yaml").write_text("train: {epochs: 3}\nlr: 0.1\n")
    with pytest.raises(DataError, match="No annotations found"):
        open_index(tmp_path)


def test_a_split_folder_without_labels_is_an_error(tmp_path: Path) -> None:
    images_in_split(tmp_path)
    for file in (tmp_path / "valid" / "labels").iterdir():
        file.unlink()
    with pytest.raises(DataError, match="val split is empty"):
        open_index(tmp_path)
