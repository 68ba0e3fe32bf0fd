"""The cached index is rebuilt when an image is renamed, or when an image whose size was read changes."""

from pathlib import Path

import pytest
from PIL import Image

from stoker.data.index import open_index
from tests.fixtures.data_index import content, refuse_reading


def test_renamed_image_in_a_subfolder_is_found(tmp_path: Path) -> None:
    (tmp_path / "set" / "images" / "day").mkdir(parents=True)
    (tmp_path / "set" / "images" / "day" / "A.jpg").touch()
    (tmp_path / "set" / "all.json").write_text(content(["day/a.jpg", "day/b.jpg"]))
    assert open_index(tmp_path / "set").path(0).name == "A.jpg"
    (tmp_path / "set" / "images" / "day" / "A.jpg").rename(tmp_path / "set" / "images" / "day" / "a.jpg")
    assert open_index(tmp_path / "set").path(0).name == "a.jpg"


def test_sizes_of_overwritten_images_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """YOLO's boxes are fractions of sizes that only the images say; writing over a file does not change its folder."""
    (tmp_path / "images").mkdir()
    (tmp_path / "labels").mkdir()
    names = [f"{n}.png" for n in range(3)]
    for name in names:
        Image.new("RGB", (40, 20)).save(tmp_path / "images" / name)
        (tmp_path / "labels" / name).with_suffix(".txt").write_text("0 0.5 0.5 0.5 0.5\n")
    assert open_index(tmp_path).boxes[0].tolist() == [10, 5, 30, 15]
    with monkeypatch.context() as patched:
        refuse_reading(patched)
        open_index(tmp_path)
    for name in names:
        Image.new("RGB", (80, 40)).save(tmp_path / "images" / name)
    assert open_index(tmp_path).boxes[0].tolist() == [20, 10, 60, 30]
