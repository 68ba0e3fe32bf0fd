"""`stoker report RUN`: one HTML file per run, without network or server, and readable without JavaScript.

The data comes from `run_report.collect`; with `--all`, from `runs_summary.summarize_runs`; other pages are made in
the same frame (`render_template`). The pages are templates in `page/`; here are the rows of their tables. plotly.js is
in the file; its content security policy forbids all requests."""

import functools
import os
import shlex
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jinja2

from stoker_watch.errors import writing
from stoker_watch.report import explain
from stoker_watch.report import format as fmt
from stoker_watch.report.page import charts as draw
from stoker_watch.report.page.icicle import icicle, place_rows
from stoker_watch.report.page.images import render_image
from stoker_watch.report.page.markup import Child, Markup, bar, clean, join, tag
from stoker_watch.report.run_report import RunReport, collect, sum_error_types
from stoker_watch.report.runs_summary import RunsSummary, make_tables, summary_rows
from stoker_watch.report.sizing import flatten, gpu_names
from stoker_watch.runs.evaluation import COCO_SUMMARY, COCO_TITLES, Evaluation, Thumbnail, read_thumbnails
from stoker_watch.runs.records import PHASES, REPORT
from stoker_watch.secrets import mask_argv
from stoker_watch.storage.local_files import write_atomic
from stoker_watch.storage.uri import expand_variables, is_uri, parse_uri

PAGE = Path(__file__).parent / "page"
RUNS_REPORT = "runs-report.html"
MAX_CLASS_ROWS = 100
"""Classes in a table, the most frequent first; the JSON has all."""


def write_report(run: str | Path, out: Path | None = None, *, price_per_device_hour: float | None = None) -> Path:
    """Writes the page of a run to its folder (for a bucket: to NAME-report.html in the current folder) or to `out`;
    returns its path. Raises UsageError if there is no such run, StorageError if the page cannot be written."""
    path = explain.open_records(run)
    report = collect(path, price_per_device_hour)
    page = render(report, {} if report.evaluation is None else read_thumbnails(path, report.evaluation.step))
    folder = expand_variables(str(run))
    default = Path(f"{parse_uri(folder).name}-{REPORT}") if is_uri(folder) else Path(folder) / REPORT
    return write_page(page, out or default, private=True)


def write_runs_summary(runs_summary: RunsSummary, out: Path | None = None) -> Path:
    """Writes the page of many runs, `runs-report.html`, to their folder or to `out`; for a bucket, to the current
    folder. Raises StorageError if it cannot be written."""
    folder = expand_variables(runs_summary.folder)
    default = Path(RUNS_REPORT) if is_uri(folder) else Path(folder) / RUNS_REPORT
    return write_page(render_runs_summary(runs_summary), out or default, private=True)


def write_page(page: str, path: Path, *, private: bool = False, flag: str = "--out") -> Path:
    """private: only the user may read it, as the records that it is made of: it quotes commands and output of jobs.
    flag: of the command, which names the file."""
    with writing("The page cannot be written.", path, fix=f"choose another file with {flag}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, page.encode(), private=private)
    return path


def render(report: RunReport, thumbnails: Mapping[int, Thumbnail] | None = None) -> str:
    """The page. An external job has no sections for metrics, images and settings. thumbnails: of `evaluation`."""
    argv = report.environment.get("argv")
    return render_template(
        PAGE / "run.html",
        report.run,
        f"stoker report {shlex.quote(report.run)} --json",
        report=report,
        thumbnails=thumbnails or {},
        run_name=report.run.rstrip("/").rpartition("/")[2],
        gpu_names=gpu_names(report.environment),
        gpus=draw.gpus(report),
        warnings=report.warnings,
        argv=shlex.join(mask_argv(map(str, argv))) if isinstance(argv, list) else "",
        started_at=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(report.start_t or 0.0)),
    )


def render_runs_summary(runs_summary: RunsSummary) -> str:
    folder = runs_summary.folder
    values = {"summary": runs_summary, "tables": make_tables(runs_summary), "totals": list(summary_rows(runs_summary))}
    return render_template(PAGE / "runs.html", folder, f"stoker why --all {shlex.quote(folder)} --json", **values)


def render_template(template: Path, source: str, json_command: str, **values: Any) -> str:
    """template: a file that extends `page/page.html`. source: what the page is about."""
    common = {
        "charts": draw.Charts(),
        "source": source,
        "json_command": json_command,
        "version": metadata.version("stoker-watch"),
        "generated_at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }
    return _templates(template.parent).get_template(template.name).render(common | values)


@functools.cache
def _templates(folder: Path) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, PAGE]),
        autoescape=True,
        finalize=clean,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    functions = (
        bar, confusion_rows, flatten, icicle, join, ledger_order, phase_color, place_rows, render_image, next_commands,
        sum_error_types, tag, explain.probe_rows,
    )  # fmt: skip
    environment.globals |= {function.__name__: function for function in functions}
    environment.globals |= {
        "asset": _read_asset,
        "plotly": _plotly,
        "fmt": fmt,
        "draw": draw,
        "coco_metrics": list(zip(COCO_TITLES, COCO_SUMMARY, strict=True)),
        "error_type_advice": explain.ERROR_TYPE_ADVICE,
        "probe_heads": explain.PROBE_HEADS,
        "max_class_rows": MAX_CLASS_ROWS,
    }
    return environment


def _read_asset(name: str) -> Markup:
    return Markup((PAGE / name).read_text(encoding="utf-8"))


def _plotly() -> Markup:
    """A test checks that plotly contains no </script. The build of the package puts it there (`hatch_build.py`)."""
    return _read_asset("plotly.min.js")


def phase_color(phase: str) -> str:
    return explain.PHASE_COLORS.get(phase, "var(--c8)")


def ledger_order(rows: list[explain.PhaseTime]) -> list[explain.PhaseTime]:
    return sorted(rows, key=lambda row: PHASES.index(row.phase) if row.phase in PHASES else len(PHASES))


def confusion_rows(evaluation: Evaluation) -> tuple[list[str], list[list[Child]]]:
    """Names of the columns, and the rows; the darker a cell, the larger its fraction of the row."""
    matrix, classes = evaluation.confusion_matrix, [row.name for row in evaluation.classes]
    names = [*(classes[label] for label in matrix.labels), "other classes", "background"]
    shown = [n for n in range(len(names)) if len(matrix.labels) < len(classes) or names[n] != "other classes"]
    rows: list[list[Child]] = []
    for i in shown:
        cells: list[Child] = []
        for j in shown:
            count, color = matrix.counts[i][j], "var(--c1)" if i == j else "var(--c3)"
            share = 60 * count / max(1, sum(matrix.counts[i]))
            style = f"background:color-mix(in srgb, {color} {share:.0f}%, transparent)"
            cells.append("" if i == j == len(names) - 1 else tag("span", fmt.count(count), class_="cell", style=style))
        rows.append([names[i], *cells])
    return [names[n] for n in shown], rows


def next_commands(report: RunReport) -> dict[str, str]:
    """Purpose → command with the run's own paths, for a POSIX shell."""
    run = shlex.quote(report.run if is_uri(report.run) else os.path.abspath(expand_variables(report.run)))
    images = [*report.evaluation.worst, *report.evaluation.best] if report.evaluation else []
    image = next((shlex.quote(image.path) for image in images if os.path.isfile(image.path)), "IMAGES")
    return {
        "Detect objects in images:": f"stoker predict {run} {image}",
        "Write a file that needs no stoker:": f"stoker export {run}",
        "Evaluate again, or on another data set:": f"stoker eval {run}",
    }
