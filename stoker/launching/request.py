"""Makes the `LaunchSpec` of a `LaunchRequest`: what the user did not set is derived here."""

import re
from pathlib import Path

from stoker.errors import UsageError
from stoker.launching.spec import LaunchRequest, LaunchSpec, Mount, Place, PlaceOptions
from stoker.launching.validate import (
    CPUS_PER_GPU,
    GIB_PER_CPU,
    SYSTEM_MEMORY_FRACTION,
    check_env,
    machine_of,
    parse_nodes,
    parse_time_s,
)
from stoker.runs.records import is_finished, runs_named
from stoker.storage.uri import expand_variables, is_uri, parse_uri

RUNS_DIR = Path("runs")
LOG = "launch.log"
MAX_NAME_CHARS = 40


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
