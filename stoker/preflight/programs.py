"""Runs a program of a probe for a limited time: what it started ends with it, whatever hangs."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, NamedTuple


class Ended(NamedTuple):
    """How a program ended."""

    code: int
    output: str
    errors: str

    @property
    def last_line(self) -> str:
        """Of the output, which is JSON if all went well."""
        return next(iter(self.output.strip().splitlines()[-1:]), "")

    @property
    def reason(self) -> str:
        """Of a failure: the exit code and the last line of the errors."""
        return f"exit code {self.code}: {next(iter(self.errors.strip().splitlines()[-1:]), 'no output')}"


def run_program(
    command: Sequence[str],
    timeout_s: float,
    *,
    env: Mapping[str, str] | None = None,
    watch: Callable[[str], bool] = lambda _: True,
) -> Ended:
    """Waits for the end, in a process group of its own. watch: called ten times a second with the errors so far; False
    ends the program. Raises subprocess.TimeoutExpired, with the errors as `stderr`, after it has killed the program and
    what it started. A process that hangs in a driver is left behind."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:  # pipes would wait for grandchildren
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env=env, start_new_session=True
        )
        end_s = time.monotonic() + timeout_s
        try:
            while process.poll() is None:
                if time.monotonic() >= end_s or not watch(_text(errors)):
                    raise subprocess.TimeoutExpired(command, timeout_s, stderr=_text(errors).encode())
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(min(0.1, max(0.0, end_s - time.monotonic())))
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        return Ended(process.returncode, _text(output), _text(errors))


def _text(file: IO[bytes]) -> str:
    """All that was written; the process writes at its own position."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")
