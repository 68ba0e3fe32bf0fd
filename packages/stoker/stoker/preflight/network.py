"""The network between the ranks of a job: whether they reach each other, over which interface, and how fast.

The ranks check together: each starts a process of this module, as the launcher started the ranks, which measures an
all-reduce between them:

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=node-0 MASTER_PORT=29500 python -m stoker.preflight.network SECONDS JOIN_SECONDS

Where the processes do not meet, the reason is searched: a name that does not resolve, a port that nothing answers on,
a wrong interface. The description of the job comes from the caller (`training/cluster.py`).
"""

import datetime
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import psutil
import torch
import torch.distributed as dist

from stoker.hardware.device import Device
from stoker.knowledge import read_toml
from stoker.preflight.catalog import describe, run_program
from stoker_watch.errors import StokerError
from stoker_watch.findings.finding import Finding

JOIN_S = 15.0
"""Seconds for the other ranks to come: they are started by the same launcher, some seconds apart."""
START_S = 15.0
"""Seconds to import torch, on a slow disk."""
CONNECT_S = 3.0
MAX_BYTES = 64 * 2**20
"""Per all-reduce: between DistributedDataParallel's buckets (25 MB) and all gradients of RetinaNet-R50 (136 MB)."""
FIRST_BYTES, MIN_BYTES = 2**20, 2**16
NUM_SMALL = 50
"""All-reduces of one number, for the latency."""


class _Links(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_latency_s: dict[str, float]
    gloo_loopback: float
    ethernet_fraction: float
    gloo_cap: float
    gpu_fraction: float
    virtual: str
    fixes: dict[str, str]
    gpus: list[tuple[str, str, float]]


LINKS = msgspec.convert(read_toml("links.toml"), _Links)


class JobRank(Protocol):
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


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    backend: str
    device: str
    """For users: NVIDIA A100-SXM4-40GB, or cpu."""
    world_size: int
    latency_s: float
    """Median seconds of an all-reduce of one number."""
    size_bytes: int
    """Bytes of each large all-reduce."""
    count: int
    seconds: float
    """Seconds of all large ones together."""

    @property
    def bytes_per_s(self) -> float:
        """Gradients that are all-reduced per second."""
        return self.size_bytes * self.count / self.seconds

    @property
    def bus_bytes_per_s(self) -> float:
        """What each link carries: 2 (n-1) / n times as much (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md)."""
        return self.bytes_per_s * 2 * (self.world_size - 1) / self.world_size


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
    find_place: Callable[[Mapping[str, str]], JobRank | None],
    env: Mapping[str, str] = os.environ,
    join_s: float = JOIN_S,
) -> list[Finding]:
    """The network of this process's job. seconds: for the all-reduces. find_place: reads the job from the environment.
    Takes up to `join_s` + START_S + 1.5 × `seconds`."""
    try:
        place = find_place(env)
    except StokerError as error:
        what = error.what.removesuffix(".")
        return [describe("ranks", what=what, cause=error.cause or "environment variables", fix=error.fix or "")]
    if place is None or place.world_size == 1:
        return [describe("ranks/one")]
    present = list_interfaces()
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
    limit_ms = 1e3 * LINKS.max_latency_s["local" if local else "remote"]
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
    routed = next((interface.name for interface in interfaces if interface.address == route), None)
    choice, gloo = env.get("NCCL_SOCKET_IFNAME", ""), env.get("GLOO_SOCKET_IFNAME", "")
    texts: dict[str, Any] = {
        "good": routed or "eth0", "routed": routed or "no known interface", "choice": choice or "(unset)",
        "gloo": gloo or "(unset)", "name": socket.gethostname(),
        "present": ", ".join(f"{interface.name} {interface.address}" for interface in interfaces),
    }  # fmt: skip
    names = [interface.name for interface in interfaces]
    findings = [*_check_nccl(names, choice, routed, texts, local=local)]
    if any(name and name not in names for name in gloo.split(",")):
        findings.append(describe("rank_interface/gloo", "GLOO_SOCKET_IFNAME", **texts))
    elif not gloo and not local and (resolve(socket.gethostname()) or "").startswith("127."):
        findings.append(describe("rank_interface/loopback", own=resolve(socket.gethostname()), **texts))
    if not findings and not local and routed is not None:
        findings.append(describe("rank_interface", **texts))
    return findings


def _check_nccl(
    names: list[str], choice: str, routed: str | None, texts: dict[str, Any], *, local: bool
) -> Iterator[Finding]:
    chosen = nccl_interfaces(names, choice)
    dead_ends = [name for name in chosen if name == "lo" or re.match(LINKS.virtual, name)]
    if choice and not chosen:
        yield describe("rank_interface/none", "NCCL_SOCKET_IFNAME", **texts)
    elif chosen and not local and (dead_ends or (routed is not None and routed not in chosen)):
        level, wrong = "blocker" if chosen == ["lo"] else "warning", (dead_ends or chosen)[0]
        yield describe("rank_interface/nccl", "NCCL_SOCKET_IFNAME", severity=level, wrong=wrong, **texts)


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


def _measure(place: JobRank, seconds: float, join_s: float, env: Mapping[str, str]) -> Measurement | str:
    """The measurement of this rank, or the last message of its process."""
    command = [sys.executable, "-m", "stoker.preflight.network", str(seconds), str(join_s)]
    try:
        ended = run_program(command, START_S + join_s + 1.5 * seconds, env={**env, **place.variables()})
    except subprocess.TimeoutExpired:
        return f"the ranks did not meet within {START_S + join_s:.0f} s"
    try:
        return msgspec.json.decode(ended.last_line, type=Measurement)
    except msgspec.DecodeError:
        return ended.reason[:400]


def _search_reason(place: JobRank, address: str | None, message: str) -> Finding:
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


# The process of a rank, and what training measures (`training/defaults/sync_choice.py`).


def main(seconds: float, join_s: float) -> None:
    """Prints one line of JSON, a `Measurement`: with NCCL where every rank has a GPU of its own (untested on GPU), else
    with gloo on tensors of the CPU. In a process of its own, because a process group that does not form cannot be given
    up from inside, and because it leaves no state of torch.distributed in the caller."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    local_rank, local_size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if accelerator is not None and torch.accelerator.device_count() >= local_size:
        torch.accelerator.set_device_index(local_rank)
        device = Device(torch.device(accelerator.type, local_rank))
    else:
        device = Device(torch.device("cpu"))
    backend = dist.get_default_backend_for_device(device.torch_device)
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=join_s))
    measurement = measure(device, seconds)
    dist.barrier()
    dist.destroy_process_group()
    print(msgspec.json.encode(measurement).decode(), flush=True)


def measure(device: Device, seconds: float) -> Measurement:
    """What this rank measures in about so many seconds, in the process group that it is in; all ranks call it."""

    def agreed(value: float) -> int:
        tensor = torch.tensor([value], dtype=torch.float32, device=device.torch_device)
        dist.broadcast(tensor, src=0)
        return int(tensor.item())

    latency_s = statistics.median(timed(device, 4, 1) for _ in range(NUM_SMALL))
    per_byte_s = timed(device, FIRST_BYTES, 2) / (2 * FIRST_BYTES)
    size_bytes = agreed(min(MAX_BYTES, max(MIN_BYTES, seconds / 10 / per_byte_s)))
    count = agreed(min(1000.0, max(2.0, seconds / timed(device, size_bytes, 1))))
    elapsed_s = timed(device, size_bytes, count)
    return Measurement(
        backend=dist.get_default_backend_for_device(device.torch_device),
        device="cpu" if device.is_cpu else device.name,
        world_size=dist.get_world_size(),
        latency_s=latency_s,
        size_bytes=size_bytes,
        count=count,
        seconds=elapsed_s,
    )


def timed(device: Device, size_bytes: int, count: int, *, half: bool = False) -> float:
    """Seconds of `count` all-reduces of so many bytes, after one more; the same numbers on all ranks. half: of bf16
    numbers instead of fp32."""
    dtype = torch.bfloat16 if half else torch.float32
    tensor = torch.zeros(max(1, size_bytes // dtype.itemsize), dtype=dtype, device=device.torch_device)
    dist.all_reduce(tensor)
    device.synchronize()
    start_s = time.perf_counter()
    for _ in range(count):
        dist.all_reduce(tensor)
    device.synchronize()
    return time.perf_counter() - start_s


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]))
