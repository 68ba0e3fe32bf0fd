"""A small COCO data set of colored rectangles, drawn from a seed, for tests that train for real."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

CLASSES = ("red", "green", "blue")


def draw(folder: Path, *, train: int = 24, val: int = 6, side: int = 64, seed: int = 0) -> Path:
    """Writes folder/{train,valid}/_annotations.coco.json and the images; returns the folder."""
    for name, count, offset in (("train", train, 0), ("valid", val, 10_000)):
        split = folder / name
        split.mkdir(parents=True)
        images, annotations = [], []
        for n in range(count):
            rng = np.random.default_rng([seed, offset + n])
            image = Image.fromarray(rng.integers(0, 60, (side, side, 3), np.uint8))
            pen = ImageDraw.Draw(image)
            for _ in range(int(rng.integers(1, 4))):
                label = int(rng.integers(3))
                width, height = rng.integers(side // 6, side // 2, 2).tolist()
                x, y = int(rng.integers(side - width)), int(rng.integers(side - height))
                color = tuple(200 if c == label else 30 for c in range(3))
                pen.rectangle((x, y, x + width - 1, y + height - 1), fill=color)
                annotations.append(
                    {
                        "id": len(annotations) + 1,
                        "image_id": n,
                        "category_id": label + 1,
                        "bbox": [x, y, width, height],
                        "area": width * height,
                        "iscrowd": 0,
                    }
                )
            image.save(split / f"{name}-{n}.jpg", quality=92)
            images.append({"id": n, "file_name": f"{name}-{n}.jpg", "width": side, "height": side})
        categories = [{"id": n + 1, "name": name} for n, name in enumerate(CLASSES)]
        document = {"images": images, "annotations": annotations, "categories": categories}
        (split / "_annotations.coco.json").write_text(json.dumps(document))
    return folder


def stoker(*arguments: str | Path, cwd: Path) -> subprocess.Popen[str]:
    """Starts the command line in a process of its own; stdout and stderr are one pipe."""
    command = [sys.executable, "-m", "stoker", *map(str, arguments)]
    return subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run_stoker(*arguments: str | Path, cwd: Path) -> tuple[int, str]:
    """(exit code, output) of a command that ends by itself."""
    process = stoker(*arguments, cwd=cwd)
    output, _ = process.communicate(timeout=600)
    return process.returncode, output
