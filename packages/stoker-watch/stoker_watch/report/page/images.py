"""Images of the evaluation with ground truth and detections: small JPEGs in the page, with boxes as an SVG overlay.

As an overlay, boxes stay sharp on a phone, can be hidden, and have tooltips. The copies
are made at the evaluation (`evaluation-images.json`); where there is none, the page shows the numbers and the reason.
"""

import base64
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from stoker_watch.report.page.markup import Markup, tag
from stoker_watch.runs.evaluation import ImageEvaluation, Thumbnail

OVERLAY_SIDE = 480
"""Longest side of the overlay in pixels; it is shown at about 350. The browser enlarges smaller images, but not the
lines and labels of the overlay."""
LINE_HEIGHT = 15
"""Height of a label in overlay pixels; the font is `.name` in style.css."""
Xyxy = tuple[float, float, float, float]


def render_image(
    image_eval: ImageEvaluation, class_names: Sequence[str], thumbnails: Mapping[int, Thumbnail]
) -> Markup:
    """An image with its boxes and counts. thumbnails: by image."""
    name = Path(image_eval.path).name
    counts = f"{image_eval.tp} TP, {image_eval.fp} FP, {image_eval.fn} FN"
    file = tag("span", name, class_="file", title=image_eval.path)
    caption = tag("figcaption", tag("b", f"F1 {image_eval.f1:.2f}"), " ", counts, file)
    thumbnail = thumbnails.get(image_eval.image_index)
    if thumbnail is None or thumbnail.error or min(*thumbnail.size, *thumbnail.original_size) < 1:
        reason = thumbnail.error if thumbnail is not None else "the run has no copy of it"
        placeholder = tag("div", f"The image cannot be shown: {reason}", class_="gone")
        return tag("figure", placeholder, caption, class_="image")
    numbers = Counter(_class_name(class_names, box.label) for box in image_eval.gt_boxes)
    ground_truth = ", ".join(f"{count} {name}" for name, count in numbers.items()) or "nothing"
    alt = f"{name}: {counts}; ground truth: {ground_truth}"
    scale = OVERLAY_SIDE / max(thumbnail.size)
    height, width = (max(1, round(side * scale)) for side in thumbnail.size)
    original = thumbnail.original_size
    data = base64.b64encode(thumbnail.jpeg).decode()
    image = tag("img", src=f"data:image/jpeg;base64,{data}", width=width, height=height, alt=alt)
    boxes = _draw(image_eval, class_names, (width, height), (width / original[1], height / original[0]))
    namespace = "http://www.w3.org/2000/svg"
    overlay = tag("svg", boxes, viewBox=f"0 0 {width} {height}", xmlns=namespace, aria_hidden="true")
    return tag("figure", tag("div", image, overlay, class_="frame"), caption, class_="image")


def _draw(
    image_eval: ImageEvaluation, class_names: Sequence[str], size: tuple[int, int], scale: tuple[float, float]
) -> list[Markup]:
    """All boxes, then the labels of errors above them: above a wrong detection, below missed ground truth. size: width
    and height of the overlay; scale: overlay pixels per pixel of the image."""

    shapes: list[Markup] = []
    labels: list[Markup] = []

    def draw(box: Xyxy, kind: str, title: str, label: str = "", *, is_below: bool = False) -> None:
        """The line of a box has a dark edge, to be visible on any image. A label begins at the left edge of its box; in
        the right half of the image it ends at its right edge."""
        x0, x1 = (min(max(value * scale[0], 1.0), size[0] - 1.0) for value in (box[0], box[2]))
        y0, y1 = (min(max(value * scale[1], 1.0), size[1] - 1.0) for value in (box[1], box[3]))
        sides = max(0.0, x1 - x0), max(0.0, y1 - y0)
        rect = {"x": round(x0, 1), "y": round(y0, 1), "width": round(sides[0], 1), "height": round(sides[1], 1)}
        shapes.append(tag("rect", **rect, class_=f"edge {kind}"))
        shapes.append(tag("g", tag("title", title), tag("rect", **rect, class_=f"box {kind}")))
        if label:
            above = y0 - 4 if y0 >= LINE_HEIGHT else y0 + LINE_HEIGHT - 2
            y = min(y0 + sides[1] + LINE_HEIGHT - 2, size[1] - 4) if is_below else above
            x, anchor = (x0 + sides[0], "end") if x0 > size[0] / 2 else (x0, None)
            labels.append(tag("text", label, x=round(x, 1), y=round(y, 1), text_anchor=anchor, class_=f"name {kind}"))

    for box in image_eval.gt_boxes:
        name, kind = _class_name(class_names, box.label), "gt" if box.detected or box.crowd else "fn"
        status = ", crowd" if box.crowd else ", missed" if kind == "fn" else ""
        draw(box.box, kind, f"ground truth: {name}{status}", name if kind == "fn" else "", is_below=True)
    for detection in reversed(image_eval.detections):  # the best on top
        name = f"{_class_name(class_names, detection.label)} {detection.score:.2f}"
        kind = "tp" if detection.error_type in ("", "crowd") else "fp"
        label = f"{name} · {detection.error_type}" if kind == "fp" else ""
        draw(detection.box, kind, f"{name}: {detection.error_type or 'correct'}", label)
    return shapes + labels


def _class_name(class_names: Sequence[str], label: int) -> str:
    """The name of a class, or its number if the model had more classes than the data set."""
    return class_names[label] if label < len(class_names) else str(label)
