"""HTML elements as values, for charts, images with boxes, cells of tables, and the drawing of `stoker plan`. The pages
themselves are the templates next to this file, which `report/html.py` fills; `macros.html` has the tables.

Everything that is not `Markup` is escaped, here and in the templates, so a class called `<script>` is plain text.
"""

from collections.abc import Iterable
from typing import TypeAlias

import markupsafe
from markupsafe import Markup as Markup  # users import it from here

Child: TypeAlias = "str | int | Iterable[Child] | None"
"""Content of an element: text (escaped), Markup, nothing, or several of these."""

_SVG_VOID = frozenset({"rect", "line"})
_VOID = frozenset({"img", "input", "br", "meta"}) | _SVG_VOID


def clean(value: object) -> object:
    """The value without control characters, which HTML forbids; None becomes nothing. For texts of templates."""
    if value is None:
        return ""
    if isinstance(value, Markup):
        return value
    return "".join(c if c in "\n\t" or c.isprintable() else "\ufffd" for c in str(value))


def escape(value: object) -> Markup:
    """Escapes special characters; replaces control characters."""
    return markupsafe.escape(clean(value))


def join(*children: Child) -> Markup:
    present = (child for child in children if child is not None)
    return Markup("".join(escape(child) if isinstance(child, str | int) else join(*child) for child in present))


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


def bar(fraction: float, *, color: str = "var(--c0)") -> Markup:
    """A small horizontal bar, 0 … 1; the number must be next to it."""
    width = f"width:{100 * min(1.0, max(0.0, fraction)):.1f}%;background:{color}"
    return tag("span", tag("span", style=width), class_="bar", aria_hidden="true")
