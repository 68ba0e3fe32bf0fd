"""docs/tuning.md: its table is that of the code, and its commands exist. The table is written by
`python -m tests.tuning.test_tuning_page`."""

import re
import shlex
import shutil
import subprocess
import sys
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


CONFIG = """
[data]
image_size = [64, 64]
[model]
model = "retinanet_tiny_fpn"
[run]
batch_size = 4
workers = 1
device = "cpu"
max_duration = "40"
eval_every = "2"
"""


@pytest.mark.slow
def test_its_commands_run(tmp_path: Path) -> None:
    """All but those of `--lr`, which is thirteen trainings, with one lever and the shortest budget."""
    (tmp_path / "config.toml").write_text(CONFIG)

    def run(words: list[str]) -> str:
        command = [sys.executable, "-m", "stoker", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{words}: {done.stderr}{done.stdout}"
        return done.stdout

    run(["train", "demo", "--config", "config.toml", "--run-dir", "runs/main-1"])
    shutil.copytree(tmp_path / "runs/main-1", tmp_path / "runs/branch-1")
    ran = []
    for command in commands():
        words = shlex.split(command.replace("FOLDER-MODEL-1", "main-1").replace("FOLDER", "demo"), comments=True)[1:]
        if "--lr" in words or "tune-lr" in command:
            continue
        if words[0] == "tune":
            more = [] if "--config" in words else ["--out", f"runs/tune-{len(ran)}"]
            words += ["--budget", "90s", "--levers", "eval_every", *more]
        elif words[0] == "train":
            words += ["--run-dir", "runs/tuned"]
        output = run(words)
        ran.append(words[0])
        assert words[0] != "tune" or "img/s before" in output
        assert words[0] != "compare" or "1.00" in output
    assert ran == ["tune", "tune", "tune", "train", "compare"]


if __name__ == "__main__":
    before, _, after = PAGE.read_text().partition(HEAD)
    PAGE.write_text(before + HEAD + table() + "\n" + after[after.index("`--levers ") :])
