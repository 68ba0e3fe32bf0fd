"""The data of events are typed where an event is read or made, and nothing reads a key that has no type."""

import ast
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from stoker.config.settings import from_toml
from stoker.launching.elastic import read_batch
from stoker.training.checkpoint import read_rollbacks
from stoker.training.state import BatchSizes, read_initial_ranks, read_sizes
from stoker_watch.diagnosis.termination import read_output
from stoker_watch.errors import StokerError
from stoker_watch.report.explain import explain_run
from stoker_watch.report.html import write_report
from stoker_watch.report.run_report import collect, read_settings_rows
from stoker_watch.report.runs_summary import summarize_runs
from stoker_watch.runs import schemas
from stoker_watch.runs.records import CONFIG, EVENTS, STACKS
from tests import sources
from tests.bounded import bounded
from tests.watch.report.runs import START_T, write_run

ROOT = Path(__file__).parents[3]
HOSTILE = ["text", [1], {"a": 1}, None, -1, 0.5, -(10**30), 10**30, 10**400, True, [[]], {"ap": "x"}, [{"kind": 3}]]
KINDS = {
    "started": ["output_offset", "output_head", "coverage", "job", "ranks", "price_per_device_hour"],
    "resumed": ["output_offset", "coverage", "job", "settings", "measured"],
    "info": ["facts", "coverage", "workers", "kernels"],
    "warning": ["not_finite", "empty_inputs", "storage", "alert_delivery"],
    "evaluated": ["metrics"],
    "checkpoint_saved": ["write_s"],
    "rolled_back": ["rollback_step", "count", "best_ap", "lr"],
    "loss_spike": ["suggested_lr"],
    "out_of_memory": ["micro_batch_size", "eval_batch_size"],
    "gpu_fault": ["gpu", "xid"],
    "failed": ["exit_code", "traceback", "kernel", "pids", "oom_kills", "empty_inputs", "handled_error"],
    "finished": ["exit_code", "handled_error"],
}
"""Kind of an event → keys of its data that something reads, from docs/run-folder.md."""


def run_with(path: Path, kind: str, data: dict[str, Any]) -> Path:
    run = write_run(path, end=None, samples=3)
    (run / "output.log").write_text("epoch 1\nValueError: no\n")
    event = {"t": START_T + 900, "attempt": 2, "kind": kind, "step": 100, "text": "it", "data": data}
    with (run / EVENTS).open("a") as file:
        file.write(json.dumps(event) + "\n")
    return run


def keys_read(source: str) -> Iterator[str]:
    """Constant keys in `x.data["key"]`, `x.data.get("key")` and `"key" in x.data`, also where `x.data` has a name."""
    nodes = list(ast.walk(ast.parse(source)))
    names: set[str] = set()

    def is_data(node: ast.expr | None) -> bool:
        if isinstance(node, ast.IfExp):
            return is_data(node.body) or is_data(node.orelse)
        return (isinstance(node, ast.Attribute) and node.attr == "data") or (
            isinstance(node, ast.Name) and node.id in names
        )

    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign) and is_data(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    for node in nodes:
        found: ast.expr | None = None
        if isinstance(node, ast.Subscript) and is_data(node.value):
            found = node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            found = node.args[0] if is_data(node.func.value) else None
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            found = node.left if is_data(node.comparators[0]) else None
        if isinstance(found, ast.Constant) and isinstance(found.value, str):
            yield found.value


def test_each_key_that_is_read_has_a_type() -> None:
    source = 'e.data["a"]; e.data.get("b", 1); "c" in x.e.data; d = {} if e is None else e.data; d["e"]; data.get("f")'
    assert set(keys_read(source)) == {"a", "b", "c", "e"}
    read = {key for _, path in sources.python_files() for key in keys_read(path.read_text())}
    assert len(read) > 20
    assert sorted(read - schemas.EventData.__annotations__.keys()) == []


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: str(value)[:20])
def test_any_value_of_any_key_leaves_a_run_that_is_explained(tmp_path: Path, value: object) -> None:
    write_run(tmp_path / "good")
    for kind, keys in KINDS.items():
        for key in keys:
            run_with(tmp_path / f"{kind}-{key}", kind, {key: value})
    runs = sorted(path for path in tmp_path.iterdir() if path.name != "good")
    with bounded(seconds=60, megabytes=512):
        for run in runs:
            explanation = explain_run(run)
            damaged = json.dumps(explanation.last_event.data if explanation.last_event else {})
            named = [note.title + str(note.evidence) for note in explanation.notes if note.id == "damaged_events"]
            assert ("damaged" in damaged) == bool(named), run.name
            assert all("line 2" in text for text in named), run.name
            read_sizes(run, BatchSizes(8, 8))
            read_initial_ranks(run)
            read_rollbacks(run)
        summary = summarize_runs(tmp_path)
    assert (summary.runs, summary.num_unreadable) == (1 + len(runs), 0)


@pytest.mark.parametrize(
    "value", [*HOSTILE, "9" * 400, [10**400, 1], {"a": {"b": [1]}}], ids=lambda value: str(value)[:20]
)
def test_any_value_of_any_setting_leaves_a_run_that_is_explained_or_damaged(tmp_path: Path, value: object) -> None:
    """In the event `resumed`, whose line is then named, and in config.toml, which is an error that names it."""
    runs = [run_with(tmp_path / f"event-{key}", "resumed", {"settings": {key: value}}) for key in SETTINGS]
    for run in runs:
        (run / CONFIG).write_text('[data]\ndata = "coco"\n[reasons]\nimage_size = "why"\nworkers = "why"\n')
    tables = [
        {"run": value},
        {"reasons": value},
        {"reasons": {"lr": value}},
        *({"run": {key: value}} for key in SETTINGS),
    ]
    for number, table in enumerate(tables if value is not None else []):
        runs.append(run_with(tmp_path / f"config-{number}", "resumed", {}))
        (runs[-1] / CONFIG).write_text(tomli_w.dumps(table))
    with bounded(seconds=60, megabytes=512):
        for run in runs:
            errors = []
            for read in (explain_run, read_settings_rows, read_batch, lambda run: from_toml(run / CONFIG)):
                try:
                    read(run)
                except StokerError as error:
                    errors.append(str(error))
            assert all(CONFIG in error for error in errors), run.name
            if not errors:
                collect(run)
        summary = summarize_runs(tmp_path)
    assert all(CONFIG in run.error and "damaged" in run.error for run in summary.unreadable)


SETTINGS = list(schemas.SettingsData.__annotations__)


def test_each_setting_that_is_read_has_a_type() -> None:
    files = [path for part in ("diagnosis", "report") for path in (sources.PACKAGES[0] / part).rglob("*.py")]
    read = {key for path in files for key in re.findall(r"settings\.get\(\s*\"(\w+)\"", path.read_text())}
    assert len(read) > 10
    assert sorted(read - set(SETTINGS)) == []


def test_a_report_of_a_run_with_damaged_events(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", "evaluated", {"metrics": ["ap"], "coverage": 5})
    write_report(str(run))
    assert "are not what stoker writes" in (run / "report.html").read_text()


@pytest.mark.parametrize("offset", [-1, -(10**30), 10**15, "text", [1]])
def test_a_sparse_log_is_read_within_bounds_whatever_the_offset_says(tmp_path: Path, offset: object) -> None:
    run = run_with(tmp_path / "run", "started", {"output_offset": offset, "coverage": {"inside the job": "not"}})
    with (run / "output.log").open("ab") as file:
        os.truncate(file.fileno(), 3 << 30)
    with bounded(seconds=60, megabytes=64):
        explain_run(run)


def test_lines_of_a_sparse_log_are_counted_without_reading_its_holes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_bytes = 0

    class Counted(io.BufferedReader):
        def read(self, size: int | None = -1) -> bytes:
            nonlocal read_bytes
            found = super().read(size)
            read_bytes += len(found)
            return found

    monkeypatch.setattr(
        "stoker_watch.diagnosis.termination.regular_files.open_file", lambda path: Counted(io.FileIO(path))
    )
    log = tmp_path / "output.log"
    with log.open("wb") as file:
        file.write(b"one\ntwo\n")
        file.seek(1 << 40)
        file.write(b"\nthree\nfour\n")
    lines = [(line.text, line.source) for line in read_output(log)]
    assert lines[-3:] == [("three", "output.log:4"), ("four", "output.log:5"), ("", "output.log:6")]
    os.truncate(log, 1 << 42)
    assert [line.source for line in read_output(log)] == ["output.log:7"]  # what follows the hole
    assert read_bytes < 64 << 20


def test_a_run_that_cannot_be_read_is_a_row_and_the_others_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "good")
    bad = write_run(tmp_path / "bad")
    line = {"t": START_T, "attempt": 1, "pid": 1, "wall_s": 1.0, "samples": 9, "role": "nobody"}
    (bad / STACKS).write_text(json.dumps(line) + "\n")
    summary = summarize_runs(tmp_path)
    assert summary.runs == 1
    assert "role" in summary.unreadable[0].error

    def explain(run: str, *_: object, **__: object) -> object:
        if run.endswith("bad"):
            raise OverflowError("too large")
        return explain_run(run)

    monkeypatch.setattr("stoker_watch.report.runs_summary.explain_run", explain)
    summary = summarize_runs(tmp_path)
    assert summary.runs == 1
    assert [row.error for row in summary.unreadable] == ["OverflowError: too large"]


def test_events_of_each_kind_keep_what_is_right() -> None:
    data = {"output_offset": 5, "output_head": 7, "coverage": {"a": "b"}, "of_a_later_version": [1]}
    assert schemas.Event(t=1.0, attempt=1, kind="started", data=data).data == data
