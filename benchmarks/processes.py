"""Runs measurements in child processes: each starts with nothing imported and no memory allocated.

A script calls `run_child` for each measurement, and `serve_child` first when it starts; in a child, that runs the
measurement. The parent process stays small, because the peak memory of a child starts at that of its parent.
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


def run_child(function: str, folder: Path, cache: Path, *sizes: int) -> dict[str, Any]:
    """The result of a function of this script's `serve_child` for a folder and sizes. Raises CalledProcessError."""
    environment = child_environment() | {"STOKER_CACHE_DIR": str(cache)}
    command = [sys.executable, sys.argv[0], "--child", function, str(folder), *map(str, sizes)]
    completed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(completed.stdout.splitlines()[-1])
    return result


def run_timed(command: list[str], folder: Path, **variables: str) -> tuple[str, float]:
    """(stdout of a command, CPU-seconds of it and its children, user and system), with one thread.

    It runs in `folder`, which also has its caches; variables: environment variables. On failure, prints the end of
    stderr and raises CalledProcessError.
    """
    environment = child_environment() | {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "STOKER_CACHE_DIR": str(folder / "cache"),
        **variables,
    }
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as messages:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=messages)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        messages.seek(0)
        if process.returncode:
            print(messages.read()[-3000:], file=sys.stderr)
            raise subprocess.CalledProcessError(process.returncode, command)
        return output.read(), usage.ru_utime + usage.ru_stime


def child_environment() -> dict[str, str]:
    """The environment of this process, with this repository at the end of PYTHONPATH."""
    paths = [path for path in (os.environ.get("PYTHONPATH"), str(ROOT)) if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def serve_child(functions: dict[str, Callable[..., dict[str, Any] | None]]) -> None:
    """In a child: runs the requested function, prints its result as JSON, and ends the process."""
    if sys.argv[1:2] == ["--child"]:
        function, folder, *sizes = sys.argv[2:]
        print(json.dumps(functions[function](Path(folder), *map(int, sizes)) or {}))
        sys.exit()
