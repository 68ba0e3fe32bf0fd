"""The timeline in a browser."""

import json
from pathlib import Path

import pytest

from stoker_watch.report.html import write_report
from stoker_watch.runs.records import DEVICES, EVENTS, STEPS, RunFolder
from stoker_watch.runs.schemas import DeviceSample, GpuSample, StepWindow
from tests import browser


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
    (name,) = [chart["id"] for chart in charts if "yaxis2" in chart["layout"]]
    span = f"document.getElementById('{name}')._fullLayout.xaxis.range"
    with browser.browser() as tab:
        for width in (1280, 390):
            tab.open(page, width=width, mobile=width < 600)
            assert tab.value(f"document.querySelectorAll('#{name} > div .cartesianlayer > .subplot').length") == 2
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
