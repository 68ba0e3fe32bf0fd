"""The plot of a learning-rate search, an SVG file: the range test above, AP of the short trainings below."""

import math
from collections.abc import Sequence

from stoker.training.lr_policy import Done, smooth
from stoker_watch.report.page.markup import Markup, tag

WIDTH, HEIGHT, LEFT, GAP = 640, 220, 56, 40
COLORS = ("#9aa7b4", "#4c8dd6", "#1b4f91")
"""Colors of the rounds, the last one darkest."""


def draw(lrs: Sequence[float], losses: Sequence[float], done: Done, best: float) -> str:
    """lrs, losses: of the range test. done: of the trainings. best: the suggested learning rate, a vertical line."""
    known = [*lrs, *(lr for _, lr in done)]
    low, high = math.log10(min(known)), math.log10(max(known))

    def x(lr: float) -> float:
        return LEFT + (WIDTH - LEFT - 16) * (math.log10(lr) - low) / max(high - low, 1e-9)

    means = smooth(losses)
    ceiling = 1.5 * max(means[: max(1, len(means) // 2)])  # the divergence at the end is cut off
    parts = _panel("loss (smoothed)", 0, ceiling)
    parts += _curve([(x(lr), _y(0, min(loss, ceiling), ceiling)) for lr, loss in zip(lrs, means, strict=False)], "#444")
    below = HEIGHT + GAP
    aps = [score.ap for score in done.values() if score.ap is not None]
    top = max([*aps, 1e-3]) * 1.1
    parts += _panel("AP, validation split", below, top)
    for number in range(len(COLORS)):
        scores = sorted(score for (rung, _), score in done.items() if rung == number and score.ap is not None)
        points = [(x(score.lr), _y(below, score.ap or 0.0, top)) for score in scores]
        parts += _curve(points, COLORS[number])
        parts += [tag("circle", cx=f"{a:.1f}", cy=f"{b:.1f}", r=4, fill=COLORS[number]) for a, b in points]
        if points:
            name = f"round {number + 1}"
            parts.append(_text(WIDTH - 70, below + 20 + 16 * number, name, fill=COLORS[number]))
    bottom = 2 * HEIGHT + GAP
    for decade in range(math.ceil(low), math.floor(high) + 1):
        parts.append(_text(x(10.0**decade), bottom + 16, f"1e{decade}", text_anchor="middle"))
    place = f"{x(best):.1f}"
    parts.append(tag("line", x1=place, x2=place, y1=0, y2=bottom, stroke="#c0392b", stroke_dasharray="4 3"))
    parts.append(_text(x(best) + 4, 12, f"lr {best:.3g}", fill="#c0392b"))
    box = f"0 0 {WIDTH} {bottom + 24}"
    space = "http://www.w3.org/2000/svg"
    return str(tag("svg", parts, xmlns=space, viewBox=box, font_family="sans-serif", font_size=12))


def _y(above: float, value: float, top: float) -> float:
    return above + HEIGHT - (HEIGHT - 24) * value / top


def _panel(title: str, above: float, top: float) -> list[Markup]:
    """A frame with the ends of its axis and a title."""
    axis = tag("rect", x=LEFT, y=above, width=WIDTH - LEFT - 16, height=HEIGHT, fill="none", stroke="#ccc")
    ends = [_text(LEFT - 6, _y(above, value, top) + 4, f"{value:.3g}", text_anchor="end") for value in (0.0, top / 1.1)]
    return [axis, *ends, _text(LEFT + 8, above + 18, title, font_weight="bold")]


def _text(x: float, y: float, text: str, **attributes: str) -> Markup:
    return tag("text", text, x=f"{x:.1f}", y=f"{y:.1f}", **attributes)


def _curve(points: Sequence[tuple[float, float]], stroke: str) -> list[Markup]:
    text = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    return [tag("polyline", points=text, fill="none", stroke=stroke, stroke_width=2)] if points else []
