"""Draws boxes on pictures: for `stoker predict` and TensorBoard. Pillow only; pictures are never changed in place.

Files are not read here: pictures come as pixels, turned as their boxes are (`data/images/decode.py` sees to both).
"""

import colorsys
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from stoker.evaluation.metrics import Detections

READABLE_SIDE = 320
"""A picture whose longer side is below is enlarged by a whole factor, so that names fit: letters need 10 pixels."""
_GOLDEN = 0.61803398875
"""Steps of the hue by the golden ratio keep any number of classes apart (Vogel, Math. Biosciences 44, 1979)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shown:
    """A picture with what is in it and what was found in it."""

    path: Path
    """For messages."""
    picture: Callable[[int], tuple[NDArray[np.uint8], tuple[int, int]]]
    """Given a side in pixels, the picture at most that long, uint8 [h, w, 3] RGB, and its own height and width, in
    whose pixels the boxes are. It is read when it is asked for, in the thread that draws; raises what reading does."""
    truth: Detections
    found: Detections


def colour(label: int) -> tuple[int, int, int]:
    """RGB of a class: the same in every picture and every run."""
    red, green, blue = colorsys.hsv_to_rgb((label * _GOLDEN) % 1.0, 0.85, (1.0, 0.8)[label // 8 % 2])
    return round(red * 255), round(green * 255), round(blue * 255)


def draw_boxes(
    image: Image.Image, boxes: Detections, class_names: Sequence[str], *, scores: bool = True
) -> Image.Image:
    """A copy of `image` with the boxes, their classes and scores; RGB, enlarged where it is too small for letters.

    boxes: of this picture alone, in its pixels. The best scores are drawn last, on top.
    """
    picture = image.convert("RGB")  # a copy, always
    factor = max(1, -(-READABLE_SIDE // max(1, *picture.size)))
    if factor > 1:
        picture = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    longest = max(picture.size)
    line = max(1, round(longest / 400))
    font = ImageFont.load_default(size=max(10, round(longest / 55)))
    canvas = ImageDraw.Draw(picture)
    for n in np.argsort(boxes.score, kind="stable").tolist():
        label = int(boxes.label[n])
        sides = (picture.width, picture.height) * 2
        # Boxes may reach far outside; just outside looks the same, and Pillow would walk all the way.
        x0, y0, x1, y1 = np.clip(
            boxes.boxes[n].astype(np.float64) * factor, -2 * line, np.add(sides, 2 * line)
        ).tolist()
        if not (x1 > x0 and y1 > y0):
            continue
        canvas.rectangle((x0, y0, x1, y1), outline=colour(label), width=line)
        name = class_names[label] if label < len(class_names) else str(label)
        text = f"{name} {boxes.score[n]:.2f}" if scores else name
        _draw_name(canvas, picture.size, (x0, y0), text, colour(label), font)
    return picture


def _draw_name(
    canvas: ImageDraw.ImageDraw,
    size: tuple[int, int],
    corner: tuple[float, float],
    text: str,
    fill: tuple[int, int, int],
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
) -> None:
    """A name on its colour, above the box's corner; below it where there is no room; never outside the picture."""
    left, top, right, bottom = canvas.textbbox((0, 0), text, font=font)
    width, height = right - left + 4, bottom - top + 4
    x = min(max(0.0, corner[0]), max(0.0, size[0] - width))
    y = corner[1] - height if corner[1] >= height else min(max(0.0, corner[1]), max(0.0, size[1] - height))
    canvas.rectangle((x, y, x + width, y + height), fill=fill)
    red, green, blue = fill
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 140  # luma of ITU-R BT.601
    canvas.text((x + 2 - left, y + 2 - top), text, fill="white" if dark else "black", font=font)


def compare(shown: Shown, class_names: Sequence[str], side: int) -> Image.Image:
    """What is in a picture (left) beside what was found (right), each at most `side` pixels long."""
    pixels, (height, width) = shown.picture(side)
    small = Image.fromarray(pixels)
    per_side = np.array([small.width / width, small.height / height] * 2, np.float32)
    left, right = (
        draw_boxes(small, dataclasses.replace(boxes, boxes=boxes.boxes * per_side), class_names, scores=scores)
        for boxes, scores in ((shown.truth, False), (shown.found, True))
    )
    both = Image.new("RGB", (left.width * 2 + 4, left.height), "white")
    both.paste(left, (0, 0))
    both.paste(right, (left.width + 4, 0))
    return both
