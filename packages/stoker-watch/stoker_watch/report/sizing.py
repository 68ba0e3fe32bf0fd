"""The machine of a run: what environment.json says of it, what the run used of it, and advice on its size.

environment.json has hardware, versions and variables of the newest attempt. It is read for information only: nothing
fails when it is missing or damaged. `resource_usage` says what a run used of its machine; `_applying_rules` finds in it
the evidence for advice, whose words are rows of `knowledge/findings.toml`. Advice is not a finding: no time is lost,
and nothing is changed automatically. Causes of lost time are in `stoker_watch/diagnosis/`; `stoker plan` has figures of
other devices and machines.
"""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stoker_watch import regular_files
from stoker_watch.diagnosis.run_data import Mean, RunRecords
from stoker_watch.findings.finding import Evidence, Finding
from stoker_watch.hardware.prices import list_gpus
from stoker_watch.knowledge import read_toml
from stoker_watch.report import format as fmt
from stoker_watch.runs.records import ENVIRONMENT

MAX_BYTES = 1 << 24
NOT_COMPARED = frozenset({"argv", "cwd"})
PER_RUN_VARIABLES = frozenset({"MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "SLURM_JOB_ID"})
"""Variables that differ in every run."""


def read_environment(run: Path) -> dict[str, Any]:
    """The content; empty if the file is missing or damaged."""
    try:
        environment = json.loads(regular_files.read_bytes(run / ENVIRONMENT, max_bytes=MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return environment if isinstance(environment, dict) else {}


def gpu_names(environment: Mapping[str, Any]) -> list[str]:
    """One name per GPU; "unnamed" where the driver gave none."""
    entries = (entry if isinstance(entry, dict) else {} for entry in list_gpus(environment))
    return [str(entry.get("name") or "unnamed") for entry in entries]


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
    """The rows that can be equal in two runs: without command line, ports, serial numbers, and the variables that
    stoker's own processes set for each other."""
    kept = {name: value for name, value in environment.items() if name not in NOT_COMPARED}
    own = read_toml("variables.toml")["internal"]
    for name, dropped in (("gpu", {"gpus"}), ("variables", PER_RUN_VARIABLES.union(own))):
        if isinstance(kept.get(name), dict):
            kept[name] = {key: value for key, value in kept[name].items() if key not in dropped}
    rows = {name: value for name, value in flatten(kept) if value != fmt.MISSING}
    names = gpu_names(environment)
    counts = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))  # 2 × Tesla T4
    return rows | ({"gpu": counts} if names else {})


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
MIN_SAMPLES = 30
"""Minimum number of lines of devices.jsonl during training for a mean. Heuristic: half a minute."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResourceUsage:
    """What a run used of its machine. None: not measured. Means are over the time from the first step to the last.
    phase_fractions: of all device time; fetch_fraction: fraction of `input_wait` spent reading bytes; sm_active: of the
    GPUs that train; gpu_memory_fraction: maximum; used_cores: CPU-seconds per second."""

    devices: int
    phase_fractions: Mapping[str, float]
    on_cpu: bool = False
    fetch_fraction: float | None = None
    sm_active: float | None = None
    gpu_memory_fraction: float | None = None
    mig: bool | None = None
    cores: float | None = None
    used_cores: float | None = None

    def fraction(self, *phases: str) -> float:
        return sum(self.phase_fractions.get(phase, 0.0) for phase in phases)


def resource_usage(run: RunRecords, environment: Mapping[str, Any]) -> ResourceUsage:
    totals, training, host_cores = run.totals, run.training, environment.get("cores")

    def mean(values: Mean) -> float | None:
        return values.value if values.count >= MIN_SAMPLES else None

    cores = mean(training.cpu_limit_cores)
    if cores is None and isinstance(host_cores, int | float):
        cores = float(host_cores)
    waited_s, stages = totals.phases.get("input_wait", 0.0), totals.input_wait_stages
    return ResourceUsage(
        devices=totals.devices,
        phase_fractions={name: seconds / totals.device_s for name, seconds in totals.phases.items() if totals.device_s},
        on_cpu=run.on_cpu,
        fetch_fraction=stages.get("fetch", 0.0) / waited_s if stages and waited_s > 0 else None,
        sm_active=mean(training.sm_active),
        gpu_memory_fraction=training.max_gpu_memory_fraction,
        mig=training.mig,
        cores=cores,
        used_cores=mean(training.process_cpu),
    )


def advise_sizing(usage: ResourceUsage) -> list[Finding]:
    found = dict(_applying_rules(usage))
    rows = read_toml("findings.toml") if found else {}
    return [
        Finding(id=id, severity="info", title=rows[id]["meaning"], fix=rows[id]["fix"], evidence=evidence)
        for id, evidence in found.items()
    ]


def _applying_rules(usage: ResourceUsage) -> Iterator[tuple[str, list[Evidence]]]:
    """(id of the advice, its evidence). What was not measured is NaN here, and no comparison with it holds."""
    measured = (usage.cores, usage.used_cores, usage.fetch_fraction, usage.sm_active, usage.gpu_memory_fraction)
    cores, used_cores, fetch, sm_active, gpu_memory = (math.nan if value is None else value for value in measured)
    compute, input_wait = usage.fraction("compute"), usage.fraction("input_wait")
    are_cores_busy, waits_for_bytes = used_cores >= CPU_SATURATED_FRACTION * cores, fetch >= MIN_FETCH_FRACTION
    has_half_the_memory = gpu_memory <= MAX_SHARED_MEMORY_FRACTION
    of_compute, of_wait, of_gpu = _phase(usage, "compute"), _phase(usage, "input_wait"), list(_gpu(usage))
    text = f"the run used {used_cores:.1f} of {cores:.3g} cores"
    of_cores = Evidence(text=text, value=usage.used_cores, source="devices.jsonl: process_cpu, cpu_limit_cores")
    if are_cores_busy and input_wait >= INPUT_BOUND_MODERATE and compute > 0 and not waits_for_bytes:
        enough = math.ceil(cores * (compute + input_wait) / compute)
        change = f" ({cores / usage.devices:.3g} → {enough / usage.devices:.3g} per rank)" if usage.devices > 1 else ""
        text = f"about {enough} cores{change} would decode as fast as the training needs it"
        yield "more_cores", [of_wait, of_cores, Evidence(text=text, value=enough)]
    if waits_for_bytes and input_wait >= INPUT_BOUND_MODERATE:
        text = f"{100 * fetch:.0f} % of this was reading bytes"
        source = "steps.jsonl: input_wait_stages.fetch"
        yield "local_disk", [of_wait, Evidence(text=text, value=fetch, source=source)]
    if are_cores_busy and input_wait >= INPUT_BOUND_HIGH and has_half_the_memory:
        yield "smaller_gpu", [of_compute, of_wait, of_cores, *of_gpu]
    is_idle_otherwise = input_wait >= INPUT_BOUND_HIGH or compute < SM_ACTIVE_LOW
    if sm_active < SM_ACTIVE_LOW and has_half_the_memory and not is_idle_otherwise:  # a MIG slice, or two jobs at once
        yield "shared_gpu", [of_compute, *of_gpu]
    if sm_active >= SM_ACTIVE_HIGH and compute >= MIN_COMPUTE_FRACTION:
        yield "larger_gpu", [of_compute, *of_gpu]
    if usage.devices >= 2 and usage.fraction("comm", "straggler") >= MIN_COMM_FRACTION:
        ranks = Evidence(text=f"{usage.devices} ranks", value=float(usage.devices), source="steps.jsonl: devices")
        advice = "fewer_ranks" if usage.on_cpu else "fewer_gpus"
        yield advice, [_phase(usage, "comm"), _phase(usage, "straggler"), ranks]


def _phase(usage: ResourceUsage, phase: str) -> Evidence:
    fraction = usage.fraction(phase)
    text = f"{phase} {fmt.percentage(fraction)} of the time"
    return Evidence(text=text, value=fraction, source=f"steps.jsonl: phases.{phase}")


def _gpu(usage: ResourceUsage) -> Iterator[Evidence]:
    """What was measured of its use."""
    if usage.sm_active is not None:
        text = f"{fmt.percentage(usage.sm_active)} of the SMs had work (SM activity)"
        yield Evidence(text=text, value=usage.sm_active, source="devices.jsonl: gpus.sm_active")
    if usage.gpu_memory_fraction is not None:
        text = f"at most {fmt.percentage(usage.gpu_memory_fraction)} of the GPU memory was in use"
        yield Evidence(text=text, value=usage.gpu_memory_fraction, source="devices.jsonl: gpus.memory_used_bytes")
