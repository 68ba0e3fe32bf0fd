"""The catalog as data: complete, with sources, and the page that is generated from it."""

import ast
import functools
import re
from pathlib import Path

import msgspec
import pytest

from scripts.write_causes import render_page
from stoker.config.settings import SECTION_OF
from stoker.preflight.catalog import rows as check_rows
from stoker_watch.cli.app import app
from stoker_watch.diagnosis import causes
from stoker_watch.diagnosis.causes.cause import COMMON_THRESHOLDS, REASONS, Cause, Threshold
from stoker_watch.diagnosis.causes.gpu import find_xid
from stoker_watch.diagnosis.endings import Ending, endings
from stoker_watch.diagnosis.engine import CATALOG, RULES, catalog_hash
from stoker_watch.diagnosis.notes import NOTES
from stoker_watch.diagnosis.reference import all_entries, explain_id
from stoker_watch.errors import UsageError
from stoker_watch.knowledge import read_toml
from stoker_watch.report import sizing
from stoker_watch.runs.schemas import PROBE_KINDS

NATIVE_ONLY = {"anchors_miss_boxes", "bad_images"}
"""Causes that rest on what only `stoker train` records."""
STOKER = Path(causes.__file__).parents[2]
MAKERS = {"make_finding", "ok", "unknown", "change", "_advice", "_note", "_make_finding", "_refused"}
"""Functions whose first argument is the id of a finding."""
CAUSES_FOLDER = Path(causes.__file__).parent


def test_every_reason_has_a_cause_or_a_failure() -> None:
    assert set(REASONS) == {row.reason for row in (*CATALOG.values(), *endings().values())}
    assert set(REASONS[:7]) <= {cause.reason for cause in CATALOG.values()}


def test_every_cause_is_listed_once_with_the_rule_of_its_name() -> None:
    assert len(CATALOG) == len(RULES)
    assert not CATALOG.keys() & (endings().keys() | {kind.id for kind, _ in NOTES})
    assert read_toml("causes.toml").keys() - {"common_thresholds"} == CATALOG.keys()


def test_the_page_has_all_of_them() -> None:
    page = render_page()
    for entry in all_entries():
        assert f"### `{entry.id}`: {entry.title}" in page
    assert len({(entry.id, entry.section) for entry in all_entries()}) == len(all_entries())


def test_the_settings_that_fix_a_cause_are_explained() -> None:
    (entry,) = explain_id("slow_storage")
    assert dict(entry.rows)["settings"] == 'cache = "disk"'


def test_an_id_is_explained_with_its_threshold_source_and_fix(capsys: pytest.CaptureFixture[str]) -> None:
    app(["why", "--explain", "input_bound"], result_action="return_value")
    printed = capsys.readouterr().out
    for text in ("The training waits for its input", "critical from 0.2", "TensorFlow Profiler", "--cache disk"):
        assert text in printed
    with pytest.raises(UsageError, match="input_bound"):
        explain_id("input_bounds")
    for id in ("disk_full", "no_telemetry", "zero-size", "no_gpu", "more_cores", "more_devices", "run_failed"):
        (entry,) = explain_id(id)
        assert entry.title
        assert entry.rows


def test_every_id_of_every_command_is_explained() -> None:
    """Ids that are written in calls which make findings."""
    known = {entry.id for entry in all_entries()}
    ids = {rule.__name__ for rule in sizing.RULES}
    ids |= {name.partition("/")[0] for name in check_rows()}
    for file in STOKER.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            ids |= {str(keyword.value.value) for keyword in node.keywords if keyword.arg == "id"
                    and name in ("Finding", "make_finding") and isinstance(keyword.value, ast.Constant)}  # fmt: skip
            if name in MAKERS and node.args and isinstance(node.args[0], ast.Constant) and len(node.args) > 1:
                ids.add(str(node.args[0].value))
    ids -= {id for id in ids if not re.fullmatch(r"[a-z][a-z_0-9]+", id)}
    assert ids - known == set()
    assert len(ids) >= 120


@pytest.mark.parametrize("cause", CATALOG.values(), ids=lambda cause: cause.id)
def test_a_row_is_complete(cause: Cause) -> None:
    assert all((cause.source, cause.metric, cause.fix, cause.required_records, cause.symptom, cause.title))
    thresholds = [
        value
        for value in (cause.info_threshold, cause.warning_threshold, cause.critical_threshold)
        if value is not None
    ]
    assert thresholds
    assert thresholds == sorted(set(thresholds), reverse=cause.lower_is_worse)
    assert set(cause.supersedes) <= set(CATALOG) - {cause.id}
    assert all(threshold.description for threshold in cause.thresholds.values())
    assert not cause.probe or cause.probe in PROBE_KINDS
    assert set(cause.config_patch) <= set(SECTION_OF)
    assert 0 < cause.confidence < 1


@functools.cache
def _flags_of_train() -> set[str]:
    """All flags of `stoker train`, as its parser has them."""
    arguments = app["train"].assemble_argument_collection(default_parameter=app.default_parameter)
    return {name for argument in arguments for name in argument.names if name.startswith("--")}


OF_OTHER_PROGRAMS = {"--cpus", "--ipc", "--shm-size", "--gpus", "--nproc-per-node", "--pid"}
"""Flags of docker, torchrun and py-spy."""


@pytest.mark.parametrize("cause", CATALOG.values(), ids=lambda cause: cause.id)
def test_flags_exist(cause: Cause) -> None:
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", f"{cause.fix} {cause.command}"))
    assert flags <= _flags_of_train() | OF_OTHER_PROGRAMS


@pytest.mark.parametrize("cause", CATALOG.values(), ids=lambda cause: cause.id)
def test_a_command_of_flags_is_parsed(cause: Cause) -> None:
    if cause.command is None or not cause.command.startswith("--"):
        return
    words = cause.command.split()
    app.parse_args(["train", "demo", *words, *PLACEHOLDERS.get(words[-1], [])], print_error=False, exit_on_error=False)


PLACEHOLDERS = {
    "--anchor-sizes": ["32", "64", "128"], "--lr": ["0.01"], "--eval-every": ["2ep"], "--workers": ["4"],
    "--run-dir": ["runs/x"],
}  # fmt: skip
"""What the user writes behind a flag whose value the rule does not know."""


def test_commands_that_rules_choose_are_flags_that_exist() -> None:
    """A rule may have another command than its row."""
    chosen = set()
    for file in CAUSES_FOLDER.glob("*.py"):
        chosen |= set(re.findall(r'command"?(?:=|: )"(--[a-z-]+)', file.read_text()))
    assert chosen <= _flags_of_train()
    assert "--run-dir" in chosen


@pytest.mark.parametrize("cause", CATALOG.values(), ids=lambda cause: cause.id)
def test_external_jobs_get_no_flags(cause: Cause) -> None:
    if cause.required_records[0].startswith("config.toml") or cause.id in NATIVE_ONLY:
        assert not cause.external_fix
        return
    text = cause.external_fix or cause.fix
    assert not set(re.findall(r"--[a-z][a-z-]*", text)) & _flags_of_train()
    assert "STOKER_" not in text


@pytest.mark.parametrize("ending", endings().values(), ids=lambda ending: ending.id)
def test_endings_name_no_flag_of_stoker_and_promise_no_checkpoint(ending: Ending) -> None:
    """They are those of any job: `--nproc-per-node` and others are of torchrun, docker and Slurm."""
    assert not set(re.findall(r"--[a-z][a-z-]*", ending.fix)) & _flags_of_train() - {"--help"}
    assert set(re.findall(r"`stoker ([a-z]+)", ending.fix)) <= {"watch", "why", "report", "check", "data"}
    assert "continues from" not in ending.fix


def test_no_two_causes_supersede_each_other() -> None:
    for cause in CATALOG.values():
        assert all(cause.id not in CATALOG[other].supersedes for other in cause.supersedes), cause.id


def test_a_threshold_decides_the_severity() -> None:
    cause = msgspec.structs.replace(CATALOG["input_bound"], info_threshold=0.01)
    assert [cause.severity(fraction) for fraction in (0.0, 0.01, 0.05, 0.2)] == [None, "info", "warning", "critical"]
    disk = CATALOG["disk_nearly_full"]
    assert [disk.severity(free) for free in (2.0**32, 2.0**30, 0.0)] == [None, "warning", "critical"]


def test_the_hash_changes_with_any_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    first = catalog_hash()
    assert first == catalog_hash()
    assert len(first) == 12
    changed = msgspec.structs.replace(CATALOG["input_bound"], warning_threshold=0.06)
    with monkeypatch.context() as patched:
        patched.setitem(CATALOG, "input_bound", changed)
        assert catalog_hash() != first
    monkeypatch.setitem(COMMON_THRESHOLDS, "steady_s", Threshold(6.0, "x"))
    assert catalog_hash() != first


def test_all_thresholds_are_in_the_rows() -> None:
    """A rule compares with thresholds of its row; its own numbers are 0, 1, and counts of a few."""
    files = sorted(set(CAUSES_FOLDER.glob("*.py")) - {CAUSES_FOLDER / "shared.py"})  # which formats numbers
    assert len(files) >= 7
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Compare):
                numbers = [
                    n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and type(n.value) in (int, float)
                ]
                assert set(numbers) <= {0, 1, 2}, f"{file.name}:{node.lineno}: {numbers}"


def test_xids_have_a_meaning_and_a_fix() -> None:
    common = {find_xid(number).meaning for number in (13, 31, 43, 48, 74, 79, 94, 95)}
    assert len(common) == 8
    assert find_xid(99999).meaning not in common
    assert all(find_xid(int(number)).fix for number in read_toml("xids.toml") if number != "unknown")


def test_the_severity_that_an_id_is_explained_with_is_that_of_its_findings() -> None:
    """Of `stoker check`: those of its rows, and others only where a probe chooses the severity."""
    of_rows: dict[str, set[str]] = {}
    for name, row in check_rows().items():
        of_rows.setdefault(name.partition("/")[0], set()).add(row.severity)
    chosen = {
        "driver_old",
        "gpu_in_use",
        "bundled_cuda_not_found",
        "framework_replaced",
        "numpy_too_new",
        "cuda_mismatch",
        "source_unreadable",
        "tensorflow_no_gpu",
        "variable_json",
        "variable_credentials",
        "variable_uri",
        "variable_input",
        "variable_output",
        "disk",
        "clock",
        "rank_interface",
    }
    for id, severities in of_rows.items():
        texts = {dict(entry.rows)["severity"] for entry in explain_id(id) if "`stoker check`" in entry.section}
        assert texts, id
        for text in texts:
            told = set(re.findall("blocker|critical|warning|info|unknown|ok", text))
            assert severities - {"ok", "unknown"} <= told, id
            assert told <= severities or id in chosen, id
