"""The estimate of idle time inside steps from profiler windows."""

from pathlib import Path

import pytest

from stoker.report.explain import explain_run
from stoker.runs.records import STEPS, TRACES, RunFolder
from stoker.runs.schemas import StepWindow, TraceWindow


def write(path: Path, traces: list[tuple[float, float, float]], *, wait: float = 0.0) -> Path:
    """Ten windows of 10 s each, in which `wait` is the fraction of input_wait; traces: (end, seconds, busy seconds)."""
    path.mkdir(parents=True)
    folder = RunFolder(path, 1)
    folder.event("started")
    for number in range(1, 11):
        phases = {"compute": 10 * (1 - wait), "input_wait": 10 * wait}
        folder.append(STEPS, StepWindow(t=1000.0 + 10 * number, attempt=1, step=number, window_steps=1, num_images=8,
                                        wall_s=10.0, devices=1, phases=phases))  # fmt: skip
    for t, wall_s, busy_s in traces:
        folder.append(TRACES, TraceWindow(t=1000 + t, attempt=1, step=1, window_steps=4, wall_s=wall_s, busy_s=busy_s))
    folder.close()
    return path


def test_without_a_trace_there_is_no_estimate(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [])
    assert explain_run(run).idle_estimate is None
    assert explain_run(run).idle_estimate is None


def test_the_estimate_is_the_idle_part_of_compute(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [(25.0, 2.0, 1.5), (75.0, 2.0, 1.5)])
    estimate = explain_run(run).idle_estimate
    assert estimate is not None
    assert (estimate.compute_fraction, estimate.device_s) == pytest.approx((0.25, 25.0))
    assert (estimate.windows, estimate.steps) == (2, 8)


def test_the_row_says_how_much_the_windows_slowed_their_steps(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [(25.0, 2.0, 1.5), (75.0, 2.0, 1.5)])
    (row,) = [row for name, row in explain_run(run).rows() if name.startswith("  idle")]
    assert row.meaning == "idle inside steps, estimated from 2 profiler windows, 8 steps; not added to any sum"
    folder = RunFolder(run, 1)
    for slowdown in (1.1, 1.3):
        folder.append(TRACES, TraceWindow(t=1080.0, attempt=1, step=1, window_steps=4, wall_s=2.0, busy_s=1.5,
                                          slowdown=slowdown))  # fmt: skip
    folder.close()
    (row,) = [row for name, row in explain_run(run).rows() if name.startswith("  idle")]
    assert "4 profiler windows, 16 steps (1.20 times as long as others)" in row.meaning


def test_time_of_other_phases_is_not_counted_again(tmp_path: Path) -> None:
    """A device that waits 40 % for input and is busy otherwise was not idle inside its steps."""
    run = write(tmp_path / "run", [(25.0, 2.0, 1.2)], wait=0.4)
    estimate = explain_run(run).idle_estimate
    assert estimate is not None
    assert estimate.device_s == pytest.approx(0.0, abs=1e-9)


def test_a_trace_is_compared_only_with_overlapping_windows(tmp_path: Path) -> None:
    """Input was slow later on; the trace was before."""
    run = write(tmp_path / "run", [(25.0, 2.0, 2.0)])
    folder = RunFolder(run, 1)
    folder.append(STEPS, StepWindow(t=2000.0, attempt=1, step=11, window_steps=1, num_images=8, wall_s=900.0, devices=1,
                                    phases={"compute": 100.0, "input_wait": 800.0}))  # fmt: skip
    folder.close()
    half = write(tmp_path / "half", [(25.0, 2.0, 1.0)], wait=0.0)
    for path, expected in ((run, 0.0), (half, 0.5)):
        estimate = explain_run(path).idle_estimate
        assert estimate is not None
        assert estimate.compute_fraction == pytest.approx(expected)
    slow = RunFolder(half, 1)
    slow.append(STEPS, StepWindow(t=2000.0, attempt=1, step=11, window_steps=1, num_images=8, wall_s=900.0, devices=1,
                                  phases={"compute": 100.0, "input_wait": 800.0}))  # fmt: skip
    slow.close()
    again = explain_run(half).idle_estimate
    assert again is not None
    assert again.compute_fraction == pytest.approx(0.5)


def test_the_estimate_is_between_zero_and_compute(tmp_path: Path) -> None:
    for number, (busy_s, expected) in enumerate(((0.0, 1.0), (9.0, 0.0))):
        run = write(tmp_path / str(number), [(25.0, 2.0, busy_s)], wait=0.5)
        estimate = explain_run(run).idle_estimate
        assert estimate is not None
        assert estimate.compute_fraction == expected


def test_a_trace_without_overlapping_window_is_compared_with_the_whole_run(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [(500.0, 2.0, 1.0)], wait=0.25)
    estimate = explain_run(run).idle_estimate
    assert estimate is not None
    assert estimate.compute_fraction == pytest.approx(1 - 0.5 / 0.75)


def test_the_estimate_changes_no_sum(tmp_path: Path) -> None:
    plain, traced = explain_run(write(tmp_path / "a", [])), explain_run(write(tmp_path / "b", [(25.0, 2.0, 0.5)]))
    assert plain.phases == traced.phases
    assert plain.productive_fraction == traced.productive_fraction
    names = [name for name, _ in traced.rows()]
    assert names[:2] == ["compute", "  idle, estimated"]
    assert names[0:1] + names[2:] == [name for name, _ in plain.rows()]
