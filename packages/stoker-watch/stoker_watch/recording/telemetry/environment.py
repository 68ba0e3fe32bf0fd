"""Describes once what a run ran on, for environment.json: versions, machine, limits, GPUs, environment variables.

It never contains a secret: variables are selected by name, names that look like a secret are left out, and secrets in
values and arguments are masked (`secrets`). No network requests. A fact that is not available is None.
"""

import contextlib
import importlib
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from stoker_watch.hardware.cgroup import Cgroup, host_cores, host_memory
from stoker_watch.knowledge import read_toml
from stoker_watch.recording.telemetry.gpu import GpuSampler
from stoker_watch.recording.telemetry.machine import TimeoutWorker, read_meminfo, read_text_or_none
from stoker_watch.secrets import is_secret_name, mask_argv, mask_secrets

_TABLE = read_toml("environment.toml")
JOB_PACKAGES: list[str] = _TABLE["job_packages"]
_PATTERNS = {name: re.compile(pattern) for name, pattern in _TABLE["patterns"].items()}

QUERY_TIMEOUT_S = 20.0
"""Limit of one query: a driver or a storage may hang."""


def describe(
    env: Mapping[str, str] = os.environ, argv: list[str] = sys.argv, *, dirs: Mapping[str, str | Path] | None = None
) -> dict[str, Any]:
    """The environment of a stoker training, as JSON types; facts that are not available are None. Takes some 0.1 s
    (driver, torch). dirs: folders whose storage is described, by name (`run`, `data`)."""
    with contextlib.suppress(ImportError):
        importlib.import_module("torch")
    return _describe(env, argv, dirs or {}, _TABLE["packages"])


def describe_job(argv: list[str], env: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The environment of a watched job. Nothing of the job is run: its packages are those that are installed next to
    its program (None if that is not in a Python environment); details of its torch are not known."""
    packages, python = _installed_packages(argv[0])
    described = _describe(env, argv, {}, [])
    return described | {"packages": packages, "python": python, "torch": None, "cwd": _working_folder()}


def describe_loop(*, dirs: Mapping[str, str | Path]) -> dict[str, Any]:
    """The environment of this process, with a training loop that stoker did not write."""
    return _describe(os.environ, sys.argv, dirs, ["stoker-watch", *JOB_PACKAGES]) | {"cwd": _working_folder()}


def _describe(
    env: Mapping[str, str], argv: list[str], dirs: Mapping[str, str | Path], packages: list[str]
) -> dict[str, Any]:
    limit_bytes, _ = host_memory()
    variables = filter(_PATTERNS["variables"].match, sorted(env))
    no_answer = {"gpus": [], "reason": f"the driver has not answered for {QUERY_TIMEOUT_S:.0f} s"}
    return {
        "packages": {name: _version(name) for name in packages},
        "python": platform.python_version(),
        "os": _os_name(),
        "kernel": platform.release(),
        "hostname": platform.node(),
        "container": detect_container(env),
        "machine_type": detect_machine_type(env),
        "cpu": _cpu_model(),
        "cores": host_cores(),
        "cpu_quota": Cgroup().cpu_limit_cores(),
        "memory_limit_bytes": limit_bytes,
        "shm_bytes": shutil.disk_usage("/dev/shm").total if Path("/dev/shm").exists() else None,
        "cloud": detect_cloud(),
        "swap_bytes": read_meminfo(Path("/proc")).get("SwapTotal"),
        "storage": {name: describe_storage(path) for name, path in dirs.items()},
        "gpu": query_with_timeout(lambda: GpuSampler(env).describe(), no_answer),
        "torch": _describe_torch(),
        "variables": {name: mask_secrets(env[name]) for name in variables if not is_secret_name(name)},
        "argv": mask_argv(argv),
    }


def _installed_packages(program: str) -> tuple[dict[str, str | None], str | None]:
    """(versions, Python's version) of the Python environment that contains the program."""
    versions: dict[str, str | None] = dict.fromkeys(JOB_PACKAGES)
    executable = shutil.which(program)
    dirs = sorted(Path(executable).parent.parent.glob("lib/python3*/site-packages")) if executable else []
    if not dirs:
        return versions, None
    for distribution in metadata.distributions(path=[str(dirs[-1])]):
        name = (distribution.metadata["Name"] or "").lower()
        if name in versions:
            versions[name] = distribution.version
    return versions, dirs[-1].parent.name.removeprefix("python")


def detect_container(env: Mapping[str, str] = os.environ, root: Path = Path("/")) -> str | None:
    """The kind of container of this process, if it can be detected: kubernetes, singularity, podman, docker."""
    if "KUBERNETES_SERVICE_HOST" in env:
        return "kubernetes"
    if "SINGULARITY_NAME" in env or "APPTAINER_NAME" in env:
        return "singularity"
    if (root / "run/.containerenv").exists():
        return "podman"
    return "docker" if (root / ".dockerenv").exists() else None


def detect_machine_type(env: Mapping[str, str] = os.environ, root: Path = Path("/")) -> str | None:
    """The cloud's name of the machine type: STOKER_MACHINE_TYPE, else from the firmware (DMI; on AWS the type, on GCP
    only "Google Compute Engine"). The metadata server is not used: that would be a request at every start."""
    from_env = env.get("STOKER_MACHINE_TYPE", "").strip()
    return from_env or read_text_or_none(f"{root}/sys/class/dmi/id/product_name")  # no DMI: not a PC, or a container


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):  # not Linux, or without a name
        return platform.platform()


def _cpu_model() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", read_text_or_none("/proc/cpuinfo") or "", re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()


def _describe_torch() -> dict[str, Any] | None:
    """The CUDA or ROCm version that torch was built for, and its cuDNN; None if it is not loaded."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    return {
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def detect_cloud(root: Path = Path("/")) -> str | None:
    """The cloud of this machine, by its firmware."""
    for row in read_toml("clouds.toml")["clouds"]:
        if re.match(row["pattern"], read_text_or_none(f"{root}/sys/class/dmi/id/{row['file']}") or ""):
            return str(row["cloud"])
    return None


def describe_storage(location: str | Path, root: Path = Path("/")) -> dict[str, Any]:
    """The storage of a folder or bucket URI. kind: file system or object store; network: whether it is remote."""
    if "://" in str(location):
        return {"kind": str(location).partition("://")[0], "network": True}
    kind = query_with_timeout(lambda: _filesystem(os.path.realpath(location), root), None)
    return {"kind": kind, "network": None if kind is None else _PATTERNS["network_filesystems"].match(kind) is not None}


def query_with_timeout(query: Callable[[], Any], default: Any) -> Any:
    """The result, or `default` if there is none within QUERY_TIMEOUT_S."""
    answer = TimeoutWorker(query, name="environment").call(QUERY_TIMEOUT_S)
    return default if answer is None else answer


def _filesystem(path: str, root: Path) -> str | None:
    """The kind of the file system that contains a folder (proc_pid_mountinfo(5))."""
    kind, best_length = None, 0
    for line in (read_text_or_none(f"{root}/proc/self/mountinfo") or "").splitlines():
        mount, _, source = line.partition(" - ")
        mount_point = mount.split()[4].replace("\\040", " ")
        contains = path == mount_point or path.startswith(mount_point.rstrip("/") + "/")
        if contains and len(mount_point) >= best_length:  # of two mounts on one point, the later one is visible
            kind, best_length = source.split()[0], len(mount_point)
    return kind


def _working_folder() -> str:
    """Empty: it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""
