"""Which ranks a job has, and which of them this process is: the variables of torchrun, `TF_CONFIG`, Vertex AI's
`CLUSTER_SPEC`, and Slurm.

`TF_CONFIG` and `CLUSTER_SPEC` are JSON in an environment variable, set for each process of a job: by Vertex AI,
Kubeflow, or by hand for TensorFlow's MultiWorkerMirroredStrategy. Each process that they list is a rank, or with
`--devices N` the starter of N ranks of its machine (`local_ranks.py`). What ranks tell each other: `ranks.py`.
"""

import contextlib
import dataclasses
import datetime
import math
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import psutil

from stoker_watch.errors import ConfigError, RankError, UsageError, make_error

VARIABLES = ("TF_CONFIG", "CLUSTER_SPEC")
TRAINING_TASKS = ("chief", "master", "worker", "workerpool0", "workerpool1")
"""Tasks that train, in the order of their ranks. Vertex AI's pool 0 is the chief, pool 1 the other workers, pools 2 and
3 are parameter servers and evaluators (cloud.google.com/vertex-ai/docs/training/distributed-training)."""
EXAMPLE = '{"cluster": {"worker": ["host:port"]}, "task": {"type": "worker", "index": 0}}'
DEFAULT_PORT = 29500
"""torchrun's port, for a cluster whose addresses have none."""


@dataclasses.dataclass(frozen=True)
class Devices:
    """How many devices train together, each in a process of its own."""

    count: int = 1
    on_host: int = 1
    """How many of them are on this machine and share its memory."""


ONE_DEVICE = Devices()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankPlace:
    """The place of this process in a job of several ranks. local_rank: its number on its machine, and of its device;
    host, port: where rank 0 listens; source: what says so (torchrun, Slurm, TF_CONFIG)."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    port: int
    source: str

    @property
    def is_one_machine(self) -> bool:
        return self.local_world_size == self.world_size

    def variables(self) -> dict[str, str]:
        """The variables that torchrun sets and `find_place` reads."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
        }


MEET_TIMEOUT_S, SAY_MISSING_S = 600.0, 30.0
"""How long ranks of several machines wait for each other, as torchrun's agents do; when rank 0 names the missing."""


def meet(place: RankPlace, *, timeout_s: float = MEET_TIMEOUT_S) -> Any:
    """A store that all ranks of several machines have reached; makes gloo and NCCL use the network between them: the
    interface of the route to a rank of another machine, unless the user has set one. (gloo's default is the address of
    the machine's name, which /etc/hosts of Debian and Ubuntu makes 127.0.1.1.) Raises RankError, which names the
    address, or the ranks that are missing."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's, also for its restarts
    is_server, timeout = place.rank == 0 and not has_agent, datetime.timedelta(seconds=timeout_s)
    address = _resolve(place.host)
    try:
        store = TCPStore(place.host, place.port, None, is_server, timeout, wait_for_workers=False)
        met = PrefixStore(f"met/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        met.set(str(place.rank), find_route(address, place.port)[0])
        end_s, say_s = time.monotonic() + timeout_s, time.monotonic() + SAY_MISSING_S
        while missing := [rank for rank in range(place.world_size) if not met.check([str(rank)])]:
            now_s, names = time.monotonic(), ", ".join(map(str, missing))
            if now_s > end_s:
                raise RankError(
                    f"Of {place.world_size} ranks {names} did not come within {timeout_s:.0f} s.",
                    location=f"{place.host}:{place.port} ({address}), where rank 0 listens ({place.source})",
                    fix="look whether they run, and for their own messages: they name the address that they try",
                )
            if now_s > say_s and place.rank == 0:
                print(f"stoker: waiting for rank {names} at {place.host}:{place.port}", file=sys.stderr, flush=True)
                say_s = math.inf
            time.sleep(0.1)
        routes = [find_route(met.get(str(rank)).decode(), place.port) for rank in range(place.world_size)]
    except (RuntimeError, ValueError) as error:
        is_here = place.rank > 0 and find_route(address, place.port)[1] == "lo"
        raise RankError(
            f"Rank {place.rank} of {place.world_size} cannot reach rank 0.",
            location=f"{place.host}:{place.port}, which is {address} here ({place.source})",
            cause=str(error).partition("\n")[0],
            fix="MASTER_ADDR is an address of this machine itself: set that of rank 0, as this machine reaches it"
            if is_here
            else "start rank 0; let the network and its firewalls pass all TCP ports between the machines",
        ) from error
    away = [interface for own, interface in (find_route(address, place.port), *routes) if interface not in ("", "lo")]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if away else ():
        os.environ.setdefault(variable, away[0])
    return store


def _resolve(host: str) -> str:
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)[0][4][0])
    return host


def find_route(address: str, port: int) -> tuple[str, str]:
    """(this machine's address, its interface) on the way to an address; empty where there is none. To this machine
    itself the interface is that of the loopback. Nothing is sent: a UDP socket only looks up the route."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        own = str(probe.getsockname()[0])
        rows = psutil.net_if_addrs().items()
        names = [name for name, addresses in rows if any(row.address == own for row in addresses)]
        return own, "lo" if own == address or not names else names[0]
    return "", ""


def can_divide(settings: Mapping[str, Any], count: int) -> bool:
    """Whether so many devices get equal parts of the batch, with mosaics of whole groups of four images.
    settings: `batch_size`, `mosaic`; those that are not set are chosen to fit."""
    unit = count * (4 if settings.get("mosaic") else 1)
    return count == 1 or not (settings.get("batch_size") or 0) % unit


def find_place(env: Mapping[str, str] = os.environ) -> RankPlace | None:
    """The place of this process; None: it trains alone. Variables of torchrun count before those of a cluster, which
    started it. Raises ConfigError for malformed variables, UsageError for a process that does not train."""
    for read in (_read_torchrun, _read_cluster, _read_slurm):
        place = read(env)
        if place is not None:
            return place if place.world_size > 1 else None
    return None


def _read_torchrun(env: Mapping[str, str]) -> RankPlace | None:
    if not (env.get("RANK") and env.get("WORLD_SIZE")):
        return None
    rank, world_size = _read_int(env, "RANK"), _read_int(env, "WORLD_SIZE")
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"RANK={rank} does not fit WORLD_SIZE={world_size}.", fix="unset both, or start the ranks with torchrun"
        )
    if world_size > 1 and not env.get("MASTER_ADDR"):
        raise make_error(ConfigError, "no-master-address", world_size=world_size)
    return RankPlace(
        rank=rank,
        world_size=world_size,
        local_rank=_read_int(env, "LOCAL_RANK", 0),
        local_world_size=_read_int(env, "LOCAL_WORLD_SIZE", 1),
        host=env.get("MASTER_ADDR", "127.0.0.1"),
        port=_read_int(env, "MASTER_PORT", DEFAULT_PORT),
        source="torchrun",
    )


def _read_cluster(env: Mapping[str, str]) -> RankPlace | None:
    """Reads the first of VARIABLES that names processes which train: Vertex AI sets both."""
    for variable in VARIABLES:
        if not env.get(variable, "").strip():
            continue
        try:
            spec = msgspec.json.decode(env[variable], type=dict[str, Any])
            cluster = msgspec.convert(spec.get("cluster") or {}, dict[str, list[str] | dict[str, str]])
            task = msgspec.convert(spec.get("task") or {}, dict[str, Any])
            own = str(task.get("type", "worker")), int(task.get("index", 0))
        except (msgspec.DecodeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"The environment variable {variable} is not the description of a cluster.",
                cause=str(error),
                fix=f"unset {variable}, or correct the JSON: {EXAMPLE}",
            ) from error
        lists = {name: list(hosts.values() if isinstance(hosts, dict) else hosts) for name, hosts in cluster.items()}
        addresses = {(name, k): host for name in TRAINING_TASKS for k, host in enumerate(lists.get(name, []))}
        if not addresses:
            continue
        if own not in addresses and own[0] in TRAINING_TASKS and lists.get(own[0]):
            last = len(lists[own[0]]) - 1
            raise make_error(
                UsageError, "task-outside-of-its-list", variable=variable, task=own[0], number=own[1], last=last
            )
        if own not in addresses:
            raise make_error(UsageError, "task-does-not-train", variable=variable, task=own[0], number=own[1])
        rank = list(addresses).index(own)
        hosts = [address.rpartition(":")[0] or address for address in addresses.values()]
        port = next(iter(addresses.values())).rpartition(":")[2]
        return RankPlace(
            rank=rank,
            world_size=len(hosts),
            local_rank=hosts[:rank].count(hosts[rank]),
            local_world_size=hosts.count(hosts[rank]),
            host=hosts[0],
            port=int(port) if port.isdigit() else DEFAULT_PORT,
            source=variable,
        )
    return None


def _read_slurm(env: Mapping[str, str]) -> RankPlace | None:
    """Reads the place of a task of `srun`. The batch script has no SLURM_STEP_NUM_TASKS: it is one process."""
    if not env.get("SLURM_STEP_NUM_TASKS"):
        return None
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    counts = [int(count) for count, repeat in found for _ in range(int(repeat or 1))]  # `2(x3),1` is 2, 2, 2, 1
    node = _read_int(env, "SLURM_NODEID", 0)
    # Steps of a job may run at the same time: each its own port, above those that services use.
    port = 20_000 + (_read_int(env, "SLURM_JOB_ID", 0) * 16 + _read_int(env, "SLURM_STEP_ID", 0)) % 12_000
    return RankPlace(
        rank=_read_int(env, "SLURM_PROCID"),
        world_size=_read_int(env, "SLURM_STEP_NUM_TASKS"),
        local_rank=_read_int(env, "SLURM_LOCALID", 0),
        local_world_size=counts[node] if node < len(counts) else 1,
        host=env.get("MASTER_ADDR") or first_node(env.get("SLURM_STEP_NODELIST", "")) or "127.0.0.1",
        port=_read_int(env, "MASTER_PORT", port),
        source="Slurm",
    )


def first_node(text: str) -> str:
    """The first host of Slurm's short form: of `gpu[01-03,7]-ib,a` it is gpu01-ib."""
    match = re.match(r"([^,\[]*)(?:\[([^\],-]*)[^\]]*\]([^,]*))?", text)
    assert match is not None
    return "".join(part or "" for part in match.groups())


def _read_int(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, "")
    if not text and default is not None:
        return default
    if not text.isdecimal():
        raise make_error(ConfigError, "variable-is-no-number", name=name, text=text)
    return int(text)
