"""CSV tables: columns in any order, with or without header, pixels or normalized; a bad row affects only itself."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from PIL import Image

from stoker.data.formats.csv import detect_csv_layout
from stoker.data.index import Index, open_index, require_images
from stoker.data.validation.check import check_dataset
from stoker_watch.errors import DataError
from tests.trainer.data.examples import property_test

HEADER = "filename,class,xmin,ymin,xmax,ymax"


def make_image(path: Path, width: int = 40, height: int = 20) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height)).save(path)
    return path


def table(path: Path, *lines: str, encoding: str = "utf-8") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding=encoding)
    return path


def kinds(index: Index) -> dict[str, str]:
    return {problem.kind: " ".join(problem.examples) for problem in index.problems}


def boxes_with_names(index: Index) -> list[tuple[str, str, list[float]]]:
    """(image, class, box) of every box."""
    image_indices = np.repeat(np.arange(len(index)), np.diff(index.offsets))
    return [
        (index.path(image_index).name, index.class_names[label], box)
        for image_index, label, box in zip(image_indices, index.labels, index.boxes.tolist(), strict=True)
    ]


def test_the_blood_cells(real_data: Path) -> None:
    index = open_index(real_data / "blood_png")
    assert index.format == "csv"
    assert index.class_names == ("rbc", "wbc")
    assert (len(index), len(index.boxes)) == (100, 2339)
    assert set(map(tuple, index.original_size.tolist())) == {(256, 256)}
    assert index.boxes.max() > 200
    assert any("within 0 … 1" in note for note in index.notes)
    assert require_images(index) == []


def test_the_microcontrollers_have_the_same_boxes_in_both_formats(real_data: Path) -> None:
    def boxes(format: str) -> list[tuple[str, str, list[float]]]:
        index = open_index(real_data / "microcontroller", format=format)
        assert index.format == format
        return sorted(boxes_with_names(index))

    assert len(boxes("csv")) == 177
    assert boxes("csv") == boxes("voc")


def test_a_table_without_images_gives_way_to_a_data_set_below(real_data: Path) -> None:
    index = open_index(real_data / "bccd")
    assert index.format == "voc"
    assert any("not read: CSV (test.csv)" in note and "--format csv" in note for note in index.notes)
    asked = open_index(real_data / "bccd", format="csv")  # its images are found one folder further down
    assert require_images(asked) == []
    assert sorted(boxes_with_names(asked)) == sorted(boxes_with_names(index))


@pytest.mark.parametrize(
    "lines",
    [
        (HEADER, "a.jpg,cat,4,2,20,10", "b.jpg,dog,1,1,5,5"),
        ("CELL TYPE,Ymax,y_min,X-Max,xMin,FileName", "cat,10,2,20,4,a.jpg", "dog,5,1,5,1,b.jpg"),
        ("image_path;label;x1;y1;x2;y2", "a.jpg;cat;4,0;2,0;20,0;10,0", "b.jpg;dog;1;1;5;5"),
        ("image\tcategory\tleft\ttop\tright\tbottom", "a.jpg\tcat\t4\t2\t20\t10", "b.jpg\tdog\t1\t1\t5\t5"),
        ("img,name,x,y,w,h", "a.jpg,cat,4,2,16,8", "b.jpg,dog,1,1,4,4"),
        ("img,name,xmin,ymin,width,height", "a.jpg,cat,4,2,16,8", "b.jpg,dog,1,1,4,4"),
        ("filename,label,cx,cy,w,h", "a.jpg,cat,12,6,16,8", "b.jpg,dog,3,3,4,4"),
        ("filename,width,height,class,xmin,ymin,xmax,ymax", "a.jpg,40,20,cat,4,2,20,10", "b.jpg,40,20,dog,1,1,5,5"),
        ("image_id,width,height,bbox,label", 'a,40,20,"[4.0, 2.0, 16.0, 8.0]",cat', 'b,40,20,"[1, 1, 4, 4]",dog'),
        ("name,class,x0,y0,x1,y1", "a.jpg,cat,4,2,20,10", "b.jpg,dog,1,1,5,5"),
        ("file,label,bbox_x,bbox_y,bbox_width,bbox_height,w", "a.jpg,cat,4,2,16,8,9", "b.jpg,dog,1,1,4,4,9"),
        ("file,kind,x1,y1,x2,y2,score", "a.jpg,cat,4,2,20,10,0.5", "b.jpg,dog,1,1,5,5,1"),
        (HEADER, "a.jpg,cat,0.1,0.1,0.5,0.5", "b.jpg,dog,0.025,0.05,0.125,0.25"),
        ("a.jpg,4,2,20,10,cat", "b.jpg,1,1,5,5,dog"),
        ("TRAIN,gs://bucket/a.jpg,cat,0.1,0.1,,,0.5,0.5,,", "UNASSIGNED,gs://bucket/b.jpg,dog,.025,.05,,,.125,.25,,"),
        ('"filename","class","xmin","ymin","xmax","ymax"', '"a.jpg","cat","4","2","20","10"', "b.jpg,dog,1,1,5,5"),
        (HEADER, 'a.jpg,cat,"0,1","0,1","0,5","0,5"', 'b.jpg,dog,"0,025","0,05","0,125","0,25"'),
        (HEADER.replace(",", ";"), "a.jpg;cat;0,1;0,1;0,5;0,5", "b.jpg;dog;0,025;0,05;0,125;0,25"),
        ("image;label;bbox", 'a.jpg;cat;"[4,0; 2,0; 16,0; 8,0]"', "b.jpg;dog;1,0 1,0 4,0 4,0"),
        (HEADER, "C:\\images\\a.jpg,cat,4,2,20,10", "../images/b.jpg,dog,1,1,5,5"),
        (HEADER, "images/a.jpg,cat,4,2,20,10", "images/B.JPG,dog,1,1,5,5"),
        ("id,photo,kind,x1,y1,x2,y2", "1,a.jpg,cat,4,2,20,10", "2,b.jpg,dog,1,1,5,5"),
        ("what,snapshot,x1,y1,x2,y2", "cat,a.jpg,4,2,20,10", "dog,b.jpg,1,1,5,5"),
        ("imageKey,species,bbox,source", 'a,cat,"[4, 2, 16, 8]",farm 1', 'b,dog,"[1, 1, 4, 4]",farm 2'),
        ("image,species,x1,y1,x2,y2,camera_name", "a.jpg,cat,4,2,20,10,north", "b.jpg,dog,1,1,5,5,south"),
        ("image,class,positions", 'a.jpg,cat,"4 2 16 8"', 'b.jpg,dog,"1 1 4 4"'),
        ("a.jpg,4,2,20,10,cat,40,20", "b.jpg,1,1,5,5,dog,40,20"),
        ("a.jpg,cat,0.9,4,2,20,10", "b.jpg,dog,30,1,1,5,5"),
    ],
)
def test_every_way_to_write_a_table(tmp_path: Path, lines: tuple[str, ...]) -> None:
    make_image(tmp_path / "images" / "a.jpg")
    make_image(tmp_path / "images" / "b.jpg")
    table(tmp_path / "boxes.csv", *lines)
    index = open_index(tmp_path)
    (first, second) = sorted(boxes_with_names(index))
    assert first == ("a.jpg", "cat", pytest.approx([4, 2, 20, 10]))
    assert second == ("b.jpg", "dog", pytest.approx([1, 1, 5, 5]))
    assert index.original_size.tolist() == [[20, 40], [20, 40]]
    assert require_images(index) == []


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_what_excel_writes(tmp_path: Path, encoding: str) -> None:
    make_image(tmp_path / "ä.jpg")
    table(tmp_path / "a.csv", "filename;class;xmin;ymin;xmax;ymax\r", "ä.jpg;Möwe;4;2;20;10\r", encoding=encoding)
    assert boxes_with_names(open_index(tmp_path)) == [("ä.jpg", "Möwe", [4, 2, 20, 10])]


@property_test(st.permutations(range(8)), st.sampled_from(",;\t|"), st.booleans(), few=10, many=100)
def test_the_order_of_columns_does_not_matter(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], delimiter: str, upper: bool
) -> None:
    names = [*HEADER.split(","), "width", "height"]
    header = delimiter.join(names[number] for number in order)
    path = table(tmp_path_factory.getbasetemp() / "order.csv", header.upper() if upper else header)
    layout = detect_csv_layout(path)
    assert layout is not None
    columns = (layout.file_column, layout.label_column, *layout.box_columns, *layout.size_columns)
    expected = ["filename", "class", "xmin", "ymin", "xmax", "ymax", "height", "width"]
    assert [names[order[column]] for column in columns] == expected
    assert layout.delimiter == delimiter


@pytest.mark.parametrize(
    ("row", "kind", "example"),
    [
        ("a.jpg,cat,4,2,wide,10", "malformed-row", "boxes.csv:3: 'a.jpg,cat,4,2,wide,10'"),
        ("a.jpg,cat,4,2", "malformed-row", "too few columns"),
        (",cat,4,2,20,10", "malformed-row", "no image"),
        ("a.jpg,cat,4,,20,10", "malformed-row", "boxes.csv:3"),
        ("a.jpg,,4,2,20,10", "no-class", "boxes.csv:3"),
        ("a.jpg,cat,,,,", "no-box", "boxes.csv:3"),
        ("a.jpg,cat,nan,2,20,10", "not-a-number", "line 3"),
        ("a.jpg,cat,20,2,4,10", "negative-size", "line 3"),
    ],
)
def test_a_bad_row_affects_only_itself(tmp_path: Path, row: str, kind: str, example: str) -> None:
    make_image(tmp_path / "a.jpg")
    table(tmp_path / "boxes.csv", HEADER, "a.jpg,cat,1,1,9,9", row, "", "a.jpg,dog,2,2,8,8")
    index = open_index(tmp_path)
    assert example in kinds(index)[kind]
    assert [box for _, _, box in boxes_with_names(index)] == [[1, 1, 9, 9], [2, 2, 8, 8]]


def test_a_row_without_box_and_class_is_background(tmp_path: Path) -> None:
    for name in "ab":
        make_image(tmp_path / f"{name}.jpg")
    table(tmp_path / "train.csv", "a.jpg,1,1,9,9,cat", "b.jpg,,,,,")
    index = open_index(tmp_path)
    assert sorted(index.path(row).name for row in range(2)) == ["a.jpg", "b.jpg"]
    assert len(index.boxes) == 1
    assert not kinds(index).keys() & {"malformed-row", "no-box", "no-class"}


def test_one_large_number_does_not_make_normalized_boxes_pixels(tmp_path: Path) -> None:
    make_image(tmp_path / "a.jpg")
    rows = [f"a.jpg,cat,0.{n},0.1,0.9,0.9" for n in range(1, 6)]
    table(tmp_path / "boxes.csv", HEADER, *rows, "a.jpg,cat,4,2,20,10")
    index = open_index(tmp_path)
    assert index.boxes[0].tolist() == pytest.approx([4, 2, 36, 18])
    assert kinds(index)["not-normalized"] == "boxes.csv:7: [4, 2, 20, 10]"


def test_normalized_boxes_are_scaled_by_the_size_in_the_header(tmp_path: Path) -> None:
    make_image(tmp_path / "a.jpg", 40, 20)
    table(tmp_path / "boxes.csv", f"{HEADER},width,height", "a.jpg,cat,0.1,0.1,0.5,0.5,4000,2000")  # a wrong size
    index = open_index(tmp_path)
    assert index.original_size.tolist() == [[20, 40]]
    assert index.boxes[0].tolist() == pytest.approx([4, 2, 20, 10])


def test_normalized_boxes_of_a_missing_image(tmp_path: Path) -> None:
    make_image(tmp_path / "a.jpg")
    table(tmp_path / "boxes.csv", HEADER, "a.jpg,cat,0.1,0.1,0.5,0.5", "gone.jpg,cat,0.1,0.1,0.5,0.5")
    (tmp_path / "val.csv").write_text((tmp_path / "boxes.csv").read_text())
    index = open_index(tmp_path / "boxes.csv", val_fraction=0.5)
    assert len(index) == 2
    assert "gone.jpg" in kinds(index)["box-of-unreadable-image"]


def test_splits_by_the_name_of_the_table(tmp_path: Path) -> None:
    for split in ("train", "test"):
        make_image(tmp_path / "images" / split / "1.jpg", *((40, 20) if split == "train" else (60, 30)))
        table(tmp_path / f"{split}_labels.csv", HEADER, "1.jpg,cat,1,1,9,9")
    make_image(tmp_path / "images" / "train" / "2.jpg")
    table(tmp_path / "all.csv", HEADER, "1.jpg,cat,1,1,9,9")
    with (tmp_path / "train_labels.csv").open("a") as file:
        file.write("2.jpg,cat,1,1,9,9\n")
    index = open_index(tmp_path)
    assert index.splits == ("train", "val", "test")
    (row,) = index.image_indices("test")
    assert index.path(row) == tmp_path / "images" / "test" / "1.jpg"  # the one of that split
    assert index.original_size[row].tolist() == [30, 60]
    assert {index.path(row).parent.name for split in ("train", "val") for row in index.image_indices(split)} == {
        "train"
    }
    assert any("not read: all.csv" in note for note in index.notes)


def test_rows_of_an_image_may_be_in_any_order(tmp_path: Path) -> None:
    for name in "ab":
        make_image(tmp_path / f"{name}.jpg")
    rows = [f"{name}.jpg,cat,{x},1,39,9" for x, name in enumerate("abbab")]
    table(tmp_path / "boxes.csv", HEADER, *rows)
    assert sorted((name, box[0]) for name, _, box in boxes_with_names(open_index(tmp_path))) == [
        ("a.jpg", 0), ("a.jpg", 3), ("b.jpg", 1), ("b.jpg", 2), ("b.jpg", 4),
    ]  # fmt: skip


def test_splits_by_a_column(tmp_path: Path) -> None:
    for name in "abc":
        make_image(tmp_path / f"{name}.jpg")
    lines = [f"{name}.jpg,cat,1,1,9,9,{split}" for name, split in zip("abc", ("Train", "VALID", "test"), strict=True)]
    table(tmp_path / "boxes.csv", f"{HEADER},Split", *lines)
    index = open_index(tmp_path)
    assert {split: [index.path(row).name for row in index.image_indices(split)] for split in index.splits} == {
        "train": ["a.jpg"], "val": ["b.jpg"], "test": ["c.jpg"],
    }  # fmt: skip


@pytest.mark.parametrize("tables", ["one table", "a table each"])
def test_splits_by_folder(tmp_path: Path, tables: str) -> None:
    rows = {split: f"{split}.jpg,cat,1,1,9,9" for split in ("train", "valid")}
    for split, row in rows.items():
        make_image(tmp_path / split / f"{split}.jpg")
        if tables == "a table each":
            table(tmp_path / split / "_annotations.csv", HEADER, row)
    if tables == "one table":
        table(tmp_path / "annotations" / "boxes.csv", HEADER, *rows.values())
    index = open_index(tmp_path)
    assert {split: index.path(index.image_indices(split)[0]).name for split in index.splits} == {
        "train": "train.jpg", "val": "valid.jpg",
    }  # fmt: skip


def test_classes_by_number_are_in_their_own_order(tmp_path: Path) -> None:
    make_image(tmp_path / "a.jpg")
    table(tmp_path / "a.csv", HEADER, *(f"a.jpg,{name},{name},1,19,9" for name in (10, 9, 2)))
    assert open_index(tmp_path).class_names == ("2", "9", "10")


def test_a_table_without_classes(tmp_path: Path) -> None:
    make_image(tmp_path / "a.jpg")
    table(tmp_path / "a.csv", "filename,xmin,ymin,xmax,ymax", "a.jpg,1,1,9,9")
    index = open_index(tmp_path)
    assert index.class_names == ("object",)
    assert any("no class column" in note for note in index.notes)
    table(tmp_path / "a.csv", "filename,xmin,ymin,xmax,ymax,color,maker", "a.jpg,1,1,9,9,red,acme")
    with pytest.raises(DataError, match="unclear which column") as raised:
        open_index(tmp_path)
    assert raised.value.choices == ("color", "maker")


def test_images_without_a_row_are_reported(tmp_path: Path) -> None:
    for name in ("a.jpg", "b.jpg", "table.png"):
        make_image(tmp_path / "images" / name)
    table(tmp_path / "a.csv", HEADER, "a.jpg,cat,1,1,9,9")
    report = check_dataset(tmp_path, decode_images=False)
    assert report.num_images == 1
    (unlabeled,) = (item for item in report.items if item.kind == "unlabeled-image")
    assert unlabeled.examples == ("images/b.jpg", "images/table.png")


def test_several_tables_for_one_split(tmp_path: Path) -> None:
    make_image(tmp_path / "a.jpg")
    for name in ("first", "second"):
        table(tmp_path / f"{name}.csv", HEADER, f"a.jpg,{name},1,1,9,9")
    table(tmp_path / "results.csv", "epoch,loss", "1,0.5")
    with pytest.raises(DataError, match="2 files could be") as raised:
        open_index(tmp_path)
    assert raised.value.choices == ("first.csv", "second.csv")
    assert open_index(tmp_path / "second.csv").class_names == ("second",)
    with pytest.raises(DataError, match="not a table of boxes"):
        open_index(tmp_path / "results.csv")


def test_a_changed_table_is_read_again(tmp_path: Path) -> None:
    make_image(tmp_path / "a.jpg")
    file = table(tmp_path / "a.csv", HEADER, "a.jpg,cat,1,1,9,9")
    assert open_index(tmp_path).class_names == ("cat",)
    table(file, HEADER, "a.jpg,mouse,1,1,9,9")
    assert open_index(tmp_path).class_names == ("mouse",)


def test_a_table_that_is_not_utf_8(tmp_path: Path) -> None:
    make_image(tmp_path / "a.jpg")
    table(tmp_path / "a.csv", HEADER, *["a.jpg,cat,1,1,9,9"] * 5000, "a.jpg,Möwe,1,1,9,9", encoding="latin-1")
    with pytest.raises(DataError, match="not UTF-8") as raised:
        open_index(tmp_path)
    assert str(raised.value.location).endswith("a.csv:5002")


@pytest.mark.parametrize(
    "header",
    [
        "image,class,xmin{0},ymin{0},xmax{0},ymax{0},xmin{1},ymin{1},xmax{1},ymax{1}",
        "image,class,box{0}_x1,box{0}_y1,box{0}_x2,box{0}_y2,box{1}_x1,box{1}_y1,box{1}_x2,box{1}_y2",
        "image,class,x1_{0},y1_{0},x2_{0},y2_{0},x1_{1},y1_{1},x2_{1},y2_{1}",
    ],
)
@pytest.mark.parametrize("numbers", [(0, 1), (1, 2)])
def test_boxes_side_by_side(tmp_path: Path, header: str, numbers: tuple[int, int]) -> None:
    for name in "ab":
        make_image(tmp_path / f"{name}.jpg")
    table(tmp_path / "boxes.csv", header.format(*numbers), "a.jpg,cat,4,2,20,10,1,1,5,5", "b.jpg,dog,2,2,8,8,,,,")
    index = open_index(tmp_path)
    assert boxes_with_names(index) == [
        ("a.jpg", "cat", [4, 2, 20, 10]), ("a.jpg", "cat", [1, 1, 5, 5]), ("b.jpg", "dog", [2, 2, 8, 8])
    ]  # fmt: skip
    assert "boxes.csv: a row has up to 2 boxes, side by side" in index.notes


def test_each_box_of_a_row_may_have_its_own_class(tmp_path: Path) -> None:
    make_image(tmp_path / "a.jpg")
    header = "image,x1,y1,w1,h1,label1,x2,y2,w2,h2,label2"
    table(tmp_path / "boxes.csv", header, "a.jpg,4,2,16,8,cat,1,1,4,4,dog")
    assert boxes_with_names(open_index(tmp_path)) == [("a.jpg", "cat", [4, 2, 20, 10]), ("a.jpg", "dog", [1, 1, 5, 5])]


@pytest.mark.parametrize("cell", ["4 2 20 10;1 1 5 5", "[[4,2,20,10],[1,1,5,5]]", "4;2;20;10;1;1;5;5"])
def test_boxes_as_a_list_in_a_cell(tmp_path: Path, cell: str) -> None:
    for name in "abc":
        make_image(tmp_path / f"{name}.png")
    rows = (f'a.png,"{cell}",north', "b.png,no_box,south", "c.png,2 2 8,south")
    table(tmp_path / "wheat.csv", "image_name,BoxesString,domain", *rows)
    index = open_index(tmp_path)
    assert boxes_with_names(index) == [("a.png", "object", [4, 2, 20, 10]), ("a.png", "object", [1, 1, 5, 5])]
    assert sorted(index.path(image_index).name for image_index in range(len(index))) == ["a.png", "b.png"]
    assert "wheat.csv: not read as the class: domain" in index.notes
    assert "wheat.csv:4: 'c.png,2 2 8,south', the box is not four numbers" in kinds(index)["malformed-row"]


def test_a_list_of_boxes_has_one_class_or_as_many(tmp_path: Path) -> None:
    for name in "abc":
        make_image(tmp_path / f"{name}.jpg")
    boxes = '"[[4, 2, 16, 8], [1, 1, 4, 4]]"'
    rows = (f"a.jpg,{boxes},\"['cat', 'dog']\"", f"b.jpg,{boxes},cat", f'c.jpg,{boxes},"cat, dog, cow"')
    table(tmp_path / "boxes.csv", "image,bboxes,labels", *rows)
    index = open_index(tmp_path)
    assert [entry[:2] for entry in boxes_with_names(index)] == [
        ("a.jpg", "cat"), ("a.jpg", "dog"), ("b.jpg", "cat"), ("b.jpg", "cat")
    ]  # fmt: skip
    assert "2 boxes and 3 classes" in kinds(index)["malformed-row"]


def test_a_table_of_corners_that_are_called_width_and_height(tmp_path: Path) -> None:
    corners = [(20, 8, 38, 19), (4, 2, 20, 10), (10, 1, 39, 15)]
    for number in range(3):
        make_image(tmp_path / f"{number}.jpg")
    rows = (f"{number}.jpg,cat,{','.join(map(str, xyxy))}" for number, xyxy in enumerate(corners))
    table(tmp_path / "boxes.csv", "image,class,x,y,w,h", *rows)
    index = open_index(tmp_path)
    assert [box for _, _, box in boxes_with_names(index)] == [list(xyxy) for xyxy in corners]
    assert any("bbox are corners" in note for note in index.notes)


def test_a_table_that_is_refused_is_named_with_its_columns(tmp_path: Path) -> None:
    make_image(tmp_path / "images" / "a.jpg")
    table(tmp_path / "counts.csv", "photo,number_of_boats,weather", "a.jpg,3,rain")
    for path in (tmp_path, tmp_path / "counts.csv"):
        with pytest.raises(DataError) as raised:
            open_index(path)
        assert "it has the columns photo, number_of_boats, weather: none of boxes is recognized" in str(raised.value)
