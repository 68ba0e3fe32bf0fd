"""stoker-watch is installed next to the packages of a job: what it requires, imports and advises stays light."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIGHT = ROOT / "packages" / "stoker-watch"

START = """
import json, sys

sys.modules["stoker"] = None  # not installed
sys.argv = ["stoker", *sys.argv[1:]]
import stoker_watch.cli.app

loaded = sorted(sys.modules)
try:
    stoker_watch.cli.app.main()
except SystemExit as ended:
    print(json.dumps([ended.code, loaded]), file=sys.stderr)
"""


def project(name: str) -> dict[str, Any]:
    return dict(tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"])


def test_no_requirement_has_an_upper_bound() -> None:
    """An upper bound would replace a newer package of the job, or refuse to be installed next to it."""
    requirements = project("stoker-watch")["dependencies"]
    assert requirements
    for requirement in requirements:
        assert re.fullmatch(r"[\w-]+>=[\d.]+(; python_version < '3\.11')?", requirement)


def start(*arguments: str) -> tuple[str, list[str], int, list[str]]:
    """Standard output, lines of messages, exit code and imported modules of `stoker` without the trainer."""
    command = [sys.executable, "-c", START, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    *messages, last = done.stderr.splitlines()
    code, modules = json.loads(last)
    return done.stdout, messages, code, modules


def test_the_command_line_imports_only_what_parses_it() -> None:
    """Each start pays for it: `stoker --help` shall take less than 0.2 s."""
    printed, _, code, modules = start("--help")
    assert code == 0
    assert "watch" in printed
    heavy = {"msgspec", "psutil", "obstore", "jinja2", "google.protobuf", "prometheus_client", "pynvml", "asyncio"}
    heavy |= {f"stoker_watch.{name}" for name in ("runs", "storage", "diagnosis", "recording", "report", "watch")}
    assert sorted(heavy & set(modules)) == []


@pytest.mark.parametrize("command", ["train", "predict"])
def test_a_command_of_the_trainer_says_in_one_line_what_to_install(command: str) -> None:
    _, messages, code, _ = start(command, "demo")
    assert messages == [f"stoker: `stoker {command}` needs the trainer: pip install stoker"]
    assert code == 2


def test_extras_that_are_advised_exist_in_the_package_that_is_advised() -> None:
    """stoker-watch advises its own, as the trainer needs gigabytes; findings of `check` are the trainer's."""
    extras = {name: project(name)["optional-dependencies"] for name in ("stoker-watch", "stoker")}
    for path in sorted(LIGHT.rglob("*")):
        if path.suffix not in {".py", ".toml", ".md"} or path == LIGHT / "pyproject.toml":
            continue
        text = path.read_text()
        for match in re.finditer(r"(stoker(?:-watch)?)\[([\w{}]+)\]", text):
            package, extra = match.groups()
            assert extra == "{name}" or extra in extras[package], f"{path}: {match[0]}"
            if package == "stoker":
                assert path.name == "findings.toml", f"{path}: {match[0]}"
                assert text[: match.start()].rpartition("\ncommands = ")[2].startswith('["check"]')
    tracked = re.search(r"track: tuple\[Literal\[(.*?)\]", (LIGHT / "stoker_watch/monitor/options.py").read_text())
    assert tracked is not None
    assert {name.strip('" ') for name in tracked[1].split(",")} <= set(extras["stoker-watch"])
