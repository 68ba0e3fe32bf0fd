"""Traces that are kept: each is found again by what it depends on, and no file is trusted."""

import os

import msgspec
import pytest

from stoker.hardware.block_size import block_size_for_memory
from stoker.planning import trace as traces
from stoker.planning.trace import StepTrace, TracedStep, Work
from tests.trainer.planning.samples import make_spec

TRACE = StepTrace(
    batch_size=4, peak_bytes=10, resting_bytes=5, image_bytes=1, parameters=2, gradient_bytes=8,
    works=[Work("convolution", 2.5, 7.0, 3, once=False)],
)  # fmt: skip
GIB = 2**30


def test_what_is_kept_is_found_again() -> None:
    key = TracedStep(make_spec(), 4, 0).key()
    assert traces.read_trace(key) is None
    traces.write_trace(key, TRACE)
    assert traces.read_trace(key) == TRACE


def test_a_step_is_known_by_all_that_it_depends_on() -> None:
    gpu = make_spec(on_cpu=False, precision="bf16")
    keys = [
        TracedStep(*facts).key()
        for facts in (
            (make_spec(), 4, 0), (make_spec(), 8, 0), (make_spec(side=128), 4, 0), (make_spec("ember_n"), 4, 0),
            (gpu, 4, 4 * GIB), (gpu, 4, 24 * GIB), (make_spec(on_cpu=False, precision="fp16"), 4, 24 * GIB),
        )
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)
    assert TracedStep(make_spec(), 4, 0).key() == TracedStep(make_spec(), 4, 64 * GIB).key() == keys[0]
    assert block_size_for_memory(500 * GIB) == block_size_for_memory(600 * GIB)
    assert TracedStep(gpu, 4, 500 * GIB).key() == TracedStep(gpu, 4, 600 * GIB).key()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"{}", b"[" * 100_000, msgspec.json.encode(TRACE)[:-9]])
def test_a_damaged_file_is_no_trace(content: bytes) -> None:
    traces.write_trace("key", TRACE)
    (traces.trace_folder() / "key.json").write_bytes(content)
    assert traces.read_trace("key") is None
    traces.write_trace("key", TRACE)
    assert traces.read_trace("key") == TRACE


def test_the_oldest_files_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MAX_FILES", 3)
    for number in range(5):
        traces.write_trace(f"{number}", TRACE)
        os.utime(traces.trace_folder() / f"{number}.json", (number, number))
    assert {file.stem for file in traces.trace_folder().iterdir()} == {"2", "3", "4"}


def test_a_cache_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CACHE_DIR", "/proc/nowhere")
    traces.write_trace("key", TRACE)
    assert traces.read_trace("key") is None
