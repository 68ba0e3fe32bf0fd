"""Advice on the devices of a run: fewer, more, others, or a part of one GPU, with the figures from its records.

`advise` reads a run folder and asks each rule for a change; at most three are returned, the cheapest image first. All
figures are of training time: without startup, compilation, evaluation and checkpoints. Not here: why time is lost
(`stoker/diagnosis/`), advice without figures after any run (`report/sizing.py`, whose thresholds hold here, too), and
plans without a run (`planning/plan.py`). Nothing is changed.

What is assumed of a change:

- Work of a device: the same for each image. The loader delivers as before, and in proportion to the cores of another
  machine. A device of another kind is faster by the smaller of the ratios of peak arithmetic and memory bandwidth: on
  a roofline, a step gains at least that.
- The batch size is that of all devices together, as in `stoker train`. Gradients are exchanged once a step, which
  takes as long whatever the number of devices (a ring's (n - 1) / n), and no time on one.
"""

import dataclasses
import math
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import msgspec
from rich.console import RenderableType

from stoker.config.durations import parse_duration
from stoker.diagnosis.reader import read_run
from stoker.diagnosis.run_data import RunRecords
from stoker.errors import UsageError
from stoker.findings.finding import Evidence, Finding
from stoker.hardware.prices import Price
from stoker.launching.containers import MIG_SLICES
from stoker.launching.jobs import read_jobs
from stoker.launching.spec import Job
from stoker.planning.accelerators import GPUS, Accelerator, identify
from stoker.planning.machines import Machine, listed_machines
from stoker.report import format as fmt
from stoker.report.console import plain_text, print_renderables, table
from stoker.report.environment import gpu_names, read_environment
from stoker.report.explain import open_records, resolve_price
from stoker.report.findings_terminal import explain_line, finding_lines
from stoker.report.sizing import (
    CPU_SATURATED_FRACTION,
    INPUT_BOUND_HIGH,
    MAX_SHARED_MEMORY_FRACTION,
    MIN_COMM_FRACTION,
    MIN_COMPUTE_FRACTION,
    MIN_FETCH_FRACTION,
    MIN_SAMPLES,
    SM_ACTIVE_HIGH,
    ResourceUsage,
    resource_usage,
)
from stoker.runs import records

MIN_TRAINING_S = 60.0
"""Training time below which nothing is advised: a minute, in which the loader has tuned itself and the GPU is warm.
Heuristic."""
MAX_SHARED_BUSY = 0.4
"""GPU busy below which two jobs fit on one GPU: together they stay within the 0.8 that NVIDIA calls effective use."""
MIN_SAVING = 0.05
"""A change is worth a restart if an image becomes cheaper, or training faster, by more than this. Heuristic."""
MAX_CHANGES = 3
MIN_FED = 1e-3
"""Fraction of the time that devices do not wait for input, at least: none trains without any."""
DEVICES_PER_NODE = 8
"""Of the usual machine: more are asked for as nodes, unless the run had nodes."""
PLACES_WITH_MACHINES = ("k8s", "vertex", "gcp-batch")
PLACES_OF_GCP = ("vertex", "gcp-batch")
PLACES_WITH_SLICES = ("slurm", "k8s")
NOT_TRAINING = frozenset({"startup", "compile", "eval", "checkpoint", "recovery", "idle"})
MIG_PARTS = ((1, 7, 1), (2, 3, 2), (3, 2, 4))
"""Sevenths of the SMs, slices of a GPU, eighths of its memory, of the proposed profiles. NVIDIA MIG user guide."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """A training at a number of devices. None: unknown, because the price or the data set is."""

    devices: int
    img_per_s: float
    busy: float
    """Fraction of the training time in which a GPU computes, by its telemetry; of a shared one, for all its jobs."""
    price_per_hour: float | None = None
    """Of all its devices."""
    cost_per_epoch: float | None = None


class Change(Finding, frozen=True, kw_only=True):
    """A proposal: fewer_devices, more_devices, other_machine, larger_batch, mig_slice or shared_gpu."""

    before: Figures
    after: Figures
    assumption: str = ""
    """What `after` rests on; a clause."""
    flags: dict[str, str]
    """Flags of `stoker launch` by name, without dashes, that differ from those of the run."""
    relative_cost: float
    """Cost of an image after the change, relative to before."""


class LaunchAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """What `stoker launch advise` says."""

    run: str
    now: Figures
    evidence: list[Evidence]
    """Where the training time goes."""
    changes: list[Change]
    """At most MAX_CHANGES, the best first; empty: no change."""
    summary: str
    price_source: str = ""
    """Empty: no price is known."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """What a run did in its training time."""

    run: Path
    usage: ResourceUsage
    """`phase_fractions` are of the training time."""
    on_node: int
    """Devices that the machine of rank 0 has."""
    img_per_s: float
    gpu_busy: float
    """Mean SM activity, else the driver's utilization."""
    busy_source: str
    accelerator: Accelerator | None
    price: float | None
    """Per device and hour."""
    epoch_images: int | None
    batch_size: int | None
    images_left: float | None
    """Until the end of the training."""
    by_s: float | None
    """Deadline of the user, seconds from now."""
    data: str
    place: str
    options: dict[str, Any]
    """Flags of its newest job, by name without dashes."""
    is_finished: bool

    @property
    def compute(self) -> float:
        return self.usage.fraction("compute")

    @property
    def waiting_for_input(self) -> float:
        return self.usage.fraction("input_wait")

    @property
    def device_rate(self) -> float:
        """Images per second of one device that never waits for input."""
        return self.img_per_s / self.usage.devices / max(MIN_FED, 1 - self.waiting_for_input)

    @property
    def cores_are_busy(self) -> bool:
        usage = self.usage
        return (
            usage.cores is not None
            and usage.used_cores is not None
            and usage.used_cores >= CPU_SATURATED_FRACTION * usage.cores
        )

    @property
    def storage_is_slow(self) -> bool:
        return self.usage.fetch_fraction is not None and self.usage.fetch_fraction >= MIN_FETCH_FRACTION

    @property
    def time_left_s(self) -> float | None:
        return None if self.images_left is None else self.images_left / self.img_per_s

    def figures(self, *, devices: int, img_per_s: float, busy: float, relative_price: float) -> Figures:
        """relative_price: of an hour, to that of the run."""
        price = None if self.price is None else self.usage.devices * self.price * relative_price
        epoch_s = None if self.epoch_images is None else self.epoch_images / img_per_s
        return Figures(
            devices=devices,
            img_per_s=img_per_s,
            busy=min(1.0, busy),
            price_per_hour=price,
            cost_per_epoch=None if price is None or epoch_s is None else price * epoch_s / 3600,
        )

    @property
    def now(self) -> Figures:
        return self.figures(
            devices=self.usage.devices, img_per_s=self.img_per_s, busy=self.gpu_busy, relative_price=1.0
        )

    def command(self, flags: dict[str, str]) -> str:
        """Continues the run with other devices; other settings of the training need a new run. At the run's place where
        it has such devices, else at one that has, else `stoker train` on the machine itself. The values of --env are
        the user's to repeat: launch.json does not keep them."""
        machine = listed_machines().get(flags.get("machine-type", ""))
        place: str | None = self.place
        if machine is not None and place not in PLACES_WITH_MACHINES:
            place = "gcp-batch" if machine.cloud == "GCP" else None
        if "gpu" in flags and place not in PLACES_WITH_SLICES:
            place = None
        target = [self.data] if self.is_finished or "batch-size" in flags else ["--resume", str(self.run)]
        if place is not None:
            options = self.options if place == self.place else {}
            words = [part for name, value in (options | flags).items() for part in _flag(name, value)]
            text = shlex.join(["stoker", "launch", place, *target, *words])
        else:
            text = shlex.join(["stoker", "train", *target])
        if "gpu" in flags and place is None:
            text = f"nvidia-smi mig -cgi {flags['gpu']} -C && CUDA_VISIBLE_DEVICES=MIG-… {text}"
        must_stop = not self.is_finished and bool(read_jobs(str(self.run)))
        return f"stoker launch cancel {shlex.quote(str(self.run))} && {text}" if must_stop else text

    def change(
        self,
        kind: str,
        title: str,
        evidence: list[Evidence],
        *,
        devices: int,
        img_per_s: float,
        flags: dict[str, str],
        assumption: str,
        device_speed: float = 1.0,
        relative_price: float | None = None,
    ) -> Change:
        """devices, img_per_s: after it; device_speed: of a device after it, to one of the run; relative_price: of an
        hour, to that of the run; None: as the devices."""
        work = img_per_s / devices / (self.img_per_s / self.usage.devices)
        ratio = devices / self.usage.devices if relative_price is None else relative_price
        return Change(
            id=kind,
            severity="info",
            title=title,
            before=self.now,
            after=self.figures(
                devices=devices, img_per_s=img_per_s, busy=self.gpu_busy * work / device_speed, relative_price=ratio
            ),
            evidence=evidence,
            assumption=assumption,
            flags=flags,
            command=self.command(flags),
            relative_cost=ratio * self.img_per_s / img_per_s,
        )


def advise(run: str | Path, *, by_s: float | None = None, price_per_device_hour: float | None = None) -> LaunchAdvice:
    """Reads a run. by_s: deadline, seconds from now; price_per_device_hour: None takes the setting of the run, else the
    list price.

    Raises UsageError if the run is too short, used no GPU, or has no telemetry.
    """
    measured, price = _measure(open_records(run), by_s, price_per_device_hour)
    changes = [change for rule in RULES if (change := rule(measured)) is not None and _is_worth(measured, change)]
    late = _is_late(measured)
    changes.sort(key=lambda change: (late and not _is_in_time(measured, change), change.relative_cost))
    changes = changes[:MAX_CHANGES]
    return LaunchAdvice(
        run=str(run),
        now=measured.now,
        evidence=[_phase(measured, name) for name in _largest_phases(measured)] + [_gpu_busy(measured)],
        changes=changes,
        summary=_summary(measured, changes),
        price_source="" if price is None else price.source,
    )


def _is_late(m: Measured) -> bool:
    return m.by_s is not None and m.time_left_s is not None and m.time_left_s > m.by_s


def _is_in_time(m: Measured, change: Change) -> bool:
    return m.by_s is not None and m.images_left is not None and m.images_left / change.after.img_per_s <= m.by_s


def _is_worth(m: Measured, change: Change) -> bool:
    """Cheaper without being slower than the deadline allows; or, where the training is late, faster."""
    if _is_late(m):
        return change.after.img_per_s > (1 + MIN_SAVING) * m.img_per_s
    if m.by_s is not None and m.images_left is not None and not _is_in_time(m, change):
        return False
    return change.relative_cost < 1 - MIN_SAVING


# Reading


def _measure(path: Path, by_s: float | None, price_per_device_hour: float | None) -> tuple[Measured, Price | None]:
    run, environment = read_run(path), read_environment(path)
    totals, settings = run.totals, run.tables
    training_s = sum(seconds for name, seconds in totals.phases.items() if name not in NOT_TRAINING)
    wall_s = training_s / max(1, totals.devices)
    if wall_s < MIN_TRAINING_S or totals.num_images == 0:
        raise UsageError(
            "The run is too short for advice on its devices.",
            location=path,
            cause=f"{fmt.duration(wall_s)} of training are recorded, {fmt.count(totals.num_images)} images",
            fix=f"let it train for {fmt.duration(MIN_TRAINING_S)}; `stoker plan DATA` needs no run",
        )
    busy, source = _gpu_busy_of(run)
    names = gpu_names(environment)
    if busy is None:
        is_cpu = run.num_samples > 0 and not names
        raise UsageError(
            "The run used no GPU." if is_cpu else "The run has too little telemetry of its GPUs.",
            location=path / records.DEVICES,
            cause="there is no device to change"
            if is_cpu
            else f"fewer than {MIN_SAMPLES} lines of training say how busy the GPUs were",
            fix="`stoker plan DATA` predicts it on GPUs" if is_cpu else "`stoker train` records it where the driver is",
        )
    usage = resource_usage(run, environment)
    fractions = {name: s / training_s for name, s in totals.phases.items() if name not in NOT_TRAINING}
    price = resolve_price(run.recorded_price, price_per_device_hour, environment)
    jobs = read_jobs(str(path))
    run_settings = settings.get("run", {})
    epoch_images = run.facts.get("num_images")
    batch_size = run_settings.get("batch_size")
    return Measured(
        run=path,
        usage=dataclasses.replace(usage, phase_fractions=fractions),
        on_node=len(names),
        img_per_s=totals.num_images / wall_s,
        gpu_busy=busy,
        busy_source=source,
        accelerator=identify(names[0]) if names else None,
        price=None if price is None else (price.low + price.high) / 2,
        epoch_images=epoch_images if isinstance(epoch_images, int) and epoch_images > 0 else None,
        batch_size=batch_size if isinstance(batch_size, int) else None,
        images_left=_images_left(run_settings, totals.step, batch_size, epoch_images),
        by_s=by_s,
        data=str(settings.get("data", {}).get("data", "DATA")),
        place=jobs[-1].place if jobs else "local",
        options=_flags_of(jobs[-1]) if jobs else {},
        is_finished=run.events.end is not None and run.events.end.kind == "finished",
    ), price


def _flags_of(job: Job) -> dict[str, Any]:
    """Flags with which the job was launched; those that name its run, and --env, whose values are not kept, are left
    out."""
    fields = {name: value for name, value in job.request.items() if name not in ("run_dir", "resume", "env")}
    return {name.replace("_", "-"): value for name, value in (fields | job.options).items()}


def _flag(name: str, value: Any) -> list[str]:
    if value is True:
        return [f"--{name}"]
    return [part for one in (value if isinstance(value, list) else [value]) for part in (f"--{name}", str(one))]


def _images_left(settings: Mapping[str, Any], step: int, batch_size: object, epoch_images: object) -> float | None:
    """None: the length is a time, or not recorded."""
    if not isinstance(batch_size, int) or not isinstance(settings.get("max_duration"), str):
        return None
    length = parse_duration(settings["max_duration"])
    if length.unit == "steps":
        return max(0.0, (length.value - step) * batch_size)
    if length.unit == "epochs" and isinstance(epoch_images, int):
        return max(0.0, length.value * epoch_images - step * batch_size)
    return None


def _gpu_busy_of(run: RunRecords) -> tuple[float | None, str]:
    """(mean of SM activity, else of the driver's utilization, over the training; its field)."""
    for mean, name in ((run.training.sm_active, "sm_active"), (run.training.utilization, "utilization")):
        if mean.count >= MIN_SAMPLES:
            return mean.value, name
    return None, ""


# Rules


def fewer_devices_for_input(m: Measured) -> Change | None:
    """The loader feeds fewer devices as fast: `input_wait` of at least 20 % (highly input-bound, TensorFlow Profiler),
    and all cores busy or the storage slow, so that no setting of the loader helps."""
    if not _is_input_bound(m) or m.usage.devices < 2:
        return None
    count, flags = _place(m, math.ceil(m.img_per_s / m.device_rate))
    if count >= m.usage.devices:
        return None
    return m.change(
        "fewer_devices",
        f"{fmt.plural(count, 'device')} instead of {m.usage.devices}: the loader feeds no more",
        [_phase(m, "input_wait"), *_loader_evidence(m)],
        devices=count,
        img_per_s=min(m.img_per_s, count * m.device_rate),
        flags=flags,
        assumption="the loader delivers as before",
    )


def machine_with_more_cores(m: Measured) -> Change | None:
    """The same GPUs with more vCPUs each: where decoding keeps all cores busy and the devices wait at least 20 % of the
    time. The one of the table that makes an image cheapest."""
    if not _is_input_bound(m) or m.storage_is_slow or not m.cores_are_busy or m.usage.cores is None:
        return None
    cores, count = m.usage.cores, m.usage.devices

    def rate(machine: Machine) -> float:
        return min(count * m.device_rate, m.img_per_s * machine.vcpus / cores)

    return _other_machine(
        m,
        lambda machine, gpu: gpu is m.accelerator and machine.vcpus > cores,
        rate,
        [_phase(m, "input_wait"), *_loader_evidence(m)],
        assumption="a vCPU decodes as fast as a core of this machine",
    )


def cheaper_gpu(m: Measured) -> Change | None:
    """A slower GPU that the same cores feed: where the devices wait for input for at least 20 % of the time."""
    if not _is_input_bound(m) or m.usage.cores is None:
        return None
    cores, count = m.usage.cores, m.usage.devices
    return _other_machine(
        m,
        lambda machine, gpu: gpu is not m.accelerator and machine.vcpus >= cores and _fits(m, gpu),
        lambda machine: min(count * m.device_rate * _speed_ratio(m, machine), m.img_per_s * machine.vcpus / cores),
        [_phase(m, "input_wait"), *_loader_evidence(m), *_memory_evidence(m)],
        assumption="the GPU by its data sheet, a vCPU as fast as a core of this machine",
    )


def faster_gpu(m: Measured) -> Change | None:
    """Another GPU for a training that computes at least 85 % of its time: faster where a deadline would be missed,
    else cheaper for an image."""
    if m.compute < MIN_COMPUTE_FRACTION:
        return None
    return _other_machine(
        m,
        lambda machine, gpu: (
            gpu is not m.accelerator and (m.usage.cores is None or machine.vcpus >= m.usage.cores) and _fits(m, gpu)
        ),
        lambda machine: m.img_per_s * _speed_ratio(m, machine),
        [_phase(m, "compute"), _gpu_busy(m), *_memory_evidence(m)],
        assumption="the GPU by its data sheet",
    )


def fewer_devices_for_communication(m: Measured) -> Change | None:
    """Half of the devices, each with twice the images of a step: where the exchange of gradients takes at least 25 % of
    the time (`report/sizing.py`), which then is paid for twice the work."""
    comm = m.usage.fraction("comm")
    if m.usage.devices < 2 or comm < MIN_COMM_FRACTION:
        return None
    count, flags = _place(m, m.usage.devices // 2)
    work, exchange = (1 - comm) * m.usage.devices / count, comm if count > 1 else 0.0
    return m.change(
        "fewer_devices",
        f"{fmt.plural(count, 'device')} instead of {m.usage.devices}: less of the time is communication",
        [_phase(m, "comm"), *_memory_evidence(m)],
        devices=count,
        img_per_s=m.img_per_s / (work + exchange),
        flags=flags,
        assumption="the same batch, an exchange of gradients takes as long",
    )


def larger_batch(m: Measured) -> Change | None:
    """Twice the images per step on the same devices: where the exchange of gradients takes at least 25 % of the time
    and twice the peak fits the memory (at most 45 % is used). It changes the training: the learning rate follows."""
    comm = m.usage.fraction("comm")
    if m.usage.devices < 2 or comm < MIN_COMM_FRACTION or m.batch_size is None or not _has_half_the_memory(m):
        return None
    return m.change(
        "larger_batch",
        f"batches of {2 * m.batch_size} instead of {m.batch_size}: half as many exchanges of gradients",
        [_phase(m, "comm"), *_memory_evidence(m)],
        devices=m.usage.devices,
        img_per_s=m.img_per_s * 2 / (2 * (1 - comm) + comm),
        flags={"batch-size": str(2 * m.batch_size)},
        assumption="a new run, whose learning rate follows the batch size",
    )


def _mig_profiles(key: str) -> list[tuple[str, int, float, float]]:
    """(name, slices of a GPU, fraction of its SMs, of its memory) of an accelerator's profiles, from the smallest."""
    names = MIG_SLICES.get(key, "").split()
    found = [
        (next((n for n in names if n.startswith(f"{sms}g.")), ""), count, sms, part) for sms, count, part in MIG_PARTS
    ]
    return [
        (name, count, sms / 7, part / 8) for name, count, sms, part in found if name and names[-1].startswith("7g.")
    ]


def mig_slice(m: Measured) -> Change | None:
    """The smallest MIG slice that the job fits: GPU busy below 40 % and at most 45 % of the memory used. Its SMs stay
    below 80 % activity, a tenth of its memory is left over."""
    memory = m.usage.gpu_memory_fraction
    if not _is_small(m) or m.usage.mig or memory is None or m.accelerator is None or m.usage.devices != 1:
        return None
    for profile, count, sms, part in _mig_profiles(m.accelerator.key):
        if m.gpu_busy <= SM_ACTIVE_HIGH * sms and memory <= 0.9 * part:
            return m.change(
                "mig_slice",
                f"a MIG slice {profile}, of which the GPU has {count}",
                [_gpu_busy(m), *_memory_evidence(m)],
                devices=1,
                img_per_s=m.img_per_s,
                device_speed=sms,
                flags={"gpu": profile},
                assumption=f"the other {count - 1} slices are used, and paid for, by others",
                relative_price=1 / count,
            )
    return None


def shared_gpu(m: Measured) -> Change | None:
    """Two such jobs on one GPU, with MPS where the driver has it: GPU busy below 40 %, at most 45 % of the memory used,
    and cores for both loaders."""
    usage = m.usage
    if not _is_small(m) or usage.mig or usage.devices != 1:
        return None
    if usage.cores is None or usage.used_cores is None or 2 * usage.used_cores > CPU_SATURATED_FRACTION * usage.cores:
        return None
    return m.change(
        "shared_gpu",
        "two such jobs on one GPU, with MPS (`nvidia-cuda-mps-control -d` on the machine)",
        [_gpu_busy(m), *_memory_evidence(m), *_cores_evidence(m)],
        devices=1,
        img_per_s=m.img_per_s,
        device_speed=0.5,
        flags={"env": "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50"},
        assumption="per job; a second one shares the price",
        relative_price=0.5,
    )


def more_devices(m: Measured) -> Change | None:
    """Enough devices for the deadline: where the training would miss it and computes at least 85 % of its time. The
    exchange of gradients is counted as measured, on one device as 10 % (assumed)."""
    if not _is_late(m) or m.compute < MIN_COMPUTE_FRACTION or m.time_left_s is None or m.by_s is None:
        return None
    comm = m.usage.fraction("comm") if m.usage.devices > 1 else 0.1
    per_device = m.img_per_s / m.usage.devices * (1 - comm if m.usage.devices == 1 else 1.0)
    count, flags = _place(m, math.ceil(m.img_per_s * m.time_left_s / m.by_s / per_device))
    return m.change(
        "more_devices",
        f"{count} devices instead of {m.usage.devices}: {fmt.duration(m.time_left_s)} are left on these, "
        f"{fmt.duration(m.by_s)} until the deadline",
        [_phase(m, "compute"), _gpu_busy(m)],
        devices=count,
        img_per_s=count * per_device,
        flags=flags,
        assumption=f"{fmt.percentage(comm)} of the time for the exchange of gradients, and cores for each loader",
    )


RULES: tuple[Callable[[Measured], Change | None], ...] = (
    fewer_devices_for_input, machine_with_more_cores, cheaper_gpu, fewer_devices_for_communication, larger_batch,
    mig_slice, shared_gpu, more_devices, faster_gpu,
)  # fmt: skip


def _place(m: Measured, count: int) -> tuple[int, dict[str, str]]:
    """(at least `count` devices, flags): as many on each node, no more than a node of the run had."""
    has_nodes = m.usage.devices > m.on_node
    nodes = math.ceil(count / (m.on_node if has_nodes else DEVICES_PER_NODE))
    on_each = math.ceil(count / nodes)
    return nodes * on_each, {"devices": str(on_each)} | ({"nodes": str(nodes)} if nodes > 1 or has_nodes else {})


def _is_input_bound(m: Measured) -> bool:
    return m.waiting_for_input >= INPUT_BOUND_HIGH and (m.cores_are_busy or m.storage_is_slow)


def _has_half_the_memory(m: Measured) -> bool:
    return m.usage.gpu_memory_fraction is not None and m.usage.gpu_memory_fraction <= MAX_SHARED_MEMORY_FRACTION


def _is_small(m: Measured) -> bool:
    """The job is too small for its GPU, and not because it waits for input."""
    return m.gpu_busy < MAX_SHARED_BUSY and _has_half_the_memory(m) and m.waiting_for_input < INPUT_BOUND_HIGH


def _fits(m: Measured, gpu: Accelerator) -> bool:
    if m.accelerator is None or m.usage.gpu_memory_fraction is None:
        return False
    return m.usage.gpu_memory_fraction * m.accelerator.memory_bytes <= 0.9 * gpu.memory_bytes


def _speed_ratio(m: Measured, machine: Machine) -> float:
    """Of a device of the machine to one of the run, at least, by their data sheets."""
    if m.accelerator is None:
        return 0.0
    new, old = GPUS[machine.accelerator], m.accelerator
    arithmetic = new.peak_flops(new.precision(), is_convolution=True) / old.peak_flops(
        old.precision(), is_convolution=True
    )
    return min(arithmetic, new.bandwidth / old.bandwidth)


def _other_machine(
    m: Measured,
    is_candidate: Callable[[Machine, Accelerator], bool],
    rate: Callable[[Machine], float],
    evidence: list[Evidence],
    *,
    assumption: str,
) -> Change | None:
    """The machine of the table, with as many GPUs, whose images are cheapest, of those that meet the deadline if there
    is one and the run does not."""
    if m.price is None or m.accelerator is None or m.usage.devices > m.on_node:
        return None
    count = m.usage.devices
    candidates = [
        machine
        for machine in listed_machines().values()
        if machine.gpus == count and machine.price is not None and machine.accelerator in GPUS
        if m.place not in PLACES_OF_GCP or machine.cloud == "GCP"
        if is_candidate(machine, GPUS[machine.accelerator]) and rate(machine) > 0
    ]
    if _is_late(m):
        left, by_s = m.images_left or 0.0, m.by_s or 1.0
        candidates = [machine for machine in candidates if left / rate(machine) <= by_s]
    if not candidates:
        return None
    best = min(candidates, key=lambda machine: (machine.price or 0.0) / rate(machine))
    price, speed = best.price or 0.0, rate(best)
    return m.change(
        "other_machine",
        f"{best.name}: {count} × {GPUS[best.accelerator].name}, {best.vcpus:g} vCPUs",
        evidence,
        devices=count,
        img_per_s=speed,
        device_speed=_speed_ratio(m, best),
        flags={"machine-type": best.name},
        assumption=assumption,
        relative_price=price / (count * m.price),
    )


# Evidence


def _phase(m: Measured, name: str) -> Evidence:
    value = m.usage.fraction(name)
    return Evidence(
        text=f"{name} {fmt.percentage(value)} of the training time", value=value, source=f"steps.jsonl: phases.{name}"
    )


def _largest_phases(m: Measured) -> list[str]:
    others = sorted(m.usage.phase_fractions, key=lambda name: -m.usage.fraction(name))
    return list(dict.fromkeys(["compute", *others[:2]]))


def _gpu_busy(m: Measured) -> Evidence:
    name = "SM activity" if m.busy_source == "sm_active" else "the driver's utilization"
    return Evidence(
        text=f"GPU busy {fmt.percentage(m.gpu_busy)} ({name})",
        value=m.gpu_busy,
        source=f"devices.jsonl: gpus.{m.busy_source}",
    )


def _loader_evidence(m: Measured) -> list[Evidence]:
    if m.storage_is_slow and m.usage.fetch_fraction is not None:
        text = f"{fmt.percentage(m.usage.fetch_fraction)} of this was reading bytes"
        return [Evidence(text=text, value=m.usage.fetch_fraction, source="steps.jsonl: input_wait_stages.fetch")]
    return _cores_evidence(m)


def _cores_evidence(m: Measured) -> list[Evidence]:
    if m.usage.used_cores is None or m.usage.cores is None:
        return []
    text = f"{m.usage.used_cores:.1f} of {m.usage.cores:.3g} cores in use"
    return [Evidence(text=text, value=m.usage.used_cores, source="devices.jsonl: process_cpu, cpu_limit_cores")]


def _memory_evidence(m: Measured) -> list[Evidence]:
    value = m.usage.gpu_memory_fraction
    if value is None:
        return []
    text = f"at most {fmt.percentage(value)} of the GPU memory in use"
    return [Evidence(text=text, value=value, source="devices.jsonl: gpus.memory_used_bytes")]


def _summary(m: Measured, changes: list[Change]) -> str:
    if changes:
        return f"{fmt.plural(len(changes), 'change')}, the best first"
    if _is_late(m):
        return "no change: none was found with which the training would end before the deadline"
    if m.waiting_for_input >= INPUT_BOUND_HIGH:
        return "no change of devices: they wait for input, though cores are free; `stoker why` says what would help"
    if m.compute >= MIN_COMPUTE_FRACTION:
        left = "" if m.by_s is None or m.time_left_s is None else ", and the training ends before the deadline"
        return f"no change: the devices compute {fmt.percentage(m.compute)} of the training time{left}"
    name = max((name for name in m.usage.phase_fractions if name != "compute"), key=m.usage.fraction, default="compute")
    return f"no change of devices: most time is lost in {name}, which `stoker why` explains"


# Terminal


def print_advice(advice: LaunchAdvice, file: TextIO | None = None, *, width: int | None = None) -> None:
    """Prints the run as it is and the proposals, each with its evidence and command."""
    lines: list[RenderableType] = [plain_text(f"{advice.run}: {advice.summary}", "bold"), ""]
    rendered = table("", "devices", "img/s", "busy", "$/h", "$/epoch", right=(1, 2, 3, 4, 5))
    for name, figures in [("now", advice.now), *((f"{n}", c.after) for n, c in enumerate(advice.changes, 1))]:
        cells = [fmt.cost(value) if value is not None else fmt.MISSING
                 for value in (figures.price_per_hour, figures.cost_per_epoch)]  # fmt: skip
        rendered.add_row(
            *map(
                plain_text,
                [name, str(figures.devices), fmt.number(figures.img_per_s), fmt.percentage(figures.busy), *cells],
            )
        )
    lines += [rendered, "", plain_text("; ".join(evidence.text for evidence in advice.evidence))]
    for number, change in enumerate(advice.changes, 1):
        evidence = [*change.evidence, Evidence(text=f"assumed: {change.assumption}")]
        shown = msgspec.structs.replace(change, title=f"{number}. {change.title}", evidence=evidence)
        lines += ["", *finding_lines(shown)]
    prices = advice.price_source or "unknown; `--price-per-device-hour` of the training sets it"
    lines += ["", plain_text(f"figures are of the training time; price: {prices}"), *explain_line(advice.changes)]
    print_renderables(lines, file, width=width)
