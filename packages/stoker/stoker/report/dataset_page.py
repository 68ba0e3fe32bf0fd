"""The page of `stoker data stats --out`: the statistics of a data set (`data/validation/stats.py`) as charts and rows.

The template is `dataset.html`; `dataset.py` prints the same numbers."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stoker.data.validation.stats import (
    AREA_RANGES,
    IOU_THRESHOLDS,
    LARGE,
    SMALL,
    ClassCounts,
    DatasetStats,
    Distribution,
)
from stoker_watch.report.format import count, number, percentage
from stoker_watch.report.html import render_template, write_page
from stoker_watch.report.page.charts import FRACTIONS, Charts, Trace, bars, color, curve, escape_name
from stoker_watch.report.page.markup import Markup

MAX_CLASSES = 30
"""Bars of classes; the table has all."""


def write_dataset_stats(stats: DatasetStats, out: Path) -> Path:
    """Writes the page. Raises StorageError if it cannot be written."""
    charts = Charts()
    values = page_values(stats, charts)
    command = f"stoker data stats {shlex.quote(stats.data)} --json"
    template = Path(__file__).with_name("dataset.html")
    return write_page(render_template(template, stats.data, command, charts=charts, **values), out)


def page_values(stats: DatasetStats, charts: Charts) -> dict[str, Any]:
    """What the template shows. The charts are added in the order of the page."""
    images, boxes = sum(split.num_images for split in stats.splits), sum(split.num_boxes for split in stats.splits)
    height, width = stats.image_size
    resized = ", ".join(f"{name} {percentage(stats.fraction_by_area_resized[name])}" for name in AREA_RANGES)
    ordered = sorted(stats.classes, key=lambda row: -row.num_boxes)
    box_sizes = f"√area, pixels; image size {width}x{height}; dashed: COCO's limits of small and large"
    by_stage = [("original", stats.sqrt_box_area), ("after resizing", stats.sqrt_box_area_resized)]
    ratios = "height / width; below 1: wide, above 1: tall"
    per_image = f"median {number(stats.boxes_per_image.median)}, maximum {number(stats.boxes_per_image.max)}"
    common = ", ".join(f"{size.width}x{size.height}" for size in stats.image_sizes[:3]) or "unknown"
    image_sizes = f"√area, pixels; most frequent: {common}"
    return {
        "stats": stats,
        "sizes": f"{count(images)} images · {count(boxes)} boxes · {count(len(ordered))} classes · {stats.format}",
        "key_values": [
            ("image size", f"{width}x{height}, {stats.resize}: {stats.image_size_reason}"),
            ("boxes after resizing", resized),
            *((f"anchors, {one.name}", " ".join(f"{size:g}" for size in one.sizes)) for one in stats.anchors),
            ("refused", " ".join(stats.refusals)) if stats.refusals else ("recommended", stats.flags or "the defaults"),
        ],
        "box_charts": [
            _histogram(charts, "Box sizes", box_sizes, by_stage, marks=(SMALL, LARGE)),
            _histogram(charts, "Aspect ratios of boxes", ratios, [("", stats.aspect_ratios)], marks=(1,)),
            _heatmap(charts, stats),
            _anchors(charts, stats),
        ],
        "image_charts": [
            _splits(charts, stats),
            _histogram(charts, "Boxes per image", per_image, [("", stats.boxes_per_image)], is_log=False),
            _histogram(charts, "Image sizes", image_sizes, [("", stats.sqrt_image_area)]),
        ],
        "class_chart": _classes(charts, ordered),
        "class_rows": [
            (row.name, count(row.num_boxes), percentage(row.box_fraction), count(row.num_images)) for row in ordered
        ],
    }


def _splits(charts: Charts, stats: DatasetStats) -> Markup | None:
    names = [split.split for split in stats.splits]
    without = [split.num_images_without_boxes for split in stats.splits]
    with_boxes = [split.num_images - split.num_images_without_boxes for split in stats.splits]
    traces = [bars("with boxes", names, with_boxes, color(0)), bars("without boxes", names, without, color(1))]
    return charts.add("Images by split", "with and without boxes", traces, y="images", barmode="stack")


def _classes(charts: Charts, ordered: Sequence[ClassCounts]) -> Markup | None:
    shown = ordered[:MAX_CLASSES]
    names, numbers = [escape_name(row.name) for row in shown], [row.num_boxes for row in shown]
    description = f"the {len(shown)} most frequent of {len(ordered)}"
    traces = [bars("boxes", names, numbers, color(0))]
    return charts.add("Boxes by class", description, traces, y="boxes", showlegend=False, xaxis={"type": "category"})


def _heatmap(charts: Charts, stats: DatasetStats) -> Markup | None:
    maximum = max(max(row) for row in stats.box_heatmap)
    cells = {"type": "heatmap", "z": stats.box_heatmap, "showscale": False, "hovertemplate": "%{z:.1%}<extra></extra>"}
    hidden: dict[str, Any] = {"visible": False}
    return charts.add(
        "Positions of boxes",
        f"{percentage(maximum)} of the boxes cover the brightest cell of the image",
        [cells],
        hovermode="closest",
        xaxis=hidden | {"constrain": "domain"},
        yaxis=hidden | {"autorange": "reversed", "scaleanchor": "x"},
    )


def _histogram(
    charts: Charts,
    title: str,
    description: str,
    series: Sequence[tuple[str, Distribution]],
    *,
    marks: Sequence[float] = (),
    is_log: bool = True,
) -> Markup | None:
    """Fractions by bin as steps, with dashed lines at the marks; None without values."""
    known = [(name, distribution) for name, distribution in series if distribution.count]
    traces: list[Trace] = []
    for n, (name, distribution) in enumerate(known):
        fractions = [bin_count / distribution.count for bin_count in distribution.counts]
        steps = {"mode": "lines", "line": {"color": color(n), "width": 2, "shape": "hv"}}
        traces.append(curve(name, distribution.edges, [*fractions, 0], n, **steps))
    edges = [edge for _, distribution in known for edge in distribution.edges]
    highest = max((max(trace["y"]) for trace in traces), default=0.0)
    dashed = {"line": {"color": "var(--muted)", "width": 1, "dash": "dash"}, "mode": "lines", "showlegend": False}
    lines = [
        curve("", [mark, mark], [0, highest], 0, hoverinfo="skip", **dashed)
        for mark in marks
        if edges and min(edges) < mark < max(edges)
    ]
    axes: dict[str, Any] = {
        "xaxis": {"type": "log" if is_log else "linear"},
        "yaxis": {"tickformat": ".0%", "rangemode": "tozero"},
    }
    return charts.add(title, description, traces + lines, showlegend=len(series) > 1, **axes)


def _anchors(charts: Charts, stats: DatasetStats) -> Markup | None:
    iou = f"{IOU_THRESHOLDS[0]:g}"
    bands = [band for band in AREA_RANGES if any(band in anchors.by_size for anchors in stats.anchors)]
    traces = []
    for n, anchors in enumerate(stats.anchors):
        fractions = [anchors.all.get(iou, 0.0), *(anchors.by_size.get(band, {}).get(iou, 0.0) for band in bands)]
        traces.append(bars(anchors.name, ["all", *bands], fractions, color(n)))
    description = f"fraction of boxes whose best anchor has IoU ≥ {iou}, by size after resizing"
    return charts.add("Fit of the anchors", description, traces, barmode="group", yaxis=FRACTIONS)
