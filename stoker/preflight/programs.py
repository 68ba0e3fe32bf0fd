"""Runs a program of a probe for a limited time: what it started ends with it, whatever hangs."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from typing import NamedTuple


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


def run_program(command: Sequence[str], timeout_s: float) -> Ended:
    """Waits for the end. Raises subprocess.TimeoutExpired after it has killed the program and what it started."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:  # pipes would wait for grandchildren
        process = start_program(command, output.fileno(), errors.fileno())
        try:
            code = process.wait(timeout_s)
        finally:
            kill_program(process)
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return Ended(code, *texts)


def start_program(command: Sequence[str], output_fd: int, errors_fd: int) -> "subprocess.Popen[bytes]":
    """A program in a process group of its own."""
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output_fd, stderr=errors_fd, start_new_session=True
    )  # fmt: skip


def kill_program(process: "subprocess.Popen[bytes]") -> None:
    """Kills a program and what it started, unless it has ended. A process that hangs in a driver is left behind."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
