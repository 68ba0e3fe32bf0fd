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
from stoker.profiling.telemetry.gpu import Gpus
from stoker.profiling.telemetry.machine import memory

if os.name == "posix":
    import resource

PACKAGES = ("stoker", "torch", "torchvision", "numpy", "opencv-python-headless", "simplejpeg", "pyarrow")
"""Their versions decide speed and results."""

JOB_PACKAGES = ("torch", "torchvision", "tensorflow", "keras", "jax", "lightning", "pytorch-lightning", "transformers",
                "ultralytics", "numpy", "protobuf")  # fmt: skip
"""The same of jobs that others wrote."""

NO_FOLDERS: Mapping[str, str | Path] = MappingProxyType({})

_VARIABLES = re.compile(
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
_PASSWORD = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_HOOK = re.compile(r"(https?://[^\s'\"]*?(?:\bhooks?\.|webhook)[^\s/'\"]*/)[^\s'\"]+", re.IGNORECASE)
"""The address of a webhook is its password: hooks.slack.com/…, discord.com/api/webhooks/…, ….webhook.office.com/…"""
_QUERY = re.compile(r"([?&][^=&\s]*(?:key|token|secret|sig|credential|auth)[^=&\s]*=)[^&\s]+", re.IGNORECASE)


def describe(
    variables: Mapping[str, str] = os.environ,
    argv: list[str] = sys.argv,
    *,
    folders: Mapping[str, str | Path] = NO_FOLDERS,
) -> dict[str, Any]:
    """The environment as JSON can hold it; what the machine does not say is None. Takes some 0.1 s (driver, torch).

    folders: those of which it shall be said on what they lie, by a name (`run`, `data`)."""
    return {
        "packages": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        **_machine(variables, folders),
        "torch": _torch(),
        "variables": _told(variables),
        "argv": masked_words(argv),
    }


def describe_job(
    argv: list[str], variables: Mapping[str, str] = os.environ, *, folders: Mapping[str, str | Path] = NO_FOLDERS
) -> dict[str, Any]:
    """The same of a job that stoker did not write. Nothing of it is run: its packages are those that lie beside the
    program, None where that is no Python environment; what its torch was built for is not known."""
    packages, python = _packages_of(argv[0])
    return {
        "packages": packages,
        "python": python,
        **_machine(variables, folders),
        "torch": None,
        "variables": _told(variables),
        "argv": masked_words(argv),
        "cwd": os.getcwd(),
    }


def describe_loop(
    variables: Mapping[str, str] = os.environ,
    argv: list[str] = sys.argv,
    *,
    folders: Mapping[str, str | Path] = NO_FOLDERS,
) -> dict[str, Any]:
    """The same of this process, whose training loop stoker did not write. torch is asked only where it is loaded: to
    load it takes seconds."""
    return {
        "packages": {name: _version(name) for name in ("stoker", *JOB_PACKAGES)},
        "python": platform.python_version(),
        **_machine(variables, folders),
        "torch": _torch() if "torch" in sys.modules else None,
        "variables": _told(variables),
        "argv": masked_words(argv),
        "cwd": os.getcwd(),
    }


def _packages_of(program: str) -> tuple[dict[str, str | None], str | None]:
    """(versions, Python's version) of the environment that a program is in, by where it lies."""
    found = shutil.which(program)
    folders = sorted(Path(found).parent.parent.glob("lib/python3*/site-packages")) if found else []
    if not folders:
        return dict.fromkeys(JOB_PACKAGES), None
    folder = folders[-1]
    versions: dict[str, str | None] = dict.fromkeys(JOB_PACKAGES)
    for one in metadata.distributions(path=[str(folder)]):
        name = (one.metadata["Name"] or "").lower()
        if name in versions:
            versions[name] = one.version
    return versions, folder.parent.name.removeprefix("python")


def _machine(variables: Mapping[str, str], folders: Mapping[str, str | Path]) -> dict[str, Any]:
    limit_bytes, _ = host_memory()
    return {
        "os": _os(),
        "kernel": platform.release(),
        "hostname": platform.node(),
        "container": container(variables),
        "machine_type": machine_type(variables),
        "cpu": _cpu(),
        "cores": host_cores(),
        "machine_cores": os.cpu_count(),
        "cpu_quota": Cgroup().cores(),
        "memory_limit_bytes": limit_bytes,
        "shm_bytes": shutil.disk_usage("/dev/shm").total if Path("/dev/shm").exists() else None,
        "cloud": platform_info.cloud(),
        "board": platform_info.board(),
        "cpu_sockets": platform_info.sockets(),
        "numa_nodes": platform_info.numa_nodes(),
        "huge_pages": platform_info.huge_pages(),
        "swap_bytes": memory(Path("/proc")).get("SwapTotal"),
        "handles_limit": _handles_limit(),
        "storage": {name: platform_info.storage(folder) for name, folder in folders.items()},
        "gpu": platform_info.answered(
            lambda: Gpus(variables).describe(),
            {"gpus": [], "reason": f"the driver has not answered for {platform_info.ANSWER_WITHIN_S:.0f} s"},
        ),
    }


def _handles_limit() -> int | None:
    """Open files that a process started here may have (`ulimit -n`); None: no limit."""
    if os.name != "posix":
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def masked(text: str) -> str:
    """The text without passwords: `s3://***@host/…`, `…?sig=***`, `https://hooks.slack.com/***`."""
    return _HOOK.sub(r"\1***", _QUERY.sub(r"\1***", _PASSWORD.sub("***", text)))


def masked_words(argv: Iterable[str]) -> list[str]:
    """A command without passwords: each word `masked`, and what stands behind `--token`, `--alert-webhook` …"""
    words: list[str] = []
    hide_next = False
    for word in argv:
        flag = _SECRET_FLAG.fullmatch(word)
        if flag is not None and flag["value"] is not None:
            words.append(word[: flag.start("value")] + "=***")
        else:
            words.append("***" if hide_next and not word.startswith("--") else masked(word))
        hide_next = flag is not None and flag["value"] is None
    return words


def container(variables: Mapping[str, str] = os.environ, root: Path = Path("/")) -> str | None:
    """The kind of container around this process, as far as it shows: kubernetes, singularity, podman, docker."""
    if "KUBERNETES_SERVICE_HOST" in variables:
        return "kubernetes"
    if "SINGULARITY_NAME" in variables or "APPTAINER_NAME" in variables:
        return "singularity"
    if (root / "run/.containerenv").exists():
        return "podman"
    return "docker" if (root / ".dockerenv").exists() else None


def machine_type(variables: Mapping[str, str] = os.environ, root: Path = Path("/")) -> str | None:
    """What its cloud calls the machine: STOKER_MACHINE_TYPE, else what the firmware says (DMI; on AWS that is the type,
    on GCP only "Google Compute Engine"). The metadata server is not asked: that would be a request at every start."""
    told = variables.get("STOKER_MACHINE_TYPE", "").strip()
    if told:
        return told
    try:
        return (root / "sys/class/dmi/id/product_name").read_text(encoding="utf-8", errors="replace").strip() or None
    except OSError:  # no DMI: not a PC, or hidden in a container
        return None


def _told(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: masked(variables[name]) for name in sorted(variables) if _is_told(name)}


def _is_told(name: str) -> bool:
    return _VARIABLES.match(name) is not None and _SECRET.search(name) is None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _os() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):  # not a Linux, or one that does not say
        return platform.platform()


def _cpu() -> str:
    path = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", path.read_text() if path.exists() else "", re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def _torch() -> dict[str, Any] | None:
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
