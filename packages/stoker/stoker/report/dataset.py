"""Prints what `stoker data check`, `stats`, `convert`, `pack` and `split` found or wrote. The work itself is in
`stoker/data/`.
"""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rich.console import RenderableType
from rich.text import Text

from stoker.data.index import Index
from stoker.data.validation.check import DatasetCheck
from stoker.data.validation.problems import PROBLEM_KINDS, count_of_all
from stoker.data.validation.stats import AREA_RANGES, IOU_THRESHOLDS, LARGE, SMALL, DatasetStats
from stoker_watch.errors import UsageError, make_error
from stoker_watch.report.console import plain_text, print_renderables, table
from stoker_watch.report.findings_terminal import explain_line, finding_lines
from stoker_watch.report.format import count, number, percentage, plural, size

if TYPE_CHECKING:
    from stoker.data.convert import ConversionResult
    from stoker.data.packing import PackResult
    from stoker.data.validation.split import NewSplits

MAX_CLASSES = 30
"""Classes that are listed; the JSON has all."""
MAX_EXAMPLES = 5
"""Images left out that are listed."""
UNREADABLE = "unreadable-set"
"""The kind of problem whose location is the error message."""
BAR_WIDTH = 24
"""Characters of the longest bar."""


def check_output_path(out: Path, index: Index, suffixes: Sequence[str]) -> None:
    """Raises UsageError for a file with another suffix, or one that belongs to the data set."""
    if out.suffix.lower() not in suffixes:
        raise UsageError(f"--out {out} has another suffix.", choices=suffixes, fix=f"--out {out.stem}{suffixes[0]}")
    if out.exists() and index.contains_file(out):
        raise make_error(UsageError, "out-is-in-the-data-set", out=out)


def print_check(report: DatasetCheck, file: TextIO | None = None) -> None:
    print_renderables(_check(report), file)


def _check(report: DatasetCheck) -> Iterator[RenderableType]:
    if report.root is not None:
        parts = {name: split.num_images for name, split in report.splits.items()}
        if left_out := report.num_images - sum(parts.values()):
            parts["left out"] = left_out
        splits = ", ".join(f"{name} {count(number)}" for name, number in parts.items())
        boxes, classes = plural(report.num_boxes, "box", "boxes"), plural(len(report.classes), "class", "classes")
        yield f"{report.data}: {plural(report.num_images, 'image')} ({splits}), {boxes}, {classes}"
        yield from report.notes
        if not report.decoded:
            yield "images were not decoded (--annotations-only)"
    findings = [finding for finding in report.findings if finding.id != UNREADABLE]
    for finding in findings:
        yield ""
        yield from finding_lines(finding)
    if not report.items:
        yield ""
        yield plain_text("no problems found", "green")
    if report.root is not None or findings or not report.items:
        yield ""
    unreadable = [location for item in report.items if item.kind == UNREADABLE for location in item.examples]
    used = (
        f"{count(report.num_usable_images)} of {plural(report.num_images, 'image')},"
        f" {count(report.num_usable_boxes)} of {plural(report.num_boxes, 'box', 'boxes')}"
    )
    if unreadable:
        yield plain_text("training would refuse this dataset:", "bold red")
        yield from (plain_text(text, newlines=True) for text in unreadable)
    elif report.refusals:
        yield f"usable: {used}"
        yield _refused(report.refusals)
    else:
        yield plain_text(f"training would use {used}", "bold green")
    yield from explain_line(findings)


def print_stats(stats: DatasetStats, file: TextIO | None = None) -> None:
    print_renderables(_stats(stats), file)


def _stats(stats: DatasetStats) -> Iterator[RenderableType]:
    yield plain_text(f"{stats.data} ({stats.format})", "bold").append("\n")
    heads = ("split", "images", "without boxes", "boxes", "per image", "crowd")
    splits = (
        [
            split.split,
            count(split.num_images),
            count(split.num_images_without_boxes),
            count(split.num_boxes),
            number(split.num_boxes / split.num_images if split.num_images else None),
            count(split.num_crowd_boxes),
        ]
        for split in stats.splits
    )
    yield table(*heads, right=range(1, 6), rows=splits)
    yield _heading(f"classes: {len(stats.classes)}")
    yield from _classes(stats)
    yield _heading("sizes")
    yield from _sizes(stats)
    if stats.num_unknown_sizes:
        yield _unreadable(stats.num_unknown_sizes)
    height, width = stats.image_size
    yield _heading(f"model {stats.model}")
    yield plain_text(f"image size {width}x{height}, {stats.resize}: {stats.image_size_reason}", "bold")
    if stats.anchors:
        yield _heading("anchors: fraction of the boxes that an anchor matches")
        yield _anchors(stats)
    yield plain_text(stats.anchors_note, "dim")
    for anchor_stats in stats.anchors[1:]:
        yield plain_text(f"{anchor_stats.name}: {anchor_stats.reason}")
    if stats.suggestions:
        yield _heading("suggestions: `stoker tune --allow accuracy` tries them, and keeps what raises AP")
        for suggestion in stats.suggestions:
            flags = " ".join(
                f"--{name.replace('_', '-')} {' '.join(f'{x:g}' for x in value) if isinstance(value, tuple) else value}"
                for name, value in suggestion.changes.items()
            )
            yield plain_text(f"{flags}: {suggestion.evidence}")
    if stats.refusals:
        yield Text("\n").append_text(_refused(stats.refusals))
        yield f"`stoker data check {shlex.quote(stats.data)}` shows all problems and how to fix them"
        return
    command = f"stoker train {shlex.quote(stats.data)} {stats.flags}"
    fits = "the defaults train it; the suggestions above may do better" if stats.suggestions else "the defaults fit it"
    yield _heading(f"recommended: {command}" if stats.flags else fits)


def _refused(refusals: Sequence[str]) -> Text:
    return plain_text(f"training would refuse this dataset: {' '.join(refusals)}", "bold red")


def _heading(text: str) -> Text:
    return Text("\n").append_text(plain_text(text, "bold"))


def _unreadable(num_images: int) -> Text:
    return plain_text(f"{plural(num_images, 'image')} could not be read (`stoker data check`)", "yellow")


def _classes(stats: DatasetStats) -> Iterator[RenderableType]:
    names = [entry.split for entry in stats.splits]
    ordered = sorted(stats.classes, key=lambda entry: -entry.num_boxes)
    largest = max((entry.num_boxes for entry in ordered), default=0) or 1
    rows = (
        [
            entry.name,
            count(entry.num_boxes),
            percentage(entry.box_fraction),
            "█" * round(BAR_WIDTH * entry.num_boxes / largest) or "▏",
            count(entry.num_images),
            *(count(entry.by_split[name]) for name in names),
        ]
        for entry in ordered[:MAX_CLASSES]
    )
    right = (1, 2, *range(4, 5 + len(names)))
    yield table("class", "boxes", "fraction", "", "images", *names, right=right, rows=rows)
    if rest := ordered[MAX_CLASSES:]:
        boxes = sum(entry.num_boxes for entry in rest)
        yield f"and {plural(len(rest), 'class', 'classes')} with {plural(boxes, 'box', 'boxes')} (--json)"


def _sizes(stats: DatasetStats) -> Iterator[RenderableType]:
    distributions = {
        "images, √area, px": stats.sqrt_image_area,
        "boxes, √area, px": stats.sqrt_box_area,
        "boxes after resizing, √area, px": stats.sqrt_box_area_resized,
        "boxes, height / width": stats.aspect_ratios,
        "boxes per image": stats.boxes_per_image,
    }
    rows = ([name, *map(number, (d.min, d.p10, d.median, d.p90, d.max))] for name, d in distributions.items())
    yield table("", "min", "10 %", "median", "90 %", "max", right=range(1, 6), rows=rows)
    original, resized = (
        ", ".join(f"{name} {percentage(fractions[name])}" for name in AREA_RANGES)
        for fractions in (stats.fraction_by_area, stats.fraction_by_area_resized)
    )
    limits = f"(small: below {SMALL}x{SMALL} px, large: from {LARGE}x{LARGE})"
    yield f"boxes: {original}; after resizing: {resized} {limits}"
    if stats.image_sizes:
        common = ", ".join(f"{s.width}x{s.height} ({count(s.num_images)})" for s in stats.image_sizes[:5])
        more = f", and {count(stats.num_image_sizes - 5)} other sizes" if stats.num_image_sizes > 5 else ""
        yield f"images: {common}{more}"


def _anchors(stats: DatasetStats) -> RenderableType:
    ious = [f"{iou:g}" for iou in IOU_THRESHOLDS]
    bands = [name for name in AREA_RANGES if any(name in anchor_stats.by_size for anchor_stats in stats.anchors)]
    rows = (
        [
            anchor_stats.name,
            " ".join(f"{value:g}" for value in anchor_stats.sizes),
            " ".join(f"{value:g}" for value in anchor_stats.ratios),
            *(percentage(anchor_stats.all.get(iou)) for iou in ious),
            *(percentage(anchor_stats.by_size.get(name, {}).get(ious[0])) for name in bands),
        ]
        for anchor_stats in stats.anchors
    )
    heads = ("", "sizes", "ratios", *(f"IoU {iou}" for iou in ious), *bands)
    return table(*heads, right=range(3, len(heads)), rows=rows)


def print_converted(index: Index, converted: "ConversionResult", file: TextIO | None = None) -> None:
    """Prints what was read, written and left out in a conversion of `index`."""
    lines = [*index.notes]
    for problem in index.problems:
        example = f", e.g. {problem.examples[0]}" if problem.examples else ""
        lines.append(f"{problem.count:,} × {problem.title}: {PROBLEM_KINDS[problem.kind].effect}{example}")
    lines += [*converted.notes, *_left_out(converted.skipped)]
    boxes = f"{converted.num_boxes:,} boxes, {len(index.class_names)} classes"
    lines += [f"{_images(converted.num_images)}, {boxes}", f"written: {converted.folder}"]
    print_renderables(lines, file)


def print_packed(packed: "PackResult", file: TextIO | None = None) -> None:
    """Prints what is there, its size before and after, and what was left out."""
    shards = plural(len(packed.info.shards), "shard")
    if packed.was_packed:
        lines = [f"already packed: {packed.destination}; nothing was written"]
    else:
        lines = [f"packed: {packed.destination}"]
        if packed.num_kept:
            lines.append(f"{packed.num_kept:,} of {shards} were finished by an earlier start, and kept")
    lines.append(f"{_images(packed.num_images)} in {shards}")
    before, after = packed.info.source_bytes, sum(shard.size_bytes for shard in packed.info.shards)
    lines.append(f"size of the images before {size(before)}, of the shards {size(after)}")
    if packed.num_encoded:
        lines.append(f"{plural(packed.num_encoded, 'image')} encoded again")
    lines += [*_left_out(packed.skipped), f"train from it: stoker train {packed.destination}"]
    print_renderables(lines, file)


def _images(by_split: dict[str, int]) -> str:
    """150 images (train 100, val 50)."""
    splits = ", ".join(f"{split} {number_of:,}" for split, number_of in by_split.items())
    return f"{sum(by_split.values()):,} images ({splits})"


def _left_out(skipped: Sequence[tuple[Path | str, str]]) -> Iterable[str]:
    if skipped:
        yield f"{plural(len(skipped), 'image')} left out:"
        yield from (f"  {name}: {reason}" for name, reason in skipped[:MAX_EXAMPLES])
    if len(skipped) > MAX_EXAMPLES:
        yield f"  and {len(skipped) - MAX_EXAMPLES:,} more"


def print_new_splits(data: str, out: str, new: "NewSplits") -> None:
    """Prints the new splits, their classes, and the command that uses them."""
    print_renderables(_new_splits(data, out, new))


def _new_splits(data: str, out: str, new: "NewSplits") -> Iterator[RenderableType]:
    for name, split in new.splits.items():
        kept = ", as in the data set" if name == "test" and new.kept_test else ""
        images = count_of_all(split.num_images, new.num_images, "images")
        yield f"{name}: {images}{kept}, {plural(split.num_boxes, 'box', 'boxes')}: {new.files[name]}"
    if new.num_groups:
        yield f"{plural(new.num_groups, 'group')} of {count(new.num_grouped_images)} images: each stays in one split"
    if new.num_unreadable:
        yield _unreadable(new.num_unreadable)
    names = list(next(iter(new.splits.values())).boxes_by_class)
    rows = (
        [name, *(count(split.boxes_by_class[name]) for split in new.splits.values())] for name in names[:MAX_CLASSES]
    )
    yield table("class, boxes", *new.splits, right=range(1, 1 + len(new.splits)), rows=rows)
    if len(names) > MAX_CLASSES:
        yield f"and {plural(len(names) - MAX_CLASSES, 'class', 'classes')} (--json)"
    yield plain_text(f"stoker train {shlex.quote(data)} --splits {shlex.quote(out)}", "bold")
