"""docs/add-a-setting.md, done as it says, on a copy of the package."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.processes import python_path

ROOT = Path(__file__).resolve().parents[3]
CHECK = """
from stoker_watch.cli.app import app
from stoker.config.settings import check_config, from_fields, from_toml, to_toml
from stoker.models.table import check_settings
from stoker.training.defaults.derive import SETTINGS
import pathlib
config = from_fields({"label_smoothing": 0.1})
check_config(config)
pathlib.Path("c.toml").write_text(to_toml(config, {}))
assert from_toml(pathlib.Path("c.toml"))[0].model.label_smoothing == 0.1
_, bound, _ = app.parse_args(["train", "images", "--label-smoothing", "0.2"])
assert bound.arguments["config"].model.label_smoothing == 0.2
assert SETTINGS["label_smoothing"][0] == 0.0
check_settings(config.replace(model="retinanet_tiny_fpn").model)
try:
    check_config(from_fields({"label_smoothing": 0.9}))
except Exception as error:
    assert "--label-smoothing 0.9 is out of range" in str(error)
else:
    raise SystemExit("no error")
"""


@pytest.mark.slow
def test_a_setting_is_added_as_the_page_says(tmp_path: Path) -> None:
    field, row = re.findall(r"```(?:python|toml)\n(.*?)```", (ROOT / "docs/add-a-setting.md").read_text(), re.DOTALL)
    for folder in ("packages", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "docs").mkdir()
    package = tmp_path / "packages/stoker/stoker"
    settings = package / "config/settings.py"
    text = settings.read_text()
    text = text.replace("    box_loss: Literal", field + "    box_loss: Literal", 1)
    settings.write_text(text)
    with (package / "knowledge/settings.toml").open("a") as file:
        file.write(row)
    environment = os.environ | {"PYTHONPATH": python_path(tmp_path)}
    run = {"cwd": tmp_path, "env": environment, "check": True}
    subprocess.run([sys.executable, "-c", CHECK], **run)
    subprocess.run([sys.executable, "-m", "tests.trainer.config.test_surface"], **run)
    assert "label_smoothing: float" in (package / "config/keywords.pyi").read_text()
    assert "| `label_smoothing` | Label smoothing" in (tmp_path / "docs/settings.md").read_text()
