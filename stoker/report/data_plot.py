"""What is in a data set (`data/validation/stats.py`), as one picture for `stoker data stats --out`. Pillow, no browser.

Nine panels: classes, pictures by split, sizes of pictures, boxes per picture, sizes of boxes before and after the
resize, their aspects, where they lie, how anchors fit them, and the landmarks as text.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from stoker.data.index import Index
from stoker.data.validation.stats import (
    BANDS,
    GRID,
    IOUS,
    LARGE,
    SMALL,
    Distribution,
    Stats,
)
from stoker.errors import StorageError, UsageError
from stoker.report.format import count, number, share

WIDTH, HEIGHT = 1680, 1260
TWICE = 2
"""Drawn at twice the size and made smaller, for smooth edges."""
MOST_CLASSES = 18
ENDINGS = (".png", ".jpg", ".jpeg", ".webp")

_INK, _FAINT, _LINE, _PAPER = (31, 41, 55), (107, 114, 128), (226, 232, 240), (255, 255, 255)
_BLUE, _ORANGE, _TEAL = (37, 99, 235), (234, 88, 12), (13, 148, 136)
_HEAT = ((247, 250, 252), (147, 197, 253), (37, 99, 235), (30, 27, 75))
"""Colours of the map of places, from none to the most."""

_MARGIN, _GAP, _TOP = 28, 22, 74

Rectangle = tuple[float, float, float, float]


def check_out(out: Path, index: Index) -> None:
    """Raises UsageError for a file that cannot be written as a picture, or that is one of the user's own."""
    if out.suffix.lower() not in ENDINGS:
        raise UsageError(f"--out {out} has no ending of a picture.", choices=ENDINGS, fix=f"--out {out.stem}.png")
    if out.exists() and index.holds(out):
        raise UsageError(
            f"--out {out} exists, in the folder of the data set.",
            cause="it may be one of the pictures",
            fix="name a file that is not there yet, or outside of it",
        )


def save_picture(image: Image.Image, out: Path) -> None:
    """Writes a picture, making its folder where that is not there. Raises StorageError where it cannot be written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        image.save(out, quality=90)
    except OSError as error:
        fix = "name another place with --out"
        cause = error.strerror or str(error)
        raise StorageError("The picture cannot be written.", place=out, cause=cause, fix=fix) from error


def draw_stats(stats: Stats) -> Image.Image:
    """The picture, WIDTH × HEIGHT."""
    image = Image.new("RGB", (WIDTH * TWICE, HEIGHT * TWICE), (248, 250, 252))
    page = _Page(ImageDraw.Draw(image))
    pictures, boxes = sum(one.pictures for one in stats.splits), sum(one.boxes for one in stats.splits)
    page.text((_MARGIN, 18), stats.data, size=26, bold=True)
    page.text(
        (_MARGIN, 50),
        f"{count(pictures)} pictures · {count(boxes)} boxes · {count(len(stats.classes))} classes · {stats.format}",
        size=15,
        fill=_FAINT,
    )
    panels = [
        _classes, _splits, _places,
        _box_sides, _aspects, _per_picture,
        _picture_sides, _anchors, _landmarks,
    ]  # fmt: skip
    width = (WIDTH - 2 * _MARGIN - 2 * _GAP) / 3
    height = (HEIGHT - _TOP - 2 * _GAP - _MARGIN) / 3
    for n, panel in enumerate(panels):
        x, y = _MARGIN + n % 3 * (width + _GAP), _TOP + n // 3 * (height + _GAP)
        page.panel((x, y, x + width, y + height))
        panel(page, (x + 18, y + 14, x + width - 18, y + height - 14), stats)
    return image.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)


class _Page:
    """A pen in pixels of the result."""

    def __init__(self, pen: ImageDraw.ImageDraw) -> None:
        self._pen = pen
        self._fonts: dict[int, ImageFont.FreeTypeFont | ImageFont.ImageFont] = {}

    def _font(self, size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
        return self._fonts.setdefault(size, ImageFont.load_default(size=size * TWICE))

    def panel(self, place: Rectangle) -> None:
        scaled = tuple(side * TWICE for side in place)
        self._pen.rounded_rectangle(scaled, radius=10 * TWICE, fill=_PAPER, outline=_LINE, width=TWICE)

    def box(self, place: Rectangle, fill: tuple[int, int, int]) -> None:
        x0, y0, x1, y1 = (side * TWICE for side in place)
        if x1 - x0 >= 1 and y1 - y0 >= 1:
            self._pen.rectangle((x0, y0, x1 - 1, y1 - 1), fill=fill)

    def line(self, points: Sequence[tuple[float, float]], fill: tuple[int, int, int] = _LINE, width: int = 1) -> None:
        scaled = [(x * TWICE, y * TWICE) for x, y in points]
        self._pen.line(scaled, fill=fill, width=width * TWICE, joint="curve")

    def text(
        self,
        at: tuple[float, float],
        text: str,
        *,
        size: int = 13,
        fill: tuple[int, int, int] = _INK,
        anchor: str = "la",
        bold: bool = False,
        room: float | None = None,
    ) -> None:
        """anchor: Pillow's. room: pixels after which the text is cut."""
        text = "".join(c if c.isprintable() else "\ufffd" for c in text)
        font = self._font(size)
        if room is not None and font.getlength(text) > room * TWICE:
            while text and font.getlength(text + "…") > room * TWICE:
                text = text[:-1]
            text += "…"
        self._pen.text(
            (at[0] * TWICE, at[1] * TWICE), text, font=font, fill=fill, anchor=anchor, stroke_width=1 if bold else 0,
            stroke_fill=fill,
        )  # fmt: skip

    def title(self, place: Rectangle, title: str, note: str = "") -> Rectangle:
        """Writes them; returns the room below."""
        x0, y0, x1, y1 = place
        self.text((x0, y0), title, size=16, bold=True)
        self.text((x0, y0 + 22), note, size=12, fill=_FAINT, room=x1 - x0)
        return x0, y0 + 46, x1, y1


def _classes(page: _Page, place: Rectangle, stats: Stats) -> None:
    ordered = sorted(stats.classes, key=lambda one: -one.boxes)
    shown = ordered[:MOST_CLASSES]
    left_out = f"the {MOST_CLASSES} most common of {len(ordered)}" if len(ordered) > MOST_CLASSES else "share of boxes"
    x0, y0, x1, y1 = page.title(place, "Classes", left_out)
    most = max((one.share for one in shown), default=0) or 1
    step = min(26.0, (y1 - y0) / max(1, len(shown)))
    for n, one in enumerate(shown):
        y = y0 + n * step
        middle = y + step / 2
        page.text((x0 + 118, middle), one.name, size=12, anchor="rm", room=116)
        end = x0 + 126 + (x1 - x0 - 230) * one.share / most
        page.box((x0 + 126, y + step * 0.18, max(end, x0 + 127), y + step * 0.82), _BLUE)
        page.text((end + 6, middle), f"{count(one.boxes)}  {share(one.share)}", size=11, fill=_FAINT, anchor="lm")


def _splits(page: _Page, place: Rectangle, stats: Stats) -> None:
    x0, y0, x1, y1 = page.title(place, "Pictures by split", "blue: with boxes; orange: without")
    most = max((one.pictures for one in stats.splits), default=0) or 1
    step = min(84.0, (y1 - y0) / max(1, len(stats.splits)))
    for n, one in enumerate(stats.splits):
        y = y0 + n * step
        page.text((x0, y), one.split, size=14, bold=True)
        crowd = f" · {count(one.crowd)} crowd" if one.crowd else ""
        said = f"{count(one.pictures)} pictures · {count(one.boxes)} boxes{crowd} · {count(one.without_boxes)} without"
        page.text((x0 + 52, y + 2), said, size=12, fill=_FAINT)
        width = (x1 - x0) / most
        with_boxes = x0 + width * (one.pictures - one.without_boxes)
        page.box((x0, y + 24, with_boxes, y + 46), _BLUE)
        page.box((with_boxes, y + 24, x0 + width * one.pictures, y + 46), _ORANGE)


def _places(page: _Page, place: Rectangle, stats: Stats) -> None:
    most = max(max(row) for row in stats.places)
    note = f"the darkest part of the picture is covered by {share(most)} of the boxes"
    x0, y0, x1, y1 = page.title(place, "Where boxes lie", note)
    side = min(x1 - x0, y1 - y0)
    left, y0 = round((x0 + x1 - side) / 2), round(y0)
    # To whole pixels of the drawing, each edge once: no seams.
    edges = [round(n * side / GRID * TWICE) / TWICE for n in range(GRID + 1)]
    for values, (top, bottom) in zip(stats.places, pairwise(edges), strict=True):
        for value, (start, end) in zip(values, pairwise(edges), strict=True):
            page.box((left + start, y0 + top, left + end, y0 + bottom), _heat(value / most if most else 0))
    page.line([(left, y0), (left + side, y0), (left + side, y0 + side), (left, y0 + side), (left, y0)])


def _heat(value: float) -> tuple[int, int, int]:
    place = value * (len(_HEAT) - 1)
    n = min(int(place), len(_HEAT) - 2)
    red, green, blue = (round(a + (b - a) * (place - n)) for a, b in zip(_HEAT[n], _HEAT[n + 1], strict=True))
    return red, green, blue


def _picture_sides(page: _Page, place: Rectangle, stats: Stats) -> None:
    common = ", ".join(f"{one.width}x{one.height}" for one in stats.picture_sizes[:3])
    room = page.title(place, "Size of pictures", f"root of the area, pixels; most common: {common or 'unknown'}")
    _histogram(page, room, [(stats.picture_sides, _BLUE, "")])


def _per_picture(page: _Page, place: Rectangle, stats: Stats) -> None:
    of = stats.boxes_per_picture
    room = page.title(place, "Boxes per picture", f"median {number(of.median)}, most {number(of.most)}")
    _histogram(page, room, [(of, _TEAL, "")], whole=True)


def _box_sides(page: _Page, place: Rectangle, stats: Stats) -> None:
    height, width = stats.canvas
    room = page.title(
        place, "Size of boxes", f"root of the area, pixels; canvas {width}x{height}; COCO's limits dashed"
    )
    both = [(stats.box_sides, _BLUE, "in the picture"), (stats.box_sides_on_canvas, _ORANGE, "on the canvas")]
    _histogram(page, room, both, marks=(SMALL, LARGE))


def _aspects(page: _Page, place: Rectangle, stats: Stats) -> None:
    room = page.title(place, "Aspect of boxes", "height over width; below 1 is wide, above 1 is high")
    _histogram(page, room, [(stats.aspects, _TEAL, "")], marks=(1.0,))


def _histogram(
    page: _Page,
    place: Rectangle,
    shown: Sequence[tuple[Distribution, tuple[int, int, int], str]],
    *,
    marks: Sequence[float] = (),
    whole: bool = False,
) -> None:
    """Bars of the first, an outline of the second, over one axis: of whole numbers, or logarithmic in whole octaves."""
    x0, y0, x1, y1 = place
    bottom = y1 - 22
    shown = [one for one in shown if one[0].count]
    if not shown:
        page.text(((x0 + x1) / 2, (y0 + y1) / 2), "nothing to count", fill=_FAINT, anchor="mm")
        return
    low, high = min(of.edges[0] for of, _, _ in shown), max(of.edges[-1] for of, _, _ in shown)
    if not whole:
        low, high = 2.0 ** math.floor(math.log2(low) - 1e-6), 2.0 ** math.ceil(math.log2(high) + 1e-6)

    def across(value: float) -> float:
        part = (value - low) / (high - low) if whole else math.log2(value / low) / math.log2(high / low)
        return x0 + (x1 - x0) * part

    tallest = max(bin_count / of.count for of, _, _ in shown for bin_count in of.counts)

    def bars(of: Distribution) -> list[tuple[float, float, float]]:
        """Left, right and top of each."""
        tops = (bottom - (bottom - y0 - 18) * bin_count / of.count / tallest for bin_count in of.counts)
        return [(across(a), across(b), top) for (a, b), top in zip(pairwise(of.edges), tops, strict=True)]

    for left, right, top in bars(shown[0][0]):
        page.box((left + 0.5, top, right - 0.5, bottom), shown[0][1])
    for of, fill, _ in shown[1:]:
        corners = [point for left, right, top in bars(of) for point in ((left, top), (right, top))]
        page.line([(across(of.edges[0]), bottom), *corners, (across(of.edges[-1]), bottom)], fill, 2)
    for mark in (mark for mark in marks if low < mark < high):
        for y in range(int(y0) + 18, int(bottom), 8):
            page.line([(across(mark), y), (across(mark), y + 4)], _FAINT)
    page.line([(x0, bottom), (x1, bottom)], _FAINT)
    page.text((x0, y0 - 2), f"highest {share(tallest)}", size=11, fill=_FAINT)
    if whole:
        every = -(-int(high - low) // 9)
        ticks = [float(value) for value in range(math.ceil(low), math.ceil(high), every)]
    else:
        ticks = [2.0**power for power in range(round(math.log2(low)), round(math.log2(high)) + 1)]
    for tick in ticks:
        page.text((across(tick), bottom + 5), f"{tick:.4g}", size=11, fill=_FAINT, anchor="ma")
    for n, (_, fill, name) in enumerate(one for one in shown if one[2]):
        left = x1 - 220 + n * 116
        page.box((left, y0, left + 10, y0 + 10), fill)
        page.text((left + 16, y0 - 2), name, size=12, fill=_FAINT)


def _anchors(page: _Page, place: Rectangle, stats: Stats) -> None:
    x0, y0, x1, y1 = page.title(
        place,
        "How anchors fit",
        f"share of boxes whose best anchor reaches an IoU of {IOUS[0]:g} (pale: {IOUS[1]:g}), on the canvas",
    )
    groups = ["all", *(band for band in BANDS if any(band in one.by_size for one in stats.anchors))]
    legend, x0, bottom = x0, x0 + 36, y1 - 40
    width = (x1 - x0) / len(groups)
    for tenths in (0, 5, 10):
        y = bottom - (bottom - y0 - 8) * tenths / 10
        page.line([(x0, y), (x1, y)], _FAINT if tenths == 0 else _LINE)
        page.text((x0 - 6, y), f"{tenths * 10} %", size=11, fill=_FAINT, anchor="rm")
    for g, group in enumerate(groups):
        bar = width * 0.7 / len(stats.anchors)
        for n, (one, fill) in enumerate(zip(stats.anchors, (_BLUE, _ORANGE), strict=False)):
            shares = one.all if group == "all" else one.by_size.get(group, {})
            x = x0 + g * width + width * 0.15 + n * bar
            for iou, colour in ((IOUS[1], _pale(fill)), (IOUS[0], fill)):
                high = shares.get(f"{iou:g}", 0.0)
                page.box((x + 1, bottom - (bottom - y0 - 8) * high, x + bar - 1, bottom), colour)
        page.text((x0 + (g + 0.5) * width, bottom + 4), group, size=12, fill=_FAINT, anchor="ma")
    for n, (one, fill) in enumerate(zip(stats.anchors, (_BLUE, _ORANGE), strict=False)):
        x = legend + n * (x1 - legend) / 2
        page.box((x, y1 - 14, x + 10, y1 - 4), fill)
        page.text((x + 16, y1 - 17), one.what, size=12, fill=_FAINT, room=(x1 - x0) / 2 - 20)


def _pale(colour: tuple[int, int, int]) -> tuple[int, int, int]:
    red, green, blue = (round(255 - (255 - part) * 0.4) for part in colour)
    return red, green, blue


def _landmarks(page: _Page, place: Rectangle, stats: Stats) -> None:
    height, width = stats.canvas
    x0, y0, x1, _ = page.title(place, "In short", "")
    boxes = stats.box_sides_on_canvas
    lines = [
        ("canvas", f"{width}x{height}, {stats.resize}"),
        ("", stats.canvas_why),
        ("boxes on it", f"median {number(boxes.median)} px, 80 % in {number(boxes.p10)} … {number(boxes.p90)}"),
        ("", ", ".join(f"{name} {share(stats.by_size_on_canvas[name])}" for name in BANDS)),
    ]
    for one in stats.anchors:
        reached = f"{share(one.all.get(f'{IOUS[0]:g}'))} of boxes"
        lines += [(f"anchors, {one.what}", ""), ("", " ".join(f"{s:g}" for s in one.sizes) + f": {reached}")]
    lines += [("to change", stats.flags or "nothing")]
    y = y0 - 20
    for name, said in lines:
        page.text((x0, y), name, size=13, bold=True)
        for part in _folded(said, 58 if not name else 44):
            page.text((x0 if not name else x0 + 100, y), part, size=13, fill=_FAINT if not name else _INK, room=x1 - x0)
            y += 19
        y += 0 if said else 19
        y += 2


def _folded(text: str, letters: int) -> list[str]:
    """A text in lines of at most so many letters, cut between words."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > letters:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines if text else []
