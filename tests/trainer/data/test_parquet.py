"""Parquet as on the Hugging Face hub. Layout: the features of cppe-5 (README of intelli-zen/cppe-5): image, objects
with bbox, category as ClassLabel."""

import subprocess
import sys
from pathlib import Path

import pytest

from stoker.data.index import open_index, require_images
from stoker_watch.errors import DataError
from tests.trainer.data.shards import write_hub_parquet
from tests.trainer.data.tfrecords import jpeg


def row(
    boxes: list[list[float]], labels: list[int], data: bytes | None = None, name: str | None = None
) -> dict[str, object]:
    image = {"bytes": jpeg(40, 30, 1) if data is None else data, "path": name}
    return {"image": image, "objects": {"bbox": boxes, "category": labels}}


def test_class_names_of_the_hub_are_kept_in_order_with_those_without_a_box(tmp_path: Path) -> None:
    names = ("Coverall", "Face_Shield", "Gloves")
    rows = [row([[4, 2, 20, 19]], [2], name="a.jpg"), row([], []), row([[1, 1, 5, 5], [2, 2, 9, 9]], [0, 7])]
    write_hub_parquet(tmp_path / "data" / "train-00000-of-00001.parquet", rows, names)
    write_hub_parquet(tmp_path / "data" / "validation-00000-of-00001.parquet", rows[:1], names)
    index = open_index(tmp_path)
    assert (index.format, index.class_names, index.splits) == ("parquet", names, ("train", "val"))
    assert index.labels.tolist() == [2, 0, 2]
    assert index.boxes[0].tolist() == [4, 2, 24, 21]
    assert index.path(0).name == "a.jpg"
    assert [index.read(number) for number in range(4)] == [jpeg(40, 30, 1)] * 4
    assert index.bad_boxes["train"] == 1  # 7 is no class
    assert any("Parquet files are copied into" in note for note in index.notes)
    require_images(index, max_bad_boxes=0.5)
    copies = [index.path(number).parent for number in range(4)]
    for path in set(copies):
        path.unlink()  # the cache may be deleted: the images are copied again
    assert open_index(tmp_path).read(3) == jpeg(40, 30, 1)


def test_numbers_without_names_are_the_names(tmp_path: Path) -> None:
    write_hub_parquet(tmp_path / "a.parquet", [row([[4, 2, 20, 19]], [k]) for k in (3, 11, 3)])
    index = open_index(tmp_path / "a.parquet", val_fraction=0.4)
    assert index.class_names == ("3", "11")


def test_corners_under_bbox_are_recognized(tmp_path: Path) -> None:
    corners = [[30.0, 20.0, 39.0, 29.0], [4.0, 2.0, 24.0, 21.0]]
    write_hub_parquet(tmp_path / "train.parquet", [row(corners, [0, 1])] * 4)
    write_hub_parquet(tmp_path / "val.parquet", [row(corners, [0, 1])])
    index = open_index(tmp_path)
    assert index.boxes.tolist() == corners * 5
    assert any("bbox are corners (x1, y1, x2, y2)" in note and "50 % would reach out" in note for note in index.notes)
    write_hub_parquet(tmp_path / "train.parquet", [row([[30, 20, 9, 9], [4, 2, 20, 19]], [0, 1])] * 4)
    write_hub_parquet(tmp_path / "val.parquet", [row([[30, 20, 9, 9], [4, 2, 20, 19]], [0, 1])])
    assert open_index(tmp_path).boxes.tolist() == corners * 5


def test_rows_without_an_image_and_damaged_files_are_reported(tmp_path: Path) -> None:
    rows = [row([[4, 2, 20, 19]], [1]), row([[4, 2, 20, 19]], [1], b""), row([[4, 2, 20, 19]], [1], b"<html>")]
    write_hub_parquet(tmp_path / "train-0.parquet", [*rows, *rows[:1] * 3])
    write_hub_parquet(tmp_path / "train-1.parquet", rows[:1])
    write_hub_parquet(tmp_path / "val-0.parquet", rows[:1])
    data = (tmp_path / "train-1.parquet").read_bytes()
    (tmp_path / "train-1.parquet").write_bytes(data[: len(data) // 2])
    index = open_index(tmp_path)
    found = {problem.kind: problem.examples for problem in index.problems}
    assert found["damaged-shard"][0].startswith("train-1.parquet: ")
    assert "train-0.parquet: row 1 has no bytes" in found["record-without-image"]
    assert len(index.image_indices("train")) == 4


def test_a_table_without_images_is_not_a_data_set(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="Hugging Face Parquet"):
        open_index(tmp_path)


def test_a_file_without_the_names_of_the_others_is_reported(tmp_path: Path) -> None:
    """Its numbers are classes that the others do not list."""
    write_hub_parquet(tmp_path / "train-0.parquet", [row([[4, 2, 20, 19]], [1])])
    write_hub_parquet(tmp_path / "train-1.parquet", [row([[4, 2, 20, 19]], [1])], ("cat", "dog"))
    write_hub_parquet(tmp_path / "val-0.parquet", [row([[4, 2, 20, 19]], [0])], ("cat", "dog"))
    index = open_index(tmp_path)
    assert (index.class_names, index.labels.tolist()) == (("cat", "dog"), [1, 0])
    (problem,) = [problem for problem in index.problems if problem.kind == "unknown-class"]
    assert problem.count == 1
    assert problem.examples[0].endswith("row 0: '1'")
    assert index.bad_boxes["train"] == 1


EDITED = """
import sys
from pathlib import Path

from stoker.data.formats.parquet import _open
import pyarrow as pa

path, outcomes = Path(sys.argv[1]), {"read": 0, "refused": 0}
data = path.read_bytes()
footer_bytes = int.from_bytes(data[-8:-4], "little")
for place in range(len(data) - 8 - footer_bytes, len(data) - 8):
    path.write_bytes(data[:place] + b"'" + data[place + 1 :])
    try:
        _open(path, "image", ["objects"])
        outcomes["read"] += 1
    except (OSError, pa.ArrowException):
        outcomes["refused"] += 1
print(outcomes["read"] > 0 < outcomes["refused"])
"""


def test_a_footer_with_any_byte_changed_does_not_end_the_process(tmp_path: Path) -> None:
    """pyarrow aborts in `RowGroupMetaData.column` where the statistics of a column are damaged: "Repetition level
    histogram size mismatch"."""
    write_hub_parquet(tmp_path / "train.parquet", [row([[1, 2, 3, 4]], [0])], ["cell"])
    done = subprocess.run(
        [sys.executable, "-c", EDITED, str(tmp_path / "train.parquet")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_names_of_columns_that_are_not_utf_8_are_a_damaged_file(tmp_path: Path) -> None:
    """pyarrow raises UnicodeDecodeError where it lists them; found by mutated files."""
    good = tmp_path / "good" / "train.parquet"
    good.parent.mkdir()
    write_hub_parquet(good, [row([[1, 2, 3, 4]], [0])], ["cell"])
    data = good.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    edited = data[:footer] + data[footer:].replace(b"objects", b"\xe2bjects")
    assert edited != data
    (tmp_path / "train.parquet").write_bytes(edited)
    with pytest.raises(DataError):
        open_index(tmp_path / "train.parquet")
    (good.parent / "train_2.parquet").write_bytes(edited)
    index = open_index(good.parent)
    assert len(index) == 1
    assert any("train_2.parquet" in example for problem in index.problems for example in problem.examples)
