"""`TF_CONFIG` and Vertex AI's `CLUSTER_SPEC`: which processes a job has, and which of them this one is.

Both are JSON in an environment variable, set for each process of a job: by Vertex AI, Kubeflow, or by hand for
TensorFlow's MultiWorkerMirroredStrategy. stoker trains in one process so far: `require_one_process` refuses a job of
several, which would train the same model several times.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import msgspec

from stoker.errors import ConfigError, UsageError

VARIABLES = ("TF_CONFIG", "CLUSTER_SPEC")
"""The first that names processes counts: Vertex AI sets both."""
TRAINING_TASKS = ("chief", "master", "worker", "workerpool0", "workerpool1")
"""Tasks that train, in the order of their ranks. Vertex AI's pool 0 is the chief, pool 1 the other workers, pools 2 and
3 are parameter servers and evaluators (cloud.google.com/vertex-ai/docs/training/distributed-training)."""


@dataclasses.dataclass(frozen=True)
class Rendezvous:
    """A job's processes that train, and the place of this one."""

    variable: str
    addresses: tuple[str, ...]
    """host:port of each; the first is that of rank 0, where the others meet."""
    rank: int | None
    """None: this process does not train (an evaluator, a parameter server)."""
    task: str
    """worker 2."""


def read_rendezvous(env: Mapping[str, str] = os.environ) -> Rendezvous | None:
    """The rendezvous of this process; None if no variable names one. Raises ConfigError for malformed JSON."""
    for variable in VARIABLES:
        if not env.get(variable, "").strip():
            continue
        try:
            spec = msgspec.json.decode(env[variable], type=dict[str, Any])
            cluster = msgspec.convert(spec.get("cluster") or {}, dict[str, list[str] | dict[str, str]])
            task = msgspec.convert(spec.get("task") or {}, dict[str, Any])
            task_type, task_index = str(task.get("type", "worker")), int(task.get("index", 0))
        except (msgspec.DecodeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"The environment variable {variable} is not the description of a cluster.",
                cause=str(error),
                fix=f"unset {variable}, or correct the JSON: {EXAMPLE}",
            ) from error
        lists = {name: list(hosts.values() if isinstance(hosts, dict) else hosts) for name, hosts in cluster.items()}
        members = [(name, k, host) for name in TRAINING_TASKS for k, host in enumerate(lists.get(name, []))]
        if not members:
            continue
        rank = next((r for r, (name, k, _) in enumerate(members) if (name, k) == (task_type, task_index)), None)
        return Rendezvous(variable, tuple(host for _, _, host in members), rank, f"{task_type} {task_index}")
    return None


EXAMPLE = '{"cluster": {"worker": ["host:port"]}, "task": {"type": "worker", "index": 0}}'


def require_one_process(env: Mapping[str, str] = os.environ) -> None:
    """Raises UsageError if the environment describes a job of several training processes, or a process that does not
    train."""
    rendezvous = read_rendezvous(env)
    if rendezvous is None or (len(rendezvous.addresses) == 1 and rendezvous.rank == 0):
        return
    variable, count = rendezvous.variable, len(rendezvous.addresses)
    if rendezvous.rank is None:
        what = f"{variable} makes this process the task {rendezvous.task}, which does not train."
        cause = "stoker has no parameter servers, and evaluates in the training process"
    else:
        what = f"{variable} describes a job of {count} processes; this is {rendezvous.task}, rank {rendezvous.rank}."
        cause = "stoker trains in one process, on one device, so far: each of them would train the same model"
    raise UsageError(what, cause=cause, fix=f"one replica in one worker pool, or `unset {variable}`")
