"""The causes that `diagnose.py` injects, as data: in which jobs, how large, how made, which names are right.

Kinds of jobs: `stoker` (`stoker train` on drawn pictures), `measure` (a plain PyTorch loop in `stoker.measure`),
`watch` (the same loop, unchanged, under `stoker watch`), `keras` (a Keras fit under `stoker watch`). A level is drawn
within `weak` or `strong`; `unit` says of what. `accepts` are the ids of the catalogue that are right.
Causes that need a GPU run a plain job beside a simulated driver, and are named so.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import diagnose_outside as outside
from diagnose_outside import Around

Range = tuple[float, float]
KINDS = ("stoker", "measure", "watch", "keras")


@dataclass(frozen=True)
class Case:
    """What is asked for. folder: the job's own."""

    kind: str
    level: float
    folder: Path


@dataclass(frozen=True)
class Plan:
    """One job with its fault. options: of the job's command; around: the fault outside it."""

    options: tuple[str, ...] = ()
    around: Callable[[], AbstractContextManager[Around]] = outside.nothing
    variables: dict[str, str] = field(default_factory=dict)
    data: str = "plain"
    """Which of the drawn data sets."""
    live_s: float | None = None
    """The job does not end by itself: it is asked about after so long, while it lives, and then killed."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    name: str
    kinds: tuple[str, ...]
    weak: Range
    strong: Range
    unit: str
    accepts: frozenset[str]
    plan: Callable[[Case], Plan]
    """What is run."""
    known: bool = False
    """The injector says how much time it took."""
    cores: float = 1.0
    """That the job keeps busy: others run beside it only where they do not take them."""
    simulated: bool = False
    seconds: float | None = None
    """Of the loop, where it is not the usual."""


SHARE_WEAK, SHARE_STRONG = (0.14, 0.25), (0.40, 0.65)
"""Of the loop's time, that a fault takes."""


def inside(fault: str, *more: str) -> Callable[[Case], Plan]:
    """A fault of the job's own code."""
    return lambda case: Plan(("--fault", fault, "--level", f"{case.level:.4g}", *more))


def _slow_storage(case: Case) -> Plan:
    if case.kind == "stoker":
        # One step on one of these cores takes STEP_S and eight pictures; the link gives them in STEP_S / (1 - share).
        per_step = 8 * BUCKET_PICTURE_BYTES
        rate = per_step * (1 - case.level) / STOKER_STEP_S
        return Plan(
            around=lambda: outside.object_server(
                case.folder.parent / "bucket", "pictures", bytes_per_s=rate, latency_s=0.005
            ),
            data="gs://pictures",
        )
    return Plan(
        ("--fault", "slow_storage", "--level", f"{case.level:.4g}"),
        around=lambda: outside.slow_files(case.folder, "/pictures/"),
    )


STOKER_STEP_S = 0.047
"""Of `stoker train` with the settings of `diagnose.py`; set anew by its first healthy run."""
BUCKET_PICTURE_BYTES = 20_000


def _slow_decode(case: Case) -> Plan:
    if case.kind == "stoker":
        return Plan(data="large" if case.level >= SHARE_STRONG[0] else "medium")
    return inside("slow_decode")(case)


def _one_thread(case: Case) -> Plan:
    if case.kind == "stoker":
        return Plan(("--threads", "1"), data="large" if case.level >= SHARE_STRONG[0] else "medium")
    return inside("one_loader_thread", "--workers", "1")(case)


def _tiny_batch(case: Case) -> Plan:
    return Plan(("--batch", str(int(case.level)), *(() if case.kind == "stoker" else ("--side", "32", "--width", "8"))))


def _leak(case: Case) -> Plan:
    return inside("leak")(case)


def _memory_kill(case: Case) -> Plan:
    """level: bytes above what the job needs, in millions; it takes 100 million a second."""
    needs = 900e6
    return Plan(
        ("--fault", "leak", "--level", "150"),
        around=lambda: outside.memory_limit(int(needs + case.level * 1e6)),
    )


def _disk_full(case: Case) -> Plan:
    disk = case.folder / ("run" if case.kind == "stoker" else "disk")
    more = () if case.kind == "stoker" else ("--fault", "disk_full", "--disk", str(disk))
    return Plan(more, around=lambda: outside.small_disk(disk, int(case.level * 1e6)))


def _small_shm(case: Case) -> Plan:
    options = ("--fault", "small_shm", "--workers", "1", "--batch", "16")
    return Plan(options, around=lambda: outside.small_shm(int(case.level * 1000)))


def _slow_link(case: Case) -> Plan:
    """A payload of a million numbers: 4 MB that both ranks send over one loopback; a step computes 80 ms."""
    payload, step_s = 1_000_000, 0.08
    rate = 2 * 4 * payload / (step_s * case.level / (1 - case.level))
    options = ("--ranks", "2", "--payload", str(payload))
    return Plan(options, around=lambda: outside.slow_link(rate))


def _evaluation(case: Case) -> Plan:
    if case.kind == "stoker":
        return Plan(("--eval-every", "10" if case.level >= SHARE_STRONG[0] else "45"), data="long_val")
    return inside("evaluation")(case)


def _slow_checkpoint(case: Case) -> Plan:
    if case.kind == "stoker":
        # Each checkpoint is written in the background; the next one waits for it.
        return Plan(
            ("--checkpoint-every", "10"),
            around=lambda: outside.slow_files(
                case.folder, "/checkpoints/", STOKER_STEP_S * 10 * case.level / (1 - case.level) / 3
            ),
        )
    (case.folder / "slow").mkdir()
    return Plan(
        ("--fault", "slow_checkpoint", "--level", f"{case.level:.4g}"),
        around=lambda: outside.slow_files(case.folder, "/slow/"),
    )


def _oversubscribed(case: Case) -> Plan:
    threads = str(int(case.level))
    return Plan(variables={"OMP_NUM_THREADS": threads, "GOMP_SPINCOUNT": "100000", "MKL_NUM_THREADS": threads})


def _quota(case: Case) -> Plan:
    return Plan(around=lambda: outside.cpu_quota(case.level))


def _rate(case: Case) -> Plan:
    more = ("--clip", "0", "--warmup", "1") if case.kind == "stoker" and case.level > 1e-3 else ()
    return Plan(("--rate", f"{case.level:.3g}", *more))


def _hang(case: Case) -> Plan:
    options = ("--fault", "hang", "--ranks", "2", "--level", f"{case.level:.4g}")
    if case.level >= 1:  # gloo gives up
        return Plan((*options, "--timeout", "6"))
    return Plan((*options, "--timeout", "600"), live_s=24.0)


def _loader_crash(case: Case) -> Plan:
    if case.kind == "stoker":
        return Plan(data="broken" if case.level >= 1 else "one_broken")
    return inside("loader_crash", "--workers", "1")(case)


def _straggler(case: Case) -> Plan:
    return inside("straggler", "--ranks", "2")(case)


def _neighbours(case: Case) -> Plan:
    return Plan(around=lambda: outside.busy_neighbours(int(case.level)))


CAUSES: dict[str, Cause] = {
    cause.name: cause
    for cause in (
        Cause(name="healthy", kinds=KINDS, weak=(0, 0), strong=(0, 0), unit="", accepts=frozenset(),
              plan=lambda _: Plan(), cores=2),
        Cause(name="slow_storage", kinds=("stoker", "measure", "watch", "keras"), weak=SHARE_WEAK, strong=SHARE_STRONG,
              unit="share of the loop", accepts=frozenset({"slow_storage", "input_bound"}),
              plan=_slow_storage, known=True, cores=1),
        Cause(name="slow_decode", kinds=("stoker", "measure", "watch"), weak=SHARE_WEAK, strong=SHARE_STRONG,
              unit="share of the loop", accepts=frozenset({"input_bound"}), plan=_slow_decode, known=True, cores=2),
        Cause(name="one_loader_thread", kinds=("stoker", "measure", "watch"), weak=SHARE_WEAK, strong=SHARE_STRONG,
              unit="share of the loop", accepts=frozenset({"input_bound"}), plan=_one_thread, known=True, cores=2),
        Cause(name="python_bound", kinds=("measure", "watch"), weak=SHARE_WEAK, strong=SHARE_STRONG,
              unit="share of the loop", accepts=frozenset({"python_bound"}), plan=inside("python_bound"), known=True,
              cores=2),
        Cause(name="tiny_batch", kinds=("stoker", "watch"), weak=(2, 2.99), strong=(1, 1), unit="pictures",
              accepts=frozenset({"batch_too_small"}), plan=_tiny_batch, cores=2),
        Cause(name="host_wait", kinds=("measure", "watch"), weak=SHARE_WEAK, strong=SHARE_STRONG,
              unit="share of the loop", accepts=frozenset({"host_waits"}), plan=inside("host_wait"), known=True,
              cores=1),
        Cause(name="leak", kinds=("measure", "watch"), weak=(20, 40), strong=(80, 150), unit="MB/s",
              accepts=frozenset({"host_memory_leak"}), plan=_leak, cores=2),
        Cause(name="memory_kill", kinds=("watch", "measure"), weak=(400, 700), strong=(100, 200), unit="MB of room",
              accepts=frozenset({"host_memory_killed"}), plan=_memory_kill, cores=2),
        Cause(name="disk_full", kinds=("stoker", "watch"), weak=(4, 8), strong=(0.5, 1.5), unit="MB",
              accepts=frozenset({"disk_full", "checkpoints_failed"}), plan=_disk_full, cores=2),
        Cause(name="small_shm", kinds=("measure", "watch"), weak=(900, 1500), strong=(32, 128), unit="kB",
              accepts=frozenset({"shared_memory_full"}), plan=_small_shm, cores=2),
        Cause(name="straggler", kinds=("measure",), weak=SHARE_WEAK, strong=SHARE_STRONG, unit="share of the loop",
              accepts=frozenset({"straggler", "slow_rank"}), plan=_straggler, known=True, cores=2),
        Cause(name="slow_link", kinds=("measure",), weak=SHARE_WEAK, strong=SHARE_STRONG, unit="share of the loop",
              accepts=frozenset({"communication_bound"}), plan=_slow_link, known=True, cores=2),
        Cause(name="evaluation", kinds=("stoker", "measure", "keras"), weak=SHARE_WEAK, strong=SHARE_STRONG,
              unit="share of the loop", accepts=frozenset({"evaluation_heavy"}), plan=_evaluation, known=True, cores=2),
        Cause(name="slow_checkpoint", kinds=("stoker", "measure", "watch"), weak=SHARE_WEAK, strong=SHARE_STRONG,
              unit="share of the loop", accepts=frozenset({"checkpoint_heavy"}), plan=_slow_checkpoint, known=True,
              cores=1),
        Cause(name="compile", kinds=("measure", "watch"), weak=SHARE_WEAK, strong=SHARE_STRONG,
              unit="share of the loop", accepts=frozenset({"recompiles"}), plan=inside("compile"), known=True, cores=2),
        Cause(name="oversubscription", kinds=("measure", "watch"), weak=(6, 10), strong=(16, 32), unit="threads",
              accepts=frozenset({"threads_oversubscribed"}), plan=_oversubscribed, cores=2),
        Cause(name="quota", kinds=("stoker", "measure", "watch"), weak=(0.6, 0.75), strong=(0.25, 0.4), unit="cores",
              accepts=frozenset({"cpu_quota", "cpu_contention"}), plan=_quota, cores=1),
        Cause(name="neighbours", kinds=("measure", "watch"), weak=(2, 2.99), strong=(4, 6), unit="busy processes",
              accepts=frozenset({"cpu_contention"}), plan=_neighbours, cores=2),
        Cause(name="divergence", kinds=("stoker", "measure", "watch"), weak=(2, 5), strong=(100, 1000), unit="rate",
              accepts=frozenset({"diverged", "rate_too_high", "rate_lowered", "loss_spikes"}), plan=_rate, cores=2),
        Cause(name="low_rate", kinds=("stoker", "measure", "watch"), weak=(3e-7, 3e-6), strong=(1e-9, 1e-8),
              unit="rate", accepts=frozenset({"rate_too_low"}), plan=_rate, cores=2),
        Cause(name="hang", kinds=("measure", "watch"), weak=(0.1, 0.9), strong=(1, 1), unit="1: until the limit",
              accepts=frozenset({"collective_timeout", "hung"}), plan=_hang, cores=2),
        Cause(name="loader_crash", kinds=("stoker", "measure", "watch"), weak=(0.1, 0.9), strong=(1, 1),
              unit="1: the process", accepts=frozenset({"loader_worker_killed", "loader_worker_failed", "bad_pictures",
                                                        "ended_by_error", "quarantined_pictures"}),
              plan=_loader_crash, cores=2),
    )
}  # fmt: skip
