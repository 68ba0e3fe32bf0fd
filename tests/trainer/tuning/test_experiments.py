"""Experiments: with known speeds, on a real run, and on runs that cannot be probed."""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import stoker
from stoker_watch.errors import UsageError
from stoker_watch.report import explain
from stoker_watch.report.explain import describe_probe, run_probes
from stoker_watch.runs.records import PROBES, RunFolder, locked, read_lines
from stoker_watch.runs.schemas import PROBE_KINDS, Probe

HASTY = """
import sys
from pathlib import Path
from stoker.tuning import experiments, trials
experiments.MAX_EXPERIMENT_S = 0.0
trials.WINDOW_S = (0.1, 1.0)
experiments.main(Path(sys.argv[1]))
"""
"""The experiments with the fewest pairs, of short windows."""


def test_runs_that_cannot_be_probed_are_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, attempt=1)
    folder.event("started")
    with pytest.raises(UsageError, match=r"need a run of `stoker train`"):
        run_probes(str(tmp_path), print)
    (tmp_path / "config.toml").write_text("")
    with locked(tmp_path), pytest.raises(UsageError, match="still running"):
        run_probes(str(tmp_path), print)
    folder.close()


@pytest.mark.slow
def test_experiments_on_a_real_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = stoker.train(
        "demo", max_duration="3", batch_size=4, image_size=(64, 64), eval_every="0", workers=2, run_dir="run"
    ).run
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    said: list[str] = []
    monkeypatch.setattr(explain, "EXPERIMENTS", (sys.executable, "-c", HASTY))
    run_probes("run", said.append)
    found = list(read_lines(run, PROBES, Probe))
    assert [one.probe for one in found] == list(PROBE_KINDS)
    assert [one.probe for one in found if one.reason] == ["no_allreduce", "compiled"]
    assert all(one.before_img_per_s > 0 and one.steps >= 6 for one in found if not one.reason)
    assert said == [describe_probe(one) for one in found]
    assert all(path.read_bytes() == content for path, content in before.items())
    assert stoker_why(run)["probes"]


def stoker_why(run: Path) -> dict[str, Any]:
    return json.loads(msgspec.json.encode(explain.explain_run(run)))
