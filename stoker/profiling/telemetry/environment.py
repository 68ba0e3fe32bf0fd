"""What a run ran on, written once into environment.json: versions, machine, limits, GPUs, settings from outside.

A run is explained, compared and repeated from this. It never holds a secret: variables are taken by name, those that
look like a secret are left out, and passwords in addresses and behind flags are masked. `why` reads it; the doctor
checks it.
"""

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

from stoker.hardware.cgroup import Cgroup, host_cores, host_memory
from stoker.profiling.telemetry import platform_info
from stoker.profiling.telemetry.gpu import GpuSampler
from stoker.profiling.telemetry.machine import read_meminfo

if os.name == "posix":
    import resource

PACKAGES = ("stoker", "torch", "torchvision", "numpy", "opencv-python-headless", "simplejpeg", "pyarrow")
"""Their versions decide speed and results."""

JOB_PACKAGES = ("torch", "torchvision", "tensorflow", "keras", "jax", "lightning", "pytorch-lightning", "transformers",
                "ultralytics", "numpy", "protobuf")  # fmt: skip
"""The same of jobs that others wrote."""

NO_DIRS: Mapping[str, str | Path] = MappingProxyType({})

_RECORDED_ENV_VARS = re.compile(
    r"(CUDA|CUBLAS|NCCL|GLOO|NVIDIA|HIP|ROCR|HSA|TPU|PJRT|OMP|KMP|MKL|OPENBLAS|MALLOC|TORCH|TORCHINDUCTOR|PYTORCH|STOKER)_"
    r"|(LD_PRELOAD|MASTER_ADDR|MASTER_PORT|RANK|LOCAL_RANK|WORLD_SIZE|SLURM_JOB_ID|SLURM_CPUS_PER_TASK)$"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE|SIGNATURE|HOOK", re.IGNORECASE)
_SECRET_FLAG = re.compile(
    r"-{1,2}(?:\w+[-_])*(?:(?:api)?key|token|secret|passw(?:or)?d|credentials?|auth|cookie|signature|webhook)"
    r"(?:$|(?=[-_=]))(?:[-_]\w+)*(?P<value>=.*)?",
    re.IGNORECASE | re.DOTALL,
)
"""A flag with a secret behind it, in the same word or in the next. Not `--tokenizer`, nor `--max-tokens`."""
_URL_PASSWORD = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_WEBHOOK_URL = re.compile(r"(https?://[^\s'\"]*?(?:\bhooks?\.|webhook)[^\s/'\"]*/)[^\s'\"]+", re.IGNORECASE)
"""The address of a webhook is its password: hooks.slack.com/…, discord.com/api/webhooks/…, ….webhook.office.com/…"""
_SECRET_QUERY = re.compile(r"([?&][^=&\s]*(?:key|token|secret|sig|credential|auth)[^=&\s]*=)[^&\s]+", re.IGNORECASE)


def describe(
    env: Mapping[str, str] = os.environ,
    argv: list[str] = sys.argv,
    *,
    dirs: Mapping[str, str | Path] = NO_DIRS,
) -> dict[str, Any]:
    """The environment as JSON can hold it; what the machine does not say is None. Takes some 0.1 s (driver, torch).

    folders: those of which it shall be said on what they lie, by a name (`run`, `data`)."""
    return {
        "packages": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        **_describe_machine(env, dirs),
        "torch": _describe_torch(),
        "variables": _recorded_env(env),
        "argv": mask_argv(argv),
    }


def describe_job(
    argv: list[str], env: Mapping[str, str] = os.environ, *, dirs: Mapping[str, str | Path] = NO_DIRS
) -> dict[str, Any]:
    """The same of a job that stoker did not write. Nothing of it is run: its packages are those that lie beside the
    program, None where that is no Python environment; what its torch was built for is not known."""
    packages, python = _installed_packages(argv[0])
    return {
        "packages": packages,
        "python": python,
        **_describe_machine(env, dirs),
        "torch": None,
        "variables": _recorded_env(env),
        "argv": mask_argv(argv),
        "cwd": os.getcwd(),
    }


def describe_loop(
    env: Mapping[str, str] = os.environ,
    argv: list[str] = sys.argv,
    *,
    dirs: Mapping[str, str | Path] = NO_DIRS,
) -> dict[str, Any]:
    """The same of this process, whose training loop stoker did not write. torch is asked only where it is loaded: to
    load it takes seconds."""
    return {
        "packages": {name: _version(name) for name in ("stoker", *JOB_PACKAGES)},
        "python": platform.python_version(),
        **_describe_machine(env, dirs),
        "torch": _describe_torch() if "torch" in sys.modules else None,
        "variables": _recorded_env(env),
        "argv": mask_argv(argv),
        "cwd": os.getcwd(),
    }


def _installed_packages(program: str) -> tuple[dict[str, str | None], str | None]:
    """(versions, Python's version) of the environment that a program is in, by where it lies."""
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
        "cloud": platform_info.detect_cloud(),
        "system_vendor": platform_info.system_vendor(),
        "cpu_sockets": platform_info.count_cpu_sockets(),
        "numa_nodes": platform_info.count_numa_nodes(),
        "huge_pages": platform_info.huge_page_mode(),
        "swap_bytes": read_meminfo(Path("/proc")).get("SwapTotal"),
        "max_fds": _max_open_fds(),
        "storage": {name: platform_info.describe_storage(path) for name, path in dirs.items()},
        "gpu": platform_info.query_with_timeout(
            lambda: GpuSampler(env).describe(),
            {"gpus": [], "reason": f"the driver has not answered for {platform_info.QUERY_TIMEOUT_S:.0f} s"},
        ),
    }


def _max_open_fds() -> int | None:
    """Open files that a process started here may have (`ulimit -n`); None: no limit."""
    if os.name != "posix":
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def mask_secrets(text: str) -> str:
    """The text without passwords: `s3://***@host/…`, `…?sig=***`, `https://hooks.slack.com/***`."""
    return _WEBHOOK_URL.sub(r"\1***", _SECRET_QUERY.sub(r"\1***", _URL_PASSWORD.sub("***", text)))


def mask_argv(argv: Iterable[str]) -> list[str]:
    """A command without passwords: each word `masked`, and what stands behind `--token`, `--alert-webhook` …"""
    masked_argv: list[str] = []
    hide_next = False
    for arg in argv:
        flag = _SECRET_FLAG.fullmatch(arg)
        if flag is not None and flag["value"] is not None:
            masked_argv.append(arg[: flag.start("value")] + "=***")
        else:
            masked_argv.append("***" if hide_next and not arg.startswith("--") else mask_secrets(arg))
        hide_next = flag is not None and flag["value"] is None
    return masked_argv


def detect_container(env: Mapping[str, str] = os.environ, root: Path = Path("/")) -> str | None:
    """The kind of container around this process, as far as it shows: kubernetes, singularity, podman, docker."""
    if "KUBERNETES_SERVICE_HOST" in env:
        return "kubernetes"
    if "SINGULARITY_NAME" in env or "APPTAINER_NAME" in env:
        return "singularity"
    if (root / "run/.containerenv").exists():
        return "podman"
    return "docker" if (root / ".dockerenv").exists() else None


def detect_machine_type(env: Mapping[str, str] = os.environ, root: Path = Path("/")) -> str | None:
    """What its cloud calls the machine: STOKER_MACHINE_TYPE, else what the firmware says (DMI; on AWS that is the type,
    on GCP only "Google Compute Engine"). The metadata server is not asked: that would be a request at every start."""
    from_env = env.get("STOKER_MACHINE_TYPE", "").strip()
    if from_env:
        return from_env
    try:
        return (root / "sys/class/dmi/id/product_name").read_text(encoding="utf-8", errors="replace").strip() or None
    except OSError:  # no DMI: not a PC, or hidden in a container
        return None


def _recorded_env(env: Mapping[str, str]) -> dict[str, str]:
    return {name: mask_secrets(env[name]) for name in sorted(env) if _is_recorded_var(name)}


def _is_recorded_var(name: str) -> bool:
    return _RECORDED_ENV_VARS.match(name) is not None and _SECRET.search(name) is None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):  # not a Linux, or one that does not say
        return platform.platform()


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*:\s*(.+)$", path.read_text() if path.exists() else "", re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()


def _describe_torch() -> dict[str, Any] | None:
    """What torch was built for, and the cuDNN it loads; None where there is no torch."""
    try:
        import torch
    except ImportError:
        return None
    return {
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
