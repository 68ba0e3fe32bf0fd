"""One verdict: `data check`, `data stats`, `train --dry-run` and `train` refuse the same sets in the same words, and
take the same others. Also: a bad test split refuses nothing, and what only plans a training downloads nothing."""

import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from stoker.data.index import open_index, require_images
from stoker.data.validation.check import check_dataset
from stoker_watch.cli.app import main
from stoker_watch.errors import DataError
from tests.drawn import draw

SMALL = ("--model", "retinanet_tiny_fpn", "--weights", "none", "--image-size", "64", "64", "--batch-size", "2")
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """(exit code, all output) of a command, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def run_main(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["stoker", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        return int(ended.value.code or 0), output.out + output.err

    return run_main


def edit(folder: Path, split: str, **changes: Any) -> Path:
    """Changes keys of the annotations of a drawn split; None: the file is cut in the middle."""
    file = folder / split / "_annotations.coco.json"
    text = file.read_text()
    file.write_text(json.dumps(json.loads(text) | changes) if changes else text[: len(text) // 2])
    return folder


def entries(folder: Path, split: str, key: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / split / "_annotations.coco.json").read_text())[key]
    return found


def make_yolo(folder: Path, *, train: int = 12, val: int = 4, number: int = 0) -> Path:
    """A YOLO set with two classes; `number` is the class of the boxes for training."""
    for split, count in (("train", train), ("val", val)):
        for kind in ("images", "labels"):
            (folder / kind / split).mkdir(parents=True)
        for n in range(count):
            Image.new("RGB", (64, 64), (n, 90, 40)).save(folder / "images" / split / f"{split}{n}.jpg")
            row = f"{number if split == 'train' else n % 2} 0.5 0.5 0.4 0.4\n"
            (folder / "labels" / split / f"{split}{n}.txt").write_text(row + row.replace("0.4", "0.2"))
    (folder / "data.yaml").write_text("train: images/train\nval: images/val\nnames: [cat, dog]\n")
    return folder


def boxes_of_unknown_classes(folder: Path) -> Path:
    make_yolo(folder, train=160, number=0)
    for n in range(75):
        (folder / "labels" / "train" / f"train{n}.txt").write_text("7 0.5 0.5 0.4 0.4\n7 0.3 0.3 0.2 0.2\n")
    return folder


def missing_images(folder: Path) -> Path:
    draw(folder)
    for n in range(10):
        (folder / "train" / f"train-{n}.jpg").unlink()
    return folder


def outside(folder: Path) -> Path:
    elsewhere = folder.parent / "elsewhere"
    make_yolo(elsewhere)
    make_yolo(folder)
    names = [f"{elsewhere}/images/train/train{n}.jpg" for n in range(12)]
    (folder / "train.txt").write_text("\n".join(names) + "\n")
    (folder / "data.yaml").write_text("train: train.txt\nval: images/val\nnames: [cat, dog]\n")
    return folder


def no_train_split(folder: Path) -> Path:
    draw(folder)
    for path in (folder / "train").iterdir():
        path.unlink()
    (folder / "train").rmdir()
    return folder


def entries_that_cannot_be_read(folder: Path) -> Path:
    draw(folder)
    return edit(folder, "train", images=entries(folder, "train", "images") + [{"id": "?"}] * 4)


REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "unknown classes": (boxes_of_unknown_classes, "150 of 320 boxes (47 %) of the train split are left out"),
    "missing images": (missing_images, "10 of 24 images (42 %) of the train split do not exist"),
    "no boxes to evaluate": (lambda f: edit(draw(f), "valid", annotations=[]), "The validation split has no boxes."),
    "no boxes to learn": (lambda f: edit(draw(f), "train", annotations=[]), "The training split has no boxes."),
    "no training split": (no_train_split, "The data set has no train split."),
    "cut file": (lambda f: edit(draw(f), "train"), "The annotation file is not valid JSON."),
    "left out": (entries_that_cannot_be_read, "4 of 34 images (12 %) are left out because of their annotations"),
    "outside": (outside, "12 of the 16 images are outside the data set's folder."),
}


@pytest.mark.parametrize("name", REFUSED)
def test_all_commands_refuse_in_the_same_words(name: str, tmp_path: Path, run: Run) -> None:
    make, problem = REFUSED[name]
    data = make(tmp_path / "set")
    reason = check_dataset(data).refusals[0]
    assert reason.startswith(problem.rstrip("."))
    for command in (
        ("data", "check", data),
        ("data", "check", data, "--annotations-only"),
        ("data", "stats", data),
        ("train", data, "--steps", "1", "--dry-run", *SMALL),
        ("train", data, "--steps", "1", *SMALL),
    ):
        code, output = run(*command)
        assert code == DataError.exit_code, (command, output)
        assert reason in " ".join(output.split()), (command, output)
        assert "recommended" not in output
        assert "the defaults fit" not in output
    assert not (tmp_path / "runs").exists()


def add_test_split(folder: Path, **changes: Any) -> Path:
    """With 6 images, taken from another drawn set."""
    other = draw(folder.parent / "other", train=6, val=1, seed=5)
    draw(folder)
    (other / "train").rename(folder / "test")
    images = entries(folder, "test", "images")
    for image in images:
        (folder / "test" / image["file_name"]).rename(folder / "test" / f"own-{image['file_name']}")
        image["file_name"] = f"own-{image['file_name']}"
    return edit(folder, "test", **{"images": images, **changes})


def make_split_of_unknown_classes(folder: Path) -> Path:
    add_test_split(folder)
    boxes = [box | {"category_id": 99} for box in entries(folder, "test", "annotations")]
    return edit(folder, "test", annotations=boxes)


def make_split_with_bad_entries(folder: Path) -> Path:
    add_test_split(folder)
    return edit(folder, "test", images=entries(folder, "test", "images") + [{"id": "?"}] * 6)


def make_split_without_images(folder: Path) -> Path:
    add_test_split(folder)
    for path in (folder / "test").glob("*.jpg"):
        path.unlink()
    return folder


def make_split_elsewhere(folder: Path) -> Path:
    make_yolo(folder)
    make_yolo(folder.parent / "elsewhere")
    text = (folder / "data.yaml").read_text()
    (folder / "data.yaml").write_text(f"{text}test: {folder.parent}/elsewhere/images/train\n")
    return folder


def make_list_is_empty(folder: Path) -> Path:
    make_yolo(folder)
    (folder / "test.txt").write_text("")
    (folder / "data.yaml").write_text((folder / "data.yaml").read_text() + "test: test.txt\n")
    return folder


BAD_TEST_SPLITS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "cut file": (lambda f: edit(add_test_split(f), "test"), "test split that cannot be read"),
    "unknown classes": (make_split_of_unknown_classes, "class that the data set does not define"),
    "entries": (make_split_with_bad_entries, "image entry that cannot be read"),
    "missing images": (make_split_without_images, "does not exist"),
    "outside": (make_split_elsewhere, "test split that cannot be read"),
    "empty list": (make_list_is_empty, "the test split is left out"),
}


@pytest.mark.parametrize("name", BAD_TEST_SPLITS)
def test_a_bad_test_split_is_named_and_refuses_nothing(name: str, tmp_path: Path, run: Run) -> None:
    make, problem = BAD_TEST_SPLITS[name]
    data = make(tmp_path / "set")
    for command in (
        ("data", "check", data),
        ("data", "stats", data),
        ("train", data, "--steps", "1", "--dry-run", *SMALL),
    ):
        code, output = run(*command)
        assert code == 0, (command, output)
        assert "would refuse" not in output
        named = problem in output or command[1] == "stats" or (name == "missing images" and command[0] == "train")
        assert named, (command, output)
    index = open_index(data)
    with pytest.raises(DataError) as raised:  # an evaluation on it is refused
        require_images(index, ("test",))
    if name in ("cut file", "outside"):
        assert "it cannot be read" in (raised.value.cause or "")


@pytest.mark.slow
def test_a_training_runs_beside_a_bad_test_split(tmp_path: Path, run: Run) -> None:
    data = edit(add_test_split(tmp_path / "set"), "test")
    code, output = run("train", data, "--steps", "1", "--device", "cpu", *SMALL)
    assert code == 0, output
    assert "test split that cannot be read" in output
    assert "not valid JSON" in output


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[object]:
    """No weights in any folder, and no connection: what was asked for."""
    asked: list[object] = []

    def refuse(*arguments: object, **_: object) -> None:
        asked.append(arguments)
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setenv("STOKER_WEIGHTS_DIR", str(tmp_path / "weights"))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    return asked


def test_plans_download_nothing_and_do_not_depend_on_the_network(
    tmp_path: Path, run: Run, offline: list[object]
) -> None:
    data = draw(tmp_path / "set", train=4, val=2, side=200)
    code, stats = run("data", "stats", data)
    assert (code, offline) == (0, [])
    assert "model ember_mobilenet_v2" in stats  # the one that is trained where its weights can be downloaded
    code, plan = run("train", data, "--steps", "1", "--dry-run", "--device", "cpu", "--image-size", "64", "64")
    assert (code, offline) == (0, []), plan
    assert "ember_mobilenet_v2" in plan
    assert "downloads https://" in plan
    assert not os.listdir(tmp_path / "weights") if (tmp_path / "weights").exists() else True
    code, output = run("train", data, "--steps", "1", "--model", "ember_mobilenet_v2", "--image-size", "64", "64")
    assert code == 3, output
    assert offline, "a training asks for them"


@pytest.mark.slow
def test_a_dry_run_refuses_weights_as_a_training_does(tmp_path: Path, run: Run, offline: list[object]) -> None:
    data = draw(tmp_path / "set", train=4, val=2)
    (tmp_path / "notes.pth").write_text("no weights")
    torch.save({"layer.weight": torch.zeros(3)}, tmp_path / "other.pth")
    for weights, problem in (
        ("coco", "There are no coco weights for ember_n."),
        ("nowhere.pth", "nowhere.pth"),
        ("notes.pth", "notes.pth"),
        ("other.pth", "does not belong to ember_n"),
    ):
        command = ("train", data, "--steps", "1", "--weights", weights, "--model", "ember_n", "--device", "cpu")
        command += ("--image-size", "64", "64", "--batch-size", "2")
        plan, training = run(*command, "--dry-run"), run(*command)
        assert plan[0] == training[0] == 3, (plan, training)
        error = plan[1][plan[1].index("stoker: ") :]
        assert problem in error
        assert error in training[1]
    assert offline == []
