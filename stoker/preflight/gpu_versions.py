"""Whether driver, CUDA runtime, compiled architectures and cuDNN fit together, of the torch that has used a GPU;
and whether an installed TensorFlow sees it, for jobs that use it."""

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from stoker.findings.finding import Finding, Severity
from stoker.hardware.cuda_trial import TorchFacts
from stoker.preflight.catalog import describe
from stoker.preflight.gpu_facts import GpuFacts
from stoker.preflight.programs import run_program
from stoker.preflight.static.tables import DRIVERS_BY_MAJOR
from stoker.report import format as fmt

TENSORFLOW_TIMEOUT_S = 20.0
TENSORFLOW_PROGRAM = (
    "import json, tensorflow as tf; info = tf.sysconfig.get_build_info(); "
    "print(json.dumps([tf.__version__, bool(tf.test.is_built_with_cuda()), len(tf.config.list_physical_devices('GPU')),"
    " str(info.get('cuda_version')), str(info.get('cudnn_version'))]))"
)


def version_findings(facts: GpuFacts) -> Iterator[Finding]:
    """Driver against runtime, architectures, cuDNN: of a torch that has used a GPU."""
    found = facts.trial.facts
    if found is None or not found.num_gpus or found.cuda is None:
        return
    version = facts.driver_version
    old = driver_is_too_old(found, version)
    compat = next((path for path in found.libraries if "/compat/" in path and "libcuda.so" in path), None)
    if version is None:
        yield describe("driver/unknown")
    elif old and compat is None:
        errors = "; ".join(device.error for device in found.devices if device.error)
        severity: Severity = "blocker" if errors else "warning"
        fix = driver_fix(found, facts.root)
        errors = errors or "simple operations run"
        yield describe(
            "driver_old", severity=severity, old=old, version=version, torch=found.torch, errors=errors, fix=fix
        )
    else:
        used = "" if compat is None else f", through the forward-compatibility package {compat}"
        yield describe("driver", version=version, cuda=found.cuda, used=used, torch=found.torch)
    for device in found.devices:
        if device.capability == (0, 0):
            continue
        place, arches = f"cuda:{device.index}", " ".join(found.arch_list)
        arch = f"sm_{device.capability[0]}{device.capability[1]}"
        if runs_on(found.arch_list, device.capability):
            yield describe("architecture", place, arch=arch, arches=arches)
            continue
        newest = max((built for _, built, _ in _built_for(found.arch_list)), default=(0, 0))
        fix = (
            "install the torch build for a newer CUDA (pytorch.org/get-started/locally)"
            if device.capability > newest
            else "install an older torch, whose builds still have this architecture, or use a newer GPU"
        )
        name = device.name or arch
        yield describe("arch_missing", place, torch=found.torch, name=name, arch=arch, arches=arches, fix=fix)
    yield from _cudnn(facts, found)


def driver_is_too_old(found: TorchFacts, version: str | None) -> str | None:
    """A clause, or None if it is new enough or one of the versions is not known."""
    if version is None or found.cuda is None:
        return None
    minimum = DRIVERS_BY_MAJOR.get(int(found.cuda.partition(".")[0]))
    if minimum is None or _version_tuple(version) >= _version_tuple(minimum):
        return None
    return f"driver {version} is older than CUDA {found.cuda} needs ({minimum} or newer)"


def driver_fix(found: TorchFacts, root: Path) -> str:
    cuda = int((found.cuda or "0").partition(".")[0])
    installed = sorted(root.glob("usr/local/cuda*/compat/libcuda.so.1"))
    older = [major for major in DRIVERS_BY_MAJOR if major < cuda]
    instead = f", or torch built for CUDA {older[-1]} (pytorch.org/get-started/locally)" if older else ""
    if installed and "forward compatibility" not in found.error:  # error 804: this GPU does not support it
        folder = "/" + installed[-1].parent.relative_to(root).as_posix()
        return f"export LD_LIBRARY_PATH={folder}:$LD_LIBRARY_PATH (data-center GPUs only), a newer driver{instead}"
    return f"install driver {DRIVERS_BY_MAJOR.get(cuda, DRIVERS_BY_MAJOR[13])} or newer{instead}"


def _built_for(arch_list: Sequence[str]) -> list[tuple[str, tuple[int, int], str]]:
    """(kind of code, architecture, suffix): ("sm", (9, 0), "a") of sm_90a."""
    matches = [re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch) for arch in arch_list]
    return [(match[1], (int(match[2]), int(match[3])), match[4]) for match in matches if match]


def runs_on(arch_list: Sequence[str], capability: tuple[int, int]) -> bool:
    """Whether code for these architectures runs on a GPU: code for the same major and at most its minor version, or PTX
    of at most its version. sm_90a runs on exactly one (CUDA C++ programming guide, "Compute capability")."""
    for kind, built, suffix in _built_for(arch_list):
        if suffix == "a":
            runs = kind == "sm" and built == capability
        else:
            runs = built <= capability and (kind == "compute" or built[0] == capability[0])
        if runs:
            return True
    return not arch_list  # not known


def _cudnn(facts: GpuFacts, found: TorchFacts) -> Iterator[Finding]:
    folders = sorted({path.rpartition("/")[0] for path in found.libraries if "/libcudnn" in path})
    search_path = [folder.lstrip("/") for folder in facts.env.get("LD_LIBRARY_PATH", "").split(":") if folder]
    others = [path for folder in search_path for path in sorted((facts.root / folder).glob("libcudnn.so*"))]
    outside = ["/" + path.relative_to(facts.root).as_posix() for path in others]
    if found.cudnn_error:
        place = "LD_LIBRARY_PATH" if outside else ""
        yield describe("cudnn_mismatch", place, evidence=" ".join([found.cudnn_error, *outside]))
        return
    required = None if found.cudnn_required is None else _version_tuple(found.cudnn_required)[:3]
    loaded = _cudnn_tuple(found.cudnn)
    if len(folders) > 1:
        yield describe("cudnn_twice/loaded", folders=", ".join(folders))
    if loaded is not None and required is not None and loaded < required:
        yield describe(
            "cudnn_old",
            version=_dotted(loaded),
            required=_dotted(required),
            evidence=", ".join([f"torch {found.torch}", *(folders or outside)]),
            cuda=(found.cuda or "").partition(".")[0],
            package=found.cudnn_required,
        )
    elif outside and not any(path.rpartition("/")[0] in folders for path in outside):
        yield describe("cudnn_twice/path", "LD_LIBRARY_PATH", folders=", ".join([*outside, *folders]))
    elif loaded is not None and len(folders) <= 1:
        yield describe("cudnn", version=_dotted(loaded), folders=", ".join(folders) or "loaded by torch")


def _cudnn_tuple(version: int | None) -> tuple[int, ...] | None:
    """90100 is 9.1.0, 8907 is 8.9.7 (cudnn_version.h: from version 9 on, the major version counts 10,000)."""
    if version is None:
        return None
    major, rest = divmod(version, 10_000) if version >= 90_000 else divmod(version, 1_000)
    return (major, *divmod(rest, 100))


def _version_tuple(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def check_tensorflow(
    *,
    needed: bool,
    gpu_is_there: bool,
    command: Sequence[str] = (sys.executable, "-c", TENSORFLOW_PROGRAM),
    timeout_s: float = TENSORFLOW_TIMEOUT_S,
) -> list[Finding]:
    """Whether TensorFlow sees the GPU, for jobs that use it. needed: such a job is to run, so it is a blocker."""
    try:
        ended = run_program(command, timeout_s)
        version, with_cuda, num_gpus, cuda, cudnn = msgspec.json.decode(
            ended.last_line, type=tuple[str, bool, int, str, str]
        )
    except subprocess.TimeoutExpired:
        return [describe("tensorflow/slow", seconds=timeout_s)]
    except msgspec.DecodeError:
        return [describe("tensorflow/fails", reason=ended.reason)]
    if num_gpus or not gpu_is_there:
        return [describe("tensorflow", version=version, gpus=fmt.plural(num_gpus, "GPU"), cuda=cuda)]
    id = "tensorflow_no_gpu/cuda" if with_cuda else "tensorflow_no_gpu/cpu"
    severity: Severity = "blocker" if needed else "warning"
    return [describe(id, severity=severity, version=version, cuda=cuda, cudnn=cudnn)]
