"""What is found out about each GPU: the versions that must fit together, and its condition.

The rules look at `GpuFacts`, which `gpu.py` collects. Versions: driver, CUDA runtime, compiled architectures and cuDNN,
of the torch that has used a GPU. Condition, as the driver and the kernel's log have it: defects, clocks, link, modes,
other users. The texts are in `knowledge/check_machine.toml`.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
from packaging.version import Version

from stoker.hardware.cuda_trial import TorchFacts, build_with, kernel_driver, runs_on
from stoker.preflight.catalog import describe
from stoker.preflight.static.tables import DRIVERS_BY_MAJOR
from stoker_watch.diagnosis.causes.gpu import PCIE_DEGRADED, find_xid
from stoker_watch.findings.finding import Finding
from stoker_watch.recording.telemetry.gpu import EXCLUSIVE, PROHIBITED, DriverState, GpuState
from stoker_watch.recording.telemetry.machine import ForeignProcess, KernelLine
from stoker_watch.report import format as fmt

DRIVER_TIMEOUT_S = 5.0
MAX_USED_FRACTION = 0.05
"""Fraction of a GPU's memory that may be in use before a training starts (heuristic: a desktop takes 1 to 4 %)."""
MAX_XIDS = 5
SLOWDOWNS = {"throttled_heat": 0x08 | 0x20 | 0x40, "throttled_power": 0x80, "clocks_set": 0x02}
"""Finding → bits of NVML's clocks event reasons. The software power cap (0x04) is how large GPUs work."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialResult:
    """How the trial process ended. facts: None if it did not; stage: the last one that it entered."""

    facts: TorchFacts | None
    stage: str = ""
    error: str = ""
    timed_out: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """Everything that the rules look at. driver None: it did not answer in time. kernel_lines None: may not be read."""

    device: str | None
    env: Mapping[str, str]
    root: Path
    driver: DriverState | None
    trial: TrialResult
    kernel_lines: Sequence[KernelLine] | None

    @property
    def driver_version(self) -> str | None:
        return (None if self.driver is None else self.driver.version) or kernel_driver(self.root)

    @property
    def gpus(self) -> list[GpuState]:
        return [] if self.driver is None else self.driver.gpus


def version_findings(facts: GpuFacts) -> Iterator[Finding]:
    """Driver against runtime, architectures, cuDNN: of a torch that has used a GPU."""
    found, version = facts.trial.facts, facts.driver_version
    if found is None or not found.num_gpus or found.cuda is None:
        return
    old = driver_is_too_old(found, version)
    compat = next((path for path in found.libraries if "/compat/" in path and "libcuda.so" in path), None)
    if version is None:
        yield describe("driver/unknown")
    elif old and compat is None:
        errors = "; ".join(device.error for device in found.devices if device.error)
        texts = {"version": version, "torch": found.torch, "errors": errors or "simple operations run"}
        level = "blocker" if errors else "warning"
        yield describe("driver_old", old=old, severity=level, fix=driver_fix(found), **texts)
    else:
        used = "" if compat is None else f", through the forward-compatibility package {compat}"
        yield describe("driver", version=version, cuda=found.cuda, used=used, torch=found.torch)
    for device in found.devices:
        place, arches = f"cuda:{device.index}", " ".join(found.arch_list)
        if runs_on(found.arch_list, device.capability):
            yield describe("architecture", place, arch=device.arch, arches=arches)
        elif device.capability != (0, 0):
            texts = {"name": device.name, "arch": device.arch, "build": build_with(device.capability)}
            yield describe("arch_missing", place, torch=found.torch, arches=arches, **texts)
    yield from _cudnn(found)


def driver_is_too_old(found: TorchFacts, version: str | None) -> str | None:
    """A clause, or None if it is new enough or one of the versions is not known."""
    minimum = DRIVERS_BY_MAJOR.get(int((found.cuda or "0").partition(".")[0]))
    if version is None or minimum is None or Version(version) >= Version(minimum):
        return None
    return f"driver {version} is older than CUDA {found.cuda} needs ({minimum} or newer)"


def driver_fix(found: TorchFacts) -> str:
    cuda = int((found.cuda or "0").partition(".")[0])
    older = [major for major in DRIVERS_BY_MAJOR if major < cuda]
    instead = f", or torch built for CUDA {older[-1]} (pytorch.org/get-started/locally)" if older else ""
    return f"install driver {DRIVERS_BY_MAJOR.get(cuda, DRIVERS_BY_MAJOR[13])} or newer{instead}"


def _cudnn(found: TorchFacts) -> Iterator[Finding]:
    folders = sorted({path.rpartition("/")[0] for path in found.libraries if "/libcudnn" in path})
    text = ", ".join(folders) or "loaded by torch"
    required = None if found.cudnn_required is None else Version(found.cudnn_required).release[:3]
    loaded = _cudnn_tuple(found.cudnn)
    if found.cudnn_error:
        yield describe("cudnn_mismatch", evidence=found.cudnn_error)
        return
    if len(folders) > 1:
        yield describe("cudnn_twice", folders=text)
    version = ".".join(map(str, loaded or ()))
    if loaded is not None and required is not None and loaded < required:
        cuda, evidence = (found.cuda or "").partition(".")[0], f"torch {found.torch}, {text}"
        yield describe("cudnn_old", version=version, required=found.cudnn_required, evidence=evidence, cuda=cuda)
    elif loaded is not None and len(folders) <= 1:
        yield describe("cudnn", version=version, folders=text)


def _cudnn_tuple(version: int | None) -> tuple[int, ...] | None:
    """90100 is 9.1.0, 8907 is 8.9.7 (cudnn_version.h: from version 9 on, the major version counts 10,000)."""
    if version is None:
        return None
    major, rest = divmod(version, 10_000) if version >= 90_000 else divmod(version, 1_000)
    return (major, *divmod(rest, 100))


def gpu_findings(facts: GpuFacts) -> Iterator[Finding]:
    """Defects, modes and other users of each GPU."""
    if facts.driver is None:
        level = "blocker" if facts.trial.timed_out else "warning"
        yield describe("driver_hangs", severity=level, seconds=DRIVER_TIMEOUT_S)
    for gpu in facts.gpus:
        place = f"GPU {gpu.sample.index}"
        if gpu.lost:
            yield describe("gpu_lost", place, gpu=gpu.title, reason=gpu.lost)
            continue
        rules = (_memory_errors, _clocks, _pcie, _modes, _other_users)
        findings = [finding for rule in rules for finding in rule(gpu, place)]
        yield from findings or [describe("gpu_state", place, gpu=gpu.title)]


def _memory_errors(gpu: GpuState, place: str) -> Iterator[Finding]:
    errors = gpu.sample.ecc_uncorrected
    kind = "failed" if gpu.rows_failed else "uncorrected" if errors else "pending" if gpu.rows_pending else ""
    if kind:
        count = fmt.plural(errors or 0, "uncorrected memory error")
        yield describe(f"ecc_errors/{kind}", place, gpu=gpu.title, count=count)


def _clocks(gpu: GpuState, place: str) -> Iterator[Finding]:
    sample, reasons = gpu.sample, gpu.sample.throttle_reasons or 0
    clocks = (
        f"clocks event reasons {reasons:#x}, SM clock {fmt.count(sample.sm_clock_mhz)} of "
        f"{fmt.count(sample.sm_clock_max_mhz)} MHz, {fmt.count(sample.temperature_c)} °C"
    )
    for id, bits in SLOWDOWNS.items():
        if reasons & bits:
            yield describe(id, place, gpu=gpu.title, clocks=clocks)


def _pcie(gpu: GpuState, place: str) -> Iterator[Finding]:
    sample = gpu.sample
    if not (sample.pcie_width and sample.pcie_width_max):
        return
    fraction = sample.pcie_width / sample.pcie_width_max
    is_busy = (sample.utilization or 0.0) >= PCIE_DEGRADED.threshold("busy")
    if is_busy and sample.pcie_generation and sample.pcie_generation_max:  # an idle GPU lowers it by itself
        fraction *= 2.0 ** (sample.pcie_generation - sample.pcie_generation_max)
    if 1 - fraction >= (PCIE_DEGRADED.info_threshold or 1.0):
        generations = f"{fmt.count(sample.pcie_generation)} of {fmt.count(sample.pcie_generation_max)}"
        link = f"{sample.pcie_width} of {sample.pcie_width_max} lanes, generation {generations}"
        speed = fmt.percentage(fraction)
        yield describe("pcie_degraded", place, gpu=gpu.title, fraction=speed, link=link, fix=PCIE_DEGRADED.fix)


def _modes(gpu: GpuState, place: str) -> Iterator[Finding]:
    mps = _mps_server(gpu)
    modes = {
        "compute_mode": gpu.compute_mode == PROHIBITED, "mig": gpu.sample.mig, "vgpu": gpu.sample.vgpu,
        "mps": mps is not None, "persistence": gpu.persistence is False,
    }  # fmt: skip
    for id, is_on in modes.items():
        if is_on:
            yield describe(id, place, gpu=gpu.title, memory=fmt.size(gpu.sample.memory_total_bytes), pid=mps)


def _mps_server(gpu: GpuState) -> int | None:
    return next((row.pid for row in gpu.processes or () if _command(row.pid).startswith("nvidia-cuda-mps")), None)


def _other_users(gpu: GpuState, place: str) -> Iterator[Finding]:
    mps = _mps_server(gpu)
    processes = [process for process in gpu.processes or () if process.pid != mps]
    used, total = gpu.sample.memory_used_bytes, gpu.sample.memory_total_bytes
    if not processes and (not used or not total or used / total <= MAX_USED_FRACTION):
        return
    free = "" if used is None or total is None else f": {fmt.size(total - used)} of {fmt.size(total)} are free"
    id = "gpu_in_use/exclusive" if gpu.compute_mode == EXCLUSIVE and processes else "gpu_in_use"
    texts = []
    for process in processes:
        memory = f" holds {fmt.size(process.memory_bytes)}" if process.memory_bytes else ""
        command = _command(process.pid) or "not visible from here: another container's, or another user's"
        texts.append(f"PID {process.pid}{memory}, {command}")
    none_named = "no process is named: it is outside this container, or a defunct one"
    yield describe(id, place, gpu=gpu.title, free=free, processes="; ".join(texts) or none_named)


def _command(pid: int) -> str:
    """The command line of a process and its user; empty for one that is not visible."""
    try:
        process = ForeignProcess(pid)
        return f"{' '.join(process.cmdline())[:120] or process.name()} (user {process.username()})"
    except psutil.Error:
        return ""


def xid_findings(facts: GpuFacts) -> Iterator[Finding]:
    if not facts.gpus:
        return
    if facts.kernel_lines is None:
        yield describe("xid/unknown")
        return
    lines: dict[int, str] = {}
    for line in facts.kernel_lines:
        if line.kind == "xid" and (match := re.search(r"Xid \([^)]*\): (\d+)", line.text)):
            lines[int(match[1])] = line.text
    machine = [number for number in lines if find_xid(number).origin != "program"]
    for number in machine[:MAX_XIDS]:
        known = find_xid(number)
        yield describe("xid", number=number, meaning=known.meaning, line=lines[number], fix=known.fix)
    if not machine:
        yield describe("xid/none")
