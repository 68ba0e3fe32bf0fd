"""Describes once what a run ran on, for environment.json: versions, machine, limits, GPUs, environment variables.

Runs are explained, compared and repeated from it. It never contains a secret: variables are selected by name, names
that look like a secret are left out, and secrets in values and arguments are masked (`secrets`). No network requests. A
fact that is not available is None: containers often hide it. GPUs: `gpu`.
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
from types import MappingProxyType
from typing import Any

from stoker.hardware.cgroup import Cgroup, host_cores, host_memory
from stoker.knowledge import read_toml
from stoker.profiling.telemetry.gpu import GpuSampler
from stoker.profiling.telemetry.machine import read_meminfo, read_text_or_none
from stoker.profiling.telemetry.timeouts import TimeoutWorker
from stoker.secrets import is_secret_name, mask_argv, mask_secrets

if os.name == "posix":
    import resource

PACKAGES = ("stoker", "torch", "torchvision", "numpy", "opencv-python-headless", "simplejpeg", "pyarrow")
"""Packages whose versions affect speed and results."""

JOB_PACKAGES = ("torch", "torchvision", "tensorflow", "keras", "jax", "lightning", "pytorch-lightning", "transformers",
                "ultralytics", "numpy", "protobuf")  # fmt: skip
"""The same for jobs that stoker did not write."""

NO_DIRS: Mapping[str, str | Path] = MappingProxyType({})

_RECORDED_ENV_VARS = re.compile(
    r"(CUDA|CUBLAS|NCCL|GLOO|NVIDIA|HIP|ROCR|HSA|TPU|PJRT|OMP|KMP|MKL|OPENBLAS|MALLOC|TORCH|TORCHINDUCTOR|PYTORCH|STOKER)_"
    r"|(LD_PRELOAD|MASTER_ADDR|MASTER_PORT|RANK|LOCAL_RANK|WORLD_SIZE|SLURM_JOB_ID|SLURM_CPUS_PER_TASK)$"
)

NETWORK_FILESYSTEMS = re.compile(
    r"nfs|cifs|smb|9p$|virtiofs$|ceph|lustre|gpfs|beegfs|glusterfs|afs|fuse\.(?!fuse-overlayfs)|gcsfuse"
)
"""File systems that read over a network, or through a program that may do so."""

QUERY_TIMEOUT_S = 20.0
"""Timeout of one query at the start: a driver or a storage may hang."""


def describe(
    env: Mapping[str, str] = os.environ,
    argv: list[str] = sys.argv,
    *,
    dirs: Mapping[str, str | Path] = NO_DIRS,
) -> dict[str, Any]:
    """The environment of a stoker training, as JSON types; facts that are not available are None. Takes some 0.1 s
    (driver, torch). dirs: folders whose storage is described, by name (`run`, `data`)."""
    with contextlib.suppress(ImportError):
        importlib.import_module("torch")
    return _describe(env, argv, dirs, PACKAGES)


def describe_job(argv: list[str], env: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The environment of a watched job. Nothing of the job is run: its packages are those that are installed next to
    its program (None if that is not in a Python environment); details of its torch are not known."""
    packages, python = _installed_packages(argv[0])
    described = _describe(env, argv, NO_DIRS, ())
    return described | {"packages": packages, "python": python, "torch": None, "cwd": os.getcwd()}


def describe_loop(*, dirs: Mapping[str, str | Path] = NO_DIRS) -> dict[str, Any]:
    """The environment of this process, with a training loop that stoker did not write."""
    return _describe(os.environ, sys.argv, dirs, ("stoker", *JOB_PACKAGES)) | {"cwd": os.getcwd()}


def _describe(
    env: Mapping[str, str], argv: list[str], dirs: Mapping[str, str | Path], packages: tuple[str, ...]
) -> dict[str, Any]:
    return {
        "packages": {name: _version(name) for name in packages},
        "python": platform.python_version(),
        **_describe_machine(env, dirs),
        "torch": _describe_torch(),
        "variables": {name: mask_secrets(env[name]) for name in sorted(env) if _is_recorded_var(name)},
        "argv": mask_argv(argv),
    }


def _installed_packages(program: str) -> tuple[dict[str, str | None], str | None]:
    """(versions, Python's version) of the Python environment that contains the program."""
    executable = shutil.which(program)
    dirs = sorted(Path(executable).parent.parent.glob("lib/python3*/site-packages")) if executable else []
    if not dirs:
        return dict.fromkeys(JOB_PACKAGES), None
    site_packages = dirs[-1]
    versions: dict[str, str | None] = dict.fromkeys(JOB_PACKAGES)
    for distribution in metadata.distributions(path=[str(site_packages)]):
        name = (distribution.metadata["Name"] or "").lower()
        if name in versions:
            versions[name] = distribution.version
    return versions, site_packages.parent.name.removeprefix("python")


def _describe_machine(env: Mapping[str, str], dirs: Mapping[str, str | Path]) -> dict[str, Any]:
    limit_bytes, _ = host_memory()
    return {
        "os": _os_name(),
        "kernel": platform.release(),
        "hostname": platform.node(),
        "container": detect_container(env),
        "machine_type": detect_machine_type(env),
        "cpu": _cpu_model(),
        "cores": host_cores(),
        "machine_cores": os.cpu_count(),
        "cpu_quota": Cgroup().cpu_limit_cores(),
        "memory_limit_bytes": limit_bytes,
        "shm_bytes": shutil.disk_usage("/dev/shm").total if Path("/dev/shm").exists() else None,
        "cloud": detect_cloud(),
        "system_vendor": system_vendor(),
        "cpu_sockets": count_cpu_sockets(),
        "numa_nodes": count_numa_nodes(),
        "huge_pages": huge_page_mode(),
        "swap_bytes": read_meminfo(Path("/proc")).get("SwapTotal"),
        "max_fds": _max_open_fds(),
        "storage": {name: describe_storage(path) for name, path in dirs.items()},
        "gpu": query_with_timeout(
            lambda: GpuSampler(env).describe(),
            {"gpus": [], "reason": f"the driver has not answered for {QUERY_TIMEOUT_S:.0f} s"},
        ),
    }


def _max_open_fds() -> int | None:
    """Limit of open files of a process (`ulimit -n`); None: no limit."""
    if os.name != "posix":
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


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


def _is_recorded_var(name: str) -> bool:
    return _RECORDED_ENV_VARS.match(name) is not None and not is_secret_name(name)


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
    path = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*:\s*(.+)$", path.read_text() if path.exists() else "", re.MULTILINE)
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
            cloud: str = row["cloud"]
            return cloud
    return None


def system_vendor(root: Path = Path("/")) -> str | None:
    """Vendor and model, by the firmware."""
    parts = [read_text_or_none(f"{root}/sys/class/dmi/id/{name}") for name in ("sys_vendor", "product_name")]
    return " ".join(part for part in parts if part) or None


def count_cpu_sockets(root: Path = Path("/")) -> int | None:
    """The number of CPU chips."""
    packages = {path.read_text() for path in root.glob("sys/devices/system/cpu/cpu[0-9]*/topology/physical_package_id")}
    return len(packages) or None


def count_numa_nodes(root: Path = Path("/")) -> int | None:
    return len(list(root.glob("sys/devices/system/node/node[0-9]*"))) or None


def huge_page_mode(root: Path = Path("/")) -> str | None:
    """The mode of transparent huge pages: always, madvise, never."""
    match = re.search(r"\[(\w+)\]", read_text_or_none(f"{root}/sys/kernel/mm/transparent_hugepage/enabled") or "")
    return match[1] if match else None


def describe_storage(location: str | Path, root: Path = Path("/")) -> dict[str, Any]:
    """The storage of a folder or bucket URI. kind: file system or object store; network: whether bytes come over a
    network; rotational: whether it is a hard disk, None if no disk is visible."""
    if "://" in str(location):
        return {"kind": str(location).partition("://")[0], "network": True, "rotational": None}
    mount = query_with_timeout(lambda: _find_mount(os.path.realpath(location), root), None)
    if mount is None:
        return {"kind": None, "network": None, "rotational": None}
    device, kind = mount
    return {
        "kind": kind,
        "network": NETWORK_FILESYSTEMS.match(kind) is not None,
        "rotational": _is_rotational(device, root),
    }


def query_with_timeout(query: Callable[[], Any], default: Any) -> Any:
    """The result, or `default` if there is none within QUERY_TIMEOUT_S."""
    worker = TimeoutWorker(lambda: query, name="environment")
    answer = worker.call(QUERY_TIMEOUT_S)
    worker.stop()
    return default if answer is None else answer


def _find_mount(path: str, root: Path) -> tuple[str, str] | None:
    """(major:minor, kind) of the file system that contains a folder (proc_pid_mountinfo(5))."""
    best, best_length = None, 0
    for line in (read_text_or_none(f"{root}/proc/self/mountinfo") or "").splitlines():
        mount, _, source = line.partition(" - ")
        fields = mount.split()
        mount_point = fields[4].replace("\\040", " ")
        contains = path == mount_point or path.startswith(mount_point.rstrip("/") + "/")
        if contains and len(mount_point) >= best_length:  # of two mounts on one point, the later one is visible
            best, best_length = (fields[2], source.split()[0]), len(mount_point)
    return best


def _is_rotational(device: str, root: Path) -> bool | None:
    device_dir = f"{root}/sys/dev/block/{device}"
    value = read_text_or_none(f"{device_dir}/queue/rotational") or read_text_or_none(
        f"{device_dir}/../queue/rotational"
    )  # a partition's is its disk's
    return None if value is None else value == "1"
