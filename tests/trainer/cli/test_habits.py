"""What users of other tools type, taken from their documentation and projects (habits.toml): what stoker answers."""

import functools
import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from stoker.cli.commands import find_flags
from stoker.config.flag_names import translate
from stoker_watch.cli.app import app, main

HABITS = tomllib.loads((Path(__file__).parent / "habits.toml").read_text())["habits"]


def test_there_are_forty_of_six_tools() -> None:
    assert len(HABITS) >= 40
    sources = " ".join(habit["source"] for habit in HABITS)
    for tool in ("ultralytics", "detectron2", "mmdetection", "pytorch/vision", "tensorflow/models", "rf-detr"):
        assert tool in sources


@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit["typed"])
def test_a_command_of_another_tool_is_understood_or_answered(
    habit: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert set(habit) <= {"source", "typed", "becomes", "code", "words"}
    monkeypatch.chdir(tmp_path)
    typed = shlex.split(habit["typed"])
    if "becomes" in habit:
        arguments, _ = translate(typed, functools.partial(find_flags, app))
        assert arguments == shlex.split(habit["becomes"])
        app.parse_args(arguments, exit_on_error=False)
    dry = ["--dry-run"] if habit.get("becomes", "").startswith("train") else []  # no processes of `--devices 2`
    monkeypatch.setattr(sys, "argv", ["stoker", *typed, *dry])
    with pytest.raises(SystemExit) as ended:
        main()
    output = "".join(capfd.readouterr())
    assert ended.value.code in (habit["code"] if isinstance(habit["code"], list) else [habit["code"]]), output
    joined = " ".join(output.replace("│", " ").split())
    for word in habit.get("words", ()):
        assert word in joined
    assert "Traceback" not in output
    assert not list(tmp_path.iterdir())


def test_the_commands_of_the_readme_are_commands() -> None:
    text = (Path(__file__).resolve().parents[3] / "README.md").read_text()
    lines = [line.partition(" #")[0] for line in text.splitlines() if line.startswith("stoker ")]
    typed = re.findall(r"`stoker (train data=[^`]+|val model=[^`]+)`", text)
    assert len(lines) >= 7
    assert len(typed) == 2
    for command in [line.removeprefix("stoker ") for line in lines if "install-completion" not in line] + typed:
        arguments, _ = translate(shlex.split(command), functools.partial(find_flags, app))
        app.parse_args(arguments, exit_on_error=False)
