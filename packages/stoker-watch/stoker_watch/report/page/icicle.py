"""The samples of stacks as icicle charts: inline SVG, without a script.

A row of a chart is a level of the tree (line of the job, its call, innermost frame), the width of a box its fraction of
the time. A tooltip has the numbers of a box; a table has those of all. `diagnosis/places/trees.py` makes the tree.
"""

from collections.abc import Iterator

from stoker_watch.diagnosis.places.trees import PlaceNode
from stoker_watch.report import format as fmt
from stoker_watch.report.explain import PHASE_COLORS
from stoker_watch.report.page.markup import Child, Markup, tag

ROW_HEIGHT = 24
MIN_NAMED = 0.03
"""Fraction of the width from which a box has room for some letters of its name."""
_COLORS = {
    "decode": "input_wait", "sync": "compute", "gc": "host", "python": "host",
    "evaluation": "eval", "loader": "input_wait", "start": "startup", "training step": "compute",
}  # fmt: skip
"""Kind of samples, or part of stoker → the phase that has its color; others have the name of a phase, or none."""


def icicle(tree: PlaceNode, label: str) -> Markup:
    """The drawing. label: what a screen reader says."""
    boxes, height = list(_boxes(tree, tree, 0.0, 0)), _depth(tree) * ROW_HEIGHT
    return tag("svg", boxes, width="100%", height=height, class_="icicle", role="img", aria_label=label)


def place_rows(tree: PlaceNode) -> list[list[Child]]:
    """Rows of a table: place, time, interval, fraction, samples, kind."""
    return [
        [" → ".join(node.name for node in path), *_numbers(tree, path[-1]), path[-1].kind.replace("_", " ")]
        for path in _paths(tree, ())
    ]


def _depth(node: PlaceNode) -> int:
    return 1 + max(map(_depth, node.nodes), default=0)


def _boxes(tree: PlaceNode, node: PlaceNode, x: float, level: int) -> Iterator[Child]:
    """x: its left edge, a fraction of the width. A box is an SVG of its own, which cuts its text off."""
    width = node.seconds / tree.seconds if tree.seconds > 0 else 0.0
    phases = (_COLORS.get(name, name) for name in (node.name, node.kind))
    color = next((PHASE_COLORS[phase] for phase in phases if phase in PHASE_COLORS), "var(--c8)")
    time, interval, fraction, samples = _numbers(tree, node)
    described = f"{node.name}: {time} (95 %: {interval}), {fraction} of the {tree.name}, {samples} samples, {node.kind}"
    name = tag("text", node.name, x=5, y=ROW_HEIGHT - 8) if width >= MIN_NAMED else None
    left, top, across = f"{100 * x:.3f}%", level * ROW_HEIGHT, f"{100 * width:.3f}%"
    fill = tag("rect", width="100%", height=ROW_HEIGHT - 1, style=f"fill:{color if level else 'var(--c9)'}")
    yield tag("svg", tag("title", described), fill, name, x=left, y=top, width=across, height=ROW_HEIGHT)
    for child in node.nodes:
        yield from _boxes(tree, child, x, level + 1)
        x += child.seconds / tree.seconds if tree.seconds > 0 else 0.0


def _numbers(tree: PlaceNode, node: PlaceNode) -> tuple[str, str, str, str]:
    fraction = node.seconds / tree.seconds if tree.seconds > 0 else None
    interval = f"{fmt.duration(node.low_s)} to {fmt.duration(node.high_s)}"
    return fmt.duration(node.seconds), interval, fmt.percentage(fraction), fmt.count(node.samples)


def _paths(node: PlaceNode, above: tuple[PlaceNode, ...]) -> Iterator[tuple[PlaceNode, ...]]:
    for child in node.nodes:
        yield (*above, child)
        yield from _paths(child, (*above, child))
