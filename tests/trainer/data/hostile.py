"""Data sets with every kind of defect, each planted once or twice among healthy images, and the list of them.

Each function writes a data set and returns what was planted: (kind, a part of the location that must be reported). The
tests are `test_hostile.py`; TFRecords are in `hostile_tfrecord.py`.
"""

import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

Planted = list[tuple[str, str]]

HEIGHT, WIDTH = 48, 64
HEALTHY = 16
"""Images per data set without any defect."""


def pixels(seed: int, shape: tuple[int, ...] = (HEIGHT, WIDTH, 3)) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 255, shape, np.uint8)


def encoded(seed: int, format: str = "JPEG", mode: str = "RGB", orientation: int | None = None) -> bytes:
    image = Image.fromarray(pixels(seed)).convert(mode)
    if mode == "RGBA":
        image.putalpha(99)
    more: dict[str, Any] = {}
    if orientation is not None:
        more["exif"] = Image.Exif()
        more["exif"][0x0112] = orientation
    file = io.BytesIO()
    image.save(file, format, **more)
    return file.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG with a size in its header, but without pixels."""
    content = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + content + struct.pack(">I", zlib.crc32(content)) + bytes(12)


def sixteen_bit_png(seed: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels(seed, (HEIGHT, WIDTH)).astype(np.uint16) * 257).save(file, "PNG")
    return file.getvalue()


def bad_images() -> dict[str, tuple[str, bytes]]:
    """Name → (kind, content) of files that are unusable or unusual."""
    jpeg, png = encoded(900), encoded(901, "PNG")
    flipped = bytearray(png)
    flipped[len(png) // 2] ^= 0x55
    return {
        "zero.jpg": ("empty-image", b""),
        "page.jpg": ("not-an-image", b"<!DOCTYPE html><html><body>log in</body></html>"),
        "noise.jpg": ("not-an-image", bytes(range(1, 200))),
        "cut.jpg": ("damaged-image", jpeg[: len(jpeg) // 2]),
        "stump.jpg": ("damaged-image", jpeg[:20]),
        "cut.png": ("damaged-image", png[: len(png) // 2]),
        "flipped.png": ("damaged-image", bytes(flipped)),
        "bomb.png": ("too-large-image", png_header(2**17, 2**17)),
        "small.jpg": ("size-disagrees", encoded_small()),
        "png.jpg": ("misnamed-image", encoded(902, "PNG")),
        "gray.png": ("gray-image", encoded(903, "PNG", "L")),
        "gray.jpg": ("gray-image", encoded(904, mode="L")),
        "cmyk.jpg": ("cmyk-image", encoded(905, mode="CMYK")),
        "deep.png": ("deep-image", sixteen_bit_png(906)),
        "alpha.png": ("transparent-image", encoded(907, "PNG", "RGBA")),
        "alpha.webp": ("transparent-image", encoded(908, "WEBP", "RGBA")),
        "upside-down.jpg": ("ambiguous-rotation", encoded(909, orientation=3)),
    }


def encoded_small() -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels(1000, (20, 20, 3))).save(file, "JPEG")
    return file.getvalue()


class _Coco:
    """A COCO file that is being written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.images: list[Any] = []
        self.annotations: list[Any] = []
        folder.mkdir(parents=True)

    def image(self, name: str, content: bytes | None, *, box: bool = True, **more: Any) -> int:
        """Lists an image, writes it where it has content, and gives it a box; returns its id."""
        number = 100 + len(self.images)
        if content is not None:
            (self.folder / name).write_bytes(content)
        self.images.append({"id": number, "file_name": name, "width": WIDTH, "height": HEIGHT} | more)
        if box:
            self.box(number, [4, 5, 20, 21])
        return number

    def box(self, image_id: Any, bbox: Any, category_id: Any = 1, **more: Any) -> int:
        number = 5000 + len(self.annotations)
        self.annotations.append({"id": number, "image_id": image_id, "category_id": category_id, "bbox": bbox} | more)
        return number

    def write(self, categories: list[Any]) -> None:
        content = {"images": self.images, "annotations": self.annotations, "categories": categories}
        (self.folder / "_annotations.coco.json").write_text(json.dumps(content, indent=1))


def coco(root: Path) -> Planted:
    """A COCO data set of two splits."""
    train, val = _Coco(root / "train"), _Coco(root / "valid")
    healthy = [train.image(f"good {n}.jpg", encoded(n)) for n in range(HEALTHY)]
    for n in range(6):
        val.image(f"val {n}.jpg", encoded(100 + n))
    planted: Planted = []

    def boxes(kind: str, bbox: Any, category_id: Any = 1, image_id: Any = healthy[0]) -> None:
        planted.append((kind, f"{train.box(image_id, bbox, category_id)}"))

    boxes("zero-size", [5, 5, 0, 3])
    boxes("negative-size", [30, 30, -8, 5])
    boxes("outside", [300, 5, 9, 9])
    boxes("not-a-number", [float("nan"), 5, 9, 9])
    boxes("not-a-number", [1, 5, float("inf"), 9])
    boxes("not-in-pixels", [0.25, 0.25, 0.5, 0.5])
    boxes("duplicate-box", [4, 5, 20, 21])
    boxes("reaches-outside", [40, 30, 80, 80])
    boxes("tiny-box", [20.25, 20, 0.5, 9])
    boxes("no-box", None)
    boxes("no-box", [])
    boxes("malformed-box", [1, 2, 3])
    boxes("malformed-box", [1, 2, 3, 4, 5])
    boxes("malformed-annotation", "1 2 3 4")
    boxes("malformed-annotation", [1, 2, "wide", 4])
    boxes("text-for-number", ["10", 11, 12, 13])
    boxes("text-for-number", [10, 12, 12, 13], "2")
    boxes("unknown-class", [1, 2, 30, 40], 77)
    boxes("unknown-image", [1, 2, 30, 40], 1, 31337)
    train.annotations += [17, None, ["a"], {"id": 6000, "bbox": [1, 2, 3, 4]}]
    planted += [("malformed-annotation", f"number {len(train.annotations) - n}: ") for n in (1, 2, 3, 4)]
    train.box(healthy[1], [9, 9, 9, 9], 2)
    train.box(healthy[2], [9, 9, 9, 9], 5)
    planted += [("class-not-in-split", "bird: not in val"), ("unused-class", "ghost")]

    train.images += [{"id": 900}, "a.jpg", {"id": 901, "file_name": "a\0.jpg"}, {"id": 902, "file_name": "n" * 400}]
    planted += [("malformed-image", f"number {len(train.images) - n}: ") for n in (3, 4)]
    planted += [("malformed-image", "id 901"), ("malformed-image", "id 902")]
    train.image("wide.jpg", encoded(20), width="wide")
    train.image("negative.jpg", encoded(21), width=-64)
    planted += [("malformed-size", '"wide"'), ("malformed-size", "negative.jpg: width -64")]
    train.images.append(dict(train.images[0]))
    train.image("shared id.jpg", encoded(22))
    train.images.append({"id": train.images[-1]["id"], "file_name": "its twin.jpg"})
    train.image("listed twice.jpg", encoded(23))
    train.image("listed twice.jpg", None)
    planted += [("copied-entry", "good 0.jpg"), ("ambiguous-id", "shared id.jpg, its twin.jpg")]
    planted += [("listed-twice", "listed twice.jpg"), ("unknown-image", "image_id")]

    for name, (kind, content) in bad_images().items():
        train.image(name, content)
        planted.append((kind, name))
    train.image("UPPER.JPG", None)
    (train.folder / "upper.jpg").write_bytes(encoded(24))
    planted.append(("wrong-case-name", "UPPER.JPG': the file is 'upper.jpg'"))
    train.image("gone.jpg", None)
    train.image("folder.jpg", None)
    (train.folder / "folder.jpg").mkdir()
    planted += [("missing-image", "train/gone.jpg"), ("unreadable-image", "train/folder.jpg: Is a directory")]
    train.image("portrait.jpg", encoded(910, orientation=6), width=HEIGHT, height=WIDTH)
    planted.append(("rotated-image", "portrait.jpg"))
    (train.folder / "unnamed.jpg").write_bytes(encoded(30))
    (train.folder / "._good 0.jpg").write_bytes(b"Mac OS X")
    planted.append(("unlabeled-image", "train/unnamed.jpg"))
    train.image("copy.jpg", encoded(3))
    planted.append(("copied-image", "copy.jpg (train)"))
    val.image("leak.jpg", encoded(4))
    val.image("../train/good 5.jpg", None)
    planted += [("same-image-in-two-splits", "valid/leak.jpg (val)"), ("in-two-splits", "good 5.jpg: train, val")]

    categories: list[Any] = [
        {"id": n, "name": name} for n, name in enumerate(("cat", "Cat ", "ghost", "dog", "bird"), 1)
    ]
    for n, split in enumerate((train, val)):
        for number in (2, 4) if split is val else (4,):
            split.box(split.images[0]["id"], [1, 1, 9 + number, 9], number)
        split.write([*categories, {"id": "five"}, categories[0]] if n == 0 else categories)
    planted += [("similar-class-names", "'cat', 'Cat '"), ("malformed-class", '{"id": "five"}')]
    planted.append(("copied-class", "category id 1: cat"))
    return planted


def _thing(corners: tuple[Any, ...], name: str = "cat") -> str:
    box = "".join(f"<{t}>{v}</{t}>" for t, v in zip(("xmin", "ymin", "xmax", "ymax"), corners, strict=False))
    return f"<object><name>{name}</name><bndbox>{box}</bndbox></object>"


def voc(root: Path) -> Planted:
    """A Pascal VOC data set with ImageSets."""
    for folder in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (root / folder).mkdir(parents=True)
    lists: dict[str, list[str]] = {"train": [], "val": [], "test": []}
    planted: Planted = []

    def annotate(stem: str, *things: str, split: str = "train", image: str | None = None, text: str = "") -> None:
        size = f"<size><width>{WIDTH}</width><height>{HEIGHT}</height></size>"
        content = f"<annotation><filename>{image or stem + '.jpg'}</filename>{size}{''.join(things)}</annotation>"
        (root / "Annotations" / f"{stem}.xml").write_text(text or content)
        lists[split].append(stem)

    def add(stem: str, *things: str, split: str = "train", content: bytes | None = None, ending: str = "jpg") -> None:
        annotate(stem, *(things or (_thing((4, 5, 24, 26)),)), split=split, image=f"{stem}.{ending}")
        data = encoded(zlib.crc32(stem.encode())) if content is None else content
        (root / "JPEGImages" / f"{stem}.{ending}").write_bytes(data)

    for n in range(HEALTHY):
        add(f"good{n}")
    for n in range(6):
        add(f"val{n}", _thing((4, 5, 24, 26)), _thing((1, 1, 9, 9), "dog"), split="val")
    add("test0", "<segmented>0</segmented>", split="test")
    planted.append(("split-without-boxes", "test: 1 image"))
    bad_things = {
        "zero-size": _thing((5, 5, 5, 9)),
        "negative-size": _thing((40, 5, 10, 9)),
        "outside": _thing((300, 5, 400, 9)),
        "not-a-number": _thing(("nan", 5, 10, 9)),
        "not-in-pixels": _thing((0.1, 0.1, 0.9, 0.9)),
        "reaches-outside": _thing((-9, -9, 20, 20)),
        "tiny-box": _thing((5, 5, 5.5, 9)),
        "no-box": "<object><name>cat</name></object>",
        "no-class": _thing((4, 5, 24, 26), " "),
        "malformed-box": _thing((4, "five", 24, 26)) + _thing((4, 5)),
        "duplicate-box": _thing((1, 2, 30, 40)) * 2,
    }
    for kind, things in bad_things.items():
        add(kind, things)
        planted.append((kind, kind))
        if kind not in ("reaches-outside", "tiny-box", "duplicate-box"):
            planted.append(("no-box-left", f"{kind}.jpg: {things.count('<object>')} left out"))
    add("unlisted")
    lists["train"].remove("unlisted")
    planted.append(("not-in-a-split", "JPEGImages/unlisted.jpg"))
    for stem, text in {
        "empty": " ",
        "truncated": "<annotation>\n<object><name>cat",
        "binary": "\x01\x02\x03",
        "encoding": '<?xml version="1.0" encoding="GB2312"?><annotation/>',
    }.items():
        add(stem)
        (root / "Annotations" / f"{stem}.xml").write_text(text)
        planted.append(("unreadable-annotations", f"Annotations/{stem}.xml:"))
    annotate("project", text="<project/>")
    planted.append(("foreign-file", "Annotations/project.xml"))
    lists["train"] += ["absent", "good1"]
    planted += [("no-annotation-file", "ImageSets/Main/train.txt:"), ("copied-entry", "good1")]
    annotate("good2 copy", _thing((1, 2, 3, 4)), image="good2.jpg")
    planted.append(("label-without-image", "good2 copy.xml: about good2.jpg"))
    lists["val"].append("good3")
    planted.append(("in-two-splits", "good3.jpg: train, val"))
    add("odd case", _thing((1, 2, 30, 40), "CAT"))
    planted.append(("similar-class-names", "'CAT', 'cat'"))
    for name, (kind, content) in bad_images().items():
        stem, ending = name.split(".")
        add(f"{ending} {stem}", content=content, ending=ending)
        planted.append((kind, f"{ending} {stem}.{ending}"))
    annotate("gone", _thing((4, 5, 24, 26)))
    planted.append(("missing-image", "JPEGImages/gone.jpg"))
    (root / "JPEGImages" / "unnamed.png").write_bytes(encoded(31, "PNG"))
    planted.append(("unlabeled-image", "JPEGImages/unnamed.png"))
    for name, stems in lists.items():
        (root / "ImageSets" / "Main" / f"{name}.txt").write_text("".join(f"{stem}\n" for stem in stems))
    return planted


def yolo(root: Path) -> Planted:
    """A YOLO data set with a data.yaml."""
    for folder in ("images/train", "images/val", "labels/train", "labels/val"):
        (root / folder).mkdir(parents=True)
    (root / "data.yaml").write_text("train: images/train\nval: images/val\nnames: [cat, dog, ghost]\n")
    planted: Planted = []

    def add(stem: str, *lines: str, split: str = "train", content: bytes | None = None, ending: str = "jpg") -> None:
        data = encoded(zlib.crc32(stem.encode())) if content is None else content
        (root / "images" / split / f"{stem}.{ending}").write_bytes(data)
        (root / "labels" / split / f"{stem}.txt").write_text("".join(f"{line}\n" for line in lines))

    for n in range(HEALTHY):
        add(f"good{n}", "0 0.5 0.5 0.4 0.4", "1 0.3 0.3 0.2 0.2")
    for n in range(6):
        add(f"val{n}", "0 0.5 0.5 0.4 0.4", "1 0.3 0.3 0.2 0.2", split="val")
    bad_lines = {
        "malformed-row": ("0 0.5 half 0.4 0.4", "0 0.5 0.5", "-1 0.5 0.5 0.4 0.4", "cat 0.5 0.5 0.4 0.4"),
        "unknown-class": ("7 0.5 0.5 0.4 0.4",),
        "not-normalized": ("0 32 24 10 10",),
        "zero-size": ("0 0.5 0.5 0 0.4",),
        "negative-size": ("0 0.5 0.5 -0.3 0.4",),
        "duplicate-box": ("0 0.5 0.5 0.4 0.4",) * 2,
    }
    for kind, lines in bad_lines.items():
        add(kind, *lines)
        written = f"{kind}.txt:" if kind in ("malformed-row", "unknown-class", "not-normalized") else f"{kind}.jpg"
        planted.append((kind, written))
        if kind != "duplicate-box":
            planted.append(("no-box-left", f"{kind}.jpg: {len(lines)} left out"))
    planted += [("malformed-row", f"malformed-row.txt:{line}:") for line in (2, 3, 4)] + [("unused-class", "ghost")]
    (root / "images" / "train" / "background.jpg").write_bytes(encoded(40))
    (root / "labels" / "train" / "stray.txt").write_text("0 0.5 0.5 0.4 0.4\n")
    planted += [("no-label-file", "background.jpg"), ("label-without-image", "stray.txt")]
    add("twin", "0 0.5 0.5 0.4 0.4")
    add("twin", "0 0.5 0.5 0.4 0.4", content=encoded(41, "PNG"), ending="png")
    planted += [("shared-label-file", f"twin.{ending}: labels/train/twin.txt") for ending in ("jpg", "png")]
    for name, (kind, content) in bad_images().items():
        if kind != "size-disagrees":  # YOLO has no sizes
            stem, ending = name.split(".")
            add(f"{ending} {stem}", "0 0.5 0.5 0.4 0.4", content=content, ending=ending)
            planted.append((kind, f"{ending} {stem}.{ending}"))
    planted.append(("box-of-unreadable-image", "jpg zero.jpg"))
    return planted


def csv(root: Path) -> Planted:
    """Two tables in pixels, with their images."""
    planted: Planted = []
    for split, count in (("train", HEALTHY), ("val", 6)):
        (root / split).mkdir(parents=True)
        lines = ["filename,width,height,class,xmin,ymin,xmax,ymax"]

        def add(name: str, *boxes: str, content: bytes | None = None) -> None:
            data = encoded(zlib.crc32(name.encode())) if content is None else content
            (root / split / name).write_bytes(data)  # noqa: B023
            lines.extend(f"{name},{WIDTH},{HEIGHT},{box}" for box in boxes)  # noqa: B023

        for n in range(count):
            add(f"{split} good{n}.jpg", "cat,4,5,24,26", "dog,1,2,30,40")
        if split == "train":
            bad_rows = {
                "malformed-row": ("cat,4,five,24,26", "cat,4,5"),
                "no-class": (",4,5,24,26",),
                "no-box": ("cat,,,,",),
                "not-a-number": ("cat,nan,5,24,26",),
                "negative-size": ("cat,24,5,4,26",),
                "zero-size": ("cat,24,5,24,26",),
                "outside": ("cat,300,5,400,26",),
                "not-in-pixels": ("cat,0.1,0.1,0.5,0.5",),
            }
            for kind, rows in bad_rows.items():
                name = f"{kind}.jpg"
                add(name, *rows)
                tabled = kind in ("malformed-row", "no-class", "no-box")
                planted.append((kind, f"train_labels.csv:{len(lines)}" if tabled else name))
                planted.append(("no-box-left", name))
            lines.append(f",{WIDTH},{HEIGHT},cat,4,5,24,26")
            planted.append(("malformed-row", f"train_labels.csv:{len(lines)}"))
            lines.append(f"gone.jpg,{WIDTH},{HEIGHT},cat,4,5,24,26")
            planted.append(("missing-image", "gone.jpg"))
            lines.append(f"TRAIN GOOD1.JPG,{WIDTH},{HEIGHT},cat,2,3,24,26")
            for name, (kind, content) in bad_images().items():
                add(name, "cat,4,5,24,26", content=content)
                planted.append((kind, name))
        (root / f"{split}_labels.csv").write_text("".join(f"{line}\n" for line in lines))
    return planted
