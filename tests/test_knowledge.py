"""The files of stoker/knowledge/: each says what it is, code reads it, a wheel has it, and endings are read on demand.

Schemas and values have their tests next to those of the code that reads them.
"""

import ast
import re
import string
import subprocess
import sys
import zipfile
from pathlib import Path

from stoker_watch.knowledge import read_toml

import stoker

PACKAGE = Path(stoker.__file__).parent
FILES = sorted(PACKAGE.glob("knowledge/*.toml"))


def test_each_file_has_a_head_and_a_reader() -> None:
    code = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    described = (PACKAGE / "knowledge/__init__.py").read_text()
    for path in FILES:
        assert path.read_text().startswith("# "), path.name
        assert read_toml(path.name)
        assert f'read_toml("{path.name}")' in code, path.name
        assert path.name in described


def test_each_error_has_its_row_and_all_values_of_it() -> None:
    rows, used = read_toml("errors.toml") | read_toml("data_errors.toml"), set()
    assert not read_toml("errors.toml").keys() & read_toml("data_errors.toml").keys()
    for path in PACKAGE.rglob("*.py"):
        code = path.read_text()
        if not re.search(r"from stoker\.errors import .*\bmake_error\b", code):
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


def test_a_wheel_has_them(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=PACKAGE.parent, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {f"stoker/knowledge/{path.name}" for path in FILES}
        names |= {
            f"stoker/launching/{name}" for name in ("slurm.sbatch", "kubernetes.yaml", "gcp_batch.yaml", "vertex.yaml")
        }
        assert names <= set(archive.namelist())


def test_endings_are_read_when_a_job_has_ended() -> None:
    """Their file takes most of the time of all."""
    code = (
        "import stoker_watch.cli.app, stoker_watch.diagnosis.engine\n"
        "from stoker_watch.diagnosis.endings import endings; print(endings.cache_info())"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "currsize=0" in printed
