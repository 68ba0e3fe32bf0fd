"""Ranks of several machines find the network between them. A machine is a network namespace with a host name,
which its /etc/hosts maps to 127.0.1.1, as on Debian and Ubuntu."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.training.cluster import RankPlace, find_route, meet
from stoker.training.local_ranks import find_free_port
from stoker_watch.errors import RankError

WAIT_S = 120
PORT = 29500
PROGRAM = """
import os, sys, torch, torch.distributed as dist
from stoker.training.cluster import find_place
from stoker.training.ranks import joined
with joined(find_place()) as ranks:
    value = torch.tensor([float(ranks.rank + 1)])
    dist.all_reduce(value)
    print("sum", value.item(), os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("NCCL_SOCKET_IFNAME"))
"""


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """Names of two namespaces with a link, 10.77.0.1 and .2, and without a default route."""
    names = [f"stoker-{os.getpid()}-{number}" for number in range(2)]
    if shutil.which("ip") is None or subprocess.run(["ip", "netns", "add", names[0]], capture_output=True).returncode:
        pytest.skip("needs root and iproute2, to make network namespaces")
    try:
        commands = [f"netns add {names[1]}", f"link add v0 netns {names[0]} type veth peer name v1 netns {names[1]}"]
        for number, name in enumerate(names):
            commands += [f"-n {name} address add 10.77.0.{number + 1}/24 dev v{number}"]
            commands += [f"-n {name} link set {device} up" for device in ("lo", f"v{number}")]
            hosts = Path("/etc/netns", name, "hosts")  # `ip netns exec` mounts it over /etc/hosts
            hosts.parent.mkdir(parents=True)
            other = f"10.77.0.{2 - number} machine{1 - number}"
            hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 machine{number}\n{other}\n")
        for command in commands:
            subprocess.run(["ip", *command.split()], check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)


def start(namespace: str, number: int, master: str) -> "subprocess.Popen[str]":
    """A rank, on a machine whose name is `machineN`."""
    env = {name: text for name, text in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
    env |= {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": master, "MASTER_PORT": str(PORT)}
    shell = 'hostname "$1"; shift; exec "$@"'
    command = ["ip", "netns", "exec", namespace, "unshare", "--uts", "sh", "-c", shell, "sh", f"machine{number}"]
    program = [sys.executable, "-c", PROGRAM]
    return subprocess.Popen([*command, *program], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
def test_two_machines_connect_whose_names_are_127_0_1_1(machines: list[str]):
    ranks = [start(name, number, "machine0") for number, name in enumerate(machines)]
    try:
        outputs = [rank.communicate(timeout=WAIT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [output.splitlines()[-1] for output in outputs] == [f"sum 3.0 v{number} v{number}" for number in range(2)]


def make_place(rank: int, host: str, port: int) -> RankPlace:
    return RankPlace(
        rank=rank, world_size=3, local_rank=0, local_world_size=1, host=host, port=port, source="torchrun"
    )  # fmt: skip


def test_the_ranks_that_do_not_come_are_named():
    port = find_free_port()
    with pytest.raises(RankError, match=r"Of 3 ranks 1, 2 did not come within 0 s") as raised:
        meet(make_place(0, "localhost", port), timeout_s=0.3)
    assert f"localhost:{port} (" in str(raised.value)


def test_an_address_of_the_machine_itself_is_named():
    with pytest.raises(RankError, match=r"which is 127\.0\.1\.1 here") as raised:
        meet(make_place(1, "127.0.1.1", find_free_port()), timeout_s=0.3)
    assert "MASTER_ADDR is an address of this machine itself" in str(raised.value)


def test_routes():
    assert find_route("127.0.1.1", PORT)[1] == "lo"
    assert find_route("not an address", PORT) == ("", "")
