"""Data sets as people have them: layouts, lists and files that differ from the usual ones, each as a small set."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from stoker.config.settings import Config, DataSettings
from stoker.data.index import Index, missing_images, open_index, open_index_of, require_images
from stoker.data.validation.check import DatasetCheck, check_dataset
from stoker.data.validation.clean import SplitOptions
from stoker.training.run_selection import with_absolute_paths
from stoker_watch.cli.app import main
from stoker_watch.errors import DataError
from tests.drawn import draw

WIDTH, HEIGHT = 60, 40
BOX = (6, 4, 30, 20)


def image(path: Path, seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (WIDTH, HEIGHT), (seed * 7 % 256, seed * 31 % 256, seed * 53 % 256)).save(path)
    return path


def xml(path: Path, name: str = "cat") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    box = "".join(f"<{tag}>{value}</{tag}>" for tag, value in zip(("xmin", "ymin", "xmax", "ymax"), BOX, strict=True))
    size = f"<size><width>{WIDTH}</width><height>{HEIGHT}</height></size>"
    path.write_text(f"<annotation>{size}<object><name>{name}</name><bndbox>{box}</bndbox></object></annotation>")
    return path


def rows(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines or ("0 0.5 0.5 0.4 0.4",)))
    return path


def coco(path: Path, names: list[str], *, ids: Callable[[int], Any] = int, boxes: int = 1, first: int = 0) -> Path:
    """A COCO file with `boxes` boxes per image, whose ids are `ids(number)`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    images = [
        {"id": ids(first + n), "file_name": name, "width": WIDTH, "height": HEIGHT} for n, name in enumerate(names)
    ]
    annotations = [
        {"id": 100 * n + k, "image_id": ids(first + n), "category_id": 1, "bbox": [4 + k, 4, 20, 10]}
        for n in range(len(names))
        for k in range(boxes)
    ]
    document = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "cat"}]}
    path.write_text(json.dumps(document))
    return path


def counts(index: Index) -> dict[str, tuple[int, int]]:
    """Split → images and boxes."""
    return {
        split: (
            len(index.image_indices(split)),
            int((index.offsets[index.image_indices(split) + 1] - index.offsets[index.image_indices(split)]).sum()),
        )
        for split in index.splits
    }


def kinds(report: DatasetCheck) -> dict[str, int]:
    return {item.kind: item.count for item in report.items}


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str]:
    """Exit code and output of a command, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["stoker", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
    out, error = capsys.readouterr()
    return int(ended.value.code or 0), out + error


# Boxes of unknown classes


@pytest.fixture
def two_classes(tmp_path: Path) -> Path:
    """YOLO, nc 2, whose validation labels have classes of another list: 12 of 16 boxes; 9 of 12 images lose all."""
    root = tmp_path / "set"
    for n in range(20):
        image(root / "images" / "train" / f"t{n}.jpg", n)
        rows(root / "labels" / "train" / f"t{n}.txt", f"{n % 2} 0.5 0.5 0.4 0.4")
    for n in range(12):
        image(root / "images" / "val" / f"v{n}.jpg", 50 + n)
        lines = [f"{5 if n < 9 else 0} 0.5 0.5 0.4 0.4", *(["7 0.2 0.2 0.1 0.1"] if n in (0, 1, 10) else [])]
        lines += ["1 0.3 0.3 0.2 0.2"] if n == 11 else []
        rows(root / "labels" / "val" / f"v{n}.txt", *lines)
    (root / "data.yaml").write_text("train: images/train\nval: images/val\nnc: 2\nnames: [cat, dog]\n")
    return root


def test_boxes_of_unknown_classes_are_refused(two_classes: Path) -> None:
    index = open_index(two_classes)
    assert index.bad_boxes == {"train": 0, "val": 12, "test": 0}
    with pytest.raises(DataError, match=r"12 of 16 boxes \(75 %\) of the val split are left out") as raised:
        require_images(index, ("train", "val"))
    for part in ("add the class to the list of classes", "--max-bad-boxes", "12 × class that the data set does not"):
        assert part in str(raised.value)
    report = check_dataset(two_classes)
    assert any("12 of 16 boxes (75 %) of the val split" in reason for reason in report.refusals)
    assert check_dataset(two_classes, max_bad_boxes=0.8).refusals == ()


def test_images_that_lose_all_boxes_are_not_background(two_classes: Path) -> None:
    index = open_index(two_classes)
    require_images(index, ("train", "val"), max_bad_boxes=0.8)
    assert counts(index) == {"train": (20, 20), "val": (3, 4)}
    assert {index.path(i).name for i in index.image_indices("val").tolist()} == {"v9.jpg", "v10.jpg", "v11.jpg"}
    found = {problem.kind: problem.count for problem in index.problems}
    assert found == {"unknown-class": 12, "no-box-left": 9}
    rows(two_classes / "labels" / "val" / "v9.txt", "")  # an image without a row is background, as before
    assert counts(open_index(two_classes))["val"] == (3, 3)


def test_few_bad_boxes_are_tolerated(tmp_path: Path) -> None:
    for n in range(30):
        image(tmp_path / "images" / f"{n}.jpg", n)
        rows(tmp_path / "labels" / f"{n}.txt", "0 0.5 0.5 0.4 0.4", *(["oops"] if n == 3 else []))
    require_images(open_index(tmp_path))
    with pytest.raises(DataError, match=r"1 of 2\d boxes \(4 %\) of the train split"):
        require_images(open_index(tmp_path), max_bad_boxes=0.0)


# Layouts that were refused


@pytest.mark.parametrize("folder", ["annots", "annot", "annos"])
@pytest.mark.parametrize("format", ["voc", "coco"])
def test_annots_next_to_images(tmp_path: Path, folder: str, format: str) -> None:
    names = [image(tmp_path / "images" / f"{n}.jpg", n).name for n in range(6)]
    if format == "voc":
        for name in names:
            xml(tmp_path / folder / name.replace(".jpg", ".xml"))
    else:
        coco(tmp_path / folder / "boxes.json", names)
    index = open_index(tmp_path)
    assert (index.format, len(index), len(index.boxes)) == (format, 6, 6)
    assert missing_images(index) == []


def test_image_ids_that_are_text(tmp_path: Path) -> None:
    names = [image(tmp_path / "images" / f"{n}.jpg", n).name for n in range(6)]
    file = coco(tmp_path / "boxes.json", names, ids=lambda n: f"img-{n:03}", boxes=2)
    document = json.loads(file.read_text())
    document["annotations"].append({"id": 9, "image_id": "img-999", "category_id": 1, "bbox": [1, 2, 3, 4]})
    file.write_text(json.dumps(document))
    report = check_dataset(tmp_path)
    assert kinds(report) == {"malformed-annotation": 1}
    index = open_index(tmp_path)
    assert len(index.boxes) == 12
    assert (index.offsets[1:] - index.offsets[:-1]).tolist() == [2] * 6
    assert any("6 image ids are text, such as 'img-000'" in note for note in index.notes)


def test_several_files_of_a_split(tmp_path: Path) -> None:
    names = [image(tmp_path / "images" / f"{n}.jpg", n).name for n in range(12)]
    annotations = tmp_path / "annotations"
    coco(annotations / "train_a.json", names[:4])
    coco(annotations / "train_b.json", names[4:9], first=4)
    coco(annotations / "val.json", names[9:])
    index = open_index(tmp_path)
    assert counts(index) == {"train": (9, 9), "val": (3, 3)}
    notes = " ".join(index.notes)
    assert "read together, as their images differ: train_a.json, train_b.json" in notes
    coco(annotations / "train_c.json", names[3:6], boxes=3)
    with pytest.raises(DataError, match="3 files could be the annotations of the train split") as raised:
        open_index(tmp_path)
    for part in ("--train FILE --val FILE", "train_a.json"):
        assert part in str(raised.value)


def test_train_and_val_files_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [image(tmp_path / "photos" / "raw" / f"{n}.jpg", n).name for n in range(8)]
    first = coco(tmp_path / "set" / "labels_v3.json", names[:5])
    second = coco(tmp_path / "set" / "holdout.json", names[5:])
    files = (("train", str(first)), ("val", str(second)))
    index = open_index(tmp_path / "photos" / "raw", splits=SplitOptions(files=files))
    assert counts(index) == {"train": (5, 5), "val": (3, 3)}
    assert missing_images(index) == []
    code, output = run(capsys, "data", "check", tmp_path / "photos" / "raw", "--train", first, "--val", second)
    assert (code, "train 5, val 3" in output) == (0, True)
    code, output = run(
        capsys, "train", "--train", first, "--val", second, "--dry-run", "--steps", "4", "--batch-size", "2",
        "--image-size", "64", "64", "--model", "retinanet_tiny_fpn", "--max-bad-fraction", "1",
    )  # fmt: skip
    assert "do not exist" in output  # of the images, which are in the other folder
    code, output = run(
        capsys, "train", tmp_path / "photos" / "raw", "--train", first, "--val", second, "--dry-run", "--steps", "4",
        "--batch-size", "2", "--image-size", "64", "64", "--model", "retinanet_tiny_fpn",
    )  # fmt: skip
    assert (code, "- trains on 5 images with 5 boxes of 1 class" in output) == (0, True), output
    config = with_absolute_paths(Config(data=DataSettings(train=str(first), val=str(second))))
    assert config.data.data == str(tmp_path / "set")
    only = open_index_of(DataSettings(data=str(tmp_path / "photos" / "raw"), train=str(first)))
    assert only.splits == ("train", "val")
    with pytest.raises(DataError, match="annotation file of the val split does not exist"):
        open_index(tmp_path, splits=SplitOptions(files=(files[0], ("val", "nowhere.json"))))


@pytest.mark.parametrize("method", ["stratified", "hash"])
def test_few_missing_images_do_not_fall_into_the_drawn_split(tmp_path: Path, method: Any) -> None:
    """2 of 101 images are missing; by the hash, both would be held out with 8 others."""
    names = [image(tmp_path / "images" / f"{n}.jpg", n).name for n in range(101)]
    coco(tmp_path / "boxes.json", names)
    by_hash = open_index(tmp_path, splits=SplitOptions(method="hash"))
    for row in by_hash.image_indices("val")[:2].tolist():
        by_hash.path(row).unlink()
    index = open_index(tmp_path, splits=SplitOptions(method=method))
    if method == "hash":  # runs of earlier versions keep their split
        assert by_hash.image_indices("val").tolist() == index.image_indices("val").tolist()
        return
    require_images(index, ("train", "val"))
    assert (len(index), missing_images(index)) == (99, [])
    assert {problem.kind: problem.count for problem in index.problems} == {"missing-image": 2}
    report = check_dataset(tmp_path)
    assert (report.refusals, report.num_images, report.num_usable_images) == ((), 101, 99)


# Data that was ignored


def test_images_that_are_only_missing_from_a_list(tmp_path: Path) -> None:
    for n in range(10):
        image(tmp_path / "images" / f"{n}.jpg", n)
        rows(tmp_path / "labels" / f"{n}.txt")
    (tmp_path / "train.txt").write_text("".join(f"images/{n}.jpg\n" for n in range(5)))
    (tmp_path / "val.txt").write_text("images/5.jpg\nimages/6.jpg\n")
    image(tmp_path / "images" / "plain.jpg")
    report = check_dataset(tmp_path)
    assert kinds(report) == {"not-in-a-split": 3, "unlabeled-image": 1}
    items = {item.kind: item.examples for item in report.items}
    assert set(items["not-in-a-split"]) == {f"images/{n}.jpg" for n in (7, 8, 9)}
    assert items["unlabeled-image"] == ("images/plain.jpg",)
    assert any("not used: 1 image next to others that no annotation names" in note for note in report.notes)


def test_names_files_of_any_name(tmp_path: Path) -> None:
    for n in range(4):
        image(tmp_path / "images" / f"{n}.jpg", n)
        rows(tmp_path / "labels" / f"{n}.txt", f"{n % 2} 0.5 0.5 0.4 0.4")
    (tmp_path / "boats.names").write_text("boat\nbuoy\n")
    index = open_index(tmp_path)
    assert index.class_names == ("boat", "buoy")
    assert "classes: boats.names" in index.notes


def test_lists_with_paths_of_another_machine_next_to_voc(tmp_path: Path) -> None:
    for n in range(8):
        image(tmp_path / "images" / f"IMG {n}.jpg", n)
        xml(tmp_path / "annotations" / f"IMG {n}.xml")
    (tmp_path / "train.txt").write_text("".join(f"/home/bob/my data/images/IMG {n}.jpg\n" for n in range(5)))
    (tmp_path / "test.txt").write_text("C:\\bob\\IMG 5.jpg\nC:\\bob\\IMG 6.jpg\n")
    index = open_index(tmp_path)
    assert index.format == "voc"
    assert {split: images for split, (images, _) in counts(index).items()} == {"train": 4, "val": 1, "test": 2}
    assert any("splits: those of train.txt, test.txt" in note for note in index.notes)
    assert {problem.kind: problem.count for problem in index.problems} == {"not-in-a-split": 1}
    (tmp_path / "train.txt").write_text("notes about the training\n")
    index = open_index(tmp_path)
    assert len(index) == 8
    assert any("not read: train.txt, test.txt" in note for note in index.notes)


def test_validate_is_a_split(tmp_path: Path) -> None:
    for split, count in (("train", 5), ("validate", 3)):
        for n in range(count):
            image(tmp_path / split / f"{split}{n}.jpg", n)
            xml(tmp_path / split / f"{split}{n}.xml")
    assert counts(open_index(tmp_path)) == {"train": (5, 5), "val": (3, 3)}


@pytest.mark.parametrize("format", ["voc", "yolo"])
@pytest.mark.parametrize("train", [("Train_Images", "Train_Annotations"), ("Images", "Annotations")])
def test_folders_of_images_and_annotations_per_split(tmp_path: Path, format: str, train: tuple[str, str]) -> None:
    val = ("Validation_Images", "Validation_Annotations")
    if format == "yolo":
        train, val = (train[0], train[1].replace("Annotations", "Labels")), ("images-val", "labels-val")
    for (images, annotations), count in ((train, 5), (val, 3)):
        for n in range(count):
            stem = f"{images.lower()}{n}"
            image(tmp_path / images / f"{stem}.jpg", n)
            if format == "voc":
                xml(tmp_path / annotations / f"{stem}.xml")
            else:
                rows(tmp_path / annotations / f"{stem}.txt")
    index = open_index(tmp_path)
    assert (index.format, counts(index)) == (format, {"train": (5, 5), "val": (3, 3)})
    assert missing_images(index) == []


def test_a_second_format_with_more_boxes(tmp_path: Path) -> None:
    names = [image(tmp_path / "images" / f"{n}.jpg", n).name for n in range(6)]
    coco(tmp_path / "boxes.json", names[:2])
    for name in names:
        rows(tmp_path / "labels" / name.replace(".jpg", ".txt"), "0 0.5 0.5 0.4 0.4", "0 0.2 0.2 0.1 0.1")
    index = open_index(tmp_path)
    assert (index.format, len(index.boxes)) == ("coco", 2)
    assert any(
        "(2 boxes against 12 of the other, which are more); --format yolo reads the other" in note
        for note in index.notes
    )


def test_data_that_is_not_used_has_one_line(tmp_path: Path) -> None:
    for n in range(4):
        image(tmp_path / "images" / f"{n}.jpg", n)
        xml(tmp_path / "annotations" / f"{n}.xml")
        image(tmp_path / "more" / f"m{n}.jpg", n)
        xml(tmp_path / "more" / f"m{n}.xml")
    image(tmp_path / "images" / "plain.jpg")
    (line,) = [note for note in open_index(tmp_path).notes if note.startswith("not used")]
    assert line == (
        "not used: 4 images and 4 annotation files in more/; 1 image next to others that no annotation names"
    )
    assert not [note for note in open_index(draw(tmp_path / "drawn", side=32)).notes if note.startswith("not used")]


# Several problems at once


def test_check_decodes_images_of_a_training_split_without_boxes(tmp_path: Path) -> None:
    folder = draw(tmp_path / "set", side=32)
    file = folder / "train" / "_annotations.coco.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"annotations": []}))
    (folder / "train" / "train-0.jpg").write_bytes(b"")
    found = kinds(check_dataset(folder))
    assert found["empty-split"] == found["empty-image"] == 1


def test_stats_and_train_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The recommended command is accepted, and without --image-size the size is that of the training."""
    folder = draw(tmp_path / "set", side=96)
    code, output = run(capsys, "data", "stats", folder, "--json")
    assert code == 0
    found = json.loads(output)
    code, plan = run(capsys, "train", folder, "--dry-run", "--verbose", "--batch-size", "4", *found["flags"].split())
    assert code == 0, plan
    chosen = {line.split()[0]: line.split()[1:] for line in plan.splitlines() if line.split()}
    assert chosen["model"][0] == found["model"]
    height, width = found["image_size"]
    assert str(height) in chosen["image-size"][0]
    assert str(width) in " ".join(chosen["image-size"][:2])


def test_dry_run(two_classes: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(two_classes.parent)
    before = sorted(two_classes.parent.rglob("*"))
    command = ("train", two_classes, "--dry-run", "--steps", "7", "--batch-size", "4", "--image-size", "64", "64",
               "--model", "retinanet_tiny_fpn")  # fmt: skip
    code, output = run(capsys, *command)
    assert (code, "12 of 16 boxes" in output) == (DataError.exit_code, True)
    code, output = run(capsys, *command, "--max-bad-boxes", "0.9")
    assert code == 0
    lines = output.splitlines()
    warning = next(n for n, line in enumerate(lines) if line.startswith("warning: data: 12 × class that"))
    settings = next(n for n, line in enumerate(lines) if line.split()[:2] == ["setting", "value"])
    plan = lines.index("plan:")
    assert warning < settings < plan
    assert any("other settings have their defaults: --verbose shows them" in line for line in lines)
    assert "hflip" not in output
    assert "- trains on 20 images with 20 boxes of 2 classes" in lines
    assert "- 7 steps of 4 images: each image is seen 1.4 times" in lines
    assert sorted(two_classes.parent.rglob("*")) == before
    assert "hflip" in run(capsys, *command, "--max-bad-boxes", "0.9", "--verbose")[1]
