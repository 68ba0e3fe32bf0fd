"""Advice on the number of devices of a run: fewer or more, with the figures from its records.

`advise` reads a run folder and proposes at most one change, with its command; `apply` does it. All figures are of
training time: without startup, compilation, evaluation and checkpoints. Not here: why time is lost
(`stoker_watch/diagnosis/`), advice without figures (`stoker_watch/report/sizing.py`, whose thresholds hold here, too),
and other machines (`planning/plan.py`).

Assumed of a change: a device works as long on each image, and the loader delivers as before. Gradients are exchanged
once a step, which takes as long whatever the number of devices, and no time on one.
"""

import dataclasses
import math
import shlex
from pathlib import Path
from typing import Any, TextIO

import msgspec
from rich.console import RenderableType

from stoker.launching.jobs import CANCEL_WAIT_S, cancel, last_job, read_jobs, submit
from stoker.launching.request import check_launch, make_spec
from stoker.launching.spec import Job, LaunchRequest, PlaceOptions, open_place
from stoker.training.cluster import can_divide
from stoker_watch.diagnosis.reader import read_run
from stoker_watch.durations import parse_duration
from stoker_watch.errors import UsageError, make_error
from stoker_watch.findings.finding import Evidence, Finding
from stoker_watch.report import format as fmt
from stoker_watch.report.console import plain_text, print_renderables, table
from stoker_watch.report.explain import open_records, resolve_price
from stoker_watch.report.findings_terminal import explain_line, finding_lines
from stoker_watch.report.sizing import (
    INPUT_BOUND_HIGH,
    MIN_COMM_FRACTION,
    MIN_COMPUTE_FRACTION,
    MIN_FETCH_FRACTION,
    ResourceUsage,
    gpu_names,
    read_environment,
    resource_usage,
)

MIN_TRAINING_S = 60.0
"""Training time below which nothing is advised: a minute, in which the loader has tuned itself and the GPU is warm.
Heuristic."""
MIN_SAVING = 0.05
"""A change is worth a restart if an image becomes cheaper, or training faster, by more than this. Heuristic."""
DEVICES_PER_NODE = 8
"""Of the usual machine: more are asked for as nodes, unless the run had nodes."""
PLACES_TO_APPLY = ("slurm", "k8s")
FIRST_EXCHANGE = 0.1
"""Fraction of the time that exchanging gradients is assumed to take where there was one device."""
NOT_TRAINING = frozenset({"startup", "compile", "eval", "checkpoint", "recovery", "idle"})


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """A training at a number of devices. None: unknown, because the price or the data set is."""

    devices: int
    img_per_s: float
    price_per_hour: float | None = None
    """Of all its devices."""
    cost_per_epoch: float | None = None


class Change(Finding, frozen=True, kw_only=True):
    """A proposal: fewer_devices or more_devices."""

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
    """At most one; empty: no change."""
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
    price: float | None
    """Per device and hour."""
    price_source: str
    batch: dict[str, Any]
    """Settings by which devices share a batch (`cluster.can_divide`)."""
    epoch_images: int | None
    time_left_s: float | None
    """Until the end of the training, as it goes on now."""
    by_s: float | None
    """Deadline of the user, seconds from now."""
    data: str
    job: Job | None
    is_finished: bool

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
        """Whether the devices wait, and no setting of the loader helps: all cores are busy or the storage is slow."""
        waits = self.usage.fraction("input_wait") >= INPUT_BOUND_HIGH
        return waits and (self.usage.cores_are_busy or self.storage_is_slow)

    def is_in_time(self, img_per_s: float) -> bool:
        """Whether a training at this speed ends before the deadline, if there is one."""
        if self.by_s is None or self.time_left_s is None:
            return True
        return self.time_left_s * self.img_per_s / img_per_s <= self.by_s

    @property
    def is_late(self) -> bool:
        return not self.is_in_time(self.img_per_s)

    def figures(self, devices: int, img_per_s: float) -> Figures:
        price = None if self.price is None else self.price * devices
        cost = None if price is None or self.epoch_images is None else price * self.epoch_images / img_per_s / 3600
        return Figures(devices=devices, img_per_s=img_per_s, price_per_hour=price, cost_per_epoch=cost)

    def evidence(self, *phases: str) -> list[Evidence]:
        """The fractions of these phases, and of `input_wait` its reason."""
        usage, found = self.usage, []
        for name in phases:
            fraction = usage.fraction(name)
            text = f"{name} {fmt.percentage(fraction)} of the training time"
            found.append(Evidence(text=text, value=fraction, source=f"steps.jsonl: phases.{name}"))
        if "input_wait" in phases and self.storage_is_slow:
            text = f"{fmt.percentage(usage.fetch_fraction)} of this was reading bytes"
            found.append(Evidence(text=text, value=usage.fetch_fraction, source="steps.jsonl: input_wait_stages.fetch"))
        elif "input_wait" in phases and usage.used_cores is not None:
            text = f"{usage.used_cores:.1f} of {usage.cores or 0:.3g} cores in use"
            found.append(Evidence(text=text, value=usage.used_cores, source="devices.jsonl: process_cpu"))
        return found


def advise(run: str | Path, *, by_s: float | None = None, price_per_device_hour: float | None = None) -> LaunchAdvice:
    """Reads a run. by_s: deadline, seconds from now; price_per_device_hour: None takes the setting of the run, else the
    list price. Raises UsageError if the run is too short."""
    m = _measure(open_records(run), by_s, price_per_device_hour)
    changes = [change for change in [_propose(m)] if change is not None]
    largest = sorted(m.usage.phase_fractions, key=lambda name: -m.usage.fraction(name))
    compute = m.usage.fraction("compute")
    if changes:
        summary = "1 change"
    elif m.is_late:
        summary = "no change: none was found with which the training would end before the deadline"
    elif m.usage.fraction("input_wait") >= INPUT_BOUND_HIGH:
        summary = "no change of devices: they wait for input; `stoker why` says what would help"
    elif compute >= MIN_COMPUTE_FRACTION:
        in_time = "" if m.by_s is None or m.time_left_s is None else ", and the training ends before the deadline"
        summary = f"no change: the devices compute {fmt.percentage(compute)} of the training time{in_time}"
    else:
        name = next((name for name in largest if name != "compute"), "compute")
        summary = f"no change of devices: most time is lost in {name}, which `stoker why` explains"
    return LaunchAdvice(
        run=str(run),
        now=m.figures(m.devices, m.img_per_s),
        evidence=m.evidence(*dict.fromkeys(["compute", *largest[:2]])),
        changes=changes,
        summary=summary,
        price_source=m.price_source,
    )


def _measure(path: Path, by_s: float | None, price_per_device_hour: float | None) -> Measured:
    run, environment = read_run(path), read_environment(path)
    totals, settings = run.totals, run.tables
    phases = {name: seconds for name, seconds in totals.phases.items() if name not in NOT_TRAINING}
    training_s = sum(phases.values())
    wall_s = training_s / max(1, totals.devices)
    is_finished = run.events.end is not None and run.events.end.kind == "finished"
    if wall_s < MIN_TRAINING_S or totals.num_images == 0:
        cause = f"{fmt.duration(wall_s)} of training are recorded, {fmt.count(totals.num_images)} images"
        what = "The run is too short for advice on its devices."
        fix = f"let it train for {fmt.duration(MIN_TRAINING_S)}; `stoker plan DATA` needs no run"
        if is_finished:
            what = "The run is finished, and was too short for advice on its devices."
            fix = f"start a new one that trains for longer than {fmt.duration(MIN_TRAINING_S)}; or `stoker plan DATA`"
        raise UsageError(what, location=path, cause=cause, fix=fix)
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
        on_node=max(1, len(gpu_names(environment))),
        img_per_s=img_per_s,
        price=None if price is None else (price.low + price.high) / 2,
        price_source="" if price is None else price.source,
        batch={"batch_size": batch_size, "mosaic": settings.get("data", {}).get("mosaic")},
        epoch_images=epoch_images,
        time_left_s=None if images_left is None else images_left / img_per_s,
        by_s=by_s,
        data=str(settings.get("data", {}).get("data", "DATA")),
        job=next(iter(read_jobs(str(path))[-1:]), None),
        is_finished=is_finished,
    )


def _propose(m: Measured) -> Change | None:
    """Enough devices for the deadline, where the training would miss it and computes at least 85 % of its time. As many
    as the loader feeds. Half of them, each with twice the images of a step, where the exchange of gradients takes at
    least 25 % of the time (`stoker_watch/report/sizing.py`), which then is paid for twice the work."""
    comm = m.usage.fraction("comm")
    if m.is_late and m.time_left_s and m.by_s and m.usage.fraction("compute") >= MIN_COMPUTE_FRACTION:
        exchange = comm if m.devices > 1 else FIRST_EXCHANGE
        per_device = m.img_per_s / m.devices * (1 - exchange if m.devices == 1 else 1.0)
        count, flags = _at_least(m, math.ceil(m.img_per_s * m.time_left_s / m.by_s / per_device))
        img_per_s, phase = count * per_device, "compute"
        reason = f"{fmt.duration(m.time_left_s)} are left on these, {fmt.duration(m.by_s)} until the deadline"
        assumption = f"{fmt.percentage(exchange)} of the time for the exchange of gradients, and cores for each loader"
    elif m.is_input_bound:
        count, flags = _at_least(m, math.ceil(m.img_per_s / m.device_rate))
        img_per_s, phase = min(m.img_per_s, count * m.device_rate), "input_wait"
        reason, assumption = "the loader feeds no more", "the loader delivers as before"
    elif comm >= MIN_COMM_FRACTION:
        count, flags = _at_least(m, m.devices // 2)
        work, exchange = (1 - comm) * m.devices / count, comm if count > 1 else 0.0
        img_per_s, phase = m.img_per_s / (work + exchange), "comm"
        reason = "less of the time is communication"
        assumption = "the same batch, an exchange of gradients takes as long"
    else:
        return None
    relative_cost = count / m.devices * m.img_per_s / img_per_s
    if m.is_late:
        is_worth = img_per_s > (1 + MIN_SAVING) * m.img_per_s
    else:
        is_worth = m.is_in_time(img_per_s) and relative_cost < 1 - MIN_SAVING
    if count == m.devices or not is_worth:
        return None
    return Change(
        id="more_devices" if count > m.devices else "fewer_devices",
        severity="info",
        title=f"{fmt.plural(count, 'device')} instead of {m.devices}: {reason}",
        after=m.figures(count, img_per_s),
        evidence=m.evidence(phase),
        assumption=assumption,
        flags=flags,
        command=_command(m, flags),
        relative_cost=relative_cost,
    )


def _at_least(m: Measured, count: int) -> tuple[int, dict[str, str]]:
    """(at least `count` devices, flags): as many on each node, no more than a node of the run had, and so many that
    they get equal parts of the batch; those of the run where there is no such number."""
    has_nodes = m.devices > m.on_node
    nodes = max(1, math.ceil(count / (m.on_node if has_nodes else DEVICES_PER_NODE)))
    most = m.on_node if has_nodes else DEVICES_PER_NODE
    counts = range(max(1, math.ceil(count / nodes)), most + 1)
    on_each = next((each for each in counts if can_divide(m.batch, nodes * each)), None)
    if on_each is None:
        return m.devices, {}
    return nodes * on_each, {"devices": str(on_each)} | ({"nodes": str(nodes)} if nodes > 1 or has_nodes else {})


def _command(m: Measured, flags: dict[str, str]) -> str:
    """Continues the run with another number of devices, at its place. The values of --env are the user's to repeat:
    launch.json does not keep them."""
    options: dict[str, Any] = {}
    if m.job is not None:
        asked = {name: value for name, value in m.job.request.items() if name not in ("run_dir", "resume", "env")}
        options = {name.replace("_", "-"): value for name, value in (asked | m.job.options).items()}
    words = ["stoker", "launch", "local" if m.job is None else m.job.place]
    words += [m.data] if m.is_finished else ["--resume", str(m.run)]
    for name, value in (options | flags).items():
        for one in value if isinstance(value, list) else [value]:
            words += [f"--{name}"] if one is True else [f"--{name}", str(one)]
    must_stop = not m.is_finished and m.job is not None
    return (f"stoker launch cancel {shlex.quote(str(m.run))} && " if must_stop else "") + shlex.join(words)


def apply(advice: LaunchAdvice) -> Job:
    """Ends the newest job of a run and submits it again, at its place, with the proposal. Everything is checked before
    the old job is asked to end. Raises UsageError, also if there is no proposal, or for other places."""
    if not advice.changes:
        raise UsageError("There is nothing to apply.", location=advice.run, cause=advice.summary)
    old, change = last_job(advice.run), advice.changes[0]
    if old.place not in PLACES_TO_APPLY:
        what = f"--apply is not possible at {old.place}."
        raise UsageError(what, location=advice.run, choices=PLACES_TO_APPLY, fix=change.command)
    if names := old.request.get("env"):
        raise make_error(UsageError, "env-values-not-kept", run=old.run, names=", ".join(names), command=change.command)
    kept = {name: value for name, value in old.request.items() if name != "run_dir"}
    request = msgspec.convert(kept | change.flags | {"resume": old.run}, LaunchRequest, strict=False)
    place, run = open_place(old.place), read_run(open_records(advice.run))
    on_cpu = run.tables.get("run", {}).get("device") == "cpu"
    spec = make_spec(request, place, msgspec.convert(old.options, PlaceOptions), data=None, settings=(), on_cpu=on_cpu)
    spec = dataclasses.replace(spec, name=old.name, log=old.log or spec.log)
    check_launch(spec, place)
    if (state := cancel(old)).is_live:
        what = f"The {old.place} job {old.id} has not ended within {CANCEL_WAIT_S:.0f} s."
        fix = f"`stoker launch status {old.run}`; when it has ended: {change.command}"
        raise UsageError(what, location=old.run, cause=state.text, fix=fix)
    return submit(spec, place, request)


def print_advice(advice: LaunchAdvice, file: TextIO | None = None, *, width: int | None = None) -> None:
    """Prints the run as it is and the proposals, each with its evidence and command."""
    rendered = table("", "devices", "img/s", "$/h", "$/epoch", right=(1, 2, 3, 4))
    for name, figures in [("now", advice.now), *(("then", change.after) for change in advice.changes)]:
        costs = map(fmt.cost, (figures.price_per_hour, figures.cost_per_epoch))
        cells = [name, str(figures.devices), fmt.number(figures.img_per_s), *costs]
        rendered.add_row(*map(plain_text, cells))
    lines: list[RenderableType] = [plain_text(f"{advice.run}: {advice.summary}", "bold"), "", rendered, ""]
    lines.append(plain_text("; ".join(evidence.text for evidence in advice.evidence)))
    for change in advice.changes:
        evidence = [*change.evidence, Evidence(text=f"assumed: {change.assumption}")]
        lines += ["", *finding_lines(msgspec.structs.replace(change, evidence=evidence))]
    prices = advice.price_source or "unknown; `--price-per-device-hour` of the training sets it"
    lines += ["", plain_text(f"figures are of the training time; price: {prices}"), *explain_line(advice.changes)]
    print_renderables(lines, file, width=width)
