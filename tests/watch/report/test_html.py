"""`stoker report`: the page of every kind of run, its security, and its rendering in a browser."""

import contextlib
import html
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker_watch.cli.app import main
from stoker_watch.errors import UsageError
from stoker_watch.report.explain import PHASE_COLORS
from stoker_watch.report.html import _plotly, render, write_report
from stoker_watch.report.page import charts as charts_module
from stoker_watch.report.page.markup import Markup, escape, tag
from stoker_watch.report.run_report import RunReport, collect
from stoker_watch.report.series import MAX_BARS, MAX_POINTS
from stoker_watch.runs.evaluation import Evaluation, read_evaluation, read_thumbnails
from stoker_watch.runs.records import (
    CONFIG,
    DEVICES,
    ENVIRONMENT,
    EVALUATION,
    EVENTS,
    PHASES,
    STACKS,
    STEPS,
    THUMBNAILS,
    WARNING_KINDS,
    RunFolder,
    locked,
)
from stoker_watch.runs.schemas import DeviceSample, GpuSample, Place, Quarantined, StackWindow, StepWindow
from tests import browser

RECORDED = Path(__file__).parent / "evaluated"
EVIL = '<script>alert("1")</script>'
CONFIG_TEXT = """\
[data]
data = "/somewhere/cars & co"
image_size = [288, 384]

[model]
model = "retinanet_tiny_fpn"

[run]
max_duration = "100"
price_per_device_hour = 3.6

[reasons]
image_size = "320² pixels, <b>in the aspect</b> of the data"
"""


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory: pytest.TempPathFactory) -> Evaluation:
    """Six images: most boxes are detected, some shifted, some of a wrong class; some false positives, some missed. The
    first class has a hostile name. Made by stoker from drawn images."""
    recorded = read_evaluation(RECORDED)
    assert recorded is not None
    folder = tmp_path_factory.mktemp("drawn")
    for shown in (*recorded.worst, *recorded.best):
        (folder / shown.path).touch()
    moved = {
        name: [msgspec.structs.replace(shown, path=str(folder / shown.path)) for shown in getattr(recorded, name)]
        for name in ("worst", "best")
    }
    return msgspec.structs.replace(recorded, **moved)


def make_run(
    path: Path, evaluation: Evaluation | None = None, *, end: str | None = "finished", attempts: int = 1
) -> Path:
    path.mkdir()
    (path / CONFIG).write_text(CONFIG_TEXT)
    (path / ENVIRONMENT).write_text(json.dumps({"cpu": "a <fast> one", "cores": 2, "gpu": {"gpus": []}, "argv": ["x"]}))
    for attempt in range(1, attempts + 1):
        folder = RunFolder(path, attempt)
        folder.event("started" if attempt == 1 else "resumed", f"attempt {attempt}")
        folder.event("warning", f"2 × zero size in {EVIL}.jpg")
        t = json.loads((path / EVENTS).read_text().splitlines()[0])["t"] + 200 * (attempt - 1)
        for n in range(1, 41):
            phases = {"startup": 1.0} if n == 1 else {"compute": 0.7, "input_wait": 0.3}
            folder.append(
                STEPS,
                StepWindow(
                    t=t + n,
                    attempt=attempt,
                    step=n,
                    window_steps=1,
                    num_images=8,
                    wall_s=1.0,
                    devices=1,
                    phases=phases,
                    losses={"box": 1 / n, EVIL: 2 / n, "total": 3 / n},
                    lr=0.1,
                    grad_norm=float(n),
                    memory_peak_bytes=2**30,
                ),
            )
            gpu = GpuSample(index=0, utilization=0.5, memory_used_bytes=2**33, memory_total_bytes=2**34, power_w=300.0)
            folder.append(
                DEVICES,
                DeviceSample(
                    t=t + n, attempt=attempt, gpus=[gpu], cpu_core_utilization=[0.5, 1.0], rss_bytes=2**30, psi_cpu=0.25
                ),
            )
        folder.append(
            "quarantine.jsonl",
            Quarantined(
                t=t,
                attempt=attempt,
                image_index=3,
                path=f"a/{EVIL}",
                error="it is <empty>",
                sample_position=4,
                replaced_by=5,
            ),
        )
        if evaluation is not None:
            folder.event("evaluated", step=100, metrics=msgspec.to_builtins(evaluation.metrics))
            folder.replace(EVALUATION, evaluation)
            shutil.copy(RECORDED / THUMBNAILS, path)
        if attempt < attempts:
            folder.close()
    if end is not None:
        folder.event(end, "It ended.\n  where:  here\n  why:    so it is\n  fix:    do it better")
    folder.close()
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, evaluation: Evaluation) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "cars-1", evaluation, attempts=2)


@pytest.fixture(scope="module")
def page(run: Path) -> str:
    return render(collect(run), read_thumbnails(run, 100))


def without_plotly(page: str) -> str:
    """The page without plotly's source."""
    plotly = str(_plotly())
    assert page.count(plotly) == 1
    return page.replace(plotly, "")


# --- content -------------------------------------------------------------------------------------------


def test_the_summary_has_metrics_time_phases_and_advice(page: str, evaluation: Evaluation) -> None:
    summary = page.partition('id="summary"')[2].partition("</section>")[0]
    for words in (
        f"{evaluation.metrics.ap:.3f}",
        f"{evaluation.metrics.ap50:.3f}",
        "1 min 20 s",
        "68 %",
        "input wait 29 %",
        "What to do next",
        "The training waits for its input",
        "--workers",
        "0.08",
    ):
        assert words in summary, words
    assert "finished" in page.partition("<h1>")[2].partition("</h1>")[0]


def test_every_section_is_there_in_the_order_of_the_navigation(page: str) -> None:
    sections = re.findall(r'<section id="(\w+)"', page)
    assert len(sections) == 10
    assert re.findall(r'<a href="#(\w+)">', page.partition("<nav")[2].partition("</nav>")[0]) == sections


@pytest.mark.parametrize("kind", sorted(WARNING_KINDS))
def test_every_kind_of_warning_is_in_the_warnings(tmp_path: Path, kind: str) -> None:
    run = make_run(tmp_path / "run", end=None)
    with contextlib.closing(RunFolder(run, 2)) as folder:
        folder.event(kind, "something was wrong")
    warnings = render(collect(run)).partition('id="data"')[2].partition("</section>")[0]
    assert "something was wrong" in warnings


def test_settings_have_reasons_and_those_of_the_user_are_marked(page: str) -> None:
    assert (
        "Set by you: <b>data = /somewhere/cars &amp; co, model = retinanet_tiny_fpn, max_duration = 100, "
        "price_per_device_hour = 3.6</b>" in page
    )
    assert "320² pixels, &lt;b&gt;in the aspect&lt;/b&gt; of the data" in page


def test_restarts_are_marked(page: str) -> None:
    assert "attempt 2 resumed at step 0" in page
    data = json.loads(page.partition('id="charts">')[2].partition("</script>")[0])
    assert sum("shapes" in chart["layout"] for chart in data) >= 6


def test_text_from_data_is_escaped(page: str) -> None:
    assert EVIL not in page
    assert escape(EVIL) in page
    assert "a &lt;fast&gt; one" in page
    assert "it is &lt;empty&gt;" in page
    data = page.partition('id="charts">')[2].partition("</script>")[0]
    assert "<" not in data
    assert "&lt;script" in data  # plotly reads HTML in names


def make_sampled_run(path: Path) -> Path:
    """A run with samples of stacks, of a program with hostile names."""
    make_run(path)
    start_t = json.loads((path / EVENTS).read_text().splitlines()[0])["t"]
    call = f"a.{EVIL}\u202e\x1b[31m"
    evil = Place(line=f"{EVIL}.py:1", function=EVIL, call=call, leaf=EVIL, kind="python", samples=30)
    folder = RunFolder(path, 1)
    for n in range(1, 4):
        places = [evil, Place(line="train.py:9", function="main", kind="compute", samples=70)]
        folder.append(STACKS, StackWindow(t=start_t + 10 * n, attempt=1, pid=1, wall_s=10, samples=100, places=places))
    folder.close()
    return path


def test_places_are_a_chart_with_names_numbers_and_a_table(tmp_path: Path) -> None:
    page = without_plotly(render(collect(make_sampled_run(tmp_path / "a"))))
    (chart,) = re.findall(r'<svg [^>]*class="icicle".*?</figure>', page)
    assert 'role="img" aria-label="Icicle chart: Training thread, 30 s, 300 samples.' in chart
    names = [html.unescape(name) for name in re.findall(r"<title>(.*?)</title>", chart)]
    assert "main (train.py:9): 21 s (95 %: 19 s to 22 s), 70 % of the training thread, 210 samples, compute" in names
    widths = dict(zip(names, re.findall(r'<svg x="[\d.]+%" y="\d+" width="([\d.]+)%"', chart), strict=True))
    assert widths[next(name for name in names if name.startswith("main "))] == "70.000"
    rows = [re.sub("<.*?>", "|", row) for row in chart.partition("<tbody>")[2].split("</tr>")]
    assert any("main (train.py:9)||21 s||19 s to 22 s||70 %||210||compute" in row for row in rows)
    assert "<caption" in chart
    assert "<script" not in chart


def test_names_of_places_are_escaped(tmp_path: Path) -> None:
    page = without_plotly(render(collect(make_sampled_run(tmp_path / "a"))))
    assert page.count(escape(EVIL)) > 12
    assert EVIL not in page
    assert not set(page) & set("\u202e\x1b")


def test_a_run_without_samples_has_no_places(page: str) -> None:
    assert "<h3>Places" not in page
    assert '<svg class="icicle' not in page


@given(st.text())
def test_no_text_opens_or_closes_an_element(value: str) -> None:
    assert not set(escape(value)) & set("<>\"'")
    assert re.fullmatch(r'<b title="[^"<>]*">[^<>]*</b>', tag("b", value, title=value), re.DOTALL)
    assert tag("i", Markup("<b>x</b>")) == "<i><b>x</b></i>"


def test_names_in_legends_have_no_control_characters() -> None:
    charts = charts_module.Charts()
    name = "car\u202e\u2066\x1b[31m\x9b2J"
    charts.add("x", "y", [charts_module.curve(name, [1], [2.0], 0), charts_module.bars(name, [name], [1], "red")])
    data = json.loads(charts.as_json())
    assert "car" in json.dumps(data)
    found = [trace["name"] for chart in (data.values() if isinstance(data, dict) else data) for trace in chart["data"]]
    assert len(found) == 2
    assert all(shown.isprintable() for shown in found)
    assert "\u202e" not in json.dumps(data, ensure_ascii=False)


def test_no_text_of_a_chart_ends_the_script() -> None:
    charts = charts_module.Charts()
    charts.add("x", "y", [{"name": EVIL + "</script><!--"}])
    data = charts.as_json()
    assert json.loads(data)[0]["data"][0]["name"] == EVIL + "</script><!--"
    assert "<" not in data


def test_the_page_makes_no_requests(page: str) -> None:
    assert "</script" not in str(_plotly())
    own = without_plotly(page)
    assert not re.search(r"""(src|href|action|data|poster|srcset)\s*=\s*["']?\s*(https?:)?//""", own)
    assert not re.search(r"@import|url\(\s*[\"']?\s*(https?:)?//|<link|<iframe|<base", own)
    assert re.search(r"""Content-Security-Policy" content="default-src 'none'""", own)


def test_images_tables_and_charts_have_names_for_screen_readers(page: str) -> None:
    own = without_plotly(page)
    images = re.findall(r"<img [^>]*>", own)
    assert len(images) == 6
    assert all(re.search(r'alt="[^"]+: \d+ TP, \d+ FP, \d+ FN; ground truth: ', image) for image in images)
    assert all("<caption" in table for table in own.split("<table")[1:])
    assert all('aria-label="Chart: ' in chart for chart in re.findall(r'<div id="chart-\d+"[^>]*>', own))
    levels = [int(level) for level in re.findall(r"<h([1-6])", own)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def luminance(color: str) -> float:
    """Relative luminance of an sRGB color (WCAG 2.2)."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_contrast_in_light_and_dark(page: str) -> None:
    style = page.partition("<style>")[2].partition("</style>")[0]
    parts = style.split("}")[:2]
    light, dark = (dict(re.findall(r"(--\w+): (#\w{6})", part)) for part in parts)
    assert set(light) == set(dark)
    for colors in (light, dark):
        texts = ("--text", "--muted", "--link", "--good", "--bad", "--warn")
        pairs = [(name, back) for name in texts for back in ("--panel", "--back")]
        pairs += [("--on", f"--c{n}") for n in range(charts_module.NUM_COLORS)]
        for front, back in pairs:
            high, low = sorted((luminance(colors[front]), luminance(colors[back])), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 4.5, (front, back)


def test_the_confusion_matrix_is_a_table_of_all_classes(page: str, evaluation: Evaluation) -> None:
    matrix = evaluation.confusion_matrix
    assert sum(map(sum, matrix.counts)) > 10
    (body,) = re.findall(r'<div class="matrix">.*?<tbody>(.*?)</tbody>', page, re.DOTALL)
    rows = [
        [re.sub("<.*?>", "", cell) for cell in re.findall(r"<t[hd].*?</t[hd]>", row)] for row in body.split("<tr>")[1:]
    ]
    assert [row[0] for row in rows] == [escape(evaluation.classes[n].name) for n in matrix.labels] + ["background"]
    shown = [0, 1, 2, 4]  # three classes: there are no others
    for i, row in zip(shown, rows, strict=True):
        assert row[1:] == ["" if i == j == 4 else str(matrix.counts[i][j]) for j in shown]


def test_next_commands_can_be_copied_into_a_shell(tmp_path: Path, evaluation: Evaluation) -> None:
    run = make_run(tmp_path / 'it\'s $(rm -rf) a; "run" & <b>', evaluation)
    page = render(collect(run))
    (section,) = re.findall(r'<dl class="commands">.*?</dl>', page)
    commands = [html.unescape(text) for text in re.findall(r"<code[^>]*>(.*?)</code>", section)]
    assert [shlex.split(command)[:3] for command in commands] == [
        ["stoker", "predict", str(run)], ["stoker", "export", str(run)], ["stoker", "eval", str(run)],
    ]  # fmt: skip
    image = shlex.split(commands[0])[3]
    assert Path(image).is_file()
    (as_json,) = re.findall(r"As JSON: <code[^>]*>(.*?)</code>", page)
    assert shlex.split(html.unescape(as_json)) == ["stoker", "report", str(run), "--json"]


def test_the_signs_of_the_pages_are_in_every_usual_font() -> None:
    """WGL4, the signs of Arial, Liberation Sans, DejaVu Sans and Segoe UI: pages use no others beyond Latin."""
    wgl4 = set("–—‘’“”†‡•…‰→←↑↓↔∂∆∏∑−√∞≈≠≤≥■□▪▫▲►▼◄◊○●▌▐█░▒▓")
    folder = Path(charts_module.__file__).parent
    for path in sorted(folder.iterdir()):
        if path.suffix in (".html", ".css", ".js") and path.name != "plotly.min.js":
            assert {sign for sign in path.read_text() if ord(sign) > 0x17F} <= wgl4, path.name


def test_every_phase_has_a_color() -> None:
    assert set(PHASE_COLORS) == set(PHASES)


# --- every kind of run --------------------------------------------------------------------------------------------


def test_a_running_run(tmp_path: Path, evaluation: Evaluation) -> None:
    path = make_run(tmp_path / "a", evaluation, end=None)
    with locked(path):
        assert "● running" in re.sub("<[^>]*>", "", render(collect(path)))


def test_a_run_with_incomplete_lines(tmp_path: Path, evaluation: Evaluation) -> None:
    path = make_run(tmp_path / "a", evaluation, end=None)
    for name in (STEPS, EVENTS, DEVICES):
        with (path / name).open("a") as file:
            file.write('{"t": 17')
    page = render(collect(path))
    assert "The run was killed" in page
    assert f"stoker train --resume {path}" in page


def test_a_failed_run_has_reason_and_fix(tmp_path: Path) -> None:
    report = collect(make_run(tmp_path / "a", end="failed"))
    first = report.advice[0]
    assert (first.title, first.fix) == ("The run failed: It ended.", "do it better")
    assert "so it is" in first.evidence_text
    assert first.command == f"stoker train --resume {tmp_path / 'a'}"


def test_a_run_without_evaluation_has_its_numbers(tmp_path: Path, evaluation: Evaluation) -> None:
    path = make_run(tmp_path / "a", evaluation)
    (path / EVALUATION).unlink()
    page = render(collect(path))
    assert "evaluation.json is missing, although the model was evaluated" in page
    assert f"{evaluation.metrics.ap:.3f}" in page
    (path / EVALUATION).write_text("{")
    assert "cannot be read by this version" in render(collect(path))


def test_a_run_that_has_just_started(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, 1)
    folder.event("started")
    folder.close()
    page = render(collect(tmp_path))
    for sentence in (
        "The settings are not known",
        "Hardware and versions are not known",
        "no optimizer step is recorded",
        "the model was not evaluated yet",
        "devices.jsonl has no lines",
    ):
        assert sentence in page
    assert "n/a" in page
    assert str(_plotly()) not in page  # no chart, no plotly


def test_an_empty_run(tmp_path: Path) -> None:
    (tmp_path / EVENTS).touch()
    report = collect(tmp_path)
    assert (report.advice[0].fix, report.advice[0].command) == ("start it again", None)
    page = render(report)
    assert "No unusable images are recorded." in page
    assert '<p class="what">device unknown</p>' in page


def test_a_damaged_environment_is_reported(tmp_path: Path, evaluation: Evaluation) -> None:
    path = make_run(tmp_path / "a", evaluation)
    for content in ('{"cpu": "fa', "[1]", "\xff"):
        (path / ENVIRONMENT).write_text(content, encoding="latin-1")
        report = collect(path)
        assert report.environment == {}
        assert any("environment.json is damaged" in sentence for sentence in report.missing)
        assert "device unknown" in render(report)


@pytest.mark.parametrize("content", ['[run]\nprice_per_device_hour = "3', "\xff"])
def test_damaged_settings_are_an_error_that_names_the_file(tmp_path: Path, content: str) -> None:
    path = make_run(tmp_path / "a")
    (path / CONFIG).write_text(content, encoding="latin-1")
    with pytest.raises(UsageError, match="settings are damaged") as caught:
        collect(path)
    assert caught.value.location == str(path / CONFIG)


def test_time_starts_at_the_start_of_the_process(tmp_path: Path) -> None:
    """The imports before the first event are in the first window."""
    folder = RunFolder(tmp_path, 1)
    folder.event("started")
    t = json.loads((tmp_path / EVENTS).read_text())["t"]
    for n, (wall_s, phase) in enumerate(((8.0, "startup"), (1.0, "compute"), (1.0, "compute"))):
        folder.append(STEPS, StepWindow(t=t + n, attempt=1, step=n, window_steps=n and 1, num_images=0, wall_s=wall_s,
                                        devices=1, phases={phase: wall_s}))  # fmt: skip
    folder.close()
    report = collect(tmp_path)
    assert report.start_t == pytest.approx(t - 8)
    assert report.phases.fractions["startup"] == [1, 1, 1, 1, 1, 1, 1, 1, 0, 0]


def test_repeated_evaluations_count_once(tmp_path: Path, evaluation: Evaluation) -> None:
    path = make_run(tmp_path / "a")
    with (path / EVENTS).open("a") as file:
        for attempt, step, ap in ((1, 10, 0.1), (1, 20, 0.2), (1, 30, 0.9), (2, 20, 0.3), (2, 30, 0.4)):
            metrics = msgspec.to_builtins(evaluation.metrics) | {"ap": ap}
            file.write(json.dumps({"t": 1e9, "attempt": attempt, "kind": "evaluated", "step": step,
                                   "data": {"metrics": metrics}}) + "\n")  # fmt: skip
    report = collect(path)
    assert [(item.step, item.metrics.ap) for item in report.eval_history] == [(10, 0.1), (20, 0.3), (30, 0.4)]
    assert report.best is not None
    assert report.best.step == 30


def test_many_classes_are_collapsed_and_those_without_boxes_are_named(tmp_path: Path, evaluation: Evaluation) -> None:
    class_eval, metrics = evaluation.classes[0], evaluation.metrics.per_class[0]
    boxes = [200 - n for n in range(130)] + [0] * 70
    names = [f"class-{n:03}" for n in range(200)]
    many = msgspec.structs.replace(
        evaluation,
        classes=[
            msgspec.structs.replace(class_eval, name=name, boxes=count)
            for name, count in zip(names, boxes, strict=True)
        ],
        metrics=msgspec.structs.replace(
            evaluation.metrics,
            per_class=[
                msgspec.structs.replace(metrics, name=name, boxes=count)
                for name, count in zip(names, boxes, strict=True)
            ],
        ),
    )
    path = make_run(tmp_path / "a", many)
    page = render(collect(path))
    shown, _, collapsed = page.partition("By class, the next 80</summary>")
    assert 'scope="row" class="wide">class-019<' in shown
    assert 'scope="row" class="wide">class-020<' not in shown
    assert 'scope="row" class="wide">class-099<' in collapsed
    assert 'scope="row" class="wide">class-100<' not in page
    assert "The 30 rarest are only in the JSON." in page
    assert "Without ground truth in this split: class-130, " in page
    assert "class-137 and 62 more." in page
    (path / EVALUATION).unlink()
    assert "AP by class, the next 80</summary>" in render(collect(path))


def test_a_folder_that_is_not_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a run"):
        collect(tmp_path)


# --- JSON and the command -----------------------------------------------------------------------------------------


def test_the_command_writes_the_page_and_prints_its_path(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["stoker", "report", str(run), *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        return capsys.readouterr().out

    assert command() == f"{run / 'report.html'}\n"
    assert command("--out", str(tmp_path / "new" / "x.html")) == f"{tmp_path / 'new' / 'x.html'}\n"
    assert (tmp_path / "new" / "x.html").read_text().startswith("<!doctype html>")
    report = msgspec.json.decode(command("--json", "--price-per-device-hour", "36"), type=RunReport)
    assert report.explanation.price_per_device_hour == 36
    assert report.evaluation is not None
    assert [item.name for item in report.settings if item.reason is None] == [
        "data",
        "model",
        "max_duration",
        "price_per_device_hour",
    ]


def test_the_report_needs_no_torch(run: Path, tmp_path: Path) -> None:
    script = (
        "import sys, pathlib\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'torchvision'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from stoker_watch.report.html import write_report\n"
        "write_report(sys.argv[1], pathlib.Path(sys.argv[2]))\n"
    )
    subprocess.run([sys.executable, "-c", script, str(run), str(tmp_path / "x.html")], check=True)
    assert (tmp_path / "x.html").stat().st_size < 6_500_000


# --- long runs ----------------------------------------------------------------------------------------------------


def test_a_long_run_has_a_small_page(tmp_path: Path) -> None:
    path = make_run(tmp_path / "a")
    folder = RunFolder(path, 1)
    encode = msgspec.json.Encoder().encode
    line = StepWindow(
        t=0,
        attempt=1,
        step=0,
        window_steps=9,
        num_images=72,
        wall_s=1.0,
        devices=1,
        phases={"compute": 1.0},
        losses={"total": 1.0},
        lr=0.1,
    )
    start = collect(path).start_t or 0.0
    with (path / STEPS).open("ab") as file:
        for n in range(5_000):
            line.t, line.step, line.losses["total"] = start + n, 9 * n, 1.0 + n % 7
            file.write(encode(line) + b"\n")
    folder.close()
    report = collect(path)
    assert all(len(series.x) <= MAX_POINTS for series in report.curves.values())
    assert len(report.phases.x) <= MAX_BARS
    assert len(without_plotly(render(report))) < 600_000


# --- a real browser -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(browser.find() is None, reason="no Chromium on this machine")
def test_a_browser_shows_no_error_request_or_overflow(run: Path, tmp_path: Path) -> None:
    path = write_report(run, tmp_path / "report.html")
    charts = len(json.loads(path.read_text().partition('id="charts">')[2].partition("</script>")[0]))
    drawn = (
        "[...document.querySelectorAll('.chart')].filter(c => c.querySelector('.plot-container .trace, .bars')).length"
    )
    with browser.browser() as tab:
        shown = set()
        for width, dark in ((1280, False), (390, True)):
            tab.open(path, width=width, dark=dark, mobile=width < 600)
            assert tab.value(drawn) == charts
            assert tab.value("document.documentElement.scrollWidth") == width
            assert tab.value("[...document.images].every(image => image.naturalWidth > 0)")
            shown.add(tab.value("document.querySelector('.chart text').style.fill"))
        assert len(shown) == 2  # the charts have different colors in dark mode
        assert tab.errors == []
        assert {url for url in tab.requests if not url.startswith("data:")} == {path.as_uri()}


@pytest.mark.slow
@pytest.mark.skipif(browser.find() is None, reason="no Chromium on this machine")
def test_a_browser_draws_the_places_in_light_and_dark(tmp_path: Path) -> None:
    path = write_report(make_sampled_run(tmp_path / "a"), tmp_path / "report.html")
    with browser.browser() as tab:
        fills, texts = set(), set()
        for width, dark in ((1280, False), (390, True)):
            tab.open(path, width=width, dark=dark, mobile=width < 600)
            box = "[...document.querySelectorAll('.icicle svg')].find(b => b.textContent.startsWith('main '))"
            whole, part = (
                tab.value(f"{which}.getBoundingClientRect().width")
                for which in ("document.querySelector('.icicle')", f"{box}.querySelector('rect')")
            )
            assert part == pytest.approx(0.7 * whole, abs=1)
            assert tab.value("document.documentElement.scrollWidth") == width
            hovered = f"(() => {{ const r = {box}; r.scrollIntoView(); const b = r.getBoundingClientRect(); return "
            hovered += "document.elementFromPoint(b.x + b.width / 2, b.y + 5).closest('svg')"
            hovered += ".querySelector('title').textContent; })()"
            assert tab.value(hovered).startswith("main (train.py:9): 21 s")
            fills.add(tab.value(f"getComputedStyle({box}.querySelector('rect')).fill"))
            texts.add(tab.value(f"getComputedStyle({box}.querySelector('text')).fill"))
        assert (len(fills), len(texts)) == (2, 2), "light and dark"
        assert tab.errors == []
