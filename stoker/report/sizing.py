"""The machine of a run: what environment.json says of it, what the run used of it, and advice on its size.

environment.json has hardware, versions and variables of the newest attempt. It is read for information only: nothing
fails when it is missing or damaged. `resource_usage` says what a run used of its machine; each rule is a pure function
of it that returns advice or None. Advice is not a finding: no time is lost, and nothing is changed automatically.
Causes of lost time are in `stoker/diagnosis/`.
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from stoker.diagnosis.run_data import Mean, RunRecords
from stoker.findings.finding import Evidence, Finding
from stoker.report import format as fmt
from stoker.runs.records import ENVIRONMENT

NOT_COMPARED = frozenset({"argv", "cwd"})
PER_RUN_VARIABLES = frozenset({"MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "SLURM_JOB_ID"})
"""Variables that differ in every run."""


def read_environment(run: Path) -> dict[str, Any]:
    """The content; empty if the file is missing or damaged."""
    try:
        environment = json.loads((run / ENVIRONMENT).read_bytes())
    except (OSError, ValueError):
        return {}
    return environment if isinstance(environment, dict) else {}


def gpu_names(environment: Mapping[str, Any]) -> list[str]:
    """One name per GPU; "unnamed" where the driver gave none."""
    gpu = environment.get("gpu")
    gpus = gpu.get("gpus") if isinstance(gpu, dict) else None
    if not isinstance(gpus, list):
        return []
    return [str(entry.get("name") or "unnamed") if isinstance(entry, dict) else "unnamed" for entry in gpus]


def count_names(names: list[str]) -> str:
    """2 × Tesla T4."""
    return ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))


def flatten(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Nested values as rows: `packages.torch`, `2.15.0`."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flatten(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for n, inner in enumerate(value):
            yield from flatten(inner, f"{name}[{n}]")
    elif isinstance(value, list):
        yield name, " ".join(map(str, value)) or "none"
    elif name.endswith("_bytes") and isinstance(value, int):
        yield name, fmt.size(value)
    else:
        yield name, fmt.MISSING if value is None or value == {} else str(value)


def comparable(environment: Mapping[str, Any]) -> dict[str, str]:
    """The rows that can be equal in two runs: without command line, ports and serial numbers."""
    kept = {name: value for name, value in environment.items() if name not in NOT_COMPARED}
    for name, dropped in (("gpu", frozenset({"gpus"})), ("variables", PER_RUN_VARIABLES)):
        if isinstance(kept.get(name), dict):
            kept[name] = {key: value for key, value in kept[name].items() if key not in dropped}
    rows = {name: value for name, value in flatten(kept) if value != fmt.MISSING}
    names = gpu_names(environment)
    return rows | ({"gpu": count_names(names)} if names else {})


SM_ACTIVE_LOW, SM_ACTIVE_HIGH = 0.5, 0.8
"""Mean SM activity. NVIDIA DCGM manual, profiling metrics: 0.8 or more is necessary for effective use of a GPU, less
than 0.5 likely indicates ineffective use."""
INPUT_BOUND_MODERATE, INPUT_BOUND_HIGH = 0.05, 0.20
"""Fraction of `input_wait`. TensorFlow Profiler, op_stats_to_input_pipeline_analysis.cc: moderately, highly
input-bound."""
CPU_SATURATED_FRACTION = 0.85
"""CPU utilization above which more workers do not help. Heuristic: decoding workers reach 0.9."""
MAX_SHARED_MEMORY_FRACTION = 0.45
"""Maximum used fraction of GPU memory with which two such jobs fit, 10 % left over. Heuristic."""
MIN_FETCH_FRACTION = 0.5
"""Fraction of `input_wait` spent reading bytes above which the storage is the bottleneck. Heuristic."""
MIN_COMM_FRACTION = 0.25
"""Fraction of `comm` and `straggler` above which more devices bring little. Heuristic."""
MIN_COMPUTE_FRACTION = 0.85
"""Fraction of `compute` above which only a faster device makes a run faster. Heuristic."""
SPOT_PREEMPTION_INTERVAL_S = 4 * 3600.0
"""Assumed time between two preemptions of a spot machine. Conservative heuristic: GCP names a usual rate of 5 to 15 %
of preemptible machines per day."""
MAX_SPOT_LOSS_FRACTION = 0.05
"""Maximum fraction of time that preemptions may cost. Heuristic: spot machines cost 60 to 91 % less (GCP's range)."""
MIN_SPOT_RUN_S = 3600.0
"""Minimum length of a run for advice on spot machines. Heuristic."""
MIG_SLICES = (("1g", 1 / 7, 1 / 8), ("2g", 2 / 7, 2 / 8), ("3g", 3 / 7, 4 / 8), ("4g", 4 / 7, 4 / 8))
"""Slice, its fraction of the SMs, of the memory (NVIDIA MIG user guide, profiles of A100 and H100)."""
_HAS_MIG = re.compile(r"\b(A100|H100|H200|B200|GH200)\b")
MIN_SAMPLES = 30
"""Minimum number of lines of devices.jsonl during training for a mean. Heuristic: half a minute."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResourceUsage:
    """What a run used of its machine. None: not measured. Means are over the time from the first step to the last.

    phase_fractions: of all device time; fetch_fraction: fraction of `input_wait` spent reading bytes; sm_active: of the
    GPUs that train; gpu_memory_fraction: maximum; used_cores: CPU-seconds per second; checkpoint_interval_s: mean;
    startup_s: time of an attempt until its first step.
    """

    devices: int
    phase_fractions: Mapping[str, float]
    wall_s: float = 0.0
    fetch_fraction: float | None = None
    from_bucket: bool = False
    cached: bool = False
    gpu_name: str = ""
    sm_active: float | None = None
    gpu_memory_fraction: float | None = None
    mig: bool | None = None
    cores: float | None = None
    used_cores: float | None = None
    attempts: int = 1
    checkpoint_interval_s: float | None = None
    startup_s: float | None = None

    def fraction(self, *phases: str) -> float:
        return sum(self.phase_fractions.get(phase, 0.0) for phase in phases)


def _value(mean: Mean) -> float | None:
    return mean.value if mean.count >= MIN_SAMPLES else None


def resource_usage(run: RunRecords, environment: Mapping[str, Any]) -> ResourceUsage:
    """What a run used of its machine."""
    totals, training = run.totals, run.training
    host_cores = environment.get("cores")
    recorded_cores = float(host_cores) if isinstance(host_cores, int | float) else None
    waited_s, stages = totals.phases.get("input_wait", 0.0), totals.input_wait_stages
    startup_s = totals.phases.get("startup", 0.0) + totals.phases.get("compile", 0.0)
    num_attempts = max(1, totals.attempts)
    total_s = totals.device_s
    return ResourceUsage(
        devices=totals.devices,
        phase_fractions={name: duration_s / total_s for name, duration_s in totals.phases.items() if total_s > 0},
        wall_s=totals.wall_s,
        fetch_fraction=stages.get("fetch", 0.0) / waited_s if stages and waited_s > 0 else None,
        from_bucket=run.from_bucket,
        cached=run.settings.get("cache", "none") != "none",
        gpu_name=next(iter(gpu_names(environment)), ""),
        sm_active=_value(training.sm_active),
        gpu_memory_fraction=training.max_gpu_memory_fraction,
        mig=training.mig,
        cores=recorded_cores if _value(training.cpu_limit_cores) is None else _value(training.cpu_limit_cores),
        used_cores=_value(training.process_cpu),
        attempts=totals.attempts,
        checkpoint_interval_s=totals.wall_s / run.num_checkpoints if run.num_checkpoints else None,
        startup_s=startup_s / max(1, totals.devices) / num_attempts if startup_s > 0 else None,
    )


def advise_sizing(usage: ResourceUsage) -> list[Finding]:
    """The advice of all rules, in their order."""
    return [advice for rule in RULES if (advice := rule(usage)) is not None]


def _are_cores_busy(usage: ResourceUsage) -> bool:
    known = usage.cores is not None and usage.used_cores is not None
    return known and (usage.used_cores or 0.0) >= CPU_SATURATED_FRACTION * (usage.cores or 0.0)


def more_cores(usage: ResourceUsage) -> Finding | None:
    """All cores are busy while the device waits for decoding, not for bytes."""
    input_wait, compute = usage.fraction("input_wait"), usage.fraction("compute")
    if not _are_cores_busy(usage) or usage.cores is None or input_wait < INPUT_BOUND_MODERATE or compute <= 0:
        return None
    if usage.fetch_fraction is not None and usage.fetch_fraction >= MIN_FETCH_FRACTION:
        return None
    cores = math.ceil(usage.cores * (compute + input_wait) / compute)
    per_device = f"{usage.cores / usage.devices:.3g} → {cores / usage.devices:.3g} per device"
    return _advice(
        "more_cores",
        "More CPU cores per device",
        f"About {cores} cores ({per_device}) would decode images as fast as the device needs them. "
        "Alternatives: cache decoded images (--cache), or --jpeg-decoder nvjpeg",
        _phase(usage, "input_wait"),
        _cores(usage),
    )


def local_disk(usage: ResourceUsage) -> Finding | None:
    """Reading bytes is too slow."""
    if usage.fetch_fraction is None or usage.fetch_fraction < MIN_FETCH_FRACTION:
        return None
    if usage.fraction("input_wait") < INPUT_BOUND_MODERATE:
        return None
    storage_name = "the bucket" if usage.from_bucket else "the disk"
    text = f"{100 * usage.fetch_fraction:.0f} % of this was reading bytes from {storage_name}"
    cache_hint = "" if usage.cached else ", with a cache of decoded images (--cache disk)"
    region_hint = "; at least a bucket in the region of the machine" if usage.from_bucket else ""
    return _advice(
        "local_disk",
        "A local SSD",
        f"A machine with a local NVMe SSD instead of {storage_name}{cache_hint}{region_hint}",
        _phase(usage, "input_wait"),
        Evidence(text=text, value=usage.fetch_fraction, source="steps.jsonl: input_wait_stages.fetch"),
    )


def smaller_gpu(usage: ResourceUsage) -> Finding | None:
    """The device waits although all cores are busy, and most of its memory is free."""
    if not _are_cores_busy(usage) or usage.fraction("input_wait") < INPUT_BOUND_HIGH:
        return None
    if usage.gpu_memory_fraction is None or usage.gpu_memory_fraction > MAX_SHARED_MEMORY_FRACTION:
        return None
    return _advice(
        "smaller_gpu",
        "A smaller GPU is sufficient",
        "These cores cannot feed this GPU. One with half of its memory and speed is about as fast and costs less",
        _phase(usage, "compute"),
        _phase(usage, "input_wait"),
        _cores(usage),
        _gpu_memory(usage),
    )


def shared_gpu(usage: ResourceUsage) -> Finding | None:
    """The model is too small for the GPU: use a MIG slice, or run two jobs at once."""
    sm_active, memory = usage.sm_active, usage.gpu_memory_fraction
    if sm_active is None or sm_active >= SM_ACTIVE_LOW or memory is None or memory > MAX_SHARED_MEMORY_FRACTION:
        return None
    if usage.fraction("input_wait") >= INPUT_BOUND_HIGH or usage.fraction("compute") < SM_ACTIVE_LOW:
        return None  # it is idle for another reason
    fits = (name for name, sms, size in MIG_SLICES if sm_active <= SM_ACTIVE_HIGH * sms and memory <= 0.9 * size)
    mig_slice = next(fits, None) if _HAS_MIG.search(usage.gpu_name) and not usage.mig else None
    mig_text = f"a MIG slice {mig_slice} of such a GPU, or " if mig_slice else ""
    return _advice(
        "shared_gpu",
        "The model is too small for the GPU",
        "First try a larger --batch-size or --image-size; otherwise "
        f"{mig_text}two such jobs on it at once, or a smaller GPU",
        _phase(usage, "compute"),
        _sm_activity(usage),
        _gpu_memory(usage),
    )


def larger_gpu(usage: ResourceUsage) -> Finding | None:
    """The device is busy all of the time."""
    if usage.sm_active is None or usage.sm_active < SM_ACTIVE_HIGH or usage.fraction("compute") < MIN_COMPUTE_FRACTION:
        return None
    return _advice(
        "larger_gpu",
        "Only a faster GPU, or more GPUs, make this faster",
        "The GPU is used well, nothing else limits the speed. If time matters more than cost, use a larger GPU",
        _phase(usage, "compute"),
        _sm_activity(usage),
        *([_gpu_memory(usage)] if usage.gpu_memory_fraction is not None else []),
    )


def fewer_gpus(usage: ResourceUsage) -> Finding | None:
    """Devices wait for each other."""
    if usage.devices < 2 or usage.fraction("comm", "straggler") < MIN_COMM_FRACTION:
        return None
    return _advice(
        "fewer_gpus",
        "Fewer devices",
        f"{fmt.plural(usage.devices // 2, 'device')} use a larger fraction of their time; otherwise a larger "
        "--batch-size per all-reduce, or devices on one machine with NVLink",
        _phase(usage, "comm"),
        _phase(usage, "straggler"),
        Evidence(text=f"{usage.devices} devices", value=float(usage.devices), source="steps.jsonl: devices"),
    )


def spot(usage: ResourceUsage) -> Finding | None:
    """A preemption would cost little, and there was none yet."""
    interval_s, startup_s = usage.checkpoint_interval_s, usage.startup_s
    if usage.attempts != 1 or interval_s is None or startup_s is None or usage.wall_s < MIN_SPOT_RUN_S:
        return None
    lost_s = interval_s / 2 + startup_s
    fraction = lost_s / SPOT_PREEMPTION_INTERVAL_S
    if fraction > MAX_SPOT_LOSS_FRACTION:
        return None
    saves = f"a checkpoint every {fmt.duration(interval_s)}, startup in {fmt.duration(startup_s)}"
    text = f"a preemption would cost {fmt.duration(lost_s)}; one in four hours {fmt.percentage(fraction)} of the time"
    return _advice(
        "spot",
        "A spot machine",
        "Restarts are cheap here, and spot machines cost 60 to 91 % less (GCP's range): use one, and start the "
        "same command again after a preemption",
        Evidence(text=saves, value=interval_s, source="events.jsonl: checkpoint_saved"),
        Evidence(text=text, value=fraction),
    )


RULES: tuple[Callable[[ResourceUsage], Finding | None], ...] = (
    more_cores, local_disk, smaller_gpu, shared_gpu, larger_gpu, fewer_gpus, spot,
)  # fmt: skip


def _advice(id: str, title: str, fix: str, *evidence: Evidence) -> Finding:
    return Finding(id=id, severity="info", title=title, evidence=list(evidence), fix=fix)


def _phase(usage: ResourceUsage, phase: str) -> Evidence:
    fraction = usage.fraction(phase)
    text = f"{phase} {fmt.percentage(fraction)} of the time"
    return Evidence(text=text, value=fraction, source=f"steps.jsonl: phases.{phase}")


def _cores(usage: ResourceUsage) -> Evidence:
    text = f"the run used {usage.used_cores or 0.0:.1f} of {usage.cores or 0.0:.3g} cores"
    return Evidence(text=text, value=usage.used_cores, source="devices.jsonl: process_cpu, cpu_limit_cores")


def _gpu_memory(usage: ResourceUsage) -> Evidence:
    text = f"at most {fmt.percentage(usage.gpu_memory_fraction)} of the GPU memory was in use"
    return Evidence(text=text, value=usage.gpu_memory_fraction, source="devices.jsonl: gpus.memory_used_bytes")


def _sm_activity(usage: ResourceUsage) -> Evidence:
    text = f"{fmt.percentage(usage.sm_active)} of the SMs had work (SM activity)"
    return Evidence(text=text, value=usage.sm_active, source="devices.jsonl: gpus.sm_active")
