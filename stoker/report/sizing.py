"""Whether a run had the right machine: advice on its size, from what its records prove. `explain.py` asks, people
decide.

`load_of` reads what a run used of its machine; each rule is a pure function of that which says something or nothing.
Advice is no finding: no time is lost by it, and none of it is done by itself. Causes of lost time are `diagnose/`.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from stoker.report import format as fmt
from stoker.runs.records import DEVICES, EVENTS, STEPS, read_lines
from stoker.runs.schemas import DeviceSample, Event, Evidence, StepWindow
from stoker.runs.totals import Totals

SM_LOW, SM_HIGH = 0.5, 0.8
"""Mean share of the multiprocessors at work. NVIDIA DCGM manual, profiling metrics, SM activity: 0.8 or more is needed
to use a GPU well, below 0.5 it is likely used badly."""
INPUT_FROM, INPUT_MUCH = 0.05, 0.20
"""Share of `input_wait`. TensorFlow Profiler, op_stats_to_input_pipeline_analysis.cc: moderately, highly
input-bound."""
CORES_FULL = 0.85
"""Share of its cores that a run uses from which more threads do not help. Our judgment: decoding threads reach 0.9."""
HALF_MEMORY = 0.45
"""Most share of a GPU's memory with which two such jobs fit on it, a tenth left over. Our judgment."""
FETCH_FROM = 0.5
"""Share of `input_wait` that is waiting for bytes, from which the storage is what to change. Our judgment."""
COMM_FROM = 0.25
"""Share of `comm` and `straggler` from which more devices buy little. Our judgment."""
COMPUTE_HIGH = 0.85
"""Share of `compute` from which only a faster device makes a run faster. Our judgment."""
SPOT_STOP_EVERY_S = 4 * 3600.0
"""Seconds between two reclaims that the advice on spot machines reckons with. Our judgment, on the safe side: GCP names
5 to 15 % of preemptible machines a day as the usual rate."""
SPOT_LOSS_MOST = 0.05
"""Share of the time that such reclaims may cost. Our judgment: they cost 60 to 91 % less (GCP's range)."""
SPOT_LEAST_S = 3600.0
"""Length of a run below which nothing is said about spot machines. Our judgment."""
MIG_SLICES = (("1g", 1 / 7, 1 / 8), ("2g", 2 / 7, 2 / 8), ("3g", 3 / 7, 4 / 8), ("4g", 4 / 7, 4 / 8))
"""Slice, its share of the multiprocessors, of the memory (NVIDIA MIG user guide, profiles of A100 and H100)."""
_HAS_MIG = re.compile(r"\b(A100|H100|H200|B200|GH200)\b")
SAMPLES_LEAST = 30
"""Lines of devices.jsonl, in steps, without which nothing is said about loads. Our judgment: half a minute."""


class Sizing(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of advice."""

    kind: str
    title: str
    evidence: list[Evidence]
    fix: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """What a run used of its machine. None: nobody knows. Means are over the time from the first step to the last.

    shares: phase → share of all device time; fetch: share of `input_wait` that is waiting for bytes; sm_active,
    utilisation: of the GPUs that train; memory: most of a GPU's memory in use; used_cores: processors' worth of time
    that the run used; save_every_s: mean time between checkpoints; start_s: of an attempt until its first step."""

    devices: int
    shares: Mapping[str, float]
    wall_s: float = 0.0
    fetch: float | None = None
    from_bucket: bool = False
    cached: bool = False
    gpu_name: str = ""
    sm_active: float | None = None
    utilisation: float | None = None
    memory: float | None = None
    mig: bool | None = None
    cores: float | None = None
    used_cores: float | None = None
    attempts: int = 1
    save_every_s: float | None = None
    start_s: float | None = None

    def share(self, *phases: str) -> float:
        return sum(self.shares.get(phase, 0.0) for phase in phases)


class _Mean:
    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, value: float | None) -> None:
        if value is not None:
            self.total, self.count = self.total + value, self.count + 1

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count >= SAMPLES_LEAST else None


def load_of(
    run: Path, totals: Totals, environment: Mapping[str, Any], *, from_bucket: bool = False, cached: bool = False
) -> Load:
    """Reads steps.jsonl, devices.jsonl and events.jsonl of a run, each once."""
    first_t, last_t = math.inf, -math.inf
    for window in read_lines(run, STEPS, StepWindow):
        if window.steps:
            first_t, last_t = min(first_t, window.t - window.wall_s), max(last_t, window.t)
    sm, busy, used, cores = _Mean(), _Mean(), _Mean(), _Mean()
    memory: float | None = None
    mig: bool | None = None
    for sample in read_lines(run, DEVICES, DeviceSample):
        for gpu in sample.gpus:
            if gpu.memory_used_bytes is not None and gpu.memory_total_bytes:
                memory = max(memory or 0.0, gpu.memory_used_bytes / gpu.memory_total_bytes)
            mig = mig or gpu.mig
        if not first_t <= sample.t <= last_t:
            continue
        if len(sample.gpus) == totals.devices:  # else some of them do not train
            for gpu in sample.gpus:
                sm.add(gpu.sm_active)
                busy.add(gpu.utilisation)
        used.add(sample.process_cpu)
        cores.add(sample.cores)
    known = environment.get("cores")
    waited_s = totals.phases.get("input_wait", 0.0)
    startup_s = totals.phases.get("startup", 0.0) + totals.phases.get("compile", 0.0)
    began = max(1, totals.attempts)
    whole_s = totals.device_s
    return Load(
        devices=totals.devices,
        shares={name: took_s / whole_s for name, took_s in totals.phases.items()} if whole_s > 0 else {},
        wall_s=totals.wall_s,
        fetch=totals.input.get("fetch", 0.0) / waited_s if totals.input and waited_s > 0 else None,
        from_bucket=from_bucket,
        cached=cached,
        gpu_name=_gpu_name(environment),
        sm_active=sm.value,
        utilisation=busy.value,
        memory=memory,
        mig=mig,
        cores=cores.value if cores.value is not None else float(known) if isinstance(known, int | float) else None,
        used_cores=used.value,
        attempts=totals.attempts,
        save_every_s=_save_every_s(run, totals),
        start_s=startup_s / max(1, totals.devices) / began if startup_s > 0 else None,
    )


def _gpu_name(environment: Mapping[str, Any]) -> str:
    gpu = environment.get("gpu")
    gpus = gpu.get("gpus") if isinstance(gpu, dict) else None
    return str(gpus[0].get("name") or "") if isinstance(gpus, list) and gpus and isinstance(gpus[0], dict) else ""


def _save_every_s(run: Path, totals: Totals) -> float | None:
    saves = sum(event.kind == "checkpoint" for event in read_lines(run, EVENTS, Event))
    return totals.wall_s / saves if saves else None


def advise(load: Load) -> list[Sizing]:
    """Everything that the rules say of a load, in their order."""
    return [said for rule in RULES if (said := rule(load)) is not None]


def more_cores(load: Load) -> Sizing | None:
    """Cores that are all in use while the device waits for pictures, and not for bytes."""
    waits, computes = load.share("input_wait"), load.share("compute")
    if load.cores is None or load.used_cores is None or waits < INPUT_FROM or computes <= 0:
        return None
    if load.used_cores < CORES_FULL * load.cores or (load.fetch is not None and load.fetch >= FETCH_FROM):
        return None
    wanted = math.ceil(load.cores * (computes + waits) / computes)
    each = f"{load.cores / load.devices:.3g} → {wanted / load.devices:.3g} for each device"
    return Sizing(
        kind="more_cores",
        title="More processor cores for each device",
        evidence=[_phase(load, "input_wait"), _cores(load)],
        fix=f"About {wanted} cores ({each}) would prepare pictures as fast as the device takes them; or fewer decoded "
        "anew (--cache), or --decoder nvjpeg",
    )


def smaller_gpu(load: Load) -> Sizing | None:
    """A device that waits although the cores give all they have, and whose memory is mostly free."""
    if load.cores is None or load.used_cores is None or load.memory is None or load.share("input_wait") < INPUT_MUCH:
        return None
    if load.used_cores < CORES_FULL * load.cores or load.memory > HALF_MEMORY:
        return None
    return Sizing(
        kind="smaller_gpu",
        title="A smaller GPU would do",
        evidence=[_phase(load, "compute"), _phase(load, "input_wait"), _cores(load), _memory(load)],
        fix="These cores cannot feed this GPU: one with half of its memory and speed trains about as fast here and "
        "costs less",
    )


def shared_gpu(load: Load) -> Sizing | None:
    """A model that is too small for the GPU: a slice of it, or two jobs at once."""
    if load.sm_active is None or load.memory is None or load.sm_active >= SM_LOW or load.memory > HALF_MEMORY:
        return None
    if load.share("input_wait") >= INPUT_MUCH or load.share("compute") < SM_LOW:  # then it idles for another reason
        return None
    fits = next(
        (name for name, sms, memory in MIG_SLICES if load.sm_active <= SM_HIGH * sms and load.memory <= 0.9 * memory),
        None,
    )
    can = fits is not None and _HAS_MIG.search(load.gpu_name) is not None and not load.mig
    slice_ = f"a MIG slice {fits} of such a GPU, or " if can else ""
    return Sizing(
        kind="shared_gpu",
        title="The model is too small for the GPU",
        evidence=[_phase(load, "compute"), _sm(load), _memory(load)],
        fix=f"First a larger --batch or --canvas; else {slice_}two such jobs on it at once, or a smaller GPU",
    )


def larger_gpu(load: Load) -> Sizing | None:
    """A device that works all of the time."""
    if load.sm_active is None or load.sm_active < SM_HIGH or load.share("compute") < COMPUTE_HIGH:
        return None
    return Sizing(
        kind="larger_gpu",
        title="Only a faster GPU, or more of them, makes this faster",
        evidence=[_phase(load, "compute"), _sm(load), *([_memory(load)] if load.memory is not None else [])],
        fix="The GPU is used well: nothing around it is worth changing. Where the time matters more than the money, "
        "take the next larger one",
    )


def local_disk(load: Load) -> Sizing | None:
    """Bytes that come too slowly."""
    waits = load.share("input_wait")
    if load.fetch is None or waits < INPUT_FROM or load.fetch < FETCH_FROM:
        return None
    where = "the bucket" if load.from_bucket else "the disk"
    text = f"of this {100 * load.fetch:.0f} % was waiting for bytes of {where}"
    keep = "" if load.cached else ", and pictures kept there (--cache disk)"
    return Sizing(
        kind="local_disk",
        title="A local SSD",
        evidence=[
            _phase(load, "input_wait"), Evidence(text=text, value=load.fetch, place="steps.jsonl: input.fetch"),
        ],
        fix=f"A machine with a local NVMe SSD instead of {where}{keep}"
        + ("; a bucket in the machine's own region, at least" if load.from_bucket else ""),
    )  # fmt: skip


def fewer_gpus(load: Load) -> Sizing | None:
    """Devices that wait for each other."""
    share = load.share("comm", "straggler")
    if load.devices < 2 or share < COMM_FROM:
        return None
    half = load.devices // 2
    return Sizing(
        kind="fewer_gpus",
        title="Fewer devices",
        evidence=[
            _phase(load, "comm"), _phase(load, "straggler"), Evidence(text=f"{load.devices} devices",
            value=float(load.devices), place="steps.jsonl: devices"),
        ],
        fix=f"{fmt.plural(half, 'device')} waste less of what they cost; else a larger --batch for each exchange, or "
        "devices on one machine with NVLink",
    )  # fmt: skip


def spot(load: Load) -> Sizing | None:
    """A run that a reclaim would cost little, and that had none yet."""
    if load.attempts != 1 or load.save_every_s is None or load.start_s is None or load.wall_s < SPOT_LEAST_S:
        return None
    lost_s = load.save_every_s / 2 + load.start_s
    share = lost_s / SPOT_STOP_EVERY_S
    if share > SPOT_LOSS_MOST:
        return None
    saves = f"a checkpoint every {fmt.duration(load.save_every_s)}, a start in {fmt.duration(load.start_s)}"
    text = f"a reclaim would cost {fmt.duration(lost_s)}; one in four hours {fmt.share(share)} of the time"
    return Sizing(
        kind="spot",
        title="A spot machine",
        evidence=[
            Evidence(text=saves, value=load.save_every_s, place="events.jsonl: checkpoint"),
            Evidence(text=text, value=share),
        ],
        fix="Restarts are cheap here, and spot machines cost 60 to 91 % less (GCP's range): rent one, and start the "
        "same command again when it was reclaimed",
    )


RULES: tuple[Callable[[Load], Sizing | None], ...] = (
    more_cores, local_disk, smaller_gpu, shared_gpu, larger_gpu, fewer_gpus, spot,
)  # fmt: skip


def _phase(load: Load, phase: str) -> Evidence:
    share = load.share(phase)
    return Evidence(text=f"{phase} {fmt.share(share)} of the time", value=share, place=f"steps.jsonl: phases.{phase}")


def _cores(load: Load) -> Evidence:
    used, cores = load.used_cores or 0.0, load.cores or 0.0
    text = f"the run used {used:.1f} of {cores:.3g} cores"
    return Evidence(text=text, value=used, place="devices.jsonl: process_cpu, cores")


def _memory(load: Load) -> Evidence:
    text = f"at most {fmt.share(load.memory)} of the GPU's memory was in use"
    return Evidence(text=text, value=load.memory, place="devices.jsonl: gpus.memory_used_bytes")


def _sm(load: Load) -> Evidence:
    text = f"{fmt.share(load.sm_active)} of the multiprocessors had work"
    return Evidence(text=text, value=load.sm_active, place="devices.jsonl: gpus.sm_active")
