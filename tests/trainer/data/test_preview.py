"""The contact sheet: what it shows is what training sees, and it never writes over the user's images."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stoker.config.settings import DataSettings
from stoker.data.index import Index, open_index
from stoker.inference.preview import _FRAME_COLOR, CELL_SIZE, PAIRS_PER_ROW, make_preview
from stoker_watch.cli.app import main
from stoker_watch.errors import UsageError
from tests.drawn import draw

PLAIN = DataSettings(
    image_size=(64, 96),
    resize="letterbox",
    max_bad_fraction=0.01,
    hflip=0.0,
    scale_jitter_prob=0.0,
    scale_range=(0.7, 1.5),
    min_object_covered=0.5,
    brightness=0.0,
    contrast=0.0,
    saturation=0.0,
    hue=0.0,
    mosaic=0.0,
)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    return open_index(draw(tmp_path_factory.mktemp("drawn"), train=6, val=2))


def sheet_of(index: Index, settings: DataSettings, *, count: int = 2, seed: int = 0) -> np.ndarray:
    return np.asarray(
        make_preview(index, index.image_indices("train"), settings, seed=seed, num_images=count, workers=2)
    )


def halves(sheet: np.ndarray, pair: int) -> tuple[np.ndarray, np.ndarray]:
    """The plain and the augmented image of a pair of the first row, [h, CELL, 3]."""
    height, left = CELL_SIZE * 64 // 96, 8 + pair * (2 * CELL_SIZE + 2 + 8)
    image = sheet[8 : 8 + height]
    return image[:, left : left + CELL_SIZE], image[:, left + CELL_SIZE + 2 : left + 2 * CELL_SIZE + 2]


def test_without_augmentation_both_are_the_same(index: Index):
    sheet = sheet_of(index, PLAIN, count=PAIRS_PER_ROW + 1)
    for pair in range(PAIRS_PER_ROW):
        plain, augmented = halves(sheet, pair)
        assert plain.std() > 10
        assert np.array_equal(plain, augmented)


@pytest.mark.parametrize(
    "name", ["hflip", "scale_jitter_prob", "brightness", "contrast", "saturation", "hue", "mosaic"]
)
def test_each_setting_changes_the_augmented_image_only(index: Index, name: str):
    changes = {name: 0.5 if name == "hue" else 1.0}
    sheet = sheet_of(index, dataclasses.replace(PLAIN, **changes))
    for pair in range(2):
        plain, augmented = halves(sheet, pair)
        assert np.array_equal(plain, halves(sheet_of(index, PLAIN), pair)[0])
        assert not np.array_equal(plain, augmented)
    assert np.array_equal(sheet, sheet_of(index, dataclasses.replace(PLAIN, **changes)))
    assert not np.array_equal(sheet, sheet_of(index, dataclasses.replace(PLAIN, **changes), seed=1))


def test_images_without_labels_are_marked(tmp_path: Path):
    folder = draw(tmp_path / "set", train=2, val=1)
    labeled = sheet_of(open_index(folder), PLAIN, count=2)
    file = folder / "train" / "_annotations.coco.json"
    document = json.loads(file.read_text())
    document["annotations"] = [box for box in document["annotations"] if box["image_id"] == 0]
    file.write_text(json.dumps(document))
    index = open_index(folder)
    sheet = sheet_of(index, PLAIN, count=2)
    red = [(halves(sheet, pair)[0][:3] == _FRAME_COLOR).all() for pair in range(2)]
    assert sorted(red) == [False, True]
    assert not (halves(labeled, 0)[0][:3] == _FRAME_COLOR).all()


@pytest.mark.parametrize("count", [0, 401])
def test_invalid_count(index: Index, count: int):
    with pytest.raises(UsageError, match="1 … 400"):
        make_preview(index, index.image_indices("train"), PLAIN, seed=0, num_images=count, workers=1)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["stoker", "data", "preview", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    data = draw(tmp_path / "data", train=6, val=2)
    before = {path: path.read_bytes() for path in data.rglob("*") if path.is_file()}
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, data, "--count", "5", "--augment", "none", "--hflip", "0.25", "--model",
               "retinanet_mobilenet_v2_fpn") == 0  # fmt: skip
    output = capsys.readouterr().out
    assert "preview.jpg: 5 images of train" in output
    rows = {line.split()[0]: line for line in output.splitlines()}
    assert "0.25" in rows["hflip"]
    assert "set by you" in rows["hflip"]
    assert "--augment none" in rows["brightness"]
    with Image.open("preview.jpg") as sheet:
        assert sheet.format == "JPEG"
        assert sheet.width == 8 + PAIRS_PER_ROW * (2 * CELL_SIZE + 2 + 8)

    assert run(monkeypatch, data, "--split", "val") == 0
    assert "preview-2.jpg: 2 images of val, 24 times in all, each plain" in capsys.readouterr().out

    assert run(monkeypatch, data, "--model", "ember_n", "--epochs", "100", "--batch-size", "2") == 0
    assert "seen about 100 times" in capsys.readouterr().out

    image = next((data / "train").glob("*.jpg"))
    for arguments, words in [
        ((data, "--out", image), "in the folder of the data"),
        ((data, "--out", "sheet.txt"), "valid:  .png"),
        ((data, "--split", "test"), "valid:  train, val"),
        ((data, "--hue", "0.7"), "0 … 0.5"),
    ]:
        assert run(monkeypatch, *arguments) in (2, 4)
        assert words in capsys.readouterr().err
    assert {path: path.read_bytes() for path in data.rglob("*") if path.is_file()} == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bccd/BCCD", "microcontroller"])
def test_sheets_of_real_data(real_data: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "folder" / "sheet.png"
    assert run(monkeypatch, real_data / name, "--count", "4", "--mosaic", "1", "--out", out) == 0
    with Image.open(out) as sheet:
        assert np.asarray(sheet).std() > 20
