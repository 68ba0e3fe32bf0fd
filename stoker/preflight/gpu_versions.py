"""Whether driver, CUDA runtime, compiled architectures and cuDNN fit together, of the torch that has used a GPU."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from stoker.hardware.cuda_trial import TorchFacts
from stoker.preflight.findings import CheckFinding, make_finding, ok, unknown
from stoker.preflight.gpu_facts import GpuFacts
from stoker.preflight.static.versions import DRIVERS_BY_MAJOR


def version_findings(facts: GpuFacts) -> Iterator[CheckFinding]:
    """Driver against runtime, architectures, cuDNN: of a torch that has used a GPU."""
    found = facts.trial.facts
    if found is None or not found.num_gpus or found.cuda is None:
        return
    version = facts.driver_version
    old, compat = driver_is_too_old(found, version), _compat_in_use(found)
    if version is None:
        yield unknown("driver", "the driver's version is not known", "neither NVML nor /proc/driver/nvidia has it")
    elif old and compat is None:
        yield make_finding(
            id="driver_old",
            severity="blocker" if any(device.error for device in found.devices) else "warning",
            title=old,
            evidence=f"driver {version}; torch {found.torch}; "
            + ("; ".join(device.error for device in found.devices if device.error) or "simple operations run"),
            fix=driver_fix(found, facts.root),
        )
    else:
        used = "" if compat is None else f", through the forward-compatibility package {compat}"
        yield ok("driver", f"driver {version} runs CUDA {found.cuda}{used}", f"torch {found.torch}")
    for device in found.devices:
        if device.capability == (0, 0):
            continue
        text = f"sm_{device.capability[0]}{device.capability[1]}"
        arches = " ".join(found.arch_list)
        if runs_on(found.arch_list, device.capability):
            yield ok("architecture", f"torch has kernels for {text}", arches, f"cuda:{device.index}")
        else:
            yield make_finding(
                id="arch_missing",
                severity="blocker",
                title=f"torch {found.torch} has no kernels for {device.name or text} ({text})",
                evidence=f"it was built for {arches}",
                fix="install the torch build for a newer CUDA (pytorch.org/get-started/locally)"
                if device.capability > _newest(found.arch_list)
                else "install an older torch, whose builds still have this architecture, or use a newer GPU",
                place=f"cuda:{device.index}",
            )
    yield from _cudnn(facts, found)


def driver_is_too_old(found: TorchFacts, version: str | None) -> str | None:
    """A clause, or None if it is new enough or one of the versions is not known."""
    if version is None or found.cuda is None:
        return None
    minimum = DRIVERS_BY_MAJOR.get(int(found.cuda.partition(".")[0]))
    if minimum is None or _version_tuple(version) >= _version_tuple(minimum):
        return None
    return f"driver {version} is older than CUDA {found.cuda} needs ({minimum} or newer)"


def _compat_in_use(found: TorchFacts) -> str | None:
    """The loaded libcuda, if it is that of a forward-compatibility package (cuda-compat-13-0)."""
    return next((path for path in found.libraries if "/compat/" in path and "libcuda.so" in path), None)


def driver_fix(found: TorchFacts, root: Path) -> str:
    cuda = int((found.cuda or "0").partition(".")[0])
    installed = sorted(root.glob("usr/local/cuda*/compat/libcuda.so.1"))
    older = [major for major in DRIVERS_BY_MAJOR if major < cuda]
    instead = f", or torch built for CUDA {older[-1]} (pytorch.org/get-started/locally)" if older else ""
    if installed and "forward compatibility" not in found.error:  # error 804: this GPU does not support it
        folder = "/" + installed[-1].parent.relative_to(root).as_posix()
        return f"export LD_LIBRARY_PATH={folder}:$LD_LIBRARY_PATH (data-center GPUs only), a newer driver{instead}"
    return f"install driver {DRIVERS_BY_MAJOR.get(cuda, DRIVERS_BY_MAJOR[13])} or newer{instead}"


def runs_on(arch_list: Sequence[str], capability: tuple[int, int]) -> bool:
    """Whether code for these architectures runs on a GPU: code for the same major and at most its minor version, or PTX
    of at most its version. sm_90a runs on exactly one (CUDA C++ programming guide, "Compute capability")."""
    for arch in arch_list:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
        if match is None:
            continue
        built = int(match[2]), int(match[3])
        if match[4] == "a":
            runs = match[1] == "sm" and built == capability
        elif match[1] == "sm":
            runs = built[0] == capability[0] and built <= capability
        else:
            runs = built <= capability
        if runs:
            return True
    return not arch_list  # not known


def _newest(arch_list: Sequence[str]) -> tuple[int, int]:
    return max(((int(arch[1]), int(arch[2])) for arch in (re.fullmatch(r"\w+_(\d+)(\d)[af]?", a) for a in arch_list)
                if arch), default=(0, 0))  # fmt: skip


def _cudnn(facts: GpuFacts, found: TorchFacts) -> Iterator[CheckFinding]:
    folders = sorted({path.rpartition("/")[0] for path in found.libraries if "/libcudnn" in path})
    search_path = facts.env.get("LD_LIBRARY_PATH", "").split(":")
    folders_of_user = [facts.root / folder.lstrip("/") for folder in search_path if folder]
    others = [path for folder in folders_of_user for path in sorted(folder.glob("libcudnn.so*"))]
    outside = ["/" + path.relative_to(facts.root).as_posix() for path in others]
    if found.cudnn_error:
        yield make_finding(
            id="cudnn_mismatch",
            severity="blocker",
            title="the cuDNN that is loaded is not the one that torch was built for",
            evidence=" ".join([found.cudnn_error, *outside]),
            fix="take the folder with the other libcudnn out of LD_LIBRARY_PATH: torch brings its own",
            place="LD_LIBRARY_PATH" if outside else "",
        )
        return
    required = None if found.cudnn_required is None else _version_tuple(found.cudnn_required)
    loaded = _cudnn_tuple(found.cudnn)
    if len(folders) > 1:
        yield make_finding(
            id="cudnn_twice",
            severity="warning",
            title="cuDNN is loaded twice",
            evidence=", ".join(folders),
            fix="keep one: uninstall the system's, or take its folder out of LD_LIBRARY_PATH",
        )
    if loaded is not None and required is not None and loaded < required[:3]:
        yield make_finding(
            id="cudnn_old",
            severity="warning",
            title=f"cuDNN {_dotted(loaded)} is older than the {_dotted(required[:3])} that torch was built for",
            evidence=", ".join([f"torch {found.torch}", *(folders or outside)]),
            fix=f"pip install nvidia-cudnn-cu{(found.cuda or '').partition('.')[0]}=={found.cudnn_required}; take "
            "other folders with libcudnn out of LD_LIBRARY_PATH",
        )
    elif outside and not any(folder == path.rpartition("/")[0] for folder in folders for path in outside):
        yield make_finding(
            id="cudnn_twice",
            severity="warning",
            title="LD_LIBRARY_PATH names a second cuDNN",
            evidence=", ".join([*outside, *folders]),
            fix="take that folder out of LD_LIBRARY_PATH: torch brings its own",
            place="LD_LIBRARY_PATH",
        )
    elif loaded is not None and len(folders) <= 1:
        yield ok("cudnn", f"cuDNN {_dotted(loaded)}", ", ".join(folders) or "loaded by torch")


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
