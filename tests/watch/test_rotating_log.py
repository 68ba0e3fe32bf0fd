"""output.log: what is kept of a long output, what a full disk does, and who reads on in it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.runs.records import ENVIRONMENT, EVENTS, STEPS, RunFolder, read_lines
from stoker.runs.schemas import Event, StepWindow
from stoker.watch.output_relay import RotatingLog
from stoker.watch.recorder import LogTail, Recorder


def test_the_newest_is_kept_and_a_reader_misses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    two = [RotatingLog(str(path), max_bytes=100), RotatingLog(str(path), max_bytes=100)]  # of stdout and of stderr
    tail, read = LogTail(path, 0), b""
    parts = [b"%04d\n" % n for n in range(300)]
    for n, part in enumerate(parts):
        two[n % 3 % 2].write(part)
        if n % 7 == 0:
            read += b"".join(tail.read())
    read += b"".join(tail.read())
    assert read == b"".join(parts)
    older = (tmp_path / "output.1.log").read_bytes()
    kept = older + path.read_bytes()
    assert b"".join(parts).endswith(kept)
    assert 100 <= len(older) < 110
    assert len(list(tmp_path.iterdir())) == 2


def test_a_reader_begins_where_an_attempt_before_ended(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    path.write_bytes(b"before\n")
    tail = LogTail(path, 7)
    assert b"".join(tail.read()) == b""
    RotatingLog(str(path)).write(b"now\n")
    assert b"".join(tail.read()) == b"now\n"


def test_output_that_was_not_read_to_its_end_is_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that printed more than can be read in the time after its end."""

    def endless() -> Iterator[bytes]:
        yield b"step 5 loss: 1.5\n"
        while True:
            yield b"."

    monkeypatch.setattr("stoker.watch.recorder.MAX_LAST_READ_S", 0.01)
    (tmp_path / ENVIRONMENT).write_text('{"gpu": {"gpus": []}}')
    folder = RunFolder(tmp_path, 1)
    recorder = Recorder(folder, ["job"], output=endless)
    recorder._stop.set()
    recorder._record_until_stopped()
    folder.close()
    (event,) = read_lines(tmp_path, EVENTS, Event)
    assert event.text == "the end of the job's output was not read: steps in it are not recorded"
    assert [window.step for window in read_lines(tmp_path, STEPS, StepWindow)] == [5]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_what_a_full_disk_does_not_take_is_counted_and_said(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    path.symlink_to("/dev/full")
    log = RotatingLog(str(path))
    log.write(b"12345")
    log.write(b"678")
    there = os.open(tmp_path / "room", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(there, log._fd)
    log.write(b"more")
    assert (tmp_path / "room").read_bytes() == b"\n[stoker: 8 bytes of the output could not be written here]\nmore"
