"""Makes each fault of `diagnose_causes.py`: a case in, a plan of the job out."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.diagnosis import diagnose_driver
from benchmarks.diagnosis import diagnose_outside as outside
from benchmarks.diagnosis.diagnose_outside import Around

BATCH = 8
"""Batch size of `stoker train`."""
ROOM_BYTES = 100_000_000
"""Room on a disk with which `stoker train` starts."""


@dataclass(frozen=True)
class Machine:
    """Durations on this machine, measured when the benchmark starts."""

    step_s: float = 0.047
    """A step of `stoker train` on BATCH images."""
    decode_s: float = 25e-9
    """Decoding of a pixel of a PNG, including the rest of its loading."""
    evaluation_s: float = 0.3
    """Evaluation of `stoker train` on the data set with a long validation split."""
    image_bytes: float = 15_000
    """Mean size of an image in the bucket."""


@dataclass(frozen=True)
class Case:
    """A run to make. folder: the job's own, inside that of the benchmark; seed: of random numbers in the fault."""

    kind: str
    level: float
    strong: bool
    folder: Path
    machine: Machine
    seed: int


@dataclass(frozen=True)
class Plan:
    """One job with its fault. options: of the job's command; around: the fault outside it."""

    options: tuple[str, ...] = ()
    around: Callable[[], AbstractContextManager[Around]] = outside.nothing
    variables: dict[str, str] = field(default_factory=dict)
    data: str = "plain"
    """Of `stoker train`: one of `diagnose_data.SETS`, `pngN` of N pixels, or a bucket URI."""
    stretch: float = 1.0
    """Length of a step of `stoker train`, relative to a healthy one."""
    hang_s: float | None = None
    """The job does not end by itself: after so long without progress it is diagnosed, and then killed."""


Maker = Callable[[Case], Plan]


def healthy(case: Case) -> Plan:
    return simulated(diagnose_driver.nothing)(case) if case.kind == "simulated" else Plan()


def inside(fault: str, *more: str) -> Maker:
    """A fault in the job's own code."""
    return lambda case: Plan(("--fault", fault, "--level", f"{case.level:.4g}", *more))


def simulated(wrong: diagnose_driver.Wrong) -> Maker:
    def plan(case: Case) -> Plan:
        scene = diagnose_driver.scene(wrong, case.level, case.seed)
        return Plan(around=lambda: outside.driver(case.folder, scene))

    return plan


def slow_storage(case: Case) -> Plan:
    if case.kind != "stoker":
        return Plan(
            ("--fault", "slow_storage", "--level", f"{case.level:.4g}"),
            around=lambda: outside.slow_files(case.folder, "/images/"),
        )
    machine, stretch = case.machine, 1 / (1 - case.level)
    rate = BATCH * machine.image_bytes / (machine.step_s * stretch)
    bucket = case.folder.parent / "bucket"
    return Plan(
        ("--cache", "none"),
        around=lambda: outside.object_server(bucket, "images", bytes_per_s=rate, latency_s=0.005),
        data="gs://images",
        stretch=stretch,
    )


def slow_decode(case: Case) -> Plan:
    """Both cores decode, and one of them trains as well: a step that takes s and whose images take d of processor
    time ends after (s + d) / 2, if that is more than s."""
    if case.kind != "stoker":
        return inside("slow_decode", "--workers", "2")(case)
    decode_s = case.machine.step_s * (1 + case.level) / (1 - case.level)
    return Plan(("--cache", "none"), data=_png(case, decode_s), stretch=1 / (1 - case.level))


def one_loader(case: Case) -> Plan:
    """One thread decodes: a step ends when its images are there."""
    if case.kind != "stoker":
        return inside("one_loader", "--workers", "1")(case)
    decode_s = case.machine.step_s / (1 - case.level)
    return Plan(("--cache", "none", "--workers", "1"), data=_png(case, decode_s), stretch=1 / (1 - case.level))


def _png(case: Case, decode_s: float) -> str:
    """Images of which a batch takes so much CPU time."""
    side = (decode_s / BATCH / case.machine.decode_s) ** 0.5
    return f"png{max(64, round(side / 20) * 20)}"


def tiny_batch(case: Case) -> Plan:
    batch = ("--batch-size", str(int(case.level)))
    if case.kind == "stoker":
        return Plan(batch, stretch=0.35)
    return Plan((*batch, "--side", "32", "--width", "8"))


def memory_kill(case: Case) -> Plan:
    """level: millions of bytes above what the job needs; it takes 150 million a second."""
    size = int((case.level + 900) * 1e6)
    return Plan(("--fault", "leak", "--level", "150"), around=lambda: outside.memory_limit(size))


def disk_full(case: Case) -> Plan:
    """A training of stoker's own is refused where there is too little room for it, so something else takes it."""
    left_bytes = int(case.level * 1e6)
    if case.kind == "stoker":
        return Plan(around=lambda: outside.filling_disk(case.folder / "run", ROOM_BYTES, left_bytes))
    disk = case.folder / "disk"
    options = ("--fault", "disk_full", "--disk", str(disk))
    return Plan(options, around=lambda: outside.small_disk(disk, left_bytes))


def small_shm(case: Case) -> Plan:
    options = ("--fault", "small_shm", "--workers", "1")
    return Plan(options, around=lambda: outside.small_shm(int(case.level * 1000)))


def slow_link(case: Case) -> Plan:
    """A million numbers more in the exchange: 4 MB, that both ranks send over one loopback. A step computes 80 ms."""
    payload, step_s = 1_000_000, 0.08
    rate = 2 * 4 * payload / (step_s * case.level / (1 - case.level))
    return Plan(("--ranks", "2", "--payload", str(payload)), around=lambda: outside.slow_link(rate))


def evaluation(case: Case) -> Plan:
    if case.kind != "stoker":
        return inside("evaluation")(case)
    every = case.machine.evaluation_s * (1 - case.level) / case.level / case.machine.step_s
    return Plan(("--eval-every", str(max(1, round(every)))), data="long_val", stretch=1 / (1 - case.level))


def slow_checkpoint(case: Case) -> Plan:
    if case.kind == "stoker":
        # Written in the background: the next checkpoint waits for it, so writing has to take ten steps and the loss.
        stretch = 1 / (1 - case.level)
        stall_s = case.machine.step_s * 10 * stretch / WRITES
        return Plan(
            ("--checkpoint-every", "10"),
            around=lambda: outside.slow_files(case.folder, "/checkpoints/", stall_s),
            stretch=stretch,
        )
    (case.folder / "slow").mkdir()
    return Plan(
        ("--fault", "slow_checkpoint", "--level", f"{case.level:.4g}"),
        around=lambda: outside.slow_files(case.folder, "/slow/"),
    )


WRITES = 8
"""Of a checkpoint of retinanet_tiny_fpn."""


def oversubscription(case: Case) -> Plan:
    """torch takes no more threads than cores from the environment, so the job asks for them itself."""
    options = ("--fault", "oversubscription", "--level", f"{int(case.level)}")
    return Plan(options, variables={"GOMP_SPINCOUNT": "100000"})


def quota(case: Case) -> Plan:
    return Plan(around=lambda: outside.cpu_quota(case.level), stretch=1 / case.level)


def neighbors(case: Case) -> Plan:
    return Plan(around=lambda: outside.busy_neighbors(int(case.level)))


def learning_rate(case: Case) -> Plan:
    more = ("--clip-grad-norm", "0", "--warmup-steps", "1") if case.kind == "stoker" and case.level > 1 else ()
    return Plan(("--lr", f"{case.level:.3g}", *more))


def hang(case: Case) -> Plan:
    options = ("--fault", "hang", "--ranks", "2", "--level", f"{case.level:.4g}")
    if case.strong:  # gloo gives up
        return Plan((*options, "--timeout", "6"))
    return Plan(options, hang_s=15.0)


def bad_images(case: Case) -> Plan:
    return Plan(data="broken" if case.strong else "one_broken")
