"""TF_CONFIG and CLUSTER_SPEC: who is in a job, and a job of several processes is refused before it costs anything."""

import json

import pytest

from stoker.config.settings import from_fields
from stoker.errors import ConfigError, UsageError
from stoker.training.cluster import read_rendezvous, require_one_process
from stoker.training.loop import train


def tf_config(index: int = 0, kind: str = "worker", **cluster: list[str]) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


VERTEX = {
    "cluster": {"workerpool0": ["a-0:2222"], "workerpool1": ["b-0:2222", "b-1:2222"], "workerpool3": ["e-0:2222"]},
    "environment": "cloud",
    "task": {"type": "workerpool1", "index": 1},
}
"""As cloud.google.com/vertex-ai/docs/training/distributed-training shows it."""


def test_ranks_are_in_the_order_of_the_tasks():
    found = read_rendezvous({"CLUSTER_SPEC": json.dumps(VERTEX)})
    assert found is not None
    assert (found.addresses, found.rank, found.task) == (("a-0:2222", "b-0:2222", "b-1:2222"), 2, "workerpool1 1")
    found = read_rendezvous(tf_config(1, worker=["w0:1", "w1:1"], chief=["c:1"], ps=["p:1"]))
    assert found is not None
    assert (found.addresses, found.rank) == (("c:1", "w0:1", "w1:1"), 2)


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
    require_one_process(env)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (tf_config(1, worker=["a:1", "b:1"]), "TF_CONFIG describes a job of 2 processes; this is worker 1, rank 1"),
        ({"CLUSTER_SPEC": json.dumps(VERTEX)}, "CLUSTER_SPEC describes a job of 3 processes"),
        (tf_config(kind="evaluator", chief=["a:1"], evaluator=["e:1"]), "evaluator 0, which does not train"),
        (tf_config(kind="ps", worker=["a:1"], ps=["e:1"]), "ps 0, which does not train"),
    ],
)
def test_several_processes_are_refused(env: dict[str, str], words: str):
    with pytest.raises(UsageError, match=words):
        require_one_process(env)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"cluster": 3}', '{"cluster": {"worker": "a"}}', '{"task": {"index": []}}']
)
def test_malformed_json_names_the_variable(text: str):
    with pytest.raises(ConfigError, match="variable TF_CONFIG"):
        require_one_process({"TF_CONFIG": text})


def test_training_asks_before_it_opens_data(monkeypatch: pytest.MonkeyPatch):
    for name, value in tf_config(worker=["a:1", "b:1"]).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="job of 2 processes"):
        train(from_fields({"data": "not-there"}))
