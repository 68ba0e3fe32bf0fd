"""Errors that a program handles only to end: Python prints no traceback, `stoker watch` has it all the same."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker_watch.diagnosis.engine import diagnose
from stoker_watch.diagnosis.postmortem import explain
from stoker_watch.diagnosis.run_data import LogLine, Termination
from stoker_watch.watch.hook_reader import HookReader, add_hook_env

WATCH = [sys.executable, "-c", "from stoker_watch.cli.app import main; main()", "watch", "--run-dir", "run", "--"]

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


def reported(folder: Path, code: str, *, exit_code: int = 1) -> list[str]:
    """What the hook of a job that ends with this code has of such an error."""
    (folder / "job.py").write_text(code)
    (folder / "state").mkdir()
    environment = add_hook_env(dict(os.environ), folder / "state")
    done = subprocess.run([sys.executable, "job.py"], cwd=folder, env=environment, capture_output=True, check=False)
    assert done.returncode == exit_code, done.stderr.decode()
    assert not list((folder / "state").glob("errors-*"))
    return HookReader(folder / "state", devices=1, now_s=0.0).handled_error(exit_code)


@pytest.mark.parametrize(
    ("end", "exit_code"),
    [("sys.exit(1)", 1), ("exit(2)", 2), ("quit('no such metric')", 1), ("exit(code=1)", 1), ("sys.exit(error)", 1)],
)
def test_an_error_that_is_handled_only_to_end(tmp_path: Path, end: str, exit_code: int) -> None:
    lines = reported(tmp_path, JOB.format(caught="Exception", end=end), exit_code=exit_code)
    assert (lines[0], lines[-1]) == ("Traceback (most recent call last):", "KeyError: 'acc'")
    assert any('job.py", line 5, in train' in line for line in lines)


@pytest.mark.parametrize(
    ("end", "exit_code"),
    [("sys.exit(0)", 0), ("sys.exit()", 0), ("exit()", 0), ("pass", 0), ("error = None\nsys.exit(1)", 1)],
)
def test_an_end_without_a_failure_or_after_it(tmp_path: Path, end: str, exit_code: int) -> None:
    assert reported(tmp_path, JOB.format(caught="Exception", end=end), exit_code=exit_code) == []


def test_no_file_of_the_job_is_imported_while_it_ends(tmp_path: Path) -> None:
    (tmp_path / "traceback.py").write_text("print('read')\n")
    assert "KeyError: 'acc'" in reported(tmp_path, JOB.format(caught="Exception", end="sys.exit(1)"))


GOES_ON = """
import sys, threading
def leave():
    try: 1 / 0
    except ZeroDivisionError: sys.exit(3)
{}
print("after it")
"""


@pytest.mark.parametrize("before", [
    "threading.Thread(target=leave).start()",
    "try: leave()\nexcept SystemExit: pass\nsys.exit(0)",
])  # fmt: skip
def test_a_process_that_goes_on(tmp_path: Path, before: str) -> None:
    assert reported(tmp_path, GOES_ON.format(before), exit_code=0) == []
    assert not list((tmp_path / "state").glob("*.exit"))


def test_only_the_end_of_the_job_is_explained(tmp_path: Path) -> None:
    """Another exit code; a process that ended long before."""
    lines = reported(tmp_path, JOB.format(caught="Exception", end="sys.exit(3)"), exit_code=3)
    reader = HookReader(tmp_path / "state", devices=1, now_s=0.0)
    assert (reader.handled_error(4), reader.handled_error(1)) == ([], lines), "a launcher has 1"
    (path,) = (tmp_path / "state").glob("*.exit")
    os.utime(path, (0, 0))
    assert reader.handled_error(3) == []
    for damaged in ("", "x\nTraceback"):
        path.write_text(damaged)
        assert reader.handled_error(3) == []
    path.unlink()
    path.symlink_to("nowhere")
    assert reader.handled_error(3) == reader.mistakes() == reader.growing() == []


BEHAVIOR = """
import pickle, sys, typing
assert pickle.loads(pickle.dumps(sys.exit)) is sys.exit
assert sys.exit.__name__ == "exit" and sys.exit.__module__ == "sys" and callable(sys.exit)
assert typing.get_type_hints(sys.exit) == {}
class Shell:
    leave = sys.exit
calls = {None: Shell().leave, 5: lambda: Shell().leave(5), 7: lambda: exit(code=7), "x": lambda: quit("x")}
for status, call in calls.items():
    try:
        call()
    except SystemExit as end:
        assert end.code == status, (end.code, status)
try:
    sys.exit(1, 2)
except TypeError:
    sys.exit(0)
"""


def test_the_functions_stay_what_they_were(tmp_path: Path) -> None:
    assert reported(tmp_path, BEHAVIOR, exit_code=0) == []


ODD = """
import sys
class Odd(Exception):
    def __str__(self): raise RuntimeError("no text")
class Unbound:
    __class__ = property(lambda self: 1 / 0)
    def __repr__(self): return "unbound"
try: raise Odd
except Odd:
    try: sys.exit(3)
    except SystemExit: pass
    sys.exit(Unbound())
"""


def test_an_odd_error_or_status_changes_no_end(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(ODD)
    (tmp_path / "state").mkdir()
    environment = add_hook_env(dict(os.environ), tmp_path / "state")
    done = subprocess.run([sys.executable, "job.py"], cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (1, b"unbound\n")


def test_a_chain_and_a_long_text(tmp_path: Path) -> None:
    code = "import sys\ntry:\n    try: {}['a']\n    except KeyError as e: raise ValueError('x' * 10**7) from e\n"
    lines = reported(tmp_path, code + "except ValueError: sys.exit(1)")
    assert [line[:12] for line in lines if not line.startswith(" ")] == [
        "Traceback (m", "KeyError: 'a", "", "During handl", "", "Traceback (m", "ValueError: "
    ]  # fmt: skip
    assert max(map(len, lines)) == 400


def test_a_long_traceback_is_cut_in_the_middle(tmp_path: Path) -> None:
    code = "import sys\ndef f(n): return 1 / n + g(n)\ndef g(n): return f(n - 1)\n"
    code += "try: f(90)\nexcept Exception: sys.exit(1)"
    lines = reported(tmp_path, code)
    assert len(lines) == 42
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
