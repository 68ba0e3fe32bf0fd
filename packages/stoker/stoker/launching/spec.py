"""What is launched, what a place is that can run it, the places that there are, imported when they are used, and their
documents: templates whose optional fields are None. `stoker --help` imports it."""

import dataclasses
import functools
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar

import msgspec

from stoker.knowledge import read_toml
from stoker_watch.errors import UsageError, nearest
from stoker_watch.hardware.tpu import TpuSlice

Fields = TypeVar("Fields")
State = Literal["queued", "running", "succeeded", "failed", "cancelled", "unknown"]
"""State of a job. `running` until nothing of it runs any more; `unknown`: the place has forgotten the job."""
Reach = Literal["this machine", "shared files", "containers"]
"""What a job sees of the files of this machine: all; those of shared file systems; nothing but what is mounted."""
PLACES = {
    "local": "stoker.launching.local:Local",
    "slurm": "stoker.launching.slurm:Slurm",
    "k8s": "stoker.launching.kubernetes:Kubernetes",
    "vertex": "stoker.launching.google_cloud:Vertex",
    "gcp-batch": "stoker.launching.google_cloud:GcpBatch",
    "ray": "stoker.launching.ray_cluster:Ray",
}
ALIASES = {"kubernetes": "k8s", "vertex-ai": "vertex", "batch": "gcp-batch"}
LOG = "launch.log"
"""File in the run folder."""
PORT = 29500
"""Where rank 0 listens: torchrun's port. Each node has an address of its own, so jobs cannot meet there."""
FAILING_EXIT_CODES = (2, 3, 4, 6)
"""After which the same command would fail again: usage, pre-flight, data, divergence. All others are tried again, 75
(preempted, state saved) without being counted where the place can tell."""
_MIG_SLICE = re.compile(r"\d+g\.\d+gb(?:\+me)?")


def _described(kind: type[Fields]) -> type[Fields]:
    """Adds to the docstring what the fields mean, as `stoker launch --help` shows it (`knowledge/launch.toml`)."""
    texts = read_toml("launch.toml")["flags"]
    section = [f"{name}\n    {texts[name]}" for name in kind.__annotations__]
    kind.__doc__ = "\n".join([inspect.cleandoc(kind.__doc__ or ""), "", "Parameters", "----------", *section])
    return kind


@_described
@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """What the user asks for: the flags of `stoker launch` that every place has."""

    run_dir: str | None = None
    resume: str | None = None
    devices: int | None = None
    gpu: str | None = None
    tpu: str | None = None
    nodes: str = "1"
    cpus: int | None = None
    memory: float | None = None
    shm: float | None = None
    machine_type: str | None = None
    image: str | None = None
    mount: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    secret: tuple[str, ...] = ()
    name: str | None = None
    spot: bool = False
    grace: str | None = None
    time_limit: str | None = None
    restarts: int = 3

    def kept_fields(self) -> dict[str, Any]:
        """What was asked for, as launch.json keeps it: of `env` the names only, since the values may be secret."""
        fields = {
            field.name: list(value) if isinstance(value, tuple) else value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        }
        if self.env:
            fields["env"] = [pair.partition("=")[0] for pair in self.env]
        return fields


@dataclasses.dataclass(frozen=True)
class Mount:
    path: str
    """Absolute."""
    source: str | None = None
    """What a container mounts there: a PersistentVolumeClaim, `server:/export`, a bucket; None: it is there anyway."""

    @property
    def nfs(self) -> tuple[str, str] | None:
        """(server, export), if that is what is mounted."""
        match = re.fullmatch(r"([\w.-]+):(/(?!/).*)", self.source or "")
        return None if match is None else (match[1], match[2])


@_described
@dataclasses.dataclass(frozen=True, kw_only=True)
class PlaceOptions:
    """What only some places have; `LaunchPlace.options` says which a place takes. None: the place's default."""

    partition: str | None = None
    account: str | None = None
    namespace: str | None = None
    queue: str | None = None
    patch: str | None = None
    region: str | None = None
    project: str | None = None
    service_account: str | None = None
    boot_disk: str | None = None
    gpu_driver: str | None = None
    address: str | None = None

    def set_fields(self) -> dict[str, str]:
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """A training, and the machines for it, all decided. What is not explained here is as in `LaunchRequest`."""

    arguments: tuple[str, ...]
    """Arguments of `stoker` on each node: train, DATA, --run-dir …, --devices …; the program is the place's."""
    name: str
    """Name of the jobs of the run: lower-case letters, digits and `-`, at most 40, begins with a letter."""
    attempt: int = 1
    """Which job of the run it is."""
    tasks: int = 1
    """Equal tasks that share the run folder, as the workers of a search do: a job array, where the place has them."""
    run_dir: str
    """An absolute path, or a URI (gs://, s3://)."""
    data: str | None = None
    """Absolute path, URI or `demo`; None: the run that is resumed knows."""
    devices: int = 1
    """Processes that train on each node."""
    gpus: int = 0
    """GPUs (or MIG slices) of each node; 0: it trains on the CPU."""
    gpu: str | None = None
    tpu: TpuSlice | None = None
    min_nodes: int = 1
    max_nodes: int = 1
    """More than min_nodes: elastic."""
    batch: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Those of `elastic.SETTINGS` that the user set."""
    cpus: int = 1
    memory_gib: float = 4.0
    shm_gib: float = 1.0
    """Size of /dev/shm of each node, where the place sets it; part of the memory."""
    machine_type: str | None = None
    image: str | None = None
    spot: bool = False
    grace_s: int = 60
    """Seconds between the request to stop and the kill, where the place lets one choose."""
    time_limit_s: int | None = None
    restarts: int = 3
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    secrets: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    """Variable → (secret, key of it)."""
    mounts: tuple[Mount, ...] = ()
    options: PlaceOptions = PlaceOptions()
    log: str = ""
    """File of the output, for places that write files of this machine."""

    @property
    def mig_slice(self) -> str | None:
        """`1g.10gb`, if the GPU is a MIG slice."""
        return self.gpu if self.gpu is not None and _MIG_SLICE.fullmatch(self.gpu) else None

    @property
    def job_name(self) -> str:
        """Name of this job, where the place keeps the names of jobs that have ended: stoker-run, stoker-run-a2, …"""
        return self.name if self.attempt == 1 else f"{self.name}-a{self.attempt}"

    def local_storage(self, path: str) -> str | None:
        """The kind of the file system (ext4), if `path` is on one of this machine and below no mount, so that other
        nodes do not see it."""
        from stoker_watch.recording.telemetry.environment import describe_storage  # not needed for `stoker --help`

        if any(PurePosixPath(path).is_relative_to(mount.path) for mount in self.mounts):
            return None
        folders = (Path(path), *Path(path).parents)
        storage = describe_storage(next(folder for folder in folders if folder.exists()))
        return None if storage["network"] else str(storage["kind"])

    @property
    def is_elastic(self) -> bool:
        return self.max_nodes > self.min_nodes


class Job(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A job that was submitted: a line of launch.json."""

    place: str
    id: str
    """Id in the place: a Slurm job id, a resource name, a process id."""
    name: str
    run: str
    """The run folder or its URI."""
    t: float
    """When it was submitted, Unix time."""
    options: dict[str, str] = {}
    """`PlaceOptions.set_fields()`: what else finds the job."""
    request: dict[str, Any] = {}
    """`LaunchRequest.kept_fields()`."""
    log: str = ""
    attempt: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobStatus:
    """What a place says about a job."""

    state: State
    text: str
    """In the words of the place, with its reason: `PENDING (Priority)`."""
    nodes: tuple[str, ...] = ()
    restarts: int | None = None
    exit_code: int | None = None

    @property
    def is_live(self) -> bool:
        """Whether it has not ended."""
        return self.state in ("queued", "running")


class LaunchPlace:
    """Where a training can run: a subclass for each, whose attributes say what it takes. Errors of all methods are
    StokerErrors; a client that is not installed is a PreflightError with its install line (`errors.needs_package`)."""

    name: str
    file: str
    """Name of what is submitted; `{name}` stands for that of the job."""
    reach: Reach = "containers"
    cloud: str | None = None
    """The cloud whose machine types it has (`GCP`); None: any, or none."""
    options: frozenset[str] = frozenset()
    """Fields of PlaceOptions that it takes."""
    lacks: tuple[str, ...] = ()
    """Fields of LaunchSpec that it does not have."""
    instead: str = ""
    """What it has instead of them, a clause."""
    has_secrets: bool = False
    """Whether --secret names something there."""
    default_grace_s: int = 60
    spot_grace_s: int | None = None
    """Notice that a spot machine of the place gives; None: `grace_s` holds there, too."""
    job_id: str
    """Pattern of the ids that `submit` returns. One from launch.json that does not match reaches no client."""

    def check(self, spec: LaunchSpec) -> list[str]:
        """The place's own rules. Returns warnings; raises UsageError. Needs no client and no network."""
        raise NotImplementedError

    def render(self, spec: LaunchSpec) -> str:
        """Exactly what would be submitted. Needs no client and no network."""
        raise NotImplementedError

    def submit(self, spec: LaunchSpec) -> str:
        """Submits; returns the id of the job."""
        raise NotImplementedError

    def status(self, job: Job) -> JobStatus:
        raise NotImplementedError

    def logs(self, job: Job, *, follow: bool) -> Iterator[str]:
        """The lines of its output so far, without line ends; with `follow` also the next ones until it ends."""
        raise NotImplementedError

    def cancel(self, job: Job) -> None:
        """Asks it to save and end, for good: nothing starts it again. A job that has ended is no error."""
        raise NotImplementedError


def open_place(name: str) -> LaunchPlace:
    """The place of this name. Raises UsageError, with the nearest name, if there is none."""
    key = ALIASES.get(name.lower(), name.lower())
    if key not in PLACES:
        near = nearest(key, [*PLACES, *ALIASES])
        what = f"There is no place {name!r} to launch at" + (f"; did you mean {near!r}?" if near else ".")
        raise UsageError(what, choices=PLACES)
    module, _, kind = PLACES[key].partition(":")
    place: LaunchPlace = getattr(importlib.import_module(module), kind)()
    return place


@functools.cache
def state_of(place: str, word: str) -> State:
    """The state that a place calls so (`knowledge/launch.toml`)."""
    words = msgspec.convert(read_toml("launch.toml")[place], dict[Literal[State, "default"], str])
    default = words.pop("default", "unknown")
    found = next((state for state, text in words.items() if word in text.split()), default)
    state: State = msgspec.convert(found, State)
    return state


def read_template(name: str) -> Any:
    """A document of this folder with `$name` in place of values."""
    import yaml  # not needed for `stoker --help`

    return yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8"))


def fill(template: Any, values: Mapping[str, Any]) -> Any:
    """A template with the values of its `$name` and `$name.attribute`; fields that are None are left out, and with
    them a mapping of nothing else."""
    if isinstance(template, dict):
        filled = {name: fill(value, values) for name, value in template.items()}
        return {name: value for name, value in filled.items() if value is not None} or (None if template else {})
    if isinstance(template, list):
        return [fill(value, values) for value in template]
    if isinstance(template, str) and template.startswith("$"):
        name, *attributes = template[1:].split(".")
        if name in values:
            return fill(functools.reduce(getattr, attributes, values[name]), {})
    return template
