"""MDS shards of others. Layouts: the format's description and the COCO script of mosaicml/streaming
(streaming/vision/convert/coco.py), whose boxes are pickled; index.json of data sets on the Hugging Face hub."""

import json
import pickle
import struct
from pathlib import Path

import pytest

from stoker.data.index import open_index
from stoker.errors import DataError
from tests.data.shards import array, write_mosaic
from tests.data.tfrecords import jpeg

IMAGE = jpeg(40, 30, 1)
LAYOUTS: dict[str, tuple[dict[str, str], dict[str, bytes]]] = {
    "arrays": (
        {"image": "jpeg", "boxes": "ndarray:float32", "labels": "ndarray:int64"},
        {"boxes": array([[4, 2, 24, 21]], "float32"), "labels": array([25], "int64")},
    ),
    "arrays with their types": (
        {"image": "bytes", "bboxes": "ndarray", "labels": "ndarray"},
        {"bboxes": b"\x22" + array([[4, 2, 20, 19]], "<f4"), "labels": b"\x41" + array([25], "<i8")},
    ),
    "arrays with their shapes": (
        {"img": "jpeg:90", "boxes": "ndarray:float64:1,4", "labels": "ndarray:int32:1"},
        {"boxes": array([[4, 2, 24, 21]], "float64", (1, 4)), "labels": array([25], "int32", (1,))},
    ),
    "json": (
        {"image": "jpeg", "annotations": "json", "img_id": "int"},
        {"annotations": json.dumps([{"bbox": [4, 2, 20, 19], "category_id": 25}]).encode(), "img_id": bytes(8)},
    ),
    "target as json": (
        {"image": "png", "target": "json", "label": "int64"},
        {"target": json.dumps({"boxes": [[4, 2, 24, 21]], "labels": [25]}).encode(), "label": struct.pack("<q", 3)},
    ),
    "size columns": (
        {"img": "jpeg", "htot": "int", "wtot": "int", "boxes": "json", "labels": "json"},
        {"boxes": b"[[4, 2, 24, 21]]", "labels": b"[25]", "htot": struct.pack("<q", 30), "wtot": struct.pack("<q", 40)},
    ),
}


def rows_of(name: str) -> tuple[dict[str, str], dict[str, bytes]]:
    columns, row = LAYOUTS[name]
    image = next(column for column in columns if column in ("image", "img"))
    return columns, {**row, image: IMAGE}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layouts_are_read(name: str, tmp_path: Path) -> None:
    columns, row = rows_of(name)
    write_mosaic(tmp_path / "train", columns, [row] * 3)
    write_mosaic(tmp_path / "val", columns, [row])
    index = open_index(tmp_path)
    assert (index.format, index.splits, index.class_names) == ("mds", ("train", "val"), ("25",))
    assert index.boxes.tolist() == [[4, 2, 24, 21]] * 4
    assert [index.read(row) for row in range(4)] == [IMAGE] * 4
    assert index.original_size.tolist() == [[30, 40]] * 4
    assert index.problems == ()
    assert open_index(tmp_path / "train" / "index.json").format == "mds"


REFUSED: dict[str, tuple[tuple[dict[str, str], dict[str, bytes]], dict[str, object], str, str]] = {
    "compressed": (
        LAYOUTS["json"], {"compression": "zstd:16", "zip_data": {"basename": "a", "bytes": 1, "hashes": {}}},
        "Compressed MDS shards", "compression=None",
    ),
    "pickled": (
        ({"img": "jpeg", "bbox_sizes": "pkl", "bbox_labels": "pkl", "img_id": "int"}, {}), {}, "pickled", "ndarray"
    ),
    "raw pixels": (
        ({"image": "pil", "boxes": "json", "labels": "json"}, {}), {}, "no column of encoded images", "jpeg"
    ),
    "text": (({"id": "str", "text": "str"}, {}), {}, "no column of encoded images", "id: str, text: str"),
    "no boxes": (({"image": "jpeg", "label": "int"}, {}), {}, "no boxes that are understood", "bboxes and labels"),
    "a path": (
        LAYOUTS["json"], {"raw_data": {"basename": "../a.mds", "bytes": 1, "hashes": {}}}, "outside its folder", "../a"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_in_place_is_refused(name: str, tmp_path: Path) -> None:
    (columns, values), more, what, fix = REFUSED[name]
    row = {column: values.get(column, pickle.dumps([1])) for column in columns}
    row = {column: bytes(8) if columns[column] == "int" else value for column, value in row.items()}
    write_mosaic(tmp_path, columns, [row], more=more)
    with pytest.raises(DataError) as error:
        open_index(tmp_path)
    assert what in str(error.value)
    assert fix in str(error.value)
    assert "index.json" in str(error.value)


def test_what_is_wrong_with_single_samples_and_shards_is_reported(tmp_path: Path) -> None:
    columns, row = rows_of("json")
    bad = {**row, "annotations": b"{"}
    rows = [row] * 6 + [bad, row]
    write_mosaic(tmp_path / "train", columns, rows)
    write_mosaic(tmp_path / "val", columns, [row])
    (tmp_path / "train" / "shard.00000.mds").unlink()
    second = tmp_path / "train" / "shard.00001.mds"
    second.write_bytes(second.read_bytes()[:-10])
    index = open_index(tmp_path)
    found = {problem.kind: problem.examples for problem in index.problems}
    assert found["missing-shard"] == (f"{tmp_path}/train/shard.00000.mds: 2 images",)
    assert found["truncated-shard"][0].startswith("shard.00001.mds: ")
    assert found["damaged-record"][0].startswith("shard.00001.mds, sample 1: bytes ")
    assert found["unreadable-annotations"][0].startswith("shard.00003.mds, sample 0: ")
    assert len(index.image_indices("train")) == 4


def test_samples_that_share_bytes_are_damaged(tmp_path: Path) -> None:
    columns, row = rows_of("json")
    write_mosaic(tmp_path / "train", columns, [row] * 4, per_shard=4)
    write_mosaic(tmp_path / "val", columns, [row])
    shard = tmp_path / "train" / "shard.00000.mds"
    data = shard.read_bytes()
    first, second = struct.unpack_from("<2I", data, 4)
    shard.write_bytes(data[:4] + struct.pack("<5I", first, second, first, second, second) + data[24:])
    index = open_index(tmp_path)
    assert len(index.image_indices("train")) == 1
    assert {problem.kind: problem.count for problem in index.problems}["damaged-record"] == 3


@pytest.mark.parametrize("change", ["twice", "negative"])
def test_shards_listed_twice_and_negative_sizes_are_refused(tmp_path: Path, change: str) -> None:
    columns, row = rows_of("json")
    write_mosaic(tmp_path, columns, [row])
    path = tmp_path / "index.json"
    content = json.loads(path.read_text())
    if change == "twice":
        content["shards"] *= 2
    else:
        content["shards"][0]["column_sizes"] = [-4] * len(columns)
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"shard\.00000\.mds"):
        open_index(tmp_path)


def test_an_index_json_of_something_else_is_not_mds(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"shards": [{"format": "jsonl"}]}')
    with pytest.raises(DataError, match="No annotations found"):
        open_index(tmp_path)
