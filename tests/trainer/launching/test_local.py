"""`stoker launch local`: a real training in the background, cancelled, continued, and ended as an undisturbed one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.launching.jobs import last_job
from stoker.launching.spec import open_place
from stoker_watch.runs.records import CHECKPOINTS
from tests.chaos.harness import FOLDER_VARIABLE, assert_same_weights, merge_flags, processes_of, train
from tests.drawn import draw
from tests.trainer.launching.slurm_cluster import wait_for

pytestmark = pytest.mark.slow

STEPS = ("--steps", "160", "--eval-every", "80", "--batch-size", "8", "--mosaic", "0", "--device", "cpu")
WAIT_S = 300


def stoker(folder: Path, *arguments: str | Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", FOLDER_VARIABLE: str(folder)}
    done = subprocess.run(
        [sys.executable, "-m", "stoker", "launch", *map(str, arguments)],
        env=environment, cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_cancelled_continued_and_finished(tmp_path: Path) -> None:
    data, run, place = draw(tmp_path / "shapes"), tmp_path / "run", open_place("local")
    environment = ("--env", f"{FOLDER_VARIABLE}={tmp_path}")

    def state() -> str:
        return place.status(last_job(str(run))).state

    printed = stoker(tmp_path, "local", data, *merge_flags(STEPS), "--run-dir", run, *environment)
    assert f": {run}" in printed
    assert state() == "running"
    wait_for(lambda: bool(list((run / CHECKPOINTS).glob("step-*"))), WAIT_S)
    assert ": cancelled: stopped and saved" in stoker(tmp_path, "cancel", run)
    assert state() == "cancelled"
    assert processes_of(tmp_path) == []

    stoker(tmp_path, "local", "--resume", run, *environment)
    wait_for(lambda: state() != "running", WAIT_S)
    assert ": succeeded: finished" in stoker(tmp_path, "status", run)
    assert f"results: {run}" in stoker(tmp_path, "logs", run)
    undisturbed = train(data, tmp_path / "undisturbed", *STEPS)
    assert undisturbed.code == 0, undisturbed.output
    assert_same_weights(run, undisturbed.run)
