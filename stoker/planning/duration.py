"""How long a training takes on a machine, and what it costs: one model, computed for the low end, the expectation and
the high end of everything that is uncertain.

The time of a step comes from `predict.py`. Added here: the exchange of gradients between GPUs, loading, evaluation,
checkpoints, startup, and on spot machines the expected rework. The formulas and their sources are in docs/plan.md. Not
here: which machine to take (`recommend.py`).
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Literal, get_args

import msgspec

from stoker.config.durations import Duration
from stoker.config.sync_method import PLAIN, SyncMethod, parse_sync
from stoker.data.images.cache_policy import DISK_BYTES_PER_S, CachePolicyInputs, choose_cache
from stoker.hardware.exchange_cost import Link, Workload, expected_maximum, step_cost
from stoker.planning.estimate import Case, Estimate, around, exactly, over_cases
from stoker.planning.machines import GIB, Machine, links
from stoker.planning.predict import LoaderDemand, StepPrediction
from stoker.report import format as fmt
from stoker.training.defaults import sync_choice

VCPU_SPEED = Estimate(0.55, 0.8, 1.2)
"""Images that a vCPU decodes, relative to a core of this machine. A vCPU of GCP and AWS is a hardware thread; two
threads of one core do 1.1 to 1.3 times the work of one (0.55 to 0.65 each). If the cores here are such threads too, 1;
newer CPUs are up to 1.2 times as fast. Heuristic."""
LOADER_CORE_FRACTION = 0.9
"""CPU utilization that decoding workers reach (`report/sizing.py`)."""
CPU_OF_TRAINING_THREAD = 1.0
"""vCPUs per GPU for the thread that issues the steps."""
BUCKET_BYTES_PER_S = Estimate(0.3e9, 0.8e9, 1.2e9)
"""Of one process that reads objects of about 100 KB. High: what obstore reaches with one core, 10,800 objects of 110 KB
per second. Low and expected are heuristics; no bucket has been measured from a GPU machine."""
NETWORK_FRACTION = Estimate(0.3, 0.5, 0.8)
"""Fraction of a machine's network bandwidth that one process reaches. Heuristic; AWS limits one flow to 5 Gbit/s."""
DISK_BANDWIDTH = Estimate(240e6, DISK_BYTES_PER_S, 1.2e9)
"""Bytes per second of a network disk. Expected: the value of `data/images/cache_policy.py`; low: a balanced disk."""
SSD_BANDWIDTH = Estimate(0.7e9, 1.4e9, 2.6e9)
"""The same of local SSDs: one to several NVMe devices of GCP at 0.66 GB/s each."""
BOOT_DISK_GB = 100
"""Assumed size of the disk of a machine without local SSDs. A cache may take half of it."""
FREE_MEMORY_FRACTION = 0.85
"""Fraction of a machine's memory that is free before the training. Heuristic."""
MIN_CACHED_FRACTION = 0.07
"""CPU time of an image from the cache of decoded images, as a fraction of decoding it, at least: 1.23 of 16.8 ms for
4,000 × 3,000 pixels (docs/benchmarks.md)."""

STEP_SPREAD = Estimate(0.0, 0.021, 0.063)
"""Standard deviation of a GPU's step time, divided by the mean: all wait for the slowest, whose expected delay is that
of the largest of N normal numbers (`hardware/exchange_cost.py`). So on 8 GPUs 0, 3, 9 % of a step: NVIDIA's SSD300
reaches 97 to 99 % of 8 times one A100, 91 to 98 % of 8 V100, communication included (DeepLearningExamples,
PyTorch/Detection/SSD, 22.10)."""
DEVICE_FAILURE_S = Estimate(10_000 * 3600.0, 50_000 * 3600.0, 200_000 * 3600.0)
"""Mean time between failures that end a training, for one GPU among several machines. Expected: 419 unexpected
interruptions in 54 days on 16,384 H100 ("The Llama 3 Herd of Models", 2024, section 3.3.4); the ends are heuristic."""
NETWORK_LATENCY_US = Estimate(20.0, 50.0, 150.0)
"""Of a message between machines. Heuristic."""

EVAL_COST = Estimate(0.25, 0.4, 0.7)
"""Time to evaluate an image, relative to training on it: the forward pass is a third of a step, NMS comes on top."""
STATE_BYTES_PER_PARAMETER = 16
"""Of a checkpoint: weights, EMA weights and up to two moments in fp32."""
CHECKPOINT_BYTES_PER_S = Estimate(2e9, 8e9, 20e9)
"""Speed at which the state is copied to the host; training waits for this only, a thread writes the file. PCIe 3 to 4
with pinned memory; low: pageable memory. Heuristic."""
STARTUP_S = Estimate(15.0, 45.0, 180.0)
"""From the command to the first step on a GPU: imports, index, weights, trials of the batch size. On a CPU it is 4.4 s
(docs/benchmarks.md). Heuristic: no GPU has measured it. Compiling is not in it, as the predicted step is eager."""
CPU_STARTUP_S = Estimate(4.0, 8.0, 30.0)
MACHINE_START_S = Estimate(40.0, 120.0, 420.0)
"""From the request of a machine to the command, billed: boot, driver, container image. Heuristic."""

PREEMPTION_INTERVAL_S = Estimate(1.4 * 3600, 4.4 * 3600, 228 * 3600.0)
"""Mean time between preemptions of a spot machine; the intervals are taken as exponentially distributed. Expected: 802
preemptions in 3,497 hours of p3.2xlarge in seven traces of 2023 (github.com/skypilot-org/spot-traces, those of Wu et
al., "Can't Be Late", NSDI 2024); low: the worst of their zones. High: 5 to 15 % of the machines per day, which GCP
names as usual."""
SPOT_WAIT_S = Estimate(640.0, 4_900.0, 10_400.0)
"""Time until a preempted machine can be had again in the same zone, not billed. Low: the first quartile of the waits in
four of these traces; expected: their mean; high: that of the worst zone. The median is 24 minutes."""

MEMORY_FITS = Literal["yes", "perhaps", "no"]


class TrainingJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained, whatever the machine."""

    num_images: int
    """Of the training split."""
    num_val_images: int
    images_seen: float
    """Images that are trained on, over all epochs."""
    num_evaluations: float
    checkpoint_every: Duration
    """0: at the end only."""
    demand: LoaderDemand
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
    micro_batches: int
    precision: str
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
    device_img_per_s: Estimate
    """Images per second that the GPUs can train on."""
    loader_img_per_s: Estimate
    """Images per second that the loader delivers, after the first epoch."""
    first_epoch_img_per_s: Estimate
    """The same in the first epoch, when nothing is cached."""
    img_per_s: Estimate
    """Mean over the training steps of the run."""
    vcpus: float
    """Of all machines."""
    required_vcpus: float
    """vCPUs with which decoding would keep the GPUs busy, as expected."""
    required_mb_per_s: float
    """Bytes that would have to be read for that."""
    cache: str
    """none, ram, disk: where decoded images are kept."""
    limited_by: str
    """compute, memory, launches, communication, decoding, bucket or disk."""
    utilization: Estimate
    """Fraction of the whole time in which the GPUs compute."""
    parts_s: dict[str, Estimate]
    """startup, training, evaluation, checkpoints, rework, wait: they add up to the duration, as expected."""
    preemptions: Estimate | None = None
    """Expected number; None: not a spot machine."""
    best_checkpoint_every_s: float | None = None
    """Interval between checkpoints that costs least; None: not a spot machine."""
    duration_s: Estimate
    cost: Estimate | None
    """US dollars."""

    @property
    def label(self) -> str:
        """The machine as the user names it."""
        count = f"{self.machines} × " if self.machines > 1 else ""
        return f"{count}{self.machine}" + (" spot" if self.spot else "")


@dataclasses.dataclass(frozen=True)
class _Parts:
    """Seconds, and images per second, of one case."""

    step: float
    device_rate: float
    first_rate: float
    loader_rate: float
    startup: float
    training: float
    evaluation: float
    checkpoints: float
    rework: float = 0.0
    wait: float = 0.0
    preemptions: float = 0.0

    @property
    def billed(self) -> float:
        return self.startup + self.training + self.evaluation + self.checkpoints + self.rework

    @property
    def duration(self) -> float:
        return self.billed + self.wait


PARTS = ("startup", "training", "evaluation", "checkpoints", "rework", "wait")


def plan_machine(placement: Placement, step: StepPrediction, job: TrainingJob) -> MachinePlan:
    """The prediction for one placement. step: of one of its GPUs."""
    return _Model(placement, step, job).plan()


@dataclasses.dataclass(frozen=True)
class _Model:
    placement: Placement
    step: StepPrediction
    job: TrainingJob

    def plan(self) -> MachinePlan:
        placement, step, job = self.placement, self.step, self.job
        machine = placement.machine
        parts: dict[Case, _Parts] = {case: self.parts(case, case) for case in get_args(Case)}
        price = placement.price
        duration = over_cases(lambda case: parts[case].duration)
        cost = None
        if price is not None:
            cost = over_cases(lambda case: parts[case].billed / 3600 * getattr(price, case))
        busy = over_cases(self.utilization)
        expected_rate = parts["expected"].device_rate
        return MachinePlan(
            machine=machine.name,
            cloud=machine.cloud,
            accelerator=machine.accelerator,
            gpus=placement.gpus,
            machines=placement.machines,
            spot=placement.spot,
            price_per_hour=price,
            batch_size=step.batch_size * placement.gpus,
            micro_batches=step.micro_batches,
            precision=step.precision,
            peak_bytes=Estimate(
                step.peak_bytes * max(0.0, 1 - step.peak_error),
                step.peak_bytes,
                step.peak_bytes * (1 + step.peak_error),
            ),
            memory_bytes=step.memory_bytes,
            fits=self.fits(),
            problem=self.problem(),
            step_s=over_cases(lambda case: parts[case].step),
            device_img_per_s=over_cases(lambda case: parts[case].device_rate),
            loader_img_per_s=over_cases(lambda case: parts[case].loader_rate),
            first_epoch_img_per_s=over_cases(lambda case: parts[case].first_rate),
            img_per_s=over_cases(lambda case: job.images_seen / parts[case].training),
            vcpus=machine.vcpus * placement.machines,
            required_vcpus=expected_rate * job.demand.decode_core_s / (LOADER_CORE_FRACTION * VCPU_SPEED.expected)
            + placement.gpus * CPU_OF_TRAINING_THREAD,
            required_mb_per_s=expected_rate * job.demand.bytes_per_image / 1e6,
            cache=self.cache(),
            sync=None if placement.gpus == 1 else str(self.sync[0]),
            sync_reason=self.sync[1],
            limited_by=self.limited_by(parts["expected"]),
            utilization=busy,
            parts_s={name: over_cases(functools.partial(_part, parts, name)) for name in PARTS},
            preemptions=over_cases(lambda case: parts[case].preemptions) if placement.spot else None,
            best_checkpoint_every_s=best_checkpoint_interval_s(step) if placement.spot else None,
            duration_s=duration,
            cost=cost,
        )

    # Memory

    def fits(self) -> MEMORY_FITS:
        if not self.step.fits:
            return "no"
        return "yes" if self.step.peak_bytes * (1 + self.step.peak_error) <= self.step.memory_bytes else "perhaps"

    def problem(self) -> str:
        """Why the training is impossible there; empty if it is not."""
        if self.step.fits:
            return ""
        return f"does not fit the memory: {fmt.memory(self.step.peak_bytes, self.step.memory_bytes)}"

    # Time

    def parts(self, step_case: Case, rest_case: Case) -> _Parts:
        """All times of a case; the step's time may be at another end of its band than the rest."""
        job, placement = self.job, self.placement
        step_s = self.step_s(step_case, rest_case)
        device_rate = self.step.batch_size * placement.gpus / step_s
        first_loader, _ = self.loader_rate(rest_case, is_first=True)
        later_loader, _ = self.loader_rate(rest_case, is_first=False)
        first_images = min(job.images_seen, job.num_images)
        first_rate, later_rate = (self.joint_rate(device_rate, loader) for loader in (first_loader, later_loader))
        training = first_images / first_rate + (job.images_seen - first_images) / later_rate
        eval_rate = self.joint_rate(device_rate / _time(EVAL_COST, rest_case), first_loader)
        evaluation = job.num_evaluations * job.num_val_images / eval_rate
        save_s = self.step.parameters * STATE_BYTES_PER_PARAMETER / _rate(CHECKPOINT_BYTES_PER_S, rest_case)
        interval = self.checkpoint_interval(training)
        startup = self.startup(rest_case)
        parts = _Parts(
            step=step_s,
            device_rate=device_rate,
            first_rate=first_loader,
            loader_rate=later_loader,
            startup=startup,
            training=training,
            evaluation=evaluation,
            checkpoints=save_s * max(1.0, training / interval),
        )
        if placement.spot:
            return self.with_preemptions(parts, interval, rest_case)
        return self.with_failures(parts, interval, rest_case) if placement.machines > 1 else parts

    def step_s(self, step_case: Case, rest_case: Case) -> float:
        """A step of all GPUs: computing, waiting for the slowest, and what of the exchange is not hidden."""
        compute_s = self.compute_s(step_case)
        if self.placement.gpus == 1:
            return compute_s
        waiting = _time(STEP_SPREAD, rest_case) * expected_maximum(self.placement.gpus) * compute_s
        return compute_s + waiting + self.exposed_s(compute_s, rest_case)

    def compute_s(self, case: Case) -> float:
        """Time in which a GPU computes in a step."""
        return _time(around(self.step.step_s, self.step.step_error), case)

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

    def exchange(self, compute_s: float, case: Case) -> sync_choice.Measured:
        """What `--sync auto` would measure there; without the time of compressing, which no GPU has measured."""
        placement, size_bytes = self.placement, self.step.gradient_bytes
        work, link = Workload(compute_s=compute_s, gradient_bytes=size_bytes), self.link(case)
        return sync_choice.Measured(link, work, placement.gpus)

    def link(self, case: Case) -> Link:
        """The slowest link of a ring of all GPUs."""
        placement = self.placement
        machine, gpus = placement.machine, placement.gpus
        link = links()[machine.link] if gpus > placement.machines else None
        bandwidth = math.inf if link is None else _rate(link.gb_per_s, case) * 1e9
        latency_us = 0.0 if link is None else _time(link.latency_us, case)
        if placement.machines > 1:
            bandwidth = min(bandwidth, _rate(NETWORK_FRACTION, case) * machine.network_gbit / 8 * 1e9)
            latency_us = max(latency_us, _time(NETWORK_LATENCY_US, case))
        return Link(latency_us * 1e-6, bandwidth, has_tree=placement.machines > 1)

    def startup(self, case: Case) -> float:
        machine = self.placement.machine
        own_s = _time(CPU_STARTUP_S if machine.accelerator == "cpu" else STARTUP_S, case)
        return own_s + (0.0 if machine.is_this else _time(MACHINE_START_S, case))

    def checkpoint_interval(self, training_s: float) -> float:
        """Seconds of training between checkpoints, at most the whole training."""
        every, job = self.job.checkpoint_every, self.job
        images = {"minutes": 0.0, "epochs": job.num_images, "steps": self.step.batch_size * self.placement.gpus}
        if every.unit == "minutes":
            interval = every.value * 60
        else:
            interval = every.value * images[every.unit] * training_s / job.images_seen
        return min(interval, training_s) if interval > 0 else training_s

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
        speed = 1.0 if machine.is_this else _rate(VCPU_SPEED, case)
        if machine.accelerator != "cpu":  # training on a CPU takes its cores from decoding: `joint_rate`
            vcpus = max(0.5 * count, vcpus - CPU_OF_TRAINING_THREAD * self.placement.gpus)
        core_s, read_bytes, kind = job.demand.decode_core_s, job.demand.bytes_per_image, "disk"
        disk = _rate(SSD_BANDWIDTH if machine.ssd_gb and not machine.is_this else DISK_BANDWIDTH, case)
        bandwidth = disk
        memory_bytes = FREE_MEMORY_FRACTION * machine.memory_gib * GIB
        if job.is_remote:
            network = _rate(NETWORK_FRACTION, case) * machine.network_gbit / 8 * 1e9
            bandwidth, kind = min(_rate(BUCKET_BYTES_PER_S, case), network), "bucket"
        if not is_first and (cached := self.cached_image()) is not None:
            core_s, read_bytes = cached
            bandwidth, kind = disk, "disk"
            if read_bytes * job.num_images / count <= memory_bytes / 2:
                read_bytes = 0.0
        elif not is_first and not job.is_remote and read_bytes * job.num_images / count <= memory_bytes / 2:
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
                workers=max(1, int(machine.vcpus) - machine.gpus),
                network_file_system=None,
            )
        return choose_cache(inputs)[0]

    def cached_image(self) -> tuple[float, float] | None:
        """(core-seconds, bytes) of an image from the cache of decoded images; None without a cache."""
        inputs, core_s = self.job.cache_inputs, self.job.demand.decode_core_s
        if inputs is None or self.cache() == "none":
            return None
        entry_bytes = inputs.cached_bytes / max(1, inputs.num_images)
        return max(core_s - inputs.decode_s, MIN_CACHED_FRACTION * core_s), entry_bytes

    def limited_by(self, parts: _Parts) -> str:
        """What most of the expected time of the training steps is spent on or waiting for."""
        is_first = self.job.images_seen < 2 * self.job.num_images
        loader, kind = self.loader_rate("expected", is_first=is_first)
        if loader < parts.device_rate:
            return kind
        if self.placement.gpus > 1 and self.exposed_s(self.step.step_s, "expected") > parts.step / 4:
            return "communication"
        return self.step.limited_by

    def utilization(self, case: Case) -> float:
        """Fraction of the time in which the GPUs compute: high with slow steps while everything else is fast."""
        opposite: dict[Case, Case] = {"low": "high", "expected": "expected", "high": "low"}
        parts, compute_s = self.parts(opposite[case], case), self.compute_s(opposite[case])
        steps = self.job.images_seen / (self.step.batch_size * self.placement.gpus)
        return min(1.0, (steps * compute_s + parts.evaluation / 2) / parts.duration)

    # Preemptions

    def with_preemptions(self, parts: _Parts, interval: float, case: Case) -> _Parts:
        """Adds the expected rework of a spot machine.

        Preemptions come at exponentially distributed intervals of mean M. With a checkpoint after every tau seconds,
        and R seconds for a restart, the expected time of a segment is (M + R) (exp(tau / M) - 1): Daly 2006, "A higher
        order estimate of the optimum checkpoint interval", equation 13 without failures in a restart. At the low end
        the state is saved within the notice (30 s on GCP, 2 min on AWS), and only the restart is lost.
        """
        return self.with_rework(parts, interval, case, _rate(PREEMPTION_INTERVAL_S, case) / self.placement.machines)

    def with_failures(self, parts: _Parts, interval: float, case: Case) -> _Parts:
        """Adds the expected rework of several machines that are not taken away, but may fail; in the same way."""
        failed = self.with_rework(parts, interval, case, _rate(DEVICE_FAILURE_S, case) / self.placement.gpus)
        return dataclasses.replace(failed, wait=0.0, preemptions=0.0)

    def with_rework(self, parts: _Parts, interval: float, case: Case, mean_s: float) -> _Parts:
        """Adds the rework after interruptions that come every `mean_s` seconds, as a mean."""
        restart_s = self.startup(case)
        work_s = parts.training + parts.evaluation + parts.checkpoints
        segments = max(1.0, work_s / interval)
        segment_s = work_s / segments
        with_rework_s = segments * (mean_s + restart_s) * math.expm1(min(segment_s / mean_s, 50.0))
        if case == "low":
            with_rework_s = work_s * (1 + restart_s / mean_s)
        preemptions = with_rework_s / (mean_s + restart_s)
        return dataclasses.replace(
            parts,
            rework=with_rework_s - work_s,
            wait=preemptions * _time(SPOT_WAIT_S, case),
            preemptions=preemptions,
        )


def _part(parts: Mapping[Case, _Parts], name: str, case: Case) -> float:
    value: float = getattr(parts[case], name)
    return value


def best_checkpoint_interval_s(step: StepPrediction) -> float:
    """Young's optimum of the interval between checkpoints on a spot machine, as expected."""
    save_s = step.parameters * STATE_BYTES_PER_PARAMETER / CHECKPOINT_BYTES_PER_S.expected
    return min(max(math.sqrt(2 * save_s * PREEMPTION_INTERVAL_S.expected), 10.0), 1800.0)


def _time(value: Estimate, case: Case) -> float:
    """An input that makes the run longer the larger it is."""
    return {"low": value.low, "expected": value.expected, "high": value.high}[case]


def _rate(value: Estimate, case: Case) -> float:
    """An input that makes the run shorter the larger it is."""
    return {"low": value.high, "expected": value.expected, "high": value.low}[case]
