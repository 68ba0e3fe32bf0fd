"""`stoker why --all`: sums over runs; damaged runs are listed and not fatal."""

import io
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker_watch.diagnosis import engine
from stoker_watch.diagnosis.endings import endings
from stoker_watch.diagnosis.run_data import RunRecords
from stoker_watch.errors import UsageError
from stoker_watch.findings.finding import Finding
from stoker_watch.report import runs_summary as summary_module
from stoker_watch.report.explain import explain_run
from stoker_watch.report.html import render_runs_summary, write_runs_summary
from stoker_watch.report.runs_summary import MAX_WORST_RUNS, RunsSummary, print_runs_summary, summarize_runs
from stoker_watch.runs.records import EVENTS, PHASES, RANKS, STEPS, RunFolder
from tests import browser
from tests.watch.report.runs import START_T, write_run

T4 = {"hostname": "node-1", "machine_type": "g4dn.xlarge", "gpu": {"gpus": [{"name": "Tesla T4"}]}}


def printed(summary: RunsSummary) -> str:
    file = io.StringIO()
    print_runs_summary(summary, file)
    return file.getvalue()


def two_rules(run_records: RunRecords) -> list[Finding]:
    """Fixed findings: one for the time of `input_wait`, one for the end of a run."""
    died = (
        [(run_records.totals.device_s, "ended_without_record", "It died", None)]
        if run_records.termination is not None
        else []
    )
    waited_s = run_records.totals.phases.get("input_wait", 0.0)
    lost = [(waited_s, "input_bound", "It waits", waited_s)] if waited_s else []
    return [Finding(id=cause, severity="warning", title=title, evidence=[], lost_device_s=lost_s)
            for _, cause, title, lost_s in died + lost]  # fmt: skip


DIED = endings()["ended_without_record"].title


def test_the_tables_of_many_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engine, "run_rules", two_rules)
    waits = {"compute": 1350.0, "input_wait": 450.0}
    write_run(Path("runs/a"), phases=waits, environment=T4, settings="[run]\nprice_per_device_hour = 2.0\n")
    write_run(Path("runs/team/x/b"), phases={"compute": 1800.0}, start_t=START_T + 40 * 86400, environment=T4)
    write_run(Path("runs/c"), phases={"compute": 900.0, "eval": 900.0}, end=None)
    write_run(Path("runs/d"), windows=0, end="failed", message="CUDA out of memory. Tried to allocate 2 GiB")
    Path("runs/bad").mkdir()
    Path("runs/bad", EVENTS).write_text('{"t": "yesterday"}\n')
    Path("runs/notes").mkdir()
    text, _, unread = printed(summarize_runs("runs")).partition("\ncould not be read\nrun       error\nruns/")
    assert unread.startswith("bad  A line of the run's records ")
    assert (
        text
        == f"""\
folder   runs
runs     4: 1 failed, 2 finished, 1 killed; 1 run could not be read
time     3 device-hours
cost     2.53, of 2 runs with a price, 1 of them with a list price
trained  75 % of 3 device-hours

device time by phase
phase       device-hours  fraction  cost  runs  meaning
compute             2.25      75 %  2.03     3  optimizer steps ran
eval                 0.5      17 %   n/a     1  evaluation
input_wait          0.25     8.3 %  0.50     1  the training waited for input
total                  3     100 %

findings (they overlap with the phases and with each other)
cause                 device-hours  fraction  cost  runs  meaning
input_bound                   0.25     8.3 %  0.50     1  The training waits for its input
ended_without_record                                   2  {DIED}

by month, UTC
month    device-hours  trained  cost  runs
2026-05             2     62 %  2.00     2
2026-07             1    100 %  0.53     1

by host
host     device-hours  trained  cost  runs
node-1              2     88 %  2.53     2
unknown             1     50 %   n/a     2

most device time lost
run     lost hours  of  cost  largest loss  first finding
runs/c         0.5   1   n/a  eval          It died
runs/a        0.25   1  0.50  input_wait    It waits

ended early
cause                 runs  {"what":<{len(DIED)}}  for example
ended_without_record     2  {DIED}  runs/c, runs/d
"""
    )


RUNS = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from(PHASES), st.floats(0.1, 5000.0), min_size=1),
        st.integers(0, 3),
        st.integers(1, 4),
        st.floats(0.0, 9.0),
        st.integers(0, 400),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=10, deadline=None)
@given(runs=RUNS)
def test_sums_equal_those_of_single_runs(
    tmp_path_factory: pytest.TempPathFactory, runs: list[tuple[dict[str, float], int, int, float, int]]
) -> None:
    folder = tmp_path_factory.mktemp("runs")
    for number, (phases, windows, devices, price, day) in enumerate(runs):
        write_run(folder / ("deep/" * number) / str(number), phases=phases, windows=windows, devices=devices,
                  start_t=START_T + day * 86400, settings=f"[run]\nprice_per_device_hour = {price}\n")  # fmt: skip
    explanations = [explain_run(path.parent) for path in folder.rglob(EVENTS)]
    summary = summarize_runs(folder)
    assert summary.runs == len(explanations) == len(runs)
    device_s = sum(explanation.device_s for explanation in explanations)
    for rows in (summary.months, summary.hosts, summary.phases):
        assert sum(row.device_s for row in rows) == pytest.approx(device_s)
    for row in summary.phases:
        expected = [
            item.device_s for explanation in explanations for item in explanation.phases if item.phase == row.name
        ]
        assert row.device_s == pytest.approx(sum(expected))
        assert row.runs == len(expected)
    for row in summary.findings:
        expected = [
            item.lost_device_s or 0.0
            for explanation in explanations
            for item in explanation.findings
            if item.id == row.name
        ]
        assert (row.device_s, row.runs) == (pytest.approx(sum(expected)), len(expected))
    assert summary.cost.low == pytest.approx(
        sum(explanation.device_s * explanation.price_per_device_hour / 3600 for explanation in explanations)
    )
    assert sum(row.cost.low for row in summary.months) == pytest.approx(summary.cost.low)
    assert (summary.device_s, summary.measured_s) == (pytest.approx(device_s), pytest.approx(device_s))
    assert msgspec.json.decode(msgspec.json.encode(summary), type=RunsSummary) == summary


def test_only_the_worst_ten_are_kept_in_order(tmp_path: Path) -> None:
    for number in range(MAX_WORST_RUNS + 5):
        write_run(tmp_path / f"{number:02d}", phases={"compute": 1.0, "idle": 10.0 + number % 12})
    summary = summarize_runs(tmp_path)
    lost = [row.lost_s for row in summary.worst_runs]
    assert len(lost) == MAX_WORST_RUNS
    assert (
        lost
        == sorted(lost, reverse=True)
        == pytest.approx(sorted((20.0 + 2 * (n % 12) for n in range(15)), reverse=True)[:10])
    )


DAMAGE = {
    "binary.steps": (STEPS, b"\xff\x00\xfe" * 100 + b"\n"),
    "torn.steps": (STEPS, b'{"t": 1.0, "attempt": 1, "st'),
    "empty.events": (EVENTS, b""),
    "wrong.steps": (STEPS, b'{"t": 1.0}\n'),
    "settings": ("config.toml", b"[run\nprice_per_device_hour = "),
    "settings.wrong": ("config.toml", b'run = 3\ndata = "x"\n'),
    "price.wrong": ("config.toml", b"[run]\nprice_per_device_hour = []\n"),
    "environment": ("environment.json", b"{"),
    "environment.wrong": ("environment.json", b"[1, 2]"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_run_is_read_or_listed_and_never_hides_others(tmp_path: Path, how: str) -> None:
    write_run(tmp_path / "good")
    run = write_run(tmp_path / "hurt", phases={"compute": 1.0})
    name, content = DAMAGE[how]
    (run / name).write_bytes(content)
    summary = summarize_runs(tmp_path)
    assert summary.runs + summary.num_unreadable == 2
    assert summary.device_s in (2000.0, 2002.0)
    if summary.unreadable:
        assert summary.unreadable[0].run.endswith("hurt")
        assert summary.unreadable[0].error
        assert summary.device_s == 2000.0
    assert printed(summary)


def test_an_unreadable_folder_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """root can list everything, so the scandir of os.walk raises the error."""
    write_run(tmp_path / "good")
    (tmp_path / "shut").mkdir()
    real = summary_module.os.scandir

    def scandir(path: str) -> object:
        if str(path).endswith("shut"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(summary_module.os, "scandir", scandir)
    summary = summarize_runs(tmp_path)
    assert summary.runs == 1
    assert [item.run for item in summary.unreadable] == [str(tmp_path / "shut")]


def test_a_job_without_timing_from_inside_is_counted_separately(tmp_path: Path) -> None:
    """Its compute time is not known, so its time is neither lost nor productive."""
    write_run(tmp_path / "own", phases={"compute": 100.0})
    run = write_run(tmp_path / "watched", phases={"unattributed": 500.0}, end=None)
    folder = RunFolder(run, 1)
    folder.event("finished", "exit code 0", coverage={"output": "read"})
    folder.close()
    summary = summarize_runs(tmp_path)
    assert (summary.device_s, summary.measured_s, summary.compute_s) == (1200.0, 200.0, 200.0)
    assert summary.productive_fraction == 1.0
    assert [row.name for row in summary.phases] == ["compute"]
    assert [row.productive_fraction for row in (*summary.months, *summary.hosts)] == [1.0, 1.0]
    assert summary.worst_runs == []
    assert "more device-hours were not timed from inside" in printed(summary)


def test_reading_changes_no_file_and_reports_progress(tmp_path: Path) -> None:
    for name in ("a", "b/c"):
        write_run(tmp_path / name)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    counts: list[int] = []
    summarize_runs(tmp_path, on_progress=counts.append)
    assert counts == [1, 2]
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_subfolders_of_a_run_are_not_runs(tmp_path: Path) -> None:
    """They are the records of its other ranks, which its totals contain."""
    run = write_run(tmp_path / "run")
    (run / RANKS / "0001").mkdir(parents=True)
    (run / RANKS / "0001" / STEPS).write_bytes((run / STEPS).read_bytes())
    summary = summarize_runs(tmp_path)
    assert (summary.runs, summary.device_s) == (1, explain_run(run).device_s)
    assert sum(row.device_s for row in summary.months) == pytest.approx(summary.device_s)


def test_a_folder_that_is_a_run_and_one_without_runs(tmp_path: Path) -> None:
    assert summarize_runs(write_run(tmp_path / "run")).runs == 1
    (tmp_path / "empty" / "deep").mkdir(parents=True)
    for folder in ("empty", "nothing"):
        with pytest.raises(UsageError, match=folder):
            summarize_runs(tmp_path / folder)


def test_the_page_has_the_same_content_escaped(tmp_path: Path) -> None:
    evil = '<script>alert("1")</script>'
    write_run(tmp_path / "a", environment={**T4, "hostname": evil}, phases={"compute": 60.0, "input_wait": 40.0})
    write_run(tmp_path / "<b>", end=None)
    summary = summarize_runs(tmp_path)
    page = render_runs_summary(summary)
    assert evil not in page
    assert "&lt;script&gt;alert" in page
    assert "<b></td>" not in page
    assert "input_wait" in page
    for name in ("summary", "causes", "months", "hosts", "worst", "ends", "unread"):
        assert f'<section id="{name}"' in page
        assert f'<a href="#{name}">' in page
    assert "with a list price" in page
    path = write_runs_summary(summary)
    assert path == tmp_path / "runs-report.html"
    assert write_runs_summary(summary, tmp_path / "new" / "x.html").stat().st_size == pytest.approx(
        path.stat().st_size, abs=100
    )


def test_the_page_of_runs_without_time(tmp_path: Path) -> None:
    write_run(tmp_path / "a", windows=0, end=None)
    assert "No time is recorded." in render_runs_summary(
        summarize_runs(tmp_path)
    ) or "ended_without_record" in render_runs_summary(summarize_runs(tmp_path))


@pytest.mark.slow
@pytest.mark.skipif(browser.find() is None, reason="no Chromium on this machine")
def test_a_browser_shows_the_page_without_error_request_or_overflow(tmp_path: Path) -> None:
    for number in range(14):
        wait = 30.0 * number
        write_run(tmp_path / f"team-{number % 3}/a-run-with-quite-a-long-name-{number}", start_t=START_T + 9e5 * number,
                  phases={"compute": 600.0, "input_wait": wait, "eval": 20.0}, environment=T4,
                  end=None if number % 5 == 0 else "finished")  # fmt: skip
    path = write_runs_summary(summarize_runs(tmp_path), tmp_path / "page.html")
    with browser.browser() as tab:
        for width, dark in ((1280, False), (390, True)):
            tab.open(path, width=width, dark=dark, mobile=width < 600)
            assert tab.value("document.documentElement.scrollWidth") == width
        assert tab.errors == []
        assert {url for url in tab.requests if not url.startswith("data:")} == {path.as_uri()}
