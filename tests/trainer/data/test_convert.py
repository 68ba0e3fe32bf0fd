"""stoker data convert: the new data set is read back the same, has the expected files, and is complete or absent."""

import hashlib
import io
import json
import sys
from pathlib import Path
from typing import Any, get_args
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import strategies as st
from PIL import Image, ImageOps

from stoker.data.convert import PARTIAL_MARKER, TargetFormat, convert
from stoker.data.formats.tables import apply_orientation, exact_extent, shortest_decimal
from stoker.data.index import Index, open_index
from stoker_watch.cli.app import main
from stoker_watch.errors import DataError, StorageError, UsageError
from tests.fixtures.data_convert import CLASSES, annotated, coco, data_sets, two_splits
from tests.trainer.data.examples import property_test
from tests.trainer.data.tfrecords import features_of, image_features, jpeg, unframe, write

TARGETS: tuple[TargetFormat, ...] = get_args(TargetFormat)


def image_order(index: Index) -> list[int]:
    return [image_index for split in index.splits for image_index in index.image_indices(split).tolist()]


def boxes_of(index: Index, row: int) -> tuple[np.ndarray[Any, Any], list[str], list[bool], np.ndarray[Any, Any]]:
    own = slice(index.offsets[row], index.offsets[row + 1])
    names = [index.class_names[label] for label in index.labels[own]]
    return index.boxes[own], names, index.crowd[own].tolist(), index.area[own]


@property_test(data_sets(), st.integers(1, 3), few=3, many=30)
def test_every_data_set_is_read_back_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    drawn: dict[str, dict[str, tuple[bytes, list[dict[str, object]]]]],
    shards: int,
) -> None:
    root = tmp_path_factory.mktemp("round")
    for split, images in drawn.items():
        coco(root / "source", images, split)
    source = open_index(root / "source")
    for to in TARGETS:
        out = root / to
        converted = convert(source, out, to, shards=shards if to == "tfrecord" else 1)
        index = open_index(out)
        assert index.format == to
        assert index.splits == source.splits
        assert converted.num_images == {split: len(source.image_indices(split)) for split in source.splits}
        assert converted.num_boxes == len(index.boxes)
        assert converted.skipped == ()
        if to == "voc":
            assert set(index.class_names) <= set(CLASSES)
        else:
            assert index.class_names == source.class_names
        assert [index.path(row).name for row in image_order(index)] == [
            source.path(row).name for row in image_order(source)
        ]
        if to in ("coco", "tfrecord"):
            ids = index.image_id[image_order(index)].tolist(), source.image_id[image_order(source)].tolist()
            assert to == "tfrecord" or ids[0] == ids[1]
        for row, original in zip(image_order(index), image_order(source), strict=True):
            assert index.read(row) == source.read(original)
            assert index.original_size[row].tolist() == source.original_size[original].tolist()
            boxes, names, crowd, area = boxes_of(index, row)
            expected, expected_names, expected_crowd, expected_area = boxes_of(source, original)
            if to in ("voc", "yolo"):
                kept = ~np.array(expected_crowd, bool)
                expected, expected_names = expected[kept], [n for n, k in zip(expected_names, kept, strict=True) if k]
                assert not any(crowd)
            else:
                assert crowd == expected_crowd
                assert area == pytest.approx(expected_area, rel=1e-6)
            assert names == expected_names
            if to in ("coco", "voc"):
                assert boxes.tolist() == expected.tolist()
            else:
                assert np.abs(boxes - expected).max(initial=0) < 1e-3


corners = st.floats(-1e4, 1e5, width=32).filter(lambda value: value == 0 or abs(value) > 1e-3)


@property_test(corners, corners, few=40, many=1000)
def test_a_corner_and_an_extent_give_both_corners_again(low: float, high: float) -> None:
    """To the bit in float32, through JSON; below a thousandth of a pixel is no corner."""
    left = shortest_decimal(np.float32(low))
    assert np.float32(left) == np.float32(low)
    left, width = json.loads(json.dumps([left, exact_extent(left, np.float32(high))]))
    assert np.float32(left + width) == np.float32(high)
    assert exact_extent(shortest_decimal(np.float32(10.1)), np.float32(30.3)) == 20.2


def test_tfrecords_are_what_the_api_writes(tmp_path: Path) -> None:
    """Against a reader of its own, with the keys of object_detection/dataset_tools/create_coco_tf_record.py."""
    source = open_index(two_splits(tmp_path / "source"))
    convert(source, tmp_path / "out", "tfrecord", shards=3)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [
        "label_map.pbtxt",
        "train.record-00000-of-00003", "train.record-00001-of-00003", "train.record-00002-of-00003",
        "val.record-00000-of-00002", "val.record-00001-of-00002",
    ]  # fmt: skip
    train = [record for name in names[1:4] for record in unframe((tmp_path / "out" / name).read_bytes())]
    features = [features_of(record) for record in train]
    assert [each["image/filename"] for each in features] == [[f"{n}.jpg".encode()] for n in range(4)]
    first = features[1]
    data = jpeg(40, 30, 1)
    assert first["image/encoded"] == [data]
    assert first["image/key/sha256"] == [hashlib.sha256(data).hexdigest().encode()]
    assert first["image/format"] == [b"jpeg"]
    assert (first["image/height"], first["image/width"]) == ([30], [40])
    assert first["image/object/class/text"] == [b"a b"]
    assert first["image/object/class/label"] == [2]
    corners = [first[f"image/object/bbox/{key}"][0] for key in ("xmin", "ymin", "xmax", "ymax")]
    assert corners == pytest.approx([1 / 40, 2 / 30, 11.5 / 40, 22 / 30])
    assert first["image/object/is_crowd"] == [0]
    assert first["image/object/area"] == [210]
    (empty,) = unframe((tmp_path / "out" / names[5]).read_bytes())
    assert "image/object/bbox/xmin" not in features_of(empty)


def test_the_files_of_the_other_formats(tmp_path: Path) -> None:
    source = open_index(two_splits(tmp_path / "source"))
    for to in ("coco", "voc", "yolo"):
        convert(source, tmp_path / to, to)
    document = json.loads((tmp_path / "coco/annotations/instances_train.json").read_text())
    assert document["categories"] == [{"id": n, "name": name} for n, name in enumerate(CLASSES, 1)]
    assert document["annotations"][0] == {
        "id": 1, "image_id": 10, "category_id": 1, "bbox": [1, 2, 10.5, 20], "area": 210.0, "iscrowd": 0,
    }  # fmt: skip
    assert (tmp_path / "coco/train/3.jpg").read_bytes() == jpeg(40, 30, 3)
    assert (tmp_path / "voc/ImageSets/Main/val.txt").read_text() == "0-2\ne\n"
    root = ElementTree.parse(tmp_path / "voc/Annotations/0-2.xml").getroot()
    assert root.findtext("filename") == "0-2.jpg"
    assert [root.findtext(f"size/{side}") for side in ("width", "height", "depth")] == ["40", "30", "3"]
    assert [element.text for element in root.iter("bndbox") for element in element] == ["0", "0", "40", "30"]
    assert (tmp_path / "yolo/data.yaml").read_text(encoding="utf-8") == (
        'train: images/train\nval: images/val\nnc: 3\nnames:\n  0: "zebra"\n  1: "a b"\n  2: "ümlaut\'s \\"x\\": #1"\n'
    )
    assert (tmp_path / "yolo/labels/val/0.txt").read_text() == "0 0.5 0.5 1 1\n"
    assert (tmp_path / "yolo/labels/val/e.txt").read_text() == ""


def test_records_become_files_with_names_that_differ(tmp_path: Path) -> None:
    box = ("zebra", 1, 0.0, 0.0, 0.5, 0.5)
    png = io.BytesIO()
    Image.new("RGB", (200, 100)).save(png, "PNG")
    write(
        tmp_path / "in" / "train.record",
        image_features("A.jpg", [box]),
        image_features("a.JPEG", [box]),
        image_features(None, [box]) | {"image/encoded": [png.getvalue()]},
        image_features("b\n\\.c d.e ", [box]),
    )
    write(tmp_path / "in" / "val.record", image_features("a.jpg", [box]))
    source = open_index(tmp_path / "in")
    for to in TARGETS:
        convert(source, tmp_path / to, to, hardlink=True)
        index = open_index(tmp_path / to)
        by_name = {index.path(row).name: index.read(row) for row in image_order(index)[:4]}
        assert by_name.keys() == {"A.jpg", "a-2.JPEG", "record 3.png", "c d.e.jpg"}, to
        assert by_name["record 3.png"] == png.getvalue()
        assert sorted(by_name.values()) == sorted(source.read(row) for row in image_order(source)[:4])
        assert index.path(image_order(index)[4]).name == ("a-3.jpg" if to == "voc" else "a.jpg")


def test_what_a_format_cannot_store_is_noted(tmp_path: Path) -> None:
    crowd = annotated([0, 0, 9, 9], 3, iscrowd=1)
    over = annotated([-0.5, 1.25, 40.25, 20])
    coco(tmp_path / "in", {"a.jpg": (jpeg(40, 30), [crowd, over]), "b.jpg": (jpeg(40, 30), [over])})
    coco(tmp_path / "in", {"c.jpg": (jpeg(40, 30), [over])}, "valid")
    source = open_index(tmp_path / "in")
    notes = {to: "\n".join(convert(source, tmp_path / to, to).notes) for to in TARGETS}
    assert notes["coco"] == ""
    assert "1 crowd boxes are left out" in notes["voc"]
    assert "classes without a box are left out" in notes["voc"]
    assert "3 boxes are not in whole pixels" in notes["voc"]
    assert "1 crowd boxes are left out" in notes["yolo"]
    for to in ("yolo", "tfrecord"):
        assert "3 boxes reached outside their image and are clipped" in notes[to]
        index = open_index(tmp_path / to)
        assert index.boxes[-1].tolist() == pytest.approx([0, 1.25, 39.75, 21.25], abs=1e-3)


def test_unreadable_images_are_skipped_and_reported(tmp_path: Path) -> None:
    root = two_splits(tmp_path / "in")
    (root / "train" / "1.jpg").write_bytes(b"<html>")
    (root / "train" / "2.jpg").unlink()
    (root / "train" / "3.jpg").write_bytes(jpeg(41, 30))
    source = open_index(root)
    converted = convert(source, tmp_path / "out", "tfrecord", shards=4)
    assert [path.name for path, _ in converted.skipped] == ["1.jpg", "2.jpg", "3.jpg"]
    reasons = [reason for _, reason in converted.skipped]
    assert "web page" in reasons[0]
    assert "No such file" in reasons[1]
    assert "give 40 × 30 pixels, the image has 41 × 30" in reasons[2]
    assert len(open_index(tmp_path / "out")) == 3
    assert (tmp_path / "out" / "train.record-00000-of-00001").stat().st_size > 0
    webp = io.BytesIO()
    Image.new("RGB", (40, 30)).save(webp, "WEBP")
    (root / "train" / "0.jpg").write_bytes(webp.getvalue())
    converted = convert(source, tmp_path / "out2", "tfrecord")
    assert converted.skipped[0][1] == "it is webp, TensorFlow decodes jpeg, png, bmp, gif"
    for split in ("train", "valid"):
        for path in (root / split).glob("*.jpg"):
            path.unlink()
    with pytest.raises(DataError, match="No image could be converted"):
        convert(source, tmp_path / "out3", "coco")
    assert not list(tmp_path.glob("out3*"))


def test_a_split_without_readable_images_is_left_out(tmp_path: Path) -> None:
    root = two_splits(tmp_path / "in")
    source = open_index(root)
    for path in (root / "valid").glob("*.jpg"):
        path.write_bytes(b"")
    for to in TARGETS:
        converted = convert(source, tmp_path / to, to)
        assert converted.num_images == {"train": 4}
        assert len(converted.skipped) == 2
        assert len(open_index(tmp_path / to)) == 4


def test_the_new_folder_is_complete_or_absent(tmp_path: Path) -> None:
    source = open_index(two_splits(tmp_path / "in"))
    out, partial = tmp_path / "out", tmp_path / "out.partial"

    class Killed(BaseException):
        pass

    def killed(done: int, _all: int) -> None:
        assert not out.exists()
        assert (partial / PARTIAL_MARKER).is_file()
        if done == 3:
            raise Killed

    with pytest.raises(Killed):
        convert(source, out, "yolo", progress=killed)
    assert not out.exists()
    partial.mkdir()
    (partial / "mine.txt").touch()
    with pytest.raises(UsageError, match="in the way"):
        convert(source, out, "yolo")
    (partial / PARTIAL_MARKER).touch()  # as a SIGKILL leaves it
    convert(source, out, "yolo")
    assert not partial.exists()
    assert not list(out.rglob(PARTIAL_MARKER))
    assert not list(out.rglob("mine.txt"))
    with pytest.raises(UsageError, match="exists already"):
        convert(source, out, "coco")
    with pytest.raises(UsageError, match="exists already"):
        convert(source, tmp_path / "in", "coco")
    (tmp_path / "empty").mkdir()
    convert(source, tmp_path / "empty", "coco")
    (tmp_path / "file").touch()
    with pytest.raises(StorageError):
        convert(source, tmp_path / "file" / "below", "coco")
    with pytest.raises(UsageError, match="--shards is 2"):
        convert(source, tmp_path / "x", "coco", shards=2)


def test_links_are_links(tmp_path: Path) -> None:
    root = two_splits(tmp_path / "in")
    source = open_index(root)
    for to in ("coco", "voc", "yolo"):
        convert(source, tmp_path / to, to, hardlink=True)
        index = open_index(tmp_path / to)
        for row, original in zip(image_order(index), image_order(source), strict=True):
            assert index.path(row).samefile(source.path(original))
    convert(source, tmp_path / "copy", "coco")
    assert not (tmp_path / "copy/train/0.jpg").samefile(root / "train/0.jpg")


@pytest.mark.parametrize("orientation", range(1, 9))
def test_boxes_rotate_with_the_image(orientation: int) -> None:
    stored = np.zeros((20, 30), np.uint8)
    stored[3:7, 5:14] = 255
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    Image.fromarray(stored).save(file, "PNG", exif=exif)
    upright = np.asarray(ImageOps.exif_transpose(Image.open(file)))
    ys, xs = np.nonzero(upright)
    expected = [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]
    assert apply_orientation(np.array([[5, 3, 14, 7]], np.float32), (20, 30), orientation).tolist() == [expected]


def rotated_jpeg() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    Image.new("RGB", (30, 20)).save(file, "JPEG", exif=exif)
    return file.getvalue()


@pytest.mark.parametrize("annotated_as", ["stored", "upright"])
def test_boxes_have_the_orientation_of_the_readers(tmp_path: Path, annotated_as: str) -> None:
    """YOLO's readers apply EXIF rotation, TensorFlow does not; COCO and Pascal VOC store the size."""
    box = [5, 3, 9, 4] if annotated_as == "stored" else [13, 5, 4, 9]
    for split in ("train", "valid"):
        coco(tmp_path / "in", {f"{split}.jpg": (rotated_jpeg(), [annotated(box)])}, split)
        if annotated_as == "upright":
            file = tmp_path / "in" / split / "_annotations.coco.json"
            document = json.loads(file.read_text())
            document["images"][0] |= {"width": 20, "height": 30}
            file.write_text(json.dumps(document))
    source = open_index(tmp_path / "in")
    stored, upright = ([20, 30], [5, 3, 14, 7]), ([30, 20], [13, 5, 17, 14])
    same = stored if annotated_as == "stored" else upright
    for to, (size, corners) in {"coco": same, "voc": same, "yolo": upright, "tfrecord": stored}.items():
        converted = convert(source, tmp_path / to, to)  # type: ignore[arg-type]
        index = open_index(tmp_path / to)
        assert index.original_size.tolist() == [size] * 2, to
        assert index.boxes[0].tolist() == pytest.approx(corners, abs=1e-4), to
        assert any("2 images are rotated by EXIF" in note for note in converted.notes)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["in", "out", "--to", "yolo"], 0, ["6 images (train 4, val 2)", "5 boxes, 3 classes", "written: out"]),
        (["in", "out", "--to", "yolo", "--classes", "a b"], 0, ["1 boxes, 1 classes"]),
        (["in", "out", "--to", "yolov8"], 2, ["yolo", "tfrecord"]),
        (["in", "in", "--to", "voc"], 2, ["exists already", "fix:"]),
        (["nowhere", "out", "--to", "voc"], 4, ["nowhere"]),
    ],
)
def test_the_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    words: list[str],
) -> None:
    two_splits(tmp_path / "in")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["stoker", "data", "convert", *arguments])
    with pytest.raises(SystemExit) as exit_info:
        main()
    output = "".join(capfd.readouterr())
    assert exit_info.value.code == code, output
    for word in words:
        assert word in output
    assert "Traceback" not in output
    assert (tmp_path / "out").exists() == (code == 0)
