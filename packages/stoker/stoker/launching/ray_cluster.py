"""Ray: `stoker launch ray`.

A launched training is a job of Ray's job server, whose entry point is `python -m stoker.launching.ray_cluster TRAINING`
on the cluster: a driver that reserves the nodes, runs `stoker train` on each, and starts it again. The cluster has to
have stoker, Ray and, at the same paths, the data and the run folder. `cancel` lets the training save: the job server
waits for the driver as long as the grace period.
"""

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from stoker.launching.elastic import choose_nodes, describe_idle
from stoker.launching.spec import Job, JobStatus, LaunchPlace, LaunchSpec, state_of
from stoker.training.cluster import RankPlace
from stoker.training.supervisor import PASSED_ON, delay_s, die_with_parent
from stoker_watch.errors import PreflightError, UsageError, needs_package

with contextlib.suppress(ModuleNotFoundError):  # where it is needed, `needs_package` names it
    import ray


class RayTraining(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver runs: its argument, as JSON."""

    arguments: tuple[str, ...]
    """Arguments of `stoker`."""
    min_nodes: int
    max_nodes: int
    run: str
    devices: int
    """Devices of each node."""
    batch: dict[str, Any]
    resources: dict[str, float]
    """Ray's resources for each node."""
    grace_s: int
    restarts: int


class Ray(LaunchPlace):
    """A Ray cluster; `--address` (or RAY_ADDRESS) names its dashboard, default http://127.0.0.1:8265."""

    name = "ray"
    file = "job.json"
    job_id = r"[A-Za-z0-9_][\w-]{0,127}"
    reach = "shared files"
    options = frozenset({"address"})
    lacks, instead = ("image", "machine_type", "mig_slice"), "the cluster's own nodes are used"

    def check(self, spec: LaunchSpec) -> list[str]:
        if spec.time_limit_s is not None:
            fix = "without --time-limit; `--max-time` is of the training"
            raise UsageError("A job of Ray has no time limit.", fix=fix)
        return []

    def render(self, spec: LaunchSpec) -> str:
        return msgspec.json.format(msgspec.json.encode(_request(spec)), indent=2).decode() + "\n"

    def submit(self, spec: LaunchSpec) -> str:
        return str(_job_server(spec.options.address).submit_job(**_request(spec)))

    def status(self, job: Job) -> JobStatus:
        try:
            info = _job_server(job.options.get("address")).get_job_info(job.id)
        except RuntimeError as error:
            if "does not exist" in str(error):
                return JobStatus(state="unknown", text="the cluster has no such job: it was started again since")
            raise PreflightError("Ray's job server does not answer as it should.", cause=str(error)) from error
        state, code = info.status.value, info.driver_exit_code
        return JobStatus(state=state_of("ray", state), text=f"{state}: {info.message}", exit_code=code)

    def logs(self, job: Job, *, follow: bool) -> Iterator[str]:
        server = _job_server(job.options.get("address"))
        if not follow:
            yield from server.get_job_logs(job.id).splitlines()
            return
        chunks, rest = server.tail_job_logs(job.id), ""
        with asyncio.Runner() as runner:
            while (chunk := runner.get_loop().run_until_complete(anext(chunks, None))) is not None:
                *lines, rest = (rest + chunk).split("\n")
                yield from lines
        if rest:
            yield rest

    def cancel(self, job: Job) -> None:
        _job_server(job.options.get("address")).stop_job(job.id)


def _request(spec: LaunchSpec) -> dict[str, Any]:
    """Arguments of `JobSubmissionClient.submit_job`."""
    resources: dict[str, float] = {"CPU": spec.cpus}
    if spec.gpus:
        resources["GPU"] = spec.gpus
    if spec.gpu is not None:
        resources[f"accelerator_type:{spec.gpu}"] = 0.001  # Ray's way to ask for a type
    names = ("arguments", "min_nodes", "max_nodes", "devices", "grace_s", "restarts")
    same = {name: getattr(spec, name) for name in names}
    training = RayTraining(run=spec.run_dir, batch=dict(spec.batch), resources=resources, **same)
    command = ["python", "-m", "stoker.launching.ray_cluster", msgspec.json.encode(training).decode()]
    return {
        "entrypoint": shlex.join(command),
        "runtime_env": {"env_vars": {**spec.env, "RAY_JOB_STOP_WAIT_TIME_S": str(spec.grace_s)}},
        "metadata": {"name": spec.name, "run": spec.run_dir},
    }


def _job_server(address: str | None) -> Any:
    with needs_package("stoker[ray]", "stoker launch ray"):
        from ray.job_submission import JobSubmissionClient
    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        fix = "--address http://HOST:8265, the cluster's dashboard, or RAY_ADDRESS"
        raise PreflightError("Ray's job server cannot be reached.", cause=str(error), fix=fix) from error


# The driver, on the cluster

POLL_S = 0.5
END_GRACE_S = 15.0
"""How long the other nodes may take to end after one has failed (`local_ranks.END_GRACE_S`, and a connection that times
out); then they are killed."""
RESERVE_S = 60.0
"""How long to wait for the nodes of a group before they are counted again."""
LOST = -1
"""Exit code of a node that is not there any more."""


class Node:
    """An actor: the `stoker train` of one node. Its output is the worker's, which Ray forwards to the job's log."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def address(self) -> tuple[str, int]:
        """Where rank 0 can listen."""
        with socket.socket() as listener:
            listener.bind(("", 0))
            return ray.util.get_node_ip_address(), listener.getsockname()[1]

    def start(self, arguments: tuple[str, ...], env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "stoker", *arguments],
            env={**os.environ, **env},
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return None if self._process is None else self._process.poll()

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            if number == signal.SIGKILL:
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)


def drive(training: RayTraining) -> int:
    """Runs attempts until one ends the job; returns its exit code. An attempt has a placement group of one bundle per
    node, and an actor in each that starts `stoker train` with torchrun's variables. If a node is lost, the others are
    ended, and the next attempt takes the nodes that there are then, within from:to. A new group for each attempt: an
    old one would wait for the lost node."""
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    failures = 0
    while not stopping.is_set():
        code = _run_attempt(training, stopping)
        if stopping.is_set() or (code in PASSED_ON and code != 75):
            return code
        if code == 75:
            _say("the training stopped and saved: starting it again")
            continue
        failures += 1
        reason = "a node was lost" if code == LOST else f"exit code {code}"
        if failures > training.restarts:
            _say(f"{reason}; no restart is left of {training.restarts}")
            return 1 if code < 0 else code
        _say(f"{reason}: restart {failures} of {training.restarts}")
        time.sleep(delay_s(failures))
    return 75


def _run_attempt(training: RayTraining, stopping: threading.Event) -> int:
    from ray.exceptions import RayActorError, RayTaskError
    from ray.util.placement_group import remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = _reserve(training, stopping)
    if group is None:
        return 75
    resources = {"num_cpus": training.resources.get("CPU", 0), "num_gpus": training.resources.get("GPU", 0)}
    try:
        nodes = [
            ray.remote(Node)
            .options(**resources, scheduling_strategy=PlacementGroupSchedulingStrategy(group, index))
            .remote()
            for index in range(group.bundle_count)
        ]
        return _train(training, nodes, stopping)
    except (RayActorError, RayTaskError) as error:
        _say(str(error).splitlines()[0])
        return LOST
    finally:
        remove_placement_group(group)


def _reserve(training: RayTraining, stopping: threading.Event) -> Any:
    """A placement group of as many nodes as there are; None: the job is stopped."""
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

    needed, reported = training.resources, -1
    while not stopping.is_set():
        alive = [node for node in ray.nodes() if node["Alive"]]
        alive = [node for node in alive if all(node["Resources"].get(name, 0) >= needed[name] for name in needed)]
        fitting = len(alive)
        if fitting < training.min_nodes:
            if fitting != reported:
                _say(f"waiting for {training.min_nodes} nodes with {needed}: the cluster has {fitting}")
                reported = fitting
            time.sleep(POLL_S)
            continue
        there = min(fitting, training.max_nodes)
        count = choose_nodes(
            training.run, training.batch, devices=training.devices, least=training.min_nodes, nodes=there
        )
        group = placement_group([needed] * count, strategy="STRICT_SPREAD")
        deadline_s = time.monotonic() + RESERVE_S
        while not stopping.is_set() and time.monotonic() < deadline_s:
            if group.wait(POLL_S):
                _say(f"reserved {count} nodes")
                if count < there:
                    used = set(placement_group_table(group)["bundles_to_node_id"].values())
                    _say(describe_idle([node["NodeName"] for node in alive if node["NodeID"] not in used], count))
                return group
        remove_placement_group(group)
    return None


def _train(training: RayTraining, nodes: list[Any], stopping: threading.Event) -> int:
    """The exit code of an attempt: one that a restart cannot correct, else a lost node, else the first failure, else 75
    or 0."""
    host, port = ray.get(nodes[0].address.remote())
    for rank, node in enumerate(nodes):
        place = RankPlace(
            rank=rank, world_size=len(nodes), local_rank=0, local_world_size=1, host=host, port=port, source="Ray"
        )
        ray.get(node.start.remote(training.arguments, place.variables() if len(nodes) > 1 else {}))
    codes: list[int | None] = [None] * len(nodes)
    failed_s = asked_s = None
    while None in codes:
        time.sleep(POLL_S)
        codes = [_ask(node) if code is None else code for node, code in zip(nodes, codes, strict=True)]
        now_s = time.monotonic()
        if stopping.is_set() and asked_s is None:
            asked_s = now_s
            _signal(nodes, signal.SIGTERM)
        if failed_s is None and any(code not in (None, 0, 75) for code in codes):
            failed_s = now_s
        has_failed = failed_s is not None and now_s - failed_s > END_GRACE_S
        if has_failed or (asked_s is not None and now_s - asked_s > training.grace_s):
            _signal(nodes, signal.SIGKILL)
    ended = [code for code in codes if code is not None]
    failures = [code for code in ended if code not in (0, 75)]
    final = [code for code in failures if code in PASSED_ON]
    return next(iter([*final, *(code for code in failures if code == LOST), *failures, max(ended)]))


def _ask(node: Any) -> int | None:
    try:
        code: int | None = ray.get(node.poll.remote())
    except ray.exceptions.RayActorError:
        return LOST
    return None if code is None else 128 - code if code < 0 else code


def _signal(nodes: list[Any], number: int) -> None:
    for node in nodes:
        with contextlib.suppress(ray.exceptions.RayActorError):  # `_ask` reports it
            ray.get(node.signal.remote(int(number)))


def _say(text: str) -> None:
    print(f"stoker: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    ray.init()
    sys.exit(drive(msgspec.json.decode(sys.argv[1], type=RayTraining)))
