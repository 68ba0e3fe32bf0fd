"""A study folder of someone else: reading it writes nothing, a search does not write through its links, and what is
damaged is named with its line."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from stoker.search.page import study_json, write_study
from stoker.search.study import Study, create
from stoker.search.worker import work
from stoker_watch.errors import StokerError
from tests.bounded import bounded
from tests.fixtures.special_files import replace_by
from tests.trainer.search.fake_worker import objective
from tests.trainer.search.test_search import make_spec


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "study"
    create(folder, make_spec(trials=4))
    assert work(folder, objective) == 4
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "study")


def files_of(folder: Path) -> dict[Path, tuple[bytes, int]]:
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def report(folder: Path) -> None:
    study = Study(folder)
    study_json(study)
    write_study(study, folder.parent / "page.html")


def test_a_report_writes_nothing_into_the_study(folder: Path) -> None:
    (folder / "journal.log").open("ab").write(b'{"op_code":6,"tri')  # a worker is writing it
    before = files_of(folder)
    report(folder)
    assert files_of(folder) == before
    create(folder.parent / "new", make_spec())
    report(folder.parent / "new")
    assert [path.name for path in files_of(folder.parent / "new")] == ["study.json"]


def test_the_trials_are_those_that_optuna_reads(folder: Path) -> None:
    storage = JournalStorage(JournalFileBackend(str(folder / "journal.log")))
    assert Study(folder).trials() == optuna.load_study(study_name="search", storage=storage).get_trials()


@pytest.mark.parametrize("use", [report, lambda folder: work(folder, objective)])
@pytest.mark.parametrize("name", ["journal.log", "study.json"])
def test_a_link_to_a_file_outside_is_refused(folder: Path, name: str, use: Callable[[Path], Any]) -> None:
    outside = folder.parent / "outside"
    outside.write_bytes((folder / name).read_bytes() + b"no line ends here")
    (folder / name).unlink()
    (folder / name).symlink_to(outside)
    before = outside.read_bytes(), outside.stat().st_mtime_ns
    with pytest.raises(StokerError, match="links are not followed") as info:
        use(folder)
    assert str(folder / name) in str(info.value)
    assert (outside.read_bytes(), outside.stat().st_mtime_ns) == before


@pytest.mark.parametrize("name", ["locks/claim", "locks/0004", "locks", "trials", "trials/0003", "journal.lock"])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_search_writes_nothing_through_links(folder: Path, name: str, kind: str) -> None:
    create(folder, make_spec(trials=5))
    outside, place = folder.parent / "outside", folder / name
    if kind == "folder":
        outside.mkdir()
    place.rename(folder.parent / "moved") if place.exists() else None
    place.symlink_to(outside)
    with pytest.raises(StokerError, match="link") as info:
        work(folder, objective)
    assert str(place) in str(info.value)
    assert not outside.exists() or not any(outside.iterdir())


@pytest.mark.parametrize("kind", ["fifo", "folder", "zero", "sparse"])
@pytest.mark.parametrize("name", ["journal.log", "study.json", "locks/claim", "journal.lock"])
def test_special_files_in_a_study(folder: Path, name: str, kind: str) -> None:
    create(folder, make_spec(trials=5))
    replace_by(kind, folder / name, size_bytes=20 << 30)
    with bounded(seconds=20, megabytes=256):
        if "loc" not in name:
            with pytest.raises(StokerError, match=name):
                report(folder)
        elif kind != "sparse":  # a lock is not read
            with pytest.raises(StokerError, match=name):
                work(folder, objective)


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> int:
    """Changes the first line of the journal that `change` returns something for; returns its number."""
    lines = (folder / "journal.log").read_text().splitlines()
    for number, line in enumerate(lines):
        if (changed := change(json.loads(line))) is not None:
            lines[number] = changed if isinstance(changed, str) else json.dumps(changed)
            (folder / "journal.log").write_text("\n".join([*lines, ""]))
            return number + 1
    raise AssertionError


@pytest.mark.parametrize(
    "change",
    [
        lambda line: "{" if line["op_code"] == 8 else None,
        lambda line: "[" * 100_000 if line["op_code"] == 8 else None,
        lambda line: "[]" if line["op_code"] == 8 else None,
        lambda line: json.dumps(line).replace("90", "9" * 5000) if line["op_code"] == 8 else None,
        lambda line: line | {"op_code": 99} if line["op_code"] == 8 else None,
        lambda line: line | {"trial_id": []} if line["op_code"] == 8 else None,
        lambda line: line | {"user_attr": {"metrics": [1]}} if line["op_code"] == 8 else None,
        lambda line: line | {"state": 77} if line["op_code"] == 6 else None,
        lambda line: line | {"values": ["x"]} if line["op_code"] == 6 else None,
        lambda line: line | {"datetime_complete": "x"} if line["op_code"] == 6 else None,
        lambda line: line | {"intermediate_value": "x"} if line["op_code"] == 7 else None,
        lambda line: line | {"params": {"lr": 0.001, "precision": 9}} if line["op_code"] == 4 else None,
        lambda line: line | {"distributions": {"lr": "x"}} if line["op_code"] == 4 else None,
        lambda line: {"op_code": 4} if line["op_code"] == 4 else None,
    ],
)
def test_a_damaged_line_is_named(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    number = edit(folder, change)
    with pytest.raises(StokerError, match=rf"journal\.log:{number}\b"):
        report(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda line: line | {"values": [0.1, 0.2]} if line["op_code"] == 6 and line["state"] == 1 else None,
        lambda line: line | {"values": None} if line["op_code"] == 6 and line["state"] == 1 else None,
        lambda line: line | {"params": {"lr": 5, "precision": 1}} if line["op_code"] == 4 else None,
        lambda line: line | {"params": {}} if line["op_code"] == 4 else None,
        lambda line: "\n".join([json.dumps(line)] * 17) if line["op_code"] == 4 else None,  # more than the study has
        lambda line: (
            json.loads(json.dumps(line).replace("0.1,", "9e9,")) if line["op_code"] == 4 else None
        ),  # another range
    ],
)
def test_a_trial_that_cannot_be_is_named(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    edit(folder, change)
    with pytest.raises(StokerError, match=r"(?s)Trial \d.*journal\.log"):
        report(folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["trials", "steps", "attributes"])
def test_a_journal_that_expands(folder: Path, kind: str) -> None:
    """The largest that is read: its trials take memory; Optuna copies what a trial has at each line."""
    head = {"worker_id": "", "study_id": 0, "trial_id": 4, "datetime_start": "2026-11-30"}
    with (folder / "journal.log").open("a") as file:
        file.write(json.dumps(head | {"op_code": 4}) + "\n")
        for number in range(100_000_000 // 1000):
            if file.tell() > 8_300_000:
                break
            line = {
                "trials": {"op_code": 4, "worker_id": "", "study_id": 0, "datetime_start": None},
                "steps": {"op_code": 7, "worker_id": "", "trial_id": 4, "step": number % 4_999 + 1,
                          "intermediate_value": 0},
                "attributes": {"op_code": 9, "worker_id": "", "trial_id": 4, "system_attr": {f"{number}": 0}},
            }[kind]  # fmt: skip
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
    with bounded(seconds=20, megabytes=1024), contextlib.suppress(StokerError):
        report(folder)


@pytest.mark.parametrize(
    "changes",
    [{"round": 0}, {"trials": -1}, {"evaluations": 0}, {"objectives": []}, {"objectives": ["ap"] * 3},
     {"space": {"settings": {"nothing": {"low": 1, "high": 2}}}}, {"space": {"settings": {"lr": []}}},
     {"space": {"settings": {"lr": {"low": 3, "high": 2}}}}],
)  # fmt: skip
def test_a_damaged_description_is_named(folder: Path, changes: dict[str, Any]) -> None:
    spec = json.loads((folder / "study.json").read_text())
    (folder / "study.json").write_text(json.dumps(spec | changes))
    with pytest.raises(StokerError, match=r"study\.json"):
        report(folder)
    assert os.listdir(folder / "trials")


def test_a_study_of_networks_of_an_older_version_is_an_error_that_says_so(folder: Path) -> None:
    study = json.loads((folder / "study.json").read_text())
    study |= {"sampler": "nsga2", "space": {"settings": {"width": [8, 16]}, "limits": {}}}
    (folder / "study.json").write_text(json.dumps(study))
    with pytest.raises(StokerError, match="searched networks"):
        report(folder)
