"""The run folder: its documentation, and what it survives. Real files, real processes, a real full disk."""

import ast
import contextlib
import errno
import inspect
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker_watch.diagnosis.reader import read_run
from stoker_watch.errors import UsageError
from stoker_watch.findings.finding import Evidence, Finding
from stoker_watch.knowledge import read_toml
from stoker_watch.recording.telemetry.environment import describe
from stoker_watch.report import compare, explain, run_report, runs_summary
from stoker_watch.runs import evaluation, records, schemas
from stoker_watch.runs.records import (
    EVENTS,
    STEPS,
    RunFolder,
    is_finished,
    last_attempt,
    locked,
    open_run,
    read_lines,
    runs_named,
)
from stoker_watch.runs.schemas import Event, StepWindow
from stoker_watch.storage.local_files import write_atomic

PAGE = Path(__file__).parents[3] / "docs/run-folder.md"
MEANINGS: dict[str, dict[str, str]] = read_toml("run-folder.toml", PAGE.parent)
"""Struct → field → its meaning."""
HEAD = "\n## Records\n"
DOCUMENT = PAGE.read_text().partition(HEAD)[0]
FILES = {
    "steps.jsonl": [schemas.StepWindow],
    "devices.jsonl": [schemas.DeviceSample, schemas.GpuSample],
    "traces.jsonl": [schemas.TraceWindow, schemas.Gap],
    "stacks.jsonl": [schemas.StackWindow, schemas.Place],
    "probes.jsonl": [schemas.Probe],
    "events.jsonl": [schemas.Event, schemas.Holder],
    "quarantine.jsonl": [schemas.Quarantined],
    "findings.json": [Finding, Evidence],
    "evaluation.json": [
        evaluation.Evaluation, evaluation.Metrics, evaluation.ClassMetrics, evaluation.Curves,
        evaluation.ClassEvaluation, evaluation.ConfusionPair, evaluation.ConfusionMatrix, evaluation.ImageEvaluation,
        evaluation.GroundTruthBox, evaluation.DetectionBox,
    ],
    "evaluation-images.json": [evaluation.Thumbnails, evaluation.Thumbnail],
    "stoker why RUN --json": [explain.RunExplanation, explain.PhaseTime],
    "stoker why LOG --json": [explain.LogExplanation],
    "stoker compare RUN RUN2 --json": [compare.Comparison, compare.PhaseChange, compare.Change, compare.SpeedRatio],
    "stoker report RUN --json": [run_report.RunReport, run_report.Setting, run_report.EvalResult, run_report.Restart],
    "stoker why --all FOLDER --json": [
        runs_summary.RunsSummary, runs_summary.Aggregate, runs_summary.CauseCost, runs_summary.RunSummary,
        runs_summary.FailureCount, runs_summary.UnreadableRun,
    ],
}  # fmt: skip
"""File, or command that prints it → the structs of its records, the outermost first."""
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's limits and signals")


def documented(start: str) -> list[str]:
    """First column of the first table after `start`."""
    assert DOCUMENT.count(start) == 1, f"{start!r} must be in docs/run-folder.md once"
    rows: list[str] = []
    for line in DOCUMENT.partition(start)[2].splitlines():
        if line.startswith("| `"):
            rows.append(line.split("`")[1])
        elif rows:
            break
    return rows


def fields(kind: type[msgspec.Struct]) -> list[tuple[str, str, str]]:
    """(name, type, meaning) of each field: type from the source, meaning from docs/run-folder.toml or a docstring."""
    rows: list[list[str]] = []
    for own in (own for own in reversed(kind.__mro__) if own.__module__.startswith("stoker_watch.")):
        (body,) = ast.parse(inspect.getsource(own)).body
        assert isinstance(body, ast.ClassDef)
        for statement in body.body[1:]:  # after its docstring
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                name, written = statement.target.id, ast.unparse(statement.annotation)
                meaning = MEANINGS.get(own.__name__, {}).get(name, "")
                rows.append([name, written.replace(" | None", "").replace("'", ""), meaning])
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and rows:
                rows[-1][2] = " ".join(str(statement.value.value).split())
    names = dict(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))
    return [(names[name], written, meaning) for name, written, meaning in rows]


def records_section() -> str:
    """The section of docs/run-folder.md with every record and its fields."""
    lines = [
        HEAD,
        "The fields of every record of a run, and of what commands print with `--json`, generated from",
        "`stoker_watch/runs/schemas.py`, `stoker_watch/report/`,",
        "`stoker_watch/runs/evaluation.py`, `docs/run-folder.toml` and",
        "`stoker_watch/findings/finding.py` by",
        "`python -m tests.watch.runs.test_records`. What the files are for, and what phases, events and errors mean,",
        "is above. A field that is not measured is absent from its line.",
        "`Count`: a whole number of at least 0. `Whole`: a whole number. `Amount`: a number of at least 0.",
        "`Number` and `Finite`: a number, at most 1e15 and 1e300. `Role`: one of the texts that its field names.",
    ]
    for file, kinds in FILES.items():
        lines += ["", f"### `{file}`"]
        for kind in kinds:
            lines += ["", f"`{kind.__name__}`: {' '.join(str(inspect.getdoc(kind)).split())}", ""]
            lines += ["| field | type | meaning |", "|---|---|---|"]
            lines += [f"| `{name}` | {written.replace('|', 'or')} | {text} |" for name, written, text in fields(kind)]
    return "\n".join(lines) + "\n"


# --- the documentation --------------------------------------------------------------------------------------------


def test_the_section_of_records_is_current() -> None:
    assert PAGE.read_text().endswith(records_section()), "python -m tests.watch.runs.test_records writes it"
    kinds = {kind for kind in vars(schemas).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)}
    assert kinds - {msgspec.Struct, schemas.Record} <= {kind for kinds in FILES.values() for kind in kinds}


def test_every_meaning_is_that_of_a_field() -> None:
    structs = {
        name: value
        for module in (schemas, evaluation, explain, compare, run_report, runs_summary)
        for name, value in vars(module).items()
    }
    for name, meanings in MEANINGS.items():
        assert set(meanings) <= set(structs[name].__struct_fields__)


def test_every_field_has_a_meaning() -> None:
    without = [
        f"{k.__name__}.{name}" for kinds in FILES.values() for k in kinds for name, _, text in fields(k) if not text
    ]
    assert without == []


def test_every_phase_is_documented_in_its_order() -> None:
    assert documented("## Phases") == list(records.PHASES)


def test_every_kind_of_event_is_documented() -> None:
    assert documented("| kind | when |") == list(records.EVENT_KINDS)


def test_every_key_of_the_environment_is_documented() -> None:
    assert documented("\n## `environment.json`") == list(describe())


def test_every_file_is_documented() -> None:
    files = {name.partition("/")[0] for name in documented("| file | content | written |")}
    names = {value for name, value in vars(records).items() if name.isupper() and isinstance(value, str)}
    assert names <= files
    assert files - names == {"tensorboard", ".lock", "launch.log", "nccl_trace"}


# --- lines --------------------------------------------------------------------------------------------------------

events = st.builds(
    Event,
    t=st.floats(0, 2e9),
    attempt=st.integers(1, 99),
    kind=st.sampled_from(records.EVENT_KINDS),
    step=st.none() | st.integers(0, 10**9),
    text=st.text(max_size=20),
    data=st.dictionaries(st.text(max_size=5), st.integers(-(2**53), 2**53) | st.text(max_size=5), max_size=3),
)


def window(**changes: Any) -> StepWindow:
    filled = {
        "t": 1.0, "attempt": 1, "step": 10, "window_steps": 10, "num_images": 80, "wall_s": 2.0, "devices": 1,
        "phases": {"compute": 1.5, "input_wait": 0.5},
    } | changes  # fmt: skip
    return StepWindow(**filled)


@contextlib.contextmanager
def run_folder(path: Path, attempt: int = 1) -> Iterator[RunFolder]:
    folder = RunFolder(path, attempt)
    try:
        yield folder
    finally:
        folder.close()


@settings(deadline=None)
@given(written=st.lists(events, max_size=4), more=events, share=st.floats(0, 1))
def test_a_file_cut_anywhere_reads_as_its_whole_lines_and_goes_on(
    tmp_path_factory: pytest.TempPathFactory, written: list[Event], more: Event, share: float
) -> None:
    path = tmp_path_factory.mktemp("run")
    with run_folder(path) as folder:
        for event in written:
            folder.append(EVENTS, event)
        whole = (path / EVENTS).read_bytes() if written else b""
    cut = int(share * len(whole))
    (path / EVENTS).write_bytes(whole[:cut])

    lines = whole.split(b"\n")[:-1]
    ends = [sum(len(line) + 1 for line in lines[: n + 1]) - 1 for n in range(len(lines))]  # without the line's end
    kept = written[: sum(end <= cut for end in ends)]
    assert list(read_lines(path, EVENTS, Event)) == kept

    with run_folder(path) as folder:
        folder.append(EVENTS, more)
        folder.append(EVENTS, more)
    assert list(read_lines(path, EVENTS, Event)) == [*kept, more, more]


@pytest.mark.parametrize("cut", [1, 40, -1])
def test_a_line_that_is_written_while_it_is_read_is_left_for_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    """The reader met the end in the middle of a line; what comes behind it may look like JSON of its own."""
    lines = [msgspec.json.encode(window(step=step)) + b"\n" for step in range(3)]
    (tmp_path / STEPS).write_bytes(b"".join(lines))
    seen = [lines[0], lines[1][:cut], b'"step":1}\n', lines[2]]
    file = type("File", (), {"readline": lambda *_: seen.pop(0) if seen else b""})()
    monkeypatch.setattr(records, "_open_records", lambda _: contextlib.nullcontext(file))
    assert [line.step for line in read_lines(tmp_path, STEPS, StepWindow)] == ([0, 1] if cut == -1 else [0])


def test_a_file_that_is_absent_has_no_lines(tmp_path: Path) -> None:
    assert list(read_lines(tmp_path, STEPS, StepWindow)) == []


def test_a_line_of_another_schema_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / STEPS).write_text('{"t": 1}\n')
    with pytest.raises(UsageError) as caught:
        list(read_lines(tmp_path, STEPS, StepWindow))
    assert str(caught.value.location).endswith("steps.jsonl:1")
    assert "attempt" in str(caught.value)


def test_fields_that_a_later_version_adds_are_passed_over(tmp_path: Path) -> None:
    line = msgspec.json.encode(window())
    (tmp_path / STEPS).write_bytes(line[:-1] + b',"new":1}\n')
    assert list(read_lines(tmp_path, STEPS, StepWindow)) == [window()]


WRITE_MANY = """
import sys, pathlib
from stoker_watch.runs.records import RunFolder
folder = RunFolder(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
for step in range(2000):
    folder.event("note", "x" * (step % 500), step=step)
"""


def test_lines_of_two_processes_never_mix(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITE_MANY, str(tmp_path), str(n)]) for n in (1, 2)]
    assert [writer.wait() for writer in writers] == [0, 0]
    # The second to open the file can see half of a line that the first is writing (the kernel writes page by page), and
    # ends it as it ends the line of a killed process: this leaves a blank line, which readers pass over.
    lines = [line for line in (tmp_path / EVENTS).read_bytes().splitlines() if line]
    read = list(read_lines(tmp_path, EVENTS, Event))
    assert len(lines) == len(read) == 4000
    for attempt in (1, 2):
        assert [event.step for event in read if event.attempt == attempt] == list(range(2000))


FULL_DISK = """
import resource, signal, sys, pathlib
from stoker_watch.runs.records import RunFolder
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = RunFolder(pathlib.Path(sys.argv[1]), 1)
for step in range(5):
    folder.event("note", "y" * 100, step=step)
size = (folder.path / "events.jsonl").stat().st_size
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, hard))
for step in range(5, 8):
    folder.event("note", "y" * 100, step=step)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
folder.event("note", "room again", step=8)
"""


@linux
def test_lines_that_a_full_disk_refuses_are_counted_and_said(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], check=True)
    read = list(read_lines(tmp_path, EVENTS, Event))
    assert [event.step for event in read] == [0, 1, 2, 3, 4, 8, None]
    assert (read[-1].kind, read[-1].data) == ("warning", {"lines": 3, "storage": True})


def test_a_folder_that_cannot_be_written_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RunFolder(tmp_path / "absent", 1).event("started")


# --- whole files --------------------------------------------------------------------------------------------------

REPLACE_FOR_EVER = """
import sys, pathlib
from stoker_watch.storage.local_files import write_atomic
target = pathlib.Path(sys.argv[1])
n = 0
while True:
    n += 1
    write_atomic(target, b"%10d" % n * 300_000)
    print(n, flush=True)
"""


@linux
@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_file_is_old_or_new_after_a_kill(tmp_path: Path, after: int) -> None:
    target = tmp_path / "findings.json"
    with subprocess.Popen(
        [sys.executable, "-c", REPLACE_FOR_EVER, str(target)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        for _ in range(after):
            writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
    found = target.read_bytes()
    assert len(found) == 3_000_000
    assert found == found[:10] * 300_000
    assert int(found[:10]) >= after


def test_a_file_is_replaced_not_overwritten(tmp_path: Path) -> None:
    """Whoever has the old file open reads it to its end."""
    target = tmp_path / "findings.json"
    write_atomic(target, b"old")
    with target.open("rb") as reader:
        write_atomic(target, b"new")
        assert reader.read() == b"old"
    assert target.read_bytes() == b"new"


@linux
def test_a_file_stays_the_old_one_on_a_full_disk(tmp_path: Path) -> None:
    target = tmp_path / "config.toml"
    write_atomic(target, b"old")
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError) as caught:  # noqa: PT011 (the number says which)
            write_atomic(target, b"new" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert caught.value.errno == errno.EFBIG
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["config.toml"], "no temporary file is left"


# --- a run among runs ---------------------------------------------------------------------------------------------

HOLD = """
import sys, pathlib
from stoker_watch.runs.records import locked
with locked(pathlib.Path(sys.argv[1])) as held:
    print(held, flush=True)
    sys.stdin.read()
"""


@linux
def test_one_process_holds_a_run_and_a_kill_frees_it(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        with locked(tmp_path) as held:
            assert not held
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with locked(tmp_path) as held:
            assert held
    with locked(tmp_path) as held:
        assert held, "and the end of the block frees it too"


def test_runs_of_a_name_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    numbers = [9, 2, 10, 1, 30, 4, 100, 3, 7, 20]
    for name in (*(f"bccd-tiny-{number}" for number in numbers), "bccd-tiny-two", "bccd-tiny-x-3", "cars-tiny-1"):
        (tmp_path / name).mkdir()
    (tmp_path / "bccd-tiny-11").touch()
    assert [path.name for path in runs_named(tmp_path, "bccd-tiny")] == [f"bccd-tiny-{n}" for n in sorted(numbers)]
    assert runs_named(tmp_path / "absent", "bccd-tiny") == []


def test_open_run_lists_the_runs_beside_a_wrong_name(tmp_path: Path) -> None:
    run = tmp_path / "demo-tiny-1"
    run.mkdir()
    (tmp_path / "empty").mkdir()
    with run_folder(run) as folder:
        folder.event("started")
    assert open_run(str(run)) == run
    for wrong in ("demo-tiny-2", "empty"):
        with pytest.raises(UsageError) as caught:
            open_run(tmp_path / wrong)
        assert caught.value.choices == (str(run),)


def test_attempts_and_the_end_are_read_from_the_events(tmp_path: Path) -> None:
    assert (last_attempt(tmp_path), is_finished(tmp_path)) == (0, False)
    for attempt, last in ((1, "preempted"), (2, "finished")):
        with run_folder(tmp_path, attempt) as folder:
            folder.event("started")
            assert not is_finished(tmp_path)
            folder.event(last)
    assert (last_attempt(tmp_path), is_finished(tmp_path)) == (2, True)


def test_totals_count_all_time_of_all_attempts(tmp_path: Path) -> None:
    nothing = read_run(tmp_path).totals
    assert (nothing.phases, nothing.device_s, nothing.attempts) == ({}, 0.0, 0)
    with run_folder(tmp_path) as folder:
        folder.event("started")
        folder.append(STEPS, window(step=10, window_steps=10))
        folder.append(STEPS, window(step=20, window_steps=10))
    with run_folder(tmp_path, 2) as folder:
        folder.event("resumed")
        again = {"recovery": 4.0, "eval": 2.0}
        folder.append(
            STEPS, window(attempt=2, step=15, window_steps=5, num_images=40, wall_s=3.0, devices=2, phases=again)
        )
    found = read_run(tmp_path).totals
    assert found.phases == {"compute": 3.0, "input_wait": 1.0, "recovery": 4.0, "eval": 2.0}
    assert sum(found.phases.values()) == found.device_s == 2.0 + 2.0 + 6.0
    assert (found.wall_s, found.devices, found.attempts) == (7.0, 2, 2)
    assert (found.steps, found.step, found.num_images) == (25, 15, 200)


def test_records_are_read_where_torch_is_absent() -> None:
    code = "import sys; sys.modules['torch'] = None; import stoker_watch.runs.records"
    subprocess.run([sys.executable, "-c", code], check=True)


if __name__ == "__main__":
    PAGE.write_text(DOCUMENT + records_section())


def test_a_huge_text_is_neither_stored_nor_loaded_whole(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, 1)
    folder.event("failed", "first " + "x" * 10**6 + " last", nested={"texts": ["y" * 10**5]})
    folder.event("info", "many", items=[f"{n:060}" for n in range(20_000)])
    folder.event("info", "a name that is not UTF-8: \udcff", name="\udcff")
    folder.close()
    assert (tmp_path / EVENTS).stat().st_size < 100_000
    failed, many, name = read_lines(tmp_path, EVENTS, Event)
    assert len(failed.text) <= records.MAX_TEXT_CHARS
    assert failed.text.startswith("first xx")
    assert failed.text.endswith("xx last")
    assert "characters left out" in failed.text
    assert len(failed.data["nested"]["texts"][0]) <= records.MAX_TEXT_CHARS
    assert many.data["left_out_bytes"] > 10**6
    assert name.data["name"] == "\\udcff"


@pytest.mark.parametrize("text", ["x" * 10**7, "\u00e9\\" * 10**6, '"\n\x01' * 10**6, "short"])
def test_a_huge_event_of_an_older_version_is_read_without_its_data(tmp_path: Path, text: str) -> None:
    lines = [
        Event(t=1.5e9, attempt=1, kind="started"),
        Event(t=1.5e9, attempt=1, kind="failed", step=3, text=text, data={"more": "z" * 10**7}),
        Event(t=1.6e9, attempt=2, kind="resumed", text="next"),
    ]
    (tmp_path / EVENTS).write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    peak = []
    for event in read_lines(tmp_path, EVENTS, Event):
        peak.append((event.kind, event.step, len(event.text) < 20_000, event.data))
        assert text.startswith(event.text) or event.kind == "resumed"
    assert peak == [("started", None, True, {}), ("failed", 3, True, {}), ("resumed", None, True, {})]
    (tmp_path / STEPS).write_bytes(b"[" + b"1," * 5 * 10**6 + b"1]\n")
    with pytest.raises(UsageError, match="too long"):
        list(read_lines(tmp_path, STEPS, StepWindow))


@linux
def test_files_that_hold_commands_and_variables_are_private(tmp_path: Path) -> None:
    """Whatever the umask."""
    before = os.umask(0)
    try:
        with records.recording(tmp_path, {"argv": ["x"]}, "x", fix="x") as (folder, _):
            zeros: dict[str, Any] = dict.fromkeys(("t", "step", "window_steps", "num_images", "wall_s"), 0)
            folder.append(STEPS, StepWindow(attempt=1, devices=1, phases={}, **zeros))
    finally:
        os.umask(before)
    modes = {name: (tmp_path / name).stat().st_mode & 0o777 for name in (EVENTS, "environment.json", STEPS)}
    assert modes == {EVENTS: 0o600, "environment.json": 0o600, STEPS: 0o644}
