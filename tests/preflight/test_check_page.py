"""docs/check.md and its neighbors name every finding that a probe can make."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([*ROOT.glob("stoker/preflight/**/*.py"), ROOT / "stoker/planning/check.py"])
PAGES = "".join(path.read_text() for path in sorted(ROOT.glob("docs/check*.md")))
MAKERS = {"ok", "unknown", "blocker", "warning", "finding", "_finding", "_fine", "_refused"}
"""Functions whose first argument is the id of a finding."""


def ids(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        given = [keyword.value for keyword in node.keywords if keyword.arg == "id"]
        given += node.args[:1] if name in MAKERS else node.args[1:2] if name == "_rated" else []
        for value in given:
            if isinstance(value, ast.Constant) and isinstance(value.value, str) and value.value.isidentifier():
                yield value.value


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_every_finding_is_on_a_page(path: Path):
    absent = {id for id in ids(ast.parse(path.read_text())) if f"`{id}`" not in PAGES}
    documented_by_prefix = {id for id in absent if f"`{id.partition('_')[0]}_…`" in PAGES}
    assert absent - documented_by_prefix == set()
