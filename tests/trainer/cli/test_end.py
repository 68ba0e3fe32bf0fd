"""The end of the process: what a library leaves behind does not hold it, and does not change the exit code."""

import subprocess
import sys

import pytest

COMMAND = """
import atexit, sys, threading, time
from stoker_watch.cli import app
app.END_TIMEOUT_S = 0.5
def leave():
    {left}
app._run = lambda _: leave() or 4
app.main()
"""


def test_a_program_that_goes_on_is_not_ended() -> None:
    goes_on = "\ntry:\n    app.main()\nexcept SystemExit:\n    time.sleep(2)\nprint('went on')"
    program = COMMAND.format(left="pass").replace("\napp.main()", goes_on)
    ended = subprocess.run([sys.executable, "-c", program], timeout=120, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "went on\n")


@pytest.mark.parametrize(
    "left",
    [
        "threading.Thread(target=threading.Event().wait).start()",
        "atexit.register(threading.Event().wait)",
        "print('done')",
    ],
)
def test_what_never_ends_does_not_hold_the_process(left: str) -> None:
    command = [sys.executable, "-c", COMMAND.format(left=left)]
    ended = subprocess.run(command, timeout=120, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (4, "")
    assert ended.stdout == ("done\n" if "print" in left else "")
