"""Measurements in processes of their own: each begins with nothing imported and no memory used.

A script calls `child` for each, and `answer` first thing when it runs: in the child, that is where the work is done.
The script's own process stays small, since a child's peak of memory starts at its parent's.
"""

import json
import os
import subprocess
import sys
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


def answer(functions: dict[str, Callable[..., dict[str, Any] | None]]) -> None:
    """In a child: runs the function that was asked for, prints its result, and ends the process."""
    if sys.argv[1:2] == ["--child"]:
        what, folder, *sizes = sys.argv[2:]
        print(json.dumps(functions[what](Path(folder), *map(int, sizes)) or {}))
        sys.exit()
