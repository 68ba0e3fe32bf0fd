"""The network between ranks: two real processes with gloo, and every reason for which ranks do not meet."""

import os
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from stoker.preflight import network
from stoker.preflight.network import (
    Interface,
    Measurement,
    check_interfaces,
    check_network,
    judge_speed,
    nccl_interfaces,
)
from stoker_watch.errors import ConfigError, StokerError, UsageError
from stoker_watch.findings.finding import Finding

ETH0 = Interface("eth0", "10.0.0.5", 10e9)
FAST_ETH = Interface("eth0", "10.0.0.5", 100e9)
LOCAL = [Interface("lo", "127.0.0.1", None), ETH0, Interface("docker0", "172.17.0.1", None)]
FAST = Measurement(
    backend="gloo", device="cpu", world_size=2, latency_s=0.0002, size_bytes=64_000_000, count=10, seconds=0.64
)
"""1 GB/s."""


@dataclass(frozen=True)
class JobRank:
    """As `training/cluster.RankPlace`."""

    rank: int = 0
    world_size: int = 2
    local_world_size: int = 2
    host: str = "127.0.0.1"
    port: int = 1
    source: str = "torchrun"

    def variables(self) -> dict[str, str]:
        return {
            "RANK": str(self.rank), "WORLD_SIZE": str(self.world_size), "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port), "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "LOCAL_RANK": str(self.rank),
        }  # fmt: skip


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def check(place: JobRank | None, env: Mapping[str, str] = os.environ, **options: object) -> list[Finding]:
    return check_network(0.2, find_place=lambda _: place, env=env, **options)  # type: ignore[arg-type]


def test_one_process_has_no_network() -> None:
    assert [finding.severity for finding in check(None)] == ["ok"]
    assert [finding.severity for finding in check(JobRank(world_size=1))] == ["ok"]


def test_malformed_variables() -> None:
    def found(error: StokerError) -> tuple[str, str]:
        def refuse(_: Mapping[str, str]) -> None:
            raise error

        [finding] = check_network(find_place=refuse)
        return finding.severity, finding.fix

    assert found(ConfigError("RANK is 'x'.", fix="start with torchrun")) == ("blocker", "start with torchrun")
    assert found(UsageError("TF_CONFIG makes this process the task ps 0.", fix="only workers"))[0] == "blocker"
    assert found(ConfigError("TF_CONFIG is not the description of a cluster."))[0] == "blocker"


@pytest.mark.slow
def test_two_ranks() -> None:
    """Both ranks check at the same time, in processes of their own: the same all-reduces on both."""
    port = free_port()
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda rank: check(JobRank(rank=rank, port=port), join_s=200.0), range(2)))
    for findings in found:
        assert {finding.id for finding in findings} <= {"all_reduce_bandwidth", "all_reduce_latency"}, findings
        assert "between 2 ranks with gloo over loopback" in findings[0].evidence_text
    sent = {findings[0].evidence_text.partition(" with gloo")[0] for findings in found}
    assert len(sent) == 1, sent


def test_bus_bandwidth() -> None:
    """Of two ranks it is the rate itself, of many nearly twice as much (nccl-tests, PERFORMANCE.md)."""
    assert FAST.bus_bytes_per_s == FAST.bytes_per_s == 1e9
    many = Measurement(**{**{f: getattr(FAST, f) for f in FAST.__struct_fields__}, "world_size": 8})
    assert many.bus_bytes_per_s == pytest.approx(1.75e9)


@pytest.mark.parametrize(
    ("changes", "interface", "local", "ids"),
    [
        ({}, None, True, {"all_reduce_bandwidth": "ok"}),
        ({"seconds": 64.0}, None, True, {"all_reduce_bandwidth": "warning"}),
        ({"latency_s": 0.02}, None, True, {"all_reduce_latency": "warning"}),
        ({}, ETH0, False, {"all_reduce_bandwidth": "ok"}),
        ({"seconds": 6.4}, ETH0, False, {"all_reduce_bandwidth": "warning"}),
        ({}, FAST_ETH, False, {"all_reduce_bandwidth": "ok"}),  # gloo is the limit, not the interface
        ({"backend": "nccl"}, FAST_ETH, False, {"all_reduce_bandwidth": "warning"}),
        ({"seconds": 6.4}, Interface("eth0", "10.0.0.5", None), False, {"all_reduce_bandwidth": "ok"}),
        ({"seconds": 6.4}, None, False, {"all_reduce_bandwidth": "ok"}),
        ({"latency_s": 0.05, "seconds": 64.0}, ETH0, False,
         {"all_reduce_bandwidth": "warning", "all_reduce_latency": "warning"}),
        ({"backend": "nccl", "device": "NVIDIA A100-SXM4-40GB"}, None, True, {"all_reduce_bandwidth": "warning"}),
        ({"backend": "nccl", "device": "NVIDIA A100-SXM4-40GB", "seconds": 0.004}, None, True,
         {"all_reduce_bandwidth": "ok"}),
        ({"backend": "nccl", "device": "Tesla T4", "seconds": 0.1}, None, True, {"all_reduce_bandwidth": "ok"}),
        ({"backend": "nccl", "device": "Another GPU"}, None, True, {"all_reduce_bandwidth": "ok"}),
    ],
)  # fmt: skip
def test_floors(changes: dict[str, object], interface: Interface | None, local: bool, ids: dict[str, str]) -> None:
    fields = {field: getattr(FAST, field) for field in FAST.__struct_fields__}
    findings = judge_speed(Measurement(**{**fields, **changes}), interface, local=local)
    assert {finding.id: finding.severity for finding in findings} == ids
    assert all(bool(finding.fix) == (finding.severity == "warning") for finding in findings)


@pytest.mark.parametrize(
    ("choice", "names", "expected"),
    [
        ("", ["lo", "docker0", "eth0", "ib0"], ["ib0"]),
        ("", ["lo", "docker0", "eth0", "br-1"], ["eth0", "br-1"]),
        ("", ["lo", "docker0"], ["docker0"]),
        ("", ["lo"], ["lo"]),
        ("", [], []),
        ("eth", ["lo", "eth0", "eth1"], ["eth0", "eth1"]),
        ("=eth1", ["lo", "eth0", "eth1", "eth10"], ["eth1"]),
        ("^docker", ["lo", "eth0", "docker0"], ["lo", "eth0"]),
        ("^=eth1,lo", ["lo", "eth0", "eth1"], ["eth0"]),
        ("ens", ["lo", "eth0"], []),
    ],
)
def test_interfaces_of_nccl(choice: str, names: list[str], expected: list[str]) -> None:
    """The rules of NCCL's documentation, with its examples."""
    assert nccl_interfaces(names, choice) == expected


@pytest.mark.parametrize(
    ("env", "interfaces", "severity", "says"),
    [
        ({}, LOCAL, "ok", "over eth0"),
        ({"NCCL_SOCKET_IFNAME": "eth0"}, LOCAL, "ok", "over eth0"),
        ({"NCCL_SOCKET_IFNAME": "ens5"}, LOCAL, "blocker", "matches no interface"),
        ({"NCCL_SOCKET_IFNAME": "lo"}, LOCAL, "blocker", "takes lo"),
        ({"NCCL_SOCKET_IFNAME": "^eth"}, LOCAL, "warning", "takes lo"),
        ({"NCCL_SOCKET_IFNAME": "docker0"}, LOCAL, "warning", "takes docker0"),
        ({}, [*LOCAL, Interface("br-4f1", "172.18.0.1", None)], "warning", "takes br-4f1"),
        ({"NCCL_SOCKET_IFNAME": "eth1"}, [*LOCAL, Interface("eth1", "10.1.0.5", None)], "warning", "takes eth1"),
        ({"GLOO_SOCKET_IFNAME": "^lo,docker"}, LOCAL, "blocker", "names no interface"),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, LOCAL, "ok", "over eth0"),
    ],
)
def test_interfaces(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], interfaces: list[Interface], severity: str, says: str
) -> None:
    monkeypatch.setattr(network, "resolve", lambda _: "10.0.0.5")
    [finding] = check_interfaces(interfaces, "10.0.0.5", env, local=False)
    assert finding.severity == severity
    assert says in finding.title
    assert ("IFNAME=eth0" in finding.fix) == (severity != "ok")


def test_hostname_that_is_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "resolve", lambda _: "127.0.1.1")
    [finding] = check_interfaces(LOCAL, "10.0.0.5", {}, local=False)
    assert finding.severity == "warning"
    assert "127.0.1.1" in finding.title
    assert check_interfaces(LOCAL, "127.0.0.1", {}, local=True) == []


def test_interfaces_of_this_machine() -> None:
    names = [interface.name for interface in network.list_interfaces()]
    assert "lo" in names
    assert network.route_to("127.0.0.1") == "127.0.0.1"
    assert network.resolve("localhost") == "127.0.0.1"


@pytest.mark.parametrize(
    ("place", "said", "id", "severity"),
    [
        (JobRank(rank=1, host="no-such-host.invalid"), "", "rank_address", "blocker"),
        (JobRank(rank=0), "RuntimeError: EADDRINUSE, address already in use", "rank_port", "blocker"),
        (JobRank(rank=0), "timed out", "ranks_not_met", "unknown"),
        (JobRank(rank=1), "timed out", "ranks_not_met", "unknown"),  # refused: nothing listens on port 1
        (JobRank(rank=1, host="255.255.255.255"), "timed out", "rank_unreachable", "blocker"),  # not a host's address
    ],
)
def test_reasons(monkeypatch: pytest.MonkeyPatch, place: JobRank, said: str, id: str, severity: str) -> None:
    monkeypatch.setattr(network, "CONNECT_S", 0.2)
    monkeypatch.setattr(network, "_measure", lambda *_: said)
    finding = check(place)[-1]
    assert (finding.id, finding.severity) == (id, severity), finding
    assert finding.fix


def test_rank_alone_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other rank comes: the process ends by itself or is killed, and the finding says what it said."""
    monkeypatch.setattr(network, "START_S", 0.0)
    finding = check(JobRank(rank=0, port=free_port()), join_s=0.1)[-1]
    assert (finding.id, finding.severity) == ("ranks_not_met", "unknown")
    assert "did not meet within" in finding.evidence_text
