"""What real exports and file systems do, and a reading of the code showed to be read wrong."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stoker.data.convert import convert
from stoker.data.formats.yolo import NAMES_FILES
from stoker.data.images.headers import read_header
from stoker.data.images.source import is_copied
from stoker.data.index import open_index
from stoker.data.packing import open_destination
from stoker.data.validation.clean import SplitOptions
from stoker.data.validation.split import find_groups
from stoker_watch.errors import DataError
from tests.drawn import draw
from tests.trainer.data.exports import open_images_row, open_images_table, save_images
from tests.trainer.data.shards import write_tar
from tests.trainer.data.test_openimages import toolkit
from tests.trainer.data.tfrecords import jpeg


def test_every_file_of_class_names_is_copied_from_a_bucket() -> None:
    assert all(map(is_copied, NAMES_FILES))


def automl(root: Path, *splits: str) -> Path:
    """AutoML's CSV, with an image of each kind of split."""
    rows = []
    for number, split in enumerate(splits):
        save_images(root / f"{number}.jpg")
        rows.append(f"{split},{number}.jpg,cat,0.1,0.1,,,0.5,0.5,,")
    (root / "labels.csv").write_text("\n".join(rows) + "\n")
    return root


def test_images_without_a_split_train_where_there_is_a_validation_split(tmp_path: Path) -> None:
    splits = ["TRAIN"] * 20 + ["VALIDATION"] * 3 + ["UNASSIGNED"] * 12
    index = open_index(automl(tmp_path / "set", *splits))
    val = sorted(index.path(i).stem for i in index.image_indices("val").tolist())
    assert val == ["20", "21", "22"]
    assert len(index.image_indices("train")) == 32
    assert any("12 of 35" in note and "training" in note for note in index.notes)


def test_a_changed_file_of_class_names_is_noticed(tmp_path: Path) -> None:
    """CVAT's YOLO 1.1: obj.data names obj.names."""
    (tmp_path / "data/train").mkdir(parents=True)
    save_images(tmp_path / "data/train/0.jpg", tmp_path / "data/train/1.jpg")
    for number in range(2):
        (tmp_path / f"data/train/{number}.txt").write_text(f"{number} 0.5 0.5 0.2 0.2\n")
    (tmp_path / "data/train.txt").write_text("data/train/0.jpg\ndata/train/1.jpg\n")
    (tmp_path / "data/obj.names").write_text("cat\ndog\n")
    (tmp_path / "data/obj.data").write_text("classes = 2\ntrain = data/train.txt\nnames = data/obj.names\n")
    assert open_index(tmp_path).class_names == ("cat", "dog")
    (tmp_path / "data/obj.names").write_text("person\nbicycle\n")
    assert open_index(tmp_path).class_names == ("person", "bicycle")


def test_another_class_of_open_images_is_noticed(tmp_path: Path) -> None:
    toolkit(tmp_path)
    assert len(open_index(tmp_path)) == 3
    save_images(tmp_path / "Dataset/train/Orange/absent0000000001.jpg")
    assert len(open_index(tmp_path)) == 6, "it is in the tables of all splits"


def test_all_folders_of_open_images_are_read(tmp_path: Path) -> None:
    names = [f"{number:016d}" for number in range(300)]
    save_images(tmp_path / "one.jpg")
    for name in names:
        (tmp_path / "Dataset/train" / name).mkdir(parents=True)
        shutil.copy(tmp_path / "one.jpg", tmp_path / "Dataset/train" / name / f"{name}.jpg")
    (tmp_path / "one.jpg").unlink()
    rows = [open_images_row(name, "/m/0k4j", 0.1, 0.2, 0.5, 0.6) for name in names]
    open_images_table(tmp_path / "csv_folder/train-annotations-bbox.csv", *rows)
    assert len(open_index(tmp_path)) == 300


def test_out_may_be_a_link_to_an_empty_folder(tmp_path: Path) -> None:
    index = open_index(draw(tmp_path / "set", train=2, val=1))
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    convert(index, tmp_path / "out", to="coco")
    assert (tmp_path / "out").is_symlink()
    assert len(open_index(tmp_path / "disk")) == 3


def test_a_link_does_not_lead_shards_into_the_source(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "set")
    assert open_destination(str(tmp_path / "link/packed")).text == str(tmp_path / "set/packed")


def test_thousands_of_equal_frames_are_one_group() -> None:
    """A camera that stands still; one image in between is another one."""
    hashes = {n: np.arange(256) % 2 == 0 for n in range(3000)} | {1500: np.arange(256) % 3 == 0}
    groups = find_groups(3001, hashes)
    assert set(groups) == {0, 1500, 3000}
    assert groups.count(0) == 2999


@pytest.mark.parametrize("how", ["BOM", "Windows", "cp1252"])
def test_lists_of_splits_from_other_editors(how: str, tmp_path: Path) -> None:
    index = open_index(draw(tmp_path / "set", train=5, val=2))
    names = [os.path.relpath(index.path(i), index.root) for i in range(len(index))]
    lists = tmp_path / "lists"
    lists.mkdir()
    for name, lines in (("train", names[:5]), ("val", names[5:])):
        text = "\n".join(lines)
        data = {
            "BOM": text.encode("utf-8-sig"),
            "Windows": text.replace("/", "\\").replace("\n", "\r\n").encode(),
            "cp1252": ("# caf\xe9\n" + text).encode("cp1252"),
        }[how]
        (lists / f"{name}.txt").write_bytes(data)
    listed = open_index(tmp_path / "set", splits=SplitOptions(lists=lists))
    assert [len(listed.image_indices(split)) for split in ("train", "val")] == [5, 2]


def test_a_validation_list_that_names_nothing_is_refused(tmp_path: Path) -> None:
    index = open_index(draw(tmp_path / "set", train=5, val=2))
    lists = tmp_path / "lists"
    lists.mkdir()
    (lists / "train.txt").write_text("\n".join(os.path.relpath(index.path(i), index.root) for i in range(5)))
    (lists / "val.txt").write_text("elsewhere/9.jpg\n")
    with pytest.raises(DataError, match=r"val\.txt"):
        open_index(tmp_path / "set", splits=SplitOptions(lists=lists))


def test_no_name_of_a_coco_file_is_usable(tmp_path: Path) -> None:
    """Presigned addresses, whose last part is longer than a file name may be."""
    images = [{"id": 1, "file_name": f"https://bucket.example/{'x' * 300}", "width": 9, "height": 9}]
    boxes = [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 1, 4, 4]}]
    content = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "cat"}]}
    (tmp_path / "train.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="usable name"):
        open_index(tmp_path)


def test_a_damaged_bigtiff_is_an_unreadable_image(tmp_path: Path) -> None:
    (tmp_path / "a.tif").write_bytes(b"II+\0\x08\0\0\0" + b"\xff" * 8 + bytes(64))
    with pytest.raises(DataError, match=r"a\.tif"):
        read_header(tmp_path / "a.tif")


def test_archives_of_macos_are_read(tmp_path: Path) -> None:
    """bsdtar adds a file for the attributes of each one."""
    boxes = json.dumps({"boxes": [[4.0, 2.0, 24.0, 21.0]], "labels": [1]}).encode()
    files = []
    for number in range(3):
        for name, data in ((f"{number}.jpg", jpeg(40, 30, 1)), (f"{number}.json", boxes)):
            files += [(f"./._{name}", b"\0\5\x16\7"), (f"./{name}", data)]
    write_tar(tmp_path / "train-000000.tar", files)
    index = open_index(tmp_path)
    assert (len(index), len(index.boxes), index.problems) == (3, 3, ())


@pytest.mark.parametrize(("count", "name"), [(40, "zzz"), (300, "instances_all")])
def test_coco_between_many_other_files(count: int, name: str, tmp_path: Path) -> None:
    """Up to MAX_FILES are all looked at; of more the first ones, and those with usual names."""
    for number in range(count):
        (tmp_path / f"{number}.json").write_text("{}")
    Image.new("RGB", (9, 9)).save(tmp_path / "a.png")
    images = [{"id": 1, "file_name": "a.png", "width": 9, "height": 9}]
    boxes = [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 1, 4, 4]}]
    content = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "cat"}]}
    (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert open_index(tmp_path).format == "coco"
