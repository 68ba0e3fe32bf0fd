"""Advice on the devices of a run: fewer, more or others, with the figures from its records.

`advise` reads a run folder and asks each rule for a change; at most three are returned, the cheapest image first. All
figures are of training time: without startup, compilation, evaluation and checkpoints. Not here: why time is lost
(`stoker/diagnosis/`), advice without figures after any run, also on parts of a GPU (`report/sizing.py`, whose
thresholds hold here, too), and plans without a run (`planning/plan.py`). Nothing is changed: each proposal has its
command.

Assumed of a change: a device works as long on each image. The loader delivers as before, and in proportion to the
vCPUs of another machine. A device of another kind is faster by the smaller of the ratios of peak arithmetic and memory
bandwidth: on a roofline, a step gains at least that. The batch size is that of all devices together; gradients are
exchanged once a step, which takes as long whatever the number of devices, and no time on one.
"""

import dataclasses
import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import msgspec
from rich.console import RenderableType

from stoker.config.durations import parse_duration
from stoker.diagnosis.reader import read_run
from stoker.errors import UsageError
from stoker.findings.finding import Evidence, Finding
from stoker.launching.jobs import read_jobs
from stoker.launching.spec import Job
from stoker.planning.machines import GPUS, Accelerator, Machine, identify, listed_machines
from stoker.report import format as fmt
from stoker.report.console import plain_text, print_renderables, table
from stoker.report.environment import gpu_names, read_environment
from stoker.report.explain import open_records, resolve_price
from stoker.report.findings_terminal import explain_line, finding_lines
from stoker.report.sizing import (
    CPU_SATURATED_FRACTION,
    INPUT_BOUND_HIGH,
    MIN_COMM_FRACTION,
    MIN_COMPUTE_FRACTION,
    MIN_FETCH_FRACTION,
    MIN_SAMPLES,
    ResourceUsage,
    resource_usage,
)
from stoker.runs import records

MIN_TRAINING_S = 60.0
"""Training time below which nothing is advised: a minute, in which the loader has tuned itself and the GPU is warm.
Heuristic."""
MIN_SAVING = 0.05
"""A change is worth a restart if an image becomes cheaper, or training faster, by more than this. Heuristic."""
MAX_CHANGES = 3
DEVICES_PER_NODE = 8
"""Of the usual machine: more are asked for as nodes, unless the run had nodes."""
FIRST_EXCHANGE = 0.1
"""Fraction of the time that exchanging gradients is assumed to take where there was one device."""
PLACES_WITH_MACHINES = ("k8s", "vertex", "gcp-batch")
NOT_TRAINING = frozenset({"startup", "compile", "eval", "checkpoint", "recovery", "idle"})


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """A training at a number of devices. None: unknown, because the price or the data set is."""

    devices: int
    img_per_s: float
    price_per_hour: float | None = None
    """Of all its devices."""
    cost_per_epoch: float | None = None


class Change(Finding, frozen=True, kw_only=True):
    """A proposal: fewer_devices, more_devices or other_machine."""

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
    """What a run did in its training time. None: not known."""

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
    price_source: str
    epoch_images: int | None
    time_left_s: float | None
    """Until the end of the training, as it goes on now."""
    by_s: float | None
    """Deadline of the user, seconds from now."""
    data: str
    job: Job | None
    """The newest."""
    is_finished: bool

    @property
    def place(self) -> str:
        return "local" if self.job is None else self.job.place

    @property
    def devices(self) -> int:
        return self.usage.devices

    @property
    def device_rate(self) -> float:
        """Images per second of one device that never waits for input."""
        return self.img_per_s / self.devices / max(1e-3, 1 - self.usage.fraction("input_wait"))

    @property
    def storage_is_slow(self) -> bool:
        return (self.usage.fetch_fraction or 0.0) >= MIN_FETCH_FRACTION

    @property
    def is_input_bound(self) -> bool:
        """Whether the devices wait, and no setting of the loader helps: `input_wait` of at least 20 % (highly
        input-bound, TensorFlow Profiler), and all cores busy or the storage slow."""
        used, cores = self.usage.used_cores, self.usage.cores
        are_cores_busy = used is not None and cores is not None and used >= CPU_SATURATED_FRACTION * cores
        waits = self.usage.fraction("input_wait") >= INPUT_BOUND_HIGH
        return waits and (are_cores_busy or self.storage_is_slow)

    def is_in_time(self, img_per_s: float) -> bool:
        """Whether a training at this speed ends before the deadline, if there is one."""
        if self.by_s is None or self.time_left_s is None:
            return True
        return self.time_left_s * self.img_per_s / img_per_s <= self.by_s

    @property
    def is_late(self) -> bool:
        return not self.is_in_time(self.img_per_s)

    def figures(self, devices: int, img_per_s: float, relative_price: float) -> Figures:
        """relative_price: of an hour, to that of the run."""
        price = None if self.price is None else self.devices * self.price * relative_price
        cost = None if price is None or self.epoch_images is None else price * self.epoch_images / img_per_s / 3600
        return Figures(devices=devices, img_per_s=img_per_s, price_per_hour=price, cost_per_epoch=cost)

    def change(
        self,
        kind: str,
        title: str,
        evidence: list[Evidence],
        *,
        img_per_s: float,
        devices: int,
        flags: dict[str, str],
        assumption: str,
        relative_price: float | None = None,
    ) -> Change:
        """img_per_s, devices: after it; relative_price: of an hour, to that of the run; None: as the devices."""
        ratio = devices / self.devices if relative_price is None else relative_price
        return Change(
            id=kind,
            severity="info",
            title=title,
            after=self.figures(devices, img_per_s, ratio),
            evidence=evidence,
            assumption=assumption,
            flags=flags,
            command=_command(self, flags),
            relative_cost=ratio * self.img_per_s / img_per_s,
        )

    def evidence(self, *names: str) -> list[Evidence]:
        """What was measured, of these: phases, and gpu_busy, memory, loader. What is not known is left out."""
        usage, memory = self.usage, self.usage.gpu_memory_fraction
        counter = "SM activity" if self.busy_source == "sm_active" else "the driver's utilization"
        busy = f"GPU busy {fmt.percentage(self.gpu_busy)} ({counter})"
        loader = (f"{usage.used_cores or 0:.1f} of {usage.cores or 0:.3g} cores in use", usage.used_cores)
        if self.storage_is_slow:
            loader = (f"{fmt.percentage(usage.fetch_fraction)} of this was reading bytes", usage.fetch_fraction)
        known = {
            "gpu_busy": (busy, self.gpu_busy, f"devices.jsonl: gpus.{self.busy_source}"),
            "memory": (
                f"at most {fmt.percentage(memory)} of the GPU memory in use",
                memory,
                "devices.jsonl: gpus.memory_used_bytes",
            ),
            "loader": (*loader, "steps.jsonl: input_wait_stages; devices.jsonl: process_cpu"),
        }
        for name, fraction in usage.phase_fractions.items():
            text = f"{name} {fmt.percentage(fraction)} of the training time"
            known[name] = (text, fraction, f"steps.jsonl: phases.{name}")
        found = (known[name] for name in names if name in known)
        return [Evidence(text=text, value=value, source=source) for text, value, source in found if value is not None]


def advise(run: str | Path, *, by_s: float | None = None, price_per_device_hour: float | None = None) -> LaunchAdvice:
    """Reads a run. by_s: deadline, seconds from now; price_per_device_hour: None takes the setting of the run, else the
    list price.

    Raises UsageError if the run is too short, used no GPU, or has no telemetry.
    """
    m = _measure(open_records(run), by_s, price_per_device_hour)

    def is_worth(change: Change) -> bool:
        """Cheaper without being slower than the deadline allows; or, where the training is late, faster."""
        if m.is_late:
            return change.after.img_per_s > (1 + MIN_SAVING) * m.img_per_s
        return m.is_in_time(change.after.img_per_s) and change.relative_cost < 1 - MIN_SAVING

    changes = [change for rule in RULES if (change := rule(m)) is not None and is_worth(change)]
    changes.sort(key=lambda change: (m.is_late and not m.is_in_time(change.after.img_per_s), change.relative_cost))
    largest = sorted(m.usage.phase_fractions, key=lambda name: -m.usage.fraction(name))
    compute = m.usage.fraction("compute")
    if changes:
        summary = f"{fmt.plural(len(changes[:MAX_CHANGES]), 'change')}, the best first"
    elif m.is_late:
        summary = "no change: none was found with which the training would end before the deadline"
    elif m.usage.fraction("input_wait") >= INPUT_BOUND_HIGH:
        summary = "no change of devices: they wait for input, though cores are free; `stoker why` says what would help"
    elif compute >= MIN_COMPUTE_FRACTION:
        in_time = "" if m.by_s is None or m.time_left_s is None else ", and the training ends before the deadline"
        summary = f"no change: the devices compute {fmt.percentage(compute)} of the training time{in_time}"
    else:
        name = next((name for name in largest if name != "compute"), "compute")
        summary = f"no change of devices: most time is lost in {name}, which `stoker why` explains"
    return LaunchAdvice(
        run=str(run),
        now=m.figures(m.devices, m.img_per_s, 1.0),
        evidence=m.evidence(*dict.fromkeys(["compute", *largest[:2]]), "gpu_busy"),
        changes=changes[:MAX_CHANGES],
        summary=summary,
        price_source=m.price_source,
    )


def _measure(path: Path, by_s: float | None, price_per_device_hour: float | None) -> Measured:
    run, environment = read_run(path), read_environment(path)
    totals, settings = run.totals, run.tables
    phases = {name: seconds for name, seconds in totals.phases.items() if name not in NOT_TRAINING}
    training_s = sum(phases.values())
    wall_s = training_s / max(1, totals.devices)
    if wall_s < MIN_TRAINING_S or totals.num_images == 0:
        raise UsageError(
            "The run is too short for advice on its devices.",
            location=path,
            cause=f"{fmt.duration(wall_s)} of training are recorded, {fmt.count(totals.num_images)} images",
            fix=f"let it train for {fmt.duration(MIN_TRAINING_S)}; `stoker plan DATA` needs no run",
        )
    names = gpu_names(environment)
    counters = {"sm_active": run.training.sm_active, "utilization": run.training.utilization}
    source = next((name for name, mean in counters.items() if mean.count >= MIN_SAMPLES), None)
    if source is None:
        raise UsageError(
            "The run has too little telemetry of its GPUs." if names else "The run used no GPU.",
            location=path / records.DEVICES,
            cause=f"fewer than {MIN_SAMPLES} lines of training say how busy GPUs were",
            fix="`stoker train` records it where the driver is; `stoker plan DATA` predicts it on GPUs",
        )
    price = resolve_price(run.recorded_price, price_per_device_hour, environment)
    run_settings = settings.get("run", {})
    epoch_images, images_left = run.facts.get("num_images"), None
    if isinstance(batch_size := run_settings.get("batch_size"), int):
        length = parse_duration(str(run_settings.get("max_duration", "0min")))
        total = {"steps": length.value * batch_size, "epochs": epoch_images and length.value * epoch_images}
        if (all_images := total.get(length.unit)) is not None:
            images_left = max(0.0, all_images - totals.step * batch_size)
    img_per_s = totals.num_images / wall_s
    fractions = {name: seconds / training_s for name, seconds in phases.items()}
    return Measured(
        run=path,
        usage=dataclasses.replace(resource_usage(run, environment), phase_fractions=fractions),
        on_node=len(names),
        img_per_s=img_per_s,
        gpu_busy=counters[source].value or 0.0,
        busy_source=source,
        accelerator=identify(names[0]) if names else None,
        price=None if price is None else (price.low + price.high) / 2,
        price_source="" if price is None else price.source,
        epoch_images=epoch_images,
        time_left_s=None if images_left is None else images_left / img_per_s,
        by_s=by_s,
        data=str(settings.get("data", {}).get("data", "DATA")),
        job=next(iter(read_jobs(str(path))[-1:]), None),
        is_finished=run.events.end is not None and run.events.end.kind == "finished",
    )


# Rules


def fewer_devices(m: Measured) -> Change | None:
    """As many devices as the loader feeds; or half of them, each with twice the images of a step, where the exchange of
    gradients takes at least 25 % of the time (`report/sizing.py`), which then is paid for twice the work."""
    comm = m.usage.fraction("comm")
    if m.is_input_bound:
        count, flags = _at_least(m, math.ceil(m.img_per_s / m.device_rate))
        img_per_s = min(m.img_per_s, count * m.device_rate)
        reason, evidence, assumption = "the loader feeds no more", "input_wait", "the loader delivers as before"
    elif comm >= MIN_COMM_FRACTION:
        count, flags = _at_least(m, m.devices // 2)
        work, exchange = (1 - comm) * m.devices / count, comm if count > 1 else 0.0
        img_per_s = m.img_per_s / (work + exchange)
        reason, evidence = "less of the time is communication", "comm"
        assumption = "the same batch, an exchange of gradients takes as long"
    else:
        return None
    if count >= m.devices:
        return None
    return m.change(
        "fewer_devices",
        f"{fmt.plural(count, 'device')} instead of {m.devices}: {reason}",
        m.evidence(evidence, "loader" if m.is_input_bound else "memory"),
        devices=count,
        img_per_s=img_per_s,
        flags=flags,
        assumption=assumption,
    )


def more_devices(m: Measured) -> Change | None:
    """Enough devices for the deadline: where the training would miss it and computes at least 85 % of its time."""
    if not m.is_late or m.usage.fraction("compute") < MIN_COMPUTE_FRACTION or not m.time_left_s or not m.by_s:
        return None
    comm = m.usage.fraction("comm") if m.devices > 1 else FIRST_EXCHANGE
    per_device = m.img_per_s / m.devices * (1 - comm if m.devices == 1 else 1.0)
    count, flags = _at_least(m, math.ceil(m.img_per_s * m.time_left_s / m.by_s / per_device))
    return m.change(
        "more_devices",
        f"{count} devices instead of {m.devices}: {fmt.duration(m.time_left_s)} are left on these, "
        f"{fmt.duration(m.by_s)} until the deadline",
        m.evidence("compute", "gpu_busy"),
        devices=count,
        img_per_s=count * per_device,
        flags=flags,
        assumption=f"{fmt.percentage(comm)} of the time for the exchange of gradients, and cores for each loader",
    )


def other_machine(m: Measured) -> Change | None:
    """The machine of the table with as many GPUs on which an image is cheapest, of those that meet the deadline if the
    run does not: with more vCPUs or slower GPUs where the devices wait for decoding, else with other GPUs."""
    cores, count, own_gpu = m.usage.cores, m.devices, m.accelerator
    if not m.is_input_bound and m.usage.fraction("compute") < MIN_COMPUTE_FRACTION:
        return None
    if m.price is None or own_gpu is None or count > m.on_node or (m.is_input_bound and cores is None):
        return None
    used_bytes = (m.usage.gpu_memory_fraction or 1.0) * own_gpu.memory_bytes

    def rate(machine: Machine) -> float:
        trained = count * m.device_rate * _speed(own_gpu, GPUS[machine.accelerator])
        if not m.is_input_bound or cores is None:
            return trained
        return min(trained, m.img_per_s * (1.0 if m.storage_is_slow else machine.vcpus / cores))

    candidates = [
        machine
        for machine in listed_machines().values()
        if machine.gpus == count and machine.price is not None and machine.vcpus >= (cores or 0.0)
        and (machine.cloud == "GCP" or m.place not in ("vertex", "gcp-batch"))
        and (used_bytes <= 0.9 * GPUS[machine.accelerator].memory_bytes or machine.accelerator == own_gpu.key)
        and (not m.is_late or m.is_in_time(rate(machine)))
    ]  # fmt: skip
    if not candidates:
        return None
    best = min(candidates, key=lambda machine: (machine.price or 0.0) / rate(machine))
    gpu = GPUS[best.accelerator]
    return m.change(
        "other_machine",
        f"{best.name}: {count} × {gpu.name}, {best.vcpus:g} vCPUs",
        m.evidence(*(("input_wait", "loader") if m.is_input_bound else ("compute", "gpu_busy")), "memory"),
        img_per_s=rate(best),
        devices=count,
        flags={"machine-type": best.name},
        assumption="the GPU by its data sheet, a vCPU as fast as a core of this machine",
        relative_price=(best.price or 0.0) / (count * m.price),
    )


RULES: tuple[Callable[[Measured], Change | None], ...] = (fewer_devices, other_machine, more_devices)


def _at_least(m: Measured, count: int) -> tuple[int, dict[str, str]]:
    """(at least `count` devices, flags): as many on each node, no more than a node of the run had."""
    has_nodes = m.devices > m.on_node
    nodes = max(1, math.ceil(count / (m.on_node if has_nodes else DEVICES_PER_NODE)))
    on_each = max(1, math.ceil(count / nodes))
    return nodes * on_each, {"devices": str(on_each)} | ({"nodes": str(nodes)} if nodes > 1 or has_nodes else {})


def _speed(old: Accelerator, new: Accelerator) -> float:
    """Of a device to another, at least, by their data sheets."""
    peaks = [gpu.peak_flops(gpu.precision(), is_convolution=True) for gpu in (new, old)]
    return min(peaks[0] / peaks[1], new.bandwidth / old.bandwidth)


def _command(m: Measured, flags: dict[str, str]) -> str:
    """Continues the run with other devices. At the run's place where it has such devices, else at one that has, else
    `stoker train` on the machine itself. The values of --env are the user's to repeat: launch.json does not keep
    them."""
    place: str | None = m.place
    if "machine-type" in flags and place not in PLACES_WITH_MACHINES:
        place = "gcp-batch" if listed_machines()[flags["machine-type"]].cloud == "GCP" else None
    options: dict[str, Any] = {}
    if m.job is not None and place == m.place:
        asked = {name: value for name, value in m.job.request.items() if name not in ("run_dir", "resume", "env")}
        options = {name.replace("_", "-"): value for name, value in (asked | m.job.options).items()}
    words = ["stoker", "train"] if place is None else ["stoker", "launch", place]
    words += [m.data] if m.is_finished else ["--resume", str(m.run)]
    for name, value in (options | flags).items() if place is not None else ():
        for one in value if isinstance(value, list) else [value]:
            words += [f"--{name}"] if one is True else [f"--{name}", str(one)]
    text = shlex.join(words)
    must_stop = not m.is_finished and m.job is not None
    return f"stoker launch cancel {shlex.quote(str(m.run))} && {text}" if must_stop else text


def print_advice(advice: LaunchAdvice, file: TextIO | None = None, *, width: int | None = None) -> None:
    """Prints the run as it is and the proposals, each with its evidence and command."""
    rendered = table("", "devices", "img/s", "$/h", "$/epoch", right=(1, 2, 3, 4))
    for name, figures in [("now", advice.now), *((f"{n}", c.after) for n, c in enumerate(advice.changes, 1))]:
        costs = map(fmt.cost, (figures.price_per_hour, figures.cost_per_epoch))
        cells = [name, str(figures.devices), fmt.number(figures.img_per_s), *costs]
        rendered.add_row(*map(plain_text, cells))
    lines: list[RenderableType] = [plain_text(f"{advice.run}: {advice.summary}", "bold"), "", rendered, ""]
    lines.append(plain_text("; ".join(evidence.text for evidence in advice.evidence)))
    for number, change in enumerate(advice.changes, 1):
        evidence = [*change.evidence, Evidence(text=f"assumed: {change.assumption}")]
        shown = msgspec.structs.replace(change, title=f"{number}. {change.title}", evidence=evidence)
        lines += ["", *finding_lines(shown)]
    prices = advice.price_source or "unknown; `--price-per-device-hour` of the training sets it"
    lines += ["", plain_text(f"figures are of the training time; price: {prices}"), *explain_line(advice.changes)]
    print_renderables(lines, file, width=width)
