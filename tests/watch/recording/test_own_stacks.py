"""The process that samples a training of stoker's own."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker_watch.cli import app
from stoker_watch.recording import own_stacks
from stoker_watch.recording.frames import Frame, find_part, is_job_code
from stoker_watch.recording.own_stacks import TrainingSampler, TrainingStacks
from stoker_watch.recording.telemetry import machine
from stoker_watch.recording.telemetry.machine import read_life
from stoker_watch.runs import records
from stoker_watch.runs.records import EVENTS, STACKS, RunFolder, read_lines
from stoker_watch.runs.schemas import Event, StackWindow

TRAINER = """
import sys, time
from pathlib import Path
from stoker_watch.recording.own_stacks import TrainingStacks
from stoker_watch.runs.records import RunFolder
{before}
def train():
    while True:
        time.sleep(0.01)
stacks = TrainingStacks(Path(sys.argv[1]))
stacks.write_to(RunFolder(Path(sys.argv[1]), 3))
print(stacks.pid, flush=True)
train()
"""
NOT_READABLE = """
import ctypes
ctypes.CDLL(None).prctl(24, 19, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_SYS_PTRACE: root's child has less than root
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
"""


def start(folder: Path, before: str = "") -> tuple[subprocess.Popen[bytes], int]:
    """(a process that trains, the PID of the one that samples it)"""
    command = [sys.executable, "-c", TRAINER.format(before=before), str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def until(holds: Callable[[], object]) -> None:
    for _ in range(6000):
        if holds():
            return
        time.sleep(0.01)
    raise AssertionError("did not happen")


def test_it_goes_on_after_signals_for_the_job_and_ends_with_the_training(tmp_path: Path) -> None:
    process, sampler = start(tmp_path)
    until((tmp_path / STACKS).exists)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        os.kill(sampler, number)
    lines = len(list(read_lines(tmp_path, STACKS, StackWindow)))
    until(lambda: len(list(read_lines(tmp_path, STACKS, StackWindow))) > lines)
    process.kill()
    process.communicate()
    until(lambda: read_life(sampler) is None)
    for window in read_lines(tmp_path, STACKS, StackWindow):
        assert (window.role, window.attempt, window.pid) == ("training", 3, process.pid)


def test_a_training_that_may_not_be_read_has_an_event_and_goes_on(tmp_path: Path) -> None:
    process, _ = start(tmp_path, NOT_READABLE)
    until((tmp_path / EVENTS).exists)
    assert process.poll() is None
    process.kill()
    process.communicate()
    (event,) = read_lines(tmp_path, EVENTS, Event)
    assert event.text.startswith("stacks: not recorded: reading another process is not permitted here")
    assert not (tmp_path / STACKS).exists()


def test_a_sampling_process_that_died_has_an_event(tmp_path: Path) -> None:
    stacks = TrainingStacks(tmp_path)
    stacks.write_to(RunFolder(tmp_path, 1))
    os.kill(stacks.pid, signal.SIGKILL)
    until(lambda: read_life(stacks.pid) is None)
    stacks.stop()
    stacks.stop()
    (event,) = read_lines(tmp_path, EVENTS, Event)
    assert event.text == "stacks: the process that samples them ended with exit code -9"


def test_the_thread_that_trains_is_sampled_from_before_the_folder_is_known(tmp_path: Path) -> None:
    """It need not be the main thread."""
    done = threading.Event()

    def trains() -> None:
        stacks = TrainingStacks(tmp_path)
        until(lambda: stacks._pending)  # the first window
        stacks.write_to(RunFolder(tmp_path, 2))
        stacks.stop()
        done.set()

    thread = threading.Thread(target=trains)
    thread.start()
    thread.join()
    assert done.is_set()
    windows = list(read_lines(tmp_path, STACKS, StackWindow))
    assert {window.attempt for window in windows} == {2}
    functions = {place.function for window in windows for place in window.places}
    assert any("until" in function for function in functions)
    assert {window.role for window in windows} == {"training"}


def test_frames_of_both_packages_are_no_code_of_the_job() -> None:
    sampler = TrainingSampler(os.getpid(), 0, "/home/me/stoker")
    stack = [
        Frame("RunFolder.append", records.__file__, 9),
        Frame("Training.run_steps", "/home/me/stoker/training/loop.py", 5),
        Frame("main", app.__file__, 1),
    ]
    frames = sampler._own_frames(stack)
    assert [frame.function for frame in frames] == ["RunFolder.append", "Training.run_steps"]
    assert not any(is_job_code(frame) for frame in frames)
    assert find_part(frames) == "records"


def test_only_the_sampling_process_may_read_where_yama_permits_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    class Library:
        def prctl(self, option: int, pid: Any, *_: int) -> None:
            assert option == int.from_bytes(b"Yama", "big")
            calls.append(pid.value)

    monkeypatch.setattr(machine, "read", lambda _: b"1\n")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Library())
    child = own_stacks.SamplingProcess("record", 0, "/", 1)
    child.stop(None)
    assert calls == [child.pid, 0]
