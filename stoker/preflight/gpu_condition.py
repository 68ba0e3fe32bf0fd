"""The condition of each GPU, as the driver and the kernel's log have it: defects, clocks, link, modes, other users.
The texts are in `knowledge/check_machine.toml`."""

import pwd
import re
from collections.abc import Iterator
from pathlib import Path

from stoker.diagnosis.causes.gpu import PCIE_DEGRADED, find_xid
from stoker.findings.finding import Finding, Severity
from stoker.preflight.catalog import describe
from stoker.preflight.gpu_facts import DRIVER_TIMEOUT_S, GpuFacts
from stoker.profiling.telemetry.gpu import EXCLUSIVE, PROHIBITED, GpuState
from stoker.profiling.telemetry.machine import read_text_or_none
from stoker.report import format as fmt

MAX_USED_FRACTION = 0.05
"""Fraction of a GPU's memory that may be in use before a training starts (heuristic: a desktop takes 1 to 4 %)."""
MAX_XIDS = 5
"""Errors of the kernel's log that are named."""

SLOWDOWNS = {"throttled_heat": 0x08 | 0x20 | 0x40, "throttled_power": 0x80, "clocks_set": 0x02}
"""Finding → bits of NVML's clocks event reasons. The software power cap (0x04) is how large GPUs work."""


def gpu_findings(facts: GpuFacts) -> Iterator[Finding]:
    """Defects, modes and other users of each GPU."""
    if facts.driver is None:
        severity: Severity = "blocker" if facts.trial.timed_out else "warning"
        yield describe("driver_hangs", severity=severity, seconds=DRIVER_TIMEOUT_S)
    for gpu in facts.gpus:
        place = f"GPU {gpu.sample.index}"
        if gpu.lost:
            yield describe("gpu_lost", place, gpu=gpu.title, reason=gpu.lost)
            continue
        rules = (_memory_errors, _clocks, _pcie, _modes, _other_users)
        findings = [finding for rule in rules for finding in rule(gpu, facts, place)]
        yield from findings or [describe("gpu_state", place, gpu=gpu.title)]


def _memory_errors(gpu: GpuState, _: GpuFacts, place: str) -> Iterator[Finding]:
    if gpu.rows_failed:
        yield describe("ecc_errors/failed", place, gpu=gpu.title)
    elif gpu.sample.ecc_uncorrected:
        count = fmt.plural(gpu.sample.ecc_uncorrected, "uncorrected memory error")
        yield describe("ecc_errors/uncorrected", place, gpu=gpu.title, count=count)
    elif gpu.rows_pending:
        yield describe("ecc_errors/pending", place, gpu=gpu.title)


def _clocks(gpu: GpuState, _: GpuFacts, place: str) -> Iterator[Finding]:
    sample, reasons = gpu.sample, gpu.sample.throttle_reasons or 0
    clocks = (
        f"clocks event reasons {reasons:#x}, SM clock {fmt.count(sample.sm_clock_mhz)} of "
        f"{fmt.count(sample.sm_clock_max_mhz)} MHz, {fmt.count(sample.temperature_c)} °C"
    )
    for id, bits in SLOWDOWNS.items():
        if reasons & bits:
            yield describe(id, place, gpu=gpu.title, clocks=clocks)


def _pcie(gpu: GpuState, _: GpuFacts, place: str) -> Iterator[Finding]:
    sample = gpu.sample
    if not (sample.pcie_width and sample.pcie_width_max):
        return
    fraction = sample.pcie_width / sample.pcie_width_max
    is_busy = (sample.utilization or 0.0) >= PCIE_DEGRADED.threshold("busy")
    if is_busy and sample.pcie_generation and sample.pcie_generation_max:  # an idle GPU lowers it by itself
        fraction *= 2.0 ** (sample.pcie_generation - sample.pcie_generation_max)
    if 1 - fraction >= (PCIE_DEGRADED.info_threshold or 1.0):
        yield describe(
            "pcie_degraded",
            place,
            gpu=gpu.title,
            fraction=fmt.percentage(fraction),
            lanes=sample.pcie_width,
            max_lanes=sample.pcie_width_max,
            generation=fmt.count(sample.pcie_generation),
            max_generation=fmt.count(sample.pcie_generation_max),
            fix=PCIE_DEGRADED.fix,
        )


def _modes(gpu: GpuState, facts: GpuFacts, place: str) -> Iterator[Finding]:
    if gpu.compute_mode == PROHIBITED:
        yield describe("compute_mode", place, gpu=gpu.title)
    if gpu.sample.mig:
        yield describe("mig", place, gpu=gpu.title, memory=fmt.size(gpu.sample.memory_total_bytes))
    if gpu.sample.vgpu:
        yield describe("vgpu", place, gpu=gpu.title)
    if pid := _mps_server(gpu, facts):
        yield describe("mps", place, gpu=gpu.title, pid=pid)
    if gpu.persistence is False:
        yield describe("persistence", place, gpu=gpu.title)


def _mps_server(gpu: GpuState, facts: GpuFacts) -> int | None:
    names = ((process.pid, _command(process.pid, facts.root)) for process in gpu.processes or ())
    return next((pid for pid, name in names if name.startswith("nvidia-cuda-mps")), None)


def _other_users(gpu: GpuState, facts: GpuFacts, place: str) -> Iterator[Finding]:
    sample, mps = gpu.sample, _mps_server(gpu, facts)
    processes = [process for process in gpu.processes or () if process.pid != mps]
    used, total = sample.memory_used_bytes, sample.memory_total_bytes
    if not processes and (not used or not total or used / total <= MAX_USED_FRACTION):
        return
    free = "" if used is None or total is None else f": {fmt.size(total - used)} of {fmt.size(total)} are free"
    is_exclusive = gpu.compute_mode == EXCLUSIVE and bool(processes)
    texts = [_describe_process(process.pid, process.memory_bytes, facts.root) for process in processes]
    none_named = "no process is named: it is outside this container, or a defunct one"
    id = "gpu_in_use/exclusive" if is_exclusive else "gpu_in_use"
    yield describe(id, place, gpu=gpu.title, free=free, processes="; ".join(texts) or none_named)


def _describe_process(pid: int, memory_bytes: int | None, root: Path) -> str:
    memory = "" if not memory_bytes else f" holds {fmt.size(memory_bytes)}"
    status = read_text_or_none(f"{root}/proc/{pid}/status")
    uid = re.search(r"^Uid:\s+(\d+)", status or "", re.MULTILINE)
    if uid is None:
        return f"PID {pid}{memory}, not visible from here: another container's, or another user's"
    try:
        owner = pwd.getpwuid(int(uid[1])).pw_name
    except KeyError:
        owner = f"user {uid[1]}"
    return f"PID {pid} of {owner}{memory}: {_command(pid, root)}"


def _command(pid: int, root: Path) -> str:
    text = (read_text_or_none(f"{root}/proc/{pid}/cmdline") or "").replace("\0", " ").strip()
    return text[:120] or read_text_or_none(f"{root}/proc/{pid}/comm") or "unknown command"


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
