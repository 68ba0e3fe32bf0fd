"""`stoker report RUN`: a run as one HTML file, which needs no network, no server and, for its numbers, no script.

The numbers are `facts.collect`'s, which are those of `stoker why`; with `--all`, `fleet.survey`'s. The parts are in
`page/`; the charts are drawn by plotly.js, which lies in the file. A content security policy inside forbids the page
every request: browsers enforce it."""

import json
import time
from collections.abc import Iterable
from importlib import metadata, resources
from pathlib import Path

import msgspec

from stoker.errors import writing
from stoker.report.page import results, run_sections
from stoker.report.page import runs_summary as fleet_page
from stoker.report.page.charts import Charts
from stoker.report.page.markup import Child, Markup, code, join, tag
from stoker.report.run_report import RunReport, collect
from stoker.report.runs_summary import RunsSummary
from stoker.runs.records import REPORT
from stoker.storage.local_files import write_atomic
from stoker.storage.uri import expand_variables, is_uri, parse_uri

_POLICY = (
    "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'"
)
RUNS_REPORT = "runs-report.html"
SECTIONS = (
    ("summary", "Summary"),
    ("results", "Results"),
    ("pictures", "Pictures"),
    ("training", "Training"),
    ("time", "Time"),
    ("machine", "Machine"),
    ("data", "Warnings"),
    ("settings", "Settings"),
    ("environment", "Environment"),
    ("events", "Events"),
)
NATIVE_RUN_SECTIONS = frozenset({"results", "pictures", "settings"})
"""Sections of which jobs of others record nothing."""


def write_report(run: str | Path, out: Path | None = None, *, price_per_device_hour: float | None = None) -> Path:
    """Writes the page of a run, live or not, into its folder or to `out`; returns where it is. That of a run in a
    bucket is NAME-report.html in the current folder: whoever looks at a run changes nothing there.

    Raises UsageError when there is no such run, StorageError when the page cannot be written.
    """
    page = render(collect(run, price_per_device_hour))
    path = out or _default_path(str(run))
    with writing("The report cannot be written.", path, fix="name another file: --out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, page.encode())
    return path


def write_runs_summary(runs_summary: RunsSummary, out: Path | None = None) -> Path:
    """Writes the page of many runs into their folder, `runs-report.html`, or to `out`; of a bucket into the current
    folder. Raises StorageError when it cannot be written."""
    folder = expand_variables(runs_summary.folder)
    path = out or (Path(RUNS_REPORT) if is_uri(folder) else Path(folder) / RUNS_REPORT)
    with writing("The report cannot be written.", path, fix="name another file: --out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, render_runs_summary(runs_summary).encode())
    return path


def _default_path(run: str) -> Path:
    run = expand_variables(run)
    return Path(f"{parse_uri(run).name}-{REPORT}") if is_uri(run) else Path(run) / REPORT


def report_as_json(report: RunReport) -> str:
    """The same facts as one JSON document; the schema is `facts.Report`."""
    return msgspec.json.encode(report).decode()


def render(report: RunReport) -> str:
    """The page. That of a job of others has no scores, pictures and settings, as nothing of them is recorded."""
    charts = Charts()
    time_bar = run_sections.time_bar(report)
    sections = [(name, title) for name, title in SECTIONS if report.is_native_run or name not in NATIVE_RUN_SECTIONS]
    body = join(
        tag("a", f"Skip to {sections[1][1].lower()}", href=f"#{sections[1][0]}", class_="skip"),
        _navigation(sections),
        tag(
            "main",
            results.head(report),
            results.summary(report, time_bar),
            _missing(report.missing),
            [results.scores(report, charts), results.images(report)] if report.is_native_run else None,
            results.curves(report, charts),
            run_sections.times(report, charts),
            run_sections.machine(report, charts),
            run_sections.data(report),
            run_sections.settings(report) if report.is_native_run else None,
            run_sections.environment(report),
            run_sections.events(report),
            _footer(report),
        ),
    )
    return document(report.run, body, charts)


def render_runs_summary(runs_summary: RunsSummary) -> str:
    """The page of many runs."""
    charts = Charts()
    json_command = code(f"stoker why --all {runs_summary.folder} --json")
    generated_at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    footer = tag(
        "footer",
        f"Made by stoker {metadata.version('stoker')} at {generated_at}. The same as data: ",
        json_command,
        ".",
    )
    body = join(
        tag("a", "Skip to the causes", href="#causes", class_="skip"),
        _navigation(fleet_page.SECTIONS),
        tag("main", fleet_page.main(runs_summary, charts), footer),
    )
    return document(runs_summary.folder, body, charts)


def document(name: str, body: Markup, charts: Charts) -> str:
    """A page around its body. name: of the run or the folder."""
    title = tag("title", f"{name.rstrip('/').rpartition('/')[2]} · stoker report")
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            title,
            f"<style>\n{_read_asset('style.css')}</style>",
            "</head>",
            f"<body>\n{body}",
            script(charts),
            "</body>",
            "</html>",
            "",
        )
    )


def _navigation(sections: Iterable[tuple[str, str]]) -> Markup:
    links: list[Child] = [tag("a", title, href=f"#{name}") for name, title in sections]
    return tag("nav", links, aria_label="Sections")


def _missing(sentences: list[str]) -> Markup | None:
    if not sentences:
        return None
    return tag(
        "aside",
        tag("b", "What this page lacks"),
        tag("ul", [tag("li", sentence) for sentence in sentences]),
        class_="missing",
    )


def _footer(report: RunReport) -> Markup:
    generated_at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(report.generated_t))
    return tag(
        "footer",
        f"Made by stoker {report.stoker_version} at {generated_at} from ",
        code(report.run),
        ". The same as data: ",
        code(f"stoker report {report.run} --json"),
        ".",
    )


def script(charts: Charts) -> str:
    """The charts' data, plotly and the script that draws them; nothing where there is no chart."""
    if not charts.data:
        return ""
    from plotly.offline import get_plotlyjs

    # < ends no script element early, whatever a class is called; plotly's own text has no such end (a test looks)
    data = json.dumps(charts.data, separators=(",", ":"), allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")
    noscript = tag(
        "noscript", tag("p", "The charts need JavaScript; all other numbers and pictures do not.", class_="missing")
    )
    return "\n".join(
        (
            noscript,
            f'<script type="application/json" id="charts">{data}</script>',
            f"<script>{get_plotlyjs()}</script>",
            f"<script>\n{_read_asset('page.js')}</script>",
        )
    )


def _read_asset(name: str) -> str:
    return (resources.files("stoker.report.page") / name).read_text(encoding="utf-8")
