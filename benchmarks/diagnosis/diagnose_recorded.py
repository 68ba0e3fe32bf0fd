"""The diagnosis judged on recorded runs of the programs of other makers: no job runs, and it takes minutes.

    python -m benchmarks diagnose_recorded [--series N] [--only WORD …] [--rows] [--json FILE]
    python -m benchmarks diagnose_recorded --record FOLDER --programs DIR

Each recording is a job of `diagnose_programs.py`, run once on quiet cores: what it is, what is right, and those files
of its run that `stoker why` reads. They are in `recordings/SERIES/`, compressed; `recordings/scores.toml` has the
scores that no change may lower (`tests/test_benchmark_recorded.py`). `--record` makes them of the jobs that
`diagnose_programs --keep` has left in FOLDER; a job that has a recording gets another one. Paths of the machine, its
name and the user's are replaced, and the times of files are kept, as they tell when a job wrote last. The stacks
themselves (`watch_raw.py`) and the job's own source files in them are kept as well, for other readings of stacks.
"""

import argparse
import contextlib
import hashlib
import json
import lzma
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.diagnosis import diagnose_programs as programs
from benchmarks.diagnosis import diagnose_wild as wild
from benchmarks.diagnosis.diagnose_score import NO_ANSWER, NONE
from benchmarks.diagnosis.watch_raw import RAW_STACKS
from benchmarks.diagnosis.wild.job import HEALTHY
from benchmarks.report import Report, commit, options, publish
from stoker_watch.errors import StokerError
from stoker_watch.recording.frames import is_job_file
from stoker_watch.report.explain import explain_run
from stoker_watch.runs.records import locked

FOLDER = Path(__file__).resolve().parent / "recordings"
MAX_BYTES = 60_000
"""Of a recording."""
SUFFIX = ".json.xz"
SCORES = FOLDER / "scores.toml"
FRAMEWORKS = {"torch": "PyTorch", "tf": "TensorFlow and Keras", "jax": "JAX", "hf": "Hugging Face and Lightning"}


class RecordedFile(msgspec.Struct, forbid_unknown_fields=True):
    text: str
    """Bytes that are no UTF-8 are single surrogates."""
    modified_t: float
    """Unix time."""


class Recording(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A job, what is right, and its run."""

    program: str
    fault: str
    way: str
    kind: str
    framework: str
    series: int
    held_back: bool
    accepted: tuple[str, ...]
    places: list[str]
    """The lines that are the fault, "FILE:LINE"."""
    known_s: float | None
    """The lost device-seconds by the job's own clocks."""
    others_cores: float | None
    was_alive: bool
    """Whether the job lived when it was read."""
    recorded_with: str | None
    """The commit; None: not known."""
    files: dict[str, RecordedFile]
    """By their paths in the run's folder."""
    sources: dict[str, str] = {}
    """The job's own source files in its raw stacks: path → text."""

    @property
    def name(self) -> str:
        return f"{self.program}: {self.fault} ({self.way})"

    def outcome(self, findings: tuple[wild.NamedCause, ...]) -> wild.Outcome:
        return wild.Outcome(
            program=self.program, fault=self.fault, way=self.way, accepted=self.accepted, findings=findings,
            known_s=self.known_s, others_cores=self.others_cores,
        )  # fmt: skip


def load(path: Path) -> Recording:
    return msgspec.convert(json.loads(lzma.decompress(path.read_bytes())), Recording)


@contextlib.contextmanager
def unpacked(recording: Recording) -> Iterator[Path]:
    """The run's folder, locked as that of a job that lives where it did."""
    with tempfile.TemporaryDirectory(prefix="stoker-recorded-") as name:
        run = Path(name) / "run"
        for path, file in recording.files.items():
            target = run / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.text.encode(errors="surrogateescape"))
            os.utime(target, (file.modified_t, file.modified_t))
        if recording.was_alive:
            with locked(run):
                yield run
        else:
            yield run


def read(path: Path) -> tuple[Recording, wild.Outcome]:
    """A recording, and what the rules of this checkout answer. An error of theirs is a wrong answer."""
    recording = load(path)
    with unpacked(recording) as run:
        try:
            answer = msgspec.to_builtins(explain_run(run))
        except (StokerError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            print(f"{path.name}: {type(error).__name__}: {error}", file=sys.stderr)
            return recording, recording.outcome((wild.NamedCause(cause=NO_ANSWER, severity="critical"),))
    findings = programs.causes_and_places(answer, wild.named_causes(answer), recording.places)
    return msgspec.structs.replace(recording, files={}), recording.outcome(findings)


def read_all(paths: list[Path]) -> list[tuple[Recording, wild.Outcome]]:
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        return list(pool.map(read, paths, chunksize=4))


def scores(done: list[tuple[Recording, wild.Outcome]]) -> dict[str, int]:
    """How many answers are right."""
    faults = [outcome for _, outcome in done if outcome.fault != HEALTHY]
    healthy = [outcome for _, outcome in done if outcome.fault == HEALTHY]
    timed = [outcome for outcome in faults if outcome.known_s is not None]
    return {
        "faults": len(faults),
        "first": sum(outcome.right for outcome in faults),
        "within_two": sum(outcome.within_two for outcome in faults),
        "healthy": len(healthy),
        "silent": sum(outcome.right for outcome in healthy),
        "timed": len(timed),
        "seconds": sum(map(wild.loss_is_right, timed)),
    }


def by_series(done: list[tuple[Recording, wild.Outcome]]) -> dict[str, dict[str, int]]:
    found = {}
    for series in sorted({recording.series for recording, _ in done}):
        found[str(series)] = scores([one for one in done if one[0].series == series])
    return found


def scores_text(found: dict[str, dict[str, int]]) -> str:
    """`recordings/scores.toml`."""
    lines = ["# Right answers by set: no change of the rules may lower one (tests/test_diagnosis_of_recordings.py)."]
    for series, counts in found.items():
        lines += ["", f"[{series}]", *(f"{name} = {count}" for name, count in counts.items())]
    return "\n".join(lines) + "\n"


def run(arguments: argparse.Namespace) -> Report:
    if arguments.record is not None:
        record_all(arguments.record, arguments.programs.resolve())
    words = [word.lower() for word in arguments.only or ()]
    done = [
        (recording, outcome)
        for recording, outcome in read_all(sorted(FOLDER.glob(f"{arguments.series or '*'}/*{SUFFIX}")))
        if all(word in recording.name.lower() for word in words)
    ]
    report = Report("What `stoker why` says of recorded runs", 1, ("stoker-watch",))
    if arguments.rows:
        report.rows += [row_of(outcome) for _, outcome in done]
    groups = {f"set {series}": of for series, of in by_series(done).items()}
    for framework, label in FRAMEWORKS.items():
        groups[label] = scores([one for one in done if one[0].framework == framework])
    for kind in programs.KINDS:
        groups[kind] = scores([one for one in done if one[0].kind == kind])
    groups["all"] = scores(done)
    if arguments.write_scores:
        SCORES.write_text(scores_text(by_series(done)), encoding="utf-8")
    report.rows += [score_row(name, found) for name, found in groups.items() if found["faults"] + found["healthy"]]
    return report


def row_of(outcome: wild.Outcome) -> dict[str, Any]:
    named = ", ".join(finding.cause for finding in outcome.named[:2]) or NONE
    off = "-" if outcome.loss_error is None else f"{100 * outcome.loss_error:+.0f} %"
    return {
        "what": f"{outcome.program}: {outcome.fault}", "first": "right" if outcome.right else named,
        "seconds": off if outcome.known_s is not None else "",
    }  # fmt: skip


def score_row(name: str, found: dict[str, int]) -> dict[str, Any]:
    return {
        "what": name,
        "first": f"{found['first']} of {found['faults']}",
        "within two": f"{found['within_two']} of {found['faults']}",
        "healthy silent": f"{found['silent']} of {found['healthy']}",
        "seconds within 15 %": f"{found['seconds']} of {found['timed']}",
    }


# Recording


def record_all(folder: Path, programs_folder: Path) -> None:
    """Makes a recording of each job below a folder that could be read, and says of the others why not."""
    table = programs.read_tables()
    sources = [
        programs.Source(program=table.program[case.program], programs=programs_folder, case=case) for case in table.job
    ]
    by_key = {source.job().key: source for source in sources}
    for path in sorted(folder.glob(f"job-*/{wild.OUTCOME}")):
        outcome = msgspec.convert(json.loads(path.read_text()), wild.Outcome)
        source = by_key.get(outcome.key)
        if source is None or outcome.findings is None:
            print(f"{outcome.program}: {outcome.fault}: {outcome.reason or 'in no table'}", file=sys.stderr)
        else:
            record(path.parent, outcome, source)


def record(folder: Path, outcome: wild.Outcome, source: programs.Source) -> None:
    case, program = source.case, source.program
    hidden = {
        str(folder): "/job", str(source.programs): "/programs", str(programs.FOLDER.parents[2]): "/stoker",
        str(Path.home()): "/home/user", platform.node(): "host",
    }  # fmt: skip
    recording = Recording(
        program=case.program, fault=case.fault, way=case.way, kind=case.kind, framework=program.python,
        series=case.series, held_back=case.held_back, accepted=outcome.accepted,
        places=json.loads((folder / programs.PLACES).read_text()), known_s=outcome.known_s,
        others_cores=outcome.others_cores, was_alive=case.read_after is not None, recorded_with=commit(),
        files={
            str(path.relative_to(folder / "run")): RecordedFile(
                hide(path.read_bytes().decode(errors="surrogateescape"), hidden), path.stat().st_mtime
            )
            for path in (*files_read(folder / "run"), *(folder / "run").glob(RAW_STACKS))
        },
        sources={
            hide(path, hidden): hide(Path(path).read_text(encoding="utf-8", errors="replace"), hidden)
            for path in own_files(folder / "run" / RAW_STACKS)
        },
    )  # fmt: skip
    data = lzma.compress(json.dumps(msgspec.to_builtins(recording)).encode(), preset=9 | lzma.PRESET_EXTREME)
    if len(data) > MAX_BYTES:
        print(f"{recording.name}: {len(data):,} bytes are more than {MAX_BYTES:,}; not recorded", file=sys.stderr)
        return
    digest = hashlib.sha256("\n".join(outcome.key).encode()).hexdigest()[:6]
    name = re.sub(r"[\W_]+", "-", f"{case.program}-{case.fault}").lower()[:60].strip("-") + "-" + digest
    target = FOLDER / str(case.series) / f"{name}{SUFFIX}"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)


def hide(text: str, names: dict[str, str]) -> str:
    for name in sorted(names, key=len, reverse=True):
        text = text.replace(name, names[name])
    return text


def own_files(raw_stacks: Path) -> list[str]:
    """The files of the job's own code in the stacks; none where these were not kept."""
    lines = raw_stacks.read_text(encoding="utf-8").splitlines() if raw_stacks.exists() else []
    files = {file for line in lines for _, file, _, _ in json.loads(line)["frames"]}
    return sorted(file for file in files if is_job_file(file) and Path(file).is_file())


def files_read(run: Path) -> list[Path]:
    """The files of a run's folder that `stoker why` opens."""
    opened: set[Path] = set()
    is_listening = True

    def listen(event: str, arguments: tuple[Any, ...]) -> None:
        if is_listening and event == "open" and isinstance(arguments[0], str | os.PathLike):
            opened.add(Path(os.fspath(arguments[0])))

    sys.addaudithook(listen)
    try:
        explain_run(run)
    finally:
        is_listening = False
    return sorted(path for path in opened if path.is_relative_to(run) and path.is_file())


def parser() -> argparse.ArgumentParser:
    made = options(__doc__)
    made.add_argument("--series", type=int, metavar="N", help="only this set")
    made.add_argument("--only", nargs="+", metavar="WORD", help="jobs with all these words in PROGRAM: FAULT (WAY)")
    made.add_argument("--rows", action="store_true", help="also a row for each job")
    made.add_argument(
        "--write-scores", action="store_true", help="make the scores of all sets those that no change may lower"
    )
    made.add_argument("--record", type=Path, metavar="FOLDER", help="first make recordings of the kept jobs in it")
    made.add_argument("--programs", type=Path, metavar="DIR", help="for --record: as of diagnose_programs")
    return made


if __name__ == "__main__":
    publish(run, parser())
