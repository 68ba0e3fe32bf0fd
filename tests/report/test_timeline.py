"""Marks of findings and events on the timeline, and the timeline in a browser."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.findings.finding import Evidence, Finding
from stoker.report.html import write_report
from stoker.report.series import FractionSeries, Series, TimelineMark, collect_marks, worst_stretch
from stoker.runs.records import DEVICES, EVENTS, STEPS, RunFolder
from stoker.runs.schemas import DeviceSample, Event, GpuSample, StepWindow
from tests import browser


def fractions(*input_wait: float) -> FractionSeries:
    parts = {"input_wait": list(input_wait), "compute": [1 - share for share in input_wait]}
    return FractionSeries(x=[10.0 * n for n in range(len(input_wait))], width=10.0, fractions=parts)


def finding(*sources: str) -> Finding:
    evidence = [Evidence(text=f"recorded in {source}", source=source) for source in sources]
    return Finding(id="input_bound", severity="warning", title="x", evidence=evidence)


def spans(
    source: str, *, events: tuple[Event, ...] = (), phases: FractionSeries | None = None, **curves: Series
) -> list[TimelineMark]:
    machine = {name.replace("__", "/"): series for name, series in curves.items()}
    marks = collect_marks([finding(source)], list(events), phases or fractions(), machine, 1000.0)
    return [mark for mark in marks if mark.kind == "finding"]


def test_a_phase_is_marked_where_it_took_most() -> None:
    (mark,) = spans("steps.jsonl: phases.input_wait", phases=fractions(0.1, 0.5, 0.1, 0.1, 0.6, 0.7, 0.1))
    assert (mark.start_s, mark.end_s, mark.finding_number) == (40.0, 60.0, 1)
    assert spans("steps.jsonl: input_wait_stages.fetch", phases=fractions(0.0, 0.2, 0.0))[0].start_s == 10.0
    assert spans("steps.jsonl: phases.comm", phases=fractions(0.1)) == []


@settings(max_examples=50)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_a_stretch_is_inside_the_run_and_at_least_as_bad_as_the_worst_bar(values: list[float]) -> None:
    span = worst_stretch(fractions(*values), "input_wait")
    if not any(values):
        assert span is None
        return
    assert span is not None
    first, last = int(span[0] // 10), int(span[1] // 10)
    assert 0 <= first < last <= len(values)
    mean = sum(values) / len(values) * (1 - 1e-9)
    assert all(value >= mean for value in values[first:last])
    assert sum(values[first:last]) >= max(values)


def test_a_gap_between_attempts_ends_a_stretch() -> None:
    phases = FractionSeries(x=[0.0, 10.0, 500.0], width=10.0, fractions={"input_wait": [0.5, 0.5, 0.5]})
    assert worst_stretch(phases, "input_wait") == (0.0, 20.0)


def test_events_and_extremes_of_counters_have_no_duration() -> None:
    spike = Event(t=1030.0, attempt=1, kind="loss_spike", text="jump")
    assert [mark.start_s for mark in spans("events.jsonl: loss_spike", events=(spike, spike))] == [30.0]
    assert [mark.start_s for mark in spans("events.jsonl:1", events=(spike,))] == [30.0]
    assert spans("events.jsonl:7", events=(spike,)) == []
    memory = Series(x=[1.0, 2.0, 3.0], mean=[1, 2, 1], low=[1, 1, 1], high=[1, 9, 2])
    assert [m.start_s for m in spans("devices.jsonl: memory_used_bytes, memory_limit_bytes", memory__used=memory)] == [
        2.0
    ]
    busy = Series(x=[1.0, 2.0], mean=[1, 0.5], low=[0.9, 0.1], high=[1, 1])
    assert [m.start_s for m in spans("devices.jsonl: gpus.utilization", **{"gpu 0__utilization": busy})] == [2.0]
    assert spans("quarantine.jsonl") == []


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = RunFolder(tmp_path / "run", attempt=1)
    folder.path.mkdir()
    folder.event("started", "attempt 1: x")
    start_t = next(json.loads(line)["t"] for line in (folder.path / EVENTS).read_text().splitlines())
    for n in range(120):
        waited = 0.6 if 40 <= n < 70 else 0.02
        phases = {"compute": 1 - waited, "input_wait": waited}
        window = {
            "attempt": 1,
            "step": n,
            "window_steps": 1,
            "num_images": 8,
            "wall_s": 1.0,
            "devices": 1,
            "phases": phases,
        }
        folder.append(STEPS, StepWindow(t=start_t + n + 1, **window))
        gpu = GpuSample(index=0, utilization=1 - waited, sm_active=0.5)
        folder.append(
            DEVICES, DeviceSample(t=start_t + n + 1, attempt=1, gpus=[gpu], cpu_core_utilization=[0.5, 0.7], psi_io=0.1)
        )
    folder.event("finished")
    folder.close()
    return folder.path


@pytest.mark.slow
@pytest.mark.skipif(browser.find() is None, reason="no Chromium on this machine")
def test_the_timeline_is_drawn_and_zooms_at_two_widths(run: Path, tmp_path: Path) -> None:
    page = write_report(run, tmp_path / "report.html")
    charts = json.loads(page.read_text().partition('id="charts">')[2].partition("</script>")[0])
    (name,) = [chart["id"] for chart in charts if "yaxis4" in chart["layout"]]
    span = f"document.getElementById('{name}')._fullLayout.xaxis.range"
    with browser.browser() as tab:
        for width in (1280, 390):
            tab.open(page, width=width, mobile=width < 600)
            assert tab.value(f"document.querySelectorAll('#{name} > div .cartesianlayer > .subplot').length") == 4
            whole = tab.value(span)
            handle = ".nsewdrag" if width > 600 else ".rangeslider-grabber-min"  # a phone has only the slider
            box = tab.value(
                f"(e => {{ e.scrollIntoView({{block: 'center'}}); const r = e.getBoundingClientRect();"
                f" return [r.x, r.y, r.width, r.height]; }})"
                f"(document.querySelector('#{name} {handle}'))"
            )
            x, y = box[0] + 0.25 * box[2], box[1] + box[3] / 2
            to = x + (0.25 * box[2] if width > 600 else 80)
            for kind, at in (
                ("mousePressed", x),
                ("mouseMoved", (x + to) / 2),
                ("mouseMoved", to),
                ("mouseReleased", to),
            ):
                tab.call("Input.dispatchMouseEvent", type=kind, x=at, y=y, button="left", buttons=1, clickCount=1)
            zoomed = tab.value(f"new Promise(done => setTimeout(() => done({span}), 400))")
            assert zoomed[1] - zoomed[0] < 0.9 * (whole[1] - whole[0]), width
        assert tab.errors == []
