"""Images of the evaluation with ground truth and detections: small JPEGs in the page, with boxes as an SVG overlay.

As an overlay, boxes stay sharp on a phone, can be hidden, and have tooltips. For an image that is no longer available,
the page shows its numbers and the reason.
"""

import base64
import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from stoker.data.images import source
from stoker.data.images.decode import thumbnail
from stoker.errors import DataError, StokerError, StorageError
from stoker.evaluation.metrics import ImageEvaluation
from stoker.report.page.markup import Markup, tag

MAX_IMAGE_SIDE = 480
"""Longest side of an image in pixels, and of the overlay; it is shown at about 350. The browser enlarges smaller
images, but not the lines and labels of the overlay."""
MAX_JPEG_BYTES = 40_000
LETTER_WIDTH, CAPITAL_WIDTH, LINE_HEIGHT = 7.2, 2.0, 15
"""Estimated size of a label in overlay pixels, to avoid overlaps: per letter, extra per capital, per line. The font is
`.name` in style.css."""
Xyxy = tuple[float, float, float, float]


def gallery(images: Sequence[ImageEvaluation], class_names: Sequence[str]) -> Markup:
    """A grid of images."""
    return tag("div", [render_image(image_eval, class_names) for image_eval in images], class_="images")


def legend() -> Markup:
    """The meaning of the lines, with switches to hide them."""
    kinds = (
        ("gt", "ground truth"),
        ("fn", "missed ground truth (FN)"),
        ("tp", "correct detection (TP)"),
        ("fp", "wrong detection (FP)"),
    )
    switches = [
        tag(
            "label",
            tag("input", type="checkbox", checked=True, id=f"show-{name}"),
            tag("span", class_=f"sample {name}", aria_hidden="true"),
            title,
        )
        for name, title in kinds
    ]
    return tag("div", switches, class_="legend", role="group", aria_label="boxes to show")


def render_image(image_eval: ImageEvaluation, class_names: Sequence[str]) -> Markup:
    """An image with its boxes and counts."""
    name = Path(image_eval.path).name
    counts = f"{image_eval.tp} TP, {image_eval.fp} FP, {image_eval.fn} FN"
    file = tag("span", name, class_="file", title=image_eval.path)
    caption = tag("figcaption", tag("b", f"F1 {image_eval.f1:.2f}"), " ", counts, file)
    try:
        data, (width, height), original = _encode_jpeg(image_eval)
    except (OSError, DataError, StorageError) as error:
        reason = error.what if isinstance(error, StokerError) else (error.strerror or str(error))
        placeholder = tag("div", f"The image cannot be shown: {reason}", class_="gone")
        return tag("figure", placeholder, caption, class_="image")
    numbers = Counter(_class_name(class_names, box.label) for box in image_eval.gt_boxes)
    ground_truth = ", ".join(f"{count} {name}" for name, count in numbers.items()) or "nothing"
    alt = f"{name}: {counts}; ground truth: {ground_truth}"
    image = tag("img", src=f"data:image/jpeg;base64,{data}", width=width, height=height, alt=alt)
    boxes = _Overlay((width, height), (width / original[1], height / original[0])).draw(image_eval, class_names)
    namespace = "http://www.w3.org/2000/svg"
    overlay = tag("svg", boxes, viewBox=f"0 0 {width} {height}", xmlns=namespace, aria_hidden="true")
    return tag("figure", tag("div", image, overlay, class_="frame"), caption, class_="image")


def _encode_jpeg(image_eval: ImageEvaluation) -> tuple[str, tuple[int, int], tuple[int, int]]:
    """(JPEG in base64; shown width and height; height and width of the original in the orientation of its boxes).

    Raises OSError, DataError, StorageError.
    """
    data = source.read(image_eval.path, image_eval.byte_range)
    pixels, original = thumbnail(data, Path(image_eval.path), MAX_IMAGE_SIDE, annotated_size=image_eval.size or (0, 0))
    small = Image.fromarray(pixels)
    scale = MAX_IMAGE_SIDE / max(small.size)
    shown_size = max(1, round(small.width * scale)), max(1, round(small.height * scale))
    for quality in (82, 70, 55, 40, 25, 10):
        buffer = io.BytesIO()
        small.save(buffer, "JPEG", quality=quality, optimize=True)
        if buffer.tell() <= MAX_JPEG_BYTES:
            break
    return base64.b64encode(buffer.getvalue()).decode(), shown_size, original


class _Overlay:
    """The boxes of an image. size: width and height of the overlay; scale: overlay pixels per pixel of the image."""

    def __init__(self, size: tuple[int, int], scale: tuple[float, float]) -> None:
        self._size = size
        self._scale = scale
        self._labels: list[Xyxy] = []
        """Places of the labels."""

    def draw(self, image_eval: ImageEvaluation, class_names: Sequence[str]) -> list[Markup]:
        """All boxes, then the labels of errors, so that labels are above boxes: wrong detections, the best first, then
        missed boxes, the largest first."""
        shapes: list[Markup] = []
        errors: list[tuple[Xyxy, str, str]] = []
        missed: list[tuple[Xyxy, str, str]] = []
        for box in image_eval.gt_boxes:
            xyxy, name = self._scaled(box.box), _class_name(class_names, box.label)
            kind = "gt" if box.detected or box.crowd else "fn"
            status = ", crowd" if box.crowd else ", missed" if kind == "fn" else ""
            shapes += _rectangle(xyxy, kind, f"ground truth: {name}{status}")
            if kind == "fn":
                missed.append((xyxy, kind, name))
        rectangles = []
        for detection in image_eval.detections:
            name = f"{_class_name(class_names, detection.label)} {detection.score:.2f}"
            xyxy, kind = self._scaled(detection.box), "tp" if detection.error_type in ("", "crowd") else "fp"
            rectangles.append(_rectangle(xyxy, kind, f"{name}: {detection.error_type or 'correct'}"))
            if kind == "fp":
                errors.append((xyxy, kind, f"{name} · {detection.error_type}"))
        missed.sort(key=lambda label: -(label[0][2] - label[0][0]) * (label[0][3] - label[0][1]))
        shapes += [shape for rectangle in reversed(rectangles) for shape in rectangle]
        return shapes + [shape for label in errors + missed for shape in self._label(*label)]

    def _scaled(self, box: Xyxy) -> Xyxy:
        """xyxy in overlay pixels, clipped to the image."""
        x0, x1 = (min(max(value * self._scale[0], 1.0), self._size[0] - 1.0) for value in (box[0], box[2]))
        y0, y1 = (min(max(value * self._scale[1], 1.0), self._size[1] - 1.0) for value in (box[1], box[3]))
        return x0, y0, max(x0, x1), max(y0, y1)

    def _label(self, xyxy: Xyxy, kind: str, caption: str) -> list[Markup]:
        """The label of a box: above a detection, below missed ground truth. No label if it would overlap another."""
        x0, y0, x1, y1 = xyxy
        width = LETTER_WIDTH * len(caption) + CAPITAL_WIDTH * sum(letter.isupper() for letter in caption)
        left = max(0.0, x1 - width) if x0 + width > self._size[0] else x0
        above = y0 - 4 if y0 >= LINE_HEIGHT else y0 + LINE_HEIGHT - 2
        baseline = min(y1 + LINE_HEIGHT - 2, self._size[1] - 4) if kind == "fn" else above
        x_range, y_range = (left, left + width), (baseline - LINE_HEIGHT, baseline)
        for a0, b0, a1, b1 in self._labels:
            if x_range[0] < a1 and a0 < x_range[1] and y_range[0] < b1 and b0 < y_range[1]:
                return []
        self._labels.append((x_range[0], y_range[0], x_range[1], y_range[1]))
        chip = {"x": round(left, 1), "y": round(baseline - LINE_HEIGHT + 3, 1), "width": round(width, 1)}
        place = {"x": round(left + 2, 1), "y": round(baseline, 1), "textLength": round(width - 4, 1)}
        return [
            tag("rect", **chip, height=LINE_HEIGHT, class_=f"chip {kind}"),
            tag("text", caption, **place, lengthAdjust="spacingAndGlyphs", class_=f"name {kind}"),
        ]


def _rectangle(xyxy: Xyxy, kind: str, title: str) -> list[Markup]:
    """A box whose line has a dark edge, to be visible on any image."""
    x0, y0, x1, y1 = xyxy
    rect = {"x": round(x0, 1), "y": round(y0, 1), "width": round(x1 - x0, 1), "height": round(y1 - y0, 1)}
    box = tag("g", tag("title", title), tag("rect", **rect, class_=f"box {kind}"))
    return [tag("rect", **rect, class_=f"edge {kind}"), box]


def _class_name(class_names: Sequence[str], label: int) -> str:
    """The name of a class, or its number if the model had more classes than the data set."""
    return class_names[label] if label < len(class_names) else str(label)
