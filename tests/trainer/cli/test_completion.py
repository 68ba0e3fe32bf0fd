"""Shell completion: installed by the command as cyclopts does it, and asked by a real bash."""

import os
import subprocess
import sys
from pathlib import Path

from cyclopts import App

from stoker.cli.commands import add_to
from stoker_watch.cli.trainer import COMMANDS

ASK = """
source {script}
ask() {{ COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _stoker; echo "${{COMPREPLY[@]}}"; }}
ask stoker ""; ask stoker train demo --batch; ask stoker train demo --optimizer ""; ask stoker data ""
"""


def test_bash_completes_commands_flags_and_values(tmp_path: Path) -> None:
    script = tmp_path / "stoker.bash"
    command = [sys.executable, "-m", "stoker", "--install-completion", "--shell", "bash", "--output", str(script)]
    subprocess.run(command, check=True, env=os.environ | {"HOME": str(tmp_path)}, cwd=tmp_path, capture_output=True)
    assert str(script) in (tmp_path / ".bashrc").read_text()
    asked = subprocess.run(["bash", "-c", ASK.format(script=script)], check=True, capture_output=True, text=True)
    commands, flags, values, of_data = asked.stdout.splitlines()
    assert {"train", "predict", "why", "export", "launch"} <= set(commands.split())
    assert flags == "--batch-size"
    assert values.split() == ["sgd", "adamw", "muon"]
    assert {"check", "convert"} <= set(of_data.split())


def test_stoker_watch_knows_the_commands_of_the_trainer() -> None:
    app = App()
    add_to(app)
    assert {name for name in app if name[0] != "-"} == set(COMMANDS)
