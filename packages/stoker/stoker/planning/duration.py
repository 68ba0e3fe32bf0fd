"""How long a training takes on a machine, and what it costs: one model, computed for the low end, the expectation and
the high end of everything that is uncertain.

The time of a step comes from `predict.py`. Added here: the exchange of gradients between GPUs, loading, evaluation,
checkpoints, startup, and on spot machines the expected rework. The formulas and their sources are in docs/plan.md; what
no plan can measure is assumed in `knowledge/assumptions.toml`. Not here: which machine to take (`recommend.py`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal

import msgspec

from stoker.config.sync_method import PLAIN, SyncMethod, parse_sync
from stoker.data.images.pixel_cache import CachePolicyInputs, choose_cache
from stoker.data.loading.device_decoder import HostDecode
from stoker.hardware.exchange_cost import DeviceLink, Workload, expected_maximum, step_cost
from stoker.knowledge import read_toml
from stoker.planning.machines import GIB, Case, Estimate, Machine, exactly, links
from stoker.planning.predict import StepPrediction
from stoker.training.defaults import sync_choice
from stoker_watch.durations import Duration
from stoker_watch.report import format as fmt

LOADER_CORE_FRACTION = 0.9
"""CPU utilization that decoding workers reach (`stoker_watch/report/sizing.py`)."""
CPU_OF_TRAINING_THREAD = 1.0
"""vCPUs per GPU for the thread that issues the steps."""
BOOT_DISK_GB = 100
"""Assumed size of the disk of a machine without local SSDs. A cache may take half of it."""
FREE_MEMORY_FRACTION = 0.85
"""Fraction of a machine's memory that is free before the training. Heuristic."""
MIN_CACHED_FRACTION = 0.07
"""CPU time of an image from the cache of decoded images, as a fraction of decoding it, at least: 1.23 of 16.8 ms for
4,000 × 3,000 pixels (docs/benchmarks.md)."""
STATE_BYTES_PER_PARAMETER = 16
"""Bytes in a checkpoint: weights, EMA weights and up to two moments in fp32."""

MEMORY_FITS = Literal["yes", "perhaps", "no"]
CASES: tuple[Case, ...] = ("low", "expected", "high")


UNCERTAIN = {name: Estimate(*map(float, row)) for name, row in read_toml("assumptions.toml")["uncertain"].items()}
"""What no plan can measure, by name."""


def over_cases(compute: Callable[[Case], float]) -> Estimate:
    """What `compute` gives with each uncertain input at its low end, as expected, and at its high end; sorted, as the
    result may fall with the inputs."""
    low, expected, high = (compute(case) for case in CASES)
    return Estimate(min(low, expected, high), expected, max(low, expected, high))


class TrainingJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained, whatever the machine."""

    num_images: int
    """Images of the training split."""
    num_val_images: int
    images_seen: float
    """Images that are trained on, over all epochs."""
    num_evaluations: float
    checkpoint_every: Duration
    """0: at the end only."""
    demand: HostDecode
    """What loading an image costs, whatever the device that trains; measured on this machine."""
    is_remote: bool = False
    """Whether the images are in a bucket; otherwise they are assumed on a disk of the machine."""
    cache: str | None = None
    """The user's setting; None: chosen for the machine as `stoker train` does."""
    sync: SyncMethod = PLAIN
    """How the GPUs keep one model; auto: chosen for the machines as `stoker train` does."""
    cache_inputs: CachePolicyInputs | None = None
    """The facts about the data that decide it; None: no cache."""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """How many GPUs of how many machines train, at which price."""

    machine: Machine
    gpus: int
    machines: int = 1
    spot: bool = False

    @property
    def price(self) -> Estimate | None:
        """US dollars per hour for all machines."""
        one = self.machine.spot_price if self.spot else self.machine.price
        if one is None:
            return None
        return (one if isinstance(one, Estimate) else exactly(one)).scaled(self.machines)


class MachinePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The prediction for one machine type. None: not known, or the training is impossible there (`problem`)."""

    machine: str
    cloud: str
    accelerator: str
    gpus: int
    machines: int
    spot: bool
    price_per_hour: Estimate | None
    batch_size: int
    """Images per step of all GPUs."""
    peak_bytes: Estimate
    memory_bytes: int
    fits: MEMORY_FITS
    problem: str = ""
    """Why the training is impossible; a clause."""
    sync: str | None = None
    """How the GPUs keep one model, a value of --sync; None: one GPU."""
    sync_reason: str = ""
    """Why `--sync auto` takes it; empty if the user set it."""
    step_s: Estimate
    """With communication, without waiting for data."""
    step_source: str
    """What the time of computing rests on: measured runs, or assumptions."""
    is_measured: bool
    """Whether it rests on steps that were measured on such a device."""
    step_error: float
    """The time of computing multiplied or divided by 1 + this is its band."""
    device_img_per_s: Estimate
    """Images per second that the GPUs can train on."""
    loader_img_per_s: Estimate
    """Images per second that the loader delivers, after the first epoch."""
    img_per_s: Estimate
    """Mean over the training steps of the run."""
    vcpus: float
    """vCPUs of all machines."""
    required_vcpus: float
    """vCPUs with which decoding would keep the GPUs busy, as expected."""
    required_mb_per_s: float
    """Bytes that would have to be read for that."""
    limited_by: str
    """compute, memory, launches, communication, decoding, bucket or disk."""
    utilization: Estimate
    """Fraction of the whole time in which the GPUs compute."""
    parts_s: dict[str, Estimate]
    """startup, training, evaluation, checkpoints, rework, wait: they add up to the duration, as expected."""
    preemptions: Estimate | None = None
    """Expected number; None: not a spot machine."""
    duration_s: Estimate
    cost: Estimate | None
    """US dollars."""

    @property
    def label(self) -> str:
        """The machine as the user names it."""
        count = f"{self.machines} × " if self.machines > 1 else ""
        return f"{count}{self.machine}" + (" spot" if self.spot else "")


PARTS = ("startup", "training", "evaluation", "checkpoints", "rework", "wait")
BANDS = ("step_s", "device_img_per_s", "loader_img_per_s", "img_per_s", "utilization")
_Case = dict[str, float]
"""Seconds of each of PARTS, each of BANDS, and the number of preemptions, at one end of the band."""


def plan_machine(placement: Placement, step: StepPrediction, job: TrainingJob) -> MachinePlan:
    """The prediction for one placement. step: of one of its GPUs."""
    model, machine, price = _Model(placement, step, job), placement.machine, placement.price
    cases = {case: model.run(case) for case in CASES}

    def band(name: str) -> Estimate:
        return over_cases(lambda case: cases[case][name])

    error = step.peak_error
    fits: MEMORY_FITS = "yes" if step.peak_bytes * (1 + error) <= step.memory_bytes else "perhaps"
    expected_rate = cases["expected"]["device_img_per_s"]
    decoded_per_vcpu = LOADER_CORE_FRACTION * UNCERTAIN["vcpu_speed"].expected / max(job.demand.seconds, 1e-9)
    return MachinePlan(
        machine=machine.name,
        cloud=machine.cloud,
        accelerator=machine.accelerator,
        gpus=placement.gpus,
        machines=placement.machines,
        spot=placement.spot,
        price_per_hour=price,
        batch_size=step.batch_size * placement.gpus,
        peak_bytes=Estimate(step.peak_bytes * max(0.0, 1 - error), step.peak_bytes, step.peak_bytes * (1 + error)),
        memory_bytes=step.memory_bytes,
        fits=fits if step.fits else "no",
        problem="" if step.fits else f"does not fit the memory: {fmt.memory(step.peak_bytes, step.memory_bytes)}",
        step_source=step.source,
        is_measured=step.error_of not in ("cpu", "gpu"),
        step_error=step.step_error,
        vcpus=machine.vcpus * placement.machines,
        required_vcpus=expected_rate / decoded_per_vcpu + placement.gpus * CPU_OF_TRAINING_THREAD,
        required_mb_per_s=expected_rate * job.demand.encoded_bytes / 1e6,
        sync=None if placement.gpus == 1 else str(model.sync[0]),
        sync_reason=model.sync[1],
        limited_by=model.limited_by(cases["expected"]),
        parts_s={name: band(name) for name in PARTS},
        preemptions=band("preemptions") if placement.spot else None,
        duration_s=over_cases(lambda case: sum(cases[case][name] for name in PARTS)),
        **{name: band(name) for name in BANDS},
        cost=None
        if price is None
        else over_cases(lambda case: sum(cases[case][n] for n in PARTS if n != "wait") / 3600 * price.time(case)),
    )


@dataclasses.dataclass(frozen=True)
class _Model:
    placement: Placement
    step: StepPrediction
    job: TrainingJob

    def run(self, case: Case) -> _Case:
        """The whole run, with every uncertain input at one end of its band."""
        job, gpus = self.job, self.placement.gpus
        step_s = self.step_s(case)
        device_rate = self.step.batch_size * gpus / step_s
        first_loader, later_loader = (self.loader_rate(case, is_first=is_first)[0] for is_first in (True, False))
        first_images = min(job.images_seen, job.num_images)
        training = first_images / self.joint_rate(device_rate, first_loader)
        training += (job.images_seen - first_images) / self.joint_rate(device_rate, later_loader)
        eval_rate = self.joint_rate(device_rate / UNCERTAIN["evaluation_cost"].time(case), first_loader)
        evaluation = job.num_evaluations * job.num_val_images / eval_rate
        interval = self.checkpoint_interval(training)
        save_s = self.step.parameters * STATE_BYTES_PER_PARAMETER / UNCERTAIN["checkpoint_bytes_per_s"].rate(case)
        found = {
            "startup": self.startup(case),
            "training": training,
            "evaluation": evaluation,
            "checkpoints": save_s * max(1.0, training / interval),
            "step_s": step_s,
            "device_img_per_s": device_rate,
            "loader_img_per_s": later_loader,
            "img_per_s": job.images_seen / training,
        }
        work_s = training + evaluation + found["checkpoints"]
        found |= self.interruptions(case, work_s, interval, found["startup"])
        computing_s = job.images_seen / (self.step.batch_size * gpus) * self.compute_s(case) + evaluation / 2
        found["utilization"] = min(1.0, computing_s / sum(found[name] for name in PARTS))
        return found

    # Time of a step

    def step_s(self, case: Case) -> float:
        """A step of all GPUs: computing, waiting for the slowest, and what of the exchange is not hidden."""
        compute_s = self.compute_s(case)
        if self.placement.gpus == 1:
            return compute_s
        waiting = UNCERTAIN["step_spread"].time(case) * expected_maximum(self.placement.gpus) * compute_s
        return compute_s + waiting + self.exposed_s(compute_s, case)

    def compute_s(self, case: Case) -> float:
        """Time in which a GPU computes in a step: divided or multiplied by 1 + its error at the ends, so above 0."""
        return self.step.step_s * (1 + self.step.step_error) ** (CASES.index(case) - 1)

    def exposed_s(self, compute_s: float, case: Case) -> float:
        """Time of the exchange of gradients that computing does not hide; at the high end it hides nothing."""
        exchange = self.exchange(compute_s if case != "high" else 0.0, case)
        return step_cost(exchange.work, exchange.link, exchange.devices, self.sync[0]).exposed_s

    @functools.cached_property
    def sync(self) -> tuple[SyncMethod, str]:
        """How the GPUs keep one model, and where `--sync auto` chose it, the reason."""
        if self.placement.gpus == 1 or self.job.sync.kind != "auto":
            return self.job.sync, ""
        name, reason = sync_choice.decide(self.exchange(self.compute_s("expected"), "expected"))
        return parse_sync(name), reason

    def exchange(self, compute_s: float, case: Case) -> sync_choice.MeasuredExchange:
        """What `--sync auto` would measure there; without the time of compressing, which no GPU has measured."""
        work = Workload(compute_s=compute_s, gradient_bytes=self.step.gradient_bytes)
        return sync_choice.MeasuredExchange(self.link(case), work, self.placement.gpus)

    def link(self, case: Case) -> DeviceLink:
        """The slowest link of a ring of all GPUs."""
        machine, machines = self.placement.machine, self.placement.machines
        bandwidth, latency_us = math.inf, 0.0
        if self.placement.gpus > machines:
            inside = links()[machine.link]
            bandwidth, latency_us = inside.gb_per_s.rate(case) * 1e9, inside.latency_us.time(case)
        if machines > 1:
            bandwidth = min(bandwidth, self.network(case))
            latency_us = max(latency_us, UNCERTAIN["network_latency_us"].time(case))
        return DeviceLink(latency_us * 1e-6, bandwidth, has_tree=machines > 1)

    def network(self, case: Case) -> float:
        """Bytes per second of one process of a machine."""
        return UNCERTAIN["network_fraction"].rate(case) * self.placement.machine.network_gbit / 8 * 1e9

    # Startup, checkpoints, interruptions

    def startup(self, case: Case) -> float:
        machine = self.placement.machine
        own = UNCERTAIN["cpu_startup_s"] if machine.accelerator == "cpu" else UNCERTAIN["startup_s"]
        return own.time(case) + (0.0 if machine.is_this else UNCERTAIN["machine_start_s"].time(case))

    def checkpoint_interval(self, training_s: float) -> float:
        """Seconds of training between checkpoints, at most the whole training."""
        every, job = self.job.checkpoint_every, self.job
        images = {"epochs": job.num_images, "steps": self.step.batch_size * self.placement.gpus}
        if every.unit == "minutes":
            interval = every.value * 60
        else:
            interval = every.value * images[every.unit] * training_s / job.images_seen
        return min(interval, training_s) if interval > 0 else training_s

    def interruptions(self, case: Case, work_s: float, interval: float, restart_s: float) -> _Case:
        """The expected rework of a spot machine, and the wait for another one.

        Interruptions come at exponentially distributed intervals of mean M. With a checkpoint after every tau seconds,
        and R seconds for a restart, the expected time of a segment is (M + R) (exp(tau / M) - 1): Daly 2006, "A higher
        order estimate of the optimum checkpoint interval", equation 13 without failures in a restart. At the low end
        the state is saved within the notice (30 s on GCP, 2 min on AWS), and only the restart is lost.
        """
        placement = self.placement
        if not placement.spot:
            return {"rework": 0.0, "wait": 0.0, "preemptions": 0.0}
        mean_s = 3600 * UNCERTAIN["preemption_interval_h"].rate(case) / placement.machines
        segments = max(1.0, work_s / interval)
        total_s = segments * (mean_s + restart_s) * math.expm1(min(work_s / segments / mean_s, 50.0))
        if case == "low":
            total_s = work_s * (1 + restart_s / mean_s)
        count = total_s / (mean_s + restart_s)
        return {"rework": total_s - work_s, "wait": count * UNCERTAIN["spot_wait_s"].time(case), "preemptions": count}

    # Loading

    def joint_rate(self, device_rate: float, loader_rate: float) -> float:
        """Images per second of a device and a loader: the slower one; on a CPU both need the same cores."""
        if self.placement.machine.accelerator == "cpu":
            return 1 / (1 / device_rate + 1 / loader_rate)
        return min(device_rate, loader_rate)

    def loader_rate(self, case: Case, *, is_first: bool) -> tuple[float, str]:
        """(images per second, what limits them) in the first epoch or later."""
        job, machine, count = self.job, self.placement.machine, self.placement.machines
        vcpus = machine.vcpus * count
        if machine.accelerator != "cpu":  # training on a CPU takes its cores from decoding: `joint_rate`
            vcpus = max(0.5 * count, vcpus - CPU_OF_TRAINING_THREAD * self.placement.gpus)
        speed = 1.0 if machine.is_this else UNCERTAIN["vcpu_speed"].rate(case)
        has_ssd = machine.ssd_gb and not machine.is_this
        disk = (UNCERTAIN["ssd_bytes_per_s"] if has_ssd else UNCERTAIN["disk_bytes_per_s"]).rate(case)
        core_s, read_bytes, bandwidth, kind = job.demand.seconds, job.demand.encoded_bytes, disk, "disk"
        if not is_first and job.cache_inputs is not None and self.cache() != "none":
            core_s = max(core_s - job.cache_inputs.decode_s, MIN_CACHED_FRACTION * core_s)
            read_bytes = job.cache_inputs.cached_bytes / max(1, job.cache_inputs.num_images)
        elif job.is_remote:
            bandwidth, kind = min(UNCERTAIN["bucket_bytes_per_s"].rate(case), self.network(case)), "bucket"
        half_memory = FREE_MEMORY_FRACTION * machine.memory_gib * GIB / 2
        if not is_first and kind == "disk" and read_bytes * job.num_images / count <= half_memory:
            read_bytes = 0.0  # the kernel keeps the files in memory
        decode_rate = vcpus * speed * LOADER_CORE_FRACTION / max(core_s, 1e-9)
        read_rate = bandwidth * count / read_bytes if read_bytes else math.inf
        return (decode_rate, "decoding") if decode_rate <= read_rate else (read_rate, kind)

    def cache(self) -> str:
        """Where decoded images are kept."""
        job, machine = self.job, self.placement.machine
        if job.cache is not None or job.cache_inputs is None:
            return job.cache or "none"
        inputs = job.cache_inputs
        if not machine.is_this:
            inputs = dataclasses.replace(
                inputs,
                free_memory_bytes=int(FREE_MEMORY_FRACTION * machine.memory_gib * GIB),
                free_disk_bytes=int(max(machine.ssd_gb, BOOT_DISK_GB) * 1e9 / 2),
                network_file_system=None,
            )
        kind = choose_cache(inputs)[0]
        return "none" if kind == "ram" and machine.gpus > 1 else kind  # processes do not share it

    def limited_by(self, expected: _Case) -> str:
        """What most of the expected time of the training steps is spent on or waiting for."""
        is_first = self.job.images_seen < 2 * self.job.num_images
        loader, kind = self.loader_rate("expected", is_first=is_first)
        if loader < expected["device_img_per_s"]:
            return kind
        if self.placement.gpus > 1 and self.exposed_s(self.step.step_s, "expected") > expected["step_s"] / 4:
            return "communication"
        return self.step.limited_by
