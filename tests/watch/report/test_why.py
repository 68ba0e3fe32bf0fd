"""`stoker why`: printed text, JSON, and the state of a run."""

import io
import json
from pathlib import Path

import msgspec
import pytest

from stoker_watch.diagnosis.engine import diagnose
from stoker_watch.errors import UsageError
from stoker_watch.findings.finding import Evidence, Finding
from stoker_watch.report import format as fmt
from stoker_watch.report.console import print_renderables
from stoker_watch.report.explain import (
    PHASE_MEANINGS,
    PROBE_LABELS,
    STAGE_MEANINGS,
    RunExplanation,
    explain_run,
    print_explanation,
)
from stoker_watch.report.findings_terminal import finding_lines
from stoker_watch.report.run_report import collect
from stoker_watch.report.runs_summary import summarize_runs
from stoker_watch.runs.records import (
    CONFIG,
    ENVIRONMENT,
    INPUT_STAGES,
    PHASES,
    PROBES,
    STEPS,
    RunFolder,
    locked,
)
from stoker_watch.runs.schemas import PROBE_KINDS, Probe, StepWindow
from tests.watch.report.runs import write_run

STEP = msgspec.json.encode(StepWindow(t=10.0, attempt=1, step=1, window_steps=1, num_images=4, wall_s=10.0, devices=1,
                                      phases={"compute": 8.0, "idle": 2.0})) + b"\n"  # fmt: skip


def make_run(path: Path, *, price: float = 0.0, end: str | None = None, attempts: int = 1) -> Path:
    """1,000 s on 2 devices per attempt; each restart repeats 10 of 100 steps."""
    path.mkdir()
    step = 0
    for attempt in range(1, attempts + 1):
        folder = RunFolder(path, attempt)
        folder.event("started" if attempt == 1 else "resumed")
        step += 100 if attempt == 1 else 90
        phases = {"compute": 1500.0, "input_wait": 440.0, "startup": 50.0, "recovery": 10.0}
        folder.append(STEPS, StepWindow(t=1.0, attempt=attempt, step=step, window_steps=100, num_images=16000,
                                        wall_s=1000.0, devices=2, phases=phases))  # fmt: skip
        folder.close()
    if end is not None:
        folder.event(end, "the message\n  fix: more")
        folder.close()
    (path / CONFIG).write_text(f"[run]\nprice_per_device_hour = {price}\n")
    return path


def printed(run: Path, price: float | None = None) -> str:
    return text_of(explain_run(run, price))


def text_of(explanation: RunExplanation) -> str:
    file = io.StringIO()
    print_explanation(explanation, file)
    return file.getvalue()


def finding(number: int = 1) -> Finding:
    """A fixed finding."""
    return Finding(id=f"cause_{number}", severity="critical", title=f"Cause {number}", lost_device_s=880.0,
                   evidence=[Evidence(text="a number", value=1.0, source="steps.jsonl: phases")], fix="do it",
                   command="--cache disk", confidence=0.8, probe_result="10 → 16 img/s")  # fmt: skip


def test_the_printed_explanation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(Path("cars-1"), price=3.6, end="finished", attempts=2)
    explanation = msgspec.structs.replace(explain_run("cars-1"), findings=[finding()])
    assert (
        text_of(explanation)
        == """\
run    cars-1
state  finished: the message
time   33 min 20 s on 2 devices, 1 restart, 10 steps repeated
work   190 steps, 32,000 images, 16 img/s on average

phase       device time  fraction  cost
compute     50 min 00 s      75 %  3.00  optimizer steps ran
input_wait  14 min 40 s      22 %  0.88  the training waited for input
startup      1 min 40 s     2.5 %  0.10  imports, weights, data, until the first step
recovery           20 s     0.5 %  0.02  steps that a restart lost were repeated
total        1 h 06 min     100 %  4.00

Optimizer steps took 75 % of the time. Most time was lost in input_wait: 14 min 40 s, \
22 %, cost 0.88 (the training waited for input).
Goodput: productive 75 %, data_loading_sync 22 %, program_startup 2.5 %, wasted_progress_from_disruption 0.5 %

critical Cause 1 (14 min 40 s lost, cost 0.88)
         a number  [steps.jsonl: phases]
         fix: do it (--cache disk)
         confidence: 80 %
         verified: 10 → 16 img/s

evidence: steps.jsonl, events.jsonl, config.toml in cars-1
`stoker why --explain ID` explains: cause_1
"""
    )


def test_a_longer_start_is_said_beside_the_largest_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is named after the start, which the table shows first."""
    monkeypatch.setattr("stoker_watch.diagnosis.engine.run_rules", lambda _: [finding()])
    folder = RunFolder(tmp_path, 1)
    folder.event("started")
    folder.append(STEPS, StepWindow(t=1.0, attempt=1, step=1, window_steps=1, num_images=1, wall_s=31.8, devices=1,
                                    phases={"compute": 10.0, "startup": 19.0, "eval": 2.8}))  # fmt: skip
    folder.close()
    assert explain_run(tmp_path).verdict().startswith("Besides startup (19 s), most time was lost in eval: 2.8 s, ")


def test_the_stages_of_input_wait(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, 1)
    folder.event("started")
    for _ in range(2):
        folder.append(STEPS, StepWindow(t=1.0, attempt=1, step=1, window_steps=1, num_images=1, wall_s=100.0, devices=1,
                                        phases={"compute": 60.0, "input_wait": 40.0},
                                        input_wait_stages={"queue": 8.0, "fetch": 32.0}))  # fmt: skip
    folder.close()
    lines = printed(tmp_path).splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("input_wait"))
    table = lines[at : at + 3]
    assert [" ".join(line.split()) for line in table] == [
        "input_wait 1 min 20 s 40 % the training waited for input",
        "fetch 1 min 04 s 32 % reading bytes from the disk or the bucket",
        "queue 16 s 8.0 % handing over the batch",
    ]
    assert table[1].startswith("  fetch")
    waited = next(row for row in msgspec.to_builtins(explain_run(tmp_path))["phases"] if row["phase"] == "input_wait")
    assert sum(part["device_s"] for part in waited["stages"]) == waited["device_s"]
    assert set(STAGE_MEANINGS) == set(INPUT_STAGES)


def test_no_cost_without_a_price_and_a_given_price_wins(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", end="finished")
    assert "  cost" not in printed(run)
    assert "2.00" in printed(run, price=3.6).split("total")[1].splitlines()[0]


def test_the_price_of_a_measured_run_is_in_its_first_event(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    folder = RunFolder(tmp_path / "a", 1)
    folder.event("started", measured=True, price_per_device_hour=7.2)
    folder.append(STEPS, StepWindow(t=1.0, attempt=1, step=1, window_steps=1, num_images=0, wall_s=1000.0, devices=2,
                                    phases={"compute": 1000.0, "input_wait": 1000.0}))  # fmt: skip
    folder.event("finished", "done")
    folder.close()
    result = explain_run(tmp_path / "a")
    assert result.price_per_device_hour == 7.2
    assert summarize_runs(tmp_path).cost.low == pytest.approx(2000 * 7.2 / 3600)
    assert [finding.lost_cost for finding in result.findings] == [pytest.approx(2.0)]
    assert [finding.lost_cost for finding in diagnose(tmp_path / "a")] == [pytest.approx(2.0)]


def test_a_run_that_failed_at_the_start(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, 1)
    folder.event("started")
    folder.event("failed", "The image cannot be decoded.")
    folder.close()
    text = printed(tmp_path)
    assert "state  failed: The image cannot be decoded." in text
    assert "No time is recorded yet" in text
    assert "  The image cannot be decoded.  [events.jsonl:2]" in text
    assert explain_run(tmp_path).productive_fraction is None


def test_the_state_of_a_run(tmp_path: Path) -> None:
    for end in ("finished", "preempted", "failed"):
        assert explain_run(make_run(tmp_path / end, end=end)).state == end
    run = make_run(tmp_path / "killed")
    assert explain_run(run).state == "killed"
    assert explain_run(run).state_text.endswith(f"; `stoker train --resume {run}` continues it")
    with locked(run) as is_locked:
        assert is_locked
        assert explain_run(run).state == "running"
    assert explain_run(run).state == "killed"


def test_the_newest_attempt_decides_the_state(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", end="preempted")
    again = RunFolder(run, 2)
    again.event("resumed")
    again.close()
    assert explain_run(run).state == "killed"


def test_a_run_whose_lock_cannot_be_checked(tmp_path: Path) -> None:
    """As on a read-only copy; a folder in its place fails for root too."""
    run = make_run(tmp_path / "run")
    (run / ".lock").mkdir()
    assert explain_run(run).state == "unknown"


def test_reading_changes_no_file(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    before = sorted(path.name for path in run.iterdir())
    explain_run(run)
    assert sorted(path.name for path in run.iterdir()) == before


def test_the_fractions_in_the_json_add_up(tmp_path: Path) -> None:
    explanation = msgspec.to_builtins(
        explain_run(make_run(tmp_path / "run", end="finished", attempts=2), price_per_device_hour=1.0)
    )
    assert json.loads(json.dumps(explanation)) == explanation
    assert sum(row["fraction"] for row in explanation["phases"]) == pytest.approx(1.0)
    assert (
        sum(row["device_s"] for row in explanation["phases"])
        == pytest.approx(explanation["device_s"])
        == pytest.approx(4000.0)
    )
    assert explanation["largest_loss"]["phase"] == "input_wait"
    assert (explanation["steps"], explanation["lost_steps"], explanation["attempts"]) == (190, 10, 2)
    assert explanation["findings"][0]["cause"] == "input_bound"
    assert explanation["last_event"]["kind"] == "finished"
    assert set(explanation["evidence_paths"]) == {"steps.jsonl", "events.jsonl", "config.toml"}


def test_every_phase_has_a_meaning() -> None:
    assert set(PHASE_MEANINGS) == set(PHASES)


def test_at_most_five_findings_are_printed_and_the_rest_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    explanation = explain_run(make_run(Path("run"), end="finished"))
    for count, message in ((5, None), (6, "1 more: stoker why run --json"), (8, "3 more: stoker why run --json")):
        text = text_of(msgspec.structs.replace(explanation, findings=[finding(number) for number in range(count)]))
        assert text.count("critical Cause") == 5
        assert ("more:" in text) == (message is not None)
        assert (message or "") in text
    assert "The diagnosis found nothing else" in text_of(msgspec.structs.replace(explanation, findings=[]))


def test_a_finding_has_its_command_once_and_wrapped_lines_are_indented() -> None:
    long = Evidence(text="something was measured " * 9, source="steps.jsonl: phases")
    result = msgspec.structs.replace(finding(), evidence=[long], fix="put --cache disk behind it")
    file = io.StringIO()
    print_renderables(finding_lines(result), file, width=80)
    title, *below = file.getvalue().splitlines()
    assert title.startswith("critical Cause 1")
    assert len(below) > 4
    assert all(line.startswith(" " * 9) and len(line) <= 80 for line in below)
    assert file.getvalue().count("--cache disk") == 1


def test_the_list_price_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(Path("run"), end="finished")
    environment = {"machine_type": "g4dn.xlarge", "gpu": {"gpus": [{"name": "Tesla T4"}]}}
    (run / ENVIRONMENT).write_text(json.dumps(environment))
    text = printed(run)
    assert "price  0.53 USD per device-hour: list price of g4dn.xlarge, AWS us-east-1, on demand, as of 20" in text
    assert " lost, cost 0.064)" in text
    assert explain_run(run).price_per_device_hour == 0.526
    (run / ENVIRONMENT).write_text(json.dumps({**environment, "machine_type": None}))
    ranged = explain_run(run)
    assert ranged.price_per_device_hour == 0
    assert ranged.price_range is not None
    low, high = (440 * price / 3600 for price in (ranged.price_range.low, ranged.price_range.high))
    assert f" lost, cost {fmt.cost(low)}–{fmt.cost(high)})" in printed(run)
    assert "cost" not in printed(run, price=0.0).split("phase  ")[1].splitlines()[0]
    assert "price  " not in printed(run, price=5.0)
    (run / CONFIG).write_text("[run]\nprice_per_device_hour = 1.5\n")
    assert explain_run(run).price_per_device_hour == 1.5


def test_experiments_have_a_section(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", end="finished")
    folder = RunFolder(run, 1)
    numbers = {"before_img_per_s": 10.0, "after_img_per_s": 18.0, "ratio": 1.8, "ratio_low": 1.7, "ratio_high": 1.9}
    folder.append(PROBES, Probe(t=1.0, attempt=1, probe="cached_batch", steps=40, automatic=True, **numbers))
    noisy = {**numbers, "ratio": 1.1, "ratio_low": 0.8}
    folder.append(PROBES, Probe(t=1.0, attempt=1, probe="more_workers", steps=1, **noisy))
    nothing = dict.fromkeys(numbers, 0.0)
    folder.append(PROBES, Probe(t=1.0, attempt=1, probe="no_allreduce", steps=0, reason="one device", **nothing))
    folder.close()
    lines = printed(run).splitlines()
    at = lines.index("Experiments")
    assert [" ".join(line.split()) for line in lines[at + 1 : at + 5]] == [
        "changed img/s before after ratio 95 % interval",
        "one batch, kept on the device 10 18 1.80 1.70 … 1.90, 40 steps each, automatic",
        "more workers 10 18 1.10 0.80 … 1.90 (unclear), 1 step each",
        "no gradient all-reduce not measured: one device",
    ]
    assert [item["probe"] for item in msgspec.to_builtins(explain_run(run))["probes"]] == [
        "cached_batch",
        "more_workers",
        "no_allreduce",
    ]
    assert set(PROBE_LABELS) == set(PROBE_KINDS)


PARTIAL_RUNS = {
    "an empty event file": {"events.jsonl": b""},
    "events alone": {"events.jsonl": b'{"t":1.0,"attempt":1,"kind":"started"}\n'},
    "killed before its first event": {"environment.json": b"{}"},
    "steps alone": {"steps.jsonl": STEP},
    "an incomplete step": {"events.jsonl": b"", "steps.jsonl": STEP + STEP[:30]},
    "damaged environment": {"events.jsonl": b"", "environment.json": b'{"gpu": [1,', "steps.jsonl": STEP},
    "environment is not an object": {"events.jsonl": b"", "environment.json": b"7", "steps.jsonl": STEP},
    "unusual environment": {
        "events.jsonl": b"",
        "environment.json": b'{"gpu":{"gpus":[7]},"cores":"x"}',
        "steps.jsonl": STEP,
    },
    "settings of another version": {"events.jsonl": b"", "config.toml": b"[other]\nx = 1\n", "steps.jsonl": STEP},
    "samples alone": {"devices.jsonl": b'{"t":1.0,"attempt":1}\n'},
}


@pytest.mark.parametrize("what", PARTIAL_RUNS)
def test_every_partial_run_can_be_explained(tmp_path: Path, what: str) -> None:
    for name, content in PARTIAL_RUNS[what].items():
        (tmp_path / name).write_bytes(content)
    result = explain_run(tmp_path)
    text = text_of(result)
    assert result.state in ("killed", "unknown")
    assert ("No time is recorded yet" in text) == (b"wall_s" not in PARTIAL_RUNS[what].get("steps.jsonl", b""))
    assert json.loads(msgspec.json.encode(result))
    assert collect(tmp_path).explanation.state == result.state


def test_a_folder_that_is_not_a_run_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a run"):
        explain_run(tmp_path / "nothing")


def test_names_in_records_cannot_control_the_terminal(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    folder = RunFolder(run, 1)
    folder.event("failed", "\x1b[2Jgone")
    folder.close()
    assert "\x1b" not in printed(run)
    assert msgspec.json.encode(explain_run(run))


def test_a_stage_may_have_the_name_of_a_phase(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", stages={"input_wait": 1.0})
    (waits,) = [row for row in explain_run(run).phases if row.phase == "input_wait"]
    assert [(stage.phase, stage.stages) for stage in waits.stages] == [("input_wait", [])]
