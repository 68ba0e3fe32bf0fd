"""The demo data set: pictures that stoker draws itself, so that everything can be tried without any data.

Six classes of textured, rotated shapes that overlap, 2,000 + 300 JPEG files of 128×128 px with COCO JSON per split:
about 10 CPU-seconds, once, into the cache folder. Small and hard enough that a detector has to learn (a tiny one
reaches AP50 0.8 in about two CPU-minutes), not a benchmark. A picture is a pure function of the seed and its number.
"""

import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from stoker.errors import DataError
from stoker.storage.local_files import cache_folder, sync_folder, write_whole

VERSION = 1
"""Of the pictures: a folder of another version is drawn again."""
CLASSES = ("circle", "square", "triangle", "star", "cross", "ring")
SIDE = 128
"""Pixels."""
COUNTS = {"train": 2000, "valid": 300}
"""Pictures per split folder."""
SEED = 2025
SHAPES = (2, 6)
"""Shapes drawn in a picture, both ends included."""
RADIUS = (0.07 * SIDE, 0.20 * SIDE)
VISIBLE_SHARE = 0.15
"""Of its box: a shape of which less is visible, under the shapes drawn later, is left out of the annotations."""
NOISE = 8.0
"""Standard deviation of the pixels' noise, of 255."""
JPEG_QUALITY = 90
MARKER = "complete.json"
RESAMPLING = (Image.Resampling.NEAREST, Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)


class Shape(NamedTuple):
    label: int
    """0 … 5, index into CLASSES."""
    box: tuple[int, int, int, int]
    """xyxy in pixels: tight around the whole shape, also where others cover it."""
    area: int
    """Pixels of it that are visible."""


def ensure_demo(folder: Path | None = None) -> Path:
    """The folder of the demo data set, drawn now unless it is there. Safe to be killed, and in several processes.

    folder: where; None: in the cache folder. It is drawn beside that and renamed, so it is never half there; a folder
    that is not a complete demo of this version is replaced only in the cache, otherwise DataError is raised.
    """
    place = cache_folder() / f"demo-v{VERSION}" if folder is None else folder
    if _is_complete(place):
        return place
    if folder is not None and folder.exists():
        raise DataError(
            "The folder is not the demo data set.",
            place=folder,
            cause=f"it has no {MARKER} of version {VERSION}",
            fix="name a folder that does not exist yet",
        )
    place.parent.mkdir(parents=True, exist_ok=True)
    drawn = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    try:
        for split, count in COUNTS.items():
            _draw_split(drawn / split, split, count)
        write_whole(drawn / MARKER, msgspec.json.encode({"version": VERSION, "seed": SEED, "pictures": COUNTS}))
        _move(drawn, place)
    finally:
        shutil.rmtree(drawn, ignore_errors=True)
    return place


def _is_complete(folder: Path) -> bool:
    try:
        marker = msgspec.json.decode((folder / MARKER).read_bytes())
    except (OSError, msgspec.DecodeError):
        return False
    return bool(marker == {"version": VERSION, "seed": SEED, "pictures": COUNTS})


def _move(drawn: Path, place: Path) -> None:
    """Renames into place, unless another process was faster; what is there and incomplete makes way."""
    try:
        drawn.rename(place)
    except OSError:
        if _is_complete(place):
            return
        old = Path(tempfile.mkdtemp(prefix=f".{place.name}-old-", dir=place.parent))
        place.rename(old / place.name)
        drawn.rename(place)
        shutil.rmtree(old)
    sync_folder(place.parent)


def _draw_split(folder: Path, split: str, count: int) -> None:
    folder.mkdir()
    images: list[dict[str, object]] = []
    annotations: list[dict[str, object]] = []
    for number in range(count):
        pixels, shapes = draw_picture(split, number)
        name = f"{split}-{number:05d}.jpg"
        Image.fromarray(pixels).save(folder / name, quality=JPEG_QUALITY)
        images.append({"id": number, "file_name": name, "height": SIDE, "width": SIDE})
        for label, (x1, y1, x2, y2), area in shapes:
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": label + 1,
                    "bbox": [x1, y1, x2 - x1, y2 - y1],
                    "area": area,
                    "iscrowd": 0,
                }
            )
    categories = [{"id": label + 1, "name": name} for label, name in enumerate(CLASSES)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    write_whole(folder / "_annotations.coco.json", msgspec.json.encode(content))


def draw_picture(split: str, number: int) -> tuple[NDArray[np.uint8], list[Shape]]:
    """Picture `number` of a split ("train", "valid"): uint8 [SIDE, SIDE, 3] and its shapes, in the order drawn."""
    random = np.random.Generator(np.random.PCG64([SEED, list(COUNTS).index(split), number]))
    canvas = 0.6 * _texture(random) + 100 * random.random(3)
    drawn = []
    visible: list[NDArray[np.bool_]] = []
    for _ in range(random.integers(SHAPES[0], SHAPES[1], endpoint=True)):
        label = int(random.integers(len(CLASSES)))
        mask = _mask(random, label)
        canvas = np.where(mask[..., None], 0.5 * _texture(random) + 128 * random.random(3), canvas)
        visible = [*(other & ~mask for other in visible), mask]
        drawn.append((label, _box(mask)))
    canvas += random.normal(0, NOISE, canvas.shape)
    return canvas.clip(0, 255).astype(np.uint8), list(_shown(drawn, visible))


def _shown(drawn: list[tuple[int, tuple[int, int, int, int]]], visible: list[NDArray[np.bool_]]) -> Iterator[Shape]:
    for (label, box), mask in zip(drawn, visible, strict=True):
        area = int(mask.sum())
        if area > VISIBLE_SHARE * (box[2] - box[0]) * (box[3] - box[1]):
            yield Shape(label, box, area)


def _texture(random: np.random.Generator) -> NDArray[np.float64]:
    """[SIDE, SIDE, 3], 0 … 255: a few random colours in a grid, sharp or blurred."""
    cells = int(random.integers(2, 9))
    grid = (255 * random.random((cells, cells, 3))).astype(np.uint8)
    how = RESAMPLING[random.integers(len(RESAMPLING))]
    return np.asarray(Image.fromarray(grid).resize((SIDE, SIDE), how), np.float64)


def _mask(random: np.random.Generator, label: int) -> NDArray[np.bool_]:
    """[SIDE, SIDE], the pixels of a shape of random size, place and angle, wholly inside the picture."""
    radius = random.uniform(*RADIUS)
    x, y = random.uniform(radius, SIDE - radius, 2)
    angle = random.uniform(0, 2 * math.pi)
    picture = Image.new("L", (SIDE, SIDE))
    draw = ImageDraw.Draw(picture)
    name = CLASSES[label]
    if name in ("circle", "ring"):
        draw.circle((x, y), radius, fill=255)
        if name == "ring":
            draw.circle((x, y), 0.55 * radius, fill=0)
    else:
        turn = complex(math.cos(angle), math.sin(angle)) * radius
        corners = [complex(x, y) + turn * corner for corner in OUTLINES[name]]
        draw.polygon([(corner.real, corner.imag) for corner in corners], fill=255)
    return np.asarray(picture) > 0


def _regular(corners: int, *radii: float) -> tuple[complex, ...]:
    """Corners at equal angles, at the given distances from the centre in turn."""
    angles = [2 * math.pi * i / corners for i in range(corners)]
    return tuple(radii[i % len(radii)] * complex(math.cos(angle), math.sin(angle)) for i, angle in enumerate(angles))


_ARM = tuple(corner / abs(1 + 0.33j) for corner in (0.33 + 1j, 0.33 + 0.33j, 1 + 0.33j))
"""A quarter of the cross: the right side of its upper arm, and on."""
OUTLINES = {
    "square": _regular(4, 1.0),
    "triangle": _regular(3, 1.0),
    "star": _regular(10, 1.0, 0.45),
    "cross": tuple(corner * quarter for quarter in (1, -1j, -1, 1j) for corner in _ARM),
}
"""Corners around the origin as complex numbers; a turn is a multiplication."""


def _box(mask: NDArray[np.bool_]) -> tuple[int, int, int, int]:
    columns, rows = np.flatnonzero(mask.any(0)), np.flatnonzero(mask.any(1))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1
