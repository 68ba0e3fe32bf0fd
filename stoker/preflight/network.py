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
from typing import Any, NamedTuple, Protocol

import msgspec
import psutil

from stoker.errors import StokerError
from stoker.findings.finding import Finding, Severity
from stoker.knowledge import read_toml
from stoker.preflight.all_reduce import Measurement
from stoker.preflight.catalog import describe, run_program

JOIN_S = 15.0
"""For the other ranks to come: they are started by the same launcher, some seconds apart."""
START_S = 15.0
"""To import torch, on a slow disk."""
CONNECT_S = 3.0


class _Latency(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    local: float
    remote: float


class _Links(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_latency_s: _Latency
    gloo_loopback: float
    ethernet_fraction: float
    gloo_cap: float
    gpu_fraction: float
    virtual: str
    fixes: dict[str, str]
    gpus: list[tuple[str, str, float]]


LINKS = msgspec.convert(read_toml("links.toml"), _Links)


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
) -> list[Finding]:
    """The network of this process's job. seconds: for the all-reduces. find_place: reads the job from the environment.
    interfaces: those of this machine; None: found out. Takes up to `join_s` + START_S + 1.5 × `seconds`."""
    try:
        place = find_place(env)
    except StokerError as error:
        what = error.what.removesuffix(".")
        return [describe("ranks", what=what, cause=error.cause or "environment variables", fix=error.fix or "")]
    if place is None or place.world_size == 1:
        return [describe("ranks/one")]
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


def judge_speed(measured: Measurement, interface: Interface | None, *, local: bool) -> list[Finding]:
    """Bandwidth and latency against the floor of the link. interface: over which the other ranks are reached; local:
    all are on this machine."""
    link, floor = link_floor(measured, interface, local=local)
    bus, latency_ms = measured.bus_bytes_per_s, measured.latency_s * 1e3
    limit_ms = 1e3 * (LINKS.max_latency_s.local if local else LINKS.max_latency_s.remote)
    figures = f"{bus / 1e9:.3g} GB/s, latency {latency_ms:.2g} ms"
    evidence = (
        f"{measured.count} all-reduces of {measured.size_bytes / 1e6:.1f} MB between {measured.world_size} ranks with "
        f"{measured.backend} over {link}: {figures}; 100 MB of gradients take {1e11 / measured.bytes_per_s:.3g} ms"
    )
    kind = "remote" if not local else "cpu" if measured.device == "cpu" else "gpu"
    texts: dict[str, Any] = {"fix": LINKS.fixes[kind], "evidence": evidence}
    findings: list[Finding] = []
    if floor is not None and bus < floor:
        speed = f"{bus / 1e9:.3g} GB/s"
        findings.append(describe("all_reduce_bandwidth", speed=speed, link=link, floor=floor / 1e9, **texts))
    if latency_ms > limit_ms:
        findings.append(describe("all_reduce_latency", latency=latency_ms, limit=limit_ms, **texts))
    return findings or [describe("all_reduce_bandwidth/ok", figures=figures, evidence=evidence)]


def link_floor(measured: Measurement, interface: Interface | None, *, local: bool) -> tuple[str, float | None]:
    """(the link in words, bytes per second that it must carry; None: not known)."""
    if local and measured.device == "cpu":
        return "loopback", LINKS.gloo_loopback
    if local:
        for pattern, name, speed in LINKS.gpus:
            if re.search(pattern, measured.device):
                return f"{name} ({measured.device})", LINKS.gpu_fraction * speed
        return measured.device, None
    if interface is None:
        return "an interface that is not known", None
    if interface.speed_bits is None:
        return f"{interface.name} (of unknown speed)", None
    floor = LINKS.ethernet_fraction * interface.speed_bits / 8
    link = f"{interface.name} ({interface.speed_bits / 1e9:g} Gbit/s)"
    return link, min(floor, LINKS.gloo_cap) if measured.backend == "gloo" else floor


def check_interfaces(
    interfaces: Sequence[Interface], route: str | None, env: Mapping[str, str], *, local: bool
) -> list[Finding]:
    """Which interfaces NCCL and gloo would take, against the one that leads to the other ranks. route: its address."""
    names = [interface.name for interface in interfaces]
    routed = next((interface.name for interface in interfaces if interface.address == route), None)
    choice, gloo = env.get("NCCL_SOCKET_IFNAME", ""), env.get("GLOO_SOCKET_IFNAME", "")
    texts: dict[str, Any] = {
        "good": routed or "eth0", "routed": routed or "no known interface", "choice": choice or "(unset)",
        "gloo": gloo or "(unset)",
        "present": ", ".join(f"{interface.name} {interface.address}" for interface in interfaces),
    }  # fmt: skip
    findings: list[Finding] = []
    chosen = nccl_interfaces(names, choice)
    dead_ends = [name for name in chosen if name == "lo" or re.match(LINKS.virtual, name)]
    if choice and not chosen:
        findings.append(describe("rank_interface/none", "NCCL_SOCKET_IFNAME", **texts))
    elif chosen and not local and (dead_ends or (routed is not None and routed not in chosen)):
        severity: Severity = "blocker" if chosen == ["lo"] else "warning"
        wrong = (dead_ends or chosen)[0]
        findings.append(describe("rank_interface/nccl", "NCCL_SOCKET_IFNAME", severity=severity, wrong=wrong, **texts))
    if any(name and name not in names for name in gloo.split(",")):
        findings.append(describe("rank_interface/gloo", "GLOO_SOCKET_IFNAME", **texts))
    elif not gloo and not local and (own := resolve(socket.gethostname())) is not None and own.startswith("127."):
        findings.append(describe("rank_interface/loopback", own=own, name=socket.gethostname(), **texts))
    if not findings and not local and routed is not None:
        findings.append(describe("rank_interface", **texts))
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


def list_interfaces() -> list[Interface]:
    """The interfaces that are up and have an IPv4 address, in the order of the kernel."""
    addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    interfaces: list[Interface] = []
    for _, name in socket.if_nameindex():
        address = next((a.address for a in addresses.get(name, []) if a.family == socket.AF_INET), None)
        if address is not None and name in states and states[name].isup:
            speed_mbit = states[name].speed  # 0 for loopback, and many virtual interfaces
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
        ended = run_program(command, START_S + join_s + 1.5 * seconds, env={**env, **place.variables()})
    except subprocess.TimeoutExpired:
        return f"the ranks did not meet within {START_S + join_s:.0f} s"
    try:
        return msgspec.json.decode(ended.last_line, type=Measurement)
    except msgspec.DecodeError:
        return ended.reason[:400]


def _search_reason(place: Place, address: str | None, message: str) -> Finding:
    """Why the ranks did not meet."""
    where = f"{place.host}:{place.port}"
    name = f"rank {place.rank} of {place.world_size} ({place.source})"
    if address is None:
        return describe("rank_address", where, host=place.host, evidence=f"{name}; {message}")
    if place.rank == 0:
        if "EADDRINUSE" in message or "address already in use" in message.lower():
            return describe("rank_port", where, port=place.port, evidence=message)
        return describe("ranks_not_met", where, evidence=f"{name}: {message}")
    try:
        socket.create_connection((address, place.port), CONNECT_S).close()
        found = f"{where} is reachable"
    except ConnectionRefusedError:
        found = f"{address} refuses connections to port {place.port}, rank 0 does not listen"
    except OSError as error:
        reason = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        evidence = f"{name}: {reason} ({address}); {message}"
        return describe("rank_unreachable", where, where=where, port=place.port, evidence=evidence)
    return describe("ranks_not_met", where, evidence=f"{name}: {found}; {message}")
