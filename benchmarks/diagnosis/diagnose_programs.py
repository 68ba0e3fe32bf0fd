"""Whether `stoker why` finds the place or the cause of a fault in programs of other makers, which are not kept here.

    python -m benchmarks diagnose_programs --programs DIR [--series N] [--open | --held-back] [--only WORD …]
                                           [--keep] [--json FILE]
    python -m benchmarks diagnose_programs --programs DIR --check
    python -m benchmarks diagnose_programs --programs DIR --read FOLDER

The programs and their jobs are tables, `programs/FRAMEWORK/PROGRAM.toml`; the head of `programs/judging.toml` is the
rule of judging, and says how to get the programs. Each job is a copy of its program in a folder of its own, with the
edits that make it run here and those of its fault, run under `stoker watch`; its data is drawn (`programs/draw.py`).
The rest (faults from outside, clocks, `--partial`, what is n/a) is that of `diagnose_wild.py`. `--check` applies all
edits and runs nothing.
"""

import argparse
import ast
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from benchmarks.diagnosis import diagnose_wild as wild
from benchmarks.diagnosis.diagnose_edits import Changed, Edit
from benchmarks.diagnosis.diagnose_outside import Around, NotPermitted, small_shm
from benchmarks.diagnosis.diagnose_score import NO_ANSWER
from benchmarks.diagnosis.wild import around
from benchmarks.diagnosis.wild.job import HEALTHY, Job
from benchmarks.report import Report, publish

FOLDER = Path(__file__).resolve().parent / "programs"
CLOCK = Path(wild.__file__).parent / "wild" / "clock.py"
FIRST_GOAL = 0.95
PLACES = "places.json"
"""In the folder of a job: the lines that are its fault, "FILE:LINE"."""
PLACE = "the place"
"""Stands for a finding that names one of these lines, whatever its cause."""
STOP = """

import os

CLOCK, _first_s = Lost(), None


def stop() -> None:
    \"\"\"Ends the program, as one that is done, JOB_SECONDS after the first call.\"\"\"
    global _first_s
    _first_s = _first_s or time.monotonic()
    if time.monotonic() - _first_s > float(os.environ["JOB_SECONDS"]):
        raise SystemExit(0)
"""
OUTSIDE: Mapping[str, Callable[..., around.Fault]] = {
    "busy_neighbors": around.busy_neighbors,
    "cpu_quota": around.cpu_quota,
    "memory_limit": lambda mebibytes: around.memory_limit(mebibytes * 2**20),
    "small_disk": lambda name, mebibytes: around.small_disk(name, mebibytes * 2**20),
    "small_shm": lambda mebibytes: lambda _: small_shm(mebibytes * 2**20),
    "slow_files": lambda path, open_s, write_s: around.slow_files(path, open_s=open_s, write_s=write_s),
    "slow_reads": around.slow_reads,
    "file_server": lambda name, bytes_per_s, delay_s: (
        lambda folder: around.http_server(str(folder / name), bytes_per_s=bytes_per_s, delay_s=delay_s)(folder)
    ),
}
"""Faults around a job, by their names in the tables. Names of files and folders are relative to the job's folder."""


class Program(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    repository: str
    commit: str
    license: str
    files: list[str]
    """What is taken of the repository, relative to its root."""
    root: str = "."
    """The folder of the repository that a job gets and runs in."""
    python: str
    """The virtual environment DIR/.venv-NAME."""
    command: str
    """What follows the interpreter."""
    data: str = ""
    """Calls of `programs/draw.py`."""
    with_: dict[str, Any] = msgspec.field(default_factory=dict, name="with")
    """Values for `data`."""
    edits: list[Edit] = msgspec.field(default_factory=list)
    variables: dict[str, str] = msgspec.field(default_factory=dict)


class Case(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One job of the tables."""

    program: str
    kind: str
    """The reason that the fault belongs to, one of KINDS."""
    fault: str
    way: str
    held_back: bool
    series: int = 3
    """The set of jobs that it was written for; their rates are stated apart."""
    truth: str = ""
    """One sentence."""
    places: list[str] = msgspec.field(default_factory=list)
    """The lines that are the fault; the head of judging.toml has their form."""
    causes: list[str] = msgspec.field(default_factory=list)
    edits: list[Edit] = msgspec.field(default_factory=list)
    own_edits: list[tuple[str, str, str]] = msgspec.field(default_factory=list)
    """File, a text that is once in what the program's edits put there, and what comes in its place."""
    add: str = ""
    """Further words of the command."""
    with_: dict[str, Any] = msgspec.field(default_factory=dict, name="with")
    after_data: str = ""
    """Python that runs in the job's folder after its data was drawn."""
    variables: dict[str, str] = msgspec.field(default_factory=dict)
    around: list[Any] = msgspec.field(default_factory=list)
    """Name and values of a fault of OUTSIDE."""
    send: list[Any] = msgspec.field(default_factory=list)
    """Name of a signal, seconds after the start, and to whom (`around.send`)."""
    clock: bool = False
    """The fault writes known.json."""
    seconds: int = 30
    """After so many, the program ends by itself."""
    read_after: int | None = None
    """Of a job that hangs: read after so many seconds."""
    exits: int | Literal["any"] = 0


KINDS = (
    "parallel work", "loading", "model", "memory", "communication", "allocation", "monitoring", "death", HEALTHY
)  # fmt: skip


class Table(msgspec.Struct, forbid_unknown_fields=True):
    program: dict[str, Program] = {}
    job: list[Case] = []


def read_tables() -> Table:
    found = Table()
    for path in sorted(FOLDER.rglob("*.toml")):
        table = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Table)
        if twice := found.program.keys() & table.program.keys():
            raise ValueError(f"{path.name}: {', '.join(sorted(twice))}: another table has a program of this name")
        found.program |= table.program
        found.job += table.job
    return found


@dataclass(frozen=True, kw_only=True)
class Source:
    """A program as it lies in the folder of `--programs`."""

    program: Program
    programs: Path
    case: Case
    edited: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.programs / self.program.repository.replace("/", "+")

    @property
    def python(self) -> Path:
        return self.programs / f".venv-{self.program.python}" / "bin" / "python"

    def check_present(self) -> None:
        missing = [name for name in self.program.files if not (self.folder / name).exists()]
        if missing:
            git = f"git archive {self.program.commit} {' '.join(self.program.files)} | tar x -C {self.folder}"
            raise NotPermitted(f"fetch github:{self.program.repository}, then: {git}")
        if not self.python.exists():
            raise NotPermitted(f"install {self.python.parents[1]}: see {FOLDER.name}/judging.toml")

    def changed(self) -> dict[str, Changed]:
        """The files of edits and places, by name. Raises ValueError where an edit does not fit, SyntaxError."""
        edits = [*self.program.edits, *self.case.edits]
        for name, ours, instead in self.case.own_edits:
            fits = [k for k, edit in enumerate(edits) if edit.file == name and ours in edit.text]
            if len(fits) != 1 or (text := edits[fits[0]].text).count(ours) != 1:
                raise ValueError(f"{name}: {ours!r} is not once in the texts of the edits before it")
            edits[fits[0]] = msgspec.structs.replace(edits[fits[0]], text=text.replace(ours, instead))
        names = {edit.file for edit in edits} | {place.partition(":")[0] for place in self.case.places}
        files = {
            name: Changed(name, (self.folder / self.program.root / name).read_text(encoding="utf-8"),
                          [edit for edit in edits if edit.file == name])
            for name in sorted(names)
        }  # fmt: skip
        for name, file in files.items():
            if name.endswith(".py"):
                ast.parse(file.text, name)
        return files

    def places(self, files: dict[str, Changed]) -> list[str]:
        """The lines of the edited files that are the fault, as "FILE:LINE" without the folders of FILE."""
        found = []
        for place in self.case.places:
            form = re.fullmatch(r"(.+):(\d+)(?:\.(\d+))?(?: \+(\d+))?", place)
            if form is None:
                raise ValueError(f'{place!r} is not FILE:LINE or FILE:LINE.K, with or without " +N" behind it')
            name, number, inserted, more = form.groups()
            line = files[name].line(int(number), int(inserted) if inserted else None)
            found += [f"{Path(name).name}:{line + below}" for below in range(int(more or 0) + 1)]
        return found

    @contextlib.contextmanager
    def prepared(self, folder: Path) -> Iterator[Around]:
        """The copy in the job's folder, with its data, inside the fault from outside."""
        self.check_present()
        shutil.copytree(self.folder / self.program.root, folder, dirs_exist_ok=True, symlinks=True)
        files = self.changed()
        for name, file in files.items():
            (folder / name).write_text(file.text, encoding="utf-8")
        (folder / PLACES).write_text(json.dumps(self.places(files)))
        (folder / "job_clock.py").write_text(CLOCK.read_text(encoding="utf-8") + STOP)
        if self.program.data:
            code, values = self.program.data + "\n" + self.case.after_data, self.program.with_ | self.case.with_
            subprocess.run(
                [str(self.python), str(FOLDER / "draw.py"), code, json.dumps(values)], check=True, cwd=folder,
                capture_output=True, env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""},
            )  # fmt: skip
        with self._outside(folder) as outside:
            yield outside

    def _outside(self, folder: Path) -> AbstractContextManager[Around]:
        if not self.case.around:
            return contextlib.nullcontext(Around())
        name, *values = self.case.around
        return OUTSIDE[name](*values)(folder)

    def job(self) -> Job:
        case = self.case
        send = around.send(signal.Signals[case.send[0]], after_s=case.send[1], to=case.send[2]) if case.send else None
        return Job(
            program=case.program, fault=case.fault, way=case.way, python=str(self.python),
            command=("-u", *shlex.split(self.program.command), *shlex.split(case.add)),
            accepted=() if case.kind == HEALTHY else (*case.causes, *((PLACE,) if case.places else ())),
            variables={"JOB_SECONDS": str(case.seconds), **self.program.variables, **case.variables},
            around=self.prepared, meanwhile=send, read_after_s=case.read_after,
            exits=None if case.exits == "any" else case.exits,
            limit_s=case.seconds + 120.0,
        )  # fmt: skip


class PlaceBench(wild.Bench):
    """Reads places besides causes: what comes above info first, then the list of places, then what is info."""

    def _run(self, job: Job, folder: Path) -> dict[str, Any]:
        """The clock of a job of several ranks is that of one of them; findings count the seconds of all, which wait for
        it."""
        made = super()._run(job, folder)
        if made.get("known_s") is not None:
            made["known_s"] *= json.loads((folder / "why.json").read_text()).get("devices") or 1
        return made

    def _why(self, run: Path, folder: Path) -> tuple[wild.NamedCause, ...]:
        named = super()._why(run, folder)
        if named and named[0].cause == NO_ANSWER:
            return named
        return causes_and_places(
            json.loads((folder / "why.json").read_text()), named, json.loads((folder / PLACES).read_text())
        )


def causes_and_places(
    answer: dict[str, Any], named: tuple[wild.NamedCause, ...], places: list[str]
) -> tuple[wild.NamedCause, ...]:
    """What counts, in its order. answer: of `stoker why --json`; named: the causes of its findings; places: the lines
    that are the fault, as "FILE:LINE"."""
    found = [
        wild.NamedCause(cause=PLACE, severity=cause.severity, lost_s=cause.lost_s)
        if names_place(finding, places)
        else cause
        for cause, finding in zip(named, answer["findings"], strict=True)
        if not names_clock(str(finding.get("place") or ""))
    ]
    shown = [
        wild.NamedCause(
            cause=PLACE if names_place(entry, places) else f"place {line_of(entry)}", severity="info",
            lost_s=entry.get("seconds"),
        )
        for entry in answer.get("places") or ()
        if not names_clock(line_of(entry))
    ]  # fmt: skip
    grave = [cause for cause in found if cause.severity != "info"]
    return (*grave, *shown, *(cause for cause in found if cause.severity == "info"))


def names_place(part: Any, places: list[str]) -> bool:
    """Whether a part of the answer has one of the lines in a text of it."""
    text = json.dumps(part, ensure_ascii=False)
    return any(re.search(rf"(?<![\w.-]){re.escape(place)}(?!\d)", text) for place in places)


def names_clock(place: str) -> bool:
    """Whether a place is the benchmark's own end of a step, where JAX waits for what was started before."""
    return place.rpartition("/")[2].startswith("job_clock.py:")


def line_of(entry: dict[str, Any]) -> str:
    return str(entry.get("line", "?")).rpartition("/")[2]


def chosen(arguments: argparse.Namespace) -> list[Source]:
    table = read_tables()
    sources = [
        Source(program=table.program[case.program], programs=arguments.programs.resolve(), case=case)
        for case in table.job
        if (not arguments.held_back or case.held_back)
        and (not arguments.open or not case.held_back)
        and arguments.series in (None, case.series)
        and (not arguments.healthy_only or case.kind == HEALTHY)
    ]
    words = [word.lower() for word in arguments.only or ()]
    return [source for source in sources if all(word in source.job().name.lower() for word in words)]


def check(sources: list[Source]) -> int:
    """Applies all edits, and prints what does not fit; the number of these jobs."""
    wrong = 0
    for source in sources:
        try:
            source.check_present()
            source.places(source.changed())
        except (NotPermitted, ValueError, SyntaxError, OSError) as error:
            wrong += 1
            print(f"{source.job().name}: {error}")
    print(f"{len(sources) - wrong} of {len(sources)} jobs fit their programs")
    return wrong


def run(arguments: argparse.Namespace) -> Report:
    sources = chosen(arguments)
    if arguments.check:
        sys.exit(min(1, check(sources)))
    jobs = {source.job().key: source.job() for source in sources}
    if arguments.read is None:
        done = wild.measure(arguments, jobs, PlaceBench)
    else:
        done = wild.read_kept(PlaceBench(arguments.read, arguments.stoker.resolve(), keep=True), jobs)
    catalog = wild.catalog_of(arguments.stoker.resolve())
    title = f"Places and causes named by `stoker why` in programs of other makers; catalog {catalog}"
    report = Report(title, 1, ("torch", "stoker"))
    report.rows = wild.rows_of(done) + kinds(done, sources)
    group_of = {source.job().key: (source.case.series, source.case.held_back) for source in sources}
    for series, hidden in sorted(set(group_of.values())):
        among = f"series {series}, {'held back' if hidden else 'open'}: "
        wild.add_goals(
            report, [o for o in done if group_of[o.key] == (series, hidden)], among=among, first_goal=FIRST_GOAL
        )
    return report


def kinds(done: list[wild.Outcome], sources: list[Source]) -> list[dict[str, Any]]:
    """A row for each reason."""
    kind_of = {source.job().key: source.case.kind for source in sources}
    rows = []
    for kind in KINDS:
        made = [o for o in done if kind_of[o.key] == kind and o.findings is not None]
        if made:
            rows.append(wild.share(f"kind: {kind}", sum(o.right for o in made), len(made)))
    return rows


def parser() -> argparse.ArgumentParser:
    made = wild.parser(__doc__)
    made.add_argument("--programs", type=Path, required=True, metavar="DIR", help="the programs, and their Pythons")
    made.add_argument("--check", action="store_true", help="apply all edits, run nothing")
    made.add_argument("--series", type=int, metavar="N", help="only the jobs of this set (`series` in the tables)")
    group = made.add_mutually_exclusive_group()
    group.add_argument("--held-back", action="store_true", help="only jobs that rules may not be adapted to")
    group.add_argument("--open", action="store_true", help="only the other half")
    return made


if __name__ == "__main__":
    publish(run, parser())
