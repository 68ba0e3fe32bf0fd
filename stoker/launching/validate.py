"""What would fail at a place, refused before anything is submitted: rules that all places share.

Each rule raises a UsageError or returns warnings. What only one place knows is in `Place.check`. Limits come from where
`stoker plan` and `stoker check` have them: the table of machines, the thresholds of the host.
"""

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from stoker.diagnosis.causes.memory import SHARED_MEMORY_SMALL
from stoker.errors import ConfigError, PreflightError, UsageError
from stoker.launching.spec import LaunchSpec, Place, PlaceOptions
from stoker.planning.machines import Machine, choose_machines, listed_machines
from stoker.preflight.host import CORES_PER_GPU, MIN_FREE_MEMORY_BYTES
from stoker.profiling.telemetry.environment import describe_storage
from stoker.runs.records import EVENTS, read_lines
from stoker.runs.schemas import Event
from stoker.storage.uri import is_uri

GIB = 2**30
CPUS_PER_GPU, GIB_PER_CPU = 8, 4.0
"""Where nothing says more: a g2-standard-8 has 8 vCPUs of 4 GiB for its GPU."""
SYSTEM_MEMORY_FRACTION = 0.9
"""Of a machine's memory, for the job; the rest is for the system and the node's agent (GKE reserves 5 to 12 %)."""


def check_launch(spec: LaunchSpec, place: Place) -> list[str]:
    """Everything that can be known here. Returns warnings. Raises UsageError, PreflightError."""
    _check_options(spec, place)
    _check_gpu(spec)
    if place.reach == "containers" and spec.image is None:
        raise UsageError(
            f"{place.name} runs containers: which image?", fix="--image REGISTRY/IMAGE:TAG (docs/launch.md)"
        )
    _check_reach(spec, place)
    warnings = _check_resources(spec, machine_of(spec.machine_type, place, on_cpu=spec.gpus == 0))
    warnings += _check_grace(spec, place)
    return warnings + place.check(spec)


def machine_of(machine_type: str | None, place: Place, *, on_cpu: bool) -> Machine | None:
    """The row of the machine type in the table of `stoker plan`; None: no type is named, or any name is valid there.

    Raises UsageError for a type that the cloud of the place does not have.
    """
    if machine_type is None:
        return None
    if place.cloud is None:
        return listed_machines().get(machine_type)
    machines = {name: machine for name, machine in listed_machines().items() if machine.cloud == place.cloud}
    base_types = {name.partition("+")[0] for name in machines}
    if machine_type in base_types - set(machines):  # an n1 without its GPU, which --gpu names
        return None
    if re.fullmatch(r"(?:n1|n2d?|e2|c2d?|c3d?|n4|c4)-[a-z]+-\d+", machine_type) and on_cpu:
        return None  # machines without GPUs are not in the table
    return choose_machines([machine_type], machines=machines)[0]


def _check_options(spec: LaunchSpec, place: Place) -> None:
    for name in spec.options.set_fields():
        if name not in place.options:
            flags = [_flag(field) for field in PlaceOptions.__dataclass_fields__ if field in place.options]
            raise UsageError(f"{place.name} has no {_flag(name)}.", choices=flags or ["no such flag"])
    if not re.fullmatch(r"[a-z](?:[a-z0-9-]{0,38}[a-z0-9])?", spec.name):
        raise UsageError(
            f"{spec.name!r} is not a name for a job.",
            choices=["lower-case letters, digits and -, at most 40"],
            fix="--name",
        )


def _check_gpu(spec: LaunchSpec) -> None:
    if spec.mig_slice is not None and (spec.devices > 1 or spec.max_nodes > 1):
        raise UsageError(
            f"A training on the MIG slice {spec.gpu} has one device.",
            cause="NCCL does not connect MIG slices (docs.nvidia.com/datacenter/tesla/mig-user-guide)",
            fix="leave out --devices and --nodes, or train on whole GPUs",
        )
    if spec.gpu is not None and spec.gpus == 0:
        raise UsageError(f"--gpu {spec.gpu} and --device cpu contradict each other.", fix="leave one of them out")


def _check_reach(spec: LaunchSpec, place: Place) -> None:
    """Whether every node sees the run folder and the data."""
    if place.reach == "this machine":
        return
    for what, flag, location in (("run folder", "--run-dir", spec.run_dir), ("data set", "DATA", spec.data)):
        if location is None or location == "demo" or is_uri(location) or _is_mounted(location, spec):
            continue
        if place.reach == "shared files":
            storage = describe_storage(_existing_parent(location))
            if storage["network"]:
                continue
            cause = f"it is on a local file system of this machine ({storage['kind']})"
            fix = (
                f"{flag} in a bucket (gs://, s3://) or on a network file system; `--mount PATH`, if all nodes see PATH"
            )
        else:
            cause = "a container sees only what is mounted into it"
            fix = f"{flag} in a bucket (gs://, s3://), or below a mount: `--mount SOURCE:PATH`"
        raise UsageError(f"The nodes of {place.name} cannot reach the {what}.", location=location, cause=cause, fix=fix)


def _is_mounted(location: str, spec: LaunchSpec) -> bool:
    return any(PurePosixPath(location).is_relative_to(mount.path) for mount in spec.mounts)


def _existing_parent(location: str) -> Path:
    path = Path(location)
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _check_resources(spec: LaunchSpec, machine: Machine | None) -> list[str]:
    name = spec.machine_type
    if machine is not None:
        limits: Iterable[tuple[str, float, float]] = (
            ("--cpus", spec.cpus, machine.vcpus),
            ("--memory", spec.memory_gib, machine.memory_gib),
            ("--devices", spec.gpus, machine.gpus),
        )
        for flag, wanted, available in limits:
            if wanted > available:
                raise UsageError(
                    f"{flag} {wanted:g}: a {name} has {available:g}.", fix=f"{flag} {available:g}, or less"
                )
    if spec.cpus < spec.devices:
        raise UsageError(
            f"--cpus {spec.cpus}: fewer than the {spec.devices} processes that train on a node.",
            fix=f"--cpus {spec.devices}",
        )
    minimum_gib = spec.devices * MIN_FREE_MEMORY_BYTES / GIB
    if spec.memory_gib < minimum_gib:
        raise UsageError(
            f"--memory {spec.memory_gib:g}: {spec.devices} processes that train need {minimum_gib:g} GiB of memory.",
            fix=f"--memory {minimum_gib:g}, or more",
        )
    if spec.shm_gib * GIB <= SHARED_MEMORY_SMALL.threshold("docker_bytes") and spec.devices > 1:
        raise UsageError(
            f"--shm {spec.shm_gib:g}: NCCL would fail with a bus error in a /dev/shm of 64 MiB or less.", fix="--shm 1"
        )
    if spec.shm_gib > spec.memory_gib:
        raise UsageError(
            f"--shm {spec.shm_gib:g} is more than --memory {spec.memory_gib:g}: /dev/shm counts as memory of the job.",
            fix=f"--shm {spec.memory_gib / 4:g}",
        )
    if spec.gpus and spec.mig_slice is None and spec.cpus < CORES_PER_GPU * spec.gpus:
        needed = CORES_PER_GPU * spec.gpus
        return [
            f"{spec.cpus} CPUs for {spec.gpus} GPUs: `stoker check` wants {CORES_PER_GPU} for each (--cpus {needed})"
        ]
    return []


def longest_save_s(run_dir: str) -> float | None:
    """Seconds that the slowest of the run's saves took to write; None if none is recorded here."""
    run = Path(run_dir)
    if is_uri(run_dir) or not (run / EVENTS).exists():
        return None
    times = [
        float(event.data["write_s"])
        for event in read_lines(run, EVENTS, Event)
        if event.kind == "checkpoint_saved" and "write_s" in event.data
    ]
    return max(times, default=None)


def _check_grace(spec: LaunchSpec, place: Place) -> list[str]:
    """The notice before a kill, against what a save of this run took."""
    grace_s = min(spec.grace_s, place.spot_grace_s or spec.grace_s) if spec.spot else spec.grace_s
    by_place = grace_s < spec.grace_s
    save_s = longest_save_s(spec.run_dir)
    if save_s is None or save_s <= grace_s / 2:
        return []
    cause = f"a save of this run took {save_s:.3g} s to write; the step before it has to end, too"
    if save_s > grace_s:
        what = f"The grace period of {grace_s:g} s is shorter than a save."
        fix = "without --spot, or a smaller model" if by_place else f"--grace {3 * save_s:.0f}"
        raise PreflightError(what, location=spec.run_dir, cause=cause, fix=fix)
    return [f"a grace period of {grace_s:g} s is short: {cause}"]


def parse_time_s(text: str, flag: str) -> int:
    """Seconds of `90s`, `30min`, `6h`, `2d`. Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h|d)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"{flag} {text!r} is not a time.", choices=["90s", "30min", "6h", "2d"])
    return max(1, round(float(match[1]) * {"s": 1, "min": 60, "h": 3600, "d": 86400}[match[2]]))


def parse_nodes(text: str) -> tuple[int, int]:
    """`2` is (2, 2), `2:8` (2, 8). Raises ConfigError."""
    match = re.fullmatch(r"(\d{1,5})(?::(\d{1,5}))?", text.strip())
    low, high = (0, 0) if match is None else (int(match[1]), int(match[2] or match[1]))
    if not 1 <= low <= high:
        raise ConfigError(
            f"--nodes {text!r} is not a number of machines.", choices=["1 …", "2:8 (at least 2, at most 8)"]
        )
    return low, high


def check_env(pairs: Iterable[str]) -> dict[str, str]:
    """`NAME=value` of --env. Raises ConfigError."""
    env = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ConfigError(f"--env {pair!r} is not a variable.", choices=["NAME=value"])
        env[name] = value
    return env


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
