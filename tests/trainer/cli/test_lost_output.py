"""A training whose output cannot be written: the result is in the run's folder, so it has succeeded."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stoker_watch.runs.records import EVENTS, read_lines
from stoker_watch.runs.schemas import Event
from tests.drawn import draw


@contextmanager
def closed_pipe() -> Iterator[int]:
    reads, writes = os.pipe()
    os.close(reads)
    yield writes
    os.close(writes)


@contextmanager
def full_disk() -> Iterator[int]:
    fd = os.open("/dev/full", os.O_WRONLY)
    yield fd
    os.close(fd)


@contextmanager
def reader_that_leaves() -> Iterator[int]:
    """Reads until the last results, which come after the end of the training: as `| grep -m1 results`."""
    marker = "AP small"
    reader = subprocess.Popen(
        [sys.executable, "-c", f"import sys\nfor line in sys.stdin:\n  if {marker!r} in line: break"],
        stdin=subprocess.PIPE,
    )
    assert reader.stdin is not None
    yield reader.stdin.fileno()
    reader.stdin.close()
    reader.wait()


@pytest.mark.parametrize("output", [closed_pipe, full_disk, reader_that_leaves])
def test_a_training_without_an_output_succeeds(output, tmp_path: Path) -> None:
    data, run = draw(tmp_path / "shapes", train=4, val=2), tmp_path / "run"
    flags = (
        "--model", "retinanet_tiny_fpn", "--image-size", "64", "64", "--batch-size", "2", "--steps", "2",
        "--workers", "1", "--precision", "fp32", "--run-dir", str(run),
    )  # fmt: skip
    with output() as fd:
        command = [sys.executable, "-m", "stoker", "train", str(data), *flags]
        ended = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=fd, stderr=fd, check=False, timeout=300
        )
    assert ended.returncode == 0
    assert list(read_lines(run, EVENTS, Event))[-1].kind == "finished"


@pytest.mark.parametrize("output", [closed_pipe, full_disk])
def test_an_error_that_nobody_reads_keeps_its_exit_code(output, tmp_path: Path) -> None:
    """A scheduler decides by it."""
    command = [sys.executable, "-m", "stoker", "train", str(tmp_path / "missing"), "--run-dir", str(tmp_path / "run")]
    read = subprocess.run(command, capture_output=True, check=False, timeout=300)
    assert b"does not exist" in read.stderr
    with output() as fd:
        unread = subprocess.run(command, stdout=fd, stderr=fd, check=False, timeout=300)
    assert unread.returncode == read.returncode
