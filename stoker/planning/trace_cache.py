"""Remembers traces of steps in the cache folder, so that the next plan of the same model does not repeat them.

A trace is a fact about the code, not about the machine: the key holds the step, stoker's newest file and torch's
version. Nothing depends on the files: what is damaged is traced again, and all may be deleted at any time.
"""

import contextlib
import functools
from hashlib import blake2b
from pathlib import Path

import msgspec
import torch

from stoker.hardware.device import block_size_for_memory
from stoker.planning.trace import StepSpec, StepTrace
from stoker.storage.local_files import cache_folder, write_atomic
from stoker.training.defaults.auto_batch import PACKAGE

MAX_FILES = 256
"""The oldest beyond them are removed; a file has about 20 kB."""


def key_of(spec: StepSpec, size: int, memory_bytes: int) -> str:
    """Of a step of `size` images. Devices whose losses and matchers work in blocks of the same size share it."""
    block_size = 0 if spec.on_cpu else block_size_for_memory(memory_bytes)
    facts = [msgspec.json.encode(spec), size, block_size, torch.__version__, _newest_file()]
    return blake2b(repr(facts).encode(), digest_size=16).hexdigest()


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
