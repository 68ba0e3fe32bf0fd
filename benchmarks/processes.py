"""Measurements in processes of their own: each begins with nothing imported and no memory used.

A script calls `child` for each, and `answer` first thing when it runs: in the child, that is where the work is done.
The script's own process stays small, since a child's peak of memory starts at its parent's.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def child(what: str, folder: Path, cache: Path, *sizes: int) -> dict[str, Any]:
    """What the function `what` of this script's `answer` returns for a folder and sizes. Raises CalledProcessError."""
    environment = {**os.environ, "STOKER_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, sys.argv[0], "--child", what, str(folder), *map(str, sizes)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def spend(command: list[str], folder: Path, **more: str) -> tuple[str, float]:
    """(what a command prints, processor seconds of it and its children, user and system), on one thread.

    It runs in `folder`, where the caches are, too; more: environment variables. Raises CalledProcessError, and shows
    the end of what the command complained of.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
                   "STOKER_CACHE_DIR": str(folder / "cache"), **more}  # fmt: skip
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as messages:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=messages)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        messages.seek(0)
        if process.returncode:
            print(messages.read()[-3000:], file=sys.stderr)
            raise subprocess.CalledProcessError(process.returncode, command)
        return output.read(), used.ru_utime + used.ru_stime


def answer(functions: dict[str, Callable[..., dict[str, Any] | None]]) -> None:
    """In a child: runs the function that was asked for, prints its result, and ends the process."""
    if sys.argv[1:2] == ["--child"]:
        what, folder, *sizes = sys.argv[2:]
        print(json.dumps(functions[what](Path(folder), *map(int, sizes)) or {}))
        sys.exit()
