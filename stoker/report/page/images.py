"""Pictures of the evaluation with true and found boxes: small JPEGs inside the page, boxes as lines over them.

The boxes are not painted into the picture: they stay sharp on a phone, can be hidden, and say what they are when asked.
A picture that is not there any more leaves its numbers and a sentence.
"""

import base64
import io
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from stoker.data.images import source
from stoker.data.images.decode import thumbnail
from stoker.errors import DataError, StokerError, StorageError
from stoker.evaluation.document import DetectionBox, GroundTruthBox, ImageEvaluation
from stoker.report.page.markup import Markup, tag

MAX_IMAGE_SIDE = 480
"""Longest side of a picture in the page, pixels, and of the plane on which its boxes lie: it is shown at some 350. A
smaller picture is enlarged by the browser, lines and names are not."""
MAX_JPEG_BYTES = 40_000
LETTER_WIDTH, CAPITAL_WIDTH, LINE_HEIGHT = 7.2, 2.0, 15
"""Of a box's name in pixels of the picture, to keep names apart: a letter, what a capital adds, a line. `.name` in
style.css has the font."""
_Xyxy = tuple[float, float, float, float]


def gallery(images: Sequence[ImageEvaluation], class_names: Sequence[str]) -> Markup:
    """Pictures side by side."""
    return tag("div", [render_image(image_eval, class_names) for image_eval in images], class_="pictures")


def legend() -> Markup:
    """What the lines mean, and switches to hide them."""
    kinds = (
        ("true", "true box"),
        ("missed", "true box that was not found"),
        ("right", "found, right"),
        ("wrong", "found, wrong"),
    )
    return tag(
        "div",
        [
            tag(
                "label",
                tag("input", type="checkbox", checked=True, id=f"show-{name}"),
                tag("span", class_=f"sample {name}", aria_hidden="true"),
                title,
            )
            for name, title in kinds
        ],
        class_="legend",
        role="group",
        aria_label="boxes to show",
    )


def render_image(image_eval: ImageEvaluation, class_names: Sequence[str]) -> Markup:
    """A picture with its boxes and what is right and wrong in it."""
    name = Path(image_eval.path).name
    counts = f"{image_eval.tp} right, {image_eval.fp} wrong, {image_eval.fn} not found"
    caption = tag(
        "figcaption",
        tag("b", f"F1 {image_eval.f1:.2f}"),
        " ",
        counts,
        tag("span", name, class_="file", title=image_eval.path),
    )
    try:
        data, (width, height), original = _encode_jpeg(image_eval)
    except (OSError, DataError, StorageError) as error:
        reason = error.what if isinstance(error, StokerError) else (error.strerror or str(error))
        placeholder = tag("div", f"The picture cannot be shown: {reason}", class_="gone")
        return tag("figure", placeholder, caption, class_="picture")
    image = tag(
        "img",
        src=f"data:image/jpeg;base64,{data}",
        width=width,
        height=height,
        alt=f"{name}: {counts}; {_describe_gt_boxes(image_eval, class_names)}",
    )
    scale = width / original[1], height / original[0]
    overlay = tag(
        "svg",
        _boxes(image_eval, class_names, scale, (width, height)),
        viewBox=f"0 0 {width} {height}",
        xmlns="http://www.w3.org/2000/svg",
        aria_hidden="true",
    )
    return tag("figure", tag("div", image, overlay, class_="frame"), caption, class_="picture")


def _describe_gt_boxes(image_eval: ImageEvaluation, class_names: Sequence[str]) -> str:
    """True boxes in words: 3 car, 1 bus."""
    counts: dict[str, int] = {}
    for box in image_eval.gt_boxes:
        name = _class_name(class_names, box.label)
        counts[name] = counts.get(name, 0) + 1
    return "in it: " + (", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing")


def _encode_jpeg(image_eval: ImageEvaluation) -> tuple[str, tuple[int, int], tuple[int, int]]:
    """(base64; width and height at which it is shown; height and width of the original, as its boxes were drawn).

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


def _boxes(
    image_eval: ImageEvaluation, class_names: Sequence[str], scale: tuple[float, float], shown_size: tuple[int, int]
) -> list[Markup]:
    """Lines of all boxes, then the names of mistakes, which so lie above all lines."""
    false_negatives = [box for box in image_eval.gt_boxes if not (box.detected or box.crowd)]
    false_positives = [box for box in image_eval.detections if box.error_type not in ("", "crowd")]
    shapes: list[Markup] = []
    for box in image_eval.gt_boxes:
        kind = "missed" if not (box.detected or box.crowd) else "true"
        crowd = ", a region of many" if box.crowd else ", not found" if kind == "missed" else ""
        shapes += _rectangle(box, kind, f"true: {_class_name(class_names, box.label)}{crowd}", scale, shown_size)
    for detection in reversed(image_eval.detections):
        kind = "wrong" if detection in false_positives else "right"
        error_type = detection.error_type or "right"
        shapes += _rectangle(
            detection,
            kind,
            f"{_class_name(class_names, detection.label)} {detection.score:.2f}: {error_type}",
            scale,
            shown_size,
        )
    missed_by_area = sorted(false_negatives, key=lambda box: -(box.box[2] - box.box[0]) * (box.box[3] - box.box[1]))
    occupied: list[_Xyxy] = []
    for detection in false_positives:
        caption = f"{_class_name(class_names, detection.label)} {detection.score:.2f} · {detection.error_type}"
        shapes += _label(detection, "wrong", caption, scale, shown_size, occupied)
    for box in missed_by_area:
        shapes += _label(box, "missed", _class_name(class_names, box.label), scale, shown_size, occupied)
    return shapes


def _rectangle(
    box: GroundTruthBox | DetectionBox, kind: str, title: str, scale: tuple[float, float], shown_size: tuple[int, int]
) -> list[Markup]:
    """A box with a dark edge around its line, so that it shows on any picture."""
    x0, y0, x1, y1 = _scale_box(box, scale, shown_size)
    rect = {"x": round(x0, 1), "y": round(y0, 1), "width": round(x1 - x0, 1), "height": round(y1 - y0, 1)}
    return [
        tag("rect", **rect, class_=f"edge {kind}"),
        tag("g", tag("title", title), tag("rect", **rect, class_=f"box {kind}")),
    ]


def _label(
    box: GroundTruthBox | DetectionBox,
    kind: str,
    caption: str,
    scale: tuple[float, float],
    shown_size: tuple[int, int],
    occupied: list[_Xyxy],
) -> list[Markup]:
    """The name of a box, above it if it was found, below it if it was missed; none where another name is already."""
    x0, y0, x1, y1 = _scale_box(box, scale, shown_size)
    width = LETTER_WIDTH * len(caption) + CAPITAL_WIDTH * sum(letter.isupper() for letter in caption)
    left = max(0.0, x1 - width) if x0 + width > shown_size[0] else x0
    above = y0 - 4 if y0 >= LINE_HEIGHT else y0 + LINE_HEIGHT - 2
    baseline = min(y1 + LINE_HEIGHT - 2, shown_size[1] - 4) if kind == "missed" else above
    label_rect = (left, baseline - LINE_HEIGHT, left + width, baseline)
    if any(
        label_rect[0] < other[2] and other[0] < label_rect[2] and label_rect[1] < other[3] and other[1] < label_rect[3]
        for other in occupied
    ):
        return []
    occupied.append(label_rect)
    background = tag(
        "rect",
        x=round(left, 1),
        y=round(baseline - LINE_HEIGHT + 3, 1),
        width=round(width, 1),
        height=LINE_HEIGHT,
        class_=f"chip {kind}",
    )
    text_attributes = {"x": round(left + 2, 1), "y": round(baseline, 1), "textLength": round(width - 4, 1)}
    return [background, tag("text", caption, **text_attributes, lengthAdjust="spacingAndGlyphs", class_=f"name {kind}")]


def _scale_box(box: GroundTruthBox | DetectionBox, scale: tuple[float, float], shown_size: tuple[int, int]) -> _Xyxy:
    """Corners in the small picture, not beyond its edge."""
    x0, x1 = (min(max(value * scale[0], 1.0), shown_size[0] - 1.0) for value in (box.box[0], box.box[2]))
    y0, y1 = (min(max(value * scale[1], 1.0), shown_size[1] - 1.0) for value in (box.box[1], box.box[3]))
    return x0, y0, max(x0, x1), max(y0, y1)


def _class_name(class_names: Sequence[str], label: int) -> str:
    return class_names[label] if label < len(class_names) else str(label)
