"""Prints what `stoker data split` wrote. The splits are made in `stoker/data/validation/split.py`."""

import shlex
from collections.abc import Iterator

from rich.console import RenderableType

from stoker.data.validation.problems import count_of_all
from stoker.data.validation.split import NewSplits
from stoker.report.console import plain_text, print_renderables, table
from stoker.report.format import count, plural

MAX_CLASSES = 30


def print_new_splits(data: str, out: str, new: NewSplits) -> None:
    """Prints the splits, their classes, and the command that uses them."""
    print_renderables(_renderables(data, out, new))


def _renderables(data: str, out: str, new: NewSplits) -> Iterator[RenderableType]:
    for name, split in new.splits.items():
        kept = ", as in the data set" if name == "test" and new.kept_test else ""
        images = count_of_all(split.num_images, new.num_images, "images")
        yield plain_text(f"{name}: {images}{kept}, {plural(split.num_boxes, 'box', 'boxes')}: {new.files[name]}")
    if new.num_groups:
        groups = plural(new.num_groups, "group")
        yield plain_text(f"{groups} of {count(new.num_grouped_images)} images: each stays in one split")
    if new.num_unreadable:
        yield plain_text(f"{plural(new.num_unreadable, 'image')} could not be read (`stoker data check`)", "yellow")
    rendered = table("class, boxes", *new.splits, right=range(1, 1 + len(new.splits)))
    names = list(next(iter(new.splits.values())).boxes_by_class)
    for name in names[:MAX_CLASSES]:
        rendered.add_row(plain_text(name), *(count(split.boxes_by_class[name]) for split in new.splits.values()))
    yield rendered
    if len(names) > MAX_CLASSES:
        yield plain_text(f"and {plural(len(names) - MAX_CLASSES, 'class', 'classes')} (--json)")
    yield plain_text(f"stoker train {shlex.quote(data)} --splits {shlex.quote(out)}", "bold")
