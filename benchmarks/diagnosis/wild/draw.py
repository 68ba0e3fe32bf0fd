"""The data of all jobs: images/{red,green,blue}/N.jpg of 160 × 160 pixels, 240 in all, and photos/N.jpg of 1600 ×
1200, 48 in all. The class of an image is its brightest channel."""

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("red", "green", "blue")


def draw(base: Path) -> None:
    for name in CLASSES:
        (base / "images" / name).mkdir(parents=True)
    (base / "photos").mkdir()
    for n in range(240):
        save(base / "images" / CLASSES[n % 3] / f"{n:03d}.jpg", n, 160, 160)
    for n in range(48):
        save(base / "photos" / f"{n:03d}.jpg", n, 1200, 1600)


def save(path: Path, n: int, height: int, width: int) -> None:
    random = np.random.default_rng(n)
    coarse = random.integers(20, 140, (height // 8, width // 8, 3), dtype=np.uint8)
    coarse[..., n % 3] += 60
    image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    image.save(path, quality=90)
