"""Errors that a program handles only to end: Python prints no traceback, `stoker watch` has it all the same."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.diagnosis.engine import diagnose
from stoker.diagnosis.postmortem import explain
from stoker.diagnosis.run_data import LogLine, Termination
from stoker.watch.hook_reader import HookReader, add_hook_env

WATCH = [sys.executable, "-c", "from stoker.cli.app import main; main()", "watch", "--run-dir", "run", "--"]

JOB = """
import sys
def train():
    history = {{"accuracy": [0.5]}}
    return history["acc"]
try:
    train()
except {caught} as error:
    print(error)
    {end}
"""


def reported(folder: Path, code: str, *, exit_code: int | None = None) -> list[str]:
    """What the hook of a job has of such an error."""
    (folder / "job.py").write_text(code)
    (folder / "state").mkdir()
    environment = add_hook_env(dict(os.environ), folder / "state")
    done = subprocess.run([sys.executable, "job.py"], cwd=folder, env=environment, capture_output=True, check=False)
    assert exit_code is None or done.returncode == exit_code, done.stderr.decode()
    assert not list((folder / "state").glob("errors-*"))
    return HookReader(folder / "state", devices=1, now_s=0.0).handled_error()


@pytest.mark.parametrize("end", ["sys.exit(1)", "exit(2)", "quit('no such metric')", "exit(code=1)"])
def test_an_error_that_is_handled_only_to_end(tmp_path: Path, end: str) -> None:
    lines = reported(tmp_path, JOB.format(caught="Exception", end=end))
    assert (lines[0], lines[-1]) == ("Traceback (most recent call last):", "KeyError: 'acc'")
    assert any('job.py", line 5, in train' in line for line in lines)


@pytest.mark.parametrize("end", ["sys.exit(0)", "sys.exit()", "exit()", "pass", "error = None\nsys.exit(1)"])
def test_an_end_without_a_failure_or_after_it(tmp_path: Path, end: str) -> None:
    assert reported(tmp_path, JOB.format(caught="Exception", end=end)) == []


def test_the_functions_stay_what_they_were(tmp_path: Path) -> None:
    code = "import pickle, sys; assert pickle.loads(pickle.dumps(sys.exit)) is sys.exit"
    code += "\nassert sys.exit.__name__ == 'exit'"
    code += "\ntry:\n    sys.exit(3)\nexcept SystemExit as end:\n    assert end.code == 3"
    assert reported(tmp_path, code, exit_code=0) == []


def test_a_long_traceback_is_cut_in_the_middle(tmp_path: Path) -> None:
    code = "import sys\ndef f(n): return 1 / n + g(n)\ndef g(n): return f(n - 1)\n"
    code += "try: f(90)\nexcept Exception: sys.exit(1)"
    lines = reported(tmp_path, code)
    assert len(lines) <= 60
    assert (lines[0][:9], lines[-1]) == ("Traceback", "ZeroDivisionError: division by zero")


def test_stoker_why_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB.format(caught="KeyError", end="sys.exit(1)"))
    assert subprocess.run([*WATCH, sys.executable, "job.py"], cwd=tmp_path, check=False).returncode == 1
    finding = diagnose(tmp_path / "run")[0]
    text = " ".join(evidence.text for evidence in finding.evidence)
    assert "KeyError: 'acc'" in text
    assert "job.py:5" in text


def test_what_the_output_explains_comes_first() -> None:
    """A traceback that is printed, and a known line, are about the end itself."""
    handled = (
        LogLine("Traceback (most recent call last):", "events.jsonl:2"),
        LogLine("ValueError: x", "events.jsonl:2"),
    )
    printed = (LogLine("RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB", "output.log:1"),)
    assert explain(Termination(exit_code=1, output=printed, handled_error=handled))[0].id == "gpu_out_of_memory"
