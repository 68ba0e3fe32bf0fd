"""Ranks as on two machines: a cut link, a store that dies, a machine that is started again; and what listens."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from stoker.training.local_ranks import find_free_port
from stoker.training.ranks import RankFailure
from stoker_watch.errors import RankError
from stoker_watch.runs.records import STEPS, read_lines
from stoker_watch.runs.schemas import StepWindow
from tests.drawn import draw, stoker
from tests.fixtures.training_ranks import arguments, in_float64, train, wait_for_checkpoint  # noqa: F401

LIMIT_S = 240
"""For what takes half a minute on a free machine."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(tmp_path_factory.mktemp("drawn"), train=30)


def start_rank(
    rank: int, data: Path, cwd: Path, host: str, port: int, *flags: str, prefix: Sequence[str] = (), **env: str
) -> subprocess.Popen[str]:
    """A rank that is the only one of its machine, as torchrun starts it."""
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": host}
    command = [*prefix, sys.executable, "-m", "stoker", *map(str, arguments(data, 1, *flags)[:-2])]
    environment = {**os.environ, **place, "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", **env}
    return subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ends(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """(exit code, output) of each."""
    outputs = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def kill(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
        process.communicate()


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=False)


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two network namespaces with a link between them; the first has the address 10.78.0.1."""
    if shutil.which("ip") is None:
        pytest.skip("`ip` is missing: no network namespaces")
    names = [f"stoker-{os.getpid()}-{n}" for n in range(2)]
    steps = [("netns", "add", name) for name in names]
    steps.append(("-n", names[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", names[1]))
    for n, name in enumerate(names):
        steps.append(("-n", name, "addr", "add", f"10.78.0.{n + 1}/24", "dev", "eth0"))
        steps += [("-n", name, "link", "set", device, "up") for device in ("eth0", "lo")]
    try:
        for step in steps:
            done = ip(*step)
            if done.returncode:
                pytest.skip(f"no network namespaces here: `ip {' '.join(step)}`: {done.stderr.strip()}")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


def start_both(namespaces: list[str], data: Path, cwd: Path) -> list[subprocess.Popen[str]]:
    prefixes = [("ip", "netns", "exec", name) for name in namespaces]
    env = {"GLOO_SOCKET_IFNAME": "eth0", "STOKER_HANG_TIMEOUT_S": "5"}
    return [
        start_rank(rank, data, cwd, "10.78.0.1", 29511, "--steps", "100000", prefix=prefixes[rank], **env)
        for rank in range(2)
    ]


def assert_names_the_other(rank: int, output: str, pid: int) -> None:
    assert f"stoker: Rank {1 - rank} (process {pid} on " in output
    assert "froze or lost its network" in output


@pytest.mark.slow
@pytest.mark.parametrize("dumb", [(0, 1), (0,), (1,)], ids=["cut", "from_0", "from_1"])
def test_a_cut_link_ends_both_sides(namespaces: list[str], data: Path, tmp_path: Path, dumb: tuple[int, ...]) -> None:
    """No packet of these ranks arrives any more, also none that would end a connection."""
    both = start_both(namespaces, data, tmp_path)
    try:
        wait_for_checkpoint(both[0], tmp_path / "run")
        for rank in dumb:  # a hardware address that nobody has
            wrong = ("lladdr", "02:00:00:00:00:99", "nud", "permanent", "dev", "eth0")
            assert ip("-n", namespaces[rank], "neigh", "replace", f"10.78.0.{2 - rank}", *wrong).returncode == 0
        start_s = time.monotonic()
        ended = ends(both)
    finally:
        kill(both)
    print(f"nothing arrives from {dumb}: both ended after {time.monotonic() - start_s:.1f} s")
    assert [code for code, _ in ended] == [7, 7], ended
    for rank, (_, output) in enumerate(ended):
        assert_names_the_other(rank, output, both[1 - rank].pid)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_machine_is_named_and_the_same_commands_continue(
    namespaces: list[str], data: Path, tmp_path: Path, lost: int
) -> None:
    """Its connections stay half open. Rank 0 has the store of the job, too."""
    both = start_both(namespaces, data, tmp_path)
    left = both[1 - lost]
    try:
        wait_for_checkpoint(both[0], tmp_path / "run")
        assert ip("-n", namespaces[lost], "link", "set", "eth0", "down").returncode == 0
        both[lost].kill()
        start_s = time.monotonic()
        ((code, output),) = ends([left])
    finally:
        kill(both)
    print(f"rank {lost} lost: the other ended after {time.monotonic() - start_s:.1f} s")
    assert code == 7, output
    assert_names_the_other(1 - lost, output, both[lost].pid)

    assert ip("-n", namespaces[lost], "link", "set", "eth0", "up").returncode == 0
    again = start_both(namespaces, data, tmp_path)
    try:
        wait_for_checkpoint(again[0], tmp_path / "run")
    finally:
        kill(again)
    assert min(w.step - w.window_steps for w in read_lines(tmp_path / "run", STEPS, StepWindow) if w.attempt == 2) > 0


STORE = """
import sys, time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), 2, True, wait_for_workers=False)
time.sleep(100_000)
"""


@pytest.mark.slow
def test_ranks_whose_store_dies_end(data: Path, tmp_path: Path) -> None:
    """As that of torchrun, which is no rank."""
    port = find_free_port()
    store = subprocess.Popen([sys.executable, "-c", STORE, str(port)])
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    both = [start_rank(rank, data, tmp_path, "127.0.0.1", port, "--steps", "100000", **env) for rank in range(2)]
    try:
        wait_for_checkpoint(both[0], tmp_path / "run")
        store.kill()
        start_s = time.monotonic()
        ended = ends(both)
    finally:
        store.kill()
        store.wait()
        kill(both)
    print(f"a dead store: both ended after {time.monotonic() - start_s:.1f} s")
    assert [code for code, _ in ended] == [1, 1], ended
    assert any("lost the store of the job" in output for _, output in ended), ended


@pytest.mark.slow
def test_a_machine_that_is_started_again_after_the_end_has_nothing_to_do(data: Path, tmp_path: Path) -> None:
    train(data, tmp_path, 1, "--steps", "4")
    port = find_free_port()
    for rank in (1, 0):
        ((code, output),) = ends([start_rank(rank, data, tmp_path, "127.0.0.1", port, "--steps", "4")])
        assert code == 0, output
        assert "The run is finished: nothing is left to do." in output


def sockets_and_command(process: psutil.Process) -> tuple[list[Any], list[str]]:
    """Nothing of one that has ended since: samplers of stacks come and go."""
    try:
        return process.net_connections("inet"), process.cmdline()
    except psutil.NoSuchProcess:
        return [], []


@pytest.mark.slow
def test_nothing_listens_where_other_machines_reach_it(data: Path, tmp_path: Path) -> None:
    """Two ranks with metrics, watched; each socket of each process, while they train."""
    command = [sys.executable, "-m", "stoker", *map(str, arguments(data, 2, "--steps", "100000"))]
    watch = stoker("watch", "--run-dir", "watched", "--metrics-port", "0", "--", *command, "--metrics-port", "0",
                   cwd=tmp_path)  # fmt: skip
    try:
        wait_for_checkpoint(watch, tmp_path / "run")
        tree = [psutil.Process(watch.pid), *psutil.Process(watch.pid).children(recursive=True)]
        seen = [sockets_and_command(process) for process in tree]
        sockets = [found for some, _ in seen for found in some]
        open_to_all = [found for found in sockets if not found.raddr and found.laddr.ip not in ("127.0.0.1", "::1")]
        listening = [found for found in sockets if found.status == psutil.CONN_LISTEN]
        ranks = [command for _, command in seen if "stoker.cli.rank_process" in command]
    finally:
        for process in psutil.Process(watch.pid).children(recursive=True):
            process.kill()
        kill([watch])
    assert len(ranks) == 2
    assert len(listening) >= 4, "the store, gloo of both ranks, metrics"
    assert open_to_all == []
    assert any(tmp_path.glob("watched*/*.jsonl")), "it was watched"


def test_a_message_names_an_error_of_the_table_only() -> None:
    told = RankFailure(rank=1, t=0.0, text="x", exit_code=1, error="Iterable", arguments={"what": "x", "fix": "y"})
    assert type(told.as_error()) is RankError
