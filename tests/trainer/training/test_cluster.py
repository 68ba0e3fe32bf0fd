"""Which rank of a job this process is: variables of torchrun, TF_CONFIG, CLUSTER_SPEC, Slurm."""

import json

import pytest

from stoker.training.cluster import find_place, first_node
from stoker.training.local_ranks import must_start_ranks
from stoker_watch.errors import ConfigError, UsageError


def tf_config(index: int = 0, kind: str = "worker", **cluster: list[str]) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


VERTEX = {
    "cluster": {"workerpool0": ["a-0:2222"], "workerpool1": ["b-0:2222", "b-1:2222"], "workerpool3": ["e-0:2222"]},
    "environment": "cloud",
    "task": {"type": "workerpool1", "index": 1},
}
"""As cloud.google.com/vertex-ai/docs/training/distributed-training shows it."""


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"TF_CONFIG": ""},
        {"TF_CONFIG": "{}"},
        {"TF_CONFIG": '{"environment": "cloud", "task": {}}'},
        tf_config(worker=["localhost:1"]),
        tf_config(kind="chief", chief=["h:1"], evaluator=["e:1"]),
        {"CLUSTER_SPEC": json.dumps(VERTEX | {"cluster": {"workerpool0": ["a:1"]}, "task": {"type": "workerpool0"}})},
    ],
)
def test_one_process_trains(env: dict[str, str]):
    assert find_place(env) is None


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h"}
SRUN = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_NODELIST": "gpu[01-02,7]", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}  # fmt: skip


@pytest.mark.parametrize(
    ("env", "place"),
    [
        (TORCHRUN, (3, 4, 1, 2, "h", 29500, "torchrun")),
        (TORCHRUN | tf_config(worker=["a:1", "b:1"]), (3, 4, 1, 2, "h", 29500, "torchrun")),
        (tf_config(1, worker=["a:5", "b:6"]), (1, 2, 0, 1, "a", 5, "TF_CONFIG")),
        (tf_config(2, worker=["a:5", "b:6", "b:7"]), (2, 3, 1, 2, "a", 5, "TF_CONFIG")),
        (tf_config(1, worker=["w0:1", "w1:1"], chief=["c:1"], ps=["p:1"]), (2, 3, 0, 1, "c", 1, "TF_CONFIG")),
        ({"CLUSTER_SPEC": json.dumps(VERTEX)}, (2, 3, 0, 1, "a-0", 2222, "CLUSTER_SPEC")),
        (SRUN, (4, 5, 0, 1, "gpu01", 20112, "Slurm")),
        (SRUN | {"SLURM_NODEID": "0", "SLURM_LOCALID": "1"}, (4, 5, 1, 2, "gpu01", 20112, "Slurm")),
        (SRUN | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "9"}, (4, 5, 0, 1, "10.0.0.1", 9, "Slurm")),
    ],
)
def test_the_place_of_a_rank(env: dict[str, str], place: tuple[object, ...]):
    found = find_place(env)
    assert found is not None
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == place[:4]
    assert (found.host, found.port, found.source) == place[4:]
    assert find_place(found.variables()) is not None


def test_the_batch_script_of_slurm_is_one_process():
    """It has the variables of the job, not those of a step: waiting for the other tasks would last forever."""
    assert find_place({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None


@pytest.mark.parametrize(
    ("text", "host"),
    [("a", "a"), ("", ""), ("a,b2", "a"), ("n[08-11]", "n08"), ("x[1,3-4]-ib,y", "x1-ib"), ("a-b[7]", "a-b7")],
)
def test_the_first_of_a_node_list(text: str, host: str):
    assert first_node(text) == host


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK": "4", "WORLD_SIZE": "4", "MASTER_ADDR": "h"}, "RANK=4 does not fit WORLD_SIZE=4"),
        ({"RANK": "x", "WORLD_SIZE": "4"}, "RANK is 'x', not a number"),
        ({"RANK": "1", "WORLD_SIZE": "4"}, "MASTER_ADDR is not set"),
    ],
)
def test_malformed_variables_are_named(env: dict[str, str], words: str):
    with pytest.raises(ConfigError, match=words):
        find_place(env)


def test_who_starts_ranks(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    assert [must_start_ranks(n) for n in (None, 1, 2)] == [False, False, True]
    with pytest.raises(ConfigError, match="--devices 0"):
        must_start_ranks(0)
    monkeypatch.setenv("TF_CONFIG", tf_config(1, worker=["a:1", "b:1"])["TF_CONFIG"])
    assert must_start_ranks(4), "one process on each of two machines"
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert not must_start_ranks(2)
    with pytest.raises(ConfigError, match="torchrun has started 2 ranks here"):
        must_start_ranks(3)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (tf_config(kind="evaluator", chief=["a:1"], evaluator=["e:1"]), "evaluator 0, which does not train"),
        (tf_config(kind="ps", worker=["a:1"], ps=["e:1"]), "ps 0, which does not train"),
        (tf_config(2, worker=["a:1", "b:1"]), "worker 2, and its list ends with worker 1"),
    ],
)
def test_a_process_that_does_not_train_is_refused(env: dict[str, str], words: str):
    with pytest.raises(UsageError, match=words):
        find_place(env)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"cluster": 3}', '{"cluster": {"worker": "a"}}', '{"task": {"index": []}}']
)
def test_malformed_json_names_the_variable(text: str):
    with pytest.raises(ConfigError, match="variable TF_CONFIG"):
        find_place({"TF_CONFIG": text})
