"""What is in a data set (`data/validation/stats.py`), as text for `stoker data stats`. The drawing is
`data_plot.py`."""

import shlex
from collections.abc import Iterator

from rich.console import RenderableType

from stoker.data.validation.stats import (
    BANDS,
    IOUS,
    LARGE,
    SMALL,
    Distribution,
    Stats,
)
from stoker.report.console import plain_text, print_parts, table
from stoker.report.format import count, number, plural, share

MOST_CLASSES = 30
"""Classes that are listed; the JSON has them all."""
BAR = 24
"""Characters of the longest bar."""


def print_stats(stats: Stats) -> None:
    """Prints everything, a table for each question."""
    print_parts(parts(stats))


def parts(stats: Stats) -> Iterator[RenderableType]:
    """Texts and tables, one under the other."""
    yield plain_text(f"{stats.data} ({stats.format})\n", "bold")
    yield _splits(stats)
    yield plain_text(f"\nclasses: {len(stats.classes)}", "bold")
    yield from _classes(stats)
    yield plain_text("\nsizes", "bold")
    yield _sizes(stats)
    yield plain_text(_bands(stats))
    common = ", ".join(f"{s.width}x{s.height} ({count(s.pictures)})" for s in stats.picture_sizes[:5])
    if common:
        more = f", and {count(stats.sizes_in_all - 5)} other sizes" if stats.sizes_in_all > 5 else ""
        yield plain_text(f"pictures: {common}{more}")
    if stats.sizes_unknown:
        yield plain_text(f"{plural(stats.sizes_unknown, 'picture')} could not be read (`stoker data check`)", "yellow")
    height, width = stats.canvas
    yield plain_text(f"\ncanvas {width}x{height}, {stats.resize}: {stats.canvas_why}", "bold")
    yield plain_text("\nanchors: share of the boxes that one can match", "bold")
    yield _anchors(stats)
    yield plain_text(stats.anchors_note, "dim")
    for one in stats.anchors[1:]:
        yield plain_text(f"{one.what}: {one.why}")
    command = f"stoker train {shlex.quote(stats.data)} {stats.flags}"
    yield plain_text(f"\nto train so: {command}" if stats.flags else "\nnothing needs to be changed", "bold")


def _splits(stats: Stats) -> RenderableType:
    made = table("split", "pictures", "without boxes", "boxes", "per picture", "crowd", right=range(1, 6))
    for one in stats.splits:
        each = one.boxes / one.pictures if one.pictures else None
        made.add_row(
            one.split, count(one.pictures), count(one.without_boxes), count(one.boxes), number(each), count(one.crowd)
        )
    return made


def _classes(stats: Stats) -> Iterator[RenderableType]:
    names = [one.split for one in stats.splits]
    made = table("class", "boxes", "share", "", "pictures", *names, right=(1, 2, *range(4, 5 + len(names))))
    ordered = sorted(stats.classes, key=lambda one: -one.boxes)
    most = max((one.boxes for one in ordered), default=0)
    for one in ordered[:MOST_CLASSES]:
        bar = "█" * round(BAR * one.boxes / most) if most else ""
        per_split = [count(one.by_split[name]) for name in names]
        made.add_row(
            plain_text(one.name), count(one.boxes), share(one.share), bar or "▏", count(one.pictures), *per_split
        )
    yield made
    if len(ordered) > MOST_CLASSES:
        rest = ordered[MOST_CLASSES:]
        boxes = sum(one.boxes for one in rest)
        yield plain_text(f"and {plural(len(rest), 'class', 'classes')} with {plural(boxes, 'box', 'boxes')} (--json)")


def _sizes(stats: Stats) -> RenderableType:
    made = table("", "least", "10 %", "median", "90 %", "most", right=range(1, 6))
    rows: list[tuple[str, Distribution]] = [
        ("pictures, root of the area, px", stats.picture_sides),
        ("boxes, root of the area, px", stats.box_sides),
        ("the same on the canvas", stats.box_sides_on_canvas),
        ("boxes, height over width", stats.aspects),
        ("boxes per picture", stats.boxes_per_picture),
    ]
    for name, of in rows:
        made.add_row(name, *(number(x) for x in (of.least, of.p10, of.median, of.p90, of.most)))
    return made


def _bands(stats: Stats) -> str:
    def said(shares: dict[str, float]) -> str:
        return ", ".join(f"{name} {share(shares[name])}" for name in BANDS)

    limits = f"(small: below {SMALL}x{SMALL} px, large: from {LARGE}x{LARGE})"
    return f"boxes: {said(stats.by_size)}; on the canvas {said(stats.by_size_on_canvas)} {limits}"


def _anchors(stats: Stats) -> RenderableType:
    ious = [f"{iou:g}" for iou in IOUS]
    bands = [name for name in BANDS if any(name in one.by_size for one in stats.anchors)]
    made = table("", "sizes", "ratios", *(f"IoU {iou}" for iou in ious), *bands, right=range(3, 5 + len(bands)))
    for one in stats.anchors:
        made.add_row(
            one.what,
            " ".join(f"{size:g}" for size in one.sizes),
            " ".join(f"{ratio:g}" for ratio in one.ratios),
            *(share(one.all.get(iou)) for iou in ious),
            *(share(one.by_size.get(name, {}).get(ious[0])) for name in bands),
        )
    return made
