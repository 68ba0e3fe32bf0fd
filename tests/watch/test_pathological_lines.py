"""Output that is made to be slow to read: the time of `stoker why FILE.log` and `stoker watch` grows with its size, and
no faster. CPU time of this process is compared, not wall-clock time."""

import functools
import itertools
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from stoker_watch.diagnosis.endings import line_patterns
from stoker_watch.diagnosis.termination import MAX_LINE_CHARS, MAX_OUTPUT_BYTES
from stoker_watch.report.explain import explain_log
from stoker_watch.watch.output import MAX_LINE_LENGTH, LineSplitter, ProgressParser, ProgressWindows

USUAL_UNITS = (
    "1234567890", " ", "a=", "a=1 ", "a-", "a.", "[", "'", "'a': 1, ", '"', ".", "/", "1/", ":", "\r50%|##",
    "50%|##| 5/10 [00:01<00:02, 1it/s", "Traceback (most recent call last):", "loss",
)  # fmt: skip
UNITS = (
    *USUAL_UNITS,
    "1", "\t", "1 ", "a=1,", "a", "_", "](", "{", "'a", "1.", "1e", "1/1 ", "a:", "|", "5%|", "Epoch 1/2 ━━━ 1/2 ",
    "━", "1/2 0G 1 1 1 1 1 1: 5% ", "1/2 [===] - 1s 1ms/step - loss: 1 ", "Epoch 1/1 ", "loss=1 ", "loss: nan ",
    "step 1 ", "it/s", "1img/s", "INFO", "INFO:", "I1234 ", "a.Error: ", '  File "x", line 1, in f ',
    "CUDA error: out of memory ", "NCCL WARN ", "exit code ", "\x1b[", "\x1b]", "[rank0]: ", "preempted node ",
    "/a/a/a.",
)  # fmt: skip
PLAIN = b"".join(
    b"INFO:train: step %d of 9999, loss: 0.%03d, lr 0.001, 12.5 img/s\n" % (n, n % 999) for n in range(20_000)
)
MAX_RATIO = 10
"""The slowest kind takes 5 times as long."""


def lines(unit: str, size: int, line_length: int | None) -> bytes:
    """`size` bytes of the unit, in lines of this length, after a line that begins an epoch."""
    length = size if line_length is None else line_length
    line = (unit * (length // len(unit) + 1))[:length] + "\n"
    return b"Epoch 1/1\n" + (line * (size // length)).encode()[:size] + b"\n"


def watch(data: bytes) -> ProgressWindows:
    splitter, parser = LineSplitter(), ProgressParser()
    windows = ProgressWindows(attempt=1, devices=1, start_s=0.0)
    parts = (splitter.feed(data[start : start + 65536]) for start in range(0, len(data), 65536))
    for line in itertools.chain(*parts, splitter.feed(b"", final=True)):
        if (progress := parser.read(line)) is not None:
            windows.add(progress)
    windows.window(1.0)
    return windows


def cpu_s(read: Callable[[], object]) -> float:
    start_s = time.process_time()
    read()
    return time.process_time() - start_s


def read_log(data: bytes, log: Path) -> None:
    log.write_bytes(data)
    explain_log(log)


READERS: dict[str, Callable[[bytes, Path], object]] = {"why": read_log, "watch": lambda data, _: watch(data)}


@functools.cache
def plain_s(reader: str, size: int, log: Path) -> float:
    """CPU-seconds for ordinary lines."""
    plain = (PLAIN * (size // len(PLAIN) + 1))[:size]
    return min(cpu_s(lambda: READERS[reader](plain, log)) for _ in range(2))


def check_times(size: int, log: Path, units: Sequence[str], line_length: int | None, *, plain_size: int) -> None:
    """Each kind of line takes at most MAX_RATIO times as long as ordinary lines of this size, whose time is that of
    `plain_size` bytes."""
    for name, read in READERS.items():
        read_size = min(size, MAX_OUTPUT_BYTES) if name == "why" else size
        bound_s = MAX_RATIO * plain_s(name, plain_size, log) * read_size / plain_size
        for unit in units:
            data = lines(unit, size, line_length)
            taken_s = cpu_s(lambda: read(data, log))  # noqa: B023
            assert taken_s < bound_s, (name, unit)


def test_some_lines_of_each_usual_kind(tmp_path: Path) -> None:
    check_times(30_000, tmp_path / "job.log", USUAL_UNITS, MAX_LINE_LENGTH, plain_size=30_000)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "line_length"), [(250_000, 4000), (10**6, None)])
def test_much_of_each_kind(tmp_path_factory: pytest.TempPathFactory, size: int, line_length: int | None) -> None:
    check_times(size, tmp_path_factory.getbasetemp() / "job.log", UNITS, line_length, plain_size=size)


@pytest.mark.slow
@pytest.mark.parametrize("unit", USUAL_UNITS)
def test_10_megabytes_of_each_usual_kind(tmp_path_factory: pytest.TempPathFactory, unit: str) -> None:
    check_times(10**7, tmp_path_factory.getbasetemp() / "job.log", [unit], 4000, plain_size=10**6)


@pytest.mark.slow
def test_lines_made_of_the_words_of_each_failure() -> None:
    """The words of a pattern, each repeated and all in turn: what `.*` and `\\S+` between them are slow at."""
    slow = []
    for pattern in line_patterns():
        regex = pattern.regex
        words = re.findall(r"[A-Za-z_]{3,}", re.sub(r"\\\w|\(\?\w+\)", " ", regex.pattern)) or ["x"]
        for unit in (*words, " ".join(words), " ".join(reversed(words)), *(f"{word} " for word in words)):
            text = (unit * MAX_LINE_CHARS)[:MAX_LINE_CHARS]
            taken_s = cpu_s(lambda regex=regex, text=text: regex.search(text))  # type: ignore[misc]
            if taken_s * MAX_OUTPUT_BYTES / MAX_LINE_CHARS > 60:
                slow.append((pattern.ending.id, regex.pattern, unit, taken_s))
    assert not slow


def test_steps_after_unusual_lines_are_recorded() -> None:
    """The case that was seen: 400 lines of 2,048 characters, and the steps after them were lost."""
    for unit in ("'a': 1, ", "a=1-", " ", "INFO", "1 "):
        data = lines(unit, 400 * MAX_LINE_LENGTH, MAX_LINE_LENGTH) + b"step 7 loss: 0.5\n"
        assert watch(data).step == 7


def test_huge_numbers_in_counters_are_no_steps() -> None:
    windows = watch(
        b"step 3 loss: 0.5\nstep " + b"9" * 2000 + b" loss: 0.5\nstep 4 loss: 1" + b"0" * 400 + b"\nstep 5 loss: 1.5\n"
    )
    assert windows.step == 5
