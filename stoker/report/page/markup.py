"""HTML elements as values. Everything that is not `Markup` is escaped, so a class called `<script>` is plain text.

No other module of the page writes angle brackets.
"""

import html
from collections.abc import Iterable, Sequence
from typing import TypeAlias


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child: TypeAlias = "str | int | Iterable[Child] | None"
"""Content of an element: text (escaped), Markup, nothing, or several of these."""

MAX_NOWRAP_CHARS = 30
"""Characters that fit on one line of a phone."""
_SVG_VOID = frozenset({"rect", "line"})
_VOID = frozenset({"img", "input", "br", "meta"}) | _SVG_VOID


def escape(value: object) -> Markup:
    """Escapes special characters; replaces control characters, which HTML forbids."""
    if isinstance(value, Markup):
        return value
    printable = "".join(c if c in "\n\t" or c.isprintable() else "\ufffd" for c in str(value))
    return Markup(html.escape(printable))


def join(*children: Child) -> Markup:
    """Concatenates children."""
    parts: list[str] = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, str | int):
            parts.append(escape(child))
        else:
            parts.append(join(*child))
    return Markup("".join(parts))


def tag(name: str, *children: Child, **attributes: str | int | float | bool | None) -> Markup:
    """An element. In names of attributes `_` stands for `-`, except at the end; None and False omit an attribute."""
    attributes_text = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escape(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _VOID:
        end = "/>" if name in _SVG_VOID else ">"
        return Markup(f"<{name}{attributes_text}{end}")
    return Markup(f"<{name}{attributes_text}>{join(*children)}</{name}>")


def table(
    caption: str,
    head: Sequence[str],
    rows: Iterable[Sequence[Child]],
    *,
    right: Iterable[int] = (),
    wide: Iterable[int] = (),
    hidden: bool = False,
) -> Markup:
    """A table. caption: with `hidden` for screen readers only; right: columns of numbers; wide: columns of sentences,
    which are below the other cells of a row on a phone. The first cell of a row is its heading."""
    numbers, texts = set(right), set(wide)

    def style(column: int) -> str | None:
        return "n" if column in numbers else "wide" if column in texts else None

    def row_cell(column: int, content: Child) -> Markup:
        scope = {"scope": "row"} if column == 0 else {}
        return tag("td" if column else "th", content, **scope, class_=style(column))

    header = tag("tr", [tag("th", name, scope="col", class_=style(n)) for n, name in enumerate(head)])
    body = [tag("tr", [row_cell(n, content) for n, content in enumerate(row)]) for row in rows]
    title = tag("caption", caption, class_="hidden" if hidden else None)
    stacks = "stack" if max(texts, default=0) > 0 else None
    rendered = tag("table", title, tag("thead", header), tag("tbody", body), class_=stacks)
    return tag("div", rendered, class_="scroll", tabindex=0, role="region", aria_label=caption)


def bar(fraction: float, *, color: str = "var(--c0)") -> Markup:
    """A small horizontal bar, 0 … 1; the number must be next to it."""
    width = f"width:{100 * min(1.0, max(0.0, fraction)):.1f}%;background:{color}"
    return tag("span", tag("span", style=width), class_="bar", aria_hidden="true")


def code(command: str) -> Markup:
    """A command to copy; a short one is not wrapped."""
    return tag("code", command, class_="nobr" if len(command) <= MAX_NOWRAP_CHARS else None)


def section(name: str, title: str, *children: Child) -> Markup:
    """A section of the page, with an id for the navigation."""
    return tag("section", tag("h2", title), *children, id=name)


def absent(sentence: str) -> Markup:
    """A sentence in place of what is not there."""
    return tag("p", sentence, class_="absent")


def note(*children: Child) -> Markup:
    """A remark in small print."""
    return tag("p", *children, class_="note")


def bullets(items: Iterable[Child], *, class_: str | None = None) -> Markup | None:
    """A list; None without items."""
    listed = [tag("li", item) for item in items]
    return tag("ul", listed, class_=class_) if listed else None


def details(summary: str, *children: Child) -> Markup:
    """A part of the page that is collapsed."""
    return tag("details", tag("summary", summary), *children)
