"""Several formats in one folder, a file as a data set, and the selection of classes."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from PIL import Image

from stoker.config.settings import from_fields
from stoker.data.formats.finder import FORMATS
from stoker.data.index import Index, missing_images, open_index, require_images
from stoker.training.start import resolve_run
from stoker_watch.cli.app import app
from stoker_watch.errors import DataError, UsageError
from tests.drawn import draw
from tests.trainer.data.examples import property_test

BOX = (4, 2, 20, 10)


def make_image(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (40, 20)).save(path)


def coco(root: Path, name: str = "boxes.json") -> None:
    content = {
        "images": [{"id": 1, "file_name": "a.jpg", "width": 40, "height": 20}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [4, 2, 16, 8]}],
        "categories": [{"id": 1, "name": "cat"}],
    }
    (root / name).write_text(json.dumps(content))


def voc(root: Path) -> None:
    box = "".join(f"<{tag}>{value}</{tag}>" for tag, value in zip(("xmin", "ymin", "xmax", "ymax"), BOX, strict=True))
    (root / "Annotations").mkdir(exist_ok=True)
    (root / "Annotations" / "a.xml").write_text(
        f"<annotation><object><name>cat</name><bndbox>{box}</bndbox></object></annotation>"
    )


def yolo(root: Path) -> None:
    (root / "labels").mkdir(exist_ok=True)
    (root / "labels" / "a.txt").write_text("0 0.3 0.3 0.4 0.4\n")
    (root / "data.yaml").write_text("train: images\nnames: [cat]\n")


def csv(root: Path) -> None:
    (root / "boxes.csv").write_text(f"filename,class,xmin,ymin,xmax,ymax\na.jpg,cat,{','.join(map(str, BOX))}\n")


WRITERS = {"coco": coco, "voc": voc, "yolo": yolo, "csv": csv}


@property_test(st.sets(st.sampled_from(sorted(WRITERS)), min_size=1), few=4, many=15)
def test_the_preferred_format_is_read_and_the_others_are_noted(
    tmp_path_factory: pytest.TempPathFactory, formats: set[str]
) -> None:
    root = tmp_path_factory.mktemp("set")
    make_image(root / "images" / "a.jpg")
    for name in formats:
        WRITERS[name](root)
    index = open_index(root)
    preferred = min(formats, key=list(FORMATS).index)
    assert index.format == preferred
    for name in formats - {preferred}:
        assert any(f"--format {name} reads the other" in note for note in index.notes)
    for name in formats:
        other = open_index(root, format=name)
        assert (other.format, other.class_names) == (name, ("cat",))
        assert other.boxes.tolist() == [pytest.approx(BOX)]
    assert open_index(root.parent / root.name).format == preferred


def test_a_broken_format_does_not_hide_a_preferred_one(tmp_path: Path) -> None:
    make_image(tmp_path / "images" / "a.jpg")
    coco(tmp_path)
    (tmp_path / "data.yaml").write_text("train: images\nnames: [cat\n")
    index = open_index(tmp_path)
    assert index.format == "coco"
    assert any("not read: annotations in the format 'yolo'" in note for note in index.notes)
    with pytest.raises(DataError, match="not valid YAML"):
        open_index(tmp_path, format="yolo")


def test_a_table_without_images_is_read_if_there_is_nothing_else(tmp_path: Path) -> None:
    csv(tmp_path)
    assert [path.name for path in (tmp_path).iterdir()] == ["boxes.csv"]
    index = open_index(tmp_path)
    assert index.format == "csv"
    assert len(index) == 1


def test_a_data_set_below_is_preferred_to_a_table_without_its_images(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    make_image(tmp_path / "inner" / "images" / "a.jpg")
    voc(tmp_path / "inner")
    csv(tmp_path)
    index = open_index(tmp_path)
    assert index.format == "voc"
    assert any("not read: CSV (boxes.csv)" in note and "--format csv" in note for note in index.notes)
    other = open_index(tmp_path, format="csv")
    assert other.path(0) == tmp_path / "inner" / "images" / "a.jpg"  # found two folders down
    make_image(tmp_path / "a.jpg")
    assert open_index(tmp_path).format == "csv"


@pytest.mark.parametrize(("name", "format"), [("boxes.json", "coco"), ("data.yaml", "yolo"), ("boxes.csv", "csv")])
def test_a_file_is_a_data_set(tmp_path: Path, name: str, format: str) -> None:
    make_image(tmp_path / "images" / "a.jpg")
    for write in WRITERS.values():
        write(tmp_path)
    assert open_index(tmp_path / name).format == open_index(tmp_path / name, format=format).format == format
    with pytest.raises(DataError, match="in the format 'voc'"):
        open_index(tmp_path / name, format="voc")


def test_the_error_names_all_formats(tmp_path: Path) -> None:
    with pytest.raises(DataError) as raised:
        open_index(tmp_path)
    for word in ("COCO JSON", "Pascal VOC", "YOLO", "TFRecord", "CSV", "the folder is empty"):
        assert word in str(raised.value)


def boxes_of(index: Index, name: str) -> list[list[float]]:
    return index.boxes[index.labels == index.class_names.index(name)].tolist()


@property_test(st.lists(st.sampled_from(["red", "green", "blue"]), min_size=1, unique=True), few=4, many=15)
def test_classes_are_the_selected_ones_in_their_order(drawn: Path, classes: list[str]) -> None:
    everything, index = open_index(drawn), open_index(drawn, classes=classes)
    assert index.class_names == tuple(classes)
    assert index.category_ids == tuple({"red": 1, "green": 2, "blue": 3}[name] for name in classes)
    assert len(index) == len(everything)  # images stay, as background
    for name in classes:
        assert boxes_of(index, name) == boxes_of(everything, name)
    assert len(index.boxes) == sum(len(boxes_of(everything, name)) for name in classes)
    assert any(f"only the classes {', '.join(classes)}: {len(index.boxes):,} of" in note for note in index.notes)
    assert np.array_equal(open_index(drawn).labels, everything.labels)  # the cache keeps them apart


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("drawn") / "shapes")


@pytest.mark.parametrize(
    ("classes", "fragment"),
    [(("rad",), "did you mean 'red'?"), (("lorry",), "valid:  red, green, blue"), (("red", "red"), "named twice")],
)
def test_invalid_classes(drawn: Path, classes: tuple[str, ...], fragment: str) -> None:
    with pytest.raises(UsageError) as raised:
        open_index(drawn, classes=classes)
    assert fragment in str(raised.value)


def test_training_takes_the_classes_of_the_settings(drawn: Path) -> None:
    defaults = {
        "data": str(drawn),
        "model": "retinanet_tiny_fpn",
        "image_size": (64, 64),
        "batch_size": 4,
        "max_duration": "2",
    }
    resolved = resolve_run(from_fields({**defaults, "classes": ("blue", "red")}), None)
    assert resolved.index.class_names == ("blue", "red")
    resolved = resolve_run(from_fields(defaults), None)
    assert resolved.index.class_names == ("red", "green", "blue")
    assert resolved.config.data.classes == ()
    assert resolved.reasons["classes"] == "every class of the data set"


def test_the_flag_takes_several_classes() -> None:
    _, bound, _ = app.parse_args(["train", "images", "--classes", "red", "sky blue", "--format", "yolo"])
    data = bound.arguments["config"].data
    assert (data.classes, data.format, bound.arguments["data"]) == (("red", "sky blue"), "yolo", "images")


def test_splits_that_are_data_sets_of_their_own(tmp_path: Path) -> None:
    """COCO JSON in annotations/ inside train/ and valid/, as some exports have it."""
    drawn_here = draw(tmp_path / "set", train=4, val=2, side=32)
    for split in ("train", "valid"):
        (drawn_here / split / "annotations").mkdir()
        file = drawn_here / split / "_annotations.coco.json"
        file.rename(drawn_here / split / "annotations" / "instances.json")
    index = open_index(drawn_here)
    assert (index.root, index.format) == (drawn_here, "coco")
    assert {split: len(index.image_indices(split)) for split in index.splits} == {"train": 4, "val": 2}
    assert missing_images(index) == []
    assert index.notes[0].startswith("COCO JSON in annotations/ per split folder")
    (drawn_here / "valid").rename(drawn_here / "more")
    with pytest.raises(DataError, match="contains 2 data sets"):
        open_index(drawn_here)


def test_splits_of_different_formats_are_not_one_data_set(tmp_path: Path) -> None:
    for split, name, text in (("train", "boxes.csv", "filename,class,xmin,ymin,xmax,ymax\na.jpg,cat,1,2,30,40\n"),
                              ("val", "annotations/a.json", '{"images": [], "annotations": []}')):  # fmt: skip
        (tmp_path / split / name).parent.mkdir(parents=True)
        (tmp_path / split / name).write_text(text)
        (tmp_path / split / "a.jpg").touch()
    with pytest.raises(DataError, match=r"csv|CSV|no annotations"):
        open_index(tmp_path)


def test_images_of_coco_json_in_a_folder_of_any_name(tmp_path: Path) -> None:
    root = draw(tmp_path / "set", train=3, val=1, side=32) / "train"
    (root / "größe 1" / "deep").mkdir(parents=True)
    for image in root.glob("*.jpg"):
        image.rename(root / "größe 1" / "deep" / image.name)
    index = open_index(root)
    assert missing_images(index) == []
    assert "_annotations.coco.json: the images are in größe 1/deep/" in index.notes


def error_message(folder: Path) -> str:
    with pytest.raises(DataError) as raised:
        open_index(folder)
    return str(raised.value)


def test_the_error_describes_a_folder_without_annotations(tmp_path: Path) -> None:
    assert "why:    the folder is empty;" in error_message(tmp_path)
    for n in range(12):
        (tmp_path / f"{n}.jpg").touch()
    assert "it contains only 12 images;" in error_message(tmp_path)
    (tmp_path / "boxes.csv").write_bytes("filename;class;xmin;ymin;xmax;ymax\na.jpg;Bär;1;2;3;4\n".encode("cp1252"))
    assert "it contains boxes.csv, 12 images; expected" in error_message(tmp_path)
    assert "A table is not UTF-8" in error_message(tmp_path / "boxes.csv")
    (tmp_path / "boxes.csv").write_text("Datei;Klasse;links;oben\n")
    assert "the columns Datei, Klasse, links, oben: none of boxes" in error_message(tmp_path / "boxes.csv")


def test_an_archive_is_to_be_unpacked(tmp_path: Path) -> None:
    (tmp_path / "export.zip").touch()
    assert "fix:    unpack it" in error_message(tmp_path / "export.zip")
    (tmp_path / "a.xml").touch()
    assert "*.json" in (message := error_message(tmp_path / "a.xml"))
    assert "unpack" not in message


def xml(path: Path, name: str = "cat") -> None:
    size = "<size><width>40</width><height>20</height></size>"
    box = "<xmin>4</xmin><ymin>2</ymin><xmax>20</xmax><ymax>10</ymax>"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"<annotation>{size}<object><name>{name}</name><bndbox>{box}</bndbox></object></annotation>")


def test_a_folder_without_images_is_no_split(tmp_path: Path) -> None:
    for split in ("train", "test"):
        make_image(tmp_path / split / "a.jpg")
        xml(tmp_path / split / "a.xml")
    (tmp_path / "training").mkdir()  # as in tutorials of TensorFlow
    (tmp_path / "training" / "pipeline.config").write_text("model {}")
    (tmp_path / "valid").mkdir()
    index = open_index(tmp_path)
    assert (index.splits, len(index)) == (("train", "test"), 2)
    assert "valid/ has neither images nor annotations: it is no split" in index.notes
    make_image(tmp_path / "training" / "b.jpg")
    with pytest.raises(DataError, match="Two folders are named after the train split"):
        open_index(tmp_path)


@pytest.mark.parametrize("names", [["a"], ["a", "b", "c"], ["gone"]])
def test_a_table_of_a_part_does_not_hide_complete_files(tmp_path: Path, names: list[str]) -> None:
    for name in "abc":
        make_image(tmp_path / "photos" / f"{name}.jpg")
        xml(tmp_path / "photos" / f"{name}.xml")
    rows = [f"{name}.jpg,cat,4,2,20,10" for name in names]
    (tmp_path / "boxes.csv").write_text("\n".join(["filename,class,xmin,ymin,xmax,ymax", *rows]))
    index = open_index(tmp_path)
    assert (index.format, len(index)) == ("voc", 3)
    (note,) = (note for note in index.notes if note.startswith("not read: CSV (boxes.csv): it annotates"))
    assert ("--format csv reads it" in note) == (names != ["gone"])
    assert open_index(tmp_path, format="csv").format == "csv"
    xml(tmp_path / "photos" / "other.xml")
    make_image(tmp_path / "d.jpg")
    with (tmp_path / "boxes.csv").open("a") as file:
        file.write("\nd.jpg,cat,4,2,20,10\n")  # an image that only the table has
    assert open_index(tmp_path).format == "csv"


def test_a_format_without_images_does_not_win_and_is_not_recommended(tmp_path: Path) -> None:
    make_image(tmp_path / "images" / "a.jpg")
    yolo(tmp_path)
    content = {
        "images": [{"id": n, "file_name": f"old-{n}.jpg", "width": 40, "height": 20} for n in (1, 2)],
        "annotations": [{"id": n, "image_id": n, "category_id": 1, "bbox": [4, 2, 16, 8]} for n in (1, 2)],
        "categories": [{"id": 1, "name": "cat"}],
    }
    (tmp_path / "boxes.json").write_text(json.dumps(content))
    index = open_index(tmp_path)
    assert (index.format, require_images(index)) == ("yolo", [])
    assert not any("--format coco" in note for note in index.notes)
    assert "more-boxes-in-another-format" not in {problem.kind for problem in index.problems}
    (tmp_path / "images" / "a.jpg").unlink()
    with pytest.raises(DataError):
        require_images(open_index(tmp_path))


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12345\n"


@pytest.mark.parametrize(
    "name", ["boxes.json", "boxes.csv", "data/train.record", "set.parquet", "labels/a.txt", "train-000000.tar"]
)
def test_a_pointer_of_git_lfs_is_named(tmp_path: Path, name: str) -> None:
    make_image(tmp_path / "images" / "a.jpg")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(POINTER)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(DataError, match="Git LFS") as raised:
            open_index(path)
        assert "git lfs pull" in str(raised.value)
        assert str(raised.value.location) == str(tmp_path / name)


def test_a_pointer_next_to_files_that_are_read_is_noted(tmp_path: Path) -> None:
    make_image(tmp_path / "images" / "a.jpg")
    coco(tmp_path)
    (tmp_path / "more.json").write_text(POINTER)
    assert any("more.json is a pointer of Git LFS" in note for note in open_index(tmp_path).notes)
