"""The faults that `diagnose.py` injects, as data: in which jobs, how large, how made, which findings are correct.

Kinds of jobs: `stoker` (`stoker train` on generated images), `measure` (a plain PyTorch loop in `stoker.measure`),
`watch` (the same loop under `stoker watch`), `keras` (a Keras fit under `stoker watch`), `simulated` (a job under
`stoker watch` with a simulated driver). A level is drawn within `weak` or `strong`; `unit` is its unit. `accepts` are
the ids of causes and failures that are correct, and PLACE: a finding that names a line of the fault.
`diagnose_plans.py` makes the faults.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.diagnosis import diagnose_driver as driver
from benchmarks.diagnosis import diagnose_plans as plans
from benchmarks.diagnosis.diagnose_inside import MetricsServer
from benchmarks.diagnosis.diagnose_plans import Case, Plan

Range = tuple[float, float]
KINDS = ("stoker", "measure", "watch", "keras", "simulated")
REAL = KINDS[:-1]


@dataclass(frozen=True, kw_only=True)
class Cause:
    name: str
    kinds: tuple[str, ...]
    weak: Range
    strong: Range
    unit: str
    accepts: tuple[str, ...]
    plan: Callable[[Case], Plan]
    function: Callable[..., object] | None = None
    """Of the job, all of whose lines are the fault."""
    known: bool = False
    """The injector of a plain job records how much time it took."""
    least_s: float = 0.0
    """Minimum length of the loop for the cause to be visible."""
    rests: bool = False
    """A strong fault leaves most of a core idle: another such job may run at the same time."""

    def name_of(self, finding: dict[str, Any]) -> str:
        """The id of a finding's cause, or PLACE."""
        if finding["cause"] != "heavy_place" or self.function is None:
            return str(finding["cause"])
        lines, first = inspect.getsourcelines(self.function)
        file = Path(inspect.getfile(self.function)).name
        is_fault = Path(finding["place"]).name in {f"{file}:{first + number}" for number in range(len(lines))}
        return PLACE if is_fault else "heavy_place"


PLACE = "the place"
WEAK, STRONG = (0.14, 0.25), (0.40, 0.65)
FRACTION = "fraction of the loop's time"
FEW_WEAK, FEW_STRONG = (0.34, 0.42), (0.50, 0.65)
"""One loader keeps a core busy, and the loop a part of another; if it waits less than this, no core of two is idle."""

_ROWS = (
    Cause(
        name="healthy", kinds=KINDS, weak=(0, 0), strong=(0, 0), unit="", accepts=(), plan=plans.healthy,
    ),
    Cause(
        name="slow_storage", kinds=REAL, weak=WEAK, strong=STRONG, unit=FRACTION, accepts=("slow_storage",),
        plan=plans.slow_storage, known=True, rests=True,
    ),
    Cause(
        name="slow_decode", kinds=("stoker", "measure", "watch"), weak=WEAK, strong=STRONG, unit=FRACTION,
        accepts=("slow_decode",), plan=plans.slow_decode, known=True,
    ),
    Cause(
        name="one_loader", kinds=("stoker", "measure", "watch"), weak=FEW_WEAK, strong=FEW_STRONG, unit=FRACTION,
        accepts=("too_few_workers",), plan=plans.one_loader, known=True,
    ),
    Cause(
        name="python_bound", kinds=("measure", "watch"), weak=WEAK, strong=STRONG, unit=FRACTION,
        accepts=("python_bound",), plan=plans.inside("python_bound"), known=True, least_s=20.0,
    ),
    Cause(
        name="tiny_batch", kinds=("stoker", "measure", "watch"), weak=(2, 2), strong=(1, 1), unit="images",
        accepts=("batch_too_small",), plan=plans.tiny_batch,
    ),
    Cause(
        name="host_wait", kinds=("measure", "watch"), weak=WEAK, strong=STRONG, unit=FRACTION,
        accepts=("host_device_syncs", PLACE), plan=plans.inside("host_wait"), known=True, rests=True,
        function=MetricsServer.log_to_server,
    ),
    Cause(
        name="leak", kinds=("measure", "watch", "keras"), weak=(20, 40), strong=(80, 150), unit="MB/s",
        accepts=("host_memory_leak",), plan=plans.inside("leak"), least_s=9.0,
    ),
    Cause(
        name="memory_kill", kinds=("measure", "watch"), weak=(400, 700), strong=(100, 200), unit="MB of room",
        accepts=("oom_killed",), plan=plans.memory_kill,
    ),
    Cause(
        name="disk_full", kinds=("stoker", "measure", "watch"), weak=(1.5, 3), strong=(0.3, 0.8), unit="MB of room",
        accepts=("disk_full", "storage_errors", "disk_nearly_full"), plan=plans.disk_full,
    ),
    Cause(
        name="small_shm", kinds=("measure", "watch"), weak=(900, 1500), strong=(32, 128), unit="kB",
        accepts=("shared_memory_full", "shared_memory_small"), plan=plans.small_shm,  # a weak fault need not end it
    ),
    Cause(
        name="straggler", kinds=("measure",), weak=WEAK, strong=STRONG, unit=FRACTION, accepts=("straggler",),
        plan=plans.inside("straggler", "--ranks", "2"), known=True,
    ),
    Cause(
        name="slow_link", kinds=("measure",), weak=WEAK, strong=STRONG, unit=FRACTION, accepts=("communication_bound",),
        plan=plans.slow_link, known=True,
    ),
    Cause(
        name="evaluation", kinds=("stoker", "measure", "keras"), weak=WEAK, strong=STRONG, unit=FRACTION,
        accepts=("evaluation_heavy",), plan=plans.evaluation, known=True, least_s=12.0,
    ),
    Cause(
        name="slow_checkpoint", kinds=("stoker", "measure", "watch"), weak=WEAK, strong=STRONG, unit=FRACTION,
        accepts=("checkpoint_heavy",), plan=plans.slow_checkpoint, known=True, rests=True,
    ),
    Cause(
        name="compile", kinds=("measure", "watch"), weak=WEAK, strong=STRONG, unit=FRACTION, accepts=("recompiles",),
        plan=plans.inside("compile"), known=True,
    ),
    Cause(
        name="oversubscription", kinds=("measure", "watch"), weak=(10, 14), strong=(24, 48), unit="threads",
        accepts=("threads_oversubscribed",), plan=plans.oversubscription,
    ),
    Cause(
        name="quota", kinds=("stoker", "measure", "watch"), weak=(0.6, 0.75), strong=(0.25, 0.4), unit="cores",
        accepts=("cpu_quota",), plan=plans.quota,
    ),
    Cause(
        name="neighbors", kinds=("measure", "watch"), weak=(2, 2), strong=(4, 6), unit="busy processes",
        accepts=("cpu_contention",), plan=plans.neighbors,
    ),
    Cause(
        name="divergence", kinds=REAL, weak=(2, 5), strong=(20, 95), unit="learning rate",
        accepts=("non_finite_loss", "diverged", "lr_too_high", "unstable_training"),
        plan=plans.learning_rate,
    ),
    Cause(
        name="low_lr", kinds=("stoker", "measure", "watch"), weak=(1e-7, 9e-7), strong=(1e-9, 1e-8),
        unit="learning rate", accepts=("lr_too_low",), plan=plans.learning_rate, least_s=9.0,
    ),
    Cause(
        name="hang", kinds=("measure", "watch"), weak=(0, 0), strong=(1, 1), unit="1: the exchange has a time limit",
        accepts=("hung", "collective_timeout"), plan=plans.hang,
    ),
    Cause(
        name="loader_crash", kinds=("measure", "watch"), weak=(9, 9), strong=(11, 11), unit="signal",
        accepts=("loader_worker_killed", "loader_worker_crashed"), plan=plans.inside("loader_crash", "--workers", "1"),
    ),
    Cause(
        name="bad_images", kinds=("stoker",), weak=(1, 1), strong=(24, 24), unit="of 64",
        accepts=("bad_images", "bad_records"), plan=plans.bad_images,
    ),
)  # fmt: skip


def _simulated(
    name: str, wrong: driver.Wrong, weak: Range, strong: Range, unit: str, *accepts: str, least_s: float = 0.0
) -> Cause:
    return Cause(
        name=f"{name} (simulated)", kinds=("simulated",), weak=weak, strong=strong, unit=unit, accepts=accepts,
        plan=plans.simulated(wrong), least_s=least_s, rests=True,
    )  # fmt: skip


SELDOM_S = 28.0
"""Counters that are read every ten seconds have been read three times then (recording/telemetry/gpu.py)."""

_SIMULATED = (
    _simulated("hot GPU", driver.hot, (0.25, 0.4), (0.7, 1), "fraction of the seconds", "gpu_clocks_low"),
    _simulated("power limit", driver.power_capped, (0.33, 0.4), (0.5, 0.65), "of the clock", "gpu_clocks_low"),
    _simulated("low clock", driver.clock_low, (0.38, 0.45), (0.55, 0.75), "of the clock", "gpu_clocks_low"),
    _simulated("slow PCIe", driver.pcie_degraded, (1, 1), (2, 4), "halvings", "pcie_degraded"),
    _simulated("ECC errors", driver.memory_errors, (30, 100), (1000, 5000), "a second", "gpu_errors",
               least_s=SELDOM_S),
    _simulated("Xid", driver.xid, (0, 0), (1, 1), "1: number 79, 0: 31", "gpu_errors", "gpu_fault"),
    _simulated("others on the GPU", driver.others, (0.33, 0.33), (1, 1), "fraction of the time", "gpu_shared",
               least_s=SELDOM_S),
    _simulated("few SMs", driver.underfilled, (0.78, 0.86), (0.9, 0.98), "without work", "gpu_oversized"),
    _simulated("no tensor cores", driver.no_tensor_cores, (0.005, 0.015), (0, 0), "of the time",
               "tensor_cores_unused"),
    _simulated("GPU memory grows", driver.memory_grows, (100, 300), (800, 1500), "MB/s", "gpu_memory_leak",
               least_s=12.0),
)  # fmt: skip

CAUSES: dict[str, Cause] = {cause.name: cause for cause in (*_ROWS, *_SIMULATED)}
