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
from stoker.evaluation.document import FoundBox, PictureEvaluation, TrueBox
from stoker.report.page.markup import Markup, tag

SIDE = 480
"""Longest side of a picture in the page, pixels, and of the plane on which its boxes lie: it is shown at some 350. A
smaller picture is enlarged by the browser, lines and names are not."""
MOST_BYTES = 40_000
LETTER_WIDTH, CAPITAL_WIDTH, LINE_HEIGHT = 7.2, 2.0, 15
"""Of a box's name in pixels of the picture, to keep names apart: a letter, what a capital adds, a line. `.name` in
style.css has the font."""
_Corners = tuple[float, float, float, float]


def gallery(pictures: Sequence[PictureEvaluation], class_names: Sequence[str]) -> Markup:
    """Pictures side by side."""
    return tag("div", [picture(one, class_names) for one in pictures], class_="pictures")


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


def picture(one: PictureEvaluation, class_names: Sequence[str]) -> Markup:
    """A picture with its boxes and what is right and wrong in it."""
    name = Path(one.path).name
    counts = f"{one.right} right, {one.wrong} wrong, {one.not_found} not found"
    caption = tag(
        "figcaption", tag("b", f"F1 {one.f1:.2f}"), " ", counts, tag("span", name, class_="file", title=one.path)
    )
    try:
        data, (width, height), original = _jpeg(one)
    except (OSError, DataError, StorageError) as error:
        reason = error.what if isinstance(error, StokerError) else (error.strerror or str(error))
        gone = tag("div", f"The picture cannot be shown: {reason}", class_="gone")
        return tag("figure", gone, caption, class_="picture")
    image = tag(
        "img",
        src=f"data:image/jpeg;base64,{data}",
        width=width,
        height=height,
        alt=f"{name}: {counts}; {_content(one, class_names)}",
    )
    scale = width / original[1], height / original[0]
    lines = tag(
        "svg",
        _boxes(one, class_names, scale, (width, height)),
        viewBox=f"0 0 {width} {height}",
        xmlns="http://www.w3.org/2000/svg",
        aria_hidden="true",
    )
    return tag("figure", tag("div", image, lines, class_="frame"), caption, class_="picture")


def _content(one: PictureEvaluation, class_names: Sequence[str]) -> str:
    """True boxes in words: 3 car, 1 bus."""
    counts: dict[str, int] = {}
    for box in one.true_boxes:
        name = _name(class_names, box.label)
        counts[name] = counts.get(name, 0) + 1
    return "in it: " + (", ".join(f"{count} {name}" for name, count in counts.items()) or "nothing")


def _jpeg(one: PictureEvaluation) -> tuple[str, tuple[int, int], tuple[int, int]]:
    """(base64; width and height at which it is shown; height and width of the original, as its boxes were drawn).

    Raises OSError, DataError, StorageError.
    """
    data = source.read(one.path, one.span)
    pixels, original = thumbnail(data, Path(one.path), SIDE, said=one.size or (0, 0))
    small = Image.fromarray(pixels)
    enlarged = SIDE / max(small.size)
    sides = max(1, round(small.width * enlarged)), max(1, round(small.height * enlarged))
    for quality in (82, 70, 55, 40, 25, 10):
        file_ = io.BytesIO()
        small.save(file_, "JPEG", quality=quality, optimize=True)
        if file_.tell() <= MOST_BYTES:
            break
    return base64.b64encode(file_.getvalue()).decode(), sides, original


def _boxes(
    one: PictureEvaluation, class_names: Sequence[str], scale: tuple[float, float], sides: tuple[int, int]
) -> list[Markup]:
    """Lines of all boxes, then the names of mistakes, which so lie above all lines."""
    missed = [box for box in one.true_boxes if not (box.found or box.crowd)]
    wrong = [box for box in one.found_boxes if box.mistake not in ("", "crowd")]
    shapes: list[Markup] = []
    for box in one.true_boxes:
        kind = "missed" if not (box.found or box.crowd) else "true"
        crowd = ", a region of many" if box.crowd else ", not found" if kind == "missed" else ""
        shapes += _rectangle(box, kind, f"true: {_name(class_names, box.label)}{crowd}", scale, sides)
    for found in reversed(one.found_boxes):
        kind = "wrong" if found in wrong else "right"
        said = found.mistake or "right"
        shapes += _rectangle(found, kind, f"{_name(class_names, found.label)} {found.score:.2f}: {said}", scale, sides)
    largest = sorted(missed, key=lambda box: -(box.box[2] - box.box[0]) * (box.box[3] - box.box[1]))
    taken: list[_Corners] = []
    for found in wrong:
        words = f"{_name(class_names, found.label)} {found.score:.2f} · {found.mistake}"
        shapes += _label(found, "wrong", words, scale, sides, taken)
    for box in largest:
        shapes += _label(box, "missed", _name(class_names, box.label), scale, sides, taken)
    return shapes


def _rectangle(
    box: TrueBox | FoundBox, kind: str, title: str, scale: tuple[float, float], sides: tuple[int, int]
) -> list[Markup]:
    """A box with a dark edge around its line, so that it shows on any picture."""
    x0, y0, x1, y1 = _place(box, scale, sides)
    at = {"x": round(x0, 1), "y": round(y0, 1), "width": round(x1 - x0, 1), "height": round(y1 - y0, 1)}
    return [
        tag("rect", **at, class_=f"edge {kind}"),
        tag("g", tag("title", title), tag("rect", **at, class_=f"box {kind}")),
    ]


def _label(
    box: TrueBox | FoundBox,
    kind: str,
    words: str,
    scale: tuple[float, float],
    sides: tuple[int, int],
    taken: list[_Corners],
) -> list[Markup]:
    """The name of a box, above it if it was found, below it if it was missed; none where another name is already."""
    x0, y0, x1, y1 = _place(box, scale, sides)
    width = LETTER_WIDTH * len(words) + CAPITAL_WIDTH * sum(letter.isupper() for letter in words)
    left = max(0.0, x1 - width) if x0 + width > sides[0] else x0
    above = y0 - 4 if y0 >= LINE_HEIGHT else y0 + LINE_HEIGHT - 2
    base = min(y1 + LINE_HEIGHT - 2, sides[1] - 4) if kind == "missed" else above
    mine = (left, base - LINE_HEIGHT, left + width, base)
    if any(mine[0] < other[2] and other[0] < mine[2] and mine[1] < other[3] and other[1] < mine[3] for other in taken):
        return []
    taken.append(mine)
    back = tag(
        "rect",
        x=round(left, 1),
        y=round(base - LINE_HEIGHT + 3, 1),
        width=round(width, 1),
        height=LINE_HEIGHT,
        class_=f"chip {kind}",
    )
    place = {"x": round(left + 2, 1), "y": round(base, 1), "textLength": round(width - 4, 1)}
    return [back, tag("text", words, **place, lengthAdjust="spacingAndGlyphs", class_=f"name {kind}")]


def _place(box: TrueBox | FoundBox, scale: tuple[float, float], sides: tuple[int, int]) -> _Corners:
    """Corners in the small picture, not beyond its edge."""
    x0, x1 = (min(max(value * scale[0], 1.0), sides[0] - 1.0) for value in (box.box[0], box.box[2]))
    y0, y1 = (min(max(value * scale[1], 1.0), sides[1] - 1.0) for value in (box.box[1], box.box[3]))
    return x0, y0, max(x0, x1), max(y0, y1)


def _name(class_names: Sequence[str], label: int) -> str:
    return class_names[label] if label < len(class_names) else str(label)
