"""docs/tuning.md: its table is that of the code, and its commands exist. The table is written by
`python -m tests.tuning.test_tuning_page`."""

import re
import shlex
from pathlib import Path

import pytest

from stoker.cli.app import app
from stoker.tuning.levers import all_levers

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tuning.md"
HEAD = "|---|---|---|---|\n"


def table() -> str:
    return "".join(
        f"| `{lever.name}` | {lever.loss} | "
        f"{'with `--allow accuracy`' if lever.tolerance is None else f'{lever.tolerance:g}'} | {lever.needs} |\n"
        for lever in all_levers().values()
    )


def test_the_page_has_every_lever() -> None:
    assert HEAD + table() + "\n" in PAGE.read_text(), "python -m tests.tuning.test_tuning_page writes the table"


def commands() -> list[str]:
    blocks = re.findall(r"```\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("stoker ")]


@pytest.mark.parametrize("command", commands())
def test_its_commands_parse(command: str) -> None:
    app.parse_args(shlex.split(command, comments=True)[1:], exit_on_error=False, print_error=False)


if __name__ == "__main__":
    before, _, after = PAGE.read_text().partition(HEAD)
    PAGE.write_text(before + HEAD + table() + "\n" + after[after.index("`--levers ") :])
