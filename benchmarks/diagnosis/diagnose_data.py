"""The images of `diagnose.py`: small JPEGs with a class in the name, and COCO data sets for `stoker train`."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

COUNT, SIDE = 64, 96


SETS = {"plain": (8, 0), "long_val": (64, 0), "one_broken": (8, 1), "broken": (8, 24)}
"""Data set for `stoker train` → (validation images, training images that are truncated)."""


def draw_all(folder: Path) -> None:
    """images/ for plain jobs; bucket/ for what `stoker train` reads from a bucket."""
    draw_plain(folder / "images")
    draw_coco(folder / "bucket", side=192, kind="jpg", val=8, broken=0)


def data_set(folder: Path, name: str) -> Path:
    """native/NAME, generated if it does not exist: one of SETS, or `pngN` of N×N pixels."""
    path = folder / "native" / name
    if not path.exists():
        if name in SETS:
            val, broken = SETS[name]
            draw_coco(path, side=128, kind="jpg", val=val, broken=broken)
        else:
            draw_coco(path, side=int(name.removeprefix("png")), kind="png", val=8, broken=0, count=32)
    return path


def draw_plain(folder: Path) -> None:
    """CLASS-N.jpg; the class is the index of the brightest channel, 3: none."""
    folder.mkdir(parents=True)
    for n in range(COUNT):
        noise = np.random.default_rng(n).integers(0, 120, (SIDE, SIDE, 3))
        if n % 4 < 3:
            noise[..., n % 4] += 30
        Image.fromarray(noise.astype(np.uint8)).save(folder / f"{n % 4}-{n}.jpg", quality=90)


def draw_coco(folder: Path, *, side: int, kind: str, val: int, broken: int, count: int = COUNT) -> None:
    """A COCO data set of colored rectangles on noise; the first `broken` training images are truncated."""
    for split, num_images, offset in (("train", count, 0), ("valid", val, 10_000)):
        (folder / split).mkdir(parents=True)
        images, annotations = [], []
        for n in range(num_images):
            rng = np.random.default_rng(offset + n)
            pixels = rng.integers(0, 60, (side, side, 3), np.uint8)
            for _ in range(int(rng.integers(1, 4))):
                label = int(rng.integers(3))
                width, height = rng.integers(side // 6, side // 2, 2).tolist()
                x, y = int(rng.integers(side - width)), int(rng.integers(side - height))
                pixels[y : y + height, x : x + width] = [200 if c == label else 30 for c in range(3)]
                annotations.append(
                    {"id": len(annotations) + 1, "image_id": n, "category_id": label + 1, "iscrowd": 0,
                     "bbox": [x, y, width, height], "area": width * height}
                )  # fmt: skip
            path = folder / split / f"{split}-{n}.{kind}"
            if kind == "png":
                Image.fromarray(pixels).save(path, compress_level=1)
            else:
                Image.fromarray(pixels).save(path, quality=92)
            if split == "train" and n < broken:
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            images.append({"id": n, "file_name": path.name, "width": side, "height": side})
        categories = [{"id": n + 1, "name": name} for n, name in enumerate(("red", "green", "blue"))]
        document = {"images": images, "annotations": annotations, "categories": categories}
        (folder / split / "_annotations.coco.json").write_text(json.dumps(document))
