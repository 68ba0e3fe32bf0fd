"""Images of the evaluation with ground truth and detections: small JPEGs in the page, with boxes as an SVG overlay.

As an overlay, boxes stay sharp on a phone, can be hidden, and have tooltips. For an image that is no longer available,
the page shows its numbers and the reason.
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
"""Longest side of an image in pixels, and of the overlay; it is shown at about 350. The browser enlarges smaller
images, but not the lines and labels of the overlay."""
MAX_JPEG_BYTES = 40_000
LETTER_WIDTH, CAPITAL_WIDTH, LINE_HEIGHT = 7.2, 2.0, 15
"""Estimated size of a label in overlay pixels, to avoid overlaps: per letter, extra per capital, per line. The font is
`.name` in style.css."""
_Xyxy = tuple[float, float, float, float]


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
    """An image with its boxes and counts."""
    name = Path(image_eval.path).name
    counts = f"{image_eval.tp} TP, {image_eval.fp} FP, {image_eval.fn} FN"
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
        placeholder = tag("div", f"The image cannot be shown: {reason}", class_="gone")
        return tag("figure", placeholder, caption, class_="image")
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
    return tag("figure", tag("div", image, overlay, class_="frame"), caption, class_="image")


def _describe_gt_boxes(image_eval: ImageEvaluation, class_names: Sequence[str]) -> str:
    """Ground truth in words: 3 car, 1 bus."""
    counts: dict[str, int] = {}
    for box in image_eval.gt_boxes:
        name = _class_name(class_names, box.label)
        counts[name] = counts.get(name, 0) + 1
    return "ground truth: " + (", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing")


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


def _boxes(
    image_eval: ImageEvaluation, class_names: Sequence[str], scale: tuple[float, float], shown_size: tuple[int, int]
) -> list[Markup]:
    """All boxes, then the labels of errors, so that labels are above boxes."""
    false_negatives = [box for box in image_eval.gt_boxes if not (box.detected or box.crowd)]
    false_positives = [box for box in image_eval.detections if box.error_type not in ("", "crowd")]
    shapes: list[Markup] = []
    for box in image_eval.gt_boxes:
        kind = "fn" if not (box.detected or box.crowd) else "gt"
        note = ", crowd" if box.crowd else ", missed" if kind == "fn" else ""
        shapes += _rectangle(box, kind, f"ground truth: {_class_name(class_names, box.label)}{note}", scale, shown_size)
    for detection in reversed(image_eval.detections):
        kind = "fp" if detection in false_positives else "tp"
        error_type = detection.error_type or "correct"
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
        shapes += _label(detection, "fp", caption, scale, shown_size, occupied)
    for box in missed_by_area:
        shapes += _label(box, "fn", _class_name(class_names, box.label), scale, shown_size, occupied)
    return shapes


def _rectangle(
    box: GroundTruthBox | DetectionBox, kind: str, title: str, scale: tuple[float, float], shown_size: tuple[int, int]
) -> list[Markup]:
    """A box whose line has a dark edge, to be visible on any image."""
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
    """The label of a box: above a detection, below missed ground truth. No label if it would overlap another one."""
    x0, y0, x1, y1 = _scale_box(box, scale, shown_size)
    width = LETTER_WIDTH * len(caption) + CAPITAL_WIDTH * sum(letter.isupper() for letter in caption)
    left = max(0.0, x1 - width) if x0 + width > shown_size[0] else x0
    above = y0 - 4 if y0 >= LINE_HEIGHT else y0 + LINE_HEIGHT - 2
    baseline = min(y1 + LINE_HEIGHT - 2, shown_size[1] - 4) if kind == "fn" else above
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
    """xyxy in overlay pixels, clipped to the image."""
    x0, x1 = (min(max(value * scale[0], 1.0), shown_size[0] - 1.0) for value in (box.box[0], box.box[2]))
    y0, y1 = (min(max(value * scale[1], 1.0), shown_size[1] - 1.0) for value in (box.box[1], box.box[3]))
    return x0, y0, max(x0, x1), max(y0, y1)


def _class_name(class_names: Sequence[str], label: int) -> str:
    return class_names[label] if label < len(class_names) else str(label)
