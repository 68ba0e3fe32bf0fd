"""The condition of each GPU, as the driver and the kernel's log have it: defects, clocks, link, modes, other users."""

import pwd
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from stoker.diagnosis.causes.gpu import PCIE_DEGRADED
from stoker.diagnosis.xids import find_xid
from stoker.preflight.findings import CheckFinding, make_finding, ok, unknown
from stoker.preflight.gpu_facts import DRIVER_TIMEOUT_S, GpuFacts
from stoker.profiling.telemetry.gpu import EXCLUSIVE, PROHIBITED, GpuState
from stoker.profiling.telemetry.machine import read_text_or_none
from stoker.report import format as fmt

MAX_USED_FRACTION = 0.05
"""Fraction of a GPU's memory that may be in use before a training starts (heuristic: a desktop takes 1 to 4 %)."""
MAX_XIDS = 5
"""Errors of the kernel's log that are named."""

SLOWDOWNS = (
    (0x08 | 0x20 | 0x40, "throttled_heat", "heat slows it down",
     "check the cooling: `nvidia-smi -q -d TEMPERATURE`; in a cloud use another machine, and report this one"),
    (0x80, "throttled_power", "a power brake slows it down",
     "check the power supply: `nvidia-smi -q -d POWER`; in a cloud use another machine, and report this one"),
    (0x02, "clocks_set", "its clocks were set by someone", "`nvidia-smi -rgc` and `nvidia-smi -rac` reset them"),
)  # fmt: skip
"""Bits of NVML's clocks event reasons, id, title, fix. The software power cap (0x04) is how large GPUs work."""


def gpu_findings(facts: GpuFacts) -> Iterator[CheckFinding]:
    """Defects, modes and other users of each GPU."""
    if facts.driver is None:
        yield make_finding(
            id="driver_hangs",
            severity="blocker" if facts.trial.timed_out else "warning",
            title="the driver does not answer",
            evidence=f"NVML gave no answer within {DRIVER_TIMEOUT_S:.0f} s",
            fix="restart the machine or reset the GPU; `nvidia-smi` would hang too",
        )
        return
    for gpu in facts.gpus:
        place = f"GPU {gpu.sample.index}"
        if gpu.lost:
            yield make_finding(
                id="gpu_lost",
                severity="blocker",
                title=f"{gpu.title} does not answer",
                evidence=f"the driver: {gpu.lost}",
                fix="restart the machine; if it comes again, use another machine, and report this one",
                place=place,
            )
            continue
        findings = [finding for rule in GPU_RULES for finding in rule(gpu, facts, place)]
        yield from findings
        if not findings:
            evidence = "memory errors, clocks, PCIe link, modes, persistence and other processes"
            yield ok("gpu_state", f"{gpu.title} is in order", evidence, place)


def _memory_errors(gpu: GpuState, _: GpuFacts, place: str) -> Iterator[CheckFinding]:
    if gpu.rows_failed:
        yield make_finding(
            id="ecc_errors", severity="warning", title=f"{gpu.title} has defective memory that cannot be replaced",
            evidence="the driver failed to remap rows", fix="use another machine, and report this one", place=place,
        )  # fmt: skip
    elif gpu.sample.ecc_uncorrected:
        yield make_finding(
            id="ecc_errors", severity="warning",
            title=f"{gpu.title} had {fmt.plural(gpu.sample.ecc_uncorrected, 'uncorrected memory error')}",
            evidence="NVML, since the driver was loaded",
            fix="reset the GPU (`nvidia-smi --gpu-reset`) or restart the machine; if it comes again, use another one",
            place=place,
        )  # fmt: skip
    elif gpu.rows_pending:
        yield make_finding(
            id="ecc_errors", severity="warning", title=f"{gpu.title} waits for a reset to replace defective memory",
            evidence="the driver has a row remapping pending", fix="restart the machine before training", place=place,
        )  # fmt: skip


def _clocks(gpu: GpuState, _: GpuFacts, place: str) -> Iterator[CheckFinding]:
    reasons = gpu.sample.throttle_reasons or 0
    clocks = f"clocks event reasons {reasons:#x}, SM clock {fmt.count(gpu.sample.sm_clock_mhz)} of "
    clocks += f"{fmt.count(gpu.sample.sm_clock_max_mhz)} MHz, {fmt.count(gpu.sample.temperature_c)} °C"
    for bits, id, text, fix in SLOWDOWNS:
        if reasons & bits:
            yield make_finding(
                id=id, severity="warning", title=f"{gpu.title}: {text}", evidence=clocks, fix=fix, place=place
            )  # fmt: skip


def _pcie(gpu: GpuState, _: GpuFacts, place: str) -> Iterator[CheckFinding]:
    sample = gpu.sample
    if not (sample.pcie_width and sample.pcie_width_max):
        return
    fraction = sample.pcie_width / sample.pcie_width_max
    is_busy = (sample.utilization or 0.0) >= PCIE_DEGRADED.threshold("busy")
    if is_busy and sample.pcie_generation and sample.pcie_generation_max:  # an idle GPU lowers it by itself
        fraction *= 2.0 ** (sample.pcie_generation - sample.pcie_generation_max)
    if 1 - fraction >= (PCIE_DEGRADED.info_threshold or 1.0):
        yield make_finding(
            id="pcie_degraded",
            severity="warning",
            title=f"{gpu.title}: its PCIe link has {fmt.percentage(fraction)} of its speed",
            evidence=f"{sample.pcie_width} of {sample.pcie_width_max} lanes, generation "
            f"{fmt.count(sample.pcie_generation)} of {fmt.count(sample.pcie_generation_max)}",
            fix=PCIE_DEGRADED.fix,
            place=place,
        )


def _modes(gpu: GpuState, facts: GpuFacts, place: str) -> Iterator[CheckFinding]:
    def warning(id: str, title: str, evidence: str, fix: str) -> CheckFinding:
        return make_finding(
            id=id, severity="warning", title=f"{gpu.title} {title}", evidence=evidence, fix=fix, place=place
        )  # fmt: skip

    if gpu.compute_mode == PROHIBITED:
        yield msgspec.structs.replace(
            warning("compute_mode", "forbids computing", "compute mode: prohibited", "sudo nvidia-smi -c 0"),
            severity="blocker",
        )
    if gpu.sample.mig:
        yield warning(
            "mig", "is divided (MIG): a training uses one slice",
            f"MIG mode is on; the slice has {fmt.size(gpu.sample.memory_total_bytes)}",
            "if the whole GPU is meant: `sudo nvidia-smi -mig 0`",
        )  # fmt: skip
    if gpu.sample.vgpu:
        yield warning(
            "vgpu", "is a part of a GPU (vGPU): others may slow it down", "virtualization mode: vGPU",
            "for predictable speed take a machine with a whole GPU (passthrough)",
        )  # fmt: skip
    if pid := _mps_server(gpu, facts):
        yield warning(
            "mps", "is shared by MPS", f"nvidia-cuda-mps-server, PID {pid}",
            "if no other job shares the GPU: `echo quit | nvidia-cuda-mps-control`",
        )  # fmt: skip
    if gpu.persistence is False:
        yield warning(
            "persistence", "is not in persistence mode: each first use waits for the driver", "persistence mode: off",
            "sudo nvidia-smi -pm 1",
        )  # fmt: skip


def _mps_server(gpu: GpuState, facts: GpuFacts) -> int | None:
    names = ((process.pid, _command(process.pid, facts.root)) for process in gpu.processes or ())
    return next((pid for pid, name in names if name.startswith("nvidia-cuda-mps")), None)


def _other_users(gpu: GpuState, facts: GpuFacts, place: str) -> Iterator[CheckFinding]:
    sample, mps = gpu.sample, _mps_server(gpu, facts)
    processes = [process for process in gpu.processes or () if process.pid != mps]
    used, total = sample.memory_used_bytes, sample.memory_total_bytes
    if not processes and (not used or not total or used / total <= MAX_USED_FRACTION):
        return
    free = "" if used is None or total is None else f": {fmt.size(total - used)} of {fmt.size(total)} are free"
    exclusive = gpu.compute_mode == EXCLUSIVE and bool(processes)
    texts = [_describe_process(process.pid, process.memory_bytes, facts.root) for process in processes]
    none_named = "no process is named: it is outside this container, or a defunct one"
    yield make_finding(
        id="gpu_in_use",
        severity="blocker" if exclusive else "warning",
        title=f"{gpu.title} is in use{', and admits one process only' if exclusive else ''}{free}",
        evidence="; ".join(texts) or none_named,
        fix="end them if they are yours (`kill PID`), or take another GPU (CUDA_VISIBLE_DEVICES)",
        place=place,
    )  # fmt: skip


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


GPU_RULES = (_memory_errors, _clocks, _pcie, _modes, _other_users)


def xid_findings(facts: GpuFacts) -> Iterator[CheckFinding]:
    if not facts.gpus:
        return
    if facts.kernel_lines is None:
        yield unknown(
            "xid", "GPU errors since the machine started are not known", "/dev/kmsg may not be read here",
            "`sudo dmesg | grep -i xid` on the host",
        )  # fmt: skip
        return
    numbers: dict[int, str] = {}
    for line in facts.kernel_lines:
        if line.kind == "xid" and (match := re.search(r"Xid \([^)]*\): (\d+)", line.text)):
            numbers[int(match[1])] = line.text
    machine = {number: text for number, text in numbers.items() if find_xid(number).origin != "program"}
    for number, text in list(machine.items())[:MAX_XIDS]:
        known = find_xid(number)
        title = f"the kernel's log has an error of the GPU, Xid {number}: {known.meaning}"
        yield make_finding(id="xid", severity="warning", title=title, evidence=text, fix=known.fix)
    if not machine:
        yield ok("xid", "no errors of the GPU in the kernel's log", "/dev/kmsg, Xids of the machine")
