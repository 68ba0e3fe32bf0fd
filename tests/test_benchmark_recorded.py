"""Recordings of jobs: what `stoker why` says of one is what it said of the run, without a word of the machine."""

import json
import lzma
import os
import platform
from dataclasses import asdict
from pathlib import Path

import msgspec
import pytest

from benchmarks.diagnosis import diagnose_recorded, diagnose_wild
from benchmarks.diagnosis.diagnose_programs import PLACES, Source, read_tables
from stoker_watch.report.explain import explain_run
from stoker_watch.runs.records import DEVICES, EVENTS, OUTPUT


def a_kept_job(tmp_path: Path) -> tuple[Path, diagnose_wild.Outcome, Source]:
    """Of a job that the kernel killed: the time of its last output is nowhere but at the file."""
    table = read_tables()
    case = next(case for case in table.job if case.kind == "death" and case.read_after is None)
    source = Source(program=table.program[case.program], programs=tmp_path / "programs", case=case)
    folder = tmp_path / "job-001"
    run = folder / "run"
    run.mkdir(parents=True)
    (folder / PLACES).write_text("[]")
    events = [{"t": 1000.0, "attempt": 1, "kind": "started", "text": f"{Path.home()}/x on {platform.node()}"},
              {"t": 1400.0, "attempt": 1, "kind": "failed", "data": {"exit_code": -9, "oom_kills": 0}}]  # fmt: skip
    (run / EVENTS).write_text("".join(json.dumps(event) + "\n" for event in events))
    (run / DEVICES).write_text("")
    (run / OUTPUT).write_bytes(f"step 1 of 9 in {folder}/train.py \xff\n".encode("latin-1"))
    (run / "not-read.bin").write_bytes(bytes(100))
    (run / ".lock").touch()
    os.utime(run / OUTPUT, (1010.0, 1010.0))
    outcome = diagnose_wild.Outcome(
        program=case.program, fault=case.fault, way=case.way, accepted=("hang",), findings=(), known_s=3.0,
        others_cores=0.1,
    )  # fmt: skip
    (folder / diagnose_wild.OUTCOME).write_text(json.dumps(asdict(outcome)))
    return folder, outcome, source


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """(the folder of the job, its recording)."""
    monkeypatch.setattr(diagnose_recorded, "FOLDER", tmp_path / "recordings")
    folder, outcome, source = a_kept_job(tmp_path)
    diagnose_recorded.record(folder, outcome, source)
    return folder, next((tmp_path / "recordings").rglob("*.json.xz"))


def test_the_answer_is_that_of_the_run(recorded: tuple[Path, Path]) -> None:
    folder, path = recorded
    with diagnose_recorded.unpacked(diagnose_recorded.load(path)) as run:
        again = explain_run(run)
        assert (run / OUTPUT).stat().st_mtime == 1010.0
        assert not (run / "not-read.bin").exists()
    assert [finding.id for finding in again.findings] == [
        finding.id for finding in explain_run(folder / "run").findings
    ]
    recording, outcome = diagnose_recorded.read(path)
    assert outcome.findings
    assert recording.files == {}
    assert diagnose_recorded.scores([(recording, outcome)])["timed"] == 1


def test_nothing_of_the_machine_is_in_it(recorded: tuple[Path, Path]) -> None:
    folder, path = recorded
    text = lzma.decompress(path.read_bytes()).decode()
    for hidden in (str(folder), str(Path.home()), platform.node()):
        assert hidden not in text
    assert "/job/train.py" in text


def test_a_job_that_lived_lives_when_it_is_read(recorded: tuple[Path, Path]) -> None:
    recording = diagnose_recorded.load(recorded[1])
    del recording.files[EVENTS]
    started = {"t": 1000.0, "attempt": 1, "kind": "started"}
    recording.files[EVENTS] = diagnose_recorded.RecordedFile(json.dumps(started) + "\n", 1000.0)
    for was_alive, state in ((True, "running"), (False, "killed")):
        with diagnose_recorded.unpacked(msgspec.structs.replace(recording, was_alive=was_alive)) as run:
            assert explain_run(run).state == state


def test_a_recording_that_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(diagnose_recorded, "FOLDER", tmp_path / "recordings")
    monkeypatch.setattr(diagnose_recorded, "MAX_BYTES", 100)
    diagnose_recorded.record(*a_kept_job(tmp_path))
    assert not (tmp_path / "recordings").exists()
    assert "are more than 100; not recorded" in capsys.readouterr().err
