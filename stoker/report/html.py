"""`stoker report RUN`: one HTML file per run, without network or server, and readable without JavaScript.

The data comes from `run_report.collect`; with `--all`, from `runs_summary.summarize_runs`; `stoker data stats --out`
makes a page in the same frame. The sections are in `page/`. The file contains plotly.js, which draws the charts. Its
content security policy forbids all requests."""

import json
import time
from collections.abc import Sequence
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.errors import needs_package, writing
from stoker.report.page import results, run_sections
from stoker.report.page import runs_summary as summary_page
from stoker.report.page.charts import Charts
from stoker.report.page.markup import Markup, code, join, tag
from stoker.report.run_report import RunReport, collect
from stoker.report.runs_summary import RunsSummary
from stoker.runs.records import REPORT
from stoker.storage.local_files import write_atomic
from stoker.storage.uri import expand_variables, is_uri, parse_uri

if TYPE_CHECKING:
    from stoker.data.validation.stats import DatasetStats

_POLICY = (
    "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'"
)
RUNS_REPORT = "runs-report.html"
SECTIONS = (
    ("summary", "Summary"),
    ("results", "Results"),
    ("images", "Images"),
    ("training", "Training"),
    ("time", "Time"),
    ("machine", "Machine"),
    ("data", "Warnings"),
    ("settings", "Settings"),
    ("environment", "Environment"),
    ("events", "Events"),
)
NATIVE_RUN_SECTIONS = frozenset({"results", "images", "settings"})
"""Sections for which external jobs have no records."""


def write_report(run: str | Path, out: Path | None = None, *, price_per_device_hour: float | None = None) -> Path:
    """Writes the page of a run to its folder or to `out`; returns its path. For a run in a bucket the default is
    NAME-report.html in the current folder: the bucket is only read.

    Raises UsageError if there is no such run, StorageError if the page cannot be written.
    """
    page = render(collect(run, price_per_device_hour))
    folder = expand_variables(str(run))
    default = Path(f"{parse_uri(folder).name}-{REPORT}") if is_uri(folder) else Path(folder) / REPORT
    return _write(page, out or default)


def write_runs_summary(runs_summary: RunsSummary, out: Path | None = None) -> Path:
    """Writes the page of many runs, `runs-report.html`, to their folder or to `out`; for a bucket, to the current
    folder.

    Raises StorageError if it cannot be written.
    """
    folder = expand_variables(runs_summary.folder)
    default = Path(RUNS_REPORT) if is_uri(folder) else Path(folder) / RUNS_REPORT
    return _write(render_runs_summary(runs_summary), out or default)


def write_dataset_stats(stats: "DatasetStats", out: Path) -> Path:
    """Writes the page of `stoker data stats`. Raises StorageError if it cannot be written."""
    from stoker.report.page import dataset  # NumPy, which a report of runs does not need

    charts = Charts()
    footer = _footer(stats.data, time.time(), f"stoker data stats {stats.data} --json")
    main = tag("main", dataset.main(stats, charts), footer)
    return _write(_document(stats.data, dataset.SECTIONS, main, charts), out)


def _write(page: str, path: Path) -> Path:
    with writing("The report cannot be written.", path, fix="choose another file with --out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, page.encode())
    return path


def render(report: RunReport) -> str:
    """The page. An external job has no sections for metrics, images and settings."""
    charts = Charts()
    sections = [(name, title) for name, title in SECTIONS if report.is_native_run or name not in NATIVE_RUN_SECTIONS]
    main = tag(
        "main",
        results.head(report),
        results.summary(report, run_sections.time_bar(report)),
        _missing(report.missing),
        [results.scores(report, charts), results.images(report)] if report.is_native_run else None,
        results.curves(report, charts),
        run_sections.times(report, charts),
        run_sections.machine(report, charts),
        run_sections.data(report),
        run_sections.settings(report) if report.is_native_run else None,
        run_sections.environment(report),
        run_sections.events(report),
        _footer(report.run, report.generated_t, f"stoker report {report.run} --json"),
    )
    return _document(report.run, sections, main, charts)


def render_runs_summary(runs_summary: RunsSummary) -> str:
    """The page of many runs."""
    charts = Charts()
    folder = runs_summary.folder
    footer = _footer(folder, time.time(), f"stoker why --all {folder} --json")
    main = tag("main", summary_page.main(runs_summary, charts), footer)
    return _document(folder, summary_page.SECTIONS, main, charts)


def _document(name: str, sections: Sequence[tuple[str, str]], main: Markup, charts: Charts) -> str:
    """A page with navigation, content and script. name: of what it is about; sections: id, title."""
    second_id, second_title = sections[1]
    title = tag("title", f"{name.rstrip('/').rpartition('/')[2]} · stoker report")
    skip = tag("a", f"Skip to {second_title.lower()}", href=f"#{second_id}", class_="skip")
    navigation = tag("nav", [tag("a", title, href=f"#{name}") for name, title in sections], aria_label="Sections")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
{title}
<style>
{_read_asset("style.css")}</style>
</head>
<body>
{join(skip, navigation, main)}
{script(charts)}
</body>
</html>
"""


def _missing(sentences: list[str]) -> Markup | None:
    if not sentences:
        return None
    items = tag("ul", [tag("li", sentence) for sentence in sentences])
    return tag("aside", tag("b", "Missing in this report"), items, class_="missing")


def _footer(source: str, generated_t: float, json_command: str) -> Markup:
    generated_at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(generated_t))
    made_by = f"Generated by stoker {metadata.version('stoker')} at {generated_at} from "
    return tag("footer", made_by, code(source), ". As JSON: ", code(json_command), ".")


def script(charts: Charts) -> str:
    """The data of the charts, plotly and the script that draws them; empty without charts."""
    if not charts.data:
        return ""
    with needs_package("plotly", "The HTML report"):
        from plotly.offline import get_plotlyjs

    # without < no text can end the script element; a test checks that plotly contains no </script
    data = json.dumps(charts.data, separators=(",", ":"), allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")
    noscript = tag("noscript", tag("p", "The charts need JavaScript; everything else does not.", class_="missing"))
    return f"""{noscript}
<script type="application/json" id="charts">{data}</script>
<script>{get_plotlyjs()}</script>
<script>
{_read_asset("page.js")}</script>"""


def _read_asset(name: str) -> str:
    return (resources.files("stoker.report.page") / name).read_text(encoding="utf-8")
