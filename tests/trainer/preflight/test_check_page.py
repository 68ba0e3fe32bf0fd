"""The findings of `stoker check`: each is on a page of docs/, and its texts fit what the probes put into them."""

import ast
import re
import string
from collections.abc import Iterator
from pathlib import Path

from stoker.preflight.catalog import JOB_FILES, Row, rows
from stoker.preflight.static.tables import COMPANIONS, NAMES

ROOT = Path(__file__).resolve().parents[3]
STOKER = ROOT / "packages/stoker/stoker"
SOURCES = sorted([*STOKER.glob("preflight/**/*.py"), STOKER / "planning/check.py"])
PAGES = "".join(path.read_text() for path in sorted(ROOT.glob("docs/check*.md")))
ROWS = rows()


def calls(*names: str) -> Iterator[ast.Call]:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
                yield node


def words(path: Path) -> set[str]:
    return {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}


def placeholders(row: Row) -> set[str]:
    fields = [field for text in (row.title, row.evidence, row.fix) for _, field, _, _ in string.Formatter().parse(text)]
    return {re.split(r"[.[]", field)[0] for field in fields if field}


def test_every_finding_is_on_a_page():
    ids = {name.partition("/")[0] for name in ROWS}
    for call in calls("Finding", "make_finding", "ok", "unknown"):
        given = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "id")]
        ids |= {value.value for value in given if isinstance(value, ast.Constant)}
    absent = {id for id in ids if f"`{id}`" not in PAGES and f"`{id.partition('_')[0]}_…`" not in PAGES}
    assert absent == set()


def test_what_a_probe_tells_is_what_the_row_asks_for():
    for call in calls("describe"):
        name = call.args[0]
        if not isinstance(name, ast.Constant) or any(keyword.arg is None for keyword in call.keywords):
            continue  # several rows, or all values in a dict: tests of the probes
        row = ROWS[name.value]
        assert placeholders(row) <= {keyword.arg for keyword in call.keywords}, name.value


def test_every_row_is_used():
    rules = {rule["id"] for rule in JOB_FILES["rules"]}
    used = set.union(*map(words, SOURCES), rules) | {row.id for row in (*NAMES.switches, *COMPANIONS.companions)}
    dynamic = (
        "/refused",
        "/unknown",
        "metadata_unreachable/",
        "variable_value/",
        "data_rate/",
        "ecc_errors/",
        "driver_minimum/",
        "two_",
    )
    assert {name for name in ROWS if name not in used and not any(part in name for part in dynamic)} == set()
