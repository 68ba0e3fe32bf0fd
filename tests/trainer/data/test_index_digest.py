"""The digest of a data set: the same after copying it, another one after each change, which is named."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.data.index import open_index
from stoker.data.index_digest import describe_changes, digest_images
from tests.drawn import draw

TRAIN = "train/_annotations.coco.json"
OTHER_BOXES = "1 image with other boxes or another size"


def digest(folder: Path) -> str:
    return digest_images(open_index(folder), ("train", "val"))


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((folder / TRAIN).read_text())
    change(content)
    (folder / TRAIN).write_text(json.dumps(content))


def test_a_copy_elsewhere_is_the_same_whatever_its_times(tmp_path: Path) -> None:
    before = digest(draw(tmp_path / "set"))
    shutil.copytree(tmp_path / "set", tmp_path / "elsewhere" / "copy", copy_function=shutil.copy)
    for path in (tmp_path / "elsewhere").rglob("*"):
        os.utime(path, (1, 1))
    now = digest(tmp_path / "elsewhere" / "copy")
    assert describe_changes(before, now) == []
    assert len(before) < 30 * 60


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda c: c["annotations"][0]["bbox"].__setitem__(2, 3), f"{OTHER_BOXES} (train/train-0.jpg (train))"),
        (lambda c: c["annotations"].pop(), f"{OTHER_BOXES} (train/train-23.jpg (train))"),
        (lambda c: c["annotations"][0].update(category_id=c["annotations"][0]["category_id"] % 3 + 1), OTHER_BOXES),
        (lambda c: c["images"].append({"id": 99, "file_name": "new.jpg"}), "1 image new (train/new.jpg (train))"),
        (lambda c: c["images"].pop(0), "1 image gone (train/train-0.jpg (train))"),
        (lambda c: c["images"].reverse(), "the order of the images"),
        (lambda c: c["images"][3].update(width=63), f"{OTHER_BOXES} (train/train-3.jpg (train))"),
    ],
    ids=["corner", "fewer", "class", "new", "gone", "order", "size"],
)  # fmt: skip
def test_each_change_is_named(tmp_path: Path, change: Callable[[dict[str, Any]], object], expected: str) -> None:
    before = digest(draw(tmp_path / "set"))
    edit(tmp_path / "set", change)
    assert any(text.startswith(expected) for text in describe_changes(before, digest(tmp_path / "set")))


def test_another_file_under_the_same_name(tmp_path: Path) -> None:
    before = digest(draw(tmp_path / "set"))
    shutil.copy(tmp_path / "set/train/train-1.jpg", tmp_path / "set/train/train-0.jpg")
    (tmp_path / "set/train/train-2.jpg").unlink()  # missing: the loader reports it
    assert describe_changes(before, digest(tmp_path / "set")) == [
        "1 image with another file size (train/train-0.jpg (train))"
    ]


@pytest.mark.parametrize("text", ["", "!!", "{}", "c" * 40])
def test_text_that_is_no_digest(text: str) -> None:
    with pytest.raises(ValueError, match="not a digest"):
        describe_changes(text, "0")
