"""The files of knowledge/: each says what it is, code reads it, a wheel has it, and endings are read on demand.

Schemas and values have their tests next to those of the code that reads them.
"""

import ast
import re
import string
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from stoker_watch.knowledge import read_toml
from tests import sources


@pytest.mark.parametrize("package", sources.PACKAGES, ids=lambda package: package.name)
def test_each_file_has_a_head_and_a_reader(package: Path) -> None:
    code = "".join(path.read_text() for _, path in sources.python_files())
    described = (package / "knowledge/__init__.py").read_text()
    files = sorted(package.glob("knowledge/*.toml"))
    assert files
    for path in files:
        assert path.read_text().startswith("# "), path.name
        assert read_toml(path.name, path.parent)
        assert f'read_toml("{path.name}"' in code, path.name
        assert path.name in described


def test_a_file_is_in_one_package_only() -> None:
    light, trainer = ({path.name for path in package.glob("knowledge/*.toml")} for package in sources.PACKAGES)
    assert light & trainer == {"commands.toml"}


def test_each_error_has_its_row_and_all_values_of_it() -> None:
    rows, used = read_toml("errors.toml") | read_toml("data_errors.toml"), set()
    assert not read_toml("errors.toml").keys() & read_toml("data_errors.toml").keys()
    for _, path in sources.python_files():
        code = path.read_text()
        if not re.search(r"from stoker_watch\.errors import .*\bmake_error\b", code):
            continue
        for call in ast.walk(ast.parse(code)):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "make_error":
                key = ast.literal_eval(call.args[1])
                used.add(key)
                fields = {field for text in rows[key].values() for _, field, _, _ in string.Formatter().parse(text)}
                named = {field.partition(".")[0] for field in fields if field is not None}
                given = {keyword.arg for keyword in call.keywords} - {"choices", "cause", "fix"}
                assert named == given, key
                assert not {"cause", "fix"} & rows[key].keys() & {keyword.arg for keyword in call.keywords}, key
    assert used == rows.keys()


@pytest.mark.parametrize("package", sources.PACKAGES, ids=lambda package: package.name)
def test_a_wheel_has_them(package: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=package.parent, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith(f"{package.name}/")}
    data = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".pyc", ".py")}
    assert len(data) > 20
    assert {path.relative_to(package.parent).as_posix() for path in data} <= packed


def test_the_packages_have_one_version() -> None:
    light, trainer = (
        tomllib.loads((package.parent / "pyproject.toml").read_text())["project"] for package in sources.PACKAGES
    )
    assert light["version"] == trainer["version"]
    assert f"stoker-watch=={light['version']}" in trainer["dependencies"]


def test_endings_are_read_when_a_job_has_ended() -> None:
    """Their file takes most of the time of all."""
    code = (
        "import stoker_watch.cli.app, stoker_watch.diagnosis.engine\n"
        "from stoker_watch.diagnosis.endings import endings; print(endings.cache_info())"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "currsize=0" in printed
