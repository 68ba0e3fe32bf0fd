"""The driver of a job of `stoker launch ray`: reserves the nodes, runs `stoker train` on each, and starts it again.

`python -m stoker.launching.ray_driver TRAINING`, with TRAINING as JSON (`ray.Training`); runs on the cluster, where it
is the job's entry point. An attempt has a placement group of one bundle per node, and an actor in each that starts
`stoker train` with torchrun's variables. If a node is lost, the others are ended, and the next attempt takes the nodes
that there are then, within from:to. A new group for each attempt: an old one would wait for the lost node.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import FrameType
from typing import Any

import msgspec
import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from stoker.launching.ray import Training
from stoker.training.supervisor import PASSED_ON, delay_s, die_with_parent

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


class Driver:
    """Runs attempts until one ends the job."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._stopping = threading.Event()
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self._stopping.set()

    def run(self) -> int:
        """Returns the exit code of the job."""
        failures = 0
        while not self._stopping.is_set():
            code = self._run_attempt()
            if self._stopping.is_set():
                return code
            if code == 75:
                _say("the training stopped and saved: starting it again")
                continue
            if code in PASSED_ON:
                return code
            failures += 1
            reason = "a node was lost" if code == LOST else f"exit code {code}"
            if failures > self._training.restarts:
                _say(f"{reason}; no restart is left of {self._training.restarts}")
                return 1 if code < 0 else code
            _say(f"{reason}: restart {failures} of {self._training.restarts}")
            time.sleep(delay_s(failures))
        return 75

    def _run_attempt(self) -> int:
        group = self._reserve()
        if group is None:
            return 75
        try:
            options = {
                "num_cpus": self._training.resources.get("CPU", 0),
                "num_gpus": self._training.resources.get("GPU", 0),
            }
            nodes = [
                ray.remote(Node)
                .options(**options, scheduling_strategy=PlacementGroupSchedulingStrategy(group, index))
                .remote()
                for index in range(group.bundle_count)
            ]
            return self._train(nodes)
        except (RayActorError, RayTaskError) as error:
            _say(str(error).splitlines()[0])
            return LOST
        finally:
            remove_placement_group(group)

    def _reserve(self) -> Any:
        """A placement group of as many nodes as there are; None: the job is stopped."""
        needed = self._training.resources
        reported = -1
        while not self._stopping.is_set():
            alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            fitting = sum(all(node.get(name, 0) >= amount for name, amount in needed.items()) for node in alive)
            if fitting < self._training.min_nodes:
                if fitting != reported:
                    _say(f"waiting for {self._training.min_nodes} nodes with {needed}: the cluster has {fitting}")
                    reported = fitting
                time.sleep(POLL_S)
                continue
            count = min(fitting, self._training.max_nodes)
            group = placement_group([needed] * count, strategy="STRICT_SPREAD")
            deadline_s = time.monotonic() + RESERVE_S
            while not self._stopping.is_set() and time.monotonic() < deadline_s:
                if group.wait(POLL_S):
                    _say(f"reserved {count} nodes")
                    return group
            remove_placement_group(group)
        return None

    def _train(self, nodes: list[Any]) -> int:
        host, port = ray.get(nodes[0].address.remote())
        for rank, node in enumerate(nodes):
            env = {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(nodes)),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": host,
                "MASTER_PORT": str(port),
            }
            ray.get(node.start.remote(self._training.arguments, env if len(nodes) > 1 else {}))
        codes: list[int | None] = [None] * len(nodes)
        failed_s = asked_s = None
        while None in codes:
            time.sleep(POLL_S)
            codes = [_ask(node) if code is None else code for node, code in zip(nodes, codes, strict=True)]
            now_s = time.monotonic()
            if self._stopping.is_set() and asked_s is None:
                asked_s = now_s
                _signal(nodes, signal.SIGTERM)
            if failed_s is None and any(code not in (None, 0, 75) for code in codes):
                failed_s = now_s
            if (failed_s is not None and now_s - failed_s > END_GRACE_S) or (
                asked_s is not None and now_s - asked_s > self._training.grace_s
            ):
                _signal(nodes, signal.SIGKILL)
        return _exit_code([code for code in codes if code is not None])


def _exit_code(codes: list[int]) -> int:
    """That of the job: one that a restart cannot correct, else a lost node, else the first failure, else 75 or 0."""
    failures = [code for code in codes if code not in (0, 75)]
    final = [code for code in failures if code in PASSED_ON]
    if final:
        return final[0]
    if LOST in failures:
        return LOST
    return failures[0] if failures else max(codes)


def _ask(node: Any) -> int | None:
    try:
        code: int | None = ray.get(node.poll.remote())
    except RayActorError:
        return LOST
    return None if code is None else 128 - code if code < 0 else code


def _signal(nodes: list[Any], number: int) -> None:
    for node in nodes:
        try:
            ray.get(node.signal.remote(int(number)))
        except RayActorError:
            continue  # `_ask` reports it


def _say(text: str) -> None:
    print(f"stoker: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    ray.init()
    sys.exit(Driver(msgspec.json.decode(sys.argv[1], type=Training)).run())
