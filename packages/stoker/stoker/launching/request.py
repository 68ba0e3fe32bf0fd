"""What the user asks for (`LaunchRequest`) becomes a `LaunchSpec`, and what would fail at a place is refused before
anything is submitted: rules that all places share, or those that run containers.

Each rule raises a UsageError or returns warnings. What only one place knows is in `LaunchPlace.check`. Limits come from
where `stoker plan` and `stoker check` have them: the table of machines, the thresholds of the host.
"""

import dataclasses
import math
import re
import shlex
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from stoker.config.settings import EXTENDABLE, PER_ATTEMPT, flag_of
from stoker.knowledge import read_toml
from stoker.launching.elastic import read_batch
from stoker.launching.spec import LOG, PLACES, LaunchPlace, LaunchRequest, LaunchSpec, Mount, PlaceOptions, open_place
from stoker.planning.machines import Machine, choose_machines, find_machine, listed_machines
from stoker.preflight.host import CORES_PER_GPU, MIN_FREE_MEMORY_BYTES
from stoker.training.cluster import can_divide
from stoker_watch.diagnosis.causes.memory import SHARED_MEMORY_SMALL
from stoker_watch.durations import parse_time_s
from stoker_watch.errors import ConfigError, PreflightError, UsageError, make_error
from stoker_watch.hardware.tpu import TpuSlice, find_slice
from stoker_watch.runs.records import EVENTS, is_finished, open_run, read_lines, runs_named
from stoker_watch.runs.schemas import Event
from stoker_watch.storage.uri import WRITABLE_SCHEMES, expand_variables, is_uri, parse_uri

RUNS_DIR = Path("runs")
MAX_NAME_CHARS = 40
GIB = 2**30
CPUS_PER_GPU, GIB_PER_CPU = 8, 4.0
"""CPUs and memory where nothing says more: a g2-standard-8 has 8 vCPUs of 4 GiB for its GPU."""
_UNUSED_CHIPS = "one of the {0.chips} chips of {0.name} would train, the others would be idle: --tpu {0.chip}-1"
SYSTEM_MEMORY_FRACTION = 0.9
"""Part of a machine's memory for the job; the rest is for the system and the node's agent (GKE reserves 5 to 12 %)."""
MIG_SLICES = msgspec.convert(read_toml("mig.toml"), dict[str, tuple[str, ...]])
"""Accelerator (`planning/machines.py`) → its slices."""
RANK_VARIABLES = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
"""How a node learns its place (`training/cluster.py`)."""
_IMAGE = re.compile(
    r"(?:[A-Za-z0-9.-]+(?::\d+)?/)?[a-z0-9]+(?:[._/-]+[a-z0-9]+)*(?::[\w][\w.-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
)


def make_spec(
    request: LaunchRequest,
    place: LaunchPlace,
    options: PlaceOptions,
    *,
    data: str | None,
    settings: tuple[str, ...],
    on_cpu: bool,
    batch: Mapping[str, Any] | None = None,
) -> LaunchSpec:
    """Decides everything. settings: other flags of `stoker train`, as typed; on_cpu: `--device cpu` is one of them;
    batch: their values of `elastic.SETTINGS`. Raises UsageError."""
    if (data is None) == (request.resume is None):
        raise UsageError("What should be trained on?", choices=["DATA", "--resume RUN"], fix="stoker launch local demo")
    if request.restarts < 0:
        raise UsageError(f"--restarts {request.restarts} is not a number of restarts.", choices=["0 and above"])
    data = None if data is None else _locate(data, place)
    run_dir = _run_dir(request, data, extends=request.resume is not None and bool(settings))
    if request.resume is not None and place.reach != "containers" and not is_uri(run_dir):
        open_run(run_dir)
    min_nodes, max_nodes = parse_nodes(request.nodes)
    machine = machine_of(request.machine_type, place, gpu=request.gpu, on_cpu=on_cpu)
    tpu = None if request.tpu is None else _find_tpu(request, place, on_cpu=on_cpu)
    if tpu is not None:
        settings, on_cpu = (*settings, "--device", "tpu"), True
    devices, cpus, memory_gib = _size_of_node(request, machine, on_cpu=on_cpu and tpu is None, has_tpu=tpu is not None)
    target = ("--run-dir" if request.resume is None else "--resume", run_dir)
    several = ("--devices", str(devices)) if devices > 1 else ()
    return LaunchSpec(
        arguments=("train", *(() if data is None else (data,)), *settings, *target, *several),
        name=request.name or _job_name(run_dir),
        run_dir=run_dir,
        data=data,
        devices=devices,
        gpus=0 if on_cpu else devices,
        tpu=tpu,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        batch=batch or {},
        cpus=cpus,
        memory_gib=memory_gib,
        shm_gib=request.shm if request.shm is not None else min(float(devices), memory_gib / 4),
        grace_s=place.default_grace_s if request.grace is None else parse_time_s(request.grace, "--grace"),
        time_limit_s=None if request.time_limit is None else parse_time_s(request.time_limit, "--time-limit"),
        env=check_env(request.env),
        secrets=_parse_secrets(request.secret),
        mounts=tuple(map(_parse_mount, request.mount)),
        options=options,
        log=str(Path.cwd() / f"{_job_name(run_dir)}.log" if is_uri(run_dir) else Path(run_dir) / LOG),
        **{name: getattr(request, name) for name in ("gpu", "machine_type", "image", "spot", "restarts")},
    )


def _size_of_node(
    request: LaunchRequest, machine: Machine | None, *, on_cpu: bool, has_tpu: bool
) -> tuple[int, int, float]:
    """(devices, CPUs, GiB of memory) of each node: as asked for, else those of the machine. Raises UsageError."""
    of_machine = 1 if machine is None or on_cpu or has_tpu else machine.gpus
    devices = of_machine if request.devices is None else request.devices
    if devices < 1:
        raise UsageError(f"--devices {devices} is out of range.", choices=["1 or more"])
    if machine is not None:
        cpus, memory_gib = int(machine.vcpus), SYSTEM_MEMORY_FRACTION * machine.memory_gib
    else:
        cpus = devices if on_cpu else CPUS_PER_GPU * devices
        memory_gib = GIB_PER_CPU * (cpus if request.cpus is None else request.cpus)
    chosen_cpus = cpus if request.cpus is None else request.cpus
    return devices, chosen_cpus, memory_gib if request.memory is None else request.memory


def refuse_settings_of_run(run: str, chosen: Iterable[str], settings: tuple[str, ...]) -> None:
    """A run that is resumed keeps its settings. chosen: what the user set, by name; settings: as typed. Raises
    UsageError."""
    if not (PER_ATTEMPT | EXTENDABLE).issuperset(chosen):
        flags = ", ".join(_flag(name) for name in sorted(PER_ATTEMPT))
        fix = f"leave out flags other than {flags}, and a longer length for a finished run; or start a new run from "
        fix += f"its weights: --weights {run}"
        cause = f"this would change them: {shlex.join(settings)}" if settings else "DATA would be another setting"
        raise UsageError("--resume takes its settings from the run.", cause=cause, fix=fix)


def refuse_control_characters(
    request: LaunchRequest, options: PlaceOptions, data: str | None, settings: tuple[str, ...]
) -> None:
    """A line break in a value would end a line of a batch script. Raises UsageError."""
    flags = ("DATA", *(word if word.startswith("--") else "DATA" for word in settings))
    values: list[tuple[str, object]] = [("DATA", data), *zip(flags, settings, strict=False)]
    values += [(_flag(name), value) for name, value in options.set_fields().items()]
    for field in dataclasses.fields(request):
        value = getattr(request, field.name)
        values += [(_flag(field.name), text) for text in (value if isinstance(value, tuple) else (value,))]
    for flag, text in values:
        if isinstance(text, str) and any(unicodedata.category(character) in ("Cc", "Zl", "Zp") for character in text):
            what = f"A control character in {flag}: {text!r}."
            raise UsageError(what, fix="write it without line breaks and escapes")


def _locate(data: str, place: LaunchPlace) -> str:
    """DATA as every node names it: absolute. Raises UsageError if it is not there."""
    data = expand_variables(data)
    if data == "demo":
        return data
    if is_uri(data):
        return str(parse_uri(data))
    if place.reach != "containers" and not Path(data).exists():
        raise UsageError(f"There is no data set {data!r}.", fix="a folder or file, a URI (gs://, s3://), or demo")
    return str(Path(data).absolute())


def _run_dir(request: LaunchRequest, data: str | None, *, extends: bool) -> str:
    if request.resume is not None and request.run_dir is not None:
        raise UsageError("--resume names the run already.", fix="leave out --run-dir")
    text = request.resume or request.run_dir
    if text is None:
        prefix = f"{_slug(Path(str(data)).name)}-launch"
        number = 1 + max((int(path.name.rpartition("-")[2]) for path in runs_named(RUNS_DIR, prefix)), default=0)
        text = str(RUNS_DIR / f"{prefix}-{number}")
    text = expand_variables(text)
    if is_uri(text):
        uri = parse_uri(text)
        if uri.scheme not in WRITABLE_SCHEMES:
            choices = [f"{scheme}://" for scheme in WRITABLE_SCHEMES]
            raise ConfigError("A run cannot be written there.", location=uri, choices=choices)
        return str(uri)
    path = Path(text).absolute()
    if is_finished(path) and not extends:
        fix = "--resume with a longer length trains it further; or another --run-dir, or none: that makes a new folder"
        raise UsageError("The run is finished.", location=path, fix=fix)
    return str(path)


def is_started(run_dir: str) -> bool:
    """Whether the run has begun, as far as this machine sees: one in a bucket is not looked at."""
    return not is_uri(run_dir) and (Path(run_dir) / EVENTS).exists()


def _job_name(run_dir: str) -> str:
    return f"stoker-{_slug(run_dir.rstrip('/').rpartition('/')[2])}"[:MAX_NAME_CHARS].rstrip("-")


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "data"


def _parse_mount(text: str) -> Mount:
    source, colon, path = text.rpartition(":")
    if not path.startswith("/") or path.startswith("//"):  # `//BUCKET` of gs://BUCKET
        choices = ["/data", "CLAIM:/data", "server:/export:/data"]
        raise UsageError(f"--mount {text!r} is not an absolute path.", choices=choices)
    return Mount(path=path.rstrip("/") or "/", source=source if colon else None)


# Rules


def check_launch(spec: LaunchSpec, place: LaunchPlace) -> list[str]:
    """Everything that can be known here. Returns warnings. Raises UsageError, PreflightError."""
    for name in spec.options.set_fields():
        if name not in place.options:
            flags = [_flag(field) for field in PlaceOptions.__dataclass_fields__ if field in place.options]
            raise UsageError(f"{place.name} has no {_flag(name)}.", choices=flags or ["no such flag"])
    for name in place.lacks:
        if (value := getattr(spec, name)) is not None:
            flag = "--gpu" if name == "mig_slice" else _flag(name)
            raise UsageError(f"{place.name} has no {flag} {value}: {place.instead}.", fix=f"without {flag}")
    if not re.fullmatch(r"[a-z](?:[a-z0-9-]{0,38}[a-z0-9])?", spec.name):
        choices = ["lower-case letters, digits and -, at most 40"]
        raise UsageError(f"{spec.name!r} is not a name for a job.", choices=choices, fix="--name")
    if spec.secrets and not place.has_secrets:
        with_secrets = [name for name in PLACES if open_place(name).has_secrets]
        fix = "the trainer's own environment or files there, or --env, whose values are in the job"
        raise UsageError(f"{place.name} has no secrets for --secret.", choices=with_secrets, fix=fix)
    if spec.mig_slice is not None and (spec.devices > 1 or spec.max_nodes > 1):
        raise make_error(UsageError, "mig-slice-has-one-device", gpu=spec.gpu)
    if spec.gpu is not None and spec.gpus == 0:
        raise UsageError(f"--gpu {spec.gpu} and --device cpu contradict each other.", fix="leave one of them out")
    if place.reach == "containers" and spec.image is None:
        fix = "--image REGISTRY/IMAGE:TAG (how to make one: docs/launch.md)"
        raise UsageError(f"{place.name} runs containers: which image?", fix=fix)
    _check_batch(spec)
    _check_reach(spec, place)
    unused = [] if spec.tpu is None or spec.tpu.chips == 1 else [_UNUSED_CHIPS.format(spec.tpu)]
    warnings = unused + _check_resources(
        spec, machine_of(spec.machine_type, place, gpu=spec.gpu, on_cpu=spec.gpus == 0)
    )
    return warnings + _check_grace(spec, place) + place.check(spec)


def _find_tpu(request: LaunchRequest, place: LaunchPlace, *, on_cpu: bool) -> TpuSlice:
    """The slice of `--tpu`. Raises UsageError where the place has none, or something else contradicts it."""
    if place.name != "k8s":
        raise UsageError(f"{place.name} has no TPUs for --tpu.", choices=["k8s"], fix="stoker launch k8s --tpu v6e-1")
    others = [
        ("--device cpu", on_cpu), ("--gpu", request.gpu), ("--machine-type", request.machine_type),
        ("--devices", (request.devices or 1) > 1), ("--nodes", request.nodes != "1"),
    ]  # fmt: skip
    for flag, is_set in others:
        if is_set:
            cause = "one chip of one host trains; the slice decides the machine"
            raise UsageError(f"--tpu and {flag} contradict each other.", cause=cause, fix=f"leave out {flag}")
    return find_slice(request.tpu or "")


def machine_of(machine_type: str | None, place: LaunchPlace, *, gpu: str | None, on_cpu: bool) -> Machine | None:
    """The row of the machine type in the table of `stoker plan`; None: no type is named, or any name is valid there.
    gpu: `--gpu`. Raises UsageError for a type that the cloud of the place does not have."""
    if machine_type is None:
        return None
    if place.cloud is None:
        return find_machine(machine_type, gpu)
    machines = {name: machine for name, machine in listed_machines().items() if machine.cloud == place.cloud}
    base_types = {name.partition("+")[0] for name in machines}
    if machine_type in base_types - set(machines):  # an n1 without its GPU, which --gpu names
        return find_machine(machine_type, gpu)
    if re.fullmatch(r"(?:n1|n2d?|e2|c2d?|c3d?|n4|c4)-[a-z]+-\d+", machine_type) and on_cpu:
        return None  # machines without GPUs are not in the table
    return choose_machines([machine_type], machines=machines)[0]


def _check_batch(spec: LaunchSpec) -> None:
    """Whether a number of nodes that was asked for can share the batch: the run's, if it can be read here without a
    network. Raises UsageError."""
    batch = (None if is_uri(spec.run_dir) else read_batch(Path(spec.run_dir))) or spec.batch
    if spec.is_elastic and not batch and spec.data is not None:
        cause = "the run keeps its batch on any number of nodes; one that is chosen for all need not fit fewer"
        fix = f"--batch-size {spec.devices * math.lcm(spec.min_nodes, spec.max_nodes)}, or another multiple"
        raise UsageError(f"--nodes {spec.min_nodes}:{spec.max_nodes} needs a --batch-size.", cause=cause, fix=fix)
    counts = [nodes * spec.devices for nodes in range(spec.min_nodes, spec.max_nodes + 1)]
    if not any(can_divide(batch, count) for count in counts):
        among = f"{counts[0]} devices" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} devices"
        unit = counts[0] * (4 if batch.get("mosaic") else 1)
        raise UsageError(
            f"--batch-size {batch['batch_size']} is the total, and cannot be divided equally among {among}.",
            cause="all devices get as many images, and with --mosaic a multiple of four",
            fix=f"--batch-size {-(-batch['batch_size'] // unit) * unit}, or another --nodes",
        )


def _check_reach(spec: LaunchSpec, place: LaunchPlace) -> None:
    """Whether every node sees the run folder and the data."""
    if place.reach == "this machine":
        return
    for what, flag, location in (("run folder", "--run-dir", spec.run_dir), ("data set", "DATA", spec.data)):
        if location is None or location == "demo" or is_uri(location):
            continue
        if place.reach == "shared files":
            if (kind := spec.local_storage(location)) is None:
                continue
            cause = f"it is on a local file system of this machine ({kind})"
            fix = (
                f"{flag} in a bucket (gs://, s3://) or on a network file system; `--mount PATH`, if all nodes see PATH"
            )
        elif any(PurePosixPath(location).is_relative_to(mount.path) for mount in spec.mounts):
            continue
        else:
            cause = "a container sees only what is mounted into it"
            fix = f"{flag} in a bucket (gs://, s3://), or below a mount: `--mount SOURCE:PATH`"
        raise UsageError(f"The nodes of {place.name} cannot reach the {what}.", location=location, cause=cause, fix=fix)


def _check_resources(spec: LaunchSpec, machine: Machine | None) -> list[str]:
    cpus, memory, shm, devices = spec.cpus, spec.memory_gib, spec.shm_gib, spec.devices

    def refuse(fails: bool, flag: str, value: float, why: str, fix: str) -> None:
        if fails:
            raise UsageError(f"{flag} {value:g}{why}", fix=f"{flag} {fix}")

    if machine is not None:
        wanted = (("--cpus", cpus), ("--memory", memory), ("--devices", spec.gpus))
        available = (machine.vcpus, machine.memory_gib, machine.gpus)
        for (flag, value), most in zip(wanted, available, strict=True):
            refuse(value > most, flag, value, f": a {spec.machine_type} has {most:g}.", f"{most:g}, or less")
    refuse(cpus < devices, "--cpus", cpus, f": fewer than the {devices} processes of a node.", f"{devices}")
    minimum_gib = devices * MIN_FREE_MEMORY_BYTES / GIB
    why = f": {devices} processes that train need {minimum_gib:g} GiB of memory."
    refuse(memory < minimum_gib, "--memory", memory, why, f"{minimum_gib:g}, or more")
    has_too_little = devices > 1 and shm * GIB <= SHARED_MEMORY_SMALL.threshold("docker_bytes")
    why = ": NCCL would fail with a bus error in a /dev/shm of 64 MiB or less."
    refuse(has_too_little, "--shm", shm, why, "1")
    why = f" is more than --memory {memory:g}: /dev/shm counts as memory of the job."
    refuse(shm > memory, "--shm", shm, why, f"{memory / 4:g}")
    needed = CORES_PER_GPU * spec.gpus
    text = f"{cpus} CPUs for {spec.gpus} GPUs: `stoker check` wants {CORES_PER_GPU} for each (--cpus {needed})"
    return [text] if spec.mig_slice is None and cpus < needed else []


def _check_grace(spec: LaunchSpec, place: LaunchPlace) -> list[str]:
    """The notice before a kill, against the slowest save that the run has recorded here."""
    notice_s = place.spot_grace_s if spec.spot else None
    grace_s = min(spec.grace_s, notice_s or spec.grace_s)
    events = [] if is_uri(spec.run_dir) else read_lines(Path(spec.run_dir), EVENTS, Event)
    saves = (event.data.get("write_s", 0.0) for event in events if event.kind == "checkpoint_saved")
    save_s = max(saves, default=0)
    if save_s <= grace_s / 2:
        return []
    cause = f"a save of this run took {save_s:.3g} s to write; the step before it has to end, too"
    if save_s > grace_s:
        is_possible = notice_s is None or save_s <= notice_s
        fix = f"--grace {3 * save_s:.0f}s" if is_possible else "without --spot, or a smaller model"
        what = f"The grace period of {grace_s:g} s is shorter than a save."
        raise PreflightError(what, location=spec.run_dir, cause=cause, fix=fix)
    return [f"a grace period of {grace_s:g} s is short: {cause}"]


def check_container(spec: LaunchSpec, place: str) -> None:
    """Raises UsageError for what no place with containers takes."""
    if spec.image is not None and not _IMAGE.fullmatch(spec.image):
        what = f"--image {spec.image!r} is not the name of a container image."
        choices = ["europe-docker.pkg.dev/PROJECT/REPOSITORY/stoker:1"]
        raise ConfigError(what, cause="REGISTRY/NAME:TAG; the name is in lower case", choices=choices)
    if reserved := RANK_VARIABLES & {*spec.env, *spec.secrets}:
        fix = "leave it out; --nodes and --devices decide"
        raise ConfigError(f"--env {min(reserved)}: {place} gives each node its own.", fix=fix)
    if twice := spec.env.keys() & spec.secrets:
        raise ConfigError(f"{min(twice)} is a variable of --env and of --secret.", fix="leave one of them out")
    if spec.is_elastic:
        raise UsageError(
            f"{place} starts a fixed number of nodes, --nodes asks for {spec.min_nodes} to {spec.max_nodes}.",
            fix=f"--nodes {spec.min_nodes}; the run can be continued with another number",
        )


def parse_nodes(text: str) -> tuple[int, int]:
    """`2` is (2, 2), `2:8` (2, 8). Raises ConfigError."""
    match = re.fullmatch(r"(\d{1,5})(?::(\d{1,5}))?", text.strip())
    low, high = (0, 0) if match is None else (int(match[1]), int(match[2] or match[1]))
    if not 1 <= low <= high:
        choices = ["1 …", "2:8 (at least 2, at most 8)"]
        raise ConfigError(f"--nodes {text!r} is not a number of machines.", choices=choices)
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


def _parse_secrets(pairs: Iterable[str]) -> dict[str, tuple[str, str]]:
    """`NAME=SECRET/KEY` of --secret. Raises ConfigError."""
    secrets = {}
    for pair in pairs:
        match = re.fullmatch(r"([A-Za-z_]\w*)=([A-Za-z0-9][\w.-]{0,252})/([\w.-]{1,253})", pair)
        if match is None:
            what = f"{pair.partition('=')[0]!r} is not a variable, a secret and a key of it (--secret)."
            raise ConfigError(what, choices=["NAME=SECRET/KEY"])
        secrets[match[1]] = match[2], match[3]
    return secrets


def _flag(name: str) -> str:
    return f"--{flag_of(name)}"
