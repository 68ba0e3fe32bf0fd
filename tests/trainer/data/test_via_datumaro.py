"""`stoker data convert --via datumaro`: the formats whose error prints it, with the real Datumaro where uv is there;
what it says without uv, without network and for data that Datumaro does not read."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from stoker.data.index import open_index
from stoker_watch.errors import DataError
from tests.fixtures.data_cvat import boxes_by_image
from tests.trainer.data.test_other_formats import CONVERTED, SETS, write_set


def run(arguments: list[str], *, path: str | None = None) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, "COLUMNS": "200", **({} if path is None else {"PATH": path})}
    command = [sys.executable, "-m", "stoker", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


def fake_uv(folder: Path, script: str) -> str:
    """A PATH with a program `uv` that prints what the real one would print."""
    folder.mkdir()
    (folder / "uv").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "uv").chmod(0o755)
    return str(folder)


def test_without_uv(tmp_path: Path) -> None:
    write_set(tmp_path / "set", SETS["mot"][1])
    done = run(
        ["data", "convert", "--via", "datumaro", str(tmp_path / "set"), str(tmp_path / "out")], path="/nonexistent"
    )
    if (Path(sys.executable).parent / "uv").exists():
        pytest.skip("uv is installed next to Python, where it is found")
    assert done.returncode == 2
    assert "uv is not installed" in done.stderr
    assert "pip install uv" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("script", "parts"),
    [
        ("echo 'error: Failed to fetch: https://host/simple/datumaro/' >&2; exit 2",
         ["Datumaro cannot convert the data set", "Failed to fetch"]),
        ("""echo '{"format": "voc", "read": {"images": 12, "boxes": 0}, "left_out": {}}'""",
         ["Datumaro reads no boxes", "of 12 images", "--format NAME"]),
    ],
)  # fmt: skip
def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path, script: str, parts: list[str]) -> None:
    write_set(tmp_path / "set", SETS["mot"][1])
    out = tmp_path / "out"
    done = run(["data", "convert", "--via", "datumaro", str(tmp_path / "set"), str(out)],
               path=fake_uv(tmp_path / "bin", script))  # fmt: skip
    assert done.returncode == 4
    for part in parts:
        assert part in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "set"]


def test_its_result_is_coco(tmp_path: Path) -> None:
    done = run(["data", "convert", "--via", "datumaro", "--to", "yolo", str(tmp_path), str(tmp_path / "out")])
    assert done.returncode == 2
    assert "--via datumaro writes COCO" in done.stderr
    assert "--to is missing" in run(["data", "convert", str(tmp_path), str(tmp_path / "out")]).stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not on PATH: it runs Datumaro")
@pytest.mark.parametrize("short_name", CONVERTED)
def test_the_command_of_the_error_converts_every_box(tmp_path: Path, short_name: str) -> None:
    root = tmp_path / "a set"
    write_set(root, SETS[short_name][1])
    if short_name == "masks":
        mask = Image.new("P", (200, 100))
        mask.paste(1, (10, 20, 60, 50))
        mask.putpalette([0, 0, 0, 128, 0, 0])
        mask.save(root / "SegmentationObject" / "a.png")
        (root / "SegmentationClass").mkdir()
        shutil.copy(root / "SegmentationObject" / "a.png", root / "SegmentationClass" / "a.png")
    with pytest.raises(DataError) as raised:
        open_index(root)
    command = shlex.split(str(raised.value.fix))
    assert command[:2] == ["stoker", "data"]
    done = run(command[1:])
    if "Failed to fetch" in done.stderr:
        pytest.skip(f"Datumaro cannot be downloaded: {done.stderr}")
    assert done.returncode == 0, done.stderr
    assert "images 1, boxes 1 (" in done.stdout
    assert "written as COCO and read by stoker: images 1, boxes 1: " in done.stdout
    ((boxes,),) = [boxes_by_image(open_index(tmp_path / "a set-coco")).values()]
    assert [[round(value) for value in xyxy] for _, xyxy in boxes] == [[10, 20, 60, 50]]
