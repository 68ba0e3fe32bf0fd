"""The catalogue as data: complete, with sources, and the page for people that is made of it."""

import ast
import re
from pathlib import Path

import msgspec
import pytest

from stoker.config.settings import SECTION_OF
from stoker.diagnosis import catalogue
from stoker.diagnosis.catalogue import CATALOGUE, COMMON, REASONS, Limit, catalogue_hash
from stoker.diagnosis.failure_signatures import DEATHS
from stoker.diagnosis.verdicts import verdicts
from stoker.diagnosis.xids import XIDS
from stoker.runs.schemas import PROBE_KINDS

OF_OURS = {"cold_cache", "anchors_miss_boxes", "rate_lowered", "checkpoints_failed", "quarantined_pictures"}
"""Causes that rest on what only `stoker train` records."""
PAGE = Path(__file__).parents[2] / "docs/verdicts.md"


def test_the_catalogue_is_large_enough_and_covers_the_seven_reasons() -> None:
    assert len(CATALOGUE) >= 45
    assert set(REASONS[:7]) <= {cause.reason for cause in CATALOGUE.values()}
    assert set(REASONS) == {row.reason for row in (*CATALOGUE.values(), *DEATHS.values())}


def test_the_page_is_what_the_catalogue_says() -> None:
    assert PAGE.read_text() == verdicts(), "python -m stoker.diagnosis.verdicts > docs/verdicts.md"
    for name in (*CATALOGUE, *DEATHS):
        assert verdicts().count(f"### `{name}`") == 1


@pytest.mark.parametrize("cause", CATALOGUE.values(), ids=lambda cause: cause.id)
def test_a_row_is_whole(cause: catalogue.Cause) -> None:
    assert all((cause.source, cause.measure, cause.fix, cause.needs, cause.looks_like, cause.title))
    thresholds = [at for at in (cause.info_from, cause.warn_from, cause.critical_from) if at is not None]
    assert thresholds
    assert thresholds == sorted(set(thresholds), reverse=cause.below)
    assert set(cause.over) <= set(CATALOGUE) - {cause.id}
    assert all(limit.said for limit in cause.limits.values())
    assert not cause.probe or cause.probe in PROBE_KINDS
    assert set(cause.patch) <= set(SECTION_OF)
    assert 0 < cause.confidence < 1


@pytest.mark.parametrize("cause", CATALOGUE.values(), ids=lambda cause: cause.id)
def test_a_job_that_stoker_does_not_train_is_told_nothing_of_its_flags(cause: catalogue.Cause) -> None:
    if cause.needs[0].startswith("config.toml") or cause.id in OF_OURS:
        assert not cause.fix_elsewhere
        return
    words = set(re.findall(r"--[a-z][a-z-]*", cause.fix_elsewhere or cause.fix))
    assert not words & {"--run", *("--" + name.rstrip("_").replace("_", "-") for name in SECTION_OF)}
    assert "STOKER_" not in (cause.fix_elsewhere or cause.fix)


def test_no_two_causes_leave_each_other_out() -> None:
    for cause in CATALOGUE.values():
        assert all(cause.id not in CATALOGUE[other].over for other in cause.over), cause.id


def test_a_threshold_decides_the_severity() -> None:
    cause = msgspec.structs.replace(CATALOGUE["input_bound"], info_from=0.01)
    assert [cause.severity(share) for share in (0.0, 0.01, 0.05, 0.2)] == [None, "info", "warning", "critical"]
    disk = CATALOGUE["disk_nearly_full"]
    assert [disk.severity(free) for free in (2.0**32, 2.0**30, 0.0)] == [None, "warning", "critical"]


def test_the_hash_changes_with_any_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    first = catalogue_hash()
    assert first == catalogue_hash()
    assert len(first) == 12
    changed = msgspec.structs.replace(CATALOGUE["input_bound"], warn_from=0.06)
    with monkeypatch.context() as patched:
        patched.setitem(CATALOGUE, "input_bound", changed)
        assert catalogue_hash() != first
    monkeypatch.setitem(COMMON, "steady_s", Limit(6.0, "x"))
    assert catalogue_hash() != first


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
