"""The catalogue as data: complete, with sources, and the page for people that is made of it."""

import ast
import re
from pathlib import Path

import msgspec
import pytest

from stoker.config.settings import SECTION_OF
from stoker.diagnosis import catalogue
from stoker.diagnosis.catalogue import CATALOG, COMMON_THRESHOLDS, REASONS, Threshold, catalog_hash
from stoker.diagnosis.failure_signatures import FAILURE_SIGNATURES
from stoker.diagnosis.verdicts import render_verdicts
from stoker.diagnosis.xids import XIDS
from stoker.runs.schemas import PROBE_KINDS

OF_OURS = {"cold_cache", "anchors_miss_boxes", "rolled_back_lower_lr", "checkpoints_failed", "bad_images"}
"""Causes that rest on what only `stoker train` records."""
PAGE = Path(__file__).parents[2] / "docs/verdicts.md"


def test_the_catalogue_is_large_enough_and_covers_the_seven_reasons() -> None:
    assert len(CATALOG) >= 45
    assert set(REASONS[:7]) <= {cause.reason for cause in CATALOG.values()}
    assert set(REASONS) == {row.reason for row in (*CATALOG.values(), *FAILURE_SIGNATURES.values())}


def test_the_page_is_what_the_catalogue_says() -> None:
    assert PAGE.read_text() == render_verdicts(), "python -m stoker.diagnosis.verdicts > docs/verdicts.md"
    for name in (*CATALOG, *FAILURE_SIGNATURES):
        assert render_verdicts().count(f"### `{name}`") == 1


@pytest.mark.parametrize("cause", CATALOG.values(), ids=lambda cause: cause.id)
def test_a_row_is_whole(cause: catalogue.Cause) -> None:
    assert all((cause.source, cause.metric, cause.fix, cause.required_records, cause.symptom, cause.title))
    thresholds = [
        at for at in (cause.info_threshold, cause.warning_threshold, cause.critical_threshold) if at is not None
    ]
    assert thresholds
    assert thresholds == sorted(set(thresholds), reverse=cause.lower_is_worse)
    assert set(cause.supersedes) <= set(CATALOG) - {cause.id}
    assert all(limit.description for limit in cause.thresholds.values())
    assert not cause.probe or cause.probe in PROBE_KINDS
    assert set(cause.config_patch) <= set(SECTION_OF)
    assert 0 < cause.confidence < 1


@pytest.mark.parametrize("cause", CATALOG.values(), ids=lambda cause: cause.id)
def test_a_job_that_stoker_does_not_train_is_told_nothing_of_its_flags(cause: catalogue.Cause) -> None:
    if cause.required_records[0].startswith("config.toml") or cause.id in OF_OURS:
        assert not cause.external_fix
        return
    words = set(re.findall(r"--[a-z][a-z-]*", cause.external_fix or cause.fix))
    assert not words & {"--run", *("--" + name.rstrip("_").replace("_", "-") for name in SECTION_OF)}
    assert "STOKER_" not in (cause.external_fix or cause.fix)


def test_no_two_causes_leave_each_other_out() -> None:
    for cause in CATALOG.values():
        assert all(cause.id not in CATALOG[other].supersedes for other in cause.supersedes), cause.id


def test_a_threshold_decides_the_severity() -> None:
    cause = msgspec.structs.replace(CATALOG["input_bound"], info_threshold=0.01)
    assert [cause.severity(share) for share in (0.0, 0.01, 0.05, 0.2)] == [None, "info", "warning", "critical"]
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


def test_thresholds_are_nowhere_but_in_the_catalogue() -> None:
    """A rule compares with numbers of the catalogue; of its own it has 0 and 1 and counts of a few."""
    folder = Path(catalogue.__file__).parent / "rules"
    files = sorted(set(folder.glob("*.py")) - {folder / "finding.py"})  # which says how numbers are shown
    assert len(files) >= 9
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Compare):
                numbers = [
                    n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and type(n.value) in (int, float)
                ]
                assert set(numbers) <= {0, 1, 2, 5}, f"{file.name}:{node.lineno}: {numbers}"


def test_xids_say_what_to_do() -> None:
    assert {13, 31, 43, 48, 74, 79, 94, 95} <= set(XIDS)
    assert all(xid.meaning and xid.fix for xid in XIDS.values())
