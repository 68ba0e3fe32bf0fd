"""`stoker search --launcher slurm` on a real Slurm of two nodes: a job array whose tasks share one study."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.launching.jobs import read_jobs
from stoker.search.study import LOCKS, Study
from tests.trainer.launching.slurm_cluster import require_slurm, slurm_cluster, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_two_tasks_of_an_array_do_all_trials(tmp_path_factory: pytest.TempPathFactory) -> None:
    require_slurm()
    folder: Path = tmp_path_factory.mktemp("search") / "study"
    space = folder.parent / "space.toml"
    space.write_text("lr = { low = 1e-4, high = 1e-2, log = true }")
    with slurm_cluster(tmp_path_factory.mktemp("slurm") / "c") as env:
        variables = {**os.environ, **env, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "stoker", "search", "demo", "--steps", "18", "--device", "cpu", "--trials", "4",
             "--parallel", "2", "--space", str(space), "--launcher", "slurm", "--run-dir", str(folder), "--mount", "/",
             "--cpus", "1", "--memory", "3", "--env", "STOKER_CORES=1"],
            env=variables, cwd=folder.parent, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        (job,) = read_jobs(str(folder))
        queue = subprocess.run(["squeue", "-h", "-r", "-j", job.id], env=variables, capture_output=True, text=True)
        assert len(queue.stdout.splitlines()) == 2, queue

        def has_ended() -> bool:
            trials = Study(folder).trials()
            return len(trials) == 4 and all(trial.state.is_finished() for trial in trials)

        wait_for(has_ended, 300)
    assert [trial.state.name for trial in Study(folder).trials()][:1] == ["COMPLETE"]
    starts = [(folder / LOCKS / f"{k:04d}").read_text() for k in range(4)]
    assert len(set(starts)) == 2, "both tasks worked"
