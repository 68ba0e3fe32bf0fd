"""The catalog as data: complete, with sources. What it says of the trainer: tests/trainer/diagnosis/test_catalog.py."""

import ast
from pathlib import Path

import msgspec
import pytest

from stoker_watch.cli.app import app
from stoker_watch.diagnosis import causes
from stoker_watch.diagnosis.causes.cause import COMMON_THRESHOLDS, REASONS, Cause, Threshold
from stoker_watch.diagnosis.causes.gpu import find_xid
from stoker_watch.diagnosis.endings import endings
from stoker_watch.diagnosis.engine import CATALOG, RULES, catalog_hash
from stoker_watch.diagnosis.notes import NOTES
from stoker_watch.diagnosis.places.grouping import FIXES
from stoker_watch.diagnosis.reference import explain_id
from stoker_watch.errors import UsageError
from stoker_watch.knowledge import read_toml
from stoker_watch.runs.schemas import PROBE_KINDS

NATIVE_ONLY = {"anchors_miss_boxes", "bad_images"}
"""Causes that rest on what only `stoker train` records."""
CAUSES_FOLDER = Path(causes.__file__).parent


def test_every_reason_has_a_cause_or_a_failure() -> None:
    assert set(REASONS) == {row.reason for row in (*CATALOG.values(), *endings().values())}
    assert set(REASONS[:7]) <= {cause.reason for cause in CATALOG.values()}


def test_every_cause_is_listed_once_with_the_rule_of_its_name() -> None:
    assert len(CATALOG) == len(RULES)
    assert not CATALOG.keys() & (endings().keys() | {kind.id for kind, _ in NOTES})
    assert read_toml("causes.toml").keys() - {"common_thresholds"} == CATALOG.keys()


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
    for id in ("disk_full", "no_telemetry", "zero-size", "no_gpu", "more_cores", "fewer_gpus", "run_failed"):
        (entry,) = explain_id(id)
        assert entry.title
        assert entry.rows


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
    assert 0 < cause.confidence < 1


def test_what_is_more_exact_is_an_order() -> None:
    """No cause is more exact than itself, also not by way of others."""
    below = {cause.id: set(cause.supersedes) for cause in CATALOG.values() if cause.explains}
    for _ in below:
        below = {id: ids.union(*(below.get(other, ()) for other in ids)) for id, ids in below.items()}
    assert [id for id, ids in below.items() if id in ids] == []


def test_there_is_a_fix_for_each_kind_of_call() -> None:
    assert set(FIXES) <= set(CATALOG["heavy_place"].other_fixes)


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
