"""Prints `stoker data stats`: the statistics of a dataset from `stoker/data/validation/stats.py`. `data_plot.py` draws
them."""

import shlex
from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from stoker.data.validation.stats import (
    AREA_RANGES,
    IOU_THRESHOLDS,
    LARGE,
    SMALL,
    DatasetStats,
    Distribution,
)
from stoker.report.console import plain_text, print_renderables, table
from stoker.report.format import count, number, percentage, plural

MAX_CLASSES = 30
"""Classes that are listed; the JSON has all."""
BAR_WIDTH = 24
"""Characters of the longest bar."""


def print_stats(stats: DatasetStats) -> None:
    """Prints the statistics as tables."""
    print_renderables(stats_renderables(stats))


def stats_renderables(stats: DatasetStats) -> Iterator[RenderableType]:
    """Texts and tables, in order."""
    yield plain_text(f"{stats.data} ({stats.format})", "bold").append("\n")
    yield _splits(stats)
    yield _heading(f"classes: {len(stats.classes)}")
    yield from _classes(stats)
    yield _heading("sizes")
    yield _sizes(stats)
    yield plain_text(_bands(stats))
    common = ", ".join(f"{s.width}x{s.height} ({count(s.num_images)})" for s in stats.image_sizes[:5])
    if common:
        more = f", and {count(stats.num_image_sizes - 5)} other sizes" if stats.num_image_sizes > 5 else ""
        yield plain_text(f"images: {common}{more}")
    if stats.num_unknown_sizes:
        yield plain_text(
            f"{plural(stats.num_unknown_sizes, 'image')} could not be read (`stoker data check`)", "yellow"
        )
    height, width = stats.image_size
    yield _heading(f"model {stats.model}")
    yield plain_text(f"image size {width}x{height}, {stats.resize}: {stats.image_size_reason}", "bold")
    if stats.anchors:
        yield _heading("anchors: fraction of the boxes that an anchor matches")
        yield _anchors(stats)
    yield plain_text(stats.anchors_note, "dim")
    for anchor_stats in stats.anchors[1:]:
        yield plain_text(f"{anchor_stats.name}: {anchor_stats.reason}")
    command = f"stoker train {shlex.quote(stats.data)} {stats.flags}"
    yield _heading(f"recommended: {command}" if stats.flags else "the defaults fit this dataset")


def _heading(text: str) -> Text:
    return Text("\n").append_text(plain_text(text, "bold"))


def _splits(stats: DatasetStats) -> RenderableType:
    rendered = table("split", "images", "without boxes", "boxes", "per image", "crowd", right=range(1, 6))
    for split in stats.splits:
        boxes_per_image = split.num_boxes / split.num_images if split.num_images else None
        rendered.add_row(
            split.split,
            count(split.num_images),
            count(split.num_images_without_boxes),
            count(split.num_boxes),
            number(boxes_per_image),
            count(split.num_crowd_boxes),
        )
    return rendered


def _classes(stats: DatasetStats) -> Iterator[RenderableType]:
    names = [entry.split for entry in stats.splits]
    rendered = table("class", "boxes", "fraction", "", "images", *names, right=(1, 2, *range(4, 5 + len(names))))
    ordered = sorted(stats.classes, key=lambda entry: -entry.num_boxes)
    max_count = max((entry.num_boxes for entry in ordered), default=0)
    for entry in ordered[:MAX_CLASSES]:
        bar = "█" * round(BAR_WIDTH * entry.num_boxes / max_count) if max_count else ""
        per_split = [count(entry.by_split[name]) for name in names]
        rendered.add_row(
            plain_text(entry.name),
            count(entry.num_boxes),
            percentage(entry.box_fraction),
            bar or "▏",
            count(entry.num_images),
            *per_split,
        )
    yield rendered
    if len(ordered) > MAX_CLASSES:
        rest = ordered[MAX_CLASSES:]
        boxes = sum(entry.num_boxes for entry in rest)
        yield plain_text(f"and {plural(len(rest), 'class', 'classes')} with {plural(boxes, 'box', 'boxes')} (--json)")


def _sizes(stats: DatasetStats) -> RenderableType:
    rendered = table("", "min", "10 %", "median", "90 %", "max", right=range(1, 6))
    rows: list[tuple[str, Distribution]] = [
        ("images, √area, px", stats.sqrt_image_area),
        ("boxes, √area, px", stats.sqrt_box_area),
        ("boxes after resizing, √area, px", stats.sqrt_box_area_resized),
        ("boxes, height / width", stats.aspect_ratios),
        ("boxes per image", stats.boxes_per_image),
    ]
    for name, distribution in rows:
        rendered.add_row(
            name,
            *(
                number(x)
                for x in (distribution.min, distribution.p10, distribution.median, distribution.p90, distribution.max)
            ),
        )
    return rendered


def _bands(stats: DatasetStats) -> str:
    def format_fractions(fractions: dict[str, float]) -> str:
        return ", ".join(f"{name} {percentage(fractions[name])}" for name in AREA_RANGES)

    limits = f"(small: below {SMALL}x{SMALL} px, large: from {LARGE}x{LARGE})"
    resized = format_fractions(stats.fraction_by_area_resized)
    return f"boxes: {format_fractions(stats.fraction_by_area)}; after resizing: {resized} {limits}"


def _anchors(stats: DatasetStats) -> RenderableType:
    ious = [f"{iou:g}" for iou in IOU_THRESHOLDS]
    bands = [name for name in AREA_RANGES if any(name in anchor_stats.by_size for anchor_stats in stats.anchors)]
    rendered = table("", "sizes", "ratios", *(f"IoU {iou}" for iou in ious), *bands, right=range(3, 5 + len(bands)))
    for anchor_stats in stats.anchors:
        rendered.add_row(
            anchor_stats.name,
            " ".join(f"{size:g}" for size in anchor_stats.sizes),
            " ".join(f"{ratio:g}" for ratio in anchor_stats.ratios),
            *(percentage(anchor_stats.all.get(iou)) for iou in ious),
            *(percentage(anchor_stats.by_size.get(name, {}).get(ious[0])) for name in bands),
        )
    return rendered
