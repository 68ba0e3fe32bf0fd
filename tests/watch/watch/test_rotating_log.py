"""output.log: what is kept of a long output, what a full disk does, and who reads on in it."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker_watch.errors import StorageError
from stoker_watch.runs.records import ENVIRONMENT, EVENTS, STEPS, RunFolder, read_lines
from stoker_watch.runs.schemas import Event, StepWindow
from stoker_watch.watch.output_relay import RotatingLog
from stoker_watch.watch.recorder import JobRecorder, LogTail, open_run_folder
from tests.fixtures.special_files import replace_by


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

    monkeypatch.setattr("stoker_watch.watch.recorder.MAX_LAST_READ_S", 0.01)
    (tmp_path / ENVIRONMENT).write_text('{"gpu": {"gpus": []}}')
    folder = RunFolder(tmp_path, 1)
    recorder = JobRecorder(folder, ["job"], output=endless)
    recorder._stop.set()
    recorder._record_until_stopped()
    folder.close()
    (event,) = read_lines(tmp_path, EVENTS, Event)
    assert event.text == "the end of the job's output was not read: steps in it are not recorded"
    assert [window.step for window in read_lines(tmp_path, STEPS, StepWindow)] == [5]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_what_a_full_disk_does_not_take_is_counted_and_said(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    log = RotatingLog(str(path))
    log.write(b"")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, log._fd)
    os.close(full)
    log.write(b"12345")
    log.write(b"678")
    there = os.open(tmp_path / "room", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(there, log._fd)
    log.write(b"more")
    assert (tmp_path / "room").read_bytes() == b"\n[stoker: 8 bytes of the output could not be written here]\nmore"


def planted(kind: str, folder: Path) -> Path:
    """A run folder whose output.log is something else."""
    run = folder / "run"
    run.mkdir()
    (folder / "other").write_text("of someone else\n")
    if kind.startswith("link"):
        (run / "output.log").symlink_to(folder / ("other" if kind == "link" else "not there"))
    else:
        replace_by(kind, run / "output.log", size_bytes=0)
    return run


KINDS = ["link", "link to nothing", "fifo", "zero", "folder"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_is_not_started_where_its_output_would_go_elsewhere(tmp_path: Path, kind: str) -> None:
    run = planted(kind, tmp_path)
    with pytest.raises(StorageError, match="output cannot be recorded"), open_run_folder(str(run), ["true"]):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "run"]
    assert (tmp_path / "other").read_text() == "of someone else\n"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_put_in_place_of_the_log_is_neither_written_nor_read(tmp_path: Path, kind: str) -> None:
    """While the job runs: the job goes on, and what could not be written is counted."""
    run = planted(kind, tmp_path)
    path, writer = run / "output.log", -1
    if kind == "fifo":
        writer = os.open(path, os.O_RDWR)  # a FIFO that someone reads and writes
        os.write(writer, b"x")
    log, tail = RotatingLog(str(path)), LogTail(path, 0)

    def use() -> None:
        log.write(b"output\n")
        with pytest.raises(OSError, match=r"link|FIFO|directory"):
            list(tail.read())

    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it waits"
    assert log._dropped_bytes == 7
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "run"]
    assert (tmp_path / "other").read_text() == "of someone else\n"
    if writer >= 0:
        assert os.read(writer, 9) == b"x"
        os.close(writer)
    path.rmdir() if kind == "folder" else path.unlink()
    log.write(b"more\n")
    assert path.read_text() == "\n[stoker: 7 bytes of the output could not be written here]\nmore\n"
