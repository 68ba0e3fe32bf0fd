"""`stoker plan`: the same training on many machines: memory, duration, cost, and which one to rent.

Opens the data, derives the training as `stoker train` would on a GPU, predicts a step on each kind of accelerator
(`predict.py`), and from it the run on each machine (`duration.py`). Nothing is trained or rented.
"""

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from stoker.config.settings import Config, check_config, flag_words
from stoker.config.sync_method import PLAIN, parse_sync
from stoker.data.images import pixel_cache
from stoker.data.images.pixel_cache import CachedImageSpec
from stoker.data.index import Index, open_index_of
from stoker.hardware.device import Device
from stoker.hardware.selection import select_device
from stoker.planning.duration import MachinePlan, Placement, TrainingJob, plan_machine
from stoker.planning.machines import (
    THIS_MACHINE,
    Machine,
    choose_machines,
    describe_prices,
    find_accelerator,
    listed_machines,
    read_prices,
    this_machine,
)
from stoker.planning.predict import loader_demand, measure_steps, predict_steps
from stoker.planning.recommend import Limits, Recommendation, recommend
from stoker.training.defaults.derive import derive_for_plan, total_steps
from stoker_watch.durations import parse_duration
from stoker_watch.errors import ConfigError, DataError, UsageError, make_error
from stoker_watch.hardware.tpu import TpuSlice, listed_slices
from stoker_watch.report import format as fmt

MAX_NAMED_GPUS = 4096


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `stoker plan` says."""

    data: str
    model: str
    image_size: tuple[int, int]
    num_images: int
    epochs: float
    steps: int
    """Steps of one device, with `batch_size` images each."""
    batch_size: int
    job: list[str]
    limits: Limits
    rows: list[MachinePlan]
    tpus: list[TpuSlice]
    """The slices that `on` names: machine and price; nothing is predicted for TPUs."""
    recommendation: Recommendation
    command: str | None
    """Trains it on the recommended machine; None: none is recommended."""
    prices: str
    """Source of the prices, a clause."""
    notes: list[str]


def make_plan(
    user_config: Config,
    *,
    on: Sequence[str] = (),
    gpus: Sequence[int] = (),
    spot: bool = False,
    limits: Limits = Limits(),  # noqa: B008  # frozen
    prices: Path | None = None,
    measure: bool = False,
) -> Plan:
    """The plan of a training. on: names of machines, `this` for the present one; none: this one and the table. gpus:
    numbers; none: those of the named machines, else one. measure: time 50 steps here first. Raises StokerError."""
    check_config(user_config)
    if any(not 1 <= count <= MAX_NAMED_GPUS for count in gpus):
        raise UsageError(f"--gpus {min(gpus)}: wanted 1 … {MAX_NAMED_GPUS}.")
    table = listed_machines() if prices is None else read_prices(prices, listed_machines())
    own_device = select_device(user_config.run.device)
    this = this_machine(own_device, user_config.run.price_per_device_hour)
    tpus = [listed_slices()[name.lower()] for name in on if name.lower() in listed_slices()]
    machines, notes = _choose(
        user_config, [name for name in on if name.lower() not in listed_slices()], table, this, tpus
    )
    has_gpu = any(machine.accelerator != "cpu" for machine in machines)
    index = open_index_of(user_config.data)
    if "train" not in index.splits:
        raise DataError("The data set has no train split.", location=index.source, choices=index.splits)
    device = Device(torch.device("cuda")) if has_gpu else own_device
    config, reasons = derive_for_plan(user_config.replace(device=None), index, device)
    if measure:
        measure_steps(config, index, own_device)
    job = _job(config, index)
    placements, left_out = _placements(machines, gpus, spot=spot, is_named=bool(on))
    notes += left_out
    if not placements:
        choices = sorted({machine.gpus for machine in machines})
        fix = "the GPUs of a machine, or a multiple of them for several machines"
        raise UsageError(f"--gpus {' '.join(map(str, gpus))} does not fit the machines.", choices=choices, fix=fix)
    rows = _predict(placements, config, index, job)
    epochs = job.images_seen / job.num_images
    recommendation = recommend(rows, limits)
    height, width = config.data.image_size
    steps = round(job.images_seen / config.run.batch_size)
    chosen = None if recommendation.choice is None else rows[recommendation.choice]
    notes += _notes(rows, chosen, tpus)
    if this is not None and this.accelerator == "cpu" and has_gpu and "model" in reasons:
        notes += ["the model is that of a GPU; on this CPU, `stoker train` takes a smaller one: `--on this` plans it"]
    return Plan(
        data=str(user_config.data.data),
        model=config.model.model,
        image_size=(height, width),
        num_images=job.num_images,
        epochs=epochs,
        steps=steps,
        batch_size=config.run.batch_size,
        job=[
            f"{config.model.model} at {width}×{height}: {reasons.get('model', 'set by the user')}",
            f"{fmt.count(round(job.images_seen))} images, {epochs:.3g} epochs of {fmt.count(job.num_images)}; "
            f"{fmt.count(steps)} steps of {config.run.batch_size}; "
            f"{fmt.plural(round(job.num_evaluations), 'evaluation')} of {fmt.plural(job.num_val_images, 'image')}",
            f"loading an image: {1e3 * job.demand.seconds:.2g} ms of a core here ({job.demand.images} tried), "
            f"{fmt.size(job.demand.encoded_bytes)}",
        ],
        limits=limits,
        rows=rows,
        tpus=tpus,
        recommendation=recommendation,
        command=None if chosen is None else train_command(user_config, chosen),
        prices=describe_prices() + ("" if prices is None else f"; {prices}"),
        notes=notes,
    )


def _choose(
    user_config: Config,
    names: list[str],
    table: Mapping[str, Machine],
    this: Machine | None,
    tpus: Sequence[TpuSlice],
) -> tuple[list[Machine], list[str]]:
    """(the machines to plan for, a note). names: those that the user named, without TPUs."""
    notes, device = list[str](), user_config.run.device
    wants_cpu = (device or "").partition(":")[0] == "cpu"
    if tpus and not names:
        names = [this.name] if this is not None else [next(iter(table))]
    if wants_cpu and not names:
        names = [THIS_MACHINE]
        notes.append("--device cpu: only this machine is planned; those of the table are rented for their GPUs")
    machines = choose_machines(names, machines=table, this=this)
    with_gpu = [machine.name for machine in machines if machine.accelerator != "cpu"]
    if wants_cpu and with_gpu:
        what = f"--device {device} would leave the GPU of {', '.join(with_gpu)} unused."
        cause = "a plan for such a machine is one for its GPU"
        raise UsageError(what, cause=cause, fix="leave out --device; or --on this: the CPU of this machine")
    return machines, notes


def _notes(rows: Sequence[MachinePlan], chosen: MachinePlan | None, tpus: Sequence[TpuSlice]) -> Iterator[str]:
    """What the times rest on, and what is not predicted."""
    for source in dict.fromkeys(row.step_source for row in rows):
        accelerators = dict.fromkeys(row.accelerator for row in rows if row.step_source == source)
        yield f"time of a step on {', '.join(accelerators)}: {source}"
    if chosen is not None and chosen.sync_reason:
        yield f"{chosen.label}: --sync {chosen.sync}; {chosen.sync_reason} (docs/devices.md: what it costs)"
    if tpus:
        yield "TPUs: times are not predicted, and none was measured; one chip of a slice trains (docs/gpu-status.md)"


def _job(config: Config, index: Index) -> TrainingJob:
    train_indices = index.image_indices("train")
    num_val_images = len(index.image_indices("val")) if "val" in index.splits else 0
    batch_size = config.run.batch_size
    steps = total_steps(parse_duration(config.run.max_duration), len(train_indices), batch_size)
    if steps is None:
        raise make_error(ConfigError, "plan-of-max-time", max_duration=config.run.max_duration)
    every = parse_duration(config.run.eval_every, "eval-every")
    interval = every.value * len(train_indices) / batch_size if every.unit == "epochs" else every.value
    counted = every.unit != "minutes" and interval > 0
    data = config.data
    images_seen = steps * batch_size
    image_spec = CachedImageSpec.for_augmentation(
        data.image_size, data.resize, scale_jitter_prob=data.scale_jitter_prob, scale_range=data.scale_range
    )
    max_scale, epochs = data.scale_range[1] if data.scale_jitter_prob > 0 else 1.0, images_seen / len(train_indices)
    inputs = pixel_cache.collect_cache_inputs(index, train_indices, image_spec, max_scale=max_scale, epochs=epochs)
    return TrainingJob(
        num_images=len(train_indices),
        num_val_images=num_val_images,
        images_seen=images_seen,
        num_evaluations=max(1.0, math.ceil(steps / interval)) if counted else 1.0,
        checkpoint_every=parse_duration(config.run.checkpoint_every, "checkpoint-every"),
        demand=loader_demand(config, index),
        is_remote=index.remote_object(int(train_indices[0])) is not None,
        cache=config.run.cache,
        cache_inputs=inputs,
        sync=PLAIN if config.run.sync is None or config.run.shard else parse_sync(config.run.sync),
    )


def _placements(
    machines: Iterable[Machine], gpus: Sequence[int], *, spot: bool, is_named: bool
) -> tuple[list[Placement], list[str]]:
    """(what is predicted, notes on what is not). is_named: the user named the machines."""
    result, notes = [], []
    for machine in machines:
        for count in dict.fromkeys(gpus or ((machine.gpus,) if is_named else (1,))):
            whole, rest = divmod(count, machine.gpus)
            is_part = count < machine.gpus
            if (is_part and not is_named) or (not is_part and rest) or (machine.is_this and count > 1):
                if is_named:
                    notes.append(f"{machine.name}: {count} GPUs are not a whole number of machines")
                continue
            placement = Placement(machine=machine, gpus=count, machines=max(1, whole))
            result.append(placement)
            if spot and machine.spot_price is not None:
                result.append(msgspec.structs.replace(placement, spot=True))
            elif spot and not machine.is_this:
                notes.append("spot prices have no table, as they change by the hour: --prices FILE has yours")
    return result, list(dict.fromkeys(notes))


def _predict(placements: Sequence[Placement], config: Config, index: Index, job: TrainingJob) -> list[MachinePlan]:
    """One row for each placement. The batch size is that of all GPUs together, rounded up, as in `stoker train`."""
    wanted = [(row.machine.accelerator, math.ceil(config.run.batch_size / row.gpus)) for row in placements]
    distinct = list(dict.fromkeys(wanted))
    accelerators = {key: find_accelerator(key) for key in dict.fromkeys(key for key, _ in distinct)}
    predictions = predict_steps(
        config, index, [accelerators[key] for key, _ in distinct], batch_size=[size for _, size in distinct]
    )
    steps = dict(zip(distinct, predictions, strict=True))
    return [plan_machine(placement, steps[key], job) for placement, key in zip(placements, wanted, strict=True)]


def train_command(user_config: Config, row: MachinePlan | None = None) -> str:
    """The command that trains what was planned, with the user's settings. row: the choice."""
    words = ["stoker", "train", str(user_config.data.data)]
    settings = user_config.set_fields()
    for name, value in settings.items():
        if name not in ("data", "price_per_device_hour"):
            words += flag_words(name, value)
    if row is not None and row.gpus > row.machines:
        words += ["--devices", str(row.gpus // row.machines)]
    return shlex.join(words)


def to_dict(plan: Plan) -> Mapping[str, Any]:
    """For `--json`; `recommended` is the row of the choice, or null."""
    result: dict[str, Any] = msgspec.to_builtins(plan)
    choice = plan.recommendation.choice
    return result | {"recommended": None if choice is None else result["rows"][choice]["machine"]}
