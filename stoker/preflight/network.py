"""The network between the ranks of a job: whether they reach each other, over which interface, and how fast.

The ranks check together: each starts an `all_reduce` process, as the launcher started the ranks. Where the processes do
not meet, the reason is searched: a name that does not resolve, a port that nothing answers on, a wrong interface. The
description of the job comes from the caller (`training/cluster.py`); a process alone has nothing to check.
"""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import psutil

from stoker.errors import ConfigError, StokerError
from stoker.preflight.all_reduce import Measurement
from stoker.preflight.findings import CheckFinding, Severity, make_finding

JOIN_S = 15.0
"""For the other ranks to come: they are started by the same launcher, some seconds apart."""
START_S = 15.0
"""To import torch, on a slow disk."""
CONNECT_S = 3.0
MAX_LATENCY_S = {True: 0.005, False: 0.01}
"""Of an all-reduce of one number, on one machine and between machines. gloo takes 0.2 ms on one machine
(github.com/meta-pytorch/torchft/pull/199), 0.35 ms between two over TCP (github.com/pytorch/gloo/issues/158). A round
trip between zones of a region is usually below 1 ms (cloud.google.com/compute/docs/regions-zones), between regions
above 10 ms."""

GLOO_LOOPBACK_FLOOR = 0.15e9
"""Bytes per second of gloo on one machine, over TCP on loopback: 2.4 GB/s on a fast one (torchft/pull/199); 0.06
between two ranks on two cores with a load of 12 (`LOG.md`). Less than the floor says that the cores are busy."""
ETHERNET_FRACTION = 0.5
"""Of the speed of the interface. NCCL over TCP or RoCE reaches 65 to 90 % (github.com/NVIDIA/nccl/issues/700, where
65 % was reported as a fault). gloo reaches 90 % of 1 Gbit/s (github.com/pytorch/gloo/issues/21)."""
GLOO_FLOOR_CAP = 0.5e9
"""Half of what gloo reaches on 40 Gbit/s, 1.07 GB/s, where its one core per rank is the limit (gloo/issues/248)."""
GPU_LINKS = (
    (r"H100.*(?:HBM3|SXM)|H200|H800", "NVLink 4", 450e9),
    (r"A100.*SXM|A800.*SXM", "NVLink 3", 230e9),
    (r"V100.*SXM", "NVLink 2", 130e9),
    (r"H100.*NVL", "NVLink bridge", 115e9),
    (r"H100|A100|L40|A10|L4|RTX", "PCIe 4", 18e9),
    (r"T4|V100|P100|P4", "PCIe 3", 9e9),
)
"""Name of the GPU, link between the GPUs of a machine, bus bandwidth in bytes per second of an all-reduce of 64 MiB and
more: docs.alayanew.com "NCCL-tests in practice" (8 × H100 460–480, 8 × A100 230–250, PCIe 5 35–45 GB/s),
github.com/NVIDIA/nccl-tests/issues/149 (8 × A100 about 200), github.com/NVIDIA/nccl/issues/1161 (bridge 115)."""
GPU_LINK_FRACTION = 0.5
"""Below half of it a link is down, peer access is disabled (NCCL_P2P_DISABLE), or the traffic takes another way."""

_VIRTUAL = re.compile(r"docker|br-|veth|virbr|cni|flannel|cali|tailscale|wg|tun|tap|vmnet|podman|ifb|dummy")
"""Interfaces that exist on every machine with the same address, or lead elsewhere."""


class Place(Protocol):
    """This process in its job; `training/cluster.RankPlace`."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def local_world_size(self) -> int: ...
    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def source(self) -> str: ...
    def variables(self) -> dict[str, str]: ...


class Interface(NamedTuple):
    """A network interface that is up."""

    name: str
    address: str
    """IPv4."""
    speed_bits: float | None
    """Bits per second; None: not known, as for most virtual machines."""


def check_network(
    seconds: float = 10.0,
    *,
    find_place: Callable[[Mapping[str, str]], Place | None],
    env: Mapping[str, str] = os.environ,
    interfaces: Sequence[Interface] | None = None,
    join_s: float = JOIN_S,
) -> list[CheckFinding]:
    """The network of this process's job. seconds: for the all-reduces. find_place: reads the job from the environment.
    interfaces: those of this machine; None: found out. Takes up to `join_s` + START_S + 1.5 × `seconds`."""
    try:
        place = find_place(env)
    except StokerError as error:
        what = error.what.removesuffix(".")
        if isinstance(error, ConfigError) and re.search(r"TF_CONFIG|CLUSTER_SPEC", what):
            return [make_finding("ranks", "unknown", "the ranks of this job", f"{what} (see the finding about it)")]
        return [make_finding("ranks", "blocker", what, error.cause or "environment variables", error.fix or "")]
    if place is None or place.world_size == 1:
        evidence = "no variable describes a job of several ranks (torchrun, Slurm, TF_CONFIG, CLUSTER_SPEC)"
        return [make_finding("ranks", "ok", "one process: no network between ranks", evidence)]
    present = list_interfaces() if interfaces is None else list(interfaces)
    local = place.local_world_size == place.world_size
    address = resolve(place.host)
    route = None if address is None else route_to(address)
    findings = check_interfaces(present, route, env, local=local)
    measured = _measure(place, seconds, join_s, env)
    if isinstance(measured, Measurement):
        interface = next((candidate for candidate in present if candidate.address == route), None)
        return [*findings, *judge_speed(measured, interface, local=local)]
    return [*findings, _search_reason(place, address, measured)]


def judge_speed(measured: Measurement, interface: Interface | None, *, local: bool) -> list[CheckFinding]:
    """Bandwidth and latency against the floor of the link. interface: over which the other ranks are reached; local:
    all are on this machine."""
    link, floor = link_floor(measured, interface, local=local)
    bus, latency_ms, limit_ms = measured.bus_bytes_per_s, measured.latency_s * 1e3, MAX_LATENCY_S[local] * 1e3
    figures = f"{bus / 1e9:.3g} GB/s, latency {latency_ms:.2g} ms"
    evidence = (
        f"{measured.count} all-reduces of {measured.size_bytes / 1e6:.1f} MB between {measured.world_size} ranks with "
        f"{measured.backend} over {link}: {figures}; 100 MB of gradients take {1e11 / measured.bytes_per_s:.3g} ms"
    )
    findings: list[CheckFinding] = []
    if floor is not None and bus < floor:
        fix = "choose the fastest interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), or machines with more network"
        if local and measured.device != "cpu":
            fix = "unset NCCL_P2P_DISABLE and NCCL_SHM_DISABLE; nvidia-smi topo -m and nvlink -s show the links"
        elif local:
            fix = "free the cores of other processes, or give the container more CPU"
        title = f"all-reduce between ranks: {bus / 1e9:.3g} GB/s, where {link} gives at least {floor / 1e9:.3g}"
        findings.append(make_finding("all_reduce_bandwidth", "warning", title, evidence, fix))
    if latency_ms > limit_ms:
        title = f"an all-reduce of one number takes {latency_ms:.3g} ms; at most {limit_ms:g} ms is usual"
        fix = "free the cores of other processes"
        if not local:
            fix = "place the machines in one zone (compact placement policy, cluster placement group)"
        findings.append(make_finding("all_reduce_latency", "warning", title, evidence, fix))
    if not findings:
        evidence += "" if floor is not None else "; no floor is known for this link"
        findings.append(make_finding("all_reduce_bandwidth", "ok", f"all-reduce between ranks: {figures}", evidence))
    return findings


def link_floor(measured: Measurement, interface: Interface | None, *, local: bool) -> tuple[str, float | None]:
    """(the link in words, bytes per second that it must carry; None: not known)."""
    if local and measured.device == "cpu":
        return "loopback", GLOO_LOOPBACK_FLOOR
    if local:
        for pattern, name, speed in GPU_LINKS:
            if re.search(pattern, measured.device):
                return f"{name} ({measured.device})", GPU_LINK_FRACTION * speed
        return measured.device, None
    if interface is None:
        return "an interface that is not known", None
    if interface.speed_bits is None:
        return f"{interface.name} (of unknown speed)", None
    floor = ETHERNET_FRACTION * interface.speed_bits / 8
    link = f"{interface.name} ({interface.speed_bits / 1e9:g} Gbit/s)"
    return link, min(floor, GLOO_FLOOR_CAP) if measured.backend == "gloo" else floor


def check_interfaces(
    interfaces: Sequence[Interface], route: str | None, env: Mapping[str, str], *, local: bool
) -> list[CheckFinding]:
    """Which interfaces NCCL and gloo would take, against the one that leads to the other ranks. route: its address."""
    findings: list[CheckFinding] = []
    names = [interface.name for interface in interfaces]
    routed = next((interface.name for interface in interfaces if interface.address == route), None)
    good = routed or "eth0"
    present = ", ".join(f"{interface.name} {interface.address}" for interface in interfaces)
    choice, gloo = env.get("NCCL_SOCKET_IFNAME", ""), env.get("GLOO_SOCKET_IFNAME", "")
    chosen = nccl_interfaces(names, choice)
    if choice and not chosen:
        title, fix = (
            f"NCCL_SOCKET_IFNAME={choice} matches no interface",
            f"export NCCL_SOCKET_IFNAME={good}, or unset it",
        )
        findings.append(make_finding("rank_interface", "blocker", title, present, fix, "NCCL_SOCKET_IFNAME"))
    elif chosen and not local:
        dead_ends = [name for name in chosen if name == "lo" or _VIRTUAL.match(name)]
        if dead_ends or (routed is not None and routed not in chosen):
            wrong = dead_ends[0] if dead_ends else chosen[0]
            only = "" if len(chosen) == 1 or not dead_ends else "also "
            title = f"NCCL {only}takes {wrong}; the other ranks are reached over {routed or 'no known interface'}"
            evidence = f"{present}; NCCL_SOCKET_IFNAME={choice or '(unset)'}"
            severity: Severity = "blocker" if chosen == ["lo"] else "warning"
            fix = f"export NCCL_SOCKET_IFNAME={good}"
            findings.append(make_finding("rank_interface", severity, title, evidence, fix, "NCCL_SOCKET_IFNAME"))
    if any(name and name not in names for name in gloo.split(",")):
        title = f"GLOO_SOCKET_IFNAME={gloo} names no interface of this machine"
        evidence = present + (
            "; unlike NCCL's it takes whole names, no ^ and no =" if re.search(r"[\^=]", gloo) else ""
        )
        fix = f"export GLOO_SOCKET_IFNAME={good}"
        findings.append(make_finding("rank_interface", "blocker", title, evidence, fix, "GLOO_SOCKET_IFNAME"))
    elif not gloo and not local and (own := resolve(socket.gethostname())) is not None and own.startswith("127."):
        title = f"the name of this machine resolves to {own}: gloo tells the other ranks to connect there"
        fix = f"export GLOO_SOCKET_IFNAME={good}"
        findings.append(make_finding("rank_interface", "warning", title, f"{socket.gethostname()} in /etc/hosts", fix))
    if not findings and not local and routed is not None:
        evidence = f"{present}; NCCL_SOCKET_IFNAME={choice or '(unset)'}, GLOO_SOCKET_IFNAME={gloo or '(unset)'}"
        findings.append(make_finding("rank_interface", "ok", f"the ranks are reached over {routed}", evidence))
    return findings


def nccl_interfaces(names: Sequence[str], choice: str) -> list[str]:
    """The interfaces that NCCL takes, the first for its start (docs.nvidia.com/deeplearning/nccl, env.html): prefixes,
    `=` for whole names, `^` for those to leave out; by default ib…, else all but docker… and lo, else docker…, else lo.
    names: in the order of the kernel."""
    if not choice:
        for pattern in (r"ib", r"(?!docker|lo)", r"docker", r"lo"):
            if chosen := [name for name in names if re.match(pattern, name)]:
                return chosen
        return []
    excluded, exact = choice.startswith("^"), choice.lstrip("^").startswith("=")
    given = [part.strip() for part in choice.lstrip("^=").split(",") if part.strip()]

    def matches(name: str) -> bool:
        return any(name == part if exact else name.startswith(part) for part in given)

    return [name for name in names if matches(name) != excluded]


def list_interfaces(sysfs: Path = Path("/sys/class/net")) -> list[Interface]:
    """The interfaces that are up and have an IPv4 address, in the order of the kernel."""
    addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    interfaces: list[Interface] = []
    for _, name in socket.if_nameindex():
        address = next((a.address for a in addresses.get(name, []) if a.family == socket.AF_INET), None)
        if address is None or not (name in states and states[name].isup):
            continue
        try:
            speed_mbit = int((sysfs / name / "speed").read_text())
        except (OSError, ValueError):  # loopback, and many virtual interfaces
            speed_mbit = -1
        interfaces.append(Interface(name, address, speed_mbit * 1e6 if speed_mbit > 0 else None))
    return interfaces


def resolve(host: str) -> str | None:
    """The IPv4 address of a host; None if it has none."""
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


def route_to(address: str) -> str | None:
    """The address of this machine from which packets to `address` leave. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _measure(place: Place, seconds: float, join_s: float, env: Mapping[str, str]) -> Measurement | str:
    """The measurement of this rank, or the last message of its process."""
    command = [sys.executable, "-m", "stoker.preflight.all_reduce", str(seconds), str(join_s)]
    try:
        done = subprocess.run(
            command,
            env={**env, **place.variables()},
            capture_output=True,
            text=True,
            timeout=START_S + join_s + 1.5 * seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the ranks did not meet within {START_S + join_s:.0f} s"
    except OSError as error:
        return str(error)
    try:
        return msgspec.json.decode(done.stdout.strip().rpartition("\n")[2], type=Measurement)
    except msgspec.DecodeError:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        return lines[-1][:400] if lines else f"the process of the check ended with exit code {done.returncode}"


def _search_reason(place: Place, address: str | None, message: str) -> CheckFinding:
    """Why the ranks did not meet."""
    where = f"{place.host}:{place.port}"
    name = f"rank {place.rank} of {place.world_size} ({place.source})"
    if address is None:
        title = f"the host of rank 0, {place.host}, does not resolve"
        fix = "write its IP address into MASTER_ADDR, or add it to DNS or /etc/hosts"
        return make_finding("rank_address", "blocker", title, f"{name}; {message}", fix, where)
    if place.rank == 0:
        if "EADDRINUSE" in message or "address already in use" in message.lower():
            fix = "end the job that listens there (ss -ltnp), or choose another MASTER_PORT"
            return make_finding(
                "rank_port", "blocker", f"port {place.port} of this machine is in use", message, fix, where
            )
        return _not_met(f"{name}: {message}", where)
    try:
        socket.create_connection((address, place.port), CONNECT_S).close()
    except ConnectionRefusedError:
        return _not_met(
            f"{name}: {address} refuses connections to port {place.port}, rank 0 does not listen; {message}", where
        )
    except OSError as error:
        reason = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        fix = (
            f"open port {place.port} and the ports above 1024 between the machines (firewall rule, security group, "
            "network policy), and check MASTER_ADDR"
        )
        title = f"rank 0 cannot be reached at {where}"
        return make_finding(
            "rank_unreachable", "blocker", title, f"{name}: {reason} ({address}); {message}", fix, where
        )
    return _not_met(f"{name}: {where} is reachable; {message}", where)


def _not_met(evidence: str, where: str) -> CheckFinding:
    title = "the ranks did not meet, so the network between them was not measured"
    fix = (
        "start the check on all ranks at the same time, as the training: srun stoker check …, or torchrun … -m stoker "
        "check …; open all ports above 1024 between the machines"
    )
    return make_finding("ranks_not_met", "unknown", title, evidence, fix, where)
