"""Runs measurements in child processes: each starts with nothing imported and no memory allocated.

`run_child` and `run_timed` are for measurements that must succeed; `run_part` is for those whose failure is a result.

A script calls `run_child` for each measurement, and `serve_child` first when it starts; in a child, that runs the
measurement. The parent process stays small, because the peak memory of a child starts at that of its parent.
"""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LINES = "STOKER_BENCHMARK_LINES"
"""Environment variable: the file to which `record` appends."""
DUMP_S = 5.0
"""Before the limit of a part, so that the stacks of all its threads are written first."""
OUTPUT_LINES, STACK_LINES, LAST_FRAMES, LOG_BYTES = 12, 60, 4, 2**18
"""What is kept of a failed part: lines of output, lines of stacks, frames of an exception; bytes read of its log."""


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


def python_path(root: Path) -> str:
    """What PYTHONPATH needs to import the packages and the benchmarks of a checkout."""
    return os.pathsep.join(map(str, (root, root / "packages/stoker-watch", root / "packages/stoker")))


def child_environment() -> dict[str, str]:
    """The environment of this process, with this repository at the end of PYTHONPATH."""
    paths = [path for path in (os.environ.get("PYTHONPATH"), python_path(ROOT)) if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def serve_child(functions: dict[str, Callable[..., dict[str, Any] | None]]) -> None:
    """In a child: runs the requested function, prints its result as JSON, and ends the process."""
    if sys.argv[1:2] == ["--child"]:
        function, folder, *sizes = sys.argv[2:]
        print(json.dumps(functions[function](Path(folder), *map(int, sizes)) or {}))
        sys.exit()


def record(**found: Any) -> None:
    """Appends a line of JSON to the file of LINES, or prints it if there is none: a kill later loses nothing of it."""
    line = json.dumps(found, ensure_ascii=False)
    if path := os.environ.get(LINES):
        with open(path, "ab", buffering=0) as file:  # one write: a kill leaves the whole line or nothing of it
            file.write(f"{line}\n".encode())
    else:
        print(line, flush=True)


def run_part(command: list[str], limit_s: float, log: Path) -> dict[str, Any]:
    """Runs a command with its output appended to `log`; ends it, and all that it started, at the limit.

    Returns its exit code (a text where a limit or a signal ended it), its seconds, the end of its output, and if it
    failed the exception with its last frames, and the stacks of its threads if it hung or crashed.
    """
    began = time.monotonic()
    environment = child_environment() | {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("ab") as output:
        first = output.tell()
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        hung = False
        try:
            process.wait(max(limit_s - DUMP_S, limit_s / 2))
        except subprocess.TimeoutExpired:
            hung = True
            os.killpg(process.pid, signal.SIGABRT)  # faulthandler writes the stacks, whichever thread holds the GIL
            with contextlib.suppress(subprocess.TimeoutExpired):  # then the kill below ends it
                process.wait(min(DUMP_S, limit_s / 2))
        finally:
            with contextlib.suppress(ProcessLookupError):  # all have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    result: dict[str, Any] = {"exit": process.returncode, "s": round(time.monotonic() - began, 1)}
    with log.open("rb") as file:
        file.seek(max(first, log.stat().st_size - LOG_BYTES))
        text = file.read().decode(errors="replace")
    if process.returncode == 0:
        return result | {"output": [line[:200] for line in text.splitlines() if line.strip()][-2 * OUTPUT_LINES :]}
    result |= failure(text)
    if process.returncode < 0:
        result["exit"] = signal.Signals(-process.returncode).name
    if hung:
        result |= {"exit": "limit", "error": f"not done in {limit_s:.0f} s"}
    return result


TRACEBACK = "Traceback (most recent call last):"
FRAME = re.compile(r'\s*File "(?P<file>[^"]*)", line (?P<line>\d+),? in (?P<name>.*)')
EXCEPTION = re.compile(r"(?:\[rank\d+\]: ?)?(?P<text>[A-Za-z_][\w.]*(?::.*)?)$")
FATAL, THREAD = "Fatal Python error:", re.compile(r"(?:Current thread|Thread) 0x")


def failure(text: str) -> dict[str, Any]:
    """The cause of a failure in what a Python process wrote: type and message of each exception, the last frames, the
    stacks that faulthandler wrote, and the last lines.

    The last line alone misleads: torch appends advice of several lines to the message of an error of CUDA.
    """
    lines = text.splitlines()
    found: dict[str, Any] = {}
    errors: list[str] = []
    for start in (number for number, line in enumerate(lines) if line.rstrip().endswith(TRACEBACK)):
        frames = []
        for line in lines[start + 1 :]:
            if FRAME.match(line):
                frames.append(_frame(line))
            elif (match := EXCEPTION.match(line)) and not line.startswith(" "):
                if "ignored" not in lines[start - 1]:  # of a destructor: a consequence
                    errors.append(match["text"][:400])
                    found["frames"] = frames[-LAST_FRAMES:]
                break
    fatal = next((number for number, line in enumerate(lines) if line.startswith(FATAL)), None)
    if fatal is not None:
        errors.append(lines[fatal])
        stack = [shorten(line) for line in lines[fatal:] if FRAME.match(line) or THREAD.match(line)]
        found["stack"] = stack[:STACK_LINES]
        current = [number for number, line in enumerate(stack) if line.startswith("Current thread")]
        each = [list(itertools.takewhile(FRAME.match, stack[number + 1 :])) for number in current]
        # Of several processes, one that does not only wait for another.
        frames = next((one for one in each if one and "subprocess.py" not in one[0]), each[0] if each else [])
        found["frames"] = [_frame(line) for line in frames][:LAST_FRAMES][::-1]
    if errors:
        found["error"] = errors[-1]
        if earlier := list(dict.fromkeys(error for error in errors if error != errors[-1])):
            found["earlier errors"] = earlier[:LAST_FRAMES]
    shown = [line[:200] for line in lines if line.strip()]
    cause = next(
        (n for n, line in enumerate(shown) if line.rstrip().endswith(TRACEBACK) or line.startswith(FATAL)), None
    )
    half = OUTPUT_LINES // 2
    found["output"] = shown[-OUTPUT_LINES:] if cause is None else shown[:cause][-half:] + shown[cause:][-half:]
    return found


def _frame(line: str) -> str:
    """A frame, without its folders."""
    return FRAME.sub(lambda match: f"{shorten(match['file'])}:{match['line']} in {match['name']}", line)


def shorten(text: str) -> str:
    """Without the folders above this repository or above the packages."""
    return re.sub(r'[^"\s]*/site-packages/', "", text).replace(f"{ROOT}/", "")
