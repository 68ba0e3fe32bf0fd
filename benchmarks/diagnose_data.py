"""The pictures of `diagnosis.py`: small JPEGs with a class in the name, and COCO data sets for `stoker train`."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

COUNT, SIDE = 64, 96


SETS = {"plain": (8, 0), "long_val": (64, 0), "one_broken": (8, 1), "broken": (8, 24)}
"""Data sets for `stoker train`: validation pictures, and training pictures that end in their middle."""


def draw_all(folder: Path) -> None:
    """pictures/ for plain jobs; bucket/ for what `stoker train` reads from a bucket."""
    draw_plain(folder / "pictures")
    draw_ours(folder / "bucket", side=192, kind="jpg", val=8, broken=0)


def data_set(folder: Path, name: str) -> Path:
    """ours/NAME, drawn when it is not there: one of SETS, or `pngN` of N pixels a side."""
    place = folder / "ours" / name
    if not place.exists():
        if name in SETS:
            val, broken = SETS[name]
            draw_ours(place, side=128, kind="jpg", val=val, broken=broken)
        else:
            draw_ours(place, side=int(name.removeprefix("png")), kind="png", val=8, broken=0, count=32)
    return place


def draw_plain(folder: Path) -> None:
    """CLASS-N.jpg; the class is the channel that is brighter, 3: none."""
    folder.mkdir(parents=True)
    for n in range(COUNT):
        noise = np.random.default_rng(n).integers(0, 120, (SIDE, SIDE, 3))
        if n % 4 < 3:
            noise[..., n % 4] += 30
        Image.fromarray(noise.astype(np.uint8)).save(folder / f"{n % 4}-{n}.jpg", quality=90)


def draw_ours(folder: Path, *, side: int, kind: str, val: int, broken: int, count: int = COUNT) -> None:
    """A COCO data set of coloured rectangles on noise; the first `broken` training pictures end in their middle."""
    for split, pictures, offset in (("train", count, 0), ("valid", val, 10_000)):
        (folder / split).mkdir(parents=True)
        images, annotations = [], []
        for n in range(pictures):
            lots = np.random.default_rng(offset + n)
            pixels = lots.integers(0, 60, (side, side, 3), np.uint8)
            for _ in range(int(lots.integers(1, 4))):
                label = int(lots.integers(3))
                width, height = lots.integers(side // 6, side // 2, 2).tolist()
                x, y = int(lots.integers(side - width)), int(lots.integers(side - height))
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
