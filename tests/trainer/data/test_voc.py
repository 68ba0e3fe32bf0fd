"""Pascal VOC: every layout is detected, the correct image is used, errors are reported with their location."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from stoker.data.index import missing_images, open_index, require_images
from stoker_watch.errors import DataError

SIZE = "<size><width>200</width><height>100</height></size>"


def thing(name: str = "cat", corners: Sequence[object] = (10, 20, 40, 60), more: str = "") -> str:
    box = "".join(f"<{t}>{v}</{t}>" for t, v in zip(("xmin", "ymin", "xmax", "ymax"), corners, strict=True))
    return f"<object><name>{name}</name>{more}<bndbox>{box}</bndbox></object>"


def annotate(folder: Path, stem: str, *content: str, filename: str | None = None, size: str = SIZE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    body = "".join(content or (thing(),))
    file = folder / f"{stem}.xml"
    filename_text = f"{stem}.jpg" if filename is None else filename
    file.write_text(f"<annotation><filename>{filename_text}</filename>{size}{body}</annotation>", encoding="utf-8")
    return file


def touch_images(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()


def classic(root: Path, *stems: str, **lists: Sequence[str]) -> Path:
    """Annotations/, JPEGImages/ and, where lists are given, ImageSets/Main."""
    for stem in stems:
        annotate(root / "Annotations", stem)
    touch_images(root / "JPEGImages", *(f"{stem}.jpg" for stem in stems))
    for name, lines in lists.items():
        file = root / "ImageSets" / "Main" / f"{name}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{line}\n" for line in lines))
    return root


def test_the_blood_cells_and_their_two_points(real_data: Path) -> None:
    index = open_index(real_data / "bccd" / "BCCD")
    assert index.format == "voc"
    assert index.class_names == ("Platelets", "RBC", "WBC")
    assert {split: len(index.image_indices(split)) for split in index.splits} == {"train": 205, "val": 87, "test": 72}
    assert len(index.boxes) == 4888 - 2
    (zero,) = index.problems
    assert (zero.kind, zero.count) == ("zero-size", 2)
    named = " ".join(zero.examples)
    assert "BloodImage_00338.jpg, object 13" in named
    assert "BloodImage_00343.jpg, object 4" in named
    assert require_images(index) == []
    assert open_index(real_data / "bccd").root == index.root  # also from the parent folder


def test_xml_next_to_the_images_is_preferred_to_csv(real_data: Path) -> None:
    index = open_index(real_data / "microcontroller")
    assert len(index) == 149
    assert len(index.boxes) == 177
    assert index.splits == ("train", "val", "test")
    assert any("train_labels.csv" in note for note in index.notes)
    assert require_images(index) == []


def test_the_index_has_the_content_of_the_files(tmp_path: Path) -> None:
    part = "<part><name>head</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax></bndbox></part>"
    annotate(
        tmp_path,
        "a ü",
        thing("dog", (1, 2, 200, 100), "<difficult>1</difficult>"),
        thing("cat", ("3.5", "4", "5e1", " 6 "), part),
        thing("dog", (-5, -5, 300, 300)),
    )
    annotate(tmp_path, "b", "<segmented>0</segmented>", size="<size><width>0</width></size>")
    annotate(tmp_path, "c", thing("cat"), size="")
    index = open_index(tmp_path)
    assert index.class_names == ("cat", "dog")
    assert index.offsets.tolist() == [0, 3, 3, 4]
    assert index.boxes.tolist() == [[1, 2, 200, 100], [3.5, 4, 50, 6], [-5, -5, 300, 300], [10, 20, 40, 60]]
    assert index.labels.tolist() == [1, 0, 1, 0]
    assert index.original_size.tolist() == [[100, 200], [0, 0], [0, 0]]
    assert index.area.tolist() == [199 * 98, 46.5 * 2, 305 * 305, 30 * 40]
    assert not index.crowd.any()
    assert index.path(0) == tmp_path / "a ü.jpg"


def test_image_sets(tmp_path: Path) -> None:
    root = classic(
        tmp_path, "a", "b", "c 1", "d",
        train=["b  1", "a"], val=["c 1"], trainval=["a", "b", "c 1"], test=["d.jpg"], cat_train=["d 1"],
    )  # fmt: skip
    index = open_index(root)
    names = {split: [index.path(row).stem for row in index.image_indices(split)] for split in index.splits}
    assert names == {"train": ["b", "a"], "val": ["c 1"], "test": ["d"]}


def test_trainval_alone_is_split_and_other_images_are_left_out(tmp_path: Path) -> None:
    index = open_index(classic(tmp_path, *"abcd", trainval="abc"))
    assert index.splits == ("train", "val")
    assert len(index) == 3
    assert any("no validation split" in note for note in index.notes)
    (problem,) = (problem for problem in index.problems if problem.kind == "not-in-a-split")
    assert (problem.count, problem.examples) == (1, ("JPEGImages/d.jpg",))


def test_a_test_split_without_annotations_is_left_out(tmp_path: Path) -> None:
    index = open_index(classic(tmp_path, *"ab", train="a", val="b", test="xyz"))
    assert index.splits == ("train", "val")
    assert any("test split has no annotations" in note for note in index.notes)


@pytest.mark.parametrize("inner", [("", ""), ("Annotations", "JPEGImages"), ("annotations", "images")])
def test_split_folders(tmp_path: Path, inner: tuple[str, str]) -> None:
    for split, stem in (("train", "a"), ("valid", "b"), ("test", "c")):
        annotate(tmp_path / split / inner[0], stem)
        touch_images(tmp_path / split / inner[1], f"{stem}.png")
    index = open_index(tmp_path)
    assert {split: index.path(index.image_indices(split)[0]).name for split in index.splits} == {
        "train": "a.png", "val": "b.png", "test": "c.png",
    }  # fmt: skip
    assert require_images(index) == []


def test_a_split_folder_without_annotations(tmp_path: Path) -> None:
    annotate(tmp_path / "train", "a")
    annotate(tmp_path / "train", "b")
    touch_images(tmp_path / "test", "c.png")
    assert any("test/ has no annotations" in note for note in open_index(tmp_path).notes)
    (tmp_path / "valid").mkdir()
    assert "valid/ has neither images nor annotations: it is no split" in open_index(tmp_path).notes
    touch_images(tmp_path / "valid", "d.png")
    with pytest.raises(DataError, match="val split is empty") as raised:
        open_index(tmp_path)
    assert str(tmp_path / "valid") in str(raised.value)


def test_the_image_with_the_own_stem_is_preferred_to_what_the_file_says(tmp_path: Path) -> None:
    annotate(tmp_path / "Annotations", "a", filename="b.jpg")  # wrong: b is another image
    annotate(tmp_path / "Annotations", "b", filename="C:\\x\\b.PNG")  # wrong suffix
    annotate(tmp_path / "Annotations", "c", filename="other.jpg")  # has no image of its own
    annotate(tmp_path / "Annotations", "D", filename="")  # differs in case
    annotate(tmp_path / "Annotations", "e", filename="e.png")  # two images of its stem
    annotate(tmp_path / "Annotations", "f", filename="gone.jpg")
    annotate(tmp_path / "Annotations", "h", filename="H.png")  # the stem in the same case comes first
    annotate(tmp_path / "Annotations", "g", filename="")
    touch_images(tmp_path / "JPEGImages", "a.jpg", "b.jpeg", "other.JPG", "d.jpg", "e.jpg", "e.png", "h.jpg", "H.png")
    index = open_index(tmp_path)
    names = {index.path(row).name for row in range(len(index))}
    assert names == {"a.jpg", "b.jpeg", "other.JPG", "d.jpg", "e.png", "h.jpg", "gone.jpg", "g.jpg"}
    missing = [index.path(row) for row in missing_images(index)]
    assert sorted(missing) == [tmp_path / "JPEGImages" / name for name in ("g.jpg", "gone.jpg")]


def test_a_image_that_is_added_later_is_found(tmp_path: Path) -> None:
    annotate(tmp_path / "Annotations", "a")
    annotate(tmp_path / "Annotations", "b")
    touch_images(tmp_path / "JPEGImages", "b.jpg")
    assert [open_index(tmp_path).path(row).name for row in missing_images(open_index(tmp_path))] == ["a.jpg"]
    touch_images(tmp_path / "JPEGImages", "a.png")
    assert missing_images(open_index(tmp_path)) == []


def test_bad_boxes_are_dropped_and_named(tmp_path: Path) -> None:
    corners = [(40, 20, 10, 60), ("nan", 1, 2, 3), (1, 1, "inf", 3), (7, 7, 7, 9), (200, 1, 210, 9), (1, 2, 3, 4)]
    annotate(tmp_path, "a", "<object><name>dog</name></object>", *(thing("cat", c) for c in corners))
    annotate(tmp_path, "b", thing("dog"))
    index = open_index(tmp_path)
    assert {kind.kind: kind.examples[0].partition(":")[0] for kind in index.problems} == {
        "no-box": "a.xml, object 1",
        "negative-size": "a.jpg, object 2",
        "not-a-number": "a.jpg, object 3",
        "zero-size": "a.jpg, object 5",
        "outside": "a.jpg, object 6",
        "class-not-in-split": "dog",
    }
    assert index.boxes.tolist() == [[1, 2, 3, 4], [10, 20, 40, 60]]


@pytest.mark.parametrize(
    ("text", "kind", "example"),
    [
        ("", "unreadable-annotations", "a.xml:1: not valid XML, no element found"),
        ("<annotation>\n<object>", "unreadable-annotations", "a.xml:2: not valid XML"),
        ('<?xml version="1.0" encoding="GB2312"?><annotation/>', "unreadable-annotations", "convert it to UTF-8"),
        ("<project/>", "foreign-file", "a.xml: its root is <project>"),
        (f"<annotation>{thing('cat')}{thing('')}</annotation>", "no-class", "a.xml, object 2"),
        (f"<annotation>{thing('cat', (1, 'x', 3, 4))}</annotation>", "malformed-box", "object 1: <ymin> is 'x', not a"),
        (
            "<annotation><object><name>cat</name><bndbox><xmin>1</xmin></bndbox></object></annotation>",
            "malformed-box",
            "a.xml, object 1: there is no <ymin>",
        ),
    ],
)
def test_errors_are_reported_and_the_rest_is_read(tmp_path: Path, text: str, kind: str, example: str) -> None:
    (tmp_path / "a.xml").write_text(text)
    for stem in "bc":
        annotate(tmp_path, stem)
    index = open_index(tmp_path)
    assert len(index) == (3 if kind == "no-class" else 2)  # it has another box
    (reported,) = (problem for problem in index.problems if problem.kind == kind)
    assert example in reported.examples[0]
    assert index.boxes[-2:].tolist() == [[10, 20, 40, 60]] * 2


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("", ["No annotation file can be read", "a.xml:1: not valid XML", "copy the data set again"]),
        ("<project/>", ["No annotation file can be read", "<project>"]),
        ("<annotation></annotation>", ["training split has no boxes"]),
        ("<annotation><object/></annotation>", ["Every image lost all of its boxes", "without a class"]),
    ],
)
def test_nothing_that_can_be_read(tmp_path: Path, text: str, fragments: list[str]) -> None:
    (tmp_path / "a.xml").write_text(text)
    with pytest.raises(DataError) as raised:
        open_index(tmp_path)
    for fragment in fragments:
        assert fragment in str(raised.value)
    assert raised.value.fix


def test_two_annotations_of_one_image(tmp_path: Path) -> None:
    files = {"a": None, "copy": "a.jpg", "x": "b.jpg", "y": "b.jpg", "c": None, "before-d": "d.jpg", "d": None}
    for stem, filename_text in files.items():
        annotate(tmp_path, stem, *([thing("dog")] if stem in ("y", "before-d") else []), filename=filename_text)
    touch_images(tmp_path, "a.jpg", "b.jpg", "c.jpg", "d.jpg")
    index = open_index(tmp_path)
    assert [index.path(row).name for row in range(len(index))] == ["a.jpg", "d.jpg", "c.jpg"]
    assert index.class_names == ("cat",)
    reported = {problem.kind: problem.examples for problem in index.problems}
    assert reported["copied-entry"] == ("copy.xml: a.jpg, as a.xml",)
    assert reported["listed-twice"] == ("b.jpg: x.xml, y.xml",)
    assert reported["label-without-image"] == ("before-d.xml: about d.jpg, as d.xml is",)


def test_an_empty_list(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="val split is empty") as raised:
        open_index(classic(tmp_path, "a", train="a", val=["", "  "]))
    assert "val.txt" in str(raised.value)


def test_an_empty_list_of_a_test_split(tmp_path: Path) -> None:
    index = open_index(classic(tmp_path, *"ab", train="a", val="b", test=[" "]))
    assert index.splits == ("train", "val")
    assert ("ImageSets/Main/test.txt: no images",) in [problem.examples for problem in index.problems]


def test_lines_of_a_list_without_an_annotation(tmp_path: Path) -> None:
    index = open_index(classic(tmp_path, *"ab", train=["a", "gone", "b", "a"]))
    assert len(index) == 2
    reported = {problem.kind: problem.examples for problem in index.problems}
    assert reported["no-annotation-file"] == ("ImageSets/Main/train.txt:2: 'gone'",)
    assert reported["copied-entry"] == ("ImageSets/Main/train.txt:4: a",)


def test_a_list_that_names_no_annotation(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No entry of the train split") as raised:
        open_index(classic(tmp_path, "a", train=["", "gone"]))
    assert "train.txt:2: 'gone'" in str(raised.value)


@pytest.mark.parametrize("folder", ["annotations", "Annotation", "xml", "labels"])
def test_folders_that_annotations_are_in(tmp_path: Path, folder: str) -> None:
    for stem in "ab":
        annotate(tmp_path / folder, stem)
    touch_images(tmp_path / "images", "a.jpg", "b.jpg")
    index = open_index(tmp_path)
    assert (index.format, index.root, missing_images(index)) == ("voc", tmp_path, [])


def test_annotations_per_split_with_images_per_split(tmp_path: Path) -> None:
    for split, other in (("train", "train"), ("val", "validation")):
        annotate(tmp_path / "annotations" / split, f"{split} one", filename="elsewhere.jpg")
        touch_images(tmp_path / "images" / other, f"{split} one.jpg")
    index = open_index(tmp_path)
    assert {split: [index.path(row) for row in index.image_indices(split)] for split in index.splits} == {
        "train": [tmp_path / "images" / "train" / "train one.jpg"],
        "val": [tmp_path / "images" / "validation" / "val one.jpg"],
    }


def test_folders_inside_annotations_are_those_inside_the_images(tmp_path: Path) -> None:
    for inside in ("day", "night"):
        annotate(tmp_path / "Annotations" / inside, "1", thing(inside))
        touch_images(tmp_path / "JPEGImages" / inside, "1.jpg")
    annotate(tmp_path / "Annotations", "1", thing("top"))
    touch_images(tmp_path / "JPEGImages", "1.jpg")
    lists = tmp_path / "ImageSets" / "Main"
    index = open_index(tmp_path)
    classes = {
        index.path(row).relative_to(tmp_path / "JPEGImages").as_posix(): index.class_names[index.labels[row]]
        for row in range(len(index))
    }
    assert classes == {"1.jpg": "top", "day/1.jpg": "day", "night/1.jpg": "night"}
    lists.mkdir(parents=True)
    (lists / "train.txt").write_text("day/1\n")
    (lists / "val.txt").write_text("night/1.jpg\n")
    index = open_index(tmp_path)
    names = {split: [index.path(row).parent.name for row in index.image_indices(split)] for split in index.splits}
    assert names == {"train": ["day"], "val": ["night"]}


def test_a_changed_file_in_a_folder_inside_is_read_again(tmp_path: Path) -> None:
    for stem in "ab":
        annotate(tmp_path / "Annotations" / "task", stem)
    touch_images(tmp_path / "JPEGImages" / "task", "a.jpg", "b.jpg")
    assert open_index(tmp_path).class_names == ("cat",)
    annotate(tmp_path / "Annotations" / "task", "a", thing("dog"), thing("cat"))
    assert open_index(tmp_path).class_names == ("cat", "dog")


def test_images_in_a_folder_of_any_name_are_found_and_noted(tmp_path: Path) -> None:
    for stem in "ab":
        annotate(tmp_path / "Annotations", stem)
    touch_images(tmp_path / "fotos" / "2024", "a.jpg", "b.jpg")
    touch_images(tmp_path / "other", "z.jpg")
    index = open_index(tmp_path)
    assert missing_images(index) == []
    assert index.path(0) == tmp_path / "fotos" / "2024" / "a.jpg"
    assert "the images of Annotations/ are in fotos/2024" in index.notes
