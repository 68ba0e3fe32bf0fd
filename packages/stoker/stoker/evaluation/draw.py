"""Draws boxes on images, for `stoker predict` and TensorBoard. Uses only Pillow; images are not changed in place.

Files are not read here: images are pixels, upright as their boxes (`data/images/decode.py`).
"""

import colorsys
import dataclasses
import io
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from stoker.evaluation.detections import Detections
from stoker_watch.errors import writing
from stoker_watch.storage.local_files import write_atomic

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
"""Suffixes of images that `save_image` writes."""
MIN_DRAW_SIDE = 320
"""Images with a shorter long side are enlarged by an integer factor, so that text of 10 pixels fits."""
_GOLDEN_RATIO = 0.61803398875
"""Hue step between classes: the golden ratio separates any number of them (Vogel, Math. Biosciences 44, 1979)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageWithBoxes:
    """An image with its ground truth boxes and detections."""

    path: Path
    """The path that messages show."""
    load_image: Callable[[int], tuple[NDArray[np.uint8], tuple[int, int]]]
    """Maximum side in pixels → (thumbnail, uint8 [h, w, 3] RGB; original height and width, to which the boxes refer).
    Reads the image in the calling thread; raises the errors of reading."""
    gt: Detections
    detections: Detections


def class_color(label: int) -> tuple[int, int, int]:
    """RGB of a class, the same in every image and run."""
    red, green, blue = colorsys.hsv_to_rgb((label * _GOLDEN_RATIO) % 1.0, 0.85, (1.0, 0.8)[label // 8 % 2])
    return round(red * 255), round(green * 255), round(blue * 255)


def draw_boxes(
    image: Image.Image, detections: Detections, class_names: Sequence[str], *, scores: bool = True
) -> Image.Image:
    """A copy of `image` with boxes, class names and scores; RGB, enlarged if it is too small for text.

    detections: of this image, in its pixels. The boxes with the best scores are drawn last, on top. Their labels are
    placed first; one that has no free place at its box is left out, so that no label covers another.
    """
    drawn = image.convert("RGB")  # a copy, always
    factor = max(1, -(-MIN_DRAW_SIDE // max(1, *drawn.size)))
    if factor > 1:
        drawn = drawn.resize((drawn.width * factor, drawn.height * factor), Image.Resampling.NEAREST)
    long_side = max(drawn.size)
    line_width = max(1, round(long_side / 400))
    font = ImageFont.load_default(size=max(10, min(round(long_side / 55), min(drawn.size) // 4)))
    draw = ImageDraw.Draw(drawn)
    labels = []
    for n in np.argsort(detections.score, kind="stable").tolist():
        label = int(detections.label[n])
        bounds = (drawn.width, drawn.height) * 2
        # Coordinates far outside are clipped to just outside: the result is the same, but Pillow is faster.
        x0, y0, x1, y1 = np.clip(
            detections.boxes[n].astype(np.float64) * factor, -2 * line_width, np.add(bounds, 2 * line_width)
        ).tolist()
        if not (x1 > x0 and y1 > y0):
            continue
        draw.rectangle((x0, y0, x1, y1), outline=class_color(label), width=line_width)
        name = class_names[label] if label < len(class_names) else str(label)
        text = f"{name} {detections.score[n]:.2f}" if scores else name
        labels.append(((x0, y0, x1, y1), fit_text(text, font, drawn.width - 4), class_color(label)))
    taken = np.zeros((0, 4))
    for box, text, fill in reversed(labels):
        left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
        place = find_label_place(box, (right - left + 4, bottom - top + 4), drawn.size, taken)
        if place is not None:
            taken = np.concatenate([taken, place[None]])
            draw.rectangle((*place[:2].tolist(), *(place[2:] - 1).tolist()), fill=fill)
            dark = 0.299 * fill[0] + 0.587 * fill[1] + 0.114 * fill[2] < 140  # luma of ITU-R BT.601
            draw.text((place[0] + 2 - left, place[1] + 2 - top), text, fill="white" if dark else "black", font=font)
    return drawn


def find_label_place(
    box: tuple[float, float, float, float],
    size: tuple[float, float],
    image_size: tuple[int, int],
    taken: NDArray[np.float64],
) -> NDArray[np.float64] | None:
    """Where the label of a box can be, xyxy, inside the image and over none of the places `taken` [N, 4]; None where
    there is no such place at the box.

    box: xyxy; size, image_size: width and height. The places, in this order: above the box, below it, inside at its top
    and bottom, next to these; each at the left end of the box, then at the right.
    """
    (x0, y0, x1, y1), (width, height) = box, size
    rows = (y0 - height, y1, y0, y1 - height, y0 - 2 * height, y1 + height, y0 + height, y1 - 2 * height)
    corners = np.array([(x, y) for y in rows for x in (x0, x1 - width)]).round()
    corners = np.maximum(np.minimum(corners, np.subtract(image_size, size)), 0)
    places = np.concatenate([corners, corners + np.array(size)], axis=1)
    overlaps = (places[:, None, :2] < taken[:, 2:]) & (places[:, None, 2:] > taken[:, :2])
    free = places[(places[:, 2:] <= image_size).all(axis=1) & ~(overlaps[..., 0] & overlaps[..., 1]).any(axis=1)]
    return free[0] if len(free) else None


def fit_text(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: float) -> str:
    """The text, or as much of it as `width` pixels hold, with dots."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"


def draw_comparison(sample: ImageWithBoxes, class_names: Sequence[str], max_side: int) -> Image.Image:
    """Ground truth (left) and detections (right) of an image, each with sides of at most `max_side` pixels."""
    pixels, (height, width) = sample.load_image(max_side)
    thumbnail = Image.fromarray(pixels)
    scale_xyxy = np.array([thumbnail.width / width, thumbnail.height / height] * 2, np.float32)
    left, right = (
        draw_boxes(
            thumbnail, dataclasses.replace(detections, boxes=detections.boxes * scale_xyxy), class_names, scores=scores
        )
        for detections, scores in ((sample.gt, False), (sample.detections, True))
    )
    combined = Image.new("RGB", (left.width * 2 + 4, left.height), "white")
    combined.paste(left, (0, 0))
    combined.paste(right, (left.width + 4, 0))
    return combined


def save_image(image: Image.Image, path: Path, *, fix: str = "choose another file with --out") -> None:
    """Writes an image in the format of its suffix, and makes its folder. Raises StorageError with this fix."""
    encoded = io.BytesIO()
    with writing("The image cannot be written.", path, fix=fix):
        image.save(encoded, Image.registered_extensions()[path.suffix.lower()], quality=90)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, encoded.getvalue(), durable=False)
