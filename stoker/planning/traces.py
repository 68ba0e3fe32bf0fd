"""Traces of steps (`trace.py`), made in processes of their own, and remembered in the cache folder.

A trace is a fact about the code, not about the machine: its key holds the step, stoker's newest file and torch's
version. Nothing depends on the files: what is damaged is traced again, and all may be deleted at any time.
"""

import concurrent.futures
import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from stoker.errors import StokerError
from stoker.hardware.cgroup import host_cores
from stoker.hardware.device import block_size_for_memory
from stoker.planning.trace import Answer, StepSpec, StepTrace
from stoker.storage.local_files import cache_folder, write_atomic

PACKAGE = Path(__file__).resolve().parents[1]
MAX_FILES = 256
"""The oldest beyond them are removed; a file has about 20 kB."""


class Step(NamedTuple):
    """What is traced."""

    spec: StepSpec
    batch_size: int
    memory_bytes: int
    """Of the accelerator, by which losses and matchers choose the size of their blocks; of a CPU 0."""

    def key(self) -> str:
        """Devices whose losses and matchers work in blocks of the same size share it."""
        block_size = 0 if self.spec.on_cpu else block_size_for_memory(self.memory_bytes)
        facts = [msgspec.json.encode(self.spec), self.batch_size, block_size, torch.__version__, _newest_file()]
        return blake2b(repr(facts).encode(), digest_size=16).hexdigest()


class Traces:
    """The traces that a plan needs."""

    def __init__(self) -> None:
        self._found: dict[str, Answer] = {}

    def add(self, steps: Iterable[Step]) -> None:
        """Traces what is not traced yet, now or earlier, in two processes at a time."""
        missing = {key: step for step in steps if (key := step.key()) not in self._found}
        self._found |= {key: Answer(trace=trace) for key in missing if (trace := read(key)) is not None}
        by_spec: dict[bytes, list[str]] = {}  # the steps of one model are traced by the same process, which keeps it
        for key, step in missing.items():
            if key not in self._found:
                by_spec.setdefault(msgspec.json.encode(step.spec), []).append(key)
        count = max(1, min(2, host_cores(), len(by_spec)))
        groups = list(by_spec.values())
        parts = [[key for group in groups[n::count] for key in group] for n in range(count)]
        with concurrent.futures.ThreadPoolExecutor(count) as threads:
            done = threads.map(lambda keys: trace_steps([missing[key] for key in keys]), parts)
            for keys, answers in zip(parts, done, strict=True):
                self._found |= zip(keys, answers, strict=True)
                for key, answer in zip(keys, answers, strict=True):
                    if answer.trace is not None:
                        write(key, answer.trace)

    def get(self, step: Step) -> StepTrace:
        """Raises StokerError where the step could not be traced."""
        answer = self._found[step.key()]
        if answer.trace is None:
            raise StokerError("A training step could not be traced.", cause=answer.error)
        return answer.trace


def trace_steps(steps: Sequence[Step]) -> list[Answer]:
    """Traces steps in a process, one after the other."""
    if not steps:
        return []
    done = subprocess.run(
        # Without garbage collection, torch is imported a second sooner.
        [sys.executable, "-c", "import gc; gc.disable(); from stoker.planning.trace import main; main()"],
        input=msgspec.json.encode(steps),
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    answers = [msgspec.json.decode(line, type=Answer) for line in done.stdout.splitlines()]
    last = f"the process ended with exit code {done.returncode}"
    lines = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    return answers + [Answer(error=lines[-1] if lines else last)] * (len(steps) - len(answers))


@functools.cache
def _newest_file() -> int:
    """Its time of modification, in nanoseconds."""
    return max(file.stat().st_mtime_ns for file in PACKAGE.rglob("*.py"))


def folder() -> Path:
    """Of the files, which need not exist."""
    return cache_folder() / "step-traces"


def read(key: str) -> StepTrace | None:
    """None if there is no file, or a damaged one."""
    try:
        return msgspec.json.decode((folder() / f"{key}.json").read_bytes(), type=StepTrace)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def write(key: str, trace: StepTrace) -> None:
    """Keeps a trace, if the cache folder can be written."""
    with contextlib.suppress(OSError):  # it is read-only or full: the trace is worth having without
        folder().mkdir(parents=True, exist_ok=True)
        write_atomic(folder() / f"{key}.json", msgspec.json.encode(trace), durable=False)
        files = sorted(folder().glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
        for file in files[:-MAX_FILES]:
            file.unlink(missing_ok=True)
