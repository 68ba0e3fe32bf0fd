"""The demo data set: images that stoker generates, to try everything without any data.

Six classes of textured, rotated, overlapping shapes in 2,000 + 300 JPEG files of 128×128 px, with COCO JSON per split.
Takes about 10 CPU-seconds, once; the files are in the cache folder. It is small but a detector has to learn (a tiny one
reaches AP50 0.8 in about two CPU-minutes). Not a benchmark. An image is a pure function of the seed and its number.
"""

import math
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from stoker_watch.storage.local_files import cache_folder, fsync_folder, temporary_folder, write_atomic

VERSION = 1
"""Of the images: increase it when they change, so that they are generated again."""
CLASSES = ("circle", "square", "triangle", "star", "cross", "ring")
IMAGE_SIDE = 128
"""Pixels."""
IMAGES_PER_SPLIT = {"train": 2000, "valid": 300}
"""Images per split folder."""
SEED = 2025
SHAPES_PER_IMAGE = (2, 6)
"""Number of shapes in an image, both ends included."""
RADIUS_RANGE = (0.07 * IMAGE_SIDE, 0.20 * IMAGE_SIDE)
MIN_VISIBLE_FRACTION = 0.15
"""A shape is not annotated if the later shapes leave less than this fraction of its box visible."""
NOISE_STD = 8.0
"""Standard deviation of the pixel noise, in 0 … 255."""
JPEG_QUALITY = 90
RESAMPLING_MODES = (Image.Resampling.NEAREST, Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)


class Shape(NamedTuple):
    label: int
    """0 … 5, index into CLASSES."""
    box: tuple[int, int, int, int]
    """xyxy in pixels: tight around the whole shape, including covered parts."""
    area: int
    """Visible pixels."""


def ensure_demo() -> Path:
    """Returns the folder of the demo data set in the cache; generates it if it does not exist. Safe if killed, and in
    several processes: it is generated in a temporary folder and renamed, so it is never incomplete."""
    target = cache_folder() / f"demo-v{VERSION}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(f".{target.name}-", target.parent) as staging_dir:
        try:
            for split, count in IMAGES_PER_SPLIT.items():
                draw_split(staging_dir / split, split, count)
            staging_dir.rename(target)
            fsync_folder(target.parent)
        except OSError:
            if not target.is_dir():  # else another process was faster
                raise
    return target


def draw_split(folder: Path, split: str, count: int) -> None:
    """Draws the first `count` images of a split ("train", "valid") into a new folder, with their COCO JSON."""
    folder.mkdir()
    images: list[dict[str, object]] = []
    annotations: list[dict[str, object]] = []
    for image_id in range(count):
        pixels, shapes = draw_image(split, image_id)
        name = f"{split}-{image_id:05d}.jpg"
        Image.fromarray(pixels).save(folder / name, quality=JPEG_QUALITY)
        images.append({"id": image_id, "file_name": name, "height": IMAGE_SIDE, "width": IMAGE_SIDE})
        for label, (x1, y1, x2, y2), area in shapes:
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image_id,
                    "category_id": label + 1,
                    "bbox": [x1, y1, x2 - x1, y2 - y1],
                    "area": area,
                    "iscrowd": 0,
                }
            )
    categories = [{"id": label + 1, "name": name} for label, name in enumerate(CLASSES)]
    coco = {"images": images, "annotations": annotations, "categories": categories}
    write_atomic(folder / "_annotations.coco.json", msgspec.json.encode(coco))


def draw_image(split: str, image_id: int) -> tuple[NDArray[np.uint8], list[Shape]]:
    """An image of a split ("train", "valid"): uint8 [IMAGE_SIDE, IMAGE_SIDE, 3] and its shapes, in drawing order."""
    rng = np.random.Generator(np.random.PCG64([SEED, list(IMAGES_PER_SPLIT).index(split), image_id]))
    pixels = 0.6 * _texture(rng) + 100 * rng.random(3)
    label_boxes = []
    visible: list[NDArray[np.bool_]] = []
    for _ in range(rng.integers(SHAPES_PER_IMAGE[0], SHAPES_PER_IMAGE[1], endpoint=True)):
        label = int(rng.integers(len(CLASSES)))
        mask = _draw_mask(rng, label)
        pixels = np.where(mask[..., None], 0.5 * _texture(rng) + 128 * rng.random(3), pixels)
        visible = [*(other & ~mask for other in visible), mask]
        label_boxes.append((label, _bounding_box(mask)))
    pixels += rng.normal(0, NOISE_STD, pixels.shape)
    shapes = [Shape(label, box, int(mask.sum())) for (label, box), mask in zip(label_boxes, visible, strict=True)]
    shown = [s for s in shapes if s.area > MIN_VISIBLE_FRACTION * (s.box[2] - s.box[0]) * (s.box[3] - s.box[1])]
    return pixels.clip(0, 255).astype(np.uint8), shown


def _texture(rng: np.random.Generator) -> NDArray[np.float64]:
    """Returns [IMAGE_SIDE, IMAGE_SIDE, 3], 0 … 255: a grid of a few random colors, sharp or blurred."""
    cells = int(rng.integers(2, 9))
    grid = (255 * rng.random((cells, cells, 3))).astype(np.uint8)
    resample = RESAMPLING_MODES[rng.integers(len(RESAMPLING_MODES))]
    return np.asarray(Image.fromarray(grid).resize((IMAGE_SIDE, IMAGE_SIDE), resample), np.float64)


def _draw_mask(rng: np.random.Generator, label: int) -> NDArray[np.bool_]:
    """[IMAGE_SIDE, IMAGE_SIDE], the pixels of a shape of random size, position and angle, fully inside the image."""
    radius = rng.uniform(*RADIUS_RANGE)
    x, y = rng.uniform(radius, IMAGE_SIDE - radius, 2)
    angle = rng.uniform(0, 2 * math.pi)
    mask_image = Image.new("L", (IMAGE_SIDE, IMAGE_SIDE))
    draw = ImageDraw.Draw(mask_image)
    name = CLASSES[label]
    if name in ("circle", "ring"):
        draw.circle((x, y), radius, fill=255)
        if name == "ring":
            draw.circle((x, y), 0.55 * radius, fill=0)
    else:
        rotation = complex(math.cos(angle), math.sin(angle)) * radius
        corners = [complex(x, y) + rotation * corner for corner in OUTLINES[name]]
        draw.polygon([(corner.real, corner.imag) for corner in corners], fill=255)
    return np.asarray(mask_image) > 0


def _regular_polygon(num_corners: int, *radii: float) -> tuple[complex, ...]:
    """Returns corners at equal angles, at the given distances from the center in turn."""
    angles = [2 * math.pi * i / num_corners for i in range(num_corners)]
    return tuple(radii[i % len(radii)] * complex(math.cos(angle), math.sin(angle)) for i, angle in enumerate(angles))


_ARM = tuple(corner / abs(1 + 0.33j) for corner in (0.33 + 1j, 0.33 + 0.33j, 1 + 0.33j))
"""A quarter of the outline of the cross, from the right side of its upper arm."""
OUTLINES = {
    "square": _regular_polygon(4, 1.0),
    "triangle": _regular_polygon(3, 1.0),
    "star": _regular_polygon(10, 1.0, 0.45),
    "cross": tuple(corner * quarter for quarter in (1, -1j, -1, 1j) for corner in _ARM),
}
"""Corners around the origin as complex numbers; a multiplication rotates them."""


def _bounding_box(mask: NDArray[np.bool_]) -> tuple[int, int, int, int]:
    xs, ys = np.flatnonzero(mask.any(0)), np.flatnonzero(mask.any(1))
    return int(xs[0]), int(ys[0]), int(xs[-1]) + 1, int(ys[-1]) + 1
