"""docs/tuning.md, the search: its commands and its space are ones that the code takes."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.config.architectures import read_architectures
from stoker.knowledge import read_toml
from stoker.search.space import read_space
from stoker_watch.cli.app import app

PAGE = (
    (Path(__file__).resolve().parents[3] / "docs" / "tuning.md")
    .read_text()
    .partition("\n## Hyper-parameter search\n")[2]
)
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


@pytest.mark.parametrize("command", COMMANDS)
def test_its_commands_parse(command: str) -> None:
    app.parse_args(shlex.split(command)[1:], exit_on_error=False, print_error=False)


@pytest.mark.slow
def test_its_command_runs(tmp_path: Path) -> None:
    command = COMMANDS[0]
    small = {"DATA": "demo", "--epochs": "--steps", "20": "9", "50": "2", "2": "1"}
    words = [small.get(word, word) for word in shlex.split(command)[1:]]
    words += ["--image-size", "64", "64", "--batch-size", "4", "--workers", "1", "--device", "cpu"]
    words += ["--model", "retinanet_tiny_fpn", "--run-dir", "study"]
    done = subprocess.run(
        [sys.executable, "-m", "stoker", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    for promised in (
        "space:",
        "trial 0 has the defaults",
        "expected: at most 2 trials",
        "2 trials: 0 pruned, 0 failed",
    ):
        assert promised in done.stdout + done.stderr
    assert (tmp_path / "study" / "report.html").is_file()


def test_its_space_is_valid(tmp_path: Path) -> None:
    (tmp_path / "space.toml").write_text(re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)[1])
    assert set(read_space(tmp_path / "space.toml").settings) == {"lr", "batch_size", "precision"}


def test_it_names_every_setting_of_the_default_spaces() -> None:
    rows = {kind: row for kind, row in read_toml("search.toml").items() if kind != "not_searched"}
    assert set(rows) - {"default"} <= {row.recipe for row in read_architectures().values()}
    for table in rows.values():
        for name in table:
            assert f"`{name}`" in PAGE, name
