"""HTML as values: whatever is not `Markup` is escaped, so a class called `<script>` is a text like any other.

The only place of the page where angle brackets are written.
"""

import html
from collections.abc import Iterable, Sequence
from typing import TypeAlias


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child: TypeAlias = "str | int | Iterable[Child] | None"
"""What an element can hold: text (escaped), Markup, nothing, or several of these."""

MAX_NOWRAP_CHARS = 30
"""Characters of a command that fit on the line of a phone."""
_VOID = frozenset({"img", "input", "br", "meta", "rect", "line"})


def escape(value: object) -> Markup:
    """A text with its special characters escaped; control characters, which HTML forbids, are replaced."""
    if isinstance(value, Markup):
        return value
    printable = "".join(c if c in "\n\t" or c.isprintable() else "\ufffd" for c in str(value))
    return Markup(html.escape(printable))


def join(*children: Child) -> Markup:
    """Children one after the other."""
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
    """An element. An attribute's name may end in `_` and has `-` for `_`; None and False leave it out."""
    attributes_text = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escape(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _VOID:
        return (
            Markup(f"<{name}{attributes_text}>")
            if name in ("img", "input", "br", "meta")
            else Markup(f"<{name}{attributes_text}/>")
        )
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
    """A table. caption: what it shows, for everybody, or with `hidden` for screen readers alone; right: columns of
    numbers; wide: columns of sentences, which on a phone stand below the row's other cells. The first cell of a row is
    its heading."""
    numbers, texts = set(right), set(wide)
    stacks = "stack" if max(texts, default=0) > 0 else None

    def style(column: int) -> str | None:
        return "n" if column in numbers else "wide" if column in texts else None

    header = tag("tr", [tag("th", name, scope="col", class_=style(n)) for n, name in enumerate(head)])
    body = [
        tag(
            "tr",
            [
                tag("th", cell, scope="row", class_=style(n)) if n == 0 else tag("td", cell, class_=style(n))
                for n, cell in enumerate(row)
            ],
        )
        for row in rows
    ]
    title = tag("caption", caption, class_="hidden" if hidden else None)
    return tag(
        "div",
        tag("table", title, tag("thead", header), tag("tbody", body), class_=stacks),
        class_="scroll",
        tabindex=0,
        role="region",
        aria_label=caption,
    )


def bar(fraction: float, *, color: str = "var(--c0)") -> Markup:
    """A small horizontal bar, 0 … 1; the number must stand beside it."""
    width = f"width:{100 * min(1.0, max(0.0, fraction)):.1f}%;background:{color}"
    return tag("span", tag("span", style=width), class_="bar", aria_hidden="true")


def code(command: str) -> Markup:
    """A command to copy; a short one stays on one line."""
    return tag("code", command, class_="nobr" if len(command) <= MAX_NOWRAP_CHARS else None)


def section(name: str, title: str, *children: Child) -> Markup:
    """A part of the page that the navigation reaches."""
    return tag("section", tag("h2", title), *children, id=name)
