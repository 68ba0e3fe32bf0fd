"""The check says what training will do: it refuses when training would, and counts what training uses."""

import contextlib
import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.data.index import open_index, require_images
from stoker.data.loading.loader import Loader, LoaderSpec, compute_max_boxes
from stoker.data.validation.check import DatasetCheck, check_dataset
from stoker.data.validation.problems import DEFAULT_MAX_BAD_FRACTION, PROBLEM_KINDS, ProblemCollector, max_bad_images
from stoker.hardware.selection import select_device
from stoker.report.dataset import print_check
from stoker_watch.errors import DataError, UsageError
from tests.drawn import draw
from tests.trainer.data.hostile import encoded

NOTHING_LEFT = "no image of a split is left, which --max-bad-fraction 1 would allow and the check does not"


def kinds(report: DatasetCheck) -> dict[str, int]:
    return {item.kind: item.count for item in report.items}


def page(report: DatasetCheck) -> str:
    text = io.StringIO()
    print_check(report, text)
    return text.getvalue()


def edit(folder: Path, split: str, **changes: Any) -> None:
    file = folder / split / "_annotations.coco.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def read(folder: Path, split: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / split / "_annotations.coco.json").read_text())
    return content


def test_data_set_without_problems(tmp_path: Path) -> None:
    folder = draw(tmp_path / "set", side=32)
    moved: list[tuple[int, int]] = []
    report = check_dataset(folder, progress=lambda done, total: moved.append((done, total)))
    assert report.items == ()
    assert report.refusals == ()
    boxes = sum(len(read(folder, split)["annotations"]) for split in ("train", "valid"))
    assert (report.num_images, report.num_usable_images, report.num_boxes, report.num_usable_boxes) == (
        30,
        30,
        boxes,
        boxes,
    )
    assert (report.format, report.classes, report.root) == ("coco", ("red", "green", "blue"), str(folder))
    assert {name: split.num_images for name, split in report.splits.items()} == {"train": 24, "val": 6}
    assert moved == [(16, 30), (30, 30)]
    assert "no problems found" in page(report)
    assert page(report).rstrip().endswith(f"training would use 30 of 30 images, {boxes} of {boxes} boxes")
    assert msgspec.json.decode(msgspec.json.encode(report), type=DatasetCheck) == report


def test_a_single_file_and_one_class(tmp_path: Path) -> None:
    folder = draw(tmp_path / "set", side=32)
    report = check_dataset(folder / "train" / "_annotations.coco.json", classes=("blue",))
    assert report.classes == ("blue",)
    assert report.num_images == 24
    labels = [box["category_id"] for box in read(folder, "train")["annotations"]]
    assert report.num_boxes == labels.count(3)
    with pytest.raises(UsageError, match="bleu"):
        check_dataset(folder, classes=("bleu",))


def test_a_data_set_that_cannot_be_read(tmp_path: Path) -> None:
    folder = draw(tmp_path / "set", side=32)
    (folder / "valid" / "_annotations.coco.json").write_text('{"images": [,')
    report = check_dataset(folder)
    assert kinds(report) == {"unreadable-set": 1}
    assert "not valid JSON" in report.refusals[0]
    for fragment in ("valid/_annotations.coco.json:1", "fix:"):
        assert fragment in report.items[0].examples[0]
        assert fragment in page(report)


def test_problems_before_a_fatal_error_are_reported(tmp_path: Path) -> None:
    folder = draw(tmp_path / "set", side=32)
    edit(folder, "train", annotations=[{"id": 1, "image_id": 0, "category_id": 1, "bbox": [1, 2, 0, 0]}])
    assert kinds(check_dataset(folder)) == {"zero-size": 1, "empty-split": 1, "no-box-left": 1}


@pytest.mark.parametrize("split", ["train", "valid"])
def test_required_split(tmp_path: Path, split: str) -> None:
    """A set of one split that is named validation, and a validation split without boxes."""
    folder = draw(tmp_path / "set", side=32)
    if split == "train":
        for path in sorted((folder / "train").iterdir()):
            path.unlink()
        (folder / "train").rmdir()
    else:
        edit(folder, "valid", annotations=[])
    report = check_dataset(folder)
    assert "empty-split" in kinds(report)
    said = {"train": "The data set has no train split.", "valid": "The validation split has no boxes."}
    assert report.refusals == (said[split],)


@pytest.mark.parametrize("split", ["train", "valid"])
def test_split_with_only_crowd_boxes_has_no_boxes(tmp_path: Path, split: str) -> None:
    folder = draw(tmp_path / "set", side=32)
    edit(folder, split, annotations=[one | {"iscrowd": 1} for one in read(folder, split)["annotations"]])
    assert check_dataset(folder).refusals


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_it_refuses_when_training_would(data: st.DataObject) -> None:
    """Missing and broken images, entries that cannot be read, in both splits, at any --max-bad-fraction."""
    max_bad = data.draw(st.sampled_from([0.0, 0.01, 0.1, 0.25, 0.5, 1.0]))
    with tempfile.TemporaryDirectory() as temporary:
        folder = draw(Path(temporary) / "set", train=12, val=5, side=32)
        for split, count in (("train", 12), ("valid", 5)):
            bad = st.lists(
                st.sampled_from(["gone", "empty", "cut"]), max_size=data.draw(st.sampled_from([0, 1, 2, count]))
            )
            for n, fate in enumerate(data.draw(bad)):
                file = folder / split / f"{split}-{n}.jpg"
                content = file.read_bytes()
                if fate == "gone":
                    file.unlink()
                else:
                    file.write_bytes(b"" if fate == "empty" else content[: len(content) // 2])
            bad_entries = data.draw(st.sampled_from([0, 0, 1, 2]))
            edit(folder, split, images=read(folder, split)["images"] + [{"id": "?"}] * bad_entries)
        report = check_dataset(folder, max_bad_fraction=max_bad, workers=2)
        said = training_says(folder, max_bad)
        assert bool(report.refusals) == bool(said), (report.refusals, said)
        if said is not None:
            assert "--max-bad-fraction" in " ".join(report.refusals)
            assert said == NOTHING_LEFT or ("--max-bad-fraction" in said and "stoker data check" in said)


def training_says(folder: Path, max_bad: float) -> str | None:
    """The error that an epoch of training and one evaluation end with."""
    index = open_index(folder)
    try:
        require_images(index, ("train", "val"), max_bad_fraction=max_bad)
        for split in ("train", "val"):
            image_indices = index.image_indices(split)
            spec = LoaderSpec(
                device=select_device("cpu"), batch_size=4, image_size=(32, 32), resize="squash", seed=0, workers=1,
                max_boxes=compute_max_boxes(index, image_indices), train=split == "train", max_bad_fraction=max_bad,
            )  # fmt: skip
            loader = Loader(index, image_indices, spec)
            with contextlib.closing(loader):
                for _ in range(-(-len(image_indices) // 4)):
                    next(loader)
            if len(loader.state_dict()["quarantined"]) == len(image_indices):
                return NOTHING_LEFT
    except DataError as error:
        return str(error)
    return None


@given(st.floats(0, 1), st.integers(1, 10**6))
def test_max_bad_images(fraction: float, images: int) -> None:
    allowed = max_bad_images(fraction, images)
    assert allowed < fraction * images + 1 or allowed == 1
    assert (allowed >= 1) == (fraction > 0)
    assert max_bad_images(fraction, images + 1) >= allowed
    assert max_bad_images(DEFAULT_MAX_BAD_FRACTION, 100) == max_bad_images(DEFAULT_MAX_BAD_FRACTION, 3) == 1


def test_boxes_of_unusable_images_are_not_usable(tmp_path: Path) -> None:
    folder = draw(tmp_path / "set", side=32)
    (folder / "train" / "train-0.jpg").write_bytes(b"")
    own = sum(box["image_id"] == 0 for box in read(folder, "train")["annotations"])
    report = check_dataset(folder)
    assert own > 0
    assert report.num_boxes - report.num_usable_boxes == own
    assert (report.num_images, report.num_usable_images, report.refusals) == (30, 29, ())


def test_without_decoding(tmp_path: Path) -> None:
    folder = draw(tmp_path / "set", side=32)
    (folder / "train" / "train-0.jpg").write_bytes(b"")
    (folder / "valid" / "valid-0.jpg").unlink()
    report = check_dataset(folder, decode_images=False)
    assert kinds(report) == {"missing-image": 1}
    assert (report.num_usable_images, report.decoded) == (29, False)
    assert "images were not decoded" in page(report)
    assert kinds(check_dataset(folder)) == {"missing-image": 1, "empty-image": 1}


def test_location_of_missing_images_is_suggested(tmp_path: Path) -> None:
    folder = draw(tmp_path / "set" / "annotations", train=3, val=2, side=32)
    for split in ("train", "valid"):
        (tmp_path / "set" / "images" / split).mkdir(parents=True)
        for image in (folder / split).glob("*.jpg"):
            image.rename(tmp_path / "set" / "images" / image.name)
    (missing,) = check_dataset(folder).items
    assert missing.kind == "missing-image"
    assert f"is in {tmp_path / 'set' / 'images'}: name the parent folder of both, {tmp_path / 'set'}" in missing.fix


def test_the_report_does_not_depend_on_threads(tmp_path: Path) -> None:
    folder = draw(tmp_path / "set", train=40, side=32)
    for n in range(0, 40, 3):
        (folder / "train" / f"train-{n}.jpg").write_bytes(bytes([n]))
    assert check_dataset(folder, workers=1) == check_dataset(folder, workers=5)


def test_all_locations_are_reported_and_the_index_keeps_a_few(tmp_path: Path) -> None:
    folder = draw(tmp_path / "set", side=32)
    boxes = [{"id": 900 + n, "image_id": 1, "category_id": 1, "bbox": [1, 2, 0, 0]} for n in range(50)]
    edit(folder, "train", annotations=read(folder, "train")["annotations"] + boxes)
    (item,) = check_dataset(folder).items
    assert item.examples == tuple(f"train/train-1.jpg, annotation {900 + n}: [1, 2, 1, 2]" for n in range(50))
    (problem,) = open_index(folder).problems
    assert (problem.count, problem.examples) == (50, item.examples[:5])


def test_duplicate_images(tmp_path: Path) -> None:
    folder = draw(tmp_path / "set", side=32)
    for name in ("train/train-1.jpg", "train/train-2.jpg", "valid/valid-0.jpg"):
        (folder / name).write_bytes((folder / "train" / "train-0.jpg").read_bytes())
    report = check_dataset(folder)
    assert report.items[0].examples == (
        "train/train-0.jpg (train), train/train-1.jpg (train), train/train-2.jpg (train), valid/valid-0.jpg (val)",
    )
    assert kinds(report) == {"same-image-in-two-splits": 1}


def test_file_names_cannot_send_terminal_control_codes(tmp_path: Path) -> None:
    folder = draw(tmp_path / "set", side=32)
    (folder / "train" / "\x1b[2Jx.jpg").write_bytes(encoded(1))
    report = check_dataset(folder)
    assert report.items[0].examples == ("train/\x1b[2Jx.jpg",)
    assert "\x1b" not in page(report)


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(KeyError):
        ProblemCollector().add("bad-luck", "here")


def test_every_kind_is_complete() -> None:
    for name, kind in PROBLEM_KINDS.items():
        assert all(msgspec.structs.astuple(msgspec.structs.replace(kind, severity="info"))), name
        assert name == name.lower()
        assert kind.unit in ("box", "image", "class", "file", "split")
        assert kind.action in ("fixed", "skipped", "refused", "kept")


def test_it_needs_no_torch() -> None:
    modules = "stoker.data.validation.check, stoker.report.dataset, stoker_watch.cli.app"
    script = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_real_data(real_data: Path) -> None:
    """What the sets' own README names."""
    blood = check_dataset(real_data / "bccd" / "BCCD")
    assert kinds(blood) == {"zero-size": 2}
    assert "BloodImage_00338.jpg, object 13" in " ".join(blood.items[0].examples)
    assert "BloodImage_00343.jpg, object 4" in " ".join(blood.items[0].examples)
    assert (blood.num_images, blood.num_usable_images, blood.num_boxes, blood.num_usable_boxes) == (
        364,
        364,
        4888,
        4886,
    )

    cars = check_dataset(real_data / "cars", decode_images=False)
    assert any("category 0 (cdf) is a super-category" in note for note in cars.notes)
    assert [item.examples for item in cars.items if item.kind == "class-not-in-split"] == [("front: not in val",)]
    assert cars.refusals == ()

    boards = check_dataset(real_data / "microcontroller", decode_images=False)
    assert any("csv" in note.lower() for note in boards.notes)
    assert boards.refusals == ()

    cells = check_dataset(real_data / "blood_png")
    assert kinds(cells)["transparent-image"] == 100
    assert cells.num_usable_images == 100

    dice = check_dataset(real_data / "dice")
    assert (dice.num_images, dice.num_usable_images, dice.num_boxes, dice.refusals) == (250, 250, 1795, ())
