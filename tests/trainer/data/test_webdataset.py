"""WebDataset shards of others: the layouts that public data sets and scripts write, from their sources.

Written down before the code: the COCO example of webdataset (docs "Convert Coco Dataset to Shards": 000025.jpg,
000025.instances.json, 000025.captions.json), NVIDIA's openimages-train-000000.tar (rows of Open Images as a list), a
benchmark of data loaders on COCO ({"bboxes", "labels"}), torchvision's targets, the Hugging Face hub's `objects`,
detectron2's `bbox_mode`, SA-1B (masks without classes), ImageNet shards (.cls) and captions (.txt).
"""

import contextlib
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from stoker.data.formats.objects import UnknownLayout, read_boxes
from stoker.data.images.source import is_copied
from stoker.data.index import open_index, require_images
from stoker.data.validation.problems import ProblemCollector
from stoker_watch.cli.app import main
from stoker_watch.errors import DataError
from tests.trainer.data.examples import property_test
from tests.trainer.data.shards import write_tar
from tests.trainer.data.tfrecords import jpeg

COCO_ROW = {
    "segmentation": [[239.97, 260.24, 222.04, 270.49]], "area": 380.0, "iscrowd": 0, "image_id": 25,
    "bbox": [4.0, 2.0, 20.0, 19.0], "category_id": 25, "id": 1,
}  # fmt: skip
OPEN_IMAGES_ROW = {
    "ImageID": "19a7594f418fe39e", "Source": "xclick", "LabelName": "/m/025", "Confidence": "1", "XMin": "0.1",
    "XMax": "0.6", "YMin": "0.0666666667", "YMax": "0.7", "IsOccluded": "0", "IsGroupOf": "0",
}  # fmt: skip
LAYOUTS: dict[str, tuple[str, Any, str]] = {
    "webdataset's COCO": ("instances.json", [COCO_ROW], "25"),
    "openimages-train": ("json", [OPEN_IMAGES_ROW], "/m/025"),
    "bboxes and labels": ("json", {"bboxes": [[4.0, 2.0, 20.0, 19.0]], "labels": [25]}, "25"),
    "torchvision": ("json", {"boxes": [[4.0, 2.0, 24.0, 21.0]], "labels": [25], "image_id": 7}, "25"),
    "Hugging Face": ("json", {"objects": {"id": [9], "bbox": [[4, 2, 20, 19]], "category": [25], "area": [380]}}, "25"),
    "COCO per image": ("json", {"image": {"id": 25, "width": 40}, "annotations": [COCO_ROW]}, "25"),
    "detectron2": ("json", {"annotations": [{"bbox": [4, 2, 24, 21], "bbox_mode": 0, "category_id": 25}]}, "25"),
    "named corners": ("annotations.json", [{"class": "cat", "xmin": 4, "ymin": 2, "xmax": 24, "ymax": 21}], "cat"),
}  # fmt: skip


def sample(key: str, suffix: str, content: Any, *, width: int = 40, height: int = 30) -> list[tuple[str, bytes]]:
    return [(f"{key}.jpg", jpeg(width, height, 1)), (f"{key}.{suffix}", json.dumps(content).encode())]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT])
def test_the_layouts_of_public_shards_are_read(name: str, format: int, tmp_path: Path) -> None:
    suffix, content, label = LAYOUTS[name]
    for split in ("train", "val"):
        files = [*sample("000025", suffix, content), ("000025.captions.json", b'[{"caption": "a giraffe"}]')]
        write_tar(tmp_path / f"{split}-000000.tar", files, format=format)
    index = open_index(tmp_path)
    assert (index.format, index.splits, index.class_names) == ("webdataset", ("train", "val"), (label,))
    assert index.boxes.tolist() == pytest.approx(np.array([[4, 2, 24, 21]] * 2), abs=1e-4)
    assert index.original_size.tolist() == [[30, 40]] * 2
    assert [index.read(row) for row in range(2)] == [jpeg(40, 30, 1)] * 2
    assert index.problems == ()
    assert require_images(index) == []


def test_long_names_and_folders_inside_an_archive(tmp_path: Path) -> None:
    """Names above 100 bytes need pax or GNU headers; the key ends at the first dot after the folders."""
    name = "x" * 120
    for format in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        folder = tmp_path / str(format)
        files = [*sample(f"./some.set/{name}", "json", {"boxes": [[1, 1, 9, 9]], "labels": ["é"]})]
        files += sample("./some.set/b", "json", {"boxes": [[1, 1, 9, 9]], "labels": ["é"]})
        write_tar(folder / "a.tar", files, format=format)
        index = open_index(folder / "a.tar")
        assert sorted(index.path(row).name for row in range(2)) == ["b.jpg", f"{name}.jpg"]
        assert index.class_names == ("é",)


WITHOUT_BOXES = {
    "classes of whole images": [("000001.jpg", jpeg()), ("000001.cls", b"7")],
    "captions": [("000001.jpg", jpeg()), ("000001.txt", b"a giraffe")],
    "tensors": [("000001.jpg", jpeg()), ("000001.y.bbox.xyxy.pth", b"\x80\x04")],
}


@pytest.mark.parametrize("name", WITHOUT_BOXES)
def test_samples_without_boxes_are_refused_with_what_is_valid(name: str, tmp_path: Path) -> None:
    write_tar(tmp_path / "set" / "train-000000.tar", WITHOUT_BOXES[name])
    for data in (tmp_path / "set", tmp_path / "set" / "train-000000.tar"):
        with pytest.raises(DataError) as error:
            open_index(data)
        text = str(error.value)
        assert "no boxes that are understood" in text
        assert "train-000000.tar" in text
        assert WITHOUT_BOXES[name][1][0].partition(".")[2] in text
        assert "instances.json" in text


UNKNOWN = {
    "sa-1b": ({"image": {"image_id": 1}, "annotations": [{"bbox": [1, 1, 9, 9], "area": 81}]}, None),
    "captions as json": ({"caption": "a giraffe", "url": "http://…"}, "'caption', 'url'"),
    "rotated": ([{"bbox": [1, 1, 9, 9], "bbox_mode": 4, "category_id": 1}], "bbox_mode is 4"),
    "unequal": ({"boxes": [[1, 1, 9, 9]], "labels": []}, "boxes has 1 entries, labels has 0"),
    "text": ("a giraffe", "not an object or a list"),
    "numbers": ([[1, 1, 9, 9]], "not an object or a list"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_layouts_are_refused_with_those_that_are_read(name: str, tmp_path: Path) -> None:
    content, cause = UNKNOWN[name]
    write_tar(tmp_path / "train-000000.tar", [*sample("a", "json", content), *sample("b", "json", content)])
    if cause is None:  # boxes without a class are bad boxes, and an image whose boxes are all bad is left out
        with pytest.raises(DataError, match=r"no images|no usable|No image|left out|empty"):
            open_index(tmp_path)
        return
    with pytest.raises(DataError) as error:
        open_index(tmp_path)
    text = str(error.value)
    assert "layout that is not known" in text
    assert "train-000000.tar: a.jpg" in text
    assert cause in text
    assert '"bboxes": [[x, y, width, height], …]' in text


def test_what_is_wrong_with_single_samples_is_reported_with_its_place(tmp_path: Path) -> None:
    good = {"boxes": [[1, 1, 9, 9]], "labels": ["a"]}
    files = [file for number in range(6) for file in sample(f"good{number}", "json", good)]
    files += [
        ("nojson.jpg", jpeg()),
        ("noimage.json", json.dumps(good).encode()),
        ("broken.jpg", jpeg()),
        ("broken.json", b'{"boxes": ['),
        ("text.jpg", b"<html>"),
        ("text.json", json.dumps(good).encode()),
        *sample("half", "json", {"boxes": [[1, 1, 9, 9], [1, 2, 3], [2, 2, 8, 8]], "labels": ["a", "a", None]}),
    ]
    write_tar(tmp_path / "train-000000.tar", files)
    write_tar(tmp_path / "val-000000.tar", sample("v", "json", good))
    (tmp_path / "val-000001.tar").write_bytes(b"")
    problems = ProblemCollector()
    index = open_index(tmp_path, problems=problems)
    found = {problem.kind: problem.examples for problem in problems.summarize()}
    assert found["no-annotation-file"] == ("train-000000.tar: nojson.jpg",)
    assert found["record-without-image"][0] == "train-000000.tar: noimage"
    assert "text.jpg: it is a web page" in found["record-without-image"][1]
    assert found["unreadable-annotations"][0].startswith("train-000000.tar: broken.json: ")
    assert found["malformed-box"][0].startswith("train-000000.tar: half.jpg, object 2: ")
    assert found["no-class"][0].startswith("train-000000.tar: half.jpg, object 3: ")
    assert found["empty-shard"] == (str(tmp_path / "val-000001.tar"),)
    assert len(index) == 8
    assert index.bad_boxes["train"] == 2


@pytest.mark.parametrize(("cut", "kind"), [(-3000, "truncated-shard"), (None, "damaged-shard")])
def test_a_damaged_archive_gives_what_is_before_the_damage(cut: int | None, kind: str, tmp_path: Path) -> None:
    content = {"boxes": [[1, 1, 9, 9]], "labels": ["a"]}
    files = [file for number in range(9) for file in sample(f"{number}", "json", content)]
    path = write_tar(tmp_path / "train.tar", files, format=tarfile.USTAR_FORMAT)
    write_tar(tmp_path / "val.tar", files[:2])
    data = path.read_bytes()
    end = data.index(b"8.jpg")
    path.write_bytes(data[: end + 600] if cut is not None else data[:end] + b"\xff" * 512 + data[end + 512 :])
    index = open_index(tmp_path)
    assert len(index.image_indices("train")) == 8
    (example,) = [problem.examples[0] for problem in index.problems if problem.kind == kind]
    assert example.startswith("train.tar: ")


def test_numbered_archives_in_a_bucket_are_no_tfrecords() -> None:
    assert not is_copied("train-00000-of-00010.tar")
    assert not is_copied("shard.00000-of-00010.mds")
    assert is_copied("train.record-00000-of-00010")
    assert is_copied("stoker-index.arrow")
    assert not is_copied("table.arrow")


def test_an_archive_of_plain_images_is_no_webdataset(tmp_path: Path) -> None:
    write_tar(tmp_path / "images.tar", [("images/a.jpg", jpeg()), ("images/b.jpg", jpeg())])
    for data in (tmp_path, tmp_path / "images.tar"):
        with pytest.raises(DataError) as error:
            open_index(data)
        assert "boxes that are understood" not in str(error.value)
    with pytest.raises(DataError, match="unpack it"):
        open_index(tmp_path / "images.tar")


def test_shards_in_folders_of_splits_and_below(tmp_path: Path) -> None:
    content = {"boxes": [[1, 1, 9, 9]], "labels": ["a"]}
    for name in ("train/0.tar", "train/1.tar", "valid/0.tar"):
        write_tar(tmp_path / "a" / name, sample(name[0], "json", content))
    write_tar(tmp_path / "b" / "data" / "train-00000-of-00001.tar", sample("t", "json", content))
    write_tar(tmp_path / "b" / "data" / "validation-00000-of-00001.tar", sample("v", "json", content))
    counts = [
        {split: len(index.image_indices(split)) for split in index.splits}
        for index in (open_index(tmp_path / "a"), open_index(tmp_path / "b"))
    ]
    assert counts == [{"train": 2, "val": 1}, {"train": 1, "val": 1}]


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["bbox", "boxes", "labels", "annotations", "objects", "category"]), inner)
    ),
    max_leaves=12,
)


@property_test(json_values, few=50, many=3000)
def test_any_json_is_read_or_refused(content: Any) -> None:
    with contextlib.suppress(UnknownLayout):
        assert all(box.xyxy is None or len(box.xyxy) == 4 for box in read_boxes(content))


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["stoker", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_check_decodes_the_images_of_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = {"boxes": [[1, 1, 9, 9]], "labels": ["a"]}
    broken = jpeg(400, 300, 1)[:-300]
    files = [*sample("a", "json", content), ("b.jpg", broken), ("b.json", json.dumps(content).encode())]
    write_tar(tmp_path / "train.tar", files)
    write_tar(tmp_path / "val.tar", sample("c", "json", content))
    run(monkeypatch, "data", "check", tmp_path, "--json")
    report = json.loads(capsys.readouterr().out)
    found = {item["kind"]: item["locations"] for item in report["items"]}
    assert any("train.tar/b.jpg" in location for location in found["damaged-image"])
