"""The estimate of how long the device stood still inside steps: from profiler windows, labelled, part of no sum."""

from pathlib import Path

import pytest

from stoker.report.explain import explain_run
from stoker.report.idle_estimate import estimate_idle
from stoker.runs.records import STEPS, TRACES, RunFolder
from stoker.runs.schemas import StepWindow, TraceWindow
from stoker.runs.totals import compute_totals


def write(path: Path, traces: list[tuple[float, float, float]], *, wait: float = 0.0) -> Path:
    """Ten windows of 10 s each, in which `wait` is the share of input; traces: (end, seconds, busy seconds)."""
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


def test_without_a_trace_nothing_is_estimated(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [])
    assert estimate_idle(run, compute_totals(run)) is None
    assert explain_run(run).idle_estimate is None


def test_the_estimate_is_what_is_left_of_compute(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [(25.0, 2.0, 1.5), (75.0, 2.0, 1.5)])
    found = estimate_idle(run, compute_totals(run))
    assert found is not None
    assert (found.compute_fraction, found.device_s) == pytest.approx((0.25, 25.0))
    assert (found.windows, found.steps) == (2, 8)


def test_what_the_ledger_has_charged_already_is_not_counted_again(tmp_path: Path) -> None:
    """A device that waits 40 % for input and works the rest did not stand still inside its steps."""
    run = write(tmp_path / "run", [(25.0, 2.0, 1.2)], wait=0.4)
    found = estimate_idle(run, compute_totals(run))
    assert found is not None
    assert found.device_s == pytest.approx(0.0, abs=1e-9)


def test_only_the_lines_that_a_trace_falls_into_are_compared_with_it(tmp_path: Path) -> None:
    """Input was slow later on; the trace was before."""
    run = write(tmp_path / "run", [(25.0, 2.0, 2.0)])
    folder = RunFolder(run, 1)
    folder.append(STEPS, StepWindow(t=2000.0, attempt=1, step=11, window_steps=1, num_images=8, wall_s=900.0, devices=1,
                                    phases={"compute": 100.0, "input_wait": 800.0}))  # fmt: skip
    folder.close()
    half = write(tmp_path / "half", [(25.0, 2.0, 1.0)], wait=0.0)
    for path, wanted in ((run, 0.0), (half, 0.5)):
        found = estimate_idle(path, compute_totals(path))
        assert found is not None
        assert found.compute_fraction == pytest.approx(wanted)
    slow = RunFolder(half, 1)
    slow.append(STEPS, StepWindow(t=2000.0, attempt=1, step=11, window_steps=1, num_images=8, wall_s=900.0, devices=1,
                                  phases={"compute": 100.0, "input_wait": 800.0}))  # fmt: skip
    slow.close()
    again = estimate_idle(half, compute_totals(half))
    assert again is not None
    assert again.compute_fraction == pytest.approx(0.5)


def test_it_is_between_nothing_and_all_of_compute(tmp_path: Path) -> None:
    for number, (busy_s, wanted) in enumerate(((0.0, 1.0), (9.0, 0.0))):
        run = write(tmp_path / str(number), [(25.0, 2.0, busy_s)], wait=0.5)
        found = estimate_idle(run, compute_totals(run))
        assert found is not None
        assert found.compute_fraction == wanted


def test_a_trace_of_a_window_that_was_never_written_is_compared_with_the_whole(tmp_path: Path) -> None:
    run = write(tmp_path / "run", [(500.0, 2.0, 1.0)], wait=0.25)
    found = estimate_idle(run, compute_totals(run))
    assert found is not None
    assert found.compute_fraction == pytest.approx(1 - 0.5 / 0.75)


def test_it_changes_no_sum(tmp_path: Path) -> None:
    plain, traced = explain_run(write(tmp_path / "a", [])), explain_run(write(tmp_path / "b", [(25.0, 2.0, 0.5)]))
    assert plain.phases == traced.phases
    assert plain.productive_fraction == traced.productive_fraction
    names = [name for name, _ in traced.rows()]
    assert names[:2] == ["compute", "  idle, estimated"]
    assert names[0:1] + names[2:] == [name for name, _ in plain.rows()]
