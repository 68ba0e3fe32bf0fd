"""`stoker launch ray` on a real Ray cluster of two nodes on this machine: one is lost, the training goes on and ends.

Ray is an optional extra: `uv pip install 'stoker[ray]'`.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from stoker.launching.jobs import last_job
from stoker.launching.spec import open_place
from stoker_watch.runs.records import CHECKPOINTS
from tests.chaos.harness import FOLDER_VARIABLE, assert_same_weights, merge_flags, processes_of, train
from tests.drawn import draw
from tests.trainer.launching.slurm_cluster import wait_for

ray = pytest.importorskip("ray", reason="uv pip install 'stoker[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = ("--steps", "160", "--eval-every", "80", "--batch-size", "8", "--mosaic", "0", "--device", "cpu")
WAIT_S = 200


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """A head that runs drivers only, and two nodes of two CPUs."""
    from ray.cluster_utils import Cluster

    root = str(Path(__file__).resolve().parents[3])
    for name, value in {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }.items():
        monkeypatch.setenv(name, value)
    head = {"num_cpus": 0, "include_dashboard": True, "dashboard_port": 0}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(num_cpus=2)
        cluster.add_node(num_cpus=2)
        monkeypatch.setenv("RAY_ADDRESS", f"http://{cluster.head_node.webui_url}")
        yield cluster
    finally:
        cluster.shutdown()


def launch(folder: Path, *arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "stoker", "launch", *map(str, arguments)],
        env={**os.environ, FOLDER_VARIABLE: str(folder)}, cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    print(f"$ stoker launch {' '.join(map(str, arguments))}\n{done.stdout}{done.stderr}")
    return done.stdout


def test_a_lost_node_is_replaced_and_the_run_is_that_of_an_undisturbed_one(
    cluster: "ray.cluster_utils.Cluster", tmp_path: Path
) -> None:
    data, run = draw(tmp_path / "shapes"), tmp_path / "job" / "run"
    (tmp_path / "job").mkdir()
    address = os.environ["RAY_ADDRESS"]
    flags = [*merge_flags(STEPS), "--nodes", "2", "--cpus", "2", "--mount", "/", "--run-dir", run, "--address", address]
    launch(tmp_path / "job", "ray", data, *flags, "--env", "STOKER_CORES=1", "--env", f"{FOLDER_VARIABLE}={tmp_path}")
    job, place = last_job(str(run)), open_place("ray")
    wait_for(lambda: list((run / CHECKPOINTS).glob("step-*")), WAIT_S)
    lose(cluster, tmp_path)
    wait_for(lambda: "waiting for 2 nodes" in "\n".join(place.logs(job, follow=False)), WAIT_S)
    assert place.status(job).state == "running"
    cluster.add_node(num_cpus=2)
    wait_for(lambda: place.status(job).state not in ("queued", "running"), WAIT_S)
    assert "succeeded" in launch(tmp_path / "job", "status", run)
    output = launch(tmp_path / "job", "logs", run)
    assert "restart 1 of 3" in output
    assert "attempt 2" in output
    undisturbed = train(data, tmp_path / "undisturbed", *STEPS, "--devices", "2")
    assert undisturbed.code == 0, undisturbed.output
    assert_same_weights(run, undisturbed.run)
    assert [process for process in processes_of(tmp_path) if "train" in process] == []


def test_elastic_nodes_are_those_that_can_share_the_batch(cluster: "ray.cluster_utils.Cluster", tmp_path: Path) -> None:
    """Eight images cannot be divided among the three nodes that there are."""
    cluster.add_node(num_cpus=2)
    data, run = draw(tmp_path / "shapes"), tmp_path / "run"
    flags = [
        *merge_flags(("--steps", "4", "--eval-every", "4", "--batch-size", "8", "--mosaic", "0", "--device", "cpu"))
    ]
    flags += ["--nodes", "2:3", "--cpus", "2", "--mount", "/", "--run-dir", run, "--env", "STOKER_CORES=1"]
    launch(tmp_path, "ray", data, *flags, "--address", os.environ["RAY_ADDRESS"])
    job, place = last_job(str(run)), open_place("ray")
    wait_for(lambda: place.status(job).state not in ("queued", "running"), WAIT_S)
    output = launch(tmp_path, "logs", run)
    assert "2 nodes train, as more devices cannot share the batch equally; idle: " in output
    assert "succeeded" in launch(tmp_path, "status", run), output


def lose(cluster: "ray.cluster_utils.Cluster", folder: Path) -> None:
    """Loses the node of rank 1 as a machine is lost: nothing on it ends in order."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            variables = process.environ()
            if (
                "train" in process.cmdline()
                and variables.get(FOLDER_VARIABLE) == str(folder)
                and variables["RANK"] == "1"
            ):
                processes.append(process)
    (process,) = processes
    raylet = process.parent().parent().pid
    process.send_signal(signal.SIGKILL)
    (node,) = [node for node in cluster.list_all_nodes() if node.all_processes["raylet"][0].process.pid == raylet]
    cluster.remove_node(node, allow_graceful=False)
