"""docs/data.md: its table of problems is that of the code. `python -m tests.trainer.data.test_data_page` writes it."""

from pathlib import Path

from stoker.data.formats.finder import FORMATS
from stoker.data.validation.problems import PROBLEM_KINDS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "data.md"
HEAD = "| kind | problem | unit | training | fix |\n|---|---|---|---|---|\n"


def table() -> str:
    rows = (
        f"| `{name}` | {kind.title} | {kind.unit} | {kind.action}: {kind.effect} | {kind.fix} |\n"
        for name, kind in PROBLEM_KINDS.items()
    )
    return HEAD + "".join(rows)


def test_the_page_has_every_kind() -> None:
    assert PAGE.read_text().endswith(table()), "python -m tests.trainer.data.test_data_page writes the table"


def test_the_page_has_the_formats_in_the_order_of_preference() -> None:
    text = PAGE.read_text()
    positions = [text.index(f"\n| `{name}` |") for name in FORMATS]
    assert positions == sorted(positions)


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().partition(HEAD)[0] + table())
