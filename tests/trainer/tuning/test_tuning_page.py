"""docs/tuning.md, `stoker tune` and `stoker compare`: its table is that of the code, and its commands exist. The table
is written by `python -m tests.trainer.tuning.test_tuning_page`."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from stoker.data import demo
from stoker.training import lr_policy
from stoker.tuning.levers import all_levers
from stoker_watch.cli.app import _run as app_run
from stoker_watch.cli.app import app

PAGE = Path(__file__).resolve().parents[3] / "docs" / "tuning.md"
HEAD = "|---|---|---|---|\n"


def table() -> str:
    return "".join(
        f"| `{lever.name}` | {lever.loss} | "
        f"{'with `--allow accuracy`' if lever.tolerance is None else f'{lever.tolerance:g}'} | {lever.needs} |\n"
        for lever in all_levers().values()
    )


def test_the_page_has_every_lever() -> None:
    assert HEAD + table() + "\n" in PAGE.read_text(), "python -m tests.trainer.tuning.test_tuning_page writes the table"


def commands() -> list[str]:
    text = PAGE.read_text().partition("\n## Hyper-parameter search\n")[0]
    blocks = re.findall(r"```\n(.*?)```", text, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("stoker ")]


@pytest.mark.parametrize("command", commands())
def test_its_commands_parse(command: str) -> None:
    app.parse_args(shlex.split(command, comments=True)[1:], exit_on_error=False, print_error=False)


@pytest.mark.slow
def test_its_commands_do_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the page, on drawn images and with short budgets."""
    monkeypatch.setattr(demo, "IMAGES_PER_SPLIT", {"train": 24, "valid": 8})
    monkeypatch.setattr(demo, "IMAGE_SIDE", 64)
    monkeypatch.setattr(demo, "RADIUS_RANGE", (5.0, 12.0))
    monkeypatch.setenv("STOKER_CACHE_DIR", str(tmp_path / "cache"))
    shutil.copytree(demo.ensure_demo(), tmp_path / "photos")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lr_policy, "RUNGS", 1)  # else a search takes four minutes at least
    monkeypatch.setattr(lr_policy, "START_S", 1.0)

    def stoker(command: str) -> None:
        assert app_run(shlex.split(command, comments=True)[1:]) == 0, command

    stoker("stoker train photos --steps 60")
    (run,) = (tmp_path / "runs").glob("photos-*-1")
    shutil.copy(run / "config.toml", tmp_path)
    for name in ("main-1", "branch-1"):
        shutil.copytree(run, tmp_path / "runs" / name)
    for command in commands():
        words = command.partition("#")[0].replace("FOLDER-MODEL-1", run.name).replace("FOLDER", "photos")
        if command.startswith("stoker train"):
            words += " --steps 4"
        elif "--lr" in command:
            words = words.replace("30min", "90s")
        elif command.startswith("stoker tune"):
            words += " --levers cache"  # ends when it was tried
        kind, target = ("tune-lr" if "--lr" in command else "tune"), Path(words.split()[2]).name
        out = tmp_path / "runs" / f"{kind}-{target}"
        if command.startswith("stoker tune"):
            shutil.rmtree(out, ignore_errors=True)  # else it is continued
        stoker(words)
        if command.startswith("stoker tune"):
            assert (out / "config.toml").exists()


if __name__ == "__main__":
    before, _, after = PAGE.read_text().partition(HEAD)
    PAGE.write_text(before + HEAD + table() + "\n" + after[after.index("`--levers ") :])
