"""The same boxes written in every format that is read give the same index. The files are written here, by hand."""

import contextlib
import json
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.data.formats.finder import FORMATS
from stoker.data.index import Index, open_index
from stoker.errors import StokerError
from tests.data.examples import property_test
from tests.data.exports import (
    cvat_box,
    cvat_file,
    cvat_image,
    labelme_file,
    labelme_shape,
    open_images_row,
    open_images_table,
    region,
    task,
)
from tests.data.shards import write_hub_parquet, write_mosaic, write_tar
from tests.data.tfrecords import example, frame, image_features, jpeg, label_map

CLASSES = ("cat", "dog", "emu")
"""Sorted by name, the only order of Pascal VOC."""


class Drawn(NamedTuple):
    name: str
    split: str
    width: int
    height: int
    boxes: list[tuple[int, int, int, int, int]]
    """Label, x1, y1, x2, y2 in whole pixels."""


@st.composite
def drawings(draw: st.DrawFn) -> list[Drawn]:
    """Images of two splits; every class has a box in the first of each."""
    drawn = []
    for split in ("train", "val"):
        for number in range(draw(st.integers(1, 3))):
            width, height = draw(st.integers(4, 90)), draw(st.integers(4, 90))
            boxes = []
            for label in [0, 1, 2] if number == 0 else draw(st.lists(st.integers(0, 2), max_size=4)):
                x1, y1 = draw(st.integers(0, width - 3)), draw(st.integers(0, height - 3))
                x2, y2 = (
                    draw(st.integers(x1 + 2, width)),
                    draw(st.integers(y1 + 2, height)),
                )  # not within 0 … 1
                boxes.append((label, x1, y1, x2, y2))
            drawn.append(Drawn(f"{split}-{number}.jpg", split, width, height, list(dict.fromkeys(boxes))))
    return drawn


def save(folder: Path, drawn: list[Drawn]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for item in drawn:
        (folder / item.name).write_bytes(jpeg(item.width, item.height, len(item.boxes)))
    return folder


def write_coco(root: Path, drawn: list[Drawn]) -> None:
    for split in ("train", "val"):
        own = [item for item in drawn if item.split == split]
        images = [
            {"id": n, "file_name": item.name, "width": item.width, "height": item.height} for n, item in enumerate(own)
        ]
        annotations = [
            {"id": 9 * n + k, "image_id": n, "category_id": label + 5, "bbox": [x1, y1, x2 - x1, y2 - y1], "iscrowd": 0}
            for n, item in enumerate(own)
            for k, (label, x1, y1, x2, y2) in enumerate(item.boxes)
        ]
        categories = [{"id": n + 5, "name": name} for n, name in enumerate(CLASSES)]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (save(root / split, own) / "_annotations.coco.json").write_text(json.dumps(content))


def write_voc(root: Path, drawn: list[Drawn]) -> None:
    save(root / "JPEGImages", drawn)
    (root / "Annotations").mkdir()
    (root / "ImageSets" / "Main").mkdir(parents=True)
    for item in drawn:
        objects = "".join(
            f"<object><name>{CLASSES[label]}</name><bndbox><xmin>{x1}</xmin><ymin>{y1}</ymin>"
            f"<xmax>{x2}</xmax><ymax>{y2}</ymax></bndbox></object>"
            for label, x1, y1, x2, y2 in item.boxes
        )
        size = f"<size><width>{item.width}</width><height>{item.height}</height></size>"
        text = f"<annotation><filename>{item.name}</filename>{size}{objects}</annotation>"
        (root / "Annotations" / item.name.replace(".jpg", ".xml")).write_text(text)
    for split in ("train", "val"):
        names = [item.name.removesuffix(".jpg") for item in drawn if item.split == split]
        (root / "ImageSets" / "Main" / f"{split}.txt").write_text("\n".join(names))


def write_yolo(root: Path, drawn: list[Drawn]) -> None:
    for split in ("train", "val"):
        own = [item for item in drawn if item.split == split]
        save(root / "images" / split, own)
        (root / "labels" / split).mkdir(parents=True)
        for item in own:
            w, h = item.width, item.height
            lines = [
                f"{label} {(x1 + x2) / 2 / w:.9g} {(y1 + y2) / 2 / h:.9g} {(x2 - x1) / w:.9g} {(y2 - y1) / h:.9g}"
                for label, x1, y1, x2, y2 in item.boxes
            ]
            (root / "labels" / split / item.name.replace(".jpg", ".txt")).write_text("\n".join(lines))
    (root / "data.yaml").write_text("train: images/train\nval: images/val\nnames: [cat, dog, emu]\n")


def write_tfrecord(root: Path, drawn: list[Drawn]) -> None:
    label_map(root / "label_map.pbtxt", *CLASSES)
    for split in ("train", "val"):
        records = []
        for item in drawn:
            if item.split == split:
                w, h = item.width, item.height
                boxes = [(CLASSES[k], k + 1, x1 / w, y1 / h, x2 / w, y2 / h) for k, x1, y1, x2, y2 in item.boxes]
                encoded = jpeg(w, h, len(item.boxes))
                records.append(frame(example(image_features(item.name, boxes, size=(h, w), image__encoded=[encoded]))))
        (root / f"{split}.record").write_bytes(b"".join(records))


def write_csv(root: Path, drawn: list[Drawn]) -> None:
    save(root / "images", drawn)
    for split in ("train", "val"):
        lines = ["filename,width,height,class,xmin,ymin,xmax,ymax"]
        for item in drawn:
            if item.split == split:
                rows = [f"{CLASSES[label]},{x1},{y1},{x2},{y2}" for label, x1, y1, x2, y2 in item.boxes]
                lines += [f"{item.name},{item.width},{item.height},{row}" for row in rows or [",,,,"]]
        (root / f"{split}_labels.csv").write_text("\n".join(lines) + "\n")


def write_openimages(root: Path, drawn: list[Drawn]) -> None:
    for split in ("train", "val"):
        own = save(root / split, [item for item in drawn if item.split == split])
        rows = [
            open_images_row(
                item.name[:-4], f"/m/{k}", x1 / item.width, y1 / item.height, x2 / item.width, y2 / item.height
            )
            for item in drawn
            if (own / item.name).exists()
            for k, x1, y1, x2, y2 in item.boxes
        ]
        open_images_table(root / f"{split}-annotations-bbox.csv", *rows)
    (root / "class-descriptions-boxable.csv").write_text("".join(f"/m/{k},{name}\n" for k, name in enumerate(CLASSES)))


def write_cvat(root: Path, drawn: list[Drawn]) -> None:
    for split in ("train", "val"):
        save(root / "images" / split, [item for item in drawn if item.split == split])
    images = [
        cvat_image(
            item.name,
            "".join(cvat_box(CLASSES[label], *xyxy) for label, *xyxy in item.boxes),
            subset=item.split,
            size=(item.width, item.height),
        )
        for item in drawn
    ]
    (root / "annotations.xml").write_text(cvat_file("".join(images)))


def write_labelme(root: Path, drawn: list[Drawn]) -> None:
    for split in ("train", "val"):
        save(root / split, [item for item in drawn if item.split == split])
    for item in drawn:
        shapes = [labelme_shape(CLASSES[label], [[x2, y1], [x1, y2]]) for label, x1, y1, x2, y2 in item.boxes]
        path = root / item.split / item.name.replace(".jpg", ".json")
        labelme_file(path, item.name, *shapes, imageHeight=item.height, imageWidth=item.width)


def write_label_studio(root: Path, drawn: list[Drawn]) -> None:
    save(root / "images", drawn)
    for split in ("train", "val"):
        tasks = []
        for number, item in enumerate(drawn):
            w, h = item.width, item.height
            regions = [
                region(
                    CLASSES[label], 100 * x1 / w, 100 * y1 / h, 100 * (x2 - x1) / w, 100 * (y2 - y1) / h,
                    original_width=w, original_height=h,
                )
                for label, x1, y1, x2, y2 in item.boxes
            ]  # fmt: skip
            tasks += [task(number, f"/data/upload/1/0123abcd-{item.name}", regions)] if item.split == split else []
        (root / f"{split}.json").write_text(json.dumps(tasks))


def write_webdataset(root: Path, drawn: list[Drawn]) -> None:
    for split in ("train", "val"):
        files = []
        for item in drawn:
            if item.split == split:
                rows = [
                    {"category": CLASSES[k], "bbox": [x1, y1, x2 - x1, y2 - y1]} for k, x1, y1, x2, y2 in item.boxes
                ]
                files.append((item.name, jpeg(item.width, item.height, len(item.boxes))))
                files.append((item.name.replace(".jpg", ".json"), json.dumps(rows).encode()))
        write_tar(root / f"{split}-000000.tar", files)


def write_mds(root: Path, drawn: list[Drawn]) -> None:
    columns = {"image": "jpeg", "file_name": "str", "boxes": "json", "labels": "json"}
    for split in ("train", "val"):
        rows = [
            {
                "image": jpeg(item.width, item.height, len(item.boxes)),
                "file_name": item.name.encode(),
                "boxes": json.dumps([box[1:] for box in item.boxes]).encode(),
                "labels": json.dumps([CLASSES[box[0]] for box in item.boxes]).encode(),
            }
            for item in drawn
            if item.split == split
        ]
        write_mosaic(root / split, columns, rows)


def write_parquet(root: Path, drawn: list[Drawn]) -> None:
    for split in ("train", "val"):
        rows = [
            {
                "image": {"bytes": jpeg(item.width, item.height, len(item.boxes)), "path": item.name},
                "objects": {
                    "bbox": [[x1, y1, x2 - x1, y2 - y1] for _, x1, y1, x2, y2 in item.boxes],
                    "category": [box[0] for box in item.boxes],
                },
            }
            for item in drawn
            if item.split == split
        ]
        write_hub_parquet(root / "data" / f"{split}-00000-of-00001.parquet", rows, CLASSES)


WRITE = {
    "coco": write_coco, "voc": write_voc, "yolo": write_yolo, "tfrecord": write_tfrecord,
    "openimages": write_openimages, "csv": write_csv, "cvat": write_cvat, "labelme": write_labelme,
    "label-studio": write_label_studio, "webdataset": write_webdataset, "mds": write_mds,
    "parquet": write_parquet,
}  # fmt: skip


def test_every_format_is_here() -> None:
    assert list(WRITE) == list(FORMATS)


def content(index: Index) -> list[tuple[str, str, list[int], list[list[float]], list[str], list[bool], bytes]]:
    """What an index says, image by image, split by split, in its own order."""
    differences = []
    for split in index.splits:
        for row in index.image_indices(split).tolist():
            own = slice(index.offsets[row], index.offsets[row + 1])
            differences.append(
                (
                    split,
                    index.path(row).name,
                    index.original_size[row].tolist(),
                    np.round(index.boxes[own].astype(np.float64), 3).tolist(),
                    [index.class_names[label] for label in index.labels[own]],
                    index.crowd[own].tolist(),
                    index.read(row),
                )
            )
    return differences


@property_test(drawings(), few=3, many=20)
def test_the_same_boxes_are_the_same_index(tmp_path_factory: pytest.TempPathFactory, drawn: list[Drawn]) -> None:
    root = tmp_path_factory.mktemp("same")
    expected = [
        (
            item.split,
            item.name,
            [item.height, item.width],
            [[float(value) for value in box[1:]] for box in item.boxes],
            [CLASSES[box[0]] for box in item.boxes],
            [False] * len(item.boxes),
            jpeg(item.width, item.height, len(item.boxes)),
        )
        for item in drawn
    ]
    for name, write in WRITE.items():
        write(root / name, drawn)
        index = open_index(root / name)
        assert index.format == name
        assert index.class_names == CLASSES, name
        # a table of Open Images lists boxes only, so an image without boxes is not in it
        listed = expected if name != "openimages" else [image for image in expected if image[3]]
        assert content(index) == listed, name
        areas = [(x2 - x1) * (y2 - y1) for item in drawn for _, x1, y1, x2, y2 in item.boxes]
        order = np.concatenate(
            [np.arange(index.offsets[r], index.offsets[r + 1]) for s in index.splits for r in index.image_indices(s)]
        )
        assert index.area[order.astype(int)] == pytest.approx(areas, rel=1e-4), name
        kinds = {problem.kind for problem in index.problems}
        assert not [kind for kind in kinds if not re.search("class|copied|tiny|same", kind)], (name, index.problems)


DAMAGED = {
    "cvat": "annotations.xml", "labelme": "train/train-0.json", "label-studio": "train.json",
    "openimages": "train-annotations-bbox.csv", "webdataset": "train-000000.tar", "mds": "train/index.json",
    "parquet": "data/train-00000-of-00001.parquet",
}  # fmt: skip
"""Formats that `test_hostile.py` does not have: a file of each."""
DRAWN = [Drawn(f"{split}-{k}.jpg", split, 40, 30, [(k, 4, 2, 20, 10)]) for split in ("train", "val") for k in range(3)]


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("exports")
    for name in DAMAGED:
        (root / name).mkdir()
        WRITE[name](root / name, DRAWN)
    return root


@pytest.mark.parametrize("name", DAMAGED)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_damaged_bytes_of_exports_never_crash(name: str, exports: Path, data: st.DataObject) -> None:
    file = exports / name / DAMAGED[name]
    whole = file.read_bytes()
    start = data.draw(st.integers(0, len(whole)))
    length = data.draw(st.sampled_from([0, 1, 1, 7, len(whole)]))
    new = data.draw(
        st.binary(max_size=4)
        | st.sampled_from([b'"', b"}", b"NaN", b"1e999", b"\0", b"\xff", b"<", b",", b"-", b"null"])
    )
    try:
        file.write_bytes(whole[:start] + new + whole[start + length :])
        with contextlib.suppress(StokerError):
            open_index(exports / name)
    finally:
        file.write_bytes(whole)
