"""Sets of jobs in programs of others: their tables are well-formed, and judging counts correctly. Not the numbers."""

import hashlib
import json
from pathlib import Path

import pytest

from benchmarks.diagnosis import diagnose_programs
from benchmarks.diagnosis.diagnose_edits import Changed, Edit
from benchmarks.diagnosis.diagnose_programs import (
    KINDS,
    OUTSIDE,
    PLACE,
    Case,
    Program,
    Source,
    Table,
    names_place,
    read_tables,
)
from benchmarks.diagnosis.wild.job import HEALTHY
from stoker_watch.diagnosis.reference import all_entries

USED = {
    "ultralytics/yolov5", "ultralytics/ultralytics", "pytorch/vision", "facebookresearch/detr",
    "huggingface/accelerate", "huggingface/pytorch-image-models", "eriklindernoren/PyTorch-YOLOv3",
    "sgrvinod/a-PyTorch-Tutorial-to-Object-Detection",
}  # fmt: skip


@pytest.fixture(scope="module")
def table() -> Table:
    return read_tables()


AGAIN = {"facebookresearch/detr", "huggingface/accelerate", "huggingface/pytorch-image-models",
         "eriklindernoren/PyTorch-YOLOv3", "sgrvinod/a-PyTorch-Tutorial-to-Object-Detection"}  # fmt: skip
"""Repositories of which the fourth set has another program, as the heads of its tables say, and one each of the tenth,
the thirteenth and the sixteenth that was in the first jobs of all: docs/benchmarks.md states their rates without these,
too."""


def test_the_page_says_how_many_jobs_there_are(table: Table) -> None:
    programs = {(case.series, case.program) for case in table.job}
    num_healthy = sum(case.kind == HEALTHY for case in table.job)
    documented = (Path(__file__).parents[1] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    text = f"{len(programs)} programs, {len(table.job) - num_healthy} jobs with a fault, {num_healthy} healthy ones"
    assert text in documented


@pytest.mark.parametrize(
    ("series", "minimum"), [(3, 60), (4, 40), (5, 30), (6, 30), (7, 30), (8, 30), (9, 30), (10, 30), (13, 40), (15, 60)]
)
def test_there_are_enough_jobs_and_half_of_each_kind_or_all_are_held_back(
    series: int, minimum: int, table: Table
) -> None:
    jobs = [case for case in table.job if case.series == series]
    assert len(jobs) >= minimum
    assert len({case.program for case in jobs}) >= (10 if series == 10 else 12)
    if series > 3:
        assert all(case.held_back for case in jobs)
        return
    for kind in KINDS:
        of_kind = [case.held_back for case in jobs if case.kind == kind]
        assert of_kind, kind
        assert abs(2 * sum(of_kind) - len(of_kind)) <= 1, kind


def test_no_program_was_used_before(table: Table) -> None:
    first = {case.program for case in table.job if case.series == 3}
    assert {case.program for case in table.job} == set(table.program)
    for name, program in table.program.items():
        assert program.repository not in USED - (set() if name in first else AGAIN)
        assert (program.repository, program.root) != ("pytorch/examples", "imagenet")
        assert len(program.commit) == 40


NEAR_MISSES = 24
"""The set whose healthy jobs are edited to be nearly those with a fault."""


def test_each_fault_has_its_truth_and_an_answer_that_is_right(table: Table) -> None:
    known = {entry.id for entry in all_entries()}
    keys = [(case.program, case.fault, case.way) for case in table.job]
    assert len(keys) == len(set(keys))
    for case in table.job:
        assert case.kind in KINDS
        assert set(case.causes) <= known, case.way
        assert not case.around or case.around[0] in OUTSIDE
        if case.kind == HEALTHY:
            # its sizes may be others than those that the program's edits put there: `own_edits`
            is_near_miss = case.series == NEAR_MISSES and case.edits
            assert is_near_miss or not case.edits, case.way
            assert not any((case.places, case.causes, case.truth, case.around)), case.way
        else:
            assert case.truth, case.way
            assert case.places or case.causes, case.way
            edited = case.edits or case.own_edits
            assert edited or case.add or case.around or case.send or case.with_ or case.variables or case.after_data


ORIGINAL = "import sys\n\nfor x in range(9):\n    step(x)\n    print('x', x)\nlast()\n"


def edit(line: int, how: str, text: str, last: int | None = None) -> Edit:
    lines = ORIGINAL.split("\n")[line - 1 : last or line]
    return Edit("a.py", line, last or line, hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12], how, text)


def test_edits_are_applied_by_the_lines_of_the_original_and_places_follow_them() -> None:
    edits = [
        edit(4, "after", "stop()"), edit(1, "after", "import os"), edit(4, "before", "if x:\n    begin()"),
        edit(4, "9:10", "x + 1"), edit(5, "replace", "print()"), edit(6, "0:0", "with clock:\n    "),
        edit(4, "after", "sleep()\nsleep()"), edit(4, "before", "near()"),
    ]  # fmt: skip
    file = Changed("a.py", ORIGINAL, edits)
    assert file.text == (
        "import sys\nimport os\n\nfor x in range(9):\n    if x:\n        begin()\n    near()\n    step(x + 1)\n"
        "    sleep()\n    sleep()\n    stop()\n    print()\nwith clock:\n    last()\n"
    )
    assert [file.line(number) for number in (1, 3, 4, 5, 6)] == [1, 4, 8, 12, 14]
    assert [file.line(1, 1), file.line(6, 1), file.line(6, 2), file.line(4, 1)] == [2, 13, 14, 7]
    assert Changed("a.py", ORIGINAL, edits[:-1]).line(4, 2) == 9
    assert Changed("a.py", ORIGINAL, [edit(4, "11:17", "", last=5)]).line(6) == 5
    with pytest.raises(ValueError, match="no edit of line 4 has 3 lines"):
        Changed("a.py", ORIGINAL, edits).line(4, 3)


def test_an_edit_of_other_lines_is_refused_and_so_are_two_of_one_text() -> None:
    with pytest.raises(ValueError, match="is it the program's commit"):
        _ = Changed("a.py", "import os\n" + ORIGINAL, [edit(4, "after", "stop()")]).text
    with pytest.raises(ValueError, match="two edits change the same text of line 4"):
        _ = Changed("a.py", ORIGINAL, [edit(4, "replace", "stop()"), edit(4, "9:10", "1")]).text


def test_places_and_own_edits_of_a_job(tmp_path: Path) -> None:
    (tmp_path / "me+mine").mkdir()
    (tmp_path / "me+mine" / "a.py").write_text(ORIGINAL)
    program = Program(
        repository="me/mine", commit="0" * 40, license="MIT", files=["a.py"], python="torch", command="a.py",
        edits=[edit(4, "after", "a = 1\nb = 2")],
    )  # fmt: skip
    case = Case(
        program="mine", kind="death", fault="f", way="w", held_back=False, own_edits=[("a.py", "b = 2", "b = 3")],
        places=["a.py:4.2", "a.py:5 +1"],
    )  # fmt: skip
    source = Source(program=program, programs=tmp_path, case=case)
    files = source.changed()
    assert "    a = 1\n    b = 3\n" in files["a.py"].text
    assert source.places(files) == ["a.py:6", "a.py:7", "a.py:8"]
    case.own_edits = [("a.py", "c = 2", "c = 3")]
    with pytest.raises(ValueError, match="'c = 2' is not once"):
        source.changed()


def test_a_place_is_named_by_file_and_line() -> None:
    assert names_place({"title": "37 s in /a/b/train.py:53, each step"}, ["train.py:53"])
    assert not names_place({"title": "train.py:531"}, ["train.py:53"])
    assert not names_place({"title": "pretrain.py:53"}, ["train.py:53"])


def test_what_is_above_info_comes_before_places_and_these_before_info(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = [
        {"cause": "cold_cache", "severity": "info", "title": ""},
        {"cause": "slow_storage", "severity": "warning", "title": "the reads at loader.py:7", "lost_device_s": 4.0},
    ]
    places = [{"line": "train.py:9", "seconds": 9.0}, {"line": "loader.py:7", "seconds": 5.0}]
    (tmp_path / "why.json").write_text(json.dumps({"findings": findings, "places": places}))
    (tmp_path / diagnose_programs.PLACES).write_text('["loader.py:7"]')
    named = tuple(
        diagnose_programs.wild.NamedCause(cause=f["cause"], severity=f["severity"], lost_s=f.get("lost_device_s"))
        for f in findings
    )
    monkeypatch.setattr(diagnose_programs.wild.Bench, "_why", lambda *_: named)
    found = diagnose_programs.PlaceBench(tmp_path, tmp_path, keep=True)._why(tmp_path, tmp_path)
    assert [(f.cause, f.lost_s) for f in found] == [
        (PLACE, 4.0), ("place train.py:9", 9.0), (PLACE, 5.0), ("cold_cache", None),
    ]  # fmt: skip
