"""docs/search.md: its commands and its space are ones that the code takes."""

import re
import shlex
from pathlib import Path

import pytest

from stoker.cli.app import app
from stoker.config.architectures import read_architectures
from stoker.knowledge import read_toml
from stoker.search.space import read_space

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "search.md").read_text()
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


@pytest.mark.parametrize("command", COMMANDS)
def test_its_commands_parse(command: str) -> None:
    app.parse_args(shlex.split(command)[1:], exit_on_error=False, print_error=False)


def test_its_space_is_valid(tmp_path: Path) -> None:
    (tmp_path / "space.toml").write_text(re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)[1])
    assert set(read_space(tmp_path / "space.toml").settings) == {"lr", "batch_size", "precision"}


def test_it_names_every_setting_of_the_default_spaces() -> None:
    rows = read_toml("search.toml")
    assert set(rows) - {"default"} <= {row.recipe for row in read_architectures().values()}
    for table in rows.values():
        for name in table:
            assert f"`{name}`" in PAGE, name
