"""A run folder is read in one pass."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from stoker_watch.diagnosis.engine import run_rules
from stoker_watch.diagnosis.reader import read_run
from stoker_watch.runs.records import (
    CONFIG,
    DEVICES,
    ENVIRONMENT,
    EVENTS,
    PROBES,
    QUARANTINE,
    STACKS,
    STEPS,
    TRACES,
    RunFolder,
)
from tests.watch.diagnosis.built import make_run
from tests.watch.diagnosis.cases import CASES

OPENED = """
import json, os, sys
opened, run = [], sys.argv[1]
def on_event(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        path = os.path.abspath(os.fsdecode(arguments[0]))
        if path.startswith(run + "/"):
            opened.append(os.path.relpath(path, run))
sys.addaudithook(on_event)
from stoker_watch.cli.app import main
sys.argv = ["stoker", *sys.argv[2:]]
try:
    main()
finally:
    print(json.dumps(opened), file=sys.stderr)
"""


def opened(run: Path, *arguments: str) -> Counter[str]:
    """Files of a run that a command opens, and how often."""
    command = [sys.executable, "-c", OPENED, str(run), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return Counter(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize("end", ["finished", "failed", "killed"])
def test_each_file_is_opened_once_during_why_and_report(end: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", **CASES["launch_bound"][0])
    folder = RunFolder(run, 1)
    if end != "killed":
        folder.event(end, "the end")
    folder.close()
    (run / "ranks" / "0001").mkdir(parents=True)
    shutil.copy(run / STEPS, run / "ranks" / "0001")
    for name in (CONFIG, ENVIRONMENT, EVENTS, STEPS, DEVICES, TRACES, STACKS, PROBES, QUARANTINE):
        (run / name).touch()
    (run / ENVIRONMENT).write_text("{}")
    counts = opened(run, "why", str(run), "--json")
    names = {CONFIG, ENVIRONMENT, EVENTS, STEPS, DEVICES, TRACES, STACKS, PROBES, QUARANTINE, "ranks/0001/steps.jsonl"}
    assert {name: counts[name] for name in names} == dict.fromkeys(names, 1)
    counts = opened(run, "report", str(run), "--json")
    assert [counts[name] for name in (EVENTS, STEPS, DEVICES, "ranks/0001/steps.jsonl")] == [1, 1, 1, 1]


def test_a_jax_job_without_step_numbers_is_compiled_again_and_again() -> None:
    """Recorded: a Flax loop with a new jax.jit in each step, which prints "[80] loss=2.27"."""
    run = read_run(Path(__file__).parent / "recorded" / "jax_newjit")
    findings = run_rules(run)
    assert (run.totals.steps, findings[0].id, findings[0].severity) == (0, "recompiles", "critical")
    assert any("jit(<lambda>)" in line.text for line in findings[0].evidence)


def test_a_loop_begins_before_its_first_shown_step() -> None:
    """Recorded: a JAX job whose output shows its first step number after 50 s. By its own clock, reading an archive for
    each batch took 14.0 s; `jax_compiled` is the same program without a fault: its first samples and compilations come
    at the first step that is shown."""
    findings = run_rules(read_run(Path(__file__).parent / "recorded" / "jax_first_step_late"))
    assert "train.py:66" in findings[0].title
    assert findings[0].lost_device_s == pytest.approx(14.0, rel=0.15)
    findings = run_rules(read_run(Path(__file__).parent / "recorded" / "jax_compiled"))
    assert not [finding.id for finding in findings if finding.severity != "info"]
