"""Draws the statistics of a dataset (`stoker/data/validation/stats.py`) as one image, for `stoker data stats --out`.

Uses Pillow only. Nine panels: classes, images by split, image sizes, boxes per image, box sizes before and after
resizing, aspect ratios, positions of boxes, fit of the anchors, and key values as text.
"""

import io
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from textwrap import wrap

from PIL import Image, ImageDraw, ImageFont

from stoker.data.index import Index
from stoker.data.validation.stats import (
    AREA_RANGES,
    GRID_SIZE,
    IOU_THRESHOLDS,
    LARGE,
    SMALL,
    DatasetStats,
    Distribution,
)
from stoker.errors import UsageError, writing
from stoker.inference.draw import fit_text
from stoker.report.format import count, number, percentage
from stoker.storage.local_files import write_atomic

WIDTH, HEIGHT = 1680, 1260
SUPERSAMPLING = 2
"""The drawing is downscaled by this factor, for smooth edges."""
MAX_CLASSES = 18
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")

_INK, _FAINT, _LINE, _PAPER = (31, 41, 55), (107, 114, 128), (226, 232, 240), (255, 255, 255)
_BLUE, _ORANGE, _TEAL = (37, 99, 235), (234, 88, 12), (13, 148, 136)
_HEATMAP_COLORS = ((247, 250, 252), (147, 197, 253), (37, 99, 235), (30, 27, 75))
"""Colors of the heatmap, from 0 to the maximum."""

_MARGIN, _GAP, _TOP = 28, 22, 74

Rectangle = tuple[float, float, float, float]


def check_output_path(out: Path, index: Index) -> None:
    """Raises UsageError for a file that is not an image format, or that belongs to the dataset."""
    if out.suffix.lower() not in SUFFIXES:
        raise UsageError(
            f"--out {out} has no suffix of an image format.", choices=SUFFIXES, fix=f"--out {out.stem}.png"
        )
    if out.exists() and index.contains_file(out):
        raise UsageError(
            f"--out {out} exists, in the folder of the dataset.",
            cause="it may be one of its images",
            fix="choose a new file, or one outside of the dataset",
        )


def save_image(image: Image.Image, out: Path) -> None:
    """Writes an image and creates its folder; a link in its place is replaced. Raises StorageError."""
    encoded = io.BytesIO()
    with writing("The image cannot be written.", out, fix="choose another file with --out"):
        image.save(encoded, Image.registered_extensions()[out.suffix.lower()], quality=90)
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, encoded.getbuffer(), durable=False)


def draw_stats(stats: DatasetStats) -> Image.Image:
    """The drawing, WIDTH × HEIGHT."""
    image = Image.new("RGB", (WIDTH * SUPERSAMPLING, HEIGHT * SUPERSAMPLING), (248, 250, 252))
    page = _Page(ImageDraw.Draw(image))
    num_images = sum(split.num_images for split in stats.splits)
    num_boxes = sum(split.num_boxes for split in stats.splits)
    sizes = f"{count(num_images)} images · {count(num_boxes)} boxes · {count(len(stats.classes))} classes"
    page.text((_MARGIN, 18), stats.data, size=26, bold=True)
    page.text((_MARGIN, 50), f"{sizes} · {stats.format}", size=15, fill=_FAINT)
    panels = [
        _classes, _splits, _box_positions,
        _box_sizes, _aspect_ratios, _boxes_per_image,
        _image_sizes, _anchors, _key_values,
    ]  # fmt: skip
    width = (WIDTH - 2 * _MARGIN - 2 * _GAP) / 3
    height = (HEIGHT - _TOP - 2 * _GAP - _MARGIN) / 3
    for n, panel in enumerate(panels):
        x, y = _MARGIN + n % 3 * (width + _GAP), _TOP + n // 3 * (height + _GAP)
        page.panel((x, y, x + width, y + height))
        panel(page, (x + 18, y + 14, x + width - 18, y + height - 14), stats)
    return image.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)


class _Page:
    """Draws in pixel coordinates of the result."""

    def __init__(self, pen: ImageDraw.ImageDraw) -> None:
        self._pen = pen
        self._fonts: dict[int, ImageFont.FreeTypeFont | ImageFont.ImageFont] = {}

    def _font(self, size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
        return self._fonts.setdefault(size, ImageFont.load_default(size=size * SUPERSAMPLING))

    def panel(self, rect: Rectangle) -> None:
        scaled = tuple(coord * SUPERSAMPLING for coord in rect)
        self._pen.rounded_rectangle(scaled, radius=10 * SUPERSAMPLING, fill=_PAPER, outline=_LINE, width=SUPERSAMPLING)

    def box(self, rect: Rectangle, fill: tuple[int, int, int]) -> None:
        x0, y0, x1, y1 = (coord * SUPERSAMPLING for coord in rect)
        if x1 - x0 >= 1 and y1 - y0 >= 1:
            self._pen.rectangle((x0, y0, x1 - 1, y1 - 1), fill=fill)

    def line(self, points: Sequence[tuple[float, float]], fill: tuple[int, int, int] = _LINE, width: int = 1) -> None:
        scaled = [(x * SUPERSAMPLING, y * SUPERSAMPLING) for x, y in points]
        self._pen.line(scaled, fill=fill, width=width * SUPERSAMPLING, joint="curve")

    def text(
        self,
        xy: tuple[float, float],
        text: str,
        *,
        size: int = 13,
        fill: tuple[int, int, int] = _INK,
        anchor: str = "la",
        bold: bool = False,
        max_width: float | None = None,
    ) -> None:
        """anchor: as in Pillow. max_width: pixels after which the text is cut."""
        text = "".join(c if c.isprintable() else "\ufffd" for c in text)
        font = self._font(size)
        if max_width is not None:
            text = fit_text(text, font, max_width * SUPERSAMPLING)
        position = xy[0] * SUPERSAMPLING, xy[1] * SUPERSAMPLING
        stroke_width = 1 if bold else 0
        self._pen.text(position, text, font=font, fill=fill, anchor=anchor, stroke_width=stroke_width, stroke_fill=fill)

    def title(self, rect: Rectangle, title: str, note: str = "") -> Rectangle:
        """Draws title and note; returns the rectangle below."""
        x0, y0, x1, y1 = rect
        self.text((x0, y0), title, size=16, bold=True)
        self.text((x0, y0 + 22), note, size=12, fill=_FAINT, max_width=x1 - x0)
        return x0, y0 + 46, x1, y1


def _classes(page: _Page, rect: Rectangle, stats: DatasetStats) -> None:
    ordered = sorted(stats.classes, key=lambda class_stats: -class_stats.num_boxes)
    shown = ordered[:MAX_CLASSES]
    note = f"the {MAX_CLASSES} most frequent of {len(ordered)}" if len(ordered) > MAX_CLASSES else "fraction of boxes"
    x0, y0, x1, y1 = page.title(rect, "Classes", note)
    max_fraction = max((class_stats.box_fraction for class_stats in shown), default=0) or 1
    step = min(26.0, (y1 - y0) / max(1, len(shown)))
    for n, class_stats in enumerate(shown):
        y = y0 + n * step
        middle = y + step / 2
        page.text((x0 + 118, middle), class_stats.name, size=12, anchor="rm", max_width=116)
        end = x0 + 126 + (x1 - x0 - 230) * class_stats.box_fraction / max_fraction
        page.box((x0 + 126, y + step * 0.18, max(end, x0 + 127), y + step * 0.82), _BLUE)
        page.text(
            (end + 6, middle),
            f"{count(class_stats.num_boxes)}  {percentage(class_stats.box_fraction)}",
            size=11,
            fill=_FAINT,
            anchor="lm",
        )


def _splits(page: _Page, rect: Rectangle, stats: DatasetStats) -> None:
    x0, y0, x1, y1 = page.title(rect, "Images by split", "blue: with boxes; orange: without")
    max_images = max((split.num_images for split in stats.splits), default=0) or 1
    step = min(84.0, (y1 - y0) / max(1, len(stats.splits)))
    for n, split in enumerate(stats.splits):
        y = y0 + n * step
        page.text((x0, y), split.split, size=14, bold=True)
        crowd = f" · {count(split.num_crowd_boxes)} crowd" if split.num_crowd_boxes else ""
        sizes = f"{count(split.num_images)} images · {count(split.num_boxes)} boxes{crowd}"
        summary = f"{sizes} · {count(split.num_images_without_boxes)} without"
        page.text((x0 + 52, y + 2), summary, size=12, fill=_FAINT)
        width = (x1 - x0) / max_images
        with_boxes = x0 + width * (split.num_images - split.num_images_without_boxes)
        page.box((x0, y + 24, with_boxes, y + 46), _BLUE)
        page.box((with_boxes, y + 24, x0 + width * split.num_images, y + 46), _ORANGE)


def _box_positions(page: _Page, rect: Rectangle, stats: DatasetStats) -> None:
    max_fraction = max(max(row) for row in stats.box_heatmap)
    note = f"{percentage(max_fraction)} of the boxes cover the darkest cell"
    x0, y0, x1, y1 = page.title(rect, "Positions of boxes", note)
    side = min(x1 - x0, y1 - y0)
    left, y0 = round((x0 + x1 - side) / 2), round(y0)
    # Edges at whole pixels, each computed once: no seams between cells.
    edges = [round(n * side / GRID_SIZE * SUPERSAMPLING) / SUPERSAMPLING for n in range(GRID_SIZE + 1)]
    for values, (top, bottom) in zip(stats.box_heatmap, pairwise(edges), strict=True):
        for value, (start, end) in zip(values, pairwise(edges), strict=True):
            page.box(
                (left + start, y0 + top, left + end, y0 + bottom),
                _heatmap_color(value / max_fraction if max_fraction else 0),
            )
    page.line([(left, y0), (left + side, y0), (left + side, y0 + side), (left, y0 + side), (left, y0)])


def _heatmap_color(value: float) -> tuple[int, int, int]:
    position = value * (len(_HEATMAP_COLORS) - 1)
    n = min(int(position), len(_HEATMAP_COLORS) - 2)
    red, green, blue = (
        round(a + (b - a) * (position - n)) for a, b in zip(_HEATMAP_COLORS[n], _HEATMAP_COLORS[n + 1], strict=True)
    )
    return red, green, blue


def _image_sizes(page: _Page, rect: Rectangle, stats: DatasetStats) -> None:
    common = ", ".join(f"{size.width}x{size.height}" for size in stats.image_sizes[:3])
    plot_rect = page.title(rect, "Image sizes", f"√area, pixels; most frequent: {common or 'unknown'}")
    _histogram(page, plot_rect, [(stats.sqrt_image_area, _BLUE, "")])


def _boxes_per_image(page: _Page, rect: Rectangle, stats: DatasetStats) -> None:
    distribution = stats.boxes_per_image
    plot_rect = page.title(
        rect, "Boxes per image", f"median {number(distribution.median)}, maximum {number(distribution.max)}"
    )
    _histogram(page, plot_rect, [(distribution, _TEAL, "")], is_integer=True)


def _box_sizes(page: _Page, rect: Rectangle, stats: DatasetStats) -> None:
    height, width = stats.image_size
    plot_rect = page.title(rect, "Box sizes", f"√area, pixels; image size {width}x{height}; dashed: COCO size limits")
    series = [(stats.sqrt_box_area, _BLUE, "original"), (stats.sqrt_box_area_resized, _ORANGE, "after resizing")]
    _histogram(page, plot_rect, series, marks=(SMALL, LARGE))


def _aspect_ratios(page: _Page, rect: Rectangle, stats: DatasetStats) -> None:
    plot_rect = page.title(rect, "Aspect ratios of boxes", "height / width; below 1: wide, above 1: tall")
    _histogram(page, plot_rect, [(stats.aspect_ratios, _TEAL, "")], marks=(1.0,))


def _histogram(
    page: _Page,
    rect: Rectangle,
    series: Sequence[tuple[Distribution, tuple[int, int, int], str]],
    *,
    marks: Sequence[float] = (),
    is_integer: bool = False,
) -> None:
    """Bars of the first series and outlines of the others, on an integer axis or on a log2 axis of whole octaves."""
    x0, y0, x1, y1 = rect
    bottom = y1 - 22
    series = [entry for entry in series if entry[0].count]
    if not series:
        page.text(((x0 + x1) / 2, (y0 + y1) / 2), "no data", fill=_FAINT, anchor="mm")
        return
    low, high = (
        min(distribution.edges[0] for distribution, _, _ in series),
        max(distribution.edges[-1] for distribution, _, _ in series),
    )
    if not is_integer:
        low, high = 2.0 ** math.floor(math.log2(low) - 1e-6), 2.0 ** math.ceil(math.log2(high) + 1e-6)

    def to_x(value: float) -> float:
        fraction = (value - low) / (high - low) if is_integer else math.log2(value / low) / math.log2(high / low)
        return x0 + (x1 - x0) * fraction

    max_fraction = max(
        bin_count / distribution.count for distribution, _, _ in series for bin_count in distribution.counts
    )

    def bars(distribution: Distribution) -> list[tuple[float, float, float]]:
        """(left, right, top) of each bar."""
        tops = (
            bottom - (bottom - y0 - 18) * bin_count / distribution.count / max_fraction
            for bin_count in distribution.counts
        )
        return [(to_x(a), to_x(b), top) for (a, b), top in zip(pairwise(distribution.edges), tops, strict=True)]

    for left, right, top in bars(series[0][0]):
        page.box((left + 0.5, top, right - 0.5, bottom), series[0][1])
    for distribution, fill, _ in series[1:]:
        points = [point for left, right, top in bars(distribution) for point in ((left, top), (right, top))]
        page.line([(to_x(distribution.edges[0]), bottom), *points, (to_x(distribution.edges[-1]), bottom)], fill, 2)
    for mark in (mark for mark in marks if low < mark < high):
        for y in range(int(y0) + 18, int(bottom), 8):
            page.line([(to_x(mark), y), (to_x(mark), y + 4)], _FAINT)
    page.line([(x0, bottom), (x1, bottom)], _FAINT)
    page.text((x0, y0 - 2), f"maximum {percentage(max_fraction)}", size=11, fill=_FAINT)
    if is_integer:
        tick_step = -(-int(high - low) // 9)
        ticks = [float(value) for value in range(math.ceil(low), math.ceil(high), tick_step)]
    else:
        ticks = [2.0**power for power in range(round(math.log2(low)), round(math.log2(high)) + 1)]
    for tick in ticks:
        page.text((to_x(tick), bottom + 5), f"{tick:.4g}", size=11, fill=_FAINT, anchor="ma")
    for n, (_, fill, name) in enumerate(entry for entry in series if entry[2]):
        left = x1 - 220 + n * 116
        page.box((left, y0, left + 10, y0 + 10), fill)
        page.text((left + 16, y0 - 2), name, size=12, fill=_FAINT)


def _anchors(page: _Page, rect: Rectangle, stats: DatasetStats) -> None:
    x0, y0, x1, y1 = page.title(
        rect,
        "Fit of the anchors",
        f"fraction of boxes whose best anchor has IoU ≥ {IOU_THRESHOLDS[0]:g} (light: {IOU_THRESHOLDS[1]:g})",
    )
    groups = [
        "all",
        *(band for band in AREA_RANGES if any(band in anchor_stats.by_size for anchor_stats in stats.anchors)),
    ]
    legend_x, x0, bottom = x0, x0 + 36, y1 - 40
    width = (x1 - x0) / len(groups)
    for tenths in (0, 5, 10):
        y = bottom - (bottom - y0 - 8) * tenths / 10
        page.line([(x0, y), (x1, y)], _FAINT if tenths == 0 else _LINE)
        page.text((x0 - 6, y), f"{tenths * 10} %", size=11, fill=_FAINT, anchor="rm")
    for g, group in enumerate(groups):
        bar = width * 0.7 / max(1, len(stats.anchors))
        for n, (anchor_stats, fill) in enumerate(zip(stats.anchors, (_BLUE, _ORANGE), strict=False)):
            fractions = anchor_stats.all if group == "all" else anchor_stats.by_size.get(group, {})
            x = x0 + g * width + width * 0.15 + n * bar
            for iou, color in ((IOU_THRESHOLDS[1], _lighten(fill)), (IOU_THRESHOLDS[0], fill)):
                high = fractions.get(f"{iou:g}", 0.0)
                page.box((x + 1, bottom - (bottom - y0 - 8) * high, x + bar - 1, bottom), color)
        page.text((x0 + (g + 0.5) * width, bottom + 4), group, size=12, fill=_FAINT, anchor="ma")
    for n, (anchor_stats, fill) in enumerate(zip(stats.anchors, (_BLUE, _ORANGE), strict=False)):
        x = legend_x + n * (x1 - legend_x) / 2
        page.box((x, y1 - 14, x + 10, y1 - 4), fill)
        page.text((x + 16, y1 - 17), anchor_stats.name, size=12, fill=_FAINT, max_width=(x1 - x0) / 2 - 20)


def _lighten(color: tuple[int, int, int]) -> tuple[int, int, int]:
    red, green, blue = (round(255 - (255 - channel) * 0.4) for channel in color)
    return red, green, blue


def _key_values(page: _Page, rect: Rectangle, stats: DatasetStats) -> None:
    height, width = stats.image_size
    x0, y0, x1, _ = page.title(rect, "Key values", "")
    boxes = stats.sqrt_box_area_resized
    lines = [
        ("image size", f"{width}x{height}, {stats.resize}"),
        ("", stats.image_size_reason),
        ("resized boxes", f"median {number(boxes.median)} px, 80 % in {number(boxes.p10)} … {number(boxes.p90)}"),
        ("", ", ".join(f"{name} {percentage(stats.fraction_by_area_resized[name])}" for name in AREA_RANGES)),
    ]
    for anchor_stats in stats.anchors:
        reached = f"{percentage(anchor_stats.all.get(f'{IOU_THRESHOLDS[0]:g}'))} of boxes"
        lines += [
            (f"anchors, {anchor_stats.name}", ""),
            ("", " ".join(f"{s:g}" for s in anchor_stats.sizes) + f": {reached}"),
        ]
    lines += [("recommended", stats.flags or "the defaults")]
    y = y0 - 20
    for name, value in lines:
        page.text((x0, y), name, size=13, bold=True)
        for text_line in wrap(value, 44 if name else 58, break_long_words=False, break_on_hyphens=False):
            page.text(
                (x0 if not name else x0 + 100, y),
                text_line,
                size=13,
                fill=_FAINT if not name else _INK,
                max_width=x1 - x0,
            )
            y += 19
        y += 0 if value else 19
        y += 2
