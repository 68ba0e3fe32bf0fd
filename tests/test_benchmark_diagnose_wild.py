"""The benchmark on programs of others: it counts correctly, and its jobs are well-formed. Not its numbers."""

import argparse
import ast
import dataclasses
import importlib
import json
from collections import defaultdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from stoker_watch.diagnosis.reference import all_entries
from tests.fixtures.benchmarks import FOLDER


@pytest.fixture
def wild() -> ModuleType:
    return importlib.import_module("benchmarks.diagnosis.diagnose_wild")


def an_outcome(wild: ModuleType, *findings: tuple[str, str, float | None], **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "program": "loop", "fault": "slow storage", "way": "a", "accepted": ("slow_storage",),
        "findings": tuple(wild.NamedCause(cause=c, severity=s, lost_s=lost) for c, s, lost in findings),
    }  # fmt: skip
    return wild.Outcome(**(fields | changes))


def test_the_first_finding_above_info_counts_and_info_only_where_nothing_is_above(wild: ModuleType) -> None:
    hit, other, note = ("slow_storage", "warning", 4.0), ("slow_decode", "critical", 9.0), ("cold_cache", "info", None)
    outcomes = [
        an_outcome(wild, hit, other),
        an_outcome(wild, other, hit),
        an_outcome(wild, other, ("python_bound", "warning", 1.0), hit),
        an_outcome(wild, note, hit),
        an_outcome(wild, ("slow_storage", "info", 1.0)),
        an_outcome(wild),
    ]
    assert [o.right for o in outcomes] == [True, False, False, True, True, False]
    assert [o.within_two for o in outcomes] == [True, True, False, True, True, False]
    assert outcomes[-1].first == "nothing"


def test_a_healthy_job_is_right_without_a_finding_above_info(wild: ModuleType) -> None:
    healthy = {"fault": wild.HEALTHY, "accepted": ()}
    assert an_outcome(wild, ("cpu_contention", "info", 1.0), **healthy).right
    assert not an_outcome(wild, ("cpu_contention", "warning", 1.0), **healthy).right


def test_contention_is_passed_over_where_others_used_the_cores(wild: ModuleType) -> None:
    findings = (("cpu_contention", "warning", 5.0), ("slow_storage", "warning", 4.0))
    assert an_outcome(wild, *findings, others_cores=0.9).right
    assert not an_outcome(wild, *findings, others_cores=0.1).right
    accepts = {"accepted": ("cpu_contention",), "others_cores": 0.9}
    assert an_outcome(wild, *findings, **accepts).right, "it is the fault of this job"


def test_the_lost_time_of_the_accepted_finding_is_compared_with_the_clock_of_the_job(wild: ModuleType) -> None:
    other, hit = ("slow_decode", "critical", 9.0), ("slow_storage", "warning", 4.4)
    outcomes = [
        an_outcome(wild, other, hit, known_s=4.0),
        an_outcome(wild, ("slow_storage", "warning", 5.0), known_s=4.0),
        an_outcome(wild, other, known_s=4.0),
        an_outcome(wild, ("slow_storage", "warning", None), known_s=4.0),
        an_outcome(wild, hit),
    ]
    assert [o.loss_error for o in outcomes] == [pytest.approx(0.1), 0.25, None, -1.0, None]
    assert [wild.loss_is_right(o) for o in outcomes[:4]] == [True, False, False, False]


def test_the_report_has_a_row_per_program_and_fault_the_confusion_and_the_and_the_bars(wild: ModuleType) -> None:
    hit, other = ("slow_storage", "warning", 4.0), ("slow_decode", "critical", 9.0)
    healthy = {"fault": wild.HEALTHY, "accepted": ()}
    outcomes = [
        an_outcome(wild, hit, known_s=4.0),
        an_outcome(wild, other, hit, way="b"),
        an_outcome(wild, way="c", findings=None, reason="install X"),
        an_outcome(wild, **healthy),
    ]
    report = wild.conclude(outcomes, "what")
    row = report.rows[0]
    assert (row["what"], row["right"], row["within two"]) == ("loop: slow storage", "1 of 2", "2 of 2")
    assert row["found instead"] == "b: slow_decode, slow_storage"
    assert (row["loss off by"], row["n/a"]) == ("+0 %", "c: install X")
    mixed = next(row for row in report.rows if row["what"] == "fault: slow storage")
    assert (mixed["right"], mixed["found first"]) == ("1 of 2", "slow_storage 1, slow_decode 1")
    assert {bar.name: (bar.value, bar.ok) for bar in report.bars} == {
        "first finding right, share": (0.5, False),
        "right within two, share": (1.0, True),
        "healthy without warning or critical, share": (1.0, True),
        "lost time within 15 %, share": (1.0, True),
    }


def test_a_finished_job_is_not_repeated_unless_what_it_accepts_changed(wild: ModuleType, tmp_path: Path) -> None:
    job = wild.Job(program="loop", fault="slow storage", way="a", command=("loop.py",), accepted=("slow_storage",))
    kept = tmp_path / "partial.jsonl"
    outcome = an_outcome(wild, ("slow_storage", "warning", 4.0), known_s=4.0)
    kept.write_text(json.dumps(wild.asdict(outcome)) + "\n" + '{"prog')
    assert wild.finished(kept, {job.key: job}) == [outcome], "a line cut by a kill is left out"
    assert wild.finished(kept, {}) == []
    changed = dataclasses.replace(job, accepted=("slow_storage", "slow_decode"))
    assert wild.finished(kept, {job.key: changed}) == []


def test_a_kept_job_is_read_again_also_if_nothing_was_found(
    wild: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = wild.Bench(tmp_path, tmp_path, keep=True)
    found = (wild.NamedCause(cause="lr_too_high", severity="warning"),)
    monkeypatch.setattr(bench, "_why", lambda run, folder: found)  # noqa: ARG005
    kept = an_outcome(wild)
    assert kept.findings == ()
    assert bench.read_again(kept, tmp_path, kept.accepted).findings == found
    without_reading = an_outcome(wild, findings=None)
    assert bench.read_again(without_reading, tmp_path, kept.accepted).findings is None


def test_a_script_and_the_places_of_a_job_become_its_command(wild: ModuleType, tmp_path: Path) -> None:
    bench = wild.Bench(tmp_path, tmp_path, keep=False)
    job = wild.Job(program="p", fault="f", way="w", command=("loop.py", "{folder}/x", "{server}/y"))
    assert bench._words(job, tmp_path / "job", "http://s") == [
        str(FOLDER / "diagnosis" / "wild" / "loop.py"), str(tmp_path / "job" / "x"), "http://s/y",
    ]  # fmt: skip


def test_the_options_choose_jobs(wild: ModuleType) -> None:
    chosen = argparse.Namespace(only=["slow storage", "ddp"], healthy_only=False)
    names = [job.name for job in wild.chosen_jobs(chosen).values()]
    assert names
    assert all("DDP" in name and "slow storage" in name for name in names)
    chosen = argparse.Namespace(only=None, healthy_only=True)
    assert {job.fault for job in wild.chosen_jobs(chosen).values()} == {wild.HEALTHY}


def _line_of(text: str, function: str) -> int:
    """The last line of a function, whose name has those of its classes and outer functions."""
    nodes: list[ast.AST] = [ast.parse(text)]
    for name in function.split("."):
        inner = [child for node in nodes for child in ast.walk(node)]
        nodes = [node for node in inner if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name]
    (node,) = nodes
    assert isinstance(node, ast.FunctionDef)
    return node.end_lineno or 0


def test_a_job_is_lengthened_by_its_epochs_or_steps(wild: ModuleType) -> None:
    job = dataclasses.replace(wild.JOBS[0], command=("keras_fit.py", "--epochs", "3", "--eval-steps", "2"))
    assert wild.lengthen(job, 3.2).command == ("keras_fit.py", "--epochs", "12", "--eval-steps", "2")
    assert wild.lengthen(job, 99.0).command[2] == str(3 * wild.MAX_LONGER)


def test_the_jobs_are_well_formed_and_many_enough(wild: ModuleType) -> None:
    known = {entry.id for entry in all_entries()}
    assert len({job.key for job in wild.JOBS}) == len(wild.JOBS)
    ways: dict[tuple[str, str], set[str]] = defaultdict(set)
    for job in wild.JOBS:
        causes = {answer for answer in job.accepted if not answer.startswith("place ")}
        assert causes <= known, f"{job.name}: {causes - known} is no cause"
        for answer in set(job.accepted) - causes:
            file, _, function = answer.removeprefix("place ").partition(":")
            line = _line_of((FOLDER / "diagnosis" / "wild" / file).read_text(encoding="utf-8"), function)
            assert wild.cause_or_function({"cause": "heavy_place", "place": f"wild/{file}:{line}"}) == answer
        assert bool(job.accepted) == (job.fault != wild.HEALTHY), job.name
        assert job.python in ("venv", "peers", "ultralytics"), job.name
        script = next(word for word in job.command if word.endswith(".py")).removeprefix("{wild}/")
        text = (FOLDER / "diagnosis" / "wild" / script).read_text(encoding="utf-8")
        assert "stoker" not in text, f"{script} knows of stoker"
        ways[job.program, job.fault].add(job.way)
    alone = [pair for pair, found in ways.items() if len(found) < 2 and pair[1] != wild.HEALTHY]
    assert not alone, f"in one way only: {alone}"
    assert len([pair for pair in ways if pair[1] != wild.HEALTHY]) >= 15
    assert sum(job.fault == wild.HEALTHY for job in wild.JOBS) >= 15
