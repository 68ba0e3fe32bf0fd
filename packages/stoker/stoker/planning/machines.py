"""The accelerators and machines that a training can be planned for: those of GCP and AWS, the user's, and this one.

Peaks of GPUs are those of data sheets (`knowledge/gpus.toml`), of the present CPU they are measured. On-demand prices
come from `stoker_watch/hardware/prices.py`; `knowledge/machines.toml` has what is needed besides. Not here: what a step
needs (`trace.py`), how much of a peak it reaches (`predict.py`), and how fast a machine trains (`duration.py`).
"""

import functools
import re
import statistics
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import psutil

from stoker.config.settings import read_user_toml
from stoker.knowledge import read_toml
from stoker_watch.errors import ConfigError, UsageError, nearest
from stoker_watch.hardware.cgroup import host_cores, host_memory
from stoker_watch.hardware.prices import AS_OF, CURRENCY, REGIONS, machine_price

if TYPE_CHECKING:
    from stoker.hardware.device import Device

THIS_MACHINE = "this"
"""The name under which the present machine is planned for."""
GIB, GB, TERA = 2**30, 10**9, 10**12

Case = Literal["low", "expected", "high"]
_OPPOSITE: dict[Case, Case] = {"low": "high", "expected": "expected", "high": "low"}


class Estimate(msgspec.Struct, frozen=True):
    """A number that is not known exactly: low <= expected <= high, in the unit of the quantity."""

    low: float
    expected: float
    high: float

    def time(self, case: Case) -> float:
        """The value that makes a run short at its low end, of an input that makes it longer the larger it is."""
        value: float = getattr(self, case)
        return value

    def rate(self, case: Case) -> float:
        """The same of an input that makes a run shorter the larger it is."""
        return self.time(_OPPOSITE[case])

    def scaled(self, factor: float) -> "Estimate":
        """Times a number from 0 on."""
        return Estimate(self.low * factor, self.expected * factor, self.high * factor)


def exactly(value: float) -> Estimate:
    return Estimate(value, value, value)


# Accelerators


class Accelerator(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kind of device. Peaks are those of dense arithmetic, without structured sparsity."""

    key: str
    """a100-40; stable, for scripts."""
    name: str
    """NVIDIA A100 40 GB."""
    flops: dict[str, float]
    """Peak operations per second by type of arithmetic, fp32, tf32, bf16, fp16: those that the device has."""
    half_fraction: float = 1.0
    """The part that it reaches in bf16 and fp16 of the fraction of its peak that it reaches in fp32."""
    bandwidth: float
    """Peak bytes per second of its memory."""
    memory_bytes: int
    """Memory of the device; of a CPU, the host's within its cgroup."""
    is_cpu: bool = False
    threads: int = 1
    """Threads that a step computes with, of a CPU."""
    pattern: str = ""
    """Regular expression, all of which the name that the driver reports has to match. Empty for a CPU."""
    google: str = ""
    """Its name in Vertex AI; empty where it has none."""
    source: str
    """Where the figures come from."""

    def precision(self) -> str:
        """The precision that training takes by default (`Device.best_precision`)."""
        return next((name for name in ("bf16", "fp16") if name in self.flops), "fp32")

    def peak_flops(self, precision: str, *, is_convolution: bool) -> float:
        """Peak operations per second of convolutions or matrix products under autocast to a precision.

        cuDNN computes fp32 convolutions in TF32 where the GPU has it, matrix products stay in fp32: torch's defaults
        of `torch.backends.cudnn.allow_tf32` and `torch.backends.cuda.matmul.allow_tf32`.
        """
        if precision != "fp32" and precision in self.flops:
            return self.flops[precision]
        return self.flops.get("tf32", self.flops["fp32"]) if is_convolution else self.flops["fp32"]

    def matches(self, device_name: str) -> bool:
        """Whether this is the device of that name, as the driver reports it (of a CPU: as the kernel does)."""
        if self.is_cpu:
            return device_name == self.name
        return re.fullmatch(self.pattern, device_name, re.IGNORECASE) is not None


def _read_gpu(key: str, row: dict[str, Any]) -> Accelerator:
    fields = {
        "key": key,
        "flops": {precision: value * TERA for precision, value in row.pop("teraflops").items()},
        "bandwidth": row.pop("gb_per_s") * GB,
        "memory_bytes": int(row.pop("memory_gib") * GIB),
    }
    return msgspec.convert(fields | row, Accelerator)


GPUS = {key: _read_gpu(key, row) for key, row in read_toml("gpus.toml").items()}
"""Key → GPU, those of `knowledge/gpus.toml`."""


def find_accelerator(key: str) -> Accelerator:
    """The accelerator with this key; `cpu` is the present one, which is measured. Raises UsageError."""
    if key == "cpu":
        return measure_cpu()
    if key.lower() not in GPUS:
        raise UsageError(f"There is no accelerator {key!r} in the table.", choices=("cpu", *GPUS))
    return GPUS[key.lower()]


def identify(device_name: str) -> Accelerator | None:
    """The GPU of a name as the driver reports it; None: it is not in the table."""
    return next((gpu for gpu in GPUS.values() if gpu.matches(device_name)), None)


MATRIX_SIDE, COPY_BYTES = 1024, 64 * 2**20
"""Sizes of the micro-benchmark. The copy is larger than what a core has of a server's caches."""
ROUNDS = 5


def measure_cpu(*, clock: Callable[[], float] = time.perf_counter) -> Accelerator:
    """The present CPU with the threads that torch uses now: a matrix product and a copy, in half a second.

    clock: seconds; `time.process_time` for one thread on a busy machine.
    """
    import torch  # the table is read where torch is absent

    from stoker.hardware.device import Device

    device = Device(torch.device("cpu"))
    threads = torch.get_num_threads()
    precisions = {"fp32": torch.float32}
    if (best := device.best_precision()[0]) == "bf16":
        precisions[best] = torch.bfloat16
    flops = {}
    for name, dtype in precisions.items():
        a, b = (torch.full((MATRIX_SIDE, MATRIX_SIDE), 0.5, dtype=dtype) for _ in range(2))
        out = torch.empty_like(a)
        flops[name] = 2 * MATRIX_SIDE**3 / _seconds(functools.partial(torch.mm, a, b, out=out), clock)
    source, target = (torch.zeros(COPY_BYTES // 4) for _ in range(2))
    return Accelerator(
        key="cpu",
        name=device.name,
        flops=flops,
        bandwidth=2 * COPY_BYTES / _seconds(lambda: target.copy_(source), clock),
        memory_bytes=device.memory().total,
        is_cpu=True,
        threads=threads,
        source=f"measured here: a product of two {MATRIX_SIDE} × {MATRIX_SIDE} matrices, a copy of "
        f"{COPY_BYTES // 2**20} MiB, {threads} threads",
    )


def _seconds(work: Callable[[], object], clock: Callable[[], float]) -> float:
    """Median of some runs, after one that warms up."""
    work()
    return statistics.median(timeit.repeat(work, timer=clock, number=1, repeat=ROUNDS))


# Machines


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """How GPUs of a machine exchange gradients."""

    name: str
    gb_per_s: Estimate
    """Bus bandwidth of an all-reduce, 1e9 bytes per second in each direction."""
    latency_us: Estimate
    """Microseconds of one message between two neighbors."""
    source: str


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A machine type. Prices are in US dollars per hour for the whole machine; None: unknown."""

    name: str
    cloud: str
    """GCP or AWS; empty for the user's own."""
    accelerator: str
    """Key in the table of accelerators; `cpu` for this machine without a GPU."""
    gpus: int
    """Accelerators of the machine; 1 for a CPU."""
    vcpus: float
    memory_gib: float
    ssd_gb: float = 0
    """Local SSDs that are part of the machine."""
    network_gbit: float = 10
    """Sustained network bandwidth."""
    link: str = "pcie4"
    """Key of LINKS; `none` for one GPU."""
    price: float | None = None
    """Price on demand."""
    spot_price: Estimate | None = None
    """From the user's file; the table has none."""
    source: str = ""

    @property
    def is_this(self) -> bool:
        return self.name == THIS_MACHINE


def describe_prices() -> str:
    """Where and of when the prices of the table are, a clause."""
    regions = " and ".join(f"{cloud} {region}" for cloud, region in REGIONS.items())
    return f"list prices of {regions}, {CURRENCY}, on demand as of {AS_OF}"


@functools.cache
def links() -> dict[str, Link]:
    """The links between GPUs, by key."""
    rows = read_toml("machines.toml")["links"]
    bands = {name: {key: Estimate(*row[key]) for key in ("gb_per_s", "latency_us")} for name, row in rows.items()}
    return {name: Link(**row | bands[name]) for name, row in rows.items()}


@functools.cache
def listed_machines() -> dict[str, Machine]:
    table = read_toml("machines.toml")
    columns = table["columns"]
    return {name: _listed(name, dict(zip(columns, row, strict=True)), table) for name, row in table["machines"].items()}


def find_machine(machine_type: str, gpu: str | None = None) -> Machine | None:
    """The row of a machine type; of an `n1-…` without its GPU, the one with this GPU, by our name or that of a cloud
    (t4, nvidia-tesla-t4). None: it is not in the table."""
    machines = listed_machines()
    if machine_type in machines or gpu is None:
        return machines.get(machine_type)
    key = re.escape(re.sub(r"^nvidia-(tesla-)?", "", gpu.lower()))
    names = (name for name in machines if re.fullmatch(rf"{re.escape(machine_type)}\+(\d+x)?{key}", name))
    return next((machines[name] for name in names), None)


def _listed(name: str, row: dict[str, Any], table: Mapping[str, Any]) -> Machine:
    base, _, added = name.partition("+")
    gpu = re.sub(r"^\d+x", "", added).upper() or None
    price = machine_price(base, gpu, row["gpus"])
    changes = {"price": None if price is None else price.low * row["gpus"], "source": table["sources"][row["source"]]}
    return Machine(name=name, cloud="AWS" if "." in base else "GCP", **row | changes)


def choose_machines(
    names: Sequence[str], *, machines: Mapping[str, Machine], this: Machine | None = None
) -> list[Machine]:
    """The machines of these names, each once; without names this one and all others. machines: the table with the
    user's additions; this: the present machine, None if it cannot be planned for. Raises UsageError."""
    known = {**({THIS_MACHINE: this} if this is not None else {}), **machines}
    if not names:
        return list(known.values())
    chosen = {}
    for name in names:
        key = name.strip().lower().rpartition("/")[2]
        by_lower_case = {known_name.lower(): known_name for known_name in known}
        if key not in by_lower_case:
            near = nearest(key, by_lower_case)
            raise UsageError(
                f"There is no machine {name!r}" + (f"; did you mean {by_lower_case[near]!r}?" if near else "."),
                choices=[other for other in known if other[:2] == key[:2]] or list(known),
                fix="name a machine of the table (docs/plan.md), or describe it in a file: --prices FILE",
            )
        chosen[by_lower_case[key]] = known[by_lower_case[key]]
    return list(chosen.values())


def this_machine(device: "Device", price_per_device_hour: float | None = None) -> Machine | None:
    """The present machine with `device`; None if its GPU is not in the table. A price of 0 or None is unknown."""
    accelerator = None if device.is_cpu else identify(device.name)
    if not device.is_cpu and accelerator is None:
        return None
    limit_bytes, _ = host_memory()
    return Machine(
        name=THIS_MACHINE,
        cloud="",
        accelerator="cpu" if accelerator is None else accelerator.key,
        gpus=1,
        vcpus=host_cores(),
        memory_gib=limit_bytes / GIB,
        ssd_gb=psutil.disk_usage("/").free / 1e9,
        link="none",
        price=price_per_device_hour or None,
        source="this machine, as the operating system describes it",
    )


_Count = Annotated[int, msgspec.Meta(ge=1, lt=10**9)]
_Size = Annotated[float, msgspec.Meta(ge=1, lt=1e9)]
_Amount = Annotated[float, msgspec.Meta(ge=0, lt=1e9)]


class _UserMachine(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A table of the user's file. The first five are required of a machine that is not in the table."""

    accelerator: Literal[tuple(GPUS)] | None = None  # type: ignore[valid-type]
    gpus: _Count | None = None
    vcpus: _Size | None = None
    memory_gib: _Size | None = None
    price: _Amount | None = None
    spot_price: _Amount | None = None
    ssd_gb: _Amount | None = None
    network_gbit: _Amount | None = None
    link: str | None = None


def read_prices(path: Path, machines: Mapping[str, Machine]) -> dict[str, Machine]:
    """`machines` with the prices and the machines of the user's TOML file (docs/plan.md describes it). Raises
    ConfigError, which names the file, the machine and the valid choices."""
    example = '["a2-highgpu-1g"] in one line, price = 2.90 in the next'
    _, tables = read_user_toml(path, "The file of prices", fix=example)
    result = dict(machines)
    for name, row in tables.items():
        if name == THIS_MACHINE:
            fix = "--price-per-device-hour PRICE"
            raise ConfigError("This machine has no row in a file of prices.", location=path, fix=fix)
        try:
            msgspec.convert(row, _UserMachine)
        except msgspec.ValidationError as error:
            what, fix = f"[{name}] is not a machine.", 'a name with a dot is in quotes: ["g5.xlarge"]'
            choices = [*_UserMachine.__struct_fields__, "accelerator = …", *GPUS]
            raise ConfigError(what, location=path, cause=str(error), choices=choices, fix=fix) from error
        if "link" in row and row["link"] not in links():
            raise ConfigError(f"[{name}] has no link {row['link']!r}.", location=path, choices=links())
        required = _UserMachine.__struct_fields__[:5]
        missing = [key for key in required if key not in row]
        if name not in machines and missing:
            near = nearest(name, machines)
            what = f"{name!r} is not in the table of machines, and its row lacks {', '.join(missing)}."
            raise ConfigError(what, location=path, fix="add them, or correct the name" + (f": {near}?" if near else ""))
        known = machines.get(name) or Machine(
            name=name, cloud="", link="none" if row["gpus"] == 1 else "pcie4", **{key: row[key] for key in required}
        )
        spot = {"spot_price": exactly(row["spot_price"])} if "spot_price" in row else {}
        result[name] = msgspec.structs.replace(known, **row | spot, source=str(path))
    return result
