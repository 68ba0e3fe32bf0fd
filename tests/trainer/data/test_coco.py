"""COCO JSON: every layout is detected, valid files are read completely, wrong entries are reported."""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from stoker.data.index import missing_images, open_index, require_images
from stoker.data.validation.problems import PROBLEM_KINDS
from stoker_watch.errors import DataError
from tests.trainer.data.examples import property_test
from tests.trainer.data.exports import save_images

Content = dict[str, Any]


def image_entry(number: int, name: str | None = None, **more: Any) -> Content:
    return {"id": number, "file_name": name or f"{number}.jpg", "height": 100, "width": 200, **more}


def box(number: int, image_id: int, category_id: int, bbox: Any = (10, 20, 30, 40), **more: Any) -> Content:
    return {"id": number, "image_id": image_id, "category_id": category_id, "bbox": bbox, **more}


def dataset(images: list[Content], annotations: list[Content], *names: str) -> Content:
    categories = [{"id": i, "name": name} for i, name in enumerate(names or ("cat", "dog"), 1)]
    return {"images": images, "annotations": annotations, "categories": categories}


def write(path: Path, content: Any, *, images: Path | None = None) -> Path:
    """Writes an annotation file, and empty image files where asked for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    if images is not None:
        images.mkdir(parents=True, exist_ok=True)
        for image in content["images"]:
            (images / image["file_name"]).touch()
    return path


GOOD = dataset([image_entry(1), image_entry(2)], [box(1, 1, 1), box(2, 2, 2)])

file_names = st.lists(
    st.text(st.characters(exclude_characters="\\/\0", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12),
    min_size=2,
    max_size=8,
    unique_by=lambda name: name,
).filter(lambda names: not {".", ".."} & set(names))
lengths = st.integers(1, 400) | st.floats(0.5, 400, width=32)
ALLOWED_KINDS = {"tiny-box", "reaches-outside"}
"""Kinds of problems that random valid boxes may have."""


@st.composite
def coco_files(draw: st.DrawFn) -> Content:
    names = draw(file_names)
    ids = draw(st.lists(st.integers(-(2**40), 2**40), min_size=len(names), max_size=len(names), unique=True))
    folders = draw(st.lists(st.sampled_from(["", "a/", "a b/ü/"]), min_size=len(names), max_size=len(names)))
    images = [
        {"id": i, "file_name": f + n} | draw(st.sampled_from([{}, {"height": 500, "width": 600}]))
        for i, n, f in zip(ids, names, folders, strict=True)
    ]
    categories = draw(st.lists(st.integers(0, 10**6), min_size=1, max_size=5, unique=True))
    annotations = [
        {
            "id": number,
            "image_id": draw(st.sampled_from(ids)),
            "category_id": draw(st.sampled_from(categories)),
            "bbox": [
                draw(st.integers(2, 90)) + number / 64,
                draw(st.floats(0, 90, width=32)),
                draw(lengths),
                draw(lengths),
            ],
            "segmentation": [[1, 2, 3, 4]],
        }
        | draw(st.sampled_from([{}, {"iscrowd": 0}, {"iscrowd": 1, "area": 12.5}, {"area": 7}]))
        for number in range(draw(st.integers(3, 20)))
    ]
    annotations += [box(100 + k, i, categories[0]) for k, i in enumerate(ids)]  # so that no split is without boxes
    return {
        "images": images,
        "annotations": annotations,
        "categories": [{"id": i, "name": f"class {i}", "supercategory": "thing"} for i in categories],
    }


@property_test(coco_files(), few=6, many=200)
def test_a_valid_file_is_read_completely(content: Content) -> None:
    with tempfile.TemporaryDirectory() as folder:
        index = open_index(write(Path(folder) / "some.json", content), val_fraction=0.3)
        assert [index.path(image_index) for image_index in range(len(index))] == [
            Path(folder).resolve() / image["file_name"] for image in content["images"]
        ]
        assert index.image_id.tolist() == [image["id"] for image in content["images"]]
        assert index.original_size.tolist() == [[i.get("height", 0), i.get("width", 0)] for i in content["images"]]
        assert sorted([*index.image_indices("train"), *index.image_indices("val")]) == list(range(len(index)))
        assert list(index.category_ids) == sorted(index.category_ids)
        assert index.class_names == tuple(f"class {i}" for i in index.category_ids)
        assert not [
            p for p in index.problems if PROBLEM_KINDS[p.kind].unit in ("box", "image") and p.kind not in ALLOWED_KINDS
        ]
        for image_index, image in enumerate(content["images"]):
            own = [a for a in content["annotations"] if a["image_id"] == image["id"]]
            some = slice(index.offsets[image_index], index.offsets[image_index + 1])
            xywh = np.array([a["bbox"] for a in own], np.float64)
            np.testing.assert_array_equal(
                index.boxes[some], np.hstack([xywh[:, :2], xywh[:, :2] + xywh[:, 2:]]).astype(np.float32)
            )
            assert [index.category_ids[label] for label in index.labels[some]] == [a["category_id"] for a in own]
            assert index.crowd[some].tolist() == [bool(a.get("iscrowd")) for a in own]
            np.testing.assert_allclose(index.area[some], [a.get("area", np.prod(a["bbox"][2:])) for a in own])


def test_the_official_layout(tmp_path: Path) -> None:
    write(tmp_path / "annotations/instances_train2017.json", GOOD, images=tmp_path / "train2017")
    other = dataset([image_entry(1)], [box(1, 1, 2)])
    write(tmp_path / "annotations/instances_val2017.json", other, images=tmp_path / "val2017")
    write(tmp_path / "annotations/captions_val2017.json", other)
    index = open_index(tmp_path)
    assert index.splits == ("train", "val")
    assert [index.path(image_index) for image_index in index.image_indices("train")] == [
        tmp_path / f"train2017/{n}.jpg" for n in (1, 2)
    ]
    assert [index.path(image_index) for image_index in index.image_indices("val")] == [tmp_path / "val2017/1.jpg"]
    assert any("captions_val2017.json" in note for note in index.notes)
    assert require_images(index) == []


@pytest.mark.parametrize("image_dir", ["images", "images/train2017", "data", "Images", "."])
def test_images_are_found_near_one_file(tmp_path: Path, image_dir: str) -> None:
    file = write(tmp_path / "instances_train2017.json", GOOD, images=tmp_path / image_dir)
    for data in (tmp_path, file):
        index = open_index(data)
        assert require_images(index) == []
        assert index.path(0) == (tmp_path / image_dir / "1.jpg")


def test_a_file_named_after_a_split_is_that_split(tmp_path: Path) -> None:
    index = open_index(write(tmp_path / "instances_val2017.json", GOOD))
    assert index.splits == ("val",)
    assert any("no training split" in note for note in index.notes)
    with pytest.raises(DataError, match="no train split"):
        index.image_indices("train")


def test_file_names_of_another_machine(tmp_path: Path) -> None:
    content = dataset(
        [image_entry(1, "C:\\x\\1.jpg"), image_entry(2, "/gone/2.jpg")], [box(1, 1, 1), box(2, 2, 1)], "cat"
    )
    file = write(tmp_path / "labels.json", content)
    (tmp_path / "images").mkdir()
    for name in ("1.jpg", "2.jpg"):
        (tmp_path / "images" / name).touch()
    index = open_index(file)
    assert [index.path(image_index).name for image_index in (0, 1)] == ["1.jpg", "2.jpg"]
    assert require_images(index) == []
    assert any("folders in its file names are ignored" in note for note in index.notes)


def test_some_file_names_of_another_machine(tmp_path: Path) -> None:
    names = ["1.jpg", "C:\\x\\2.jpg", "sub/3.jpg", "/gone/3.jpg", "/gone/5.jpg"]
    content = dataset([image_entry(i, name) for i, name in enumerate(names, 1)], [box(1, 1, 1)], "cat")
    (tmp_path / "images/sub").mkdir(parents=True)
    for name in ("1.jpg", "2.jpg", "3.jpg", "sub/3.jpg"):
        (tmp_path / "images" / name).touch()
    index = open_index(write(tmp_path / "labels.json", content))
    found = [index.path(i).relative_to(tmp_path / "images") for i in range(3)]
    assert found == [Path("1.jpg"), Path("2.jpg"), Path("sub/3.jpg")]
    assert missing_images(index, range(5)) == [3, 4]  # which of two is meant is not known, and what does not exist
    assert any("1 of its file names are paths of another machine" in note for note in index.notes)


def test_absolute_file_names(tmp_path: Path) -> None:
    images = tmp_path / "elsewhere"
    images.mkdir()
    content = dataset([image_entry(i, str(images / f"{i}.jpg")) for i in (1, 2)], [box(i, i, 1) for i in (1, 2)], "cat")
    for i in (1, 2):
        (images / f"{i}.jpg").touch()
    index = open_index(write(tmp_path / "data/a.json", content), allow_outside=True)
    assert index.path(1) == images / "2.jpg"
    assert require_images(index) == []


def test_roboflow_with_an_unused_super_category(real_data: Path) -> None:
    index = open_index(real_data / "cars")
    assert index.class_names == ("corner", "front", "rear", "side")
    assert index.category_ids == (1, 2, 3, 4)
    assert {split: len(index.image_indices(split)) for split in index.splits} == {"train": 1000, "val": 150, "test": 50}
    assert any("category 0 (cdf) is a super-category" in note for note in index.notes)
    assert {problem.kind: problem.examples for problem in index.problems} == {
        "class-not-in-split": ("front: not in val",)
    }
    assert require_images(index) == []
    assert (index.original_size == 320).all()


def test_a_super_category_with_boxes_is_a_class(tmp_path: Path) -> None:
    content = dataset([image_entry(1), image_entry(2)], [box(1, 1, 0), box(2, 2, 1)])
    content["categories"] = [
        {"id": 0, "name": "car", "supercategory": "none"},
        {"id": 1, "name": "van", "supercategory": "car"},
        {"id": 2, "name": "bus", "supercategory": "bus"},
    ]
    index = open_index(write(tmp_path / "a.json", content))
    assert index.class_names == ("car", "van", "bus")


def test_files_that_number_their_categories_differently(tmp_path: Path) -> None:
    write(tmp_path / "train/_annotations.coco.json", GOOD)
    write(tmp_path / "valid/_annotations.coco.json", dataset([image_entry(1)], [box(1, 1, 1)], "dog", "cat"))
    index = open_index(tmp_path)
    assert index.class_names == ("cat", "dog")
    assert index.labels.tolist() == [0, 1, 1]
    assert any("matched by name" in note for note in index.notes)


def test_a_class_that_the_training_split_does_not_define(tmp_path: Path) -> None:
    write(tmp_path / "train/_annotations.coco.json", GOOD)
    write(tmp_path / "valid/_annotations.coco.json", dataset([image_entry(1)], [box(1, 1, 1)], "Dog"))
    with pytest.raises(DataError, match="'Dog'") as raised:
        open_index(tmp_path)
    assert str(tmp_path / "valid") in str(raised.value)
    assert "cat, dog" in str(raised.value)


def test_bad_boxes_are_dropped_and_reported_by_kind(tmp_path: Path) -> None:
    boxes = {
        10: (5, 5, 0, 3), 11: (5, 5, 3, 0), 12: (50, 50, -5, 5), 13: (300, 5, 5, 5), 14: (-9, 5, 4, 5),
        15: (-5, -5, 300, 300), 16: (float("nan"), 5, 5, 5), 17: (1, 1, float("inf"), 5), 18: (1e7, 1e7, 1e-3, 1),
        21: (50, 50, 5, -5),
    }  # fmt: skip
    annotations = [box(number, 1, 1, bbox) for number, bbox in boxes.items()] + [box(19, 2, 1), box(20, 2, 1, [])]
    index = open_index(write(tmp_path / "a.json", dataset([image_entry(1), image_entry(2)], annotations, "cat")))
    dropped = {kind.kind: kind for kind in index.problems}
    assert {name: kind.count for name, kind in dropped.items()} == {
        "no-box": 1, "not-a-number": 2, "negative-size": 2, "zero-size": 3, "outside": 2, "reaches-outside": 1,
    }  # fmt: skip
    assert "1.jpg, annotation 12: [50, 50, 45, 55]" in dropped["negative-size"].examples
    assert "a.json, annotation 20" in dropped["no-box"].examples[0]
    assert index.boxes.tolist() == [[-5, -5, 295, 295], [10, 20, 40, 60]]


def broken(**changes: Any) -> Content:
    return {**GOOD, **changes}


@pytest.mark.parametrize(
    ("content", "fragments"),
    [
        ("", ["empty"]),
        ('{"images": [],\n "annotations": [}', ["not valid JSON", "a.json:2", "truncated"]),
        (json.dumps(GOOD)[:-30], ["not valid JSON", "a.json:1", "truncated"]),
        (broken(images=[]), ["lists no images"]),
        (broken(categories=None), ["not COCO JSON", "categories"]),
        ({"shapes": [], "image_id": 1}, ["not COCO JSON", "missing required field"]),
        (
            broken(images=[image_entry(1), image_entry(1, "b.jpg")]),
            ["a unique id and a unique file name", "id 1: 1.jpg, b.jpg"],
        ),
        (
            broken(images=[image_entry(1, "b.jpg"), image_entry(2, "b.jpg")]),
            ["a unique file name", "b.jpg: image ids 1, 2"],
        ),
        (broken(images=[{"id": 2}, 5]), ['No entry of "images"', "number 0", "file_name"]),
        (broken(annotations=[box(7, "?", 1)]), ['No entry of "annotations"', "number 0", "image_id"]),
        (broken(annotations=[box(7, 3, 1)]), ["training split has no boxes", "annotation 7: image_id 3"]),
        (broken(annotations=[box(7, 1, 9)]), ["training split has no boxes", "annotation 7: category_id 9"]),
        (broken(categories=[]), ["defines no classes", "2 annotations"]),
        (broken(categories=[{"id": 1, "name": "a"}, {"id": 1, "name": "b"}]), ["category id 1", "more than once"]),
        (broken(annotations=[]), ["training split has no boxes"]),
        (broken(annotations=[box(7, 1, 1, [1, 2, 0, 0])]), ["training split has no boxes", "zero size"]),
    ],
)
def test_the_error_for_a_wrong_file_has_location_and_cause(tmp_path: Path, content: Any, fragments: list[str]) -> None:
    file = write(tmp_path / "a.json", content)
    with pytest.raises(DataError) as raised:
        open_index(file)
    for fragment in fragments:
        assert fragment in str(raised.value)
    assert raised.value.fix


@pytest.mark.parametrize(
    ("images", "annotations", "kinds"),
    [
        ([], [box(7, 3, 1)], {"unknown-image": "a.json, annotation 7: image_id 3"}),
        ([], [box(7, 1, 9)], {"unknown-class": "a.json, annotation 7: category_id 9"}),
        ([], [box(7, 1, 1, [1, 2, 3])], {"malformed-box": "a.json, annotation 7: 3 numbers"}),
        ([], [box(7, 1, 1, [1, 2, "x", 4])], {"malformed-annotation": '"annotations" number 2: {"id": 7'}),
        ([], [box(7, 1, 1, 5), box(8, 1, None)], {"malformed-annotation": "number 2", "text-for-number": None}),
        ([], [17, box(7, 1, 1, [float("nan")] * 4)], {"malformed-annotation": "2: 17", "not-a-number": "7"}),
        ([], [17], {"malformed-annotation": '"annotations" number 2: 17'}),
        ([], [box(7, 1, 9, [1, float("nan"), 3, 4]), "x"], {"unknown-class": "9", "malformed-annotation": '3: "x"'}),
        ([{"id": 3}], [], {"malformed-image": '"images" number 2: {"id": 3}: Object missing required field `file_n'}),
        ([image_entry(3, "a/")], [], {"malformed-image": "image id 3: 'a/' is not a file name"}),
        ([image_entry(3, "a\0b")], [box(7, 3, 1)], {"malformed-image": "id 3", "unknown-image": "image_id 3"}),
        ([image_entry(3, "x" * 300)], [], {"malformed-image": "id 3"}),
        ([image_entry(3) | {"width": "wide"}], [box(7, 3, 1)], {"malformed-size": '"images" number 2'}),
        ([image_entry(3) | {"width": -5}], [box(7, 3, 1)], {"malformed-size": "a.json, 3.jpg: width -5, height 100"}),
        ([image_entry(2)], [], {"copied-entry": "a.json, image id 2: 2.jpg"}),
        (
            [image_entry(3, "x"), image_entry(3, "y")],
            [box(7, 3, 1)],
            {"ambiguous-id": "id 3: x, y", "unknown-image": "3"},
        ),
        ([image_entry(3, "x"), image_entry(4, "x")], [box(7, 3, 1)], {"listed-twice": "x: image ids 3, 4"}),
    ],
)
def test_a_wrong_entry_is_reported_and_the_others_are_read(
    tmp_path: Path, images: list[Any], annotations: list[Any], kinds: dict[str, str]
) -> None:
    content = broken(images=GOOD["images"] + images, annotations=GOOD["annotations"] + annotations)
    index = open_index(write(tmp_path / "a.json", content))
    reported = {problem.kind: " ".join(problem.examples) for problem in index.problems}
    for kind, fragment in kinds.items():
        if fragment is None:
            assert kind not in reported
        else:
            assert fragment in reported[kind]
    good = [image_index for image_index in range(len(index)) if index.path(image_index).name in ("1.jpg", "2.jpg")]
    assert [index.boxes[index.offsets[image_index]].tolist() for image_index in good] == [[10, 20, 40, 60]] * 2


def test_an_entry_that_is_not_utf8_beside_a_wrong_entry(tmp_path: Path) -> None:
    content = broken(images=[*GOOD["images"], {"id": 3, "file_name": "é"}], annotations=[*GOOD["annotations"], {}])
    write(tmp_path / "a.json", content).write_bytes(json.dumps(content, ensure_ascii=False).encode("latin-1"))
    index = open_index(tmp_path / "a.json")
    assert len(index) == len(GOOD["images"])
    assert "malformed-image" in {problem.kind for problem in index.problems}


@property_test(coco_files(), st.data(), few=8, many=200)
def test_any_wrong_annotation_leaves_the_others_unchanged(content: Content, data: st.DataObject) -> None:
    junk = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.lists(st.integers(), max_size=2))
    count = len(content["annotations"]) - len(content["images"])  # those that keep the splits from being empty stay
    position = data.draw(st.integers(0, count - 1))
    key = data.draw(st.sampled_from(["image_id", "category_id", "bbox", "area", "iscrowd", "id"]))
    changed = content["annotations"][position] | {key: data.draw(junk)}
    wrong = data.draw(st.sampled_from([changed, {k: v for k, v in changed.items() if k != key}, changed[key]]))
    others = content["annotations"][:position] + content["annotations"][position + 1 :]
    with tempfile.TemporaryDirectory() as folder:
        whole = open_index(write(Path(folder) / "a.json", content | {"annotations": others}))
        index = open_index(write(Path(folder) / "b.json", content | {"annotations": [*others, wrong]}))
        assert len(index.boxes) - len(whole.boxes) in (0, 1)
        assert {tuple(box) for box in whole.boxes.tolist()} <= {tuple(box) for box in index.boxes.tolist()}
        assert len(index) == len(whole)


def test_numbers_written_as_text_are_read(tmp_path: Path) -> None:
    content = json.loads(json.dumps(GOOD).replace('"category_id": 1', '"category_id": "1"').replace(": 100", ': "100"'))
    index = open_index(write(tmp_path / "a.json", content))
    (reported,) = (problem for problem in index.problems if problem.kind == "text-for-number")
    assert reported.count == 3
    assert (len(index.boxes), index.original_size[0].tolist()) == (2, [100, 200])


def test_a_few_normalized_boxes_are_dropped(tmp_path: Path) -> None:
    normalized = [box(n, 1, 1, [0.1 * n, 0.2, 0.3, 0.4]) for n in range(3)]
    index = open_index(write(tmp_path / "a.json", broken(annotations=[*GOOD["annotations"], *normalized])))
    (reported,) = (problem for problem in index.problems if problem.kind == "not-in-pixels")
    assert (reported.count, reported.examples[0]) == (3, "1.jpg, annotation 0: [0, 0.2, 0.3, 0.6]")


def test_boxes_that_are_fractions_are_read_as_such(tmp_path: Path) -> None:
    fractions = [box(n, 1, 1, [0.1 * n, 0.2, 0.3, 0.4]) for n in range(3)]
    index = open_index(write(tmp_path / "a.json", broken(annotations=fractions)))
    height, width = index.original_size[0].tolist()
    expected = [[0.1 * n * width, 0.2 * height, (0.1 * n + 0.3) * width, 0.6 * height] for n in range(3)]
    assert index.boxes.tolist() == [pytest.approx(xyxy) for xyxy in expected]
    assert "a.json: boxes are within 0 … 1: fractions of image width and height" in index.notes
    for image in (content := broken(annotations=fractions))["images"]:
        del image["width"], image["height"]  # its header has them
        save_images(tmp_path / image["file_name"])
    assert open_index(write(tmp_path / "b.json", content)).boxes.tolist() == [pytest.approx(xyxy) for xyxy in expected]


@pytest.mark.parametrize("proof", ["sizes", "polygons"])
def test_boxes_that_are_corners_are_read_as_such(tmp_path: Path, proof: str) -> None:
    corners = [[60, 40, 180, 95], [10, 5, 40, 60], [80, 10, 199, 90], [30, 20, 90, 80]]
    right = 200 if proof == "sizes" else 2000
    images = [{"id": 1, "file_name": "1.jpg", "width": right, "height": right // 2}]
    annotations = [box(n, 1, 1, xyxy) for n, xyxy in enumerate(corners)]
    for annotation, (x1, y1, x2, y2) in zip(annotations if proof == "polygons" else (), corners, strict=False):
        annotation["segmentation"] = [[x1, y1, x2, y1, x2, y2], [x1, y1, x1, y2, x2, y2]]
    file = write(tmp_path / "a.json", broken(images=images, annotations=annotations))
    index = open_index(file)
    assert index.boxes.tolist() == corners
    assert any("a.json: bbox are corners (x1, y1, x2, y2)" in note for note in index.notes)
    annotations[0]["segmentation"] = [[60, 40, 240, 40, 240, 135]]  # the box around it is x, y, width, height
    if proof == "polygons":
        index = open_index(write(tmp_path / "b.json", broken(images=images, annotations=annotations)))
        assert index.boxes.tolist()[0] == [60, 40, 240, 135]


def test_images_of_lvis_are_named_by_their_url(tmp_path: Path) -> None:
    images = [
        {"id": n, "coco_url": f"http://images.cocodataset.org/{split}2017/{n}.jpg", "width": 200, "height": 100}
        for n, split in enumerate(("train", "val"), 1)
    ]
    for image in images:
        save_images(tmp_path / image["coco_url"].partition(".org/")[2])
    annotations = [box(n, n, 1, [10, 20, 50, 30]) for n in (1, 2)]
    write(tmp_path / "annotations" / "lvis_v1_train.json", broken(images=images, annotations=annotations))
    index = open_index(tmp_path)
    assert [index.path(n) for n in range(2)] == [tmp_path / "train2017" / "1.jpg", tmp_path / "val2017" / "2.jpg"]
    assert require_images(index) == []
    assert [problem for problem in index.problems if problem.is_bad_image] == []


def test_images_of_objects365_are_found_without_the_first_folders_of_their_names(tmp_path: Path) -> None:
    names = [f"images/v{n}/patch{n}/objects365_v{n}_0000{n}.jpg" for n in (1, 2)]
    save_images(*(tmp_path / "train" / name.split("/", 2)[-1] for name in names))
    images = [{"id": n, "file_name": name, "width": 200, "height": 100} for n, name in enumerate(names, 1)]
    annotations = [box(n, n, 1, [10, 20, 50, 30]) for n in (1, 2)]
    write(tmp_path / "annotations" / "zhiyuan_objv2_train.json", broken(images=images, annotations=annotations))
    index = open_index(tmp_path)
    assert require_images(index) == []
    assert any("the first 2 folders in its file names are ignored" in note for note in index.notes)


@property_test(coco_files(), st.data(), few=5, many=100)
def test_duplicate_boxes_are_dropped(content: Content, data: st.DataObject) -> None:
    copies = data.draw(st.lists(st.sampled_from(content["annotations"]), max_size=6))
    with tempfile.TemporaryDirectory() as folder:
        whole = open_index(write(Path(folder) / "a.json", content))
        index = open_index(write(Path(folder) / "b.json", content | {"annotations": content["annotations"] + copies}))
        assert index.boxes.tolist() == whole.boxes.tolist()
        assert index.labels.tolist() == whole.labels.tolist()
        assert sum(p.count for p in index.problems if p.kind == "duplicate-box") == len(copies)


def test_a_split_folder_without_annotations(tmp_path: Path) -> None:
    write(tmp_path / "train/_annotations.coco.json", GOOD)
    (tmp_path / "valid").mkdir()
    (tmp_path / "valid" / "a.jpg").touch()
    with pytest.raises(DataError, match="val split is empty"):
        open_index(tmp_path)


def test_a_test_split_without_images_is_left_out(tmp_path: Path) -> None:
    empty = dataset([], [])
    for split in ("train", "valid"):
        write(tmp_path / split / "_annotations.coco.json", GOOD)
    write(tmp_path / "test/_annotations.coco.json", empty)
    index = open_index(tmp_path)
    assert index.splits == ("train", "val")
    assert [p.examples for p in index.problems if p.kind == "split-without-boxes"] == [
        ("test/_annotations.coco.json: no images",)
    ]
    write(tmp_path / "valid/_annotations.coco.json", empty)
    with pytest.raises(DataError, match="lists no images") as raised:
        open_index(tmp_path)
    assert "valid" in str(raised.value)
    with pytest.raises(DataError, match="lists no images"):
        open_index(tmp_path / "test/_annotations.coco.json")


def test_two_files_for_one_split(tmp_path: Path) -> None:
    """Names of other entries may be anything."""
    content = json.loads(json.dumps(GOOD))
    content["annotations"][0] |= {"name": 5, "file_name": []}
    content["categories"][0]["file_name"] = 1
    write(tmp_path / "annotations/instances_train2014.json", content)
    file = write(tmp_path / "annotations/instances_train2017.json", GOOD)
    for text in (file.read_text(), file.read_text()[:-20]):
        file.write_text(text)
        with pytest.raises(DataError, match="2 files could be the annotations of the train split") as raised:
            open_index(tmp_path)
        assert raised.value.choices == ("instances_train2014.json", "instances_train2017.json")


def test_files_of_splits_are_preferred_to_a_file_of_all(tmp_path: Path) -> None:
    for name in ("all", "train", "val"):
        write(tmp_path / f"annotations/{name}.json", GOOD)
    index = open_index(tmp_path)
    assert (len(index), index.splits) == (4, ("train", "val"))
    assert any("not read: all.json" in note for note in index.notes)


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode())
    assert len(open_index(tmp_path)) == 2


def test_other_json_files_are_ignored(tmp_path: Path) -> None:
    write(tmp_path / "package.json", {"name": "x", "version": "1"})
    write(tmp_path / "instances.json", GOOD)
    assert len(open_index(tmp_path)) == 2
