"""What the user asks for (`LaunchRequest`) becomes a `LaunchSpec`, and what would fail at a place is refused before
anything is submitted: rules that all places share.

Each rule raises a UsageError or returns warnings. What only one place knows is in `Place.check`. Limits come from where
`stoker plan` and `stoker check` have them: the table of machines, the thresholds of the host.
"""

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from stoker.config.durations import parse_time_s
from stoker.diagnosis.causes.host import SHARED_MEMORY_SMALL
from stoker.errors import ConfigError, PreflightError, UsageError
from stoker.launching.spec import LaunchRequest, LaunchSpec, Mount, Place, PlaceOptions
from stoker.planning.machines import Machine, choose_machines, listed_machines
from stoker.preflight.host import CORES_PER_GPU, MIN_FREE_MEMORY_BYTES
from stoker.profiling.telemetry.environment import describe_storage
from stoker.runs.records import EVENTS, is_finished, read_lines, runs_named
from stoker.runs.schemas import Event
from stoker.storage.uri import expand_variables, is_uri, parse_uri

RUNS_DIR = Path("runs")
LOG = "launch.log"
MAX_NAME_CHARS = 40
GIB = 2**30
CPUS_PER_GPU, GIB_PER_CPU = 8, 4.0
"""Where nothing says more: a g2-standard-8 has 8 vCPUs of 4 GiB for its GPU."""
SYSTEM_MEMORY_FRACTION = 0.9
"""Of a machine's memory, for the job; the rest is for the system and the node's agent (GKE reserves 5 to 12 %)."""


def make_spec(
    request: LaunchRequest,
    place: Place,
    options: PlaceOptions,
    *,
    data: str | None,
    settings: tuple[str, ...],
    on_cpu: bool,
) -> LaunchSpec:
    """Decides everything. settings: other flags of `stoker train`, as typed; on_cpu: `--device cpu` is one of them.

    Raises UsageError.
    """
    if (data is None) == (request.resume is None):
        raise UsageError("What should be trained on?", choices=["DATA", "--resume RUN"], fix="stoker launch local demo")
    if request.restarts < 0:
        raise UsageError(f"--restarts {request.restarts} is not a number of restarts.", choices=["0 and above"])
    data = None if data is None else _locate(data, place)
    run_dir = _run_dir(request, data)
    min_nodes, max_nodes = parse_nodes(request.nodes)
    machine = machine_of(request.machine_type, place, on_cpu=on_cpu)
    devices = request.devices
    if devices is None:
        devices = 1 if machine is None or on_cpu else machine.gpus
    if devices < 1:
        raise UsageError(f"--devices {devices} is out of range.", choices=["1 or more"])
    cpus = request.cpus
    if cpus is None:
        cpus = int(machine.vcpus) if machine is not None else devices if on_cpu else CPUS_PER_GPU * devices
    memory_gib = request.memory
    if memory_gib is None:
        memory_gib = GIB_PER_CPU * cpus if machine is None else SYSTEM_MEMORY_FRACTION * machine.memory_gib
    target = ("--run-dir" if request.resume is None else "--resume", run_dir)
    several = ("--devices", str(devices)) if devices > 1 else ()
    return LaunchSpec(
        arguments=("train", *(() if data is None else (data,)), *settings, *target, *several),
        name=request.name or _job_name(run_dir),
        run_dir=run_dir,
        data=data,
        devices=devices,
        gpus=0 if on_cpu else devices,
        gpu=request.gpu,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        cpus=cpus,
        memory_gib=memory_gib,
        shm_gib=request.shm if request.shm is not None else min(float(devices), memory_gib / 4),
        machine_type=request.machine_type,
        image=request.image,
        spot=request.spot,
        grace_s=place.default_grace_s if request.grace is None else parse_time_s(request.grace, "--grace"),
        time_limit_s=None if request.time_limit is None else parse_time_s(request.time_limit, "--time-limit"),
        restarts=request.restarts,
        env=check_env(request.env),
        mounts=tuple(map(_parse_mount, request.mount)),
        options=options,
        log=str(Path.cwd() / f"{_job_name(run_dir)}.log" if is_uri(run_dir) else Path(run_dir) / LOG),
    )


def _locate(data: str, place: Place) -> str:
    """DATA as every node names it: absolute. Raises UsageError if it is not there."""
    data = expand_variables(data)
    if data == "demo":
        return data
    if is_uri(data):
        return str(parse_uri(data))
    if place.reach != "containers" and not Path(data).exists():
        raise UsageError(f"There is no data set {data!r}.", fix="a folder or file, a URI (gs://, s3://), or demo")
    return str(Path(data).absolute())


def _run_dir(request: LaunchRequest, data: str | None) -> str:
    if request.resume is not None and request.run_dir is not None:
        raise UsageError("--resume names the run already.", fix="leave out --run-dir")
    text = request.resume or request.run_dir
    if text is None:
        prefix = f"{_slug(Path(str(data)).name)}-launch"
        number = 1 + max((int(path.name.rpartition("-")[2]) for path in runs_named(RUNS_DIR, prefix)), default=0)
        text = str(RUNS_DIR / f"{prefix}-{number}")
    text = expand_variables(text)
    if is_uri(text):
        return str(parse_uri(text))
    path = Path(text).absolute()
    if is_finished(path):
        raise UsageError(
            "The run is finished.", location=path, fix="another --run-dir, or none: that makes a new folder"
        )
    return str(path)


def _job_name(run_dir: str) -> str:
    return f"stoker-{_slug(run_dir.rstrip('/').rpartition('/')[2])}"[:MAX_NAME_CHARS].rstrip("-")


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "data"


def _parse_mount(text: str) -> Mount:
    source, colon, path = text.rpartition(":")
    if not path.startswith("/"):
        raise UsageError(
            f"--mount {text!r} is not an absolute path.", choices=["/data", "CLAIM:/data", "server:/export:/data"]
        )
    return Mount(path=path.rstrip("/") or "/", source=source if colon else None)


# Rules


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
    if machine is not None:
        for flag, wanted, available in (
            ("--cpus", spec.cpus, machine.vcpus),
            ("--memory", spec.memory_gib, machine.memory_gib),
            ("--devices", spec.gpus, machine.gpus),
        ):
            what = f"{flag} {wanted:g}: a {spec.machine_type} has {available:g}."
            _refuse(wanted > available, what, f"{flag} {available:g}, or less")
    cpus, memory, shm, minimum_gib = (
        spec.cpus,
        spec.memory_gib,
        spec.shm_gib,
        spec.devices * MIN_FREE_MEMORY_BYTES / GIB,
    )
    what = f"--cpus {cpus}: fewer than the {spec.devices} processes that train on a node."
    _refuse(cpus < spec.devices, what, f"--cpus {spec.devices}")
    what = f"--memory {memory:g}: {spec.devices} processes that train need {minimum_gib:g} GiB of memory."
    _refuse(memory < minimum_gib, what, f"--memory {minimum_gib:g}, or more")
    what = f"--shm {shm:g}: NCCL would fail with a bus error in a /dev/shm of 64 MiB or less."
    _refuse(shm * GIB <= SHARED_MEMORY_SMALL.threshold("docker_bytes") and spec.devices > 1, what, "--shm 1")
    what = f"--shm {shm:g} is more than --memory {memory:g}: /dev/shm counts as memory of the job."
    _refuse(shm > memory, what, f"--shm {memory / 4:g}")
    needed = CORES_PER_GPU * spec.gpus
    text = f"{cpus} CPUs for {spec.gpus} GPUs: `stoker check` wants {CORES_PER_GPU} for each (--cpus {needed})"
    return [text] if spec.mig_slice is None and cpus < needed else []


def _refuse(fails: bool, what: str, fix: str) -> None:
    if fails:
        raise UsageError(what, fix=fix)


def _longest_save_s(run_dir: str) -> float | None:
    """Seconds that the slowest of the run's saves took to write; None if none is recorded here."""
    if is_uri(run_dir) or not (Path(run_dir) / EVENTS).exists():
        return None
    saves = (event for event in read_lines(Path(run_dir), EVENTS, Event) if event.kind == "checkpoint_saved")
    return max((float(event.data["write_s"]) for event in saves if "write_s" in event.data), default=None)


def _check_grace(spec: LaunchSpec, place: Place) -> list[str]:
    """The notice before a kill, against what a save of this run took."""
    grace_s = min(spec.grace_s, place.spot_grace_s or spec.grace_s) if spec.spot else spec.grace_s
    by_place = grace_s < spec.grace_s
    save_s = _longest_save_s(spec.run_dir)
    if save_s is None or save_s <= grace_s / 2:
        return []
    cause = f"a save of this run took {save_s:.3g} s to write; the step before it has to end, too"
    if save_s > grace_s:
        what = f"The grace period of {grace_s:g} s is shorter than a save."
        fix = "without --spot, or a smaller model" if by_place else f"--grace {3 * save_s:.0f}"
        raise PreflightError(what, location=spec.run_dir, cause=cause, fix=fix)
    return [f"a grace period of {grace_s:g} s is short: {cause}"]


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
